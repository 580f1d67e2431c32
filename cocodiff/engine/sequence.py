"""The ranks that share one sequence, as one of them sees it: its transport, its attention, and its tokens."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cocodiff.attention.ulysses import Ulysses
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.engine.assemble import AttentionWork, build_strategy, mesh_of, with_codec_chosen
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Segments, slices

if TYPE_CHECKING:
    from cocodiff.exchange.transpose import Transposes


class SequenceRanks:
    """The ranks that share one sequence of tokens, as one of them sees it: their connections, mesh and attention.

    It cuts tensors into each rank's tokens, and gathers them again.
    """

    strategy: Ulysses  # the attention of this rank; absent until it is connected

    def __init__(self, config: Config, context: RankContext, work: AttentionWork) -> None:
        """Choose the codec if the settings leave it open. Nothing is opened before `connect`.

        Args:
            config: the engine's settings.
            context: this rank among the ranks that share the sequence.
            work: the size of an attention call, by which mesh and codec are chosen.
        """
        self._work, self._context, self._trace = work, context, context.trace
        self.topology, self.transport = context.topology, context.transport
        # The settings with every choice made, and these choices in words (None: nothing was left to choose).
        self.config, self.chosen = with_codec_chosen(config, self.topology, work)
        self.rank, self.size = self.transport.rank, self.transport.size
        self.segments: Segments = ()  # the current call's, with the tokens of all these ranks; set before each call

    @cached_property
    def mesh(self) -> Mesh:
        """The Ulysses groups and rings of these ranks. Raise UserError for a mesh that ranks and heads do not allow."""
        return mesh_of(self.config, self.topology, self._work)

    def connect(self) -> Ulysses:
        """Return this rank's attention. The first call opens its communicators and threads, so all ranks call it
        together."""
        if not hasattr(self, "strategy"):
            self.strategy = build_strategy(self.config, self.mesh, self._context)
        return self.strategy

    def shares(self, segment: str) -> tuple[int, ...]:
        """Return the number of tokens that each rank has of a segment of the current call.

        Args:
            segment: name of the segment, such as "image".
        """
        return {one.name: one for one in self.segments}[segment].shares(self.topology)

    def cut(self, segment: str, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a segment, as a contiguous copy. Raise RuntimeError if the number of tokens does
        not match.

        Args:
            segment: name of the segment.
            whole: a tensor with all tokens of the segment.
            dim: the dimension of tokens.
        """
        shares = self.shares(segment)
        if whole.shape[dim] != sum(shares):
            raise RuntimeError(f"{whole.shape[dim]} rows in dimension {dim} of {tuple(whole.shape)}, not {sum(shares)}")
        own = slices(shares)[self.rank]
        return whole.narrow(dim, own.start, own.stop - own.start).contiguous()

    def transposes(self, rows: str, columns: str, slices: int, early: float) -> Transposes:
        """Return the exchanges, in a model's current call, that give each rank other parts of a grid of tokens.

        Before one a rank has some rows and all columns, after it all rows and some columns; or the other way round.

        Args:
            rows: name of the segment that is divided among the ranks as rows are, such as "frames".
            columns: the same for columns, such as "places".
            slices: number of slices that each rank's rows, and its columns, are cut into.
            early: fraction of the slices to be received for which a slice is sent as soon as it has been computed; for
                the others all is sent after the last one.
        """
        from cocodiff.exchange.transpose import Transposes

        assert self.strategy.exchange is not None, "one rank has nothing to transpose"
        codec = None if self.config.codec == "none" else self.strategy.codec
        return Transposes(self.strategy.exchange, self.shares(rows), self.shares(columns), slices, early, codec)

    def gather(self, x: Tensor, segment: str, dim: int = 1) -> Tensor:
        """Return all tokens of a segment, on every rank with the same bits. All ranks call it, each with its own
        tokens.

        Args:
            x: this rank's tokens.
            segment: name of the segment.
            dim: the dimension of tokens.
        """
        if self.size == 1:
            return x
        self.transport.arrive("the gather of outputs")
        return self.gather_rows(x, self.shares(segment), dim, "gather")

    def gather_rows(self, x: Tensor, shares: tuple[int, ...] | list[int], dim: int, *purposes: str) -> Tensor:
        """Return the rows of all ranks in one tensor, on every rank. All ranks call it and wait.

        Args:
            x: this rank's rows.
            shares: number of rows of each rank.
            dim: the dimension of rows.
            purposes: purposes (of `trace.PURPOSES`) that the sent bytes are counted for.
        """

        def gather(x: Tensor) -> Tensor:
            parts = [x.new_empty(*x.shape[:dim], share, *x.shape[dim:][1:]) for share in shares]
            with self._trace.span("gather", "gather"):
                self.transport.world.all_gather(x.contiguous(), parts).wait()
            for peer, purpose in product(range(self.size), purposes):
                self._trace.count(self.topology.link_class(self.rank, peer), x.nbytes, purpose=purpose)
            return torch.cat(parts, dim=dim)

        with self._trace.span("wait for outputs"):
            return self.transport.control.submit(gather, x).wait()
