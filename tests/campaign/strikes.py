"""A fault that a process of a run makes at a known moment: to itself, to the process that forked it, or to all."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

FAULTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
SIGNALS = ("KILL", "STOP", "TERM", "HUP", "INT", "QUIT")
OF_DISKS = ("no space", "short write")
ON_FIRE = "the disk is on fire"
SLOW_S, HANGS_S = 6.0, 600.0
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
ADDS, REMOVES = ("open", "os.mkdir"), ("os.remove", "os.rmdir")


def watch_operations(heard: Callable[[str, Any], None]) -> None:
    """Have `heard` called before each change that this process makes to files from now on, for good: with the kind of
    operation and the path. What it raises comes out of the change."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS and (event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            heard(event, arguments[0])

    sys.addaudithook(hear)


@dataclass
class Strike:
    """fault: a signal's name or what `__call__` knows. who: "one" rank, all "ranks", the "job" that forked them, or
    "all". mark: a file that is made at the strike, once in a run, with the rank's number. delay_ms: until a signal
    comes. amount: bytes that a file may have from then on. inputs: what vanishes."""

    fault: str
    who: str
    mark: str
    delay_ms: float = 0.0
    amount: int = 0
    inputs: str = ""
    rank: int = 0  # this process's
    made: bool = field(default=False)

    def __call__(self, path: object = None) -> None:
        if self.made and self.fault == "no space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        try:
            with Path(self.mark).open("x") as mark:
                mark.write(str(self.rank))
        except FileExistsError:
            return
        self.made = True
        if self.fault in SIGNALS or self.fault == "pause":
            send = self._pause if self.fault == "pause" else self._send
            threading.Timer(self.delay_ms / 1000, send).start() if self.delay_ms else send()
        elif self.fault == "exception":
            raise RuntimeError(ON_FIRE)
        elif self.fault == "exit":
            sys.exit(3)
        elif self.fault == "no space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        elif self.fault == "short write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.amount, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif self.fault == "vanished":
            Path(self.inputs).rename(f"{self.inputs}.gone")
        else:
            time.sleep({"slow": SLOW_S, "hang": HANGS_S}[self.fault])

    def _send(self) -> None:
        forked, number = os.getpid() != os.getpgrp(), getattr(signal, f"SIG{self.fault}")
        if self.who == "ranks":
            others = [rank for rank in psutil.Process(os.getppid()).children() if rank.pid != os.getpid()]
            for rank in others:
                rank.send_signal(number)
        os.kill({"all": 0, "job": os.getppid() if forked else os.getpid()}.get(self.who, os.getpid()), number)

    def _pause(self) -> None:
        """Stop all for a while, as Ctrl-Z does."""
        group = os.getpgrp()
        if os.fork() == 0:
            os.setsid()
            os.killpg(group, signal.SIGSTOP)
            time.sleep(SLOW_S)
            os.killpg(group, signal.SIGCONT)
            os._exit(0)

    def know_rank(self, at_start: Any = lambda: None) -> None:
        """Learn this process's rank at the moment at which the ranks are to meet. at_start: called then."""
        from cocodiff.engine import engine

        opened = engine.open_transport

        def open_transport(config: Any, launch: Any = None, *more: Any) -> Any:
            self.rank = launch.rank
            at_start()
            return opened(config, launch, *more)

        engine.open_transport = open_transport


def judge_line(fault: str, victim: int, ranks: int, source: str, code: int, said: str) -> list[str]:
    """List what is wrong with the end of a run whose ranks `--ranks` forked: its exit code, and its line. source: the
    input."""
    lines, of_file = said.splitlines(), fault in (*OF_DISKS, "vanished")
    named = FAULTS.get(fault, {}).get("said", "nothing at all").format(victim=victim, others=ranks - 1)
    if of_file:
        pattern, right = re.escape(source) if fault == "vanished" else "written|put into", (1, 2)
    elif fault == "exception" and f"cannot be written ({ON_FIRE})" in said:  # what a library raises at a new file
        pattern, right = "cannot be written", (2,)
    elif fault.endswith((" all", " job")) or (ranks == 1 and fault != "exception"):
        pattern, right = "^cocodiff: interrupted", (130,)
    else:
        pattern, right = f"RuntimeError: {ON_FIRE}" if ranks == 1 else named, (1,)
    wrong = [] if code in right else [f"ended with {code}, not {right}"]
    traced = fault in ("exception", "exit") and "Traceback" in said
    own = [line for line in lines if line.startswith("cocodiff: ") and not line.startswith("cocodiff: [rank ")]
    others = [line for line in lines if not line.startswith("cocodiff: ")]
    # Alone, a rank says on a line of its own what it has left.
    fits = 1 <= len(own) <= 1 + (of_file or ranks == 1) and (traced or not others)
    return wrong if fits and re.search(pattern, own[0]) else [*wrong, f"said {said!r}"]


def processes_of_session(leader: int) -> list[str]:
    """List the processes of a session that are there ten seconds after its leader has ended."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter(["name", "status"]):
            try:
                if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.info['name']}")
            except ProcessLookupError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
