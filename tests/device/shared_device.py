"""Ranks that share one device: threads of this process, whose messages pass through host memory."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from exactness import STEPS, Case, denoise
from late import Late

from cocodiff.comm.host import HostTransport
from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize

T = TypeVar("T")
Settings = dict[str, Any]
SIMULATED = "sim"
BUSY = {SIMULATED: 64}  # rows of the matrices that keep a stream busy; a simulated device computes on one core


def device_name() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    return os.environ.get("COCODIFF_TEST_DEVICE", "") or (SIMULATED if found is None else found.type)


DEVICE = device_name()


def chosen(values: Iterable[Any], *some: Any) -> list[Any]:
    """Parameters of a test: on a simulated device some are enough, for other tests run all settings there."""
    left_out = pytest.mark.exhaustive if DEVICE == SIMULATED else ()
    return [pytest.param(value, marks=() if value in some else left_out) for value in values]


def pause_on(device: torch.device, delays: random.Random) -> None:
    """Messages leave and arrive late, by a random time, and the stream of whoever waits is kept busy meanwhile."""
    time.sleep(delays.choice((0.0, 0.0, 0.002)))
    if device.type != "cpu" and delays.random() < 0.3:
        rows = BUSY.get(device.type, 1024)
        x = torch.ones(rows, rows, device=device)
        for _ in range(10):
            x = x @ x * 1e-3


def on_device(size: int, device: torch.device, work: Callable[[HostTransport], T], late: bool = False) -> list[T]:
    """`work` of every rank, all on one device."""

    pause = partial(pause_on, device, random.Random(0))

    def with_copies(carrier: Any) -> T:
        transport = HostTransport(Late(carrier, pause) if late else carrier, device)
        try:
            return work(transport)
        finally:
            transport.close()

    return run_ranks(size, with_copies, timeout_s=120.0)


def denoised(transport: Any, model: Any, case: Case, settings: Settings) -> torch.Tensor:
    """What a short loop of model calls on one rank ends with, on the CPU."""
    own, device = copy.deepcopy(model).to(transport.device), transport.device
    with torch.no_grad(), parallelize(own, transport=transport, steps=STEPS, **settings):
        return denoise(own, placed(case, device)).float().cpu()


def placed(case: Case, device: torch.device) -> Settings:
    """A call's arguments on a device."""
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in case.inputs().items()}
