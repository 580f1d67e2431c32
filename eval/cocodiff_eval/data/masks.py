"""Masks: boolean images, True for voxels to restore. They are generated (`block`, `center`) or read from a file."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import is_there
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.ome_zarr import inside
from cocodiff_eval.data.slices import safe_stem
from cocodiff_eval.data.volume import (
    Progress,
    Reader,
    Stack,
    Triple,
    compare_voxel_sizes,
    format_shape,
    matched,
    start_of,
    unwatched,
)

GENERATED = ("block", "center")
GRID = 6  # cells along each side of a `block` mask
NAN = float("nan")  # one object for all NaN values of a file, since no two NaN are equal
HIDDEN_CELLS = 9  # of 36 cells: a quarter of the slice
FAR = 32  # slices that `depth` looks at before and behind one
MOST_MASKED = 0.95  # share of voxels; a file that marks more is probably inverted
# The rim of a mask: the known voxels within RIM voxels of it, in at most RIM_SLICES slices. If more than the share
# RIM_SHARE of them look like what the mask covers, the mask is too small. What it covers must differ from other voxels
# by RIM_APART times their range.
RIM, RIM_SLICES, RIM_SHARE, RIM_APART = 8, 8, 0.1, 0.2


@dataclass(frozen=True)
class Mask:
    """The voxels of a stack of slices that are to be restored."""

    name: str  # `block`, `center`, `none`, or the name of the mask's file, safe as a file name
    from_file: bool  # True if the mask was read from a file, so that the truth under it is unknown
    shape: Triple  # [N, Y, X]
    reader: Reader  # gives the mask of a slice, boolean [Y, X]
    masked: tuple[bool, ...]  # for each slice, True if it has voxels to restore and voxels to restore them from
    full: frozenset[int] = frozenset()  # slices that are masked wholly. They are left as they are
    remarks: Sequence[str] = ()  # lines for the user, such as on a voxel size that differs from the stack's
    changed: bool = False  # True if it is not what its file marks, as that was grown or inverted

    def read(self, index: int) -> np.ndarray:
        """Return the voxels to restore in slice `index`, boolean [Y, X]; none if it is masked wholly."""
        return np.zeros(self.shape[1:], bool) if index in self.full else self.reader(index)


def block_mask(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Return a mask of nine random cells of a 6 x 6 grid, boolean [Y, X], True at voxels to restore.

    Cell edges lie at round(i * side / 6).

    Args:
        shape: numbers of rows and columns.
        seed: decides which cells.
    """
    rows, columns = ([round(i * side / GRID) for i in range(GRID + 1)] for side in shape)
    mask_YX = np.zeros(shape, dtype=bool)
    # Python's generator, not NumPy's: its sequence for a seed is the same in every version.
    for cell in random.Random(seed).sample(range(GRID * GRID), HIDDEN_CELLS):
        i, j = divmod(cell, GRID)
        mask_YX[rows[i] : rows[i + 1], columns[j] : columns[j + 1]] = True
    return mask_YX


def center_mask(shape: tuple[int, int]) -> np.ndarray:
    """Return a mask of the central half of both sides, boolean [Y, X], True at voxels to restore.

    Args:
        shape: numbers of rows and columns.
    """
    mask_YX = np.zeros(shape, dtype=bool)
    top, left = (round(side / 4) for side in shape)
    mask_YX[top : shape[0] - top, left : shape[1] - left] = True
    return mask_YX


def depth(read: Reader, index: int, slices: int) -> np.ndarray:
    """Return how deep in the hole each masked voxel of slice `index` lies: its distance from the nearest known one.

    It is in voxels, float64 [Y, X], and 0 for known voxels. Known voxels of the same slice count, and those straight
    before or behind in other slices.

    Args:
        read: gives the mask of a slice.
        index: the slice.
        slices: number of slices of the mask.
    """
    found_YX = depth_in(read(index))
    for away in range(1, FAR):
        if found_YX.max() <= away:
            break
        for other in (index - away, index + away):
            if 0 <= other < slices:
                found_YX = np.where(read(other), found_YX, np.minimum(found_YX, away))
    return found_YX


def depth_in(mask_YX: np.ndarray) -> np.ndarray:
    """Return the distance of each masked voxel of a slice from the nearest known voxel of that slice, in voxels.

    It is float64 [Y, X]: 0 for known voxels, and FAR everywhere in a slice without any.
    """
    from scipy.ndimage import distance_transform_edt

    return np.full(mask_YX.shape, float(FAR)) if mask_YX.all() else np.asarray(distance_transform_edt(mask_YX))


def nothing_masked(stack: Stack) -> Mask:
    """Return a mask of a stack in which all voxels are known, for commands that do not restore."""
    return Mask("none", False, stack.shape, lambda index: np.zeros(stack.shape[1:], bool), (False,) * len(stack))


def make_mask(
    kind: str,
    stack: Stack,
    seed: int = 0,
    follow_links: bool = False,
    progress: Progress = unwatched,
    along_z: bool = True,
    grow: int = 0,
    invert: bool | None = None,
) -> Mask:
    """Make the mask of voxels to restore for one input: generated, or read from a file.

    A 2-D mask file holds for every slice. A 3-D one must have the shape of the stack, or of the volume that the stack
    is a part of. Non-zero voxels of a file are restored.

    Raise UserError for another shape, for more than two values, for a mask that is empty, and for one that leaves
    nothing to restore from.

    Args:
        kind: `block` (random, by `seed`), `center`, the path of a mask in any format that can be read, or `labels/NAME`
            in a Zarr input's own store.
        stack: the input.
        seed: of a `block` mask.
        follow_links: True to read other files that an HDF5 file names.
        progress: shows the progress of reading a file.
        along_z: True if only slices along z are restored, so that at least one of them must have known voxels.
        grow: voxels by which the marked regions of a file are enlarged on each side, along z too if the file has
            slices.
        invert: True to restore what a file does not mark. None refuses a file that marks more than MOST_MASKED.
    """
    if grow < 0:
        raise UserError(f"--grow {grow}: give a number of voxels, 0 or more")
    if kind in GENERATED:
        if grow or invert is not None:
            raise UserError(f"--mask {kind}: --grow and --invert are for masks from files: leave them away")
        shape = stack.shape[1:]
        mask_YX = block_mask(shape, seed) if kind == "block" else center_mask(shape)
        return Mask(kind, False, stack.shape, lambda index: mask_YX, (True,) * len(stack))
    details, path = stack.metadata.details, kind
    if "store" in details and kind.startswith("labels/") and not is_there(kind):  # in the input's own store
        path = f"{details['store']}:/{inside(details['inner'], kind)}"
    try:
        whole = open_volume(path, follow_links)
        volume = matched(whole, stack)
    except UserError as error:
        if "no such file" in str(error):
            raise UserError(f"--mask {kind}: neither 'block' nor 'center', and no such file; check the path") from None
        raise
    mask = _mask_from_file(volume, whole, stack, progress, along_z, grow, invert)
    white = f"{volume.path}: 0 is white in it: what it shows darker than white is restored; --invert the rest"
    told = [white] * (invert is None and whole.metadata.details.get("photometric") == 0)
    return replace(mask, remarks=[*told, *compare_voxel_sizes(volume, stack), *check_rim(stack, mask)])


def _mask_from_file(
    volume: Stack, whole: Stack, stack: Stack, progress: Progress, along_z: bool, grow: int, invert: bool | None
) -> Mask:
    """Return the mask for a stack from an open mask file. Raise UserError if its shape or its values do not fit.

    Args:
        volume: the open file, or the input's region of it.
        whole: the open file, whose marked regions grow into that region from outside.
        stack: the input.
        progress: shows the progress of reading.
        along_z: True if only slices along z are restored, so that at least one of them must have known voxels.
        grow: voxels by which the marked regions are enlarged on each side.
        invert: True to restore what the file does not mark. None refuses a file that marks more than MOST_MASKED.
    """
    if volume.shape[1:] != stack.shape[1:] or (volume.ndim == 3 and volume.shape != stack.shape):
        raise UserError(
            f"{volume.path}: the mask has shape {format_shape(volume.shape[-volume.ndim :])} but {stack.path} has "
            f"{format_shape(stack.shape[-stack.ndim :])}; give a mask of that shape, or a 2-D one for every slice"
        )
    source, (first, top, left) = (whole, start_of(volume.region)) if grow else (volume, (0, 0, 0))
    stored = lru_cache(2 * grow + 1)(source.reader)

    def read(index: int) -> np.ndarray:
        near = range(max(0, first + index - grow), min(source.shape[0], first + index + grow + 1))
        marked_YX = np.logical_or.reduce([(np.asarray(stored(one)) != 0) != bool(invert) for one in near])
        if grow:
            from scipy.ndimage import maximum_filter

            marked_YX = np.asarray(maximum_filter(marked_YX, 2 * grow + 1))
        return marked_YX[top : top + volume.shape[1], left : left + volume.shape[2]]

    checked = volume if grow else replace(volume, reader=stored)
    masked, full = _check_values(checked, read, progress, along_z, invert)
    name, changed = safe_stem(volume.name), grow > 0 or bool(invert)
    if volume.ndim == 2:
        mask_YX = read(0)
        return Mask(name, True, stack.shape, lambda index: mask_YX, (True,) * len(stack), changed=changed)
    return Mask(name, True, stack.shape, read, masked, full, changed=changed)


def _check_values(
    volume: Stack, read: Reader, progress: Progress, along_z: bool, invert: bool | None
) -> tuple[tuple[bool, ...], frozenset[int]]:
    """Return which slices have both voxels to restore and voxels to keep, and the numbers of those masked wholly.

    Raise UserError for values that are no mask.

    Args:
        volume: the mask's file, whose reader gives the values as they are stored.
        read: gives the voxels to restore in a slice.
        progress: shows the progress of reading.
        along_z: True if only slices along z are restored, so that at least one of them must have known voxels.
        invert: the user's option; None refuses a file that marks more than MOST_MASKED.
    """
    values, counts = set[float](), list[int]()
    for index in progress(range(volume.shape[0]), f"reading {volume.name}"):
        slice_YX = np.asarray(volume.reader(index))
        if slice_YX.dtype.kind not in "buif":
            raise UserError(f"{volume.path}: mask values of type {slice_YX.dtype}; save it as 8-bit 0 and 255")
        values.update(NAN if value != value else value for value in np.unique(slice_YX)[:300].tolist())
        if len(values) > 2 and not volume.labels:
            shown = ", ".join(f"{value:g}" for value in sorted(values)[:4])
            raise UserError(
                f"{volume.path}: a mask has two values (0 keeps, the other restores), this one has at least "
                f"{len(values)} ({shown}, ...): threshold it"
            )
        counts.append(int(np.count_nonzero(read(index))))
    whole = math.prod(volume.shape[1:])
    masked, full = tuple(0 < count < whole for count in counts), [n for n, count in enumerate(counts) if count == whole]
    if full and not any(masked) and (along_z or len(full) == volume.shape[0]):
        where = "all voxels are" if volume.ndim == 2 else "every slice with masked voxels is wholly"
        remedy = "0 must mark the voxels to keep" + "; --axes y x restores whole slices" * (len(full) < volume.shape[0])
        raise UserError(f"{volume.path}: {where} masked, nothing is left to restore from; {remedy}")
    if not any(masked) and not full:
        where = " in the chosen region" * (volume.region is not None)
        remedy = "mark the voxels to restore with non-zero"
        raise UserError(f"{volume.path}: the mask is empty{where}, all values are 0; {remedy}")
    share = sum(counts) / (whole * len(counts))
    if share > MOST_MASKED and invert is None:
        raise UserError(
            f"{volume.path}: {share:.1%} of the voxels are masked: is it inverted? --invert=true restores the others, "
            f"--invert=false these"
        )
    return masked, frozenset(full)


def check_rim(stack: Stack, mask: Mask) -> list[str]:
    """Return a line for the user, in a list, if known voxels beside a mask look like what it covers; else [].

    The mask is then probably too small. The stored voxels under the mask and around it are read in a few slices. A
    known voxel looks like what is covered if it is nearer to the median under the mask than to the range of the voxels
    farther away than RIM. That range leaves out a hundredth at each end.
    """
    from scipy.ndimage import distance_transform_cdt

    numbers = [index for index, masked in enumerate(mask.masked) if masked]
    parts: dict[int, list[np.ndarray]] = {away: [np.zeros(0)] for away in range(RIM + 2)}
    for index in numbers[:: max(1, len(numbers) // RIM_SLICES)][:RIM_SLICES]:
        image_YX, mask_YX = stack.read(index).astype(np.float64), mask.read(index)
        away_YX = np.minimum(distance_transform_cdt(~mask_YX, "chessboard"), RIM + 1)
        away_YX[~np.isfinite(image_YX)] = -1
        for away in range(RIM + 2):
            parts[away].append(image_YX[away_YX == away])
    covered, *rims, others = map(np.concatenate, parts.values())
    if not covered.size or not others.size:
        return []
    inner, (low, high) = float(np.median(covered)), np.quantile(others, (0.01, 0.99))
    end, sign = (high, 1) if inner > high else (low, -1)
    if sign * (inner - end) <= RIM_APART * (high - low):
        return []
    alike = [float(np.mean(sign * (rim - (end + inner) / 2) > 0)) if rim.size else 0.0 for rim in rims]
    small = next((away for away, share in enumerate(alike) if share <= RIM_SHARE), 0)
    if not small:  # the whole rim looks so: the mask covers a part of something larger
        return []
    told = f"{alike[0]:.0%} of the known voxels beside the mask look like what it covers"
    return [f"{stack.name}, mask {mask.name}: {told}: if it is too small, --grow {small} makes it larger"]
