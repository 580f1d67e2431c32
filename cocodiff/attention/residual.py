"""The residual codec: a tensor is sent as its difference from a prediction, in 2, 4 or 8 bits a channel.

Sender and receiver keep the same reconstruction of q, k, v and the output of every layer, and both add to it what was
sent. So errors do not add up: the next residual contains them. A code is a tensor of bytes with the same rows and
heads, which every exchange carries without decoding it. The rank's own block is coded too, so that results do not
depend on the number of ranks. `cocodiff.kernels.residual` defines the arithmetic, and docs/exchange.md when tensors are
sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from cocodiff.attention.stateful import TENSORS, End, StatefulCall, StatefulCodec
from cocodiff.exchange.codec import CODED, CallKind
from cocodiff.exchange.outgoing import Encoded
from cocodiff.kernels.residual import GROUP, Onward, Prediction, coded_width

# Bits per channel by setting `codec`; None: tensors are sent as they are.
BITS: dict[str, int | None] = {"none": None, "int8": 8, "int4": 4, "int2": 2}
FINEST = 8  # most bits per channel
FIRST_BITS = 4  # factor of the bits in a first call, which has no prediction; above FINEST it is sent as it is
# The operand of a displaced tensor is continued half as far as the prediction that is coded against, because its error
# is not corrected within the call.
DAMPING = 0.5


class ResidualCall(StatefulCall):
    """An attention call whose tensors are sent as coded differences from predicted values, in a few bits a channel."""

    bits: int | None  # bits of a code per channel; None if tensors are sent as they are; set by `begin`
    how: Prediction  # the way in which coded tensors are predicted, from zero in a first call; set by `begin`
    measures = True  # encoding measures how much tensors change
    displaced: frozenset[str] = frozenset()  # tensors that no call waits for

    def begin(self, like_BLHD: Tensor) -> None:
        super().begin(like_BLHD)
        self._head_dim, self._dtype = like_BLHD.shape[-1], like_BLHD.dtype
        codec, state, settings = self._codec, self.state, self._codec.settings
        first = not state.follows
        self.bits = None if first and state.failed else bits_of(settings.codec, first, codec.fine)
        if self.bits is not None:
            self.continues = state.factor > 0 and settings.predictor == "taylor"
            measure = settings.arrival == "adaptive" and state.follows > 0  # in the pass that encodes
            self.how = Prediction(state.factor, self.continues, measure)
            self.share = (self.bits + 8 / GROUP) / 16  # relative to 16-bit numbers in heads of whole groups
            self.noted = codec.notes.of_call(like_BLHD.device, state)
        codec.noted_step.add(self.bits is not None, self.share, len(TENSORS) * self.continues)

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        return len(x_BLHD) * width_of(x_BLHD.shape[-1], x_BLHD.element_size(), self.bits)

    # Displaced calls, see `DisplacedCall` -----------------------------------------------------------------------------

    def displace(self, names: frozenset[str]) -> None:
        """Allocate memory for the values that attention will use in place of displaced tensors.

        If values are continued linearly, they are written when the last call's tensors are decoded, in the same pass.

        Args:
            names: the displaced tensors, such as {"q", "k"}.
        """
        self.displaced, self.state.onward = names, {}
        for name in names if self.continues else ():
            newest_BTHD = self.state.received[name].newest(self.number)
            self.state.onward[name] = Onward(DAMPING * self.how.factor, torch.empty_like(newest_BTHD))
        self._operands = dict(self.state.onward)

    def operand(self, name: str, last: Tensor) -> Tensor:
        # Removed, because messages in flight keep this call alive until the next one.
        onward = self._operands.pop(name, None)
        if onward is None:
            return last
        if self.state.onward.pop(name, None) is not None:  # nothing was decoded since
            last_BTHD, before_BTHD = self.state.received[name].known(self.number, slice(None))
            assert before_BTHD is not None, "what is continued has one before"
            self.kernels.continue_linearly(last_BTHD, before_BTHD, onward)
        return onward.out_BLHD

    # On the wire ------------------------------------------------------------------------------------------------------

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        return Encoded([self._sent(name, x, rows) for name, x in tensors.items()], self.layout)

    def decode(self, received: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        return [self._received(name, x, rows) for name, x in received.items()]

    def _sent(self, name: str, x_BTHD: Tensor, rows: slice) -> Tensor:
        """Return the code of some rows of a tensor, uint8 [B, T, H, W], and update the values that both ends keep of
        it.

        Return the rows themselves if this call's tensors are sent as they are.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
            x_BTHD: the T rows to send.
            rows: their place among all rows that this rank sends of the tensor.
        """
        ends = self.state.sent
        if name not in ends:
            ends[name] = self._end(x_BTHD, self.sent_rows(name))
        if self.bits is None:
            ends[name].written(self.number)[:, rows] = x_BTHD
            return x_BTHD
        assert self.noted is not None, "a coded call has notes"
        code_BTHW = x_BTHD.new_empty(*x_BTHD.shape[:3], coded_width(self._head_dim, self.bits), dtype=torch.uint8)
        known = ends[name].known(self.number, rows)
        with self._span("encode", name):
            self.kernels.encode_residual(x_BTHD, known, self.how, self.bits, code_BTHW, self.noted.of(name))
        return code_BTHW

    def _end(self, like_BTHW: Tensor, length: int) -> End:
        """Allocate the buffers of what this rank keeps of a tensor between calls, at the tensor's first call.

        In a coded call the newest values are zero, as both ends of the link have to predict the same. All others are
        uninitialised.

        Args:
            like_BTHW: some rows of the tensor or of its code, for batch, heads and device.
            length: number of rows of the whole tensor.
        """
        B, _, H, _ = like_BTHW.shape
        new = like_BTHW.new_empty if self.bits is None else like_BTHW.new_zeros
        last_BTHD = new(B, length, H, self._head_dim, dtype=self._dtype)
        return End([*(torch.empty_like(last_BTHD) for _ in range(self._codec.kept - 1)), last_BTHD])

    def _span(self, work: str, name: str) -> AbstractContextManager[None]:
        """Return a span of the trace for encoding or decoding a tensor. Displaced tensors count as work of the main
        thread.

        Args:
            work: "encode" or "decode".
            name: "q", "k", "v" or "o" (attention's output).
        """
        return self.exchange.trace.span(f"{work} {name}", "main" if name in self.displaced else "codec", self.layer)

    def _received(self, name: str, x_BSGW: Tensor, rows: slice) -> Tensor:
        """Decode rows that have arrived into the values that are kept of a tensor from call to call. Return all its
        rows, [B, S, G, D].

        Rows that have not arrived yet still hold older values. In a call without codes, return `x_BSGW` itself, which
        becomes the kept values.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
            x_BSGW: the memory of all rows: codes of W bytes, or the tensor itself if it was sent as it is.
            rows: the rows that have arrived since the last call of this method.
        """
        ends = self.state.received
        if self.bits is None:
            if name not in ends:  # otherwise these are more rows in the same memory
                ends[name] = End([x_BSGW, *(torch.empty_like(x_BSGW) for _ in range(self._codec.kept - 1))])
            return x_BSGW
        if name not in ends:
            ends[name] = self._end(x_BSGW, x_BSGW.shape[1])
        code_BTGW, known = x_BSGW[:, rows], ends[name].known(self.number, rows)
        onward = self.state.onward.pop(name, None)
        assert onward is None or code_BTGW.shape == x_BSGW.shape, "what no call waits for comes in one piece"
        with self._span("decode", name):
            factor = self.how.factor if self.continues else None
            self.kernels.decode_residual(code_BTGW, known, factor, self.bits, onward)
        return ends[name].written(self.number)


class Residual(StatefulCodec):
    """The codec that sends tensors as coded differences ("residuals") from predicted values. It is lossy.

    It reads the settings codec, predictor, fine_steps and arrival, see `Config`.
    """

    transfer = ResidualCall

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        return width_of(head_dim, itemsize, bits_of(self.settings.codec, kind.whole, kind.fine))


def width_of(head_dim: int, itemsize: int, bits: int | None) -> int:
    """Return the number of bytes that one head of one token takes in messages.

    Args:
        head_dim: channels of a head.
        itemsize: bytes of an element of the tensor.
        bits: bits of the code per channel; None for a tensor that is sent as it is.
    """
    return head_dim * itemsize if bits is None else coded_width(head_dim, bits)


def bits_of(codec: str, first: bool, fine: bool) -> int | None:
    """Return the number of bits of each channel's code in a call; None if its tensors are sent as they are.

    Args:
        codec: the setting: "none", "int8", "int4" or "int2".
        first: True for a layer's first call, which has no values to predict from. It has FIRST_BITS times the bits of
            the setting, and is sent as it is if these are more than FINEST.
        fine: True in the last steps of a run, which have twice the bits of the setting, but at most FINEST.
    """
    bits = BITS[codec]
    if bits is None:
        return None
    if first:
        return FIRST_BITS * bits if FIRST_BITS * bits <= FINEST else None
    return min(2 * bits, FINEST) if fine else bits
