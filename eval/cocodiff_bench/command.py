"""`cocodiff bench`: paired, interleaved measurements in one run, as medians with the ratio to the baseline.

A kind of benchmark is a module that has

    ABOUT, OPTIONS;
    check(values, ranks): raises UserError for what this number of ranks cannot measure (None: not known yet);
    measure(values, output, transport): one rank's part;
    import_before_fork(values): imports what all ranks need, before they are forked; by default the engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.config.config import shipped_names
from cocodiff.config.errors import OwnRankError, UserError, check_choice
from cocodiff.jobs.folder import REFUSED, OutputFolder
from cocodiff.jobs.options import parse, with_settings
from cocodiff.jobs.ranks import run_holding, settle
from cocodiff.jobs.terminal import say
from cocodiff_bench.common import Values, engine_config, of_benchmarks

KINDS = {
    "alltoall": "one exchange, beside the libraries' own and the links' bound",
    "step": "a whole denoising step of a pipeline; with --model qwen-image and the like, of its shape alone",
    "attention": "one attention call alone, in one process or shared by ranks",
    "latte": "one step of a random Latte, transposed in slices or not, beside Ulysses",
    "peers": "one step of a random FLUX model, beside the Ulysses attention of other libraries",
}


def module_of(words: Sequence[str]) -> str:
    """Return the name of the module, in cocodiff_bench, that runs a benchmark.

    `bench step` has two: for a pipeline, and for the shape of a model only, if `--model` is a name in configs/models or
    a file like those.

    Args:
        words: the command line after `cocodiff bench`. The first word is the kind of benchmark.
    """
    given = [b for a, b in pairwise(words) if a == "--model"]
    given += [word.partition("=")[2] for word in words if word.startswith("--model=")]
    of_shape = any(name in shipped_names("models") or name.endswith(".yaml") for name in given)
    return "model_step" if words[0] == "step" and of_shape else words[0]


def start(words: Sequence[str], launch: Launch) -> int:
    """Run `cocodiff bench`, with all its ranks. Return the exit code of the command.

    Args:
        words: the command line after `cocodiff bench`: the kind of benchmark and its options. Without a kind, print the
            kinds.
        launch: how this process was started.
    """
    if not words or words[0] in ("-h", "--help"):
        kinds = [f"  {kind:<10} {about}" for kind, about in KINDS.items()]
        say("\n".join(["usage: cocodiff bench KIND [--help] [options]", "", *kinds]))
        return 0
    check_choice("benchmark", words[0], KINDS)
    benchmark = import_module(f"cocodiff_bench.{module_of(words)}")
    values = parse(f"bench {words[0]}", benchmark.ABOUT, with_settings(benchmark.OPTIONS, of_benchmarks), words[1:])
    given = os.environ.get("OMP_NUM_THREADS")
    launch, ranks = settle(values, launch)
    if not given:  # some benchmarks have imported torch by now
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = engine_config(values)
    benchmark.check(values, ranks)
    output = OutputFolder(values["out"], values["overwrite"])
    imports = getattr(benchmark, "import_before_fork", import_engine)
    return run_holding(
        output, values, launch, config, partial(run, benchmark, values, output), partial(imports, values)
    )


def import_engine(_values: Values) -> None:
    """Import the engine before ranks are forked, for benchmarks without a function of their own for that.

    Args:
        _values: the command's options, not used.
    """
    import_module("cocodiff.engine.engine")


def run(benchmark: Any, values: Values, output: OutputFolder, transport: Any) -> None:
    """Run one rank's part of a benchmark. Return when rank 0 has written the results.

    If these ranks cannot measure it, for example because it does not fit a tile, rank 0 writes the reason to a file: a
    launcher may change the exit code.

    Args:
        benchmark: the benchmark's module.
        values: the command's options.
        output: folder of the results.
        transport: this rank's connection to the other ranks.
    """
    try:
        benchmark.measure(values, output, transport)
    except UserError as error:
        if transport.rank == 0 and not isinstance(error, OwnRankError):
            (output.final / REFUSED).write_text(f"{error}\n")
        raise
    transport.broadcast_value(None)
