"""The command line: finds a subcommand, hands it its options, turns a user's mistake into one line and exit 2."""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from cocodiff_sycl.build import keep_kernels

from cocodiff import __version__
from cocodiff.comm.launch import Launch, detect
from cocodiff.comm.presence import Presence
from cocodiff.config.errors import OwnRankError, UserError, check_choice
from cocodiff.config.packages import one_line_of_imports
from cocodiff.jobs.children import ignore_stops, keep_interrupts
from cocodiff.jobs.ranks import GRACE_S
from cocodiff.jobs.terminal import open_streams, stop_writing

MODULES = {  # of subcommands that are no module of this package by their own name
    **{name: f"cocodiff_eval.cli.{name}" for name in ("inpaint", "generate", "train", "sweep")},
    "bench": "cocodiff_bench.command",
    "doctor": "cocodiff.cli.doctor.command",
    "emulate": "cocodiff_studies.emulate",
    "papers": "cocodiff_studies.figures",
}
COMMANDS = {
    "inpaint": "restore masked regions of slices",
    "generate": "make images from text",
    "train": "make the embedded model one of your own volumes",
    "sweep": "a grid of settings over slices: quality against bytes and speed",
    "bench": "measure, as in bench step: alltoall, step, attention, latte, peers",
    "kernels": "the SYCL kernels: kernels build",
    "plan": "what a run would take: memory, bytes and time, without starting it",
    "papers": "figures of the papers: theirs, ours, and the commands that make them",
    "doctor": "check this machine, how ranks sit on it, their messages and memory",
    "verify": "whether a model gives on several ranks what it gives in one process",
    "emulate": "run a command on an emulated machine, with links of unequal speed (Linux, root)",
}


def program() -> NoReturn:
    """Run `main` and end the process. Signals that come later find all done and are ignored: while Python ends, they
    would print a traceback, or kill a process whose work is done."""
    keep_interrupts()
    code = main()
    ignore_stops()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; 141 where nobody reads the output any more, as after SIGPIPE."""
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has not all letters of a file's name shows others
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run_command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            stop_writing(stream)
        return 128 + signal.SIGPIPE


def run_command(words: Sequence[str], launch: Launch | None = None) -> int:
    """The exit code of a subcommand and its options. launch: by default what the environment tells."""
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
        print("\n".join(["usage: cocodiff SUBCOMMAND [--help] [options]", "", *lines]))
        return 0
    if words[0] == "--version":
        print(f"cocodiff {__version__}")
        return 0
    try:
        launch = launch or detect()
        presence = Presence.of_job(launch)
        if presence is not None:
            presence.announce()  # before anything is imported: a rank that dies meanwhile is noticed by the others
        check_choice("subcommand", words[0], COMMANDS)
        keep_kernels()  # before a command imports torch
        with one_line_of_imports():
            command = import_module(MODULES.get(words[0], f"cocodiff.cli.{words[0]}"))
            return int(command.start(words[1:], launch))
    except UserError as error:
        if launch is None or launch.speaks:
            # One line, though a name that the user gave may have several.
            print(f"cocodiff: {' '.join(str(error).splitlines())}", file=sys.stderr)
        else:  # launchers kill a job at its first bad exit, and rank 0, which says it, may be later
            time.sleep(GRACE_S)
        return 1 if isinstance(error, OwnRankError) else 2
    except KeyboardInterrupt:
        if launch is None or launch.speaks:
            print("cocodiff: interrupted", file=sys.stderr)
        return 130
