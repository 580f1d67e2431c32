"""Scripts of which one rank makes other calls than the rest: a table of them, and the driver that makes the calls.
As a program with a case in JSON and a folder, in a rank of mpiexec: writes there what the rank was told, and when."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import torch
from tiny_models import FAMILIES
from tiny_pipelines import TEXT_WIDTH, flux_pipeline
from value_tables import beside
from warm_ranks import warm_mpiexec

from cocodiff.comm.launch import detect
from cocodiff.config.config import Config
from cocodiff.engine.engine import parallelize

OWN = "one rank's own"  # an error that a script raises itself


@dataclass(frozen=True)
class Case:
    """One run of ranks that disagree.

    A call is `image STEPS [EVENT AT]`, `large STEPS`, `broken STEPS`, or one of `make_call`'s words; after `again`
    follow the calls of a second `parallelize`.
    """

    calls: tuple[str, ...]
    changed: tuple[str, ...]  # of the odd rank
    catches: str = ""  # ranks catch errors that are their "own", or "all", and go on with the next call
    ranks: int = 2
    odd: int = 1
    guided: bool = True  # the transformer is called twice a step
    settings: dict[str, Any] = field(default_factory=dict)  # of a Config, and its preset
    others: dict[str, Any] | None = None  # the odd rank's, if they differ

    def end_of(self, pipe: Any, rank: int, **more: Any) -> str:
        """Make the calls of a rank. Return the error that ended them, "" for none."""
        odd = rank == self.odd
        calls = ["again", *(self.changed if odd else self.calls)]
        settings = {**(self.others if odd and self.others is not None else self.settings)}
        config = Config.preset(settings.pop("preset"), **settings)
        pipe.set_progress_bar_config(disable=True)
        try:
            while calls:
                calls.pop(0)
                with torch.no_grad(), parallelize(pipe, config=config, **more) as engine:
                    while calls and calls[0] != "again":
                        try:
                            make_call(pipe, engine, calls.pop(0), self.guided)
                        except Exception as error:
                            if self.catches != "all" and not (self.catches and str(error) == OWN):
                                raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


CASES = {name: Case(*calls) for name, calls in beside(__file__).items()}


def make_call(pipe: Any, engine: Any, call: str, guided: bool) -> None:
    """Make one call of a script."""

    def fail(*_: object) -> None:
        raise ValueError(OWN)

    alone: dict[str, Callable[[], object]] = {
        "bytes": engine.bytes,
        "drift": engine.drift_profile,
        "forget": engine.forget_drift,
        "new_run": engine.new_run,
        "barrier": engine.transport.world.barrier,
        "raise": fail,
        "interrupt": lambda: setattr(pipe, "_interrupt", True),
        "call": lambda: call_transformer(pipe),
    }
    word, *of_image = call.split()
    if word in alone:
        alone[word]()
        return
    events = {int(of_image[2]): alone[of_image[1]]} if len(of_image) > 1 else {}

    def after_step(_pipe: Any, step: int, _timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        events.get(step, lambda: None)()
        return kept

    # After one of a call's two attentions: the other ranks wait in the second one.
    hooks = [pipe.transformer.transformer_blocks[0].register_forward_hook(fail)] if word == "broken" else []
    side, noise = 48 if word == "large" else 32, noise_of(1, 5, TEXT_WIDTH)
    text = {"prompt_embeds": noise, "pooled_prompt_embeds": torch.zeros(1, 16)}
    if guided:
        text |= {"negative_prompt_embeds": -noise, "negative_pooled_prompt_embeds": torch.zeros(1, 16)}
    more: dict[str, Any] = {"true_cfg_scale": 3.0 if guided else 1.0, "callback_on_step_end": after_step}
    more |= {"generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    try:
        pipe(**text, **more, height=side, width=side, num_inference_steps=int(of_image[0]))
    finally:
        for hook in hooks:
            hook.remove()


def call_transformer(pipe: Any) -> None:
    inputs = FAMILIES["flux"][1](1, 4, 4, 5) | {"encoder_hidden_states": noise_of(1, 5, TEXT_WIDTH)}
    inputs |= {"hidden_states": noise_of(1, 16, 16), "pooled_projections": noise_of(1, 16), "guidance": torch.ones(1)}
    pipe.transformer(**inputs, return_dict=False)


def noise_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def run_processes(case: Case, timeout_s: float) -> tuple[dict[int, dict[str, Any]], str]:
    """Run a case by mpiexec. Return for each rank that ended by itself its error and when, and what all have said."""
    with tempfile.TemporaryDirectory(prefix="cocodiff-disagreement-") as folder:
        said = "not all ranks have ended"
        with suppress(TimeoutExpired):
            words = json.dumps(asdict(case)), folder
            said = warm_mpiexec(case.ranks, Path(__file__), *words, timeout_s=timeout_s).stderr
        return {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("*.json")}, said


def main() -> None:
    torch.set_num_threads(1)
    case, rank = Case(**json.loads(sys.argv[1])), detect().rank
    error = case.end_of(copy.deepcopy(flux_pipeline()), rank)
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps({"error": error, "time": time.time()}))


if __name__ == "__main__":
    main()
