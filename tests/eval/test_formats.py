"""Volumes go in and come out in every format with their bits, and with what they say of their voxels."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import tifffile
import zarr
from cocodiff_eval.data import WRITTEN
from cocodiff_eval.data.formats import FORMATS, open_volume, result_format, write_volume
from cocodiff_eval.data.masks import make_mask
from cocodiff_eval.data.slices import open_stack, open_truth
from cocodiff_eval.data.volume import NewVolume, Part, Region, Stack
from PIL import Image

from cocodiff.config.errors import UserError

DTYPES = ("uint8", "uint16", "int16", "float32")
SHAPE = (6, 20, 33)
PROVENANCE = {"version": "1.0", "preset": "cocodiff+", "seed": 7, "settings": {"threshold": 0.1}}
VOXEL_SIZE = (2.5, 0.5, 0.25)


def voxels(shape: tuple[int, ...] = SHAPE, dtype: str = "uint16") -> np.ndarray:
    """With values that only bits tell apart: -0.0, and a slice of nothing else; NaN, of which two have other bits."""
    random = np.random.default_rng(sum(shape))
    volume = random.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
    if dtype == "float32":
        volume[0], volume[1] = -0.0, 0.0
        volume[2] = np.array([0x7FC00001], np.uint32).view(np.float32)  # NaN, with a bit that arithmetic would lose
    return volume


def write_tiff(path: Path, volume: np.ndarray, byteorder: str, **options: Any) -> str:
    tifffile.imwrite(path / "scan.tif", volume, byteorder=byteorder, photometric="minisblack", **options)
    return str(path / "scan.tif")


def write_imagej(path: Path, volume: np.ndarray, byteorder: str) -> str:
    options = {"resolution": (4.0, 2.0), "metadata": {"spacing": 2.5, "unit": "um", "axes": "ZYX", "Info": "a tooth"}}
    return write_tiff(path, volume, byteorder, imagej=True, **options)


def write_ome(path: Path, volume: np.ndarray, byteorder: str) -> str:
    sizes = {f"PhysicalSize{axis}": size for axis, size in zip("ZYX", VOXEL_SIZE, strict=True)}
    return write_tiff(path, volume, byteorder, ome=True, metadata={"axes": "ZYX", "Description": "a tooth", **sizes})


def write_white(path: Path, volume: np.ndarray, byteorder: str) -> str:
    options = {"resolution": (40000, 20000), "resolutionunit": 3, "software": "recon 3", "compression": "lzw"}
    with tifffile.TiffWriter(path / "scan.tif", byteorder=byteorder) as writer:
        writer.write(volume, photometric="miniswhite", description="a tooth", metadata={"beam": 30}, **options)
    return str(path / "scan.tif")


def write_sequence(path: Path, volume: np.ndarray, byteorder: str) -> str:
    (path / "scan").mkdir()
    for number, image_YX in enumerate(volume):
        file = path / "scan" / f"recon_{number + 8}.tiff"
        tifffile.imwrite(file, image_YX, byteorder=byteorder, description=f"slice {number}", metadata=None)
    return str(path / "scan")


def write_hdf5(path: Path, volume: np.ndarray, byteorder: str, **options: Any) -> str:
    with h5py.File(path / "scan.h5", "w") as file:
        data = volume.astype(volume.dtype.newbyteorder(byteorder))
        file.create_dataset("exchange/data", data=data, **options)
        file["exchange/data"].attrs["element_size_um"] = VOXEL_SIZE
        file["exchange/data"].attrs["units"] = "1/cm"
        file["exchange/theta"] = np.arange(5.0)
        file["exchange"].attrs["beamline"] = "2-BM"
        file.attrs["sample"] = "a tooth"
    return str(path / "scan.h5")


def write_frames(path: Path, volume: np.ndarray, byteorder: str) -> str:
    with h5py.File(path / "scan.h5", "w") as file:
        group = file.create_group("20260102_tooth")
        group.attrs["pxsize"] = b"0.0025"
        for number in reversed(range(len(volume))):
            name = f"20260102_tooth_0000_{number + 8}.tif"  # 10 comes after 9, not before 8
            group[name] = volume[number].astype(volume.dtype.newbyteorder(byteorder))[None]
            group[name].attrs["date"] = f"day {number}"
        group["20260102_toothbak_0000.tif"] = volume[:1] * 0
    return str(path / "scan.h5")


def write_zarr(path: Path, volume: np.ndarray, byteorder: str, version: int = 2, **options: Any) -> str:
    """As other tools write it, with axes of time and channel."""
    axes = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    transforms = [
        {"type": "scale", "scale": [1.0, 1.0, *VOXEL_SIZE]},
        {"type": "translation", "translation": [0.0, 0.0, 10.0, 20.0, 30.0]},
    ]
    image = {"name": "tooth", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": transforms}]}
    if version == 2:
        about = {"multiscales": [{"version": "0.4", **image}], "omero": {"channels": []}, "sample": "a tooth"}
    else:
        about = {"ome": {"version": "0.5", "multiscales": [image], "omero": {"channels": []}}, "sample": "a tooth"}
    root = zarr.create_group(path / "scan.zarr", zarr_format=version, attributes=about)
    dtype = volume.dtype.newbyteorder(byteorder) if version == 2 else volume.dtype
    if version == 3 and volume.itemsize > 1:
        options["serializer"] = zarr.codecs.BytesCodec(endian="big" if byteorder == ">" else "little")
    options = {"chunks": (1, 1, 4, 16, 16)} | options
    array = root.create_array("0", shape=(1, 1, *volume.shape), dtype=dtype, **options)
    array[0, 0] = volume
    return str(path / "scan.zarr")


SHARDS = {"version": 3, "chunks": (1, 1, 2, 8, 16), "shards": (1, 1, 4, 16, 32)}


def write_npy(path: Path, volume: np.ndarray, byteorder: str) -> str:
    np.save(path / "scan.npy", volume.astype(volume.dtype.newbyteorder(byteorder)))
    return str(path / "scan.npy")


KINDS: dict[str, tuple[Callable[..., str], dict[str, Any]]] = {
    "tiff": (write_tiff, {}),
    "imagej": (write_imagej, {}),
    "ome": (write_ome, {}),
    "white": (write_white, {}),
    "sequence": (write_sequence, {}),
    "hdf5": (write_hdf5, {}),
    "hdf5 chunked": (write_hdf5, {"chunks": (4, 16, 16), "compression": "gzip", "shuffle": True}),
    "frames": (write_frames, {}),
    "zarr 2": (write_zarr, {}),
    "zarr 2 blosc": (write_zarr, {"compressors": numcodecs.Blosc(cname="lz4")}),
    "zarr 3": (write_zarr, {"version": 3}),
    "zarr 3 sharded": (write_zarr, SHARDS),
    "npy": (write_npy, {}),
}


def slice_of(volume: Stack, index: int) -> np.ndarray:
    return np.ascontiguousarray(volume.reader(index), dtype=volume.dtype)


def restored(volume: Stack, word: str, folder: Path) -> NewVolume:
    """A result with the volume's own voxels."""
    word = result_format(word, volume)
    read = lambda index: slice_of(volume, index)  # noqa: E731
    return write_volume(word, folder, lambda suffix: f"out{suffix}", volume, volume.dtype, read, PROVENANCE)


def assert_bits(path: Any, expected: np.ndarray) -> Stack:
    found = open_volume(str(path))
    assert (found.shape, found.dtype, found.ndim) == (expected.shape, expected.dtype, 3)
    for index, image_YX in enumerate(expected):
        assert slice_of(found, index).tobytes() == image_YX.tobytes()
    return found


@pytest.mark.parametrize("byteorder", "<>")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_volume_comes_back_in_its_own_format(tmp_path: Path, kind: str, dtype: str, byteorder: str) -> None:
    write, options = KINDS[kind]
    if (kind, dtype) == ("imagej", "int16"):
        return  # ImageJ has none
    volume = voxels(dtype=dtype)
    given = open_volume(write(tmp_path, volume, byteorder, **options))
    assert_bits(given.path, volume)
    found = assert_bits(restored(given, "same", tmp_path).path, volume).metadata
    before = given.metadata
    assert (found.kind, found.voxel_size, found.unit) == (before.kind, before.voxel_size, before.unit)
    assert found.axes == before.axes or kind == "white"  # tifffile's own name for an axis that has none
    assert found.byteorder == before.byteorder
    assert found.byteorder == byteorder or dtype == "uint8"
    assert before.description in found.description


@pytest.mark.parametrize("word", ["tiff", "sequence", "zarr", "h5"])
@pytest.mark.parametrize("kind", ["imagej", "ome", "white", "sequence", "hdf5", "frames", "zarr 2", "zarr 3 sharded"])
def test_a_volume_goes_from_any_format_to_any(tmp_path: Path, kind: str, word: str) -> None:
    write, options = KINDS[kind]
    volume = voxels(dtype="float32")
    given = open_volume(write(tmp_path, volume, ">", **options))
    region = Region((2, 1, 4), (5, 19, 30))
    path = restored(given.cropped(region), word, tmp_path).path
    found = assert_bits(path, volume[2:5, 1:19, 4:30]).metadata
    size = given.metadata.voxel_size
    assert found.voxel_size == (pytest.approx(size) if size else size)
    assert "cocodiff+" in said(path) and '"start": [2, 1, 4]' in said(path)


@pytest.mark.parametrize("word", ["tiff", "sequence", "zarr", "h5", "npy"])
def test_a_volume_is_on_the_disk_when_it_is_written(
    tmp_path: Path, unsynced: Callable[[Path], list[str]], word: str
) -> None:
    given, folder = open_volume(write_tiff(tmp_path, voxels(), "<")), tmp_path / "results"
    folder.mkdir()
    path = restored(given, word, folder).path
    assert path.exists() and not unsynced(folder)


def said(path: Path) -> str:
    """All that a result says of itself, as text."""
    if path.suffix == ".zarr":
        return json.dumps(zarr.open_group(path, mode="r").attrs.asdict())
    if path.suffix == ".h5":
        texts: list[str] = []
        with h5py.File(path) as file:
            file.visititems(lambda name, node: texts.extend(map(str, node.attrs.values())))
        return " ".join(texts)
    file = path if path.is_file() else min(path.iterdir())
    with tifffile.TiffFile(file) as tiff:
        info = (tiff.imagej_metadata or {}).get("Info", "")
        texts = [str(tag.value) for tag in tiff.pages.first.tags if tag.code == 270]
    return " ".join([info, *texts]).replace("&quot;", '"')


def test_tags_of_a_tiff_are_kept(tmp_path: Path) -> None:
    path = restored(open_volume(write_white(tmp_path, voxels(), ">")), "same", tmp_path).path
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages.first
        tags = {tag.name: tag.value for tag in page.tags if tag.code != 270}
        assert page.photometric == 0 and page.description == "a tooth" and tiff.byteorder == ">"
        assert tiff.shaped_metadata[0]["beam"] == 30 and tiff.shaped_metadata[0]["cocodiff"] == PROVENANCE
    assert (tags["XResolution"], tags["ResolutionUnit"], tags["Software"]) == ((40000, 1), 3, "recon 3")


def test_names_and_descriptions_of_a_sequence_are_kept(tmp_path: Path) -> None:
    given = open_volume(write_sequence(tmp_path, voxels(), "<"))
    assert [Path(name).name for name in given.metadata.details["files"][:3]] == [
        "recon_8.tiff",
        "recon_9.tiff",
        "recon_10.tiff",
    ]
    folder = restored(given.cropped(Region((1, 0, 0), (4, 20, 33))), "same", tmp_path).path
    assert sorted(path.name for path in folder.iterdir()) == ["recon_10.tiff", "recon_11.tiff", "recon_9.tiff"]
    with tifffile.TiffFile(folder / "recon_10.tiff") as tiff:
        assert tiff.pages.first.description == "slice 2"


def test_objects_and_attributes_of_hdf5_are_kept(tmp_path: Path) -> None:
    with h5py.File(restored(open_volume(write_hdf5(tmp_path, voxels(), "<")), "same", tmp_path).path) as file:
        assert file.attrs["sample"] == "a tooth" and file["exchange"].attrs["beamline"] == "2-BM"
        assert file["exchange/theta"][:].tolist() == list(range(5)) and file["exchange/data"].attrs["units"] == "1/cm"
        assert json.loads(file["exchange/data"].attrs["cocodiff"]) == PROVENANCE
    (tmp_path / "frames").mkdir()
    frames = open_volume(write_frames(tmp_path / "frames", voxels(), "<"))
    assert frames.metadata.voxel_size == (0.0025,) * 3 and frames.metadata.unit == "millimeter"
    with h5py.File(restored(frames, "same", tmp_path / "frames").path) as file:
        group = file["20260102_tooth"]
        assert group["20260102_tooth_0000_11.tif"].attrs["date"] == "day 3" and "20260102_toothbak_0000.tif" in group
    alone = restored(frames.cropped(Region((2, 0, 0), (3, 20, 33))), "same", tmp_path / "frames").path
    assert open_volume(str(alone)).shape == (1, 20, 33)


@pytest.mark.parametrize("version", [2, 3])
def test_a_pyramid_halves_and_stays_in_place(tmp_path: Path, version: int) -> None:
    volume = voxels((5, 600, 515), "uint8")
    given = open_volume(write_zarr(tmp_path, volume, "<", version, chunks=(1, 1, 4, 512, 512)))
    path = restored(given, "same", tmp_path).path
    attributes = zarr.open_group(path, mode="r").attrs.asdict()
    about = attributes["ome"] if version == 3 else attributes
    (image,) = about["multiscales"]
    assert about["omero"] == {"channels": []} and attributes["sample"] == "a tooth" and image["name"] == "tooth"
    levels = [zarr.open_array(path, path=one["path"], mode="r") for one in image["datasets"]]
    assert [level.shape for level in levels] == [(1, 1, 5, 600, 515), (1, 1, 3, 300, 258), (1, 1, 2, 150, 129)]
    assert {level.metadata.zarr_format for level in levels} == {version}
    mean = volume[:4].reshape(2, 2, 300, 2, 515)[..., :514].reshape(2, 2, 300, 2, 257, 2).mean((1, 3, 5))
    assert np.abs(levels[1][0, 0, :2, :, :257] - mean).max() <= 0.51
    scale, shift = (one[one["type"]] for one in image["datasets"][1]["coordinateTransformations"])
    assert scale == [1, 1, 5, 1, 0.5] and shift == [0, 0, 11.25, 20.25, 30.125]


def test_masks_come_from_a_label_image_of_the_store(tmp_path: Path) -> None:
    path = write_zarr(tmp_path, voxels((4, 24, 40)), "<")
    labels = np.zeros((4, 24, 40), np.uint8)
    labels[:, 2:7, 3:9], labels[1, 10:12, 20:30] = 5, 9
    zarr.open_group(path, mode="a").require_group("labels").create_array("holes", data=labels, chunks=(1, 24, 40))
    stack = open_stack(path)
    for word in ("labels/holes", f"{path}/labels/holes", f"{path}:/labels/holes"):
        mask = make_mask(word, stack)
        assert mask.name == "holes" and all(np.array_equal(mask.read(n), labels[n] != 0) for n in range(4))


@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_of_blosc_that_is_cut_short_is_refused(tmp_path: Path, version: int) -> None:
    """Blosc's own library would take what lies behind it in memory."""
    codec = numcodecs.Blosc() if version == 2 else zarr.codecs.BloscCodec()
    store = write_zarr(tmp_path, voxels(), "<", version, compressors=codec)
    chunk = next((tmp_path / "scan.zarr").rglob("0.0.0.0.0" if version == 2 else "c/0/0/0/0/0"))
    chunk.write_bytes(chunk.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"slice 0 cannot be read .* is cut short"):
        open_volume(store).reader(0)


@pytest.mark.parametrize("name", ["a.h5:b.tif", "a.hdf:b.png"])
def test_a_file_may_have_a_colon_in_its_name(tmp_path: Path, name: str) -> None:
    Image.fromarray(voxels((20, 33), "uint8")).save(tmp_path / name)
    assert open_volume(str(tmp_path / name)).name == Path(name).stem


@pytest.mark.usefixtures("promptly")
@pytest.mark.parametrize("name", [".zgroup", ".zattrs", "0/.zarray", "0/0.0.0.0.0"])
def test_a_pipe_in_a_store_is_never_opened(tmp_path: Path, name: str) -> None:
    store = write_zarr(tmp_path, voxels(), "<")
    (tmp_path / "scan.zarr" / name).unlink()
    os.mkfifo(tmp_path / "scan.zarr" / name)
    with pytest.raises(UserError, match="is a named pipe"):
        open_volume(store).reader(0)


def test_a_region_is_all_that_is_read(tmp_path: Path) -> None:
    volume = voxels((6, 40, 50))
    path = write_tiff(tmp_path, volume, "<")
    stack = open_stack(path, part=Part("2:5", "4:30,10:"))
    assert stack.shape == (3, 26, 40) and np.array_equal(stack.read(1), volume[3, 4:30, 10:])
    assert np.array_equal(open_truth(path, stack).read(2), volume[4, 4:30, 10:])
    hole = np.zeros((6, 40, 50), np.uint8)
    hole[2:5, 6:12, 12:20] = 1
    part = hole[2:5, 4:30, 10:]
    for number, mask in enumerate((hole, part, hole[3], part[1])):
        tifffile.imwrite(tmp_path / f"hole{number}.tif", mask, photometric="minisblack")
        read = make_mask(str(tmp_path / f"hole{number}.tif"), stack)
        assert all(np.array_equal(read.read(index), part[index] != 0) for index in range(3))
    for slices, roi, said in (
        ("2:9", "", "--slices 2:9: not within .* 6 x 40 x 50 voxels"),
        ("3", "", "--slices '3': not a range; give 100:200"),
        ("", "4:30", "--roi '4:30': give rows and columns as y0:y1,x0:x1"),
        ("", "30:4,:", "--roi 30:4: not within"),
    ):
        with pytest.raises(UserError, match=said):
            open_stack(path, part=Part(slices, roi))


def test_the_words_of_the_option_are_the_formats_that_are_written() -> None:
    assert tuple(word for word, one in FORMATS.items() if one.writer is not None) == WRITTEN


def test_mistakes_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    folder = Path(write_sequence(tmp_path, voxels(), "<"))

    def refused(path: Path | str = folder) -> str:
        with pytest.raises(UserError) as caught:
            open_stack(str(path))
        return str(caught.value)

    (folder / "recon_10.tiff").rename(tmp_path / "kept.tiff")
    assert "recon_10.tiff is missing after recon_9.tiff" in refused()
    tifffile.imwrite(folder / "recon_10.tiff", np.zeros((20, 33), np.uint8))
    assert "recon_10.tiff: holds 20 x 33 voxels of uint8" in refused()
    tifffile.imwrite(folder / "recon_10.tiff", np.zeros((20, 34), np.uint16))
    assert "recon_10.tiff: holds 20 x 34 voxels" in refused()
    (tmp_path / "kept.tiff").rename(folder / "recon_10.tiff")
    (folder / "recon_010.tiff").write_bytes((folder / "recon_10.tiff").read_bytes())
    assert "have the same number" in refused()
    (folder / "recon_010.tiff").rename(folder / "flat_1.tiff")
    assert "flat_1.tiff has another name than recon_*.tiff" in refused()
    assert open_stack(f"{folder}/recon_*.tiff").name == "recon"
    assert "no name fits this pattern" in refused(f"{folder}/dark_*.tif")
    path = write_zarr(tmp_path, voxels(), "<")
    zarr.open_group(path, mode="a").create_group("labels")
    assert "labels: is a group without a multiscale image" in refused(f"{path}:/labels")
    assert "/0 (1 x 1 x 6 x 20 x 33 uint16)" in refused(f"{path}:/9")
    zarr.open_group(path, mode="a").create_array("many", shape=(2, 1, 6, 20, 33), dtype="u1")
    assert "only one each can be restored" in refused(f"{path}:/many")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("word", ["tiff", "sequence", "zarr", "h5"])
def test_memory_does_not_grow_with_the_volume(tmp_path: Path, word: str) -> None:
    """64 slices of 256 x 512 float32, 32 MiB, go in and out in a process that may take 24 MiB more than before."""
    shape, limit = (64, 256, 512), 24 * 2**20
    path = write_zarr(tmp_path, np.zeros((1, *shape[1:]), np.float32), "<", version=3)
    array = zarr.open_group(path, mode="a").create_array(
        "0", shape=(1, 1, *shape), dtype="f4", chunks=(1, 1, 4, 256, 256), overwrite=True
    )
    for first in range(0, 64, 4):
        array[0, 0, first : first + 4] = np.ones((4, *shape[1:])) * np.arange(first, first + 4)[:, None, None]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            volume = open_volume(path)
            volume.reader(0)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = restored(volume, word, tmp_path)
            again = open_volume(str(result.path))
            assert [float(again.reader(index)[3, 4]) for index in range(64)] == list(range(64))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            code = int(grown > limit)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint16", "float16", "float32"])
def test_mrc_there_and_back(tmp_path: Path, dtype: str) -> None:
    """Voxels, voxel size and labels of MRC files, in and out of other formats."""
    import mrcfile

    volume = voxels(dtype=dtype)
    with mrcfile.new(tmp_path / "scan.mrc", volume) as file:
        file.voxel_size = (1.5, 2.5, 4.0)
        file.add_label("tomogram of a tooth")
    given = open_volume(str(tmp_path / "scan.mrc"))
    assert_bits(given.path, volume)
    assert (given.metadata.voxel_size, given.metadata.unit) == ((4.0, 2.5, 1.5), "angstrom")
    again = assert_bits(restored(given, "same", tmp_path).path, volume).metadata
    assert again.voxel_size == pytest.approx((4.0, 2.5, 1.5)) and "tomogram of a tooth" in again.description
    with mrcfile.open(tmp_path / "out.mrc") as file:
        assert "restored by cocodiff" in file.get_labels() and file.is_volume()
        assert mrcfile.validate(tmp_path / "out.mrc") or file.header.rms < 0  # which says that it is not known
    assert_bits(restored(given, "h5", tmp_path).path, volume)
    zarr_volume = open_volume(str(restored(given, "zarr", tmp_path).path))
    found = assert_bits(restored(zarr_volume, "mrc", tmp_path).path, volume).metadata
    assert found.voxel_size == pytest.approx((4.0, 2.5, 1.5))


def test_what_mrc_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mrcfile

    (tmp_path / "none.mrc").write_bytes(b"no MRC file")
    with pytest.raises(UserError, match=r"none\.mrc: not a readable MRC file"):
        open_volume(str(tmp_path / "none.mrc"))
    with pytest.raises(UserError, match=r"MRC files hold no uint32: choose another --format"):
        restored(open_volume(write_npy(tmp_path, voxels(dtype="uint32"), "<")), "mrc", tmp_path)
    with mrcfile.new(tmp_path / "turned.mrc", voxels(dtype="int16")) as file:
        file.header.mapc, file.header.maps = 3, 1
    with pytest.raises(UserError, match="not in the order of sections, rows, columns"):
        open_volume(str(tmp_path / "turned.mrc"))
    monkeypatch.setitem(sys.modules, "mrcfile", None)
    with pytest.raises(UserError, match=r"pip install cocodiff\[mrc\]"):
        open_volume(str(tmp_path / "turned.mrc"))
