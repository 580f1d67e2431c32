"""A campaign of round trips: files that say something unusual of their voxels, through every format of results.

    python tests/campaign/round_trips.py --cases 300 --seed 0
    python tests/campaign/round_trips.py --seed 0 --first 37 --cases 1 --keep case

Each file is opened as `cocodiff inpaint` does it, the voxels under a mask are given other values, and results are
written in every format, of the whole and of a region. A case is right where h5py, xarray, tifffile and a reader of MRC
headers find in each result: under the mask the new voxels, by every name that leads to them; outside it the input's,
decoded as the input's are; the same place, orientation and byte order, or a line that names what is lost; or where the
file is refused in one line that names the cause. Prints each case that went wrong with the command that repeats it, and
a table. The suite of tests runs a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tifffile
import zarr
from metadata_cases import Given, Result
from metadata_links import external_links, frames, links, virtual
from metadata_places import axes, mrc, mrc_bytes, placed, read_mrc, turned
from metadata_values import attributes, hdf5_axes, netcdf, nodata, wide, zarr_by_hand, zarr_by_xarray

from cocodiff.config.errors import UserError

MAKERS = (links, attributes, mrc, turned, netcdf, external_links, axes, zarr_by_xarray, mrc_bytes, zarr_by_hand)
MAKERS += (placed, hdf5_axes, links, wide, netcdf, frames, nodata, virtual, attributes)
SHAPE = (4, 22, 26)
BOX = (slice(1, 3), slice(8, 14), slice(9, 17))  # the mask
REGION = {"slices": "1:4", "roi": "3:21,5:26"}
CORNER, END = (1, 3, 5), (4, 21, 26)
FORMATS = ("tiff", "sequence", "zarr", "h5", "npy", "mrc")
NO_FORMAT = "MRC files hold no"  # the one refusal of a format
MOST_EQUAL = 0.3  # of restored voxels that may have come out as they were


def make_given(seed: int, number: int, folder: Path) -> Given:
    """Write the files of a case into an empty folder."""
    chance, maker = random.Random(f"{seed} {number}"), MAKERS[number % len(MAKERS)]
    voxels = np.random.default_rng([seed, number]).integers(1, 250, SHAPE).astype(chance.choice(["u1", "u2"]))
    given = maker(folder, voxels, chance)
    given.kind = f"{maker.__name__}: {given.kind}"
    return given


def run_case(seed: int, number: int, folder: Path) -> tuple[Given, list[str], list[str]]:
    """Make a case in an empty folder and try it. Returns it, what was wrong, a line each, and the lines of refusals."""
    (folder / "in").mkdir()
    given = make_given(seed, number, folder / "in")
    sides = SHAPE if (given.voxels is None or given.voxels.ndim == 3) else SHAPE[1:]
    mask = np.zeros(sides, "u1")
    mask[BOX[-len(sides) :]] = 1
    if number % 3 == 0:
        mask = mask.max(axis=0) if mask.ndim == 3 else mask  # one for all slices
    np.save(folder / "in" / "holes.npy", mask)
    mask = np.broadcast_to(mask, SHAPE if len(sides) == 3 else (1, *sides)) != 0
    wrong, refused, tries = list[str](), list[str](), [("same", False), ("same", True)]
    tries += [(one, (number + n) % 2 == 0) for n, one in enumerate(FORMATS) if one != own_format(given)]
    for format, of_region in tries:
        out = folder / f"{format}{'-region' * of_region}"
        out.mkdir()
        try:
            found = try_format(given, format, of_region, mask, out)
        except UserError as error:
            refused.append(str(error))
            found = judge_refusal(given, str(error), of_region, mask)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        if found:
            wrong.append(f"{format}{', region' * of_region}: {found}")
    return given, wrong, refused


def try_format(given: Given, format: str, of_region: bool, mask: np.ndarray, out: Path) -> str:
    """Return what is wrong with the result of a case in one format."""
    from cocodiff_eval.cli.inpaint import find_tasks
    from cocodiff_eval.harness.tasks import WorkingFile, export

    values = {"input": [str(given.path)], "mask": [str(given_folder(given) / "holes.npy")], "format": format}
    if of_region:
        values |= {"roi": REGION["roi"]} | ({"slices": REGION["slices"]} if len(mask) > 1 else {})
    with listened() as said:
        (task,) = find_tasks({**defaults(), **values})
        said += task.remarks()
        restored = restore(task)
        file = WorkingFile(out / "voxels.raw", task.stack.shape, restored.dtype, "tapa")
        file.create()
        for index, image_YX in enumerate(restored):
            file.write(index, image_YX)
        said += export(task, {"tapa": file}, out, {"tapa": {"version": "1"}}, {}, lambda numbers, what: numbers)
    if given.voxels is None:
        return "restored, and it had to be refused"
    (path,) = [one for one in out.iterdir() if one.name != "voxels.raw"]
    start = task.stack.region.start if task.stack.region is not None else (0, 0, 0)
    own = format == "same" or task.format == task.stack.metadata.kind.replace("hdf5", "h5")
    result = Result(path, task.format, own, start, task.stack.shape, restored, "\n".join(said))
    cut_mask = np.stack([task.mask.read(index) for index in range(len(task.stack))])
    return "; ".join(filter(None, [check_values(given, task, result, mask, cut_mask), given.check(result)]))


def own_format(given: Given) -> str:
    """Return the word of --format for the input's own format; "tiff" for a sequence as well."""
    ends = {".h5": "h5", ".nxs": "h5", ".hdf5": "h5", ".zarr": "zarr", ".mrc": "mrc", ".npy": "npy"}
    return next((word for end, word in ends.items() if end in str(given.path)), "tiff")


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """Return the options of `cocodiff inpaint` as they are where none is given."""
    from cocodiff_eval.cli.inpaint import ABOUT, OPTIONS

    from cocodiff.jobs.options import parse, with_settings

    return parse("inpaint", ABOUT, with_settings(OPTIONS), ["--input", "scan", "--quiet", "--follow_links"])


def given_folder(given: Given) -> Path:
    return next(one for one in given.path.parents if one.name == "in")


def restore(task: Any) -> np.ndarray:
    """Return a volume whose voxels under the mask are others, spread over the range of known ones."""
    from cocodiff_eval.data.intensity import compose_native

    pattern = np.random.default_rng(5).random(task.stack.shape)
    pairs = [(task.stack.read(index), task.mask.read(index)) for index in range(len(task.stack))]
    images = [compose_native(one, new, mask, task.scale) for (one, mask), new in zip(pairs, pattern, strict=True)]
    return np.stack(images)


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
    """Return what is wrong with a refusal."""
    if "\n" in line:
        return f"a refusal of several lines: {line}"
    if NO_FORMAT in line:
        return ""
    if file_of(given.path).name not in line:
        return f"a refusal that does not name the file: {line}"
    matters = given.voxels is None or given.missing is None or "_Unsigned" in str(given.more)
    if not matters:
        assert given.missing is not None
        part = tuple(map(slice, CORNER, END)) if of_region else (slice(None),) * 3
        matters = bool((given.missing & ~mask)[part].any())
    named = matters and given.refusals and re.search(given.refusals, line, re.IGNORECASE)
    return "" if named else f"refused: {line}"


def check_values(given: Given, task: Any, result: Result, mask: np.ndarray, own_mask: np.ndarray) -> str:
    """Return what is wrong with the voxels that other libraries find in a result."""
    assert given.voxels is not None
    stored = given.voxels.reshape(mask.shape)[result.region]
    meant = stored if given.meant is None else given.meant.reshape(mask.shape)[result.region]
    missing = np.zeros(stored.shape, bool)
    if given.missing is not None:
        missing = given.missing.reshape(mask.shape)[result.region]
    mask, wrong = mask[result.region], list[str]()
    known = ~mask & ~missing
    decoded = None
    if given.decode is not None:
        decoded = given.decode(file_of(given.path), False).reshape(given.voxels.shape)
        decoded = decoded.reshape((-1, *SHAPE[1:]))[result.region]
    whole = np.stack([task.stack.read(index) for index in range(len(task.stack))])
    candidates = [meant] + ([] if decoded is None else [decoded])
    read_as = next((one for one in candidates if same(whole[known], one[known])), None)
    if read_as is None:
        return "" if result.told(given.refusals or "^$") else "read as other values than the file means"
    wrong.append(check_range(read_as, known, missing & ~mask, own_mask, task, result))
    found = read_plainly(result, task).reshape(result.shape)
    if result.own and "_Unsigned" in str(given.more) and found.dtype.kind == "i":  # unsigned in the place of signed
        found, stored = found.view(found.dtype.str.replace("i", "u")), meant
    if not same(found, result.restored):
        wrong.append("other libraries read other voxels than were restored")
    if not same(found[known], stored[known]) and not same(found[known], read_as[known]):
        wrong.append("voxels outside the mask are others")
    if (found[mask] == stored[mask]).mean() > MOST_EQUAL and np.ptp(read_as[known]) > 0:
        wrong.append("old voxels under the mask")
    if result.own and decoded is not None:
        wrong.append(check_decoded(given, result, decoded, known, mask))
    if result.own and stored.dtype.itemsize > 1 and (order := orders(given, task, result))[0] != order[1]:
        wrong.append(f"byte order {order[1]}, of {order[0]}")
    return "; ".join(filter(None, wrong))


def check_range(
    values: np.ndarray, known: np.ndarray, lost: np.ndarray, own_mask: np.ndarray, task: Any, result: Result
) -> str:
    """Return how declared missing values outside the mask were taken for intensities, or restored towards."""
    low, high = float(values[known].min()), float(values[known].max())
    scale = task.scale.extremes or (task.scale.low, task.scale.high)
    if scale[0] < low or scale[1] > high:
        if lost.any() and not result.told("_FillValue|missing|fill|valid|no.?data"):
            return f"missing values among the intensities: {scale[0]:g} to {scale[1]:g}, real ones {low:g} to {high:g}"
        return f"the range is {scale[0]:g} to {scale[1]:g}, of real voxels {low:g} to {high:g}"
    return ""


def check_decoded(given: Given, result: Result, before: np.ndarray, known: np.ndarray, mask: np.ndarray) -> str:
    assert given.decode is not None
    try:
        after = given.decode(result.path, True)
    except (KeyError, ValueError, OSError) as error:
        return f"xarray cannot read the result: {error!r:.120}"
    after = after.reshape(result.shape)
    if not same(after[known], before[known]):
        return "xarray decodes other values outside the mask"
    bad = int(np.count_nonzero(~np.isfinite(after[mask])))
    return f"xarray takes {bad} restored voxels for missing" if bad else ""


def orders(given: Given, task: Any, result: Result) -> list[str]:
    """Return the byte orders of the input and of the result; none where the format's own check looks at them."""
    found, file = [], file_of(given.path)
    for path in (file, result.path) if result.format in ("h5", "tiff", "npy") else ():
        if result.format == "h5":
            with h5py.File(path) as h5:
                node = h5[task.stack.metadata.details["object"]]
                node = node if isinstance(node, h5py.Dataset) else next(iter(node.values()))
                found.append("big" if node.dtype.byteorder == ">" else "little")
        elif result.format == "tiff":
            with tifffile.TiffFile(path) as tiff:
                found.append(tiff.byteorder)
        else:
            found.append(np.load(path, mmap_mode="r").dtype.str[0])
    return found or ["", ""]


def file_of(path: Path) -> Path:
    """Return the file or store of `file.h5:/dataset`."""
    return Path(str(path).partition(":/")[0])


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True where values are the same, whatever the types; NaN is itself."""
    return bool(np.array_equal(one, other, equal_nan=True))


def read_plainly(result: Result, task: Any) -> np.ndarray:
    """Return a result's voxels as the format's own library reads them."""
    path = result.path
    if result.format == "zarr":
        return np.asarray(zarr.open_group(path, mode="r")["0"][...])
    if result.format == "h5":
        details = task.stack.metadata.details
        with h5py.File(path) as file:
            node = file[details["object"] if result.own else "exchange/data"]
            if isinstance(node, h5py.Dataset):
                return np.asarray(node[...])
            return np.stack([np.asarray(node[name][...]).squeeze() for name in sorted(node) if name.endswith(".tif")])
    if result.format == "sequence":
        return np.stack([tifffile.imread(one) for one in sorted(path.iterdir())])
    if result.format == "mrc":
        return np.asarray(read_mrc(path)["voxels"])
    return np.load(path) if result.format == "npy" else np.asarray(tifffile.imread(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("cases", 300), ("seed", 0), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep")
    given = parser.parse_args()
    began, tried = time.monotonic(), list[tuple[str, bool, int]]()
    warnings.simplefilter("ignore")
    for number in range(given.first, given.first + given.cases):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(given.keep).resolve() / str(number) if given.keep else Path(name)
            folder.mkdir(parents=True, exist_ok=True)
            case, wrong, refused = run_case(given.seed, number, folder)
        tried.append((case.kind.partition(":")[0], bool(wrong), len(refused)))
        if wrong or given.cases == 1:
            again = f"python tests/campaign/round_trips.py --seed {given.seed} --first {number} --cases 1 --keep case"
            print(f"{number} {case.kind}\n  {again}")
            print("\n".join(f"    {one}" for one in wrong) or "    right", flush=True)
        if given.cases == 1:
            print("\n".join(f"    refused: {one}" for one in dict.fromkeys(refused)))
    print(f"{'':18}{'tried':>6}{'wrong':>7}{'refusals':>10}")
    for kind in (*dict.fromkeys(kind for kind, *_ in tried), ""):
        of_kind = [one for one in tried if one[0] == kind or not kind]
        print(
            f"{kind or 'all':18}{len(of_kind):6}{sum(one[1] for one in of_kind):7}{sum(one[2] for one in of_kind):10}"
        )
    print(f"{time.monotonic() - began:.0f} s")
    return any(wrong for _, wrong, _ in tried)


if __name__ == "__main__":
    sys.exit(main())
