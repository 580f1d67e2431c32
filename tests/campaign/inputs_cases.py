"""The cases of the campaign of inputs: an input, or settings, with something unusual, and the command that takes it."""

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
from inputs_files import ANY, DTYPES, FORMATS, NO_IMAGES, USUAL, Size, damage, mutated
from PIL import Image
from warm import forked

TWISTS = ("none", "dtype", "shape", "values", "mask", "metadata", "cut", "flip", "gone", "name", "options", "storage")
TWISTS += ("damaged mask",)  # as many as have no common divisor with the formats: each pair comes up
SETTINGS_EVERY = 8  # of so many cases one is of settings
NAMES = (
    "a b",
    "ü–漢字",
    "a'b\"c",
    "x" * 180,
    "[1]",
    "a\nb",
    "%20",
    ".hidden",
    "a:b",
    "a*b?",
    "x.h5:y",
    "x.zarr",
    "-dash",
)
NAMES += ("$HOME", "a;b", "{x}", "labels", "1", "a,b", "\u202etxt", "nul", "~", "..a", "e\u0301")
BAD_OPTIONS: dict[str, tuple[str, ...]] = {
    "range": ("7", "5,1", "nan,1", "0,inf", "a,b", "1,2,3", "", "-1e400,1"),
    "slices": ("5:1", "9999:", "x", "1", "-1:2", "0:99999999999", "²:3"),
    "roi": ("0:1", "0:99999,0:1", "5:2,0:20", "0:20", ",", "a:b,c:d", "0:20,0:20,0:20", "-5:20,0:20"),
    "samples": ("0", "-1", "1001", "1e3", "x", ""),
    "steps": ("0", "-3", "1.5", "9" * 30, "x"),
    "strength": ("0", "-1", "2", "nan", "1e-300", "x"),
    "batch": ("0", "-1", "x"),
    "seed": ("x", "1.5", "9" * 400),
    "format": ("TIFF", "npy", "", "png"),
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


@dataclass
class Case:
    """One input or settings file. files: what a line of refusal may name; ends: 0, 2, or None where either is right;
    voxels: as they were written, None where damage may have changed them; array: of the voxels in memory."""

    kind: str
    twist: str
    folder: Path
    words: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    ends: int | None = None
    path: Path = Path()
    format: str = "same"
    voxels_NYX: np.ndarray | None = None
    mask_NYX: np.ndarray | None = None
    part: tuple[slice, slice, slice] = (slice(None), slice(None), slice(None))
    size_um: Size | None = None
    limits: tuple[float, float] | None = None
    samples: int = 1


def make_case(seed: int, number: int, folder: Path) -> Case:
    """Writes the files of a case below `folder / "in"`."""
    chance = random.Random(f"{seed} {number}")
    (folder / "in").mkdir(parents=True)
    turn, settings = divmod(number, SETTINGS_EVERY)
    if settings == SETTINGS_EVERY - 1:
        return make_settings(folder, chance, [*SETTINGS][turn % len(SETTINGS)])
    place = number - turn
    case = Case([*FORMATS][place % len(FORMATS)], TWISTS[place % len(TWISTS)], folder)
    wrong = make_input(case, chance)
    wrong |= make_options(case, chance)
    if case.twist in ("cut", "flip", "gone"):
        damage(case.path, case.twist, chance)
        case.ends = None
        if case.twist != "cut":
            case.voxels_NYX = case.limits = None
    elif case.twist in ("metadata", "options", "damaged mask"):
        case.ends = 2 if wrong else None
    else:
        case.ends = 2 if wrong else 0
    return case


def make_input(case: Case, chance: random.Random) -> bool:
    """Whether what is written is to be refused."""
    kind, twist = case.kind, case.twist
    dtypes = DTYPES.get(kind, ANY)
    name = chance.choice(dtypes if twist == "dtype" else [one for one in USUAL if one in dtypes])
    wrong = False
    if twist == "dtype" and kind in ("hdf5", "zarr2", "ngff04", "tiff") and chance.random() < 0.3:
        name, wrong = chance.choice(NO_IMAGES), True
    shape: tuple[int, ...] = tuple(chance.randint(*ends) for ends in ((1, 3), (16, 40), (16, 40)))
    shape = (max(2, shape[0]), *shape[1:]) if kind == "frames" else shape
    whole = kind in ("sequence", "frames")
    if kind == "png" or (not whole and chance.random() < 0.3):
        shape = shape[1:]
    if twist == "shape":
        side, lead = chance.randint(16, 24), shape[:-2]
        shapes = [
            (*lead, 15, side),
            (*lead, side, 1),
            (*lead, 16, 500),
            (*lead, 16, 16),
            (*lead, 501, 17),
            (*lead, 1, 1),
        ]
        if kind in ("hdf5", "zarr2", "zarr3", "ngff04", "ngff05"):
            shapes += [(0, side, side), (2, 0, side), (side,), (2, 2, side, side), (), (1, 2, 1, 0)]
        shape = chance.choice(shapes)
        wrong = len(shape) not in (2, 3) or min(shape[-2:]) < 16 or shape[0] == 0
    voxels = make_voxels(shape, np.dtype(name), chance, twist == "values")
    stem, suffix = "scan", FORMATS[kind][1]
    if twist == "name":
        stem, suffix = chance.choice(NAMES), suffix.upper() if chance.random() < 0.3 and suffix != ".h5" else suffix
    case.path = case.folder / "in" / f"{stem}{suffix}"
    case.size_um = FORMATS[kind][0](case.path, voxels, chance, twist == "metadata", twist == "storage")
    if not wrong:
        case.voxels_NYX = voxels if voxels.ndim == 3 else voxels[None]
    case.files += [stem.splitlines()[-1], stem.splitlines()[0]]
    return wrong


def make_voxels(shape: tuple[int, ...], dtype: np.dtype, chance: random.Random, odd: bool) -> np.ndarray:
    random_bits = np.random.default_rng(chance.randrange(2**32))
    if dtype.kind in "bc":
        return random_bits.integers(0, 2, shape).astype(dtype)
    top = {"u1": 255, "i1": 127, "f2": 2000}.get(dtype.str[1:], 30000)
    voxels = random_bits.integers(0, top, shape).astype(dtype)
    if not odd or not voxels.size:
        return voxels
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    at = tuple(chance.randrange(side) for side in shape)
    some: list[Any] = [limits.max, limits.min, 0]
    how = chance.choice(["constant", "hot", "full", "ends", "sparse"] + (["bad", "tiny"] if dtype.kind == "f" else []))
    if how == "constant":
        voxels[...] = chance.choice(some)
    elif how == "hot":
        voxels[...], voxels[at] = 7, chance.choice(some)
    elif how == "full":
        voxels = random_bits.integers(0, 256, (*shape, dtype.itemsize), dtype="u1").view(dtype)[..., 0]
    elif how == "ends":
        voxels = random_bits.choice(np.array(some, dtype), shape)
    elif how == "sparse":
        voxels[random_bits.random(shape) < 0.99] = 0
    elif how == "bad":
        voxels[at] = chance.choice([np.nan, np.inf, -np.inf])
    else:
        voxels = (voxels * float(limits.smallest_subnormal)).astype(dtype)
    return voxels


def make_options(case: Case, chance: random.Random) -> bool:
    """The words of the command, and the mask and the region that they name. Whether they are to be refused."""
    path, wrong = case.path, False
    voxels = case.voxels_NYX if case.voxels_NYX is not None else np.zeros((1, 20, 20), "u1")
    given: dict[str, str] = {
        "out": str(case.folder / "out"),
        "steps": "1",
        "seed": str(chance.choice([0, 5, 2**40, -1])),
    }
    if chance.random() < 0.25 and min(voxels.shape[1:]) > 18:
        case.part = (slice(chance.randrange(len(voxels)), len(voxels)), slice(1, 17), slice(2, 18))
        given["slices"] = f"{case.part[0].start}:{chance.choice(['', len(voxels)])}"
        given["roi"] = chance.choice(["1:17,2:18", " 1 : 17 , 2:18"])
    if chance.random() < 0.3:
        case.format = given["format"] = chance.choice(["tiff", "sequence", "zarr", "h5"])
    if chance.random() < 0.15:
        case.samples, given["samples"] = 2, "2"
    if chance.random() < 0.1:
        given["truth"] = str(path)
    given["mask"], refused = make_mask(case, voxels, int(given["seed"]), chance)
    wrong |= refused
    if case.mask_NYX is not None and not wrong:
        wrong |= not check_values(case, voxels, given, chance)
    if case.twist == "options":
        for name in chance.sample([*BAD_OPTIONS], chance.choice([1, 1, 2])):
            given[name] = chance.choice(BAD_OPTIONS[name])
        given["steps"] = given["steps"] if given["steps"] in BAD_OPTIONS["steps"] else "1"
        wrong = True
        case.files += ["--", "out", "ranks", "machine", *(word for word in given.values() if word)]
    case.words = ["inpaint", "--quiet", "--no_exact", "--input", str(path)]
    case.words += [f"--{name}={word}" for name, word in given.items()]
    return wrong


def make_mask(case: Case, voxels: np.ndarray, seed: int, chance: random.Random) -> tuple[str, bool]:
    """The word of --mask, and whether it is to be refused; writes its file."""
    part = voxels[case.part] if min(voxels.shape) else np.zeros((1, 20, 20), "u1")
    file_wanted = case.twist in ("mask", "damaged mask") or chance.random() < 0.4
    if not file_wanted:
        kind = chance.choice(["block", "center"])
        sides = part.shape[1:]
        one_YX = block_mask(sides, seed) if kind == "block" else center_mask(sides)
        case.mask_NYX = np.broadcast_to(one_YX, part.shape)
        return kind, False
    of_all = chance.random() < 0.5
    shape = voxels.shape if of_all else part.shape
    mask_NYX = np.random.default_rng(chance.randrange(2**32)).random(shape) < 0.3
    flat, odd, wrong = chance.random() < 0.5, "", False
    if flat:
        mask_NYX[:] = mask_NYX[:1]
    if case.twist == "mask":
        odd = chance.choice(["none", "all", "a slice", "values", "shape", "channels", "missing", "nan"])
        mask_NYX[...] = False if odd == "none" else True if odd == "all" else mask_NYX
        if odd == "a slice":
            mask_NYX[0] = True
        wrong = odd not in ("a slice", "nan")
    cut_NYX = mask_NYX[case.part] if of_all else mask_NYX
    left_NYX = cut_NYX & ~cut_NYX.all((1, 2))[:, None, None]
    wrong |= not left_NYX.any() or (flat and bool(cut_NYX[0].all()))
    case.mask_NYX = left_NYX
    dtype = np.dtype(chance.choice(["?", "u1", "u2", "i2", "f4"]) if odd != "nan" else "f4")
    stored = mask_NYX.astype(dtype) * np.array(chance.choice([1, 255 if dtype.kind != "b" else 1])).astype(dtype)
    stored = stored[0] if flat else stored
    if odd == "nan":
        stored[stored > 0] = np.nan
    if odd == "values":
        stored = np.arange(stored.size).reshape(stored.shape).astype("u2")
    elif odd == "shape":
        stored = stored[..., :-1]
    elif odd == "channels":
        stored = np.stack([[stored] * 2] * 2)
    suffix = chance.choice([".tif", ".h5", ".zarr"] + ([".png"] if dtype == "u1" and stored.ndim == 2 else []))
    file = case.folder / "in" / f"holes{suffix}"
    save_mask(file, stored)
    if odd == "missing":
        damage(file, "gone", random.Random("2"))
    if case.twist == "damaged mask":
        damage(file, chance.choice(["cut", "flip", "gone"]), chance)
        case.mask_NYX = None
    case.files.append("holes")
    return str(file), wrong


def save_mask(file: Path, stored: np.ndarray) -> None:
    if file.suffix == ".tif":
        tifffile.imwrite(file, stored, photometric="minisblack")
    elif file.suffix == ".png":
        Image.fromarray(stored).save(file)
    elif file.suffix == ".h5":
        with h5py.File(file, "w") as new:
            new["exchange/data"] = stored
    else:
        zarr.create_array(file, shape=stored.shape, dtype=stored.dtype, zarr_format=2)[...] = stored


def check_values(case: Case, voxels: np.ndarray, given: dict[str, str], chance: random.Random) -> bool:
    """Whether the voxels outside the mask can be restored from; what limits restored ones, by them and --range."""
    assert case.mask_NYX is not None
    with np.errstate(all="ignore"):
        outside = voxels[case.part][~case.mask_NYX].astype(np.float64)
        if not np.isfinite(outside).all() or not np.isfinite(outside.max() - outside.min()):
            return False
    case.limits = (float(outside.min()), float(outside.max()))
    if chance.random() < 0.12:
        low, high = sorted(chance.uniform(-100, 300) for _ in "ab")
        given["range"] = f"{low},{high}"
        case.limits = (min(low, case.limits[0]), max(high, case.limits[1]))
        return not (outside.max() < low or outside.min() > high)
    return True


def make_settings(folder: Path, chance: random.Random, command: str) -> Case:
    """A settings file with one value, or a few, that are others than expected; or with what is no YAML of settings."""
    tifffile.imwrite(folder / "in/scan.tif", np.random.default_rng(0).integers(0, 60000, (2, 20, 24), "u2"))
    values: Any = dict(chance.sample([*SETTINGS[command].items()], chance.randint(4, len(SETTINGS[command]))))
    values |= {"out": "out", "quiet": True, **({"steps": 1} if command != "sweep" else {"steps": [1]})}
    values |= {"model": "model"} if command == "generate" else {"input": ["in/scan.tif"]}
    for _ in range(chance.randint(0, 3)):
        values = mutated(values, chance)
    if isinstance(values, dict) and (command == "sweep" or chance.random() < 0.5):
        values.setdefault("dry_run", True)
    text = yaml.safe_dump(values, allow_unicode=chance.random() < 0.5).encode()
    if chance.random() < 0.25:
        spoilt = [
            text[: len(text) // 2],
            b"\xff\xfe" + text,
            b"\t" + text,
            text + text,
            b"",
            b"- a\n- b\n",
            b"a: &a [*a]\n",
        ]
        spoilt += [
            text + b"seed: !!python/object/apply:os.getpid []\n",
            text + b"seed: 2020-01-01\n",
            b"{" * 3000,
            b"\0",
        ]
        spoilt += [
            text + b"<<: [1]\n",
            text + b"? [a]\n: 1\n",
            text + b"seed: 0x1F\n",
            text + b"seed: 1_000\n",
            b"~: 1\n",
        ]
        text = chance.choice(spoilt)
    (folder / "run.yaml").write_bytes(text)
    if command == "generate":
        (folder / "model").symlink_to(Path(model_folder().name) / "model")
    return Case(
        "settings", command, folder, [command, "--config", "run.yaml"], ["run.yaml", "--", "point", "grid", "base"]
    )


@cache
def model_folder() -> tempfile.TemporaryDirectory[str]:
    """With a tiny text-to-image model for `generate`. Made where diffusers is imported."""
    folder = tempfile.TemporaryDirectory()
    done = forked(f"{folder.name}/model", folder=Path(folder.name), module="inputs_files")
    assert done.returncode == 0, done.stderr
    return folder
