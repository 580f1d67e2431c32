"""`cocodiff bench memory`: what one step takes of a CPU node's memory, beside what `memory.py` predicts.

Measured is the proportional set size of all ranks (a page that n processes share counts 1/n in each), sampled while the
step runs, above what it was when the libraries were imported and the ranks connected. Linux only.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import detect
from cocodiff.config import preset_names
from cocodiff.console.options import Option, check_counts
from cocodiff.console.terminal import say
from cocodiff.errors import UserError
from cocodiff.jobs.session import import_before_fork, load_requested
from cocodiff.loading.pipelines import EMBEDDED, Request, torch_dtype
from cocodiff.models import family_of
from cocodiff.models.family import INPAINT
from cocodiff.models.tokens import image_and_text
from cocodiff.outputs.folder import OutputFolder
from cocodiff.planning.memory import MIB, Load, RankMemory, node_memory, shape_of_config, size_run
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Values, engine_config, meet

RANDOM, VAE = "random", "vae"
SAMPLE_S = 0.05
HEAD_DIM, CHANNELS, TEXT_CHANNELS, POOLED, LAYERS = 64, 16, 4096, 2048, 12
OPTIONS = common.with_common_options(
    Option(
        "model",
        "embedded (a whole pipeline call), random (a transformer of SD3's kind) or vae (decoding, by SD3.5's VAE)",
        RANDOM,
        choices=(RANDOM, EMBEDDED, VAE),
    ),
    Option("billions", "parameters of the random one, in billions", 1.0, type=float),
    Option("size", "side of the image in pixels, for the random one and the VAE", 1024, type=int),
    Option("tile", "side of the VAE's tiles in pixels, for vae tiled", 256, type=int),
    Option("text_tokens", "tokens of its prompt", 333, type=int),
    Option("batch", "batch rows of a call", 1, type=int),
    Option("preset", "what runs", "tapa"),
    Option("steps", "steps measured", 1, type=int),
    Option("dtype", "of weights and activations; the embedded model's are fp32", "bf16", choices=("bf16", "fp32")),
    Option("weights", "folder that keeps the random model; default: a temporary one"),
    Option("device", "what ranks compute on", "cpu", choices=("cpu",)),
)


@dataclass
class Sampler:
    """The largest sum of the proportional set sizes of some processes, of rank 0's host, while it is open. seen: every
    process's bytes at that moment, by kind."""

    processes: Sequence[int]
    peak: int = 0
    seen: list[dict[str, int]] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                self.sample()
                done.wait(SAMPLE_S)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.sample()

    def sample(self) -> None:
        try:
            seen = [proportional(process) for process in self.processes]
        except FileNotFoundError:  # a rank is gone: the run ends with its error
            return
        total = sum(one["Pss"] for one in seen)
        if total > self.peak:
            self.peak, self.seen = total, seen


def proportional(process: int) -> dict[str, int]:
    """A process's proportional set size in bytes: whole, and of anonymous, file and shared pages."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss")}
    return {"Pss": 0, "Pss_Anon": 0, "Pss_File": 0, "Pss_Shmem": 0} | values


def check(values: Values, ranks: int | None) -> None:
    check_counts(values, "size", "tile", "batch", "steps", "ranks")
    engine_config(values, values["preset"])
    if values["model"] == VAE:
        for name, least in (("size", 8), ("tile", 32)):
            if values[name] % least:
                of = "tiles need" if name == "tile" else "images need"
                raise UserError(f"--{name} {values[name]}: the VAE's {of} a multiple of {least} pixels a side")
    if values["preset"] not in preset_names() or not values["billions"] > 0:
        raise UserError(f"--billions {values['billions']:g}: give a number above 0")
    if not Path("/proc/self/smaps_rollup").exists():
        raise UserError("bench memory reads /proc/PID/smaps_rollup, which this system does not have: run it on Linux")
    if values["model"] == RANDOM and ranks is not None and ranks > heads_of(values["billions"]):
        raise UserError(f"{ranks} ranks and {heads_of(values['billions'])} heads: use fewer ranks or more --billions")


def heads_of(billions: float) -> int:
    """Heads of a random SD3 transformer of so many parameters: about 36 width^2 a layer."""
    return max(1, round((billions * 1e9 / (36 * LAYERS)) ** 0.5 / HEAD_DIM))


def imports(values: Values) -> None:
    """All that ranks import; objects that live on are kept out of their collections, which would copy their pages."""
    if values["model"] == EMBEDDED:
        import_before_fork(Request(EMBEDDED, INPAINT))
    for name in ("diffusers.models.transformers.transformer_sd3", "cocodiff.engine", "safetensors.torch"):
        import_module(name)
    if values["model"] == VAE:
        import_module("diffusers.models.autoencoders.autoencoder_kl")
    gc.collect()
    gc.freeze()


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    imports(values)
    forked = detect().kind == "alone" and transport.size > 1
    processes = (transport.gather_object(os.getpid()) or []) + ([os.getppid()] if forked else [])
    sampler, before = Sampler(processes), Sampler(processes)
    with random_model(values, transport) as folder:
        meet(transport)
        if transport.rank == 0:
            before.sample()
        meet(transport)
        call, predicted = measured_call(values, transport, folder)
        meet(transport)
        started = time.monotonic()
        with sampler.open() if transport.rank == 0 else nullcontext():
            for _ in range(values["steps"]):
                call()
            meet(transport)
        if transport.rank == 0:
            report(values, output, transport.size, before, sampler, predicted, time.monotonic() - started)


def measured_call(values: Values, transport: Any, folder: Path) -> tuple[Callable[[], None], RankMemory]:
    """What a step is, and what it is predicted to take. folder: of the random transformer."""
    if values["model"] == VAE:
        from cocodiff_bench.vae import decoding

        return decoding(values, transport)
    return embedded(values, transport) if values["model"] == EMBEDDED else random_one(values, transport, folder)


# Models ---------------------------------------------------------------------------------------------------------------


@contextmanager
def random_model(values: Values, transport: Any) -> Iterator[Path]:
    """The folder of the random transformer's weights, made by rank 0 where there is none yet."""
    kept = values["weights"]
    folder = Path(kept or transport.broadcast_object(tempfile.mkdtemp(prefix="cocodiff-") if not transport.rank else 0))
    try:
        if transport.rank == 0 and values["model"] == RANDOM and not (folder / "config.json").exists():
            _write_random(values, folder)
        yield folder
    finally:
        if transport.rank == 0 and not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _write_random(values: Values, folder: Path) -> None:
    """In a process of its own, so that nothing of it stays in this one's memory."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            import torch
            from diffusers import SD3Transformer2DModel

            heads = heads_of(values["billions"])
            with torch.device("meta"):
                model: Any = SD3Transformer2DModel(**sd3_settings(heads)).to(torch_dtype(values["dtype"]))
            model = model.to_empty(device="cpu")
            noise = torch.randn(2**20).to(torch_dtype(values["dtype"])) * 0.02
            for tensor in [*model.parameters(), *model.buffers()]:
                flat = tensor.data.view(-1)
                flat.copy_(noise.repeat(len(flat) // len(noise) + 1)[: len(flat)])
            model.save_pretrained(folder)
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"could not write a random model of {values['billions']:g} billion parameters to {folder}")


def sd3_settings(heads: int) -> dict[str, Any]:
    return {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_layers": LAYERS,
        "attention_head_dim": HEAD_DIM,
        "num_attention_heads": heads,
        "joint_attention_dim": TEXT_CHANNELS,
        "pooled_projection_dim": POOLED,
        "caption_projection_dim": heads * HEAD_DIM,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    }


def random_one(values: Values, transport: Any, folder: Path) -> tuple[Callable[[], None], RankMemory]:
    """One call of the random transformer, its weights in the file's memory map; and the node's predicted memory."""
    import torch
    from diffusers import SD3Transformer2DModel

    from cocodiff.engine import Engine
    from cocodiff.planning.costs import state_sizes

    dtype = torch_dtype(values["dtype"])
    model: Any = SD3Transformer2DModel.from_pretrained(
        folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True
    ).eval()
    engine = Engine(model, engine_config(values, values["preset"], steps=50), transport)
    shape = shape_of_config(family_of(model), model.config, count(model))
    load = Load(
        image_and_text(shape.image_tokens(values["size"]), values["text_tokens"]),
        values["batch"],
        dtype.itemsize,
        state=state_sizes(engine.config),
    )
    side = values["size"] // 8

    def call() -> None:
        noise = torch.Generator().manual_seed(0)

        def random(*sizes: int) -> Any:
            return torch.randn(values["batch"], *sizes, generator=noise).to(dtype)

        with torch.no_grad(), engine:
            model(
                hidden_states=random(CHANNELS, side, side),
                pooled_projections=random(POOLED),
                encoder_hidden_states=random(values["text_tokens"], TEXT_CHANNELS),
                timestep=torch.full((values["batch"],), 500.0, dtype=dtype),
            )

    return call, node_memory(size_run(shape, engine.topology, load), on_cpu=True)


def count(model: Any) -> int:
    return sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])


def embedded(values: Values, transport: Any) -> tuple[Callable[[], None], RankMemory]:
    """One call of the embedded model's pipeline."""
    import torch

    from cocodiff.engine import Engine
    from cocodiff.planning.costs import state_sizes
    from cocodiff_bench.step import restore_once

    model = load_requested(Request(EMBEDDED, INPAINT), "fp32", transport)
    model.pipe.set_progress_bar_config(disable=True)
    engine = Engine(model.pipe, engine_config(values, values["preset"]), transport)
    side = model.pipe.default_sample_size * model.pipe.vae_scale_factor
    transformer: Any = engine.model
    shape = shape_of_config(family_of(transformer), transformer.config, count(transformer))
    tokens = (model.pipe.default_sample_size // transformer.config.patch_size) ** 2
    load = Load(image_and_text(tokens, 1), values["batch"], 4, state=state_sizes(engine.config))

    def call() -> None:
        with torch.no_grad(), engine:
            restore_once(model, values["batch"], side, values["steps"])

    return call, node_memory(size_run(shape, engine.topology, load), on_cpu=True)


# Results --------------------------------------------------------------------------------------------------------------


def report(
    values: Values,
    output: OutputFolder,
    ranks: int,
    before: Sampler,
    during: Sampler,
    predicted: RankMemory,
    seconds: float,
) -> None:
    measured = during.peak - before.peak
    parts = {
        kind: (sum(one[kind] for one in during.seen) - sum(one[kind] for one in before.seen)) / MIB
        for kind in ("Pss_File", "Pss_Anon", "Pss_Shmem")
    }
    foreseen = {name: getattr(predicted, name) / MIB for name in ("weights", "activations", "cache", "libraries")}
    row = {
        "case": f"{values['model']}, {ranks} rank(s), "
        + (f"vae {values['vae'] or 'one'}" if values["model"] == VAE else f"preset {values['preset']}"),
        "measured_mib": measured / MIB,
        "imports_mib": before.peak / MIB,
        "measured_parts_mib": parts,
        "predicted_mib": predicted.total / MIB,
        "predicted_parts_mib": foreseen,
        "predicted_over_measured": predicted.total / measured,
        "seconds": seconds,
    }
    off = predicted.total - measured
    say(
        f"{row['case']}: {measured / MIB:.0f} MiB above {before.peak / MIB:.0f} MiB of imports; predicted "
        f"{predicted.total / MIB:.0f} MiB, {off / measured:+.1%} ({off / MIB:+.0f} MiB)"
    )
    say("  measured:  " + ", ".join(f"{kind.removeprefix('Pss_').lower()} {mib:.0f}" for kind, mib in parts.items()))
    say("  predicted: " + ", ".join(f"{name} {mib:.0f}" for name, mib in foreseen.items()))
    common.publish(output, values, [row])


BENCHMARK = Benchmark(
    "Measures what one step takes of a node's memory, above the imports, beside what is predicted.",
    OPTIONS,
    check,
    measure,
    imports,
)
