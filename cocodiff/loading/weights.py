"""Weight files: what they hold, and whether ranks of one host can share them.

Where the wanted dtype is the stored one, diffusers leaves a model's parameters on the CPU in the file's own memory map:
twelve ranks hold the weights once, in the page cache. Converted to another dtype, every rank has a copy of its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cocodiff.errors import UserError
from cocodiff.files import irregular

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # safetensors' names and ours


class Stored(NamedTuple):
    """A tensor of a weight file. dtype: safetensors' name."""

    dtype: str
    shape: list[int]


def check_weights(folder: Path, part: str, model: str) -> None:
    """Raises UserError where a part of a model has no safetensors weights."""
    files = list((folder / part).glob("*")) if (folder / part).is_dir() else []
    if any(file.suffix == ".safetensors" for file in files):
        return
    pickles = [file.name for file in files if file.suffix in PICKLES]
    if pickles:
        raise UserError(
            f"model {model}: {part} has pickle weights only ({pickles[0]}), which can run code when loaded; "
            f"save it again with pipe.save_pretrained(..., safe_serialization=True)"
        )
    raise UserError(f"model {model}: {part} has no .safetensors weights; copy them there")


def variant_of(folder: Path) -> str | None:
    """What diffusers has to be told where all weights of a part are of one variant, as fp16; else None."""
    named = re.compile(r"(?:diffusion_pytorch_)?model(?:\.(\w+))?(?:-.*)?\.safetensors")
    found = {match[1] for path in folder.glob("*.safetensors") if (match := named.fullmatch(path.name))}
    return found.pop() if len(found) == 1 else None


def read_headers(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder's safetensors files by their names; reads headers only.

    Raises UserError for files that are no safetensors.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            if kind := irregular(path):
                raise UserError(f"{path}: is {kind}; copy the weights there")
            with safe_open(path, "np") as file:
                names = file.keys()
                for name, one in zip(names, map(file.get_slice, names), strict=True):
                    tensors[name] = Stored(one.get_dtype(), one.get_shape())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); copy it again") from error
        except SafetensorError as error:
            raise UserError(f"{path}: not a readable safetensors file ({error}); copy it again") from error
    return tensors


def check_header(tensors: Mapping[str, Stored], folder: Path) -> None:
    """Raises UserError for weights most of which are no floating point numbers: loading would convert them silently."""
    values = count_values(tensors)
    most, _ = values.most_common(1)[0] if values else ("", 0)
    if values and not most.startswith(("F", "BF")):
        raise UserError(f"{folder}: weights of type {most}; save the pipeline in fp32, bf16 or fp16")


def stored_values(folder: Path) -> Counter[str]:
    """How many values of each dtype (safetensors' name) the safetensors files of a folder hold; reads headers only."""
    return count_values(read_headers(folder))


def count_values(tensors: Mapping[str, Stored]) -> Counter[str]:
    values: Counter[str] = Counter()
    for tensor in tensors.values():
        values[tensor.dtype] += math.prod(tensor.shape)
    return values


def conversion(model: str, folder: Path, dtype: str) -> str:
    """A line that says what it costs on a CPU that `dtype` is not the stored one; "" where it is."""
    values = stored_values(folder)
    if not values:
        return ""
    stored = DTYPES.get(values.most_common(1)[0][0])
    if stored is None or stored == dtype:
        return ""
    size = sum(values.values()) * (4 if dtype == "fp32" else 2) / 2**30
    return (
        f"model {model} is stored in {stored}: every rank converts its own copy to {dtype} ({size:.2f} GiB); "
        f"--dtype {stored} shares the file's pages instead"
    )
