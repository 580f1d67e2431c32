"""Builds the C library around SYCL and compiles the kernels, once for each machine, and keeps both.

The cache is a folder named by what goes in: sources, options, libsycl's version. The C library lies there, what a CPU's
kernels were compiled to (`kept.py`), what icpx made for a GPU if it was asked to, and SYCL's own cache. One process
builds under a lock; others wait and load. All of it is executed, so the folder is this user's own (`private.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cocodiff_sycl.find import Runtime, Unavailable, find_compiler, find_runtime
from cocodiff_sycl.private import private_folder

__all__ = [
    "Unavailable",
    "ahead_library",
    "build_ahead",
    "cache_folder",
    "host_library",
    "kernel_options",
    "kernel_source",
    "lock",
]
HERE = Path(__file__).parent
AHEAD = "ahead.cpp"
HOST = (AHEAD, "host.cpp", "level_zero.hpp", "moves.hpp", "opencl.hpp", "saved.hpp", "tensors.hpp")
SOURCES = (
    "common.hpp",
    "movement.cpp",
    "score.cpp",
    "select.cpp",
    "norm_rope.cpp",
    "merge.cpp",
    "codes.hpp",
    "batch.hpp",
    "coder.hpp",
    "residual.cpp",
    "lossless.cpp",
)
PAST_CACHE = "move_rows_past_cache"  # of one work-item a row alone
COMPILE_OPTIONS = ("-std=c++17", "-O2", "-w", "-fPIC", "-shared")
# The codec is defined to the bit, and icpx would fuse and reorder: with these it may not.
EXACT_OPTIONS = ("-fp-model=precise", "-ffp-contract=off")
AHEAD_OPTIONS = ("-std=c++17", "-O3", "-w", "-fPIC", "-shared", "-fsycl", *EXACT_OPTIONS)
LEFT_S = 3600  # what is half written for longer than that belongs to a process that was killed


def kernel_source(lanes: int, gpu: bool = False) -> str:
    """All kernels as one text, for so many work-items a row (see common.hpp). gpu: with what a GPU alone can run."""
    parts = [f'#line 1 "{name}"\n{(HERE / "kernels" / name).read_text()}' for name in SOURCES]
    return "\n".join([f"#define LANES {lanes}", f"#define BLOCK_MESSAGES {int(gpu)}", *parts])


def kernel_options(runtime: Runtime) -> tuple[str, ...]:
    """libsycl 8 cannot link its own device libraries for the CPU device; libsycl 9 rejects the option."""
    return ("-fno-sycl-device-lib=all",) if runtime.major <= 8 else ()


def cache_folder(runtime: Runtime) -> Path:
    """Where this version's library and kernels are kept: below $COCODIFF_CACHE, or the user's cache folder. Raises
    Unavailable where there is none of them."""
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


def ahead_library(folder: Path, lanes: int) -> Path:
    """Where the kernels are that were compiled ahead of time for so many work-items a row."""
    return folder / f"ahead-{lanes}.so"


def build_ahead(gpu: str, lanes: int) -> Path:
    """Compiles the kernels by icpx for a GPU that need not be here: a name that its -fsycl-targets knows, such as
    intel_gpu_pvc. Raises Unavailable."""
    runtime, folder = runtime_and_folder()
    if not shutil.which("icpx"):
        raise Unavailable(
            "no icpx found: load the oneAPI compiler, or let the first use on the GPU compile the kernels"
        )
    host_library(runtime, folder)
    target = ahead_library(folder, lanes)
    with lock(folder):
        source, fresh = target.with_suffix(".cpp"), target.with_suffix(f".{os.getpid()}")
        source.write_text(ahead_source(lanes))
        _run(["icpx", *AHEAD_OPTIONS, f"-fsycl-targets={gpu}", str(source), "-o", str(fresh)], "the kernels")
        if f"libsycl.so.{runtime.major}".encode() not in fresh.read_bytes():
            fresh.unlink()
            raise Unavailable(f"icpx does not link libsycl.so.{runtime.major}, which is used here ({runtime.library})")
        fresh.replace(target)
    return target


def ahead_source(lanes: int) -> str:
    """The kernels, then what gives them by their names."""
    kernels = kernel_source(lanes, gpu=True)
    names = " ".join(f"X({name})" for name in kernel_names(lanes))
    return f'{kernels}\n#define COCODIFF_KERNELS(X) {names}\n#line 1 "{AHEAD}"\n{(HERE / AHEAD).read_text()}'


def kernel_names(lanes: int) -> list[str]:
    """The kernels of so many work-items a row."""
    named = dict.fromkeys(re.findall(r"^KERNEL\((\w+)\)", kernel_source(lanes), re.MULTILINE))
    return [name for name in named if lanes == 1 or name != PAST_CACHE]


def _compile(runtime: Runtime, target: Path) -> None:
    fresh = target.with_suffix(f".{os.getpid()}")
    command = [
        find_compiler(),
        *COMPILE_OPTIONS,
        f"-I{runtime.include}",
        str(HERE / "host.cpp"),
        "-o",
        str(fresh),
        str(runtime.library),
        "-ldl",
    ]
    _run(command, "the SYCL host library")
    fresh.replace(target)


def _run(command: list[str], what: str) -> None:
    try:
        # Without a limit: how long a compiler takes is a matter of what else the machine does.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{command[0]} did not compile {what}: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise Unavailable(f"{command[0]} could not compile {what}: {errors[0] if errors else 'no word'}")


def runtime_and_folder() -> tuple[Runtime, Path]:
    """The SYCL runtime and the cache that belongs to it. Raises Unavailable."""
    runtime = find_runtime()
    return runtime, private_folder(cache_folder(runtime))
