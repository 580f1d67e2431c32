"""Trials on all ranks: all-to-alls whose content is known, messages beside other work and between streams that are kept
busy, how long calls that send and receive hold the host."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.trial import DeviceTrial, Shape, try_device
from cocodiff.cli.doctor.facts import AllToAll, Issue, Overlap
from cocodiff.comm.checked import CheckedGroup, WrongMessage
from cocodiff.comm.health import Health
from cocodiff.comm.transport import TOGETHER, Group, Pending, Transport
from cocodiff.config.errors import OwnRankError
from cocodiff.kernels import Kernels
from cocodiff.kernels.device import set_repeatable

Step = Callable[[str], AbstractContextManager[Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
REPEATS = 3
AT_ONCE = 12  # calls under way: as many as a block of a model with guidance and chunks has
SIDE = 2048  # of the matrices that keep an accelerator busy
# Bytes to each peer: on a CPU all ranks' messages pass through one memory.
SIZES = {"cpu": (64, 4096, 65536), "other": (64, 4096, 262144, 4 * 2**20)}
MOST = {"cpu": (4, 577), "other": (2**10, 2**20)}  # heads and tokens of attention
MOST_RANKS = 96  # that send to all others in a trial; of more ranks each sends to a sample
NEAR = 12  # ranks that sit side by side are all in the sample: those of a node of Aurora, with all kinds of its links
COPIES = 5  # of a message: sent, received, expected, and the two buffers of a library's all-to-all
MOST_BYTES = 2**31  # of a rank's copies in one trial
OVERLAP_BYTES = {"cpu": 256 * 1024, "other": 8 * 2**20}
BUSY_S = 0.02  # for which a stream is held up, many times as long as the message takes
ORDER_BYTES, ROUNDS = 2**16, 6
ISSUE_BYTES = (4096, 2**16, 2**20, 2**24)
OLD_SENT, OLD_RECEIVED = 251, 252  # what memory held before; content is less
READ_EARLY = "what was received is read on another stream before it is there: wait does not order that stream"
SENT_EARLY = "a message left before the stream that writes it was through: sending does not wait for that stream"
POSTED_EARLY = "a message was put into memory that an earlier operation still read: receiving does not wait for it"


def of_device(table: dict[str, Any], device: torch.device) -> Any:
    return table["cpu" if device.type == "cpu" else "other"]


def content(sender: int, receiver: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whole numbers below 256, exact in every dtype, that differ by sender, receiver and position."""
    return ((torch.arange(length, device=device) * 7 + 31 * sender + 17 * receiver) % 251).to(dtype)


def peers_of(rank: int, size: int) -> list[int]:
    """Return the ranks that one sends to and receives from in a trial, itself among them: all of a few, of more those
    at the same distances from every rank, NEAR to it and then farther and farther away."""
    if size <= MOST_RANKS:
        return [*range(size)]
    far = [min((NEAR << n) + n, size // 2) for n in range(size.bit_length())]  # on a node at this place and beside it
    return sorted({(rank + way * distance) % size for distance in (*range(NEAR), *far) for way in (1, -1)})


def message_bytes(wanted: int, ranks: int, at_once: int = 1) -> int:
    """Return the size of a trial's messages: what is wanted, or less where a rank's copies would pass MOST_BYTES."""
    messages = len(peers_of(0, ranks)) * sum(1 / (1 + number % 3) for number in range(at_once))
    return min(wanted, int(MOST_BYTES / (COPIES * messages)))


def all_to_alls(transport: Transport, group: Group, step: Step = nullcontext) -> list[AllToAll]:
    """Every dtype and size, sizes uneven and some empty, and once more with checksums; then many at once, as the engine
    has them: batches that overlap were seen to bring wrong bytes (torch-xpu-ops 3022). Rank 0's answer is of all ranks,
    others' of their own messages. step: around each trial, which it is given a name of."""
    found, sizes = [], of_device(SIZES, transport.device)
    cases = [(dtype, size, 1) for dtype in DTYPES for size in sizes]
    for dtype, size, at_once in [*cases, *((torch.bfloat16, size, AT_ONCE) for size in sizes)]:
        size = message_bytes(size, transport.size, at_once)
        with step(f"{at_once} all-to-all(s) of {dtype}, {size} bytes to each peer"):
            found.append(_all_to_all(transport, group, dtype, size, at_once))
    return found


def _all_to_all(transport: Transport, group: Group, dtype: torch.dtype, size: int, at_once: int) -> AllToAll:
    me, device = transport.rank, transport.device
    peers, nothing = peers_of(me, transport.size), torch.empty(0, dtype=dtype, device=device)

    def length(sender: int, receiver: int, number: int) -> int:
        """Every seventh message is empty, the others differ a little; sizes change from call to call."""
        here = size // dtype.itemsize // (1 + number % 3)
        return 0 if (sender + 2 * receiver + number) % 7 == 6 else here + (sender + receiver) % 5

    def made(sender: int, receiver: int, number: int) -> Tensor:
        return content(sender + number, receiver, length(sender, receiver, number), dtype, device)

    def to_all(messages: Iterable[Tensor]) -> list[Tensor]:
        """The messages of `peers`, and an empty one of every other rank."""
        of_peers = dict(zip(peers, messages, strict=True))
        return [of_peers.get(rank, nothing) for rank in range(transport.size)]

    calls = range(at_once)
    sends = [to_all(made(me, peer, number) for peer in peers) for number in calls]
    expected = [made(peer, me, number) for number in calls for peer in peers]
    lengths = [[length(peer, me, number) for peer in peers] for number in calls]
    recvs = [to_all(torch.full((n,), 99, dtype=dtype, device=device) for n in of_call) for of_call in lengths]
    times, words = [], []
    for over in (group, CheckedGroup(group, Health())):
        synchronise(device)
        started = time.perf_counter()
        try:
            for pending in [over.all_to_all(*call) for call in zip(sends, recvs, strict=True)]:
                pending.wait()
        except WrongMessage as error:
            words.append(str(error))
        synchronise(device)
        times.append(time.perf_counter() - started)
        came = [(peer, call[peer]) for call in recvs for peer in peers]
        bad = [peer for (peer, a), b in zip(came, expected, strict=True) if not torch.equal(a, b)]
        if bad and not words:
            words.append(f"rank {me} got other numbers than were sent from {sorted({*bad})}")
    own = (times[0], words[:1])
    of_ranks = transport.gather_object(own) or [own]
    wrong = tuple(word for _, said in of_ranks for word in said)
    return AllToAll(str(dtype).removeprefix("torch."), size, max(seconds for seconds, _ in of_ranks), wrong, at_once)


def overlap(transport: Transport, group: Group) -> Overlap:
    """An all-to-all on a lane, as attention sends it, beside work of about the same length: on accelerators matrix
    products, on a CPU sleep, for there the question is whether messages move while the main thread does not help."""
    device = transport.device
    length = min(of_device(OVERLAP_BYTES, device), MOST_BYTES // (COPIES * transport.size)) // 4
    sends = [torch.ones(length, device=device) for _ in range(transport.size)]
    recvs = [torch.empty(length, device=device) for _ in range(transport.size)]
    lane = transport.lane("doctor")

    def exchange() -> Any:
        return lane.submit(lambda sends, recvs: group.all_to_all(sends, recvs).wait(), sends, recvs)

    def both() -> Any:
        pending = exchange()
        work()
        return pending

    def slowest(begin: Callable[[], Any]) -> float:
        _, own = timed(group, device, begin)
        return transport.over_all(own, max, "the slowest rank")

    exchange().wait()
    alone = min(slowest(exchange) for _ in range(REPEATS))
    work = work_of(device, alone)
    work_s = min(slowest(work) for _ in range(REPEATS))
    return Overlap(alone, work_s, min(slowest(both) for _ in range(REPEATS)))


def timed(group: Group, device: torch.device, begin: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until a call returns, and until what it returns, if anything, and all work on the device are through."""
    group.barrier()
    synchronise(device)
    started = time.perf_counter()
    pending = begin()
    returned = time.perf_counter()
    if pending is not None:
        pending.wait()
    synchronise(device)
    return returned - started, time.perf_counter() - started


def work_of(device: torch.device, seconds: float) -> Callable[[], Any]:
    """Work of about `seconds` that needs no messages."""
    if device.type == "cpu":
        return lambda: time.sleep(seconds)
    a, once_s = torch.ones(SIDE, SIDE, device=device, dtype=torch.bfloat16), product_s(device)
    times = max(1, round(seconds / once_s))

    def multiply() -> None:
        for _ in range(times):
            a @ a

    return multiply


def product_s(device: torch.device) -> float:
    """Return the seconds that a product of large matrices takes, the mean of ten."""
    a = torch.ones(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    a @ a
    synchronise(device)
    started = time.perf_counter()
    for _ in range(10):
        a @ a
    synchronise(device)
    return (time.perf_counter() - started) / 10


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

    own, expected = (content(sender, number, ORDER_BYTES, torch.uint8, device) for sender in (transport.rank, before))
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
    # What a message holds that left early can be anything: whether it is there in the end tells the two faults apart.
    if not torch.equal(received, expected):
        words.append(SENT_EARLY)
    elif not torch.equal(read, expected):
        words.append(READ_EARLY)
    return words


def issues(transport: Transport, group: Group, step: Step = nullcontext) -> list[Issue]:
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
    for name, peers, make in calls:
        for length in ISSUE_BYTES:
            with step(f"calls {name} of {length} bytes"):
                call = make(length)
                timed(group, device, call)  # uncounted
                times = [timed(group, device, call) for _ in range(REPEATS)]
                own = [*map(statistics.median, zip(*times, strict=True))]
                of_ranks = transport.gather_object(own) or [own]
            found.append(Issue(name, length, 2 * peers, *map(max, zip(*of_ranks, strict=True))))
    return found


def compute(device: torch.device, ranks: int, heads: int, head_dim: int, tokens: int) -> tuple[DeviceTrial, float]:
    """Try this rank's device at a run's shape, a CPU at a smaller one. Return the trial, and how many times as long
    products take that add up in one order."""
    heads, tokens = map(min, (heads, tokens), of_device(MOST, device))
    own, rows = -(-heads // ranks), -(-tokens // ranks)
    shape, seconds = Shape((1, tokens, own, head_dim), (rows, heads * head_dim), torch.bfloat16, parts=True), [1.0, 1.0]
    with ExitStack() as as_before:
        for in_one_order in (False, True) if device.type != "cpu" else ():
            as_before.callback(set_repeatable(device, in_one_order))
            seconds.append(product_s(device))
        return try_device(LocalAttention(), shape, device, Kernels()), seconds[-1] / seconds[-2]


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


# In a job of its own: each yields what it reports ---------------------------------------------------------------------


def report_pair(transport: Any, limit: Step, _: str) -> Iterator[Any]:
    """Two ranks exchange a message in a batch whose send comes first on both: that they have met, and then what is
    wrong with what came."""
    group = transport.group(range(2), together=False)
    group.in_one_order = False
    yield "met"
    with limit("a batch that both ranks begin with a send"):
        wrong = _order_once(transport, group, None, 0)
    yield wrong


def report_op_sync(transport: Transport, limit: Step, messages: str) -> Iterator[Any]:
    """Yield what is wrong with all-to-alls, the seconds that all take, and the part of one hidden behind other work."""
    with limit("all-to-alls with another CCL_OP_SYNC"):
        group = transport.group(range(transport.size), TOGETHER[messages])
        found, hidden = all_to_alls(transport, group), overlap(transport, group).hidden
    wrong = next((one.wrong[0] for one in found if one.wrong), "right")
    seconds = sum(one.seconds for one in found)
    yield {f"CCL_OP_SYNC={os.environ['CCL_OP_SYNC']}": wrong, "seconds": seconds, "hidden": hidden}
