"""Settings files that are none: a line that names them, at once, whatever they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cocodiff.config.config import read_yaml
from cocodiff.config.errors import UserError
from cocodiff.config.files import is_there, read_json

pytestmark = pytest.mark.usefixtures("promptly")
READERS = {"yaml": read_yaml, "json": read_json}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_only_regular_files_are_opened(
    read: Callable[[Path], dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        (tmp_path / "zero").symlink_to("/dev/zero")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        (tmp_path / "small").symlink_to(tmp_path / "real")
        (tmp_path / "real").write_text('{"steps": 3}')
        for name, said in {
            "pipe": "a named pipe",
            "zero": "a device",
            "socket": "a socket",
            ".": "a directory",
            "loop": "symbolic link",
            "none": "No such file",
            "x" * 300: "too long",
            "nul\0": "null",
        }.items():
            with pytest.raises(UserError, match=f"cannot read .*{said}"):
                read(tmp_path / name)
            if name in ("none", "x" * 300, "nul\0", "loop"):
                assert not is_there(tmp_path / name)
        assert read(tmp_path / "small") == {"steps": 3} and is_there(tmp_path / "small")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: " + "[" * 2000 + "]" * 2000, "not valid YAML: nested too deeply"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(2000)), "not valid YAML: nested too deeply"),
        ("steps: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ("steps: 2026-13-45", "not valid YAML: month must be"),
        ("steps: !!int many", "not valid YAML: invalid literal"),
        ("steps: !!bool many", "not valid YAML"),
        ("steps: !!timestamp soon", "not valid YAML"),
        ("# " + "x" * 2**24 + "\nsteps: 1", "larger than 16 MiB"),
    ],
)
def test_yaml_that_no_parser_takes(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_yaml(tmp_path / "run.yaml")
    assert "run.yaml" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[]", "holds no JSON object but list"),
        (b"null", "holds no JSON object but NoneType"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 10**5, "not valid JSON: nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
    ],
)
def test_json_that_is_no_object(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=f"config.json.*{said}"):
        read_json(tmp_path / "config.json")
