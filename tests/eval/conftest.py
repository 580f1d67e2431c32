"""Fixtures of the restoration tests."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.data.volume import Stack
from eval_helpers import phantom


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    """Three slices of 40 x 52, uint16."""
    volume = np.stack([phantom(40, 52) * (0.8 + 0.1 * n) for n in range(3)])
    path = tmp_path / "scan.tif"
    tifffile.imwrite(path, (volume * 60000).astype(np.uint16), photometric="minisblack")
    return open_stack(str(path))
