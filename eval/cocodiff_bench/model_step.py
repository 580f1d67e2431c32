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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocodiff.comm.launch import detect
from cocodiff.commands.emulate.command import emulated
from cocodiff.commands.model_shapes import load_shape
from cocodiff.commands.options import Option, check_counts
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.terminal import progress_bar, say
from cocodiff.config import load_machine
from cocodiff.errors import UserError
from cocodiff.planning.memory import ModelShape
from cocodiff.planning.one_peer import SerialTransport
from cocodiff.planning.roofline import Layer, roofline
from cocodiff.registry import ORDERS, load
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff_bench.common import Benchmark, Values, interleave, rows, save, with_common_options

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.attention.strategy import LazyQKV
    from cocodiff.topology.layout import Segments

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
OPTIONS = with_common_options(
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


def import_before_fork(_values: Values) -> None:
    import_module("cocodiff.engine")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    import torch

    topology = Topology.build(load_machine(values["machine"]), transport.size, detect().local_size)
    shape, scale = load_shape(values["model"]), emulated()["scale"]
    built = {name: Variant(name, topology, transport) for name in values["variants"]}
    together = transport.group(range(transport.size)).barrier
    measured: list[dict[str, Any]] = []
    shown = not values["quiet"] and not transport.rank
    turns = sum(len(FRACTIONS) if v.selective else 1 for v in built.values()) * (values["repeats"] + 1)
    with (
        torch.no_grad(),
        progress_bar("bench step", turns * len(values["size"]) * len(values["link_efficiency"]), shown) as bar,
    ):
        for size in values["size"]:
            call = Call.build(shape, topology, size, values["batch"], transport.rank)
            for efficiency in values["link_efficiency"]:
                dilation = scale * efficiency
                variants: dict[str, Callable[[], Any]] = {
                    f"{name}@{fraction}": partial(variant.run, call, fraction, dilation)
                    for name, variant in built.items()
                    for fraction in (FRACTIONS if variant.selective else FRACTIONS[:1])
                }
                interleave(variants, 1, 1, together, bar.update)
                of_ranks = transport.gather_object(interleave(variants, values["repeats"], 1, together, bar.update))
                if transport.rank == 0:
                    measured += rows_of(values, shape, topology, call, efficiency, dilation, of_ranks)
    if transport.rank == 0:
        report(values, output, measured)
    transport.broadcast_object(None)


# One layer ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One rank's part of an attention layer: tensors of full size and how long its device would compute."""

    layer: Layer
    x_BLHD: Tensor
    segments: Segments
    heads: int

    @classmethod
    def build(cls, shape: ModelShape, topology: Topology, size: int, batch: int, rank: int) -> Call:
        import torch

        from cocodiff.topology.layout import Layout

        segments = shape.segments(size)
        layout = Layout.build(topology, segments, shape.heads)
        B = batch * shape.rows_per_image
        layer = roofline(shape, topology, sum(layout.rows), B, rank, layout)
        x_BLHD = torch.zeros(B, layout.rows[rank], shape.heads, shape.head_dim, dtype=torch.bfloat16)
        return cls(layer, x_BLHD, segments, shape.heads)

    def qkv(self, dilation: float) -> LazyQKV:
        from cocodiff.attention.strategy import LazyQKV

        def waited(seconds: float) -> Callable[[], Tensor]:
            def project() -> Tensor:
                time.sleep(seconds * dilation)
                return self.x_BLHD

            return project

        qk = waited(self.layer.project_qk / 2)
        return LazyQKV(qk, qk, waited(self.layer.project_v), self.segments, self.heads)


class Variant:
    """An exchange in an order, of all tokens or of some: the strategies of the engine over stand-in layers."""

    def __init__(self, name: str, topology: Topology, transport: Any) -> None:
        from cocodiff.attention.ulysses import Ulysses
        from cocodiff.wire.exchange import Exchange
        from cocodiff_bench.stand_in import SomeTokens, WaitingAttention

        exchange, order, selection = VARIANTS[name]
        self.selective = selection == "v_major"
        trace = Trace(transport.rank)
        over: Any = SerialTransport(transport) if name == "flat_serial" else transport
        self._local = WaitingAttention()
        self._coding = SomeTokens(transport, self._local)
        ours = Exchange(exchange, topology, over, trace)
        self._strategy = Ulysses(topology, ours, trace, load(ORDERS, order), self._coding, self._local)

    def run(self, call: Call, fraction: float, dilation: float) -> None:
        from cocodiff.attention.strategy import Site

        self._coding.fraction = fraction if self.selective else 0.0
        self._coding.score_s, self._local.seconds = call.layer.score * dilation, call.layer.attention * dilation
        self._strategy.attend(call.qkv(dilation), Site("layer"))
        time.sleep(call.layer.rest * dilation)


# Results --------------------------------------------------------------------------------------------------------------


def stable_fractions(steps: int) -> list[float]:
    """Of every step of the paper's schedule: linear, a tenth of the steps warm, every tenth step full."""
    from cocodiff.attention.v_major.selection import Schedule

    schedule = Schedule("linear", 0.0, (), 0.0, None, 10)
    return [0.0 if schedule.is_full(t, steps) else schedule.stable_fraction(t, steps) or 0.0 for t in range(steps)]


def over_schedule(of_fraction: Mapping[float, float], steps: int) -> float:
    """The mean over all steps; between measured fractions, straight lines."""

    def at(fraction: float) -> float:
        upper = next(f for f in FRACTIONS if f >= fraction)
        lower = max(f for f in FRACTIONS if f <= fraction)
        part = (fraction - lower) / (upper - lower) if upper > lower else 0.0
        return of_fraction[lower] + part * (of_fraction[upper] - of_fraction[lower])

    return statistics.mean(at(fraction) for fraction in stable_fractions(steps))


def rows_of(
    values: Values,
    shape: ModelShape,
    topology: Topology,
    call: Call,
    efficiency: float,
    dilation: float,
    of_ranks: Sequence[Mapping[str, list[float]]],
) -> list[dict[str, Any]]:
    """Seconds of a step on the real machine; a measurement is that of its slowest rank."""
    layers = (shape.joint_layers + shape.parallel_layers) * shape.branches
    seconds: dict[str, list[float]] = {}
    slowest = {key: [max(turn) for turn in zip(*(one[key] for one in of_ranks), strict=True)] for key in of_ranks[0]}
    for name in values["variants"]:
        turns = zip(*(slowest[key] for key in slowest if key.startswith(f"{name}@")), strict=True)
        seconds[name] = [
            over_schedule(dict(zip(FRACTIONS, turn, strict=False)), values["steps"]) * layers / dilation
            if len(turn) > 1
            else turn[0] * layers / dilation
            for turn in turns
        ]
    size = round(call.segments[0].tokens ** 0.5) * shape.pixels_per_token
    case = (
        f"{shape.name} {size}x{size} batch {values['batch']}, {topology.size} ranks on {topology.nodes} node(s), "
        f"link efficiency {efficiency:g}"
    )
    found = rows(case, seconds, {}, {name: {"flat_serial": "flat_serial", "flat": "flat"} for name in seconds})
    for row in found:
        row["compute_s"] = call.layer.total * layers
        row["communication_share"] = 1 - row["compute_s"] / row["median_s"]
    say(case)
    for row in found:
        ups = "  ".join(
            f"{1 / row[k]:.2f}x over {k.removeprefix('ratio_vs_')}"
            for k in ("ratio_vs_flat_serial", "ratio_vs_flat")
            if row[k]
        )
        spread = f"p10 {row['p10_s'] * 1e3:.1f}, p90 {row['p90_s'] * 1e3:.1f}, n {row['n']}"
        say(
            f"  {row['variant']:<14} {row['median_s'] * 1e3:9.1f} ms a step ({spread})  "
            f"communication {row['communication_share']:6.1%}  {ups}"
        )
    return found


def report(values: Values, output: OutputFolder, measured: list[dict[str, Any]]) -> None:
    from cocodiff_bench.plots import plot_steps

    folder = output.open()
    save(folder, measured, values)
    plot_steps(measured, folder / "step.png")
    output.publish()
    say(f"results: {output.final / 'bench.json'}, {output.final / 'step.png'}")


BENCHMARK = Benchmark(
    "Times a denoising step of a model's shape: real messages on an emulated machine, compute as waits of a roofline.",
    OPTIONS,
    check,
    import_before_fork,
    measure,
)
