"""The build of the C library around SYCL and of the kernels, once for each machine, and the cache that keeps both.

The cache is a folder named by a hash of the sources, the options and libsycl's version. It holds the C library and
SYCL's own cache. One process builds under a lock; others wait and load. All of it is executed, so the folder is this
user's own (`private.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cocodiff_sycl.find import Runtime, Unavailable, find_compiler, find_runtime
from cocodiff_sycl.private import private_folder

HERE = Path(__file__).parent
HOST = ("host.cpp", "moves.hpp", "opencl.hpp", "tensors.hpp")  # files of the C library
# files of the kernels
SOURCES = (
    *("common.hpp", "movement.cpp", "score.cpp", "select.cpp", "norm_rope.cpp", "merge.cpp"),
    *("codes.hpp", "coder.hpp", "residual.cpp", "lossless.cpp"),
)
COMPILE_OPTIONS = ("-std=c++17", "-O2", "-w", "-fPIC", "-shared")
# Environment variables. libsycl reads both once, at the first program that this process builds (tried: if set later, it
# keeps no file). Its limits stay: at most 1 GB for a program, by default no limit for all.
PERSISTENT, CACHE = "SYCL_CACHE_PERSISTENT", "SYCL_CACHE_DIR"
LEFT_S = 3600  # age in seconds from which on a half-written file belongs to a process that was killed


def kernel_source(lanes: int, gpu: bool = False) -> str:
    """Return the source of all kernels as one text.

    Args:
        lanes: number of work-items that share a row (see common.hpp).
        gpu: True to include what only a GPU can run.
    """
    parts = [f'#line 1 "{name}"\n{(HERE / "kernels" / name).read_text()}' for name in SOURCES]
    return "\n".join([f"#define LANES {lanes}", f"#define BLOCK_MESSAGES {int(gpu)}", *parts])


def kernel_option(runtime: Runtime) -> bytes:
    """Return the compiler option that the kernels need with this runtime; b"" for none.

    libsycl 8 cannot link its own device libraries for the CPU device; libsycl 9 rejects the option that leaves them
    out.
    """
    return b"-fno-sycl-device-lib=all" if runtime.major <= 8 else b""


def cache_folder(runtime: Runtime) -> Path:
    """Return the folder for the C library and kernels of this version of the sources, below $COCODIFF_CACHE or the
    user's cache folder.

    Raise Unavailable if the user has no home folder.
    """
    content = hashlib.sha256()
    host = [(HERE / name).read_text() for name in HOST]
    for text in (kernel_source(0), *host, *COMPILE_OPTIONS, runtime.version):
        content.update(text.encode() + b"\0")
    return _top_folder() / f"sycl-{content.hexdigest()[:16]}"


def _top_folder() -> Path:
    """Return the folder that holds the caches of all versions. Raise Unavailable if the user has no home folder."""
    if os.environ.get("COCODIFF_CACHE"):
        return Path(os.environ["COCODIFF_CACHE"])
    try:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise Unavailable("no home folder to keep kernels in: set HOME or COCODIFF_CACHE") from error
    return user / "cocodiff"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in a folder, and remove files that killed processes left half written.

    Raise Unavailable if the folder cannot be written, also for an OSError inside the `with` block.
    """
    try:
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # By age, because locks of some network file systems are valid on one host only.
            for path in folder.glob("*.[0-9]*"):
                if path.suffix[1:].isdecimal() and time.time() - path.stat().st_mtime > LEFT_S:
                    path.unlink(missing_ok=True)
            yield
    except OSError as error:
        raise Unavailable(f"cannot write the kernels' cache {folder}: {error.strerror}; set COCODIFF_CACHE") from error


def host_library(runtime: Runtime, folder: Path) -> Path:
    """Return the path of the C library in a cache folder, where it is compiled first if it is missing.

    Raise Unavailable if it cannot be compiled.
    """
    target = folder / "libcocodiff_sycl.so"
    if not target.exists():
        with lock(folder):  # a process that comes while another compiles waits here
            if not target.exists():
                _compile(runtime, target)
    return target


def _compile(runtime: Runtime, target: Path) -> None:
    """Compile the C library to a file. Raise Unavailable with the compiler's first error if that fails.

    Args:
        runtime: the SYCL runtime that it is compiled against.
        target: path of the file.
    """
    fresh, source = target.with_suffix(f".{os.getpid()}"), str(HERE / "host.cpp")
    words = [*COMPILE_OPTIONS, f"-I{runtime.include}", source, "-o", str(fresh), str(runtime.library), "-ldl"]
    command = [find_compiler(), *words]
    try:  # without a time limit: the time depends on what else the machine does
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{command[0]} did not compile the SYCL host library: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        first = errors[0] if errors else "no word"
        raise Unavailable(f"{command[0]} could not compile the SYCL host library: {first}")
    fresh.replace(target)


def runtime_and_folder() -> tuple[Runtime, Path]:
    """Return (the SYCL runtime of this environment, the private cache folder for it). Raise Unavailable if there is no
    runtime or the folder is not private."""
    runtime = find_runtime()
    return runtime, private_folder(cache_folder(runtime))


def keep_kernels() -> None:
    """Set the environment so that libsycl keeps the kernels that it compiles. Call this before torch is imported; the
    user's settings stay.

    If there is no runtime or no private folder, nothing is set. Opening the kernels then reports the reason.
    """
    with suppress(Unavailable):
        set_cache(runtime_and_folder()[1])


def set_cache(folder: Path) -> None:
    """Set libsycl's environment variables so that it caches kernels below a folder, unless the user has set them."""
    os.environ.setdefault(PERSISTENT, "1")
    os.environ.setdefault(CACHE, str(folder / "kernels"))


def keep_remedy() -> str:
    """Return the advice to print if libsycl does not keep kernels."""
    return f"set {PERSISTENT}=1 {CACHE}={os.environ[CACHE]} before Python starts, and no SYCL_CACHE_MAX_SIZE"


def kept_binaries() -> set[str]:
    """Return the paths of all compiled kernels in libsycl's cache, relative to its folder."""
    folder = Path(os.environ[CACHE])
    return {str(path.relative_to(folder)) for path in folder.rglob("*.bin")}


def read_marker(marker: Path) -> bool | None:
    """Return True if the kernels that a marker file lists are in libsycl's cache, and False if libsycl kept none last
    time.

    Return None if that is unknown: there is no marker, or a file that it lists is missing.
    """
    if not marker.exists():
        return None
    names = marker.read_text().splitlines()
    gone = not all((Path(os.environ[CACHE]) / name).exists() for name in names)
    return None if gone else bool(names)


def write_marker(marker: Path, names: Iterable[str]) -> None:
    """Write a marker file for later processes: it lists the files of libsycl's cache with the kernels, or nothing if
    libsycl keeps none.

    Args:
        marker: path of the marker.
        names: paths of the files, relative to the cache's folder.
    """
    with suppress(OSError):  # on a full disk the next process looks again
        marker.write_text("\n".join(sorted(names)))
