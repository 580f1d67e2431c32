"""Pictures of benchmarks, from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocodiff.console.plots import stacked_steps

COLOURS = {
    "flat": "#9a9a9a",
    "flat_serial": "#4d4d4d",
    "gloo": "#b07aa1",
    "mpi": "#59a14f",
    "tapa": "#f28e2b",
    "split": "#e15759",
    "auto": "#edc948",
    "bound": "#000000",
}
Rows = Sequence[Mapping[str, Any]]


def plot_alltoall(measured: Rows, where: str, path: Path) -> None:
    """Time against size for every variant, with TAPA's two phases and the bound (CoCoDiff's Figure 11)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["variant"] for row in measured):
        of_name = [row for row in measured if row["variant"] == name]
        sizes = [float(row["case"].removesuffix("MB")) for row in of_name]
        style = {"linestyle": ":", "linewidth": 2} if name == "bound" else {"marker": "o"}
        axes.plot(sizes, [row["median_s"] * 1e3 for row in of_name], label=name, color=COLOURS.get(name), **style)
        if name == "tapa":
            for key, label, colour in (
                ("phase1_s", "tapa, phase 1", "#a0cbe8"),
                ("phase2_s", "tapa, phase 2", "#4e79a7"),
            ):
                phases = [row[key] for row in of_name]
                if all(phase is not None for phase in phases):
                    axes.plot(sizes, [p * 1e3 for p in phases], label=label, color=colour, marker=".", linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="MB per rank", ylabel="milliseconds", title=f"all-to-all: {where}")
    every = sorted({float(row["case"].removesuffix("MB")) for row in measured})
    axes.set_xticks(every, [f"{size:g}" for size in every])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=110)


def plot_steps(measured: Rows, path: Path) -> None:
    """Bars of a step's time for every case: compute below, exposed communication above (CoCoDiff's Figures 1, 7, 8)."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in measured))
    figure = Figure(figsize=(9, 3.4 * len(cases)), layout="constrained")
    for axes, case in zip(figure.subplots(len(cases), squeeze=False)[:, 0], cases, strict=True):
        of_case = [row for row in measured if row["case"] == case]
        names = [row["variant"].replace(" ", "\n") for row in of_case]
        faster = [f"{1 / ratio:.2f}x\n" if (ratio := row["ratio_vs_flat_serial"]) else "" for row in of_case]
        notes = [f"{ratio}{row['communication_share']:.0%}" for ratio, row in zip(faster, of_case, strict=True)]
        stacked_steps(axes, names, of_case, "communication not hidden", "median_s", notes)
        axes.set_title(f"{case}\nspeed-up over flat_serial, share of communication", fontsize=9)
    figure.savefig(path, dpi=110)
