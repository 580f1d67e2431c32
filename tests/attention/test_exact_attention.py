"""One contract of attention without loss: rings of all kinds, exchanges, orders and chunks, on any world."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_worlds import Call, Ranks, World
from byte_formulas import Formulas
from covering import examples
from hypothesis import given, strategies
from really_sent import ReallySent
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from value_tables import beside
from worlds import topologies, topology_of

from cocodiff.comm.loopback import LoopbackGroup
from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.config import Config
from cocodiff.config.registry import EXCHANGES, ORDERS, RINGS
from cocodiff.engine import assemble
from cocodiff.engine.assemble import AttentionWork
from cocodiff.models.adapter import TEXT, image_and_text
from cocodiff.planner.automatic import price
from cocodiff.topology.axes import Mesh, meshes
from cocodiff.topology.layout import Segments, slices

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
CALL = Call(0)
TABLE = ((0.0005, "tapa"), (math.inf, "split"))  # of exchange auto


@dataclass(frozen=True)
class Exact(World):
    """Random tensors in the model's order. masked: some tokens of the text count, in the last batch row none."""

    text: int = 0
    text_first: bool = True
    masked: bool = False
    channels: int = 8

    def segments(self, call: Call) -> Segments:
        return image_and_text(self.image, self.text, self.text_first)

    def rows(self, call: Call, rank: int) -> list[int]:
        """A rank's share of the one segment, then of the other."""
        found, start = [], 0
        for segment in self.segments(call):
            own = slices(segment.shares(self.topology))[rank]
            found += range(start + own.start, start + own.stop)
            start += segment.tokens
        return found

    def masks(self) -> dict[str, Tensor]:
        if not self.masked or not self.text:
            return {}
        mask_BT = torch.rand(self.batch, self.text, generator=torch.Generator().manual_seed(self.image)) < 0.5
        mask_BT[-1] = False
        return {TEXT: mask_BT}

    def keys(self) -> Tensor | None:
        """The keys that are attended to."""
        if not self.masks():
            return None
        pair = [self.masks()[TEXT], torch.ones(self.batch, self.image, dtype=torch.bool)]
        return torch.cat(pair if self.text_first else pair[::-1], 1)[:, None, None]

    def tensors(self, call: Call) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.image * 100 + self.text)
        shape = (3, self.batch, self.text + self.image, self.heads, self.channels)
        return list((1.5 * torch.randn(shape, generator=generator)).to(self.dtype))

    def in_one_piece(self, dtype: torch.dtype) -> Tensor:
        q, k, v = (x.to(dtype).transpose(1, 2) for x in self.tensors(CALL))
        return scaled_dot_product_attention(q, k, v, self.keys()).transpose(1, 2)


def merging_error(qkv_BSHD: Sequence[Tensor], parts: int, mask_B11S: Tensor | None) -> float:
    """The most that merging attention's parts one by one adds to an output's error, to first order in float32's unit
    roundoff u. It follows from the values alone.

    A part's weight is w = exp(lse - L): L is the log of the sum over all keys, lse that over the part's, a float32. Its
    rounding by at most u |lse| moves the output by w (1 - w) u |lse| |part - rest|. Here |lse| <= |L| - log w, and
    w (1 - w) (|L| - log w) < (|L| + 1.05) / 4 for every w; both outputs are means of v, so |part - rest| <= 2 max |v|.
    There are 2 (parts - 1) such roundings, one for each part and one for each merged sum that is merged again. The
    output itself is rounded at parts - 1 merges, by at most u max |v|.
    """
    q, k, v = (x.double().transpose(1, 2) for x in qkv_BSHD)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask_B11S is not None:
        scores = scores.masked_fill(~mask_B11S, -math.inf)
    u = torch.finfo(torch.float32).eps / 2
    largest = scores.logsumexp(-1).abs().max().item()
    return (parts - 1) * u * (largest + 1.05 + 1) * v.abs().max().item()


def check(world: Exact, mesh: Mesh, ahead: bool = True, **settings: Any) -> None:
    """Each rank has its rows as exactly as attention in one piece, but for the rounding of what merges parts; the same
    bits whatever is late, and in a second call; with the bytes of the formulas. ahead: receives are posted ahead, which
    device backends cannot, for they match the sends and receives of one call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackGroup, "receives_ahead", ahead)
        patch.setattr(assemble, "load_exchange_table", lambda *_: TABLE)
        sent = ReallySent(patch)
        promptly = Ranks(world, mesh=mesh, **settings).call([CALL])
        sent_by_rank = [sent.by_link(world.topology, rank) for rank in range(world.size)]
        late = Ranks(world, mesh=mesh, delayed=True, **settings).call([CALL] * (2 if world.size <= 12 else 1))
    truth, plain = world.in_one_piece(torch.float64), world.in_one_piece(world.dtype)
    parts = mesh.ring + settings.get("chunks", 1) - 1
    rounding = torch.finfo(world.dtype).eps * truth.abs().max()
    allowed = 2 * (plain - truth).abs().max() + rounding + merging_error(world.tensors(CALL), parts, world.keys())
    for rank, (ours, others) in enumerate(zip(promptly, late, strict=True)):
        (out_BLHD,) = ours.outputs
        assert out_BLHD.dtype == world.dtype
        assert (out_BLHD - truth[:, world.rows(CALL, rank)]).abs().max() <= allowed
        assert all(torch.equal(out_BLHD, other) for other in others.outputs)
    assert [one.sent[0]["attention"] for one in promptly] == sent_by_rank
    balanced = settings["exchange"] == "split" and world.topology.nodes > 1 and settings.get("nic_balance", True)
    if settings["exchange"] != "auto" and not balanced:
        check_bytes(world, mesh, settings["exchange"], sent_by_rank)


def check_bytes(world: Exact, mesh: Mesh, exchange: str, sent_by_rank: list[dict[str, int]]) -> None:
    """What each rank sends by link is what the formulas say, and in rings all together what the price says, whose
    groups exchange flat."""
    work = AttentionWork(world.heads, world.channels, world.segments(CALL), world.batch, itemsize=world.dtype.itemsize)
    priced, u = price(Config(exchange="flat"), mesh, work).sent, world.batch * world.channels * world.dtype.itemsize
    expected = Counter(priced.bytes)
    for group, part, layout in zip(mesh.groups, mesh.parts, mesh.layouts(work.segments, work.heads), strict=True):
        formulas = Formulas(part, layout)
        for number, rank in enumerate(group) if part.size > 1 else ():
            of_rank = Counter[str]()
            for way, tensors in (("forward", 3), ("back", 1)):
                of_rank.update(formulas.sent(exchange, way, number, tensors * u))
                expected.subtract(formulas.sent("flat", way, number, tensors * u))
            assert mesh.ring > 1 or of_rank == sent_by_rank[rank]
            expected.update(of_rank)
    assert {link: sum(sent[link] for sent in sent_by_rank) for link in LINK_CLASSES} == dict(expected)
    if exchange == "flat":
        of_nodes = Counter[int]()
        for place in world.topology.places:
            of_nodes[place.node] += sent_by_rank[place.rank]["node"]
        assert priced.busiest_node == max(of_nodes.values())


@pytest.mark.parametrize("kind", sorted(RINGS))
@given(
    topology=topologies(largest=12),
    more=strategies.integers(0, 30),
    text=strategies.integers(0, 9),
    heads=strategies.integers(1, 14),
    batch=strategies.integers(1, 2),
    masked=strategies.booleans(),
    text_first=strategies.booleans(),
    ahead=strategies.booleans(),
    nic_balance=strategies.booleans(),
    exchange=strategies.sampled_from((*sorted(EXCHANGES), "auto")),
    order=strategies.sampled_from(sorted(ORDERS)),
    dtype=strategies.sampled_from((torch.float32, torch.bfloat16)),
    chunks=strategies.sampled_from((1, 1, 2, 3, 5)),
    data=strategies.data(),
)
@examples(18, exhaustive=200)
def test_equals_attention_in_one_piece(
    kind, topology, more, text, heads, batch, masked, text_first, ahead, dtype, data, **settings
):
    mesh = data.draw(strategies.sampled_from(meshes(topology, heads, kind=kind)))
    of_text = {"text": text, "text_first": text_first, "masked": masked}
    world = Exact(topology.size, heads, topology.size + more, batch=batch, dtype=dtype, given=topology, **of_text)
    check(world, mesh, ahead, **settings | ({} if kind == "keys" else {"chunks": 1}))


@pytest.mark.parametrize(("machine", "size", "mesh", "settings"), beside(__file__))
@pytest.mark.sample(6)
def test_larger_worlds(machine, size, mesh, settings):
    topology = topology_of(machine, size)
    heads = 26 if mesh[0] == 1 else 13
    world = Exact(size, heads, size + 17, given=topology, dtype=torch.bfloat16, text=7, masked=True)
    check(world, Mesh.build(topology, *mesh), **settings)
