"""OME-Zarr as other tools may write it: axes in any order, odd names of levels, malformed metadata; and labels."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.labels import write_labels
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.data.volume import Region
from test_formats import assert_bits, restored, slice_of, voxels, write_hdf5, write_zarr

from cocodiff.config.errors import UserError
from cocodiff.jobs.record import as_read, described_inputs, first_difference

SCALE = [{"type": "scale", "scale": [2.0, 0.5, 0.5]}]


def write_image(
    path: Path, volume: np.ndarray, axes: Any = "zyx", paths: tuple[str, ...] = ("0",), transforms: Any = SCALE
) -> str:
    if isinstance(axes, str):
        kinds = {"t": "time", "c": "channel"}
        axes = [{"name": name, "type": kinds.get(name, "space")} for name in axes]
    datasets = [{"path": name, "coordinateTransformations": transforms} for name in paths]
    image = {"version": "0.4", "axes": axes, "datasets": datasets}
    root = zarr.create_group(path / "scan.zarr", zarr_format=2, attributes={"multiscales": [image]}, overwrite=True)
    for name in dict.fromkeys(paths):
        root.create_array(name, data=volume, chunks=(1,) * (volume.ndim - 2) + (32, 32))
    return str(path / "scan.zarr")


@pytest.mark.parametrize(
    ("axes", "shape", "said"),
    [
        ("cyx", (3, 20, 33), r"3 x 20 x 33 \(c, y, x\); .* only one each can be restored"),
        ("tyx", (3, 20, 33), r"\(t, y, x\); .* save that as a store of its own"),
        ("tcyx", (1, 3, 20, 33), r"\(t, c, y, x\); .* only one each"),
        ("xyz", (20, 33, 3), "its axes are x, y, z; .* in the order z, y, x: save it transposed"),
        ("zcyx", (3, 1, 20, 33), "its axes are z, c, y, x; .* must be the last"),
        ("yx", (3, 20, 33), r"has 2 axes \(y, x\), and its array 3 dimensions"),
        ("cyx", (1, 20, 33), ""),
        (["t", "c", "z", "y", "x"], (1, 1, 3, 20, 33), ""),
    ],
)
def test_axes_say_which_are_slices_rows_and_columns(tmp_path: Path, axes: Any, shape: Any, said: str) -> None:
    path = write_image(tmp_path, voxels(shape), axes, transforms=None)
    if said:
        with pytest.raises(UserError, match=said):
            open_stack(path)
        return
    stack = open_stack(path)
    assert stack.ndim == (2 if axes == "cyx" else 3)
    result = restored(stack, "same", tmp_path).path
    assert np.array_equal(zarr.open_array(result, path="0", mode="r")[:], voxels(shape))
    assert zarr.open_group(result, mode="r").attrs["multiscales"][0]["axes"][0] in (
        {"name": "c", "type": "channel"},
        "t",
    )


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"axes": 5}, "axes of its multiscale image: 5 instead of a list"),
        ({"transforms": "scale"}, "coordinateTransformations of its multiscale image: 'scale'"),
        ({"transforms": [{"type": "scale", "scale": 5}]}, "scale of .*: 5 instead of 3 numbers"),
        ({"transforms": [{"type": "scale", "scale": [1.0, 2.0]}]}, "instead of 3 numbers, one for each axis"),
        ({"transforms": [{"type": "scale", "scale": [1.0, "a", 2]}]}, "instead of 3 numbers"),
        ({"transforms": [*SCALE, {"type": "translation", "translation": [1]}]}, "translation of .* instead of 3"),
        ({"transforms": None}, ""),
        ({"transforms": [{"type": "identity"}]}, ""),
    ],
)
def test_malformed_metadata_are_refused_when_the_image_is_opened(tmp_path: Path, about: Any, said: str) -> None:
    path = write_image(tmp_path, voxels(), **about)
    if said:
        with pytest.raises(UserError, match=said):
            open_stack(path)
    stack = open_stack(f"{path}:/0" if said else path)  # the array itself can be read in any case
    assert_bits(restored(stack, "same", tmp_path).path, voxels())


@pytest.mark.parametrize("paths", [("1",), ("0", "0"), ("1/0",), ("labels",)])
def test_no_level_is_written_over_another(tmp_path: Path, paths: tuple[str, ...]) -> None:
    volume = voxels((3, 20, 600))
    found = restored(open_volume(write_image(tmp_path, volume, paths=paths)), "same", tmp_path)
    assert_bits(found.path, volume)
    root = zarr.open_group(found.path, mode="r")
    sides = [root[one["path"]].shape[-1] for one in root.attrs["multiscales"][0]["datasets"]]
    assert sides == [600, 300, 150]


def test_what_json_cannot_hold_becomes_text(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path, voxels(), "<")
    with h5py.File(path, "a") as file:
        file["exchange/data"].attrs["dark"] = np.array([np.nan, -np.inf, 1.5])
        file["exchange/data"].attrs["element_size_um"] = (np.nan, 1.0, 1.0)
    result = restored(open_volume(path), "zarr", tmp_path).path

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    said = json.loads((result / ".zattrs").read_text(), parse_constant=refuse)
    assert said["attributes"]["dark"] == ["NaN", "-Infinity", 1.5]


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_of_64_bits_go_from_tiff_to_zarr(tmp_path: Path, dtype: str) -> None:
    tifffile.imwrite(tmp_path / "scan.tif", voxels(dtype=dtype), photometric="minisblack")
    assert_bits(restored(open_volume(str(tmp_path / "scan.tif")), "zarr", tmp_path).path, voxels(dtype=dtype))


def test_the_same_run_makes_the_same_bytes(tmp_path: Path) -> None:
    given = open_volume(write_zarr(tmp_path, voxels(), "<"))
    found: dict[str, list[dict[str, bytes]]] = {}
    for turn in range(2):
        for word in ("tiff", "sequence", "zarr", "h5"):
            folder = tmp_path / f"{word}{turn}"
            folder.mkdir()
            restored(given, word, folder)
            files = {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
            found.setdefault(word, []).append(files)
        time.sleep(1.1 * (1 - turn))  # HDF5's time stamps are whole seconds
    assert [word for word, (one, other) in found.items() if one != other] == []


@pytest.mark.parametrize("version", [2, 3])
def test_labels_are_kept_in_the_region_and_the_mask_that_was_made_is_one_of_them(tmp_path: Path, version: Any) -> None:
    path = write_zarr(tmp_path, voxels((4, 24, 300)), "<", version)
    labels = np.random.default_rng(0).integers(0, 9, (4, 24, 300), dtype=np.int32)
    root = zarr.open_group(path, mode="a")
    about = {"labels": ["deep/organs", "../0"]}
    group = root.create_group("labels", attributes=about if version == 2 else {"ome": about})
    group.create_array("deep/organs", data=labels[None, None], chunks=(1, 1, 2, 24, 64))
    group.create_array("block", data=labels.astype("u1"), chunks=(4, 24, 64))
    group.create_array("half", data=labels[:, ::2], chunks=(2, 12, 64))
    part = (slice(1, 4), slice(0, 20), slice(4, 300))
    volume = open_volume(path).cropped(Region((1, 0, 4), (4, 20, 300)))
    hole = np.zeros((20, 296), bool)
    hole[3:9, 5:100] = True
    for _ in range(2):  # as a start does that goes on after a kill
        result = restored(volume, "same", tmp_path)
        (lost,) = write_labels(result, volume, lambda index: hole, {"mask": "block"})
    assert lost.startswith("labels/half of ") and "cannot be cut to the region" in lost
    attributes = zarr.open_group(result.path, mode="r")["labels"].attrs.asdict()
    names = (attributes if version == 2 else attributes["ome"])["labels"]
    assert names == ["deep/organs", "block", "block-2"]
    wanted = [labels[part], labels[part].astype("u1"), np.broadcast_to(hole, (3, 20, 296))]
    for name, expected in zip(names, wanted, strict=True):
        found = open_volume(f"{result.path}:/labels/{name}")
        assert found.labels and np.array_equal([slice_of(found, index) for index in range(3)], expected)
        smaller = zarr.open_array(result.path, path=f"labels/{name}/1", mode="r")
        assert set(np.unique(smaller)) <= set(np.unique(expected)) and smaller.shape[-1] == 148
    assert open_volume(f"{result.path}:/labels/block-2").metadata.voxel_size == volume.metadata.voxel_size
    whole = open_volume(path)  # without a region a label of another shape is kept too
    result = restored(whole, "same", tmp_path)
    assert write_labels(result, whole, None, {}) == []
    assert np.array_equal(zarr.open_array(result.path, path="labels/half/0", mode="r"), labels[:, ::2])


def test_a_run_goes_on_only_with_the_type_and_the_voxel_size_it_began_with(tmp_path: Path) -> None:
    volume = voxels((2, 20, 33))
    mask = SimpleNamespace(name="block", shape=volume.shape, read=lambda index: volume[index] > 9)

    def described(path: Path, data: np.ndarray, **options: Any) -> Any:
        path.parent.mkdir(exist_ok=True)
        tifffile.imwrite(path, data, photometric="minisblack", **options)
        return as_read({"inputs": described_inputs([SimpleNamespace(stack=open_stack(path), mask=mask, truth=None)])})

    size = {"resolution": (100, 100), "resolutionunit": 3}
    there = described(tmp_path / "scan.tif", volume, **size)
    moved = described(tmp_path / "elsewhere" / "scan.tif", volume, **size)
    assert first_difference(there, moved) is None
    for data, options, told in (
        (volume.view(np.int16), size, ("dtype uint16", "dtype int16")),
        (volume, size | {"resolution": (50, 50)}, ("voxel size 100.0", "voxel size 200.0")),
        (volume, size | {"description": "another tooth"}, ("metadata", "metadata")),
    ):
        difference = first_difference(there, described(tmp_path / "scan.tif", data, **options))
        assert difference is not None and all(map(str.startswith, difference[1:], told)), difference
    shutil.rmtree(tmp_path / "elsewhere")


def test_slices_in_a_folder_that_has_a_stores_name(tmp_path: Path) -> None:
    volume, folder = voxels((3, 20, 33)), tmp_path / "x.zarr"
    folder.mkdir()
    for number, image_YX in enumerate(volume):
        tifffile.imwrite(folder / f"recon_{number}.tif", image_YX, photometric="minisblack")
    assert np.array_equal([open_volume(str(folder)).reader(index) for index in range(3)], volume)
    assert np.array_equal(open_volume(str(folder / "recon_1.tif")).reader(0), volume[1])
    zarr.create_array(folder / "0", data=volume)
    assert np.array_equal(open_volume(f"{folder}:/0").reader(1), volume[1])
    zarr.create_array(folder, data=volume[:2])
    assert open_volume(str(folder)).shape == (2, 20, 33)
