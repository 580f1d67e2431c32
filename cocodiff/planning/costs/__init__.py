"""What each coding costs: bytes on the wire, calls of which kinds in every step, memory kept between calls.

The planner's side of a coding. `Costs` tells of those that send tensors whole and keep nothing; the table `COSTS` of
the registry names the class of any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cocodiff.assemble import coding_name, coding_of
from cocodiff.config import Config
from cocodiff.registry import COSTS, load
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology


class CallKind(NamedTuple):
    """How calls of attention are made: predictions know each kind by one recording.

    whole: as a run's first ones, which have nothing to go by: tensors as they are, or as nearly as a code can. stable:
    the part of the tokens that stays behind. fine: with the bits of the last steps. displaced: names of the tensors
    that no call waits for, as "qkv"."""

    whole: bool = False
    stable: float = 0.0
    fine: bool = False
    displaced: str = ""


WHOLE = CallKind(whole=True)


class Typical(NamedTuple):
    """What tensors decide in a run, for predictions that have none. stable: where a threshold decides, the part of the
    tokens that stay. displaced: where a controller decides, of every step the part of the calls by the tensors that are
    displaced together."""

    stable: float = 0.0
    displaced: Sequence[Mapping[str, float]] = ()


class Cell(NamedTuple):
    """One token of one head of a tensor, over the batch: what sizes are counted in."""

    batch: int
    head_dim: int
    itemsize: int

    @property
    def bytes(self) -> int:
        """As the tensor itself has it."""
        return self.batch * self.head_dim * self.itemsize


class Costs:
    """Of one coding, by the engine's settings. The functions that take a `coding` (one rank's) are for recordings."""

    steps_to_settle = 0  # coded calls after a whole one, before those that all others are like

    @classmethod
    def head_bytes(cls, settings: Any, head_dim: int, itemsize: int) -> int:
        """What one token of one head takes on the wire, of q, k, v or the output each."""
        return head_dim * itemsize

    @classmethod
    def kinds_of_steps(cls, settings: Any, steps: int, typical: Typical) -> list[Mapping[CallKind, float]]:
        """Of every step the parts of its calls by their kind."""
        return [{WHOLE: 1.0}] * steps

    @classmethod
    def state_bytes(cls, settings: Any, topology: Topology, layout: Layout, cell: Cell) -> list[Mapping[str, int]]:
        """What one site keeps on every rank of a group, what is in flight between its calls as well, in bytes by what
        it is (fields of `RankMemory`). cell: of one tensor."""
        return [{} for _ in range(topology.size)]

    @staticmethod
    def prepare(coding: Any, layout: Layout, device: torch.device) -> None:
        """Works out beforehand what calls of a layout need once."""

    @staticmethod
    def hold_at(coding: Any, kind: CallKind) -> None:
        """Makes every call as one of this kind, as far as it can: one that follows no other is whole."""

    @staticmethod
    def agree(coding: Any) -> None:
        """Returns when what `begin_step` has the ranks agree on is there, for which the next call waits anyway."""

    @staticmethod
    def catch_up(coding: Any) -> None:
        """Receives what calls have sent and did not wait for."""


def costs_of(config: Config) -> type[Costs]:
    """Of the coding that the settings name."""
    name = coding_name(config)
    found: type[Costs] = load(COSTS, name) if name in COSTS else Costs
    return found


@dataclass(frozen=True)
class StateSizes:
    """How much is kept between calls by the engine's settings, which say whether there is a step cache; by a coding."""

    costs: type[Costs]
    settings: Any

    def of_site(self, topology: Topology, layout: Layout, cell: Cell) -> list[Mapping[str, int]]:
        """As `Costs.state_bytes`."""
        return self.costs.state_bytes(self.settings, topology, layout, cell)


def state_sizes(config: Config) -> StateSizes | None:
    """How much the coding and the step cache keep between calls; None where that is nothing."""
    keeps = coding_of(config).keeps_state or config.step_cache != "none"
    return StateSizes(costs_of(config), config) if keeps else None
