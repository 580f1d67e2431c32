"""The tiles that a model restores, their resolutions and their order: pure data, made from the mask alone.

A model sees one native tile. A hole deeper than a tile has no context there, so holes are restored coarse to fine.
A hole starts at the finest level of a factor-2 pyramid where it fits well inside a tile (or is thin everywhere, as a
scratch is): there it is restored from noise. On each finer level it is refined from the enlarged result by overlapping
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

import numpy as np

from cocodiff_eval.data.intensity import downsample

# A tile that reaches the mask only with a smaller weight is left out: every voxel has another with at least a quarter.
FAINT = 0.02
# Lengths as fractions of the model's native size.
HOLE_LIMIT = 0.5  # longest side of a hole that one tile restores from noise
DEPTH_LIMIT = 0.125  # a larger hole is also restored so where no voxel is farther than this from known ones
OVERLAP = 0.25  # of neighbouring tiles; the blend takes the middle half of it
REFINE_STRENGTH = 0.2  # noise level from which finer levels are refined; 1 would forget the coarser result


@dataclass(frozen=True)
class Tile:
    """One window of a padded level. `holes`: the labels it writes; `blend`: with neighbours, in a grid."""

    row: int
    column: int
    holes: tuple[int, ...]
    blend: bool


@dataclass(frozen=True)
class TilePass:
    """Tiles of one level that run at one strength. `hidden_YX`: what the model must restore; it sees the rest."""

    strength: float
    hidden_YX: np.ndarray
    tiles: tuple[Tile, ...]
    batch: int

    @property
    def batches(self) -> tuple[tuple[Tile, ...], ...]:
        """The tiles in order, at most `batch` at a time."""
        return tuple(self.tiles[start : start + self.batch] for start in range(0, len(self.tiles), self.batch))


@dataclass(frozen=True)
class _Holes:
    """The connected holes of one level as arrays over holes [K]: a mask of dust has a hundred thousand of them.

    boxes_K4: top, left, bottom, right.
    """

    labels_K: np.ndarray
    boxes_K4: np.ndarray

    @cached_property
    def sides_K(self) -> np.ndarray:
        """The longer side of each box."""
        return (self.boxes_K4[:, 2:] - self.boxes_K4[:, :2]).max(axis=1, initial=0)

    def only(self, chosen_K: np.ndarray) -> _Holes:
        """Some of the holes, by index or by a boolean for each."""
        return _Holes(self.labels_K[chosen_K], self.boxes_K4[chosen_K])


@dataclass(frozen=True)
class Level:
    """The mask at one resolution: exponent 0 is the slice itself, each next one has half as many rows and columns.

    shape       [Y, X] of the level
    native      the model's own side, which lengths are fractions of
    tile        rows and columns of a tile
    mask_YX     voxels that are mostly unknown
    labels_YX   the number of the hole each belongs to, 0 outside the mask
    passes      of tiles that are restored on it, once they are planned
    """

    exponent: int
    shape: tuple[int, int]
    native: int
    tile: tuple[int, int]
    mask_YX: np.ndarray
    labels_YX: np.ndarray
    passes: tuple[TilePass, ...] = ()

    @property
    def padded(self) -> tuple[int, int]:
        """[Y, X] after padding to at least one tile."""
        return (max(self.shape[0], self.tile[0]), max(self.shape[1], self.tile[1]))

    @property
    def offset(self) -> tuple[int, int]:
        """Where the level begins in the padded one."""
        return ((self.padded[0] - self.shape[0]) // 2, (self.padded[1] - self.shape[1]) // 2)

    @property
    def padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """How far the level is padded before and after each axis, as `numpy.pad` takes it."""
        (top, left), (below, right) = self.offset, np.subtract(self.padded, self.shape).tolist()
        return ((top, below - top), (left, right - left))

    @property
    def overlap(self) -> int:
        """Of neighbouring tiles, in voxels."""
        return max(4, round(self.native * OVERLAP))

    def box(self, tile: Tile) -> tuple[slice, slice]:
        """Where a tile lies in the padded level."""
        return slice(tile.row, tile.row + self.tile[0]), slice(tile.column, tile.column + self.tile[1])

    def weights(self, tile: Tile) -> np.ndarray:
        """For blending a tile, float64 of its shape; all 1 for a tile that has its holes to itself."""
        if not tile.blend:
            return np.ones(self.tile)
        starts = zip((tile.row, tile.column), self.padded, self.tile, strict=True)
        return np.outer(*(axis_window(start, length, side, self.overlap) for start, length, side in starts))

    @cached_property
    def holes(self) -> _Holes:
        from scipy import ndimage

        boxes: list[Any] = ndimage.find_objects(self.labels_YX)
        labels_K = np.array([label for label, box in enumerate(boxes, start=1) if box is not None], dtype=np.int64)
        corners = [(box[0].start, box[1].start, box[0].stop, box[1].stop) for box in boxes if box is not None]
        boxes_K4 = np.array(corners, dtype=np.int64).reshape(-1, 4)
        return _Holes(labels_K, boxes_K4)

    @cached_property
    def depth(self) -> np.ndarray:
        """For each label the distance of its hole's innermost voxel from a known one, [labels + 1]."""
        from scipy import ndimage

        if self.mask_YX.all():
            depth_YX = np.full(self.shape, float(max(self.shape)))
        else:
            depth_YX = ndimage.distance_transform_edt(np.pad(self.mask_YX, 1, mode="edge"))[1:-1, 1:-1]
        return np.asarray(ndimage.maximum(depth_YX, self.labels_YX, np.arange(self.labels_YX.max() + 1)))


@dataclass(frozen=True)
class RestorationPlan:
    """All levels of one slice, finest first; they run from the last to the first."""

    levels: tuple[Level, ...]

    def tile_steps(self, steps: int) -> int:
        """Denoising steps of all tiles of the slice together when a run at strength 1 takes `steps`."""
        return sum(len(one.tiles) * steps_at(steps, one.strength) for level in self.levels for one in level.passes)


def steps_at(steps: int, strength: float) -> int:
    """Denoising steps that really run at `strength` when strength 1 runs `steps`: at least one."""
    return steps if strength >= 1 else min(steps, max(1, round(steps * strength)))


def plan_restoration(
    mask_YX: np.ndarray, native: int, batch: int, strength: float = 1.0, multiple: int | None = None
) -> RestorationPlan:
    """Plan one slice for a model of `native` x `native` voxels and at most `batch` tiles a call. strength: noise level
    from which a hole is first restored; below 1 the fill from around it shines through. multiple: tiles of a thinner
    slice are as thin as this number's multiples allow; else they are square."""
    tile = (native, native)
    if multiple is not None:
        rows, columns = (min(native, -(-side // multiple) * multiple) for side in mask_YX.shape)
        tile = (rows, columns)
    grids, starts = _searched(_grids(mask_YX, native, tile))
    return RestorationPlan(tuple(_level(grid, starts, batch, strength) for grid in grids))


def _grids(mask_YX: np.ndarray, native: int, tile: tuple[int, int]) -> Iterator[Level]:
    """The mask and its numbered holes on every level, until the whole slice fits a tile."""
    from scipy import ndimage

    labels_YX, _ = ndimage.label(mask_YX, structure=np.ones((3, 3)))
    known_YX = (~mask_YX).astype(np.float64)
    finer = Level(0, (mask_YX.shape[0], mask_YX.shape[1]), native, tile, mask_YX.copy(), labels_YX)
    yield finer
    while max(finer.shape) > native:
        known_YX, _ = downsample(known_YX, np.ones_like(known_YX))
        rows, columns = known_YX.shape
        even = np.pad(labels_YX, [(0, side % 2) for side in finer.shape])
        labels_YX = even.reshape(rows, 2, columns, 2).max(axis=(1, 3))
        # A sample can be mostly unknown though its own four are not: it then belongs to a neighbouring hole.
        labels_YX = np.where(labels_YX > 0, labels_YX, ndimage.grey_dilation(labels_YX, size=(3, 3)))
        coarse_mask_YX = (known_YX < 0.5) & (labels_YX > 0)
        labels = np.where(coarse_mask_YX, labels_YX, 0)
        finer = Level(finer.exponent + 1, (rows, columns), native, tile, coarse_mask_YX, labels)
        yield finer


def _searched(grids: Iterator[Level]) -> tuple[list[Level], np.ndarray]:
    """The levels that are needed, and for each label the one on which its hole is restored from noise, [labels + 1]:
    the finest where the hole fits, or the last on which it exists."""
    finest = next(grids)
    starts = np.zeros(int(finest.labels_YX.max()) + 1, dtype=np.int64)
    levels, searching = list[Level](), np.ones(len(starts), dtype=bool)
    for grid in chain([finest], grids):
        levels.append(grid)
        holes = grid.holes.only(searching[grid.holes.labels_K])
        starts[holes.labels_K] = grid.exponent
        large_K = holes.labels_K[holes.sides_K > HOLE_LIMIT * grid.native]
        searching[:] = False
        if len(large_K):  # depths take long, and most masks need none
            searching[large_K] = finest.depth[large_K] / 2**grid.exponent > DEPTH_LIMIT * grid.native
        if not searching.any():
            break
    return levels[: int(starts.max()) + 1], starts


def _level(grid: Level, starts: np.ndarray, batch: int, strength: float) -> Level:
    labels_K = grid.holes.labels_K
    older_K = labels_K[starts[labels_K] > grid.exponent]
    fresh = grid.holes.only(starts[labels_K] == grid.exponent)
    passes = []
    if len(fresh.labels_K):
        # Holes of other levels are not known yet at this resolution, so the model may not take them for context.
        passes.append(TilePass(strength, grid.mask_YX, _tiles_from_noise(grid, fresh), batch))
    if len(older_K):
        # Whatever is not being refined is by now as good as it gets here, and serves as context.
        hidden_YX = np.isin(grid.labels_YX, older_K)
        tiles = tuple(_grid_tiles(grid, older_K))
        passes.append(TilePass(min(REFINE_STRENGTH, strength), hidden_YX, tiles, batch))
    return replace(grid, passes=tuple(passes))


def _tiles_from_noise(grid: Level, fresh: _Holes) -> tuple[Tile, ...]:
    """A tile around each hole that fits one, shared with the holes near it; a grid over the long and thin."""
    if grid.padded == grid.tile:
        return (Tile(0, 0, tuple(fresh.labels_K.tolist()), blend=False),)
    limit = HOLE_LIMIT * grid.native
    margin = round(grid.native * (1 - HOLE_LIMIT) / 2)
    waiting = fresh.only(fresh.sides_K <= limit)
    waiting = waiting.only(np.lexsort((waiting.boxes_K4[:, 1], waiting.boxes_K4[:, 0])))
    tiles = []
    while len(waiting.labels_K):
        together_K = _company(waiting, grid, margin)
        group = waiting.only(together_K)
        # They lie in its middle, as far as it stays inside the padded level.
        ends = group.boxes_K4[:, :2].min(axis=0) + group.boxes_K4[:, 2:].max(axis=0)
        start = (ends - grid.tile) // 2 + grid.offset
        row, column = np.clip(start, 0, np.subtract(grid.padded, grid.tile)).tolist()
        tiles.append(Tile(row, column, tuple(group.labels_K.tolist()), blend=False))
        waiting = waiting.only(~together_K)
    large_K = fresh.labels_K[fresh.sides_K > limit]
    if len(large_K):
        tiles.extend(_grid_tiles(grid, large_K))
    return tuple(tiles)


def _company(waiting: _Holes, grid: Level, margin: int) -> np.ndarray:
    """Which holes share a tile with the first one (the topmost) and have `margin` of context there; boolean [K].

    The first one lies at the window's upper margin; of three places to the left and right the fullest is taken.
    """
    inner = grid.native - 2 * margin
    top, left, _, right = waiting.boxes_K4[0].tolist()
    below_K = waiting.boxes_K4[:, 2] <= top + inner
    tries = []
    for start in ((left + right - inner) // 2, left, right - inner):
        inside_K = below_K & (waiting.boxes_K4[:, 1] >= start) & (waiting.boxes_K4[:, 3] <= start + inner)
        inside_K[0] = True
        tries.append(inside_K)
    return max(tries, key=np.count_nonzero)


def axis_starts(length: int, native: int, overlap: int) -> tuple[int, ...]:
    """Starts of windows of `native` that cover `length` evenly with at least `overlap` in common."""
    if length <= native:
        return (0,)
    count = -(-(length - native) // (native - overlap)) + 1
    return tuple(round(i * (length - native) / (count - 1)) for i in range(count))


def axis_window(start: int, length: int, native: int, overlap: int) -> np.ndarray:
    """Blending weights of a window along one axis: 0 in the outer quarter of the overlap, a smooth ramp over its middle
    half, 1 inside. No ramp where the window ends with the image. float64 [native]."""
    inward = np.clip((np.arange(native) + 0.5 - overlap / 4) / (overlap / 2), 0.0, 1.0)
    ramp = inward * inward * (3 - 2 * inward)
    window = np.ones(native)
    if start > 0:
        window *= ramp
    if start + native < length:
        window *= ramp[::-1]
    return window


def _grid_tiles(grid: Level, labels_K: np.ndarray) -> Iterator[Tile]:
    """Tiles of an even grid that write at least one voxel of the given labels, row by row."""
    wanted_YX = np.pad(np.where(np.isin(grid.labels_YX, labels_K), grid.labels_YX, 0), grid.padding)
    along = (axis_starts(length, side, grid.overlap) for length, side in zip(grid.padded, grid.tile, strict=True))
    for row, column in product(*along):
        tile = Tile(row, column, (), blend=True)
        here = wanted_YX[grid.box(tile)]
        if (here[grid.weights(tile) > FAINT] > 0).any():
            yield replace(tile, holes=tuple(np.unique(here[here > 0]).tolist()))
