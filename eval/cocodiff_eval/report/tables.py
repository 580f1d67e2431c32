"""The tables of the report. A column that says nothing in any row is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cocodiff_eval.table import (
    MISSING,
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

LINK_HEADS = {"sibling": "sibling", "plane": "plane", "node": "node", "cross_plane": "cross plane"}
NOTHING = (MISSING, "0 B", "")


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
