"""Ranks that go through the same calls, of the whole run and of parts of it, in a time of their own: whoever keeps the
others waiting is named, and nobody is while all go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_worlds import World

from cocodiff.comm.peers import ALL, Progress, Ranks, find_stalled

SIZE, STALL_S = 4, 10.0
PARTS: tuple[Ranks, ...] = (ALL, (0, 1), (2, 3), (0, 2), (1, 3), (2,))


class Call(NamedTuple):
    """name: of the call. among: the ranks that make it, each of which waits until all have come."""

    name: str
    among: Ranks

    def __contains__(self, rank: object) -> bool:
        return self.among == ALL or rank in self.among


@dataclass
class Run:
    """ranks: each one's own list of calls. hangs: ranks that do nothing after so many of them. deaf: one that does not
    hear that all have come to its n-th call."""

    ranks: list[list[Call]]
    hangs: dict[int, int] = field(default_factory=dict)
    deaf: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.world = World(SIZE, timeout_s=30.0, stall_s=STALL_S)
        self._at, self._came = [0] * SIZE, [False] * SIZE

    def go(self, order: list[int], pauses: list[float]) -> None:
        """As far as the ranks come, one after the other in some order, with pauses in between."""
        while [rank for rank in order if self._step(rank)]:
            self.world.pass_time(pauses[sum(self._at) % len(pauses)])

    def _step(self, rank: int) -> bool:
        """Whether a rank has gone on."""
        peers, now = self.world.ranks[rank], self.world.now
        if self._at[rank] == len(self.ranks[rank]):
            if rank not in self.world.left:
                self.world.leave(rank)
                return True
            return False
        if not self._came[rank]:
            if self.hangs.get(rank) == self._at[rank]:
                return False
            self._came[rank] = True
            peers.own.arrive(*self.ranks[rank][self._at[rank]])
            peers.own.blocked_since = now
            return True
        if (rank, self._at[rank]) == self.deaf or not self._all_came(rank):
            return False
        self._came[rank], peers.own.blocked_since = False, None
        self._at[rank] += 1
        return True

    def _all_came(self, rank: int) -> bool:
        """Whether all have come to the call that a rank waits in."""
        call = self.ranks[rank][self._at[rank]]
        number = sum(one.among == call.among for one in self.ranks[rank][: self._at[rank] + 1])
        return all(
            sum(one.among == call.among for one in self.ranks[peer][: self._at[peer] + self._came[peer]]) >= number
            for peer in range(SIZE)
            if peer in call
        )


names = st.sampled_from(("attention a", "attention b", "set-up"))
calls = st.lists(st.builds(Call, names, st.sampled_from(PARTS)), max_size=8)
how = {
    "program": calls.map(lambda program: [*program, Call("broadcast_object", ALL)]),
    "order": st.permutations(range(SIZE)),
    "pauses": st.lists(st.sampled_from((0.0, 0.2, 0.4)), min_size=1, max_size=5),
    "rank": st.integers(0, SIZE - 1),
    "at": st.integers(0, 20),
}


def run_of(program: list[Call], **trouble: object) -> Run:
    return Run([[call for call in program if rank in call] for rank in range(SIZE)], **trouble)


@given(**how)
@settings(max_examples=40, deadline=None)
def test_nobody_is_named_while_all_go_on_and_who_hangs_is_named(program, order, pauses, rank, at):
    well = run_of(program)
    well.go(order, pauses)
    well.world.pass_time(3 * STALL_S)
    assert well.world.errors() == {"None"} and well.world.left == set(range(SIZE))
    stuck = run_of(program, hangs={rank: at % len(well.ranks[rank])})
    stuck.go(order, pauses)
    stuck.world.pass_time(2 * STALL_S)
    (error,) = stuck.world.errors()
    assert error.startswith(f"rank {rank} has not gone on from")


@given(**how)
@settings(max_examples=40, deadline=None)
def test_who_has_not_heard_that_all_came_has_lost_a_message(program, order, pauses, rank, at):
    """Of calls of the whole run: what is lost where parts make calls too is not found yet."""
    run = run_of([call._replace(among=ALL) for call in program])
    run.deaf = rank, at % len(program)
    run.go(order, pauses)
    run.world.pass_time(3 * STALL_S)
    (error,) = run.world.errors()
    found = error.startswith(f"rank {rank} ") and "was lost" in error
    assert found or f"{rank} has left after" in error, error


@given(**how, other=st.none() | st.builds(Call, st.just("bytes"), st.sampled_from(PARTS)))
@settings(max_examples=60, deadline=None)
def test_a_rank_that_makes_another_call_or_one_less_ends_the_run(program, order, pauses, rank, at, other):
    run = run_of(program)
    own = run.ranks[rank]
    number = at % len(own)
    own[number : number + 1] = [] if other is None else [other]
    run.go(order, pauses)
    run.world.pass_time(3 * STALL_S)
    (error,) = run.world.errors()
    if run.world.left != set(range(SIZE)):
        assert error != "None"


def test_slow_ranks_are_not_blamed_and_the_first_other_call_is_told_in_seconds() -> None:
    """One rank is 200 calls ahead, as a displaced one may be, and the others take their time."""
    world = World(3, stall_s=1000.0)
    for ahead, rank in enumerate((0, 2, 1)):
        for number in range(1 + 100 * ahead):
            world.ranks[rank].own.arrive(f"attention {number}")
        world.ranks[rank].own.blocked_since = world.now
        world.pass_time(30.0)
    assert world.errors() == {"None"}
    world.ranks[0].own.arrive("bytes")
    world.pass_time(2.0)
    assert world.errors() == {"rank 0 calls bytes, and rank 2 attention 1: ranks make different calls"}


def test_who_waits_for_a_rank_that_waits_itself_is_not_named() -> None:
    """As where a message of TAPA's first phase from rank 1 to rank 0 is lost: 2 waits longest, for rank 0 alone."""
    awaits = {0: (1,), 1: (0,), 2: (0,)}
    waits = {
        rank: Progress({ALL: 4}, "attention x", waits_s=11 + 0.1 * rank, unchanged_s=11.0, awaits=of)
        for rank, of in awaits.items()
    }
    assert find_stalled(waits, STALL_S, STALL_S) == (
        0,
        "and all other ranks wait in attention x: a message was lost; it waits for a message from rank 1",
    )


@pytest.mark.parametrize(("heard_s", "named"), [(4.0, None), (10.5, 2), (0.0, 2)])
def test_a_rank_behind_is_judged_by_what_its_last_heartbeat_told(heard_s, named):
    """The others may have waited for longer than that tells: it has lost a message if it waits, and hangs if not."""
    gathers = Progress({ALL: 3}, "gather_object", ALL, 11.0, 11.1)
    found = find_stalled({0: gathers, 1: gathers, 2: Progress({ALL: 2}, "exchange", ALL, heard_s, 12.0)}, 10.0, 10.0)
    assert (found and found[0]) == named
    assert found is None or ("was lost" if heard_s else "has not gone on from exchange") in found[1]
