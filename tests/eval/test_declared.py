"""What files declare of their values: missing voxels, scales, signs; in HDF5, Zarr, TIFF, and arrays of a program."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from cocodiff_eval.cli.inpaint import find_tasks
from cocodiff_eval.data.intensity import IntensityRange, compose_native, intensity_range
from cocodiff_eval.data.masks import make_mask
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.harness.tasks import export, result_files

from cocodiff.config.errors import UserError
from cocodiff.jobs.arrays import _save
from cocodiff.jobs.declared import find_missing

SHAPE = (3, 24, 32)
KINDS = ("h5", "zarr2", "zarr3", "image2", "image3")


def voxels(dtype: str = "uint16") -> np.ndarray:
    """From 1000 to 3000; 7 in four voxels of slice 1, of which the mask `center` hides two."""
    volume = np.random.default_rng(0).integers(1001, 3000, SHAPE).astype(dtype)
    volume[1, 2, 3], volume[1, 2, 4], volume[1, 12, 16], volume[1, 12, 17] = 7, 7, 7, 7
    return volume


def write(folder: Path, kind: str, volume: np.ndarray, about: dict[str, Any], **options: Any) -> str:
    """A file whose array has attributes; fill_value among the options is the array's own."""
    if kind == "h5":
        with h5py.File(folder / "scan.h5", "w") as file:
            file["vol"] = volume
            file["vol"].attrs.update(about)
        return f"{folder / 'scan.h5'}:/vol"
    version: Any = int(kind[-1])
    image = {"axes": [{"name": name, "type": "space"} for name in "zyx"], "datasets": [{"path": "vol"}]}
    ngff = {"multiscales": [{"version": "0.4", **image}]} if version == 2 else {"ome": {"multiscales": [image]}}
    attributes = ngff if kind.startswith("image") else {}
    group = zarr.create_group(folder / "scan.zarr", zarr_format=version, attributes=attributes, overwrite=True)
    array = group.create_array("vol", shape=volume.shape, dtype=volume.dtype, chunks=(1, 24, 32), **options)
    array[:] = volume
    array.attrs.put({name: value.tolist() if isinstance(value, np.generic) else value for name, value in about.items()})
    return str(folder / "scan.zarr") + ("" if kind.startswith("image") else ":/vol")


def ranges(path: str, **options: Any) -> tuple[float, float]:
    stack = open_stack(path)
    found = intensity_range(stack, make_mask("center", stack), **options)
    return found.low, found.high


def encoded(value: float) -> str:
    return base64.b64encode(struct.pack("<d", value)).decode()


MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "_FillValue": ({"_FillValue": np.uint16(7)}, r"2 missing \(_FillValue 7\) voxels"),
    "missing_value": ({"missing_value": np.float32(7)}, r"2 missing \(missing_value 7\) voxels"),
    "several": ({"missing_value": [9, 7]}, r"2 missing \(missing_value 9, 7\) voxels"),
    "both": ({"_FillValue": 9, "missing_value": "7"}, r"2 missing \(_FillValue 9, missing_value 7\) voxels"),
    "range": ({"valid_range": [8, 4000]}, r"2 missing \(valid_range 8, 4000\) voxels"),
    "least": ({"valid_min": 1000, "valid_max": 4000}, r"2 missing \(valid_min 1000, valid_max 4000\) voxels"),
    "most": ({"valid_max": 6}, r"1728 missing \(valid_max 6\) voxels"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MISSING)
def test_missing_voxels_are_no_intensities(tmp_path: Path, kind: str, name: str) -> None:
    about, said = MISSING[name]
    with pytest.raises(UserError, match=f"scan.*: {said} outside the mask 'center', the first at ") as error:
        ranges(write(tmp_path, kind, voxels(), about))
    told = str(error.value)
    assert told.endswith("; mask them or replace them, or delete the attribute if it is wrong")
    assert name == "most" or "the first at slice 1, row 2, column 3;" in told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "about",
    [
        {"_FillValue": 65535, "missing_value": [-9999.0, 70000], "valid_range": [7, 3000]},
        {
            "_FillValue": "none",
            "valid_max": [],
            "scale_factor": "",
            "missing_value": encoded(np.nan),
            "valid_min": np.nan,
            "_Unsigned": "true",
        },
        {"units": "7", "fill_value": 7, "actual_range": [1000, 2000]},
    ],
)
def test_what_is_declared_and_occurs_nowhere_is_no_obstacle(tmp_path: Path, kind: str, about: dict[str, Any]) -> None:
    assert ranges(write(tmp_path, kind, voxels(), about))[0] == 1001


@pytest.mark.parametrize("kind", KINDS)
def test_missing_voxels_under_the_mask_or_outside_the_region_are_fine(tmp_path: Path, kind: str) -> None:
    volume = voxels()
    volume[1, 2, 3:5] = 2000
    assert ranges(write(tmp_path, kind, volume, {"_FillValue": 7}))[0] == 1001


MOVED = {  # declared, restored, and what comes of it; 50 is the largest known voxel
    "up": ({"_FillValue": [20], "missing_value": [21]}, [19, 20, 21, 22], [19, 22, 22, 22]),
    "down": ({"missing_value": [250, 249, 7.0]}, [248, 249, 250, 7], [248, 248, 248, 8]),
    "ends": ({"_FillValue": [0], "missing_value": [255]}, [-9, 0, 255, 999], [1, 1, 254, 254]),
    "other type": ({"_FillValue": [-9999], "missing_value": [1e20, float("nan")]}, [0, 1, 2, 3], [0, 1, 2, 3]),
    "valid": ({"valid_range": [10, 90], "valid_max": [80], "_FillValue": [10]}, [9, 10, 85, 95], [11, 11, 80, 80]),
}


@pytest.mark.parametrize("case", MOVED)
def test_restored_voxels_are_never_missing_ones(case: str) -> None:
    declared, restored, expected = MOVED[case]
    scale, image_YX = IntensityRange(5.0, 50.0, declared=declared), np.array([[20, 20, 20, 20, 20]], "u1")
    mask_YX = np.array([[True] * 4 + [False]])
    restored01_YX = (np.array([[*restored, 30.0]]) - 5) / 45
    assert compose_native(image_YX, restored01_YX, mask_YX, scale).tolist() == [[*expected, 20]]
    floats_YX = compose_native(image_YX.astype("f4"), restored01_YX, mask_YX, scale)
    assert not find_missing(declared, floats_YX[:, :4]).any() and floats_YX[0, 4] == 20
    if "valid_max" not in declared:
        np.testing.assert_allclose(floats_YX[0, :4], restored, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint64", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["h5", "zarr3"])
def test_values_of_every_type(tmp_path: Path, kind: str, dtype: str) -> None:
    of_type = np.dtype(dtype).type
    value = of_type(-9999.5) if dtype.startswith("f") else of_type(np.iinfo(dtype).max)
    volume = (voxels("int64") % 99).astype(dtype)
    volume[0, 0, 0] = value
    about = encoded(float(value)) if kind == "zarr3" and dtype.startswith("f") else value  # as xarray writes it
    with pytest.raises(
        UserError,
        match=r": 1 (NaN or Inf or )?missing \(_FillValue .*\) voxels .* the first at slice 0, row 0, column 0",
    ):
        ranges(write(tmp_path, kind, volume, {"_FillValue": about}))


@pytest.mark.parametrize(("kind", "refused"), [("zarr2", True), ("zarr3", False), ("image2", False)])
def test_the_fill_value_of_xarrays_arrays_in_zarr_v2(tmp_path: Path, kind: str, refused: bool) -> None:
    about: dict[str, Any] = {"_ARRAY_DIMENSIONS": ["z", "y", "x"]} if kind != "zarr3" else {}
    path = write(tmp_path, kind, voxels(), about, fill_value=7)
    if refused:
        with pytest.raises(UserError, match=r"2 missing \(_FillValue 7\) voxels"):
            ranges(path)
        about["_FillValue"] = 65535
        path = write(tmp_path, kind, voxels(), about, fill_value=7)
    assert ranges(path)[0] == 1001


@pytest.mark.parametrize(("dtype", "sign"), [("int8", "true"), ("uint16", "false")])
@pytest.mark.parametrize("kind", KINDS)
def test_integers_of_the_other_sign_are_refused(tmp_path: Path, kind: str, dtype: str, sign: str) -> None:
    with pytest.raises(UserError, match=f"values of type {dtype} and the attribute _Unsigned; save them as this says"):
        open_stack(write(tmp_path, kind, (voxels("int64") % 99).astype(dtype), {"_Unsigned": sign}))


def task_of(path: str, **more: Any) -> Any:
    given = {"follow_links": False, "quiet": True, "input": [path], "truth": None, "mask": ["center"], "seed": 0}
    return find_tasks(given | {"axes": None, "samples": 1, "hidden_test": False} | more)[0]


@pytest.mark.parametrize("kind", ["h5", "image3"])
def test_a_truth_is_not_known_where_it_is_missing(tmp_path: Path, kind: str) -> None:
    volume = voxels()
    volume[1, 2, 3:5] = 2000
    path = write(tmp_path, kind, volume, {"_FillValue": 7, "valid_max": 2990})
    volume[volume > 2990] = 2000
    path = write(tmp_path, kind, volume, {"_FillValue": 7, "valid_max": 2990})
    expected = np.where(volume == 7, np.nan, volume)
    tifffile.imwrite(tmp_path / "mask.tif", np.pad(np.ones((12, 16), "u1"), ((6, 6), (8, 8))))
    for more in ({}, {"truth": path, "mask": [str(tmp_path / "mask.tif")]}):
        task = task_of(path, **more)
        np.testing.assert_array_equal([task.truth.read(index) for index in range(3)], expected)
        assert task.stack.read(1)[12, 16] == 7 and task.stack.dtype == np.uint16


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_kept_for_voxels_and_not_for_masks(tmp_path: Path, kind: str) -> None:
    """A mask of 255 is not missing, and a deviation has no offset."""
    about = {"scale_factor": 0.5, "add_offset": 20.0, "_FillValue": 255, "valid_range": [7, 3000], "units": "1/cm"}
    task = task_of(write(tmp_path, kind, voxels(), about))
    (told,) = task.stack.metadata.remarks
    assert told.endswith("whole results of its own format alone keep scale_factor 0.5, add_offset 20")
    files = result_files(task, ["tapa"], tmp_path, samples=2)
    for file in files.values():
        file.create()
        for index in range(3):
            file.write(index, task.stack.read(index).astype(file.dtype))
    export(task, files, tmp_path, {"tapa": {"version": "1"}}, {"version": "1"}, lambda numbers, what: numbers)
    stem = f"{task.stack.name}_center"
    for name, kept in (
        (f"{stem}_tapa", {*about}),
        (f"{stem}_tapa_std", {"scale_factor", "units"}),
        (f"{stem}_mask", {"scale_factor", "units"}),
    ):
        found = attributes_of(tmp_path, name, kind)
        assert {*found} & {*about} == kept, name
        assert {one: np.asarray(found[one]).tolist() for one in kept} == {one: about[one] for one in kept}
    if kind == "h5":
        assert make_mask(f"{tmp_path / stem}_mask.h5:/vol", task.stack).masked == (True, True, True)


def write_gdal(path: Path, volume: np.ndarray, text: str) -> str:
    """Write a TIFF with GDAL's tag of the value that missing voxels have."""
    tag = (42113, 2, 0, text.encode(), True)
    tifffile.imwrite(path, volume, photometric="minisblack", metadata=None, extratags=[tag])
    return str(path)


@pytest.mark.parametrize(("dtype", "text"), [("uint16", "7"), ("int16", "7"), ("float32", " 7.0"), ("float64", "7")])
def test_missing_voxels_of_tiff_are_those_that_gdal_declares(tmp_path: Path, dtype: str, text: str) -> None:
    path = write_gdal(tmp_path / "scan.tif", voxels(dtype), text)
    with pytest.raises(
        UserError, match=r"2 .*missing \(_FillValue 7\) voxels .* the first at slice 1, row 2, column 3;"
    ):
        ranges(path)
    task = task_of(write_gdal(tmp_path / "scan.tif", np.maximum(voxels(dtype), 1001), text))
    files = result_files(task, ["tapa"], tmp_path, samples=2)
    for file in files.values():
        file.create()
        for index in range(3):
            file.write(index, task.stack.read(index).astype(file.dtype))
    export(task, files, tmp_path, {"tapa": {"version": "1"}}, {"version": "1"}, lambda numbers, what: numbers)
    for name, kept in (("tapa", True), ("tapa_std", False), ("mask", False)):
        with tifffile.TiffFile(tmp_path / f"scan_center_{name}.tif") as tiff:
            assert (42113 in tiff.pages.first.tags) is kept, name


@pytest.mark.parametrize("text", ["nan", "1e+20", "-1", "none", ""])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
def test_a_value_that_no_voxel_of_a_tiff_can_have_is_no_damage(tmp_path: Path, dtype: str, text: str) -> None:
    volume = np.minimum(voxels(), 200).astype(dtype)
    stack = open_stack(write_gdal(tmp_path / "scan.tif", volume, text))
    assert not stack.metadata.remarks and ranges(stack.path) == (7, 200)
    np.testing.assert_array_equal([stack.read(index) for index in range(3)], volume)


def test_slices_that_declare_other_missing_values_are_named(tmp_path: Path) -> None:
    for number, text in enumerate(("7", "7", "9")):
        write_gdal(tmp_path / f"s{number}.tif", voxels()[number], text)
    (told,) = open_stack(str(tmp_path / "s*.tif")).metadata.remarks
    assert "s2.tif: another value of missing voxels than " in told


def attributes_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    if kind == "h5":
        with h5py.File(folder / f"{name}.h5") as file:
            return dict(file["vol"].attrs)
    if name.endswith("_mask"):
        name = name.replace("_mask", "_tapa") + ".ome.zarr/labels/center"
    else:
        name += ".ome.zarr"
    root = zarr.open_group(folder / name, mode="r")
    about = root.attrs.asdict()
    path = about.get("ome", about)["multiscales"][0]["datasets"][0]["path"]
    return dict(root[path].attrs.asdict())


def test_smaller_levels_have_the_scale_too(tmp_path: Path) -> None:
    volume = np.random.default_rng(0).integers(1000, 3000, (1, 300, 600), dtype="u2")
    group = zarr.create_group(tmp_path / "scan.zarr", zarr_format=2)
    group.create_array("vol", data=volume).attrs.put({"scale_factor": 0.5, "_FillValue": 7, "note": "a"})
    task = task_of(str(tmp_path / "scan.zarr:/vol"))
    files = result_files(task, ["tapa"], tmp_path)
    files["tapa"].create()
    export(task, files, tmp_path, {"tapa": {"version": "1"}}, {"version": "1"}, lambda numbers, what: numbers)
    root = zarr.open_group(tmp_path / "scan_vol_center_tapa.ome.zarr", mode="r")
    assert root["0"].attrs.asdict() == {"scale_factor": 0.5, "_FillValue": 7, "note": "a"}
    assert root["1"].attrs.asdict() == {"scale_factor": 0.5}


@pytest.mark.parametrize(("dtype", "low"), [("int64", 2**60), ("int64", -(2**62)), ("uint64", 2**64 - 4000)])
def test_integers_that_float64_does_not_tell_apart_are_refused(tmp_path: Path, dtype: str, low: int) -> None:
    volume = np.random.default_rng(0).integers(0, 1000, SHAPE).astype(dtype) + np.dtype(dtype).type(low)
    with pytest.raises(UserError, match=r"integers from .* each only up to 2\^53; subtract their least from all"):
        ranges(write(tmp_path, "h5", volume, {}))
    near = np.full(SHAPE, 2**53 - 1, dtype)
    near[0, 0, 0], near[0, 12, 16] = 2**53 - 2, np.iinfo(dtype).max  # under the mask anything
    assert ranges(write(tmp_path, "h5", near, {})) == (2**53 - 2, 2**53 - 1)


def test_arrays_of_a_program(tmp_path: Path) -> None:
    for kind in ("h5", "zarr2", "zarr3"):
        file, _, name = write(tmp_path, kind, voxels(), {"_FillValue": 7}).partition(":/")
        array: Any = h5py.File(file)[name] if kind == "h5" else zarr.open(file, mode="r")[name]
        with pytest.raises(UserError, match=r"volume is a \w+ with 4 voxels .* missing, _FillValue 7: mask them, and"):
            _save(array, tmp_path / "volume.npy")
        _save(np.asarray(array), tmp_path / "volume.npy")
        np.testing.assert_array_equal(np.load(tmp_path / "volume.npy"), voxels())
        _save(array, tmp_path / "mask.npy")
    signed = SimpleNamespace(attrs={"_Unsigned": "true"}, dtype=np.dtype("i1"), ndim=2, shape=(20, 20))
    with pytest.raises(UserError, match="values of type int8 and the attribute _Unsigned"):
        _save(signed, tmp_path / "volume.npy")
    unknown = SimpleNamespace(dtype=np.dtype("u1"), ndim=3, shape=(np.nan, 20, 20), chunks=((np.nan,), (20,), (20,)))
    for name in ("volume", "mask"):  # as of Dask, after a selection by values
        with pytest.raises(UserError, match=rf"{name} is a \w+ of unknown length: give {name}\.compute\(\)"):
            _save(unknown, tmp_path / f"{name}.npy")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file:///data/scan.tif", "is an address; name a file of this machine by its path"),
        ("s3://bucket/*.tif", "is an address"),
        ("https://host/scan.zarr", "is an address"),
        ("~/scan.tif", r"no shell has replaced the ~; name it as /.*/scan\.tif"),
        ("~/*.tif", "no shell has replaced the ~"),
        ("scan.zarr.zip", r"is an archive; unpack it \(unzip scan\.zarr\.zip -d FOLDER\)"),
        ("zipped.zarr", "is an archive"),
        ("arrays.npz", "is an archive"),
        ("scan.zarr.zip:/0", r"scan\.zarr\.zip is a file; only HDF5 has datasets in it, as scan\.h5:/data"),
        ("scan.h5/vol", r"scan\.h5 is a file; only HDF5 has"),
        ("scan.tif:/vol", r"scan\.tif is a file"),
    ],
)
def test_paths_of_other_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("arrays.npz", voxels())
    for name in ("scan.zarr.zip", "zipped.zarr"):
        Path(name).write_bytes(Path("arrays.npz").read_bytes())
    for name in ("scan.h5", "scan.tif"):
        Path(name).touch()
    with pytest.raises(UserError, match=f"^{re.escape(path)}: .*{said}"):
        open_stack(path)


def test_colons_and_slashes_of_other_tools(tmp_path: Path) -> None:
    path = write(tmp_path, "h5", voxels(), {}).removesuffix(":/vol")
    store = write(tmp_path, "zarr2", voxels(), {}).removesuffix(":/vol")
    for one in (f"{path}::/vol", f"{path}:vol", f"{store}::/vol", f"{store}/vol"):
        np.testing.assert_array_equal(open_stack(one).read(2), voxels()[2])
    with pytest.raises(UserError, match=r"scan\.h5: name the dataset as .*scan\.h5:/path; it holds /vol"):
        open_stack(f"{path}/")
