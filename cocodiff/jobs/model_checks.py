"""The checks that a model's files fit together, before and after they are loaded. Each mistake is an error of one line.

diffusers itself gives missing weights random values or none, and takes hours to build a model of absurd sizes.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from inspect import signature, unwrap
from pathlib import Path
from typing import Any

from cocodiff.config.errors import UserError
from cocodiff.config.files import irregular, read_json
from cocodiff.models import family_of
from cocodiff.models.family import EXPERTS

REQUIRED = ("transformer", "vae", "scheduler")  # parts that every pipeline has
LIBRARIES = ("diffusers", "transformers")  # packages whose classes model_index.json may name
# Settings of a transformer that are whole numbers of at least 1, if they are given.
SIZES = (
    *("sample_size", "patch_size", "in_channels", "out_channels", "attention_head_dim", "num_attention_heads"),
    *("joint_attention_dim", "pooled_projection_dim", "caption_projection_dim", "pos_embed_max_size"),
)
# Settings of an autoencoder that are lists with one entry per level.
VAE_BLOCKS = ("block_out_channels", "down_block_types", "up_block_types")
MAY_BE_NULL = ("out_channels",)  # settings of SIZES that may be null
LARGEST_SIZE, MOST_LAYERS, MOST_TIMESTEPS = 2**20, 1000, 10**6
TRIAL_STEPS = 4  # steps for which a scheduler makes timesteps as a test
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # endings of weight files that are pickles
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # safetensors' names and ours
# Attributes that pipelines may use of their schedulers.
SCHEDULING = ("scale_noise", "scale_model_input", "init_noise_sigma")
MAKE_SIGMAS = {"linspace", "get_default_z_image_sigmas"}  # functions with which pipelines make a scheduler's sigmas
PIXEL_BYTES = 4 * 3 * 4  # bytes per pixel while an image is decoded and written: 4 copies, 3 channels, float32


# Before a model is loaded ---------------------------------------------------------------------------------------------


def read_shape(path: Path) -> dict[str, Any]:
    """Return the content of a diffusion transformer's config.json: its settings by name.

    Raise UserError if it cannot be read, is not a JSON object, or has sizes that no transformer can have.
    """
    config = read_json(path)
    _check_layers(config, path)
    for key in SIZES:
        value = config.get(key, 1)
        # A video's patch has one side per axis.
        sides = value if key == "patch_size" and isinstance(value, list) and value else [value]
        if not (value is None and key in MAY_BE_NULL) and not all(_is_count(one, LARGEST_SIZE) for one in sides):
            raise UserError(f"{path}: {key} is {value!r}: a whole number from 1 to {LARGEST_SIZE} is needed")
    side = config.get("sample_size", 0) // patch_side(config)
    if "sample_size" in config and side < 1:
        raise UserError(f"{path}: sample_size is below patch_size, so an image has no token: give a larger one")
    if config.get("pos_embed_max_size", side) < side:
        raise UserError(f"{path}: pos_embed_max_size is below the {side} tokens of a side: give at least that")
    axes, width = config.get("axes_dims_rope"), config.get("attention_head_dim")
    if "axes_dims_rope" in config and width is not None and not _is_split(axes, width):
        wanted = f"even numbers are needed that add up to attention_head_dim, {width}"
        raise UserError(f"{path}: axes_dims_rope is {axes!r}: {wanted}")
    return config


def patch_side(config: Mapping[str, Any]) -> int:
    """Return the side of a token in latent pixels. For videos it is the last of the patch's three sides.

    config: content of the transformer's config.json
    """
    patch = config.get("patch_size", 1)
    return int(patch[-1] if isinstance(patch, list) else patch)


def _is_count(value: Any, most: int) -> bool:
    """Return True if a value is an int, not a bool or float, from 1 to `most`."""
    return type(value) is int and 1 <= value <= most


def _is_split(axes: Any, width: int) -> bool:
    """Return True if `axes` is a list of positive even numbers whose sum is `width`.

    Rotary embeddings need that of `axes_dims_rope`, the channels of a head for each axis, and the head's channels.
    """
    return isinstance(axes, list) and all(_is_count(one, width) and one % 2 == 0 for one in axes) and sum(axes) == width


def _check_layers(config: Mapping[str, Any], path: Path) -> None:
    """Raise UserError if a model's config asks for more than MOST_LAYERS layers, which diffusers would build for hours.

    Args:
        config: content of a config.json; each number of a list is checked by itself
        path: the file, for errors
    """
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        layered = re.search(r"layers(_per_block)?$|res_blocks$", key)
        if layered and any(isinstance(one, (int, float)) and not -1 <= one <= MOST_LAYERS for one in counts):
            raise UserError(f"{path}: {key} is {value!r}: at most {MOST_LAYERS} layers are possible")


def check_index(index: Mapping[str, Any], path: Path, parts: Sequence[str]) -> None:
    """Raise UserError if model_index.json does not name a trusted library and a class for each part of the model.

    Args:
        index: content of the file
        path: the file, for errors
        parts: names of optional parts, such as "text_encoder"; those in REQUIRED are always checked
    """
    for part in (*REQUIRED, *(name for name in parts if name in index)):
        named = index.get(part)
        if part not in REQUIRED and named == [None, None]:
            continue
        if not (isinstance(named, list) and len(named) == 2 and all(isinstance(one, str) and one for one in named)):
            raise UserError(f'{path}: {part} is {named!r}: a library and a class are needed, as ["diffusers", "..."]')
        if named[0] not in LIBRARIES:
            raise UserError(f"{path}: {part} is a class of {named[0]}: only {' and '.join(LIBRARIES)} are trusted")


def check_folder(folder: Path, index: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Raise UserError if configuration files in a model's folder are missing or wrong, or its weights cannot be used.

    Weights cannot be used if their headers cannot be read, or if most values of transformer or VAE are not floats.
    Missing weights are found by `check_weights`.

    Args:
        folder: folder in diffusers' layout
        index: content of its model_index.json
        parts: names of optional parts, such as "text_encoder"; those in REQUIRED are always checked
    """
    check_index(index, folder / "model_index.json", parts)
    named = [part for part in parts if (index.get(part) or [None])[0]]
    weighty = [part for part in named if part.startswith(("text_encoder", *EXPERTS[1:]))]
    shape = read_json(folder / "transformer" / "config.json")
    for part in ("transformer", "vae", *weighty):
        path = folder / part / "config.json"
        _check_layers(read_json(path), path)
        values = stored_values(folder / part)
        most, total = max(values, key=lambda dtype: values[dtype], default=""), values.total()
        if part in REQUIRED and total and not most.startswith(("F", "BF")):  # loading would convert them silently
            raise UserError(f"{folder / part}: weights of type {most}; save the pipeline in fp32, bf16 or fp16")
        if part == "transformer" and total and shape.get("pos_embed_max_size", 0) ** 2 > total:
            raise UserError(f"{path}: pos_embed_max_size is larger than the {total} values of the weights allow")
    path = folder / "scheduler" / "scheduler_config.json"
    timesteps = read_json(path).get("num_train_timesteps", 1000)
    if not _is_count(timesteps, MOST_TIMESTEPS):
        raise UserError(f"{path}: num_train_timesteps is {timesteps!r}: a number from 1 to {MOST_TIMESTEPS} is needed")


def check_scheduler(scheduler: Any, pipeline: Any, restores: bool, keeps: bool, model: str) -> None:
    """Raise UserError if a pipeline fails or makes wrong images with this scheduler.

    Args:
        scheduler: the scheduler, with its settings
        pipeline: class of the pipeline
        restores: True if the pipeline is to restore masked regions, which needs one call of the transformer a step
        keeps: True if known latents replace generated ones after each step, which needs the usual arguments of `step`
        model: name of the model, for errors
    """
    config, name, problem = scheduler.config, pipeline.__name__, ""
    typical = re.findall(r"\w+Scheduler", str(signature(pipeline.__init__).parameters["scheduler"].annotation))
    called = {word for made in (pipeline.__call__, pipeline.prepare_latents) for word in unwrap(made).__code__.co_names}
    absent = [word for word in SCHEDULING if word in called and not hasattr(scheduler, word)]
    flow = config.get("use_flow_sigmas") and config.get("prediction_type") == "flow_prediction"
    gives_sigmas = called & MAKE_SIGMAS and not (flow and "use_flow_sigmas" in called)
    if "beta_start" in config and not flow and any(one.startswith("FlowMatch") for one in typical):
        problem = f"adds noise otherwise than flow matching does, for which {name} is made"
    elif absent:
        problem = f"has no {absent[0]}, which {name} calls"
    elif gives_sigmas and "sigmas" not in signature(scheduler.set_timesteps).parameters:
        problem = f"takes no sigmas, which {name} gives it"
    elif restores and scheduler.order > 1:
        problem = f"calls the transformer {scheduler.order} times a step, which inpaint does not know"
    elif keeps and [*signature(scheduler.step).parameters][:3] != ["model_output", "timestep", "sample"]:
        problem = "steps otherwise than most, and inpaint keeps what is known after each step"
    if problem:
        other = next((one for one in typical if one != type(scheduler).__name__), "another one")
        raise UserError(f"model {model}: its {type(scheduler).__name__} {problem}: save the pipeline with {other}")
    _check_timesteps(scheduler, model)


def _check_timesteps(scheduler: Any, model: str) -> None:
    """Raise UserError if a scheduler's settings give timesteps outside 0 to num_train_timesteps, or none above 0.

    Args:
        scheduler: scheduler of a diffusers pipeline, which is set to TRIAL_STEPS steps
        model: name of the model, for errors
    """
    import torch

    see = "see scheduler/scheduler_config.json"
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    try:
        scheduler.set_timesteps(TRIAL_STEPS, **shift)
        times = torch.as_tensor(scheduler.timesteps)
        fit = bool(torch.isfinite(times).all()) and float(times.max()) <= 1.01 * scheduler.config.num_train_timesteps
        fit = fit and float(times.min()) >= 0 and float(times.max()) > 0
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"model {model}: its scheduler makes no timesteps of its settings ({text}); {see}") from error
    if not fit:
        made = ", ".join(f"{time:g}" for time in times.tolist()[:TRIAL_STEPS])
        raise UserError(f"model {model}: its scheduler makes timesteps {made} of its settings; {see}")


# After a model is loaded ----------------------------------------------------------------------------------------------


def check_loaded(pipe: Any, model: str) -> None:
    """Raise UserError if a loaded diffusers pipeline lacks weights, did not use some, or has parts that do not fit.

    Args:
        pipe: the pipeline
        model: its folder or name, as the user gave it
    """
    for part in (*EXPERTS, "vae"):
        module = getattr(pipe, part, None)
        if module is None:
            continue
        held = (*module.named_parameters(), *module.named_buffers())
        absent = [name for name, tensor in held if tensor.is_meta]
        if absent:
            raise UserError(f"model {model}: the weights of its {part} lack {some(absent)}; copy them again")
        if part in EXPERTS and (Path(model) / part).is_dir():
            _check_all_used(module, part, model)
    _check_latents(pipe, model)


def _check_all_used(module: Any, part: str, model: str) -> None:
    """Raise UserError if the weight files of a transformer have tensors that the loaded module has no place for.

    Args:
        module: the loaded transformer
        part: its folder in the model's: "transformer" or "transformer_2"
        model: the model's folder
    """
    ignored = type(module)._keys_to_ignore_on_load_unexpected or ()
    unused = set(read_headers(Path(model) / part)) - set(module.state_dict())
    unused = {name for name in unused if not any(re.search(pattern, name) for pattern in ignored)}
    if unused:
        unfit = f"its {part} has no place for {some(sorted(unused))} of its weights"
        raise UserError(f"model {model}: {unfit}; {part}/config.json is of another model")


def some(names: Sequence[str]) -> str:
    """Return a list of names shortened for an error: the first name and the number of others, as "a and 2 more".

    names: at least one
    """
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _check_latents(pipe: Any, model: str) -> None:
    """Raise UserError if VAE and transformer have different latents, or settings of the VAE are not usable numbers.

    Args:
        pipe: the loaded diffusers pipeline
        model: name of the model, for errors
    """
    config, transformer = pipe.vae.config, pipe.transformer.config
    channels = config.get("latent_channels") or config.get("z_dim")
    leaves = transformer.get("out_channels") or transformer.in_channels
    if channels and leaves not in (channels, 4 * channels):  # packed, a token holds four latent pixels
        unlike = f"its transformer makes latents of {leaves} channels and its vae takes {channels}"
        raise UserError(f"model {model}: {unlike}; they are of different models")
    family = family_of(pipe.transformer)
    numbers = {name: config[name] for name in family.vae_numbers if name in config}
    for name in ("latents_mean", "latents_std"):
        if config.get(name) is not None or name in family.vae_lists:
            listed = config.get(name)
            if not isinstance(listed, (list, tuple)) or len(listed) != channels:
                raise UserError(f"model {model}: {name} of its vae is {listed!r}: {channels} numbers are needed")
            numbers |= {f"{name}[{n}]": one for n, one in enumerate(listed)}
    blocks = [name for name in VAE_BLOCKS if name in config]
    if len({len(config[name]) for name in blocks}) > 1:
        unlike = f"{', '.join(blocks)} of its vae are lists of different lengths"
        raise UserError(f"model {model}: {unlike}: make them alike")
    for name, value in numbers.items():
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if not number or (value == 0 and not name.startswith(("shift_factor", "latents_mean"))):
            raise UserError(f"model {model}: {name} of its vae is {value!r}: a number is needed")


def check_tokenizer(tokenizer: Any, part: str, model: str) -> None:
    """Raise UserError if a model's folder has no vocabulary of a tokenizer: transformers would make an empty one.

    Args:
        tokenizer: the tokenizer as loaded
        part: its folder in the model's, such as "tokenizer_2"
        model: the model's folder, or another name, for which nothing is checked
    """
    names = list(getattr(tokenizer, "vocab_files_names", {}).values())
    folder = Path(model) / part
    if names and Path(model).is_dir() and not any((folder / name).is_file() for name in names):
        raise UserError(f"model {model}: {part} has none of {', '.join(names)}; copy its vocabulary there")


def check_sides(
    pipe: Any,
    height: int,
    width: int,
    model: str,
    frames: int = 1,
    options: Sequence[str] = ("height", "width"),
    multiple: int = 1,
    does: str = "makes",
) -> None:
    """Raise UserError for an image size that the model would round, has no positions for, or cannot decode in memory.

    Args:
        pipe: the loaded pipeline
        height, width: sides in pixels
        model: name of the model, for errors
        frames: number of a video's frames; 1 for images
        options: names of the command's options that gave height and width, for errors
        multiple: number of pixels that each side must be a multiple of
        does: verb for errors: "makes" or "takes" images of such sides
    """
    given = [*zip(options, (height, width), strict=True)]
    for name, side in given:
        if side % multiple:
            near = max(multiple, round(side / multiple) * multiple)
            raise UserError(f"--{name} {side}: model {model} {does} multiples of {multiple}; give {near}")
    positions = pipe.transformer.config.get("pos_embed_max_size")
    if positions:
        most = positions * pipe.transformer.config.patch_size * pipe.vae_scale_factor
        for name, side in given:
            if side > most:
                raise UserError(f"--{name} {side}: model {model} makes images of at most {most} pixels a side")
    needed = frames * height * width * PIXEL_BYTES
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        asked, fewer = (f" --frames {frames}", " or fewer frames") if frames > 1 else ("", "")
        sides = " ".join(dict.fromkeys(f"--{name} {side}" for name, side in given))
        taken = f"{needed / 2**30:.0f} GiB or more, and this machine has {memory / 2**30:.0f} GiB"
        raise UserError(f"{sides}{asked}: decoding takes {taken}: give smaller sides{fewer}")


# Weight files ---------------------------------------------------------------------------------------------------------
#
# If the wanted dtype is the stored one, parameters on the CPU stay in the file's memory map: all ranks of a host share
# one copy in the page cache. If they are converted to another dtype, every rank has a copy of its own.


def check_weights(folder: Path, part: str, model: str) -> None:
    """Raise UserError if a part of a model has no safetensors weights.

    Args:
        folder: the model's folder
        part: name of the part and of its folder there, such as "vae"
        model: name of the model, for errors
    """
    files = list((folder / part).glob("*")) if (folder / part).is_dir() else []
    if any(file.suffix == ".safetensors" for file in files):
        return
    pickles = [file.name for file in files if file.suffix in PICKLES]
    if pickles:
        unsafe = f"{part} has pickle weights only ({pickles[0]}), which can run code when loaded"
        remedy = "save it again with pipe.save_pretrained(..., safe_serialization=True)"
        raise UserError(f"model {model}: {unsafe}; {remedy}")
    raise UserError(f"model {model}: {part} has no .safetensors weights; copy them there")


def variant_of(folder: Path) -> str | None:
    """Return the variant in the names of weight files, such as "fp16", to pass to diffusers' loader as `variant`.

    Return None if the names have no variant, or not all the same.

    Args:
        folder: folder with the safetensors files of one part of a model
    """
    named = re.compile(r"(?:diffusion_pytorch_)?model(?:\.(\w+))?(?:-.*)?\.safetensors")
    found = {match[1] for path in folder.glob("*.safetensors") if (match := named.fullmatch(path.name))}
    return found.pop() if len(found) == 1 else None


def read_headers(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the dtype and the number of values of each tensor in a folder's safetensors files, by the tensor's name.

    The dtype is safetensors' word, such as "BF16". Only the headers of the files are read. Raise UserError for files
    that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, tuple[str, int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            if kind := irregular(path):
                raise UserError(f"{path}: is {kind}; copy the weights there")
            with safe_open(path, "np") as file:
                names = file.keys()
                for name, one in zip(names, map(file.get_slice, names), strict=True):
                    tensors[name] = one.get_dtype(), math.prod(one.get_shape())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); copy it again") from error
        except SafetensorError as error:
            raise UserError(f"{path}: not a readable safetensors file ({error}); copy it again") from error
    return tensors


def stored_values(folder: Path) -> Counter[str]:
    """Return the number of values of each dtype in a folder's safetensors files, by its name there, such as "BF16"."""
    values: Counter[str] = Counter()
    for dtype, number in read_headers(folder).values():
        values[dtype] += number
    return values


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype of most values in a folder's safetensors: "fp32", "bf16" or "fp16"; None for another dtype."""
    values = stored_values(folder)
    return DTYPES.get(max(values, key=lambda kind: values[kind], default=""))


def conversion(model: str, folder: Path, dtype: str) -> str:
    """Return a line for the user on the memory that each rank on a CPU needs to convert the weights to `dtype`.

    Return "" if they are stored in that dtype, or in an unknown one.

    Args:
        model: name of the model, for the line
        folder: folder of the weights
        dtype: dtype to compute in: "fp32", "bf16" or "fp16"
    """
    stored = stored_dtype(folder)
    if stored in (None, dtype):
        return ""
    size = stored_values(folder).total() * (4 if dtype == "fp32" else 2) / 2**30
    cost = f"every rank converts its own copy to {dtype} ({size:.2f} GiB)"
    return f"model {model} is stored in {stored}: {cost}; --dtype {stored} shares the file's pages instead"
