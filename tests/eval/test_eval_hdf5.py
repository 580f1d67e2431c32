"""HDF5 files: links, virtual datasets and other files that they name, scales, attributes, and what is not stored."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cocodiff_eval.data import hdf5
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.masks import make_mask
from cocodiff_eval.data.slices import open_stack, open_truth
from cocodiff_eval.data.volume import NewVolume, Part, Region
from file_kinds import assert_bits, reopened, restored, voxels, write_frames, write_hdf5

from cocodiff.config.errors import UserError

IMAGE = np.arange(400, dtype=np.uint16).reshape(20, 20)
pytestmark = pytest.mark.usefixtures("promptly")


def virtual(file: h5py.File, name: str, source: str, inner: str = "data") -> None:
    layout = h5py.VirtualLayout((20, 20), "u2")
    layout[:] = h5py.VirtualSource(source, inner, (20, 20))
    file.create_virtual_dataset(name, layout)


def of_parts(file: h5py.File) -> None:
    """Make a virtual dataset of a slice of each of three files."""
    layout = h5py.VirtualLayout((3, 20, 20), "u2")
    for number in range(3):
        layout[number : number + 1] = h5py.VirtualSource(f"part{number}.h5", "data", (2, 20, 20))[1:]
    file.create_virtual_dataset("a", layout)


def numbered(file: h5py.File, source: bytes = b"part%b.h5", inner: bytes = b"data") -> None:
    """Make an unlimited dataset of as many files as are there."""
    ends = (h5py.h5s.UNLIMITED, 20, 20)
    place = h5py.h5s.create_simple((0, 20, 20), ends)
    place.select_hyperslab((0, 0, 0), (h5py.h5s.UNLIMITED, 1, 1), (1, 1, 1), (1, 20, 20))
    part = h5py.h5s.create_simple((2, 20, 20))
    part.select_hyperslab((1, 0, 0), (1, 1, 1), (1, 1, 1), (1, 20, 20))
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_virtual(place, source, inner, part)
    h5py.h5d.create(file.id, b"a", h5py.h5t.NATIVE_UINT16, h5py.h5s.create_simple((0, 20, 20), ends), made)


def of_virtual(file: h5py.File) -> None:
    with h5py.File("outer.h5", "w") as other:
        of_parts(other)
    layout = h5py.VirtualLayout((3, 20, 20), "u2")
    layout[:] = h5py.VirtualSource("outer.h5", "a", (3, 20, 20))
    file.create_virtual_dataset("a", layout)


def external(file: h5py.File, name: str) -> None:
    """Make a dataset of all of a file, and of another one from its fifth byte to its end."""
    files = [("part0.raw", 0, 400), ("part1.raw", 4, h5py.h5s.UNLIMITED)]
    file.create_dataset(name, (20, 20), "u2", external=files)


OTHER: dict[str, Callable[[h5py.File], object]] = {  # names of voxels in other files, among them part1's
    "external link": lambda file: file.__setitem__("a", h5py.ExternalLink("part1.h5", "/data")),
    "external group": lambda file: file.__setitem__("a", h5py.ExternalLink("part1.h5", "/group")),
    "soft link": lambda file: file.update({"b": h5py.ExternalLink("part1.h5", "/data"), "a": h5py.SoftLink("/b")}),
    "external storage": lambda file: external(file, "a"),
    "virtual dataset": lambda file: virtual(file, "a", "part1.h5"),
    "virtual of external": lambda file: [external(file, "data"), virtual(file, "a", ".")],
    "parts": of_parts,
    "numbered": numbered,
    "virtual of virtual": of_virtual,
}
STACKED = ("parts", "numbered", "virtual of virtual")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[h5py.File], object]], str]:
    """A file beside others that it may name; external storage is looked up in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hdf5, "MOST_VISITED", 30)  # numbers that are looked for

    def made(fill: Callable[[h5py.File], object]) -> str:
        with h5py.File("in.h5", "w") as file:
            fill(file)
        return "in.h5"

    return made


def write_parts(stacked: bool) -> np.ndarray:
    """Write three files, and return what is to be read of them."""
    for number in range(3):
        with h5py.File(f"part{number}.h5", "w") as file:
            file["data"] = file["group/inner"] = np.stack([IMAGE, IMAGE + number]) if stacked else IMAGE
    Path("part0.raw").write_bytes(IMAGE.tobytes()[:400])
    Path("part1.raw").write_bytes(b"head" + IMAGE.tobytes()[400:])
    return np.stack([IMAGE, IMAGE + 1, IMAGE + 2]) if stacked else IMAGE


@pytest.mark.parametrize("kind", OTHER)
def test_other_files_are_read_only_where_that_is_allowed(make: Callable[..., str], kind: str) -> None:
    """And where they are regular files, there, and as large as what is taken of them."""
    expected = write_parts(kind in STACKED)
    path = make(OTHER[kind]) + (":/a/inner" if kind == "external group" else ":/a")
    other = Path("part1.raw" if ("external" in kind and kind[:8] != "external") or "storage" in kind else "part1.h5")
    stack = assert_bits(open_stack(path, follow_links=True), expected)
    assert_bits(open_truth(path, stack, follow_links=True), expected)
    with pytest.raises(UserError, match="two values"):  # its values were read
        make_mask(path, stack, follow_links=True)
    for refused in (open_stack, partial(open_truth, stack=stack), partial(make_mask, stack=stack)):
        with pytest.raises(UserError, match=r"in\.h5: .* another file, .*\.(h5|raw); .* --follow-links"):
            refused(path)
    damages: dict[str, Callable[[], Any]] = {rf" in {other}, ": lambda: None}
    if kind != "numbered":  # whose sources HDF5 itself opens to tell how many there are: it would wait for ever
        damages[rf"in {other}, .* pipe"] = lambda: os.mkfifo(other)
    if other.suffix == ".raw":
        damages[rf"400 bytes of voxels in {other}, "] = lambda: other.write_bytes(bytes(403))
    elif "link" not in kind and kind != "external group":
        damages[rf"virtual dataset of data in {other}, (?!.*\d x \d)"] = lambda: h5py.File(other, "w").close()
        if kind in STACKED:
            damages[rf"virtual dataset of data in {other}, .* 1 x 20 x 20 "] = lambda: (
                h5py.File(other, "w").create_dataset("data", (1, 20, 20), "u2").file.close()
            )
    for words, damage in damages.items():
        other.unlink(missing_ok=True)
        damage()
        with pytest.raises(UserError, match=words):
            open_stack(path, follow_links=True)


def test_links_that_lead_nowhere(make: Callable[..., str]) -> None:
    links = {"circle": "/circle", "round": "/round/a", "dangling": "/nothing"}
    path = make(lambda file: file.update({name: h5py.SoftLink(link) for name, link in links.items()}))
    for name in links:
        with pytest.raises(UserError, match=" is not there" if name == "dangling" else " through more than 64 links"):
            open_stack(f"{path}:/{name}")


def test_what_is_not_kept_of_a_file_of_very_many_objects_is_said(
    make: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(lambda file: file.update({"a": IMAGE} | {f"b{number}": number for number in range(9)}))
    stack = open_stack(f"{path}:/a")
    for most, kept in ((9, {f"b{number}" for number in range(9)}), (4, {f"b{number}" for number in range(4)})):
        monkeypatch.setattr(hdf5, "MOST_VISITED", most)
        hdf5.write_hdf5(NewVolume(Path("new.h5"), (1, 20, 20), stack.dtype, 2, stack.read, stack.metadata))
        with h5py.File("new.h5") as new:
            assert set(new) == {"a"} | kept
        assert ["in.h5: " in line and " 5 " in line for line in caplog.messages] == [True][: most == 4]


def test_numbers_and_signs_in_names_of_sources(make: Callable[..., str]) -> None:
    def inside(file: h5py.File) -> None:
        for number in range(3):
            file[f"d{number}"] = np.full((2, 20, 20), number + 1, "u2")
        numbered(file, b".", b"d%b")

    assert open_stack(make(inside) + ":/a").read(2).max() == 3
    with h5py.File("in.h5", "a") as file:
        del file["d1"]
    with pytest.raises(UserError, match=r"virtual dataset of d1 in \., "):
        open_stack("in.h5:/a")
    with h5py.File("50%.h5", "w") as file:
        file["data"] = IMAGE
    stack = open_stack(make(lambda file: virtual(file, "a", "50%%.h5")) + ":/a", follow_links=True)
    np.testing.assert_array_equal(stack.read(0), IMAGE)


def test_what_was_never_stored_is_said(make: Callable[..., str]) -> None:
    def fill(file: h5py.File) -> None:
        file.create_dataset("a", (4, 20, 20), "u2", chunks=(1, 20, 10), fillvalue=7)[0] = IMAGE
        file.create_dataset("b", (4, 20, 20), "u2")

    path = make(fill)
    (told,) = open_stack(f"{path}:/a").metadata.remarks
    assert told == "in.h5:/a: 6 of 8 chunks are not stored and are read as 7"
    assert "1 of 1 chunks are not stored" in open_stack(f"{path}:/b").metadata.remarks[0]


def test_each_failure_has_its_remedy(make: Callable[..., str]) -> None:
    def fill(file: h5py.File) -> None:
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk((20, 20))
        layout.set_filter(32767, h5py.h5z.FLAG_OPTIONAL, (0,))
        h5py.h5d.create(file.id, b"a", h5py.h5t.NATIVE_UINT16, h5py.h5s.create_simple((20, 20)), layout)

    with pytest.raises(UserError, match=r"in\.h5: /a is compressed by filter 32767 .*hdf5plugin"):
        open_stack(make(fill) + ":/a")
    write_parts(stacked=False)
    other = "import h5py, sys; file = h5py.File('part1.h5', 'a'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"open\n"
        with pytest.raises(UserError, match=r"part1\.h5: .*unable to lock.*h5clear -s"):
            open_stack("part1.h5:/data")
        writer.communicate()


def test_a_disk_that_is_full_while_hdf5_writes_is_one_error(tmp_path: Path) -> None:
    """In a process of its own: HDF5 itself prints tracebacks then, and may crash."""
    path = str(tmp_path / "out.h5")
    script = f"""
import resource, numpy as np
from cocodiff_eval.data.hdf5 import write_hdf5
from cocodiff_eval.data.volume import NewVolume
image = np.zeros((64, 64), "u2")
for most in (2_000, 40_000, 76_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        write_hdf5(NewVolume({path!r}, (9, 64, 64), image.dtype, 3, lambda index: image))
    except OSError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"[Errno 27] File too large: '{path}'\n" * 3


def result_of(path: str, region: Region | None = None, follow_links: bool = False) -> h5py.File:
    """A result of larger voxels in the place of the input's."""
    stack = open_volume(path, follow_links)
    stack = stack.cropped(region) if region else stack
    parts = stack.shape, stack.dtype, stack.ndim, lambda index: stack.read(index) + 1000, stack.metadata
    hdf5.write_hdf5(NewVolume(Path("new.h5"), *parts, region=stack.region))
    return h5py.File("new.h5")


@pytest.mark.parametrize("name", ["folder/data", "folder/hard", "soft", "single", "back"])
def test_names_that_lead_through_other_files(make: Callable[..., str], name: str) -> None:
    with h5py.File("far.h5", "w") as file:
        file["group/data"] = file["group/copy"] = IMAGE
        file["group/hard"], file["group/soft"] = file["group/data"], h5py.SoftLink("/group/data")
        file["group/back"] = h5py.ExternalLink("in.h5", "/folder")

    def fill(file: h5py.File) -> None:
        file["folder"], file["soft"] = h5py.ExternalLink("far.h5", "/group"), h5py.SoftLink("/folder/hard")
        file["single"] = h5py.ExternalLink("far.h5", "/group/soft")
        file["back"] = h5py.SoftLink("/folder/back/data")
        file["gone"] = h5py.ExternalLink("gone.h5", "/data")

    with result_of(f"{make(fill)}:/{name}", follow_links=True) as new:
        for one in ("folder/data", "folder/hard", "folder/soft", "folder/back/soft", "soft", "single", "back"):
            np.testing.assert_array_equal(new[one], IMAGE + 1000)
        assert {*new} == {"folder", "soft", "single", "back"} and {*new["folder"]} == {"data", "hard", "soft", "back"}
        assert not isinstance(new.get("single", getlink=True), h5py.ExternalLink)


def test_names_of_frames(make: Callable[..., str]) -> None:
    def fill(file: h5py.File) -> None:
        for number in range(4):
            file[f"scan/a_{number}.tif"] = IMAGE[None] + number
        file["first"], file["last"] = file["scan/a_0.tif"], h5py.SoftLink("/scan/a_3.tif")
        file["again"] = file["scan"]

    with result_of(make(fill) + ":/scan", Region((1, 0, 0), (4, 20, 20))) as new:
        assert {*new} == {"scan", "last", "again"} and {*new["again"]} == {f"a_{number}.tif" for number in (1, 2, 3)}
        np.testing.assert_array_equal(new["last"], IMAGE[None] + 1003)


def paths_of(group: h5py.Group, depth: int = 3) -> dict[str, h5py.Group | h5py.Dataset]:
    """Every path of so many names, through links of any kind."""
    found = {}
    for name in group:
        if (node := group.get(name)) is None:  # a link to nothing
            continue
        found[name] = node
        if depth > 1 and isinstance(node, h5py.Group):
            found |= {f"{name}/{inner}": one for inner, one in paths_of(node, depth - 1).items()}
    return found


def fill_by_chance(file: h5py.File, chance: random.Random) -> None:
    """Make groups, datasets and virtual ones of them under any names, and links of any kind to any of them."""
    groups, nodes = ["/"], list[str]()
    for number in range(12):
        within, name = chance.choice(groups).rstrip("/"), f"{chance.choice('abc')}{number}"
        path, other = f"{within}/{name}", chance.choice([*nodes, *groups])
        kind = chance.choice(["group", "data", "virtual", "hard", "soft", "external", "other", "attribute"])
        if kind == "group":
            groups.append(file.create_group(path).name)
        elif kind == "attribute":
            file[within or "/"].attrs[name] = number
        elif kind == "data" or not nodes:
            file[path] = IMAGE + number
            nodes.append(path)
        elif kind == "virtual":
            virtual(file, path, ".", chance.choice(nodes))
            nodes.append(path)
        else:
            links = {"hard": file[other], "soft": h5py.SoftLink(chance.choice([other, "/nowhere"]))}
            links |= {"external": h5py.ExternalLink("in.h5", other), "other": h5py.ExternalLink("part1.h5", "/data")}
            file[path] = links[kind]


def sources_of(node: h5py.Dataset) -> list[h5py.Dataset]:
    return [node.file[one.dset_name] for one in node.virtual_sources()] if node.is_virtual else []


@pytest.mark.sample(40)
@pytest.mark.parametrize("region", [None, Region((0, 2, 3), (1, 18, 20))], ids=["whole", "region"])
@pytest.mark.parametrize("seed", range(40))
def test_generated_links(make: Callable[..., str], seed: int, region: Region | None) -> None:
    """Every name of the restored dataset shows restored voxels, also in virtual datasets of it, and every other name
    what it did. Not in the result: what lies in other files, what a virtual dataset is made of that was restored, and
    virtual datasets of anything else, or of a dataset of which a region was restored."""
    chance = random.Random(seed)
    write_parts(stacked=False)
    path = make(lambda file: fill_by_chance(file, chance))
    with h5py.File(path) as old:
        found = paths_of(old)
        chosen = chance.choice([name for name, node in found.items() if isinstance(node, h5py.Dataset)])
        one, made_of = old[chosen], sources_of(old[chosen])
        for source in made_of:  # which grows meanwhile
            made_of += sources_of(source)

        def is_kept(node: h5py.Group | h5py.Dataset) -> bool:
            if node == one or not isinstance(node, h5py.Dataset):
                return True
            own = node.file == old and node not in made_of and (region is None or not node.is_virtual)
            return own and all(source == one for source in sources_of(node))

        kept = {name: node for name, node in found.items() if is_kept(node)}
        follow_links = one.file != old or chance.random() < 0.5
        with result_of(f"{path}:/{chosen}", region, follow_links) as new:
            made = paths_of(new)
            assert {*made} == {*kept}
            for name, node in kept.items():
                assert dict(made[name].attrs) == dict(node.attrs)
                if isinstance(node, h5py.Dataset):
                    voxels = node[:] + 1000 * (node == one or node.is_virtual)
                    np.testing.assert_array_equal(made[name], voxels[2:18, 3:20] if region and node == one else voxels)
            above = [old, *(old["/".join(chosen.split("/")[:count])] for count in range(1, chosen.count("/") + 1))]
            if any(group == other for group, other in combinations(above, 2)):  # named through a circle
                return
            for pair in combinations(kept, 2):
                assert (made[pair[0]] == made[pair[1]]) == (kept[pair[0]] == kept[pair[1]]), pair


@pytest.mark.parametrize("part", [Part(), Part("1:4", ":,8:33"), Part("", ":,8:33")], ids=["whole", "part", "slice"])
@pytest.mark.parametrize("how", ["scales", "nexus"])
def test_coordinates_stay_with_their_axes(tmp_path: Path, how: str, part: Part) -> None:
    """Of a volume, a part of it, and a part of a single slice."""
    sides = {"z": 5, "y": 20, "x": 33} if part.slices or not part.roi else {"y": 20, "x": 33}
    path = write_hdf5(tmp_path, voxels((*sides.values(),)), how=how)
    with h5py.File(path, "a") as file:
        group = file["exchange"]
        for name, side in ({"z": 5} | sides).items():
            group.require_dataset(name, (side,), "f8")[:] = np.arange(side) / 2
            group[name].attrs["units"] = "um"
        group["angles"] = np.arange(5.0)  # a dataset beside it that shares a scale
        if how == "scales":
            group["angles"].dims[0].attach_scale(group["z"])
    with h5py.File(restored(part.of(open_volume(path)), "same", tmp_path).path) as file:
        group, cut, scales = file["exchange"], bool(part.slices), how == "scales"
        ends = {"z": (1, 4) if cut else (0, 5), "y": (0, 20), "x": (8, 33) if part.roi else (0, 33)}
        for name, numbers in ends.items():
            np.testing.assert_array_equal(group[name], np.arange(*numbers) / 2)
            assert group[name].attrs["units"] == "um" and group[name].is_scale == scales
            users = len(group[name].attrs.get("REFERENCE_LIST", ()))
            assert users == scales * ((name in sides) + (name == "z" and not cut))
        attached = [[scale.name for scale in axis.values()] for axis in group["data"].dims]
        assert attached == [[f"/exchange/{name}"] if scales else [] for name in sides]
        assert len(group["angles"].dims[0]) == (scales and not cut)  # of another length than the cut scale


@pytest.mark.parametrize("axes", ["time", [1.0, 2.0, 3.0]])
def test_what_says_nothing_of_axes_is_no_ground_to_refuse(tmp_path: Path, axes: Any) -> None:
    path = write_hdf5(tmp_path, voxels((5, 20, 33)), how="scales")
    with h5py.File(path, "a") as file:
        group = file["exchange"]
        del group["z"]  # a scale that is gone, axes of another dataset, words of another length
        group.attrs["signal"], group.attrs["axes"] = "other", ["time", "y", "x"]
        group["data"].attrs["axes"], group["data"].attrs["axistags"] = axes, "no JSON"
    assert_bits(path, voxels((5, 20, 33)))
    restored(Part("1:4").of(open_volume(path)), "same", tmp_path)


def test_attributes_of_frames_are_kept(tmp_path: Path) -> None:
    frames = open_volume(write_frames(tmp_path, voxels()))
    with h5py.File(restored(frames, "same", tmp_path).path) as file:
        group = file["20260102_tooth"]
        assert group["20260102_tooth_0000_11.tif"].attrs["date"] == "day 3" and "20260102_toothbak_0000.tif" in group
    assert_bits(reopened(frames.cropped(Region((2, 0, 0), (3, 20, 33))), "same", tmp_path), voxels()[2:3])
