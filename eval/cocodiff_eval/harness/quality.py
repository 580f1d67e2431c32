"""`--quality`: what is asked for, the settings that it is found among, which of them is to be tried next, and what one
is chosen for: a group of a job's items. `job.py` tries them, docs/inpainting.md tells users.

What is tried follows from measured figures alone, so that all ranks and every start of a job decide alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cocodiff.config.config import Config, find_shipped, read_yaml
from cocodiff.config.errors import UserError
from cocodiff.jobs.options import Option, check_counts, engine_record, engine_settings, preset_configs
from cocodiff.jobs.record import lasting

if TYPE_CHECKING:
    from cocodiff.engine.assemble import AttentionWork
    from cocodiff.topology import Topology
    from cocodiff_eval.harness.items import Batch, Cost

PRESET = "ahead"  # that the ladder's settings go on top of, unless another one is named
USUAL_PRESET = "tapa"
CODED, UNCODED = "coded", "uncoded"  # ladders, for links that are slow or of which nothing is known, and for quick ones
CACHED = "cached"  # the ladder where a step cache is asked for, of which the bound chooses the threshold
PRESET_OPTION = Option(
    "preset",
    f"how ranks exchange tokens: one or more presets, as A,B or A B (default: {USUAL_PRESET}; with quality {PRESET})",
    many=True,
)
BOUND_OPTIONS = (
    Option(
        "quality",
        "a bound on what a faster exchange changes: 50dB is the least PSNR against the exact run, a distance to that "
        "run and not to the truth; 0.3dB is the most PSNR lost against the truth; the cheapest setting that keeps it "
        "is chosen on some slices and checked on more (docs/inpainting.md)",
        numbers=True,
    ),
    Option("quality_slices", "with quality: the first slices or images, which settings are tried on", 2, type=int),
    Option("quality_every", "with quality: every n-th slice or image is checked against the exact run", 20, type=int),
)
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
            return f"at least {self.db:g} dB against the exact run, a distance to that run and not to the truth"
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
        """Return True if a slice keeps the bound. figure: in dB; None where every bit is that of the exact run."""
        if figure is None:
            return True
        return figure >= self.db if self.against == "exact" else figure <= self.db

    def worst(self, figures: Mapping[int, float | None]) -> tuple[int, float] | None:
        """The slice that is nearest to breaking the bound, or breaks it most, and its figure; None without figures."""
        there = [(key, figure) for key, figure in figures.items() if figure is not None]
        return min(there, key=lambda one: one[1] if self.against == "exact" else -one[1], default=None)


class Trial(NamedTuple):
    """A setting, by its place on the ladder, and the slices that are to be restored with it and compared."""

    candidate: int
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


def next_trial(bound: Bound, slices: Slices, candidates: int, figures: Figures) -> Trial | int:
    """What is to be tried next, or the place of the setting that is taken.

    rungs: settings of the ladder, from the cheapest to the exact one, which is never tried. Bisection finds the
    cheapest that keeps the bound, with its margin, on the slices of calibration; from there on the next one is taken
    until all that are checked keep it.
    """
    needed = bound.with_margin(slices.margin_db)

    def keeps(candidate: int, of: Sequence[int]) -> bool | None:
        """None where a slice has not been restored with this setting."""
        known = figures.get(candidate, {})
        return all(needed.keeps(known[one]) for one in of) if all(one in known for one in of) else None

    low, high = 0, candidates - 1
    while low < high:
        middle = (low + high) // 2
        kept = keeps(middle, slices.calibration)
        if kept is None:
            return Trial(middle, slices.calibration)
        low, high = (low, middle) if kept else (middle + 1, high)
    for candidate in range(low, candidates - 1):
        kept = keeps(candidate, slices.checks)
        if kept is None:
            return Trial(candidate, slices.checks)
        if kept:
            return candidate
    return candidates - 1


@dataclass(frozen=True)
class Quality:
    """What `--quality` asks for. preset: as the run's results are named, settings: what flags say on top of it;
    changes: what each setting of the ladder says besides, by its name, from the cheapest to the exact one; rungs: these
    settings."""

    bound: Bound
    slices: int
    every: int
    preset: str
    settings: dict[str, Any]
    changes: dict[str, dict[str, Any]]
    candidates: dict[str, Config]

    @classmethod
    def asked(cls, values: dict[str, Any]) -> Quality | None:
        """None where no bound is asked for. Completes `preset` among the options' values. Raises UserError."""
        if values["preset"] is None:
            values["preset"] = [USUAL_PRESET if values["quality"] is None else PRESET]
        if values["quality"] is None:
            return None
        bound, presets = Bound.parse(values["quality"]), preset_configs(values)
        check_counts(values, "quality_slices", "quality_every")
        if not values["exact"]:
            raise UserError(f"--quality {bound} compares with the exact run: leave --no_exact away")
        if len(presets) > 1:
            raise UserError(
                f"--quality {bound} with presets {', '.join(presets)}: it chooses the setting of one preset: name one"
            )
        preset, settings = next(iter(presets)), engine_settings(values)
        changes = read_ladder(CODED if presets[preset].step_cache == "none" else CACHED)
        if presets[preset].selection != "full":
            raise UserError(
                f"--quality {bound} with preset {preset}, which leaves tokens out: the settings of a bound send "
                f"all of them: name {PRESET} or an exact preset"
            )
        for key in dict.fromkeys(key for change in changes.values() for key in change):
            if key != "step_cache" and values.get(key) is not None:
                raise UserError(f"--{key} {values[key]}: --quality {bound} chooses it: leave one of them away")
        settings.pop("step_cache", None)
        asked = cls(bound, values["quality_slices"], values["quality_every"], preset, settings, {}, {})
        return asked._with(changes)

    def _with(self, changes: dict[str, dict[str, Any]]) -> Quality:
        """With another ladder."""
        make = partial(engine_record().preset, self.preset, **self.settings)
        candidates = {name: make(**change) for name, change in changes.items()}
        assert [*candidates.values()][-1].exact, f"the last setting of the ladder is exact, on top of {self.preset} too"
        return replace(self, changes=changes, candidates=candidates)

    def for_links(self, topology: Topology, work: AttentionWork) -> Quality:
        """With the settings for ranks that share a sequence, seated so: where no codec pays at the rates that the
        machine file tells, those without one. work: of a model's heads."""
        if self.caches:
            return self
        from cocodiff.engine.assemble import with_codec_chosen

        config = next(iter(self.candidates.values())).with_(codec="auto", only_exact=False)
        if topology.machine.missing_rates or with_codec_chosen(config, topology, work)[0].codec != "none":
            return self
        return self._with(read_ladder(UNCODED))

    @property
    def exact(self) -> str:
        return [*self.candidates][-1]

    @property
    def caches(self) -> bool:
        """Whether it chooses among settings of a step cache, which do something on one rank too."""
        return any(config.step_cache != "none" for config in self.candidates.values())

    @property
    def presets(self) -> dict[str, Config]:
        """As a job has them that knows of no ladder."""
        return {self.preset: next(iter(self.candidates.values()))}

    def line(self, unit: str) -> str:
        """What is asked for, and how it is found."""
        if len(self.candidates) == 1:
            return f"quality {self.bound}: one rank alone sends nothing, so all {unit} are restored exactly"
        uncoded = not self.caches and all(config.codec == "none" for config in self.candidates.values())
        why = ", none with a codec, as its passes would take longer than these links," if uncoded else ""
        return (
            f"quality {self.bound}: {self.bound.told}; of {len(self.candidates)} settings of {self.preset}{why} the "
            f"cheapest is taken that keeps it on {self.slices} {unit}, and on those that are checked"
        )

    def lasting(self) -> dict[str, Any]:
        """What results depend on."""
        candidates = [{"name": name, **lasting(config)} for name, config in self.candidates.items()]
        return {"bound": str(self.bound), "slices": self.slices, "every": self.every, "rungs": candidates}


def read_ladder(name: str = CODED) -> dict[str, dict[str, Any]]:
    """What each setting of a shipped ladder says on top of a preset, by its name, from the cheapest to the exact."""
    candidates = read_yaml(find_shipped("ladder", "quality", "ladder"))[name]
    return {
        candidate["name"]: {key: value for key, value in candidate.items() if key != "name"} for candidate in candidates
    }


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
    slices; places: of slices that are checked, by their tasks and indices; figures: what is known so far, by the place
    of a setting and of a slice."""

    about: str
    slices: Slices
    names: Mapping[int, str]
    batches: Mapping[int, tuple[int, ...]]
    places: Mapping[tuple[int, int], int] = field(default_factory=dict)
    figures: dict[int, dict[int, Figure]] = field(default_factory=dict)
    candidate: int | None = None

    def apart(self, task: int) -> list[set[int]]:
        """Of a task the slices that settings are tried on, and those that are checked, for batches of their own."""
        checked = {place: index for (of, index), place in self.places.items() if of == task}
        return [
            {checked[one] for one in some if one in checked} for some in (self.slices.calibration, self.slices.checks)
        ]

    def take(self, batches: Sequence[Batch]) -> None:
        """Finds its batches among those of the job."""
        self.batches = {
            number: tuple(self.places[batch.task, index] for index in batch.indices)
            for number, batch in enumerate(batches)
            if (batch.task, batch.indices[0]) in self.places
        }

    def db(self, candidate: int) -> dict[int, float | None]:
        return {place: figure.db for place, figure in self.figures.get(candidate, {}).items()}

    def next(self, quality: Quality) -> Trial | None:
        """What is to be tried next; None, and `candidate` is set, when the setting is chosen."""
        found = next_trial(quality.bound, self.slices, len(quality.candidates), {r: self.db(r) for r in self.figures})
        self.candidate = None if isinstance(found, Trial) else found
        return found if isinstance(found, Trial) else None

    def batches_of(self, slices: Sequence[int]) -> list[int]:
        return [number for number, of in self.batches.items() if {*of} <= {*slices}]

    def record(self, quality: Quality) -> dict[str, Any]:
        """What was asked for, tried and taken: for run.yaml, metrics.json and the report."""
        names, taken, bound = [*quality.candidates], self.taken, quality.bound
        return {
            "of": self.about,
            "bound": str(bound),
            "against": bound.against,
            "told": bound.told,
            "preset": quality.preset,
            "setting": names[taken],
            "changes": dict(quality.changes[names[taken]]),
            "margin_db": self.slices.margin_db,
            "count": self.slices.count,
            "calibrated_on": [self.names[place] for place in self.slices.calibration],
            "checked": [self.names[place] for place in sorted(self.figures.get(taken, {}))],
            "below": self._below(taken, bound),
            "tried": [self._tried(candidate, names[candidate], bound) for candidate in sorted(self.figures)],
        }

    @property
    def taken(self) -> int:
        assert self.candidate is not None, "a setting is chosen"
        return self.candidate

    def _tried(self, candidate: int, name: str, bound: Bound) -> dict[str, Any]:
        figures, worst = self.figures[candidate], bound.worst(self.db(candidate))
        sent, whole, late = (sum(of) for of in zip(*(figure[1:] for figure in figures.values()), strict=True))
        return {
            "setting": name,
            "slices": len(figures),
            "worst_db": None if worst is None else round(worst[1], 3),
            "worst": None if worst is None else self.names[worst[0]],
            "bytes_of_whole": round(sent / whole, 4) if whole else None,
            "waited_of_whole": round((sent - late) / whole, 4) if whole else None,
            "kept": all(bound.with_margin(self.slices.margin_db).keeps(db) for db in self.db(candidate).values()),
            "below": self._below(candidate, bound),
            "db": {self.names[n]: None if db is None else round(db, 3) for n, db in sorted(self.db(candidate).items())},
        }

    def _below(self, candidate: int, bound: Bound) -> list[str]:
        return [self.names[place] for place, db in sorted(self.db(candidate).items()) if not bound.keeps(db)]

    def line(self, quality: Quality, trial: Trial) -> str:
        """What a trial has shown."""
        tried = self._tried(trial.candidate, [*quality.candidates][trial.candidate], quality.bound)
        worst, margin = tried["worst_db"], self.slices.margin_db
        of = f"{tried['setting']} on {tried['slices']} of {self.slices.count}"
        sent, waited = tried["bytes_of_whole"], tried["waited_of_whole"]
        share = "" if sent is None else f", {sent:.3f} of the bytes"
        share += "" if waited == sent else f", {waited:.3f} waited for"
        if worst is None:
            return f"{self.about}: {of}: every bit as in the exact run{share}"
        verdict = f"{'keeps' if tried['kept'] else 'does not keep'} {quality.bound}"
        verdict += f" with a margin of {margin:g} dB" if margin else ""
        kind = "from the exact run" if quality.bound.against == "exact" else "lost"
        told = f"{worst:.{quality.bound.digits}f} dB {kind} at worst"
        return f"{self.about}: {of} {verdict}: {told} ({tried['worst']}){share}"

    def taken_line(self, quality: Quality) -> str:
        """Which setting is taken, and why."""
        name, checked = [*quality.candidates][self.taken], len(self.figures.get(self.taken, {}))
        if self.slices.count == 0:
            told = "nothing is to be restored"
        elif len(quality.candidates) == 1:
            told = "one rank alone sends nothing: all are restored exactly, and there is nothing to choose"
        elif not checked:
            told = f"no other setting keeps {quality.bound}: {name} is taken"
        else:
            told = f"{name} is taken: all {checked} that were checked keep {quality.bound}"
        return f"{self.about}: {told}"
