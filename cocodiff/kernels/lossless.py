"""The lossless codec's arithmetic: a 16-bit tensor as what it differs by from its prediction in units of the last place.

For one channel of x with the values r1 of the last call (and r0 of the one before), all of one 16-bit type:

    prediction   p = r1, or r1 + f * (r1 - r0) with the factor f of a continuation: float32, one rounding for each
                 operation written here, denormal numbers kept, no fused multiply-add; then rounded to the type (to
                 nearest, ties to even). Where that float32 number is not finite, p has the bits of r1
    order        ord(b) = b where the sign bit of the 16 bits b is 0, else b with its other 15 bits inverted, as a
                 signed integer: the order of floats, in which -0 is next below +0. A bijection, its own inverse
    difference   d = ord(x) - ord(p) modulo 2**16, folded to z: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...

A tensor travels in blocks, one for each peer. The numbers z of a block, in the order of batch, token, head and channel,
are taken in groups of 16, the last one filled up with zeros. A group has the width w: the bits of its largest z, 16
in the place of 15. A block's stream is

    widths       4 bits a group, the first one in the lower half of a byte, 15 for 16; filled up to an even number of
                 bytes
    planes       of every group w numbers of 16 bits, least significant byte first: bit i of plane j is bit j of the
                 group's z number i

which is at most 65/64 of the block's own bytes, and a few for its ends. See docs/lossless.md for how streams travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cocodiff.kernels.residual import Reconstructions

RUN = 16  # numbers of a group
CODED = (torch.bfloat16, torch.float16)  # what is coded; other types travel whole


class Cut(NamedTuple):
    """How a tensor [B, T, H, ...] is cut into blocks: dim 1 by rows or 2 by heads, so many each."""

    dim: int
    sizes: tuple[int, ...]

    def cells(self, shape: Sequence[int]) -> list[int]:
        """Tokens times heads of every block, over the batch, of a tensor [B, T, H, ...]."""
        B, T, H = shape[:3]
        return [B * size * (H if self.dim == 1 else T) for size in self.sizes]


def groups_of(cells: int, head_dim: int) -> int:
    return math.ceil(cells * head_dim / RUN)


def widths_bytes(groups: int) -> int:
    """Of a stream's widths."""
    return (groups + 3) // 4 * 2


def most_bytes(cells: int, head_dim: int) -> int:
    """Of a block's stream, whatever its numbers are."""
    groups = groups_of(cells, head_dim)
    return widths_bytes(groups) + 2 * RUN * groups


def least_room(head_dim: int) -> int:
    """Bytes for a token and head in which the widths of any block fit."""
    return 2 * math.ceil(head_dim / (4 * RUN))


def stream_places(cells: Sequence[int], head_dim: int) -> list[int]:
    """Where blocks' streams begin in a buffer that has room for any, in bytes; at the end its size."""
    return list(accumulate((most_bytes(count, head_dim) for count in cells), initial=0))


def encode_lossless(
    x_BLHD: Tensor,
    known: Reconstructions,
    factor: float | None,
    cut: Cut,
    streams: Tensor,
    lengths_N: Tensor,
    needed_1: Tensor,
) -> None:
    """Writes the streams of all blocks, each where `stream_places` says; their lengths in bytes, int64 [blocks]; and x
    over the older of what is known. needed_1: int64, raised to the bytes for a token and head that every block fits in.

    factor: of the continuation; None for the last values as they are."""
    D = x_BLHD.shape[-1]
    folded_BLHD = _folded(_order(x_BLHD) - _order(_predicted(known, factor)))
    cells = cut.cells(x_BLHD.shape)
    places = stream_places(cells, D)
    for number, block in enumerate(folded_BLHD.split_with_sizes(cut.sizes, cut.dim)):
        stream = _stream(block.reshape(-1))
        streams[places[number] : places[number] + len(stream)] = stream
        lengths_N[number] = len(stream)
        if cells[number]:
            needed_1.clamp_(min=math.ceil(len(stream) / cells[number]))
    _target(known).copy_(x_BLHD)


def stream_lengths(code_BLHW: Tensor, cut: Cut, head_dim: int, lengths_N: Tensor) -> Tensor | None:
    """Writes how long the streams of received blocks are, int64 [blocks], by their widths. Returns what else was found
    on the way, for `decode_lossless`."""
    cells = cut.cells(code_BLHW.shape)
    for number, block in enumerate(code_BLHW.split_with_sizes(cut.sizes, cut.dim)):
        groups = groups_of(cells[number], head_dim)
        lengths_N[number] = widths_bytes(groups) + 2 * int(_widths(block.reshape(-1), groups).sum())
    return None


def decode_lossless(
    code_BLHW: Tensor,
    rests: Tensor,
    lengths_N: Tensor,
    found: Tensor | None,
    known: Reconstructions,
    factor: float | None,
    cut: Cut,
) -> None:
    """Writes the tensor over the older of what is known, from the first part of every block's stream and the rests,
    uint8, one behind the other in the order of the blocks. lengths_N, found: of `stream_lengths`."""
    B, _, _, D = known.last.shape
    order = _order(_predicted(known, factor))
    cells, taken = cut.cells(code_BLHW.shape), 0
    written = _target(known)
    blocks = zip(code_BLHW.split_with_sizes(cut.sizes, cut.dim), order.split_with_sizes(cut.sizes, cut.dim), strict=True)
    targets = written.split_with_sizes(cut.sizes, cut.dim)
    for number, (block, order_BLHD) in enumerate(blocks):
        room, length = block.numel(), int(lengths_N[number])
        stream = block.reshape(-1)
        if length > room:
            stream = torch.cat([stream, rests[taken : taken + length - room]])
            taken += length - room
        folded = _unpacked(stream, groups_of(cells[number], D))[: cells[number] * D].view(order_BLHD.shape)
        bits = _order_of_bits(_wrapped(order_BLHD + _unfolded(folded)))
        targets[number].copy_(bits.to(torch.int16).view(written.dtype))


def _predicted(known: Reconstructions, factor: float | None) -> Tensor:
    """The prediction, of the tensors' own type."""
    last = known.last
    if factor is None or known.before is None:
        return last
    newest = last.float()
    forecast = newest + (newest - known.before.float()) * torch.tensor(factor, dtype=torch.float32, device=last.device)
    bits = torch.where(torch.isfinite(forecast), forecast.to(last.dtype).view(torch.int16), _bits(last))
    return bits.view(last.dtype)


def _target(known: Reconstructions) -> Tensor:
    return known.last if known.before is None else known.before


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def _order(x: Tensor) -> Tensor:
    """int32."""
    return _order_of_bits(_bits(x).to(torch.int32))


def _order_of_bits(bits: Tensor) -> Tensor:
    """Its own inverse, of int32 that hold 16 bits with their sign."""
    return bits ^ ((bits >> 15) & 0x7FFF)


def _wrapped(x: Tensor) -> Tensor:
    """int32 modulo 2**16, with the sign of 16 bits."""
    return ((x + 0x8000) & 0xFFFF) - 0x8000


def _folded(difference: Tensor) -> Tensor:
    wrapped = _wrapped(difference)
    return ((wrapped << 1) ^ (wrapped >> 15)) & 0xFFFF


def _unfolded(folded: Tensor) -> Tensor:
    return (folded >> 1) ^ -(folded & 1)


def _stream(folded: Tensor) -> Tensor:
    """The stream of a block's numbers z, uint8."""
    groups_GN = torch.nn.functional.pad(folded, (0, -len(folded) % RUN)).view(-1, RUN)
    numbers = torch.arange(RUN, dtype=torch.int32, device=folded.device)
    code_G = (groups_GN.amax(-1, keepdim=True) >= 1 << numbers).sum(-1).clamp_(max=15) if len(groups_GN) else groups_GN
    planes_GJ = (((groups_GN[:, None] >> numbers[:, None]) & 1) << numbers).sum(-1).to(torch.int32)
    words = planes_GJ[_in_use(code_G.flatten())]
    halves_G = torch.nn.functional.pad(code_G.flatten().to(torch.uint8), (0, -len(code_G) % 4))
    widths = halves_G[0::2] | halves_G[1::2] << 4
    return torch.cat([widths, words.to(torch.int16).view(torch.uint8)])


def _widths(stream: Tensor, groups: int) -> Tensor:
    """Of every group how many planes it has."""
    packed = stream[: widths_bytes(groups)]
    code_G = torch.stack([packed & 15, packed >> 4], -1).flatten()[:groups].to(torch.int32)
    return code_G + (code_G == 15)


def _in_use(code_G: Tensor) -> Tensor:
    """Which planes of every group are there."""
    widths_G = code_G + (code_G == 15)
    return torch.arange(RUN, device=code_G.device) < widths_G[:, None]


def _unpacked(stream: Tensor, groups: int) -> Tensor:
    """The numbers z of a stream, int32, those of the filling too."""
    widths_G = _widths(stream, groups)
    start = widths_bytes(groups)
    words = stream[start : start + 2 * int(widths_G.sum())].clone().view(torch.int16).to(torch.int32) & 0xFFFF
    numbers = torch.arange(RUN, dtype=torch.int32, device=stream.device)
    planes_GJ = stream.new_zeros(groups, RUN, dtype=torch.int32)
    planes_GJ[numbers < widths_G[:, None]] = words
    return (((planes_GJ[:, None] >> numbers[:, None]) & 1) << numbers).sum(-1).to(torch.int32).flatten()
