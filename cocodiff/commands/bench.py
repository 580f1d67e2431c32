"""`cocodiff bench`: paired, interleaved measurements in one run; medians, and the ratio to the baseline beside them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.commands.families import INPAINT
from cocodiff.commands.options import RUN_OPTIONS, Option, check_counts, parse, preset_configs
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.pipelines import EMBEDDED, Model, Request, check_model
from cocodiff.commands.session import DTYPES, Job, load_on_rank, run_job, settle
from cocodiff.commands.terminal import progress_bar, say
from cocodiff.config import check_choice

KINDS = ("step",)
PLAIN = "diffusers"
OPTIONS = (
    Option("model", "folder in diffusers' layout or hub id, instead of the embedded model", EMBEDDED),
    Option("preset", "what to measure beside the baseline", ["flat", "tapa"], many=True),
    Option("batch", "images in one call", 1, type=int),
    Option("steps", "denoising steps of one pipeline call", 10, type=int),
    Option("repeats", "measurements of each variant", 9, type=int),
    Option("dtype", "arithmetic; auto is fp32 on CPU and bf16 elsewhere", "auto", choices=DTYPES),
    Option("out", "folder of bench.json", "bench"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    *RUN_OPTIONS,
)


def start(words: Sequence[str], launch: Launch) -> int:
    if not words or words[0] in ("-h", "--help"):
        say(f"usage: cocodiff bench {'|'.join(KINDS)} [options]; see cocodiff bench step --help")
        return 0
    check_choice("benchmark", words[0], KINDS)
    started = time.monotonic()
    about = "Times a whole denoising step: plain diffusers against cocodiff on one rank, or presets on several."
    values = parse(f"bench {words[0]}", about, OPTIONS, words[1:])
    ranks = settle(values, launch)
    check_counts(values, "batch", "steps", "repeats")
    presets, request = preset_configs(values), Request(values["model"], INPAINT)
    check_model(request, ranks)
    job = Job(values, request, presets, OutputFolder(values["out"], values["overwrite"]), started)
    return run_job(job, launch, measure_step)


def measure_step(job: Job, transport: Any) -> None:
    """Whole pipeline calls, the variants in turn; the time of a step is the call's divided by its steps."""
    import torch

    from cocodiff.engine import Engine

    values, model = job.values, load_on_rank(job, transport)
    model.pipe.set_progress_bar_config(disable=True)
    side = model.pipe.default_sample_size * model.pipe.vae_scale_factor
    call = partial(restore_once, model, values["batch"], side, values["steps"])
    engines = {name: Engine(model.pipe, config, transport) for name, config in job.presets.items()}

    def parallel(engine: Engine) -> None:
        with engine:
            call()

    variants: dict[str, Callable[[], None]] = {name: partial(parallel, engine) for name, engine in engines.items()}
    if transport.size == 1:
        variants = {PLAIN: call} | variants  # on several ranks the plain pipeline would do everything on each
    rounds = values["repeats"] + 1
    with (
        torch.no_grad(),
        progress_bar("bench step", rounds * len(variants), not values["quiet"] and not transport.rank) as bar,
    ):
        seconds = interleave(variants, rounds, values["steps"], lambda: transport.broadcast_object(None), bar.update)
    traffic = {name: engine.bytes() for name, engine in engines.items()}
    if transport.rank == 0:
        calls = rounds * values["steps"]
        sent = {name: {link: count // calls for link, count in total.items()} for name, total in traffic.items()}
        case = f"{model.name} {side}x{side} batch {values['batch']}, {transport.size} rank(s)"
        write(job.output, rows(case, seconds, sent, baseline=next(iter(variants))), values)
    transport.broadcast_object(None)


def restore_once(model: Model, batch: int, side: int, steps: int) -> None:
    import torch

    noise = torch.Generator().manual_seed(0)
    mask_BCHW = torch.zeros(batch, 1, side, side)
    mask_BCHW[..., side // 4 : side - side // 4, side // 4 : side - side // 4] = 1
    model.pipe(
        image=torch.rand(batch, 3, side, side, generator=noise), mask_image=mask_BCHW, height=side, width=side,
        strength=1.0, num_inference_steps=steps, generator=noise, output_type="latent",
        **model.arguments(batch),
    )  # fmt: skip


def interleave(
    variants: dict[str, Callable[[], None]], rounds: int, steps: int, meet: Callable[[], Any], tick: Callable[[], Any]
) -> dict[str, list[float]]:
    """Seconds per step of each variant. Every round runs all variants, forwards and backwards in turn, so that drift
    of the machine falls on all alike; the first round warms up and is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        order = list(variants) if number % 2 else list(variants)[::-1]
        for name in order:
            meet()
            started = time.perf_counter()
            variants[name]()
            seconds[name].append((time.perf_counter() - started) / steps)
            tick()
    return {name: values[1:] for name, values in seconds.items()}


def rows(
    case: str, seconds: dict[str, list[float]], sent: dict[str, dict[str, int]], baseline: str
) -> list[dict[str, Any]]:
    """Rows of bench.json. Ratios are medians of the paired ratios, one for each round."""

    def ratio(name: str, to: str) -> float | None:
        if to not in seconds:
            return None
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))

    result = []
    for name, values in seconds.items():
        cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
        result.append(
            {
                "case": case,
                "variant": name,
                "median_s": statistics.median(values),
                "p10_s": cuts[0],
                "p90_s": cuts[-1],
                "n": len(values),
                "bytes": sent.get(name),
                "ratio_vs_flat": ratio(name, "flat"),
                f"ratio_vs_{baseline}": ratio(name, baseline),
            }
        )
    return result


def write(output: OutputFolder, measured: list[dict[str, Any]], values: dict[str, Any]) -> None:
    import yaml

    from cocodiff.commands.outputs import MARK

    folder: Path = output.open()
    (folder / "bench.json").write_text(json.dumps({"schema": 1, "rows": measured}, indent=1))
    (folder / MARK).write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}, sort_keys=False))
    output.publish()
    ratios = [key for key in measured[0] if key.startswith("ratio_vs_")]
    say(measured[0]["case"])
    for row in measured:
        shown = "  ".join(f"{key.removeprefix('ratio_')} {row[key]:.3f}" for key in ratios if row[key] is not None)
        say(f"  {row['variant']:<10} {row['median_s'] * 1e3:8.2f} ms a step (p10 {row['p10_s'] * 1e3:.2f}, "
            f"p90 {row['p90_s'] * 1e3:.2f}, n {row['n']})  {shown}")  # fmt: skip
    say(f"results: {output.final / 'bench.json'}")
