"""Binaries of the kernels for a GPU that need not be here: made by ocloc, Intel's offline compiler, for ranks on that
GPU to take.

They are one file in the cache: a line that names the compiler, then for each binary its size in 8 bytes and its bytes.

ocloc takes SPIR-V. libsycl compiles SYCL source to it on its way to the CPU device, and writes it into the working
directory where SYCL_DUMP_IMAGES is set. It reads that when it is loaded, so a process of its own does it
(`python -m cocodiff_sycl.native`). There the CPU device is told to make no vectors: it then refuses kernels for
sub-groups, whose code for a CPU nobody needs and takes it minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cocodiff_sycl.build import host_library, kernel_source, lock, native_file, run_program, runtime_and_folder
from cocodiff_sycl.find import Unavailable
from cocodiff_sycl.library import VECTORIZER, compile_for_cpu

DEVICES = ("pvc",)  # that ocloc knows and `Library.describe` names
OCLOC = "COCODIFF_OCLOC"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
PREFIX = "__sycl_kernel_"  # what libsycl puts before the name of a kernel of ours


@dataclass(frozen=True)
class Usage:
    """What one kernel takes of a hardware thread. Sizes in bytes a thread."""

    name: str
    simd: int
    registers: int
    spill: int
    private: int
    local: int


@dataclass(frozen=True)
class Ocloc:
    """The compiler: the words that start it."""

    command: tuple[str, ...]

    def version(self) -> str:
        """What keys its binaries: its release with that of the code generator behind it."""
        found = self._run(["--version"])
        return " ".join(re.findall(r"\d+\.[\d.]+", found)) or " ".join(found.split())

    def compile(self, spirv: Path, device: str, folder: Path) -> Path:
        """The binary of a file of SPIR-V, in the folder. Raises Unavailable."""
        words = ["compile", "-file", str(spirv), "-spirv_input", "-device", device]
        self._run([*words, "-output", spirv.stem, "-out_dir", str(folder)])
        found = list(folder.glob(f"{spirv.stem}*.bin"))
        if len(found) != 1:
            raise Unavailable(f"ocloc left {len(found)} binaries of {spirv.name} for {device}, not one")
        return found[0]

    def usage(self, binary: Path, device: str, folder: Path) -> list[Usage]:
        """Of all kernels of a binary, which is taken apart into an empty folder. Raises Unavailable."""
        self._run(["disasm", "-file", str(binary), "-dump", str(folder), "-device", device])
        kernels = yaml.safe_load((folder / ".ze_info").read_text().rstrip("\0"))["kernels"]
        return [_usage(about) for about in kernels if about["name"].startswith(PREFIX)]

    def _run(self, words: list[str]) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        done = run_program([*self.command, *words], "ocloc does not run", env=environment, errors="replace")
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            error_lines = [line for line in said if "error" in line.lower()] or said[-1:] or ["no word"]
            raise Unavailable(f"ocloc {words[0]} failed: {error_lines[0].strip()}")
        return done.stdout


def _usage(about: dict[str, Any]) -> Usage:
    """about: an entry of .ze_info. What a kernel does not take is not named there."""
    execution = about["execution_env"]
    buffers = about.get("per_thread_memory_buffers", ())
    private = sum(buffer["size"] for buffer in buffers if buffer["usage"] != "single_space")
    return Usage(
        about["name"].removeprefix(PREFIX),
        execution["simd_size"],
        execution["grf_count"],
        execution.get("spill_size", 0),
        max(private, execution.get("private_size", 0)),
        execution.get("slm_size", 0),
    )


def find_ocloc(folder: str | Path | None = None) -> Ocloc:
    """The compiler of a folder that launch/ocloc filled ($COCODIFF_OCLOC), else the system's. Raises Unavailable."""
    folder = folder or os.environ.get(OCLOC)
    if not folder:
        path = shutil.which("ocloc")
        if path is None:
            raise Unavailable(f"no ocloc found: load oneAPI's, or fetch it by launch/ocloc FOLDER and set {OCLOC}")
        return Ocloc((path,))
    root = Path(folder).resolve() / "system"
    programs = sorted((root / "usr/bin").glob("ocloc-*"))
    if not (root / "ready").exists() or not programs:
        raise Unavailable(f"{folder} has no ocloc: launch/ocloc {folder} fetches it")
    libraries = root / LIBRARIES  # with the C library they were built against, which is newer than most systems'
    return Ocloc((str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(programs[-1])))


def spirv_of(source: str, folder: Path) -> list[Path]:
    """Files that libsycl leaves in an empty folder when it compiles SYCL source; several, because kernels that need
    different features of a device come apart. Raises Unavailable where that takes what is not here."""
    environment = {**os.environ, "SYCL_DUMP_IMAGES": "1", "SYCL_CACHE_PERSISTENT": "0", VECTORIZER: "1"}
    command = [sys.executable, "-m", "cocodiff_sycl.native"]
    done = run_program(command, "the kernels' SPIR-V was not made", input=source, cwd=folder, env=environment)
    found = sorted(folder.glob("*.spv"))
    if not found:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}, no files"]
        raise Unavailable(f"the kernels' SPIR-V was not made: {last[0]}")
    return found


def compile_native(source: str, device: str, ocloc: Ocloc, folder: Path) -> tuple[list[bytes], list[Usage]]:
    """Binaries of SYCL source for a device, and what each kernel takes of it. Raises Unavailable. folder: an empty one,
    where the binaries are left, each beside a folder of its parts."""
    binaries: list[bytes] = []
    usage: list[Usage] = []
    for spirv in spirv_of(source, folder):
        binary = ocloc.compile(spirv, device, folder)
        apart = folder / spirv.stem
        apart.mkdir()
        usage += ocloc.usage(binary, device, apart)
        binaries.append(binary.read_bytes())
    return binaries, usage


def build_native(device: str, lanes: int, ocloc: Ocloc) -> tuple[Path, bool]:
    """The file of binaries for a device, and whether it was made now rather than there. Raises Unavailable, also where
    a kernel spills registers: that would make it slow on the device without anybody noticing."""
    if device not in DEVICES:
        raise Unavailable(f"unknown device {device!r}: choose from {', '.join(DEVICES)}")
    runtime, folder = runtime_and_folder()
    host_library(runtime, folder)
    path, compiler = native_file(folder, device, lanes), f"ocloc {ocloc.version()}"
    with lock(folder), tempfile.TemporaryDirectory() as parts:
        if path.exists() and path.read_bytes().startswith(compiler.encode() + b"\n"):
            return path, False
        binaries, usage = compile_native(kernel_source(lanes, gpu=True), device, ocloc, Path(parts))
        spilling = [one.name for one in usage if one.spill]
        if spilling:
            raise Unavailable(f"{', '.join(spilling)} would spill registers on {device} ({compiler})")
        fresh = path.with_suffix(f".{os.getpid()}")
        framed = [struct.pack("=q", len(one)) + one for one in binaries]
        fresh.write_bytes(b"".join([compiler.encode() + b"\n", *framed]))
        fresh.replace(path)
    return path, True


if __name__ == "__main__":
    try:
        compile_for_cpu(sys.stdin.read())
    except Unavailable as error:
        sys.exit(str(error))
