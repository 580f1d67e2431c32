"""The command line on a simulated device, which `--device auto` finds: `warm.forked(..., module=...)` runs this."""

from __future__ import annotations

import sys

import simulated_device
from cocodiff import cli


def main() -> int:
    """The command's exit code, or 1 with the reports on stderr where accesses were without an order."""
    with simulated_device.devices(1, strict=True) as found:
        code = cli.main()
    print(*found.reports, sep="\n", file=sys.stderr)
    return 1 if found.reports else code
