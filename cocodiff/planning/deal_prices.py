"""What each deal of the ranks would take: memory of the fullest rank, seconds of an image and of a whole job, bytes.

Every set of ranks that shares a sequence is priced by recording it (`layers.py`), as if it were alone on the machine:
replicas that share a NIC or a sibling's link do not slow each other down. Two branches of guidance take as long as the
longer of them, and then each rank sends its branch's whole output to its partner in the other one. Sets of ranks that
sit alike take alike and are recorded once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cocodiff.assemble import AttentionWork, chunking, exchange_table, mesh_of, with_codec_chosen
from cocodiff.config import Config
from cocodiff.errors import UserError
from cocodiff.models.tokens import IMAGE
from cocodiff.planning.costs import state_sizes
from cocodiff.planning.deals import Deal
from cocodiff.planning.decisions import Decisions
from cocodiff.planning.layers import Case, Recording, StepPlan, kinds_of
from cocodiff.planning.memory import Load, ModelShape, RankMemory, size_run
from cocodiff.planning.roofline import roofline
from cocodiff.planning.simulate import Latencies
from cocodiff.planning.traffic import Traffic, Wires
from cocodiff.topology.axes import Axes, Mesh
from cocodiff.topology.layout import Segments
from cocodiff.topology.links import Network
from cocodiff.topology.machine import Machine, Topology
from cocodiff.trace import LINK_CLASSES

OUTPUT_CHANNELS = 64  # of one image token at a model's exit: 16 latent channels of 2 x 2; FLUX.2's 128 are small too


@dataclass(frozen=True)
class Workload:
    """What makes one batch of images.

    load: of ranks that compute both branches of guidance: all rows, and all calls of a step.
    stable: where a threshold decides, the part of the tokens that stay. decisions: as of `Case`. negative: the segments
    of the second call of a step, where its text has another length.
    """

    shape: ModelShape
    load: Load
    config: Config
    steps: int = 50
    stable: float = 0.7
    negative: Segments | None = None
    decisions: tuple[Decisions, ...] = ()

    @property
    def guides(self) -> bool:
        """Whether there are two branches: two calls in a step, or two halves of one call's rows."""
        return self.load.branches == 2 or self.shape.rows_per_image == 2

    def with_codec_chosen(self, topology: Topology) -> Workload:
        """With the codec that `codec: auto` is on the ranks of a branch."""
        config = with_codec_chosen(self.config, topology, AttentionWork(self.shape.heads, self.shape.head_dim))[0]
        return replace(self, config=config, load=replace(self.load, state=state_sizes(config)))

    def of_branch(self, guidance: int, branch: int) -> Workload:
        """The work of the ranks of one branch."""
        if guidance == 1:
            return self
        if self.load.branches == 2:
            segments = self.negative if branch and self.negative else self.load.segments
            return replace(self, load=replace(self.load, branches=1, segments=segments), negative=None)
        half = replace(self.load, batch=self.load.batch // 2)
        return replace(self, shape=replace(self.shape, rows_per_image=1), load=half)

    @property
    def calls(self) -> list[Load]:
        """A step's calls of the model; alike ones are one load of several branches."""
        if self.negative is None or self.load.branches == 1:
            return [self.load]
        first = replace(self.load, branches=self.load.branches - 1)
        return [first, replace(self.load, branches=1, segments=self.negative)]


@dataclass(frozen=True, eq=False)
class Part:
    """The ranks of one guidance branch of one replica, ascending, as a topology of their own, and their work."""

    ranks: tuple[int, ...]
    topology: Topology
    work: Workload

    @cached_property
    def mesh(self) -> Mesh:
        """Of Ulysses and Ring. Raises UserError where ranks and heads do not allow the ring that the settings ask for,
        and for `chunks: auto` and `exchange: auto` without a measured table."""
        shape, config = self.work.shape, self.work.config
        mesh = mesh_of(config, self.topology, AttentionWork(shape.heads, shape.head_dim))
        for group in mesh.parts:
            chunking(config, group)
        if mesh.ulysses > 1:
            exchange_table(config, self.topology)
        return mesh

    @cached_property
    def need(self) -> RankMemory:
        """Of the fullest rank. Raises UserError as `mesh`, and where tokens do not suffice."""
        of_ranks = size_run(self.work.shape, self.topology, self.work.load, self.mesh)
        return max(of_ranks, key=lambda need: need.total)

    @cached_property
    def plan(self) -> StepPlan:
        """Of a step, in which one call of the model follows another."""
        network, latencies = Network(self.topology), Latencies.of(self.topology.machine)
        plans = [Recording(self.case(load)).plan(network, latencies) for load in self.work.calls]
        sent = {link: sum(plan.bytes[link] for plan in plans) for link in LINK_CLASSES}
        return StepPlan(sum(p.step_s for p in plans), sum(p.compute_s for p in plans), sent, self.work.steps)

    def arithmetic_s(self) -> float:
        """Seconds of a step's arithmetic on the fullest rank, at the device's full rate."""
        shape, mesh, found = self.work.shape, self.mesh, 0.0
        for load in self.work.calls:
            for kind in kinds_of(shape, load):
                layers = [
                    roofline(shape, self.topology, sum(layout.rows), load.batch, slot, layout).total
                    for layout in mesh.layouts(kind.segments, shape.heads)
                    for slot in range(mesh.ulysses)
                ]
                found += kind.layers * load.branches * max(layers)
        return found

    def case(self, load: Load) -> Case:
        """load: one of the work's calls."""
        work = self.work
        run = work.shape, self.topology, work.config, load, work.steps, work.stable, work.decisions
        return Case(*run, known_mesh=self.mesh)

    @property
    def alike(self) -> Hashable:
        """The same for parts that take alike: of the same work, whose ranks sit alike, and share NICs alike where they
        are on several nodes."""
        return self.work, self.topology.relative_places, self.topology.nics if self.topology.nodes > 1 else ()


class DealStep(NamedTuple):
    """A mean step of one replica, the slowest where they differ. plan.bytes: of attention, all ranks of the replica;
    outputs: bytes of the exchange of outputs between two guidance branches, likewise."""

    plan: StepPlan
    outputs: dict[str, float]


def untimed(machine: Machine) -> str | None:
    """Why there are no times for a machine; None where there are."""
    lacking = machine.missing_rates
    return f"machine {machine.name} does not say how fast {' and '.join(lacking)} are: no times" if lacking else None


def parts_of(topology: Topology, work: Workload, deal: Deal) -> list[list[Part]]:
    """Of every replica its guidance branches. Raises UserError where the deal does not divide the ranks."""
    axes = Axes.build(topology, replica=deal.replicas, guidance=deal.guidance)
    return [
        [
            Part(ranks, part := topology.part(ranks), work.of_branch(deal.guidance, branch).with_codec_chosen(part))
            for branch, ranks in enumerate(of_replica)
        ]
        for of_replica in axes.branches
    ]


class Pricer:
    """Prices deals of the ranks of one topology. What a part takes is worked out once for all parts alike."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._dealt: dict[tuple[Workload, Deal], list[list[Part]]] = {}
        self._known: dict[Hashable, Part] = {}

    def need(self, work: Workload, deal: Deal) -> RankMemory:
        """Memory of the fullest rank. Raises UserError where ranks, heads, tokens or settings do not allow the deal."""
        return max((part.need for part in self._unlike(work, deal)), key=lambda need: need.total)

    def mesh(self, work: Workload, deal: Deal) -> Mesh:
        """Of the first part. Raises UserError as `need`."""
        return self._parts(work, deal)[0][0].mesh

    def check_same_bits(self, work: Workload, deal: Deal) -> None:
        """Raises UserError where an image would depend, in its last bits, on the replica that makes it."""
        seats = {tuple(part.topology.relative_places for part in parts) for parts in self._parts(work, deal)}
        config, ring = work.config, any(part.mesh.ring > 1 for part in self._unlike(work, deal))
        by_card = config.selection == "v_major" and config.scoring == "card"
        if len(seats) > 1 and (ring or by_card or config.chunks != 1 or config.codec == "auto"):
            raise UserError(
                f"{deal.replicas} replicas of {self.topology.size} ranks sit differently on cards and nodes, so "
                f"that with rings, chunks, scoring by card or codec auto an image would depend on which replica makes "
                f"it: choose another number"
            )

    def least_s(self, work: Workload, deal: Deal) -> float:
        """Seconds that no step is faster than: the model's arithmetic on the fullest rank."""
        return max(part.arithmetic_s() for part in self._unlike(work, deal))

    def step(self, work: Workload, deal: Deal) -> DealStep:
        """Raises UserError as `need`, and where a part's ranks are not joined by links."""
        of_replicas = [[part.plan for part in parts] for parts in self._parts(work, deal)]
        slowest = max(of_replicas, key=lambda plans: max(plan.step_s for plan in plans))
        longer = max(slowest, key=lambda plan: plan.step_s)
        outputs_s, outputs = self._outputs(work, deal)
        sent = {link: sum(plan.bytes[link] for plan in slowest) for link in LINK_CLASSES}
        return DealStep(StepPlan(longer.step_s + outputs_s, longer.compute_s, sent, work.steps), outputs)

    def _parts(self, work: Workload, deal: Deal) -> list[list[Part]]:
        """As `parts_of`; in the place of all that are alike stands the first of them."""
        if (work, deal) not in self._dealt:
            self._dealt[work, deal] = [
                [self._known.setdefault(part.alike, part) for part in of_replica]
                for of_replica in parts_of(self.topology, work, deal)
            ]
        return self._dealt[work, deal]

    def _unlike(self, work: Workload, deal: Deal) -> list[Part]:
        """One of all parts that are alike."""
        return list(dict.fromkeys(part for of_replica in self._parts(work, deal) for part in of_replica))

    def _outputs(self, work: Workload, deal: Deal) -> tuple[float, dict[str, float]]:
        """Seconds of a step and bytes of a replica: each rank sends its partner in the other branch its own branch's
        whole output [B, image tokens, OUTPUT_CHANNELS]."""
        if deal.guidance == 1:
            return 0.0, dict.fromkeys(LINK_CLASSES, 0.0)
        axes = Axes.build(self.topology, replica=deal.replicas, guidance=deal.guidance)
        load = work.of_branch(deal.guidance, 0).load
        size = load.batch * load.tokens(IMAGE) * OUTPUT_CHANNELS * load.itemsize
        pairs = [axes.along("guidance", rank) for rank in range(self.topology.size)]
        partners_P = np.array([sum(pair) - rank for rank, pair in enumerate(pairs)])
        traffic = Traffic(Wires(self.topology))
        traffic.send(np.arange(self.topology.size), partners_P, np.full(self.topology.size, size))
        return traffic.seconds() + Latencies.of(self.topology.machine).latency_s, {
            link: count / deal.replicas for link, count in traffic.bytes.items()
        }
