"""How ranks meet over real sockets: who is late, lost, started differently or a stranger."""

from __future__ import annotations

import json
import signal
import socket
import time
from contextlib import suppress

import pytest
from watches import KEY, close_all, open_all, process_rank

from cocodiff.comm.health import Watch, describe_difference
from cocodiff.errors import PeerLost, UserError

pytestmark = pytest.mark.processes


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


def test_a_rank_that_comes_late_names_the_one_that_was_lost_before():
    contexts, ports = [], []

    def meet(port: int) -> None:
        ports.append(port)
        contexts.append(process_rank(1, 3, port, 20.0))
        process = contexts[0].__enter__()
        time.sleep(1.0)  # it joins
        process.kill()

    errors = open_all(range(1), 3, meet=meet) + open_all(range(2, 3), 3, port=ports[0])
    assert [str(error) for error in errors] == ["rank 1 died: its connection closed"] * 2
    contexts[0].__exit__(None, None, None)


def test_no_rank_0_to_join():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        (error,) = open_all(range(1, 2), 2, port=port, start_s=0.5)
    assert isinstance(error, PeerLost) and error.rank == 0
    assert f"does not answer at 127.0.0.1:{port}" in str(error)
