"""The user's inputs as stacks of slices with unique names, and 8-bit previews of slices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.volume import Part, Stack, format_shape, matched

WHOLE = Part()
SMALLEST_SIDE = 16  # voxels: two latent cells of the usual 8-fold autoencoder, and more than the SSIM window of 7


def safe_stem(text: str) -> str:
    """Return `text` as a name for files: every character that could trouble a file system or a shell is replaced by
    `_`."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("._-")[:100] or "slice"


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names with -2, -3, ... appended to repeated ones. Upper and lower case count as equal."""
    taken: set[str] = set()
    unique = []
    for wanted in names:
        name, number = wanted, 2
        while name.lower() in taken:
            name, number = f"{wanted}-{number}", number + 1
        taken.add(name.lower())
        unique.append(name)
    return unique


def open_stack(path: str, follow_links: bool = False, part: Part = WHOLE) -> Stack:
    """Open one slice or stack in any format of `formats.FORMATS`. No voxels of a stack are read yet.

    Raise UserError for a file that cannot be read, and for data that are no grey image (complex, boolean, below 16 x
    16).

    Args:
        path: as `formats.open_volume` takes it.
        follow_links: True to read other files that an HDF5 file names.
        part: the part of the volume that is opened.
    """
    volume = part.of(open_volume(path, follow_links))
    _check_dtype(volume)
    if min(volume.shape[1:]) < SMALLEST_SIDE:
        raise UserError(
            f"{path}: slices of {format_shape(volume.shape[1:])} voxels; at least {SMALLEST_SIDE} x {SMALLEST_SIDE} "
            "are needed: give a larger region"
        )
    if volume.shape[0] == 0:
        raise UserError(f"{path}: a stack of no slices; give at least one")
    return replace(volume, path=str(path), name=safe_stem(volume.name))


def open_stacks(paths: Sequence[str], follow_links: bool = False, part: Part = WHOLE) -> list[Stack]:
    """Open every input of a command, and give each a unique name (`scan`, `scan-2`, ...). Upper and lower case count as
    equal.

    Raise UserError if there are none, or if one cannot be used.

    Args:
        paths: as `formats.open_volume` takes them.
        follow_links: True to read other files that an HDF5 file names.
        part: the part of each volume that is opened.
    """
    if not paths:
        raise UserError("no input given; name at least one file: --input slice.tif")
    stacks = [open_stack(path, follow_links=follow_links, part=part) for path in paths]
    names = unique_names([stack.name for stack in stacks])
    return [replace(stack, name=name) for stack, name in zip(stacks, names, strict=True)]


def open_truth(path: str, stack: Stack, follow_links: bool = False) -> Stack:
    """Open the known original (truth) of an input or of its whole volume. Raise UserError if its shape differs.

    Args:
        path: the original's file.
        stack: the input, which may be a part of a volume.
        follow_links: True to read other files that an HDF5 file names.
    """
    truth = matched(open_stack(path, follow_links=follow_links), stack)
    if truth.shape != stack.shape:
        raise UserError(
            f"{path}: the truth has shape {format_shape(truth.shape)} but {stack.path} has "
            f"{format_shape(stack.shape)}; give the original of exactly that input"
        )
    return truth


def _check_dtype(volume: Stack) -> None:
    """Raise UserError for complex and boolean volumes and for other dtypes that are not restored."""
    dtype = volume.dtype
    if dtype.kind == "c":
        raise UserError(f"{volume.path}: complex values ({dtype}); save the magnitude or the real part as float32")
    if dtype.kind == "b":
        raise UserError(f"{volume.path}: boolean values are no grey image; is this a mask? give it with --mask")
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise UserError(f"{volume.path}: values of type {dtype}; save them as 8 or 16 bit integers or as float32")


def to_grey8(image_YX: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return an image as 8-bit grey for viewing: `low` is black, `high` is white, and NaN is black."""
    scale = 255.0 / (high - low) if high > low else 0.0
    finite_YX = np.nan_to_num(image_YX.astype(np.float64), nan=low, posinf=high, neginf=low)
    return np.clip(np.rint((finite_YX - low) * scale), 0, 255).astype(np.uint8)


def save_preview_png(path: Path, image_YX: np.ndarray, low: float, high: float) -> None:
    """Save a slice as an 8-bit PNG for viewing, where `low` is black and `high` is white.

    The values themselves are in the result's own file.
    """
    from PIL import Image

    Image.fromarray(to_grey8(image_YX, low, high)).save(path)
