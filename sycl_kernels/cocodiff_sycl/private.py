"""A folder for files that are executed. It is accepted only if no one but this user and root can have written there."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from cocodiff_sycl.find import Unavailable


def private_folder(folder: Path) -> Path:
    """Return a folder with links resolved, once it is known to be private. It is made, open to this user only, if it
    does not exist.

    Raise Unavailable if it cannot be made, or if anyone but this user and root can write it, anything in it, or a
    folder above it. From above they could replace it. A sticky folder above, like /tmp, is accepted.
    """
    folder = Path(os.path.realpath(folder))
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        fault = _fault_above(folder) or _fault_inside(folder)
    except OSError as error:
        raise Unavailable(f"cannot write the kernels' cache {folder}: {error.strerror}; set COCODIFF_CACHE") from error
    if fault:
        raise Unavailable(f"others than you may have written the kernels' cache: {fault}, or set COCODIFF_CACHE")
    return folder


def _fault_above(folder: Path) -> str:
    """Return a text that says which folder above a folder others can change, with the remedy; "" if none."""
    # In containers without a root of their own, the owner of / stands in for root.
    owners = {os.geteuid(), 0, Path(folder.anchor).stat().st_uid}
    for path in folder.parents:
        about = path.stat()
        if about.st_uid not in owners:
            return f"{path} belongs to {_name(about.st_uid)}: have it given to you (chown)"
        if _others_write(about) and not about.st_mode & stat.S_ISVTX:
            return f"{path} has mode {stat.S_IMODE(about.st_mode):04o}: chmod go-w {path}"
    return ""


def _fault_inside(folder: Path) -> str:
    """Return a text that says what in a folder others may have written, with the remedy; "" if nothing.

    Modes do not matter below a folder that no one else may enter.
    """
    paths = [folder]
    for inner, folders, files in os.walk(folder):
        paths += [Path(inner, name) for name in (*folders, *files)]
    closed = not folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    for path in paths:
        try:
            about = path.lstat()
        except FileNotFoundError:
            continue  # another process has removed it since
        if about.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to {_name(about.st_uid)}: remove {folder}"
        if stat.S_ISLNK(about.st_mode):
            return f"{path} is a link: remove {folder}"
        if _others_write(about) and not closed:
            return f"{path} has mode {stat.S_IMODE(about.st_mode):04o}: remove {folder}"
    return ""


def _others_write(about: os.stat_result) -> bool:
    """Return True if a file's mode lets anyone but its owner write it.

    Args:
        about: the file's status.
    """
    return bool(about.st_mode & stat.S_IWOTH or (about.st_mode & stat.S_IWGRP and not _is_own_group(about)))


def _is_own_group(about: os.stat_result) -> bool:
    """Return True if a file's group is the one that many systems make for its owner only, with the user's name.

    Args:
        about: the file's status.
    """
    try:
        group, user = grp.getgrgid(about.st_gid), pwd.getpwuid(about.st_uid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and user.pw_gid == about.st_gid and {*group.gr_mem} <= {user.pw_name}


def _name(uid: int) -> str:
    """Return "user" and a user's name, or the number if there is no name."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
