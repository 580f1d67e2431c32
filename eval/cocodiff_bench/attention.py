"""`cocodiff bench attention`: attention calls of a stand-in model, every exchange in every order in turn.

Communication is real, and so are the tokens: random, of the given shape. Making q, k and v is a timed wait, because
cores that all ranks share have none to spare for hiding anything behind real projections. The wait is a multiple of
T(Vp1), V's first phase, which is measured first (CoCoDiff section III-C, equation 2).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from cocodiff_eval.harness.session import DTYPES

from cocodiff.comm.trace import Trace, save_traces
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology
from cocodiff.config.registry import EXCHANGES, ORDERS
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import Option, check_counts
from cocodiff.jobs.pipelines import torch_dtype
from cocodiff.jobs.terminal import say
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Row, Values, meet
from cocodiff_bench.hidden import first_phase, summarise

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.attention.strategy import LayerKey, LazyQKV, Strategy
    from cocodiff_bench.stand_in import WaitingAttention

CALIBRATION_CALLS = 9
V_SHARE = 0.1  # T(V) as a part of T(Q,K); the paper's example has 0.1 ms and 1.0 ms
LOCAL_WAIT_S = 0.002
# Kinds of layer: image and text tokens; image tokens alone, as SD3.5's second attention.
JOINT, IMAGE = "joint", "image"
LOCAL = ("wait", "real")
OPTIONS = common.with_common_options(
    Option("exchange", "exchanges to measure", [name for name in EXCHANGES if name != "auto"], many=True),
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


@dataclass(frozen=True)
class StandInLayer:
    """One attention layer of a model that is not there: random q, k and v of this rank's rows. pairs: of a query and a
    key for this rank's heads."""

    layer_key: LayerKey
    layout: Layout
    pairs: int
    qkv_BLHD: tuple[Tensor, Tensor, Tensor]

    def qkv(self, project_qk_s: float) -> LazyQKV:
        """q, k and v after waits for as long as their projections shall take."""
        from cocodiff.attention.strategy import LazyQKV
        from cocodiff_bench.stand_in import after

        waits = (project_qk_s / 2, project_qk_s / 2, project_qk_s * V_SHARE)
        q, k, v = (after(seconds, x_BLHD) for seconds, x_BLHD in zip(waits, self.qkv_BLHD, strict=True))
        return LazyQKV(q, k, v, tuple(part.segment for part in self.layout.parts), sum(self.layout.heads))


@dataclass(eq=False)
class Variant:
    """An exchange in an order and in chunks, with a trace of its own. outputs: of its last call, by kind of layer."""

    config: Config
    trace: Trace
    strategy: Strategy
    attention: WaitingAttention
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def call(self, layers: Sequence[StandInLayer], project_qk_s: float = 0.0) -> None:
        for layer in layers:
            self.attention.pairs = layer.pairs
            self.outputs[layer.layer_key.kind] = self.strategy.attend(layer.qkv(project_qk_s), layer.layer_key)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "image_tokens", "heads", "head_dim", "batch", "repeats", "ranks")
    common.check_not_negative(values, "text_tokens", "ratio", "balance")
    configs(values)
    if ranks is not None:
        topology_of(values, ranks)


def configs(values: Values) -> dict[str, Config]:
    """The variants' settings: every exchange in every order, in every number of chunks."""
    wanted = {}
    for exchange, order, chunks in product(values["exchange"], values["order"], values["chunks"]):
        config = common.engine_config(values, exchange=exchange, order=order, chunks=chunks)
        wanted[f"{exchange} {order}" + (f" {chunks} chunks" if config.chunks != 1 else "")] = config
    return wanted


def topology_of(values: Values, ranks: int) -> Topology:
    """Raises UserError where so many ranks do not fit the machine or have no tokens or heads to share."""
    if ranks < 2:
        raise UserError(f"bench attention on {ranks} rank has nothing to exchange: start 2 or more, as with --ranks 12")
    topology = common.topology_of(values, ranks)
    Layout.build(topology, image_and_text(values["image_tokens"], values["text_tokens"]), values["heads"])
    return topology


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Measures T(Vp1), then the variants in turn; a call is one of each kind of layer."""
    if transport.device.type != "cpu":
        raise UserError(
            f"bench attention times waits of the host, which says nothing on {transport.device.type}: use --device cpu"
        )
    topology, wanted = topology_of(values, transport.size), configs(values)
    layers = stand_in_layers(values, topology, transport.rank)
    variants = {name: make_variant(config, topology, transport, values) for name, config in wanted.items()}
    plain = (one for one in variants.values() if one.config.order == "joint" and one.config.chunks == 1)
    reference = next(plain, None) or make_variant(
        next(iter(wanted.values())).with_(order="joint", chunks=1), topology, transport, values
    )
    for one in dict.fromkeys([*variants.values(), reference]):
        one.call(layers)
    check_outputs(reference, variants, transport.rank)
    # T(Q,K) belongs to a model, so it is the same in all variants: by T(Vp1) of TAPA, as in the paper, where that is
    # measured.
    tapa = next((config for config in wanted.values() if config.exchange == "tapa"), next(iter(wanted.values())))
    v_phase1_s = v_phase1_seconds(tapa, topology, layers[0], transport)
    wait_s = None if values["local"] == "real" else LOCAL_WAIT_S
    if wait_s is not None and values["balance"]:
        wait_s = values["balance"] * exchange_seconds(reference.config, topology, layers[0], transport)
    for one in variants.values():
        one.attention.seconds = wait_s
    project_qk_s, traces = values["ratio"] * v_phase1_s, {name: one.trace for name, one in variants.items()}
    seconds = common.measure_in_turns(
        "bench attention",
        {name: partial(one.call, layers, project_qk_s) for name, one in variants.items()},
        values,
        transport,
        units=len(layers),
        traces=traces.values(),
    )
    check_outputs(reference, variants, transport.rank)
    sent = common.bytes_of_call(traces, len(layers) * values["repeats"], transport)
    records = {name: transport.gather_object(trace.record()) for name, trace in traces.items()}
    if transport.rank == 0:
        waits = f"T(Vp1) {v_phase1_s * 1e3:.2f} ms, T(Q,K) {values['ratio']:g} times that, attention: {values['local']}"
        waits += f" of {wait_s * 1e3:.2f} ms" if wait_s is not None else ""
        compute_s = None if wait_s is None else project_qk_s * (1 + V_SHARE) + wait_s
        case = f"{shape_of(values)}, {transport.size} ranks; {waits}"
        report(case, wanted, seconds, sent, compute_s, records, output, values)


def make_variant(config: Config, topology: Topology, transport: Any, values: Values) -> Variant:
    from cocodiff.engine.assemble import build_strategy
    from cocodiff.kernels import Kernels
    from cocodiff.topology.axes import Mesh
    from cocodiff_bench.stand_in import WaitingAttention

    trace, attention = Trace(transport.rank), WaitingAttention()
    attention.seconds = None if values["local"] == "real" else 0.0
    kernels = Kernels(config.kernels, trace.note_kernel)
    strategy = build_strategy(config, Mesh.build(topology), transport, trace, kernels, attention)
    return Variant(config, trace, strategy, attention)


def stand_in_layers(values: Values, topology: Topology, rank: int) -> list[StandInLayer]:
    """A layer over image and text tokens, if there are any, and one over image tokens alone: random numbers of this
    rank's own."""
    import torch

    from cocodiff.attention.strategy import LayerKey

    random = torch.Generator().manual_seed(rank)
    dtype = torch_dtype(values["dtype"] if values["dtype"] != "auto" else "fp32")
    layers = []
    for kind, text_tokens in {(JOINT if values["text_tokens"] else IMAGE): values["text_tokens"], IMAGE: 0}.items():
        layout = Layout.build(topology, image_and_text(values["image_tokens"], text_tokens), values["heads"])
        shape = (values["batch"], layout.rows[rank], values["heads"], values["head_dim"])
        q, k, v = (torch.randn(shape, generator=random).to(dtype) for _ in range(3))
        layers.append(StandInLayer(LayerKey(kind), layout, sum(layout.rows) ** 2 * layout.heads[rank], (q, k, v)))
    return layers


def check_outputs(reference: Variant, variants: Mapping[str, Variant], rank: int) -> None:
    """Raises RuntimeError where a variant's outputs are not those of joint order without chunks: the same bits, or with
    chunks, which sum in another order, the same numbers."""
    for name, one in variants.items():
        check = check_same_bits if one.config.chunks == 1 else check_close
        for kind, expected in reference.outputs.items():
            check(f"rank {rank}: {name}", kind, expected, one.outputs[kind])


def check_close(whose: str, kind: str, expected: Tensor, output: Tensor) -> None:
    """Raises RuntimeError where a number is off by more than rounding explains."""
    import torch

    off, allowed = float((output - expected).abs().max()), 8 * torch.finfo(expected.dtype).eps
    allowed *= float(expected.abs().max())
    if not off <= allowed:
        raise RuntimeError(f"{whose} differs by {off:.2e} in layer {kind}, {allowed:.2e} is rounding")


def check_same_bits(whose: str, kind: str, expected: Tensor, output: Tensor) -> None:
    """Raises RuntimeError where a bit differs."""
    if not bool((unlike := output != expected).any()):
        return
    raise RuntimeError(
        f"{whose} differs from joint order in {int(unlike.sum())} of {expected.numel()} numbers of layer {kind}: exact "
        f"variants must give the same bits"
    )


def v_phase1_seconds(config: Config, topology: Topology, layer: StandInLayer, transport: Any) -> float:
    """T(Vp1) of v travelling alone: the slowest rank's median."""
    from cocodiff_bench.stand_in import make_exchange, send

    trace = Trace(transport.rank)
    exchange = make_exchange(config, topology, transport, trace)
    call = partial(send, exchange, layer.layout, layer.layer_key.kind, v=layer.qkv_BLHD[2])
    calls_in_step(call, CALIBRATION_CALLS, transport, after_warm_up=trace.clear)
    name = first_phase(trace.spans)
    return slowest_median([(s.end_ns - s.start_ns) / 1e9 for s in trace.spans if s.name == name] or [0.0], transport)


def exchange_seconds(config: Config, topology: Topology, layer: StandInLayer, transport: Any) -> float:
    """How long q, k and v travel together, and o back: the slowest rank's median."""
    from cocodiff_bench.stand_in import make_exchange, send, send_back

    exchange, kind = make_exchange(config, topology, transport, Trace(transport.rank)), layer.layer_key.kind

    def there_and_back() -> None:
        q, k, v = layer.qkv_BLHD
        out_BSGD = send(exchange, layer.layout, kind, q=q, k=k, v=v)[0]
        send_back(exchange, out_BSGD, layer.layout, kind)

    return slowest_median(calls_in_step(there_and_back, CALIBRATION_CALLS // 3, transport), transport)


def calls_in_step(
    call: Callable[[], Any], calls: int, transport: Any, after_warm_up: Callable[[], Any] = lambda: None
) -> list[float]:
    """Seconds of each call, which all ranks begin together; the first one warms up and does not count."""
    seconds = []
    for number in range(calls + 1):
        meet(transport)
        if number == 1:
            after_warm_up()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def slowest_median(seconds: Sequence[float], transport: Any) -> float:
    medians = transport.gather_object(statistics.median(seconds))
    return float(transport.broadcast_object(medians and max(medians)))


# Results --------------------------------------------------------------------------------------------------------------


def report(
    case: str,
    wanted: Mapping[str, Config],
    seconds: Mapping[str, list[float]],
    sent: Mapping[str, Mapping[str, int]],
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
    measured = common.rows(case, seconds, sent, references)
    times = summarise({name: {one["rank"]: one["spans"] for one in ranks} for name, ranks in records.items()})
    for row in measured:
        row["hidden_of_whole"] = hidden_share(seconds, row["variant"], references[row["variant"]]["whole"], compute_s)
        of_layers = {one.layer: one._asdict() for one in times if one.mode == row["variant"]}
        row["layers"] = {
            layer: {name: value for name, value in one.items() if name not in ("mode", "layer")}
            for layer, one in of_layers.items()
        }
    common.say_rows(measured, "a call", words_of_layers)
    for row in measured:
        if row["hidden_of_whole"] is not None and row["variant"] != references[row["variant"]]["whole"]:
            say(f"  {row['variant']}: hides {row['hidden_of_whole']:.1%} of what is exposed without chunks")
    common.publish(output, values, measured, {"trace.json": lambda path: save_traces(path, dict(records))})


def words_of_layers(row: Row) -> list[str]:
    """How long each kind of layer's messages were on their way, and which part of that the rank did not wait for."""
    return [
        f"{layer}: {all_s * 1e3:.2f} ms of messages, {of['hidden_s'] / all_s:.0%} hidden"
        for layer, of in row["layers"].items()
        if (all_s := of["communication_s"])
    ]


def hidden_share(seconds: Mapping[str, list[float]], name: str, whole: str, compute_s: float | None) -> float | None:
    """The part that chunks hide of the time by which a call without them is longer than its compute: median over
    rounds."""
    if compute_s is None or whole not in seconds:
        return None
    pairs = zip(seconds[name], seconds[whole], strict=True)
    return statistics.median((alone - ours) / (alone - compute_s) for ours, alone in pairs)


def shape_of(values: Values) -> str:
    tokens = f"{values['image_tokens']} + {values['text_tokens']} tokens"
    return f"stand-in attention, {tokens}, {values['heads']} heads of {values['head_dim']}, batch {values['batch']}"


BENCHMARK = Benchmark(
    "Times attention calls of a stand-in model: real communication, projections that are timed waits.",
    OPTIONS,
    check,
    measure,
)
