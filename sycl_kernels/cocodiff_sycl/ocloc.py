"""Intel's offline compiler for its GPUs: SPIR-V to a device's binary, and what the binary tells of its kernels.

`launch/ocloc FOLDER` fetches it where the system has none. The GPU need not be here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cocodiff_sycl.find import Unavailable

OCLOC = "COCODIFF_OCLOC"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
PREFIX = "__sycl_kernel_"  # what libsycl puts before the name of a kernel of ours


@dataclass(frozen=True)
class Usage:
    """What one kernel takes of a hardware thread, and its instructions as text. Sizes in bytes a thread."""

    name: str
    simd: int
    registers: int
    spill: int
    private: int
    local: int
    assembly: str


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
        return [
            _usage(about, (folder / f".text.{about['name']}.asm").read_text())
            for about in yaml.safe_load((folder / ".ze_info").read_text().rstrip("\0"))["kernels"]
            if about["name"].startswith(PREFIX)
        ]

    def _run(self, words: list[str]) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        try:
            done = subprocess.run(
                [*self.command, *words], env=environment, text=True, errors="replace", capture_output=True, check=False
            )
        except OSError as error:
            raise Unavailable(f"ocloc does not run: {error}") from error
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            error_lines = [line for line in said if "error" in line.lower()] or said[-1:] or ["no word"]
            raise Unavailable(f"ocloc {words[0]} failed: {error_lines[0].strip()}")
        return done.stdout


def _usage(about: dict[str, Any], assembly: str) -> Usage:
    """about: an entry of .ze_info. What a kernel does not take is not named there."""
    execution = about["execution_env"]
    private = sum(
        buffer["size"] for buffer in about.get("per_thread_memory_buffers", ()) if buffer["usage"] != "single_space"
    )
    return Usage(
        about["name"].removeprefix(PREFIX),
        execution["simd_size"],
        execution["grf_count"],
        execution.get("spill_size", 0),
        max(private, execution.get("private_size", 0)),
        execution.get("slm_size", 0),
        assembly,
    )


def find_ocloc(folder: str | Path | None = None) -> Ocloc:
    """The compiler of a folder that launch/ocloc filled ($COCODIFF_OCLOC by default), else the system's. Raises
    Unavailable."""
    folder = folder or os.environ.get(OCLOC)
    if not folder:
        path = shutil.which("ocloc")
        if path is None:
            raise Unavailable(f"no ocloc found: launch/ocloc FOLDER fetches it; then give FOLDER or set {OCLOC}")
        return Ocloc((path,))
    root = Path(folder).resolve() / "system"
    programs = sorted((root / "usr/bin").glob("ocloc-*"))
    if not (root / "ready").exists() or not programs:
        raise Unavailable(f"{folder} has no ocloc: launch/ocloc {folder} fetches it")
    libraries = root / LIBRARIES  # with the C library they were built against, which is newer than most systems'
    loader = libraries / "ld-linux-x86-64.so.2"
    return Ocloc((str(loader), "--library-path", str(libraries), str(programs[-1])))
