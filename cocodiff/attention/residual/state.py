"""The state of a site between calls: of q, k, v and the output, the reconstructions that both ends have alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.calls import TENSORS
from cocodiff.attention.sites import End, SiteEnds
from cocodiff.kernels.residual import Onward, Prediction


@dataclass
class SiteState(SiteEnds):
    """linear: with predictor auto, the tensors that the linear continuation predicted better at the last call.
    plain: whether tensors travel as they are in a call that follows no other, as a code has failed before it.
    wanted: by name, the continuations that are to be written while the last call's tensors are decoded."""

    linear: frozenset[str] = frozenset()
    plain: bool = False
    wanted: dict[str, Onward] = field(default_factory=dict)

    def begin_anew(self) -> None:
        super().begin_anew()
        self.plain, self.linear = not self.fits, frozenset()

    def take_notes(self, notes: Sequence[Sequence[int]]) -> None:
        super().take_notes(notes)
        compared = dict(zip(TENSORS, (of_tensor[1] for of_tensor in notes), strict=True))
        self.linear = frozenset(name for name, better in compared.items() if better < 0)


@dataclass
class CodedStep:
    """Of one step: the calls of attention, those of them that were coded, and of their tensors (four each) those
    predicted linearly. sent: the tensors' sizes on the wire, a whole one being 1, as a model of 16 bits has them whose
    heads are whole groups of channels: a small model's actual bytes are in the trace."""

    calls: int = 0
    coded: int = 0
    linear: int = 0
    sent: float = 0.0

    def add(self, predictions: Collection[Prediction], share: float) -> None:
        """A call, whose tensors are predicted so; none where they travel whole. share: of a whole tensor's bytes that
        each takes, of 16-bit numbers in heads of whole groups."""
        self.calls += 1
        self.coded += bool(predictions)
        self.linear += sum(how.linear for how in predictions)
        self.sent += len(TENSORS) * share

    @classmethod
    def merged(cls, parts: Sequence[CodedStep]) -> dict[str, Any]:
        """Over ranks: "coded_fraction" of the calls; "linear_fraction" of the tensors that were coded, None where none
        was; of the bytes that whole tensors of 16 bits take, with heads of whole groups, "sent_fraction". Attention
        waits for all of them: see `DisplacedStep`."""
        names = ("calls", "coded", "linear", "sent")
        calls, coded, linear, sent = (sum(getattr(part, name) for part in parts) for name in names)
        return {
            "coded_fraction": coded / calls,
            "linear_fraction": linear / (len(TENSORS) * coded) if coded else None,
            "displaced_fraction": 0.0,
            "displaced_sets": {"": 1.0},
            "sent_fraction": sent / (len(TENSORS) * calls),
            "exposed_fraction": sent / (len(TENSORS) * calls),
        }


def kept(first: Tensor, count: int) -> End:
    """An end with `first` as its newest reconstruction and room for the ones before it."""
    return End([first, *(torch.empty_like(first) for _ in range(count - 1))])
