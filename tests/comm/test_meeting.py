"""How ranks meet over real sockets: who is late, lost, started differently or a stranger."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest
from watches import Watches

from cocodiff.comm import health
from cocodiff.comm.health import Watch
from cocodiff.config.errors import PeerLost, UserError

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
