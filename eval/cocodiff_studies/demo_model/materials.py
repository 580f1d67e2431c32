"""Specimens of more kinds than organs: what other beamline users scan. Functions of a view and a generator, each giving
the specimen's grey, float64 [96, 96], before the scanner's marks.

Every specimen is defined by distances to points, fields and outlines in specimen coordinates, so that a zoomed view
shows new detail. Generators of voxel images (PoreSpy's, say) would give it enlarged pixels.
"""

from collections.abc import Callable

import numpy as np
from scipy.spatial import KDTree

from .drawing import Array, View, bezier, ellipse_depth, smooth_step, texture, wobbly_depth

Family = Callable[[View, np.random.Generator], Array]


def pixels_N2(view: View) -> Array:
    """Specimen coordinates of every pixel, [96 * 96, 2]."""
    return np.stack([view.x_HW.ravel(), view.y_HW.ravel()], 1)


def turned(view: View, generator: np.random.Generator, stretch: float) -> tuple[Array, Array]:
    """The view's coordinates turned by a random angle and stretched along the first axis: u and v [96, 96]."""
    angle = generator.uniform(0, np.pi)
    u = np.cos(angle) * view.x_HW + np.sin(angle) * view.y_HW
    v = np.cos(angle) * view.y_HW - np.sin(angle) * view.x_HW
    return u / stretch, v


def cells(points_M2: Array, u_HW: Array, v_HW: Array) -> tuple[Array, Array]:
    """Voronoi cells: the distance of every pixel from its cell's wall, and its cell's number; [96, 96] each."""
    distance_N2, nearest_N2 = KDTree(points_M2).query(np.stack([u_HW.ravel(), v_HW.ravel()], 1), k=2)
    first, second = points_M2[nearest_N2[:, 0]], points_M2[nearest_N2[:, 1]]
    apart_N = np.hypot(*(first - second).T)
    wall_N = (distance_N2[:, 1] ** 2 - distance_N2[:, 0] ** 2) / (2 * apart_N)
    return wall_N.reshape(u_HW.shape), nearest_N2[:, 0].reshape(u_HW.shape)


def jittered_lattice(generator: np.random.Generator, spacing: float, jitter: float, reach: float = 1.6) -> Array:
    """Points of a hexagonal lattice, moved at random by `jitter` spacings; [M, 2]."""
    rows = np.arange(-reach, reach, spacing * 0.866)
    columns = np.arange(-reach, reach, spacing)
    x, y = np.meshgrid(columns, rows)
    x = x + (np.arange(len(rows)) % 2)[:, None] * spacing / 2
    points_M2 = np.stack([x.ravel(), y.ravel()], 1)
    return points_M2 + generator.normal(0, jitter * spacing, points_M2.shape)


def levels(generator: np.random.Generator, count: int, apart: float = 0.15) -> Array:
    """`count` different greys in [0.1, 0.95], in random order, neighbours in value at least `apart` from each other."""
    free = 0.85 - apart * (count - 1)
    steps = np.sort(generator.uniform(0, max(free, 0.05), count)) + apart * np.arange(count)
    return generator.permutation(0.1 + steps * (0.85 / max(0.85, steps[-1])))


def in_the_field(view: View, generator: np.random.Generator, image: Array, background: float, edge: float) -> Array:
    """Half of the specimens end inside the view: a wobbly outline with the background around it."""
    if generator.random() < 0.5:
        return image
    depth = wobbly_depth(view, generator, generator.normal(0, 0.15, 2), generator.uniform(0.5, 1.05, 2), 0.08)
    return background + (image - background) * smooth_step(depth, edge)


def shells(view: View, generator: np.random.Generator) -> Array:
    """Teeth, fossils, shells: a few materials of nearly even grey with sharp and irregular borders, one inside another,
    with cavities and cracks."""
    edge = generator.uniform(0.015, 0.05)
    count = generator.integers(3, 6)
    greys = levels(generator, int(count), 0.1)
    background = greys.min() if generator.random() < 0.8 else greys[0]
    image = np.full_like(view.x_HW, background)
    middle, radii = generator.normal(0, 0.2, 2), generator.uniform(0.3, 1.0) * generator.uniform(0.75, 1.25, 2)
    outer = None
    for grey in greys:
        rough = generator.uniform(0, 0.12) * radii.min()
        depth = wobbly_depth(view, generator, middle, radii, generator.uniform(0.05, 0.3))
        depth = depth + rough * texture(view, generator, generator.uniform(0.1, 0.4))
        outer = depth if outer is None else outer
        inside = np.minimum(depth, outer)
        image += (grey + 0.02 * texture(view, generator, 0.2) - image) * smooth_step(inside, edge)
        middle = middle + generator.uniform(-0.35, 0.35, 2) * radii
        radii = radii * generator.uniform(0.45, 0.85)
    for _ in range(generator.integers(0, 3)):
        size = generator.uniform(0.06, 0.35, 2)
        cavity = wobbly_depth(view, generator, generator.uniform(-0.7, 0.7, 2), size, 0.3)
        image += (background - image) * smooth_step(cavity, edge)
    for _ in range(generator.integers(0, 5)):
        crack = bezier(view, generator, 0.9, generator.uniform(0.003, 0.012))
        image += (background - image) * generator.uniform(0.4, 1) * crack
    return image


def porous(view: View, generator: np.random.Generator) -> Array:
    """Sintered or sedimentary: two or three phases with curved borders at one or two scales."""
    count = generator.integers(2, 4)
    greys = np.sort(levels(generator, int(count)))
    grain = generator.uniform(0.04, 0.22)
    edge = generator.uniform(0.15, 0.5)
    field = texture(view, generator, grain)
    if generator.random() < 0.4:
        field = 0.8 * field + 0.6 * texture(view, generator, grain * generator.uniform(0.3, 0.6))
    image = np.full_like(field, greys[0])
    cuts = np.sort(generator.uniform(-0.9, 0.9, count - 1))
    for cut, grey in zip(cuts, greys[1:], strict=True):
        image += (grey - image) * smooth_step(field - cut, edge)
    return in_the_field(view, generator, image, greys[0], 0.05)


def foam(view: View, generator: np.random.Generator) -> Array:
    """Foams and honeycombs: thin walls around empty cells, thicker where walls meet."""
    spacing = generator.uniform(0.12, 0.5)
    u, v = turned(view, generator, generator.uniform(1, 1.6))
    wall, _ = cells(jittered_lattice(generator, spacing, generator.uniform(0.05, 0.45)), u, v)
    thickness = spacing * generator.uniform(0.04, 0.2) * (1 + 0.2 * texture(view, generator, spacing))
    empty, full = np.sort(levels(generator, 2, 0.35))
    image = empty + (full - empty) * smooth_step(thickness - wall, generator.uniform(0.01, 0.03))
    return in_the_field(view, generator, image, empty, 0.05)


def rock(view: View, generator: np.random.Generator) -> Array:
    """Grains of a few minerals, touching or with pores between them, some cracked."""
    spacing = generator.uniform(0.12, 0.55)
    u, v = turned(view, generator, generator.uniform(1, 1.8))
    warp = spacing * generator.uniform(0, 0.12)
    u, v = u + warp * texture(view, generator, spacing / 2), v + warp * texture(view, generator, spacing / 2)
    points_M2 = jittered_lattice(generator, spacing, generator.uniform(0.2, 0.5))
    wall, number = cells(points_M2, u, v)
    greys = levels(generator, int(generator.integers(2, 5)), 0.08)
    grey_M = greys[generator.integers(0, len(greys), len(points_M2))] + generator.normal(0, 0.015, len(points_M2))
    pore = max(0.03, greys.min() - generator.uniform(0.05, 0.4))
    gap = spacing * generator.uniform(-0.05, 0.15)
    image = pore + (grey_M[number] - pore) * smooth_step(wall - gap, generator.uniform(0.015, 0.04))
    image += generator.uniform(0, 0.03) * texture(view, generator, generator.uniform(0.02, 0.06))
    for _ in range(generator.integers(0, 3)):
        image += (
            (pore - image) * generator.uniform(0.4, 1) * bezier(view, generator, 1, generator.uniform(0.004, 0.012))
        )
    return in_the_field(view, generator, image, pore, 0.05)


def wood(view: View, generator: np.random.Generator) -> Array:
    """Wood and plant stems: rows of cells whose size and walls change from ring to ring, and wider vessels."""
    spacing = generator.uniform(0.09, 0.24)
    u, v = turned(view, generator, generator.uniform(0.8, 1.4))
    bend = generator.uniform(0, 0.3)
    v = v + bend * u**2
    wall, _ = cells(jittered_lattice(generator, spacing, generator.uniform(0.03, 0.15), 2.2), u, v)
    year = np.sin(2 * np.pi * (v / generator.uniform(0.5, 1.4) + generator.random()))
    thickness = spacing * (generator.uniform(0.1, 0.2) + 0.07 * year)
    lumen, solid = np.sort(levels(generator, 2, 0.3))
    image = lumen + (solid - lumen) * smooth_step(thickness - wall, generator.uniform(0.01, 0.03))
    for _ in range(generator.integers(0, 6)):
        size = generator.uniform(0.8, 1.8) * spacing * generator.uniform(0.8, 1.2, 2)
        vessel = ellipse_depth(view, generator.uniform(-1, 1, 2), size, generator.uniform(0, np.pi))
        image += (solid - image) * smooth_step(vessel + 0.3 * spacing, 0.02)
        image += (lumen - image) * smooth_step(vessel, 0.02)
    return in_the_field(view, generator, image, lumen, 0.05)


def bone(view: View, generator: np.random.Generator) -> Array:
    """Trabecular bone: plates and rods of one grey in marrow, within a dense cortex."""
    empty, marrow, solid = np.sort(levels(generator, 3, 0.12))
    spacing = generator.uniform(0.07, 0.2)
    fields = texture(view, generator, spacing), texture(view, generator, spacing * generator.uniform(0.6, 1.2))
    ridge = generator.uniform(0.3, 0.6) - np.abs(fields[0] + 0.3 * fields[1])
    image = marrow + (solid - marrow) * smooth_step(ridge, 0.25)
    depth = wobbly_depth(view, generator, generator.normal(0, 0.2, 2), generator.uniform(0.6, 1.3, 2), 0.1)
    cortex = generator.uniform(0.03, 0.2)
    image += (solid - image) * smooth_step(cortex * (1 + 0.3 * fields[1]) - depth, 0.04)
    for _ in range(generator.integers(0, 12)):
        canal = ellipse_depth(view, generator.uniform(-1, 1, 2), generator.uniform(0.01, 0.04, 2), 0)
        image += (marrow - image) * smooth_step(canal, 0.015)
    return empty + (image - empty) * smooth_step(depth, 0.03)


def fibres(view: View, generator: np.random.Generator) -> Array:
    """Composites and textiles: round or oval fibres, seen end-on or lengthwise, in a matrix with voids."""
    matrix, fibre = levels(generator, 2, 0.15)
    spacing = generator.uniform(0.1, 0.4)
    if generator.random() < 0.5:
        points_M2 = jittered_lattice(generator, spacing, generator.uniform(0.05, 0.25))
        u, v = turned(view, generator, generator.uniform(1, 2.5))
        distance_N, _ = KDTree(points_M2).query(np.stack([u.ravel(), v.ravel()], 1))
        depth = spacing * generator.uniform(0.3, 0.5) - distance_N.reshape(u.shape)
        image = matrix + (fibre - matrix) * smooth_step(depth, 0.025)
    else:
        u, v = turned(view, generator, 1)
        wave = spacing * generator.uniform(0, 0.6) * np.sin(2 * np.pi * (u / generator.uniform(0.5, 2)))
        stripes = np.cos(2 * np.pi * (v + wave) / spacing + 0.4 * texture(view, generator, 0.3))
        image = matrix + (fibre - matrix) * smooth_step(stripes - generator.uniform(-0.5, 0.5), 0.8)
    void = max(0.03, min(matrix, fibre) - generator.uniform(0.1, 0.4))
    for _ in range(generator.integers(0, 5)):
        hole = wobbly_depth(view, generator, generator.uniform(-1, 1, 2), generator.uniform(0.04, 0.25, 2), 0.2)
        image += (void - image) * smooth_step(hole, 0.03)
    return in_the_field(view, generator, image, void, 0.05)


MATERIALS: dict[str, Family] = {
    "shells": shells,
    "porous": porous,
    "foam": foam,
    "rock": rock,
    "wood": wood,
    "bone": bone,
    "fibres": fibres,
}
