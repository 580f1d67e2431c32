"""The arithmetic of the lossless codec for 16-bit tensors.

A number is sent as its difference from a prediction, in units of the last place. The difference is in the code of
Golomb and Rice, whose parameter follows from the differences before.

A tensor [B, T, H, D] is sent in blocks, one for each peer. A block is cut into strips. A strip has 8 neighbouring
numbers of the H * D of a token (the last ones may be fewer, and are filled up with zeros), of consecutive tokens. The
block's tokens are divided into the fewest parts of at most 32, whose lengths differ by at most one.

A strip is read from its first token on. The reader knows the numbers of the tokens before. It also knows the tensor's
values r1 at the last call and r0 at the one before it, or none of them. Everything is float32, each operation written
here rounded once, with denormal numbers and without fused multiply-add:

    continuation f = r1, or r1 + c * (r1 - r0); c begins at a factor that is given;
    prediction   p = f + w * g, rounded to the type (to nearest, ties to even). g is x - f of the token before, 0 at
                 the first; w begins at 1/2. Where f + w * g is not finite, p has the bits of r1;
    error        e = x - (f + w * g). After each token the signs of two sums over the 8 numbers move w and c by 1/16:
                 of e * g and of e * (r1 - r0). Positive ones move up, negative ones down; w stays within 0 and 1, c
                 within -1 and 2;
    size         m, of the errors: .75 * m + n, with n = .75 * sum + 2 * own of the absolute errors of the token before.
                 At the second token it is 4 * n. At the first it is 2**(h - 127), where h is stored in the strip: the
                 exponent bits of six times the sum of its absolute errors;
    order        ord(b) = b if the sign bit of the 16 bits b is 0, else b with its other 15 bits inverted, as a
                 signed integer: the order of floats, in which -0 is next below +0. A bijection, its own inverse;
    difference   d = ord(x) - ord(p) modulo 2**16, folded to z: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...;
    parameter    k: log2 of m / 16 in units of p's last place, rounded down by the bits of the exponents, 0 to 15.

At a first call nothing is known. Then f and g are 0, and only a number's exponent is predicted: by that of .7 * m / 32,
both as the type has them. From top to bottom z then is the folded difference of the exponents (predicted minus actual,
modulo their number), the significand, the sign. k is the number of bits of the latter two.

A number's code begins at the lowest bit. Let q = z >> k. First come u ones and a zero. u is q if q is below 4, else 4 +
n, where n is log2 of q - 3, rounded down. Then come k bits (k + n if q is 4 or more) with the difference of z and the
smallest z of that u. If u would be 12 or more, the code is 12 ones, no zero, and z in 16 bits. Strips are gathered in
tiles of 16. A block's stream is

    sizes        the number of 16-bit words of every tile, in 16 bits each;
    tiles        of each the strips' sizes in words, 8 bits each, filled up to a whole word; then the strips. A strip is
                 h in 8 bits and the codes token by token, filled up likewise. The size 0 means that all z are 0; the
                 strip then has no words. The size 255 means that codes would take as many words as the strip has
                 numbers, or 255; the strip then has the bits of x instead.

Bytes are filled from their lowest bit on, and the lower byte of a word comes first. docs/exchange.md describes how
streams are sent and how many bytes they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from cocodiff_sycl.parts import RUN, TILE, TOKENS, BlockCut, room_of, stream_places, width_of
from torch import Tensor

from cocodiff.kernels.device import kept_for_all_streams
from cocodiff.kernels.residual import sum_of

RAW = 255  # size of a strip that is not coded
UNARY, LONGEST = 4, 12  # number of ones from which on ranges double, and the largest number of ones
REACH = 5  # bytes that a code of at most 28 bits may touch
PARTS = 16  # fractions of a byte, the unit of the room that a token and head needs
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}  # bits of the significand
BIAS = {torch.bfloat16: 0, torch.float16: 112}  # exponent bias of float32 minus that of the type
CODED = tuple(MANTISSA)  # the dtypes that are coded; others are sent whole


class Known(NamedTuple):
    """The last values of a tensor [B, T, H, D], which sender and receiver both know, and the place for its next
    values."""

    written: Tensor  # where the next values are written; may be the oldest of the known tensors
    last: Tensor | None = None  # the newest values; None at a first call
    before: Tensor | None = None  # the values before those; None if there is no linear continuation
    factor: float = 0.0  # of the linear continuation at a strip's first token


def least_room(head_dim: int) -> int:
    """Return the least number of bytes of a stream's first part per token and head. So many bytes hold at least the
    sizes of all tiles (groups of 16 strips) of a block.

    Args:
        head_dim: channels of a head.
    """
    return 2 * -(-head_dim // (RUN * TILE))


def encode_lossless(
    x_BLHD: Tensor, known: Known, cut: BlockCut, streams: Tensor, lengths_N: Tensor, needed_1: Tensor
) -> None:
    """Encode a 16-bit tensor: write the streams of all blocks to `streams`, and the tensor itself to `known.written`.

    Args:
        x_BLHD: the tensor.
        known: its last values.
        cut: the cut of the tensor into blocks, one for each receiver.
        streams: buffer for the streams, uint8, each at its place by `stream_places`.
        lengths_N: receives the streams' lengths in bytes, int64 [blocks].
        needed_1: int64 [1], raised to the bytes that each token and head needs in a stream, in sixteenths of a byte.
    """
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


def stream_lengths(firsts: Tensor, cut: BlockCut, like_BLHD: Tensor, lengths_N: Tensor) -> Tensor | None:
    """Write the lengths of received streams in bytes to `lengths_N`, from the sizes of their tiles that the streams
    begin with.

    Return what else was found, to be passed to `decode_lossless`: None in torch, the beginnings of tiles in SYCL.

    Args:
        firsts: the streams' first parts, block after block, uint8; as many bytes for each token and head.
        cut: the cut of the tensor into blocks, one for each sender.
        like_BLHD: a tensor with the shape of the decoded one.
        lengths_N: receives the lengths, int64 [blocks].
    """
    tiles = cut.tiles(like_BLHD.shape, like_BLHD.shape[-1])
    for number, part in enumerate(_first_parts(firsts, cut, like_BLHD)):
        sizes = part[: 2 * tiles[number]].clone().view(torch.int16).to(torch.int64) & 0xFFFF
        lengths_N[number] = 2 * (tiles[number] + sizes.sum())
    return None


def decode_lossless(
    firsts: Tensor, rests: Tensor, lengths_N: Tensor, found: Tensor | None, known: Known, cut: BlockCut
) -> None:
    """Decode the streams of all blocks into `known.written`.

    Args:
        firsts: the streams' first parts, as given to `stream_lengths`.
        rests: the streams' second parts, uint8, one after the other in the order of the blocks.
        lengths_N: the streams' lengths in bytes, from `stream_lengths`.
        found: what `stream_lengths` returned.
        known: the tensor's last values.
        cut: the cut of the tensor into blocks, one for each sender.
    """
    written, lengths, whole, taken = known.written, lengths_N.tolist(), list[Tensor](), 0
    if not written.numel():
        return
    width = width_of(firsts, written)
    for part, length, cells in zip(_first_parts(firsts, cut, written), lengths, cut.cells(written.shape), strict=True):
        first = part[: min(length, room_of(cells, width))]
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


def _first_parts(firsts: Tensor, cut: BlockCut, like_BLHD: Tensor) -> Sequence[Tensor]:
    """Return the first part of every block's stream, as views of the received buffer.

    Args:
        firsts: the first parts of all streams.
        cut: the cut of the tensor into blocks.
        like_BLHD: a tensor with the shape of the decoded one.
    """
    width = width_of(firsts, like_BLHD)
    return firsts.flatten().split_with_sizes([count * width for count in cut.cells(like_BLHD.shape)])


# One token of all strips ----------------------------------------------------------------------------------------------


def _exponent(x: Tensor) -> Tensor:
    """Return the exponent bits of float32 numbers, int32. The numbers are not negative."""
    return x.contiguous().view(torch.int32) >> 23 & 255


def _order(bits: Tensor) -> Tensor:
    """Map the bits of 16-bit floats to integers in the order of the floats, or back: the function is its own inverse.

    Args:
        bits: int32, the 16 bits with their sign.
    """
    return bits ^ ((bits >> 15) & 0x7FFF)


def _fold(difference: Tensor, bits: int) -> Tensor:
    """Wrap int32 differences modulo 2**bits, and fold them to non-negative numbers: 0, -1, 1, -2, ... become 0, 1, 2,
    3, ..."""
    half = 1 << (bits - 1)
    wrapped = ((difference + half) & (2 * half - 1)) - half
    return (wrapped << 1) ^ (wrapped >> 31)


def _unfold(folded: Tensor) -> Tensor:
    """Return the differences that `_fold` made non-negative numbers of, apart from multiples of 2**bits."""
    return (folded >> 1) ^ -(folded & 1)


class _Columns:
    """The state of all strips while they are coded or decoded, token by token. A strip is 8 numbers of each of up to 32
    consecutive tokens of a block.

    The order of calls is `begin`; then for each token `expect`, `folded` or `unfolded`, and `learn`.
    """

    parameter_S8: Tensor  # k of the expected token's codes, int32

    def __init__(self, strips: _Strips, known: Known) -> None:
        """Start before the first token.

        Args:
            strips: the strips of the tensor.
            known: the tensor's last values.
        """
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
        """Forecast the numbers of one token in all strips, from the last values and what was learned of the tokens
        before."""
        self._token = token
        if self._known:
            self._continued_S8 = self._last_SL8[:, token].float()
            if self._factor_S1 is not None:
                self._continued_S8 = self._continued_S8 + self._change_SL8[:, token] * self._factor_S1
            self._forecast_S8 = self._continued_S8 + self._weight_S1 * self._gap_S8

    def header(self, x_S8: Tensor) -> Tensor:
        """Return the number that each strip's stream begins with, int32 [strips]: the exponent bits of the size of its
        first token's errors.

        Args:
            x_S8: the numbers of the first token in each strip, [strips, 8].
        """
        self._look(0)
        return _exponent(sum_of((x_S8.float() - self._forecast_S8).abs()) * 6)

    def begin(self, header_S: Tensor) -> None:
        """Set the expected size of errors at the first token from the headers of the strips, int32 [strips]."""
        self._size_S8 = (header_S << 23).view(torch.float32)[:, None].expand(-1, RUN)

    def expect(self, token: int) -> None:
        """Compute the prediction and the code parameter of one token, by its index in the strips."""
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
        """Return the numbers that are coded for one token: its differences from the prediction, folded to non-negative
        int32 [strips, 8].

        Args:
            x_S8: the token's numbers in each strip, [strips, 8].
        """
        bits_S8, sign = x_S8.view(torch.int16).to(torch.int32), 1 << self._mantissa
        if self._known:
            return _fold(_order(bits_S8) - self._expected_S8, 16)
        exponent_S8 = (bits_S8 & 0x7FFF) >> self._mantissa
        low_S8 = (bits_S8 & (sign - 1)) << 1 | (bits_S8 < 0)
        return _fold(self._expected_S8 - exponent_S8, 15 - self._mantissa) << (self._mantissa + 1) | low_S8

    def unfolded(self, z_S8: Tensor) -> Tensor:
        """Return one token's numbers as bits, int32 with their sign [strips, 8], from the decoded differences.

        Args:
            z_S8: the differences as `folded` returns them, [strips, 8].
        """
        if self._known:
            order_S8 = self._expected_S8 + _unfold(z_S8)
            return _order(((order_S8 + 0x8000) & 0xFFFF) - 0x8000)
        exponents = (1 << (15 - self._mantissa)) - 1
        exponent_S8 = (self._expected_S8 - _unfold(z_S8 >> (self._mantissa + 1))) & exponents
        bits_S8 = exponent_S8 << self._mantissa | (z_S8 >> 1 & ((1 << self._mantissa) - 1))
        return bits_S8 - ((z_S8 & 1) << 15)

    def learn(self, x_S8: Tensor) -> None:
        """Update the weights and the expected size of errors from one token, once both ends know its numbers.

        Args:
            x_S8: the token's numbers in each strip, [strips, 8].
        """
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
    """The places of all strips of a tensor, in the tensor and in its streams, as index tensors.

    A strip is 8 numbers of each of up to 32 consecutive tokens of a block, a tile is 16 strips of a block. S counts
    strips and T tiles, block after block.
    """

    def __init__(self, shape: tuple[int, ...], cut: BlockCut, device: torch.device) -> None:
        """Compute the index tensors.

        Args:
            shape: shape of the tensor, [B, tokens, H, D].
            cut: the cut of the tensor into blocks.
            device: the device of the index tensors.
        """
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
        self.where_SL8 = torch.cat(parts).to(device)  # places of the strips' numbers in the tensor; -1 for none
        self.there_SL8, self.numbers_S = self.where_SL8 >= 0, torch.tensor(numbers, dtype=torch.int64, device=device)
        tiles, blocks = torch.tensor(self._tiles), torch.arange(len(parts))
        in_block_S = torch.cat([torch.arange(len(part)) for part in parts])
        block_S, before = blocks.repeat_interleave(torch.tensor(list(map(len, parts)))), tiles.cumsum(0) - tiles
        self.tile_S = (before[block_S] + in_block_S // TILE).to(device)
        self.in_tile_S = (in_block_S % TILE).to(device)
        self.block_T = blocks.repeat_interleave(tiles).to(device)
        self.first_T, self.until_T = before.to(device)[self.block_T], tiles.cumsum(0).to(device)[self.block_T]
        self.sizes_T = (torch.bincount(self.tile_S, minlength=sum(self._tiles)) + 1) // 2

    def contained_tensors(self) -> list[Tensor]:
        """Return the index tensors."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def taken(self, x_BLHD: Tensor) -> Tensor:
        """Return a tensor's numbers arranged in strips, [strips, tokens, 8], with zeros for missing ones."""
        flat = x_BLHD.contiguous().view(torch.int16).flatten()
        return flat[self.where_SL8.clamp(min=0)].masked_fill_(~self.there_SL8, 0).view(x_BLHD.dtype)

    def tiles_at(self, words_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the place of each tile, the place of each tile's size) in all streams one after the other, in words
        of 2 bytes.

        Args:
            words_T: number of words of each tile, [tiles].
        """
        before_T = words_T.cumsum(0) - words_T
        sizes_at_T = before_T[self.first_T] + torch.arange(len(words_T), device=words_T.device)
        return before_T + self.until_T, sizes_at_T

    def strips_at(self, words_S: Tensor, begin_T: Tensor) -> Tensor:
        """Return where each strip's codes begin, int64 [strips], in words of 2 bytes from the first stream's beginning.

        All blocks' streams are taken as one, one after the other. In a tile, strips follow the table of their sizes.

        Args:
            words_S: number of words of each strip, [strips].
            begin_T: the places where tiles begin, likewise, [tiles], from `tiles_at`.
        """
        before_S = words_S.cumsum(0) - words_S
        first_S = before_S[self.in_tile_S == 0][self.tile_S]
        return (begin_T + self.sizes_T)[self.tile_S] + before_S - first_S

    def streams(self, x_SL8: Tensor, z_SL8: Tensor, k_SL8: Tensor, header_S: Tensor) -> list[Tensor]:
        """Build the streams of all blocks from the coded differences. Return one uint8 tensor for each block.

        Args:
            x_SL8: the tensor's numbers in strips, [strips, tokens, 8].
            z_SL8: their folded differences from the prediction.
            k_SL8: the parameters of their codes.
            header_S: the number that each strip begins with.
        """
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


_strips_of = kept_for_all_streams(_Strips, 8)  # for q, k, v and the output at both ends, and some chunks


def _coded(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the Golomb-Rice codes of numbers, their widths in bits), both int64.

    Args:
        z: the numbers, non-negative.
        k: the parameter of each number's code.
    """
    q = z >> k
    further = (q[..., None] - UNARY + 1 >= 2 << torch.arange(16, device=z.device)).sum(-1)  # n
    ones = torch.where(q < UNARY, q, UNARY + further)
    base = torch.where(q < UNARY, q, UNARY - 1 + (1 << further)) << k
    code = ((1 << ones) - 1) | (z - base) << (ones + 1)
    long = ones >= LONGEST
    code = torch.where(long, ((1 << LONGEST) - 1) | z << LONGEST, code)
    return code, torch.where(long, LONGEST + 16, ones + 1 + k + further)


def _put(found: Tensor, begins: Tensor, values: Tensor) -> None:
    """Add values to an array of bytes, given as int64, at positions in bits that nothing else uses.

    Args:
        found: the bytes, which are changed.
        begins: position of each value's first bit.
        values: the values, of at most 28 bits.
    """
    shifted = values << (begins & 7)
    for byte in range(REACH):
        found.index_add_(0, (begins >> 3) + byte, shifted >> 8 * byte & 255)


def _make_beginnings(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return three int64 tables by the lowest bits of a code: (its number of ones, the constant part of its width in
    bits, how often its parameter adds to the width)."""
    bits = torch.arange(1 << LONGEST, device=device)
    ones = torch.stack([(bits + 1) % (1 << count) == 0 for count in range(1, LONGEST + 1)]).sum(0)
    long = ones == LONGEST
    return ones, torch.where(long, LONGEST + 16, ones + 1 + (ones - UNARY).clamp(min=0)), (~long).long()


_beginnings = kept_for_all_streams(_make_beginnings, 4)


class _Codes:
    """The codes of a tensor [B, T, H, D] while they are read: in all strips at once, one of the T tokens after another.

    Each block of the tensor has one stream of bytes, which holds the codes of all strips of that block.
    """

    def __init__(self, strips: _Strips, streams: Tensor, lengths: Sequence[int]) -> None:
        """Find where each strip begins in its block's stream, and read the strips that are not coded.

        Args:
            strips: the strips of the tensor.
            streams: the streams of all blocks one after the other, uint8.
            lengths: length of each block's stream in bytes.
        """
        padded = torch.nn.functional.pad(streams, (0, 8)).to(torch.int64)
        places = [padded[byte : byte + len(padded) - REACH + 1] << 8 * byte for byte in range(REACH)]
        self._from_byte = torch.stack(places).sum(0)  # the 40 bits that begin at each byte
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
        # The bits of strips that are not coded.
        self.raw_SL8 = torch.zeros(strips.where_SL8.shape, dtype=torch.int32, device=streams.device)
        in_strip = torch.arange(strips.where_SL8[:1].numel(), device=streams.device).view(1, -1, RUN)
        raw = self.is_raw_S[:, None, None] & strips.there_SL8
        found = self._peek(16 * (begin_S[:, None, None] + in_strip)[raw]).to(torch.int16)
        self.raw_SL8[raw] = found.to(torch.int32)

    def _peek(self, at: Tensor) -> Tensor:
        """Return the bits that begin at each of the given positions, at least 32 of them, int64."""
        return self._from_byte[at >> 3] >> (at & 7)

    def take(self, k_S8: Tensor, there_S8: Tensor) -> Tensor:
        """Decode the next token's numbers in every strip, and move on. Return them as int32 [strips, 8]; 0 if there is
        no code.

        Args:
            k_S8: parameters of the codes, [strips, 8].
            there_S8: True if the strip has a number at this token, [strips, 8].
        """
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
