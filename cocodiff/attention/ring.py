"""Ring attention (StreamFusion, section 2.2; Ring Attention) and TokenRing.

In a ring, every Ulysses group's keys and values are passed around, and each rank attends to those that it has.

A block is the keys and values of all tokens of one group, for this rank's heads. While a rank attends to one, it sends
that block on (`rounds.py` defines where to) and receives the next. So it holds at most two blocks of other groups at
any time. Partial results are merged in float32 in the order of the visits, so results do not depend on timing.

TokenRing: keys and values stay. Queries are passed around one way, and their results go the other way, back to their
owners. So both directions of the links are used. Within a node, a rank attends to its own keys with the queries that it
has. Meanwhile it passes these on, and sends the results of the queries before, with their log-sum-exps, straight to
their owner. Between nodes, keys and values are passed around as in `Ring`, one step for each round of the queries in a
node: the paper's hybrid (TokenRing, section 3.3.3). Results of the own queries are merged in the order of the visits as
well. Nothing is computed after the last queries, so these are attended to in pieces of heads: results of one piece
return during attention to the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.attention.local import AttentionCall, Keys, LocalAttention, Partial, all_merged, merged
from cocodiff.comm.lane import LaneFuture
from cocodiff.comm.transport import Group, Pending, RankContext
from cocodiff.exchange.messages import views
from cocodiff.topology.axes import Mesh
from cocodiff.topology.routes.rounds import CARD, NODE, TILE, Move, visits_of

LANE = "ring"  # name of the lane, also in the trace
# TokenRing: number of partial results that may be in flight to a rank besides the newest one. Queries use a link once
# while both tiles of a card send results over another link. So results take longer than a step, and the next step does
# not wait for them.
LAG = 2
LAST_PIECES = 8  # TokenRing: pieces of the last step, if there are so many heads


class Ring:
    """The part of one rank in ring attention: it passes on keys and values, and attends to those of all Ulysses groups.

    A ring has one rank of each Ulysses group. Keys and values are sent as they are, even if the exchange within groups
    has a codec.
    """

    def __init__(
        self,
        mesh: Mesh,
        context: RankContext,
        local: LocalAttention | None = None,
        sequences: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Open the ring's communicator and its background thread. All ranks of the mesh do so together.

        Args:
            mesh: the Ulysses groups and the rings across them.
            context: this rank among all ranks of the mesh.
            local: computes attention on this rank; None for `LocalAttention`.
            sequences: for every Ulysses group, the order in which its ranks' rows lie in the sequence (see
                `Layout.sequence`); () for ascending order in all groups.
        """
        self.mesh, self._trace, self._count, self._local = mesh, context.trace, context.count, local or LocalAttention()
        self.sequences, self._kernels, transport = sequences or [()] * mesh.ring, context.kernels, context.transport
        self.rank, (self.group, slot) = transport.rank, mesh.group_and_slot(transport.rank)
        self._visits = visits_of(mesh, transport.rank)
        self._rank_of = [group[slot] for group in mesh.groups]
        members = sorted(self._rank_of)
        self._index_of = [members.index(rank) for rank in self._rank_of]
        self._ranks, self._lane = transport.group(members), transport.lane(LANE)

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
        parts = (self._local.part(q_BSGD, *block) for block in self.blocks(k_BSGD, v_BSGD, call))
        return all_merged(self._kernels, parts).out_BLHD.to(q_BSGD.dtype)

    def blocks(self, k_BSGD: Tensor, v_BSGD: Tensor, call: AttentionCall) -> Iterator[Keys]:
        """Yield the keys and values of every Ulysses group for this rank's heads, this rank's own group's first.

        While the caller works on one group's, they are sent on and the next group's are received. The memory of
        received ones is overwritten once the second next ones are asked for.

        Args:
            k_BSGD: the keys of this rank's group.
            v_BSGD: the values of this rank's group.
            call: the attention call, with the number of tokens and the masks of all groups.
        """
        here, rows = [k_BSGD.contiguous(), v_BSGD.contiguous()], call.rows
        buffers = self._two_buffers(k_BSGD, rows)
        for number, visit in enumerate(self._visits):
            coming: LaneFuture[list[Tensor]] | None = None
            if visit.onward is not None:
                coming = self._pass_on(here, visit.onward, buffers[number % 2], rows, call.layer)
            yield Keys(here[0], here[1], call.mask(visit.member))
            if coming is not None:
                with self._trace.span("wait for kv", layer=call.layer):
                    here = coming.wait()

    def _two_buffers(self, like_BSGD: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Allocate two flat buffers, each for keys and values of the largest other group; only one if there is one
        other group.

        Args:
            like_BSGD: this rank's keys, for batch, heads, channels and dtype.
            rows: number of tokens of every Ulysses group.
        """
        B, _, G, D = like_BSGD.shape
        others = [rows[visit.member] for visit in self._visits[1:]]
        return [like_BSGD.new_empty(2 * B * max(others) * G * D) for _ in others[:2]]

    def _pass_on(
        self, here: list[Tensor], onward: Move, buffer: Tensor, rows: Sequence[int], layer: str
    ) -> LaneFuture[list[Tensor]]:
        """Start sending keys and values to the next member of the ring, and receiving another group's from the one
        before.

        Return the future of the received ones, [keys, values], as views of `buffer`.

        Args:
            here: the keys and values to send, [B, tokens, G, D] each.
            onward: the members to send to and to receive from, and the group whose tensors arrive.
            buffer: flat memory for what is received.
            rows: number of tokens of every Ulysses group.
            layer: kind of layer, for the trace.
        """
        B, _, G, D = here[0].shape
        shape = (B, rows[onward.brings], G, D)

        def exchange(way: Passing) -> list[Tensor]:
            """Send keys and values, receive others, wait for both, and return the received ones. The background thread
            runs it."""
            with self._trace.span("kv ring", LANE, layer):
                self._send_recv(self._ranks, way).wait()
                return way.incoming

        return self._lane.submit(exchange, Passing(here, views(buffer[: 2 * math.prod(shape)], [shape, shape]), onward))

    def _send_recv(self, group: Group, way: Passing) -> Pending:
        """Start sending and receiving the tensors of one step, and return what to wait for.

        Args:
            group: the communicator.
            way: the tensors and the members that they go to and come from.
        """
        sends, recvs = [(x, way.move.to) for x in way.outgoing], [(x, way.move.before) for x in way.incoming]
        return self._post(group, sends, recvs)

    def _post(self, group: Group, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> Pending:
        """Start messages to and from members of the ring, count the bytes sent in the trace, and return what to wait
        for.

        All members of the ring make this call. A member is the index of a Ulysses group, which stands for its rank in
        this ring.

        Args:
            group: the communicator.
            sends: tensors to send, each with the member that gets it.
            recvs: tensors to fill, each with the member that sends it.
        """
        for x, member in sends:
            self._count(self._rank_of[member], x.nbytes, x.nbytes)
        return group.collective(*([(x, self._index_of[member]) for x, member in pairs] for pairs in (sends, recvs)))


class Passing(NamedTuple):
    """Tensors to send to one member of a ring of ranks, and memory for those that another member sends at the same
    time."""

    outgoing: Sequence[Tensor]  # tensors to send to `move.to`
    incoming: list[Tensor]  # buffers for those from `move.before`
    move: Move  # the two members, and the member whose tensors arrive


@dataclass
class TokensInFlight:
    """The messages of one TokenRing call that were posted by the background thread and not waited for yet."""

    layer: str  # kind of layer, for the trace
    # Those sent are of other members' queries, those received of this rank's own.
    parts: deque[tuple[Pending, Passing]] = field(default_factory=deque)  # messages with partial results
    keys: tuple[Pending, Passing] | None = None  # message with keys and values for the next node; None for none


class Received(NamedTuple):
    """The tensors that have arrived by the end of one step of TokenRing."""

    queries: Sequence[Tensor]  # the queries to attend with next, in one tensor; empty if none were to be received
    parts: Sequence[Partial]  # partial results of attention of this rank's own queries
    keys: list[Tensor]  # the keys and values of another node's member; empty before the end of a round


class TokenRing(Ring):
    """The part of one rank in TokenRing attention: queries are passed around the ranks of a node, and their results
    sent back.

    Keys and values are passed only between nodes. All tensors are sent as they are, even if the exchange within Ulysses
    groups has a codec.
    """

    def __init__(self, mesh: Mesh, context: RankContext, *more: Any) -> None:
        """Open the ring's two communicators and its background thread. All ranks of the mesh do so together.

        Args:
            mesh: the Ulysses groups and the rings across them.
            context: this rank among all ranks of the mesh.
            more: `local` and `sequences`, see `Ring`.
        """
        super().__init__(mesh, context, *more)
        self._nodes, self._steps = (visits_of(mesh, self.rank, along) for along in ((NODE,), (CARD, TILE)))
        # For everything but queries: on accelerators messages of one communicator are sent one after the other.
        self._back = context.transport.group(self._ranks.ranks)

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
        own_BSGD, keys = q_BSGD.contiguous(), [k_BSGD.contiguous(), v_BSGD.contiguous()]
        rows, step = call.rows, partial(self._step, TokensInFlight(call.layer))
        running: Partial | None = None
        back: Passing | None = None
        last = self._nodes[-1], self._steps[-1]
        for node in self._nodes:
            mask_B11S, here_BSGD = call.mask(node.member), own_BSGD
            keys_on = passing(keys, node.onward, rows)
            for visit in self._steps:
                coming = self._lane.submit(step, passing([here_BSGD], visit.onward, rows), back, keys_on, LAG)
                own, keys_on = visit.member == self.group, None
                returned = None if own else Move(visit.member, visit.holder, self.group)
                in_pieces = returned is not None and (node, visit) == last
                pieces = head_pieces(here_BSGD.shape[2], LAST_PIECES if in_pieces else 1)
                for heads in pieces:
                    k_BSGD, v_BSGD = (x[:, :, heads] for x in keys)
                    part = self._local.part(here_BSGD[:, :, heads], k_BSGD, v_BSGD, mask_B11S)
                    back = passing([x.contiguous() for x in part], returned, rows)
                    if in_pieces:
                        self._lane.submit(step, None, back, None, LAG + len(pieces))
                with self._trace.span("wait for q", layer=call.layer):
                    came = coming.wait()
                for arrived in came.parts:
                    running = merged(self._kernels, running, arrived)
                if own:
                    running = merged(self._kernels, running, part)
                here_BSGD = came.queries[0] if came.queries else own_BSGD
            keys = came.keys or keys
        with self._trace.span("wait for parts", layer=call.layer):
            parts = self._lane.submit(step, None, None, None, 0).wait().parts
        if back is not None:
            parts, of_heads = parts[: -len(pieces)], parts[-len(pieces) :]
            parts = [*parts, Partial(*(torch.cat(tensors, 2) for tensors in zip(*of_heads, strict=True)))]
        for arrived in parts:
            running = merged(self._kernels, running, arrived)
        assert running is not None, "a ring has a rank"
        return running.out_BLHD.to(q_BSGD.dtype)

    def _step(
        self, flight: TokensInFlight, on: Passing | None, back: Passing | None, keys: Passing | None, lag: int
    ) -> Received:
        """Post the messages of one step and return the tensors that have arrived. The ring's background thread runs it.

        It waits for the queries of this step, and for older partial results until at most `lag` messages with such are
        in flight. If no queries are passed on, it also waits for keys of another node that are on their way.

        Args:
            flight: the messages of this attention call; it is changed.
            on: queries to pass on, with memory for the next ones; None at the end of a round within the node.
            back: a partial result (output and log-sum-exp) to return to the owner of its queries; None for none.
            keys: keys and values to pass to another node; None for none.
            lag: most messages with partial results that may stay in flight.
        """
        with self._trace.span("token ring", LANE, flight.layer):
            queries = None if on is None else self._send_recv(self._ranks, on)
            if keys is not None:
                flight.keys = (self._send_recv(self._back, keys), keys)
            if back is not None:
                flight.parts.append((self._send_recv(self._back, back), back))
            if queries is not None:
                queries.wait()
            parts, next_keys = list[Partial](), list[Tensor]()
            while len(flight.parts) > lag:
                returned, (_, arrived, _) = flight.parts.popleft()
                returned.wait()
                parts.append(Partial(*arrived))
            if on is None and flight.keys is not None:
                (sent, (_, arrived, _)), flight.keys = flight.keys, None
                sent.wait()
                next_keys += arrived
            return Received([] if on is None else on.incoming, parts, next_keys)


def head_pieces(heads: int, pieces: int) -> list[slice]:
    """Cut attention heads into nearly equal pieces. Return the slice of heads of each.

    Args:
        heads: number of heads.
        pieces: number of pieces; there are fewer if there are fewer heads.
    """
    count = min(heads, pieces)
    return [slice(heads * n // count, heads * (n + 1) // count) for n in range(count)]


def passing(outgoing: Sequence[Tensor], move: Move | None, rows: Sequence[int]) -> Passing | None:
    """Return tensors to pass on in a ring of ranks, with newly allocated memory for those that arrive; None if `move`
    is None.

    Args:
        outgoing: the tensors to send, [B, tokens, ...] each.
        move: the members to send to and to receive from, and the member whose tensors arrive.
        rows: number of tokens of every Ulysses group, by which the memory is sized.
    """
    if move is None:
        return None
    return Passing(outgoing, [x.new_empty(len(x), rows[move.brings], *x.shape[2:]) for x in outgoing], move)
