"""One layer of a model that is not there, by the engine's own attention: real messages, and waits for what computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention, Partial
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.config import Config
from cocodiff.kernels import Kernels, Onward, Prediction, Reconstructions
from cocodiff.kernels.lossless import Cut
from cocodiff.planning.costs import CallKind, costs_of
from cocodiff.planning.layers import SITES
from cocodiff.planning.memory import ModelShape
from cocodiff.planning.pricing import cost_of, prefer_linear
from cocodiff.planning.roofline import LAUNCHES, Layer, roofline, seconds
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Device, Topology
from cocodiff.trace import Trace
from cocodiff.wire.coding import Moment
from cocodiff_bench.engine_parts import make_strategy
from cocodiff_bench.waiting import after


@dataclass(frozen=True)
class Call:
    """One rank's part of an attention layer: tensors of full size and how long its device would compute."""

    layer: Layer
    layout: Layout
    x_BLHD: Tensor

    @classmethod
    def build(
        cls, shape: ModelShape, topology: Topology, size: int, batch: int, rank: int, text_tokens: int, parts: int
    ) -> Call:
        """parts: of the ranks, by which a call with both branches in its batch is divided."""
        layout = Layout.build(topology, replace(shape, text_tokens=text_tokens).segments(size), shape.heads)
        B = batch * max(1, shape.rows_per_image // parts)
        layer = roofline(shape, topology, sum(layout.rows), B, rank, layout)
        x_BLHD = torch.zeros(B, layout.rows[rank], shape.heads, shape.head_dim, dtype=torch.bfloat16)
        return cls(layer, layout, x_BLHD)

    def qkv(self, dilation: float) -> LazyQKV:
        qk = after(self.layer.project_qk / 2 * dilation, self.x_BLHD)
        v = after(self.layer.project_v * dilation, self.x_BLHD)
        return LazyQKV(qk, qk, v, tuple(part.segment for part in self.layout.parts), sum(self.layout.heads))


class WaitingKernels(Kernels):
    """What computes on a device is a wait: scoring, where all scores are zero, for which tokens stay plays no part; and
    both codecs' operations, by the same roofline as in plans, a launch each. Nothing is coded, and a comparison
    of predictions ends in favour of the dearer one."""

    score_s = 0.0
    dilation = 0.0

    def __init__(self, device: Device, path: str, note: Callable[[str, str], None]) -> None:
        super().__init__(path, note)
        self._device = device

    def encode_residual(
        self, x_BLHD: Tensor, known: Reconstructions, how: Prediction, bits: int, code_BLHW: Tensor, notes_N: Tensor
    ) -> None:
        self._wait("encode_residual", x_BLHD, (x_BLHD, known, how, bits, code_BLHW, notes_N))
        prefer_linear(how, notes_N)

    def note_change(self, x_BLHD: Tensor, last_BLHD: Tensor, notes_N: Tensor) -> None:
        self._wait("note_change", x_BLHD, (x_BLHD, last_BLHD, notes_N))

    def decode_residual(
        self, code_BLHW: Tensor, known: Reconstructions, factor: float | None, bits: int, onward: Onward | None = None
    ) -> None:
        self._wait("decode_residual", known.last, (code_BLHW, known, factor, bits, onward))

    def continue_linearly(self, last_BLHD: Tensor, before_BLHD: Tensor, onward: Onward) -> None:
        self._wait("continue_linearly", last_BLHD, (last_BLHD, before_BLHD, onward))

    def encode_lossless(
        self,
        x_BLHD: Tensor,
        known: Reconstructions,
        factor: float | None,
        cut: Cut,
        streams: Tensor,
        lengths_N: Tensor,
        needed_1: Tensor,
    ) -> None:
        self._wait("encode_lossless", x_BLHD, (x_BLHD, known, factor, cut, streams, lengths_N, needed_1))
        lengths_N.zero_()  # all streams fit in their first parts

    def stream_lengths(self, code_BLHW: Tensor, cut: Cut, like_BLHD: Tensor, lengths_N: Tensor) -> None:
        self._wait("stream_lengths", like_BLHD, (code_BLHW, cut, like_BLHD, lengths_N))
        lengths_N.zero_()

    def decode_lossless(
        self,
        code_BLHW: Tensor,
        rests: Tensor,
        lengths_N: Tensor,
        found: Tensor | None,
        known: Reconstructions,
        factor: float | None,
        cut: Cut,
    ) -> None:
        self._wait("decode_lossless", known.last, (code_BLHW, rests, lengths_N, found, known, factor, cut))

    def _wait(self, op: str, moved: Tensor, arguments: Sequence[Any]) -> None:
        device = self._device
        kernel_s = seconds(device, 0.0, *cost_of(op, [moved], arguments))
        time.sleep((kernel_s + LAUNCHES.get(op, 1) * device.launch_us * 1e-6) * self.dilation)

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> tuple[Tensor, Tensor]:
        time.sleep(self.score_s)
        return torch.zeros(v_BLHD.shape[:2]), torch.ones(v_BLHD.shape[:2])


class Timed(LocalAttention):
    """A wait in attention's place: `seconds` for all queries and keys, `pairs` of them, and less for fewer."""

    seconds, pairs = 0.0, 1

    def whole(self, q_BSGD: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor | None = None) -> Tensor:
        time.sleep(self.seconds)
        return torch.empty_like(q_BSGD)

    def part(self, q_BTGD: Tensor, k_BUGD: Tensor, _v: Tensor, _mask: Tensor | None = None) -> Partial:
        time.sleep(self.seconds * q_BTGD.shape[1] * k_BUGD.shape[1] / self.pairs)
        return Partial(torch.empty_like(q_BTGD), torch.zeros(q_BTGD.shape[:3]))


class StandIn:
    """An exchange in an order, of all tokens, of V-Major's, coded or displaced. Between two calls of `begin` are the
    layers of one step, one for each guidance branch.

    last_s: seconds that a layer has taken in every call of `run_behind`; record: what the trace has of the last one."""

    def __init__(self, config: Config, mesh: Mesh, transport: Any, trace: Trace) -> None:
        self._step, self._attention = 0, Timed()
        self.last_s: list[float] = []
        self.record: dict[str, Any] = {}
        self._trace, self._costs = trace, costs_of(config)
        self._kernels = WaitingKernels(mesh.topology.machine.device, config.kernels, trace.note_kernel)
        self._strategy = make_strategy(config, mesh, transport, trace, self._attention, self._kernels)

    def begin(self, kind: CallKind) -> None:
        """The next step of the image, of calls of this kind. What ranks agree on at its beginning is once for all
        layers, so it is not a layer's."""
        self._step += 1
        self._costs.hold_at(self._strategy.coding, kind)
        self._strategy.coding.begin_step(Moment(0, self._step, 1))
        self._costs.agree(self._strategy.coding)

    def settle(self, calls: Sequence[Call], kind: CallKind) -> None:
        """The whole step and those that differ from the ones which follow, without waits."""
        leading = 0 if kind.whole else self._costs.steps_to_settle
        for _ in range(1 + leading if leading else 0):
            self.begin(kind._replace(displaced=""))
            for number in range(SITES if kind.displaced else 1):
                for branch, call in enumerate(calls):
                    self.run(call, branch, 0.0, number)

    def run_behind(self, calls: Sequence[Call], kind: CallKind, dilation: float) -> None:
        """Three calls of a model of some layers that do not wait for what they send, of which the last one counts, as
        in plans (`record_layers`); then nothing is left in flight."""
        self._trace.clear()
        for _ in range(3):
            self.begin(kind)
            started = time.perf_counter()
            for number in range(SITES):
                for branch, call in enumerate(calls):
                    self.run(call, branch, dilation, number)
        self.last_s.append((time.perf_counter() - started) / SITES)
        self.record = self._trace.record()
        self._costs.catch_up(self._strategy.coding)

    def run(self, call: Call, branch: int, dilation: float, number: int = 0) -> None:
        """One layer, all that computes so many times longer. number: of layers that are alike."""
        self._attention.seconds, self._kernels.score_s = call.layer.attention * dilation, call.layer.score * dilation
        self._attention.pairs, self._kernels.dilation = sum(call.layout.rows) ** 2, dilation
        self._strategy.attend(call.qkv(dilation), Site(f"layer {number}", branch))
        time.sleep(call.layer.rest * dilation)
