"""The watch over real sockets: who is late, lost, started differently or a stranger when ranks meet; what happens to
one rank reaches the others, and its thread ends when it should."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from seams import cut, peers_of

from cocodiff.comm import health
from cocodiff.comm.health import HELLO_BYTES, Health, Line, Watch
from cocodiff.comm.peers import Limits
from cocodiff.config.errors import PeerLost, UserError


class Watches:
    """Opens watches, which are closed with the test. last_words: of ranks that would have ended their process."""

    KEY = "a word of this run"

    def __init__(self) -> None:
        self.last_words: list[str] = []
        self._open: list[Watch] = []

    def open(
        self,
        ranks: range,
        size: int,
        port: int | None = None,
        settings: dict[int, dict[str, str]] | None = None,
        meet: Callable[[int], None] = lambda port: None,
        start_s: float = 60.0,
    ) -> list[Watch | BaseException]:
        """Side by side; what an opening raised stands in its place. port: of a rank 0 elsewhere. meet: called with the
        port before the ranks join."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=size + 64) if 0 in ranks else None
        address = ("127.0.0.1", port if listener is None else listener.getsockname()[1])
        meet(address[1])

        def open_one(rank: int) -> Watch | BaseException:
            endpoint = listener if rank == 0 and listener is not None else address
            alike = (settings or {}).get(rank, {"preset": "tapa"})
            limits = Limits(timeout_s=60.0, start_s=start_s)
            try:
                watch = Watch(rank, size, endpoint, self.KEY, alike, limits, end=self.last_words.append)
            except (PeerLost, UserError) as error:
                return error
            self._open.append(watch)
            return watch

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(open_one, ranks))

    def close(self) -> None:
        """Rank 0 last, which waits for the others' goodbyes."""
        for watch in sorted(self._open, key=lambda watch: -watch.rank):
            watch.close()


def awaited(found: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.02)


def awaited_error(watch: Watch) -> BaseException:
    """The error that a rank's next check raises, once it has come."""
    awaited(lambda: peers_of(watch).lost)
    with pytest.raises((PeerLost, UserError)) as error:
        watch.check()
    return error.value


@pytest.fixture
def watches() -> Iterator[Watches]:
    watches = Watches()
    yield watches
    watches.close()
    assert not watches.last_words, "a rank in this process was lost while it waited, and would have ended the process"


def open_sockets() -> int:
    """Of this process."""
    return len(psutil.Process().net_connections("tcp"))


FAILED = "6 ranks for 4 heads"


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize(
    ("strike", "kind", "said"),
    [
        (cut, PeerLost, "rank {} died: its connection closed"),
        (lambda watch: watch.fail(FAILED), PeerLost, f"rank {{}} failed: {FAILED}"),
        (lambda watch: watch.fail(FAILED, mistake=True), UserError, FAILED),
    ],
    ids=["closed", "failed", "mistaken"],
)
def test_what_happens_to_a_rank_is_named_by_every_other(
    watches: Watches, who: int, strike: Callable[[Watch], None], kind: type, said: str
) -> None:
    ranks = watches.open(range(4), 4)
    strike(ranks[who])
    others = [watch for watch in ranks if watch.rank != who]
    errors = [awaited_error(watch) for watch in others]
    assert [(type(error), str(error)) for error in errors] == [(kind, said.format(who))] * 3
    for watch in others if strike is cut else ranks:  # who has caught that does not go on
        with pytest.raises((PeerLost, UserError)):
            watch.arrive("the next call")


def test_a_rank_that_no_error_can_reach_ends_with_the_loss_as_its_last_words(watches: Watches) -> None:
    ranks = watches.open(range(3), 3)
    with pytest.raises(OSError, match="busy"), ranks[2].blocking():
        raise OSError("busy")  # rank 2 is through with its call then
    with ranks[1].blocking():
        ranks[0].fail("out of memory")
        awaited_error(ranks[2])
        awaited(lambda: watches.last_words)
        time.sleep(0.3)  # in which rank 2's would come
    words = "cocodiff: [rank 1] rank 0 failed: out of memory; this rank was waiting for it and ends\n"
    assert [watches.last_words.pop() for _ in [*watches.last_words]] == [words]
    with pytest.raises(PeerLost), ranks[1].blocking():
        raise AssertionError("a rank is lost already")


def test_clean_close_raises_nothing_and_leaves_no_thread_and_no_connection(watches: Watches) -> None:
    before, sockets = set(threading.enumerate()), open_sockets()
    ranks = watches.open(range(4), 4)
    own = {thread for thread in set(threading.enumerate()) - before if thread.name == "watch"}
    watches.close()
    for one in own:
        one.join(timeout=60.0)
    assert len(own) == 4 and not any(one.is_alive() for one in own)
    for watch in ranks:
        watch.check()
    assert open_sockets() <= sockets


def test_blame_finds_the_death_behind_a_transport_error_and_leaves_other_errors_alone(watches: Watches) -> None:
    ranks, error = watches.open(range(3), 3), RuntimeError("connection reset by peer")
    assert ranks[0].blame(error) is error and Health().blame(error) is error
    ranks[1].fail("out of memory")
    assert str(ranks[2].blame(error)) == "rank 1 failed: out of memory"


def test_a_failure_during_rank_0s_goodbye_still_reaches_the_others(watches: Watches) -> None:
    ranks = watches.open(range(3), 3)
    with ThreadPoolExecutor(1) as pool:
        goodbye = pool.submit(ranks[0].close)
        awaited(lambda: 0 in peers_of(ranks[1]).left)
        assert not goodbye.done()
        ranks[1].fail("late")
        assert str(awaited_error(ranks[2])) == "rank 1 failed: late"
        goodbye.result(60)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_leaves_when_the_others_have_had_their_last_words(watches: Watches, failing: int) -> None:
    """Or are gone: no clock of its own tells it when."""
    ranks = watches.open(range(4), 4)
    ranks[failing].fail("out of memory")
    others = [watch for watch in ranks if watch.rank != failing]
    with ThreadPoolExecutor(4) as pool:
        leaving = [pool.submit(ranks[failing].leave)]
        for watch in others:
            awaited_error(watch)
            assert not leaving[0].done()
            if watch.rank == 3:
                cut(watch)
            else:
                leaving.append(pool.submit(watch.leave))
        for one in leaving:
            one.result(5)


@pytest.mark.parametrize("piece", [1000, HELLO_BYTES - 1])
def test_a_stranger_who_ends_no_line_is_cut_off(piece: int) -> None:
    """However small the pieces are: at most the bytes of a hello are kept."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        line, sent = Line(listener.accept()[0]), 0
        while sent < 3 * HELLO_BYTES:
            other.sendall(b" " * piece)
            sent += piece
            if line.receive() is None:
                break
        line.socket.close()
    assert HELLO_BYTES < sent <= 2 * HELLO_BYTES


def test_a_line_may_come_in_pieces_and_two_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        line = Line(listener.accept()[0], rank=1)
        found = []
        for piece in (b'{"a"', b': 1}\n{"b": 2}\n{', b'"c": 3}\n'):
            other.sendall(piece)
            found.append(line.receive())
        line.socket.close()
    assert found == [[], [{"a": 1}, {"b": 2}], [{"c": 3}]]


# How ranks meet -------------------------------------------------------------------------------------------------------

HELLO = {"hello": 1, "settings": {}}


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(HELLO | {"key": "another run's word"}).encode() + b"\n",
        json.dumps(HELLO).encode() + b"\n",
        json.dumps({"key": Watches.KEY}).encode() + b"\n",
        b"[1, 2]\n",
        b"GET / HTTP/1.1\n",
        b"[" * 60_000,
        b"x" * 100_000,
        b"",
        b'{"hello": 1, "ke',
    ],
    ids=["wrong key", "no key", "no rank", "no mapping", "no JSON", "nested", "without end", "silent", "half a line"],
)
def test_strangers_are_turned_away_and_hold_nobody_up(watches, data):
    """More connections than there is room for, which say nothing of use: the ranks meet at once all the same."""
    strangers: list[socket.socket] = []

    def meet(port: int) -> None:
        for _ in range(60):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            with suppress(OSError):
                strangers[-1].sendall(data)

    ranks = watches.open(range(3), 3, meet=meet)
    assert all(isinstance(watch, Watch) for watch in ranks), ranks
    for stranger in strangers:
        stranger.settimeout(10)
        with suppress(ConnectionError):
            assert stranger.recv(100) == b""
        stranger.close()


def test_who_joins_as_a_rank_that_is_there_is_turned_away(watches):
    late: list[socket.socket] = []

    def meet(port: int) -> None:
        for _ in range(2):
            late.append(socket.create_connection(("127.0.0.1", port)))
            late[-1].sendall(json.dumps({"hello": 1, "key": Watches.KEY}).encode() + b"\n")
            late[-1].settimeout(10)
            time.sleep(0.1)

    errors = watches.open(range(1), 3, meet=meet, start_s=2.0)
    assert b"welcome" in late[0].recv(100) and late[1].recv(100) == b""
    assert str(errors[0]) == "rank 1 did not start within 2 s, nor did rank 2"


def test_a_rank_that_comes_late_names_the_one_that_was_lost_before(watches) -> None:
    ports = []

    def meet(port: int) -> None:
        ports.append(port)
        with socket.create_connection(("127.0.0.1", port)) as joining:
            joining.sendall(json.dumps(HELLO | {"key": Watches.KEY}).encode() + b"\n")

    errors = watches.open(range(1), 3, meet=meet) + watches.open(range(2, 3), 3, port=ports[0])
    assert [str(error) for error in errors] == ["rank 1 died: its connection closed"] * 2


def test_different_settings_are_refused(watches) -> None:
    errors = watches.open(range(3), 3, settings={2: {"preset": "flat"}})
    assert {type(error) for error in errors} == {UserError}
    assert all("rank 2 was started differently from rank 0: preset is flat there" in str(error) for error in errors)


@pytest.mark.parametrize(("start_s", "refused_s"), [(0.5, 60.0), (60.0, 0.5)])
def test_no_rank_0_to_join(watches, start_s, refused_s, monkeypatch):
    """Who is refused for long does not wait for the others as long as a start may take."""
    monkeypatch.setattr(health, "REFUSED_S", refused_s)
    began = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        (error,) = watches.open(range(1, 2), 2, port=port, start_s=start_s)
    assert time.monotonic() - began < 30.0
    assert isinstance(error, PeerLost) and error.rank == 0
    assert f"does not answer at 127.0.0.1:{port}" in str(error)
