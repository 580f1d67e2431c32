"""Procedural grey slices that look like microtomography: the demo model's training data and its held-out test set.

Families: *organ* (wobbly outline, laminae, mirrored ventricles and nuclei, midline, capsule, vessels, cells; one
anatomy that varies from slice to slice, as in scans of one kind of specimen), *mineral* (tooth or bone: bright shells
around a darker interior, cavities, cracks, trabeculae, an empty background) and the materials of `materials.py`. All
get the scanner's own marks: ring artefacts, cupping and noise. A seed gives the same pixels
every time; seeds from `HELD_OUT_SEEDS` are never used in training.

    python -m cocodiff_studies.demo_model.slices --count 20 --out held_out.tif [--png DIR]
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from .drawing import SIZE, Array, View, bezier, ellipse_depth, smooth_step, texture, wobbly_depth
from .materials import MATERIALS

Image = NDArray[np.float32]

HELD_OUT_SEEDS = range(1_000_000, 1_001_000)
"""Seeds kept for tests and reports. Training uses `range(n)` with n far below the first of them."""
SHARES = {
    "organ": 0.45,
    "mineral": 0.15,
    "shells": 0.14,
    "porous": 0.05,
    "foam": 0.04,
    "rock": 0.05,
    "wood": 0.04,
    "bone": 0.05,
    "fibres": 0.03,
}
"""How often each family is drawn in the training mixture."""
LAMINAE = np.array([0.02, 0.03, -0.01, 0.0, 0.02, 0.0, -0.02, 0.01, 0.02])
"""The organ's grey, relative to its mean, from the rim (first) to a depth of 0.5 (last)."""
PAIRS = (
    (0.17, 0.04, 0.075, 0.22, -0.5, -0.25),
    (0.44, 0.12, 0.13, 0.19, -0.3, 0.09),
    (0.27, 0.50, 0.16, 0.08, -0.4, -0.08),
    (0.30, -0.40, 0.11, 0.16, 0.9, 0.08),
)
"""Mirrored parts of the organ: distance from the midline, height, the two radii, turn (radians), contrast. The first
are the ventricles; any other pair may be absent."""


def organ(view: View, generator: np.random.Generator) -> Array:
    """Soft tissue: a mirrored, layered organ in a capsule, before the scanner's artefacts.

    All organs share one anatomy (`LAMINAE`, `PAIRS`): sizes, places and greys vary around it. So what lies deep inside
    a hole can be guessed from what is seen around it, by who knows the anatomy.
    """
    tilt = generator.normal(0, 0.15)
    middle = generator.normal(0, 0.05, 2)
    radii = generator.uniform(0.74, 0.9, 2)
    depth = wobbly_depth(view, generator, middle, radii, 0.05)
    inside = smooth_step(depth, 0.1)
    along = np.array([-np.sin(tilt), np.cos(tilt)])
    across = np.array([np.cos(tilt), np.sin(tilt)])
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
    sideways_HW = (view.x_HW - middle[0]) * across[0] + (view.y_HW - middle[1]) * across[1]
    upward_HW = (view.x_HW - middle[0]) * along[0] + (view.y_HW - middle[1]) * along[1]
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
    """Tooth or bone: nested smooth shells with sharp rims, cavities, cracks, maybe trabeculae, on an empty
    background."""
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


FAMILIES = {"organ": organ, "mineral": mineral, **MATERIALS}


def scan(view: View, generator: np.random.Generator, specimen: Array) -> Array:
    """Adds the marks of a scanner: cupping, rings around the rotation axis, grainy and white noise."""
    axis = generator.normal(0, 0.03, 2)
    radius = np.hypot(view.x_HW - axis[0], view.y_HW - axis[1])
    # The scanner's point spread, fixed in pixels whatever the zoom.
    image = gaussian_filter(specimen, generator.uniform(0.9, 1.4)) * (
        1 - generator.uniform(0, 0.18) * (1 - radius**2 / 2)
    )
    rings_R = gaussian_filter(generator.normal(size=160), generator.uniform(0.5, 1.2))
    strength = generator.uniform(0.003, 0.009)
    image += strength * np.interp(radius, np.linspace(0, 3, 160), rings_R / rings_R.std())
    noise = generator.normal(size=(SIZE, SIZE))
    grain = gaussian_filter(noise, 0.7)
    share = generator.uniform(0.3, 0.8)
    return image + generator.uniform(0.003, 0.009) * (share * grain / 0.4 + (1 - share) * noise)


def family_of(seed: int) -> str:
    """The family that a seed draws in the training mixture, at zoom 1 and above."""
    generator = np.random.default_rng(seed)
    View(generator, 1.0)
    return _drawn(generator.random())


def _drawn(uniform: float) -> str:
    bounds = np.cumsum(list(SHARES.values()))
    return list(SHARES)[min(int(np.searchsorted(bounds, uniform, side="right")), len(SHARES) - 1)]


def make_slice(seed: int, zoom: float = 1.0, family: str = "mixed") -> Image:
    """One slice, float32 [96, 96], stretched so that its darkest pixel is 0 and its brightest 1.

    `zoom` > 1 shows a part of the specimen that much larger (new detail, not interpolated pixels), as tiles of big
    slices do. `family` is one of `FAMILIES`, or "mixed" for the training mixture.
    """
    if zoom < 1:
        raise ValueError(f"zoom {zoom}: must be at least 1")
    if family not in ("mixed", *FAMILIES):
        raise ValueError(f"family {family!r}: choose mixed, {' or '.join(FAMILIES)}")
    generator = np.random.default_rng(seed)
    view = View(generator, zoom)
    drawn = _drawn(generator.random())
    image = scan(view, generator, FAMILIES[drawn if family == "mixed" else family](view, generator))
    image -= image.min()
    image /= max(image.max(), 1e-6)
    return image.astype(np.float32)


def main() -> None:
    """Write held-out slices as one uint16 TIFF stack and, if asked, as 8-bit PNGs."""
    parser = argparse.ArgumentParser(description="Held-out synthetic slices.")
    parser.add_argument("--count", type=int, default=20, help=f"how many, at most {len(HELD_OUT_SEEDS)}")
    parser.add_argument("--out", type=Path, required=True, help="TIFF stack to write (uint16)")
    parser.add_argument("--family", default="organ", choices=sorted(FAMILIES), help="kind of specimen")
    parser.add_argument("--png", type=Path, help="folder for one 8-bit PNG per slice")
    arguments = parser.parse_args()
    if not 1 <= arguments.count <= len(HELD_OUT_SEEDS):
        parser.error(f"--count {arguments.count}: choose 1 to {len(HELD_OUT_SEEDS)}")
    import tifffile
    from PIL import Image as PngImage

    stack_NHW = np.stack([make_slice(seed, family=arguments.family) for seed in HELD_OUT_SEEDS[: arguments.count]])
    tifffile.imwrite(arguments.out, np.round(stack_NHW * 65535).astype(np.uint16), photometric="minisblack")
    if arguments.png:
        arguments.png.mkdir(parents=True, exist_ok=True)
        for index, image in enumerate(stack_NHW):
            PngImage.fromarray(np.round(image * 255).astype(np.uint8)).save(arguments.png / f"slice_{index:03d}.png")
    print(f"{arguments.count} slices in {arguments.out}")


if __name__ == "__main__":
    main()
