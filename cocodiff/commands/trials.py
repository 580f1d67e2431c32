"""A bound on quality around a job: settings of a ladder are tried on some of its items until each group has one that
keeps the bound; then every batch is made with the setting of its group.

Every trial is a batch of the job's queue: replicas share trials as they share results, and a job that goes on does not
repeat those it has finished. What they made is kept until the job ends; with the setting that is taken, it is the
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.commands.bound import Bound, Slices, Trial, next_trial
from cocodiff.commands.items import Batch, Drawn, PartsOfSettings
from cocodiff.commands.job import Job, Modes
from cocodiff.commands.quality import Quality

if TYPE_CHECKING:
    from cocodiff.commands.cost import Cost
    from cocodiff.commands.replicas import Queue, Replica
    from cocodiff.config import Config

EXACT_RUN = "exact run"  # the name of what a batch that was tried is compared with


class Figure(NamedTuple):
    """What a trial showed of a slice. db: as `Bound.keeps` takes it; sent, whole: bytes, and what they would have been
    with everything as it is; late: those of `sent` that attention did not wait for."""

    db: float | None
    sent: int
    whole: int
    late: int = 0

    @classmethod
    def of(cls, db: float | None, cost: Cost) -> Figure:
        return cls(db, *(sum(of.values()) for of in (cost.bytes, cost.bytes_whole, cost.bytes_late)))


@dataclass
class Group:
    """What one setting is chosen for: all slices under a mask, or all images. about: as lines name it; names: of the
    slices that are checked, by their place; batches: of the job, with the places of their slices, those of no other
    slices; figures: what is known so far, by the place of a setting and of a slice."""

    about: str
    slices: Slices
    names: Mapping[int, str]
    batches: Mapping[int, tuple[int, ...]]
    figures: dict[int, dict[int, Figure]] = field(default_factory=dict)
    rung: int | None = None

    def db(self, rung: int) -> dict[int, float | None]:
        return {place: figure.db for place, figure in self.figures.get(rung, {}).items()}

    def next(self, quality: Quality) -> Trial | None:
        """What is to be tried next; None, and `rung` is set, when the setting is chosen."""
        found = next_trial(quality.bound, self.slices, len(quality.rungs), {r: self.db(r) for r in self.figures})
        if isinstance(found, Trial):
            return found
        self.rung = found
        return None

    def batches_of(self, slices: Sequence[int]) -> list[int]:
        return [number for number, of in self.batches.items() if {*of} <= {*slices}]

    def record(self, quality: Quality) -> dict[str, Any]:
        """What was asked for, tried and taken: for run.yaml, metrics.json and the report."""
        names, taken = [*quality.rungs], self.taken
        return {
            "of": self.about,
            "bound": str(quality.bound),
            "against": quality.bound.against,
            "told": quality.bound.told,
            "preset": quality.preset,
            "setting": names[taken],
            "changes": dict(quality.changes[names[taken]]),
            "margin_db": self.slices.margin_db,
            "count": self.slices.count,
            "calibrated_on": [self.names[place] for place in self.slices.calibration],
            "checked": [self.names[place] for place in sorted(self.figures.get(taken, {}))],
            "below": self._below(taken, quality.bound),
            "tried": [self._tried(rung, names[rung], quality.bound) for rung in sorted(self.figures)],
        }

    @property
    def taken(self) -> int:
        assert self.rung is not None, "a setting is chosen"
        return self.rung

    def _tried(self, rung: int, name: str, bound: Bound) -> dict[str, Any]:
        figures = self.figures[rung]
        worst = bound.worst(self.db(rung))
        sent, whole, late = (sum(of) for of in zip(*(figure[1:] for figure in figures.values()), strict=True))
        return {
            "setting": name,
            "slices": len(figures),
            "worst_db": None if worst is None else round(worst[1], 3),
            "worst": None if worst is None else self.names[worst[0]],
            "bytes_of_whole": round(sent / whole, 4) if whole else None,
            "waited_of_whole": round((sent - late) / whole, 4) if whole else None,
            "kept": all(bound.with_margin(self.slices.margin_db).keeps(db) for db in self.db(rung).values()),
            "below": self._below(rung, bound),
            "db": {self.names[n]: None if db is None else round(db, 3) for n, db in sorted(self.db(rung).items())},
        }

    def _below(self, rung: int, bound: Bound) -> list[str]:
        return [self.names[place] for place, db in sorted(self.db(rung).items()) if not bound.keeps(db)]

    def line(self, quality: Quality, trial: Trial) -> str:
        """What a trial has shown."""
        tried = self._tried(trial.rung, [*quality.rungs][trial.rung], quality.bound)
        worst, margin = tried["worst_db"], self.slices.margin_db
        of = f"{tried['setting']} on {tried['slices']} of {self.slices.count}"
        sent, waited = tried["bytes_of_whole"], tried["waited_of_whole"]
        share = "" if sent is None else f", {sent:.3f} of the bytes"
        share += "" if waited == sent else f", {waited:.3f} waited for"
        if worst is None:
            return f"{self.about}: {of}: every bit as in the exact run{share}"
        with_margin = f" with a margin of {margin:g} dB" if margin else ""
        verdict = f"{'keeps' if tried['kept'] else 'does not keep'} {quality.bound}"
        what, digits = "" if quality.bound.against == "exact" else " lost", quality.bound.digits
        return (
            f"{self.about}: {of} {verdict}{with_margin}: {worst:.{digits}f} dB{what} at worst ({tried['worst']}){share}"
        )

    def taken_line(self, quality: Quality) -> str:
        """Which setting is taken, and why."""
        name = [*quality.rungs][self.taken]
        if self.slices.count == 0:
            return f"{self.about}: nothing is to be restored"
        if len(quality.rungs) == 1:
            return (
                f"{self.about}: one rank alone sends nothing: all are restored exactly, and there is nothing to choose"
            )
        if self.taken not in self.figures:
            return f"{self.about}: no other setting keeps {quality.bound}: {name} is taken"
        return (
            f"{self.about}: {name} is taken: all {len(self.figures[self.taken])} that were checked keep {quality.bound}"
        )


class Trials:
    """A way: settings of a ladder are tried on a job's batches, and each batch is made with the one that its task's
    group has chosen. kept: the batches whose trials are their results. In the job's journals trials have numbers after
    those of results."""

    def __init__(self, job: Job[Any], quality: Quality, folder: Path) -> None:
        """folder: of the job's journals."""
        self.job, self.quality, self.count = job, quality, len(job.batches)
        self.settings, self.tried = [*quality.rungs], len(quality.rungs)
        self.parts = PartsOfSettings(folder, self.settings)
        self.groups: Mapping[int, Group] = {}
        self.kept: frozenset[int] = frozenset()

    def names(self, batch: Batch) -> list[str]:
        return [self.quality.preset]

    def number(self, rung: int, batch: int) -> int:
        return (1 + rung) * self.count + batch

    def holds(self, number: int) -> bool:
        rung, batch = divmod(number - self.count, self.count)
        return self.parts.of[self.settings[rung]].holds(self.job.batches[batch], [self.settings[rung]])

    def choose(self, queue: Queue, replica: Replica) -> None:
        """Tries until a setting is chosen for each group, on all ranks alike."""
        self.groups, whole = self.job.groups(self.quality), replica.whole
        groups = self._groups()
        if whole.rank == 0:
            self.parts.make_folders()
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

    def of(self, batch: Batch) -> Modes:
        setting, preset = self._setting(batch.task), self.quality.preset
        return Modes({preset: setting}, preset if setting == self.quality.exact else None)

    def made(self, batches: Sequence[Batch], index: int) -> tuple[Modes, dict[str, Drawn]]:
        settings = {self.quality.preset: self._setting(batches[0].task), EXACT_RUN: self.quality.exact}
        drawn = {name: self.parts.merged(setting, batches, index) for name, setting in settings.items()}
        return Modes(settings, EXACT_RUN), drawn

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
            queue.begin(self.job, batch)
            drawn = self.job.make([setting], batch)
            if leads:
                self.parts.of[setting].keep(batch, drawn)
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
            pair: list[Drawn] = [self.parts.merged(name, batches, first.indices[at]) for name in (exact, setting)]
            db = self.job.figure_db(self.quality.bound, first, at, *pair)
            figures[place] = Figure.of(db, pair[1].cost)
        return figures
