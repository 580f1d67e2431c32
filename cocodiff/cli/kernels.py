"""`cocodiff kernels build`: compiles the SYCL kernels ahead of their first use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.config.errors import UserError, check_choice
from cocodiff.jobs.options import LOG_LEVEL, Option, parse, with_settings
from cocodiff.jobs.terminal import quiet_libraries, say

ABOUT = "Compiles the SYCL kernels for this machine, or with --device pvc for GPU Max on any machine."
GPU = "pvc"  # what ocloc calls GPU Max
OPTIONS = (
    Option("ahead_of_time", "the same as --device pvc, by the name that icpx has for it: intel_gpu_pvc", None),
    Option("ocloc", "folder that launch/ocloc filled; by default $COCODIFF_OCLOC, else the system's ocloc", None),
    LOG_LEVEL,
)


def start(words: Sequence[str], launch: Launch) -> int:
    if not words or words[0] in ("-h", "--help"):
        say(f"usage: cocodiff kernels build [--help] [options]\n\n{ABOUT}")
        return 0
    check_choice("action", words[0], ("build",))
    options = with_settings(OPTIONS, lambda one: one.name == "device")
    devices = [replace(one, choices=(*one.words, GPU)) if one.name == "device" else one for one in options]
    values = parse("kernels build", ABOUT, devices, words[1:])
    quiet_libraries(values["log_level"])
    started = time.perf_counter()
    gpu = values["ahead_of_time"] or (GPU if values["device"] == GPU else None)
    if gpu is not None:
        if launch.speaks:
            path, fresh = _build_native(gpu, values["ocloc"])
            done = f"made in {time.perf_counter() - started:.1f} s" if fresh else "there already"
            say(f"binaries for {gpu}: {path}, {done}; ranks on such a tile take them from there")
        return 0
    from cocodiff.kernels import sycl_ops
    from cocodiff.kernels.device import rank_device

    device = rank_device(values["device"], launch.local_rank)
    ops: Any = sycl_ops(device, required=True)
    if launch.speaks:
        say(f"{ops.library.device_name} ({ops.library.backend}): ready after {time.perf_counter() - started:.1f} s")
        say(f"cache: {ops.library.folder}")
    return 0


def _build_native(gpu: str, ocloc: str | None) -> tuple[str, bool]:
    """The file of binaries that Intel's offline compiler made for a GPU, and whether it was made now. Raises UserError
    where that is not possible here."""
    from cocodiff_sycl.find import Unavailable
    from cocodiff_sycl.library import GPU_LANES
    from cocodiff_sycl.native import build_native, find_ocloc

    try:
        path, fresh = build_native(gpu.removeprefix("intel_gpu_"), GPU_LANES, find_ocloc(ocloc))
    except Unavailable as error:
        raise UserError(f"no binaries for {gpu}: {error}") from error
    return str(path), fresh
