"""Axes that are no depth, or come in another order, are refused by name in every format that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.volume import Part
from test_formats import assert_bits, restored, voxels

from cocodiff.config.errors import UserError

WORDS = {"t": "time", "c": "channel", "z": "z", "y": "y", "x": "x"}


def write_tiff(path: Path, volume: np.ndarray, axes: str, **options: Any) -> str:
    tifffile.imwrite(path / "scan.tif", volume, photometric="minisblack", metadata={"axes": axes.upper()}, **options)
    return str(path / "scan.tif")


def write_zarr(path: Path, volume: np.ndarray, axes: str, version: Any) -> str:
    """Write an array alone, with dimensions as xarray names them."""
    names = [WORDS[axis] for axis in axes]
    options = {"dimension_names": names} if version == 3 else {"attributes": {"_ARRAY_DIMENSIONS": names}}
    root = zarr.create_group(path / "scan.zarr", zarr_format=version)
    root.create_array("vol", shape=volume.shape, dtype=volume.dtype, **options)[:] = volume
    return f"{path}/scan.zarr:/vol"


def write_hdf5(path: Path, volume: np.ndarray, axes: str, how: str) -> str:
    names = [WORDS[axis] for axis in axes]
    with h5py.File(path / "scan.h5", "w") as file:
        data = file.create_dataset("entry/vol", data=volume)
        if how == "scales":
            for number, name in enumerate(names):
                file[f"entry/{name}"] = np.arange(float(volume.shape[number]))
                file[f"entry/{name}"].make_scale()
                data.dims[number].attach_scale(file[f"entry/{name}"])
        elif how == "labels":
            for number, name in enumerate(names):
                data.dims[number].label = name
        elif how == "nexus":
            file["entry"].attrs["signal"], file["entry"].attrs["axes"] = "vol", names
        elif how == "old nexus":
            data.attrs["axes"] = ":".join(names)
        else:
            data.attrs["axistags"] = json.dumps({"axes": [{"key": axis} for axis in axes]})
    return f"{path}/scan.h5:/entry/vol"


WRITERS: dict[str, Any] = {
    "imagej": lambda *given: write_tiff(*given, imagej=True),
    "ome": lambda *given: write_tiff(*given, ome=True),
    "tifffile": write_tiff,
    "zarr 2": lambda *given: write_zarr(*given, 2),
    "zarr 3": lambda *given: write_zarr(*given, 3),
    **{
        how: lambda *given, how=how: write_hdf5(*given, how)
        for how in ("scales", "labels", "nexus", "old nexus", "axistags")
    },
}


@pytest.mark.parametrize("axes", ["tyx", "cyx", "xyz", "zyx"])
@pytest.mark.parametrize("kind", WRITERS)
def test_axes_that_are_no_depth_are_refused_by_name(tmp_path: Path, kind: str, axes: str) -> None:
    if axes == "xyz" and kind in ("imagej", "ome", "tifffile"):
        return  # rows and columns are the last of a TIFF's axes
    volume = voxels((5, 20, 33))
    path = WRITERS[kind](tmp_path, volume, axes)
    if axes == "zyx":
        assert_bits(restored(open_volume(path), "tiff", tmp_path).path, volume)
        return
    with pytest.raises(UserError) as caught:
        open_volume(path)
    told = str(caught.value)
    assert told.startswith(path) and "\n" not in told
    if axes == "xyz":
        assert "its axes are x, y, z; slices, rows and columns must be the last, in the order z, y, x" in told
    else:
        assert f"5 x 20 x 33 ({axes[0]}" in told.lower() and "only one each can be restored" in told
        assert told.endswith(f"a {'store' if 'zarr' in kind else 'file'} of its own, or name the axis z if it is depth")


@pytest.mark.parametrize("kind", ["imagej", "ome"])
def test_hyperstacks_of_one_channel_and_one_time_are_volumes(tmp_path: Path, kind: str) -> None:
    volume = voxels((5, 20, 33))
    assert_bits(WRITERS[kind](tmp_path, volume[None, :, None], "tzcyx"), volume)
    with pytest.raises(UserError, match=r"4 dimensions 2 x 5 x 20 x 33 \(T, Z, Y, X\); of those before"):
        open_volume(WRITERS[kind](tmp_path, np.stack([volume, volume])[:, :, None], "tzcyx"))


def test_what_says_nothing_of_axes_is_no_ground_to_refuse(tmp_path: Path) -> None:
    volume = voxels((5, 20, 33))
    path = write_hdf5(tmp_path, volume, "zyx", "scales")
    with h5py.File(tmp_path / "scan.h5", "a") as file:
        del file["entry/z"]  # a scale that is gone, axes of another dataset, words of another length
        file["entry"].attrs["signal"], file["entry"].attrs["axes"] = "other", ["time", "y", "x"]
        file["entry/vol"].attrs["axes"], file["entry/vol"].attrs["axistags"] = "time", "no JSON"
    assert_bits(path, volume)


@pytest.mark.parametrize("how", ["scales", "nexus"])
@pytest.mark.parametrize("part", [Part(), Part("1:4", ":,8:33")], ids=["whole", "region"])
def test_scales_stay_with_their_axes(tmp_path: Path, how: str, part: Part) -> None:
    path = write_hdf5(tmp_path, voxels((5, 20, 33)), "zyx", how)
    with h5py.File(tmp_path / "scan.h5", "a") as file:
        for number, name in enumerate("zyx"):
            place = file["entry"].require_dataset(name, (file["entry/vol"].shape[number],), "f8")
            place[:] = np.arange(len(place)) / 2
            place.attrs["units"] = "um"
        file["entry/angles"] = np.arange(5.0)  # a dataset beside it that shares a scale
        if how == "scales":
            file["entry/angles"].dims[0].attach_scale(file["entry/z"])
    result = restored(part.of(open_volume(path)), "same", tmp_path).path
    with h5py.File(result) as file:
        group, cut = file["entry"], bool(part.slices)
        assert [group[name][0] for name in "zyx"] == ([0.5, 0, 4] if cut else [0, 0, 0])
        assert group["x"].attrs["units"] == "um"
        assert [len(group[name]) for name in "zyx"] == ([3, 20, 25] if cut else [5, 20, 33]) == [*group["vol"].shape]
        attached = [[scale.name for scale in axis.values()] for axis in group["vol"].dims]
        assert attached == ([["/entry/z"], ["/entry/y"], ["/entry/x"]] if how == "scales" else [[], [], []])
        assert all(group[name].is_scale == (how == "scales") for name in "zyx")
        assert len(group["angles"].dims[0]) == (how == "scales" and not cut)  # of another length than the cut scale
        entries = [len(group[name].attrs.get("REFERENCE_LIST", ())) for name in "zyx"]
        assert entries == ([1 + (not cut), 1, 1] if how == "scales" else [0, 0, 0])


def test_coordinates_of_xarray_are_named(tmp_path: Path) -> None:
    path = write_zarr(tmp_path, voxels((5, 20, 33)), "zyx", 2)
    zarr.open_group(tmp_path / "scan.zarr", mode="a").create_array("x", data=np.arange(33.0))
    assert open_volume(path).metadata.remarks == [f"{path}: results keep no coordinates (x)"]
