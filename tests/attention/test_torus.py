"""Torus attention: exact in every composition, with the same bytes and one copy of keys and values."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from covering import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from merging import merging_error
from torch import Tensor
from worlds import topologies, topology_of

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.attention.ulysses import Ulysses, joint, v_first
from cocodiff.comm.loopback import LoopbackGroup, run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.config.machine import Topology
from cocodiff.config.registry import EXCHANGES, load
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.messages import InFlight
from cocodiff.models.adapter import TEXT, image_and_text
from cocodiff.topology.layout import slices
from cocodiff.topology.routes.chunks import Chunking, ExchangeTable, Stages, chunk_ranks, consecutive
from cocodiff.topology.routes.plans import nic_detours, reverse, split_plan

TABLE = ExchangeTable(((0.0005, "tapa"), (float("inf"), "split")))


@dataclass(frozen=True)
class Case:
    topology: Topology
    image: int
    text: int
    heads: int
    batch: int = 1
    dtype: torch.dtype = torch.float32
    masked: bool = False
    text_first: bool = True

    def tensors(self) -> list[Tensor]:
        """q, k and v [B, S, H, D] in the model's order."""
        random = torch.Generator().manual_seed(self.image + 100 * self.heads)
        shape = (3, self.batch, self.image + self.text, self.heads, 8)
        return list((2 * torch.randn(shape, generator=random)).to(self.dtype))

    def mask_BT(self) -> Tensor | None:
        """Some text tokens; none at all in the last batch row."""
        if not self.masked:
            return None
        mask_BT = torch.arange(self.text).expand(self.batch, -1) % 3 != 1
        return torch.cat([mask_BT[:-1], torch.zeros_like(mask_BT[-1:])])

    def qkv(self, x_BSHD: list[Tensor]) -> LazyQKV:
        q, k, v = (lambda x=x: x for x in x_BSHD)
        mask_BT = self.mask_BT()
        masks = {} if mask_BT is None else {TEXT: mask_BT}
        return LazyQKV(q, k, v, image_and_text(self.image, self.text, self.text_first), self.heads, masks)

    def own(self, rank: int, whole_BSHD: Tensor) -> Tensor:
        """A rank's rows of a tensor in the model's order."""
        image, text = (slices(one.shares(self.topology))[rank] for one in image_and_text(self.image, self.text))
        first = self.text if self.text_first else 0
        pair = (
            whole_BSHD[:, text.start + self.image - first : text.stop + self.image - first]
            if not self.text_first
            else whole_BSHD[:, text],
            whole_BSHD[:, image.start + first : image.stop + first],
        )
        return torch.cat(pair if self.text_first else pair[::-1], 1)

    def mask_B11S(self) -> Tensor | None:
        """The keys that are attended to."""
        text_BT = self.mask_BT()
        if text_BT is None:
            return None
        image = text_BT.new_ones(self.batch, self.image)
        pair = [text_BT, image] if self.text_first else [image, text_BT]
        return torch.cat(pair, 1)[:, None, None]

    def truth(self) -> Tensor:
        q, k, v = (x.double().transpose(1, 2) for x in self.tensors())
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, self.mask_B11S()).transpose(1, 2)


def attend(case: Case, exchange: str, order=joint, chunks: int | None = 1, nic_balance=True) -> list:
    """Every rank's output and bytes. chunks None: an exchange that knows nothing of chunks."""

    def work(transport):
        trace, table = Trace(transport.rank), TABLE if exchange == "auto" else None
        chunking = None if chunks is None else Chunking(chunks)
        ours = Exchange(exchange, case.topology, transport, trace, table, nic_balance, chunking=chunking)
        strategy = Ulysses(case.topology, ours, trace, order)
        outputs = []
        for _ in range(2):  # a second call finds the lanes as the first left them
            own = [case.own(transport.rank, x) for x in case.tensors()]
            outputs.append(strategy.attend(case.qkv(own), LayerKey("layer")))
        assert torch.equal(*outputs)
        return outputs[0], trace.bytes(), ours.staged

    return run_ranks(case.topology.size, work, timeout_s=60.0)


def check(case: Case, exchange: str, order, chunks: int) -> None:
    """As exact as attention in one piece but for the rounding of what merges its parts, and with the same bytes."""
    whole, plain = case.truth(), attend(case, exchange, order)
    # of all ranks: a single one's few numbers may come out exact by chance
    error = max((theirs - case.own(rank, whole)).abs().max() for rank, (theirs, _, _) in enumerate(plain))
    rounding = 2 * torch.finfo(case.dtype).eps * whole.abs().max()
    allowed = 2 * error + rounding + merging_error(case.tensors(), chunks, case.mask_B11S())
    for rank, ((ours, sent, _), (_, once, _)) in enumerate(
        zip(attend(case, exchange, order, chunks), plain, strict=True)
    ):
        assert ours.dtype == case.dtype
        assert (ours - case.own(rank, whole)).abs().max() <= allowed
        if exchange != "auto":  # which goes by the size of what travels together, and chunks travel one by one
            assert sent == once


@given(
    topology=topologies(largest=24),
    extra=st.integers(0, 13),
    text=st.integers(0, 19),
    heads=st.integers(0, 5),
    batch=st.integers(1, 2),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    masked=st.booleans(),
    text_first=st.booleans(),
    exchange=st.sampled_from(("flat", "tapa", "split", "auto")),
    order=st.sampled_from((joint, v_first)),
    chunks=st.integers(2, 7),
)
@example(  # two keys of nearly one weight in two chunks, each chunk's logarithm of the sum 13 to 14
    topology=topology_of("aurora", 12),
    extra=12,
    text=1,
    heads=4,
    batch=1,
    dtype=torch.float32,
    masked=False,
    text_first=False,
    exchange="flat",
    order=joint,
    chunks=2,
)
@examples(8, exhaustive=60)
def test_equals_one_process_anywhere(
    topology, extra, text, heads, batch, dtype, masked, text_first, exchange, order, chunks
):
    if topology.size == 1:
        return  # nothing to exchange
    masked = masked and text > 0
    case = Case(topology, topology.size + extra, text, topology.size + heads, batch, dtype, masked, text_first)
    check(case, exchange, order, chunks)


@pytest.mark.parametrize(("exchange", "chunks"), [("tapa", 5), ("split", 2)])
def test_two_nodes_in_bf16(chunks, exchange):
    check(Case(topology_of("aurora", 24), 41, 7, 26, 2, torch.bfloat16, masked=True), exchange, v_first, chunks)


@pytest.mark.parametrize("exchange", ["tapa", "split"])
def test_where_receives_cannot_be_posted_ahead(exchange, monkeypatch):
    """Device backends match the sends and receives of one call."""
    monkeypatch.setattr(LoopbackGroup, "receives_ahead", False)
    check(Case(topology_of("local", 7, 4), 23, 4, 9), exchange, joint, 3)


@pytest.mark.parametrize(("exchange", "ranks", "chunks"), [("tapa", 4, 1), ("split", 4, 1), ("split", 2, 4)])
def test_one_chunk_is_the_exchange_without_stages(exchange, ranks, chunks):
    """Two ranks are one card, which is a single chunk however many are wanted."""
    case = Case(topology_of("local", ranks), 13, 3, 6)
    one_chunk, plain = (attend(case, exchange, v_first, wanted) for wanted in (chunks, None))
    for (ours, our_bytes, staged), (theirs, their_bytes, _) in zip(one_chunk, plain, strict=True):
        assert staged is None and torch.equal(ours, theirs) and our_bytes == their_bytes


def test_from_so_many_megabytes_on():
    """Below, a call goes whole: the same bits as without chunks in the same sequence."""
    case = Case(topology_of("local", 4), 16, 0, 4)
    mb = 3 * 16 * 4 * 8 * 4 / 4 / 1e6
    seen = []

    def work(transport, from_mb):
        calls = []

        class Counting(LocalAttention):
            def part(self, *qkv_mask):
                calls.append(0)
                return super().part(*qkv_mask)

        ours = Exchange("split", case.topology, transport, Trace(), chunking=Chunking(2, from_mb))
        own = [case.own(transport.rank, x) for x in case.tensors()]
        Ulysses(case.topology, ours, Trace(), local=Counting()).attend(case.qkv(own), LayerKey("layer"))
        seen.append((from_mb, len(calls)))

    for from_mb in (mb, 1.01 * mb):
        run_ranks(4, lambda transport, from_mb=from_mb: work(transport, from_mb))
    assert sorted(set(seen)) == [(mb, 4), (1.01 * mb, 0)]  # two chunks of q by two of keys


@pytest.mark.parametrize(("nodes", "chunks"), [(1, 3), (2, 4)])
def test_keys_and_values_are_in_memory_once(nodes, chunks):
    """Every part of them is a slice of one tensor, and what they arrived in is gone when the last is there."""
    case = Case(topology_of("local", 8, 8 // nodes), 40, 8, 16)
    whole = 48 * 2 * 8 * 4  # bytes of one tensor's two heads

    def work(transport):
        storages, alive = {"k": set(), "v": set()}, []

        class Watching(LocalAttention):
            def part(self, q, k, v, mask=None):
                for name, x in (("k", k), ("v", v)):
                    storages[name].add((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
                alive.append(sum(buffer() is not None for buffer in buffers))
                return super().part(q, k, v, mask)

        buffers: list[weakref.ref] = []
        ours = Exchange("split", case.topology, transport, Trace(), chunking=Chunking(chunks))
        post = InFlight.post_receives
        own = [case.own(transport.rank, x) for x in case.tensors()]

        def receive(flight, plan, groups):
            post(flight, plan, groups)
            arriving = [x for of_phase in flight._phases for x in of_phase.values()]
            if threading.current_thread() in lanes:
                buffers.extend(weakref.ref(x.buffer) for x in arriving if x.message[0].heads == transport.rank)

        lanes = [ours.staged._lanes[0].worker._thread]
        with mock.patch.object(InFlight, "post_receives", receive) if transport.rank == 0 else nullcontext():
            Ulysses(case.topology, ours, Trace(), local=Watching()).attend(case.qkv(own), LayerKey("layer"))
        assert all({size for _, size in found} == {whole} and len(found) == 1 for found in storages.values())
        if transport.rank == 0:
            assert buffers and alive[-1] == 0

    run_ranks(8, work)


# Plans ----------------------------------------------------------------------------------------------------------------


@given(topology=topologies(largest=24), chunks=st.integers(1, 9), name=st.sampled_from(sorted(EXCHANGES)))
@settings(max_examples=25, deadline=None)
def test_stages_are_the_plan_cut_in_pieces(topology, chunks, name):
    """The same blocks between the same ranks, each once, whatever is late; and both ends agree on the stage."""
    for rank in {0, topology.size // 2, topology.size - 1}:
        stages = Stages(topology, rank, chunks)
        assert sorted(sum(stages.chunks, ())) == list(range(topology.size)) and rank in stages.chunks[0]
        assert len(stages.chunks) == len(chunk_ranks(topology, 0, chunks)) <= chunks
        plan = load(EXCHANGES, name)(topology, rank)
        for way, whole in (("forward", plan), ("back", reverse(plan))):
            cut = [part for pair in stages.of(plan, way) for part in pair]
            for side in ("sends", "receives"):
                assert blocks_of(whole, side) == sum((blocks_of(part, side) for part in cut), Counter())
            for number, pair in enumerate(stages.of(plan, way)):
                for part in pair:
                    for _, block in blocks_of(part, "receives"):
                        assert block.rows in chunk_ranks(topology, block.heads, chunks)[number]


def blocks_of(plan, side: str) -> Counter:
    return Counter((peer, b) for phase in plan for peer, message in getattr(phase, side).items() for b in message)


def test_chunks_go_by_distance():
    aurora = topology_of("aurora", 24)
    assert chunk_ranks(aurora, 3, 2) == (tuple(range(12)), tuple(range(12, 24)))
    assert chunk_ranks(aurora, 12, 2) == (tuple(range(12, 24)), tuple(range(12)))
    own, near, far = chunk_ranks(topology_of("aurora", 12), 4, 3)
    assert own == (4, 5) and near == (6, 7, 8, 9) and far == (10, 11, 0, 1, 2, 3)
    assert [len(ranks) for ranks in chunk_ranks(aurora, 3, 4)] == [2, 10, 6, 6]
    assert [ranks[0] // 12 for ranks in chunk_ranks(topology_of("aurora", 48), 13, 4)] == [1, 2, 3, 0]
    assert consecutive("abcde", 2) == [["a", "b"], ["c", "d", "e"]] and consecutive("ab", 3) == [["a"], ["b"]]


def test_what_waits_for_another_node_is_late():
    """Only detours that end here wait for a slow link before they are passed on; on the way back relays do as well."""
    topology = topology_of("aurora", 24)
    plans = [split_plan(topology, rank, nic_detours(topology)) for rank in range(24)]
    late = [
        [any(p.sends for p in parts[2]) for parts in Stages(topology, r, 2).of(plans[r], "forward")] for r in range(24)
    ]
    assert any(far for _, far in late) and not any(near for near, _ in late)
    one = topology_of("aurora", 12)
    assert not any(p.sends for parts in Stages(one, 0, 3).of(split_plan(one, 0), "back") for p in parts[2])
