"""TokenRing: one process's result and the same bits whatever is early, the bytes of a closed formula, what is priced,
and causal masks."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from merging import merging_error
from test_ring import B, D, call_of, rows_of, tensors
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from worlds import topologies, topology_of

from cocodiff.attention.strategy import LayerKey
from cocodiff.comm.loopback import LoopbackTransport, run_ranks
from cocodiff.comm.trace import LINK_CLASSES, Trace
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine, Topology
from cocodiff.config.registry import EXCHANGES, ORDERS
from cocodiff.engine.assemble import AttentionWork, build_strategy
from cocodiff.exchange.codec import StepInfo
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.planner.placement import LAG, MESSAGE_S, TokenMoves, by_degree, choose, price
from cocodiff.topology.axes import Mesh, meshes
from cocodiff.topology.routes.rounds import rounds_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def attend(
    mesh: Mesh, whole: list[Tensor], text: int, mask: Tensor | None = None, late: int = 0, **settings: Any
) -> Any:
    """Of every rank the output of one call and the bytes that it sent. late: seed of delays before lanes' jobs."""
    size, image = mesh.topology.size, whole[0].shape[1] - text
    config = Config(ring=mesh.ring, ring_kind=mesh.kind, **settings)

    def work(transport: LoopbackTransport) -> tuple[Tensor, dict[str, int]]:
        trace = Trace(transport.rank)
        if late:
            delayed(transport, random.Random(late + transport.rank))
        ours = build_strategy(config, mesh, transport, trace, Kernels("torch"))
        rows = rows_of(mesh.topology, transport.rank, image, text)
        return ours.attend(call_of(whole, rows, image, text, mask), LayerKey("layer")), trace.bytes()

    return run_ranks(size, work)


def delayed(transport: LoopbackTransport, chance: random.Random) -> None:
    """Messages of this rank leave late."""
    plain = transport.group

    def group(*given: Any) -> Any:
        found = plain(*given)
        send_recv = found.send_recv

        def late(sends: Any, recvs: Any) -> Any:
            time.sleep(0.004 * chance.random())
            return send_recv(sends, recvs)

        found.send_recv = late
        return found

    transport.group = group  # type: ignore[method-assign]


BY_KIND = pytest.mark.parametrize("kind", ["token", "streaming"])  # of what rings of queries hold alike


@BY_KIND
@given(
    topology=topologies(largest=12),
    more=st.integers(0, 30),
    text=st.integers(0, 9),
    heads=st.integers(1, 9),
    masked=st.booleans(),
    exchange=st.sampled_from(sorted(EXCHANGES)),
    order=st.sampled_from(sorted(ORDERS)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    data=st.data(),
)
@examples(40, exhaustive=200)
def test_equals_attention_to_all_tokens(kind, topology, more, text, heads, masked, exchange, order, dtype, data):
    mesh = data.draw(st.sampled_from(meshes(topology, heads, kind=kind)))
    image = topology.size + more
    mask = torch.rand(B, text, generator=torch.Generator().manual_seed(more)) < 0.5 if masked and text else None
    check_exact(mesh, tensors(image, text, heads, dtype), text, mask, exchange=exchange, order=order)


@BY_KIND
@pytest.mark.parametrize(("machine", "size", "ring"), [("aurora", 24, 24), ("aurora", 24, 8), ("local", 13, 13)])
def test_larger_worlds(machine, size, ring, kind):
    check_exact(Mesh.build(topology_of(machine, size), ring, kind=kind), tensors(size + 9, 5, 3, torch.float32), 5)


def check_exact(mesh: Mesh, whole: list[Tensor], text: int, mask: Tensor | None = None, **settings: str) -> None:
    dtype, image, keys = whole[0].dtype, whole[0].shape[1] - text, None
    if mask is not None:
        keys = torch.cat([mask, torch.ones(B, image, dtype=torch.bool)], 1)[:, None, None]
    truth, plain = (
        scaled_dot_product_attention(*(x.to(kind).transpose(1, 2) for x in whole), attn_mask=keys).transpose(1, 2)
        for kind in (torch.float64, dtype)
    )
    rounding = torch.finfo(dtype).eps * truth.abs().max() + merging_error(whole, mesh.ring, keys)
    allowed = 2 * (plain - truth).abs().max() + rounding
    for rank, (out_BLHD, _) in enumerate(attend(mesh, whole, text, mask, **settings)):
        assert out_BLHD.dtype == dtype
        assert (out_BLHD - truth[:, rows_of(mesh.topology, rank, image, text)]).abs().max() <= allowed


@BY_KIND
@pytest.mark.parametrize(("machine", "size", "ring"), [("local", 7, 7), ("aurora", 24, 24), ("local-6x2", 24, 8)])
def test_bits_do_not_depend_on_what_is_early(machine, size, ring, kind):
    mesh = Mesh.build(topology_of(machine, size), ring, kind=kind)
    whole = tensors(size + 3, 4, 5, torch.bfloat16)
    first, *others = (attend(mesh, whole, 4, late=late) for late in (0, 1, 2))
    for other in others:
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


@BY_KIND
@given(topology=topologies(largest=12), more=st.integers(0, 30), data=st.data())
@examples(15, exhaustive=60)
def test_the_price_has_the_bytes_that_are_sent_by_link(kind, topology, more, data):
    """With groups of one rank, or flat, whose messages are priced as they are sent."""
    mesh = data.draw(st.sampled_from(meshes(topology, 6, kind=kind)))
    whole = tensors(topology.size + more, 3, 6, torch.bfloat16)
    counted = [sent for _, sent in attend(mesh, whole, 3, exchange="flat")]
    work = AttentionWork(6, D, image_and_text(topology.size + more, 3), B)
    assert price(mesh, work).bytes == {link: sum(sent[link] for sent in counted) for link in LINK_CLASSES}


@pytest.mark.parametrize(
    ("machine", "size", "ring", "placement"),
    [("aurora", 24, 2, "usp"), ("aurora", 12, 12, "topology"), ("local", 6, 3, "usp"), ("aurora", 24, 24, "topology")],
)
def test_counted_bytes_equal_the_formula(machine, size, ring, placement):
    """Of a ring of N nodes with M ranks each, all with S rows of h heads: N (M - 1) (2 u + 4 B) h S for queries and
    parts, which have a float32 sum, and (N - 1) 2 u h S for keys; and Ulysses' formula, 4 u h (S - L)."""
    topology = topology_of(machine, size)
    mesh = Mesh.build(topology, ring, placement, kind="token")
    image, heads, u = 3 * size, 2 * size // ring, B * D * 2
    (nodes, *within), S = rounds_of(mesh)[0].shape, 3 * size // ring
    M, N = within[0] * within[1], nodes
    around = (N * (M - 1) * (2 * u + 4 * B) + (N - 1) * 2 * u) * 2 * S
    ulysses = 4 * u * 2 * (S - 3)
    for _, sent in attend(mesh, tensors(image, 0, heads, torch.bfloat16), 0, exchange="flat"):
        assert sum(sent.values()) == around + ulysses


def test_within_a_node_both_directions_of_a_link_carry_something():
    """Six ranks with a link to each other: queries take the one to the next rank, parts one to each other rank, and as
    many bytes as a ring takes over one link."""
    topology = Topology.build(Machine("m", tiles=1, planes=(0,), cards=6), 6)
    work = AttentionWork(6, D, image_and_text(36, 0), B)
    keys, tokens = (price(Mesh.build(topology, 6, kind=kind), work) for kind in ("keys", "token"))
    sums = 6 * 5 * 4 * B * 6 * 6
    assert tokens.bytes["plane"] == keys.bytes["plane"] + sums
    assert isinstance(tokens.ring.moves, TokenMoves) and len(tokens.ring.moves.queries_s) == 6


def test_token_moves_by_hand():
    """Queries of 1 s hide attention of 0.5 s; parts of 2 s may be LAG steps late, and the last are waited for."""
    moves = TokenMoves((1.0, 1.0, 1.0, 0.0), (0.0, 2.0, 2.0, 2.0), ())
    assert LAG == 2 and moves.seconds(0.5) == 3.5 + 2.0
    assert TokenMoves((0.0,), (0.0,), (5.0,)).seconds(0.5) == 5.5  # a rank on each of two nodes: a ring of keys
    assert moves.seconds(10.0) == 42.0


def test_prices_on_nodes_of_aurora():
    """In a plane a token ring halves what the fullest link carries; over a card's two tiles it cannot."""
    topology, work = topology_of("aurora", 12), AttentionWork(24)
    for ring, placement, faster in ((6, "usp", True), (2, "topology", False)):
        keys, tokens = (price(Mesh.build(topology, ring, placement, kind=kind), work) for kind in ("keys", "token"))
        assert (tokens.seconds < keys.seconds - MESSAGE_S) == faster


def test_a_token_ring_is_chosen_where_it_is_asked_for():
    topology, work = topology_of("aurora", 12), AttentionWork(24)
    assert choose(topology, work).ring == 1
    asked = choose(topology, work, kind="token")
    assert asked.ring > 1 and asked.kind == "token"
    assert all(one.mesh.ring > 1 for (one, *_) in by_degree(topology, work, kind="token"))
    assert choose(topology, work, ring=1, kind="token").ring == 1
    assert choose(topology_of("local", 1), work, kind="token").ring == 1


@BY_KIND
@pytest.mark.parametrize(
    "lossy",
    [
        {"selection": "v_major", "schedule": "fixed", "warmup": 1},
        {"codec": "int8", "exchange": "split"},
        {"arrival": "displaced", "exchange": "flat"},
    ],
)
def test_with_what_the_ulysses_part_sends_in_tensors_places(lossy, kind):
    """As a ring of keys, up to rounding: both pass on whole what the Ulysses part has brought."""

    for keys, tokens in zip(outputs_of("keys", lossy), outputs_of(kind, lossy), strict=True):
        torch.testing.assert_close(tokens, keys, rtol=0, atol=1e-2 if "codec" in lossy else 1e-5)


def outputs_of(kind: str, lossy: dict[str, Any]) -> list[Tensor]:
    """Of every rank the output of the third call, in a ring of three groups."""
    mesh = Mesh.build(topology_of("local", 6), 3, kind=kind)

    def work(transport: LoopbackTransport) -> Tensor:
        ours = build_strategy(
            Config(ring=3, ring_kind=kind, steps=4, **lossy), mesh, transport, Trace(), Kernels("torch")
        )
        for step in range(3):
            whole = [x * (1 + 0.1 * step) for x in tensors(37, 3, 4, torch.float32)]
            ours.codec.begin_step(StepInfo(0, step, 4))
            rows = rows_of(mesh.topology, transport.rank, 37, 3)
            out_BLHD = ours.attend(call_of(whole, rows, 37, 3, None), LayerKey("layer"))
        return out_BLHD

    return run_ranks(6, work)


def test_its_spellings():
    assert Config(ring="token") == Config(ring_kind="token") and Config().ring_kind == "keys"
    assert Config(ring=4, ring_kind="token").ring == 4
    for chunks in (2, "auto"):
        with pytest.raises(
            UserError, match=f"^ring_kind token .* chunks {chunks} .*: choose chunks 1 or ring_kind keys$"
        ):
            Config(ring=2, ring_kind="token", chunks=chunks)
    with pytest.raises(UserError, match="ring_kind"):
        Config(ring_kind="values")
