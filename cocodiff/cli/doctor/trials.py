"""Trials on all ranks: all-to-alls with known content, messages beside other work and between busy streams, and the
time for which calls that send and receive block the host."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.trial import DeviceTrial, Shape, try_device
from cocodiff.cli.doctor.facts import AllToAllTrial, CallTiming, LinkTrial, Overlap
from cocodiff.comm.checked import CheckedGroup, WrongMessage
from cocodiff.comm.health import Health
from cocodiff.comm.transport import TOGETHER, Group, Pending, Transport
from cocodiff.config.errors import OwnRankError
from cocodiff.kernels import Kernels
from cocodiff.kernels.device import set_repeatable
from cocodiff.topology import Topology

Step = Callable[[str], AbstractContextManager[Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
REPEATS = 3
LAUNCHES = 200  # small kernels whose launches are timed
AT_ONCE = 12  # calls under way together: as many as a block of a model with guidance and chunks has
SIDE = 2048  # rows and columns of the matrices that keep an accelerator busy
# Bytes to each peer. On a CPU all ranks' messages pass through one memory.
SIZES = {"cpu": (64, 4096, 65536), "other": (64, 4096, 262144, 4 * 2**20)}
MOST = {"cpu": (4, 577), "other": (2**10, 2**20)}  # the most heads and tokens of attention
MOST_RANKS = 96  # largest number of ranks that all send to each other in a trial; of more ranks each sends to a sample
NEAR = 12  # distance up to which all ranks are in the sample: a node of Aurora, with all kinds of its links
COPIES = 5  # copies of a message: sent, received, expected, and the two buffers of a library's all-to-all
MOST_BYTES = 2**31  # bytes of a rank's copies in one trial
OVERLAP_BYTES = {"cpu": 256 * 1024, "other": 8 * 2**20}
BUSY_S = 0.02  # seconds for which a stream is kept busy, many times as long as the message takes
ORDER_BYTES, ROUNDS = 2**16, 6
ISSUE_BYTES = (4096, 2**16, 2**20, 2**24)
LINK_BYTES = {"cpu": (2**16, 2**20), "other": (2**20, 2**23, 2**26)}  # of each message; on a CPU links may be emulated
MOST_LINKED = 11  # most tiles of its plane that a rank sends to in a trial of links
OLD_SENT, OLD_RECEIVED = 251, 252  # values in memory before a message; content is less
READ_EARLY = "what was received is read on another stream before it is there: wait does not order that stream"
SENT_EARLY = "a message left before the stream that writes it was through: sending does not wait for that stream"
POSTED_EARLY = "a message was put into memory that an earlier operation still read: receiving does not wait for it"


def of_device(table: dict[str, Any], device: torch.device) -> Any:
    """Return the entry of a table of constants, such as SIZES, for a device: "cpu" or "other"."""
    return table["cpu" if device.type == "cpu" else "other"]


def content(sender: int, receiver: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the known content of a message in a trial: whole numbers below 256, exact in every dtype, that differ by
    sender, receiver and position.

    Args:
        sender: the rank that sends it, or any number.
        receiver: the rank that receives it, or any number.
        length: number of elements.
        dtype: their dtype.
        device: the device that the tensor is on.
    """
    return ((torch.arange(length, device=device) * 7 + 31 * sender + 17 * receiver) % 251).to(dtype)


def peers_of(rank: int, size: int) -> list[int]:
    """Return the ranks that a rank sends to and receives from in a trial, itself included.

    Up to MOST_RANKS these are all ranks. Of more they are those at certain distances, the same for every rank: up to
    NEAR, then growing ones.

    Args:
        rank: the rank that sends and receives.
        size: number of all ranks.
    """
    if size <= MOST_RANKS:
        return [*range(size)]
    far = [min((NEAR << n) + n, size // 2) for n in range(size.bit_length())]  # at this place on a node, and beside it
    return sorted({(rank + way * distance) % size for distance in (*range(NEAR), *far) for way in (1, -1)})


def message_bytes(wanted: int, ranks: int, at_once: int = 1) -> int:
    """Return the size in bytes of each message of a trial: as wanted, or less if a rank's copies of all messages would
    exceed MOST_BYTES.

    Args:
        wanted: bytes of a message.
        ranks: number of all ranks.
        at_once: number of all-to-alls that are under way together.
    """
    messages = len(peers_of(0, ranks)) * sum(1 / (1 + number % 3) for number in range(at_once))
    return min(wanted, int(MOST_BYTES / (COPIES * messages)))


def all_to_alls(transport: Transport, group: Group, step: Step = nullcontext) -> list[AllToAllTrial]:
    """Try all-to-alls of every dtype and size, each with and without checksums, then many at once as in the engine. All
    ranks call it.

    Sizes are uneven and some are 0. Overlapping batches have brought wrong bytes before (torch-xpu-ops 3022). Return
    the trials: on rank 0 of all ranks, on others of their own messages.

    Args:
        transport: the rank's transport.
        group: a group of all ranks.
        step: returns a context for each trial, called with the trial's name.
    """
    found, sizes = [], of_device(SIZES, transport.device)
    cases = [(dtype, size, 1) for dtype in DTYPES for size in sizes]
    for dtype, size, at_once in [*cases, *((torch.bfloat16, size, AT_ONCE) for size in sizes)]:
        size = message_bytes(size, transport.size, at_once)
        with step(f"{at_once} all-to-all(s) of {dtype}, {size} bytes to each peer"):
            found.append(_all_to_all(transport, group, dtype, size, at_once))
    return found


def _all_to_all(transport: Transport, group: Group, dtype: torch.dtype, size: int, at_once: int) -> AllToAllTrial:
    """Try several all-to-alls of one dtype and size at the same time. Return the time and the errors of all ranks on
    rank 0, this rank's own on others.

    Args:
        transport: the rank's transport.
        group: a group of all ranks.
        dtype: dtype of the messages.
        size: bytes of a message.
        at_once: number of all-to-alls.
    """
    me, device = transport.rank, transport.device
    peers, nothing = peers_of(me, transport.size), torch.empty(0, dtype=dtype, device=device)

    def length(sender: int, receiver: int, number: int) -> int:
        """Return the number of elements of a message. Every seventh is empty, the others differ a little; sizes change
        from call to call."""
        here = size // dtype.itemsize // (1 + number % 3)
        return 0 if (sender + 2 * receiver + number) % 7 == 6 else here + (sender + receiver) % 5

    def made(sender: int, receiver: int, number: int) -> Tensor:
        """Return the known content of a message."""
        return content(sender + number, receiver, length(sender, receiver, number), dtype, device)

    def to_all(messages: Iterable[Tensor]) -> list[Tensor]:
        """Return a list of messages, one for each rank: those of `peers`, and empty ones for others."""
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
    of_ranks = transport.gather_values(own) or [own]
    wrong = tuple(word for _, said in of_ranks for word in said)
    return AllToAllTrial(
        str(dtype).removeprefix("torch."), size, max(seconds for seconds, _ in of_ranks), wrong, at_once
    )


def overlap(transport: Transport, group: Group) -> Overlap:
    """Time an all-to-all on a lane (a background thread), as attention sends it, beside work of about the same length.
    All ranks call it.

    On accelerators the work is matrix products. On a CPU it is sleep: there the question is whether messages move
    without the main thread's help.

    Args:
        transport: the rank's transport.
        group: a group of all ranks.
    """
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
        return transport.reduce_values(own, max, "the slowest rank")

    exchange().wait()
    alone = min(slowest(exchange) for _ in range(REPEATS))
    work = work_of(device, alone)
    work_s = min(slowest(work) for _ in range(REPEATS))
    return Overlap(alone, work_s, min(slowest(both) for _ in range(REPEATS)))


def timed(group: Group, device: torch.device, begin: Callable[[], Any]) -> tuple[float, float]:
    """Time a call. Return (the seconds until it returns, the seconds until its messages and all work on the device are
    complete).

    Args:
        group: ranks that begin the call together.
        device: the rank's device.
        begin: the call. It returns an object to wait for, or None.
    """
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
    """Return a function that keeps the device busy, or a CPU asleep, for about `seconds` without messages."""
    if device.type == "cpu":
        return lambda: time.sleep(seconds)
    a, once_s = torch.ones(SIDE, SIDE, device=device, dtype=torch.bfloat16), product_s(device)
    times = max(1, round(seconds / once_s))

    def multiply() -> None:
        for _ in range(times):
            a @ a

    return multiply


def product_s(device: torch.device) -> float:
    """Return the mean seconds in which a device multiplies two large matrices."""
    a = torch.ones(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    return mean_s(device, lambda: a @ a, 10)


def mean_s(device: torch.device, call: Callable[[], Any], times: int) -> float:
    """Return the mean seconds of calls one after another, with the device's work. A first call is not counted.

    Args:
        device: the rank's device.
        call: the call.
        times: number of calls that are counted.
    """
    call()
    synchronise(device)
    started = time.perf_counter()
    for _ in range(times):
        call()
    synchronise(device)
    return (time.perf_counter() - started) / times


def rates(device: torch.device) -> dict[str, float]:
    """Measure an accelerator: return its TFLOP/s of matrix products, and the microseconds of a kernel launch and of
    reading a number, by the names of these in machine files.

    A CPU has none: the dict is empty.
    """
    if device.type == "cpu":
        return {}
    x = torch.ones(64, device=device)
    launch_s = mean_s(device, lambda: x.add_(1), LAUNCHES)
    read_s = mean_s(device, lambda: x.add_(1)[0].item(), LAUNCHES)
    rate = 2 * SIDE**3 / product_s(device) / 1e12
    return {"bf16_tflop_s": rate, "launch_us": launch_s * 1e6, "wait_us": max(0.0, read_s - launch_s) * 1e6}


def order(transport: Transport, group: Group) -> int | None:
    """Check that messages wait for the stream that writes them, and readers for messages. All ranks call it.

    Messages go around a ring. Each is written on one stream and read on another. In every round half of the ranks keep
    their writing stream busy first.

    Return the number of rounds; None on a CPU, where work is complete when its call returns. Raise OwnRankError if this
    rank found a message that was received, sent or read too early. Each rank raises its own error, because messages
    that may be wrong cannot gather the faults.

    Args:
        transport: the rank's transport.
        group: a group of all ranks.
    """
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
    """Send one message to the next rank and receive one from the previous rank. Return a line for each fault in their
    order.

    Args:
        transport: the rank's transport.
        group: a group of all ranks.
        busy: function that keeps the writing stream busy before it writes; None for none.
        number: number of the round, which the content depends on.
    """
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
    # A message that left too early has any content. If the right one has arrived in the end, it was read too early.
    if not torch.equal(received, expected):
        words.append(SENT_EARLY)
    elif not torch.equal(read, expected):
        words.append(READ_EARLY)
    return words


def issues(transport: Transport, group: Group, step: Step = nullcontext) -> list[CallTiming]:
    """Time the calls that the engine's exchanges and gathers make: until they return, and until their messages have
    arrived. All ranks call it.

    Return one result for each call and size, as medians of the slowest rank. They are complete on rank 0 only.

    Args:
        transport: the rank's transport.
        group: a group of all ranks.
        step: returns a context for each trial, called with the trial's name.
    """
    size, rank, device = transport.size, transport.rank, transport.device
    after, before = (rank + 1) % size, (rank - 1) % size

    def parts(length: int, count: int = size) -> list[Tensor]:
        return [torch.zeros(length, dtype=torch.uint8, device=device) for _ in range(count)]

    def call_of(name: str, length: int) -> Callable[[], Pending]:
        if name == "to the next rank":
            send, recv = parts(length, 2)
            return lambda: group.send_recv([(send, after)], [(recv, before)])
        sends, recvs = parts(length // size), parts(length // size)
        if name == "all-to-all":
            return partial(group.all_to_all, sends, recvs)
        return partial(group.all_gather, sends[0], recvs)

    found = []
    for name, peers in (("to the next rank", 1), ("all-to-all", size - 1), ("all-gather", size - 1)):
        for length in ISSUE_BYTES:
            with step(f"calls {name} of {length} bytes"):
                call = call_of(name, length)
                timed(group, device, call)  # not counted
                times = [timed(group, device, call) for _ in range(REPEATS)]
                own = [*map(statistics.median, zip(*times, strict=True))]
                of_ranks = transport.gather_values(own) or [own]
            found.append(CallTiming(name, length, 2 * peers, *map(max, zip(*of_ranks, strict=True))))
    return found


def linked(topology: Topology, rank: int) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Return (the ranks that a rank sends to, those that it receives from) for each kind of link that the job uses, for
    the kind's trial.

    For "sibling" both are the other tiles of the rank's card, for "plane" the other tiles of its plane on its node, at
    most MOST_LINKED of them, which bounds the memory. For "nic" it sends to the rank at its place on the next node, and
    receives from that on the previous one. Kinds are the same on every rank; a rank may have none to send to.
    """
    on_node, size = topology.on_node[topology.places[rank].node], topology.size
    in_plane = [other for other in on_node if other == rank or topology.link_class(rank, other) == "plane"]
    at, steps = in_plane.index(rank), range(1, min(len(in_plane) - 1, MOST_LINKED) + 1)
    found: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
    if any(len(ranks) > 1 for ranks in topology.cards.values()):
        found["sibling"] = (topology.siblings(rank),) * 2
    if any(topology.link_class(0, other) == "plane" for other in topology.on_node[0]):
        found["plane"] = (
            [in_plane[(at + step) % len(in_plane)] for step in steps],
            [in_plane[at - step] for step in steps],
        )
    if topology.nodes > 1 and size == topology.nodes * len(on_node):
        found["nic"] = [(rank + len(on_node)) % size], [(rank - len(on_node)) % size]
    return found


def links(transport: Transport, group: Group, topology: Topology, step: Step = nullcontext) -> list[LinkTrial]:
    """Time messages over all links of one kind at once, in both directions, while links of other kinds are idle.

    Times are medians of the slowest rank, by kind and size. All ranks call it. step: as for `all_to_alls`.
    """
    rank, size, device, found = transport.rank, transport.size, transport.device, list[LinkTrial]()
    of_nics = Counter(topology.nics[one] for one in topology.on_node[0])
    for kind, peers in linked(topology, rank).items():
        for length in of_device(LINK_BYTES, device):
            sends, recvs = (
                [torch.zeros(length * (one in ranks), dtype=torch.uint8, device=device) for one in range(size)]
                for ranks in peers
            )
            exchange = partial(group.all_to_all, sends, recvs)
            with step(f"messages of {length} bytes over links of kind {kind}"):
                times = [timed(group, device, exchange)[1] for _ in range(REPEATS + 1)]  # the first is not counted
                seconds = transport.reduce_values(statistics.median(times[1:]), max, "the slowest rank")
            on_fullest = length * max(of_nics.values()) if kind == "nic" else length
            found.append(LinkTrial(kind, on_fullest, 2 * max(1, len(peers[0])), seconds))
    return found


def compute(device: torch.device, ranks: int, heads: int, head_dim: int, tokens: int) -> tuple[DeviceTrial, float]:
    """Try attention, copies and matrix products on this rank's device at a run's shape, on a CPU at a smaller one.

    Return (the trial's result, the factor of time for products that add up in one order).

    Args:
        device: the rank's device.
        ranks: number of ranks that share the heads and the tokens.
        heads: heads of the model.
        head_dim: channels of a head.
        tokens: tokens of the sequence.
    """
    heads, tokens = map(min, (heads, tokens), of_device(MOST, device))
    own, rows = -(-heads // ranks), -(-tokens // ranks)
    shape, seconds = Shape((1, tokens, own, head_dim), (rows, heads * head_dim), torch.bfloat16, parts=True), [1.0, 1.0]
    with ExitStack() as as_before:
        for in_one_order in (False, True) if device.type != "cpu" else ():
            as_before.callback(set_repeatable(device, in_one_order))
            seconds.append(product_s(device))
        return try_device(LocalAttention(), shape, device, Kernels()), seconds[-1] / seconds[-2]


def synchronise(device: torch.device) -> None:
    """Wait for all work on a device. On a CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


# In a job of its own: each yields what it reports ---------------------------------------------------------------------


def report_pair(transport: Any, limit: Step, _: str) -> Iterator[Any]:
    """Try on two ranks whether a batch that both begin with a send works. Yield "met" once they are connected, then the
    list of faults.

    `answer` prints what is yielded.

    Args:
        transport: the rank's transport.
        limit: returns a context that ends the process if a step takes too long, called with the step's name.
    """
    group = transport.group(range(2), together=False)
    group.in_one_order = False
    yield "met"
    with limit("a batch that both ranks begin with a send"):
        wrong = _order_once(transport, group, None, 0)
    yield wrong


def report_op_sync(transport: Transport, limit: Step, messages: str) -> Iterator[Any]:
    """Try all-to-alls with the value of CCL_OP_SYNC that this job was started with. Yield one dict: the verdict by that
    value, their seconds, and the part of one hidden behind other work.

    `answer` prints what is yielded.

    Args:
        transport: the rank's transport.
        limit: returns a context that ends the process if a step takes too long, called with the step's name.
        messages: the setting `messages`.
    """
    with limit("all-to-alls with another CCL_OP_SYNC"):
        group = transport.group(range(transport.size), TOGETHER[messages])
        found, hidden = all_to_alls(transport, group), overlap(transport, group).hidden
    wrong = next((one.wrong[0] for one in found if one.wrong), "right")
    seconds = sum(one.seconds for one in found)
    yield {f"CCL_OP_SYNC={os.environ['CCL_OP_SYNC']}": wrong, "seconds": seconds, "hidden": hidden}
