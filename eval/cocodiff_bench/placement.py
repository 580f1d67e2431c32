"""`cocodiff bench placement`: attention calls on meshes of Ulysses and Ring, every degree in both placements in turn.

Messages are real, attention is a wait in proportion to its pairs of queries and keys, so that what messages can hide
behind does not depend on the cores that all ranks share. A measurement is the slowest rank's. What is the default
placement is asked for every wait: where placements send as many bytes, it goes by what attention hides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.comm.launch import detect
from cocodiff.commands.emulate.command import emulated
from cocodiff.commands.options import Option, check_counts
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.terminal import progress_bar, say
from cocodiff.config import Config, load_machine
from cocodiff.errors import UserError
from cocodiff.models.tokens import image_and_text
from cocodiff.registry import EXCHANGES, ORDERS
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES, Trace
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

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.attention.local import Partial
    from cocodiff.attention.strategy import LazyQKV
    from cocodiff.planning.placement import Work
    from cocodiff.topology.axes import Mesh

OPTIONS = with_common_options(
    Option(
        "ring",
        "Ring degrees to measure, 1 for Ulysses alone; default: all that ranks and heads allow",
        type=int,
        many=True,
    ),
    Option("exchange", "Ulysses' exchange", "flat", choices=lambda: (*EXCHANGES, "auto")),
    Option("order", "order of an attention call", "joint", choices=ORDERS),
    Option("chunks", "chunks to measure each mesh in: 1 for none, or auto", ["1"], many=True),
    Option("image_tokens", "image tokens of all ranks", 4096, type=int),
    Option("text_tokens", "text tokens of all ranks", 512, type=int),
    Option("heads", "attention heads", 24, type=int),
    Option("head_dim", "size of a head", 64, type=int),
    Option(
        "attention_s",
        "how long attention takes of a rank whose share is the mean one, a case each",
        [0.0],
        type=float,
        many=True,
    ),
)


@dataclass
class WaitingAttention:
    """In attention's place: real attention at first, then waits. mean_pairs: of a query and a key for a head, on a mean
    rank, which take `seconds`."""

    mean_pairs: float
    seconds: float | None = None

    def whole(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B11S: Tensor | None) -> Tensor:
        return self.part(q_BSGD, k_BSGD, v_BSGD, mask_B11S).out_BLHD

    def part(self, q_BLGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B11S: Tensor | None) -> Partial:
        from cocodiff.attention.local import Partial, partial_attention

        if self.seconds is None:
            return partial_attention(q_BLGD, k_BSGD, v_BSGD, mask_B11S)
        started = time.perf_counter()
        part = Partial(q_BLGD.clone(), q_BLGD.new_zeros(q_BLGD.shape[:3]))
        wanted = self.seconds * q_BLGD.shape[1] * k_BSGD.shape[1] * q_BLGD.shape[2] / self.mean_pairs
        time.sleep(max(0.0, wanted - (time.perf_counter() - started)))
        return part


class Case(NamedTuple):
    """A variant: a mesh, and in how many chunks tensors travel. default: the one that the engine would take of this
    degree's placements."""

    mesh: Mesh
    chunks: int | str
    default: bool

    @property
    def name(self) -> str:
        mesh = self.mesh
        placement = f" {mesh.placement}" if 1 not in (mesh.ulysses, mesh.ring) else ""
        chunks = f" {self.chunks} chunks" if self.chunks != 1 else ""
        return f"ulysses {mesh.ulysses} ring {mesh.ring}{placement}{chunks}"


class Variant:
    """A mesh in chunks or not, with a trace of its own."""

    def __init__(self, config: Config, mesh: Mesh, transport: Any, mean_pairs: float) -> None:

        from cocodiff.assemble import build_strategy
        from cocodiff.kernels import Kernels

        self.trace, self.attention = Trace(transport.rank), WaitingAttention(mean_pairs)
        kernels = Kernels(config.kernels, self.trace.note_kernel)
        local: Any = self.attention
        self.strategy = build_strategy(config, mesh, transport, self.trace, kernels, local)

    def call(self, qkv: LazyQKV) -> Tensor:
        from cocodiff.attention.strategy import Site

        return self.strategy.attend(qkv, Site("layer"))


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "image_tokens", "heads", "head_dim", "repeats", "ranks")
    if values["text_tokens"] < 0:
        raise UserError(f"--text_tokens {values['text_tokens']}: give 0 or more")
    if any(not 0 <= seconds < float("inf") for seconds in values["attention_s"]):
        raise UserError(f"--attention_s {values['attention_s']}: give 0 or more seconds")
    configs(values)
    if ranks is not None:
        topology = Topology.build(load_machine(values["machine"]), ranks, detect().local_size)
        named_cases(values, topology, 0.0)


def work_of(values: Values, attention_s: float | None = None) -> Work:
    """attention_s: of a wait, in seconds of the emulated machine where there is one."""
    from cocodiff.planning.placement import Work

    scale = float(emulated().get("scale", 1.0))
    return Work(
        values["heads"],
        values["head_dim"],
        image_and_text(values["image_tokens"], values["text_tokens"]),
        itemsize=4,
        attention_s=None if attention_s is None else attention_s / scale,
    )


def named_cases(values: Values, topology: Topology, attention_s: float) -> dict[str, Case]:
    """The variants: of every Ring degree the best mesh of each placement, in chunks or not, the default one first."""
    from cocodiff.assemble import chunking, predicted_chunking
    from cocodiff.planning.placement import by_degree

    found: dict[str, Case] = {}
    for config in configs(values):
        chunking(config, topology)  # whether it was measured at all
        work = replace(work_of(values, attention_s), chunking=predicted_chunking(config))
        for ring in values["ring"] or ["auto"]:
            for of_degree in by_degree(topology, work, ring):
                for priced in of_degree:
                    case = Case(priced.mesh, config.chunks, priced is of_degree[0])
                    found.setdefault(case.name, case)
    return found


def configs(values: Values) -> list[Config]:
    """The engine's settings in every number of chunks."""
    shared = machine_settings(values) | {"exchange": values["exchange"], "order": values["order"]}
    return [Config(chunks=chunks, **shared) for chunks in values["chunks"]]


def import_before_fork(_values: Values) -> None:
    import_module("cocodiff.engine")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    import torch

    from cocodiff.attention.strategy import LazyQKV
    from cocodiff.topology.layout import Layout

    topology = Topology.build(load_machine(values["machine"]), transport.size, detect().local_size)
    work = work_of(values)
    of_wait = {wait: named_cases(values, topology, wait) for wait in values["attention_s"]}
    pairs = sum(segment.tokens for segment in work.segments) ** 2 * work.heads / transport.size
    config_of = {config.chunks: config for config in configs(values)}
    built: dict[tuple[Any, int | str], Variant] = {}  # waits share a variant where they have the same mesh
    for case in (case for cases in of_wait.values() for case in cases.values()):
        key = (case.mesh.groups, case.chunks)
        if key not in built:
            built[key] = Variant(config_of[case.chunks], case.mesh, transport, pairs)
    rank, random = transport.rank, torch.Generator().manual_seed(transport.rank)
    own = Layout.build(topology, work.segments, max(work.heads, transport.size)).rows[rank]
    q, k, v = (torch.randn(1, own, work.heads, work.head_dim, generator=random) for _ in range(3))
    qkv = LazyQKV(lambda: q, lambda: k, lambda: v, work.segments, work.heads)
    measured: list[list[dict[str, Any]]] = []
    with torch.no_grad():
        check_alike({str(key): variant.call(qkv) for key, variant in built.items()}, rank)
        for wait, cases in of_wait.items():
            variants = {name: built[case.mesh.groups, case.chunks] for name, case in cases.items()}
            seconds = timed(variants, qkv, wait, values, transport)
            sent = {name: transport.gather_object(variant.trace.bytes()) for name, variant in variants.items()}
            measured += [] if rank else [rows_of(cases, wait, seconds, sent, values)]
    if rank == 0:
        report(measured, output, values)
    transport.broadcast_object(None)


def check_alike(outputs: Mapping[str, Tensor], rank: int) -> None:
    """Compares what all meshes give, of real attention. Raises RuntimeError where they differ by more than rounding."""
    import torch

    first, *others = outputs
    for name in others:
        if not torch.allclose(outputs[name], outputs[first], rtol=1e-4, atol=1e-5):
            apart = float((outputs[name] - outputs[first]).abs().max())
            raise RuntimeError(f"rank {rank}: {name} differs from {first} by {apart:.2e}: exact meshes must agree")


def timed(
    variants: Mapping[str, Variant], qkv: LazyQKV, attention_s: float, values: Values, transport: Any
) -> dict[str, list[float]]:
    """Seconds per attention call of every variant, to the end of the slowest rank's."""

    def one(variant: Variant) -> None:
        variant.call(qkv)
        meet(transport)

    for variant in variants.values():
        variant.attention.seconds = attention_s
        variant.trace.clear()
    calls: dict[str, Callable[[], None]] = {name: partial(one, variant) for name, variant in variants.items()}
    shown = not values["quiet"] and not transport.rank
    with progress_bar("bench placement", values["repeats"] * len(calls), shown) as bar:
        return interleave(calls, values["repeats"], 1, partial(meet, transport), bar.update)


def rows_of(
    cases: Mapping[str, Case],
    wait: float,
    seconds: Mapping[str, list[float]],
    sent: Mapping[str, list[dict[str, int]]],
    values: Values,
) -> list[dict[str, Any]]:
    """Rows of bench.json for one wait. Ratios are to the default placement of the same degree in as many chunks, and to
    the same mesh without chunks."""
    default = {(case.mesh.ring, case.chunks): name for name, case in cases.items() if case.default}
    references = {
        name: {"default": default[case.mesh.ring, case.chunks], "whole": case._replace(chunks=1).name}
        for name, case in cases.items()
    }
    of_call = {
        name: {link: sum(one[link] for one in ranks) // values["repeats"] for link in LINK_CLASSES}
        for name, ranks in sent.items()
    }
    tokens = f"{values['image_tokens']} + {values['text_tokens']} tokens, {values['heads']} heads"
    found = rows(f"{tokens}, attention {wait:g} s", seconds, of_call, references)
    return [row | {"default": cases[row["variant"]].default} for row in found]


def report(measured: list[list[dict[str, Any]]], output: OutputFolder, values: Values) -> None:
    """Writes bench.json and says what it holds."""
    folder = output.open()
    save(folder, [row for of_wait in measured for row in of_wait], values)
    output.publish()
    for of_wait in measured:
        say_rows(of_wait, "a call")
        say(f"  default placements: {', '.join(row['variant'] for row in of_wait if row['default'])}")
    say(f"results: {output.final / 'bench.json'}")


BENCHMARK = Benchmark(
    "Times attention calls on meshes of Ulysses and Ring: real messages, attention as a timed wait.",
    OPTIONS,
    check,
    import_before_fork,
    measure,
)
