"""`cocodiff bench step --model NAME`: a denoising step of a large model's shape, by every exchange in turn.

Messages are real and of full size; what computes is a wait, as long as a roofline of the machine file's device says,
drawn out like the links of the emulated machine (`cocodiff emulate --scale`). One layer is measured, a step is all of
them in both branches; V-Major is measured at three fractions of stable tokens and averaged over its schedule. Times
are those of the real machine: what was measured, divided by the scale.

A link efficiency e says that links reach e of their nominal rate: waits are e times as long, times divided by less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cocodiff.commands.emulate.command import emulated
from cocodiff.commands.model_shapes import load_shape
from cocodiff.commands.options import Option, check_counts
from cocodiff.commands.outputs import OutputFolder
from cocodiff.config import load_machine
from cocodiff.errors import UserError
from cocodiff.models.tokens import IMAGE
from cocodiff.planning.memory import ModelShape
from cocodiff.planning.one_peer import SerialTransport
from cocodiff.planning.roofline import Layer, roofline
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Row, Values

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.attention.strategy import LazyQKV

FRACTIONS = (0.0, 0.5, 1.0)  # of stable tokens, at which V-Major is measured
# CoCoDiff's Figure 11 at 48 MB per rank, one node: oneCCL, and TAPA's two phases. And what nominal links would take,
# one peer at a time and in two phases, by a max-min-fair fluid model.
FIGURE_11_S, NOMINAL_S = (25.5e-3, 0.4e-3 + 6.0e-3), (2.93e-3, 0.663e-3)
FITTED = round(math.exp(statistics.mean(math.log(n / f) for n, f in zip(NOMINAL_S, FIGURE_11_S, strict=True))), 3)
VARIANTS = {  # name -> exchange, order, selection
    "flat_serial": ("flat", "joint", "full"),
    "flat": ("flat", "joint", "full"),
    "tapa": ("tapa", "joint", "full"),
    "tapa v_first": ("tapa", "v_first", "full"),
    "cocodiff": ("tapa", "v_first", "v_major"),
    "split": ("split", "joint", "full"),
    "split v_first": ("split", "v_first", "full"),
    "split v_major": ("split", "v_first", "v_major"),
}
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
    Option("variants", f"of {', '.join(VARIANTS)}", list(VARIANTS), many=True),
    Option("repeats", "measurements of each variant", 3, type=int),
    Option("transport", "how ranks talk", "gloo", choices=("gloo", "mpi")),
)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "batch", "steps", "repeats", "ranks")
    values["variants"] = [name.replace("_v_", " v_") for name in values["variants"]]
    for name in values["variants"]:
        if name not in VARIANTS:
            raise UserError(f"--variants {name!r}: choose from {', '.join(VARIANTS)} (A_v_first for 'A v_first')")
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
    from cocodiff_bench.stand_in import StandIn

    topology = common.topology_of(values, transport.size)
    shape, scale = load_shape(values["model"]), emulated()["scale"]
    mesh = Mesh.build(topology)
    built: dict[str, StandIn] = {}
    for name in values["variants"]:
        exchange, order, selection = VARIANTS[name]
        over: Any = SerialTransport(transport) if name == "flat_serial" else transport
        config = common.engine_config(values, exchange=exchange, order=order, selection=selection)
        built[name] = StandIn(config, mesh, over, Trace(transport.rank))
    together = transport.group(range(transport.size)).barrier
    measured: list[Row] = []
    for size in values["size"]:
        call = Call.build(shape, topology, size, values["batch"], transport.rank)
        for efficiency in values["link_efficiency"]:
            dilation = scale * efficiency
            variants: dict[str, Callable[[], Any]] = {
                f"{name}@{fraction}": partial(stand_in.run, call, fraction, dilation)
                for name, stand_in in built.items()
                for fraction in (FRACTIONS if stand_in.selective else FRACTIONS[:1])
            }
            title = f"bench step {size}x{size}, links at {efficiency:g}"
            seconds = common.measure_in_turns(title, variants, values, transport, barrier=together)
            slowest = common.of_slowest_rank(seconds, transport)
            if transport.rank == 0:
                of_case = rows_of(values, shape, topology, call, efficiency, dilation, slowest)
                common.say_rows(of_case, "a step", more_words)
                measured += of_case
    if transport.rank == 0:
        from cocodiff_bench.plots import plot_steps

        common.publish(output, values, measured, {"step.png": partial(plot_steps, measured)})


# One layer ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One rank's part of an attention layer: tensors of full size and how long its device would compute."""

    layer: Layer
    layout: Layout
    x_BLHD: Tensor

    @classmethod
    def build(cls, shape: ModelShape, topology: Topology, size: int, batch: int, rank: int) -> Call:
        import torch

        layout = Layout.build(topology, shape.segments(size), shape.heads)
        B = batch * shape.rows_per_image
        layer = roofline(shape, topology, sum(layout.rows), B, rank, layout)
        x_BLHD = torch.zeros(B, layout.rows[rank], shape.heads, shape.head_dim, dtype=torch.bfloat16)
        return cls(layer, layout, x_BLHD)

    def qkv(self, dilation: float) -> LazyQKV:
        from cocodiff.attention.strategy import LazyQKV
        from cocodiff_bench.waiting import after

        qk = after(self.layer.project_qk / 2 * dilation, self.x_BLHD)
        v = after(self.layer.project_v * dilation, self.x_BLHD)
        return LazyQKV(qk, qk, v, tuple(part.segment for part in self.layout.parts), sum(self.layout.heads))


# Results --------------------------------------------------------------------------------------------------------------


def stable_fractions(steps: int) -> list[float]:
    """Of every step of the paper's schedule: linear, a tenth of the steps warm, every tenth step full."""
    from cocodiff.attention.v_major.selection import Schedule

    schedule = Schedule("linear", sync_interval=10)
    return [0.0 if schedule.is_full(t, steps) else schedule.stable_fraction(t, steps) or 0.0 for t in range(steps)]


def over_schedule(of_fraction: Mapping[float, float], steps: int) -> float:
    """The mean over all steps; between measured fractions, straight lines."""
    from cocodiff.planning.layers import at_fraction

    measured = sorted(of_fraction.items())
    return statistics.mean(at_fraction(measured, fraction) for fraction in stable_fractions(steps))


def rows_of(
    values: Values,
    shape: ModelShape,
    topology: Topology,
    call: Call,
    efficiency: float,
    dilation: float,
    slowest: Mapping[str, list[float]],
) -> list[Row]:
    """Seconds of a step on the real machine. slowest: of one layer, by variant and fraction."""
    layers = (shape.joint_layers + shape.parallel_layers) * shape.branches
    seconds: dict[str, list[float]] = {}
    for name in values["variants"]:
        turns = zip(*(slowest[key] for key in slowest if key.startswith(f"{name}@")), strict=True)
        steps = (
            over_schedule(dict(zip(FRACTIONS, turn, strict=False)), values["steps"]) if len(turn) > 1 else turn[0]
            for turn in turns
        )
        seconds[name] = [of_layer * layers / dilation for of_layer in steps]
    size = (
        round(next(part.segment.tokens for part in call.layout.parts if part.segment.name == IMAGE) ** 0.5)
        * shape.pixels_per_token
    )
    case = (
        f"{shape.name} {size}x{size} batch {values['batch']}, {topology.size} ranks on {topology.nodes} node(s), "
        f"link efficiency {efficiency:g}"
    )
    found = common.rows(case, seconds, {}, common.compared_with(seconds, "flat_serial", "flat"))
    for row in found:
        row["compute_s"] = call.layer.total * layers
        row["communication_share"] = 1 - row["compute_s"] / row["median_s"]
    return found


def more_words(row: Row) -> list[str]:
    ratios = {name: row[f"ratio_vs_{name}"] for name in ("flat_serial", "flat")}
    faster = [f"{1 / ratio:.2f}x over {name}" for name, ratio in ratios.items() if ratio]
    return [f"communication {row['communication_share']:.1%}", *faster]


BENCHMARK = Benchmark(
    "Times a denoising step of a model's shape: real messages on an emulated machine, compute as waits of a roofline.",
    OPTIONS,
    check,
    measure,
)
