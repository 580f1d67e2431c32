"""`cocodiff plan --paper`: the CoCoDiff paper's figures beside what the plan says of the same cases."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from cocodiff.config import load_machine
from cocodiff.console.terminal import say
from cocodiff.loading.model_shapes import load_shape
from cocodiff.outputs.folder import OutputFolder
from cocodiff.outputs.settings import write_document
from cocodiff.topology.machine import Machine
from cocodiff_studies.paper.figures import (
    ABOUT_FIGURE_11,
    BASELINES,
    DEGREES,
    FITTED,
    READINGS,
    Paper,
    figure_11,
    fit_figure_11,
    rows_of,
)


def run_paper(values: dict[str, Any]) -> None:
    machine = load_machine(values["machine"])
    output = OutputFolder(values["out"], values["overwrite"])
    readings, lines = read_figure_11(machine)
    say("\n".join(lines))
    fit = readings["per rank", "flat_serial"]
    paper = Paper(fit.constants.machine(machine), cache(load_shape))
    say("\npredicted with these constants; the baseline read as one that serves one peer at a time (flat_serial) and")
    say("as one that serves all at once (flat); ranks beyond the paper's degree of Ulysses, or the heads, are in rings")
    say(f"{'':<66}{'paper':>22}{'flat_serial':>13}{'flat':>8}")
    rows = rows_of(paper, say_row)
    say("degrees of Ulysses in the paper: " + ", ".join(f"{degree} on {n} node(s)" for n, degree in DEGREES.items()))
    plan = {
        "schema": 1,
        "constants": asdict(fit.constants),
        "rows": rows,
        "readings": [
            {
                "message_size": reading,
                "baseline": baseline,
                "rms": one.rms(figure_11(READINGS[reading][0], baseline)),
                **asdict(one.constants),
            }
            for (reading, baseline), one in readings.items()
        ],
    }
    with output.held(), output.writing():
        write_document(output.open(), "plan.json", plan, values)
        output.publish()
    say(f"results: {output.final / 'plan.json'}")


def say_row(row: dict[str, Any]) -> None:
    shown = [shown_as(row[name], row["figure"] == "1") for name in BASELINES]
    say(f"{row['what']:<66}{row['paper']:>22}{shown[0]:>13}{shown[1]:>8}")


def read_figure_11(machine: Machine) -> tuple[dict[tuple[str, str], Any], list[str]]:
    """The fit of every reading, and the table of the one that is taken."""
    fits = {(reading, name): fit_figure_11(machine, reading, name) for reading in READINGS for name in BASELINES}
    lines = [f"Figure 11 fitted with {', '.join(FITTED)} (of NICs as of Xe links), for every reading:"]
    lines.append(f"{'message size':<26}{'baseline':<14}{'latency us':>11}{'sibling':>9}{'slower':>9}{'rms':>8}")
    for (reading, name), fit in fits.items():
        c = fit.constants
        rms = fit.rms(figure_11(READINGS[reading][0], name))
        lines.append(f"{reading:<26}{name:<14}{c.latency_us:>11.0f}{c.sibling:>9.3f}{c.plane:>9.3f}{rms:>8.0%}")
    lines.append("taken: per rank, flat_serial")
    lines.append(f"{'':<26}{'paper':>10}{'plan':>10}{'off by':>9}")
    measured = figure_11(READINGS["per rank"][0], "flat_serial")
    for name, one, seconds in zip(ABOUT_FIGURE_11, measured, fits["per rank", "flat_serial"].predicted, strict=True):
        unit = 1.0 if one.over is not None else 1e3
        lines.append(f"{name:<26}{one.value * unit:>10.2f}{seconds * unit:>10.2f}{seconds / one.value - 1:>9.0%}")
    return fits, lines


def shown_as(value: float | None, share: bool) -> str:
    return "-" if value is None else f"{value:.0%}" if share else f"{value:.2f}"
