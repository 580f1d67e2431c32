"""The layers of a model on all ranks, recorded: the engine's own strategies, and waits for the model's arithmetic.
And a step of them: its time by simulation, its bytes by the strategies' own count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.assemble import AttentionWork, build_strategy, mesh_of
from cocodiff.attention.strategy import LazyQKV, Site, nothing
from cocodiff.attention.ulysses import Ulysses
from cocodiff.config import Config
from cocodiff.kernels import Kernels
from cocodiff.models.tokens import IMAGE
from cocodiff.planning.costs import WHOLE, CallKind, Typical, costs_of
from cocodiff.planning.decisions import Decisions, decisions_of, without_seldom
from cocodiff.planning.memory import Load, ModelShape
from cocodiff.planning.one_peer import SerialTransport
from cocodiff.planning.pricing import DTYPES, PricedKernels, Pricing
from cocodiff.planning.program import Label, Message, Program, Recorder
from cocodiff.planning.roofline import Layer, roofline
from cocodiff.planning.simulate import Latencies, Outcome, simulate
from cocodiff.planning.virtual import VirtualTrace, VirtualTransport, record
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout, Segments
from cocodiff.topology.links import Network
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES, Span, Trace
from cocodiff.wire.coding import Moment

SAMPLES = (0.0, 0.5, 1.0)  # stable fractions that are recorded where a schedule has more than three
SITES = 3  # layers whose calls follow one another where some do not wait for what they send
LAST_CALL = "last call of the model"  # the span of it
LAUNCHES_V, LAUNCHES_QK, LAUNCHES_REST = 1, 4, 4  # q and k: a product of each; normalisation and rotation in one
Make = Callable[[Config, Mesh, Any, Trace, Kernels], Ulysses]


@dataclass(frozen=True)
class Case:
    """The run that is planned. stable: where a threshold decides, the part of the tokens that stay. decisions: what a
    controller decides, by recorded runs to choose from; () for the shipped ones. one_peer: groups serve one peer at a
    time. make: builds a rank's strategy. known_mesh: of Ulysses and Ring; None for the one that the
    engine would choose."""

    shape: ModelShape
    topology: Topology
    config: Config
    load: Load
    steps: int = 50
    stable: float = 0.7
    decisions: tuple[Decisions, ...] = ()
    one_peer: bool = False
    make: Make = build_strategy
    known_mesh: Mesh | None = None

    @cached_property
    def mesh(self) -> Mesh:
        """Of Ulysses and Ring."""
        return self.known_mesh or mesh_of(
            self.config, self.topology, AttentionWork(self.shape.heads, self.shape.head_dim)
        )


class Kind(NamedTuple):
    """Layers that take alike: their number in one call of the model, what they attend to; whether what follows
    attention is done while q and k travel."""

    name: str
    layers: int
    segments: Segments
    beside: bool = False


class Segment(NamedTuple):
    """Layers of one kind whose calls are of one kind, on all ranks. layers: how many layers the programs' last call of
    the model has; where a call does not wait for what it sends, the span LAST_CALL is that of it, after some that are
    not counted. bytes: of one layer. agreement: what the ranks agree on once for all layers of a call of the model."""

    kind: CallKind
    programs: list[Program]
    messages: list[Message]
    bytes: dict[str, float]
    agreement: list[Program]
    layers: int = 1

    def seconds(self, outcome: Outcome) -> float:
        """Of one layer."""
        if not self.kind.displaced:
            return outcome.seconds
        calls = [span for of_rank in outcome.spans for span in of_rank if span.name == LAST_CALL]
        return (max(one.end_ns for one in calls) - min(one.start_ns for one in calls)) / 1e9 / self.layers

    def counted(self, spans: Sequence[Span]) -> list[Span]:
        """Those of a rank that are shown: where there are several layers, the last one's."""
        if not self.kind.displaced:
            return list(spans)
        (call,) = (span for span in spans if span.name == LAST_CALL)
        start_ns = call.end_ns - (call.end_ns - call.start_ns) // self.layers
        return [
            span._replace(start_ns=span.start_ns - start_ns, end_ns=span.end_ns - start_ns)
            for span in spans
            if span.start_ns >= start_ns
        ]

    def compute_s(self, launch_s: float) -> float:
        """Of one layer, on the rank that computes longest."""
        within = LAST_CALL if self.kind.displaced else None
        return max(program.compute_s(launch_s, within) for program in self.programs) / self.layers


def kinds_of(shape: ModelShape, load: Load) -> list[Kind]:
    """A parallel MLP takes as long as one that follows, and waits for no attention."""
    found = (
        Kind("joint", shape.joint_layers, load.segments),
        Kind("parallel", shape.parallel_layers, load.segments, True),
        Kind("image", shape.image_layers, tuple(one for one in load.segments if one.name == IMAGE)),
    )
    return [kind for kind in found if kind.layers]


def kinds_of_steps(case: Case) -> list[Mapping[CallKind, float]]:
    """Of every step the parts of its calls by their kind."""
    if case.topology.size == 1:
        return [{WHOLE: 1.0}] * case.steps
    decisions = decisions_of(case.config, case.steps, case.decisions)
    displaced = without_seldom(decisions.over(case.steps)) if decisions else ()
    return costs_of(case.config).kinds_of_steps(case.config, case.steps, Typical(case.stable, displaced))


def recorded_kinds(case: Case) -> list[CallKind]:
    """Those of them that are recorded; of many stable fractions some, and between these straight lines."""
    kinds = {kind for step in kinds_of_steps(case) for kind in step}
    if len({kind.stable for kind in kinds if not kind.whole}) > len(SAMPLES):
        kinds = {kind for kind in kinds if kind.whole} | {CallKind(stable=part) for part in SAMPLES}
    return sorted(kinds, key=lambda kind: (not kind.whole, kind.displaced, *kind[1:]))


def record_layers(case: Case, kind: Kind) -> list[Segment]:
    """Layers of one kind in calls of every kind of `recorded_kinds`. All ranks begin together.

    A call that waits for all that it sends is one layer's. Others hide what they send behind the layers that follow,
    and the same layer's next call waits for it: there SITES layers follow one another in three calls of the model, of
    which the last one is counted. Messages that take longer than the layers compute have then filled the lanes, and a
    call takes as long as they do. A real model has more layers to hide behind."""
    layouts = case.mesh.layouts(kind.segments, case.shape.heads)
    kinds = recorded_kinds(case)

    def work(transport: VirtualTransport) -> list[tuple[Program, dict[str, float], Program]]:
        rank = transport.rank
        group, slot = case.mesh.group_and_slot(rank)
        trace = VirtualTrace(transport.recorder)
        pricing = Pricing(transport.recorder, case.topology.machine.device)
        with pricing:
            kernels = PricedKernels(pricing, case.stable, case.config.threshold, rank)
            over: Any = SerialTransport(transport) if case.one_peer else transport
            strategy = case.make(case.config, case.mesh, over, trace, kernels)
            shape = (case.load.batch, layouts[group].rows[slot], case.shape.heads, case.shape.head_dim)
            x_BLHD = torch.empty(shape, device="meta", dtype=DTYPES[case.load.itemsize])
            layer = PlannedLayer(case, kind, layouts[group], slot, pricing.compute, x_BLHD)
            calls = RecordedCalls(case, strategy, layer, transport.recorder, trace)
            if strategy.coding.keeps_state:  # what happens once in a run is not what a step is like
                calls.call(WHOLE, 1)
                costs_of(case.config).prepare(strategy.coding, layouts[group], torch.device("cpu"))
            return [calls.of_kind(one) for one in kinds]

    of_ranks, _, messages = record(case.topology.size, work, receives_ahead=False)  # as on the device that is priced
    return [
        Segment(
            one,
            [of_rank[index][0] for of_rank in of_ranks],
            messages,
            {link: sum(of_rank[index][1][link] for of_rank in of_ranks) for link in LINK_CLASSES},
            [of_rank[index][2] for of_rank in of_ranks],
            SITES if one.displaced else 1,
        )
        for index, one in enumerate(kinds)
    ]


class ModelCalls:
    """One rank's calls of a model that has some layers alike, one after the other: recorded ones or a benchmark's.

    layers: what one layer is, each for a guidance branch of its own."""

    def __init__(self, config: Config, strategy: Ulysses, steps: int) -> None:
        self.coding, self.costs, self.layers = strategy.coding, costs_of(config), list[PlannedLayer]()
        self._strategy, self._image, self._step, self._steps = strategy, 0, -1, steps

    def begin(self, kind: CallKind) -> None:
        """The next step, of calls of this kind. Returns when what ranks agree on once for all its layers is there."""
        self.costs.hold_at(self.coding, kind)
        self._step += 1
        self.coding.begin_step(Moment(self._image, self._step, self._steps))
        self.costs.agree(self.coding)

    def run(self, layers: int) -> None:
        for number in range(layers):
            for branch, layer in enumerate(self.layers):
                layer.run(self._strategy, Site(f"{layer.kind.name} {number}" if number else layer.kind.name, branch))


class RecordedCalls(ModelCalls):
    """Calls whose programs and bytes are recorded."""

    def __init__(
        self, case: Case, strategy: Ulysses, layer: PlannedLayer, recorder: Recorder, trace: VirtualTrace
    ) -> None:
        super().__init__(case.config, strategy, case.steps)
        self.layers, self._recorder, self._trace = [layer], recorder, trace
        self._settled = 0  # layers whose calls are like those that follow

    def call(self, kind: CallKind, layers: int) -> Program:
        """A call of the model. Returns the program of what is settled once for all its layers, which is not theirs."""
        with self._recorder.apart() as agreement:
            self.begin(kind)
        self.run(layers)
        return agreement

    def of_kind(self, kind: CallKind) -> tuple[Program, dict[str, float], Program]:
        """The program of calls of a kind, see `record_layers`, the bytes of one layer, and what ranks agree on."""
        layers = SITES if kind.displaced else 1
        for _ in range(0 if kind.whole or layers == self._settled else self.costs.steps_to_settle):
            self.call(kind._replace(displaced=""), layers)
        self._settled = 0 if kind.whole else layers
        if kind.whole and self.costs.steps_to_settle:  # it begins a run: nothing came before it
            self._image += 1
        self._recorder.cut()
        for _ in range(2 if kind.displaced else 0):
            self.call(kind, layers)
        self._trace.clear()
        with self._recorder.span(Label(LAST_CALL, "main", "")) if kind.displaced else nullcontext():
            agreement = self.call(kind, layers)
        sent = {link: count / layers for link, count in self._trace.bytes().items()}
        program = self._recorder.cut()
        self.costs.catch_up(self.coding)  # what is in flight is no part of the next program
        return program, sent, agreement


class PlannedLayer:
    """One rank's layer: q, k and v of the right size, which take as long as the roofline says, attention, the rest."""

    def __init__(
        self, case: Case, kind: Kind, layout: Layout, slot: int, compute: Callable[[float, int], None], x_BLHD: Tensor
    ) -> None:
        """layout: of the rank's Ulysses group, in which it has this slot. compute: told of seconds and launches before
        each thing that is computed. x_BLHD: stands for q, k and v."""
        self.kind, self._heads, self._compute, self._x_BLHD = kind, case.shape.heads, compute, x_BLHD
        self.times: Layer = roofline(case.shape, case.topology, sum(layout.rows), case.load.batch, slot, layout)

    def run(self, strategy: Ulysses, site: Site) -> None:
        strategy.attend(self.qkv(), site)
        if not self.kind.beside:
            self._rest()

    def qkv(self) -> LazyQKV:
        def projected(seconds: float, launches: int) -> Callable[[], Tensor]:
            def project() -> Tensor:
                self._compute(seconds, launches)
                return self._x_BLHD

            return project

        half, v = projected(self.times.project_qk / 2, LAUNCHES_QK // 2), projected(self.times.project_v, LAUNCHES_V)
        meanwhile = self._rest if self.kind.beside else nothing
        return LazyQKV(half, half, v, self.kind.segments, self._heads, meanwhile=meanwhile)

    def _rest(self) -> None:
        self._compute(self.times.rest, LAUNCHES_REST)


def of_kind(known: Mapping[CallKind, float], kind: CallKind) -> float:
    """A quantity known for some kinds of calls, for another one, which leaves another part of the tokens behind."""
    if kind in known:
        return known[kind]
    parts = sorted((one.stable, value) for one, value in known.items() if not one.whole)
    upper = next(pair for pair in parts if pair[0] >= kind.stable)
    lower = next(pair for pair in reversed(parts) if pair[0] <= kind.stable)
    return lower[1] + (kind.stable - lower[0]) / (upper[0] - lower[0]) * (upper[1] - lower[1])


def over_steps(known: Mapping[CallKind, float], steps: Sequence[Mapping[CallKind, float]]) -> float:
    """The mean over all steps of a quantity that is known for kinds of calls."""
    return statistics.mean(sum(part * of_kind(known, kind) for kind, part in step.items()) for step in steps)


@dataclass(frozen=True)
class StepPlan:
    """Seconds of a mean step. compute_s: of the rank that computes longest; bytes: of all ranks, by link class."""

    step_s: float
    compute_s: float
    bytes: dict[str, float]
    steps: int

    @property
    def image_s(self) -> float:
        """Denoising alone: no text encoder, no VAE."""
        return self.step_s * self.steps

    @property
    def communication_share(self) -> float:
        return 1 - self.compute_s / self.step_s if self.step_s else 0.0


class Recording:
    """All kinds of layers of a case, recorded once; simulated on any rates and latencies."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def kinds(self) -> list[tuple[Kind, list[Segment]]]:
        return [(kind, record_layers(self.case, kind)) for kind in kinds_of(self.case.shape, self.case.load)]

    def agreement_s(self, network: Network, latencies: Latencies) -> float:
        """Seconds of what ranks agree on in a mean call of the model, as if nothing were computed meanwhile."""
        _, segments = self.kinds[0]
        times = {s.kind: simulate(s.agreement, s.messages, network, latencies).seconds for s in segments}
        return over_steps(times, kinds_of_steps(self.case))

    def outcome(self, segment: Segment, network: Network, latencies: Latencies) -> Outcome:
        return simulate(segment.programs, segment.messages, network, latencies)

    def plan(self, network: Network, latencies: Latencies) -> StepPlan:
        """Layers follow one another with all ranks together at the start of each."""
        case, every = self.case, kinds_of_steps(self.case)
        step_s, compute_s = case.load.branches * self.agreement_s(network, latencies), 0.0
        sent = dict.fromkeys(LINK_CLASSES, 0.0)
        for kind, segments in self.kinds:
            calls = kind.layers * case.load.branches
            times = {s.kind: s.seconds(self.outcome(s, network, latencies)) for s in segments}
            step_s += calls * over_steps(times, every)
            compute_s += calls * over_steps({s.kind: s.compute_s(latencies.launch_s) for s in segments}, every)
            for link in LINK_CLASSES:
                sent[link] += calls * over_steps({s.kind: s.bytes[link] for s in segments}, every)
        return StepPlan(step_s, compute_s, sent, case.steps)
