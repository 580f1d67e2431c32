"""The choice of a job's partition: of those that fit the memory, the one with the least predicted time of the whole
job.

Each set of ranks that shares a sequence is priced (`layers.py`) as if it were alone on the machine: replicas that share
a NIC or a sibling's link do not slow each other down. Two branches of guidance take as long as the longer one. Then
each rank sends its branch's whole output to its partner in the other branch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain, product
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Belief, Machine
from cocodiff.engine.assemble import AttentionWork, codec_class, with_codec_chosen
from cocodiff.models.adapter import IMAGE
from cocodiff.planner.case import Case, coded_layers
from cocodiff.planner.layers import StepPlan, plan_step
from cocodiff.planner.memory import RankMemory, block_parameters, check_fits, fullest, misfit
from cocodiff.planner.traffic import Traffic, Wires, total
from cocodiff.topology.axes import Axes, Mesh, Partition

OUTPUT_CHANNELS = 64  # channels of an image token at a model's exit: 16 of 2 x 2 latent pixels (FLUX.2: 128)
SAME = 1.001  # times whose ratio is less are taken as equal


def untimed(machine: Machine) -> str | None:
    """Return a sentence that says why no times can be predicted for a machine; None if they can."""
    lacking = machine.missing_rates
    return f"machine {machine.name} does not say how fast {' and '.join(lacking)} are: no times" if lacking else None


def parts_of(case: Case, partition: Partition) -> list[list[Case]]:
    """Divide a case among replicas and guidance branches. Return the cases of the parts, by replica, then by branch.

    `weights: auto` and `codec: auto` are decided in them. Raise UserError if the partition does not divide the ranks.

    Args:
        case: the case on all ranks of the job.
        partition: the numbers of replicas and of guidance branches.
    """
    if case.config.weights == "auto":
        case = with_weights_chosen(case, partition)
    axes = Axes.build(case.topology, replica=partition.replicas, guidance=partition.guidance)

    def part_of(branch: int, ranks: tuple[int, ...]) -> Case:
        own, of_branch = case.topology.part(ranks), case if partition.guidance == 1 else case.of_branch(branch)
        config, _ = with_codec_chosen(case.config, own, AttentionWork(case.shape.heads, case.shape.head_dim))
        return replace(of_branch, topology=own, config=config, job=(case.topology.size, case.topology.nodes))

    return [[part_of(*one) for one in enumerate(of_replica)] for of_replica in axes.branches]


MARGIN = 4 * 2**30  # bytes of a tile that are left free, for the driver and errors of the estimates
NEAR = 1.01  # settings that keep more are taken if they are slower by at most this factor


@lru_cache
def with_weights_chosen(case: Case, partition: Partition) -> Case:
    """Decide `weights: auto` for a job. Return the case with the settings that stand for it.

    Weights are whole if everything fits a tile, else as few blocks are shared as make it fit. If that does not suffice,
    or is slower, codecs keep one value of a tensor (predictor last), and of only as many layers as fit. The fastest by
    prediction is taken; without times or with lossy settings, the first of these that fits. If none fits, the last is
    returned.

    Args:
        case: the case on all ranks of the job.
        partition: the division of these ranks.
    """
    machine, config, blocks = case.topology.machine, case.config, len(block_parameters(case.shape))
    memory = (machine.device.memory or 0) - MARGIN
    last: dict[str, Any] = {"predictor": "last"} if config.codec != "none" else {}
    whole = case.with_settings(weights="whole")
    if memory <= 0 or not blocks:
        return whole
    divided = chain(*parts_of(whole, partition))  # their meshes do not depend on these settings
    parts = {part.alike: replace(part, known_mesh=part.mesh) for part in divided}.values()

    def fits(settings: dict[str, Any]) -> bool:
        return max(fullest(part.with_settings(**settings)).total for part in parts) <= memory

    if fits({"weights": "whole"}):
        return whole
    states = [{}, last] if last and config.predictor != "last" else [{}]
    layers = sum(coded_layers(case.shape, config.state_layers)) if codec_class(config).keeps_state else 1
    # Of each list every entry needs less than the one before.
    lists = [[state | {"split_layers": count} for count in (*range(1, blocks), None)] for state in states]
    if layers > 1:
        lists.append([last | {"state_layers": count} for count in range(layers - 1, 0, -1)])
    fitting: list[Case] = []
    for settings, among in product(lists, ("card", "node")):
        tried = [one | {"weights": among} for one in settings]
        first = bisect_left(tried, True, key=fits)
        fitting += [case.with_settings(**one) for one in tried[first : first + 1]]
    if not fitting:
        return case.with_settings(**tried[-1])
    if untimed(machine) or not config.exact_attention:
        return fitting[0]
    steps_s = [step.step_s for step in Division(partition, fitting).steps]
    return next(one for one, step_s in zip(fitting, steps_s, strict=True) if step_s <= NEAR * min(steps_s))


def shared_weights(config: Config) -> list[str]:
    """Return the line for the user that says what `weights: auto` became, in a list; an empty list if all weights are
    whole.

    Args:
        config: the settings with `weights` decided.
    """
    if config.split is None:
        return []
    blocks = "all" if config.split_layers is None else config.split_layers
    told = f"weights auto: of {blocks} blocks shared by the tiles of a {config.weights}"
    if config.codec != "none" and config.predictor == "last":
        told += "; predictor last, which keeps half"
    if config.state_layers is not None:
        told += f"; {config.state_layers} layers keep something between calls, the others' tensors travel whole"
    return [told]


def outputs_of(case: Case, partition: Partition) -> tuple[float, dict[str, float]]:
    """Predict the exchange of outputs between guidance branches: return (seconds per step, bytes of a replica by link
    class).

    Each rank sends its partner its branch's whole output, [B, image tokens, OUTPUT_CHANNELS]. Both are zero if branches
    are not on ranks of their own.

    Args:
        case: the case on all ranks of the job.
        partition: the division of these ranks.
    """
    if partition.guidance == 1:
        return 0.0, dict.fromkeys(LINK_CLASSES, 0.0)
    topology, own, traffic = case.topology, case.of_branch(0), Traffic(Wires(case.topology))
    size = own.batch * own.tokens(IMAGE) * OUTPUT_CHANNELS * own.itemsize
    branches_RGN = np.array(Axes.build(topology, *partition).branches)  # ranks of each replica's two branches
    traffic.send(branches_RGN.ravel(), branches_RGN[:, ::-1].ravel(), np.full(topology.size, size))
    outputs = {link: count / partition.replicas for link, count in traffic.bytes.items()}
    return traffic.seconds() + case.latencies.latency_s, outputs


@dataclass(frozen=True, eq=False)
class Division:
    """A job on its ranks as one partition divides them, with the predicted memory, bytes and seconds.

    Raises UserError if ranks, heads, tokens or settings do not allow the partition, and if no link connects the ranks
    of a part.
    """

    partition: Partition  # the numbers of replicas and of guidance branches
    cases: Sequence[Case]  # one for each preset, each on all ranks; their times add up
    images: int = 1  # number of images of a preset
    batches: int = 1  # calls of the pipeline that make the images

    @cached_property
    def parts(self) -> list[list[list[Case]]]:
        """The cases of all ranks that share a sequence, by preset, replica and guidance branch. Cases of equal cost are
        one object."""
        known, divided = dict[Hashable, Case](), (parts_of(case, self.partition) for case in self.cases)
        return [
            [[known.setdefault(part.alike, part) for part in of_replica] for of_replica in of_case]
            for of_case in divided
        ]

    @property
    def mesh(self) -> Mesh:
        """The Ulysses groups and rings of the first ranks that share a sequence."""
        return self.parts[0][0][0].mesh

    @cached_property
    def need(self) -> RankMemory:
        """The memory that the fullest rank of the job needs, in any preset."""
        return max(map(fullest, {*chain(*chain(*self.parts))}), key=lambda need: need.total)

    @cached_property
    def steps(self) -> list[StepPlan]:
        """The predicted costs of a mean step, by preset: the time of the slowest replica, and the bytes of all its
        ranks."""
        plan, found = cache(plan_step), []
        for case, of_replicas in zip(self.cases, self.parts, strict=True):
            plans = [[plan(part) for part in of_replica] for of_replica in of_replicas]
            slowest = max(plans, key=lambda plans: max(plan.step_s for plan in plans))
            longer = max(slowest, key=lambda plan: plan.step_s)
            outputs_s, outputs = outputs_of(case, self.partition)
            sent = total([plan.bytes for plan in slowest])
            found.append(replace(longer, step_s=longer.step_s + outputs_s, bytes=sent, outputs=outputs))
        return found

    def check_same_bits(self) -> None:
        """Raise UserError if the last bits of an image would depend on the replica that makes it."""
        for case, of_replicas in zip(self.cases, self.parts, strict=True):
            seats = {tuple(part.topology.relative_places for part in parts) for parts in of_replicas}
            ring, config = any(part.mesh.ring > 1 for part in chain(*of_replicas)), case.config
            by_card = config.selection == "v_major" and config.scoring == "card"
            if len(seats) > 1 and (ring or by_card or config.chunks != 1 or config.codec == "auto"):
                raise UserError(
                    f"{self.partition.replicas} replicas of {case.topology.size} ranks sit differently on cards and "
                    f"nodes, so that with rings, chunks, scoring by card or codec auto an image would depend on which "
                    f"replica makes it: choose another number"
                )

    @property
    def image_s(self) -> float:
        """The predicted seconds of denoising one batch in each preset, summed over presets."""
        return sum(step.image_s for step in self.steps)

    @property
    def bytes_per_image(self) -> dict[str, float]:
        """The predicted bytes that a replica's ranks send for one batch, by link class, summed over presets."""
        return total([step.of_image(step.bytes) for step in self.steps])

    @property
    def output_bytes_per_image(self) -> dict[str, float]:
        """The predicted bytes that guidance branches exchange for one batch, by link class, summed over presets."""
        return total([step.of_image(step.outputs) for step in self.steps])

    @property
    def first_s(self) -> float:
        """The seconds that a replica's first batch takes longer than later ones: a step of each of the job's presets,
        or 0.

        It is 0 unless guidance's two calls of the model run at once, each on half of the replica's ranks. In the first
        step both halves compute both calls, to learn how many calls a step has.
        """
        in_turn = self.partition.guidance > 1 and self.cases[0].branches > 1
        return sum(step.step_s for step in self.steps if in_turn)

    @property
    def fits(self) -> bool | None:
        """True if the needs of the fullest rank fit its tile; None if the tile's memory is not known."""
        tile = self.cases[0].tile
        return None if tile is None else misfit(self.need, tile) is None

    @property
    def job_s(self) -> float:
        """The predicted seconds of denoising in the whole job, on the replica that makes most batches."""
        return ceil(self.batches / self.partition.replicas) * self.image_s + self.first_s

    @property
    def images_per_hour(self) -> float:
        """The number of images that the whole job makes in an hour, by the predicted time of denoising."""
        return self.images * 3600 / self.job_s

    def __str__(self) -> str:
        """Return the division in words, such as "4 replicas of 24 ranks, each guidance branch on 12 of them (Ulysses
        12)"."""
        ranks, count = self.mesh.topology.size, self.partition.replicas
        all_ranks = ranks * self.partition.guidance
        told = f"{count} replica{'s' * (count > 1)} of {all_ranks} rank{'s' * (all_ranks > 1)}"
        if self.partition.guidance > 1:
            told += f", each guidance branch on {ranks} of them"
        axes = [f"{name} {n}" for name, n in (("Ulysses", self.mesh.ulysses), ("ring", self.mesh.ring)) if n > 1]
        return told + (f" ({' x '.join(axes)})" if axes else "")


class Choice(NamedTuple):
    """The partition that was chosen for a job, and the others that were compared with it."""

    taken: Division  # the chosen division of the ranks; it does not fit the memory if none does
    following: Division | None  # the next best division; None if there is no other, or no times
    listed: list[Division]  # all possible divisions, in the order of `partitions_of`
    refused: dict[Partition, UserError]  # the impossible partitions, with the error that says why
    reason: str | None  # sentence that says why no times are predicted for the machine; None if they are

    @property
    def machine(self) -> Machine:
        """The machine that the job runs on."""
        return self.taken.mesh.topology.machine

    def check_fits(self) -> None:
        """Raise UserError if no partition fits the memory of a rank. The message has the needs of the chosen one."""
        least = f"the partition that needs least, {self.taken}" if len(self.listed) > 1 else f"{self.taken}"
        check_fits(self.taken.need, self.taken.cases[0].tile, f"the fullest rank in {least}")

    def line(self) -> str:
        """Return a line for the user with the chosen partition, why it was chosen, and the predicted time of the next
        best one."""
        taken, following, machine = self.taken, self.following, self.machine.name
        told = f"ranks divided into {taken}"
        if len(self.listed) == 1:
            predicted = "" if self.reason else f", {_seconds(taken)} by prediction"
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


def _seconds(one: Division) -> str:
    """Return the predicted seconds of the job under a partition as text, such as "12.3 s"."""
    seconds = one.job_s
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def choose(cases: Sequence[Case], images: int, batches: int, partitions: Sequence[Partition]) -> Choice:
    """Choose the partition of a job's ranks: of those that fit the memory, the one with the least predicted time.

    If the machine gives no rates, replicas come first, up to one for each batch, then guidance. Raise UserError if no
    partition is possible.

    Args:
        cases: one model's case on all ranks for each preset; their times add up.
        images: number of images of a preset.
        batches: number of calls of the pipeline that make these images.
        partitions: the divisions of the ranks to compare, at least one, as `partitions_of` returns them.
    """
    refused: dict[Partition, UserError] = {}
    sized: list[Division] = []
    for partition in partitions:
        one = Division(partition, cases, images, batches)
        try:
            _ = one.need
            one.check_same_bits()
            sized.append(one)
        except UserError as error:
            refused[partition] = error
    reason, useful = untimed(cases[0].topology.machine), max(batches, min(one.replicas for one in partitions))
    # Without times: raise if there are more ranks than replicas for these images can use.
    if not sized or (reason and refused and min(one.partition.replicas for one in sized) > useful):
        raise next(iter(refused.values()))
    able = [one for one in sized if one.fits is not False]
    if reason or not able:
        taken = by_rule(able) if able else min(sized, key=lambda one: one.need.total)
        return Choice(taken, None, sized, refused, reason)
    able.sort(key=lambda one: one.job_s)
    near = [one for one in able if one.job_s <= SAME * able[0].job_s]
    taken = max(near, key=lambda one: (one.partition, -one.mesh.ring))
    return Choice(taken, next((one for one in able if one is not taken), None), sized, refused, reason)


def by_rule(sized: Sequence[Division]) -> Division:
    """Return the division to take if no times can be predicted: most replicas, as long as each has a batch to make; of
    these, guidance divided.

    Args:
        sized: the possible divisions of one job.
    """
    most = max(sized[0].batches, min(one.partition.replicas for one in sized))
    return max((one for one in sized if one.partition.replicas <= most), key=lambda one: one.partition)


# What is believed of the machine --------------------------------------------------------------------------------------

HALVINGS = 7  # of a range, to find the value at which a choice changes


class RangeEnd(NamedTuple):
    """The plan of a job if one unmeasured value of the machine file is at an end of its range."""

    belief: Belief  # the value that was not measured, with its range
    believed: float  # the file's value
    value: float  # the value at this end of the range
    division: Division  # the plan with that value


def with_value(division: Division, name: str, value: float) -> Division:
    """Return the plan of the same job on a machine with another number of its links or device.

    Args:
        division: the plan on the machine as its file describes it.
        name: name of the field of `Links` or `Device`.
        value: the other number, in the field's unit.
    """
    machine = division.cases[0].topology.machine.with_value(name, value)
    cases = [replace(case, topology=replace(case.topology, machine=machine)) for case in division.cases]
    return replace(division, cases=cases)


def ends_of(division: Division) -> Iterator[RangeEnd]:
    """Yield the plans with each unmeasured value of the machine file at the low and the high end of its range.

    Each value is looked at alone: all others stay as the file has them. Meshes and codecs that `auto` stands for are
    chosen again. An end that equals the file's own value is left out.
    """
    machine = division.cases[0].topology.machine
    for belief in machine.beliefs:
        believed = machine.value(belief.name)
        for value in (belief.low, belief.high):
            if value != believed:
                yield RangeEnd(belief, believed, value, with_value(division, belief.name, value))


def choices_of(division: Division) -> str:
    """Return the mesh and the codec of a plan in words, such as "ulysses 12, codec int4": those of the first ranks that
    share a sequence."""
    mesh, codec = division.mesh, division.parts[0][0][0].config.codec
    ring = f", ring {mesh.ring} of {mesh.kind}" if mesh.ring > 1 else ""
    return f"ulysses {mesh.ulysses}{ring}" + (f", codec {codec}" if codec != "none" else "")


def turning_points(division: Division, holds: Callable[[Division], bool]) -> Iterator[tuple[RangeEnd, float]]:
    """Yield the ends of ranges at which a statement about the plan is no longer what it is with the machine file's
    values.

    Each comes as (the plan at that end, the value of the machine at which the statement changes).

    Args:
        division: the plan with the file's values.
        holds: the statement, such as `pays`: a function of a plan.
    """
    with_file = holds(division)
    for end in ends_of(division):
        if holds(end.division) == with_file:
            continue
        near, far = end.believed, end.value
        for _ in range(HALVINGS):
            middle = (near + far) / 2
            same = holds(with_value(division, end.belief.name, middle)) == with_file
            near, far = (middle, far) if same else (near, middle)
        yield end, (near + far) / 2


def uncoded(division: Division) -> StepPlan:
    """Return the predicted costs of the same job's step with neither codec nor displacement, for comparison."""
    (case,) = division.cases
    return replace(division, cases=[case.with_settings(codec="none", arrival="now")]).steps[0]


def pays(division: Division) -> bool:
    """Return True if a step with the codec and displacement is predicted to take less time than without them."""
    return division.steps[0].step_s < uncoded(division).step_s
