"""How commands end: where nobody reads on or streams are closed (`cocodiff ... | head -1`) without a traceback and with
a run's results, after a mistake with a line, and with the code of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import tifffile
from cocodiff_eval.data.masks import center_mask

from cocodiff.cli.main import main, run_command
from cocodiff.comm.launch import Launch
from cocodiff.config.errors import OwnRankError, UserError
from cocodiff.jobs.children import STOP_S, STOPS, stop_requests
from cocodiff.jobs.terminal import progress_bar, reading_bar, say


@contextmanager
def unread() -> Iterator[None]:
    """Output and errors go to a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    with redirect_stdout(stream), redirect_stderr(stream):
        yield
    with suppress(BrokenPipeError):
        stream.close()


def test_what_is_printed_alone_ends_as_sigpipe_would_end_it() -> None:
    for words in ([], ["--help"], ["--version"], ["inpaint"], ["inpaint", "--stepz", "3"]):
        with unread():
            code = main(words)
        assert code == 128 + 13


def test_lines_and_bars_are_lost() -> None:
    with unread():
        with progress_bar("steps", 3, True) as bar:
            bar.update()
        assert list(reading_bar(True)(range(3), "reading")) == [0, 1, 2]
        for text in ("one", "two"):
            say(text)


def test_a_run_goes_on_to_its_results(tmp_path: Path) -> None:
    write_slice(tmp_path / "scan.tif")
    out = tmp_path / "out"
    with unread():
        code = main(["inpaint", "--input", str(tmp_path / "scan.tif"), "--steps", "1", "--no-exact", "--out", str(out)])
    assert code == 0
    assert (out / "report.html").exists() and (out / "images" / "scan_block_tapa.tif").exists()


CLOSED = (">&-", "2>&-", "<&- >&- 2>&-")


@pytest.mark.sample(4)
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        ("--version", 0, "cocodiff ", ""),
        ("plan", 2, "", "cocodiff: "),
        ("inpaint --help", 0, "usage: cocodiff inpaint ", ""),
        ("nothing", 2, "", "cocodiff: "),
    ],
)
def test_commands_end_with_their_code_where_streams_are_closed(
    tmp_path: Path, words: str, code: int, out: str, err: str, closed: str
) -> None:
    """Text for a stream that is open comes there, and nothing else."""
    assert run_closed(words, closed, tmp_path) == code
    for name, start, sign in (("stdout", out, ">&-"), ("stderr", err, "2>&-")):
        said = (tmp_path / name).read_text()
        if sign in closed.split() or not start:
            assert said == ""
        else:
            assert said.startswith(start) and said.endswith("\n") and (name == "stdout" or said.count("\n") == 1)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("closed", CLOSED)
def test_a_run_without_streams_writes_its_results(tmp_path: Path, closed: str, ranks: int) -> None:
    slice_YX = write_slice(tmp_path / "scan.tif")
    words = f"inpaint --input scan.tif --mask center --steps 1 --no-exact --out out --ranks {ranks}"
    assert run_closed(words, closed, tmp_path) == 0
    restored_YX = tifffile.imread(tmp_path / "out" / "images" / "scan_center_tapa.tif")
    hidden_YX = center_mask((40, 40))
    assert (restored_YX == slice_YX)[~hidden_YX].all() and (restored_YX != slice_YX)[hidden_YX].mean() > 0.9
    assert (tmp_path / "out" / "report.html").exists()


def write_slice(path: Path) -> np.ndarray:
    slice_YX = np.random.default_rng(0).integers(0, 255, (40, 40), dtype=np.uint8)
    tifffile.imwrite(path, slice_YX)
    return slice_YX


def run_closed(words: str, closed: str, folder: Path) -> int:
    """Return the exit code of a command that a shell starts with some of its standard streams closed."""
    command = f"exec '{sys.executable}' -m cocodiff {words} >stdout 2>stderr {closed}"
    return subprocess.run(["bash", "-c", command], cwd=folder, timeout=240).returncode


def test_lines_to_a_full_disk_are_lost() -> None:
    with Path("/dev/full").open("w") as full, redirect_stdout(full):
        for text in ("one", "two"):
            say(text)


def test_a_terminal_without_all_letters_shows_others() -> None:
    words = [sys.executable, "-m", "cocodiff", "inpaint", "--input", "Zähne.tif"]
    done = subprocess.run(words, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 2 and "Z\\xe4hne.tif" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ([3], 3, ""),
        (UserError("a name\nof two lines"), 2, "cocodiff: a name of two lines\n"),
        (KeyboardInterrupt, 130, "cocodiff: interrupted\n"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_command_ends_with_the_code_of_its_error_and_one_rank_tells_it(ending, code, said, rank, monkeypatch, capsys):
    monkeypatch.setattr("cocodiff.cli.plan.start", Mock(side_effect=ending))
    assert run_command(["plan"], Launch("torchrun", rank, 2)) == code
    assert capsys.readouterr() == ("", "" if rank else said)


def test_a_mistake_of_one_rank_alone_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr("cocodiff.cli.plan.start", Mock(side_effect=OwnRankError("no tile")))
    assert run_command(["plan"], Launch()) == 1 and capsys.readouterr().err == "cocodiff: no tile\n"


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_while_python_ends_changes_nothing(number: int) -> None:
    late = f"import atexit, os, runpy; atexit.register(lambda: os.kill(os.getpid(), {int(number)}))"
    run = "runpy.run_module('cocodiff', run_name='__main__', alter_sys=True)"
    words = [sys.executable, "-c", f"{late}; {run}", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_a_program_that_does_not_heed_its_parents_end_is_ended(tmp_path: Path) -> None:
    """Its folder goes too."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "deaf.py").write_text(
        "import time\n"
        "def run():\n"
        "    print('begun', flush=True)\n"
        "    while True:\n"
        "        try: time.sleep(1000)\n"
        "        except KeyboardInterrupt: pass\n"
    )
    words = "dependent_words('__import__(\"deaf\").run()', sys.argv[1])"
    names = "import subprocess, sys; from cocodiff.jobs.children import dependent_words"
    run = [sys.executable, "-c", f"{names}; subprocess.Popen({words}); sys.stdin.read()", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdin=pipe, stdout=pipe, text=True, start_new_session=True, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "begun\n"
        (program,) = psutil.Process(parent.pid).children()
        parent.kill()
        gone, _ = psutil.wait_procs([program], 3 * STOP_S)
    assert gone and not folder.exists()


def test_signals_have_their_handlers_again_after_an_error() -> None:
    before = [signal.getsignal(number) for number in STOPS]
    with pytest.raises(RuntimeError), stop_requests():
        raise RuntimeError
    assert [signal.getsignal(number) for number in STOPS] == before


SWALLOWED = """
import os, signal, sys, time
from cocodiff.cli import main as cli
from cocodiff.jobs.children import fork, run_dependent

def struck(number):
    class Job:
        def __del__(self):
            os.kill(os.getpid(), number)
            sum(range(10))  # Python raises what a signal has asked for between two of its instructions

    Job()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return 130
    return 0

def end(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize(
    "program",
    [
        "sys.exit(end(fork(lambda: struck(signal.SIGTERM), signal.default_int_handler)))",
        "sys.exit(run_dependent(lambda: struck(signal.SIGTERM), os.getppid(), ''))",
        "cli.run_command = lambda *_: struck(signal.SIGINT); cli.program()",
    ],
    ids=["a forked rank", "a job of Python's", "the command itself"],
)
def test_an_interrupt_that_python_swallows_is_heeded_all_the_same(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWED + program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
