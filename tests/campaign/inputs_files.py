"""What the campaign of inputs has in common: what makers draw, what is right of a file, the voxels of files and what
they declare of them, and damage."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
# Names by which a line may tell of a declared value, and of axes.
WORDS = "_FillValue|missing|fill.?value|valid_|_Unsigned"
AXES = "axes|axis|dimension|time|channel"
# Names of dimensions, whose first is depth, and whose first is not or whose order is another.
ORDERS = (("z", "y", "x"), ("depth", "lat", "lon"), ("Z", "Y", "X"), ("slice", "row", "column"))
NO_DEPTH = (("time", "y", "x"), ("t", "y", "x"), ("channel", "y", "x"), ("c", "y", "x"), ("x", "y", "z"))


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

    def dimensions(self) -> tuple[tuple[str, ...], bool]:
        """Draw names of three dimensions. True with those that must be refused."""
        wrong = self.maybe(0.2)
        return self.pick(*(NO_DEPTH if wrong else ORDERS)), wrong


@dataclass
class Result:
    """A result: what the check that goes with an input looks at."""

    path: Path
    format: str  # a word of --format
    own: bool  # in the input's format
    stack: Any  # the input as cocodiff opened it, or its region
    mask: np.ndarray  # [N, Y, X], True where voxels were restored
    said: str  # all lines that the user saw
    restored: np.ndarray  # as they were given to the writer
    scale: Any  # the range of intensities

    @property
    def start(self) -> tuple[int, ...]:
        """The first voxel of the region in the input."""
        return self.stack.region.start if self.stack.region is not None else (0, 0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stack.shape)

    @property
    def region(self) -> tuple[slice, ...]:
        """The part of the input that the result holds."""
        return tuple(slice(first, first + side) for first, side in zip(self.start, self.shape, strict=True))

    def told(self, pattern: str) -> bool:
        """Return True if a line that the user saw has one of these words, and does not say that this very result keeps
        what it names."""
        kept = (": " if any(self.start) else "") + "results of its own format alone keep"
        lines = [line for line in self.said.splitlines() if not (self.own and kept in line)]
        return re.search(pattern, "\n".join(lines), re.IGNORECASE) is not None


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
    meant: np.ndarray | None = None  # voxels as the file means them, unscaled; None: as they are stored
    missing: np.ndarray | None = None  # True where the file declares a voxel to be missing
    decode: Callable[[Path], np.ndarray] | None = None  # reads it, or a result, as xarray does
    # Each returns what is wrong with a result besides its voxels, "" where nothing is.
    checks: list[Callable[[Result], str]] = field(default_factory=list)

    def refuse(self, pattern: str, wrong: bool = True) -> None:
        """Note that it must be refused if it is wrong, in a line with one of these words."""
        if wrong:
            self.wrong, self.refusals = True, pattern


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
    at = tuple(chance.randrange(side) for side in shape)
    some: list[Any] = [limits.max, limits.min, 0]
    how = chance.choice(["constant", "hot", "full", "ends", "sparse"] + (["bad", "tiny"] if dtype.kind == "f" else []))
    if how == "constant":
        voxels[...] = chance.choice(some)
    elif how == "hot":
        voxels[...], voxels[at] = 7, chance.choice(some)
    elif how == "full":
        voxels = bits.integers(0, 256, (*shape, dtype.itemsize), dtype="u1").view(dtype)[..., 0]
    elif how == "ends":
        voxels = bits.choice(np.array(some, dtype), shape)
    elif how == "sparse":
        voxels[bits.random(shape) < 0.99] = 0
    elif how == "bad":
        voxels[at] = chance.choice([np.nan, np.inf, -np.inf])
    else:
        voxels = (voxels * float(limits.smallest_subnormal)).astype(dtype)  # type: ignore[union-attr]
    return voxels


@dataclass
class Declared:
    """Voxels, and what the attributes say of them."""

    stored: np.ndarray
    attributes: Plain
    missing: np.ndarray  # True where a voxel is declared to be missing
    meant: np.ndarray  # as the file means them, unscaled
    kind: str

    def given(self, path: Path, decode: Callable[[Path], np.ndarray] | None = None) -> Given:
        refusals = WORDS if self.missing.any() or "_Unsigned" in self.attributes else ""
        more = {"meant": self.meant, "missing": self.missing, "decode": decode}
        return Given(path, self.stored, kind=self.kind, refusals=refusals, **more)


KINDS = ("_FillValue", "missing_value", "several", "valid_range", "valid_max", "scale", "unsigned", "both", "middle")


def declare(draw: Draw, kinds: tuple[str, ...] = KINDS) -> Declared:
    """Make a file's voxels and attributes. Real voxels have 20 to 120, or 1000 to 3000 in types of 16 bits and more."""
    kind = draw.pick(*kinds)
    names = ("i1", "i2") if kind == "unsigned" else ("u1", "u2", "i2", "i4", "f4", "f8", "i8")
    dtype = np.dtype(draw.pick(*names))
    byte, number = dtype.itemsize == 1, dtype.type
    spread = np.random.default_rng(draw.chance.randrange(2**32)).integers(1, 250, SHAPE) / 250
    stored = np.rint(20 + 100 * spread if byte else 1000 + 2000 * spread).astype(dtype)
    where = draw.pick("inside", "nowhere") if kind == "middle" else draw.pick(*["outside"] * 2, "inside", "", "both")
    place = np.zeros(SHAPE, bool)
    if kind != "scale":
        place[:, :, :6] = where in ("outside", "both")
        place[1:3, 9:12, 10:13] = where in ("inside", "both")
    top: Any = number(np.iinfo(dtype).max if dtype.kind in "ui" else -9999.0)
    bottom: Any = number(top if dtype.kind == "u" else np.iinfo(dtype).min if dtype.kind == "i" else 1e20)
    high: Any = number((125 if dtype == "i1" else 130) if byte else 3100)
    middle = number(70 if byte else 2000)  # among the real ones, so that a restored voxel could come to be it
    values, attributes = {
        "_FillValue": ([top], {"_FillValue": top}),
        "missing_value": ([top], {"missing_value": draw.pick(top, np.array([top], dtype), float(top))}),
        "several": ([top, 7], {"missing_value": np.array([top, 7], dtype)}),
        "valid_range": ([high + number(2)], {"valid_range": np.array([10, high], dtype)}),
        "valid_max": ([high + number(2)], {"valid_max": high}),
        "both": ([top, bottom], {"_FillValue": top, "missing_value": bottom}),
        "middle": ([middle], {"_FillValue": middle}),
        "scale": ([0], {}),
        "unsigned": ([-1], {"_FillValue": number(-1 if kind == "unsigned" else 0), "_Unsigned": "true"}),
    }[kind]
    if kind == "middle":
        stored[stored == middle] += number(1)
    stored[place], stored[place & (np.arange(SHAPE[-1]) % 2 == 0)] = values[0], values[-1]
    meant = stored
    if kind == "unsigned":
        above = np.where(np.random.default_rng(7).random(SHAPE) < 0.5, 127 if byte else 40000, 0)
        meant = stored.view(f"u{dtype.itemsize}")
        meant = np.where(place, meant, meant + above).astype(meant.dtype)
        stored, place = meant.view(dtype), meant == np.iinfo(meant.dtype).max
    if (dtype.itemsize < 8 and dtype.kind in "ui" and draw.maybe(0.5)) or kind == "scale":
        attributes["scale_factor"] = draw.pick(0.5, 0.001, -2.0)
        attributes |= {"add_offset": draw.pick(-100.0, 273.15)} if draw.maybe(0.7) else {}
    return Declared(stored, attributes, place, meant, f"{kind} {where} {dtype}")


def damage(path: Path, kind: str, chance: random.Random) -> None:
    """Cut a file of an input short, flip a bit of it, or put something else into its place."""
    file = chance.choice([path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()))
    data = bytearray(file.read_bytes())
    if kind == "cut":
        del data[chance.choice([chance.randrange(len(data)), len(data) - chance.randint(1, min(64, len(data)))]) :]
    elif kind == "flip":
        data[chance.randrange(min(len(data), 600) if chance.random() < 0.7 else len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    if kind == "gone":
        file.unlink()
        instead = chance.choice(["nothing", "empty", "folder", "pipe", "link", "text", "whole"])
        if instead == "whole" and path.is_dir():
            shutil.rmtree(path)
        elif instead == "folder":
            file.mkdir()
        elif instead == "pipe":
            os.mkfifo(file)
        elif instead == "link":
            file.symlink_to("nowhere")
        elif instead in ("empty", "text"):
            file.write_bytes(b"" if instead == "empty" else b"no image\n" * 9)


def same(one: Any, other: Any) -> bool:
    """Return True where values are the same, whatever the types; NaN is itself."""
    return bool(np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind in "fc"))
