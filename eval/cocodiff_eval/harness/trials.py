"""A bound on quality around a job: settings of a ladder are tried on some of its items until each group has one that
keeps the bound; then every batch is made with the setting of its group.

Every trial is a batch of the job's queue: replicas share trials as they share results, and a job that goes on does not
repeat those it has finished. What they made is kept until the job ends; with the setting that is taken, it is the
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocodiff.config.config import Config
from cocodiff.jobs.replicas import Queue, Replica
from cocodiff_eval.harness.bound import Trial
from cocodiff_eval.harness.items import Batch, ItemSamples, Parts
from cocodiff_eval.harness.job import BatchSettings, Job, Presets
from cocodiff_eval.harness.quality import Figure, Group, Quality

EXACT_RUN = "exact run"  # the name of what a batch that was tried is compared with


class Trials(Presets):
    """A way: settings of a ladder are tried on a job's batches, and each batch is made with the one that its task's
    group has chosen. kept: the batches whose trials are their results. In the job's journals trials have numbers after
    those of results."""

    def __init__(self, job: Job, quality: Quality, folder: Path) -> None:
        """folder: of the job's journals."""
        self.job, self.quality, self.count = job, quality, len(job.batches)
        self.settings, self.tried = [*quality.rungs], len(quality.rungs)
        self.parts = {name: Parts(folder / f"trials-{number}") for number, name in enumerate(self.settings)}
        self.groups: Mapping[int, Group] = {}

    def names(self, batch: Batch) -> list[str]:
        return [self.quality.preset]

    def number(self, rung: int, batch: int) -> int:
        return (1 + rung) * self.count + batch

    def holds(self, number: int) -> bool:
        rung, batch = divmod(number - self.count, self.count)
        return self.parts[self.settings[rung]].holds(self.job.batches[batch], [self.settings[rung]])

    def choose(self, queue: Queue, replica: Replica) -> None:
        """Tries until a setting is chosen for each group, on all ranks alike."""
        self.groups, whole = self.job.groups(self.quality), replica.whole
        groups = self._groups()
        if whole.rank == 0:
            for parts in self.parts.values():
                parts.folder.mkdir(exist_ok=True)
        whole.broadcast_object(None)  # the folders are there
        while trials := [(group, trial) for group in groups if (trial := group.next(self.quality)) is not None]:
            self._make(trials, queue, replica.leads)
            found = [self._figures(group, trial) for group, trial in (trials if whole.rank == 0 else [])]
            for (group, trial), figures in zip(trials, whole.broadcast_object(found), strict=True):
                group.figures.setdefault(trial.rung, {}).update(figures)
                if whole.rank == 0:
                    queue.bar.say(f"quality: {group.line(self.quality, trial)}")
        if whole.rank == 0:
            for group in groups:
                queue.bar.say(f"quality: {group.taken_line(self.quality)}")
        self.kept = frozenset(
            batch for group in groups for batch in group.batches if queue.is_done(self.number(group.taken, batch))
        )
        queue.expect([batch for batch in range(self.count) if batch not in self.kept])

    def _groups(self) -> list[Group]:
        return [*{id(group): group for group in self.groups.values()}.values()]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [group.record(self.quality) for group in self._groups()]

    def _setting(self, task: int) -> str:
        return self.settings[self.groups[task].taken]

    def of(self, batch: Batch) -> BatchSettings:
        setting, preset = self._setting(batch.task), self.quality.preset
        return BatchSettings({preset: setting}, preset if setting == self.quality.exact else None)

    def made(self, batches: Sequence[Batch], index: int) -> tuple[BatchSettings, dict[str, ItemSamples]]:
        settings = {self.quality.preset: self._setting(batches[0].task), EXACT_RUN: self.quality.exact}
        drawn = {name: self.parts[one].merged(batches, index)[one] for name, one in settings.items()}
        return BatchSettings(settings, EXACT_RUN), drawn

    def configs(self, task: int) -> dict[str, Config]:
        return {self.quality.preset: self.quality.rungs[self._setting(task)]}

    def _make(self, trials: Sequence[tuple[Group, Trial]], queue: Queue, leads: bool) -> None:
        """Makes what is missing of the batches of some trials, each with the exact setting as well."""
        wanted = {
            (batch, rung)
            for group, trial in trials
            for batch in group.batches_of(trial.slices)
            for rung in (trial.rung, self.tried - 1)
        }
        numbers = [self.number(rung, batch) for batch, rung in sorted(wanted)]
        queue.expect([*numbers, *range(self.count)])
        for number in queue.take(numbers):
            rung, place = divmod(number - self.count, self.count)
            batch, setting = self.job.batches[place], self.settings[rung]
            queue.begin(batch.size, self.job.steps(batch))
            drawn = self.job.make([setting], batch)
            if leads:
                self.parts[setting].keep(batch, drawn)
                queue.add(number, [])

    def _figures(self, group: Group, trial: Trial) -> dict[int, Figure]:
        """What a trial has shown, by the places of items in their group."""
        setting, exact = self.settings[trial.rung], self.quality.exact
        of_items: dict[int, list[tuple[Batch, int]]] = {}
        for number in group.batches_of(trial.slices):
            for at, place in enumerate(group.batches[number]):
                of_items.setdefault(place, []).append((self.job.batches[number], at))
        figures = {}
        for place, parts in sorted(of_items.items()):
            batches, (first, at) = [batch for batch, _ in parts], parts[0]
            pair = [self.parts[name].merged(batches, first.indices[at])[name] for name in (exact, setting)]
            db = self.job.figure_db(self.quality.bound, first, at, *pair)
            figures[place] = Figure.of(db, pair[1].cost)
        return figures
