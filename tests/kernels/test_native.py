"""Binaries of the kernels for a GPU that is not here: that none spills, how they are kept, and when they are taken.

The compiler is Intel's ocloc, where COCODIFF_OCLOC names a folder that the script `ocloc` beside this file filled. What
a GPU makes of a binary is not tested: where they are taken, the CPU device's own kernels stand in for them."""

from __future__ import annotations

import logging
import os
import re
import struct
from pathlib import Path

import pytest
from cocodiff_sycl import native
from cocodiff_sycl.build import kernel_source, native_file
from cocodiff_sycl.find import Unavailable, find_runtime
from cocodiff_sycl.library import GPU_LANES
from cocodiff_sycl.native import OCLOC, Usage, build_native, compile_native, find_ocloc
from cocodiff_sycl.ops import SyclOps
from cost_report import Row, hot_loop
from seams import as_gpu, module_of, native_module

from cocodiff.cli.main import main


@pytest.mark.processes
@pytest.mark.skipif(OCLOC not in os.environ, reason=f"no {OCLOC}: launch/ocloc FOLDER fetches Intel's offline compiler")
def test_no_kernel_spills_on_the_device(sycl_on_cpu: SyclOps, tmp_path):
    """All kernels of all dtypes, at the width that is launched. The CPU device never shows this."""
    _, usage = compile_native(kernel_source(GPU_LANES, gpu=True), "pvc", find_ocloc(), tmp_path)
    assert {one.name for one in usage} == set(re.findall(r"^KERNEL\((\w+)\)", kernel_source(GPU_LANES), re.MULTILINE))
    assert {one.simd for one in usage} == {GPU_LANES} and {one.registers for one in usage} == {128}
    assert not {one.name: (one.spill, one.private) for one in usage if one.spill or one.private}


def test_the_report_counts_the_loop_that_moves_the_most_bytes():
    """A block message of 256 bytes and one of 16 lanes, 4 bytes each; a square root takes four cycles, waiting none."""
    assembly = """L0:
(W)     send.ugm (1|M0)          r1       r2      null:0  0x0  0x0 // wr:1+0, rd:1; load.ugm.d32x16t.a32.ca.ca.bti[255]
L8:
(W)     send.ugm (1|M0)          r1       r2      null:0  0x0  0x0 // wr:1+0, rd:4; load.ugm.d32x64t.a64
        send.ugm (16|M0)         null     r2      r1:1  0x0  0x0 // wr:2+1, rd:0; store.ugm.d32.a64
        sync.nop                 null
        add (16|M0)              r1.0<1>:f     r1.0<1;1,0>:f    r2.0<1;1,0>:f
        add (32|M0)              r1.0<1>:f     r1.0<1;1,0>:f    r2.0<1;1,0>:f
        math.sqrt (16|M0)        r1.0<1>:f     r1.0<1;1,0>:f
(W&f0.0) jmpi                                L8
        mov (16|M0)              r1.0<1>:f     0:w
"""
    loop = hot_loop(assembly)
    assert (loop.bytes, loop.wide_bytes, loop.cycles) == (256 + 64, 256 + 64, 1 + 2 + 4 + 1)
    row = Row(Usage("a", 16, 128, 0, 0, 0), loop, numbers=128, moved=512, itemsize=2)
    traffic, instructions = row.seconds(256e6)
    assert traffic == pytest.approx(512e6 / 1e12) and instructions == pytest.approx(8e6 / (448 * 1.6e9))


class StandIn:
    """In the place of ocloc: says its release."""

    def __init__(self, version: str) -> None:
        self.release = version

    def version(self) -> str:
        return self.release


@pytest.fixture
def cache(sycl_on_cpu: SyclOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An empty cache, and a compiler that makes a binary, whose kernel spills so many bytes as this list holds."""
    spilled = [0]
    monkeypatch.setattr(native, "runtime_and_folder", lambda: (find_runtime(), tmp_path))
    monkeypatch.setattr(native, "host_library", lambda *_: None)

    def made(*_: object) -> tuple[list[bytes], list[Usage]]:
        return [b"binary"], [Usage("l1_score_f32", 16, 128, spilled[0], 0, 0)]

    monkeypatch.setattr(native, "compile_native", made)
    return spilled


def test_binaries_are_made_once_for_a_compiler_and_a_device(cache, tmp_path):
    path, fresh = build_native("pvc", 16, StandIn("1.0"))
    assert fresh and path == native_file(tmp_path, "pvc", 16)
    assert path.read_bytes() == b"ocloc 1.0\n" + struct.pack("=q", 6) + b"binary"
    assert build_native("pvc", 16, StandIn("1.0")) == (path, False)
    assert build_native("pvc", 16, StandIn("1.1")) == (path, True), "another compiler"
    with pytest.raises(Unavailable, match="unknown device 'abc': choose from pvc"):
        build_native("abc", 16, StandIn("1.0"))
    before = path.read_bytes()
    cache[0] = 64
    with pytest.raises(Unavailable, match="l1_score_f32 would spill registers on pvc"):
        build_native("pvc", 16, StandIn("1.2"))
    assert path.read_bytes() == before and {one.name for one in tmp_path.iterdir()} == {path.name, "lock"}


def test_both_names_of_a_gpu_make_the_same_binaries(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "find_ocloc", lambda _: StandIn("1.0"))
    for words, done in ((["--ahead_of_time", "intel_gpu_pvc"], "made in"), (["--device", "pvc"], "there already")):
        assert main(["kernels", "build", *words]) == 0
        assert f"{native_file(tmp_path, 'pvc', GPU_LANES)}, {done}" in capsys.readouterr().out


def test_without_a_compiler_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match=r"has no ocloc: launch/ocloc .* fetches it"):
        find_ocloc(tmp_path)
    assert main(["kernels", "build", "--device", "pvc", "--ocloc", str(tmp_path)]) == 2
    monkeypatch.delenv(OCLOC, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no ocloc found: load oneAPI's, or fetch it by launch/ocloc FOLDER"):
        find_ocloc()


def test_a_device_takes_its_binaries(sycl_on_cpu: SyclOps, tmp_path):
    ours, given = sycl_on_cpu.library, []
    path = native_file(tmp_path, "pvc", ours.lanes)
    path.write_bytes(b"ocloc 1.0\nbinaries")

    def native(_device: object, binaries: bytes, size: int) -> object:
        given.append((binaries, size))
        return module_of(ours).value

    module = native_module(as_gpu(ours, tmp_path, "pvc", native))
    assert module is not None and module.value == module_of(ours).value and given == [(b"binaries", 8)]
    assert native_module(as_gpu(ours, tmp_path, "acm-g10")) is None, "binaries for another device"


def test_what_does_not_fit_is_left_alone_with_one_line(sycl_on_cpu: SyclOps, tmp_path, caplog):
    library = as_gpu(sycl_on_cpu.library, tmp_path, "pvc")
    path = native_file(tmp_path, "pvc", library.lanes)
    assert native_module(library) is None and not caplog.messages, "no file, no line"
    path.write_bytes(b"ocloc 1.0\n" + struct.pack("=q", 6) + b"binary")
    with caplog.at_level(logging.WARNING, "cocodiff.kernels"):
        assert native_module(library) is None
    (line,) = caplog.messages
    assert "not one of Level Zero" in line and "kernels are compiled" in line and str(path) in line
    caplog.clear()
    assert native_module(sycl_on_cpu.library) is None and not caplog.messages, (
        "a CPU compiles its own, and says nothing"
    )
