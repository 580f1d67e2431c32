"""`cocodiff bench kernels`: every operation by SYCL, by torch, by the dispatch's choice, beside a copy of its bytes.

Cases are OP/SIZEMB/THREADS, on as many cores; 0MB is one row for one peer, where a call's own cost is all there is.
Variants take turns; results are compared with torch's before anything is timed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cocodiff.config.config import check_choice
from cocodiff.config.errors import UserError
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import Option, check_counts
from cocodiff.jobs.pipelines import torch_dtype
from cocodiff.jobs.terminal import note, progress_bar, say
from cocodiff.kernels import Kernels, Rows, TorchOps, sycl_ops
from cocodiff.kernels.residual import NOTES, Onward, Prediction, Reconstructions, coded_width
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Row, Values

OPS = (
    *("pack", "unpack", "gather_pack", "scatter_rows", "l1_score", "select", "qk_norm_rope", "merge_partials"),
    *("encode_residual", "encode_residual_taylor", "note_change", "decode_residual", "decode_residual_taylor"),
    *("decode_residual_onward", "continue_linearly"),
)
CODE_BITS = 2
HEADS, HEAD_DIM, PEERS = 24, 128, 12  # FLUX.1 on the ranks of a node
SYCL_THREADS = "DPCPP_CPU_NUM_CUS"  # read by SYCL's CPU device when it is opened
BATCH_MB = 32  # calls of one measurement move so much together: the first finds caches as another variant left them
LAUNCH_CALLS = 50  # of an operation on one row, in one measurement
# Of the faster path at least, in one measurement: less is lost in the machine's other work. A turn that warms up takes
# as long, and so outlasts the 10 ms in which threads of torch's, of the turn before, still look for work of their own.
MEASURED_S = 0.02
Call = Callable[[Any], object]  # of an object with the operations
OPTIONS = common.with_common_options(
    Option("op", "operations to measure", list(OPS), many=True),
    Option("sizes_mb", "MB of one rank's tensor; 0 is one row", [0, 8], type=int, many=True),
    Option("threads", "of all libraries, on as many cores", 1, type=int),
    Option("dtype", "of the tensors", "fp32", choices=("fp32", "bf16", "fp16")),
    Option("repeats", "measurements of each variant", 3, type=int),
)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "repeats")
    for op in values["op"]:
        check_choice("op", op, OPS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= values["threads"] <= cores:
        raise UserError(f"--threads {values['threads']} on {cores} cores: give 1 to {cores}")
    for size in values["sizes_mb"]:
        if size < 0:
            raise UserError(f"--sizes_mb {size}: give 0 or more")
    if ranks not in (None, 1):
        raise UserError(f"bench kernels on {ranks} ranks: it measures one rank's work, leave --ranks away")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    if transport.device.type != "cpu":
        raise UserError(f"bench kernels times the host's clock, which says nothing on {transport.device.type}")
    measured: list[Row] = []
    total = len(values["op"]) * len(values["sizes_mb"])
    with on_cores(values["threads"]):
        if not values["quiet"]:
            ready(values["threads"])
        with progress_bar("bench kernels", total, not values["quiet"]) as bar:
            for op in values["op"]:
                for size in values["sizes_mb"]:
                    of_case = case_rows(op, size, values)
                    say_case(of_case)
                    measured += of_case
                    bar.update()
    common.publish(output, values, measured)


@contextmanager
def on_cores(threads: int) -> Iterator[None]:
    """Meanwhile this process has so many cores and threads, and SYCL if it is opened now."""
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    os.environ[SYCL_THREADS] = str(threads)
    torch.set_num_threads(threads)
    if cores:
        os.sched_setaffinity(0, sorted(cores)[:threads])
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if cores:
            os.sched_setaffinity(0, cores)


def ready(threads: int) -> None:
    """Opens the SYCL kernels and says so, as the first use compiles them for a minute or more."""
    note(f"bench kernels, {threads} thread(s): SYCL kernels are compiled now, unless they are kept from an earlier use")
    started = time.perf_counter()
    ops = sycl_ops(torch.device("cpu"), required=True)
    assert ops is not None, "they are required"
    note(f"SYCL kernels on {ops.library.device_name}: ready after {time.perf_counter() - started:.1f} s")


def case_rows(op: str, size_mb: int, values: Values) -> list[Row]:
    """The rows of one case. Variants: sycl, torch, auto, memcpy, and diffusers where that has modules for it."""
    case = make_case(op, size_mb * 2**20, torch_dtype(values["dtype"]))
    sycl, auto = Kernels("sycl"), Kernels("auto")
    check_same(op, case, sycl, TorchOps())
    source = torch.empty(case.copied or case.moved // 2, dtype=torch.uint8).random_()
    calls: dict[str, Callable[[], object]] = {
        "sycl": partial(case.call, sycl),
        "torch": partial(case.call, TorchOps()),
        "auto": partial(case.call, auto),
        "memcpy": partial(torch.empty_like(source).copy_, source),
    }
    if case.diffusers is not None:
        calls["diffusers"] = case.diffusers
    fastest = min(common.seconds_of(calls["sycl"]), common.seconds_of(calls["torch"]))
    units = max(math.ceil(MEASURED_S / fastest), BATCH_MB // size_mb if size_mb else LAUNCH_CALLS)

    def repeated(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(units):
                call()

        return run

    variants = {name: repeated(call) for name, call in calls.items()}
    common.interleave(variants, 2, units, nothing, nothing)
    seconds = common.interleave(variants, values["repeats"], units, nothing, nothing, warm=True)
    references = common.compared_with(seconds, "torch", "sycl", "memcpy")
    measured = common.rows(f"{op}/{size_mb}MB/{values['threads']}", seconds, {}, references)
    return [row | {"moved_bytes": case.moved} for row in measured]


def nothing(*_: object) -> None:
    return


def check_same(op: str, case: Case, ours: Any, reference: Any) -> None:
    """Raises RuntimeError where the results differ that an operation returns. (Movement is compared by the tests.)"""
    found, expected = case.call(ours), case.call(reference)
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        found, expected = (found,), (expected,)
    if isinstance(found, tuple) and isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            if not torch.allclose(one.double(), other.double(), rtol=1e-2 if one.itemsize == 2 else 1e-5, atol=1e-5):
                raise RuntimeError(
                    f"{op}: SYCL and torch differ by up to {(one.double() - other.double()).abs().max()}"
                )


def say_case(measured: list[Row]) -> None:
    times = ", ".join(f"{row['variant']} {row['median_s'] * 1e6:.1f}" for row in measured)
    of = {row["variant"]: row for row in measured}
    better = min(("sycl", "torch"), key=lambda name: of[name]["median_s"])
    say(
        f"  {measured[0]['case']:<24} us: {times}; sycl/torch {of['sycl']['ratio_vs_torch']:.3f}, "
        f"auto/{better} {of['auto'][f'ratio_vs_{better}']:.3f}, sycl/memcpy {of['sycl']['ratio_vs_memcpy']:.2f}"
    )


# Cases: each operation at a size, as an engine would call it ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """call: one operation, by whoever has it. moved: bytes it has to read and to write. diffusers: the library's own
    modules in the operation's place, where there are such. copied: bytes that `memcpy` copies in its place, by default
    half of what is moved."""

    call: Call
    moved: int
    diffusers: Callable[[], object] | None = None
    copied: int | None = None


def make_case(op: str, size: int, dtype: torch.dtype) -> Case:
    """An operation on `size` bytes (of one tensor, or of q, k and v together); 0 is one row for one peer."""
    row = HEADS * HEAD_DIM * dtype.itemsize
    cases: dict[str, Callable[[int, int, torch.dtype], Case]] = {
        "pack": _pack,
        "unpack": _unpack,
        "gather_pack": _gather,
        "scatter_rows": _scatter,
        "l1_score": _score,
        "select": _select,
        "qk_norm_rope": _norm_rope,
        "merge_partials": _merge,
        "encode_residual": partial(_encode, linear=False),
        "encode_residual_taylor": partial(_encode, linear=True),
        "note_change": _note_change,
        "decode_residual": partial(_decode, linear=False),
        "decode_residual_taylor": partial(_decode, linear=True),
        "decode_residual_onward": partial(_decode, linear=True, onward=True),
        "continue_linearly": _continue,
    }
    return cases[op](max(1, size // row), PEERS if size else 1, dtype)


def _random(L: int, dtype: torch.dtype, heads: int = HEADS) -> Tensor:
    return torch.randn(1, L, heads, HEAD_DIM, generator=torch.Generator().manual_seed(L)).to(dtype)


def _heads_of(peers: int) -> list[slice]:
    return [slice(peer * HEADS // peers, (peer + 1) * HEADS // peers) for peer in range(peers)]


def _pack(L: int, peers: int, dtype: torch.dtype) -> Case:
    """q, k and v to 12 send buffers, heads by heads."""
    qkv = [_random(max(1, L // 3), dtype) for _ in range(3 if peers > 1 else 1)]
    messages = [[x[:, :, heads] for x in qkv] for heads in _heads_of(peers)]
    buffers = [torch.empty(sum(x.numel() for x in message), dtype=dtype) for message in messages]
    return Case(lambda ops: ops.pack(messages, buffers), 2 * sum(x.nbytes for x in qkv))


def _unpack(L: int, peers: int, dtype: torch.dtype) -> Case:
    """The output's heads from 12 received buffers to their places in every row."""
    out_BLHD = torch.empty_like(_random(L, dtype))
    places = [out_BLHD[:, :, heads] for heads in _heads_of(peers)]
    parts = [place.clone(memory_format=torch.contiguous_format) for place in places]
    return Case(lambda ops: ops.unpack(parts, places), 2 * out_BLHD.nbytes)


def _active(L: int) -> Tensor:
    """Half of the rows, at random, ascending."""
    chosen = torch.randperm(L, generator=torch.Generator().manual_seed(L))[: max(1, L // 2)]
    return chosen.sort().values


def _gather(L: int, peers: int, dtype: torch.dtype) -> Case:
    """Half of the rows of a tensor twice the size to 12 send buffers, heads by heads."""
    source_RHD = _random(2 * L, dtype)[0]
    rows = Rows(source_RHD, _active(2 * L))
    messages = [[rows.heads(heads)] for heads in _heads_of(peers)]
    buffers = [torch.empty(messages[0][0].shape.numel(), dtype=dtype) for _ in messages]
    return Case(lambda ops: ops.gather_pack(messages, buffers), 2 * sum(x.nbytes for x in buffers))


def _scatter(L: int, peers: int, dtype: torch.dtype) -> Case:
    """Received rows of two heads to half of the rows of a cache."""
    L *= peers
    cache_RHD, index_K = _random(2 * L, dtype, HEADS // peers)[0], _active(2 * L)
    rows_KHD = _random(len(index_K), dtype, HEADS // peers)[0]
    return Case(lambda ops: ops.scatter_rows([rows_KHD], index_K, [cache_RHD]), 2 * rows_KHD.nbytes)


def _score(L: int, _peers: int, dtype: torch.dtype) -> Case:
    v_BLHD, reference_BLHD = _random(L, dtype), _random(L + 1, dtype)[:, 1:].contiguous()
    return Case(lambda ops: ops.l1_score(v_BLHD, reference_BLHD), 2 * v_BLHD.nbytes)


def _select(L: int, _peers: int, _dtype: torch.dtype) -> Case:
    """Half of the tokens, as many as there are rows in such a tensor on 12 ranks together."""
    score_BN = torch.rand(1, max(2, PEERS * L), generator=torch.Generator().manual_seed(L))
    return Case(lambda ops: ops.select(score_BN, score_BN.numel() // 2), 2 * score_BN.nbytes)


def _norm_rope(L: int, _peers: int, dtype: torch.dtype) -> Case:
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.normalization import RMSNorm

    x_BLHD = _random(L, dtype)
    angle_LD = torch.rand(L, HEAD_DIM // 2).repeat_interleave(2, -1)
    rotary = angle_LD.cos(), angle_LD.sin()
    norm = RMSNorm(HEAD_DIM, 1e-6).to(dtype)
    weight_D = norm.weight.detach()

    def modules() -> Tensor:
        with torch.no_grad():
            return apply_rotary_emb(norm(x_BLHD), rotary, sequence_dim=1)

    return Case(lambda ops: ops.qk_norm_rope(x_BLHD, weight_D, 1e-6, rotary, "pairs"), 2 * x_BLHD.nbytes, modules)


def _merge(L: int, _peers: int, dtype: torch.dtype) -> Case:
    out_BLHD, part_BLHD = _random(L, dtype), _random(L + 1, dtype)[:, 1:].contiguous()
    lse_BLH, part_lse_BLH = torch.randn(1, L, HEADS), torch.randn(1, L, HEADS)
    return Case(lambda ops: ops.merge_partials(out_BLHD, lse_BLH, part_BLHD, part_lse_BLH), 3 * out_BLHD.nbytes)


def _known(L: int, dtype: torch.dtype, linear: bool) -> tuple[Tensor, Reconstructions, Tensor]:
    """A tensor, what is known of it, and room for its code."""
    x_BLHD = _random(L, dtype)
    last_BLHD, before_BLHD = (x_BLHD + _random(L + n, dtype)[:, n:] / 8 for n in (1, 2))
    code_BLHW = torch.zeros(1, L, HEADS, coded_width(HEAD_DIM, CODE_BITS), dtype=torch.uint8)
    return x_BLHD, Reconstructions(last_BLHD, before_BLHD if linear else None), code_BLHW


def _encode(L: int, _peers: int, dtype: torch.dtype, linear: bool) -> Case:
    """The most work of a number of bits. Its state follows from call to call, as a run's does."""
    x_BLHD, known, code_BLHW = _known(L, dtype, linear)
    how, notes_N = Prediction(1.0, linear=linear), torch.zeros(NOTES, dtype=torch.int64)
    moved = (4 if linear else 3) * x_BLHD.nbytes + code_BLHW.nbytes
    return Case(
        lambda ops: ops.encode_residual(x_BLHD, known, how, CODE_BITS, code_BLHW, notes_N), moved, copied=x_BLHD.nbytes
    )


def _note_change(L: int, _peers: int, dtype: torch.dtype) -> Case:
    """Of every 16th row, as a run looks at it."""
    x_BLHD, last_BLHD = (
        _random(L + n, dtype)[:, n::16].contiguous() if n else _random(L, dtype)[:, ::16] for n in (0, 1)
    )
    notes_N, size = torch.zeros(NOTES, dtype=torch.int64), last_BLHD.nbytes
    return Case(lambda ops: ops.note_change(x_BLHD, last_BLHD, notes_N), 3 * size, copied=size)


def _decode(L: int, _peers: int, dtype: torch.dtype, linear: bool, onward: bool = False) -> Case:
    x_BLHD, known, code_BLHW = _known(L, dtype, linear)
    moved = (2 + linear + onward) * known.last.nbytes + code_BLHW.nbytes
    factor, further = 1.0 if linear else None, Onward(0.5, x_BLHD) if onward else None
    return Case(
        lambda ops: ops.decode_residual(code_BLHW, known, factor, CODE_BITS, further), moved, copied=x_BLHD.nbytes
    )


def _continue(L: int, _peers: int, dtype: torch.dtype) -> Case:
    x_BLHD, known, _ = _known(L, dtype, linear=True)
    onward = Onward(0.5, x_BLHD)
    return Case(lambda ops: ops.continue_linearly(*known, onward), 3 * x_BLHD.nbytes, copied=x_BLHD.nbytes)


BENCHMARK = Benchmark(
    "Times the engine's operations by SYCL and by torch, beside a copy of the same bytes.",
    OPTIONS,
    check,
    measure,
    lambda values: None,
)
