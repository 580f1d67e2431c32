"""The rows of `metrics.json` as the report groups them: the slices of a stack under a mask, single slices under one
mask, or generated images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cocodiff.text_table import spans
from cocodiff_eval.table import base_name

LONGEST_LIST = 12  # ranges of slices that are written out


@dataclass
class Series:
    """Slices or images that share a slider. rows: those of each slice or image, by its number in the series.

    stack   its name, or None for single slices and generated images, which `names` names
    all     the numbers of the stack's slices, those without masked voxels included
    inputs  what `inputs` of metrics.json says of the stack, or of the single slices
    """

    stack: str | None
    mask: str | None
    all: range = range(0)
    names: list[str] = field(default_factory=list)
    rows: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    inputs: list[Mapping[str, Any]] = field(default_factory=list)

    def number(self, name: str) -> int:
        """The number in the series of the slice or image of that name."""
        return slice_index(name) if self.stack is not None else self.names.index(name)

    @property
    def left(self) -> list[int]:
        """The slices of the stack that are masked wholly, and were not restored."""
        return [number for one in self.inputs for number in one["wholly_masked"]] if self.stack is not None else []

    @property
    def modes(self) -> list[str]:
        """The presets, and biharmonic where there is such a baseline."""
        modes = dict.fromkeys(row["mode"] for rows in self.rows.values() for row in rows)
        baseline = any(row.get("baseline") is not None for rows in self.rows.values() for row in rows)
        return [*modes, "biharmonic"] if baseline else [*modes]


def slice_index(name: str) -> int:
    """12 of `scan[12]`, 0 of `scan`."""
    found = re.search(r"\[(\d+)\]$", name)
    return int(found[1]) if found else 0


def key_of(name: str, mask: str | None, of_stacks: Mapping[str, range]) -> tuple[str | None, str | None]:
    """Stack and mask of the series that a slice belongs to. of_stacks: the numbers of the slices of each stack."""
    base = base_name(name)
    return (base if mask is not None and (base != name or len(of_stacks.get(name, ())) > 1) else None), mask


def series_of(
    rows: Sequence[Mapping[str, Any]], of_stacks: Mapping[str, range], inputs: Sequence[Mapping[str, Any]] = ()
) -> dict[tuple[str | None, str | None], Series]:
    """All series of a run in the order of `rows`. of_stacks: the numbers of the slices of each stack; inputs: of
    metrics.json."""
    found: dict[tuple[str | None, str | None], Series] = {}
    for row in rows:
        key = key_of(row["name"], row["mask"], of_stacks)
        series = found.setdefault(key, Series(*key))
        if series.stack is None and (not series.names or series.names[-1] != row["name"]):
            series.names.append(row["name"])
        number = slice_index(row["name"]) if series.stack is not None else len(series.names) - 1
        series.rows.setdefault(number, []).append(row)
    for series in found.values():
        known = of_stacks.get(series.stack or "", range(len(series.names)))
        series.all = range(min(known.start, *series.rows), max(known.stop, 1 + max(series.rows)))
        named = {series.stack} if series.stack is not None else {*series.names}
        series.inputs = [one for one in inputs if one["mask"] == series.mask and one["name"] in named]
    return found


def numbers(series: Series) -> dict[str, Any]:
    """What the page's script draws curves from: lists over the slices of the series, for each mode."""
    order = sorted(series.rows)
    modes = series.modes
    document: dict[str, Any] = {"first": series.all.start, "total": len(series.all), "modes": modes, "numbers": order}
    document["names"] = series.names if series.stack is None else None
    document["stack"], document["left"] = series.stack, series.left
    for key, digits in (("psnr_db", 2), ("ssim", 4)):
        lists: dict[str, list[float | None]] = {mode: [] for mode in modes}
        for number in order:
            of_slice = _by_mode(series.rows[number], key)
            for mode in modes:
                value = of_slice.get(mode)
                lists[mode].append(None if value is None else round(value, digits))
        document[key] = {mode: values for mode, values in lists.items() if any(one is not None for one in values)}
    document["exact"] = {
        row["mode"]: {} for row in next(iter(series.rows.values()))
    }  # of the few slices that are compared: dB, or 0 for the same bits
    for number in order:
        for row in series.rows[number]:
            if row.get("exact_compared", True):
                document["exact"].setdefault(row["mode"], {})[number] = round(row["psnr_vs_exact_db"] or 0.0, 1)
    return document


def _by_mode(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, float | None]:
    values = {}
    for row in rows:
        values[row["mode"]] = row[key]
        if row.get("baseline") is not None:
            values["biharmonic"] = row["baseline"][key]
    return values


def remarks(series: Series) -> list[tuple[str, str]]:
    """What was not restored, or not judged, and why: (how many slices and why, which)."""
    if series.mask is None:
        return []
    thing = "slice" if series.stack is not None else "image"
    masked = set(series.rows)
    left = series.left
    unmasked = [number for number in series.all if number not in masked and number not in left]
    unknown = [n for n, rows in series.rows.items() if all(row["mse"] is None for row in rows)]
    apart = [n for n, rows in series.rows.items() if not any(row.get("exact_compared", True) for row in rows)]
    found = [(_intensities(one), one["name"] if len(series.inputs) > 1 else "") for one in series.inputs]
    if left:
        what = "is masked wholly and was" if len(left) == 1 else "are masked wholly and were"
        found.append((f"{_count(left, thing)} {what} left as in the input", _ranges(left, series)))
    if unmasked:
        copied = "was copied" if len(unmasked) == 1 else "were copied"
        found.append(
            (f"{_count(unmasked, thing)} without masked voxels {copied} bit for bit", _ranges(unmasked, series))
        )
    if len(unknown) == len(masked):
        found.append(("The original under this mask is unknown, so nothing can be measured against it", ""))
    elif unknown:
        found.append((f"{_count(unknown, thing)} cannot be judged: the original is unknown", _ranges(unknown, series)))
    if len(apart) == len(masked):
        found.append(("No exact run was made to compare with", ""))
    elif apart:
        compared = sorted(masked - {*apart})
        text = f"{_count(apart, thing)} not compared with an exact run, which was made of a sample alone"
        found.append((text, f"compared: {_ranges(compared, series)}"))
    return found


def _intensities(one: Mapping[str, Any]) -> str:
    """The range of an entry of `inputs`, and what lies beyond it."""
    (low, high), (lowest, highest), beyond = one["range"], one["extremes"], one["beyond"]
    told = f"The range of intensities is {low:.6g} to {high:.6g}"
    if not beyond:
        return told
    voxels = "1 voxel outside the mask lies" if beyond == 1 else f"{beyond:,} voxels outside the mask lie"
    return f"{told}; {voxels} beyond it (the data reach from {lowest:.6g} to {highest:.6g})"


def _count(indices: Sequence[int], thing: str) -> str:
    return f"{len(indices)} {thing}{'' if len(indices) == 1 else 's'}"


def _ranges(indices: Sequence[int], series: Series) -> str:
    """`0-3, 7, 9-12`, or names."""
    if series.stack is None:
        shown = [series.names[index] for index in sorted(indices)]
    else:
        shown = spans(indices, to="–")
    more = f" and {len(shown) - LONGEST_LIST} more" if len(shown) > LONGEST_LIST else ""
    return ", ".join(shown[:LONGEST_LIST]) + more
