"""`cocodiff bench kernels`: every operation by SYCL, by torch, by the dispatch's choice, beside a copy of its bytes.

Cases are OP/SIZEMB/THREADS; 0MB is one row for one peer, where a call's own cost is all there is. Each number of
threads is a process of its own on so many cores, because libraries read it once. Variants take turns; results are
compared with torch's before anything is timed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocodiff.comm.launch import without_launcher
from cocodiff.config import check_choice
from cocodiff.console.options import Option, check_counts
from cocodiff.console.terminal import note, progress_bar, say
from cocodiff.errors import UserError
from cocodiff.loading.pipelines import torch_dtype
from cocodiff.outputs.folder import OutputFolder
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Row, Values

if TYPE_CHECKING:
    from cocodiff_bench.kernel_cases import Case

OPS = (
    *("pack", "unpack", "gather_pack", "scatter_rows", "l1_score", "select", "qk_norm_rope", "merge_partials"),
    *("encode_residual", "encode_residual_taylor", "note_change", "decode_residual", "decode_residual_taylor"),
    *("decode_residual_onward", "continue_linearly"),
)
OWN_THREADS = "COCODIFF_BENCH_THREADS"  # set for a process that measures with so many
BATCH_MB = 32  # calls of one measurement move so much together: the first finds caches as another variant left them
LAUNCH_CALLS = 50  # of an operation on one row, in one measurement
# Of the faster path at least, in one measurement: less is lost in the machine's other work. A turn that warms up takes
# as long, and so outlasts the 10 ms in which threads of torch's, of the turn before, still look for work of their own.
MEASURED_S = 0.02
OPTIONS = common.with_common_options(
    Option("op", "operations to measure", list(OPS), many=True),
    Option("sizes_mb", "MB of one rank's tensor; 0 is one row", [0, 8], type=int, many=True),
    Option("threads", "numbers of threads", [1], type=int, many=True),
    Option("dtype", "of the tensors", "fp32", choices=("fp32", "bf16", "fp16")),
    Option("repeats", "measurements of each variant", 3, type=int),
)


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "repeats")
    for op in values["op"]:
        check_choice("op", op, OPS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for threads in values["threads"]:
        if not 1 <= threads <= cores:
            raise UserError(f"--threads {threads} on {cores} cores: give 1 to {cores}")
    for size in values["sizes_mb"]:
        if size < 0:
            raise UserError(f"--sizes_mb {size}: give 0 or more")
    if ranks not in (None, 1):
        raise UserError(f"bench kernels on {ranks} ranks: it measures one rank's work, leave --ranks away")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Measures here where this process has the one number of threads asked for, else in processes that have."""
    if transport.device.type != "cpu":
        raise UserError(f"bench kernels times the host's clock, which says nothing on {transport.device.type}")
    here = [int(os.environ.get(OWN_THREADS, 0))] == values["threads"]
    if here:
        measured = list(measure_here(values))
    else:
        measured = [row for threads in values["threads"] for row in measure_apart(values, threads)]
    common.publish(output, values, measured, told=not here)


def measure_apart(values: Values, threads: int) -> list[Row]:
    """The rows of a process with so many threads on so many cores."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--threads", threads, "--out", f"{folder}/out", "--repeats", values["repeats"]]
        words += ["--quiet"] if values["quiet"] else []
        words += ["--dtype", values["dtype"], "--op", *values["op"], "--sizes_mb", *values["sizes_mb"]]
        count = str(threads)
        own = {OWN_THREADS: count, "OMP_NUM_THREADS": count, "DPCPP_CPU_NUM_CUS": count}
        command = [sys.executable, "-m", "cocodiff", "bench", "kernels", *map(str, words)]
        done = subprocess.run(command, env=without_launcher(os.environ) | own, check=False)
        if done.returncode == 2:
            raise UserError(f"nothing was measured with {threads} thread(s): the line above says why")
        if done.returncode:
            raise RuntimeError(f"bench kernels with {threads} threads left with code {done.returncode}")
        measured: list[Row] = json.loads((Path(folder) / "out" / "bench.json").read_text())["rows"]
        return measured


def measure_here(values: Values) -> Iterator[Row]:
    threads = values["threads"][0]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import torch

    torch.set_num_threads(threads)
    if not values["quiet"]:
        ready(threads)
    total = len(values["op"]) * len(values["sizes_mb"])
    with progress_bar("bench kernels", total, not values["quiet"]) as bar:
        for op in values["op"]:
            for size in values["sizes_mb"]:
                measured = case_rows(op, size, values)
                say_case(measured)
                yield from measured
                bar.update()


def ready(threads: int) -> None:
    """Opens the SYCL kernels and says so, as the first use compiles them for a minute or more."""
    import torch

    from cocodiff.kernels import sycl_ops

    note(f"bench kernels, {threads} thread(s): SYCL kernels are compiled now, unless they are kept from an earlier use")
    started = time.perf_counter()
    ops = sycl_ops(torch.device("cpu"), required=True)
    assert ops is not None, "they are required"
    note(f"SYCL kernels on {ops.library.device_name}: ready after {time.perf_counter() - started:.1f} s")


def case_rows(op: str, size_mb: int, values: Values) -> list[Row]:
    """The rows of one case. Variants: sycl, torch, auto, memcpy, and diffusers where that has modules for it."""
    import torch

    from cocodiff.kernels import Kernels, TorchOps
    from cocodiff_bench.kernel_cases import make_case

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
    fastest = min(seconds_of(calls["sycl"]), seconds_of(calls["torch"]))
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
    measured = common.rows(f"{op}/{size_mb}MB/{values['threads'][0]}", seconds, {}, references)
    return [row | {"moved_bytes": case.moved} for row in measured]


def nothing(*_: object) -> None:
    return


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call, roughly: the least of a few."""
    found = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


def check_same(op: str, case: Case, ours: Any, reference: Any) -> None:
    """Raises RuntimeError where the results differ that an operation returns. (Movement is compared by the tests.)"""
    import torch

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


BENCHMARK = Benchmark(
    "Times the engine's operations by SYCL and by torch, beside a copy of the same bytes.",
    OPTIONS,
    check,
    measure,
    lambda values: None,
)
