"""The lines of a sweep's results.jsonl: means over slices, differences from the exact run, tables, and a picture.

Differences are those of the same slice. The picture shows quality against bytes and against speed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.config.errors import UserError
from cocodiff.config.grouping import by_key
from cocodiff_eval.report.tables import MISSING, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES, PARETO = "results.jsonl", "pareto.png"  # names of files in the folder of results
LIMITS = {"psnr_db": 2.0, "ssim": 0.03, "mse": 2e-3}  # CoCoDiff, Table II: differences below these count as none
DIGITS = {"psnr_db": 2, "ssim": 4, "mse": 5}  # digits of tables after the point
NAMES = {"psnr_db": "PSNR dB", "ssim": "SSIM", "mse": "MSE"}  # heads of tables
# digits after the point, by the measure of cost
COSTS = {"volume": 3, "exposed": 3, "of whole": 3, "speed-up to flat": 2, "seconds": 2}
SHORT_S = 5.0  # seconds of a run; the times of shorter ones scatter too much for a small speed-up to be seen
BEATEN = "beaten by"  # head of the column that names a better point
WORDS = ("point", "mask", BEATEN)  # heads of columns that are not numbers
Line = Mapping[str, Any]  # a line of results.jsonl


class Spread(NamedTuple):
    """A mean over slices and its standard error, for a table."""

    mean: float  # over slices
    error: float | None  # standard error; None for a single slice

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Return the mean, with its standard error, of the values that are not None. Return None if there are none."""
        present = [value for value in values if value is not None]
        if not present:
            return None
        error = statistics.stdev(present) / len(present) ** 0.5 if len(present) > 1 else None
        return cls(statistics.fmean(present), error)

    def text(self, digits: int, unknown: str = "") -> str:
        """Return the mean and the standard error as text, with `unknown` in place of an error that is not known."""
        return f"{self.mean:.{digits}f}" + (unknown if self.error is None else f" +- {self.error:.{digits}f}")


@dataclass(frozen=True)
class Row:
    """The means of one point (set of settings) of a sweep over several slices, under one mask at one number of steps.

    They are compared with an exact run, which sends all tensors as they are.
    """

    point: str  # name of the point
    mask: str  # name of the mask
    steps: int  # number of denoising steps
    n: int  # number of slices
    quality: dict[str, Spread | None]  # psnr_db, ssim and mse; None if the truth is unknown
    difference: dict[str, Spread | None]  # psnr_db, ssim and mse minus those of the exact run of the same slice
    vs_exact: Spread | None  # PSNR in dB against the exact run, over the slices whose bits differ
    identical: int  # number of slices whose bits equal the exact run's
    # `volume`: bytes of q, k, v and o over the exact run's; None for one rank, which sends
    # nothing. `exposed`: those of these bytes that attention waited for, over the exact run's. `of whole`: the bytes
    # over those that all tokens unchanged would have taken on the point's own routes.
    cost: dict[str, Spread | None]  # bytes, speed-up and seconds, by the keys of COSTS
    displaced: bool  # True if some attention calls did not wait for their tensors

    def beats(self, other: Row, by: Sequence[str] = ("volume", "exposed")) -> bool:
        """Return True if this row's point dominates another: closer to the exact run, at costs that are no larger.

        Rows with another mask or number of steps are never compared, nor those without a value of a cost.

        Args:
            other: the other row.
            by: the keys of `cost` in which this row must not be larger.
        """
        if (self.mask, self.steps) != (other.mask, other.steps) or other.vs_exact is None:
            return False
        pairs = [(self.cost[name], other.cost[name]) for name in by]
        no_larger = all(a is not None and b is not None and a.mean <= b.mean for a, b in pairs)
        closer = self.identical == self.n or (self.vs_exact is not None and self.vs_exact.mean > other.vs_exact.mean)
        return closer and no_larger


def read_rows(folder: Path) -> list[Row]:
    """Return the rows (means over slices) of a sweep from its folder of results.

    Raise UserError if there is no results.jsonl, and for a damaged line.
    """
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
    """Raise ValueError for NaN and infinities, which JSON lacks. The JSON reader calls it with their text."""
    raise ValueError(f"JSON has no {number}")


def summarise(lines: Sequence[Line]) -> list[Row]:
    """Return a row of means over slices for each mask, number of steps and point, in this order.

    Points are in the order in which they first occur.

    Args:
        lines: of results.jsonl, one for each slice and point.
    """
    groups = by_key(((line["mask"], line["steps"], line["point"]), line) for line in lines)
    points = list(dict.fromkeys(line["point"] for line in lines))
    return [_row(groups[key]) for key in sorted(groups, key=lambda key: (*key[:2], points.index(key[2])))]


def _row(lines: Sequence[Line]) -> Row:
    """Return the row of means for the lines of one point, mask and number of steps.

    Args:
        lines: of results.jsonl, one for each slice.
    """

    def over(value: Callable[[Line], float | None]) -> Spread | None:
        """Return the mean of a value over the lines, with its standard error."""
        return Spread.of([value(line) for line in lines])

    def minus(line: Line, name: str) -> float | None:
        """Return the difference of a line's measure (such as "psnr_db") from its exact run's; None if unknown."""
        return None if line[name] is None else line[name] - line["exact"][name]

    def sent(line: Line, kind: str = "bytes") -> int:
        """Return the bytes of a line over all links together."""
        return sum((line[kind] if kind == "bytes" else line.get(kind, {})).values())

    def part(count: int, whole: int) -> float | None:
        """Return a fraction; None if the whole is 0."""
        return count / whole if whole else None

    return Row(
        **{name: lines[0][name] for name in ("point", "mask", "steps")},
        n=len(lines),
        quality={name: Spread.of([line[name] for line in lines]) for name in LIMITS},
        difference={name: Spread.of([minus(line, name) for line in lines]) for name in LIMITS},
        vs_exact=over(lambda line: line["psnr_vs_exact_db"]),
        identical=sum(line["psnr_vs_exact_db"] is None for line in lines),
        cost={
            "volume": over(lambda line: part(sent(line), sent(line["exact"]))),
            "exposed": over(lambda line: part(sent(line) - sent(line, "bytes_late"), sent(line["exact"]))),
            "of whole": over(lambda line: part(sent(line), sent(line, "bytes_whole"))),
            "speed-up to flat": over(lambda line: line["exact"]["seconds"] / line["seconds"]),
            "seconds": over(lambda line: line["seconds"]),
        },
        displaced=any("bytes_late" in line for line in lines),
    )


def beyond(row: Row) -> bool:
    """Return True if one of a row's differences from the exact run is larger than the paper's limit (LIMITS)."""
    pairs = [(row.difference[name], limit) for name, limit in LIMITS.items()]
    return any(found is not None and abs(found.mean) > limit for found, limit in pairs)


def tables(rows: Sequence[Row]) -> dict[str, dict[str, list[str]]]:
    """Return two tables of a sweep as text, by title: for each the cells of every column, by head.

    The first is quality, as in the paper's Table II, where `*` marks values beyond its limits. The second is bytes and
    speed, with the bytes that attention waited for if that is not all. "Beaten by" names the point closest to exact of
    those that send no more.
    """

    def shown(spreads: Iterable[Spread | None], digits: int, unknown: str = "") -> list[str]:
        return [MISSING if spread is None else spread.text(digits, unknown) for spread in spreads]

    of_runs = {name: [str(getattr(row, name)) for row in rows] for name in ("mask", "steps", "n")}
    quality = {"point": [row.point + (" *" if beyond(row) else "") for row in rows], **of_runs}
    quality |= {NAMES[name]: shown((row.quality[name] for row in rows), DIGITS[name]) for name in LIMITS}
    for name, limit in LIMITS.items():
        quality[f"d {NAMES[name]} ({limit:g})"] = shown((row.difference[name] for row in rows), DIGITS[name])
    cost = {"point": [row.point for row in rows], **of_runs}
    cost["vs exact dB"] = [_versus_exact(row, shown([row.vs_exact], 1)[0]) for row in rows]
    for name, digits in COSTS.items():
        if name != "exposed" or any(row.displaced for row in rows):
            cost[name] = shown((row.cost[name] for row in rows), digits, " +- ?" * (name == "speed-up to flat"))
    cost[BEATEN] = [better_than(row, rows) for row in rows]
    return {"Quality": quality, "Bytes and speed": cost}


def _versus_exact(row: Row, told: str) -> str:
    """Return a row's PSNR against the exact run as text, with the number of slices whose bits are equal.

    Args:
        told: the PSNR as text.
    """
    more = f" ({row.identical} identical)" if row.identical else ""
    return "identical" if row.identical == row.n else told + more


def better_than(row: Row, rows: Sequence[Row]) -> str:
    """Return the name of the point that is better than a row's and closest to the exact run; "" if there is none.

    A better point sends no more than this one, and attention waits for no more of its bytes.
    """
    better = [other for other in rows if other.beats(row)]
    closest = max(better, key=lambda one: math.inf if one.vs_exact is None else one.vs_exact.mean, default=None)
    return "" if closest is None else closest.point


NOTE = (
    "Means over n slices +- standard error. d: the point minus the exact run (flat) of the same slice; in brackets the "
    "paper's limits, * beyond one. Volume: bytes of q, k, v and o over the exact run's; of whole: over those of all "
    "tokens as they are along the point's own routes. Beaten by: a point that sends no more and is closer to exact."
)
NOTE_SHORT = (
    "Speed-ups are of runs of {:.1f} s and more, each made once: where they last less than {:g} s, differences within "
    "their standard error, or one of unknown error (?), say nothing."
)
NOTE_EXPOSED = (
    "Exposed: the bytes that attention waited for, over the exact run's; a point is beaten by one that has no more of "
    "these either."
)


def note(rows: Sequence[Row]) -> str:
    """Return the explanation of the tables' columns, for people."""
    seconds = min((spread.mean for row in rows if (spread := row.cost["seconds"]) is not None), default=SHORT_S)
    notes = [NOTE, *[NOTE_EXPOSED] * any(row.displaced for row in rows)]
    return " ".join([*notes, *[NOTE_SHORT.format(seconds, SHORT_S)] * (seconds < SHORT_S)])


def told(rows: Sequence[Row]) -> str:
    """Return the tables of a sweep and their explanation as text; plain ASCII apart from the user's names."""
    texts = [
        text_table([tuple(of), *zip(*of.values(), strict=True)], "".join("<" if one in WORDS else ">" for one in of))
        for of in tables(rows).values()
    ]
    return "\n\n".join([*texts, note(rows)])


# The picture ----------------------------------------------------------------------------------------------------------

MARKERS = "osD^vPX*"
NEAR = (14, 11)  # about the size of a label in pixels, across and up, at matplotlib's 100 pixels an inch
# labels of the horizontal axes of the panels
XLABELS = {
    "volume": "volume: bytes of q, k, v and o over the exact run's",
    "exposed": "exposed: bytes that attention waited for, over the exact run's",
    "speed-up to flat": "speed-up to the exact run (flat)",
}


def save_pareto(path: Path, rows: Sequence[Row]) -> None:
    """Save the picture of a sweep: panels of quality against bytes and against speed.

    The first shows PSNR against the exact run over volume, the last the change of PSNR against the truth over speed-up.
    If attention did not wait for all bytes, a panel between them shows PSNR over the bytes that it waited for.

    Each point has a colour and a number, and each mask (and number of steps) a marker. Bars are standard errors. A line
    joins the points that no other beats in what the panel shows. Markers in one place share a label with all their
    numbers.

    Args:
        path: the file.
        rows: a row for each point, mask and number of steps.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    points = list(dict.fromkeys(row.point for row in rows))
    series = list(dict.fromkeys((row.mask, row.steps) for row in rows))
    colours = [matplotlib.colormaps["tab20"](number % 20) for number in range(len(points))]
    panels = [name for name in XLABELS if name != "exposed" or any(row.displaced for row in rows)]
    figure = Figure(figsize=(1.5 + 5.5 * len(panels), 5.6), layout="constrained")
    marks = []
    for axes, name in zip(figure.subplots(1, len(panels)), panels, strict=True):
        drawn = _draw_speed(axes, rows) if name == "speed-up to flat" else _draw_bytes(axes, rows, name, series)
        for row, x, y in drawn:
            point = points.index(row.point)
            marker = MARKERS[series.index((row.mask, row.steps)) % len(MARKERS)]
            look = {"color": colours[point], "marker": marker, "markersize": 7, "markeredgecolor": "white"}
            axes.errorbar(x.mean, y.mean, xerr=x.error, yerr=y.error, elinewidth=0.9, capsize=2, **look)
            marks.append((axes, (x.mean, y.mean), point + 1))
        axes.set_xlabel(XLABELS[name])
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(0.08, 0.1)
    handles: list[tuple[Any, str, str]] = [
        (colour, "s", f"{n}  {point}") for n, (colour, point) in enumerate(zip(colours, points, strict=True), 1)
    ]
    handles += [("0.35", MARKERS[n % len(MARKERS)], f"{mask}, {steps} steps") for n, (mask, steps) in enumerate(series)]
    lines = [Line2D([], [], color=one, marker=of, linestyle="", markersize=7, label=name) for one, of, name in handles]
    figure.legend(handles=lines, loc="outside right upper", frameon=False, fontsize=9)
    figure.draw_without_rendering()  # fixes the axes, so that distances in pixels are known
    _number(marks)
    figure.savefig(path, dpi=130)


Places = list[tuple[Row, Spread, Spread]]  # rows with their places on a panel, across and up


def _draw_bytes(axes: Axes, rows: Sequence[Row], measure: str, series: Sequence[tuple[str, int]]) -> Places:
    """Draw the lines of a panel of PSNR over bytes. Return the place of each row there; its marker is not drawn yet.

    Results that are identical to the exact run stand above all others, as they have no finite PSNR.

    Args:
        axes: the panel.
        measure: key of `cost` that goes across, "volume" or "exposed".
        series: masks and numbers of steps, each of which has a line.
    """
    found = [row.vs_exact.mean for row in rows if row.vs_exact is not None]
    height = max(found) + max(3.0, 0.15 * (max(found) - min(found))) if found else 100.0
    axes.set_ylabel("PSNR against the exact run, dB")
    if any(row.identical == row.n for row in rows):
        axes.axhline(height, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate("identical bits", (0.01, height), xycoords=("axes fraction", "data"), va="bottom", color="0.4")
    measured = [(row, row.cost[measure]) for row in rows]
    places = [(row, x, row.vs_exact or Spread(height, None)) for row, x in measured if x is not None]
    for of in series:
        here = [(row, (x.mean, y.mean)) for row, x, y in places if (row.mask, row.steps) == of]
        ends = sorted(at for row, at in here if not any(other.beats(row, (measure,)) for other, _ in here))
        if ends:
            axes.plot(*zip(*ends, strict=True), color="0.75", linewidth=0.9, zorder=0)
    return places


def _draw_speed(axes: Axes, rows: Sequence[Row]) -> Places:
    """Draw the reference lines of the panel of PSNR over speed-up: those of the exact run, and the paper's limit.

    Return the rows that have both values, each with its speed-up and its change of PSNR in dB. Their markers are not
    drawn yet.
    """
    places = [(row, row.cost["speed-up to flat"], row.difference["psnr_db"]) for row in rows]
    axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    axes.axvline(1, color="0.6", linewidth=0.8, zorder=0)
    axes.set_ylabel("PSNR against the truth: change from exact, dB")
    if any(y is not None and y.mean < -LIMITS["psnr_db"] / 2 for _, _, y in places):
        axes.axhline(-LIMITS["psnr_db"], color="tab:red", linewidth=0.8, linestyle="--")
        axes.annotate("the paper's limit", (0.01, -LIMITS["psnr_db"]), xycoords=("axes fraction", "data"), va="bottom")
    return [(row, x, y) for row, x, y in places if x is not None and y is not None]


def _number(marks: Sequence[tuple[Axes, tuple[float, float], int]]) -> None:
    """Label markers of the picture with the numbers of their points. Markers that would hide each other's label share
    one.

    Args:
        marks: for each marker its panel, its place there and its point's number.
    """
    together = defaultdict(list)
    for axes, place, point in marks:
        across, up = axes.transData.transform(place)
        together[axes, round(across / NEAR[0]), round(up / NEAR[1])].append((place, point))
    for (axes, *_), group in together.items():
        numbers = ", ".join(map(str, sorted({point for _, point in group})))
        axes.annotate(numbers, group[0][0], xytext=(5, 4), textcoords="offset points", fontsize=8)
