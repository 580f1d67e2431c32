"""What V-Major's choice of tokens launches on a device with kernels, counted on the simulated one: what plans count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from attention_worlds import Call, World
from seams import watch_choosing

from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.engine.assemble import build_strategy, codec_class
from cocodiff.exchange.codec import CallKind
from cocodiff.kernels import Kernels, Rows, TorchOps
from cocodiff.kernels.residual import Candidates, RowOrder
from cocodiff.topology.axes import Mesh

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
CALLS = [Call(step, steps=4) for step in range(4)]  # the first one is whole, and the second makes the tables
MESSAGES = "messages"  # the library's, which plans price apart


def changed(value: Any, change: Any) -> Any:
    """An operation's argument or result with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Candidates | RowOrder):
        return type(value)(*(changed(one, change) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(changed(one, change) for one in value)
    if isinstance(value, Rows):
        return replace(value, **{of.name: changed(getattr(value, of.name), change) for of in fields(value)})
    return value


class AsKernels(Kernels):
    """Operations that are one launch each, as SYCL's are (`test_choosing_is_a_launch_for_each_operation`)."""

    def _run(self, op: str, *arguments: Any, **named: Any) -> Any:
        from simulated_device import host_view, launch

        tensors, run = list[torch.Tensor](), getattr(TorchOps(), op)
        changed(arguments, tensors.append)
        device = tensors[0].device
        if device.type == "cpu" or op not in ("l1_score", "unpack", "choose", "compact"):
            return super()._run(op, *arguments, **named)
        sized = run(*changed(arguments, lambda x: torch.zeros(x.shape, dtype=x.dtype)))
        results = changed(sized, lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
        here, written = changed((arguments, results), host_view), list[torch.Tensor]()
        changed(results if op != "unpack" else arguments[1], written.append)

        def work() -> None:
            pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (here[1], run(*here[0]))), strict=True)
            for out, found in pairs:
                if out is not None:
                    out.copy_(found)

        launch(torch.get_device_module(device).current_stream(device), op, tensors, written, work)
        return results


@pytest.mark.parametrize("reference", ["prev", "sent"])
@pytest.mark.parametrize("schedule", ["fixed", "threshold"])
@pytest.mark.parametrize("scoring", ["source", "card"])
def test_choosing_takes_the_launches_and_waits_that_plans_count(
    simulated: Any, scoring: str, schedule: str, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rank that launches most, on cards of two tiles with unlike numbers of tokens."""
    from simulated_device.ranks import run_ranks

    how = {"schedule": schedule, "scoring": scoring, "reference": reference, "exchange": "tapa", "order": "v_first"}
    config = Config(selection="v_major", warmup=1, sync_interval=0, steps=4, **how)
    world, counted = World(4, 13, 29), list[list[str]]()

    def count(choose: Callable[[], Any]) -> Any:
        simulated.take_launched()
        selection = choose()
        counted.append([name for name in simulated.take_launched() if name != MESSAGES])
        return selection

    def work(transport: Any) -> None:
        mesh, trace = Mesh.build(world.topology), Trace(transport.rank)
        strategy = build_strategy(config, mesh, RankContext(transport, world.topology, trace, AsKernels("torch")))
        for call in CALLS:
            strategy.codec.begin_step(call.step_info)
            tensors = [x.to(transport.device) for x in world.tensors(call)]
            strategy.attend(world.qkv(call, tensors, transport.rank), call.layer)

    watch_choosing(monkeypatch, count)
    with simulated.devices(4, strict=True) as found:
        run_ranks(4, work)
    assert found.reports == []
    last = counted[-4:]
    launches, _, waits = codec_class(config)(config).choosing(CallKind(stable=0.5), tiles=2)
    assert max(len(names) - names.count("wait") for names in last) == launches
    assert {names.count("wait") for names in last} == {waits}
