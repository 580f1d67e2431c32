"""The engine in torch's inference mode: the same bits as without, whichever mode a call is made in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from covering import covering
from tiny_models import FAMILIES

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
TIMESTEPS = (0.9, 0.7, 0.5, 0.3)


def steps(model: Any, inputs: dict[str, Any], modes: tuple[Any, ...]) -> torch.Tensor:
    """The model's outputs over a few steps of an input that moves, each in its mode, a context manager's class."""
    outputs = []
    for number, (timestep, mode) in enumerate(zip(TIMESTEPS, modes, strict=True)):
        moved = {
            "hidden_states": inputs["hidden_states"] * (1 + 0.1 * number),
            "timestep": torch.full_like(inputs["timestep"], timestep),
        }
        with mode():
            outputs.append(model(**inputs | moved)[0].clone())
    return torch.stack([output.detach() for output in outputs])


@pytest.mark.parametrize(("preset", "chunks", "ring"), covering(("tapa", "cocodiff+"), (1, 2), ("auto", 2)))
def test_inference_mode_gives_the_same_bits(preset, chunks, ring):
    """Also where one engine is used in inference mode first, then without, and where a run changes over."""
    make, inputs_of = FAMILIES["sd3"]
    model, inputs = make(12), inputs_of(2, 6, 7, 5)
    plain, inference = (torch.no_grad,) * 4, (torch.inference_mode,) * 4

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with parallelize(own, preset, transport=transport, steps=4, threshold=0.3, chunks=chunks, ring=ring):
            expected = steps(own, inputs, plain)
            for modes in (inference, plain, inference[:2] + plain[:2]):
                outputs = steps(own, inputs, modes)
                same = outputs[:2] if modes == inference[:2] + plain[:2] and preset == "cocodiff+" else outputs
                assert torch.equal(same, expected[: len(same)]), modes

    run_ranks(4, work)
