"""The rates of a machine's links, as measurements of messages give them, and the machine file that says so."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine
from cocodiff.planner.traffic import Latencies, rates_of, stages_of
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh

ROW_BYTES = 512  # bytes of a row of a block, as in bench alltoall
PHASES = ("phase1", "phase2")
RATES = ("sibling", "plane", "nic")
MEASURED = ("latency_us", "message_us", "link_share")  # beliefs about a machine that `Constants` settle
LEAST = 1e-3  # the smallest share of its links' rates that a machine file may have


@dataclass(frozen=True)
class Constants:
    """Measured latencies of a machine's messages, and the parts of the nominal rates that its links reach."""

    latency_us: float = 0.0  # microseconds from a message's start to its first byte
    message_us: float = 0.0  # microseconds between two messages that a rank starts
    sibling: float = 1.0  # part of its nominal rate that a link between tiles of a card reaches
    plane: float = 1.0  # the same of a link in a plane
    nic: float = 1.0  # the same of a NIC

    def machine(self, nominal: Machine) -> Machine:
        """Return a copy of the machine with these latencies and rates, without the beliefs (unmeasured ranges) that
        they settle.

        Args:
            nominal: the machine with the nominal rates of its links.
        """
        rates = {f"{name}_gb_s": getattr(nominal.links, f"{name}_gb_s") * getattr(self, name) for name in RATES}
        links = replace(nominal.links, latency_us=self.latency_us, message_us=self.message_us, **rates)
        beliefs = tuple(one for one in nominal.beliefs if one.name not in MEASURED)
        return replace(nominal, links=links, beliefs=beliefs)


class PlannedAllToAll:
    """An exchange of equal blocks among all ranks, as `bench alltoall` times it, whose seconds are predicted for a
    machine."""

    def __init__(self, topology: Topology, variant: str, size_mb: float) -> None:
        """Compute the bytes on the fullest link of every kind, for each stage of the exchange.

        Args:
            topology: the ranks.
            variant: name of an exchange, or "flat_serial": flat, but to one peer at a time.
            size_mb: MB of all blocks that a rank has before the exchange, its block for itself included.
        """
        P, one_peer, self._variant = topology.size, variant == "flat_serial", variant
        rows = max(1, round(size_mb * 1e6 / P / ROW_BYTES))
        self.block_bytes = rows * ROW_BYTES
        stages = stages_of(Mesh.build(topology), variant.removesuffix("_serial"), one_peer=one_peer)
        rows_P, heads_P = np.full(P, float(rows)), np.ones(P)
        self._stages = [(stage, ROW_BYTES * stage.traffic(rows_P, heads_P).fullest()) for stage in stages]

    def seconds(self, machine: Machine, part: str = "whole") -> float:
        """Return the predicted seconds of the exchange, or of one phase of it.

        Raise UserError for phases of another exchange than tapa.

        Args:
            machine: the machine whose rates and latencies count.
            part: "whole", or "phase1" or "phase2" of tapa.
        """
        latencies, rates = Latencies.of(machine), rates_of(machine)
        of_stages = [stage.wait_s(latencies) + float((loads / rates).max()) for stage, loads in self._stages]
        if part == "whole":
            return sum(of_stages)
        if self._variant != "tapa":
            raise UserError(f"{self._variant} has no {part}: only tapa has phases")
        return of_stages[PHASES.index(part) - len(PHASES)]  # cards of one tile have only the second phase

    def link_share(self, machine: Machine, seconds: float) -> float | None:
        """Return the share of its links' rates that a machine reached, at least LEAST and at most 1, from a measured
        time.

        Return None if the exchange took no longer than the latencies of its messages.

        Args:
            machine: the machine that it was measured on, with its nominal rates.
            seconds: measured seconds of the exchange.
        """
        waits_s = sum(stage.wait_s(Latencies.of(machine)) for stage, _ in self._stages)
        links_s = self.seconds(machine.with_value("link_share", 1.0)) - waits_s
        return min(1.0, max(LEAST, links_s / (seconds - waits_s))) if seconds > waits_s else None


def slowed(machine: Machine, scale: float) -> Machine:
    """Return a copy of a machine whose links are slower by the factor `scale`, with the same latencies."""
    links, part = machine.links, 1 / scale
    return Constants(links.latency_us, links.message_us, part, part, part).machine(machine)


def machine_file(machine: Machine) -> dict[str, Any]:
    """Return a machine as the mapping that its YAML file holds."""
    data = {key: value for key, value in asdict(machine).items() if value is not None}
    data["planes"], data["links"]["nic_of"] = list(machine.planes), list(machine.links.nic_of)
    data["beliefs"] = {one.pop("name"): one for one in data["beliefs"]}
    return data
