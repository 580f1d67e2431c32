"""The command line: help and version; everything else is a subcommand's."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cocodiff import __version__
from cocodiff.commands.dispatch import COMMANDS, run_command


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
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
