"""Reading of small settings files, writing of files that appear complete or are flushed to disk, and the host's memory.

Only regular files are read: opening a named pipe or a device may never return.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cocodiff.config.errors import UserError

MIB = 2**20
SETTINGS_BYTES = 16 * MIB  # far more than any settings file or model configuration holds
# words for the file types that are refused, by the type bits of `st_mode`
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def is_there(path: str | Path) -> bool:
    """Return True if a path exists. A name that no file can have, for instance one that is too long, gives False."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def is_folder(path: str | Path) -> bool:
    """Return True if a path exists and is a folder. A name that no file can have gives False."""
    return is_there(path) and Path(path).is_dir()


def irregular(path: str | Path) -> str:
    """Return the kind of a path that is not a regular file, such as "a named pipe"; "" for a regular file.

    Nothing is opened. Raise OSError if the path does not exist, and ValueError for a name that no file can have.
    """
    mode = stat.S_IFMT(Path(path).stat().st_mode)
    return "" if mode == stat.S_IFREG else KINDS.get(mode, "no regular file")


def _read_text(path: str | Path, form: str) -> str:
    """Return the text of a settings file. Raise UserError if it cannot be read, is not a regular file, is too large or
    is not UTF-8.

    Args:
        form: name of the file's format in errors, such as "YAML".
    """
    data = b""
    try:
        kind = irregular(path)
        if not kind:
            with Path(path).open("rb") as file:
                data = file.read(SETTINGS_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # the name has a null character
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
    """Return the mapping that a JSON file holds. Raise UserError if it cannot be read, is malformed or holds no JSON
    object."""
    return read_mapping(path, "JSON", json.loads, "JSON object")


def read_mapping(path: str | Path, form: str, parse: Callable[[str], Any], wanted: str) -> dict[str, Any]:
    """Read a settings file, and return the mapping that it holds.

    Raise UserError if the file cannot be read, is not a regular file, is larger than SETTINGS_BYTES, is malformed or
    does not hold a mapping.

    Args:
        form: name of the format in errors, such as "YAML".
        parse: function from the file's text to its content. Any exception that it raises means a malformed file.
        wanted: what the file should hold, for errors, such as "key: value pairs".
    """
    text = _read_text(path, form)
    try:
        data = parse(text)
    except RecursionError as error:
        raise UserError(f"{path} is not valid {form}: nested too deeply") from error
    except Exception as error:  # PyYAML does not catch what int(), float() and dates raise for a malformed value
        raise UserError(f"{path} is not valid {form}: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no {wanted} but {type(data).__name__}")
    return data


def available_memory() -> int | None:
    """Return the bytes of memory that this host has available; None if the system does not report it."""
    listed = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+)", listed.read_text(), re.MULTILINE) if listed.exists() else None
    return int(found[1]) * 1024 if found else None


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, to write a file to. At the end of the block that file replaces `path`.

    So the file appears complete or not at all: after an exception in the block `path` is as it was.
    """
    unfinished = path.with_name(f"{path.name}.partial")
    yield unfinished
    unfinished.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write a text to a file, in place of an existing one. The file appears complete or not at all."""
    with appearing(path) as unfinished:
        unfinished.write_text(text)


def flush(path: Path) -> None:
    """Wait until a file that was written is stored on the disk, so that a crash of the machine cannot lose it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
