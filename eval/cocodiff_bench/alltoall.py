"""`cocodiff bench alltoall`: one exchange of equal blocks by every variant in turn, against the links' bound.

Ours are the exchanges as the engine uses them, packing and putting in place included; the others get their buffers
packed. A measurement is the slowest rank's. On an emulated machine (`cocodiff emulate`) traffic is real and times are
so many times longer; the bound is scaled alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocodiff.comm.launch import detect
from cocodiff.commands.emulate.command import emulated
from cocodiff.commands.options import Option, check_counts
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.terminal import progress_bar, say
from cocodiff.config import Config, load_machine
from cocodiff.errors import UserError
from cocodiff.planning.one_peer import SerialTransport
from cocodiff.topology.links import alltoall_bound
from cocodiff.topology.machine import Links, Topology
from cocodiff.trace import Trace
from cocodiff_bench import oneccl
from cocodiff_bench.common import Benchmark, Values, interleave, machine_settings, rows, save, with_common_options

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

OURS = ("flat", "tapa", "split", "auto")
VARIANTS = ("flat", "flat_serial", "gloo", "mpi", "oneccl", "tapa", "split", "auto")
TUNED = ("flat", "tapa", "split")
HEAD_DIM = 128  # of fp32: a row of a block is 512 bytes, as two heads of 128 in bf16 (Qwen-Image on 12 ranks)
ROW_BYTES = 4 * HEAD_DIM
SIZES = [0.06, 0.25, 1.0, 3.0, 6.0, 12.0, 24.0, 48.0]
OPTIONS = with_common_options(
    Option("sizes_mb", "MB (1e6 bytes) of every rank, its own block included", SIZES, type=float, many=True),
    Option("variants", f"of {' '.join(VARIANTS)}; default: those that this launch allows", None, many=True),
    Option("tune", "write exchange.yaml: which of flat, tapa and split auto shall take", False, type=bool),
    Option("exchange_table", "auto's table, instead of the shipped one"),
    Option("repeats", "measurements of each variant", 5, type=int),
    Option("transport", "how ranks talk", "gloo", choices=("gloo", "mpi", "xccl", "ccl", "nccl")),
)


@dataclass(frozen=True)
class Blocks:
    """One exchange: this rank's tensor with a head for every rank, and the same numbers packed, a block a peer."""

    layout: Any
    x_BLHD: Tensor
    packed: Tensor
    received: Tensor

    @property
    def block_bytes(self) -> int:
        return int(self.packed[0].nbytes)


def wanted(values: Values) -> list[str]:
    """The variants to measure. Raises UserError for unknown ones and those that this launch does not allow."""
    if values["tune"]:
        return list(TUNED)
    remedies = {
        "mpi": "start the ranks with MPI: emulate --launcher mpiexec, or mpiexec",
        "oneccl": f"start the ranks with MPI, and name oneCCL's libraries in {oneccl.FOLDER} (launch/oneccl)",
        "gloo": "use gloo",
    }
    under_mpi = detect().kind == "mpi"
    can = {"mpi": under_mpi, "oneccl": under_mpi and oneccl.available(), "gloo": values["transport"] == "gloo"}
    allowed = [name for name in VARIANTS if can.get(name, True)]
    names = [name for word in values["variants"] or allowed for name in word.split(",") if name]
    for name in names:
        if name not in VARIANTS:
            raise UserError(f"--variants {name}: choose from {', '.join(VARIANTS)}")
        if name not in allowed:
            raise UserError(f"--variants {name} on transport {values['transport']}: {remedies[name]}")
    return names


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "repeats", "ranks")
    for size in values["sizes_mb"]:
        if not 0 < size < float("inf"):
            raise UserError(f"--sizes_mb {size:g}: give MB above 0")
    names = wanted(values)
    if ranks is None:
        return
    if ranks < 2:
        raise UserError(f"bench alltoall on {ranks} rank has nothing to exchange: start 2 or more, as with --ranks 12")
    topology = Topology.build(load_machine(values["machine"]), ranks, detect().local_size)
    if "auto" in names and values["variants"]:
        table_for(values, topology)


def table_for(values: Values, topology: Topology) -> Any:
    from cocodiff.assemble import exchange_table

    config = Config(exchange="auto", exchange_table=values["exchange_table"], **machine_settings(values))
    return exchange_table(config, topology)


def import_before_fork(_values: Values) -> None:
    import_module("cocodiff.engine")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    import torch

    topology = Topology.build(load_machine(values["machine"]), transport.size, detect().local_size)
    names = wanted(values)
    if "auto" in names and not values["variants"]:
        try:
            table_for(values, topology)
        except UserError as error:
            names.remove("auto")
            if transport.rank == 0:
                say(f"without auto: {error}")
    traces = {name: Trace(transport.rank) for name in names if name in OURS}
    make = makers(values, topology, transport, traces)
    shown = not values["quiet"] and not transport.rank
    rounds = len(values["sizes_mb"]) * (values["repeats"] + 1) * len(names)
    measured: list[dict[str, Any]] = []
    together = transport.group(range(transport.size)).barrier  # messages of no size: all leave it within a millisecond
    with torch.no_grad(), progress_bar("bench alltoall", rounds, shown) as bar:
        built = {name: make[name]() for name in names}
        for size in values["sizes_mb"]:
            blocks = random_blocks(size, transport)
            variants: dict[str, Callable[[], Any]] = {name: partial(built[name], blocks) for name in names}
            check_results(blocks, variants, transport.rank)
            turns = partial(interleave, variants, units=1, meet=together, tick=bar.update)
            turns(1)
            for trace in traces.values():
                trace.clear()
            of_ranks = transport.gather_object(turns(values["repeats"]))
            records = {name: transport.gather_object(trace.record()) for name, trace in traces.items()}
            if transport.rank == 0:
                measured += rows_of(size, blocks, topology, of_ranks, records)
                say_case(measured, size)
    if transport.rank == 0:
        report(values, output, topology, measured)
    transport.broadcast_object(None)


def random_blocks(size_mb: float, transport: Any) -> Blocks:
    """Blocks as near to size_mb / ranks as whole rows of 512 bytes allow, at least one row."""
    import torch

    from cocodiff.topology.layout import Layout

    ranks = transport.size
    L = max(1, round(size_mb * 1e6 / ranks / ROW_BYTES))
    layout = Layout((L,) * ranks, (0,) * ranks, (1,) * ranks)
    generator = torch.Generator().manual_seed(transport.rank)
    packed = torch.randn(ranks, L, HEAD_DIM, generator=generator)
    x_BLHD = packed.transpose(0, 1).contiguous()[None]
    device = transport.device
    return Blocks(layout, x_BLHD.to(device), packed.to(device), torch.empty_like(packed, device=device))


Variant = Callable[[Blocks], "Tensor"]  # what arrived, [ranks, L, D] by sender


def makers(
    values: Values, topology: Topology, transport: Any, traces: Mapping[str, Trace]
) -> dict[str, Callable[[], Variant]]:
    """Name -> what builds the variant. All ranks build the same ones in the same order: groups are made on the way."""
    ours = {name: partial(exchange_variant, name, values, topology, transport, trace) for name, trace in traces.items()}
    others = {"flat_serial": flat_serial, "gloo": gloo_alltoall, "mpi": mpi_alltoall, "oneccl": oneccl_alltoall}
    return {**ours, **{name: partial(make, transport) for name, make in others.items()}}


def exchange_variant(name: str, values: Values, topology: Topology, transport: Any, trace: Trace) -> Variant:
    from cocodiff.wire.exchange import Exchange

    table = table_for(values, topology) if name == "auto" else None
    exchange = Exchange(name, topology, transport, trace, table)

    def run(blocks: Blocks) -> Tensor:
        (x_BSGD,) = exchange.transfer(blocks.layout).send(x=blocks.x_BLHD).wait()
        return x_BSGD.view(blocks.packed.shape)

    return run


def flat_serial(transport: Any) -> Variant:
    group = SerialTransport(transport).group(range(transport.size))

    def run(blocks: Blocks) -> Tensor:
        others = [peer for peer in range(transport.size) if peer != transport.rank]
        blocks.received[transport.rank].copy_(blocks.packed[transport.rank])
        group.send_recv([(blocks.packed[p], p) for p in others], [(blocks.received[p], p) for p in others]).wait()
        return blocks.received

    return run


def gloo_alltoall(transport: Any) -> Variant:
    import torch.distributed as dist

    process_group = dist.new_group(list(range(transport.size)))

    def run(blocks: Blocks) -> Tensor:
        dist.all_to_all_single(blocks.received, blocks.packed, group=process_group)
        return blocks.received

    return run


def mpi_alltoall(_transport: Any) -> Variant:
    from cocodiff.comm.mpi import initialised_mpi

    world = initialised_mpi().COMM_WORLD.Dup()

    def run(blocks: Blocks) -> Tensor:
        world.Alltoall(blocks.packed.numpy(), blocks.received.numpy())
        return blocks.received

    return run


def oneccl_alltoall(_transport: Any) -> Variant:
    from cocodiff.comm.mpi import initialised_mpi

    exchange = oneccl.alltoall(initialised_mpi().COMM_WORLD)

    def run(blocks: Blocks) -> Tensor:
        exchange(blocks.packed.data_ptr(), blocks.received.data_ptr(), blocks.packed[0].numel())
        return blocks.received

    return run


def check_results(blocks: Blocks, variants: Mapping[str, Callable[[], Tensor]], rank: int) -> None:
    """Raises RuntimeError where a variant brings other numbers than those that every sender has made for this rank."""
    import torch

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
    """Seconds at best, at the emulated scale; None for a machine file that says nothing of its links."""
    best = None if topology.machine.links == Links() else alltoall_bound(topology, block_bytes)
    return None if best is None else best * emulated().get("scale", 1.0)


def rows_of(
    size: float,
    blocks: Blocks,
    topology: Topology,
    of_ranks: Sequence[Mapping[str, list[float]]],
    records: Mapping[str, list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """The variants' rows and the bound's; a measurement is that of its slowest rank."""
    slowest = {name: [max(turn) for turn in zip(*(one[name] for one in of_ranks), strict=True)] for name in of_ranks[0]}
    calls = len(next(iter(slowest.values())))
    sent = {
        name: {
            link: sum(one["bytes"].get(("attention", link), 0) for one in ranks) // calls
            for link in ("sibling", "plane", "cross_plane", "node")
        }
        for name, ranks in records.items()
    }
    best = bound_s(topology, blocks.block_bytes)
    found = rows(f"{size:g}MB", slowest, sent, {name: {"flat": "flat", "tapa": "tapa"} for name in slowest})
    for row in found:
        row["efficiency"] = None if best is None else best / row["median_s"]
        if row["variant"] == "tapa":
            for key, lane in (("phase1_s", "sibling"), ("phase2_s", "plane")):
                spans = [s for one in records["tapa"] for s in one["spans"] if s[1] == lane]
                row[key] = statistics.median((s[3] - s[2]) / 1e9 for s in spans) if spans else None
    if best is not None:
        found.append(
            {
                "case": f"{size:g}MB",
                "variant": "bound",
                "median_s": best,
                "p10_s": best,
                "p90_s": best,
                "n": 0,
                "bytes": None,
                "efficiency": 1.0,
            }
        )
    return found


def say_case(measured: Sequence[Mapping[str, Any]], size: float) -> None:
    case = f"{size:g}MB"
    say(f"{size:g} MB per rank")
    for row in (row for row in measured if row["case"] == case):
        line = f"  {row['variant']:<12} {row['median_s'] * 1e3:10.2f} ms"
        if row["n"]:
            line += f" (p10 {row['p10_s'] * 1e3:.2f}, p90 {row['p90_s'] * 1e3:.2f}, n {row['n']})"
        if row["efficiency"] is not None and row["n"]:
            line += f"  {row['efficiency']:.3f} of the bound"
        line += "".join(
            f"  {key.removeprefix('ratio_')} {row[key]:.3f}"
            for key in ("ratio_vs_flat", "ratio_vs_tapa")
            if row.get(key) is not None
        )
        phases = [(number, row.get(f"phase{number}_s")) for number in (1, 2)]  # one card alone has no second
        line += "".join(f"  phase {number} {time_s * 1e3:.2f} ms" for number, time_s in phases if time_s is not None)
        say(line)


def report(values: Values, output: OutputFolder, topology: Topology, measured: list[dict[str, Any]]) -> None:
    from cocodiff_bench.plots import plot_alltoall

    folder = output.open()
    save(folder, measured, values)
    scale = emulated().get("scale")
    where = f"{topology.machine.name}, {topology.size} ranks on {topology.nodes} node(s)"
    plot_alltoall(measured, where + (f", links {scale:g} times slower" if scale else ""), folder / "alltoall.png")
    if values["tune"]:
        write_table(folder / "exchange.yaml", topology, measured)
    output.publish()
    if values["tune"]:
        say(f"auto's table: {output.final / 'exchange.yaml'}; use it with exchange_table")
    say(f"results: {output.final / 'bench.json'}, {output.final / 'alltoall.png'}")


def tuned_rows(measured: Sequence[Mapping[str, Any]]) -> list[tuple[float | None, str]]:
    """The fastest exchange of every size; limits lie in the geometric middle between sizes, the last row has none."""
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


def write_table(path: Path, topology: Topology, measured: Sequence[Mapping[str, Any]]) -> None:
    import yaml

    rows_ = [list(row) for row in tuned_rows(measured)]
    path.write_text(yaml.safe_dump({topology.machine.name: {topology.nodes: rows_}}, sort_keys=False))


BENCHMARK = Benchmark(
    "Times all-to-alls of equal blocks: our exchanges, one peer at a time, the libraries' own, and the links' bound.",
    OPTIONS,
    check,
    import_before_fork,
    measure,
)
