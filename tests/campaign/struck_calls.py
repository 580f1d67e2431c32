"""Attention calls that are struck: forked ranks call a small transformer, and something happens to one of them.

`main` runs such ranks, forked as `--ranks` does it; its argument is a `Case`. With a rank and a port besides, it is one
of those that torchrun starts.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from campaign.strikes import ABORTS, LIMITS, MESSAGES, PATIENT, Strike, judge_line, processes_of_session
from covering import covering_set
from launching import end_group
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
OF_TERMINAL = ("HUP all", "INT all", "QUIT all")
OF_SIGNALS = ("KILL", "KILL job", "STOP", "STOP ranks", "TERM", "TERM job", "HUP", *OF_TERMINAL)
FAULTS = (*OF_SIGNALS, "pause", "exception", "exit", "slow", "hang")
MOMENTS = ("start", "met", "middle", "leaving", "again", "end")
LAUNCHERS = ("forked", "torchrun")
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
    """number: of calls before the strike in `middle` and `again`, or of the message that goes wrong; ignored: a
    terminal's signals are, as nohup ignores SIGHUP, and a script's `&` SIGINT and SIGQUIT."""

    setup: str
    fault: str
    moment: str
    launcher: str
    folder: str = ""
    family: str = "sd3"
    ranks: int = 3
    victim: int = 1
    number: int = 2
    delay_ms: float = 0
    transport: str = "gloo"
    checked: bool = False
    ignored: bool = False

    @classmethod
    def drawn(cls, chosen: tuple[str, str, str, str], folder: Path, chance: random.Random) -> Case:
        setup, fault, *_ = chosen
        parted = {"ring", "guidance_parallel"} & {*SETUPS[setup]}
        ranks = chance.choice((2, 4) if parted else (2, 3, 4))
        return cls(
            *chosen,
            folder=str(folder),
            family="qwen" if "guidance_parallel" in SETUPS[setup] else chance.choice(("sd3", "flux", "flux2", "qwen")),
            ranks=ranks,
            victim=chance.randrange(ranks),
            number=chance.randint(1, 40) if fault in MESSAGES else chance.randrange(STEPS),
            delay_ms=chance.choice((0, 0, 1, 3, 10, 30)),
            transport=chance.choice(("gloo", "gloo", "host")),
            checked=fault in MESSAGES or chance.random() < 0.2,
            ignored=fault in OF_TERMINAL and chance.random() < 0.3,
        )

    def config(self) -> Any:
        from cocodiff.config.config import Config

        settings = {"transport": self.transport, "check_messages": self.checked, "steps": STEPS, "device": "cpu"}
        limits = PATIENT | {"start_timeout_s": 15} | LIMITS.get(self.fault.split()[0], {})
        return Config.preset(**SETUPS[self.setup], **limits, **settings)

    @property
    def unharmed(self) -> bool:
        """Tell whether the run has to go on to its end."""
        alone = self.fault == "HUP" and self.launcher == "forked"  # a forked rank leaves the terminal's to its parent
        unheard = self.ignored and self.fault in OF_TERMINAL
        return unheard or alone or self.fault in ("slow", "pause", "nothing")


# On every rank --------------------------------------------------------------------------------------------------------


def work(case: Case, strike: Strike, transport: Any) -> None:
    import torch
    from tiny_models import FAMILIES

    from cocodiff.engine.engine import parallelize

    def moment(name: str, step: int = 0) -> None:
        counts = case.number if name in ("middle", "again") else 0
        if (case.moment, counts, case.victim) == (name, step, transport.rank) and case.fault not in MESSAGES:
            strike()

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
    case, launch, ranks = Case(**json.loads(sys.argv[1])), Launch(), None
    if not case.ignored:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and whoever it starts inherits that
    fault, _, who = case.fault.partition(" ")
    strike = Strike(fault, who or "one", f"{case.folder}/struck", case.delay_ms, case.number)
    strike.know_rank(lambda: strike() if case.moment == "start" and strike.rank == case.victim else None)
    if case.fault in MESSAGES:
        strike.spoil_messages(case.victim)
    if case.launcher == "torchrun":
        named = {"RANK": sys.argv[2], "LOCAL_RANK": sys.argv[2], "MASTER_PORT": sys.argv[3]}
        named |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(case.ranks))
        os.environ.update(named, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
        launch = detect()
    else:
        ranks = case.ranks
    return run_ranks(ranks, launch, case.config(), {}, lambda transport: work(case, strike, transport))


# What a case must come to ---------------------------------------------------------------------------------------------


def run(case: Case) -> tuple[list[int], str]:
    """The exit codes of the processes, 124 for one that does not end, and what they say. Of torchrun's ranks the
    victim, where it is stopped or sleeps, is killed once the others have ended."""
    folder, words = Path(case.folder), [json.dumps(asdict(case))]
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    each = [[*words, rank, port] for rank in range(case.ranks)] if case.launcher == "torchrun" else [words]
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) if case.ignored else ()
    files = [folder / f"said.{n}" for n in range(len(each))]
    processes = [
        Started(one, file, module="campaign.struck_calls", ignored=ignored)
        for one, file in zip(each, files, strict=True)
    ]
    until, hang = time.monotonic() + LIMIT_S, set[int]()
    for number in sorted(range(len(each)), key=lambda rank: rank == case.victim):
        last = len(each) > 1 and number == case.victim
        try:
            processes[number].wait(10 if last else max(0.1, until - time.monotonic()))
        except TimeoutExpired:
            hang |= set() if last else {number}
        alive = [] if number in hang or last else processes_of_session(processes[number].pid)
        assert not alive, f"still there: {alive}"
        end_group(processes[number].pid)
    codes = [124 if number in hang else process.wait(10) for number, process in enumerate(processes)]
    return codes, "".join(file.read_text() for file in files)


def judge(case: Case, wholes: Path) -> list[str]:
    """List what is wrong with the end of a case. wholes: a folder for what runs give that nothing happens to."""
    codes, said = run(case)
    folder, struck = Path(case.folder), (Path(case.folder) / "struck").exists()
    wrong = ["not ended"] if 124 in codes else []
    if not any(codes):
        late = case.moment in ("leaving", "end") or case.fault in MESSAGES or case.delay_ms
        if struck and not case.unharmed and not late:
            wrong.append("a fault that was to end the run did not")
        if {path.read_text() for path in folder.glob("result.*")} != {expected(case, wholes)}:
            wrong.append("other results")
    elif not struck or case.unharmed:
        wrong.append("it was to go on to its end")
    elif case.fault == "KILL job":
        wrong += [] if codes == [-9] and not said else ["it was to end without a word"]
    elif case.fault == "lost" and ABORTS.search(said):
        wrong += [] if {*codes} & {1, -6} else ["left with another code"]
    elif case.launcher == "forked":
        wrong += judge_line(case.fault, case.victim, case.ranks, codes[0], said)
    else:
        wrong += judge_survivors(case, codes, said)
    return [*wrong, f"ended with {codes}: {said}"] if wrong else []


def expected(case: Case, wholes: Path) -> str:
    kept = wholes / f"expected {case.setup} {case.family} {case.ranks}"
    if not kept.exists():
        folder = wholes / f"whole {os.getpid()} {kept.name}"
        settings = {"fault": "nothing", "moment": "", "launcher": "forked", "transport": "gloo", "checked": False}
        codes, said = run(replace(case, folder=str(folder), ignored=False, **settings))
        assert codes == [0], said
        (folder / "result.0").replace(kept)
    return kept.read_text()


def judge_survivors(case: Case, codes: list[int], said: str) -> list[str]:
    """List what is wrong with the ends of ranks that a launcher started, of which each says by itself whom it lost."""
    wrong = ["a traceback"] if "Traceback" in said and case.fault not in ("exception", "exit") else []
    for rank, code in enumerate(codes):
        spoken = [line for line in said.splitlines() if line.startswith(f"cocodiff: [rank {rank}] ")]
        # A rank that has all its results may have left before the message that another one waits for was missed.
        finished = case.fault == "lost" and (Path(case.folder) / f"result.{rank}").exists()
        may_be_well = finished or case.moment in ("leaving", "end")
        if rank != case.victim and code != 1 and not (may_be_well and code == 0):
            wrong.append(f"rank {rank} ended with {code}")
        if rank != case.victim and code and not any(re.search(rf"rank {case.victim}\b", line) for line in spoken):
            wrong.append(f"rank {rank} did not name rank {case.victim}")
    return wrong
