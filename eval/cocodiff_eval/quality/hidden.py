"""Hidden regions: parts of a mask laid once more over voxels whose truth is known, so that a restoration can be judged
on the user's own volume.

A volume [Z, Y, X] may have any size: regions are chosen on a coarse grid of at most 128 cells a side. A test has four
rounds, each with regions of its own. In those that slices are restored for by the model, regions stand in a lattice, so
that few slices along each axis cross many of them. In the others, where methods without a model are judged alone, which
takes little time, they lie anywhere, and there are as many as hide what the mask does. Places are preferred whose
surroundings look like those of the mask: in empty space every method is good, and would be thought good within the
object.
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

COARSE = 128  # cells of a side
REGIONS, ENOUGH = 24, 2
ROUNDS = 4
LATTICES, WANTED = 2, 12  # rounds with tested slices at most, and regions after which there is no second one
SCATTERED, VOXELS, SHARE = 400, 4000, 0.15  # regions of another round at most; voxels at least, but of the known cells
APART = 2  # cells between such regions
PATIENCE, PLACES = 99, 4  # such regions without a place before there are no more; places that each is tried at
UNPAID = 96  # slices along an axis that nothing is restored along: more voxels are judged at no cost
PLACED = 0.5  # of the mask's cells: if larger parts find no place, the small ones stand for less than that
TRIES = 16
REPEATED = 0.1  # of the worth of a cell that no earlier round has hidden
MOST = 0.25  # of the known cells are hidden: more would leave less to restore from than the job has
SPANNING = 0.9  # of a side: a part of the mask so long has no other place along that axis
FREE = 0.85  # of a region's cells that have to be known, and not to touch the mask
WINDOW, RING = 5, 3  # cells: of the mean of levels, and around a region
LIKENESS, LEAST_ALIKE = 2.0, 0.02  # how fast unlike surroundings count less, and when they do not count at all
Box = tuple[Triple, Triple]  # start and shape


class Piece(NamedTuple):
    """A box of the mask that is hidden at another place as well: where it begins there and here, [z, y, x]."""

    source: Triple
    target: Triple
    shape: Triple


@dataclass(frozen=True)
class Hidden:
    """Regions that are hidden in a round.

    tested: for each axis the numbers of the slices along it that the model restores, ascending; empty in rounds of
    methods without a model. cut: whether regions are smaller than the parts of the mask that they are of, which makes
    the test too kind.
    """

    pieces: tuple[Piece, ...]
    tested: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cut: bool = False

    @cached_property
    def _ends_N2(self) -> tuple[np.ndarray, np.ndarray]:
        """The first voxel of each piece, and the first beyond it, [N, 3] each."""
        start_N3, side_N3 = (np.array([one[part] for one in self.pieces]).reshape(-1, 3) for part in (1, 2))
        return start_N3, start_N3 + side_N3

    def numbers(self, points_P3: np.ndarray) -> np.ndarray:
        """Return the number of the region that each voxel is in, int [P]."""
        found_P = np.zeros(len(points_P3), int)
        for number, (first_3, end_3) in enumerate(zip(*self._ends_N2, strict=True)):
            found_P[((points_P3 >= first_3) & (points_P3 < end_3)).all(axis=1)] = number
        return found_P

    def mask(self, axis: str, index: int, read: Reader) -> np.ndarray:
        """What is hidden besides the mask in slice `index` along an axis, boolean of the slice's shape.

        read: a slice of the mask along the same axis. A voxel of the mask itself is never hidden a second time.
        """
        own, first = read(index), AXES.index(axis)
        found = np.zeros_like(own)
        start_N3, end_N3 = self._ends_N2
        for number in np.flatnonzero((start_N3[:, first] <= index) & (index < end_N3[:, first])).tolist():
            piece = self.pieces[number]
            source, target, shape = (np.delete(one, first).tolist() for one in piece)
            found[_box(target, shape)] |= read(piece.source[first] + index - piece.target[first])[_box(source, shape)]
        return found & ~own


def _box(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + side) for at, side in zip(start, shape, strict=True))


@dataclass(frozen=True)
class Survey:
    """A volume on a coarse grid [Z, Y, X]. masked_ZYX: which cells hold masked voxels; level_ZYX, texture_ZYX: mean and
    standard deviation of the known voxels in 5 x 5 x 5 cells; step: sides of a cell in voxels; shape: of the volume."""

    masked_ZYX: np.ndarray
    level_ZYX: np.ndarray
    texture_ZYX: np.ndarray
    step: Triple
    shape: Triple

    @classmethod
    def of(cls, read: Reader, read_mask: Reader, shape: Triple) -> Survey:
        """Reads the volume once. read, read_mask: a slice along z of the volume, and of the mask."""
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
        """Of the known cells around a region that hides some cells of its box: mean level, its standard deviation and
        mean texture, in standard deviations of all known levels; NaN where none is known."""
        shape = hidden_ZYX.shape
        box = tuple(slice(max(0, at - RING), at + side + RING) for at, side in zip(start, shape, strict=True))
        known_ZYX = ~self.masked_ZYX[box]
        known_ZYX[_box([at - part.start for at, part in zip(start, box, strict=True)], shape)] &= ~hidden_ZYX
        level, texture = self.level_ZYX[box][known_ZYX], self.texture_ZYX[box][known_ZYX]
        found = [level.mean(), level.std(), texture.mean()] if level.size else [np.nan] * 3
        return np.array(found) / self._unit

    def likeness(self, wanted: np.ndarray, start: Sequence[int], hidden_ZYX: np.ndarray) -> float:
        """Return how much the surroundings of a region look as `wanted`, see `look`, 0 to 1."""
        distance = float(np.abs(wanted - self.look(start, hidden_ZYX)).sum())
        return float(np.exp(-LIKENESS * distance)) if np.isfinite(distance) else 1.0

    @cached_property
    def _unit(self) -> float:
        known = self.level_ZYX[~self.masked_ZYX]
        return max(float(known.std()), 1e-12) if known.size else 1.0

    @cached_property
    def near_ZYX(self) -> np.ndarray:
        """The cells that are masked or touch one that is."""
        from scipy import ndimage

        return np.asarray(ndimage.binary_dilation(self.masked_ZYX))


def hide_beside(
    image_YX: np.ndarray, mask_YX: np.ndarray, seed: int, allowed: Callable[[np.ndarray], bool]
) -> np.ndarray:
    """Which known voxels of a slice are hidden besides its mask, boolean [Y, X]: regions as of the first round of
    `hide`, as many as are `allowed`, which is asked of the mask with them; none where no region finds a place."""
    found_YX = np.zeros_like(mask_YX)
    survey = Survey.of(lambda _: image_YX, lambda _: mask_YX, (1, mask_YX.shape[0], mask_YX.shape[1]))
    for piece in (piece for one in hide(survey, 1, seed, (), rounds=1) for piece in one.pieces):
        more_YX = found_YX | Hidden((piece,), {}).mask("z", 0, lambda _: mask_YX)
        found_YX = more_YX if allowed(mask_YX | more_YX) else found_YX
    return found_YX


def hide(
    survey: Survey, slices: int, seed: int, along: Sequence[str] = AXES, rounds: int = ROUNDS
) -> tuple[Hidden, ...]:
    """Choose the rounds of a test: nothing where nothing can be hidden.

    Regions are connected parts of the mask, drawn by their size; where those that find a place are fewer than two, or
    less than half of the mask, all are cut to halves, quarters or eighths of the volume's sides, but never along a side
    that they span. The first rounds, two where one has fewer than 12 regions, have up to 24 in a lattice: of 16 random
    ones that which hides most known cells which no earlier round has hidden, each counted by how much the surroundings
    of its region look like those of the part of the mask that it is. They share `slices` tested slices along each axis
    of `along`, those that slices are restored along. The others, up to `rounds`, have regions anywhere.
    """
    rng = np.random.default_rng(seed % 2**64)  # as torch takes a negative one
    best: list[list[Piece]] = []
    of_best: tuple[Sequence[Box], np.ndarray] = (), np.zeros(0)
    uncut: set[Box] = set()
    for part in (1, 2, 4, 8):
        boxes, weights = _parts(survey.masked_ZYX, [max(1, -(-side // part)) for side in survey.masked_ZYX.shape])
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
    tested = [_tested(pieces, counts, rng) for pieces in fine[:lattices]]
    return (
        *(Hidden(*one, cut) for one in zip(fine, tested, strict=False)),
        *(Hidden(pieces, {}, cut) for pieces in fine[lattices:] if pieces),
    )


def _rounds(
    survey: Survey, boxes: Sequence[Box], weights: np.ndarray, rng: np.random.Generator, most: int
) -> list[list[Piece]]:
    """Up to so many lattices."""
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
    """The mask's connected parts as boxes in cells, at most so long a side; and of each the share of masked cells."""
    from scipy import ndimage

    labels_ZYX, _ = ndimage.label(coarse_ZYX)
    boxes, sizes = [], []
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
    """A random lattice of regions in cells, and what it is worth. new_ZYX: cells that no earlier round has hidden."""
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
    """Return regions in cells that hide as much as the mask does, or 4,000 voxels, each at the place of four random
    ones whose surroundings look most like those of the part of the mask that it is."""
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
    """Return where a region with this middle begins along an axis; its own place where it has no other.

    It is no nearer to the border than the part of the mask that it is of, for beyond the last known voxel any method is
    worse; where that part touches the border, so does the region.
    """
    margin, last = min(own, whole - own - side, RING), whole - side
    if side >= SPANNING * whole or last < 2 * margin:
        return own
    if margin == 0:
        return last * (middle > whole / 2)
    return int(np.clip(round(middle - side / 2), margin, last - margin))


def _apart(start: Sequence[int], sides: Sequence[int], other: Piece) -> bool:
    """Whether a box has a cell between it and another region's."""
    ends = zip(start, sides, other.target, other.shape, strict=True)
    return any(at >= begin + length + 1 or at + side + 1 <= begin for at, side, begin, length in ends)


def _scaled(piece: Piece, step: Triple, shape: Triple) -> Piece:
    """A region of cells in voxels, within the volume."""
    source, target, sides = ([cells * by for cells, by in zip(one, step, strict=True)] for one in piece)
    ends = zip(sides, source, target, shape, strict=True)
    sides = [min(side, whole - begin, whole - at) for side, begin, at, whole in ends]
    return Piece((source[0], source[1], source[2]), (target[0], target[1], target[2]), (sides[0], sides[1], sides[2]))


def _tested(pieces: Sequence[Piece], slices: Mapping[str, int], rng: np.random.Generator) -> dict[str, tuple[int, ...]]:
    """So many slices along each axis, evenly from a random one on, the same number through each stretch of regions."""
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
