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
    """A window of a slice that the model restores in one call, at one resolution of the slice.

    The slice at that resolution, a level, is padded to at least the size of a tile.
    """

    row: int  # first row of the window in the padded level
    column: int  # first column of the window in the padded level
    holes: tuple[int, ...]  # numbers of the connected holes of the mask that the tile restores
    blend: bool  # True for a tile of a grid, which is blended with its neighbours


@dataclass(frozen=True)
class TilePass:
    """The tiles of a slice that the model restores at one resolution, starting from one noise level."""

    strength: float  # noise level to start from, in (0, 1]; 1 is pure noise
    hidden_YX: np.ndarray  # True for voxels that the model must restore; all others are its context
    tiles: tuple[Tile, ...]  # the tiles, in the order in which they are restored
    batch: int  # most tiles in a call of the model

    @property
    def batches(self) -> tuple[tuple[Tile, ...], ...]:
        """The tiles in order, in groups of at most `batch`, each for one call of the model."""
        return tuple(self.tiles[start : start + self.batch] for start in range(0, len(self.tiles), self.batch))


@dataclass(frozen=True)
class _Holes:
    """The connected holes of a mask at one resolution, as arrays over K holes.

    Arrays are used since a mask of dust has a hundred thousand holes.
    """

    labels_K: np.ndarray  # number of each hole, which it has at all resolutions
    boxes_K4: np.ndarray  # bounding box of each: top, left, bottom and right, in voxels of this resolution

    @cached_property
    def sides_K(self) -> np.ndarray:
        """The longer side of each hole's bounding box, in voxels."""
        return (self.boxes_K4[:, 2:] - self.boxes_K4[:, :2]).max(axis=1, initial=0)

    def only(self, chosen_K: np.ndarray) -> _Holes:
        """Return some of the holes. `chosen_K` has their indices, or a boolean for each hole."""
        return _Holes(self.labels_K[chosen_K], self.boxes_K4[chosen_K])


@dataclass(frozen=True)
class Level:
    """The mask of a slice at one resolution, and the tiles to restore there.

    Exponent 0 is the slice itself; each next level has half as many rows and columns.
    """

    exponent: int  # number of times that the resolution is halved
    shape: tuple[int, int]  # rows and columns of the slice at this resolution
    native: int  # side of the model's own images, of which lengths are fractions
    tile: tuple[int, int]  # rows and columns of a tile
    mask_YX: np.ndarray  # voxels that are mostly unknown
    labels_YX: np.ndarray  # number of the hole that each voxel belongs to, 0 outside the mask
    passes: tuple[TilePass, ...] = ()  # passes of tiles on this level, once they are planned

    @property
    def padded(self) -> tuple[int, int]:
        """The rows and columns of the slice at this resolution, after padding to at least one tile."""
        return (max(self.shape[0], self.tile[0]), max(self.shape[1], self.tile[1]))

    @property
    def offset(self) -> tuple[int, int]:
        """The row and column at which the slice begins in the padded one, in the middle of which it lies."""
        return ((self.padded[0] - self.shape[0]) // 2, (self.padded[1] - self.shape[1]) // 2)

    @property
    def padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows and columns to add around the slice so that it is at least as large as a tile; 0 if it is.

        They are ((above, below), (left, right)), as `numpy.pad` takes them.
        """
        (top, left), (below, right) = self.offset, np.subtract(self.padded, self.shape).tolist()
        return ((top, below - top), (left, right - left))

    @property
    def overlap(self) -> int:
        """The least overlap of neighbouring tiles of a grid, in voxels."""
        return max(4, round(self.native * OVERLAP))

    def box(self, tile: Tile) -> tuple[slice, slice]:
        """Return the rows and columns of a tile, as slices to index the padded image with."""
        return slice(tile.row, tile.row + self.tile[0]), slice(tile.column, tile.column + self.tile[1])

    def weights(self, tile: Tile) -> np.ndarray:
        """Return the weights by which a tile is blended with its neighbours, float64 of its shape.

        They are all 1 for a tile that is not blended.
        """
        if not tile.blend:
            return np.ones(self.tile)
        starts = zip((tile.row, tile.column), self.padded, self.tile, strict=True)
        return np.outer(*(axis_window(start, length, side, self.overlap) for start, length, side in starts))

    @cached_property
    def holes(self) -> _Holes:
        """The connected holes of the mask at this resolution."""
        from scipy import ndimage

        boxes: list[Any] = ndimage.find_objects(self.labels_YX)
        labels_K = np.array([label for label, box in enumerate(boxes, start=1) if box is not None], dtype=np.int64)
        corners = [(box[0].start, box[1].start, box[0].stop, box[1].stop) for box in boxes if box is not None]
        boxes_K4 = np.array(corners, dtype=np.int64).reshape(-1, 4)
        return _Holes(labels_K, boxes_K4)

    @cached_property
    def depth(self) -> np.ndarray:
        """The distance, in voxels, of each hole's innermost voxel from the nearest known one, [labels + 1].

        Index 0 stands for voxels outside all holes; other indices are the holes' numbers.
        """
        from scipy import ndimage

        if self.mask_YX.all():
            depth_YX = np.full(self.shape, float(max(self.shape)))
        else:
            depth_YX = ndimage.distance_transform_edt(np.pad(self.mask_YX, 1, mode="edge"))[1:-1, 1:-1]
        return np.asarray(ndimage.maximum(depth_YX, self.labels_YX, np.arange(self.labels_YX.max() + 1)))


@dataclass(frozen=True)
class RestorationPlan:
    """The plan of the tiles by which one slice is restored, at all resolutions that this takes."""

    levels: tuple[Level, ...]  # a level for each resolution, finest first; they are restored from the last to the first

    def tile_steps(self, steps: int) -> int:
        """Return the number of denoising steps of all the slice's tiles, if strength 1 takes `steps` a tile."""
        return sum(len(one.tiles) * steps_at(steps, one.strength) for level in self.levels for one in level.passes)


def steps_at(steps: int, strength: float) -> int:
    """Return the number of denoising steps from the noise level `strength`, if strength 1 takes `steps`; at least 1."""
    return steps if strength >= 1 else min(steps, max(1, round(steps * strength)))


def plan_restoration(
    mask_YX: np.ndarray, native: int, batch: int, strength: float = 1.0, multiple: int | None = None
) -> RestorationPlan:
    """Return the plan of the tiles by which a model restores one slice, made from the mask alone.

    Args:
        mask_YX: True where to restore
        native: side of the model's images in voxels
        batch: most tiles in a call of the model
        strength: noise level from which a hole is first restored. Below 1 the fill from around it shows through
        multiple: sides of tiles are multiples of this, so that a thin slice has thin tiles; None for square tiles
    """
    tile = (native, native)
    if multiple is not None:
        rows, columns = (min(native, -(-side // multiple) * multiple) for side in mask_YX.shape)
        tile = (rows, columns)
    grids, starts = _searched(_grids(mask_YX, native, tile))
    return RestorationPlan(tuple(_level(grid, starts, batch, strength) for grid in grids))


def _grids(mask_YX: np.ndarray, native: int, tile: tuple[int, int]) -> Iterator[Level]:
    """Yield a slice's mask and numbered holes at its own resolution, then at half of it and so on, without tiles.

    The last level is at most `native` long and wide. A hole has the same number on every level.

    Args:
        mask_YX: True where to restore
        native: side of the model's images in voxels
        tile: rows and columns of a tile
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
    """Return the levels that are needed, and for each hole the exponent of the level that restores it from noise.

    That is the finest level on which the hole fits a tile, or the last one on which it exists. The second result is
    int [labels + 1], indexed by the holes' numbers.

    Args:
        grids: levels from `_grids`, finest first, which are only made as far as they are needed
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
    """Return a level with its passes of tiles: one from noise for holes that start on it, one that refines the others.

    Args:
        grid: the level, without passes
        starts: exponent of the level that restores each hole from noise, indexed by the hole's number
        batch: most tiles in a call of the model
        strength: noise level for holes that start on this level
    """
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
    """Return the tiles of a level that restore holes from noise.

    A hole that fits a tile lies in the middle of one, perhaps with holes near it. Longer holes get the tiles of a grid.

    Args:
        grid: the level
        fresh: the holes
    """
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
    """Choose the holes that get a tile together with the first one, the topmost. Return a boolean for each hole, [K].

    They fit a tile whose upper margin ends at the first hole's top, with at least `margin` of context on each side. Of
    three positions (the first hole in the middle, at the left margin or at the right one) the one with the most holes
    is taken. The caller places the tile.

    Args:
        waiting: holes without a tile, sorted from the top
        grid: the level that they are on
        margin: least number of voxels between a hole and the tile's border
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
    """Return the starts of windows, such as tiles, that cover an axis evenly.

    Args:
        length: voxels of the axis
        native: voxels of a window; if the axis is not longer, there is one window, which starts at 0
        overlap: least number of voxels by which neighbours overlap
    """
    if length <= native:
        return (0,)
    count = -(-(length - native) // (native - overlap)) + 1
    return tuple(round(i * (length - native) / (count - 1)) for i in range(count))


def axis_window(start: int, length: int, native: int, overlap: int) -> np.ndarray:
    """Return the blending weights of a window along one axis, float64 [native].

    They are 0 in the outer quarter of the overlap, rise smoothly over its middle half, and are 1 inside. A window that
    ends with the image has no ramp there.

    Args:
        start: first voxel of the window
        length: voxels of the axis
        native: voxels of the window
        overlap: voxels by which neighbouring windows overlap
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
    """Yield the tiles of an even grid over a level, row by row, that write at least one voxel of some holes.

    Args:
        grid: the level
        labels_K: numbers of these holes
    """
    wanted_YX = np.pad(np.where(np.isin(grid.labels_YX, labels_K), grid.labels_YX, 0), grid.padding)
    along = (axis_starts(length, side, grid.overlap) for length, side in zip(grid.padded, grid.tile, strict=True))
    for row, column in product(*along):
        tile = Tile(row, column, (), blend=True)
        here = wanted_YX[grid.box(tile)]
        if (here[grid.weights(tile) > FAINT] > 0).any():
            yield replace(tile, holes=tuple(np.unique(here[here > 0]).tolist()))
