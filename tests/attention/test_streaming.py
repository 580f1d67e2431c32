"""Streaming attention: one process's result and the same bits whatever is early, the bytes of a closed formula, what is
priced, and what it takes over from a ring."""

from __future__ import annotations

import pytest
import torch
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from test_ring import B, D, tensors
from test_token_ring import attend, check_exact, outputs_of
from worlds import topologies, topology_of

from cocodiff.assemble import AttentionWork
from cocodiff.config import Config
from cocodiff.errors import UserError
from cocodiff.models.tokens import image_and_text
from cocodiff.planning.placement import StreamMoves, by_degree, choose, price
from cocodiff.registry import EXCHANGES, ORDERS
from cocodiff.routes.rounds import rounds_of
from cocodiff.topology.axes import Mesh, meshes
from cocodiff.trace import LINK_CLASSES

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


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
def test_equals_attention_to_all_tokens(topology, more, text, heads, masked, exchange, order, dtype, data):
    mesh = data.draw(st.sampled_from(meshes(topology, heads, kind="streaming")))
    image = topology.size + more
    mask = torch.rand(B, text, generator=torch.Generator().manual_seed(more)) < 0.5 if masked and text else None
    check_exact(mesh, tensors(image, text, heads, dtype), text, mask, exchange=exchange, order=order)


@pytest.mark.parametrize(("machine", "size", "ring"), [("aurora", 24, 24), ("local-6x2", 24, 8), ("local", 13, 13)])
def test_larger_worlds(machine, size, ring):
    mesh = Mesh.build(topology_of(machine, size), ring, kind="streaming")
    check_exact(mesh, tensors(size + 9, 5, 3, torch.float32), 5)


@pytest.mark.parametrize(("machine", "size", "ring"), [("local", 7, 7), ("aurora", 24, 24), ("local-6x2", 24, 8)])
def test_bits_do_not_depend_on_what_is_early(machine, size, ring):
    mesh = Mesh.build(topology_of(machine, size), ring, kind="streaming")
    whole = tensors(size + 3, 4, 5, torch.bfloat16)
    first, *others = (attend(mesh, whole, 4, late=late) for late in (0, 1, 2))
    for other in others:
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


@given(topology=topologies(largest=12), more=st.integers(0, 30), data=st.data())
@examples(15, exhaustive=60)
def test_the_price_has_the_bytes_that_are_sent_by_link(topology, more, data):
    mesh = data.draw(st.sampled_from(meshes(topology, 6, kind="streaming")))
    whole = tensors(topology.size + more, 3, 6, torch.bfloat16)
    counted = [sent for _, sent in attend(mesh, whole, 3, exchange="flat")]
    work = AttentionWork(6, D, image_and_text(topology.size + more, 3), B)
    assert price(mesh, work).bytes == {link: sum(sent[link] for sent in counted) for link in LINK_CLASSES}


@pytest.mark.parametrize(
    ("machine", "size", "ring", "placement"),
    [("aurora", 24, 2, "usp"), ("aurora", 12, 12, "topology"), ("local", 6, 3, "usp"), ("aurora", 24, 24, "topology")],
)
def test_counted_bytes_equal_the_formula(machine, size, ring, placement):
    """Of a ring of R ranks on N nodes, all with S rows of h heads: (R - 1) (2 u + 4 B) h S for queries and parts, which
    have a float32 sum, of it (N - 1) (2 u + 4 B) h S between nodes; and Ulysses' formula, 4 u h (S - L)."""
    topology = topology_of(machine, size)
    mesh = Mesh.build(topology, ring, placement, kind="streaming")
    image, heads, u = 3 * size, 2 * size // ring, B * D * 2
    nodes, S = rounds_of(mesh)[0].shape[0], 3 * size // ring
    block = (2 * u + 4 * B) * 2 * S
    for _, sent in attend(mesh, tensors(image, 0, heads, torch.bfloat16), 0, exchange="flat"):
        assert sum(sent.values()) == (ring - 1) * block + 4 * u * 2 * (S - 3)
        if ring == size:
            assert sent["node"] == (nodes - 1) * block


def test_moves_by_hand():
    """Three pieces of 1 s: the first gather and the last reduction and crossing are waited for."""
    assert StreamMoves(2, 3, 0.25, 0.5, 0.125).seconds(0.5) == 0.25 + 3 * 1.0 + 0.5 + 0.125
    assert StreamMoves(2, 3, 0.25, 0.5, 1.0).seconds(0.5) == 0.25 + 3 * 2.0 + 0.5 + 1.0
    assert StreamMoves(1, 2, 3.0, 2.0, 0.0).seconds(0.5) == 3.0 + 3.0 + 2.0 + 2.0


def test_prices_on_a_node_of_aurora():
    """Queries take the links to all other ranks of a plane at once, where a ring takes one at a time."""
    topology, work = topology_of("aurora", 12), AttentionWork(24)
    keys, token, streaming = (
        price(Mesh.build(topology, 6, "usp", kind=kind), work).seconds for kind in ("keys", "token", "streaming")
    )
    assert streaming < token < keys


def test_auto_takes_it_where_it_is_predicted_to_be_clearly_faster():
    """In rings of a plane or a node. On a card's two tiles, where no rates are known, and in chunks keys go round."""
    work = AttentionWork(24)
    assert choose(topology_of("aurora", 24), work, 24, kind="auto").kind == "streaming"
    assert choose(topology_of("aurora", 48), work, kind="auto").kind == "keys"
    assert choose(topology_of("aurora", 12), work, 12, kind="auto").kind == "streaming"
    assert choose(topology_of("aurora", 12), work, 2, "topology", kind="auto").kind == "keys"
    assert choose(topology_of("local", 12), work, 12, kind="auto").kind == "keys"
    assert Config(ring=12, ring_kind="auto", chunks=2).ring_kind == "keys"


def test_it_is_chosen_where_it_is_asked_for():
    topology, work = topology_of("aurora", 12), AttentionWork(24)
    asked = choose(topology, work, kind="streaming")
    assert asked.ring > 1 and asked.kind == "streaming"
    assert all(one.mesh.ring > 1 for (one, *_) in by_degree(topology, work, kind="streaming"))
    assert choose(topology_of("local", 1), work, kind="streaming").ring == 1


@pytest.mark.parametrize(
    "lossy",
    [
        {"selection": "v_major", "schedule": "fixed", "warmup": 1},
        {"codec": "int8", "exchange": "split"},
        {"arrival": "displaced", "exchange": "flat"},
    ],
)
def test_with_what_the_ulysses_part_sends_in_tensors_places(lossy):
    """As a ring of keys, up to rounding: both take whole what the Ulysses part has brought."""
    for keys, streamed in zip(outputs_of("keys", lossy), outputs_of("streaming", lossy), strict=True):
        torch.testing.assert_close(streamed, keys, rtol=0, atol=1e-2 if "codec" in lossy else 1e-5)


def test_its_spellings():
    assert Config(ring="streaming") == Config(ring_kind="streaming")
    with pytest.raises(UserError, match=r"^ring_kind streaming .* chunks 2 .*: choose chunks 1 or ring_kind keys$"):
        Config(ring=2, ring_kind="streaming", chunks=2)
