"""The metadata of TIFF files: tags and the descriptions of ImageJ and OME, which are read here and written again."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from itertools import product
from typing import Any
from xml.etree import ElementTree

import numpy as np

from cocodiff.jobs.declared import read_declared
from cocodiff_eval.data.volume import (
    Metadata,
    NewVolume,
    Sides,
    format_only_remarks,
    one_unit,
    plain,
    start_of,
    unit_symbol,
)

SOFTWARE, DATE, X_RESOLUTION, Y_RESOLUTION, RESOLUTION_UNIT = 305, 306, 282, 283, 296
ORIENTATION, POSITIONS = 274, (286, 287)  # sides at which row and column 0 lie; position of the image on a page
NODATA = 42113  # GDAL's tag, a text: the value of missing voxels
# Tags that are kept as they are: document, maker, model, page, artist, host, copyright, and those named above.
KEPT = (269, 271, 272, 285, SOFTWARE, DATE, 315, 316, 33432, ORIENTATION, *POSITIONS, NODATA)
MICROMETERS = {2: 25400.0, 3: 10000.0, 4: 1000.0, 5: 1.0}  # length of a resolution unit, by its number
OME_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "float64")
IMAGEJ_DTYPES = ("uint8", "uint16", "float32")
PLACED = ("ROI", "Overlays")  # entries of ImageJ's that have places in voxels of the whole image
OME_PLACED = ("Plane", "StageLabel", "ROI")  # elements that hold the place of the whole image or of something in it
IMAGEJ_BINARY = (*PLACED, "LUTs", "Plot")  # entries that only ImageJ's own files can hold
# Entries that tifffile adds to the metadata of ImageJ's files and its own.
_OF_SHAPE = {"ImageJ", "images", "slices", "frames", "channels", "hyperstack", "mode", "shape", "axes", "truncated"}
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML does not allow
NOTES = "cocodiff"  # name under which results hold their provenance


def read_metadata(tiff: Any) -> Metadata:
    """Return the metadata of an open TIFF file: of its tags, and of ImageJ's, OME's or tifffile's description.

    Args:
        tiff: a `tifffile.TiffFile`.
    """
    page = tiff.pages.first
    tags = {tag.code: tag.value for tag in page.tags if tag.code != 270}  # descriptions come twice
    details: dict[str, Any] = {
        "form": "imagej" if tiff.is_imagej else "ome" if tiff.is_ome else "plain",
        "photometric": int(page.photometric) if int(page.photometric) in (0, 1) else 1,
        "tags": [_copied(tag) for tag in page.tags if tag.code in KEPT and tag.value],
        "resolution": _resolution(tags),
        "orientation": tags.get(ORIENTATION, 1),
    }
    description, attributes, moved = page.description, dict[str, Any](), list[str]()
    size, unit, alone = _of_resolution(details["resolution"])
    if tiff.is_imagej:
        attributes = {name: value for name, value in tiff.imagej_metadata.items() if name not in _OF_SHAPE}
        details["imagej"] = {name: attributes.pop(name) for name in IMAGEJ_BINARY if name in attributes}
        size, unit, moved = _of_imagej(attributes, details["resolution"])
        alone = [name for name in details["imagej"] if name in PLACED]
        moved += [name for name in details["imagej"] if name not in PLACED]
        moved += [f"ImageJ's {name}" for name in ("xorigin", "yorigin", "zorigin") if attributes.get(name)]
        description = str(attributes.get("Info", ""))
    elif tiff.is_ome:
        try:
            (size, unit, moved), description = _of_ome(tiff.ome_metadata)
            details["xml"] = tiff.ome_metadata
            alone = [f"OME's {name}" for name in OME_PLACED if re.search(rf"[<:]{name}\b", tiff.ome_metadata)]
        except (ElementTree.ParseError, ValueError):
            details["form"] = "plain"
    elif tiff.is_shaped:
        shaped = dict((tiff.shaped_metadata or ({},))[0])
        attributes = {name: value for name, value in shaped.items() if name not in _OF_SHAPE}
        description = "" if description.startswith("{") else description
        if "voxel_size" in attributes:
            size, unit, moved = one_unit(attributes["voxel_size"], [attributes.get("unit", "")] * 3)
    moved += ["that 0 is white"] * (details["photometric"] == 0)
    alone += ["its position on a page"] * any(code in tags for code in POSITIONS)
    moved += [f"its orientation {details['orientation']}"] * (details["orientation"] != 1)
    bits, remarks = page.bitspersample, format_only_remarks(tiff.filename, alone, moved)
    if isinstance(bits, int) and page.dtype and bits not in (1, 8 * page.dtype.itemsize):
        remarks.append(f"{tiff.filename}: {bits} bits a sample; results hold the same values as {page.dtype}")
    remarks += [f"{tiff.filename}: results keep no smaller levels of its slices"] if page.subifds else []
    declared = read_declared({"_FillValue": tags.get(NODATA)}, np.dtype(page.dtype), tiff.filename)
    about = plain(attributes), details, remarks, declared
    return Metadata("tiff", tiff.series[0].axes, size, unit, description, tiff.byteorder, *about)


def _copied(tag: Any) -> tuple[Any, ...]:
    """Return a tag of a TIFF page as a tuple that `tifffile.TiffWriter.write` takes in `extratags`."""
    value = tag.value.encode() if isinstance(tag.value, str) else tag.value
    return tag.code, int(tag.dtype), tag.count, value, tag.code != ORIENTATION  # every page has its orientation


def traits_of_scan(page: Any) -> dict[str, Any]:
    """Return what all slices of a scan should share, by name: voxel size, software, day, missing value, description.

    Of the description only the words are returned, as numbers in it may differ from slice to slice.

    Args:
        page: a page of an open `tifffile.TiffFile`.
    """
    size, words = (X_RESOLUTION, Y_RESOLUTION, RESOLUTION_UNIT), re.findall("[A-Za-z]{2,}", page.description)
    found = {"voxel size": [page.tags.valueof(code) for code in size], "software": page.tags.valueof(SOFTWARE)}
    found |= {"date": str(page.tags.valueof(DATE))[:10], "description": words}
    return {**found, "value of missing voxels": page.tags.valueof(NODATA)}


def _resolution(tags: Mapping[int, Any]) -> tuple[Any, Any, int] | None:
    """Return the X and Y resolution, as fractions, and the number of their unit; None if they are missing or malformed.

    Args:
        tags: a page's values by the code of the tag.
    """
    x, y = tags.get(X_RESOLUTION), tags.get(Y_RESOLUTION)
    if not isinstance(x, tuple) or not isinstance(y, tuple) or len(x) != 2 or len(y) != 2 or not (x[0] and y[0]):
        return None
    return (x, y, int(tags.get(RESOLUTION_UNIT, 2)))


def _of_resolution(resolution: tuple[Any, Any, int] | None) -> Sides:
    """Return the voxel size that a TIFF file's resolution tags give, in micrometers, as `one_unit` returns it.

    That is the sides along slices, rows and columns, the unit, and a list with what was given if it is no size. The
    tags lack the distance of slices: it is taken to equal that of rows. Without tags, or with a unit that is no length,
    return (None, "", []).

    Args:
        resolution: X and Y resolution, as fractions, and the number of their unit; None if there are none.
    """
    if resolution is None or resolution[2] not in MICROMETERS:
        return None, "", []
    x, y = (MICROMETERS[resolution[2]] * fraction[1] / fraction[0] for fraction in resolution[:2])
    return one_unit((y, y, x), ["micrometer"] * 3)


def _of_imagej(given: Mapping[str, Any], resolution: tuple[Any, Any, int] | None) -> Sides:
    """Return the voxel size that ImageJ's metadata and the resolution tags give: sides, unit, and a list for remarks.

    ImageJ writes the units of rows and slices only if they differ from that of the columns.

    Args:
        given: ImageJ's metadata.
        resolution: as `_resolution` returns it.
    """
    unit = str(given.get("unit", ""))
    if unit in ("", "pixel", "null") or resolution is None:
        return None, "", []
    x, y = (fraction[1] / fraction[0] for fraction in resolution[:2])
    of_rows = given.get("yunit", unit)
    of_slices = given.get("zunit", unit) if "spacing" in given else of_rows
    return one_unit((given.get("spacing", y), y, x), (of_slices, of_rows, unit))


def _of_ome(xml: str) -> tuple[Sides, str]:
    """Return (voxel size, description) of the first image in OME-XML. The size is as `one_unit` returns it.

    A missing side is taken to equal that of the axis before it, in the order x, y, z. Without x no size is known.
    """
    root = ElementTree.fromstring(xml)
    pixels, text = root.find("{*}Image/{*}Pixels"), root.findtext("{*}Image/{*}Description", "")
    given = pixels.attrib if pixels is not None else {}
    names = [f"PhysicalSize{axis}" for axis in "XYZ"]
    if names[0] not in given:
        return (None, "", []), text
    there = [max(name for name in names[: place + 1] if name in given) for place in (2, 1, 0)]
    return one_unit([given[name] for name in there], [given.get(f"{name}Unit", "µm") for name in there]), text


def tiff_options(file: NewVolume) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `tifffile.TiffWriter`, and those of its `write`, for a result that keeps the input's
    metadata.

    The metadata of other formats become an OME-TIFF if the voxel size is known, else a plain TIFF.
    """
    kept = file.metadata
    details = kept.details if kept.kind in ("tiff", "sequence") else {}
    new = "ome" if kept.voxel_size and kept.unit else "plain"
    form = details.get("form", new)
    if form == "imagej" and file.dtype.name not in IMAGEJ_DTYPES:
        form = new
    if form == "ome" and file.dtype.name not in OME_DTYPES:
        form = "plain"
    notes = {NOTES: file.notes()} if file.provenance else {}
    lost = [*(POSITIONS if file.region is not None else ()), *([NODATA] if "without" in details else [])]
    options: dict[str, Any] = {
        "photometric": "miniswhite" if details.get("photometric") == 0 else "minisblack",
        "extratags": [tag for tag in details.get("tags", ()) if tag[0] not in lost],
        "software": False,  # tifffile's own name
    }
    if details.get("resolution"):
        x, y, unit = details["resolution"]
        options |= {"resolution": (x, y), "resolutionunit": unit}
    if form == "imagej":
        options["metadata"] = _imagej(file, notes)
    elif form == "ome":
        xml = _changed_ome(details["xml"], file, notes) if "xml" in details else None
        options |= {"metadata": _new_ome(file, notes)} if xml is None else {"metadata": None, "description": xml}
    else:
        options["metadata"] = _json(file, notes, details)
        if kept.description:
            options["description"] = kept.description.encode()
    ome = form == "ome" and "description" not in options
    return {"imagej": form == "imagej", "ome": ome, "byteorder": kept.byteorder}, options


def _json(file: NewVolume, notes: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a result that is a plain TIFF; tifffile writes them as JSON.

    Args:
        file: the result.
        notes: the provenance, under the name NOTES.
        details: the input's own details if it is a TIFF, else empty.
    """
    kept = file.metadata
    said: dict[str, Any] = {**kept.attributes} if details or not kept.attributes else {"attributes": kept.attributes}
    if kept.voxel_size and details.get("form") != "plain":
        said |= {"voxel_size": list(kept.voxel_size), "unit": kept.unit}
    return {**said, **notes}


def _imagej(file: NewVolume, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a result that is an ImageJ file, with places and labels moved to the result's region.

    Args:
        file: the result.
        notes: the provenance, under the name NOTES; empty for none.
    """
    of_image = PLACED if file.region is not None else ()
    binary = {name: one for name, one in file.metadata.details["imagej"].items() if name not in of_image}
    said = {**file.metadata.attributes, **binary, "axes": "ZYX"[-file.ndim :]}
    for axis, first in zip("zyx", start_of(file.region), strict=True):
        if isinstance(origin := said.get(f"{axis}origin"), int | float):  # in voxels
            said[f"{axis}origin"] = origin - first
    if isinstance(labels := said.get("Labels"), list) and file.region is not None and file.ndim == 3:
        said["Labels"] = labels[file.region.start[0] : file.region.stop[0]]
    if notes:
        said["Info"] = "\n".join(filter(None, [str(said.get("Info", "")), f"{NOTES} = {json.dumps(notes[NOTES])}"]))
    return said


def _new_ome(file: NewVolume, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument `metadata` of tifffile for an OME-TIFF of an input whose own OME metadata cannot be kept.

    It has the input's voxel size, description and attributes.

    Args:
        notes: our notes on how the file was made, by name; they become annotations.
    """
    kept, said = file.metadata, dict[str, Any](axes="ZYX"[-file.ndim :], UUID=_identity(file))
    for axis, side in zip("ZYX", kept.voxel_size or (), strict=False):
        said |= {f"PhysicalSize{axis}": side}
        if kept.unit:
            said[f"PhysicalSize{axis}Unit"] = unit_symbol(kept.unit)
    if kept.description:
        said["Description"] = NO_XML.sub("\ufffd", kept.description)
    annotations = {name: json.dumps(value) for name, value in notes.items()}
    if kept.attributes:
        annotations["attributes"] = json.dumps(kept.attributes)
    return said | ({"MapAnnotation": annotations} if annotations else {})


def _identity(file: NewVolume) -> str:
    """Return a UUID for a result's file that is equal for equal results. tifffile's own contains the time and the
    machine's address."""
    about = [file.path.name, str(file.shape), file.dtype.str, file.notes(), dict(file.metadata.attributes)]
    return str(uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(about, sort_keys=True)))


def _changed_ome(xml: str, file: NewVolume, notes: Mapping[str, Any]) -> bytes | None:
    """Return the input's OME-XML with its first image alone, changed to the result's size and dtype; None if it has no
    image.

    Args:
        xml: the input's.
        file: the result.
        notes: the provenance, under the name NOTES; empty for none.
    """
    root = ElementTree.fromstring(xml)
    space = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
    ElementTree.register_namespace("", space[1:-1])
    images = root.findall(f"{space}Image")
    pixels = images[0].find(f"{space}Pixels") if images else None
    if pixels is None:
        return None
    for other in images[1:]:
        root.remove(other)
    root.attrib.pop("UUID", None)
    sizes = {"SizeT": 1, "SizeC": 1, **dict(zip(("SizeZ", "SizeY", "SizeX"), file.shape, strict=True))}
    same = file.region is None and all(pixels.get(name) == str(side) for name, side in sizes.items())
    pixels.attrib.update({name: str(side) for name, side in sizes.items()})
    pixels.set("Type", {"float32": "float", "float64": "double"}.get(file.dtype.name, file.dtype.name))
    pixels.set("BigEndian", "true" if file.metadata.byteorder == ">" else "false")
    parts = ("TiffData", "BinData", "MetadataOnly", *(() if same else (*OME_PLACED, "ROIRef")))
    for owner, name in product((root, images[0], pixels), parts):
        for element in owner.findall(f"{space}{name}"):
            owner.remove(element)
    place = len(pixels.findall(f"{space}Channel"))
    pixels.insert(place, ElementTree.Element(f"{space}TiffData", IFD="0", PlaneCount=str(file.shape[0])))
    if notes:
        _annotate(root, space, images[0], json.dumps(notes[NOTES]))
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _annotate(root: ElementTree.Element, space: str, image: ElementTree.Element, text: str) -> None:
    """Add a map annotation to an OME-XML image, in place of one from an earlier run.

    Args:
        root: the root element.
        space: the XML namespace in braces; "" for none.
        image: the image's element.
        text: the provenance as JSON.
    """
    annotations = root.find(f"{space}StructuredAnnotations")
    if annotations is None:
        annotations = ElementTree.SubElement(root, f"{space}StructuredAnnotations")
    identity = f"Annotation:{NOTES}"
    for owner in (annotations, image):
        for old in owner.findall(f"*[@ID='{identity}']"):
            owner.remove(old)
    found = ElementTree.SubElement(annotations, f"{space}MapAnnotation", ID=identity)
    value = ElementTree.SubElement(found, f"{space}Value")
    ElementTree.SubElement(value, f"{space}M", K=NOTES).text = text
    ElementTree.SubElement(image, f"{space}AnnotationRef", ID=identity)
