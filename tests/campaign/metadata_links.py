"""HDF5 files whose voxels have several names, for round trips: hard, soft and external links, linked groups, virtual
datasets of the same file, frames in linked groups."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np
from metadata_cases import Given, Result
from metadata_values import declare

DEEPEST = 6  # groups that a name leads through
PLACES = ("entry/instrument/detector/data", "exchange/data", "data", "scan/tomo/data")


def links(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write one dataset under many names of one file; the input is named by any of them."""
    file, original = folder / chance.choice(["scan.h5", "scan.nxs", "scan.hdf5"]), chance.choice(PLACES)
    parent = str(PurePosixPath(original).parent).strip(".")
    kinds = ["hard", "beside", "soft", "relative", "chain", "group", "soft group", "circle", "nowhere", "own file"]
    taken = chance.sample(kinds, chance.randint(1, 4))
    with h5py.File(file, "w") as h5:
        store_voxels(h5, original, voxels, chance)
        for kind in taken:
            add_link(h5, kind, original, parent)
        add_nexus(h5, original, parent)
    names = sorted(names_of(file, original))
    place = chance.choice(names) if chance.random() < 0.7 else original
    given = Given(Path(f"{file}:/{place}"), voxels, kind=" + ".join(taken), more={"names": names})
    return with_names(given, file, place)


def add_link(h5: h5py.File, kind: str, original: str, parent: str) -> None:
    if kind == "hard":
        h5["entry/data/linked"] = h5[original]
    elif kind == "beside":
        h5[f"{parent}/again"] = h5[original]
    elif kind == "soft":
        h5["plot/soft"] = h5py.SoftLink(f"/{original}")
    elif kind == "relative":
        h5[f"{parent}/near"] = h5py.SoftLink("data")
    elif kind == "chain":
        h5["chain/a"], h5["chain/b"] = h5py.SoftLink("/chain/b"), h5py.SoftLink(f"/{original}")
    elif kind == "group":
        h5["same_group"] = h5[parent or "/"]
    elif kind == "soft group":
        h5["soft_group"] = h5py.SoftLink(f"/{parent}")
    elif kind == "circle":
        h5.require_group(f"{parent}/inner")["up"] = h5["/"]
    elif kind == "nowhere":
        h5["nowhere"] = h5py.SoftLink("/not/there")
    else:
        h5["own_file"] = h5py.ExternalLink(Path(h5.filename).name, f"/{original}")


def add_nexus(h5: h5py.File, original: str, parent: str) -> None:
    """Add what NeXus says of a plot, and angles under two names."""
    h5.attrs["default"], h5[parent or "/"].attrs["signal"] = "entry", "data"
    h5["angles/theta"] = np.arange(5.0)
    h5["angles/again"], h5["angles/soft"] = h5["angles/theta"], h5py.SoftLink("/angles/theta")
    h5[original].attrs["long_name"] = "counts"


def store_voxels(h5: h5py.File, place: str, voxels: np.ndarray, chance: random.Random) -> None:
    options: dict[str, Any] = chance.choice([{}, {"chunks": (1, 11, 26)}, {"chunks": (2, 22, 13), "compression": 4}])
    h5.create_dataset(place, data=voxels.astype(voxels.dtype.newbyteorder(chance.choice("<>"))), **options)


def external_links(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write a file whose names of the voxels lead into another file."""
    file, other, kind = folder / "scan.h5", folder / "raw.h5", chance.choice(["dataset", "twice", "group", "back"])
    with h5py.File(other, "w") as h5:
        store_voxels(h5, "deep/data", voxels, chance)
        if chance.random() < 0.5:
            h5["deep/linked"] = h5["deep/data"]
    place = "entry/data"
    with h5py.File(file, "w") as h5:
        if kind == "group":
            h5["entry"] = h5py.ExternalLink("raw.h5", "/deep")
            h5["plot"] = h5py.SoftLink("/entry")
            h5["again"] = h5py.ExternalLink("raw.h5", "/deep")
        else:
            h5["entry/data"] = h5py.ExternalLink("raw.h5", "/deep/data")
            h5["plot/soft"] = h5py.SoftLink("/entry/data")
        if kind == "twice":
            h5["plot/data"] = h5py.ExternalLink(str(other), "/deep/data")
        if kind == "back":
            place = "own/data"
            store_voxels(h5, place, voxels, chance)
            h5["around"] = h5py.ExternalLink("raw.h5", "/back")
    if kind == "back":
        with h5py.File(other, "a") as h5:
            h5["back"] = h5py.ExternalLink("scan.h5", "/own/data")
    names = sorted(names_of(file, place))
    place = chance.choice(names)
    given = Given(Path(f"{file}:/{place}"), voxels, kind=kind, more={"names": names})
    return with_names(given, file, place)


def frames(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write a group of frames that has a second name, or frames that have."""
    file, kind = folder / "scan.h5", chance.choice(["hard", "soft", "frame", "declared"])
    declared = declare(voxels, chance, ("_FillValue", "missing_value")) if kind == "declared" else None
    voxels = voxels if declared is None else declared.stored
    with h5py.File(file, "w") as h5:
        for number, image_YX in enumerate(voxels):
            h5[f"tooth/tooth_0000_{number:04}.tif"] = image_YX[None] if chance.random() < 0.5 else image_YX
            if declared is not None:
                h5[f"tooth/tooth_0000_{number:04}.tif"].attrs.update(declared.attributes)
        h5["tooth"].attrs["pxsize"] = 0.002
        if kind == "hard":
            h5["plot"] = h5["tooth"]
        elif kind == "soft":
            h5["plot"] = h5py.SoftLink("/tooth")
        elif kind == "frame":
            h5["shown/image"] = h5["tooth/tooth_0000_0001.tif"]
    with h5py.File(file) as h5:
        listed = {f"tooth/{name}": number for number, name in enumerate(sorted(h5["tooth"]))}
    pairs = [(name, number) for own, number in listed.items() for name in names_of(file, own)]
    given = Given(Path(f"{file}:/tooth"), voxels) if declared is None else declared.given(Path(f"{file}:/tooth"))
    given.kind, given.more = f"{kind} {given.kind}", {**given.more, "names": sorted(pairs)}

    def check(result: Result) -> str:
        if not result.own:
            return ""
        kept = [(name, n - result.start[0]) for name, n in pairs if result.region[0].start <= n < result.region[0].stop]
        with h5py.File(result.path) as h5:
            wrong = [wrong_name(h5, name, result.restored[number]) for name, number in kept]
        return "; ".join(filter(None, wrong))

    given.check = check
    return given


def virtual(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write a virtual dataset of one in the same file. Neither must keep old voxels where the other is restored."""
    file, place = folder / "scan.h5", chance.choice(["entry/data", "entry/data", "raw/data"])
    with h5py.File(file, "w") as h5:
        store_voxels(h5, "raw/data", voxels, chance)
        layout = h5py.VirtualLayout(voxels.shape, voxels.dtype)
        layout[:] = h5py.VirtualSource(".", "raw/data", voxels.shape)
        h5.create_virtual_dataset("entry/data", layout)
    given = Given(Path(f"{file}:/{place}"), voxels, kind=place, refusals="virtual")

    def check(result: Result) -> str:
        if not result.own or result.told("virtual|raw/data"):
            return ""
        with h5py.File(result.path) as h5:
            names = [name for name in ("entry/data", "raw/data") if name in h5]
            return "; ".join(filter(None, [wrong_name(h5, name, result.restored) for name in names]))

    given.check = check
    return given


def with_names(given: Given, file: Path, place: str) -> Given:
    """Add the check that every name of the restored dataset, and of the angles, is in a result in HDF5."""
    names = {*names_of(file, place), place}
    with h5py.File(file) as h5:
        theta = h5["angles/theta"][...] if "angles/theta" in h5 else None
        said = {name: dict(h5[name].attrs) for name in ("/", str(PurePosixPath("/", place).parent))}
    others = () if theta is None else names_of(file, "angles/theta")

    def check(result: Result) -> str:
        if not result.own:
            return ""
        with h5py.File(result.path) as h5:
            wrong = [wrong_name(h5, name, result.restored) for name in sorted(names)]
            wrong += [wrong_name(h5, name, theta) for name in sorted(others)]
            for name, about in said.items():
                lost = [one for one in about if name not in h5 or h5[name].attrs.get(one) != about[one]]
                wrong.append(f"attributes of {name} lost: {lost}" if lost else "")
        return "; ".join(filter(None, wrong))

    given.check = check
    return given


def wrong_name(h5: h5py.File, name: str, wanted: np.ndarray) -> str:
    """Return how the dataset of a name differs from what is wanted; "" where it does not."""
    try:
        found = h5[name][...]
    except (KeyError, OSError):
        return f"/{name} is absent"
    if found.size != wanted.size:
        return f"/{name} has {found.shape} voxels of {wanted.shape}"
    return "" if np.array_equal(found.reshape(wanted.shape), wanted) else f"/{name} has other values (old voxels?)"


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
