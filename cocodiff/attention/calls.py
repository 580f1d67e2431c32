"""The facts that decide about a site's calls: which calls follow one another, and what all ranks noted of the last one.

Of q, k, v and the output every call has a row of notes, whole numbers that ranks add up: see `kernels.residual`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.comm.transport import LanePending
from cocodiff.kernels.residual import NOTES
from cocodiff.topology.layout import Layout
from cocodiff.trace import Trace
from cocodiff.wire.coding import AllRanks, Moment
from cocodiff.wire.outgoing import OUTPUT

TENSORS = ("q", "k", "v", OUTPUT)
NEWEST = 3  # noise levels that a continuation needs
NOTED_SITES = 64  # whose notes are one tensor: nobody tells a first step how many there are
TakeNotes = Callable[[Sequence[Sequence[int]]], None]


@dataclass
class SiteCalls:
    """form: shape, dtype, layout and inference mode of the last call, which was at `last_step`.
    follows: the calls since the last one that began anew, which nothing could predict. levels: the noise levels of
    the newest of these, that one too.
    fits: whether at the last call every group that was coded had a scale, on every rank."""

    form: tuple[Any, ...] = ()
    last_step: int = -2
    follows: int = 0
    levels: list[float] = field(default_factory=list)
    fits: bool = True

    def begin(self, like_BLHD: Tensor, layout: Layout, moment: Moment, anew: bool) -> None:
        """A call begins. It follows the last one that ran, at an earlier step of the run, if that was of the same form
        and all groups had a scale. anew: it does not in any case. Steps between that left the site out change nothing:
        both ends have what the last call left."""
        form = tuple(like_BLHD.shape), like_BLHD.dtype, layout, torch.is_inference_mode_enabled()
        level = float(moment.step) if moment.sigma is None else moment.sigma
        anew = anew or self.form != form or self.last_step >= moment.step or not self.fits
        self.form, self.last_step = form, moment.step
        if anew:
            self.begin_anew()
            self.fits, self.follows, self.levels = True, 0, [level]
        else:
            self.follows, self.levels = self.follows + 1, [*self.levels[1 - NEWEST :], level]

    def begin_anew(self) -> None:
        """Forgets the state that earlier calls have left."""

    def take_notes(self, notes: Sequence[Sequence[int]]) -> None:
        """Takes what was noted in the last call, summed over all ranks, of each of TENSORS: how many groups had no
        scale; how the two predictions compared; and, in eighths of an octave, the sizes of changes less those of the
        values, and over how many groups."""
        self.fits = not any(unfit for unfit, *_ in notes)

    @property
    def factor(self) -> float:
        """Of the linear continuation, 0 where there is none."""
        return continuation(self.levels) if self.follows > 1 else 0.0

    @property
    def pace(self) -> float:
        """How far the noise level moves to this call, in distances of its last move: what a tensor changes by goes with
        it. At least 1/4 and at most 4; 1 where the level did not move."""
        if len(self.levels) < NEWEST:
            return 1.0
        now, last = abs(self.levels[-1] - self.levels[-2]), abs(self.levels[-2] - self.levels[-3])
        return min(max(now / last, 0.25), 4.0) if now > 0 and last > 0 else 1.0


def continuation(levels: Sequence[float]) -> float:
    """The factor of the linear continuation by the noise levels of the last calls, the current one last: how far this
    call is from the last one, in distances of the last two; at most 2, and 0 where the level did not move."""
    if len(levels) < NEWEST or levels[-2] == levels[-3]:
        return 0.0
    factor = (levels[-1] - levels[-2]) / (levels[-2] - levels[-3])
    return min(factor, 2.0) if factor > 0 else 0.0  # NaN is none


def is_fine(moment: Moment, fine_steps: int) -> bool:
    """Whether this is one of the last steps, whose errors no later step corrects."""
    return moment.steps is not None and moment.step >= moment.steps - fine_steps


class Noted(NamedTuple):
    """The notes of one call, int64 [tensors, NOTES], and who takes their sum over all ranks."""

    own: Tensor
    takers: list[TakeNotes]

    def of(self, name: str) -> Tensor:
        """A tensor's, [NOTES]."""
        return self.own[TENSORS.index(name)]


class SharedNotes:
    """The notes of all calls of attention in one call of the model, summed over the ranks that share a sequence: in the
    background, behind what comes before the next call's first attention."""

    def __init__(self, everyone: AllRanks, trace: Trace) -> None:
        self._everyone, self._trace = everyone, trace
        self._moment: Moment | None = None
        self._noted: list[Noted] = []
        self._largest: list[int] = []  # of the rows of these, those of which the largest counts
        self._blocks: list[Tensor] = []  # theirs, of so many sites each
        self._deciding: tuple[list[Noted], LanePending[list[Any] | None]] | None = None

    def of_call(self, device: torch.device, largest: bool = False) -> Noted:
        """Room for the notes of one more call. largest: of which ranks take the largest, not the sum."""
        first = len(self._noted) % NOTED_SITES * len(TENSORS)
        if not first:
            self._blocks.append(torch.zeros(NOTED_SITES * len(TENSORS), NOTES, dtype=torch.int64, device=device))
        if largest:
            self._largest += range(len(TENSORS) * len(self._noted), len(TENSORS) * (len(self._noted) + 1))
        self._noted.append(Noted(self._blocks[-1][first : first + len(TENSORS)], []))
        return self._noted[-1]

    def begin_step(self, moment: Moment) -> None:
        """Has the notes of the model's last call summed. Whoever takes notes calls it; the first of them has it done,
        so the same object tells the same call of the model."""
        if moment is self._moment:
            return
        self._moment = moment
        self.hand_out()
        if self._noted:
            whole = torch.cat(self._blocks) if len(self._blocks) > 1 else self._blocks[0]
            own = whole[: len(self._noted) * len(TENSORS)]
            self._deciding = self._noted, self._everyone.ranks.control.submit(self._sum, own, self._largest)
            self._noted, self._largest, self._blocks = [], [], []

    def hand_out(self) -> None:
        """Waits for the sums and hands them out: alike on all ranks."""
        if self._deciding is None:
            return
        (noted, pending), self._deciding = self._deciding, None
        with self._trace.span("wait for notes"):
            sums = pending.wait() or []
        of_calls = [sums[first : first + len(TENSORS)] for first in range(0, len(sums), len(TENSORS))]
        for one, of_call in zip(noted, of_calls, strict=bool(of_calls)):
            for take_notes in one.takers:
                take_notes(of_call)

    def clear(self) -> None:
        self._noted, self._largest, self._blocks, self._deciding = [], [], [], None

    def _sum(self, own: Tensor, largest: list[int]) -> list[Any] | None:
        """Every rank's notes in one message to each; None for tensors without numbers, as predictions have them."""
        topology, ranks = self._everyone
        with self._trace.span("gather notes", "control"):
            parts = [torch.empty_like(own) for _ in range(ranks.size)]
            ranks.world.all_gather(own, parts).wait()
        for peer in range(ranks.size):
            self._trace.count(topology.link_class(ranks.rank, peer), own.nbytes, purpose="notes")
        of_ranks = torch.stack(parts)
        total = of_ranks.sum(0)
        if largest:
            total[largest] = of_ranks[:, largest].amax(0)
        return None if total.is_meta else total.tolist()
