"""Watches over real sockets, in threads of this process and in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cocodiff.comm.health import Limits, Watch
from cocodiff.errors import PeerLost, UserError

KEY = "a word of this run"
PROGRAM = Path(__file__).with_name("health_rank.py")


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


def close_all(watches: list[Watch]) -> None:
    with ThreadPoolExecutor(len(watches)) as pool:
        list(pool.map(Watch.close, watches))
