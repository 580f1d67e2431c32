"""Batches, loss and rate of the training, and the step that they make together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cocodiff.demo_model import prompt_embeddings
from cocodiff.demo_model.training.optimizer import Optimizer
from cocodiff.demo_model.vae import LappedTransformVAE

WARM_UP = 60
DECAY_FROM = 0.3
"""Part of the run after which the rate falls linearly to zero."""
NOISE = 2.0
"""Training noise is this much wider than the sampler's. To the model the sampler's noise then looks like a draw close
to the middle of the distribution, so that one sample lies nearer the posterior mean (a temperature of 1 / NOISE)."""


class Batch(NamedTuple):
    """input_BCHW: noisy latents, the mask at every 8th pixel, and the latents of the image whose masked pixels were set
    to 0 in [-1, 1] (which `encode` then fills smoothly); share_B1HW: how much each token counts in the loss."""

    input_BCHW: Tensor
    sigma_B: Tensor
    target_BCHW: Tensor
    share_B1HW: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(one.to(device) for one in self))


def make_batch(
    image01_BHW: Tensor,
    mask_BHW: Tensor,
    vae: LappedTransformVAE,
    shift: float,
    noise: torch.Generator,
    known_BHW: Tensor | None = None,
) -> Batch:
    """image01_BHW: float32 in [0, 1]; mask_BHW: 1 where to restore; shift: of the schedule; known_BHW: 0 where nobody
    knows what the image shows: that is hidden from the model, and tokens that it reaches count nothing."""
    image_BHW = image01_BHW * 2 - 1
    clean_BCHW = vae.transform(image_BHW)
    hidden_BHW = mask_BHW if known_BHW is None else torch.maximum(mask_BHW, 1 - known_BHW)
    masked_BCHW = vae.encode((image_BHW * (hidden_BHW < 0.5))[:, None]).latent_dist.mode()
    sigma_B = draw_sigma(len(image_BHW), shift, noise)
    sigma_B111 = sigma_B[:, None, None, None]
    noise_BCHW = NOISE * torch.randn(clean_BCHW.shape, generator=noise)
    noisy_BCHW = (1 - sigma_B111) * clean_BCHW + sigma_B111 * noise_BCHW
    # Known tokens count a little.
    share_B1HW = functional.avg_pool2d(mask_BHW[:, None], 16, stride=8, padding=4) + 0.05
    if known_BHW is not None:
        unknown_B1HW = functional.max_pool2d(1 - known_BHW[:, None], 16, stride=8, padding=4)
        share_B1HW = share_B1HW * (unknown_B1HW < 0.5)
    input_BCHW = torch.cat([noisy_BCHW, hidden_BHW[:, None, ::8, ::8], masked_BCHW], 1)
    return Batch(input_BCHW, sigma_B, noise_BCHW - clean_BCHW, share_B1HW)


def draw_sigma(count: int, shift: float, noise: torch.Generator) -> Tensor:
    """Noise levels [B], stratified over the batch and spread as the shifted schedule visits them; a tenth exactly
    1, where sampling starts."""
    uniform_B = (torch.arange(count) + torch.rand(count, generator=noise)) / count
    sigma_B = shift * uniform_B / (1 + (shift - 1) * uniform_B)
    return torch.where(torch.rand(count, generator=noise) < 0.1, torch.ones(()), sigma_B)


def loss_of(model: Callable[..., Any], batch: Batch, scale: tuple[float, ...]) -> Tensor:
    """Squared error of the velocity, weighted by how much of a token's 16 x 16 pixels is masked. scale: the VAE's, a
    number for each channel."""
    device = batch.sigma_B.device
    prompt = {name: value.to(device) for name, value in prompt_embeddings(len(batch.sigma_B)).items()}
    predicted_BCHW = model(
        hidden_states=batch.input_BCHW,
        timestep=batch.sigma_B * 1000,
        encoder_hidden_states=prompt["prompt_embeds"],
        pooled_projections=prompt["pooled_prompt_embeds"],
        return_dict=False,
    )[0]
    # Half-way between equal weight for latents and equal weight for pixels.
    weight_C11 = 1 / torch.tensor(scale, device=device)[:, None, None]
    # Little noise cannot be told from detail: there the loss is large, and most of it cannot be learnt.
    weight_BC11 = weight_C11 / weight_C11.mean() * batch.sigma_B[:, None, None, None] ** 1.5
    error_BCHW = (predicted_BCHW - batch.target_BCHW) ** 2 * weight_BC11
    return (error_BCHW * batch.share_B1HW).sum() / (batch.share_B1HW.sum() * error_BCHW.shape[1]).clamp_min(1e-6)


def new_model(config: Mapping[str, Any]) -> Any:
    """The transformer with gates that start nearly closed and an output that starts at zero."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(**config)
    width = config["caption_projection_dim"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name and ".linear." in name) or name.startswith("proj_out"):
                parameter.zero_()
            if name.endswith(("norm1.linear.bias", "norm1_context.linear.bias")) and len(parameter) == 6 * width:
                # Order: shift, scale, gate of the attention; shift, scale, gate of the feed-forward layer.
                parameter.view(6, width)[[2, 5]] = 0.3
    return model


def relative_rate(step: int, steps: int) -> float:
    """Warm-up, plateau, linear decay to zero."""
    return min((step + 1) / WARM_UP, 1.0, (steps - step) / (steps * (1 - DECAY_FROM)))


class Training:
    """All that a run goes on from. forward: the model as it is called, such as a compiled one, or one that adds the
    gradients of all ranks."""

    def __init__(
        self, model: Any, vae: LappedTransformVAE, optimizer: Optimizer, forward: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.vae, self.optimizer, self.forward = model, vae, optimizer, forward or model
        self.step, self.smoothed = 0, 0.0

    def advance(self, batch: Batch, steps: int) -> None:
        """One of `steps` updates. Raises ArithmeticError where its gradient is not finite; the model stays as it is."""
        loss = loss_of(self.forward, batch, tuple(self.vae.config.channel_scale))
        loss.backward()
        if not self.optimizer.step(relative_rate(self.step, steps)):
            raise ArithmeticError(f"the loss is {loss.item():g} at step {self.step + 1}")
        self.smoothed = loss.item() if self.step == 0 else 0.98 * self.smoothed + 0.02 * loss.item()
        self.step += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "smoothed": self.smoothed,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state(state["optimizer"])
        self.step, self.smoothed = state["step"], state["smoothed"]


def save_state(state: Mapping[str, Any], file: Path) -> None:
    """The file appears complete or not at all."""
    torch.save(state, file.with_suffix(".partial"))
    file.with_suffix(".partial").replace(file)


def save_model(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    vae: LappedTransformVAE,
    scheduler: Mapping[str, Any],
    out: Path,
) -> None:
    """Writes the four files of a model that `load_pipeline` reads; each appears complete or not at all. Weights are
    float16. config: the transformer's."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().half().contiguous() for name, tensor in weights.items()}
    save_file(state, out / "weights.partial", metadata={"format": "pt"})
    (out / "weights.partial").chmod(0o644)
    (out / "weights.partial").replace(out / "diffusion_pytorch_model.safetensors")
    configs = {
        "config.json": {"_class_name": "SD3Transformer2DModel", **config},
        "vae_config.json": {"_class_name": type(vae).__name__, **vae.config},
        "scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler", **scheduler},
    }
    for name, config in configs.items():
        public = {key: value for key, value in config.items() if key == "_class_name" or not key.startswith("_")}
        (out / "config.partial").write_text(json.dumps(public, indent=2) + "\n")
        (out / "config.partial").replace(out / name)
