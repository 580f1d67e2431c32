"""Commands of the campaign of inputs: a mask and options for an input, or a settings file, with something unusual."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tifffile
import yaml
import zarr
from cocodiff_eval.data.masks import block_mask, center_mask
from inputs_files import Draw, Given, damage, make_voxels, mutated
from PIL import Image
from warm import forked

BAD_OPTIONS: dict[str, tuple[str, ...]] = {
    "range": ("7", "5,1", "nan,1", "0,inf", "a,b", "1,2,3", "", "-1e400,1"),
    "slices": ("5:1", "9999:", "x", "1", "-1:2", "0:99999999999", "²:3"),
    "roi": ("0:1", "0:99999,0:1", "5:2,0:20", "0:20", ",", "a:b,c:d", "0:20,0:20,0:20", "-5:20,0:20"),
    "samples": ("0", "-1", "1001", "1e3", "x", ""),
    "steps": ("0", "-3", "1.5", "9" * 30, "x"),
    "strength": ("0", "-1", "2", "nan", "1e-300", "x"),
    "batch": ("0", "-1", "x"),
    "seed": ("x", "1.5", "1e3", ""),
    "format": ("TIFF", "none", "", "png"),
    "preset": ("tappa", "", ","),
    "exact_slices": ("0", "-1", "x"),
    "dtype": ("float32", ""),
    "ranks": ("0", "-1", "x", "100000000"),
    "replicas": ("0", "2", "x", "²"),
    "machine": ("nowhere", "", "a\nb"),
    "timeout_s": ("0", "-1", "nan", "x"),
    "model": ("", "nowhere", "\ud800"),
    "truth": ("nowhere.tif", ""),
    "config": ("nowhere.yaml", "."),
    "out": ("", "in", "/proc/x", "y" * 300, "in/notes.txt/x"),
    "colour": ("red",),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "inpaint": {"input": ["in/scan.tif"], "mask": ["block"], "steps": 1, "strength": 1.0, "range": "0,60000", "seed": 3}
    | {"format": "zarr", "preset": ["tapa"], "samples": 1, "exact": False, "batch": 4, "timeout_s": 60.0}
    | {"slices": "0:1", "roi": "0:20,0:20", "dtype": "fp32", "replicas": 1, "chunks": 1, "quality_slices": 2},
    "generate": {"model": "model", "prompt": [], "height": 32, "width": 32, "steps": 1, "seed": 1, "preset": ["tapa"]}
    | {"exact": False, "guidance": 1.0, "dtype": "fp32", "parallel": "off", "replicas": "auto", "ring": "auto"},
    "sweep": {"input": ["in/scan.tif"], "steps": [1], "base": {"exchange": "flat"}, "seed": 3, "strength": 1.0}
    | {"grid": {"mask": ["center"], "order": ["v_first", "joint"]}, "points": [{"name": "theirs", "preset": "tapa"}]},
}
# What is no YAML of settings, with the right text in the place of {}.
NO_SETTINGS = ("\t{}", "{0}{0}", "", "- a\n- b\n", "a: &a [*a]\n", "{}seed: !!python/object/apply:os.getpid []\n", "\0")
NO_SETTINGS += ("{}seed: 2020-01-01\n", "{{" * 3000, "{}<<: [1]\n", "{}? [a]\n: 1\n", "{}seed: 0x1F\n", "~: 1\n")
NO_SETTINGS += ("{}seed: 1_000\n", "\udcff\udcfe{}")


@dataclass
class Command:
    """The words of a command, and what is right of it."""

    words: list[str]
    names: list[str]  # of which a line of refusal has one
    ends: int | None = None  # 0, 2, or None where either is right
    format: str = "same"
    samples: int = 1
    mask: np.ndarray | None = None  # of the part that is restored; None where damage may have changed it
    part: tuple[slice, ...] = (slice(None),) * 3
    limits: tuple[float, float] | None = None
    options: dict[str, str] = field(default_factory=dict)


def make_inpaint(given: Given, draw: Draw, twist: str, out: Path) -> Command:
    """Make a command that restores an input, with the file of its mask."""
    chance, names = draw.chance, [draw.stem.splitlines()[-1], draw.stem.splitlines()[0], "/in/outer", "/in/part"]
    command = Command(["inpaint", "--quiet", "--no_exact", "--follow_links", "--input", str(given.path)], names)
    whole = np.zeros((1, 20, 20), "u1") if given.voxels is None or given.wrong else given.voxels
    whole = whole if whole.ndim == 3 else whole[None]
    options = {"out": str(out), "steps": "1", "seed": str(chance.choice([0, 5, 2**40, -1]))}
    if draw.maybe(0.25) and min(whole.shape[1:]) > 18:
        first = chance.randrange(len(whole))
        command.part = slice(first, len(whole)), slice(1, 17), slice(2, 18)
        options |= {"slices": f"{first}:{draw.pick('', len(whole))}", "roi": draw.pick("1:17,2:18", " 1 : 17 , 2:18")}
    if draw.maybe(0.3):
        command.format = options["format"] = draw.pick("tiff", "sequence", "zarr", "h5", "npy")
    if draw.maybe(0.15):
        command.samples, options["samples"] = 2, "2"
    if draw.maybe(0.1):
        options["truth"] = str(given.path)
    options["mask"], wrong = make_mask(command, whole, int(options["seed"]), draw, twist)
    wrong |= given.wrong
    if command.mask is not None and not wrong and given.voxels is not None:
        wrong |= not set_limits(command, given, whole[command.part], options, draw)
    command.ends = 2 if wrong or twist == "options" else None if given.refusals or twist == "damaged mask" else 0
    if twist == "options":
        for name in chance.sample([*BAD_OPTIONS], chance.choice([1, 1, 2])):
            options[name] = chance.choice(BAD_OPTIONS[name])
        command.names += ["--", "out", "ranks", "machine", *filter(None, options.values())]
    command.words += [f"--{name}={word}" for name, word in options.items()]
    command.options = options
    return command


def make_mask(command: Command, whole: np.ndarray, seed: int, draw: Draw, twist: str) -> tuple[str, bool]:
    """Return the word of --mask, and True where it must be refused; write its file."""
    part = whole[command.part]
    if twist not in ("mask", "damaged mask") and draw.maybe(0.6):
        kind = draw.pick("block", "center")
        made_YX = block_mask(part.shape[1:], seed) if kind == "block" else center_mask(part.shape[1:])
        command.mask = np.broadcast_to(made_YX, part.shape)
        return kind, False
    kinds = ("none", "all", "a slice", "a slice", "values", "shape", "channels", "missing", "nan")
    odd = draw.pick(*kinds) if twist == "mask" else ""
    of_all, flat = draw.maybe(0.5), draw.maybe(0.5) and odd != "a slice"
    mask = np.random.default_rng(draw.chance.randrange(2**32)).random(whole.shape if of_all else part.shape) < 0.3
    mask[:] = mask[:1] if flat else mask
    if twist == "mask":
        mask[...] = mask & (odd != "none") | (odd == "all")
        mask[0] |= odd == "a slice"
    cut = mask[command.part] if of_all else mask
    command.mask = cut & ~cut.all((1, 2))[:, None, None]
    wrong = odd not in ("", "a slice", "nan") or not command.mask.any() or (flat and bool(cut[0].all()))
    dtype = np.dtype(draw.pick("?", "u1", "u2", "i2", "f4") if odd != "nan" else "f4")
    stored = mask.astype(dtype) * np.array(draw.pick(1, 255 if dtype.kind != "b" else 1)).astype(dtype)
    stored = stored[0] if flat else stored
    if odd == "nan":
        stored[stored > 0] = np.nan
    elif odd == "values":
        stored = np.arange(stored.size).reshape(stored.shape).astype("u2")
    elif odd == "shape":
        stored = stored[..., :-1]
    elif odd == "channels":
        stored = np.stack([[stored] * 2] * 2)
    suffixes = (".tif", ".h5", ".zarr", ".npy", *((".png",) if dtype == "u1" and stored.ndim == 2 else ()))
    file = draw.folder / f"holes{draw.pick(*suffixes)}"
    save_mask(file, stored)
    if odd == "missing":
        damage(file, "gone", random.Random("2"))
    if twist == "damaged mask":
        damage(file, draw.pick("cut", "flip", "gone"), draw.chance)
        command.mask = None
    command.names.append("holes")
    return str(file), wrong


def save_mask(file: Path, stored: np.ndarray) -> None:
    if file.suffix == ".tif":
        tifffile.imwrite(file, stored, photometric="minisblack")
    elif file.suffix == ".png":
        Image.fromarray(stored).save(file)
    elif file.suffix == ".npy":
        np.save(file, stored)
    elif file.suffix == ".h5":
        with h5py.File(file, "w") as new:
            new["exchange/data"] = stored
    else:
        zarr.create_array(file, shape=stored.shape, dtype=stored.dtype, zarr_format=2)[...] = stored


def set_limits(command: Command, given: Given, part: np.ndarray, options: dict[str, str], draw: Draw) -> bool:
    """Note what limits restored voxels: those outside the mask, and --range. Return False where the former cannot be
    restored from."""
    if given.missing is not None or given.refusals:
        return True
    assert command.mask is not None
    with np.errstate(all="ignore"):
        outside = part[~command.mask].astype(np.float64)
        if not np.isfinite(outside).all() or not np.isfinite(outside.max() - outside.min()):
            return False
    low, high = command.limits = (float(outside.min()), float(outside.max()))
    if draw.maybe(0.12):
        bottom, top = sorted(draw.chance.uniform(-100, 300) for _ in "ab")
        options["range"] = f"{bottom},{top}"
        command.limits = min(bottom, low), max(top, high)
        return high >= bottom and low <= top
    return True


def make_settings(folder: Path, chance: random.Random, name: str) -> Command:
    """Write a settings file with one value, or a few, that are others than expected; or with what is none."""
    tifffile.imwrite(folder / "in/scan.tif", make_voxels((2, 20, 24), np.dtype("u2"), chance, False))
    values: Any = dict(chance.sample([*SETTINGS[name].items()], chance.randint(4, len(SETTINGS[name]))))
    values |= {"out": "out", "quiet": True, "steps": [1] if name == "sweep" else 1}
    values |= {"model": "model"} if name == "generate" else {"input": ["in/scan.tif"]}
    for _ in range(chance.randint(0, 3)):
        values = mutated(values, chance)
    if isinstance(values, dict) and (name == "sweep" or chance.random() < 0.5):
        values.setdefault("dry_run", True)
    text = yaml.safe_dump(values, allow_unicode=chance.random() < 0.5)
    if chance.random() < 0.25:
        text = chance.choice([*(one.format(text) for one in NO_SETTINGS), text[: len(text) // 2]])
    (folder / "run.yaml").write_bytes(text.encode(errors="surrogateescape"))
    if name == "generate":
        (folder / "model").symlink_to(Path(model_folder().name) / "model")
    return Command([name, "--config", "run.yaml"], ["run.yaml", "--", "point", "grid", "base"])


@cache
def model_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder with a tiny text-to-image model for `generate`, where diffusers is imported."""
    folder = tempfile.TemporaryDirectory()
    done = forked(f"{folder.name}/model", folder=Path(folder.name), module="inputs_commands")
    assert done.returncode == 0, done.stderr
    return folder


def main() -> int:
    """Save the model, in a process that has imported what it is made of."""
    import sys

    import tiny_pipelines

    tiny_pipelines.sd3_pipeline().save_pretrained(sys.argv[1])
    return 0
