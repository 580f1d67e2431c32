"""An unmodified diffusers pipeline behind the `Inpainter` interface: one for inpainting, or any that generates."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cocodiff.config.errors import UserError
from cocodiff_eval.restore.tiling import steps_at

if TYPE_CHECKING:
    from torch import Tensor

    from cocodiff_eval.restore.known_regions import LatentLayout


SMALL_MODEL = 256  # pixels of a side; models up to this size restore thin images as they are


def schedule_at(steps: int, strength: float) -> tuple[int, float]:
    """Return the arguments (num_inference_steps, strength) that make a diffusers pipeline run the wanted steps.

    It is to run as many denoising steps as `steps_at` says for `steps` at strength 1. Flow-matching pipelines drop
    int(n - n x strength) of n steps. To leave k steps, (k - 1/2) / n is returned. It is in the middle of the values
    that do so, so rounding of the product cannot add or remove a step.
    """
    if strength >= 1:
        return steps, 1.0
    running = steps_at(steps, strength)
    total = max(running, round(running / strength))
    return total, (running - 0.5) / total


@dataclass(eq=False)
class PipelineInpainter:
    """A model that restores the masked parts of batches of grey images with an unmodified diffusers pipeline.

    The pipeline is one for inpainting, which takes `image`, `mask_image` and `strength`. Or it only generates images or
    videos: then known latents are put back after each step (`known_regions.py`).
    """

    pipe: Any  # e.g. StableDiffusion3InpaintPipeline, on one rank or many
    # Function of a batch size that returns more arguments of the pipeline's call, by name: those of the prompt
    # (embeddings, or `prompt=` lists) and of guidance.
    arguments: Callable[[int], dict[str, Any]]
    steps: int  # denoising steps that run at strength 1
    # With an image's noise key it seeds the image's own CPU generator, the same on every rank. With the key of the
    # first image of a batch it seeds torch's global generators, which some schedulers use.
    seed: int
    on_step: Callable[[int], None] = lambda slices: None  # called after each step with the call's number of slices
    side: int | None = None  # side of images in pixels; None for the pipeline's own
    frames: int = 1  # most frames of a video; 1 for a pipeline that makes images
    fresh: float = 1.0  # share of each step's noise that is new, if known latents are kept

    def __post_init__(self) -> None:
        """Read from the pipeline the sizes that it takes, and if it inpaints itself and if it makes videos."""
        self.multiple, native = side_multiple(self.pipe), self.side or own_size(self.pipe)
        self.native_size = native - native % self.multiple
        # In trials, small models did better on thin images as they are than on images padded by reflection.
        self.thin = self.native_size <= SMALL_MODEL
        takes = inspect.signature(type(self.pipe).__call__).parameters
        self.keeps, self.makes_video = "mask_image" in takes, "num_frames" in takes
        self.frames = self.frames if self.makes_video else 1
        self._layouts: dict[tuple[int, ...], LatentLayout] = {}

    def __call__(self, images_BHW: Tensor, masks_BHW: Tensor, strength: float, noise_keys: Sequence[int]) -> Tensor:
        """Return restored images of a batch; float32 [B, H, W], or [B, F, H, W] for videos, in [0, 1], on the CPU.

        Raise UserError for NaN in the result, and if a video has another number of frames than was asked for.

        Args:
            images_BHW: images in [0, 1], [B, H, W], or videos of F frames, [B, F, H, W]
            masks_BHW: 1 where to restore, of the same shape
            strength: noise level to start from, in (0, 1]
            noise_keys: a number for each image or video, which with `seed` selects its noise
        """
        import torch

        images_BFHW, masks_BFHW = (x if x.ndim == 4 else x[:, None] for x in (images_BHW, masks_BHW))
        batch, frames, *_ = images_BFHW.shape
        expected = steps_at(self.steps, strength)
        total = schedule_at(self.steps, strength)[0]
        if self.makes_video:  # the last frame is repeated until the latents' frames are full
            more = -(frames - 1) % frames_of_latents(self.pipe)
            images_BFHW, masks_BFHW = (
                torch.cat([x, x[:, -1:].expand(-1, more, -1, -1)], dim=1) for x in (images_BFHW, masks_BFHW)
            )
        generators = self._generators(noise_keys)
        given, keeping = self._known(images_BFHW.clamp(0, 1), masks_BFHW, strength, total - expected, generators)
        given |= {"num_inference_steps": total, "generator": generators, "output_type": "pt"}
        with keeping:
            seed, advance = generators[0].initial_seed(), partial(self.on_step, batch * frames)
            result, ran = made_by(self.pipe, seed, advance, **given, **self.arguments(batch))
        if ran != expected:
            raise RuntimeError(
                f"{type(self.pipe).__name__} ran {ran} denoising steps instead of {expected} "
                f"(num_inference_steps={total}, strength={strength:g}): its schedule counts differently"
            )
        if self.makes_video and result.shape[1] != images_BFHW.shape[1]:
            raise UserError(
                f"{type(self.pipe).__name__} made {result.shape[1]} frames where {images_BFHW.shape[1]} were asked "
                f"for, of {frames} slices: give another number of --frames"
            )
        restored_BFHW = result.detach().to("cpu", torch.float32).mean(dim=-3).view(images_BFHW.shape)[:, :frames]
        check_finite(self.pipe, restored_BFHW)
        return restored_BFHW.clamp(0, 1).view(images_BHW.shape)

    def _known(
        self, images_BFHW: Tensor, masks_BFHW: Tensor, strength: float, start: int, generators: list[Any]
    ) -> tuple[dict[str, Any], AbstractContextManager[None]]:
        """Return the arguments by which a call of the pipeline gets the known voxels, and the context to call it in.

        A pipeline for inpainting gets images and masks as arguments. For others the context keeps known latents.

        Args:
            images_BFHW: the images in [0, 1]
            masks_BFHW: 1 where to restore
            strength: noise level to start from
            start: number of steps that are left out at the start of the schedule
            generators: the random generator of each image
        """
        _, frames, height, width = images_BFHW.shape
        given: dict[str, Any] = {"height": height, "width": width}
        if self.makes_video:
            given["num_frames"] = frames
        if self.keeps:
            given |= {"image": images_BFHW.expand(-1, 3, -1, -1).contiguous(), "mask_image": masks_BFHW.contiguous()}
            return given | {"strength": schedule_at(self.steps, strength)[1]}, nullcontext()
        from cocodiff_eval.restore.known_regions import LatentLayout, keeping

        shape = (frames, height, width)
        if shape not in self._layouts:
            with silent(self.pipe), drawing_from(0):
                self._layouts[shape] = LatentLayout.asked(
                    self.pipe, lambda: self.pipe(num_inference_steps=1, **given, **self.arguments(1))
                )
        known = self._layouts[shape].known(self.pipe.vae, images_BFHW, masks_BFHW)
        return given, keeping(self.pipe, known, start, self.fresh, generators)

    def _generators(self, noise_keys: Sequence[int]) -> list[Any]:
        """Return a torch generator for each image, whose noise then does not depend on the batch that it is in.

        noise_keys: a number for each image
        """
        import torch

        # Odd multipliers mix seed and key and keep pairs of them distinct. Seeds of torch are below 2^63.
        seeds = [(self.seed * 0x9E3779B1 + key * 0x85EBCA6B + 1) % 2**63 for key in noise_keys]
        return [torch.Generator("cpu").manual_seed(one) for one in seeds]


def made_by(pipe: Any, seed: int, advance: Callable[[], None], /, **given: Any) -> tuple[Any, int]:
    """Call a diffusers pipeline without its progress bar. Return its images or frames, and the number of steps run.

    Raise UserError if latents are NaN or Inf after the first step. Later steps are not checked.

    Args:
        pipe: the pipeline
        seed: seed of torch's global generators during the call
        advance: called after each denoising step
        given: the call's arguments, by name
    """
    ran = 0

    def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Check the first step's latents and count the step. Pipelines call it after each; `tensors` is returned."""
        nonlocal ran
        if ran == 0 and "latents" in tensors:
            check_finite(pipe, tensors["latents"])
        ran += 1
        advance()
        return tensors

    with silent(pipe), drawing_from(seed):
        made = pipe(callback_on_step_end=after_step, return_dict=False, **given)[0]
    return made, ran


def own_size(pipe: Any) -> int:
    """Return the side in pixels of the images that a diffusers pipeline is made for; 1024 if it does not tell."""
    return int(pipe.default_sample_size) * int(pipe.vae_scale_factor) if hasattr(pipe, "default_sample_size") else 1024


def side_multiple(pipe: Any) -> int:
    """Return the number that image sides must be multiples of: the autoencoder's factor times the transformer's patch.

    The patch is taken as 2 for a pipeline that packs its latents, which has no `patch_size`.
    """
    patch = getattr(pipe, "patch_size", None) or 2
    named = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
    return next((int(getattr(pipe, name)) for name in named if hasattr(pipe, name)), 8) * int(patch)


def frames_of_latents(pipe: Any) -> int:
    """Return the number of a video's frames in one latent frame of its VAE; 4 if the pipeline does not tell.

    The first latent frame always holds a single frame.
    """
    named = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    return next((int(getattr(pipe, name)) for name in named if hasattr(pipe, name)), 4)


@contextlib.contextmanager
def silent(pipe: Any) -> Iterator[None]:
    """Turn off the progress bar of a diffusers pipeline within the context, since the job shows its own."""
    before = getattr(pipe, "_progress_bar_config", None)
    pipe.set_progress_bar_config(**{**(before or {}), "disable": True})
    try:
        yield
    finally:
        if before is None:
            del pipe._progress_bar_config
        else:
            pipe.set_progress_bar_config(**before)


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's global random generators within the context. Their earlier states are restored afterwards.

    Schedulers that use them then add the same noise on every rank, and with every preset that is compared.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    kind, devices = ("cpu", []) if found is None else (found.type, [torch.accelerator.current_device_index()])
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield


def check_finite(pipe: Any, values: Tensor) -> None:
    """Raise UserError if latents or images of a pipeline have NaN or Inf, and name a weight that has, if there is one.

    On a device it waits for `values`. Weights are only read if something is wrong.

    Args:
        pipe: the pipeline that made them
        values: the latents or images
    """
    import torch

    if bool(torch.isfinite(values).all()):
        return
    name = type(pipe).__name__
    for part in ("transformer", "transformer_2", "vae"):
        module = getattr(pipe, part, None)
        for weight, tensor in module.named_parameters() if module is not None else ():
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(
                    f"{name} returned NaN or Inf: the weights of its {part} hold some, in {weight} ({tensor.dtype}); "
                    "use a wider --dtype, or copy the model's weights again"
                )
    raise UserError(
        f"{name} returned NaN or Inf, though its weights are numbers: use a wider --dtype, or see whether diffusers "
        "alone makes an image of this model"
    )
