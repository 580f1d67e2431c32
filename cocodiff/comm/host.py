"""Tensors of an accelerator over the CPU's messages: through pinned host memory, over gloo or MPI.

Nothing is asked of a vendor's communication library, so several ranks may share a device of any make, and a library
that misbehaves can be done without. What is sent is copied to the host on the caller's stream, and leaves when these
copies are done; what is received is copied to the device on the stream that waits for it. The host waits once for each
call that sends, for its copies, and once for the messages: on a lane's thread, while the main thread goes on.

On a CPU tensors take the same way, without pinned memory: so the tests of the other transports try this one too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from cocodiff.comm.transport import Group, LaneOwner, Messages, Pending, not_empty
from cocodiff.kernels.device import StreamMark, used_on_current_stream

ALIGNED = 64  # bytes; where messages of a call begin in their common buffer
THROUGH_HOST = "host memory"  # what carries messages, in words


def host_memory(size: int, device: torch.device) -> Tensor:
    """For bytes to and from a device, uint8 [size]: pinned, which torch keeps for use again once all copies from and to
    it are through. On the CPU whatever the caller's default device is."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


class Staged:
    """Tensors of one call in a common buffer in host memory."""

    def __init__(self, messages: Messages, device: torch.device) -> None:
        """messages: tensors on the device, with their peers."""
        starts = [0]
        for tensor, _ in messages:
            starts.append(-(-(starts[-1] + tensor.nbytes) // ALIGNED) * ALIGNED)
        buffer = host_memory(starts[-1], device)
        self.tensors = [tensor for tensor, _ in messages]
        placed = zip(starts, messages, strict=False)
        self.on_host = [(buffer[start : start + tensor.nbytes], peer) for start, (tensor, peer) in placed]

    def to_host(self) -> None:
        for tensor, (host, _) in zip(self.tensors, self.on_host, strict=True):
            host.copy_(_bits(tensor), non_blocking=True)

    def to_device(self, number: int) -> None:
        """Copies one tensor on the current stream."""
        _bits(used_on_current_stream(self.tensors[number])).copy_(self.on_host[number][0], non_blocking=True)


class HostPending:
    """Messages of one call under way. The first `wait` blocks its thread until they are here and copies them on its
    stream; every `wait` orders its stream behind these copies."""

    def __init__(
        self, device: torch.device, sent: tuple[Staged, Pending] | None, received: tuple[Staged, list[Pending]] | None
    ) -> None:
        """received: with one transfer for each tensor."""
        self._device, self._sent, self._received = device, sent, received
        self._on_device = received[0].tensors if received is not None else []
        self._posted = StreamMark(device)  # memory that is received into may have had another use until here
        self._lock = threading.Lock()
        self._done: StreamMark | None = None

    def wait(self) -> None:
        with self._lock:
            if self._done is None:
                self._posted.wait()
                self._finish()
                self._done = StreamMark(self._device)
                return
        self._done.wait()
        used_on_current_stream(self._on_device)

    def _finish(self) -> None:
        if self._received is not None:
            staged, transfers = self._received
            for number, transfer in enumerate(transfers):
                transfer.wait()
                staged.to_device(number)
        if self._sent is not None:
            self._sent[1].wait()
        self._received = self._sent = None


class HostGroup(Group):
    """Ranks that share a group of the CPU's. Calls take all messages of a phase together: one launch packs them, and
    the host waits once."""

    receives_ahead = False

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self.ranks, self.index = group.ranks, group.index

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        sends, recvs = not_empty(sends), not_empty(recvs)
        received = sent = None
        if recvs:
            staged = Staged(recvs, self._device)
            received = staged, [self._group.send_recv([], [message]) for message in staged.on_host]
        if sends:
            staged = Staged(sends, self._device)
            staged.to_host()
            StreamMark(self._device).wait_on_host()
            sent = staged, self._group.send_recv(staged.on_host, [])
        return HostPending(self._device, sent, received)

    def barrier(self) -> None:
        self._group.barrier()


class HostTransport(LaneOwner):
    """A transport of CPU tensors, for those of a device. Lanes have streams of the device."""

    def __init__(self, carrier: LaneOwner, device: torch.device) -> None:
        """carrier: gloo's or MPI's, closed with this one."""
        super().__init__(device, carrier.health)
        self.rank, self.size, self.library = carrier.rank, carrier.size, f"{THROUGH_HOST} over {carrier.library}"
        self.carrier, self._group_on_host, self.drawback = carrier, carrier.group, carrier.drawback
        self.world = HostGroup(carrier.world, device)

    def _new_group(self, ranks: tuple[int, ...]) -> HostGroup:
        return HostGroup(self._group_on_host(ranks), self.device)


def _bits(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8)
