"""`cocodiff bench placement`: attention calls on meshes of Ulysses and Ring, every degree in both placements in turn.

Messages are real, attention is a wait in proportion to its pairs of queries and keys, so that what messages can hide
behind does not depend on the cores that all ranks share. A measurement is the slowest rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
from cocodiff.commands.terminal import progress_bar, say
from cocodiff.config import EXCHANGES, ORDERS, Config, load_machine
from cocodiff.errors import UserError
from cocodiff.topology import Topology
from cocodiff.trace import LINK_CLASSES, Trace

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.attention.mesh import Mesh
    from cocodiff.attention.placement import Work
    from cocodiff.attention.softmax_merge import Partial
    from cocodiff.attention.strategy import LazyQKV

OPTIONS = with_common_options(
    Option("ring", "Ring degrees to measure, 1 for Ulysses alone; default: all that ranks and heads allow", type=int,
           many=True),
    Option("exchange", "Ulysses' exchange", "flat", choices=EXCHANGES),
    Option("order", "order of an attention call", "joint", choices=ORDERS),
    Option("image_tokens", "image tokens of all ranks", 4096, type=int),
    Option("text_tokens", "text tokens of all ranks", 512, type=int),
    Option("heads", "attention heads", 24, type=int),
    Option("head_dim", "size of a head", 64, type=int),
    Option("attention_s", "how long attention takes of a rank whose share is the mean one, a case each", [0.0],
           type=float, many=True),
)  # fmt: skip


@dataclass
class WaitingAttention:
    """In attention's place: real attention at first, then waits. mean_pairs: of a query and a key for a head, on a mean
    rank, which take `seconds`."""

    mean_pairs: float
    seconds: float | None = None

    def whole(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B11S: Tensor | None) -> Tensor:
        return self.part(q_BSGD, k_BSGD, v_BSGD, mask_B11S).out_BLHD

    def part(self, q_BLGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B11S: Tensor | None) -> Partial:
        from cocodiff.attention.softmax_merge import Partial, partial_attention

        if self.seconds is None:
            return partial_attention(q_BLGD, k_BSGD, v_BSGD, mask_B11S)
        time.sleep(self.seconds * q_BLGD.shape[1] * k_BSGD.shape[1] * q_BLGD.shape[2] / self.mean_pairs)
        return Partial(q_BLGD.clone(), q_BLGD.new_zeros(q_BLGD.shape[:3]))


class Variant:
    """A mesh, with a trace of its own."""

    def __init__(self, config: Config, mesh: Mesh, transport: Any, mean_pairs: float) -> None:
        from cocodiff.attention.exchange import Exchange
        from cocodiff.attention.ring import Ring
        from cocodiff.attention.ulysses import Ulysses
        from cocodiff.comm.part import Part
        from cocodiff.engine import ORDERS as ORDER_OF
        from cocodiff.engine import exchange_table
        from cocodiff.kernels import Kernels

        self.trace, self.attention = Trace(transport.rank), WaitingAttention(mean_pairs)
        kernels = Kernels(config.kernels, self.trace.note_kernel)
        group, _ = mesh.seat(transport.rank)
        exchange = ring = None
        if mesh.ulysses > 1:
            table = exchange_table(config, mesh.topology)
            members = Part(transport, mesh.groups[group])
            exchange = Exchange(
                config.exchange, mesh.parts[group], members, self.trace, table, config.nic_balance, kernels
            )
        if mesh.ring > 1:
            ring = Ring(mesh, transport, self.trace, kernels, self.attention.part)
        order, whole = ORDER_OF[config.order], self.attention.whole
        self.strategy = Ulysses(mesh.parts[group], exchange, self.trace, order, whole, ring=ring)

    def call(self, qkv: LazyQKV) -> Tensor:
        from cocodiff.attention.strategy import Site

        return self.strategy.attend(qkv, Site("layer"))


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "image_tokens", "heads", "head_dim", "repeats", "ranks")
    if values["text_tokens"] < 0:
        raise UserError(f"--text_tokens {values['text_tokens']}: give 0 or more")
    if any(not 0 <= seconds < float("inf") for seconds in values["attention_s"]):
        raise UserError(f"--attention_s {values['attention_s']}: give 0 or more seconds")
    if ranks is not None:
        topology = Topology.build(load_machine(values["machine"]), ranks, detect().local_size)
        named_meshes(values, topology, work_of(values))


def work_of(values: Values) -> Work:
    from cocodiff.attention.placement import Work

    return Work(values["heads"], values["head_dim"], values["image_tokens"], values["text_tokens"], itemsize=4)


def named_meshes(values: Values, topology: Topology, work: Work) -> dict[str, Mesh]:
    """The variants: of every Ring degree the best mesh of each placement, the default one first."""
    from cocodiff.attention.placement import by_degree

    found: dict[str, Mesh] = {}
    degrees = [by_degree(topology, work, ring) for ring in values["ring"]] if values["ring"] else [
        by_degree(topology, work)]  # fmt: skip
    for of_degree in (one for listed in degrees for one in listed):
        for priced in of_degree:
            mesh = priced.mesh
            name = f"ulysses {mesh.ulysses} ring {mesh.ring}"
            if 1 not in (mesh.ulysses, mesh.ring):
                name += f" {mesh.placement}"
            found.setdefault(name, mesh)
    return found


def import_before_fork(_values: Values) -> None:
    import_module("cocodiff.engine")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    import torch

    from cocodiff.attention.layout import Layout
    from cocodiff.attention.strategy import LazyQKV

    topology, work = (
        Topology.build(load_machine(values["machine"]), transport.size, detect().local_size),
        work_of(values),
    )
    named = named_meshes(values, topology, work)
    config = Config(exchange=values["exchange"], order=values["order"], **machine_settings(values))
    tokens = work.image_tokens + work.text_tokens
    pairs = tokens**2 * work.heads / transport.size
    variants = {name: Variant(config, mesh, transport, pairs) for name, mesh in named.items()}
    rank, random = transport.rank, torch.Generator().manual_seed(transport.rank)
    own = Layout.build(topology, work.image_tokens, work.text_tokens, max(work.heads, transport.size)).rows[rank]
    q, k, v = (torch.randn(1, own, work.heads, work.head_dim, generator=random) for _ in range(3))
    qkv = LazyQKV(lambda: q, lambda: k, lambda: v, work.image_tokens, work.text_tokens, work.heads)
    with torch.no_grad():
        check_alike({name: variant.call(qkv) for name, variant in variants.items()}, rank)
        cases = {seconds: timed(variants, qkv, seconds, values, transport) for seconds in values["attention_s"]}
    sent = {name: transport.gather_object(variant.trace.bytes()) for name, variant in variants.items()}
    if rank == 0:
        report(cases, named, sent, output, values)
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


def report(
    cases: Mapping[float, Mapping[str, list[float]]], named: Mapping[str, Mesh],
    sent: Mapping[str, list[dict[str, int]]], output: OutputFolder, values: Values,
) -> None:  # fmt: skip
    """Writes bench.json and says what it holds; ratios are to the default placement of the same degree."""
    default: dict[int, str] = {}
    for name, mesh in named.items():
        default.setdefault(mesh.ring, name)
    references = {name: {"default": default[mesh.ring]} for name, mesh in named.items()}
    of_call = {
        name: {link: sum(one[link] for one in ranks) // values["repeats"] for link in LINK_CLASSES}
        for name, ranks in sent.items()
    }
    tokens = f"{values['image_tokens']} + {values['text_tokens']} tokens, {values['heads']} heads"
    measured = [rows(f"{tokens}, attention {seconds:g} s", one, of_call, references) for seconds, one in cases.items()]
    folder = output.open()
    save(folder, [row for case in measured for row in case], values)
    output.publish()
    for case in measured:
        say_rows(case, "a call")
    say(f"results: {output.final / 'bench.json'}")


BENCHMARK = Benchmark(
    "Times attention calls on meshes of Ulysses and Ring: real messages, attention as a timed wait.",
    OPTIONS, check, import_before_fork, measure,
)  # fmt: skip
