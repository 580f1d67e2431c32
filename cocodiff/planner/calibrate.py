"""Latencies and link efficiencies from a run of bench alltoall: those with which the plan takes as long.

A least-squares fit of the logarithms. A constant that no measurement depends on stays as the machine file has it, and
is said to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine, Topology
from cocodiff.config.registry import EXCHANGES
from cocodiff.config.text_table import aligned
from cocodiff.planner.traffic import Latencies, rates_of, stages_of
from cocodiff.topology.axes import Mesh
from cocodiff.topology.links import alltoall_bound

ROW_BYTES = 512  # of a row of a block, as bench alltoall has it
PHASES = ("phase1", "phase2")
RATES = ("sibling", "plane", "nic")
NAMES = ("latency_us", "message_us", *RATES)
MEASURED = ("latency_us", "message_us", "link_share")  # beliefs about a machine that these constants settle
BEGIN = 0.05  # of the shortest measurement: where the search for a latency begins
EVALUATIONS = 100  # of the measurements, in the search for the constants
BLURRED_FIRST = ("message_us", "latency_us", "sibling", "nic", "plane")
APART = 0.01  # the smallest singular value of derivatives of length one that still tells constants apart
MOVES_NOTHING = 0.02  # a constant counts as determined where doubling it moves some measurement by more than this part


@dataclass(frozen=True)
class Constants:
    """sibling, plane, nic: the part of the nominal rate that links reach."""

    latency_us: float = 0.0
    message_us: float = 0.0
    sibling: float = 1.0
    plane: float = 1.0
    nic: float = 1.0

    def faster(self, scale: float) -> Constants:
        """Of the machine that an emulated one stands for, in whose time a second there is 1 / scale s."""
        return replace(self, latency_us=self.latency_us / scale, message_us=self.message_us / scale)

    def machine(self, nominal: Machine) -> Machine:
        """Return the machine with these latencies and the rates that its links reach, which are beliefs no longer."""
        rates = {f"{name}_gb_s": getattr(nominal.links, f"{name}_gb_s") * getattr(self, name) for name in RATES}
        links = replace(nominal.links, latency_us=self.latency_us, message_us=self.message_us, **rates)
        beliefs = tuple(one for one in nominal.beliefs if one.name not in MEASURED)
        return replace(nominal, links=links, beliefs=beliefs)


@dataclass(frozen=True)
class Measured:
    """Seconds of an exchange of so many MB per rank, the own block included. variant: an exchange, or "flat_serial".
    part: "whole", "phase1" or "phase2" of tapa. over: another measurement that `value` is the ratio to."""

    variant: str
    size_mb: float
    value: float
    part: str = "whole"
    over: Measured | None = None


class AllToAll:
    """An exchange of equal blocks on all ranks."""

    def __init__(self, topology: Topology, variant: str, size_mb: float) -> None:
        """variant: an exchange, or "flat_serial": to one peer at a time."""
        P, one_peer, self._variant = topology.size, variant == "flat_serial", variant
        rows = max(1, round(size_mb * 1e6 / P / ROW_BYTES))
        self.block_bytes = rows * ROW_BYTES
        stages = stages_of(Mesh.build(topology), variant.removesuffix("_serial"), one_peer=one_peer)
        rows_P, heads_P = np.full(P, float(rows)), np.ones(P)
        self._stages = [(stage, ROW_BYTES * stage.traffic(rows_P, heads_P).fullest()) for stage in stages]

    def seconds(self, machine: Machine, part: str = "whole") -> float:
        """part: as of `Measured`."""
        latencies, rates = Latencies.of(machine), rates_of(machine)
        of_stages = [stage.wait_s(latencies) + float((loads / rates).max()) for stage, loads in self._stages]
        if part == "whole":
            return sum(of_stages)
        if self._variant != "tapa":
            raise UserError(f"{self._variant} has no {part}: only tapa has phases")
        return of_stages[PHASES.index(part) - len(PHASES)]  # cards of one tile have the second one alone


@dataclass(frozen=True)
class Fit:
    """constants: fitted ones, others as they were. fitted: their names; left: names of constants that no measurement
    depends on. predicted: of every measurement."""

    constants: Constants
    fitted: tuple[str, ...]
    left: tuple[str, ...]
    measured: tuple[Measured, ...]
    predicted: tuple[float, ...]

    @property
    def rms(self) -> float:
        """The root of the mean squared relative error, by logarithms."""
        errors = [math.log(p / m.value) for p, m in zip(self.predicted, self.measured, strict=True)]
        return math.sqrt(sum(error**2 for error in errors) / len(errors))


def fit(
    topology: Topology, measured: Sequence[Measured], start: Constants, names: Sequence[str], tied: Sequence[str] = ()
) -> Fit:
    """Fits those of the named constants of a topology's machine that some measurement depends on. tied: those that have
    the first one's value."""
    exchange = cache(partial(AllToAll, topology))

    def seconds(one: Measured, machine: Machine) -> float:
        found = exchange(one.variant, one.size_mb).seconds(machine, one.part)
        return found / seconds(one.over, machine) if one.over is not None else found

    def predict(constants: Constants) -> list[float]:
        machine = constants.machine(topology.machine)
        return [seconds(one, machine) for one in measured]

    target = np.log([one.value for one in measured])
    shortest_us = 1e6 * min((one.value for one in measured if one.over is None), default=0.0)
    known = {name: getattr(start, name) for name in names}
    for name in (name for name in names if name.endswith("_us")):  # so large that it would be seen
        known[name] = max(known[name], BEGIN * shortest_us)
    chosen = list(names)

    def put(x: np.ndarray) -> Constants:
        values = dict(zip(chosen, np.exp(x).tolist(), strict=True))
        if tied and tied[0] in values:
            values |= dict.fromkeys(tied[1:], values[tied[0]])
        return replace(start, **values)

    while chosen:
        x = np.log([known[name] for name in chosen])
        found = least_squares(lambda x: np.log(predict(put(x))) - target, x, max_nfev=EVALUATIONS)
        moves = np.abs(found.jac).max(axis=0) * math.log(2.0)
        seen = [name for name, move in zip(chosen, moves, strict=True) if move > MOVES_NOTHING]
        if seen == chosen and blurred(found.jac):  # a rate and a latency would explain the same: the rate does
            seen.remove(next(name for name in BLURRED_FIRST if name in chosen))
        if seen == chosen:
            start = put(found.x)
            break
        chosen[:] = seen
    left = tuple(name for name in names if name not in chosen)
    return Fit(start, tuple(chosen), left, tuple(measured), tuple(predict(start)))


def blurred(slope: np.ndarray) -> bool:
    """Whether the measurements cannot tell the constants apart, from their derivatives."""
    measured, constants = slope.shape
    if constants < 2 or measured < constants:
        return constants > 1
    lengths = np.linalg.norm(slope, axis=0)
    return bool(np.linalg.svd(slope / lengths, compute_uv=False).min() < APART)


# From bench.json to a machine file ------------------------------------------------------------------------------------


def measured_of(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Measured]:
    """Those that the plan can predict: our exchanges, one peer at a time, and TAPA's phases."""
    found = []
    for row in rows:
        variant, size = row["variant"], str(row["case"]).removesuffix("MB")
        if variant in (*EXCHANGES, "flat_serial") and size.replace(".", "", 1).isdigit():
            phases = {part: row[f"{part}_s"] for part in PHASES if row.get(f"{part}_s")}
            times = {"whole": row["median_s"], **phases}
            found += [Measured(variant, float(size), value, part) for part, value in times.items()]
    if not found:
        raise UserError(
            f"--calibrate {path} has no all-to-all of flat, flat_serial, tapa or split: run cocodiff bench alltoall"
        )
    return found


def scale_of(rows: Sequence[Mapping[str, Any]], topology: Topology) -> float:
    """How many times slower the measured links were than the machine file's: 1, or the scale of an emulated machine."""
    for row in rows:
        if row["variant"] == "bound":
            size = float(row["case"].removesuffix("MB"))
            nominal = alltoall_bound(topology, AllToAll(topology, "flat", size).block_bytes)
            return round(row["median_s"] / nominal, 6) if nominal else 1.0
    return 1.0


def slowed(machine: Machine, scale: float) -> Machine:
    links, part = machine.links, 1 / scale
    return Constants(links.latency_us, links.message_us, part, part, part).machine(machine)


def told(fit: Fit, scale: float) -> list[str]:
    lines = [f"links {scale:g} times slower than the machine file's, as on an emulated machine"] if scale != 1 else []
    constants = []
    for name in (name for name in NAMES if name in fit.fitted + fit.left):
        value = getattr(fit.constants, name)
        shown = f"{value:.4g} us" if name.endswith("_us") else f"{value:.3f} of the nominal rate"
        constants.append([name, shown, "fitted" if name in fit.fitted else "left: nothing measured depends on it"])
    table = [["exchange", "MB", "part", "measured ms", "plan ms", "off by"]]
    for one, seconds in zip(fit.measured, fit.predicted, strict=True):
        times = [f"{one.value * 1e3:.3f}", f"{seconds * 1e3:.3f}", f"{seconds / one.value - 1:.1%}"]
        table.append([one.variant, f"{one.size_mb:g}", one.part, *times])
    lines += aligned(constants, "<<<") + aligned(table, "<>>>>>")
    return [*lines, f"root mean square error {fit.rms:.1%}"]


def as_json(fit: Fit) -> dict[str, Any]:
    return {
        "constants": asdict(fit.constants),
        "fitted": list(fit.fitted),
        "left": list(fit.left),
        "rms": fit.rms,
        "measurements": [
            {"variant": m.variant, "size_mb": m.size_mb, "part": m.part, "measured_s": m.value, "plan_s": p}
            for m, p in zip(fit.measured, fit.predicted, strict=True)
        ],
    }


def machine_file(machine: Machine) -> dict[str, Any]:
    """A machine as its file has it."""
    data = {key: value for key, value in asdict(machine).items() if value is not None}
    data["planes"], data["links"]["nic_of"] = list(machine.planes), list(machine.links.nic_of)
    data["beliefs"] = {one.pop("name"): one for one in data["beliefs"]}
    return data
