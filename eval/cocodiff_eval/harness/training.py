"""The training of a model like the embedded one on patches of a user's volumes, on any number of ranks.

Each update depends on the settings, its number and the rank alone, so a stopped run is resumed to the same bits. The
result is a moving average of the weights, taken when its loss on held-out patches was least.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure  # imported at the start, so that its absence is not found after hours
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from cocodiff.config.errors import UserError
from cocodiff.config.files import appearing, flush
from cocodiff.demo_model import load_pipeline, prompt_embeddings
from cocodiff.demo_model.training import (
    Optimizer,
    TrainingBatch,
    block_mask,
    loss_of,
    make_batch,
    new_model,
    relative_rate,
    training_mask,
)
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.record import write_settings
from cocodiff.jobs.terminal import progress_bar, reading_bar, say
from cocodiff_eval.harness.patches import cut_patches
from cocodiff_eval.harness.replicas import JobRecord
from cocodiff_eval.harness.tasks import Task, hash_inputs
from cocodiff_eval.restore.baseline import biharmonic
from cocodiff_eval.restore.pipeline_inpainter import PipelineInpainter

AVERAGE = 0.998  # largest weight of the earlier average in an update of the moving average
MODEL = ("config.json", "vae_config.json", "scheduler_config.json")  # the model's files beside its weights
STATE = "state.pt"  # file with the state of an unfinished run, in the folder of its units
WEIGHTS = "diffusion_pytorch_model.safetensors"
CHECKS, LEAST_APART = 20, 25  # most checks of the held-out loss in a run, and least updates between two
HELD_OUT, JUDGED, JUDGED_STEPS = 128, 24, 20  # held-out patches for the loss; those restored for PSNR; steps for these
PLAIN_STATE = ("step", "smoothed", "best_loss", "best", "rows")  # attributes of `Trainer` that a resumed run needs
# Options that results depend on.
REMEMBERED = ("model", "anew", "iterations", "batch", "rate", "patches", "seed", "range")


def _average(averaged: Any, weights: Any, count: int | Tensor) -> None:
    """Update a moving average of a model's weights in place, faster at first.

    Args:
        averaged: tensors of the average, which change.
        weights: tensors of the model.
        count: number of earlier updates.
    """
    torch._foreach_lerp_(averaged, weights, 1 - min(AVERAGE, (int(count) + 1) / (int(count) + 11)))


class Trainer:
    """One rank's state of a training run: model, optimiser, patches of volumes, and the best weights so far."""

    def __init__(self, tasks: Sequence[Task], values: dict[str, Any], weights: Path, transport: Any) -> None:
        """Load the model and cut patches. All ranks call it. Raise UserError if volumes or transport do not allow it.

        Args:
            tasks: the volumes, with masks that exclude voxels.
            values: the options' values, by name.
            weights: folder of the model to start from. With `--anew` its weights are replaced by random ones.
            transport: this rank's connection to the other ranks.
        """
        self.values, self.transport = values, transport
        self.first = transport.rank == 0
        torch.manual_seed(values["seed"])
        self.pipe = load_pipeline(weights=weights)
        if values["anew"]:
            config = json.loads((weights / "config.json").read_text())
            self.pipe.transformer = new_model({k: v for k, v in config.items() if not k.startswith("_")})
        self.pipe.to(transport.device)
        self.model = self.pipe.transformer.train()
        self.optimizer = Optimizer(self.model, values["rate"])
        self.averaged = AveragedModel(self.model, multi_avg_fn=_average)
        self.scale = tuple(self.pipe.vae.config.channel_scale)
        self.side = self.model.config.sample_size * 8
        shown = reading_bar(self.first and not values["quiet"])
        counts = (-(-values["patches"] // transport.size), HELD_OUT)
        seed = values["seed"] % 2**64  # as torch takes a negative one
        self.own, held = cut_patches(tasks, self.side, counts, (seed, transport.rank), shown)
        generator = np.random.default_rng([seed, 9])
        # Held-out patches, which rank 0 checks, and the voxels that are hidden in them.
        self.held, self.hidden_BHW = held, np.stack([block_mask(generator, self.side) for _ in range(len(held))])
        images, known = (one[:JUDGED] for one in held)
        self.judged = images.astype(np.float32), self.hidden_BHW[:JUDGED], known
        self.forward = self._forward(self.model)
        self.step, self.smoothed, self.best_loss = 0, 0.0, math.inf
        self.best: dict[str, Tensor] = {}
        self.rows: list[dict[str, float]] = []

    def _forward(self, model: nn.Module) -> Any:
        """Return the model to call in an update: on several ranks in DistributedDataParallel, which averages gradients.

        Raise UserError if the transport has not started torch.distributed, which that needs.
        """
        if self.transport.size == 1:
            return model
        if not torch.distributed.is_initialized():
            raise UserError(
                "several ranks train by torch.distributed, which this transport does not start: choose --transport "
                "gloo on a CPU, xccl or nccl on devices"
            )
        return nn.parallel.DistributedDataParallel(model)

    def advance(self) -> None:
        """Make one update of the weights and of their average. Raise UserError if the gradient is not finite."""
        loss = loss_of(self.forward, self._batch(), self.scale)
        loss.backward()
        if not self.optimizer.step(relative_rate(self.step, self.values["iterations"])):
            raise UserError(
                f"the loss is {loss.item():g} at step {self.step + 1}: training has diverged; start again with a lower "
                f"--rate"
            )
        self.averaged.update_parameters(self.model)
        self.smoothed = loss.item() if self.step == 0 else 0.98 * self.smoothed + 0.02 * loss.item()
        self.step += 1

    def _batch(self) -> TrainingBatch:
        """Return this rank's batch for the next update: patches randomly turned and mirrored, with random masks."""
        generator = np.random.default_rng([self.values["seed"] % 2**64, self.transport.rank, self.step])
        noise = torch.Generator().manual_seed(int(generator.integers(2**31)))
        chosen = generator.integers(len(self.own), size=max(1, self.values["batch"] // self.transport.size))
        turns = [(int(generator.integers(4)), bool(generator.integers(2))) for _ in chosen]
        image01_BHW, known_BHW = (
            torch.from_numpy(np.stack([_turned(one[index], *turn) for index, turn in zip(chosen, turns, strict=True)]))
            for one in self.own
        )
        mask_BHW = torch.from_numpy(np.stack([training_mask(generator, self.side) for _ in chosen])).float()
        return self._made(image01_BHW.float(), mask_BHW, noise, known_BHW.float())

    def _made(self, image01_BHW: Tensor, mask_BHW: Tensor, noise: torch.Generator, known_BHW: Tensor) -> TrainingBatch:
        """Return a batch of patches on this rank's device, with random noise and noise levels added.

        Args:
            image01_BHW: patches, normalised to [0, 1].
            mask_BHW: 1 where the model is to restore.
            noise: generator of the noise.
            known_BHW: 1 for voxels whose values are known.
        """
        shift = self.pipe.scheduler.config.shift
        batch = make_batch(image01_BHW, mask_BHW, self.pipe.vae.cpu(), shift, noise, known_BHW)
        return batch.to(self.transport.device)

    # On rank 0 --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compute the averaged weights' loss on held-out patches, and add a row to `rows`. Rank 0 calls it.

        If it is the least so far, the averaged weights are copied to `best`.
        """
        losses = []
        with torch.no_grad():
            for start in range(0, len(self.held), 32):
                parts = (torch.from_numpy(one[start : start + 32]).float() for one in (*self.held, self.hidden_BHW))
                image01_BHW, known_BHW, mask_BHW = parts
                batch = self._made(image01_BHW, mask_BHW, torch.Generator().manual_seed(start), known_BHW)
                losses.append(float(loss_of(self.averaged.module, batch, self.scale)))
        loss = float(np.mean(losses))
        if loss < self.best_loss:
            self.best_loss = loss
            self.best = {name: value.clone() for name, value in self.averaged.module.state_dict().items()}
        self.rows.append({"step": self.step, "loss": self.smoothed, "held_out_loss": loss})

    def state(self) -> dict[str, Any]:
        """Return all that a resumed training run needs, by name, for `load_state`."""
        plain = {name: getattr(self, name) for name in PLAIN_STATE}
        models = {"model": self.model.state_dict(), "averaged": self.averaged.state_dict()}
        return {**plain, **models, "optimizer": self.optimizer.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue a training run from the state of an earlier start, as `state` returned it."""
        self.model.load_state_dict(state["model"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state(state["optimizer"])
        for name in PLAIN_STATE:
            setattr(self, name, state[name])

    def psnr_db(self) -> float:
        """Return the PSNR in dB of the model's restoration with its current weights.

        It is measured in hidden blocks of patches that are held out of training.
        """
        self.pipe.vae.to(self.transport.device)

        def arguments(batch: int) -> dict[str, Any]:
            """Return the pipeline's arguments for a batch: the prompt's embeddings, without guidance."""
            return prompt_embeddings(batch) | {"guidance_scale": 1.0}

        inpainter = PipelineInpainter(self.pipe, arguments, JUDGED_STEPS, self.values["seed"])
        images, hidden, known = self.judged
        shown = torch.from_numpy(np.where(known & ~hidden, images, 0.5))
        restored_BHW = inpainter(shown, torch.from_numpy((hidden | ~known).astype(np.float32)), 1.0, range(len(images)))
        return _psnr_db(restored_BHW.numpy(), images, hidden & known)

    def biharmonic_db(self) -> float:
        """Return the PSNR in dB of the biharmonic method, which needs no model, to compare the training with.

        It is measured in hidden blocks of patches that are held out of training.
        """
        images, hidden, known = self.judged
        restored = [biharmonic(one, hide | ~there) for one, hide, there in zip(images, hidden, known, strict=True)]
        return _psnr_db(np.stack(restored), images, hidden & known)


def _turned(image_HW: np.ndarray, quarters: int, mirrored: bool) -> np.ndarray:
    """Return an image rotated by a number of quarter turns; before that it is mirrored left to right if `mirrored`."""
    return np.ascontiguousarray(np.rot90(image_HW[:, ::-1] if mirrored else image_HW, quarters))


def _psnr_db(restored: np.ndarray, truth: np.ndarray, where: np.ndarray) -> float:
    """Return the PSNR in dB of restored patches with values in [0, 1]; at most 120.

    Args:
        restored: the restored patches.
        truth: the true patches.
        where: True for voxels that count.
    """
    return float(-10 * np.log10(max(np.mean((restored[where] - truth[where]) ** 2), 1e-12)))


def train(tasks: Sequence[Task], values: dict[str, Any], weights: Path, output: OutputFolder, transport: Any) -> None:
    """Train a model, save checkpoints, and publish the model's folder. All ranks call it.

    A run that was stopped continues from its last checkpoint.

    Args:
        tasks: the volumes, with masks that exclude voxels.
        values: the options' values, by name.
        weights: folder of the model to start from.
        output: the folder of results.
        transport: this rank's connection to the other ranks.
    """
    trainer = Trainer(tasks, values, weights, transport)
    every = max(LEAST_APART, -(-values["iterations"] // CHECKS))
    state, before = _begun(trainer, tasks, output, every) if trainer.first else (None, 0.0)
    state = transport.broadcast_value(state)
    if state is not None:
        trainer.load_state(state)
    total = values["iterations"]
    with progress_bar("training", total, trainer.first and not values["quiet"]) as bar:
        bar.update(trainer.step)
        while trainer.step < total:
            trainer.advance()
            bar.update(1)
            bar.set_postfix_str(f"loss {trainer.smoothed:.4f}", refresh=False)
            step = trainer.step
            if (step % every and step < total) or not trainer.first:
                continue
            trainer.check()
            row = trainer.rows[-1]
            with bar.external_write_mode():
                say(f"step {step} of {total}: loss {row['loss']:.4f}, held out {row['held_out_loss']:.4f}")
            with appearing(output.store.folder / STATE) as unfinished:
                torch.save(trainer.state(), unfinished)
                flush(unfinished)
            output.store.add((step - 1) // every, ())
    if trainer.first:
        _publish(trainer, weights, output, before)
    transport.broadcast_value(None)


def _begun(trainer: Trainer, tasks: Sequence[Task], output: OutputFolder, every: int) -> tuple[Any, float]:
    """Begin or resume a training run, on rank 0. Return (saved state, PSNR in dB before training).

    The saved state is None for a new run.

    Args:
        trainer: this rank's trainer, with the weights that the run starts from.
        tasks: the volumes.
        output: the folder of results, which is opened.
        every: updates between two checkpoints.
    """
    values, total = trainer.values, trainer.values["iterations"]
    output.open()
    file, device = output.store.folder / STATE, trainer.transport.device
    try:
        state = torch.load(file, weights_only=True, map_location=device) if file.is_file() else None
    except Exception:  # a damaged file, for which torch raises many types
        state = None
    counts = [min(every, total - start) for start in range(0, total, every)]

    def settings() -> dict[str, Any]:
        """Return all that the results depend on, as plain data."""
        own = {name: values[name] for name in REMEMBERED}
        return own | {"ranks": trainer.transport.size, "inputs": hash_inputs(tasks)}

    def holds(number: int) -> bool:
        """Return True if the saved state includes the updates of a unit of work, given by its number."""
        return state is not None and number * every < state["step"]

    JobRecord(output, settings, counts, "steps", holds, not values["quiet"]).begin(total)
    if state is None:
        trainer.check()
    return state, trainer.psnr_db()  # the saved state is not loaded yet, so these are the weights before training


def _publish(trainer: Trainer, weights: Path, output: OutputFolder, before: float) -> None:
    """Write the best weights as a model's folder for `load_pipeline`, and publish it. Print the PSNR before and after.

    Args:
        trainer: the trainer of rank 0.
        weights: folder of the model that the run started from, whose configs are copied.
        output: the folder of results.
        before: PSNR in dB before training.
    """
    from safetensors.torch import save_file

    trainer.model.load_state_dict(trainer.best)
    after, smooth = trainer.psnr_db(), trainer.biharmonic_db()
    folder = output.partial
    halves = {name: tensor.half().contiguous() for name, tensor in trainer.best.items()}
    save_file(halves, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    for name in MODEL:
        shutil.copyfile(weights / name, folder / name)
    found = {"psnr_db": {"before": before, "after": after, "biharmonic": smooth}, "losses": trainer.rows}
    (folder / "training.json").write_text(json.dumps(found, indent=1))
    plot_losses(trainer.rows, folder / "training.png")
    write_settings(folder, trainer.values)
    output.publish()
    told = f"{after:.2f} dB, before {before:.2f} dB, biharmonic {smooth:.2f} dB"
    say(f"blocks hidden in {JUDGED} held-out patches: {told}")
    if after <= before:
        say("training did not help on held-out patches: keep the model that it began with, or give it more data")
    say(f"use it with --model {output.final}")


def plot_losses(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the losses on training patches and on held-out patches over the steps, as a PNG.

    Args:
        rows: the checks, with `step`, `loss` and `held_out_loss`.
        path: the file to write.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    axes.plot(steps[1:], [row["loss"] for row in rows[1:]], label="patches of the training")
    axes.plot(steps, [row["held_out_loss"] for row in rows], label="held-out patches")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=110)
