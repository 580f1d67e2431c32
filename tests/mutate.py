"""Puts the faults of `mutations.txt` into copies of the product, one at a time, and tells which of them the tests find.
By hand, from the root of the repository:

    .venv/bin/python tests/mutate.py [--tree PATH] [--only 3,17] [--tier quick|full|hints] [--workers 2]
        [--limit 240] [--tier-limit 7200] [--out results.json] [-- pytest arguments]

The tests that are most likely to find a fault go first; a run that outlasts its limit has found it as well. With
`--tier hints` that is all. Else the whole tier tries what they leave: all such faults together, and one by one if the
tests fail then. A test that fails without any fault finds none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import psutil

DATA = Path(__file__).with_name("mutations.txt")
PASSED, USAGE, NOTHING = 0, 4, 5  # what pytest ends with: after a wrong call, and without a test


class Fault(NamedTuple):
    """kind: of mistake. old: occurs once in the file. near: words for pytest, the likeliest tests to find it."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    near: list[str]


class Outcome(NamedTuple):
    """found: the tests that failed, or that did not end in time. error: why nothing could be tried."""

    found: list[str]
    seconds: float
    error: str = ""


def read_faults() -> dict[int, Fault]:
    """By their numbers, from 1."""
    found: dict[int, Fault] = {}
    for block in DATA.read_text().strip().split("\n\n"):
        about, *more = block.splitlines()
        if not about.startswith("#"):
            (file, near, *lines), (name, _, kind) = more, about.removesuffix("]").rpartition(" [")
            old, new = ("\n".join(line[1:] for line in lines if line[0] == mark) for mark in "-+")
            found[len(found) + 1] = Fault(name, kind, file, old, new, shlex.split(near))
    return found


class Copy:
    """A copy of a tree and of its environment. Nothing that is done in it reaches the tree."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.root, self._temporary = folder / "tree", folder / "t"  # short: messages show so much of a path
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(listed, cwd=tree, capture_output=True, check=True).stdout.split(b"\0"):
            source, target = tree / os.fsdecode(name), self.root / os.fsdecode(name)
            if name and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        shutil.copytree(tree / ".venv", self.root / ".venv", symlinks=True, copy_function=link)
        self._move_environment(tree)

    def _move_environment(self, tree: Path) -> None:
        """Has the environment's programs and its editable install lead here; they name the tree by its path."""
        packages = next((self.root / ".venv/lib").glob("python*/site-packages"))
        for file in [*(self.root / ".venv/bin").iterdir(), *packages.glob("__editable__*")]:
            if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**20:
                content, mode = file.read_bytes(), file.stat().st_mode
                moved = content.replace(os.fsencode(tree), os.fsencode(self.root))
                if moved != content and b"\0" not in content:
                    file.unlink()  # it is a link to the tree's
                    file.write_bytes(moved)
                    file.chmod(mode)

    def run(self, faults: Sequence[Fault], words: Sequence[str], limit_s: float) -> Outcome:
        """Tests with some faults, or with none on the product as it is. words: for pytest."""
        named = [word for word in words if word.startswith("tests/")]
        gone = [word for word in named if not (self.root / word.partition("::")[0]).exists()]
        if gone and gone == named:
            return Outcome([], 0.0, f"not in this tree: {' '.join(gone)}")
        try:
            with self._with_faults(faults):
                return self._pytest(faults, [word for word in words if word not in gone], limit_s)
        except ValueError as error:
            return Outcome([], 0.0, f"error: {error}")

    @contextlib.contextmanager
    def _with_faults(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Raises ValueError where a fault's text is not in its file, or is more than once."""
        before: dict[Path, tuple[str, os.stat_result]] = {}
        try:
            for fault in faults:
                file = self.root / fault.file
                text = file.read_text() if file.is_file() else ""
                if (count := text.count(fault.old)) != 1:
                    raise ValueError(f"the text of {fault.name!r} is {count} times in {fault.file}")
                before.setdefault(file, (text, file.stat()))
                file.write_text(text.replace(fault.old, fault.new))
            yield
        finally:
            for file, (text, state) in before.items():
                file.write_text(text)
                os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # so what was compiled is not taken for it

    def _pytest(self, faults: Sequence[Fault], words: Sequence[str], limit_s: float) -> Outcome:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment["TMPDIR"] = str(self._temporary)
        if any(fault.file.startswith("sycl_kernels/") for fault in faults):
            environment["COCODIFF_CACHE"] = str(self._temporary / "kernels")
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        python, once = str(self.root / ".venv/bin/python"), ["-x"] * bool(faults)
        command = ["env", "--default-signal=HUP", python, "-m", "pytest"]  # nohup has it ignored, and tests send it
        command += [*once, "-vv", "-rfE", "-p", "no:cacheprovider", f"--basetemp={self._temporary}/b", *words]
        said, begun = self._temporary / "said", time.monotonic()
        try:
            with said.open("wb") as out:
                code = subprocess.run(
                    command, cwd=self.root, env=environment, stdout=out, stderr=out, timeout=limit_s, check=False
                ).returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_processes(str(self.root.parent))
        seconds, lines = round(time.monotonic() - begun, 1), said.read_text(errors="replace").splitlines()
        if code in (PASSED, NOTHING):
            return Outcome([], seconds, "" if code == PASSED else "no such test in this tree")
        if code == USAGE:
            raise ValueError(f"pytest says: {lines[-1:]}")
        if code is None:
            started = [line.split(" ")[0] for line in lines if line.startswith("tests/") and "::" in line]
            return Outcome([f"{(started or ['pytest'])[-1]} (did not end)"], seconds)
        failed = [line.split(" ", 1)[1].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return Outcome(failed or ["pytest itself"], seconds)


def link(source: str, target: str) -> None:
    """A hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def end_processes(folder: str) -> None:
    """Ends what was started in a copy, which bears the name of its folder in its words or its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join((*process.cmdline(), *process.environ().values())):
                process.kill()


class Results:
    """A row for each fault."""

    def __init__(self, faults: Mapping[int, Fault], out: str | None) -> None:
        self.rows: dict[int, dict[str, Any]] = {
            number: {"number": number, "name": one.name, "kind": one.kind, "file": one.file, "seconds": 0.0}
            for number, one in faults.items()
        }
        self._out = out

    def note(self, number: int, by: str, found: str | None, note: str, seconds: float = 0.0) -> None:
        """found: the first test that failed. by: what was run."""
        row = self.rows[number]
        row |= {"found": found, "by": by, "note": note, "seconds": round(row["seconds"] + seconds, 1)}
        print(f"{number:3} {seconds:6.1f} s  {row['name']} [{row['kind']}]: {found or note or 'not found'}", flush=True)
        if self._out:
            Path(self._out).write_text(json.dumps([*self.rows.values()], indent=1) + "\n")

    def missed(self) -> list[int]:
        """Faults that could be tried, and were not found."""
        return [number for number, row in self.rows.items() if not row["found"] and number not in self.unfit()]

    def unfit(self) -> list[int]:
        return [number for number, row in self.rows.items() if row["note"].startswith("error")]


def read_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tells which faults the tests find: see this file's first lines")
    parser.add_argument("--tree", type=lambda path: Path(path).resolve(), default=DATA.resolve().parent.parent)
    parser.add_argument("--only", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--tier", choices=("quick", "full", "hints"), default="quick")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the tests near a fault")
    parser.add_argument("--tier-limit", type=float, default=7200.0, help="seconds for a whole tier")
    parser.add_argument("--out", help="a JSON file, written after every fault")
    parser.add_argument("pytest", nargs="*", help="words for pytest, after --")
    return parser.parse_args()


def main() -> None:
    settings, every, copies = read_settings(), read_faults(), queue.Queue[Copy]()
    faults = {number: every[number] for number in settings.only or every}
    results = Results(faults, settings.out)
    # a tree whose tests have no tiers yet runs them all
    full = settings.tier == "full" and '"--full"' in (settings.tree / "tests/conftest.py").read_text()
    tier = [*["--full"] * full, *settings.pytest]

    def run(numbers: Sequence[int], words: Sequence[str], limit_s: float) -> Outcome:
        copy = copies.get()
        try:
            return copy.run([faults[number] for number in numbers], [*tier, *words], limit_s)
        finally:
            copies.put(copy)

    def run_each(words: Mapping[int, Sequence[str]], limit_s: float, by: str) -> None:
        """Each of some faults by itself."""
        jobs = {pool.submit(run, [number], of_fault, limit_s): number for number, of_fault in words.items()}
        for job in as_completed(jobs):
            found, seconds, error = job.result()
            results.note(jobs[job], by, next(iter(found), None), error, seconds)

    with contextlib.ExitStack() as stack:
        for _ in range(settings.workers):
            folder = tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True)
            copies.put(Copy(settings.tree, Path(stack.enter_context(folder))))
        pool = ThreadPoolExecutor(settings.workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        run_each({number: fault.near for number, fault in faults.items()}, settings.limit, "near")
        left = results.missed()
        if left and settings.tier != "hints":
            found, seconds, error = run(left, [], settings.tier_limit)
            print(f"{len(left)} together: {found or error or 'not found'} ({seconds} s)", flush=True)
            if found or error:
                run_each(dict.fromkeys(left, ()), settings.tier_limit, "tier")
        ended = {row["found"] for row in results.rows.values() if "::" in (row["found"] or "")}
        names = sorted(name for name in ended if not name.endswith("(did not end)"))
        failing = run([], names, settings.tier_limit).found if names else []
        for number in [number for number, row in results.rows.items() if row["found"] in failing]:
            row = results.rows[number]
            results.note(number, row["by"], None, f"{row['found']} fails without the fault too")
    found_all = len(faults) - len(results.missed()) - len(results.unfit())
    print(f"{found_all} of {len(faults)} faults were found; not: {results.missed()}")
    sys.exit(f"these do not fit the tree: {results.unfit()}" if results.unfit() else 0)


if __name__ == "__main__":
    main()
