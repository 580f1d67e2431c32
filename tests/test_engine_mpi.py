"""Parallel transformers on real ranks, under mpiexec, over MPI and then over gloo in the same job."""

import pytest
from launching import TESTS, assert_succeeded
from warm_ranks import warm_mpiexec

pytestmark = pytest.mark.processes


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (4, ["local", "auto auto", "2 usp"]),
        (12, ["aurora", "auto auto"]),
        *(pytest.param(n, ["local", "auto auto"], marks=pytest.mark.exhaustive) for n in (2, 5)),
    ],
    ids=["4, also in a mesh", "12", "2", "5"],
)
def test_mpi_and_gloo_equal_one_process(ranks, words):
    done = warm_mpiexec(ranks, TESTS / "exactness_rank.py", *words, timeout_s=400.0)
    assert_succeeded(done)
    assert "all ranks agree" in done.stdout
