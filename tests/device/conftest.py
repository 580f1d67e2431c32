"""The device of these tests: the accelerator that is there, or the one that COCODIFF_TEST_DEVICE names ("cpu" tries the
tests themselves). Several ranks share it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "comm"))  # the contract of all transports


def device_names() -> list[object]:
    named = os.environ.get("COCODIFF_TEST_DEVICE", "")
    found = torch.accelerator.current_accelerator(check_available=True)
    if named or found is not None:
        return [named or found.type]
    return [pytest.param("", marks=pytest.mark.skip("there is no accelerator here"), id="no accelerator")]


@pytest.fixture(scope="module", params=device_names())
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The first device of its kind, which computes in float32 as it says."""
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield torch.device(request.param) if request.param == "cpu" else torch.device(request.param, 0)
    torch.backends.cudnn.allow_tf32 = tf32
