"""The folder of a sweep: `sweep.yaml` says what it is, `results.jsonl` grows by a line for every finished run.

A line is on the disk before the next run begins, so a killed sweep goes on where it was. What a kill left of a line
that was being written has no newline at its end: it is dropped, and the run done again. Replicas other than rank 0's
write to `results-RANK.jsonl`, whose lines are moved to `results.jsonl` at the end or at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff.config import read_yaml
from cocodiff.console.terminal import say
from cocodiff.errors import UserError
from cocodiff.jobs.record import first_difference
from cocodiff.outputs.folder import check_place, refusing, storage_faults
from cocodiff.outputs.journal import Entry, Journals, append

SETTINGS, LINES, REPORTS = "sweep.yaml", "results.jsonl", ("pareto.png", "report.html")
OF_REPLICAS = "results-*.jsonl"
_UNFINISHED = ".sweep.yaml.partial"


class Key(NamedTuple):
    """The run that a line is the result of; no two lines have the same."""

    point: str
    steps: int
    mask: str
    slice: str

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Key:
        return cls(*(line[name] for name in cls._fields))


def check_folder(out: str, settings: Mapping[str, Any], overwrite: bool) -> None:
    """Raises UserError where `out` can take no results, holds something else, or a sweep with other settings."""
    with refusing(out):
        folder = Path(out).resolve()
    check_place(out, folder)
    for name in (SETTINGS, LINES):
        if os.path.lexists(folder / name) and not (folder / name).is_file():
            raise UserError(f"--out {out}: its {name} is no file, so it is no sweep's: choose another folder")
    if (folder / SETTINGS).is_file():
        there = read_yaml(folder / SETTINGS)
        if "lines" not in there:
            raise UserError(f"--out {out}: its {SETTINGS} is no record of a sweep's results: choose another folder")
        if not overwrite:
            _compare(out, there, settings)
            read_results(folder)
        return
    lines = folder / LINES
    begun = lines.is_file() and lines.stat().st_size == 0  # a sweep that was killed before it could say what it is
    others = {path.name for path in folder.iterdir()} - {_UNFINISHED} if folder.exists() else set()
    if others - ({LINES} if begun else set()):
        raise UserError(f"--out {out} exists and holds no {SETTINGS}, so it is no sweep's: choose another folder")


def _compare(out: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    found = first_difference(there, now)
    if found is not None:
        name, old, new = found
        raise UserError(
            f"--out {out} holds a sweep with other settings ({name}: {old} there, {new} now): "
            f"choose another folder, or start afresh with --overwrite"
        )


class Results(NamedTuple):
    """The contents of a sweep's folder. whole: bytes of results.jsonl up to its last whole line."""

    settings: dict[str, Any]
    lines: list[dict[str, Any]]
    whole: int


def read_results(folder: Path) -> Results:
    """The lines of a sweep, without a torn last one. Raises UserError where there is no sweep or it is damaged."""
    if not (folder / SETTINGS).is_file():
        raise UserError(f"{folder} holds no {SETTINGS}: give the --out of a sweep")
    path = folder / LINES
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file, so {folder} is no sweep's: give the --out of a sweep")
    lines, whole = _read_lines(path)
    seen: set[Key] = set()
    for number, line in enumerate(lines, 1):
        if Key.of(line) in seen:
            raise UserError(
                f"{path}, line {number} repeats an earlier one: delete it, or start afresh with --overwrite"
            )
        seen.add(Key.of(line))
    for other in sorted(folder.glob(OF_REPLICAS)):
        moved = (line for line in _read_lines(other)[0] if Key.of(line) not in seen)  # a kill cut the moving short
        lines += moved
    settings = read_yaml(folder / SETTINGS)
    if type(settings.get("lines")) is not int:
        raise UserError(f"{folder / SETTINGS} does not say how many lines there will be: it is no record of a sweep")
    return Results(settings, lines, whole)


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file, and how many bytes they are. Raises UserError where one names no run."""
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    whole = data.rfind(b"\n") + 1
    lines = []
    for number, text in enumerate(data[:whole].splitlines(), 1):
        try:
            line = json.loads(text)
            key = Key.of(line)
            if not (type(key.steps) is int and all(isinstance(one, str) for one in (key.point, key.mask, key.slice))):
                raise TypeError(f"{key} names no run")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is damaged: mend it, or start afresh with --overwrite") from error
        lines.append(line)
    return lines, whole


def count_lines(folder: Path) -> int:
    """How many runs are done by now."""
    paths = [folder / LINES, *folder.glob(OF_REPLICAS)]
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


def check_reportable(folder: Path, results: Results, facts: Sequence[str]) -> None:
    """Raises UserError where a line lacks what the reports need, or the settings lack one of `facts`."""
    lacking = [name for name in facts if name not in results.settings]
    if lacking:
        raise UserError(f"{folder / SETTINGS} lacks {', '.join(lacking)}: mend it, or start afresh with --overwrite")
    for number, line in enumerate(results.lines, 1):
        exact = line.get("exact")
        judged = [line, exact] if isinstance(exact, dict) else []
        measured = [one.get(name, "") for one in judged for name in ("psnr_db", "ssim", "mse")]
        seconds = [one.get("seconds", "") for one in judged]
        sent = [one.get("bytes") for one in judged]
        if not (
            judged
            and all(value is None or _is_number(value) for value in (*measured, line.get("psnr_vs_exact_db", "")))
            and all(_is_number(value) for value in seconds)
            and min(seconds) > 0
            and all(isinstance(of, dict) and all(map(_is_number, of.values())) for of in sent)
        ):
            raise UserError(f"{folder / LINES}, line {number} is damaged: mend it, or start afresh with --overwrite")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class LineWriter:
    """Adds lines to a sweep's results; rank 0 alone has one. Nobody else can open the same folder meanwhile."""

    def __init__(self, out: str, settings: Mapping[str, Any], overwrite: bool) -> None:
        """Makes the folder, or goes on with what is there. Raises UserError as `check_folder` does, and where another
        sweep is at work."""
        import yaml

        check_folder(out, settings, overwrite)
        with refusing(out):
            self.folder = Path(out).resolve()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / LINES).open("ab", buffering=0)
        self._lock(out)
        if overwrite:
            self._file.truncate(0)
            for path in (*(self.folder / name for name in REPORTS), *self.folder.glob(OF_REPLICAS)):
                path.unlink(missing_ok=True)
        if overwrite or not (self.folder / SETTINGS).exists():
            unfinished = self.folder / _UNFINISHED
            with storage_faults(f"{self.folder / SETTINGS}"):
                unfinished.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
                unfinished.replace(self.folder / SETTINGS)
        self._file.truncate(_read_lines(self.folder / LINES)[1])
        self.done: set[Key] = set()
        self.gather()

    def gather(self) -> None:
        """Moves the lines of other replicas, which write none meanwhile, to `results.jsonl`."""
        self.done = {Key.of(line) for line in _read_lines(self.folder / LINES)[0]}
        for line in read_results(self.folder).lines:
            if Key.of(line) not in self.done:
                self.add(line)
        for path in self.folder.glob(OF_REPLICAS):
            path.unlink()

    def _lock(self, out: str) -> None:
        with contextlib.suppress(OSError):  # some shared file systems have no locks; then nobody is kept out
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"--out {out}: another sweep is at work there: wait, or choose another folder"
                ) from None

    def add(self, line: Mapping[str, Any]) -> None:
        """Returns when the line is on the disk."""
        assert Key.of(line) not in self.done, f"{Key.of(line)} has its line already"
        _append(self._file, self.folder / LINES, line)
        self.done.add(Key.of(line))


class SweepRecord:
    """`results.jsonl` as a queue's record: a batch is a run, and done when it has its line. keys: of all runs, in their
    order."""

    def __init__(self, out: str, settings: Mapping[str, Any], overwrite: bool, keys: Sequence[Key]) -> None:
        self.out, self._settings, self._overwrite, self._keys = out, settings, overwrite, keys
        self._folder = Path(out).resolve()
        self.claims, self.where = Journals(self._folder), self._folder / LINES
        self._writer: LineWriter | None = None

    def begin(self, total: int) -> None:
        self._writer = LineWriter(self.out, self._settings, self._overwrite)
        if self._writer.done:
            say(f"{len(self._writer.done)} of {self._settings['lines']} runs are done already")

    def finished(self) -> dict[int, Entry]:
        done = self._writer.done if self._writer is not None else set()
        return {number: Entry(number, 1, []) for number, key in enumerate(self._keys) if key in done}

    def counter(self) -> Callable[[], int]:
        return partial(count_lines, self._folder)

    def expect(self, total: int) -> None:
        """`sweep.yaml` says it from the first."""

    def open_journal(self, rank: int) -> LineJournal:
        """Of rank 0 or the leader of another replica, whose lines lie beside until `end`."""
        if self._writer is not None:
            return LineJournal(self._writer.add)
        path = self._folder / OF_REPLICAS.replace("*", str(rank))
        return LineJournal(partial(_append, path.open("ab", buffering=0), path))

    def end(self) -> None:
        """On rank 0, when nobody writes any more."""
        if self._writer is not None:
            self._writer.gather()
        self.claims.remove()


class LineJournal(NamedTuple):
    """Adds the lines of one replica. add_line: returns when it is on the disk."""

    add_line: Callable[[Mapping[str, Any]], None]

    def add(self, entry: Entry) -> None:
        (_, _, line), *_ = entry.rows
        self.add_line(line)


def _append(file: Any, path: Path, line: Mapping[str, Any]) -> None:
    from cocodiff_eval.metrics import json_ready

    data = json.dumps(json_ready(line), allow_nan=False).encode() + b"\n"
    with storage_faults(f"a line of {path}"):
        append(file, data)
