"""Classifier-free guidance on two parts of the ranks, each of which computes one branch. No attention byte passes
between the parts; the model's output does, once a step.

Pipelines ask for the branches in one of two ways. *Batched* (SD3): one call with both in its batch; each part takes its
half of the rows, and the halves of the output are exchanged. *Sequential* (Qwen-Image, FLUX, FLUX.2 klein): a call for
each; the parts take them in turns. A call that is the other part's returns at once, with a tensor that waits for its
values when they are read (`parts.Awaited`). So nothing depends on what a pipeline does between the calls.

Each part computes the first step of sequential guidance on its own ranks. In the engine's first image both parts
compute all calls of that step, which shows how many calls a step has and what the model returns. Both then continue
with the output of the part that keeps the branch, since repeated products may differ in their last bits. Later steps go
by the step before. If the second call stops or begins to appear, all ranks compute the calls together until the next
step shows another number. Earlier images decide which ranks compute an image's first step, but not its bits.

`ranks.py` decides which ranks compute a call; `parts.py` is one of two parts, and the messages between them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from cocodiff.comm.transport import RankContext
from cocodiff.engine.sequence import SequenceRanks

PARTS = 2  # number of parts of the ranks, each of which computes one guidance branch
SequenceOf = Callable[[RankContext], SequenceRanks]  # makes the object for ranks that share one sequence


class Sharing(Enum):
    """The ways in which one call of the model is divided between the ranks, which may form two parts with a guidance
    branch each."""

    TOGETHER = "all ranks, as one sequence"
    ALIKE = "both parts, and one of them sends the result"
    ROWS = "each part its half of the batch"
    CALLS = "one of the parts, for both"
