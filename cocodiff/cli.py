"""The command line: finds the subcommand, hands it its options, turns a user's mistake into one line and exit 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from cocodiff import __version__
from cocodiff.comm.launch import detect
from cocodiff.config import check_choice
from cocodiff.errors import UserError

COMMANDS = {
    "inpaint": "restore masked regions of slices",
    "generate": "make images from text",
    "sweep": "a grid of settings over slices: quality against bytes and speed",
    "bench": "measure: bench step, bench attention, bench kernels",
    "trace": "what a run's trace tells: trace summary",
    "kernels": "the SYCL kernels: kernels build",
    "plan": "what a run would take: plan --memory",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    launch = detect()
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_usage())
            return 0
        if words[0] == "--version":
            print(f"cocodiff {__version__}")
            return 0
        check_choice("subcommand", words[0], COMMANDS)
        command = import_module(f"cocodiff.commands.{words[0]}")
        return int(command.start(words[1:], launch))
    except UserError as error:
        if launch.speaks:
            print(f"cocodiff: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if launch.speaks:
            print("cocodiff: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: cocodiff SUBCOMMAND [--help] [options]", "", *lines])
