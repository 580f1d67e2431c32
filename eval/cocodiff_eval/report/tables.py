"""The rows of `metrics.json` as the report groups them (the slices of a stack under a mask, single slices under one
mask, or generated images), and its tables. A column that says nothing in any row is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cocodiff.config.text_table import spans
from cocodiff_eval.report.table import (
    MISSING,
    base_name,
    calibrated,
    grouped,
    has_rank_seconds,
    jumps_of,
    number,
    of_whole,
    of_whole_awaited,
    samples_told,
    size,
    versus_exact,
    with_baseline,
)

LONGEST_LIST = 12  # ranges of slices that are written out
LINK_HEADS = {"sibling": "sibling", "plane": "plane", "node": "node", "cross_plane": "cross plane"}
NOTHING = (MISSING, "0 B", "")


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
        for one in order:
            of_slice = _by_mode(series.rows[one], key)
            for mode in modes:
                value = of_slice.get(mode)
                lists[mode].append(None if value is None else round(value, digits))
        document[key] = {mode: values for mode, values in lists.items() if any(one is not None for one in values)}
    document["exact"] = {
        row["mode"]: {} for row in next(iter(series.rows.values()))
    }  # of the few slices that are compared: dB, or 0 for the same bits
    for one in order:
        for row in series.rows[one]:
            if row.get("exact_compared", True):
                document["exact"].setdefault(row["mode"], {})[one] = round(row["psnr_vs_exact_db"] or 0.0, 1)
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


class Cell(NamedTuple):
    """note: in small letters."""

    text: str
    note: str = ""


class Column(NamedTuple):
    head: str
    cells: Sequence[str | Cell]
    left: bool = False


class Table(NamedTuple):
    """columns: those that are shown, with a cell for each row; muted: which rows are faint."""

    label: str
    columns: list[Column]
    muted: list[bool]

    @classmethod
    def of(cls, label: str, columns: Sequence[Column], muted: Sequence[bool]) -> Table:
        whole = [
            column._replace(cells=[Cell(one) if isinstance(one, str) else one for one in column.cells])
            for column in columns
        ]
        return cls(label, [one for one in whole if any(cell[0] not in NOTHING for cell in one.cells)], [*muted])


def quality_table(
    label: str, rows: Sequence[Mapping[str, Any]], prompts: Mapping[str, str], metrics: Mapping[str, Any]
) -> Table:
    """The presets of each image or stack, then the baseline. rows: of metrics.json, those of one series."""
    tables, jumps, images, told = grouped(rows), jumps_of(metrics), [], []
    for name, mask, _, of_image in tables:
        found = with_baseline(of_image)
        images += [Cell(name, prompts.get(name, "")), *[Cell("")] * (len(found) - 1)]
        told += [{**row, "slice_jump": jumps.get((name, mask, row["mode"]))} for row in found]
    named = len(tables) > 1 or any(one.note for one in images)
    of_samples = [samples_told(row, calibrated(metrics)) for row in told]
    columns = [
        *([Column("image", images)] if named else []),
        Column("preset", [row["mode"] for row in told], left=True),
        Column("PSNR, dB", [number(row["psnr_db"], 2) for row in told]),
        Column("jump between slices", [number(row["slice_jump"], 2) for row in told]),
        Column("SSIM", [number(row["ssim"], 3) for row in told]),
        Column("MSE", [MISSING if row["mse"] is None else f"{row['mse']:.2e}" for row in told]),
        Column("one sample, dB", [one for one, _, _ in of_samples]),
        Column("in 50 %", [one for _, one, _ in of_samples]),
        Column("in 90 %", [one for _, _, one in of_samples]),
        Column("vs exact", [versus_exact(row) for row in told]),
        Column("seconds", [number(row["seconds"], 2) for row in told]),
        *([Column("rank seconds", [number(row.get("rank_seconds"), 2) for row in told])] * has_rank_seconds(metrics)),
        *(
            Column(head, [MISSING if row["bytes"] is None else size(row["bytes"][link]) for row in told])
            for link, head in LINK_HEADS.items()
        ),
        Column("of whole", [of_whole(row) for row in told]),
        *([Column("waited for", [of_whole_awaited(row) for row in told])] * any("bytes_late" in row for row in rows)),
    ]
    return Table.of(label, columns, [row["mode"] == "biharmonic" for row in told])


def summary_table(metrics: Mapping[str, Any]) -> Table | None:
    """Means per mask and preset, only where they say more than the other tables: of two images or more."""
    rows = []
    for row in metrics["summary"]["rows"]:
        exact = versus_exact(row | {"exact_compared": 0 < row["identical"] == row["compared"]})
        rows.append({**row, "exact": exact, "traffic": size(sum(row["bytes"].values()))})
    for row in metrics["summary"]["baseline"]:
        rows.append({**row, "mode": row["method"], "exact": MISSING, "traffic": MISSING})
    if not any(row["n"] > 1 for row in rows):
        return None
    rows.sort(key=lambda row: str(row["mask"]))
    columns = [
        Column("mask", [row["mask"] or "" for row in rows]),
        Column("preset", [row["mode"] for row in rows], left=True),
        Column("n", [str(row["n"]) for row in rows]),
        Column("PSNR, dB", [number(row["psnr_db"], 2) for row in rows]),
        Column("SSIM", [number(row["ssim"], 3) for row in rows]),
        Column("vs exact", [row["exact"] for row in rows]),
        Column("seconds", [number(row["seconds"], 2) for row in rows]),
        Column("bytes sent, sum", [row["traffic"] for row in rows]),
    ]
    return Table.of("Means over all images", columns, [row["mode"] == "biharmonic" for row in rows])


def bound_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The settings that were tried for a bound on quality, of each mask or of all images. records: `quality` of
    metrics.json."""
    rows = [
        {
            **record,
            **tried,
            "for": "" if place else record["of"],
            "taken": tried.get("setting") in (None, record["setting"]),
        }
        for record in records
        for place, tried in enumerate(record["tried"] or [{"kept": True, "below": (), "worst": None}])
    ]
    columns = [
        Column("for", [row["for"] for row in rows]),
        Column("setting", [Cell(row["setting"], "taken" if row["taken"] else "") for row in rows], left=True),
        Column("tried on", [f"{row['slices']} of {row['count']}" if "db" in row else MISSING for row in rows]),
        Column("worst", [decibels(row, row["worst_db"]) if "db" in row else MISSING for row in rows]),
        Column("at", [row["worst"] or "" for row in rows], left=True),
        Column("of whole", [number(row.get("bytes_of_whole"), 3) for row in rows]),
        Column("waited for", [number(row.get("waited_of_whole"), 3) for row in rows]),
        Column("keeps it", [_keeps(row) for row in rows], left=True),
        Column(
            "below the bound", [", ".join(row["below"]) or ("none" if "db" in row else "") for row in rows], left=True
        ),
    ]
    return Table.of("Settings that were tried for the bound on quality", columns, [not row["taken"] for row in rows])


def _keeps(row: Mapping[str, Any]) -> str:
    return "yes" if row["kept"] else "no" if row["below"] else f"not by {row['margin_db']:g} dB"


def decibels(record: Mapping[str, Any], value: float | None) -> str:
    """A figure of a bound on quality, in as many digits as what it is measured against has."""
    return "identical" if value is None else f"{value:.{1 if record['against'] == 'exact' else 3}f} dB"
