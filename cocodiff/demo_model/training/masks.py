"""Masks for training and measuring the demo model. True or 1 marks pixels to restore."""

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Mask = NDArray[np.bool_]

CELLS = 6


def block_mask(generator: np.random.Generator, size: int = 96) -> Mask:
    """A quarter of the 6 x 6 cells of a square image, drawn at random: bool [size, size]."""
    cells = np.zeros(CELLS * CELLS, bool)
    cells[generator.permutation(CELLS * CELLS)[: CELLS * CELLS // 4]] = True
    side = -(-size // CELLS)
    return cells.reshape(CELLS, CELLS).repeat(side, 0).repeat(side, 1)[:size, :size]


def cells_mask(generator: np.random.Generator, size: int) -> Mask:
    """Cells of any side from an eighth to a half of the image, on a grid of any phase, each hidden by chance: what
    a tile of a large slice sees of its block mask. It may be empty."""
    side = int(generator.integers(size // 8, size // 2 + 1))
    phase = generator.integers(0, side, 2)
    count = size // side + 2
    cells = generator.random((count, count)) < generator.uniform(0.1, 0.35)
    grown = cells.repeat(side, 0).repeat(side, 1)
    return grown[phase[0] : phase[0] + size, phase[1] : phase[1] + size]


def center_mask(size: int = 96) -> Mask:
    """The central half of both sides: bool [size, size]."""
    mask = np.zeros((size, size), bool)
    mask[size // 4 : size - size // 4, size // 4 : size - size // 4] = True
    return mask


def rectangles_mask(generator: np.random.Generator, size: int) -> Mask:
    """One to three rectangles anywhere, edges on any pixel."""
    mask = np.zeros((size, size), bool)
    for _ in range(generator.integers(1, 4)):
        height, width = generator.integers(size // 8, size * 5 // 8, 2)
        top, left = (
            generator.integers(-height // 2, size - height // 2),
            generator.integers(-width // 2, size - width // 2),
        )
        mask[max(top, 0) : top + height, max(left, 0) : left + width] = True
    return mask


def blob_mask(generator: np.random.Generator, size: int) -> Mask:
    """Rounded islands that cover 10-40% of the image."""
    field = gaussian_filter(generator.normal(size=(size, size)), generator.uniform(6, 16))
    return field > np.quantile(field, generator.uniform(0.6, 0.9))


def half_plane_mask(generator: np.random.Generator, size: int) -> Mask:
    """One side of a straight line, or the strip between two: a big hole's border, or a crack, as a tile sees it."""
    angle = generator.uniform(0, 2 * np.pi) if generator.random() < 0.5 else generator.integers(4) * np.pi / 2
    axis = (np.arange(size) + 0.5) / size - 0.5
    distance = np.cos(angle) * axis[None, :] + np.sin(angle) * axis[:, None] + generator.uniform(-0.25, 0.25)
    return distance > 0 if generator.random() < 0.5 else np.abs(distance) < generator.uniform(0.04, 0.25)


def training_mask(generator: np.random.Generator, size: int = 96) -> Mask:
    """A mask of random kind, never empty: 36% block, 15% other cells, 29% center (some shifted), the rest irregular.

    bool [size, size]."""
    kind = generator.random()
    if kind < 0.36:
        mask = block_mask(generator, size)
    elif kind < 0.51:
        mask = cells_mask(generator, size)
    elif kind < 0.75:
        mask = center_mask(size)
    elif kind < 0.80:
        mask = np.roll(center_mask(size), tuple(generator.integers(-size // 4, size // 4 + 1, 2)), (0, 1))
    elif kind < 0.86:
        mask = rectangles_mask(generator, size)
    elif kind < 0.93:
        mask = blob_mask(generator, size)
    else:
        mask = half_plane_mask(generator, size)
    return mask if 0 < mask.mean() < 0.9 else center_mask(size)
