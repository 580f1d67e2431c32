"""Torus attention: exact in every composition, with the same bytes and one copy of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import topologies, topology_of

from cocodiff.attention.choice import Chunking, ExchangeTable
from cocodiff.attention.exchange import Exchange
from cocodiff.attention.layout import Layout, slices
from cocodiff.attention.softmax_merge import partial_attention
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.attention.ulysses import Ulysses, joint
from cocodiff.attention.v_first import v_first
from cocodiff.comm.loopback import run_ranks
from cocodiff.topology import Topology
from cocodiff.trace import Trace

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
        return LazyQKV(q, k, v, self.image, self.text, self.heads, self.text_first, self.mask_BT())

    def own(self, rank: int, whole_BSHD: Tensor) -> Tensor:
        """A rank's rows of a tensor in the model's order."""
        layout = Layout.build(self.topology, self.image, self.text, self.heads)
        text, image = slices(layout.text)[rank], slices(layout.image)[rank]
        first = self.text if self.text_first else 0
        pair = (
            whole_BSHD[:, text.start + self.image - first : text.stop + self.image - first]
            if not self.text_first
            else whole_BSHD[:, text],
            whole_BSHD[:, image.start + first : image.stop + first],
        )
        return torch.cat(pair if self.text_first else pair[::-1], 1)

    def truth(self) -> Tensor:
        q, k, v = (x.double().transpose(1, 2) for x in self.tensors())
        mask, text_BT = None, self.mask_BT()
        if text_BT is not None:
            image = text_BT.new_ones(self.batch, self.image)
            pair = [text_BT, image] if self.text_first else [image, text_BT]
            mask = torch.cat(pair, 1)[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def attend(
    case: Case, exchange: str, order=joint, chunks: int = 1, partial=partial_attention, nic_balance=True
) -> list:
    """Every rank's output and bytes."""

    def work(transport):
        trace, table = Trace(transport.rank), TABLE if exchange == "auto" else None
        ours = Exchange(exchange, case.topology, transport, trace, table, nic_balance, chunking=Chunking(chunks))
        strategy = Ulysses(case.topology, ours, trace, order, partial=partial)
        outputs = []
        for _ in range(2):  # a second call finds the lanes as the first left them
            own = [case.own(transport.rank, x) for x in case.tensors()]
            outputs.append(strategy.attend(case.qkv(own), Site("layer")))
        assert torch.equal(*outputs)
        return outputs[0], trace.bytes(), ours.staged

    return run_ranks(case.topology.size, work, timeout_s=60.0)


def check(case: Case, exchange: str, order, chunks: int) -> None:
    """As exact as attention in one piece, and with the same bytes."""
    whole, plain = case.truth(), attend(case, exchange, order)
    for rank, ((ours, sent, _), (theirs, once, _)) in enumerate(
        zip(attend(case, exchange, order, chunks), plain, strict=True)
    ):
        truth = case.own(rank, whole)
        rounding = torch.finfo(case.dtype).eps * truth.abs().max()
        assert ours.dtype == case.dtype
        assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 2 * rounding
        assert sent == once


@given(
    topology=topologies(largest=24), extra=st.integers(0, 13), text=st.integers(0, 19), heads=st.integers(0, 5),
    batch=st.integers(1, 2), dtype=st.sampled_from((torch.float32, torch.bfloat16)), masked=st.booleans(),
    text_first=st.booleans(), exchange=st.sampled_from(("flat", "tapa", "split", "auto")),
    order=st.sampled_from((joint, v_first)), chunks=st.integers(2, 7),
)  # fmt: skip
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_equals_one_process_anywhere(
    topology, extra, text, heads, batch, dtype, masked, text_first, exchange, order, chunks
):
    if topology.size == 1:
        return  # nothing to exchange
    masked = masked and text > 0
    case = Case(topology, topology.size + extra, text, topology.size + heads, batch, dtype, masked, text_first)
    check(case, exchange, order, chunks)


@pytest.mark.parametrize("exchange", ["flat", "tapa", "split"])
@pytest.mark.parametrize("chunks", [2, 5])
def test_two_nodes_in_bf16(chunks, exchange):
    check(Case(topology_of("aurora", 24), 41, 7, 26, 2, torch.bfloat16, masked=True), exchange, v_first, chunks)
