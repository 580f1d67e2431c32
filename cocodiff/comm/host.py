"""Tensors of an accelerator over the CPU's messages: through pinned host memory, over gloo or MPI.

Nothing is asked of a vendor's communication library, so several ranks may share a device of any make, and a library
that misbehaves can be done without. What is sent is copied to the host on the caller's stream, and leaves when these
copies are done; what is received is copied to the device on the stream that waits for it. The host waits once for each
call that sends, for its copies, and once for the messages: on a lane's thread, while the main thread goes on. Buffers
are used again, so a run allocates none once it has had as many in use at a time as it ever will.

On a CPU tensors take the same way, without pinned memory: so the tests of the other transports try this one too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cocodiff.comm.transport import Group, LaneOwner, Pending
from cocodiff.device import StreamMark, used_on_current_stream

ALIGNED = 64  # bytes; where messages of a call begin in their common buffer
SMALLEST = 4096  # bytes of a buffer
THROUGH_HOST = "host memory"  # what carries messages, in words


class HostBuffers:
    """Buffers in host memory, each of a power of two of bytes, that are used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[tuple[Tensor, StreamMark | None]]] = defaultdict(list)
        self._lock = threading.Lock()  # lanes share them
        self.made = 0

    def take(self, size: int) -> Tensor:
        """At least so many bytes, uint8: a buffer that was given back and that nothing uses, or a new one."""
        rounded = max(SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free[rounded]
            for place, (_, used_until) in enumerate(free):
                if used_until is None or used_until.is_past():
                    return free.pop(place)[0]
            self.made += 1
        # On the CPU whatever the caller's default device is.
        return torch.empty(rounded, dtype=torch.uint8, device="cpu", pin_memory=self._device.type != "cpu")

    def give_back(self, buffer: Tensor, used_until: StreamMark | None = None) -> None:
        """For use again, after a point in a stream."""
        with self._lock:
            self._free[len(buffer)].append((buffer, used_until))


class Staged:
    """Tensors of one call in a common buffer in host memory."""

    def __init__(self, messages: Sequence[tuple[Tensor, int]], buffers: HostBuffers) -> None:
        """messages: tensors on the device, with their peers."""
        starts = [0]
        for tensor, _ in messages:
            starts.append(-(-(starts[-1] + tensor.nbytes) // ALIGNED) * ALIGNED)
        self._buffers, self._buffer = buffers, buffers.take(starts[-1])
        self.tensors = [tensor for tensor, _ in messages]
        self.on_host = [
            (self._buffer[start : start + tensor.nbytes], peer)
            for start, (tensor, peer) in zip(starts, messages, strict=False)
        ]

    def to_host(self) -> None:
        for tensor, (host, _) in zip(self.tensors, self.on_host, strict=True):
            host.copy_(_bits(tensor), non_blocking=True)

    def to_device(self, number: int) -> None:
        """Copies one tensor on the current stream."""
        _bits(used_on_current_stream(self.tensors[number])).copy_(self.on_host[number][0], non_blocking=True)

    def give_back(self, used_until: StreamMark | None = None) -> None:
        self._buffers.give_back(self._buffer, used_until)


class HostPending:
    """Messages of one call under way. The first `wait` blocks its thread until they are here and copies them on its
    stream; every `wait` orders its stream behind these copies."""

    def __init__(
        self, device: torch.device, sent: tuple[Staged, Pending] | None, received: tuple[Staged, list[Pending]] | None
    ) -> None:
        """received: with one transfer for each tensor."""
        self._device, self._sent, self._received = device, sent, received
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
        for tensor in self._received[0].tensors if self._received is not None else ():
            used_on_current_stream(tensor)

    def _finish(self) -> None:
        if self._received is not None:
            staged, transfers = self._received
            for number, transfer in enumerate(transfers):
                transfer.wait()
                staged.to_device(number)
            staged.give_back(StreamMark(self._device))
        if self._sent is not None:
            staged, leaving = self._sent
            leaving.wait()
            staged.give_back()
            self._sent = None


class HostGroup(Group):
    """Ranks that share a group of the CPU's. Calls take all messages of a phase together: one launch packs them, and
    the host waits once."""

    receives_ahead = False

    def __init__(self, group: Group, device: torch.device, buffers: HostBuffers) -> None:
        self._group, self._device, self._buffers = group, device, buffers
        self.ranks, self.index = group.ranks, group.index

    def send_recv(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> Pending:
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        recvs = [(tensor, peer) for tensor, peer in recvs if tensor.numel()]
        received = sent = None
        if recvs:
            staged = Staged(recvs, self._buffers)
            received = staged, [self._group.send_recv([], [message]) for message in staged.on_host]
        if sends:
            staged = Staged(sends, self._buffers)
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
        self._carrier, self.drawback, self.buffers = carrier, carrier.drawback, HostBuffers(device)
        self.world = self._over(carrier.world)

    def _new_group(self, ranks: tuple[int, ...]) -> HostGroup:
        return self._over(self._carrier.group(ranks))

    def _over(self, group: Group) -> HostGroup:
        return HostGroup(group, self.device, self.buffers)

    def _release(self) -> None:
        self._carrier.close()


def _bits(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8)
