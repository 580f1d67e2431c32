"""The interface to a communication library: ranks, some of them, groups, lanes, asynchronous messages.

Every group call returns at once with a `Pending`; on accelerators its `wait` orders streams and does not block the
host. A *lane* is an ordered background worker: packing and communication are submitted to it as one job, so both stay
off the critical path. All ranks submit to a lane in program order, which is all the agreement they need. Where the
library of a device wants one order of all messages of a process, all lanes share a thread (`LaneOwner.one_thread`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from cocodiff.comm.health import Health
from cocodiff.comm.objects import as_bytes, as_value
from cocodiff.config.errors import UserError
from cocodiff.config.registry import imported
from cocodiff.kernels.device import HandedOver, OwnStream

T = TypeVar("T")
Messages = list[tuple[Tensor, int]]  # with the peer that each goes to or comes from
TOGETHER = {"auto": None, "batch": False, "alltoall": True}  # by the setting `messages`, see `Transport.group`
CHECK_S = 0.25  # how often a blocked wait asks whether a peer was lost


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """On accelerators the caller's stream waits, and counts as one that uses the messages' tensors."""


class Group(ABC):
    """Some of the ranks, in a communication context of their own. Peers are named by their index in `ranks`.

    Tensors are contiguous and stay untouched by the caller until `wait`. Sizes may be uneven; a size of 0 is posted by
    neither side. Receives are posted before sends (on accelerators in the order that the backend needs).

    receives_ahead: a receive may be posted in an earlier call than its peer's send, or in a call without sends. Where
    not, both sides list a message in calls of the same number. at_once: `collective` is one all-to-all of the library,
    which every rank of the group has to call. device: of messages that a group makes by itself.
    """

    ranks: tuple[int, ...]
    index: int
    receives_ahead = True
    at_once = False
    device = torch.device("cpu")

    @abstractmethod
    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        """(tensor, peer) pairs; both sides list the messages between two peers in the same order."""

    def collective(self, sends: Messages, recvs: Messages) -> Pending:
        """The same, in a call that every rank of the group makes: for libraries that have a collective of their own."""
        return self.send_recv(sends, recvs)

    def together(self) -> Group:
        """These ranks, with collective calls that are one all-to-all of the library; a UserError where it has none."""
        raise UserError("messages alltoall: these ranks have no all-to-all of a library: use --transport gloo or xccl")

    def all_to_all(self, sends: list[Tensor], recvs: list[Tensor]) -> Pending:
        """sends[p] goes to peer p, recvs[p] comes from peer p; the own one is copied. All peers are served at once."""
        check_counts(len(self.ranks), sends, recvs)
        recvs[self.index].copy_(sends[self.index])
        others = [peer for peer in range(len(self.ranks)) if peer != self.index]
        return self.collective([(sends[p], p) for p in others], [(recvs[p], p) for p in others])

    def all_gather(self, send: Tensor, recvs: list[Tensor]) -> Pending:
        """recvs[p] receives peer p's tensor; sizes may differ between peers."""
        return self.all_to_all([send] * len(self.ranks), recvs)

    def barrier(self) -> None:
        """Returns when every rank of the group has come to it."""
        parts = list(torch.empty(len(self.ranks), 1, device=self.device))
        self.all_gather(torch.zeros(1, device=self.device), parts).wait()
        torch.cat(parts).tolist()  # on accelerators the wait has ordered streams only


class Transport(ABC):
    """Ranks that can talk: those of a run, or some of them. One object per rank.

    control: the lane of what all ranks do now and then, in program order: set-up, selections, the gather of outputs.
    One of its jobs waits for no other lane. world: a group of all these ranks, for jobs of the control lane.
    run_ranks, run_size: the numbers of these ranks in the whole run, and how many ranks that has. They differ from
    `rank` and `size` for a part of a run. Errors and `health` name ranks by their numbers in the whole run."""

    rank: int
    size: int
    control: Lane
    world: Group
    device: torch.device
    health: Health
    _closed = False

    @abstractmethod
    def group(self, ranks: Sequence[int], together: bool | None = None) -> Group:
        """A group that this rank is in. Every rank makes one when any rank does, be it of itself alone:
        torch.distributed tells groups apart by their members and by how many groups a rank has made before. together:
        its `at_once`; by default as `LaneOwner.one_by_one` says."""

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """The lane of this name, which is made when it is first asked for."""

    @property
    @abstractmethod
    def host_world(self) -> Group:
        """A group of all these ranks whose messages lie in host memory: for values and set-up. A device's library need
        not bear messages that go one way alone, as those do (oneCCL 2021.17)."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def run_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def run_size(self) -> int:
        return self.size

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        """`Health.arrive`, for a call that all ranks of this transport make, or all of `among`."""
        self.health.arrive(at, among if len(among) < self.size else ())

    def blocking(self, job: Callable[[], T], at: str = "set-up", among: tuple[int, ...] = ()) -> T:
        """Runs `job`, which all ranks call, or all of `among`, on the control lane, so that a lost peer ends the wait
        for it. Returns its result: no tensors of a device. at: its name."""
        self.arrive(at, among)
        found: list[T] = []
        self.control.submit(lambda: found.append(job())).wait()
        return found[0]

    def gather_object(self, value: Any, at: str = "gather_object") -> list[Any] | None:
        """Return all ranks' values, see `objects.as_bytes`, on rank 0; None elsewhere. Blocks; for set-up and results.
        at: its name, by which ranks that call something else are told."""
        return self.blocking(lambda: gather_values(self.host_world, value), at)

    def broadcast_object(self, value: Any, at: str = "broadcast_object") -> Any:
        """Return rank 0's value; see `gather_object`."""
        return self.blocking(lambda: broadcast_value(self.host_world, value), at)

    def over_all(self, value: Any, merge: Callable[[list[Any]], T], at: str) -> T:
        """Return what rank 0 makes of all ranks' values, on every rank; see `gather_object`."""
        of_ranks = self.gather_object(value, at)
        found: T = self.broadcast_object(None if of_ranks is None else merge(of_ranks), at)
        return found

    def values_of_all(self, value: Any, at: str = "values_of_all") -> list[Any]:
        """Return all ranks' values on every rank; see `gather_object`."""
        return self.over_all(value, list, at)

    @abstractmethod
    def close(self) -> None:
        """Leaves the run in good order. A second call does nothing."""


class LaneOwner(Transport):
    """Owns the lanes of all ranks of a run, by their names."""

    library = "none"  # what carries messages, in words
    drawback = ""  # what is wrong with the transport that was asked for, in words
    around: Callable[[Group], Group] | None = None  # what every group that is made is put into
    # Whether one thread runs the jobs of all lanes, in the order in which they are submitted. A device's library may
    # take one group of messages of a process at a time and block the host until the peers have come to it (oneCCL,
    # src/coll/group): in another order than theirs ranks would wait for each other in a circle. Lanes overlap by their
    # streams then.
    one_thread = False
    # Whether the library begins a message of a batch only when the one before it has ended on both ranks.
    one_by_one = False
    node_of: Sequence[Any] = ()  # the node of each rank, where a node's own messages need groups of their own
    carrier: LaneOwner | None = None  # of a device's transport: what carries values, and with `host` all messages

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
        """See `group_by_node`. whole: one of all these ranks that is there already."""
        if len(set(self.node_of)) < 2:
            return whole or self._new_group(ranks)
        make: Callable[..., Group] = imported("cocodiff.comm.groups:group_by_node")  # which few runs need
        return make(self._new_group, ranks, self.rank, self.node_of, whole)

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
    def _new_group(self, ranks: tuple[int, ...]) -> Group: ...

    def _release(self) -> None:
        """Gives back what the communication library holds."""
        return


class PartGroup(Group):
    """Members of a group under the part's numbers, in the part's order: all of the group or some of it."""

    def __init__(self, group: Group, ranks: tuple[int, ...], members: Sequence[int], device: torch.device) -> None:
        """members: the index in `group` of each of `ranks`."""
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


class Part(Transport):
    """The ranks `ranks` of a transport, in that order, this one among them. Lanes, control lane and world group are the
    whole's, so a part costs no threads and no communicators until it makes groups. The ranks of a part make its groups
    alike, as often and in the same order (see `Transport.group`). What one part does is independent of the others.
    Closing a part leaves the whole open."""

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size, self.control = self._ranks.index(whole.rank), len(self._ranks), whole.control
        self.device = whole.device
        self.health = whole.health  # a rank lost anywhere ends the part too, and is named by its number in the run
        everyone = tuple(range(self.size))
        self.world = PartGroup(whole.world, everyone, self._ranks, self.device)
        self._host_world = PartGroup(whole.host_world, everyone, self._ranks, torch.device("cpu"))

    @property
    def host_world(self) -> Group:
        return self._host_world

    @property
    def closed(self) -> bool:
        return self._closed or self._whole.closed

    @property
    def run_ranks(self) -> tuple[int, ...]:
        of_whole = self._whole.run_ranks
        return tuple(of_whole[rank] for rank in self._ranks)

    @property
    def run_size(self) -> int:
        return self._whole.run_size

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


def check_counts(peers: int, *lists: list[Tensor]) -> None:
    """One tensor for each peer, all contiguous."""
    for tensors in lists:
        if len(tensors) != peers:
            raise ValueError(f"{len(tensors)} tensors for a group of {peers} ranks: give one for each")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pack it first")


def pass_values(group: Group, sent: Mapping[int, Tensor], sources: Iterable[int]) -> dict[int, Tensor]:
    """Sends each peer of `sent` its bytes, and returns those of `sources`: first their sizes, then they themselves.
    group: over host memory. Blocks; for a job of a lane."""
    lengths = {peer: torch.tensor([len(content)], device="cpu") for peer, content in sent.items()}
    expected = {peer: torch.empty(1, dtype=torch.int64, device="cpu") for peer in sources}
    group.send_recv(_by_peer(lengths), _by_peer(expected)).wait()
    found = {peer: torch.empty(int(length), dtype=torch.uint8, device="cpu") for peer, length in expected.items()}
    group.send_recv(_by_peer(sent), _by_peer(found)).wait()
    return found


def gather_values(group: Group, value: Any) -> list[Any] | None:
    """The values of all ranks of a group on its first one, None elsewhere."""
    if group.index:
        pass_values(group, {0: as_bytes(value)}, ())
        return None
    received = pass_values(group, {}, range(1, len(group.ranks)))
    return [value, *(as_value(received[peer]) for peer in range(1, len(group.ranks)))]


def broadcast_value(group: Group, value: Any) -> Any:
    """The value of a group's first rank, along a binomial tree."""
    own, size, bit = group.index, len(group.ranks), 1
    if size == 1:
        return value
    while bit < size and not own & bit:
        bit *= 2
    # `bit` is the lowest one that is set in this rank's number: the rank without it sends, those below it receive.
    content = as_bytes(value) if own == 0 else pass_values(group, {}, (own - bit,))[own - bit]
    while bit := bit // 2:
        if own + bit < size:
            pass_values(group, {own + bit: content}, ())
    return value if own == 0 else as_value(content)


def _by_peer(tensors: Mapping[int, Tensor]) -> Messages:
    return [(tensor, peer) for peer, tensor in tensors.items()]


def not_empty(messages: Messages) -> Messages:
    """Those that are posted."""
    return [(tensor, peer) for tensor, peer in messages if tensor.numel()]


class LaneFuture(Generic[T]):
    """The result of a job on a lane. `wait` raises what the job raised, or PeerLost."""

    def __init__(self, future: Future[HandedOver[T]], health: Health) -> None:
        self._future, self._health = future, health

    def wait(self) -> T:
        while True:
            try:
                handed = self._future.result(timeout=CHECK_S)
            except FutureTimeout as late:
                # Done by now does not say whose this is: the job may have ended just after this wait gave up.
                if self._future.done() and self._future.exception() is late:
                    raise
                self._health.still_waiting()
            except Exception:
                with self._health.blaming():
                    raise
            else:
                return handed.take()


class Worker:
    """A thread that runs jobs one after the other. Daemonic: it never keeps a rank alive."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends the thread
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """After all earlier jobs; at once where one of them asks, since its order among others' is that job's."""
        if threading.current_thread() is self._thread:
            job()
        else:
            self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it was given is free while the thread waits


class Lane:
    """An ordered background worker, on accelerators with a stream of its own. Tensors pass between the caller's stream
    and the lane's as a job's arguments and its result alone, for `used_on_current_stream` to find them there."""

    def __init__(self, name: str, device: torch.device, health: Health, worker: Worker | None = None) -> None:
        """worker: what runs its jobs, by default one of its own."""
        self.name, self.worker = name, worker or Worker(name)
        self._device, self._health, self._stream = device, health, OwnStream(device)
        self._open = True

    def submit(self, work: Callable[..., T], *given: Any) -> LaneFuture[T]:
        """Runs `work(*given)` after all earlier jobs of this lane, and after what the caller's stream holds now."""
        if not self._open:
            raise RuntimeError(f"lane {self.name} is closed, and its transport with it: nobody would run this job")
        future: Future[Any] = Future()
        inference = torch.is_inference_mode_enabled()  # a mode of each thread
        handed = HandedOver(given, self._device)
        self.worker.run(partial(copy_context().run, self._run, work, handed, future, inference))
        return LaneFuture(future, self._health)

    def close(self) -> None:
        self._open = False
        self.worker.close()

    def _run(
        self, work: Callable[..., T], given: HandedOver[Any], future: Future[HandedOver[T]], inference: bool
    ) -> None:
        try:
            # Tensors made in inference mode are changed in place in that mode alone, on whichever thread. Leaving that
            # mode turns gradients on, so they are turned off inside.
            with self._stream.current(), torch.inference_mode(inference), torch.no_grad():
                future.set_result(HandedOver(work(*given.take()), self._device))
        except BaseException as error:
            future.set_exception(error)
