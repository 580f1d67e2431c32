"""How close a parallel transformer must come to one process, and what a rank of any transport checks."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import FAMILIES
from torch import Tensor

from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.transport import Transport
from cocodiff.engine.engine import parallelize

STEPS = 4
ORDERS = ("joint", "v_first")
# Whole models take long: split's joint order is left to tests/attention.
VARIANTS = [*((exchange, order) for exchange in ("flat", "tapa") for order in ORDERS), ("split", "v_first")]


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
    family: str = "sd3"

    def model(self) -> Any:
        extra = {"dual": self.dual} if self.dual else {}
        return FAMILIES[self.family][0](self.heads, **extra)

    def inputs(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Values that are exact in the case's dtype, so that every precision computes on the same ones."""
        rounded = FAMILIES[self.family][1](self.batch, self.height, self.width, self.text, self.dtype)
        wanted = dtype or self.dtype
        kept = ("img_ids", "txt_ids", "img_shapes", "encoder_hidden_states_mask")
        return {name: value if name in kept else value.to(wanted) for name, value in rounded.items()}


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


def parallel_outputs(
    transport: Transport, model: Any, case: Case, machine: str, engines: list[Any] | None = None, **more: Any
) -> list[Tensor]:
    """One rank's outputs with every exchange and order, of its own copy of the model. engines: a list to which the
    engines are added; more: settings of the engine."""
    own, outputs = deepcopy(model), []
    for exchange, order in VARIANTS:
        settings = {"exchange": exchange, "order": order, "machine": machine, **more}
        with torch.no_grad(), parallelize(own, transport=transport, **settings) as engine:
            outputs.append(own(**case.inputs()).sample)
        if engines is not None:
            engines.append(engine)
    return outputs


def guided_outputs(transport: Transport, model: Any, case: Case, machine: str, **more: Any) -> list[Tensor]:
    """One rank's outputs of the second step of a loop that guides: the case's call twice, each by a part of the ranks,
    or once, where both branches are in its batch (SD3). The first step, at a higher timestep, shows how many calls a
    step has."""
    own, outputs = deepcopy(model), []
    with torch.no_grad(), parallelize(own, transport=transport, guidance_parallel=2, machine=machine, **more):
        for earlier in (0.3, 0.0):
            inputs = case.inputs()
            inputs["timestep"] = inputs["timestep"] + earlier
            outputs = [own(**inputs).sample for _ in range(1 if case.family == "sd3" else 2)]
    return [output + 0 for output in outputs]


def check_ranks(of_ranks: list[list[Tensor]], expected: Expected, family: str) -> None:
    """Every variant on every rank gives the same bits, close enough to one process.

    FLUX.2's single blocks are the exception: v first is another matrix product than all at once, so there the two
    orders may round differently.
    """
    of_order = {
        order: [outputs[n] for outputs in of_ranks for n, (_, its) in enumerate(VARIANTS) if its == order]
        for order in ORDERS
    }
    for outputs in of_order.values():
        expected.check(outputs[0])
        assert all(torch.equal(output, outputs[0]) for output in outputs)
    if family != "flux2":
        assert torch.equal(of_order["joint"][0], of_order["v_first"][0])


def check_world(case: Case, size: int, machine: str = "local", expected: Expected | None = None, **more: Any) -> Any:
    """Run `parallel_outputs` on ranks of loopback and check them; the engines of all ranks are returned."""
    expected, engines = expected or Expected.of(case), list[Any]()
    of_ranks = run_ranks(
        size, lambda transport: parallel_outputs(transport, expected.model, case, machine, engines, **more), 120.0
    )
    check_ranks(of_ranks, expected, case.family)
    return engines


def denoise(model: Any, inputs: dict[str, Any], *modes: Any) -> Tensor:
    """The model's outputs over four steps of an input that moves. modes: of each step the class of a context manager in
    which it is called."""
    outputs = []
    for step, mode in enumerate(modes or (nullcontext,) * STEPS):
        moved = {
            "hidden_states": inputs["hidden_states"] * (1 + 0.1 * step),
            "timestep": torch.full_like(inputs["timestep"], 0.9 - 0.2 * step),
        }
        with mode():
            outputs.append(model(**inputs | moved)[0].clone())
    return torch.stack([output.detach() for output in outputs])
