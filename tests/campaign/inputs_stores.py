"""Makers of HDF5, netCDF and Zarr: names and links, voxels in other files or nowhere, what attributes say of values,
dimensions and units."""

from __future__ import annotations

import base64
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np
import zarr
from inputs_files import (
    AXES,
    JUNK,
    KINDS,
    LENGTHS,
    SHAPE,
    TEXTS,
    UNKNOWN,
    Draw,
    Given,
    Plain,
    Result,
    declare,
    in_meters,
    mutated,
    same,
)

PLACES = ("entry/instrument/detector/data", "exchange/data", "data", "scan/tomo/data")
# Kinds of links, the last of which lead to another file as well.
LINKS = ("hard", "beside", "group", "circle", "soft", "chain", "soft group", "nowhere", "own file")
DEEPEST = 6  # groups that a name leads through


def store_voxels(h5: h5py.File, place: str, voxels: np.ndarray, draw: Draw) -> h5py.Dataset:
    options: Plain = {}
    if voxels.size and voxels.ndim and (draw.stored or draw.maybe(0.5)):
        options = {"chunks": tuple(min(side, draw.pick(1, 7, 16)) for side in voxels.shape)}
        options |= {"compression": draw.pick(None, "gzip", "lzf"), "shuffle": draw.maybe(0.5)}
        options |= {"fletcher32": draw.maybe(0.3), "maxshape": (None,) * voxels.ndim}
    return h5.create_dataset(place, data=voxels.astype(voxels.dtype.newbyteorder(draw.pick(*"<>"))), **options)


def hdf5(draw: Draw) -> Given:
    """Write one dataset: with its voxel's size, and texts; stored in part; under many names, by any of which it is
    given; in another file, to which links lead; or with junk for attributes."""
    plain = draw.stem != "scan" or draw.voxels.shape != SHAPE or draw.odd or draw.voxels.dtype.kind in "bc"
    file = raw = draw.path(".h5" if plain else draw.pick(".h5", ".nxs", ".hdf5"))
    place, how = "exchange/data" if plain else draw.pick(*PLACES), draw.by_turn("whole", "none", "chunks", "other file")
    other, taken = (
        not plain and how == "other file",
        [] if plain else draw.chance.sample(LINKS, draw.chance.randint(0, 4)),
    )
    given, sides, parent = (
        Given(file, draw.voxels, kind=" + ".join([how, *taken])),
        draw.sides(),
        PurePosixPath(place).parent,
    )
    if other:
        raw, taken = draw.path("-raw.h5"), [kind for kind in taken if kind in LINKS[4:]]
    with h5py.File(raw, "w") as h5:
        if plain or taken or how in ("whole", "other file"):
            data = store_voxels(h5, place, draw.voxels, draw)
        else:
            chunks = (1, 11, 13) if how == "chunks" else None
            data = h5.create_dataset(place, SHAPE, draw.voxels.dtype, chunks=chunks, fillvalue=7)
            given.voxels = np.full(SHAPE, 7, draw.voxels.dtype)
            if how == "chunks":
                data[1], given.voxels[1] = draw.voxels[1], draw.voxels[1]
        if draw.maybe(0.3) and not other:
            data.parent.attrs["pxsize"], given.meters = sides[0], in_meters(sides[:1] * 3, ["mm"] * 3)
        elif draw.maybe(0.7):
            data.attrs["element_size_um"], given.meters = sides, in_meters(sides, ["µm"] * 3)
        data.attrs["description"] = draw.pick(*TEXTS[:-1])
        if other:
            h5["linked"], h5["back"] = data, h5py.ExternalLink(file.name, "/")
        elif draw.odd:
            add_junk(h5, data, draw)
            given.meters = UNKNOWN
    with h5py.File(file, "a") as h5:
        h5.attrs["beamline"], h5.attrs["default"] = draw.pick(*TEXTS[:-1]), "entry"  # of NeXus
        h5.require_group("entry").attrs["signal"] = "data"
        if other and place != "data" and draw.maybe(0.5):
            h5[str(parent)] = h5py.ExternalLink(raw.name, f"/{parent}")
        elif other:
            h5[place], h5["twice"] = h5py.ExternalLink(raw.name, f"/{place}"), h5py.ExternalLink(str(raw), f"/{place}")
        for kind in taken:
            add_link(h5, kind, place)
        h5["angles/theta"] = np.arange(5.0)
        h5["angles/again"], h5["angles/soft"] = h5["angles/theta"], h5py.SoftLink("/angles/theta")
    if not plain:
        name = place if draw.maybe(0.3) else draw.pick(*sorted(names_of(file, place)))
        given.path = Path(f"{file}:/{name}")
        given.checks.append(name_check(file, name))
    return given


def add_link(h5: h5py.File, kind: str, original: str) -> None:
    """Add a name of a dataset, or of a group that leads to it."""
    parent, beside = str(PurePosixPath(original).parent).strip("."), f"{PurePosixPath(original).parent}/of {kind}"
    if kind == "circle":
        h5.require_group(f"{parent}/inner")["up"] = h5["/"]
    elif kind == "group":
        h5["same_group"] = h5[parent or "/"]
    elif kind in ("hard", "beside"):
        h5["entry/data/linked" if kind == "hard" else beside] = h5[original]
    elif kind == "chain":
        h5["chain/a"], h5["chain/b"] = h5py.SoftLink("/chain/b"), h5py.SoftLink(f"/{original}")
    elif kind == "own file":
        h5["own_file"] = h5py.ExternalLink(Path(h5.filename).name, f"/{original}")
    else:
        path = {"soft": f"/{original}", "soft group": f"/{parent}", "nowhere": "/not/there"}[kind]
        h5[f"of {kind}"] = h5py.SoftLink(path)


def add_junk(h5: h5py.File, data: h5py.Dataset, draw: Draw) -> None:
    junk = [[1.0, 2.0], "three", np.array([1, np.nan, 0]), h5py.Empty("f4"), data.ref, b"\xff\xfe", "x" * 40000]
    about, value = draw.pick(h5, data.parent, data), draw.pick(*junk)
    name = draw.pick("element_size_um", "axes", "description", "pxsize", "CLASS", "cocodiff", "ü", ".", "a/b")
    if about is not data or not isinstance(value, str) or len(value) < 9:
        about.attrs.create(name, value)
    h5["link"], h5["other"] = h5py.SoftLink("/nowhere"), h5py.ExternalLink("elsewhere.h5", "/data")
    h5["texts"] = np.array([b"a", b"bc"])


def name_check(file: Path, place: str) -> Callable[[Result], str]:
    """Return the check that every name of the restored dataset, and of the angles, is in a result in HDF5."""
    names = {*names_of(file, place), place}
    with h5py.File(file) as h5:
        theta = h5["angles/theta"][...] if "angles/theta" in h5 else None
        said = {name: dict(h5[name].attrs) for name in ("/", str(PurePosixPath("/", place).parent))}
    others = () if theta is None else names_of(file, "angles/theta")

    def check(result: Result) -> str:
        if not result.own:
            return ""
        with h5py.File(result.path) as h5:
            restored = read_dataset(h5, result)
            wrong = [wrong_name(h5, name, restored) for name in sorted(names)]
            wrong += [wrong_name(h5, name, theta) for name in sorted(others)]
            for name, about in said.items():
                lost = [one for one in about if name not in h5 or h5[name].attrs.get(one) != about[one]]
                wrong.append(f"attributes of {name} lost: {lost}" if lost else "")
        return "; ".join(filter(None, wrong))

    return check


def read_dataset(h5: h5py.File, result: Result) -> np.ndarray:
    """Return the voxels of a result in HDF5, of one dataset or of frames."""
    node = h5[result.stack.metadata.details["object"] if result.own else "exchange/data"]
    if isinstance(node, h5py.Dataset):
        return np.asarray(node[()])
    frames = [name for name in result.stack.metadata.details["frames"] if name in node]
    return np.stack([np.asarray(node[name][()]).squeeze() for name in frames])


def wrong_name(h5: h5py.File, name: str, wanted: np.ndarray | None) -> str:
    """Return how the dataset of a name differs from what is wanted; "" where it does not."""
    try:
        found = h5[name][...]
    except (KeyError, OSError):
        return f"/{name} is absent"
    right = wanted is not None and found.size == wanted.size and np.array_equal(found.reshape(wanted.shape), wanted)
    return "" if right else f"/{name} of shape {found.shape} has other values (old voxels?)"


def names_of(file: Path, place: str) -> set[str]:
    """Return all names in a file that lead to the object of a place, through links of any kind; a name passes each
    group once."""
    with h5py.File(file) as h5:
        target = identity(h5[place])
        return {name for name, node in walk(h5, "", (identity(h5),)) if identity(node) == target}


def identity(node: Any) -> tuple[str, int]:
    return str(Path(node.file.filename).resolve()), int(h5py.h5o.get_info(node.id).addr)


def walk(group: Any, path: str, passed: tuple[tuple[str, int], ...]) -> Iterator[tuple[str, Any]]:
    for name in group:
        node = group.get(name)
        if node is None:
            continue
        yield f"{path}{name}", node
        if isinstance(node, h5py.Group) and identity(node) not in passed and len(passed) < DEEPEST:
            yield from walk(node, f"{path}{name}/", (*passed, identity(node)))


def frames(draw: Draw) -> Given:
    """Write a dataset for each slice, as the beamline 8.3.2 does, in any order; the group has a second name, or a frame
    has, or declares its values."""
    file, voxels, kind = draw.path(".h5"), draw.voxels, draw.pick("hard", "soft", "frame", "declared", "plain")
    kind = "plain" if draw.stem != "scan" or draw.odd or voxels.shape != SHAPE else kind
    declared = declare(draw, ("_FillValue", "missing_value")) if kind == "declared" else None
    voxels, size, first = voxels if declared is None else declared.stored, draw.pick(b"0.002", 0.002), draw.pick(0, 8)
    pads = draw.pick(0, 4)  # without them 10 stands before 8 in the group
    names = [f"tooth_0000_{first + number:0{pads}}.tif" for number in range(len(voxels))]
    with h5py.File(file, "w") as h5:
        group, stored = h5.create_group("tooth"), voxels.astype(voxels.dtype.newbyteorder(draw.pick(*"<>")))
        for number in draw.chance.sample(range(len(voxels)), len(voxels)):
            image, options = stored[number][None if draw.maybe(0.5) else ...], {"compression": 4} if draw.stored else {}
            frame = group.create_dataset(names[number], data=image, **options)
            frame.attrs.update({} if declared is None else declared.attributes)
        group["toothbak_0000.tif"] = voxels[:1] * 0
        group.attrs["pxsize"] = draw.pick("", b"x", -1.0, np.zeros(3)) if draw.odd else size
        if draw.odd:
            name, dtype = draw.pick("tooth_0000_99.tif", "tooth_1"), draw.pick("u1", "f4")
            group[name] = np.zeros((1, 3, 3), dtype)
        if kind in ("hard", "soft"):
            h5["plot"] = group if kind == "hard" else h5py.SoftLink("/tooth")
        elif kind == "frame":
            h5["shown/image"] = group[names[1]]
    path = file if kind == "plain" else Path(f"{file}:/tooth")
    given = Given(path, voxels) if declared is None else declared.given(path)
    given.meters, given.kind = UNKNOWN if draw.odd else (2e-6, 2e-6, 2e-6), kind
    pairs = [(path, number) for number, name in enumerate(names) for path in sorted(names_of(file, f"tooth/{name}"))]

    def check(result: Result) -> str:
        if not result.own:
            return ""
        first, last = result.region[0].start, result.region[0].stop
        with h5py.File(result.path) as h5:
            restored = read_dataset(h5, result)
            kept = [(name, number - first) for name, number in pairs if first <= number < last]
            return "; ".join(filter(None, [wrong_name(h5, name, restored[number]) for name, number in kept]))

    given.checks.append(check)
    return given


def elsewhere(draw: Draw) -> Given:
    """Write voxels that lie in other files or datasets, one of which may not be there, or be too short."""
    how = draw.by_turn("files", "own", "numbered", "nested", "raw", "own", "part")
    wrong, depth, image = draw.by_turn("short", "", "file", "dataset"), 2 if how == "part" else 1, SHAPE[1:]
    file, voxels, sources, places = draw.path(".h5"), draw.voxels, list[tuple[int, str]](), list[tuple[str, int, int]]()
    given = Given(Path(f"{file}:/data"), voxels, kind=f"{how} {wrong}")
    given.refuse(".", bool(wrong))
    for number, image_YX in enumerate(voxels):
        part = draw.folder / (f"part{number}.raw" if how == "raw" else f"part{number}.h5")
        bad, sources = wrong if number == 2 and how != "own" else "", [*sources, (number, part.name)]
        places.append((str(part), 4, image_YX.nbytes))
        if how == "raw":
            part.write_bytes(b"head" + image_YX.tobytes()[: -1 if bad == "short" else None])
        else:
            with h5py.File(part, "w") as h5:
                data = image_YX[None].repeat(depth, axis=0)
                h5["e" if bad == "dataset" else "d"] = data[1:] if bad == "short" else data
        if bad == "file" or (bad and how == "numbered") or (bad == "dataset" and how == "raw"):
            part.unlink()
    layout = h5py.VirtualLayout(SHAPE, voxels.dtype)
    for number, name in sources if how in ("files", "part", "nested") else ():
        layout[number : number + 1] = h5py.VirtualSource(name, "d", (depth, *image))[depth - 1 :]
    if how == "nested":
        with h5py.File(draw.folder / "outer.h5", "w") as h5:
            h5.create_virtual_dataset("d", layout)
    with h5py.File(file, "w") as h5:
        if how in ("own", "nested"):
            layout = h5py.VirtualLayout(SHAPE, voxels.dtype)
            own = "lost" if wrong else "inner"
            layout[:] = (
                h5py.VirtualSource(".", own, SHAPE) if how == "own" else h5py.VirtualSource("outer.h5", "d", SHAPE)
            )
            h5["inner"] = voxels
        if how == "raw":
            h5.create_dataset("data", SHAPE, voxels.dtype, external=places)
        elif how == "numbered":
            space = h5py.h5s.create_simple((0, *image), (h5py.h5s.UNLIMITED, *image))
            place, made = space.copy(), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            place.select_hyperslab((0, 0, 0), (h5py.h5s.UNLIMITED, 1, 1), (1, 1, 1), (1, *image))
            made.set_virtual(place, b"part%b.h5", b"d", h5py.h5s.create_simple((1, *image)))
            h5py.h5d.create(h5.id, b"data", h5py.h5t.py_create(voxels.dtype, logical=True), space, made)
        else:
            h5.create_virtual_dataset("data", layout)
    if how == "own" and not wrong:  # neither must keep old voxels where the other is restored
        given.path, given.refusals = Path(f"{file}:/{draw.pick('data', 'data', 'inner')}"), "virtual"
        given.checks.append(check_sources)
    return given


def check_sources(result: Result) -> str:
    if not result.own or result.told("virtual|inner"):
        return ""
    with h5py.File(result.path) as h5:
        names = [name for name in ("data", "inner") if name in h5]
        return "; ".join(filter(None, [wrong_name(h5, name, read_dataset(h5, result)) for name in names]))


def opened_by_xarray(path: Path, name: str, **options: Any) -> np.ndarray:
    """Return the decoded values of a variable as xarray reads them."""
    import xarray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xarray.open_dataset(path, decode_times=False, **options) as data:
            return np.asarray(data[name].values)


def decode_hdf5(path: Path, of_result: bool) -> np.ndarray:
    return opened_by_xarray(path, "vol", engine="h5netcdf", group="entry", phony_dims="sort")


def values(draw: Draw) -> Given:
    """Write HDF5 with the attributes of CF, and with dimensions named by NeXus, an attribute, labels, scales, or as
    xarray names them in netCDF 4."""
    import xarray

    how, file = draw.by_turn("none", "nexus", "labels", "scales", "axes", "xarray", "xarray"), draw.path(".h5")
    declared, (names, wrong) = declare(draw, KINDS[:-2] if how == "xarray" else KINDS), draw.dimensions()
    coordinates = {name: 3 + 0.5 * np.arange(side) for name, side in zip(names, SHAPE, strict=True)}
    about = dict(declared.attributes)
    if "_FillValue" in about and draw.maybe(0.15):
        about["_FillValue"] = np.array([about["_FillValue"]])
    if how == "xarray":  # attributes as they are, not as xarray would make them of an encoding
        data = xarray.Dataset({"vol": (names, declared.stored)}, coords=coordinates if draw.maybe(0.7) else {})
        encoding = {"vol": {"_FillValue": np.ravel(about.pop("_FillValue", [None]))[0]}}
        encoding |= {name: {"_FillValue": None} for name in data.coords}
        data["vol"].attrs.update(about)
        more = {"unlimited_dims": [names[0]]} if draw.maybe(0.3) else {}
        data.to_netcdf(file, group="entry", engine="h5netcdf", encoding=encoding, **more)
        coordinates = {name: coordinates[name] for name in data.coords}
    else:
        with h5py.File(file, "w") as h5:
            dataset, group = store_voxels(h5, "entry/vol", declared.stored, draw), h5["entry"]
            dataset.attrs.update(about | ({"axes": ":".join(names)} if how == "axes" else {}))
            group.attrs.update({"NX_class": "NXdata", "signal": "vol", "axes": [*names]} if how == "nexus" else {})
            for axis, name in zip(dataset.dims, names, strict=True):
                if how == "labels":
                    axis.label = name
                elif how == "scales":
                    group[name] = coordinates[name]
                    group[name].make_scale(name)
                    axis.attach_scale(group[name])
    given = declared.given(Path(f"{file}:/entry/vol"), decode_hdf5)
    given.kind += f" {how} {names}"
    given.refuse(AXES, wrong and how != "none")
    if how in ("scales", "xarray"):
        given.checks.append(partial(check_dimensions, names, coordinates))
    return given


def check_dimensions(names: Sequence[str], coordinates: dict[str, np.ndarray], result: Result) -> str:
    """Return what xarray reads otherwise than in the input: names of dimensions, coordinates."""
    import xarray

    if not result.own or result.told("coordinate|dimension|scales "):
        return ""
    with h5py.File(result.path) as h5:  # xarray takes scales by their length where none is attached
        attached = [[Path(one.name).name for one in axis.values()] for axis in h5["entry/vol"].dims]
    if attached != [[name] for name in names]:
        return f"the axes have the scales {attached}"
    try:
        with xarray.open_dataset(result.path, engine="h5netcdf", group="entry", decode_cf=False) as found:
            parts = dict(zip(names, result.region, strict=True))
            wrong = [name for name in coordinates if not same(found[name].values, coordinates[name][parts[name]])]
            return f"other values of {wrong}" if wrong or found["vol"].dims != tuple(names) else ""
    except (ValueError, KeyError) as error:
        return f"xarray cannot read it: {str(error)[:90]}"


def decode_zarr(path: Path, of_result: bool) -> np.ndarray:
    return opened_by_xarray(path, "0" if of_result else "vol", engine="zarr", consolidated=False)


def zarr_values(draw: Draw) -> Given:
    """Write an array with the attributes of CF and dimensions by name, after one of time perhaps; or as xarray does,
    which has the missing value as fill value in format 2, in format 3 as an attribute, of floats in base64."""
    import xarray

    by_xarray, version, path, (names, wrong) = draw.maybe(0.4), draw.pick(2, 3), draw.path(".zarr"), draw.dimensions()
    declared, named = (
        declare(draw, ("_FillValue", "scale", "unsigned", "both") if by_xarray else KINDS),
        draw.maybe(0.7),
    )
    about = dict(declared.attributes)
    if by_xarray:
        data, fill = xarray.Dataset({"vol": (names, declared.stored)}), about.pop("_FillValue", None)
        data["vol"].attrs.update(about)
        encoding = {"vol": {} if fill is None else {"_FillValue": fill}}
        data.to_zarr(path, zarr_format=version, consolidated=draw.maybe(0.5), encoding=encoding)
    else:
        names = ("time", *names) if named and names[0] == "z" and draw.maybe(0.5) else names
        options: Plain = {"shape": (1,) * (len(names) - 3) + SHAPE, "dtype": declared.stored.dtype}
        options |= {"dimension_names": names} if named and version == 3 else {}
        array = zarr.create_group(path, zarr_format=version).create_array(
            "vol", chunks=(*[1] * (len(names) - 2), 22, 13), **options
        )
        array[:] = declared.stored.reshape(options["shape"])
        about = {name: as_json(value, version) for name, value in about.items()}
        array.attrs.update(about | ({"_ARRAY_DIMENSIONS": [*names]} if named and version == 2 else {}))
    given = declared.given(Path(f"{path}:/vol"), decode_zarr if by_xarray or named else None)
    given.refuse(AXES, wrong and (by_xarray or named))
    return given


def as_json(value: Any, version: int) -> Any:
    """Return an attribute as JSON has it: missing values of floats in Zarr 3 as xarray writes them."""
    if isinstance(value, np.floating) and version == 3:
        return base64.standard_b64encode(struct.pack("<d", float(value))).decode()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def store(draw: Draw) -> Given:
    """Write a Zarr store with an image of NGFF 0.4 or 0.5, or with an array alone in its root; stored in part."""
    version, image, voxels = draw.pick(2, 3), draw.maybe(0.7), draw.voxels
    given = Given(draw.path(draw.pick(".ome.zarr", ".zarr")), voxels, kind=f"v{version}{' image' * image}")
    lead, ndim, usual = draw.pick(0, 1, 2) * image, voxels.ndim, ("nanometer", "micrometer", "millimeter")
    sides, units = draw.sides(), draw.units(["", *LENGTHS] if draw.maybe(0.3) else usual)
    axes: list[Plain] = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}][2 - lead :]
    for name, unit in [*zip("zyx", units, strict=True)][-ndim:]:
        axes.append({"name": name, "type": "space"} | ({"unit": unit} if unit else {}))
    moves: list[Plain] = [{"type": "scale", "scale": [1.0] * lead + sides[-ndim:]}]
    corner = [10.0, -20.0, 30.0] if draw.maybe(0.5) else []
    moves += [{"type": "translation", "translation": [0.0] * lead + corner[-ndim:]}] if corner else []
    about: Plain = {"name": "tooth", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": moves}]}
    whole = [2.0, 3.0, 0.5] if draw.maybe(0.3) else [1.0] * 3
    if whole[0] != 1:
        about["coordinateTransformations"] = [{"type": "scale", "scale": [1.0] * lead + whole[-ndim:]}]
    about = {"version": "0.4", **about} if version == 2 else {"version": "0.5", "multiscales": [about]}
    about = {"multiscales": [about]} if version == 2 else {"ome": about}
    about = mutated(about, draw.chance) if draw.odd else about
    sample, shape = draw.pick(*JUNK[:13]) if draw.odd else draw.pick(*TEXTS), (1,) * lead + voxels.shape
    dtype = voxels.dtype.newbyteorder(draw.pick(*"<>")) if version == 2 else voxels.dtype
    chunks = (1,) * lead + tuple(max(1, min(side, draw.pick(1, 7, 16, 50))) for side in voxels.shape)
    options: Plain = {"chunks": chunks, "fill_value": draw.pick(0, 1, 3), "config": {"write_empty_chunks": False}}
    if draw.stored:
        options |= draw.pick({"compressors": None}, {}, {"order": "F"} if version == 2 else {})
        if version == 3 and voxels.size:
            options["shards"] = tuple(2 * side for side in chunks)
    if image:
        root = zarr.create_group(given.path, zarr_format=version, attributes=about if isinstance(about, dict) else {})
        root.attrs["sample"] = sample
        array = root.create_array("0", shape=shape, dtype=dtype, **options)
    else:
        array = zarr.create_array(given.path, shape=shape, dtype=dtype, zarr_format=version, **options)
        array.attrs["sample"] = sample
    if voxels.shape == SHAPE and draw.maybe(0.4):
        given.voxels = np.full(SHAPE, options["fill_value"], voxels.dtype)
        given.voxels[1] = voxels[1]
    if voxels.size:
        array[(0,) * lead] = given.voxels
    if not image:
        return given
    sides, used = [one * other for one, other in zip(sides, whole, strict=True)], {*units[-ndim:]}
    given.plain = used == {""}
    given.meters = None if "" in used and not given.plain else in_meters(sides, [unit or "m" for unit in units])
    if ndim == 2:
        given.meters = UNKNOWN if given.meters is None else given.meters
    given.checks.append(partial(check_translation, sides, whole, corner, lead))
    if draw.odd:
        given.meters, given.checks = UNKNOWN, []
    return given


def check_translation(sides: list[float], whole: list[float], corner: list[float], lead: int, result: Result) -> str:
    """Return how the place of a result in Zarr is wrong: of a region its first voxel's."""
    if not result.own:
        return ""
    about = zarr.open_group(result.path, mode="r").attrs.asdict()
    moves = about.get("ome", about)["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    found = next((one["translation"] for one in moves if one["type"] == "translation"), [0.0] * len(moves[0]["scale"]))
    steps = zip(corner or (0, 0, 0), result.start, sides, whole, strict=True)
    wanted = [0.0] * lead + [place + first * side / times for place, first, side, times in steps][lead - len(found) :]
    return "" if np.allclose(found, wanted) else f"translation {found}, where {wanted} is right"
