"""`cocodiff kernels`: compiles the SYCL kernels ahead of their first use, and reports what they cost on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.console.options import LOG_LEVEL, Option, parse, with_settings
from cocodiff.console.terminal import quiet_libraries, say
from cocodiff.errors import UserError, check_choice

ABOUT = "Compiles the SYCL kernels for this machine, or with --device pvc for GPU Max on any machine."
ABOUT_REPORT = (
    "What the SYCL kernels cost on a tile of GPU Max, counted in what Intel's offline compiler makes of them."
)
ACTIONS = {
    "build": "compile the SYCL kernels for this machine, or for a GPU that need not be here",
    "report": "what they cost on a tile of GPU Max: registers, messages, instructions, time",
}
GPU = "pvc"  # what ocloc calls GPU Max
OCLOC = Option("ocloc", "folder that launch/ocloc filled; by default $COCODIFF_OCLOC, else the system's ocloc", None)
OPTIONS = (
    Option("ahead_of_time", "the same as --device pvc, by the name that icpx has for it: intel_gpu_pvc", None),
    OCLOC,
    LOG_LEVEL,
)
REPORT_OPTIONS = (OCLOC, Option("out", "file for the table as Markdown, beside the terminal", None), LOG_LEVEL)


def start(words: Sequence[str], launch: Launch) -> int:
    if not words or words[0] in ("-h", "--help"):
        actions = [f"  {name:<8} {what}" for name, what in ACTIONS.items()]
        say("\n".join(["usage: cocodiff kernels ACTION [--help] [options]", "", *actions]))
        return 0
    check_choice("action", words[0], ACTIONS)
    if words[0] == "report":
        return _report(parse("kernels report", ABOUT_REPORT, REPORT_OPTIONS, words[1:]), launch)
    options = with_settings(OPTIONS, lambda one: one.name == "device")
    devices = [replace(one, choices=(*one.words, GPU)) if one.name == "device" else one for one in options]
    values = parse("kernels build", ABOUT, devices, words[1:])
    quiet_libraries(values["log_level"])
    from cocodiff.device import rank_device
    from cocodiff.kernels import sycl_ops

    if values["ahead_of_time"] is not None:
        return _build_native(values["ahead_of_time"], values["ocloc"], launch)
    if values["device"] == GPU:
        return _build_native(GPU, values["ocloc"], launch)
    device = rank_device(values["device"], launch.local_rank)
    started = time.perf_counter()
    ops = sycl_ops(device, required=True)
    if ops is None:
        raise UserError(f"no SYCL kernels on {device}")
    if launch.speaks:
        say(f"{ops.library.device_name} ({ops.library.backend}): ready after {time.perf_counter() - started:.1f} s")
        say(f"cache: {ops.library.folder}")
    return 0


def _build_native(gpu: str, ocloc: str | None, launch: Launch) -> int:
    from cocodiff.kernels.offline import compile_native_for

    if launch.speaks:
        started = time.perf_counter()
        path, fresh = compile_native_for(gpu, ocloc)
        done = f"made in {time.perf_counter() - started:.1f} s" if fresh else "there already"
        say(f"binaries for {gpu}: {path}, {done}; ranks on such a tile take them from there")
    return 0


def _report(values: dict[str, Any], launch: Launch) -> int:
    quiet_libraries(values["log_level"])
    from cocodiff.kernels.offline import report_on

    if launch.speaks:
        lines = report_on(GPU, values["ocloc"])
        say("\n".join(lines))
        if values["out"] is not None:
            Path(values["out"]).write_text("\n".join(lines) + "\n")
    return 0
