"""Trials on all ranks: all-to-alls whose content is known, messages beside other work, rates between pairs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cocodiff.cli.doctor.facts import AllToAll, Overlap
from cocodiff.comm.checked import CheckedGroup, WrongMessage
from cocodiff.comm.health import Health
from cocodiff.comm.transport import Group, Transport

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
TRANSPORT = "cocodiff"
REPEATS = 3
SIDE = 2048  # of the matrices that keep an accelerator busy
# Bytes to each peer: on a CPU all ranks' messages pass through one memory.
SIZES = {"cpu": (64, 4096, 65536), "other": (64, 4096, 262144, 4 * 2**20)}
OVERLAP_BYTES = {"cpu": 256 * 1024, "other": 8 * 2**20}
PAIR_BYTES = {"cpu": 2**17, "other": 32 * 2**20}


def of_device(table: dict[str, Any], device: torch.device) -> Any:
    return table["cpu" if device.type == "cpu" else "other"]


def content(sender: int, receiver: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whole numbers below 256, exact in every dtype, that differ by sender, receiver and position."""
    return ((torch.arange(length, device=device) * 7 + 31 * sender + 17 * receiver) % 251).to(dtype)


def all_to_alls(transport: Transport, group: Group) -> list[AllToAll]:
    """Every dtype and size through the transport, sizes uneven and some empty, and once more with checksums; then the
    library's own."""
    cases = [(dtype, size) for dtype in DTYPES for size in of_device(SIZES, transport.device)]
    found = [_all_to_all(transport, group, dtype, size) for dtype, size in cases]
    own = getattr(group, "library_all_to_all", None)
    if own is not None:
        found += [_library_all_to_all(transport, own, dtype, size) for dtype, size in cases]
    return found


def _all_to_all(transport: Transport, group: Group, dtype: torch.dtype, size: int) -> AllToAll:
    me, peers, device = transport.rank, range(transport.size), transport.device

    def length(sender: int, receiver: int) -> int:
        """Every seventh message is empty, the others differ a little."""
        return 0 if (sender + 2 * receiver) % 7 == 6 else size // dtype.itemsize + (sender + receiver) % 5

    sends = [content(me, peer, length(me, peer), dtype, device) for peer in peers]
    recvs = [torch.full((length(peer, me),), 99, dtype=dtype, device=device) for peer in peers]
    expected = [content(peer, me, length(peer, me), dtype, device) for peer in peers]
    checked = CheckedGroup(group, Health())
    trial = _trial(transport, TRANSPORT, size, lambda: group.all_to_all(sends, recvs), recvs, expected)
    with_sums = _trial(transport, TRANSPORT, size, lambda: checked.all_to_all(sends, recvs), recvs, expected)
    return replace(trial, wrong=trial.wrong or with_sums.wrong)


def _library_all_to_all(
    transport: Transport, exchange: Callable[[Tensor, Tensor], Any], dtype: torch.dtype, size: int
) -> AllToAll:
    me, peers, device = transport.rank, range(transport.size), transport.device
    length = size // dtype.itemsize
    send = torch.cat([content(me, peer, length, dtype, device) for peer in peers])
    recv = torch.full_like(send, 99)
    expected = [content(peer, me, length, dtype, device) for peer in peers]
    name = f"{getattr(transport, 'library', 'library')}'s own all_to_all_single"
    return _trial(transport, name, size, lambda: exchange(recv, send), list(recv.split(length)), expected)


def _trial(
    transport: Transport, how: str, size: int, start: Callable[[], Any], got: list[Tensor], expected: list[Tensor]
) -> AllToAll:
    """Times an exchange, and compares what arrives in `got`: on rank 0 of all ranks, elsewhere of this one."""
    synchronise(transport.device)
    started, word = time.perf_counter(), ""
    try:
        start().wait()
    except WrongMessage as error:
        word = str(error)
    synchronise(transport.device)
    seconds = time.perf_counter() - started
    bad = [peer for peer, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]
    if bad:
        word = word or f"rank {transport.rank} got other numbers than were sent from {bad}"
    of_ranks = transport.gather_object((seconds, word)) or [(seconds, word)]
    slowest, words = max(one for one, _ in of_ranks), tuple(text for _, text in of_ranks if text)
    return AllToAll(how, str(expected[0].dtype).removeprefix("torch."), size, slowest, words)


def overlap(transport: Transport, group: Group) -> Overlap:
    """An all-to-all on a lane, as attention sends it, beside work of about the same length: on accelerators matrix
    products, on a CPU sleep, for there the question is whether messages move while the main thread does not help."""
    device, length = transport.device, of_device(OVERLAP_BYTES, transport.device) // 4
    sends = [torch.ones(length, device=device) for _ in range(transport.size)]
    recvs = [torch.empty(length, device=device) for _ in range(transport.size)]
    lane = transport.lane("doctor")

    def exchange() -> Any:
        return lane.submit(lambda sends, recvs: group.all_to_all(sends, recvs).wait(), sends, recvs)

    def timed(action: Callable[[], Any]) -> float:
        group.barrier()
        synchronise(device)
        started = time.perf_counter()
        action()
        synchronise(device)
        own = time.perf_counter() - started
        return float(transport.broadcast_object(max(transport.gather_object(own) or [own])))

    exchange().wait()
    alone = min(timed(lambda: exchange().wait()) for _ in range(REPEATS))
    work = work_of(device, alone)
    work_s = min(timed(work) for _ in range(REPEATS))

    def both() -> None:
        pending = exchange()
        work()
        pending.wait()

    return Overlap(alone, work_s, min(timed(both) for _ in range(REPEATS)))


def work_of(device: torch.device, seconds: float) -> Callable[[], Any]:
    """Work of about `seconds` that needs no messages."""
    if device.type == "cpu":
        return lambda: time.sleep(seconds)
    a = torch.ones(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    a @ a
    synchronise(device)
    started = time.perf_counter()
    for _ in range(10):
        a @ a
    synchronise(device)
    times = max(1, round(seconds / ((time.perf_counter() - started) / 10)))

    def multiply() -> None:
        for _ in range(times):
            a @ a

    return multiply


def pair_rates(transport: Transport, groups: list[list[int]]) -> list[list[float]]:
    """GB/s between all pairs of ranks of each group (a node), one pair of each group at a time; 0 for all others.

    Every rank calls it; rank 0's answer is whole.
    """
    world = transport.group(range(transport.size))
    device, length = transport.device, of_device(PAIR_BYTES, transport.device)
    send, recv = (torch.zeros(length, dtype=torch.uint8, device=device) for _ in range(2))
    rates = [0.0] * transport.size
    own = next(group for group in groups if transport.rank in group)
    largest = max(len(group) for group in groups)
    for a in range(largest):
        for b in range(a + 1, largest):
            world.barrier()
            if b >= len(own) or transport.rank not in (own[a], own[b]):
                continue
            peer = own[b] if transport.rank == own[a] else own[a]
            best = float("inf")
            for _ in range(2):
                synchronise(device)
                started = time.perf_counter()
                world.send_recv([(send, peer)], [(recv, peer)]).wait()
                synchronise(device)
                best = min(best, time.perf_counter() - started)
            rates[peer] = length / best / 1e9
    return transport.gather_object(rates) or []


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
