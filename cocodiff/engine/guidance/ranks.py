"""Who computes which call of a model that guides: all ranks as one sequence, or two parts with a branch each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cocodiff.comm.trace import CountedAs, Trace
from cocodiff.comm.transport import Transport
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.config.machine import Topology
from cocodiff.engine.guidance import PARTS, SequenceOf, Sharing
from cocodiff.engine.progress import StepCounter
from cocodiff.engine.sequence import SequenceRanks

if TYPE_CHECKING:
    from cocodiff.engine.guidance.parts import GuidanceParts

Form = tuple[Any, ...]  # what tells calls apart whose results look different


class GuidanceRule:
    """Decides who computes which call, by what all ranks know alike. outputs: by a call's form, without values."""

    def __init__(self, setting: int | str, ranks: int, batched: bool, branches: int) -> None:
        """setting: `guidance_parallel`. ranks: that share an image. batched, branches: of the model's family: whether
        both branches are in one call, else its usual calls in a step. Raises UserError for two parts of an odd number
        of ranks."""
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
        """Of the current call. rows: of its batch. guided: whether the pipeline guides; None where it does not say."""
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

    def note(self, form: Form, sharing: Sharing, output: Any) -> None:
        """Keeps what a call returned, without values. Every rank that computed any of it notes it."""
        if self.possible and form not in self.outputs and (sharing is Sharing.ROWS or not self._batched):
            self.outputs[form] = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), output)


class GuidedRanks:
    """Of the current call, sharing: who computes it; current: the ranks that share its sequence; own: whether this
    rank's part keeps its branch and, of CALLS, computes it.

    Of the two ways to share a call, the one that the settings do not ask for is set up when a call needs it."""

    def __init__(
        self, topology: Topology, transport: Transport, rule: GuidanceRule, trace: Trace, sequence_of: SequenceOf
    ) -> None:
        self._topology, self._transport, self._rule = topology, transport, rule
        self._trace, self._sequence_of = trace, sequence_of
        # Where guidance is split, calls that all ranks compute together are counted apart.
        self._trace_together = CountedAs(trace, "unsplit" if rule.pinned else "attention")
        self._together = sequence_of(topology, transport, self._trace_together)
        self._parts: GuidanceParts | None = None
        self.current = self._split().sequence if rule.pinned else self._together
        self.sharing, self.own = Sharing.TOGETHER, True
        self._form: Form = ()
        _ = self.current.strategy

    def begin_call(self, counter: StepCounter, sample: Tensor, return_dict: Any, guided: bool | None) -> None:
        """Decides who computes this call, alike on all ranks, and makes these the current ones. sample: what is
        denoised; return_dict: the call's; guided: see `GuidanceRule.sharing`."""
        self._form = tuple(sample.shape), sample.dtype, return_dict
        self.sharing = self._rule.sharing(counter, len(sample), self._form, guided)
        together = self.sharing is Sharing.TOGETHER
        if together and self._transport.rank == 0:
            self._rule.warn_together(counter.step)
        parts = self._parts if together else self._split()
        if parts is not None and counter.branch == 0:
            parts.begin_step(self._rule.expected)
        if parts is None or together:
            self.current, self.own = self._together, True
        else:
            self.current, self.own = parts.sequence, self.sharing is Sharing.ROWS or parts.keeps(counter.branch)

    def own_rows(self, arguments: Mapping[str, Any], batch: int) -> dict[str, Any] | None:
        """A call's arguments with the rows of the batch that this rank's part computes; None where that is all."""
        if self.sharing is not Sharing.ROWS:
            return None
        return self._split().own_rows(arguments, batch)

    def compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward, or what stands in its place on ranks that do not compute this call."""
        parts = None if self.sharing is Sharing.TOGETHER else self._split()
        like = self._rule.outputs.get(self._form)
        if parts is not None and self.sharing is Sharing.CALLS and not self.own:
            return parts.awaited(like)
        try:
            output = forward(*args, **kwargs)
        except Exception as error:
            if parts is not None and not isinstance(error, PeerLost):
                parts.fail(self.sharing, like)
            raise
        self._rule.note(self._form, self.sharing, output)
        if parts is None:
            return output
        if self.sharing is Sharing.ROWS:
            return parts.all_rows(output)
        # Both parts go on with the same bits, also where products that are repeated have others.
        found = parts.send(output) if self.own else parts.awaited(output)
        if self.sharing is Sharing.ALIKE:  # all ranks compare the next call: no message may keep one of them waiting
            parts.drain()
        return found

    def comparing(self, branch: int) -> Transport | None:
        """The ranks that compare what they call with; None where this one does not. A part that does not compute a call
        does not wait for the one that does: each compares its own."""
        if self.sharing is not Sharing.CALLS or branch == 0:
            return self._transport
        return self.current.transport if self.own else None

    def branches_kept(self, branches: int) -> int:
        """Of a step's branches so far, those that this rank keeps something for."""
        each_its_own = self.sharing in (Sharing.ALIKE, Sharing.CALLS)
        return (branches + 1) // 2 if each_its_own else branches

    @property
    def sequences(self) -> list[SequenceRanks]:
        """The ranks that this one has shared a sequence with."""
        found = [self._together, *([] if self._parts is None else [self._parts.sequence])]
        return [ranks for ranks in found if ranks.connected]

    def end(self, drain: bool) -> None:
        """Gives memory back. drain: see `Codec.end`."""
        if drain and self._parts is not None:
            self._parts.drain()
        for ranks in self.sequences:
            ranks.strategy.codec.end(drain)

    def _split(self) -> GuidanceParts:
        """The two parts of the ranks; all ranks make them together."""
        if self._parts is None:
            from cocodiff.engine.guidance.parts import GuidanceParts

            self._trace_together.purpose = "unsplit"
            self._parts = GuidanceParts(self._topology, self._transport, self._trace, self._sequence_of)
        return self._parts
