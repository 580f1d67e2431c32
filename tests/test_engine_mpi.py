"""Parallel transformers on real ranks, under mpiexec, over MPI and then over gloo in the same job."""

import pytest
from launching import TESTS, assert_succeeded, mpiexec

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("ranks", "machine"), [(2, "local"), (4, "local"), (5, "local"), (12, "aurora")])
def test_mpi_and_gloo_equal_one_process(ranks, machine):
    done = mpiexec(ranks, TESTS / "exactness_rank.py", machine, timeout_s=400.0)
    assert_succeeded(done)
    assert "all ranks agree" in done.stdout
