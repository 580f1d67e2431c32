"""Whole inpainting pipelines of every family, with VAE and guidance, on several ranks: one process's image."""

from typing import Any

import diffusers
import pytest
import torch
from on_ranks import check_alike, on_ranks
from tiny_pipelines import PIPELINES, TEXT_WIDTH

from cocodiff.models import families, pipelines_of
from cocodiff.models.family import INPAINT

SIDE = 32

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def inpainting(name: str) -> tuple[Any, dict[str, Any]]:
    """A family's restoring pipeline with 12 heads, and prompts of different length for its two branches of guidance."""
    made = PIPELINES[name](heads=12) if name != "fill" else PIPELINES[name]()
    pipelines = pipelines_of(type(made).__name__, name)
    pipe = getattr(diffusers, pipelines.of_task(INPAINT, name))(**made.components)
    generator = torch.Generator().manual_seed(3)
    arguments: dict[str, Any] = {}
    for argument in filter(None, pipelines.encoded):
        length = 2 if argument.startswith("negative") and name != "sd3" else 5
        if "pooled" in argument:
            arguments[argument] = torch.randn(1, 16, generator=generator)
        elif argument.endswith("_mask"):
            arguments[argument] = torch.tensor([[1] * (length - 1) + [0]])
        else:
            arguments[argument] = torch.randn(1, length, TEXT_WIDTH, generator=generator)
    if name == "qwen":
        negative = torch.randn(1, 2, TEXT_WIDTH, generator=generator)
        arguments |= {"negative_prompt_embeds": negative, "negative_prompt_embeds_mask": torch.ones(1, 2).long()}
    if name == "klein":
        arguments["negative_prompt_embeds"] = torch.randn(1, 2, TEXT_WIDTH, generator=generator)
    pipe.set_progress_bar_config(disable=True)
    return pipe, arguments | {"true_cfg_scale" if name == "qwen" else "guidance_scale": 3.0}


def restored(
    pipe: Any, arguments: dict[str, Any], side: int = SIDE, steps: int = 3, seed: int = 0, **more: Any
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask_BCHW = torch.zeros(1, 1, side, side)
    mask_BCHW[..., 8:24, 8:24] = 1
    picture = {"image": torch.rand(1, 3, side, side, generator=generator), "mask_image": mask_BCHW}
    settings = {"height": side, "width": side, "num_inference_steps": steps, "output_type": "pt", "strength": 1.0}
    with torch.no_grad():
        return pipe(**picture, generator=generator, **settings | arguments | more).images


def restoring(arguments: dict[str, Any]) -> Any:
    return lambda pipe, _: [restored(pipe, arguments)]


def test_latents_are_decoded_on_one_rank_or_on_all():
    pipe, arguments = inpainting("flux")
    decoded: list[int] = []

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        hook = own.vae.decoder.register_forward_pre_hook(lambda *_: decoded.append(engine.rank))
        image = restored(own, arguments)
        hook.remove()
        return [image]

    one = check_alike(on_ranks(3, pipe, run=run, vae="one"), [restored(pipe, arguments)])
    assert decoded == [0]
    check_alike(on_ranks(3, pipe, run=run, vae="all"), one.found, atol=0)
    assert sorted(decoded) == [0, 0, 1, 2]


def test_every_family_is_here():
    known = [pipelines.inpaint for family in families() for pipelines in family.pipelines]
    assert set(filter(None, known)) == {type(inpainting(name)[0]).__name__ for name in PIPELINES}
