"""The ranks that share one sequence, as one of them sees it: its transport and attention, which tokens are its own, and
how what the ranks have computed becomes whole again."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cocodiff.attention.ulysses import Ulysses
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Transport
from cocodiff.config.config import Config
from cocodiff.config.machine import Topology
from cocodiff.engine.assemble import AttentionWork, build_strategy, mesh_of, with_codec_chosen
from cocodiff.kernels import Kernels
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Segments, slices

if TYPE_CHECKING:
    from cocodiff.exchange.transpose import Transposes


class SequenceRanks:
    """segments: of the model's current call, with the tokens of all these ranks. It is set before each call. config:
    the settings without what was left to be chosen for these ranks; chosen: what that became, None where nothing was.
    Mesh and strategy are made when they are first used, by all ranks at once: they cost groups and lanes."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        transport: Transport,
        work: AttentionWork,
        trace: Trace,
        kernels: Kernels,
    ) -> None:
        """topology, transport: of these ranks. work: what a mesh is chosen by. trace: counts what this rank sends."""
        self._work, self._trace, self._kernels = work, trace, kernels
        self.config, self.chosen = with_codec_chosen(config, topology, work)
        self.topology, self.transport = topology, transport
        self.rank, self.size = transport.rank, transport.size
        self.segments: Segments = ()

    @cached_property
    def mesh(self) -> Mesh:
        """Raises UserError for a mesh that ranks and heads do not allow."""
        return mesh_of(self.config, self.topology, self._work)

    @cached_property
    def strategy(self) -> Ulysses:
        return build_strategy(self.config, self.mesh, self.transport, self._trace, self._kernels)

    @property
    def connected(self) -> bool:
        """Whether the strategy was made."""
        return "strategy" in vars(self)

    def shares(self, segment: str) -> tuple[int, ...]:
        """Every rank's tokens of a segment."""
        return {one.name: one for one in self.segments}[segment].shares(self.topology)

    def cut(self, segment: str, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a segment, out of all of them along a dimension."""
        shares = self.shares(segment)
        if whole.shape[dim] != sum(shares):
            raise RuntimeError(f"{whole.shape[dim]} rows in dimension {dim} of {tuple(whole.shape)}, not {sum(shares)}")
        own = slices(shares)[self.rank]
        return whole.narrow(dim, own.start, own.stop - own.start).contiguous()

    def transposes(self, rows: str, columns: str, slices: int, early: float) -> Transposes:
        """Of the current call, with a segment's tokens as rows and another one's as columns: see `Transposes`."""
        from cocodiff.exchange.transpose import Transposes

        assert self.strategy.exchange is not None, "one rank has nothing to transpose"
        codec = None if self.config.codec == "none" else self.strategy.codec
        return Transposes(self.strategy.exchange, self.shares(rows), self.shares(columns), slices, early, codec)

    def gather(self, x: Tensor, segment: str, dim: int = 1) -> Tensor:
        """All ranks' tokens of a segment on every rank, so that all go on with the same bits. dim: of the tokens."""
        if self.size == 1:
            return x
        self.transport.arrive("the gather of outputs")
        return self.gather_rows(x, self.shares(segment), dim, "gather")

    def gather_rows(self, x: Tensor, shares: tuple[int, ...] | list[int], dim: int, *purposes: str) -> Tensor:
        """All ranks' rows along a dimension, `shares` of each, on every rank. purposes: what bytes are counted for."""

        def gather(x: Tensor) -> Tensor:
            parts = [x.new_empty(*x.shape[:dim], share, *x.shape[dim:][1:]) for share in shares]
            with self._trace.span("gather", "gather"):
                self.transport.world.all_gather(x.contiguous(), parts).wait()
            for peer, purpose in product(range(self.size), purposes):
                self._trace.count(self.topology.link_class(self.rank, peer), x.nbytes, purpose=purpose)
            return torch.cat(parts, dim=dim)

        with self._trace.span("wait for outputs"):
            return self.transport.control.submit(gather, x).wait()
