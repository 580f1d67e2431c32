"""The ranks that share one sequence, as one of them sees it: which tokens are its own, how it attends to those of all,
and how what the ranks have computed becomes whole again."""

from __future__ import annotations

import torch
from torch import Tensor

from cocodiff.assemble import build_strategy, mesh_of
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.comm.transport import Transport
from cocodiff.config import Config
from cocodiff.device import used_on_current_stream
from cocodiff.kernels import Kernels
from cocodiff.planning.placement import Work
from cocodiff.topology.layout import Segments, slices
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace


class SequenceRanks:
    """segments: of the model's current call, with the tokens of all these ranks. It is set before each call."""

    def __init__(
        self, config: Config, topology: Topology, transport: Transport, work: Work, trace: Trace, kernels: Kernels
    ) -> None:
        """topology, transport: of these ranks. work: the attention that a mesh is chosen by. trace: counts what this
        rank sends. Raises UserError for a mesh that ranks and heads do not allow."""
        self._config, self._trace, self._kernels = config, trace, kernels
        self.topology, self.rank, self.size = topology, transport.rank, transport.size
        self.mesh = mesh_of(config, topology, work)
        self.segments: Segments = ()
        self.connect(transport)

    def connect(self, transport: Transport) -> None:
        """Sets up what belongs to a transport: groups, lanes and the strategy over them."""
        self.transport = transport
        self.strategy = build_strategy(self._config, self.mesh, transport, self._trace, self._kernels)

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

    def attend(self, qkv: LazyQKV, site: Site) -> Tensor:
        """Attention of this rank's rows to all rows, [B, L, H, D]."""
        self.transport.health.arrive(f"attention {site.layer}")
        return self.strategy.attend(qkv, site)

    def gather(self, x_BLC: Tensor, segment: str) -> Tensor:
        """All ranks' tokens of a segment [B, S, C] on every rank, so that all go on with the same bits."""
        if self.size == 1:
            return x_BLC
        self.transport.health.arrive("the gather of outputs")
        shares = self.shares(segment)
        B, _L, C = x_BLC.shape

        def gather() -> Tensor:
            parts = [x_BLC.new_empty(B, share, C) for share in shares]
            with self._trace.span("gather", "gather"):
                self.transport.world.all_gather(x_BLC.contiguous(), parts).wait()
            for peer in range(self.size):
                self._trace.count(self.topology.link_class(self.rank, peer), x_BLC.nbytes, purpose="gather")
            return torch.cat(parts, dim=1)

        return used_on_current_stream(self.transport.control.submit_inline(gather).wait())
