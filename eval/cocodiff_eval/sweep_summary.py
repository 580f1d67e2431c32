"""Summary of a sweep's lines: means over slices, differences to the exact run of the same slice, tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cocodiff_eval.table import MISSING, text_table

LIMITS = {"psnr_db": 2.0, "ssim": 0.03, "mse": 2e-3}  # CoCoDiff, Table II: differences below these count as none
DIGITS = {"psnr_db": 2, "ssim": 4, "mse": 5}
NAMES = {"psnr_db": "PSNR dB", "ssim": "SSIM", "mse": "MSE"}
Line = Mapping[str, Any]


class Spread(NamedTuple):
    """A mean over slices and its standard error; None for a single slice."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """None where no value is there."""
        present = [value for value in values if value is not None]
        if not present:
            return None
        error = statistics.stdev(present) / len(present) ** 0.5 if len(present) > 1 else None
        return cls(statistics.fmean(present), error)

    def text(self, digits: int) -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.error is None else f" +- {self.error:.{digits}f}")


@dataclass(frozen=True)
class Row:
    """One point under one mask at one number of steps, over n slices.

    quality     psnr_db, ssim, mse; None where no truth is known
    difference  the same minus the exact run's on the same slice
    vs_exact    PSNR in dB against the exact run, over the slices whose bits differ; `identical` counts the others
    volume      bytes of q, k, v and o over the exact run's; None where nothing travels (one rank)
    exposed     those of them that attention waited for, over the exact run's
    of_whole    the same over what all tokens as they are would have been along the point's own routes
    coding      what travels in tensors' place: full, v_major or a codec; empty where the lines do not say
    displaced   whether some calls of attention did not wait for their tensors
    speed_up    seconds of the exact run over this one's
    """

    point: str
    mask: str
    steps: int
    n: int
    quality: dict[str, Spread | None]
    difference: dict[str, Spread | None]
    vs_exact: Spread | None
    identical: int
    volume: Spread | None
    speed_up: Spread | None
    seconds: Spread | None
    of_whole: Spread | None = None
    coding: str = ""
    exposed: Spread | None = None
    displaced: bool = False

    @property
    def by_codec(self) -> bool:
        return self.coding not in ("", "full", "v_major")

    def beats(self, other: Row, by: Sequence[str] = ("volume", "exposed")) -> bool:
        """Whether this point, under the same mask at as many steps, is closer to the exact run than another, and no
        larger in any of these measures."""
        if (self.mask, self.steps) != (other.mask, other.steps) or other.identical == other.n:
            return False
        if other.vs_exact is None:
            return False
        pairs: list[tuple[Spread | None, Spread | None]] = [(getattr(self, name), getattr(other, name)) for name in by]
        no_larger = all(a is not None and b is not None and a.mean <= b.mean for a, b in pairs)
        closer = self.identical == self.n or (self.vs_exact is not None and self.vs_exact.mean > other.vs_exact.mean)
        return closer and no_larger


def summarise(lines: Sequence[Line]) -> list[Row]:
    """A row for each mask, number of steps and point, in the order in which they first appear."""
    groups: dict[tuple[str, int, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["mask"], line["steps"], line["point"]), []).append(line)
    points = list(dict.fromkeys(line["point"] for line in lines))
    return [_row(groups[key]) for key in sorted(groups, key=lambda key: (*key[:2], points.index(key[2])))]


def _row(lines: Sequence[Line]) -> Row:
    def over(value: Callable[[Line], float | None]) -> Spread | None:
        return Spread.of([value(line) for line in lines])

    def minus(line: Line, name: str) -> float | None:
        return None if line[name] is None else line[name] - line["exact"][name]

    def sent(line: Line, kind: str = "bytes") -> int:
        return sum(line.get(kind, {}).values())

    def part(count: int, whole: int) -> float | None:
        return count / whole if whole else None

    return Row(
        **{name: lines[0][name] for name in ("point", "mask", "steps")},
        n=len(lines),
        quality={name: Spread.of([line[name] for line in lines]) for name in LIMITS},
        difference={name: Spread.of([minus(line, name) for line in lines]) for name in LIMITS},
        vs_exact=over(lambda line: line["psnr_vs_exact_db"]),
        identical=sum(line["psnr_vs_exact_db"] is None for line in lines),
        volume=over(lambda line: part(sent(line), sent(line["exact"]))),
        speed_up=over(lambda line: line["exact"]["seconds"] / line["seconds"]),
        seconds=over(lambda line: line["seconds"]),
        of_whole=over(lambda line: part(sent(line), sent(line, "bytes_whole"))),
        coding=lines[0].get("coding", ""),
        exposed=over(lambda line: part(sent(line) - sent(line, "bytes_late"), sent(line["exact"]))),
        displaced=any("bytes_late" in line for line in lines),
    )


def beyond(row: Row) -> bool:
    """Whether a difference to the exact run is larger than the paper's limit."""
    pairs = [(row.difference[name], limit) for name, limit in LIMITS.items()]
    return any(found is not None and abs(found.mean) > limit for found, limit in pairs)


def shown(spread: Spread | None, digits: int) -> str:
    return MISSING if spread is None else spread.text(digits)


def shown_exact(row: Row) -> str:
    """PSNR against the exact run, and of how many slices the bits are the same."""
    if row.identical == row.n:
        return "identical"
    return shown(row.vs_exact, 1) + (f" ({row.identical} identical)" if row.identical else "")


def quality_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Heading and lines of the quality table, as the paper's Table II; `*` marks what is beyond its limits."""
    heading = ("point", "mask", "steps", "n", *NAMES.values(), *(f"d {NAMES[n]} ({LIMITS[n]:g})" for n in LIMITS))
    lines = [
        (
            row.point + (" *" if beyond(row) else ""),
            row.mask,
            str(row.steps),
            str(row.n),
            *(shown(row.quality[name], DIGITS[name]) for name in LIMITS),
            *(shown(row.difference[name], DIGITS[name]) for name in LIMITS),
        )
        for row in rows
    ]
    return [heading, *lines]


def cost_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Heading and lines of bytes and speed; beaten by: the point closest to exact of those that send no more. With what
    attention waited for where that is not all."""
    exposed = ("exposed",) if any(row.displaced for row in rows) else ()
    measured = ("vs exact dB", "volume", *exposed, "of whole", "speed-up to flat", "seconds")
    heading = ("point", "mask", "steps", "n", *measured, "beaten by")
    lines = [
        (
            *(row.point, row.mask, str(row.steps), str(row.n), shown_exact(row), shown(row.volume, 3)),
            *(shown(row.exposed, 3) for _ in exposed),
            *(shown(row.of_whole, 3), shown(row.speed_up, 2), shown(row.seconds, 2), better_than(row, rows)),
        )
        for row in rows
    ]
    return [heading, *lines]


def better_than(row: Row, rows: Sequence[Row]) -> str:
    """The point closest to exact of those that send no more than this one, and that attention waits for no more of;
    empty where there is none."""
    better = [other for other in rows if other.beats(row)]
    closest = max(better, key=lambda one: math.inf if one.vs_exact is None else one.vs_exact.mean, default=None)
    return "" if closest is None else closest.point


NOTE = (
    "Means over n slices +- standard error. d: the point minus the exact run (flat) of the same slice; in brackets the "
    "paper's limits, * beyond one. Volume: bytes of q, k, v and o over the exact run's; of whole: over those of all "
    "tokens as they are along the point's own routes. Beaten by: a point that sends no more and is closer to exact."
)
NOTE_EXPOSED = (
    "Exposed: the bytes that attention waited for, over the exact run's; a point is beaten by one that has no more of "
    "these either."
)


def note(rows: Sequence[Row]) -> str:
    """What the tables' columns mean."""
    return f"{NOTE} {NOTE_EXPOSED}" if any(row.displaced for row in rows) else NOTE


def quality_table(rows: Sequence[Row]) -> str:
    """Plain ASCII apart from the user's names."""
    return text_table(quality_cells(rows), "<<" + ">" * 8) + "\n" + note(rows)


def cost_table(rows: Sequence[Row]) -> str:
    cells = cost_cells(rows)
    return text_table(cells, "<<" + ">" * (len(cells[0]) - 3) + "<")
