"""The watch over real sockets: who dies, hangs, fails or does not belong is named on every survivor."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from cocodiff.comm.health import Alone, Limits, Watch, describe_difference
from cocodiff.errors import PeerLost, UserError

pytestmark = pytest.mark.processes

KEY = "a word of this run"
PROGRAM = Path(__file__).with_name("health_rank.py")
Open = Callable[[], Watch]


def open_all(
    ranks: range,
    size: int,
    port: int | None = None,
    settings: dict[int, dict[str, str]] | None = None,
    timeout_s: float = 20.0,
    meet: Callable[[int], None] | None = None,
    start_s: float = 20.0,
    stall_s: float = 60.0,
) -> list[Watch | BaseException]:
    """Opens the watches of `ranks` side by side; what an opening raised stands in its place.

    port: of a rank 0 elsewhere. meet: called with the port before the ranks join.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=size + 64) if 0 in ranks else None
    address = ("127.0.0.1", port if listener is None else listener.getsockname()[1])
    if meet is not None:
        meet(address[1])

    limits = Limits(timeout_s, start_s, stall_s)

    def open_one(rank: int) -> Watch | BaseException:
        try:
            alike = (settings or {}).get(rank, {"preset": "tapa"} if settings else {})
            return Watch.open(rank, size, listener if rank == 0 else address, KEY, alike, limits)
        except (PeerLost, UserError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(open_one, ranks))


@contextmanager
def process_rank(
    rank: int, size: int, port: int, timeout_s: float, stall_s: float = 60.0
) -> Iterator[subprocess.Popen[str]]:
    """A rank in a process of its own, killed at the end."""
    words = [sys.executable, str(PROGRAM), str(rank), str(size), str(port), KEY, str(timeout_s), str(stall_s)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def survivors_and(
    victim: int, size: int, timeout_s: float, then: Callable[[subprocess.Popen[str]], None]
) -> list[BaseException]:
    """What every other rank learns after `then` happened to the process of rank `victim`."""
    others = [rank for rank in range(size) if rank != victim]
    started: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(1) as pool, _victim(victim, size, timeout_s, started) as (meet, port):
        opened = pool.submit(_open_others, others, size, port, timeout_s, meet)
        watches = opened.result(60)
        assert started[0].stdout.readline() == "open\n"
        assert all(isinstance(watch, Watch) for watch in watches), watches
        for watch in watches:
            watch.check()
        then(started[0])
        return [awaited_error(watch) for watch in watches]


@contextmanager
def _victim(
    rank: int, size: int, timeout_s: float, started: list[subprocess.Popen[str]]
) -> Iterator[tuple[Callable[[int], None] | None, int | None]]:
    """Starts the victim: rank 0 at once, as the others need its port; any other when rank 0's port is known."""
    if rank == 0:
        with process_rank(0, size, 0, timeout_s) as process:
            started.append(process)
            yield None, int(process.stdout.readline())
        return
    contexts = []

    def meet(port: int) -> None:
        contexts.append(process_rank(rank, size, port, timeout_s))
        started.append(contexts[0].__enter__())

    try:
        yield meet, None
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


def _open_others(
    others: list[int], size: int, port: int | None, timeout_s: float, meet: Callable[[int], None] | None
) -> list[Watch | BaseException]:
    return open_all(others, size, port, timeout_s=timeout_s, meet=meet)  # type: ignore[arg-type]


def awaited_error(watch: Watch, within_s: float = 20.0) -> BaseException:
    """The error that a rank's next check raises, once it has come."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            watch.check()
        except (PeerLost, UserError) as error:
            return error
        time.sleep(0.02)
    raise AssertionError(f"rank {watch.rank} learned of nothing in {within_s:g} s")


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


def lost_while_waiting(watch: Watch, within_s: float = 20.0) -> BaseException:
    """What ends a wait of this thread, which notes four times a second that it goes on."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            watch.still_waiting()
        except PeerLost as error:
            return error
        time.sleep(0.25)
    raise AssertionError(f"rank {watch.rank} waits for ever")


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


def close_all(watches: list[Watch]) -> None:
    with ThreadPoolExecutor(len(watches)) as pool:
        list(pool.map(Watch.close, watches))


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
    assert Alone().blame(error) is error
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


def test_different_settings_are_refused_on_every_rank_by_name():
    errors = open_all(range(3), 3, settings={2: {"preset": "flat"}})
    assert {type(error) for error in errors} == {UserError}
    for error in errors:
        assert "rank 2 was started differently" in str(error)
        assert "preset is flat there and tapa on rank 0" in str(error)
        assert "start every rank alike" in str(error)


def test_differences_are_described():
    assert describe_difference({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == ""
    assert describe_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b is 3 there and 2 on rank 0"
    assert describe_difference({"a": "1"}, {"a": "1", "z": "9"}) == "z is 9 there and absent on rank 0"
    assert describe_difference({"a": "1"}, {}) == "a is absent there and 1 on rank 0"


HELLO = {"hello": 1, "settings": {}}


@pytest.mark.parametrize(
    "word",
    [
        json.dumps(HELLO | {"key": "another run's word"}),
        json.dumps(HELLO),
        json.dumps({"key": KEY}),
        json.dumps([1, 2]),
        "GET / HTTP/1.1",
    ],
    ids=["wrong key", "no key", "no rank", "no mapping", "no JSON"],
)
def test_a_stranger_is_turned_away(word):
    strangers: list[socket.socket] = []

    def meet(port: int) -> None:
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[0].sendall(word.encode() + b"\n")

    watches = open_all(range(3), 3, meet=meet)
    assert all(isinstance(watch, Watch) for watch in watches), watches
    assert strangers[0].recv(100) == b""
    close_all(watches)


@pytest.mark.parametrize(
    ("data", "ends"),
    [(b"[" * 60_000, True), (b"x" * 100_000, True), (b"", False), (b'{"hello": 1, "ke', False)],
    ids=["deeply nested", "a line without end", "silent", "half a line"],
)
def test_strangers_hold_nobody_up(data, ends):
    """More connections than there is room for, which say nothing of use: the ranks meet at once all the same."""
    strangers: list[socket.socket] = []

    def meet(port: int) -> None:
        for _ in range(60):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            with suppress(OSError):
                strangers[-1].sendall(data)

    watches = open_all(range(3), 3, meet=meet, start_s=4.0)  # a stranger has 5 s to say who it is
    assert all(isinstance(watch, Watch) for watch in watches), watches
    for stranger in strangers:
        stranger.settimeout(10)
        with suppress(ConnectionError):
            assert stranger.recv(100) == b""
        stranger.close()
    close_all(watches)


def test_who_joins_as_a_rank_that_is_there_is_turned_away():
    late: list[socket.socket] = []

    def meet(port: int) -> None:
        for _ in range(2):
            late.append(socket.create_connection(("127.0.0.1", port)))
            late[-1].sendall(json.dumps({"hello": 1, "key": KEY}).encode() + b"\n")
            late[-1].settimeout(10)
            time.sleep(0.1)

    errors = open_all(range(1), 3, meet=meet, start_s=2.0)
    assert b"welcome" in late[0].recv(100) and late[1].recv(100) == b""
    assert str(errors[0]) == "rank 1 did not start within 2 s, nor did rank 2"


def test_a_rank_that_never_starts_is_named():
    errors = open_all(range(2), 3, start_s=1.5)
    assert [str(error) for error in errors] == ["rank 2 did not start within 1.5 s"] * 2
    assert {type(error) for error in errors} == {PeerLost}


def test_a_rank_that_is_lost_during_the_start_is_named_before_the_limit():
    """One that has joined and is stopped, while another one is still missing."""
    contexts = []

    def meet(port: int) -> None:
        contexts.append(process_rank(1, 3, port, 1.0))
        process = contexts[0].__enter__()
        time.sleep(1.0)  # it joins
        process.send_signal(signal.SIGSTOP)

    (error,) = open_all(range(1), 3, meet=meet, timeout_s=1.0, start_s=60.0)
    assert str(error) == "rank 1 has been silent for 1 s"
    contexts[0].__exit__(None, None, None)


def test_no_rank_0_to_join():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        (error,) = open_all(range(1, 2), 2, port=port, start_s=0.5)
    assert isinstance(error, PeerLost) and error.rank == 0
    assert f"does not answer at 127.0.0.1:{port}" in str(error)
