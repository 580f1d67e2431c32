"""Who is lost, and who ends, by what ranks hear and when: in a time of their own, without sockets or threads."""

from __future__ import annotations

import pytest
from peer_worlds import World

from cocodiff.comm.peers import ROUND_S, describe_difference
from cocodiff.config.errors import PeerLost, UserError


def test_different_settings_are_refused_on_every_rank_by_name() -> None:
    world = World(3, {2: {"preset": "flat"}})
    assert {type(peers.lost) for peers in world.ranks} == {UserError}
    difference = "preset is flat there and tapa on rank 0"
    assert world.errors() == {f"rank 2 was started differently from rank 0: {difference}; start every rank alike"}


def test_differences_are_described() -> None:
    assert describe_difference({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == ""
    assert describe_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b is 3 there and 2 on rank 0"
    assert describe_difference({"a": "1"}, {"a": "1", "z": "9"}) == "z is 9 there and absent on rank 0"
    assert describe_difference({"a": "1"}, {}) == "a is absent there and 1 on rank 0"


def test_ranks_that_never_start_are_named() -> None:
    world = World(4, join=False, start_s=9.0)
    world.join(1)
    assert not world.ranks[0].agreed and str(world.ranks[1].late_start()).endswith("within 9 s of the start")
    assert str(world.ranks[0].late_start()) == "rank 2 did not start within 9 s, nor did rank 3"
    assert World(3).ranks[0].agreed and World(3).ranks[2].agreed


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


def test_a_rank_that_left_while_others_go_on_is_lost() -> None:
    """Its goodbye exempts it from heartbeats, not from the calls that the others still make."""
    world = World(3, timeout_s=20.0)
    world.send(1, [{"left": 1}])
    world.stopped.add(1)
    world.pass_time(30.0)
    assert world.errors() == {"None"}
    for rank in (0, 2):
        world.ranks[rank].own.arrive("gather_object")
    world.ranks[2].own.blocked_since = world.now
    world.pass_time(30.0)
    (error,) = world.errors(but=1)
    assert error == "rank 1 left the run after the start, and rank 2 has waited 1 s in gather_object"


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
    if at == "in a round":
        world.now += ROUND_S
        times = [peers.wake(world.now) for peers in world.ranks]
        world.now += asleep_s
        for peers, now in zip(world.ranks, times, strict=True):
            world.send(peers.rank, peers.look(now))
    else:
        world.now += asleep_s
    world.pass_time(2.0)
    assert world.errors() == {"None"}
    assert world.ranks[0].own.seen(world.ranks[0].own.now()).waits_s == pytest.approx(2.5, abs=0.5)
