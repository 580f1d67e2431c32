"""Binaries of the kernels for a GPU that need not be here: made by ocloc, for ranks on that GPU to take.

They are one file in the cache: a line that names the compiler, then for each binary its size in 8 bytes and its bytes.
"""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

from cocodiff_sycl.build import host_library, kernel_source, lock, native_file, runtime_and_folder
from cocodiff_sycl.find import Unavailable
from cocodiff_sycl.ocloc import Ocloc, Usage
from cocodiff_sycl.spirv import spirv_of

DEVICES = ("pvc",)  # that ocloc knows and `Library.describe` names


def compile_native(source: str, device: str, ocloc: Ocloc) -> tuple[list[bytes], list[Usage]]:
    """Binaries of SYCL source for a device, and what each kernel takes of it. Raises Unavailable."""
    binaries: list[bytes] = []
    usage: list[Usage] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
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
    with lock(folder):
        if path.exists() and path.read_bytes().startswith(compiler.encode() + b"\n"):
            return path, False
        binaries, usage = compile_native(kernel_source(lanes, gpu=True), device, ocloc)
        spilling = [one.name for one in usage if one.spill]
        if spilling:
            raise Unavailable(f"{', '.join(spilling)} would spill registers on {device} ({compiler})")
        fresh = path.with_suffix(f".{os.getpid()}")
        framed = [struct.pack("=q", len(one)) + one for one in binaries]
        fresh.write_bytes(b"".join([compiler.encode() + b"\n", *framed]))
        fresh.replace(path)
    return path, True
