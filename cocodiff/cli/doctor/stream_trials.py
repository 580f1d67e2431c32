"""Trials on all ranks of what streams and the host do: does a message keep its place in the order of streams, and does
sending and receiving block the host?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cocodiff.cli.doctor.facts import Issue
from cocodiff.cli.doctor.trials import REPEATS, synchronise, work_of
from cocodiff.comm.transport import Group, Pending, Transport
from cocodiff.errors import OwnRankError

BUSY_S = 0.02  # for which a stream is held up, many times as long as the message takes
ORDER_BYTES, ROUNDS = 2**16, 6
ISSUE_BYTES = (4096, 2**16, 2**20, 2**24)
OLD_SENT, OLD_RECEIVED = 251, 252  # what memory held before; content is less
READ_EARLY = "what was received is read on another stream before it is there: wait does not order that stream"
SENT_EARLY = "a message left before the stream that writes it was through: sending does not wait for that stream"
POSTED_EARLY = "a message was put into memory that an earlier operation still read: receiving does not wait for it"


def order(transport: Transport, group: Group) -> int | None:
    """Messages around a ring that are written on a stream that is kept busy, and read on another one, by ranks that are
    late in turns: how many rounds. None on a CPU, where work is done when its call returns. All ranks call it.

    Raises OwnRankError with the order that was broken: messages cannot be relied on then to gather such words."""
    device = transport.device
    if device.type == "cpu":
        return None
    busy, words = work_of(device, BUSY_S), dict[str, None]()
    for number in range(ROUNDS):
        late = (transport.rank + number) % 2 == 0
        words |= dict.fromkeys(_order_once(transport, group, busy if late else None, number))
    group.barrier()
    if words:
        raise OwnRankError("; ".join(words))
    return ROUNDS


def _order_once(transport: Transport, group: Group, busy: Callable[[], Any] | None, number: int) -> list[str]:
    """One message to the next rank and one from the rank before. busy: keeps the stream that writes busy."""
    device, size = transport.device, transport.size
    module = torch.get_device_module(device)
    after, before = (transport.rank + 1) % size, (transport.rank - 1) % size

    def content(sender: int) -> Tensor:
        return torch.arange(ORDER_BYTES, device=device).add_(7 * sender + number).remainder_(OLD_SENT).to(torch.uint8)

    own, expected = content(transport.rank), content(before)
    sent, received = (torch.full_like(own, old) for old in (OLD_SENT, OLD_RECEIVED))
    writing, reading = (module.Stream(device=device) for _ in range(2))
    synchronise(device)
    with module.stream(writing):
        if busy is not None:
            busy()
        earlier = received.clone()
        sent.copy_(own)
        pending = group.send_recv([(sent, after)], [(received, before)])
    with module.stream(reading):
        pending.wait()
        read = received.clone()
    synchronise(device)
    words = [POSTED_EARLY] if not bool((earlier == OLD_RECEIVED).all()) else []
    if not torch.equal(read, expected):
        words.append(READ_EARLY if bool((read == OLD_RECEIVED).any()) else SENT_EARLY)
    return words


def issues(transport: Transport, group: Group) -> list[Issue]:
    """How long the calls that the engine's exchanges and gathers make hold the host, and until when the messages are
    through: the median of a few, of the slowest rank. All ranks call it; rank 0's answer is whole."""
    size, rank, device = transport.size, transport.rank, transport.device
    after, before = (rank + 1) % size, (rank - 1) % size

    def parts(length: int, count: int = size) -> list[Tensor]:
        return [torch.zeros(length, dtype=torch.uint8, device=device) for _ in range(count)]

    def to_the_next(length: int) -> Callable[[], Pending]:
        send, recv = parts(length, 2)
        return lambda: group.send_recv([(send, after)], [(recv, before)])

    def to_all(length: int) -> Callable[[], Pending]:
        sends, recvs = parts(length // size), parts(length // size)
        return lambda: group.all_to_all(sends, recvs)

    def gathered(length: int) -> Callable[[], Pending]:
        parts_of_all = parts(length // size)
        own = torch.zeros_like(parts_of_all[0])
        return lambda: group.all_gather(own, parts_of_all)

    found = []
    calls = (("to the next rank", 1, to_the_next), ("all-to-all", size - 1, to_all), ("all-gather", size - 1, gathered))
    for name, peers, call in calls:
        for length in ISSUE_BYTES:
            times = _timed(call(length), group, device)
            of_ranks = transport.gather_object(times) or [times]
            returns_s, complete_s = (max(one[at] for one in of_ranks) for at in (0, 1))
            found.append(Issue(name, length, 2 * peers, returns_s, complete_s))
    return found


def _timed(call: Callable[[], Pending], group: Group, device: torch.device) -> tuple[float, float]:
    """Seconds until the call returns, and until its messages are through; once before, uncounted."""
    of_calls = []
    for _ in range(1 + REPEATS):
        group.barrier()
        synchronise(device)
        started = time.perf_counter()
        pending = call()
        returned = time.perf_counter()
        pending.wait()
        synchronise(device)
        of_calls.append((returned - started, time.perf_counter() - started))
    return tuple(statistics.median(one[at] for one in of_calls[1:]) for at in (0, 1))  # type: ignore[return-value]
