"""Which partition of its ranks a job takes: memory first, then the least predicted time of the whole job.

Every set of ranks that shares a sequence is priced (`layers.py`) as if it were alone on the machine: replicas that
share a NIC or a sibling's link do not slow each other down. Two branches of guidance take as long as the longer of
them, and then each rank sends its branch's whole output to its partner in the other one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from math import ceil
from typing import Any

import numpy as np

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine, Topology
from cocodiff.engine.assemble import AttentionWork, chunking, codec_class, exchange_table, mesh_of, with_codec_chosen
from cocodiff.models.adapter import IMAGE
from cocodiff.planner.costs import state_sizes
from cocodiff.planner.decisions import Decisions
from cocodiff.planner.layers import Case, StepPlan, plan_step
from cocodiff.planner.memory import (
    Load,
    ModelShape,
    RankMemory,
    Split,
    block_parameters,
    check_fits,
    coded_layers,
    misfit,
    size_run,
)
from cocodiff.planner.partitions import Partition, partitions_of
from cocodiff.planner.traffic import Latencies, Traffic, Wires, total
from cocodiff.topology.axes import Axes, Mesh
from cocodiff.topology.layout import Segments

OUTPUT_CHANNELS = 64  # of one image token at a model's exit: 16 latent channels of 2 x 2; FLUX.2's 128 are small too
SAME = 1.001  # times that differ by less are the same time


@dataclass(frozen=True)
class Workload:
    """What makes one batch of images. load: of ranks that compute both branches of guidance: all rows, and all calls of
    a step. stable: where a threshold decides, the part of the tokens that stay. decisions: as of `Case`. negative: the
    segments of the second call of a step, where its text has another length."""

    shape: ModelShape
    load: Load
    config: Config
    steps: int = 50
    stable: float = 0.7
    negative: Segments | None = None
    decisions: tuple[Decisions, ...] = ()

    @property
    def guides(self) -> bool:
        """Two calls in a step, or two halves of one call's rows."""
        return self.load.branches == 2 or self.shape.rows_per_image == 2

    def with_config(self, config: Config) -> Workload:
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
        latencies = Latencies.of(self.topology.machine)
        plans = [plan_step(self.case(load), latencies) for load in self.work.calls]
        step_s, compute_s, waits = (sum(getattr(p, name) for p in plans) for name in ("step_s", "compute_s", "waits"))
        return StepPlan(step_s, compute_s, total(plan.bytes for plan in plans), self.work.steps, waits)

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


def untimed(machine: Machine) -> str | None:
    """Why there are no times for a machine; None where there are."""
    lacking = machine.missing_rates
    return f"machine {machine.name} does not say how fast {' and '.join(lacking)} are: no times" if lacking else None


def parts_of(topology: Topology, work: Workload, partition: Partition) -> list[list[Part]]:
    """Of every replica its guidance branches, with `weights: auto` decided. Raises UserError where the partition does
    not divide the ranks."""
    if work.config.weights == "auto":
        work = with_weights_chosen(topology, work, partition)
    axes = Axes.build(topology, replica=partition.replicas, guidance=partition.guidance)

    def part_of(branch: int, ranks: tuple[int, ...]) -> Part:
        own, of_branch = topology.part(ranks), work.of_branch(partition.guidance, branch)
        config, _ = with_codec_chosen(work.config, own, AttentionWork(work.shape.heads, work.shape.head_dim))
        of_branch = of_branch.with_config(config)
        load = replace(of_branch.load, split=Split.of(config.split, own), job=(topology.size, topology.nodes))
        return Part(ranks, own, replace(of_branch, load=load))

    return [[part_of(*one) for one in enumerate(of_replica)] for of_replica in axes.branches]


MARGIN = 4 * 2**30  # bytes of a tile, for the driver and what estimates are off by
NEAR = 1.01  # times as long is taken for what keeps more


@lru_cache
def with_weights_chosen(topology: Topology, work: Workload, partition: Partition) -> Workload:
    """The work with `weights: auto` decided: whole where everything fits a tile, else by as few shared blocks as
    does it. Where that is not enough, or slower, codecs keep one value of a tensor (predictor last), and of as many
    layers as fit. What is predicted to take least is chosen; where tensors arrive changed, what changes them least."""
    memory, blocks = (topology.machine.device.memory or 0) - MARGIN, len(block_parameters(work.shape))
    keeps, coded = codec_class(work.config).keeps_state, work.config.codec != "none"
    last = {"predictor": "last"} if coded else {}

    def with_settings(**settings: Any) -> Workload:
        return work.with_config(work.config.with_(**settings))

    def fits(one: Workload) -> bool:
        return max(part.need.total for part in chain(*parts_of(topology, one, partition))) <= memory

    def first(count: int, work_of: Callable[[int], Workload]) -> list[Workload]:
        """Of so many settings, each of which needs less than the one before, the first that fits."""
        found = bisect_left(range(count), True, key=lambda number: fits(work_of(number)))
        return [work_of(found)] if found < count else []

    whole = with_settings(weights="whole")
    if memory <= 0 or not blocks or fits(whole):
        return whole
    fitting: list[Workload] = []
    for changes in ({}, last) if last and work.config.predictor != "last" else ({},):
        for among in ("card", "node"):
            of_blocks = [with_settings(weights=among, split_layers=n, **changes) for n in (*range(1, blocks), None)]
            fitting += first(blocks, of_blocks.__getitem__)
    layers = sum(coded_layers(work.shape, work.config.state_layers)) if keeps else 1
    for among in ("card", "node"):
        fewer = [with_settings(weights=among, state_layers=n, **last) for n in range(layers - 1, 0, -1)]
        fitting += first(len(fewer), fewer.__getitem__)
    if not fitting:
        return fewer[-1] if fewer else of_blocks[-1]
    if untimed(topology.machine) or not work.config.exact_attention:
        return fitting[0]
    pricer = Pricer(topology)
    steps_s = [pricer.step(one, partition).step_s for one in fitting]
    return next(one for one, step_s in zip(fitting, steps_s, strict=True) if step_s <= NEAR * min(steps_s))


def shared_weights(config: Config) -> list[str]:
    """What `weights: auto` became, in words; none where everything fits as it is."""
    if config.split is None:
        return []
    blocks = "all" if config.split_layers is None else config.split_layers
    told = f"weights auto: of {blocks} blocks shared by the tiles of a {config.weights}"
    if config.codec != "none" and config.predictor == "last":
        told += "; predictor last, which keeps half"
    if config.state_layers is not None:
        told += f"; {config.state_layers} layers keep something between calls, the others' tensors travel whole"
    return [told]


class Pricer:
    """Prices partitions of the ranks of one topology. What a part takes is worked out once for all parts alike."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._known: dict[Hashable, Part] = {}
        self._parts = cache(self._divide)  # of every replica its guidance branches

    def need(self, work: Workload, partition: Partition) -> RankMemory:
        """Of the fullest rank. Raises UserError where ranks, heads, tokens or settings do not allow the partition."""
        return max((part.need for part in chain(*self._parts(work, partition))), key=lambda need: need.total)

    def mesh(self, work: Workload, partition: Partition) -> Mesh:
        """Of the first part. Raises UserError as `need`."""
        return self._parts(work, partition)[0][0].mesh

    def check_same_bits(self, work: Workload, partition: Partition) -> None:
        """Raises UserError where an image would depend, in its last bits, on the replica that makes it."""
        of_replicas, config = self._parts(work, partition), work.config
        seats = {tuple(part.topology.relative_places for part in parts) for parts in of_replicas}
        ring = any(part.mesh.ring > 1 for part in chain(*of_replicas))
        by_card = config.selection == "v_major" and config.scoring == "card"
        if len(seats) > 1 and (ring or by_card or config.chunks != 1 or config.codec == "auto"):
            raise UserError(
                f"{partition.replicas} replicas of {self.topology.size} ranks sit differently on cards and nodes, so "
                f"that with rings, chunks, scoring by card or codec auto an image would depend on which replica makes "
                f"it: choose another number"
            )

    def step(self, work: Workload, partition: Partition) -> StepPlan:
        """A mean step of one replica, the slowest where they differ. bytes: of attention, of all ranks of the replica.
        Raises UserError as `need`, and where a part's ranks are not joined by links."""
        of_replicas = [[part.plan for part in parts] for parts in self._parts(work, partition)]
        slowest = max(of_replicas, key=lambda plans: max(plan.step_s for plan in plans))
        longer = max(slowest, key=lambda plan: plan.step_s)
        outputs_s, outputs = self._outputs(work, partition)
        sent = total(plan.bytes for plan in slowest)
        return replace(longer, step_s=longer.step_s + outputs_s, bytes=sent, outputs=outputs)

    def _divide(self, work: Workload, partition: Partition) -> list[list[Part]]:
        """As `parts_of`; in the place of all that are alike stands the first of them."""
        of_replicas = parts_of(self.topology, work, partition)
        return [[self._known.setdefault(part.alike, part) for part in of_replica] for of_replica in of_replicas]

    def _outputs(self, work: Workload, partition: Partition) -> tuple[float, dict[str, float]]:
        """Seconds of a step and bytes of a replica: each rank sends its partner in the other branch its own branch's
        whole output [B, image tokens, OUTPUT_CHANNELS]."""
        if partition.guidance == 1:
            return 0.0, dict.fromkeys(LINK_CLASSES, 0.0)
        axes = Axes.build(self.topology, replica=partition.replicas, guidance=partition.guidance)
        load = work.of_branch(partition.guidance, 0).load
        size = load.batch * load.tokens(IMAGE) * OUTPUT_CHANNELS * load.itemsize
        ranks, traffic = range(self.topology.size), Traffic(Wires(self.topology))
        partners_P = np.array([sum(axes.partners(rank)) - rank for rank in ranks])
        traffic.send(np.array(ranks), partners_P, np.full(len(ranks), size))
        outputs = {link: count / partition.replicas for link, count in traffic.bytes.items()}
        return traffic.seconds() + Latencies.of(self.topology.machine).latency_s, outputs


@dataclass(frozen=True)
class PricedPartition:
    """A partition of a job's ranks. ulysses, ring: the mesh of the ranks that share a sequence. need: of the fullest
    rank. tile: bytes of memory that a rank has, None where the machine does not say. batches: calls of the pipeline
    that make the job's images. batch_s: seconds of one, denoising alone; sent, outputs: bytes of one by link class, of
    attention and of the exchange of outputs between guidance branches; all None where nothing is timed. first_s: what a
    replica's first batch takes longer: in its first step both branches of calls in turn are computed by all."""

    partition: Partition
    ulysses: int
    ring: int
    need: RankMemory
    tile: int | None
    images: int
    batches: int
    batch_s: float | None = None
    sent: dict[str, float] | None = None
    outputs: dict[str, float] | None = None
    first_s: float = 0.0

    @property
    def fits(self) -> bool | None:
        return None if self.tile is None else misfit(self.need, self.tile) is None

    @property
    def rounds(self) -> int:
        """Batches that the replica with the most of them makes."""
        return ceil(self.batches / self.partition.replicas)

    @property
    def job_s(self) -> float:
        """Seconds of the whole job, denoising alone."""
        assert self.batch_s is not None, "nothing is timed on this machine"
        return self.rounds * self.batch_s + self.first_s

    @property
    def images_per_hour(self) -> float:
        return self.images * 3600 / self.job_s

    def __str__(self) -> str:
        """As "4 replicas of 24 ranks, each guidance branch on 12 of them (Ulysses 12)"."""
        ranks = self.ulysses * self.ring
        count, all_ranks = self.partition.replicas, ranks * self.partition.guidance
        told = f"{count} replica{'s' * (count > 1)} of {all_ranks} rank{'s' * (all_ranks > 1)}"
        if self.partition.guidance > 1:
            told += f", each guidance branch on {ranks} of them"
        axes = [f"{name} {n}" for name, n in (("Ulysses", self.ulysses), ("ring", self.ring)) if n > 1]
        return told + (f" ({' x '.join(axes)})" if axes else "")


@dataclass(frozen=True)
class Choice:
    """taken: the partition of the job; it does not fit where none does. following: the best of the others that were
    timed. listed: all that were looked at, as `partitions_of` lists them. refused: why others cannot be. reason: why
    nothing is timed; None where it is."""

    topology: Topology
    taken: PricedPartition
    following: PricedPartition | None
    listed: list[PricedPartition]
    refused: dict[Partition, UserError]
    reason: str | None

    def check_fits(self) -> None:
        """Raises UserError where no partition fits the memory of a rank."""
        if self.taken.tile is not None:
            least = f"the partition that needs least, {self.taken}" if len(self.listed) > 1 else f"{self.taken}"
            check_fits(self.taken.need, self.taken.tile, f"the fullest rank in {least}")

    def line(self) -> str:
        """What was taken, why, and what the next best would cost."""
        taken, following, machine = self.taken, self.following, self.topology.machine.name
        told = f"ranks divided into {taken}"
        if len(self.listed) == 1:
            predicted = "" if taken.batch_s is None else f", {_seconds(taken)} by prediction"
            return f"{told}: with what is given there is no other partition{predicted}"
        misfits = sum(one.fits is False for one in self.listed)
        kept_out = f" ({misfits} of {len(self.listed)} partitions do not fit the memory)" if misfits else ""
        if self.reason:
            order = "replicas first, then guidance, then Ulysses"
            return f"{told}: {order}, as machine {machine} does not say what others would take{kept_out}"
        next_best = ""
        if following is not None:
            ratio = following.job_s / taken.job_s
            next_best = f"; next best: {following}, {_seconds(following)} ({ratio:.2f}x)"
        return f"{told}: the least time by prediction, {_seconds(taken)}{kept_out}{next_best}"


def _seconds(one: PricedPartition) -> str:
    seconds = one.job_s
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def choose(
    pricer: Pricer,
    works: Sequence[Workload],
    images: int,
    batches: int,
    replicas: int | None = None,
    guidance: int | None = None,
    least: int = 1,
) -> Choice:
    """The partition of a job that makes so many images, in so many calls of the pipeline, in each of several presets.
    Where the machine tells no rates, replicas come first, up to one for each batch, then guidance.

    works: of one model, one for each preset; their times add up. replicas, guidance, least: as in `partitions_of`.
    Raises UserError where no partition is possible.
    """
    topology, guides = pricer.topology, any(work.guides for work in works)
    refused: dict[Partition, UserError] = {}
    sized: list[PricedPartition] = []
    for partition in partitions_of(topology.size, guides, replicas, guidance, least):
        try:
            sized.append(size_partition(pricer, works, partition, images, batches))
        except UserError as error:
            refused[partition] = error
    reason = untimed(topology.machine)
    # without times: more ranks than so few images can use
    if not sized or (reason and refused and min(one.partition.replicas for one in sized) > max(batches, replicas or 1)):
        raise next(iter(refused.values()))
    listed = sized if reason else [time_partition(pricer, works, one) for one in sized]
    able = [one for one in listed if one.fits is not False]
    if reason or not able:
        taken = by_rule(able) if able else min(listed, key=lambda one: one.need.total)
        return Choice(topology, taken, None, listed, refused, reason)
    able.sort(key=lambda one: one.job_s)
    near = [one for one in able if one.job_s <= SAME * able[0].job_s]
    taken = max(near, key=lambda one: (one.partition, -one.ring))
    following = next((one for one in able if one is not taken), None)
    return Choice(topology, taken, following, listed, refused, None)


def size_partition(
    pricer: Pricer, works: Sequence[Workload], partition: Partition, images: int, batches: int
) -> PricedPartition:
    """A partition with its memory. Raises UserError where ranks, heads, tokens or settings do not allow it."""
    need = max((pricer.need(work, partition) for work in works), key=lambda need: need.total)
    for work in works:
        pricer.check_same_bits(work, partition)
    mesh = pricer.mesh(works[0], partition)
    tile = pricer.topology.machine.device.memory
    return PricedPartition(partition, mesh.ulysses, mesh.ring, need, tile, images, batches)


def by_rule(sized: Sequence[PricedPartition]) -> PricedPartition:
    """Replicas first, as long as each has a batch to make, then guidance."""
    most = max(sized[0].batches, min(one.partition.replicas for one in sized))
    return max((one for one in sized if one.partition.replicas <= most), key=lambda one: one.partition)


def time_partition(pricer: Pricer, works: Sequence[Workload], one: PricedPartition) -> PricedPartition:
    steps = [(work, pricer.step(work, one.partition)) for work in works]
    apart = one.partition.guidance > 1
    return replace(
        one,
        batch_s=sum(step.image_s for _, step in steps),
        sent={link: sum(work.steps * step.bytes[link] for work, step in steps) for link in LINK_CLASSES},
        outputs={link: sum(work.steps * step.outputs[link] for work, step in steps) for link in LINK_CLASSES},
        first_s=sum(step.step_s for work, step in steps if apart and work.load.branches > 1),
    )
