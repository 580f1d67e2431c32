"""oneCCL's alltoall on host memory by its C API: what `bench alltoall` compares with where oneCCL is installed.

It is no dependency: `launch/oneccl FOLDER` fetches its libraries, COCODIFF_ONECCL=FOLDER names them. The ranks must
have been started with MPI, which oneCCL then talks through.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from cocodiff.errors import UserError

FOLDER = "COCODIFF_ONECCL"
# In the order in which they need each other; the second library is looked up by name when a communicator is made.
LIBRARIES = ("libccl.so.2", "libccl.so.1", "libccl_legacy_cpu.so")
# Its workers switch themselves off on few cores and nothing progresses, unless told otherwise.
SETTINGS = {"CCL_ATL_TRANSPORT": "mpi", "CCL_WORKER_OFFLOAD": "1", "CCL_LOG_LEVEL": "error"}
FLOAT32 = 7  # onecclDataType_t


class UniqueId(ctypes.Structure):
    _fields_ = [("data", c_char * 4096)]


def available() -> bool:
    return bool(os.environ.get(FOLDER))


def library() -> Any:
    """The C API. Raises UserError where its libraries are not in the folder that the environment names."""
    folder = Path(os.environ.get(FOLDER, ""))
    missing = [name for name in LIBRARIES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{FOLDER} is {str(folder)!r}, which lacks {', '.join(missing)}: fill it with launch/oneccl")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CCL_ROOT", str(folder.resolve()))
    try:
        c, *_ = [ctypes.CDLL(str((folder / name).resolve()), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    except OSError as error:
        raise UserError(
            f"oneCCL in {folder} does not load: {error}; fill the folder again with launch/oneccl"
        ) from error
    c.onecclGetErrorString.restype = c_char_p
    c.onecclCommInitRank.argtypes = [ctypes.POINTER(c_void_p), c_size_t, UniqueId, c_int]
    c.onecclAllToAll.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p]
    return c


def alltoall(world: Any) -> Callable[[int, int, int], None]:
    """world: an mpi4py communicator of all ranks. Returns what runs one alltoall: (address sent from, address received
    at, float32 numbers of a block). It blocks until all has arrived."""
    c = library()

    def checked(code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"oneCCL: {what} failed with {c.onecclGetErrorString(code).decode()}")

    identity = UniqueId()
    if world.rank == 0:
        checked(c.onecclGetUniqueId(ctypes.byref(identity)), "onecclGetUniqueId")
    world.Bcast(memoryview(identity).cast("B"))
    communicator = c_void_p()
    checked(c.onecclCommInitRank(ctypes.byref(communicator), world.size, identity, world.rank), "onecclCommInitRank")

    def run(source: int, target: int, numbers: int) -> None:
        checked(c.onecclAllToAll(source, target, numbers, FLOAT32, communicator, None), "onecclAllToAll")

    return run
