"""Which tiles a model restores, at which resolution, in which order: pure data, made from the mask alone.

A model sees one native tile. A hole deeper than a tile has no context there, so holes are restored coarse to fine.
A hole starts at the finest level of a factor-2 pyramid where it fits well inside a tile (or is thin everywhere, as a
scratch is): there it is restored from noise. On each finer level it is refined from the enlarged result by overlapping
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cocodiff_eval.pyramid import downsample, halve_shape

# A tile that reaches the mask only with a smaller weight is left out: every voxel has another with at least a quarter.
FAINT = 0.02


@dataclass(frozen=True)
class TilingSettings:
    """How holes are cut into tiles; lengths are fractions of the model's native size.

    hole_limit      longest side of a hole that one tile restores from noise
    depth_limit     a larger hole is also restored from noise where no voxel is farther than this from known ones
    overlap         of neighbouring tiles; the blend takes the middle half of it
    refine_strength noise level from which finer levels are refined; 1 would forget the coarser result
    """

    hole_limit: float = 0.6
    depth_limit: float = 0.125
    overlap: float = 0.25
    refine_strength: float = 0.4


@dataclass(frozen=True)
class Tile:
    """One native-size window of a padded level. `holes`: the labels it writes; `blend`: with neighbours, in a grid."""

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
class Level:
    """One resolution: exponent 0 is the slice itself, each next one has half as many rows and columns.

    shape       [Y, X] of the level
    padded      [Y, X] after padding to at least one tile
    offset      where the level begins in the padded one
    mask_YX     voxels that are mostly unknown
    labels_YX   the number of the hole each belongs to, 0 outside the mask
    """

    exponent: int
    shape: tuple[int, int]
    padded: tuple[int, int]
    offset: tuple[int, int]
    mask_YX: np.ndarray
    labels_YX: np.ndarray
    passes: tuple[TilePass, ...]


@dataclass(frozen=True)
class RestorationPlan:
    """All levels of one slice, finest first; they run from the last to the first."""

    native: int
    overlap: int
    levels: tuple[Level, ...]

    @property
    def calls(self) -> int:
        """How often the model is called."""
        return sum(len(one.batches) for level in self.levels for one in level.passes)

    def denoising_steps(self, steps: int) -> int:
        """Denoising steps of the whole slice when a run at strength 1 takes `steps`: the length of a progress bar."""
        return sum(len(one.batches) * steps_at(steps, one.strength) for level in self.levels for one in level.passes)


def steps_at(steps: int, strength: float) -> int:
    """Denoising steps that really run at `strength` when strength 1 runs `steps`: at least one."""
    return steps if strength >= 1 else min(steps, max(1, round(steps * strength)))


@dataclass(frozen=True)
class _Hole:
    label: int
    top: int
    left: int
    bottom: int
    right: int
    depth: float

    @property
    def side(self) -> int:
        return max(self.bottom - self.top, self.right - self.left)


@dataclass(frozen=True)
class _Grid:
    """The mask on one level, before any tile is placed."""

    exponent: int
    shape: tuple[int, int]
    native: int
    mask_YX: np.ndarray
    labels_YX: np.ndarray

    @property
    def padded(self) -> tuple[int, int]:
        return (max(self.shape[0], self.native), max(self.shape[1], self.native))

    @property
    def offset(self) -> tuple[int, int]:
        return ((self.padded[0] - self.shape[0]) // 2, (self.padded[1] - self.shape[1]) // 2)

    @cached_property
    def holes(self) -> dict[int, _Hole]:
        from scipy import ndimage

        depth_YX = ndimage.distance_transform_edt(np.pad(self.mask_YX, 1, mode="edge"))[1:-1, 1:-1]
        if self.mask_YX.all():
            depth_YX = np.full(self.shape, float(max(self.shape)))
        found: dict[int, _Hole] = {}
        boxes: list[Any] = ndimage.find_objects(self.labels_YX)
        for label, box in enumerate(boxes, start=1):
            if box is not None:
                inside = self.labels_YX[box] == label
                depth = float(depth_YX[box][inside].max())
                rows, columns = box
                found[label] = _Hole(label, rows.start, columns.start, rows.stop, columns.stop, depth)
        return found


def plan_restoration(
    mask_YX: np.ndarray, native: int, batch: int, settings: TilingSettings | None = None
) -> RestorationPlan:
    """Plan one slice for a model of `native` x `native` voxels and at most `batch` tiles a call."""
    settings = settings or TilingSettings()
    assert native >= 8 and batch >= 1, (native, batch)
    grids = _grids(mask_YX, native)
    starts = _starts(grids, settings)
    overlap = max(4, round(native * settings.overlap))
    deepest = max(starts.values(), default=0)
    levels = tuple(_level(grid, starts, overlap, batch, settings) for grid in grids[: deepest + 1])
    return RestorationPlan(native, overlap, levels)


def _grids(mask_YX: np.ndarray, native: int) -> list[_Grid]:
    """The mask and its numbered holes on every level, until the whole slice fits a tile."""
    from scipy import ndimage

    labels_YX, _ = ndimage.label(mask_YX, structure=np.ones((3, 3)))
    known_YX = (~mask_YX).astype(np.float64)
    grids = [_Grid(0, (mask_YX.shape[0], mask_YX.shape[1]), native, mask_YX.copy(), labels_YX)]
    while max(grids[-1].shape) > native:
        finer = grids[-1]
        shape = halve_shape(finer.shape)
        known_YX = downsample(known_YX, np.ones_like(known_YX))[0]
        coarse_mask_YX = known_YX < 0.5
        even = np.zeros((2 * shape[0], 2 * shape[1]), dtype=labels_YX.dtype)
        even[: finer.shape[0], : finer.shape[1]] = labels_YX
        labels_YX = even.reshape(shape[0], 2, shape[1], 2).max(axis=(1, 3))
        # A sample can be mostly unknown though its own four are not: it then belongs to a neighbouring hole.
        near_YX = ndimage.grey_dilation(labels_YX, size=(3, 3))
        labels_YX = np.where(labels_YX > 0, labels_YX, near_YX)
        coarse_mask_YX &= labels_YX > 0
        grids.append(_Grid(finer.exponent + 1, shape, native, coarse_mask_YX, np.where(coarse_mask_YX, labels_YX, 0)))
    return grids


def _starts(grids: list[_Grid], settings: TilingSettings) -> dict[int, int]:
    """The level on which each hole is restored from noise: the finest where it fits, or the last on which it exists."""
    starts: dict[int, int] = {}
    for label, hole in grids[0].holes.items():
        for grid in grids:
            on_level = grid.holes.get(label)
            if on_level is None:
                break
            starts[label] = grid.exponent
            if max(grid.shape) <= grid.native or on_level.side <= settings.hole_limit * grid.native:
                break
            if hole.depth / 2**grid.exponent <= settings.depth_limit * grid.native:
                break
    return starts


def _level(grid: _Grid, starts: dict[int, int], overlap: int, batch: int, settings: TilingSettings) -> Level:
    present = grid.holes
    fresh = [label for label in present if starts[label] == grid.exponent]
    older = [label for label in present if starts[label] > grid.exponent]
    passes = []
    if fresh:
        # Holes of other levels are not known yet at this resolution, so the model may not take them for context.
        tiles = _tiles_from_noise(grid, fresh, overlap, settings)
        passes.append(TilePass(1.0, grid.mask_YX, tiles, batch))
    if older:
        # Whatever is not being refined is by now as good as it gets here, and serves as context.
        hidden_YX = np.isin(grid.labels_YX, older)
        tiles = tuple(_grid_tiles(grid, older, overlap))
        passes.append(TilePass(settings.refine_strength, hidden_YX, tiles, batch))
    return Level(grid.exponent, grid.shape, grid.padded, grid.offset, grid.mask_YX, grid.labels_YX, tuple(passes))


def _tiles_from_noise(grid: _Grid, fresh: list[int], overlap: int, settings: TilingSettings) -> tuple[Tile, ...]:
    """A tile around each hole that fits one, shared with all holes near it; a grid over the long and thin."""
    native, padded, offset = grid.native, grid.padded, grid.offset
    whole = padded == (native, native)
    limit = native if whole else settings.hole_limit * native
    single = [grid.holes[label] for label in fresh if grid.holes[label].side <= limit]
    large = [label for label in fresh if grid.holes[label].side > limit]
    margin = 0 if whole else round(native * (1 - settings.hole_limit) / 2)
    tiles = []
    waiting = sorted(single, key=lambda hole: (hole.top, hole.left))
    while waiting:
        first = waiting[0]
        row = _centred(first.top + offset[0], first.bottom + offset[0], native, padded[0])
        column = _centred(first.left + offset[1], first.right + offset[1], native, padded[1])
        inside = [hole for hole in waiting if hole is first or _fits(hole, row, column, margin, grid)]
        tiles.append(Tile(row, column, tuple(hole.label for hole in inside), blend=False))
        taken = {hole.label for hole in inside}
        waiting = [hole for hole in waiting if hole.label not in taken]
    if large:
        tiles.extend(_grid_tiles(grid, large, overlap))
    return tuple(tiles)


def _centred(start: int, stop: int, native: int, length: int) -> int:
    """Where a window of `native` begins that has [start, stop) in its middle and stays inside [0, length)."""
    return min(max((start + stop - native) // 2, 0), length - native)


def _fits(hole: _Hole, row: int, column: int, margin: int, grid: _Grid) -> bool:
    """Whether a window holds the hole and `margin` voxels of context around it (less at the image's own border)."""
    spans = ((hole.top, hole.bottom, row, 0), (hole.left, hole.right, column, 1))
    for start, stop, window, axis in spans:
        length, shift = grid.padded[axis], grid.offset[axis]
        before = margin if window > 0 else 0
        after = margin if window + grid.native < length else 0
        if start + shift < window + before or stop + shift > window + grid.native - after:
            return False
    return True


def axis_starts(length: int, native: int, overlap: int) -> tuple[int, ...]:
    """Starts of windows of `native` that cover `length` evenly with at least `overlap` in common."""
    if length <= native:
        return (0,)
    count = -(-(length - native) // (native - overlap)) + 1
    return tuple(round(i * (length - native) / (count - 1)) for i in range(count))


def axis_window(start: int, length: int, native: int, overlap: int) -> np.ndarray:
    """Blending weights of a window along one axis: 0 in the outer quarter of the overlap, a smooth ramp over its middle
    half, 1 inside. No ramp where the window ends with the image. float64 [native]."""
    quarter = overlap / 4
    place = np.arange(native) + 0.5
    inward = np.clip((place - quarter) / (2 * quarter), 0.0, 1.0)
    ramp = inward * inward * (3 - 2 * inward)
    window = np.ones(native)
    if start > 0:
        window *= ramp
    if start + native < length:
        window *= ramp[::-1]
    return window


def tile_window(tile: Tile, padded: tuple[int, int], native: int, overlap: int) -> np.ndarray:
    """Blending weights of a tile, float64 [native, native]; all 1 for a tile that has its holes to itself."""
    if not tile.blend:
        return np.ones((native, native))
    rows = axis_window(tile.row, padded[0], native, overlap)
    columns = axis_window(tile.column, padded[1], native, overlap)
    return rows[:, None] * columns[None, :]


def _grid_tiles(grid: _Grid, labels: list[int], overlap: int) -> Iterator[Tile]:
    """Tiles of an even grid that write at least one voxel of `labels`, row by row."""
    target_YX = np.pad(np.isin(grid.labels_YX, labels), _padding(grid.shape, grid.padded, grid.offset))
    for row in axis_starts(grid.padded[0], grid.native, overlap):
        for column in axis_starts(grid.padded[1], grid.native, overlap):
            tile = Tile(row, column, tuple(labels), blend=True)
            window = tile_window(tile, grid.padded, grid.native, overlap) > FAINT
            if (target_YX[row : row + grid.native, column : column + grid.native] & window).any():
                yield tile


def _padding(
    shape: tuple[int, int], padded: tuple[int, int], offset: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    return (
        (offset[0], padded[0] - shape[0] - offset[0]),
        (offset[1], padded[1] - shape[1] - offset[1]),
    )


def level_padding(level: Level) -> tuple[tuple[int, int], tuple[int, int]]:
    """How far a level is padded before and after each axis, as `numpy.pad` takes it."""
    return _padding(level.shape, level.padded, level.offset)
