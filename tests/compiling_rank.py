"""Two forked ranks of a compiled model, of which rank 1 compiles for SECONDS without a pause. Argument: how long ranks
may keep others waiting."""

import sys
import time
from functools import partial
from typing import Any

import torch
from tiny_models import flux_inputs, flux_transformer

from cocodiff.comm.launch import detect
from cocodiff.config.config import Config
from cocodiff.engine import compiling
from cocodiff.engine.engine import parallelize
from cocodiff.jobs.ranks import run_ranks

SECONDS, LOST_S = 6.0, 2.0


def compile_slowly(rank: int, slept: list[None], graph: Any, _: Any) -> Any:
    end = time.monotonic() + (SECONDS if rank == 1 and not slept else 0.0)
    slept.append(None)
    while time.monotonic() < end:  # a compiler holds Python's lock
        sum(range(1000))
    return graph.forward


def work(config: Config, transport: Any) -> None:
    model, inputs = flux_transformer(4), flux_inputs(1, 4, 5, 6)
    compiling.BACKEND = partial(compile_slowly, transport.rank, [])
    with torch.no_grad():
        plain = model(**inputs).sample
        with parallelize(model, config=config.with_(compile=True), transport=transport) as engine:
            torch.testing.assert_close(model(**inputs).sample, plain, rtol=0, atol=1e-5)
    if transport.rank == 0:
        print(engine.compiled)


def main() -> int:
    config = Config(transport="gloo", device="cpu", timeout_s=LOST_S, stall_timeout_s=float(sys.argv[1]))
    return run_ranks(2, detect(), config, {}, partial(work, config), lambda: "")
