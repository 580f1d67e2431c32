"""The sending of an accelerator's tensors as CPU messages: through pinned host memory, over gloo or MPI.

This uses no communication library of a vendor. So several ranks may share a device of any make, and a faulty library
can be avoided. Tensors to send are copied to the host on the caller's stream, and are sent when these copies are done.
Received ones are copied to the device on the stream that waits for them. The host waits once for the copies of each
call that sends, and once for the messages. That is on a lane's thread, while the main thread continues.

On a CPU tensors take the same way without pinned memory, so the tests of the other transports cover this one too.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.comm.lane import StreamMark
from cocodiff.comm.transport import Group, LandingMessages, LaneOwner, Messages, Pending, not_empty

ALIGNED = 64  # bytes; messages of a call begin at multiples of it in their common buffer
THROUGH_HOST = "host memory"  # name of the carrier, for messages to the user


def host_memory(size: int, device: torch.device) -> Tensor:
    """Allocate host memory for copies to or from a device: uint8 [size], on the CPU regardless of the default device.

    For an accelerator it is pinned. torch reuses it once all copies from and to it are done.
    """
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


class Staged(NamedTuple):
    """A tensor of a message on a device, with its place in host memory."""

    tensor: Tensor  # on the device
    host: Tensor  # memory for its bits on the host, uint8 [n]
    peer: int  # index of the rank that it goes to or comes from

    @classmethod
    def all_of(cls, messages: Messages, device: torch.device) -> list[Staged]:
        """Return the tensors of one call, each with its place in a new buffer in host memory (pinned for accelerators).

        Args:
            messages: tensors on the device, with their peers.
            device: the device.
        """
        sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor, _ in messages]
        parts = host_memory(sum(sizes), device).split(sizes)
        return [cls(x, part[: x.nbytes], peer) for (x, peer), part in zip(messages, parts, strict=True)]


def _land(posted: StreamMark, sent: Pending | None, received: list[tuple[Staged, Pending]]) -> None:
    """Wait for the messages of one call, and start to copy what was received to the device, on the current stream.

    Args:
        posted: until here the memory to receive into may be in use.
        sent: the sent messages in flight; None if nothing is sent.
        received: the tensors that are received, each with its message in flight.
    """
    posted.wait()
    for staged, transfer in received:
        transfer.wait()
        _bits(staged.tensor).copy_(staged.host, non_blocking=True)
    if sent is not None:
        sent.wait()


class HostGroup(Group):
    """A group for tensors of a device over a group for CPU tensors: messages pass through host memory.

    A call takes all messages of a phase together, so that one launch packs them and the host waits once.
    """

    receives_ahead = False

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self.ranks, self.index = group.ranks, group.index

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        sends, recvs = not_empty(sends), not_empty(recvs)
        coming = Staged.all_of(recvs, self._device) if recvs else []
        received = [(one, self._group.send_recv([], [(one.host, one.peer)])) for one in coming]
        sent = None
        if sends:
            leaving = Staged.all_of(sends, self._device)
            for one in leaving:
                one.host.copy_(_bits(one.tensor), non_blocking=True)
            StreamMark(self._device).wait_on_host()
            sent = self._group.send_recv([(one.host, one.peer) for one in leaving], [])
        tensors = [one.tensor for one in coming]
        return LandingMessages(self._device, tensors, partial(_land, StreamMark(self._device), sent, received))

    def barrier(self) -> None:
        self._group.barrier()


class HostTransport(LaneOwner):
    """A transport for tensors of a device over one for CPU tensors. Its lanes have streams of the device."""

    def __init__(self, carrier: LaneOwner, device: torch.device) -> None:
        """Wrap a transport.

        Args:
            carrier: gloo's or MPI's transport for CPU tensors; closed with this one.
            device: of the tensors.
        """
        super().__init__(device, carrier.health)
        self.rank, self.size, self.library = carrier.rank, carrier.size, f"{THROUGH_HOST} over {carrier.library}"
        self.carrier, self._group_on_host, self.drawback = carrier, carrier.group, carrier.drawback
        self.world = HostGroup(carrier.world, device)

    def new_group(self, ranks: tuple[int, ...]) -> HostGroup:
        return HostGroup(self._group_on_host(ranks), self.device)


def _bits(tensor: Tensor) -> Any:
    """Return a tensor's memory as bytes, uint8 [n], without a copy."""
    return tensor.view(-1).view(torch.uint8)
