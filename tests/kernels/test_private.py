"""The kernels' cache is executed: it is taken only where no other user can have put anything there."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from cocodiff_sycl import private
from cocodiff_sycl.build import LEFT_S, lock, runtime_and_folder
from cocodiff_sycl.find import Unavailable, find_runtime
from cocodiff_sycl.private import private_folder
from value_tables import beside

ANOTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """top/sycl/ with a library and a folder in it, as builds leave them."""
    folder = private_folder(tmp_path / "top" / "sycl")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "one").touch()
    (folder / "library.so").touch()
    return folder


def test_a_new_folder_is_this_users_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "top" / "sycl")
        (folder / "library.so").touch()  # which anybody may write, but nobody else can reach
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    assert private_folder(folder) == folder


def test_what_others_may_read_is_in_order_and_a_sticky_folder_above(cache):
    for path in (cache.parent, cache, *cache.rglob("*")):
        path.chmod(0o755)
    (cache.parent / "link").symlink_to(cache)
    assert private_folder(cache.parent / "link") == cache
    cache.parent.chmod(0o1777)
    assert private_folder(cache) == cache


@pytest.mark.parametrize(("which", "mode", "remedy"), beside(__file__))
def test_what_others_may_write_is_refused(cache, which, mode, remedy):
    cache.chmod(0o755)
    (cache / which).resolve().chmod(mode)
    with pytest.raises(
        Unavailable, match=rf"{(cache / which).resolve()} has mode {mode:04o}: {remedy}.*COCODIFF_CACHE"
    ):
        private_folder(cache)
    (cache / which).resolve().chmod(0o700)  # pytest removes it later


@needs_root
@pytest.mark.parametrize("which", [".", "library.so", "kernels", "kernels/one", "..", "../.."])
def test_what_belongs_to_another_user_is_refused(cache, which):
    os.chown((cache / which).resolve(), ANOTHER, ANOTHER)
    with pytest.raises(Unavailable, match=rf"{(cache / which).resolve()} belongs to user {ANOTHER}: .*COCODIFF_CACHE"):
        private_folder(cache)


@needs_root
def test_a_group_is_in_order_only_where_it_is_the_owners_own(cache, monkeypatch):
    os.chown(cache, 0, ANOTHER)
    cache.chmod(0o770)
    with pytest.raises(Unavailable, match="has mode 0770"):
        private_folder(cache)
    monkeypatch.setattr(private, "_is_own_group", lambda about: about.st_gid == ANOTHER)
    assert private_folder(cache) == cache


def test_links_inside_are_refused(cache):
    (cache / "ahead-1.so").symlink_to(cache / "library.so")
    with pytest.raises(Unavailable, match=r"ahead-1\.so is a link: "):
        private_folder(cache)


def test_a_user_without_a_home_is_told(monkeypatch):
    find_runtime()
    for name in ("COCODIFF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(Unavailable, match=r"no home folder to keep kernels in: .*HOME .*COCODIFF_CACHE"):
        runtime_and_folder()


def test_a_full_disk_is_an_error_with_words(cache):
    with pytest.raises(Unavailable, match=rf"{cache}: No space left on device; .*COCODIFF_CACHE"), lock(cache):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_killed_builds_left_is_removed(cache):
    old, young, whole = cache / "library.123", cache / "saved-a_CPU_1.456", cache / "saved-a_CPU_1"
    for path in (old, young, whole):
        path.touch()
    for path in (old, whole):
        os.utime(path, (time.time() - LEFT_S - 60,) * 2)
    with lock(cache):
        assert not old.exists() and young.exists() and whole.exists()
