"""OME-Zarr: pyramids, odd names of levels, chunks that are not stored, labels; and with what a run goes on."""

from __future__ import annotations

import json
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
from cocodiff_eval.data.masks import make_mask
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.data.volume import Region
from cocodiff_eval.harness.tasks import hash_inputs
from eval_helpers import marked
from file_kinds import assert_bits, reopened, restored, voxels, write_hdf5, write_tiff, write_zarr

from cocodiff.jobs.record import first_difference


@pytest.mark.parametrize("version", [2, 3])
def test_a_pyramid_halves_and_stays_in_place(tmp_path: Path, version: int) -> None:
    volume, place = voxels((5, 600, 515), "uint8"), [0.0, 0.0, 10.0, 20.0, 30.0]
    store = write_zarr(tmp_path, volume, version=version, translation=place, chunks=(1, 1, 4, 512, 512))
    if version == 3:  # a scale of the whole image, in which the place of a level is not
        root = zarr.open_group(store, mode="a")
        about = root.attrs.asdict()
        about["ome"]["multiscales"][0]["coordinateTransformations"] = [{"type": "scale", "scale": [1, 1, 2, 3, 0.5]}]
        root.attrs.put(about)
    given = open_volume(store)
    assert given.metadata.voxel_size == ((5.0, 1.5, 0.125) if version == 3 else (2.5, 0.5, 0.25))
    (told,) = given.metadata.remarks
    assert told.endswith(f": results of its own format alone keep its translation {place}")
    path = restored(given, "same", tmp_path).path
    attributes = zarr.open_group(path, mode="r").attrs.asdict()
    about = attributes["ome"] if version == 3 else attributes
    (image,) = about["multiscales"]
    assert about["omero"] == {"channels": []} and attributes["sample"] == "a tooth" and image["name"] == "tooth"
    levels = [zarr.open_array(path, path=one["path"], mode="r") for one in image["datasets"]]
    assert [level.shape for level in levels] == [(1, 1, 5, 600, 515), (1, 1, 3, 300, 258), (1, 1, 2, 150, 129)]
    assert {level.metadata.zarr_format for level in levels} == {version}
    mean = volume[:4].reshape(2, 2, 300, 2, 515)[..., :514].reshape(2, 2, 300, 2, 257, 2).mean((1, 3, 5))
    last = volume[4].reshape(300, 2, 515)[..., :514].reshape(300, 2, 257, 2).mean((1, 3))  # a slice without another one
    assert np.abs(levels[1][0, 0, :, :, :257] - [*mean, last]).max() <= 0.51
    scale, shift = (one[one["type"]] for one in image["datasets"][1]["coordinateTransformations"])
    assert scale == [1, 1, 5000, 1, 0.5] and shift == [0, 0, 1260, 20.25, 30.125]
    part = restored(given.cropped(Region((1, 2, 4), (5, 600, 515))), "same", tmp_path).path
    (image,) = open_volume(str(part)).metadata.details["image"]["datasets"][:1]
    assert image["coordinateTransformations"][1]["translation"] == [0, 0, 2510, 21, 31]


@pytest.mark.parametrize("paths", [("1",), ("0", "0"), ("1/0",), ("labels",)])
def test_no_level_is_written_over_another(tmp_path: Path, paths: tuple[str, ...]) -> None:
    volume = voxels((3, 20, 600))
    root = zarr.open_group(store := write_zarr(tmp_path, volume), mode="a")
    (image,) = root.attrs["multiscales"]
    datasets = [{**image["datasets"][0], "path": path} for path in paths]
    root.attrs["multiscales"] = [{**image, "datasets": datasets}]
    for path in {*paths} - {"0"}:
        root.create_array(path, data=volume[None, None])
    found = restored(open_volume(store), "same", tmp_path)
    assert_bits(found.path, volume)
    root = zarr.open_group(found.path, mode="r")
    assert [root[one["path"]].shape[-1] for one in root.attrs["multiscales"][0]["datasets"]] == [600, 300, 150]


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_are_counted(tmp_path: Path, version: Any) -> None:
    volume, path = voxels((3, 20, 24)), tmp_path / "scan.zarr"
    options: dict[str, Any] = {"shards": (2, 20, 24)} if version == 3 else {}
    options |= {"chunks": (1, 10, 24), "fill_value": 3, "zarr_format": version}
    array = zarr.create_array(path, shape=volume.shape, dtype="u2", **options)
    array[0] = volume[0]
    given = open_volume(str(path))
    missing, count = (1, 2) if version == 3 else (4, 6)
    assert f"{missing} of {count} chunks are not stored and are read as 3" in given.metadata.remarks[0]
    assert (np.asarray(given.reader(2)) == 3).all()
    assert not reopened(given, "same", tmp_path).metadata.remarks
    array[:] = volume
    assert not assert_bits(path, volume).metadata.remarks


@pytest.mark.parametrize(("side", "levels"), [(256, 1), (257, 2)])
def test_the_last_level_has_256_voxels_a_side_at_most(tmp_path: Path, side: int, levels: int) -> None:
    given = open_volume(write_tiff(tmp_path, voxels((2, 16, side))))
    assert len([*restored(given, "zarr", tmp_path).path.glob("[0-9]")]) == levels


def test_of_arrays_as_xarray_names_them_dimensions_are_kept_and_coordinates_told(tmp_path: Path) -> None:
    path = restored(open_volume(write_zarr(tmp_path, voxels(), image=False, version=3)), "same", tmp_path).path
    assert zarr.open_array(path, path="0", mode="r").metadata.dimension_names == ("time", "channel", "z", "y", "x")
    path = write_zarr(tmp_path, voxels(), image=False)
    zarr.open_group(tmp_path / "scan.zarr", mode="a").create_array("x", data=np.arange(33.0))
    assert open_volume(path).metadata.remarks == [f"{path}: results keep no coordinates (x)"]


def test_what_json_cannot_hold_becomes_text(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path, voxels())
    with h5py.File(path, "a") as file:
        file["exchange/data"].attrs["dark"] = np.array([np.nan, -np.inf, 1.5])
        file["exchange/data"].attrs["element_size_um"] = (np.nan, 1.0, 1.0)
    result = restored(open_volume(path), "zarr", tmp_path).path

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    said = json.loads((result / ".zattrs").read_text(), parse_constant=refuse)
    assert said["attributes"]["dark"] == ["NaN", "-Infinity", 1.5]


@pytest.mark.parametrize("version", [2, 3])
def test_labels_are_kept_in_the_region_and_the_mask_that_was_made_is_one_of_them(tmp_path: Path, version: Any) -> None:
    path = write_zarr(tmp_path, voxels((4, 24, 300)), version=version, chunks=(1, 1, 4, 24, 128))
    labels = np.random.default_rng(0).integers(0, 9, (4, 24, 300), dtype=np.int32)
    root = zarr.open_group(path, mode="a")
    about = {"labels": ["deep/organs", "../0"]}
    group = root.create_group("labels", attributes=about if version == 2 else {"ome": about})
    group.create_array("deep/organs", data=labels[None, None], chunks=(1, 1, 2, 24, 64))
    group.create_array("block", data=labels.astype("u1"), chunks=(4, 24, 64))
    group.create_array("half", data=labels[:, ::2], chunks=(2, 12, 64))
    for word in ("labels/block", f"{path}/labels/block", f"{path}:/labels/block"):
        mask = make_mask(word, open_stack(path))
        assert mask.name == "block" and all(np.array_equal(mask.read(n), labels[n] != 0) for n in range(4))
    part = (slice(1, 4), slice(0, 20), slice(4, 300))
    volume = open_volume(path).cropped(Region((1, 0, 4), (4, 20, 300)))
    hole = marked((20, 296), np.s_[3:9, 5:100])
    for _ in range(2):  # as a start does that goes on after a kill
        result = restored(volume, "same", tmp_path)
        (lost,) = write_labels(result, volume, lambda index: hole, {"mask": "block"})
    assert lost.startswith("labels/half of ") and " 4 x 12 x 300 " in lost and " 4 x 24 x 300" in lost
    attributes = zarr.open_group(result.path, mode="r")["labels"].attrs.asdict()
    names = (attributes if version == 2 else attributes["ome"])["labels"]
    assert names == ["deep/organs", "block", "block-2"]
    wanted = [labels[part], labels[part].astype("u1"), np.broadcast_to(hole, (3, 20, 296))]
    for name, label in zip(names, wanted, strict=True):
        assert assert_bits(f"{result.path}:/labels/{name}", label.astype(label.dtype.str.replace("b", "u"))).labels
        smaller = zarr.open_array(result.path, path=f"labels/{name}/1", mode="r")
        np.testing.assert_array_equal(np.squeeze(smaller[...]), label[::2, ::2, ::2])
    assert open_volume(f"{result.path}:/labels/block-2").metadata.voxel_size == volume.metadata.voxel_size
    whole = open_volume(path)  # without a region a label of another shape is kept too
    result = restored(whole, "same", tmp_path)
    assert write_labels(result, whole, None, {}) == []
    assert np.array_equal(zarr.open_array(result.path, path="labels/half/0", mode="r"), labels[:, ::2])


def test_a_run_goes_on_only_with_the_type_and_the_voxel_size_it_began_with(tmp_path: Path) -> None:
    volume, size = voxels((2, 20, 33)), {"resolution": (100, 100), "resolutionunit": 3}
    mask, last = (
        SimpleNamespace(name="block", shape=volume.shape, read=lambda n, of=of: volume[n] > 9 + of * n)
        for of in (0, 20000)  # the second differs in the last slice
    )

    def described(data: np.ndarray = volume, mask: Any = mask, truth: Any = None, **options: Any) -> Any:
        stack = open_stack(write_tiff(tmp_path, data, **options or size))
        return json.loads(json.dumps({"inputs": hash_inputs([SimpleNamespace(stack=stack, mask=mask, truth=truth)])}))

    there = described()
    for other, told in (
        (described(volume.view(np.int16)), ("dtype uint16", "dtype int16")),
        (described(resolution=(50, 50), resolutionunit=3), ("voxel size 100.0", "voxel size 200.0")),
        (described(description="another tooth", **size), ("metadata", "metadata")),
        (described(mask=last), ("hidden", "hidden")),
        (described(truth=last), ("truth", "truth")),
        (described(truth=mask), ("truth", "truth")),
    ):
        difference = first_difference(there, other)
        assert difference is not None and all(map(str.startswith, difference[1:], told)), difference
    assert first_difference(described(truth=mask), described(truth=last)) is not None
    sides = {f"PhysicalSize{axis}": 2.0 for axis in "XYZ"}
    units = [{f"{name}Unit": unit for name in sides} for unit in ("nm", "mm")]
    both = [described(ome=True, metadata=sides | unit) for unit in units]
    assert first_difference(*both) == ("inputs", "unit nanometer", "unit millimeter")
    (tmp_path / "elsewhere").mkdir()
    tmp_path /= "elsewhere"
    assert first_difference(there, described()) is None
    assert first_difference({"a": 1, "only there": 2}, {"a": 1}) == ("only there", "2", "None")
    assert first_difference({"a": 1}, {"a": 1, "only now": 2}) == ("only now", "None", "2")


def test_slices_in_a_folder_that_has_a_stores_name(tmp_path: Path) -> None:
    volume, folder = voxels((3, 20, 33)), tmp_path / "x.zarr"
    folder.mkdir()
    for number, image_YX in enumerate(volume):
        tifffile.imwrite(folder / f"recon_{number}.tif", image_YX, photometric="minisblack")
    assert_bits(folder, volume)
    assert_bits(folder / "recon_1.tif", volume[1])
    zarr.create_array(folder / "0", data=volume)
    assert_bits(f"{folder}:/0", volume)
    zarr.create_array(folder, data=volume[:2])
    assert_bits(folder, volume[:2])
