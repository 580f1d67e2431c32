"""`--quality`: what is asked for, and the settings that it is found among. `bound.py` decides which are tried,
`trials.py` tries them, docs/bound.md tells users."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cocodiff.config import Config, find_shipped, read_yaml
from cocodiff.console.options import Option, check_counts, engine_record, engine_settings, preset_configs
from cocodiff.errors import UserError
from cocodiff.jobs.bound import Bound
from cocodiff.jobs.record import lasting

if TYPE_CHECKING:
    from cocodiff.assemble import AttentionWork
    from cocodiff.topology.machine import Topology

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
        "a bound, as 50dB or 0.3dB; 50dB (at least, against the exact run) or 0.3dB (at most lost, against the truth); "
        "the cheapest setting that keeps it is chosen on some slices and checked on more (docs/bound.md)",
        numbers=True,
    ),
    Option("quality_slices", "with quality: the first slices or images, which settings are tried on", 2, type=int),
    Option("quality_every", "with quality: every n-th slice or image is checked against the exact run", 20, type=int),
)


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
    rungs: dict[str, Config]

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
        return cls(bound, values["quality_slices"], values["quality_every"], preset, settings, changes, {})._with(
            changes
        )

    def _with(self, changes: dict[str, dict[str, Any]]) -> Quality:
        """With another ladder."""
        rungs = {
            name: engine_record().preset(self.preset, **self.settings, **change) for name, change in changes.items()
        }
        assert [*rungs.values()][-1].exact, f"the last setting of the ladder is exact, on top of {self.preset} too"
        return replace(self, changes=changes, rungs=rungs)

    def for_links(self, topology: Topology, work: AttentionWork) -> Quality:
        """With the settings for ranks that share a sequence, seated so: where no codec pays at the rates that the
        machine file tells, those without one. work: of a model's heads."""
        if self.caches:
            return self
        from cocodiff.assemble import with_codec_chosen

        config = next(iter(self.rungs.values())).with_(codec="auto", only_exact=False)
        if topology.machine.missing_rates or with_codec_chosen(config, topology, work)[0].codec != "none":
            return self
        return self._with(read_ladder(UNCODED))

    @property
    def exact(self) -> str:
        return [*self.rungs][-1]

    @property
    def caches(self) -> bool:
        """Whether it chooses among settings of a step cache, which do something on one rank too."""
        return any(config.step_cache != "none" for config in self.rungs.values())

    @property
    def presets(self) -> dict[str, Config]:
        """As a job has them that knows of no ladder."""
        return {self.preset: next(iter(self.rungs.values()))}

    def exact_alone(self) -> Quality:
        """Where nothing travels, and so nothing is to be chosen."""
        return replace(self, rungs={self.exact: self.rungs[self.exact]})

    def line(self, unit: str) -> str:
        """What is asked for, and how it is found."""
        if len(self.rungs) == 1:
            return f"quality {self.bound}: one rank alone sends nothing, so all {unit} are restored exactly"
        uncoded = not self.caches and all(config.codec == "none" for config in self.rungs.values())
        why = ", none with a codec, as its passes would take longer than these links," if uncoded else ""
        return (
            f"quality {self.bound}: {self.bound.told}; of {len(self.rungs)} settings of {self.preset}{why} the "
            f"cheapest is taken that keeps it on {self.slices} {unit}, and on those that are checked"
        )

    def lasting(self) -> dict[str, Any]:
        """What results depend on."""
        rungs = [{"name": name, **lasting(config)} for name, config in self.rungs.items()]
        return {"bound": str(self.bound), "slices": self.slices, "every": self.every, "rungs": rungs}


def read_ladder(name: str = CODED) -> dict[str, dict[str, Any]]:
    """What each setting of a shipped ladder says on top of a preset, by its name, from the cheapest to the exact
    one."""
    rungs = read_yaml(find_shipped("ladder", "quality", "ladder"))[name]
    return {rung["name"]: {key: value for key, value in rung.items() if key != "name"} for rung in rungs}
