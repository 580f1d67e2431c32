"""Tables of the names that settings take, each with the import string of the object that it stands for.

One entry adds an exchange, an order or a codec. Config, the command line, settings files and sweeps then take its name,
since they look in a table at every use. Nothing is imported before it is used.
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
# The setting `order`: the order in which an attention call projects, sends and computes.
ORDERS = {"joint": "cocodiff.attention.ulysses:joint", "v_first": "cocodiff.attention.ulysses:v_first"}
# The setting `ring_kind`: the tensors that are passed round the ranks of a ring.
RINGS = {
    "keys": "cocodiff.attention.ring:Ring",
    "token": "cocodiff.attention.ring:TokenRing",
    "streaming": "cocodiff.attention.streaming:Streaming",
}
# The setting `selection`: the tokens that are sent.
SELECTIONS = {"full": "cocodiff.exchange.codec:Codec", "v_major": "cocodiff.attention.v_major.codec:VMajor"}
# The setting `codec`, which also takes "none": the code in which whole tensors are sent. `auto` becomes one of the
# others, or none, before a run starts.
CODECS = {
    "lossless": "cocodiff.attention.lossless:Lossless",
    **dict.fromkeys(("int8", "int4", "int2", "auto"), "cocodiff.attention.residual:Residual"),
}
EXACT_CODECS = ("none", "lossless")  # the codecs that do not change tensors
# The setting `arrival`, which also takes "now": displaced exchange, in which a call does not wait for what it sends.
ARRIVALS = dict.fromkeys(("displaced", "adaptive"), "cocodiff.attention.displaced:Displaced")
# The setting `step_cache`, which also takes "none": the rule by which calls of a model are not computed in full.
STEP_CACHES = {"first_block": "cocodiff.engine.step_cache:FirstBlockCache"}
# The dataclass of an engine's settings, from which the command line, settings files and sweeps are made.
RECORDS = {"engine": "cocodiff.config.config:Config"}


def load(table: Mapping[str, str], name: str) -> Any:
    """Import and return the object that a name stands for in one of this file's tables, such as CODECS. Raise KeyError
    for an unknown name.

    Args:
        table: import strings "module:attribute" by name.
    """
    return imported(table[name])


def planner() -> Any:
    """Return the module that answers what a run leaves open. A run that asks nothing never imports it."""
    return import_module("cocodiff.planner.automatic")


def imported(name: str) -> Any:
    """Import and return the object that an import string "module:attribute" stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


class _Late(ModuleType):
    """A module that `import_late` registers: its code is executed at the first access to one of its attributes."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)


def import_late(name: str) -> None:
    """Register a module of a package as imported, but execute it at its first use, to save the time where it is not
    used.

    The package itself must be imported already. importlib's LazyLoader would execute the module at the second import,
    up to Python 3.11.

    Args:
        name: the module's full name, such as "scipy.stats".
    """
    if name not in sys.modules and (spec := find_spec(name)):
        package, _, last = name.rpartition(".")
        sys.modules[name] = module = module_from_spec(spec)
        module.__class__ = _Late
        setattr(sys.modules[package], last, module)
