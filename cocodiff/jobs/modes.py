"""The modes of a job: its presets, or the settings of a bound, and the exact run that they are compared with; what
results depend on, and an engine for each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cocodiff import __version__
from cocodiff.config import Config
from cocodiff.console.options import engine_record, engine_settings
from cocodiff.console.terminal import threads
from cocodiff.jobs.record import REMEMBERED, lasting
from cocodiff.jobs.replicas import topology_of_replica
from cocodiff.setting import settings_of

if TYPE_CHECKING:
    from cocodiff.engine import Engine
    from cocodiff.jobs.prepared import Prepared

EXACT = "flat"  # the preset that others are judged against
LOSSY = ("selection", "codec", "arrival", "step_cache")  # settings that give up exactness
ROUTES = ("exchange", "exchange_table", "nic_balance", "transport", "check_messages")  # change no bit of an exact run


def describe(prepared: Prepared, ranks: int) -> dict[str, Any]:
    """What the results of any job depend on, beside its inputs. How many replicas there are is not in it. ranks: of all
    replicas."""
    replicas = prepared.deal.replicas
    return {
        "cocodiff": __version__,
        "ranks of a replica": ranks // replicas,
        "their nodes, cards and planes": topology_of_replica(prepared.values, ranks, replicas).relative_places,
        **threads(),
        **{name: prepared.values[name] for name in REMEMBERED if name in prepared.values},
        "steps": prepared.values["steps"],
        "presets": [{"name": name, **lasting(config)} for name, config in prepared.presets.items()],
        "exact": with_exact(prepared)[1],
        **({} if prepared.quality is None else {"quality": prepared.quality.lasting()}),
    }


def with_exact(prepared: Prepared) -> tuple[dict[str, Config], str | None]:
    """The modes to run, and which of them is the exact one: a preset that gives its bits, or one mode more. For a bound
    on quality the modes are the settings that it is kept with."""
    if prepared.quality is not None:
        return dict(prepared.quality.rungs), prepared.quality.exact
    if not prepared.values["exact"]:
        return dict(prepared.presets), None
    whole = {"selection": "full", "codec": "none", "arrival": "now", "step_cache": "none"}
    settings = engine_settings(prepared.values) | {"exchange": "flat", "chunks": 1, **whole}
    settings["guidance_parallel"] = prepared.deal.guidance
    exact = engine_record().preset(EXACT, **settings)
    for mode, config in prepared.presets.items():
        if same_bits(config, exact):
            return dict(prepared.presets), mode
    return prepared.presets | {"exact": exact}, "exact"


def same_bits(config: Config, exact: Config) -> bool:
    """Whether settings that send all tokens differ from others in what changes no bit: the route of the tokens, and
    settings that do nothing with them."""
    if not config.exact:
        return False
    of_lossy = {name for name, one in settings_of(type(config)).items() if one.only_with and one.only_with[0] in LOSSY}
    free = {*ROUTES, *LOSSY, *of_lossy}
    return {k: v for k, v in vars(config).items() if k not in free} == {
        k: v for k, v in vars(exact).items() if k not in free
    }


class Engines(Mapping[str, "Engine"]):
    """An engine for each mode, made when it is first asked for: it costs groups of ranks. All ranks of a replica ask
    in the same order. made: those that there are."""

    def __init__(self, modes: Mapping[str, Config], make: Callable[[Config], Engine]) -> None:
        self._modes, self._make = modes, make
        self.made: dict[str, Engine] = {}

    def __getitem__(self, mode: str) -> Engine:
        if mode not in self.made:
            self.made[mode] = self._make(self._modes[mode])
        return self.made[mode]

    def chosen(self) -> list[str]:
        """What they have chosen by themselves, a line each."""
        return [f"{mode}: {engine.sequence.chosen}" for mode, engine in self.made.items() if engine.sequence.chosen]

    def compiled(self) -> list[str]:
        """What torch.compile did for them on this rank, a line each."""
        return [f"{mode}: {engine.compiled}" for mode, engine in self.made.items() if engine.compiled]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modes)

    def __len__(self) -> int:
        return len(self._modes)
