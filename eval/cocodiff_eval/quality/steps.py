"""What was sent step by step: the profiles of lossy runs (`Engine.drift_profile`), averaged and as parts of a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Profile = Sequence[Mapping[str, Any]]


def mean_profile(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Profiles of several runs as one: at each step the mean of the values that are there, of fractions by name each
    by itself."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for profile in profiles:
        for row in profile:
            steps.setdefault(row["step"], []).append(row)
    return [
        {"step": step, **{name: _mean([row.get(name) for row in of_step]) for name in of_step[0] if name != "step"}}
        for step, of_step in steps.items()
    ]


def _mean(values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if not there:
        return None
    if isinstance(there[0], Mapping):
        names = dict.fromkeys(name for value in there for name in value)
        return {name: sum(value.get(name, 0.0) for value in there) / len(there) for name in names}
    return sum(there) / len(there)


# Figures of the report ------------------------------------------------------------------------------------------------

WIDTH, LEFT = 420, 34  # pixels of a figure, and of them those left of its bars
STRIP, BARS = (16, 46), (66, 146)  # top and bottom of the tensors' strip and of the bars of bytes


class StepsFigure(NamedTuple):
    """One preset's steps as areas of an SVG picture. paths: of each kind of tensor and of bytes; told: the means over
    the steps, in words; last: the last step's number."""

    mode: str
    paths: dict[str, str]
    told: str
    last: int


def step_figures(rows: Sequence[Mapping[str, Any]]) -> list[StepsFigure]:
    """A figure for each preset of some rows of `metrics.json` that coded or displaced tensors, over all these rows."""
    profiles: dict[str, list[Profile]] = {}
    for row in rows:
        if row.get("drift") and "sent_fraction" in row["drift"][0]:
            profiles.setdefault(row["mode"], []).append(row["drift"])
    return [_figure(mode, mean_profile(of_mode)) for mode, of_mode in profiles.items()]


def _figure(mode: str, steps: Profile) -> StepsFigure:
    tensors = list(zip(*map(shares_of_tensors, steps), strict=True))
    sent, waited = ([row[name] for row in steps] for name in ("sent_fraction", "exposed_fraction"))
    late = [all_of_it - part for all_of_it, part in zip(sent, waited, strict=True)]
    areas = [*_stacked(tensors, *STRIP), *_stacked([waited, late], *BARS)]
    paths = dict(zip(("whole", "coded", "displaced", "waited", "late"), areas, strict=True))
    mean = [sum(values) / len(steps) for values in (*tensors, sent, waited)]
    kinds = [f"{share:.3f} {kind}" for share, kind in zip(mean, ("whole", "coded", "displaced"), strict=False) if share]
    told = f"of all tensors {', '.join(kinds)}; of whole bytes {mean[3]:.3f} sent, {mean[4]:.3f} waited for"
    return StepsFigure(mode, paths, told, steps[-1]["step"])


def shares_of_tensors(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of one step's tensors those that travelled whole and those that were coded, where attention waited for them, and
    those that were displaced. With a codec whatever is displaced is coded."""
    coded, displaced = row["coded_fraction"], row["displaced_fraction"]
    return 1 - max(coded, displaced), max(0.0, coded - displaced), displaced


def _stacked(parts: Sequence[Sequence[float]], top: float, bottom: float) -> list[str]:
    """Bars of some parts of a whole, one on the other, for each step: the outline of each part."""
    count, paths = len(parts[0]), [""] * len(parts)
    wide = (WIDTH - LEFT - 6) / count
    for step in range(count):
        y = float(bottom)
        for place, part in enumerate(parts):
            height = part[step] * (bottom - top)
            if height > 0:
                x, width = LEFT + step * wide, max(wide - 1, 0.7 * wide)
                paths[place] += f"M{x:.1f} {y:.1f}v{-height:.2f}h{width:.1f}v{height:.2f}z"
            y -= height
    return paths
