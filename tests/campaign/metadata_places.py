"""Files that say where a volume lies and how it is turned, for round trips: MRC headers, TIFF's orientation, position
and axes."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import zarr
from metadata_cases import Given, Result

MODES = {"i1": 0, "u1": 0, "i2": 1, "f4": 2, "u2": 6, "f2": 12}
IMOD = 1146047817
PLACE = "origin|start|extended|where it lies|lies at|position"


def write_mrc(path: Path, voxels: np.ndarray, order: str, **said: Any) -> None:
    """Write MRC from the page of the format alone: mrcfile writes no big-endian files and no IMOD flags."""
    nz, ny, nx = voxels.shape
    ispg, extended = said.get("ispg", 1), said.get("extended", b"")
    mx, my, mz = said.get("sampling", (nx, ny, nz if ispg else 1))
    side_zyx = said.get("side", (1.0, 1.0, 1.0))
    header = bytearray(1024)

    def put(offset: int, form: str, *values: Any) -> None:
        struct.pack_into(order + form, header, offset, *values)

    put(0, "4i", nx, ny, nz, MODES[voxels.dtype.str[1:]])
    put(16, "3i", *said.get("starts", (0, 0, 0)))  # x, y, z, as all below
    put(28, "3i", mx, my, mz)
    put(40, "6f", side_zyx[2] * mx, side_zyx[1] * my, side_zyx[0] * mz, 90, 90, 90)
    put(64, "3i", 1, 2, 3)
    put(76, "3f", 0, -1, -2)
    put(88, "2i", ispg, len(extended))
    header[104:108] = said.get("kind", b"\0\0\0\0")
    put(108, "i", said.get("version", 20140))
    if "flags" in said:
        put(152, "2i", IMOD, said["flags"])
    put(196, "3f", *said.get("origin", (0, 0, 0)))
    header[208:212], header[212:216] = b"MAP ", b"\x44\x44\0\0" if order == "<" else b"\x11\x11\0\0"
    put(216, "fi", -1, 1)
    header[224:234] = b"made today"
    path.write_bytes(bytes(header) + extended + voxels.astype(voxels.dtype.newbyteorder(order)).tobytes())


def read_mrc(path: Path) -> dict[str, Any]:
    """Return the header and the voxels of an MRC file, as the format's page and IMOD's say."""
    data = path.read_bytes()
    order = ">" if data[212:213] == b"\x11" else "<"

    def get(offset: int, form: str) -> tuple[Any, ...]:
        return struct.unpack_from(order + form, data, offset)

    nx, ny, nz, mode = get(0, "4i")
    sampling, cell, (ispg, size) = get(28, "3i"), get(40, "3f"), get(88, "2i")
    (stamp, flags), origin, starts = get(152, "2i"), get(196, "3f"), get(16, "3i")
    name = next(one for one, number in MODES.items() if number == mode)
    if mode == 0:
        name = "u1" if stamp == IMOD and not flags & 1 else "i1"
    voxels = np.frombuffer(data, np.dtype(order + name), nx * ny * nz, 1024 + size).reshape(nz, ny, nx)
    side = tuple(a / b for a, b in zip(cell, sampling, strict=True))
    found = {"order": order, "voxels": voxels, "side": side, "ispg": ispg, "mz": sampling[2], "origin": origin}
    return found | {
        "starts": starts,
        "extended": data[1024 : 1024 + size],
        "kind": data[104:108],
        "label": data[224:234],
    }


def mrc(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    path, order, name = folder / "scan.mrc", chance.choice("<>"), chance.choice(["i2", "f4", "u2", "f2"])
    said: dict[str, Any] = {"side": (2.5, 2.0, 2.0), "ispg": chance.choice([1, 1, 0])}
    if chance.random() < 0.6:
        said["origin"] = (100.0, -50.0, 7.5)
    if chance.random() < 0.5:
        said["starts"] = (5, 6, -7)
    if chance.random() < 0.4:
        length = chance.choice([128, 4 * 88, 4 * 768])
        said |= {
            "extended": bytes(range(1, 129)) * (length // 128 + 1),
            "kind": chance.choice([b"SERI", b"FEI1", b"CCP4"]),
        }
        said["extended"] = said["extended"][:length]
    if chance.random() < 0.3 and said["ispg"]:
        said["sampling"] = (100, 90, 80)
    if chance.random() < 0.15:
        said["side"] = (0.0, 0.0, 0.0)  # not known
    if chance.random() < 0.1:
        said |= {"ispg": 401, "sampling": (26, 22, 2)}  # two volumes
    given = of_mrc(path, voxels.astype(name), order, said)
    if said["ispg"] == 401:
        given.voxels, given.refusals = None, "dimensions|volumes"
    return given


def mrc_bytes(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write mode 0: signed by MRC2014 and by IMOD's first flag, unsigned where IMOD's stamp has not that flag."""
    flags = chance.choice([None, 1, 1 | 4, 0, 4, 4, 8])
    name = "i1" if flags is None or flags & 1 else "u1"
    said: dict[str, Any] = {"side": (2.0, 2.0, 2.0)} | ({} if flags is None else {"flags": flags})
    if chance.random() < 0.6:
        said["origin"] = (10.0, -5.0, 7.5)
    if flags is not None and chance.random() < 0.3:
        said["version"] = 0  # before MRC2014 IMOD's origin has the other sign, unless its third flag is set
    whole = (voxels - 125).astype("i1") if name == "i1" else voxels.astype("u1")
    return of_mrc(folder / "scan.mrc", whole, chance.choice("<>"), said)


def of_mrc(path: Path, voxels: np.ndarray, order: str, said: dict[str, Any]) -> Given:
    write_mrc(path, voxels, order, **said)
    before = read_mrc(path)

    def check(result: Result) -> str:
        known = [name for name in ("origin", "starts", "extended") if any(before[name])]
        if result.format != "mrc":
            return elsewhere(result, known)
        after, wrong = read_mrc(result.path), list[str]()
        if after["order"] != order:
            wrong.append(f"byte order {after['order']} of {order}")
        if not np.allclose(after["side"], before["side"], rtol=1e-5):
            wrong.append(f"voxels of {after['side']}, of {before['side']}")
        if after["ispg"] != before["ispg"] or (before["mz"] == 1 and after["mz"] != 1):
            wrong.append(f"space group {after['ispg']} and mz {after['mz']}, of {before['ispg']} and {before['mz']}")
        if after["label"] != before["label"]:
            wrong.append(f"label {after['label']}")
        sign = -1 if said.get("version") == 0 and not said["flags"] & 4 else 1
        wrong.append(moved(result, before, after, known, sign))
        if not result.told("extended") and (after["extended"], after["kind"]) != (before["extended"], before["kind"]):
            cut = result.shape[0] < before["voxels"].shape[0] and len(after["extended"])
            wrong.append("" if cut else f"extended header of {len(after['extended'])}, of {len(before['extended'])}")
        return "; ".join(filter(None, wrong))

    return Given(path, voxels, kind=f"{voxels.dtype} {order} {'+'.join(said)}", check=check, more=said)


def moved(result: Result, before: dict[str, Any], after: dict[str, Any], known: list[str], sign: int) -> str:
    """Return how origin and start are wrong. A region's are moved by its corner: one of them, or both."""
    if result.told("origin|start|where it lies|lies at"):
        return ""
    corner_xyz = np.array(result.start[::-1])
    kept = [np.allclose(after[one], before[one], atol=1e-4) for one in ("origin", "starts")]
    steps = sign * np.array(before["side"]) * corner_xyz, corner_xyz
    went = [
        np.allclose(after[one], np.array(before[one]) + step, atol=1e-3)
        for one, step in zip(("origin", "starts"), steps, strict=True)
    ]
    right = all(kept) if not corner_xyz.any() else any(went) and all(a or b for a, b in zip(kept, went, strict=True))
    if not right and not ({"origin", "starts"} & {*known}) and all(kept):
        return ""  # it lay nowhere
    found = f"origin {after['origin']}, start {after['starts']}"
    return "" if right else f"{found}; the input has {before['origin']}, {before['starts']}, corner {corner_xyz}"


def elsewhere(result: Result, known: list[str]) -> str:
    """Return what another format lost without a word of what an input says of its place. Zarr may have it as a
    translation."""
    if not known or result.told(PLACE):
        return ""
    if result.format == "zarr":
        about = zarr.open_group(result.path, mode="r").attrs.asdict()
        image = about.get("ome", about)["multiscales"][0]
        if "translation" in str(image) and "extended" not in known:
            return ""
    return f"{' and '.join(known)} lost without a word in {result.format}"


def turned(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write TIFF with an orientation: a stack, a slice, a sequence, ImageJ's, OME's."""
    form = chance.choice(["stack", "slice", "sequence", "mixed", "imagej", "ome"])
    number = chance.choice([1, 2, 3, 4, 5, 6, 7, 8])
    options: dict[str, Any] = {"photometric": "minisblack", "extratags": [(274, 3, 1, number, False)]}
    path, numbers = folder / "scan.tif", {number}
    if form in ("sequence", "mixed"):
        path = folder / "scan"
        path.mkdir()
        numbers = {number, 1} if form == "mixed" else numbers
        for index, image_YX in enumerate(voxels):
            said = 1 if form == "mixed" and index == 1 else number
            tifffile.imwrite(path / f"s_{index:03}.tif", image_YX, photometric="minisblack", metadata=None,
                             extratags=[(274, 3, 1, said, False)])  # fmt: skip
    elif form in ("imagej", "ome"):
        tifffile.imwrite(path, voxels, **{form: True}, **options, metadata={"axes": "ZYX"})
    else:
        voxels = voxels if form == "stack" else voxels[0]
        tifffile.imwrite(path, voxels, **options, metadata=None)
    given = Given(path, voxels, kind=f"{form} {number}", refusals="" if numbers == {1} else "orient|turned|mirror")
    before = orientations(path)

    def check(result: Result) -> str:
        if numbers == {1} or result.told("orient|turned|mirror"):
            return ""
        if result.format not in ("tiff", "sequence"):
            return f"orientation {numbers} lost without a word in {result.format}"
        first, after = result.start[0], orientations(result.path)
        wanted = before[first : first + len(after)] if len(before) == len(voxels) else before
        return "" if after == wanted or {*after} == {*before} else f"orientation {after}, of {before}"

    given.check = check
    return given


def orientations(path: Path) -> list[int]:
    """Return the orientation tag of each page; 1 where there is none."""
    found = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with tifffile.TiffFile(file) as tiff:
            found += [int(page.aspage().tags.valueof(274, 1)) for page in tiff.pages]
    return found


def placed(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write TIFF with XPosition and YPosition, ImageJ's origin, or OME's positions of planes."""
    form, path = chance.choice(["tags", "tags", "imagej", "ome"]), folder / "scan.tif"
    options: dict[str, Any] = {"photometric": "minisblack", "resolution": (100, 50), "resolutionunit": 3}
    if form == "tags":
        options["extratags"] = [(286, 5, 1, (7, 2), True), (287, 5, 1, (9, 4), True)]
        tifffile.imwrite(path, voxels, **options, metadata=None)
    elif form == "imagej":
        said = {"axes": "ZYX", "unit": "um", "spacing": 2.0, "xorigin": 12.5, "yorigin": -3.0, "zorigin": 1.0}
        tifffile.imwrite(path, voxels, imagej=True, metadata=said, **options)
    else:
        where = {"PositionX": [1.5] * len(voxels), "PositionY": [2.5] * len(voxels)}
        said = {"axes": "ZYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 2.0, "Plane": where}
        tifffile.imwrite(path, voxels, ome=True, metadata=said, photometric="minisblack")

    def check(result: Result) -> str:
        if result.told("position|origin|where it lies|lies at|Plane"):
            return ""
        if result.format not in ("tiff", "sequence"):
            return "" if form != "tags" else elsewhere(result, ["XPosition and YPosition"])
        _, y, x = result.start
        sides = {"tags": (0.01, 0.02), "imagej": (-1, -1), "ome": (0.5, 0.25)}[form]
        before = {"tags": (3.5, 2.25), "imagej": (12.5, -3.0), "ome": (1.5, 2.5)}[form]
        wanted = tuple(one + side * step for one, side, step in zip(before, sides, (x, y), strict=True))
        found = position(result.path, form)
        right = len(found) == 2 and np.allclose(found, wanted, atol=1e-4)
        return "" if right else f"position {found}, where {wanted} is right"

    return Given(path, voxels, kind=form, check=check)


def position(path: Path, form: str) -> tuple[float, ...]:
    """Return X and Y as a TIFF has them; () where it has none."""
    path = min(path.iterdir()) if path.is_dir() else path
    with tifffile.TiffFile(path) as tiff:
        if form == "imagej":
            said = tiff.imagej_metadata or {}
            return tuple(float(said[f"{axis}origin"]) for axis in "xy" if f"{axis}origin" in said)
        if form == "ome":
            found = [re.search(rf'<Plane [^>]*Position{axis}="([^"]+)"', tiff.ome_metadata or "") for axis in "XY"]
            return tuple(float(one[1]) for one in found if one)
        tags = tiff.pages.first.tags
        return tuple(tags[code].value[0] / tags[code].value[1] for code in (286, 287) if code in tags)


def axes(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write TIFF with axes of ImageJ, OME or tifffile: of space, of time, of channels, of none."""
    form = chance.choice(["imagej", "ome", "shaped", "plain"])
    name = chance.choice(["ZYX", "TYX", "CYX", "ones", "time and ones"] if form != "plain" else ["none"])
    path = folder / ("scan.ome.tif" if form == "ome" else "scan.tif")
    options: dict[str, Any] = {"photometric": "minisblack", **({form: True} if form in ("imagej", "ome") else {})}
    stored = voxels
    if name in ("ones", "time and ones"):
        letters = "TZCYX" if form == "imagej" else "TCZYX"
        along = "Z" if name == "ones" else "T"
        stored = voxels.reshape([{"Y": 22, "X": 26, along: len(voxels)}.get(one, 1) for one in letters])
        options["metadata"] = {"axes": letters}
    elif form != "plain":
        options["metadata"] = {"axes": name}
    tifffile.imwrite(path, stored, **options)
    refused = name in ("TYX", "CYX", "time and ones")
    given = Given(path, None if refused else voxels, kind=f"{form} {name}", refusals="axes|time|channel" * refused)

    def check(result: Result) -> str:
        if not result.own or form not in ("imagej", "ome"):
            return ""
        with tifffile.TiffFile(result.path) as tiff:
            found = tiff.series[0].axes
        return "" if found.endswith("YX") and "Z" in found and not {*found} & {*"TC"} else f"axes {found}"

    given.check = check
    return given
