"""A folder of results: whole or not at all, whatever happens to whoever writes it; and what a user has put there."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from campaign.strikes import ADDS, REMOVES, watch_operations
from covering import thorough

from cocodiff.cli.main import main
from cocodiff.config.errors import OwnRankError, UserError
from cocodiff.jobs.folder import LOCK, MANIFEST, Manifest, OutputFolder, shown
from cocodiff.jobs.record import MARK, beside_the_record, write_settings
from cocodiff.jobs.store import PARTIAL, Store

FORKS = multiprocessing.get_context("fork")
BATCHES = 3
NEW = {**{f"images/{number}.png": "new" for number in range(BATCHES)}, MARK: "new"}
OLD = {"images/0.png": "old", "images/only_old.png": "old", "tables/old.txt": "old", MARK: "old"}
USERS = {"images/notes.txt": "the user's", "mine/thesis.tex": "the user's"}
# What strikes an operation. "torn": the file is there, but what was to be in it is not.
KILLS = ("kill", "torn")
ERRORS = ("interrupt", errno.ENOSPC, errno.EIO, errno.EPERM, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def files(folder: Path) -> dict[str, str]:
    """Read what can be seen in a folder of results."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path for path in found}
    return {name: path.read_text() for name, path in names.items() if not name.startswith(".")}


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*"))


def publish(out: object, contents: dict[str, str], overwrite: bool = False) -> None:
    folder = OutputFolder(str(out), overwrite)
    put(folder.open(), contents)
    folder.publish()


def in_a_process(call: Callable[[], object]) -> None:
    process = FORKS.Process(target=call)
    process.start()
    process.join()


def put(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# A run of three batches that is struck at one of its operations ------------------------------------------------------


def run(folder: OutputFolder, made: Callable[[int], object] = lambda number: None) -> None:
    """Make three batches and publish, as a command does; made: called with the number of each that is made."""
    if folder.finished is not None:
        folder.confirm(None)
        return
    with folder.held(), folder.writing():
        partial, store = folder.open(), folder.store
        if store.header() is None:
            store.begin({"seed": 0}, [1] * BATCHES, BATCHES, "slices", folder.overwrite)
        store.open_claims()
        for number in {*range(BATCHES)} - store.finished():
            made(number)
            put(partial, {f"images/{number}.png": "new"})
            store.add(number, ())
        put(partial, {MARK: "new"})
        folder.publish()


class Struck:
    """A run in a process of its own, at whose operation of some number something happens.

    operations: all that were seen; ended: the kind of the error and its words, and what the run says that it has left;
    None where it was killed.
    """

    def __init__(self, out: Path, number: int, fault: str | int, overwrite: bool, resume: bool) -> None:
        self.out, self.number, self.fault, self.given = out, number, fault, (overwrite, resume)
        self.operations: list[str] = []
        told = out.parents[1] / "told.json"
        told.unlink(missing_ok=True)
        in_a_process(lambda: self._child(told))
        self.ended = None
        if told.exists():
            self.operations, *self.ended = json.loads(told.read_text())

    def _child(self, told: Path) -> None:
        watch_operations(self._operation)
        folder, kind, message = None, "", ""
        try:
            folder = OutputFolder(str(self.out), *self.given)
            run(folder)
        except BaseException as error:
            kind, message = type(error).__name__, str(error)
        operations, self.fault = [*self.operations], ""
        told.write_text(json.dumps([operations, kind, message, folder.left() if folder else None]))
        os._exit(0)

    def _operation(self, event: str, path: Any) -> None:
        self.operations.append(event)
        now, adds = len(self.operations) == self.number + 1, event in ADDS
        if now and self.fault == "torn" and not Path(path).exists():
            Path(path).write_text("{")
        if now and self.fault in KILLS:
            os._exit(1)
        if now and self.fault == "interrupt":
            raise KeyboardInterrupt
        still_full = adds and self.fault == errno.ENOSPC and len(self.operations) > self.number
        if isinstance(self.fault, int) and (now or still_full):
            raise OSError(self.fault, os.strerror(self.fault), path)


def older(out: Path) -> None:
    publish(out, OLD)
    put(out, USERS)


def kept(out: Path, overwrite: bool = False) -> None:
    """Have a run killed when one of its batches is finished."""

    in_a_process(lambda: run(OutputFolder(str(out), overwrite), lambda number: os._exit(1) if number == 1 else None))
    assert str(Store(out / PARTIAL).kept()) == "1 of 3 slices"
    (out / LOCK).unlink()


def kept_over_older(out: Path) -> None:
    older(out)
    kept(out, overwrite=True)


def linked(out: Path) -> None:
    older(out.parents[1] / "disk" / "results")
    out.parent.mkdir()
    out.symlink_to(out.parents[1] / "disk" / "results")


BEFORE: dict[str, Callable[[Path], object]] = {
    "no folder": lambda out: None,
    "an empty folder": lambda out: out.mkdir(parents=True),
    "older results": older,
    "a link to older results": linked,
    "batches of a killed run": kept,
    "those of one that was to replace older results": kept_over_older,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("before", BEFORE)
def test_whatever_happens_at_any_operation_nothing_is_lost_and_the_next_start_ends_rightly(
    tmp_path: Path, before: str, pytestconfig: pytest.Config
) -> None:
    out, saved, places = tmp_path / "deep" / "out", tmp_path / "saved", (tmp_path / "deep", tmp_path / "disk")
    BEFORE[before](out)
    there, old = [place for place in places if place.exists()], files(out)
    resume = Store(out / PARTIAL).kept() is not None
    flags = bool(old) and not resume, resume
    for place in there:
        shutil.copytree(place, saved / place.name, symlinks=True)
    operations = Struck(out, -1, "nothing", *flags).operations
    assert len(operations) > 20, "few operations can be struck"
    world, full = [*BEFORE].index(before), thorough() or pytestconfig.getoption("--full")
    for number, event in enumerate(operations):
        if not full and number % 2 != world % 2:  # of which another world has this one
            continue
        errors = ERRORS[:1] if event in REMOVES else ERRORS  # a file that cannot be removed stays
        errors = errors if thorough() else errors[number % len(errors) :][:1]
        faults = [*(KILLS if event == "open" else KILLS[:1]), *errors]
        turn = (number // 2 + world) % len(faults)
        for fault in faults if full else faults[turn:][:1]:
            for place in places:
                shutil.rmtree(place, ignore_errors=True)
            for place in there:
                shutil.copytree(saved / place.name, place, symlinks=True)
            existed = out.stat() if out.exists() else None
            struck = Struck(out, number, fault, *flags)
            if event not in (*REMOVES, "os.truncate"):  # what could not be removed, or a lock without its owner's name
                judge_end(struck, existed is not None)
            judge(struck, old, USERS if old else {})
            # A folder that may be a mount point is never replaced.
            assert existed is None or os.path.samestat(existed, out.stat())


def judge_end(struck: Struck, existed: bool) -> None:
    """Check that a struck run that was not killed has cleaned up, and says rightly what it has left."""
    if struck.ended is None:
        return
    out, partial = struck.out.resolve(), struck.out.resolve() / PARTIAL
    told = f"{struck.fault} at {struck.number}, {struck.ended}"
    kind, message, left = struck.ended
    moving, final, finished = Manifest.read(partial), Manifest.read(out), Store(partial).kept()
    assert LOCK not in hidden(out) and partial.exists() == (moving is not None or finished is not None), told
    assert out.exists() == (existed or bool(files(out) or hidden(out))) == out.parent.exists(), told
    expected = "nothing was written" if finished is None else f"{finished} are kept: go on with --resume"
    if moving is not None:
        expected = f"the results are finished, in {out if final is not None and final.settings else partial}"
    elif final is not None and final.settings:
        expected = f"the results are finished, in {out}"
    assert left in (expected, None), told
    kinds = {"interrupt": ["KeyboardInterrupt"], errno.EPERM: ["UserError", "OwnRankError", "PermissionError"]}
    if not kind:  # it could do without
        assert left == f"the results are finished, in {out}", told
        return
    assert kind in kinds.get(struck.fault, ["UserError", "OwnRankError"]) and "\n" not in message, told
    named = {str(out), str(struck.out), shown(str(struck.out))}
    assert any(one in message for one in named) or kind in ("KeyboardInterrupt", "PermissionError"), told


def judge(struck: Struck, old: dict[str, str], users: dict[str, str]) -> None:
    """Check what a struck run has left, and that the next start comes to the end without making anything twice."""
    out, partial, whole, told = struck.out, struck.out / PARTIAL, {**NEW, **users}, f"{struck.fault} at {struck.number}"
    found, moving, final, store = files(out), Manifest.read(partial), Manifest.read(out), Store(partial)
    finished, done = store.kept(), store.finished()
    published = moving is None and final is not None and bool(final.settings)
    if moving is None:
        assert found == (whole if published else old), told
    else:
        assert all(text in (old.get(name), whole.get(name)) for name, text in found.items()), told
        assert {**found, **files(partial), **users} == {**found, **NEW}, told
    unended = finished is not None and moving is None
    if found or unended:
        said = f"{finished} there: .*--resume.*--overwrite" if unended else "--overwrite"
        with pytest.raises(UserError, match=said):
            OutputFolder(str(out), overwrite=False)
    again: list[int] = []
    needs_word = bool(found) and finished is None and moving is None and not published
    run(OutputFolder(str(out), overwrite=needs_word, resume=True), again.append)
    assert again == ([] if moving is not None or published else [*{*range(BATCHES)} - done]), told
    assert files(out) == whole and hidden(out) == [MANIFEST] and not (out / "tables").exists(), told
    final = Manifest.read(out)
    assert final is not None and {*final.files} == {*NEW}, told
    assert {path.name for path in out.parent.iterdir()} == {"out"}, told


# One run at a time ----------------------------------------------------------------------------------------------------


@contextmanager
def at_work(out: Path) -> Iterator[str]:
    """Have a run of another process write to a folder; the process, as a refusal names it."""
    ready, process = FORKS.Event(), None

    def child() -> None:
        run(OutputFolder(str(out), overwrite=True), lambda _: (ready.set(), time.sleep(60)))

    process = FORKS.Process(target=child)
    process.start()
    try:
        assert ready.wait(30)
        yield f"pid {process.pid} on "
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("before", ["no folder", "older results"])
def test_a_second_run_into_the_same_folder_is_refused_and_harms_nothing(tmp_path: Path, before: str) -> None:
    out = tmp_path / "deep" / "out"
    BEFORE[before](out)
    second = OutputFolder(str(out), overwrite=True)
    with at_work(out) as who:
        left = files(out), files(out / PARTIAL), hidden(out)
        with pytest.raises(UserError, match=rf"another run \({who}"), second.held():
            pass
        for flags in ((False, False), (True, False), (False, True)):
            with pytest.raises(UserError, match="another run"):
                OutputFolder(str(out), *flags)
        assert (files(out), files(out / PARTIAL), hidden(out)) == left and LOCK in left[2]
    with second.held():
        assert (out / LOCK).read_text().startswith(f"pid {os.getpid()} on ") and not (out / PARTIAL).exists()


def test_the_ranks_of_a_killed_run_are_waited_for(tmp_path: Path) -> None:
    out = str(tmp_path / "out")

    def child() -> None:
        with OutputFolder(out, overwrite=True).held():
            if os.fork() == 0:
                time.sleep(0.7)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    in_a_process(child)
    with (tmp_path / "out" / LOCK).open("a") as lock:
        lock.write(" " * 99)  # as of a longer name
    with OutputFolder(out, overwrite=True).held():
        assert (tmp_path / "out" / LOCK).read_text() == f"pid {os.getpid()} on {socket.gethostname()}"


def test_every_batch_is_claimed_once_and_damaged_files_are_not_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.begin({"seed": 0}, [1, 1, 2, 3, 0], 9, "slices", overwrite=False)
    claims = store.open_claims()
    assert [store.claim(claims, number) for number in (0, 1, 0, 1, 2)] == [True, True, False, False, True]
    assert store.kept() is None
    store.add(4, ())
    assert str(store.kept()) == "0 of 9 slices"
    for number in (2, 3):
        store.add(number, [("rows", [number]), ("slice", np.arange(9))])
    (store.folder / "1.npz.partial").write_text("{")  # another replica is about to write the rest
    assert str(store.kept()) == "5 of 9 slices" and store.finished() == {2, 3, 4}
    assert store.rows([3, 2]) == [3, 2] and store.open(2)["slice"].sum() == 36
    whole = (store.folder / "3.npz").read_bytes()
    for place in range(0, len(whole), 1 if thorough() else 7):
        (store.folder / "3.npz").write_bytes(whole[:place])
        assert not store.is_whole(3)
    data = whole.index(np.arange(9).tobytes())
    (store.folder / "3.npz").write_bytes(whole[:data] + b"\x09" + whole[data + 1 :])
    assert not store.is_whole(3) and store.is_whole(2)
    assert store.claim(store.open_claims(), 0)


def test_a_unit_is_done_when_all_of_it_is_on_the_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.begin({}, [1], 1, "slices", overwrite=False)
    seen: list[set[int]] = []

    def making() -> Iterator[tuple[str, Any]]:
        yield "first", np.arange(9)
        seen.append(store.finished())
        if len(seen) == 1:
            raise KeyboardInterrupt
        yield "second", np.ones(9)

    with pytest.raises(KeyboardInterrupt):
        store.add(0, making())
    assert store.finished() == set() and store.kept() is None
    store.add(0, making())
    assert seen == [set()] * 2 and store.is_whole(0) and store.open(0)["second"].sum() == 9


def test_finished_batches_without_a_record_of_their_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    kept(out)
    folder = Store(out / PARTIAL).folder
    os.truncate(folder / "job.json", 9)
    for older in (False, True):  # which told of finished batches in journals
        for resume in (False, True):
            with pytest.raises(UserError, match="cannot go on"):
                OutputFolder(str(out), overwrite=False, resume=resume)
        if not older:
            (folder / "0.npz").unlink()
            (folder / "1-0.jsonl").write_text('[1, {"number": 0, "size": 1, "rows": [], "sums": []}]')
            (folder / "job.json").write_text('{"settings": {}, "total": 3, "unit": "slices", "overwrite": false}')
    run(OutputFolder(str(out), overwrite=True))
    assert files(out) == NEW


# What the user has put there ------------------------------------------------------------------------------------------


def test_results_do_not_replace_a_file_of_the_users(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, OLD)
    folder = OutputFolder(str(out), overwrite=True)
    put(folder.open(), {**NEW, "report.html": "new"})
    put(out, {"report.html": "the user's"})
    with pytest.raises(OwnRankError, match=r"could not be put into .*report.html is in the way"):
        folder.publish()
    assert files(out) == {**OLD, "report.html": "the user's"}
    assert folder.left() == f"the results are finished, in {folder.partial}"
    folder.discard()
    (out / "report.html").unlink()
    with pytest.raises(UserError, match="exists already"), OutputFolder(str(out / "."), overwrite=False).held():
        pass
    with OutputFolder(str(out), overwrite=True).held():  # it puts them in place before its own run
        assert files(out) == {**NEW, "report.html": "new"}


def test_a_link_in_the_place_of_a_folder_protects_what_it_leads_to(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    publish(out, OLD)
    (out / "images").rename(elsewhere)
    (out / "images").symlink_to(elsewhere)
    publish(out, {MARK: "new"}, overwrite=True)
    assert (elsewhere / "only_old.png").read_text() == "old" and (out / MARK).read_text() == "new"


def test_a_manifest_reaches_nothing_outside_its_folder(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "scan.tif"
    publish(out, OLD)
    outside.write_text("precious")
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["files"] += ["../scan.tif", str(outside), "images/../../scan.tif"]
    (out / MANIFEST).write_text(json.dumps(manifest))
    publish(out, NEW, overwrite=True)
    assert outside.read_text() == "precious" and files(out) == NEW


def refused(out: object, said: str, overwrite: bool = True) -> None:
    with pytest.raises(UserError, match=said) as caught:
        OutputFolder(str(out), overwrite)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_damaged_manifest_counts_as_none(tmp_path: Path) -> None:
    publish(tmp_path / "out", OLD)
    manifest = tmp_path / "out" / MANIFEST
    for text in ("", "{", "[]", "{}", '{"run": "a", "ready": true, "files": 3}', "[" * 100_000):
        manifest.write_text(text)
        refused(tmp_path / "out", f"holds no {MANIFEST}")
    manifest.unlink()
    os.mkfifo(manifest)
    refused(tmp_path / "out", f"holds no {MANIFEST}")
    assert files(tmp_path / "out") == OLD


def test_inputs_are_not_replaced_by_the_results_they_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish("out", {"images/a.png": "old", "images/b.zarr/.zgroup": "old"})
    folder = OutputFolder("out", overwrite=True)
    folder.keep_apart(["block", "scan.tif", "volume.h5:/data", str(tmp_path / "out" / "mine.tif")])
    within = "out/images/b.zarr/labels/holes"
    for path in ("out/images/a.png", "out/../out/images/a.png:/data", "out/images", "out/images/*.png", within):
        with pytest.raises(UserError, match="among the results in --out out, which --overwrite would replace"):
            folder.keep_apart([path])


@pytest.mark.parametrize("option", ["input", "mask", "truth"])
def test_a_file_of_the_users_among_earlier_results_stays(option: str, tmp_path: Path) -> None:
    files = {name: tmp_path / name / "own.tif" for name in ("input", "mask", "truth")}
    for file in files.values():
        file.parent.mkdir()
        tifffile.imwrite(file, np.repeat(np.uint8([0, 255, 0]), 32 * 96).reshape(96, 96), photometric="minisblack")
    out, before = files[option].parent, files[option].read_bytes()
    Manifest("", ["own.tif"]).write(out)
    words = [f"--{name}={file}" for name, file in files.items()]
    assert main(["inpaint", *words, f"--out={out}", "--overwrite", "--steps=1", "--quiet"]) == 2
    assert files[option].read_bytes() == before


# Where results may go -------------------------------------------------------------------------------------------------


def unchanging(folder: Path) -> dict[Path, tuple[int, ...]]:
    """List what nobody who only looks changes: all but the time of the last access."""
    names = ("mode", "ino", "dev", "nlink", "uid", "gid", "size", "mtime_ns", "ctime_ns")
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {path: tuple(getattr(one, f"st_{name}") for name in names) for path, one in found}


@pytest.mark.parametrize("overwrite", [False, True])
def test_impossible_targets_are_refused_in_one_line(tmp_path: Path, monkeypatch: Any, overwrite: bool) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for folder in ("thesis", "users"):
        Path(folder).mkdir()
    Path("thesis/thesis.tex").write_text("precious")
    Path("users", MARK).write_text("input: scan.tif")
    before = unchanging(tmp_path)
    held = f"holds no {MANIFEST}" if overwrite else "exists already: .*--overwrite"
    places = {name: f"--out {re.escape(name)} {held}" for name in ("/", "a/..", ".", "thesis", "users")}
    places |= dict.fromkeys(("/proc/x", "/proc/x/y"), "No such file") | {"loop": "loop: .*loop", "a\0b": "null byte"}
    places |= dict.fromkeys(("n" * 300, "é" * 128, "d/" * 3000), "File name too long")
    places |= dict.fromkeys(("/dev/null", f"thesis/../users/{MARK}"), "is a file")
    places |= {"/dev/null/a": "no permission to write in /dev/null", f"users/{MARK}/a": "no permission to write in"}
    for out, said in places.items():
        refused(out, said, overwrite)
    assert unchanging(tmp_path) == before


def test_names_mean_what_they_say_and_the_working_directory_is_a_folder_too(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    publish(".", OLD)
    put(Path(), {"scan.tif": "precious"})
    publish(".", NEW, overwrite=True)
    assert Path.cwd() == tmp_path / "here" and files(Path()) == {**NEW, "scan.tif": "precious"}
    publish("a/../../out", NEW)
    publish("../" + "n" * 255, NEW)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "out", "n" * 255}


# Repeating a run ------------------------------------------------------------------------------------------------------


def test_a_run_repeated_from_its_own_settings_goes_beside_its_results(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = OutputFolder("restored", overwrite=False)
    write_settings(folder.open(), {"out": "restored", "seed": 0, "overwrite": True, "resume": True, "batch": None})
    folder.publish()
    assert Path("restored", MARK).read_text() == "out: restored\nseed: 0\n"
    old = {"out": "restored", "steps": 3, "overwrite": True}  # as older versions wrote it
    assert beside_the_record(old, "restored/run.yaml") == {"out": "restored-2", "steps": 3, "overwrite": False}
    assert beside_the_record(old, "restored/run.yaml", resume=True)["out"] == "restored"
    Path("restored-2").mkdir()
    assert beside_the_record(old, "restored/run.yaml", resume=True)["out"] == "restored-2"
    whole = str(tmp_path / "restored")
    assert beside_the_record({"out": whole}, f"restored/{MARK}")["out"] == f"{whole}-3"
    assert beside_the_record(old, "settings.yaml") == old
    assert beside_the_record({"steps": 3}, f"restored/{MARK}") == {"steps": 3}
    monkeypatch.chdir(whole)
    assert beside_the_record({"out": "."}, MARK)["out"] == f"{whole}-3"
