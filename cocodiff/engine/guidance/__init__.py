"""Classifier-free guidance on two parts of the ranks, each of which computes one branch: no attention byte passes
between them, the model's output does, once a step.

Pipelines ask for the branches in one of two ways. *Batched* (SD3): one call with both in its batch; each part takes its
half of the rows, and the halves of the output are exchanged. *Sequential* (Qwen-Image, FLUX, FLUX.2 klein): a call for
each; the parts take them in turns. A call that is the other part's returns at once, with a tensor that waits for its
values when these are asked for (`parts.Awaited`), so that nothing depends on what a pipeline does between the calls.

The first step of sequential guidance is computed by each part on its own ranks. In the engine's first image both parts
compute all of its calls: they tell how many calls a step has and what the model returns. Both go on with the output of
the part that keeps the branch, for products that are repeated may have other last bits. Later steps go by the step
before: where the second call no longer comes, or has just begun to come, all ranks compute the calls together until the
next step shows another number. The images before it decide who computes an image's first step, but not its bits.

`ranks.py` decides which ranks compute a call; `parts.py` is one of two parts, and what they send each other.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Transport
from cocodiff.config.machine import Topology
from cocodiff.engine.sequence import SequenceRanks

PARTS = 2
SequenceOf = Callable[[Topology, Transport, Trace], SequenceRanks]  # makes ranks into those of a sequence


class Sharing(Enum):
    """Who computes a call of the model."""

    TOGETHER = "all ranks, as one sequence"
    ALIKE = "both parts, and one of them sends the result"
    ROWS = "each part its half of the batch"
    CALLS = "one of the parts, for both"
