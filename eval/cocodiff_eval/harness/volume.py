"""What `--axes` and `--hidden_test` ask of a volume, and what is learnt of it before it is restored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError, check_choice
from cocodiff_eval.data.masks import Mask
from cocodiff_eval.data.reoriented import AXES, MaskStatistics, reoriented_shape
from cocodiff_eval.data.slices import SMALLEST_SIDE, Stack
from cocodiff_eval.data.volume import format_shape
from cocodiff_eval.quality.fusing import Intervals, Lead, Mixture
from cocodiff_eval.quality.hidden import Hidden, Survey, hide

AUTO = "auto"
OWN = "cocodiff"  # the mean, beside methods without a model
ALONE = "the model alone"  # its axes without the methods that have none
CUT = "; parts of the mask find too few places whole, so these regions are smaller: errors under it may be larger"
THROUGH = 0.9  # of the masked voxels see nothing known along z: other axes are not worth their time
TENTH = 10  # of the job's samples of slices, one in so many is made for the test
LEAST, MOST = 12, 32  # tested slices along each axis


@dataclass(frozen=True)
class Volume:
    """A volume that is restored along several axes, or tested on hidden regions, or whose samples are kept.

    axes: those that may be taken; chosen: whether the test chooses among them, else all are; tested: whether regions
    are hidden; statistics, read_mask: of the mask as it is, also where a slice along z is masked wholly.
    """

    axes: tuple[str, ...]
    chosen: bool
    tested: bool
    statistics: MaskStatistics
    read_mask: Callable[[int], np.ndarray]

    def restores(self, axes: Sequence[str]) -> bool:
        """Whether these axes restore every masked voxel: on one of them no slice is masked wholly."""
        return any(not self.statistics.full(axis).any() for axis in axes)

    def sampled(self, samples: int) -> int:
        """Samples of each slice that the test makes along each axis: as many as each of all axes has."""
        return max(1, round(samples / len(self.axes)))

    def regions(self, read: Callable[[int], np.ndarray], samples: int, seed: int) -> tuple[Hidden, ...]:
        """What is hidden in each round of the test; reads the volume and its mask once. read: a slice along z."""
        slices = len(self.statistics.restorable("z")) or self.statistics.shape[0]
        budget = samples * slices // (TENTH * self.sampled(samples) * len(self.axes))
        survey = Survey.of(read, self.read_mask, self.statistics.shape)
        return hide(survey, min(MOST, max(LEAST, budget)), seed, self.axes)


@dataclass(frozen=True)
class HiddenRegionReport:
    """What the test has shown of a volume. weights: of the axes that are taken and of the methods without a model, in
    the mean; regions, voxels: that were tested; psnr_db: of each method on the same voxels, from the best to the worst;
    intervals: of the mean; mixture: weights voxel by voxel; lead: of the mean over the best method without a model;
    cut: see `Hidden`; of: what was tested. Without a test weights alone."""

    weights: Mapping[str, float]
    regions: int = 0
    voxels: int = 0
    psnr_db: Mapping[str, float] | None = None
    intervals: Intervals | None = None
    mixture: Mixture | None = None
    lead: Lead | None = None
    cut: bool = False
    of: str = "volume"

    @property
    def axes(self) -> dict[str, float]:
        """Each axis's share of the model's part."""
        found = {axis: weight for axis, weight in self.weights.items() if axis in AXES}
        total = sum(found.values())
        return {axis: weight / total if total else 1 / len(found) for axis, weight in found.items()}

    @property
    def others(self) -> list[str]:
        """The methods without a model that the mean takes in."""
        return [name for name in self.weights if name not in AXES]

    def line(self, where: str) -> str:
        """What the user is told first."""
        figures = dict(self.psnr_db or {})
        if not figures:
            return f"{where}: no region of this {self.of} could be hidden: nothing is known of how good it is restored"
        others = [name for name in figures if name not in (OWN, ALONE, *map(along, AXES))]
        told = ", ".join(f"{name} {figures[name]:.1f}" for name in ([ALONE] if ALONE in figures else []) + others)
        found = f"on {self.regions} hidden regions of this {self.of}: {OWN} {figures[OWN]:.1f} dB, {told}"
        kind, lead = CUT if self.cut else "", self.lead
        if lead is None:
            return f"{where}: {found}{kind}"
        ahead, behind, low, high, wins = OWN, others[0], lead.low, lead.high, lead.wins
        if lead.db < 0:
            ahead, behind, low, high, wins = behind, ahead, -high, -low, lead.of - wins
        told = f"{found}; {ahead} is ahead of {behind} by {abs(lead.db):.1f} dB, in {wins} of {lead.of} regions"
        expected = "too few to tell what is so under the mask"
        if math.isfinite(low):
            expected = f"under the mask {low:.1f} to {high:.1f} dB are to be expected"
        return f"{where}: {told}; {expected}{'' if lead.is_clear else ': no clear winner'}{kind}"

    def weights_line(self, where: str) -> str:
        slices = ", ".join(f"{axis} {weight:.2f}" for axis, weight in self.weights.items() if axis in AXES)
        others = [f"{name} {w:.2f}" for name, w in self.weights.items() if name not in AXES and w >= 0.005]
        return f"{where}: mean of slices along {', '.join([slices, *others])} (weights)"

    def record(self, name: str, mask: str, where: str) -> dict[str, Any]:
        """For metrics.json."""
        lead = self.lead
        return {
            "name": name,
            "mask": mask,
            "axes": {axis: round(weight, 4) for axis, weight in self.axes.items()},
            "weights": {one: round(weight, 4) for one, weight in self.weights.items()},
            "hidden_regions": self.regions,
            "hidden_voxels": self.voxels,
            "hidden_psnr_db": None if self.psnr_db is None else {one: round(db, 3) for one, db in self.psnr_db.items()},
            "better_in_regions": [lead.wins, lead.of] if lead else None,
            "lead_db": round(lead.db, 3) if lead else None,
            "expected_lead_db": [round(lead.low, 3), round(lead.high, 3)] if lead and math.isfinite(lead.low) else None,
            "intervals": None if self.intervals is None else self.intervals.record(),
            "verdict": self.line(where) if self.psnr_db is not None else None,
        }


def along(axis: str) -> str:
    """The name of the model's restorations along one axis alone, among figures."""
    return f"{OWN} along {axis} alone"


def is_deep(stack: Stack) -> bool:
    """Whether a stack is a volume: it may have slices along each axis, is shown as one, and its slices are compared."""
    return stack.ndim == 3 and len(stack) >= SMALLEST_SIDE


def words_of(values: Mapping[str, Any]) -> list[str]:
    """What `--axes` names, `z y x` and `z,y,x` alike. Raises UserError for other words."""
    words = [word for one in values["axes"] or () for word in one.split(",") if word]
    for word in words:
        check_choice("axes", word, (*AXES, AUTO))
    if len(words) > 1 and AUTO in words:
        raise UserError(f"--axes {' '.join(words)}: {AUTO} chooses among all axes: name it alone, or axes without it")
    return list(dict.fromkeys(words))


def axes_of(values: Mapping[str, Any], stack: Stack) -> tuple[tuple[str, ...], bool]:
    """The axes that slices of a stack may be taken along, and whether a test is to choose among them.

    Raises UserError for an axis whose slices are too small.
    """
    words, deep = words_of(values), is_deep(stack)
    if not words and deep and values["samples"] > 1 and values["hidden_test"] is not False and not values["quality"]:
        words = [AUTO]
    if words == [AUTO]:
        return (tuple(AXES), True) if deep else (("z",), False)
    for axis in words:
        _, rows, columns = reoriented_shape(stack.shape, axis)
        if (stack.ndim == 2 and axis != "z") or min(rows, columns) < SMALLEST_SIDE:
            raise UserError(
                f"--axes {axis}: {stack.path} has {format_shape(stack.shape[-stack.ndim :])} voxels, and slices along "
                f"{axis} need {SMALLEST_SIDE} x {SMALLEST_SIDE} at least: restore it along z"
            )
    return tuple(words) or ("z",), False


def volume_of(values: Mapping[str, Any], stack: Stack, mask: Mask) -> tuple[Volume | None, Mask]:
    """How a stack is restored as a volume, None where it is slice by slice along z alone; and the mask of what its axes
    restore. Raises UserError for options that do not fit together."""
    axes, chosen = axes_of(values, stack)
    usual = is_deep(stack) and (chosen or (values["samples"] > 1 and not values["quality"]))
    tested = usual if values["hidden_test"] is None else values["hidden_test"]
    if chosen and not tested:
        raise UserError(f"--axes {AUTO} chooses by hidden regions: leave --hidden_test away, or name the axes")
    if values["samples"] < len(axes) and not chosen:
        raise UserError(f"--samples {values['samples']}: {len(axes)} axes need a sample each at least")
    if values["samples"] * len(AXES) > 1023 and (tested or axes != ("z",)):
        raise UserError(f"--samples {values['samples']}: at most {1023 // len(AXES)} are possible on several axes")
    if axes == ("z",) and not tested:
        return None, mask
    if values["quality"]:
        raise UserError(
            "--quality chooses a setting slice by slice: it goes with --axes z alone, without --hidden_test"
        )
    statistics = MaskStatistics.of(mask.reader, len(stack))
    if chosen and statistics.through >= THROUGH * statistics.total and not statistics.full("z").any():
        axes, chosen = ("z",), False
    volume = Volume(axes, chosen, tested, statistics, mask.reader)
    if axes == ("z",):
        return volume, mask
    if not volume.restores(axes):
        raise UserError(
            f"--axes {' '.join(axes)}: along each of them a slice is masked wholly, and where these meet nothing is "
            f"left to restore from: take another axis in, or leave these voxels out of the mask"
        )
    return volume, replace(mask, full=frozenset(), masked=int((statistics.counts("z") > 0).sum()))
