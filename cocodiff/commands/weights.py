"""Weight files: what they hold, and whether ranks of one host can share them.

Where the wanted dtype is the stored one, diffusers leaves a model's parameters on the CPU in the file's own memory map:
twelve ranks hold the weights once, in the page cache. Converted to another dtype, every rank has a copy of its own.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path

from cocodiff.errors import UserError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
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


def stored_values(folder: Path) -> Counter[str]:
    """How many values of each dtype (safetensors' name) the safetensors files of a folder hold; reads headers only."""
    values: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
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
