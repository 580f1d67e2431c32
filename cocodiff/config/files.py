"""Reading the small files that a user names, and no others: opening a named pipe or a device may never return. And
writing files that are whole, or on the disk, from a moment on."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cocodiff.config.errors import UserError

MIB = 2**20
SETTINGS_BYTES = 16 * MIB  # far more than any settings file or model configuration holds
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def irregular(path: str | Path) -> str:
    """The kind of a path that is no regular file, such as "a named pipe"; "" for a regular file. Opens nothing. Raises
    OSError where there is nothing of that name, ValueError for a name that no file can have."""
    mode = stat.S_IFMT(Path(path).stat().st_mode)
    return "" if mode == stat.S_IFREG else KINDS.get(mode, "no regular file")


def is_there(path: str | Path) -> bool:
    """Whether a path names anything. A name that no file can have, too long for one, does not."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def is_folder(path: str | Path) -> bool:
    """Whether a path names a folder."""
    return is_there(path) and Path(path).is_dir()


def _read_text(path: str | Path, form: str) -> str:
    data = b""
    try:
        kind = irregular(path)
        if not kind:
            with Path(path).open("rb") as file:
                data = file.read(SETTINGS_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a null character
        raise UserError(f"cannot read {str(path)!r}: {error}") from error
    if kind:
        raise UserError(f"cannot read {path}: it is {kind}; name a regular file")
    if len(data) > SETTINGS_BYTES:
        raise UserError(f"cannot read {path}: it is larger than {SETTINGS_BYTES // MIB} MiB, so it holds no settings")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid {form}: {error}") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON file's mapping. Raises UserError as `read_mapping` does."""
    return read_mapping(path, "JSON", json.loads, "JSON object")


def read_mapping(path: str | Path, form: str, parse: Callable[[str], Any], wanted: str) -> dict[str, Any]:
    """A settings file's mapping. form: what it should be, for errors ("YAML"). Raises UserError where it cannot be
    read, is no regular file, larger than SETTINGS_BYTES, malformed or something else than a mapping."""
    text = _read_text(path, form)
    try:
        data = parse(text)
    except RecursionError as error:
        raise UserError(f"{path} is not valid {form}: nested too deeply") from error
    except Exception as error:  # PyYAML lets pass what int(), float() and dates raise for a malformed value
        raise UserError(f"{path} is not valid {form}: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no {wanted} but {type(data).__name__}")
    return data


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A path beside, for the block to write to; at the block's end that file takes its place under the own name. So a
    file appears complete or not at all."""
    unfinished = path.with_name(f"{path.name}.partial")
    yield unfinished
    unfinished.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Writes a file that appears complete or not at all."""
    with appearing(path) as unfinished:
        unfinished.write_text(text)


def flush(path: Path) -> None:
    """Returns when a file that was written is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
