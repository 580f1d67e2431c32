"""Runs the commands of `same_results.txt` by the program of a tree and keeps digests of all that they give: voxels,
figures and bytes, not times. By hand, before and after a change that should change no result:

    .venv/bin/python tests/campaign/same_results.py run --tree BEFORE --out before.json
    .venv/bin/python tests/campaign/same_results.py run --tree AFTER --out after.json
    .venv/bin/python tests/campaign/same_results.py compare before.json after.json

A tree is a clone with an environment of its own in `.venv`. Inputs and tiny models are made by this script alone, from
fixed seeds, and are the same for both.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
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
from skimage.io import imread

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
COMMANDS = Path(__file__).with_suffix(".txt")
TIMES = ("second", "_s", "time", "started", "wall", "version", "rate", "at", "out", "folder", "run", "path", "report")
NOT_RESULTS = (".html", ".log", ".lock", ".md", ".yaml", ".bin", ".pt", "trace.json")


def make_inputs(folder: Path) -> None:
    """A stack, masks, a truth, a slice, and tiny models in diffusers' layout."""
    import torch
    from tiny_pipelines import clip_text, flux_pipeline, sd3_pipeline

    random = np.random.default_rng(0)
    z, y, x = np.indices((10, 40, 48)) / 8.0
    stack = ((np.sin(z) + np.sin(y) * np.cos(x) + 0.1 * random.standard_normal(z.shape)) * 8000 + 30000).astype("u2")
    mask = np.zeros(stack.shape, "u1")
    mask[2:8, 10:22, 12:30] = 255
    tifffile.imwrite(folder / "stack.tif", stack, photometric="minisblack")
    tifffile.imwrite(folder / "mask.tif", mask, photometric="minisblack")
    tifffile.imwrite(folder / "slice.tif", stack[4], photometric="minisblack")
    tifffile.imwrite(folder / "other.tif", stack[7, :, ::-1].copy(), photometric="minisblack")
    tifffile.imwrite(folder / "hole.tif", mask[4], photometric="minisblack")
    tall, tall_mask = np.tile(stack, (2, 1, 1)), np.tile(mask, (2, 1, 1))
    tifffile.imwrite(folder / "tall.tif", tall, photometric="minisblack")
    tifffile.imwrite(folder / "tall_mask.tif", tall_mask, photometric="minisblack")
    tifffile.imwrite(folder / "wide.tif", np.tile(stack, (2, 4, 3)), photometric="minisblack")
    np.save(folder / "stack.npy", stack)
    with h5py.File(folder / "stack.h5", "w") as file:
        file.create_dataset("data", data=stack, chunks=(2, 40, 48))
    zarr.save_array(folder / "stack.zarr", stack)
    torch.manual_seed(0)
    sd3_pipeline(**clip_text()).save_pretrained(folder / "sd3")
    flux_pipeline().save_pretrained(folder / "flux")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Names and words, of each line `name: words`."""
    for line in COMMANDS.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, words = line.split(":", 1)
            yield name, shlex.split(words)


def run(tree: Path, only: list[str]) -> dict[str, Any]:
    """What each command gives: its exit code, and of every file of its results a digest or its figures."""
    found: dict[str, Any] = {}
    program = tree / ".venv/bin/cocodiff"
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_inputs(folder)
        for name, words in commands():
            if only and name not in only:
                continue
            print(name, *words, flush=True)
            (folder / name).mkdir(exist_ok=True)
            words = [word.replace("%", str(folder)).replace("@", str(tree)) for word in words]
            done = subprocess.run(
                [program, *words], cwd=folder / name, env=env, text=True, capture_output=True, stdin=subprocess.DEVNULL
            )
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)
            found[name] = {"rc": done.returncode, "files": dict(results(folder / name))}
    return found


def results(folder: Path) -> Iterator[tuple[str, Any]]:
    """Of every file of results below a folder: its name, and what it holds."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if any(part.startswith(".") for part in Path(name).parts) or name.endswith(NOT_RESULTS):
            continue
        if path.suffix in (".zarr",) and path.is_dir():
            yield name, [digest(np.asarray(array)) for array in arrays_of(zarr.open(str(path), mode="r"))]
        elif path.is_file() and ".zarr" not in name:
            yield name, content(path)


def arrays_of(node: Any) -> Iterator[Any]:
    if isinstance(node, zarr.Array):
        yield node
    else:
        for _, below in sorted(node.members()):
            yield from arrays_of(below)


def content(path: Path) -> Any:
    with contextlib.suppress(ValueError):
        if path.suffix in (".tif", ".tiff"):
            return digest(tifffile.imread(path))
        if path.suffix == ".png":
            return digest(imread(path))
        if path.suffix == ".npy":
            return digest(np.load(path))
        if path.suffix == ".json":
            return without_times(json.loads(path.read_text()))
        if path.suffix == ".jsonl":
            return [without_times(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix in (".h5", ".hdf5"):
        kept: list[str] = []
        with h5py.File(path) as file:
            file.visititems(lambda at, node: kept.append(digest(node[()])) if isinstance(node, h5py.Dataset) else None)
        return kept
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(array: np.ndarray) -> str:
    array = np.ascontiguousarray(array)
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:32]}"


def without_times(value: Any) -> Any:
    """Figures that two runs of the same program share."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not any(word in k for word in TIMES) and k != "config"}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}, key=str):
            if key not in before or key not in after:
                yield f"{at}/{key}: only {'after' if key in after else 'before'}"
            else:
                yield from differences(before[key], after[key], f"{at}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{at}/{number}")
    elif before != after:
        yield f"{at}: {str(before)[:90]} -> {str(after)[:90]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run")
    one.add_argument("--tree", type=lambda path: Path(path).resolve(), default=ROOT)
    one.add_argument("--only", nargs="*", default=[], help="names of commands")
    one.add_argument("--out", required=True)
    both = verbs.add_parser("compare")
    both.add_argument("before")
    both.add_argument("after")
    given = parser.parse_args()
    if given.verb == "run":
        found = run(given.tree, given.only)
        Path(given.out).write_text(json.dumps(found, indent=1, default=str))
        return 0
    before, after = (json.loads(Path(path).read_text()) for path in (given.before, given.after))
    lines = list(differences(before, after))
    print(*lines, f"{len(before)} commands, {len(lines)} differences", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
