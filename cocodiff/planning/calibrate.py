"""Latencies and link efficiencies from measured all-to-alls: those with which the virtual machine takes as long.

The exchanges are recorded once; a least-squares fit of the logarithms varies the constants that they are simulated
with. A constant that no measurement depends on stays as the machine file has it, and is said to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from cocodiff.errors import UserError
from cocodiff.planning.one_peer import SerialTransport
from cocodiff.planning.program import Message, Program
from cocodiff.planning.simulate import Latencies, Outcome, simulate
from cocodiff.planning.virtual import VirtualTrace, VirtualTransport, record
from cocodiff.topology.layout import Layout
from cocodiff.topology.links import Network
from cocodiff.topology.machine import Machine, Topology
from cocodiff.topology.segments import Segment
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.outgoing import CodedCall
from cocodiff.wire.transfer import Transfer

ROW_BYTES = 512  # of a row of a block, as bench alltoall has it
NAMES = ("latency_us", "message_us", "sibling", "plane", "nic")
BEGIN = 0.05  # of the shortest measurement: where the search for a latency begins
EVALUATIONS = 30  # of the measurements, in the search for the constants
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
        """The machine with these latencies and the rates that its links reach."""
        links = nominal.links
        return replace(
            nominal,
            links=replace(
                links,
                latency_us=self.latency_us,
                message_us=self.message_us,
                sibling_gb_s=links.sibling_gb_s * self.sibling,
                plane_gb_s=links.plane_gb_s * self.plane,
                nic_gb_s=links.nic_gb_s * self.nic,
            ),
        )


@dataclass(frozen=True)
class Measured:
    """Seconds of an exchange of so many MB per rank, the own block included. variant: an exchange, or "flat_serial".

    part: "whole", "phase1" or "phase2" of tapa. over: another measurement that `value` is the ratio to.
    """

    variant: str
    size_mb: float
    value: float
    part: str = "whole"
    over: Measured | None = None


class AllToAll:
    """An exchange of equal blocks on all ranks, recorded."""

    def __init__(self, topology: Topology, variant: str, size_mb: float) -> None:
        self._topology, self._variant = topology, variant
        self._rows = max(1, round(size_mb * 1e6 / topology.size / ROW_BYTES))

    @cached_property
    def _recorded(self) -> tuple[list[Program], list[Message]]:
        P, L = self._topology.size, self._rows
        layout = Layout.build(self._topology, (Segment("rows", L * P),), P)

        def work(transport: VirtualTransport) -> None:
            over: Any = SerialTransport(transport) if self._variant == "flat_serial" else transport
            trace = VirtualTrace(transport.recorder)
            exchange = Exchange(self._variant.removesuffix("_serial"), self._topology, over, trace)
            x_BLHD = torch.empty(1, L, P, ROW_BYTES // 4, device="meta")
            Transfer(exchange, CodedCall(layout)).send(x=x_BLHD)["x"].wait()

        _, programs, messages = record(P, work)
        return programs, messages

    @property
    def block_bytes(self) -> int:
        return self._rows * ROW_BYTES

    def outcome(self, machine: Machine) -> Outcome:
        topology = replace(self._topology, machine=machine)
        return simulate(*self._recorded, Network(topology), Latencies.of(machine)._replace(launch_s=0.0))

    def seconds(self, machine: Machine, part: str = "whole") -> float:
        """Of the slowest rank; of a phase, the median rank."""
        outcome = self.outcome(machine)
        if part == "whole":
            return outcome.seconds
        lane = {"phase1": "sibling", "phase2": "plane"}[part]
        lengths = sorted(s.end_ns - s.start_ns for spans in outcome.spans for s in spans if s.lane == lane)
        if not lengths:
            raise UserError(f"{self._variant} has no {part}: only tapa has phases")
        return lengths[len(lengths) // 2] / 1e9


@dataclass(frozen=True)
class Fit:
    """constants: fitted ones, others as they were. fitted: their names. predicted: of every measurement."""

    constants: Constants
    fitted: tuple[str, ...]
    predicted: tuple[float, ...]

    def rms(self, measured: Sequence[Measured]) -> float:
        """The root of the mean squared relative error, by logarithms."""
        errors = [math.log(p / m.value) for p, m in zip(self.predicted, measured, strict=True)]
        return math.sqrt(sum(error**2 for error in errors) / len(errors))


class Calibration:
    """Fits a topology's machine to measurements."""

    def __init__(self, topology: Topology, measured: Sequence[Measured]) -> None:
        self.topology, self.measured = topology, measured
        self._exchanges: dict[tuple[str, float], AllToAll] = {}

    def predict(self, constants: Constants) -> list[float]:
        machine = constants.machine(self.topology.machine)
        return [self._predict(one, machine) for one in self.measured]

    def _predict(self, one: Measured, machine: Machine) -> float:
        key = (one.variant, one.size_mb)
        if key not in self._exchanges:
            self._exchanges[key] = AllToAll(self.topology, *key)
        seconds = self._exchanges[key].seconds(machine, one.part)
        return seconds / self._predict(one.over, machine) if one.over is not None else seconds

    def fit(self, start: Constants, names: Sequence[str] = NAMES, tied: Sequence[str] = ()) -> Fit:
        """Fits the named constants that some measurement depends on. tied: those that have the first one's value."""

        def put(x: np.ndarray) -> Constants:
            values = dict(zip(chosen, np.exp(x).tolist(), strict=True))
            if tied and tied[0] in values:
                values |= dict.fromkeys(tied[1:], values[tied[0]])
            return replace(first, **values)

        chosen, first = list(names), start
        target = np.log([one.value for one in self.measured])
        shortest_us = 1e6 * min((one.value for one in self.measured if one.over is None), default=0.0)
        known = {name: getattr(start, name) for name in names}
        for name in (name for name in names if name.endswith("_us")):  # so large that it would be seen
            known[name] = max(known[name], BEGIN * shortest_us)
        while True:
            first = replace(start, **{name: known[name] for name in chosen})

            def errors(x: np.ndarray) -> np.ndarray:
                return np.log(self.predict(put(x))) - target

            x = np.log([known[name] for name in chosen])
            if chosen:
                x = least_squares(
                    errors, x, lambda x: jacobian(errors, x, errors(x)), xtol=1e-6, max_nfev=EVALUATIONS
                ).x
            slope = jacobian(errors, x, errors(x), math.log(2.0))
            moves = np.abs(slope).max(axis=0) * math.log(2.0)
            seen = [name for name, move in zip(chosen, moves, strict=True) if move > MOVES_NOTHING]
            if seen == chosen and blurred(slope):  # a rate and a latency would explain the same: the rate does
                seen = [name for name in chosen if name != next(n for n in BLURRED_FIRST if n in chosen)]
            if seen == chosen:
                constants = put(x)
                return Fit(constants, tuple(chosen), tuple(self.predict(constants)))
            chosen[:] = seen


def blurred(slope: np.ndarray) -> bool:
    """Whether the measurements cannot tell the constants apart, from their derivatives."""
    measured, constants = slope.shape
    if constants < 2 or measured < constants:
        return constants > 1
    lengths = np.linalg.norm(slope, axis=0)
    return bool(np.linalg.svd(slope / lengths, compute_uv=False).min() < APART)


def jacobian(
    errors: Callable[[np.ndarray], np.ndarray], x: np.ndarray, at_x: np.ndarray, step: float = 1e-3
) -> np.ndarray:
    columns = [np.zeros((len(at_x), 0))] if not len(x) else []
    for index in range(len(x)):
        moved = x.copy()
        moved[index] += step
        columns.append((errors(moved) - at_x) / step)
    return np.column_stack(columns)
