"""Units of length: as files spell them, and as UDUNITS does; the sides of a voxel in one unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_UNITS = """meter m 1, yottameter Ym 1e24, zettameter Zm 1e21, exameter Em 1e18, petameter Pm 1e15, terameter Tm 1e12,
gigameter Gm 1e9, megameter Mm 1e6, kilometer km 1e3, hectometer hm 1e2, decimeter dm 1e-1, centimeter cm 1e-2,
millimeter mm 1e-3, micrometer µm 1e-6, nanometer nm 1e-9, picometer pm 1e-12, femtometer fm 1e-15, attometer am 1e-18,
zeptometer zm 1e-21, yoctometer ym 1e-24, angstrom Å 1e-10, inch in 0.0254, foot ft 0.3048, yard yd 0.9144"""
# By the names of NGFF: the symbol, as OME-XML has it, and the length in meters.
LENGTHS = {name: (sign, float(size)) for name, sign, size in map(str.split, _UNITS.split(","))}
_SPELLINGS = {
    **{spelling: name for name, (symbol, _) in LENGTHS.items() for spelling in (name, symbol)},
    **{name.replace("meter", "metre"): name for name in LENGTHS},
    **dict.fromkeys(("um", "μm", "\\u00b5m", "micron"), "micrometer"),
    "\u212b": "angstrom",
}
Sides = tuple[tuple[float, float, float] | None, str, list[str]]


def unit_name(text: str) -> str:
    """A unit as UDUNITS spells it ("micrometer" of "µm", "um", "microns"); one that is not known stays as it is."""
    word = text.strip()
    spellings = (word, word.lower(), word.lower().removesuffix("."), word.lower().removesuffix("s"))
    return next((_SPELLINGS[one] for one in spellings if one in _SPELLINGS), word)


def unit_symbol(name: str) -> str:
    """The symbol of a unit that UDUNITS spells so, as OME-XML has it; a unit that is not known stays as it is."""
    return LENGTHS[name][0] if name in LENGTHS else name


def one_unit(sides: Any, units: Sequence[Any]) -> Sides:
    """The sides of a voxel along slices, rows and columns, each in a unit of its own, in the unit of the columns; "" is
    none. Where a side is no number above 0, or infinite, or has a unit that is not in LENGTHS: no sides, no unit, and
    what was given, in words. None of all this where no sides are given."""
    if not sides:
        return None, "", []
    names = [unit_name(str(unit)) for unit in units]
    try:
        meters = [1.0 if {*names} == {""} else LENGTHS[name][1] for name in names]
        z, y, x = (float(side) * (one / meters[-1]) for side, one in zip(sides, meters, strict=True))
        if all(0 < side < math.inf for side in (z, y, x)):
            return (z, y, x), names[-1], []
    except (TypeError, ValueError, KeyError):
        pass
    return None, "", [f"the voxel size {sides!s:.80} in {units!s:.80}"]
