"""The restoration of slices by an inpainting model of fixed size, coarse to fine, by the plan of `tiling.py`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from cocodiff.config.grouping import by_key
from cocodiff_eval.data.intensity import downsample, fill_from_outside, upsample
from cocodiff_eval.restore.tiling import Level, RestorationPlan, TilePass, plan_restoration

if TYPE_CHECKING:
    from torch import Tensor


PASS_KEYS = 1 << 20  # number of noise keys for a pass of tiles; a level has two passes


class Inpainter(Protocol):
    """A model that restores the masked part of square images of one size, or of videos of them."""

    frames: int  # most frames of a video; 1 for a model that makes images
    native_size: int  # side of the images in voxels, e.g. 96 or 1024; a multiple of `multiple`
    multiple: int  # sides of images must be multiples of this, e.g. 8 or 16
    thin: bool  # True if it restores thinner images than its own size as well as others

    def __call__(self, images_BHW: Tensor, masks_BHW: Tensor, strength: float, noise_keys: Sequence[int]) -> Tensor:
        """Return the restored images, float32 in [0, 1] like the given ones.

        Equal keys give equal noise in any batch. Keys that differ in their lower 32 bits give different noise.

        Args:
            images_BHW: float32 in [0, 1], [B, H, W], or [B, F, H, W] for videos.
            masks_BHW: 1 where to restore.
            strength: noise level to start from, in (0, 1].
            noise_keys: a number for each image or video.
        """


class Request(NamedTuple):
    """The tiles of a slice, [Y, X] each, that the model must restore next. Slices of a video ask for the same."""

    images: list[np.ndarray]  # the tiles
    hidden: list[np.ndarray]  # for each tile, True for voxels to restore
    strength: float  # noise level to start from
    keys: Sequence[int]  # the noise key of each tile


Video = tuple[int, ...]  # numbers of the slices that are its frames
Limits = tuple[float, float]  # smallest and largest value of restored voxels, normalised
# A generator of requests. It is sent the model's output for each, float64 [B, Y, X], and returns the restored slice.
Restoration = Generator[Request, np.ndarray, np.ndarray]


def plan_slice(mask_YX: np.ndarray, inpainter: Inpainter, batch: int, strength: float = 1.0) -> RestorationPlan:
    """Return the plan that `restore_slices` runs for each slice. Its `tile_steps(steps)` is for progress bars."""
    multiple = inpainter.multiple if inpainter.thin else None
    return plan_restoration(mask_YX, inpainter.native_size, batch, strength, multiple)


def restore_slices(
    images_YX: Sequence[np.ndarray],
    masks_YX: Sequence[np.ndarray],
    inpainter: Inpainter,
    *,
    batch: int = 8,
    strength: float = 1.0,
    samples: Sequence[int] | None = None,
    limits: Limits = (0.0, 1.0),
) -> list[np.ndarray]:
    """Return slices of any size with their masked voxels restored; float32 [Y, X] each. Known voxels equal the image's.

    Tiles of several slices share a call of the model. In each round the call has the next tiles of the first unfinished
    slice. Tiles of the slices after it are added if they run at the same strength, up to `batch` tiles. So the calls
    depend on masks and `batch` only.

    A model of videos takes slices of the same sample for frames, in the given order. These share one plan, made for all
    their masks together.

    Args:
        images_YX: float32 [Y, X] in [0, 1], filled under the mask (`prepare_slice`), which is not read.
        masks_YX: boolean [Y, X], True where to restore.
        inpainter: the model.
        batch: most tiles in a call of the model. It changes speed and memory, not the noise.
        strength: see `plan_restoration`.
        samples: for each slice the number of its sample, which selects the noise; 0 if not given.
        limits: restored voxels are clipped to these (`IntensityRange.limits01`).
    """
    numbers, samples = range(len(images_YX)), samples or [0] * len(images_YX)
    videos: list[Video] = [(number,) for number in numbers]
    if inpainter.frames > 1:
        of_samples, frames = by_key(zip(samples, numbers, strict=True)).values(), inpainter.frames
        videos = [tuple(one[first : first + frames]) for one in of_samples for first in range(0, len(one), frames)]
    started: dict[int, Restoration] = {}
    for video in videos:
        mask_YX = np.logical_or.reduce([masks_YX[number] for number in video])
        plan = plan_slice(mask_YX, inpainter, batch, strength) if mask_YX.any() else None
        for number in video:
            started[number] = _restoration(images_YX[number], masks_YX[number], plan, samples[number], limits)
    restored: dict[int, np.ndarray] = {}
    waiting: dict[int, Request] = {}

    def proceed(number: int, outputs: np.ndarray | None) -> None:
        """Give a slice the output of its request, or None to start it, and note its next request or its result."""
        try:
            waiting[number] = next(started[number]) if outputs is None else started[number].send(outputs)
        except StopIteration as end:
            restored[number] = end.value
            waiting.pop(number, None)

    for number in numbers:
        proceed(number, None)
    while waiting:
        together = _sharing_a_call(waiting, batch, videos)
        outputs = _call(inpainter, [[waiting[number] for number in video] for video in together])
        for video in together:
            of_video, outputs = np.split(outputs, [len(waiting[video[0]].images)])
            for frame, number in enumerate(video):
                proceed(number, of_video[:, frame])
    return [restored[number] for number in numbers]


def _sharing_a_call(waiting: dict[int, Request], batch: int, videos: Sequence[Video]) -> list[Video]:
    """Return the videos whose requests make the next call of the model."""
    order = [video for video in videos if video[0] in waiting]
    strength, shape = waiting[order[0][0]].strength, waiting[order[0][0]].images[0].shape
    together, tiles = order[:1], len(waiting[order[0][0]].images)
    for video in order[1:]:
        one = waiting[video[0]]
        alike = one.strength == strength and one.images[0].shape == shape and len(video) == len(order[0])
        if alike and tiles + len(one.images) <= batch:
            together.append(video)
            tiles += len(one.images)
    return together


def sample_keys(sample: int) -> int:
    """Return the number that is added to the noise keys of sample 0 to get those of another sample, 0 to 1023.

    torch's CPU generator reads only the lower 32 bits of a seed, so the keys of all samples have to differ there. Tiles
    use bits 0 to 15 and passes bits 20 to 25. The sample's ten bits take the other ones.
    """
    assert 0 <= sample < 1024, sample
    return ((sample & 63) << 26) | ((sample >> 6) << 16)


def _restoration(
    image_YX: np.ndarray, mask_YX: np.ndarray, plan: RestorationPlan | None, sample: int, limits: Limits
) -> Restoration:
    """Restore one slice, request by request. The generator returns the slice, float32 [Y, X].

    Args:
        plan: of the slice's mask, or of a whole video's masks; None if nothing is masked.
    """
    if plan is None:
        return image_YX.astype(np.float32)
    known = _known_pyramid(image_YX, mask_YX, plan)
    coarser: np.ndarray | None = None
    for level, (image, unknown_YX) in zip(reversed(plan.levels), reversed(known), strict=True):
        if coarser is not None:
            image = np.where(unknown_YX, upsample(coarser, level.shape), image)
        for number, tile_pass in enumerate(level.passes):
            keys_from = (level.exponent * 2 + number) * PASS_KEYS + sample_keys(sample)
            image = yield from _run_pass(image, unknown_YX, level, tile_pass, keys_from)
        coarser = image
    assert coarser is not None
    restored_YX = np.clip(coarser, *limits).astype(np.float32)
    return np.where(mask_YX, restored_YX, image_YX.astype(np.float32))


def _known_pyramid(
    image_YX: np.ndarray, mask_YX: np.ndarray, plan: RestorationPlan
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each level of the plan, the slice with filled holes, float64 [Y, X], and its mostly unknown voxels.

    Holes are filled from their surroundings on that level. Of the plan's unknown voxels only this slice's own are
    returned.
    """
    image = np.where(mask_YX, 0.0, image_YX).astype(np.float64)
    weight = (~mask_YX).astype(np.float64)
    found = []
    for level in plan.levels:
        if level.exponent > 0:
            image, weight = downsample(image, weight)
        # If the whole level is hidden (a hole as large as the slice), any share of known voxels makes a voxel known.
        unknown_YX = level.mask_YX & (weight < 0.5)
        hidden = unknown_YX if not unknown_YX.all() else weight == 0
        found.append((fill_from_outside(image, hidden | (weight == 0)), unknown_YX))
    return found


def _run_pass(image: np.ndarray, unknown_YX: np.ndarray, level: Level, tile_pass: TilePass, key: int) -> Restoration:
    """Restore a pass of tiles on the level's image [Y, X]. The generator returns the image with them blended in.

    Only unknown voxels of the slice change.

    Args:
        key: noise key of the first tile.
    """
    padding = level.padding
    # A small slice is padded by reflection to the model's native size, so that no edge is added.
    image_padded = np.pad(image, padding, mode="symmetric")
    hidden_padded = np.pad(tile_pass.hidden_YX & unknown_YX, padding, mode="symmetric")
    labels_padded = np.pad(np.where(unknown_YX, level.labels_YX, 0), padding)  # reflections are never written
    total, weights = np.zeros(level.padded), np.zeros(level.padded)
    for tiles in tile_pass.batches:
        keys = range(key, key + len(tiles))
        key += len(tiles)
        places = [level.box(tile) for tile in tiles]
        images, hidden = ([whole[here] for here in places] for whole in (image_padded, hidden_padded))
        outputs = yield Request(images, hidden, tile_pass.strength, keys)
        for tile, here, *of_tile in zip(tiles, places, outputs, images, hidden, strict=True):
            weight = level.weights(tile) * np.isin(labels_padded[here], tile.holes)
            total[here] += weight * match_surroundings(*of_tile)
            weights[here] += weight
    blended = np.divide(total, weights, out=image_padded.copy(), where=weights > 0)
    top, left = level.offset
    return blended[top : top + level.shape[0], left : left + level.shape[1]]


def _call(inpainter: Inpainter, videos: Sequence[Sequence[Request]]) -> np.ndarray:
    """Return the model's output for the tiles of all requests in one call; float64 [B, F, Y, X].

    Args:
        videos: for each video the requests of its frames.
    """
    import torch

    images = np.stack([tile for one in videos for tile in zip(*(frame.images for frame in one), strict=True)])
    hidden = np.stack([tile for one in videos for tile in zip(*(frame.hidden for frame in one), strict=True)])
    images_BFHW = torch.from_numpy(np.clip(images, 0.0, 1.0).astype(np.float32))
    masks_BFHW = torch.from_numpy(hidden.astype(np.float32))
    keys = [key for one in videos for key in one[0].keys]
    given = (images_BFHW, masks_BFHW) if inpainter.frames > 1 else (images_BFHW[:, 0], masks_BFHW[:, 0])
    outputs = inpainter(*given, videos[0][0].strength, keys)
    assert outputs.shape == given[0].shape, f"the model returned {[*outputs.shape]} for {[*given[0].shape]}"
    return outputs.view(images.shape).detach().to("cpu", torch.float32).numpy().astype(np.float64)


def match_surroundings(output: np.ndarray, image: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Return a model's output [Y, X], shifted so that it meets the known voxels without a seam.

    Autoencoders return known voxels slightly changed. That error is smoothed over 4 x 4 voxels, so as not to copy
    grain. It is then continued smoothly into the hidden voxels and subtracted there.
    """
    if hidden.all():
        return output
    error, weight = image - output, (~hidden).astype(np.float64)
    shapes = []
    for _ in range(2):
        shapes.append(error.shape)
        error, weight = downsample(error, weight)
    error = fill_from_outside(error, weight == 0)
    for shape in reversed(shapes):
        error = upsample(error, (shape[0], shape[1]))
    return output + error
