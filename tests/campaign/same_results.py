"""Runs the commands of `same_results.txt` by the program of a tree and keeps what they give: digests of files, and
figures, not times. By hand, before and after a change that should change no result:

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


def run(tree: Path, only: list[str]) -> Iterator[tuple[str, Any]]:
    """Give, by place, what the commands give: exit codes, digests of results, and figures."""
    program = tree / ".venv/bin/cocodiff"
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_inputs(folder)
        for name, line in re.findall(r"^([^#\s].*?): *(.*)$", COMMANDS.read_text(), re.MULTILINE):
            if only and name not in only:
                continue
            print(name, line, flush=True)
            (folder / name).mkdir(exist_ok=True)
            words = [word.replace("%", str(folder)).replace("@", str(tree)) for word in shlex.split(line)]
            how: dict[str, Any] = {"cwd": folder / name, "env": env, "text": True, "stdin": subprocess.DEVNULL}
            done = subprocess.run([program, *words], capture_output=True, **how)
            print(done.stderr[-2000:] if done.returncode else "", file=sys.stderr, end="")
            yield f"{name}/rc", done.returncode
            for path in sorted((folder / name).rglob("*")):
                place = str(path.relative_to(folder))
                hidden = "/." in f"/{place}" or place.endswith(NOT_RESULTS)
                if not hidden and path.is_file():
                    yield from flat(content(path), place)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run")
    one.add_argument("--tree", type=lambda path: Path(path).resolve(), default=ROOT)
    one.add_argument("--only", nargs="*", default=[], help="names of commands")
    one.add_argument("--out", required=True)
    verbs.add_parser("compare").add_argument("files", nargs=2)
    given = parser.parse_args()
    if given.verb == "run":
        Path(given.out).write_text(json.dumps(dict(run(given.tree, given.only)), indent=1, default=str))
        return 0
    before, after = (json.loads(Path(path).read_text()) for path in given.files)
    changed = [at for at in sorted({*before, *after}) if before.get(at, "absent") != after.get(at, "absent")]
    for at in changed:
        print(f"{at}: {str(before.get(at, 'absent'))[:90]} -> {str(after.get(at, 'absent'))[:90]}")
    print(f"{len(before)} figures, {len(changed)} differences")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
