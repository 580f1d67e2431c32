"""The folder of a run's results. They appear in it all at once, when the run is finished.

One run at a time writes to a folder. Only files that cocodiff wrote are ever removed from it.
"""

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

MANIFEST = ".cocodiff-files.json"  # list of the files that cocodiff wrote into the folder
LOCK = ".cocodiff.lock"  # locked by the run that writes to the folder, which it names
REFUSED = "refused"  # file with the reason why a benchmark cannot be measured; launch/campaign.pbs looks for it
NOTHING_LEFT = "nothing was written"
LEAVING_S = 10.0  # longest wait for the last ranks of a killed run to end
# Error numbers of a full or failing disk.
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


class Manifest(NamedTuple):
    """The list of the files that a run of cocodiff wrote into its folder of results, kept in that folder as JSON.

    Only files of this list are ever replaced or removed.
    """

    run: str  # the run's identifier, 16 hexadecimal digits
    files: list[str]  # paths relative to the folder
    # The options and inputs that the results depend on, by name. None or empty for runs that cannot be resumed.
    settings: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest in a folder, without files outside of it; None if there is none or it is damaged."""
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
        """Write the manifest into a folder, in place of an older one."""
        about = "what cocodiff wrote here: --overwrite removes these files and no others"
        replace_text(folder / MANIFEST, json.dumps({"about": about, **self._asdict()}, indent=1))


NOTHING = Manifest("", [])


def _named(pid: int) -> str:
    """Return the text by which a folder's lock file names a process of this host: its id and the host's name."""
    return f"pid {pid} on {socket.gethostname()}"


def _is_gone(who: str) -> bool:
    """Return True if the process that holds a folder's lock is known to have ended.

    who: content of the lock file, such as "pid 123 on node7"; False for processes of other hosts
    """
    pid = who.removeprefix("pid ").partition(" ")[0]
    if not pid.isdecimal() or who != _named(int(pid)):
        return False
    try:
        os.kill(int(pid), 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False


def shown(out: str) -> str:
    """Return the value of the option --out, shortened to 80 characters for an error."""
    return out if len(out) <= 80 else f"{out[:77]}..."


@contextlib.contextmanager
def refusing(out: str) -> Iterator[None]:
    """Raise a UserError about the folder of results in place of an error of the file system in the block.

    out: value of the option --out, shortened
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        said = f"--out {out}: no results can be written there ({reason}): choose another folder"
        raise UserError(said) from error


def _move(source: Path, target: Path) -> None:
    """Move all files from the folder `source` into `target`, in place of files of the same names.

    The manifest, cocodiff's list of its files, is left in `source`. A folder that does not exist in `target` is renamed
    as a whole.
    """
    for one in [*source.iterdir()]:
        there = target / one.name
        if one.is_dir() and there.is_dir():
            _move(one, there)
        elif one.name != MANIFEST:
            one.replace(there)


class OutputFolder:
    """The folder that a run writes its results to (--out).

    Results are written to `partial`, a hidden folder in `final`, which is the folder of --out. `publish` moves them
    into `final` and then removes those of an older run. If it is interrupted, the next start completes the move. A link
    in the place of the folder is followed and kept.

    All ranks make the same object. The process that ranks are forked from, or rank 0 under a launcher, enters `held`,
    which keeps other runs out. Rank 0 calls `open` and `publish`. At the end `held` calls `discard`, which removes the
    hidden folder of a failed run. It is kept if it has finished units of work, which are batches of slices, prompts or
    trials: a run with `resume` continues from them.
    """

    def __init__(self, out: str, overwrite: bool, resume: bool = False) -> None:
        """Check that results may be written to a folder. Nothing is written. Raise UserError if they may not.

        Finished batches of a run that did not end need `overwrite`, which removes them, or `resume`, which continues
        from them. With both they are kept.

        Args:
            out: path of the folder, the value of --out
            overwrite: True if results of an earlier run may be replaced
            resume: True to continue a run into this folder that did not end
        """
        self.out, self.overwrite, self.resume = shown(out), overwrite, resume
        self.run = secrets.token_hex(8)
        with refusing(self.out):
            self.final = Path(out).resolve()
            self.partial, self._lock_file = self.final / PARTIAL, self.final / LOCK
            self.store = Store(self.partial)
            self._check_place()
            if self._lock_file.is_file() and self.finished is None:  # fail before a run is prepared
                os.close(self._opened_lock(os.O_RDONLY, fcntl.LOCK_SH))
            self._check_leftover()
            self._check_free()

    def _check_place(self) -> None:
        """Raise UserError if the folder of results cannot be made or written to. Nothing is left in it."""
        if self.final.exists() and not self.final.is_dir():
            raise UserError(f"--out {self.out} is a file: name a folder")
        above = next(path for path in (self.final, *self.final.parents) if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"--out {self.out}: no permission to write in {above}: choose another folder")
        tempfile.TemporaryFile(dir=above).close()  # /proc and full disks raise only when something is written

    @property
    def finished(self) -> Manifest | None:
        """The list of files and settings of a finished run that --resume finds in the folder, with nothing left to do.

        None if work is left, without --resume, or with --overwrite.
        """
        if not self.resume or self.overwrite:
            return None
        manifest = Manifest.read(self.partial)  # of a run killed while it moved its results
        if manifest is None and not self._replaces():
            manifest = Manifest.read(self.final)
        return manifest if manifest is not None and manifest.settings else None

    def confirm(self, difference: tuple[str, str, str] | None) -> None:
        """Confirm that the folder has this run's results already, so that --resume has nothing to do.

        If the move of the results into the folder was interrupted, it is completed. Raise UserError if some of the
        results are missing, or if the earlier run had other settings than this one.

        Args:
            difference: the first setting that differs, from `first_difference`: its name, its value in the earlier run
                and its value now; None if none does
        """
        if difference is not None:
            told = "{}: {} there, {} now".format(*difference)
            remedy = "choose another folder, or replace them with --overwrite"
            raise UserError(f"--out {self.out}: the results there are finished, with other settings ({told}): {remedy}")
        with self.held():  # entering it moves or removes what a killed run has left
            pass
        files = (Manifest.read(self.final) or NOTHING).files
        if gone := [name for name in files if not (self.final / name).exists()]:
            told = f"the run there has ended, and {len(gone)} of its files are gone ({gone[0]})"
            raise UserError(f"--out {self.out}: {told}: make them again with --overwrite, or choose another folder")

    def _check_leftover(self) -> bool:
        """Return True if this run continues from the finished units of work of a run that did not end.

        Raise UserError if there are such units and neither --resume nor --overwrite is given. Raise it too if the
        description of their job is damaged and --overwrite is not given.
        """
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
        """Return True if existing results may be replaced: with --overwrite, or if the resumed run began with it."""
        header = self.store.header() if self.resume else None
        return self.overwrite or (header is not None and header.get("overwrite") is True)

    def _check_free(self) -> None:
        """Raise UserError if the folder of results has files that this run may not replace.

        Results of an earlier run may be replaced with --overwrite. Files that cocodiff did not write never may be.
        """
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
        """Raise UserError if an input of the run is among the earlier results that the run would replace.

        paths: the inputs as the user names them: files, folders, patterns, or paths inside a file such as a.h5:/b
        """
        replaced = {(self.final / name).resolve() for name in (Manifest.read(self.final) or NOTHING).files}
        for path in paths if replaced else ():
            if "\0" not in path and self._is_among(path, replaced):
                there = f"among the results in --out {self.out}, which --overwrite would replace"
                raise UserError(f"{path} is {there}: choose another folder")

    @staticmethod
    def _is_among(path: str, files: set[Path]) -> bool:
        """Return True if `path`, an input of the run, names one of `files`, earlier results that it would replace.

        An input may also be a folder that has one of them, a pattern that matches one, or a path in a Zarr store with
        one.
        """
        place = Path(path.split(":/")[0]).resolve()
        stores = [above for above in place.parents if above.suffix.lower() == ".zarr"]
        return any(
            one == place or any(one.is_relative_to(folder) for folder in (place, *stores)) or one.match(str(place))
            for one in files
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the folder while the block lasts. Raise UserError if another run writes to it.

        On entry, results of a killed run are moved into place if they are finished, and removed if they are not. At the
        end, what a failed run has written is removed, with the folders made for it. Finished units of work are kept.
        """
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
                with contextlib.suppress(OSError):  # it has results
                    path.rmdir()

    def _take_lock(self) -> int:
        """Lock the folder of results for this run and return the lock file's descriptor.

        Raise UserError if another run has it locked. Ranks that are forked later share the descriptor, so the lock is
        free when the run's last process has ended.
        """
        while True:
            lock = self._opened_lock(os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # its last owner may have removed it meanwhile
                if os.path.samestat(os.fstat(lock), self._lock_file.stat()):
                    os.truncate(lock, 0)
                    os.pwrite(lock, _named(os.getpid()).encode(), 0)
                    return lock
            os.close(lock)

    def _opened_lock(self, flags: int, kind: int) -> int:
        """Open the lock file of the folder of results, lock it, and return its descriptor.

        Raise UserError if another run has it locked.

        Args:
            flags: those of `os.open`
            kind: fcntl.LOCK_EX to own the folder, fcntl.LOCK_SH to test it
        """
        lock = os.open(self._lock_file, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            self._lock(lock, kind)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _lock(self, lock: int, kind: int) -> None:
        """Lock the open lock file of the folder of results. Raise UserError if another run has it locked.

        If the process named in the file has ended, wait up to LEAVING_S: the last ranks of a killed run end shortly
        after it. File systems without locks are accepted.

        Args:
            lock: the file's descriptor
            kind: fcntl.LOCK_EX to own the folder, fcntl.LOCK_SH to test it
        """
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
                    return None  # some shared file systems have no locks: other runs are not kept out
                raise

    def _clear_leftover(self) -> None:
        """Handle what a killed run has left in the hidden folder of unfinished results.

        If its results are complete, they are moved into the folder of results. Else they are removed, unless this run
        continues from them (--resume).
        """
        manifest = Manifest.read(self.partial)
        if manifest is not None:
            self._put_in_place(manifest)
        elif os.path.lexists(self.partial) and not self._check_leftover():
            shutil.rmtree(self.partial)

    def open(self) -> Path:
        """Make the hidden folder that this run writes its results into, and return it.

        It is empty, or has the finished units of work that the run continues from (--resume). Anything else that a
        killed run has left is removed, or moved into the folder of results if it is complete.
        """
        with refusing(self.out):
            self._clear_leftover()
            self.partial.mkdir(parents=True, exist_ok=True)
        return self.partial

    def publish(self) -> None:
        """Move the finished results from the hidden folder into the folder of --out. Then remove those of an older run.

        Rank 0 calls it at the end of the work. Raise OwnRankError if it fails.
        """
        found = (path.relative_to(self.partial) for path in self.partial.rglob("*") if not path.is_dir())
        # A run that was killed may have left an unfinished manifest, which is not a result.
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
        """Move finished results from the hidden folder into the folder of --out. Remove what is no longer needed.

        The record of finished units of work and the files of an older run are removed. Raise UserError if a file that
        cocodiff did not write is in the way.

        Args:
            manifest: the list of the results to move
        """
        self.store.remove()
        (self.final / REFUSED).unlink(missing_ok=True)
        older = Manifest.read(self.final) or NOTHING
        for name in set(manifest.files) - set(older.files):
            if os.path.lexists(self.final / name) and os.path.lexists(self.partial / name):
                raise UserError(f"{self.final / name} is in the way and was not written by cocodiff: move it elsewhere")
        # The manifest lists both runs' files until the older ones are removed, in case this process is killed.
        Manifest(older.run, sorted({*older.files, *manifest.files})).write(self.final)
        _move(self.partial, self.final)
        for name in set(older.files) - set(manifest.files):
            self._remove(name)
        manifest.write(self.final)
        shutil.rmtree(self.partial)

    def _remove(self, name: str) -> None:
        """Remove a file of an older run from the folder of results, and the folders that this leaves empty.

        Nothing outside the folder is removed.

        Args:
            name: path of the file, relative to the folder
        """
        path = self.final / name
        if not path.parent.resolve().is_relative_to(self.final):
            return  # a folder was replaced by a link that leads outside
        with contextlib.suppress(OSError):  # already removed, or now a folder
            path.unlink()
        for folder in Path(name).parents[:-1]:
            with contextlib.suppress(OSError):  # not empty
                (self.final / folder).rmdir()

    def discard(self) -> None:
        """Remove the hidden folder with the results of a failed run.

        It is kept if the results are complete, or if a unit of work is finished, from which --resume can continue.
        """
        if Manifest.read(self.partial) is None and self.store.kept() is None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def left(self) -> str:
        """Return a text for the user on what this run has left in the folder of results although it failed.

        For example "12 of 80 slices are kept: go on with --resume", or "nothing was written".
        """
        for folder in (self.final, self.partial):
            manifest = Manifest.read(folder)
            if manifest is not None and manifest.run == self.run:
                return f"the results are finished, in {folder}"
        kept = self.store.kept()
        return f"{kept} are kept: go on with --resume" if kept is not None else NOTHING_LEFT

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raise OwnRankError, one line and exit code 1, if the disk is full or fails while the block writes results."""
        with storage_faults(f"the results for --out {self.out}"):
            yield


@contextlib.contextmanager
def storage_faults(what: str) -> Iterator[None]:
    """Raise OwnRankError, in one line, if the disk is full or fails in the block. Other errors are passed on.

    what: noun phrase for the files that are written, the subject of the line
    """
    try:
        yield
    except OSError as error:
        short_write = error.errno is None and " written" in str(error)  # numpy's tofile gives no errno
        if error.errno not in _STORAGE and not short_write:
            raise
        reason = "no space left on the device" if short_write else error.strerror
        where = f" ({error.filename})" if error.filename else ""
        remedy = "free some space there, or choose another --out"
        raise OwnRankError(f"{what} could not be written: {reason}{where}: {remedy}") from error
