"""Runs the phases of a plan together: every message leaves as soon as its blocks are here.

All receives are posted first, then the sends in the plan's order; a message with blocks from another rank waits for
those alone. So what is relayed arrives behind what travels straight, and slow links are never idle for a fast one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cocodiff.attention.layout import Block, Layout, Phase, Plan
from cocodiff.comm.transport import Group, Pending
from cocodiff.device import used_on_current_stream
from cocodiff.kernels import Rows, views

Travelling = Tensor | Rows  # [B, L, H, D], or rows chosen of it
Blocks = dict[Block, list[Travelling]]  # a block of each tensor that travels together, [B, rows, heads, D]
Shape = tuple[int, ...]


class Freight(NamedTuple):
    """What a rank holds between two phases: the blocks that pass through it, and the layout that tells their shapes."""

    blocks: Blocks
    layout: Layout


@dataclass
class Letter:
    """A message on its way here. `open` puts its blocks where the others are, once."""

    message: tuple[Block, ...]
    shapes: list[Shape]
    copies: int
    buffer: Tensor
    pending: Pending | None = None
    opened: bool = False

    def open(self, blocks: Blocks) -> None:
        if self.opened:
            return
        assert self.pending is not None, "a block is sent on in a later phase than it arrives"
        self.pending.wait()
        parts = iter(views(self.buffer, self.shapes))
        for block in self.message:
            blocks[block] = [next(parts) for _ in range(self.copies)]
        self.opened = True


def relay(
    plan: Plan, freight: Freight, groups: Mapping[str, Group],
    pack: Callable[[Sequence[Sequence[Travelling]], Sequence[Tensor]], None], count: Callable[[int, int], None],
    land: Callable[[Blocks], None],
) -> None:  # fmt: skip
    """Sends and receives all messages of the plan.

    groups: of every lane that a phase names. pack: copies messages to buffers. count: called with the peer and the
    bytes of each message sent. land: called with the blocks that are here, then with those of each message that comes,
    while later ones still travel.
    """
    blocks, layout = dict(freight.blocks), freight.layout
    like, copies = next(iter(blocks.values()))[0], len(next(iter(blocks.values())))
    B, _, _, D = like.shape
    rows, heads = layout.rows, layout.heads

    def shapes(message: Sequence[Block]) -> list[Shape]:
        return [(B, rows[b.rows], heads[b.heads], D) for b in message for _ in range(copies)]

    def buffer(message: Sequence[Block]) -> Tensor:
        return like.new_empty(sum(math.prod(shape) for shape in shapes(message)))

    def packed(peer: int, message: Sequence[Block]) -> Tensor:
        for block in message:
            if block not in blocks:
                bringing[block].open(blocks)
        parts = [part for block in message for part in blocks[block]]
        sent = as_one(parts)
        if sent is None:
            sent = buffer(message)
            pack([parts], [sent])
        used_on_current_stream(sent)
        count(peer, sent.nbytes)
        return sent

    letters = [{peer: Letter(m, shapes(m), copies, buffer(m)) for peer, m in phase.receives.items()} for phase in plan]
    bringing = {block: letter for of_phase in letters for letter in of_phase.values() for block in letter.message}
    if all(group.receives_ahead for group in groups.values()):
        sending = _post_ahead(plan, letters, packed, groups)
    else:
        sending = [_post_phase(phase, of, packed, groups[phase.lane]) for phase, of in zip(plan, letters, strict=True)]
    land(freight.blocks)
    for of_phase in letters:
        for letter in of_phase.values():
            letter.open(blocks)
            land({block: blocks[block] for block in letter.message})
    for pending in sending:
        pending.wait()


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


Packed = Callable[[int, Sequence[Block]], Tensor]


def _post_ahead(
    plan: Plan, letters: list[dict[int, Letter]], packed: Packed, groups: Mapping[str, Group]
) -> list[Pending]:
    """Every receive on its own, so that each can be waited for; then every send as soon as it can be packed."""
    for phase, of_phase in zip(plan, letters, strict=True):
        group = groups[phase.lane]
        for peer, letter in of_phase.items():
            letter.pending = group.send_recv([], [(letter.buffer, group.ranks.index(peer))])
    sending = []
    for phase in plan:
        group = groups[phase.lane]
        for peer, message in phase.sends.items():
            sending.append(group.send_recv([(packed(peer, message), group.ranks.index(peer))], []))
    return sending


def _post_phase(phase: Phase, letters: dict[int, Letter], packed: Packed, group: Group) -> Pending:
    """One call for the whole phase, for backends that match the two lists of a call."""
    pending = group.send_recv(
        [(packed(peer, message), group.ranks.index(peer)) for peer, message in phase.sends.items()],
        [(letter.buffer, group.ranks.index(peer)) for peer, letter in letters.items()],
    )
    for letter in letters.values():
        letter.pending = pending
    return pending
