"""Transposes of a grid between ranks: from some rows and all columns to all rows and some columns, and back, along the
routes of an exchange. A block is the rows of one rank for the columns of another, as it is of an attention call the
rows for the heads; so every plan serves, and bytes follow from the same formulas.

The two halves of a rank's memory are [B, R, C, D]: `rows` with its own rows R and all columns C, `columns` the other
way round. They may lie in memory in any order but for D.

With a codec a transpose is not cut into pieces: codecs know the rows and heads of a call of attention. A transpose
forward and the one back behind it are to them such a call, whose queries go there and whose output comes back.
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
from cocodiff.exchange.outgoing import CallEnd, EncodedCall, Outgoing
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.chunks import Piece, Side, pieces
from cocodiff.topology.routes.plans import Block

NAME = "x"  # of what is transposed, in the trace


class SharedGrid(NamedTuple):
    """Who has which rows and columns."""

    rows: Side
    columns: Side

    def layout(self, rows: range, columns: range) -> Layout:
        """Of some slices of each."""
        return Layout((), self.columns.sizes(columns)).of_rows(self.rows.sizes(rows))


class TransposedPiece(Outgoing):
    """A piece of a transpose. given: what this rank sends, by blocks; taken: where in `into` what comes belongs."""

    def __init__(
        self, end: CallEnd, way: str, given: Mapping[Block, Tensor], taken: Mapping[Block, Tensor], into: Tensor
    ) -> None:
        super().__init__(end, {NAME: next(iter(given.values()))})
        self.way, self._given, self._taken, self._into = way, given, taken, into

    def contained_tensors(self) -> Sequence[object]:
        return (*self._given.values(), self._into)

    def cut(self, payloads: Sequence[Payload | list[Tensor]]) -> Blocks:
        return {block: [x] for block, x in self._given.items()}

    def target(self, here: BlockSet) -> Target:
        return Target([self._into], {block: [place] for block, place in self._taken.items()}, self.end.kernels)


class Transpose:
    """One transpose on one rank. Slices are given in their order, and taken in their order."""

    def __init__(self, exchange: Exchange, grid: SharedGrid, way: str, layer: str, early: float) -> None:
        """way: "forward" from rows to columns, or "back". layer: its kind, for the trace. early: see `Transposes`."""
        self._exchange, self._grid, self._way, self._layer = exchange, grid, way, layer
        given, taken = (side.cuts for side in (grid if way == "forward" else grid[::-1]))
        self._schedule = tuple(pieces(given, taken, math.ceil(early * taken)))
        self._pending: list[tuple[Piece, LaneFuture[Target]]] = []
        self._into: Tensor | None = None

    def give(self, x_BRCD: Tensor, number: int) -> None:
        """Sends what is due now that the slice of this number is in its place in a tensor of this rank's rows and all
        columns; on the way back, of all rows and its columns."""
        if self._into is None:
            self._into = self._memory_like(x_BRCD)
        for piece in self._schedule[number]:
            outgoing = self._outgoing(piece, x_BRCD, self._into)
            self._pending.append((piece, self._exchange.submit(outgoing)))

    def take(self, number: int) -> Tensor:
        """The transposed tensor, of which the slice of this number and those before are here."""
        with self._exchange.trace.span(f"wait for {NAME}", layer=self._layer):
            for piece, pending in self._pending:
                if number in piece.taken:
                    pending.wait()
        self._pending = [(piece, pending) for piece, pending in self._pending if piece.taken.stop > number + 1]
        assert self._into is not None, "something is given before anything is taken"
        return self._into

    def _memory_like(self, x_BRCD: Tensor) -> Tensor:
        """For what comes. Columns lie one behind the other, as what computes with them goes by columns."""
        B, D, own, (rows, columns) = len(x_BRCD), x_BRCD.shape[-1], self._exchange.rank, self._grid
        if self._way == "back":
            return x_BRCD.new_empty(B, rows.shares[own], sum(columns.shares), D)
        return x_BRCD.new_empty(B, columns.shares[own], sum(rows.shares), D).transpose(1, 2)

    def _outgoing(self, piece: Piece, x_BRCD: Tensor, into_BRCD: Tensor) -> TransposedPiece:
        exchange, forward = self._exchange, self._way == "forward"
        rows, columns = piece if forward else piece[::-1]
        end = CallEnd(exchange.rank, exchange.kernels, EncodedCall(self._grid.layout(rows, columns)), self._layer)
        given = self._blocks(x_BRCD, not forward, rows, columns)
        return TransposedPiece(end, self._way, given, self._blocks(into_BRCD, forward, rows, columns), into_BRCD)

    def _blocks(self, x_BRCD: Tensor, all_rows: bool, rows: range, columns: range) -> dict[Block, Tensor]:
        """The blocks of a tensor with all rows and this rank's columns, or with this rank's rows and all columns."""
        own, (side, other) = self._exchange.rank, self._grid
        at_rows, at_columns = (side.whole, other.own) if all_rows else (side.own, other.whole)
        blocks = [Block(peer, own) if all_rows else Block(own, peer) for peer in range(len(side.shares))]
        return {one: x_BRCD[:, at_rows(one.rows, rows), at_columns(one.heads, columns)] for one in blocks}


class CodedTranspose:
    """As a `Transpose` of one slice, for the messages of a codec's call."""

    def __init__(self, transfer: Transfer, way: str) -> None:
        self._transfer, self._way = transfer, way

    def give(self, x_BRCD: Tensor, number: int) -> None:
        if self._way == "back":
            self._here = self._transfer.back(x_BRCD)
        else:
            (self._here,) = self._transfer.wait(self._transfer.send(q=x_BRCD)).values()

    def take(self, number: int) -> Tensor:
        return self._here


class Transposes:
    """The transposes of one call: who has which rows and columns, in how many slices."""

    def __init__(
        self,
        exchange: Exchange,
        rows: Sequence[int],
        columns: Sequence[int],
        slices: int,
        early: float,
        codec: Codec | None = None,
    ) -> None:
        """rows, columns: of every rank. slices: wanted of each, see `Side.cut`. early: of the slices that are to
        come, the fraction for which every slice is sent as soon as it was computed; for the others all is sent
        behind the last one. codec: of what travels; None for tensors as they are."""
        self._exchange, self._early, self._codec = exchange, early, codec
        wanted = slices if codec is None else 1
        self.grid = SharedGrid(Side.cut(rows, wanted), Side.cut(columns, wanted))

    def transpose(self, way: str, layer_key: Any) -> Transpose | CodedTranspose:
        """Every rank makes the same ones in the same order; see `Transpose`. layer_key: which layer and guidance
        branch, see `Codec.open`; of coded ones the way back belongs to the layer of the way there."""
        if self._codec is None:
            return Transpose(self._exchange, self.grid, way, layer_key.kind, self._early)
        if way == "forward":
            whole = self.grid.layout(range(1), range(1))
            self._transfer = self._codec.open(self._exchange, whole, layer_key)
        return CodedTranspose(self._transfer, way)
