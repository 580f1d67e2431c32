"""Runs the phases of a plan together: every message leaves as soon as its blocks are here.

All receives are posted first, then the sends in the plan's order; a message with blocks from another rank waits for
those alone. So what is relayed arrives behind what travels straight, and slow links are never idle for a fast one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from cocodiff.comm.transport import Group, Pending
from cocodiff.device import used_on_current_stream
from cocodiff.kernels import Rows, views
from cocodiff.routes.plans import Block, Plan
from cocodiff.topology.layout import Layout

Travelling = Tensor | Rows  # [B, L, H, D], or rows chosen of it
Blocks = dict[Block, list[Travelling]]  # a block of each tensor that travels together, [B, rows, heads, D]
Groups = Mapping[str, Group]  # of every lane that a phase names
SentTo = tuple[Sequence[int], Pending]  # the ranks that a transfer goes to
Pack = Callable[[Sequence[Sequence[Travelling]], Sequence[Tensor]], None]


class Freight(NamedTuple):
    """What a rank holds between two phases: the blocks that pass through it, and the layout that tells their shapes."""

    blocks: Blocks
    layout: Layout


class Shapes:
    """What messages of a freight look like: how large they are, and where their blocks lie in them."""

    def __init__(self, freight: Freight) -> None:
        some = next(iter(freight.blocks.values()))
        self._like, self._copies = some[0], len(some)
        self._layout = freight.layout
        self._batch, self._channels = len(self._like), self._like.shape[-1]
        self._itemsize = self._like.new_empty(0).element_size()

    def numel(self, message: Sequence[Block]) -> int:
        rows, heads = self._layout.rows, self._layout.heads
        cells = sum([rows[block.rows] * heads[block.heads] for block in message])
        return cells * self._batch * self._channels * self._copies

    def bytes(self, message: Sequence[Block]) -> int:
        return self.numel(message) * self._itemsize

    def buffer(self, message: Sequence[Block]) -> Tensor:
        """Memory for a message, flat."""
        return self._like.new_empty(self.numel(message))

    def room(self, messages: Iterable[Sequence[Block]]) -> tuple[Tensor, Sequence[Tensor]]:
        """Memory for messages that come and go together, flat: all of it, and each one's part."""
        sizes = [self.numel(message) for message in messages]
        whole = self._like.new_empty(sum(sizes))
        return whole, whole.split_with_sizes(sizes)

    def blocks(self, message: Sequence[Block], buffer: Tensor) -> Blocks:
        """The blocks of a message, as they lie in a flat buffer."""
        B, D, rows, heads = self._batch, self._channels, self._layout.rows, self._layout.heads
        copies = range(self._copies)
        parts = iter(views(buffer, [(B, rows[b.rows], heads[b.heads], D) for b in message for _ in copies]))
        return {block: [next(parts) for _ in copies] for block in message}


@dataclass
class Letter:
    """A message on its way here. `open` puts its blocks where the others are, once."""

    message: tuple[Block, ...]
    shapes: Shapes
    buffer: Tensor
    pending: Pending | None = None
    opened: bool = False

    def open(self, blocks: Blocks) -> None:
        if self.opened:
            return
        assert self.pending is not None, "a block is sent on in a later phase than it arrives"
        self.pending.wait()
        blocks |= self.shapes.blocks(self.message, self.buffer)
        self.opened = True


def relay(
    plan: Plan,
    freight: Freight,
    groups: Groups,
    pack: Pack,
    count: Callable[[int, int], None],
    land: Callable[[Blocks], None],
) -> None:
    """Sends and receives all messages of the plan.

    groups: of every lane that a phase names. pack: copies messages to buffers. count: called with the peer and the
    bytes of each message sent. land: called with the blocks that are here, then with those of each message that comes,
    while later ones still travel (of a phase's messages together, where they come in one call).
    """
    journey = Journey(freight, pack, count)
    journey.receive(plan, groups)
    sending = journey.send(plan, groups)
    land(freight.blocks)
    journey.land(land)
    for _, pending in sending:
        pending.wait()


class Journey:
    """What one exchange has under way: blocks that are here, and messages that come."""

    def __init__(self, freight: Freight, pack: Pack, count: Callable[[int, int], None]) -> None:
        self._blocks, self._shapes = dict(freight.blocks), Shapes(freight)
        self._pack, self._count = pack, count
        self._letters: list[dict[int, Letter]] = []
        self._bringing: dict[Block, Letter] = {}

    def receive(self, plan: Plan, groups: Groups) -> None:
        """Makes room for every message of the plan and, where the backend can, posts each receive on its own, so that
        each can be waited for."""
        for phase in plan:
            letters = {
                peer: Letter(message, self._shapes, self._shapes.buffer(message))
                for peer, message in phase.receives.items()
            }
            self._letters.append(letters)
            self._bringing |= {block: letter for letter in letters.values() for block in letter.message}
            group = groups[phase.lane]
            for peer, letter in letters.items() if _ahead(groups) else ():
                letter.pending = group.send_recv([], [(letter.buffer, group.ranks.index(peer))])

    def send(self, plan: Plan, groups: Groups, first: int = 0) -> list[SentTo]:
        """Sends every message as soon as it can be packed. Where receives cannot be posted ahead: one launch and one
        call for the whole phase, for backends that match the two lists of a call. first: the number of this plan's
        first phase among those that were given to `receive`."""
        sending: list[SentTo] = []
        for phase, letters in zip(plan, self._letters[first:], strict=False):
            group = groups[phase.lane]
            if _ahead(groups):
                for peer, message in phase.sends.items():
                    (sent,) = self._packed({peer: message})
                    sending.append(((peer,), group.send_recv([(sent, group.ranks.index(peer))], [])))
                continue
            packed = self._packed(phase.sends)
            pending = group.send_recv(
                [(sent, group.ranks.index(peer)) for peer, sent in zip(phase.sends, packed, strict=True)],
                [(letter.buffer, group.ranks.index(peer)) for peer, letter in letters.items()],
            )
            sending.append((list(phase.sends), pending))
            for letter in letters.values():
                letter.pending = pending
        return sending

    def land(self, land: Callable[[Blocks], None]) -> None:
        """Waits for every message and hands over its blocks, those that came in one call together; then forgets them
        all, so that their memory is free."""
        for of_phase in self._letters:
            for _, came in groupby(of_phase.values(), key=lambda letter: id(letter.pending)):
                blocks: list[Block] = []
                for letter in came:
                    letter.open(self._blocks)
                    blocks += letter.message
                land({block: self._blocks[block] for block in blocks})
        for forgotten in (self._letters, self._bringing, self._blocks):
            forgotten.clear()

    def _packed(self, messages: Mapping[int, Sequence[Block]]) -> list[Tensor]:
        """Each message as one flat tensor. Those that do not lie in memory so already are packed in one launch."""
        found, pieces, buffers = [], [], []
        for peer, message in messages.items():
            for block in message:
                if block not in self._blocks:
                    self._bringing[block].open(self._blocks)
            parts = [part for block in message for part in self._blocks[block]]
            sent = as_one(parts)
            if sent is None:
                sent = self._shapes.buffer(message)
                pieces.append(parts)
                buffers.append(sent)
            used_on_current_stream(sent)
            self._count(peer, self._shapes.bytes(message))
            found.append(sent)
        if buffers:
            self._pack(pieces, buffers)
        return found


def _ahead(groups: Groups) -> bool:
    return all(group.receives_ahead for group in groups.values())


def as_one(pieces: Sequence[Travelling]) -> Tensor | None:
    """Pieces that lie one behind the other in memory, as most relayed ones do, as one flat tensor; else None."""
    parts = [piece for piece in pieces if isinstance(piece, Tensor) and piece.numel()]  # an empty one has no place
    if not parts or any(isinstance(piece, Rows) for piece in pieces):
        return None
    whole, end = parts[0], parts[0].data_ptr()
    storage = whole.untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.nbytes
    return whole.as_strided((sum(part.numel() for part in parts),), (1,))
