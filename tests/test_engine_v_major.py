"""V-Major in whole models: nothing stable is nothing changed, in every family; clean starts; what it reports."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from covering import all_but
from tiny_models import FAMILIES, sd3_inpaint_pipeline

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize

STEPS = 4

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def denoise(model: Any, inputs: dict[str, Any], **changes: Any) -> torch.Tensor:
    """The model's outputs over a few steps of an input that moves."""
    outputs = []
    for step in range(STEPS):
        moved = inputs | {"hidden_states": inputs["hidden_states"] * (1 + 0.1 * step)}
        outputs.append(
            model(**moved | {"timestep": torch.full_like(inputs["timestep"], 0.9 - 0.2 * step)} | changes)[0]
        )
    return torch.stack(outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "size"),
    all_but([("sd3", 2), ("sd3", 12), ("flux", 3), ("flux2", 6), ("qwen", 3), ("qwen", 6)], FAMILIES, (2, 3, 6, 12)),
)
def test_nothing_stable_is_nothing_changed(family, size):
    make, inputs_of = FAMILIES[family]
    model, inputs = make(13), inputs_of(2, 6, 7, 5)
    lossy = {"selection": "v_major", "steps": STEPS, "order": "v_first"}

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad():
            with parallelize(own, transport=transport, order="v_first"):
                exact = denoise(own, inputs)
            for settings in ({"sync_interval": 1}, {"schedule": "fixed", "ratio": 0.0}):
                for scoring in ("source", "card"):
                    with parallelize(own, transport=transport, scoring=scoring, **lossy, **settings):
                        assert torch.equal(denoise(own, inputs), exact), (settings, scoring)
            with parallelize(own, transport=transport, schedule="fixed", ratio=0.8, sync_interval=0, **lossy):
                stale = denoise(own, inputs)
            assert torch.equal(stale[:1], exact[:1]) and not torch.equal(stale[1:], exact[1:])

    run_ranks(size, work)


def pipeline_call(pipe: Any, seed: int, steps: int = 5, side: int = 64, prompt_tokens: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(1, 3, side, side, generator=generator)
    mask = torch.zeros(1, 1, side, side)
    mask[..., 16:48, 16:48] = 1
    return pipe(
        image=image,
        mask_image=mask,
        height=side,
        width=side,
        num_inference_steps=steps,
        strength=1.0,
        prompt_embeds=torch.full((1, prompt_tokens, 16), 0.1),
        pooled_prompt_embeds=torch.zeros(1, 16),
        generator=generator,
        guidance_scale=1,
        output_type="pt",
    ).images


@pytest.mark.parametrize("preset", ["cocodiff", "cocodiff+", "coded"])
def test_an_image_leaves_no_ghost(preset):
    """An image of another size, prompt and number of steps in between changes nothing; leaving frees all caches."""
    pipe = sd3_inpaint_pipeline(12)

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        own.set_progress_bar_config(disable=True)
        with torch.no_grad(), parallelize(own, preset, transport=transport) as engine:
            first = pipeline_call(own, 0)
            held = engine.sequence.strategy.codec.bytes_held()
            pipeline_call(own, 1, steps=3, side=96, prompt_tokens=7)
            again = pipeline_call(own, 0)
            assert torch.equal(first, again)
            assert engine.sequence.strategy.codec.bytes_held() == held > 0
        assert engine.sequence.strategy.codec.bytes_held() == 0

    run_ranks(3, work)


@pytest.mark.parametrize("preset", ["cocodiff+", "coded-"])
def test_an_interrupted_image_leaves_nothing_behind(preset):
    """All ranks stop in the middle of an image; the same models then give what untouched ones give."""
    pipe = sd3_inpaint_pipeline(12)
    pipe.set_progress_bar_config(disable=True)
    untouched, interrupted = ([copy.deepcopy(pipe) for _ in range(3)] for _ in range(2))
    engines = []

    def restore(pipes: list[Any], transport: Any) -> torch.Tensor:
        own = pipes[transport.rank]
        with torch.no_grad(), parallelize(own, preset, transport=transport) as engine:
            engines.append(engine)
            return pipeline_call(own, 0)

    def stop(_module: Any, _arguments: Any, call: list[int]) -> None:
        call.append(1)
        if len(call) == 4:
            raise RuntimeError("stopped by hand")

    expected = run_ranks(3, partial(restore, untouched))
    calls: list[list[int]] = [[], [], []]
    hooks = [
        own.transformer.register_forward_pre_hook(lambda m, a, call=call: stop(m, a, call))
        for own, call in zip(interrupted, calls, strict=True)
    ]
    with pytest.raises(RuntimeError, match="stopped by hand"):
        run_ranks(3, partial(restore, interrupted))
    for hook in hooks:
        hook.remove()
    assert [engine.sequence.strategy.codec.bytes_held() for engine in engines] == [0] * 6
    for one, other in zip(run_ranks(3, partial(restore, interrupted)), expected, strict=True):
        assert torch.equal(one, other)


def test_a_pipeline_tells_how_many_steps_run():
    pipe = sd3_inpaint_pipeline(12)

    def work(transport: Any) -> list:
        own = copy.deepcopy(pipe)
        own.set_progress_bar_config(disable=True)
        with torch.no_grad(), parallelize(own, "cocodiff", transport=transport, sync_interval=0) as engine:
            pipeline_call(own, 0, steps=6)
        return engine.drift_profile()

    profile = run_ranks(4, work)[0]
    assert [row["step"] for row in profile] == list(range(6))
    realised = [row["stable_fraction"] for row in profile]
    assert realised[0] == 0 and realised[-1] == 1 and realised == sorted(realised)
    assert profile[0]["change"] is None and all(row["change"] > 0 for row in profile[1:])


def test_a_bare_model_must_be_told_the_steps():
    make, inputs_of = FAMILIES["sd3"]
    model, inputs = make(4), inputs_of(1, 4, 4, 3)

    def work(transport: Any) -> None:
        with torch.no_grad(), parallelize(copy.deepcopy(model), "cocodiff+", transport=transport) as engine:
            engine.model(**inputs)

    with pytest.raises(UserError, match=r"how many steps run: parallelize\(\.\.\., steps=N\)"):
        run_ranks(2, work)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exchange": "flat"}, "scoring card needs exchange tapa, not flat"),
        ({"ratio": 1.5}, "ratio is 1.5: give a fraction from 0 to 1"),
        ({"schedule": "list"}, "schedule list needs ratios"),
        ({"schedule": "liner"}, "did you mean linear"),
        ({"warmup": -1}, "warmup is -1"),
        ({"sync_interval": 0.5}, "sync_interval is 0.5"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(UserError, match=message):
        Config.preset("cocodiff", **settings)
