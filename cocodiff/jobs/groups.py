"""What a bound on quality chooses one setting for: a group of a job's items, and what trials have shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.jobs.bound import Bound, Slices, Trial, next_trial
from cocodiff.jobs.quality import Quality

if TYPE_CHECKING:
    from cocodiff.jobs.cost import Cost


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
