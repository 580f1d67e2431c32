"""One layer of a model that is not there, by the engine's own attention: real messages, and waits for what computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention, Partial
from cocodiff.attention.strategy import Site
from cocodiff.config import Config
from cocodiff.kernels import Kernels, Prediction, Reconstructions
from cocodiff.planning.pricing import cost_of, prefer_linear
from cocodiff.planning.roofline import seconds
from cocodiff.topology.axes import Mesh
from cocodiff.topology.machine import Device
from cocodiff.trace import Trace
from cocodiff.wire.coding import Moment
from cocodiff_bench.engine_parts import make_strategy

if TYPE_CHECKING:
    from cocodiff_bench.model_step import Call


class WaitingKernels(Kernels):
    """What computes on a device is a wait: scoring, where all scores are zero, for which tokens stay plays no part; and
    the residual codec's two ends, by the same roofline as in plans, a launch each. Nothing is coded, and a comparison
    of predictions ends in favour of the dearer one."""

    score_s = 0.0
    dilation = 0.0

    def __init__(self, device: Device, path: str, note: Callable[[str, str], None]) -> None:
        super().__init__(path, note)
        self._device = device

    def encode_residual(
        self, x_BLHD: Tensor, known: Reconstructions, how: Prediction, bits: int, code_BLHW: Tensor, notes_2: Tensor
    ) -> None:
        self._wait("encode_residual", x_BLHD, (x_BLHD, known, how, bits, code_BLHW, notes_2))
        prefer_linear(how, notes_2)

    def decode_residual(self, code_BLHW: Tensor, known: Reconstructions, factor: float | None, bits: int) -> None:
        self._wait("decode_residual", known.last, (code_BLHW, known, factor, bits))

    def _wait(self, op: str, moved: Tensor, arguments: Sequence[Any]) -> None:
        device = self._device
        kernel_s = seconds(device, 0.0, *cost_of(op, [moved], arguments))
        time.sleep((kernel_s + device.launch_us * 1e-6) * self.dilation)

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
    """An exchange in an order, of all tokens, of V-Major's, or coded. Between two calls of `begin` are the layers of
    one step, one for each guidance branch."""

    def __init__(self, config: Config, mesh: Mesh, transport: Any, trace: Trace) -> None:
        self._step, self._attention = 0, Timed()
        self._kernels = WaitingKernels(mesh.topology.machine.device, config.kernels, trace.note_kernel)
        self._strategy = make_strategy(config, mesh, transport, trace, self._attention, self._kernels)

    def begin(self, fraction: float | None) -> None:
        """The next step of the image, as one in which this fraction of the tokens stays (`Coding.step_kinds`).
        What ranks agree on at its beginning is once for all layers, so it is not a layer's."""
        self._step += 1
        self._strategy.coding.hold_at(fraction)
        self._strategy.coding.begin_step(Moment(0, self._step, 1))
        self._strategy.coding.agree()

    def settle(self, calls: Sequence[Call], fraction: float | None) -> None:
        """The whole step and those that differ from the ones which follow, without waits."""
        leading = 0 if fraction is None else self._strategy.coding.steps_to_settle
        for _ in range(1 + leading if leading else 0):
            self.begin(fraction)
            for branch, call in enumerate(calls):
                self.run(call, branch, 0.0)

    def run(self, call: Call, branch: int, dilation: float) -> None:
        """One layer, all that computes so many times longer."""
        self._attention.seconds, self._kernels.score_s = call.layer.attention * dilation, call.layer.score * dilation
        self._attention.pairs, self._kernels.dilation = sum(call.layout.rows) ** 2, dilation
        self._strategy.attend(call.qkv(dilation), Site("layer", branch))
        time.sleep(call.layer.rest * dilation)
