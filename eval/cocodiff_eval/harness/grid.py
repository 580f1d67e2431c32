"""The points of a sweep: settings of the engine to compare, from the sections `base`, `grid` and `points` of its file.

    base: {exchange: flat, selection: v_major}        # settings of all points that name no preset
    grid: {schedule: [linear, fixed], ratio: [.5, .75], mask: [block, center], steps: [20]}
    points:
      - {name: theirs, preset: cocodiff}              # further points, one by one
      - {schedule: reverse}
      - {name: rings, preset: flat, ring: 2, placement: usp, chunks: 2}

Every combination of the settings in `grid` is a point, and so is every entry of `points`. `steps` and `mask` are not
settings of a point: every point runs at each number of steps and under each mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from cocodiff.config.config import Config
from cocodiff.config.errors import UserError, check_keys
from cocodiff.config.setting import settings_of
from cocodiff.jobs.options import check_effects, engine_record, engine_settings
from cocodiff_eval.harness.session import EXACT

SECTIONS = ("base", "grid", "points")  # of a sweep's file
OF_RUNS = ("steps", "mask")  # keys that every point is combined with
MOST_RUNS = 10_000  # most runs of one slice: points, times numbers of steps, times masks
DEFAULTS: dict[str, list[Any]] = {"steps": [50], "mask": ["block"]}  # values of OF_RUNS that are not given
EXACT_RUN = "exact run"  # name of the run that points are compared with, unless a point has its settings


@dataclass(frozen=True)
class Point:
    """A combination of the engine's settings in a sweep."""

    name: str  # unique within the sweep
    config: Config  # all settings of the engine
    settings: dict[str, Any]  # settings that the sweep's file gives, `preset` included

    @property
    def lossy(self) -> bool:
        """True if attention with these settings is not exact, since tokens are left out or coded with loss.

        On a single rank neither changes anything.
        """
        return not self.config.exact_attention


@dataclass(frozen=True)
class SweepGrid:
    """The runs of a sweep: every point at each number of steps and under each mask."""

    points: list[Point]  # the combinations of settings
    steps: list[int]  # numbers of denoising steps
    masks: list[str]  # "block", "center" or paths of mask files
    presets: dict[str, Config]  # settings by point; the exact run's come first, by EXACT_RUN or a point's name


def read_grid(values: Mapping[str, Any]) -> SweepGrid:
    """Return the points, numbers of steps and masks of the sweep that the options describe.

    Raise UserError for unknown keys, with a suggestion, for invalid values and for too many runs.

    Args:
        values: options by name, among them the sections of the sweep's file. Engine settings among them apply to all
            points, and `steps` and `mask` replace those of the file.
    """
    varied = ["preset", *(name for name, one in settings_of(engine_record()).items() if one.given == "sweep")]
    base = _mapping(values["base"], "base", [*varied, *OF_RUNS])
    grid = _mapping(values["grid"], "grid", [*varied, *OF_RUNS])
    for key, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise UserError(f"grid: {key} is {choices!r}: give a list of values")
    listed = values["points"] or []
    if not isinstance(listed, list):
        raise UserError(f"points is {listed!r}: give a list of settings")
    entries = [_mapping(one, f"points, number {n}", ["name", *varied]) for n, one in enumerate(listed, 1)]
    axes = {key: choices for key, choices in grid.items() if key in varied}
    of_runs = {key: _of_runs(key, values, base, grid) for key in OF_RUNS}
    _check_size({key: len(choices) for key, choices in axes.items()}, len(entries), of_runs)
    if axes or not entries:
        entries = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())] + entries
    settings = {key: value for key, value in base.items() if key in varied}
    engine = engine_settings(dict(values))
    points = _unique([_point(entry, settings, engine) for entry in entries])
    exact = engine_record().preset(EXACT, **engine)
    same = next((point.name for point in points if point.config == exact), EXACT_RUN)
    presets = {point.name: point.config for point in _unique([Point(same, exact, {}), *points])}
    return SweepGrid(points, of_runs["steps"], of_runs["mask"], presets)


def _of_runs(key: str, values: Mapping[str, Any], base: Mapping[str, Any], grid: Mapping[str, Any]) -> list[Any]:
    """Return the numbers of steps or the masks of a sweep, each once.

    They are the command line's, else the grid's, else the base's, else DEFAULTS. Raise UserError for an invalid value.

    Args:
        key: "steps" or "mask".
        values: options of the command line.
        base: the section `base` of the sweep's file.
        grid: the section `grid` of it.
    """
    found = values[key] or grid.get(key) or ([base[key]] if key in base else DEFAULTS[key])
    for one in found:
        if key == "steps" and (type(one) is not int or one < 1):
            raise UserError(f"steps {one!r}: give a whole number of at least 1")
        if key == "mask" and not isinstance(one, str):
            raise UserError(f"mask {one!r}: give block, center or the path of a mask file")
    return list(dict.fromkeys(found))


def _check_size(axes: Mapping[str, int], listed: int, of_runs: Mapping[str, Sequence[Any]]) -> None:
    """Raise UserError if each slice would have more than MOST_RUNS runs.

    Args:
        axes: number of values of each setting in `grid`.
        listed: number of entries of `points`.
        of_runs: the numbers of steps and the masks, by OF_RUNS.
    """
    points = listed + (math.prod(axes.values()) if axes or not listed else 0)
    runs = points * math.prod(len(choices) for choices in of_runs.values())
    if runs > MOST_RUNS:
        sizes = {**axes} | {key: len(choices) for key, choices in of_runs.items() if len(choices) > 1}
        told = " x ".join(f"{count} of {key}" for key, count in sizes.items())
        raise UserError(
            f"the sweep has {runs} runs of each slice ({told or f'{listed} points'}), and at most {MOST_RUNS} are "
            f"taken: name fewer values, or split it into several sweeps"
        )


def _mapping(section: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a section of the sweep's file, {} for None. Raise UserError if it is no mapping or has unknown
    keys.

    Args:
        section: the section as YAML gives it.
        where: name of the section, for errors.
        known: all allowed keys.
    """
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise UserError(f"{where} is {section!r}: give key: value pairs")
    check_keys(map(str, section), known, where)
    return dict(section)


def _point(entry: Mapping[str, Any], base: Mapping[str, Any], engine: Mapping[str, Any]) -> Point:
    """Return a sweep's point for one entry of its file. Raise UserError, with the point's name, for a wrong setting.

    A setting is wrong if it is invalid. It is also wrong if it does nothing, because it needs another value of some
    other setting.

    Args:
        entry: the point's own settings, with or without `name`. They take precedence over those of its preset, or over
            `base` if it names no preset.
        base: settings of the section `base`.
        engine: settings for all points, which take precedence over everything.
    """
    own = {key: value for key, value in entry.items() if key != "name"}
    words = [str(value) if key == "preset" else f"{key} {value}" for key, value in own.items()]
    name = str(entry.get("name") or ", ".join(words) or "base")
    settings = own if "preset" in own else {**base, **own}
    over_preset = {key: value for key, value in settings.items() if key != "preset"} | dict(engine)
    try:
        record = engine_record()
        config = record.preset(settings["preset"], **over_preset) if "preset" in settings else record(**over_preset)
    except (UserError, TypeError) as error:
        raise UserError(f"point {name}: {error}") from error
    check_effects([key for key in own if key != "preset"], [config], f"point {name}: ")
    return Point(name, config, settings)


def _unique(points: Sequence[Point]) -> list[Point]:
    """Return the points of a sweep without repetitions. Raise UserError if two of one name differ in their settings."""
    by_name: dict[str, Point] = {}
    for point in points:
        other = by_name.setdefault(point.name, point)
        if other.config != point.config:
            raise UserError(f"two points are called {point.name}: give each a name of its own")
    return list(by_name.values())
