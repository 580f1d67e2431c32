"""`pareto.png` and `report.html` of a sweep: quality against bytes, and quality against speed."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff_eval.report.templates import fill_template
from cocodiff_eval.sweep_summary import LIMITS, Row, Spread, cost_cells, note, quality_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
FACTS = ("model", "ranks", "machine", "seed", "strength", "cocodiff")


class Mark(NamedTuple):
    """A marker's place in a panel, and the number of its point."""

    x: float
    y: float
    point: int


def write_page(folder: Path, rows: Sequence[Row], settings: Mapping[str, Any], done: int) -> None:
    """Writes pareto.png, and report.html with that picture in it. settings: of the sweep; done: lines so far."""
    save_pareto(folder / "pareto.png", rows)
    picture = base64.b64encode((folder / "pareto.png").read_bytes()).decode("ascii")
    facts = {name: settings[name] for name in FACTS} | {"runs": f"{done} of {settings['lines']}"}
    page = fill_template(
        "sweep.html.j2",
        facts=facts,
        picture=f"data:image/png;base64,{picture}",
        note=note(rows),
        tables={"Quality": quality_cells(rows), "Bytes and speed": cost_cells(rows)},
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


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
