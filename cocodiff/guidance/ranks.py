"""The ranks that compute the calls of a model: all of them as one sequence, or two parts with a branch each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cocodiff.comm.transport import Transport
from cocodiff.errors import PeerLost
from cocodiff.guidance.rule import GuidanceRule, SharedCall, Sharing
from cocodiff.progress import StepCounter
from cocodiff.sequence import SequenceRanks
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace

if TYPE_CHECKING:
    from cocodiff.guidance.parts import GuidanceParts

SequenceOf = Callable[[Topology, Transport, Trace], SequenceRanks]  # makes ranks into those of a sequence


class GuidedRanks:
    """current: the ranks that share the current call's sequence. call: who computes it.

    Of the two ways to share a call, the one that the settings do not ask for is set up when a call needs it."""

    def __init__(
        self, topology: Topology, transport: Transport, rule: GuidanceRule, trace: Trace, sequence_of: SequenceOf
    ) -> None:
        self._topology, self._transport, self._rule = topology, transport, rule
        self._trace, self._sequence_of = trace, sequence_of
        # Where guidance is split, calls that all ranks compute together are counted apart.
        self._trace_together = trace.counted_as("unsplit" if rule.pinned else "attention")
        self._together = sequence_of(topology, transport, self._trace_together)
        self._parts: GuidanceParts | None = None
        self.current = self._split().sequence if rule.pinned else self._together
        self.call = SharedCall()
        _ = self.current.strategy

    def begin_call(self, counter: StepCounter, sample: Tensor, return_dict: Any, guided: bool | None) -> None:
        """Decides who computes this call, alike on all ranks, and makes these the current ones. sample: what is
        denoised; return_dict: an argument of the call; guided: whether the pipeline says that it guides, None where it
        does not say."""
        form = tuple(sample.shape), sample.dtype, return_dict
        sharing = self._rule.sharing(counter, len(sample), form, guided)
        if sharing is Sharing.TOGETHER and self._transport.rank == 0:
            self._rule.warn_together(counter.step)
        parts = self._parts if sharing is Sharing.TOGETHER else self._split()
        if parts is not None and counter.branch == 0:
            parts.begin_step(self._rule.expected)
        if parts is None or sharing is Sharing.TOGETHER:
            self.current, self.call = self._together, SharedCall(sharing, True, form)
        else:
            own = sharing is Sharing.ROWS or parts.keeps(counter.branch)
            self.current, self.call = parts.sequence, SharedCall(sharing, own, form)

    def own_rows(self, arguments: Mapping[str, Any], batch: int) -> dict[str, Any] | None:
        """A call's arguments with the rows of the batch that this rank's part computes; None where that is all."""
        if self.call.sharing is not Sharing.ROWS:
            return None
        return self._split().own_rows(arguments, batch)

    def compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward, or what stands in its place on ranks that do not compute this call."""
        call = self.call
        parts = self._split() if call.sharing in (Sharing.ROWS, Sharing.CALLS) else None
        like = self._rule.outputs.get(call.form)
        if parts is not None and not call.own:
            return parts.awaited(like)
        try:
            output = forward(*args, **kwargs)
        except Exception as error:
            if parts is not None and not isinstance(error, PeerLost):
                parts.fail(call.sharing, like)
            raise
        self._rule.note(call, output)
        if parts is None:
            return output
        if call.sharing is Sharing.ROWS:
            return parts.all_rows(output)
        parts.send(output)
        return output

    def comparing(self, branch: int) -> Transport | None:
        """The ranks that compare what they call with; None where this one does not. A part that does not compute a call
        does not wait for the one that does: each compares its own."""
        if self.call.sharing is not Sharing.CALLS or branch == 0:
            return self._transport
        return self.current.transport if self.call.own else None

    def branches_kept(self, branches: int) -> int:
        """Of a step's branches so far, those that this rank keeps something for."""
        each_its_own = self.call.sharing in (Sharing.ALIKE, Sharing.CALLS)
        return (branches + 1) // 2 if each_its_own else branches

    @property
    def sequences(self) -> list[SequenceRanks]:
        """The ranks that this one has shared a sequence with."""
        found = [self._together, *([] if self._parts is None else [self._parts.sequence])]
        return [ranks for ranks in found if ranks.connected]

    def end(self, drain: bool) -> None:
        """Gives memory back. drain: once nothing is under way any more; not where ranks may have stopped at different
        places."""
        if drain and self._parts is not None:
            self._parts.drain()
        for ranks in self.sequences:
            ranks.strategy.coding.end(drain)

    def _split(self) -> GuidanceParts:
        """The two parts of the ranks; all ranks make them together."""
        if self._parts is None:
            from cocodiff.guidance.parts import GuidanceParts

            self._trace_together.purpose = "unsplit"
            self._parts = GuidanceParts(self._topology, self._transport, self._trace, self._sequence_of)
        return self._parts
