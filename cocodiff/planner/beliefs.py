"""Plans at both ends of what a machine file says without a measurement, and the choices that hang on it.

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


class End(NamedTuple):
    """A plan with one value of the machine file at an end of its range."""

    belief: Belief
    believed: float  # the file's value
    value: float  # at this end
    division: Division

    @property
    def side(self) -> str:
        return "below" if self.value < self.believed else "above"


def with_value(division: Division, name: str, value: float) -> Division:
    """Return the same job on a machine with another number of its links or device."""
    cases = []
    for case in division.cases:
        machine = case.topology.machine.with_value(name, value)
        cases.append(replace(case, topology=replace(case.topology, machine=machine)))
    return replace(division, cases=cases)


def ends_of(division: Division) -> Iterator[End]:
    """Yield the plan at the ends of every belief of its machine but for those that are the file's own value."""
    machine = division.cases[0].topology.machine
    for belief in machine.beliefs:
        believed = machine.value(belief.name)
        for value in (belief.low, belief.high):
            if value != believed:
                yield End(belief, believed, value, with_value(division, belief.name, value))


def choices_of(division: Division) -> str:
    """Return the mesh and the codec of the first ranks that share a sequence, in words."""
    mesh, codec = division.mesh, division.parts[0][0][0].config.codec
    ring = f", ring {mesh.ring} of {mesh.kind}" if mesh.ring > 1 else ""
    return f"ulysses {mesh.ulysses}{ring}" + (f", codec {codec}" if codec != "none" else "")


def turning_points(division: Division, holds: Callable[[Division], bool]) -> Iterator[tuple[End, float]]:
    """Yield the ends at which `holds` of a plan is another truth than with the file, and the value from which on."""
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
    """Return a step without the codec and displacement."""
    (case,) = division.cases
    return replace(division, cases=[case.with_settings(codec="none", arrival="now")]).steps[0]


def pays(division: Division) -> bool:
    """Return True if a step with the codec and displacement takes less time than without."""
    return division.steps[0].step_s < uncoded(division).step_s
