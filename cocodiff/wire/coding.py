"""Codings: what is sent in a tensor's place, and what the receiver makes of it.

A `Coding` belongs to one rank's attention for as long as the engine lives; the engine calls its lifecycle. For every
attention call it gives a `CodedCall`, whose two ends encode on the sender's lane and decode where the receiver waits.
The ones here send tensors as they are. Routes, chunks and sizes follow from what `encode` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from cocodiff.comm.transport import Ranks
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.wire.blocks import Payload

if TYPE_CHECKING:
    from cocodiff.wire.exchange import Arriving, Exchange, Transfer


class Moment(NamedTuple):
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
    """What a coding notes of one step, over a rank's sites."""

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """The notes of several ranks as one row of a profile."""
        ...


def merge_notes(reports: Sequence[Mapping[int, StepNotes]]) -> list[dict[str, Any]]:
    """The profile over all ranks' reports (`Coding.report`), one row a step: "step" and what the coding notes."""
    rows: list[dict[str, Any]] = []
    for step in sorted({step for report in reports for step in report}):
        parts = [report[step] for report in reports if step in report]
        rows.append({"step": step, **parts[0].merged(parts)})
    return rows


class Encoded(NamedTuple):
    """What travels in the place of some tensors: payloads [B, L, H, W] of one dtype, and the layout that tells how many
    rows L of every rank they have."""

    payloads: Sequence[Payload]
    layout: Layout


class CodedCall:
    """One attention call's tensors on the wire. Subclasses change what they need."""

    awaited = True  # whether attention waits for all that this call sends; else nothing of it comes chunk by chunk

    def __init__(self, layout: Layout) -> None:
        """layout: of the tensors themselves."""
        self.layout = layout

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        """Bytes that one token of one head of a tensor like this takes on the wire, over the batch."""
        return len(x_BLHD) * x_BLHD.shape[-1] * x_BLHD.element_size()

    def send(self, transfer: Transfer, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> Arriving:
        """Starts sending tensors, by name. Called on the thread that attends, with v before or together with what
        depends on it."""
        return transfer.post(tensors_BLHD, wait_next)

    def encode(self, tensors_BLHD: Mapping[str, Tensor]) -> Encoded:
        """What travels in the tensors' place. Runs on a lane, where it may wait for what it depends on."""
        return Encoded(list(tensors_BLHD.values()), self.layout)

    def decode(self, received_BSGW: Mapping[str, Tensor], coded: Layout, rows: slice) -> list[Tensor]:
        """The tensors [B, S, G, D] of all rows of this rank's heads, from payloads of which `rows` have just arrived.
        coded: the layout of what `encode` gave. Runs on the thread that attends."""
        return list(received_BSGW.values())

    def encode_output(self, out_BTGD: Tensor, rows: slice) -> Tensor:
        """What travels back in the place of some rows of attention's output, [B, T, G, W]: of `rows` of the sequence.
        Runs on a lane."""
        return out_BTGD

    def decode_output(self, received_BLHW: Tensor) -> Tensor:
        """All heads of this rank's rows of the output, [B, L, H, D]."""
        return received_BLHW

    def back(self, transfer: Transfer, out_BSGD: Tensor) -> Tensor:
        """Sends the output, all rows of this rank's heads, back; returns what the model goes on with in the place
        of all heads of its own rows, [B, L, H, D]. Called on the thread that attends, not where it goes in chunks."""
        return transfer.post_back(out_BSGD).wait()


class Coding:
    """What all calls of a run send. This one sends every tensor whole and keeps nothing between calls."""

    keeps_state = False  # whether memory is held between calls, so that a run is checked for room before it starts
    prefers_ulysses = False  # whether a mesh should have no ring where heads allow it: a ring's messages are not coded

    @classmethod
    def of(
        cls, settings: Any, topology: Topology, exchange: Exchange | None, transport: Any, everyone: AllRanks
    ) -> Coding:
        """The coding of one rank of a Ulysses group by the engine's settings. exchange: None for one rank. transport:
        of the group's ranks. everyone: these and, with a ring, those of the other groups."""
        return cls()

    def call(self, exchange: Exchange, layout: Layout, site: Any) -> CodedCall:
        """The coding of one attention call. site: which layer and guidance branch."""
        return CodedCall(layout)

    def begin_step(self, moment: Moment) -> None:
        """The model is called: for another run, another step, or another guidance branch of the same step."""

    def forget(self, site: Any) -> None:
        """The site's next call is made elsewhere: what is kept for it is given back."""

    def end(self, drain: bool = True) -> None:
        """The engine is left: memory is given back. drain: once nothing is under way any more; not where ranks may have
        stopped at different places."""

    def bytes_held(self) -> int:
        """Bytes that are held between calls now, at most: also where messages are in flight between calls."""
        return 0

    def report(self) -> dict[int, StepNotes]:
        """Notes of every step so far, to be merged over ranks."""
        return {}

    def forget_report(self) -> None:
        """Starts the report afresh."""
