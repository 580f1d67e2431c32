"""Units of length: as files spell them, and as UDUNITS does."""

from __future__ import annotations

SYMBOLS = {
    "angstrom": "Å",
    "nanometer": "nm",
    "micrometer": "µm",
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "inch": "in",
}
_OTHERS = {
    "um": "micrometer",
    "μm": "micrometer",
    "\\u00b5m": "micrometer",
    "micron": "micrometer",
    "cm.": "centimeter",
}


def unit_name(text: str) -> str:
    """A unit as UDUNITS spells it ("micrometer" of "µm", "um", "microns"); one that is not known stays as it is."""
    word = text.strip()
    for name, symbol in SYMBOLS.items():
        if word in (name, symbol, f"{name}s", name.replace("meter", "metre")):
            return name
    return _OTHERS.get(word.lower(), _OTHERS.get(word.lower().removesuffix("s"), word))


def unit_symbol(name: str) -> str:
    """The symbol of a unit that UDUNITS spells so, as OME-XML has it; a unit that is not known stays as it is."""
    return SYMBOLS.get(name, name)
