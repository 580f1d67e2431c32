"""Kernels are compiled once: what has libsycl keep them, what each process does where it does not, and what is told.

A source of one small kernel stands in for all of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from cocodiff_sycl.build import CACHE, PERSISTENT, cache_folder, host_library, read_marker, runtime_and_folder
from cocodiff_sycl.library import Library
from cocodiff_sycl.ops import SyclOps
from cocodiff_sycl.private import private_folder
from seams import build

TESTS = Path(__file__).parents[1]
TOOTH = str(TESTS.parent / "cocodiff/demo_model/samples/tooth.tif")
SELECTOR = "ONEAPI_DEVICE_SELECTOR"
MODULES = "opencl:gpu;level_zero:gpu"  # what Aurora's module sets
LARGEST = "SYCL_CACHE_MAX_SIZE"

# Opens the kernels, "late" after another library's program has run, and tells how often they were compiled.
OPENING = """
import json, logging, os, sys
from cocodiff_sycl import library
from cocodiff_sycl.build import keep_kernels
from cocodiff_sycl.library import Library
from seams import compile_for_cpu, count_compilations

SOURCE = '''#include <sycl/sycl.hpp>
extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<1>))
void write_number(int *x) { *x = %d; }
'''
library.kernel_source = lambda *_: SOURCE % 1
library.QUICK_S = float(os.environ["QUICK_S"])
compiled = []
count_compilations(compiled)
logging.basicConfig(format="%(message)s")
if "late" not in sys.argv:
    keep_kernels()
compile_for_cpu(SOURCE % 2)
opened = Library(None)
print(json.dumps({"kept": opened.kept, "compiled": len(compiled)} | {n: os.environ[n] for n in sys.argv[-2:]}))
"""


@pytest.fixture
def top(sycl_on_cpu: SyclOps, tmp_path: Path) -> Path:
    """A cache of its own with the C library in it, and nothing compiled."""
    runtime, of_user = runtime_and_folder()
    shutil.copy(host_library(runtime, of_user), private_folder(tmp_path / "cache" / cache_folder(runtime).name))
    return tmp_path / "cache"


def opened(top: Path, *words: str, filled: bool = False, **settings: str) -> dict[str, Any]:
    """What a process finds that opens the kernels, and "told": its log. filled: it shall take its time for short."""
    of_cache = (PERSISTENT, CACHE, LARGEST, SELECTOR)
    environment = {name: value for name, value in os.environ.items() if name not in of_cache}
    environment |= {"COCODIFF_CACHE": str(top), "PYTHONPATH": str(TESTS), "CL_CONFIG_CPU_VECTORIZER_MODE": "1"}
    environment["QUICK_S"] = "1e9" if filled else "0"
    program = [sys.executable, "-c", OPENING, *words, PERSISTENT, CACHE]
    done = subprocess.run(program, env=environment | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"told": done.stderr}


def marker_of(top: Path) -> Path:
    (marker,) = top.glob("*/built-*")
    return marker


def binaries(top: Path) -> set[Path]:
    return {*top.glob("*/kernels/**/*.bin")}


@pytest.mark.full
def test_what_one_process_compiles_the_next_one_takes(top: Path) -> None:
    """Where a program ran before nothing is kept, and that is told: the marker does not say then that there is
    anything, and a process that is in time fills the cache."""
    late = opened(top, "late")
    assert (late["kept"], late["compiled"]) == (False, 1) and not binaries(top)
    assert not marker_of(top).read_text() and f"{PERSISTENT}=1 {CACHE}={late[CACHE]}" in late["told"]
    first = opened(top)
    assert first["kept"] and first[PERSISTENT] == "1" and Path(first[CACHE]).parent.parent == top
    named = {Path(first[CACHE]) / name for name in marker_of(top).read_text().splitlines()}
    assert named and named <= binaries(top) and not first["told"]
    about = marker_of(top).stat()
    again = opened(top, filled=True)
    assert (again["kept"], again["compiled"], again["told"]) == (True, 1, "")
    assert marker_of(top).stat().st_mtime_ns == about.st_mtime_ns


@pytest.mark.full
def test_where_a_program_ran_before_nothing_is_taken(top: Path) -> None:
    """Whether there is nothing, of another such process, or what one that was in time has left."""
    assert [opened(top, "late")["kept"] for _ in range(2)] == [False, False] and not marker_of(top).read_text()
    assert opened(top)["kept"] and not opened(top, "late")["kept"]


@pytest.mark.full
def test_what_the_user_has_set_stays(top: Path, tmp_path: Path) -> None:
    off = opened(top, **{PERSISTENT: "0"})
    assert (off["kept"], off["compiled"], off[PERSISTENT]) == (False, 1, "0") and not binaries(top)
    elsewhere = str(tmp_path / "elsewhere")
    moved = opened(top, **{CACHE: elsewhere})
    assert moved["kept"] and moved[CACHE] == elsewhere and not binaries(top) and [*Path(elsewhere).rglob("*.bin")]
    small = opened(top, **{CACHE: str(tmp_path / "small"), LARGEST: "1"})
    assert not small["kept"] and LARGEST in small["told"]


@pytest.mark.full
def test_kernels_that_are_gone_are_compiled_again_and_kept(top: Path) -> None:
    opened(top)
    shutil.rmtree(next(top.glob("*/kernels")))
    assert opened(top)["kept"] and binaries(top)
    marker_of(top).unlink()  # as where a process was killed in between
    assert opened(top, filled=True)["kept"] and marker_of(top).read_text()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("before", [None, "gone.bin"])
def test_ranks_that_start_together_wait_for_the_first_alone(before, keeps, sycl_on_cpu: SyclOps, monkeypatch, tmp_path):
    """The first compiles under a lock, twice where that keeps more; the others take what it left, or where it left
    nothing compile side by side. So it is where a marker names what is gone."""
    monkeypatch.setenv(CACHE, str(tmp_path / "kernels"))
    if before is not None:
        (tmp_path / "built-a_device").write_text(before)
    lock, running, compiled, beside = threading.Lock(), 0, list[int](), list[int]()

    def compile_slowly(*_: object) -> int:
        nonlocal running
        with lock:
            running += 1
            compiled.append(threading.get_ident())
        time.sleep(0.2)
        if keeps:
            (tmp_path / "kernels").mkdir(exist_ok=True)
            (tmp_path / "kernels" / "0.bin").touch()
        with lock:
            beside.append(running)
            running -= 1
        return 1

    monkeypatch.setattr(Library, "_compile", compile_slowly)
    monkeypatch.setattr("cocodiff_sycl.library.QUICK_S", 1e9 * keeps)
    ranks = [copy(sycl_on_cpu.library) for _ in range(12)]
    for rank in ranks:
        rank.folder = tmp_path
    with ThreadPoolExecutor(12) as threads:
        [*threads.map(lambda rank: build(rank, "a device"), ranks)]
    first = 2 if keeps else 1
    assert len(set(compiled[:first])) == 1 and len(compiled) == first + 11
    assert {*beside[:first]} == {1} and max(beside) > 1
    assert read_marker(tmp_path / "built-a_device") is keeps and {rank.kept for rank in ranks} == {keeps}


# Tells what is set when torch is imported, and goes no further.
WATCHING = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("SYCL_CACHE_PERSISTENT"), os.environ.get("SYCL_CACHE_DIR"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""
COMMANDS = (
    *(["doctor"], ["kernels", "build", "--device", "cpu"], ["bench", "alltoall"], ["bench", "step"]),
    *(["inpaint", "--input", TOOTH, "--mask", "block"], ["train", "--input", TOOTH]),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_the_cache_is_set_before_torch_is_imported(words, sycl_on_cpu: SyclOps, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (PERSISTENT, CACHE)}
    program = [sys.executable, "-c", f"{WATCHING}\nfrom cocodiff.cli.main import main; print(main({words!r}))"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1].split() == ["1", str(runtime_and_folder()[1] / "kernels")], done.stderr


@pytest.mark.parametrize(
    ("selector", "code"), [(MODULES, 2), pytest.param(f"{MODULES};opencl:cpu", 0, marks=pytest.mark.full)]
)
def test_a_selector_that_hides_the_cpu_is_named(sycl_on_cpu: SyclOps, selector: str, code: int) -> None:
    """As Aurora's module sets it. With the CPU beside it kernels are built."""
    words = [sys.executable, "-m", "cocodiff", "kernels", "build", "--device", "cpu"]
    done = subprocess.run(words, env=os.environ | {SELECTOR: selector}, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    said = done.stderr.splitlines()[-1:]
    assert not code or (f"{SELECTOR}={MODULES}" in said[0] and "opencl:cpu" in said[0])
