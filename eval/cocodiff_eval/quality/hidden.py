"""Hidden regions: copies of parts of the mask over voxels whose truth is known, to judge restorations of any volume.

A volume [Z, Y, X] may have any size, since regions are chosen on a coarse grid of at most 128 cells a side. A test has
four rounds, each with regions of its own.

In the first rounds slices are restored by the model. Regions stand in a lattice there, so that few slices along each
axis cross many of them. In the other rounds only methods without a model are judged, which takes little time. Their
regions lie anywhere, and hide as many voxels as the mask does.

Places are preferred whose surroundings look like those of the mask. In empty space every method is good, and would
wrongly be taken for good within the object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from cocodiff_eval.data.reoriented import AXES
from cocodiff_eval.data.volume import Reader, Triple
from cocodiff_eval.quality.fusing import FEWEST_HIDDEN

COARSE = 128  # most cells along a side of the grid
REGIONS, ENOUGH = 24, 2  # most regions in a lattice, and least regions in all lattices, else the mask's parts are cut
ROUNDS = 4
LATTICES, WANTED = 2, 12  # most rounds with a lattice; number of regions that makes a second lattice unnecessary
# For a round without a lattice: the most regions, the least number of hidden voxels, and the largest share of known
# cells that are hidden.
SCATTERED, VOXELS, SHARE = 400, 4000, 0.15
APART = 2  # least cells between such regions
PATIENCE, PLACES = 99, 4  # failures to place such a region before no more are tried; places tried for each
UNPAID = 96  # tested slices along an axis that the model does not restore along, which costs nothing
PLACED = 0.5  # least share of the mask's cells whose parts find a place; else the parts are cut
TRIES = 16  # random lattices, of which the best is taken
REPEATED = 0.1  # worth of a cell that an earlier round has hidden, relative to a new one
MOST = 0.25  # largest share of known cells that are hidden, so that enough is left to restore from
SPANNING = 0.9  # share of a side: a part of the mask that is longer stays at its place along that axis
FREE = 0.85  # least share of a region's cells that are known and do not touch the mask
WINDOW, RING = 5, 3  # cells: side of the window for level and texture, and width of the surroundings of a region
LIKENESS, LEAST_ALIKE = 2.0, 0.02  # rate at which likeness falls with distance, and the least one that is accepted
Box = tuple[Triple, Triple]  # start and shape


class Piece(NamedTuple):
    """A hidden region: known voxels, in the form of a part of the mask, that a test hides to measure errors there.

    The part of the mask lies in a box. In a box of the same shape at another place, the same voxels are hidden.
    """

    source: Triple  # first voxel [z, y, x] of the box in the mask
    target: Triple  # first voxel [z, y, x] of the box at the other place
    shape: Triple  # sides of both boxes


@dataclass(frozen=True)
class Hidden:
    """The hidden regions of one round of a test: known voxels that are masked too, to measure errors of restorations.

    `tested` has for each axis the numbers of the tested slices along it, ascending. It is empty in rounds that only
    test methods without a model. The model restores only those along the axes that the job restores slices along.
    """

    pieces: tuple[Piece, ...]  # the regions
    # For each axis the numbers of the tested slices along it, ascending; empty in rounds of methods without a model.
    # The model restores only those along the axes that the job restores slices along.
    tested: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cut: bool = False  # True if regions are smaller than the mask's parts, so that errors are underestimated

    @cached_property
    def _ends_N2(self) -> tuple[np.ndarray, np.ndarray]:
        """The first voxel of the box of each of N hidden regions, and the voxel beyond its last one, [N, 3] each."""
        start_N3, side_N3 = (np.array([one[part] for one in self.pieces]).reshape(-1, 3) for part in (1, 2))
        return start_N3, start_N3 + side_N3

    def numbers(self, points_P3: np.ndarray) -> np.ndarray:
        """Return the number of the hidden region that each voxel is in, int [P].

        Args:
            points_P3: indices [z, y, x] of P voxels.
        """
        found_P = np.zeros(len(points_P3), int)
        for number, (first_3, end_3) in enumerate(zip(*self._ends_N2, strict=True)):
            found_P[((points_P3 >= first_3) & (points_P3 < end_3)).all(axis=1)] = number
        return found_P

    def mask(self, axis: str, index: int, read: Reader) -> np.ndarray:
        """Return the voxels that are hidden in a slice along an axis, boolean of the slice's shape.

        Voxels of the mask itself are not among them.

        Args:
            axis: "z", "y" or "x".
            index: the slice.
            read: function that returns the mask's slice with an index along the same axis.
        """
        own, first = read(index), AXES.index(axis)
        found = np.zeros_like(own)
        start_N3, end_N3 = self._ends_N2
        for number in np.flatnonzero((start_N3[:, first] <= index) & (index < end_N3[:, first])).tolist():
            piece = self.pieces[number]
            source, target, shape = (np.delete(one, first).tolist() for one in piece)
            found[_box(target, shape)] |= read(piece.source[first] + index - piece.target[first])[_box(source, shape)]
        return found & ~own

    def mask_in(self, window: tuple[slice, ...], read: Callable[[tuple[slice, ...]], np.ndarray]) -> np.ndarray:
        """Return the voxels that are hidden in a box of the volume, boolean [Z, Y, X], as `mask` does for a slice.

        Args:
            window: the slices, rows and columns of the box.
            read: function that returns the mask in such a box.
        """
        own, (start_N3, end_N3) = read(window), self._ends_N2
        found, low = np.zeros_like(own), [part.start for part in window]
        first_N3, last_N3 = np.maximum(start_N3, low), np.minimum(end_N3, [part.stop for part in window])
        for number in np.flatnonzero((first_N3 < last_N3).all(axis=1)).tolist():
            first, piece, shape = first_N3[number], self.pieces[number], (last_N3 - first_N3)[number].tolist()
            source = (first - piece.target + piece.source).tolist()
            found[_box((first - low).tolist(), shape)] |= read(_box(source, shape))
        return found & ~own


def _box(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return a box of an array as a slice of indices for each axis, to index the array with.

    Args:
        start: index of the box's first element along each axis.
        shape: sides of the box.
    """
    return tuple(slice(at, at + side) for at, side in zip(start, shape, strict=True))


@dataclass(frozen=True)
class Survey:
    """A volume's mask and appearance on a coarse grid [Z, Y, X], by which places for hidden regions are chosen."""

    masked_ZYX: np.ndarray  # True for cells that hold masked voxels
    level_ZYX: np.ndarray  # mean of the known voxels in the 5 x 5 x 5 cells around each
    texture_ZYX: np.ndarray  # standard deviation of these known voxels
    step: Triple  # sides of a cell in voxels
    shape: Triple  # [Z, Y, X] of the volume in voxels

    @classmethod
    def of(cls, read: Reader, read_mask: Reader, shape: Triple) -> Survey:
        """Return the survey of a volume, which is read once.

        Args:
            read: gives a slice of the volume along z.
            read_mask: gives a slice of the mask along z.
            shape: [Z, Y, X] of the volume.
        """
        from scipy import ndimage

        step = (-(-shape[0] // COARSE), -(-shape[1] // COARSE), -(-shape[2] // COARSE))
        starts = [np.arange(0, side, by) for side, by in zip(shape, step, strict=True)]
        sums = np.zeros((4, *map(len, starts)))  # masked voxels, known ones, their values and squares
        for index in range(shape[0]):
            hidden_YX = read_mask(index)
            image_YX = np.where(hidden_YX, 0.0, read(index))
            parts = np.stack([hidden_YX, ~hidden_YX, image_YX, np.square(image_YX)])
            sums[:, index // step[0]] += np.add.reduceat(np.add.reduceat(parts, starts[1], axis=1), starts[2], axis=2)
        count, total, squares = (ndimage.uniform_filter(one, WINDOW) for one in sums[1:])
        count = np.maximum(count, 1e-12)
        level_ZYX = total / count
        texture_ZYX = np.sqrt(np.maximum(squares / count - np.square(level_ZYX), 0.0))
        return cls(sums[0] > 0, level_ZYX, texture_ZYX, step, shape)

    def look(self, start: Sequence[int], hidden_ZYX: np.ndarray) -> np.ndarray:
        """Return three numbers on what the surroundings of a region look like, to find similar places; float [3].

        They are the mean and the standard deviation of the levels of the known cells around the region, and the mean
        texture. The unit is the standard deviation of all known levels. They are NaN if no cell around is known.

        Args:
            start: where the region's box begins, in cells.
            hidden_ZYX: the cells that the region hides within its box.
        """
        shape = hidden_ZYX.shape
        box = tuple(slice(max(0, at - RING), at + side + RING) for at, side in zip(start, shape, strict=True))
        known_ZYX = ~self.masked_ZYX[box]
        known_ZYX[_box([at - part.start for at, part in zip(start, box, strict=True)], shape)] &= ~hidden_ZYX
        level, texture = self.level_ZYX[box][known_ZYX], self.texture_ZYX[box][known_ZYX]
        count = level.size or np.nan
        mean = np.add.reduce(level) / count  # with the bits of np.mean and np.std, in half their time
        spread = np.sqrt(np.add.reduce(np.square(level - mean)) / count)
        return np.array([mean, spread, np.add.reduce(texture) / count]) / self._unit

    def likeness(self, wanted: np.ndarray, start: Sequence[int], hidden_ZYX: np.ndarray) -> float:
        """Return the likeness of a region's surroundings to a wanted look, from 0 to 1.

        Args:
            wanted: the wanted look, as `look` returns it.
            start: where the region's box begins, in cells.
            hidden_ZYX: the cells that the region hides within its box.
        """
        distance = float(np.abs(wanted - self.look(start, hidden_ZYX)).sum())
        return float(np.exp(-LIKENESS * distance)) if np.isfinite(distance) else 1.0

    @cached_property
    def _unit(self) -> float:
        """The standard deviation of the levels of all known cells, the unit of `look`."""
        known = self.level_ZYX[~self.masked_ZYX]
        return max(float(known.std()), 1e-12) if known.size else 1.0

    @cached_property
    def near_ZYX(self) -> np.ndarray:
        """The cells that are masked or touch a masked one, boolean."""
        from scipy import ndimage

        return np.asarray(ndimage.binary_dilation(self.masked_ZYX))


def hide_beside(
    image_YX: np.ndarray, mask_YX: np.ndarray, seed: int, allowed: Callable[[np.ndarray], bool]
) -> np.ndarray:
    """Choose known voxels of a slice to hide besides its mask, so that errors can be measured there; boolean [Y, X].

    None are hidden if no region finds a place. The regions are those of the first round of `hide`, which stand in a
    lattice. Where the mask's parts are so small that these hide too few voxels for intervals, regions lie anywhere. A
    region is left out if `allowed` refuses the mask with it.

    Args:
        image_YX: the slice.
        mask_YX: its mask.
        seed: seed of the random choices.
        allowed: function of the mask with the regions so far, boolean [Y, X], that returns True if it may be restored.
    """
    found_YX = np.zeros_like(mask_YX)
    survey = Survey.of(lambda _: image_YX, lambda _: mask_YX, (1, mask_YX.shape[0], mask_YX.shape[1]))
    for one in hide(survey, 1, seed, (), rounds=2):
        of_round_YX = np.zeros_like(mask_YX)
        for piece in one.pieces if found_YX.sum() < FEWEST_HIDDEN else ():
            more_YX = of_round_YX | Hidden((piece,), {}).mask("z", 0, lambda _: mask_YX)
            of_round_YX = more_YX if allowed(mask_YX | more_YX) else of_round_YX
        found_YX = max(found_YX, of_round_YX, key=np.sum)
    return found_YX


def hide(
    survey: Survey, slices: int, seed: int, along: Sequence[str] = AXES, rounds: int = ROUNDS
) -> tuple[Hidden, ...]:
    """Choose the known voxels of a volume that a test hides in each of its rounds, to measure errors of restorations.

    Return one `Hidden` a round; none if nothing can be hidden. Regions are connected parts of the mask, chosen at
    random by their size. If fewer than two find a place, or parts of less than half of the mask, they are cut. Parts
    are then at most a half, a quarter or an eighth of the volume's sides. Along a side that they span they are never
    cut.

    The first rounds have up to 24 regions in a lattice, and there are two such rounds if one has fewer than 12 regions.
    Of 16 random lattices the one that hides the most known cells is taken. A cell counts more if no earlier round has
    hidden it. It also counts more if the surroundings of its region look like those of its part of the mask. The other
    rounds have regions anywhere.

    Args:
        survey: the volume's mask and appearance on a coarse grid.
        slices: number of tested slices along each axis of `along`, in all lattices together.
        seed: seed of the random choices.
        along: the axes that slices are restored along.
        rounds: number of rounds.
    """
    rng = np.random.default_rng(seed % 2**64)  # as torch takes a negative one
    best: list[list[Piece]] = []
    of_best: tuple[Sequence[Box], np.ndarray] = (), np.zeros(0)
    uncut: set[Box] = set()
    for part in (1, 2, 4, 8):
        boxes, weights = _parts(survey.masked_ZYX, [max(1, -(-side // part)) for side in survey.masked_ZYX.shape])
        others = [number for number, (_, sides) in enumerate(boxes) if sides[1:] != survey.masked_ZYX.shape[1:]]
        if tuple(along) == ("z",) and others:  # slices that are masked wholly are left as they are
            boxes, weights = [boxes[number] for number in others], weights[others] / weights[others].sum()
        uncut = uncut or {*boxes}
        found = _rounds(survey, boxes, weights, rng, min(rounds, slices, LATTICES)) if boxes else []
        if sum(map(len, found)) > sum(map(len, best)):
            best, of_best = found, (boxes, weights)
        placed = {(piece.source, piece.shape) for some in found for piece in some}
        share = sum(weight for box, weight in zip(boxes, weights, strict=True) if box in placed)
        if sum(map(len, best)) >= ENOUGH and share >= PLACED:
            break
    lattices = len(best)
    best = best + [_scattered(survey, *of_best, rng) for _ in range(rounds - lattices if best else 0)]
    cut = any((piece.source, piece.shape) not in uncut for pieces in best for piece in pieces)
    fine = [tuple(_scaled(piece, survey.step, survey.shape) for piece in pieces) for pieces in best]
    counts = {axis: max(1, slices // lattices) if axis in along else UNPAID for axis in AXES} if fine else {}
    tested = [_tested(pieces, counts, rng) if number < lattices else {} for number, pieces in enumerate(fine)]
    return tuple(Hidden(*one, cut) for one in zip(fine, tested, strict=True) if one[0])


def _rounds(
    survey: Survey, boxes: Sequence[Box], weights: np.ndarray, rng: np.random.Generator, most: int
) -> list[list[Piece]]:
    """Choose the hidden regions of the first rounds of a test, which stand in a lattice. Return a list for each round.

    Regions are in cells of the survey's grid.

    Args:
        survey: the volume's mask and appearance on a coarse grid.
        boxes: the mask's parts.
        weights: probability of each part.
        rng: draws the lattices.
        most: most rounds.
    """
    new_ZYX, rounds = ~survey.masked_ZYX, []
    for _ in range(most):
        tries = [_lattice(survey, boxes, weights, new_ZYX, rng) for _ in range(TRIES)]
        worth, pieces = max(tries, key=lambda one: one[0])
        if not worth:
            break
        rounds.append(pieces)
        for piece in pieces:
            new_ZYX[_box(piece.target, piece.shape)] = False
        if sum(map(len, rounds)) >= WANTED:
            break
    return rounds


def _parts(coarse_ZYX: np.ndarray, most: Sequence[int]) -> tuple[list[Box], np.ndarray]:
    """Return the connected parts of a mask, as boxes (start, shape) in cells, and the share of masked cells in each.

    Planes that are masked wholly are parts of their own, so that gaps which cross each other find other places.

    Args:
        coarse_ZYX: True for masked cells.
        most: longest side along each axis; longer parts are cut.
    """
    from scipy import ndimage

    slabs = [coarse_ZYX & coarse_ZYX.all(axis=axes, keepdims=True) for axes in ((1, 2), (0, 2), (0, 1))]
    boxes, sizes = [], []
    for part_ZYX in (*slabs, coarse_ZYX & ~np.any(slabs, axis=0)):
        labels_ZYX, _ = ndimage.label(part_ZYX)
        for number, found in enumerate(ndimage.find_objects(labels_ZYX), start=1):
            stretches = []
            for part, limit, whole in zip(found, most, coarse_ZYX.shape, strict=True):
                side = part.stop - part.start
                count = 1 if side >= SPANNING * whole else -(-side // limit)
                stretches.append(pairwise([round(part.start + n * side / count) for n in range(count + 1)]))
            for (z, z_end), (y, y_end), (x, x_end) in product(*stretches):
                start, sides = (z, y, x), (z_end - z, y_end - y, x_end - x)
                size = int((labels_ZYX[_box(start, sides)] == number).sum())
                if size:
                    boxes.append((start, sides))
                    sizes.append(size)
    return boxes, np.array(sizes, dtype=np.float64) / max(1, sum(sizes))


def _lattice(
    survey: Survey, boxes: Sequence[Box], weights: np.ndarray, new_ZYX: np.ndarray, rng: np.random.Generator
) -> tuple[float, list[Piece]]:
    """Return (worth, regions) of a random lattice of hidden regions. The worth grows with the useful cells hidden.

    Regions are in cells of the survey's grid. Cells count more if no earlier round has hidden them, and if the
    surroundings look like those of the mask's part.

    Args:
        survey: the volume's mask and appearance on a coarse grid.
        boxes: the mask's parts, as (start, shape) in cells.
        weights: probability of each part.
        new_ZYX: True for cells that no earlier round has hidden.
        rng: draws the lattice.
    """
    masked_ZYX, shape = survey.masked_ZYX, survey.masked_ZYX.shape
    mean_3 = weights @ np.array([sides for _, sides in boxes], dtype=np.float64)
    many_3 = np.clip(np.array(shape) // (1.5 * mean_3), 1, 4).astype(int)
    counts = np.where(mean_3 >= SPANNING * np.array(shape), 1, many_3).tolist()
    places = [(np.arange(n) + rng.uniform(0, 1)) * side / n for n, side in zip(counts, shape, strict=True)]
    corners = [*product(*(range(n) for n in counts))]
    pieces: list[Piece] = []
    worth, free, most = 0.0, 0, MOST * int((~masked_ZYX).sum())
    for corner in (corners[n] for n in rng.permutation(len(corners))[:REGIONS]):
        source, sides = boxes[rng.choice(len(boxes), p=weights)]
        middle = [place[at] for place, at in zip(places, corner, strict=True)]
        start = [_start(*one) for one in zip(middle, source, sides, shape, strict=True)]
        hidden_ZYX = masked_ZYX[_box(source, sides)]
        free_ZYX = hidden_ZYX & ~survey.near_ZYX[_box(start, sides)]
        known = int(free_ZYX.sum())
        fits = known >= FREE * hidden_ZYX.sum() and (not pieces or free + known <= most)
        if fits and all(_apart(start, sides, other) for other in pieces):
            alike = survey.likeness(survey.look(source, hidden_ZYX), start, hidden_ZYX)
            if alike < LEAST_ALIKE:
                continue
            pieces.append(Piece(source, (start[0], start[1], start[2]), sides))
            new = int((free_ZYX & new_ZYX[_box(start, sides)]).sum())
            worth += (REPEATED * known + new) * alike
            free += known
    return worth, pieces


def _scattered(survey: Survey, boxes: Sequence[Box], weights: np.ndarray, rng: np.random.Generator) -> list[Piece]:
    """Return regions to hide anywhere in the volume, in cells of the survey's grid.

    Regions are placed until they hide as many cells as the mask, or 4,000 voxels if that is more, or 15 % of the known
    cells if that is less. Each has the form of a part of the mask. Of four random places it takes the one whose
    surroundings look most like that part's. Fewer are returned if too many places are unfit.

    Args:
        survey: the volume's mask and appearance on a coarse grid.
        boxes: the mask's parts.
        weights: probability of each part.
        rng: draws parts and places.
    """
    from scipy.ndimage import binary_dilation

    masked_ZYX, shape, known = survey.masked_ZYX, survey.masked_ZYX.shape, int((~survey.masked_ZYX).sum())
    wanted = min(max(int(masked_ZYX.sum()), VOXELS / np.prod(survey.step)), SHARE * known)
    taken_ZYX, pieces, hidden, failed = survey.near_ZYX.copy(), list[Piece](), 0, 0
    while hidden < wanted and failed < PATIENCE and len(pieces) < SCATTERED:
        source, sides = boxes[rng.choice(len(boxes), p=weights)]
        part_ZYX, found = masked_ZYX[_box(source, sides)], list[tuple[float, list[int]]]()
        size, wanted_3 = int(part_ZYX.sum()), survey.look(source, part_ZYX)
        for _ in range(PLACES * (hidden + size <= MOST * known or not pieces)):
            middles = [rng.uniform(side / 2, whole - side / 2) for side, whole in zip(sides, shape, strict=True)]
            start = [_start(*one) for one in zip(middles, source, sides, shape, strict=True)]
            if (part_ZYX & ~taken_ZYX[_box(start, sides)]).sum() >= FREE * size:
                found.append((survey.likeness(wanted_3, start, part_ZYX), start))
        alike, (z, y, x) = max(found, default=(0.0, [0, 0, 0]))
        if alike < LEAST_ALIKE:
            failed += 1
            continue
        around = tuple(slice(max(0, at - APART), at + side + APART) for at, side in zip((z, y, x), sides, strict=True))
        own_ZYX = np.zeros(taken_ZYX[around].shape, bool)
        own_ZYX[_box([at - part.start for at, part in zip((z, y, x), around, strict=True)], sides)] = part_ZYX
        taken_ZYX[around] |= binary_dilation(own_ZYX, iterations=APART)
        pieces.append(Piece(source, (z, y, x), sides))
        hidden += size
    return pieces


def _start(middle: float, own: int, side: int, whole: int) -> int:
    """Return the index, in cells, at which a hidden region begins along one axis: near a wanted place.

    The region has the form of a part of the mask. It stays at least as many cells from both borders as the part does
    from the nearer one, or RING cells if that is less. For beyond the last known voxel any method is worse. If the part
    touches a border, the region lies at the border nearer to `middle`. If the part spans the axis (SPANNING), the
    region begins where the part does.

    Args:
        middle: the wanted middle of the region.
        own: where the part of the mask begins.
        side: length of the part, and so of the region.
        whole: length of the axis.
    """
    margin, last = min(own, whole - own - side, RING), whole - side
    if side >= SPANNING * whole:
        return own
    if margin == 0:
        return last * (middle > whole / 2)
    return min(max(round(middle - side / 2), margin), last - margin)


def _apart(start: Sequence[int], sides: Sequence[int], other: Piece) -> bool:
    """Return True if a box has at least one cell between it and a hidden region.

    Args:
        start: where the box begins, in cells.
        sides: its sides.
        other: the region.
    """
    ends = zip(start, sides, other.target, other.shape, strict=True)
    return any(at >= begin + length + 1 or at + side + 1 <= begin for at, side, begin, length in ends)


def _scaled(piece: Piece, step: Triple, shape: Triple) -> Piece:
    """Return a hidden region in voxels for one in cells of the survey's grid, cut to the volume.

    Args:
        piece: the region in cells.
        step: sides of a cell in voxels.
        shape: [Z, Y, X] of the volume in voxels.
    """
    source, target, sides = ([cells * by for cells, by in zip(one, step, strict=True)] for one in piece)
    ends = zip(sides, source, target, shape, strict=True)
    sides = [min(side, whole - begin, whole - at) for side, begin, at, whole in ends]
    return Piece((source[0], source[1], source[2]), (target[0], target[1], target[2]), (sides[0], sides[1], sides[2]))


def _tested(pieces: Sequence[Piece], slices: Mapping[str, int], rng: np.random.Generator) -> dict[str, tuple[int, ...]]:
    """Choose the slices along each axis that a test restores, so that they cross the hidden regions.

    Return the slices' numbers, ascending, by axis. They are evenly spaced from a random one on. Each stretch of slices
    that regions cover has the same number of them.

    Args:
        pieces: the hidden regions, in voxels.
        slices: number of slices along each axis.
        rng: draws the choice.
    """
    tested = {}
    for number, axis in enumerate(AXES):
        stretches: list[tuple[int, int]] = []
        ends = {(piece.target[number], piece.target[number] + piece.shape[number]) for piece in pieces}
        for begin, end in sorted(ends):
            if stretches and begin < stretches[-1][1]:
                stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
            else:
                stretches.append((begin, end))
        chosen: set[int] = set()
        stretches = [stretches[n] for n in rng.permutation(len(stretches))[: slices[axis]]]
        for begin, end in stretches:
            count = min(max(1, slices[axis] // len(stretches)), end - begin)
            phase = rng.uniform(0, 1)
            chosen |= {begin + int((n + phase) * (end - begin) / count) for n in range(count)}
        tested[axis] = tuple(sorted(chosen))
    return tested
