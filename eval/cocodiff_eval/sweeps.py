"""The lines of a sweep's results.jsonl: means over slices, differences to the exact run of the same slice, tables, and
the picture of quality against bytes and against speed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.errors import UserError
from cocodiff_eval.table import MISSING, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES, PARETO = "results.jsonl", "pareto.png"
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


def read_rows(folder: Path) -> list[Row]:
    """What a folder of results holds. Raises UserError for no lines, and for damaged ones."""
    path = folder / LINES
    if not path.is_file():
        raise UserError(f"{folder} holds no {LINES}: give the --out of a sweep that has ended")
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(json.loads(text, parse_constant=_refuse))
            summarise(lines[-1:])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is damaged: mend it, or start afresh with --overwrite") from error
    return summarise(lines)


def _refuse(number: str) -> None:
    raise ValueError(f"JSON has no {number}")


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
        return sum((line[kind] if kind == "bytes" else line.get(kind, {})).values())

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


# The picture ----------------------------------------------------------------------------------------------------------

MARKERS = "osD^vPX*"
NEAR = (14, 11)  # pixels, across and up, at matplotlib's 100 an inch: about a label
XLABELS = {
    "volume": "volume: bytes of q, k, v and o over the exact run's",
    "exposed": "exposed: bytes that attention waited for, over the exact run's",
}
CODED, DISPLACED = "black edge: residual codec", "red edge: displaced"
EDGES: dict[str, dict[str, Any]] = {
    CODED: {"markeredgecolor": "black"},
    DISPLACED: {"markeredgecolor": "tab:red", "markeredgewidth": 1.2},
}


class Mark(NamedTuple):
    """A marker's place in a panel, and the number of its point."""

    x: float
    y: float
    point: int


def save_pareto(path: Path, rows: Sequence[Row]) -> None:
    """Two panels: PSNR against the exact run over volume, and the change of PSNR against the truth over speed-up; where
    attention did not wait for all bytes, PSNR over those that it waited for stands between them.

    A colour and a number for each point, a marker for each mask (and number of steps), with a black edge where a codec
    was used, a red one where tensors were displaced; bars are standard errors. A line joins the points that no other
    beats by what the panel shows. Markers in one place share a label with all their numbers.
    """
    from matplotlib.figure import Figure

    points = list(dict.fromkeys(row.point for row in rows))
    series = list(dict.fromkeys((row.mask, row.steps) for row in rows))
    measures = ["volume", "exposed"] if any(row.displaced for row in rows) else ["volume"]
    figure = Figure(figsize=(7 + 5.5 * len(measures), 5.6), layout="constrained")
    *vs_bytes, right = figure.subplots(1, len(measures) + 1)
    height = _height_of_identical(rows)
    marks: dict[Axes, list[Mark]] = {axes: [] for axes in (*vs_bytes, right)}
    for row in rows:
        look = _look(points.index(row.point), series.index((row.mask, row.steps)))
        vs_exact = Spread(height, None) if row.identical == row.n else row.vs_exact
        places = {axes: (getattr(row, name), vs_exact) for axes, name in zip(vs_bytes, measures, strict=True)}
        places[right] = row.speed_up, row.difference["psnr_db"]
        for axes, (x, y) in places.items():
            if x is not None and y is not None:
                _draw(axes, x, y, look | _edge(row))
                marks[axes].append(Mark(x.mean, y.mean, points.index(row.point) + 1))
    for axes, name in zip(vs_bytes, measures, strict=True):
        if any(row.identical == row.n for row in rows):
            axes.axhline(height, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
            axes.annotate(
                "identical bits", (0.01, height), xycoords=("axes fraction", "data"), va="bottom", color="0.4"
            )
        for mask, steps in series:
            _draw_front(axes, [row for row in rows if (row.mask, row.steps) == (mask, steps)], height, name)
        axes.set(xlabel=XLABELS[name], ylabel="PSNR against the exact run, dB")
    right.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    right.axvline(1, color="0.6", linewidth=0.8, zorder=0)
    right.set(xlabel="speed-up to the exact run (flat)", ylabel="PSNR against the truth: change from exact, dB")
    if right.get_ylim()[0] < -LIMITS["psnr_db"] / 2:
        right.axhline(-LIMITS["psnr_db"], color="tab:red", linewidth=0.8, linestyle="--")
        right.annotate("the paper's limit", (0.01, -LIMITS["psnr_db"]), xycoords=("axes fraction", "data"), va="bottom")
    for axes in marks:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(0.08, 0.1)
    _legend(figure, points, series, [edge for edge, of in EDGES.items() if any(_edge(row) == of for row in rows)])
    figure.draw_without_rendering()  # settles the axes, so that distances on paper are known
    for axes, of_axes in marks.items():
        _number(axes, of_axes)
    figure.savefig(path, dpi=130)


def _edge(row: Row) -> dict[str, Any]:
    """The edge of a row's markers, where it is not the usual one."""
    return EDGES[DISPLACED] if row.displaced else EDGES[CODED] if row.by_codec else {}


def _draw_front(axes: Axes, rows: Sequence[Row], height: float, measure: str) -> None:
    """Joins the points that no other of `rows` beats by a measure of bytes. height: of those with the exact run's
    bits."""
    ends = [
        (getattr(row, measure).mean, height if row.vs_exact is None else row.vs_exact.mean)
        for row in rows
        if getattr(row, measure) is not None and not any(other.beats(row, (measure,)) for other in rows)
    ]
    axes.plot(*zip(*sorted(ends), strict=True), color="0.75", linewidth=0.9, zorder=0) if ends else None


def _height_of_identical(rows: Sequence[Row]) -> float:
    """Where identical results are drawn: above all that have a PSNR."""
    found = [row.vs_exact.mean for row in rows if row.vs_exact is not None]
    return max(found) + max(3.0, 0.15 * (max(found) - min(found))) if found else 100.0


def _look(point: int, series: int) -> dict[str, Any]:
    import matplotlib

    return {"color": matplotlib.colormaps["tab20"](point % 20), "marker": MARKERS[series % len(MARKERS)]}


def _draw(axes: Axes, x: Spread, y: Spread, look: Mapping[str, Any]) -> None:
    axes.errorbar(
        x.mean,
        y.mean,
        xerr=x.error,
        yerr=y.error,
        elinewidth=0.9,
        capsize=2,
        markersize=7,
        **{"markeredgecolor": "white", "markeredgewidth": 0.6, **look},
    )


def _number(axes: Axes, marks: Sequence[Mark]) -> None:
    """Labels marks with the numbers of their points; marks that would hide each other's label share one."""
    together: list[list[Mark]] = []
    for mark in marks:
        at = axes.transData.transform((mark.x, mark.y))
        for group in together:
            there = axes.transData.transform((group[0].x, group[0].y))
            if abs(at[0] - there[0]) < NEAR[0] and abs(at[1] - there[1]) < NEAR[1]:
                group.append(mark)
                break
        else:
            together.append([mark])
    for group in together:
        numbers = ", ".join(str(number) for number in sorted({mark.point for mark in group}))
        axes.annotate(numbers, group[0][:2], xytext=(5, 4), textcoords="offset points", fontsize=8)


def _legend(figure: Any, points: Sequence[str], series: Sequence[tuple[str, int]], edges: Sequence[str]) -> None:
    """edges: those that markers have, by their meaning."""
    from matplotlib.lines import Line2D

    def handle(colour: Any, marker: str, label: str, **edge: Any) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, linestyle="", markersize=7, label=label, **edge)

    handles = [handle(_look(n, 0)["color"], "s", f"{n + 1}  {point}") for n, point in enumerate(points)]
    handles += [
        handle("0.35", MARKERS[n % len(MARKERS)], f"{mask}, {steps} steps") for n, (mask, steps) in enumerate(series)
    ]
    handles += [handle("white", "o", edge, **EDGES[edge]) for edge in edges]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
