"""Who is lost, and who ends, by what ranks hear and when: in a time of their own, without sockets or threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cocodiff.comm.peers import ALL, ROUND_S, Limits, Message, Peers, Progress, Ranks, describe_difference, find_stalled
from cocodiff.config.errors import PeerLost


class World:
    """Ranks that hear each other at once. stopped: these do nothing, and find their messages when they go on."""

    def __init__(self, size: int, join: bool = True, **limits) -> None:
        self.now = 100.0
        self.ranks = [Peers(rank, size, {"preset": "tapa"}, Limits(**limits), lambda: self.now) for rank in range(size)]
        self.stopped, self.left = set[int](), set[int]()
        self._unread: list[tuple[int, int, Message]] = []
        for rank in range(1, size) if join else ():
            self.join(rank)

    def join(self, rank: int) -> None:
        self.send(rank, [{"settings": {"preset": "tapa"}}])

    def send(self, sender: int, messages: list[Message]) -> None:
        for message in messages:
            for to in [0] if sender else range(1, len(self.ranks)):
                self._unread.append((sender, to, message))
        self._deliver()

    def _deliver(self) -> None:
        unread, self._unread = self._unread, [one for one in self._unread if one[1] in self.stopped]
        for sender, to, message in unread:
            if to not in self.stopped:
                self.send(to, self.ranks[to].hear(sender, message, self.ranks[to].own.now()))

    def leave(self, rank: int) -> None:
        self.left.add(rank)
        self.send(rank, self.ranks[rank].goodbye())

    def die(self, victim: int) -> None:
        self.stopped.add(victim)
        for rank in [0] if victim else range(1, len(self.ranks)):
            self.send(rank, self.ranks[rank].gone(victim, self.ranks[rank].own.now()))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / ROUND_S)):
            self.now += ROUND_S
            going = [peers for peers in self.ranks if peers.rank not in self.stopped]
            times = [peers.wake(self.now) for peers in going]
            self._deliver()
            for peers, now in zip(going, times, strict=True):
                self.send(peers.rank, peers.look(now))

    def errors(self, but: int | None = None) -> set[str]:
        return {str(peers.lost) for peers in self.ranks if peers.rank != but}


def test_settings_that_only_one_rank_has_are_described() -> None:
    assert describe_difference({"a": "1"}, {"a": "1", "z": "9"}) == "z is 9 there and absent on rank 0"
    assert describe_difference({"a": "1"}, {}) == "a is absent there and 1 on rank 0"


def test_a_rank_that_falls_silent_while_another_is_missing_is_named_before_the_limit() -> None:
    world = World(3, join=False, timeout_s=5.0, start_s=600.0)
    world.join(1)
    world.stopped = {1, 2}
    world.pass_time(5.5)
    assert str(world.ranks[0].lost) == "rank 1 has been silent for 5 s"
    assert world.ranks[0].known_loss() == [{"lost": 1, "reason": "has been silent for 5 s"}]  # for who joins later


@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_rank_is_lost_after_the_timeout(victim: int) -> None:
    world = World(3, timeout_s=20.0)
    world.pass_time(100.0)  # heartbeats tell that the ranks are there, whatever they do
    assert world.errors() == {"None"}
    world.stopped.add(victim)
    world.pass_time(14.0)
    assert world.errors() == {"None"}  # the last heartbeat came five seconds before at most
    world.pass_time(7.0)
    assert world.errors(but=victim) == {f"rank {victim} has been silent for 20 s"}


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_rank_is_named_and_the_others_need_not_wait_for_it(victim: int) -> None:
    world = World(4)
    world.die(victim)
    assert world.errors(but=victim) == {f"rank {victim} died: its connection closed"}
    assert all(victim in peers.left for peers in world.ranks if peers.rank != victim)
    assert all(peers.all_left == (victim == 0) for peers in world.ranks if peers.rank != victim)


def test_a_rank_that_said_goodbye_is_no_loss_and_nothing_is_once_all_have() -> None:
    world = World(3)
    world.send(1, [{"left": 1}])
    world.die(1)
    world.ranks[0].closed_at = world.now
    world.die(2)
    assert world.ranks[0].lost is None and world.ranks[0].all_left


def test_a_rank_that_never_says_goodbye_is_given_up_once_it_no_longer_goes_on() -> None:
    world = World(4, timeout_s=5.0, stall_s=10.0)
    for rank in (0, 1, 3):
        world.send(rank, [{"left": rank}])
    world.ranks[0].closed_at = world.now
    for _ in range(30):
        world.ranks[2].own.arrive("attention x")
        world.pass_time(1.0)
    assert world.errors() == {"None"}
    world.pass_time(12.0)
    (error,) = world.errors()
    assert error == "rank 2 has not gone on from attention x for 10 s, and rank 0 has waited 39 s for it to leave"
    assert world.ranks[2].last_words(world.now + 4.0) == f"the other ranks have given this one up: {error}"


def test_the_first_loss_stands() -> None:
    world = World(3)
    world.send(2, world.ranks[2].lose(PeerLost(2, "failed: no memory"), world.now))
    world.die(1)
    assert world.errors() == {"rank 2 failed: no memory"}


@pytest.mark.parametrize("blocked", [False, True])
def test_a_rank_whose_main_thread_hangs_is_given_up_and_ends(blocked: bool) -> None:
    """It sends heartbeats, but does not come to a call that another rank waits in."""
    world = World(3, stall_s=10.0)
    for rank in (0, 2):
        world.ranks[rank].own.arrive("attention blocks.0")
        world.ranks[rank].own.blocked_since = world.now
    while world.errors() == {"None"}:
        world.pass_time(ROUND_S)
    lost_at, (error,) = world.now, world.errors()
    waited = "and rank 0 has waited 10 s in attention blocks.0"
    assert error == f"rank 1 has not gone on from the start for 10 s, {waited}"
    world.pass_time(1.0)
    assert world.ranks[2].last_words(world.now) == f"{error}; this rank was waiting for it and ends"
    if blocked:
        world.ranks[1].own.blocked_since = lost_at
        assert world.ranks[1].last_words(world.now) == f"{error}; this rank was waiting for it and ends"
    else:
        assert world.ranks[1].last_words(lost_at) == ""
        assert world.ranks[1].last_words(lost_at + 4.0) == f"the other ranks have given this one up: {error}"
        world.ranks[1].raised = True  # its main thread has heard of it, and ends by itself
        assert world.ranks[1].last_words(lost_at + 4.0) == ""


def test_a_rank_that_waits_for_a_while_only_is_not_waited_for() -> None:
    """Its thread notes that it waits, four times a second; what it does later is no wait."""
    world = World(2, stall_s=10.0)
    for _ in range(40):
        world.ranks[1].own.still_waiting()
        world.pass_time(ROUND_S)
    assert world.ranks[1].own.seen(world.now).waits_s == pytest.approx(40 * ROUND_S, abs=ROUND_S)
    world.pass_time(20.0)
    assert world.ranks[1].own.seen(world.now).waits_s == 0.0 and world.errors() == {"None"}


@pytest.mark.parametrize("asleep_s", [1000.0, 0.95])
@pytest.mark.parametrize("at", ["between rounds", "in a round"])
def test_ranks_that_were_stopped_themselves_accuse_nobody(asleep_s: float, at: str) -> None:
    """After Ctrl-Z and fg all heartbeats are late, for no rank sent any, and all waits have been long: also where the
    stop came after a round's look at the clock."""
    world = World(2, timeout_s=0.9, stall_s=5.0)
    world.ranks[0].own.arrive("attention x")  # the other one computes
    world.ranks[0].own.blocked_since = world.now
    world.pass_time(0.4)
    times = []
    if at == "in a round":
        world.now += ROUND_S
        times = [peers.wake(world.now) for peers in world.ranks]
    for waited_s in (2.5, 4.5):
        world.now += asleep_s
        for peers, now in zip(world.ranks, times, strict=False):
            world.send(peers.rank, peers.look(now))
        times = []
        world.pass_time(2.0)
        assert world.errors() == {"None"}
        assert world.ranks[0].own.seen(world.ranks[0].own.now()).waits_s == pytest.approx(waited_s, abs=0.5)


# Who keeps the others waiting -----------------------------------------------------------------------------------------

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
    """ranks: each one's own list of calls. hangs: ranks that do nothing after so many of them; begun: but that they
    have begun the next one. deaf: one that does not hear that all have come to its n-th call."""

    ranks: list[list[Call]]
    hangs: dict[int, int] = field(default_factory=dict)
    begun: bool = False
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
            hangs, call = self.hangs.get(rank) == self._at[rank], self.ranks[rank][self._at[rank]]
            if not hangs or (self.begun and peers.own.last.at != call.name):
                peers.own.arrive(*call)
            self._came[rank], peers.own.blocked_since = not hangs, None if hangs else now
            return not hangs
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
    "program": calls.map(lambda program: [*program, Call("broadcast_value", ALL)]),
    "order": st.permutations(range(SIZE)),
    "pauses": st.lists(st.sampled_from((0.0, 0.2, 0.4)), min_size=1, max_size=5),
    "rank": st.integers(0, SIZE - 1),
    "at": st.integers(0, 20),
}


def run_of(program: list[Call], **trouble: object) -> Run:
    return Run([[call for call in program if rank in call] for rank in range(SIZE)], **trouble)


@given(**how, begun=st.booleans())
@settings(max_examples=40, deadline=None)
def test_nobody_is_named_while_all_go_on_and_who_hangs_is_named(program, order, pauses, rank, at, begun):
    well = run_of(program)
    well.go(order, pauses)
    well.world.pass_time(3 * STALL_S)
    assert well.world.errors() == {"None"} and well.world.left == set(range(SIZE))
    stuck = run_of(program, hangs={rank: at % len(well.ranks[rank])}, begun=begun)
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
    assume(other is None or not other.among or rank in other.among)
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
    gathers = Progress({ALL: 3}, "gather_values", ALL, 11.0, 11.1)
    found = find_stalled({0: gathers, 1: gathers, 2: Progress({ALL: 2}, "exchange", ALL, heard_s, 12.0)}, 10.0, 10.0)
    assert (found and found[0]) == named
    assert found is None or ("was lost" if heard_s else "has not gone on from exchange") in found[1]
