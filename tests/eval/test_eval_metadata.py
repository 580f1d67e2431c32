"""What TIFF files say of their voxels: units of each axis, tags, texts, ImageJ's and OME's own things, and places of
voxels; and how units of all formats are spelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.data.volume import LENGTHS, Part, Stack, one_unit, unit_name, unit_symbol
from file_kinds import KINDS, PROVENANCE, reopened, restored, voxels, write_imagej, write_ome, write_tiff, write_zarr

VOLUME = voxels()


def test_sides_of_several_units_become_those_of_one() -> None:
    assert one_unit((500, "2", 1.0), ("nm", "µm", "um")) == ((pytest.approx(0.5), 2.0, 1.0), "micrometer", [])
    assert one_unit((1, 2, 3), ("", "", "")) == ((1.0, 2.0, 3.0), "", []) and one_unit(None, [""] * 3) == (None, "", [])
    unfit = ((1, 2, 0), (1, 2, "two"), (1, float("nan"), 2), (1, 2), 7)
    others = [((1, 2, 3), ("pixel",) * 3), ((1, 2, 3), ("µm", "", "µm"))]
    for sides, units in (*others, *((one, ("µm",) * 3) for one in unfit)):
        size, unit, (told,) = one_unit(sides, units)
        assert (size, unit) == (None, "") and "the voxel size" in told
    assert all(unit_name(unit_symbol(name)) == name for name in LENGTHS)
    names = [unit_name(word) for word in ("Mm", "mm", "microns", "cm.", "metre")]
    assert names == ["megameter", "millimeter", "micrometer", "centimeter", "meter"]


def imagej(path: Path, **about: Any) -> Stack:
    return open_volume(write_imagej(path, VOLUME, **about))


def ome(path: Path, **about: Any) -> Stack:
    return open_volume(write_ome(path, VOLUME, **about))


def test_a_unit_that_is_no_length_is_kept_by_its_own_format_alone(tmp_path: Path) -> None:
    given = ome(tmp_path, PhysicalSizeXUnit="reference frame", PhysicalSizeZUnit="pm")
    assert given.metadata.voxel_size is None and "the voxel size" in given.metadata.remarks[0]
    result = reopened(given, "zarr", tmp_path)
    axes = zarr.open_group(result.path, mode="r").attrs["multiscales"][0]["axes"]
    assert result.metadata.voxel_size is None and all("unit" not in axis for axis in axes)
    with tifffile.TiffFile(restored(given, "tiff", tmp_path).path) as tiff:
        assert 'PhysicalSizeXUnit="reference frame"' in tiff.ome_metadata
    thin = ome(tmp_path, **{f"PhysicalSize{axis}Unit": "pm" for axis in "ZYX"})
    assert reopened(thin, "h5", tmp_path).metadata.voxel_size == pytest.approx((25e-4, 5e-7, 2.5e-7), rel=1e-9)


def test_a_word_that_is_no_number_loses_the_size_alone(tmp_path: Path) -> None:
    given = imagej(tmp_path, spacing="abc")
    assert given.metadata.voxel_size is None and given.metadata.attributes["unit"] == "um"
    path = write_tiff(tmp_path, VOLUME[0], resolution=(10, 10), resolutionunit=3, metadata={"unit": "nm"})
    assert open_volume(path).metadata.unit == "micrometer"


def test_what_imagej_draws_is_kept_and_said_once(tmp_path: Path) -> None:
    roi, labels = b"Iout" + bytes(60), [f"é{number}" for number in range(6)]
    luts = [np.zeros((3, 256), "u1")]
    given = imagej(tmp_path, ROI=roi, Overlays=[roi, roi], LUTs=luts, Info="Jürgen", Labels=labels)
    told = [
        f"{which} of its own format alone keep {what}"
        for which, what in (("whole results", "ROI, Overlays"), ("results", "LUTs"))
    ]
    assert [line.partition(": ")[2] for line in given.metadata.remarks] == told
    for volume, wanted in ((given, labels), (Part("1:3").of(given), labels[1:3])):
        with tifffile.TiffFile(restored(volume, "same", tmp_path).path) as tiff:
            about = tiff.imagej_metadata
        drawn = {"ROI": roi, "Overlays": [roi, roi]} if volume is given else {}
        assert {name: about[name] for name in about if name in ("ROI", "Overlays")} == drawn
        assert about["Info"].startswith("Jürgen") and about["Labels"] == wanted
    for word in ("zarr", "h5", "sequence"):
        assert reopened(given, word, tmp_path / word).shape == VOLUME.shape


def test_tags_are_kept(tmp_path: Path) -> None:
    path = restored(open_volume(KINDS["white"].file(tmp_path, VOLUME, ">")), "same", tmp_path).path
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages.first
        tags = {tag.name: tag.value for tag in page.tags if tag.code != 270}
        assert page.photometric == 0 and page.description == "a tooth" and tiff.byteorder == ">"
        assert tiff.shaped_metadata[0]["beam"] == 30 and tiff.shaped_metadata[0]["cocodiff"] == PROVENANCE
    assert (tags["XResolution"], tags["ResolutionUnit"], tags["Software"]) == ((40000, 1), 3, "recon 3")


def test_texts_outside_ascii_are_kept(tmp_path: Path) -> None:
    tags: Any = {"extratags": [(315, 2, 0, "Jürgen".encode(), True)], "software": "größer".encode()}
    given = open_volume(write_tiff(tmp_path, VOLUME[0], description="a\x01b", metadata=None, **tags))
    with tifffile.TiffFile(restored(given, "tiff", tmp_path).path) as tiff:
        found = tiff.pages.first.tags
        assert (found[315].value, found[305].value) == ("Jürgen", "größer")
    store = write_zarr(tmp_path, VOLUME)
    zarr.open_group(store, mode="a").attrs["description"] = "a\x01b"
    assert reopened(open_volume(store), "tiff", tmp_path).metadata.description == "a\ufffdb"


def test_names_and_descriptions_of_a_sequence_are_kept(tmp_path: Path) -> None:
    given = open_volume(KINDS["sequence"].file(tmp_path, VOLUME))
    names = [f"recon_{number}.tiff" for number in range(8, 14)]
    assert [Path(name).name for name in given.metadata.details["files"]] == names
    folder = restored(Part("1:4").of(given), "same", tmp_path).path
    assert {path.name for path in folder.iterdir()} == {*names[1:4]}
    with tifffile.TiffFile(folder / "recon_10.tiff") as tiff:
        assert tiff.pages.first.description == "slice 2"


def test_names_of_slices_beyond_99999_have_one_width(tmp_path: Path) -> None:
    many = replace(open_volume(write_zarr(tmp_path, VOLUME)), shape=(100_001, *VOLUME.shape[1:]))
    many = replace(many, reader=lambda number, read=many.reader: read(number % len(VOLUME)))
    folder = restored(Part("99998:100001").of(many), "sequence", tmp_path).path
    assert sorted(path.name for path in folder.iterdir()) == [f"slice_{n:06}.tif" for n in range(99_998, 100_001)]


def test_smaller_levels_of_a_tiff_are_named(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "scan.tif") as writer:
        writer.write(VOLUME[0], subifds=1)
        writer.write(VOLUME[0, ::2, ::2], subfiletype=1)
    assert "no smaller levels" in open_volume(f"{tmp_path}/scan.tif").metadata.remarks[0]


@pytest.mark.parametrize("bits", [4, 12])
def test_packed_samples_come_back_unpacked(tmp_path: Path, bits: int) -> None:
    image = (VOLUME[0] % 16).astype("u1" if bits == 4 else "u2")
    given = open_volume(write_tiff(tmp_path, image, bitspersample=bits, metadata=None))
    assert f"{bits} bits a sample; results hold the same values as {image.dtype}" in given.metadata.remarks[0]
    assert np.array_equal(reopened(given, "tiff", tmp_path).reader(0), image)


@pytest.mark.parametrize("folder", ["scan[1]", "a*b?", "[!x]"])
def test_signs_in_the_names_of_folders_are_their_own(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    for number, image_YX in enumerate(VOLUME):
        tifffile.imwrite(tmp_path / folder / f"s[1]_{number}.tif", image_YX)
    for pattern in ("s*_*.tif", "*.tif", "s[1]_*.tif"):
        assert open_stack(f"{tmp_path}/{folder}/{pattern}").shape == VOLUME.shape


TURNED = [(274, 3, 1, 4, False), (286, 5, 1, (7, 2), True), (287, 5, 1, (3, 1), True)]


@pytest.mark.parametrize("part", [Part(), Part("1:3", "2:20,4:24")], ids=["whole", "part"])
@pytest.mark.parametrize("form", ["plain", "imagej", "ome", "sequence"])
def test_orientation_and_positions_are_kept_or_named(tmp_path: Path, form: str, part: Part) -> None:
    if form == "sequence":
        path = tmp_path / "scan"
        path.mkdir()
        for number, image_YX in enumerate(VOLUME):
            tifffile.imwrite(path / f"s{number}.tif", image_YX, extratags=TURNED, metadata=None)
    else:
        path = Path(write_tiff(tmp_path, VOLUME, extratags=TURNED, **({form: True} if form != "plain" else {})))
    given = part.of(open_volume(str(path)))
    told = "; ".join(given.metadata.remarks)
    assert ": whole results of its own format alone keep its position on a page" in told
    assert ": results of its own format alone keep its orientation 4" in told
    result, found = restored(given, "same", tmp_path).path, list[dict[int, Any]]()
    for file in sorted(result.iterdir()) if form == "sequence" else [result]:
        with tifffile.TiffFile(file) as tiff:
            found += [{tag.code: tag.value for tag in page.tags if tag.code in (274, 286, 287)} for page in tiff.pages]
    assert found[0] == {274: 4} | ({286: (7, 2), 287: (3, 1)} if part == Part() else {})
    assert {one[274] for one in found} == {4}


def test_origins_of_imagej_move_with_a_part(tmp_path: Path) -> None:
    given = imagej(tmp_path, xorigin=10, yorigin=2.5, zorigin=0)
    assert given.metadata.remarks[-1].endswith("own format alone keep ImageJ's xorigin, ImageJ's yorigin")
    with tifffile.TiffFile(restored(Part("1:3", "2:20,4:24").of(given), "tiff", tmp_path).path) as tiff:
        assert [tiff.imagej_metadata[f"{axis}origin"] for axis in "xyz"] == [6, 0.5, -1]


def test_places_in_the_whole_image_of_ome_are_kept_by_whole_results(tmp_path: Path) -> None:
    given = ome(tmp_path, Plane={"PositionX": [float(n) for n in range(6)], "PositionXUnit": ["mm"] * 6})
    with tifffile.TiffFile(given.path) as tiff:
        xml = tiff.ome_metadata.replace("<Pixels ", '<StageLabel Name="a" X="1"/><Pixels ')
    xml = xml.replace("</Image>", '<ROIRef ID="ROI:0"/></Image><ROI ID="ROI:0"/>')
    given = open_volume(write_tiff(tmp_path, VOLUME, description=xml.encode(), metadata=None))
    assert given.metadata.remarks[0].endswith("format alone keep OME's Plane, OME's StageLabel, OME's ROI")
    for volume in (given, Part("1:3").of(given)):
        with tifffile.TiffFile(restored(volume, "tiff", tmp_path).path) as tiff:
            places = ('PositionX="3.0"', "StageLabel", "<ROI ", "ROIRef")
            assert [word in tiff.ome_metadata for word in places] == [volume is given] * 4
