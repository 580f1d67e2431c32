"""One contract for all transports: threads of this process, gloo between forked ranks, and MPI's ranks with either
and with MPI's windows; of these through copies in host memory, and with checksums."""

from collections import Counter
from pathlib import Path

import pytest
from contract import SIZE, contract
from launching import assert_succeeded
from warm import forked
from warm_ranks import warm_mpiexec

from cocodiff.comm import loopback
from cocodiff.comm.checked import check_messages
from cocodiff.comm.host import HostTransport
from cocodiff.comm.loopback import LoopbackTransport, run_ranks

PROGRAM = Path(__file__).with_name("contract.py")


@pytest.mark.sample(3)
@pytest.mark.parametrize("node_of", [(), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (3, 2, 1, 0)], ids=str)
def test_loopback_on_one_node_and_on_several(monkeypatch, node_of):
    """Each rank makes as many groups as the others, by which torch.distributed tells those of the same ranks apart."""
    made = Counter[int]()

    class OnNodes(LoopbackTransport):
        def new_group(self, ranks):
            made[self.rank] += 1
            return super().new_group(ranks)

    monkeypatch.setattr(OnNodes, "node_of", node_of)
    monkeypatch.setattr(loopback, "LoopbackTransport", OnNodes)
    assert run_ranks(SIZE, contract, timeout_s=60.0) == [None] * SIZE
    assert len(made) == SIZE and len({*made.values()}) == 1


def test_loopback_through_host_memory_and_with_checksums():
    def work(transport):
        over = HostTransport(transport, transport.device)
        check_messages(over)
        contract(over)

    assert run_ranks(SIZE, work, timeout_s=60.0) == [None] * SIZE


@pytest.mark.parametrize(
    "names",
    [("gloo", "gloo/2=alltoall+sums"), pytest.param(("host", "gloo=alltoall", "gloo/2"), marks=pytest.mark.full)],
)
def test_gloo_between_forked_ranks(tmp_path, names):
    done = forked("forked", *names, folder=tmp_path, module="contract")
    assert_succeeded(done)
    assert "contract holds" in done.stdout


@pytest.mark.full
def test_transports_under_mpiexec():
    done = warm_mpiexec(SIZE, PROGRAM, "launched", "mpi", "mpi-rma", "mpi-rma+sums", "gloo", "host")
    assert_succeeded(done)
    assert done.stdout.count("contract holds") == SIZE


def test_windows_hold_what_is_sent_early_and_what_is_large():
    done = warm_mpiexec(3, PROGRAM.with_name("rma_rank.py"))
    assert_succeeded(done)
    assert done.stdout.count("windows hold") == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", ["mpi", "mpi-rma"])
@pytest.mark.parametrize(("sent", "awaited"), [(20, 12), (12, 3_000_000), (3_000_000, 3_000_001)])
def test_mpi_tells_of_a_message_of_another_length(transport: str, sent: int, awaited: int) -> None:
    """Among three ranks a message of 3 MB goes two-sided over windows too, behind its length. Two-sided MPI alone does
    not know how long a message is that has no room."""
    done = warm_mpiexec(3, PROGRAM.with_name("rma_rank.py"), transport, str(sent), str(awaited))
    assert done.returncode != 0
    came = f"more than {awaited}" if transport == "mpi" and sent > awaited else str(sent)
    said = f"received a message of {came} bytes from rank 1 where it awaited one of {awaited}, in a group of 3 ranks"
    for speaker in ("[rank 0] rank 2 failed:", "[rank 1] rank 2 failed:", "[rank 2]"):
        assert done.stderr.count(f"{speaker} {said}") == 1, done.stderr
