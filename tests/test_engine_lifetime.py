"""What an engine is before, in and after its `with` block, and that it can be entered again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tiny_models import sd3_inputs, sd3_transformer

from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld, run_ranks
from cocodiff.engine import parallelize
from cocodiff.errors import PeerLost, UserError

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def test_results_of_all_ranks_are_there_after_the_block_on_any_rank_alone():
    models, inputs = [sd3_transformer(4) for _ in range(3)], sd3_inputs(1, 4, 4, 3)

    def work(transport: Any) -> dict[str, int]:
        model = models[transport.rank]
        engine = parallelize(model, preset="cocodiff+", steps=4, transport=transport)
        assert sum(engine.bytes().values()) == 0 and engine.drift_profile() == []
        with engine:
            model(**inputs)
            inside = engine.bytes()
        once = engine.bytes()
        with engine:
            model(**inputs)
        # One rank after the other: a question that needed the others' answer would wait for ever.
        for rank in range(transport.size):
            if rank == transport.rank:
                assert engine.bytes() == {link: 2 * sent for link, sent in once.items()}
                assert len(engine.drift_profile()) == 1
                engine.forget_drift()
                assert engine.drift_profile() == []
            transport.gather_object(None)
            transport.broadcast_object(None)
        assert inside == once
        return once

    of_ranks = run_ranks(3, work, timeout_s=60.0)
    assert all(sent == of_ranks[0] for sent in of_ranks) and sum(of_ranks[0].values()) > 0


def test_an_engine_in_use_is_not_entered_again():
    engine = parallelize(sd3_transformer(4), transport=LoopbackTransport(LoopbackWorld(1), 0))
    with engine, pytest.raises(UserError, match="this engine is in use"):
        engine.__enter__()
    with engine, torch.no_grad():
        engine.model(**sd3_inputs(1, 4, 4, 3))


def test_an_engine_on_a_closed_transport_says_so():
    transport = LoopbackTransport(LoopbackWorld(1), 0)
    engine = parallelize(sd3_transformer(4), transport=transport)
    transport.close()
    with pytest.raises(UserError, match="the transport of this engine is closed"), engine:
        pass


def test_an_engine_that_opened_its_transport_opens_another_when_entered_again():
    engine = parallelize(sd3_transformer(4))
    for _ in range(2):
        with engine, torch.no_grad():
            assert not engine.transport.closed
            engine.model(**sd3_inputs(1, 4, 4, 3))
        assert engine.transport.closed


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_parallel_pipeline_is_not_copied(copied):
    model = sd3_transformer(4)
    with (
        parallelize(model, transport=LoopbackTransport(LoopbackWorld(1), 0)),
        pytest.raises(UserError, match="this SD3Transformer2DModel is parallel and can be neither copied nor pickled"),
    ):
        copied(model)
    copied(model)


def test_a_lost_rank_is_pickled_with_its_number():
    lost = pickle.loads(pickle.dumps(PeerLost(3, "died")))
    assert (lost.rank, lost.reason, str(lost)) == (3, "died", "rank 3 died")
