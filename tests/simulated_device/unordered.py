"""The command line on a simulated device, with messages through host memory that are broken in one way: the environment
variable UNORDERED names what is left out. For tests of what notices."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cocodiff.comm import host
from cocodiff.comm.lane import StreamMark
from cocodiff.comm.transport import LandingMessages
from simulated_device import command


class Unnoticed(StreamMark):
    """A point in a stream that the host does not wait for."""

    def wait_on_host(self) -> None:
        return


class Overtaking(LandingMessages):
    """Messages whose `wait` copies them on a stream of its own, and does not order the caller's behind it."""

    def __init__(self, device: torch.device, received: list[torch.Tensor], land: Callable[[], object]) -> None:
        def overtaking() -> None:
            module = torch.get_device_module(device)
            with module.stream(module.Stream(device=device)):
                land()

        super().__init__(device, received, overtaking)


def main() -> int:
    kind = os.environ["UNORDERED"]
    if kind == "send":
        host.StreamMark = Unnoticed  # type: ignore[misc]
    else:
        host.LandingMessages = Overtaking  # type: ignore[misc]
    return command.main()
