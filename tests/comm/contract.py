"""What every transport promises, checked from inside its ranks. `contract` runs on each rank of a world of 4, which it
also divides into two parts that hold to the contract side by side.

As a program: `contract.py forked NAME...` forks 4 ranks, `contract.py launched NAME...` is one rank of an MPI job; they
check one transport after the other: NAME[@DEVICE][/2][=MESSAGES][+sums], for tensors of a device ("sim": each rank has
a simulated one), on nodes of two ranks that the transport tells apart, with a setting of messages, with checksums.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch

from cocodiff.comm.transport import Group, Transport

SIZE = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


PARTS = ((2, 0), (3, 1))  # in an order of their own, neighbours apart


def contract(transport: Transport) -> None:
    assert transport.size == SIZE and 0 <= transport.rank < SIZE
    check_transport(transport)
    part = transport.part(next(ranks for ranks in PARTS if transport.rank in ranks))
    check_transport(part)
    check_parts_go_their_own_ways(transport, part)
    if getattr(transport, "library", "") == "gloo":
        check_one_thread_looks_for_messages()
    transport.world.barrier()


def check_transport(transport: Transport) -> None:
    assert transport.run_ranks[transport.rank] in range(transport.run_size) and not transport.closed
    for group in (transport.world, transport.group(range(transport.size))):
        check_group(group)
    for check in (check_groups, check_objects, check_lanes_are_independent):
        check(transport)
    transport.world.barrier()


def check_group(group: Group) -> None:
    check_all_to_all(group)
    check_send_recv_to_some(group)
    check_what_is_sent_is_the_senders_again(group)
    check_messages_stay_in_order(group)
    check_all_gather(group)
    check_barrier(group)
    check_refusals(group)


def message(sender: int, receiver: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Content that tells who sent it to whom; exact in every dtype."""
    return (torch.arange(length) % 16 + 16 * sender + 64 * (receiver % 2)).to(dtype)


def check_all_to_all(group: Group) -> None:
    """Uneven sizes, also none at all, in every dtype; the own part is copied."""

    def length(sender: int, receiver: int) -> int:
        return 0 if (sender + receiver) % 3 == 0 else 5 * sender + receiver + 1

    me, peers = group.index, range(len(group.ranks))
    for dtype in DTYPES:
        sends = [message(me, peer, length(me, peer), dtype) for peer in peers]
        recvs = [torch.full((length(peer, me),), -1, dtype=dtype) for peer in peers]
        group.all_to_all(sends, recvs).wait()
        for peer in peers:
            assert torch.equal(recvs[peer], message(peer, me, length(peer, me), dtype)), (dtype, peer)
            assert torch.equal(sends[peer], message(me, peer, length(me, peer), dtype))
    large = [torch.full((300_000,), float(me)) for _ in peers]
    arrived = [torch.empty(300_000) for _ in peers]
    group.all_to_all(large, arrived).wait()
    assert [part.unique().tolist() for part in arrived] == [[float(peer)] for peer in peers]


def check_send_recv_to_some(group: Group) -> None:
    """A ring: everybody sends to the next peer only; and a call without messages."""
    size = len(group.ranks)
    after, before = (group.index + 1) % size, (group.index - 1) % size
    arrived = torch.zeros(7)
    group.send_recv([(message(group.index, after, 7), after)], [(arrived, before)]).wait()
    assert torch.equal(arrived, message(before, group.index, 7))
    group.send_recv([], []).wait()
    group.send_recv([(torch.empty(0), after)], [(torch.empty(0), before)]).wait()


def check_what_is_sent_is_the_senders_again(group: Group) -> None:
    """What is written into a tensor once its sending has ended reaches nobody, though the receiver comes late."""
    sent, arrived = torch.ones(5), torch.empty(5)
    if group.index == 0:
        group.send_recv([(sent, 1)], []).wait()
        sent.zero_()
    elif group.index == 1:
        time.sleep(0.1)
        group.send_recv([], [(arrived, 0)]).wait()
        assert arrived.tolist() == [1.0] * 5


def check_messages_stay_in_order(group: Group) -> None:
    """Several messages between two peers, of one call and of the next, arrive in the order in which they are listed."""
    if group.index > 1:
        return
    peer = 1 - group.index
    first = [torch.empty(n + 1) for n in range(5)]
    later = [torch.empty(3) for _ in range(3)]
    pending = group.send_recv([(torch.full((n + 1,), float(n)), peer) for n in range(5)], [(t, peer) for t in first])
    next_one = group.send_recv([(torch.full((3,), 10.0 + n), peer) for n in range(3)], [(t, peer) for t in later])
    pending.wait()
    next_one.wait()
    assert [t.unique().tolist() for t in first] == [[float(n)] for n in range(5)]
    assert [t.unique().tolist() for t in later] == [[10.0 + n] for n in range(3)]


def check_all_gather(group: Group) -> None:
    for dtype in DTYPES:
        parts = [torch.empty(peer, 2, dtype=dtype) for peer in range(len(group.ranks))]
        group.all_gather(torch.full((group.index, 2), group.index, dtype=dtype), parts).wait()
        assert [part.tolist() for part in parts] == [[[peer, peer]] * peer for peer in range(len(group.ranks))]


def total_over(group: Group, value: float) -> float:
    """The sum of all peers' values."""
    parts = [torch.empty(1) for _ in group.ranks]
    group.all_gather(torch.tensor([value]), parts).wait()
    return torch.cat(parts).sum().item()


def check_barrier(group: Group) -> None:
    """Nobody leaves a barrier before the last one came."""
    if group.index == 0:
        time.sleep(0.1)
    came = time.time()
    group.barrier()
    left = time.time()
    times = [torch.empty(2, dtype=torch.float64) for _ in group.ranks]
    group.all_gather(torch.tensor([came, left], dtype=torch.float64), times).wait()
    assert max(float(t[0]) for t in times) <= min(float(t[1]) for t in times) + 1e-3


def check_refusals(group: Group) -> None:
    """Wrong numbers of tensors and tensors that are not contiguous are refused before anything is sent."""
    good = [torch.zeros(2, 3) for _ in group.ranks]
    askew = [torch.zeros(3, 2).T for _ in group.ranks]
    expect(ValueError, "not contiguous", lambda: group.all_to_all(askew, good))
    expect(ValueError, "not contiguous", lambda: group.all_to_all(good, askew))
    expect(ValueError, "not contiguous", lambda: group.all_gather(good[0], askew))
    expect(ValueError, f"1 tensors for a group of {len(group.ranks)}", lambda: group.all_to_all(good[:1], good))


def check_groups(transport: Transport) -> None:
    """Groups of some ranks, made side by side by different members, the same one twice, and one rank by itself."""
    rank, size = transport.rank, transport.size
    parity = transport.group([r for r in range(size) if r % 2 == rank % 2])
    card = transport.group([r for r in range(size) if r // 2 == rank // 2])
    again = transport.group(card.ranks)
    assert parity.ranks == tuple(range(rank % 2, size, 2)) and parity.index == rank // 2
    assert card.index == rank % 2
    for group in (parity, card, again):
        theirs = [torch.empty(3) for _ in group.ranks]
        group.all_gather(torch.full((3,), float(rank)), theirs).wait()
        assert [part[0].item() for part in theirs] == list(group.ranks)
        group.barrier()
    alone = size - 2
    others = [r for r in range(size) if r != alone]
    apart = transport.group([alone] if rank == alone else others)
    assert total_over(apart, float(rank)) == (alone if rank == alone else sum(others))
    if rank == alone:
        mine = [torch.empty(2)]
        apart.all_to_all([torch.ones(2)], mine).wait()
        assert mine[0].tolist() == [1.0, 1.0]


def check_objects(transport: Transport) -> None:
    gathered = transport.gather_values({"rank": transport.rank, "text": "x" * transport.rank})
    if transport.rank == 0:
        assert gathered == [{"rank": rank, "text": "x" * rank} for rank in range(transport.size)]
    else:
        assert gathered is None
    word = ("from", 0, [1.5]) if transport.rank == 0 else None
    assert transport.broadcast_value(word) == ("from", 0, [1.5])


def check_parts_go_their_own_ways(whole: Transport, part: Transport) -> None:
    """One part makes more calls than the other; they, and the whole, have their messages to themselves."""
    in_first = part.run_ranks == PARTS[0]
    for number in range(5 if in_first else 2):
        assert part.gather_values((part.rank, number)) == (None if part.rank else [(0, number), (1, number)])
        assert part.broadcast_value((part.run_ranks, number)) == (part.run_ranks, number)
        own = float(part.run_ranks[part.rank])
        assert part.control.submit(lambda own=own: total_over(part.world, own)).wait() == sum(part.run_ranks)
    check_objects(whole)
    part.close()
    of_part = part.part([part.rank])
    assert (of_part.run_ranks, of_part.run_size) == ((part.run_ranks[part.rank],), whole.run_size)
    assert part.closed and of_part.closed and not whole.closed
    assert whole.broadcast_value(whole.rank) == 0


def check_one_thread_looks_for_messages() -> None:
    """gloo's threads poll, so many groups have one between them."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert names.count("gloo_tcp_loop") == 1, names


def check_lanes_are_independent(transport: Transport) -> None:
    """Two lanes with a group each may be served in a different order on different ranks."""
    lanes = [transport.lane("one"), transport.lane("two")]
    assert transport.lane("one") is lanes[0]
    groups = [transport.group(range(transport.size)), transport.group(range(transport.size))]

    order, total = ((0, 1) if transport.rank % 2 else (1, 0)), sum(range(transport.size))
    pending = {
        which: lanes[which].submit(lambda w=which: total_over(groups[w], float(transport.rank + 10 * w)))
        for which in order
    }
    assert [pending[which].wait() for which in (0, 1)] == [total, total + 10 * transport.size]


def expect(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"no {kind.__name__} with {text!r}")


def tell_nodes_apart(node_of: list[int]) -> None:
    """Has transports of torch.distributed find these nodes, and groups with ranks of several of them refuse messages
    between two ranks of one."""
    from cocodiff.comm.torch_dist import TorchDistGroup, TorchDistTransport

    def refusing(group: Any, post: Callable[..., Any], sends: Any, recvs: Any) -> Any:
        nodes, own = [node_of[rank] for rank in group.ranks], node_of[group.ranks[group.index]]
        kept = [peer for _, peer in (*sends, *recvs) if nodes[peer] == own]
        assert len({*nodes}) == 1 or not kept, f"a message to or from {kept} of ranks {group.ranks}"
        return post(group, sends, recvs)

    if node_of:
        TorchDistTransport.node_of = node_of
        for name in ("send_recv", "collective"):
            setattr(TorchDistGroup, name, partialmethod(refusing, getattr(TorchDistGroup, name)))


def main() -> int:
    if not any(name.endswith("@sim") for name in sys.argv):
        return check_all()
    from simulated_device.command import on_a_device

    return on_a_device(check_all)


def check_all() -> int:
    from cocodiff.comm.launch import Launch, detect
    from cocodiff.config.config import Config
    from cocodiff.jobs.ranks import run_ranks

    how, *names = sys.argv[1:]

    def on_its_device(transport: Transport) -> None:
        with torch.device(transport.device):
            contract(transport)

    for name in names:
        name, _, sums = name.partition("+")
        name, _, messages = name.partition("=")
        name, _, of_node = name.partition("/")
        tell_nodes_apart([rank // int(of_node) for rank in range(SIZE)] if of_node else [])
        name, _, device = name.partition("@")
        device = "auto" if device == "sim" else device or "cpu"
        settings = {"messages": messages or "batch", "check_messages": bool(sums), "device": device}
        config = Config(transport=name, timeout_s=60.0, **settings)
        if how == "launched":
            code = run_ranks(None, detect(), config, {}, on_its_device)
        else:
            code = run_ranks(SIZE, Launch(), config, {}, contract)
        if code:
            return code
    print("contract holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
