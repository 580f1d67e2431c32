"""`cocodiff bench alltoall`: one exchange of equal blocks by every variant in turn, compared with the links' bound.

Our exchanges are timed as the engine uses them, with packing and putting in place. The others get packed buffers. A
measurement is the slowest rank's. On an emulated machine (`cocodiff emulate`) traffic is real and times are longer by
the emulation's scale; so is the bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cocodiff_eval.harness.replicas import topology_of
from torch import Tensor

from cocodiff.comm.launch import detect, emulated
from cocodiff.comm.trace import Span, Trace
from cocodiff.comm.transport import TOGETHER, RankContext
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Links
from cocodiff.engine.assemble import chunking, exchange_table
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.transfer import Transfer
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import Option, check_counts
from cocodiff.jobs.terminal import say
from cocodiff.kernels import Kernels
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout
from cocodiff.topology.links import alltoall_bound
from cocodiff_bench import common
from cocodiff_bench.common import Row, SerialTransport, Values

VARIANTS = ("flat", "flat_serial", "library", "mpi", "tapa", "split", "auto")
LIBRARIES = ("gloo", "xccl", "ccl", "nccl")  # transports that have an all-to-all of their own
TUNED = ("flat", "tapa", "split")  # variants that `--tune` chooses from
HEAD_DIM = 128  # in fp32: a row of a block has 512 bytes, like two heads of 128 in bf16 (Qwen-Image on 12 ranks)
ROW_BYTES = 4 * HEAD_DIM
SIZES = [0.06, 0.25, 1.0, 3.0, 6.0, 12.0, 24.0, 48.0]
ABOUT = (
    "Times all-to-alls of equal blocks: our exchanges, one peer at a time, the libraries' own, and the links' bound."
)
OPTIONS = common.with_common_options(
    Option("sizes_mb", "MB (1e6 bytes) of every rank, its own block included", SIZES, type=float, many=True),
    Option("variants", f"of {' '.join(VARIANTS)}; default: those that this launch allows", None, many=True),
    Option("tune", "write exchange.yaml: which of flat, tapa and split auto shall take", False, type=bool),
    Option("exchange_table", "auto's table, instead of the shipped one"),
    Option("repeats", "measurements of each variant", 5, type=int),
    common.TRANSPORT,
)


@dataclass(frozen=True)
class Blocks:
    """The tensors of one rank in one all-to-all exchange: those that it sends, and the memory that it receives into."""

    layout: Layout  # the rows and heads of every rank, for the engine's exchanges
    x_BLHD: Tensor  # the tensor that this rank sends: one head for every rank
    packed: Tensor  # the same numbers, [ranks, L, D]: one block for each peer
    received: Tensor  # memory that variants other than the engine's receive into, [ranks, L, D] by sender


def wanted(values: Values) -> list[str]:
    """Return the names of the exchanges that `bench alltoall` is to measure.

    Raise UserError for unknown ones, and for those that this launch or the options do not allow.

    Args:
        values: the command's options.
    """
    if values["tune"]:
        return list(TUNED)
    remedies = {}  # by variant that this launch does not allow
    if detect().kind != "mpi":
        remedies["mpi"] = "start the ranks with MPI: emulate --launcher mpiexec, or mpiexec"
    if values["transport"] not in LIBRARIES:
        remedies["library"] = f"use {', '.join(LIBRARIES)}"
    allowed = [name for name in VARIANTS if name not in remedies]
    names = [name for word in values["variants"] or allowed for name in word.split(",") if name]
    for name in names:
        if name not in VARIANTS:
            raise UserError(f"--variants {name}: choose from {', '.join(VARIANTS)}")
        if name in remedies:
            raise UserError(f"--variants {name} on transport {values['transport']}: {remedies[name]}")
    return names


def check(values: Values, ranks: int | None) -> None:
    """Raise UserError for options of `bench alltoall` that cannot be measured on these ranks.

    Args:
        values: the command's options.
        ranks: number of ranks of the launch; None if unknown, and then not checked.
    """
    check_counts(values, "repeats", "ranks")
    for size in values["sizes_mb"]:
        if not 0 < size < float("inf"):
            raise UserError(f"--sizes_mb {size:g}: give MB above 0")
    names = wanted(values)
    if ranks is None:
        return
    if ranks < 2:
        raise UserError(f"bench alltoall on {ranks} rank has nothing to exchange: start 2 or more, as with --ranks 12")
    topology = topology_of(values["machine"], ranks)
    if "auto" in names and (values["variants"] or values["exchange_table"]):
        check_table(values, topology)


def config_of(name: str, values: Values) -> Config:
    """Return the settings with which the engine runs one of its own exchanges.

    Args:
        name: name of the exchange: "flat", "tapa", "split" or "auto".
        values: the command's options.
    """
    return common.engine_config(values, exchange=name, exchange_table=values["exchange_table"])


def check_table(values: Values, topology: Topology) -> None:
    """Raise UserError if this machine has no table for the exchange `auto`, which looks up there which of the other
    exchanges to use.

    Args:
        values: the command's options, which may name a table's file.
        topology: the places of ranks, with the machine.
    """
    exchange_table(config_of("auto", values), topology)


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Run one rank's part of `bench alltoall`: measure all exchanges at all sizes. Rank 0 prints and writes results.

    Args:
        values: the command's options.
        output: folder of the results.
        transport: this rank's connection to the other ranks.
    """
    topology = topology_of(values["machine"], transport.size)
    names = wanted(values)
    if "auto" in names and not (values["variants"] or values["exchange_table"]):
        try:
            check_table(values, topology)
        except UserError as error:
            names.remove("auto")
            if transport.rank == 0:
                say(f"without auto: {error}")
    traces = {name: Trace(transport.rank) for name in names if name not in OTHERS}
    measured: list[Row] = []
    built = {  # all ranks build the same ones in the same order, because that makes groups
        name: OTHERS[name](transport)
        if name in OTHERS
        else exchange_variant(config_of(name, values), topology, transport, traces[name])
        for name in names
    }
    # A barrier with small messages, which all ranks leave within a millisecond.
    together = transport.group(range(transport.size)).barrier
    for size in values["sizes_mb"]:
        blocks = random_blocks(size, transport)
        variants: dict[str, Callable[[], Tensor]] = {name: partial(built[name], blocks) for name in names}
        check_results(blocks, variants, transport.rank)
        title = f"bench alltoall {size:g} MB"
        slowest, sent = common.measure_slowest(title, variants, values, transport, traces, together)
        spans = transport.gather_values(traces["tapa"].spans if "tapa" in traces else [])
        if transport.rank == 0:
            of_tapa = [span for of_rank in spans for span in of_rank]
            of_size = rows_of(size, slowest, sent, of_tapa, bound_s(topology, blocks.packed[0].nbytes))
            of_size = [row | {"nodes": topology.nodes} for row in of_size]
            common.say_rows(of_size, more=more_words, title=f"{size:g} MB per rank")
            measured += of_size
    if transport.rank == 0:
        if values["tune"]:
            say("exchange.yaml is auto's table: use it with exchange_table")
        files = {"exchange.yaml": partial(write_table, topology, measured)} if values["tune"] else {}
        common.publish(output, values, measured, files)


def random_blocks(size_mb: float, transport: Any) -> Blocks:
    """Return random tensors of this rank for an all-to-all, in which it has a block for each rank.

    A block has about size_mb / ranks MB, in whole rows of 512 bytes, at least one row.

    Args:
        size_mb: MB (1e6 bytes) of a rank's whole tensor.
        transport: this rank's connection to the other ranks.
    """
    ranks = transport.size
    L = max(1, round(size_mb * 1e6 / ranks / ROW_BYTES))
    layout = Layout((), (1,) * ranks).of_rows((L,) * ranks)
    generator = torch.Generator().manual_seed(transport.rank)
    packed = torch.randn(ranks, L, HEAD_DIM, generator=generator)
    x_BLHD = packed.transpose(0, 1).contiguous()[None]
    device = transport.device
    return Blocks(layout, x_BLHD.to(device), packed.to(device), torch.empty_like(packed, device=device))


Variant = Callable[[Blocks], Tensor]  # runs the exchange and returns what arrived, [ranks, L, D] by sender


def exchange_variant(config: Config, topology: Topology, transport: Any, trace: Trace) -> Variant:
    """Return a function that runs one of the engine's own exchanges among all ranks.

    That function takes this rank's `Blocks` and returns the received blocks by sender, [ranks, L, D].

    Args:
        config: the engine's settings, with the exchange.
        topology: the places of ranks.
        transport: this rank's connection to the other ranks.
        trace: counts the bytes and times of the variant.
    """
    table, kernels = exchange_table(config, topology), Kernels(config.kernels, trace.note_kernel)
    chunked, together = chunking(config, topology), TOGETHER[config.messages]
    context = RankContext(transport, topology, trace, kernels)
    exchange = Exchange(config.exchange, context, table, config.nic_balance, chunked, together)

    def run(blocks: Blocks) -> Tensor:
        """Exchange this rank's blocks with all ranks. Return the received blocks by sender, [ranks, L, D]."""
        sent = Transfer(exchange, blocks.layout).send(x=blocks.x_BLHD)
        return sent["x"].wait().view(blocks.packed.shape)

    return run


def flat_serial(transport: Any) -> Variant:
    """Return a function that exchanges blocks with one peer at a time.

    That function takes this rank's `Blocks` and returns the received blocks by sender, [ranks, L, D].

    Args:
        transport: this rank's connection to the other ranks.
    """
    group = SerialTransport(transport).group(range(transport.size))

    def run(blocks: Blocks) -> Tensor:
        """Exchange this rank's blocks, peer by peer. Return the received blocks by sender, [ranks, L, D]."""
        others = [peer for peer in range(transport.size) if peer != transport.rank]
        blocks.received[transport.rank].copy_(blocks.packed[transport.rank])
        group.send_recv([(blocks.packed[p], p) for p in others], [(blocks.received[p], p) for p in others]).wait()
        return blocks.received

    return run


def mpi_alltoall(_transport: Any) -> Variant:
    """Return a function that exchanges blocks by MPI's own all-to-all, for ranks that MPI has started.

    That function takes this rank's `Blocks` and returns the received blocks by sender, [ranks, L, D].
    """
    from cocodiff.comm.mpi_start import initialised_mpi

    world = initialised_mpi().COMM_WORLD.Dup()

    def run(blocks: Blocks) -> Tensor:
        """Exchange this rank's blocks by MPI. Return the received blocks by sender, [ranks, L, D]."""
        world.Alltoall(blocks.packed.numpy(), blocks.received.numpy())
        return blocks.received

    return run


def library_alltoall(blocks: Blocks) -> Tensor:
    """Exchange blocks among all ranks by torch.distributed's own all-to-all. Return the received blocks by sender."""
    dist.all_to_all_single(blocks.received, blocks.packed)  # without sizes, so that a library may use a faster way
    return blocks.received


Others = dict[str, Callable[[Any], Variant]]  # variants that are not ours, made by these functions of the transport
OTHERS: Others = {"flat_serial": flat_serial, "library": lambda _: library_alltoall, "mpi": mpi_alltoall}


def check_results(blocks: Blocks, variants: Mapping[str, Callable[[], Tensor]], rank: int) -> None:
    """Run each variant of an exchange once. Raise RuntimeError if this rank receives other numbers than were sent.

    The numbers are random, but follow from the sender's rank.

    Args:
        blocks: this rank's blocks, as `random_blocks` returns them.
        variants: the functions to check, by name. They return the received blocks by sender.
        rank: this rank's number.
    """
    senders = range(len(blocks.packed))
    of_sender = [torch.randn(blocks.packed.shape, generator=torch.Generator().manual_seed(s))[rank] for s in senders]
    expected = torch.stack(of_sender).to(blocks.packed.device)
    for name, variant in variants.items():
        blocks.received.zero_()
        got = variant()
        if not torch.equal(got, expected):
            raise RuntimeError(f"rank {rank}: {name} brought {int((got != expected).sum())} wrong numbers")


# Results --------------------------------------------------------------------------------------------------------------


def bound_s(topology: Topology, block_bytes: int) -> float | None:
    """Return the least seconds that an all-to-all takes on the machine's links, as a bound for measured times.

    On an emulated machine they are multiplied by the scale of the emulation. Return None if the machine file does not
    describe links.

    Args:
        topology: the places of ranks, and their links.
        block_bytes: size of the block that each rank sends to each other.
    """
    best = None if topology.machine.links == Links() else alltoall_bound(topology, block_bytes)
    return None if best is None else best * emulated().get("scale", 1.0)


def rows_of(
    size: float,
    slowest: Mapping[str, list[float]],
    sent: Mapping[str, Mapping[str, int]],
    of_tapa: Sequence[Span],
    best_s: float | None,
) -> list[Row]:
    """Return a row of bench.json for each variant of the exchange, and one for the links' bound if it is known.

    Args:
        size: MB of a rank's whole tensor.
        slowest: seconds of each measurement on its slowest rank, by variant.
        sent: bytes of all ranks in a call, by variant and class of link.
        of_tapa: the spans of all ranks in TAPA, the exchange in two phases; its row has the seconds of each phase.
        best_s: seconds by the bound; None if unknown.
    """
    found = common.rows(f"{size:g}MB", slowest, sent, common.compared_with(slowest, "flat", "tapa"))
    for row in found:
        if row["variant"] == "tapa":
            for key, lane in (("phase1_s", "sibling"), ("phase2_s", "plane")):
                lengths = [(span.end_ns - span.start_ns) / 1e9 for span in of_tapa if span.lane == lane]
                row[key] = statistics.median(lengths) if lengths else None  # on a single card there is no second phase
        row["efficiency"] = None if best_s is None else best_s / row["median_s"]
    if best_s is None:
        return found
    times = dict.fromkeys(("median_s", "p10_s", "p90_s"), best_s)
    bound = {"case": found[0]["case"], "variant": "bound", **times, "n": 0, "bytes": None, "efficiency": 1.0}
    return [*found, bound]


def more_words(row: Row) -> list[str]:
    """Return more text to print after the times of a row of results of `bench alltoall`, in parts.

    They are the bound's time divided by the row's, and the times of TAPA's two phases.
    """
    words = [f"{row['efficiency']:.3f} of the bound"] if row["n"] and row["efficiency"] is not None else []
    phases = [(number, row.get(f"phase{number}_s")) for number in (1, 2)]
    return words + [f"phase {number} {seconds * 1e3:.2f} ms" for number, seconds in phases if seconds is not None]


def tuned_rows(measured: Sequence[Row]) -> list[tuple[float | None, str]]:
    """Return the fastest exchange of each range of sizes, by ascending size, for the table of the exchange `auto`.

    Each is (limit in MB, name of the exchange). A limit is the geometric mean of two neighbouring sizes; the last is
    None.

    Args:
        measured: the rows of bench.json.
    """
    fastest: dict[float, str] = {}
    for case in dict.fromkeys(row["case"] for row in measured):
        of_case = [row for row in measured if row["case"] == case and row["variant"] in TUNED]
        fastest[float(case.removesuffix("MB"))] = min(of_case, key=lambda row: row["median_s"])["variant"]
    sizes, table = sorted(fastest), []
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        if following is None or fastest[following] != fastest[size]:
            limit = None if following is None else float(f"{(size * following) ** 0.5:.3g}")
            table.append((limit, fastest[size]))
    return table


def write_table(topology: Topology, measured: Sequence[Row], path: Path) -> None:
    """Write exchange.yaml, the table of the fastest exchange by size, from which the exchange `auto` chooses.

    Args:
        topology: the machine and its number of nodes, under which the table is listed.
        measured: the rows of bench.json.
        path: the file.
    """
    import yaml

    rows_ = [list(row) for row in tuned_rows(measured)]
    path.write_text(yaml.safe_dump({topology.machine.name: {topology.nodes: rows_}}, sort_keys=False))
