"""The device of these tests, which several ranks share: the accelerator that is there, or the one that
COCODIFF_TEST_DEVICE names ("cpu" tries the tests themselves), else a simulated one, which finds what has no order."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "comm"))  # the contract of all transports
from shared_device import DEVICE, SIMULATED


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The first device of its kind, which computes in float32 as it says."""
    if request.param == SIMULATED:
        with request.getfixturevalue("simulated").devices(1, strict=True) as found:
            yield found[0]
        assert found.reports == []
        return
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield torch.device(request.param) if request.param == "cpu" else torch.device(request.param, 0)
    torch.backends.cudnn.allow_tf32 = tf32
