"""Every message that an attention call has posted is waited for: a send that nobody waits for changes no number here,
but on a device its memory may be written over while it leaves."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from residual_worlds import RUN, Ranks, World
from tiny_models import sd3_inputs, sd3_transformer
from worlds import topology_of

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.loopback import LoopbackGroup, run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.config.config import Config
from cocodiff.engine.assemble import build_strategy
from cocodiff.engine.engine import parallelize
from cocodiff.exchange.messages import InFlight, Target
from cocodiff.kernels import Kernels
from cocodiff.topology.axes import Mesh


class Watched:
    """A transfer that notes who has waited for it."""

    def __init__(self, pending: Any, unwaited: set[Watched], rank: int) -> None:
        self.rank, self._pending, self._unwaited = rank, pending, unwaited
        unwaited.add(self)

    def wait(self) -> None:
        self._pending.wait()
        if threading.current_thread().name == "lane-plane":
            time.sleep(0.005)  # so that who does not wait for the lane has gone on by then
        self._unwaited.discard(self)


ROUTES: dict[str, dict[str, Any]] = {
    "flat": {"exchange": "flat"},
    "tapa": {"exchange": "tapa"},
    "split": {"exchange": "split"},
    "chunks": {"exchange": "split", "chunks": 3},
    "chunks of tapa": {"exchange": "tapa", "chunks": 2, "order": "v_first"},
    "lossless": {"exchange": "tapa", "codec": "lossless"},
    "ring": {"exchange": "flat", "ring": 2},
    "ring and chunks": {"exchange": "split", "ring": 2, "chunks": 2},
}


@pytest.fixture
def unwaited(monkeypatch: pytest.MonkeyPatch) -> set[Watched]:
    """The transfers of all loopback ranks that nobody has waited for."""
    post, found = LoopbackGroup.send_recv, set[Watched]()

    def send_recv(group: LoopbackGroup, sends: Any, recvs: Any) -> Watched:
        return Watched(post(group, sends, recvs), found, group.ranks[group.index])

    monkeypatch.setattr(LoopbackGroup, "send_recv", send_recv)
    return found


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", ROUTES)
def test_no_message_is_left_when_a_call_ends(
    name: str, ahead: bool, unwaited: set[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(4, heads=6, image=24)
    monkeypatch.setattr(LoopbackGroup, "receives_ahead", ahead)
    Ranks(world, **ROUTES[name]).attend([(call, world.tensors(call)) for call in RUN[:2]])
    assert not unwaited


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "cocodiff+", "steps": 4},
        {"preset": "coded"},
        {"preset": "split", "arrival": "displaced"},
        {"preset": "split", "codec": "int4", "arrival": "adaptive", "chunks": 2},
        {"preset": "flat", "ring": 2, "ring_kind": "token"},
        {"preset": "flat", "ring": 2, "ring_kind": "streaming"},
        {"preset": "tapa", "weights": "node"},
        {"preset": "tapa", "step_cache": "first_block"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_no_message_is_left_when_an_engine_is_left(settings: dict[str, Any], unwaited: set[Watched]) -> None:
    """Neither what no call waits for, nor what ranks decide by, nor weights."""
    model = sd3_transformer(4).to(torch.bfloat16)
    inputs = sd3_inputs(1, 2, 2, 3, torch.bfloat16)

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, **settings):
            for step in range(3):
                own(**inputs | {"timestep": torch.full_like(inputs["timestep"], 0.9 - 0.1 * step)})
        assert transport.rank not in [one.rank for one in [*unwaited]]

    run_ranks(2, work)
    assert not unwaited


def test_a_layer_that_is_forgotten_has_received_what_was_late(unwaited: set[Watched]) -> None:
    """As where another part of the ranks computes its next call."""
    world, config = World(2), Config(arrival="displaced", exchange="flat")

    def work(transport: Any) -> None:
        mesh, key = Mesh.build(topology_of("local", 2), 1), LayerKey("layer")
        strategy = build_strategy(config, mesh, transport, Trace(transport.rank), Kernels("torch"))
        for call in RUN[:3]:
            rows = world.layout(call).row_slices[transport.rank]
            strategy.codec.begin_step(call.moment)
            q, k, v = (lambda x=x[:, rows]: x for x in world.tensors(call))
            strategy.attend(LazyQKV(q, k, v, world.segments(call), world.heads), key)
        strategy.codec.forget(key)
        assert transport.rank not in [one.rank for one in [*unwaited]] and not strategy.codec.bytes_held()

    run_ranks(2, work)


def test_a_chunk_of_the_output_that_cannot_be_put_in_place_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: here the first of three on each rank."""
    world, land, seen = World(4, heads=6, image=24), InFlight.land, set[int]()
    whole = sum(world.layout(RUN[0]).rows)

    def fail_at_first(flight: InFlight, target: Target) -> None:
        (x_BLHW,) = target.tensors
        if x_BLHW.shape[1] < whole and id(x_BLHW) not in seen:
            seen.add(id(x_BLHW))
            raise RuntimeError("out of memory")
        land(flight, target)

    monkeypatch.setattr(InFlight, "land", fail_at_first)
    with pytest.raises(RuntimeError, match="out of memory"):
        Ranks(world, **ROUTES["chunks"]).attend([(RUN[0], world.tensors(RUN[0]))])
