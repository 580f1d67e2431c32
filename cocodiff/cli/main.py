"""The command line: it finds a subcommand, passes it its options, and turns a user's mistake into one line and exit
code 2."""

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
from cocodiff.jobs.ranks import GRACE_S, RankEnd, note_cause
from cocodiff.jobs.terminal import open_streams, stop_writing

MODULES = {  # modules of subcommands; others are modules of this package with the subcommand's name
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
    """Run the command that the process was started with, and end the process with its exit code.

    Signals that arrive after the work are ignored, since they would print a traceback or kill the process while Python
    ends.
    """
    keep_interrupts()
    code = main()
    ignore_stops()
    sys.exit(code)


def main(argv: Sequence[str] | None = None, launch: Launch | None = None) -> int:
    """Run a subcommand and return its exit code; 141, as after SIGPIPE, if the reader of the output has closed it.

    Args:
        argv: the subcommand and its options; None for the process's own arguments.
        launch: the way in which this process was started; None to detect it in the environment.
    """
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # letters that the terminal does not have are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run_command(sys.argv[1:] if argv is None else argv, launch)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            stop_writing(stream)
        return 128 + signal.SIGPIPE


def run_command(words: Sequence[str], launch: Launch | None = None) -> int:
    """Run a subcommand with its options, and return its exit code. A UserError is printed as one line.

    Args:
        words: the subcommand and its options.
        launch: how this process was started; None to detect it from the environment.
    """
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
            presence.announce()  # before any import, so that other ranks notice if this one dies meanwhile
        check_choice("subcommand", words[0], COMMANDS)
        keep_kernels()  # before a command imports torch
        with one_line_of_imports():
            command = import_module(MODULES.get(words[0], f"cocodiff.cli.{words[0]}"))
            return int(command.start(words[1:], launch))
    except UserError as error:
        if launch is None or launch.speaks:
            line = " ".join(str(error).splitlines())  # a name from the user may have several lines
            note_cause(launch or Launch(), 0, RankEnd("mistake", line))
            print(f"cocodiff: {line}", file=sys.stderr)
        else:  # launchers kill a job at its first bad exit, so wait until rank 0 has printed the error
            time.sleep(GRACE_S)
        return 1 if isinstance(error, OwnRankError) else 2
    except KeyboardInterrupt:
        if launch is None or launch.speaks:
            print("cocodiff: interrupted", file=sys.stderr)
        return 130
