"""Groups by the links that they use: the ranks that an exchange's messages join, and those of each node by itself."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from cocodiff.comm.transport import Group, LaneOwner, Messages, Pending
from cocodiff.config.machine import Topology
from cocodiff.topology.routes.plans import plan_of

# Backends of which a process group with ranks of several nodes passes all that it sends through the host's memory, also
# between tiles of a card (oneCCL 2021.17: send and receive ask where the group's ranks are). Of an all-to-all that is
# not so, but what stays on a node waits there for what leaves it (src/coll/algorithms/alltoallv.cpp).
STAGED = ("xccl", "ccl")
Ranks = tuple[int, ...]
MakeGroup = Callable[[Ranks], Group]


def group_ranks(topology: Topology, rank: int, lane: str, names: Collection[str], nic_balance: bool) -> Ranks:
    """Return the ranks, ascending, of the group that carries this rank's messages of a link group: those that messages
    join to it, by way of others too. names: of the exchanges whose messages these are."""
    joined, waiting = {rank}, [rank]
    while waiting and len(joined) < topology.size:
        phases = [phase for name in names for phase in plan_of(topology, waiting[-1], name, nic_balance)]
        peers = {peer for one in phases if one.lane == lane for peer in (*one.sends, *one.receives)}
        waiting[-1:] = peers - joined
        joined.update(waiting)
    return tuple(sorted(joined))


def nodes_to_tell_apart(transport: LaneOwner) -> Sequence[Any]:
    """Return `LaneOwner.node_of`: the name of each rank's host, as oneCCL has it. All ranks call it."""
    return transport.values_of_all(socket.gethostname(), "the names of nodes") if transport.library in STAGED else ()


def group_by_node(make: MakeGroup, ranks: Ranks, rank: int, node_of: Sequence[Any], whole: Group | None) -> Group:
    """Make a group whose messages within a node do not pass through the host's memory. All ranks call it alike.

    make: makes one of the library's. rank: this one. node_of: see `LaneOwner`. whole: one of the library's of all
    these ranks that is there already."""
    here = tuple(other for other in ranks if node_of[other] == node_of[rank])
    near = make(here)  # two on every rank, if of itself alone: see `Transport.group`
    whole = whole or make((rank,) if here == ranks else ranks)
    return near if here == ranks else whole if len(here) == 1 else GroupByNode(near, whole)


class GroupByNode(Group):
    """Ranks of several nodes. Messages between ranks of one node go over a group of that node's ranks alone, all others
    over one of all ranks, in each call in this order."""

    def __init__(self, near: Group, whole: Group) -> None:
        self._near, self._whole = near, whole
        self.ranks, self.index, self.device = whole.ranks, whole.index, whole.device
        self.receives_ahead, self.at_once = whole.receives_ahead, whole.at_once
        self._at = {whole.ranks.index(rank): index for index, rank in enumerate(near.ranks)}

    def together(self) -> Group:
        return GroupByNode(self._near.together(), self._whole.together())

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        return self._apart(self._near.send_recv, self._whole.send_recv, sends, recvs)

    def collective(self, sends: Messages, recvs: Messages) -> Pending:
        return self._apart(self._near.collective, self._whole.collective, sends, recvs)

    def _apart(self, near: Callable[..., Pending], far: Callable[..., Pending], *lists: Messages) -> Pending:
        on_node = near(*([(x, self._at[peer]) for x, peer in some if peer in self._at] for some in lists))
        return Both(on_node, far(*([(x, p) for x, p in some if p not in self._at] for some in lists)))

    def barrier(self) -> None:
        self._whole.barrier()


class Both(NamedTuple):
    """Two transfers under way."""

    first: Pending
    second: Pending

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()
