"""The command line on a simulated device, which `--device auto` finds: `warm.forked(..., module=...)` runs this. The
environment variable WANDERING is that argument of `simulated_device.devices`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import simulated_device
from cocodiff.cli import main as cli
from cocodiff.cli.doctor import trials


def on_a_device(program: Callable[[], int]) -> int:
    """The program's exit code, or 1 with the reports on stderr where accesses were without an order.

    Ranks that it forks have a device each, for nothing of it exists before a rank uses it; they leave by `os._exit`."""
    how = {"strict": True, "wandering": os.environ.get("WANDERING", "")}
    with tempfile.TemporaryDirectory() as folder, simulated_device.devices(1, **how) as found:
        leave, parent = os._exit, os.getpid()

        def leave_with_reports(code: int) -> None:
            if os.getpid() != parent and not code:
                torch.get_device_module("sim").synchronize()
                Path(folder, str(os.getpid())).write_text("\n".join(simulated_device.take_reports()))
            leave(code)

        os._exit = leave_with_reports  # type: ignore[assignment]
        try:
            code = program()
        finally:
            os._exit = leave
        of_ranks = [line for path in Path(folder).iterdir() for line in path.read_text().splitlines()]
    reports = found.reports + of_ranks
    print(*reports, sep="\n", file=sys.stderr)
    return 1 if reports else code


def main() -> int:
    trials.SIDE, trials.MOST["other"] = 64, (2, 150)  # it computes on one core
    return on_a_device(cli.main)
