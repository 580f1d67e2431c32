"""The models that commands name: how they are checked, loaded on every rank, and how prompts become embeddings.

A name is that of the embedded model, a folder in diffusers' layout, or an id of the Hugging Face hub. Only safetensors
are read.
"""

from __future__ import annotations

import gc
import inspect
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cocodiff.config.errors import UserError
from cocodiff.config.files import is_folder, is_there, read_json
from cocodiff.config.packages import import_diffusers
from cocodiff.config.registry import import_late
from cocodiff.demo_model import WEIGHTS
from cocodiff.jobs.model_checks import (
    check_folder,
    check_loaded,
    check_scheduler,
    check_tokenizer,
    check_weights,
    conversion,
    patch_side,
    read_shape,
    some,
    variant_of,
)
from cocodiff.jobs.terminal import say
from cocodiff.models import pipelines_of
from cocodiff.models.family import EXPERTS, GENERATE, INPAINT, Pipelines, Video

Embeddings = dict[str, Any]  # arguments of a pipeline call for one image: tensors of one row, or lists of one tensor
EMBEDDED = "embedded"  # name of the embedded model
INDEX = "model_index.json"  # file of a pipeline's parts and their classes
OWN_PIPELINE = "StableDiffusion3InpaintPipeline"  # diffusers' class of the embedded model
OWN_STEPS = 10  # denoising steps of the embedded model: fewer and more are worse on average (docs/quality.md)
OWN_VAE = "vae_config.json"  # file by which a folder is known to hold a model trained from the embedded one
TEXT_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
IMAGE_ENCODER = "image_encoder"  # the part that encodes image prompts, and a video's first frame
UNUSED_PARTS = (IMAGE_ENCODER, "feature_extractor")  # parts that are not loaded without such an image
# keys for the width of text embeddings in transformers' configs
TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "cap_feat_dim", "caption_channels")
MAY_BE_ABSENT = (*TEXT_PARTS, *UNUSED_PARTS, *EXPERTS[1:])  # parts that a model's folder may lack


@dataclass(frozen=True)
class Request:
    """The model that a command asks for, with its prompts, and the task that it is for."""

    model: str  # "embedded", a folder, or an id of the hub
    task: str  # INPAINT or GENERATE
    prompts: Sequence[str] = ("",)  # prompts of the images or videos; "" for none
    guidance: float | None = None  # guidance scale; None for the pipeline's default
    guidance_2: float | None = None  # guidance scale of a second expert; None for that of the first
    image: str | None = None  # file of a video's first frame; None for videos from text alone
    keeps: bool = False  # True to restore with the pipeline that generates even if there is one that restores

    @cached_property
    def index(self) -> dict[str, Any]:
        """The content of `model_index.json`, with `_class_name` as text. Raises UserError if it is no JSON object.

        The embedded model has no such file, so this is not read of it.
        """
        index = read_json(model_file(self.model, INDEX))
        return index | {"_class_name": str(index.get("_class_name") or "")}

    @property
    def own(self) -> Path | None:
        """The folder of the embedded model's weights, or of a model trained from it; None for any other model."""
        return own_weights(self.model)

    @cached_property
    def pipelines(self) -> Pipelines:
        """The diffusers pipelines that can load this model, by the classes in its index."""
        transformer = self.index.get("transformer")
        named = str(transformer[-1]) if isinstance(transformer, list) and transformer else ""
        return pipelines_of(self.index["_class_name"], self.model, named)

    @property
    def video(self) -> Video | None:
        """The default size of the model's videos; None for a model that makes images."""
        return None if self.own is not None else self.pipelines.video_of(self.index)

    @property
    def keeps_known(self) -> bool:
        """True if a slice is restored by the pipeline that generates, with the known pixels kept at each step."""
        mine = self.own is None and bool(self.pipelines.generate) and (self.keeps or not self.pipelines.inpaint)
        return self.task == INPAINT and mine

    @property
    def content(self) -> dict[str, Any]:
        """The prompts, and a checksum of the image's file, as plain data by name.

        Results depend on them, so a resumed job compares them with those of its first start.
        """
        image = {} if self.image is None else {"image": zlib.crc32(Path(self.image).read_bytes())}
        return {"prompts": list(self.prompts or ("",))} | image

    @property
    def pipeline(self) -> str:
        """The name of diffusers' pipeline class to load. Raises UserError if there is none for the task."""
        task = GENERATE if self.keeps_known else self.task
        return self.pipelines.of_task(task, self.model, self.image is not None)


@dataclass(frozen=True)
class Model:
    """A loaded pipeline on its device, without text encoders, and its prompts' embeddings."""

    name: str  # name of the model, as the request gives it
    pipe: Any  # diffusers' pipeline
    prompts: list[Embeddings]  # embeddings of each prompt, for one image
    fixed: dict[str, Any]  # arguments of every call, such as the guidance scale
    weights: Any = None  # split weights by model, as an engine takes them; None if they are not split for good

    def arguments(self, batch: int, prompt: int = 0) -> dict[str, Any]:
        """Return a pipeline call's arguments for `batch` images of one prompt: its embeddings and `fixed`.

        Args:
            batch: number of images.
            prompt: index of the prompt.
        """
        return repeated(self.prompts[prompt], batch) | self.fixed


def repeated(embeddings: Embeddings, batch: int) -> Embeddings:
    """Return the embeddings of a prompt for a call with `batch` images: those for one image, each repeated.

    embeddings: by the name of the call's argument, a tensor of one row or a list
    """
    return {
        name: row * batch if isinstance(row, list) else row.repeat(batch, *[1] * (row.ndim - 1))
        for name, row in embeddings.items()
    }


def own_weights(model: str) -> Path | None:
    """Return the folder of the embedded model's weights, or of a model trained from it; None for any other model.

    Args:
        model: the model's name: "embedded", a folder, or an id of the hub.
    """
    folder = WEIGHTS if model == EMBEDDED else Path(model)
    return folder if is_there(folder / OWN_VAE) else None


# Before ranks start ---------------------------------------------------------------------------------------------------


def check_model(request: Request, ranks: int, weights: bool = True) -> None:
    """Check a model and a command's options for it, by small files, before weights are loaded.

    Raise UserError for a folder without loadable weights and for an unsupported pipeline. Raise it also for a task or
    option that the model does not support, and for more ranks than an image has tokens.

    Args:
        request: the model, its task and options.
        ranks: number of ranks that share an image.
        weights: False if the folder need not hold weights, as in a dry run.
    """
    name, own = request.model, request.own
    if own is not None:
        if request.task == GENERATE:
            raise UserError("the embedded model only restores: name a text-to-image model with --model")
        encoders = []
    else:
        _ = request.pipeline  # there is one
        encoders = encoders_of(request.index)
        if weights and Path(name).is_dir():
            second = [part for part in EXPERTS[1:] if _is_named(request.index, part)]
            for part in ("transformer", *second, "vae", *encoders):
                check_weights(Path(name), part, name)
    if encoders and not request.prompts:
        raise UserError(f"--prompt is missing: say what model {name} shall show")
    if any(request.prompts) and not encoders:
        raise UserError(f"model {name} has no text encoders, so it takes no --prompt: leave it away")
    for option, scale in (("guidance", request.guidance), ("guidance_2", request.guidance_2)):
        if scale is not None and not math.isfinite(scale):
            raise UserError(f"--{option} {scale}: give a number")
    if request.guidance_2 is not None and request.index.get("boundary_ratio") is None:
        raise UserError(f"--guidance_2 {request.guidance_2:g}: model {name} has no second expert: leave it away")
    if request.image is not None:
        read_image(request.image)
    if own is not None and request.guidance is not None:
        raise UserError(f"--guidance {request.guidance:g}: the embedded model has no guidance: leave it away")
    shape = transformer_config(name)
    if not shape.is_file():
        raise UserError(f"model {name}: no transformer/config.json; give a folder in diffusers' layout")
    check_shape(request, read_shape(shape), ranks)
    if weights and own is None and Path(name).is_dir():
        check_folder(Path(name), request.index, MAY_BE_ABSENT)


def check_shape(request: Request, config: dict[str, Any], ranks: int) -> None:
    """Raise UserError if a transformer has fewer tokens than ranks, or channels or parts that do not fit the task.

    Input channels beyond those of latents mean that it needs an image or a mask besides them.

    Args:
        request: the model and its task.
        config: content of the transformer's config.json.
        ranks: number of ranks that share an image.
    """
    name, patch = request.model, patch_side(config)
    side = config["sample_size"] // patch if isinstance(config.get("sample_size"), int) else 0
    if side and ranks > side * side:
        raise UserError(f"{ranks} ranks for the {side * side} image tokens of model {name}: use at most {side * side}")
    enters, leaves = config.get("in_channels"), config.get("out_channels")
    more = bool(enters and leaves and enters not in (leaves, leaves * patch**2))
    if request.task == GENERATE and request.pipelines.animate:
        if more and request.image is None:
            raise UserError(f"--image is missing: model {name} makes videos that begin with an image")
        if request.image is not None and not more and not request.index.get("expand_timesteps"):
            raise UserError(f"--image: model {name} makes videos from text alone: leave it away")
        if request.image is not None and config.get("image_dim") and not _is_named(request.index, IMAGE_ENCODER):
            raise UserError(f"model {name} has no image_encoder, which its transformer asks for; copy it there")
    elif more and (request.task == GENERATE or request.keeps_known):
        does = "only restores" if request.task == GENERATE else "cannot keep what is known of an image"
        kind = "video" if request.pipelines.animate else "image"
        channels = f"its transformer takes {enters} channels and gives {leaves}"
        raise UserError(f"model {name} {does}: {channels}; name a text-to-{kind} model")


def read_image(path: str) -> Any:
    """Return an image file as a PIL image in RGB. Raise UserError if it cannot be read, or has more than 8 bits."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise UserError(f"--image {path}: has more than 8 bits a pixel: save it with 8")
            return image.convert("RGB")
    except (OSError, ValueError) as error:
        raise UserError(f"--image {path}: cannot be read ({_one_line(error)}): give a PNG, JPEG or TIFF") from error


def encoders_of(index: dict[str, Any]) -> list[str]:
    """Return the names of the text encoders that a model has, such as "text_encoder_2".

    Args:
        index: content of the model's `model_index.json`.
    """
    return [part for part in TEXT_PARTS if part.startswith("text_encoder") and _is_named(index, part)]


def _is_named(index: dict[str, Any], part: str) -> bool:
    """Return True if a model has a part. Its index then names [library, class]; else it has [null, null] or nothing.

    Args:
        index: content of the model's `model_index.json`.
        part: name of the part, such as "vae".
    """
    named = index.get(part)
    return isinstance(named, list) and bool(named) and bool(named[0])


def transformer_config(name: str) -> Path:
    """Return the path of the config.json of a model's transformer, which may be missing in a folder.

    Raise UserError as `model_file` does.

    Args:
        name: the model's name: "embedded", a folder, or an id of the hub.
    """
    own = own_weights(name)
    return own / "config.json" if own is not None else model_file(name, "transformer/config.json")


def model_file(name: str, file: str) -> Path:
    """Return the path of a small file of a model, in its folder or fetched from the hub.

    Raise UserError for a folder that is absent or has no model_index.json, and if the hub does not give the file.

    Args:
        name: folder or id of the model.
        file: path of the file in it.
    """
    folder = Path(name)
    if not is_there(folder) and name.count("/") == 1 and not name.startswith((".", "/")):
        return _fetched(name, file)
    if not is_folder(folder):
        raise UserError(f"model {folder}: no such folder; give one in diffusers' layout, or leave --model away")
    if not (folder / INDEX).is_file():
        raise UserError(f"model {folder}: no {INDEX}; save the pipeline there with pipe.save_pretrained(...)")
    return folder / file


def _fetched(name: str, file: str) -> Path:
    """Fetch a file of a model from the Hugging Face hub. Return the path of its copy. Raise UserError if that fails.

    Args:
        name: id of the model.
        file: path of the file in it.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file))
    except (OSError, ValueError) as error:
        absent = f"no such folder, and {file} cannot be fetched from the hub ({_one_line(error)})"
        raise UserError(f"model {name}: {absent}; give a folder in diffusers' layout") from error


def import_pipeline(request: Request) -> None:
    """Import the pipeline's class and all it needs, before ranks are forked, so that they share the memory.

    `scipy.stats`, which schedulers import, is only executed when it is first used.
    """
    import_late("scipy.stats")  # a tenth of the start; schedulers import it and use it for one kind of schedule
    _pipeline_class(request)


def usual_steps(request: Request) -> int:
    """Return a model's default number of denoising steps: OWN_STEPS for the embedded model, else its pipeline's.

    Import the pipeline's class. Raise UserError if there is none.
    """
    if request.own is not None:
        return OWN_STEPS
    return int(inspect.signature(_pipeline_class(request).__call__).parameters["num_inference_steps"].default)


# On every rank --------------------------------------------------------------------------------------------------------


def load_model(
    request: Request, dtype: str, transport: Any, split: Callable[[Sequence[Any]], Any] | None = None
) -> Model:
    """Load a pipeline on every rank, and move it to the rank's device. All ranks call it.

    Only rank 0 loads the text encoders, encodes the prompts and frees them; the other ranks get the embeddings. On a
    CPU, weights stored in `dtype` are mapped from their file and not copied.

    Raise UserError on every rank if the model cannot be loaded.

    Args:
        request: the model.
        dtype: "fp32", "bf16" or "fp16".
        transport: this rank's connection to all other ranks.
        split: splits the weights of the transformers that it is given among ranks, before they are moved to the device,
            and returns the model's `weights`; None to keep all on each.
    """
    import torch
    from torch.utils._pytree import tree_map

    weights, wanted = None, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    if request.own is not None:
        from cocodiff.demo_model import load_pipeline, prompt_embeddings

        pipe, fixed = load_pipeline(wanted, request.own), {"guidance_scale": 1.0}
        prompts = [prompt_embeddings(1, wanted)]
    else:
        pipe, prompts, fixed = _load_on_ranks(request, dtype, wanted, transport)
    if split is not None:
        from cocodiff.models import experts_of

        weights = split(experts_of(pipe))
    pipe.to(transport.device)
    prompts = tree_map(lambda value: value.to(transport.device), prompts)
    return Model(request.model, pipe, prompts, fixed, weights)


def _load_on_ranks(
    request: Request, dtype: str, wanted: Any, transport: Any
) -> tuple[Any, list[Embeddings], dict[str, Any]]:
    """Load a pipeline other than the embedded model's on every rank.

    Return the pipeline, still on the CPU; the embeddings of each prompt; and the arguments of all its calls, by name.
    All ranks call it. Rank 0 loads first, so that files are downloaded once. It alone encodes the prompts.

    Args:
        request: the model, not the embedded one.
        dtype: name of the dtype, for messages.
        wanted: torch's dtype.
        transport: this rank's connection to all other ranks.
    """
    first = transport.rank == 0
    pipe = _load_denoiser(request, wanted) if first else None
    transport.broadcast_value(None)  # files of the hub have been downloaded once
    if pipe is None:
        pipe = _load_denoiser(request, wanted)
    elif transport.device.type == "cpu":
        line = conversion(request.model, model_file(request.model, INDEX).parent / "transformer", dtype)
        if line:
            say(line)
    guidance = request.guidance
    if encoders_of(request.index):
        prompts = transport.broadcast_value(_encode_prompts(request, pipe, wanted, transport) if first else None)
    else:
        guidance = 1.0 if guidance is None else guidance
        prompts = [no_prompt(request.pipelines, pipe.transformer, wanted)] * max(1, len(request.prompts))
    fixed = {request.pipelines.guidance: guidance, "guidance_scale_2": request.guidance_2}
    if request.image is not None:
        fixed["image"] = read_image(request.image)
    return pipe, prompts, {name: value for name, value in fixed.items() if value is not None}


def _load_denoiser(request: Request, dtype: Any) -> Any:
    """Load a pipeline without its text encoders. Raise UserError if its parts do not fit together.

    Args:
        request: the model.
        dtype: torch's dtype.
    """
    import diffusers

    model, kind = request.model, request.index["scheduler"][1]
    with _loading(model):
        of: Any = getattr(diffusers, kind)
        settings = of.load_config(model, subfolder="scheduler", local_files_only=Path(model).is_dir())
        scheduler = of.from_config(settings)
    check_scheduler(scheduler, _pipeline_class(request), request.task == INPAINT, request.keeps_known, model)
    parts: dict[str, Any] = dict.fromkeys((*TEXT_PARTS, *UNUSED_PARTS))
    if request.image is not None and _is_named(request.index, IMAGE_ENCODER):
        parts[IMAGE_ENCODER] = _load_encoder(request, IMAGE_ENCODER, dtype)
    pipe = _from_pretrained(request, dtype, parts)
    check_loaded(pipe, model)
    return pipe


def _encode_prompts(request: Request, denoiser: Any, dtype: Any, transport: Any) -> list[Embeddings]:
    """Load the text encoders, encode the prompts and free the encoders' memory. Return each prompt's embeddings.

    Args:
        request: the model and its prompts.
        denoiser: the pipeline without text encoders, whose parts are used again.
        dtype: torch's dtype.
        transport: gives the device to encode on.
    """
    index = request.index
    known = {name: part for name, part in denoiser.components.items() if part is not None}
    absent = [part for part in TEXT_PARTS if not _is_named(index, part)]
    encoders = {part: _load_encoder(request, part, dtype) for part in encoders_of(index)}
    pipe = _from_pretrained(request, dtype, dict.fromkeys((*absent, *UNUSED_PARTS)) | known | encoders)
    for part in TEXT_PARTS:
        if part.startswith("tokenizer") and part not in absent:
            check_tokenizer(getattr(pipe, part), part, request.model)
    guided = request.guidance is None or request.guidance > 1
    prompts = encode(request.pipelines, pipe, request.prompts, guided, transport.device)
    del pipe, encoders
    # Modules are full of reference cycles. Their memory stays with torch's allocator, for the transformer: memory that
    # is returned and allocated again between messages leaks in oneCCL (torch-xpu-ops 3744).
    gc.collect()
    return prompts


def _from_pretrained(request: Request, dtype: Any, parts: dict[str, Any]) -> Any:
    """Load a pipeline by diffusers. Raise UserError if that fails.

    Args:
        request: the model.
        dtype: torch's dtype.
        parts: by name, parts that are used as they are, or left out if None; all others are read from the model's
            files.
    """
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    kind, folder = _pipeline_class(request), Path(request.model)
    given = {"variant": variant_of(folder / "transformer") or variant_of(folder / "vae")}
    given |= {name: part for name, part in parts.items() if name in request.index}
    with _loading(request.model):
        return kind.from_pretrained(
            request.model, torch_dtype=dtype, use_safetensors=True, local_files_only=folder.is_dir(), **given
        )


def _load_encoder(request: Request, part: str, dtype: Any) -> Any:
    """Load one text or image encoder of a model. Raise UserError if its weights lack tensors.

    The pipeline's own loading would fill those with random values.

    Args:
        request: the model.
        part: name of the encoder in the model's index.
        dtype: torch's dtype.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with _loading(f"{request.model}: {part}"):
        encoder, found = getattr(transformers, request.index[part][1]).from_pretrained(
            request.model,
            subfolder=part,
            dtype=dtype,
            variant=variant_of(Path(request.model) / part),
            use_safetensors=True,
            local_files_only=Path(request.model).is_dir(),
            output_loading_info=True,
        )
    # The head that predicts words does not change an encoder's output. Some models are saved without it.
    missing = sorted(name for name in found["missing_keys"] if "lm_head" not in name.split("."))
    if missing:
        raise UserError(f"model {request.model}: the weights of its {part} lack {some(missing)}; copy them again")
    return encoder


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """Turn every exception of the `with` block into a UserError of one line. Libraries read a model's files in the
    block.

    Args:
        model: name of the model, for the error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Messages of other exceptions are for programmers, and are clearer with the exception's type.
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise UserError(f"model {model} cannot be loaded: {kind}{_one_line(error)}") from error


def _pipeline_class(request: Request) -> Any:
    """Import diffusers and return the class of the pipeline to load. Raise UserError if there is none for the task."""
    return getattr(import_diffusers(), request.pipeline if request.own is None else OWN_PIPELINE)


def _one_line(error: Exception) -> str:
    """Return an exception's message on one line, 300 characters at most, without the C++ stack that torch adds."""
    return " ".join(re.split(r"\n(Exception raised from|frame #0)", str(error))[0].split())[:300]


# Prompts become embeddings on one rank, whose text encoders are freed before the first denoising step ----------------


def encode(pipelines: Pipelines, pipe: Any, prompts: Sequence[str], guided: bool, device: Any) -> list[Embeddings]:
    """Return the embeddings of each prompt, on the CPU, by the pipeline's own `encode_prompt`.

    Embeddings are arguments of a pipeline call, by name. Raise UserError if the text encoders fail or give numbers that
    are not finite.

    Args:
        pipelines: the names of the embeddings and further arguments of `encode_prompt`.
        pipe: the pipeline with its text encoders, which are moved to `device`.
        prompts: the prompts.
        guided: True to add the embeddings of the negative prompt, if the pipeline takes them.
        device: the device to encode on.
    """
    import torch

    for name, part in pipe.components.items():
        if name.startswith("text_encoder") and part is not None:
            part.to(device)
    with torch.no_grad():
        wanted = guided and pipelines.negative is not None
        negative = _embeddings_of(pipelines, pipe, pipelines.negative or "", device) if wanted else {}
        against = {f"negative_{name}": value for name, value in negative.items()}
        return [_embeddings_of(pipelines, pipe, prompt, device) | against for prompt in prompts]


def _embeddings_of(pipelines: Pipelines, pipe: Any, prompt: str, device: Any) -> Embeddings:
    """Return the embeddings of one prompt on the CPU, by their names as arguments. Raise UserError as `encode` does.

    Args:
        pipelines: the names of the embeddings and further arguments of `encode_prompt`.
        pipe: the pipeline with its text encoders.
        prompt: the prompt.
        device: the device to encode on.
    """
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_leaves, tree_map

    try:
        values = pipe.encode_prompt(prompt, **pipelines.also, device=device)
    except Exception as error:  # none of our code runs in there: the encoders' files do not fit together
        said = f"{type(pipe).__name__} cannot encode the prompt with the model's text encoders and tokenizers"
        # Diffusers uses some packages without looking for them, as ftfy for Wan's image to video.
        missing = error.name if isinstance(error, NameError | ImportError) else None
        remedy = f"pip install {missing}" if missing else "copy them again"
        raise UserError(f"{said} ({type(error).__name__}: {_one_line(error)}); {remedy}") from error
    named = pipelines.named(values)
    if "prompt_embeds_mask" in named and named["prompt_embeds_mask"] is None:
        # Qwen-Image's encode_prompt returns None for a mask that masks nothing; its call would warn that it is missing.
        named["prompt_embeds_mask"] = torch.ones(named["prompt_embeds"].shape[:2], dtype=torch.long)
    named = {name: value for name, value in named.items() if name and value is not None}
    for name, value in named.items():
        if not all(bool(torch.isfinite(one).all()) for one in tree_leaves(value)):
            remedy = "use a wider --dtype, or copy their weights again"
            raise UserError(f"the model's text encoders give NaN or Inf as {name}: {remedy}")
    return tree_map(Tensor.cpu, named)


def no_prompt(pipelines: Pipelines, transformer: Any, dtype: Any) -> Embeddings:
    """Return zero embeddings in place of a prompt's, for a pipeline saved without text encoders.

    If the pipeline takes a negative prompt, its embeddings are there too. They have as many tokens as the pipeline
    gives every prompt, or one token if that is unknown. Masks of tokens are a single 1. Raise UserError if the
    transformer's config does not give the width of embeddings.

    Args:
        pipelines: the names of the embeddings.
        transformer: the pipeline's transformer, whose config gives their widths.
        dtype: torch's dtype.
    """
    import torch

    config, zero = transformer.config, Embeddings()
    negative = () if pipelines.negative is None else tuple(f"negative_{name}" for name in pipelines.encoded if name)
    for name in (*filter(None, pipelines.encoded), *negative):
        if name.endswith("_mask"):
            zero[name] = torch.ones(1, 1, dtype=torch.long)
        elif "pooled" in name:
            zero[name] = torch.zeros(1, config.pooled_projection_dim, dtype=dtype)
        else:
            width = next((config[key] for key in TEXT_WIDTHS if config.get(key)), None)
            if width is None:
                kind = type(transformer).__name__
                raise UserError(f"a {kind} does not say how wide prompts are: copy text encoders too")
            tokens = pipelines.also.get("max_sequence_length") or config.get("max_text_seq_length") or 1
            zero[name] = torch.zeros(1, tokens, width, dtype=dtype)
    return {name: [*value] for name, value in zero.items()} if pipelines.lists else zero
