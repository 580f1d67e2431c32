"""What makers of generated inputs draw, what is right of a file, the voxels of files, and damage."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Sides = tuple[float, float, float]
Plain = dict[str, Any]
SHAPE = (4, 22, 26)
UNKNOWN: Sides = (0, 0, 0)  # sides of a voxel that a maker does not know
# By spelling the length in meters; None where it is no length.
LENGTHS: dict[str, float | None] = {"nm": 1e-9, "nanometer": 1e-9, "µm": 1e-6, "um": 1e-6, "micron": 1e-6, "mm": 1e-3}
LENGTHS |= {"micrometer": 1e-6, "millimeter": 1e-3, "cm": 1e-2, "m": 1.0, "pm": 1e-12, "Å": 1e-10, "in": 0.0254}
LENGTHS |= {"kilometer": 1e3, "Mm": 1e6, "microns": 1e-6, "angstrom": 1e-10, "picometer": 1e-12, "fm": 1e-15}
LENGTHS |= dict.fromkeys(("pixel", "reference frame", "furlong", "x" * 300, "li", "pt"))
TEXTS = ("a tooth", "Jürgen", "漢字 \U0001f9b7", "a\nb\tc", "<&]]>\"'", "\x01\x7f\x85", "{}", "=", "é" * 9, "x" * 70000)
JUNK: tuple[Any, ...] = (None, "", " ", "x", "ü\n", -1, 0, 1, 2.5, 2**31, 2**63, 10**30, 1e308, float("nan"))
JUNK += (float("inf"), True, [], {}, [1], [[]], {"a": 1}, "x" * 3000, "1:", "\0", "µm", "NaN", "tapa", [None, "x"])
DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
USUAL = ("u1", "u2", "i2", "f4")


@dataclass
class Draw:
    """What a maker writes a file of."""

    folder: Path
    voxels: np.ndarray  # [Y, X] or [N, Y, X]
    chance: random.Random
    odd: bool = False  # with metadata that nobody expects
    stored: bool = False  # in one of the rarer ways of storage
    stem: str = "scan"
    turn: int = 0  # the number of the case among those of its maker
    wrong: bool = False  # what must be refused

    def path(self, suffix: str) -> Path:
        """Return the place of a file; one of another name has a suffix in capitals perhaps."""
        capitals = self.stem != "scan" and suffix != ".h5" and self.maybe(0.3)
        return self.folder / f"{self.stem}{suffix.upper() if capitals else suffix}"

    def pick(self, *choices: Any) -> Any:
        return self.chance.choice(choices)

    def by_turn(self, *choices: Any) -> Any:
        """Choose what is next: all of them come up in as many cases of a maker."""
        return choices[self.turn % len(choices)]

    def maybe(self, share: float) -> bool:
        return self.chance.random() < share

    def sides(self) -> list[float]:
        """Draw a voxel's sides, as far from each other as units are, of any number of digits."""
        return [round(self.chance.uniform(0.1, 9), self.pick(0, 2, 15)) * self.pick(1e-3, 1, 1e4) + 1e-4 for _ in "zyx"]

    def units(self, names: Sequence[str]) -> list[str]:
        """Draw a unit for each axis, or one for all."""
        return [self.pick(*names) for _ in "zyx"] if self.maybe(0.6) else [self.pick(*names)] * 3


@dataclass
class Result:
    """A result: what the check that goes with an input looks at."""

    path: Path
    format: str  # a word of --format
    own: bool  # in the input's format
    stack: Any  # the input as cocodiff opened it, or its region
    mask: np.ndarray  # [N, Y, X], True where voxels were restored
    restored: np.ndarray  # as they were given to the writer
    scale: Any  # the range of intensities
    made: bool  # the mask is none of a file, so what it hides is known


@dataclass
class Given:
    """An input, and what is right of it."""

    path: Path  # as the user names it
    voxels: np.ndarray | None  # as they are stored; None where that is not known
    meters: Sides | None = None  # sides of a voxel; None where the file says none, or no lengths
    plain: bool = False  # the sides have no unit
    kind: str = ""  # what is unusual of it
    wrong: bool = False  # it must be refused
    damaged: bool = False  # it or its mask
    refusals: str = ""  # a pattern of the lines by which it may be refused; "" where it must not be


def in_meters(sides: Sequence[float], units: Sequence[str]) -> Sides | None:
    """Return sides along z, y and x in meters; None where a unit is no length."""
    lengths = [LENGTHS[unit] for unit in units]
    z, y, x = (side * (length or 0) for side, length in zip(sides, lengths, strict=True))
    return (z, y, x) if all(lengths) else None


def mutated(data: Any, chance: random.Random) -> Any:
    """Return plain data in which one value, somewhere, is another, or gone, or there twice."""
    if isinstance(data, dict) and data and chance.random() < 0.85:
        key = chance.choice([*data])
        rest = {name: value for name, value in data.items() if name != key}
        return rest if chance.random() < 0.1 else {**rest, key: mutated(data[key], chance)}
    if isinstance(data, list) and data and chance.random() < 0.8:
        place = chance.randrange(len(data))
        middle = chance.choice([[], [data[place]] * 2, *[[mutated(data[place], chance)]] * 4])
        return [*data[:place], *middle, *data[place + 1 :]]
    return chance.choice(JUNK)


def make_voxels(shape: tuple[int, ...], dtype: np.dtype, chance: random.Random, odd: bool) -> np.ndarray:
    """Make voxels of a type. odd: all the same, one among zeros, the ends of the type, any bits, not finite, tiny."""
    bits = np.random.default_rng(chance.randrange(2**32))
    if dtype.kind in "bc":
        return bits.integers(0, 2, shape).astype(dtype)
    voxels = bits.integers(0, {"u1": 255, "i1": 127, "f2": 2000}.get(dtype.str[1:], 30000), shape).astype(dtype)
    if not odd or not voxels.size:
        return voxels
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    at, some = tuple(chance.randrange(side) for side in shape), [limits.max, limits.min, 0]
    hot = np.full(shape, 7, dtype)
    hot[at] = chance.choice(some)
    choices = [hot, np.full(shape, chance.choice(some), dtype), bits.choice(np.array(some, dtype), shape)]
    choices.append(bits.integers(0, 256, (*shape, dtype.itemsize), dtype="u1").view(dtype)[..., 0])
    choices.append(np.where(bits.random(shape) < 0.99, 0, voxels).astype(dtype))
    if dtype.kind == "f":
        choices.append((voxels * float(np.finfo(dtype).smallest_subnormal)).astype(dtype))
        voxels[at] = chance.choice([np.nan, np.inf, -np.inf])
        choices.append(voxels)
    return chance.choice(choices)


def damage(path: Path, kind: str, chance: random.Random) -> None:
    """Cut a file of an input short, or flip a bit of it."""
    file = chance.choice([path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()))
    data = bytearray(file.read_bytes())
    if kind == "cut":
        del data[chance.choice([chance.randrange(len(data)), len(data) - chance.randint(1, min(64, len(data)))]) :]
    else:
        data[chance.randrange(min(len(data), 600) if chance.random() < 0.7 else len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
