"""The messages of a plan, and the blocks in them: sized, packed, sent, received, passed on and put in place.

This is the only module that computes sizes of messages. A payload, which a codec sends instead of a tensor, is [B,
rows, heads, W] of any dtype. So all sizes follow from one payload block and the layout of the call.

`run_phase` runs one phase and returns when its messages have arrived: TAPA, phase by phase. `run_pipelined` runs all
phases together. All receives are posted first, then the sends in the plan's order. A message with blocks from another
rank waits for those blocks only. So blocks that are passed on arrive behind those that go straight, and slow links
never idle while a fast one is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, cast

import torch
from cocodiff_sycl.parts import BlockCut
from torch import Tensor

from cocodiff.comm.transport import Group, Pending, RankContext
from cocodiff.kernels import Kernels, Rows
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import Block, Phase, Plan

Groups = Mapping[str, Group]  # by the link group ("sibling", "plane") that a phase names
SentMessages = tuple[Sequence[int], Pending]  # the ranks that messages go to, and the messages
Payload = Tensor | Rows  # what is sent in a tensor's place: [B, L, H, W], or chosen rows of such a tensor
Blocks = Mapping[Block, Sequence[Payload]]  # payloads of each block that are sent together, [B, rows, heads, W]


class BlockSet:
    """The blocks that a rank holds during an exchange, with the sizes of messages made of them.

    A block is the rows of one rank for the heads of another.
    """

    def __init__(self, blocks: Blocks, layout: Layout, whole: tuple[Layout, int]) -> None:
        """Hold some blocks.

        Args:
            blocks: for each block one payload [B, rows, heads, W] for each tensor that is sent together.
            layout: rows and heads of every rank in the payloads.
            whole: the layout of the tensors before encoding, and the bytes of one token for one head in all of them
                together.
        """
        self.blocks, self.layout, self.whole = dict(blocks), layout, whole
        some = next(iter(blocks.values()))
        self.like, self.widths = some[0], [one.shape[-1] for one in some]
        self._batch, self._width = len(self.like), sum(self.widths)
        self._itemsize = self.like.new_empty(0).element_size()

    def contained_tensors(self) -> list[Payload]:
        """Return all payloads. `used_on_current_stream` asks for them, to tell the allocator which streams use their
        memory."""
        return [payload for payloads in self.blocks.values() for payload in payloads]

    @property
    def cell_bytes(self) -> int:
        """The bytes of one token for one head in the payloads, over the batch and all tensors that are sent
        together."""
        return self._batch * self._width * self._itemsize

    def numel(self, message: Sequence[Block]) -> int:
        """Return the number of elements of a message, given the blocks in it."""
        rows, heads = self.layout.rows, self.layout.heads
        return sum([rows[block.rows] * heads[block.heads] for block in message]) * self._batch * self._width

    def bytes(self, message: Sequence[Block]) -> int:
        """Return the number of bytes of a message, given the blocks in it."""
        return self.numel(message) * self._itemsize

    def whole_bytes(self, message: Sequence[Block]) -> int:
        """Return the number of bytes that a message would have if tensors were sent as they are."""
        layout, cell = self.whole
        return cell * sum([layout.rows[block.rows] * layout.heads[block.heads] for block in message])

    def buffer(self, message: Sequence[Block]) -> Tensor:
        """Allocate a flat buffer for one message, given the blocks in it."""
        return self.like.new_empty(self.numel(message))

    def buffers(self, messages: Iterable[Sequence[Block]]) -> tuple[Tensor, Sequence[Tensor]]:
        """Allocate one flat buffer for several messages. Return the buffer, and its part for each message.

        Args:
            messages: the blocks of each message.
        """
        sizes = [self.numel(message) for message in messages]
        whole = self.like.new_empty(sum(sizes))
        return whole, whole.split_with_sizes(sizes)

    def views(self, message: Sequence[Block], buffer: Tensor) -> dict[Block, list[Payload]]:
        """Return the blocks of a message as views of its flat buffer: for each block a list with one view for each
        tensor.

        Args:
            message: the blocks, in the order in which they lie in the buffer.
            buffer: the buffer.
        """
        B, rows, heads = self._batch, self.layout.rows, self.layout.heads
        parts = iter(views(buffer, [(B, rows[b.rows], heads[b.heads], W) for b in message for W in self.widths]))
        return {block: [next(parts) for _ in self.widths] for block in message}


def cut_of(layout: Layout, ranks: Sequence[int], by_rows: bool) -> BlockCut:
    """Return how a tensor [B, rows, heads, W] is cut into blocks, one for each rank that they go to or come from.

    Args:
        layout: rows and heads of every rank.
        ranks: the ranks whose rows the tensor has, in order; used only with `by_rows`.
        by_rows: True to cut it by these ranks' rows, False by all ranks' heads.
    """
    return BlockCut(1, tuple(layout.rows[rank] for rank in ranks)) if by_rows else BlockCut(2, layout.heads)


class PackedBlocks(NamedTuple):
    """The blocks that a tensor [B, T, H, W] is cut into, one after the other in memory, as they were encoded one by
    one."""

    flat: Tensor  # the memory of all blocks, one-dimensional
    shape: tuple[int, int, int, int]  # batch, rows, heads and width of all blocks together
    cut: BlockCut  # the cut into blocks

    def blocks(self) -> list[Tensor]:
        """Return the blocks [B, rows, heads, W], as views of the memory."""
        return views(self.flat, [(*block, self.shape[-1]) for block in self.cut.shapes(self.shape)])

    def of_rows(self, rows: slice) -> Tensor:
        """Return the part of the memory that holds some blocks, given the rows of all of them together."""
        every = self.shape[1]
        return self.flat if rows == slice(0, every) else self.flat.view(every, -1)[rows].view(-1)


class Target:
    """The tensors that this rank receives in an exchange, with the place of every block in them."""

    def __init__(
        self, tensors: Sequence[Tensor | PackedBlocks], places: Mapping[Block, Sequence[Tensor]], kernels: Kernels
    ) -> None:
        """Describe where blocks belong.

        Args:
            tensors: the tensors to fill, or the memory of their blocks.
            places: for every block that belongs here, its place in each of `tensors`, as a view.
            kernels: the operations, of which `unpack` is used.
        """
        self.tensors, self._places, self._kernels = tensors, places, kernels

    def contained_tensors(self) -> Sequence[Tensor | PackedBlocks]:
        """Return the tensors. `used_on_current_stream` asks for them, to tell the allocator which streams use their
        memory."""
        return self.tensors

    def place(self, blocks: Blocks) -> None:
        """Copy those of the given blocks that belong here to their places, in one launch."""
        here = [block for block in blocks if block in self._places]
        if here:
            parts = [part for block in here for part in blocks[block]]
            self._kernels.unpack(parts, [place for block in here for place in self._places[block]])


def pack(kernels: Kernels, messages: Sequence[Sequence[Payload]], buffers: Sequence[Tensor]) -> None:
    """Copy the payloads of all messages to their flat buffers, in one launch.

    Args:
        kernels: the operations.
        messages: the payloads of each message.
        buffers: the buffer of each message.
    """
    if any(isinstance(piece, Rows) for message in messages for piece in message):
        kernels.gather_pack(messages, buffers)
    elif messages:
        kernels.pack(cast(Sequence[Sequence[Tensor]], messages), buffers)


def run_phase(here: RankContext, phase: Phase, held: BlockSet, group: Group) -> None:
    """Send and receive all messages of one phase at once, wait for them, and add the received blocks to `held`.

    Args:
        here: this rank.
        phase: what it sends and receives.
        held: the blocks that it holds.
        group: the communicator of the phase.
    """
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
    """Send and receive all messages of an exchange, and put the blocks for this rank in place. Return when all is done.

    Blocks that are here already are put in place while messages are on their way.

    Args:
        here: this rank.
        plan: what it sends and receives, phase by phase.
        held: the blocks that it holds at first.
        groups: the communicators, by the lane that a phase names.
        target: the tensors to fill.
    """
    flight = InFlight(here, held)
    flight.post_receives(plan, groups)
    sending = flight.send(plan, groups)
    target.place(held.blocks)
    flight.land(target)
    for _, pending in sending:
        pending.wait()


class PendingReceive:
    """A message that this rank will receive, with its buffer."""

    def __init__(self, message: tuple[Block, ...], buffer: Tensor) -> None:
        self.message, self.buffer = message, buffer
        self.pending: Pending | None = None
        self._opened = False

    def open(self, held: BlockSet) -> None:
        """Wait for the message and add its blocks to `held`. Further calls do nothing."""
        if not self._opened:
            assert self.pending is not None, "a message is sent on before it was asked for"
            self.pending.wait()
            self._opened = True
            held.blocks |= held.views(self.message, self.buffer)


class InFlight:
    """The messages of one exchange, or of one stage of it, while a rank sends and receives them."""

    def __init__(self, here: RankContext, held: BlockSet) -> None:
        self._here, self._held = here, BlockSet(held.blocks, held.layout, held.whole)
        self._phases: list[dict[int, PendingReceive]] = []
        self._bringing: dict[Block, PendingReceive] = {}

    def contained_tensors(self) -> list[Tensor]:
        """Return the receive buffers. `used_on_current_stream` asks for them, to tell the allocator which streams use
        their memory.

        The blocks to send belong to the `BlockSet` that this was made from.
        """
        return [receive.buffer for receives in self._phases for receive in receives.values()]

    def post_receives(self, plan: Plan, groups: Groups) -> None:
        """Allocate buffers for all messages that a plan receives. If the backend can receive ahead, post each receive
        by itself.

        Args:
            plan: what this rank sends and receives, phase by phase.
            groups: the communicators, by the lane that a phase names.
        """
        for phase in plan:
            receives = {p: PendingReceive(message, self._held.buffer(message)) for p, message in phase.receives.items()}
            self._phases.append(receives)
            self._bringing |= {block: receive for receive in receives.values() for block in receive.message}
            group = groups[phase.lane]
            for peer, receive in receives.items() if _receives_ahead(groups) else ():
                receive.pending = group.send_recv([], [(receive.buffer, group.ranks.index(peer))])

    def send(self, plan: Plan, groups: Groups, first: int = 0) -> list[SentMessages]:
        """Send every message of a plan as soon as it can be packed. Return the pending sends, each with the ranks that
        they go to.

        A message with blocks from another rank waits until these have arrived. If the backend cannot receive ahead,
        each phase is one launch and one call, which also posts the phase's receives. Such backends match both lists of
        a call.

        Args:
            plan: what this rank sends and receives, phase by phase.
            groups: the communicators, by the lane that a phase names.
            first: index of this plan's first phase among all phases given to `post_receives`.
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
        """Wait for every message, and copy its blocks to their places in `target`: those of one call together. Free the
        memory."""
        for receives in self._phases:
            for _, came in groupby(receives.values(), key=lambda receive: id(receive.pending)):
                blocks: list[Block] = []
                for receive in came:
                    receive.open(self._held)
                    blocks += receive.message
                target.place({block: self._held.blocks[block] for block in blocks})
        self._phases, self._bringing, self._held.blocks = [], {}, {}

    def _packed(self, messages: Mapping[int, Sequence[Block]]) -> list[Tensor]:
        """Return each message as one flat tensor. Wait first for blocks in it that come from other ranks.

        Messages whose blocks lie one after the other in memory are not copied. The others are packed in one launch.

        Args:
            messages: the blocks of each message, by the rank that it goes to.
        """
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
    """Return True if in all communicators receives may be posted before the matching sends, each by itself.

    Args:
        groups: the communicators, by the lane that a phase names.
    """
    return all(group.receives_ahead for group in groups.values())


def as_one(pieces: Sequence[Payload]) -> Tensor | None:
    """Return payloads as one flat tensor without copying, if they lie one after the other in memory; else None.

    Most payloads that this rank received and passes on do.

    Args:
        pieces: the payloads, in order.
    """
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


def views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Cut a packed buffer into its parts, and return a view of each with its shape. The buffer is not copied.

    Args:
        buffer: one-dimensional buffer that `pack` has filled.
        shapes: shapes of the parts, in the order in which `pack` laid them out.
    """
    with torch._C.DisableTorchFunction():  # half of a plan's calls, which counters of operations need not count
        parts = buffer.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
