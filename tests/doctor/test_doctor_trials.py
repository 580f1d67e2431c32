"""What doctor's trials send at 12 to 768 ranks, by numbers, and a sample of peers on a few ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from worlds import topology_of

from cocodiff.cli.doctor import trials
from cocodiff.comm.loopback import run_ranks

KINDS = {"sibling", "plane", "cross_plane"}


@pytest.mark.parametrize(("size", "most"), [(12, 12), (96, 96), (97, 40), (108, 40), (768, 40), (7680, 50)])
def test_peers_are_all_of_few_ranks_and_a_sample_of_many(size: int, most: int) -> None:
    """Who sends to a rank is whom it receives from, so that both sides list the same messages."""
    peers = {rank: set(trials.peers_of(rank, size)) for rank in range(size)}
    assert all(len(of_rank) <= most and rank in of_rank for rank, of_rank in peers.items())
    assert all(rank in peers[peer] for rank, of_rank in peers.items() for peer in of_rank)
    assert size > 96 or all(of_rank == {*range(size)} for of_rank in peers.values())


@pytest.mark.parametrize("size", [108, 144, 768])
def test_a_sample_has_every_kind_of_link_of_every_rank(size: int) -> None:
    topology = topology_of("aurora", size)
    for rank in range(size):
        kinds = {peer: topology.link_class(rank, peer) for peer in trials.peers_of(rank, size)}
        assert {*kinds.values()} >= {*KINDS, "node"}
        assert len({topology.places[peer].plane for peer, kind in kinds.items() if kind == "node"}) == 2


@pytest.mark.parametrize(("machine", "size"), [("aurora", 12), ("aurora", 36), ("local", 5), ("mesh-4", 4)])
def test_the_trial_of_a_kind_of_link_sends_over_these_links_alone(machine: str, size: int) -> None:
    """All links of a node between tiles of a card and of a plane, and each rank's NIC; both sides list the same."""
    topology = topology_of(machine, size)
    of_ranks = [trials.linked(topology, rank) for rank in range(size)]
    pairs = {(kind, a, b) for a, of_rank in enumerate(of_ranks) for kind, (to, _) in of_rank.items() for b in to}
    coming = enumerate(of_ranks)
    assert pairs == {(kind, a, b) for b, found in coming for kind, (_, come) in found.items() for a in come}
    classes = {(topology.link_class(a, b), a, b) for a in range(size) for b in range(size)}
    of_node = {one for one in classes if one[0] in ("sibling", "plane")}
    assert pairs - {one for one in pairs if one[0] == "nic"} == of_node
    assert all(topology.link_class(a, b) == "node" for kind, a, b in pairs if kind == "nic")
    assert {tuple(found) for found in of_ranks} == {tuple(of_ranks[0])}
    assert ("nic" in of_ranks[0]) == (topology.nodes > 1)


def test_of_a_large_plane_a_rank_tries_few_links() -> None:
    of_ranks = [trials.linked(topology_of("local", 40), rank)["plane"] for rank in range(40)]
    sent = {(a, b) for a, (to, _) in enumerate(of_ranks) for b in to}
    assert sent == {(a, b) for b, (_, come) in enumerate(of_ranks) for a in come}
    assert len(sent) == 40 * trials.MOST_LINKED < 40 * 39


@pytest.mark.parametrize("size", [2, 12, 96, 768, 7680])
def test_bytes_of_a_rank_are_bounded_whatever_the_number_of_ranks(size: int) -> None:
    peers = len(trials.peers_of(0, size))
    for wanted in trials.SIZES["other"]:
        for at_once in (1, trials.AT_ONCE):
            one = trials.message_bytes(wanted, size, at_once)
            held = trials.COPIES * peers * sum(one // (1 + number % 3) for number in range(at_once))
            assert 0 < one <= wanted and held <= trials.MOST_BYTES
            assert size > 12 or one == wanted


def test_each_trial_has_a_patience_of_its_own_and_a_sample_of_peers_gets_the_numbers_that_were_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "MOST_RANKS", 4)
    monkeypatch.setattr(trials, "NEAR", 2)
    assert len(trials.peers_of(0, 8)) < 8

    def work(transport: Any) -> tuple[list[str], list[Any], int]:
        names: list[str] = []

        @contextmanager
        def step(what: str) -> Iterator[None]:
            names.append(what)
            yield

        found = trials.all_to_alls(transport, transport.world, step)
        return names, [one.wrong for one in found], len(found)

    for names, wrong, count in run_ranks(8, work, timeout_s=60.0):
        assert len(set(names)) == len(names) == count == 15 and not any(wrong)
