"""The tables of the report, from the rows of `metrics.json` in groups. A column that is empty in all rows is left out.

A group is the slices of a stack under a mask, single slices under one mask, or generated images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cocodiff.config.grouping import by_key
from cocodiff.config.text_table import aligned, spans
from cocodiff_eval.quality.metrics import QUALITY, mean, of_slices, sum_by_name

# Heads of columns for several samples (the first) and for calibrated intervals.
OF_SAMPLES = ("one sample, dB", "in 50 %", "in 90 %", "uncertainty")
ON_TERMINAL = {  # heads of columns on the terminal, if they differ from the page's
    "PSNR, dB": "PSNR dB",
    "jump between slices": "jump",
    OF_SAMPLES[0]: "one sample",
    "rank seconds": "rank s",
}
_LONGEST_NAME = 28  # characters of an image's name on the terminal
MISSING = "–"  # text of a cell without a value
NO_TRUTH = "no truth"  # text of a cell without a value, as there is nothing to measure against
EXACT = "vs exact run"  # head of the column of the distance to the run with exact exchange
# Heads of columns on the terminal, for every run; columns without a value are left out.
HEADS = ("preset", "PSNR, dB", "range", "jump between slices", "SSIM", *OF_SAMPLES, EXACT, "seconds")
# values that a row of the baseline lacks
OF_BASELINE = {"psnr_vs_exact_db": None, "exact_compared": False, "bytes": None}


def number(value: float | None, digits: int) -> str:
    """Return a number as text with `digits` digits after the point, or a dash for None."""
    return MISSING if value is None else f"{value:.{digits}f}"


def size(count: float) -> str:
    """Return a number of bytes in the unit that fits: `0 B`, `1.5 KiB`, `12.3 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def versus_exact(row: Mapping[str, Any]) -> str:
    """Return a row's PSNR against the exact run, which sends all tensors as they are, as text.

    It is "identical" if all bits are equal, and a dash without an exact run. Of several slices only those compared
    count.

    Args:
        row: a row of metrics.json.
    """
    if row["psnr_vs_exact_db"] is not None:
        return f"{row['psnr_vs_exact_db']:.1f} dB"
    return "identical" if row.get("exact_compared", True) else MISSING


def cells_of(row: Mapping[str, Any], digits: int = 2) -> dict[str, str]:
    """Return the cells of a table row as text, by the heads of their columns.

    The coverage of 50 and 90 % intervals is shown only if hidden regions have calibrated them, as others promise
    nothing. Uncertainty is half the width of the 90 % intervals.

    Args:
        row: a row of metrics.json, or several that were merged into one, as `grouped` returns them.
        digits: digits of seconds after the point.
    """
    within = row.get("range")
    unknown = MISSING if row["mse"] is not None or row.get("mask", "") is None else NO_TRUTH
    shares = (row.get(name) if row.get("intervals") else None for name in ("coverage_50", "coverage_90"))
    coverage = (MISSING if one is None else f"{100 * one:.0f} %" for one in shares)
    uncertainty = number(row.get("uncertainty"), 3)
    return {
        "preset": row["mode"],
        "PSNR, dB": unknown if row["psnr_db"] is None else number(row["psnr_db"], 2),
        "range": MISSING if within is None else f"{within[0]:.6g} to {within[1]:.6g}",
        "jump between slices": number(row.get("slice_jump"), 2),
        "SSIM": number(row["ssim"], 3),
        "MSE": MISSING if row["mse"] is None else f"{row['mse']:.2e}",
        **dict(zip(OF_SAMPLES, (number(row.get("psnr_db_single"), 2), *coverage, uncertainty), strict=True)),
        EXACT: versus_exact(row),
        "seconds": number(row["seconds"], digits),
        "rank seconds": number(row.get("rank_seconds"), digits),
    }


def all_bytes(row: Mapping[str, Any]) -> str:
    """Return as text the bytes that were sent over all links together in making a row's result; a dash if unknown.

    Args:
        row: a row of metrics.json.
    """
    return MISSING if row["bytes"] is None else size(sum(row["bytes"].values()))


def fractions_of_whole(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return two fractions as text: of the bytes that all tokens unchanged would take, those sent, and those waited
    for.

    Both are dashes if nothing is sent.

    Args:
        row: a row of metrics.json.
    """
    sent, whole, late = (sum((row.get(name) or {}).values()) for name in ("bytes", "bytes_whole", "bytes_late"))
    return (number(sent / whole, 3), number((sent - late) / whole, 3)) if whole else (MISSING, MISSING)


def split_name(name: str) -> tuple[str, int]:
    """Split the name of a row of metrics.json into its stack and the number of its slice there.

    It is `scan` and 12 for `scan[12]`, `scan` and 0 for `scan`.
    """
    base, number = re.findall(r"^(.*?)(?:\[(\d+)\])?$", name, re.DOTALL)[0]
    return base, int(number or 0)


def grouped(
    rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]
) -> list[tuple[str, str | None, int, list[dict[str, Any]]]]:
    """Group rows of metrics.json by stack and mask, and merge the rows of a stack's slices into one for each preset.

    Return (stack, mask, number of slices, rows of the presets) for each group, in the order of `rows`. In a merged row
    quality is the mean, and rank seconds and bytes are the sum. Seconds are those of the replica that took longest.
    Each row also has the `range` of its input, and the `slice_jump` of a volume whose truth is known.

    Args:
        rows: some or all rows of metrics.json.
        metrics: the content of metrics.json.
    """
    ranges = {(one["name"], one["mask"]): one["range"] for one in metrics.get("inputs", ())}
    jumps = {(one["name"], one["mask"], one["mode"]): one["slice_jump"] for one in metrics.get("jumps", ())}
    found = []
    for key, of_mask in by_key(((split_name(row["name"])[0], row["mask"]), row) for row in rows).items():
        by_mode = by_key((row["mode"], row) for row in of_mask)
        more = {mode: {"range": ranges.get(key), "slice_jump": jumps.get((*key, mode))} for mode in by_mode}
        merged = [{**_together(of_mode), **more[mode]} for mode, of_mode in by_mode.items()]
        found.append((*key, max(map(len, by_mode.values())), merged))
    return found


def _together(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Merge the rows of a stack's slices with one preset. Return one row, see `grouped`."""
    if len(rows) == 1:
        return rows[0]
    together = of_slices(rows)
    together |= {"name": split_name(rows[0]["name"])[0], "seconds": _wall_seconds(rows)}
    judged = [row for row in rows if row.get("baseline") is not None]
    if judged:
        quality = {key: mean([row["baseline"][key] for row in judged]) for key in QUALITY}
        together["baseline"] = {**quality, "seconds": _wall_seconds(judged, of_baseline=True)}
    return together


def _wall_seconds(rows: Sequence[Mapping[str, Any]], of_baseline: bool = False) -> float:
    """Return the time that the slices of some rows took together, in seconds.

    Replicas run in parallel, so the slowest one counts.

    Args:
        rows: of metrics.json.
        of_baseline: True for the time of the baseline, biharmonic restoring.
    """
    parts = []
    for row in rows:
        of_replicas = row.get("replica_seconds") or {"0": row["seconds"]}
        if of_baseline:  # made by the slice's replica, or by the first one if several worked on the slice
            replica = next(iter(of_replicas)) if len(of_replicas) == 1 else "0"
            of_replicas = {replica: row["baseline"]["seconds"]}
        parts.append(of_replicas)
    return float(max(sum_by_name(parts).values()))


def terminal_table(metrics: Mapping[str, Any]) -> str:
    """Return the content of `metrics.json` as an aligned table, with a line for each preset of a stack.

    There is no newline at its end. It is plain ASCII apart from the user's names, as terminals of batch systems may
    show nothing else.
    """
    heads = [*HEADS, *["rank seconds"] * has_rank_seconds(metrics)]
    lines = [["image", "mask", *(ON_TERMINAL.get(head, head) for head in heads), "bytes"]]
    for name, mask, slices, rows in grouped(metrics["images"], metrics):
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:12]}...{name[-(_LONGEST_NAME - 15) :]}"
        shown += f" ({slices} slices)" if slices > 1 else ""
        for row in with_baseline(rows):
            cells = cells_of(row, digits=1)
            lines.append([shown, "-" if mask is None else mask, *(cells[head] for head in heads), all_bytes(row)])
    columns = [of for n, of in enumerate(zip(*lines, strict=True)) if n < len("<<<") or {*of[1:]} != {MISSING}]
    return text_table([*zip(*columns, strict=True)], "<<<" + ">" * (len(columns) - 3))


def has_rank_seconds(metrics: Mapping[str, Any]) -> bool:
    """Return True if a run had several ranks, so that the seconds added over its ranks differ from wall time.

    Args:
        metrics: the content of metrics.json.
    """
    return metrics["ranks"] > 1 and any("rank_seconds" in row for row in metrics["images"])


def with_baseline(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of one image and mask, one for each preset, followed by a row for the biharmonic baseline if it
    was made.

    Args:
        rows: of metrics.json.
    """
    if rows[0].get("baseline") is None:
        return list(rows)
    return [*rows, {"mode": "biharmonic", "range": rows[0].get("range"), **rows[0]["baseline"], **OF_BASELINE}]


def text_table(lines: Sequence[Sequence[str]], align: str) -> str:
    """Return rows of cells as aligned text, one line each. In columns that are aligned right a missing value is `-`.

    Args:
        lines: the cells of each row.
        align: "<" or ">" for each column.
    """
    pairs = [zip(line, align, strict=True) for line in lines]
    cells = [[text.replace(MISSING, "-") if to == ">" else text for text, to in line] for line in pairs]
    return "\n".join(aligned(cells, align))


LONGEST_LIST = 12  # ranges of slices that are written out at most
# head of the column of each link
LINK_HEADS = {"sibling": "sibling", "plane": "plane", "node": "node", "cross_plane": "cross plane"}
NOTHING = (MISSING, "0 B", "")  # texts of cells that say nothing


@dataclass
class Series:
    """The results that share a slider on the report's page: slices of a stack under a mask, or single slices or
    images."""

    stack: str | None  # name of the stack; None for single slices and generated images
    mask: str | None  # name of the mask; None for generated images
    all: range = range(0)  # numbers of the stack's slices, including those without masked voxels
    names: list[str] = field(default_factory=list)  # names of single slices or generated images
    # rows of metrics.json
    rows: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)  # those of each slice, by its number
    # entries of `inputs` in metrics.json
    inputs: list[Mapping[str, Any]] = field(default_factory=list)  # about the stack, or about the single slices

    def number(self, name: str) -> int:
        """Return the number in the series of the slice or image with this name in metrics.json."""
        return split_name(name)[1] if self.stack is not None else self.names.index(name)

    @property
    def left(self) -> list[int]:
        """The numbers of the stack's slices that are masked wholly, and were not restored."""
        return [number for one in self.inputs for number in one["wholly_masked"]] if self.stack is not None else []

    @property
    def modes(self) -> list[str]:
        """The names of the presets, and "biharmonic" at the end if there is such a baseline."""
        modes = dict.fromkeys(row["mode"] for rows in self.rows.values() for row in with_baseline(rows))
        return sorted(modes, key=lambda mode: mode == "biharmonic")


def key_of(name: str, mask: str | None, of_stacks: Mapping[str, range]) -> tuple[str | None, str | None]:
    """Return the stack and the mask of the series that a row of metrics.json belongs to.

    The stack is None for a single slice and a generated image.

    Args:
        name: the row's name.
        mask: its mask; None for a generated image.
        of_stacks: for each stack the range of its slices' numbers.
    """
    base, _ = split_name(name)
    return (base if mask is not None and (base != name or len(of_stacks.get(name, ())) > 1) else None), mask


def series_of(
    rows: Sequence[Mapping[str, Any]], of_stacks: Mapping[str, range], inputs: Sequence[Mapping[str, Any]] = ()
) -> dict[tuple[str | None, str | None], Series]:
    """Divide the rows of a run into series, such as the slices of a stack under a mask. Return them by stack and mask.

    They are in the order of `rows`.

    Args:
        rows: of metrics.json.
        of_stacks: for each stack the range of its slices' numbers.
        inputs: of metrics.json.
    """
    found: dict[tuple[str | None, str | None], Series] = {}
    for row in rows:
        key = key_of(row["name"], row["mask"], of_stacks)
        series = found.setdefault(key, Series(*key))
        if series.stack is None and (not series.names or series.names[-1] != row["name"]):
            series.names.append(row["name"])
        number = split_name(row["name"])[1] if series.stack is not None else len(series.names) - 1
        series.rows.setdefault(number, []).append(row)
    for series in found.values():
        known = of_stacks.get(series.stack or "", range(len(series.names)))
        series.all = range(min(known.start, *series.rows), max(known.stop, 1 + max(series.rows)))
        named = {series.stack} if series.stack is not None else {*series.names}
        series.inputs = [one for one in inputs if one["mask"] == series.mask and one["name"] in named]
    return found


def numbers(series: Series) -> dict[str, Any]:
    """Return what the report's script draws a series' curves from: PSNR and SSIM of each preset over the series'
    slices.

    It is plain data for JSON, with the numbers and names of the slices.
    """
    order, modes = sorted(series.rows), series.modes
    document: dict[str, Any] = {"first": series.all.start, "total": len(series.all), "modes": modes, "numbers": order}
    document["names"] = series.names if series.stack is None else None
    document["stack"], document["left"] = series.stack, series.left
    rows = [(one, row) for one in order for row in series.rows[one]]
    document["uncertain"] = sorted({row["mode"] for _, row in rows if row.get("intervals")})
    found = [{row["mode"]: row for row in with_baseline(series.rows[one])} for one in order]
    for key, digits in (("psnr_db", 2), ("ssim", 4)):
        document[key] = {}
        for mode in modes:
            values = [by_mode[mode][key] if mode in by_mode else None for by_mode in found]
            if any(value is not None for value in values):
                document[key][mode] = [None if value is None else round(value, digits) for value in values]
    # For the few slices that are compared: dB, or 0 if all bits are equal.
    document["exact"] = {row["mode"]: {} for _, row in rows}
    for one, row in rows:
        if row.get("exact_compared", True):
            document["exact"][row["mode"]][one] = round(row["psnr_vs_exact_db"] or 0.0, 1)
    return document


def remarks(series: Series) -> list[tuple[str, str]]:
    """Return remarks on a series of restored slices: pairs of a sentence and the slices that it is about ("" for all).

    They tell the range of intensities, and which slices were not restored, not judged or not compared, and why.
    """
    if series.mask is None:
        return []
    thing = "slice" if series.stack is not None else "image"
    masked, left = set(series.rows), series.left
    unmasked = [number for number in series.all if number not in masked and number not in left]
    unknown = [n for n, rows in series.rows.items() if all(row["mse"] is None for row in rows)]
    apart = [n for n, rows in series.rows.items() if not any(row.get("exact_compared", True) for row in rows)]
    found = [(_intensities(one), one["name"] if len(series.inputs) > 1 else "") for one in series.inputs]
    found += [(one, "") for of_input in series.inputs for one in of_input["remarks"]]
    if left:
        what = "is masked wholly and was" if len(left) == 1 else "are masked wholly and were"
        found.append((f"{_count(left, thing)} {what} left as in the input", _ranges(left, series)))
    if unmasked:
        what = f"without masked voxels {'was' if len(unmasked) == 1 else 'were'} copied bit for bit"
        found.append((f"{_count(unmasked, thing)} {what}", _ranges(unmasked, series)))
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
    """Return a sentence on an input's range of intensities, and on the number of voxels beyond it.

    Args:
        one: an entry of `inputs` in metrics.json.
    """
    (low, high), (lowest, highest), beyond = one["range"], one["extremes"], one["beyond"]
    told = f"The range of intensities is {low:.6g} to {high:.6g}"
    if not beyond:
        return told
    voxels = "1 known voxel lies" if beyond == 1 else f"{beyond:,} known voxels lie"
    return f"{told}; {voxels} beyond it (the data reach from {lowest:.6g} to {highest:.6g})"


def _count(indices: Sequence[int], thing: str) -> str:
    """Return a number of things in words, such as "2 slices".

    Args:
        indices: the things.
        thing: their name in the singular.
    """
    return f"{len(indices)} {thing}{'' if len(indices) == 1 else 's'}"


def _ranges(indices: Sequence[int], series: Series) -> str:
    """Return numbers of a stack's slices as text, `0-3, 7, 9-12`, or the names of single slices. A long list is cut
    short.

    Args:
        indices: their numbers in the series.
    """
    names = series.names
    shown = spans(indices, to="–") if series.stack is not None else [names[index] for index in sorted(indices)]
    more = f" and {len(shown) - LONGEST_LIST} more" if len(shown) > LONGEST_LIST else ""
    return ", ".join(shown[:LONGEST_LIST]) + more


class Cell(NamedTuple):
    """A cell of a table in the report."""

    text: str
    note: str = ""  # further text, shown in small letters


class Column(NamedTuple):
    """A column of a table in the report."""

    head: str  # its heading
    cells: Sequence[str | Cell]  # one for each row
    left: bool = False  # True to align it left


class Table(NamedTuple):
    """A table in the report."""

    label: str  # its heading
    columns: list[Column]  # the columns that are shown, with a cell for each row
    muted: list[bool]  # True for rows that are shown faint

    @classmethod
    def of(cls, label: str, columns: Sequence[Column], muted: Sequence[bool]) -> Table:
        """Return a table without the columns whose cells are all empty.

        Args:
            label: its heading.
            columns: all columns.
            muted: for each row, True if it is shown faint.
        """
        shown = []
        for column in columns:
            cells = [Cell(one) if isinstance(one, str) else one for one in column.cells]
            if any(cell.text not in NOTHING for cell in cells):
                shown.append(column._replace(cells=cells))
        return cls(label, shown, [*muted])


def quality_table(
    label: str, rows: Sequence[Mapping[str, Any]], prompts: Mapping[str, str], metrics: Mapping[str, Any]
) -> Table:
    """Return the report's table of a series: the results of the presets for each image or stack, then the baseline's.

    Args:
        label: its heading.
        rows: the series' rows of metrics.json.
        prompts: for each image its prompt.
        metrics: the content of metrics.json.
    """
    tables, images, told = grouped(rows, metrics), list[Cell](), list[Mapping[str, Any]]()
    for name, _, _, of_image in tables:
        found = with_baseline(of_image)
        images += [Cell(name, prompts.get(name, "")), *[Cell("")] * (len(found) - 1)]
        told += found
    cells = [cells_of(row) for row in told]
    named = len(tables) > 1 or any(one.note for one in images)
    heads = [head for head in cells[0] if head != "rank seconds" or has_rank_seconds(metrics)]
    columns = [
        *([Column("image", images)] if named else []),
        *(Column(head, [one[head] for one in cells], left=head == "preset") for head in heads),
        *(
            Column(head, [MISSING if row["bytes"] is None else size(row["bytes"][link]) for row in told])
            for link, head in LINK_HEADS.items()
        ),
        Column("of whole", [fractions_of_whole(row)[0] for row in told]),
        *(
            [Column("waited for", [fractions_of_whole(row)[1] for row in told])]
            * any("bytes_late" in row for row in rows)
        ),
    ]
    return Table.of(label, columns, [row["mode"] == "biharmonic" for row in told])


def summary_table(metrics: Mapping[str, Any]) -> Table | None:
    """Return the report's table of means over images for each mask and preset; None if no mean is of two images or
    more.

    Args:
        metrics: the content of metrics.json.
    """
    rows = [row | {"exact_compared": 0 < row["identical"] == row["compared"]} for row in metrics["summary"]["rows"]]
    rows += [row | OF_BASELINE | {"mode": row["method"]} for row in metrics["summary"]["baseline"]]
    if not any(row["n"] > 1 for row in rows):
        return None
    rows.sort(key=lambda row: str(row["mask"]))
    cells = [cells_of(row) for row in rows]
    columns = [
        Column("mask", [row["mask"] or "" for row in rows]),
        Column("preset", [row["mode"] for row in rows], left=True),
        Column("n", [str(row["n"]) for row in rows]),
        *(Column(head, [one[head] for one in cells]) for head in ("PSNR, dB", "SSIM", EXACT, "seconds")),
        Column("bytes sent, sum", [all_bytes(row) for row in rows]),
    ]
    return Table.of("Means over all images", columns, [row["mode"] == "biharmonic" for row in rows])


def bound_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return the report's table of the settings that were tried for `--quality`, a bound on the loss.

    There are rows for each mask, or for all images.

    Args:
        records: `quality` of metrics.json.
    """
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
    below = [", ".join(row["below"]) or ("none" if "db" in row else "") for row in rows]
    columns = [
        Column("for", [row["for"] for row in rows]),
        Column("setting", [Cell(row["setting"], "taken" if row["taken"] else "") for row in rows], left=True),
        Column("tried on", [f"{row['slices']} of {row['count']}" if "db" in row else MISSING for row in rows]),
        Column("worst", [decibels(row, row["worst_db"]) if "db" in row else MISSING for row in rows]),
        Column("at", [row["worst"] or "" for row in rows], left=True),
        Column("of whole", [number(row.get("bytes_of_whole"), 3) for row in rows]),
        Column("waited for", [number(row.get("waited_of_whole"), 3) for row in rows]),
        Column("keeps it", [_keeps(row) for row in rows], left=True),
        Column("below the bound", below, left=True),
    ]
    return Table.of("Settings that were tried for the bound on quality", columns, [not row["taken"] for row in rows])


def _keeps(row: Mapping[str, Any]) -> str:
    """Return in words whether a setting that was tried keeps the bound on quality.

    Args:
        row: the trial's record in metrics.json.
    """
    return "yes" if row["kept"] else "no" if row["below"] else f"not by {row['margin_db']:g} dB"


def decibels(record: Mapping[str, Any], value: float | None) -> str:
    """Return a figure in dB as text, "identical" for None: one digit against the exact run, three against the truth.

    Args:
        record: an entry of `quality` in metrics.json, a bound on quality, which says what its figures are against.
        value: the figure.
    """
    return "identical" if value is None else f"{value:.{1 if record['against'] == 'exact' else 3}f} dB"
