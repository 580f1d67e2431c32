"""The search for the SYCL runtime, its headers, the OpenCL CPU device and a C++ compiler on this machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class Unavailable(RuntimeError):
    """The reason why SYCL kernels cannot run here. The message includes a remedy."""


@dataclass(frozen=True)
class Runtime:
    """A SYCL runtime on this machine: its library and its headers."""

    library: Path  # path of libsycl
    include: Path  # folder of its headers
    version: str  # version and size of the library's file, such as "8.0.0-5242880"

    @property
    def major(self) -> int:
        """The major version of the library."""
        return int(self.version.split(".")[0])

    @property
    def opencl_cpu(self) -> Path | None:
        """The path of the OpenCL driver of the CPU device beside the library, as in an environment made by pip; None if
        absent."""
        path = self.library.parent / "libintelocl.so"
        return path if path.exists() else None


def find_runtime() -> Runtime:
    """Return the SYCL runtime of this Python environment, or of the oneAPI compiler that is loaded.

    Raise Unavailable if there is none, or if torch has loaded another major version.
    """
    for prefix in _prefixes():
        # A wheel may hold copies instead of links: the longest name has the full version.
        names = [path for path in (prefix / "lib").glob("libsycl.so.*") if re.search(r"\.so(\.\d+)+$", path.name)]
        if names and (prefix / "include" / "sycl").is_dir():
            library = max(names, key=lambda path: len(path.name))
            version = f"{library.name.partition('.so.')[2]}-{library.stat().st_size}"
            runtime = Runtime(library, prefix / "include", version)
            loaded = loaded_major()
            if loaded not in (None, runtime.major):
                raise Unavailable(
                    f"torch has loaded libsycl.so.{loaded}, but headers and library found are of "
                    f"libsycl.so.{runtime.major} ({library}): install the intel-sycl-rt that this torch was built with"
                )
            return runtime
    raise Unavailable(
        "no SYCL runtime with headers found: install cocodiff[sycl] (x86 Linux), or load a oneAPI compiler (CMPLR_ROOT)"
    )


def _prefixes() -> Iterator[Path]:
    """Yield folders that may hold lib/ and include/: environments on Python's path, then the oneAPI compiler."""
    yield Path(sys.prefix)
    for entry in map(Path, sys.path):
        if entry.name == "site-packages":
            yield entry.parents[2]
    if "CMPLR_ROOT" in os.environ:
        yield Path(os.environ["CMPLR_ROOT"])
    if "ONEAPI_ROOT" in os.environ:
        yield Path(os.environ["ONEAPI_ROOT"]) / "compiler" / "latest"


def loaded_major() -> int | None:
    """Return the major version of the libsycl that this process has already loaded, as torch's XPU build does; None if
    it has loaded none."""
    maps = Path("/proc/self/maps")
    found = re.search(r"/libsycl\.so\.(\d+)", maps.read_text()) if maps.exists() else None
    return int(found[1]) if found else None


def find_compiler() -> str:
    """Return the command of a C++17 compiler: $CXX, g++, c++ or icpx. Raise Unavailable if there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++", "icpx"):
        if name and shutil.which(name):
            return name
    raise Unavailable("no C++ compiler found: install g++ (Debian: apt install g++) or set CXX")
