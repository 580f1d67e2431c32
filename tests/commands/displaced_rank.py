"""Three forked ranks whose attention is displaced, for tests. Arguments: how the run ends, and the exchange.

Every ending has messages in flight that no call has waited for: the block is left right after a displaced step
("leaves"), rank 1 fails in the middle of one ("raises"), or is killed there ("killed").
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Any

import torch
from cocodiff_bench.stand_in import Late
from tiny_models import qwen_inputs, qwen_transformer

from cocodiff.comm.launch import detect
from cocodiff.config.config import Config
from cocodiff.engine.engine import parallelize
from cocodiff.jobs.ranks import run_ranks

RANKS, ENDLESS, AT = 3, 10_000, 5  # steps, and the one at which rank 1 is lost


def denoise(model: Any, seed: int, steps: int, lose: Any = None) -> torch.Tensor:
    """The last outputs of so many steps, of an input that moves, of two branches of guidance. lose: called in the
    middle of a step."""
    branches = [qwen_inputs(1, 6, 7, text) for text in (5, 3)]
    noise = torch.randn(branches[0]["hidden_states"].shape, generator=torch.Generator().manual_seed(seed))
    for step in range(steps):
        if step == AT and lose is not None:
            model.transformer_blocks[1].register_forward_pre_hook(lambda *_: lose())
        moment = {"hidden_states": noise * (1 + 0.1 * step), "timestep": torch.full((1,), 1 - step / ENDLESS)}
        outputs = [model(**inputs | moment)[0] for inputs in branches]
    return torch.cat(outputs)


def work(ending: str, exchange: str, transport: Any) -> None:
    torch.manual_seed(0)
    model = qwen_transformer(4)
    settings = {"exchange": exchange, "codec": "int2", "arrival": "adaptive", "tau": 10.0}
    with torch.no_grad(), parallelize(model, "flat", transport=transport, **settings) as engine:
        codec = engine.sequence.strategy.codec
        alone = denoise(model, 1, 4)
        assert codec.bytes_held() > 0
        denoise(model, 2, 3)  # an image that nobody goes on with
        assert torch.equal(denoise(model, 1, 4), alone), "an image depends on the one before it"
        gathered = transport.gather_object(alone)
        assert gathered is None or all(torch.equal(one, alone) for one in gathered)
        if ending != "leaves":
            denoise(model, 1, ENDLESS, partial(lost, ending) if transport.rank == 1 else None)
    assert codec.bytes_held() == 0
    late = Late.of([engine.trace.spans])
    own = engine.trace.bytes("late")
    assert engine.trace.dropped == 0 and late.sent == sum(own.values()) > 0
    assert all(own[link] <= sent for link, sent in engine.trace.bytes().items())
    if transport.rank == 0:
        print("left with messages in flight")


def lost(ending: str) -> None:
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the disk is on fire")


def main() -> int:
    ending, exchange = sys.argv[1:]
    # a rank that is lost ends the run at once, not when one of these is over
    config = Config(transport="gloo", timeout_s=120.0, stall_timeout_s=120.0)
    return run_ranks(RANKS, detect(), config, {}, partial(work, ending, exchange), lambda: "")
