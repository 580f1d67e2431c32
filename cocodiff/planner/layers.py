"""The bytes that a step of a model sends by link class, and its seconds, in closed form.

A layer is planned as the engine computes it. The setting's own order gives tensors to an exchange while the rank
computes. The exchange's own routes say which blocks take which links, and the codec how wide they are. The rank with
most to compute sets the pace, and among messages under way together the fullest link (`traffic.py`). Computation is a
roofline at the device's full rates (`roofline.py`). Rings and chunks are in `rings.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cocodiff.attention.stateful import TENSORS
from cocodiff.attention.strategy import LayerKey, LazyQKV, nothing
from cocodiff.attention.sums import CHUNK, CHUNK_LAUNCHES, SCORE_BYTES
from cocodiff.attention.ulysses import Ulysses
from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.registry import ORDERS, load
from cocodiff.engine.assemble import chunking, exchange_table
from cocodiff.exchange.codec import WHOLE, CallKind, StepKinds
from cocodiff.planner.case import Case, coded_layers
from cocodiff.planner.decisions import decisions_of, without_seldom
from cocodiff.planner.memory import weights_waited_s
from cocodiff.planner.rings import Seconds, in_chunks, ring_of
from cocodiff.planner.roofline import Layer, coded_s, copied_s, merged_s, roofline, scored_s
from cocodiff.planner.traffic import Hop, Traffic, of_ranks, stages_of
from cocodiff.topology.layout import Layout, Segments
from cocodiff.topology.routes.chunks import exchange_for, megabytes_per_rank

SAMPLES = (0.0, 0.5, 1.0)  # stable fractions that are planned if a schedule has more than three
SITES = 3  # layers in a row that are planned if calls do not wait for what they send
NO_NUMBERS = torch.empty(0, device="meta")  # stands for any tensor
LAUNCHES_V, LAUNCHES_QK, LAUNCHES_REST = 1, 4, 4  # of q and k each a product, and normalisation with rotation


class Kind(NamedTuple):
    """The layers of one call of the model that cost the same, such as all joint layers."""

    name: str  # "joint", "parallel" or "image", see `ModelShape`
    layers: int  # number of layers
    coded: int  # number of those that keep tensors between calls; the others' calls are as a run's first
    segments: Segments  # segments of the sequence that they attend to
    beside: bool = False  # True if the MLP is computed while q and k are sent


def kinds_of(case: Case) -> list[Kind]:
    """Return the kinds of layers that a call of the model has: joint, parallel and image layers.

    A parallel MLP takes as long as one that follows attention, but does not wait for it.
    """
    shape = case.shape
    joint, parallel, image = coded_layers(shape, case.config.state_layers)
    found = (
        Kind("joint", shape.joint_layers, joint, case.segments),
        Kind("parallel", shape.parallel_layers, parallel, case.segments, True),
        Kind("image", shape.image_layers, image, case.image_only),
    )
    return [kind for kind in found if kind.layers]


def kinds_of_steps(case: Case) -> StepKinds:
    """Return `Codec.kinds_of_steps` of a case's codec; on a single rank all calls are whole.

    With `arrival: adaptive` the displaced tensors are those of a recorded run, with `displaced` they are all tensors.
    """
    if case.topology.size == 1:
        return [{WHOLE: 1.0}] * case.steps
    recorded = decisions_of(case.config, case.steps, case.decisions)
    every = [{"".join(TENSORS) if case.config.arrival == "displaced" else "": 1.0}] * case.steps
    displaced = without_seldom(recorded.over(case.steps)) if recorded else every
    return case.codec.kinds_of_steps(case.steps, case.stable, displaced)


def sampled_kinds(case: Case) -> list[CallKind]:
    """Return the kinds of attention calls that are planned, for a run. If there are many stable fractions, only SAMPLES
    are planned, and others are interpolated."""
    kinds = {kind for step in kinds_of_steps(case) for kind in step}
    if len({kind.stable for kind in kinds if not kind.whole}) > len(SAMPLES):
        kinds = {kind for kind in kinds if kind.whole} | {CallKind(stable=part) for part in SAMPLES}
    return sorted(kinds, key=lambda kind: (not kind.whole, kind.displaced, *kind[1:]))


def of_kind(known: Mapping[CallKind, float], kind: CallKind) -> float:
    """Return a quantity, such as seconds, for one kind of attention calls. If it is not known for this kind,
    interpolate it in the fraction of tokens that are not sent.

    Args:
        known: its values for some kinds.
        kind: the kind that is asked for.
    """
    if kind in known:
        return known[kind]
    stable, values = zip(*sorted((one.stable, value) for one, value in known.items() if not one.whole), strict=True)
    return float(np.interp(kind.stable, stable, values))


def over_steps(known: Mapping[CallKind, float], steps: Sequence[Mapping[CallKind, float]]) -> float:
    """Return the mean over all steps of a quantity that depends on the kind of attention calls, such as seconds.

    Args:
        known: its values for some kinds of calls. For others it is interpolated in the fraction of tokens that are not
            sent.
        steps: for every step, the share of its calls that is of each kind.
    """
    return statistics.mean(sum(part * of_kind(known, kind) for kind, part in step.items()) for step in steps)


# A layer --------------------------------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """A span of time in the plan of a layer, in which a lane (a background thread, or "main") computes, sends or
    waits."""

    name: str  # the work that is done, such as "attention"
    lane: str  # the thread that does it
    start_s: float  # its start, in seconds from its layer's start
    end_s: float  # its end, in seconds from its layer's start


class LayerPlan(NamedTuple):
    """The predicted cost of one layer in attention calls of one kind, on the rank that computes longest."""

    seconds: float  # seconds until the next layer begins
    compute_s: float  # seconds that the rank computes
    spans: list[Moved]  # what the main thread and the lanes (background threads) do when
    bytes: dict[str, float]  # bytes that all ranks send, by link class


class Sent:
    """The messages of one layer in attention calls of one kind, on all ranks."""

    forward: Sequence[Hop] = ()  # stages in which one of q, k and v is sent, with the cost of each
    back: Sequence[Hop] = ()  # stages in which the output is sent back, with the cost of each
    # if tensors go in chunks: function from the seconds of attention to one group's keys to those of the whole call,
    # its messages included, as `Ring.seconds`
    stages: Seconds | None = None

    def __init__(self, case: Case, kind: Kind, call: CallKind) -> None:
        """Compute the messages from the settings: of the exchange's stages, of rings, and of what ranks gather.

        Args:
            case: the run.
            kind: the layer.
            call: the kind of attention calls.
        """
        mesh, config, codec, latencies = case.mesh, case.config, case.codec, case.latencies
        layouts = mesh.layouts(kind.segments, case.shape.heads)
        self.width = codec.sent_bytes(case.shape.head_dim, case.itemsize, call)  # bytes of one token for one head
        groups = list(zip(mesh.parts, layouts, strict=True))
        rows_P = of_ranks(mesh, (codec.rows_sent(*group, call) for group in groups))
        gathered_P = of_ranks(mesh, (codec.gathered(*group, call) for group in groups))
        all_P, heads_P = (of_ranks(mesh, (getattr(one, name) for one in layouts)) for name in ("rows", "heads"))
        self.rows = float(sum(rows_P[list(mesh.groups[0])]))  # rows that a group sends of each of q, k and v
        self.ring = ring_of(mesh, layouts, case.work, latencies.latency_s + latencies.message_s)
        self.messages: list[tuple[int, Traffic]] = [(1, one) for one in self.ring.messages]  # (factor, traffic)
        if mesh.ulysses == 1:
            return
        cell, chunks = case.batch * self.width, chunking(config, mesh.parts[0])
        table = exchange_table(config, case.topology)
        size_mb = 3 * megabytes_per_rank(layouts[0], cell)
        name = config.exchange if table is None else exchange_for(table, size_mb)
        stages = stages_of(mesh, name, config.nic_balance, case.one_peer)
        self.forward = [stage.hop(rows_P, heads_P, cell, latencies) for stage in stages]
        self.back = [stage.back().hop(all_P, heads_P, cell, latencies) for stage in reversed(stages)]
        gathers = stages_of(mesh, "flat")[0].traffic(case.batch * gathered_P, np.ones_like(heads_P))
        self.messages += [(3 * cell, hop.traffic) for hop in self.forward]
        self.messages += [(1, gathers), *((cell, hop.traffic) for hop in self.back)]

        def seconds(chosen_PP: np.ndarray) -> float:
            hops = [stage.only(chosen_PP).hop(all_P, heads_P, cell, latencies) for stage in stages]
            return sum(4 * hop.link_s + hop.wait_s for hop in hops)

        if chunks.chunks > 1 and size_mb >= chunks.from_mb:
            self.stages = in_chunks(mesh, chunks.chunks, all_P, self.ring, seconds)

    @property
    def bytes(self) -> dict[str, float]:
        """The bytes that all ranks send in the layer, by link class."""
        return {link: sum(often * one.bytes[link] for often, one in self.messages) for link in LINK_CLASSES}

    @property
    def busiest_node(self) -> float:
        """The number of bytes that leave the node which sends most to other nodes, in the layer."""
        return float(np.sum([often * one.out_of for often, one in self.messages], axis=0).max())


class PlannedLayer:
    """One rank's layer as a simulation runs it: in place of each computation, its seconds by the roofline model are
    passed on."""

    def __init__(
        self, case: Case, kind: Kind, layout: Layout, slot: int, compute: Callable[[float, int], None], x_BLHD: Tensor
    ) -> None:
        """Compute the seconds of the layer's parts.

        Args:
            case: the run.
            kind: the layer.
            layout: the tokens and heads of the rank's Ulysses group.
            slot: index of the rank in that group.
            compute: function called in place of each computation, with its seconds and its number of launches.
            x_BLHD: tensor that stands for q, k and v.
        """
        self.kind, self.layout, self.slot = kind, layout, slot
        self._heads, self._compute, self._x_BLHD = case.shape.heads, compute, x_BLHD
        self.times: Layer = roofline(case.shape, case.topology, sum(layout.rows), case.batch, slot, layout)

    def run(self, strategy: Ulysses | PlannedCall, layer_key: LayerKey) -> None:
        """Run the layer once: its projections, its attention by the given strategy, and the rest.

        Args:
            strategy: a real strategy, whose messages a benchmark then times, or the simulation in its place.
            layer_key: the name of the attention layer.
        """
        half = partial(self._projected, self.times.project_qk / 2, LAUNCHES_QK // 2)
        v = partial(self._projected, self.times.project_v, LAUNCHES_V)
        meanwhile = self._rest if self.kind.beside else nothing
        strategy.attend(LazyQKV(half, half, v, self.kind.segments, self._heads, meanwhile=meanwhile), layer_key)
        if not self.kind.beside:
            self._rest()

    def _projected(self, seconds: float, launches: int) -> Tensor:
        """Account for the projection of q, k or v, and return the tensor that stands for it."""
        self._compute(seconds, launches)
        return self._x_BLHD

    def _rest(self) -> None:
        """Account for the output projection and the MLP."""
        self._compute(self.times.rest, LAUNCHES_REST)


class PlannedCall:
    """A simulation of one rank that runs layers of one kind: when it computes, sends, and waits for messages.

    The order that the settings name is a function that makes and sends q, k and v. It runs as in the engine, and is
    given this object as strategy, transfer and trace. Tensors are sent stage by stage, each when its lane (background
    thread) is free.
    """

    def __init__(self, case: Case, kind: Kind, call: CallKind, sent: Sent) -> None:
        """Choose the rank that has most to compute, whose time line is simulated.

        Args:
            case: the run.
            kind: the layer.
            call: the kind of attention calls.
            sent: the messages of the layer in such calls.
        """
        self.layer, self.spans, self.at, self.compute_s = kind.name, list[Moved](), 0.0, 0.0
        self._case, self._call, self._latencies = case, call, case.latencies
        self._free, self._arrived = dict[str, float](), dict[str, float]()
        self._sent, mesh = sent, case.mesh
        self._device, self._codec = case.topology.machine.device, case.codec
        of_ranks = {  # one rank for each amount of work
            (sum(layout.rows), layout.rows[slot], layout.heads[slot]): (layout, slot)
            for layout in mesh.layouts(kind.segments, case.shape.heads)
            for slot in range(mesh.ulysses)
        }
        options = [PlannedLayer(case, kind, *rank, self._compute, NO_NUMBERS) for rank in of_ranks.values()]
        self._layer = max(options, key=lambda layer: layer.times.total)
        layout, slot, self._B, self._D = self._layer.layout, self._layer.slot, case.batch, case.shape.head_dim
        self._L, self._S, self._G, self._H = layout.rows[slot], sum(layout.rows), layout.heads[slot], case.shape.heads
        coded = case.config.codec != "none" and self._sent.width != case.shape.head_dim * case.itemsize
        self._coded = bool(coded and self._sent.forward)

    def run(self) -> LayerPlan:
        """Simulate the layer, and return its predicted cost.

        If calls do not wait for what they send, SITES layers are run, so that the lanes are as busy as in the middle of
        a model. The last one is returned.
        """
        began = before = computed = 0.0
        for _ in range(SITES if self._call.displaced else 1):
            began, before, computed = self.at, self._lanes_end, self.compute_s
            self.spans.clear()
            self._layer.run(self, LayerKey(self.layer))
        seconds = self.at - began
        if self._call.displaced:
            seconds = max(seconds, self._lanes_end - before)
        spans = [one._replace(start_s=one.start_s - began, end_s=one.end_s - began) for one in self.spans]
        return LayerPlan(seconds, self.compute_s - computed, spans, self._sent.bytes)

    @property
    def _lanes_end(self) -> float:
        """The time, in seconds of the simulation, at which all lanes are free."""
        return max(self._free.values(), default=0.0)

    def attend(self, qkv: LazyQKV, _layer_key: LayerKey) -> Tensor:
        """Simulate one attention call on the time line: what it computes, sends and waits for. Return NO_NUMBERS, an
        empty tensor that stands for the output.

        Layers call it in place of a strategy's `attend`, so the arguments are the same.
        """
        times, in_stages = self._layer.times, self._sent.stages
        load(ORDERS, self._case.config.order)(qkv, self, self)
        self._wait("q", "k", "v")
        with self.span("attention"):
            blocks, behind = self._case.mesh.ring, in_stages or self._sent.ring.seconds
            parts = blocks if in_stages is None else blocks + 2  # partial results of each query, which are merged
            block_s, launches = (times.attention, 1) if parts == 1 else self._part(times.attention)
            self._compute(blocks * block_s, parts * launches)
            merging_s = merged_s(self._device, self._B * self._S * self._G * self._D)
            self._compute((parts - 1) * merging_s, parts - 1)
            hidden_s = behind(0.0) + blocks * block_s - behind(block_s)
            self.at += behind(block_s) - blocks * block_s + (1 - self._device.overlap_share) * hidden_s
        if in_stages is None:
            self._travel("o")
        self._wait("o")
        return NO_NUMBERS

    def _part(self, by_kernel_s: float) -> tuple[float, int]:
        """Return (seconds, launches) of attention to one block of keys that also gives the log-sum-exp, which merging
        needs (`attention/sums.py`).

        Args:
            by_kernel_s: seconds of a fused kernel for the same attention.
        """
        if self._device.sums_kernel:
            return by_kernel_s, 1
        scores = self._B * self._G * self._S**2
        passes_s = scores * SCORE_BYTES / (self._device.memory_gb_s * 1e9)
        return max(by_kernel_s, passes_s), CHUNK_LAUNCHES * math.ceil(scores / CHUNK)

    def _compute(self, seconds: float, launches: int) -> None:
        """Advance the main thread by a computation. It first waits for the share of the messages under way that
        arithmetic cannot hide.

        Args:
            seconds: seconds of the computation.
            launches: number of kernels that it launches.
        """
        spent = seconds + launches * self._latencies.launch_s
        open_s = (1 - self._device.overlap_share) * max(0.0, self._lanes_end - self.at)
        self.at, self.compute_s = self.at + open_s + spent, self.compute_s + spent

    @contextmanager
    def span(self, name: str, lane: str = "main", layer: str = "", late_bytes: int = 0) -> Iterator[None]:
        """Record a span of the main thread for the time in the block. Orders call it in place of a trace's `span`, so
        the arguments are the same."""
        began = self.at
        yield
        self.spans.append(Moved(name, lane, began, self.at))

    def send(self, **tensors: Tensor) -> dict[str, Any]:
        """Simulate the sending of tensors, and return them by name. Orders call it in place of a transfer's `send`."""
        if self._sent.stages is None:
            self._travel(*tensors)
        return dict(tensors)

    def _travel(self, *names: str) -> None:
        """Simulate tensors that are sent together: a lane codes and packs them, they pass every stage of the exchange,
        and are put in place.

        Args:
            names: names of the tensors, of "q", "k" and "v"; or "o" alone, for the output on its way back.
        """
        forward, launch_s = names != ("o",), self._latencies.launch_s
        hops = self._sent.forward if forward else self._sent.back
        at = self.at + (self._chosen_s() if "v" in names else 0.0)
        itemsize = 1 if self._coded else self._case.itemsize
        coded_s = len(names) * self._coded_s(forward, sends=True)
        extra_s = 0.0 if names[0] in self._call.displaced else coded_s
        if names[0] in self._call.displaced:  # then the main thread codes them
            self._compute(coded_s, 0)
        for number, hop in enumerate(hops, 1):
            began = max(at, self._free.get(hop.lane, 0.0))
            # Blocks that are passed on are packed while links are busy.
            packed_s = copied_s(self._device, len(names) * hop.packed / hop.phases, itemsize) + hop.phases * launch_s
            if number == len(hops):
                cells = self._sent.rows * self._G if forward else self._L * self._H
                placed = len(names) * self._B * self._sent.width * cells
                packed_s += copied_s(self._device, placed, itemsize) + launch_s
            at = began + extra_s + packed_s + hop.wait_s + len(names) * hop.link_s
            self._free[hop.lane], extra_s = at, 0.0
            self.spans.append(Moved(f"{''.join(names)} {hop.lane}", hop.lane, began, at))
        self._arrived |= dict.fromkeys(names if hops else (), at)

    def _wait(self, *names: str) -> None:
        """Wait in the simulation until tensors have arrived, then decode them. Displaced tensors are decoded without
        waiting.

        Args:
            names: names of the tensors, of "q", "k", "v" and "o".
        """
        here = [name for name in names if name in self._arrived]
        if not here:
            return
        with self.span(f"wait for {''.join(here)}"):
            self.at = max(self.at, *(self._arrived[name] for name in here if name not in self._call.displaced), 0.0)
        self._compute(len(here) * self._coded_s("o" not in here, sends=False), 0)

    def _chosen_s(self) -> float:
        """Return the seconds that V-Major takes to choose the tokens to send; 0 for other codecs and for whole
        calls."""
        tiles = self._case.topology.machine.tiles
        launches, gathers, waits = self._codec.choosing(self._call, tiles)
        latency_s, message_s, launch_s, blocked_s, wait_s = self._latencies
        scored = self._B * self._L * self._H * self._D * self._case.itemsize if launches else 0
        gather_s = latency_s + (self._case.mesh.ulysses - 1) * (message_s + 2 * blocked_s)
        return scored_s(self._device, scored) + launches * launch_s + gathers * gather_s + waits * wait_s

    def _coded_s(self, forward: bool, sends: bool) -> float:
        """Return the seconds of coding or decoding one tensor; 0 without a codec.

        Args:
            forward: True for q, k and v, False for the output.
            sends: True for coding, False for decoding.
        """
        if not self._coded:
            return 0.0
        shape = (self._L, self._H) if forward == sends else (self._S, self._G)
        x = torch.empty(self._B, *shape, self._D, device="meta", dtype=torch.bfloat16)
        return coded_s(self._device, x, self._case.config, self._sent.width, sends)


# A step ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """The predicted cost of a step of the model, as a mean over all steps of a run."""

    step_s: float  # seconds of a step
    compute_s: float  # seconds of computation, on the rank that computes longest
    bytes: dict[str, float]  # bytes that all ranks send, by link class
    steps: int  # number of steps of a run
    waits: float = 0.0  # number of times that the host waits for the device
    outputs: dict[str, float] = field(default_factory=dict)  # bytes that two guidance branches exchange, by link class

    @property
    def image_s(self) -> float:
        """The seconds of denoising one batch, without text encoders and VAE."""
        return self.step_s * self.steps

    def of_image(self, sent: Mapping[str, float]) -> dict[str, float]:
        """Return the bytes of all steps of a run, by link class.

        Args:
            sent: bytes of one step, by link class.
        """
        return {link: self.steps * count for link, count in sent.items()}

    @property
    def communication_share(self) -> float:
        """The part of a step, from 0 to 1, in which the rank that computes longest waits for messages instead."""
        return 1 - self.compute_s / self.step_s if self.step_s else 0.0


def plan_layers(case: Case) -> list[tuple[Kind, dict[CallKind, LayerPlan]]]:
    """Return each kind of layer with the plans of one such layer, by kind of attention calls, for all kinds in
    `sampled_kinds`."""
    sent_of, calls = cache(partial(Sent, case)), sampled_kinds(case)

    def plan(kind: Kind, call: CallKind) -> LayerPlan:
        return PlannedCall(case, kind, call, sent_of(kind, call._replace(displaced=""))).run()

    return [(kind, {call: plan(kind, call) for call in calls}) for kind in kinds_of(case)]


def plan_step(case: Case) -> StepPlan:
    """Predict the cost of a mean step of a run: its calls of the model follow one another, and in each of them its
    layers.

    Once in a call ranks gather decisions for all its layers, if the codec asks for it.
    """
    every, several = kinds_of_steps(case), case.topology.size > 1
    coded = statistics.mean(sum(part for kind, part in step.items() if not kind.whole) for step in every)
    choosing = {call: case.codec.choosing(call, case.topology.machine.tiles)[2] for step in every for call in step}
    step_s, compute_s, waits, sent = 0.0, 0.0, 0.0, dict.fromkeys(LINK_CLASSES, 0.0)

    def of_step(kind: Kind, known: Mapping[CallKind, float]) -> float:
        """Return the mean over steps of a quantity, summed over all layers of a kind.

        Args:
            kind: the layers.
            known: the quantity of one layer, by kind of attention calls.
        """
        return kind.coded * over_steps(known, every) + (kind.layers - kind.coded) * known[WHOLE]

    for call in case.calls:
        branches, layers_s = call.branches, list[float]()  # of the blocks of one call, in the model's order
        step_s += branches * case.latencies.latency_s * coded * (several and case.codec.agrees)
        for kind, plans in plan_layers(call):
            seconds = {how: plan.seconds for how, plan in plans.items()}
            layers_s += [over_steps(seconds, every)] * kind.coded + [seconds[WHOLE]] * (kind.layers - kind.coded)
            step_s += branches * of_step(kind, seconds)
            compute_s += branches * of_step(kind, {how: plan.compute_s for how, plan in plans.items()})
            waits += branches * several * of_step(kind, choosing)
            for link in LINK_CLASSES:
                sent[link] += branches * of_step(kind, {how: plan.bytes[link] for how, plan in plans.items()})
        step_s += branches * weights_waited_s(call, layers_s)
    return StepPlan(step_s, compute_s, sent, case.steps, waits)
