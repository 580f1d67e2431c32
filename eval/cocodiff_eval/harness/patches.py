"""Patches of a user's slices to train on: of known voxels, from all over the volumes, a part of them held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff_eval.data.intensity import downsample
from cocodiff_eval.data.volume import Progress, format_shape
from cocodiff_eval.harness.tasks import Task

HELD_OUT = 8  # an eighth of a volume, at its end
LEAST_KNOWN = 0.75  # of a patch
TRIES = 50


class Patches(NamedTuple):
    """image01_NHW: float16 in [0, 1], .5 where nothing is known; known_NHW: bool."""

    image01_NHW: np.ndarray
    known_NHW: np.ndarray

    def __len__(self) -> int:
        return len(self.known_NHW)


class Split(NamedTuple):
    """axis: the one across which a volume is cut; train, held: the ranges of it."""

    axis: int
    train: range
    held: range

    @classmethod
    def of(cls, task: Task, side: int) -> Split:
        """The last eighth of the slices is held out, and as many before it go unused, since they are much alike; of few
        slices the last eighth of their longer side, which has to hold a patch. Raises UserError where neither fits."""
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
    """So many patches of side x side to train on, and so many that are held out, divided among volumes by their size.

    Patches lie in slices along z and, where a volume is as deep as a patch, along y and x; a third of them shows twice
    or four times as much, as the coarse levels of a restoration do. No more than `side` slices are in memory.
    Raises UserError where a volume is too small, or too little of it is known.
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
    """A patch anywhere, of any size; None where too little of it is known."""
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
