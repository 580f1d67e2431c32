"""Plans at both ends of the ranges that a machine file gives without a measurement, and the choices that depend on
them.

A machine file's `beliefs` give the range in which a value may lie. Each is looked at alone: all other values stay as
the file has them. Meshes and codecs that `auto` stands for are chosen again, as for a file with the other value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from cocodiff.config.machine import Belief
from cocodiff.planner.choice import Division
from cocodiff.planner.layers import StepPlan

WORTH_SAYING = 0.1  # an end that changes a step by a smaller share of it is not reported
HALVINGS = 7  # of a range, to find the value at which a choice changes


class RangeEnd(NamedTuple):
    """The plan of a job if one unmeasured value of the machine file is at an end of its range."""

    belief: Belief  # the value that was not measured, with its range
    believed: float  # the file's value
    value: float  # the value at this end of the range
    division: Division  # the plan with that value

    @property
    def side(self) -> str:
        """The side of the file's value on which this end lies, "below" or "above"."""
        return "below" if self.value < self.believed else "above"


def with_value(division: Division, name: str, value: float) -> Division:
    """Return the plan of the same job on a machine with another number of its links or device.

    Args:
        division: the plan on the machine as its file describes it.
        name: name of the field of `Links` or `Device`.
        value: the other number, in the field's unit.
    """
    cases = []
    for case in division.cases:
        machine = case.topology.machine.with_value(name, value)
        cases.append(replace(case, topology=replace(case.topology, machine=machine)))
    return replace(division, cases=cases)


def ends_of(division: Division) -> Iterator[RangeEnd]:
    """Yield the plans with each unmeasured value of the machine file at the low and the high end of its range.

    An end that equals the file's own value is left out.
    """
    machine = division.cases[0].topology.machine
    for belief in machine.beliefs:
        believed = machine.value(belief.name)
        for value in (belief.low, belief.high):
            if value != believed:
                yield RangeEnd(belief, believed, value, with_value(division, belief.name, value))


def choices_of(division: Division) -> str:
    """Return the mesh and the codec of a plan in words, such as "ulysses 12, codec int4": those of the first ranks that
    share a sequence."""
    mesh, codec = division.mesh, division.parts[0][0][0].config.codec
    ring = f", ring {mesh.ring} of {mesh.kind}" if mesh.ring > 1 else ""
    return f"ulysses {mesh.ulysses}{ring}" + (f", codec {codec}" if codec != "none" else "")


def turning_points(division: Division, holds: Callable[[Division], bool]) -> Iterator[tuple[RangeEnd, float]]:
    """Yield the ends of ranges at which a statement about the plan is no longer what it is with the machine file's
    values.

    Each comes as (the plan at that end, the value of the machine at which the statement changes).

    Args:
        division: the plan with the file's values.
        holds: the statement, such as `pays`: a function of a plan.
    """
    with_file = holds(division)
    for end in ends_of(division):
        if holds(end.division) == with_file:
            continue
        near, far = end.believed, end.value
        for _ in range(HALVINGS):
            middle = (near + far) / 2
            if holds(with_value(division, end.belief.name, middle)) == with_file:
                near = middle
            else:
                far = middle
        yield end, (near + far) / 2


def uncoded(division: Division) -> StepPlan:
    """Return the predicted costs of the same job's step with neither codec nor displacement, for comparison."""
    (case,) = division.cases
    return replace(division, cases=[case.with_settings(codec="none", arrival="now")]).steps[0]


def pays(division: Division) -> bool:
    """Return True if a step with the codec and displacement is predicted to take less time than without them."""
    return division.steps[0].step_s < uncoded(division).step_s
