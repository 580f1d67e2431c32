"""Makers of TIFF in its forms, PNG, NumPy's files and MRC: units, samples, texts, and how and where a volume lies."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mrcfile
import numpy as np
import tifffile
import zarr
from inputs_files import JUNK, LENGTHS, SHAPE, TEXTS, UNKNOWN, Draw, Given, Plain, Result, declare, in_meters
from PIL import Image

TURNED = "orient|turned|mirror"
PLACED = "origin|start|where it lies|lies at|position|Plane"
WHERE = ("turned plain", "turned slice", "turned sequence", "turned imagej", "turned ome", "at plain", "at sequence")
WHERE += ("at imagej", "at ome", "axes plain", "axes imagej", "axes ome")
MODES = {"i1": 0, "u1": 0, "i2": 1, "f4": 2, "u2": 6, "f2": 12}
IMOD = 1146047817
HEADER = mrcfile.dtypes.HEADER_DTYPE
# Numbers of the header along x, y and z.
OF_AXES = {"starts": ("nxstart", "nystart", "nzstart"), "intervals": ("mx", "my", "mz")}


def tiff(draw: Draw) -> Given:
    """Write a plain TIFF, its pages at once or one by one, as acquisition does."""
    given = Given(draw.path(".tif"), draw.voxels)
    options: Plain = {"byteorder": draw.pick(*"<>"), "photometric": draw.pick("minisblack", "miniswhite")}
    if draw.stored and draw.voxels.size:
        codecs = ("lzw", "packbits") if draw.voxels.dtype.kind in "ui" else ()
        options |= {"compression": draw.pick(None, "zlib", "zstd", "lzma", *codecs), "bigtiff": draw.maybe(0.3)}
        options |= draw.pick({}, {"tile": (16, 16)}, {"rowsperstrip": 5}, {"contiguous": False})
    if draw.maybe(0.6):
        unit = draw.by_turn(1, 2, 3, 4, 5)
        options |= {"resolution": ((4000, 7), (2000, 3)), "resolutionunit": unit}
        side = {1: None, 2: 0.0254, 3: 1e-2, 4: 1e-3, 5: 1e-6}[unit]
        given.meters = (3 / 2000 * side, 3 / 2000 * side, 7 / 4000 * side) if side else None
    if draw.odd:
        given.meters = UNKNOWN
        options |= draw.pick(
            {"metadata": {"axes": "CYX" if draw.voxels.ndim == 3 else "YX"}},
            {"metadata": {"voxel_size": draw.pick(*JUNK), "unit": draw.pick(*JUNK[1:])}},
            {"description": draw.pick("{broken", "ImageJ=", '{"shape": [1]}', "µ".encode(), "<OME/>", "<OME")},
            {"resolution": draw.pick((0, 0), (1e-9, 4e9), (1, 0)), "resolutionunit": draw.pick(1, 2, 3)},
            {"extratags": [(draw.pick(305, 306, 270, 65000, 42112), 2, 0, "odd \u00b5".encode(), True)]},
            {"software": "s" * 5000, "datetime": True},
        )
    elif draw.maybe(0.3) and draw.voxels.ndim == 3:
        opening = {name: options.pop(name) for name in ("byteorder", "bigtiff") if name in options}
        with tifffile.TiffWriter(given.path, **opening) as file:
            for page_YX in draw.voxels:
                file.write(page_YX, **options, metadata=None)
        return given
    else:
        options["metadata"] = draw.pick({}, {"unit": "nm", "voxel_size_um": 3, "note": draw.pick(*TEXTS)})
        if draw.maybe(0.4):
            sides, name = draw.sides(), draw.pick("", *LENGTHS)
            options["metadata"] = {"voxel_size": sides, "unit": name}
            given.plain = not name
            given.meters = in_meters(sides, [name or "m"] * 3)
        options["extratags"] = [(draw.pick(315, 306, 33432, 269), 2, 0, draw.pick(*TEXTS).encode(), True)]
        options |= {"software": draw.pick(*TEXTS).encode(), "description": draw.pick(*TEXTS).encode()}
    tifffile.imwrite(given.path, draw.voxels, **options)
    return given


def sequence(draw: Draw) -> Given:
    """Write a folder with a TIFF for each slice, all with the same metadata."""
    given = Given(draw.path(""), draw.voxels)
    given.path.mkdir()
    first, step, seed, names = draw.pick(0, 8, 98), draw.pick(1, 1, 2), draw.chance.random(), list[str]()
    for number, image_YX in enumerate(draw.voxels):
        one = replace(draw, folder=given.path, voxels=image_YX, stem=f"recon_{first + step * number}")
        one.chance = random.Random(seed)
        of_slice = tiff(one)
        given.meters, given.plain = of_slice.meters, of_slice.plain
        if draw.odd and draw.maybe(0.3):
            of_slice.path = of_slice.path.rename(of_slice.path.with_suffix(".tiff"))
        names.append(of_slice.path.name)
    if draw.odd:
        (given.path / draw.pick(".hidden.tif", "notes.txt", "Thumbs.db", "other_1.tif")).write_bytes(b"II*\0")

    def check(result: Result) -> str:
        found = {one.name for one in result.path.iterdir()} if result.own else {*names[result.region[0]]}
        return "" if found == {*names[result.region[0]]} else f"files {found}"

    given.checks.append(check)
    return given


def samples(draw: Draw) -> Given:
    """Write a slice whose tags say something of its samples."""
    given, image_YX = Given(draw.path(".tif"), draw.voxels[0].astype("u1")), draw.voxels[0].astype("u1")
    kind = draw.by_turn("tag", "palette", "ink", "channels", "alpha", "packed", "hole", "mixed", "short")
    options: Plain = {"photometric": "minisblack", "metadata": None}
    image: Any = image_YX
    given.kind = kind
    given.refuse(".", kind in ("tag", "palette", "ink", "mixed", "short", "hole"))
    if kind == "palette":
        options |= {"photometric": "palette", "colormap": np.arange(768, dtype="u2").reshape(3, 256)}
    elif kind == "ink":
        image, options["photometric"] = np.stack([image_YX] * 3 + [image_YX * 0 + 255], -1), "separated"
    elif kind in ("channels", "alpha"):
        image, options["photometric"] = np.stack([image_YX] * 3, -1), "rgb"
        if kind == "alpha":
            last = draw.pick(0, 255)
            image, options["extrasamples"] = np.concatenate([image, image[..., :1] * 0 + last], -1), ["unassalpha"]
            given.refuse(".", not last)
    elif kind == "packed":
        options["bitspersample"] = draw.pick(4, 12)
        given.voxels = image = (image_YX % 16).astype("u1" if options["bitspersample"] == 4 else "u2")
    elif kind == "hole":
        options |= {"tile": (16, 16), "compression": "zlib"}
    with tifffile.TiffWriter(given.path) as file:
        file.write(image, **options)
        if kind == "mixed":
            file.write(image, photometric="miniswhite", metadata=None)
    if kind == "short":
        given.path.write_bytes(given.path.read_bytes()[: -draw.chance.randint(1, 300)])
    elif kind in ("tag", "hole"):
        with tifffile.TiffFile(given.path, mode="r+b") as file:
            tags, counts = file.pages.first.tags, file.pages.first.databytecounts
            of_samples = draw.pick(3, 4, 5, 6, 8, 9, 32803, 34892, 32844, 51177, 77)
            tags[325 if kind == "hole" else 262].overwrite([0, *counts[1:]] if kind == "hole" else of_samples)
    return given


def imagej(draw: Draw) -> Given:
    """Write ImageJ's TIFF, with a unit for each axis or one for all."""
    flat = draw.voxels.ndim == 2
    sides, units = draw.sides(), draw.units([one for one in LENGTHS if one not in ("pixel", "x" * 300, "Å")])
    x, y = 8 / 3, 5 / 7
    about: Plain = {"unit": units[2].replace("µ", "\\u00B5"), "axes": "ZYX"[-draw.voxels.ndim :], "loop": True}
    about |= {f"{axis}unit": one.replace("µm", "um") for axis, one in zip("zy", units, strict=False) if one != units[2]}
    if draw.maybe(0.8) or flat:
        about["spacing"] = sides[0]
    else:
        sides[0], units[0] = y, units[1]
    about |= {"Info": draw.pick(*TEXTS), "Properties": {"a": draw.pick(*TEXTS)}}
    about["Labels"] = [f"{number} {draw.pick(*TEXTS)}" for number in range(1 if flat else len(draw.voxels))]
    roi = b"Iout" + bytes(60)
    more = {"ROI": roi, "Overlays": [roi, roi], "LUTs": [np.zeros((3, 256), "u1")], "Ranges": (0.0, 1.0)}
    about |= {name: more[name] for name in more if draw.maybe(0.4)}
    given = Given(draw.path(".tif"), draw.voxels, in_meters([sides[0], y, x], units), checks=[check_labels])
    resolution: Any = ((3, 8), (7, 5))
    if draw.odd:
        given.meters, resolution = UNKNOWN, draw.pick((0, 0), (1, 1))
        about |= draw.pick(
            {"spacing": draw.pick("abc", "-1", "nan", "0", "1e999")},
            {"unit": draw.pick("", "pixel", "furlong", "null", "x" * 300)},
            {"axes": "YX" if flat else draw.pick("CYX", "TYX")},
        )
    options = {"resolution": resolution, "metadata": about, "byteorder": draw.pick(*"<>")}
    tifffile.imwrite(given.path, draw.voxels, imagej=True, **options)
    return given


def check_labels(result: Result) -> str:
    """Return what is wrong with the labels of slices, of which a region has its own."""
    before = result.stack.metadata.attributes.get("Labels")
    if result.format != "tiff" or not isinstance(before, list):
        return ""
    with tifffile.TiffFile(result.path) as file:
        after = (file.imagej_metadata or {}).get("Labels")
    return "" if after in (None, before[result.region[0]]) else f"labels {after!s:.60}, of {before!s:.60}"


def ome(draw: Draw) -> Given:
    """Write OME-TIFF: in its XML units, planes that are not there, or another word."""
    sides, units, voxels = draw.sides(), draw.units(("nm", "µm", *LENGTHS)), np.atleast_3d(draw.voxels)
    voxels = draw.voxels if draw.voxels.ndim == 3 else draw.voxels[None]
    given, lost = Given(draw.path(".ome.tif"), draw.voxels), draw.pick(0, 0, 0, 0, 1, 2) * (len(voxels) > 1)
    plane = '<TiffData IFD="{0}" FirstZ="{0}" PlaneCount="1"/>'
    planes = "".join(plane.format(number) for number in range(len(voxels)) if not lost or number != 1)
    if lost == 2:
        planes += '<TiffData IFD="0" FirstZ="1" PlaneCount="1"><UUID FileName="no.ome.tif">urn:uuid:b</UUID></TiffData>'
    given.refuse(".", bool(lost))
    said = [f'PhysicalSize{axis}="{side!r}"' for axis, side in zip("ZYX", sides, strict=True)]
    said = [f'{one} PhysicalSize{axis}Unit="{unit}"' for one, axis, unit in zip(said, "ZYX", units, strict=True)]
    if draw.maybe(0.2):  # the schema's own unit
        said[0], units[0] = f'PhysicalSizeZ="{sides[0]!r}"', "µm"
    if draw.maybe(0.15):
        said[0], sides[0], units[0] = "", sides[1], units[1]
    given.meters = in_meters(sides, units)
    if draw.maybe(0.1):
        said[2], given.meters = 'PhysicalSizeX="two"', None
    kind = {"f4": "float", "f8": "double"}.get(voxels.dtype.str[1:], voxels.dtype.name)
    (depth, height, width), order = voxels.shape, draw.pick(*"<>")
    xml = f"""<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"
    UUID="urn:uuid:a"><Image ID="Image:0"><Description>Jürgen</Description><Pixels ID="Pixels:0" DimensionOrder="XYZCT"
    Type="{kind}" SizeX="{width}" SizeY="{height}" SizeZ="{depth}" SizeC="1" SizeT="1" {" ".join(said)}>
    <Channel ID="Channel:0:0" SamplesPerPixel="1"/>{planes}</Pixels></Image></OME>"""
    if draw.odd:
        given.meters = UNKNOWN
        other = (('SizeX="', 'SizeQ="'), ("<Pixels", "<Pixelz"), ("</", "<<"), ('SizeC="1"', 'SizeC="2"'))
        xml = xml.replace(
            *draw.pick(*other, ('SizeZ="', 'SizeT="1" SizeU="'), ("PhysicalSizeX=", 'PhysicalSizeX="-1" a='))
        )
    options: Plain = {"compression": "zlib"} if draw.stored and voxels.size else {}
    with tifffile.TiffWriter(given.path, byteorder=order) as file:
        for number, image_YX in enumerate(voxels):
            file.write(image_YX, description=None if number else xml.encode(), metadata=None, **options)
    return given


def png(draw: Draw) -> Given:
    """Write a PNG, of equal channels perhaps."""
    given, image = Given(draw.path(".png"), draw.voxels), Image.fromarray(draw.voxels)
    if draw.voxels.dtype == np.uint8 and draw.stored:
        image = image.convert(draw.pick("RGB", "RGBA", "LA", "L"))
    image.save(given.path, dpi=(0, 72) if draw.odd else None, compress_level=draw.pick(0, 9))
    return given


def npy(draw: Draw) -> Given:
    """Write NumPy's file."""
    given = Given(draw.path(".npy"), draw.voxels)
    stored = draw.voxels.astype(draw.voxels.dtype.newbyteorder(draw.pick(*"<>")))
    np.save(given.path, np.asfortranarray(stored) if draw.stored else stored)
    return given


def nodata(draw: Draw) -> Given:
    """Write a GeoTIFF's tag for voxels without data."""
    declared = declare(draw, ("_FillValue",), widest=4)
    fill = declared.attributes["_FillValue"]
    tags = [(42113, 2, 0, (f"{fill:.9g}" if fill.dtype.kind == "f" else str(fill)).encode(), False)]
    path = draw.path(".tif")
    tifffile.imwrite(path, declared.stored, extratags=tags, photometric="minisblack", metadata=None)
    return declared.given(path)


def placed(draw: Draw) -> Given:
    """Write TIFF that says how or where it lies: an orientation, a position, axes of space, time, channels."""
    what, form = draw.by_turn(*WHERE).split()
    own, path, voxels, tags = form in ("imagej", "ome"), draw.path(".tif"), draw.voxels, [(274, 3, 1, 1, False)]
    about: Plain | None = {"axes": "ZYX"} if own else None
    given = Given(path, voxels[0] if form == "slice" else voxels, UNKNOWN, kind=f"{what} {form}")
    if what == "turned":
        tags = [(274, 3, 1, draw.pick(*range(1, 9)), False)]
        given.refusals = TURNED if tags[0][3] > 1 else ""
    elif what == "at" and form == "imagej":
        about = {"axes": "ZYX", "xorigin": 12.5, "yorigin": -3.0, "zorigin": 1.0}
    elif what == "at" and form == "ome":
        where = {f"Position{axis}": [at] * len(voxels) for axis, at in (("X", 1.5), ("Y", 2.5))}
        about = {"axes": "ZYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 2.0, "Plane": where}
    elif what == "at":
        tags = [(286, 5, 1, (7, 2), True), (287, 5, 1, (9, 4), True)]
    else:
        ones = {"imagej": ("TZCYX", "TCYX"), "ome": ("TCZYX", "TCYX")}.get(form, ())
        name = draw.pick("ZYX", "TYX", "CYX", *ones)
        sides = {"Z": len(voxels), "Y": SHAPE[1], "X": SHAPE[2]} | ({"T": len(voxels)} if name == "TCYX" else {})
        voxels = voxels.reshape([sides.get(one, 1) for one in name]) if len(name) > 3 else voxels
        about, given.voxels = {"axes": name}, draw.voxels
        given.refuse("axes|time|channel", name in ("TYX", "CYX", "TCYX"))
    options: Plain = {"photometric": "minisblack", "resolution": (100, 50), "resolutionunit": 3, "metadata": about}
    if form == "sequence":
        given.path = path = draw.path("")
        path.mkdir()
        for number, image_YX in enumerate(voxels):
            other = draw.maybe(0.1) and what == "turned"
            said = [(274, 3, 1, 1, False)] if other else tags
            tifffile.imwrite(path / f"s_{number:03}.tif", image_YX, extratags=said, **options)
    else:
        voxels = voxels[0] if form == "slice" else voxels
        tifffile.imwrite(path, voxels, extratags=tags, **options, **({form: True} if own else {}))
    given.checks.append(partial(check_place, what, form, lies(path)))
    return given


def check_place(what: str, form: str, before: Plain, result: Result) -> str:
    """Return how a result lies otherwise than its input, without a word."""
    if result.told(TURNED if what == "turned" else PLACED):
        return ""
    if result.format not in ("tiff", "sequence"):
        if what == "turned" and {*before["turned"]} != {1}:
            return f"orientation {before['turned']} lost without a word in {result.format}"
        return lost_place(result, ["position"]) if what == "at" and form not in ("imagej", "ome") else ""
    after, (x, y) = lies(result.path), {"imagej": (-1, -1), "ome": (0.5, 0.25)}.get(form, (0.01, 0.02))
    wanted = [one + side * step for one, side, step in zip(before["at"], (x, y), result.start[:0:-1], strict=False)]
    right = {*after["turned"]} == {*before["turned"]} and not {*after["axes"]} & {*"TC"}
    right &= len(after["at"]) == len(wanted) and np.allclose(after["at"], wanted, atol=1e-4)
    return "" if right else f"{after}, where {before} was, from {result.start}"


def lies(path: Path) -> Plain:
    """Return how a TIFF lies: the orientation of each page, its position along X and Y, and its axes."""
    files, turned = sorted(path.iterdir()) if path.is_dir() else [path], list[int]()
    for one in files:
        with tifffile.TiffFile(one) as file:
            turned += [int(page.aspage().tags.valueof(274, 1)) for page in file.pages]
            said, xml, tags = file.imagej_metadata or {}, file.ome_metadata or "", file.pages.first.tags
            axes = file.series[0].axes
    at = [float(said[f"{axis}origin"]) for axis in "xy" if f"{axis}origin" in said]
    at += [float(one) for axis in "XY" for one in re.findall(rf'<Plane [^>]*Position{axis}="([^"]+)"', xml)[:1]]
    at += [tags[code].value[0] / tags[code].value[1] for code in (286, 287) if code in tags]
    return {"turned": turned, "at": at, "axes": axes}


def lost_place(result: Result, known: list[str]) -> str:
    """Return what another format lost without a word of what an input says of its place. Zarr may have it as a
    translation."""
    if not known or result.told(f"extended|{PLACED}"):
        return ""
    if result.format == "zarr" and "extended" not in known:
        about = zarr.open_group(result.path, mode="r").attrs.asdict()
        if "translation" in str(about.get("ome", about)["multiscales"][0]):
            return ""
    return f"{' and '.join(known)} lost without a word in {result.format}"


def read_mrc(path: Path) -> Plain:
    """Return the header and the voxels of an MRC file, as mrcfile's table of the header and IMOD's page say."""
    data = path.read_bytes()
    order = ">" if data[212:213] == b"\x11" else "<"
    head = np.frombuffer(data, HEADER.newbyteorder(order), 1)[0]
    (stamp, flags), size = np.frombuffer(data, f"{order}i4", 2, 152), int(head["nsymbt"])
    name = next(one for one, number in MODES.items() if number == head["mode"])
    if head["mode"] == 0:
        name = "u1" if stamp == IMOD and not flags & 1 else "i1"
    shape = tuple(int(head[side]) for side in ("nz", "ny", "nx"))
    found: Plain = {one: [float(head[name]) for name in names] for one, names in OF_AXES.items()}
    found["side"] = np.array(head["cella"].tolist()) / np.maximum(found["intervals"], 1)
    found["origin"] = head["origin"].tolist()
    voxels = np.frombuffer(data, np.dtype(order + name), shape[0] * shape[1] * shape[2], 1024 + size).reshape(shape)
    found |= {"order": order, "ispg": int(head["ispg"]), "label": bytes(head["label"][0])[:10], "voxels": voxels}
    return found | {"extended": data[1024 : 1024 + size], "kind": bytes(head["exttyp"])}


def mrc(draw: Draw) -> Given:
    """Write MRC. Mode 0 is signed by MRC2014 and by IMOD's first flag, unsigned where IMOD's stamp has not that flag;
    before MRC2014 IMOD's origin has the other sign, unless its third flag is set."""
    order, name, extended = draw.pick(*"<>"), draw.pick("i1", "i2", "f4", "u2", "f2", "u1"), b""
    voxels = (draw.voxels.astype("i2") - 125 * (name == "i1")).astype(name)
    flags = draw.pick(0, 4, 4, 8) if name == "u1" else draw.pick(None, 1, 1 | 4) if name == "i1" else None
    old = flags is not None and draw.maybe(0.3)
    head = np.zeros((), HEADER.newbyteorder(order))
    sides = np.float32([draw.sides(), draw.sides(), (0, 0, 0)][draw.pick(0, 0, 0, 1, 1, 2)])  # 0: not known
    head["nz"], head["ny"], head["nx"] = voxels.shape
    head["ispg"], head["mode"] = draw.pick(1, 1, 0), MODES[name]
    intervals = (voxels.shape[2], voxels.shape[1], len(voxels) if head["ispg"] else 1)
    intervals = (100, 90, 80) if draw.maybe(0.3) and head["ispg"] else intervals
    given = Given(draw.path(".mrc"), voxels, in_meters(sides.tolist(), ["Å"] * 3) if sides.any() else None)
    if draw.maybe(0.1):
        head["ispg"], intervals = 401, (*voxels.shape[:0:-1], 2)  # two volumes
        given.refuse("dimensions|volumes")
    for names, values in zip(OF_AXES.values(), ((5, 6, -7) if draw.maybe(0.5) else (0, 0, 0), intervals), strict=True):
        for one, value in zip(names, values, strict=True):
            head[one] = value
    head["cella"], head["cellb"] = tuple(sides[::-1] * intervals), (90, 90, 90)
    head["mapc"], head["mapr"], head["maps"], head["dmax"], head["dmean"], head["rms"] = 1, 2, 3, -1, -2, -1
    head["origin"] = (100.0, -50.0, 7.5) if draw.maybe(0.6) else (0, 0, 0)
    if draw.maybe(0.4):
        extended, head["exttyp"] = bytes(range(1, 129)) * draw.pick(1, 3, 24), draw.pick(b"SERI", b"FEI1", b"CCP4")
    head["nsymbt"], head["nversion"], head["map"], head["nlabl"] = len(extended), 0 if old else 20140, b"MAP ", 1
    head["machst"], head["label"][0] = [0x44, 0x44, 0, 0] if order == "<" else [0x11, 0x11, 0, 0], b"made today"
    data = bytearray(head.tobytes() + extended + voxels.astype(voxels.dtype.newbyteorder(order)).tobytes())
    if flags is not None:
        data[152:160] = np.array([IMOD, flags], f"{order}i4").tobytes()
    given.path.write_bytes(data)
    before = read_mrc(given.path)
    given.kind = f"{name} {order} flags {flags}"
    given.checks.append(partial(check_mrc, before, -1 if old and not (flags or 0) & 4 else 1))
    return given


def check_mrc(before: Plain, sign: int, result: Result) -> str:
    """Return what is wrong with the header of a result. A region's origin or start is moved by its corner, or both."""
    if result.format != "mrc":
        return lost_place(result, [name for name in ("origin", "starts", "extended") if any(before[name])])
    after, corner_xyz = read_mrc(result.path), np.array(result.start[::-1])
    wrong = [f"{one} {after[one]}, of {before[one]}" for one in ("order", "ispg", "label") if after[one] != before[one]]
    if not np.allclose(after["side"], before["side"], rtol=1e-5):
        wrong.append(f"voxels of {after['side']}, of {before['side']}")
    if not result.told("extended") and (after["extended"], after["kind"]) != (before["extended"], before["kind"]):
        wrong.append(f"extended header of {len(after['extended'])}, of {len(before['extended'])}")
    steps = {"origin": sign * np.array(before["side"]) * corner_xyz, "starts": corner_xyz}
    kept, went = (
        [np.allclose(after[one], np.array(before[one]) + times * step, rtol=1e-4) for one, step in steps.items()]
        for times in (0, 1)
    )
    right = any(went) and all(a or b for a, b in zip(kept, went, strict=True))
    if not right and not (all(kept) and not any(before["origin"] + before["starts"])):
        places = [[about[one] for one in steps] for about in (after, before)]
        wrong.append(
            "" if result.told(PLACED) else f"origin and start {places[0]}, of {places[1]}, corner {corner_xyz}"
        )
    return "; ".join(filter(None, wrong))
