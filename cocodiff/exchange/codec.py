"""Codecs: what is sent in a tensor's place, and what the receiver makes of it.

A `Codec` belongs to one rank's attention for as long as the engine lives; the engine calls its lifecycle. For every
attention call it gives a `EncodedCall` (`outgoing.py`), whose two ends encode on the sender's lane and decode where the
receiver waits, and the `Transfer` that sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cocodiff.comm.transport import Transport
from cocodiff.config.grouping import by_key
from cocodiff.config.machine import Topology
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.outgoing import EncodedCall
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology.layout import Layout


class StepInfo(NamedTuple):
    """Where denoising stands: which run of the model, which of its steps; `steps` is None where nobody has told. sigma:
    the noise level, in the scheduler's units, or a bare transformer's timestep; None where there is neither."""

    run: int
    step: int
    steps: int | None
    sigma: float | None = None


class AllRanks(NamedTuple):
    """The ranks that share a sequence: those of one Ulysses group or, with a ring, of several."""

    topology: Topology
    ranks: Transport


class StepNotes(Protocol):
    """Notes of a codec about one step, over a rank's layers."""

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """The notes of several ranks as one row of a profile."""


def merge_notes(reports: Sequence[Mapping[int, StepNotes]]) -> list[dict[str, Any]]:
    """The profile over all ranks' reports (`Codec.report`, and the step cache's), one row a step: "step" and what each
    kind of notes says."""
    rows: list[dict[str, Any]] = []
    for step in sorted({step for report in reports for step in report}):
        kinds = by_key((type(report[step]), report[step]) for report in reports if step in report)
        row: dict[str, Any] = {"step": step}
        for kind, parts in kinds.items():
            row |= kind.merged(parts)
        rows.append(row)
    return rows


class Codec:
    """Decides what all calls of a run send. This one sends every tensor whole and keeps nothing between calls."""

    # Whether memory is held between calls, so that a run is checked for room before it starts, and a mesh has no ring
    # where heads allow it: a ring's messages are not coded.
    keeps_state = False
    layer_state: type[Any] = object  # what is kept of a layer
    transfer: type[Transfer] = Transfer  # of coded calls
    moment = StepInfo(-1, 0, None)  # of the model's current call

    def __init__(
        self,
        settings: Any = None,
        exchange: Exchange | None = None,
        ranks: Any = None,
        everyone: AllRanks | None = None,
    ) -> None:
        """The codec of one rank of a Ulysses group. settings: the engine's. exchange: of the group; None for one rank.
        ranks: the group's transport. everyone: these and, with a ring, those of the other groups."""
        self.settings, self._exchange, self.ranks = settings, exchange, ranks
        self._layers: dict[Any, Any] = {}
        self._report: dict[int, Any] = {}
        self._first: dict[str, None] = {}  # layers of this run, in the order in which they were called

    def call(self, exchange: Exchange, layout: Layout, layer_key: Any) -> EncodedCall:
        """The codec of one attention call. layer_key: which layer and guidance branch."""
        return EncodedCall(layout)

    def open(self, exchange: Exchange, layout: Layout, layer_key: Any) -> Transfer:
        """The messages of one attention call: of tensors whole, where its layer is one too many."""
        if self.codes(layer_key.layer):
            return self.transfer(exchange, self.call(exchange, layout, layer_key), layer_key.kind)
        self.note_whole()
        return Transfer(exchange, EncodedCall(layout), layer_key.kind)

    def codes(self, layer: str) -> bool:
        """Whether a layer is one of those that are coded: alike on all ranks, whose models call them in one order."""
        if not self.keeps_state or self.settings.state_layers is None:
            return True
        if len(self._first) < self.settings.state_layers:
            self._first[layer] = None
        return layer in self._first

    def note_whole(self) -> None:
        """Notes a call whose tensors travel whole as its layer is one too many."""

    def state_of(self, layer_key: Any) -> Any:
        return self._layers.setdefault(layer_key, self.layer_state())

    def begin_step(self, moment: StepInfo) -> None:
        """The model is called: for another run, another step, or another guidance branch of the same step."""
        if moment.run != self.moment.run:  # a new image: nothing of the last one may be seen
            self.end()
        self.moment = moment

    def forget(self, layer_key: Any) -> None:
        """The layer's next call is made elsewhere: what is kept for it is given back."""
        self._layers.pop(layer_key, None)

    def end(self, drain: bool = True) -> None:
        """The engine is left: memory is given back. drain: when nothing is under way; not after a failure."""
        self._layers.clear()
        self._first.clear()

    def bytes_held(self) -> int:
        """Bytes that are held between calls now, at most: also where messages are in flight between calls."""
        return sum(state.bytes_held() for state in self._layers.values())

    def report(self) -> Mapping[int, StepNotes]:
        """Notes of every step so far, to be merged over ranks."""
        return self._report

    def forget_report(self) -> None:
        """Starts the report afresh."""
        self._report.clear()
