"""Runs, steps and guidance branches are counted as a pipeline's scheduler goes, or as a bare transformer is called."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, UniPCMultistepScheduler
from on_ranks import Call
from planned_models import cast
from seams import steps_of
from test_guidance import guiding
from tiny_models import FAMILIES, sd3_inpaint_pipeline
from tiny_pipelines import PIPELINES
from value_tables import beside

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import Engine, parallelize
from cocodiff.engine.progress import StepCounter

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
Calls = list[tuple[int, int, int]]  # the run, step and branch of each
CLOSE_SIGMAS = [1.0, 0.9995, 0.999, 0.9985, 0.5, 0.4999, 0.001]  # of which bfloat16 keeps four apart


def watched(engine: Engine) -> Calls:
    """Fills with what is counted at each call of the engine's model. The engine is entered."""
    seen: Calls = []
    counter = engine.counter
    engine.model.register_forward_pre_hook(lambda *_: seen.append((counter.run, counter.step, counter.branch)))
    return seen


def calls(runs: int, steps: int, branches: int) -> Calls:
    return [(r, s, b) for r in range(runs) for s in range(steps) for b in range(branches)]


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


@cache
def prompts_of(family: str) -> Call:
    return guiding(family)[1]


def generating(family: str, pipe: Any, **more: Any) -> None:
    """Makes an image of 32 x 32 pixels in the pipeline's dtype, guided, with embeddings for prompts."""
    given = cast(prompts_of(family), pipe.transformer.dtype)
    pipe(**given | {"height": 32, "width": 32, "output_type": "latent"} | more)


@pytest.mark.parametrize(("family", "branches"), [("sd3", 1), ("flux", 2), ("klein", 2), ("qwen", 2)])
def test_timesteps_that_bfloat16_rounds_together_are_steps_of_their_own(family, branches, alone):
    """Two images in a row, with one call of the transformer in a step (SD3 guides in one batch) or with two."""
    pipe = quiet(PIPELINES[family]().to(torch.bfloat16))
    with torch.no_grad(), parallelize(pipe, transport=alone) as engine:
        seen = watched(engine)
        for _ in range(2):
            generating(family, pipe, sigmas=CLOSE_SIGMAS, num_inference_steps=len(CLOSE_SIGMAS))
    assert seen == calls(2, len(CLOSE_SIGMAS), branches)


def test_skipped_layers_are_a_branch(alone):
    """SD3 calls its transformer once more for them, at some of the steps."""
    pipe = quiet(PIPELINES["sd3"]().to(torch.bfloat16))
    skipped = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.6}
    with torch.no_grad(), parallelize(pipe, transport=alone) as engine:
        seen = watched(engine)
        generating("sd3", pipe, num_inference_steps=4, **skipped)
    assert seen == [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (0, 3, 0)]


@pytest.mark.parametrize(
    ("scheduler", "evaluations"),
    [
        (FlowMatchHeunDiscreteScheduler(), 11),
        (UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True), 6),
    ],
    ids=["Heun", "UniPC"],
)
def test_schedulers_of_second_order(scheduler, evaluations):
    """V-Major's schedule goes over all calls of the transformer and ends where every token stays; its caches are of
    one branch. Each call is told its noise level."""
    pipe = quiet(PIPELINES["sd3"](heads=12))
    pipe.scheduler = scheduler

    def work(transport: Any) -> Any:
        own, held, sigmas = copy.deepcopy(pipe), [], []
        with torch.no_grad(), parallelize(own, "cocodiff", transport=transport, sync_interval=0) as engine:
            seen, codec = watched(engine), engine.sequence.strategy.codec
            engine.model.register_forward_hook(lambda *_: held.append(codec.bytes_held()))
            engine.model.register_forward_hook(lambda *_: sigmas.append(codec.step_info.sigma))
            generating("sd3", own, num_inference_steps=6, generator=torch.Generator().manual_seed(0))
        assert sigmas == own.scheduler.sigmas[:evaluations].tolist()
        return seen, held, engine.drift_profile()

    seen, held, profile = run_ranks(3, work)[0]
    assert seen == calls(1, evaluations, 1)
    stable = [row["stable_fraction"] for row in profile]
    assert [row["step"] for row in profile] == list(range(evaluations))
    assert stable[0] == 0 and stable[-1] == 1 and stable == sorted(stable)
    assert profile[0]["change"] is None and all(row["change"] > 0 for row in profile[1:])
    assert held[0] == held[-1]


def test_a_run_that_starts_within_the_schedule(alone):
    pipe, side = quiet(sd3_inpaint_pipeline(12)), {"height": 64, "width": 64}
    given = {"image": torch.rand(1, 3, 64, 64), "mask_image": torch.ones(1, 1, 64, 64), "guidance_scale": 1, **side}
    given |= {"prompt_embeds": torch.zeros(1, 3, 16), "pooled_prompt_embeds": torch.zeros(1, 16)}
    with torch.no_grad(), parallelize(pipe, transport=alone, steps=99) as engine:  # the pipeline knows better
        seen, sigmas = watched(engine), []
        engine.model.register_forward_hook(lambda *_: sigmas.append(engine.counter.sigma))
        for strength in (0.5, 0.25, 1.0):
            sigmas.clear()
            pipe(**given, num_inference_steps=8, strength=strength, output_type="latent")
            assert steps_of(engine) == 8 * strength
            assert sigmas == pipe.scheduler.sigmas[-1 - len(sigmas) : -1].tolist()
    assert seen == [*calls(1, 4, 1), *[(1, s, 0) for s in range(2)], *[(2, s, 0) for s in range(8)]]


def test_a_run_after_one_that_was_stopped(alone):
    """Also where it was stopped at its first step, which the new run begins with the same timestep and sample."""
    pipe = quiet(PIPELINES["klein"]())

    def stop_at(last: int) -> Any:
        def stop(_pipe: Any, step: int, _timestep: Any, tensors: Any) -> Any:
            if step == last:
                raise RuntimeError("stopped")
            return tensors

        return stop

    with torch.no_grad(), parallelize(pipe, transport=alone) as engine:
        seen = watched(engine)
        for last in (0, 2, 4):
            try:
                stopping = {"callback_on_step_end": stop_at(last), "generator": torch.Generator().manual_seed(0)}
                generating("klein", pipe, num_inference_steps=4, guidance_scale=1.0, **stopping)
            except RuntimeError as error:
                assert str(error) == "stopped" and last < 4
    assert seen == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0), *[(2, s, 0) for s in range(4)]]


# Bare transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("made", "expected"), beside(__file__))
def test_a_bare_transformer_tells_by_its_calls(made, expected):
    """Of calls with a timestep, the value of the sample, that of the text and the batch; None announces a run."""
    counter, seen = StepCounter(), []
    sample = torch.empty(1, 4, 3)
    for call in made:
        if call is None:
            counter.new_run()
            continue
        timestep, value, text, batch = [*call, *(0.0, 0.0, 0, 1)[len(call) :]]
        given = sample.fill_(value).expand(batch, 4, 3)  # in place, as a loop may do
        counter.call(torch.full((2,), timestep), given, torch.full((2,), text))
        seen.append((counter.run, counter.step, counter.branch))
    assert seen == [tuple(map(int, one)) for one in expected.split()]


def test_runs_of_one_step_are_told_apart_by_their_schedules():
    counter, seen = StepCounter(), []
    for schedule in (torch.ones(1), torch.ones(1)):
        for _ in range(2):
            counter.call(torch.ones(1), torch.ones(3), None, SimpleNamespace(timesteps=schedule, step_index=None))
            seen.append((counter.run, counter.step, counter.branch))
    assert seen == calls(2, 1, 2)


@pytest.mark.parametrize("told", [False, True])
def test_a_bare_run_leaves_no_ghost_in_the_next(told):
    """A run that ends after its first call, then another one from the same timestep: that of an engine of its own."""
    make, inputs_of = FAMILIES["sd3"]
    model, inputs = make(6), inputs_of(1, 6, 7, 5)
    settings = {"steps": 3, "threshold": 0.3, "sync_interval": 0}

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)

        def denoise(seed: int, *timesteps: float) -> torch.Tensor:
            noise = torch.randn(inputs["hidden_states"].shape, generator=torch.Generator().manual_seed(seed))
            samples = [{"hidden_states": noise * (1 + t / 10), "timestep": torch.tensor([1000 * t])} for t in timesteps]
            return torch.stack([own(**inputs | sample)[0] for sample in samples])

        with torch.no_grad():
            with parallelize(own, "cocodiff+", transport=transport, **settings):
                expected = denoise(1, 0.9, 0.6, 0.3)
            with parallelize(own, "cocodiff+", transport=transport, **settings) as engine:
                denoise(2, 0.9)
                if told:
                    engine.new_run()
                assert torch.equal(denoise(1, 0.9, 0.6, 0.3), expected)

    run_ranks(3, work)
