"""The option `--quality`: the cheapest setting of the engine whose results stay within a bound on quality.

A setting is chosen for each group of a job's items, such as all slices under one mask. This file has the bound, the
candidate settings, and the rule that names the next trial. `job.py` makes the trials. docs/inpainting.md is the page
for users.

The rule depends on measured figures alone. So all ranks decide the same, and a resumed job decides as before.
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

PRESET = "ahead"  # default preset with --quality; candidates change some of its settings
USUAL_PRESET = "tapa"  # default preset without --quality
# Keys of ladder.yaml, each a list of candidates: for links that are slow or of unknown speed; for links so fast that no
# codec saves time; and for jobs with a step cache, whose threshold is chosen.
CODED, UNCODED = "coded", "uncoded"
CACHED = "cached"
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
# Limits of a bound in dB: a loss lies below the first, a distance from the second to the third.
MOST_LOSS_DB, LEAST_DISTANCE_DB, MOST_DISTANCE_DB = 5.0, 20.0, 200.0
# Number of checked slices from which on no margin is added. One more slice is then worse than all of them in one case
# of ten, since every order of 10 exchangeable slices is equally likely.
ENOUGH = 9
# Margin of the bound if fewer are checked. Take slices that are normal with a standard deviation of 4 dB. One slice in
# ten is worse than 1.28 deviations below the mean. The worst of two lies .56 below it on average: 2.9 dB apart.
MARGIN_DB = 3.0

# By a candidate's index and a slice's index in its group, the dB of that slice; None if it equals the exact run's.
Figures = Mapping[int, Mapping[int, float | None]]


@dataclass(frozen=True)
class Bound:
    """A bound on what a faster exchange may change in a restored slice."""

    db: float  # least PSNR against the exact run, or largest loss of PSNR against the truth
    against: Literal["exact", "truth"]  # "exact": `db` is that PSNR under the mask; "truth": it is that loss

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Return the bound that `--quality` asks for: "50dB" is a PSNR against the exact run, "0.3dB" a loss against
        the truth.

        Raise UserError for other text, and for figures that are neither below 5 dB nor from 20 to 200 dB.
        """
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
        """The bound in words, for the user."""
        if self.against == "exact":
            return f"at least {self.db:g} dB against the exact run, a distance to that run and not to the truth"
        return f"at most {self.db:g} dB lost against the truth"

    @property
    def digits(self) -> int:
        """The number of decimals with which figures in dB are shown."""
        return 1 if self.against == "exact" else 3

    def with_margin(self, margin_db: float) -> Bound:
        """Return a stricter bound, from which settings are chosen if few slices are checked.

        The margin is added to a PSNR. It divides a loss by 10 per 20 dB, since a loss grows with the size of errors.

        Args:
            margin_db: the margin in dB.
        """
        if self.against == "exact":
            return Bound(self.db + margin_db, "exact")
        return Bound(self.db * 10 ** (-margin_db / 20), "truth")

    def keeps(self, figure: float | None) -> bool:
        """Return True if a slice keeps the bound.

        Args:
            figure: PSNR or loss of the slice in dB, as `against` says; None if it equals the exact run bit for bit.
        """
        if figure is None:
            return True
        return figure >= self.db if self.against == "exact" else figure <= self.db

    def worst(self, figures: Mapping[int, float | None]) -> tuple[int, float] | None:
        """Return the worst slice by the bound, the one that breaks it most or is nearest to that: (key, dB).

        Return None if all slices equal the exact run, or none is given.

        Args:
            figures: by any key for a slice, its PSNR or loss in dB; None if it equals the exact run.
        """
        there = [(key, figure) for key, figure in figures.items() if figure is not None]
        return min(there, key=lambda one: one[1] if self.against == "exact" else -one[1], default=None)


class CandidateTrial(NamedTuple):
    """Slices that are to be restored with a candidate setting and compared with the exact run."""

    candidate: int  # index of the setting among the candidates
    slices: tuple[int, ...]  # indices of the slices in their group


@dataclass(frozen=True)
class Slices:
    """The slices or images of a group, which all get the same setting, by their indices in the group."""

    count: int  # number of slices in the group
    calibration: tuple[int, ...]  # slices on which candidates are tried
    checks: tuple[int, ...]  # slices on which the chosen setting must keep the bound; includes `calibration`

    @classmethod
    def chosen(cls, count: int, first: int, every: int, compared: Sequence[int] = ()) -> Slices:
        """Choose the slices of a group on which settings are tried, and those on which the chosen setting is checked.

        Args:
            count: number of slices in the group.
            first: number of slices to try settings on: the first of the group.
            every: every n-th slice is checked.
            compared: indices of slices that are checked besides, as the job compares them with the exact run in any
                case.
        """
        calibration = range(min(first, count))
        return cls(count, tuple(calibration), tuple(sorted({*calibration, *range(0, count, every), *compared})))

    @property
    def margin_db(self) -> float:
        """The margin in dB that a setting must keep beyond the bound: 0 if enough slices are checked."""
        return 0.0 if len(self.checks) >= min(ENOUGH, self.count) else MARGIN_DB


def next_trial(bound: Bound, slices: Slices, candidates: int, figures: Figures) -> CandidateTrial | int:
    """Return the next trial of a group, or the index of the candidate setting that is chosen for it.

    Candidates are ordered from the cheapest to the exact one, which is never tried. Bisection finds the cheapest one
    that keeps the bound with its margin on the calibration slices. From it on, each is tried on the checked slices
    until one keeps the bound on all of them.

    Args:
        bound: the bound, without a margin.
        slices: the slices of the group.
        candidates: number of candidates.
        figures: the figures that earlier trials have measured.
    """
    needed = bound.with_margin(slices.margin_db)

    def keeps(candidate: int, of: Sequence[int]) -> bool | None:
        """Return True if a candidate keeps the bound on all of some slices; None if one was not yet tried with it.

        Args:
            candidate: index of the candidate.
            of: indices of the slices.
        """
        known = figures.get(candidate, {})
        return all(needed.keeps(known[one]) for one in of) if all(one in known for one in of) else None

    low, high = 0, candidates - 1
    while low < high:
        middle = (low + high) // 2
        kept = keeps(middle, slices.calibration)
        if kept is None:
            return CandidateTrial(middle, slices.calibration)
        low, high = (low, middle) if kept else (middle + 1, high)
    for candidate in range(low, candidates - 1):
        kept = keeps(candidate, slices.checks)
        if kept is None:
            return CandidateTrial(candidate, slices.checks)
        if kept:
            return candidate
    return candidates - 1


@dataclass(frozen=True)
class Quality:
    """The request of `--quality`: a bound, and the candidate settings that it chooses among."""

    bound: Bound  # the bound
    slices: int  # number of slices or images of a group on which candidates are tried
    every: int  # every n-th slice or image is checked against the exact run
    preset: str  # the preset that candidates are made of; results have its name
    settings: dict[str, Any]  # settings of the engine that options give, applied on top of the preset
    changes: dict[str, dict[str, Any]]  # by candidate, its further settings; from the cheapest to the exact candidate
    candidates: dict[str, Config]  # by name, the complete settings; in the same order

    @classmethod
    def asked(cls, values: dict[str, Any]) -> Quality | None:
        """Return the bound and the candidate settings that options ask for; None without `--quality`.

        Write the default preset to `values["preset"]` if none is given. Raise UserError if the options do not fit
        together: several presets, no exact run, a preset that leaves tokens out, or an option that candidates set.

        Args:
            values: the options' values, by name.
        """
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
        """Return a copy of the request of --quality with other candidate settings.

        Args:
            changes: by the candidate's name, the settings that it adds to the preset; from the cheapest to the exact
                one.
        """
        make = partial(engine_record().preset, self.preset, **self.settings)
        candidates = {name: make(**change) for name, change in changes.items()}
        assert [*candidates.values()][-1].exact, f"the last setting of the ladder is exact, on top of {self.preset} too"
        return replace(self, changes=changes, candidates=candidates)

    def for_links(self, topology: Topology, work: AttentionWork) -> Quality:
        """Return a copy of the request of --quality with candidates that suit the links between ranks of a sequence.

        Candidates without a codec are taken if no codec saves time at the rates in the machine file. The candidates
        stay as they are if rates are missing, or if they are step caches.

        Args:
            topology: the places of these ranks.
            work: the number and width of the model's attention heads.
        """
        if self.caches:
            return self
        from cocodiff.engine.assemble import with_codec_chosen

        config = next(iter(self.candidates.values())).with_(codec="auto", only_exact=False)
        if topology.machine.missing_rates or with_codec_chosen(config, topology, work)[0].codec != "none":
            return self
        return self._with(read_ladder(UNCODED))

    @property
    def exact(self) -> str:
        """The name of the exact candidate, which is the last."""
        return [*self.candidates][-1]

    @property
    def caches(self) -> bool:
        """True if candidates differ in their step cache, which has an effect on a single rank too."""
        return any(config.step_cache != "none" for config in self.candidates.values())

    @property
    def presets(self) -> dict[str, Config]:
        """The stand-in for a job's presets with --quality: its preset by name, with the cheapest candidate's settings.

        It is for code that knows of presets only, not of candidates.
        """
        return {self.preset: next(iter(self.candidates.values()))}

    def line(self, unit: str) -> str:
        """Return the line that tells the user what is asked for, and how a setting is chosen.

        Args:
            unit: a plural noun for the items, such as "slices".
        """
        if len(self.candidates) == 1:
            return f"quality {self.bound}: one rank alone sends nothing, so all {unit} are restored exactly"
        uncoded = not self.caches and all(config.codec == "none" for config in self.candidates.values())
        why = ", none with a codec, as its passes would take longer than these links," if uncoded else ""
        return (
            f"quality {self.bound}: {self.bound.told}; of {len(self.candidates)} settings of {self.preset}{why} the "
            f"cheapest is taken that keeps it on {self.slices} {unit}, and on those that are checked"
        )

    def lasting(self) -> dict[str, Any]:
        """Return what results with --quality depend on, as plain data.

        It has the bound, `slices` and `every`, and of each candidate its name and what `record.lasting` keeps of its
        settings. A resumed job compares it with that of its beginning.
        """
        candidates = [{"name": name, **lasting(config)} for name, config in self.candidates.items()]
        return {"bound": str(self.bound), "slices": self.slices, "every": self.every, "rungs": candidates}


def read_ladder(name: str = CODED) -> dict[str, dict[str, Any]]:
    """Return the settings that each candidate of a shipped list adds to a preset, by the candidate's name.

    The first is the cheapest and the last is exact.

    Args:
        name: a key of configs/quality/ladder.yaml: CODED, UNCODED or CACHED.
    """
    candidates = read_yaml(find_shipped("ladder", "quality", "ladder"))[name]
    return {
        candidate["name"]: {key: value for key, value in candidate.items() if key != "name"} for candidate in candidates
    }


class Figure(NamedTuple):
    """The measurements of one slice in a trial of a candidate setting."""

    db: float | None  # PSNR against the exact run or loss against the truth, as `Bound.keeps` takes it
    sent: int  # bytes that were sent
    whole: int  # bytes that would have been sent with all tokens and without a codec
    late: int = 0  # bytes among `sent` that attention did not wait for

    @classmethod
    def of(cls, db: float | None, cost: Cost) -> Figure:
        """Return the measurements of one slice in a trial; bytes of all classes of links are added.

        Args:
            db: PSNR of the slice, or its loss, in dB, as the bound takes it.
            cost: the cost of its restoration, whose bytes are used.
        """
        return cls(db, *(sum(of.values()) for of in (cost.bytes, cost.bytes_whole, cost.bytes_late)))


@dataclass
class SettingGroup:
    """The items that one setting of the engine is chosen for: all slices under a mask, or all images.

    A slice's place is its index in the group, 0 to `slices.count` - 1.
    """

    about: str  # the group's name in messages
    slices: Slices  # the slices that settings are tried and checked on
    names: Mapping[int, str]  # by place, the name of each checked slice
    batches: Mapping[int, tuple[int, ...]]  # by the number of a batch, the places of its slices
    places: Mapping[tuple[int, int], int] = field(default_factory=dict)  # by task and index, each checked slice's place
    figures: dict[int, dict[int, Figure]] = field(default_factory=dict)  # by candidate and place, the results of trials
    candidate: int | None = None  # index of the chosen setting; None until one is chosen

    def apart(self, task: int) -> list[set[int]]:
        """Return two sets of slices of a task, as indices in it: those that settings are tried on, and those checked.

        Slices of a set share batches only with each other, so that trials restore no further slices.

        Args:
            task: index of the task.
        """
        checked = {place: index for (of, index), place in self.places.items() if of == task}
        return [
            {checked[one] for one in some if one in checked} for some in (self.slices.calibration, self.slices.checks)
        ]

    def take(self, batches: Sequence[Batch]) -> None:
        """Set `self.batches`: by the number of each batch that holds this group's checked slices, their places.

        A slice's place is its index in the group. Trials of settings look up here which batches to run.

        Args:
            batches: all batches of the job, in order. Each has checked slices only, or none of them, see `apart`.
        """
        self.batches = {
            number: tuple(self.places[batch.task, index] for index in batch.indices)
            for number, batch in enumerate(batches)
            if (batch.task, batch.indices[0]) in self.places
        }

    def db(self, candidate: int) -> dict[int, float | None]:
        """Return by place the dB of each slice that a candidate was tried on, to compare with the bound.

        It is the PSNR against the exact run or the loss of PSNR against the truth, as `Bound.against` says. None means
        that all bits of the slice equal the exact run's.

        Args:
            candidate: index of the candidate setting.
        """
        return {place: figure.db for place, figure in self.figures.get(candidate, {}).items()}

    def next(self, quality: Quality) -> CandidateTrial | None:
        """Return the next trial: a candidate setting and the slices to restore with it.

        When the setting of the group is chosen, store its index in `candidate` and return None.

        Args:
            quality: the bound and its candidates.
        """
        found = next_trial(quality.bound, self.slices, len(quality.candidates), {r: self.db(r) for r in self.figures})
        self.candidate = None if isinstance(found, CandidateTrial) else found
        return found if isinstance(found, CandidateTrial) else None

    def batches_of(self, slices: Sequence[int]) -> list[int]:
        """Return the numbers of the batches that hold only some slices, which a trial then restores.

        Args:
            slices: places of these slices in the group.
        """
        return [number for number, of in self.batches.items() if {*of} <= {*slices}]

    def record(self, quality: Quality) -> dict[str, Any]:
        """Return what was asked for, tried and chosen, as plain data for run.yaml, metrics.json and the report.

        Args:
            quality: the bound and its candidates.
        """
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
        """The index of the chosen setting. To be read only once one is chosen."""
        assert self.candidate is not None, "a setting is chosen"
        return self.candidate

    def _tried(self, candidate: int, name: str, bound: Bound) -> dict[str, Any]:
        """Return what the trials of a candidate have measured, as an entry of `tried` in the record.

        Args:
            candidate: index of the candidate setting.
            name: its name.
            bound: the bound, without a margin.
        """
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
        """Return the names of the slices whose quality, with a candidate setting, breaks the bound.

        Args:
            candidate: index of the candidate setting.
            bound: the bound, without a margin.
        """
        return [self.names[place] for place, db in sorted(self.db(candidate).items()) if not bound.keeps(db)]

    def line(self, quality: Quality, trial: CandidateTrial) -> str:
        """Return the line that tells the user the result of a trial.

        Args:
            quality: the bound and its candidates.
            trial: the trial.
        """
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
        """Return the line that tells the user which setting is chosen for the group, and why.

        Args:
            quality: the bound and its candidates.
        """
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
