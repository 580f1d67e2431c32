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
    """The ranks that share one sequence. They cut tensors into each rank's tokens, and gather them again."""

    strategy: Ulysses  # the attention of this rank; absent until it is connected

    def __init__(self, config: Config, context: RankContext, work: AttentionWork) -> None:
        """Choose the codec if the settings leave it open. Groups and lanes are made by `connect`.

        Args:
            context: this rank among these ranks
            work: the attention call by which the mesh is chosen
        """
        self._work, self._context, self._trace = work, context, context.trace
        self.topology, self.transport = context.topology, context.transport
        # The settings with every choice made, and these choices in words (None: nothing was left to choose).
        self.config, self.chosen = with_codec_chosen(config, self.topology, work)
        self.rank, self.size = self.transport.rank, self.transport.size
        self.segments: Segments = ()  # the current call's, with the tokens of all these ranks; set before each call

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of these ranks. Raises UserError for one that ranks and heads do not allow."""
        return mesh_of(self.config, self.topology, self._work)

    def connect(self) -> Ulysses:
        """Return this rank's attention. The first call makes it, with its groups and lanes: all ranks call together."""
        if not hasattr(self, "strategy"):
            self.strategy = build_strategy(self.config, self.mesh, self._context)
        return self.strategy

    def shares(self, segment: str) -> tuple[int, ...]:
        """Return each rank's number of tokens in a segment."""
        return {one.name: one for one in self.segments}[segment].shares(self.topology)

    def cut(self, segment: str, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a segment, as a contiguous copy. `whole` has all tokens along `dim`."""
        shares = self.shares(segment)
        if whole.shape[dim] != sum(shares):
            raise RuntimeError(f"{whole.shape[dim]} rows in dimension {dim} of {tuple(whole.shape)}, not {sum(shares)}")
        own = slices(shares)[self.rank]
        return whole.narrow(dim, own.start, own.stop - own.start).contiguous()

    def transposes(self, rows: str, columns: str, slices: int, early: float) -> Transposes:
        """Return the transposes of the current call: the tokens of one segment are rows, those of another one columns.
        slices, early: see `Transposes`."""
        from cocodiff.exchange.transpose import Transposes

        assert self.strategy.exchange is not None, "one rank has nothing to transpose"
        codec = None if self.config.codec == "none" else self.strategy.codec
        return Transposes(self.strategy.exchange, self.shares(rows), self.shares(columns), slices, early, codec)

    def gather(self, x: Tensor, segment: str, dim: int = 1) -> Tensor:
        """Return all tokens of a segment, from each rank's along `dim`. Every rank gets the same bits."""
        if self.size == 1:
            return x
        self.transport.arrive("the gather of outputs")
        return self.gather_rows(x, self.shares(segment), dim, "gather")

    def gather_rows(self, x: Tensor, shares: tuple[int, ...] | list[int], dim: int, *purposes: str) -> Tensor:
        """Return all ranks' rows along `dim`, on every rank.

        Args:
            shares: number of rows of each rank
            purposes: of `trace.PURPOSES`, for each of which the sent bytes are counted
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
