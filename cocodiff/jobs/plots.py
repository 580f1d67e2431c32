"""Pictures of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def plot_presets(rows: Rows, where: str, path: Path) -> None:
    """A step's compute and open communication for every preset, and the bytes it sends over each class of links."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if "step_s" in row]
    names = [row["preset"] for row in shown]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, sent = figure.subplots(1, 2)
    compute, whole = ([row[key] * 1e3 for row in shown] for key in ("compute_s", "step_s"))
    opened = [max(0.0, w - c) for w, c in zip(whole, compute, strict=True)]
    times.bar(names, compute, color="#4e79a7", label="compute")
    times.bar(names, opened, bottom=compute, color="#f28e2b", label="communication that nothing hides")
    for x, (row, top) in enumerate(zip(shown, whole, strict=True)):
        note = f"{row['over_flat']:.2f}x" + ("" if row["exact"] else "\nlossy")
        times.text(x, top, note, ha="center", va="bottom", fontsize=8)
    times.set(ylabel="ms a step", ylim=(0, max(whole) * 1.25), title="time (speed-up over flat)")
    times.legend(fontsize=8)
    below = [0.0] * len(shown)
    colours = {"sibling": "#76b7b2", "plane": "#59a14f", "cross_plane": "#edc948", "node": "#e15759"}
    for link, colour in colours.items():
        count = [row["bytes_per_step"][link] / 1e9 for row in shown]
        sent.bar(names, count, bottom=below, color=colour, label=link)
        below = [a + b for a, b in zip(below, count, strict=True)]
    sent.set(ylabel="GB a step, all ranks", title="payload by class of link", ylim=(0, max(below) * 1.25 or 1))
    sent.legend(fontsize=8, ncols=2)
    for axes in (times, sent):
        axes.tick_params(axis="x", labelrotation=20)
    figure.suptitle(where, fontsize=10)
    figure.savefig(path, dpi=110)


def plot_losses(rows: Rows, path: Path) -> None:
    """A training's losses, on the patches that it saw and on those that were held out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    axes.plot(steps[1:], [row["loss"] for row in rows[1:]], label="patches of the training")
    axes.plot(steps, [row["held_out_loss"] for row in rows], label="held-out patches")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=110)
