"""The watch over real sockets: who dies, hangs, fails or leaves is named on every survivor."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from watches import awaited_error, close_all, lost_while_waiting, open_all, process_rank, survivors_and

from cocodiff.comm.health import Health, Watch
from cocodiff.errors import PeerLost, UserError

pytestmark = [pytest.mark.processes, pytest.mark.alone]


@pytest.fixture(autouse=True)
def this_process_is_not_ended(monkeypatch):
    """By a watch of the test's own, whose rank is waiting when it is lost: that is a failure of the test."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    yield
    assert not ends, "a rank in this process was lost while it waited, and would have ended the process"


def test_a_killed_rank_is_named_by_every_survivor():
    errors = survivors_and(2, 4, 20.0, lambda process: process.kill())
    assert [(type(error), error.rank) for error in errors] == [(PeerLost, 2)] * 3
    assert {str(error) for error in errors} == {"rank 2 died: its connection closed"}


def test_a_rank_that_leaves_without_goodbye_is_lost():
    errors = survivors_and(1, 3, 20.0, lambda process: process.communicate("leave\n"))
    assert [str(error) for error in errors] == ["rank 1 died: its connection closed"] * 2


def test_rank_0_dying_is_seen_by_all():
    errors = survivors_and(0, 3, 20.0, lambda process: process.kill())
    assert [(type(error), error.rank) for error in errors] == [(PeerLost, 0)] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_rank_is_lost_after_the_timeout(victim):
    errors = survivors_and(victim, 3, 3.0, lambda process: process.send_signal(signal.SIGSTOP))
    assert {str(error) for error in errors} == {f"rank {victim} has been silent for 3 s"}


@pytest.mark.parametrize("word", ["block", "block after a job"])
def test_a_rank_that_no_error_can_reach_ends_with_the_loss_as_its_last_words(capfd, word):
    contexts = []

    def meet(port: int) -> None:
        contexts.append(process_rank(1, 2, port, 20.0))
        contexts[0].process = contexts[0].__enter__()

    (watch,) = open_all(range(1), 2, meet=meet)
    process = contexts[0].process
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    assert [process.stdout.readline() for _ in range(2)] == ["open\n", "blocked\n"]
    watch.fail("out of memory")
    assert process.wait(20) == 1
    assert "[rank 1] rank 0 failed: out of memory; this rank was waiting for it and ends" in capfd.readouterr().err
    awaited_error(watch)
    with pytest.raises(PeerLost), watch.blocking():
        raise AssertionError("a rank is lost already")
    contexts[0].__exit__(None, None, None)


def test_a_rank_whose_main_thread_hangs_is_given_up_and_ends(capfd):
    """It sends heartbeats, but does not come to a call that another rank waits in."""
    contexts = []

    def meet(port: int) -> None:
        contexts.append(process_rank(1, 3, port, 20.0, stall_s=1.0))
        contexts[0].process = contexts[0].__enter__()

    watches = open_all(range(0, 3, 2), 3, meet=meet, stall_s=1.0)
    process = contexts[0].process
    process.stdin.write("sleep\n")
    process.stdin.flush()
    for watch in watches:
        watch.arrive("attention blocks.0")
    error = lost_while_waiting(watches[1])
    assert isinstance(error, PeerLost) and error.rank == 1
    assert str(error).startswith("rank 1 has not gone on from the start for ")
    assert " s, and rank 2 has waited " in str(error) and "s in attention blocks.0" in str(error)
    assert awaited_error(watches[0]).rank == 1
    assert process.wait(20) == 1
    assert "[rank 1] the other ranks have given this one up: rank 1 has not gone on" in capfd.readouterr().err
    contexts[0].__exit__(None, None, None)


def test_a_rank_that_left_while_others_go_on_is_lost():
    """Its goodbye exempts it from heartbeats, not from the calls that the others still make."""
    watches = open_all(range(3), 3, timeout_s=1.0)
    watches[1].close()
    for watch in (watches[0], watches[2]):
        watch.arrive("gather_object")
    error = lost_while_waiting(watches[2])
    assert str(error).startswith("rank 1 left the run after the start, and rank 2 has waited ")
    assert awaited_error(watches[0]).rank == 1


def test_ranks_that_make_different_calls_are_named():
    watches = open_all(range(3), 3, stall_s=0.5, timeout_s=1.0)
    for watch, call in zip(watches, ("gather_object", "attention x", "attention x"), strict=True):
        watch.arrive(call)
    with ExitStack() as all_wait:
        for watch in watches:
            all_wait.enter_context(watch.blocking())
        error = awaited_error(watches[1])
    assert str(error) == ("rank 0 waits in gather_object, and rank 1 in attention x: ranks make different calls")
    awaited_error(watches[2])
    awaited_error(watches[0])


def test_a_rank_that_was_stopped_itself_accuses_nobody(monkeypatch):
    """After Ctrl-Z and fg all heartbeats are late, for no rank sent any, and all waits have been long."""
    watches = open_all(range(2), 2, timeout_s=1.0, stall_s=50.0)
    with watches[0].blocking(), watches[1].blocking():
        later = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: later() + 100.0)
        check_for_a_second(watches)
    close_all(watches)


def test_a_busy_rank_is_not_lost():
    """Heartbeats come from a thread: three timeouts of silence from the ranks' own work lose nobody."""
    watches = open_all(range(3), 3, timeout_s=1.0)
    time.sleep(3.0)
    for watch in watches:
        watch.check()
    close_all(watches)


def test_a_short_stop_is_no_silence_either(monkeypatch):
    """Of less than a second, where the timeout is shorter still."""
    watches = open_all(range(2), 2, timeout_s=0.9)
    later = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: later() + 0.95)
    check_for_a_second(watches)
    close_all(watches)


def check_for_a_second(watches: list[Watch]) -> None:
    """Often: ranks in a blocking wait end half a second after a loss."""
    for _ in range(20):
        time.sleep(0.05)
        for watch in watches:
            watch.check()


def test_clean_close_leaves_no_thread():
    before = set(threading.enumerate())
    watches = open_all(range(4), 4, timeout_s=2.0)
    own = set(threading.enumerate()) - before
    close_all(watches)
    for one in own:
        one.join(timeout=5.0)
    assert len(own) == 8 and not any(one.is_alive() for one in own)


def test_clean_close_raises_nothing():
    watches = open_all(range(4), 4)
    close_all(watches)
    time.sleep(0.5)
    for watch in watches:
        watch.check()


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_is_named_with_its_reason(failing):
    watches = open_all(range(4), 4)
    watches[failing].fail("ValueError: no memory")
    errors = [awaited_error(watch) for watch in watches if watch.rank != failing]
    assert {str(error) for error in errors} == {f"rank {failing} failed: ValueError: no memory"}
    assert {type(error) for error in errors} == {PeerLost}


def test_blame_finds_the_death_behind_a_transport_error():
    watches = open_all(range(3), 3)
    watches[1].fail("out of memory")
    blamed = watches[2].blame(RuntimeError("connection reset by peer"))
    assert str(blamed) == "rank 1 failed: out of memory"


def test_blame_leaves_other_errors_alone():
    watches = open_all(range(2), 2)
    error = RuntimeError("of its own")
    assert watches[0].blame(error) is error
    assert Health().blame(error) is error
    close_all(watches)


@pytest.mark.parametrize("mistaken", [0, 1])
def test_a_mistake_is_the_users_on_every_rank(mistaken):
    watches = open_all(range(3), 3)
    watches[mistaken].fail("6 ranks for 4 heads", mistake=True)
    errors = [awaited_error(watch) for watch in watches if watch.rank != mistaken]
    assert [(type(error), str(error)) for error in errors] == [(UserError, "6 ranks for 4 heads")] * 2


def test_a_failure_during_rank_0s_goodbye_still_reaches_the_others():
    watches = open_all(range(3), 3)
    with ThreadPoolExecutor(1) as pool:
        goodbye = pool.submit(watches[0].close)
        time.sleep(0.3)
        assert not goodbye.done()
        watches[1].fail("late")
        assert str(awaited_error(watches[2])) == "rank 1 failed: late"
        goodbye.result(10)
