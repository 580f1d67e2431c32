"""Makes the tests' helper modules importable from every folder of tests, and holds what many tests need."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run side by side, each worker keeps to a core of its own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="module")
def one_thread_a_rank():
    """For ranks that are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def promptly() -> Iterator[None]:
    """For what must not wait for ever: a test that does fails after twenty seconds."""

    def give_up(*_: object) -> None:
        pytest.fail("still waiting after twenty seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 20, 1)  # and again, should it wait in a second place
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
