"""What a site of the lossless codec keeps between calls, and what is noted of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cocodiff.attention.calls import TENSORS
from cocodiff.attention.sites import SiteEnds

NEEDED = 1  # the number of the note that tells how much room streams need; the first one, of what fits no scale, is 0


@dataclass
class SiteState(SiteEnds):
    """needed: of each tensor the room for a token and head in which every stream of the last call would have fit, in
    sixteenths of a byte, 0 where that is not known."""

    needed: Mapping[str, int] = field(default_factory=dict)

    def begin_anew(self) -> None:
        super().begin_anew()
        self.needed = {}

    def take_notes(self, notes: Sequence[Sequence[int]]) -> None:
        self.needed = {name: needed for name, (_, needed, *_) in zip(TENSORS, notes, strict=True)}


@dataclass
class LosslessStep:
    """Of one step: the calls of attention, those of them that were coded, and those that had rests to send. sent: the
    tensors' sizes on the wire, a whole one being 1."""

    calls: int = 0
    coded: int = 0
    overflows: int = 0
    sent: float = 0.0

    def add(self, coded: bool, sent: float) -> None:
        self.calls += 1
        self.coded += coded
        self.sent += sent

    def overflow(self, rest_bytes: int, whole_bytes: int) -> None:
        """One exchange of rests. whole_bytes: of a tensor of this rank."""
        self.overflows += 1
        self.sent += rest_bytes / whole_bytes

    @classmethod
    def merged(cls, parts: Sequence[LosslessStep]) -> dict[str, Any]:
        """Over ranks: "coded_fraction" of the calls; of the bytes of whole tensors, "sent_fraction", all of which
        attention waits for; "overflows": exchanges of what did not fit where it should have, for a call."""
        names = ("calls", "coded", "overflows", "sent")
        calls, coded, overflows, sent = (sum(getattr(part, name) for part in parts) for name in names)
        return {
            "coded_fraction": coded / calls,
            "linear_fraction": None,
            "displaced_fraction": 0.0,
            "displaced_sets": {"": 1.0},
            "sent_fraction": sent / (len(TENSORS) * calls),
            "exposed_fraction": sent / (len(TENSORS) * calls),
            "overflows": overflows / calls,
        }
