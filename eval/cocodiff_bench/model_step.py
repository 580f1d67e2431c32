"""`cocodiff bench step --model NAME`: a denoising step of a large model's shape, by every exchange in turn.

On a real machine a random transformer of that shape makes whole runs (`step.measure_shape`). Everything else here is
for emulated machines. Messages are real and of full size. Computation is replaced by a wait, as long as a roofline of
the machine file's device says, multiplied like the times of links (`cocodiff emulate --scale`). One layer is measured,
and a step is all layers in both branches. V-Major is measured at three fractions of stable tokens and averaged over its
schedule. For displaced calls, several layers run in several calls of a model. They are measured for every set of
tensors that a recorded run displaces together, and averaged over its steps, the first one included. Reported times are
those of the real machine: the measured ones divided by the scale.

With guidance in two parts of the ranks, each part runs a layer of its own branch. The exchange of outputs between the
parts is measured separately and added once a step.

A link efficiency e says that links reach e of their nominal rate. Then waits are multiplied by scale times e, and
measured times are divided by scale times e.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from cocodiff_eval.harness.replicas import topology_of

from cocodiff.comm.launch import detect, emulated
from cocodiff.comm.trace import save_traces
from cocodiff.config.config import Config, load_machine
from cocodiff.config.errors import UserError, check_choice
from cocodiff.engine.weights import part_of
from cocodiff.exchange.codec import WHOLE, CallKind
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.model_shapes import family_of_shape, load_shape
from cocodiff.jobs.options import Option, check_counts
from cocodiff.kernels.device import free_memory
from cocodiff.planner.case import Case, ModelShape
from cocodiff.planner.choice import OUTPUT_CHANNELS, outputs_of
from cocodiff.planner.decisions import decisions_of
from cocodiff.planner.layers import Kind, PlannedLayer, kinds_of_steps, over_steps, plan_step, sampled_kinds
from cocodiff.planner.memory import largest_batch, mib
from cocodiff.planner.traffic import PlannedAllToAll
from cocodiff.topology import Topology
from cocodiff.topology.axes import PLACEMENTS, Axes, Mesh, Partition
from cocodiff_bench import common
from cocodiff_bench.common import Row, Values
from cocodiff_bench.random_models import OF_FAMILIES
from cocodiff_bench.stand_in import Clock, Late, StandIn
from cocodiff_bench.step import measure_shape

# Seconds in CoCoDiff's Figure 11 at 48 MB per rank on one node: oneCCL (read as one peer at a time), TAPA's phases
FIGURE_11_S = {"flat_serial": 25.5e-3, "tapa": 0.4e-3 + 6.0e-3}


def figure_11_share() -> float:
    """Return the share of the link rates in Aurora's machine file that would explain the times in CoCoDiff's Figure 11.

    It is a default of `--link_efficiency`.
    """
    machine = load_machine("aurora").with_value("latency_us", 0.0)
    topology = Topology.build(machine, machine.tiles_per_node or 12)
    shares = [PlannedAllToAll(topology, name, 48).seconds(machine) / found_s for name, found_s in FIGURE_11_S.items()]
    return round(statistics.geometric_mean(shares), 3)


FITTED = figure_11_share()
OUTPUTS = "exchange of outputs"  # key of this measurement
STABLE = (WHOLE, CallKind(stable=0.5), CallKind(stable=1.0))  # calls of V-Major that are measured
EXCHANGES, CODECS = ("flat", "tapa", "split"), ("lossless", "int8", "int4", "int2")
ARRIVALS = {"ahead": "adaptive", "displaced": "displaced"}
SHARING = ("card", "node")  # the tiles that share the weights of a block
# The settings that the words of a variant's name stand for. The library's own all-to-all is the paper's flat baseline.
# With guidance each of two parts of the ranks computes a branch. Rings have the number of ranks of --ring.
WORDS: dict[str, dict[str, Any]] = {
    **{name: {"exchange": name} for name in EXCHANGES},
    "flat_serial": {},
    "library": {"messages": "alltoall"},
    "cocodiff": {"exchange": "tapa", "order": "v_first", "selection": "v_major"},
    "v_first": {"order": "v_first"},
    "v_major": {"order": "v_first", "selection": "v_major"},
    "chunks": {"chunks": 2},
    "guidance": {"guidance_parallel": 2},
    "ring": {"ring_kind": "keys"},
    "token": {"ring_kind": "token"},
    "streaming": {"ring_kind": "streaming"},
    **{codec: {"codec": codec} for codec in CODECS},
    **{name: {"arrival": arrival} for name, arrival in ARRIVALS.items()},
    **{of: {"weights": of} for of in SHARING},
}
VARIANTS = ("flat_serial", "flat", "tapa", "tapa v_first", "cocodiff", "split", "split v_first", "split v_major")
MORE_VARIANTS = (  # variants that are not measured by default
    *("library", "library tapa", "flat chunks", "split chunks"),
    *("guidance flat", "guidance flat v_first", "guidance split", "guidance split v_first"),
    *("guidance flat chunks", "guidance split chunks", "ring", "token ring", "streaming"),
)
LARGEST_BATCH = 32  # that of the CoCoDiff paper


def settings_of(name: str) -> dict[str, Any]:
    """Return the engine's settings for a variant of `bench step`, from the words of its name.

    name: words of WORDS, such as "tapa v_first"; if two words set the same setting, the first one counts
    """
    found = {"exchange": "flat"}
    for word in reversed(name.split()):
        found |= WORDS[word]
    return found


# Variants that send tensors as they are may be followed by a codec, and then by a kind of arrival. All may be followed
# by the tiles that share weights.
ALL_VARIANTS = {
    " ".join(filter(None, (name, codec, late))): settings_of(f"{name} {codec} {late}")
    for name, codec, late in product((*VARIANTS, *MORE_VARIANTS), ("", *CODECS), ("", *ARRIVALS, *SHARING))
    if not {"selection", "ring_kind"} & settings_of(name).keys() or not (codec or late in ARRIVALS)
}
USUAL_VARIANTS = (*VARIANTS, "split v_first int4", "split v_first int2")
ABOUT = (
    "Times a denoising step of a model's shape: real messages on an emulated machine, compute as waits of a roofline."
)
OPTIONS = common.with_common_options(
    Option("model", "a name in configs/models: sd3.5, flux.1, flux.2 or qwen-image, or a file", required=True),
    Option("size", "sides of the square image in pixels", [1536], type=int, many=True),
    Option("batch", f"images in one call; 0: as many as fit into memory, at most {LARGEST_BATCH}", 1, type=int),
    Option("steps", "denoising steps that V-Major's schedule goes over", 50, type=int),
    Option(
        "link_efficiency",
        f"parts of the nominal rate that links reach; {FITTED:g}: CoCoDiff's Figure 11",
        [1.0, FITTED],
        type=float,
        many=True,
    ),
    Option(
        "variants",
        f"of {', '.join([*VARIANTS, *MORE_VARIANTS])}; {', '.join(CODECS)} behind an exact one is the codec in it, and "
        f"behind that ahead (arrival adaptive) or displaced; {' or '.join(SHARING)} behind any: who shares weights; by "
        f"default those without chunks and guidance, and split_v_first with int4 and int2",
        many=True,
    ),
    Option("ring", "ranks of a ring, for ring and token ring; default: all", None, type=int),
    Option("placement", "of those rings in a mesh with Ulysses", "usp", choices=PLACEMENTS),
    Option("repeats", "measurements of each variant", 3, type=int),
    common.TRANSPORT,
)


def check(values: Values, ranks: int | None) -> None:
    """Raise UserError for options of `bench step`, with a model's shape, that cannot be measured on these ranks.

    Args:
        values: the command's options; its `variants` are replaced by their full names.
        ranks: number of ranks of the launch; None if unknown, and then not checked.
    """
    check_counts(values, "steps", "repeats", "ranks", "ring", *(["batch"] if values["batch"] else []))
    spelled = {name.replace(" ", "_"): name for name in ALL_VARIANTS}
    values["variants"] = [spelled.get(name.replace(" ", "_"), name) for name in values["variants"] or USUAL_VARIANTS]
    for name in values["variants"]:
        if name not in ALL_VARIANTS:
            known = ", ".join([*VARIANTS, *MORE_VARIANTS])
            raise UserError(
                f"--variants {name!r}: choose from {known} (A_v_first for 'A v_first'), and for the residual codec one "
                f"of those without V-Major with {', '.join(CODECS)} behind (split_v_first_int4), or ahead, displaced, "
                f"{' or '.join(SHARING)} behind that"
            )
        if ranks is not None and ranks % parts_of(name):
            raise UserError(f"--variants {name!r}: {ranks} ranks have no two parts: start an even number")
    for efficiency in values["link_efficiency"]:
        if not 0 < efficiency <= 1:
            raise UserError(f"--link_efficiency {efficiency:g}: give a part of the nominal rate, above 0 up to 1")
    shape, machine = load_shape(values["model"]), load_machine(values["machine"])
    for size in values["size"]:
        shape.image_tokens(size)
    if not emulated():
        check_shape(values, shape)
        return
    if not (machine.device.bf16_tflop_s and machine.device.memory_gb_s):
        raise UserError(
            f"machine {machine.name} does not say how fast its device is (device: bf16_tflop_s, memory_gb_s): use "
            f"cocodiff emulate --machine aurora -- cocodiff bench step --model {values['model']}"
        )


def check_shape(values: Values, shape: ModelShape) -> None:
    """Raise UserError for options of `bench step` that cannot be measured with a random transformer on a real machine.

    Args:
        values: the command's options.
        shape: the model's sizes.
    """
    check_choice(f"family of model {values['model']}", family_of_shape(values["model"]) or "none", OF_FAMILIES)
    if len(values["size"]) > 1:
        raise UserError(f"--size {' '.join(map(str, values['size']))}: one at a time where nothing is emulated")
    late = [name for name in values["variants"] if {"ring_kind", "guidance_parallel"} & ALL_VARIANTS[name].keys()]
    if late:
        raise UserError(f"--variants {late[0]!r}: on an emulated machine alone (cocodiff emulate)")


def check_room(shape: ModelShape, transport: Any) -> None:
    """Raise UserError if the weights of a random model of given sizes exceed this rank's free memory.

    Activations are not counted.

    Args:
        shape: the model's sizes.
        transport: this rank's connection to the other ranks.
    """
    need = shape.parameters * (4 if transport.device.type == "cpu" else 2)
    free = free_memory(transport.device, detect().local_size or transport.size)
    if free is not None and need > free:
        raise UserError(
            f"{shape.name}: random weights take {mib(need)} MiB of a rank, and {mib(free)} are free: run it inside "
            f"cocodiff emulate, where computing is waited for"
        )


def fitting(values: Values, shape: ModelShape, topology: Topology) -> tuple[int, dict[str, Config]]:
    """Return the number of images in one call, and by variant the engine's settings, of the variants that then fit in
    memory.

    The memory is that of one tile (of a GPU), as the machine file says. If it says none, all variants are returned.
    Raise UserError if none fits.

    Args:
        values: the command's options. Batch 0 asks for as many images as fit.
        shape: the model's sizes.
        topology: the places of ranks.
    """
    configs = {name: config_of(name, values) for name in values["variants"]}
    memory = topology.machine.device.memory
    if memory is None:
        return max(1, values["batch"]), configs

    call = shape.segments(values["size"][0]), 1, 2, shape.branches
    room = {name: largest_batch(Case(shape, topology, config, *call), memory) for name, config in configs.items()}
    batch = values["batch"] or min(LARGEST_BATCH, min(room.values()) or max(room.values()))
    found = {name: config for name, config in configs.items() if 0 < batch <= room[name]}
    if not found:
        raise UserError(f"{shape.name} {values['size'][0]}, batch {max(1, batch)}: more than a tile's memory holds")
    return batch, found


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Run one rank's part of `bench step` with a model's shape: all variants, at all sizes and link efficiencies.

    Rank 0 prints and writes the results.

    Args:
        values: the command's options. Batch and variants are replaced by those that fit into memory.
        output: folder of the results.
        transport: this rank's connection to the other ranks.
    """
    topology, shape = topology_of(values["machine"], transport.size), load_shape(values["model"])
    about = {"model": values["model"], "nodes": topology.nodes}
    if not emulated() or not values["batch"]:
        values["batch"], configs = fitting(values, shape, topology)
        values["variants"] = [*configs]
    if not emulated():
        check_room(shape, transport)
        found = measure_shape(values, shape, str(family_of_shape(values["model"])), configs, transport)
        if transport.rank == 0:
            rows = [row | about | {"size": values["size"][0], "batch": values["batch"]} for row in found]
            common.say_rows(rows, "a step", more_words)
            common.publish(output, values, rows)
        return
    world = f"batch {values['batch']}, {topology.size} ranks on {topology.nodes} node(s)"
    # The ranks that share one branch's sequence with this one: all, or a part.
    sharing = {name: part_of(topology, transport, parts_of(name)) for name in values["variants"]}
    transports = {name: own for name, (_, own) in sharing.items()}
    built: Built = {}
    clock, together = Clock(topology.machine.device), transport.group(range(transport.size)).barrier
    measured: list[Row] = []
    for size in values["size"]:
        cases = {name: case_of(values, name, shape, own, size) for name, (own, _) in sharing.items()}
        built = built or stand_ins(cases, transports, clock)
        layers = {name: layer_of(case, transports[name].rank, clock) for name, case in cases.items()}
        for (name, kind), one in built.items():
            one.settle(layers[name], kind)
        computing = {name: layer.times.total for name, layer in layers.items()}
        outputs = outputs_exchange(shape, topology, size, values["batch"], transport) if topology.size % 2 == 0 else {}
        for efficiency in values["link_efficiency"]:
            clock.dilation = emulated()["scale"] * efficiency
            variants, begins = calls_of(built)
            if any(parts_of(name) > 1 for name in sharing):
                variants |= outputs
            title = f"bench step {size}x{size}, links at {efficiency:g}"
            seconds = common.measure_in_turns(title, variants, values, transport, barrier=together, begin=begins)
            behind = {key_of(*of): one for of, one in built.items() if of[1].displaced or one.shares}
            seconds |= {key: one.last_s[-values["repeats"] :] for key, one in behind.items()}
            slowest = common.of_slowest_rank(seconds, transport)
            records = {key: transport.gather_values(one.record) for key, one in behind.items()}
            if transport.rank == 0:
                case = f"{shape.name} {size}x{size} {world}, link efficiency {efficiency:g}"
                hidden = {
                    key: Late.of([one["spans"] for one in of_ranks], behind[key].waited)
                    for key, of_ranks in records.items()
                }
                planned = {name: planned_s(name, one, topology, efficiency) for name, one in cases.items()}
                of_case = rows_of(StepMeasurement(case, cases, clock.dilation, computing, hidden, planned), slowest)
                common.say_rows(of_case, "a step", more_words)
                measured += [row | about | {"size": size, "batch": values["batch"]} for row in of_case]
    if transport.rank == 0:
        files = {"trace.json": partial(save_traces, records=records)} if records else {}
        common.publish(output, values, measured, files)


def case_of(values: Values, name: str, shape: ModelShape, topology: Topology, size: int) -> Case:
    """Return the planner's description of a run of one variant. Raise UserError if a ring does not divide the ranks.

    Args:
        values: the command's options.
        name: name of the variant.
        shape: the model's sizes.
        topology: the places of the ranks that share a sequence.
        size: pixels of an image's edge.
    """
    kind = ALL_VARIANTS[name].get("ring_kind")
    ring = values["ring"] or topology.size if kind else 1
    mesh = Mesh.build(topology, ring, values["placement"], kind=kind or "keys")
    call = shape.segments(size), values["batch"] * max(1, shape.rows_per_image // parts_of(name))
    how = {"steps": values["steps"], "stable": 0.0, "one_peer": name == "flat_serial", "known_mesh": mesh}
    return Case(shape, topology, config_of(name, values), *call, **how)


# The layers that stand in for a model's, by variant and kind of calls.
Built = dict[tuple[str, CallKind], StandIn]


def stand_ins(cases: Mapping[str, Case], transports: Mapping[str, Any], clock: Clock) -> Built:
    """Return layers that wait in place of a model's that compute, by variant and kind of attention calls.

    With codecs and displacement each kind has an object of its own. Otherwise a step in which tensors are sent as they
    are would reset their state.

    Args:
        cases: the planner's description of each variant.
        transports: connections to the ranks that share a sequence, by variant.
        clock: the waits that replace computation.
    """
    found: Built = {}
    for name, case in cases.items():
        for kind in measured_kinds(case):
            known = found.get((name, WHOLE)) if case.config.selection == "v_major" else None
            found[name, kind] = known or StandIn(case, transports[name], clock)
    return found


def layer_of(case: Case, rank: int, clock: Clock) -> PlannedLayer:
    """Return one layer of the model as this rank runs it: tensors of full size, and waits instead of computation.

    Args:
        case: the planner's description of the variant.
        rank: this rank's number among those that share a sequence.
        clock: the waits that replace computation.
    """
    shape, segments = case.shape, case.segments
    group, slot = case.mesh.group_and_slot(rank)
    layout = case.mesh.layouts(segments, shape.heads)[group]
    x_BLHD = torch.zeros(case.batch, layout.rows[slot], shape.heads, shape.head_dim, dtype=torch.bfloat16)
    return PlannedLayer(case, Kind("layer", 1, 1, segments), layout, slot, clock.wait, x_BLHD)


Calls = dict[str, Callable[[], Any]]


def calls_of(built: Built) -> tuple[Calls, Calls]:
    """Return the functions to time, and the functions that begin a step before them; two mappings of the same keys.

    A key names a variant and a kind of attention calls (`key_of`). Variants with displaced tensors or shared weights
    have no second function: the first begins their steps.

    Args:
        built: the layers to measure, by variant and kind of attention calls.
    """
    variants, begins = Calls(), Calls()
    for (name, kind), one in built.items():
        key = key_of(name, kind)
        if kind.displaced or one.shares:
            variants[key] = partial(one.run_late, kind)
        else:
            variants[key], begins[key] = partial(one.run, 1), partial(one.begin, kind)
    return variants, begins


def outputs_exchange(shape: ModelShape, topology: Topology, size: int, batch: int, transport: Any) -> Calls:
    """Return, under the key OUTPUTS, the function in which each rank exchanges the model's output with its partner.

    Partners are in different halves of the ranks, which compute guidance's two branches.

    Args:
        shape: the model's sizes.
        topology: the places of all ranks.
        size: pixels of an image's edge.
        batch: number of images.
        transport: this rank's connection to the other ranks.
    """
    output = torch.zeros(batch, shape.image_tokens(size), OUTPUT_CHANNELS, dtype=torch.bfloat16)
    received = torch.zeros_like(output)
    group = transport.group(sorted(Axes.build(topology, guidance=2).partners(transport.rank)))
    peer = 1 - group.index

    def exchange() -> None:
        group.send_recv([(output, peer)], [(received, peer)]).wait()

    return {OUTPUTS: exchange}


def planned_s(name: str, case: Case, topology: Topology, efficiency: float) -> float:
    """Return the planner's prediction of a variant's step on the emulated machine, in the real machine's seconds.

    As on that machine, messages have no latency, launches take no time, and attention to a part of the keys takes that
    part of the fused kernel's time.

    Args:
        name: name of the variant.
        case: the planner's description of it, on the ranks that share a sequence.
        topology: the places of all ranks.
        efficiency: part of the nominal rates that links reach.
    """
    machine = topology.machine.with_value("link_share", efficiency * topology.machine.links.link_share)
    for latency in ("latency_us", "message_us", "blocked_us", "launch_us"):
        machine = machine.with_value(latency, 0.0)
    machine = machine.with_value("sums_kernel", True)
    own, everyone = (replace(one, machine=machine) for one in (case.topology, topology))
    branches = case.shape.branches if parts_of(name) == 1 else 1
    there = replace(case, topology=own, branches=branches, known_mesh=replace(case.mesh, topology=own))
    outputs_s, _ = outputs_of(replace(there, topology=everyone, branches=2), Partition(1, parts_of(name)))
    return plan_step(there).step_s + outputs_s


# Variants, and the rows that come of them -----------------------------------------------------------------------------


def parts_of(name: str) -> int:
    """Return the number of parts into which a variant divides the ranks.

    It is 2 if each part computes a branch of classifier-free guidance, else 1.

    Args:
        name: name of the variant, a key of ALL_VARIANTS.
    """
    return int(ALL_VARIANTS[name].get("guidance_parallel", 1))


def config_of(name: str, values: Values) -> Config:
    """Return all settings of the engine for a variant of `bench step`.

    Args:
        name: name of the variant, a key of ALL_VARIANTS.
        values: the command's options, which set the machine and others.
    """
    return common.engine_config(values, **ALL_VARIANTS[name])


def measured_kinds(case: Case) -> list[CallKind]:
    """Return the kinds of attention calls that are measured for a variant. The times of others are interpolated.

    Args:
        case: the planner's description of the variant.
    """
    return list(STABLE) if case.config.selection == "v_major" else sampled_kinds(case)


def key_of(name: str, kind: CallKind) -> str:
    """Return the text that names a variant, and one kind of its attention calls, in the measurements.

    Args:
        name: name of the variant.
        kind: the kind of calls.
    """
    return f"{name}@{kind}"


def over_schedule(of_kind: Mapping[CallKind, float], steps: Sequence[Mapping[CallKind, float]]) -> float:
    """Return the mean seconds of a layer over all steps of a denoising run.

    Calls differ in the fraction of tokens that they leave unsent. Between measured fractions seconds are interpolated.
    If the fraction 0 is not measured, it is taken as a call that sends all tokens.

    Args:
        of_kind: measured seconds by kind of attention calls.
        steps: for every step, the share of its calls that is of each kind.
    """
    return over_steps({CallKind(): of_kind[WHOLE], **of_kind}, steps)


@dataclass(frozen=True)
class StepMeasurement:
    """The measurements of `bench step` at one image size and one link efficiency."""

    title: str  # the model, sizes and ranks in words
    cases: Mapping[str, Case]  # the planner's description of every variant
    dilation: float  # time measured here divided by the real machine's
    computing: Mapping[str, float]  # seconds of computation in a layer on rank 0, by variant
    late: Mapping[str, Late]  # bytes of displaced calls or shared weights, by `key_of` variant and kind
    planned: Mapping[str, float]  # predicted seconds of a step, by variant

    def layers(self, name: str) -> int:
        """Return the number of layers that run one after the other in a step of a variant.

        One layer is measured; its seconds times this number are those of a step. If parts of the ranks compute a branch
        of guidance each, these are the layers of one branch.
        """
        shape = self.cases[name].shape
        branches = shape.branches if parts_of(name) == 1 else 1
        return (shape.joint_layers + shape.parallel_layers) * branches

    def hidden_share(self, name: str, steps: Sequence[Mapping[CallKind, float]]) -> float | None:
        """Return the share, 0 to 1, of a variant's bytes that no call waits for that was sent while the rank computed.

        It is a mean over all steps. Return None if there are no such bytes.

        Args:
            name: name of the variant.
            steps: for every step, the share of its attention calls that is of each kind.
        """
        parts = [
            (part, self.late[key])
            for of in steps
            for kind, part in of.items()
            if (key := key_of(name, kind)) in self.late
        ]
        sent = sum(part * late.sent for part, late in parts)
        return sum(part * late.hidden for part, late in parts) / sent if sent else None


def rows_of(case: StepMeasurement, slowest: Mapping[str, list[float]]) -> list[Row]:
    """Return the rows of bench.json of one image size and link efficiency, in seconds of a step on the real machine.

    Args:
        case: what was measured, with all that the rows need beside times.
        slowest: seconds of one layer on the slowest rank, by `key_of` variant and kind of attention calls.
    """
    seconds: dict[str, list[float]] = {}
    schedules = {name: kinds_of_steps(one) for name, one in case.cases.items()}
    for name, schedule in schedules.items():
        kinds = measured_kinds(case.cases[name])
        turns = zip(*(slowest[key_of(name, kind)] for kind in kinds), strict=True)
        steps = [over_schedule(dict(zip(kinds, turn, strict=True)), schedule) for turn in turns]
        seconds[name] = [of_layer * case.layers(name) / case.dilation for of_layer in steps]
        if parts_of(name) > 1:
            once = [outputs / case.dilation for outputs in slowest[OUTPUTS]]
            seconds[name] = [step + outputs for step, outputs in zip(seconds[name], once, strict=True)]
    found = common.rows(case.title, seconds, {}, common.compared_with(seconds, "flat_serial", "flat"))
    for row in found:
        name = row["variant"]
        one = case.cases[name]
        row["compute_s"] = case.computing[name] * case.layers(name)
        row["communication_share"] = 1 - row["compute_s"] / row["median_s"]
        row["planned_s"] = case.planned[name]
        decisions = decisions_of(one.config, one.steps, one.decisions)
        row["decisions"] = None if decisions is None else decisions.title()
        row["hidden_share"] = case.hidden_share(name, schedules[name])
    return found


def more_words(row: Row) -> list[str]:
    """Return more text to print after the times of a row of results of `bench step`, in parts.

    They are the share of communication and speed-ups over baselines. As far as the row has them, also the run whose
    displaced tensors are repeated, the hidden share of the bytes that no call waits for, memory, and the ratio to the
    planner's prediction.
    """
    ratios = {name: row.get(f"ratio_vs_{name}") for name in ("flat_serial", "library", "flat")}
    faster = [f"{1 / ratio:.2f}x over {name}" for name, ratio in ratios.items() if ratio]
    replays = [f"displaced as in {row['decisions']}"] if row.get("decisions") else []
    if row.get("hidden_share") is not None:
        what = "weights" if row["variant"].endswith(SHARING) else "what is sent late"
        replays.append(f"{row['hidden_share']:.1%} of {what} hidden")
    if row.get("peak_bytes"):
        replays.append(f"{row['peak_bytes'] / 2**30:.1f} GiB")
    if planned_s := row.get("planned_s"):
        replays.append(f"{row['median_s'] / planned_s:.3f} of the planned {planned_s * 1e3:.4g} ms")
    return [f"communication {row['communication_share']:.1%}", *faster, *replays]
