"""How close a parallel transformer must come to one process, and what a rank of any transport checks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import sd3_inputs, sd3_transformer
from torch import Tensor

from cocodiff.comm.transport import Transport
from cocodiff.engine import parallelize

EXCHANGES = ("flat", "tapa")


@dataclass(frozen=True)
class Case:
    """A model and a call of it: an image grid of height x width tokens, `text` text tokens."""

    heads: int
    height: int
    width: int
    text: int
    batch: int = 1
    dual: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def model(self) -> Any:
        return sd3_transformer(self.heads, dual=self.dual)

    def inputs(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Values that are exact in the case's dtype, so that every precision computes on the same ones."""
        rounded = sd3_inputs(self.batch, self.height, self.width, self.text, self.dtype)
        return {name: value.to(dtype or self.dtype) for name, value in rounded.items()}


@dataclass(frozen=True)
class Expected:
    """A model in its dtype, its own output, and the truth that it approximates: the same weights in fp64."""

    model: Any
    plain: Tensor
    truth: Tensor

    @classmethod
    def of(cls, case: Case) -> Expected:
        model = case.model().to(case.dtype)
        with torch.no_grad():
            truth = deepcopy(model).double()(**case.inputs(torch.float64)).sample
            return cls(model, model(**case.inputs()).sample, truth)

    def check(self, output: Tensor) -> None:
        """The error is at most twice that of plain torch at this dtype, plus rounding of the largest value."""
        assert output.dtype == self.plain.dtype and output.shape == self.plain.shape
        rounding = torch.finfo(output.dtype).eps * self.truth.abs().max()
        allowed = 2 * (self.plain - self.truth).abs().max() + rounding
        error = (output - self.truth).abs().max()
        assert error <= allowed, f"error {error:.3e} to the truth, {allowed:.3e} allowed"


def parallel_outputs(transport: Transport, model: Any, case: Case, machine: str) -> list[Tensor]:
    """One rank's outputs with every exchange, of its own copy of the model."""
    own, outputs = deepcopy(model), []
    for exchange in EXCHANGES:
        with torch.no_grad(), parallelize(own, transport=transport, exchange=exchange, machine=machine):
            outputs.append(own(**case.inputs()).sample)
    return outputs
