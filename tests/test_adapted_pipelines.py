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
from diffusers import AutoencoderKL, DDIMScheduler, FluxControlNetModel, LattePipeline, SD3ControlNetModel
from on_ranks import check_alike, on_ranks
from test_adapters import with_ip_adapters
from test_latte import latte
from tiny_pipelines import TEXT_WIDTH, flux_pipeline, sd3_pipeline

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

Made = tuple[Any, dict[str, Any]]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picture(side: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(seed))


def prompts(seed: int = 0) -> dict[str, Any]:
    return {"prompt_embeds": noise(1, 5, TEXT_WIDTH, seed=seed), "pooled_prompt_embeds": noise(1, 16)}


def made_of(name: str, pipe: Any, **others: Any) -> Any:
    """Another class of pipelines, from the parts of one."""
    kind = getattr(diffusers, name)
    wanted = inspect.signature(kind.__init__).parameters
    return kind(**{part: module for part, module in pipe.components.items() if part in wanted} | others)


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
    known, config = inspect.signature(kind.__init__).parameters, pipe.transformer.config
    torch.manual_seed(3)
    model = kind(**{name: config[name] for name in known if name in config} | settings)
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
    plain = dict(pipe.transformer.attn_processors)
    pipe.transformer.set_attn_processor({name: plain[name] if name[:6] == "single" else given for name in plain})
    pipe.transformer.encoder_hid_proj = adapted.encoder_hid_proj
    embeds = {"ip_adapter_image_embeds": [noise(1, 1, 12)]}
    embeds |= {"negative_ip_adapter_image_embeds": [noise(1, 1, 12, seed=4)]}
    return pipe, guided(3.0, "true_cfg_scale") | embeds


def latte_pipeline() -> Made:
    vae = AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=2, sample_size=8).eval()
    pipe = LattePipeline(None, None, vae, latte(side=8), DDIMScheduler(clip_sample=False))
    text = {f"{of}prompt_embeds": noise(1, 7, 24, seed=len(of)) for of in ("", "negative_")}
    text |= {"prompt": None, "negative_prompt": None, "mask_feature": False, "guidance_scale": 4.0}
    return pipe, text | {"height": 8, "width": 8, "video_length": 5}


PIPELINES: dict[str, Callable[[], Made]] = {
    "Latte, which guides in one batch": latte_pipeline,
    "FLUX.1 Kontext": kontext,
    "FLUX.1 Control": lambda: controlled_flux("FluxControlPipeline", "transformer", in_channels=32),
    "FLUX.1 with a ControlNet": lambda: controlled_flux("FluxControlNetPipeline", "controlnet", FluxControlNetModel),
    "FLUX.1 with an IP-Adapter": prompted_flux,
    "SD3 with a ControlNet": sd3_controlnet,
    "SD3 that skips layers": skipping_sd3,
}


def latents(pipe: Any, arguments: dict[str, Any]) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return pipe(num_inference_steps=2, generator=generator, return_dict=False, output_type="latent", **arguments)[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PIPELINES)
def test_equals_one_process(name):
    pipe, arguments = PIPELINES[name]()
    plain = latents(pipe, copy.deepcopy(arguments))
    guides = any(name.startswith("negative") for name in arguments)
    for size, guidance in [(3, 1), *([(4, 2)] if guides else [])]:
        settings = {"preset": "v_first", "guidance_parallel": guidance}
        of_ranks = on_ranks(size, pipe, run=lambda own, _: [latents(own, copy.deepcopy(arguments)) + 0], **settings)
        first = check_alike(of_ranks, [plain], 1e-5 * float(plain.abs().max()))
        assert (first.sent("guidance") > 0) == (guidance > 1)
