"""ocloc, Intel's offline compiler: binaries of the kernels for a GPU that need not be here, and what each kernel takes.

ocloc takes SPIR-V. libsycl compiles SYCL source to it on its way to the CPU device, and writes it into the working
directory where SYCL_DUMP_IMAGES is set. It reads that when it is loaded, so a process of its own does it (this file as
a program). There the CPU device is told to make no vectors: it then refuses kernels for sub-groups, whose code for a
CPU nobody needs and takes it minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cocodiff_sycl.find import Unavailable
from cocodiff_sycl.library import VECTORIZER

OCLOC = "COCODIFF_OCLOC"  # names the folder that the script `ocloc` beside this file filled
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


def run_ocloc(*words: object) -> None:
    """Run the compiler in the folder $COCODIFF_OCLOC, with the C library that it was built against, which is newer than
    most systems'."""
    root = Path(os.environ[OCLOC]).resolve() / "system"
    programs = sorted((root / "usr/bin").glob("ocloc-*"))
    assert (root / "ready").exists() and programs, f"no ocloc in {root.parent}: {Path(__file__).with_name('ocloc')}"
    libraries = root / LIBRARIES
    command = [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries, programs[-1], *words]
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "errors": "replace"}
    done = subprocess.run([*map(str, command)], env=environment, **how)
    assert done.returncode == 0, done.stdout + done.stderr


def _usage(about: dict[str, Any]) -> Usage:
    """about: an entry of .ze_info. What a kernel does not take is not named there."""
    execution = about["execution_env"]
    buffers = about.get("per_thread_memory_buffers", ())
    private = sum(buffer["size"] for buffer in buffers if buffer["usage"] != "single_space")
    spill, private = execution.get("spill_size", 0), max(private, execution.get("private_size", 0))
    own = execution["simd_size"], execution["grf_count"], spill, private, execution.get("slm_size", 0)
    return Usage(about["name"].removeprefix(PREFIX), *own)


def spirv_of(source: str, folder: Path) -> list[Path]:
    """Return the files that libsycl leaves in an empty folder when it compiles SYCL source; several, because kernels
    that need different features of a device come apart. Raises Unavailable where that takes what is not here."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEAPI_DEVICE_SELECTOR"}
    environment |= {"SYCL_DUMP_IMAGES": "1", "SYCL_CACHE_PERSISTENT": "0", VECTORIZER: "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    words, given = [sys.executable, __file__], {"input": source, "cwd": folder, "env": environment}
    done = subprocess.run(words, capture_output=True, text=True, check=False, **given)
    found = sorted(folder.glob("*.spv"))
    if not found:
        raise Unavailable(f"the kernels' SPIR-V was not made: {done.stderr or f'exit code {done.returncode}'}")
    return found


def compile_native(source: str, device: str, folder: Path) -> list[Usage]:
    """Compile SYCL source for a device and return what each kernel takes of it. folder: an empty one, where the
    binaries are left, each beside a folder of its parts."""
    usage: list[Usage] = []
    for spirv in spirv_of(source, folder):
        apart = folder / spirv.stem
        apart.mkdir()
        made = "-output", spirv.stem, "-out_dir", folder
        run_ocloc("compile", "-file", spirv, "-spirv_input", "-device", device, *made)
        (binary,) = folder.glob(f"{spirv.stem}*.bin")
        run_ocloc("disasm", "-file", binary, "-dump", apart, "-device", device)
        kernels = yaml.safe_load((apart / ".ze_info").read_text().rstrip("\0"))["kernels"]
        usage += [_usage(about) for about in kernels if about["name"].startswith(PREFIX)]
    return usage


if __name__ == "__main__":
    from seams import compile_for_cpu

    try:
        compile_for_cpu(sys.stdin.read())
    except Unavailable as error:
        sys.exit(str(error))
