"""`cocodiff kernels build`: compiles the SYCL kernels ahead of their first use, and says what they will run on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cocodiff.comm.launch import Launch
from cocodiff.commands.options import LOG_LEVEL, Option, parse, with_settings
from cocodiff.commands.terminal import quiet_libraries, say
from cocodiff.errors import UserError, check_choice

ABOUT = "Compiles the SYCL kernels for this machine."
ACTIONS = {"build": "compile the SYCL kernels for this machine"}
OPTIONS = (
    Option("ahead_of_time", "compile by icpx for this GPU, which need not be here: intel_gpu_pvc", None),
    LOG_LEVEL,
)


def start(words: Sequence[str], launch: Launch) -> int:
    if not words or words[0] in ("-h", "--help"):
        actions = [f"  {name:<8} {what}" for name, what in ACTIONS.items()]
        say("\n".join(["usage: cocodiff kernels ACTION [--help] [options]", "", *actions]))
        return 0
    check_choice("action", words[0], ACTIONS)
    values = parse("kernels build", ABOUT, with_settings(OPTIONS, lambda one: one.name == "device"), words[1:])
    quiet_libraries(values["log_level"])
    from cocodiff.device import rank_device
    from cocodiff.kernels import compile_ahead, sycl_ops

    if values["ahead_of_time"] is not None:
        if launch.speaks:
            say(f"kernels for {values['ahead_of_time']}: {compile_ahead(values['ahead_of_time'])}")
        return 0
    device = rank_device(values["device"], launch.local_rank)
    started = time.perf_counter()
    ops = sycl_ops(device, required=True)
    if ops is None:
        raise UserError(f"no SYCL kernels on {device}")
    if launch.speaks:
        say(f"{ops.library.device_name} ({ops.library.backend}): ready after {time.perf_counter() - started:.1f} s")
        say(f"cache: {ops.library.folder}")
    return 0
