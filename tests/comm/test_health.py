"""The watch over real sockets: what happens to one rank reaches the others, and its thread ends when it should."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from seams import cut, peers_of
from watches import Watches, awaited, awaited_error

from cocodiff.comm.health import HELLO_BYTES, Health, Line
from cocodiff.config.errors import PeerLost, UserError


def open_sockets() -> int:
    """Of this process."""
    return len(psutil.Process().net_connections("tcp"))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_whose_connection_closes_is_named_by_every_survivor(watches: Watches, victim: int) -> None:
    ranks = watches.open(range(4), 4)
    cut(ranks[victim])
    errors = [awaited_error(watch) for watch in ranks if watch.rank != victim]
    assert [str(error) for error in errors] == [f"rank {victim} died: its connection closed"] * 3
    assert [(type(error), error.rank) for error in errors] == [(PeerLost, victim)] * 3


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("mistake", [False, True])
def test_a_failure_is_named_with_its_reason(watches: Watches, failing: int, mistake: bool) -> None:
    ranks = watches.open(range(4), 4)
    ranks[failing].fail("6 ranks for 4 heads", mistake)
    errors = [awaited_error(watch) for watch in ranks if watch.rank != failing]
    said = "6 ranks for 4 heads" if mistake else f"rank {failing} failed: 6 ranks for 4 heads"
    assert [(type(error), str(error)) for error in errors] == [(UserError if mistake else PeerLost, said)] * 3
    for watch in ranks:  # who has caught that does not go on
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
