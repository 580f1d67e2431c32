"""`cocodiff bench step --model NAME`: a denoising step of a large model's shape, by every exchange in turn.

Messages are real and of full size; what computes is a wait, as long as a roofline of the machine file's device says,
drawn out like the links of the emulated machine (`cocodiff emulate --scale`). One layer is measured, a step is all of
them in both branches; V-Major is measured at three fractions of stable tokens and averaged over its schedule. Where
calls do not wait for all that they send, some layers follow one another in several calls of a model, for every set of
tensors that a recorded run displaces together, and are averaged over its steps, the first one included. Times are those
of the real machine: what was measured, divided by the scale.

With guidance in two parts of the ranks, each part runs a layer of its own branch, and the parts' exchange of outputs,
measured on its own, is added once a step. The slower part, that of the longer text, decides.

A link efficiency e says that links reach e of their nominal rate: waits are e times as long, times divided by less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cocodiff.comm.part import Part
from cocodiff.config import load_machine
from cocodiff.console.options import Option, check_counts
from cocodiff.errors import UserError
from cocodiff.loading.model_shapes import load_shape
from cocodiff.outputs.folder import OutputFolder
from cocodiff.planning.costs import WHOLE, CallKind
from cocodiff.planning.memory import ModelShape
from cocodiff.planning.one_peer import SerialTransport
from cocodiff.processes.emulated import emulated
from cocodiff.topology.axes import Axes, Mesh
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.trace_files import save_traces
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Row, Values
from cocodiff_bench.step_rows import OUTPUTS, Late, Measured, config_of, key_of, measured_kinds, more_words, rows_of
from cocodiff_bench.step_variants import ALL_VARIANTS, CODECS, MORE_VARIANTS, USUAL_VARIANTS, VARIANTS

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from cocodiff_bench.stand_in import Call, StandIn

# CoCoDiff's Figure 11 at 48 MB per rank, one node: oneCCL, and TAPA's two phases. And what nominal links would take,
# one peer at a time and in two phases, by a max-min-fair fluid model.
FIGURE_11_S, NOMINAL_S = (25.5e-3, 0.4e-3 + 6.0e-3), (2.93e-3, 0.663e-3)
FITTED = round(math.exp(statistics.mean(math.log(n / f) for n, f in zip(NOMINAL_S, FIGURE_11_S, strict=True))), 3)


OUTPUT_CHANNELS = 64  # of a token, of all families: 16 latent channels of 2 x 2
OPTIONS = common.with_common_options(
    Option("model", "a name in configs/models: sd3.5, flux.1, flux.2 or qwen-image", required=True),
    Option("size", "sides of the square image in pixels", [1536], type=int, many=True),
    Option("batch", "images in one call", 1, type=int),
    Option("steps", "denoising steps that V-Major's schedule goes over", 50, type=int),
    Option(
        "link_efficiency",
        f"parts of the nominal rate that links reach; {FITTED:g}: CoCoDiff's Figure 11",
        [1.0, FITTED],
        type=float,
        many=True,
    ),
    Option("text_tokens", "of the two branches' prompts; default: the model's longest", [], type=int, many=True),
    Option(
        "variants",
        f"of {', '.join([*VARIANTS, *MORE_VARIANTS])}; {', '.join(CODECS)} behind an exact one is the codec in it, and "
        f"behind that ahead (arrival adaptive) or displaced; by default those without chunks and guidance, and "
        f"split_v_first with int4 and int2",
        many=True,
    ),
    Option("decisions", "for ahead: as of cocodiff plan; default: recorded runs of the embedded model", [], many=True),
    Option("tau", "for ahead: which of the recorded runs; default: that of the settings", type=float),
    Option("predictor", "of the residual codec", "taylor", choices=("last", "taylor", "auto")),
    Option("repeats", "measurements of each variant", 3, type=int),
    Option("transport", "how ranks talk", "gloo", choices=("gloo", "mpi")),
)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "batch", "steps", "repeats", "ranks")
    spelled = {name.replace(" ", "_"): name for name in ALL_VARIANTS}
    values["variants"] = [spelled.get(name.replace(" ", "_"), name) for name in values["variants"] or USUAL_VARIANTS]
    for name in values["variants"]:
        if name not in ALL_VARIANTS:
            known = ", ".join([*VARIANTS, *MORE_VARIANTS])
            raise UserError(
                f"--variants {name!r}: choose from {known} (A_v_first for 'A v_first'), and for the residual codec one "
                f"of those without V-Major with {', '.join(CODECS)} behind (split_v_first_int4), or ahead or displaced "
                f"behind that"
            )
        if ranks is not None and ranks % ALL_VARIANTS[name].parts:
            raise UserError(f"--variants {name!r}: {ranks} ranks have no two parts: start an even number")
    if len(values["text_tokens"]) not in (0, 2) or min(values["text_tokens"], default=0) < 0:
        raise UserError(f"--text_tokens {values['text_tokens']}: give two numbers, one for each branch")
    for efficiency in values["link_efficiency"]:
        if not 0 < efficiency <= 1:
            raise UserError(f"--link_efficiency {efficiency:g}: give a part of the nominal rate, above 0 up to 1")
    shape, machine = load_shape(values["model"]), load_machine(values["machine"])
    for size in values["size"]:
        shape.image_tokens(size)
    if not (machine.device.bf16_tflop_s and machine.device.memory_gb_s):
        raise UserError(
            f"machine {machine.name} does not say how fast its device is (device: bf16_tflop_s, memory_gb_s): use "
            f"cocodiff emulate --machine aurora -- cocodiff bench step --model {values['model']}"
        )
    if not emulated():
        raise UserError("bench step of a model's shape needs links at a known scale: run it inside cocodiff emulate")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    from cocodiff_bench.stand_in import Call

    topology = common.topology_of(values, transport.size)
    shape, scale = load_shape(values["model"]), emulated()["scale"]
    texts = values["text_tokens"] or [shape.text_tokens] * 2
    sharing = {name: Sharing.build(topology, transport, ALL_VARIANTS[name].parts) for name in values["variants"]}
    built = stand_ins(values, sharing)
    together = transport.group(range(transport.size)).barrier
    measured: list[Row] = []
    for size in values["size"]:
        # A part has its own branch's text; where there are no parts, both branches are measured if they differ.
        calls = {
            name: [
                Call.build(shape, of.topology, size, values["batch"], of.transport.rank, tokens, of.parts)
                for tokens in (texts[of.part : of.part + 1] if of.parts > 1 else dict.fromkeys(texts))
            ]
            for name, of in sharing.items()
        }
        for (name, kind), one in built.items():
            one.settle(calls[name], kind)
        steps = {
            key_of(name, kind): partial(one.begin, kind) for (name, kind), one in built.items() if not kind.displaced
        }
        outputs = Outputs(shape, topology, size, values["batch"], transport)
        for efficiency in values["link_efficiency"]:
            dilation = scale * efficiency
            variants: dict[str, Callable[[], Any]] = {
                key_of(name, kind): partial(
                    one.run_behind if kind.displaced else partial(run_all, one), calls[name], kind, dilation
                )
                for (name, kind), one in built.items()
            }
            if any(of.parts > 1 for of in sharing.values()):
                variants[OUTPUTS] = outputs.exchange
            title = f"bench step {size}x{size}, links at {efficiency:g}"
            begin = partial(begin_step, steps)
            seconds = common.measure_in_turns(title, variants, values, transport, barrier=together, prepare=begin)
            last = {key_of(name, kind): one.last_s for (name, kind), one in built.items() if kind.displaced}
            seconds |= {key: of_key[-values["repeats"] :] for key, of_key in last.items()}
            slowest = common.of_slowest_rank(seconds, transport)
            own = {key_of(name, kind): one.record for (name, kind), one in built.items() if kind.displaced}
            records = {key: transport.gather_object(record) for key, record in own.items()}
            computing = {name: statistics.mean(call.layer.total for call in of_name) for name, of_name in calls.items()}
            if transport.rank == 0:
                hidden = {key: Late.of(records[key]) for key in own}
                case = Measured(shape, topology, size, values["batch"], efficiency, texts, dilation, computing, hidden)
                of_case = rows_of(values, case, slowest)
                common.say_rows(of_case, "a step", more_words)
                measured += of_case
    if transport.rank == 0:
        from cocodiff_bench.plots import plot_steps

        pictures: dict[str, Callable[[Any], Any]] = {"step.png": partial(plot_steps, measured)}
        if records:
            pictures["trace.json"] = partial(save_traces, records=records)
        common.publish(output, values, measured, pictures)


@dataclass(frozen=True)
class Sharing:
    """The ranks that share one branch's sequence with this one: all, or a part."""

    topology: Topology
    transport: Any
    part: int
    parts: int

    @classmethod
    def build(cls, topology: Topology, transport: Any, parts: int) -> Sharing:
        if parts == 1:
            return cls(topology, transport, 0, 1)
        axes = Axes.build(topology, guidance=parts)
        ranks = axes.branch(transport.rank)
        part = axes.coordinates(transport.rank).guidance
        return cls(topology.part(ranks), Part(transport, ranks), part, parts)


def stand_ins(values: Values, sharing: Mapping[str, Sharing]) -> dict[tuple[str, CallKind], StandIn]:
    """By variant and kind of calls. The residual codec and displacement have one for each kind: a whole step would undo
    what they know."""
    from cocodiff_bench.stand_in import StandIn

    found: dict[tuple[str, CallKind], StandIn] = {}
    for name in values["variants"]:
        variant, of = ALL_VARIANTS[name], sharing[name]
        over: Any = SerialTransport(of.transport) if name == "flat_serial" else of.transport
        config, mesh = config_of(values, variant), Mesh.build(of.topology)
        for kind in measured_kinds(values, variant):
            known = found.get((name, WHOLE)) if variant.selection == "v_major" else None
            found[name, kind] = known or StandIn(config, mesh, over, Trace(over.rank))
    return found


def begin_step(steps: Mapping[str, Callable[[], None]], key: str) -> None:
    """steps: what begins the next one, by key; the exchange of outputs has none."""
    if key in steps:
        steps[key]()


def run_all(one: StandIn, calls: Sequence[Call], _kind: CallKind, dilation: float) -> None:
    for branch, call in enumerate(calls):
        one.run(call, branch, dilation)


class Outputs:
    """Guidance's two parts send each other the model's output, every rank to that of the same place."""

    def __init__(self, shape: ModelShape, topology: Topology, size: int, batch: int, transport: Any) -> None:
        import torch

        self._sent, self._received = (
            torch.zeros(batch, shape.image_tokens(size), OUTPUT_CHANNELS, dtype=torch.bfloat16) for _ in range(2)
        )
        self._group = None
        if topology.size % 2 == 0:
            pair = sorted(Axes.build(topology, guidance=2).along("guidance", transport.rank))
            self._group = transport.group(pair)

    def exchange(self) -> None:
        assert self._group is not None, "an even number of ranks"
        peer = 1 - self._group.index
        self._group.send_recv([(self._sent, peer)], [(self._received, peer)]).wait()


BENCHMARK = Benchmark(
    "Times a denoising step of a model's shape: real messages on an emulated machine, compute as waits of a roofline.",
    OPTIONS,
    check,
    measure,
)
