"""Files of every format as other programs write them, one table for what all of them must keep; and results as other
programs read them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import mrcfile
import numcodecs
import numpy as np
import tifffile
import zarr
from cocodiff_eval.data.formats import open_volume, result_format, write_volume
from cocodiff_eval.data.volume import NewVolume, Stack
from PIL import Image

SHAPE = (6, 20, 33)
SHAPES = (SHAPE, (3, 16, 31), (4, 19, 16), (1, 20, 16), (17, 23))
STACKS = SHAPES[:3]
DTYPES = ("uint8", "float32", "uint16", "int16", "int8", "uint32", "int32", "uint64", "int64", "float16", "float64")
PROVENANCE = {"version": "1.0", "preset": "cocodiff+", "seed": 7, "settings": {"threshold": 0.1}}
VOXEL_SIZE = (2.5, 0.5, 0.25)
SIDES = {"z": 2500.0, "y": 0.5, "x": 0.25}
UNITS = {"z": "nanometer", "y": "micrometer", "x": "micrometer"}
SIDES_OF_CHUNKS = {"z": 4, "y": 16, "x": 16}
AXES = {"t": "time", "c": "channel", "z": "z", "y": "y", "x": "x"}


def voxels(shape: tuple[int, ...] = SHAPE, dtype: str = "uint16") -> np.ndarray:
    """Return voxels of any bits. Floats have values that only bits tell apart in their first two thirds: -0.0, and NaN
    with a bit that arithmetic would lose."""
    random = np.random.default_rng(sum(shape))
    volume = random.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
    if volume.dtype.kind == "f":
        zeros, nans, _ = np.array_split(volume.reshape(-1, shape[-1]), 3)
        zeros[:] = -0.0
        nans[:] = (np.array([np.nan], dtype).view(f"u{volume.itemsize}") | 1).view(dtype)
    return volume


# Writers: each fills an empty folder with one file, and returns its path ----------------------------------------------


def write_tiff(folder: Path, volume: np.ndarray, order: str = "<", axes: str = "", **options: Any) -> str:
    metadata = options.pop("metadata", {})
    if metadata is not None:
        metadata = {"axes": axes.upper() or "ZYX"[-volume.ndim :], **metadata}
    options = {"photometric": "minisblack", "metadata": metadata} | options
    tifffile.imwrite(folder / "scan.tif", volume, byteorder=order, **options)
    return str(folder / "scan.tif")


def write_pages(
    folder: Path, images: Sequence[np.ndarray], order: str = "<", white: Sequence[int] = (), **options: Any
) -> str:
    """Append page to page, as acquisition does. white: the numbers of those whose 0 is white."""
    with tifffile.TiffWriter(folder / "scan.tif", byteorder=order) as writer:
        for number, image_YX in enumerate(images):
            writer.write(image_YX, **{"photometric": "miniswhite" if number in white else "minisblack"} | options)
    return str(folder / "scan.tif")


def write_rgb(folder: Path, volume: np.ndarray, order: str = "<", opaque: bool = False) -> str:
    """Write an image of equal channels. opaque: and one of transparency that says there is none."""
    last = np.iinfo(volume.dtype).max if volume.dtype.kind == "u" else 1
    image_YXC = np.stack([volume] * 3 + [np.full_like(volume, last)] * opaque, -1)
    more = {"extrasamples": ["unassalpha"]} if opaque else {}
    return write_tiff(folder, image_YXC, order, photometric="rgb", metadata=None, **more)


def write_imagej(folder: Path, volume: np.ndarray, order: str = "<", axes: str = "", **about: Any) -> str:
    metadata = {"spacing": SIDES["z"], "zunit": "nm", "unit": "um", "Info": "a tooth"} | about
    return write_tiff(folder, volume, order, axes, imagej=True, resolution=(4.0, 2.0), metadata=metadata)


def write_ome(folder: Path, volume: np.ndarray, order: str = "<", axes: str = "", **about: Any) -> str:
    sizes = {f"PhysicalSize{axis.upper()}": side for axis, side in SIDES.items()}
    metadata = {"Description": "a tooth", **sizes, "PhysicalSizeZUnit": "nm", **about}
    return write_tiff(folder, volume, order, axes, ome=True, metadata=metadata)


def write_sequence(folder: Path, volume: np.ndarray, order: str = "<") -> str:
    (folder / "scan").mkdir()
    for number, image_YX in enumerate(volume):
        file = folder / "scan" / f"recon_{number + 8}.tiff"
        tifffile.imwrite(file, image_YX, byteorder=order, description=f"slice {number}", metadata=None)
    return str(folder / "scan")


def write_hdf5(
    folder: Path,
    volume: np.ndarray,
    order: str = "<",
    axes: str = "zyx",
    how: str = "",
    attributes: Any = None,
    **more: Any,
) -> str:
    """how: axes are named; "" for not at all."""
    names = [AXES.get(axis, axis) for axis in axes[-volume.ndim :]]
    with h5py.File(folder / "scan.h5", "w") as file:
        group = file.create_group("exchange")
        data = group.create_dataset("data", data=volume.astype(volume.dtype.newbyteorder(order)), **more)
        data.attrs["element_size_um"], data.attrs["units"] = VOXEL_SIZE, "1/cm"
        group["theta"], group.attrs["beamline"], file.attrs["sample"] = np.arange(5.0), "2-BM", "a tooth"
        data.attrs.update(attributes or {})
        for number, name in enumerate(names):
            if how == "scales":
                group[name] = np.arange(float(volume.shape[number]))
                group[name].make_scale()
                data.dims[number].attach_scale(group[name])
            elif how == "labels":
                data.dims[number].label = name
        if how == "nexus":
            group.attrs["signal"], group.attrs["axes"] = "data", names
        elif how == "old nexus":
            data.attrs["axes"] = ":".join(names)
        elif how == "axistags":
            data.attrs["axistags"] = json.dumps({"axes": [{"key": name[0]} for name in names]})
    return str(folder / "scan.h5")


def write_frames(folder: Path, volume: np.ndarray, order: str = "<", attributes: Any = None) -> str:
    with h5py.File(folder / "scan.h5", "w") as file:
        group = file.create_group("20260102_tooth")
        group.attrs["pxsize"] = b"0.0025"
        for number in reversed(range(len(volume))):
            name = f"20260102_tooth_0000_{number + 8}.tif"  # 10 comes after 9, not before 8
            group[name] = volume[number].astype(volume.dtype.newbyteorder(order))[None]
            group[name].attrs.update({"date": f"day {number}", **(attributes or {})})
        group["20260102_toothbak_0000.tif"] = volume[:1] * 0
    return str(folder / "scan.h5")


def write_zarr(
    folder: Path,
    volume: np.ndarray,
    order: str = "<",
    axes: Sequence[str] = "",
    version: Any = 2,
    image: bool = True,
    attributes: Mapping[str, Any] | None = None,
    translation: Sequence[float] = (),
    sides: Mapping[str, float] = SIDES,
    units: Mapping[str, str] = UNITS,
    **options: Any,
) -> str:
    """Write an image of NGFF, or an array alone with dimensions as xarray names them. axes: of all of the array; by
    default one time and one channel come before the volume's."""
    axes, volume = (axes, volume) if axes else (f"tc{'zyx'[-volume.ndim :]}", volume[None, None])
    chunks = tuple(SIDES_OF_CHUNKS.get(axis, 1) for axis in axes)
    transforms: list[Any] = [{"type": "scale", "scale": [sides.get(axis, 1.0) for axis in axes]}]
    transforms += [{"type": "translation", "translation": translation}] if translation else []
    named = [{"name": axis, "type": "space"} | ({"unit": units[axis]} if units[axis] else {}) if axis in units else
             {"name": axis, "type": AXES.get(axis, axis)} for axis in axes]  # fmt: skip
    about: dict[str, Any] = {"version": "0.4"} if version == 2 else {}
    about |= {"name": "tooth", "axes": named, "datasets": [{"path": "0", "coordinateTransformations": transforms}]}
    of_group = {"multiscales": [about], "omero": {"channels": []}}
    of_group = of_group if version == 2 else {"ome": {"version": "0.5", **of_group}}
    of_group = {**(of_group if image else {}), "sample": "a tooth"}
    root = zarr.create_group(folder / "scan.zarr", zarr_format=version, attributes=of_group, overwrite=True)
    own = dict(attributes or {})
    if not image and version == 2:
        own["_ARRAY_DIMENSIONS"] = [AXES.get(axis, axis) for axis in axes]
    elif not image:
        options["dimension_names"] = [AXES.get(axis, axis) for axis in axes]
    if version == 3 and volume.itemsize > 1:
        options["serializer"] = zarr.codecs.BytesCodec(endian="big" if order == ">" else "little")
    dtype = volume.dtype.newbyteorder(order) if version == 2 else volume.dtype
    array = root.create_array("0", shape=volume.shape, dtype=dtype, **{"chunks": chunks, **options})
    array[...] = volume
    plain = {name: one.tolist() if isinstance(one, np.generic | np.ndarray) else one for name, one in own.items()}
    array.attrs.put(plain)
    return str(folder / "scan.zarr") + ("" if image else ":/0")


def write_npy(folder: Path, volume: np.ndarray, order: str = "<") -> str:
    np.save(folder / "scan.npy", volume.astype(volume.dtype.newbyteorder(order)))
    return str(folder / "scan.npy")


def write_png(folder: Path, volume: np.ndarray, order: str = "<", name: str = "scan.png", mode: str = "") -> str:
    image = Image.fromarray(volume)
    (image.convert(mode) if mode else image).save(folder / name)
    return str(folder / name)


def write_mrc(folder: Path, volume: np.ndarray, order: str = "<", imod: tuple[int, int] = (0, 0), **fields: Any) -> str:
    """Write a file with fields of the header, IMOD's stamp and flags, and an extended header of 16 bytes."""
    path = folder / "scan.mrc"
    with mrcfile.new(path, volume.view("i1") if volume.dtype == np.uint8 else volume, overwrite=True) as file:
        file.voxel_size = VOXEL_SIZE[::-1]
        file.add_label("a tooth")
        file.header.exttyp = b"SERI"
        file.set_extended_header(np.arange(4, dtype="<f4").view("V4"))
        header = np.array(file.header)
    for name, value in fields.items():
        header[name] = value
    header = header.astype(mrcfile.dtypes.HEADER_DTYPE.newbyteorder(order))
    header["machst"] = list(mrcfile.utils.machine_stamp_from_byte_order(order))
    data = volume.astype(volume.dtype.newbyteorder(order)).tobytes()
    head = header.tobytes()[:152] + struct.pack(f"{order}2i", *imod) + header.tobytes()[160:]
    path.write_bytes(head + path.read_bytes()[1024:1040] + data)
    return str(path)


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A way in which files are stored: how they are written, what they hold, and what they say of their voxels."""

    write: Callable[..., str]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Sequence[str] = DTYPES
    shapes: Sequence[tuple[int, ...]] = SHAPES
    size: tuple[float, float, float] | None = VOXEL_SIZE
    unit: str = "micrometer"

    def file(self, folder: Path, volume: np.ndarray, order: str = "<", **more: Any) -> str:
        """Write a file into a folder that is made if it is not there."""
        folder.mkdir(exist_ok=True)
        return self.write(folder, volume, order, **{**self.options, **more})


def plain_tiff(**options: Any) -> Kind:
    return Kind(write_tiff, options, size=None, unit="")


def packed_tiff(**options: Any) -> Kind:
    return Kind(write_tiff, options, ("uint8", "uint16"), size=None, unit="")


OME_DTYPES = tuple(one for one in DTYPES if one not in ("int64", "uint64", "float16"))
WHITE = {"photometric": "miniswhite", "resolution": (40000, 20000), "resolutionunit": 3, "compression": "lzw"}
WHITE |= {"software": "recon 3", "description": "a tooth", "metadata": {"beam": 30}}
SHARDS = {"version": 3, "chunks": (1, 1, 2, 8, 16), "shards": (1, 1, 4, 16, 32)}
BLOSC = {"compressors": numcodecs.Blosc(cname="lz4")}
FLAT: dict[str, Any] = {"dtypes": ("uint8", "uint16"), "shapes": ((17, 23),), "size": None, "unit": ""}
PNG_MODES = ("RGB", "RGBA", "P", "LA")
KINDS: dict[str, Kind] = {
    "tiff": plain_tiff(),
    "tiff zlib": plain_tiff(compression="zlib"),
    "tiff big tiles": plain_tiff(tile=(16, 16), bigtiff=True),
    "tiff pages": Kind(write_pages, shapes=STACKS, size=None, unit=""),
    "tiff volumetric": Kind(
        write_tiff, {"tile": (16, 16, 16), "volumetric": True, "compression": "zlib"}, shapes=STACKS, size=None, unit=""
    ),
    "tiff lzw": packed_tiff(compression="lzw", predictor=True),  # what microscopes write
    "tiff zstd": packed_tiff(compression="zstd", tile=(16, 16), predictor=True),
    "tiff packbits": packed_tiff(compression="packbits", tile=(16, 16)),
    "tiff lzma": packed_tiff(compression="lzma"),
    "tiff rgb": Kind(write_rgb, **FLAT),
    "tiff rgb opaque": Kind(write_rgb, {"opaque": True}, **FLAT),
    "imagej": Kind(write_imagej, dtypes=("uint8", "uint16", "float32"), shapes=(*STACKS, (17, 23))),
    "ome": Kind(write_ome, dtypes=OME_DTYPES, shapes=(*STACKS, (17, 23))),
    "white": Kind(write_tiff, WHITE, size=(0.5, 0.5, 0.25)),
    "sequence": Kind(write_sequence, shapes=(*STACKS, (1, 20, 16)), size=None, unit=""),
    "hdf5": Kind(write_hdf5),
    "hdf5 chunked": Kind(write_hdf5, {"chunks": True, "compression": "gzip", "shuffle": True}),
    **{f"hdf5 {how}": Kind(write_hdf5, {"how": how}) for how in ("scales", "labels", "nexus", "old nexus", "axistags")},
    "frames": Kind(write_frames, shapes=STACKS, size=(0.0025,) * 3, unit="millimeter"),
    "zarr 2": Kind(write_zarr),
    "zarr 2 blosc": Kind(write_zarr, BLOSC),
    "zarr 2 array": Kind(write_zarr, {"image": False}, size=None, unit=""),
    "zarr 3": Kind(write_zarr, {"version": 3}),
    "zarr 3 sharded": Kind(write_zarr, SHARDS, shapes=SHAPES[:-1]),
    "zarr 3 array": Kind(write_zarr, {"version": 3, "image": False}, size=None, unit=""),
    "npy": Kind(write_npy, size=None, unit=""),
    "png": Kind(write_png, **FLAT),
    **{f"png {mode}": Kind(write_png, {"mode": mode}, **FLAT | {"dtypes": ("uint8",)}) for mode in PNG_MODES},
    "mrc": Kind(write_mrc, dtypes=("int8", "int16", "uint16", "float16", "float32"), unit="angstrom"),
}
DECLARING = ("hdf5", "frames", "zarr 2", "zarr 3", "zarr 2 array", "zarr 3 array")  # attributes of the values
MANY = ("tiff", "imagej", "ome", "white", "sequence", "hdf5", "frames", "zarr 2", "zarr 3 sharded", "npy", "mrc")


# Results --------------------------------------------------------------------------------------------------------------


def slice_of(volume: Stack, index: int) -> np.ndarray:
    return np.ascontiguousarray(volume.reader(index), dtype=volume.dtype)


def restored(volume: Stack, word: str, folder: Path) -> NewVolume:
    """Write a result with the volume's own voxels."""
    word = result_format(word, volume)
    folder.mkdir(exist_ok=True)
    return write_volume(
        word, folder, lambda suffix: f"out{suffix}", volume, volume.dtype, lambda n: slice_of(volume, n), PROVENANCE
    )


def reopened(volume: Stack, word: str, folder: Path) -> Stack:
    """Return that result as it is read again."""
    return open_volume(str(restored(volume, word, folder).path))


def assert_bits(found: Stack | Path | str, expected: np.ndarray) -> Stack:
    """Check that a volume has these voxels, bit by bit."""
    found = found if isinstance(found, Stack) else open_volume(str(found))
    volume = expected if expected.ndim == 3 else expected[None]
    native = expected.dtype.newbyteorder("=")
    assert (found.shape, found.dtype, found.ndim) == (volume.shape, native, expected.ndim)
    for index, image_YX in enumerate(volume):
        assert slice_of(found, index).tobytes() == image_YX.astype(native).tobytes(), f"slice {index}"
    return found


def read_plainly(path: Path, volume: Stack) -> np.ndarray:
    """Read the voxels of a result of a volume with the format's own library."""
    if path.suffix == ".zarr":
        return np.asarray(zarr.open_group(path, mode="r")["0"][...])
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            node = file[volume.metadata.details.get("object", "/exchange/data")]
            if isinstance(node, h5py.Dataset):
                return np.asarray(node[...])
            return np.concatenate([node[name][...] for name in volume.metadata.details["frames"] if name in node])
    if path.is_dir():
        files = sorted(path.iterdir(), key=lambda file: int(file.stem.rpartition("_")[2]))
        return np.stack([tifffile.imread(file) for file in files])
    if path.suffix == ".mrc":
        return np.asarray(mrcfile.read(path))
    return np.load(path) if path.suffix == ".npy" else np.asarray(tifffile.imread(path))


def texts_in(path: Path) -> str:
    """Return all that is in the files of a result as text, whatever its encoding."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return b"".join(one.read_bytes() for one in files).replace(b"\0", b"").decode("latin1").replace("&quot;", '"')
