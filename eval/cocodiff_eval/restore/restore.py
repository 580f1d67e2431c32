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
    """An interface: a model that restores the masked parts of small images of one size, or of videos of such images.

    Slices of any size are restored by it in tiles (`restore_slices`).
    """

    frames: int  # most frames of a video; 1 for a model that makes images
    native_size: int  # side of the images in voxels, e.g. 96 or 1024; a multiple of `multiple`
    multiple: int  # sides of images must be multiples of this, e.g. 8 or 16
    thin: bool  # True if it restores images that are thinner than its own size well too

    def __call__(self, images_BHW: Tensor, masks_BHW: Tensor, strength: float, noise_keys: Sequence[int]) -> Tensor:
        """Return the restored images, float32 in [0, 1] and of the shape of the given ones.

        Args:
            images_BHW: images, float32 in [0, 1], [B, H, W], or videos of F frames, [B, F, H, W]
            masks_BHW: 1 where to restore, of the same shape
            strength: noise level to start from, in (0, 1]
            noise_keys: a number for each image or video that selects its noise. Equal keys give equal noise in any
                batch. Keys that differ in their lower 32 bits give different noise
        """


class TileRequest(NamedTuple):
    """The next tiles of a slice that the model must restore. All slices of a video request the same places."""

    images: list[np.ndarray]  # values of the tiles, [Y, X] each
    hidden: list[np.ndarray]  # for each tile, True for voxels to restore
    strength: float  # noise level to start from
    keys: Sequence[int]  # the noise key of each tile


Video = tuple[int, ...]  # numbers of the slices that are the frames of a video
Limits = tuple[float, float]  # smallest and largest value of restored voxels, normalised
# A generator of requests. It is sent the model's output for each, float64 [B, Y, X], and returns the restored slice.
Restoration = Generator[TileRequest, np.ndarray, np.ndarray]


def plan_slice(mask_YX: np.ndarray, inpainter: Inpainter, batch: int, strength: float = 1.0) -> RestorationPlan:
    """Return the plan of the tiles in which a model restores a slice.

    `restore_slices` runs it, and progress bars show its `tile_steps`.

    Args:
        mask_YX: True where to restore
        inpainter: the model
        batch: most tiles in a call of the model
        strength: noise level from which holes are first restored
    """
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
        images_YX: slices, float32 [Y, X] in [0, 1]; voxels under the mask are filled (`prepare_slice`) and not read
        masks_YX: boolean [Y, X], True where to restore
        inpainter: the model
        batch: most tiles in a call of the model. It changes speed and memory, not the noise
        strength: noise level from which holes are first restored, in (0, 1]
        samples: for each slice the number of its sample, which selects the noise; 0 if not given
        limits: smallest and largest value to which restored voxels are clipped (`IntensityRange.limits01`)
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
    waiting: dict[int, TileRequest] = {}

    def proceed(number: int, outputs: np.ndarray | None) -> None:
        """Continue a slice's restoration to its next request, which goes to `waiting`, or its end (to `restored`).

        Args:
            number: number of the slice
            outputs: the model's output for the slice's last request; None to start
        """
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


def _sharing_a_call(waiting: dict[int, TileRequest], batch: int, videos: Sequence[Video]) -> list[Video]:
    """Return the videos (or single slices) whose requested tiles are restored in the next call of the model.

    They are the first one that waits, and later ones of the same strength, tile shape and number of frames.

    Args:
        waiting: the request of each unfinished slice, by the slice's number
        batch: most tiles in a call
        videos: all videos, in order; a tuple of slices' numbers each
    """
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
    """Return the number to add to the noise keys of all tiles, so that sample `sample`, 0 to 1023, has its own noise.

    torch's CPU generator reads only the lower 32 bits of a seed, so the keys of all samples have to differ there. Tiles
    use bits 0 to 15 and passes bits 20 to 25. The sample's ten bits take the other ones.
    """
    assert 0 <= sample < 1024, sample
    return ((sample & 63) << 26) | ((sample >> 6) << 16)


def _restoration(
    image_YX: np.ndarray, mask_YX: np.ndarray, plan: RestorationPlan | None, sample: int, limits: Limits
) -> Restoration:
    """Restore one slice, from coarse to fine. Yield a request for each batch of tiles that the model must restore.

    The model's output is sent to the generator after each. It returns the restored slice, float32 [Y, X].

    Args:
        image_YX: the slice, normalised
        mask_YX: True where to restore
        plan: plan of tiles for the slice's mask, or for all masks of its video; None if nothing is masked
        sample: number of the sample, which selects the noise
        limits: smallest and largest value of restored voxels
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
    """Return a slice at each resolution of its plan: pairs (image, unknown), finest resolution first.

    The image, float64 [Y, X], has holes filled from their surroundings at that resolution. `unknown`, boolean [Y, X],
    is True for voxels of the plan's mask of which less than half is known in this slice.

    Args:
        image_YX: the slice, normalised
        mask_YX: True for voxels to restore
        plan: plan of tiles, perhaps for several slices of a video together
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
    """Restore a slice's tiles at one resolution and one strength. Yield a request for each batch of them.

    The model's output is sent to the generator after each. It returns the image [Y, X] with the restored tiles blended
    in. Only unknown voxels change.

    Args:
        image: the slice at this resolution, with filled holes
        unknown_YX: True for voxels that may change
        level: the plan at this resolution
        tile_pass: the tiles, and their strength
        key: noise key of the first tile; the next ones have the next numbers
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
        outputs = yield TileRequest(images, hidden, tile_pass.strength, keys)
        for tile, here, *of_tile in zip(tiles, places, outputs, images, hidden, strict=True):
            weight = level.weights(tile) * np.isin(labels_padded[here], tile.holes)
            total[here] += weight * match_surroundings(*of_tile)
            weights[here] += weight
    blended = np.divide(total, weights, out=image_padded.copy(), where=weights > 0)
    top, left = level.offset
    return blended[top : top + level.shape[0], left : left + level.shape[1]]


def _call(inpainter: Inpainter, videos: Sequence[Sequence[TileRequest]]) -> np.ndarray:
    """Call a model once for the tiles of several requests. Return its output, float64 [B, F, Y, X].

    B is the number of tiles, in the order of videos. F is the number of frames, 1 for a model of images.

    Args:
        inpainter: the model
        videos: for each video the requests of its frames
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
    """Return a model's output for a tile [Y, X], corrected so that it meets the known voxels without a seam.

    Autoencoders return known voxels slightly changed. That error is averaged over 4 x 4 voxels, so as not to copy
    grain, continued smoothly into the hidden voxels, and subtracted from the output.

    Args:
        output: the model's output
        image: the tile as it was given to the model
        hidden: True for voxels that the model was to restore; if all are hidden, the output is returned unchanged
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
