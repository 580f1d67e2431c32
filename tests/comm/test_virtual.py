"""The virtual machine: messages are delivered and timed, lanes keep their order, and mistakes name the ranks."""

import contract
import pytest
import torch
from contract import SIZE
from worlds import topology_of

from cocodiff.errors import PeerLost
from cocodiff.planning.simulate import Latencies, simulate
from cocodiff.planning.virtual import VirtualTrace, record
from cocodiff.topology.links import Network

MB = 1_000_000


def meta(megabytes: float) -> torch.Tensor:
    return torch.empty(int(megabytes * MB), dtype=torch.uint8, device="meta")


def run(work, machine="aurora", size=12, latencies=None):
    results, programs, messages = record(size, work)
    return results, simulate(programs, messages, Network(topology_of(machine, size)), latencies)


def test_tensors_with_numbers_are_delivered_as_the_contract_says():
    def work(transport):
        everybody = transport.group(range(SIZE))
        contract.check_all_to_all(everybody)
        contract.check_send_recv_to_some(everybody)
        contract.check_messages_stay_in_order(everybody)
        contract.check_all_gather(everybody)
        contract.check_refusals(everybody)
        contract.check_groups(transport)
        contract.check_objects(transport)
        contract.check_lane_errors(transport)

    _, outcome = run(work, "local", SIZE)
    assert outcome.seconds > 0


def between(sender, receiver, megabytes, computes=()):
    """One message; `computes` has seconds that a rank computes before it posts."""

    def work(transport):
        group = transport.group(range(12))
        transport.recorder.compute(dict(computes).get(transport.rank, 0.0))
        sends = [(meta(megabytes), receiver)] if transport.rank == sender else []
        recvs = [(meta(megabytes), sender)] if transport.rank == receiver else []
        group.send_recv(sends, recvs).wait()

    return work


@pytest.mark.parametrize(("receiver", "rate"), [(1, 185e9), (3, 15e9), (2, 15e9)])
def test_a_message_takes_its_slowest_link(receiver, rate):
    """To the sibling, to the own plane, and to the other plane, over the sibling."""
    assert run(between(0, receiver, 15))[1].end_s[receiver] == pytest.approx(15e6 / rate)


def test_latencies_and_late_ranks():
    slow = Latencies(latency_s=1e-3, message_s=1e-4)
    _, outcome = run(between(0, 3, 15, {3: 5e-3}), latencies=slow)
    assert outcome.end_s[0] == outcome.end_s[3] == pytest.approx(5e-3 + 1.1e-3 + 1e-3)
    assert outcome.end_s[7] == 0.0


def test_messages_of_a_rank_leave_one_by_one():
    def work(transport):
        group = transport.group(range(12))
        others = [peer for peer in range(12) if peer != transport.rank]
        group.send_recv([(meta(0.0), p) for p in others], [(meta(0.0), p) for p in others]).wait()  # nothing
        group.send_recv([(meta(1e-6), p) for p in others], [(meta(1e-6), p) for p in others]).wait()

    assert run(work, latencies=Latencies(0.0, 1e-3))[1].seconds == pytest.approx(11e-3, rel=1e-3)


def test_lanes_run_beside_the_main_thread_and_in_order():
    def work(transport):
        trace = VirtualTrace(transport.recorder)
        lane, other = transport.lane("one"), transport.lane("two")

        def job(name, seconds):
            with trace.span(name, "one", "layer"):
                transport.recorder.compute(seconds)
            return name

        pending = [lane.submit(lambda: job("first", 2.0)), lane.submit_inline(lambda: job("second", 1.0))]
        aside = other.submit(lambda: pending[0].wait() + job(" and more", 0.5))
        transport.recorder.compute(2.5)
        assert (aside.wait(), pending[1].wait()) == ("first and more", "second")
        transport.recorder.compute(0.25, launches=3)

    _, outcome = run(work, "local", 1, Latencies(launch_s=0.1))
    assert outcome.seconds == pytest.approx(3.55)
    spans = {span.name: (span.start_ns, span.end_ns) for span in outcome.spans[0]}
    assert spans == {"first": (0, 2e9), "second": (2e9, 3e9), " and more": (2e9, 2.5e9)}


def test_mistakes_name_the_ranks():
    def disagree(transport):
        group, size = transport.group(range(2)), 3 + transport.rank
        group.all_gather(meta(size), [meta(size), meta(size)]).wait()

    with pytest.raises(ValueError, match=r"ranks 1 and 0 disagree on a message: [34]000000"):
        record(2, disagree)

    def forget(transport):
        group = transport.group(range(2))
        group.send_recv([], [(torch.empty(3), 1)] if transport.rank == 0 else []).wait()

    with pytest.raises(PeerLost, match="wait for data that nobody sends"):
        record(2, forget)

    def fail(transport):
        if transport.rank == 1:
            raise RuntimeError("out of order")
        transport.group(range(3)).barrier()

    with pytest.raises(RuntimeError, match="out of order") as caught:
        record(3, fail)
    assert caught.value.__notes__ == ["in virtual rank 1 of 3"]


def test_messages_that_never_come_are_an_error():
    def forget(transport):
        group = transport.group(range(2))
        group.send_recv([], [(meta(1), 1)] if transport.rank == 0 else []).wait()

    _, programs, messages = record(2, forget)
    with pytest.raises(RuntimeError, match=r"ranks \[0\] wait for messages or jobs that never come"):
        simulate(programs, messages, Network(topology_of("local", 2)))
