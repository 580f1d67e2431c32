"""Files for the campaign of metadata: units and axes, samples, texts, voxels that lie elsewhere or nowhere."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import mrcfile
import numpy as np
import tifffile
import zarr

Sides = tuple[float, float, float]
# Of a spelling the length in meters; None where it is no length.
LENGTHS: dict[str, float | None] = {"nm": 1e-9, "nanometer": 1e-9, "µm": 1e-6, "um": 1e-6, "micron": 1e-6, "mm": 1e-3}
LENGTHS |= {"micrometer": 1e-6, "millimeter": 1e-3, "cm": 1e-2, "m": 1.0, "pm": 1e-12, "Å": 1e-10, "in": 0.0254}
LENGTHS |= {"kilometer": 1e3, "Mm": 1e6, "microns": 1e-6, "angstrom": 1e-10, "picometer": 1e-12, "fm": 1e-15}
LENGTHS |= dict.fromkeys(("pixel", "reference frame", "furlong", "x" * 300, "li", "pt"))
OME = ("nm", "µm", "mm", "cm", "m", "pm", "Å", "in", "Mm", "fm", "pixel", "reference frame", "li", "pt")
TEXTS = ("a tooth", "Jürgen", "漢字 \U0001f9b7", "a\nb\tc", "x" * 70000, "<&]]>\"'", "\x01\x7f\x85", "{}", "=", "é" * 9)
SHAPE = (3, 17, 20)


@dataclass
class Result:
    """A result of a round trip: what a check that goes with an input looks at."""

    path: Path
    format: str  # a word of --format
    own: bool  # in the input's format
    start: tuple[int, int, int]  # the first voxel of the region in the input
    shape: tuple[int, int, int]
    restored: np.ndarray  # [N, Y, X], as they were given to the writer
    said: str  # all lines that the user saw

    @property
    def region(self) -> tuple[slice, slice, slice]:
        """The part of the input that the result holds."""
        z, y, x = (slice(first, first + side) for first, side in zip(self.start, self.shape, strict=True))
        return z, y, x

    def told(self, pattern: str) -> bool:
        """Return True if a line that the user saw has one of these words, and does not say that this very result keeps
        what it names."""
        lines = self.said.splitlines()
        if self.own and any(self.start):
            lines = [line for line in lines if ": results of its own format alone keep" not in line]
        elif self.own:
            lines = [line for line in lines if "results of its own format alone keep" not in line]
        return re.search(pattern, "\n".join(lines), re.IGNORECASE) is not None


def no_remarks(result: Result) -> str:
    """Return "": nothing is to be checked beside the voxels."""
    return ""


@dataclass
class Given:
    """A file, and what is right of it."""

    path: Path
    voxels: np.ndarray | None  # as they are stored; None where the file must be refused
    meters: Sides | None = None  # sides of a voxel; None where they are no lengths
    plain: Sides | None = None  # sides without a unit
    # For round trips:
    kind: str = ""  # what is unusual of it
    meant: np.ndarray | None = None  # voxels as the file means them, unscaled; None: as they are stored
    missing: np.ndarray | None = None  # True where the file declares a voxel to be missing
    refusals: str = ""  # a pattern of the lines by which it may be refused; "" where it must not be
    decode: Callable[[Path, bool], np.ndarray] | None = None  # read the input, or (True) a result, as xarray does
    check: Callable[[Result], str] = no_remarks  # return what is wrong with a result besides its voxels
    more: dict[str, Any] = field(default_factory=dict)  # what the maker knows besides, to be printed


def make_given(seed: int, number: int, folder: Path) -> Given:
    """Writes the files of a case into an empty folder."""
    chance = random.Random(f"{seed} {number}")
    dtype = chance.choice(["u1", "u2", "f4"])
    voxels = np.random.default_rng(number).integers(1, 250, SHAPE).astype(dtype)
    return [*MAKERS.values()][number % len(MAKERS)](folder, voxels, chance)


def sides_of(chance: random.Random) -> list[float]:
    """As far from each other as units are, of any number of digits."""
    return [
        round(chance.uniform(0.1, 9), chance.choice([0, 2, 15])) * chance.choice([1e-3, 1, 1e4]) + 1e-4 for _ in "zyx"
    ]


def in_meters(sides: list[float], units: list[str]) -> Sides | None:
    lengths = [LENGTHS[unit] for unit in units]
    z, y, x = (side * (length or 0) for side, length in zip(sides, lengths, strict=True))
    return (z, y, x) if all(lengths) else None


def units_of(chance: random.Random, names: list[str] | tuple[str, ...]) -> list[str]:
    """One for all axes, or one for each."""
    return [chance.choice(names) for _ in "zyx"] if chance.random() < 0.6 else [chance.choice(names)] * 3


def tiff(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    given = Given(folder / "scan.tif", voxels)
    options: dict[str, Any] = {"photometric": chance.choice(["minisblack", "miniswhite"]), "metadata": {}}
    unit = chance.choice([1, 2, 3, 4, 5])
    if chance.random() < 0.6:
        options |= {"resolution": ((4000, 7), (2000, 3)), "resolutionunit": unit}
        side = {1: None, 2: 0.0254, 3: 1e-2, 4: 1e-3, 5: 1e-6}[unit]
        given.meters = (3 / 2000 * side, 3 / 2000 * side, 7 / 4000 * side) if side else None
    if chance.random() < 0.5:
        sides, name = sides_of(chance), chance.choice(["", *LENGTHS])
        options["metadata"] = {"voxel_size": sides, "unit": name}
        given.meters = in_meters(sides, [name] * 3) if name else None
        given.plain = None if name else (sides[0], sides[1], sides[2])
    elif chance.random() < 0.5:
        options["metadata"] = {"unit": "nm", "voxel_size_um": 3, "note": chance.choice(TEXTS)}
    options["extratags"] = [(chance.choice([315, 306, 33432, 269]), 2, 0, chance.choice(TEXTS).encode(), True)]
    options |= {"software": chance.choice(TEXTS).encode(), "description": chance.choice(TEXTS).encode()}
    tifffile.imwrite(given.path, voxels, **options)
    return given


def samples(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """What is said of the samples, in the tag of an otherwise plain TIFF."""
    given, image_YX = Given(folder / "scan.tif", voxels[0].astype("u1")), voxels[0].astype("u1")
    kind = chance.choice(["tag", "palette", "ink", "channels", "alpha", "packed", "hole", "mixed", "short"])
    options: dict[str, Any] = {"photometric": "minisblack", "metadata": None}
    image: Any = image_YX
    if kind in ("tag", "palette", "ink", "mixed", "short", "hole"):
        given.voxels = None
    if kind == "palette":
        options |= {"photometric": "palette", "colormap": np.arange(768, dtype="u2").reshape(3, 256)}
    elif kind == "ink":
        image, options["photometric"] = np.stack([image_YX] * 3 + [image_YX * 0 + 255], -1), "separated"
    elif kind in ("channels", "alpha"):
        image, options["photometric"] = np.stack([image_YX] * 3, -1), "rgb"
        if kind == "alpha":
            last = chance.choice([0, 255])
            image, options["extrasamples"] = np.concatenate([image, image[..., :1] * 0 + last], -1), ["unassalpha"]
            given.voxels = image_YX if last else None
    elif kind == "packed":
        bits = chance.choice([4, 12])
        given.voxels = image = (image_YX % 16).astype("u1" if bits == 4 else "u2")
        options["bitspersample"] = bits
    elif kind == "hole":
        options |= {"tile": (16, 16), "compression": "zlib"}
    with tifffile.TiffWriter(given.path) as file:
        file.write(image, **options)
        if kind == "mixed":
            file.write(image, photometric="miniswhite", metadata=None)
    if kind in ("tag", "hole", "short"):
        code, value = {"tag": (262, chance.choice([3, 4, 5, 6, 8, 9, 32803, 34892, 32844, 51177, 77]))}.get(
            kind, (325, 0)
        )
        with tifffile.TiffFile(given.path, mode="r+b") as file:
            if kind == "short":
                given.path.write_bytes(given.path.read_bytes()[: -chance.randint(1, 300)])
            elif kind == "hole":
                file.pages.first.tags[code].overwrite([value, *file.pages.first.databytecounts[1:]])
            else:
                file.pages.first.tags[code].overwrite(value)
    return given


def imagej(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    sides, units = sides_of(chance), units_of(chance, [one for one in LENGTHS if one not in ("pixel", "x" * 300)])
    x, y = 8 / 3, 5 / 7
    about: dict[str, Any] = {"unit": units[2].replace("µ", "\\u00B5").replace("Å", "\\u00C5"), "axes": "ZYX"}
    if units[2] == "Å":
        about["unit"], units = "nm", [one if one != "Å" else "nm" for one in units]
    about |= {
        f"{axis}unit": one.replace("µm", "um").replace("Å", "angstrom")
        for axis, one in zip("zy", units, strict=False)
        if one != units[2]
    }
    if chance.random() < 0.8:
        about["spacing"] = sides[0]
    else:
        sides[0], units[0] = y, units[1]
    about |= {"Info": chance.choice(TEXTS), "Labels": [chance.choice(TEXTS) for _ in voxels], "loop": True}
    roi = b"Iout" + bytes(60)
    more = {"ROI": roi, "Overlays": [roi, roi], "LUTs": [np.zeros((3, 256), "u1")], "Ranges": (0.0, 1.0)}
    about |= {name: more[name] for name in more if chance.random() < 0.4} | {"Properties": {"a": chance.choice(TEXTS)}}
    options = {"resolution": ((3, 8), (7, 5)), "metadata": about, "byteorder": chance.choice("<>")}
    tifffile.imwrite(folder / "scan.tif", voxels, imagej=True, **options)
    return Given(folder / "scan.tif", voxels, in_meters([sides[0], y, x], units))


def ome(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    sides, units = sides_of(chance), units_of(chance, OME)
    path, missing = folder / "scan.ome.tif", chance.choice([0, 0, 0, 1, 2])
    plane = '<TiffData IFD="{0}" FirstZ="{0}" PlaneCount="1"/>'
    planes = "".join(plane.format(number) for number in range(len(voxels)) if not missing or number != 1)
    if missing == 2:
        name = '<TiffData IFD="0" FirstZ="1" PlaneCount="1"><UUID FileName="other.ome.tif">urn:uuid:b</UUID></TiffData>'
        planes += name
    said = [
        f'PhysicalSize{axis}="{side!r}" PhysicalSize{axis}Unit="{unit}"'
        for axis, side, unit in zip("ZYX", sides, units, strict=True)
    ]
    if chance.random() < 0.2:  # the schema's own unit
        said[0], units[0] = f'PhysicalSizeZ="{sides[0]!r}"', "µm"
    if chance.random() < 0.15:
        said[0], sides[0], units[0] = "", sides[1], units[1]
    if chance.random() < 0.1:
        said[2] = 'PhysicalSizeX="two"'
    kind = {"u1": "uint8", "u2": "uint16", "f4": "float"}[voxels.dtype.str[1:]]
    xml = f"""<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"
    UUID="urn:uuid:a"><Image ID="Image:0"><Description>Jürgen</Description><Pixels ID="Pixels:0" DimensionOrder="XYZCT"
    Type="{kind}" SizeX="20" SizeY="17" SizeZ="3" SizeC="1" SizeT="1" {" ".join(said)}><Channel ID="Channel:0:0"
    SamplesPerPixel="1"/>{planes}</Pixels></Image></OME>"""
    with tifffile.TiffWriter(path) as file:
        for number, image_YX in enumerate(voxels):
            file.write(image_YX, description=None if number else xml.encode(), metadata=None)
    return Given(path, None if missing else voxels, None if "two" in said[2] else in_meters(sides, units))


def hdf5(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Voxels in the file itself, stored in part perhaps."""
    given, sides = Given(folder / "scan.h5", voxels), sides_of(chance)
    with h5py.File(given.path, "w") as file:
        how = chance.choice(["whole", "chunks", "none", "group"])
        chunks = (1, 17, 10) if how == "chunks" else None
        data = file.create_dataset("exchange/data", voxels.shape, voxels.dtype, chunks=chunks, fillvalue=7)
        if how == "chunks":
            data[0] = voxels[0]
            given.voxels = np.concatenate([voxels[:1], voxels[1:] * 0 + 7])
        elif how == "none":
            given.voxels = voxels * 0 + 7
        else:
            data[...] = voxels
        if how == "group":
            file["exchange"].attrs["pxsize"] = sides[0]
            given.meters = in_meters([sides[0]] * 3, ["mm"] * 3)
        else:
            data.attrs["element_size_um"] = sides
            given.meters = in_meters(sides, ["µm"] * 3)
        data.attrs["description"] = chance.choice(TEXTS[:4] + TEXTS[5:])
        file.attrs["beamline"] = chance.choice(TEXTS[:4] + TEXTS[5:])
    return given


def elsewhere(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Voxels in other files or datasets, one of which may not be there, or be too short."""
    given, sides = Given(folder / "scan.h5", voxels), sides_of(chance)
    how, wrong = (
        chance.choice(["files", "numbered", "own", "nested", "part"]),
        chance.choice(["", "file", "dataset", "short"]),
    )
    parts = [f"part{number}.h5" for number in range(3)]
    for part, image_YX in zip(parts, voxels, strict=True):
        with h5py.File(folder / part, "w") as file:
            file.create_dataset("d", data=image_YX[None].repeat(2 if how == "part" else 1, axis=0))
    with h5py.File(given.path, "w") as file:
        layout = h5py.VirtualLayout(SHAPE, voxels.dtype)
        if how == "own":
            file["inner"] = voxels
            layout[:] = h5py.VirtualSource(".", "lost" if wrong else "inner", SHAPE)
        elif how == "nested":
            with h5py.File(folder / "outer.h5", "w") as outer:
                inner = h5py.VirtualLayout(SHAPE, voxels.dtype)
                for number, part in enumerate(parts):
                    inner[number : number + 1] = h5py.VirtualSource(part, "d", (1, *SHAPE[1:]))
                outer.create_virtual_dataset("d", inner)
            layout[:] = h5py.VirtualSource("outer.h5", "d", SHAPE)
        else:
            for number, part in enumerate(parts):
                source = h5py.VirtualSource(part, "d", (2 if how == "part" else 1, *SHAPE[1:]))
                layout[number : number + 1] = source[1:] if how == "part" else source
        if how == "numbered":
            place = h5py.h5s.create_simple((0, *SHAPE[1:]), (h5py.h5s.UNLIMITED, *SHAPE[1:]))
            place.select_hyperslab((0, 0, 0), (h5py.h5s.UNLIMITED, 1, 1), (1, 1, 1), (1, *SHAPE[1:]))
            made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            made.set_virtual(place, b"part%b.h5", b"d", h5py.h5s.create_simple((1, *SHAPE[1:])))
            space = h5py.h5s.create_simple((0, *SHAPE[1:]), (h5py.h5s.UNLIMITED, *SHAPE[1:]))
            h5py.h5d.create(file.id, b"data", h5py.h5t.py_create(voxels.dtype, logical=True), space, made)
        else:
            file.create_virtual_dataset("data", layout)
        file["data"].attrs["element_size_um"] = sides
    spoil(folder / chance.choice(parts[:2]), wrong, how)
    given.meters, given.path = in_meters(sides, ["µm"] * 3), Path(f"{given.path}:/data")
    given.voxels = None if wrong else voxels
    return given


def spoil(part: Path, wrong: str, how: str) -> None:
    if wrong == "file" or (wrong and how == "numbered"):
        part.unlink()
    elif wrong:
        with h5py.File(part, "w") as file:
            file["d" if wrong == "short" else "e"] = np.zeros((0 if how != "part" else 1, *SHAPE[1:]), "u1")


def external(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    given, wrong = Given(Path(f"{folder / 'scan.h5'}:/data"), voxels), chance.choice(["", "file", "short"])
    half = voxels.nbytes // 2
    for name, data in (("a.raw", voxels.tobytes()[:half]), ("b.raw", voxels.tobytes()[half:])):
        if (wrong, name) != ("file", "b.raw"):
            (folder / name).write_bytes(b"head" + data[: -1 if wrong == "short" else None])
    with h5py.File(folder / "scan.h5", "w") as file:
        places = [(str(folder / "a.raw"), 4, half), (str(folder / "b.raw"), 4, h5py.h5f.UNLIMITED)]
        file.create_dataset("data", voxels.shape, voxels.dtype, external=places)
    given.voxels = None if wrong else voxels
    return given


def ngff(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    given, sides, version = Given(folder / "scan.zarr", voxels), sides_of(chance), chance.choice([2, 3])
    units = units_of(chance, ["", *LENGTHS] if chance.random() < 0.3 else ["nanometer", "micrometer", "millimeter"])
    axes = [
        {"name": name, "type": "space"} | ({"unit": unit} if unit else {})
        for name, unit in zip("zyx", units, strict=True)
    ]
    scales = [{"type": "scale", "scale": sides}]
    image: dict[str, Any] = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scales}]}
    if chance.random() < 0.3:
        image["coordinateTransformations"] = [{"type": "scale", "scale": [2.0, 3.0, 0.5]}]
    about = (
        {"multiscales": [{"version": "0.4", **image}]}
        if version == 2
        else {"ome": {"version": "0.5", "multiscales": [image]}}
    )
    root = zarr.create_group(given.path, zarr_format=version, attributes={**about, "sample": chance.choice(TEXTS)})
    options: dict[str, Any] = {"shards": (2, 18, 20)} if version == 3 and chance.random() < 0.4 else {}
    with zarr.config.set({"array.write_empty_chunks": False}):
        array = root.create_array("0", shape=SHAPE, dtype=voxels.dtype, chunks=(1, 9, 10), fill_value=3, **options)
        stored = chance.choice([1, 3, 3])
        array[:stored] = voxels[:stored]
    given.voxels = np.concatenate([voxels[:stored], voxels[stored:] * 0 + 3])
    whole = image.get("coordinateTransformations", [{"scale": [1, 1, 1]}])[0]["scale"]
    sides = [a * b for a, b in zip(sides, whole, strict=True)]
    if set(units) == {""}:
        given.plain = (sides[0], sides[1], sides[2])
    elif "" not in units:
        given.meters = in_meters(sides, units)
    return given


def mrc(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write bytes without sign as IMOD does, with its stamp and no flag; and where the volume lies."""
    given, sides, order = Given(folder / "scan.mrc", voxels), sides_of(chance), chance.choice("<>")
    if voxels.dtype == np.uint8:
        voxels += np.uint8(chance.choice([0, 5]))
    with mrcfile.new(given.path, voxels.view("i1") if voxels.itemsize == 1 else voxels) as file:
        file.voxel_size = sides[::-1]
        file.header.origin = (chance.uniform(-9, 9), 0, 7)
        header = np.array(file.header).astype(mrcfile.dtypes.HEADER_DTYPE.newbyteorder(order))
    header["machst"] = list(mrcfile.utils.machine_stamp_from_byte_order(order))
    head = header.tobytes()
    stamp = np.array([1146047817, 0], f"{order}i4").tobytes()
    given.path.write_bytes(head[:152] + stamp + head[160:] + voxels.astype(voxels.dtype.newbyteorder(order)).tobytes())
    given.meters = in_meters([float(np.float32(side)) for side in sides], ["Å"] * 3)
    return given


MAKERS: dict[str, Callable[..., Given]] = {
    "tiff": tiff,
    "samples": samples,
    "imagej": imagej,
    "ome": ome,
    "hdf5": hdf5,
    "elsewhere": elsewhere,
    "external": external,
    "ngff": ngff,
    "mrc": mrc,
}
