"""Runs the commands of `same_results.txt` by the programs of two trees and prints where what they give differs: digests
of files, and figures, not times. By hand, after a change that should change no result:

    .venv/bin/python tests/campaign/same_results.py BEFORE AFTER [names of commands]

A tree is a clone with an environment of its own in `.venv`. Inputs and tiny models are made by this script alone, from
fixed seeds, and are the same for both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tifffile
import zarr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
COMMANDS = Path(__file__).with_suffix(".txt")
TIMES = ("second", "_s", "time", "started", "wall", "version", "rate", "at", "out", "folder", "run", "path", "report")
NOT_RESULTS = (".html", ".log", ".lock", ".md", ".yaml", ".bin", ".pt", "trace.json")


def make_inputs(folder: Path) -> None:
    """A stack, masks, a truth, a slice, and tiny models in diffusers' layout."""
    import torch
    from tiny_pipelines import clip_text, flux_pipeline, sd3_pipeline

    folder.mkdir()
    random = np.random.default_rng(0)
    z, y, x = np.indices((10, 40, 48)) / 8.0
    stack = ((np.sin(z) + np.sin(y) * np.cos(x) + 0.1 * random.standard_normal(z.shape)) * 8000 + 30000).astype("u2")
    mask = np.zeros(stack.shape, "u1")
    mask[2:8, 10:22, 12:30] = 255
    images = {"stack": stack, "mask": mask, "slice": stack[4], "other": stack[7, :, ::-1], "hole": mask[4]}
    images |= {"tall": np.tile(stack, (2, 1, 1)), "tall_mask": np.tile(mask, (2, 1, 1))}
    for name, image in (images | {"wide": np.tile(stack, (2, 4, 3))}).items():
        tifffile.imwrite(folder / f"{name}.tif", image, photometric="minisblack")
    np.save(folder / "stack.npy", stack)
    with h5py.File(folder / "stack.h5", "w") as file:
        file.create_dataset("data", data=stack, chunks=(2, 40, 48))
    zarr.save_array(folder / "stack.zarr", stack)
    torch.manual_seed(0)
    sd3_pipeline(**clip_text()).save_pretrained(folder / "sd3")
    flux_pipeline().save_pretrained(folder / "flux")


def run(tree: Path, line: str, inputs: Path, folder: Path) -> dict[str, Any]:
    """Run a command in a new folder. Return its exit code, digests of results, and figures, by their place."""
    folder.mkdir(parents=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    words = [word.replace("%", str(inputs)).replace("@", str(tree)) for word in shlex.split(line)]
    how: dict[str, Any] = {"cwd": folder, "env": env, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run([tree / ".venv/bin/cocodiff", *words], capture_output=True, check=False, **how)
    print(done.stderr[-2000:] if done.returncode else "", file=sys.stderr, end="")
    found: dict[str, Any] = {"rc": done.returncode}
    for path in sorted(folder.rglob("*")):
        place = str(path.relative_to(folder))
        if path.is_file() and "/." not in f"/{place}" and not place.endswith(NOT_RESULTS):
            found |= flat(content(path), place)
    return found


def content(path: Path) -> Any:
    """Return the figures of JSON, or a digest of all bytes."""
    if path.suffix in (".json", ".jsonl"):
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        with contextlib.suppress(ValueError):
            return [json.loads(line) for line in lines]
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flat(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Give by its place each figure that two runs of the same program share: no times."""
    inner = [*(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())]
    for key, one in inner:
        if key != "config" and not any(word in str(key) for word in TIMES):
            yield from flat(one, f"{at}/{key}")
    if not inner:
        yield at, value


def main() -> int:
    *trees, names = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:]
    figures = differences = 0
    with tempfile.TemporaryDirectory() as made:
        inputs = Path(made, "inputs")
        make_inputs(inputs)
        for name, line in re.findall(r"^([^#\s].*?): *(.*)$", COMMANDS.read_text(), re.MULTILINE):
            if names and name not in names:
                continue
            print(name, line, flush=True)
            before, after = (run(tree, line, inputs, Path(made, str(n), name)) for n, tree in enumerate(trees))
            changed = [at for at in sorted({*before, *after}) if before.get(at, "absent") != after.get(at, "absent")]
            for at in changed:
                print(f"    {at}: {str(before.get(at, 'absent'))[:90]} -> {str(after.get(at, 'absent'))[:90]}")
            figures, differences = figures + len(before), differences + len(changed)
    print(f"{figures} figures, {differences} differences")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
