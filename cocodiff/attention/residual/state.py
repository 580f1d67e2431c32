"""What a site keeps between calls: of q, k, v and the output, the reconstructions that both ends have alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocodiff.device import used_on_current_stream
from cocodiff.kernels.residual import Prediction, Reconstructions

TENSORS = ("q", "k", "v", "o")
NEWEST = 3  # noise levels that a continuation needs


@dataclass
class End:
    """One end's reconstructions of one tensor, each contiguous, in turn the newest."""

    buffers: list[Tensor]

    def known(self, coded: int, rows: slice) -> Reconstructions:
        """Some rows for the coded call of this number, from 1: the newest, and what is written over."""
        last, written = self.buffers[(coded - 1) % len(self.buffers)], self.written(coded)
        used_on_current_stream(last)
        used_on_current_stream(written)
        return Reconstructions(last[:, rows], None if written is last else written[:, rows])

    def written(self, coded: int) -> Tensor:
        """What that call's reconstruction is written to."""
        return self.buffers[coded % len(self.buffers)]


@dataclass
class SiteState:
    """form: shape, dtype, layout and inference mode of the last call, which was at `last_step`.
    coded: the calls since the last whole one. levels: the noise levels of the newest calls since then, that one too.
    fits: whether at the last coded call every group of every rank had a scale.
    linear: with predictor auto, the tensors that the linear continuation predicted better at the last call.
    sent, received: both ends' reconstructions by the tensors' names: of q, k and v the sender has its own rows and all
    heads, the receiver all rows and its own heads; of the output it is the other way round."""

    form: tuple[Any, ...] = ()
    last_step: int = -2
    coded: int = 0
    levels: list[float] = field(default_factory=list)
    fits: bool = True
    linear: frozenset[str] = frozenset()
    sent: dict[str, End] = field(default_factory=dict)
    received: dict[str, End] = field(default_factory=dict)

    def begin(self, form: tuple[Any, ...], step: int, level: float, whole: bool) -> None:
        """A call begins. It is coded if it follows the last one, of the same form, in which all groups had a scale.
        whole: it is not in any case."""
        whole = whole or self.form != form or self.last_step != step - 1 or not self.fits
        self.form, self.last_step = form, step
        if whole:
            self.coded, self.fits, self.linear, self.levels = 0, True, frozenset(), [level]
            self.sent, self.received = {}, {}
        else:
            self.coded, self.levels = self.coded + 1, [*self.levels[1 - NEWEST :], level]

    @property
    def factor(self) -> float:
        """Of the linear continuation, 0 where there is none."""
        return continuation(self.levels) if self.coded > 1 else 0.0

    def settle(self, notes: Sequence[tuple[int, int]]) -> None:
        """Takes what encoding noted in the last call, summed over all ranks, of each of TENSORS: how many groups had no
        scale, and how the two predictions compared."""
        self.fits = not any(unfit for unfit, _ in notes)
        self.linear = frozenset(name for name, (_, compared) in zip(TENSORS, notes, strict=True) if compared < 0)

    def bytes_held(self) -> int:
        ends = (*self.sent.values(), *self.received.values())
        return sum(buffer.nbytes for end in ends for buffer in end.buffers)


@dataclass
class CodedStep:
    """Of one step: the calls of attention, those of them that were coded, and of their tensors (four each) those
    predicted linearly."""

    calls: int = 0
    coded: int = 0
    linear: int = 0

    def add(self, predictions: Collection[Prediction]) -> None:
        """A call, whose tensors are predicted so; none where they travel whole."""
        self.calls += 1
        self.coded += bool(predictions)
        self.linear += sum(how.linear for how in predictions)

    @classmethod
    def merged(cls, parts: Sequence[CodedStep]) -> dict[str, float | None]:
        """Over ranks: "coded_fraction" of the calls, and "linear_fraction" of the tensors that were coded, None where
        none was."""
        calls, coded, linear = (sum(getattr(part, name) for part in parts) for name in ("calls", "coded", "linear"))
        return {"coded_fraction": coded / calls, "linear_fraction": linear / (len(TENSORS) * coded) if coded else None}


def continuation(levels: Sequence[float]) -> float:
    """The factor of the linear continuation by the noise levels of the last calls, the current one last: how far this
    call is from the last one, in distances of the last two; at most 2, and 0 where the level did not move."""
    if len(levels) < NEWEST or levels[-2] == levels[-3]:
        return 0.0
    factor = (levels[-1] - levels[-2]) / (levels[-2] - levels[-3])
    return min(factor, 2.0) if factor > 0 else 0.0  # NaN is none


def kept(first: Tensor, count: int) -> End:
    """An end with `first` as its newest reconstruction and room for the ones before it."""
    return End([first, *(torch.empty_like(first) for _ in range(count - 1))])
