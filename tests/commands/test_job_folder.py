"""The folder of forked ranks is gone with the job, and the next job clears what a killed one has left."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import pytest

from cocodiff.processes.job_folder import OWNER, PREFIX, YOUNG_S, _clear_ended_jobs, job_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_gone_afterwards(temporary: Path) -> None:
    with pytest.raises(RuntimeError), job_folder() as folder:
        assert folder.parent == temporary
        raise RuntimeError
    assert list(temporary.iterdir()) == []


def test_what_a_killed_job_left_is_cleared_and_a_running_one_is_left_alone(temporary: Path) -> None:
    for name in (f"{PREFIX}killed", f"{PREFIX}young", f"{PREFIX}old", "another"):
        (temporary / name).mkdir()
    (temporary / f"{PREFIX}killed" / OWNER).touch()
    long_ago = (temporary / "another").stat().st_mtime - 2 * YOUNG_S
    os.utime(temporary / f"{PREFIX}old", (long_ago, long_ago))
    (temporary / f"{PREFIX}link").symlink_to(temporary / "another")
    with job_folder() as running, job_folder() as second:
        kept = {f"{PREFIX}young", f"{PREFIX}link", "another", running.name, second.name}
        assert {path.name for path in temporary.iterdir()} == kept


def test_a_job_that_starts_meanwhile_takes_no_young_folder_for_a_dead_jobs(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one looks at the moment before the folder's owner is locked."""
    lock = fcntl.flock

    def look_and_lock(file: IO[str], how: int) -> None:
        if how == fcntl.LOCK_EX:
            _clear_ended_jobs(temporary)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", look_and_lock)
    with job_folder() as folder:
        assert folder.is_dir()
        _clear_ended_jobs(temporary)
        assert folder.is_dir()
