"""What files say of their voxels: units of each axis, samples that are no intensities, texts; and voxels not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from cocodiff_eval.data.formats import open_volume, write_volume
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.data.volume import LENGTHS, Part, Stack, one_unit, unit_name, unit_symbol

from cocodiff.config.errors import UserError

VOLUME = np.arange(3 * 20 * 24, dtype=np.uint16).reshape(3, 20, 24)


def result(volume: Stack, word: str, folder: Path) -> Stack:
    """As it is read from a result."""
    named, about = (lambda suffix: f"result{suffix}"), {"version": "1.0"}
    file = write_volume(word, folder, named, volume, volume.dtype, volume.reader, about)
    return open_volume(str(file.path))


def test_sides_of_several_units_become_those_of_one() -> None:
    assert one_unit((500, "2", 1.0), ("nm", "µm", "um")) == ((pytest.approx(0.5), 2.0, 1.0), "micrometer", [])
    assert one_unit((1, 2, 3), ("", "", "")) == ((1.0, 2.0, 3.0), "", []) and one_unit(None, [""] * 3) == (None, "", [])
    for sides, units in (
        ((1, 2, 3), ("pixel",) * 3),
        ((1, 2, 3), ("µm", "", "µm")),
        ((1, 2, 0), ("µm",) * 3),
        ((1, 2, "two"), ("µm",) * 3),
        ((1, float("nan"), 2), ("µm",) * 3),
        ((1, 2), ("µm",) * 3),
        (7, ("µm",) * 3),
    ):
        size, unit, (told,) = one_unit(sides, units)
        assert (size, unit) == (None, "") and "the voxel size" in told
    assert all(unit_name(unit_symbol(name)) == name for name in LENGTHS)
    assert [unit_name(word) for word in ("Mm", "mm", "microns", "cm.", "metre")] == [
        *("megameter", "millimeter", "micrometer", "centimeter", "meter")
    ]


def imagej(path: Path, **about: Any) -> Stack:
    metadata = {"axes": "ZYX", "unit": "um", "spacing": 500, **about}
    tifffile.imwrite(path / "scan.tif", VOLUME, imagej=True, resolution=(2, 4), metadata=metadata)
    return open_volume(str(path / "scan.tif"))


def ome(path: Path, **about: Any) -> Stack:
    sizes = {"PhysicalSizeZ": 500, "PhysicalSizeY": 0.25, "PhysicalSizeX": 0.5}
    metadata = {"axes": "ZYX", **sizes, **about}
    tifffile.imwrite(path / "scan.ome.tif", VOLUME, ome=True, photometric="minisblack", metadata=metadata)
    return open_volume(str(path / "scan.ome.tif"))


def ngff(path: Path, *units: str) -> Stack:
    axes = [{"name": name, "type": "space", "unit": unit} for name, unit in zip("zyx", units, strict=True)]
    scale = [{"type": "scale", "scale": [500.0, 0.25, 0.5]}]
    image = {"version": "0.4", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scale}]}
    root = zarr.create_group(path / "scan.zarr", zarr_format=2, attributes={"multiscales": [image]})
    root.create_array("0", data=VOLUME, chunks=(1, 20, 24))
    return open_volume(str(path / "scan.zarr"))


@pytest.mark.parametrize("kind", ["imagej", "ome", "ngff"])
@pytest.mark.parametrize("word", ["tiff", "sequence", "zarr", "h5"])
def test_each_axis_has_its_own_unit(tmp_path: Path, kind: str, word: str) -> None:
    if kind == "imagej":
        given = imagej(tmp_path, zunit="nm")
    elif kind == "ome":
        given = ome(tmp_path, PhysicalSizeZUnit="nm")
    else:
        given = ngff(tmp_path, "nanometer", "micrometer", "micrometer")
    found = result(given, word, tmp_path).metadata
    assert found.unit == "micrometer" and found.voxel_size == pytest.approx((0.5, 0.25, 0.5), rel=1e-9)


def test_a_unit_that_is_no_length_is_kept_by_its_own_format_alone(tmp_path: Path) -> None:
    given = ome(tmp_path, PhysicalSizeXUnit="reference frame", PhysicalSizeZUnit="pm")
    assert given.metadata.voxel_size is None and "the voxel size" in given.metadata.remarks[0]
    assert result(given, "zarr", tmp_path).metadata.voxel_size is None
    axes = zarr.open_group(tmp_path / "result.ome.zarr", mode="r").attrs["multiscales"][0]["axes"]
    assert all("unit" not in axis for axis in axes)
    with tifffile.TiffFile(result(given, "tiff", tmp_path).path) as tiff:
        assert 'PhysicalSizeXUnit="reference frame"' in tiff.ome_metadata
    thin = ome(tmp_path, **{f"PhysicalSize{axis}Unit": "pm" for axis in "ZYX"})
    assert result(thin, "h5", tmp_path).metadata.voxel_size == pytest.approx((5e-4, 2.5e-7, 5e-7), rel=1e-9)
    (tmp_path / "in").mkdir()
    bare = ngff(tmp_path / "in", "", "", "")
    for word in ("tiff", "h5"):
        found = result(bare, word, tmp_path).metadata
        assert (found.voxel_size, found.unit) == ((500.0, 0.25, 0.5), "")


def test_a_word_that_is_no_number_loses_the_size_alone(tmp_path: Path) -> None:
    given = imagej(tmp_path, spacing="abc")
    assert given.metadata.voxel_size is None and given.metadata.attributes["unit"] == "um"
    tifffile.imwrite(tmp_path / "a.tif", VOLUME[0], resolution=(10, 10), resolutionunit=3, metadata={"unit": "nm"})
    assert open_volume(str(tmp_path / "a.tif")).metadata.unit == "micrometer"


def test_what_imagej_draws_is_kept_and_said_once(tmp_path: Path) -> None:
    roi = b"Iout" + bytes(60)
    given = imagej(
        tmp_path, ROI=roi, Overlays=[roi, roi], LUTs=[np.zeros((3, 256), "u1")], Info="Jürgen", Labels=["é"] * 3
    )
    (remark,) = given.metadata.remarks
    assert remark.endswith("whole results of its own format alone keep ROI, Overlays, LUTs")
    for word in ("zarr", "h5", "sequence", "tiff"):
        found = result(given, word, tmp_path)
    with tifffile.TiffFile(found.path) as tiff:
        about = tiff.imagej_metadata
    assert about["ROI"] == roi and about["Overlays"] == [roi, roi] and about["Info"].startswith("Jürgen")
    part = result(Part("1:3").of(given), "tiff", tmp_path)
    with tifffile.TiffFile(part.path) as tiff:
        assert "ROI" not in tiff.imagej_metadata and len(tiff.imagej_metadata["Labels"]) == 2


def test_texts_outside_ascii_are_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"extratags": [(315, 2, 0, "Jürgen".encode(), True)], "software": "größer".encode()}
    tifffile.imwrite(tmp_path / "scan.tif", VOLUME[0], description="a\x01b", **options)
    given = open_volume(str(tmp_path / "scan.tif"))
    with tifffile.TiffFile(result(given, "tiff", tmp_path).path) as tiff:
        tags = tiff.pages.first.tags
        assert (tags[315].value, tags[305].value) == ("Jürgen", "größer")
    ngff(tmp_path, "mm", "mm", "mm")
    zarr.open_group(tmp_path / "scan.zarr", mode="a").attrs["description"] = "a\x01b"
    assert result(open_volume(str(tmp_path / "scan.zarr")), "tiff", tmp_path).metadata.description == "a\ufffdb"


def tagged(path: Path, image: np.ndarray, code: int, value: Any, **options: Any) -> str:
    """A TIFF with another value of a tag than its writer gave it."""
    tifffile.imwrite(path / "scan.tif", image, metadata=None, **options)
    with tifffile.TiffFile(path / "scan.tif", mode="r+b") as file:
        file.pages.first.tags[code].overwrite(value)
    return str(path / "scan.tif")


@pytest.mark.parametrize("kind", [3, 4, 5, 6, 8, 32803, 34892])
def test_samples_that_are_no_intensities_are_refused(tmp_path: Path, kind: int) -> None:
    with pytest.raises(UserError, match=r"scan\.tif: samples of photometric interpretation .*; save it as grey"):
        open_volume(tagged(tmp_path, VOLUME[0], 262, kind))


def test_more_channels_than_colours_are_compared(tmp_path: Path) -> None:
    image = np.stack([VOLUME[0]] * 3 + [VOLUME[1]] * 2, -1)
    tifffile.imwrite(tmp_path / "scan.tif", image, photometric="rgb")
    with pytest.raises(UserError, match="a colour image whose channels differ"):
        open_volume(str(tmp_path / "scan.tif"))


def test_pages_and_slices_have_one_meaning(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "scan.tif") as file:
        for number, kind in enumerate(("minisblack", "miniswhite")):
            file.write(VOLUME[0], photometric=kind, metadata=None)
            tifffile.imwrite(tmp_path / f"slice_{number}.tif", VOLUME[0], photometric=kind)
    with pytest.raises(UserError, match="MINISBLACK, MINISWHITE"):
        open_volume(str(tmp_path / "scan.tif"))
    with pytest.raises(UserError, match=r"0 is white in it or in .*, not in both"):
        open_volume(str(tmp_path / "slice_*.tif"))


@pytest.mark.parametrize("bits", [4, 12])
def test_packed_samples_come_back_unpacked(tmp_path: Path, bits: int) -> None:
    image = (VOLUME[0] % 16).astype("u1" if bits == 4 else "u2")
    tifffile.imwrite(tmp_path / "scan.tif", image, bitspersample=bits, metadata=None)
    given = open_volume(str(tmp_path / "scan.tif"))
    assert f"{bits} bits a sample; results hold the same values as {image.dtype}" in given.metadata.remarks[0]
    assert np.array_equal(result(given, "tiff", tmp_path).reader(0), image)


def test_strips_that_are_not_there_are_no_zeros(tmp_path: Path) -> None:
    path = tagged(tmp_path, VOLUME, 325, [0] * 4, tile=(16, 16), compression="zlib", photometric="minisblack")
    with pytest.raises(UserError, match=r"slice 0 cannot be read .4 of 4 strips or tiles of page 0 are not there"):
        open_volume(path).reader(0)


@pytest.mark.parametrize("missing", ["", "other.ome.tif"])
def test_planes_of_ome_that_are_not_there_are_named(tmp_path: Path, missing: str) -> None:
    with_file = f'<UUID FileName="{missing}">urn:uuid:b</UUID>'
    planes = '<TiffData IFD="0" FirstZ="0" PlaneCount="1"/>' + (
        f'<TiffData IFD="0" FirstZ="1" PlaneCount="1">{with_file}</TiffData>' if missing else ""
    )
    xml = f"""<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"
    UUID="urn:uuid:a"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="24"
    SizeY="20" SizeZ="2" SizeC="1" SizeT="1"><Channel ID="Channel:0:0"
    SamplesPerPixel="1"/>{planes}</Pixels></Image></OME>"""
    tifffile.imwrite(tmp_path / "scan.ome.tif", VOLUME[0], description=xml.encode(), metadata=None)
    with pytest.raises(UserError, match=f"OME-XML names what is not there .1 planes, slice 1 the first.*{missing}"):
        open_volume(str(tmp_path / "scan.ome.tif"))


@pytest.mark.parametrize("folder", ["scan[1]", "a*b?", "[!x]"])
def test_signs_in_the_names_of_folders_are_their_own(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    for number, image_YX in enumerate(VOLUME):
        tifffile.imwrite(tmp_path / folder / f"s[1]_{number}.tif", image_YX)
    for pattern in ("s*_*.tif", "*.tif", "s[1]_*.tif"):
        assert open_stack(f"{tmp_path}/{folder}/{pattern}").shape == VOLUME.shape


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_of_zarr_are_counted(tmp_path: Path, version: Any) -> None:
    options: dict[str, Any] = {"shards": (2, 20, 24)} if version == 3 else {}
    array = zarr.create_array(
        tmp_path / "scan.zarr",
        shape=VOLUME.shape,
        dtype="u2",
        chunks=(1, 10, 24),
        fill_value=3,
        zarr_format=version,
        **options,
    )
    array[0] = VOLUME[0]
    given = open_volume(str(tmp_path / "scan.zarr"))
    missing, count = (1, 2) if version == 3 else (4, 6)
    assert f"{missing} of {count} chunks are not stored and are read as 3" in given.metadata.remarks[0]
    assert np.asarray(given.reader(2)).min() == np.asarray(given.reader(2)).max() == 3
    array[:] = VOLUME + 1
    assert not open_volume(str(tmp_path / "scan.zarr")).metadata.remarks


TURNED = [(274, 3, 1, 4, False), (286, 5, 1, (7, 2), True), (287, 5, 1, (3, 1), True)]


def tags_of(path: Path) -> list[dict[int, Any]]:
    """Return orientation and positions, by the tag's code, of each page."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = []
    for file in files:
        with tifffile.TiffFile(file) as tiff:
            found += [{tag.code: tag.value for tag in page.tags if tag.code in (274, 286, 287)} for page in tiff.pages]
    return found


@pytest.mark.parametrize("part", [Part(), Part("1:3", "2:20,4:24")])
@pytest.mark.parametrize("form", ["plain", "imagej", "ome", "sequence"])
def test_orientation_and_positions_of_a_tiff_are_kept_or_named(tmp_path: Path, form: str, part: Part) -> None:
    options: dict[str, Any] = {"extratags": TURNED, "photometric": "minisblack", "metadata": {"axes": "ZYX"}}
    if form == "sequence":
        (tmp_path / "scan").mkdir()
        for number, image_YX in enumerate(VOLUME):
            tifffile.imwrite(tmp_path / "scan" / f"s{number}.tif", image_YX, extratags=TURNED, metadata=None)
    else:
        forms = {form: True} if form != "plain" else {}
        tifffile.imwrite(tmp_path / "scan.tif", VOLUME, **forms, **options)
    given = part.of(open_volume(str(tmp_path / ("scan" if form == "sequence" else "scan.tif"))))
    told = "; ".join(given.metadata.remarks)
    assert ": whole results of its own format alone keep its position on a page" in told
    assert ": results of its own format alone keep its orientation 4" in told
    first, *others = tags_of(Path(result(given, "sequence" if form == "sequence" else "tiff", tmp_path).path))
    assert first == {274: 4} | ({286: (7, 2), 287: (3, 1)} if part == Part() else {})
    assert {one[274] for one in others} <= {4}


def test_slices_of_a_sequence_lie_alike(tmp_path: Path) -> None:
    for number, orientation in enumerate((1, 4)):
        tag = [(274, 3, 1, orientation, True)]
        tifffile.imwrite(tmp_path / f"s{number}.tif", VOLUME[0], extratags=tag, metadata=None)
    with pytest.raises(UserError, match=r"s1\.tif: has orientation 4, and .*s0\.tif another"):
        open_volume(str(tmp_path / "s*.tif"))


def test_what_lies_in_voxels_of_the_whole_image_moves_with_a_region_or_is_named(tmp_path: Path) -> None:
    given = imagej(tmp_path, xorigin=10, yorigin=2.5, zorigin=0)
    assert given.metadata.remarks[-1].endswith("own format alone keep ImageJ's xorigin, ImageJ's yorigin")
    with tifffile.TiffFile(result(Part("1:3", "2:20,4:24").of(given), "tiff", tmp_path).path) as tiff:
        assert [tiff.imagej_metadata[f"{axis}origin"] for axis in "xyz"] == [6, 0.5, -1]
    plane = {"PositionX": [1.0, 2.0, 3.0], "PositionXUnit": ["mm"] * 3}
    given = ome(tmp_path, Plane=plane)
    with tifffile.TiffFile(given.path) as tiff:
        xml = tiff.ome_metadata.replace("<Pixels ", '<StageLabel Name="a" X="1"/><Pixels ')
        xml = xml.replace("</Image>", '<ROIRef ID="ROI:0"/></Image><ROI ID="ROI:0"/>')
    tifffile.imwrite(given.path, VOLUME, description=xml.encode(), metadata=None)
    given = open_volume(given.path)
    assert given.metadata.remarks[0].endswith("format alone keep OME's Plane, OME's StageLabel, OME's ROI")
    with tifffile.TiffFile(result(given, "tiff", tmp_path).path) as tiff:
        assert all(word in tiff.ome_metadata for word in ('PositionX="3.0"', "StageLabel", "<ROI ", "ROIRef"))
    with tifffile.TiffFile(result(Part("1:3").of(given), "tiff", tmp_path).path) as tiff:
        assert not any(word in tiff.ome_metadata for word in ("PositionX", "StageLabel", "ROI"))


def test_a_translation_of_zarr_is_named(tmp_path: Path) -> None:
    ngff(tmp_path, "micrometer", "micrometer", "micrometer")
    root = zarr.open_group(tmp_path / "scan.zarr", mode="a")
    (image,) = root.attrs["multiscales"]
    image["datasets"][0]["coordinateTransformations"].append({"type": "translation", "translation": [1.0, 2.0, 3.0]})
    root.attrs["multiscales"] = [image]
    (told,) = open_volume(str(tmp_path / "scan.zarr")).metadata.remarks
    assert told.endswith(": results of its own format alone keep its translation [1.0, 2.0, 3.0]")
