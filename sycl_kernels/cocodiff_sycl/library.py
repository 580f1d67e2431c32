"""The C library in Python: a device with its kernels, and launches. Errors of SYCL become RuntimeError."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from cocodiff_sycl.build import host_library, kernel_options, kernel_source, lock, runtime_and_folder
from cocodiff_sycl.find import Runtime, Unavailable

CPU_LANES, GPU_LANES = 1, 16
WAIT, COPY_TABLE = 1, 2


class Library:
    """One device: its queue, its compiled kernels, and `launch`."""

    def __init__(self, queue: int | None, lanes: int | None = None, copy_tables: bool = False) -> None:
        """queue: the address of a sycl::queue of the device; None is a queue of its own on the CPU device.

        lanes: work-items of a row, by default what suits the device. copy_tables: treat the device as one that cannot
        read the host's memory. Both let tests run on a CPU what GPUs run.
        Raises Unavailable where SYCL kernels cannot be built or loaded.
        """
        if queue == 0:
            raise ValueError("queue is 0, a null pointer: give the address of a sycl::queue")
        runtime, folder = runtime_and_folder()
        self.folder = folder
        _prepare(runtime, folder)
        self._c = _bind(host_library(runtime, folder))
        self._device = c_void_p(self._c.cocodiff_open(queue))
        if not self._device:
            raise Unavailable(f"no SYCL device: {self._error()}; a CPU needs intel-opencl-rt, as in cocodiff[sycl]")
        self.device_name, driver, self.backend, kind, units, _ = self.describe()
        self.is_cpu, self.compute_units = kind == "cpu", int(units)
        self.lanes = lanes or (CPU_LANES if self.is_cpu else GPU_LANES)
        self._module = self._build(runtime, f"{self.device_name} {driver} {self.lanes}")
        self._kernels: dict[str, c_void_p] = {}
        # torch's CPU operations are done when they return; on a GPU the queue keeps the order.
        self._flags = (WAIT if self.is_cpu else 0) | (COPY_TABLE if copy_tables else 0)

    def describe(self) -> list[str]:
        """Name, driver, backend, "cpu" or "gpu", compute units, "1" where kernels read the host's memory."""
        text = ctypes.create_string_buffer(1024)
        if self._c.cocodiff_describe(self._device, text, len(text)):
            raise Unavailable(f"the SYCL device does not describe itself: {self._error()}")
        return text.value.decode(errors="replace").split("; ")

    def _build(self, runtime: Runtime, about: str) -> c_void_p:
        """Takes the kernels from the cache, or compiles them while other processes wait."""
        marker = self.folder / ("built-" + "".join(c if c.isalnum() else "_" for c in about))
        if marker.exists():
            return self._compile(runtime)
        with lock(self.folder):
            if not marker.exists():
                # libsycl keeps a source's compiled form at the first build and the device's code at the second, so that
                # later processes find both.
                self._compile(runtime)
                self._compile(runtime)
                marker.touch()
        return self._compile(runtime)

    def _compile(self, runtime: Runtime) -> c_void_p:
        source, options = kernel_source(self.lanes).encode(), "\n".join(kernel_options(runtime)).encode()
        module = c_void_p(self._c.cocodiff_build(self._device, source, options))
        if not module:
            raise Unavailable(f"SYCL kernels do not compile on {self.device_name}: {_first_error(self._error())}")
        return module

    def launch(self, kernel: str, groups: int, group_size: int, values: Sequence[int],
               table: bytes | None = None, queue: int | None = None) -> None:  # fmt: skip
        """Starts a kernel, and waits for it on a CPU.

        values: the members of the kernel's struct, 8 bytes each. table: what the kernel reads through the first one,
        which is then set by the launch. queue: as of `__init__`, the one to use now.
        """
        handle = self._kernels.get(kernel) or self._kernel(kernel)
        packed = struct.pack(f"{len(values)}q", *values)
        if self._c.cocodiff_launch(
            self._device, queue, handle, groups * group_size, group_size, packed, len(packed), table,
            0 if table is None else len(table), self._flags,
        ):  # fmt: skip
            raise RuntimeError(f"SYCL kernel {kernel} failed on {self.device_name}: {self._error()}")

    def _kernel(self, name: str) -> c_void_p:
        handle = c_void_p(self._c.cocodiff_kernel(self._module, name.encode()))
        if not handle:
            raise RuntimeError(f"the SYCL library has no kernel {name}: {self._error()}")
        self._kernels[name] = handle
        return handle

    def _error(self) -> str:
        return " ".join(self._c.cocodiff_error().decode(errors="replace").split())


def _first_error(text: str) -> str:
    return "error:" + text.partition("error:")[2][:300] if "error:" in text else text[:300]


def _prepare(runtime: Runtime, folder: Path) -> None:
    """Environment that libsycl and the CPU device read when they are loaded; what the user has set stays."""
    import torch

    os.environ.setdefault("SYCL_CACHE_PERSISTENT", "1")
    os.environ.setdefault("SYCL_CACHE_DIR", str(folder / "kernels"))
    os.environ.setdefault("DPCPP_CPU_NUM_CUS", str(torch.get_num_threads()))
    if runtime.opencl_cpu is not None:
        os.environ.setdefault("OCL_ICD_FILENAMES", str(runtime.opencl_cpu))


def _bind(path: Path) -> ctypes.CDLL:
    try:
        c = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the SYCL host library does not load: {error}") from error
    for name, result, arguments in (
        ("error", c_char_p, ()),
        ("open", c_void_p, (c_void_p,)),
        ("describe", c_int, (c_void_p, c_char_p, c_size_t)),
        ("build", c_void_p, (c_void_p, c_char_p, c_char_p)),
        ("kernel", c_void_p, (c_void_p, c_char_p)),
        ("launch", c_int, (c_void_p,) * 3 + (c_size_t,) * 2 + (c_char_p, c_size_t) * 2 + (c_int,)),
    ):
        function = getattr(c, f"cocodiff_{name}")
        function.restype, function.argtypes = result, arguments
    return c
