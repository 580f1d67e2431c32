"""The command line: help and version; everything else is a subcommand's."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence

from cocodiff import __version__
from cocodiff.cli.dispatch import COMMANDS, run_command
from cocodiff.console.terminal import stop_writing


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code; 141 where nobody reads the output any more, as after SIGPIPE."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has not all letters of a file's name shows others
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            stop_writing(stream)
        return 128 + signal.SIGPIPE


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"cocodiff {__version__}")
        return 0
    return run_command(words)


def _usage() -> str:
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: cocodiff SUBCOMMAND [--help] [options]", "", *lines])
