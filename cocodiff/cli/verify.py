"""`cocodiff verify`: test if a model gives the same result on several ranks as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.config.errors import UserError
from cocodiff.config.files import read_json
from cocodiff.config.packages import import_diffusers
from cocodiff.jobs.model_checks import stored_dtype
from cocodiff.jobs.options import LOG_LEVEL, Option, check_counts, parse
from cocodiff.jobs.terminal import quiet_libraries, say

ABOUT = (
    "Runs a model's transformer on ranks that are threads of this process, with every exact setting that it allows, "
    "with compiled blocks and with the step cache, and compares with one process. Exit code 0: all that run are exact; "
    "1: one is not; 2: none runs."
)
OPTIONS = (
    Option("model", "folder of a pipeline, or of a transformer, in diffusers' layout; safetensors only", required=True),
    Option("inputs", "file of torch.save with a dictionary of the arguments of a call: what a bare transformer needs"),
    Option("prompt", "what a pipeline is asked for", "a tooth"),
    Option("steps", "of a pipeline", 2, type=int),
    *(Option(name, "of a pipeline's image; by default the pipeline's own", type=int) for name in ("height", "width")),
    Option("frames", "of a pipeline's video; by default the pipeline's own", type=int),
    Option("ranks", "numbers of ranks to try (default: 2 3)", [2, 3], type=int, many=True),
    Option(
        "compile",
        "give the graphs of compiled blocks to torch's compiler, which takes a minute; else they run as they are, "
        "which takes seconds and tells how blocks break into graphs, not how a compiler rounds",
        False,
        type=bool,
    ),
    LOG_LEVEL,
)


def start(words: Sequence[str], launch: Launch) -> int:
    """Run `cocodiff verify` with its options, and return its exit code.

    Args:
        words: the options.
        launch: how this process was started.
    """
    values = parse("verify", ABOUT, OPTIONS, words)
    check_counts(values, "steps", "height", "width", "frames", "ranks")
    if launch.size != 1:
        raise UserError(f"verify starts its ranks itself, and here are {launch.size or 'some'} of them: start it once")
    quiet_libraries(values["log_level"])
    from cocodiff.engine.verification import verify

    target = load(values["model"])
    found = verify(target, inputs_of(target, values), ranks=values["ranks"], compile=values["compile"])
    say(str(found))
    return found.exit_code


def load(model: str) -> Any:
    """Load the pipeline or the transformer that a folder holds, and return it.

    Its dtype is that of most of the transformer's stored weights if it is bf16 or fp16, else float32. Raise UserError
    if the folder has neither.

    Args:
        model: path of the folder, in diffusers' layout.
    """
    import torch

    diffusers, folder = import_diffusers(), Path(model)
    is_pipeline = (folder / "model_index.json").is_file()
    stored = stored_dtype(folder / "transformer" if is_pipeline else folder)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(stored or "", torch.float32)
    how = {"torch_dtype": dtype, "local_files_only": True}
    if is_pipeline:
        index = read_json(folder / "model_index.json")
        absent = {name: None for name, part in index.items() if part == [None, None]}
        return diffusers.DiffusionPipeline.from_pretrained(model, use_safetensors=True, **how, **absent)
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {model}: neither model_index.json nor config.json is there: name a model's folder")
    name = read_json(folder / "config.json").get("_class_name", "")
    kind: Any = getattr(diffusers, str(name), None)
    if not hasattr(kind, "from_pretrained"):
        raise UserError(f"--model {model}: its config.json names the class {name!r}, which diffusers has not")
    return kind.from_pretrained(model, use_safetensors=True, **how).eval()


def inputs_of(target: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a model is called, by name: those of the file given by --inputs, or a pipeline's
    prompt, steps and size.

    Tensors of the file are converted to the model's dtype. Raise UserError for a file that holds no such arguments, and
    for a transformer without a file.

    Args:
        target: the pipeline or the transformer.
        values: the command's options by name.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    if (path := values["inputs"]) is not None:
        try:
            inputs = torch.load(path, weights_only=True)
        except Exception as error:
            raise UserError(f"--inputs {path}: no file of torch.save that holds tensors: {error}") from error
        if not isinstance(inputs, dict):
            raise UserError(f"--inputs {path} holds a {type(inputs).__name__}: save a dictionary")
        return tree_map_only(torch.Tensor, lambda x: x.to(target.dtype) if x.is_floating_point() else x, inputs)
    if isinstance(target, torch.nn.Module):
        raise UserError(f"a {type(target).__name__} alone: say what it is called with, by --inputs FILE")
    sides = {"height": values["height"], "width": values["width"], "num_frames": values["frames"]}
    given = {name: value for name, value in sides.items() if value is not None}
    return {"prompt": values["prompt"], "num_inference_steps": values["steps"]} | given
