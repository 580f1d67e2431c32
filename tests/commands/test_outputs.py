"""A results folder appears whole or not at all, and nothing that is not ours is replaced."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from output_folders import names, open_with_image, publish

from cocodiff.config.errors import OwnRankError, UserError
from cocodiff.jobs.folder import MANIFEST, OutputFolder
from cocodiff.jobs.record import MARK


def test_results_appear_at_once(tmp_path):
    out = tmp_path / "deep" / "results"
    folder = OutputFolder(str(out), overwrite=False)
    partial = folder.open()
    (partial / MARK).write_text("new")
    assert [path.name for path in out.iterdir()] == [partial.name]
    folder.publish()
    assert (out / MARK).read_text() == "new"
    assert [path.name for path in out.parent.iterdir()] == ["results"]


def test_an_existing_result_is_kept_without_overwrite(tmp_path):
    publish(tmp_path / "out", "old")
    with pytest.raises(UserError, match="exists already: choose another folder, or replace it with --overwrite"):
        OutputFolder(str(tmp_path / "out"), overwrite=False)
    assert (tmp_path / "out" / MARK).read_text() == "old"


def test_overwrite_replaces_everything_of_the_old_result(tmp_path):
    out = tmp_path / "out"
    folder = OutputFolder(str(out), overwrite=False)
    (open_with_image(folder, "old") / "tables").mkdir()
    (folder.partial / "tables" / "only_old.txt").write_text("old")
    folder.publish()
    publish(out, "new", overwrite=True)
    assert names(out) == [MANIFEST, "images/a.png", MARK]
    assert (out / MARK).read_text() == (out / "images" / "a.png").read_text() == "new"
    assert not (out / "tables").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_result_stays_until_the_new_one_is_published(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    folder = OutputFolder(str(out), overwrite=True)
    (folder.open() / MARK).write_text("new")
    assert (out / MARK).read_text() == "old"
    folder.discard()
    assert (out / MARK).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_is_refused(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="choose another folder"):
        OutputFolder(str(tmp_path), overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    publish(tmp_path / "out", "new")
    assert (tmp_path / "out" / MARK).read_text() == "new"


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="is a file: name a folder"):
        OutputFolder(str(tmp_path / "out"), overwrite=True)


def test_a_file_above_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match=r"no permission to write in .*file"):
        OutputFolder(str(tmp_path / "file" / "out"), overwrite=False)


def test_discard_leaves_nothing(tmp_path):
    folder = OutputFolder(str(tmp_path / "out"), overwrite=False)
    folder.open()
    folder.discard()
    folder.discard()
    assert names(tmp_path) == []


def test_a_run_that_fails_leaves_no_folder_that_it_made(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyError), OutputFolder(str(tmp_path / "mine/a/b"), overwrite=False).held():
        raise KeyError
    assert [*tmp_path.rglob("*")] == [tmp_path / "mine"]


def test_what_a_killed_run_left_is_not_published(tmp_path):
    killed = open_with_image(OutputFolder(str(tmp_path / "out"), overwrite=False), "half")
    (killed / "images" / "half.png").write_text("half")
    publish(tmp_path / "out", "whole")
    assert [path.name for path in (tmp_path / "out" / "images").iterdir()] == ["a.png"]


# What the user has put there ------------------------------------------------------------------------------------------


def test_a_folder_with_a_run_yaml_of_the_users_is_not_ours(tmp_path):
    (tmp_path / MARK).write_text("input: scan.tif")
    (tmp_path / "scan.tif").write_text("precious")
    with pytest.raises(UserError, match=f"holds no {MANIFEST}, so it is not ours to overwrite"):
        OutputFolder(str(tmp_path), overwrite=True)
    assert names(tmp_path) == [MARK, "scan.tif"]


def test_files_that_the_user_adds_to_results_stay(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    (out / "images" / "notes.txt").write_text("precious")
    (out / ".out.old").mkdir()
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "mine").write_text("precious")
    publish(out, "new", overwrite=True)
    assert names(tmp_path) == [
        ".out.old/mine",
        f"out/{MANIFEST}",
        "out/images/a.png",
        "out/images/notes.txt",
        f"out/{MARK}",
    ]
    assert (out / ".out.old").is_dir() and (out / MARK).read_text() == "new"


def test_results_do_not_replace_a_file_of_the_users(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    folder = OutputFolder(str(out), overwrite=True)
    (open_with_image(folder, "new") / "report.html").write_text("new")
    (out / "report.html").write_text("precious")
    with pytest.raises(OwnRankError, match=r"could not be put into .*report.html is in the way"):
        folder.publish()
    assert ((out / "report.html").read_text(), (out / MARK).read_text()) == ("precious", "old")
    assert folder.left() == f"the results are finished, in {folder.partial}"
    folder.discard()
    (out / "report.html").unlink()
    with pytest.raises(UserError, match="exists already"), OutputFolder(str(out / "."), overwrite=False).held():
        pass
    with OutputFolder(str(out), overwrite=True).held():  # it puts them in place before its own run
        assert (out / "report.html").read_text() == "new"


def test_a_link_in_the_place_of_a_folder_protects_what_it_leads_to(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    folder = OutputFolder(str(out), overwrite=False)
    (open_with_image(folder, "old") / MARK).write_text("old")
    folder.publish()
    (out / "images").rename(elsewhere)
    (out / "images").symlink_to(elsewhere)
    again = OutputFolder(str(out), overwrite=True)
    (again.open() / MARK).write_text("new")
    again.publish()
    assert (elsewhere / "a.png").read_text() == "old" and (out / MARK).read_text() == "new"


@pytest.mark.parametrize("name", ["../scan.tif", "/etc/passwd", "images/../../scan.tif"])
def test_a_manifest_reaches_nothing_outside_its_folder(tmp_path, name):
    out = tmp_path / "out"
    publish(out, "old")
    (tmp_path / "scan.tif").write_text("precious")
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps(manifest | {"files": [*manifest["files"], name]}))
    publish(out, "new", overwrite=True)
    assert (tmp_path / "scan.tif").read_text() == "precious"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": "a", "ready": true, "files": 3}', "[" * 100_000])
def test_a_damaged_manifest_counts_as_none(tmp_path, text):
    publish(tmp_path / "out", "old")
    (tmp_path / "out" / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="not ours to overwrite"):
        OutputFolder(str(tmp_path / "out"), overwrite=True)
    (tmp_path / "out" / MANIFEST).unlink()
    os.mkfifo(tmp_path / "out" / MANIFEST)
    with pytest.raises(UserError, match="not ours to overwrite"):
        OutputFolder(str(tmp_path / "out"), overwrite=True)


def test_inputs_are_not_replaced_by_the_results_they_lead_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "out", "old")
    folder = OutputFolder("out", overwrite=True)
    folder.keep_apart(["block", "scan.tif", "volume.h5:/data", str(tmp_path / "out" / "mine.tif")])
    for path in ("out/images/a.png", "out/../out/images/a.png:/data"):
        with pytest.raises(UserError, match="among the results in --out out, which --overwrite would replace"):
            folder.keep_apart([path])


# Where results may go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed_and_stays(tmp_path, exists):
    target, link = tmp_path / "disk" / "results", tmp_path / "out"
    (target if exists else target.parent).mkdir(parents=True)
    link.symlink_to(target)
    for text in ("first", "second", "third"):
        publish(link, text, overwrite=True)
        assert link.is_symlink() and (target / MARK).read_text() == text
    assert names(tmp_path) == [f"disk/results/{MANIFEST}", "disk/results/images/a.png", f"disk/results/{MARK}"]


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("/", "choose another folder"),
        ("a/..", "choose another folder"),
        (".", "choose another folder"),
        ("/dev/null", "is a file: name a folder"),
        ("/dev/null/a", "no permission to write in /dev/null"),
        ("/proc/x", "choose another folder"),
        ("/proc/x/y", "choose another folder"),
        ("loop", "choose another folder"),
        ("n" * 300, "File name too long"),
        ("é" * 128, "File name too long"),
        ("d/" * 3000, "File name too long"),
        ("a\0b", "choose another folder"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_impossible_targets_are_refused_in_one_line(tmp_path, monkeypatch, out, said, overwrite):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=said) as caught:
        OutputFolder(out, overwrite)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_a_name_with_dots_means_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish("a/../out", "new")
    publish("n" * 255, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "n" * 255}


def test_results_go_into_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    publish(".", "old")
    (tmp_path / "here" / "scan.tif").write_text("precious")
    publish(".", "new", overwrite=True)
    assert Path.cwd() == tmp_path / "here" and names(Path()) == [MANIFEST, "images/a.png", MARK, "scan.tif"]


MOUNTED = """
import sys
from cocodiff.jobs.folder import OutputFolder
for text in ("old", "new"):
    folder = OutputFolder(sys.argv[1], overwrite=True)
    with folder.held():
        (folder.open() / "run.yaml").write_text(text)
        folder.publish()
"""


def test_a_mount_point_is_published_into(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    script = f'mount --bind {tmp_path}/disk {tmp_path}/out && exec "$@"'
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount points: needs root and unshare")
    command = ["unshare", "-m", "bash", "-c", script, "bash", sys.executable, "-c", MOUNTED, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == [f"disk/{MANIFEST}", f"disk/{MARK}"] and (tmp_path / "disk" / MARK).read_text() == "new"


def test_a_folder_that_cannot_be_renamed_away_is_published_into(tmp_path, monkeypatch):
    """As a mount point, which needs root to be made."""
    publish(tmp_path / "out", "old")
    busy = OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def rename(source, target):
        raise busy

    monkeypatch.setattr(Path, "rename", rename)
    publish(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / MARK).read_text() == "new"
