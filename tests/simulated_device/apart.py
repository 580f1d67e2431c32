"""Doctor's jobs of their own on simulated devices, whose ranks are threads of the job's process: `warm.forked(...,
module=...)` runs this, with the job's environment as JSON and its line of Python.

SIMULATED_EACH_ALONE=1: the library makes a group of each message. SIMULATED_WRONG: with this value of CCL_OP_SYNC it
brings wrong bytes."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torch import Tensor

import simulated_device
from cocodiff.cli.doctor import command, trials
from cocodiff.comm.transport import Pending
from simulated_device.ranks import SimulatedTransport, run_ranks


class Wrong:
    """A group whose all-to-alls bring another byte than was sent."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_to_all(self, sends: list[Tensor], recvs: list[Tensor]) -> Pending:
        return self._group.all_to_all([send + 1 for send in sends], recvs)


class Transport(SimulatedTransport):
    library = "xccl"


def on_threads(ranks: int, *arguments: Any) -> int:
    with simulated_device.devices(ranks):
        run_ranks(ranks, arguments[-1], Transport)
    return 0


def main() -> None:
    os.environ.update(json.loads(sys.argv[1]))
    Transport.each_alone = os.environ["SIMULATED_EACH_ALONE"] == "1"
    Transport.around = Wrong if os.environ["SIMULATED_WRONG"] == os.environ.get("CCL_OP_SYNC", "0") else None
    command.run_ranks = on_threads  # type: ignore[assignment]
    command.PAIR_S = 2.0 if Transport.each_alone else 60.0  # a batch that never ends, or a machine that is busy
    trials.SIDE, trials.SIZES["other"] = 64, (64, 4096)  # it computes on one core
    exec(sys.argv[2])
