"""The base of codecs, which decide what is sent instead of a tensor and how the receiver restores the tensor.

A `Codec` belongs to one rank's attention for as long as the engine exists; the engine calls its lifecycle. For every
attention call it makes a `Transfer` (`transfer.py`), which encodes on the sender's lane and decodes on the thread where
the receiver waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.config.grouping import by_key
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout


class StepInfo(NamedTuple):
    """The position of a call of the model in denoising."""

    run: int  # number of the run of the model (one per pipeline call)
    step: int  # index of the step in the run
    steps: int | None  # number of steps; None if unknown
    # noise level in the scheduler's units, or a bare transformer's timestep; None if there is neither
    sigma: float | None = None


class CallKind(NamedTuple):
    """A kind of attention calls that cost the same."""

    whole: bool = False  # True for a run's first calls, without a prediction: tensors whole, or coded in most bits
    stable: float = 0.0  # the fraction of tokens that are not sent
    fine: bool = False  # True with the bits of the last steps
    displaced: str = ""  # names of the tensors that no call waits for, as "qkv"


WHOLE, CODED = CallKind(whole=True), CallKind()
StepKinds = list[dict[CallKind, float]]  # for every step, the kinds of its calls with their fraction of the calls
TensorSets = Sequence[Mapping[str, float]]  # for every step, tensors that are displaced together, as "qkv", likewise
StateBytes = list[Mapping[str, int]]  # for every rank of a group, bytes by field of `RankMemory`


class StepNotes(Protocol):
    """A record of what a codec did in one step, over one rank's layers."""

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """Return the records of several ranks as one row of a profile."""


def merge_notes(reports: Sequence[Mapping[int, StepNotes]]) -> list[dict[str, Any]]:
    """Return the profile of a run, one row per step: "step", and the columns of each kind of record.

    Args:
        reports: every rank's records by step (`Codec.report`, and the step cache's).
    """
    rows: list[dict[str, Any]] = []
    for step in sorted({step for report in reports for step in report}):
        kinds = by_key((type(report[step]), report[step]) for report in reports if step in report)
        row: dict[str, Any] = {"step": step}
        for kind, parts in kinds.items():
            row |= kind.merged(parts)
        rows.append(row)
    return rows


class Codec:
    """The choice of what all attention calls of a run send. This base class sends every tensor as it is and keeps
    nothing between calls."""

    # True if memory is held between calls. Then a run is checked for memory before it starts. A mesh then has no ring
    # if there are enough heads, because a ring's messages are not coded.
    keeps_state = False
    agrees = False  # True if ranks gather decisions in each coded call of the model, which waits for them
    transfer: Callable[..., Transfer] = Transfer  # class of the transfers of layers that are coded
    steps_to_settle = 0  # coded calls after a whole one until all further calls cost the same
    step_info = StepInfo(-1, 0, None)  # position of the model's current call

    def __init__(
        self, settings: Config | None = None, exchange: Exchange | None = None, everyone: RankContext | None = None
    ) -> None:
        """Create the codec of one rank of a Ulysses group.

        Args:
            settings: the engine's; None for the defaults.
            exchange: of the group; None for one rank, or for questions that need no messages.
            everyone: this rank among the ranks that share the sequence, which are the group's and, with a ring, those
                of the other groups; None with no exchange.
        """
        self.settings, self._exchange = settings or Config(), exchange
        self._report: dict[int, Any] = {}

    def open(self, exchange: Exchange, layout: Layout, layer_key: Any) -> Transfer:
        """Return the transfer of one attention call. Its tensors are sent as they are if its layer is not coded.

        Args:
            layer_key: the layer and guidance branch.
        """
        return self.transfer(exchange, layout, layer_key.kind)

    def begin_step(self, step_info: StepInfo) -> None:
        """Begin a call of the model: of another run, another step, or another guidance branch of the same step."""
        if step_info.run != self.step_info.run:  # a new image must not depend on the last one
            self.end()
        self.step_info = step_info

    def forget(self, layer_key: Any) -> None:
        """Free the state of a layer whose next call is made by other ranks."""

    def end(self, drain: bool = True) -> None:
        """Free all memory, when the engine is left or a new run begins.

        Args:
            drain: True to receive messages in flight first; False after a failure.
        """

    def bytes_held(self) -> int:
        """Return the largest number of bytes held between calls now, including messages in flight."""
        return 0

    def report(self) -> Mapping[int, StepNotes]:
        """Return the records of every step so far, to be merged over ranks."""
        return self._report

    def forget_report(self) -> None:
        """Empty the report."""
        self._report.clear()

    # For plans and recordings. A plan asks a codec without an exchange. -----------------------------------------------

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        """Return the bytes on the wire of one token for one head, of each of q, k, v and the output."""
        return head_dim * itemsize

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the number of rows that every rank of a group sends, of each of q, k and v."""
        return layout.rows

    def gathered(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the bytes that every rank of a group additionally sends each other rank in a call, for one batch
        row."""
        return [0.0] * topology.size

    def choosing(self, kind: CallKind, tiles: int) -> tuple[int, int, int]:
        """Return the launches, gathers of all ranks, and waits of the host for the device, before v is sent.

        Args:
            tiles: number of tiles of a card.
        """
        return 0, 0, 0

    def kinds_of_steps(self, steps: int, stable: float, displaced: TensorSets) -> StepKinds:
        """Return the kinds of every step's calls.

        Args:
            stable: fraction of the tokens that V-Major does not send, if a threshold decides.
            displaced: tensors that are displaced in steps that may do so.
        """
        return [{WHOLE: 1.0}] * steps

    def state_bytes(self, topology: Topology, layout: Layout, batch: int, head_dim: int, itemsize: int) -> StateBytes:
        """Return the bytes that one layer keeps on every rank of a group of several, including what is in flight
        between its calls."""
        return [{}] * topology.size

    def hold_at(self, kind: CallKind) -> None:
        """Make every call one of this kind, as far as possible. A call that follows no other is always whole."""

    def agree(self) -> None:
        """Wait for the decisions that `begin_step` has ranks gather. The next call would wait for them anyway."""

    def catch_up(self) -> None:
        """Receive what calls have sent and did not wait for."""
