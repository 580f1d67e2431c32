"""Calibration of the plan: latencies and link efficiencies from a run of bench alltoall.

They are fitted so that the plan predicts the measured times, by least squares of logarithms. A constant on which no
measurement depends keeps the machine file's value, and is reported.
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

ROW_BYTES = 512  # bytes of a row of a block, as in bench alltoall
PHASES = ("phase1", "phase2")
RATES = ("sibling", "plane", "nic")
NAMES = ("latency_us", "message_us", *RATES)  # the fields of `Constants`
MEASURED = ("latency_us", "message_us", "link_share")  # beliefs about a machine that these constants settle
BEGIN = 0.05  # part of the shortest measurement at which the search for a latency begins
EVALUATIONS = 100  # limit of evaluations in the search for the constants
# the constants in the order in which they are left out if measurements cannot separate them
BLURRED_FIRST = ("message_us", "latency_us", "sibling", "nic", "plane")
APART = 0.01  # smallest singular value of the normalised derivatives at which constants can be separated
MOVES_NOTHING = 0.02  # a constant is determined if doubling it changes some measurement by more than this part


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted."""

    latency_us: float = 0.0  # microseconds from a message's start to its first byte
    message_us: float = 0.0  # microseconds between two messages that a rank starts
    # The part of its nominal rate that each kind of link reaches.
    sibling: float = 1.0
    plane: float = 1.0
    nic: float = 1.0

    def faster(self, scale: float) -> Constants:
        """Return the constants of the real machine, from those of its emulation with links `scale` times slower."""
        return replace(self, latency_us=self.latency_us / scale, message_us=self.message_us / scale)

    def machine(self, nominal: Machine) -> Machine:
        """Return the machine with these latencies and rates, and without the beliefs that they settle."""
        rates = {f"{name}_gb_s": getattr(nominal.links, f"{name}_gb_s") * getattr(self, name) for name in RATES}
        links = replace(nominal.links, latency_us=self.latency_us, message_us=self.message_us, **rates)
        beliefs = tuple(one for one in nominal.beliefs if one.name not in MEASURED)
        return replace(nominal, links=links, beliefs=beliefs)


@dataclass(frozen=True)
class Measured:
    """A measured time of an all-to-all."""

    variant: str  # an exchange, or "flat_serial": to one peer at a time
    size_mb: float  # MB per rank, including its block for itself
    value: float  # seconds; a ratio if `over` is given
    part: str = "whole"  # "whole", or "phase1" or "phase2" of tapa
    over: Measured | None = None  # the measurement to which `value` is the ratio


class AllToAll:
    """An exchange of equal blocks on all ranks."""

    def __init__(self, topology: Topology, variant: str, size_mb: float) -> None:
        """Compute the messages. variant: an exchange, or "flat_serial" (to one peer at a time). size_mb: MB per
        rank."""
        P, one_peer, self._variant = topology.size, variant == "flat_serial", variant
        rows = max(1, round(size_mb * 1e6 / P / ROW_BYTES))
        self.block_bytes = rows * ROW_BYTES
        stages = stages_of(Mesh.build(topology), variant.removesuffix("_serial"), one_peer=one_peer)
        rows_P, heads_P = np.full(P, float(rows)), np.ones(P)
        self._stages = [(stage, ROW_BYTES * stage.traffic(rows_P, heads_P).fullest()) for stage in stages]

    def seconds(self, machine: Machine, part: str = "whole") -> float:
        """Return the predicted seconds on a machine. part: see `Measured`. Raise UserError for phases of another
        exchange than tapa."""
        latencies, rates = Latencies.of(machine), rates_of(machine)
        of_stages = [stage.wait_s(latencies) + float((loads / rates).max()) for stage, loads in self._stages]
        if part == "whole":
            return sum(of_stages)
        if self._variant != "tapa":
            raise UserError(f"{self._variant} has no {part}: only tapa has phases")
        return of_stages[PHASES.index(part) - len(PHASES)]  # cards of one tile have only the second phase


@dataclass(frozen=True)
class Fit:
    """The result of a calibration."""

    constants: Constants  # the fitted constants; others have their values from before
    fitted: tuple[str, ...]  # names of the fitted constants
    left: tuple[str, ...]  # names of the constants that the measurements do not determine
    measured: tuple[Measured, ...]  # the measurements
    predicted: tuple[float, ...]  # seconds (or ratio) that the plan predicts for every measurement

    @property
    def rms(self) -> float:
        """The root mean square of the relative errors, as logarithms."""
        errors = [math.log(p / m.value) for p, m in zip(self.predicted, self.measured, strict=True)]
        return math.sqrt(sum(error**2 for error in errors) / len(errors))


def fit(
    topology: Topology, measured: Sequence[Measured], start: Constants, names: Sequence[str], tied: Sequence[str] = ()
) -> Fit:
    """Fit the constants `names` to measurements, those that some measurement depends on. Others keep their values in
    `start`.

    tied: names of constants that share the value of the first of them.
    """
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
    for name in (name for name in names if name.endswith("_us")):  # large enough to have an effect
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
        if seen == chosen and blurred(found.jac):  # if a rate and a latency explain the same, the rate is kept
            seen.remove(next(name for name in BLURRED_FIRST if name in chosen))
        if seen == chosen:
            start = put(found.x)
            break
        chosen[:] = seen
    left = tuple(name for name in names if name not in chosen)
    return Fit(start, tuple(chosen), left, tuple(measured), tuple(predict(start)))


def blurred(slope: np.ndarray) -> bool:
    """Return True if the measurements cannot separate the constants. slope: derivatives, [measurements, constants]."""
    measured, constants = slope.shape
    if constants < 2 or measured < constants:
        return constants > 1
    lengths = np.linalg.norm(slope, axis=0)
    return bool(np.linalg.svd(slope / lengths, compute_uv=False).min() < APART)


# From bench.json to a machine file ------------------------------------------------------------------------------------


def measured_of(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Measured]:
    """Return the measurements of a bench.json that the plan can predict: exchanges, one peer at a time, and TAPA's
    phases.

    Raise UserError if there is none.
    """
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
    """Return the factor by which the measured links were slower than the machine file's. It is 1 unless the machine was
    emulated."""
    for row in rows:
        if row["variant"] == "bound":
            size = float(row["case"].removesuffix("MB"))
            nominal = alltoall_bound(topology, AllToAll(topology, "flat", size).block_bytes)
            return round(row["median_s"] / nominal, 6) if nominal else 1.0
    return 1.0


def slowed(machine: Machine, scale: float) -> Machine:
    """Return a machine whose links are slower by a factor."""
    links, part = machine.links, 1 / scale
    return Constants(links.latency_us, links.message_us, part, part, part).machine(machine)


def told(fit: Fit, scale: float) -> list[str]:
    """Return lines for the terminal: the constants, and measured against predicted times."""
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
    """Return a fit as data for plan.json."""
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
    """Return a machine as the mapping in its file."""
    data = {key: value for key, value in asdict(machine).items() if value is not None}
    data["planes"], data["links"]["nic_of"] = list(machine.planes), list(machine.links.nic_of)
    data["beliefs"] = {one.pop("name"): one for one in data["beliefs"]}
    return data
