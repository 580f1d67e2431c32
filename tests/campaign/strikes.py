"""A fault that a process of a run makes at a known moment: to itself, to the process that forked it, or to all."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comm.wrong_messages import Faulty

SIGNALS = ("KILL", "STOP", "TERM", "HUP", "INT")
ON_FIRE = "the disk is on fire"
SLOW_S, HANGS_S = 6.0, 600.0
# Of the runs whose faults are noticed by their silence. A pause is longer, and so is a slow rank's sleep.
LIMITS = {"STOP": {"timeout_s": 5}, "pause": {"timeout_s": 4}, "slow": {"timeout_s": 4, "stall_timeout_s": 20}}
LIMITS |= {fault: {"timeout_s": 60, "stall_timeout_s": 8} for fault in ("hang", "lost")}


@dataclass
class Strike:
    """fault: a signal's name or what `__call__` knows. who: "one" rank, the "job" that forked it, or "all". mark: a
    file that is made at the strike, once in a run, with the rank's number. delay_ms: until a signal comes. amount:
    bytes that a file may have from then on, or the number of the message that goes wrong. inputs: what vanishes."""

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
        forked = os.getpid() != os.getpgrp()
        target = {"all": 0, "job": os.getppid() if forked else os.getpid(), "one": os.getpid()}[self.who]
        os.kill(target, getattr(signal, f"SIG{self.fault}"))

    def _pause(self) -> None:
        """Stops all for a while, as Ctrl-Z does."""
        group = os.getpgrp()
        if os.fork() == 0:
            os.setsid()
            os.killpg(group, signal.SIGSTOP)
            time.sleep(SLOW_S)
            os.killpg(group, signal.SIGCONT)
            os._exit(0)

    def spoil_messages(self, victim: int) -> None:
        """Has a checked message of the victim go wrong in each of its groups."""
        from cocodiff.comm.checked import CheckedGroup

        made = CheckedGroup.__init__

        def make(group: Any, inner: Any, health: Any) -> None:
            made(group, inner, health)
            if self.rank == victim and len(group.ranks) > 1:
                Path(self.mark).write_text(str(victim))
                group._group = Faulty(inner, self.fault, (group.index + 1) % len(group.ranks), self.amount)

        CheckedGroup.__init__ = make  # type: ignore[method-assign]

    def know_rank(self, at_start: Any = lambda: None) -> None:
        """From the moment on at which the ranks are to meet. at_start: called then."""
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and whoever it starts inherits that
        from cocodiff.engine import engine

        opened = engine.open_transport

        def open_transport(config: Any, launch: Any = None, *more: Any) -> Any:
            self.rank = launch.rank
            at_start()
            return opened(config, launch, *more)

        engine.open_transport = open_transport
