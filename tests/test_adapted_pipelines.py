"""Pipelines of the families that edit images, take reference and control images, or skip layers: on several ranks their
latents are one process's."""

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FluxControlNetModel, SD3ControlNetModel
from on_ranks import check_alike, on_ranks
from PIL import Image
from test_adapters import with_ip_adapters
from tiny_pipelines import TEXT_WIDTH, flux2_pipeline, flux_pipeline, qwen_pipeline, qwen_vae, sd3_pipeline
from torch.nn.functional import avg_pool3d

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

Made = tuple[Any, dict[str, Any]]


class Encoder(torch.nn.Module):
    """Stands in for a text encoder whose embeddings are given: pipelines ask it for its dtype and device."""

    dtype, device = torch.float32, torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picture(side: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(seed))


def photo(width: int, height: int) -> Any:
    return Image.linear_gradient("L").convert("RGB").resize((width, height))


def prompts(seed: int = 0) -> dict[str, Any]:
    return {"prompt_embeds": noise(1, 5, TEXT_WIDTH, seed=seed), "pooled_prompt_embeds": noise(1, 16)}


def made_of(name: str, pipe: Any, **others: Any) -> Any:
    """Another class of pipelines, from the parts of one."""
    kind = getattr(diffusers, name)
    wanted = inspect.signature(kind.__init__).parameters
    return kind(**{part: module for part, module in pipe.components.items() if part in wanted} | others)


def qwen(name: str, image: Any, **config: Any) -> Made:
    """These pipelines resize an image to a large size of their own: latents are means of 32 pixels a side each."""
    pipe = qwen_pipeline(heads=6)
    torch.manual_seed(0)
    vae = qwen_vae(2, 6)
    transformer = type(pipe.transformer).from_config(dict(pipe.transformer.config) | config).eval()
    parts = {"vae": vae, "transformer": transformer, "text_encoder": Encoder(), "processor": None}
    vae.encode = lambda x: SimpleNamespace(latents=avg_pool3d(x[:, [0, 1, 2, 0]], (1, 32, 32)))
    more = (
        {"layers": 2, "prompt": "x", "output_type": "pt"}
        if name == "QwenImageLayeredPipeline"
        else {"height": 192, "width": 256}
    )
    ones = torch.ones(1, 5).long()
    return made_of(name, pipe, **parts), more | {
        "image": image,
        "prompt_embeds": noise(1, 5, TEXT_WIDTH),
        "prompt_embeds_mask": ones,
        "negative_prompt_embeds": noise(1, 2, TEXT_WIDTH, seed=1),
        "negative_prompt_embeds_mask": ones[:, :2],
        "true_cfg_scale": 3.0,
    }


def kontext() -> Made:
    size = {"height": 32, "width": 24, "max_area": 32 * 24}
    pipe = made_of("FluxKontextPipeline", flux_pipeline(6))
    return pipe, prompts() | size | {"image": picture(), "_auto_resize": False}


SQUARE = {"height": 32, "width": 32}


def controlled_flux(name: str, part: str, kind: Any = None, **settings: Any) -> Made:
    """part: which of the pipeline's is made for control images."""
    pipe = flux_pipeline(6)
    parts = {part: another(kind or type(pipe.transformer), pipe, **settings)}
    return made_of(name, pipe, **parts), prompts() | SQUARE | {"control_image": picture()}


def another(kind: Any, pipe: Any, **settings: Any) -> Any:
    """A random model with the settings of a pipeline's transformer, and some others. A ControlNet's residuals start at
    zero, which would say nothing of them."""
    known = inspect.signature(kind.__init__).parameters
    torch.manual_seed(3)
    model = kind(
        **{name: pipe.transformer.config[name] for name in known if name in pipe.transformer.config} | settings
    )
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def sd3_controlnet() -> Made:
    pipe = sd3_pipeline(6)
    controlnet = another(SD3ControlNetModel, pipe, dual_attention_layers=())
    pipe = made_of("StableDiffusion3ControlNetPipeline", pipe, controlnet=controlnet)
    encode = pipe.vae.encode  # it samples by torch's own generator, which ranks share here, as they are threads

    def mode(x: torch.Tensor) -> Any:
        latent_dist = encode(x).latent_dist
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=latent_dist.mode))

    pipe.vae.encode = mode
    return pipe, guided(3.0) | {"control_image": picture()}


def guided(scale: float, name: str = "guidance_scale") -> dict[str, Any]:
    return prompts() | {f"negative_{one}": -value for one, value in prompts().items()} | SQUARE | {name: scale}


def skipping_sd3() -> Made:
    window = {"skip_layer_guidance_start": -1.0, "skip_layer_guidance_stop": 0.6}
    return sd3_pipeline(6), guided(3.0) | window | {"skip_guidance_layers": [1]}


def prompted_flux() -> Made:
    pipe, adapted = flux_pipeline(6), with_ip_adapters(1)
    pipe.transformer = another(type(adapted), pipe, num_attention_heads=8)
    given = next(iter(adapted.attn_processors.values()))
    processors = dict(pipe.transformer.attn_processors)
    pipe.transformer.set_attn_processor(
        {name: of if name.startswith("single") else given for name, of in processors.items()}
    )
    pipe.transformer.encoder_hid_proj = adapted.encoder_hid_proj
    embeds = {
        "ip_adapter_image_embeds": [noise(1, 1, 12)],
        "negative_ip_adapter_image_embeds": [noise(1, 1, 12, seed=4)],
    }
    return pipe, guided(3.0, "true_cfg_scale") | embeds


def klein() -> Made:
    negative = {"negative_prompt_embeds": noise(1, 2, TEXT_WIDTH, seed=1), "guidance_scale": 3.0}
    images = {"image": [photo(64, 64), photo(64, 96)], "height": 32, "width": 32}
    return flux2_pipeline(6), {"prompt_embeds": noise(1, 5, TEXT_WIDTH)} | negative | images


PIPELINES: dict[str, Callable[[], Made]] = {
    "Qwen-Image Edit": lambda: qwen("QwenImageEditPipeline", photo(64, 96)),
    "Qwen-Image Edit Plus": lambda: qwen("QwenImageEditPlusPipeline", [photo(64, 64), photo(64, 96)], zero_cond_t=True),
    "Qwen-Image Layered": lambda: qwen(
        "QwenImageLayeredPipeline", photo(64, 96), use_additional_t_cond=True, use_layer3d_rope=True
    ),
    "FLUX.1 Kontext": kontext,
    "FLUX.1 Control": lambda: controlled_flux("FluxControlPipeline", "transformer", in_channels=32),
    "FLUX.1 with a ControlNet": lambda: controlled_flux("FluxControlNetPipeline", "controlnet", FluxControlNetModel),
    "FLUX.1 with an IP-Adapter": prompted_flux,
    "FLUX.2 klein with references": klein,
    "SD3 with a ControlNet": sd3_controlnet,
    "SD3 that skips layers": skipping_sd3,
}


def latents(pipe: Any, arguments: dict[str, Any]) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        images = pipe(num_inference_steps=2, generator=generator, **{"output_type": "latent"} | arguments).images
    return images[0] if isinstance(images, list) else images


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PIPELINES)
def test_equals_one_process(name):
    pipe, arguments = PIPELINES[name]()
    plain = latents(pipe, copy.deepcopy(arguments))
    guides = any(name.startswith("negative") for name in arguments)
    for size, guidance in [(3, 1), *([(4, 2)] if guides else [])]:
        settings = {"preset": "v_first", "guidance_parallel": guidance}
        of_ranks = on_ranks(size, pipe, run=lambda own, _: [latents(own, copy.deepcopy(arguments)) + 0], **settings)
        check_alike(of_ranks, [plain])
