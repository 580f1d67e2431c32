"""The lossless codec's arithmetic: 16-bit numbers as what they differ by from a prediction in units of the last place,
in the code of Golomb and Rice, whose parameter follows from the differences before.

A tensor [B, T, H, D] travels in blocks, one for each peer. A block is cut into strips: 8 neighbouring numbers of the
H * D of a token (the last ones may be fewer, and are filled up with zeros) and of consecutive tokens as many as make
equal parts of at most 32 of the block's. A strip is read from its first token on, and whoever reads it knows, beside
the numbers of the tokens before, the tensor's values r1 at the last call and r0 at the one before it, or none of them.
Everything is float32, one rounding for each operation written here, denormal numbers kept, no fused multiply-add:

    continuation f = r1, or r1 + c * (r1 - r0); c begins at a factor that is given
    prediction   p = f + w * g, rounded to the type (to nearest, ties to even), g being x - f of the token before, 0 at
                 the first; w begins at 1/2. Where f + w * g is not finite, p has the bits of r1
    error        e = x - (f + w * g). After each token the sums of e * g and e * (r1 - r0) over the 8 numbers move w and
                 c by 1/16, up where they are positive, down where negative; w within 0 and 1, c within -1 and 2
    size         of the errors, m: .75 * m + n, with n = .75 * sum + 2 * own of the absolute errors of the token before;
                 at the second token 4 * n, and at the first 2**(h - 127), where the strip tells the h: the exponent's
                 bits of six times the sum of its absolute errors
    order        ord(b) = b where the sign bit of the 16 bits b is 0, else b with its other 15 bits inverted, as a
                 signed integer: the order of floats, in which -0 is next below +0. A bijection, its own inverse
    difference   d = ord(x) - ord(p) modulo 2**16, folded to z: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...
    parameter    k: log2 of m / 16 in units of p's last place, rounded down by the bits of the exponents, 0 to 15

Where nothing is known, at a first call, f and g are 0, and a number's exponent alone is predicted: by that of .7 * m /
32, both as the type has them. From top to bottom z then is the folded difference of the exponents, predicted less
actual, modulo their number; the significand; the sign. k is the number of bits of the latter two.

A number's code, the lowest bit first, with q = z >> k: u ones and a zero, u being q below 4, else 4 + n where n is log2
of q - 3, rounded down; then k or k + n bits, by how much z is above the smallest z of that u. Where u would be 12 or
more: 12 ones, no zero, and z in 16 bits. Strips are gathered in tiles of 16. A block's stream is

    sizes        of every tile how many 16-bit words it takes, as 16 bits
    tiles        of each the strips' sizes in words, 8 bits each, filled up to a whole word; then the strips: h in 8
                 bits, and the codes token by token, filled up likewise. A strip whose z are all 0 has the size 0 and
                 no words; the size 255 is that of one that would take as many words as it has numbers, or 255: it has
                 the bits of x instead

Bytes are filled from their lowest bit on, and of a word the lower byte comes first. docs/exchange.md tells how streams
travel, and what this sends beside other codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from cocodiff_sycl.parts import RUN, TILE, TOKENS, Cut, room_of, stream_places
from torch import Tensor

from cocodiff.kernels.residual import sum_of

RAW = 255  # the size of a strip that is not coded
UNARY, LONGEST = 4, 12  # ones that count evenly, and the most
REACH = 5  # bytes in which a code lies, of at most 28 bits
PARTS = 16  # of a byte, in which it is noted how much a token and head needs
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
BIAS = {torch.bfloat16: 0, torch.float16: 112}  # of exponents' bits: float32's less the type's
CODED = tuple(MANTISSA)  # the types that are coded; others travel whole


class Known(NamedTuple):
    """What both ends know of a tensor [B, T, H, D], and where its next values go, which may be the oldest of them.
    last: the newest, None at a first call. before: those before, where they are continued, by the factor at first."""

    written: Tensor
    last: Tensor | None = None
    before: Tensor | None = None
    factor: float = 0.0


def least_room(head_dim: int) -> int:
    """Bytes for a token and head in which the sizes of any block's tiles fit."""
    return 2 * -(-head_dim // (RUN * TILE))


def encode_lossless(
    x_BLHD: Tensor, known: Known, cut: Cut, streams: Tensor, lengths_N: Tensor, needed_1: Tensor
) -> None:
    """Writes the streams of all blocks, each where `stream_places` says; their lengths in bytes, int64 [blocks]; and x
    where its next values go. needed_1: int64, raised to what a token and head need, in sixteenths of a byte."""
    if not x_BLHD.numel():
        lengths_N.zero_()
        return
    cells, strips = cut.cells(x_BLHD.shape), _strips_of(x_BLHD.shape, cut, x_BLHD.device)
    x_SL8 = strips.taken(x_BLHD)
    columns, z_SL8, k_SL8 = _Columns(strips, known), *(torch.empty_like(x_SL8, dtype=torch.int32) for _ in range(2))
    header_S = columns.header(x_SL8[:, 0])
    columns.begin(header_S)
    for token in range(x_SL8.shape[1]):
        columns.expect(token)
        z_SL8[:, token], k_SL8[:, token] = columns.folded(x_SL8[:, token]), columns.parameter_S8
        columns.learn(x_SL8[:, token])
    written = strips.streams(x_SL8, z_SL8, k_SL8, header_S)
    for number, (place, stream) in enumerate(zip(stream_places(cells, x_BLHD.shape[-1]), written, strict=False)):
        streams[place : place + len(stream)] = stream
        lengths_N[number] = len(stream)
        if cells[number]:
            needed_1.clamp_(min=-(-len(stream) * PARTS // cells[number]))
    known.written.copy_(x_BLHD)


def stream_lengths(code_BLHW: Tensor, cut: Cut, like_BLHD: Tensor, lengths_N: Tensor) -> Tensor | None:
    """Writes how long the streams of received blocks are, int64 [blocks], by the sizes of their tiles. Returns what
    else was found, for `decode_lossless`. code: the blocks' first parts in a row. like: what they become."""
    tiles = cut.tiles(code_BLHW.shape, like_BLHD.shape[-1])
    for number, part in enumerate(_first_parts(code_BLHW, cut)):
        sizes = part[: 2 * tiles[number]].clone().view(torch.int16).to(torch.int64) & 0xFFFF
        lengths_N[number] = 2 * (tiles[number] + sizes.sum())
    return None


def decode_lossless(
    code_BLHW: Tensor, rests: Tensor, lengths_N: Tensor, found: Tensor | None, known: Known, cut: Cut
) -> None:
    """Writes the tensor where its next values go, from the first part of every block's stream and the rests, uint8, one
    behind the other in the order of the blocks. code_BLHW, lengths_N, found: of `stream_lengths`."""
    written, lengths, whole, taken = known.written, lengths_N.tolist(), list[Tensor](), 0
    if not written.numel():
        return
    for part, length, cells in zip(_first_parts(code_BLHW, cut), lengths, cut.cells(code_BLHW.shape), strict=True):
        first = part[: min(length, room_of(cells, code_BLHW.shape[-1]))]
        whole += [first, rests[taken : taken + length - len(first)]]
        taken += length - len(first)
    strips = _strips_of(written.shape, cut, written.device)
    codes = _Codes(strips, torch.cat(whole), lengths)
    columns, bits_SL8 = _Columns(strips, known), codes.raw_SL8
    columns.begin(codes.header_S)
    for token in range(bits_SL8.shape[1]):
        there_S8 = strips.there_SL8[:, token]
        columns.expect(token)
        z_S8 = codes.take(columns.parameter_S8, there_S8)
        found_S8 = torch.where(codes.is_raw_S[:, None], bits_SL8[:, token], columns.unfolded(z_S8))
        bits_SL8[:, token] = found_S8.masked_fill(~there_S8, 0)
        columns.learn(bits_SL8[:, token].to(torch.int16).view(written.dtype))
    flat = torch.empty(written.numel(), dtype=torch.int16, device=written.device)
    flat[strips.where_SL8[strips.there_SL8]] = bits_SL8[strips.there_SL8].to(torch.int16)
    written.copy_(flat.view(written.dtype).view(written.shape))


def _first_parts(code_BLHW: Tensor, cut: Cut) -> Sequence[Tensor]:
    width = code_BLHW.shape[-1]
    return code_BLHW.flatten().split_with_sizes([count * width for count in cut.cells(code_BLHW.shape)])


# What is known at a token of all strips -------------------------------------------------------------------------------


def _exponent(x: Tensor) -> Tensor:
    """Of float32 numbers that are not negative, the bits, int32."""
    return x.contiguous().view(torch.int32) >> 23 & 255


def _order(bits: Tensor) -> Tensor:
    """Its own inverse, of int32 that hold 16 bits with their sign."""
    return bits ^ ((bits >> 15) & 0x7FFF)


def _fold(difference: Tensor, bits: int) -> Tensor:
    """Of int32 modulo 2**bits."""
    half = 1 << (bits - 1)
    wrapped = ((difference + half) & (2 * half - 1)) - half
    return (wrapped << 1) ^ (wrapped >> 31)


def _unfold(folded: Tensor) -> Tensor:
    return (folded >> 1) ^ -(folded & 1)


class _Columns:
    """Strips as both ends go through them: `begin`, then for each token `expect`, `folded` or `unfolded`, and `learn`.
    parameter_S8: of the expected token's codes, int32."""

    parameter_S8: Tensor

    def __init__(self, strips: _Strips, known: Known) -> None:
        self._dtype, self._known = known.written.dtype, known.last is not None
        self._mantissa, self._bias = MANTISSA[self._dtype], BIAS[self._dtype]
        (S, *_), device = strips.where_SL8.shape, known.written.device
        self._weight_S1, self._gap_S8 = torch.full((S, 1), 0.5, device=device), torch.zeros(S, RUN, device=device)
        self._forecast_S8, self._factor_S1 = torch.zeros(S, RUN, device=device), None
        if known.last is not None:
            self._last_SL8 = strips.taken(known.last)
            if known.before is not None:
                self._change_SL8 = self._last_SL8.float() - strips.taken(known.before).float()
                self._factor_S1 = torch.full((S, 1), known.factor, device=device)

    def _look(self, token: int) -> None:
        self._token = token
        if self._known:
            self._continued_S8 = self._last_SL8[:, token].float()
            if self._factor_S1 is not None:
                self._continued_S8 = self._continued_S8 + self._change_SL8[:, token] * self._factor_S1
            self._forecast_S8 = self._continued_S8 + self._weight_S1 * self._gap_S8

    def header(self, x_S8: Tensor) -> Tensor:
        """Of every strip h by its first token, int32."""
        self._look(0)
        return _exponent(sum_of((x_S8.float() - self._forecast_S8).abs()) * 6)

    def begin(self, header_S: Tensor) -> None:
        self._size_S8 = (header_S << 23).view(torch.float32)[:, None].expand(-1, RUN)

    def expect(self, token: int) -> None:
        self._look(token)
        if not self._known:
            self._expected_S8 = _exponent(self._size_S8 * 0.7) - 5 - self._bias
            self.parameter_S8 = torch.full_like(self._expected_S8, self._mantissa + 1)
            return
        finite_S8, last_S8 = torch.isfinite(self._forecast_S8), self._last_SL8[:, token].view(torch.int16)
        bits_S8 = torch.where(finite_S8, self._forecast_S8.to(self._dtype).view(torch.int16), last_S8).to(torch.int32)
        self._expected_S8 = _order(bits_S8)
        of_expected_S8 = (bits_S8 & 0x7FFF) >> self._mantissa
        parameter_S8 = _exponent(self._size_S8) - of_expected_S8 + (self._mantissa - 4 - self._bias)
        self.parameter_S8 = parameter_S8.clamp(0, 15)

    def folded(self, x_S8: Tensor) -> Tensor:
        """z, int32."""
        bits_S8, sign = x_S8.view(torch.int16).to(torch.int32), 1 << self._mantissa
        if self._known:
            return _fold(_order(bits_S8) - self._expected_S8, 16)
        exponent_S8 = (bits_S8 & 0x7FFF) >> self._mantissa
        low_S8 = (bits_S8 & (sign - 1)) << 1 | (bits_S8 < 0)
        return _fold(self._expected_S8 - exponent_S8, 15 - self._mantissa) << (self._mantissa + 1) | low_S8

    def unfolded(self, z_S8: Tensor) -> Tensor:
        """The bits of x, int32 with their sign."""
        if self._known:
            order_S8 = self._expected_S8 + _unfold(z_S8)
            return _order(((order_S8 + 0x8000) & 0xFFFF) - 0x8000)
        exponents = (1 << (15 - self._mantissa)) - 1
        exponent_S8 = (self._expected_S8 - _unfold(z_S8 >> (self._mantissa + 1))) & exponents
        bits_S8 = exponent_S8 << self._mantissa | (z_S8 >> 1 & ((1 << self._mantissa) - 1))
        return bits_S8 - ((z_S8 & 1) << 15)

    def learn(self, x_S8: Tensor) -> None:
        error_S8 = x_S8.float() - self._forecast_S8
        own_S8, follows = error_S8.abs(), self._factor_S1 is not None
        summed = [own_S8, error_S8 * self._gap_S8, *([error_S8 * self._change_SL8[:, self._token]] if follows else [])]
        size_S1, *trends = sum_of(torch.stack(summed))[..., None].unbind()
        sizes_S8 = size_S1 * 0.75 + own_S8 * 2
        self._size_S8 = self._size_S8 * 0.75 + sizes_S8 if self._token else sizes_S8 * 4
        if not self._known:
            return
        moves = [((trend_S1 > 0).float() - (trend_S1 < 0).float()) / 16 for trend_S1 in trends]
        self._weight_S1 = (self._weight_S1 + moves[0]).clamp(0, 1)
        if self._factor_S1 is not None:
            self._factor_S1 = (self._factor_S1 + moves[1]).clamp(-1, 2)
        self._gap_S8 = x_S8.float() - self._continued_S8


# Strips in streams ----------------------------------------------------------------------------------------------------


class _Strips:
    """The strips of all blocks of a tensor, [S]: where_SL8 tells the places of their numbers in it, there_SL8 which
    there are; numbers_S how many words they take as they are. Their tiles, [T], one block's after the other's."""

    def __init__(self, shape: tuple[int, ...], cut: Cut, device: torch.device) -> None:
        (_, T, H, D), starts = shape, accumulate(cut.sizes, initial=0)
        parts, numbers, self._tiles = list[Tensor](), list[int](), list[int]()
        shapes = cut.shapes(shape)
        longest = max(-(-tokens // max(1, -(-tokens // TOKENS))) for _, tokens, _ in shapes)
        for start, (batch, tokens, heads) in zip(starts, shapes, strict=False):
            chunks, width = -(-tokens // TOKENS), heads * D
            first = [number * tokens // max(1, chunks) for number in range(chunks + 1)]
            counts = [until - begin for begin, until in pairwise(first)]
            columns = -(-width // RUN)
            row, channel = torch.arange(longest), torch.arange(columns * RUN)
            token_CL = torch.tensor(first[:-1], dtype=torch.int64)[:, None] + row
            token_CL[row >= torch.tensor(counts, dtype=torch.int64).view(-1, 1)] = -1
            at, of_head = (start, 0) if cut.dim == 1 else (0, start * D)
            rows_BCL = torch.arange(batch).view(-1, 1, 1) * T + at + token_CL
            where = rows_BCL[..., None] * (H * D) + of_head + channel
            where[(token_CL < 0)[None, :, :, None].expand(where.shape) | (channel >= width)] = -1
            parts.append(where.unflatten(-1, (columns, RUN)).transpose(2, 3).flatten(0, 2))
            numbers += [RUN * count for count in counts for _ in range(columns)] * batch
            self._tiles.append(-(-len(parts[-1]) // TILE))
        self.where_SL8 = torch.cat(parts).to(device)
        self.there_SL8, self.numbers_S = self.where_SL8 >= 0, torch.tensor(numbers, dtype=torch.int64, device=device)
        tiles, blocks = torch.tensor(self._tiles), torch.arange(len(parts))
        in_block_S = torch.cat([torch.arange(len(part)) for part in parts])
        block_S, before = blocks.repeat_interleave(torch.tensor(list(map(len, parts)))), tiles.cumsum(0) - tiles
        self.tile_S = (before[block_S] + in_block_S // TILE).to(device)
        self.in_tile_S = (in_block_S % TILE).to(device)
        self.block_T = blocks.repeat_interleave(tiles).to(device)
        self.first_T, self.until_T = before.to(device)[self.block_T], tiles.cumsum(0).to(device)[self.block_T]
        self.sizes_T = (torch.bincount(self.tile_S, minlength=sum(self._tiles)) + 1) // 2

    def taken(self, x_BLHD: Tensor) -> Tensor:
        """A tensor's numbers, [S, L, 8], zeros where there are none."""
        flat = x_BLHD.contiguous().view(torch.int16).flatten()
        return flat[self.where_SL8.clamp(min=0)].masked_fill_(~self.there_SL8, 0).view(x_BLHD.dtype)

    def tiles_at(self, words_T: Tensor) -> tuple[Tensor, Tensor]:
        """By how many words tiles take, where in all streams, one behind the other, they lie, and their sizes do."""
        before_T = words_T.cumsum(0) - words_T
        sizes_at_T = before_T[self.first_T] + torch.arange(len(words_T), device=words_T.device)
        return before_T + self.until_T, sizes_at_T

    def strips_at(self, words_S: Tensor, begin_T: Tensor) -> Tensor:
        """By how many words strips take, where they lie."""
        before_S = words_S.cumsum(0) - words_S
        first_S = before_S[self.in_tile_S == 0][self.tile_S]
        return (begin_T + self.sizes_T)[self.tile_S] + before_S - first_S

    def streams(self, x_SL8: Tensor, z_SL8: Tensor, k_SL8: Tensor, header_S: Tensor) -> list[Tensor]:
        """Of all blocks, uint8."""
        z_SL8 = z_SL8.masked_fill(~self.there_SL8, 0).to(torch.int64)
        code_SL8, width_SL8 = _coded(z_SL8, k_SL8.to(torch.int64))
        width_SL8 = width_SL8.masked_fill(~self.there_SL8, 0)
        words_S = (8 + width_SL8.sum((1, 2)) + 15) // 16
        raw_S, empty_S = words_S >= self.numbers_S.clamp(max=RAW), (z_SL8 == 0).all(-1).all(-1)
        raw_S &= ~empty_S
        words_S = torch.where(raw_S, self.numbers_S, words_S).masked_fill(empty_S, 0)
        words_T = self.sizes_T.index_add(0, self.tile_S, words_S)
        begin_T, sizes_at_T = self.tiles_at(words_T)
        begin_S = self.strips_at(words_S, begin_T)
        of_blocks = torch.zeros(len(self._tiles), dtype=torch.int64, device=words_T.device)
        lengths = (2 * of_blocks.index_add(0, self.block_T, words_T + 1)).tolist()
        found = torch.zeros(sum(lengths) + REACH, dtype=torch.int64, device=words_T.device)
        _put(found, 16 * sizes_at_T, words_T)
        _put(found, 16 * begin_T[self.tile_S] + 8 * self.in_tile_S, torch.where(raw_S, RAW, words_S))
        coded_S = ~raw_S & ~empty_S
        _put(found, 16 * begin_S[coded_S], header_S[coded_S].long())
        width_N, there_N = width_SL8[coded_S].flatten(1), self.there_SL8[coded_S]
        begin_N = (16 * begin_S[coded_S] + 8)[:, None] + width_N.cumsum(1) - width_N
        _put(found, begin_N.view(there_N.shape)[there_N], code_SL8[coded_S][there_N])
        raw_N = self.there_SL8[raw_S]
        at_N = 16 * (begin_S[raw_S][:, None] + torch.arange(raw_N[0].numel() if len(raw_N) else 0, device=found.device))
        x_N = x_SL8[raw_S].view(torch.int16).to(torch.int64) & 0xFFFF
        _put(found, at_N.view(raw_N.shape)[raw_N], x_N[raw_N])
        return list(found[:-REACH].to(torch.uint8).split_with_sizes(lengths))


_strips_of = lru_cache(maxsize=8)(_Strips)  # of q, k, v and the output at both ends, and some chunks


def _coded(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of numbers z by their parameters, int64, and of how many bits they are."""
    q = z >> k
    further = (q[..., None] - UNARY + 1 >= 2 << torch.arange(16, device=z.device)).sum(-1)  # n
    ones = torch.where(q < UNARY, q, UNARY + further)
    base = torch.where(q < UNARY, q, UNARY - 1 + (1 << further)) << k
    code = ((1 << ones) - 1) | (z - base) << (ones + 1)
    long = ones >= LONGEST
    code = torch.where(long, ((1 << LONGEST) - 1) | z << LONGEST, code)
    return code, torch.where(long, LONGEST + 16, ones + 1 + k + further)


def _put(found: Tensor, begins: Tensor, values: Tensor) -> None:
    """Adds numbers to bytes, int64, from these bits on: nothing else has theirs."""
    shifted = values << (begins & 7)
    for byte in range(REACH):
        found.index_add_(0, (begins >> 3) + byte, shifted >> 8 * byte & 255)


@lru_cache(maxsize=4)
def _beginnings(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """By a code's lowest bits: its ones, and its width, so many bits and so many times its parameter; int64."""
    bits = torch.arange(1 << LONGEST, device=device)
    ones = torch.stack([(bits + 1) % (1 << count) == 0 for count in range(1, LONGEST + 1)]).sum(0)
    long = ones == LONGEST
    return ones, torch.where(long, LONGEST + 16, ones + 1 + (ones - UNARY).clamp(min=0)), (~long).long()


class _Codes:
    """Streams that are read, all strips' at once. raw_SL8: the bits of those that are not coded, int32."""

    def __init__(self, strips: _Strips, streams: Tensor, lengths: Sequence[int]) -> None:
        padded = torch.nn.functional.pad(streams, (0, 8)).to(torch.int64)
        places = [padded[byte : byte + len(padded) - REACH + 1] << 8 * byte for byte in range(REACH)]
        self._from_byte = torch.stack(places).sum(0)  # the 40 bits that begin at each
        self._beginning, (self._ones, self._width, self._parameters) = (1 << LONGEST) - 1, _beginnings(streams.device)
        length_N = torch.tensor(lengths, dtype=torch.int64, device=streams.device)
        tiles = torch.arange(len(strips.block_T), device=streams.device) - strips.first_T
        words_T = self._peek(8 * (length_N.cumsum(0) - length_N)[strips.block_T] + 16 * tiles) & 0xFFFF
        begin_T, _ = strips.tiles_at(words_T)
        size_S = self._peek(16 * begin_T[strips.tile_S] + 8 * strips.in_tile_S) & 255
        self.is_raw_S = size_S == RAW
        begin_S = strips.strips_at(torch.where(self.is_raw_S, strips.numbers_S, size_S), begin_T)
        self._coded_S = ~self.is_raw_S & (size_S > 0)
        self.header_S = (self._peek(16 * begin_S) & 255).masked_fill(~self._coded_S, 0).to(torch.int32)
        self._at_S = 16 * begin_S + 8
        self.raw_SL8 = torch.zeros(strips.where_SL8.shape, dtype=torch.int32, device=streams.device)
        in_strip = torch.arange(strips.where_SL8[:1].numel(), device=streams.device).view(1, -1, RUN)
        raw = self.is_raw_S[:, None, None] & strips.there_SL8
        found = self._peek(16 * (begin_S[:, None, None] + in_strip)[raw]).to(torch.int16)
        self.raw_SL8[raw] = found.to(torch.int32)

    def _peek(self, at: Tensor) -> Tensor:
        """At least 32 bits from these on, int64."""
        return self._from_byte[at >> 3] >> (at & 7)

    def take(self, k_S8: Tensor, there_S8: Tensor) -> Tensor:
        """The next z of every strip, by their parameters: int32, 0 where there is no code."""
        k_S8, used_S8, held = k_S8.long(), (self._coded_S[:, None] & there_S8).long(), list[Tensor]()
        for number in range(RUN):
            held.append(self._peek(self._at_S))
            begins_S = held[-1] & self._beginning
            width_S = self._width[begins_S] + self._parameters[begins_S] * k_S8[:, number]
            self._at_S = self._at_S + width_S * used_S8[:, number]
        held_S8 = torch.stack(held, 1)
        ones_S8 = self._ones[held_S8 & self._beginning]
        further_S8, long_S8 = (ones_S8 - UNARY).clamp(min=0), ones_S8 == LONGEST
        base_S8 = torch.where(ones_S8 < UNARY, ones_S8, UNARY - 1 + (1 << further_S8)) << k_S8
        bits_S8 = torch.where(long_S8, 16, k_S8 + further_S8)
        rest_S8 = held_S8 >> torch.where(long_S8, LONGEST, ones_S8 + 1) & ((1 << bits_S8) - 1)
        return (torch.where(long_S8, rest_S8, base_S8 + rest_S8) * used_S8).to(torch.int32)
