"""Codecs: what is sent in a tensor's place, and what the receiver makes of it.

A `Codec` belongs to one rank's attention for as long as the engine lives; the engine calls its lifecycle. For every
attention call it gives a `EncodedCall` (`outgoing.py`), whose two ends encode on the sender's lane and decode where the
receiver waits, and the `Transfer` that sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cocodiff.comm.transport import Ranks
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
    ranks: Ranks


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
        kinds: dict[type[StepNotes], list[StepNotes]] = {}
        for part in (report[step] for report in reports if step in report):
            kinds.setdefault(type(part), []).append(part)
        row: dict[str, Any] = {"step": step}
        for kind, parts in kinds.items():
            row |= kind.merged(parts)
        rows.append(row)
    return rows


class Codec:
    """Decides what all calls of a run send. This one sends every tensor whole and keeps nothing between calls."""

    keeps_state = False  # whether memory is held between calls, so that a run is checked for room before it starts
    layers: int | None = None  # of a model, the first ones, whose calls it codes; None for all
    moment = StepInfo(-1, 0, None)  # of the model's current call
    _first: tuple[int, dict[str, None]] = (-2, {})  # of a run, its first layers, in the order in which they were called
    prefers_ulysses = False  # whether a mesh should have no ring where heads allow it: a ring's messages are not coded

    @classmethod
    def of(
        cls, settings: Any, topology: Topology, exchange: Exchange | None, transport: Any, everyone: AllRanks
    ) -> Codec:
        """The codec of one rank of a Ulysses group by the engine's settings. exchange: None for one rank. transport:
        of the group's ranks. everyone: these and, with a ring, those of the other groups."""
        return cls()

    def call(self, exchange: Exchange, layout: Layout, layer_key: Any) -> EncodedCall:
        """The codec of one attention call. layer_key: which layer and guidance branch."""
        return EncodedCall(layout)

    def open(self, exchange: Exchange, layout: Layout, layer_key: Any) -> Transfer:
        """The messages of one attention call: of tensors whole, where its layer is one too many."""
        if self.codes(layer_key.layer):
            return self.transfer(exchange, layout, layer_key)
        self.note_whole()
        return Transfer(exchange, EncodedCall(layout), layer_key.kind)

    def transfer(self, exchange: Exchange, layout: Layout, layer_key: Any) -> Transfer:
        """The messages of one attention call that is coded."""
        return Transfer(exchange, self.call(exchange, layout, layer_key), layer_key.kind)

    def codes(self, layer: str) -> bool:
        """Whether a layer is one of those that are coded: alike on all ranks, whose models call them in one order."""
        if self.layers is None or not self.keeps_state:
            return True
        if self._first[0] != self.moment.run:
            self._first = self.moment.run, {}
        first = self._first[1]
        if len(first) < self.layers:
            first[layer] = None
        return layer in first

    def note_whole(self) -> None:
        """Notes a call whose tensors travel whole as its layer is one too many."""

    def begin_step(self, moment: StepInfo) -> None:
        """The model is called: for another run, another step, or another guidance branch of the same step."""

    def forget(self, layer_key: Any) -> None:
        """The layer's next call is made elsewhere: what is kept for it is given back."""

    def end(self, drain: bool = True) -> None:
        """The engine is left: memory is given back. drain: when nothing is under way; not after a failure."""

    def bytes_held(self) -> int:
        """Bytes that are held between calls now, at most: also where messages are in flight between calls."""
        return 0

    def report(self) -> dict[int, StepNotes]:
        """Notes of every step so far, to be merged over ranks."""
        return {}

    def forget_report(self) -> None:
        """Starts the report afresh."""
