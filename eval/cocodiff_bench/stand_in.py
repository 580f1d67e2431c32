"""The layers that stand in for a model's: the engine's attention with real messages, and waits instead of computation.

Waits are as long as a roofline says. So the cores that all ranks of the host share do not affect how well messages can
be hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocodiff.attention.local import LocalAttention, Partial
from cocodiff.attention.strategy import LayerKey
from cocodiff.comm.trace import Span, Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.machine import Device
from cocodiff.engine.assemble import build_strategy
from cocodiff.engine.weights import SplitWeights
from cocodiff.exchange.codec import CallKind, StepInfo
from cocodiff.kernels import Kernels, moved_by
from cocodiff.planner.case import Case
from cocodiff.planner.layers import SITES, PlannedLayer
from cocodiff.planner.memory import block_parameters
from cocodiff.planner.roofline import bytes_of, cost_of, operation_s, seconds
from cocodiff_bench.common import SerialTransport

PASSES = (  # operations that are replaced by waits: scoring and both codecs'
    *("l1_score", "note_change", "encode_residual", "decode_residual", "continue_linearly"),
    *("encode_lossless", "stream_lengths", "decode_lossless"),
)
MOVES = ("pack", "gather_pack", "unpack", "scatter_rows")  # operations that are waited for and run; others are run
# Index of the argument for streams' lengths, which are set to 0: all fit in first parts.
LENGTHS = {"encode_lossless": 4, "stream_lengths": 3}


class Clock:
    """The waits that take the place of a device's computation, on an emulated machine.

    All variants share one object, because they are measured one after the other.
    """

    def __init__(self, device: Device) -> None:
        """Take the device whose computation is waited for. Waits last no time until `dilation` is set."""
        self.device, self.dilation = device, 0.0  # dilation: factor of all waits

    def wait(self, seconds: float, _launches: int = 0) -> None:
        """Wait as long as the device would compute, times `dilation`, the slowness of the emulated machine.

        Args:
            seconds: time of the computation on the device.
            _launches: number of kernel launches, not used: launches of the model's own kernels take no time.
        """
        time.sleep(seconds * self.dilation)


class WaitingKernels(Kernels):
    """The engine's kernels for benchmarks, with scoring and coding replaced by waits. All others are run, and those
    that move blocks are waited for as well.

    A wait is as long as the roofline model of plans says, with one launch. All scores are zero, because it does not
    matter which tokens are chosen. Nothing is coded. Moves have no launch: over gloo each message is one, on a GPU all
    messages of a call are. This host moves blocks in far less time than it then waits.
    """

    def __init__(self, clock: Clock, path: str, note: Callable[[str, str], None]) -> None:
        """Prepare the kernels.

        Args:
            clock: the waits that replace computation.
            path: the engine's setting for kernels.
            note: function that records each run of an operation, by its name and path.
        """
        super().__init__(path, note)
        self._clock = clock

    def _run(self, op: str, *arguments: Any, **named: Any) -> Any:
        """Run an operation, or wait instead of it for as long as the device would take.

        Args:
            op: name of the operation.
            arguments: its arguments.
            named: its named arguments.
        """
        device, moved = self._clock.device, moved_by(op, arguments)
        if op not in PASSES:
            if op in MOVES:
                self._clock.wait(seconds(device, 0.0, *cost_of(op, moved, arguments)))
            return super()._run(op, *arguments, **named)
        self._clock.wait(operation_s(device, op, moved, arguments))
        if op == "l1_score":
            return torch.zeros(2, *arguments[0].shape[:2])
        if op in LENGTHS:
            arguments[LENGTHS[op]].zero_()
        return None


class RooflineAttention(LocalAttention):
    """The attention computation of one rank, replaced by a wait as long as the device's fused kernel takes.

    Results have the right shapes and arbitrary numbers.
    """

    def __init__(self, clock: Clock) -> None:
        """Take the waits that replace computation."""
        self._clock = clock

    def whole(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, _mask: Tensor | None = None) -> Tensor:
        """Wait as long as attention of the queries to the keys would take. Return an output of arbitrary numbers."""
        B, L, G, D = q_BSGD.shape
        out_BSGD = torch.empty_like(q_BSGD)
        moved = bytes_of((q_BSGD, k_BSGD, v_BSGD, out_BSGD))
        self._clock.wait(seconds(self._clock.device, 4.0 * B * L * k_BSGD.shape[1] * G * D, moved))
        return out_BSGD

    def part(self, q_BTGD: Tensor, k_BUGD: Tensor, v_BUGD: Tensor, mask: Tensor | None = None) -> Partial:
        """Wait as long as attention of the queries to these keys would take. Return a partial result, to be merged: an
        output of arbitrary numbers, and log-sum-exps of 0."""
        return Partial(self.whole(q_BTGD, k_BUGD, v_BUGD, mask), torch.zeros(q_BTGD.shape[:3]))


class StandIn:
    """The layers of one variant of `bench step`: real messages, and waits in place of computation.

    A step is a call of `begin`, followed by runs of the layer.
    """

    layer: PlannedLayer  # the layer that is run, again and again; set by `settle`

    def __init__(self, case: Case, transport: Any, clock: Clock) -> None:
        """Build the variant's strategy for attention, as the engine does. All ranks of a sequence do so together.

        Args:
            case: the planner's description of the variant.
            transport: connections to the ranks that share a sequence.
            clock: the waits that replace computation.
        """
        # Seconds of a layer in every call of `run_late`, and the trace's record of the last one.
        self.last_s, self.record = list[float](), dict[str, Any]()
        self._clock, self._trace = clock, Trace(transport.rank)
        over: Any = SerialTransport(transport) if case.one_peer else transport
        kernels = WaitingKernels(clock, case.config.kernels, self._trace.note_kernel)
        context = RankContext(over, case.topology, self._trace, kernels)
        self._strategy = build_strategy(case.config, case.mesh, context, RooflineAttention(clock))
        self.codec, self._step, self._steps = self._strategy.codec, -1, case.steps
        split = case.config.split
        self.shares = split is not None
        # Spans whose names begin so are waits in which nothing is hidden.
        self.waited = "wait for weights" if self.shares else "wait"
        if split is not None:
            self._blocks = StandInModel(statistics.mean(block_parameters(case.shape)))
            SplitWeights(self._blocks, case.topology, transport, split).attach(self._trace)

    def begin(self, kind: CallKind) -> None:
        """Begin the next denoising step. Return when the ranks have agreed on what all its layers share.

        Args:
            kind: the kind of attention calls in the step.
        """
        self.codec.hold_at(kind)
        self._step += 1
        self.codec.begin_step(StepInfo(0, self._step, self._steps))
        self.codec.agree()

    def run(self, layers: int) -> None:
        """Run the first `layers` layers of a step."""
        for number in range(layers):
            self.run_layer(number)

    def run_layer(self, number: int) -> None:
        """Run the stand-in for one layer of the model: with real messages, and waits for computation.

        All layers are equal: the same object is run for each.

        Args:
            number: number of the model's layer, by which codecs keep a state of their own for each.
        """
        name = self.layer.kind.name
        self.layer.run(self._strategy, LayerKey(f"{name} {number}" if number else name))

    def settle(self, layer: PlannedLayer, kind: CallKind) -> None:
        """Set the layer to run, and bring the codec into the state in which calls of one kind are to be measured.

        For that it runs, without waits, the step that starts a run and the next ones, which cost more or less than
        later ones.

        Args:
            layer: the layer to run in place of every layer of the model.
            kind: the kind of attention calls that are measured next.
        """
        self.layer = layer
        self._clock.dilation = 0.0
        leading = 0 if kind.whole else self.codec.steps_to_settle
        for _ in range(1 + leading if leading else 0):
            self.begin(kind._replace(displaced=""))
            self.run(SITES if kind.displaced else 1)

    def run_late(self, kind: CallKind) -> None:
        """Run denoising steps, each of SITES layers, with displaced tensors or shared weights, and time the last one.

        Displaced tensors are sent in one step and used in the next, so there are three steps. At the end no messages
        are in flight. Shared weights are gathered anew in each of two steps, and only the second one's record is kept.
        The seconds of one layer are appended to `last_s`.

        Args:
            kind: the kind of attention calls, which says which tensors are displaced.
        """
        run_step = partial(self._blocks, self.run_layer) if self.shares else partial(self.run, SITES)
        for step in range(2 if self.shares else 3):
            if self.shares or not step:
                self._trace.clear()
            self.begin(kind)
            started = time.perf_counter()
            run_step()
        self.last_s.append((time.perf_counter() - started) / SITES)
        self.record = self._trace.record()
        self.codec.catch_up()


class StandInModel(nn.Module):
    """A model with weights of the right size but no use, to measure their gathering from the ranks that share them.

    Each of its blocks has one tensor of weights. A call of a block runs a function that ignores them.
    """

    def __init__(self, numbers: float) -> None:
        """Make SITES blocks: as many layers in a row as the planner runs for a call that does not wait.

        Args:
            numbers: number of weights of each block, for instance a mean; its fraction is cut off.
        """
        super().__init__()
        self.blocks = nn.ModuleList(StandInBlock(int(numbers)) for _ in range(SITES))

    def forward(self, run_layer: Callable[[int], None]) -> None:
        """Call each block, which calls `run_layer` with the block's number when its weights are gathered."""
        for number, block in enumerate(self.blocks):
            block(partial(run_layer, number))


class StandInBlock(nn.Module):
    """A block of a model, with one tensor of weights. A call runs the function it gets, and ignores the weights."""

    def __init__(self, numbers: int) -> None:
        """Allocate the weights: this number of elements, bfloat16, all 0."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, run: Callable[[], None]) -> None:
        run()


# Bytes that no call waits for -----------------------------------------------------------------------------------------

Interval = tuple[int, int]  # start and end in nanoseconds


class Late(NamedTuple):
    """The bytes of messages that no attention call waits for, and how many of them were hidden: sent while ranks
    computed.

    Such messages carry displaced tensors (docs/exchange.md), or weights that ranks share.
    """

    sent: int  # number of bytes, of all ranks
    hidden: float  # those sent while the main thread did not wait; of a message in part so, in proportion to time

    @classmethod
    def of(cls, of_ranks: Iterable[Sequence[Span]], waited: str = "wait") -> Late:
        """Return these bytes, summed over all ranks, from the recorded spans of the ranks' work.

        Args:
            of_ranks: the spans of each rank's trace.
            waited: beginning of the names of spans in which the main thread waits: bytes sent meanwhile are not hidden.
        """
        sent, hidden = 0, 0.0
        for of_rank in of_ranks:
            waits = union((s.start_ns, s.end_ns) for s in of_rank if s.lane == "main" and s.name.startswith(waited))
            for late in (span for span in of_rank if span.late_bytes):
                duration = late.end_ns - late.start_ns
                unseen = duration - overlap((late.start_ns, late.end_ns), waits)
                sent, hidden = sent + late.late_bytes, hidden + late.late_bytes * (unseen / duration if duration else 1)
        return cls(sent, hidden)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of time intervals as disjoint intervals in ascending order, without empty ones."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined


def overlap(one: Interval, others: Iterable[Interval]) -> int:
    """Return the length of a time interval's intersection with disjoint ones, in nanoseconds."""
    return sum(max(0, min(one[1], end) - max(one[0], start)) for start, end in others)
