"""Streaming attention (Song, Distributed streaming attention, section 3.3).

Keys and values stay. Every rank attends to its own with the queries of all, and the results are reduced to the rank of
each query.

The paper gathers queries and reduces by all-reduces of maxima, sums and outputs. Here a rank gets only the results of
its own queries, and the reduction is a tree. Queries are sent once to the same place on every other node and gathered
there. Their results are merged on that node, and one result per node is sent back. So links between nodes carry the
same bytes as in a ring, and a call takes a few rounds of messages instead of one for each rank.

A call is cut into pieces, each with some heads of the queries of one node. While a rank attends to one, the next is
gathered and earlier ones are reduced. Results of a node are merged in the order of its ranks, own rank first, and nodes
in the order of the pieces. So results do not depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.attention.local import AttentionCall, Keys, Partial, all_merged, merged
from cocodiff.attention.ring import LANE, Ring, head_pieces
from cocodiff.comm.transport import Pending, RankContext
from cocodiff.topology.axes import Mesh
from cocodiff.topology.routes.rounds import rounds_of

PIECES = 8  # fewest pieces of a call's queries, if there are enough heads: one is computed while others are sent


def head_runs(nodes: int, heads: int) -> int:
    """Return the number of runs of heads that the queries of each node are cut into, so that a call has at least PIECES
    pieces.

    Args:
        nodes: number of nodes in the ring of ranks.
        heads: number of this rank's heads.
    """
    return min(heads, -(-PIECES // nodes))


class QueryPiece(NamedTuple):
    """A piece of the queries of streaming attention: those of all ring members on one node, for some heads.

    Members are indices of Ulysses groups. A ring has one rank of each group.
    """

    members: Sequence[int]  # the node's members in the order of merging; the one at this rank's place is first
    of: int  # the member of that node at this rank's place; this rank's own group if the node is its own
    to: int  # the member of another node that gets this rank's queries in exchange; the own group likewise
    heads: slice  # the heads that the piece has, among this rank's


@dataclass
class PiecesInFlight:
    """The state of one call of streaming attention on a rank: posted messages between nodes, and merged results."""

    layer: str  # kind of layer, for the trace
    pieces: Sequence[QueryPiece]  # all pieces of the call, in the order in which they are computed
    rows: Sequence[int]  # number of tokens of every Ulysses group
    queries: deque[tuple[Pending, Tensor]] = field(default_factory=deque)  # messages with queries, and their buffers
    # Messages with results of this rank's queries from other nodes, with their buffers and heads.
    parts: deque[tuple[Pending, Partial, slice]] = field(default_factory=deque)
    merged: dict[int, Partial] = field(default_factory=dict)  # results of this rank's queries so far, by first head


class Streaming(Ring):
    """The part of one rank in streaming attention: keys and values stay, and queries and their results are sent.

    Tensors are sent as they are, even if the exchange within Ulysses groups has a codec.
    """

    def __init__(self, mesh: Mesh, context: RankContext, *more: Any) -> None:
        """Open the communicators and the background thread. All ranks of the mesh do so together.

        Args:
            mesh: the Ulysses groups and the rings across them.
            context: this rank among all ranks of the mesh.
            more: `local` and `sequences`, see `Ring`.
        """
        super().__init__(mesh, context, *more)
        grid = rounds_of(mesh)[mesh.group_and_slot(self.rank)[1]]
        within = len(grid.members) // grid.shape[0]
        nodes = [grid.members[n : n + within] for n in range(0, len(grid.members), within)]
        node, place = divmod(grid.members.index(self.group), within)
        # Own place first, so that every rank sends to the others in a different order.
        at = [(place + n) % within for n in range(within)]
        self._peers = [nodes[node][n] for n in at]
        self._nodes = [
            QueryPiece([nodes[of][n] for n in at], nodes[of][place], nodes[to][place], slice(None))
            for of, to in (((node - n) % len(nodes), (node + n) % len(nodes)) for n in range(len(nodes)))
        ]
        # Separate communicators for results and for messages between nodes: on accelerators messages of one
        # communicator are sent one after the other. All ranks make the same number.
        self._back = context.transport.group(self._ranks.ranks)
        crossing = any(of_slot.shape[0] > 1 for of_slot in rounds_of(mesh))
        self._across = context.transport.group(self._ranks.ranks) if crossing else self._ranks

    def attend(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, call: AttentionCall) -> Tensor:
        """Return attention of the queries of this rank's group to the keys of all groups, [B, S, G, D] in the queries'
        dtype.

        S and G are the tokens of this rank's group and this rank's heads. All ranks of the ring call it.

        Args:
            q_BSGD: the group's queries.
            k_BSGD: the group's keys.
            v_BSGD: the group's values.
            call: the attention call, with the number of tokens and the masks of all groups.
        """
        keys = Keys(k_BSGD.contiguous(), v_BSGD.contiguous(), call.mask(self.group))
        pieces = self._pieces(q_BSGD.shape[2])
        own = [q_BSGD[:, :, piece.heads].contiguous() for piece in pieces]
        step = partial(self._step, PiecesInFlight(call.layer, pieces, call.rows))
        coming = self._lane.submit(step, 0, own, None)
        part: Partial | None = None
        for number, piece in enumerate(pieces, 1):
            with self._trace.span("wait for q", layer=call.layer):
                q_BLGD, _ = coming.wait()
                assert q_BLGD is not None, "each piece has queries"
            coming = self._lane.submit(step, number, own, part)
            k_BSGD, v_BSGD = (x[:, :, piece.heads] for x in (keys.k_BSHD, keys.v_BSHD))
            part = self._local.part(q_BLGD, k_BSGD, v_BSGD, keys.mask_B11S)
        with self._trace.span("wait for parts", layer=call.layer):
            last = self._lane.submit(step, len(pieces) + 1, own, part)
            coming.wait()
            _, whole = last.wait()
        return torch.cat([part.out_BLHD for part in whole], 2).to(q_BSGD.dtype)

    def _pieces(self, heads: int) -> list[QueryPiece]:
        """Return the pieces into which a call's queries are cut, node by node, this rank's own node first.

        Args:
            heads: number of this rank's heads.
        """
        runs = head_pieces(heads, head_runs(len(self._nodes), heads))
        return [node._replace(heads=run) for node in self._nodes for run in runs]

    def _step(
        self, flight: PiecesInFlight, number: int, own: Sequence[Tensor], part: Partial | None
    ) -> tuple[Tensor | None, list[Partial]]:
        """Run one step of the background thread. Return two things: queries to attend with, and this rank's merged
        results.

        The first are the queries of piece `number`, [B, tokens of the node, heads, D], or None after the last piece.
        The second is a list, one result for each run of heads, filled only in the last step.

        The step gathers the queries of piece `number` within the node, exchanges those of the next piece with another
        node, and reduces the results of piece `number - 2`.

        Args:
            flight: the state of the call; it is changed.
            number: number of the step, from 0 to one more than there are pieces.
            own: this rank's queries for every piece.
            part: the results of piece `number - 2` with this rank's keys; None in the first steps.
        """
        pieces = flight.pieces
        with self._trace.span("streaming", LANE, flight.layer):
            reducing = None if part is None else self._reduce(part, pieces[number - 2], flight.rows)
            if number + 1 < len(pieces):
                self._cross(flight, pieces[number + 1], own[number + 1])
            gathering, queries = None, list[Tensor]()
            if number < len(pieces):
                gathering, queries = self._gather(flight, pieces[number], own[number])
            if reducing is not None:
                self._merge_node(flight, pieces[number - 2], *reducing)
            if gathering is not None:
                gathering.wait()
            through = number > len(pieces)
            while len(flight.parts) > (not through):
                sent, arrived, heads = flight.parts.popleft()
                sent.wait()
                merged(self._kernels, flight.merged[heads.start], arrived)
            return torch.cat(queries, 1) if queries else None, list(flight.merged.values()) if through else []

    def _cross(self, flight: PiecesInFlight, piece: QueryPiece, own_BSGD: Tensor) -> None:
        """Start sending this rank's queries to ring member `piece.to`, and receiving those of `piece.of`.

        Both are at this rank's place, on other nodes: `piece.of` on the node whose queries the piece has. Do nothing
        for a piece of this rank's own node.

        Args:
            flight: the state of the call, which keeps the message.
            piece: the piece of queries.
            own_BSGD: this rank's queries for the piece's heads, which are sent.
        """
        if piece.of != self.group:
            there = own_BSGD.new_empty(len(own_BSGD), flight.rows[piece.of], *own_BSGD.shape[2:])
            flight.queries.append((self._post(self._across, [(own_BSGD, piece.to)], [(there, piece.of)]), there))

    def _gather(self, flight: PiecesInFlight, piece: QueryPiece, own_BSGD: Tensor) -> tuple[Pending, list[Tensor]]:
        """Exchange a piece's queries with all other ring members on this node.

        Return the pending messages, and the queries of all members of the piece's node, in the order of
        `piece.members`. This rank contributes those of the member at its own place.

        Args:
            flight: the state of the call, with queries from other nodes.
            piece: the piece of queries.
            own_BSGD: this rank's queries for the piece's heads.
        """
        here_BSGD = own_BSGD
        if piece.of != self.group:
            crossed, here_BSGD = flight.queries.popleft()
            crossed.wait()
        B, _, *more = own_BSGD.shape
        others = [own_BSGD.new_empty(B, flight.rows[member], *more) for member in piece.members[1:]]
        sends, recvs = [(here_BSGD, peer) for peer in self._peers[1:]], zip(others, self._peers[1:], strict=True)
        return self._post(self._ranks, sends, list(recvs)), [here_BSGD, *others]

    def _reduce(self, part: Partial, piece: QueryPiece, rows: Sequence[int]) -> tuple[Pending, list[Partial]]:
        """Start exchanging partial results with all other ring members on this node.

        Each gets what this rank's keys gave for the queries at its place. Return the pending messages, and the results
        for the queries at this rank's place: this rank's own first, then those of the others, to be merged once they
        have arrived.

        Args:
            part: what this rank's keys gave for all queries of the piece.
            piece: the piece of queries.
            rows: number of tokens of every Ulysses group.
        """
        of_members = [rows[member] for member in piece.members]
        ours, *theirs = (
            Partial(*(x.contiguous() for x in cut)) for cut in zip(*(x.split(of_members, 1) for x in part), strict=True)
        )
        came = [Partial(*map(torch.empty_like, ours)) for _ in theirs]
        sends, recvs = (
            [(x, peer) for peer, tensors in zip(self._peers[1:], parts, strict=True) for x in tensors]
            for parts in (theirs, came)
        )
        return self._post(self._back, sends, recvs), [ours, *came]

    def _merge_node(
        self, flight: PiecesInFlight, piece: QueryPiece, reducing: Pending, parts: Sequence[Partial]
    ) -> None:
        """Merge the results of this node's keys for a piece, and start sending the sum to the rank whose queries they
        are of.

        Results for this rank's own queries are kept in `flight.merged`. The results from the other node are received at
        the same time.

        Args:
            flight: the state of the call; it is changed.
            piece: the piece of queries.
            reducing: the messages that bring `parts`.
            parts: the results to merge, this rank's first.
        """
        reducing.wait()
        of_node = all_merged(self._kernels, parts)
        if piece.of == self.group:
            flight.merged[piece.heads.start] = of_node
            return
        leaving = Partial(of_node.out_BLHD.to(parts[0].out_BLHD.dtype), of_node.lse_BLH)
        mine = flight.merged[piece.heads.start]
        arriving = Partial(leaving.out_BLHD.new_empty(mine.out_BLHD.shape), torch.empty_like(mine.lse_BLH))
        sent = self._post(self._across, [(x, piece.of) for x in leaving], [(x, piece.to) for x in arriving])
        flight.parts.append((sent, arriving, piece.heads))
