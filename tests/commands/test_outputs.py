"""A results folder appears whole or not at all, and nothing that is not ours is replaced."""

from pathlib import Path

import pytest

from cocodiff.commands.outputs import MARK, OutputFolder
from cocodiff.errors import UserError


def open_with_image(folder: OutputFolder, text: str) -> Path:
    partial = folder.open()
    (partial / "images").mkdir(exist_ok=True)
    (partial / "images" / "a.png").write_text(text)
    return partial


def publish(out, text: str, overwrite: bool = False) -> None:
    folder = OutputFolder(str(out), overwrite)
    (open_with_image(folder, text) / MARK).write_text(text)
    folder.publish()


def test_results_appear_at_once(tmp_path):
    out = tmp_path / "deep" / "results"
    folder = OutputFolder(str(out), overwrite=False)
    partial = folder.open()
    (partial / MARK).write_text("new")
    assert partial.parent == out.parent
    assert not out.exists()
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
    publish(out, "old")
    (out / "images" / "only_old.png").write_text("old")
    publish(out, "new", overwrite=True)
    assert (out / MARK).read_text() == "new"
    assert [path.name for path in (out / "images").iterdir()] == ["a.png"]
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
    with pytest.raises(UserError, match="out is a file: name a folder"):
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
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_not_published(tmp_path):
    killed = open_with_image(OutputFolder(str(tmp_path / "out"), overwrite=False), "half")
    (killed / "images" / "half.png").write_text("half")
    publish(tmp_path / "out", "whole")
    assert [path.name for path in (tmp_path / "out" / "images").iterdir()] == ["a.png"]
