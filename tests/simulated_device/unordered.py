"""The command line on a simulated device, with messages through host memory that are broken in one way: the environment
variable UNORDERED names what is left out. For tests of what notices."""

from __future__ import annotations

import os

from cocodiff.comm import host
from cocodiff.comm.host import HostPending, StreamMark
from simulated_device import command


class Unnoticed(StreamMark):
    """A point in a stream that the host does not wait for."""

    def wait_on_host(self) -> None:
        return


class Overtaking(HostPending):
    """Messages whose `wait` copies them on a stream of its own, and does not order the caller's behind it."""

    def _finish(self) -> None:
        module = host.torch.get_device_module(self._device)
        with module.stream(module.Stream(device=self._device)):
            super()._finish()


def main() -> int:
    kind = os.environ["UNORDERED"]
    if kind == "send":
        host.StreamMark = Unnoticed  # type: ignore[misc]
    else:
        host.HostPending = Overtaking  # type: ignore[misc]
    return command.main()
