"""The lossless codec: the same bits as tensors that travel whole, whatever the data, the ranks and the routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_worlds import LAYER, RUN, TROUBLED, Call, OfRank, Ranks, World
from covering import examples
from hypothesis import given, strategies
from test_simulated_models import code_in_one_launch, on_devices
from torch import Tensor
from value_tables import beside

from cocodiff.attention import lossless as codecs
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.engine.assemble import build_strategy
from cocodiff.kernels import Kernels
from cocodiff.kernels.lossless import PARTS
from cocodiff.topology.axes import Mesh

ROUTES = beside(__file__)
KINDS = ("curves", "noise", "constant", "jumps", "odd", "still")
AS_IF = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Data(World):
    """kind: of numbers. noise: any bits but of what is not finite, for attention would lose all others; odd: zeros of
    both signs, denormal numbers, infinities and NaN; jumps: other tensors at every third call."""

    kernels: str = "auto"  # torch's form gives the same bits, as tests/kernels shows, and takes 20 times as long
    kind: str = "curves"

    def tensors(self, call: Call) -> list[Tensor]:
        curves = super().tensors(call)
        generator = torch.Generator().manual_seed(97 * call.step + call.run)
        if self.kind in ("noise", "odd") or (self.kind == "jumps" and call.step % 3 == 0):
            return [self._of_bits(x, generator) for x in curves]
        if self.kind == "constant":
            return [torch.full_like(x, 0.25) for x in curves]
        return curves if self.kind == "curves" or call.step < 2 else super().tensors(Call(1, call.run, call.text))

    def _of_bits(self, like: Tensor, generator: torch.Generator) -> Tensor:
        as_if = AS_IF[like.dtype]
        bits = torch.randint(-(2**15), 2**15, like.shape, generator=generator).to(as_if)
        x = bits.view(like.dtype) if as_if == torch.int16 else bits.float()
        if self.kind != "odd":
            return x.nan_to_num(1.0, 2.0, -2.0).clamp(-100, 100)
        tiny = torch.finfo(like.dtype).tiny / 4
        pick = torch.randint(0, 40, like.shape, generator=generator)
        for number, value in enumerate((0.0, -0.0, tiny, -tiny)):
            x = torch.where(pick % 8 == number, torch.full_like(x, value), x)
        return x


def same_bits(world: World, calls: list[Call], delayed: bool = False, **settings) -> list[tuple[OfRank, OfRank]]:
    """Of each rank with the codec and without, once it is shown that outputs have the same bits."""
    whole = Ranks(world, **settings).call(calls)
    coded = Ranks(world, delayed, codec="lossless", **settings).call(calls)
    as_if = AS_IF[world.dtype]
    for rank, ((expected, *_), (found, *_)) in enumerate(zip(whole, coded, strict=True)):
        for number, (one, two) in enumerate(zip(expected, found, strict=True)):
            # Which NaN attention gives for NaN depends on where its operands lie in memory.
            equal = (one.view(as_if) == two.view(as_if)) | (one.isnan() & two.isnan())
            assert equal.all(), f"call {number}, rank {rank}"
    return list(zip(coded, whole, strict=True))


@given(
    size=strategies.sampled_from((2, 3, 4, 5, 6)),
    times=strategies.integers(1, 2),
    odd_heads=strategies.booleans(),
    more=strategies.sampled_from((0, 5, 23, 64)),
    channels=strategies.sampled_from((8, 20, 64)),
    batch=strategies.integers(1, 2),
    dtype=strategies.sampled_from((torch.bfloat16, torch.float16)),
    kind=strategies.sampled_from(KINDS),
    how=strategies.sampled_from(ROUTES),
    predictor=strategies.sampled_from(("last", "taylor")),
    arrival=strategies.sampled_from(("now", "now", "displaced")),
    calls=strategies.sampled_from((RUN, TROUBLED)),
    delayed=strategies.booleans(),
)
@examples(4, exhaustive=150)
def test_the_same_bits_as_whole_tensors(
    size, times, odd_heads, more, channels, batch, dtype, kind, how, predictor, arrival, calls, delayed
):
    """At odd sizes, with calls that follow no other; what comes late is exact too: as displacement without a codec."""
    how = dict(how)
    if size % how.get("ring", 1):
        how.pop("ring")
    heads = size * times + (odd_heads and "ring" not in how)
    world = Data(size, heads, size + more, channels, batch, dtype=dtype, kind=kind)
    displaced = arrival == "displaced" and "chunks" not in how
    settings = how | {"predictor": predictor, "arrival": "displaced" if displaced else "now"}
    same_bits(world, RUN if displaced else calls, delayed and not displaced, **settings)


def test_numbers_of_32_bits_travel_whole():
    for coded, whole in same_bits(Data(2), RUN, predictor="taylor"):
        assert [one["attention"] for one in coded.sent] == [one["attention"] for one in whole.sent]
        assert not coded.codec.bytes_held()


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ROUTES, ids=lambda how: "-".join(map(str, how.values())))
def test_nothing_is_lost_where_every_block_overflows(how, monkeypatch):
    """The first part has room for the widths alone: all planes come as rests, over every route."""
    monkeypatch.setattr(codecs, "FIRST_ROOMS", (0.0, 0.0))
    monkeypatch.setattr(codecs, "MARGIN", -100.0)
    monkeypatch.setattr(codecs.math, "log2", lambda x: -1000.0)
    world = Data(6, heads=12, dtype=torch.bfloat16, kind="noise")
    for coded, whole in same_bits(world, TROUBLED[8:], delayed=True, predictor="taylor", **how):
        assert sum(coded.bytes_of_calls()) > 0.7 * sum(whole.bytes_of_calls())  # of noise, with its rests
        rows = [notes.merged([notes]) for notes in coded.codec.report().values()]
        assert sum(row["coded_fraction"] for row in rows) > 5
        assert all(row["overflows"] >= 2 * row["coded_fraction"] for row in rows)


@pytest.mark.usefixtures("one_thread_a_rank")
def test_on_a_device_a_rest_that_stays_here_is_kept_until_it_was_read(simulated, monkeypatch):
    """At the second call the first rank's queries alone are others, so of its output the own block alone overflows, and
    no message keeps the lane's memory that the rest is in."""
    monkeypatch.setattr(codecs, "FIRST_ROOMS", (1.0, 0.0))
    code_in_one_launch(monkeypatch)
    world, overflows = World(2, heads=2, dtype=torch.bfloat16), [0, 0]

    def work(transport: Any) -> None:
        mesh, trace, rank = Mesh.build(world.topology, 1), Trace(transport.rank), transport.rank
        context = RankContext(transport, world.topology, trace, Kernels("torch"))
        strategy = build_strategy(Config(codec="lossless", exchange="flat"), mesh, context)
        q, k, v = world.tensors(RUN[0])
        for call in RUN[:2]:
            strategy.codec.begin_step(call.step_info)
            x = [x.to(transport.device) for x in (q, k, v)]
            strategy.attend(world.qkv(call, x, rank), call.layer)
            q[:, world.rows(call, 0)] *= -1
        overflows[rank] = sum(notes.overflows for notes in strategy.codec.report().values())

    on_devices(simulated, world.size, work)
    assert overflows[0] >= 2  # of q, k and v, and of the output


@pytest.mark.parametrize(("kind", "most"), [("curves", 0.75), ("noise", 1.02), ("jumps", 1.02)])
def test_each_call_sends_less_than_whole_tensors_or_a_fiftieth_more(kind, most):
    """Of curves, whose exponents take a third of their bits, first calls are coded too."""
    world = Data(4, heads=8, image=300, channels=64, dtype=torch.bfloat16, kind=kind, batch=1)
    for coded, whole in same_bits(world, RUN, exchange="split"):
        pairs = zip(coded.bytes_of_calls(), whole.bytes_of_calls(), strict=True)
        assert all(sent <= most * of_whole for sent, of_whole in pairs)
        if kind == "curves":
            assert all(notes.merged([notes])["coded_fraction"] == 1 for notes in coded.codec.report().values())
            # of the rank that needs most, not of all ranks together: less than a whole tensor takes
            assert 0 < max(coded.codec.state_of(LAYER).needed.values()) < 2 * world.channels * PARTS


@pytest.mark.parametrize("machine", ["aurora", pytest.param("local", marks=pytest.mark.exhaustive)])
def test_two_nodes_of_ranks_give_the_same_bits(machine):
    """24, most of whose blocks are smaller than a tile, and on two nodes with what is passed on over their NICs."""
    world = Data(24, heads=24, image=31, channels=16, batch=1, machine=machine, dtype=torch.bfloat16, kind="jumps")
    same_bits(world, RUN[:2], exchange="split", order="v_first")
