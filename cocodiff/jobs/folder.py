"""A folder of results: they appear when all are there, one run at a time writes to it, and of what it held before only
files that cocodiff wrote are ever removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff.config.errors import OwnRankError, UserError
from cocodiff.config.files import replace_text
from cocodiff.jobs.store import FOLDER, PARTIAL, Store

MANIFEST = ".cocodiff-files.json"
LOCK = ".cocodiff.lock"
REFUSED = "refused"  # a file of a benchmark's folder: why it cannot be measured. launch/campaign.pbs looks for it
NOTHING_LEFT = "nothing was written"
LEAVING_S = 10.0  # for the ranks of a killed run to go
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


class Manifest(NamedTuple):
    """The files that cocodiff wrote into a folder. run: of which run; settings: what the results depend on, if it kept
    units."""

    run: str
    files: list[str]
    settings: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """None where there is none, or no whole one."""
        if not (folder / MANIFEST).is_file():
            return None
        try:
            found = json.loads((folder / MANIFEST).read_text())
            names = [Path(name) for name in found["files"]]
            below = [str(name) for name in names if name.parts and not name.is_absolute() and ".." not in name.parts]
            return cls(str(found["run"]), below, dict(found.get("settings") or {}))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        about = "what cocodiff wrote here: --overwrite removes these files and no others"
        replace_text(folder / MANIFEST, json.dumps({"about": about, **self._asdict()}, indent=1))


NOTHING = Manifest("", [])


def _named(pid: int) -> str:
    return f"pid {pid} on {socket.gethostname()}"


def _is_gone(who: str) -> bool:
    """Whether it names a process of this host that lives no more."""
    pid = who.removeprefix("pid ").partition(" ")[0]
    if not pid.isdecimal() or who != _named(int(pid)):
        return False
    try:
        os.kill(int(pid), 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False


def shown(out: str) -> str:
    """`--out` as an error names it."""
    return out if len(out) <= 80 else f"{out[:77]}..."


@contextlib.contextmanager
def refusing(out: str) -> Iterator[None]:
    """Turns what the file system refuses into a line about --out. Raises UserError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        said = f"--out {shown(out)}: no results can be written there ({reason}): choose another folder"
        raise UserError(said) from error


def check_place(out: str, final: Path) -> None:
    """Raises UserError where the folder `final` cannot be made or written to."""
    with refusing(out):
        if final.exists() and not final.is_dir():
            raise UserError(f"--out {shown(out)} is a file: name a folder")
        above = next(path for path in (final, *final.parents) if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"--out {shown(out)}: no permission to write in {above}: choose another folder")
        tempfile.TemporaryFile(dir=above).close()  # /proc and full disks show only when something is written


def _move(source: Path, target: Path) -> None:
    """Moves all but a manifest from one folder into another; a folder that is not there is renamed as a whole."""
    for one in [*source.iterdir()]:
        there = target / one.name
        if one.is_dir() and there.is_dir():
            _move(one, there)
        elif one.name != MANIFEST:
            one.replace(there)


class OutputFolder:
    """Results are written to `partial`, a hidden folder in `final`, and moved into `final` by `publish`, which then
    removes those of an older run; the next start completes a move that was cut short. Links are followed and stay.

    All ranks make the same object. `held` keeps other runs out; its owner is the process that ranks are forked from, or
    rank 0 under a launcher. Rank 0 opens and publishes. Whoever outlives a failed run calls `discard`, which keeps the
    hidden folder where units of work are finished: `resume` goes on there.
    """

    def __init__(self, out: str, overwrite: bool, resume: bool = False) -> None:
        """Checks that results may go to `out`, and writes nothing. Raises UserError where they may not, or where a run
        that did not end has left finished batches there and neither `overwrite` nor `resume` says what becomes of them.
        With both, they are kept."""
        self.out, self.overwrite, self.resume = shown(out), overwrite, resume
        self.run = secrets.token_hex(8)
        with refusing(self.out):
            self.final = Path(out).resolve()
        self.partial, self._lock_file = self.final / PARTIAL, self.final / LOCK
        self.store = Store(self.partial)
        check_place(out, self.final)
        with refusing(self.out):
            if self._lock_file.is_file() and self.finished is None:  # so that nobody prepares a run for nothing
                lock = os.open(self._lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    self._lock(lock, fcntl.LOCK_SH)
                finally:
                    os.close(lock)
            self._check_leftover()
            self._check_free()

    @property
    def finished(self) -> Manifest | None:
        """With `resume`, the record of a run that has ended well; None where something is left to do."""
        if not self.resume or self.overwrite:
            return None
        manifest = Manifest.read(self.partial)  # of a run that was killed while it put its results in place
        if manifest is None and not self._replaces():
            manifest = Manifest.read(self.final)
        return manifest if manifest is not None and manifest.settings else None

    def confirm(self, difference: tuple[str, str, str] | None) -> None:
        """Returns when the results of a run that is `finished` are in place. difference: between its settings and this
        run's. Raises UserError where there is one, or where some of the results are gone."""
        if difference is not None:
            told = "{}: {} there, {} now".format(*difference)
            remedy = "choose another folder, or replace them with --overwrite"
            raise UserError(f"--out {self.out}: the results there are finished, with other settings ({told}): {remedy}")
        with self.held():  # puts in place, or clears, what a kill has left
            pass
        files = (Manifest.read(self.final) or NOTHING).files
        if gone := [name for name in files if not (self.final / name).exists()]:
            told = f"the run there has ended, and {len(gone)} of its files are gone ({gone[0]})"
            raise UserError(f"--out {self.out}: {told}: make them again with --overwrite, or choose another folder")

    def _check_leftover(self) -> bool:
        """Whether what a run that did not end has finished is kept, for this one to go on with."""
        kept = self.store.kept()
        if Manifest.read(self.partial) is not None:
            return False
        unended = f"--out {self.out}: a run that did not end has"
        if kept is None:
            if self.store.is_damaged and not self.overwrite:
                damaged = "the record of its settings is damaged or of another version, so that it cannot go on"
                raise UserError(f"{unended} left results there, and {damaged}: start afresh with --overwrite")
            return False
        if not self.resume and not self.overwrite:
            raise UserError(f"{unended} finished {kept} there: go on with --resume, or start afresh with --overwrite")
        return self.resume

    def _replaces(self) -> bool:
        """Whether results that are there already may be replaced: a run that goes on may do what it might before."""
        header = self.store.header() if self.resume else None
        return self.overwrite or (header is not None and header.get("overwrite") is True)

    def _check_free(self) -> None:
        if not self.final.is_dir() or not {path.name for path in self.final.iterdir()} - {PARTIAL, LOCK, REFUSED}:
            return
        if self.finished is not None:
            return
        if not self._replaces():
            raise UserError(f"--out {self.out} exists already: choose another folder, or replace it with --overwrite")
        if Manifest.read(self.final) is None:
            remedy = "choose another folder, or delete it yourself if it holds results of an older version"
            raise UserError(f"--out {self.out} holds no {MANIFEST}, so it is not ours to overwrite: {remedy}")

    def keep_apart(self, paths: Sequence[str]) -> None:
        """Raises UserError where one of the run's inputs is among the files that it would replace."""
        replaced = {(self.final / name).resolve() for name in (Manifest.read(self.final) or NOTHING).files}
        for path in paths if replaced else ():
            if "\0" not in path and self._is_among(path, replaced):
                there = f"among the results in --out {self.out}, which --overwrite would replace"
                raise UserError(f"{path} is {there}: choose another folder")

    @staticmethod
    def _is_among(path: str, files: set[Path]) -> bool:
        """Whether an input is one of some files, a folder or a pattern of them, or in a store that holds them."""
        place = Path(path.split(":/")[0]).resolve()
        stores = [above for above in place.parents if above.suffix.lower() == ".zarr"]
        return any(
            one == place or any(one.is_relative_to(folder) for folder in (place, *stores)) or one.match(str(place))
            for one in files
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps every other run out while the block lasts, and clears what no living run owns: first of earlier ones
        that were killed, at the end of this one if it failed. Raises UserError where another run is at work."""
        made = [path for path in (self.final, *self.final.parents) if not path.exists()]
        lock = None
        try:
            with refusing(self.out):
                self.final.mkdir(parents=True, exist_ok=True)
                lock = self._take_lock()
                self._clear_leftover()
                self._check_free()
            yield
        finally:
            if lock is not None:
                self.discard()
                with contextlib.suppress(OSError):
                    self._lock_file.unlink()
                os.close(lock)
            for path in made:
                with contextlib.suppress(OSError):  # results are in it
                    path.rmdir()

    def _take_lock(self) -> int:
        """The lock's descriptor. Ranks forked later share it: it is free when the last process of the run is gone."""
        while True:
            lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                self._lock(lock, fcntl.LOCK_EX)
            except BaseException:
                os.close(lock)
                raise
            with contextlib.suppress(FileNotFoundError):  # its last owner may have removed it before we had it
                if os.path.samestat(os.fstat(lock), self._lock_file.stat()):
                    os.truncate(lock, 0)
                    os.pwrite(lock, _named(os.getpid()).encode(), 0)
                    return lock
            os.close(lock)

    def _lock(self, lock: int, kind: int) -> None:
        """Raises UserError where another run has the folder. A killed one lets go of it when its last rank is gone, a
        moment after the process that it names."""
        until = time.monotonic() + LEAVING_S
        while True:
            try:
                return fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                who = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
                if time.monotonic() > until or not _is_gone(who):
                    remedy = "wait for its end, or choose another folder"
                    raise UserError(f"--out {self.out}: another run ({who}) writes there: {remedy}") from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    return None  # some shared file systems have no locks; then nobody is kept out
                raise

    def _clear_leftover(self) -> None:
        """Puts finished results of a killed run in place, and removes unfinished ones."""
        manifest = Manifest.read(self.partial)
        if manifest is not None:
            self._put_in_place(manifest)
        elif os.path.lexists(self.partial) and not self._check_leftover():
            shutil.rmtree(self.partial)

    def open(self) -> Path:
        """`partial`: empty, or with what a run has finished that this one goes on with; what else a killed run left
        behind goes first."""
        with refusing(self.out):
            self._clear_leftover()
            self.partial.mkdir(parents=True, exist_ok=True)
        return self.partial

    def publish(self) -> None:
        """Puts the results in place. An older result disappears only when the new one stands ready."""
        found = (path.relative_to(self.partial) for path in self.partial.rglob("*") if not path.is_dir())
        # A kill may have left the manifest's own file unfinished, which is no result.
        files = sorted(str(path) for path in found if path.parts[0] not in (FOLDER, f"{MANIFEST}.partial"))
        header = self.store.header()
        manifest = Manifest(self.run, files, header["settings"] if header is not None else None)
        manifest.write(self.partial)
        try:
            self._put_in_place(manifest)
        except (OSError, UserError) as error:
            reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
            remedy = "go on with --resume, or move them by hand"
            raise OwnRankError(f"the results could not be put into {self.final} ({reason}): {remedy}") from error

    def _put_in_place(self, manifest: Manifest) -> None:
        self.store.remove()
        (self.final / REFUSED).unlink(missing_ok=True)
        older = Manifest.read(self.final) or NOTHING
        for name in set(manifest.files) - set(older.files):
            if os.path.lexists(self.final / name) and os.path.lexists(self.partial / name):
                raise UserError(f"{self.final / name} is in the way and was not written by cocodiff: move it elsewhere")
        # Both runs' files are on record until the older one's are gone.
        Manifest(older.run, sorted({*older.files, *manifest.files})).write(self.final)
        _move(self.partial, self.final)
        for name in set(older.files) - set(manifest.files):
            self._remove(name)
        manifest.write(self.final)
        shutil.rmtree(self.partial)

    def _remove(self, name: str) -> None:
        """Removes a file of an older run and the folders that it leaves empty; nothing outside `final`."""
        path = self.final / name
        if not path.parent.resolve().is_relative_to(self.final):
            return  # the user has put a link in the place of a folder
        with contextlib.suppress(OSError):  # gone already, or something else has its name now
            path.unlink()
        for folder in Path(name).parents[:-1]:
            with contextlib.suppress(OSError):  # not empty
                (self.final / folder).rmdir()

    def discard(self) -> None:
        """Removes what this run has written, unless a batch is finished."""
        if Manifest.read(self.partial) is None and self.store.kept() is None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def left(self) -> str:
        """Says what a run that ended badly has left."""
        for folder in (self.final, self.partial):
            manifest = Manifest.read(folder)
            if manifest is not None and manifest.run == self.run:
                return f"the results are finished, in {folder}"
        kept = self.store.kept()
        return f"{kept} are kept: go on with --resume" if kept is not None else NOTHING_LEFT

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A full or failing disk while results are written: one line, and exit code 1. Raises OwnRankError."""
        with storage_faults(f"the results for --out {self.out}"):
            yield


@contextlib.contextmanager
def storage_faults(what: str) -> Iterator[None]:
    """Turns a full or failing disk into one line about `what` was being written. Raises OwnRankError."""
    try:
        yield
    except OSError as error:
        short_write = error.errno is None and " written" in str(error)  # numpy's tofile says no more
        if error.errno not in _STORAGE and not short_write:
            raise
        reason = "no space left on the device" if short_write else error.strerror
        where = f" ({error.filename})" if error.filename else ""
        remedy = "free some space there, or choose another --out"
        raise OwnRankError(f"{what} could not be written: {reason}{where}: {remedy}") from error
