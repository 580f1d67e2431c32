"""`cocodiff bench selection`: what choosing and gathering V-Major's tokens costs one rank, beside what it saves.

The cost is measured here, on one process with the cores to itself; the saving is arithmetic: the all-to-all bound of
the bytes of q, k and v that stay, on the machine's links so many times slower as `cocodiff emulate --scale` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cocodiff.config import load_machine
from cocodiff.console.options import Option, check_counts
from cocodiff.console.terminal import say
from cocodiff.errors import UserError
from cocodiff.loading.pipelines import torch_dtype
from cocodiff.models.tokens import image_segment
from cocodiff.outputs.folder import OutputFolder
from cocodiff.topology.links import alltoall_bound
from cocodiff.topology.machine import Topology
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Row, Values

RANK = 0
OPTIONS = common.with_common_options(
    Option("machine", "machine whose links the saving is of", "aurora"),
    Option("nodes", "nodes of it", 1, type=int),
    Option("scale", "how many times slower its links are", 3000.0, type=float),
    Option("image_tokens", "image tokens of all ranks", 4096, type=int),
    Option("heads", "attention heads of all ranks", 24, type=int),
    Option("head_dim", "size of a head", 128, type=int),
    Option("fraction", "of the tokens that stay", 0.5, type=float),
    Option("dtype", "of q, k and v", "bf16", choices=("bf16", "fp16", "fp32")),
    Option("repeats", "measurements", 25, type=int),
)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "nodes", "image_tokens", "heads", "head_dim", "repeats")
    if ranks != 1:
        raise UserError("bench selection measures one rank's part in one process: start it alone")
    if not 0 < values["fraction"] < 1:
        raise UserError(f"--fraction {values['fraction']:g}: give a fraction between 0 and 1")
    if not 0 < values["scale"] < float("inf"):
        raise UserError(f"--scale {values['scale']:g}: give a number above 0")
    if load_machine(values["machine"]).tiles_per_node is None:
        raise UserError(f"machine {values['machine']} has no fixed size: use --machine aurora or local-6x2")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    import torch

    from cocodiff.topology.layout import Layout

    machine = load_machine(values["machine"])
    topology = Topology.build(machine, int(machine.tiles_per_node or 1) * values["nodes"])
    layout = Layout.build(topology, (image_segment(values["image_tokens"]),), values["heads"])
    with torch.no_grad():
        parts = stages(values, topology, layout)
    seconds = common.measure_in_turns(
        "bench selection", {name: one.run for name, one in parts.items()}, values, transport
    )
    u = values["head_dim"] * torch_dtype(values["dtype"]).itemsize
    block = 3 * values["fraction"] * sum(layout.rows) * sum(layout.heads) * u / topology.size**2
    bound = alltoall_bound(topology, block)
    assert bound is not None, "a node of fixed size has links"
    saved = bound * values["scale"]
    case = (
        f"{values['image_tokens']} tokens, {values['heads']} heads of {values['head_dim']}, {values['dtype']}, "
        f"{values['fraction']:g} stay, {machine.name}, links {values['scale']:g} times slower"
    )
    found = common.rows(case, seconds, {}, {})
    for row in found:
        row["share_of_saving"] = row["median_s"] / saved
        row["moved_bytes"] = parts[row["variant"]].moved_bytes
    common.say_rows(found, more=more_words)
    say(f"  saving: {saved * 1e3:.3f} ms is what the links would take for the bytes that stay, at best")
    both = sum(row["median_s"] for row in found if row["variant"] in ("select", "gather"))
    say(f"  select and gather together: {both / saved:.1%} of the saving")
    common.publish(output, values, found)


def more_words(row: Row) -> list[str]:
    return [f"{row['moved_bytes'] / 1e6:.2f} MB", f"{row['share_of_saving']:.1%} of the saving"]


@dataclass(frozen=True)
class Stage:
    """A part of the work, and the bytes that it reads and writes at least."""

    run: Callable[[], Any]
    moved_bytes: int


def stages(values: Values, topology: Topology, layout: Any) -> dict[str, Stage]:
    """score: own tokens against their reference; select: all cards' tokens by their scores, and the indices of rows;
    gather: own rows of q, k and v into what is sent to each rank; scatter: what arrives into the caches."""
    import torch

    from cocodiff.attention.v_major.call import travelling_rows
    from cocodiff.attention.v_major.selection import Cards, Selection
    from cocodiff.kernels import Kernels

    generator, dtype = torch.Generator().manual_seed(0), torch_dtype(values["dtype"])
    tokens, D = values["image_tokens"], values["head_dim"]
    own_BLHD = torch.randn(4, layout.rows[RANK], values["heads"], D, generator=generator).to(dtype)
    q, k, v, reference = (own_BLHD[n : n + 1].clone() for n in range(4))
    scores_BS = torch.rand(1, tokens, generator=generator)
    cards, kernels = Cards.build(topology, layout.may_stay, scores_BS.device), Kernels(values["kernels"])

    def select() -> Selection:
        active_BS = cards.active(scores_BS, scores_BS, values["fraction"], 0.0, kernels)
        return Selection.build(active_BS, layout)

    chosen = select()
    caches = [torch.zeros(1, tokens, layout.heads[RANK], D, dtype=dtype) for _ in range(3)]
    arrived = [torch.ones(len(chosen.arriving), layout.heads[RANK], D, dtype=dtype) for _ in range(3)]

    rows_of = [travelling_rows(x, chosen.of_rank[RANK]) for x in (q, k, v)]
    messages = [[one.heads(heads) for one in rows_of] for heads in layout.head_slices]
    sent = [q.new_empty(sum(one.shape.numel() for one in message)) for message in messages]
    flat = [cache.flatten(0, 1) for cache in caches]
    return {
        "score": Stage(lambda: kernels.l1_score(v, reference), v.nbytes + reference.nbytes),
        "select": Stage(select, scores_BS.nbytes + chosen.arriving.nbytes),
        "gather": Stage(lambda: kernels.gather_pack(messages, sent), 2 * sum(x.nbytes for x in sent)),
        "scatter": Stage(
            lambda: kernels.scatter_rows(arrived, chosen.arriving, flat), 2 * sum(x.nbytes for x in arrived)
        ),
    }


BENCHMARK = Benchmark(
    "Times V-Major's selection and gathering on one rank, beside what the saved bytes take on the machine's links.",
    OPTIONS,
    check,
    measure,
)
