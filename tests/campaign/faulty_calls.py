"""Faults of attention calls: forked ranks call a small transformer, and something happens to one of them.

As a program: runs such ranks; its argument is a `Case`. They are forked as `--ranks` does it, or as torchrun starts
them, where the program prints the exit codes of the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covering import covering_set
from launching import end_group
from strikes import LIMITS, ON_FIRE, SIGNALS, Strike
from warm import Started

SETUPS: dict[str, dict[str, Any]] = {
    **{one: {"name": one} for one in ("flat", "tapa", "v_first", "split", "cocodiff", "cocodiff+", "coded", "coded-")},
    "ahead": {"name": "ahead", "tau": 10.0},
    "displaced": {"name": "tapa", "codec": "int2", "arrival": "displaced", "fine_steps": 0},
    "chunks": {"name": "tapa", "chunks": 2},
    "chunks in a split": {"name": "split", "chunks": 2},
    "ring": {"name": "tapa", "ring": 2},
    "ring in chunks": {"name": "split", "ring": 2, "chunks": 2},
    "guidance": {"name": "split", "guidance_parallel": 2},
    "guidance, V-Major": {"name": "cocodiff", "guidance_parallel": 2},
}
FAULTS = ("KILL", "STOP", "pause", "TERM", "TERM job", "HUP", "HUP all", "INT all", "exception", "exit", "slow", "hang")
MESSAGES = ("flipped", "lost")
MOMENTS = ("start", "met", "middle", "leaving", "again", "end")
LAUNCHERS = ("forked", "torchrun")
# Gloo ends a process that receives a longer message than it awaits: that of a lost one's successor.
ABORTS = re.compile(r"gloo::EnforceNotMet|rank \d was killed by SIGABRT")
STEPS = 5
LIMIT_S = 120.0


def fits(setup: str, fault: str, moment: str, launcher: str) -> bool:
    if fault in MESSAGES:
        return moment in ("middle", "again")
    return launcher == "forked" or (" " not in fault and fault != "pause")  # of torchrun's ranks each is on its own


def choose_all() -> list[tuple[str, str, str, str]]:
    """Each two of a setup, a fault, a moment and a launcher that make sense, in any order, which is always the same."""
    chosen = covering_set([*SETUPS], (*FAULTS, *MESSAGES), MOMENTS, LAUNCHERS, fits=fits)
    return random.Random(0).sample(chosen, len(chosen))


@dataclass
class Case:
    """number: of calls before the strike in `middle` and `again`, or of the message that goes wrong."""

    setup: str
    fault: str
    moment: str
    launcher: str
    family: str
    ranks: int
    victim: int
    number: int
    delay_ms: float
    transport: str = "gloo"
    checked: bool = False
    folder: str = ""
    undisturbed: bool = field(default=False)

    @classmethod
    def drawn(cls, chosen: tuple[str, str, str, str], chance: random.Random) -> Case:
        setup, fault, *_ = chosen
        parted = {"ring", "guidance_parallel"} & {*SETUPS[setup]}
        ranks = chance.choice((2, 4) if parted else (2, 3, 4))
        family = "qwen" if "guidance_parallel" in SETUPS[setup] else chance.choice(("sd3", "flux", "flux2", "qwen"))
        return cls(
            *chosen,
            family=family,
            ranks=ranks,
            victim=chance.randrange(ranks),
            number=chance.randint(1, 40) if fault in MESSAGES else chance.randrange(STEPS),
            delay_ms=chance.choice((0, 0, 1, 3, 10, 30)),
            transport=chance.choice(("gloo", "gloo", "host")),
            checked=fault in MESSAGES or chance.random() < 0.2,
        )

    def config(self) -> Any:
        from cocodiff.config.config import Config

        limits = {"timeout_s": 60, "stall_timeout_s": 60, "start_timeout_s": 15} | LIMITS.get(self.fault, {})
        settings = {"transport": self.transport, "check_messages": self.checked, "steps": STEPS, "device": "cpu"}
        return Config.preset(**SETUPS[self.setup], **limits, **settings)


# On every rank --------------------------------------------------------------------------------------------------------


def work(case: Case, strike: Strike, transport: Any) -> None:
    import torch
    from tiny_models import FAMILIES

    from cocodiff.engine.engine import parallelize

    def moment(name: str, step: int = 0) -> None:
        counts = case.number if name in ("middle", "again") else 0
        if not case.undisturbed and (case.moment, counts, case.victim) == (name, step, transport.rank):
            strike() if case.fault not in MESSAGES else None

    moment("met")
    make, inputs_of = FAMILIES[case.family]
    model, found = make(4), hashlib.sha256()
    branches = (5, 3) if "guidance_parallel" in SETUPS[case.setup] else (5,)
    for part in ("middle", "again"):
        with torch.no_grad(), parallelize(model, config=case.config(), transport=transport):
            for step in range(STEPS):
                moment(part, step)
                for text in branches:
                    inputs = inputs_of(1, 6, 7, text)
                    inputs["timestep"] = inputs["timestep"] * (1 - step / (2 * STEPS))
                    found.update(model(**inputs, return_dict=False)[0].contiguous().numpy().tobytes())
            moment("leaving") if part == "middle" else None
    (Path(case.folder) / f"result.{transport.rank}").write_text(found.hexdigest())
    moment("end")


def main() -> int:
    from cocodiff.comm.launch import Launch, detect
    from cocodiff.jobs.ranks import run_ranks
    from cocodiff.jobs.terminal import quiet_libraries

    quiet_libraries("error")  # as commands do
    case = Case(**json.loads(sys.argv[1]))
    fault, _, who = case.fault.partition(" ")
    strike = Strike(fault, who or "one", f"{case.folder}/struck", case.delay_ms, case.number)
    strike.know_rank(lambda: strike() if case.moment == "start" and strike.rank == case.victim else None)
    if case.fault in MESSAGES and not case.undisturbed:
        strike.spoil_messages(case.victim)

    def run(ranks: int | None, launch: Any) -> int:
        return run_ranks(ranks, launch, case.config(), {}, lambda transport: work(case, strike, transport))

    if case.launcher == "forked":
        return run(case.ranks, Launch())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pids = {}
    for rank in range(case.ranks):
        pid = os.fork()
        if pid == 0:
            named = {"RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case.ranks}
            os.environ.update({name: str(value) for name, value in named.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
            code = 1
            try:
                code = run(None, detect())
            except SystemExit as left:
                code = int(str(left))
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids[pid] = rank
    print(json.dumps(ended(pids, case.victim)))
    return 0


def ended(pids: dict[int, int], victim: int) -> dict[int, int]:
    """The exit codes of ranks. The victim, where it is stopped or sleeps, is killed once the others have ended."""
    codes: dict[int, int] = {}
    limit = None
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        elif {*pids.values()} - {*codes} == {victim} and limit is None:
            limit = time.monotonic() + 10
        elif limit is not None and time.monotonic() > limit:
            os.kill(next(pid for pid, rank in pids.items() if rank == victim), signal.SIGKILL)
        else:
            time.sleep(0.02)
    return codes


# What a case must come to ---------------------------------------------------------------------------------------------


class Calls:
    """Cases in a folder; what a run gives that nothing happens to is made once for each setup."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chosen = choose_all()

    def case(self, number: int, chance: random.Random) -> tuple[str, str, str, list[str]]:
        """Its fault, its setup, what it was, and what went wrong."""
        case = Case.drawn(self.chosen[number % len(self.chosen)], chance)
        case.folder = str(self.folder / f"calls{number}")
        Path(case.folder).mkdir()
        told = {name: value for name, value in asdict(case).items() if name not in ("folder", "undisturbed")}
        return case.fault, case.setup, str(told), self.judge(case)

    def judge(self, case: Case) -> list[str]:
        code, out, said = run(case)
        struck = (Path(case.folder) / "struck").exists()
        codes = (
            {int(rank): code for rank, code in json.loads(out.splitlines()[-1]).items()} if code == 0 and out else {}
        )
        wrong = [f"not ended: {said}"] if code == 124 else []
        bad = [one for one in (code, *codes.values()) if one]
        if not bad:
            unharmed = case.fault in ("slow", "pause") or (case.fault == "HUP" and case.launcher == "forked")
            late = case.moment in ("leaving", "end") or case.fault in MESSAGES or case.delay_ms
            if struck and not unharmed and not late:
                wrong.append("a fault that was to end the run did not")
            results = {path.read_text() for path in Path(case.folder).glob("result.*")}
            if len(results) != 1 or results != {self.expected(case)}:
                wrong.append(f"other results: {results}")
        elif not struck:
            wrong.append(f"nothing was done to it, and it ended with {code} {codes}: {said}")
        elif case.fault == "lost" and ABORTS.search(said):
            wrong += [] if {code, *codes.values()} & {1, -6} else [f"ended with {code} {codes}"]
        elif case.launcher == "forked":
            wrong += judge_line(case.fault, case.victim, case.ranks, code, said)
        else:
            wrong += judge_survivors(case, codes, said)
        return wrong

    def expected(self, case: Case) -> str:
        kept = self.folder / f"expected {case.setup} {case.family} {case.ranks}"
        if not kept.exists():
            folder = self.folder / f"whole {os.getpid()} {kept.name}"
            folder.mkdir()
            settings = asdict(case) | {"folder": str(folder), "undisturbed": True, "checked": False, "moment": ""}
            code, _, said = run(Case(**settings | {"launcher": "forked", "fault": "none", "transport": "gloo"}))
            assert code == 0, said
            (folder / "result.0").replace(kept)
        return kept.read_text()


def run(case: Case) -> tuple[int, str, str]:
    folder = Path(case.folder)
    process = Started([json.dumps(asdict(case))], folder / "stdout", folder / "stderr", module="faulty_calls")
    try:
        code = process.wait(LIMIT_S)
    except Exception:
        code = 124
    finally:
        end_group(process.pid)
    return code, *((folder / name).read_text() for name in ("stdout", "stderr"))


def judge_line(fault: str, victim: int, ranks: int, code: int, said: str) -> list[str]:
    """What is wrong with the end of a run whose ranks `--ranks` forked: its exit code, and the line that it left."""
    lines = said.splitlines()
    named = {
        "KILL": rf"rank {victim} was killed by SIGKILL; \d of {ranks - 1} other ranks noticed and stopped, ",
        "STOP": rf"rank {victim} (has been silent for|was stopped for more than) ",
        "TERM": rf"rank {victim} interrupted: interrupted; ",
        "exception": rf"rank {victim} failed: RuntimeError: {ON_FIRE}; ",
        # what exits in a thread of zarr's leaves its rank waiting
        "exit": rf"rank {victim} (left with code|has not gone on from) ",
        "hang": rf"rank {victim} ",
        "flipped": rf"rank \d failed: received other bytes than rank {victim} sent to it: ",
        "lost": rf"rank {victim}( |;)",
    }
    asked = " " in fault and fault.split()[0] in SIGNALS
    pattern, expected = ("^cocodiff: interrupted; ", 130) if asked else (named.get(fault, "nothing at all"), 1)
    wrong = [] if code == expected else [f"ended with {code}, not {expected}"]
    traced = fault in ("exception", "exit") and "Traceback" in said
    own = lines[-1:] if traced else [line for line in lines if not line.startswith("cocodiff: [rank ")]
    if len(own) != 1 or not re.search(pattern, own[0]) or not own[0].startswith("cocodiff: "):
        wrong.append(f"said {said!r}")
    return wrong


def judge_survivors(case: Case, codes: dict[int, int], said: str) -> list[str]:
    """What is wrong with the ends of ranks that a launcher started, of which each says by itself whom it lost."""
    wrong = ["a traceback"] if "Traceback" in said and case.fault not in ("exception", "exit") else []
    for rank, code in codes.items():
        spoken = [line for line in said.splitlines() if line.startswith(f"cocodiff: [rank {rank}] ")]
        # A rank that has all its results may have left before the message that another one waits for was missed.
        finished = case.fault == "lost" and (Path(case.folder) / f"result.{rank}").exists()
        may_be_well = finished or case.moment in ("leaving", "end")
        if rank != case.victim and code != 1 and not (may_be_well and code == 0):
            wrong.append(f"rank {rank} ended with {code}")
        if rank != case.victim and code and not any(re.search(rf"rank {case.victim}\b", line) for line in spoken):
            wrong.append(f"rank {rank} did not name rank {case.victim}")
    return [*wrong, f"{codes} {said!r}"] if wrong else []


if __name__ == "__main__":
    sys.exit(main())
