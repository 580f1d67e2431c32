"""The displacement of tensors: attention does not wait for them, and uses those of the layer's last call instead.

`Displaced` wraps any codec. It keeps the newest value of every tensor. Before a layer's next call it receives what the
last call has sent without waiting. So the operand for a displaced tensor is the state of exactly one call before, and
results do not depend on timing. A codec may offer a better operand, see `ResidualCall`.

With `arrival: adaptive` a tensor is displaced at a call if it is expected to change by less than tau. The expected
change is that of the call before, which all its senders measured, times the relative move of the noise level. It is
also multiplied by LAG if the operand is the last value itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from cocodiff.attention.stateful import TENSORS, CallNotes, LayerState, StatefulCall, StatefulCodec
from cocodiff.attention.strategy import LayerKey
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.config.registry import CODECS, load
from cocodiff.exchange.codec import CODED, CallKind, Codec, StateBytes
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.outgoing import OUTPUT, Encoded, Outgoing, TensorFuture
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout

SAMPLING = 16  # one of this number of rows is measured, for tensors that are sent as they are
# An operand that is the last value costs as much as a continuation of a tensor that changes more by this factor.
LAG = 1.5
LATE = "late"  # purpose that the bytes of displaced tensors are also counted for in the trace


class DisplacedCall(StatefulCall):
    """An attention call in which some tensors are displaced: the call goes on with values of the layer's last call
    instead.

    Tensors that attention waits for are sent first. Displaced ones are encoded at once, on the calling thread, and only
    their codes wait for the thread that sends. So the measurements made while encoding are complete before the next
    call of the model.
    """

    _codec: Displaced
    displaced: frozenset[str]  # names of the tensors that attention does not wait for; set by `begin`
    measured: CallNotes | None = None  # measured changes; None if the inner codec measures, or nothing does

    def __init__(self, codec: Displaced, exchange: Exchange, layout: Layout, layer_key: LayerKey) -> None:
        super().__init__(codec, exchange, layout, layer_key)
        self.inner: Transfer
        if isinstance(codec.inner, StatefulCodec):
            self.inner = codec.inner.transfer(codec, exchange, layout, layer_key)
        else:
            self.inner = codec.inner.open(exchange, layout, layer_key)
        self._late: dict[str, Tensor] = {}  # displaced tensors, to be sent after those that attention waits for

    def begin(self, like_BLHD: Tensor) -> None:
        """Begin the call: decide which tensors are displaced, the same ones on every rank, and receive those that the
        layer's last call did not wait for.

        Args:
            like_BLHD: the first tensor to be sent, for its shape and dtype.
        """
        codec, state, inner = self._codec, self.state, self.inner
        begin = inner.begin if isinstance(inner, StatefulCall) else super().begin  # of the state that they share
        begin(like_BLHD)
        self.displaced = codec.displaced(state, inner)
        inner.displace(self.displaced)
        state.catch_up()
        if codec.measures and not inner.measures and state.follows:
            self.measured = codec.notes.of_call(like_BLHD.device, state)
        if not isinstance(inner, StatefulCall):  # a `StatefulCall` counts its calls itself
            codec.noted_step.add()
        codec.noted_step.displace(self.displaced, inner.share)

    # On the wire ------------------------------------------------------------------------------------------------------

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        return self.inner.cell_bytes(x_BLHD)

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        for name, x_BTHD in tensors.items():
            self._measure(name, x_BTHD, rows)
        return self.inner.encode(tensors, rows, ranks)

    def decode(self, received: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        found = self.inner.decode(received, rows, ranks)
        self.state.last |= zip(received, found, strict=True)
        return found

    def _measure(self, name: str, x_BTHD: Tensor, rows: slice) -> None:
        """Measure on every 16th row how much a tensor has changed since the layer's last call, and keep these rows for
        the next call.

        Do nothing if changes are not needed, or if the inner codec measures them itself.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
            x_BTHD: the rows given, T of the rows that this rank sends.
            rows: the place of these rows among all that this rank sends of the tensor.
        """
        if not self._codec.measures or self.inner.measures:
            return
        sampled = self.state.compared
        first = -rows.start % SAMPLING  # sampled rows have fixed places in the whole tensor
        some_BNHD = x_BTHD[:, first::SAMPLING]
        if name not in sampled:
            B, _, H, D = x_BTHD.shape
            sampled[name] = x_BTHD.new_empty(B, -(-self.sent_rows(name) // SAMPLING), H, D)
        start = (rows.start + first) // SAMPLING
        last_BNHD = sampled[name][:, start : start + some_BNHD.shape[1]]
        if self.measured is None:
            last_BNHD.copy_(some_BNHD)
        elif some_BNHD.shape[1]:
            lane = "main" if name in self.displaced else "codec"
            with self.exchange.trace.span(f"measure {name}", lane):
                self.kernels.note_change(some_BNHD, last_BNHD, self.measured.of(name))

    # When tensors are sent --------------------------------------------------------------------------------------------

    def open(self, tensors_BLHD: Mapping[str, Tensor]) -> None:
        super().open(tensors_BLHD)
        self.in_stages &= not self.displaced

    def post(self, tensors_BLHD: Mapping[str, Tensor]) -> dict[str, TensorFuture]:
        awaited = {name: x_BLHD for name, x_BLHD in tensors_BLHD.items() if name not in self.displaced}
        sent = super().post(awaited) if awaited else {}
        late = {name: x_BLHD for name, x_BLHD in tensors_BLHD.items() if name in self.displaced}
        operands = {name: self._operand_future(name, "".join(late)) for name in late}
        self._late |= late
        if self._late and self.all_sent:
            self._send_late(self._late)
            self._late = {}  # messages in flight keep this call alive until the next one
        return sent | operands

    def back(self, out_BSGD: Tensor) -> Tensor:
        if OUTPUT not in self.displaced:
            return super().back(out_BSGD)
        self._send_late({OUTPUT: out_BSGD})
        return self.inner.operand(OUTPUT, self.state.last[OUTPUT])

    def _operand_future(self, name: str, together: str) -> TensorFuture:
        """Return a future that is complete already: its value is what attention uses in place of a displaced tensor.

        Args:
            name: "q", "k" or "v".
            together: names of the tensors that are displaced with it, such as "qkv", for the trace.
        """
        x_BSGD = self.inner.operand(name, self.state.last[name])
        return TensorFuture(together, lambda _chunk: x_BSGD)  # it is present, and so not received in chunks

    def _send_late(self, tensors: Mapping[str, Tensor]) -> None:
        """Start sending tensors that no call waits for now. The layer's next call receives them, by a function added to
        `state.late`.

        The wait for them is a span of its own in the trace, without decoding.

        Args:
            tensors: the tensors to send, by name.
        """
        outgoing, trace, layout = Outgoing(self, tensors, purpose=LATE), self.exchange.trace, self.layout
        # Tokens and heads of what this rank sends of a tensor, and of what it receives.
        cells = layout.rows[self.rank] * sum(layout.heads) + sum(layout.rows) * layout.heads[self.rank]
        self.state.in_flight += sum(self.cell_bytes(x) * cells for x in tensors.values())
        outgoing.encode_now()
        pending = self.exchange.submit(outgoing)

        def receive() -> None:
            """Wait for the tensors' messages and decode the tensors. The layer's next call runs it."""
            with trace.span(f"wait for {outgoing.label}", layer=outgoing.layer):
                received = pending.wait().tensors
            outgoing.decode(received)

        self.state.late.append(receive)


class Displaced(StatefulCodec):
    """The codec for displacement: it wraps another codec, and attention calls go on without waiting for some of the
    tensors.

    In place of a tensor that is not waited for, attention uses the layer's last values of it.
    """

    transfer = DisplacedCall

    def __init__(self, settings: Config, exchange: Exchange | None = None, everyone: RankContext | None = None) -> None:
        """Wrap the codec that the setting `codec` names.

        Args:
            settings: the engine's settings.
            exchange: the exchange of this rank's Ulysses group; None for one rank, or for questions that need no
                messages.
            everyone: this rank among all ranks that share the sequence; None for one rank.
        """
        self.inner: Codec = (Codec if settings.codec == "none" else load(CODECS, settings.codec))(settings)
        if isinstance(self.inner, StatefulCodec):
            self.step_notes = self.inner.step_notes
        super().__init__(settings, exchange, everyone)
        self.measures = settings.arrival == "adaptive"  # True to measure how much tensors change
        self.agrees = self.measures or self.inner.agrees

    def note_whole(self) -> None:
        super().note_whole()
        self.noted_step.displace()

    def displaced(self, state: LayerState, inner: Transfer) -> frozenset[str]:
        """Return the names of the tensors that an attention call does not wait for, such as {"k", "v"}. It is empty at
        a first call.

        Args:
            state: what the layer keeps between calls, with the measured changes of its tensors.
            inner: the call of the wrapped codec.
        """
        if not state.follows or self.fine:
            return frozenset()
        if self.fixed_kind is not None:
            return frozenset(self.fixed_kind.displaced)
        if not self.measures:
            return frozenset(TENSORS)
        limit = self.settings.tau / state.pace
        if not inner.continues:
            limit /= LAG
        return frozenset(name for name in TENSORS if state.changes.get(name, math.inf) < limit)

    # For plans and recordings -----------------------------------------------------------------------------------------

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        return self.inner.sent_bytes(head_dim, itemsize, kind)

    def state_bytes(self, topology: Topology, layout: Layout, batch: int, head_dim: int, itemsize: int) -> StateBytes:
        """Return the bytes that a layer keeps on each rank between calls, exactly: one dictionary a rank.

        "reconstructions" are what the wrapped codec keeps. Without one they are the tensors that the last call
        received, and the rows by which changes are measured. "in_flight" are the encoded tensors of a call: sent ones
        until they have left, and received ones until the next call takes them.

        Args:
            topology: the ranks of the Ulysses group.
            layout: their tokens and heads.
            batch: rows of the batch.
            head_dim: channels of a head.
            itemsize: bytes of an element.
        """
        found, S, H = StateBytes(), sum(layout.rows), sum(layout.heads)
        cell, width = batch * head_dim * itemsize, batch * self.sent_bytes(head_dim, itemsize)
        inner = self.inner.state_bytes(topology, layout, batch, head_dim, itemsize)
        for of_inner, L, G in zip(inner, layout.rows, layout.heads, strict=True):
            sampled = 3 * -(-L // SAMPLING) * H + -(-S // SAMPLING) * G if self.measures else 0
            kept = {"reconstructions": (3 * S * G + L * H + sampled) * cell, **of_inner}
            found.append({**kept, "in_flight": len(TENSORS) * width * (L * H + S * G)})
        return found
