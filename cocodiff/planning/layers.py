"""The layers of a model on all ranks, recorded: the engine's own strategies, and waits for the model's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.assemble import build_strategy, coding_of, mesh_of
from cocodiff.attention.strategy import LazyQKV, Site, nothing
from cocodiff.attention.ulysses import Ulysses
from cocodiff.config import Config
from cocodiff.kernels import Kernels
from cocodiff.models.tokens import IMAGE
from cocodiff.planning.memory import Load, ModelShape
from cocodiff.planning.one_peer import SerialTransport
from cocodiff.planning.placement import Work
from cocodiff.planning.pricing import PricedKernels, Pricing
from cocodiff.planning.program import Message, Program
from cocodiff.planning.roofline import Layer, roofline
from cocodiff.planning.virtual import VirtualTrace, VirtualTransport, record
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout, Segments
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES, Trace
from cocodiff.wire.coding import Moment

DTYPES = {2: torch.bfloat16, 4: torch.float32}
SAMPLES = (0.0, 0.5, 1.0)  # stable fractions that are recorded where a schedule has more than three
LAUNCHES_V, LAUNCHES_QK, LAUNCHES_REST = (
    1,
    4,
    4,
)  # q and k: a product of each, and its normalisation and rotation in one
Make = Callable[[Config, Mesh, Any, Trace, Kernels], Ulysses]


@dataclass(frozen=True)
class Case:
    """The run that is planned. stable: where a threshold decides, the part of the tokens that stay. one_peer: groups
    serve one peer at a time. make: builds a rank's strategy. known_mesh: of Ulysses and Ring; None for the one that the
    engine would choose."""

    shape: ModelShape
    topology: Topology
    config: Config
    load: Load
    steps: int = 50
    stable: float = 0.7
    one_peer: bool = False
    make: Make = build_strategy
    known_mesh: Mesh | None = None

    @cached_property
    def mesh(self) -> Mesh:
        """Of Ulysses and Ring."""
        return self.known_mesh or mesh_of(self.config, self.topology, Work(self.shape.heads, self.shape.head_dim))


class Kind(NamedTuple):
    """Layers that take alike: their number in one call of the model, what they attend to; whether what follows
    attention is done while q and k travel."""

    name: str
    layers: int
    segments: Segments
    beside: bool = False


class Segment(NamedTuple):
    """One layer of one kind at a stable fraction (None: all tokens travel, whatever scores say), on all ranks.
    agreement: what the ranks agree on once for all layers of a call of the model."""

    fraction: float | None
    programs: list[Program]
    messages: list[Message]
    bytes: dict[str, int]
    agreement: list[Program]


def kinds_of(shape: ModelShape, load: Load) -> list[Kind]:
    """A parallel MLP takes as long as one that follows, and waits for no attention."""
    found = (
        Kind("joint", shape.joint_layers, load.segments),
        Kind("parallel", shape.parallel_layers, load.segments, True),
        Kind("image", shape.image_layers, tuple(one for one in load.segments if one.name == IMAGE)),
    )
    return [kind for kind in found if kind.layers]


def fractions_of(case: Case) -> list[float | None]:
    """Of every step the part of the image tokens that stay; None where all travel without looking."""
    if case.topology.size == 1:
        return [None] * case.steps
    return coding_of(case.config).step_kinds(case.config, case.steps, case.stable)


def recorded_fractions(case: Case) -> list[float | None]:
    """Those of them that are recorded; between them, straight lines."""
    every = fractions_of(case)
    parts = sorted({part for part in every if part is not None})
    full: list[float | None] = [None] if None in every else []
    return full + list(parts if len(parts) <= len(SAMPLES) else SAMPLES)


def record_layer(case: Case, kind: Kind) -> list[Segment]:
    """One layer at every fraction of `recorded_fractions`. Each begins with all ranks together."""
    layouts = case.mesh.layouts(kind.segments, case.shape.heads)
    fractions = recorded_fractions(case)

    def work(transport: VirtualTransport) -> list[tuple[Program, dict[str, int], Program]]:
        rank = transport.rank
        group, slot = case.mesh.seat(rank)
        layout = layouts[group]
        trace = VirtualTrace(transport.recorder)
        pricing = Pricing(transport.recorder, case.topology.machine.device)
        step = 0
        with pricing:
            kernels = PricedKernels(pricing, case.stable, case.config.threshold, rank)
            over: Any = SerialTransport(transport) if case.one_peer else transport
            strategy = case.make(case.config, case.mesh, over, trace, kernels)
            layer = PlannedLayer(case, kind, layout, slot, pricing)
            if strategy.coding.keeps_state:  # what happens once in a run is not what a step is like
                strategy.coding.begin_step(Moment(0, step, case.steps))
                layer.run(strategy)
                strategy.coding.prepare(layout, torch.device("cpu"))
            found = []
            transport.recorder.cut()
            for fraction in fractions:
                strategy.coding.hold_at(fraction)
                for _ in range(1 if fraction is None else 1 + strategy.coding.steps_to_settle):
                    step += 1
                    transport.recorder.cut()  # steps before, to get to one that is like those which follow
                    strategy.coding.begin_step(Moment(0, step, case.steps))
                    strategy.coding.agree()
                    trace.clear()
                    agreement = transport.recorder.cut()
                    layer.run(strategy)
                found.append((transport.recorder.cut(), trace.bytes(), agreement))
        return found

    of_ranks, _, messages = record(case.topology.size, work, receives_ahead=False)  # as on the device that is priced
    return [
        Segment(
            fraction,
            [of_rank[index][0] for of_rank in of_ranks],
            messages,
            {link: sum(of_rank[index][1][link] for of_rank in of_ranks) for link in LINK_CLASSES},
            [of_rank[index][2] for of_rank in of_ranks],
        )
        for index, fraction in enumerate(fractions)
    ]


class PlannedLayer:
    """One rank's layer: q, k and v of the right size, which take as long as the roofline says, attention, the rest."""

    def __init__(self, case: Case, kind: Kind, layout: Layout, slot: int, pricing: Pricing) -> None:
        """layout: of the rank's Ulysses group, in which it has this slot."""
        shape, load = case.shape, case.load
        self._kind, self._case, self._pricing = kind, case, pricing
        tokens = sum(layout.rows)
        self._times: Layer = roofline(shape, case.topology, tokens, load.batch, slot, layout)
        self._shape = (load.batch, layout.rows[slot], shape.heads, shape.head_dim)

    def run(self, strategy: Ulysses) -> None:
        strategy.attend(self.qkv(), Site(self._kind.name))
        if not self._kind.beside:
            self._rest()

    def qkv(self) -> LazyQKV:
        times, kind, load = self._times, self._kind, self._case.load

        def projected(seconds: float, launches: int) -> Callable[[], Tensor]:
            def project() -> Tensor:
                self._pricing.compute(seconds, launches)
                return torch.empty(self._shape, device="meta", dtype=DTYPES[load.itemsize])

            return project

        half = projected(times.project_qk / 2, LAUNCHES_QK // 2)
        return LazyQKV(
            half,
            half,
            projected(times.project_v, LAUNCHES_V),
            kind.segments,
            self._case.shape.heads,
            meanwhile=self._rest if kind.beside else nothing,
        )

    def _rest(self) -> None:
        self._pricing.compute(self._times.rest, LAUNCHES_REST)


def at_fraction(values: Sequence[tuple[float | None, float]], fraction: float | None) -> float:
    """A quantity known at some fractions, at another one."""
    if fraction is None:
        return next(value for known, value in values if known is None)
    parts = [(known, value) for known, value in values if known is not None]
    upper = next(pair for pair in parts if pair[0] >= fraction)
    lower = next(pair for pair in reversed(parts) if pair[0] <= fraction)
    part = (fraction - lower[0]) / (upper[0] - lower[0]) if upper[0] > lower[0] else 0.0
    return lower[1] + part * (upper[1] - lower[1])
