"""The groups of ranks by the links that they use: the ranks that an exchange's messages join, and the ranks of each
node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from cocodiff.comm.transport import Group, Messages, Pending
from cocodiff.topology import Topology
from cocodiff.topology.routes.plans import plan_of

Ranks = tuple[int, ...]
MakeGroup = Callable[[Ranks], Group]


def group_ranks(topology: Topology, rank: int, lane: str, names: Collection[str], nic_balance: bool) -> Ranks:
    """Return the ranks, ascending, of the group (communicator) that carries this rank's messages over one kind of link.

    A rank belongs to it if some exchange has messages between it and this rank over such links, directly or by way of
    other ranks.

    Args:
        lane: the kind of link, "sibling" (tiles of a card) or "plane".
        names: the exchanges that use the group: "flat", "tapa" or "split".
        nic_balance: True if "split" spreads blocks for other nodes over the network cards.
    """
    joined, waiting = {rank}, [rank]
    while waiting and len(joined) < topology.size:
        phases = [phase for name in names for phase in plan_of(topology, waiting[-1], name, nic_balance)]
        peers = {peer for one in phases if one.lane == lane for peer in (*one.sends, *one.receives)}
        waiting[-1:] = peers - joined
        joined.update(waiting)
    return tuple(sorted(joined))


def group_by_node(make: MakeGroup, ranks: Ranks, rank: int, node_of: Sequence[Any], whole: Group | None) -> Group:
    """Make a group whose messages within a node do not pass through the host's memory. All ranks call this together.

    Args:
        make: makes a group of the library from its ranks.
        ranks: the members.
        rank: this rank.
        node_of: the node of each rank.
        whole: an existing group of the library with all these ranks, to use instead of a new one.
    """
    here = tuple(other for other in ranks if node_of[other] == node_of[rank])
    near = make(here)  # every rank makes two groups, if only of itself: see `Transport.group`
    whole = whole or make((rank,) if here == ranks else ranks)
    return near if here == ranks else whole if len(here) == 1 else GroupByNode(near, whole)


class GroupByNode(Group):
    """A group with ranks of several nodes whose messages within a node need not pass through the host's memory.

    In each call, messages between ranks of one node are posted first, in a group of that node's ranks. The others
    follow in a group of all ranks.
    """

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
        """Post the messages within the node and then the others. Return both to wait for.

        Args:
            near: posts sends and receives in the group of this node's ranks.
            far: posts sends and receives in the group of all ranks.
            lists: the sends and the receives.
        """
        on_node = near(*([(x, self._at[peer]) for x, peer in some if peer in self._at] for some in lists))
        return Both(on_node, far(*([(x, p) for x, p in some if p not in self._at] for some in lists)))

    def barrier(self) -> None:
        self._whole.barrier()


class Both(NamedTuple):
    """Two sets of messages in flight that are waited for as one, as those within a node and those between nodes."""

    first: Pending
    second: Pending

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()
