"""`cocodiff bench attention`: one attention call, without a model.

The ways in one process are: the whole matrix of scores (naive), keys in blocks whose parts are merged (blocks), torch's
own fused kernel (torch), and the bound that memory sets (triad: STREAM's a = b + s c). On several ranks, which have a
part of the tokens each: Ulysses, and rings in which keys, queries (token) or both (streaming) are sent. With a single
query (a decoder's next token), each rank attends to its own keys and all ranks merge the parts (distributed streaming
attention, section 3.3). Inside `cocodiff emulate`, arithmetic may be replaced by waits as long as the machine file's
device would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cocodiff_eval.harness.replicas import topology_of
from torch import Tensor

from cocodiff.attention.local import LocalAttention, Partial, all_merged, partial_attention
from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.launch import emulated
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.errors import UserError
from cocodiff.engine.assemble import AttentionWork, build_strategy, mesh_of
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import Option, check_counts
from cocodiff.kernels import Kernels
from cocodiff.topology import Topology
from cocodiff.topology.layout import Segment
from cocodiff_bench import common
from cocodiff_bench.common import Row, Values
from cocodiff_bench.random_models import DTYPES
from cocodiff_bench.stand_in import Clock, RooflineAttention

ALONE = ("naive", "blocks", "torch", "triad")
SHARED: dict[str, dict[str, Any]] = {  # ways of several ranks, with the settings of each besides the machine's
    **{name: {"exchange": name} for name in ("flat", "tapa", "split")},
    **{name: {"ring_kind": name} for name in ("keys", "token", "streaming")},
    "torch_ring": {},  # torch's own: torch.distributed.tensor.experimental
    "merged": {},
}
STATUS = Path("/proc/self")  # where Linux reports this process's memory
TRIAD_NUMBERS = 1 << 24  # 64 MiB a tensor: more than caches hold
ABOUT = "Times one attention call alone, in one process by several ways, or shared by ranks."
OPTIONS = common.with_common_options(
    Option("tokens", "of the sequence", [4096], type=int, many=True),
    Option("heads", "attention heads", 1, type=int),
    Option("head_dim", "their channels", 128, type=int),
    Option("one_query", "attend from one token, as a decoder does, instead of from all", False, type=bool),
    Option(
        "ways",
        "of one process, or of several ranks (merged: with one query); default: all that there are",
        None,
        many=True,
        choices=(*ALONE, *SHARED),
    ),
    Option("block", "keys of a block, for the way blocks", [128], type=int, many=True),
    Option("threads", "of one process", [1], type=int, many=True),
    Option("dtype", "of the tensors", "fp32", choices=tuple(DTYPES)),
    Option("waits", "wait as long as the machine's device computes, in an emulation", False, type=bool),
)


class CallTensors(NamedTuple):
    """The tensors of one rank in one attention call that `bench attention` times."""

    tokens: int  # number of all ranks' tokens together
    q_BLHD: Tensor  # this rank's queries; with a single query one row that is the same on all ranks
    k_BLHD: Tensor  # this rank's keys
    v_BLHD: Tensor  # this rank's values

    @classmethod
    def random(cls, tokens: int, values: Values, rank: int, topology: Topology) -> CallTensors:
        """Return random queries, keys and values for this rank.

        Args:
            tokens: number of all ranks' tokens together.
            values: the command's options, with heads and dtype.
            rank: this rank's number.
            topology: the places of ranks, which divides tokens among them.
        """
        own = Segment("tokens", tokens).shares(topology)[rank]

        def numbers(seed: int, rows: int) -> Tensor:
            generator, shape = torch.Generator().manual_seed(seed), (1, rows, values["heads"], values["head_dim"])
            return torch.randn(shape, generator=generator).to(DTYPES[values["dtype"]])

        query = numbers(0, 1) if values["one_query"] else numbers(3 * rank + 1, own)
        return cls(tokens, query, numbers(3 * rank + 2, own), numbers(3 * rank + 3, own))

    @property
    def about(self) -> str:
        """The sizes of the call in words, as the title of its results."""
        _, L, H, D = self.q_BLHD.shape
        return f"{self.tokens} tokens, {H} head{'s'[: H > 1]} of {D}" + (", one query" if L == 1 else "")


def ways_of(values: Values, ranks: int) -> list[str]:
    """Return the names of the ways to compute attention that are measured: those of `--ways`, or all possible ones.

    Raise UserError on one rank for ways that need several, and on several for ways of one process.

    Args:
        values: the command's options.
        ranks: number of ranks.
    """
    possible = list(ALONE) if ranks == 1 else ["merged"] if values["one_query"] else [*SHARED][:-1]
    chosen: list[str] = values["ways"] or possible
    for name in chosen:
        if name not in possible:
            asked = f"{ranks} rank(s)" + (" with one query" if values["one_query"] else "")
            raise UserError(f"--ways {name} on {asked}: choose from {', '.join(possible)}")
    return chosen


def check(values: Values, ranks: int | None) -> None:
    """Raise UserError for options of `bench attention` that cannot be measured on these ranks.

    Args:
        values: the command's options.
        ranks: number of ranks of the launch; None if unknown, and then not checked.
    """
    check_counts(values, "heads", "head_dim", "repeats", "ranks")
    for name in ("tokens", "block", "threads"):
        for number in values[name]:
            if number < 1:
                raise UserError(f"--{name} {number}: give 1 or more")
    if values["waits"] and not emulated():
        raise UserError("--waits: on an emulated machine alone: cocodiff emulate -- cocodiff bench attention --waits")
    if ranks is not None:
        ways_of(values, ranks)
        if ranks > min(values["tokens"]):
            raise UserError(f"--tokens {min(values['tokens'])} on {ranks} ranks: give every rank one")
        if "torch_ring" in ways_of(values, ranks) and any(tokens % ranks for tokens in values["tokens"]):
            raise UserError(f"--ways torch_ring needs equal parts: give --tokens multiples of {ranks}, or other --ways")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Run one rank's part of `bench attention`: measure all ways to compute attention, at all numbers of tokens.

    Rank 0 prints and writes the results.

    Args:
        values: the command's options.
        output: folder of the results.
        transport: this rank's connection to the other ranks.
    """
    alone, measured = transport.size == 1, list[Row]()
    ways, topology = ways_of(values, transport.size), topology_of(values["machine"], transport.size)
    for tokens in values["tokens"]:
        call = CallTensors.random(tokens, values, transport.rank, topology)
        traces = {} if alone else {way: Trace(transport.rank) for way in ways}
        variants = {name: run for way in ways if alone for name, run in alone_variants(way, call, values)}
        for way, trace in traces.items():  # all ranks build the same ones in the same order, because that makes groups
            make = {"merged": merging, "torch_ring": torch_ring}.get(way, partial(strategy_of, way))
            variants[way] = make(call, values, topology, transport, trace)
        results = {} if values["waits"] else {name: run() for name, run in variants.items()}
        traces.pop("torch_ring", None)  # its bytes are not counted
        slowest, sent = common.measure_slowest(f"bench attention {tokens}", variants, values, transport, traces)
        if transport.rank == 0:
            peaks = {name: peak_of(run) for name, run in variants.items() if alone}
            measured += rows_of(call, slowest, sent, results, peaks)
    if transport.rank == 0:
        common.publish(output, values, measured)


# One process ----------------------------------------------------------------------------------------------------------


def alone_variants(way: str, call: CallTensors, values: Values) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, function) pairs for a way to compute attention in one process: a pair for every number of threads.

    The way "blocks" has a pair for every number of threads and size of blocks. The way "triad" computes no attention:
    it adds tensors of its own, to measure how fast memory is, as a bound.

    Args:
        way: "naive", "blocks", "torch" or "triad", see ALONE.
        call: the tensors of the attention call.
        values: the command's options.
    """
    runs: dict[str, Callable[[], Any]] = {}
    if way == "triad":
        a, b, c = (torch.ones(TRIAD_NUMBERS) for _ in range(3))
        runs[way] = partial(torch.add, b, c, alpha=3.0, out=a)
    elif way == "blocks":
        runs = {f"blocks of {size}": partial(in_blocks, size, *call[1:]) for size in values["block"]}
    else:
        compute: Callable[..., Any] = naive if way == "naive" else LocalAttention().whole
        runs[way] = partial(compute, *call[1:])
    for name, run in runs.items():
        for threads in values["threads"]:
            yield f"{name} {threads} thread{'s'[: threads > 1]}", partial(with_threads, threads, run)


def with_threads(threads: int, run: Callable[[], Any]) -> Any:
    """Return the result of `run`, called with a given number of torch's threads. The earlier number is restored.

    Ranks that are forked later must find no more than one thread running.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def naive(q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
    """Return the output of attention, computed with the whole matrix of scores in memory."""
    q_BHLD, k_BHSD, v_BHSD = (x.transpose(1, 2) for x in (q_BLHD, k_BSHD, v_BSHD))
    scores_BHLS = q_BHLD @ k_BHSD.transpose(2, 3)
    scores_BHLS *= q_BHLD.shape[-1] ** -0.5
    scores_BHLS -= scores_BHLS.amax(-1, keepdim=True)
    scores_BHLS.exp_()
    return ((scores_BHLS @ v_BHSD) / scores_BHLS.sum(-1, keepdim=True)).transpose(1, 2)


def in_blocks(size: int, q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
    """Return the output of attention, computed for one block of keys at a time. Partial results are merged as rings do.

    Args:
        size: number of keys of a block.
        q_BLHD: the queries.
        k_BSHD: the keys.
        v_BSHD: the values.
    """
    pairs = zip(k_BSHD.split(size, 1), v_BSHD.split(size, 1), strict=True)
    parts = (partial_attention(q_BLHD, k_BTHD, v_BTHD) for k_BTHD, v_BTHD in pairs)
    return all_merged(Kernels(), parts).out_BLHD.to(q_BLHD.dtype)


def peak_of(run: Callable[[], Any]) -> int | None:
    """Return the number of bytes by which a call of `run` makes this process grow at its peak.

    None if the system does not report it; Linux does.
    """

    def resident(name: str) -> int:
        """Return the entry of this process's status whose name starts with `name`, in bytes."""
        lines = (STATUS / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    try:
        (STATUS / "clear_refs").write_text("5")  # resets the peak to the current value
        before = resident("VmRSS")
    except OSError:
        return None
    run()
    return max(0, resident("VmHWM") - before)


# Several ranks --------------------------------------------------------------------------------------------------------


def strategy_of(way: str, call: CallTensors, values: Values, topology: Topology, transport: Any, trace: Trace) -> Any:
    """Return a function that makes an attention call on all ranks by one of the engine's strategies, as in a model.

    Args:
        way: name of an exchange or a ring, in SHARED.
        call: this rank's tensors.
        values: the command's options.
        topology: the places of ranks.
        transport: this rank's connection to the other ranks.
        trace: counts the bytes that are sent.
    """
    _, _, H, D = call.q_BLHD.shape
    segments = (Segment("tokens", call.tokens),)
    own = SHARED[way] | ({"ring": transport.size} if "ring_kind" in SHARED[way] else {})
    config = common.engine_config(values, **own, image_tokens=call.tokens)
    mesh = mesh_of(config, topology, AttentionWork(H, D, segments, itemsize=call.q_BLHD.itemsize))
    context = RankContext(transport, topology, trace, Kernels(config.kernels, trace.note_kernel))
    strategy = build_strategy(config, mesh, context, local_of(values, topology))
    qkv = LazyQKV(lambda: call.q_BLHD, lambda: call.k_BLHD, lambda: call.v_BLHD, segments, H)
    return partial(strategy.attend, qkv, LayerKey("attention"))


def local_of(values: Values, topology: Topology) -> Any:
    """Return the object that computes attention on one rank: on this host, or with `--waits` replaced by waits.

    Args:
        values: the command's options.
        topology: the places of ranks, with the machine whose device is waited for.
    """
    if not values["waits"]:
        return LocalAttention()
    clock = Clock(topology.machine.device)
    clock.dilation = emulated()["scale"]
    return RooflineAttention(clock)


def torch_ring(
    call: CallTensors, values: Values, topology: Topology, transport: Any, _trace: Trace
) -> Callable[[], Tensor]:
    """Return a function that makes an attention call on all ranks by torch's own ring attention.

    It has the kernel that our rings use. The bytes that it sends are not counted.

    Args:
        call: this rank's tensors.
        values: the command's options.
        topology: the places of ranks.
        transport: this rank's connection to the other ranks.
        _trace: not used.
    """
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    theirs._cp_options.enable_load_balance = False  # it balances causal attention
    theirs.set_rotate_method("alltoall")  # keys and values are passed around; the default gathers them all
    local, world = local_of(values, topology), dist.new_group(range(transport.size), backend="gloo")
    q_BHLD, k_BHLD, v_BHLD = (x.transpose(1, 2) for x in call[1:])

    def kernel(q: Tensor, k: Tensor, v: Tensor, **_more: Any) -> tuple[Tensor, Tensor]:
        """Return attention's output and log-sum-exp for a part of the keys, as torch's ring asks for them."""
        part = local.part(*(x.transpose(1, 2) for x in (q, k, v)))
        return part.out_BLHD.transpose(1, 2), part.lse_BLH.transpose(1, 2)

    def run() -> Tensor:
        ring: Any = theirs._templated_ring_attention
        return ring(world, 2, kernel, q_BHLD, k_BHLD, v_BHLD)[0].transpose(1, 2)

    return run


def merging(
    call: CallTensors, values: Values, topology: Topology, transport: Any, trace: Trace
) -> Callable[[], Tensor]:
    """Return a function that makes an attention call of a single query: each rank attends to its own keys.

    All ranks then merge these partial results in the order of ranks. Each rank sends its partial result to all others
    in one message each. The merged result is that of the paper's three all-reduces of maximum, sum and output.

    Args:
        call: this rank's tensors.
        values: the command's options.
        topology: the places of ranks.
        transport: this rank's connection to the other ranks.
        trace: counts the bytes that are sent.
    """
    local, group = local_of(values, topology), transport.group(range(transport.size))
    D = call.q_BLHD.shape[-1]
    others = [rank for rank in range(transport.size) if rank != transport.rank]

    def run() -> Tensor:
        """Attend to this rank's keys, exchange partial results with all ranks, and return the merged output."""
        part = local.part(*call[1:])
        own = torch.cat([part.out_BLHD.float(), part.lse_BLH[..., None]], dim=-1)
        of_ranks = [own if rank == transport.rank else torch.empty_like(own) for rank in range(transport.size)]
        group.send_recv([(own, rank) for rank in others], [(of_ranks[rank], rank) for rank in others]).wait()
        for rank in others:
            trace.count(topology.link_class(transport.rank, rank), own.nbytes, "attention")
        parts = (Partial(one[..., :D].contiguous(), one[..., D].contiguous()) for one in of_ranks)
        return all_merged(Kernels(), parts).out_BLHD

    return run


# Results --------------------------------------------------------------------------------------------------------------


def rows_of(
    call: CallTensors, seconds: dict[str, list[float]], sent: Any, results: dict[str, Any], peaks: dict[str, int | None]
) -> list[Row]:
    """Return the rows of bench.json for one size of attention call, one for each way to compute it, and print them.

    Args:
        call: the tensors, for their sizes.
        seconds: seconds of each measurement, by way.
        sent: bytes by way and class of link.
        results: output of each way, which is compared with the first one's; empty if arithmetic was replaced by waits.
        peaks: bytes by which each way made the process grow (`peak_of`); None if unknown.
    """
    first = next((name for name in seconds if not name.startswith("triad")), "")
    found = common.rows(call.about, seconds, sent, common.compared_with(seconds, first))
    for row in found:
        name = row["variant"]
        row |= {"tokens": call.tokens, "peak_bytes": peaks.get(name)}
        if name.startswith("triad"):
            row["gb_s"] = 3 * 4 * TRIAD_NUMBERS / row["median_s"] / 1e9
        elif results:
            row["difference"] = float((results[name].float() - results[first].float()).abs().max())
    common.say_rows(found, "a call", more_words)
    return found


def more_words(row: Row) -> list[str]:
    """Return more text to print after the times of a row of results of `bench attention`, in parts.

    They are GB/s of memory, the MB by which the process grew, and the MB sent, as far as the row has them.
    """
    words = [f"{row['gb_s']:.2f} GB/s"] if "gb_s" in row else []
    if row.get("peak_bytes") is not None:
        words.append(f"{row['peak_bytes'] / 1e6:.0f} MB more")
    if row["bytes"]:
        words.append(f"{sum(row['bytes'].values()) / 1e6:.2f} MB sent")
    return words
