"""The small terminal table of a run: plain text, one line per image, mask and preset, and the biharmonic baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = ("image", "mask", "preset", "PSNR dB", "SSIM", "vs exact", "seconds", "bytes")
_TEXT_COLUMNS = 3
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
    """`identical`, a PSNR, or a dash where no exact run was made."""
    if row["psnr_vs_exact_db"] is not None:
        return f"{row['psnr_vs_exact_db']:.1f} dB"
    return "identical" if row.get("exact_compared", True) else MISSING


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[Mapping[str, Any]]]]:
    """The rows of `metrics.json` by image and mask, in their order."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["mask"]), []).append(row)
    return [(name, mask, group) for (name, mask), group in groups.items()]


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:12]}…{name[-(_LONGEST_NAME - 13) :]}"


def terminal_table(metrics: Mapping[str, Any]) -> str:
    """The document of `metrics.json` as aligned text without a trailing newline."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for name, mask, rows in grouped(metrics["images"]):
        for row in rows:
            total = sum(row["bytes"].values())
            quality = (number(row["psnr_db"], 2), number(row["ssim"], 3), versus_exact(row))
            lines.append((_shorten(name), mask, row["mode"], *quality, number(row["seconds"], 1), size(total)))
        baseline = rows[0].get("baseline")
        if baseline is not None:
            quality = (number(baseline["psnr_db"], 2), number(baseline["ssim"], 3), MISSING)
            lines.append((_shorten(name), mask, "biharmonic", *quality, number(baseline["seconds"], 1), MISSING))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < _TEXT_COLUMNS else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
