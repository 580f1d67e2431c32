"""Wan's pipelines: two experts that take turns in a run, timesteps for each token, image to video, on several ranks."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipelines import TEXT_WIDTH, wan_pipeline

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine import parallelize
from cocodiff.errors import UserError
from cocodiff.models.adapter import experts_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

STEPS = 6
PIPELINES: dict[str, dict[str, Any]] = {
    "Wan 2.2": {},
    "Wan 2.2, image": {"image": True},
    "Wan 2.1": {"experts": 1},
    "Wan 2.1, image": {"experts": 1, "image": True, "clip": True},
    "TI2V": {"experts": 1, "tokens": True},
    "TI2V, image": {"experts": 1, "tokens": True},
}


def made(name: str) -> Any:
    pipe = wan_pipeline(12, **PIPELINES[name])
    if name == "TI2V, image":
        from diffusers import WanImageToVideoPipeline

        pipe = WanImageToVideoPipeline(**pipe.components, expand_timesteps=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents_of(pipe: Any, **more: Any) -> torch.Tensor:
    """Of a video of three latent frames, [1, 4, 3, 4, 6]: guided, by two scales where there are two experts."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(1, 512, TEXT_WIDTH, generator=generator) / 4
    if pipe.config.boundary_ratio is not None:
        more = {"guidance_scale_2": 2.0} | more
    if "Image" in type(pipe).__name__:
        more["image"] = Image.fromarray(np.arange(32 * 48 * 3, dtype=np.uint8).reshape(32, 48, 3))
    return pipe(
        prompt_embeds=text,
        negative_prompt_embeds=-text,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=STEPS,
        generator=generator,
        output_type="latent",
        **{"guidance_scale": 3.0} | more,
    ).frames


def on_ranks(size: int, pipe: Any, run: Any = latents_of, **settings: Any) -> list[Any]:
    """What `run` gives of a copy of the pipeline on every rank, with the engine's bytes."""

    def work(transport: Any) -> Any:
        own = copy.deepcopy(pipe)
        with parallelize(own, transport=transport, **{"guidance_parallel": 1} | settings) as engine:
            found = run(own)
        assert not any(m._forward_pre_hooks or "forward" in vars(m) for one in experts_of(own) for m in one.modules())
        return found, {of: sum(engine.bytes(of).values()) for of in ("attention", "whole", "guidance")}

    return run_ranks(size, work)


def check_same_bits(of_ranks: list[Any]) -> tuple[torch.Tensor, dict[str, int]]:
    assert all(torch.equal(found, of_ranks[0][0]) for found, _ in of_ranks)
    return of_ranks[0]


SIZES = [*((name, 2) for name in PIPELINES), *(("Wan 2.2", size) for size in (1, 4, 12)), ("TI2V, image", 12)]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_equals_one_process(name, size):
    pipe = made(name)
    plain = latents_of(pipe)
    found, sent = check_same_bits(on_ranks(size, pipe))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    assert (sent["attention"] > 0) == (size > 1)
    if "2.2" in name:  # either expert makes some steps
        assert not torch.equal(plain, latents_of(pipe, guidance_scale_2=3.0))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["Wan 2.2", "TI2V, image"])
def test_two_parts_of_the_ranks_compute_a_branch_each(name, size):
    pipe = made(name)
    found, sent = check_same_bits(on_ranks(size, pipe, guidance_parallel=2))
    torch.testing.assert_close(found, latents_of(pipe), rtol=0, atol=1e-5)
    assert sent["guidance"] > 0 and (sent["attention"] > 0) == (size > 2)


def test_a_lossless_codec_keeps_the_bits_across_the_boundary():
    pipe = made("Wan 2.2")
    whole, sent = check_same_bits(on_ranks(4, pipe, preset="split"))
    found, coded = check_same_bits(on_ranks(4, pipe, preset="lossless"))
    assert torch.equal(found, whole) and coded["attention"] != coded["whole"] == sent["attention"]


@pytest.mark.parametrize("settings", [{"preset": "coded"}, {"preset": "ahead"}, {"preset": "coded", "predictor": "last"}])
@pytest.mark.parametrize("guidance", [1, 2])
def test_each_expert_begins_anew(settings, guidance):
    """Its first call of each branch gets everything whole and in time. What was kept for the other one is given back;
    the last steps are the run's."""
    pipe, calls = made("Wan 2.2"), []
    plain = latents_of(pipe)

    def work(transport: Any) -> Any:
        own, held = copy.deepcopy(pipe), []
        with parallelize(own, transport=transport, guidance_parallel=guidance, **settings) as engine:
            for one in experts_of(own):
                one.register_forward_hook(lambda *_: held.append(engine.strategy.coding.bytes_held()))
                if transport.rank == 0:
                    one.register_forward_hook(note, with_kwargs=True)
            found = latents_of(own)
            assert engine.strategy.coding.moment[1:3] == (STEPS - 1, STEPS)
        # Six steps of two branches; of these four are the first expert's, by the shift of the noise levels.
        assert held[8] <= held[7] and max(held) == held[7] > 0
        return found, {of: sum(engine.bytes(of).values()) for of in ("attention", "whole", "late")}

    def note(model: Any, _: Any, call: dict[str, Any], output: Any) -> None:
        calls.append((type(model), {name: x + 0 if isinstance(x, torch.Tensor) else x for name, x in call.items()}, output[0] + 0))

    found, sent = check_same_bits(run_ranks(4, work))
    assert sent["attention"] < sent["whole"] or sent["late"] > 0
    assert 0 < (found - plain).abs().max() < 0.3 * plain.abs().max()
