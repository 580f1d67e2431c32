"""Makes the tests' helper modules importable from every folder of tests, and holds what many tests need."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def one_thread_a_rank():
    """For ranks that are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
