"""The C library in Python: a device with its kernels, and launches. Errors of SYCL become RuntimeError.

A launch needs the addresses of its tensors, and numbers that follow from their layouts. Checks, and all numbers of a
launch except addresses, depend only on shapes, strides, dtypes and devices. They are computed for the first tensors of
such layouts and looked up for later ones. The look-up has to be cheap. A launch has up to a hundred tensors, and each
attribute of a tensor costs Python a microsecond. C takes a tenth of that, where torch allows it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import time
from collections.abc import Callable, Hashable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint32, c_void_p, py_object
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from cocodiff_sycl.build import (
    host_library,
    keep_remedy,
    kept_binaries,
    kernel_option,
    kernel_source,
    lock,
    read_marker,
    runtime_and_folder,
    set_cache,
    write_marker,
)
from cocodiff_sycl.find import Runtime, Unavailable, loaded_major

CPU_LANES, GPU_LANES = 1, 16  # work-items that share a row
GROUPS_OF_ROWS = 16  # number of groups of LANES work-items in a work-group on GPUs
CHUNK_BYTES = {True: 64 * 1024, False: 4 * 1024}  # most bytes that a group of LANES work-items copies; True: CPU
WAIT, COPY_TABLE = 1, 2  # flags of a launch: wait for it; copy its table to the device
CPU_THREADS = "DPCPP_CPU_NUM_CUS"  # environment variable of Intel's CPU device: number of threads
# Environment variable of Intel's CPU device. 1: no vectors across work-items. Kernels with one work-item a row have
# vectors of their own, which its compiler would take minutes to split and join again. It is read once; after that other
# kernels are refused.
VECTORIZER = "CL_CONFIG_CPU_VECTORIZER_MODE"
QUICK_S = 10.0  # seconds: opening a GPU's kernels takes less from the cache, and more when they are compiled
KEPT = 1024  # most cached results of one `Layouts`; a run has fewer, and at this number the cache is emptied
T = TypeVar("T")
Tensors = tuple[Tensor | None, ...]
# Returns the tensors' addresses (int64 each, 0 for None) and a key of their layouts: keys are equal if and only if
# shapes, strides, dtypes and devices are.
Look = Callable[[Tensors], tuple[bytes, Hashable]]
log = logging.getLogger("cocodiff.kernels")


@cache
def numbers_of(count: int) -> struct.Struct:
    """Return a struct format of `count` integers of 8 bytes, in which numbers are passed to C."""
    return struct.Struct(f"{count}q")


class Layouts(Generic[T]):
    """A cache of results that depend only on the layouts of tensors: shapes, strides, dtypes and devices."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._kept: dict[Hashable, T] = {}

    def of(self, words: Hashable, tensors: Tensors, make: Callable[..., T], *arguments: Any) -> tuple[T, bytes]:
        """Return (a function's result, perhaps from the cache; the addresses of the tensors).

        `words` and `tensors` together have to determine the result. Of a tensor, `make` may use shape, strides, dtype
        and device only. Exceptions are not cached.

        Args:
            words: everything besides tensors that the result depends on.
            tensors: the tensors.
            make: the function, called if the cache has no result for equal words and layouts.
            arguments: its arguments.
        """
        addresses, layouts = self._look(tensors)
        key = words, layouts
        found = self._kept.get(key)
        if found is None:
            found = make(*arguments)
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found, addresses


def look(tensors: Tensors) -> tuple[bytes, Hashable]:
    """Return (the tensors' addresses, a key of their layouts), computed in Python; see `Look`."""
    addresses = numbers_of(len(tensors)).pack(*[0 if x is None else x.data_ptr() for x in tensors])
    return addresses, tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


class TensorFunctions(ctypes.Structure):
    """The C functions by which a library's tensors can be read, in the form that DLPack defines and torch 2.13 has
    (DLPackExchangeAPI)."""

    _fields_ = [
        *((name, c_uint32) for name in ("major", "minor")),
        *((name, c_void_p) for name in ("older", "allocate", "managed_tensor_of", "object_of", "tensor_of", "stream")),
    ]


def look_of(library: Path) -> Look:
    """Return the fastest function `Look` there is: in C (tensors.hpp), or in Python if torch has no table of C
    functions or one of another version.

    Args:
        library: path of the C library.
    """
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return look
    pointer_of = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = TensorFunctions.from_address(pointer_of(capsule, b"dlpack_exchange_api"))
    if table.major != 1 or not table.tensor_of:
        return look
    python = ctypes.pythonapi
    functions = python.PyTuple_Size, python.PyTuple_GetItem, python.PyBytes_FromStringAndSize
    addresses = [ctypes.cast(function, c_void_p).value for function in functions]
    reads = numbers_of(5).pack(*addresses, id(None), table.tensor_of)
    # Unlike the library's other functions it is called with the interpreter's lock held: it reads Python's objects.
    in_c = ctypes.PyDLL(str(library)).cocodiff_look
    in_c.restype, in_c.argtypes = py_object, (c_char_p, py_object)

    def quick_look(tensors: Tensors) -> tuple[bytes, Hashable]:
        """Return what `look` does, by the C library."""
        try:
            found = in_c(reads, tensors)
        except Exception:  # DLPack cannot describe it (a meta tensor): the checks will raise a clear error
            return look(tensors)
        return found[: 8 * len(tensors)], found[8 * len(tensors) :]

    return quick_look


class Library:
    """A device with its queue and its compiled kernels, which `launch` starts."""

    def __init__(self, queue: int | None, lanes: int | None = None, copy_tables: bool = False) -> None:
        """Open a device and its kernels. Raise Unavailable if SYCL kernels cannot be built or loaded.

        Args:
            queue: the address of a sycl::queue of the device; None for a queue of its own on the CPU device.
            lanes: number of work-items that share a row; by default the device's. Other numbers let tests run a GPU's
                kernels on a CPU.
            copy_tables: True to treat the device as one that cannot read the host's memory, for the same tests.
        """
        if queue == 0:
            raise ValueError("queue is 0, a null pointer: give the address of a sycl::queue")
        runtime, self.folder = runtime_and_folder()
        if queue is None and lanes in (None, CPU_LANES):
            os.environ.setdefault(VECTORIZER, "1")
        threads, host = _prepare(runtime, self.folder), host_library(runtime, self.folder)
        self._c, self.look = _bind(host, runtime), look_of(host)
        self._device = c_void_p(self._c.cocodiff_open(queue, threads))
        if not self._device:
            raise Unavailable(f"no SYCL device: {self._error()}; {_device_remedy()}")
        self.device_name, driver, self.backend, kind, units = self.describe()
        self.is_cpu, self.compute_units = kind == "cpu", int(units)
        self.lanes = lanes or (CPU_LANES if self.is_cpu else GPU_LANES)
        self.packed = 1 if self.lanes == 1 else GROUPS_OF_ROWS  # groups of lanes in a work-group
        self.kept = True  # False: libsycl keeps no compiled kernels, so every start compiles them
        self._bundle = self._build(runtime, f"{self.device_name} {driver} {self.lanes}")
        self._kernels: dict[str, int] = {}
        # torch's CPU operations are done when they return; on a GPU the queue keeps the order.
        self._flags = (WAIT if self.is_cpu else 0) | (COPY_TABLE if copy_tables else 0)

    def describe(self) -> list[str]:
        """Return [the device's name, its driver, its backend, "cpu" or "gpu", its number of compute units], all as
        text."""
        text = ctypes.create_string_buffer(1024)
        if self._c.cocodiff_describe(self._device, text, len(text)):
            raise Unavailable(f"the SYCL device does not describe itself: {self._error()}")
        return text.value.decode(errors="replace").split("; ")

    def _build(self, runtime: Runtime, about: str) -> c_void_p:
        """Return the C library's pointer to the kernels, from libsycl's cache, or compiled now while other processes
        wait.

        If libsycl kept nothing last time, no process waits: each would only compile them after the one before.

        Args:
            runtime: the SYCL runtime.
            about: device, driver and lanes, which the kernels differ by.
        """
        marker = self.folder / f"built-{''.join(c if c.isalnum() else '_' for c in about)}"
        if read_marker(marker) is None:
            with lock(self.folder):
                if read_marker(marker) is None:
                    log.info("SYCL kernels for %s are compiled: half a minute or more", self.device_name)
                    return self._build_kept(runtime, marker)
        return self._build_kept(runtime, marker)

    def _build_kept(self, runtime: Runtime, marker: Path) -> c_void_p:
        """Return the C library's pointer to the kernels, and write down whether libsycl keeps them for later processes.

        Args:
            runtime: the SYCL runtime.
            marker: path of the file that is written.
        """
        before, began = kept_binaries(), time.monotonic()
        bundle = self._compile(runtime)
        took_s = time.monotonic() - began
        if kept_binaries() != before:  # the compiled source was kept; the device's code may be kept at a second build
            bundle = self._compile(runtime)
        filled, names = read_marker(marker), kept_binaries()
        self.kept = names != before or took_s < QUICK_S
        if filled is None or (self.kept and names and not filled):
            write_marker(marker, names if self.kept else ())
        if not self.kept:
            told = self.device_name, took_s, keep_remedy()
            log.warning("SYCL kernels on %s took %.0f s, as at every start: libsycl keeps none: %s", *told)
        return bundle

    def _compile(self, runtime: Runtime) -> c_void_p:
        """Compile the kernels, or take them from libsycl's cache. Return the C library's pointer to them. Raise
        Unavailable if that fails."""
        source = kernel_source(self.lanes, not self.is_cpu).encode()
        bundle = c_void_p(self._c.cocodiff_build(self._device, source, kernel_option(runtime)))
        if not bundle:
            raise Unavailable(f"SYCL kernels do not compile on {self.device_name}: {_first_error(self._c)}")
        return bundle

    def launch_of(self, kernel: str, groups: int, group_size: int, addresses: int, numbers: Sequence[int]) -> bytes:
        """Return the part of a kernel's launches that stays the same, for `launch` (struct Launch of host.cpp).

        Args:
            kernel: name of the kernel.
            groups: number of work-groups.
            group_size: work-items of a work-group.
            addresses: number of addresses that the kernel's struct begins with.
            numbers: the other members of the struct, 8 bytes each.
        """
        about = groups * group_size, group_size, self._flags, addresses, len(numbers)
        return numbers_of(7 + len(numbers)).pack(self._device.value, self._kernel(kernel), *about, *numbers)

    def launch(self, launch: bytes, addresses: bytes, queue: int | None = None) -> None:
        """Start a kernel, and on a CPU wait for it.

        Args:
            launch: a result of `launch_of`.
            addresses: the addresses that the kernel's struct begins with.
            queue: the queue to use now, as in `__init__`.
        """
        if self._c.cocodiff_launch(launch, queue, addresses):
            raise RuntimeError(f"a SYCL kernel failed on {self.device_name}: {self._error()}")

    def moves_of(self, pieces: Sequence[bytes], itemsize: int, look: bool) -> bytes:
        """Return the part of launches that move pieces which stays the same, for `move` (struct MoveLaunch of
        host.cpp).

        A group of lanes moves at most CHUNK_BYTES; on a CPU less, if there are cores to share the work.

        Args:
            pieces: a struct Piece of moves.hpp each.
            itemsize: bytes of an element.
            look: True to check row indices where this process can read them.
        """
        units = self.compute_units if self.is_cpu else 0
        kernels = [self._kernel(f"move_rows_{unit}") for unit in (16, 4, 2)]
        values = itemsize, look and self.is_cpu, self.lanes, CHUNK_BYTES[self.is_cpu], units, self.packed, len(pieces)
        return numbers_of(12).pack(self._device.value, *kernels, self._flags, *values) + b"".join(pieces)

    def move(self, op: str, launch: bytes, addresses: bytes, queue: int | None = None) -> None:
        """Move pieces in one launch. Raise ValueError if a row index is out of range.

        Args:
            op: the operation that errors name.
            launch: a result of `moves_of`.
            addresses: the addresses of the tensors that the pieces name.
            queue: as in `launch`.
        """
        code = self._c.cocodiff_move(launch, queue, addresses)
        if code == 2:
            raise ValueError(f"{op}: {self._error()}")
        if code:
            raise RuntimeError(f"the SYCL kernel of {op} failed on {self.device_name}: {self._error()}")

    def _kernel(self, name: str) -> int:
        """Return the C library's address of a kernel by its name. It is looked up once."""
        if name not in self._kernels:
            found: int | None = self._c.cocodiff_kernel(self._bundle, name.encode())
            if not found:
                raise RuntimeError(f"the SYCL library has no kernel {name}: {self._error()}")
            self._kernels[name] = found
        return self._kernels[name]

    def _error(self) -> str:
        """Return the C library's last error message."""
        return _error_of(self._c)


def _device_remedy() -> str:
    """Return the advice to print if there is no SYCL device."""
    remedy, selector = "a CPU needs intel-opencl-rt, as in cocodiff[sycl]", os.environ.get("ONEAPI_DEVICE_SELECTOR")
    # Aurora's module sets a selector of GPUs only.
    return remedy + (f", and a place in ONEAPI_DEVICE_SELECTOR={selector}: add ;opencl:cpu" if selector else "")


def _error_of(c: ctypes.CDLL) -> str:
    """Return the C library's last error message in one line."""
    return " ".join(c.cocodiff_error().decode(errors="replace").split())


def _first_error(c: ctypes.CDLL) -> str:
    """Return the first error of the compiler's output that the C library has, at most 300 characters."""
    text = _error_of(c)
    return "error:" + text.partition("error:")[2][:300] if "error:" in text else text[:300]


def _prepare(runtime: Runtime, folder: Path) -> int:
    """Set the environment variables that libsycl and the CPU device read when they are loaded; the user's settings
    stay.

    Return the number of threads for the CPU device: torch's number unless the user has set another.

    Args:
        runtime: the SYCL runtime.
        folder: the cache folder.
    """
    import torch

    set_cache(folder)
    os.environ.setdefault(CPU_THREADS, str(torch.get_num_threads()))
    if runtime.opencl_cpu is not None:
        os.environ.setdefault("OCL_ICD_FILENAMES", str(runtime.opencl_cpu))
    said = os.environ[CPU_THREADS]
    return int(said) if said.isdecimal() and int(said) else torch.get_num_threads()


def _bind(path: Path, runtime: Runtime) -> ctypes.CDLL:
    """Load the C library and declare its functions. Raise Unavailable if it does not load."""
    try:
        if loaded_major() is None:
            # This environment's libsycl: the library may have been built in another one, which was removed.
            ctypes.CDLL(str(runtime.library))
        c = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the SYCL host library does not load: {error}") from error
    for name, result, arguments in (
        ("error", c_char_p, ()),
        ("open", c_void_p, (c_void_p, c_int)),
        ("describe", c_int, (c_void_p, c_char_p, c_size_t)),
        ("build", c_void_p, (c_void_p, c_char_p, c_char_p)),
        ("kernel", c_void_p, (c_void_p, c_char_p)),
        ("launch", c_int, (c_char_p, c_void_p, c_char_p)),
        ("move", c_int, (c_char_p, c_void_p, c_char_p)),
    ):
        function = getattr(c, f"cocodiff_{name}")
        function.restype, function.argtypes = result, arguments
    return c
