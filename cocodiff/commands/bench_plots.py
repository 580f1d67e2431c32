"""Pictures of benchmarks, from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "flat": "#9a9a9a", "flat_serial": "#4d4d4d", "gloo": "#b07aa1", "mpi": "#59a14f", "tapa": "#f28e2b",
    "split": "#e15759", "auto": "#edc948", "bound": "#000000",
}  # fmt: skip
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
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=110)
