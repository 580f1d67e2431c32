"""The transposes of a grid between ranks: from some rows and all columns to all rows and some columns, and back.

They use the routes of an exchange. A block is the rows of one rank for the columns of another, as in an attention call
it is the rows for the heads. So every plan applies, and bytes follow from the same formulas.

The two halves of a rank's memory are [B, R, C, D]: one has its own rows R and all columns C, the other all rows and its
own columns. They may have any strides, except that D is contiguous.

With a codec a transpose is not cut into pieces, because codecs know only the rows and heads of an attention call. For
them a transpose forward and the following one back are such a call: its queries and its output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cocodiff.comm.lane import LaneFuture
from cocodiff.exchange.codec import Codec
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.messages import Blocks, BlockSet, Payload, Target
from cocodiff.exchange.outgoing import EncodedCall, Outgoing
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.chunks import Side, TransposePiece, pieces
from cocodiff.topology.routes.plans import Block

NAME = "x"  # name of the transposed tensor in the trace


class SharedGrid(NamedTuple):
    """A grid of tokens that ranks share: the number of rows and of columns that each rank has, cut into slices.

    It is for models with two kinds of attention in turn, such as over places and over frames of a video.
    """

    rows: Side  # the number of rows of every rank, and their slices
    columns: Side  # the same of columns

    def layout(self, rows: range, columns: range) -> Layout:
        """Return the layout of a piece of the grid, as if rows were tokens and columns were heads.

        Args:
            rows: numbers of the slices of each rank's rows.
            columns: numbers of the slices of each rank's columns.
        """
        return Layout((), self.columns.sizes(columns)).of_rows(self.rows.sizes(rows))


class TransposedPiece(Outgoing):
    """One piece of a transpose between ranks, as tensors to send."""

    def __init__(
        self, call: EncodedCall, way: str, given: Mapping[Block, Tensor], taken: Mapping[Block, Tensor], into: Tensor
    ) -> None:
        """Describe a piece.

        Args:
            call: encodes and decodes; here it sends tensors as they are.
            way: "forward" from rows to columns, or "back".
            given: the tensors that this rank sends, by block, as views.
            taken: the places in `into` of the blocks that it receives, as views.
            into: the tensor to be filled.
        """
        super().__init__(call, {NAME: next(iter(given.values()))})
        self.way, self._given, self._taken, self._into = way, given, taken, into

    def contained_tensors(self) -> Sequence[object]:
        """Return the tensors to send and the tensor to be filled.

        `used_on_current_stream` asks for them, to tell the allocator which streams use their memory.
        """
        return (*self._given.values(), self._into)

    def cut(self, payloads: Sequence[Payload | list[Tensor]]) -> Blocks:
        """Return the blocks to send. They were cut already, so payloads are not used."""
        return {block: [x] for block, x in self._given.items()}

    def target(self, here: BlockSet) -> Target:
        """Return the tensor to be filled, with the place of each block. Nothing is allocated, and `here` is not
        used."""
        return Target([self._into], {block: [place] for block, place in self._taken.items()}, self.call.kernels)


class Transpose:
    """One transpose of a grid on one rank: some rows and all columns are exchanged for all rows and some columns.

    Slices of the rank's tensor are given in ascending order as they are computed, and taken in ascending order.
    """

    def __init__(self, exchange: Exchange, grid: SharedGrid, way: str, layer: str, early: float) -> None:
        """Plan the pieces of a transpose.

        Args:
            exchange: this rank's end of the exchange.
            grid: the rows and columns of every rank.
            way: "forward" from rows to columns, or "back".
            layer: kind of layer, for the trace.
            early: fraction of the slices to be taken for which each given slice is sent at once, see `Transposes`.
        """
        self._exchange, self._grid, self._way, self._layer = exchange, grid, way, layer
        given, taken = (side.cuts for side in (grid if way == "forward" else grid[::-1]))
        self._schedule = tuple(pieces(given, taken, math.ceil(early * taken)))
        self._pending: list[tuple[TransposePiece, LaneFuture[Target]]] = []
        self._into: Tensor | None = None

    def give(self, x_BRCD: Tensor, number: int) -> None:
        """Start sending the pieces that are due once slice `number` has been computed.

        Args:
            x_BRCD: the tensor with all slices so far. Forward it has this rank's rows and all columns; on the way back
                all rows and this rank's columns.
            number: number of the slice.
        """
        if self._into is None:
            self._into = self._memory_like(x_BRCD)
        for piece in self._schedule[number]:
            outgoing = self._outgoing(piece, x_BRCD, self._into)
            self._pending.append((piece, self._exchange.submit(outgoing)))

    def take(self, number: int) -> Tensor:
        """Wait until slice `number` has arrived, and return the transposed tensor, in which this slice and those before
        are valid."""
        with self._exchange.trace.span(f"wait for {NAME}", layer=self._layer):
            for piece, pending in self._pending:
                if number in piece.taken:
                    pending.wait()
        self._pending = [(piece, pending) for piece, pending in self._pending if piece.taken.stop > number + 1]
        assert self._into is not None, "something is given before anything is taken"
        return self._into

    def _memory_like(self, x_BRCD: Tensor) -> Tensor:
        """Allocate the tensor to be filled, without values, with the batch and channels of the given one.

        Forward it is [B, all rows, this rank's columns, D] and lies column by column in memory, since the computation
        then goes by columns. Back it is [B, this rank's rows, all columns, D].
        """
        B, D, own, (rows, columns) = len(x_BRCD), x_BRCD.shape[-1], self._exchange.rank, self._grid
        if self._way == "back":
            return x_BRCD.new_empty(B, rows.shares[own], sum(columns.shares), D)
        return x_BRCD.new_empty(B, columns.shares[own], sum(rows.shares), D).transpose(1, 2)

    def _outgoing(self, piece: TransposePiece, x_BRCD: Tensor, into_BRCD: Tensor) -> TransposedPiece:
        """Return one piece of the transpose as tensors to send, with the places of what is received for it.

        Args:
            piece: the slices of both sides that it has.
            x_BRCD: the tensor to send from.
            into_BRCD: the tensor to be filled.
        """
        exchange, forward = self._exchange, self._way == "forward"
        rows, columns = piece if forward else piece[::-1]
        call = EncodedCall(exchange, self._grid.layout(rows, columns), self._layer)
        given = self._blocks(x_BRCD, not forward, rows, columns)
        return TransposedPiece(call, self._way, given, self._blocks(into_BRCD, forward, rows, columns), into_BRCD)

    def _blocks(self, x_BRCD: Tensor, all_rows: bool, rows: range, columns: range) -> dict[Block, Tensor]:
        """Return a piece of a tensor as blocks, one for each rank, as views.

        Args:
            x_BRCD: the tensor.
            all_rows: True if it has all rows and this rank's columns, False if it has this rank's rows and all columns.
            rows: numbers of the slices of rows in the piece.
            columns: numbers of the slices of columns in the piece.
        """
        own, (side, other) = self._exchange.rank, self._grid
        at_rows, at_columns = (side.whole, other.own) if all_rows else (side.own, other.whole)
        blocks = [Block(peer, own) if all_rows else Block(own, peer) for peer in range(len(side.shares))]
        return {one: x_BRCD[:, at_rows(one.rows, rows), at_columns(one.heads, columns)] for one in blocks}


class CodedTranspose:
    """A transpose whose tensor is encoded by a codec, as one tensor of an attention call. It is sent as one slice.

    Its methods are those of `Transpose`.
    """

    def __init__(self, transfer: Transfer, way: str) -> None:
        self._transfer, self._way = transfer, way

    def give(self, x_BRCD: Tensor, number: int) -> None:
        """Send the whole tensor and wait for the transposed one.

        Args:
            x_BRCD: the tensor.
            number: not used: there is one slice.
        """
        if self._way == "back":
            self._here = self._transfer.back(x_BRCD)
        else:
            (self._here,) = self._transfer.wait(self._transfer.send(q=x_BRCD)).values()

    def take(self, number: int) -> Tensor:
        """Return the transposed tensor. It has arrived already, and `number` is not used."""
        return self._here


class Transposes:
    """The transposes in one call of a model, for a grid of tokens that ranks share."""

    def __init__(
        self,
        exchange: Exchange,
        rows: Sequence[int],
        columns: Sequence[int],
        slices: int,
        early: float,
        codec: Codec | None = None,
    ) -> None:
        """Describe the grid.

        Args:
            exchange: this rank's end of the exchange.
            rows: number of rows of every rank.
            columns: number of columns of every rank.
            slices: number of slices that each rank's rows, and its columns, are cut into; fewer if a rank has fewer.
                With a codec it is 1.
            early: fraction of the slices to be taken for which each slice is sent as soon as it was computed. For the
                others all is sent after the last one.
            codec: encodes the tensors; None to send them as they are.
        """
        self._exchange, self._early, self._codec = exchange, early, codec
        wanted = slices if codec is None else 1
        self.grid = SharedGrid(Side.cut(rows, wanted), Side.cut(columns, wanted))

    def transpose(self, way: str, layer_key: Any) -> Transpose | CodedTranspose:
        """Return the next transpose of the call. Every rank makes the same ones in the same order.

        Args:
            way: "forward" from rows to columns, or "back". With a codec, one back belongs to the last one forward.
            layer_key: the layer and guidance branch (`LayerKey`).
        """
        if self._codec is None:
            return Transpose(self._exchange, self.grid, way, layer_key.kind, self._early)
        if way == "forward":
            whole = self.grid.layout(range(1), range(1))
            self._transfer = self._codec.open(self._exchange, whole, layer_key)
        return CodedTranspose(self._transfer, way)
