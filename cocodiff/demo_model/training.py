"""Training of models of the embedded model's kind: masks, flow matching on the latents of `LappedTransformVAE` with the
33 input channels of `StableDiffusion3InpaintPipeline`, and the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn
from torch.nn import functional

from cocodiff.demo_model import prompt_embeddings
from cocodiff.demo_model.vae import LappedTransformVAE

Mask = NDArray[np.bool_]
WARM_UP = 60  # steps over which the rate rises
DECAY_FROM = 0.3
"""Part of the run after which the rate falls linearly to zero."""
NOISE = 2.0
"""Training noise is this much wider than the sampler's. To the model the sampler's noise then looks like a draw close
to the middle of the distribution, so that one sample lies nearer the posterior mean (a temperature of 1 / NOISE)."""
MUON_RATE, ADAM_RATE = 5e-3, 2e-3
MOMENTUM, WEIGHT_DECAY = 0.95, 0.02  # of Muon
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the iteration's polynomial
CELLS = 6  # cells on each side of an image in block masks


# Masks: True or 1 marks pixels to restore -----------------------------------------------------------------------------


def block_mask(generator: np.random.Generator, size: int = 96) -> Mask:
    """Return a mask of a quarter of the 6 x 6 cells of a square image, chosen at random: bool [size, size]."""
    cells = np.zeros(CELLS * CELLS, bool)
    cells[generator.permutation(CELLS * CELLS)[: CELLS * CELLS // 4]] = True
    side = -(-size // CELLS)
    return cells.reshape(CELLS, CELLS).repeat(side, 0).repeat(side, 1)[:size, :size]


def cells_mask(generator: np.random.Generator, size: int) -> Mask:
    """Return a mask of random cells on a grid that may begin anywhere: bool [size, size].

    A cell's side is an eighth to a half of the image. A tile of a large slice sees a block mask like this. It may be
    empty.
    """
    side = int(generator.integers(size // 8, size // 2 + 1))
    phase = generator.integers(0, side, 2)
    count = size // side + 2
    cells = generator.random((count, count)) < generator.uniform(0.1, 0.35)
    grown = cells.repeat(side, 0).repeat(side, 1)
    return grown[phase[0] : phase[0] + size, phase[1] : phase[1] + size]


def center_mask(size: int = 96) -> Mask:
    """Return a mask of the central half of both sides: bool [size, size]."""
    mask = np.zeros((size, size), bool)
    mask[size // 4 : size - size // 4, size // 4 : size - size // 4] = True
    return mask


def rectangles_mask(generator: np.random.Generator, size: int) -> Mask:
    """Return a mask of one to three rectangles anywhere, with edges on any pixel: bool [size, size]."""
    mask = np.zeros((size, size), bool)
    for _ in range(generator.integers(1, 4)):
        height, width = generator.integers(size // 8, size * 5 // 8, 2)
        top = generator.integers(-height // 2, size - height // 2)
        left = generator.integers(-width // 2, size - width // 2)
        mask[max(top, 0) : top + height, max(left, 0) : left + width] = True
    return mask


def blob_mask(generator: np.random.Generator, size: int) -> Mask:
    """Return a mask of rounded islands that cover 10-40% of the image: bool [size, size]."""
    field = gaussian_filter(generator.normal(size=(size, size)), generator.uniform(6, 16))
    return field > np.quantile(field, generator.uniform(0.6, 0.9))


def half_plane_mask(generator: np.random.Generator, size: int) -> Mask:
    """Return a mask of one side of a straight line, or of the strip between two: bool [size, size].

    A tile sees a large hole's border, or a crack, like this.
    """
    angle = generator.uniform(0, 2 * np.pi) if generator.random() < 0.5 else generator.integers(4) * np.pi / 2
    axis = (np.arange(size) + 0.5) / size - 0.5
    distance = np.cos(angle) * axis[None, :] + np.sin(angle) * axis[:, None] + generator.uniform(-0.25, 0.25)
    return distance > 0 if generator.random() < 0.5 else np.abs(distance) < generator.uniform(0.04, 0.25)


def training_mask(generator: np.random.Generator, size: int = 96) -> Mask:
    """Return a mask of a kind chosen at random, never empty, True at pixels to restore: bool [size, size].

    36% are block masks, 15% random cells of other sizes and places, 29% center masks (some shifted), the rest
    irregular. An empty mask, or one of 90% or more of the image, becomes a center mask.
    """
    kind = generator.random()
    if kind < 0.36:
        mask = block_mask(generator, size)
    elif kind < 0.51:
        mask = cells_mask(generator, size)
    elif kind < 0.75:
        mask = center_mask(size)
    elif kind < 0.80:
        mask = np.roll(center_mask(size), tuple(generator.integers(-size // 4, size // 4 + 1, 2)), (0, 1))
    elif kind < 0.86:
        mask = rectangles_mask(generator, size)
    elif kind < 0.93:
        mask = blob_mask(generator, size)
    else:
        mask = half_plane_mask(generator, size)
    return mask if 0 < mask.mean() < 0.9 else center_mask(size)


# Batches and their loss -----------------------------------------------------------------------------------------------


class TrainingBatch(NamedTuple):
    """A batch of training samples for the embedded model's transformer."""

    # Masked pixels of the image are 0 in [-1, 1], and `encode` fills them smoothly.
    input_BCHW: Tensor  # noisy latents, the mask at every 8th pixel, and the masked image's latents, along C (channels)
    sigma_B: Tensor  # noise levels
    target_BCHW: Tensor  # the velocity: noise minus clean latents
    share_B1HW: Tensor  # the weight of each token in the loss

    def to(self, device: torch.device) -> TrainingBatch:
        """Return the batch on another device."""
        return TrainingBatch(*(one.to(device) for one in self))


def make_batch(
    image01_BHW: Tensor,
    mask_BHW: Tensor,
    vae: LappedTransformVAE,
    shift: float,
    noise: torch.Generator,
    known_BHW: Tensor,
) -> TrainingBatch:
    """Return a batch of training samples from images and masks.

    Args:
        image01_BHW: images, float32 in [0, 1]
        mask_BHW: 1 at pixels to restore
        vae: encodes the images
        shift: of the schedule
        noise: generator of the noise
        known_BHW: 0 at pixels whose truth is not known; the model does not see them, and tokens near them have no
            weight
    """
    image_BHW = image01_BHW * 2 - 1
    clean_BCHW = vae.transform(image_BHW)
    hidden_BHW = torch.maximum(mask_BHW, 1 - known_BHW)
    masked_BCHW = vae.encode((image_BHW * (hidden_BHW < 0.5))[:, None]).latent_dist.mode()
    sigma_B = draw_sigma(len(image_BHW), shift, noise)
    sigma_B111 = sigma_B[:, None, None, None]
    noise_BCHW = NOISE * torch.randn(clean_BCHW.shape, generator=noise)
    noisy_BCHW = (1 - sigma_B111) * clean_BCHW + sigma_B111 * noise_BCHW
    # Tokens without masked pixels have a small weight.
    share_B1HW = functional.avg_pool2d(mask_BHW[:, None], 16, stride=8, padding=4) + 0.05
    unknown_B1HW = functional.max_pool2d(1 - known_BHW[:, None], 16, stride=8, padding=4)
    share_B1HW = share_B1HW * (unknown_B1HW < 0.5)
    input_BCHW = torch.cat([noisy_BCHW, hidden_BHW[:, None, ::8, ::8], masked_BCHW], 1)
    return TrainingBatch(input_BCHW, sigma_B, noise_BCHW - clean_BCHW, share_B1HW)


def draw_sigma(count: int, shift: float, noise: torch.Generator) -> Tensor:
    """Draw noise levels for a batch, [count], stratified and distributed as in the sampler's shifted schedule.

    A tenth are exactly 1, where sampling starts.

    Args:
        shift: of the schedule.
        noise: the generator of random numbers.
    """
    uniform_B = (torch.arange(count) + torch.rand(count, generator=noise)) / count
    sigma_B = shift * uniform_B / (1 + (shift - 1) * uniform_B)
    return torch.where(torch.rand(count, generator=noise) < 0.1, torch.ones(()), sigma_B)


def loss_of(model: Callable[..., Any], batch: TrainingBatch, scale: tuple[float, ...]) -> Tensor:
    """Return the weighted squared error of the velocity that a model predicts, as a tensor of one number.

    A token's weight is the masked part of its 16 x 16 pixels.

    Args:
        model: the transformer.
        scale: the VAE's `channel_scale`.
    """
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
    # Little noise cannot be distinguished from detail: there the loss is large, and most of it cannot be learnt.
    weight_BC11 = weight_C11 / weight_C11.mean() * batch.sigma_B[:, None, None, None] ** 1.5
    error_BCHW = (predicted_BCHW - batch.target_BCHW) ** 2 * weight_BC11
    return (error_BCHW * batch.share_B1HW).sum() / (batch.share_B1HW.sum() * error_BCHW.shape[1]).clamp_min(1e-6)


# The model and its optimiser ------------------------------------------------------------------------------------------


def new_model(config: Mapping[str, Any]) -> Any:
    """Return a new transformer of the embedded model's kind, whose gates are nearly closed and whose output is zero.

    Args:
        config: its settings, as arguments of diffusers' SD3Transformer2DModel.
    """
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
    """Return the learning rate of a training step relative to the highest: warm-up, plateau, linear decay to zero."""
    return min((step + 1) / WARM_UP, 1.0, (steps - step) / (steps * (1 - DECAY_FROM)))


def orthogonalise(updates_NRC: Tensor) -> Tensor:
    """Return matrices with the singular vectors of the given ones and all singular values near 1 (Newton-Schulz).

    Both are [N, rows, columns]. Each step multiplies the matrix by a polynomial of its Gram matrix. So the steps run on
    the small square Gram matrix, and the long matrix is multiplied once at the end.
    """
    wide = updates_NRC.mT if updates_NRC.shape[1] > updates_NRC.shape[2] else updates_NRC
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    gram = wide @ wide.mT
    eye = torch.eye(gram.shape[1], device=gram.device)
    total = eye.expand_as(gram)
    for _ in range(5):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * eye
        total = factor @ total
        gram = factor @ gram @ factor
    wide = total @ wide
    return wide.mT if updates_NRC.shape[1] > updates_NRC.shape[2] else wide


class Optimizer:
    """An optimiser: Muon for the matrices of the transformer's blocks, AdamW for all other parameters.

    Muon's momentum is orthogonalised, and scaled so that the update's root mean square equals AdamW's at the same rate.

    torch has a Muon too, but it orthogonalises one matrix at a time in bfloat16. A CPU without bfloat16 instructions
    emulates these, which takes four times as long as the model. Here matrices of equal shape are processed together, in
    float32.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        """Prepare to optimise a model's parameters.

        Args:
            rate: a factor on the learning rates, which are for training from random weights.
        """
        self.rate, self.parameters = rate, [*model.parameters()]
        # The stream of the constant prompt is left to AdamW: Muon would spend half of its time there.
        matrices = {
            name: matrix
            for name, matrix in model.named_parameters()
            if matrix.ndim == 2
            and name.startswith("transformer_blocks")
            and not any(other in name for other in ("norm", "context", "add_"))
        }
        shapes = {one.shape: [of for of in matrices.values() if of.shape == one.shape] for one in matrices.values()}
        self.groups = [(group, group[0].new_zeros(len(group), *shape)) for shape, group in shapes.items()]
        rest = [one for name, one in model.named_parameters() if name not in matrices]
        self.adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, relative_rate: float) -> bool:
        """Update the parameters once, at `relative_rate` times the rates, and clear the gradients.

        Return True. If gradients are not finite, return False and update nothing.
        """
        if not nn.utils.clip_grad_norm_(self.parameters, 1.0).isfinite():
            return False
        rate = self.rate * relative_rate
        for group, velocity_NRC in self.groups:
            gradient_NRC = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            velocity_NRC.lerp_(gradient_NRC, 1 - MOMENTUM)
            update_NRC = orthogonalise(gradient_NRC.lerp(velocity_NRC, MOMENTUM))
            size = 0.2 * max(update_NRC.shape[1:]) ** 0.5
            for matrix, update in zip(group, update_NRC, strict=True):
                matrix.mul_(1 - MUON_RATE * rate * WEIGHT_DECAY).add_(update, alpha=-MUON_RATE * rate * size)
        self.adam.param_groups[0]["lr"] = ADAM_RATE * rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        return True

    def state(self) -> dict[str, Any]:
        """Return the optimiser's state, the momenta of both methods, for a checkpoint. `load_state` takes it."""
        return {"muon": [velocity_NRC for _, velocity_NRC in self.groups], "adam": self.adam.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned, of an optimiser of the same model."""
        for (_, velocity_NRC), kept_NRC in zip(self.groups, state["muon"], strict=True):
            velocity_NRC.copy_(kept_NRC)
        self.adam.load_state_dict(state["adam"])
