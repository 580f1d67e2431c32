"""Doctor's jobs of their own on simulated devices: importing this has their ranks be threads of the job's process.

SIMULATED_EACH_ALONE=1: the library makes a group of each message. SIMULATED_WRONG: with this value of CCL_OP_SYNC it
brings wrong bytes."""

from __future__ import annotations

import os
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
    each_alone = os.environ.get("SIMULATED_EACH_ALONE") == "1"
    around = Wrong if os.environ.get("SIMULATED_WRONG") == os.environ.get("CCL_OP_SYNC", "0") else None


def on_threads(ranks: int, *arguments: Any) -> int:
    with simulated_device.devices(ranks):
        run_ranks(ranks, arguments[-1], Transport)
    return 0


command.run_ranks = on_threads  # type: ignore[assignment]
if not Transport.each_alone:
    command.PAIR_S = 60.0  # on a machine that is busy
trials.SIDE, trials.SIZES["other"] = 64, (64, 4096)  # it computes on one core
