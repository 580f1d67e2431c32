"""Puts faults into copies of the product, one at a time, and tells which of them the tests do not find. By hand, from
the root of the repository:

    .venv/bin/python tests/mutate.py --count 40 --seed 1 [--files cocodiff/comm eval] [--workers 2] [--seconds 120]

The faults are made anew for each seed (`mutants.py` has the kinds). The tests next to a fault are those that run its
lines: the first use, and `--record`, note them for the first tier under coverage, in a quarter of an hour. Those of
them run first which run little else, up to `--seconds` of tests in all; one that does not end has found the fault as
well. A fault whose lines no test of the first tier runs is tried with the tests of all that import its file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import coverage
import psutil
import pytest
from mutants import Fault, drawn, faults_of

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".pytest_cache" / "mutate"
PRODUCT = ("cocodiff", "eval", "sycl_kernels")
# Where the process that hears of all tests notes their seconds; read now, for tests may replace the environment.
SECONDS = None if "PYTEST_XDIST_WORKER" in os.environ else Path(os.environ.get("COCODIFF_MUTATE", os.devnull))


class Copy:
    """A copy of the tree and of its environment. Nothing that is done in it reaches the tree."""

    def __init__(self, folder: Path) -> None:
        self.root, self._temporary = folder / "tree", folder / "t"  # short: messages show so much of a path
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0"):
            source, target = ROOT / os.fsdecode(name), self.root / os.fsdecode(name)
            if name and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        shutil.copytree(ROOT / ".venv", self.root / ".venv", symlinks=True, copy_function=_link)
        self._move_environment()

    def _move_environment(self) -> None:
        """Has the environment's programs and its editable install lead here; they name the tree by its path."""
        packages = next((self.root / ".venv/lib").glob("python*/site-packages"))
        for file in [*(self.root / ".venv/bin").iterdir(), *packages.glob("__editable__*")]:
            if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**20:
                content, mode = file.read_bytes(), file.stat().st_mode
                moved = content.replace(os.fsencode(ROOT), os.fsencode(self.root))
                if moved != content and b"\0" not in content:
                    file.unlink()  # it is a link to the tree's
                    file.write_bytes(moved)
                    file.chmod(mode)

    @contextlib.contextmanager
    def with_fault(self, file: str, content: bytes) -> Iterator[None]:
        """Put other content into a file, for as long as the block runs."""
        path = self.root / file
        before, state = path.read_bytes(), path.stat()
        path.write_bytes(content)
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # so what was compiled is not taken for it

    def failed(self, words: Sequence[str], limit_s: float, **variables: str) -> list[str]:
        """Run pytest and list the tests that failed, or the one that did not end in time."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), **variables}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | own
        command = ["env", "--default-signal=HUP", str(self.root / ".venv/bin/python"), "-m", "pytest", "-vv", "-rfE"]
        command += ["-p", "no:cacheprovider", f"--basetemp={self._temporary}/b", *words]  # nohup has HUP ignored
        said, code = self._temporary / "said", None
        with said.open("wb") as out, contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command, cwd=self.root, env=environment, stdout=out, stderr=out, timeout=limit_s, check=False
            ).returncode
        end_processes(str(self.root.parent))
        lines = said.read_text(errors="replace").splitlines()
        if code is None:
            started = [line.split(" ")[0] for line in lines if line.startswith("tests/") and "::" in line]
            return [f"{(started or ['pytest'])[-1]} (did not end)"]
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise SystemExit(f"pytest says {lines[-1:]}: are the tests others than those of the record? try --record")
        ends = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED tests", "ERROR tests"))]
        failed = [end.partition(" - ")[0] for end in ends]
        return failed or [f"pytest itself: {lines[-1:]}"] * (code != pytest.ExitCode.OK)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def end_processes(folder: str) -> None:
    """End what was started in a copy, which bears the name of its folder in its words or its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join((*process.cmdline(), *process.environ().values())):
                process.kill()


# A record of what tests run, for which pytest loads this file as a plugin


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test's seconds, in the process that hears of all tests."""
    if SECONDS is not None:
        with SECONDS.open("a") as file:
            file.write(json.dumps([report.nodeid, report.duration]) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Note the lines that follow as this test's."""
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(item.nodeid)


def record(workers: int, *more: str) -> None:
    """Run the first tier under coverage in a copy, and keep which test runs which lines."""
    shutil.rmtree(RECORD, ignore_errors=True)
    RECORD.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as folder:
        tree, settings = Copy(Path(folder)), RECORD / "settings"
        sources = ", ".join(str(tree.root / name) for name in PRODUCT)
        settings.write_text(Path(__file__).with_suffix(".ini").read_text().format(sources=sources, folder=RECORD))
        variables = {"COVERAGE_PROCESS_START": str(settings), "COCODIFF_MUTATE": str(RECORD / "seconds")}
        variables |= {"PYTHONPATH": "tests"}
        words = ["-p", "mutate", "-n", str(workers), "--dist", "worksteal", "-m", "not alone", *more]
        failed = tree.failed(words, 7200, **variables)
        print(f"recorded; these failed, which may be for the coverage: {failed}" if failed else "recorded", flush=True)
        every = coverage.Coverage(config_file=str(settings))
        every.combine()  # those that can be read: processes are killed
        every.save()
        (RECORD / "root").write_text(str(tree.root))


class Nearest:
    """The tests next to a fault, by the record."""

    def __init__(self) -> None:
        self._lines = coverage.CoverageData(str(RECORD / "lines"))
        self._lines.read()
        self._root = (RECORD / "root").read_text()
        self._seconds: Counter[str] = Counter()
        for line in (RECORD / "seconds").read_text().splitlines():
            name, seconds = json.loads(line)
            self._seconds[name] += seconds
        self._files = {file: self._lines.contexts_by_lineno(file) for file in self._lines.measured_files()}
        self._size: Counter[str] = Counter(
            name for lines in self._files.values() for contexts in lines.values() for name in set(map(_test, contexts))
        )

    def __call__(self, fault: Fault, seconds: float) -> list[str]:
        """List tests that run the statement of a fault, those that run little else first, and then those of the files
        that import its module: a process that is killed leaves no record."""
        lines = self._files.get(f"{self._root}/{fault.file}", {})
        statement = range(fault.lines[0], fault.lines[1] + 1)
        reached = {_test(name) for line in statement for name in lines.get(line, ())} & {*self._seconds}
        importing, chosen = importers(fault.file), list[str]()
        beside = {name for name in self._seconds if name.partition("::")[0] in importing}
        for name in sorted(reached | beside, key=lambda name: (name not in reached, self._size[name], name)):
            if sum(map(self._seconds.__getitem__, chosen)) + self._seconds[name] <= seconds or not chosen:
                chosen.append(name)
        return chosen or importing


def _test(context: str) -> str:
    """Return the test that a context of coverage names: programs that it starts add the part of it that ran."""
    return context.rpartition("|")[2].removesuffix(" (setup)").removesuffix(" (call)").removesuffix(" (teardown)")


def importers(file: str) -> list[str]:
    """List the test files that import a module of the product, or its room if none does, or that name its file."""
    module = file.removesuffix(".py").removesuffix("/__init__").removeprefix("eval/").removeprefix("sycl_kernels/")
    names = [module.replace("/", "."), module.replace("/", ".").rpartition(".")[0]]
    by_file = {path: set(_imported(path)) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    for name in names:
        if found := [str(path.relative_to(ROOT)) for path, imported in by_file.items() if name in imported]:
            return found
    return [str(path.relative_to(ROOT)) for path in by_file if Path(file).name in path.read_text()]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


class Outcome(NamedTuple):
    """tests: how many were chosen. found: the tests that failed. seconds: of the run."""

    tests: int
    found: list[str]
    seconds: float


def tell(number: int, fault: Fault, outcome: Outcome) -> None:
    """Print a fault with what found it, or with its lines before and after."""
    found = outcome.found[0] if outcome.found else f"SURVIVES {outcome.tests} tests"
    place = f"{fault.file}:{fault.lines[0]} {fault.function} [{fault.kind}]"
    print(f"{number:3} {outcome.seconds:6.1f} s  {place}: {found}", flush=True)
    if not outcome.found:
        old = (ROOT / fault.file).read_bytes()[fault.start : fault.end].decode()
        print(f"      - {old}\n      + {fault.new}", flush=True)


def read_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tells which faults the tests do not find: see the first lines")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", default=PRODUCT, help="files and folders that get the faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the tests that are tried for a fault")
    parser.add_argument("--record", action="store_true", help="note anew which tests run which lines")
    return parser.parse_args()


def main() -> None:
    settings = read_settings()
    if settings.record or not (RECORD / "root").exists():
        record(settings.workers)
    listed = ["git", "ls-files", *settings.files]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    every = [fault for file in files if file.endswith(".py") for fault in faults_of(ROOT, file)]
    nearest, copies = Nearest(), queue.Queue[Copy]()

    def run(fault: Fault) -> Outcome:
        tests, begun, copy = nearest(fault, settings.seconds), time.monotonic(), copies.get()
        try:
            with copy.with_fault(fault.file, fault.applied((ROOT / fault.file).read_bytes())):
                found = copy.failed(["-x", *tests], 60 + 3 * settings.seconds) if tests else []
        finally:
            copies.put(copy)
        return Outcome(len(tests), found, time.monotonic() - begun)

    with contextlib.ExitStack() as stack:
        for _ in range(settings.workers):
            folder = tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True)
            copies.put(Copy(Path(stack.enter_context(folder))))
        pool = ThreadPoolExecutor(settings.workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        faults = drawn(ROOT, every, settings.count, settings.seed)
        jobs = {pool.submit(run, fault): number for number, fault in enumerate(faults, start=1)}
        outcomes: dict[int, Outcome] = {}
        for job in as_completed(jobs):
            number = jobs[job]
            outcomes[number] = job.result()
            tell(number, faults[number - 1], outcomes[number])
        by = {outcome.found[0] for outcome in outcomes.values() if outcome.found}
        names = sorted(name for name in by if "::" in name and not name.endswith("(did not end)"))
        wrong = {*(copies.get().failed(names, 3600) if names else [])}
    survivors = [n for n, outcome in sorted(outcomes.items()) if not outcome.found or outcome.found[0] in wrong]
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults were found; not: {survivors}")
    if wrong:
        print(f"these fail without a fault too, and find none: {sorted(wrong)}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
