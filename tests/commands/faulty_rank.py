"""Ranks that disagree, for tests: run by mpiexec or torchrun, or forking ranks itself. Argument: what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import detect
from cocodiff.comm.presence import Presence
from cocodiff.config.config import Config
from cocodiff.jobs import ranks
from cocodiff.jobs.ranks import run_ranks
from cocodiff.jobs.terminal import quiet_libraries


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def work(fault: str, transport: Any) -> None:
    transport.broadcast_value("met")
    if transport.rank == 1:
        if fault == "exception":
            raise RuntimeError("the disk is on fire")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "interrupted":
            interrupt()
        if fault == "leaves":
            return
        if fault == "sleeps":
            time.sleep(600)
    if fault == "interrupted" and transport.rank == 2:
        heard = threading.Event()
        transport.health.when_lost(lambda _: heard.set())
        heard.wait(20)
        raise FileNotFoundError("removed by a rank that has heard of it before")
    if fault in ("late", "last", "lingers", "noisy", "aborts", "pauses"):
        end_oddly(fault, transport)
        return
    for _ in range(1000):
        transport.gather_values(transport.rank)
        transport.health.check()  # a rank that puts its part and waits for nobody would go on to the last one
        time.sleep(0.05)


def end_oddly(fault: str, transport: Any) -> None:
    """End as some ranks do whose work is done."""
    if fault == "late":
        import seams

        seams.call_before_ends_are_noted(interrupt)
    if fault == "last":
        transport.close()
    if fault in ("last", "lingers") and transport.rank == 1:
        time.sleep(600)
    if fault == "pauses" and transport.rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 0.6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3.0)  # longer than a rank may be stopped
    if fault in ("noisy", "aborts"):
        os.write(2, b"a library's line\n")
    if fault == "noisy":
        print("a line of ours", file=sys.stderr, flush=True)
    if fault == "aborts" and transport.rank == 0:
        os.abort()


def not_met(meeting: Any, *_: Any) -> None:
    """Rank 1 is asked to stop while the library connects the ranks, which fails on the others."""
    if meeting.rank == 1:
        interrupt()
    raise RuntimeError("a connection was refused")


def run_script(fault: str, transport_name: str, folder: Path) -> None:
    """Run as a user's own script, whose exceptions nobody catches. folder: takes what each rank says, in a file of its
    own, as a launcher may mix the lines of several."""
    from cocodiff.engine.engine import open_transport

    transport = open_transport(Config(transport=transport_name))
    said = os.open(folder / str(transport.rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    transport.broadcast_value("met")
    if transport.rank == 0:
        if fault == "exit":  # out of an engine's block
            transport.health.fail("SystemExit: 3")
            sys.exit(3)
        raise RuntimeError("the disk is on fire")
    print("said before")
    while True:
        transport.broadcast_value("more")


def main() -> int:
    if sys.argv[1] in ("uncaught", "exit"):
        run_script(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    fault, transport, forked = sys.argv[1], sys.argv[2], len(sys.argv) > 3
    quiet_libraries("error")
    launch = detect()
    presence = Presence.of_job(launch)
    if presence is not None:
        presence.announce()  # as the command line does
    if fault == "killed at the start" and launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "unmet":
        import seams  # and torch

        seams.connect_ranks_by(not_met)
    settings = {"steps": "20" if fault != "settings" or launch.rank == 0 else "50"}
    start_s = 3.0 if fault == "alone" else 600.0
    limits = {"timeout_s": 5.0, "stall_timeout_s": 4.0, "start_timeout_s": start_s}
    if fault == "pauses":
        ranks.GRACE_S, limits = 0.3, limits | {"timeout_s": 2.0, "stall_timeout_s": 20.0}
    config = Config(transport=transport, **limits)
    return run_ranks(3 if forked else None, launch, config, settings, lambda opened: work(fault, opened))


if __name__ == "__main__":
    sys.exit(main())
