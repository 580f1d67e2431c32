"""A campaign of ranks that disagree: one rank of a script makes other calls than the rest, and every rank must end.

    python tests/campaign/disagreeing_ranks.py --cases 60 --seed 0

Every rank runs a list of calls inside `parallelize`, as a user's script does; the list of one rank is changed. A case
is right if all ranks end within `timeout_s` of the first rank's last call: all of them without an error, where the
calls were alike after all, or each with a PeerLost or UserError of one line that names a rank and two calls. The seed
and a case's number choose the case. Prints each case, and for a wrong one the command that repeats it.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from disagreements import CASES, OWN, Case, run_processes

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
KINDS += ("table",)  # of `disagreements`
# Errors from inside of the product, where a message was taken for another one.
INSIDES = re.compile(r"unpack|'dict'|'list'|NoneType|AttributeError|KeyError|TypeError|awaited|gloo")


def drawn(number: int, seed: int) -> tuple[str, Case]:
    """Draw the kind and the case of a number."""
    chance = random.Random(f"{seed} {number}")
    kind, turn = KINDS[number % len(KINDS)], number // len(KINDS)
    settings = {"preset": "tapa"} if kind == "parts" else chance.choice(SETTINGS)
    ranks = chance.choice((2, 4) if kind == "parts" or "ring" in settings else (2, 3, 4))
    where: dict[str, Any] = {"ranks": ranks, "odd": chance.randrange(ranks), "settings": settings | LIMITS}
    where["guided"] = kind == "parts" or chance.random() < 0.4
    if kind == "table":
        name = [*CASES][turn % len(CASES)]
        return name, replace(CASES[name], **where)
    calls = [chance.choice(CALLS) for _ in range(chance.randint(2, 5))]
    calls[chance.randrange(len(calls))] = "image 3"
    changed, at, image = list(calls), chance.randrange(len(calls)), calls.index("image 3")
    if kind in ("more", "again"):
        changed.insert(at, kind if kind == "again" else chance.choice([one for one in CALLS if one not in LOCAL]))
    elif kind == "fewer":
        del changed[at]
    elif kind == "order":
        chance.shuffle(changed)
    elif kind == "steps":
        changed[image] = f"image {chance.choice((1, 2, 4, 6))}"
    elif kind == "size":
        changed[image] = "large 3"
    elif kind in ("raise", "interrupt"):
        changed[image] = f"image 3 {kind} {chance.choice((0, 1, 2))}"
    elif kind == "settings":
        others = [one for one in SETTINGS if one != settings and (ranks != 3 or "ring" not in one)]
        where["others"] = chance.choice(others) | LIMITS
    elif kind == "parts":
        parts = chance.choice(((1, 2), (2, 1)))
        where["settings"], where["others"] = (settings | LIMITS | {"guidance_parallel": one} for one in parts)
    else:
        changed = changed[:at]
    catches = "all" if kind in ("raise", "interrupt") or chance.random() < 0.3 else ""
    return kind, Case(tuple(calls), tuple(changed), catches, **where)


def judge(kind: str, case: Case, ends: dict[int, dict[str, Any]]) -> list[str]:
    """Return what is wrong with the ends of the ranks, nothing where all is right."""
    wrong = [
        f"rank {rank} has not ended, or without an error of Python" for rank in range(case.ranks) if rank not in ends
    ]
    times, errors = [one["time"] for one in ends.values()], [one["error"] for one in ends.values()]
    if times and max(times) - min(times) > TIMEOUT_S:
        last = max(ends, key=lambda rank: ends[rank]["time"])
        wrong.append(f"rank {last} ended {max(times) - min(times):.0f} s later")
    # The others may have ended when one rank begins anew: it alone finds nobody.
    if any(errors) and not all(errors) and kind != "again":
        wrong.append("some ranks have no error")
    for error in filter(None, errors):
        own = f"ValueError: {OWN}" in error and not case.catches
        if not error.startswith(("PeerLost: ", "UserError: ")) and not own:
            wrong.append(f"another kind of error: {error}")
        elif "\n" in error or INSIDES.search(error) or not re.search(r"\brank \d", error):
            wrong.append(f"no line that names a rank and calls: {error}")
    return wrong


def run_case(number: int, seed: int) -> list[str]:
    """Run the case of a number, and print it. Return what is wrong."""
    (kind, case), began = drawn(number, seed), time.monotonic()
    ends, said = run_processes(case, START_S + 2 * TIMEOUT_S)
    wrong = judge(kind, case, ends)
    print(f"{number} {'WRONG' if wrong else 'ok'} {time.monotonic() - began:.1f} s {kind} {asdict(case)}", flush=True)
    for rank, one in sorted(ends.items()):
        print(f"    rank {rank}: {one['error'] or 'no error'}")
    if wrong:
        again = f"python tests/campaign/disagreeing_ranks.py --cases 1 --first {number} --seed {seed}"
        print(*(f"    wrong: {line}" for line in wrong), f"    said: {said[-600:]!r}", f"    again: {again}", sep="\n")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("cases", 60), ("first", 0), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    numbers = range(chosen.first, chosen.first + chosen.cases)
    wrong = [number for number in numbers if run_case(number, chosen.seed)]
    print(f"{len(numbers)} tried, {len(numbers) - len(wrong)} right, wrong: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
