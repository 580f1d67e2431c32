"""Ring attention: keys and values of every Ulysses group go round, each rank attends to what has arrived and passes it
on meanwhile (StreamFusion, section 2.2; Ring Attention).

A block is the keys and values of all tokens of one group for the heads that are here. While a rank attends to one, it
sends that one on (`rounds.py` tells where to) and receives the next: at most two blocks of others are here at any time.
What the parts give is merged in float32 in the order of the visits, so nothing depends on which message is early.

TokenRing: keys and values stay, queries go round one way, and what they gave goes the other way back to their owners,
so both directions of the links carry something. Within a node a rank attends to its own keys with the queries at hand,
passes those on meanwhile, and sends what came of the ones before, with the logs of the sums, straight to their owner.
Between nodes keys and values go round as in `Ring`, each step for as long as queries go round the node: the paper's
hybrid (TokenRing, section 3.3.3). What came of the own queries is merged in the order of the visits as well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from cocodiff.attention.local import AttentionCall, Keys, LocalAttention, Partial, all_merged, merged
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Group, LaneFuture, Pending, Transport
from cocodiff.kernels import Kernels, views
from cocodiff.topology.axes import Mesh
from cocodiff.topology.routes.rounds import CARD, NODE, TILE, Move, visits_of

LANE = "ring"
# Of TokenRing: parts that may be on their way to a rank beside the newest one. Queries need a link once while both
# tiles of a card send parts over another one, so parts take longer than a step and need not be here before the next.
LAG = 2


class Ring:
    """One rank's place in its ring. Its messages are keys and values whole, whatever the Ulysses part sends."""

    def __init__(
        self,
        mesh: Mesh,
        transport: Transport,
        trace: Trace,
        kernels: Kernels | None = None,
        local: LocalAttention | None = None,
        sequences: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """transport: of all ranks. local: what computes. sequences: of every group, the order of its ranks' rows at
        this slot, where it is another one (see `Layout.sequence`)."""
        self.mesh, self._trace, self._local = mesh, trace, local or LocalAttention()
        self.sequences = sequences or [()] * mesh.ring
        self._kernels = kernels or Kernels(note=trace.note_kernel)
        self.rank, (self.group, slot) = transport.rank, mesh.group_and_slot(transport.rank)
        self._visits = visits_of(mesh, transport.rank)
        self._rank_of = [group[slot] for group in mesh.groups]
        members = sorted(self._rank_of)
        self._index_of = [members.index(rank) for rank in self._rank_of]
        self._ranks, self._lane = transport.group(members), transport.lane(LANE)

    def attend(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, call: AttentionCall) -> Tensor:
        """Of the group's queries to all groups' keys: [B, S_g, G, D] of the queries' dtype."""
        parts = (self._local.part(q_BSGD, *block) for block in self.blocks(k_BSGD, v_BSGD, call))
        return all_merged(self._kernels, parts).out_BLHD.to(q_BSGD.dtype)

    def blocks(self, k_BSGD: Tensor, v_BSGD: Tensor, call: AttentionCall) -> Iterator[Keys]:
        """Every group's keys and values for the heads that are here, the own ones first. Until another is asked for,
        each travels on and the next one here; a block is gone when the second after it is asked for."""
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
        """Flat memory for two blocks of the largest other group; for one where no more than one comes."""
        B, _, G, D = like_BSGD.shape
        others = [rows[visit.member] for visit in self._visits[1:]]
        return [like_BSGD.new_empty(2 * B * max(others) * G * D) for _ in others[:2]]

    def _pass_on(
        self, here: list[Tensor], onward: Move, buffer: Tensor, rows: Sequence[int], layer: str
    ) -> LaneFuture[list[Tensor]]:
        """Starts sending a block on, keys and values, and receiving another member's. rows: of every one's."""
        B, _, G, D = here[0].shape
        shape = (B, rows[onward.brings], G, D)
        incoming = views(buffer[: 2 * math.prod(shape)], [shape, shape])

        def exchange(here: list[Tensor], incoming: list[Tensor]) -> list[Tensor]:
            with self._trace.span("kv ring", LANE, layer):
                sends, recvs = [(x, onward.to) for x in here], [(x, onward.before) for x in incoming]
                self._post(self._ranks, sends, recvs).wait()
                return incoming

        return self._lane.submit(exchange, here, incoming)

    def _post(self, group: Group, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> Pending:
        """Starts messages to and from members of the ring, who all come to as many, and counts what is sent."""
        for x, member in sends:
            link = self.mesh.topology.link_class(self.rank, self._rank_of[member])
            self._trace.count(link, x.nbytes)
            self._trace.count(link, x.nbytes, purpose="whole")
        return group.collective(*([(x, self._index_of[member]) for x, member in pairs] for pairs in (sends, recvs)))


class Passing(NamedTuple):
    """Tensors for one member of the ring, and where those that another one sends meanwhile are put."""

    outgoing: Sequence[Tensor]
    incoming: Sequence[Tensor]
    move: Move


@dataclass
class TokensInFlight:
    """What the lane's jobs of one call have posted and not waited for."""

    layer: str
    parts: deque[tuple[Pending, Passing]] = field(default_factory=deque)
    keys: tuple[Pending, Passing] | None = None


class Came(NamedTuple):
    """What a step of messages has brought: the next queries, parts of the own ones, the next node's keys."""

    queries: Sequence[Tensor]
    parts: Sequence[Partial]
    keys: list[Tensor]


class TokenRing(Ring):
    """One rank's place in its ring. Its messages are whole, whatever the Ulysses part sends."""

    def __init__(self, mesh: Mesh, transport: Transport, *more: Any) -> None:
        """As `Ring`."""
        super().__init__(mesh, transport, *more)
        self._nodes, self._steps = (visits_of(mesh, self.rank, along) for along in ((NODE,), (CARD, TILE)))
        # For what takes another way than queries: on accelerators messages of one communicator follow one another.
        self._back = transport.group(self._ranks.ranks)

    def attend(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, call: AttentionCall) -> Tensor:
        """As `Ring.attend`."""
        own_BSGD, keys = q_BSGD.contiguous(), [k_BSGD.contiguous(), v_BSGD.contiguous()]
        rows, step = call.rows, partial(self._step, TokensInFlight(call.layer))
        running: Partial | None = None
        back: Passing | None = None
        for node in self._nodes:
            mask_B11S, here_BSGD = call.mask(node.member), own_BSGD
            keys_on = passing(keys, node.onward, rows)
            for visit in self._steps:
                coming = self._lane.submit(step, passing([here_BSGD], visit.onward, rows), back, keys_on, LAG)
                part = self._local.part(here_BSGD, keys[0], keys[1], mask_B11S)
                with self._trace.span("wait for q", layer=call.layer):
                    came = coming.wait()
                for arrived in came.parts:
                    running = merged(self._kernels, running, arrived)
                own, keys_on = visit.member == self.group, None
                if own:
                    running = merged(self._kernels, running, part)
                returned = None if own else Move(visit.member, visit.holder, self.group)
                back = passing([x.contiguous() for x in part], returned, rows)
                here_BSGD = came.queries[0] if came.queries else own_BSGD
            keys = came.keys or keys
        with self._trace.span("wait for parts", layer=call.layer):
            for arrived in self._lane.submit(step, None, back, None, 0).wait().parts:
                running = merged(self._kernels, running, arrived)
        assert running is not None, "a ring has a rank"
        return running.out_BLHD.to(q_BSGD.dtype)

    def _step(
        self, flight: TokensInFlight, on: Passing | None, back: Passing | None, keys: Passing | None, lag: int
    ) -> Came:
        """A job of the lane: posts what goes on, back, and to the next node. Waits for the next queries, for parts
        until `lag` of them are on their way, and where no queries go on, which ends a node's round, for the next keys.
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
            return Came([] if on is None else on.incoming, parts, next_keys)

    def _send_recv(self, group: Group, way: Passing) -> Pending:
        sends, recvs = [(x, way.move.to) for x in way.outgoing], [(x, way.move.before) for x in way.incoming]
        return self._post(group, sends, recvs)


def passing(outgoing: Sequence[Tensor], move: Move | None, rows: Sequence[int]) -> Passing | None:
    """Tensors that move on, with room for those that come. rows: of every member's."""
    if move is None:
        return None
    return Passing(outgoing, [x.new_empty(len(x), rows[move.brings], *x.shape[2:]) for x in outgoing], move)
