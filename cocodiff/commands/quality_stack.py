"""A bound on quality for stacks of slices: one setting for each mask, tried and checked on some of its slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cocodiff_eval.report import shown_slices

from cocodiff.commands.bound import Bound, Slices
from cocodiff.commands.judging import Seen, psnr_vs_exact_db
from cocodiff.commands.quality import Figure, Group, Quality, Trials
from cocodiff.commands.replicas import Queue
from cocodiff.commands.restore_stack import Restorer, try_batch
from cocodiff.commands.samples import Batch, Drawn, PartsOfSettings
from cocodiff.commands.session import Session
from cocodiff.commands.tasks import Task, slice_name
from cocodiff.config import Config
from cocodiff.errors import UserError

EXACT = "exact"


def check_truth(bound: Bound, tasks: Sequence[Task]) -> None:
    """Raises UserError for a loss against a truth that is not there."""
    for task in tasks:
        if bound.against == "truth" and task.truth is None:
            raise UserError(
                f"--quality {bound} is a loss against the truth, which mask {task.mask.name} of {task.stack.name} "
                f"hides: name the original with --truth, or give a distance to the exact run, as 50dB"
            )


@dataclass(frozen=True)
class MaskSlices:
    """The slices under one mask in all stacks, in their order. places: task and index of each that has something to
    restore; slices: which of them, by their number in `places`, are tried and checked."""

    mask: str
    places: list[tuple[int, int]]
    slices: Slices

    def apart(self, task: int) -> list[set[int]]:
        """Of a task the slices that settings are tried on, and those that are checked: they have batches of their
        own."""
        return [
            {index for place in places for of, index in [self.places[place]] if of == task}
            for places in (self.slices.calibration, self.slices.checks)
        ]

    def group(self, tasks: Sequence[Task], batches: Sequence[Batch]) -> Group:
        checked = {self.places[place]: place for place in self.slices.checks}
        names = {place: slice_name(tasks[task].stack, index) for (task, index), place in checked.items()}
        of_batches = {
            number: tuple(checked[batch.task, index] for index in batch.indices)
            for number, batch in enumerate(batches)
            if (batch.task, batch.indices[0]) in checked
        }
        return Group(f"mask {self.mask}", self.slices, names, of_batches)


def slices_of_masks(
    quality: Quality, tasks: Sequence[Task], masked: Sequence[Sequence[bool]], exact_slices: int
) -> dict[int, MaskSlices]:
    """For each task the slices under its mask. What is compared with the exact run in any case is checked as well."""
    of_masks: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        of_masks.setdefault(task.mask.name, []).append(number)
    found: dict[int, MaskSlices] = {}
    for mask, numbers in of_masks.items():
        places = [(n, index) for n in numbers for index, has_mask in enumerate(masked[n]) if has_mask]
        compared = {(n, index) for n in numbers for index in shown_slices(masked[n], exact_slices)}
        always = [place for place, one in enumerate(places) if one in compared]
        slices = Slices.chosen(len(places), quality.slices, quality.every, always)
        found |= dict.fromkeys(numbers, MaskSlices(mask, places, slices))
    return found


def figure_of(seen: Seen, bound: Bound, exact: Drawn, one: Drawn) -> Figure:
    """Of a slice in a setting, beside its exact run."""
    if bound.against == "exact":
        db = psnr_vs_exact_db(seen.task.scale, exact, one, seen.mask_YX)
    else:
        before, after = seen.psnr_db(exact), seen.psnr_db(one)
        db = None if before is None or after is None else before - after
    return Figure.of(db, one.cost)


@dataclass(frozen=True)
class Chosen:
    """With which setting each task of a job is restored. kept: which batches' trials are their results."""

    quality: Quality
    groups: Mapping[int, Group]
    trials: PartsOfSettings
    kept: frozenset[int]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [group.record(self.quality) for group in {id(group): group for group in self.groups.values()}.values()]

    def setting(self, task: int) -> str:
        return [*self.quality.rungs][self.groups[task].taken]

    def config(self, task: int) -> Config:
        return self.quality.rungs[self.setting(task)]

    def restorer(self, restorer: Restorer, task: int) -> Restorer:
        """For the batches that are left: with the chosen setting under the preset's name. All ranks of a replica call
        it, as the setting's engine may not be there yet."""
        engines = {self.quality.preset: restorer.engines[self.setting(task)]}
        return replace(self.judging(restorer, task, tried=False), engines=engines)

    def judging(self, restorer: Restorer, task: int, tried: bool) -> Restorer:
        """For results that are there, and need no engine. tried: those of the batches that were kept, whose exact run
        `drawn` gives; of the others the exact setting is what they would be compared with."""
        setting, preset = self.setting(task), self.quality.preset
        exact = EXACT if tried else preset if setting == self.quality.exact else None
        return replace(restorer, engines={}, exact=exact)

    def drawn(self, batches: Sequence[Batch], index: int) -> dict[str, Drawn]:
        """What was kept of a slice, under the preset's name, and its exact run."""
        of_modes = {self.quality.preset: self.setting(batches[0].task), EXACT: self.quality.exact}
        return {mode: self.trials.merged(setting, batches, index) for mode, setting in of_modes.items()}


def choose(
    session: Session,
    queue: Queue,
    tasks: Sequence[Task],
    masks: Mapping[int, MaskSlices],
    batches: Sequence[Batch],
    restorer: Restorer,
) -> Chosen:
    """Chooses a setting for each mask, on all ranks alike, and keeps what was restored meanwhile."""
    quality, replica, whole = session.job.quality, session.replica, session.transport
    assert quality is not None, "a bound is asked for"
    trials = PartsOfSettings(queue.journals.folder, [*quality.rungs])
    groups = {id(mask): mask.group(tasks, batches) for mask in masks.values()}

    def restore(setting: str, number: int) -> None:
        batch = batches[number]
        try_batch(tasks[batch.task], batch, restorer, setting, trials.of[setting], replica.leads, queue.bar)

    def judge(group: Group, setting: str, numbers: Sequence[int]) -> dict[int, Figure]:
        of_slices: dict[int, list[tuple[Batch, int]]] = {}
        for number in numbers:
            for place, index in zip(group.batches[number], batches[number].indices, strict=True):
                of_slices.setdefault(place, []).append((batches[number], index))
        figures = {}
        for place, parts in sorted(of_slices.items()):
            of, index = [batch for batch, _ in parts], parts[0][1]
            exact, one = (trials.merged(name, of, index) for name in (quality.exact, setting))
            task = tasks[of[0].task]
            seen = Seen(task, index, task.stack.read(index), task.mask.read(index))
            figures[place] = figure_of(seen, quality.bound, exact, one)
        return figures

    made = Trials(quality, queue, len(batches), restore, judge)
    made.begin(whole, trials)
    kept = made.settle([*groups.values()], whole, replica.leads)
    return Chosen(quality, {task: groups[id(mask)] for task, mask in masks.items()}, trials, kept)
