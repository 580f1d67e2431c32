"""README's Python example, as it stands there, on one rank of a launcher's job; then what a user may do after it.

example_rank.py FOLDER      (holds the model, and takes a JSON file for each rank)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import cocodiff
from cocodiff.comm.launch import detect

README = Path(__file__).resolve().parents[2] / "README.md"


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return block


def images_of_two(pipe: Any, scan: torch.Tensor, mask: torch.Tensor) -> Iterator[Any]:
    """Of two engines that are made before either is used."""
    for engine in [cocodiff.parallelize(pipe) for _ in range(2)]:
        with engine:
            torch.manual_seed(0)
            yield pipe(prompt="a tooth", image=scan, mask_image=mask).images[0]


def main(folder: Path) -> None:
    scan, mask = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 1, 32, 32)
    mask[..., 8:24, 8:24] = 1
    names = {"model": str(folder / "model"), "scan": scan, "mask": mask}
    torch.manual_seed(0)
    exec(example(), names)
    engine, pipe = names["engine"], names["pipe"]
    # On two ranks each computes a branch of guidance: what they send each other is the model's output.
    once = engine.bytes("guidance")
    with engine:
        torch.manual_seed(0)
        again = pipe(prompt="a tooth", image=scan, mask_image=mask).images[0]
        inside = engine.bytes("guidance")
    twice = engine.bytes("guidance")
    engine.forget_drift()
    drift = engine.drift_profile()
    images = [list(image.tobytes()) for image in (names["image"], again, *images_of_two(pipe, scan, mask))]
    found = {
        "attention": engine.bytes(),
        "once": once,
        "inside": inside,
        "twice": twice,
        "drift": drift,
        "images": images,
    }
    (folder / f"{detect().rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
