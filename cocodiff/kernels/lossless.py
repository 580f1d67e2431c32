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
are taken in groups of 8 and the groups in tiles of 64; the last ones may have fewer. A group has a code c:

    0            all z are 0; they take no bits
    1 to 14      z takes w = min(c - 1 + E - e, 16) bits, E being the largest e of the group: the smallest such c that
                 all z fit in
    15           all z take 16 bits

A block's stream is

    sizes        of every tile how many 16-bit words it takes, as 16 bits
    tiles        of each the codes, 4 bits a group, the first one in the lower half of a byte, filled up to a whole
                 number of 16-bit words; then the bits of all z without gaps, the lowest bit first, filled up likewise.
                 A tile that would take as many words as it has numbers, or more, has no codes: z of 16 bits alone

Bytes are filled from their lowest bit on, and of a word the lower byte comes first. A stream takes at most 1 + 1/512 of
the block's own bytes, and a few for its end. docs/exchange.md tells how streams travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cocodiff.kernels.residual import Reconstructions

RUN = 8  # numbers of a group
TILE = 64  # groups of a tile
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


def tiles_of(cells: int, head_dim: int) -> int:
    return math.ceil(cells * head_dim / (RUN * TILE))


def most_bytes(cells: int, head_dim: int) -> int:
    """Of a block's stream, whatever its numbers are."""
    return 2 * (tiles_of(cells, head_dim) + cells * head_dim)


def least_room(head_dim: int) -> int:
    """Bytes for a token and head in which the sizes of any block's tiles fit."""
    return 2 * tiles_of(1, head_dim)


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
        stream = _stream(block.reshape(-1), exponents[number].reshape(-1))
        streams[places[number] : places[number] + len(stream)] = stream
        lengths_N[number] = len(stream)
        if cells[number]:
            needed_1.clamp_(min=-(-len(stream) * PARTS // cells[number]))
    known.older.copy_(x_BLHD)


def stream_lengths(code_BLHW: Tensor, cut: Cut, like_BLHD: Tensor, lengths_N: Tensor) -> Tensor | None:
    """Writes how long the streams of received blocks are, int64 [blocks], by the sizes of their tiles. Returns what
    else was found on the way, for `decode_lossless`. code: the blocks' first parts lie one behind the other in it.
    like: what they are decoded to."""
    cells = cut.cells(code_BLHW.shape)
    for number, part in enumerate(_first_parts(code_BLHW, cells)):
        words_T = _words(part, tiles_of(cells[number], like_BLHD.shape[-1]))
        lengths_N[number] = 2 * (len(words_T) + words_T.sum())
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
    uint8, one behind the other in the order of the blocks. code_BLHW, lengths_N, found: of `stream_lengths`."""
    predicted, written = _predicted(known, factor), known.older
    exponents = _exponents(predicted).split_with_sizes(cut.sizes, cut.dim)
    orders = _order(predicted).split_with_sizes(cut.sizes, cut.dim)
    targets = written.split_with_sizes(cut.sizes, cut.dim)
    cells, taken = cut.cells(code_BLHW.shape), 0
    for number, part in enumerate(_first_parts(code_BLHW, cells)):
        room, length, order_BLHD = room_of(cells[number], code_BLHW.shape[-1]), int(lengths_N[number]), orders[number]
        stream = part[:room]
        if length > room:
            stream = torch.cat([stream, rests[taken : taken + length - room]])
            taken += length - room
        folded = _unpacked(stream, exponents[number].reshape(-1)).view(order_BLHD.shape)
        bits = _order_of_bits(_wrapped(order_BLHD + _unfolded(folded)))
        targets[number].copy_(bits.to(torch.int16).view(written.dtype))


def _first_parts(code_BLHW: Tensor, cells: Sequence[int]) -> Sequence[Tensor]:
    width = code_BLHW.shape[-1]
    return code_BLHW.flatten().split_with_sizes([count * width for count in cells])


def _predicted(known: Reconstructions, factor: float | None) -> Tensor:
    """The prediction, of the tensors' own type."""
    last = known.last
    if factor is None or known.before is None:
        return last
    newest = last.float()
    forecast = newest + (newest - known.before.float()) * torch.tensor(factor, dtype=torch.float32, device=last.device)
    bits = torch.where(torch.isfinite(forecast), forecast.to(last.dtype).view(torch.int16), _bits(last))
    return bits.view(last.dtype)


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


class _Tiles:
    """How the tiles of a block are made up, by the number of its numbers."""

    def __init__(self, numbers: int, like: Tensor) -> None:
        tiles = math.ceil(numbers / (RUN * TILE))
        in_order = torch.arange(tiles, dtype=torch.int32, device=like.device)
        self.numbers_T = (numbers - RUN * TILE * in_order).clamp(max=RUN * TILE)
        self.codes_T = (self.numbers_T + 4 * RUN - 1) // (4 * RUN)  # words
        self.of_group = in_order.repeat_interleave(TILE)[: math.ceil(numbers / RUN)]
        self.of_number = in_order.repeat_interleave(RUN * TILE)[:numbers]

    def codes(self, begins_T: Tensor, codes_T: Tensor) -> tuple[Tensor, Tensor]:
        """Of every group's code where its bits begin, and how many they are."""
        in_tile = torch.arange(len(self.of_group), dtype=torch.int32, device=begins_T.device) % TILE
        return (16 * begins_T)[self.of_group] + 4 * in_tile, 4 * (codes_T > 0).int()[self.of_group]

    def numbers(self, begins_T: Tensor, width_N: Tensor) -> Tensor:
        """Where the bits of every number begin. begins_T: words, behind the codes."""
        before_N = width_N.cumsum(0) - width_N
        first_T = before_N[:: RUN * TILE]
        return (16 * begins_T - first_T)[self.of_number] + before_N


def _widths(code_G: Tensor, exponents: Tensor) -> Tensor:
    """Bits of every number, without those of the filling."""
    code_G1 = code_G[:, None]
    width_GN = (code_G1 - 1 + _further(exponents)).clamp(max=16)
    width_GN = torch.where(code_G1 == RAW, 16, torch.where(code_G1 == 0, 0, width_GN))
    return width_GN.flatten()[: len(exponents)]


def _stream(folded: Tensor, exponents: Tensor) -> Tensor:
    """The stream of a block's numbers z, uint8."""
    if not len(folded):
        return folded.new_empty(0, dtype=torch.uint8)
    tiles = _Tiles(len(folded), folded)
    powers = 1 << torch.arange(16, dtype=torch.int32, device=folded.device)
    length = (folded[:, None] >= powers).sum(-1)  # of each z
    code_G = 1 + (_in_groups(length) - _further(exponents)).amax(-1).clamp(min=0)
    code_G = torch.where(code_G >= RAW, RAW, code_G)
    code_G = torch.where(_in_groups(folded).amax(-1) == 0, 0, code_G)
    width_N = _widths(code_G, exponents)
    bits_T = torch.zeros_like(tiles.numbers_T).index_add_(0, tiles.of_number, width_N.to(torch.int32))
    words_T = tiles.codes_T + (bits_T + 15) // 16
    raw_T = words_T >= tiles.numbers_T
    words_T = torch.where(raw_T, tiles.numbers_T, words_T)
    codes_T = torch.where(raw_T, 0, tiles.codes_T)
    width_N = torch.where(raw_T[tiles.of_number], 16, width_N)
    begins_T = words_T.cumsum(0) - words_T
    bits = folded.new_zeros(16 * int(words_T.sum()), dtype=torch.uint8)
    for places, used, taken in _bits_of(*tiles.codes(begins_T, codes_T)):
        bits[places] = ((code_G[used] >> taken) & 1).to(torch.uint8)
    for places, used, taken in _bits_of(tiles.numbers(begins_T + codes_T, width_N), width_N):
        bits[places] = ((folded[used] >> taken) & 1).to(torch.uint8)
    packed = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)
    return torch.cat([words_T.to(torch.int16).view(torch.uint8), packed])


def _bits_of(begins: Tensor, widths: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Of some numbers the places of all their bits in turn: those of the first bits, of which numbers they are, and
    that they are bit 0; and so on."""
    for bit in range(int(widths.max())):
        used = (widths > bit).nonzero().flatten()
        yield begins[used] + bit, used, bit


def _words(stream: Tensor, tiles: int) -> Tensor:
    """How many words every tile takes, int32."""
    return stream[: 2 * tiles].clone().view(torch.int16).to(torch.int32) & 0xFFFF


def _unpacked(stream: Tensor, exponents: Tensor) -> Tensor:
    """The numbers z of a stream, int32."""
    if not len(exponents):
        return exponents
    tiles = _Tiles(len(exponents), exponents)
    words_T = _words(stream, len(tiles.numbers_T))
    raw_T = words_T == tiles.numbers_T
    codes_T = torch.where(raw_T, 0, tiles.codes_T)
    begins_T = words_T.cumsum(0) - words_T
    packed = stream[2 * len(words_T) :, None]
    bits = ((packed >> torch.arange(8, dtype=torch.uint8, device=stream.device)) & 1).flatten()
    code_G = torch.where(raw_T, RAW, 0)[tiles.of_group]
    for places, used, taken in _bits_of(*tiles.codes(begins_T, codes_T)):
        code_G[used] |= bits[places].to(code_G.dtype) << taken
    width_N = _widths(code_G, exponents)
    found = torch.zeros_like(exponents)
    for places, used, taken in _bits_of(tiles.numbers(begins_T + codes_T, width_N), width_N):
        found[used] |= bits[places].to(torch.int32) << taken
    return found
