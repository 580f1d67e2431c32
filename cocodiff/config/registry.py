"""Tables of the names that settings take, each with the import string of what it stands for.

One entry adds an exchange, an order or a codec: Config, the command line, settings files and sweeps take the name from
then on, as they look a table up whenever they need it. Nothing is imported before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

# The setting `exchange`, which also takes "auto". Called with a topology and a rank, each returns the rank's plan.
EXCHANGES = {
    "flat": "cocodiff.topology.routes.plans:flat_plan",
    "tapa": "cocodiff.topology.routes.plans:tapa_plan",
    "split": "cocodiff.topology.routes.plans:split_plan",
}
# The setting `order`: in which order an attention call projects, sends and computes.
ORDERS = {"joint": "cocodiff.attention.ulysses:joint", "v_first": "cocodiff.attention.ulysses:v_first"}
# The setting `ring_kind`: what goes round the ranks of a ring.
RINGS = {
    "keys": "cocodiff.attention.ring:Ring",
    "token": "cocodiff.attention.ring:TokenRing",
    "streaming": "cocodiff.attention.streaming:Streaming",
}
# The setting `selection`: what is sent in place of whole tensors.
SELECTIONS = {"full": "cocodiff.exchange.codec:Codec", "v_major": "cocodiff.attention.v_major.codec:VMajor"}
# The setting `codec`, which also takes "none": by what whole tensors are coded before they are sent. `auto` becomes one
# of the others, or none, before a run starts.
CODECS = {
    "lossless": "cocodiff.attention.lossless:Lossless",
    **dict.fromkeys(("int8", "int4", "int2", "auto"), "cocodiff.attention.residual:Residual"),
}
EXACT_CODECS = ("none", "lossless")  # those with which tensors arrive as they were
# The setting `arrival`, which also takes "now": how a call comes to do without what it sends, by whatever codec.
ARRIVALS = dict.fromkeys(("displaced", "adaptive"), "cocodiff.attention.arrival:Displaced")
# The setting `step_cache`, which also takes "none": when a model's call is not computed in full.
STEP_CACHES = {"first_block": "cocodiff.engine.step_cache:FirstBlockCache"}
# What the planner knows of a codec (`planner/costs.py`), by the codec's import string; of one that is not here, that
# it sends tensors whole and keeps nothing.
COSTS = {
    SELECTIONS["v_major"]: "cocodiff.planner.costs:VMajorCosts",
    CODECS["auto"]: "cocodiff.planner.costs:ResidualCosts",
    CODECS["lossless"]: "cocodiff.planner.costs:ResidualCosts",
    ARRIVALS["displaced"]: "cocodiff.planner.costs:ResidualCosts",
}
# What a run leaves open and the planner answers: runs that ask nothing never import it.
PLANNER = {
    "codec": "cocodiff.planner.automatic:choose_codec",
    "mesh": "cocodiff.planner.automatic:choose_mesh",
    "room": "cocodiff.planner.automatic:check_room",
    "room for layers": "cocodiff.planner.automatic:check_room_for_layers",
}
# The dataclass of settings that the command line, settings files and sweeps are made from, and that engines run by.
RECORDS = {"engine": "cocodiff.config.config:Config"}


def load(table: Mapping[str, str], name: str) -> Any:
    """The object that an entry "module:attribute" of a table stands for. Raises KeyError for an unknown name."""
    return imported(table[name])


def imported(name: str) -> Any:
    """The object that "module:attribute" stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


class _Late(ModuleType):
    """A module that is executed when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)


def import_late(name: str) -> None:
    """Imports a module of a package, but executes it at its first use. importlib's LazyLoader, up to Python 3.11, does
    so at the second import."""
    if name not in sys.modules and (spec := find_spec(name)):
        package, _, last = name.rpartition(".")
        sys.modules[name] = module = module_from_spec(spec)
        module.__class__ = _Late
        setattr(sys.modules[package], last, module)
