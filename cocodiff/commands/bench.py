"""`cocodiff bench`: paired, interleaved measurements in one run; medians, and the ratio to the baseline beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module

from cocodiff.comm.launch import Launch
from cocodiff.commands.bench_common import Benchmark, machine_settings
from cocodiff.commands.options import parse
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.ranks import run_ranks
from cocodiff.commands.session import settle
from cocodiff.commands.terminal import say
from cocodiff.config import Config, check_choice

KINDS = {
    "step": "a whole denoising step of a pipeline",
    "attention": "one attention call of a stand-in model",
    "kernels": "one rank's data movement and arithmetic, by SYCL and by torch",
    "peers": "one step of a random FLUX model, beside the Ulysses attention of other libraries",
}


def start(words: Sequence[str], launch: Launch) -> int:
    if not words or words[0] in ("-h", "--help"):
        say(
            "\n".join(
                ["usage: cocodiff bench KIND [--help] [options]", "", *(f"  {k:<10} {v}" for k, v in KINDS.items())]
            )
        )
        return 0
    check_choice("benchmark", words[0], KINDS)
    benchmark: Benchmark = import_module(f"cocodiff.commands.bench_{words[0]}").BENCHMARK
    values = parse(f"bench {words[0]}", benchmark.about, benchmark.options, words[1:])
    settle(values, launch)
    ranks = (values["ranks"] or 1) if launch.kind == "alone" else launch.size
    config = Config(**machine_settings(values))
    benchmark.check(values, ranks)
    output = OutputFolder(values["out"], values["overwrite"])
    if launch.kind == "alone":
        benchmark.import_before_fork(values)
    alike = {name: str(value) for name, value in values.items() if name != "ranks"}
    code = 1
    try:
        code = run_ranks(values["ranks"], launch, config, alike, partial(benchmark.measure, values, output))
    finally:
        if code:
            output.discard()
    return code
