"""MRC files: the sign of bytes, byte order, and where a volume lies, as mrcfile and IMOD read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mrcfile
import numpy as np
import pytest
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.mrc import IMOD_STAMP as STAMP
from cocodiff_eval.data.volume import Part, Region
from eval_helpers import CASES
from file_kinds import assert_bits, restored, voxels, write_hdf5, write_mrc


def as_imod(path: Path) -> np.ndarray:
    """Return the voxels as IMOD's `readBytesSigned` (libcfshr/b3dutil.c) takes them."""
    with mrcfile.open(path) as file:
        stamp, flags = np.frombuffer(file.header.tobytes()[152:160], file.header.mode.dtype)
        low, high, data = float(file.header.dmin), float(file.header.dmax), np.array(file.data)
    if data.dtype != np.int8:
        return data
    signed = bool(flags & 1) if stamp == STAMP else low < 0 and (high < 128 or -low > high - 128)
    return data if signed else data.view(np.uint8)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("imod", "limits", "dtype"), CASES["bytes of mrc"])
def test_bytes_have_the_sign_that_their_header_tells(
    tmp_path: Path, imod: tuple[int, int], limits: tuple[int, int], dtype: str, order: str
) -> None:
    volume = np.arange(2 * 16 * 20).astype("u1").view(dtype).reshape(2, 16, 20)
    given = open_volume(write_mrc(tmp_path, volume, order, imod, dmin=limits[0], dmax=limits[1]))
    assert_bits(given.path, volume)
    assert any("bytes without sign" in line for line in given.metadata.remarks) is (dtype == "u1")
    assert_bits(restored(given, "tiff", tmp_path).path, volume)
    for one in (given, open_volume(write_hdf5(tmp_path, volume))):
        result = restored(one, "mrc", tmp_path).path
        with mrcfile.open(result) as file:
            stored = "u2" if dtype == "u1" else "i1"
            assert np.array_equal(file.data, volume) and file.data.dtype.newbyteorder("=") == stored
            assert {"restored by cocodiff", *["a tooth"] * (one is given)} <= {*file.get_labels()}
        assert np.array_equal(as_imod(result), volume) and mrcfile.validate(result)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("imod", "version", "sign"), CASES["origins of mrc"])
def test_a_part_lies_where_it_did(tmp_path: Path, imod: tuple[int, int], version: int, sign: int, order: str) -> None:
    volume = voxels(dtype="int16")
    about: dict[str, Any] = {"origin": (100, -50, 7), "nxstart": 5, "nystart": 6, "nzstart": 7, "nversion": version}
    given = open_volume(write_mrc(tmp_path, volume, order, imod, ispg=0, **about))
    told = "; ".join(given.metadata.remarks)
    assert "whole results of its own format alone keep its extended header" in told
    assert "results of its own format alone keep its origin [100.0, -50.0, 7.0] and start [5, 6, 7]" in told
    whole = restored(given, "same", tmp_path).path.read_bytes()
    input_bytes = (tmp_path / "scan.mrc").read_bytes()
    statistics = {*range(76, 88), *range(216, 224), *range(224, 1024)}
    assert {place for place, (a, b) in enumerate(zip(whole, input_bytes, strict=True)) if a != b} <= statistics
    result = restored(Part("2:5", "4:20,8:33").of(given), "same", tmp_path).path
    assert_bits(result, volume[2:5, 4:20, 8:33])
    with mrcfile.open(result) as file:
        header = file.header
        assert header.origin.tolist() == (100 + sign * 8 * 0.25, -50 + sign * 4 * 0.5, 7 + sign * 2 * 2.5)
        assert (int(header.nxstart), int(header.nystart), int(header.nzstart)) == (13, 10, 9)
        assert file.voxel_size.tolist() == pytest.approx((0.25, 0.5, 2.5))
        assert (int(header.mx), int(header.my), int(header.mz), int(header.nsymbt)) == (25, 16, 3, 0)
        assert header.mode.dtype == np.dtype(f"{order}i4")


def test_a_stack_of_images_and_a_cell_larger_than_the_volume_stay(tmp_path: Path) -> None:
    volume = voxels(dtype="int16")
    given = open_volume(write_mrc(tmp_path, volume, mz=1, mx=66, ispg=0, cella=(99, 40, 4)))
    assert given.metadata.voxel_size == (4.0, 2.0, 1.5) and given.metadata.unit == "angstrom"
    for volume_or_part in (given, Part("2:5", ":,8:33").of(given)):
        with mrcfile.open(restored(volume_or_part, "same", tmp_path).path) as file:
            assert file.is_image_stack() and (int(file.header.mz), int(file.header.mx)) == (1, 66)
            assert file.voxel_size.tolist() == (1.5, 2.0, 4.0)
    assert open_volume(write_mrc(tmp_path, volume, cella=(0, 0, 0))).metadata.voxel_size is None


def test_a_region_of_another_format_has_its_place(tmp_path: Path) -> None:
    given = open_volume(write_hdf5(tmp_path, voxels(dtype="int16"), ">"))
    result = restored(given.cropped(Region((2, 1, 4), (5, 19, 30))), "mrc", tmp_path).path
    with mrcfile.open(result) as file:
        assert file.header.origin.tolist() == pytest.approx((4 * 2500, 1 * 5000, 2 * 25000))
        assert file.nstart.tolist() == (4, 1, 2) and file.header.mode.dtype == np.dtype(">i4") and file.is_volume()
        assert np.array_equal(file.data[0], voxels(dtype="int16")[2, 1:19, 4:30])
