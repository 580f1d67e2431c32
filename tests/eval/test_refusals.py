"""Files that are no slices: every mistake and every damage ends in one line that names the file and the cause, and
nothing else is printed."""

from __future__ import annotations

import logging
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import tifffile
import yaml
import zarr
from cocodiff_eval.data.formats import open_volume, write_volume
from cocodiff_eval.data.mrc import IMOD_STAMP
from cocodiff_eval.data.slices import open_stack, open_stacks, open_truth
from cocodiff_eval.data.volume import Stack
from eval_helpers import CASES
from file_kinds import KINDS, restored, voxels, write_mrc, write_npy, write_pages, write_png, write_tiff, write_zarr

from cocodiff.config.errors import UserError

ANOTHER = np.full((20, 20), 9, np.uint16)
COLOUR = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)


COLOURS = np.stack([COLOUR, COLOUR])
RGBA = {"photometric": "rgb", "extrasamples": ["unassalpha"]}
CLEAR = np.ones((17, 23, 4), "f4")
CLEAR[3, 4, 3] = 0.5
FIVE_CHANNELS = np.stack([ANOTHER] * 3 + [ANOTHER + 1] * 2, -1)


def text(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def hdf5(folder: Path) -> str:
    path = folder / "a.h5"
    with h5py.File(path, "w") as file:
        file["entry/data"] = np.zeros((3, 20, 20), np.float32)
        file["entry/flat"] = np.zeros((20, 20), np.uint16)
        file["entry/angles"] = np.zeros(20)
        file["entry/four"] = np.zeros((2, 2, 20, 20))
        file["entry/names"] = np.array([[b"a", b"b"]] * 2)
        file["entry/empty"], file["entry/single"] = h5py.Empty("f4"), 3.0
        file.create_dataset("entry/none", (0, 20, 20), "f4")
        file.create_dataset("entry/lists", (20, 20), h5py.vlen_dtype("f4"))
        file.create_dataset("entry/records", (20, 20), [("x", "f4"), ("y", "i4")])
    return str(path)


def png(path: Path, side: int, depth: int, colour: int, rows: bytes) -> str:
    """Write a PNG of a kind that Pillow cannot write: three chunks by hand."""
    header, said = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0), b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        said += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return text(path, said)


def cut(path: str, end: int) -> str:
    """Leave a file's bytes up to an end, or but for the last -end."""
    Path(path).write_bytes(Path(path).read_bytes()[:end])
    return path


def overwritten(path: str, code: int, value: Any) -> str:
    """Write another value of a tag of the first page."""
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages.first.tags[code].overwrite(value)
    return path


def pipe(path: Path) -> str:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return str(path)


def linked(path: Path, target: Path) -> str:
    path.symlink_to(target)
    return str(path)


def pipe_in_store(folder: Path, name: str) -> str:
    store = write_zarr(folder, voxels())
    pipe(Path(store) / name)
    return store


def planes_of_ome(folder: Path, planes: str) -> str:
    """Write the first of two planes, and XML that tells of both."""
    xml = f"""<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"
    UUID="urn:uuid:a"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="20"
    SizeY="20" SizeZ="2" SizeC="1" SizeT="1"><Channel ID="Channel:0:0" SamplesPerPixel="1"/><TiffData IFD="0"
    FirstZ="0" PlaneCount="1"/>{planes}</Pixels></Image></OME>"""
    return write_pages(folder, [ANOTHER], description=xml.encode(), metadata=None)


def claiming(path: Path, side: int, compression: int) -> str:
    """Write a TIFF of a few bytes whose header claims an 8-bit image of a size."""
    tags = {256: side, 257: side, 258: 8, 259: compression, 262: 1, 273: 150, 277: 1, 278: side, 279: 1000}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return text(path, struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(999))


ELSEWHERE = '<TiffData IFD="0" FirstZ="1" PlaneCount="1"><UUID FileName="b.ome.tif">urn:uuid:b</UUID></TiffData>'
ALONE = {"compression": "zlib", "metadata": None}
LARGE, CUT_SHORT = voxels((4, 64, 64)), r"scan\.tif: .*(cannot be read|damaged TIFF|not a readable TIFF)"
TILES = {"tile": (16, 16), "compression": "zlib"}
SUFFIXES = (".tif", ".png", ".h5", ".npy", ".mrc")
MISTAKES: dict[str, tuple[Callable[[Path], str], str]] = {
    # PNG
    "short png": (lambda d: cut(write_png(d, voxels((64, 64), "uint8")), 2000), "not a readable PNG"),
    "colour png": (lambda d: write_png(d, COLOUR), "a colour image whose channels differ"),
    "transparent png": (lambda d: write_png(d, np.full((20, 20, 4), 9, "u1")), "transparent pixels"),
    "16-bit colour png": (lambda d: png(d / "a.png", 20, 16, 2, bytes(2420)), "a 16-bit colour PNG"),
    "1-bit png": (lambda d: write_png(d, COLOUR[..., 0] > 90), "boolean values.*--mask"),
    # TIFF
    "colour tiff": (lambda d: write_pages(d, [COLOUR], photometric="rgb"), "a colour image whose channels differ"),
    "colour stack": (lambda d: write_pages(d, [COLOURS], photometric="rgb"), "a stack of colour images"),
    "more channels": (lambda d: write_pages(d, [FIVE_CHANNELS], photometric="rgb"), "channels differ"),
    "transparent tiff": (lambda d: write_pages(d, [CLEAR], **RGBA), "transparent"),
    "complex": (lambda d: write_pages(d, [np.zeros((20, 20), "c8")]), r"complex values \(complex64\)"),
    "4-D tiff": (lambda d: write_tiff(d, np.zeros((2, 2, 20, 20), "u1"), axes="qqyx"), "4 dimensions 2 x 2 x 20 x 20"),
    "small": (lambda d: write_pages(d, [np.zeros((12, 300), "u1")]), r"slices of 12 x 300 .*16 x 16"),
    "shapes": (lambda d: write_pages(d, [ANOTHER, np.zeros((30, 20), "u2")]), r"dtypes \(20 x 20, 30 x 20\)"),
    "pages of two whites": (lambda d: write_pages(d, [ANOTHER, ANOTHER], white=[1]), "MINISBLACK, MINISWHITE"),
    **{
        f"samples {kind}": (lambda d, kind=kind: overwritten(write_pages(d, [ANOTHER]), 262, kind), "photometric")
        for kind in (3, 4, 5, 6, 8, 32803, 34892)
    },
    "no tiles": (lambda d: overwritten(write_tiff(d, voxels(), **TILES), 325, [0] * 6), "slice 0 .*6 of 6 strips"),
    **{
        f"{kept} bytes of {name}": (lambda d, kept=kept, more=more: cut(write_tiff(d, LARGE, **more), kept), CUT_SHORT)
        for name, more in {"": {}, "zlib": {"compression": "zlib"}, "zlib alone": ALONE}.items()
        for kept in (5000, 9000, 20000, -40)
    },
    "no plane": (lambda d: planes_of_ome(d, ""), "1 planes, slice 1 the first"),
    "plane elsewhere": (lambda d: planes_of_ome(d, ELSEWHERE), r"slice 1 the first.*b\.ome\.tif"),
    # MRC
    "mrc of two volumes": (lambda d: write_mrc(d, voxels(dtype="int16"), ispg=401, mz=3), "dimensions|volumes"),
    "turned mrc": (lambda d: write_mrc(d, voxels(dtype="int16"), mapc=3, maps=1), "not in the order of sections, "),
    "mrc of 4 bits": (lambda d: write_mrc(d, voxels(dtype="uint8"), "<", (IMOD_STAMP, 16)), "two values of 4 bits"),
    # Paths of other tools, and what holds something else
    **{name: (lambda d, path=path: path, told) for name, (path, told) in CASES["refused paths"].items()},
    **{
        name: (lambda d, path=path, held=held, inner=inner: text(d / path, held.encode("latin1")) + inner, told)
        for name, (path, inner, held, told) in CASES["refused files"].items()
    },
    **{
        f"hdf5 {name}": (lambda d, inner=inner: hdf5(d) + inner, told)
        for name, (inner, told) in CASES["refused datasets"].items()
    },
    **{
        f"{held!r} as {end}": (lambda d, end=end, held=held: text(d / f"a{end}", held), "not a readable .*; ")
        for end in SUFFIXES
        for held in (b"hello", b"")
    },
    # What is never opened
    "loop": (lambda d: linked(d / "a.tif", d / "a.tif"), "symbolic links"),
    **{
        f"{kind} {suffix}": (lambda d, make=make, suffix=suffix: make(d / f"a{suffix}"), f"is a {kind}")
        for suffix in SUFFIXES
        for kind, make in {"named pipe": pipe, "device": lambda path: linked(path, Path("/dev/zero"))}.items()
    },
    **{
        f"pipe {name}": (lambda d, name=name: pipe_in_store(d, name), "is a named pipe")
        for name in (".zgroup", ".zattrs", "0/.zarray", "0/0.0.0.0.0")
    },
}


def check_refused(path: str, message: str) -> str:
    """Check that opening or reading a file raises one line with these words, and warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=message) as caught:
            stack = open_stack(path)
            for index in range(len(stack)):
                stack.read(index)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("promptly")
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(tmp_path: Path, case: str, capfd: pytest.CaptureFixture) -> None:
    make, message = MISTAKES[case]
    path = make(tmp_path)
    assert check_refused(path, message).startswith(path.partition(":/")[0] or "''") or "\0" in path
    assert capfd.readouterr() == ("", "") and logging.getLogger("tifffile").filters == []


@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_of_blosc_that_is_cut_short_is_refused(tmp_path: Path, version: int) -> None:
    """Blosc's own library would take what lies behind it in memory."""
    codec = numcodecs.Blosc() if version == 2 else zarr.codecs.BloscCodec()
    store = write_zarr(tmp_path, voxels(), version=version, compressors=codec)
    cut(str(next(Path(store).rglob("0.0.0.0.0" if version == 2 else "c/0/0/0/0/0"))), -40)
    check_refused(store, r"slice 0 cannot be read .* is cut short")


NGFF: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_name("ngff.yaml").read_text())


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("case", NGFF)
def test_malformed_metadata_are_refused_when_the_image_is_opened(tmp_path: Path, case: str, version: int) -> None:
    """The array itself can be read in any case."""
    axes, transforms, message = NGFF[case]
    store = write_zarr(tmp_path, voxels(), version=version, chunks=(1, 1, 6, 20, 33))
    root = zarr.open_group(store, mode="a")
    about = root.attrs.asdict()
    (image,) = about.get("ome", about)["multiscales"]
    image["axes"] = axes if axes is not None else image["axes"]
    if transforms is not None:
        image["datasets"][0]["coordinateTransformations"] = transforms
    root.attrs.put(about)
    if message:
        check_refused(store, message)
    for path in (f"{store}:/0", *([] if message else [store])):
        result = restored(open_stack(path), "same", tmp_path).path
        assert np.array_equal(zarr.open_array(result, path="0", mode="r")[0, 0], voxels())


def test_mistakes_of_sequences_and_stores(tmp_path: Path) -> None:
    folder = Path(KINDS["sequence"].file(tmp_path, voxels()))
    tenth = folder / "recon_10.tiff"
    kept = tenth.read_bytes()
    for image_YX, more, message in (
        (np.zeros((20, 33), "u1"), {}, r"recon_10\.tiff: holds 20 x 33 voxels of uint8"),
        (np.zeros((20, 34), "u2"), {}, r"recon_10\.tiff: holds 20 x 34 voxels"),
        (voxels()[0], {"white": [0]}, r"recon_10\.tiff: 0 is white in it or in .*recon_8\.tiff, "),
        (voxels()[0], {"extratags": [(274, 3, 1, 4, True)]}, r"recon_10\.tiff: has orientation 4, .*recon_8\.tiff"),
        (voxels()[:2], {}, r"recon_10\.tiff: holds 2 slices"),
    ):
        Path(write_pages(tmp_path, image_YX.reshape(-1, *image_YX.shape[-2:]), metadata=None, **more)).rename(tenth)
        check_refused(str(folder), message)
    tenth.write_bytes(kept)
    (folder / "recon_010.tiff").write_bytes(kept)
    check_refused(str(folder), "have the same number")
    (folder / "recon_010.tiff").rename(folder / "flat_1.tiff")
    check_refused(str(folder), r"flat_1\.tiff has another name than recon_\*\.tiff")
    assert open_stack(f"{folder}/recon_*.tiff").name == "recon"
    check_refused(f"{folder}/dark_*.tif", r"dark_\*\.tif")
    store = write_zarr(tmp_path, voxels())
    root = zarr.open_group(store, mode="a")
    root.create_group("labels")
    root.create_array("many", shape=(2, 1, 6, 20, 33), dtype="u1")
    check_refused(f"{store}:/labels", "labels: is a group without a multiscale image")
    check_refused(f"{store}:/9", r"/0 \(1 x 1 x 6 x 20 x 33 uint16\)")
    check_refused(f"{store}:/many", ":/many: 5 dimensions 2 x 1 x 6 x 20 x 33")


@pytest.mark.parametrize("side", [2**31 - 1, 10**6])
def test_more_voxels_than_memory_holds_are_refused_unread(tmp_path: Path, side: int) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, depth in (("one", 1), ("many", 3)):
            file.create_dataset(name, (depth, side, side), "f4", chunks=(1, 64, 64))
    paths = [png(tmp_path / "a.png", side, 8, 0, b""), f"{tmp_path}/a.h5:/one", f"{tmp_path}/a.h5:/many"]
    for path in (*paths, *(claiming(tmp_path / f"{kind}.tif", side, kind) for kind in (1, 5, 8))):
        check_refused(path, rf"claims {side} x {side} voxels .* [0-9,]+ GiB.* [0-9,]+ GiB")


def test_no_input_and_another_truth(tmp_path: Path, stack: Stack) -> None:
    with pytest.raises(UserError, match=r"no input given.*--input"):
        open_stacks([])
    other = write_npy(tmp_path, np.zeros((3, 40, 51), np.float32))
    with pytest.raises(UserError, match=r"the truth has shape 3 x 40 x 51 but .* has 3 x 40 x 52"):
        open_truth(other, stack)
    assert open_truth(stack.path, stack).shape == stack.shape


def test_what_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = open_volume(write_npy(tmp_path, voxels(dtype="uint32")))
    with pytest.raises(UserError, match=r"cannot be written.*--out"):
        write_volume("tiff", tmp_path / "no", lambda suffix: f"x{suffix}", volume, volume.dtype, volume.reader, {})
    with pytest.raises(UserError, match=r"MRC files hold no uint32: .*--format"):
        restored(volume, "mrc", tmp_path)
    path = write_mrc(tmp_path, voxels(dtype="int16"))
    monkeypatch.setitem(sys.modules, "mrcfile", None)
    with pytest.raises(UserError, match=r"pip install cocodiff\[mrc\]"):
        open_volume(path)
