"""Tensors that an exchange sends: to the ranks of their heads, or attention's output to the ranks of its rows.

Either is encoded (`EncodedCall`) and cut into blocks by the lane that sends it first, and tells where blocks go that
are here. A tensor on its way is a `TensorFuture` for whoever waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cocodiff.exchange.messages import Blocks, BlockSet, Payload, Target, blocks_of, whole_cell
from cocodiff.kernels import Kernels
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import Block

OUTPUT = "o"  # the name of attention's output among the tensors of a call


class Encoded(NamedTuple):
    """Some tensors as they travel: payloads [B, L, H, W] of one dtype, or of each its blocks [B, rows, heads, W], where
    every block was encoded by itself; and the layout that has every rank's rows L."""

    payloads: Sequence[Payload | list[Tensor]]
    layout: Layout


class EncodedCall:
    """One attention call's tensors as they travel: what is sent in their place, and what the receiver makes of it. This
    one sends tensors as they are. Subclasses change what they need; routes, chunks and sizes follow from what `encode`
    returns."""

    def __init__(self, layout: Layout) -> None:
        """layout: of the tensors themselves."""
        self.layout = layout

    def begin(self, like_BLHD: Tensor) -> None:
        """Called once, on the thread that attends, before the first tensor is sent. like_BLHD: that tensor."""

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        """Bytes that one token of one head of a tensor like this takes on the wire, over the batch."""
        return len(x_BLHD) * x_BLHD.shape[-1] * x_BLHD.element_size()

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        """The payloads in tensors' place: of q, k and v [B, L, H, D] with this rank's rows, or of OUTPUT [B, T, G, D]
        with some `rows` of the sequence. ranks: to which blocks go. Runs on a lane, where it may wait for what it
        depends on."""
        return Encoded(list(tensors.values()), self.layout)

    def decode(self, received: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        """The tensors, of payloads of which `rows` have just arrived, blocks of `ranks`: all rows of q, k and v for
        this rank's heads, [B, S, G, D], or all heads of this rank's rows of OUTPUT, [B, L, H, D]. Runs on the thread
        that attends."""
        return list(received.values())

    # Where calls do not wait for all that they send, see `attention/arrival.py` ---------------------------------------

    share = 1.0  # of a whole tensor's bytes that each takes on the wire
    measures = False  # whether encoding notes by how much tensors change
    noted: Any = None  # where encoding notes how it went
    continues = False  # whether `operand` goes on from the last values of a tensor, rather than being the last one

    def displace(self, names: frozenset[str]) -> None:
        """Told once the call has begun: these tensors are not waited for."""

    def operand(self, name: str, last: Tensor) -> Tensor:
        """The operand for a displaced tensor, of which the last call left `last`."""
        return last


class CallEnd(NamedTuple):
    """One rank's end of an attention call. layer: the kind of layer, for the trace."""

    rank: int
    kernels: Kernels
    coded: EncodedCall
    layer: str


class Outgoing:
    """Tensors that travel together: q, k and v [B, L, H, D] "forward" from the ranks of their rows to the ranks of
    their heads, or rows of attention's output, OUTPUT [B, T, G, D], "back" to the ranks of these rows.

    label: of their spans in the trace. layout: of what travels, once it was encoded. purpose: the one that their bytes
    are counted for besides attention, if any."""

    def __init__(
        self,
        end: CallEnd,
        tensors: Mapping[str, Tensor],
        ranks: Sequence[int] | None = None,
        purpose: str | None = None,
    ) -> None:
        """ranks: whose rows of OUTPUT these are, consecutive in the sequence; None for all."""
        self.end, self.coded, self.layer, self.purpose = end, end.coded, end.layer, purpose
        self.names, self._tensors = tuple(tensors), tensors
        self.label = " ".join(filter(None, (purpose, "".join(tensors))))
        self.layout: Layout = end.coded.layout
        self._whole = self.layout, whole_cell(tensors.values())
        self._encoded: Encoded | None = None
        self._in_turn = False  # whether blocks lie one after the other, each encoded by itself
        self.way = "back" if OUTPUT in tensors else "forward"
        # To which blocks go, and the rows that are here: of this rank's, or of the sequence.
        self._ranks: Sequence[int] = range(len(self.layout.heads))
        self._rows = slice(0, self.layout.rows[end.rank])
        if self.way == "back":
            self._ranks = self.layout.in_sequence if ranks is None else ranks
            self._rows = self.layout.rows_of(self._ranks)

    def contained_tensors(self) -> Sequence[object]:
        """The tensors that `blocks` is made of."""
        return (*self._tensors.values(), *(() if self._encoded is None else self._encoded.payloads))

    def encode_now(self) -> None:
        """On the thread that calls, so that only the code waits for the lane."""
        self._encoded, self._tensors = self.encoded(), {}

    def blocks(self) -> BlockSet:
        (payloads, self.layout), self._encoded = self._encoded or self.encoded(), None
        self._in_turn = isinstance(payloads[0], list)
        return BlockSet(self.cut(payloads), self.layout, self._whole)

    def encoded(self) -> Encoded:
        """The payloads that travel in the tensors' place."""
        return self.coded.encode(self._tensors, self._rows, self._ranks)

    def cut(self, payloads: Sequence[Payload | list[Tensor]]) -> Blocks:
        """The payloads as blocks."""
        return self._by_block(payloads, self.way == "back", self._ranks)

    def target(self, here: BlockSet) -> Target:
        """Allocates the tensors that blocks like these fill."""
        forward, own, layout = self.way == "forward", self.end.rank, self.layout
        rows, heads = (sum(layout.rows), layout.heads[own]) if forward else (layout.rows[own], sum(layout.heads))
        received = [here.like.new_empty((len(here.like), rows, heads, width)) for width in here.widths]
        places = self._by_block(received, forward, self.senders, self._in_turn)
        return Target(received, places, self.end.kernels)

    def _by_block(
        self, tensors: Sequence[Any], by_rows: bool, ranks: Sequence[int], in_turn: bool = False
    ) -> dict[Block, tuple[Any, ...]]:
        """Tensors cut into this rank's blocks with other ranks: by the rows of these, or by their heads."""
        own, layout = self.end.rank, self.layout
        sizes, dim = ([layout.rows[rank] for rank in ranks], 1) if by_rows else (layout.heads, 2)
        parts = [x if isinstance(x, list) else blocks_of(x, sizes, dim, in_turn) for x in tensors]
        blocks = [Block(rank, own) if by_rows else Block(own, rank) for rank in ranks]
        return dict(zip(blocks, zip(*parts, strict=True), strict=True))

    def placed(self, here: BlockSet) -> Target:
        target = self.target(here)
        target.place(here.blocks)
        return target

    def decode(self, received: Sequence[Tensor], chunk: Sequence[int] | None = None) -> list[Tensor]:
        """The tensors, of what came in their place. chunk: the ranks whose rows have just arrived, None for all."""
        by_name = dict(zip(self.names, received, strict=True))
        rows = slice(0, received[0].shape[1]) if chunk is None else self.layout.rows_of(chunk)
        return self.coded.decode(by_name, rows, self.senders if chunk is None else chunk)

    @property
    def senders(self) -> Sequence[int]:
        """The ranks that blocks come from, in their order."""
        return self.layout.in_sequence if self.way == "forward" else range(len(self.layout.heads))


class TensorFuture:
    """One tensor on its way to this rank's heads. together: the names of those that it travels with."""

    def __init__(
        self,
        together: str,
        wait_for_chunk: Callable[[int], Tensor],
        chunks: int = 1,
        land: Callable[[int], object] | None = None,
    ) -> None:
        """wait_for_chunk: see `chunk`. land: has a chunk put in place, once for all calls; None for a whole tensor."""
        self.together, self._wait_for_chunk, self._chunks, self._land = together, wait_for_chunk, chunks, land

    def wait(self) -> Tensor:
        """All rows of this rank's heads, [B, S, G, D]."""
        return [self.chunk(number) for number in range(self._chunks)][-1]

    def chunk(self, number: int) -> Tensor:
        """The whole sequence, of which this chunk and those asked for before are here. Each once, ascending."""
        return self._wait_for_chunk(number)

    def expect(self, number: int) -> None:
        """Has a chunk put in place as soon as it is here. Chunks land in the order in which they are expected."""
        if self._land is not None:
            self._land(number)
