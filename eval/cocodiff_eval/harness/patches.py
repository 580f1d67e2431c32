"""The patches of a user's volumes that a model is trained on, and patches of parts that are held out.

They are cut at random places all over the volumes, and most of their voxels are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff_eval.data.intensity import downsample
from cocodiff_eval.data.volume import Progress, format_shape
from cocodiff_eval.harness.tasks import Task

HELD_OUT = 8  # one part in so many of a volume is held out: its last one
LEAST_KNOWN = 0.75  # least share of known voxels in a patch
TRIES = 50  # times the side of a patch: number of places that are tried for one


class Patches(NamedTuple):
    """N square patches of volumes, and which of their voxels are known."""

    image01_NHW: np.ndarray  # float16 in [0, 1]; 0.5 for unknown voxels
    known_NHW: np.ndarray  # boolean

    def __len__(self) -> int:
        return len(self.known_NHW)


class Split(NamedTuple):
    """The division of a volume into a part to train on and a part that is held out to check the training."""

    axis: int  # index of the axis (z, y, x) across which the volume is cut
    train: range  # indices along the axis that patches to train on are from
    held: range  # indices along it that are held out

    @classmethod
    def of(cls, task: Task, side: int) -> Split:
        """Return the division of a task's volume whose held-out part can hold a patch. Raise UserError if it is too
        small.

        The last eighth of the slices is held out. As many slices before it are not used, as they resemble it. With
        fewer than 16 slices, the last eighth of the slices' longer side is held out instead, but at least `side`.

        Args:
            task: the volume.
            side: side of a patch in voxels.
        """
        depth, *sides = shape = task.stack.shape
        path = task.stack.path
        if min(sides) < side:
            raise UserError(f"{path}: slices of {format_shape(shape[1:])} voxels are smaller than a patch of {side}")
        if depth >= 2 * HELD_OUT:
            held = depth // HELD_OUT
            return cls(0, range(depth - 2 * held), range(depth - held, depth))
        axis = 1 + sides.index(max(sides))
        held = max(side, shape[axis] // HELD_OUT)
        if shape[axis] < held + side:
            raise UserError(
                f"{path}: {format_shape(shape)} voxels are too few to hold a part out, which tells whether training "
                f"helps: give at least {2 * HELD_OUT} slices, or {2 * side} voxels on a side"
            )
        return cls(axis, range(shape[axis] - held), range(shape[axis] - held, shape[axis]))


def cut_patches(
    tasks: Sequence[Task], side: int, counts: tuple[int, int], seed: Sequence[int], progress: Progress
) -> tuple[Patches, Patches]:
    """Cut patches from volumes at random places. Return patches to train on and held-out patches, in this order.

    Volumes have shares by their size. Patches lie in slices along z and, if a volume is as deep as a patch, along y and
    x. Up to a third of them are reduced from two or four times the side, as the coarse levels of a restoration are. No
    more than `side` slices are in memory.

    Raise UserError if a volume is too small, or if too little of it is known.

    Args:
        tasks: the volumes, with masks of unknown voxels.
        side: side of a patch in voxels.
        counts: about how many patches to train on and to hold out there are to be; each volume has at least one of
            each.
        seed: seed of the random places.
        progress: shows the progress of reading.
    """
    splits = [Split.of(task, side) for task in tasks]
    sizes = np.array([float(np.prod(task.stack.shape)) for task in tasks])
    found = []
    for part, count in enumerate(counts):
        generator = np.random.default_rng([*seed, part])
        shares = np.maximum(1, np.rint(sizes / sizes.sum() * count).astype(int))
        of_part: list[tuple[np.ndarray, np.ndarray]] = []
        for task, split, share in zip(tasks, splits, shares, strict=True):
            within = (split.train, split.held)[part]
            of_part += _of_volume(task, split.axis, within, side, int(share), generator, progress)
        images, known = zip(*of_part, strict=True)
        found.append(Patches(np.stack(images), np.stack(known)))
    return found[0], found[1]


def _of_volume(
    task: Task, axis: int, within: range, side: int, count: int, generator: np.random.Generator, progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `count` patches of a volume, each as image and known voxels, from slabs of slices all over it.

    Images are float16 in [0, 1], known voxels boolean, [side, side] each. Raise UserError if too little of a slab is
    known.

    Args:
        task: the volume.
        axis: index of the axis that `within` limits: 0, 1, 2 for z, y, x.
        within: indices along it that patches are from.
        side: side of a patch in voxels.
        count: number of patches.
        generator: draws the places.
        progress: shows the progress of reading.
    """
    ranges = [range(length) for length in task.stack.shape]
    ranges[axis] = within
    depth = min(side, len(ranges[0]))
    slabs = min(count, -(-len(ranges[0]) // depth))
    for slab in range(slabs):
        spare = len(ranges[0]) - depth
        first = ranges[0].start + (round(slab * spare / (slabs - 1)) if slabs > 1 else 0)
        indices = range(first, first + depth)
        image01_ZYX, known_ZYX = _read(task, indices, ranges[1:], progress)
        wanted, tries = count // slabs + (slab < count % slabs), 0
        while wanted:
            patch = _draw(image01_ZYX, known_ZYX, side, generator)
            tries += 1
            if patch is not None:
                yield patch
                wanted, tries = wanted - 1, 0
            elif tries > TRIES * side:
                raise UserError(
                    f"{task.stack.path}: in slices {indices.start} to {indices.stop - 1} no patch of {side} x {side} "
                    f"is known to {LEAST_KNOWN:.0%}: too much is masked to train on"
                )


def _read(task: Task, indices: range, sides: Sequence[range], progress: Progress) -> tuple[np.ndarray, np.ndarray]:
    """Return a box of a volume as float16 [Z, Y, X] in [0, 1], 0.5 for unknown voxels, and which are known, boolean.

    Args:
        task: the volume.
        indices: the slices along z.
        sides: the rows, and the columns.
        progress: shows the progress of reading.
    """
    rows, columns = (slice(one.start, one.stop) for one in sides)
    images, known = [], []
    for index in progress(indices, f"reading {task.stack.name}"):
        image_YX = task.stack.read(index)[rows, columns]
        mask_YX = task.mask.reader(index)[rows, columns]  # also of a slice that is masked wholly
        images.append(np.where(mask_YX, 0.5, task.scale.known01(image_YX, mask_YX)).astype(np.float16))
        known.append(~mask_YX)
    return np.stack(images), np.stack(known)


def _draw(
    image01_ZYX: np.ndarray, known_ZYX: np.ndarray, side: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return a patch at a random place, of a random size that is reduced to `side`: its image and its known voxels.

    Return None if too little of it is known.

    Args:
        image01_ZYX: a box of a volume, in [0, 1].
        known_ZYX: True for its known voxels.
        side: side of the patch in voxels.
        generator: draws place and size.
    """
    axis = int(generator.choice([axis for axis in range(3) if min(np.delete(image01_ZYX.shape, axis)) >= side]))
    at = int(generator.integers(image01_ZYX.shape[axis]))
    image, known = (np.take(one, at, axis) for one in (image01_ZYX, known_ZYX))
    halvings = int(generator.choice(3, p=(2 / 3, 2 / 9, 1 / 9)))
    halvings = min(halvings, int(np.log2(min(image.shape) / side)))
    wide = side << halvings
    top, left = (int(generator.integers(length - wide + 1)) for length in image.shape)
    image, known = (one[top : top + wide, left : left + wide] for one in (image, known))
    if known.mean() < LEAST_KNOWN:
        return None
    if halvings:
        coarse, weight = image.astype(np.float64), known.astype(np.float64)
        for _ in range(halvings):
            coarse, weight = downsample(coarse, weight)
        known = weight > 0.5
        image = np.where(known, coarse, 0.5).astype(np.float16)
    return image, known
