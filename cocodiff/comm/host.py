"""The sending of an accelerator's tensors as CPU messages: through pinned host memory, over gloo or MPI.

This uses no communication library of a vendor. So several ranks may share a device of any make, and a faulty library
can be avoided. Tensors to send are copied to the host on the caller's stream, and are sent when these copies are done.
Received ones are copied to the device on the stream that waits for them. The host waits once for the copies of each
call that sends, and once for the messages. That is on a lane's thread, while the main thread continues.

On a CPU tensors take the same way without pinned memory, so the tests of the other transports cover this one too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from cocodiff.comm.transport import Group, LaneOwner, Messages, Pending, not_empty
from cocodiff.kernels.device import StreamMark, used_on_current_stream

ALIGNED = 64  # bytes; messages of a call begin at multiples of it in their common buffer
THROUGH_HOST = "host memory"  # name of the carrier, for messages to the user


def host_memory(size: int, device: torch.device) -> Tensor:
    """Allocate host memory for copies to or from a device: uint8 [size], on the CPU regardless of the default device.

    For an accelerator it is pinned. torch reuses it once all copies from and to it are done.
    """
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


class Staged:
    """The tensors of one call on a device, with their places in a new buffer in host memory (pinned for accelerators).

    Sent tensors are copied to it all at once (`to_host`), received ones from it one by one (`to_device`).
    """

    def __init__(self, messages: Messages, device: torch.device) -> None:
        """Allocate the buffer.

        Args:
            messages: tensors on the device, with their peers.
            device: the device.
        """
        starts = [0]
        for tensor, _ in messages:
            starts.append(-(-(starts[-1] + tensor.nbytes) // ALIGNED) * ALIGNED)
        buffer = host_memory(starts[-1], device)
        self.tensors = [tensor for tensor, _ in messages]  # on the device
        placed = zip(starts, messages, strict=False)
        # for each tensor, its place in the buffer as bytes, with its peer: the message over host memory
        self.on_host = [(buffer[start : start + tensor.nbytes], peer) for start, (tensor, peer) in placed]

    def to_host(self) -> None:
        """Start copying all tensors from the device to the buffer."""
        for tensor, (host, _) in zip(self.tensors, self.on_host, strict=True):
            host.copy_(_bits(tensor), non_blocking=True)

    def to_device(self, number: int) -> None:
        """Start copying tensor `number` from the buffer to its place on the device, on the current stream."""
        _bits(used_on_current_stream(self.tensors[number])).copy_(self.on_host[number][0], non_blocking=True)


class HostPending:
    """The messages of one call in flight, for tensors of a device whose messages pass through host memory.

    The first `wait` blocks its thread until they have arrived and copies them on its stream. Every `wait` makes its
    stream wait for these copies.
    """

    def __init__(
        self, device: torch.device, sent: tuple[Staged, Pending] | None, received: tuple[Staged, list[Pending]] | None
    ) -> None:
        """Hold messages.

        Args:
            sent: the sent tensors' copies in host memory, and the messages in flight; None if nothing is sent.
            received: the memory to receive into, and the messages in flight, one for each tensor; None if nothing is
                received.
        """
        self._device, self._sent, self._received = device, sent, received
        self._on_device = received[0].tensors if received is not None else []
        self._posted = StreamMark(device)  # until here the memory to receive into may be in use
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
        """Wait for the messages and copy received ones to the device."""
        if self._received is not None:
            staged, transfers = self._received
            for number, transfer in enumerate(transfers):
                transfer.wait()
                staged.to_device(number)
        if self._sent is not None:
            self._sent[1].wait()
        self._received = self._sent = None


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

    def _new_group(self, ranks: tuple[int, ...]) -> HostGroup:
        return HostGroup(self._group_on_host(ranks), self.device)


def _bits(tensor: Tensor) -> Any:
    """Return a tensor's memory as bytes, uint8 [n], without a copy."""
    return tensor.view(-1).view(torch.uint8)
