"""Ranks that disagree: one rank of a script makes other calls than the rest, and every rank must end.

Every rank runs a list of calls inside `parallelize`, as a user's script does; the list of one rank is changed. A case
is right if all ranks end within `timeout_s` of the first rank's last call: all of them without an error, where the
calls were alike after all, or each with a PeerLost or UserError of one line that names a rank and two calls. The seed
and a case's number choose the case.
"""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest
from disagreements import OWN, Case, run_processes

SEED, COUNT = map(int, os.environ.get("DISAGREEING", "0 11").split())  # of another seed, or more cases
TIMEOUT_S = 20.0
START_S = 60.0  # until the ranks of a case have met, on a busy machine
LIMITS = {"timeout_s": TIMEOUT_S, "start_timeout_s": START_S, "device": "cpu", "transport": "gloo"}
SETTINGS: tuple[dict[str, Any], ...] = (
    *({"preset": preset} for preset in ("tapa", "flat", "split", "cocodiff", "coded")),
    {"preset": "tapa", "chunks": 2},
    {"preset": "tapa", "ring": 2},
)
CALLS = ("image 3", "image 2", "call", "bytes", "drift", "forget", "new_run")
LOCAL = ("forget", "new_run")  # say nothing to the others
KINDS = ("more", "fewer", "order", "steps", "size", "raise", "interrupt", "settings", "parts", "leaves", "again")
# Errors from inside of the product, where a message was taken for another one.
INSIDES = re.compile(r"unpack|'dict'|'list'|NoneType|AttributeError|KeyError|TypeError|awaited|gloo")


def drawn(number: int, seed: int) -> tuple[str, Case]:
    """Draw the kind and the case of a number."""
    chance = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    settings = {"preset": "tapa"} if kind == "parts" else chance.choice(SETTINGS)
    ranks = chance.choice((2, 4) if kind == "parts" or "ring" in settings else (2, 3, 4))
    where: dict[str, Any] = {"ranks": ranks, "odd": chance.randrange(ranks), "settings": settings | LIMITS}
    where["guided"] = kind == "parts" or chance.random() < 0.4
    calls = [chance.choice(CALLS) for _ in range(chance.randint(2, 5))]
    calls[chance.randrange(len(calls))] = "image 3"
    at, image = chance.randrange(len(calls)), calls.index("image 3")
    another = "large 3" if kind == "size" else f"image {chance.choice((1, 2, 4, 6))}"
    another = f"image 3 {kind} {chance.choice((0, 1, 2))}" if kind in ("raise", "interrupt") else another
    changed = {
        "more": [*calls[:at], chance.choice([one for one in CALLS if one not in LOCAL]), *calls[at:]],
        "again": [*calls[:at], "again", *calls[at:]],
        "fewer": [*calls[:at], *calls[at + 1 :]],
        "order": chance.sample(calls, len(calls)),
        "leaves": calls[:at],
        **{one: [*calls[:image], another, *calls[image + 1 :]] for one in ("steps", "size", "raise", "interrupt")},
    }.get(kind, calls)
    if kind == "settings":
        others = [one for one in SETTINGS if one != settings and (ranks != 3 or "ring" not in one)]
        where["others"] = chance.choice(others) | LIMITS
    elif kind == "parts":
        parts = chance.choice(((1, 2), (2, 1)))
        where["settings"], where["others"] = (settings | LIMITS | {"guidance_parallel": one} for one in parts)
    catches = "all" if kind in ("raise", "interrupt") or chance.random() < 0.3 else ""
    return kind, Case(tuple(calls), tuple(changed), catches, **where)


@pytest.mark.full
@pytest.mark.parametrize("number", range(COUNT))
def test_every_rank_ends_and_says_which_calls_differ(number: int) -> None:
    kind, case = drawn(number, SEED)
    ends, said = run_processes(case, START_S + 2 * TIMEOUT_S)
    assert {*ends} == {*range(case.ranks)}, f"not all have ended, with an error of Python: {case}: {said}"
    times, errors = [one["time"] for one in ends.values()], [one["error"] for one in ends.values()]
    assert max(times) - min(times) <= TIMEOUT_S, (case, ends)
    # The others may have ended when one rank begins anew: it alone finds nobody.
    assert all(errors) or not any(errors) or kind == "again", (case, ends)
    for error in filter(None, errors):
        own = f"ValueError: {OWN}" in error and not case.catches
        assert own or error.startswith(("PeerLost: ", "UserError: ")), case
        assert "\n" not in error and not INSIDES.search(error) and re.search(r"\brank \d", error), case
