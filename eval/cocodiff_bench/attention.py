"""`cocodiff bench attention`: attention calls of a stand-in model, every exchange in every order in turn.

Communication is real, and so are the tokens: random, of the given shape. What computes is a stand-in: making q, k and v
is a timed wait, because cores that all ranks share have none to spare for hiding anything behind real projections. The
wait is a multiple of T(Vp1), V's first phase, which is measured first (CoCoDiff section III-C, equation 2).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

from cocodiff.comm.launch import detect
from cocodiff.commands.options import Option, check_counts
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.pipelines import torch_dtype
from cocodiff.commands.session import DTYPES
from cocodiff.commands.terminal import progress_bar, say
from cocodiff.commands.trace import say_summary
from cocodiff.config import Config, load_machine
from cocodiff.errors import UserError
from cocodiff.models.tokens import image_and_text
from cocodiff.registry import EXCHANGES, ORDERS, load
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES, Trace, save_traces
from cocodiff.trace_summary import AttentionTimes, first_phase, summarise
from cocodiff_bench.common import (
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
from cocodiff_bench.waiting import LOCAL_WAIT_S, V_SHARE, StandInLayer, WaitingAttention

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor


CALIBRATION_CALLS = 9
JOINT, IMAGE = (
    "joint",
    "image",
)  # kinds of layer: image and text tokens; image tokens alone, as SD3.5's second attention
LOCAL = ("wait", "real")
OPTIONS = with_common_options(
    Option("exchange", "exchanges to measure", list(EXCHANGES), many=True),
    Option("order", "orders to measure", list(ORDERS), many=True),
    Option("chunks", "chunks to measure each of them in: 1 for none, or auto", ["1"], many=True),
    Option("image_tokens", "image tokens of all ranks", 4096, type=int),
    Option("text_tokens", "text tokens of all ranks", 77, type=int),
    Option("heads", "attention heads of all ranks", 24, type=int),
    Option("head_dim", "size of a head", 64, type=int),
    Option("batch", "sequences in one call", 1, type=int),
    Option("ratio", "T(Q,K): how many times T(Vp1) making q and k takes", 3.0, type=float),
    Option("local", "attention itself: computed, or a wait", "wait", choices=LOCAL),
    Option(
        "balance",
        f"that wait: so many times what q, k, v and o travel; 0 is {LOCAL_WAIT_S * 1e3:.0f} ms",
        0.0,
        type=float,
    ),
    Option("dtype", "arithmetic; auto is fp32 on CPU", "auto", choices=DTYPES),
)


class Variant:
    """An exchange in an order and in chunks, with a trace of its own; `outputs` are those of its last call, by kind of
    layer."""

    def __init__(self, config: Config, topology: Topology, transport: Any, waiting: WaitingAttention | None) -> None:
        from cocodiff.assemble import chunking, exchange_table
        from cocodiff.attention.ulysses import Ulysses
        from cocodiff.kernels import Kernels
        from cocodiff.wire.exchange import Exchange

        self.trace = Trace(transport.rank)
        self.exchange = Exchange(
            config.exchange,
            topology,
            transport,
            self.trace,
            exchange_table(config, topology),
            config.nic_balance,
            Kernels(config.kernels, self.trace.note_kernel),
            chunking(config, topology),
        )
        local: Any = waiting
        self.strategy = Ulysses(topology, self.exchange, self.trace, load(ORDERS, config.order), local=local)
        self.outputs: dict[str, Tensor] = {}
        self._waiting = waiting

    def call(self, layers: Sequence[StandInLayer], project_qk_s: float = 0.0) -> None:
        for layer in layers:
            if self._waiting is not None:
                self._waiting.tokens = sum(segment.tokens for segment in layer.segments)
            self.outputs[layer.site.kind] = self.strategy.attend(layer.qkv(project_qk_s), layer.site)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "image_tokens", "heads", "head_dim", "batch", "repeats", "ranks")
    if values["text_tokens"] < 0:
        raise UserError(f"--text_tokens {values['text_tokens']}: give 0 or more")
    for name in ("ratio", "balance"):
        if not 0 <= values[name] < float("inf"):
            raise UserError(f"--{name} {values[name]}: give 0 or more")
    configs(values)
    if ranks is not None:
        topology_of(values, ranks)


def configs(values: Values) -> dict[str, Config]:
    """The variants' settings: every exchange in every order, in every number of chunks."""
    shared, wanted = machine_settings(values), {}
    for exchange, order, chunks in product(values["exchange"], values["order"], values["chunks"]):
        config = Config(exchange=exchange, order=order, chunks=chunks, **shared)
        wanted[f"{exchange} {order}" + (f" {chunks} chunks" if config.chunks != 1 else "")] = config
    return wanted


def topology_of(values: Values, ranks: int) -> Topology:
    """Raises UserError where so many ranks do not fit the machine or have no tokens or heads to share."""
    from cocodiff.topology.layout import Layout

    if ranks < 2:
        raise UserError(f"bench attention on {ranks} rank has nothing to exchange: start 2 or more, as with --ranks 12")
    topology = Topology.build(load_machine(values["machine"]), ranks, detect().local_size)
    Layout.build(topology, image_and_text(values["image_tokens"], values["text_tokens"]), values["heads"])
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
    waiting = WaitingAttention() if values["local"] == "wait" else None

    def variant(config: Config) -> Variant:
        return Variant(config, topology, transport, waiting)

    wanted = configs(values)
    variants = {name: variant(config) for name, config in wanted.items()}
    plain = [variants[name] for name, config in wanted.items() if config.order == "joint" and config.chunks == 1]
    reference = plain[0] if plain else variant(next(iter(wanted.values())).with_(order="joint", chunks=1))
    for one in [*variants.values(), *([] if plain else [reference])]:
        one.call(layers)
    check_outputs(reference, variants, wanted, transport.rank)
    v_phase1_s = v_phase1_seconds(variants, layers[0], transport)
    if waiting is not None and values["balance"]:
        waiting.seconds = values["balance"] * exchange_seconds(reference, layers[0], transport)
    seconds = timed(variants, layers, values["ratio"] * v_phase1_s, values, transport)
    check_outputs(reference, variants, wanted, transport.rank)
    records = {name: transport.gather_object(one.trace.record()) for name, one in variants.items()}
    if transport.rank == 0:
        waits = f"T(Vp1) {v_phase1_s * 1e3:.2f} ms, T(Q,K) {values['ratio']:g} times that, attention: {values['local']}"
        compute_s = values["ratio"] * v_phase1_s * (1 + V_SHARE)
        if waiting is not None:
            waits += f" of {waiting.seconds * 1e3:.2f} ms"
            compute_s += waiting.seconds
        case = f"{shape_of(values)}, {transport.size} ranks; {waits}"
        report(case, wanted, seconds, None if waiting is None else compute_s, records, output, values)
    transport.broadcast_object(None)


def stand_in_layers(values: Values, topology: Topology, rank: int) -> list[StandInLayer]:
    """A layer over image and text tokens, if there are any, and one over image tokens alone: random numbers of this
    rank's own."""
    import torch

    from cocodiff.attention.strategy import Site
    from cocodiff.topology.layout import Layout

    random = torch.Generator().manual_seed(rank)
    layers = []
    for kind, text_tokens in {(JOINT if values["text_tokens"] else IMAGE): values["text_tokens"], IMAGE: 0}.items():
        call = (image_and_text(values["image_tokens"], text_tokens), values["heads"])
        L = Layout.build(topology, *call).rows[rank]
        shape = (values["batch"], L, values["heads"], values["head_dim"])
        q, k, v = (
            torch.randn(shape, generator=random).to(
                torch_dtype(values["dtype"] if values["dtype"] != "auto" else "fp32")
            )
            for _ in range(3)
        )
        layers.append(StandInLayer(Site(kind), q, k, v, *call))
    return layers


def check_outputs(reference: Variant, variants: Mapping[str, Variant], wanted: Mapping[str, Config], rank: int) -> None:
    """Raises RuntimeError where a variant's outputs are not those of joint order without chunks: the same bits, or with
    chunks, which sum in another order, the same numbers."""
    outputs = {name: one.outputs for name, one in variants.items()}
    whole = {name: of for name, of in outputs.items() if wanted[name].chunks == 1}
    check_same_bits(reference.outputs, whole, rank)
    check_close(reference.outputs, {name: of for name, of in outputs.items() if name not in whole}, rank)


def check_close(reference: Mapping[str, Tensor], outputs: Mapping[str, Mapping[str, Tensor]], rank: int) -> None:
    """Raises RuntimeError where a number is off by more than rounding explains."""
    import torch

    for name, by_kind in outputs.items():
        for kind, expected in reference.items():
            off = float((by_kind[kind] - expected).abs().max())
            allowed = 8 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
            if not off <= allowed:
                raise RuntimeError(
                    f"rank {rank}: {name} differs by {off:.2e} in layer {kind}, {allowed:.2e} is rounding"
                )


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
        variant.exchange.transfer(layout, layer=layer.site.kind).send(v=layer.v_BLHD).wait()
    name = first_phase(variant.trace.spans)
    lengths = [span.end_ns - span.start_ns for span in variant.trace.spans if span.name == name]
    medians = transport.gather_object(statistics.median(lengths) if lengths else 0)
    return float(transport.broadcast_object(medians and max(medians))) / 1e9


def exchange_seconds(variant: Variant, layer: StandInLayer, transport: Any) -> float:
    """How long q, k and v travel together, and o back: the slowest rank's median."""
    layout = variant.strategy.layout(layer.qkv(0.0))
    lengths = []
    for _ in range(CALIBRATION_CALLS // 3 + 1):
        meet(transport)
        started = time.perf_counter()
        transfer = variant.exchange.transfer(layout, layer=layer.site.kind)
        sent = transfer.send(q=layer.q_BLHD, k=layer.k_BLHD, v=layer.v_BLHD, wait_next=True)
        transfer.back(sent.wait()[0])
        lengths.append(time.perf_counter() - started)
    medians = transport.gather_object(statistics.median(lengths[1:]))
    return float(transport.broadcast_object(medians and max(medians)))


def timed(
    variants: Mapping[str, Variant], layers: Sequence[StandInLayer], project_qk_s: float, values: Values, transport: Any
) -> dict[str, list[float]]:
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
    case: str,
    wanted: Mapping[str, Config],
    seconds: Mapping[str, list[float]],
    compute_s: float | None,
    records: Mapping[str, list[dict[str, Any]]],
    output: OutputFolder,
    values: Values,
) -> None:
    """Writes bench.json and trace.json, and says what they hold. compute_s: of a call's waits, where all compute is."""
    names = {(config.exchange, config.order, config.chunks): name for name, config in wanted.items()}
    references = {
        name: {
            "flat": names.get(("flat", "joint", 1), ""),
            "joint": names.get((config.exchange, "joint", 1), ""),
            "whole": names.get((config.exchange, config.order, 1), ""),
        }
        for name, config in wanted.items()
    }
    calls = (2 if values["text_tokens"] else 1) * values["repeats"]
    measured = rows(case, seconds, {name: bytes_of(ranks, calls) for name, ranks in records.items()}, references)
    times = summarise({name: {one["rank"]: one["spans"] for one in ranks} for name, ranks in records.items()})
    for row in measured:
        row["hidden_of_whole"] = hidden_share(seconds, row["variant"], references[row["variant"]]["whole"], compute_s)
        row["layers"] = {one.layer: seconds_of(one) for one in times if one.mode == row["variant"]}
    folder = output.open()
    save(folder, measured, values)
    save_traces(folder / "trace.json", dict(records))
    output.publish()
    say_rows(measured, "a call")
    for row in measured:
        if row["hidden_of_whole"] is not None and row["variant"] != references[row["variant"]]["whole"]:
            say(f"  {row['variant']}: hides {row['hidden_of_whole']:.1%} of what is exposed without chunks")
    say()
    say_summary(times, sum(one["dropped"] for ranks in records.values() for one in ranks))
    say(f"results: {output.final / 'bench.json'}")


def hidden_share(seconds: Mapping[str, list[float]], name: str, whole: str, compute_s: float | None) -> float | None:
    """What chunks hide of the time by which a call without them is longer than its compute: median over rounds."""
    if compute_s is None or whole not in seconds:
        return None
    pairs = zip(seconds[name], seconds[whole], strict=True)
    return statistics.median((alone - ours) / (alone - compute_s) for ours, alone in pairs)


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
    OPTIONS,
    check,
    import_before_fork,
    measure,
)
