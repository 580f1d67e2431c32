"""Results folders of one run at a time, what killed runs leave there, and disks that take no more."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from output_folders import names, open_with_image, publish

from cocodiff.config.errors import OwnRankError, UserError
from cocodiff.jobs.folder import LOCK, MANIFEST, OutputFolder
from cocodiff.jobs.journal import PARTIAL
from cocodiff.jobs.record import MARK, beside_the_record, write_settings


@pytest.mark.parametrize("exists", [False, True])
def test_a_second_run_into_the_same_folder_is_refused(tmp_path, exists):
    out = tmp_path / "out"
    if exists:
        publish(out, "old")
    first, second = (OutputFolder(str(out), overwrite=True) for _ in range(2))
    with first.held():
        partial = open_with_image(first, "first")
        with pytest.raises(UserError, match=rf"another run \(pid {os.getpid()} on .*\) writes there"), second.held():
            pass
        with pytest.raises(UserError, match="another run"):
            OutputFolder(str(out), overwrite=True)
        assert (partial / "images" / "a.png").read_text() == "first"
        (partial / MARK).write_text("first")
        first.publish()
    assert (out / MARK).read_text() == "first"
    assert names(tmp_path) == [f"out/{MANIFEST}", "out/images/a.png", f"out/{MARK}"]
    with OutputFolder(str(out), overwrite=True).held():
        pass
    assert (out / MARK).read_text() == "first"


@pytest.mark.parametrize("function", ["_move", "OutputFolder._remove"])
def test_what_replaces_results_and_is_killed_leaves_no_older_file(tmp_path, monkeypatch, function):
    """Whatever it was about to do. The next run puts the results in place, and removes the older ones."""
    out = tmp_path / "out"
    older = OutputFolder(str(out), overwrite=False)
    (open_with_image(older, "old") / "only of the older run").write_text("old")
    older.publish()
    newer = OutputFolder(str(out), overwrite=True)
    open_with_image(newer, "new")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"cocodiff.jobs.folder.{function}", killed)
        newer.publish()
    with OutputFolder(str(out), overwrite=True).held():
        assert names(out) == [MANIFEST, LOCK, "images/a.png"] and (out / "images" / "a.png").read_text() == "new"


def killed_before_its_rank(out: str) -> None:
    with OutputFolder(out, overwrite=True).held():
        if os.fork() == 0:
            time.sleep(0.7)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_ranks_of_a_killed_run_are_waited_for(tmp_path):
    killed = multiprocessing.get_context("fork").Process(target=killed_before_its_rank, args=(str(tmp_path / "out"),))
    killed.start()
    killed.join()
    with OutputFolder(str(tmp_path / "out"), overwrite=True).held():
        assert (tmp_path / "out" / LOCK).read_text().startswith(f"pid {os.getpid()} on ")


def killed_while_writing(out: str, finished: bool) -> None:
    folder = OutputFolder(out, overwrite=True)
    with folder.held():
        (open_with_image(folder, "killed") / MARK).write_text("killed")
        if finished:
            folder._put_in_place = lambda manifest: os._exit(1)
            folder.publish()
        os._exit(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_the_next_start_clears_what_a_killed_one_left_but_no_finished_results(tmp_path, exists, finished):
    out = tmp_path / "out"
    if exists:
        publish(out, "old")
    process = multiprocessing.get_context("fork").Process(target=killed_while_writing, args=(str(out), finished))
    process.start()
    process.join()
    assert [name for name in names(tmp_path) if "partial" in name]
    folder = OutputFolder(str(out), overwrite=True)
    with folder.held():
        assert not folder.partial.exists()
        found = (out / MARK).read_text() if (out / MARK).exists() else None
        assert found == ("killed" if finished else "old" if exists else None)
    assert not [name for name in names(tmp_path) if "partial" in name or "lock" in name]


def test_a_move_that_was_cut_short_is_completed(tmp_path, monkeypatch):
    out = tmp_path / "out"
    publish(out, "old")
    folder, moved, whole = OutputFolder(str(out), overwrite=True), [], Path.replace

    def replace(source, target):
        if source.name in ("a.png", MARK):
            moved.append(source)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return whole(source, target)

    with pytest.raises(KeyboardInterrupt), folder.held():
        (open_with_image(folder, "new") / MARK).write_text("new")
        monkeypatch.setattr(Path, "replace", replace)
        folder.publish()
    monkeypatch.undo()
    assert {(out / MARK).read_text(), (out / "images" / "a.png").read_text()} == {"old", "new"}
    with OutputFolder(str(out), overwrite=True).held():
        assert (out / MARK).read_text() == (out / "images" / "a.png").read_text() == "new"
    assert names(tmp_path) == [f"out/{MANIFEST}", "out/images/a.png", f"out/{MARK}"]


@pytest.mark.parametrize("left", [[], ["images"], [f"{MANIFEST}.partial"]])
def test_a_hidden_folder_without_files_is_cleared(tmp_path, left):
    """A kill may strike before anything is written, or while it is removed."""
    hidden = tmp_path / "out" / PARTIAL
    hidden.mkdir(parents=True)
    for name in left:
        path = hidden / name
        path.write_text("{") if name.startswith(".") else path.mkdir()
    with OutputFolder(str(tmp_path / "out"), False).held():
        assert names(tmp_path) == [f"out/{LOCK}"]


def test_a_disk_that_is_full_from_the_start_leaves_no_hidden_folder(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = OutputFolder(str(tmp_path / "out"), overwrite=False)
    with pytest.raises(UserError, match="no results can be written there"), folder.held():
        monkeypatch.setattr(Path, "mkdir", full)
        folder.open()
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_fails_leaves_no_folders(tmp_path):
    folder = OutputFolder(str(tmp_path / "deep" / "down" / "out"), overwrite=False)
    with pytest.raises(RuntimeError), folder.held():
        open_with_image(folder, "half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == [] and folder.left() == "nothing was written"


def test_what_a_fault_after_publishing_says_is_true(tmp_path):
    folder = OutputFolder(str(tmp_path / "out"), overwrite=False)
    with pytest.raises(RuntimeError), folder.held():
        (folder.open() / MARK).write_text("new")
        folder.publish()
        raise RuntimeError
    assert folder.left() == f"the results are finished, in {tmp_path / 'out'}"
    assert OutputFolder(str(tmp_path / "out"), overwrite=True).left() == "nothing was written"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG])
def test_a_full_or_failing_disk_is_one_line(tmp_path, number):
    publish(tmp_path / "out", "old")
    folder = OutputFolder(str(tmp_path / "out"), overwrite=True)
    said = rf"{os.strerror(number)}.*choose another --out"
    with pytest.raises(OwnRankError, match=said), folder.held(), folder.writing():
        folder.open()
        raise OSError(number, os.strerror(number), "a.tif")
    assert names(tmp_path) == [f"out/{MANIFEST}", "out/images/a.png", f"out/{MARK}"]
    with pytest.raises(FileNotFoundError), folder.writing():  # not the disk's fault
        (tmp_path / "absent").read_text()


# Repeating a run ------------------------------------------------------------------------------------------------------


def test_a_run_repeated_from_its_own_settings_goes_beside_its_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = OutputFolder("restored", overwrite=False)
    write_settings(folder.open(), {"out": "restored", "steps": 3, "overwrite": True, "batch": None})
    folder.publish()
    assert (tmp_path / "restored" / MARK).read_text() == "out: restored\nsteps: 3\n"
    old = {"out": "restored", "steps": 3, "overwrite": True}  # as older versions wrote it
    assert beside_the_record(old, "restored/run.yaml") == {"out": "restored-2", "steps": 3, "overwrite": False}
    (tmp_path / "restored-2").mkdir()
    assert beside_the_record({"out": str(tmp_path / "restored")}, f"restored/{MARK}")["out"] == str(
        tmp_path / "restored-3"
    )
    assert beside_the_record(old, "settings.yaml") == old
    assert beside_the_record({"steps": 3}, f"restored/{MARK}") == {"steps": 3}
    monkeypatch.chdir(tmp_path / "restored")
    assert beside_the_record({"out": "."}, MARK)["out"] == str(tmp_path / "restored-3")
