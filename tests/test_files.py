"""Settings files that are none: a line that names them, at once, whatever they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cocodiff_eval.data.reoriented import MaskStatistics, RestoredFile
from cocodiff_eval.harness.images import save_frames
from value_tables import beside

from cocodiff.config import files
from cocodiff.config.config import read_yaml
from cocodiff.config.errors import UserError
from cocodiff.config.files import is_there, read_json
from cocodiff.jobs.store import Store

pytestmark = pytest.mark.usefixtures("promptly")
READERS = {"yaml": read_yaml, "json": read_json}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_only_regular_files_are_opened(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        (tmp_path / "zero").symlink_to("/dev/zero")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        (tmp_path / "small").symlink_to(tmp_path / "real")
        (tmp_path / "real").write_text('{"steps": 3}')
        kinds = {"pipe": "named pipe", "zero": "device", "socket": "socket", ".": "directory"}
        nothing = {"loop": "symbolic link", "none": "No such file", "x" * 300: "too long", "nul\0": "null"}
        for name, said in (kinds | nothing).items():
            with pytest.raises(UserError, match=f"cannot read .*{said}"):
                read(tmp_path / name)
            assert is_there(tmp_path / name) is (name in kinds)
        assert read(tmp_path / "small") == {"steps": 3} and is_there(tmp_path / "small")


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        *((form, text.encode("latin-1"), said) for form, text, said in beside(__file__)),
        ("yaml", b"steps: " + b"[" * 1000 + b"]" * 1000, "YAML"),
        ("yaml", b"".join(b" " * depth + b"a:\n" for depth in range(1000)), "YAML"),
        ("yaml", b"steps: " + b"9" * 5000, "YAML: Exceeds the limit"),
        ("yaml", b"# " + b"x" * 2**24 + b"\nsteps: 1", "16 MiB"),
        ("json", b"[" * 10**5, "JSON"),
        ("json", b'{"a": ' + b"9" * 5000 + b"}", "JSON: Exceeds the limit"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_files_that_no_parser_takes_or_that_hold_something_else(tmp_path, monkeypatch, form, text, said):
    monkeypatch.chdir(tmp_path)
    Path("settings").write_bytes(text)
    with pytest.raises(UserError, match=said) as caught:
        READERS[form](Path("settings"))
    assert "settings" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_of_the_largest_size_is_read(tmp_path):
    (tmp_path / "large.json").write_text('{"steps": 1}'.rjust(2**24))
    assert read_json(tmp_path / "large.json") == {"steps": 1}


def write_unit(folder: Path) -> None:
    store = Store(folder)
    store.folder.mkdir()
    store.add(0, [("rows", ["kept"]), ("slice", np.ones((2, 2)))])


def write_slices(folder: Path) -> None:
    along_x = RestoredFile(folder / "voxels", "x", MaskStatistics.of(lambda _: np.ones((2, 2), bool), 3))
    along_x.create()
    along_x.write(1, np.ones(6))


WRITERS: list[Callable[[Path], None]] = [
    *(write_unit, write_slices),
    lambda folder: save_frames(folder / "video.tif", np.zeros((2, 4, 4, 3), np.uint8)),
]


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_said_to_be_on_the_disk_is_synced(tmp_path, unsynced, write):
    """A power cut must not leave what is renamed into place, or told of, without what it holds."""
    write(tmp_path)
    assert any(path.is_file() for path in tmp_path.rglob("*")) and not unsynced(tmp_path)


def test_memory_that_the_page_cache_gives_back_is_available(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemFree:   2 kB\nMemAvailable:   5 kB\n")
    monkeypatch.setattr(files, "Path", lambda _: tmp_path / "meminfo")
    assert files.available_memory() == 5 << 10
