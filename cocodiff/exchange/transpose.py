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

from cocodiff.comm.transport import LaneFuture
from cocodiff.exchange.codec import Codec
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.messages import Blocks, BlockSet, Payload, Target
from cocodiff.exchange.outgoing import EncodedCall, Outgoing
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.chunks import Piece, Side, pieces
from cocodiff.topology.routes.plans import Block

NAME = "x"  # name of the transposed tensor in the trace


class SharedGrid(NamedTuple):
    """The rows and columns of every rank."""

    rows: Side
    columns: Side

    def layout(self, rows: range, columns: range) -> Layout:
        """Return the layout of some slices of rows and of columns."""
        return Layout((), self.columns.sizes(columns)).of_rows(self.rows.sizes(rows))


class TransposedPiece(Outgoing):
    """A piece of a transpose, as tensors to send."""

    def __init__(
        self, call: EncodedCall, way: str, given: Mapping[Block, Tensor], taken: Mapping[Block, Tensor], into: Tensor
    ) -> None:
        """Describe a piece.

        Args:
            way: "forward" or "back".
            given: what this rank sends, by block.
            taken: the place in `into` of what it receives, by block.
            into: the tensor to be filled.
        """
        super().__init__(call, {NAME: next(iter(given.values()))})
        self.way, self._given, self._taken, self._into = way, given, taken, into

    def contained_tensors(self) -> Sequence[object]:
        """Return the tensors to send and the tensor to be filled."""
        return (*self._given.values(), self._into)

    def cut(self, payloads: Sequence[Payload | list[Tensor]]) -> Blocks:
        """Return the blocks to send."""
        return {block: [x] for block, x in self._given.items()}

    def target(self, here: BlockSet) -> Target:
        """Return the tensor to be filled."""
        return Target([self._into], {block: [place] for block, place in self._taken.items()}, self.call.kernels)


class Transpose:
    """A transpose on one rank. Slices are given in ascending order, and taken in ascending order."""

    def __init__(self, exchange: Exchange, grid: SharedGrid, way: str, layer: str, early: float) -> None:
        """Plan the pieces of a transpose.

        Args:
            way: "forward" from rows to columns, or "back".
            layer: the kind of layer, for the trace.
            early: see `Transposes`.
        """
        self._exchange, self._grid, self._way, self._layer = exchange, grid, way, layer
        given, taken = (side.cuts for side in (grid if way == "forward" else grid[::-1]))
        self._schedule = tuple(pieces(given, taken, math.ceil(early * taken)))
        self._pending: list[tuple[Piece, LaneFuture[Target]]] = []
        self._into: Tensor | None = None

    def give(self, x_BRCD: Tensor, number: int) -> None:
        """Send the pieces that are due once slice `number` has been computed.

        Args:
            x_BRCD: the tensor with the slices so far: this rank's rows and all columns, or on the way back all rows and
                its columns.
        """
        if self._into is None:
            self._into = self._memory_like(x_BRCD)
        for piece in self._schedule[number]:
            outgoing = self._outgoing(piece, x_BRCD, self._into)
            self._pending.append((piece, self._exchange.submit(outgoing)))

    def take(self, number: int) -> Tensor:
        """Return the transposed tensor once slice `number` has arrived; this slice and those before are valid."""
        with self._exchange.trace.span(f"wait for {NAME}", layer=self._layer):
            for piece, pending in self._pending:
                if number in piece.taken:
                    pending.wait()
        self._pending = [(piece, pending) for piece, pending in self._pending if piece.taken.stop > number + 1]
        assert self._into is not None, "something is given before anything is taken"
        return self._into

    def _memory_like(self, x_BRCD: Tensor) -> Tensor:
        """Allocate the tensor to be filled, with the batch and channels of the given one.

        To columns it is [B, all rows, this rank's columns, D], and column by column in memory, since the computation
        then goes by columns. Back it is [B, this rank's rows, all columns, D].
        """
        B, D, own, (rows, columns) = len(x_BRCD), x_BRCD.shape[-1], self._exchange.rank, self._grid
        if self._way == "back":
            return x_BRCD.new_empty(B, rows.shares[own], sum(columns.shares), D)
        return x_BRCD.new_empty(B, columns.shares[own], sum(rows.shares), D).transpose(1, 2)

    def _outgoing(self, piece: Piece, x_BRCD: Tensor, into_BRCD: Tensor) -> TransposedPiece:
        """Return one piece as tensors to send."""
        exchange, forward = self._exchange, self._way == "forward"
        rows, columns = piece if forward else piece[::-1]
        call = EncodedCall(exchange, self._grid.layout(rows, columns), self._layer)
        given = self._blocks(x_BRCD, not forward, rows, columns)
        return TransposedPiece(call, self._way, given, self._blocks(into_BRCD, forward, rows, columns), into_BRCD)

    def _blocks(self, x_BRCD: Tensor, all_rows: bool, rows: range, columns: range) -> dict[Block, Tensor]:
        """Return the blocks of a tensor with all rows and this rank's columns, or with this rank's rows and all
        columns."""
        own, (side, other) = self._exchange.rank, self._grid
        at_rows, at_columns = (side.whole, other.own) if all_rows else (side.own, other.whole)
        blocks = [Block(peer, own) if all_rows else Block(own, peer) for peer in range(len(side.shares))]
        return {one: x_BRCD[:, at_rows(one.rows, rows), at_columns(one.heads, columns)] for one in blocks}


class CodedTranspose:
    """A transpose of one slice whose tensors are sent as those of a codec's call. It has the interface of
    `Transpose`."""

    def __init__(self, transfer: Transfer, way: str) -> None:
        self._transfer, self._way = transfer, way

    def give(self, x_BRCD: Tensor, number: int) -> None:
        """Send the tensor and wait for the transposed one."""
        if self._way == "back":
            self._here = self._transfer.back(x_BRCD)
        else:
            (self._here,) = self._transfer.wait(self._transfer.send(q=x_BRCD)).values()

    def take(self, number: int) -> Tensor:
        """Return the transposed tensor."""
        return self._here


class Transposes:
    """The transposes of one call, for a grid that ranks share."""

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
            rows: number of rows of every rank.
            columns: number of columns of every rank.
            slices: slices wanted of each, see `Side.cut`.
            early: fraction of the slices to come for which each slice is sent as soon as it was computed. For the
                others all is sent after the last one.
            codec: encodes the tensors; None to send them as they are.
        """
        self._exchange, self._early, self._codec = exchange, early, codec
        wanted = slices if codec is None else 1
        self.grid = SharedGrid(Side.cut(rows, wanted), Side.cut(columns, wanted))

    def transpose(self, way: str, layer_key: Any) -> Transpose | CodedTranspose:
        """Return the next transpose. Every rank makes the same ones in the same order.

        Args:
            way: "forward" or "back"; a coded one back belongs to the last one forward.
            layer_key: the layer and guidance branch, see `Codec.open`.
        """
        if self._codec is None:
            return Transpose(self._exchange, self.grid, way, layer_key.kind, self._early)
        if way == "forward":
            whole = self.grid.layout(range(1), range(1))
            self._transfer = self._codec.open(self._exchange, whole, layer_key)
        return CodedTranspose(self._transfer, way)
