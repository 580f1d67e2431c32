"""Engines on parts of a run: each computes what one process computes, of inputs of its own, and knows of all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from exactness import Case, Expected, check_ranks, parallel_outputs
from test_engine_v_major import denoise
from worlds import topology_of

from cocodiff.comm.loopback import LoopbackTransport, run_ranks
from cocodiff.comm.transport import Part, Transport
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.engine.engine import parallelize
from cocodiff.topology.axes import Axes

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

CASES = (Case(12, 3, 5, 5), Case(12, 5, 7, 3, batch=2, family="qwen"))


@pytest.mark.parametrize(("machine", "size"), [("local", 4), ("aurora", 12)])
def test_two_replicas_with_models_and_inputs_of_their_own_equal_one_process(machine, size):
    """On an Aurora node each has a plane: an exchange there sends nothing to siblings."""
    axes = Axes.build(topology_of(machine, size), replica=2)
    expected = [Expected.of(case) for case in CASES]

    def work(transport: LoopbackTransport) -> list[torch.Tensor]:
        number = axes.coordinates(transport.rank).replica
        part = Part(transport, axes.replica(transport.rank))
        outputs = parallel_outputs(part, expected[number].model, CASES[number], machine)
        with parallelize(copy.deepcopy(expected[number].model), transport=part, machine=machine) as engine:
            assert engine.topology == axes.topology.part(axes.replica(transport.rank))
        return outputs

    of_ranks = run_ranks(size, work, 120.0)
    for number, of_replica in enumerate(axes.branches):
        check_ranks([of_ranks[rank] for rank in of_replica[0]], expected[number], CASES[number].family)


def test_one_replica_may_make_more_images_than_the_other():
    case, expected = CASES[0], Expected.of(CASES[0])

    def work(transport: LoopbackTransport) -> dict[str, int]:
        part = Part(transport, (0, 1) if transport.rank < 2 else (2, 3))
        for _ in range(1 if transport.rank < 2 else 3):
            parallel_outputs(part, expected.model, case, "local", selection="v_major", ratio=0.5, steps=3)
        part.close()
        with pytest.raises(UserError, match="the transport of this engine is closed"):
            parallelize(copy.deepcopy(expected.model), transport=part).__enter__()
        assert not transport.closed
        assert transport.broadcast_object(transport.rank) == 0
        return {}

    run_ranks(4, work, 120.0)


def test_replicas_with_a_codec_have_the_bits_of_one_replica():
    """Each predicts by its own ranks' notes and keeps states of its own, over images of its own."""
    axes = Axes.build(topology_of("local", 4), replica=2)
    models = [case.model() for case in CASES]

    def images(transport: Transport, number: int) -> list[torch.Tensor]:
        """The first replica makes one image while the second makes two, of other tokens, batch and family."""
        model = copy.deepcopy(models[number])
        with torch.no_grad(), parallelize(model, "coded-", transport=transport, predictor="taylor") as engine:
            outputs = [denoise(model, CASES[number].inputs()) for _ in range(1 + number)]
            assert engine.drift_profile()[1]["coded_fraction"] == 1
        return outputs

    def work(transport: LoopbackTransport) -> list[torch.Tensor]:
        number = axes.coordinates(transport.rank).replica
        return images(Part(transport, axes.replica(transport.rank)), number)

    of_ranks = run_ranks(4, work, 120.0)
    for number, (ranks,) in enumerate(axes.branches):
        for rank, alone in zip(ranks, run_ranks(2, lambda whole, number=number: images(whole, number)), strict=True):
            assert all(torch.equal(one, two) for one, two in zip(of_ranks[rank], alone, strict=True))


def test_a_rank_lost_in_one_replica_ends_the_other_and_has_its_number_in_the_run():
    def work(transport: LoopbackTransport) -> None:
        part = Part(transport, (0, 1) if transport.rank < 2 else (2, 3))
        if transport.rank == 3:
            part.health.fail("out of memory")
            return
        if transport.rank == 2:
            return
        with pytest.raises(PeerLost, match="rank 3 failed: out of memory"):
            while True:
                part.gather_object(None)
                part.broadcast_object(None)
                part.health.check()

    run_ranks(4, work, 60.0)
