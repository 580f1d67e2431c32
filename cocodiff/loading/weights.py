"""Weight files: what they hold, and whether ranks of one host can share them.

Where the wanted dtype is the stored one, diffusers leaves a model's parameters on the CPU in the file's own memory map:
twelve ranks hold the weights once, in the page cache. Converted to another dtype, every rank has a copy of its own.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocodiff.errors import UserError
from cocodiff.files import irregular

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LONGEST_HEADER = 100 * 10**6  # bytes, as the format says
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # safetensors' names and ours


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


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a folder's safetensors files: name -> {"dtype": ..., "shape": [...], ...}; reads headers only.

    Raises UserError for files that are no safetensors.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = _read_header(path)
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            shape = tensor.get("shape") if isinstance(tensor, dict) else None
            sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
            if not sizes or not isinstance(tensor.get("dtype"), str):
                raise UserError(
                    f"{path}: not a readable safetensors file ({name} has no dtype or shape); copy it again"
                )
        tensors |= header
    return tensors


def _read_header(path: Path) -> dict[str, Any]:
    try:
        if kind := irregular(path):
            raise UserError(f"{path}: is {kind}; copy the weights there")
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); copy it again") from error
    except (struct.error, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); copy it again") from error
    return header


def check_header(tensors: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Raises UserError for weights most of which are no floating point numbers: loading would convert them silently."""
    values = _count_values(tensors)
    most, _ = values.most_common(1)[0] if values else ("", 0)
    if values and not most.startswith(("F", "BF")):
        raise UserError(f"{folder}: weights of type {most}; save the pipeline in fp32, bf16 or fp16")


def stored_values(folder: Path) -> Counter[str]:
    """How many values of each dtype (safetensors' name) the safetensors files of a folder hold; reads headers only."""
    return _count_values(read_headers(folder))


def _count_values(tensors: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    values: Counter[str] = Counter()
    for tensor in tensors.values():
        values[tensor["dtype"]] += math.prod(tensor["shape"])
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
