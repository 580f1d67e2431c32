"""Who computes which call of a model that guides: all ranks together, or each of two parts some."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from cocodiff.errors import UserError
from cocodiff.guidance.containers import mapped
from cocodiff.progress import StepCounter
from cocodiff.topology.axes import Axes, Mesh
from cocodiff.topology.machine import Topology

PARTS = 2
Form = tuple[Any, ...]  # what tells calls apart whose results look different


class Sharing(Enum):
    """Who computes a call of the model."""

    TOGETHER = "all ranks, as one sequence"
    ALIKE = "both parts, each as if it were alone"
    ROWS = "each part its half of the batch"
    CALLS = "one of the parts, for both"


@dataclass
class SharedCall:
    """A call of the model. own: whether this rank's part keeps the branch; where CALLS goes, whether it computes it."""

    sharing: Sharing = Sharing.TOGETHER
    own: bool = True
    form: Form = ()


class GuidanceRule:
    """Decides who computes which call, by what all ranks know alike. outputs: by the form of a call, what the model
    returned, without values."""

    def __init__(self, setting: int | str, ranks: int, batched: bool, branches: int) -> None:
        """setting: `guidance_parallel`. ranks: that share an image. batched, branches: of the model's family: whether
        both branches are in one call, else its usual calls in a step.

        Raises UserError for two parts of an odd number of ranks."""
        if setting == PARTS and ranks % PARTS:
            raise UserError(
                f"guidance_parallel {PARTS}: {ranks} rank(s) cannot be cut into {PARTS} equal parts: start an even "
                f"number of ranks, or choose guidance_parallel 1"
            )
        self.pinned = setting == PARTS
        self._fits = setting != 1 and ranks % PARTS == 0
        self._warned = False
        self.begin()
        self.outputs: dict[Form, Any] = {}
        self._batched, self._usual = batched, branches > 1
        self._first = 1  # calls in the first step of the last run that had a second one
        self.expected = 1  # calls of the current step, as far as can be known

    def begin(self) -> None:
        """The engine is entered, perhaps with another model than before."""
        self.possible = self._fits
        self._at, self._calls = (-1, -1), 0  # run and step of the last call, and that step's calls so far

    def stay_together(self, reason: str) -> None:
        """All ranks compute all calls from now on. Raises UserError where the settings ask for two parts."""
        if self.pinned:
            raise UserError(
                f"guidance_parallel {PARTS} and {reason} do not go together, since a part makes some of the calls: "
                f"choose guidance_parallel 1, or remove it"
            )
        self.possible = False

    def warn_together(self, step: int) -> None:
        """All ranks compute a call together: says so once where the settings ask for two parts."""
        if self.pinned and not self._warned:
            self._warned = True
            warnings.warn(
                f"guidance_parallel {PARTS}: step {step} has one guidance branch, so all ranks compute it together; "
                f"choose auto or 1 for runs without guidance",
                stacklevel=2,
            )

    def sharing(self, counter: StepCounter, rows: int, form: Form, guided: bool | None) -> Sharing:
        """Of the current call. rows: of its batch. guided: whether the pipeline says that it guides; None where it does
        not say."""
        if not self.possible:
            return Sharing.TOGETHER
        if self._batched:
            split = rows % PARTS == 0 and (self.pinned if guided is None else guided)
            return Sharing.ROWS if split else Sharing.TOGETHER
        self._count(counter)
        # Nothing of an earlier image decides whether a first step is split: the bits would depend on that image.
        apart = self.expected > 1 if counter.step else self.pinned or self._usual or bool(guided)
        if guided is False or not apart:
            return Sharing.TOGETHER
        # Both parts computing a call, and one of them for both, give the same bits.
        return Sharing.CALLS if self.expected > 1 and form in self.outputs else Sharing.ALIKE

    def _count(self, counter: StepCounter) -> None:
        """Notes the call; at the first one of a step, how many this step will have."""
        at = counter.run, counter.step
        if at != self._at:
            if at == (self._at[0], 1):  # a first step that failed or was interrupted tells nothing
                self._first = self._calls
            self.expected = self._calls if counter.step else self._first
            self._at, self._calls = at, 0
        self._calls += 1

    def note(self, call: SharedCall, output: Any) -> None:
        """Keeps what a call returned, without its values; of a call in one batch this part's rows. Every rank that
        computed it notes it."""
        if self.possible and call.form not in self.outputs and (call.sharing is Sharing.ROWS or not self._batched):
            self.outputs[call.form] = mapped(output, lambda x: torch.empty_like(x, device="meta"))


def parts_fit(topology: Topology, mesh_on: Callable[[Topology], Mesh]) -> bool:
    """Whether ranks can be cut into parts of which each has a mesh. mesh_on: of some ranks; it raises UserError where
    they cannot have one."""
    try:
        for ranks in Axes.build(topology, guidance=PARTS).branches[0]:
            mesh_on(topology.part(ranks))
    except UserError:
        return False
    return True
