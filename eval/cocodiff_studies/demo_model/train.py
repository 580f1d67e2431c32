"""Trains the demo model from nothing: procedural slices in, float16 checkpoint out, about an hour of one CPU core.

    python -m cocodiff_studies.demo_model.train --out DIR [--seed 0] [--threads 1] [--compile] [--resume FILE]

Flow matching on the latents of `LappedTransformVAE`, with the 33 input channels that `StableDiffusion3InpaintPipeline`
feeds: noisy latents, the mask at every 8th pixel, and the latents of the image whose masked pixels were set to 0 in
[-1, 1] (which `encode` then fills smoothly).
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from cocodiff.demo_model import PROMPT_WIDTH, prompt_embeddings
from cocodiff.demo_model.vae import LappedTransformVAE

from .masks import training_mask
from .optimizer import Optimizer
from .slices import HELD_OUT_SEEDS, family_of, make_slice

IMAGES = 20000
BATCH = 16
ITERATIONS = 12000
SAVED_EVERY = 250
WARM_UP = 60
DECAY_FROM = 0.3
"""Part of the run after which the rate falls linearly to zero."""
NOISE = 2.0
"""Training noise is this much wider than the sampler's. To the model the sampler's noise then looks like a draw close
to the middle of the distribution, so that one sample lies nearer the posterior mean (a temperature of 1 / NOISE)."""
TRANSFORMER: dict[str, Any] = {
    "sample_size": 12,
    "patch_size": 1,
    "in_channels": 33,
    "out_channels": 16,
    "num_layers": 4,
    "num_attention_heads": 12,
    "attention_head_dim": 16,
    "joint_attention_dim": PROMPT_WIDTH,
    "caption_projection_dim": 192,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 16,
    "qk_norm": "rms_norm",
}
SCHEDULER: dict[str, Any] = {"num_train_timesteps": 1000, "shift": 4.0, "use_dynamic_shifting": False}


class Images(NamedTuple):
    """Slices in [0, 1], float16 [count, 96, 96] (half the memory, finer than their noise), and which stand upright."""

    slices_NHW: NDArray[np.float16]
    upright_N: NDArray[np.bool_]


def training_images(count: int, seed: int) -> Images:
    """A quarter of the organs and half of the others are zoomed up to 4 times and have a part of the grey range: they
    stand for tiles of a large slice, which see only some of the greys that the whole spans.
    """
    first = seed * count
    if first + count > HELD_OUT_SEEDS.start:
        raise ValueError(f"seed {seed}: slices {first} to {first + count} would reach the held-out seeds")
    generator = np.random.default_rng([seed, 1])
    slices_NHW = np.empty((count, 96, 96), np.float16)
    upright_N = np.array([family_of(first + index) == "organ" for index in range(count)])
    for index in range(count):
        zoom = float(4 ** generator.random()) if generator.random() < (0.25 if upright_N[index] else 0.5) else 1.0
        image = make_slice(first + index, zoom)
        if zoom > 1:
            low, high = generator.uniform(0, 0.35), generator.uniform(0.65, 1)
            image = low + (high - low) * image
        slices_NHW[index] = image
    return Images(slices_NHW, upright_N)


def build_model() -> SD3Transformer2DModel:
    """The transformer with gates that start nearly closed and an output that starts at zero."""
    model = SD3Transformer2DModel(**TRANSFORMER)
    width = TRANSFORMER["caption_projection_dim"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name and ".linear." in name) or name.startswith("proj_out"):
                parameter.zero_()
            if name.endswith(("norm1.linear.bias", "norm1_context.linear.bias")) and len(parameter) == 6 * width:
                # Order: shift, scale, gate of the attention; shift, scale, gate of the feed-forward layer.
                parameter.view(6, width)[[2, 5]] = 0.3
    return model


class Batches:
    """Endless random batches: which slices, mirrored or not, which masks, which noise levels."""

    def __init__(self, images: Images, vae: LappedTransformVAE, seed: int) -> None:
        self.images = images
        self.vae = vae
        self.generator = np.random.default_rng([seed, 2])
        self.noise = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Model input [B, 33, 12, 12], sigma [B], target velocity [B, 16, 12, 12], pixel mask [B, 96, 96]."""
        chosen = self.generator.integers(len(self.images.upright_N), size=BATCH)
        image_BHW = torch.from_numpy(np.stack([self._turned(index) for index in chosen])).float() * 2 - 1
        mask_BHW = torch.from_numpy(np.stack([training_mask(self.generator) for _ in chosen])).float()
        clean_BCHW = self.vae.transform(image_BHW)
        masked_BHW = image_BHW * (mask_BHW < 0.5)
        masked_BCHW = self.vae.encode(masked_BHW[:, None]).latent_dist.mode()
        sigma_B = self.draw_sigma()
        sigma_B111 = sigma_B[:, None, None, None]
        noise_BCHW = NOISE * torch.randn(clean_BCHW.shape, generator=self.noise)
        noisy_BCHW = (1 - sigma_B111) * clean_BCHW + sigma_B111 * noise_BCHW
        input_BCHW = torch.cat([noisy_BCHW, mask_BHW[:, None, ::8, ::8], masked_BCHW], 1)
        return input_BCHW, sigma_B, noise_BCHW - clean_BCHW, mask_BHW

    def _turned(self, index: int) -> NDArray[np.float16]:
        """A slice mirrored or not. Organs stand upright, as those they are tested on do; the others also lie."""
        image_HW = self.images.slices_NHW[index]
        if self.generator.random() < 0.5:
            image_HW = image_HW[:, ::-1]
        quarters = 0 if self.images.upright_N[index] else int(self.generator.integers(4))
        return np.rot90(image_HW, quarters)

    def draw_sigma(self) -> Tensor:
        """Noise levels [B], stratified over the batch and spread as the shifted schedule visits them; a tenth exactly
        1, where sampling starts."""
        uniform_B = (torch.arange(BATCH) + torch.rand(BATCH, generator=self.noise)) / BATCH
        sigma_B = SCHEDULER["shift"] * uniform_B / (1 + (SCHEDULER["shift"] - 1) * uniform_B)
        return torch.where(torch.rand(BATCH, generator=self.noise) < 0.1, torch.ones(()), sigma_B)


def masked_loss(predicted_BCHW: Tensor, target_BCHW: Tensor, mask_BHW: Tensor, weight_BC11: Tensor) -> Tensor:
    """Squared error, weighted by how much of a token's 16 x 16 pixels is masked; known tokens count a little."""
    share_B1HW = functional.avg_pool2d(mask_BHW[:, None], 16, stride=8, padding=4) + 0.05
    error_BCHW = (predicted_BCHW - target_BCHW) ** 2 * weight_BC11
    return (error_BCHW * share_B1HW).sum() / (share_B1HW.sum() * error_BCHW.shape[1])


def relative_rate(step: int, steps: int) -> float:
    """Warm-up, plateau, linear decay to zero."""
    return min((step + 1) / WARM_UP, 1.0, (steps - step) / (steps * (1 - DECAY_FROM)))


def save(model: SD3Transformer2DModel, vae: LappedTransformVAE, out: Path) -> None:
    """Writes the four files of `weights/`; each appears complete or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, out / "weights.partial", metadata={"format": "pt"})
    (out / "weights.partial").chmod(0o644)
    (out / "weights.partial").replace(out / "diffusion_pytorch_model.safetensors")
    configs = {"config.json": dict(_class_name="SD3Transformer2DModel", **TRANSFORMER), "vae_config.json": vae.config}
    configs["scheduler_config.json"] = dict(_class_name="FlowMatchEulerDiscreteScheduler", **SCHEDULER)
    for name, config in configs.items():
        public = {key: value for key, value in config.items() if key == "_class_name" or not key.startswith("_")}
        (out / "config.partial").write_text(json.dumps(public, indent=2) + "\n")
        (out / "config.partial").replace(out / name)


@dataclass
class Training:
    """All that a run goes on from: a pickled one gives the bits that a run without a break gives."""

    model: SD3Transformer2DModel
    optimizer: Optimizer
    batches: Batches
    step: int = 0
    smoothed: float = 0.0

    def save(self, file: Path) -> None:
        """The file appears complete or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "drawn": self.batches.generator.bit_generator.state,
            "noise": self.batches.noise.get_state(),
            "step": self.step,
            "smoothed": self.smoothed,
        }
        torch.save(state, file.with_suffix(".partial"))
        file.with_suffix(".partial").replace(file)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state(state["optimizer"])
        self.batches.generator.bit_generator.state = state["drawn"]
        self.batches.noise.set_state(state["noise"])
        self.step, self.smoothed = state["step"], state["smoothed"]


def train(
    out: Path, seed: int, iterations: int, images: int, *, compiled: bool = False, resume: Path | None = None
) -> float:
    """Trains and saves; returns the last smoothed loss. Progress, with the CPU seconds used, goes to standard output.

    compiled: by torch.compile, a quarter faster and rounded differently. resume: where the run's state is kept, which
    a later start goes on from.
    """
    torch.manual_seed(seed)
    vae = LappedTransformVAE()
    batches = Batches(training_images(images, seed), vae, seed)
    print(f"{images} slices after {time.process_time():.0f} CPU s", flush=True)
    model = build_model()
    optimizer = Optimizer(model, muon_rate=5e-3, adam_rate=2e-3, average=0.998)
    run = Training(model, optimizer, batches)
    if resume is not None and resume.exists():
        run.load(resume)
    forward = torch.compile(model) if compiled else model
    prompt = prompt_embeddings(BATCH)
    # Half-way between equal weight for latents and equal weight for pixels.
    weight_C11 = 1 / torch.tensor(vae.config.channel_scale)[:, None, None]
    weight_C11 = weight_C11 / weight_C11.mean()
    while run.step < iterations:
        input_BCHW, sigma_B, target_BCHW, mask_BHW = batches.draw()
        predicted_BCHW = forward(
            hidden_states=input_BCHW,
            timestep=sigma_B * 1000,
            encoder_hidden_states=prompt["prompt_embeds"],
            pooled_projections=prompt["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        # Little noise cannot be told from detail: there the loss is large, and most of it cannot be learnt.
        weight_BC11 = weight_C11 * sigma_B[:, None, None, None] ** 1.5
        loss = masked_loss(predicted_BCHW, target_BCHW, mask_BHW, weight_BC11)
        loss.backward()
        optimizer.step(relative_rate(run.step, iterations))
        run.smoothed = loss.item() if run.step == 0 else 0.98 * run.smoothed + 0.02 * loss.item()
        run.step += 1
        if run.step % 50 == 0:
            used = time.process_time()
            print(f"step {run.step}/{iterations}  loss {run.smoothed:.4f}  {used:.0f} CPU s", flush=True)
        if resume is not None and run.step % SAVED_EVERY == 0:
            run.save(resume)
            with optimizer.averaged_weights():
                save(model, vae, out)
    with optimizer.averaged_weights():
        save(model, vae, out)
    print(f"saved in {out} after {time.process_time():.0f} CPU s", flush=True)
    return run.smoothed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and its configurations")
    parser.add_argument("--seed", type=int, default=0, help="0 to 200; chooses the slices as well")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--compile", action="store_true", help="a quarter faster; needs a C++ compiler")
    parser.add_argument("--resume", type=Path, help="file that keeps the run's state, which a later start goes on from")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(
        arguments.out,
        arguments.seed,
        arguments.iterations,
        arguments.images,
        compiled=arguments.compile,
        resume=arguments.resume,
    )


if __name__ == "__main__":
    main()
