"""All messages are waited for in the end, those too that no attention call waits for. That each call of attention waits
for its own is in `test_exact_attention.py` and in the tests of codecs, by `attention_worlds.Ranks`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_worlds import LAYER, RUN, Messages, Ranks, World
from tiny_models import sd3_inputs, sd3_transformer

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize
from cocodiff.exchange.messages import InFlight, Target


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "cocodiff+", "steps": 4},
        {"preset": "coded"},
        {"preset": "split", "arrival": "displaced"},
        {"preset": "split", "codec": "int4", "arrival": "adaptive", "chunks": 2},
        {"preset": "flat", "ring": 2, "ring_kind": "token"},
        {"preset": "flat", "ring": 2, "ring_kind": "streaming"},
        {"preset": "tapa", "weights": "node"},
        {"preset": "tapa", "step_cache": "first_block"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_no_message_is_left_when_an_engine_is_left(settings: dict[str, Any]) -> None:
    """Neither what no call waits for, nor what ranks decide by, nor weights."""
    model, messages = sd3_transformer(4).to(torch.bfloat16), Messages()
    inputs = sd3_inputs(1, 2, 2, 3, torch.bfloat16)

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, **settings):
            for step in range(3):
                own(**inputs | {"timestep": torch.full_like(inputs["timestep"], 0.9 - 0.1 * step)})
        assert not messages.unwaited(transport.rank)

    with messages.watched():
        run_ranks(2, work)
    assert messages.posted == set() and messages.most_bytes[0] > 0


def test_a_layer_that_is_forgotten_has_received_what_was_late() -> None:
    """As where another part of the ranks computes its next call."""
    ranks = Ranks(World(2), arrival="displaced", exchange="flat")

    def forget(rank: int, codec: Any) -> None:
        codec.forget(LAYER)
        assert not ranks.messages.unwaited(rank) and not codec.bytes_held()

    ranks.call(RUN[:3], forget)


def test_a_chunk_of_the_output_that_cannot_be_put_in_place_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: here the first of three on each rank."""
    world, land, seen = World(4, heads=6, image=24), InFlight.land, set[int]()
    whole = sum(world.layout(RUN[0]).rows)

    def fail_at_first(flight: InFlight, target: Target) -> None:
        (x_BLHW,) = target.tensors
        if x_BLHW.shape[1] < whole and id(x_BLHW) not in seen:
            seen.add(id(x_BLHW))
            raise RuntimeError("out of memory")
        land(flight, target)

    monkeypatch.setattr(InFlight, "land", fail_at_first)
    with pytest.raises(RuntimeError, match="out of memory"):
        Ranks(world, exchange="split", chunks=3).call([RUN[0]])
