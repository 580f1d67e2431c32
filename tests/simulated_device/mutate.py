"""Leaves out each wait and each note of use that is made where tensors pass between streams, one at a time, and tells
whether the simulated device notices. By hand, from the root of the repository, in an hour or so:

    PYTHONPATH=tests .venv/bin/python -m simulated_device.mutate [part of a place ...]

A place is the line that gives a job to a lane, or that waits for a job or for messages. What no case notices is needed
by none of them: another order covers it there, or nothing frees the memory early.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from test_simulated_models import CASES, at_case, outputs_of

import simulated_device
from cocodiff.comm.torch_dist import _Works
from cocodiff.kernels.device import HandedOver, used_on_current_stream
from simulated_device.ranks import run_ranks

PASSED_OVER = ("simulated_device/", "cocodiff/kernels/device.py", "cocodiff/comm/")


class Change(NamedTuple):
    """what: "order" or "use"; of: "arguments", "result" or "messages"."""

    place: str
    of: str
    what: str


class Mutation:
    """Left out: nothing, or one change. seen: all that could be left out so far."""

    def __init__(self) -> None:
        self.left_out: Change | None = None
        self.seen: set[Change] = set()

    def makes(self, place: str, of: str, what: str) -> bool:
        change = Change(place, of, what)
        self.seen.add(change)
        return change != self.left_out


def place_of_caller() -> str:
    """The line of the product that this thread is at, outside of lanes and transports."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in PASSED_OVER):
        frame = frame.f_back
    if frame is None or "cocodiff/" not in frame.f_code.co_filename:
        return "cocodiff/comm: set-up"
    return f"cocodiff/{frame.f_code.co_filename.rpartition('cocodiff/')[2]}:{frame.f_lineno}"


def mutate(patch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    plain_init, plain_wait = HandedOver.__init__, _Works.wait

    def init(self: Any, value: Any, device: torch.device) -> None:
        plain_init(self, value, device)
        of_job = sys._getframe(1).f_code.co_name == "submit"
        self.given_at = place_of_caller() if of_job else None

    def take(self: Any) -> Any:
        if self._made is not None:
            at = (self.given_at, "arguments") if self.given_at else (place_of_caller(), "result")
            if mutation.makes(*at, "order"):
                self._made.wait()
            if mutation.makes(*at, "use"):
                used_on_current_stream(self._value)
        return self._value

    def wait(self: Any) -> None:
        at = place_of_caller(), "messages"
        if not mutation.makes(*at, "order"):
            self._works = []
        if not mutation.makes(*at, "use"):
            self._on_device = ()
        plain_wait(self)

    patch.setattr(HandedOver, "__init__", init)
    patch.setattr(HandedOver, "take", take)
    patch.setattr(_Works, "wait", wait)


def noticed(case: tuple[Any, ...]) -> bool:
    with at_case(case) as (size, settings, family, calls):
        try:
            with simulated_device.devices(size, strict=True) as found:
                run_ranks(size, lambda transport: outputs_of(transport, settings, family, calls))
        except Exception:  # of an index, say, out of memory that is used again
            return True
    return bool(found.reports)


def main(parts: list[str]) -> None:
    torch.set_num_threads(1)
    mutation, cases_of = Mutation(), defaultdict[Change, list[Any]](list)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, mutation)
        for case in CASES:
            mutation.seen.clear()
            assert not noticed(case), case
            for change in mutation.seen:
                cases_of[change].append(case)
        for change in sorted(cases_of):
            if parts and not any(part in change.place for part in parts):
                continue
            mutation.left_out = change
            by = next((case for case in cases_of[change] if noticed(case)), None)
            told = "not noticed" if by is None else "noticed: " + " ".join(map(str, by))
            print(f"{change.place} {change.what} of {change.of}: {told} ({len(cases_of[change])} cases)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
