"""Generated inputs: files of every format with something unusual, damaged ones among them.

A seed and a number make a file and a mask. It is opened as `cocodiff inpaint` does it, voxels under the mask are given
other values, and results are written in every format, of the whole and of a region.

A result is right where h5py, xarray, tifffile, mrcfile and Zarr's library find in it: the input's voxels outside the
mask, and under it the new ones; the type, the voxel's sides, the attributes and byte order. Else it must end with one
line that names the file. Of most cases it is known which of both is right.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import numpy as np
from cocodiff_eval.cli.inpaint import ABOUT, OPTIONS
from cocodiff_eval.data.formats import FORMATS, open_volume, write_volume
from cocodiff_eval.data.intensity import compose_native
from cocodiff_eval.data.masks import block_mask, center_mask
from cocodiff_eval.harness.tasks import export, find_tasks, result_files
from file_kinds import KINDS, read_plainly, texts_in
from inputs_checks import bits, check_result, file_of, in_meters, opened, other_sides, voxels_of
from inputs_files import DTYPES, SHAPE, UNKNOWN, USUAL, Draw, Given, Result, damage, make_voxels
from inputs_images import imagej, ome, tiff, usual
from inputs_stores import hdf5, store

from cocodiff.config.errors import UserError
from cocodiff.jobs.options import parse, with_settings

WORDS = ("tiff", "sequence", "zarr", "h5", "npy", "mrc")
PRESET = "cocodiff, of a test"
NO_FORMAT = "MRC files hold no"  # the one refusal of a format
BOX = (slice(1, 3), slice(8, 14), slice(9, 17))  # the usual mask
MADE = {"block": partial(block_mask, seed=0), "center": center_mask}
# Makers by the types of voxels that they take.
TYPES: dict[Callable[[Draw], Given], tuple[str, ...]] = dict.fromkeys((usual, tiff, hdf5, store), DTYPES)
TYPES |= {imagej: ("u1", "u2", "f4"), ome: tuple(sorted({*DTYPES} - {"u8", "i8", "f2"}))}
MAKERS = (usual, hdf5, usual, store, usual, imagej, tiff, usual, ome, hdf5, usual, store, usual, ome, tiff, usual)
# As many as have no common divisor with the makers: each pair comes up.
TWISTS = ("none", "dtype", "storage", "metadata", "mask", "values", "cut", "shape", "none", "name", "flip", "storage")
TWISTS += ("flip",)
DAMAGES = ("cut", "flip")
NAMES = ("a b", "ü–漢字", "a'b\"c", "[1]", "a\nb", "%20", ".hidden", "a:b", "a*b?", "x.h5:y", "x.zarr", "-dash")
NAMES += ("$HOME", "a;b", "{x}", "labels", "1", "a,b", "nul", "~", "..a", "x" * 180, "\u202etxt", "e\u0301")


def run_case(number: int, seed: int, folder: Path) -> list[str]:
    """Make a case in an empty folder, and list what is wrong with its results."""
    chance, (laps, place), inputs = random.Random(f"{seed} {number}"), divmod(number, len(MAKERS)), folder / "in"
    maker, twist = MAKERS[place], TWISTS[number % len(TWISTS)]
    inputs.mkdir()
    draw = make_draw(chance, maker, twist, inputs, laps * MAKERS.count(maker) + MAKERS[:place].count(maker))
    given, wrong = maker(draw), []
    given.wrong = draw.wrong
    if draw.wrong or draw.odd:
        given.refusals = "."
    elif twist == "values" and draw.voxels.dtype.kind == "f":
        given.refusals = "NaN or Inf|too far apart|missing"
    shape = SHAPE if given.voxels is None or given.wrong else given.voxels.shape
    word, hidden = make_mask(inputs, shape, draw, twist)
    if twist in DAMAGES:
        spoil(given, word, twist, chance)
    top, left = min(3, shape[-2] - 16), min(5, shape[-1] - 16)
    part = (slice(1, 4), slice(top, max(top + 16, shape[-2] - 1)), slice(left, shape[-1]))[-len(shape) :]
    own = {".nxs": "h5", ".hdf5": "h5"}.get(file_of(given.path).suffix, file_of(given.path).suffix[1:])
    tries = [("same", False), ("same", True), *((one, (number + n) % 2 == 0) for n, one in enumerate(WORDS))]
    before = contents(inputs)
    for format, of_region in tries[: 3 if twist in DAMAGES else None]:
        if format != own:
            cut = part if of_region else (slice(None),) * len(shape)
            found = try_format(given, format, word, hidden, cut, folder / f"{format}{'-region' * of_region}")
            wrong += [f"{format}{', region' * of_region}: {found}"] if found else []
    wrong += ["the input is another"] if contents(inputs) != before else []
    return [f"{maker.__name__}, {given.kind}, {twist}", *wrong] if wrong else []


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def make_draw(chance: random.Random, maker: Callable[[Draw], Given], twist: str, folder: Path, turn: int) -> Draw:
    """Draw the voxels of an input, and what is unusual of it."""
    types, wrong = TYPES[maker], False
    dtype = chance.choice([*types] if twist == "dtype" else [one for one in USUAL if one in types])
    if twist == "dtype" and maker in (hdf5, tiff) and chance.random() < 0.2:
        dtype, wrong = chance.choice(["?", "c8", "c16"]), True
    shape: tuple[int, ...] = SHAPE[1:] if chance.random() < 0.25 else SHAPE
    if twist == "shape":
        side, lead = chance.randint(16, 24), shape[:-2]
        shapes = [(*lead, *sides) for sides in ((15, side), (side, 1), (16, 500), (16, 17), (501, 17), (1, 1))]
        shapes += [(0, side, side), (2, 0, side), (side,), (2, 2, side, side), ()] * (maker in (hdf5, store))
        shape = chance.choice(shapes)
        wrong = len(shape) not in (2, 3) or min(shape[-2:]) < 16 or shape[0] == 0
    voxels = make_voxels(shape, np.dtype(dtype), chance, twist == "values")
    if twist == "dtype" and dtype in ("u8", "i8") and chance.random() < 0.5:  # steps that a float64 cannot tell
        voxels, wrong = voxels * 40 + voxels.dtype.type(chance.choice([2**53, 2**60, 2**62])), True
    stem = chance.choice(NAMES) if twist == "name" else "scan"
    return Draw(folder, voxels, chance, twist == "metadata", twist == "storage", stem, turn, wrong)


def make_mask(folder: Path, shape: tuple[int, ...], draw: Draw, twist: str) -> tuple[str, np.ndarray | None]:
    """Choose a mask, and write it if it is a file. Return the word of --mask, and what the file hides."""
    if twist != "mask" and draw.maybe(0.3):
        return draw.pick(*MADE), None
    hidden = np.zeros(shape, bool)
    hidden[BOX[-len(shape) :]] = True
    if twist == "mask":
        hidden = np.random.default_rng(draw.chance.randrange(2**32)).random(shape) < 0.3
    elif draw.maybe(0.3) and len(shape) == 3:  # one for all slices
        hidden[:] = hidden.max(axis=0)
    dtype = np.dtype(draw.pick("?", "u1", "u2", "i2", "f4"))
    stored = hidden.astype(dtype) * np.array(draw.pick(1, 255 if dtype.kind != "b" else 1)).astype(dtype)
    stored = stored[0] if len(shape) == 3 and (hidden == hidden[:1]).all() else stored
    return KINDS[draw.pick("tiff", "hdf5", "zarr 2", "npy")].file(folder / "holes", stored), hidden


def spoil(given: Given, mask: str, twist: str, chance: random.Random) -> None:
    """Damage the file of an input, or of its mask, which may then be refused. One cut short must not be read as other
    voxels."""
    of_mask = mask not in MADE and chance.random() < 0.3
    damage(file_of(Path(mask)) if of_mask else file_of(given.path), twist, chance)
    given.wrong, given.refusals, given.damaged = given.wrong and of_mask, ".", True
    if not of_mask:
        given.meters = UNKNOWN
        if twist != "cut":
            given.voxels = None


def try_format(given: Given, *of_result: Any) -> str:
    """Return what is wrong with the result of a part of an input in one format, or with its refusal."""
    try:
        return write_result(given, *of_result)
    except UserError as error:
        line, folder = str(error), str(file_of(given.path).parent)
        if "\n" in line or not (folder in line or NO_FORMAT in line):
            return f"a refusal of several lines, or that does not name the file: {line}"
        named = given.refusals and re.search(given.refusals, line, re.IGNORECASE)
        return "" if named or NO_FORMAT in line else f"refused: {line}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def write_result(
    given: Given, format: str, mask: str, hidden: np.ndarray | None, part: tuple[slice, ...], out: Path
) -> str:
    out.mkdir()
    asked = {**defaults(), "input": [str(given.path)], "mask": [mask], "format": format}
    ends = [f"{one.start}:{one.stop}" for one in part if one.stop is not None]
    asked |= {"slices": "".join(ends[:-2]) or None, "roi": ",".join(ends[-2:])} if ends else {}
    (task,) = find_tasks(asked)
    stack, masks = task.stack, np.stack([task.mask.read(index) for index in range(len(task.stack))])
    pattern = np.random.default_rng(5).random(stack.shape)  # over the range of known voxels
    images = (compose_native(stack.read(n), pattern[n], masks[n], task.scale) for n in range(len(stack)))
    restored, spread = np.stack([*images]), np.where(masks, pattern, 0).astype(np.float32)
    voxels = {"tapa": restored, "tapa_spread": spread}
    files = result_files(task, ["tapa"], lambda name, index: voxels[name][index], samples=2)
    export(task, files, out, {"tapa": {"preset": PRESET}}, {}, lambda numbers, what: numbers)
    if given.wrong or not np.isfinite(np.ptp(voxels_of(stack)[~masks].astype("f8"))):
        return "restored, and it had to be refused"
    if given.voxels is None:
        with contextlib.suppress(Exception):  # damaged, and restored: as its library reads it, or else as we do
            voxels = read_plainly(file_of(given.path), stack)
            given.voxels = voxels if voxels.size == np.prod(stack.whole or stack.shape) else None
    expected = np.stack([MADE[mask](stack.shape[1:])] * len(stack)) if mask in MADE else masks
    if hidden is not None and not given.damaged:
        expected = hidden[part].reshape(stack.shape)
    suffix = FORMATS[task.format].suffix
    path, of_spread, of_mask = (out / task.files.result(end, suffix) for end in ("tapa", "tapa_spread", "mask"))
    masked = mask in MADE or task.mask.full or stack.region is not None
    written = {path, of_spread} | ({of_mask} if masked and task.format != "zarr" else set())
    if not np.array_equal(masks, expected) or {*out.iterdir()} != written:
        return f"another mask, or other files than {[one.name for one in written]}"
    own = format == "same" or task.format == stack.metadata.kind.replace("hdf5", "h5")
    result = Result(path, task.format, own, stack, masks, restored, task.scale, mask in MADE)
    if voxels_of(opened(result, of_spread)).tobytes() != spread.tobytes():
        return "another standard deviation"
    of_mask = path / "labels" / mask if task.format == "zarr" else of_mask
    if mask in MADE and not np.array_equal(voxels_of(opened(result, of_mask)) != 0, masks):
        return "the mask that was made is not the one that is saved"
    texts, ends = texts_in(path), r"\[\s*{},\s+{},\s+{}\s*\]"
    corners = (stack.region.start, stack.region.stop) if stack.region is not None else ()
    told = [PRESET, *(ends.format(*corner) for corner in corners)]
    if task.format not in ("npy", "mrc") and not all(re.search(one, texts) for one in told):
        return "it is not told how, and of which part, the result was made"
    return check_result(given, result) or written_again(result, out)


def written_again(result: Result, out: Path) -> str:
    """Return what is wrong with a result that is an input in turn, and is written in another format."""
    first = opened(result)
    word = WORDS[(WORDS.index(result.format) + 1) % 4]
    (out / "again").mkdir()
    file = write_volume(word, out / "again", "scan{}".format, first, first.dtype, first.read, {"prompt": "größer\x00"})
    of_hdf5 = word == "h5" and first.metadata.kind == "hdf5"
    again = open_volume(f"{file.path}:{first.metadata.details['object']}" if of_hdf5 else str(file.path))
    if bits(voxels_of(again)) != bits(voxels_of(first)):
        return f"other voxels in {word} of it"
    about = first.metadata
    wrong = other_sides(in_meters(about) if about.voxel_size else None, not about.unit, again.metadata, first.ndim == 2)
    return f"{wrong} in {word} of it" if wrong else ""


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """Return the options of `cocodiff inpaint` as they are where none is given."""
    return parse("inpaint", ABOUT, with_settings(OPTIONS), ["--input", "scan", "--quiet"])
