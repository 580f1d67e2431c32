"""A bound on quality: what a user asks for, whether slices keep it, and which setting of a ladder is to be tried next.

Pure functions of the figures that were measured, so that all ranks and every start of a job decide alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cocodiff.config.errors import UserError

MOST_LOSS_DB, LEAST_DISTANCE_DB, MOST_DISTANCE_DB = 5.0, 20.0, 200.0
# Where as many slices as ENOUGH are checked, one more is worse than all of them in one of ten cases, whatever the
# slices are: the order of 10 slices is as likely as any other. Of fewer, the worst has to be better by a margin. Where
# the dB of slices lie normally around their mean with a standard deviation of 4 dB, the tenth part of them lies 1.28
# deviations below it and the worst of two .56: 2.9 dB apart.
ENOUGH = 9
MARGIN_DB = 3.0

Figures = Mapping[int, Mapping[int, float | None]]  # of each setting by its place, the figure of each slice


@dataclass(frozen=True)
class Bound:
    """against: "exact": the masked PSNR against the exact run is at least `db`; "truth": the PSNR against the truth is
    at most `db` below that of the exact run."""

    db: float
    against: Literal["exact", "truth"]

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Raises UserError for what is no such figure."""
        remedy = (
            f"give the least PSNR against the exact run, {LEAST_DISTANCE_DB:g} to {MOST_DISTANCE_DB:g} dB (50dB), or "
            f"the most that is lost against the truth, below {MOST_LOSS_DB:g} dB (0.3dB)"
        )
        found = re.fullmatch(r"\+?(\d{1,6}(?:\.\d{0,6})?|\.\d{1,6})\s*(?:db)?", text.strip(), re.IGNORECASE)
        if found is None or not found[1].isascii():
            raise UserError(f"--quality {text[:40]!r}: {remedy}")
        db = float(found[1])
        if 0 < db < MOST_LOSS_DB:
            return cls(db, "truth")
        if LEAST_DISTANCE_DB <= db <= MOST_DISTANCE_DB:
            return cls(db, "exact")
        raise UserError(f"--quality {text.strip()}: neither a loss nor a distance: {remedy}")

    def __str__(self) -> str:
        return f"{self.db:g}dB"

    @property
    def told(self) -> str:
        if self.against == "exact":
            return f"at least {self.db:g} dB against the exact run"
        return f"at most {self.db:g} dB lost against the truth"

    @property
    def digits(self) -> int:
        """Decimals that its figures are shown with."""
        return 1 if self.against == "exact" else 3

    def with_margin(self, margin_db: float) -> Bound:
        """A stricter bound. A loss grows as the size of the errors does, of which 20 dB are a factor of 10."""
        if self.against == "exact":
            return Bound(self.db + margin_db, "exact")
        return Bound(self.db * 10 ** (-margin_db / 20), "truth")

    def keeps(self, figure: float | None) -> bool:
        """figure: of a slice, in dB; None where every bit is that of the exact run, or no truth is known."""
        if figure is None:
            return True
        return figure >= self.db if self.against == "exact" else figure <= self.db

    def worst(self, figures: Mapping[int, float | None]) -> tuple[int, float] | None:
        """The slice that is nearest to breaking the bound, or breaks it most, and its figure; None without figures."""
        there = [(key, figure) for key, figure in figures.items() if figure is not None]
        return min(there, key=lambda one: one[1] if self.against == "exact" else -one[1], default=None)


class Trial(NamedTuple):
    """A setting, by its place on the ladder, and the slices that are to be restored with it and compared."""

    rung: int
    slices: tuple[int, ...]


@dataclass(frozen=True)
class Slices:
    """What one setting is chosen for. count: how many there are; calibration: those that settings are tried on;
    checks: those that the chosen one has to prove itself on, calibration included."""

    count: int
    calibration: tuple[int, ...]
    checks: tuple[int, ...]

    @classmethod
    def chosen(cls, count: int, first: int, every: int, compared: Sequence[int] = ()) -> Slices:
        """The first ones to calibrate on; to check also every n-th, and those that are compared in any case."""
        calibration = range(min(first, count))
        return cls(count, tuple(calibration), tuple(sorted({*calibration, *range(0, count, every), *compared})))

    @property
    def margin_db(self) -> float:
        return 0.0 if len(self.checks) >= min(ENOUGH, self.count) else MARGIN_DB


def next_trial(bound: Bound, slices: Slices, rungs: int, figures: Figures) -> Trial | int:
    """What is to be tried next, or the place of the setting that is taken.

    rungs: settings of the ladder, from the cheapest to the exact one, which is never tried. Bisection finds the
    cheapest that keeps the bound, with its margin, on the slices of calibration; from there on the next one is taken
    until all that are checked keep it.
    """
    needed = bound.with_margin(slices.margin_db)

    def keeps(rung: int, of: Sequence[int]) -> bool | None:
        """None where a slice has not been restored with this setting."""
        known = figures.get(rung, {})
        return all(needed.keeps(known[one]) for one in of) if all(one in known for one in of) else None

    low, high = 0, rungs - 1
    while low < high:
        middle = (low + high) // 2
        kept = keeps(middle, slices.calibration)
        if kept is None:
            return Trial(middle, slices.calibration)
        low, high = (low, middle) if kept else (middle + 1, high)
    for rung in range(low, rungs - 1):
        kept = keeps(rung, slices.checks)
        if kept is None:
            return Trial(rung, slices.checks)
        if kept:
            return rung
    return rungs - 1
