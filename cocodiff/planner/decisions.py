"""Records of what `arrival: adaptive` decided in earlier runs, since a plan has no tensors to decide by.

A file of decisions is YAML with a list `runs`. Each has the settings that decisions depend on (codec, predictor, tau),
a description of the run (`about`), and `displaced`: for every step a mapping from the tensors that are displaced
together (qkvo, or none) to the part of the attention calls. `cocodiff plan --decisions` writes one from the
metrics.json of a run. The shipped ones are of the embedded model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cocodiff.config.config import Config, find_shipped, read_yaml
from cocodiff.config.errors import UserError
from cocodiff.config.files import read_json

NONE = "none"
SELDOM = 0.02  # part of a run's calls: rarer sets are planned as a frequent one that waits for more


@dataclass(frozen=True)
class Decisions:
    """The tensors that `arrival: adaptive` displaced in one recorded run (attention did not wait for them), with the
    settings of that run."""

    codec: str  # the setting `codec` of the run
    predictor: str  # its setting `predictor`
    tau: float  # its setting `tau`: tensors are displaced below this relative change
    about: str  # a description of the run
    displaced: Sequence[Mapping[str, float]] = field(hash=False)  # by step: part of the calls by displaced tensors

    @property
    def steps(self) -> int:
        """The number of steps of the recorded run."""
        return len(self.displaced)

    def title(self) -> str:
        """Return a line that describes the recorded run: its model, codec, tau and steps."""
        return f"{self.about}: codec {self.codec}, tau {self.tau:g}, {self.steps} steps"

    def over(self, steps: int) -> list[Mapping[str, float]]:
        """Return the decisions for a run with another number of steps: for every step, the part of the attention calls
        by displaced tensors.

        Each step has those of the recorded step at the same relative position.
        """
        last = max(1, steps - 1)
        return [self.displaced[round(step * (self.steps - 1) / last)] for step in range(steps)]

    def distance(self, config: Config, steps: int) -> tuple[float, ...]:
        """Return how far a run's settings are from the recorded ones, as a tuple to sort by: codec, predictor, tau,
        steps."""
        far_off = abs(math.log(self.tau / config.tau)), abs(math.log(self.steps / steps))
        return float(self.codec != config.codec), float(self.predictor != config.predictor), *far_off

    def record(self) -> dict[str, Any]:
        """Return the mapping that stands for this run in a file of decisions."""
        rows = [{names or NONE: round(part, 4) for names, part in step.items()} for step in self.displaced]
        return {**{name: getattr(self, name) for name in ("codec", "predictor", "tau", "about")}, "displaced": rows}


def decisions_of(config: Config, steps: int, given: Sequence[Decisions] = ()) -> Decisions | None:
    """Return the recorded run that is nearest to a run's settings; None if these do not have `arrival: adaptive`.

    Args:
        config: the run's settings, in which `codec: auto` is decided.
        steps: number of steps of the run.
        given: recorded runs to choose from; () for the shipped ones.
    """
    if config.arrival != "adaptive":
        return None
    known = given or _read(find_shipped("decisions", "decisions", "embedded"))
    return min(known, key=lambda one: one.distance(config, steps))


def read_decisions(paths: Sequence[str]) -> tuple[Decisions, ...]:
    """Return the recorded runs in files: in files of decisions, and in the metrics.json of runs with `arrival:
    adaptive`.

    Raise UserError for other files.
    """
    return tuple(one for path in paths for one in _read(Path(path)))


def _read(path: Path) -> tuple[Decisions, ...]:
    """Return the recorded runs in one file. Raise UserError if it cannot be read or holds something else."""
    document = read_json(path) if path.suffix == ".json" else read_yaml(path)
    try:
        if path.suffix == ".json":
            return _of_metrics(document)
        return tuple(_decisions(run, run["displaced"]) for run in document["runs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"--decisions {path}: neither a file of decisions nor the metrics.json of a run with arrival adaptive "
            f"({error!r:.150})"
        ) from error


def as_file(*runs: Decisions) -> str:
    """Return the text of a file of decisions, YAML, with the given runs."""
    return yaml.safe_dump({"runs": [one.record() for one in runs]}, sort_keys=False, default_flow_style=None, width=120)


def _decisions(about: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> Decisions:
    """Build a record from an entry of a file. Raise ValueError if the parts of a step do not sum up to 1.

    Args:
        about: the entry, with codec, predictor, tau and about.
        rows: for every step, the part of the calls by displaced tensors, or by "none".
    """
    displaced = [{"" if names == NONE else str(names): float(part) for names, part in row.items()} for row in rows]
    if not displaced or any(abs(sum(row.values()) - 1) > 0.01 for row in displaced):
        raise ValueError("the parts of a step's calls do not sum up to 1")
    return Decisions(about["codec"], about["predictor"], float(about["tau"]), str(about["about"]), displaced)


def _of_metrics(document: Mapping[str, Any]) -> tuple[Decisions, ...]:
    """Return one record for each preset that displaced tensors, from a run's metrics.json, as means over its images.

    Raise ValueError if there is no such preset, or if one has `codec: auto`.
    """
    of_presets: dict[str, list[Any]] = {}
    for image in document["images"]:
        if any(set(row.get("displaced_sets", ())) - {""} for row in image.get("drift", ())):
            of_presets.setdefault(image["mode"], []).append([row["displaced_sets"] for row in image["drift"]])
    if not of_presets:
        raise ValueError("no image has steps that displaced anything")
    found = []
    for preset, runs in of_presets.items():
        names = ("codec", "predictor", "tau")
        given = {name: document["config"][name] for name in names if document["config"].get(name) is not None}
        config = Config.preset(preset, **given)
        about = {name: getattr(config, name) for name in names}
        if config.codec == "auto":
            raise ValueError(f"preset {preset} has codec auto: name the codec of a run whose decisions are replayed")
        rows = [_mean(of_step) for of_step in zip(*runs, strict=True)]
        found.append(_decisions(about | {"about": f"{document['config']['model']} model, {len(runs)} image(s)"}, rows))
    return tuple(found)


def _mean(sets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean part of the calls for each set of displaced tensors, over several records of one step."""
    names = sorted({name for one in sets for name in one})
    return {name: sum(one.get(name, 0.0) for one in sets) / len(sets) for name in names}


def without_seldom(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the decisions of all steps with fewer sets of displaced tensors, so that fewer kinds of calls are planned.

    A rare set is counted as the largest frequent set within it, whose calls wait for more tensors.

    Args:
        steps: for every step, the part of the attention calls by displaced tensors.
    """
    total: dict[str, float] = {"": math.inf}
    for step in steps:
        for names, part in step.items():
            total[names] = total.get(names, 0.0) + part / len(steps)
    kept = [names for names, part in total.items() if part >= SELDOM]
    found: list[Mapping[str, float]] = []
    for step in steps:
        parts: dict[str, float] = {}
        for names, part in step.items():
            stands = max((one for one in kept if set(one) <= set(names)), key=len)
            parts[stands] = parts.get(stands, 0.0) + part
        found.append(parts)
    return found
