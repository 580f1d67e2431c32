"""One attention call's tensors as they travel: what is sent in their place, and what the receiver makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cocodiff.topology.layout import Layout
from cocodiff.wire.blocks import EncodedBlocks, Payload


class Encoded(NamedTuple):
    """Some tensors as they travel: payloads [B, L, H, W] of one dtype, and the layout that tells how many rows L of
    every rank they have."""

    payloads: Sequence[Payload | EncodedBlocks]
    layout: Layout


class CodedCall:
    """This one sends tensors as they are. Subclasses change what they need; routes, chunks and sizes follow from what
    `encode` returns."""

    def __init__(self, layout: Layout) -> None:
        """layout: of the tensors themselves."""
        self.layout = layout

    def begin(self, like_BLHD: Tensor) -> None:
        """Called once, on the thread that attends, before the first tensor is sent. like_BLHD: that tensor."""

    def comes_in_stages(self) -> None:
        """Told before the first tensor is sent, where tensors come chunk by chunk: each chunk once and in order, those
        of the output the last one first."""

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        """Bytes that one token of one head of a tensor like this takes on the wire, over the batch."""
        return len(x_BLHD) * x_BLHD.shape[-1] * x_BLHD.element_size()

    def encode(self, tensors_BLHD: Mapping[str, Tensor]) -> Encoded:
        """The payloads in the tensors' place. Runs on a lane, where it may wait for what it depends on."""
        return Encoded(list(tensors_BLHD.values()), self.layout)

    def decode(self, received_BSGW: Mapping[str, Tensor], coded: Layout, rows: slice) -> list[Tensor]:
        """The tensors [B, S, G, D] of all rows of this rank's heads, from payloads of which `rows` have just arrived.
        coded: the layout of what `encode` gave. Runs on the thread that attends."""
        return list(received_BSGW.values())

    def encode_output(self, out_BTGD: Tensor, rows: slice) -> Tensor | EncodedBlocks:
        """The payload in the place of some rows of attention's output, [B, T, G, W]: of `rows` of the sequence.
        Runs on a lane."""
        return out_BTGD

    def decode_output(self, received_BLHW: Tensor) -> Tensor:
        """All heads of this rank's rows of the output, [B, L, H, D]."""
        return received_BLHW

    # Where calls do not wait for all that they send, see `attention/arrival.py` ---------------------------------------

    share = 1.0  # of a whole tensor's bytes that each takes on the wire
    measures = False  # whether encoding notes by how much tensors change
    noted: Any = None  # where encoding notes how it went

    def continues(self, name: str) -> bool:
        """Whether `operand` goes on from the last values of a tensor, rather than being the last one."""
        return False

    def displace(self, names: frozenset[str]) -> None:
        """Told once the call has begun: these tensors are not waited for."""

    def operand(self, name: str, last: Tensor) -> Tensor:
        """The operand for a displaced tensor, of which the last call left `last`."""
        return last
