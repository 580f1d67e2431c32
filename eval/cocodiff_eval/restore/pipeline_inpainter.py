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
    """Return `num_inference_steps` and `strength` with which a diffusers pipeline runs `steps_at(steps, strength)`
    steps.

    Flow-matching pipelines drop int(n - n x strength) of n steps. To leave k steps, (k - 1/2) / n is returned. It is in
    the middle of the values that do so, so rounding of the product cannot add or remove a step.
    """
    if strength >= 1:
        return steps, 1.0
    running = steps_at(steps, strength)
    total = max(running, round(running / strength))
    return total, (running - 0.5) / total


@dataclass(eq=False)
class PipelineInpainter:
    """An `Inpainter` that restores batches of grey images with a diffusers pipeline, which is left as it was.

    The pipeline takes `image`, `mask_image` and `strength`. Or it generates images or videos, and known latents are
    kept (`known_regions.py`).
    """

    pipe: Any  # e.g. StableDiffusion3InpaintPipeline, on one rank or many
    # Gives the call's further arguments for a batch size, by the pipeline's names: those of the prompt (embeddings, or
    # `prompt=` lists) and of guidance.
    arguments: Callable[[int], dict[str, Any]]
    steps: int  # denoising steps that run at strength 1
    # With a tile's noise key it seeds the tile's own CPU generator, the same on every rank. With the key of a batch's
    # first tile it seeds torch's global generators, which some schedulers use.
    seed: int
    on_step: Callable[[int], None] = lambda slices: None  # called after each step with the call's number of slices
    side: int | None = None  # side of images in pixels; None for the pipeline's own
    frames: int = 1  # most frames of a video; 1 for a pipeline that makes images
    fresh: float = 1.0  # share of each step's noise that is new, if known latents are kept

    def __post_init__(self) -> None:
        """Read from the pipeline what sizes it takes, and whether it inpaints itself and makes videos."""
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
            images_BHW: in [0, 1], [B, H, W] or [B, F, H, W].
            masks_BHW: 1 where to restore.
            strength: noise level to start from, in (0, 1].
            noise_keys: a number for each image, see `seed`.
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
        """Return the arguments with which a call gets the known voxels, and the context that it runs in.

        Args:
            start: number of steps that are left out.
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
        """Return a generator for each image, so that the noise of a tile does not depend on the batch it is in."""
        import torch

        # Odd multipliers mix seed and key and keep pairs of them distinct. Seeds of torch are below 2^63.
        seeds = [(self.seed * 0x9E3779B1 + key * 0x85EBCA6B + 1) % 2**63 for key in noise_keys]
        return [torch.Generator("cpu").manual_seed(one) for one in seeds]


def made_by(pipe: Any, seed: int, advance: Callable[[], None], /, **given: Any) -> tuple[Any, int]:
    """Call a pipeline without its own progress bar. Return its images or frames, and the number of steps that ran.

    Raise UserError if latents are NaN or Inf after the first step. Later ones are not checked.

    Args:
        seed: see `drawing_from`.
        advance: called after each step.
        given: the call's arguments.
    """
    ran = 0

    def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
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
    """Return the side in pixels of the images that a pipeline is made for; 1024 if it does not say."""
    return int(pipe.default_sample_size) * int(pipe.vae_scale_factor) if hasattr(pipe, "default_sample_size") else 1024


def side_multiple(pipe: Any) -> int:
    """Return the number that image sides must be multiples of: the autoencoder's factor times the transformer's patch.

    The patch is taken as 2 for a pipeline that packs its latents, which has no `patch_size`.
    """
    patch = getattr(pipe, "patch_size", None) or 2
    named = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
    return next((int(getattr(pipe, name)) for name in named if hasattr(pipe, name)), 8) * int(patch)


def frames_of_latents(pipe: Any) -> int:
    """Return the number of frames in a latent frame of a video. The first latent frame always holds one frame."""
    named = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    return next((int(getattr(pipe, name)) for name in named if hasattr(pipe, name)), 4)


@contextlib.contextmanager
def silent(pipe: Any) -> Iterator[None]:
    """Within the context, turn off the pipeline's own progress bar, which knows nothing of tiles and levels."""
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
    """Within the context, seed torch's global generators, so that schedulers that use them add the same noise.

    It is the same on every rank, and in every preset that is compared. The generators' states are restored afterwards.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    kind, devices = ("cpu", []) if found is None else (found.type, [torch.accelerator.current_device_index()])
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield


def check_finite(pipe: Any, values: Tensor) -> None:
    """Raise UserError if a pipeline's latents or images are NaN or Inf. It names a weight that is, if there is one.

    On a device it waits for `values`. Weights are read only if something is wrong.
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
