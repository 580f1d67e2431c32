"""`cocodiff bench placement`: attention calls on meshes of Ulysses and Ring, every degree in both placements in turn.

Messages are real, attention is a wait in proportion to its pairs of queries and keys, so that what messages can hide
behind does not depend on the cores that all ranks share. A measurement is the slowest rank's. What is the default
placement is asked for every wait: where placements send as many bytes, it goes by what attention hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.config import Config
from cocodiff.console.options import Option, check_counts
from cocodiff.console.terminal import say
from cocodiff.errors import UserError
from cocodiff.models.tokens import image_and_text
from cocodiff.outputs.folder import OutputFolder
from cocodiff.processes.emulated import emulated
from cocodiff.registry import EXCHANGES, ORDERS
from cocodiff.topology.axes import Mesh
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Row, Values, meet

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.assemble import AttentionWork
    from cocodiff.attention.strategy import Strategy
    from cocodiff_bench.waiting import WaitingAttention

OPTIONS = common.with_common_options(
    Option(
        "ring",
        "Ring degrees to measure, 1 for Ulysses alone; default: all that ranks and heads allow",
        type=int,
        many=True,
    ),
    Option("exchange", "Ulysses' exchange", "flat", choices=EXCHANGES),
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


@dataclass(frozen=True)
class Variant:
    """A mesh in chunks or not, with a trace of its own."""

    trace: Trace
    attention: WaitingAttention
    strategy: Strategy


def make_variant(config: Config, mesh: Mesh, transport: Any, pairs: float) -> Variant:
    """pairs: of a query and a key for a head, on a mean rank."""
    from cocodiff_bench.engine_parts import make_strategy
    from cocodiff_bench.waiting import WaitingAttention

    trace, attention = Trace(transport.rank), WaitingAttention(pairs)
    strategy = make_strategy(config, mesh, transport, trace, attention)
    return Variant(trace, attention, strategy)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "image_tokens", "heads", "head_dim", "repeats", "ranks")
    common.check_not_negative(values, "text_tokens")
    if any(not 0 <= seconds < float("inf") for seconds in values["attention_s"]):
        raise UserError(f"--attention_s {values['attention_s']}: give 0 or more seconds")
    configs(values)
    if ranks is not None:
        named_cases(values, common.topology_of(values, ranks), 0.0)


def work_of(values: Values, attention_s: float | None = None) -> AttentionWork:
    """attention_s: of a wait, in seconds of the emulated machine where there is one."""
    from cocodiff.assemble import AttentionWork

    scale = float(emulated().get("scale", 1.0))
    return AttentionWork(
        values["heads"],
        values["head_dim"],
        image_and_text(values["image_tokens"], values["text_tokens"]),
        itemsize=4,
        attention_s=None if attention_s is None else attention_s / scale,
    )


def named_cases(values: Values, topology: Topology, attention_s: float) -> dict[str, Case]:
    """The variants: of every Ring degree the best mesh of each placement, in chunks or not, the default one first."""
    from cocodiff.assemble import chunking
    from cocodiff.planning.automatic import predicted_chunking
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
    shared = {"exchange": values["exchange"], "order": values["order"]}
    return [common.engine_config(values, chunks=chunks, **shared) for chunks in values["chunks"]]


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    import torch

    from cocodiff.attention.strategy import LazyQKV, Site
    from cocodiff.topology.layout import Layout

    topology, work, rank = common.topology_of(values, transport.size), work_of(values), transport.rank
    of_wait = {wait: named_cases(values, topology, wait) for wait in values["attention_s"]}
    pairs = sum(segment.tokens for segment in work.segments) ** 2 * work.heads / transport.size
    config_of = {config.chunks: config for config in configs(values)}
    built: dict[tuple[Any, int | str], Variant] = {}  # waits share a variant where they have the same mesh
    for case in (case for cases in of_wait.values() for case in cases.values()):
        key = (case.mesh.groups, case.chunks)
        if key not in built:
            built[key] = make_variant(config_of[case.chunks], case.mesh, transport, pairs)
    random = torch.Generator().manual_seed(rank)
    own = Layout.build(topology, work.segments, max(work.heads, transport.size)).rows[rank]
    q, k, v = (torch.randn(1, own, work.heads, work.head_dim, generator=random) for _ in range(3))
    qkv = LazyQKV(lambda: q, lambda: k, lambda: v, work.segments, work.heads)

    def call(variant: Variant) -> Tensor:
        return variant.strategy.attend(qkv, Site("layer"))

    def call_on_all(variant: Variant) -> None:
        """To the end of the slowest rank's."""
        call(variant)
        meet(transport)

    with torch.no_grad():
        check_alike({str(key): call(variant) for key, variant in built.items()}, rank)
    measured: list[list[Row]] = []
    for wait, cases in of_wait.items():
        variants = {name: built[case.mesh.groups, case.chunks] for name, case in cases.items()}
        for variant in variants.values():
            variant.attention.seconds = wait
        traces = {name: variant.trace for name, variant in variants.items()}
        seconds = common.measure_in_turns(
            f"bench placement, attention {wait:g} s",
            {name: partial(call_on_all, variant) for name, variant in variants.items()},
            values,
            transport,
            traces=traces.values(),
        )
        sent = common.bytes_of_call(traces, values["repeats"], transport)
        measured += [] if rank else [rows_of(cases, wait, seconds, sent, values)]
    if rank == 0:
        for of_case in measured:
            common.say_rows(of_case, "a call")
            say(f"  default placements: {', '.join(row['variant'] for row in of_case if row['default'])}")
        common.publish(output, values, [row for of_case in measured for row in of_case])


def check_alike(outputs: Mapping[str, Tensor], rank: int) -> None:
    """Compares what all meshes give, of real attention. Raises RuntimeError where they differ by more than rounding."""
    import torch

    first, *others = outputs
    for name in others:
        if not torch.allclose(outputs[name], outputs[first], rtol=1e-4, atol=1e-5):
            apart = float((outputs[name] - outputs[first]).abs().max())
            raise RuntimeError(f"rank {rank}: {name} differs from {first} by {apart:.2e}: exact meshes must agree")


def rows_of(
    cases: Mapping[str, Case],
    wait: float,
    seconds: Mapping[str, list[float]],
    sent: Mapping[str, Mapping[str, int]],
    values: Values,
) -> list[Row]:
    """Rows of bench.json for one wait. Ratios are to the default placement of the same degree in as many chunks, and to
    the same mesh without chunks."""
    default = {(case.mesh.ring, case.chunks): name for name, case in cases.items() if case.default}
    references = {
        name: {"default": default[case.mesh.ring, case.chunks], "whole": case._replace(chunks=1).name}
        for name, case in cases.items()
    }
    tokens = f"{values['image_tokens']} + {values['text_tokens']} tokens, {values['heads']} heads"
    found = common.rows(f"{tokens}, attention {wait:g} s", seconds, sent, references)
    return [row | {"default": cases[row["variant"]].default} for row in found]


BENCHMARK = Benchmark(
    "Times attention calls on meshes of Ulysses and Ring: real messages, attention as a timed wait.",
    OPTIONS,
    check,
    measure,
)
