"""Calls of all ranks as one all-to-all of torch.distributed's backend, with a size for each peer: CoCoDiff's flat
baseline, and a way around backends that deliver batches of sends and receives wrong (torch-xpu-ops 3022)."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cocodiff.comm.transport import Group, Messages, Pending
from cocodiff.kernels.device import StreamMark, used_on_current_stream


class TogetherGroup(Group):
    """A group whose `collective` calls are the library's; all others go as the group itself sends them."""

    receives_ahead = False

    def __init__(self, group: Group, process_group: Any) -> None:
        """process_group: torch.distributed's, of these ranks."""
        self._group, self._process_group = group, process_group
        self.ranks, self.index, self.device = group.ranks, group.index, group.device

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        return self._group.send_recv(sends, recvs)

    def collective(self, sends: Messages, recvs: Messages) -> Pending:
        outgoing, sizes_out = self._by_peer(sends)
        incoming, sizes_in = self._by_peer(recvs)
        sent = torch.cat([x for of_peer in outgoing for x in of_peer])
        came = torch.empty(sum(sizes_in), dtype=torch.uint8, device=self.device)
        work = self._process_group.alltoall_base(came, sent, sizes_in, sizes_out, dist.AllToAllOptions())
        return _Arriving(work, sent, came, [x for of_peer in incoming for x in of_peer], self.device)

    def _by_peer(self, messages: Messages) -> tuple[list[list[Tensor]], list[int]]:
        """Each peer's messages as bytes, in order, and how many bytes they have; a byte where nothing is due, for sizes
        of zero were seen to fail in oneCCL."""
        parts: list[list[Tensor]] = [[] for _ in self.ranks]
        for tensor, peer in messages:
            parts[peer] += [tensor.view(-1).view(torch.uint8)] if tensor.numel() else []
        parts = [of_peer or [torch.zeros(1, dtype=torch.uint8, device=self.device)] for of_peer in parts]
        return parts, [sum(x.numel() for x in of_peer) for of_peer in parts]

    def barrier(self) -> None:
        self._group.barrier()


class _Arriving:
    """Messages that come in one buffer. The first `wait` copies them from there, on its stream; every `wait` orders its
    stream behind these copies."""

    def __init__(self, work: Any, sent: Tensor, came: Tensor, messages: list[Tensor], device: torch.device) -> None:
        """messages: bytes that belong elsewhere, in the order in which they lie in `came`."""
        self._work, self._held, self._messages, self._device = work, [sent, came], messages, device
        self._lock = threading.Lock()
        self._done: StreamMark | None = None

    def wait(self) -> None:
        with self._lock:
            if self._done is None:
                self._work.wait()
                _, came = used_on_current_stream(self._held)
                parts = came.split([message.numel() for message in self._messages])
                for message, part in zip(self._messages, parts, strict=True):
                    message.copy_(part)
                self._work, self._held, self._done = None, [], StreamMark(self._device)
        self._done.wait()
        used_on_current_stream(self._messages)
