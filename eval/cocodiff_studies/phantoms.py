"""Procedural grey slices that look like microtomography: the embedded model's training data, and held-out slices.

Families: *organ* (wobbly outline, laminae, mirrored ventricles and nuclei, midline, capsule, vessels, cells; one
anatomy that varies from slice to slice, as in scans of one kind of specimen), *mineral* (tooth or bone: bright shells
around a darker interior, cavities, cracks, trabeculae, an empty background) and *porous*. All have a scanner's
artefacts: rings, cupping and noise. A seed gives the same pixels every time; seeds in `HELD_OUT_SEEDS` are never used
in training. Every specimen is defined by distances to points, fields and outlines in specimen coordinates, so a zoomed
view shows new detail.

    python -m cocodiff_studies.phantoms --count 20 --out held_out.tif
    python -m cocodiff_studies.phantoms --family mixed --count 20000 --out phantoms
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Array = NDArray[np.float64]
Image = NDArray[np.float32]

SIZE = 96
# Seeds for tests and reports only: training uses `range(n)` with n far below the first of them.
HELD_OUT_SEEDS = range(1_000_000, 1_001_000)
SHARES = {"organ": 0.5, "mineral": 0.35, "porous": 0.15}  # probability of each family in the training mixture
STACK = 80  # slices in a file: from deeper stacks `cocodiff train` takes patches along y and x as well
# The organ's grey, relative to its mean, from the rim (first) to a depth of 0.5 (last).
LAMINAE = np.array([0.02, 0.03, -0.01, 0.0, 0.02, 0.0, -0.02, 0.01, 0.02])
# Mirrored parts of the organ: distance from the midline, height, the two radii, turn (radians), contrast. The first
# pair is the ventricles; any other pair may be absent.
PAIRS = (
    (0.17, 0.04, 0.075, 0.22, -0.5, -0.25),
    (0.44, 0.12, 0.13, 0.19, -0.3, 0.09),
    (0.27, 0.50, 0.16, 0.08, -0.4, -0.08),
    (0.30, -0.40, 0.11, 0.16, 0.9, 0.08),
)


class View:
    """The window through which a slice is seen: the specimen coordinates of every pixel, and the mapping of points to
    pixels.

    At zoom 1 the window is the square [-1, 1]^2; at zoom z it is 1/z as wide, somewhere inside that square.
    """

    def __init__(self, generator: np.random.Generator, zoom: float) -> None:
        reach = 0.75 * (1 - 1 / zoom)
        self.zoom = zoom
        self.centre = generator.uniform(-reach, reach, 2)
        axis = (np.arange(SIZE) + 0.5) * 2 / SIZE - 1
        self.x_HW, self.y_HW = np.meshgrid(self.centre[0] + axis / zoom, self.centre[1] + axis / zoom)

    def splat(self, points_N2: Array, weights_N: Array, width: float) -> Array:
        """Return a picture [SIZE, SIZE] of points, each blurred to a Gaussian. A single point of weight 1 peaks at
        about 1.

        Args:
            points_N2: specimen coordinates x, y of N points.
            weights_N: brightness of each point.
            width: standard deviation of the Gaussian in specimen units.
        """
        pixels_N2 = ((points_N2 - self.centre) * self.zoom + 1) * SIZE / 2 - 0.5
        sigma = max(width * self.zoom * SIZE / 2, 0.5)
        margin = int(3 * sigma) + 1
        side = SIZE + 2 * margin
        corner_N2 = np.floor(pixels_N2).astype(int)
        fraction_N2 = pixels_N2 - corner_N2
        canvas = np.zeros(side * side)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            at_N2 = corner_N2 + np.array([column, row]) + margin
            share_N = np.abs(1 - column - fraction_N2[:, 0]) * np.abs(1 - row - fraction_N2[:, 1])
            inside_N = ((at_N2 >= 0) & (at_N2 < side)).all(1)
            index_N = (at_N2[:, 1] * side + at_N2[:, 0])[inside_N]
            canvas += np.bincount(index_N, (weights_N * share_N)[inside_N], side * side)
        blurred = gaussian_filter(canvas.reshape(side, side), sigma, truncate=3)
        return blurred[margin:-margin, margin:-margin] * (2 * np.pi * sigma**2)


def smooth_step(depth_HW: Array, width: float) -> Array:
    """Return 0 where the depth is negative and 1 where it is positive, with a smooth rise about `width` wide around
    depth 0."""
    return 1 / (1 + np.exp(np.clip(-4 * depth_HW / width, -40, 40)))


def wobbly_depth(view: View, generator: np.random.Generator, centre: Array, radii: Array, wobble: float) -> Array:
    """Return the depth of every pixel below a closed outline with random waves, in specimen units; negative outside.

    Args:
        view: the coordinates of pixels.
        generator: draws the outline's direction and waves.
        centre: the outline's centre x, y in specimen units.
        radii: its two radii.
        wobble: size of the waves, relative to the radii.
    """
    u, v = along_axes(view, centre, radii, generator.uniform(0, np.pi))
    radius, theta = np.hypot(u, v), np.arctan2(v, u)
    outline = np.ones_like(radius)
    for order in range(2, 7):
        outline += wobble / order * generator.normal() * np.cos(order * theta + generator.uniform(0, 2 * np.pi))
    return (outline - radius) * radii.min()


def ellipse_depth(view: View, centre: Array, radii: Array, angle: float) -> Array:
    """Return the depth of every pixel below an ellipse's rim, in specimen units; negative outside.

    Args:
        view: the coordinates of pixels.
        centre: the ellipse's centre x, y in specimen units.
        radii: its two radii.
        angle: its rotation in radians.
    """
    return (1 - np.hypot(*along_axes(view, centre, radii, angle))) * radii.min()


def along_axes(view: View, centre: Array, radii: Array, angle: float) -> tuple[Array, Array]:
    """Return two coordinates of every pixel, along the two axes of a rotated ellipse, in units of its radii.

    Args:
        view: the coordinates of pixels.
        centre: the ellipse's centre x, y in specimen units.
        radii: its two radii.
        angle: its rotation in radians.
    """
    dx, dy = view.x_HW - centre[0], view.y_HW - centre[1]
    u = (np.cos(angle) * dx + np.sin(angle) * dy) / radii[0]
    return u, (np.cos(angle) * dy - np.sin(angle) * dx) / radii[1]


def bezier(view: View, generator: np.random.Generator, reach: float, width: float) -> Array:
    """Return a picture of a random curved line, about 1 on its ridge and 0 away from it.

    Args:
        view: the coordinates of pixels.
        generator: draws the curve's three points.
        reach: largest coordinate of these points, in specimen units.
        width: width of the line in specimen units.
    """
    ends_32 = generator.uniform(-reach, reach, (3, 2))
    t = np.linspace(0, 1, 240)[:, None]
    points_N2 = (1 - t) ** 2 * ends_32[0] + 2 * t * (1 - t) * ends_32[1] + t**2 * ends_32[2]
    step_N = np.hypot(*np.gradient(points_N2, axis=0).T)
    sigma = max(width * view.zoom * SIZE / 2, 0.5) * 2 / (SIZE * view.zoom)
    return np.minimum(view.splat(points_N2, step_N / (sigma * np.sqrt(2 * np.pi)), width), 1)


def texture(view: View, generator: np.random.Generator, width: float) -> Array:
    """Return a smooth random picture [SIZE, SIZE] of unit standard deviation.

    Args:
        view: the coordinates of pixels.
        generator: draws the numbers.
        width: size of its grain in specimen units.
    """
    sigma = width * view.zoom * SIZE / 2
    # A wide grain is made on a small grid and stretched: blurring at full size would take most of the slice's time.
    factor = max(1, int(sigma / 2))
    margin = 3
    side = -(-SIZE // factor) + 2 * margin + 1
    field = gaussian_filter(generator.normal(size=(side, side)), sigma / factor, mode="wrap")
    field /= field.std() + 1e-9
    at = margin + np.arange(SIZE) / factor
    low = at.astype(int)
    part = at - low
    rows = field[low] * (1 - part)[:, None] + field[low + 1] * part[:, None]
    return rows[:, low] * (1 - part) + rows[:, low + 1] * part


def porous(view: View, generator: np.random.Generator) -> Array:
    """Return a random sintered or sedimentary specimen without the scanner's artefacts, [SIZE, SIZE].

    It has two or three phases with curved borders at one or two scales. Half of such specimens are surrounded by
    background.
    """
    count = generator.integers(2, 4)
    greys = np.linspace(generator.uniform(0.1, 0.4), generator.uniform(0.6, 0.95), count)
    grain, edge = generator.uniform(0.04, 0.22), generator.uniform(0.15, 0.5)
    field = texture(view, generator, grain)
    if generator.random() < 0.4:
        field = 0.8 * field + 0.6 * texture(view, generator, grain * generator.uniform(0.3, 0.6))
    image = np.full_like(field, greys[0])
    cuts = np.sort(generator.uniform(-0.9, 0.9, count - 1))
    for cut, grey in zip(cuts, greys[1:], strict=True):
        image += (grey - image) * smooth_step(field - cut, edge)
    if generator.random() < 0.5:
        return image
    depth = wobbly_depth(view, generator, generator.normal(0, 0.15, 2), generator.uniform(0.5, 1.05, 2), 0.08)
    return greys[0] + (image - greys[0]) * smooth_step(depth, 0.05)


def organ(view: View, generator: np.random.Generator) -> Array:
    """Return a random specimen of soft tissue, [SIZE, SIZE]: a mirrored, layered organ in a capsule.

    The scanner's artefacts are not yet in it. All organs share one anatomy (`LAMINAE`, `PAIRS`): sizes, places and
    greys vary around it. So a model that knows the anatomy can guess the inside of a hole from its surroundings.
    """
    tilt = generator.normal(0, 0.15)
    middle = generator.normal(0, 0.05, 2)
    radii = generator.uniform(0.74, 0.9, 2)
    depth = wobbly_depth(view, generator, middle, radii, 0.05)
    inside = smooth_step(depth, 0.1)
    along, across = np.array([-np.sin(tilt), np.cos(tilt)]), np.array([np.cos(tilt), np.sin(tilt)])
    knots = np.linspace(0, 0.5, len(LAMINAE))
    layers = np.interp(depth, knots, generator.uniform(0.7, 1.3) * (LAMINAE + generator.normal(0, 0.015, len(LAMINAE))))
    tissue = generator.uniform(0.52, 0.6) + layers + 0.02 * texture(view, generator, generator.uniform(0.1, 0.18))
    for index, (sideways, height, width, length, angle, contrast) in enumerate(PAIRS):
        if index > 0 and generator.random() < 0.15:
            continue
        place = np.array([sideways, height]) * radii / radii.mean() + generator.normal(0, 0.035, 2)
        size = np.array([width, length]) * generator.uniform(0.8, 1.2, 2)
        turn, strength = angle + generator.normal(0, 0.12), contrast * generator.uniform(0.6, 1.3)
        for side in (-1, 1):
            centre = middle + side * place[0] * across + place[1] * along + generator.normal(0, 0.01, 2)
            nucleus = ellipse_depth(view, centre, size * generator.uniform(0.95, 1.05, 2), tilt + side * turn)
            tissue += strength * smooth_step(nucleus, 0.05 if index == 0 else 0.07)
    sideways_HW, upward_HW = along_axes(view, middle, np.ones(2), tilt)
    bend = generator.normal(0, 0.015) * np.sin(generator.uniform(2, 5) * upward_HW)
    fissure = np.exp(-(((sideways_HW - bend) / generator.uniform(0.018, 0.03)) ** 2))
    tissue -= generator.uniform(0.08, 0.16) * fissure
    for _ in range(generator.integers(0, 3)):
        ridge = bezier(view, generator, 0.85, generator.uniform(0.008, 0.022))
        tissue += generator.uniform(0.06, 0.16) * ridge
    cells_N2 = generator.uniform(-0.9, 0.9, (generator.integers(30, 100), 2))
    tissue += view.splat(cells_N2, generator.uniform(0.03, 0.09, len(cells_N2)), 0.013)
    tissue += generator.uniform(0.1, 0.2) * np.exp(-(((depth - 0.035) / 0.03) ** 2))
    background = generator.uniform(0.38, 0.52)
    return background + (tissue - background) * inside


def mineral(view: View, generator: np.random.Generator) -> Array:
    """Return a random tooth or bone, [SIZE, SIZE], on an empty background, without the scanner's artefacts.

    It has nested smooth shells with sharp rims, cavities, cracks, and sometimes trabeculae.
    """
    middle = generator.normal(0, 0.15, 2)
    radii = generator.uniform(0.45, 0.95) * generator.uniform(0.75, 1.1, 2)
    depth = wobbly_depth(view, generator, middle, radii, 0.08)
    rim = generator.uniform(0.03, 0.09)
    background = generator.uniform(0.12, 0.3)
    bright, dull = generator.uniform(0.65, 0.9), generator.uniform(0.4, 0.65)
    image = background + (bright - background) * smooth_step(depth, rim)
    shell = generator.uniform(0.08, 0.3) * radii.min()
    core = wobbly_depth(view, generator, middle + generator.normal(0, 0.08, 2), radii - shell, 0.1)
    inner = dull + generator.uniform(0, 0.04) * texture(view, generator, 0.15)
    if generator.random() < 0.15:
        grain = texture(view, generator, generator.uniform(0.035, 0.07)) - generator.uniform(-0.4, 0.4)
        inner = background + (bright - background) * smooth_step(grain, 1.0)
    image += (inner - image) * smooth_step(np.minimum(core, depth - 0.3 * shell), rim)
    for _ in range(generator.integers(0, 3)):
        blob = wobbly_depth(view, generator, middle + generator.uniform(-0.3, 0.3, 2) * radii, radii * 0.45, 0.15)
        level = generator.uniform(0.3, 0.95)
        image += (level - image) * smooth_step(np.minimum(blob, depth), rim)
    for _ in range(generator.integers(1, 3)):
        size = generator.uniform(0.15, 0.35, 2) * radii
        cavity = wobbly_depth(view, generator, middle + generator.uniform(-0.5, 0.5, 2) * radii, size, 0.25)
        image += (background - image) * smooth_step(cavity, rim)
    for _ in range(generator.integers(0, 4)):
        crack = bezier(view, generator, 0.8, generator.uniform(0.004, 0.012))
        image += (background - image) * generator.uniform(0.4, 0.9) * crack * smooth_step(depth, rim)
    return image


# Functions that return the grey values of a specimen, float64 [96, 96], without the scanner's artefacts.
FAMILIES: dict[str, Callable[[View, np.random.Generator], Array]] = {
    "organ": organ,
    "mineral": mineral,
    "porous": porous,
}


def scan(view: View, generator: np.random.Generator, specimen: Array) -> Array:
    """Return a specimen as a scanner would show it, with blur, cupping, rings around the rotation axis, and noise.

    Args:
        view: the coordinates of pixels.
        generator: draws the artefacts.
        specimen: grey values [SIZE, SIZE].
    """
    axis = generator.normal(0, 0.03, 2)
    radius = np.hypot(view.x_HW - axis[0], view.y_HW - axis[1])
    # The scanner's point spread, fixed in pixels whatever the zoom.
    image = gaussian_filter(specimen, generator.uniform(0.9, 1.4))
    image *= 1 - generator.uniform(0, 0.18) * (1 - radius**2 / 2)
    rings_R = gaussian_filter(generator.normal(size=160), generator.uniform(0.5, 1.2))
    strength = generator.uniform(0.003, 0.009)
    image += strength * np.interp(radius, np.linspace(0, 3, 160), rings_R / rings_R.std())
    noise = generator.normal(size=(SIZE, SIZE))
    grain = gaussian_filter(noise, 0.7)
    share = generator.uniform(0.3, 0.8)
    return image + generator.uniform(0.003, 0.009) * (share * grain / 0.4 + (1 - share) * noise)


def make_slice(seed: int, zoom: float = 1.0, family: str = "mixed") -> Image:
    """Return one slice, float32 [96, 96], scaled so that its darkest pixel is 0 and its brightest 1. Raise ValueError
    for a zoom below 1 and an unknown family.

    Args:
        seed: the same seed gives the same slice
        zoom: above 1 it shows a part of the specimen that much larger (new detail, not interpolated pixels), as tiles
            of large slices do
        family: one of `FAMILIES`, or "mixed" for the training mixture
    """
    if zoom < 1:
        raise ValueError(f"zoom {zoom}: must be at least 1")
    if family not in ("mixed", *FAMILIES):
        raise ValueError(f"family {family!r}: choose mixed, {' or '.join(FAMILIES)}")
    generator = np.random.default_rng(seed)
    view = View(generator, zoom)
    drawn = np.searchsorted(np.cumsum([*SHARES.values()]), generator.random(), side="right")
    found = [*SHARES][min(int(drawn), len(SHARES) - 1)] if family == "mixed" else family
    image = scan(view, generator, FAMILIES[found](view, generator))
    image -= image.min()
    image /= max(image.max(), 1e-6)
    return image.astype(np.float32)


def training_slice(seed: int) -> Image:
    """Return a slice, float32 [96, 96], of the mixture of families that the embedded model is trained on.

    Two of five are zoomed up to 4 times and have a part of the grey range. They stand for tiles of a large slice, which
    see only some of its greys.
    """
    generator = np.random.default_rng([seed, 1])
    if generator.random() > 0.4:
        return make_slice(seed)
    low, high = generator.uniform(0, 0.35), generator.uniform(0.65, 1)
    return low + (high - low) * make_slice(seed, float(4 ** generator.random()))


def main() -> None:
    """Write synthetic slices as uint16 TIFF, as the command line asks.

    Held-out slices of one family become one stack; slices of the training mixture become a folder of stacks.
    """
    import tifffile

    parser = argparse.ArgumentParser(description="Synthetic slices.")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="TIFF stack; of the mixture a folder of stacks")
    parser.add_argument("--family", default="organ", choices=["mixed", *FAMILIES], help="mixed: to train on")
    arguments = parser.parse_args()
    mixed = arguments.family == "mixed"
    most = HELD_OUT_SEEDS.start if mixed else len(HELD_OUT_SEEDS)
    if not 1 <= arguments.count <= most:
        parser.error(f"--count {arguments.count}: choose 1 to {most}")
    stacks = {arguments.out: HELD_OUT_SEEDS[: arguments.count]}
    if mixed:
        arguments.out.mkdir(parents=True, exist_ok=True)
        starts = range(0, arguments.count, STACK)
        stacks = {arguments.out / f"{n:06}.tif": range(n, min(n + STACK, arguments.count)) for n in starts}
    for path, seeds in stacks.items():
        made = [training_slice(seed) if mixed else make_slice(seed, family=arguments.family) for seed in seeds]
        tifffile.imwrite(path, np.round(np.stack(made) * 65535).astype(np.uint16), photometric="minisblack")
    print(f"{arguments.count} slices in {arguments.out}")


if __name__ == "__main__":
    main()
