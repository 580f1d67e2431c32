"""A transport over torch.distributed: gloo on CPU, xccl (older versions: ccl) on Intel GPUs, nccl on NVIDIA GPUs."""

from __future__ import annotations

import datetime
import socket
from collections import defaultdict
from copy import copy
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cocodiff.comm.health import Health, call_tag
from cocodiff.comm.launch import BACKENDS
from cocodiff.comm.transport import Group, LandingMessages, LaneOwner, Messages, Pending, PostedMessages, not_empty
from cocodiff.config.errors import UserError
from cocodiff.kernels.device import used_on_current_stream

CCL_BINDINGS = "oneccl_bindings_for_pytorch"  # registers "ccl"
# The library's own timeout. The watch can tell a busy peer from a lost one, so this is long.
NEVER = datetime.timedelta(days=7)
# Releases of PyTorch whose xccl makes a oneCCL group for each message of a batch (torch-xpu-ops, release/2.10,
# ProcessGroupXCCL.cpp:990; fixed in 2.11 by 2688). At a group's end the host waits for the message's other rank.
ONE_BY_ONE = ("2.10",)
_users: list[TorchDistTransport] = []  # transports over the default process group, if one of them started it


def new_group(ranks: tuple[int, ...], backend: str | None = None) -> Any:
    """Make a process group of torch.distributed. Only its members call this.

    Args:
        backend: its library; by default the default group's.
    """
    return dist.new_group(list(ranks), timeout=NEVER, backend=backend, use_local_synchronization=True)


def gloo_group(ranks: tuple[int, ...], rank: int) -> Any:
    """Make a gloo process group that shares the default group's network devices; or has its own, if these are not
    accessible. Only its members call this.

    Each gloo device has a thread that looks for messages a hundred times a second, and torch.distributed makes a device
    for each group. When 12 ranks on two cores had made the groups of 30 engines, these threads took half of both cores.

    Args:
        ranks: the members.
        rank: this rank, one of them.
    """
    if dist.get_backend() != "gloo":
        return new_group(ranks, "gloo")
    gloo: Any = dist.ProcessGroupGloo
    world: Any = dist.group.WORLD
    shared: Any = getattr(world._get_backend(torch.device("cpu")), "options", None)
    if not getattr(shared, "_devices", None):
        return new_group(ranks)
    name, whole = f"cocodiff/{'-'.join(map(str, ranks))}", dist.distributed_c10d._get_default_store()
    number = whole.add(f"{name}/made by {rank}", 1)  # ranks that make the same groups of these ranks find the same
    options = gloo._Options()
    options._devices, options._timeout, options._threads = shared._devices, NEVER, shared._threads
    return gloo(dist.PrefixStore(f"{name}/{number}", whole), ranks.index(rank), len(ranks), options)


class TorchDistGroup(Group):
    """A group of ranks that have a process group of torch.distributed for their messages.

    Messages are point to point: gloo's own all-to-all serves peers in turn and reaches half of the links' rate, while
    receives posted before sends reach nearly all of it.

    With `at_once`, `collective` is one all-to-all of torch.distributed's backend, with a size for each peer. That is
    the flat baseline of CoCoDiff. It also avoids backends that deliver batches of sends and receives wrong
    (torch-xpu-ops 3022) or each message by itself (`ONE_BY_ONE`).
    """

    # True to list a batch's messages in an order that ranks share. With False sends come first; such a batch never ends
    # with the releases in `ONE_BY_ONE`.
    in_one_order = True

    def __init__(
        self, process_group: Any, ranks: tuple[int, ...], rank: int, device: torch.device, health: Health | None = None
    ) -> None:
        self._process_group, self._health = process_group, health or Health()
        self._on_cpu = device.type == "cpu"
        # By peer, a byte with any value for calls without another message. It is kept, so that its address stays.
        self._nothing = defaultdict[int, Tensor](partial(torch.zeros, 1, dtype=torch.uint8, device=device))
        self.ranks, self.index, self.device = ranks, ranks.index(rank), device
        self.receives_ahead = self._on_cpu  # device backends match the sends and receives of one batch

    def together(self) -> Group:
        group = copy(self)
        group.at_once, group.receives_ahead = True, False
        return group

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        sends, recvs = not_empty(sends), not_empty(recvs)
        group, tag = self._process_group, call_tag(31)
        if self._on_cpu:
            # The group's own calls, because the checks of irecv and isend in Python take as long as the call.
            received = [group.recv([tensor], peer, tag) for tensor, peer in recvs]
            works = received + [group.send([tensor], peer, tag) for tensor, peer in sends]
            return PostedMessages(*(work.wait for work in works))
        sends, recvs = self._both_ways(sends, recvs)
        # With receives listed first some backends deadlock, and torch 2.10's XCCL begins a message only when the one
        # before it has ended on both sides (ProcessGroupXCCL.cpp:990). So all ranks list theirs in one order: by the
        # exclusive or of both ranks, which differs for all peers of a rank; then the lower rank's message comes first.
        listed: list[tuple[int, bool, Any, Tensor, int]] = [
            *((self.index ^ peer, self.index > peer, dist.isend, x, peer) for x, peer in sends),
            *((self.index ^ peer, peer > self.index, dist.irecv, x, peer) for x, peer in recvs),
        ]
        if self.in_one_order:
            listed.sort(key=itemgetter(0, 1))
        operations = [dist.P2POp(way, x, group=group, group_peer=peer) for *_, way, x, peer in listed]
        works = dist.batch_isend_irecv(operations) if operations else []
        # The library may no longer hold the tensors. This stream waits for the messages, so memory used by it is kept.
        kept = partial(used_on_current_stream, [tensor for tensor, _ in sends + recvs])
        return PostedMessages(*(work.wait for work in works), kept)

    def _both_ways(self, *lists: Messages) -> list[Messages]:
        """Add a message of one byte where two ranks have messages in one direction only. Return (sends, receives).

        Both ranks see that this is so. Sends or receives without the other may never end in oneCCL 2021.17
        (torch-xpu-ops 2688, oneCCL 192).

        Args:
            lists: the sends and the receives, which are changed in place.
        """
        sent, received = ({peer for _, peer in messages} for messages in lists)
        for ways, others, messages in ((received, sent, lists[0]), (sent, received, lists[1])):
            messages += [(self._nothing[peer], peer) for peer in ways if peer not in others]
        return [*lists]

    def collective(self, sends: Messages, recvs: Messages) -> Pending:
        if not self.at_once:
            return self.send_recv(sends, recvs)
        outgoing, sizes_out = self._by_peer(sends)
        incoming, sizes_in = self._by_peer(recvs)
        sent = torch.cat(outgoing)
        came = torch.empty(sum(sizes_in), dtype=torch.uint8, device=self.device)
        work = self._process_group.alltoall_base(came, sent, sizes_in, sizes_out, dist.AllToAllOptions())
        return LandingMessages(self.device, incoming, partial(_unpack, work, sent, came, incoming))

    def _by_peer(self, messages: Messages) -> tuple[list[Tensor], list[int]]:
        """Return (the messages as bytes, peer by peer and each peer's in order; for each peer their size in bytes).

        A peer without messages gets one byte, since sizes of zero have been found to fail in oneCCL.
        """
        parts: list[list[Tensor]] = [[] for _ in self.ranks]
        for tensor, peer in messages:
            parts[peer] += [tensor.view(-1).view(torch.uint8)] if tensor.numel() else []
        parts = [of_peer or [torch.zeros(1, dtype=torch.uint8, device=self.device)] for of_peer in parts]
        return [x for of_peer in parts for x in of_peer], [sum(x.numel() for x in of_peer) for of_peer in parts]

    def barrier(self) -> None:
        self._health.arrive("a barrier", self.ranks)
        with self._health.blaming(), self._health.blocking():
            if self._on_cpu:
                self._process_group.barrier().wait()
            else:
                dist.barrier(group=self._process_group)


def _unpack(work: Any, sent: Tensor, came: Tensor, messages: list[Tensor]) -> None:
    """Wait for an all-to-all, and start to copy what it has received into the messages' tensors.

    Args:
        work: the library's handle.
        sent: buffer with all bytes that are sent.
        came: buffer for all bytes that are received.
        messages: the tensors that the received bytes are for, as bytes, in their order in `came`.
    """
    work.wait()
    parts = came.split([message.numel() for message in messages])
    used_on_current_stream([sent, came])
    for message, part in zip(messages, parts, strict=True):
        message.copy_(part)


class TorchDistTransport(LaneOwner):
    """A transport over torch.distributed. A default process group that was initialised here is destroyed when the last
    transport over it is closed."""

    def __init__(
        self, device: torch.device, health: Health, owns_group: bool, library: str | None, carrier: LaneOwner | None
    ) -> None:
        """Make the group of all ranks. torch.distributed has been initialised.

        Args:
            owns_group: True if this run initialised the default process group.
            library: backend of its groups; None for that of the default process group.
            carrier: for a device, the transport that carries values over host memory; closed with this one.
        """
        self.one_thread, self.carrier = device.type != "cpu", carrier
        super().__init__(device, health)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.library = library or dist.get_backend()
        self.one_by_one = posts_one_by_one(self.library)
        self._groups: list[Any] = []
        counted = owns_group or bool(_users)
        if counted:
            _users.append(self)
        # oneCCL's groups with ranks of several nodes pass all messages through the host's memory, also between tiles of
        # a card (2021.17: send and receive ask where the group's ranks are). All-to-alls do not, but there messages
        # within a node wait for those between nodes (src/coll/algorithms/alltoallv.cpp).
        if carrier is not None and self.library in BACKENDS["xpu"]:
            self.node_of = self.all_gather_values(socket.gethostname(), "the names of nodes")
        everyone, ours = tuple(range(self.size)), counted and self.library == dist.get_backend()
        # A process group that another program initialised has time limits of its own.
        self.world = self._by_node(everyone, self._group_over(dist.group.WORLD, everyone) if ours else None)
        if self.one_by_one:
            self.world = self.world.together()

    def new_group(self, members: tuple[int, ...]) -> TorchDistGroup:
        # Only the members take part, so cards and planes are set up at the same time.
        make = partial(gloo_group, members, self.rank) if self.library == "gloo" else partial(new_group, members)
        process_group = self.blocking(make, among=members)
        self._groups.append(process_group)
        return self._group_over(process_group, members)

    def _group_over(self, process_group: Any, members: tuple[int, ...]) -> TorchDistGroup:
        if self.device.type != "cpu" and len(members) > 1:
            self._meet(process_group, members)
        return TorchDistGroup(process_group, members, self.rank, self.device, self.health)

    def _meet(self, process_group: Any, members: tuple[int, ...]) -> None:
        """Run a first collective call of all members of a process group, after it was made.

        Device backends create a group's communicator in its first call. If that was a batch of messages in which not
        all members take part, it would hang (PyTorch's page on batch_isend_irecv).
        """
        one = torch.ones(1, device=self.device)
        self.blocking(lambda: dist.all_reduce(one, group=process_group, async_op=True).wait(), among=members)

    def _release(self) -> None:
        is_last = _users == [self]
        if self in _users:
            _users.remove(self)
        for process_group in self._groups:
            if not isinstance(process_group, dist.ProcessGroup):  # made without torch.distributed
                process_group.shutdown()
            elif not is_last:
                dist.destroy_process_group(process_group)
        if is_last:
            dist.destroy_process_group()


def initialise(backend: str, store: Any, rank: int, size: int, device: torch.device) -> None:
    """Start torch.distributed's default process group.

    The device is set before, as xccl and nccl require. The `ccl` of older versions does not take it.
    """
    device_id = device if backend in ("xccl", "nccl") else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=NEVER, device_id=device_id)


def check_backend(backend: str, device: torch.device) -> None:
    """Import the module that registers a backend of torch.distributed, if it has one of its own.

    Raise UserError if that is missing, the backend does not carry the device's tensors, or this PyTorch lacks it.
    """
    fitting = _backends_of(device)
    if backend not in fitting:
        remedy = f"use --transport {' or '.join(fitting)}"
        raise UserError(f"transport {backend} does not carry {device.type} tensors: {remedy}")
    if backend == "ccl":
        try:
            import_module(CCL_BINDINGS)
        except Exception as error:
            remedy = f"install the one of this PyTorch, or use --transport {fitting[0]}"
            raise UserError(f"transport ccl needs {CCL_BINDINGS} ({error}): {remedy}") from error
    there = {"xccl": dist.is_xccl_available, "nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    if backend in there and not there[backend]():
        raise UserError(f"this PyTorch {torch.__version__} was built without {backend}: use a build for {device.type}")


def posts_one_by_one(backend: str) -> bool:
    """Return True if a backend in this PyTorch begins a message of a batch only when the one before it has ended.

    That is so for xccl in the releases of `ONE_BY_ONE`, which make a oneCCL group for each message.
    """
    return backend == "xccl" and ".".join(torch.__version__.split(".")[:2]) in ONE_BY_ONE


def device_backend(device: torch.device) -> str:
    """Return the name of torch.distributed's backend for a device, such as "gloo" or "xccl".

    Older versions for Intel devices have "ccl". Raise UserError if there is none.
    """
    if device.type == "xpu" and not dist.is_xccl_available():
        return "ccl"
    return _backends_of(device)[0]


def _backends_of(device: torch.device) -> tuple[str, ...]:
    """Return the names of torch.distributed's backends for a device, the preferred one first. Raise UserError if there
    are none."""
    if device.type not in BACKENDS:
        raise UserError(f"no transport carries {device.type} tensors between ranks: use one rank, or --device cpu")
    return BACKENDS[device.type]
