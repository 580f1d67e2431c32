"""What every format of files must do: voxels and what is said of them come back in their own format (in others and in
part: `campaign/test_inputs.py`); axes are heeded; masks and truths are read alike. And names and previews of slices."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from cocodiff_eval.data import WRITTEN
from cocodiff_eval.data.formats import FORMATS, open_volume, write_volume
from cocodiff_eval.data.masks import make_mask
from cocodiff_eval.data.slices import open_stack, open_stacks, open_truth, safe_stem, save_preview_png, to_grey8
from cocodiff_eval.data.volume import Part
from file_kinds import DTYPES, KINDS, MANY, assert_bits, read_plainly, restored, voxels, write_png, write_zarr
from PIL import Image

from cocodiff.config.errors import UserError

PART = Part("2:5", "1:19,4:30")
CUT = (slice(2, 5), slice(1, 19), slice(4, 30))


def test_the_words_of_the_option_are_the_formats_that_are_written() -> None:
    assert tuple(word for word, one in FORMATS.items() if one.writer is not None) == WRITTEN


CASES = [(kind, dtype) for dtype in DTYPES for kind, one in KINDS.items() if dtype in one.dtypes]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # statistics that mrcfile takes of any bits
@pytest.mark.sample(60)
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_a_volume_comes_back_in_its_own_format(tmp_path: Path, kind: str, dtype: str) -> None:
    """Of each shape: its bits, also as the format's own library reads them, its byte order, and its voxels' sides."""
    one = KINDS[kind]
    for number, shape in enumerate(one.shapes):
        order = "<>"[(number + DTYPES.index(dtype)) % 2]
        folder, volume = tmp_path / str(number), voxels(shape, dtype)
        given = assert_bits(one.file(folder, volume, order), volume)
        found = assert_bits(result := restored(given, "same", folder).path, volume).metadata
        before = given.metadata
        assert read_plainly(result, given).astype(dtype).tobytes() == volume.tobytes()
        for about in (before, found):
            size = about.voxel_size
            assert size == one.size or (size and size[3 - len(shape) :] == pytest.approx(one.size[3 - len(shape) :]))
            assert about.unit == one.unit
            assert "png" in kind or about.byteorder == (order if volume.itemsize > 1 else found.byteorder)
        assert found.kind == ("tiff" if "png" in kind else before.kind)
        assert found.axes == before.axes or not before.axes or found.axes in ("QYX", "YX")  # TIFF's of no names
        assert before.description in found.description
        assert ("a tooth" in found.description) == (kind in ("imagej", "ome", "white", "mrc"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", MANY)
def test_a_part_is_all_that_is_read_of_an_input_its_truth_and_its_mask(tmp_path: Path, kind: str) -> None:
    volume = voxels(dtype="float32")
    path = KINDS[kind].file(tmp_path, volume)
    stack = open_stack(path, part=PART)
    assert [*stack.numbers] == [2, 3, 4] and open_stack(path, part=Part("5:6", "4:20,:33")).shape == (1, 16, 33)
    for found in (stack, open_truth(path, stack)):
        assert_bits(found, volume[CUT])
    hole = np.zeros(volume.shape, "f4")
    hole[2:5, 6:12, 12:20] = 1
    masks = [hole, hole[CUT]] + [hole[3], hole[CUT][1]] * ((17, 23) in KINDS[kind].shapes)
    for number, mask in enumerate(masks):
        made = make_mask(KINDS[kind].file(tmp_path / str(number), mask), stack)
        assert all(np.array_equal(made.read(n), hole[CUT][n] != 0) for n in range(3))
    made = make_mask(KINDS[kind].file(tmp_path / "slices", hole[2:5]), open_stack(path, part=Part("2:5")))
    assert all(np.array_equal(made.read(n), hole[2 + n] != 0) for n in range(3))


@pytest.mark.parametrize("restored_slices", [slice(7, 8), slice(None)])
@pytest.mark.parametrize("word", WRITTEN)
def test_a_file_of_mostly_zeros_takes_little_of_the_disk(tmp_path: Path, word: str, restored_slices: slice) -> None:
    """Slices of zeros take nothing; the others are compressed, but for formats that cannot be. All voxels come back."""
    volume = np.zeros((64, 256, 256), np.float32)
    volume[restored_slices, 20:40, 30:60] = np.random.default_rng(0).normal(size=(20, 30))
    np.save(tmp_path / "scan.npy", volume)
    given = open_stack(str(tmp_path / "scan.npy"))
    made = write_volume(word, tmp_path, "made{}".format, given, volume.dtype, volume.__getitem__, {}, sparse=True).path
    assert_bits(str(made), volume)
    files = [one for one in made.rglob("*") if one.is_file()] if made.is_dir() else [made]
    taken = sum(512 * one.stat().st_blocks for one in files)
    assert taken < volume.nbytes / 20 or (word in ("npy", "mrc") and volume[0].any())


@pytest.mark.parametrize("word", WRITTEN)
def test_a_result_is_synced_and_repeatable(tmp_path: Path, unsynced: Callable[[Path], list[str]], word: str) -> None:
    given, found = open_volume(write_zarr(tmp_path, voxels())), []
    for turn in range(2):
        folder = tmp_path / f"turn{turn}"
        restored(given, word, folder)
        assert not unsynced(folder)
        found.append({str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()})
        if word == "h5" and not turn:
            time.sleep(1.1)  # HDF5's time stamps are whole seconds
    assert found[0] == found[1] != {}


NAMING = ("tiff", "imagej", "ome", "zarr 2", "zarr 3", "zarr 2 array", "zarr 3 array")
NAMING += ("hdf5 scales", "hdf5 labels", "hdf5 nexus", "hdf5 old nexus", "hdf5 axistags")


@pytest.mark.parametrize("axes", ["tyx", "cyx", "xyz", "zyx"])
@pytest.mark.parametrize("kind", NAMING)
def test_axes_that_are_no_depth_are_refused_by_name(tmp_path: Path, kind: str, axes: str) -> None:
    if axes == "xyz" and kind in ("imagej", "ome", "tiff"):
        return  # rows and columns are the last of a TIFF's axes
    volume = voxels((5, 20, 33))
    path = KINDS[kind].file(tmp_path, volume, axes=axes)
    if axes == "zyx":
        assert_bits(restored(open_volume(path), "tiff", tmp_path).path, volume)
        return
    with pytest.raises(UserError) as caught:
        open_volume(path)
    told = str(caught.value)
    assert told.startswith(path) and "\n" not in told
    if axes == "xyz":
        assert "x, y, z" in told and "z, y, x" in told
    else:
        what = "store" if "zarr" in kind else "file"
        assert f"5 x 20 x 33 ({axes[0]}" in told.lower() and re.search(rf": .*\b{what} .* z\b", told)


@pytest.mark.parametrize("kind", ["imagej", "ome"])
def test_hyperstacks_of_one_channel_and_one_time_are_volumes(tmp_path: Path, kind: str) -> None:
    volume = voxels((5, 20, 33))
    assert_bits(KINDS[kind].file(tmp_path, volume[None, :, None], axes="tzcyx"), volume)
    with pytest.raises(UserError, match=r"2 x 5 x 20 x 33 \(T, Z, Y, X\)"):
        open_volume(KINDS[kind].file(tmp_path, np.stack([volume, volume])[:, :, None], axes="tzcyx"))


def test_floats_of_equal_channels_are_grey(tmp_path: Path) -> None:
    image_YX = np.random.default_rng(0).random((17, 23), dtype=np.float32)
    assert_bits(KINDS["tiff rgb opaque"].file(tmp_path, image_YX), image_YX)


@pytest.mark.parametrize("name", ["a.h5:b.png", "a.hdf:b.png"])
def test_a_file_may_have_a_colon_in_its_name(tmp_path: Path, name: str) -> None:
    assert open_volume(write_png(tmp_path, voxels((20, 33), "uint8"), name=name)).name == Path(name).stem


def test_names_are_unique_and_safe(tmp_path: Path) -> None:
    paths = []
    for name in ("a/scan 1.png", "b/scan 1.png", "c/Scan 1.png", "c/..x;rm.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        paths.append(write_png(tmp_path, voxels((16, 16), "uint8"), name=name))
    assert [stack.name for stack in open_stacks(paths)] == ["scan_1", "scan_1-2", "Scan_1-3", "x_rm"]
    assert [safe_stem(name) for name in ("///", "Schädel-7")] == ["slice", "Schädel-7"]


def test_preview(tmp_path: Path) -> None:
    image_YX = np.linspace(-5, 5, 256).reshape(16, 16)
    image_YX[0, :3] = np.nan, np.inf, -np.inf
    save_preview_png(tmp_path / "p.png", image_YX, -5, 5)
    preview_YX = np.asarray(Image.open(tmp_path / "p.png"))
    assert preview_YX[0, :3].tolist() == [0, 255, 0] and preview_YX[-1, -1] == 255
    assert not to_grey8(np.full((4, 4), 7), 7, 7).any()


def positions(folder: Path) -> set[tuple[str, int]]:
    """Return where this process stands in its open files of a folder."""
    return {(one.path, one.position) for one in psutil.Process().open_files() if folder in Path(one.path).parents}


@pytest.mark.parametrize("read_whole", [True, False])
@pytest.mark.parametrize("kind", ["tiff", "tiff zlib"])
def test_forked_ranks_read_the_same_file_at_once(tmp_path: Path, kind: str, read_whole: bool) -> None:
    """A file opened before the fork must not share its position with the children."""
    expected = voxels((40, 64, 64))
    stack = open_stack(KINDS[kind].file(tmp_path, expected))
    for index in range(40 if read_whole else 1):
        stack.read(index)
    children, before = [], positions(tmp_path)
    for _ in range(3):
        if not (child := os.fork()):
            code = 1
            try:
                code = int(any(not np.array_equal(stack.read(n % 40), expected[n % 40]) for n in range(160)))
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert positions(tmp_path) == before


@pytest.mark.parametrize("word", ["tiff", "sequence", "zarr", "h5"])
def test_memory_does_not_grow_with_the_volume(tmp_path: Path, word: str) -> None:
    """64 slices of 256 x 512 float32, 32 MiB, go in and out in a process that may take 24 MiB more than before."""
    limit, volume = 24 * 2**20, np.ones((64, 256, 512), "f4") * np.arange(64, dtype="f4")[:, None, None]
    path = write_zarr(tmp_path, volume, version=3, chunks=(1, 1, 4, 256, 256), compressors=None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            given = open_volume(path)
            given.reader(0)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            again = open_volume(str(restored(given, word, tmp_path).path))
            assert [float(again.reader(index)[3, 4]) for index in range(64)] == list(range(64))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            code = int(grown > limit)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
