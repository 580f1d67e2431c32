"""The interface to a communication library: ranks, groups of ranks, asynchronous messages, and the lanes of a run.

Every group call returns at once with a `Pending`. On accelerators its `wait` orders streams and does not block the
host.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from cocodiff.comm.health import Health
from cocodiff.comm.lane import Lane, StreamMark
from cocodiff.comm.objects import as_bytes, as_value
from cocodiff.comm.trace import Trace
from cocodiff.config.errors import UserError
from cocodiff.config.registry import imported
from cocodiff.kernels import Kernels
from cocodiff.kernels.device import used_on_current_stream
from cocodiff.topology import Topology

T = TypeVar("T")
Messages = list[tuple[Tensor, int]]  # tensors, each with the peer that it goes to or comes from
TOGETHER = {"auto": None, "batch": False, "alltoall": True}  # values for `Transport.group` by setting `messages`


class Pending(Protocol):
    """The messages of one group call, for instance of `Group.send_recv`, that are on their way."""

    def wait(self) -> None:
        """Wait until the messages have arrived.

        On accelerators the caller's stream waits, and the messages' tensors count as used by it.
        """


class PostedMessages:
    """The messages of one call in flight, as the functions by which a library waits for them.

    The first `wait` calls these, and later ones do nothing.
    """

    def __init__(self, *waits: Callable[[], object]) -> None:
        """Hold the functions, with the tensors that they keep alive, until the messages have arrived.

        Args:
            waits: functions without arguments, in the order in which they are called.
        """
        self._waits = waits

    def wait(self) -> None:
        for one in self._waits:
            one()
        self._waits = ()


class LandingMessages:
    """The messages of one call in flight that are put in place, such as copied to a device, once they have arrived.

    The first `wait` does that, on its stream. Every `wait` makes its stream wait for it.
    """

    def __init__(self, device: torch.device, received: list[Tensor], land: Callable[[], object]) -> None:
        """Hold messages.

        Args:
            device: the device of the tensors.
            received: the tensors that receive.
            land: waits for the messages and starts to put them in place, on the current stream.
        """
        self._device, self._on_device, self._land, self._lock = device, received, land, threading.Lock()
        self._landed: StreamMark | None = None

    def wait(self) -> None:
        with self._lock:
            landed = self._landed
            if landed is None:
                self._land()
                self._landed = StreamMark(self._device)
                del self._land  # which may hold buffers
        if landed is not None:
            landed.wait()
        used_on_current_stream(self._on_device)


class Group(ABC):
    """A set of ranks with a communication context of its own. Calls name another rank, a peer, by its index in `ranks`.

    Tensors are contiguous, and the caller leaves them untouched until the returned `Pending.wait`. Sizes may be uneven;
    a message of size 0 is posted by neither side. Receives are posted before sends (on accelerators in the order that
    the backend needs).
    """

    ranks: tuple[int, ...]  # numbers of the members, in the order of their indices
    index: int  # index of this rank in `ranks`
    # True if a receive may be posted in an earlier call than its peer's send, or in a call without sends. Otherwise
    # both sides list a message in calls of the same number.
    receives_ahead = True
    at_once = False  # True if `collective` is one all-to-all of the library, which every rank of the group has to call
    device = torch.device("cpu")  # device of messages that the group makes itself

    @abstractmethod
    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        """Start sending and receiving tensors, and return what to wait for.

        Both arguments are lists of (tensor, index of the peer). Two peers list the messages between them in the same
        order.
        """

    def collective(self, sends: Messages, recvs: Messages) -> Pending:
        """Start sending and receiving like `send_recv`, in a call that every rank of the group makes."""
        return self.send_recv(sends, recvs)

    def together(self) -> Group:
        """Return a group of the same ranks whose `collective` is one all-to-all of the communication library.

        Other groups send a message to each peer. Raise UserError if the library has no all-to-all.
        """
        raise UserError("messages alltoall: these ranks have no all-to-all of a library: use --transport gloo or xccl")

    def all_to_all(self, sends: list[Tensor], recvs: list[Tensor]) -> Pending:
        """Start an all-to-all: send sends[p] to every peer p, and receive recvs[p] from it. Return what to wait for.

        Both lists have a tensor for each rank of the group. This rank's own tensor is copied at once.
        """
        check_counts(len(self.ranks), sends, recvs)
        recvs[self.index].copy_(sends[self.index])
        others = [peer for peer in range(len(self.ranks)) if peer != self.index]
        return self.collective([(sends[p], p) for p in others], [(recvs[p], p) for p in others])

    def all_gather(self, send: Tensor, recvs: list[Tensor]) -> Pending:
        """Start sending one tensor to all peers, and receiving peer p's tensor in recvs[p]. Return what to wait for.

        Sizes may differ between peers.
        """
        return self.all_to_all([send] * len(self.ranks), recvs)

    def barrier(self) -> None:
        """Block until every rank of the group has called this."""
        parts = list(torch.empty(len(self.ranks), 1, device=self.device))
        self.all_gather(torch.zeros(1, device=self.device), parts).wait()
        torch.cat(parts).tolist()  # on accelerators `wait` has only ordered streams


class Transport(ABC):
    """A set of ranks that can communicate: those of a run, or some of them. Each rank has an object of its own.

    Errors and `health` name ranks by their numbers in the whole run.
    """

    rank: int  # number of this process among these ranks, from 0
    size: int  # number of these ranks
    # A lane is a background thread that runs jobs in order. No job of `control` waits for another lane.
    control: Lane  # runs what all ranks do together in program order: set-up, selections, gathers of outputs
    world: Group  # group of all these ranks, for jobs of the control lane
    device: torch.device  # device of the messages' tensors
    health: Health  # the watch over lost ranks
    _closed = False

    @abstractmethod
    def group(self, ranks: Sequence[int], together: bool | None = None) -> Group:
        """Make a group that includes this rank. Whenever one rank makes a group, every rank has to make one, if only of
        itself.

        torch.distributed distinguishes groups by their members and by the number of groups that a rank has made before.

        Args:
            ranks: its members.
            together: True if the group's `collective` is one all-to-all of the library, False if it sends each message
                by itself; by default as the library requires.
        """

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """Return the background thread with this name, which runs jobs in order. It is started at the first call."""

    @property
    @abstractmethod
    def host_world(self) -> Group:
        """A group of all these ranks whose messages are in host memory, for values and set-up.

        Such messages may go one way only, which a device's library need not support (oneCCL 2021.17).
        """

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @cached_property
    def run_ranks(self) -> tuple[int, ...]:
        """The numbers of these ranks in the whole run."""
        return tuple(range(self.size))

    @cached_property
    def run_size(self) -> int:
        """The number of ranks in the whole run."""
        return self.size

    def part(self, ranks: Sequence[int]) -> SubTransport:
        """Return a transport of some of these ranks, among them this one, which share the threads of the whole.

        Args:
            ranks: its ranks by their numbers here, in the order of their new ones.
        """
        return SubTransport(self, ranks)

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        """Tell the watch over lost ranks that this rank begins a call that all ranks of this transport make.

        A rank that never makes it is reported as lost, if others wait for it.

        Args:
            at: name of the call.
            among: the ranks that make it, by numbers in the whole run, if not all do; () for all.
        """
        self.health.arrive(at, among if len(among) < self.size else ())

    def blocking(self, job: Callable[[], T], at: str = "set-up", among: tuple[int, ...] = ()) -> T:
        """Run a job that communicates on the control lane, a background thread, and wait for its result.

        All ranks call this, or all of `among`. A lost peer ends the wait with PeerLost. The result must not have
        tensors of a device.

        Args:
            job: function without arguments.
            at: name of the call, for the watch over lost ranks.
            among: the ranks that call this, by numbers in the whole run; () for all.
        """
        self.arrive(at, among)
        found: list[T] = []
        self.control.submit(lambda: found.append(job())).wait()
        return found[0]

    def gather_values(self, value: Any, at: str = "gather_values") -> list[Any] | None:
        """Return the list of all ranks' values on rank 0, and None on the other ranks. All ranks call this.

        It blocks, and is for set-up and results.

        Args:
            value: this rank's plain data, see `objects.as_bytes`.
            at: name of the call, which errors report if other ranks make another call.
        """
        return self.blocking(lambda: gather_values(self.host_world, value), at)

    def broadcast_value(self, value: Any, at: str = "broadcast_value") -> Any:
        """Return rank 0's value on every rank. All ranks call this; the values of the others are not used.

        Args:
            value: plain data, see `objects.as_bytes`.
            at: name of the call, which errors report if other ranks make another call.
        """
        return self.blocking(lambda: broadcast_value(self.host_world, value), at)

    def reduce_values(self, value: Any, merge: Callable[[list[Any]], T], at: str) -> T:
        """Merge all ranks' values on rank 0, and return the result on every rank. All ranks call this.

        Args:
            value: this rank's plain data, see `objects.as_bytes`.
            merge: makes the result of the list of all values, in the order of ranks. It runs on rank 0 alone.
            at: name of the call, which errors report if other ranks make another call.
        """
        of_ranks = self.gather_values(value, at)
        return self.broadcast_value(None if of_ranks is None else merge(of_ranks), at)

    def all_gather_values(self, value: Any, at: str = "all_gather_values") -> list[Any]:
        """Return the list of all ranks' values, in the order of ranks, on every rank. All ranks call this.

        Args:
            value: this rank's plain data, see `objects.as_bytes`.
            at: name of the call, which errors report if other ranks make another call.
        """
        return self.reduce_values(value, list, at)

    @abstractmethod
    def close(self) -> None:
        """Leave the run without an error. A second call does nothing."""


class LaneOwner(Transport):
    """A transport of all ranks of a run, which makes and closes their lanes.

    Lanes are background threads that run jobs in order and post the messages.
    """

    library = "none"  # name of the library that carries messages
    drawback = ""  # what is wrong with the transport that was asked for; "" if nothing is
    around: Callable[[Group], Group] | None = None  # wraps every new group, for instance to add checksums
    # True if one thread runs the jobs of all lanes, in the order in which they are submitted. A device's library may
    # take one group of messages of a process at a time and block the host until the peers have posted theirs (oneCCL,
    # src/coll/group). If ranks had different orders, they would wait for each other in a circle. Lanes then overlap
    # by their streams.
    one_thread = False
    # True if the library begins a message of a batch only when the one before it has ended on both ranks.
    one_by_one = False
    node_of: Sequence[Any] = ()  # the node of each rank, if messages within a node need groups of their own
    # It carries values and, with transport `host`, all tensors too, by way of host memory.
    carrier: LaneOwner | None = None  # the CPU transport beside a device's; None for a transport of CPU tensors

    def __init__(self, device: torch.device, health: Health) -> None:
        self.device, self.health = device, health
        self._lanes: dict[str, Lane] = {}
        self.control = self.lane("control")

    @property
    def host_world(self) -> Group:
        return self.world if self.carrier is None else self.carrier.world

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            worker = next(iter(self._lanes.values())).worker if self.one_thread and self._lanes else None
            self._lanes[name] = Lane(name, self.device, self.health, worker)
        return self._lanes[name]

    def group(self, ranks: Sequence[int], together: bool | None = None) -> Group:
        group = self._by_node(tuple(ranks))
        if self.one_by_one if together is None else together:
            group = group.together()
        return group if self.around is None else self.around(group)

    def _by_node(self, ranks: tuple[int, ...], whole: Group | None = None) -> Group:
        """Return a group of some ranks. If the library needs it, messages within a node get a group of their own.

        See `group_by_node`.

        Args:
            whole: an existing group of these ranks, to use instead of a new one.
        """
        if len(set(self.node_of)) < 2:
            return whole or self.new_group(ranks)
        make: Callable[..., Group] = imported("cocodiff.comm.groups:group_by_node")  # which few runs need
        return make(self.new_group, ranks, self.rank, self.node_of, whole)

    def close(self) -> None:
        if self.closed:
            return
        self._closed = True
        self.health.close()
        for lane in self._lanes.values():
            lane.close()
        if self.carrier is not None:
            self.carrier.close()
        self._release()

    @abstractmethod
    def new_group(self, ranks: tuple[int, ...]) -> Group:
        """Make a group of some ranks in the communication library; for `group`, which all else calls.

        Args:
            ranks: its members.
        """

    def _release(self) -> None:
        """Release what the communication library holds, such as its groups. `close` calls this last."""
        return


class PartGroup(Group):
    """A view of a group of ranks: the same ranks or some of them, with other numbers and in another order."""

    def __init__(self, group: Group, ranks: tuple[int, ...], members: Sequence[int], device: torch.device) -> None:
        """Wrap a group, whose communicator is used.

        Args:
            group: the group.
            ranks: the new numbers of the view's members.
            members: for each of `ranks`, its index in `group`.
            device: device of the messages.
        """
        self._group, self._members, self.ranks, self.device = group, tuple(members), ranks, device
        self.index, self.receives_ahead = self._members.index(group.index), group.receives_ahead
        self.at_once = group.at_once and len(ranks) == len(group.ranks)

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        return self._group.send_recv(*([(x, self._members[peer]) for x, peer in some] for some in (sends, recvs)))

    def collective(self, sends: Messages, recvs: Messages) -> Pending:
        post = self._group.collective if len(self.ranks) == len(self._group.ranks) else self._group.send_recv
        return post(*([(x, self._members[peer]) for x, peer in some] for some in (sends, recvs)))

    def barrier(self) -> None:
        if len(self.ranks) == len(self._group.ranks):
            self._group.barrier()
        else:
            super().barrier()


class SubTransport(Transport):
    """A part of a transport's ranks as a transport of its own, in a given order; this rank is one of them.

    It shares the background threads and the world group of the whole. So a part needs no threads and no communicators
    until it makes groups. The ranks of a part make the same groups, the same number of times and in the same order (see
    `Transport.group`). Parts are independent of each other. Closing a part leaves the whole open.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size, self.control = self._ranks.index(whole.rank), len(self._ranks), whole.control
        self.run_ranks, self.run_size = tuple(whole.run_ranks[rank] for rank in self._ranks), whole.run_size
        self.device = whole.device
        self.health = whole.health  # any lost rank of the run ends the part too, and is named by its number in the run
        everyone = tuple(range(self.size))
        self.world = PartGroup(whole.world, everyone, self._ranks, self.device)
        self._host_world = PartGroup(whole.host_world, everyone, self._ranks, torch.device("cpu"))

    @property
    def host_world(self) -> Group:
        return self._host_world

    @property
    def closed(self) -> bool:
        return self._closed or self._whole.closed

    def group(self, ranks: Sequence[int], together: bool | None = None) -> PartGroup:
        members = [self._ranks[rank] for rank in ranks]
        ascending = sorted(members)  # as libraries keep them
        indices = [ascending.index(rank) for rank in members]
        return PartGroup(self._whole.group(ascending, together), tuple(ranks), indices, self.device)

    def lane(self, name: str) -> Lane:
        return self._whole.lane(name)

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        self.health.arrive(at, among or self.run_ranks)

    def close(self) -> None:
        self._closed = True


@dataclass(eq=False)
class RankContext:
    """The surroundings of one rank: its connections, its place on the machine, its record and its kernels.

    They concern the ranks that it computes with, which may be some of the run's.
    """

    transport: Transport  # connections between these ranks
    topology: Topology  # the places of these ranks on the machine
    trace: Trace  # the record that counts the bytes that this rank sends
    kernels: Kernels  # the operations that this rank computes with

    @property
    def rank(self) -> int:
        """The number of this rank among the ranks that it computes with."""
        return self.transport.rank

    def count(self, peer: int, sent_bytes: int, whole_bytes: int = 0) -> None:
        """Record the size of a message to a peer in this rank's trace, by the kind of link to the peer.

        Args:
            peer: number of the rank that it is sent to.
            sent_bytes: bytes of the message.
            whole_bytes: bytes that the message would have without encoding.
        """
        link = self.topology.link_class(self.rank, peer)
        self.trace.count(link, sent_bytes)
        self.trace.count(link, whole_bytes, purpose="whole")


def check_counts(peers: int, *lists: list[Tensor]) -> None:
    """Raise ValueError unless each list has one contiguous tensor for each peer."""
    for tensors in lists:
        if len(tensors) != peers:
            raise ValueError(f"{len(tensors)} tensors for a group of {peers} ranks: give one for each")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pack it first")


def pass_values(group: Group, sent: Messages, sources: Iterable[int]) -> dict[int, Tensor]:
    """Send bytes to some peers and receive bytes of unknown sizes from others. Return those received, by peer.

    Sizes are sent first. This blocks; it is for jobs of a background thread (`Lane`).

    Args:
        group: a group for messages in host memory.
        sent: uint8 tensors, each with the peer that it goes to.
        sources: peers to receive from.
    """
    lengths = [(torch.tensor([len(content)], device="cpu"), peer) for content, peer in sent]
    expected = [(torch.empty(1, dtype=torch.int64, device="cpu"), peer) for peer in sources]
    group.send_recv(lengths, expected).wait()
    found = [(torch.empty(int(length), dtype=torch.uint8, device="cpu"), peer) for length, peer in expected]
    group.send_recv(sent, found).wait()
    return {peer: content for content, peer in found}


def gather_values(group: Group, value: Any) -> list[Any] | None:
    """Gather a value from every rank of a group. Return them on its first rank, in the group's order; None on others.

    This blocks; it is for jobs of a background thread (`Lane`).

    Args:
        group: a group for messages in host memory.
        value: plain data, of the types that `as_bytes` takes.
    """
    if group.index:
        pass_values(group, [(as_bytes(value), 0)], ())
        return None
    received = pass_values(group, [], range(1, len(group.ranks)))
    return [value, *(as_value(received[peer]) for peer in range(1, len(group.ranks)))]


def broadcast_value(group: Group, value: Any) -> Any:
    """Return the value of a group's first rank on all its ranks. It is sent along a binomial tree.

    This blocks; it is for jobs of a background thread (`Lane`).

    Args:
        group: a group for messages in host memory.
        value: plain data, of the types that `as_bytes` takes; used on the first rank alone.
    """
    own, size, bit = group.index, len(group.ranks), 1
    if size == 1:
        return value
    while bit < size and not own & bit:
        bit *= 2
    # `bit` is the lowest set bit of this rank's number. The rank without that bit sends to this one.
    content = as_bytes(value) if own == 0 else pass_values(group, [], (own - bit,))[own - bit]
    while bit := bit // 2:
        if own + bit < size:
            pass_values(group, [(content, own + bit)], ())
    return value if own == 0 else as_value(content)


def not_empty(messages: Messages) -> Messages:
    """Return the messages whose tensors have elements. Only these are posted."""
    return [(tensor, peer) for tensor, peer in messages if tensor.numel()]
