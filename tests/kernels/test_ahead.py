"""Kernels compiled ahead of time by icpx, which is not here: a stand-in takes its place where the process ends.

Tested is what is ours: which words and which source icpx is given, that a device which is opened takes all kernels from
the library that it left, or says why not, and that what is given compiles, by the runtime's own compiler. What icpx
makes of it, and a GPU's code, are not."""

from __future__ import annotations

import copy
import ctypes
import logging
import re
from pathlib import Path

import pytest
import torch
from cocodiff_sycl import SyclOps, Unavailable, build
from cocodiff_sycl import library as opening
from cocodiff_sycl.build import AHEAD_OPTIONS, ahead_library, ahead_source, build_ahead, kernel_names
from cocodiff_sycl.find import find_runtime
from cocodiff_sycl.library import GPU_LANES, Library
from cocodiff_sycl.spirv import spirv_of

from cocodiff.errors import UserError
from cocodiff.kernels import TorchOps
from cocodiff.kernels.offline import compile_ahead

GPU = "intel_gpu_pvc"
HANDS_OUT = """
const char linked[] = "libsycl.so.{major}";
int asked;
void *cocodiff_ahead_kernel(void *queue, const char *name) {{
  asked++;
  return ((void *(*)(void *, const char *)){function}ull)((void *){module}ull, name);
}}
"""


@pytest.fixture
def icpx(sycl_on_cpu: SyclOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a stand-in on the path that compiles the C program it was made with, and a cache that is empty."""

    def make(program: str) -> None:
        (tmp_path / "program.c").write_text(program)
        script = tmp_path / "bin" / "icpx"
        script.parent.mkdir()
        script.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\n'
            f'while [ "$1" != -o ]; do shift; done\nexec cc -shared -fPIC -o "$2" {tmp_path}/program.c\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent), prepend=":")
        host = sycl_on_cpu.library.folder / "libcocodiff_sycl.so"  # loaded already
        for module in (build, opening):
            monkeypatch.setattr(module, "runtime_and_folder", lambda: (find_runtime(), tmp_path))
            monkeypatch.setattr(module, "host_library", lambda *_: host)

    return make


def in_folder(library: Library, folder: Path, lanes: int) -> Library:
    """The same device with another cache, and nothing of its own compiled yet."""
    found = copy.copy(library)
    found.folder, found.lanes, found._kernels = folder, lanes, {}
    return found


def test_icpx_is_given_the_kernels_and_the_gpu(sycl_on_cpu: SyclOps, icpx, tmp_path):
    icpx(f'const char linked[] = "libsycl.so.{find_runtime().major}";')
    path = build_ahead(GPU, GPU_LANES)
    assert path == ahead_library(tmp_path, GPU_LANES)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:-3] == [*AHEAD_OPTIONS, f"-fsycl-targets={GPU}"]
    assert Path(words[-3]).read_text() == ahead_source(GPU_LANES)


def test_a_device_that_is_opened_takes_its_kernels_and_compiles_none(sycl_on_cpu: SyclOps, icpx, tmp_path):
    ours = sycl_on_cpu.library
    function = ctypes.cast(ours._c.cocodiff_kernel, ctypes.c_void_p).value
    icpx(HANDS_OUT.format(major=find_runtime().major, function=function, module=ours._module.value))
    path = build_ahead(GPU, ours.lanes)
    opened = SyclOps(Library(None), sycl_on_cpu.device, lambda: None)
    asked = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "asked")
    assert not [*tmp_path.glob("saved-*"), *tmp_path.glob("built-*")], "kernels were compiled"
    before, score_BN = asked.value, torch.rand(2, 99)
    assert torch.equal(opened.select(score_BN, 30), TorchOps().select(score_BN, 30))
    assert asked.value > before, "kernels are not the library's"
    assert in_folder(ours, tmp_path, ours.lanes + 1)._ahead() is None, "kernels for other devices"


def test_kernels_for_another_device_are_left_alone(sycl_on_cpu: SyclOps, icpx, tmp_path, caplog):
    icpx(f'const char linked[] = "libsycl.so.{find_runtime().major}"; void *cocodiff_ahead_kernel() {{ return 0; }}')
    build_ahead(GPU, GPU_LANES)
    with caplog.at_level(logging.WARNING, "cocodiff.kernels"):
        assert in_folder(sycl_on_cpu.library, tmp_path, GPU_LANES)._ahead() is None
    ahead_library(tmp_path, GPU_LANES).unlink()  # not written to: it is loaded
    ahead_library(tmp_path, GPU_LANES).write_text("no library")
    with caplog.at_level(logging.WARNING, "cocodiff.kernels"):
        assert in_folder(sycl_on_cpu.library, tmp_path, GPU_LANES)._ahead() is None
    assert [f"are not used on {sycl_on_cpu.library.device_name}" in line for line in caplog.messages] == [True, True]


def test_what_cannot_be_compiled_leaves_nothing(icpx, tmp_path):
    icpx("int a;")
    with pytest.raises(Unavailable, match=r"icpx does not link libsycl\.so"):
        build_ahead(GPU, GPU_LANES)
    (tmp_path / "program.c").write_text("nonsense")
    with pytest.raises(
        UserError, match=f"no kernels ahead of time for {GPU}: icpx could not compile the kernels: .*err"
    ):
        compile_ahead(GPU)
    assert not list(tmp_path.glob("*.so"))


def test_without_icpx_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no icpx found: load the oneAPI compiler"):
        compile_ahead(GPU)


def test_the_runtimes_compiler_takes_what_icpx_is_given(sycl_on_cpu: SyclOps, monkeypatch, tmp_path):
    """All but the kernels themselves, which the other tests compile."""
    (listed,) = re.findall(r"define COCODIFF_KERNELS\(X\) (.*)", ahead_source(GPU_LANES))
    assert re.findall(r"X\((\w+)\)", listed) == kernel_names(GPU_LANES) and len(kernel_names(GPU_LANES)) == 34
    monkeypatch.setattr(build, "SOURCES", ("common.hpp", "select.cpp"))
    assert spirv_of(ahead_source(GPU_LANES), tmp_path)
