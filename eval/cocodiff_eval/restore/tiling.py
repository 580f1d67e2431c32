"""The plan of tiles that a model restores, with their resolutions and order. It is made from the mask alone.

A model sees one native tile. In a hole deeper than a tile it has no context, so holes are restored from coarse to fine.
A hole starts at the finest level of a factor-2 pyramid on which it fits well inside a tile, or is thin everywhere, as a
scratch is. There it is restored from noise. On each finer level overlapping tiles refine the enlarged result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

import numpy as np

from cocodiff_eval.data.intensity import downsample

# A tile whose weight in the mask is smaller is left out. Every voxel has another tile with a weight of at least .25.
FAINT = 0.02
# Lengths as fractions of the model's native size.
HOLE_LIMIT = 0.5  # longest side of a hole that one tile restores from noise
DEPTH_LIMIT = 0.125  # a larger hole is restored from noise too if no voxel is farther than this from known ones
OVERLAP = 0.25  # overlap of neighbouring tiles, which are blended in the middle half of it
REFINE_STRENGTH = 0.2  # noise level from which finer levels are refined; 1 would forget the coarser result


@dataclass(frozen=True)
class Tile:
    """A window that the model restores in a level, which is the slice at one resolution, padded to at least a tile."""

    row: int  # first row in the padded level
    column: int  # first column in the padded level
    holes: tuple[int, ...]  # labels of the holes that the tile restores
    blend: bool  # True for a tile of a grid, which is blended with its neighbours


@dataclass(frozen=True)
class TilePass:
    """The tiles of one level that run at one strength."""

    strength: float  # noise level to start from
    hidden_YX: np.ndarray  # what the model must restore; all else is its context
    tiles: tuple[Tile, ...]
    batch: int  # most tiles in a call of the model

    @property
    def batches(self) -> tuple[tuple[Tile, ...], ...]:
        """The tiles in order, at most `batch` at a time."""
        return tuple(self.tiles[start : start + self.batch] for start in range(0, len(self.tiles), self.batch))


@dataclass(frozen=True)
class _Holes:
    """The connected holes of one level as arrays over K holes. A mask of dust has a hundred thousand of them."""

    labels_K: np.ndarray  # number of each hole in the level's labels
    boxes_K4: np.ndarray  # top, left, bottom and right of each

    @cached_property
    def sides_K(self) -> np.ndarray:
        """The longer side of each box."""
        return (self.boxes_K4[:, 2:] - self.boxes_K4[:, :2]).max(axis=1, initial=0)

    def only(self, chosen_K: np.ndarray) -> _Holes:
        """Return some of the holes, chosen by index or by a boolean for each."""
        return _Holes(self.labels_K[chosen_K], self.boxes_K4[chosen_K])


@dataclass(frozen=True)
class Level:
    """The mask at one resolution. Exponent 0 is the slice itself; each next level has half as many rows and columns."""

    exponent: int  # number of times that the resolution is halved
    shape: tuple[int, int]  # [Y, X]
    native: int  # the model's own side, of which lengths are fractions
    tile: tuple[int, int]  # rows and columns of a tile
    mask_YX: np.ndarray  # voxels that are mostly unknown
    labels_YX: np.ndarray  # number of the hole that each voxel belongs to, 0 outside the mask
    passes: tuple[TilePass, ...] = ()  # passes of tiles on this level, once they are planned

    @property
    def padded(self) -> tuple[int, int]:
        """The shape [Y, X] after padding to at least one tile."""
        return (max(self.shape[0], self.tile[0]), max(self.shape[1], self.tile[1]))

    @property
    def offset(self) -> tuple[int, int]:
        """The row and column at which the level begins in the padded one."""
        return ((self.padded[0] - self.shape[0]) // 2, (self.padded[1] - self.shape[1]) // 2)

    @property
    def padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows and columns to add around the level so that it is at least as large as a tile; 0 if it is.

        They are ((above, below), (left, right)), as `numpy.pad` takes them.
        """
        (top, left), (below, right) = self.offset, np.subtract(self.padded, self.shape).tolist()
        return ((top, below - top), (left, right - left))

    @property
    def overlap(self) -> int:
        """The overlap of neighbouring tiles, in voxels."""
        return max(4, round(self.native * OVERLAP))

    def box(self, tile: Tile) -> tuple[slice, slice]:
        """Return the rows and columns of a tile in the padded level."""
        return slice(tile.row, tile.row + self.tile[0]), slice(tile.column, tile.column + self.tile[1])

    def weights(self, tile: Tile) -> np.ndarray:
        """Return the blending weights of a tile, float64 of its shape; all 1 for a tile that is not blended."""
        if not tile.blend:
            return np.ones(self.tile)
        starts = zip((tile.row, tile.column), self.padded, self.tile, strict=True)
        return np.outer(*(axis_window(start, length, side, self.overlap) for start, length, side in starts))

    @cached_property
    def holes(self) -> _Holes:
        """The holes of this level."""
        from scipy import ndimage

        boxes: list[Any] = ndimage.find_objects(self.labels_YX)
        labels_K = np.array([label for label, box in enumerate(boxes, start=1) if box is not None], dtype=np.int64)
        corners = [(box[0].start, box[1].start, box[0].stop, box[1].stop) for box in boxes if box is not None]
        boxes_K4 = np.array(corners, dtype=np.int64).reshape(-1, 4)
        return _Holes(labels_K, boxes_K4)

    @cached_property
    def depth(self) -> np.ndarray:
        """The distance of the innermost voxel of each hole from a known one, by label, [labels + 1]."""
        from scipy import ndimage

        if self.mask_YX.all():
            depth_YX = np.full(self.shape, float(max(self.shape)))
        else:
            depth_YX = ndimage.distance_transform_edt(np.pad(self.mask_YX, 1, mode="edge"))[1:-1, 1:-1]
        return np.asarray(ndimage.maximum(depth_YX, self.labels_YX, np.arange(self.labels_YX.max() + 1)))


@dataclass(frozen=True)
class RestorationPlan:
    """The levels of one slice, finest first. They run from the last to the first."""

    levels: tuple[Level, ...]

    def tile_steps(self, steps: int) -> int:
        """Return the denoising steps of all tiles of the slice together, for a run that takes `steps` at strength 1."""
        return sum(len(one.tiles) * steps_at(steps, one.strength) for level in self.levels for one in level.passes)


def steps_at(steps: int, strength: float) -> int:
    """Return the number of denoising steps at `strength` if strength 1 takes `steps`; at least one."""
    return steps if strength >= 1 else min(steps, max(1, round(steps * strength)))


def plan_restoration(
    mask_YX: np.ndarray, native: int, batch: int, strength: float = 1.0, multiple: int | None = None
) -> RestorationPlan:
    """Plan the tiles of one slice.

    Args:
        mask_YX: True where to restore.
        native: side of the model's images in voxels.
        batch: most tiles in a call of the model.
        strength: noise level from which a hole is first restored. Below 1 the fill from around it shows through.
        multiple: sides of tiles are multiples of this, so that a thin slice has thin tiles; None for square tiles.
    """
    tile = (native, native)
    if multiple is not None:
        rows, columns = (min(native, -(-side // multiple) * multiple) for side in mask_YX.shape)
        tile = (rows, columns)
    grids, starts = _searched(_grids(mask_YX, native, tile))
    return RestorationPlan(tuple(_level(grid, starts, batch, strength) for grid in grids))


def _grids(mask_YX: np.ndarray, native: int, tile: tuple[int, int]) -> Iterator[Level]:
    """Yield a slice's mask and numbered holes at its own resolution, then at half of it and so on.

    The last level is at most `native` long and wide. A hole has the same number on every level.

    Args:
        mask_YX: True where to restore.
        native: side of the model's images in voxels.
        tile: rows and columns of a tile.
    """
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
        # A voxel can be mostly unknown although none of its own four is masked. It then belongs to a neighbouring hole.
        labels_YX = np.where(labels_YX > 0, labels_YX, ndimage.grey_dilation(labels_YX, size=(3, 3)))
        coarse_mask_YX = (known_YX < 0.5) & (labels_YX > 0)
        labels = np.where(coarse_mask_YX, labels_YX, 0)
        finer = Level(finer.exponent + 1, (rows, columns), native, tile, coarse_mask_YX, labels)
        yield finer


def _searched(grids: Iterator[Level]) -> tuple[list[Level], np.ndarray]:
    """Return the levels that are needed, and by label the level that restores each hole from noise, [labels + 1].

    That is the finest level on which the hole fits, or the last one on which it exists.
    """
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
    """Return a level with its passes: holes that start on it are restored from noise, then the others are refined."""
    labels_K = grid.holes.labels_K
    older_K = labels_K[starts[labels_K] > grid.exponent]
    fresh = grid.holes.only(starts[labels_K] == grid.exponent)
    passes = []
    if len(fresh.labels_K):
        # Holes of other levels are not restored at this resolution yet, so they are hidden from the model too.
        passes.append(TilePass(strength, grid.mask_YX, _tiles_from_noise(grid, fresh), batch))
    if len(older_K):
        # All other voxels are final on this level by now, and serve as context.
        hidden_YX = np.isin(grid.labels_YX, older_K)
        tiles = tuple(_grid_tiles(grid, older_K))
        passes.append(TilePass(min(REFINE_STRENGTH, strength), hidden_YX, tiles, batch))
    return replace(grid, passes=tuple(passes))


def _tiles_from_noise(grid: Level, fresh: _Holes) -> tuple[Tile, ...]:
    """Return a tile around each hole that fits one, shared with the holes near it, and grids over longer holes."""
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
        # The group lies in the tile's middle, as far as the tile stays inside the padded level.
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
    """Return which holes share a tile with the first one, the topmost, boolean [K].

    All have at least `margin` of context in the tile. The first hole lies at the tile's upper margin. Of three
    positions from left to right, the one with the most holes is taken.
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
    """Return the starts of windows of length `native` that cover `length` evenly and overlap by at least `overlap`."""
    if length <= native:
        return (0,)
    count = -(-(length - native) // (native - overlap)) + 1
    return tuple(round(i * (length - native) / (count - 1)) for i in range(count))


def axis_window(start: int, length: int, native: int, overlap: int) -> np.ndarray:
    """Return the blending weights of a window along one axis, float64 [native].

    They are 0 in the outer quarter of the overlap, rise smoothly over its middle half, and are 1 inside. A window that
    ends with the image has no ramp there.
    """
    inward = np.clip((np.arange(native) + 0.5 - overlap / 4) / (overlap / 2), 0.0, 1.0)
    ramp = inward * inward * (3 - 2 * inward)
    window = np.ones(native)
    if start > 0:
        window *= ramp
    if start + native < length:
        window *= ramp[::-1]
    return window


def _grid_tiles(grid: Level, labels_K: np.ndarray) -> Iterator[Tile]:
    """Yield the tiles of an even grid that write at least one voxel of the given labels, row by row."""
    wanted_YX = np.pad(np.where(np.isin(grid.labels_YX, labels_K), grid.labels_YX, 0), grid.padding)
    along = (axis_starts(length, side, grid.overlap) for length, side in zip(grid.padded, grid.tile, strict=True))
    for row, column in product(*along):
        tile = Tile(row, column, (), blend=True)
        here = wanted_YX[grid.box(tile)]
        if (here[grid.weights(tile) > FAINT] > 0).any():
            yield replace(tile, holes=tuple(np.unique(here[here > 0]).tolist()))
