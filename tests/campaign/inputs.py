"""A campaign of generated inputs: files of every format with something unusual, damaged ones among them.

    python tests/campaign/inputs.py --cases 1000 --seed 0 --workers 2
    python tests/campaign/inputs.py --seed 0 --first 437 --cases 1 --keep case

A seed and a number make a file. One of even number is opened as `cocodiff inpaint` does it, voxels under a mask are
given other values, and results are written in every format, of the whole and of a region. One of odd number is an input
of `inpaint` itself, with a mask and options; of eight of these one is a settings file of inpaint, generate or sweep.

A result is right where h5py, xarray, tifffile, mrcfile and Zarr's library find in it: the input's
voxels outside the mask, and under it the new ones; the type, the voxel's sides, the attributes and byte order, or a
line that names what is lost. Else it must end with one line that
names the file, and nothing written. Of most cases it is known which of both is right.

Prints each case that went wrong with the command that repeats it, and a table; --refusals FILE takes the lines of all
refusals, --keep FOLDER the files of the cases. The suite of tests runs a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import logging
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import numpy as np
from cocodiff_eval.data.formats import FORMATS, open_volume, result_format, write_volume
from cocodiff_eval.data.volume import Part
from file_kinds import read_plainly
from inputs_checks import bits, check_result, file_of, in_meters, opened, other_sides, voxels_of
from inputs_commands import SETTINGS, Command, make_inpaint, make_settings
from inputs_files import DTYPES, SHAPE, UNKNOWN, USUAL, Draw, Given, Result, damage, make_voxels
from inputs_images import imagej, mrc, ome, tiff, usual
from inputs_stores import hdf5, store, values, zarr_values
from warm import forked

from cocodiff.config.errors import UserError

Maker = Callable[[Draw], Given]
HANGS_S = 240.0
WORDS = ("tiff", "sequence", "zarr", "h5", "npy", "mrc")
NO_FORMAT = "MRC files hold no"  # the one refusal of a format
BOX = (slice(1, 3), slice(8, 14), slice(9, 17))  # the mask of results in every format
REGION = {"slices": "1:4", "roi": "3:21,5:26"}
ZARR_MARKS = (".zarray", ".zattrs", ".zgroup", ".cocodiff-files.json")
# Makers that take voxels of any shape and of these types, any name, and what is odd; the others have something odd.
TYPES: dict[Maker, tuple[str, ...]] = dict.fromkeys((usual, tiff, hdf5, store), DTYPES)
TYPES |= {imagej: ("u1", "u2", "f4"), ome: tuple(sorted({*DTYPES} - {"u8", "i8", "f2"}))}
MAKERS = (usual, hdf5, mrc, store, values, usual, imagej, tiff, zarr_values, usual, ome, hdf5, usual, values, mrc)
MAKERS += (usual, store, ome, usual, tiff, zarr_values, imagej, usual, hdf5)
# As many as have no common divisor with the makers: each pair comes up.
TWISTS = ("none", "dtype", "shape", "values", "mask", "metadata", "cut", "flip", "gone", "name", "options", "storage")
TWISTS += ("damaged mask",)
OF_FILES = ("none", "dtype", "storage", "metadata", "none")
NAMES = ("a b", "ü–漢字", "a'b\"c", "[1]", "a\nb", "%20", ".hidden", "a:b", "a*b?", "x.h5:y", "x.zarr", "-dash")
NAMES += ("$HOME", "a;b", "{x}", "labels", "1", "a,b", "nul", "~", "..a", "x" * 180, "\u202etxt", "e\u0301")


@dataclass
class Outcome:
    """How a case ended."""

    number: int
    kind: str
    twist: str
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # the lines
    results: int = 0
    words: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


def make_given(chance: random.Random, maker: Maker, twist: str, folder: Path, turn: int) -> tuple[Given, Draw]:
    """Write an input into an empty folder."""
    types, stem, wrong = TYPES.get(maker, ("u1", "u2")), "scan", False
    dtype = chance.choice([*types] if twist == "dtype" else [one for one in USUAL if one in types])
    if twist == "dtype" and maker in (hdf5, tiff) and chance.random() < 0.2:
        dtype, wrong = chance.choice(["?", "c8", "c16"]), True
    shape: tuple[int, ...] = SHAPE[1:] if maker in TYPES and chance.random() < 0.25 else SHAPE
    if twist == "shape" and maker in TYPES:
        side, lead = chance.randint(16, 24), shape[:-2]
        shapes = [(*lead, *sides) for sides in ((15, side), (side, 1), (16, 500), (16, 16), (501, 17), (1, 1))]
        shapes += [(0, side, side), (2, 0, side), (side,), (2, 2, side, side), ()] * (maker in (hdf5, store))
        shape = chance.choice(shapes)
        wrong = len(shape) not in (2, 3) or min(shape[-2:]) < 16 or shape[0] == 0
    if twist == "name" and maker in TYPES:
        stem = chance.choice(NAMES)
    voxels = make_voxels(shape, np.dtype(dtype), chance, twist == "values" and maker in TYPES)
    if twist == "dtype" and dtype in ("u8", "i8") and chance.random() < 0.5:  # steps that a float64 cannot tell
        voxels, wrong = voxels * 40 + voxels.dtype.type(chance.choice([2**53, 2**60, 2**62])), True
    draw = Draw(folder, voxels, chance, twist == "metadata", twist == "storage", stem, turn)
    given = maker(draw)
    given.refuse(".", wrong)
    if draw.odd and maker in TYPES:
        given.refusals = "."
    return given, draw


def spoil(given: Given, command: Command, twist: str, chance: random.Random) -> None:
    """Damage the file of an input, which may then be refused. One cut short must not be read as other voxels."""
    damage(file_of(given.path), twist, chance)
    command.ends, given.wrong, given.refusals, given.meters, given.checks = None, False, ".", UNKNOWN, []
    if twist != "cut":
        command.limits = given.voxels = given.meant = given.missing = given.decode = None


def run_case(seed: int, keep: str | None, number: int) -> Outcome:
    """Make a case and try it."""
    began, turn, chance = time.monotonic(), number // 2, random.Random(f"{seed} {number}")
    laps, place = divmod(turn, len(MAKERS))
    maker, twist = MAKERS[place], (TWISTS if number % 2 else OF_FILES)[turn % (13 if number % 2 else 5)]
    found = Outcome(number, maker.__name__, twist)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(keep).resolve() / str(number) if keep else Path(name) / "case"
        (folder / "in").mkdir(parents=True)
        if number % 16 == 15:
            found.kind, found.twist = "settings", [*SETTINGS][number // 16 % len(SETTINGS)]
            run_command(found, None, make_settings(folder, chance, found.twist), folder, Path(name))
        else:
            given, draw = make_given(
                chance, maker, twist, folder / "in", laps * MAKERS.count(maker) + MAKERS[:place].count(maker)
            )
            if number % 2:
                command = make_inpaint(given, draw, twist, folder / "out")
                if twist in ("cut", "flip", "gone"):
                    spoil(given, command, twist, chance)
                run_command(found, given, command, folder, Path(name))
            else:
                found.words = [given.kind]
                try_formats(found, given, folder)
    found.seconds = time.monotonic() - began
    return found


# Results in every format ----------------------------------------------------------------------------------------------


def try_formats(found: Outcome, given: Given, folder: Path) -> None:
    """Write results of an input in every format, and note what is wrong with them."""
    sides = SHAPE[-2 if given.voxels is not None and given.voxels.ndim == 2 else -3 :]
    mask = np.zeros(sides, "u1")
    mask[BOX[-len(sides) :]] = 1
    mask = mask.max(axis=0) if found.number % 3 == 0 and len(sides) == 3 else mask  # one for all slices
    np.save(folder / "in" / "holes.npy", mask)
    own = {".nxs": "h5", ".hdf5": "h5"}.get(file_of(given.path).suffix, file_of(given.path).suffix[1:])
    tries = [("same", False), ("same", True)]
    tries += [(word, (found.number // 2 + n) % 2 == 0) for n, word in enumerate(WORDS) if word != own]
    for format, of_region in tries:
        out = folder / f"{format}{'-region' * of_region}"
        out.mkdir()
        try:
            wrong = try_format(given, format, REGION if of_region else {}, len(sides), out)
            found.results += 1
        except UserError as error:
            found.refused.append(str(error))
            wrong = judge_refusal(given, str(error), of_region, mask)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        if wrong:
            found.wrong.append(f"{format}{', region' * of_region}: {wrong}")


def try_format(given: Given, format: str, region: dict[str, str], ndim: int, out: Path) -> str:
    """Return what is wrong with the result of an input in one format."""
    from cocodiff_eval.cli.inpaint import find_tasks
    from cocodiff_eval.data.intensity import compose_native
    from cocodiff_eval.harness.tasks import WorkingFile, export

    holes = next(one for one in given.path.parents if one.name == "in") / "holes.npy"
    values = {**defaults(), "input": [str(given.path)], "mask": [str(holes)], "format": format}
    values |= {name: word for name, word in region.items() if ndim == 3 or name == "roi"}
    with listened() as said:
        (task,) = find_tasks(values)
        said += task.remarks()
        stack, masks = task.stack, [task.mask.read(index) for index in range(len(task.stack))]
        pattern = np.random.default_rng(5).random(stack.shape)  # over the range of known voxels
        images = (compose_native(stack.read(n), pattern[n], masks[n], task.scale) for n in range(len(stack)))
        restored = np.stack([*images])
        file = WorkingFile(out / "voxels.raw", stack.shape, restored.dtype, "tapa")
        file.create()
        for index, image_YX in enumerate(restored):
            file.write(index, image_YX)
        said += export(task, {"tapa": file}, out, {"tapa": {"version": "1"}}, {}, lambda numbers, what: numbers)
    if given.wrong:
        return "restored, and it had to be refused"
    file.path.unlink()
    (path,) = out.iterdir()
    own = format == "same" or task.format == stack.metadata.kind.replace("hdf5", "h5")
    result = Result(path, task.format, own, stack, np.stack(masks), "\n".join(said), restored, task.scale)
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
    from cocodiff_eval.cli.inpaint import ABOUT, OPTIONS

    from cocodiff.jobs.options import parse, with_settings

    return parse("inpaint", ABOUT, with_settings(OPTIONS), ["--input", "scan", "--quiet", "--follow_links"])


@contextlib.contextmanager
def listened() -> Iterator[list[str]]:
    """Collect what is printed or logged meanwhile."""
    said: list[str] = []
    handler, output = logging.Handler(), io.StringIO()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("cocodiff")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield said
    finally:
        logger.removeHandler(handler)
        said += output.getvalue().splitlines()


def judge_refusal(given: Given, line: str, of_region: bool, mask: np.ndarray) -> str:
    """Return what is wrong with a refusal of an input."""
    if "\n" in line or not (str(file_of(given.path).parent) in line or NO_FORMAT in line):
        return f"a refusal of several lines, or that does not name the file: {line}"
    matters = given.missing is None or given.wrong or given.kind.startswith("unsigned")
    if given.missing is not None and not matters:
        part = tuple(slice(*map(int, ends.split(":"))) for ends in ",".join(REGION.values()).split(","))
        matters = bool((given.missing & (mask == 0))[part if of_region else ...].any())
    named = matters and given.refusals and re.search(given.refusals, line, re.IGNORECASE)
    return "" if named or NO_FORMAT in line else f"refused: {line}"


# Commands -------------------------------------------------------------------------------------------------------------


def run_command(found: Outcome, given: Given | None, command: Command, folder: Path, outputs: Path) -> None:
    """Run a command in the folder of its case, and note what is wrong with its end."""
    before, here, found.words = contents(folder), Path.cwd(), command.words
    os.chdir(folder)
    try:
        done = forked(*command.words, folder=outputs, timeout_s=HANGS_S)
        found.error = done.stderr[-3000:]
        wrong = judge(found, given, command, before, folder, done)
    except (ValueError, LookupError, TypeError, OSError, UserError) as failed:
        wrong = f"the result cannot be looked at: {failed!r}"
    except subprocess.TimeoutExpired:
        wrong = f"has not ended after {HANGS_S:g} s"
    finally:
        os.chdir(here)
    found.wrong += [wrong] if wrong else []


def contents(folder: Path) -> dict[str, str]:
    """Return what lies in a folder, by name: the checksum of files."""
    found = {}
    for path in folder.rglob("*"):
        regular = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if regular else "no file"
    return found


def judge(
    found: Outcome,
    given: Given | None,
    command: Command,
    before: dict[str, str],
    folder: Path,
    done: subprocess.CompletedProcess[str],
) -> str:
    """Return what is wrong with how a command ended."""
    code, lines = done.returncode, done.stderr.splitlines()
    if "Traceback" in done.stdout + done.stderr or code not in (0, 2):
        return f"exit {code}"
    after = {name: one for name, one in contents(folder).items() if not name.startswith("out/")}
    made = after.pop("out", None) is not None
    if given is None and code == 0:  # settings may have another `out`
        after = {name: one for name, one in after.items() if name in before}
    if after != before:
        return f"changed or left behind: {sorted(set(after.items()) ^ set(before.items()))[:3]}"
    if command.ends is not None and code != command.ends:
        return f"exit {code}, but {command.ends} is right"
    if code == 0:
        found.results += 1
        return check_command(given, command, folder / "out" / "images") if given and made else ""
    found.refused.append(done.stderr)
    if len(lines) != 1 or not lines[0].startswith("cocodiff: "):
        return f"{len(lines)} lines of refusal"
    if made:
        return "refused, and yet something was written"
    named = given is None or any(name in lines[0] for name in command.names)
    return "" if named else "the refusal names neither file nor option"


def check_command(given: Given, command: Command, images: Path) -> str:
    """Return what is wrong with the results of a command that ended well."""
    stack = open_volume(str(given.path), follow_links=True)
    part = Part(command.options.get("slices", "").strip(), command.options.get("roi", ""))
    stack, word = part.of(stack), result_format(command.format, stack)
    suffix = FORMATS[word].suffix
    hidden = [one.name for one in images.parent.rglob(".*") if one.name not in ZARR_MARKS]
    results = [one for one in images.iterdir() if one.name.endswith(f"_tapa{suffix}") and one.suffix != ".png"]
    if len(results) != 1 or hidden or any(images.parent.rglob("*.partial")):
        return f"in the folder of results: {[one.name for one in results]}, hidden {hidden}"
    if given.voxels is None:
        with contextlib.suppress(Exception):  # damaged, and restored: as its library reads it, or else as we do
            voxels = read_plainly(file_of(given.path), stack)
            given.voxels = voxels if voxels.size == np.prod(stack.whole or stack.shape) else None
    mask = mask_of(command, stack)
    own = command.format == "same" or word == stack.metadata.kind.replace("hdf5", "h5")
    result = Result(results[0], word, own, stack, mask, None, limits=command.limits)
    return check_result(given, result) or check_others(command, result, images, suffix)


def mask_of(command: Command, stack: Any) -> np.ndarray:
    """Return what is restored; of a mask that was damaged as it was read."""
    mask = command.mask
    if mask is not None and (mask[:1] == mask).all():  # damage may have left another number of slices
        return np.broadcast_to(mask[:1], stack.shape)
    if mask is not None:
        return mask
    whole = voxels_of(open_volume(command.options["mask"])) != 0
    whole = whole if whole.shape[1:] == stack.shape[1:] else whole[:, command.part[1], command.part[2]]
    whole = whole if len(whole) in (1, len(stack)) else whole[command.part[0]]
    return np.broadcast_to(whole & ~whole.all((1, 2))[:, None, None], stack.shape)


def check_others(command: Command, result: Result, images: Path, suffix: str) -> str:
    """Return what is wrong with the standard deviation of samples, and with the mask that was made."""
    if command.samples > 1:
        (spread,) = images.glob(f"*_tapa_std{suffix}")
        values = voxels_of(opened(result, spread))
        if values.shape != result.shape or not (values >= 0).all() or values[~result.mask].any():
            return "the standard deviation is none"
    kind = command.options["mask"]
    if kind not in ("block", "center"):
        return ""
    paths = [*images.glob(f"*_mask{suffix}")]
    if result.format == "zarr":
        paths = [one / "labels" / kind for one in images.glob("*_tapa.ome.zarr")]
    found = voxels_of(opened(result, paths[0])) != 0
    return "" if np.array_equal(found, result.mask) else "the mask that was made is not the one that is saved"


# The campaign ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("cases", 1000), ("seed", 0), ("first", 0), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep")
    parser.add_argument("--refusals")
    given = parser.parse_args()
    began, found = time.monotonic(), list[Outcome]()
    numbers = range(given.first, given.first + given.cases)
    spawn, quiet = multiprocessing.get_context("spawn"), partial(warnings.simplefilter, "ignore")
    with ProcessPoolExecutor(given.workers, spawn, initializer=quiet) as pool:
        for one in pool.map(partial(run_case, given.seed, given.keep), numbers):
            found.append(one)
            if one.wrong or given.cases == 1:
                print(f"{one.kind}, {one.twist}", *(one.wrong or ["right"]), sep="\n    ")
                print(
                    f"  python tests/campaign/inputs.py --seed {given.seed} --first {one.number} --cases 1 --keep case"
                )
                print(f"  {one.words}\n{one.error}", flush=True)
    if given.refusals:
        lines = [f"{one.number} {one.kind}, {one.twist}: {line.strip()}\n" for one in found for line in one.refused]
        Path(given.refusals).write_text("".join(lines))
    print(f"{'':18}{'cases':>7}{'results':>9}{'refusals':>10}{'wrong':>7}")
    rows = [(getattr(one, of), one) for of in ("kind", "twist") for one in found] + [("all", one) for one in found]
    for name in dict.fromkeys(name for name, _ in rows):
        of_name = [one for row, one in rows if row == name]
        refused, wrong = sum(len(one.refused) for one in of_name), sum(bool(one.wrong) for one in of_name)
        print(f"{name:18}{len(of_name):7}{sum(one.results for one in of_name):9}{refused:10}{wrong:7}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; the longest case {max(one.seconds for one in found):.1f} s")
    return any(one.wrong for one in found)


if __name__ == "__main__":
    sys.exit(main())
