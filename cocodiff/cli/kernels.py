"""`cocodiff kernels build`: compile the SYCL kernels before their first use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.config.errors import check_choice
from cocodiff.jobs.options import LOG_LEVEL, parse, with_settings
from cocodiff.jobs.terminal import quiet_libraries, say

ABOUT = "Compiles the SYCL kernels for this machine."


def start(words: Sequence[str], launch: Launch) -> int:
    """Run `cocodiff kernels build` with its options, and return its exit code.

    Args:
        words: the action and its options.
        launch: how this process was started.
    """
    if not words or words[0] in ("-h", "--help"):
        say(f"usage: cocodiff kernels build [--help] [options]\n\n{ABOUT}")
        return 0
    check_choice("action", words[0], ("build",))
    values = parse("kernels build", ABOUT, with_settings((LOG_LEVEL,), lambda one: one.name == "device"), words[1:])
    quiet_libraries(values["log_level"])
    started = time.perf_counter()
    from cocodiff.kernels import sycl_ops
    from cocodiff.kernels.device import rank_device

    device = rank_device(values["device"], launch.local_rank)
    ops: Any = sycl_ops(device, required=True)
    if launch.speaks:
        say(f"{ops.library.device_name} ({ops.library.backend}): ready after {time.perf_counter() - started:.1f} s")
        say(f"cache: {ops.library.folder}")
    return 0
