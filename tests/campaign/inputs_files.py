"""Files of volumes for the campaign of inputs: every format that is read, stored in many ways, whole and damaged."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tifffile
import zarr
from PIL import Image

Size = tuple[float, float, float]
INTEGERS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")
USUAL = ("u1", "u2", "i2", "f4")
ANY = (*INTEGERS, "f2", "f4", "f8")
NO_IMAGES = ("?", "c8", "c16")
DTYPES = {"imagej": ("u1", "u2", "f4"), "png": ("u1", "u2"), "ome": tuple({*ANY} - {"u8", "i8", "f2"})}
JUNK: tuple[Any, ...] = (None, "", " ", "x", "ü\n", -1, 0, 1, 2.5, 2**31, 2**63, 10**30, 1e308, float("nan"))
JUNK += (float("inf"), True, [], {}, [1], [[]], {"a": 1}, "x" * 3000, "1:", "\0", "µm", "NaN", "tapa", [None, "x"])
Junk = dict[str, Any]


def mutated(data: Any, chance: random.Random) -> Any:
    """Plain data in which one value, somewhere, is another, or gone, or there twice."""
    if isinstance(data, dict) and data and chance.random() < 0.85:
        key = chance.choice([*data])
        rest = {name: value for name, value in data.items() if name != key}
        return rest if chance.random() < 0.1 else {**rest, key: mutated(data[key], chance)}
    if isinstance(data, list) and data and chance.random() < 0.8:
        place = chance.randrange(len(data))
        middle = chance.choice([[], [data[place]] * 2, *[[mutated(data[place], chance)]] * 4])
        return [*data[:place], *middle, *data[place + 1 :]]
    return chance.choice(JUNK)


def write_tiff(path: Path, voxels: np.ndarray, chance: random.Random, odd: bool, stored: bool) -> Size | None:
    """A plain TIFF. odd: with metadata that nobody expects; stored: in one of the rarer ways of storage. Returns the
    voxels' sides in micrometers, where the file says them and they are well-formed; every writer here does."""
    options: Junk = {"byteorder": chance.choice("<>"), "photometric": chance.choice(["minisblack", "miniswhite"])}
    size: Size | None = None
    if stored and voxels.size:
        whole = voxels.dtype.kind in "ui"
        codecs = [None, "zlib", "zstd", "lzma", *(["lzw", "packbits"] if whole else [])]
        options |= {"compression": chance.choice(codecs), "bigtiff": chance.random() < 0.3}
        options |= chance.choice([{}, {"tile": (16, 16)}, {"rowsperstrip": 5}, {"contiguous": False}])
    if chance.random() < 0.5:
        options |= {"resolution": (4000, 2000), "resolutionunit": 3}
        size = (5.0, 5.0, 2.5)
    if odd:
        size = None
        options |= chance.choice(
            [
                {"metadata": {"axes": "CYX" if voxels.ndim == 3 else "YX"}},
                {"metadata": {"voxel_size": chance.choice(JUNK), "unit": chance.choice(JUNK[1:])}},
                {
                    "description": chance.choice(
                        ["{broken", "ImageJ=", '{"shape": [1]}', "µ".encode(), "<OME/>", "<OME"]
                    )
                },
                {
                    "resolution": chance.choice([(0, 0), (1e-9, 4e9), (1, 0)]),
                    "resolutionunit": chance.choice([1, 2, 3]),
                },
                {"extratags": [(chance.choice([305, 306, 270, 65000, 42112]), 2, 0, "odd \u00b5".encode(), True)]},
                {"software": "s" * 5000, "datetime": True},
            ]
        )
    if chance.random() < 0.3 and voxels.ndim == 3 and not odd:  # pages appended one by one, as acquisition does
        with tifffile.TiffWriter(
            path, byteorder=options.pop("byteorder"), bigtiff=options.pop("bigtiff", False)
        ) as new:
            for page_YX in voxels:
                new.write(page_YX, **options | {"metadata": None})
    else:
        tifffile.imwrite(path, voxels, **options)
    return size


def write_imagej(path: Path, voxels: np.ndarray, chance: random.Random, odd: bool, stored: bool) -> Size | None:
    axes = "ZYX"[-voxels.ndim :]
    about: Junk = {"spacing": 2.5, "unit": chance.choice(["um", "micron", "\\u00B5m"]), "axes": axes, "Info": "a tooth"}
    about["Labels"] = [f"slice {n}" for n in range(len(voxels))]
    if odd:
        about |= chance.choice(
            [
                {"spacing": chance.choice(["abc", "-1", "nan", "0", "1e999"])},
                {"unit": chance.choice(["", "pixel", "furlong", "null", "x" * 300])},
                {"Info": "µ" * 2000, "Ranges": (0.0, 1.0), "LUTs": [np.zeros((3, 256), "u1")]},
                {"axes": "CYX" if voxels.ndim == 3 else "YX"},
                {"axes": "TYX" if voxels.ndim == 3 else "YX"},
            ]
        )
    resolution = chance.choice([(0, 0), (1, 1)]) if odd else (4.0, 2.0)
    tifffile.imwrite(path, voxels, imagej=True, byteorder=chance.choice("<>"), resolution=resolution, metadata=about)
    return None if odd else (2.5, 0.5, 0.25)


def write_ome(path: Path, voxels: np.ndarray, chance: random.Random, odd: bool, stored: bool) -> Size | None:
    size = (2.5, 0.5, 0.25)
    about: Junk = {f"PhysicalSize{axis}": side for axis, side in zip("ZYX", size, strict=True)}
    about |= {"axes": "ZYX"[-voxels.ndim :], "Description": "a tooth"}
    options: Junk = {"compression": "zlib"} if stored and voxels.size else {}
    if odd:
        about |= chance.choice([{"PhysicalSizeX": chance.choice([-1, 0, 1e-40])}, {"PhysicalSizeXUnit": "furlong"}, {}])
        about["axes"] = chance.choice(["CYX", "TYX", "ZYX"]) if voxels.ndim == 3 else "YX"
    tifffile.imwrite(path, voxels, ome=True, metadata=about, byteorder=chance.choice("<>"), **options)
    if odd and chance.random() < 0.6:  # other words of the same length in the XML
        old, new = chance.choice(
            [(b'SizeX="', b'SizeQ="'), (b"<Pixels", b"<Pixelz"), (b'"2.5"', b'"two"'), (b"</", b"<<")]
        )
        path.write_bytes(path.read_bytes().replace(old, new))
    return None if odd else size


def write_sequence(path: Path, voxels: np.ndarray, chance: random.Random, odd: bool, stored: bool) -> Size | None:
    """A folder with a TIFF for each slice."""
    path.mkdir()
    first, step, size = chance.choice([0, 8, 98]), chance.choice([1, 1, 2]), None
    seed = chance.random()
    for number, image_YX in enumerate(np.atleast_3d(voxels) if voxels.ndim < 3 else voxels):
        name = f"recon_{first + step * number}{chance.choice(['.tif', '.tif', '.tiff']) if odd else '.tif'}"
        size = write_tiff(path / name, image_YX, random.Random(seed), odd, stored)
    if odd:
        (path / chance.choice([".hidden.tif", "notes.txt", "Thumbs.db", "other_1.tif"])).write_bytes(b"II*\0")
    return size


def write_png(path: Path, image_YX: np.ndarray, chance: random.Random, odd: bool, stored: bool) -> Size | None:
    image = Image.fromarray(image_YX)
    if image_YX.dtype == np.uint8 and stored:
        image = image.convert(chance.choice(["RGB", "RGBA", "LA", "L"]))
    image.save(path, dpi=(0, 72) if odd else None, compress_level=chance.choice([0, 9]))
    return None


def write_hdf5(path: Path, voxels: np.ndarray, chance: random.Random, odd: bool, stored: bool) -> Size | None:
    options: Junk = {}
    if stored and voxels.size and voxels.ndim:
        chunks = tuple(min(side, chance.choice([1, 7, 16])) for side in voxels.shape)
        options = {
            "chunks": chunks,
            "compression": chance.choice([None, "gzip", "lzf"]),
            "shuffle": chance.random() < 0.5,
        }
        options |= {"fletcher32": chance.random() < 0.3, "maxshape": (None,) * voxels.ndim}
    size: Size | None = (2.5, 0.5, 0.25)
    with h5py.File(path, "w") as file:
        dtype = voxels.dtype.newbyteorder(chance.choice("<>"))
        data = file.create_dataset("exchange/data", data=voxels.astype(dtype), **options)
        data.attrs["element_size_um"] = size
        file["exchange/theta"], file["exchange"].attrs["beamline"] = np.arange(5.0), "2-BM"
        if odd:
            size = None
            junk = [[1.0, 2.0], "three", np.array([1, np.nan, 0]), h5py.Empty("f4"), data.ref, b"\xff\xfe", "x" * 40000]
            about = chance.choice([file, file["exchange"], data])
            name = chance.choice(
                ["element_size_um", "axes", "description", "pxsize", "CLASS", "cocodiff", "ü", ".", "a/b"]
            )
            if (value := chance.choice(junk)) != "x" * 40000 or about is not data:
                about.attrs.create(name, value)
            file["link"] = h5py.SoftLink("/nowhere")
            file["other"] = h5py.ExternalLink("elsewhere.h5", "/data")
            file["texts"] = np.array([b"a", b"bc"])
    return size


def write_frames(path: Path, voxels: np.ndarray, chance: random.Random, odd: bool, stored: bool) -> Size | None:
    """As the beamline 8.3.2 writes it: a dataset for each slice."""
    dtype = voxels.dtype.newbyteorder(chance.choice("<>"))
    with h5py.File(path, "w") as file:
        group = file.create_group("tooth")
        group.attrs["pxsize"] = (
            chance.choice(["", b"x", -1.0, np.zeros(3)]) if odd else chance.choice([b"0.0025", 0.0025])
        )
        for number in chance.sample(range(len(voxels)), len(voxels)):
            data = voxels[number].astype(dtype)[None if chance.random() < 0.5 else ...]
            group.create_dataset(f"tooth_0000_{number}.tif", data=data, compression="gzip" if stored else None)
        group["toothbak_0000.tif"] = voxels[:1] * 0
        if odd:
            group[chance.choice(["tooth_0000_99.tif", "tooth_1"])] = np.zeros((1, 3, 3), chance.choice(["u1", "f4"]))
    return None if odd else (2.5, 2.5, 2.5)


def write_zarr(
    path: Path, voxels: np.ndarray, chance: random.Random, odd: bool, stored: bool, version: int, image: bool
) -> Size | None:
    """A store with an image, or one with an array alone in its root."""
    lead = chance.choice([0, 1, 2]) if image else 0
    axes: list[Junk] = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}][2 - lead :]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"[-min(3, voxels.ndim) :]]
    sides = [2.5, 0.5, 0.25][-voxels.ndim :]
    moves: list[Junk] = [{"type": "scale", "scale": [1.0] * lead + sides}]
    if chance.random() < 0.5:
        moves.append({"type": "translation", "translation": [0.0] * lead + [10.0] * len(sides)})
    about: Junk = {"name": "tooth", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": moves}]}
    about = (
        {"multiscales": [{"version": "0.4", **about}]}
        if version == 2
        else {"ome": {"version": "0.5", "multiscales": [about]}}
    )
    if odd:
        about = mutated(about, chance)
    about = about if isinstance(about, dict) else {}
    dtype = voxels.dtype.newbyteorder(chance.choice("<>")) if version == 2 else voxels.dtype
    shape = (1,) * lead + voxels.shape
    chunks = (1,) * lead + tuple(max(1, min(side, chance.choice([1, 7, 16, 50]))) for side in voxels.shape)
    options: Junk = {"chunks": chunks, "fill_value": chance.choice([0, 1]), "config": {"write_empty_chunks": False}}
    if stored:
        options |= chance.choice([{"compressors": None}, {}, {"order": "F"} if version == 2 else {}])
        if version == 3 and voxels.size:
            options["shards"] = tuple(2 * side for side in chunks)
    if image:
        root = zarr.create_group(path, zarr_format=version, attributes={**about, "sample": "a tooth"})
        array = root.create_array("0", shape=shape, dtype=dtype, **options)
    else:
        array = zarr.create_array(path, shape=shape, dtype=dtype, zarr_format=version, **options)
        array.attrs["sample"] = chance.choice(JUNK[:13]) if odd else "a tooth"
    if voxels.size:
        array[(0,) * lead] = voxels
    return (2.5, 0.5, 0.25) if image and not odd else None


def zarr_writer(version: int, image: bool) -> Callable[..., Size | None]:
    return lambda *about: write_zarr(*about, version=version, image=image)


# By format: what writes it, and the suffix.
FORMATS: dict[str, tuple[Callable[..., Size | None], str]] = {
    "tiff": (write_tiff, ".tif"),
    "imagej": (write_imagej, ".tif"),
    "ome": (write_ome, ".ome.tif"),
    "sequence": (write_sequence, ""),
    "png": (write_png, ".png"),
    "hdf5": (write_hdf5, ".h5"),
    "frames": (write_frames, ".h5"),
    "zarr2": (zarr_writer(2, False), ".zarr"),
    "zarr3": (zarr_writer(3, False), ".zarr"),
    "ngff04": (zarr_writer(2, True), ".ome.zarr"),
    "ngff05": (zarr_writer(3, True), ".zarr"),
}


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def damage(path: Path, kind: str, chance: random.Random) -> None:
    """Cuts a file of an input short, flips a byte of it, or puts something else into its place."""
    file = chance.choice(files_of(path))
    data = bytearray(file.read_bytes())
    if kind == "cut":
        del data[chance.choice([chance.randrange(len(data)), len(data) - chance.randint(1, min(64, len(data)))]) :]
    elif kind == "flip":
        place = chance.randrange(min(len(data), 600) if chance.random() < 0.7 else len(data))
        data[place] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    if kind == "gone":
        file.unlink()
        instead = chance.choice(["nothing", "empty", "folder", "pipe", "link", "text", "whole"])
        if instead == "whole":
            (shutil.rmtree if path.is_dir() else lambda gone: gone.unlink(missing_ok=True))(path)
        elif instead == "folder":
            file.mkdir()
        elif instead == "pipe":
            os.mkfifo(file)
        elif instead == "link":
            file.symlink_to("nowhere")
        elif instead != "nothing":
            file.write_bytes(b"" if instead == "empty" else b"no image\n" * 9)


def read_plainly(path: Path) -> np.ndarray:
    """The voxels of a file, as the format's own library reads them."""
    if path.suffix == ".zarr":
        node = zarr.open(str(path), mode="r")
        if isinstance(node, zarr.Group):
            about = node.attrs.asdict()
            node = node[about.get("ome", about)["multiscales"][0]["datasets"][0]["path"]]
        return np.asarray(node[...])
    if path.is_dir():
        names = sorted(path.iterdir(), key=lambda one: int((re.findall(r"\d+", one.stem) or ["-1"])[-1]))
        return np.stack(
            [tifffile.imread(one) for one in names if one.suffix in (".tif", ".tiff") and one.name[0] != "."]
        )
    if path.suffix.lower() == ".h5":
        with h5py.File(path) as file:
            if "exchange/data" in file:
                return np.asarray(file["exchange/data"][()])
            frames = [name for name in file["tooth"] if "bak" not in name]
            in_order = sorted(frames, key=lambda name: int(re.findall(r"\d+", name)[-1]))
            return np.stack([np.asarray(file["tooth"][name][()]).squeeze() for name in in_order])
    return np.asarray(Image.open(path)) if path.suffix.lower() == ".png" else tifffile.imread(path)


def main() -> int:
    """Saves a tiny text-to-image model, in a process that has imported what it is made of."""
    import tiny_pipelines

    tiny_pipelines.sd3_pipeline().save_pretrained(sys.argv[1])
    return 0
