"""Ring attention: one process's result, the bytes of the closed formula, two foreign blocks at a time, and V-Major."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from byte_formulas import Formulas
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from merging import merging_error
from test_v_major import SCHEDULES
from test_v_major import Case as DriftingCase
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from v_major_reference import Reference
from worlds import topologies, topology_of

from cocodiff.attention.local import AttentionCall, LocalAttention
from cocodiff.attention.ring import Ring
from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.attention.ulysses import Ulysses, joint, v_first
from cocodiff.attention.v_major.codec import VMajor
from cocodiff.comm.loopback import LoopbackTransport, run_ranks
from cocodiff.comm.trace import LINK_CLASSES, Trace
from cocodiff.comm.transport import Part
from cocodiff.config.config import Config
from cocodiff.config.machine import Topology
from cocodiff.exchange.codec import StepInfo
from cocodiff.exchange.exchange import Exchange
from cocodiff.models.adapter import TEXT, image_and_text
from cocodiff.topology.axes import Mesh, meshes
from cocodiff.topology.layout import Layout, slices
from cocodiff.topology.routes.chunks import Chunking, sequence_of
from cocodiff.topology.routes.rounds import rounds_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
EXCHANGES = ("flat", "tapa", "split")
B, D = 2, 8


def strategy(
    mesh: Mesh,
    transport: Any,
    trace: Trace,
    exchange: str = "flat",
    order: Any = joint,
    chunks: int = 1,
    v_major: tuple[Any, str, str] | None = None,
) -> Any:
    """One rank's attention on a mesh, as the engine wires it. v_major: its schedule, scoring and reference."""
    group, slot = mesh.group_and_slot(transport.rank)
    members, ring, ours = Part(transport, mesh.groups[group]), None, None
    if mesh.ring > 1:
        ring = Ring(mesh, transport, trace, sequences=[sequence_of(part, slot, chunks) for part in mesh.parts])
    if mesh.ulysses > 1:
        chunking = Chunking(chunks)
        ours = Exchange(exchange, mesh.parts[group], members, trace, nic_balance=False, chunking=chunking)
    codec = None
    if v_major is not None:
        schedule, scoring, reference = v_major
        codec = VMajor(Config(scoring=scoring, reference=reference), ours, members)
        codec.schedule = schedule
    return Ulysses(mesh.parts[group], ours, trace, order, codec, ring=ring)


def tensors(image: int, text: int, heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of all tokens, text first: [B, T + S_img, H, D]."""
    generator = torch.Generator().manual_seed(image * 100 + text)
    return [torch.randn(B, text + image, heads, D, generator=generator).to(dtype) for _ in range(3)]


def rows_of(topology: Topology, rank: int, image: int, text: int) -> list[int]:
    """Where a rank's rows stand in the whole sequence, its text first."""
    of_text, of_image = (slices(one.shares(topology))[rank] for one in image_and_text(image, text, text_first=True))
    return [*range(of_text.start, of_text.stop), *range(text + of_image.start, text + of_image.stop)]


def call_of(whole: Sequence[Tensor], rows: list[int], image: int, text: int, mask: Tensor | None) -> LazyQKV:
    q, k, v = ((lambda x=x: x[:, rows].contiguous()) for x in whole)
    masks = {} if mask is None else {TEXT: mask}
    return LazyQKV(q, k, v, image_and_text(image, text, text_first=True), whole[0].shape[2], masks)


@given(
    topology=topologies(largest=12),
    more=st.integers(0, 30),
    text=st.integers(0, 9),
    heads=st.integers(1, 9),
    masked=st.booleans(),
    exchange=st.sampled_from(EXCHANGES),
    order=st.sampled_from((joint, v_first)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    chunks=st.sampled_from((1, 1, 2, 3, 5)),
    data=st.data(),
)
@examples(40, exhaustive=200)
def test_equals_attention_to_all_tokens(topology, more, text, heads, masked, exchange, order, dtype, chunks, data):
    mesh = data.draw(st.sampled_from(meshes(topology, heads)))
    image = topology.size + more
    mask = torch.rand(B, text, generator=torch.Generator().manual_seed(more)) < 0.5 if masked and text else None
    whole = tensors(image, text, heads, dtype)

    def work(transport: LoopbackTransport) -> Tensor:
        rows = rows_of(topology, transport.rank, image, text)
        ours = strategy(mesh, transport, Trace(), exchange, order, chunks=chunks)
        return ours.attend(call_of(whole, rows, image, text, mask), LayerKey("layer"))

    keys = None
    if mask is not None:
        keys = torch.cat([mask, torch.ones(B, image, dtype=torch.bool)], 1)[:, None, None]
    truth, plain = (
        scaled_dot_product_attention(*(x.to(kind).transpose(1, 2) for x in whole), attn_mask=keys).transpose(1, 2)
        for kind in (torch.float64, dtype)
    )
    rounding = torch.finfo(dtype).eps * truth.abs().max() + merging_error(whole, mesh.ring + chunks - 1, keys)
    allowed = 2 * (plain - truth).abs().max() + rounding
    for rank, out_BLHD in enumerate(run_ranks(topology.size, work)):
        assert out_BLHD.dtype == dtype
        assert (out_BLHD - truth[:, rows_of(topology, rank, image, text)]).abs().max() <= allowed


@pytest.mark.parametrize(
    ("machine", "size", "ring", "placement"),
    [
        ("aurora", 24, 2, "topology"),
        ("aurora", 24, 2, "usp"),
        ("aurora", 12, 12, "topology"),
        ("local", 6, 3, "usp"),
        ("local", 10, 2, "topology"),
        ("aurora", 24, 8, "usp"),
        ("aurora", 24, 4, "topology"),
    ],
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_counted_bytes_equal_the_formulas(machine, size, ring, placement, exchange):
    """Ulysses' formulas for every group, and u 2 h_i S_g for each block of a group that rank i sends on."""
    topology = topology_of(machine, size)
    mesh = Mesh.build(topology, ring, placement)
    image, text, heads = size + 9, 5, 13
    whole = tensors(image, text, heads, torch.bfloat16)
    u = B * D * 2

    def work(transport: LoopbackTransport) -> dict[str, int]:
        trace = Trace(transport.rank)
        rows = rows_of(topology, transport.rank, image, text)
        strategy(mesh, transport, trace, exchange).attend(call_of(whole, rows, image, text, None), LayerKey("layer"))
        return trace.bytes()

    layouts, counted = mesh.layouts(image_and_text(image, text), heads), run_ranks(size, work)
    for group, (part, layout) in enumerate(zip(mesh.parts, layouts, strict=True)):
        formulas = Formulas(part, layout)
        for slot, rank in enumerate(mesh.groups[group]):
            expected = dict.fromkeys(LINK_CLASSES, 0)
            if mesh.ulysses > 1:
                ways = [formulas.sent(exchange, "forward", slot, 3 * u), formulas.sent(exchange, "back", slot, u)]
                expected = {link: sum(way[link] for way in ways) for link in LINK_CLASSES}
            for peer, blocks in sent_round(mesh, rank).items():
                rows = sum(sum(layouts[block].rows) for block in blocks)
                expected[topology.link_class(rank, peer)] += u * 2 * layout.heads[slot] * rows
            assert counted[rank] == expected


def sent_round(mesh: Mesh, rank: int) -> dict[int, list[int]]:
    """Whose blocks a rank of a full grid sends to whom, played through: everybody's hand goes to the same place of the
    next tile, after all tiles of the next card, after all cards of the next node."""
    slot = mesh.group_and_slot(rank)[1]
    shape = _, cards, tiles = rounds_of(mesh)[slot].shape
    at = mesh.topology.places
    ranks = sorted((ranks[slot] for ranks in mesh.groups), key=lambda one: (at[one].node, at[one].card, at[one].plane))
    rank_at = dict(zip(product(*map(range, shape)), ranks, strict=True))
    hand, sent = {place: mesh.group_and_slot(one)[0] for place, one in rank_at.items()}, {}
    for move in range(1, len(ranks)):
        level = 2 if move % tiles else 1 if move % (tiles * cards) else 0
        after = {place: (*place[:level], (place[level] + 1) % shape[level], *place[level + 1 :]) for place in hand}
        for place, block in hand.items():
            if rank_at[place] == rank:
                sent.setdefault(rank_at[after[place]], []).append(block)
        hand = {after[place]: block for place, block in hand.items()}
    return sent


class ForeignBlocks:
    """A transport whose groups note the memory that each receive of one rank goes to, and how much of it is alive."""

    def __init__(self, transport: LoopbackTransport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._seen = transport, {}
        self.most_bytes = self.messages = 0

    def lane(self, name: str) -> Any:
        return self._transport.lane(name)

    def group(self, ranks: Sequence[int], together: bool = False) -> Any:
        inner = self._transport.group(ranks, together)
        plain = inner.send_recv

        def send_recv(sends: Any, recvs: Any) -> Any:
            for tensor, _ in recvs:
                storage = tensor.untyped_storage()
                self._seen[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
                self.messages += 1
            self.note()
            return plain(sends, recvs)

        inner.send_recv = send_recv
        return inner

    def note(self) -> None:
        alive = sum(size for reference, size in self._seen.values() if not reference.expired())
        self.most_bytes = max(self.most_bytes, alive)


@pytest.mark.parametrize(
    ("machine", "size", "ring"),
    [("local", 6, 2), ("local", 6, 3), ("local", 6, 6), ("aurora", 24, 24), ("local", 5, 5)],
)
def test_at_most_two_foreign_blocks_are_here(machine, size, ring):
    topology = topology_of(machine, size)
    mesh = Mesh.build(topology, ring)
    image, text, heads = 31, 7, 6
    whole = tensors(image, text, heads, torch.float32)
    largest = max(sum(layout.rows) for layout in mesh.layouts(image_and_text(image, text), heads))

    def work(transport: LoopbackTransport) -> ForeignBlocks:
        watched = ForeignBlocks(transport)
        around = Ring(mesh, watched, Trace())
        layouts = mesh.layouts(image_and_text(image, text), heads)
        group, slot = mesh.group_and_slot(transport.rank)
        here = [row for rank in mesh.groups[group] for row in rows_of(topology, rank, image, text)]
        parts = [x[:, here][:, :, layouts[group].head_slices[slot]].contiguous() for x in whole]
        qkv = LazyQKV(lambda: parts[0], lambda: parts[1], lambda: parts[2], image_and_text(image, text), heads)
        around.attend(*parts, AttentionCall(qkv, layouts))
        return watched

    for watched in run_ranks(size, work):
        assert watched.messages == 2 * (ring - 1)
        a_block = 2 * B * largest * (heads * ring // size) * D * 4
        assert a_block * (1 if ring == 2 else 2) >= watched.most_bytes > 0


def test_a_block_travels_while_the_one_before_is_attended_to():
    """Nothing attends before everybody's first message has come: that must not hold anybody up."""
    mesh = Mesh.build(topology_of("local", 3), 3)
    whole = tensors(9, 0, 2, torch.float32)
    came = [threading.Event() for _ in range(3)]

    def work(transport: LoopbackTransport) -> bool:
        order: list[bool] = []

        class Waiting(LocalAttention):
            def part(self, *qkv_mask: Any) -> Any:
                if not order:
                    order.append(all(event.wait(20.0) for event in came))
                return super().part(*qkv_mask)

        around = Ring(mesh, transport, Trace(), local=Waiting())
        plain = around._ranks.send_recv

        def send_recv(sends: Any, recvs: Any) -> Any:
            pending = plain(sends, recvs)
            pending.wait()
            came[transport.rank].set()
            return pending

        around._ranks.send_recv = send_recv
        rows = rows_of(mesh.topology, transport.rank, 9, 0)
        parts = [x[:, rows].contiguous() for x in whole]
        qkv = LazyQKV(lambda: parts[0], lambda: parts[1], lambda: parts[2], image_and_text(9, 0), 2)
        around.attend(*parts, AttentionCall(qkv, mesh.layouts(image_and_text(9, 0), 2)))
        return order[0]

    assert run_ranks(3, work) == [True] * 3


@pytest.mark.parametrize(
    ("scoring", "reference", "exchange"),
    [("source", "sent", "split"), ("source", "prev", "flat"), ("card", "prev", "tapa")],
)
@pytest.mark.parametrize(("size", "ring", "placement"), [(6, 2, "topology"), (6, 3, "usp"), (12, 3, "topology")])
def test_v_major_with_a_ring_equals_one_process(size, ring, placement, scoring, reference, exchange):
    """Every group selects among its own tokens; their rings carry whole keys and values, stale ones too."""
    case = DriftingCase(size, 31, 7, 9, batch=2, steps=6)
    schedule, topology = SCHEDULES["fixed"], topology_of("local", size)
    mesh = Mesh.build(topology, ring, placement)
    layouts = mesh.layouts(case.segments, case.heads)
    where = Layout.build(topology, case.segments, size).row_slices
    rows = [[row for rank in group for row in range(where[rank].start, where[rank].stop)] for group in mesh.groups]
    expected = [
        Reference(part, layout, schedule, scoring, reference) for part, layout in zip(mesh.parts, layouts, strict=True)
    ]

    def work(transport: LoopbackTransport) -> list[Tensor]:
        ours = strategy(mesh, transport, Trace(), exchange, v_first, v_major=(schedule, scoring, reference))
        outputs = []
        for step in range(case.steps):
            ours.codec.begin_step(StepInfo(0, step, case.steps))
            q, k, v = ((lambda x=x: x[:, where[transport.rank]].contiguous()) for x in case.tensors(step))
            qkv = LazyQKV(q, k, v, case.segments, case.heads)
            outputs.append(ours.attend(qkv, LayerKey("layer")))
        return outputs

    of_ranks = run_ranks(size, work)
    for step in range(case.steps):
        whole = case.tensors(step)
        for group, one in enumerate(expected):
            one.attend(*(x[:, rows[group]] for x in whole), step, case.steps)
        q, k, v = (torch.cat([one.caches[n] for one in expected], 1).transpose(1, 2) for n in range(3))
        out = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        at = 0
        for group, layout in zip(mesh.groups, layouts, strict=True):
            for rank, size_of in zip(group, layout.rows, strict=True):
                torch.testing.assert_close(of_ranks[rank][step], out[:, at : at + size_of], rtol=1e-5, atol=1e-6)
                at += size_of
    assert any(one.active_counts[-1] < case.batch * (case.image + case.text) for one in expected)
