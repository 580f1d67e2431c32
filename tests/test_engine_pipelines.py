"""Whole inpainting pipelines of every family, with VAE and guidance, on several ranks: one process's image."""

import copy
from typing import Any

import diffusers
import pytest
import torch
from covering import all_but
from tiny_pipelines import PIPELINES, TEXT_WIDTH

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize
from cocodiff.models import families, pipelines_of
from cocodiff.models.family import INPAINT

SIDE = 32
VARIANTS = (("flat", "joint"), ("tapa", "joint"), ("tapa", "v_first"))

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


def restored(pipe: Any, arguments: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mask_BCHW = torch.zeros(1, 1, SIDE, SIDE)
    mask_BCHW[..., 8:24, 8:24] = 1
    with torch.no_grad():
        return pipe(
            image=torch.rand(1, 3, SIDE, SIDE, generator=generator),
            mask_image=mask_BCHW,
            height=SIDE,
            width=SIDE,
            strength=1.0,
            num_inference_steps=3,
            generator=generator,
            output_type="pt",
            **arguments,
        ).images


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "size"), all_but([("flux", 12), ("fill", 12), *((name, 3) for name in PIPELINES)], PIPELINES, (3, 12))
)
def test_equals_one_process(name, size):
    if name == "fill" and size == 12:
        size = 4  # it has that many heads
    pipe, arguments = inpainting(name)
    plain = restored(pipe, arguments)

    def work(transport: Any) -> list[torch.Tensor]:
        own, images = copy.deepcopy(pipe), []
        components, config = dict(own.components), dict(own.config)
        for exchange, order in VARIANTS:
            with parallelize(own, transport=transport, exchange=exchange, order=order):
                images.append(restored(own, arguments))
            assert all(own.components[part] is module for part, module in components.items())
            assert "decode" not in vars(own.vae)
            assert dict(own.config) == config
        return images

    of_ranks = run_ranks(size, work)
    first = of_ranks[0][0]
    torch.testing.assert_close(first, plain, rtol=0, atol=1e-4)
    for images in of_ranks:
        assert all(torch.equal(image, first) for image in images[: 2 if name == "klein" else 3])
        torch.testing.assert_close(images[2], plain, rtol=0, atol=1e-4)


def test_latents_are_decoded_on_one_rank_or_on_all():
    pipe, arguments = inpainting("flux")

    def work(transport: Any) -> list[int]:
        own, decoded = copy.deepcopy(pipe), []
        own.vae.decoder.register_forward_pre_hook(lambda *_: decoded.append(transport.rank))
        images, calls = [], []
        for vae in ("one", "all"):
            with parallelize(own, transport=transport, vae=vae):
                images.append(restored(own, arguments))
            calls.append(len(decoded))
        assert torch.equal(*images)
        return calls

    assert run_ranks(3, work) == [[1, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize("vae", ["one", "tiled", "sharded"])
def test_inside_the_block_a_pipeline_has_all_its_parts(vae, tmp_path):
    """Whatever walks over them finds the VAE as well."""
    pipe, arguments = inpainting("flux")
    pipe.save_pretrained(tmp_path / "plain")
    files = sorted(path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*"))

    def work(transport: Any) -> torch.Tensor:
        own, folder = copy.deepcopy(pipe), tmp_path / str(transport.rank)
        with parallelize(own, transport=transport, vae=vae):
            own.save_pretrained(folder)
            assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == files
            index = "model_index.json"
            assert (folder / index).read_text() == (tmp_path / "plain" / index).read_text()
            own.to(torch.float64)
            image = restored(own, wide)
        assert own.vae.dtype == torch.float64
        return image

    wide = {name: x.double() if "embeds" in name else x for name, x in arguments.items()}
    images, plain = run_ranks(2, work), restored(pipe.to(torch.float64), wide)
    for image in images:
        torch.testing.assert_close(image, plain, rtol=0, atol=1e-4)


def test_every_family_is_here():
    known = [pipelines.inpaint for family in families() for pipelines in family.pipelines]
    assert set(filter(None, known)) == {type(inpainting(name)[0]).__name__ for name in PIPELINES}
