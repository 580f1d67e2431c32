"""What specimens are drawn with: the view they are seen through, and outlines, lines and textures in it."""

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Array = NDArray[np.float64]

SIZE = 96


class View:
    """The window a slice is seen through: specimen coordinates of every pixel, and the way back from points to pixels.

    At zoom 1 the window is the square [-1, 1]^2; at zoom z it is 1/z as wide, somewhere inside that square.
    """

    def __init__(self, generator: np.random.Generator, zoom: float) -> None:
        reach = 0.75 * (1 - 1 / zoom)
        self.zoom = zoom
        self.centre = generator.uniform(-reach, reach, 2)
        axis = (np.arange(SIZE) + 0.5) * 2 / SIZE - 1
        self.x_HW, self.y_HW = np.meshgrid(self.centre[0] + axis / zoom, self.centre[1] + axis / zoom)

    def splat(self, points_N2: Array, weights_N: Array, width: float) -> Array:
        """Points blurred to a Gaussian of `width` (specimen units); a lone point of weight 1 peaks at about 1."""
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
    """0 outside, 1 inside, rising over about `width` around depth 0."""
    return 1 / (1 + np.exp(np.clip(-4 * depth_HW / width, -40, 40)))


def wobbly_depth(view: View, generator: np.random.Generator, centre: Array, radii: Array, wobble: float) -> Array:
    """Depth below a closed wobbly outline, in specimen units (negative outside)."""
    angle = generator.uniform(0, np.pi)
    dx, dy = view.x_HW - centre[0], view.y_HW - centre[1]
    u = (np.cos(angle) * dx + np.sin(angle) * dy) / radii[0]
    v = (np.cos(angle) * dy - np.sin(angle) * dx) / radii[1]
    radius, theta = np.hypot(u, v), np.arctan2(v, u)
    outline = np.ones_like(radius)
    for order in range(2, 7):
        outline += wobble / order * generator.normal() * np.cos(order * theta + generator.uniform(0, 2 * np.pi))
    return (outline - radius) * radii.min()


def ellipse_depth(view: View, centre: Array, radii: Array, angle: float) -> Array:
    """Depth below an ellipse's rim, in specimen units (negative outside)."""
    dx, dy = view.x_HW - centre[0], view.y_HW - centre[1]
    u = (np.cos(angle) * dx + np.sin(angle) * dy) / radii[0]
    v = (np.cos(angle) * dy - np.sin(angle) * dx) / radii[1]
    return (1 - np.hypot(u, v)) * radii.min()


def bezier(view: View, generator: np.random.Generator, reach: float, width: float) -> Array:
    """A curved line of the given width (specimen units), about 1 on its ridge."""
    ends_32 = generator.uniform(-reach, reach, (3, 2))
    t = np.linspace(0, 1, 240)[:, None]
    points_N2 = (1 - t) ** 2 * ends_32[0] + 2 * t * (1 - t) * ends_32[1] + t**2 * ends_32[2]
    step_N = np.hypot(*np.gradient(points_N2, axis=0).T)
    sigma = max(width * view.zoom * SIZE / 2, 0.5) * 2 / (SIZE * view.zoom)
    return np.minimum(view.splat(points_N2, step_N / (sigma * np.sqrt(2 * np.pi)), width), 1)


def texture(view: View, generator: np.random.Generator, width: float) -> Array:
    """Smooth random field of unit standard deviation; `width` is its grain in specimen units."""
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
