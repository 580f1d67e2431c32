"""Trains the demo model from nothing: procedural slices in, float16 checkpoint out, about an hour of one CPU core.

python -m cocodiff_studies.demo_model.train --out DIR [--seed 0] [--threads 1] [--compile] [--resume FILE]
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cocodiff.demo_model import PROMPT_WIDTH
from cocodiff.demo_model.training.flow import Batch, Training, make_batch, new_model, save_model, save_state
from cocodiff.demo_model.training.masks import training_mask
from cocodiff.demo_model.training.optimizer import Optimizer
from cocodiff.demo_model.vae import LappedTransformVAE

from .slices import HELD_OUT_SEEDS, family_of, make_slice

IMAGES = 20000
BATCH = 16
ITERATIONS = 12000
SAVED_EVERY = 250
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


class Batches:
    """Endless random batches: which slices, mirrored or not, which masks, which noise levels."""

    def __init__(self, images: Images, vae: LappedTransformVAE, seed: int) -> None:
        self.images = images
        self.vae = vae
        self.generator = np.random.default_rng([seed, 2])
        self.noise = torch.Generator().manual_seed(seed)

    def draw(self) -> Batch:
        chosen = self.generator.integers(len(self.images.upright_N), size=BATCH)
        image_BHW = torch.from_numpy(np.stack([self._turned(index) for index in chosen])).float()
        mask_BHW = torch.from_numpy(np.stack([training_mask(self.generator) for _ in chosen])).float()
        return make_batch(image_BHW, mask_BHW, self.vae, SCHEDULER["shift"], self.noise)

    def _turned(self, index: int) -> NDArray[np.float16]:
        """A slice mirrored or not. Organs stand upright, as those they are tested on do; the others also lie."""
        image_HW = self.images.slices_NHW[index]
        if self.generator.random() < 0.5:
            image_HW = image_HW[:, ::-1]
        quarters = 0 if self.images.upright_N[index] else int(self.generator.integers(4))
        return np.rot90(image_HW, quarters)

    def state(self) -> dict[str, Any]:
        return {"drawn": self.generator.bit_generator.state, "noise": self.noise.get_state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.generator.bit_generator.state = state["drawn"]
        self.noise.set_state(state["noise"])


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
    model = new_model(TRANSFORMER)
    optimizer = Optimizer(model, muon_rate=5e-3, adam_rate=2e-3, average=0.998)
    run = Training(model, vae, optimizer, torch.compile(model) if compiled else None)
    if resume is not None and resume.exists():
        state = torch.load(resume, weights_only=True)
        run.load_state(state)
        batches.load_state(state)
    while run.step < iterations:
        run.advance(batches.draw(), iterations)
        if run.step % 50 == 0:
            used = time.process_time()
            print(f"step {run.step}/{iterations}  loss {run.smoothed:.4f}  {used:.0f} CPU s", flush=True)
        if resume is not None and run.step % SAVED_EVERY == 0:
            save_state(run.state() | batches.state(), resume)
            with optimizer.averaged_weights():
                save_model(model.state_dict(), TRANSFORMER, vae, SCHEDULER, out)
    with optimizer.averaged_weights():
        save_model(model.state_dict(), TRANSFORMER, vae, SCHEDULER, out)
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
