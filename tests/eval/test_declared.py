"""What files declare of their values: missing voxels, scales, signs; in HDF5, Zarr, TIFF, and arrays of a program."""

from __future__ import annotations

import base64
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import xarray
import zarr
from cocodiff_eval.data.intensity import IntensityRange, compose_native, intensity_range
from cocodiff_eval.data.masks import make_mask
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.harness.tasks import export, find_tasks, result_files
from eval_helpers import CASES
from file_kinds import DECLARING, KINDS, assert_bits, write_hdf5, write_tiff, write_zarr
from seams import save_as_restore

from cocodiff.config.errors import UserError
from cocodiff.jobs.declared import find_missing

SHAPE = (3, 24, 32)


def voxels(dtype: str = "uint16") -> np.ndarray:
    """From 1000 to 3000; 7 in four voxels of slice 1, of which the mask `center` hides two."""
    volume = np.random.default_rng(0).integers(1001, 3000, SHAPE).astype(dtype)
    volume[1, 2, 3], volume[1, 2, 4], volume[1, 12, 16], volume[1, 12, 17] = 7, 7, 7, 7
    return volume


def ranges(path: str) -> tuple[float, float]:
    stack = open_stack(path)
    found = intensity_range(stack, replace(make_mask("center", stack), from_file=True))
    return found.low, found.high


def refused(path: str, words: str) -> str:
    """Check that a file is refused for voxels outside the mask, in one line with these words."""
    with pytest.raises(UserError, match=words) as error:
        ranges(path)
    assert "\n" not in str(error.value) and "scan" in str(error.value)
    return str(error.value)


def encoded(value: float) -> str:
    """Return a float as xarray writes it in Zarr v3."""
    return base64.b64encode(struct.pack("<d", value)).decode()


@pytest.mark.parametrize("kind", DECLARING)
@pytest.mark.parametrize("name", CASES["declared"])
def test_missing_voxels_are_no_intensities(tmp_path: Path, kind: str, name: str) -> None:
    """Where none is outside the mask, what is declared is no obstacle."""
    about, words = CASES["declared"][name]
    path = KINDS[kind].file(tmp_path, voxels(), attributes=about)
    if not words:
        assert ranges(path)[0] == 1001
        return
    words = words.replace(r"\(", r"\((_FillValue 0, )?")  # which xarray's arrays have in Zarr v2
    told = refused(path, f"{words} outside the mask 'center'")
    assert "attribute" in told and (name == "most" or "slice 1, row 2, column 3" in told)
    if name == "_FillValue":
        volume = voxels()
        volume[1, 2, 3:5] = 2000
        assert ranges(KINDS[kind].file(tmp_path, volume, attributes=about))[0] == 1001


@pytest.mark.parametrize(("dtype", "sign"), [("int8", "true"), ("uint16", "false")])
@pytest.mark.parametrize("kind", DECLARING)
def test_integers_of_the_other_sign_are_refused(tmp_path: Path, kind: str, dtype: str, sign: str) -> None:
    volume = (voxels("int64") % 99).astype(dtype)
    refused(KINDS[kind].file(tmp_path, volume, attributes={"_Unsigned": sign}), f"type {dtype} .* _Unsigned")


@pytest.mark.parametrize(("declared", "restored", "expected"), CASES["restored"].values(), ids=CASES["restored"])
def test_restored_voxels_are_never_missing_ones(declared: Any, restored: list[int], expected: list[int]) -> None:
    scale, image_YX = IntensityRange(5.0, 50.0, declared=declared), np.array([[20, 20, 20, 20, 20]], "u1")
    mask_YX = np.array([[True] * 4 + [False]])
    restored01_YX = (np.array([[*restored, 30.0]]) - 5) / 45
    assert compose_native(image_YX, restored01_YX, mask_YX, scale).tolist() == [[*expected, 20]]
    floats_YX = compose_native(image_YX.astype("f4"), restored01_YX, mask_YX, scale)
    assert not find_missing(declared, floats_YX[:, :4]).any() and floats_YX[0, 4] == 20
    if "valid_max" not in declared:
        np.testing.assert_allclose(floats_YX[0, :4], restored, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint64", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["hdf5", "zarr 3 array"])
def test_values_of_every_type(tmp_path: Path, kind: str, dtype: str) -> None:
    of_type = np.dtype(dtype).type
    value = of_type(-9999.5) if dtype.startswith("f") else of_type(np.iinfo(dtype).max)
    volume = (voxels("int64") % 99).astype(dtype)
    volume[0, 0, 0] = value
    about = encoded(float(value)) if "zarr" in kind and dtype.startswith("f") else value
    words = r": 1 (NaN or Inf or )?missing \(_FillValue .*\) voxels .* slice 0, row 0, column 0"
    refused(KINDS[kind].file(tmp_path, volume, attributes={"_FillValue": about}), words)


def test_the_fill_value_of_xarrays_arrays_in_zarr_v2(tmp_path: Path) -> None:
    """It is the array's own there, where no attribute tells another."""
    refused(write_zarr(tmp_path, voxels(), image=False, fill_value=7), r"2 missing \(_FillValue 7\) voxels")
    for options in ({"image": False, "attributes": {"_FillValue": 65535}}, {"image": False, "version": 3}, {}):
        assert ranges(write_zarr(tmp_path, voxels(), fill_value=7, **options))[0] == 1001


def task_of(path: str, **more: Any) -> Any:
    given = {"follow_links": False, "quiet": True, "input": [path], "truth": None, "mask": ["center"], "seed": 0}
    return find_tasks(given | {"axes": None, "samples": 1, "hidden_test": False} | more)[0]


def exported(path: str, folder: Path, samples: int = 2, anew: bool = False) -> Any:
    """Write all results of an input with its own voxels, and return the task. anew: with others under the mask."""
    task = task_of(path)
    pattern = np.random.default_rng(5).random(task.stack.shape)

    def read(name: str, index: int) -> np.ndarray:
        image_YX, mask_YX = task.stack.read(index), task.mask.read(index)
        image_YX = compose_native(image_YX, pattern[index], mask_YX, task.scale) if anew else image_YX
        return image_YX.astype(np.float32 if name == "tapa_spread" else image_YX.dtype)

    files = result_files(task, ["tapa"], read, samples=samples, more=["_low_90"])
    export(task, files, folder, {"tapa": {"version": "1"}}, {"version": "1"}, lambda numbers, what: numbers)
    return task


@pytest.mark.parametrize("kind", ["hdf5", "zarr 3"])
def test_a_truth_is_not_known_where_it_is_missing(tmp_path: Path, kind: str) -> None:
    volume = voxels()
    volume[1, 2, 3:5] = 2000
    volume[volume > 2990] = 2000
    path = KINDS[kind].file(tmp_path, volume, attributes={"_FillValue": 7, "valid_max": 2990})
    expected = np.where(volume == 7, np.nan, volume)
    tifffile.imwrite(tmp_path / "mask.tif", np.pad(np.ones((12, 16), "u1"), ((6, 6), (8, 8))))
    for more in ({}, {"truth": path, "mask": [str(tmp_path / "mask.tif")]}):
        task = task_of(path, **more)
        np.testing.assert_array_equal([task.truth.read(index) for index in range(3)], expected)
        assert task.stack.read(1)[12, 16] == 7 and task.stack.dtype == np.uint16


@pytest.mark.parametrize("kind", ["hdf5", "zarr 2", "zarr 3", "zarr 2 array", "zarr 3 array"])
def test_scales_are_kept_for_voxels_and_not_for_masks(tmp_path: Path, kind: str) -> None:
    """A mask of 255 is not missing, and a deviation has no offset."""
    about = {"scale_factor": 0.5, "add_offset": 20.0, "_FillValue": 255, "valid_range": [7, 3000], "units": "1/m"}
    task = exported(KINDS[kind].file(tmp_path, voxels(), attributes=about), tmp_path)
    told = "; ".join(task.stack.metadata.remarks)
    assert ": results of its own format alone keep scale_factor 0.5, add_offset 20" in told
    stem = f"{task.stack.name}_center"
    scales = {"scale_factor", "units"}
    for end, kept in (("tapa", {*about}), ("tapa_low_90", {*about}), ("tapa_spread", scales), ("mask", scales)):
        found = attributes_of(tmp_path, f"{stem}_{end}", kind)
        assert {*found} & {*about} == kept, end
        assert {one: np.asarray(found[one]).tolist() for one in kept} == {one: about[one] for one in kept}
    unscaled = KINDS[kind].file(tmp_path / "unscaled", voxels(), attributes={"scale_factor": 1.0, "add_offset": 0})
    assert not open_stack(unscaled).metadata.remarks
    if kind == "hdf5":
        assert make_mask(f"{tmp_path / stem}_mask.h5", task.stack).masked == (True, True, True)


def attributes_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    if kind == "hdf5":
        with h5py.File(folder / f"{name}.h5") as file:
            return dict(file["exchange/data"].attrs)
    mask = name.endswith("_mask")
    store = f"{name.replace('_mask', '_tapa')}.ome.zarr" + "/labels/center" * mask
    return dict(zarr.open_group(folder / store, mode="r")["0"].attrs.asdict())


ORDERS = (("z", "y", "x"), ("depth", "lat", "lon"), ("Z", "Y", "X"), ("slice", "row", "column"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["netcdf", "zarr 2", "zarr 3"])
@pytest.mark.parametrize(("number", "name"), [*enumerate(CASES["by xarray"])])
def test_xarray_decodes_a_result_as_it_does_its_input(tmp_path: Path, kind: str, number: int, name: str) -> None:
    """And finds nothing missing that was restored."""
    dtype, missing, about = CASES["by xarray"][name]
    of_voxels = {one: np.array(about[one], dtype)[()] for one in ("_FillValue", "missing_value") if one in about}
    about = about | of_voxels
    volume = (voxels() % 100 + 20).astype(dtype)
    volume[volume == missing] += 1
    volume[1, 8:16, 10:20] = missing
    data, encoding = xarray.Dataset({"a": (ORDERS[number % 4], volume)}), {"a": {"_FillValue": about["_FillValue"]}}
    data["a"].attrs.update({one: value for one, value in about.items() if one != "_FillValue"})
    if kind == "netcdf":
        data.to_netcdf(tmp_path / "scan.h5", group="b", engine="h5netcdf", encoding=encoding)
        place, how = f"{tmp_path}/scan.h5:/b/a", {"engine": "h5netcdf", "group": "b", "phony_dims": "sort"}
    else:
        data.to_zarr(tmp_path / "scan.zarr", zarr_format=int(kind[-1]), consolidated=number % 2 > 0, encoding=encoding)
        place, how = f"{tmp_path}/scan.zarr:/a", {"engine": "zarr", "consolidated": False}
    task = exported(place, tmp_path, anew=True)
    result = tmp_path / task.files.result("tapa", ".h5" if kind == "netcdf" else ".ome.zarr")
    paths = {place.partition(":/")[0]: "a", result: "a" if kind == "netcdf" else "0"}
    before, after = (xarray.load_dataset(path, **how)[one].values for path, one in paths.items())
    mask_YX = task.mask.read(0)
    np.testing.assert_array_equal(after[:, ~mask_YX], before[:, ~mask_YX])
    assert np.isfinite(after[:, mask_YX]).all() and not np.isfinite(before[:, mask_YX]).all()


def test_smaller_levels_have_the_scale_too(tmp_path: Path) -> None:
    volume = np.random.default_rng(0).integers(1000, 3000, (1, 300, 600), dtype="u2")
    about = {"scale_factor": 0.5, "_FillValue": 7, "note": "a"}
    exported(write_zarr(tmp_path, volume, attributes=about, chunks=(1, 1, 1, 300, 600)), tmp_path, samples=1)
    root = zarr.open_group(tmp_path / "scan_center_tapa.ome.zarr", mode="r")
    assert root["0"].attrs.asdict() == about and root["1"].attrs.asdict() == {"scale_factor": 0.5}


def write_gdal(folder: Path, volume: np.ndarray, text: str) -> str:
    """Write a TIFF with GDAL's tag of the value that missing voxels have."""
    return write_tiff(folder, volume, metadata=None, extratags=[(42113, 2, 0, text.encode(), True)])


@pytest.mark.parametrize(("dtype", "text"), [("uint16", "7"), ("int16", "7"), ("float32", " 7.0"), ("float64", "7")])
def test_missing_voxels_of_tiff_are_those_that_gdal_declares(tmp_path: Path, dtype: str, text: str) -> None:
    path = write_gdal(tmp_path, voxels(dtype), text)
    refused(path, r"2 .*missing \(_FillValue 7\) voxels .* slice 1, row 2, column 3")
    exported(write_gdal(tmp_path, np.maximum(voxels(dtype), 1001), text), tmp_path)
    for name, kept in (("tapa", True), ("tapa_spread", False), ("mask", False)):
        with tifffile.TiffFile(tmp_path / f"scan_center_{name}.tif") as tiff:
            assert (42113 in tiff.pages.first.tags) is kept, name


@pytest.mark.parametrize("text", ["nan", "1e+20", "-1", "none", ""])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
def test_a_value_that_no_voxel_of_a_tiff_can_have_is_no_damage(tmp_path: Path, dtype: str, text: str) -> None:
    volume = np.minimum(voxels(), 200).astype(dtype)
    path = write_gdal(tmp_path, volume, text)
    assert not assert_bits(path, volume).metadata.remarks and ranges(path) == (7, 200)


def test_slices_that_declare_other_missing_values_are_named(tmp_path: Path) -> None:
    for number, text in enumerate(("7", "7", "9")):
        Path(write_gdal(tmp_path, voxels()[number], text)).rename(tmp_path / f"s{number}.tif")
    (told,) = open_stack(str(tmp_path / "s*.tif")).metadata.remarks
    assert "s2.tif: another value of missing voxels than " in told


@pytest.mark.parametrize(("dtype", "low"), [("int64", 2**60), ("int64", -(2**62)), ("uint64", 2**64 - 4000)])
def test_integers_that_float64_does_not_tell_apart_are_refused(tmp_path: Path, dtype: str, low: int) -> None:
    volume = np.random.default_rng(0).integers(0, 1000, SHAPE).astype(dtype) + np.dtype(dtype).type(low)
    refused(write_hdf5(tmp_path, volume), r"integers from .*2\^53")
    near = np.full(SHAPE, 2**53 - 1, dtype)
    near[0, 0, 0], near[0, 12, 16] = 2**53 - 2, np.iinfo(dtype).max  # under the mask anything
    assert ranges(write_hdf5(tmp_path, near)) == (2**53 - 2, 2**53 - 1)


def test_arrays_of_a_program(tmp_path: Path) -> None:
    volume = tmp_path / "volume.npy"
    for kind in ("hdf5", "zarr 2 array", "zarr 3 array"):
        about = {"axes": "zyx", "attributes": {"_FillValue": 7}}
        path = KINDS[kind].file(tmp_path, voxels(), **about).partition(":/")[0]
        array: Any = h5py.File(path)["exchange/data"] if kind == "hdf5" else zarr.open(path, mode="r")["0"]
        with pytest.raises(UserError, match=r"volume is a \w+ with 4 voxels .* _FillValue 7: "):
            save_as_restore(array, volume)
        save_as_restore(np.asarray(array[:]), volume)
        np.testing.assert_array_equal(np.load(volume), voxels())
        save_as_restore(array, tmp_path / "mask.npy")
    signed = SimpleNamespace(attrs={"_Unsigned": "true"}, dtype=np.dtype("i1"), ndim=2, shape=(20, 20))
    with pytest.raises(UserError, match="values of type int8 and the attribute _Unsigned"):
        save_as_restore(signed, volume)
    unknown = SimpleNamespace(dtype=np.dtype("u1"), ndim=3, shape=(np.nan, 20, 20), chunks=((np.nan,), (20,), (20,)))
    for name in ("volume", "mask"):  # as of Dask, after a selection by values
        with pytest.raises(UserError, match=rf"{name} is a \w+ of unknown length: .*{name}\.compute\(\)"):
            save_as_restore(unknown, tmp_path / f"{name}.npy")


def test_colons_and_slashes_of_other_tools(tmp_path: Path) -> None:
    path, store = write_hdf5(tmp_path, voxels()), write_zarr(tmp_path, voxels(), image=False).removesuffix(":/0")
    places = ("::/exchange/data", ":exchange/data", ":/./exchange//data", "/")
    for one in (f"{store}::/0", f"{store}/0", *(f"{path}{place}" for place in places)):
        assert_bits(one, voxels())
    assert [open_stack(one).name for one in (f"{path}:exchange/data", f"{store}/0")] == ["scan_exchange_data", "scan_0"]
