"""The lossless codec's arithmetic: 16-bit numbers as what they differ by from their prediction in units of the last
place.

For one channel of x with the values r1 of the last call (and r0 of the one before), all of one 16-bit type:

    prediction   p = r1, or r1 + f * (r1 - r0) with the factor f of a continuation: float32, one rounding for each
                 operation written here, denormal numbers kept, no fused multiply-add; then rounded to the type (to
                 nearest, ties to even). Where that float32 number is not finite, p has the bits of r1
    order        ord(b) = b where the sign bit of the 16 bits b is 0, else b with its other 15 bits inverted, as a
                 signed integer: the order of floats, in which -0 is next below +0. A bijection, its own inverse
    difference   d = ord(x) - ord(p) modulo 2**16, folded to z: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...

A number's difference is large where its size is small, for units are small there. So widths go by the exponent of the
prediction, which both ends know. With e, the bits of p's exponent as an integer:

A tensor travels in blocks, one for each peer. The numbers of a block, in the order of batch, token, head and channel,
are taken in groups of 16 and the groups in tiles of 32; the last ones may have fewer. A group has a code c:

    0            all z are 0; they take no bits
    1 to 14      z takes w = min(c - 1 + E - e, 16) bits, E being the largest e of the group: the smallest such c that
                 all z fit in
    15           all z take 16 bits

A block's stream is

    sizes        of every tile how many 16-bit words its numbers take, as 16 bits
    codes        4 bits a group, the first one in the lower half of a byte; filled up to a whole number of 16-bit words
    numbers      tile after tile the bits of all z without gaps, the lowest bit first; each tile is filled up to a whole
                 number of 16-bit words

Bytes are filled from their lowest bit on, and of a word the lower byte comes first. A stream takes at most
65/64 + 1/512 of the block's own bytes, and a few for its ends. docs/lossless.md tells how streams travel.
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
TILE = 32  # groups of a tile
PARTS = 16  # of a byte, in which it is noted how much a token and head needs
RAW = 15  # the code of a group whose numbers take 16 bits
CODED = (torch.bfloat16, torch.float16)  # what is coded; other types travel whole


class Cut(NamedTuple):
    """How a tensor [B, T, H, ...] is cut into blocks: dim 1 by rows or 2 by heads, so many each."""

    dim: int
    sizes: tuple[int, ...]

    def cells(self, shape: Sequence[int]) -> list[int]:
        """Tokens times heads of every block, over the batch, of a tensor [B, T, H, ...]."""
        B, T, H = shape[:3]
        return [B * size * (H if self.dim == 1 else T) for size in self.sizes]


class Sizes(NamedTuple):
    """Of a block's stream, in 16-bit words: where its codes begin, and where its numbers."""

    groups: int
    tiles: int
    numbers: int

    @classmethod
    def of(cls, cells: int, head_dim: int) -> Sizes:
        groups = math.ceil(cells * head_dim / RUN)
        tiles = math.ceil(groups / TILE)
        return cls(groups, tiles, tiles + math.ceil(groups / 4))


def most_bytes(cells: int, head_dim: int) -> int:
    """Of a block's stream, whatever its numbers are."""
    sizes = Sizes.of(cells, head_dim)
    return 2 * (sizes.numbers + RUN * sizes.groups)


def least_room(head_dim: int) -> int:
    """Bytes for a token and head in which sizes and codes of any block fit."""
    return 2 * Sizes.of(1, head_dim).numbers


def room_of(cells: int, width: int) -> int:
    """Bytes of a stream's first part, where a token and head has so many bytes: whole words."""
    return cells * width // 2 * 2


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
    over the older of what is known. needed_1: int64, raised to what a token and head need for every block to fit, in
    sixteenths of a byte.

    factor: of the continuation; None for the last values as they are."""
    D, predicted = x_BLHD.shape[-1], _predicted(known, factor)
    folded_BLHD = _folded(_order(x_BLHD) - _order(predicted))
    exponents = _exponents(predicted).split_with_sizes(cut.sizes, cut.dim)
    cells = cut.cells(x_BLHD.shape)
    places = stream_places(cells, D)
    for number, block in enumerate(folded_BLHD.split_with_sizes(cut.sizes, cut.dim)):
        stream = _stream(block.reshape(-1), exponents[number].reshape(-1), Sizes.of(cells[number], D))
        streams[places[number] : places[number] + len(stream)] = stream
        lengths_N[number] = len(stream)
        if cells[number]:
            needed_1.clamp_(min=-(-len(stream) * PARTS // cells[number]))
    _target(known).copy_(x_BLHD)


def stream_lengths(code_BLHW: Tensor, cut: Cut, head_dim: int, lengths_N: Tensor) -> Tensor | None:
    """Writes how long the streams of received blocks are, int64 [blocks], by the sizes of their tiles. Returns what
    else was found on the way, for `decode_lossless`."""
    cells = cut.cells(code_BLHW.shape)
    for number, block in enumerate(code_BLHW.split_with_sizes(cut.sizes, cut.dim)):
        sizes = Sizes.of(cells[number], head_dim)
        lengths_N[number] = 2 * (sizes.numbers + _words(block.reshape(-1), sizes.tiles).sum())
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
    D = known.last.shape[-1]
    predicted = _predicted(known, factor)
    order, exponents = _order(predicted), _exponents(predicted).split_with_sizes(cut.sizes, cut.dim)
    cells, taken = cut.cells(code_BLHW.shape), 0
    written = _target(known)
    blocks = zip(
        code_BLHW.split_with_sizes(cut.sizes, cut.dim), order.split_with_sizes(cut.sizes, cut.dim), strict=True
    )
    targets = written.split_with_sizes(cut.sizes, cut.dim)
    for number, (block, order_BLHD) in enumerate(blocks):
        room, length = room_of(cells[number], block.shape[-1]), int(lengths_N[number])
        stream = block.reshape(-1)[:room]
        if length > room:
            stream = torch.cat([stream, rests[taken : taken + length - room]])
            taken += length - room
        folded = _unpacked(stream, exponents[number].reshape(-1), Sizes.of(cells[number], D)).view(order_BLHD.shape)
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


def _exponents(x: Tensor) -> Tensor:
    """The bits of every number's exponent, int32."""
    mantissa = {torch.bfloat16: 7, torch.float16: 10}[x.dtype]
    return (_bits(x).to(torch.int32) & 0x7FFF) >> mantissa


def _in_groups(x: Tensor) -> Tensor:
    """[groups, RUN], the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % RUN)).view(-1, RUN)


def _further(exponents: Tensor) -> Tensor:
    """By how many bits a number's difference may be longer than that of its group's largest, [groups, RUN]. What the
    last group is filled up with takes none."""
    groups_GN = _in_groups(exponents)
    return groups_GN.amax(-1, keepdim=True) - groups_GN if len(groups_GN) else groups_GN


def _widths(code_G: Tensor, exponents: Tensor) -> Tensor:
    """Bits of every number, without those of the filling."""
    code_G1 = code_G[:, None]
    width_GN = (code_G1 - 1 + _further(exponents)).clamp(max=16)
    width_GN = torch.where(code_G1 == RAW, 16, torch.where(code_G1 == 0, 0, width_GN))
    return width_GN.flatten()[: len(exponents)]


def _places(width_N: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Of a block's numbers where each one's bits begin, from the first number's on; and the words of every tile."""
    tile_TN = torch.nn.functional.pad(width_N, (0, -len(width_N) % (RUN * TILE))).view(sizes.tiles, -1)
    words_T = (tile_TN.sum(-1) + 15) // 16
    begins_T = words_T.cumsum(0) - words_T
    begins_TN = 16 * begins_T[:, None] + tile_TN.cumsum(-1) - tile_TN
    return begins_TN.flatten()[: len(width_N)], words_T


def _stream(folded: Tensor, exponents: Tensor, sizes: Sizes) -> Tensor:
    """The stream of a block's numbers z, uint8."""
    if not sizes.groups:
        return folded.new_empty(0, dtype=torch.uint8)
    bits = torch.arange(17, dtype=torch.int32, device=folded.device)
    length = (folded[:, None] >= (1 << bits[:16])).sum(-1)  # of each z
    code_G = 1 + (_in_groups(length) - _further(exponents)).amax(-1).clamp(min=0)
    code_G = torch.where(code_G >= RAW, RAW, code_G)
    code_G = torch.where(_in_groups(folded).amax(-1) == 0, 0, code_G)
    width_N = _widths(code_G, exponents)
    begins_N, words_T = _places(width_N, sizes)
    in_use = bits[:16] < width_N[:, None]
    stream_bits = folded.new_zeros(16 * int(words_T.sum()), dtype=torch.uint8)
    places = (begins_N[:, None] + bits[:16])[in_use]
    stream_bits[places] = ((folded[:, None] >> bits[:16]) & 1)[in_use].to(torch.uint8)
    halves = torch.nn.functional.pad(code_G.to(torch.uint8), (0, -len(code_G) % 4))
    codes = halves[0::2] | halves[1::2] << 4
    numbers = (stream_bits.view(-1, 8) << bits[:8].to(torch.uint8)).sum(-1, dtype=torch.uint8)
    return torch.cat([words_T.to(torch.int16).view(torch.uint8), codes, numbers])


def _words(stream: Tensor, tiles: int) -> Tensor:
    """How many words every tile takes, int32."""
    return stream[: 2 * tiles].clone().view(torch.int16).to(torch.int32) & 0xFFFF


def _unpacked(stream: Tensor, exponents: Tensor, sizes: Sizes) -> Tensor:
    """The numbers z of a stream, int32."""
    if not sizes.groups:
        return exponents
    packed = stream[2 * sizes.tiles : 2 * sizes.numbers]
    code_G = torch.stack([packed & 15, packed >> 4], -1).flatten()[: sizes.groups].to(torch.int32)
    width_N = _widths(code_G, exponents)
    begins_N, _ = _places(width_N, sizes)
    bits = torch.arange(16, dtype=torch.int32, device=stream.device)
    stream_bits = ((stream[2 * sizes.numbers :, None] >> bits[:8].to(torch.uint8)) & 1).flatten()
    in_use = bits < width_N[:, None]
    found = torch.zeros(in_use.shape, dtype=torch.int32, device=stream.device)
    found[in_use] = stream_bits[(begins_N[:, None] + bits)[in_use]].to(torch.int32)
    return (found << bits).sum(-1, dtype=torch.int32)
