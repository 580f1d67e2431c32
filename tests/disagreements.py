"""Programs of which one rank runs another than the others. Run as `python disagreements.py NAME TRANSPORT` in a rank of
mpiexec, this prints what the rank was told."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from tiny_pipelines import TEXT_WIDTH, flux_pipeline

from cocodiff.config.config import Config
from cocodiff.config.errors import PeerLost
from cocodiff.engine.engine import Engine, parallelize

Program = Callable[[Any, Engine, bool], object]  # of a pipeline, its engine, and whether this is the odd rank


def image(pipe: Any, at_step_1: Callable[[], object] | None = None, guidance: float = 3.0) -> None:
    def after_step(_pipe: Any, step: int, _timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step == 1 and at_step_1 is not None:
            at_step_1()
        return kept

    noise = torch.randn(1, 5, TEXT_WIDTH, generator=torch.Generator().manual_seed(1))
    pipe(
        prompt_embeds=noise,
        pooled_prompt_embeds=torch.zeros(1, 16),
        negative_prompt_embeds=-noise,
        negative_pooled_prompt_embeds=torch.zeros(1, 16),
        true_cfg_scale=guidance,
        height=32,
        width=32,
        num_inference_steps=3,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        callback_on_step_end=after_step,
    )


def fail() -> None:
    raise ValueError("one rank's own")


def caught(call: Callable[[], object]) -> None:
    """As who goes on with the next slice."""
    try:
        call()
    except ValueError as error:
        assert str(error) == "one rank's own", error


def one_image_more(pipe: Any, _engine: Engine, odd: bool) -> None:
    for _ in range(1 + odd):
        image(pipe)


def one_image_less(pipe: Any, _engine: Engine, odd: bool) -> None:
    for _ in range(2 - odd):
        image(pipe)


def asks_alone(pipe: Any, engine: Engine, odd: bool) -> None:
    image(pipe, engine.bytes if odd else None)


def interrupted(pipe: Any, _engine: Engine, odd: bool) -> None:
    image(pipe, (lambda: setattr(pipe, "_interrupt", True)) if odd else None)


def caught_between_calls(pipe: Any, _engine: Engine, odd: bool) -> None:
    for _ in range(2):
        caught(lambda: image(pipe, fail if odd else None))


def caught_in_a_call(pipe: Any, _engine: Engine, odd: bool) -> None:
    """After one of a call's two attentions: the other ranks wait in the second one."""
    block = pipe.transformer.transformer_blocks[0]
    hook = block.register_forward_hook(lambda *_: fail()) if odd else None
    caught(lambda: image(pipe))
    if hook is not None:
        hook.remove()
    image(pipe)


def another_order(pipe: Any, engine: Engine, odd: bool) -> None:
    calls = [lambda: image(pipe), engine.drift_profile]
    for call in calls[::-1] if odd else calls:
        call()


def new_run(pipe: Any, engine: Engine, odd: bool) -> None:
    image(pipe, engine.new_run if odd else None)


def barrier(pipe: Any, engine: Engine, odd: bool) -> None:
    image(pipe)
    if odd:
        engine.transport.world.barrier()
    image(pipe)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        one_image_more,
        one_image_less,
        asks_alone,
        interrupted,
        caught_between_calls,
        caught_in_a_call,
        another_order,
        new_run,
        barrier,
    )
}


def told(pipe: Any, name: str, odd: int, config: Config, transport: Any = None) -> str:
    """Return what ends a rank's program."""
    pipe.set_progress_bar_config(disable=True)
    try:
        with torch.no_grad(), parallelize(pipe, config=config, transport=transport) as engine:
            PROGRAMS[name](pipe, engine, engine.rank == odd)
    except (PeerLost, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    sys.stderr.write(
        told(copy.deepcopy(flux_pipeline()), sys.argv[1], 1, Config.preset("tapa", transport=sys.argv[2])) + "\n"
    )
