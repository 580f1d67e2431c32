"""The small terminal table of a run: plain text, one line per image, mask and preset, and the biharmonic baseline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cocodiff.config.text_table import aligned
from cocodiff_eval.quality.metrics import QUALITY, mean, of_slices

HEADINGS = ("image", "mask", "preset", "PSNR dB", "SSIM", "vs exact", "seconds", "bytes")
RANK_SECONDS = "rank s"  # heading, after seconds, where there are several ranks
JUMP = "jump"  # heading, after the PSNR, where neighbouring slices of a volume were compared with those of the truth
OF_SAMPLES = ("one sample", "in 50 %", "in 90 %")  # headings, after SSIM, of several samples, and calibrated intervals
_LONGEST_NAME = 28
MISSING = "–"


def number(value: float | None, digits: int) -> str:
    """A rounded number, or a dash for one that is not there."""
    return MISSING if value is None else f"{value:.{digits}f}"


def size(count: float) -> str:
    """Bytes in the unit that fits: `0 B`, `1.5 KiB`, `12.3 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def versus_exact(row: Mapping[str, Any]) -> str:
    """`identical`, a PSNR, or a dash where no exact run was made; of several slices, of those that were compared."""
    if row["psnr_vs_exact_db"] is not None:
        return f"{row['psnr_vs_exact_db']:.1f} dB"
    return "identical" if row.get("exact_compared", True) else MISSING


def calibrated(metrics: Mapping[str, Any]) -> set[tuple[str, str | None]]:
    """The stacks and masks whose intervals hidden regions have calibrated: those of others promise nothing."""
    return {(one["name"], one["mask"]) for one in metrics.get("volumes", ()) if one["intervals"]}


def samples_told(row: Mapping[str, Any], of_intervals: set[tuple[str, str | None]]) -> tuple[str, str, str]:
    """The cells of OF_SAMPLES: a single sample's PSNR, and the coverage of calibrated intervals of 50 and 90 %."""
    known = (base_name(row.get("name", "")), row.get("mask")) in of_intervals
    share = [row.get(name) if known else None for name in ("coverage_50", "coverage_90")]
    inside = [MISSING if one is None else f"{100 * one:.0f} %" for one in share]
    return number(row.get("psnr_db_single"), 2), inside[0], inside[1]


def of_whole(row: Mapping[str, Any]) -> str:
    """Which part of the bytes was sent that all tokens as they are would have been; a dash where nothing is."""
    whole = sum((row.get("bytes_whole") or {}).values())
    return number(sum(row["bytes"].values()) / whole, 3) if whole else MISSING


def of_whole_awaited(row: Mapping[str, Any]) -> str:
    """Which part of those bytes attention waited for; a dash where nothing travels."""
    whole, late = (sum((row.get(name) or {}).values()) for name in ("bytes_whole", "bytes_late"))
    return number((sum(row["bytes"].values()) - late) / whole, 3) if whole else MISSING


def base_name(name: str) -> str:
    """The stack a row belongs to: `scan[12]`, a slice of it, and `scan` both give `scan`."""
    return re.sub(r"\[\d+\]$", "", name)


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | None, int, list[Mapping[str, Any]]]]:
    """(stack, mask, number of slices, one row for each preset), in the order of `rows`.

    The rows of a stack's slices are taken together: quality is their mean, rank seconds and bytes their sum, seconds
    that of the replica that took longest.
    """
    groups: dict[tuple[str, str | None], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        groups.setdefault((base_name(row["name"]), row["mask"]), {}).setdefault(row["mode"], []).append(row)
    return [
        (name, mask, max(len(slices) for slices in by_mode.values()), [_together(one) for one in by_mode.values()])
        for (name, mask), by_mode in groups.items()
    ]


def _together(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(rows) == 1:
        return rows[0]
    together = of_slices(rows)
    together |= {"name": base_name(rows[0]["name"]), "seconds": _wall_seconds(map(_replica_seconds, rows))}
    judged = [row for row in rows if row.get("baseline") is not None]
    if judged:
        quality = {key: mean([row["baseline"][key] for row in judged]) for key in QUALITY}
        together["baseline"] = {**quality, "seconds": _wall_seconds(map(_baseline_seconds, judged))}
    return together


def _wall_seconds(of_slices: Iterable[Mapping[str, float]]) -> float:
    """How long slices took together, of which each tells the seconds of the replicas that worked on it: replicas work
    at the same time, so the seconds of the one that took longest."""
    total: dict[str, float] = {}
    for of_slice in of_slices:
        for replica, seconds in of_slice.items():
            total[replica] = total.get(replica, 0.0) + seconds
    return max(total.values())


def _replica_seconds(row: Mapping[str, Any]) -> Mapping[str, float]:
    return row.get("replica_seconds") or {"0": row["seconds"]}


def _baseline_seconds(row: Mapping[str, Any]) -> Mapping[str, float]:
    """The baseline is made where a slice is judged: by its replica, or by the first where several worked on it."""
    replicas = [*_replica_seconds(row)]
    return {replicas[0] if len(replicas) == 1 else "0": row["baseline"]["seconds"]}


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:12]}...{name[-(_LONGEST_NAME - 15) :]}"


def terminal_table(metrics: Mapping[str, Any]) -> str:
    """The document of `metrics.json` as aligned text without a newline at its end. A stack is one line for each preset.

    Plain ASCII apart from the user's names: terminals of batch systems know little else.
    """
    of_intervals = calibrated(metrics)
    sampled = OF_SAMPLES[: 3 if of_intervals else 1] if any("samples" in row for row in metrics["images"]) else ()
    ranked = (RANK_SECONDS,) if has_rank_seconds(metrics) else ()
    jumps = jumps_of(metrics)
    jumped = (JUMP,) if jumps else ()
    lines: list[tuple[str, ...]] = [
        (*HEADINGS[:4], *jumped, HEADINGS[4], *sampled, *HEADINGS[5:7], *ranked, HEADINGS[7])
    ]
    for name, mask, slices, rows in grouped(metrics["images"]):
        shown = _shorten(name) + (f" ({slices} slices)" if slices > 1 else "")
        for row in with_baseline(rows):
            told = samples_told(row, of_intervals)[: len(sampled)]
            jump = [number(jumps.get((name, mask, row["mode"])), 2) for _ in jumped]
            quality = (number(row["psnr_db"], 2), *jump, number(row["ssim"], 3), *told, versus_exact(row))
            total = MISSING if row["bytes"] is None else size(sum(row["bytes"].values()))
            shown_mask = "-" if mask is None else mask
            seconds = [number(row.get(name), 1) for name in ("seconds", "rank_seconds")[: 1 + len(ranked)]]
            lines.append((shown, shown_mask, row["mode"], *quality, *seconds, total))
    return text_table(lines, "<<<" + ">" * (len(lines[0]) - 3))


def jumps_of(metrics: Mapping[str, Any]) -> dict[tuple[str, str | None, str], float | None]:
    """`slice_jump` by stack, mask and preset, of volumes whose truth is known."""
    return {(one["name"], one["mask"], one["mode"]): one["slice_jump"] for one in metrics.get("jumps", ())}


def has_rank_seconds(metrics: Mapping[str, Any]) -> bool:
    """Whether there are several ranks, whose seconds are another number than those on the clock."""
    return metrics["ranks"] > 1 and any("rank_seconds" in row for row in metrics["images"])


def with_baseline(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The presets' rows of one image and mask and, as one more row, the biharmonic baseline if it was made."""
    if rows[0].get("baseline") is None:
        return list(rows)
    without = {"psnr_vs_exact_db": None, "exact_compared": False, "bytes": None}
    return [*rows, {"mode": "biharmonic", **rows[0]["baseline"], **without}]


def text_table(lines: Sequence[Sequence[str]], align: str) -> str:
    """Aligned text; a number (a column to the right) that is not there is `-`."""
    cells = [
        [text.replace(MISSING, "-") if to == ">" else text for text, to in zip(line, align, strict=True)]
        for line in lines
    ]
    return "\n".join(aligned(cells, align))
