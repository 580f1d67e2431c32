"""`cocodiff bench attention`: attention calls of a stand-in model, every exchange in every order in turn.

Communication is real, and so are the tokens: random, of the given shape. What computes is a stand-in: making q, k and v
is a timed wait, because cores that all ranks share have none to spare for hiding anything behind real projections. The
wait is a multiple of T(Vp1), V's first phase, which is measured first (CoCoDiff section III-C, equation 2).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocodiff.comm.launch import detect
from cocodiff.commands.bench_common import (
    Benchmark,
    Values,
    interleave,
    machine_settings,
    meet,
    rows,
    save,
    say_rows,
    with_common_options,
)
from cocodiff.commands.options import Option, check_counts
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.pipelines import torch_dtype
from cocodiff.commands.session import DTYPES
from cocodiff.commands.terminal import progress_bar, say
from cocodiff.commands.trace import say_summary
from cocodiff.config import EXCHANGES, ORDERS, Config, load_machine
from cocodiff.errors import UserError
from cocodiff.topology import Topology
from cocodiff.trace import LINK_CLASSES, Trace, save_traces
from cocodiff.trace_summary import AttentionTimes, first_phase, summarise

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.attention.strategy import LazyQKV, Site

CALIBRATION_CALLS = 9
V_SHARE = 0.1  # T(V) as a part of T(Q,K); the paper's example has 0.1 ms and 1.0 ms
LOCAL_WAIT_S = 0.002
JOINT, IMAGE = (
    "joint",
    "image",
)  # kinds of layer: image and text tokens; image tokens alone, as SD3.5's second attention
LOCAL = ("wait", "real")
OPTIONS = with_common_options(
    Option("exchange", "exchanges to measure", [name for name in EXCHANGES if name != "auto"], many=True),
    Option("order", "orders to measure", list(ORDERS), many=True),
    Option("image_tokens", "image tokens of all ranks", 4096, type=int),
    Option("text_tokens", "text tokens of all ranks", 77, type=int),
    Option("heads", "attention heads of all ranks", 24, type=int),
    Option("head_dim", "size of a head", 64, type=int),
    Option("batch", "sequences in one call", 1, type=int),
    Option("ratio", "T(Q,K): how many times T(Vp1) making q and k takes", 3.0, type=float),
    Option("local", f"attention itself: computed, or a wait of {LOCAL_WAIT_S * 1e3:.0f} ms", "wait", choices=LOCAL),
    Option("dtype", "arithmetic; auto is fp32 on CPU", "auto", choices=DTYPES),
)


@dataclass(frozen=True)
class StandInLayer:
    """One attention layer of a model that is not there: this rank's rows of random q, k and v."""

    site: Site
    q_BLHD: Tensor
    k_BLHD: Tensor
    v_BLHD: Tensor
    image_tokens: int
    text_tokens: int
    heads: int

    def qkv(self, project_qk_s: float) -> LazyQKV:
        """q, k and v after waits for as long as their projections shall take."""
        from cocodiff.attention.strategy import LazyQKV

        def projected(x_BLHD: Tensor, seconds: float) -> Callable[[], Tensor]:
            def project() -> Tensor:
                time.sleep(seconds)
                return x_BLHD

            return project

        q, k = (projected(x_BLHD, project_qk_s / 2) for x_BLHD in (self.q_BLHD, self.k_BLHD))
        v = projected(self.v_BLHD, project_qk_s * V_SHARE)
        return LazyQKV(q, k, v, self.image_tokens, self.text_tokens, self.heads)


class Variant:
    """An exchange in an order, with a trace of its own; `outputs` are those of its last call, by kind of layer."""

    def __init__(self, config: Config, topology: Topology, transport: Any, local: str) -> None:
        from cocodiff.attention.exchange import Exchange
        from cocodiff.attention.ulysses import Ulysses
        from cocodiff.engine import ORDERS, exchange_table
        from cocodiff.kernels import Kernels

        self.trace = Trace(transport.rank)
        self.exchange = Exchange(
            config.exchange, topology, transport, self.trace, exchange_table(config, topology), config.nic_balance,
            Kernels(config.kernels, self.trace.note_kernel),
        )  # fmt: skip
        attention = waiting_attention if local == "wait" else None
        self.strategy = Ulysses(topology, self.exchange, self.trace, ORDERS[config.order], attention)
        self.outputs: dict[str, Tensor] = {}

    def call(self, layers: Sequence[StandInLayer], project_qk_s: float = 0.0) -> None:
        for layer in layers:
            self.outputs[layer.site.kind] = self.strategy.attend(layer.qkv(project_qk_s), layer.site)


def waiting_attention(q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, _mask: Tensor | None) -> Tensor:
    """In attention's place: a wait, and a result that every element of q, k and v has a part in."""
    time.sleep(LOCAL_WAIT_S)
    return q_BSGD + k_BSGD + v_BSGD


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "image_tokens", "heads", "head_dim", "batch", "repeats", "ranks")
    if values["text_tokens"] < 0:
        raise UserError(f"--text_tokens {values['text_tokens']}: give 0 or more")
    if not 0 <= values["ratio"] < float("inf"):
        raise UserError(f"--ratio {values['ratio']}: give 0 or more")
    configs(values)
    if ranks is not None:
        topology_of(values, ranks)


def configs(values: Values) -> dict[str, Config]:
    """The variants' settings: every exchange in every order."""
    shared = machine_settings(values)
    return {f"{e} {o}": Config(exchange=e, order=o, **shared) for e in values["exchange"] for o in values["order"]}


def topology_of(values: Values, ranks: int) -> Topology:
    """Raises UserError where so many ranks do not fit the machine or have no tokens or heads to share."""
    from cocodiff.attention.layout import Layout

    if ranks < 2:
        raise UserError(f"bench attention on {ranks} rank has nothing to exchange: start 2 or more, as with --ranks 12")
    topology = Topology.build(load_machine(values["machine"]), ranks, detect().local_size)
    Layout.build(topology, values["image_tokens"], values["text_tokens"], values["heads"])
    return topology


def import_before_fork(_values: Values) -> None:
    import_module("cocodiff.engine")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Measures T(Vp1), then the variants in turn; a call is one of each kind of layer."""
    if transport.device.type != "cpu":
        raise UserError(
            f"bench attention times waits of the host, which says nothing on {transport.device.type}: use --device cpu"
        )
    topology = topology_of(values, transport.size)
    layers = stand_in_layers(values, topology, transport.rank)

    def variant(config: Config) -> Variant:
        return Variant(config, topology, transport, values["local"])

    wanted = configs(values)
    variants = {name: variant(config) for name, config in wanted.items()}
    in_joint_order = [variants[name] for name, config in wanted.items() if config.order == "joint"]
    reference = in_joint_order[0] if in_joint_order else variant(next(iter(wanted.values())).with_(order="joint"))
    for one in [*variants.values(), *([] if in_joint_order else [reference])]:
        one.call(layers)
    check_same_bits(reference.outputs, {name: one.outputs for name, one in variants.items()}, transport.rank)
    v_phase1_s = v_phase1_seconds(variants, layers[0], transport)
    seconds = timed(variants, layers, values["ratio"] * v_phase1_s, values, transport)
    check_same_bits(reference.outputs, {name: one.outputs for name, one in variants.items()}, transport.rank)
    records = {name: transport.gather_object(one.trace.record()) for name, one in variants.items()}
    if transport.rank == 0:
        waits = f"T(Vp1) {v_phase1_s * 1e3:.2f} ms, T(Q,K) {values['ratio']:g} times that, attention: {values['local']}"
        report(f"{shape_of(values)}, {transport.size} ranks; {waits}", wanted, seconds, records, output, values)
    transport.broadcast_object(None)


def stand_in_layers(values: Values, topology: Topology, rank: int) -> list[StandInLayer]:
    """A layer over image and text tokens and one over image tokens alone, with random numbers of this rank's own."""
    import torch

    from cocodiff.attention.layout import Layout
    from cocodiff.attention.strategy import Site

    random = torch.Generator().manual_seed(rank)
    layers = []
    for kind, text_tokens in ((JOINT, values["text_tokens"]), (IMAGE, 0)):
        tokens = (values["image_tokens"], text_tokens, values["heads"])
        L = Layout.build(topology, *tokens).rows[rank]
        shape = (values["batch"], L, values["heads"], values["head_dim"])
        q, k, v = (
            torch.randn(shape, generator=random).to(
                torch_dtype(values["dtype"] if values["dtype"] != "auto" else "fp32")
            )
            for _ in range(3)
        )
        layers.append(StandInLayer(Site(kind), q, k, v, *tokens))
    return layers


def check_same_bits(reference: Mapping[str, Tensor], outputs: Mapping[str, Mapping[str, Tensor]], rank: int) -> None:
    """Compares every variant's outputs with those of joint order. Raises RuntimeError where a bit differs."""
    import torch

    for name, by_kind in outputs.items():
        for kind, expected in reference.items():
            if not torch.equal(by_kind[kind], expected):
                unlike = int((by_kind[kind] != expected).sum())
                raise RuntimeError(
                    f"rank {rank}: {name} differs from joint order in {unlike} of {expected.numel()} numbers of layer "
                    f"{kind}: exact variants must give the same bits"
                )


def v_phase1_seconds(variants: Mapping[str, Variant], layer: StandInLayer, transport: Any) -> float:
    """T(Vp1) of v travelling alone: the slowest rank's median. Of TAPA where it is measured, as in the paper, so that
    T(Q,K), which belongs to a model, is the same in all variants."""
    variant = next((one for name, one in variants.items() if name.startswith("tapa")), next(iter(variants.values())))
    layout = variant.strategy.layout(layer.qkv(0.0))
    for number in range(CALIBRATION_CALLS + 1):
        meet(transport)
        if number == 1:
            variant.trace.clear()  # the first warms up
        variant.exchange.forward([layer.v_BLHD], layout, "v", layer.site.kind).wait()
    name = first_phase(variant.trace.spans)
    lengths = [span.end_ns - span.start_ns for span in variant.trace.spans if span.name == name]
    medians = transport.gather_object(statistics.median(lengths) if lengths else 0)
    return float(transport.broadcast_object(medians and max(medians))) / 1e9


def timed(
    variants: Mapping[str, Variant], layers: Sequence[StandInLayer], project_qk_s: float, values: Values,
    transport: Any,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds per attention call of every variant; their traces and bytes are of the measured calls alone."""
    import torch

    calls = {name: partial(variant.call, layers, project_qk_s) for name, variant in variants.items()}
    shown = not values["quiet"] and not transport.rank
    with torch.no_grad(), progress_bar("bench attention", (values["repeats"] + 1) * len(calls), shown) as bar:
        turns = partial(interleave, calls, units=len(layers), meet=partial(meet, transport), tick=bar.update)
        turns(1)
        for variant in variants.values():
            variant.trace.clear()
        return turns(values["repeats"])


# Results --------------------------------------------------------------------------------------------------------------


def report(
    case: str, wanted: Mapping[str, Config], seconds: Mapping[str, list[float]],
    records: Mapping[str, list[dict[str, Any]]], output: OutputFolder, values: Values,
) -> None:  # fmt: skip
    """Writes bench.json and trace.json, and says what they hold."""
    names = {(config.exchange, config.order): name for name, config in wanted.items()}
    references = {
        name: {"flat": names.get(("flat", "joint"), ""), "joint": names.get((config.exchange, "joint"), "")}
        for name, config in wanted.items()
    }
    calls = 2 * values["repeats"]
    measured = rows(case, seconds, {name: bytes_of(ranks, calls) for name, ranks in records.items()}, references)
    times = summarise({name: {one["rank"]: one["spans"] for one in ranks} for name, ranks in records.items()})
    for row in measured:
        row["layers"] = {one.layer: seconds_of(one) for one in times if one.mode == row["variant"]}
    folder = output.open()
    save(folder, measured, values)
    save_traces(folder / "trace.json", dict(records))
    output.publish()
    say_rows(measured, "a call")
    say()
    say_summary(times, sum(one["dropped"] for ranks in records.values() for one in ranks))
    say(f"results: {output.final / 'bench.json'}")


def shape_of(values: Values) -> str:
    tokens = f"{values['image_tokens']} + {values['text_tokens']} tokens"
    return f"stand-in attention, {tokens}, {values['heads']} heads of {values['head_dim']}, batch {values['batch']}"


def bytes_of(records: Sequence[Mapping[str, Any]], calls: int) -> dict[str, int]:
    """What all ranks together sent in a mean call, by link class."""
    return {link: sum(one["bytes"].get(("attention", link), 0) for one in records) // calls for link in LINK_CLASSES}


def seconds_of(times: AttentionTimes) -> dict[str, float | None]:
    return {name: value for name, value in times._asdict().items() if name not in ("mode", "layer")}


BENCHMARK = Benchmark(
    "Times attention calls of a stand-in model: real communication, projections that are timed waits.",
    OPTIONS, check, import_before_fork, measure,
)  # fmt: skip
