"""Runs, steps and guidance branches are counted as a pipeline's scheduler goes, or as a bare transformer is called."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, UniPCMultistepScheduler
from test_engine_lossy import pipeline_call
from tiny_models import FAMILIES, sd3_inpaint_pipeline
from tiny_pipelines import PIPELINES, TEXT_WIDTH

from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld, run_ranks
from cocodiff.engine.engine import Engine, parallelize
from cocodiff.engine.progress import StepCounter

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
CLOSE_SIGMAS = [1.0, 0.9995, 0.999, 0.9985, 0.5, 0.4999, 0.001]  # of which bfloat16 keeps four apart


@pytest.fixture
def alone():
    """The transport of a world of one rank."""
    transport = LoopbackTransport(LoopbackWorld(1), 0)
    yield transport
    transport.close()


def watched(engine: Engine) -> list[tuple[int, int, int]]:
    """Fills with (run, step, branch) of each call of the engine's model. The engine is entered."""
    seen: list[tuple[int, int, int]] = []
    counter = engine.counter
    engine.model.register_forward_pre_hook(lambda *_: seen.append((counter.run, counter.step, counter.branch)))
    return seen


def calls(runs: int, steps: int, branches: int) -> list[tuple[int, int, int]]:
    return [(r, s, b) for r in range(runs) for s in range(steps) for b in range(branches)]


def generating(family: str, pipe: Any, **more: Any) -> Any:
    """An image of 32 x 32 pixels in bfloat16, guided, with embeddings for prompts."""
    text = torch.full((1, 3, TEXT_WIDTH), 0.1, dtype=torch.bfloat16)
    pooled = torch.zeros(1, 16, dtype=torch.bfloat16)
    mask = torch.ones(1, 3).long()
    arguments: dict[str, Any] = {
        "sd3": {
            "pooled_prompt_embeds": pooled,
            "negative_prompt_embeds": text,
            "negative_pooled_prompt_embeds": pooled,
            "guidance_scale": 3.0,
        },
        "flux": {
            "pooled_prompt_embeds": pooled,
            "negative_prompt_embeds": -text,
            "negative_pooled_prompt_embeds": pooled,
            "true_cfg_scale": 3.0,
        },
        "klein": {"negative_prompt_embeds": -text, "guidance_scale": 3.0},
        "qwen": {
            "prompt_embeds_mask": mask,
            "negative_prompt_embeds": -text,
            "negative_prompt_embeds_mask": mask,
            "true_cfg_scale": 3.0,
        },
    }[family]
    generator = torch.Generator().manual_seed(0)
    return pipe(
        prompt_embeds=text, height=32, width=32, generator=generator, output_type="latent", **arguments | more
    ).images


@pytest.mark.parametrize(("family", "branches"), [("sd3", 1), ("flux", 2), ("klein", 2), ("qwen", 2)])
def test_timesteps_that_bfloat16_rounds_together_are_steps_of_their_own(family, branches, alone):
    """Two images in a row, with one call of the transformer in a step (SD3 guides in one batch) or with two."""
    pipe = PIPELINES[family]().to(torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), parallelize(pipe, transport=alone) as engine:
        seen = watched(engine)
        for _ in range(2):
            generating(family, pipe, sigmas=CLOSE_SIGMAS, num_inference_steps=len(CLOSE_SIGMAS))
    assert seen == calls(2, len(CLOSE_SIGMAS), branches)


def test_skipped_layers_are_a_branch(alone):
    """SD3 calls its transformer once more for them, at some of the steps."""
    pipe = PIPELINES["sd3"]().to(torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), parallelize(pipe, transport=alone) as engine:
        seen = watched(engine)
        generating(
            "sd3",
            pipe,
            num_inference_steps=4,
            skip_guidance_layers=[0],
            skip_layer_guidance_start=0.0,
            skip_layer_guidance_stop=0.6,
        )
    assert seen == [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (0, 3, 0)]


def with_scheduler(kind: Any, **settings: Any) -> Any:
    pipe = sd3_inpaint_pipeline(12)
    pipe.scheduler = kind(**settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(
    ("make", "evaluations"),
    [
        (lambda: with_scheduler(FlowMatchHeunDiscreteScheduler), 11),
        (lambda: with_scheduler(UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True), 6),
    ],
    ids=["Heun", "UniPC"],
)
def test_schedulers_of_second_order(make, evaluations):
    """V-Major's schedule goes over all calls of the transformer and ends where every token stays; its caches are of
    one branch. Each call is told its noise level."""
    pipe = make()

    def work(transport: Any) -> Any:
        own, held, sigmas = copy.deepcopy(pipe), [], []
        with torch.no_grad(), parallelize(own, "cocodiff", transport=transport, sync_interval=0) as engine:
            seen = watched(engine)
            engine.model.register_forward_hook(lambda *_: held.append(engine.sequence.strategy.codec.bytes_held()))
            engine.model.register_forward_hook(lambda *_: sigmas.append(engine.sequence.strategy.codec.moment.sigma))
            pipeline_call(own, 0, steps=6)
        assert sigmas == own.scheduler.sigmas[:evaluations].tolist()
        return seen, held, engine.drift_profile()

    seen, held, profile = run_ranks(3, work)[0]
    assert seen == calls(1, evaluations, 1)
    assert [row["stable_fraction"] for row in profile][-1] == 1
    assert held[0] == held[-1]


def test_a_run_that_starts_within_the_schedule(alone):
    pipe = sd3_inpaint_pipeline(12)
    pipe.set_progress_bar_config(disable=True)
    image, mask = torch.rand(1, 3, 64, 64), torch.ones(1, 1, 64, 64)
    with torch.no_grad(), parallelize(pipe, transport=alone) as engine:
        seen, sigmas = watched(engine), []
        engine.model.register_forward_hook(lambda *_: sigmas.append(engine.counter.sigma))
        for strength in (0.5, 0.25, 1.0):
            sigmas.clear()
            pipe(
                image=image,
                mask_image=mask,
                height=64,
                width=64,
                num_inference_steps=8,
                strength=strength,
                prompt_embeds=torch.zeros(1, 3, 16),
                pooled_prompt_embeds=torch.zeros(1, 16),
                guidance_scale=1,
                output_type="latent",
            )
            assert engine._steps() == 8 * strength
            assert sigmas == pipe.scheduler.sigmas[-1 - len(sigmas) : -1].tolist()
    assert seen == [*[(0, s, 0) for s in range(4)], *[(1, s, 0) for s in range(2)], *[(2, s, 0) for s in range(8)]]


def test_a_run_after_one_that_was_stopped(alone):
    """Also where it was stopped at its first step, which the new run begins with the same timestep and sample."""
    pipe = PIPELINES["flux"]()
    pipe.set_progress_bar_config(disable=True)

    def stop(at: int, step: int) -> None:
        if step == at:
            raise RuntimeError("stopped")

    def callback_at(at: int) -> Any:
        return lambda _pipe, step, _timestep, tensors: (stop(at, step), tensors)[1]

    arguments: dict[str, Any] = {
        "prompt_embeds": torch.full((1, 3, TEXT_WIDTH), 0.1),
        "pooled_prompt_embeds": torch.zeros(1, 16),
        "height": 32,
        "width": 32,
        "num_inference_steps": 4,
        "output_type": "latent",
    }
    with torch.no_grad(), parallelize(pipe, transport=alone) as engine:
        seen = watched(engine)
        for at in (0, 2):
            with pytest.raises(RuntimeError, match="stopped"):
                pipe(**arguments, callback_on_step_end=callback_at(at))
        pipe(**arguments)
    assert seen == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0), *[(2, s, 0) for s in range(4)]]


# Bare transformers ----------------------------------------------------------------------------------------------------


def counted(*made: tuple[float, float], counter: StepCounter | None = None) -> list[tuple[int, int, int]]:
    """What is counted of calls with (timestep, value of the sample)."""
    counter, seen = counter or StepCounter(), []
    sample = torch.empty(1, 4, 3)
    for timestep, value in made:
        counter.call(torch.full((2,), timestep), sample.fill_(value))  # in place, as a loop may do
        seen.append((counter.run, counter.step, counter.branch))
    return seen


def test_a_bare_transformers_timesteps():
    falling = [(t, t) for t in (900.0, 900.0, 500.0, 500.0, 100.0, 100.0)]
    again = [(t, t) for t in (900.0, 900.0, 500.0)]
    assert counted(*falling, *again) == [*calls(1, 3, 2), (1, 0, 0), (1, 0, 1), (1, 1, 0)]


def test_a_bare_transformer_at_rounded_timesteps():
    """A sample that moves tells steps apart, and branches have it in common."""
    assert counted((1, 9), (1, 9), (1, 8.9), (1, 8.9), (0.5, 5), (0.5, 5), (0.5, 4), (0.5, 4)) == calls(1, 4, 2)


def test_a_bare_transformer_of_second_order():
    assert counted((1, 9), (0.5, 4), (0.5, 5), (0.2, 1), (0.2, 3), (0.1, 1)) == calls(1, 6, 1)


def test_a_bare_transformer_that_begins_anew_at_the_same_timestep():
    """With noise of its own it is noticed; told, it needs no notice. Further on nothing is taken for a new run."""
    assert counted((1, 1), (1, -1), (0.5, 2)) == [(0, 0, 0), (1, 0, 0), (1, 1, 0)]
    counter = StepCounter()
    counted((1, 1), counter=counter)
    counter.new_run()
    assert counted((1, 1), (0.5, 2), counter=counter) == [(1, 0, 0), (1, 1, 0)]
    assert counted((1, 1), (0.5, 1), (0.5, 9)) == calls(1, 3, 1)


def test_a_call_of_another_size_is_a_branch():
    counter = StepCounter()
    for number, batch in enumerate((2, 1)):
        counter.call(torch.ones(1), torch.ones(batch, 4))
        assert (counter.step, counter.branch) == (0, number)


def test_a_text_that_the_step_has_not_seen_is_a_branch():
    """Whatever comes with it: guidance by images calls with samples that differ in part."""
    counter, seen = StepCounter(), []
    for timestep, value, text in ((1, 9, 0), (0.5, 5, 0), (0.5, 4, 1), (0.5, 4.9, 0), (0.5, 3.9, 1)):
        counter.call(torch.full((1,), timestep), torch.full((3,), value), torch.full((2,), text))
        seen.append((counter.step, counter.branch))
    assert seen == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_runs_of_one_step_are_told_apart_by_their_schedules():
    counter, seen = StepCounter(), []
    for schedule in (torch.ones(1), torch.ones(1)):
        for _ in range(2):
            counter.call(torch.ones(1), torch.ones(3), None, SimpleNamespace(timesteps=schedule, step_index=None))
            seen.append((counter.run, counter.step, counter.branch))
    assert seen == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]


def noise(seed: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("told", [False, True])
def test_a_bare_run_leaves_no_ghost_in_the_next(told):
    """A run that ends after its first call, then another one from the same timestep: that of an engine of its own."""
    make, inputs_of = FAMILIES["sd3"]
    model, inputs = make(6), inputs_of(1, 6, 7, 5)
    settings = {"steps": 3, "threshold": 0.3, "sync_interval": 0}

    def work(transport: Any) -> None:
        own, outputs = copy.deepcopy(model), []

        def denoise(seed: int, timesteps: tuple[float, ...]) -> list[torch.Tensor]:
            sample = noise(seed, inputs["hidden_states"])
            return [
                own(**inputs | {"hidden_states": sample * (1 + t / 10), "timestep": torch.full((1,), 1000 * t)})[0]
                for t in timesteps
            ]

        with torch.no_grad():
            with parallelize(own, "cocodiff+", transport=transport, **settings) as engine:
                expected = denoise(1, (0.9, 0.6, 0.3))
            with parallelize(own, "cocodiff+", transport=transport, **settings) as engine:
                denoise(2, (0.9,))
                if told:
                    engine.new_run()
                outputs = denoise(1, (0.9, 0.6, 0.3))
        for output, other in zip(outputs, expected, strict=True):
            assert torch.equal(output, other)

    run_ranks(3, work)
