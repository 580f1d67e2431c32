"""A campaign of faults, each of which can be repeated: what happens to ranks and jobs, and whether they end rightly.

    python tests/campaign/faults.py --cases 1000 --seed 0 --workers 4

Of ten cases seven are of attention calls (`struck_calls.py`) and three of whole jobs (`struck_jobs.py`). Settings and
commands, faults, and the moments at which they strike are chosen so that each two that make sense meet; all else is
drawn, by the seed and the case's number. A run must end in time; where the fault ended it, with one line that names
rank and reason, nothing half-written and nothing left behind but what --resume needs; and what goes on must come to the
results of a run that nothing happened to, with nothing made twice. Prints a line for each case, those that ended
otherwise with the command to repeat them, and how many there were of each fault and command. Exits with 1 when any
ended otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

JOBS_OF_TEN = (2, 5, 8)


class Ended(NamedTuple):
    """The end of a case. told: all that was chosen; wrong: what was not as it should be."""

    number: int
    fault: str
    of: str
    told: str
    wrong: list[str]
    seconds: float

    def line(self) -> str:
        return f"{self.number} {self.fault} of {self.of}: {self.told} {self.seconds:.1f} s {self.wrong or 'ok'}"


def run_case(number: int, seed: int, folder: Path) -> Ended:
    """Run one case. folder: where the runs are kept that nothing happens to."""
    from campaign import struck_calls, struck_jobs

    started, tens, digit = time.monotonic(), *divmod(number, 10)
    chance, fault, of, told, wrong = random.Random(f"{seed} {number}"), "?", "?", "", list[str]()
    try:
        if digit in JOBS_OF_TEN:
            jobs = struck_jobs.choose_all(struck_jobs.COMMANDS)
            of, fault, moment = jobs[(3 * tens + JOBS_OF_TEN.index(digit)) % len(jobs)]
            told, job, harm = struck_jobs.Jobs(folder).struck(number, chance, (of, fault, moment))
            job.go_on(chance.choice((1, job.kind.replicas)), harmed=bool(harm))
            wrong = job.wrong
            shutil.rmtree(job.folder) if not wrong else None
        else:
            calls = struck_calls.choose_all()
            chosen = calls[(7 * tens + digit - sum(job < digit for job in JOBS_OF_TEN)) % len(calls)]
            case = struck_calls.Case.drawn(chosen, folder / f"calls{number}", chance)
            fault, of, told = case.fault, f"calls, {case.setup}", str(replace(case, folder=""))
            wrong = struck_calls.judge(case, folder)
    except Exception:
        wrong = [traceback.format_exc()]
    return Ended(number, fault, of, told, wrong, time.monotonic() - started)


def run_all(numbers: Sequence[int], seed: int, folder: Path, workers: int) -> Iterator[Ended]:
    """Run cases side by side: many of them wait for a timeout. As they end. folder: see `run_case`."""
    warm, jobs = import_module("warm"), import_module("campaign.struck_jobs")
    warm.start_server()
    jobs.Jobs(folder)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), share_server, (warm,)) as pool:
        for future in as_completed([pool.submit(run_case, number, seed, folder) for number in numbers]):
            yield future.result()


def share_server(warm: Any) -> None:
    """Prepare a worker: runs are forked from the warm Python of its parent, which alone can look whether that lives."""
    server = warm.forkserver.ensure_running.__self__
    warm.start_server = server.ensure_running = lambda: None


def table(ended: Iterable[Ended]) -> list[str]:
    """Count what was tried, of each fault and of each command or setting, and what of it ended rightly."""
    tried, right = Counter[str](), Counter[str]()
    for case in ended:
        for name in (f"fault: {case.fault}", f"of: {case.of}"):
            tried[name] += 1
            right[name] += not case.wrong
    return [f"{name:40} {tried[name]:5} tried {right[name]:5} right" for name in sorted(tried)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, usual in {"cases": 1000, "first": 0, "seed": 0, "workers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    chosen = parser.parse_args()
    started, ended = time.monotonic(), list[Ended]()
    folder = Path(tempfile.mkdtemp(prefix="cocodiff-faults-"))
    os.environ["OMP_NUM_THREADS"] = "1"
    for case in run_all(range(chosen.first, chosen.first + chosen.cases), chosen.seed, folder, chosen.workers):
        print(case.line(), flush=True)
        ended.append(case)
    wrong = [case for case in ended if case.wrong]
    print(*table(ended), sep="\n")
    for case in wrong:
        again = f"python tests/campaign/faults.py --cases 1 --first {case.number} --seed {chosen.seed}"
        print(f"{case.line()}\nagain: {again}")
    minutes = (time.monotonic() - started) / 60
    print(f"{len(ended)} tried, {len(ended) - len(wrong)} ended rightly, {len(wrong)} otherwise, {minutes:.0f} minutes")
    if wrong:
        print(f"their folders are kept in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    sys.exit(main())
