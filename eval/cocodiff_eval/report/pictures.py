"""The pictures of slices and generated images in the report: which slices are shown, how large, and as what text.

Pictures are small WebP images in JSON, which the page decodes when they are viewed. What the page can compute is not
stored. The masked input is the original with the mask painted over. Of a restored slice only the masked part is stored.
Differences are stored, as those of compressed pictures would show the compression.
"""

from __future__ import annotations

import base64
import io
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from cocodiff_eval.data.intensity import IntensityRange, fences
from cocodiff_eval.data.slices import to_grey8

SHOWN_SLICES = 4  # slices that `shown_slices` returns at most, by default
PICTURE_BYTES = 19_000_000  # of all pictures; in base64, and with the numbers, the page stays under 30 MB
SIDES = (512, 384, 320, 256, 224, 192, 160)  # possible longer sides of pictures in pixels
USUAL = 0.09  # bytes a pixel of a compressed picture of a noisy slice
SMALLEST = 0.05  # bytes a pixel of a compressed picture at which a slice can still be recognised
MASKED = 0.3  # assumed share of masked voxels in a slice, as only these are stored of a restored slice
WORST = 48  # slices of a stack that have pictures because their PSNR is the lowest, although they are not in the sample
LOSSLESS = 100  # the quality that stands for WebP without loss
QUALITIES = (LOSSLESS, 90, 75, 60, 45, 30, 15, 5)  # of WebP, from the best
# Best quality of slices without masked voxels in large stacks, where they have less than SCARCE bytes a pixel.
SURROUNDING, SCARCE = 60, 0.5
SMALLEST_SIDE = 64  # pixels; in smaller pictures nothing could be recognised
ENDS = ("low", "high")  # kinds of pictures of the ends of intervals
BLOCK = 16  # side in pixels of the blocks that WebP codes


@dataclass(frozen=True)
class Picture:
    """One slice under one mask and its restorations, as the report shows it. Images are [Y, X] in the input's units."""

    name: str  # as in the rows of `metrics.json`; `stack[number]` for a slice of a stack
    mask: str  # name of the mask, as in the rows
    input_YX: np.ndarray  # the slice as given; under the mask it is shown only if `truth_YX` is given
    mask_YX: np.ndarray  # True for restored voxels
    scale: IntensityRange  # the range of intensities
    restored: Mapping[str, np.ndarray]  # the slice as each preset and "biharmonic" restored it; empty without a mask
    truth_YX: np.ndarray | None = None  # the original; None if unknown
    # for each preset; empty if there are none
    uncertainty: Mapping[str, np.ndarray] = field(default_factory=dict)  # half the width of the 90 % intervals
    ends: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)  # low and high ends of these intervals


@dataclass(frozen=True)
class Generated:
    """A generated image as each preset (named set of the engine's settings) made it, uint8 [Y, X, 3]."""

    name: str  # as in the rows of `metrics.json`
    images: Mapping[str, np.ndarray]  # the image of each preset


def shown_slices(mask_voxels: Sequence[int], limit: int = SHOWN_SLICES) -> list[int]:
    """Return the numbers of the slices that get pictures: at most `limit` of those with masked voxels.

    They are evenly spread, and include the first and the last.

    Args:
        mask_voxels: number of masked voxels in each slice of a stack.
    """
    masked = [index for index, count in enumerate(mask_voxels) if count]
    if len(masked) <= limit:
        return masked
    return [masked[round(i * (len(masked) - 1) / (limit - 1))] for i in range(limit)] if limit > 1 else masked[:limit]


def error_image(
    truth_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange
) -> tuple[np.ndarray, np.ndarray]:
    """Return the absolute error of a restored slice in normalised units, float64 [Y, X], and where it is known,
    boolean.

    It is known for masked voxels with a finite truth. In all other voxels the error is 0.
    """
    known_YX = mask_YX & np.isfinite(truth_YX)
    return np.abs(np.where(known_YX, scale.normalise(restored_YX) - scale.normalise(truth_YX), 0.0)), known_YX


@dataclass(frozen=True)
class PicturePlan:
    """The sizes of the report's pictures, and the slices that get one."""

    side: int  # longer side of pictures in pixels
    share: int  # most bytes for all pictures of a slice with masked voxels
    unmasked_share: int  # most bytes for the picture of a slice without masked voxels
    shown: tuple[frozenset[int], ...]  # for each input and mask the slices that have pictures
    worst: int  # number of further slices that have pictures, those with the lowest PSNR; 0 if all slices have


def plan_pictures(masked: Sequence[Sequence[bool]], modes: int) -> PicturePlan:
    """Decide how large the report's pictures are and which slices get one, so that all fit in PICTURE_BYTES.

    The plan depends on nothing but the arguments.

    Args:
        masked: for each task (input and mask) and slice, True if the slice has masked voxels.
        modes: number of restored pictures of a slice: presets, biharmonic, and two for each preset's interval.
    """
    frames = 1 + 2 * modes * MASKED  # a slice's pictures, in whole ones: the original, restored ones and their errors
    hidden = sum(map(sum, masked))
    whole = hidden + (sum(map(len, masked)) - hidden) / frames
    smallest = SIDES[-1] ** 2 * frames * SMALLEST
    if whole * smallest <= PICTURE_BYTES:
        share, worst = PICTURE_BYTES / max(1.0, whole), 0
        shown = [frozenset(range(len(of_task))) for of_task in masked]
    else:
        share, worst = smallest, WORST
        limit = max(len(masked), int(PICTURE_BYTES / smallest) - WORST * len(masked))
        shown = [frozenset(shown_slices(of_task, max(1, limit * sum(of_task) // hidden))) for of_task in masked]
    side = next((side for side in SIDES if side**2 * frames * USUAL <= share), SIDES[-1])
    return PicturePlan(side, int(share), int(share / frames), tuple(shown), worst)


def worst_slices(psnr_db: dict[int, list[float]], shown: frozenset[int], count: int) -> list[int]:
    """Return the `count` slices with the lowest PSNR with any preset that have no picture yet, ascending.

    Args:
        psnr_db: for each slice its PSNR with each preset.
        shown: the slices that have a picture.
    """
    found = sorted((min(values), index) for index, values in psnr_db.items() if values and index not in shown)
    return sorted(index for _, index in found[:count])


def encode(picture: Picture | Generated, side: int, share: int) -> str:
    """Return the pictures of a slice or an image as JSON, compressed so that they fit in `share` bytes.

    They get the best quality at which they fit; in large stacks a slice without masked voxels gets SURROUNDING at most.
    If they fit at none they are also made smaller, down to SMALLEST_SIDE, where they may take more.

    Args:
        side: most pixels of the longer side.
        share: most bytes of all pictures together, before base64.
    """
    restored = isinstance(picture, Generated) or bool(picture.mask_YX.any())
    best = LOSSLESS if restored or share > SCARCE * side**2 else SURROUNDING
    while True:
        head, images = _of_image(picture, side) if isinstance(picture, Generated) else _of_slice(picture, side)
        masks = sum(len(head.get(kind, "")) * 3 // 4 for kind in ("hole", "unknown"))
        quality, files = _fitting(images, share - masks, best)
        if masks + sum(map(len, files.values())) <= share or side <= SMALLEST_SIDE:
            break
        side = max(SMALLEST_SIDE, side * 3 // 4)
    document = {**head, "quality": quality}
    for (kind, mode), data in files.items():
        if mode:
            document.setdefault(kind, {})[mode] = base64_text(data)
        else:
            document[kind] = base64_text(data)
    return json.dumps(document, separators=(",", ":"))


Images = dict[tuple[str, str], np.ndarray]  # uint8 images by kind and preset


def _of_image(picture: Generated, side: int) -> tuple[dict[str, Any], Images]:
    """Return what the report has of a generated image: entries for JSON, such as its name, and pictures by kind and
    preset.

    Args:
        picture: the image.
        side: most pixels of the longer side.
    """
    images = {("images", mode): _reduced(image, side) for mode, image in picture.images.items()}
    return {"name": picture.name, "mask": None}, images


def _of_slice(picture: Picture, side: int) -> tuple[dict[str, Any], Images]:
    """Return what the report has of a slice: entries for JSON, such as name and masks, and pictures by kind and preset.

    Args:
        picture: the slice.
        side: most pixels of the longer side.
    """
    scale, mask_YX = picture.scale, picture.mask_YX
    original_YX, unknown_YX = _original(picture)
    low, high = window(original_YX, ~unknown_YX & np.isfinite(original_YX), mask_YX, scale)
    hole_YX = _touched(mask_YX, side)
    plain_YX = ~_near(hole_YX)
    images = {("original", ""): _grey8(original_YX, low, high, side)}
    ends = [((kind, mode), end_YX) for mode, of in picture.ends.items() for kind, end_YX in zip(ENDS, of, strict=True)]
    for key, restored_YX in [*((("restored", mode), one) for mode, one in picture.restored.items()), *ends]:
        grey_YX = _grey8(restored_YX, low, high, side)
        grey_YX[plain_YX] = 127
        images[key] = grey_YX
    head = {
        "name": picture.name,
        "mask": picture.mask,
        "width": hole_YX.shape[1],
        "height": hole_YX.shape[0],
        "hole": _bits(hole_YX),
        "unknown": _bits(_touched(unknown_YX, side)),
    }
    truth_YX, errors = picture.truth_YX, {}
    if truth_YX is not None:
        errors = {mode: error_image(truth_YX, one_YX, mask_YX, scale) for mode, one_YX in picture.restored.items()}
    widths = {
        mode: (np.where(mask_YX, width_YX / scale.scale, 0.0), mask_YX)
        for mode, width_YX in picture.uncertainty.items()
    }
    for kind, maps in (("error", errors), ("uncertainty", widths)):
        known = [values_YX[known_YX] for values_YX, known_YX in maps.values() if known_YX.any()]
        top = max((float(np.quantile(values, 0.99)) for values in known), default=0.0)
        for mode, (values_YX, known_YX) in maps.items():
            images[kind, mode] = to_grey8(_mean_where(values_YX, known_YX, side), 0.0, top)
            head[f"{kind}_top"] = f"{top:.3g}"
    return head, images


def window(
    original_YX: np.ndarray, known_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange
) -> tuple[float, float]:
    """Return the two intensities of an image that are shown as black and as white.

    They are the ends of `scale`. If the truth under the mask is darker or brighter than these, it moves the ends
    outwards; outliers do not.

    Args:
        original_YX: the image, with the truth under the mask where it is known.
        known_YX: True for voxels whose value is known: those outside the mask, and masked ones with a truth.
        mask_YX: True for masked voxels.
        scale: the range of intensities outside the mask.
    """
    hidden = original_YX[known_YX & mask_YX]
    if scale.low <= hidden.min(initial=scale.low) and hidden.max(initial=scale.high) <= scale.high:
        return scale.low, scale.high
    lowest, highest = fences(original_YX[known_YX], int(np.count_nonzero(known_YX)))
    hidden = hidden[(hidden >= lowest) & (hidden <= highest)]
    return float(hidden.min(initial=scale.low)), float(hidden.max(initial=scale.high))


def _original(picture: Picture) -> tuple[np.ndarray, np.ndarray]:
    """Return the slice with its truth under the mask, float64 [Y, X], and the mask of voxels without a truth, boolean.

    Those hold the mean of all others, as values under a mask are not read.
    """
    original_YX, unknown_YX = picture.input_YX.astype(np.float64), picture.mask_YX
    if picture.truth_YX is not None:
        original_YX = np.where(picture.mask_YX, picture.truth_YX.astype(np.float64), original_YX)
        unknown_YX = picture.mask_YX & ~np.isfinite(original_YX)
    known = original_YX[~unknown_YX]
    return np.where(unknown_YX, known.mean() if known.size else picture.scale.low, original_YX), unknown_YX


def _reduced(image: np.ndarray, side: int) -> np.ndarray:
    """Return an image reduced to a longer side of at most `side` pixels, by means over boxes of voxels.

    It is float32 [Y, X] or uint8 [Y, X, 3]. An image that is small enough is returned unchanged.
    """
    ratio = min(1.0, side / max(image.shape[:2]))
    rows, columns = (max(1, round(length * ratio)) for length in image.shape[:2])
    if (rows, columns) == image.shape[:2]:
        return image
    picture = Image.fromarray(np.ascontiguousarray(image, np.float32 if image.ndim == 2 else np.uint8))
    return np.asarray(picture.resize((columns, rows), Image.Resampling.BOX))


def _grey8(image_YX: np.ndarray, low: float, high: float, side: int) -> np.ndarray:
    """Return a slice as 8-bit grey, reduced to a longer side of at most `side` pixels.

    Args:
        low: the intensity that is black.
        high: the intensity that is white.
    """
    return to_grey8(_reduced(to_grey8(image_YX, low, high).astype(np.float32), side), 0.0, 255.0)


def _touched(mask_YX: np.ndarray, side: int) -> np.ndarray:
    """Return a mask reduced to a longer side of at most `side` pixels: True where any voxel of a pixel's box is
    masked."""
    return _reduced(mask_YX.astype(np.float32), side) > 1e-6


def _mean_where(values_YX: np.ndarray, known_YX: np.ndarray, side: int) -> np.ndarray:
    """Return an image reduced to a longer side of at most `side` pixels, by means over the known voxels of each box.

    It is 0 where no voxel is known.
    """
    weight_YX = _reduced(known_YX.astype(np.float32), side)
    total_YX = _reduced(np.where(known_YX, values_YX, 0.0), side)
    return np.divide(total_YX, weight_YX, out=np.zeros(weight_YX.shape), where=weight_YX > 1e-6)


def _near(mask_YX: np.ndarray) -> np.ndarray:
    """Return a mask enlarged to whole blocks of WebP: those that hold masked pixels or lie within two pixels of one;
    boolean.

    In the picture of a restored slice all other blocks are grey, and so take few bytes.
    """
    from scipy import ndimage

    rows, columns = mask_YX.shape
    near_YX = np.pad(ndimage.binary_dilation(mask_YX, iterations=2), ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = near_YX.reshape(near_YX.shape[0] // BLOCK, BLOCK, near_YX.shape[1] // BLOCK, BLOCK).any((1, 3))
    return np.asarray(blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:rows, :columns])


def _fitting(images: Mapping[Any, np.ndarray], share: int, best: int) -> tuple[int, dict[Any, bytes]]:
    """Compress images as WebP so that all together take at most `share` bytes. Return the quality, and the files by
    key.

    The quality is the best one at which they fit, `best` at most; if they fit at none, the lowest.
    """
    made: dict[int, dict[Any, bytes]] = {}

    def fits(quality: int) -> bool:
        made[quality] = {key: _webp(image, quality) for key, image in images.items()}
        return sum(map(len, made[quality].values())) <= share

    scarce = share < sum(image.size for image in images.values())  # then most slices do not fit at LOSSLESS
    if (best == LOSSLESS and scarce) or not fits(best):  # most others fit at the best, and so are compressed once
        best = QUALITIES[bisect_left(QUALITIES[:-1], True, QUALITIES.index(best), key=fits)]
    return best, made.get(best) or {key: _webp(image, best) for key, image in images.items()}


def _webp(image: np.ndarray, quality: int) -> bytes:
    """Return an image as the content of a WebP file; LOSSLESS is the quality without loss."""
    buffer = io.BytesIO()
    # Method 2 takes half the time of the default, 4, and a tenth more bytes.
    Image.fromarray(image).convert("RGB").save(buffer, "WEBP", lossless=quality == LOSSLESS, quality=quality, method=2)
    return buffer.getvalue()


def _bits(mask_YX: np.ndarray) -> str:
    """Return a mask as a PNG of one bit a pixel in base64; "" for an empty mask."""
    if not mask_YX.any():
        return ""
    buffer = io.BytesIO()
    Image.fromarray(mask_YX).save(buffer, "PNG", optimize=True)
    return base64_text(buffer.getvalue())


def base64_text(data: bytes) -> str:
    """Return bytes as base64 text."""
    return base64.b64encode(data).decode("ascii")
