"""Which path runs, what it leaves in the trace, and what happens where SYCL kernels cannot be built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cocodiff_sycl import build
from cocodiff_sycl.build import cache_folder, host_library, kernel_source, runtime_and_folder
from cocodiff_sycl.find import find_runtime
from cocodiff_sycl.library import Library
from cocodiff_sycl.ops import SyclOps
from seams import opened_libraries

from cocodiff.config.errors import UserError
from cocodiff.kernels import Kernels, TorchOps, dispatch
from cocodiff.kernels.dispatch import CHOICES, NEVER, OPS

WITHOUT_COMPILER = """
import torch
from cocodiff.config.errors import UserError
from cocodiff.kernels import Kernels
v = torch.ones(1, 4096, 8, 64)
for _ in range(2):
    change, norm = Kernels("auto").l1_score(v, torch.zeros_like(v))
    assert float(change[0, 0]) == 512 and float(norm[0, 0]) == 0
try:
    Kernels("sycl").l1_score(v, v)
except UserError as error:
    print(error)
"""


@pytest.mark.full
def test_where_nothing_can_be_built_torch_runs_and_one_line_says_why(tmp_path):
    paths = {"COCODIFF_CACHE": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}
    environment = {name: value for name, value in os.environ.items() if name != "COCODIFF_KERNELS"} | paths
    words = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stderr.splitlines() if "SYCL" in line]
    assert re.match("SYCL kernels are not used on cpu, .*: no ", line)
    assert done.stdout.startswith("no SYCL kernels on cpu: no ") and len(done.stdout.splitlines()) == 1


def test_every_operation_has_both_forms():
    assert all(hasattr(TorchOps, op) and hasattr(SyclOps, op) for of_ops in [OPS, *CHOICES.values()] for op in of_ops)


def test_paths_follow_the_table(monkeypatch):
    monkeypatch.delenv("COCODIFF_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "sycl_ops", lambda *_: "sycl")

    def takes_sycl(path, op, device, size, dtype=torch.bfloat16):
        half = SimpleNamespace(device=torch.device(device), dtype=dtype, nbytes=size // 2)
        return Kernels(path).by_sycl(op, half, half)

    for device, of_ops in CHOICES.items():
        for op, begin in of_ops.items():
            size = 2**40 if begin == NEVER else begin
            assert takes_sycl("auto", op, device, size) == (begin != NEVER)
            assert size == 0 or not takes_sycl("auto", op, device, size - 2)
            assert takes_sycl("sycl", op, device, 0)
            assert not takes_sycl("torch", op, device, 2**40)
    assert not takes_sycl("auto", "l1_score", "xpu", 2**30, torch.int64)
    assert not takes_sycl("sycl", "pack", "cpu", 2**30, torch.uint8)
    assert not takes_sycl("auto", "l1_score", "cuda", 2**30)


def test_the_environment_says_what_auto_is(monkeypatch):
    monkeypatch.setenv("COCODIFF_KERNELS", "torch")
    assert Kernels("auto").path == "torch" and Kernels("sycl").path == "sycl"
    monkeypatch.setenv("COCODIFF_KERNELS", "fast")
    with pytest.raises(UserError, match=r"kernels 'fast': .*auto, sycl, torch"):
        Kernels()


def test_a_null_queue_is_refused(sycl: SyclOps):
    with pytest.raises(ValueError, match="null pointer"):
        Library(0)


def test_a_kernel_that_is_not_there_is_an_error_with_words(sycl: SyclOps):
    with pytest.raises(RuntimeError, match="no kernel nonsense"):
        sycl.library.launch_of("nonsense", 1, 1, 0, ())


def test_another_content_is_another_cache(sycl: SyclOps, monkeypatch, tmp_path):
    runtime = find_runtime()
    monkeypatch.setenv("COCODIFF_CACHE", str(tmp_path))
    assert cache_folder(runtime).parent == tmp_path
    assert kernel_source(1) != kernel_source(16)
    assert cache_folder(runtime) != cache_folder(type(runtime)(runtime.library, runtime.include, "8.0.1-1"))
    monkeypatch.setattr(build, "HERE", shutil.copytree(build.HERE, tmp_path / "sources"))
    sources, folders = [*build.HERE.rglob("*.[ch]pp")], {cache_folder(runtime)}
    for source in sources:
        source.write_text(source.read_text() + "\n")
        folders.add(cache_folder(runtime))
    assert len(folders) == 1 + len(sources) > 10


@pytest.mark.full
def test_the_library_outlives_the_environment_that_built_it(sycl_on_cpu, tmp_path):
    """It is kept beside the user's other caches, and another environment's libsycl serves it as well."""
    runtime, _ = runtime_and_folder()
    assert str(runtime.library.parent).encode() not in host_library(runtime, tmp_path).read_bytes()


ONE_THREAD = """
import os, torch
from pathlib import Path
from cocodiff.kernels import sycl_ops

def ran_ns():
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in Path("/proc/self/task").iterdir()}

ops = sycl_ops(torch.device("cpu"), required=True)
x_BLHD = torch.ones(1, 4000, 8, 64)  # a launch of many work-groups, which cores could share
buffer = torch.empty(x_BLHD.numel())
ops.pack([[x_BLHD]], [buffer])
before = ran_ns()
for _ in range(100):
    ops.pack([[x_BLHD]], [buffer])
after = ran_ns()
spent = {name: after[name] - before.get(name, 0) for name in after}
main = spent.pop(str(os.getpid()))
print(ops.library.compute_units, main > 5 * sum(spent.values()))
"""


@pytest.mark.full
def test_a_rank_of_one_thread_runs_kernels_on_it_and_keeps_no_other_core_busy(sycl: SyclOps):
    """The CPU device's usual queue has a worker that looks for work as long as kernels come."""
    environment = {name: value for name, value in os.environ.items() if name != "DPCPP_CPU_NUM_CUS"}
    words = [sys.executable, "-c", ONE_THREAD]
    done = subprocess.run(words, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]


@pytest.mark.parametrize("which", ["COCODIFF_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_kernels_are_not_taken_from_a_folder_that_others_may_write(which, sycl_on_cpu, monkeypatch, tmp_path, caplog):
    """`sycl` is an error that says why; `auto` runs torch, and says so once."""
    tmp_path.chmod(0o777)
    for name in ("COCODIFF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(which, str(tmp_path))
    opened_libraries().cache_clear()
    monkeypatch.setattr("cocodiff_sycl.ops.open_cpu", lambda: SyclOps(Library(None), sycl_on_cpu.device, lambda: None))
    try:
        with pytest.raises(UserError, match=rf"no SYCL kernels on cpu: .*{tmp_path} has mode 0777: .*COCODIFF_CACHE"):
            dispatch.sycl_ops(sycl_on_cpu.device, required=True)
        assert dispatch.sycl_ops(sycl_on_cpu.device) is None
    finally:
        opened_libraries().cache_clear()
    assert len(caplog.messages) == 1 and "SYCL kernels are not used on cpu, " in caplog.messages[0]
