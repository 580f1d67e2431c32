"""The messages of a plan, and the blocks in them: sized, packed, sent, received, passed on and put in place.

This is the only module that computes sizes of messages. A payload, which a codec sends instead of a tensor, is [B,
rows, heads, W] of any dtype. So all sizes follow from one payload block and the layout of the call.

`run_phase` runs one phase and returns when its messages have arrived: TAPA, phase by phase. `run_pipelined` runs all
phases together. All receives are posted first, then the sends in the plan's order. A message with blocks from another
rank waits for those blocks only. So blocks that are passed on arrive behind those that go straight, and slow links
never idle while a fast one is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import cast

from torch import Tensor

from cocodiff.comm.transport import Group, Pending, RankContext
from cocodiff.kernels import Kernels, Rows, views
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import Block, Phase, Plan

Groups = Mapping[str, Group]  # by the link group ("sibling", "plane") that a phase names
SentMessages = tuple[Sequence[int], Pending]  # the ranks that messages go to, and the messages
Payload = Tensor | Rows  # [B, L, H, W], or chosen rows of such a tensor
Blocks = Mapping[Block, Sequence[Payload]]  # payloads of each block that are sent together, [B, rows, heads, W]


class BlockSet:
    """The blocks that a rank holds during an exchange, and their sizes in messages."""

    def __init__(self, blocks: Blocks, layout: Layout, whole: tuple[Layout, int]) -> None:
        """Hold some blocks.

        Args:
            blocks: for each block, one payload for each tensor that is sent together.
            layout: rows and heads of every rank in the payloads.
            whole: the layout of the tensors before encoding, and the bytes of one of their tokens and heads, all
                tensors together.
        """
        self.blocks, self.layout, self.whole = dict(blocks), layout, whole
        some = next(iter(blocks.values()))
        self.like, self.widths = some[0], [one.shape[-1] for one in some]
        self._batch, self._width = len(self.like), sum(self.widths)
        self._itemsize = self.like.new_empty(0).element_size()

    def contained_tensors(self) -> list[Payload]:
        """Return all payloads."""
        return [payload for payloads in self.blocks.values() for payload in payloads]

    @property
    def cell_bytes(self) -> int:
        """The bytes of one token and head of the payloads, all tensors together."""
        return self._batch * self._width * self._itemsize

    def numel(self, message: Sequence[Block]) -> int:
        """Return the number of elements of a message."""
        rows, heads = self.layout.rows, self.layout.heads
        return sum([rows[block.rows] * heads[block.heads] for block in message]) * self._batch * self._width

    def bytes(self, message: Sequence[Block]) -> int:
        """Return the bytes of a message."""
        return self.numel(message) * self._itemsize

    def whole_bytes(self, message: Sequence[Block]) -> int:
        """Return the bytes that a message would have without encoding."""
        layout, cell = self.whole
        return cell * sum([layout.rows[block.rows] * layout.heads[block.heads] for block in message])

    def buffer(self, message: Sequence[Block]) -> Tensor:
        """Allocate a flat buffer for one message."""
        return self.like.new_empty(self.numel(message))

    def buffers(self, messages: Iterable[Sequence[Block]]) -> tuple[Tensor, Sequence[Tensor]]:
        """Allocate one flat buffer for several messages. Return it, and the part of each message."""
        sizes = [self.numel(message) for message in messages]
        whole = self.like.new_empty(sum(sizes))
        return whole, whole.split_with_sizes(sizes)

    def views(self, message: Sequence[Block], buffer: Tensor) -> dict[Block, list[Payload]]:
        """Return the blocks of a message as views of its flat buffer."""
        B, rows, heads = self._batch, self.layout.rows, self.layout.heads
        parts = iter(views(buffer, [(B, rows[b.rows], heads[b.heads], W) for b in message for W in self.widths]))
        return {block: [next(parts) for _ in self.widths] for block in message}


class Target:
    """The tensors that an exchange fills."""

    def __init__(self, tensors: Sequence[Tensor], places: Mapping[Block, Sequence[Tensor]], kernels: Kernels) -> None:
        """Describe where blocks belong.

        Args:
            places: for every block that belongs here, its place in each of `tensors`.
        """
        self.tensors, self._places, self._kernels = tensors, places, kernels

    def contained_tensors(self) -> Sequence[Tensor]:
        """Return the tensors."""
        return self.tensors

    def place(self, blocks: Blocks) -> None:
        """Copy those blocks that belong here to their places, in one launch."""
        here = [block for block in blocks if block in self._places]
        if here:
            parts = [part for block in here for part in blocks[block]]
            self._kernels.unpack(parts, [place for block in here for place in self._places[block]])


def blocks_of(x_BTHW: Tensor, sizes: Sequence[int], dim: int, in_turn: bool) -> Sequence[Tensor]:
    """Return the blocks of a tensor, cut along `dim` into these sizes.

    Args:
        in_turn: True if blocks were encoded separately. They then lie one after the other in memory, regardless of the
            tensor's strides.
    """
    if not in_turn:
        return x_BTHW.split_with_sizes(sizes, dim)
    B, T, H, W = x_BTHW.shape
    return views(x_BTHW.view(-1), [(B, size, H, W) if dim == 1 else (B, T, size, W) for size in sizes])


def pack(kernels: Kernels, messages: Sequence[Sequence[Payload]], buffers: Sequence[Tensor]) -> None:
    """Copy all messages to their buffers in one launch."""
    if any(isinstance(piece, Rows) for message in messages for piece in message):
        kernels.gather_pack(messages, buffers)
    elif messages:
        kernels.pack(cast(Sequence[Sequence[Tensor]], messages), buffers)


def run_phase(here: RankContext, phase: Phase, held: BlockSet, group: Group) -> None:
    """Send and receive all messages of a phase at once, wait for them, and add the received blocks to `held`."""
    received, receives = held.buffers(phase.receives.values())
    _, sends = held.buffers(phase.sends.values())
    pieces = [[part for b in message for part in held.blocks[b]] for message in phase.sends.values()]
    pack(here.kernels, pieces, sends)
    for peer, message in phase.sends.items():
        here.count(peer, held.bytes(message), held.whole_bytes(message))
    index = group.ranks.index
    group.collective(
        [(sent, index(peer)) for peer, sent in zip(phase.sends, sends, strict=True)],
        [(buffer, index(peer)) for peer, buffer in zip(phase.receives, receives, strict=True)],
    ).wait()
    held.blocks |= held.views([b for message in phase.receives.values() for b in message], received)


def run_pipelined(here: RankContext, plan: Plan, held: BlockSet, groups: Groups, target: Target) -> None:
    """Send and receive all messages of a plan. Blocks that are already here are put in place meanwhile."""
    flight = InFlight(here, held)
    flight.post_receives(plan, groups)
    sending = flight.send(plan, groups)
    target.place(held.blocks)
    flight.land(target)
    for _, pending in sending:
        pending.wait()


class PendingReceive:
    """A message that is to be received."""

    def __init__(self, message: tuple[Block, ...], buffer: Tensor) -> None:
        self.message, self.buffer = message, buffer
        self.pending: Pending | None = None
        self._opened = False

    def open(self, held: BlockSet) -> None:
        """Wait for the message and add its blocks to those held. A second call does nothing."""
        if not self._opened:
            assert self.pending is not None, "a message is sent on before it was asked for"
            self.pending.wait()
            self._opened = True
            held.blocks |= held.views(self.message, self.buffer)


class InFlight:
    """The messages of one plan while they are sent and received."""

    def __init__(self, here: RankContext, held: BlockSet) -> None:
        self._here, self._held = here, BlockSet(held.blocks, held.layout, held.whole)
        self._phases: list[dict[int, PendingReceive]] = []
        self._bringing: dict[Block, PendingReceive] = {}

    def contained_tensors(self) -> list[Tensor]:
        """Return the receive buffers. The blocks to send belong to the `BlockSet` that this was made from."""
        return [receive.buffer for receives in self._phases for receive in receives.values()]

    def post_receives(self, plan: Plan, groups: Groups) -> None:
        """Allocate buffers for all messages of the plan. If the backend can receive ahead, post each receive
        separately."""
        for phase in plan:
            receives = {p: PendingReceive(message, self._held.buffer(message)) for p, message in phase.receives.items()}
            self._phases.append(receives)
            self._bringing |= {block: receive for receive in receives.values() for block in receive.message}
            group = groups[phase.lane]
            for peer, receive in receives.items() if _receives_ahead(groups) else ():
                receive.pending = group.send_recv([], [(receive.buffer, group.ranks.index(peer))])

    def send(self, plan: Plan, groups: Groups, first: int = 0) -> list[SentMessages]:
        """Send every message as soon as it can be packed.

        If receives cannot be posted ahead, each phase is one launch and one call. Such backends match both lists of a
        call.

        Args:
            first: index of this plan's first phase among those given to `post_receives`.
        """
        sending: list[SentMessages] = []
        for phase, receives in zip(plan, self._phases[first:], strict=False):
            group = groups[phase.lane]
            if _receives_ahead(groups):
                for peer, message in phase.sends.items():
                    (sent,) = self._packed({peer: message})
                    sending.append(((peer,), group.send_recv([(sent, group.ranks.index(peer))], [])))
                continue
            packed = self._packed(phase.sends)
            pending = group.collective(
                [(sent, group.ranks.index(peer)) for peer, sent in zip(phase.sends, packed, strict=True)],
                [(receive.buffer, group.ranks.index(peer)) for peer, receive in receives.items()],
            )
            sending.append((list(phase.sends), pending))
            for receive in receives.values():
                receive.pending = pending
        return sending

    def land(self, target: Target) -> None:
        """Wait for every message, put its blocks in place (those of one call together), and free its memory."""
        for receives in self._phases:
            for _, came in groupby(receives.values(), key=lambda receive: id(receive.pending)):
                blocks: list[Block] = []
                for receive in came:
                    receive.open(self._held)
                    blocks += receive.message
                target.place({block: self._held.blocks[block] for block in blocks})
        self._phases, self._bringing, self._held.blocks = [], {}, {}

    def _packed(self, messages: Mapping[int, Sequence[Block]]) -> list[Tensor]:
        """Return each message as one flat tensor. Those that are not contiguous already are packed in one launch."""
        found, pieces, buffers = [], [], []
        for peer, message in messages.items():
            for block in message:
                if block not in self._held.blocks:
                    self._bringing[block].open(self._held)
            parts = [part for block in message for part in self._held.blocks[block]]
            sent = as_one(parts)
            if sent is None:
                sent = self._held.buffer(message)
                pieces.append(parts)
                buffers.append(sent)
            self._here.count(peer, self._held.bytes(message), self._held.whole_bytes(message))
            found.append(sent)
        if buffers:
            pack(self._here.kernels, pieces, buffers)
        return found


def _receives_ahead(groups: Groups) -> bool:
    """Return True if receives may be posted ahead in all groups."""
    return all(group.receives_ahead for group in groups.values())


def as_one(pieces: Sequence[Payload]) -> Tensor | None:
    """Return pieces as one flat tensor if they lie one after the other in memory, else None. Most pieces that are
    passed on do."""
    parts = [piece for piece in pieces if isinstance(piece, Tensor) and piece.numel()]  # an empty one has no address
    if not parts or any(isinstance(piece, Rows) for piece in pieces):
        return None
    whole, end = parts[0], parts[0].data_ptr()
    storage = whole.untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.nbytes
    return whole.as_strided((sum(part.numel() for part in parts),), (1,))
