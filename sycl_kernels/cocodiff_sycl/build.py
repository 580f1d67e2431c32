"""Builds the C library around SYCL and compiles the kernels, once for each machine, and keeps both.

The cache is a folder named by what goes in: sources, options, libsycl's version. The C library lies there, and SYCL's
own cache. One process builds under a lock; others wait and load. All of it is executed, so the folder is this user's
own (`private.py`).
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
HOST = ("host.cpp", "moves.hpp", "opencl.hpp", "tensors.hpp")
SOURCES = (
    *("common.hpp", "movement.cpp", "score.cpp", "select.cpp", "norm_rope.cpp", "merge.cpp"),
    *("codes.hpp", "coder.hpp", "residual.cpp", "lossless.cpp"),
)
COMPILE_OPTIONS = ("-std=c++17", "-O2", "-w", "-fPIC", "-shared")
# libsycl reads both once, at the first program that it builds, whoever's that is (tried: set later, it keeps no file).
# Its limits stay: a program of 1 GB at most, by default no limit of all.
PERSISTENT, CACHE = "SYCL_CACHE_PERSISTENT", "SYCL_CACHE_DIR"
LEFT_S = 3600  # what is half written for longer than that belongs to a process that was killed


def kernel_source(lanes: int, gpu: bool = False) -> str:
    """All kernels as one text, for so many work-items a row (see common.hpp). gpu: with what a GPU alone can run."""
    parts = [f'#line 1 "{name}"\n{(HERE / "kernels" / name).read_text()}' for name in SOURCES]
    return "\n".join([f"#define LANES {lanes}", f"#define BLOCK_MESSAGES {int(gpu)}", *parts])


def kernel_option(runtime: Runtime) -> bytes:
    """libsycl 8 cannot link its own device libraries for the CPU device; libsycl 9 rejects the option."""
    return b"-fno-sycl-device-lib=all" if runtime.major <= 8 else b""


def cache_folder(runtime: Runtime) -> Path:
    """Where this version's library and kernels are: below $COCODIFF_CACHE, or the user's cache. Raises Unavailable."""
    content = hashlib.sha256()
    host = [(HERE / name).read_text() for name in HOST]
    for text in (kernel_source(0), *host, *COMPILE_OPTIONS, runtime.version):
        content.update(text.encode() + b"\0")
    return _top_folder() / f"sycl-{content.hexdigest()[:16]}"


def _top_folder() -> Path:
    if os.environ.get("COCODIFF_CACHE"):
        return Path(os.environ["COCODIFF_CACHE"])
    try:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise Unavailable("no home folder to keep kernels in: set HOME or COCODIFF_CACHE") from error
    return user / "cocodiff"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Waits until no other process builds in a folder, and removes what killed ones left there half written. Raises
    Unavailable where the folder, in here or inside, cannot be written."""
    try:
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # By age, because locks of some network file systems hold for one host alone.
            for path in folder.glob("*.[0-9]*"):
                if path.suffix[1:].isdecimal() and time.time() - path.stat().st_mtime > LEFT_S:
                    path.unlink(missing_ok=True)
            yield
    except OSError as error:
        raise Unavailable(f"cannot write the kernels' cache {folder}: {error.strerror}; set COCODIFF_CACHE") from error


def host_library(runtime: Runtime, folder: Path) -> Path:
    """The C library, compiled if the folder does not have it. Raises Unavailable."""
    target = folder / "libcocodiff_sycl.so"
    if not target.exists():
        with lock(folder):  # a process that comes while another compiles waits here
            if not target.exists():
                _compile(runtime, target)
    return target


def _compile(runtime: Runtime, target: Path) -> None:
    fresh, source = target.with_suffix(f".{os.getpid()}"), str(HERE / "host.cpp")
    words = [*COMPILE_OPTIONS, f"-I{runtime.include}", source, "-o", str(fresh), str(runtime.library), "-ldl"]
    command = [find_compiler(), *words]
    try:  # without a limit: how long it takes is a matter of what else the machine does
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{command[0]} did not compile the SYCL host library: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        first = errors[0] if errors else "no word"
        raise Unavailable(f"{command[0]} could not compile the SYCL host library: {first}")
    fresh.replace(target)


def runtime_and_folder() -> tuple[Runtime, Path]:
    """The SYCL runtime and the cache that belongs to it. Raises Unavailable."""
    runtime = find_runtime()
    return runtime, private_folder(cache_folder(runtime))


def keep_kernels() -> None:
    """Have libsycl keep what it compiles. Call it before torch is imported; settings of the user stay.

    Where there is no runtime or no private folder nothing is set: who opens the kernels is told why.
    """
    with suppress(Unavailable):
        set_cache(runtime_and_folder()[1])


def set_cache(folder: Path) -> None:
    """Set the variables of libsycl's cache to a folder in `folder`, unless the user has set them."""
    os.environ.setdefault(PERSISTENT, "1")
    os.environ.setdefault(CACHE, str(folder / "kernels"))


def keep_remedy() -> str:
    """Say what has libsycl keep kernels, where it does not."""
    return f"set {PERSISTENT}=1 {CACHE}={os.environ[CACHE]} before Python starts, and no SYCL_CACHE_MAX_SIZE"


def kept_binaries() -> set[str]:
    """Return the paths of all binaries in libsycl's cache, from its folder on."""
    folder = Path(os.environ[CACHE])
    return {str(path.relative_to(folder)) for path in folder.rglob("*.bin")}


def read_marker(marker: Path) -> bool | None:
    """Return True if the kernels that a marker tells of are in libsycl's cache, False if it kept none last time, and
    None if nobody knows: there is no marker, or a binary that it names is gone."""
    if not marker.exists():
        return None
    names = marker.read_text().splitlines()
    gone = not all((Path(os.environ[CACHE]) / name).exists() for name in names)
    return None if gone else bool(names)


def write_marker(marker: Path, names: Iterable[str]) -> None:
    """Note that libsycl's cache holds the kernels, among these binaries, or with none that it does not."""
    with suppress(OSError):  # on a full disk the next process looks again
        marker.write_text("\n".join(sorted(names)))
