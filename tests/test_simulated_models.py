"""Whole models on simulated devices: every exchange, order, codec, arrival, ring, chunks and guidance gives the CPU's
bits there, and every access to memory is ordered."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from covering import covering_set
from seams import kernels_of_parts
from test_bands import both_ways, random_latents, random_vae
from tiny_models import FAMILIES
from torch.utils import _pytree as pytree
from value_tables import beside

from cocodiff.comm import loopback
from cocodiff.comm.launch import Launch
from cocodiff.engine import engine
from cocodiff.engine.decoding import share_vae
from cocodiff.engine.engine import parallelize
from cocodiff.kernels import lossless

STEPS = 3
VALUES = beside(__file__)
SELECTIONS: dict[str, dict[str, Any]] = VALUES["selections"]
# family and calls of a step: without guidance, with both branches in one call, with a call for each
CALLS = {"unguided": ("sd3", 1, 1), "one call": ("sd3", 1, 2), "two calls": ("flux", 2, 2)}
AXES = (
    (4, 3, 2),
    ("tapa", "split", "flat"),
    ("v_first", "joint"),
    tuple(SELECTIONS),
    ("now", "displaced", "adaptive"),
    (1, 2),  # chunks
    (1, 2),  # ranks of a ring, and its kind where it is not of keys
    tuple(CALLS),
    (None, 2),  # ranks on a node
)


def fits(
    size: int, exchange: str, _: str, codec: str, arrival: str, chunks: int, ring: int, calls: str, node: Any
) -> bool:
    """Whether the settings go together, and leave something to be sent."""
    parts = ring * CALLS[calls][2]
    if size % parts or size // CALLS[calls][2] < 2 or (node is not None and size < 4) or (chunks > 1 and size < 3):
        return False
    if SELECTIONS[codec].get("selection") == "v_major" and arrival != "now":
        return False
    return codec != "by card" or exchange == "tapa"


FURTHER, LARGE = ([tuple(case) for case in VALUES[name]] for name in ("further", "large"))
CASES = [*covering_set(*AXES, fits=fits), *FURTHER]
# What a device's library does with batches, see `on_devices`.
HABITS: list[dict[str, Any]] = [{}, {"each_alone": True}, {"each_alone": True, "known": True}]

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@cache
def model_of(family: str) -> Any:
    return FAMILIES[family][0](6).requires_grad_(False)


def outputs_of(transport: Any, settings: dict[str, Any], family: str, calls: int) -> torch.Tensor:
    """A model's outputs over a few steps of an input that moves, so many calls each, on this rank's device."""
    device, outputs = transport.device, []
    dtype = torch.bfloat16 if settings.get("codec") == "lossless" else torch.float32
    own, inputs_of = copy.deepcopy(model_of(family)).to(device, dtype), FAMILIES[family][1]
    inputs = [inputs_of(2 if family == "sd3" else 1, 4, 5, text) for text in (3, 5)[:calls]]
    with parallelize(own, transport=transport, kernels="torch", **settings):
        for step in range(STEPS):
            moment = {"timestep": torch.full_like(inputs[0]["timestep"], 0.9 - 0.2 * step)}
            moment["hidden_states"] = inputs[0]["hidden_states"] * (1 + 0.1 * step)
            of_step = [
                own(**{name: placed(x, device, dtype) for name, x in (call | moment).items()}, return_dict=False)[0]
                for call in inputs
            ]
            outputs += [output * 1 for output in of_step]  # the host waits for nothing between steps
    return torch.stack([output.cpu() for output in outputs])


def placed(x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return x.to(device, dtype if x.is_floating_point() else x.dtype)


def in_one_launch(codes: Callable[..., None], written: int, *arguments: Any) -> None:
    """An operation of the lossless codec as one of the device, which the kernels are: its torch form goes token by
    token, and to follow each of its operations takes minutes. written: of how many arguments, the known one first."""
    from simulated_device import host_view, launch

    flat, shape = pytree.tree_flatten(arguments)
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    if tensors[0].device.type == "cpu":
        codes(*arguments)
        return
    known = next(one for one in arguments if isinstance(one, lossless.Known))
    outputs = [known.written, *[x for x in arguments if isinstance(x, torch.Tensor)][1:written]]
    here = pytree.tree_unflatten([host_view(x) if isinstance(x, torch.Tensor) else x for x in flat], shape)
    stream = torch.get_device_module(tensors[0].device).current_stream(tensors[0].device)
    launch(stream, codes.__name__, tensors, outputs, lambda: codes(*here))


def code_in_one_launch(patch: pytest.MonkeyPatch) -> None:
    for codes, written in ((lossless.encode_lossless, 4), (lossless.decode_lossless, 1)):
        patch.setattr(lossless, codes.__name__, partial(in_one_launch, codes, written))


@contextlib.contextmanager
def at_case(case: tuple[Any, ...]) -> Iterator[tuple[int, dict[str, Any], str, int]]:
    """The ranks, settings, family and calls of a step, for so long as the world is the case's."""
    size, exchange, order, codec, arrival, chunks, ring, kind, node = case
    family, calls, parts = CALLS[kind]
    settings = {"exchange": exchange, "order": order, "arrival": arrival, "chunks": chunks}
    settings["ring"], settings["ring_kind"] = ring if isinstance(ring, list) else (ring, "keys")
    model_of(family)  # once, before there are threads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "detect", lambda: Launch(local_size=node))
        patch.setitem(kernels_of_parts(), "sim", kernels_of_parts()["cpu"])
        code_in_one_launch(patch)
        yield size, settings | {"guidance_parallel": parts, **SELECTIONS[codec]}, family, calls


def on_devices(
    simulated: Any,
    size: int,
    work: Callable[[Any], Any],
    late: float = 0.004,
    each_alone: bool = False,
    known: bool = False,
    node_of: Sequence[int] = (),
    **devices: Any,
) -> list[Any]:
    """What ranks with a device each return, whose every access to memory was ordered. late: seconds by which a rank may
    come late to any batch. each_alone: whether the library makes a group of each message; known: whether
    the transport expects that. node_of: the node of each rank, as the transport finds it."""
    from simulated_device.ranks import SimulatedTransport, run_ranks

    class Late(SimulatedTransport):
        late_s = late

    Late.each_alone, Late.one_by_one, Late.node_of = each_alone, known, node_of

    with simulated.devices(size, strict=True, **devices) as found:
        of_ranks = run_ranks(size, work, Late)
    assert found.reports == []
    return of_ranks


def check(simulated: Any, case: tuple[Any, ...], late: float = 0.0, messages: str = "auto", **library: Any) -> None:
    """messages: see `Config.messages`. library: see `on_devices`."""
    processes: list[Any] = []

    def work(transport: Any) -> torch.Tensor:
        outputs = outputs_of(transport, settings | {"messages": messages}, family, calls)
        processes.append(transport.process)
        return outputs

    node_of = [] if case[-1] is None else [rank // case[-1] for rank in range(case[0])]
    with at_case(case) as (size, settings, family, calls):
        expected = loopback.run_ranks(size, lambda transport: outputs_of(transport, settings, family, calls))
        of_ranks = on_devices(simulated, size, work, late, **{"node_of": node_of} | library)
    # In stages, and where each rank has all of a sequence, nothing is posted together by the setting.
    together = settings["chunks"] == 1 and size // settings["guidance_parallel"] > settings["ring"]
    posted = any(process.together for process in processes)
    assert posted == (library.get("known", False) or (messages == "alltoall" and together))
    assert all(torch.equal(outputs, expected[0]) for outputs in of_ranks)
    staged = messages_that_nodes_keep(processes, node_of)
    assert bool(staged) == (bool(node_of) and library.get("node_of") == [])


def messages_that_nodes_keep(processes: Sequence[Any], node_of: Sequence[int]) -> list[Any]:
    """Those between ranks of a node in a group that has others too, which oneCCL passes through the host's memory: but
    for the byte in the place of nothing, in a call of all."""
    sent = [message for process in processes for message in process.sent if node_of and message.size > 1]
    spanning = [message for message in sent if len({node_of[rank] for rank in message.members}) > 1]
    return [message for message in spanning if node_of[message.sender] == node_of[message.receiver]]


LIBRARIES: dict[str, dict[str, Any]] = VALUES["libraries"]


@pytest.mark.sample(8)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: "-".join(map(str, case)))
def test_the_cpus_bits_no_access_without_an_order_and_no_wait_without_end(simulated, case, library):
    """See `simulated_device.ranks`."""
    check(simulated, case, **LIBRARIES[library])


@pytest.mark.parametrize("library", [{}, {"each_alone": True, "known": True}], ids=["batches", "all-to-alls"])
def test_where_nodes_are_not_told_apart_bits_are_the_same(simulated, library):
    """And messages of a node go with all others, which is noticed where they should not."""
    case = (4, "split", "v_first", "whole", "now", 1, [4, "streaming"], "unguided", 2)
    check(simulated, case, node_of=[], **library)


@pytest.mark.sample(3)
@pytest.mark.parametrize("library", HABITS, ids=lambda habit: "-".join(habit) or "batches")
@pytest.mark.parametrize("split", [((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=str)
def test_replicas_beside_each_other_in_a_library_that_blocks(simulated, split, library):
    """Each has the CPU's bits, as if it were alone."""

    def work(transport: Any) -> torch.Tensor:
        own = next(ranks for ranks in split if transport.rank in ranks)
        return outputs_of(transport.part(own), settings, family, calls)

    codec = "v_major" if split[0] == (0, 1) else "lossless"  # which tokens stay is decided by card
    with at_case((2, "tapa", "v_first", codec, "now", 1, 1, "unguided", None)) as (size, settings, family, calls):
        expected = loopback.run_ranks(size, lambda transport: outputs_of(transport, settings, family, calls))
        of_ranks = on_devices(simulated, 4, work, **library)
    assert all(torch.equal(outputs, expected[0]) for outputs in of_ranks)


@pytest.mark.parametrize("library", HABITS, ids=lambda habit: "-".join(habit) or "batches")
@pytest.mark.sample(4)
@pytest.mark.parametrize("how", ["one", "all", "tiled", "sharded"])
def test_a_vae_is_shared_in_a_library_that_blocks(simulated, how, library):
    """Decoded and encoded as on CPUs, up to the rounding of its convolutions."""
    vae, latents = random_vae("kl"), random_latents("kl", 1, 9, 7)

    def work(transport: Any) -> list[torch.Tensor]:
        own = copy.deepcopy(vae).to(transport.device)
        own.use_tiling = how == "tiled"
        undo = [*share_vae(own, how, transport)]
        found = both_ways(own, latents.to(transport.device))
        for take_off in undo:
            take_off()
        return [x.cpu() for x in found]

    for one, other in zip(on_devices(simulated, 3, work, **library), loopback.run_ranks(3, work), strict=True):
        assert all(map(partial(torch.allclose, atol=1e-5), one, other))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_same_with_operations_that_start_late(simulated, case, seed):
    check(simulated, case, delayed=0.3, seed=seed)
