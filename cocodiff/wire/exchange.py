"""The exchange: from sequence-parallel to head-parallel layout and back, along any plan (flat, TAPA, split).

TAPA goes phase by phase: each packs its messages, posts all receives before all sends and waits, on the lane of its
link group. The others run their phases together (`relay.py`), on one lane. Nothing here knows who owns what: a block
travels through intermediate ranks unchanged, so the result has the same bits whatever the route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from torch import Tensor

from cocodiff.comm.transport import Group, Lane, LanePending, Ranks
from cocodiff.device import on_streams, used_on_current_stream
from cocodiff.kernels import Kernels, Rows
from cocodiff.routes.choice import Chunking, ExchangeTable, megabytes_per_rank
from cocodiff.routes.chunks import Stages
from cocodiff.routes.detours import nic_detours
from cocodiff.routes.plans import PLANS, Block, Phase, Plan, reverse, scored_blocks, split_plan
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.relay import Blocks, Freight, Shapes, Travelling, relay
from cocodiff.wire.staged import Staged

R = TypeVar("R")
T = TypeVar("T")
Land = Callable[[Blocks], None]  # puts blocks in their places of the result, those that belong there
Assemble = Callable[[Freight], tuple[R, Land]]  # makes the empty result
TOGETHER = ("flat", "split", "auto")  # exchanges whose phases run at once, each message as soon as its blocks are here


class Exchange:
    """One rank's end of an exchange.

    Tensors given together travel together: q, k and v in one message to each peer.
    """

    def __init__(
        self,
        name: str,
        topology: Topology,
        transport: Ranks,
        trace: Trace,
        table: ExchangeTable | None = None,
        nic_balance: bool = True,
        kernels: Kernels | None = None,
        chunking: Chunking | None = None,
    ) -> None:
        """table: for "auto", which exchange to take for which size. nic_balance: of split, between nodes.
        kernels: what packs and unpacks; by default whatever suits the device, noted in the trace. chunking: in how many
        stages tensors can travel besides."""
        self.rank, self._topology, self._trace, self._table = transport.rank, topology, trace, table
        self.kernels = kernels or Kernels(note=trace.note_kernel)
        self._together = name in TOGETHER
        plans = {known: PLANS[known](topology, self.rank) for known in (PLANS if name == "auto" else (name,))}
        if "split" in plans and nic_balance:
            plans["split"] = split_plan(topology, self.rank, nic_detours(topology))
        self._routes = {known: _routes(plan) for known, plan in plans.items()}
        self._name = next(iter(plans))
        self._lanes: dict[str, tuple[Lane, Group]] = {}
        # every rank makes a group here, also one without a part in the phase or a sibling
        for name in dict.fromkeys(phase.lane for plan in plans.values() for phase in plan):
            members = topology.cards[topology.places[self.rank].card] if name == "sibling" else range(topology.size)
            self._lanes[name] = (transport.lane(name), transport.group(members))
        self.staged: Staged | None = None
        if chunking is not None and chunking.chunks > 1:
            stages = Stages(topology, self.rank, chunking.chunks)
            if len(stages.chunks) > 1:
                self.staged = Staged(self, topology, transport, trace, plans, stages, chunking.from_mb)

    def forward(
        self, tensors_BLHD: Sequence[Travelling], layout: Layout, name: str = "qkv", layer: str = "", soon: bool = False
    ) -> LanePending[list[Tensor]]:
        """Sends this rank's rows of each tensor and returns all rows of its own heads, each [B, S, G, D].

        soon: the caller waits for them next, so there is nothing to travel behind.
        """
        return self.forward_when(lambda: (tensors_BLHD, layout), name, layer, soon=soon)

    def forward_when(
        self,
        ready: Callable[[], tuple[Sequence[Travelling], Layout]],
        name: str,
        layer: str,
        after_first: Callable[[Freight], Freight] | None = None,
        soon: bool = False,
    ) -> LanePending[list[Tensor]]:
        """As `forward`, of tensors and a layout that are asked for on the first lane, which may wait for them.

        after_first: what becomes of the blocks between TAPA's two phases, on the second one's lane.
        """

        def own_blocks() -> Freight:
            return self.freight_of(*ready())

        way = "forward" if after_first is None else "both phases"
        return self._route(way, own_blocks, self.room, (name, layer), after_first, soon)

    def freight_of(self, tensors_BLHD: Sequence[Travelling], layout: Layout) -> Freight:
        """This rank's rows of each tensor as blocks."""
        of_tensors = [x.split_with_sizes(layout.heads, 2) for x in tensors_BLHD]
        blocks: Blocks = {
            Block(self.rank, peer): list(parts) for peer, parts in enumerate(zip(*of_tensors, strict=True))
        }
        return Freight(blocks, layout)

    def room(self, freight: Freight) -> tuple[list[Tensor], Land]:
        """For each tensor of the freight empty room for all rows of this rank's heads, and what fills it."""
        blocks, layout = freight
        first = blocks[Block(self.rank, self.rank)]
        shape = (len(first[0]), sum(layout.rows), layout.heads[self.rank], first[0].shape[-1])
        received_BSGD = [x.new_empty(shape) for x in first]
        places_of = [rows_of_ranks(whole, layout) for whole in received_BSGD]

        def land(arrived: Blocks) -> None:
            mine = {block.rows: parts for block, parts in arrived.items() if block.heads == self.rank}
            places = [place_of[rank] for rank in mine for place_of in places_of]
            self._unpack([part for parts in mine.values() for part in parts], places)

        return received_BSGD, land

    def room_back(self, out_BSGD: Tensor, layout: Layout) -> tuple[Tensor, Land]:
        """The same for all heads of this rank's rows, of tensors like the given one."""
        B, _, _, D = out_BSGD.shape
        out_BLHD = out_BSGD.new_empty(B, layout.rows[self.rank], sum(layout.heads), D)
        places = out_BLHD.split_with_sizes(layout.heads, 2)

        def land(arrived: Blocks) -> None:
            mine = {block.heads: parts for block, parts in arrived.items() if block.rows == self.rank}
            self._unpack([part for (part,) in mine.values()], [places[rank] for rank in mine])

        return out_BLHD, land

    def name_of(self, freight: Freight) -> str:
        """Which exchange takes it: the one there is, or the table's choice for its size."""
        if self._table is None:
            return self._name
        some = next(iter(freight.blocks.values()))
        B, _, _, D = some[0].shape
        cell = B * D * some[0].new_empty(0).element_size() * len(some)
        return self._table.choose(megabytes_per_rank(freight.layout, cell))

    def link_class(self, peer: int) -> str | None:
        """The class of the link to a peer; None for this rank itself."""
        return self._topology.link_class(self.rank, peer)

    def carried_heads(self) -> set[int]:
        """The ranks whose heads this rank has the card's blocks of, after TAPA's first phase."""
        served = self._topology.served_planes[self.rank]
        return {place.rank for place in self._topology.places if place.plane in served}

    def scorers(self) -> list[int]:
        """The first tile of every card, in the order of the cards."""
        return [min(ranks) for ranks in self._topology.cards.values()]

    def scored_blocks(self) -> tuple[list[int], list[int]]:
        """The ranks of this rank's card, its first tile first, and the ranks whose heads are of that tile's plane."""
        return scored_blocks(self._topology, self.rank)

    def back(self, out_BSGD: Tensor, layout: Layout, name: str = "o", layer: str = "") -> LanePending[Tensor]:
        """The way back: sends all rows of this rank's heads, returns all heads of its own rows, [B, L, H, D]. To be
        waited for next."""

        def own_blocks() -> Freight:
            rows_of = rows_of_ranks(out_BSGD, layout)
            return Freight({Block(peer, self.rank): [rows_of[peer]] for peer in range(len(layout.rows))}, layout)

        return self._route(
            "back", own_blocks, lambda freight: self.room_back(out_BSGD, freight.layout), (name, layer), soon=True
        )

    def _route(
        self,
        way: str,
        freight: Callable[[], Freight],
        assemble: Assemble[R],
        about: tuple[str, str],
        after_first: Callable[[Freight], Freight] | None = None,
        soon: bool = False,
    ) -> LanePending[R]:
        """Submits every phase to its lane; the lane of a later phase waits for the phase before it.

        about: what travels, and for which kind of layer; for the trace.
        """

        def submit(lane: Lane, work: Callable[[], T]) -> LanePending[T]:
            return lane.submit_and_wait_soon(work) if soon else lane.submit(work)

        if self._together:
            return submit(self._lanes["plane"][0], lambda: self._take_all(way, about, freight(), assemble))
        plan = self._routes[self._name][way]
        *early, final = [partial(self._take_phase, phase, about) for phase in plan]
        for phase, take in zip(plan, early, strict=False):
            freight = submit(self._lanes[phase.lane][0], partial(take, freight)).wait
        before_last = freight if after_first is None else partial(_change, after_first, freight)
        return submit(self._lanes[plan[-1].lane][0], lambda: _assembled(assemble, final(before_last)))

    def _take_all(self, way: str, about: tuple[str, str], freight: Freight, assemble: Assemble[R]) -> R:
        """Runs on the plane lane: all phases together, of the exchange that the table has for this size. TAPA's come
        one by one: none can overtake another, and a phase packs all its messages in one launch."""
        name = self.name_of(freight)
        plan = self._routes[name][way]
        if name == "tapa":
            for phase in plan:
                freight = self._take_phase(phase, about, partial(_itself, freight))
            return _assembled(assemble, freight)
        groups = {name: group for name, (_, group) in self._lanes.items()}
        with self._trace.span(f"{about[0]} plane", "plane", about[1]):
            whole, land = assemble(freight)
            relay(plan, freight, groups, self.pack, self.count, land)
            return whole

    def _take_phase(self, phase: Phase, about: tuple[str, str], earlier: Callable[[], Freight]) -> Freight:
        """Runs on the phase's lane: packs, posts receives and sends, waits. Returns the old and the new blocks."""
        blocks, layout = earlier()
        if not phase.sends and not phase.receives:
            return Freight(blocks, layout)
        with self._trace.span(f"{about[0]} {phase.lane}", phase.lane, about[1]):
            group, shapes = self._lanes[phase.lane][1], Shapes(Freight(blocks, layout))
            received, receives = shapes.room(phase.receives.values())
            _, sends = shapes.room(phase.sends.values())
            messages = [[part for b in message for part in blocks[b]] for message in phase.sends.values()]
            self.pack(messages, sends)
            for peer, message in phase.sends.items():
                self.count(peer, shapes.bytes(message))
            index = group.ranks.index
            group.send_recv(
                [(sent, index(peer)) for peer, sent in zip(phase.sends, sends, strict=True)],
                [(buffer, index(peer)) for peer, buffer in zip(phase.receives, receives, strict=True)],
            ).wait()
            blocks |= shapes.blocks([b for message in phase.receives.values() for b in message], received)
        return Freight(blocks, layout)

    def count(self, peer: int, sent_bytes: int) -> None:
        self._trace.count(self.link_class(peer), sent_bytes)

    def _unpack(self, parts: list[Travelling], places: list[Tensor]) -> None:
        """All parts in one launch."""
        if parts:
            self.kernels.unpack(parts, places)

    def pack(self, messages: Sequence[Sequence[Travelling]], buffers: Sequence[Tensor]) -> None:
        """All messages in one launch."""
        pieces = [piece for message in messages for piece in message]
        chosen = any(isinstance(piece, Rows) for piece in pieces)
        if buffers and on_streams(buffers[0]):
            for piece in pieces:
                for tensor in (piece.source_RHD, piece.index_K) if isinstance(piece, Rows) else (piece,):
                    used_on_current_stream(tensor)
        if chosen:
            self.kernels.gather_pack(messages, buffers)
        elif messages:
            self.kernels.pack(cast(Sequence[Sequence[Tensor]], messages), buffers)


def rows_of_ranks(x_BSGD: Tensor, layout: Layout) -> dict[int, Tensor]:
    """Of a tensor with the whole sequence every rank's rows, as views."""
    ranks = layout.in_sequence
    parts = x_BSGD.split_with_sizes([layout.rows[rank] for rank in ranks], 1)
    return dict(zip(ranks, parts, strict=True))


def _assembled(assemble: Assemble[R], freight: Freight) -> R:
    whole, land = assemble(freight)
    land(freight.blocks)
    return whole


def _itself(freight: Freight) -> Freight:
    return freight


def _routes(plan: Plan) -> dict[str, Plan]:
    """The plan with all its phases, and both ways through those that have messages for this rank."""
    forward = tuple(phase for phase in plan if phase.sends or phase.receives)
    return {"both phases": plan, "forward": forward, "back": reverse(forward)}


def _change(change: Callable[[Freight], Freight], earlier: Callable[[], Freight]) -> Freight:
    return change(earlier())
