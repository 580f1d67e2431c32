"""The choice of the ranks that compute a call of a model with guidance: all as one sequence, or two parts, one a
branch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cocodiff.comm.trace import CountedAs
from cocodiff.comm.transport import RankContext, Transport
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.engine.guidance import PARTS, SequenceOf, Sharing
from cocodiff.engine.progress import StepCounter
from cocodiff.engine.sequence import SequenceRanks

if TYPE_CHECKING:
    from cocodiff.engine.guidance.parts import GuidanceParts

Form = tuple[Any, ...]  # shape, dtype and options of a call: calls of one form return results of equal shapes


class GuidanceRule:
    """The rule that decides which ranks compute a call of the model with guidance: all together, or two parts with a
    branch each.

    It uses only facts that are equal on all ranks.
    """

    def __init__(self, setting: int | str, ranks: int, batched: bool, branches: int) -> None:
        """Set up the rule. Raise UserError if the setting asks for two parts of an odd number of ranks.

        Args:
            setting: the setting `guidance_parallel`: 1, 2 or "auto".
            ranks: number of ranks that share an image.
            batched: True if the model's family has both branches in one call.
            branches: usual number of the family's calls of the model in a step.
        """
        if setting == PARTS and ranks % PARTS:
            wrong = f"guidance_parallel {PARTS}: {ranks} rank(s) cannot be cut into {PARTS} equal parts"
            raise UserError(f"{wrong}: start an even number of ranks, or choose guidance_parallel 1")
        self.pinned = setting == PARTS  # True if the settings ask for two parts
        self._fits = setting != 1 and ranks % PARTS == 0
        self._warned = False
        self.begin()
        self.outputs: dict[Form, Any] = {}  # results by form of the call, as meta tensors
        self._batched, self._usual = batched, branches > 1
        self._first = 1  # number of calls in the first step of the last run that had a second step
        self.expected = 1  # expected number of calls in the current step

    def begin(self) -> None:
        """Start again, because the engine is entered, perhaps with another model than before."""
        self.possible = self._fits  # True while calls may be divided between two parts
        self._at, self._calls = (-1, -1), 0  # run and step of the last call, and the number of that step's calls so far

    def stay_together(self, reason: str) -> None:
        """Have all ranks compute all calls together from now on. Raise UserError if the settings ask for two parts.

        Args:
            reason: what does not go with two parts, in words for the error.
        """
        if self.pinned:
            wrong = f"guidance_parallel {PARTS} and {reason} do not go together, since a part makes some of the calls"
            raise UserError(f"{wrong}: choose guidance_parallel 1, or remove it")
        self.possible = False

    def warn_together(self, step: int) -> None:
        """Warn, once, that all ranks compute a step together though the settings ask for two parts.

        Args:
            step: index of the step.
        """
        if self.pinned and not self._warned:
            self._warned = True
            alone = f"guidance_parallel {PARTS}: step {step} has one guidance branch, so all ranks compute it together"
            warnings.warn(f"{alone}; choose auto or 1 for runs without guidance", stacklevel=2)

    def sharing(self, counter: StepCounter, rows: int, form: Form, guided: bool | None) -> Sharing:
        """Return how the current call of the model is divided between the ranks.

        Args:
            counter: the position of this call: run, step and branch.
            rows: rows of its batch.
            form: its shape, dtype and options; calls of one form return results of equal shapes.
            guided: True if the pipeline uses guidance, None if it does not say.
        """
        if not self.possible:
            return Sharing.TOGETHER
        if self._batched:
            split = rows % PARTS == 0 and (self.pinned if guided is None else guided)
            return Sharing.ROWS if split else Sharing.TOGETHER
        self._count(counter)
        # A first step is split or not regardless of earlier images: else its bits would depend on them.
        apart = self.expected > 1 if counter.step else self.pinned or self._usual or bool(guided)
        if guided is False or not apart:
            return Sharing.TOGETHER
        # ALIKE and CALLS give the same bits.
        return Sharing.CALLS if self.expected > 1 and form in self.outputs else Sharing.ALIKE

    def _count(self, counter: StepCounter) -> None:
        """Count a call of the model. At the first call of a step, set `expected`: how many calls the step is likely to
        have.

        That is the number of the step before, and for a run's first step that of the last run's first step.

        Args:
            counter: the position of the call, run and step; it is only read.
        """
        at = counter.run, counter.step
        if at != self._at:
            if at == (self._at[0], 1):  # not after a first step that failed or was interrupted
                self._first = self._calls
            self.expected = self._calls if counter.step else self._first
            self._at, self._calls = at, 0
        self._calls += 1

    def note(self, form: Form, sharing: Sharing, output: Any) -> None:
        """Keep the shapes and dtypes of what a call returned, for later calls of the same form.

        Every rank that computed a part of the result calls this.

        Args:
            form: the call's shape, dtype and options.
            sharing: how it was divided between the ranks.
            output: what the model returned.
        """
        if self.possible and form not in self.outputs and (sharing is Sharing.ROWS or not self._batched):
            self.outputs[form] = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), output)


class GuidedRanks:
    """The ranks that compute each call of the model: all as one sequence, or two parts with a guidance branch each.

    Both sets are kept. The one that the settings do not ask for is opened when a call needs it.
    """

    def __init__(self, context: RankContext, rule: GuidanceRule, sequence_of: SequenceOf) -> None:
        """Open the connections of the ranks that the settings ask for. All ranks do so together.

        Args:
            context: this rank among all ranks of the engine.
            rule: decides which ranks compute a call.
            sequence_of: makes the object for ranks that share one sequence.
        """
        self._context, self._rule, self._sequence_of = context, rule, sequence_of
        # If guidance is split, the bytes of calls that all ranks compute together are counted separately.
        self._trace_together = CountedAs(context.trace, "unsplit" if rule.pinned else "attention")
        self._together = sequence_of(replace(context, trace=self._trace_together))
        self._parts: GuidanceParts | None = None
        # the ranks that share the call's sequence
        self.current = self._split().sequence if rule.pinned else self._together
        # sharing: how the call is divided; own: True if this rank's part computes or keeps the call's branch
        self.sharing, self.own = Sharing.TOGETHER, True
        self._form: Form = ()
        self.current.connect()

    def begin_call(self, counter: StepCounter, sample: Tensor, return_dict: Any, guided: bool | None) -> None:
        """Decide which ranks compute this call of the model, with the same result on all ranks.

        Set `sharing` to how the call is divided, and `current` to the ranks that share this rank's sequence. Set `own`
        to False if the other part computes or keeps the result.

        Args:
            counter: the position of this call: run, step and branch.
            sample: the tensor that is denoised.
            return_dict: the call's argument of that name, which changes the type of the result.
            guided: True if the pipeline uses guidance, None if it does not say.
        """
        self._form = tuple(sample.shape), sample.dtype, return_dict
        self.sharing = self._rule.sharing(counter, len(sample), self._form, guided)
        together = self.sharing is Sharing.TOGETHER
        if together and self._context.transport.rank == 0:
            self._rule.warn_together(counter.step)
        parts = self._parts if together else self._split()
        if parts is not None and counter.branch == 0:
            parts.begin_step(self._rule.expected)
        if parts is None or together:
            self.current, self.own = self._together, True
        else:
            self.current, self.own = parts.sequence, self.sharing is Sharing.ROWS or parts.keeps(counter.branch)

    def own_rows(self, arguments: Mapping[str, Any], batch: int) -> dict[str, Any] | None:
        """Return a call's arguments with the rows of the batch that this rank's part computes; None if it computes all
        of them.

        Args:
            arguments: the call's arguments, by name.
            batch: rows of the batch.
        """
        if self.sharing is not Sharing.ROWS:
            return None
        return self._split().own_rows(arguments, batch)

    def compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of the model's forward on every rank: computed here, or received from the other part.

        A received result is returned at once, and its tensors wait for their values when they are read. With
        `Sharing.ROWS` each part computes half of the batch, and they exchange halves.

        Args:
            forward: the model's own forward.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
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
        # Both parts continue with the same bits, even if repeated products differ.
        found = parts.send(output) if self.own else parts.awaited(output)
        if self.sharing is Sharing.ALIKE:  # all ranks compare the next call, so none may wait for a message
            parts.drain()
        return found

    def comparing(self, branch: int) -> Transport | None:
        """Return the connections of the ranks that compare the inputs of this call; None if this rank does not take
        part.

        If each call of a step is made by one of two parts, each part compares by itself from the second call on: it
        does not wait for the other's calls.

        Args:
            branch: guidance branch of the call, from 0.
        """
        if self.sharing is not Sharing.CALLS or branch == 0:
            return self._context.transport
        return self.current.transport if self.own else None

    def branches_kept(self, branches: int) -> int:
        """Return for how many guidance branches this rank keeps tensors between steps.

        Args:
            branches: number of branches that the current step has had so far.
        """
        each_its_own = self.sharing in (Sharing.ALIKE, Sharing.CALLS)
        return (branches + 1) // 2 if each_its_own else branches

    @property
    def sequences(self) -> list[SequenceRanks]:
        """The sets of ranks, of this rank's, that are connected and so have a codec: all ranks, its part of two, or
        both."""
        found = [self._together, *([] if self._parts is None else [self._parts.sequence])]
        return [ranks for ranks in found if hasattr(ranks, "strategy")]

    def end(self, drain: bool) -> None:
        """Free the memory of all codecs, when the engine is left.

        Args:
            drain: True to receive messages in flight first; False after a failure.
        """
        if drain and self._parts is not None:
            self._parts.drain()
        for ranks in self.sequences:
            ranks.strategy.codec.end(drain)

    def _split(self) -> GuidanceParts:
        """Return this rank's part of two. The first call opens its connections: all ranks make it together."""
        if self._parts is None:
            from cocodiff.engine.guidance.parts import GuidanceParts

            self._trace_together.purpose = "unsplit"
            self._parts = GuidanceParts(self._context, self._sequence_of)
        return self._parts
