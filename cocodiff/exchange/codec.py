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
    """The position of one call of the model in denoising: which image, which step, which noise level."""

    run: int  # number of the run of the model, one for each image
    step: int  # index of the step in the run
    steps: int | None  # number of steps; None if unknown
    sigma: float | None = None  # the scheduler's noise level, or a bare transformer's timestep; None: neither


class CallKind(NamedTuple):
    """A kind of attention calls that send the same amount, so that plans give them the same time."""

    whole: bool = False  # True for a run's first calls, without a prediction: tensors whole, or coded in most bits
    stable: float = 0.0  # the fraction of tokens that V-Major leaves unsent
    fine: bool = False  # True for a run's last steps, which are coded in more bits
    displaced: str = ""  # names of the tensors that no call waits for, as "qkv" ("o" is attention's output)


WHOLE, CODED = CallKind(whole=True), CallKind()
StepKinds = list[dict[CallKind, float]]  # for every step, the kinds of its calls with their fraction of the calls
# For every step, the fraction of its calls by the names of the tensors that they do not wait for, as {"qkv": 1.0}.
TensorSets = Sequence[Mapping[str, float]]
StateBytes = list[Mapping[str, int]]  # for every rank of a group, bytes by field of `RankMemory`


class StepNotes(Protocol):
    """The interface of records of what a codec or step cache did in one step, over one rank's layers."""

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """Return the records of several ranks for one step as columns of the drift profile: values by name of the
        column.

        Args:
            parts: the record of each rank.
        """


def merge_notes(reports: Sequence[Mapping[int, StepNotes]]) -> list[dict[str, Any]]:
    """Return the drift profile of a run: a list of rows, one for each step, as dictionaries.

    A row has "step" and the columns of each class of record, see `StepNotes.merged`.

    Args:
        reports: records by index of the step, from every rank's codecs (`Codec.report`) and step caches.
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
    """The rule by which attention calls encode, send and decode tensors. This base class sends every tensor as it is.

    A codec belongs to one rank and lives as long as the engine. It keeps nothing between calls unless a subclass does.
    """

    # With memory held, a run is checked for memory before it starts. A mesh then has no ring if there are enough heads,
    # because a ring's messages are not coded.
    keeps_state = False  # True if memory is held between calls
    agrees = False  # True if ranks gather decisions in each coded call of the model, which waits for them
    transfer: Callable[..., Transfer] = Transfer  # class of the attention calls of layers that are coded
    steps_to_settle = 0  # number of coded calls after a whole one before all further calls cost the same
    step_info = StepInfo(-1, 0, None)  # position of the model's current call

    def __init__(
        self, settings: Config | None = None, exchange: Exchange | None = None, everyone: RankContext | None = None
    ) -> None:
        """Create the codec of one rank of a Ulysses group.

        Args:
            settings: the engine's settings; None for the defaults.
            exchange: this rank's end of the group's exchange; None for one rank, or for questions that need no
                messages.
            everyone: this rank among all ranks that share the sequence: its group's and, with a ring, those of the
                other groups. None without an exchange.
        """
        self.settings, self._exchange = settings or Config(), exchange
        self._report: dict[int, Any] = {}

    def open(self, exchange: Exchange, layout: Layout, layer_key: Any) -> Transfer:
        """Return the object that encodes, sends and decodes the tensors of one attention call. They are sent as they
        are if the layer is not coded.

        Args:
            exchange: this rank's end of the exchange.
            layout: the tokens and heads of every rank in the call.
            layer_key: the layer and guidance branch.
        """
        return self.transfer(exchange, layout, layer_key.kind)

    def begin_step(self, step_info: StepInfo) -> None:
        """Begin a call of the model: of another run, of another step, or of another guidance branch in the same step.

        A new run first frees all memory, because an image must not depend on the one before. The engine calls this on
        every rank before each call of the model.

        Args:
            step_info: the position of the call.
        """
        if step_info.run != self.step_info.run:  # a new image must not depend on the last one
            self.end()
        self.step_info = step_info

    def forget(self, layer_key: Any) -> None:
        """Free what is kept of a layer for a guidance branch, because other ranks will make its next call.

        Args:
            layer_key: the layer and guidance branch (`LayerKey`).
        """

    def end(self, drain: bool = True) -> None:
        """Free all memory. It is called when the engine is left, and before a new run.

        Args:
            drain: True to receive messages in flight first; False after a failure, when they may never arrive.
        """

    def bytes_held(self) -> int:
        """Return the number of bytes held between calls now, including messages in flight, which count as if all of
        them were held."""
        return 0

    def report(self) -> Mapping[int, StepNotes]:
        """Return the records of every step so far, by index of the step. `merge_notes` merges those of all ranks."""
        return self._report

    def forget_report(self) -> None:
        """Delete the records of all steps."""
        self._report.clear()

    # For plans and recordings. A plan asks a codec without an exchange. -----------------------------------------------

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        """Return the bytes that one token takes in messages for one head, of each of q, k, v and the output.

        Args:
            head_dim: channels of a head.
            itemsize: bytes of an element of the tensors.
            kind: the kind of attention calls.
        """
        return head_dim * itemsize

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the number of rows that every rank of a Ulysses group sends, of each of q, k and v; one number a rank.

        Args:
            topology: the ranks of the group.
            layout: their tokens and heads.
            kind: the kind of attention calls.
        """
        return layout.rows

    def gathered(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the bytes that every rank sends each other rank in a call besides tensors, for one row of the batch;
        one number a rank.

        Args:
            topology: the ranks of the Ulysses group.
            layout: their tokens and heads.
            kind: the kind of attention calls.
        """
        return [0.0] * topology.size

    def choosing(self, kind: CallKind, tiles: int) -> tuple[int, int, int]:
        """Return the work before v is sent, as three numbers: launches, gathers of all ranks, and waits of the host for
        the device.

        Args:
            kind: the kind of attention calls.
            tiles: number of tiles of a card.
        """
        return 0, 0, 0

    def kinds_of_steps(self, steps: int, stable: float, displaced: TensorSets) -> StepKinds:
        """Return, for every step of a run, the kinds of its attention calls with their fraction of the calls.

        Args:
            steps: number of steps.
            stable: fraction of the tokens that V-Major does not send, if a threshold decides.
            displaced: for every step, the fraction of calls by the tensors that they do not wait for, if that step may
                do so.
        """
        return [{WHOLE: 1.0}] * steps

    def state_bytes(self, topology: Topology, layout: Layout, batch: int, head_dim: int, itemsize: int) -> StateBytes:
        """Return the bytes that one layer keeps on every rank between its calls, messages in flight included: a
        dictionary a rank.

        Its keys are fields of the planner's `RankMemory`, such as "reconstructions".

        Args:
            topology: the ranks of the Ulysses group, more than one.
            layout: their tokens and heads.
            batch: rows of the batch.
            head_dim: channels of a head.
            itemsize: bytes of an element.
        """
        return [{}] * topology.size

    def hold_at(self, kind: CallKind) -> None:
        """Make every attention call one of a given kind, as far as possible, so that it can be recorded or timed.

        A call without a call before it is always whole.
        """

    def agree(self) -> None:
        """Wait for the decisions that `begin_step` has ranks gather, so that a timed call need not. Otherwise the next
        call waits for them."""

    def catch_up(self) -> None:
        """Receive and decode the tensors that calls have sent and did not wait for."""
