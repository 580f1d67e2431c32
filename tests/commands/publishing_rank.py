"""Two forked ranks that write results, for tests. Arguments: what goes wrong, and the folder of the results."""

from __future__ import annotations

import sys
from typing import Any

from cocodiff.comm.launch import detect
from cocodiff.config.config import Config
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.ranks import run_holding


def work(fault: str, output: OutputFolder, transport: Any) -> None:
    if transport.rank == 0:
        (output.open() / "report.html").write_text("whole")
        if fault == "in the way":
            (output.final / "report.html").write_text("the user's")
        output.publish()
        raise RuntimeError("the terminal is gone")
    transport.broadcast_object(None)


def main() -> int:
    fault, out = sys.argv[1:]
    output = OutputFolder(out, overwrite=False)
    config = Config(transport="gloo", timeout_s=10.0)
    return run_holding(
        output, {"ranks": 2}, detect(), config, lambda transport: work(fault, output, transport), lambda: None
    )
