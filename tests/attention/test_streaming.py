"""Streaming attention: the bytes of a closed formula, what is priced, and when it is chosen. What rings of queries hold
alike, such as one process's result, is in `test_token_ring.py`."""

from __future__ import annotations

import pytest
import torch
from test_ring import B, D, tensors
from test_token_ring import attend, check_exact
from worlds import topology_of

from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.assemble import AttentionWork
from cocodiff.planner.placement import StreamMoves, by_degree, choose, price
from cocodiff.topology.axes import Mesh
from cocodiff.topology.routes.rounds import rounds_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def test_a_ring_of_some_cards_on_two_nodes():
    mesh = Mesh.build(topology_of("local-6x2", 24), 8, kind="streaming")
    check_exact(mesh, tensors(24 + 9, 5, 3, torch.float32), 5)


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


def test_its_spellings():
    assert Config(ring="streaming") == Config(ring_kind="streaming")
    with pytest.raises(UserError, match=r"^ring_kind streaming .* chunks 2 .*: choose chunks 1 or ring_kind keys$"):
        Config(ring=2, ring_kind="streaming", chunks=2)
