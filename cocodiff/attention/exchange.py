"""The exchange: from sequence-parallel to head-parallel layout and back, along any plan (flat, TAPA).

One executor runs every plan. Each phase packs its messages, posts all receives before all sends and waits, on the
lane of its link group; nothing in it knows which exchange it is. A block travels through intermediate ranks unchanged,
so the result has the same bits whatever the route.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

from torch import Tensor

from cocodiff.attention.layout import PLANS, Block, Layout, Phase, Plan, reverse, scored_blocks
from cocodiff.comm.transport import Group, Lane, LanePending, Transport
from cocodiff.device import used_on_current_stream
from cocodiff.kernels import Kernels, Rows, views
from cocodiff.topology import Topology
from cocodiff.trace import Trace

R = TypeVar("R")
Travelling = Tensor | Rows  # [B, L, H, D], or rows chosen of it
Blocks = dict[Block, list[Travelling]]  # a block of each tensor that travels together, [B, rows, heads, D]


class Freight(NamedTuple):
    """What a rank holds between two phases: the blocks that pass through it, and the layout that tells their shapes."""

    blocks: Blocks
    layout: Layout


class Exchange:
    """One rank's end of an exchange.

    Tensors given together travel together: q, k and v in one message to each peer.
    """

    def __init__(
        self, name: str, topology: Topology, transport: Transport, trace: Trace, kernels: Kernels | None = None
    ) -> None:
        """kernels: what packs and unpacks; by default whatever suits the device, noted in the trace."""
        self.rank, self._topology, self._trace = transport.rank, topology, trace
        self.kernels = kernels or Kernels(note=trace.note_kernel)
        self._plan = plan = PLANS[name](topology, self.rank)
        self._forward: Plan = tuple(phase for phase in plan if phase.sends or phase.receives)
        self._back: Plan = reverse(self._forward)
        self._lanes: dict[str, tuple[Lane, Group]] = {}
        for phase in plan:  # every rank makes a group here, also one without a part in the phase or a sibling
            members = (
                topology.cards[topology.places[self.rank].card] if phase.lane == "sibling" else range(topology.size)
            )
            self._lanes[phase.lane] = (transport.lane(phase.lane), transport.group(members))

    def forward(
        self, tensors_BLHD: Sequence[Travelling], layout: Layout, name: str = "qkv", layer: str = ""
    ) -> LanePending[list[Tensor]]:
        """Sends this rank's rows of each tensor and returns all rows of its own heads, each [B, S, G, D]."""
        return self.forward_when(lambda: (tensors_BLHD, layout), name, layer)

    def forward_when(
        self,
        ready: Callable[[], tuple[Sequence[Travelling], Layout]],
        name: str,
        layer: str,
        after_first: Callable[[Freight], Freight] | None = None,
    ) -> LanePending[list[Tensor]]:
        """As `forward`, of tensors and a layout that are asked for on the first lane, which may wait for them.

        after_first: what becomes of the blocks between TAPA's two phases, on the second one's lane.
        """

        def own_blocks() -> Freight:
            tensors_BLHD, layout = ready()
            return Freight(
                {
                    Block(self.rank, peer): [_of_heads(x, heads) for x in tensors_BLHD]
                    for peer, heads in enumerate(layout.head_slices)
                },
                layout,
            )

        def assemble(freight: Freight) -> list[Tensor]:
            blocks, layout = freight
            first = blocks[Block(self.rank, self.rank)]
            shape = (len(first[0]), sum(layout.rows), layout.heads[self.rank], first[0].shape[-1])
            received_BSGD = [x.new_empty(shape) for x in first]
            parts: list[Travelling] = []
            places = []
            for peer, rows in enumerate(layout.row_slices):
                parts += blocks[Block(peer, self.rank)]
                places += [whole[:, rows] for whole in received_BSGD]
            self.kernels.unpack(parts, places)
            return received_BSGD

        plan = self._forward if after_first is None else self._plan
        return self._route(plan, own_blocks, assemble, (name, layer), after_first)

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
        """The way back: sends all rows of this rank's heads, returns all heads of its own rows, [B, L, H, D]."""

        def own_blocks() -> Freight:
            blocks: Blocks = {
                Block(peer, self.rank): [out_BSGD[:, rows]] for peer, rows in enumerate(layout.row_slices)
            }
            return Freight(blocks, layout)

        def assemble(freight: Freight) -> Tensor:
            B, _, _, D = out_BSGD.shape
            out_BLHD = out_BSGD.new_empty(B, layout.rows[self.rank], sum(layout.heads), D)
            parts = [freight.blocks[Block(self.rank, peer)][0] for peer in range(len(layout.heads))]
            self.kernels.unpack(parts, [out_BLHD[:, :, heads] for heads in layout.head_slices])
            return out_BLHD

        return self._route(self._back, own_blocks, assemble, (name, layer))

    def _route(
        self, plan: Plan, freight: Callable[[], Freight], assemble: Callable[[Freight], R], about: tuple[str, str],
        after_first: Callable[[Freight], Freight] | None = None,
    ) -> LanePending[R]:  # fmt: skip
        """Submits every phase to its lane; the lane of a later phase waits for the phase before it.

        about: what travels, and for which kind of layer; for the trace.
        """
        *early, final = [partial(self._take_phase, phase, about) for phase in plan]
        for phase, take in zip(plan, early, strict=False):
            freight = self._lanes[phase.lane][0].submit(partial(take, freight)).wait
        before_last = freight if after_first is None else partial(_change, after_first, freight)
        return self._lanes[plan[-1].lane][0].submit(lambda: assemble(final(before_last)))

    def _take_phase(self, phase: Phase, about: tuple[str, str], earlier: Callable[[], Freight]) -> Freight:
        """Runs on the phase's lane: packs, posts receives and sends, waits. Returns the old and the new blocks."""
        blocks, layout = earlier()
        if not phase.sends and not phase.receives:
            return Freight(blocks, layout)
        with self._trace.span(f"{about[0]} {phase.lane}", phase.lane, about[1]):
            group = self._lanes[phase.lane][1]
            like, copies = next(iter(blocks.values()))[0], len(next(iter(blocks.values())))
            B, _, _, D = like.shape

            def shapes(message: Sequence[Block]) -> list[tuple[int, ...]]:
                return [(B, layout.rows[b.rows], layout.heads[b.heads], D) for b in message for _ in range(copies)]

            def buffer(message: Sequence[Block]) -> Tensor:
                return like.new_empty(sum(math.prod(shape) for shape in shapes(message)))

            receives = {peer: buffer(message) for peer, message in phase.receives.items()}
            sends = {peer: buffer(message) for peer, message in phase.sends.items()}
            self._pack([[part for b in message for part in blocks[b]] for message in phase.sends.values()], sends)
            for peer, sent in sends.items():
                self._trace.count(self._topology.link_class(self.rank, peer), sent.nbytes)
            index = group.ranks.index
            group.send_recv(
                [(sent, index(peer)) for peer, sent in sends.items()],
                [(received, index(peer)) for peer, received in receives.items()],
            ).wait()
            for peer, message in phase.receives.items():
                parts = iter(views(receives[peer], shapes(message)))
                blocks |= {b: [next(parts) for _ in range(copies)] for b in message}
        return Freight(blocks, layout)

    def _pack(self, messages: Sequence[Sequence[Travelling]], sends: Mapping[int, Tensor]) -> None:
        """All messages of a phase, in one launch."""
        pieces = [piece for message in messages for piece in message]
        for piece in pieces:
            for tensor in (piece.source_RHD, piece.index_K) if isinstance(piece, Rows) else (piece,):
                used_on_current_stream(tensor)
        if any(isinstance(piece, Rows) for piece in pieces):
            self.kernels.gather_pack(messages, list(sends.values()))
        elif sends:
            self.kernels.pack(cast(Sequence[Sequence[Tensor]], messages), list(sends.values()))


def _of_heads(x_BLHD: Travelling, heads: slice) -> Travelling:
    return x_BLHD.heads(heads) if isinstance(x_BLHD, Rows) else x_BLHD[:, :, heads]


def _change(change: Callable[[Freight], Freight], earlier: Callable[[], Freight]) -> Freight:
    return change(earlier())
