"""Every format and dtype goes in and comes out unchanged; every mistake ends in one helpful line."""

import os
import struct
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from cocodiff_eval.data.formats import open_volume, write_volume
from cocodiff_eval.data.slices import open_stack, open_stacks, open_truth, safe_stem, save_preview_png, to_grey8
from cocodiff_eval.data.tiff import write_tiff
from cocodiff_eval.data.volume import NewVolume, Stack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from cocodiff.config.errors import UserError

DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32", "float64"]


def voxels(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    generator = np.random.default_rng(len(shape) + sum(shape))
    if np.dtype(dtype).kind == "f":
        return generator.normal(size=shape).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, size=shape, dtype=dtype, endpoint=True)


def assert_holds(stack: Stack, expected: np.ndarray) -> None:
    volume = expected if expected.ndim == 3 else expected[None]
    assert stack.shape == volume.shape
    assert stack.ndim == expected.ndim
    assert stack.dtype == expected.dtype.newbyteorder("=")
    for index, image_YX in enumerate(volume):
        read_YX = stack.read(index)
        assert read_YX.dtype == stack.dtype and read_YX.dtype.isnative
        np.testing.assert_array_equal(read_YX, image_YX)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(17, 23), (1, 20, 16), (2, 16, 16), (3, 16, 31), (4, 19, 16)])
def test_tiff_goes_in_and_out(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    expected = voxels(shape, dtype)
    tifffile.imwrite(tmp_path / "in.tif", expected, photometric="minisblack")
    stack = open_stack(str(tmp_path / "in.tif"))
    assert_holds(stack, expected)
    write_tiff(NewVolume(tmp_path / "out.tif", stack.shape, stack.dtype, stack.ndim, stack.read))
    assert_holds(open_stack(str(tmp_path / "out.tif")), expected)
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "out.tif"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(17, 23), (1, 20, 16), (3, 16, 31)])
def test_hdf5_goes_in(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    expected = voxels(shape, dtype)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["entry/data"] = expected.astype(expected.dtype.newbyteorder(">"))
    assert_holds(open_stack(f"{tmp_path}/in.h5:/entry/data"), expected)
    assert open_stack(f"{tmp_path}/in.h5:entry/data").name == "in_entry_data"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(n=st.integers(1, 5), rows=st.integers(16, 40), columns=st.integers(16, 40), big=st.booleans())
def test_stacks_of_any_shape(tmp_path: Path, n: int, rows: int, columns: int, big: bool) -> None:
    expected = voxels((n, rows, columns), "uint16")
    tifffile.imwrite(tmp_path / "any.tif", expected, byteorder=">" if big else "<", photometric="minisblack")
    assert_holds(open_stack(str(tmp_path / "any.tif")), expected)


@pytest.mark.parametrize("options", [{"compression": "zlib"}, {"imagej": True}, {"tile": (16, 16)}, {"bigtiff": True}])
@pytest.mark.parametrize("shape", [(20, 33), (3, 20, 33)])
def test_kinds_of_tiff(tmp_path: Path, options: dict, shape: tuple[int, ...]) -> None:
    expected = voxels(shape, "uint16")
    axes = {"axes": "ZYX"[-len(shape) :]}  # without which tifffile takes ImageJ's slices for channels
    tifffile.imwrite(tmp_path / "in.tif", expected, photometric="minisblack", metadata=axes, **options)
    assert_holds(open_stack(str(tmp_path / "in.tif")), expected)


@pytest.mark.parametrize("compression", ["lzw", "zstd", "packbits", "lzma"])
@pytest.mark.parametrize("options", [{}, {"predictor": True}, {"tile": (16, 16), "predictor": True}])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_compressed_tiff(tmp_path: Path, compression: str, options: dict, dtype: str) -> None:
    """LZW is what microscopes write."""
    if compression == "packbits" and options:
        options = {"tile": (16, 16)}
    expected = voxels((3, 20, 33), dtype)
    tifffile.imwrite(tmp_path / "in.tif", expected, photometric="minisblack", compression=compression, **options)
    assert_holds(open_stack(str(tmp_path / "in.tif")), expected)


def claiming(path: Path, rows: int, columns: int, compression: int = 1) -> str:
    """A TIFF of a few bytes whose header claims an 8-bit image of a size."""
    tags = {256: columns, 257: rows, 258: 8, 259: compression, 262: 1, 273: 150, 277: 1, 278: rows, 279: 1000}
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    path.write_bytes(
        header + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()) + bytes(999)
    )
    return str(path)


def claiming_png(path: Path, side: int) -> str:
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)))
    return str(path)


@pytest.mark.parametrize("side", [2**31 - 1, 10**6])
def test_more_voxels_than_memory_holds_are_refused_unread(tmp_path: Path, side: int) -> None:
    paths = [claiming(tmp_path / f"{kind}.tif", side, side, kind) for kind in (1, 5, 8)]
    paths.append(claiming_png(tmp_path / "a.png", side))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("one", (side, side), "f4", chunks=(64, 64))
        file.create_dataset("many", (3, side, side), "f4", chunks=(1, 64, 64))
    paths += [f"{tmp_path}/a.h5:/one", f"{tmp_path}/a.h5:/many"]
    for path in paths:
        with pytest.raises(UserError, match=rf"claims {side} x {side} voxels .* this machine has [0-9,]+ GiB"):
            open_stack(path)


def test_tiff_with_an_opaque_alpha_channel_in_floats(tmp_path: Path) -> None:
    expected = np.random.default_rng(0).random((17, 23), dtype=np.float32)
    image = np.repeat(expected[..., None], 4, axis=-1)
    image[..., 3] = 1
    tifffile.imwrite(tmp_path / "in.tif", image, photometric="rgb", extrasamples=["unassalpha"])
    assert_holds(open_stack(str(tmp_path / "in.tif")), expected)
    image[3, 4, 3] = 0.5
    tifffile.imwrite(tmp_path / "in.tif", image, photometric="rgb", extrasamples=["unassalpha"])
    with pytest.raises(UserError, match="has transparent pixels"):
        open_stack(str(tmp_path / "in.tif"))


@pytest.mark.usefixtures("promptly")
@pytest.mark.parametrize("suffix", [".tif", ".png", ".h5"])
def test_pipes_and_devices_are_never_opened(tmp_path: Path, suffix: str) -> None:
    dataset = ":/data" if suffix == ".h5" else ""
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"loop{suffix}").symlink_to(tmp_path / f"loop{suffix}")
    for name, said in {"pipe": "is a named pipe", "zero": "is a device", "loop": "symbolic links"}.items():
        with pytest.raises(UserError, match=said):
            open_stack(f"{tmp_path}/{name}{suffix}{dataset}")
    for name, said in {"x" * 300: "name too long", "nul\0": "null"}.items():
        with pytest.raises(UserError, match=said):
            open_stack(f"{tmp_path}/{name}{suffix}")


def test_tiff_pages_written_one_by_one(tmp_path: Path) -> None:
    expected = voxels((3, 20, 33), "uint8")
    for page in expected:
        tifffile.imwrite(tmp_path / "in.tif", page, append=True)
    assert_holds(open_stack(str(tmp_path / "in.tif")), expected)


def test_volumetric_compressed_tiff(tmp_path: Path) -> None:
    expected = voxels((16, 32, 32), "uint8")
    tifffile.imwrite(tmp_path / "in.tif", expected, tile=(16, 16, 16), volumetric=True, compression="zlib")
    assert_holds(open_stack(str(tmp_path / "in.tif")), expected)


def test_a_stack_is_never_wholly_in_memory(tmp_path: Path) -> None:
    shape = (60, 256, 256)
    slice_bytes = 256 * 256 * 2
    tracemalloc.start()
    read = partial(np.full, shape[1:], dtype=np.uint16)
    write_tiff(NewVolume(tmp_path / "big.tif", shape, np.dtype("uint16"), 3, read))
    stack = open_stack(str(tmp_path / "big.tif"))
    assert [int(stack.read(index)[5, 7]) for index in range(len(stack))] == list(range(60))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * slice_bytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}])
def test_forked_ranks_read_the_same_file_at_once(tmp_path: Path, options: dict) -> None:
    """A file opened before the fork must not share its position with the children."""
    expected = voxels((40, 64, 64), "uint16")
    tifffile.imwrite(tmp_path / "a.tif", expected, photometric="minisblack", **options)
    stack = open_stack(str(tmp_path / "a.tif"))
    stack.read(0)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(4):
                    code = int(any(not np.array_equal(stack.read(n), expected[n]) for n in range(40)))
                    if code:
                        break
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_png_goes_in(tmp_path: Path, dtype: str) -> None:
    expected = voxels((17, 23), dtype)
    Image.fromarray(expected).save(tmp_path / "in.png")
    assert_holds(open_stack(str(tmp_path / "in.png")), expected)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "LA"])
def test_png_with_equal_channels_is_grey(tmp_path: Path, mode: str) -> None:
    expected = voxels((17, 23), "uint8")
    Image.fromarray(expected).convert(mode).save(tmp_path / "in.png")
    assert_holds(open_stack(str(tmp_path / "in.png")), expected)


def test_tiff_with_equal_channels_is_grey(tmp_path: Path) -> None:
    expected = voxels((17, 23), "uint8")
    tifffile.imwrite(tmp_path / "in.tif", np.repeat(expected[..., None], 3, axis=-1), photometric="rgb")
    assert_holds(open_stack(str(tmp_path / "in.tif")), expected)


def test_names_are_unique_and_safe(tmp_path: Path) -> None:
    paths = []
    for name in ("a/scan 1.tif", "b/scan 1.tif", "c/Scan 1.tif", "c/..x;rm.tif"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        tifffile.imwrite(path, voxels((16, 16), "uint8"))
        paths.append(str(path))
    assert [stack.name for stack in open_stacks(paths)] == ["scan_1", "scan_1-2", "Scan_1-3", "x_rm"]
    assert safe_stem("///") == "slice"
    assert safe_stem("Schädel-7") == "Schädel-7"


def test_preview(tmp_path: Path) -> None:
    image_YX = np.linspace(-5, 5, 256).reshape(16, 16)
    image_YX[0, :3] = np.nan, np.inf, -np.inf
    save_preview_png(tmp_path / "p.png", image_YX, -5, 5)
    preview_YX = np.asarray(Image.open(tmp_path / "p.png"))
    assert preview_YX[0, :3].tolist() == [0, 255, 0] and preview_YX[-1, -1] == 255
    assert not to_grey8(np.full((4, 4), 7), 7, 7).any()


def test_a_file_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    volume = open_volume(_png(tmp_path / "in.png", np.zeros((16, 16), np.uint8)))
    with pytest.raises(UserError, match=r"cannot be written.*--out"):
        write_volume("tiff", tmp_path / "no", lambda suffix: f"x{suffix}", volume, volume.dtype, volume.reader, {})


def _png(path: Path, array: np.ndarray) -> str:
    Image.fromarray(array).save(path)
    return str(path)


def _tiff(path: Path, array: np.ndarray, **options: object) -> str:
    tifffile.imwrite(path, array, **{"photometric": "minisblack", **options})
    return str(path)


def _text(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def _h5(path: Path, dataset: str | None) -> str:
    with h5py.File(path, "w") as file:
        file["entry/data"] = np.zeros((3, 20, 20), np.float32)
        file["entry/flat"] = np.zeros((20, 20), np.uint16)
        file["entry/angles"] = np.zeros(20)
        file["entry/four"] = np.zeros((2, 2, 20, 20))
        file["entry/names"] = np.array([[b"a", b"b"]] * 2)
    return str(path) if dataset is None else f"{path}:{dataset}"


def _two_shapes(path: Path) -> str:
    tifffile.imwrite(path, np.zeros((20, 20), np.uint8))
    tifffile.imwrite(path, np.zeros((30, 20), np.uint8), append=True)
    return str(path)


def _transparent(path: Path) -> str:
    image = np.full((20, 20, 4), 9, np.uint8)
    return _png(path, image)


def _png16_colour(path: Path) -> str:
    """Pillow cannot write one: three chunks by hand."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 20, 20, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(20 * 6)) * 20)
    return _text(path, b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


COLOUR = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
MISTAKES: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing": (lambda d: str(d / "no.tif"), r"no\.tif: no such file; check the path"),
    "directory": (lambda d: str(d), r"is a directory; name the files in it, e\.g\. .*\*\.png"),
    "extension": (lambda d: _text(d / "a.jpg", b"x"), r"the extension '\.jpg' is not supported; convert to PNG"),
    "no extension": (lambda d: _text(d / "a", b"x"), r"the extension '\(none\)' is not supported"),
    "corrupt png": (lambda d: _text(d / "a.png", b"\x89PNG\r\n\x1a\nxxxx"), "not a readable PNG .*; save it again"),
    "text as png": (lambda d: _text(d / "a.png", b"hello"), "not a readable PNG"),
    "empty png": (lambda d: _text(d / "a.png", b""), "not a readable PNG"),
    "corrupt tiff": (
        lambda d: _text(d / "a.tif", b"II*\x00\xff\xff\xff\xff"),
        r"damaged TIFF, cut short perhaps \(invalid offset",
    ),
    "text as tiff": (lambda d: _text(d / "a.tif", b"hello"), "not a readable TIFF .*; save it again"),
    "corrupt hdf5": (lambda d: _text(d / "a.h5", b"hello") + ":/x", "not a readable HDF5 file .*h5ls"),
    "hdf5 without path": (
        lambda d: _h5(d / "a.h5", None),
        r"name the dataset as .*a\.h5:/path; it holds /entry/data \(3 x 20 x 20 float32\), /entry/flat \(20 x 20 uint",
    ),
    "hdf5 path absent": (lambda d: _h5(d / "a.h5", "/data"), r"/data is not there; it holds /entry/data"),
    "hdf5 group": (lambda d: _h5(d / "a.h5", "/entry"), "/entry is a group; it holds"),
    "hdf5 1-D": (lambda d: _h5(d / "a.h5", "/entry/angles"), "1 dimensions 20; a slice has 2"),
    "hdf5 4-D": (lambda d: _h5(d / "a.h5", "/entry/four"), "4 dimensions 2 x 2 x 20 x 20"),
    "hdf5 text": (lambda d: _h5(d / "a.h5", "/entry/names"), r"values of type \|S1; save them as"),
    "colour png": (lambda d: _png(d / "a.png", COLOUR), "a colour image whose channels differ; save it as grey"),
    "transparent png": (lambda d: _transparent(d / "a.png"), "transparent pixels; remove the alpha channel"),
    "16-bit colour png": (lambda d: _png16_colour(d / "a.png"), "a 16-bit colour PNG; save it as 16-bit grey"),
    "1-bit png": (lambda d: _png(d / "a.png", COLOUR[..., 0] > 90), "boolean values.*--mask"),
    "colour tiff": (lambda d: _tiff(d / "a.tif", COLOUR, photometric="rgb"), "a colour image whose channels differ"),
    "colour stack": (lambda d: _tiff(d / "a.tif", COLOUR[None].repeat(2, 0), photometric="rgb"), "stack of colour"),
    "complex": (lambda d: _tiff(d / "a.tif", np.zeros((20, 20), np.complex64)), r"complex values \(complex64\); save"),
    "4-D tiff": (lambda d: _tiff(d / "a.tif", np.zeros((2, 2, 20, 20), np.uint8)), "4 dimensions 2 x 2 x 20 x 20"),
    "small": (lambda d: _tiff(d / "a.tif", np.zeros((12, 300), np.uint8)), r"slices of 12 x 300 .*at least 16 x 16"),
    "shapes": (lambda d: _two_shapes(d / "a.tif"), r"different shapes or dtypes \(20 x 20, 30 x 20\)"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(tmp_path: Path, case: str, capfd: pytest.CaptureFixture) -> None:
    make, message = MISTAKES[case]
    path = make(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=message) as caught:
            open_stack(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}, {"compression": "zlib", "metadata": None}])
@pytest.mark.parametrize("kept", [5000, 9000, 20000, -40])
def test_a_damaged_tiff_is_never_read_in_part(
    tmp_path: Path, options: dict, kept: int, capfd: pytest.CaptureFixture
) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, voxels((4, 64, 64), "uint16"), photometric="minisblack", **options)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"a\.tif: .*(cannot be read|damaged TIFF|not a readable TIFF)") as caught:
        stack = open_stack(str(path))
        assert len([stack.read(index) for index in range(len(stack))]) == 4
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_truncated_png_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(voxels((64, 64), "uint8")).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match="not a readable PNG"):
        open_stack(str(path))


def test_no_input_and_another_truth(tmp_path: Path, stack: Stack) -> None:
    with pytest.raises(UserError, match=r"no input given.*--input"):
        open_stacks([])
    other = _tiff(tmp_path / "t.tif", np.zeros((3, 40, 51), np.float32))
    with pytest.raises(UserError, match=r"the truth has shape 3 x 40 x 51 but .* has 3 x 40 x 52"):
        open_truth(other, stack)
    assert open_truth(stack.path, stack).shape == stack.shape
