"""Who keeps the others waiting, where parts of the ranks make calls of their own: X is ranks 0 and 1, Y is 2 and 3."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cocodiff.comm.peers import ALL, Progress, find_stalled

X, Y = (0, 1), (2, 3)
STALL_S = 10.0


def goes_on(among, count, run=2):
    return Progress({ALL: run, among: count}, "attention", among, waits_s=0.0, unchanged_s=1.0)


def waits(among, count, waits_s, run=2):
    calls = {ALL: count} if among == ALL else {ALL: run, among: count}
    return Progress(calls, "gather_object", among, waits_s, unchanged_s=waits_s + 0.1)


def hangs(among, count, unchanged_s, run=2):
    return Progress({ALL: run, among: count}, "attention", among, waits_s=0.0, unchanged_s=unchanged_s)


def finished(count, waits_s):
    """A rank of Y that waits for X in a call of the whole run."""
    return Progress({ALL: 3, Y: count}, "broadcast_object", ALL, waits_s, waits_s + 0.1)


NOTHING_YET = Progress({ALL: 2}, "broadcast_object", ALL, 0.0, 20.0)


@pytest.mark.parametrize(
    ("ranks", "stalled"),
    [
        pytest.param([goes_on(X, 90), goes_on(X, 90), goes_on(Y, 3), goes_on(Y, 3)], None, id="one part is far ahead"),
        pytest.param([goes_on(X, 90), goes_on(X, 91), finished(3, 50), finished(3, 50)], None, id="one part is done"),
        pytest.param([waits(X, 91, 15), hangs(X, 90, 20), goes_on(Y, 3), goes_on(Y, 3)], 1, id="a part's rank hangs"),
        pytest.param([waits(X, 91, 15), hangs(X, 90, 20), finished(3, 50), finished(3, 50)], 1, id="all wait for it"),
        pytest.param([waits(X, 91, 5), hangs(X, 90, 6), finished(3, 50), finished(3, 50)], None, id="not yet"),
        pytest.param(
            [hangs(X, 90, 20), hangs(X, 90, 20), finished(3, 50), finished(3, 50)], 0, id="a whole part hangs"
        ),
        pytest.param([hangs(X, 90, 20), waits(X, 90, 9), waits((2,), 1, 15)], 0, id="a part of one rank waits for it"),
        pytest.param([waits(X, 1, 15), NOTHING_YET, goes_on(Y, 3), goes_on(Y, 3)], 1, id="it never came to the part"),
    ],
)
def test_calls_are_compared_among_those_who_make_them(ranks, stalled):
    found = find_stalled(dict(enumerate(ranks)), STALL_S, STALL_S)
    assert (found and found[0]) == stalled


@pytest.mark.parametrize(
    ("last_heard_s", "rank", "why"),
    [(4, None, ""), (11, 0, "waits in gather_object, and rank 1 in attention x: ranks make different calls")],
)
def test_a_rank_that_waits_itself_is_not_said_to_hang(last_heard_s, rank, why):
    """It waits as long as the others, but its last heartbeat is older than what rank 0 knows of itself."""
    gathers = Progress({ALL: 2}, "gather_object", ALL, 11.0, 11.1)
    attends = Progress({ALL: 2}, "attention x", ALL, last_heard_s, 11.1)
    found = find_stalled({0: gathers, 1: attends, 2: attends}, STALL_S, STALL_S)
    assert found == (None if rank is None else (rank, why))


@pytest.mark.parametrize(
    ("last_heard_s", "rank", "why"),
    [
        (9, None, ""),
        (10.5, 2, "has waited 10 s in exchange, and rank 0 has gone on to gather_object: a message to it was lost"),
        (0, 2, "has not gone on from exchange for 12 s, and rank 0 has waited 11 s in gather_object"),
    ],
)
def test_a_rank_that_others_have_left_behind_has_lost_a_message_if_it_waits(last_heard_s, rank, why):
    """However old its last heartbeat is: the others may have waited for longer than that tells."""
    gathers = Progress({ALL: 3}, "gather_object", ALL, 11.0, 11.1)
    behind = Progress({ALL: 2}, "exchange", ALL, last_heard_s, 12.0)
    found = find_stalled({0: gathers, 1: gathers, 2: behind}, STALL_S, STALL_S)
    assert found == (None if rank is None else (rank, why))


def stuck(at, among, waits_s, calls):
    return Progress(calls, at, among, waits_s, waits_s + 0.1)


SETS_UP = stuck("set-up", X, 15, {ALL: 5, X: 3})
GATHERS = stuck("gather_object", ALL, 14, {ALL: 6, X: 2})
GATHERS_TOO = stuck("gather_object", ALL, 14, {ALL: 6, Y: 9})
DIFFER = (0, "waits in set-up of ranks 0, 1, and rank 1 in gather_object: ranks make different calls")
M, N = (1, 2), (0, 2)
ROUND = [stuck("set-up", X, 15, {X: 3, N: 1}), stuck("set-up", M, 15, {X: 2, M: 3})]


@pytest.mark.parametrize(
    ("ranks", "stalled"),
    [
        pytest.param([SETS_UP, GATHERS, GATHERS_TOO, GATHERS_TOO], DIFFER, id="one sets up what the others do not"),
        pytest.param([SETS_UP, GATHERS, goes_on(Y, 9, run=5), goes_on(Y, 9, run=5)], DIFFER, id="another part goes on"),
        pytest.param(
            [SETS_UP, replace(GATHERS, waits_s=0.0, unchanged_s=4.0), GATHERS_TOO, GATHERS_TOO], None, id="one works"
        ),
        pytest.param(
            [SETS_UP, replace(GATHERS, waits_s=0.5, unchanged_s=1.2), GATHERS_TOO, GATHERS_TOO], DIFFER, id="at once"
        ),
        pytest.param(
            [*ROUND, stuck("set-up", N, 15, {M: 2, N: 2})],
            (0, "waits in set-up of ranks 0, 1, and rank 1 in set-up of ranks 1, 2: ranks make different calls"),
            id="by way of a third",
        ),
        pytest.param(
            [*ROUND, stuck("attention", Y, 15, {M: 2, Y: 10}), goes_on(Y, 9)], None, id="the last waits for one at work"
        ),
    ],
)
def test_ranks_of_different_parts_that_wait_for_each_other_are_named(ranks, stalled):
    assert find_stalled(dict(enumerate(ranks)), STALL_S, STALL_S) == stalled


def test_who_waits_for_a_rank_that_waits_itself_is_not_named() -> None:
    """As where a message of TAPA's first phase from rank 1 to rank 0 is lost: 2 waits longest, for rank 0 alone."""
    awaits = {0: (1,), 1: (0,), 2: (0,)}
    waits = {
        rank: Progress({ALL: 4}, "attention x", waits_s=11 + 0.1 * rank, unchanged_s=11.0, awaits=of)
        for rank, of in awaits.items()
    }
    assert find_stalled(waits, 10.0, 10.0) == (
        0,
        "and all other ranks wait in attention x: a message was lost; it waits for a message from rank 1",
    )
