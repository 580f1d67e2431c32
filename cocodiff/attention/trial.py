"""A trial of a device at a run's own shapes: attention beside float32, strided copies beside the host's, and operations
twice. Drivers and libraries were seen to be wrong there without a word (docs/aurora.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import conv2d, linear

from cocodiff.attention.local import LocalAttention, bias_of, by_heads, parts_kernel
from cocodiff.attention.sums import CLOSE, attend_plainly
from cocodiff.config.errors import UserError
from cocodiff.kernels import Kernels
from cocodiff.kernels.device import MULTIPLIER

PEAK = 9.0  # queries are so many times as large as keys: few keys have most of the weight, and one that lacks is seen
FAILED = 1e6  # the error of attention that gives no numbers
UNKNOWN_TOKENS = 1031  # of a call whose segments are known when attention is reached
COMPARED_ROWS, LAST_ROWS = 128, 8  # queries that float32 attends with: evenly spread ones, and those of the last tile
IMAGE, FILTERS = (1, 32, 32, 32), (32, 32, 3, 3)  # of a convolution


class Shape(NamedTuple):
    """The shape of a run's attention calls on one rank."""

    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    rows: int  # tokens of this rank, which matrix products take
    width: int  # features of a token
    masked: bool = False  # True where some keys are masked
    whole: bool = True  # attention to all keys at once is tried
    parts: bool = False  # attention to a part of the keys is tried, with its sums, as rings and chunks merge it

    @classmethod
    def of_call(cls, ranks: Any, heads: tuple[int, int], sample: Tensor, masked: bool) -> Shape:
        """Return the shape of the current call of `ranks` that share a sequence (`SequenceRanks`). heads: of the model,
        and how wide one is; sample: what is denoised."""
        mesh, (count, head_dim) = ranks.mesh, heads
        tokens = sum(one.tokens for one in ranks.segments) or UNKNOWN_TOKENS
        keys, own = -(-tokens // mesh.ring), -(-count // mesh.ulysses)
        parts = mesh.ring > 1 or ranks.config.chunks != 1
        form = len(sample), keys, keys, own, head_dim, sample.dtype, -(-tokens // ranks.size), count * head_dim
        return cls(*form, masked, whole=mesh.ring == 1, parts=parts)


class DeviceTrial(NamedTuple):
    """The result of a trial on one rank, or on all ranks."""

    attention: str  # the kernels that attend
    error: float  # the greatest difference of attention from float32's, as a multiple of what the dtype may round
    copies: tuple[str, ...] = ()  # strided copies that differ from the host's
    wandering: tuple[str, ...] = ()  # operations that gave other bits when they were repeated

    @classmethod
    def merged(cls, trials: Iterable[DeviceTrial]) -> DeviceTrial:
        """Return the worst of all ranks' trials, which all ranks decide by."""
        kernels, errors, *found = zip(*trials, strict=True)
        copies, wandering = (tuple(sorted({name for one in names for name in one})) for names in found)
        return cls(", ".join(dict.fromkeys(kernels)), max(errors), copies, wandering)

    def check_copies(self, device: str) -> None:
        """Raise UserError where copies on a type of device are wrong."""
        if self.copies:
            raise UserError(
                f"copies of strided tensors on a {device} device differ from the host's ({', '.join(self.copies)}), so "
                f"results would be wrong: use a newer driver, or --device cpu"
            )

    def __str__(self) -> str:
        again = f"other bits when {', '.join(self.wandering)} are repeated" if self.wandering else "repeated: same bits"
        fault = " (wrong: attention goes in chunks)" if self.error > 1 else ""
        return f"{self.attention}, {self.error:.2f} of the error that may be{fault}; {again}"


@torch.no_grad()
def try_device(local: LocalAttention, shape: Shape, device: torch.device, kernels: Kernels) -> DeviceTrial:
    """Return what this rank's device computes. It takes about as long as three attention calls. local: what attends,
    also when `in_chunks` is set; kernels: what packs."""
    B, L, S, H, D = shape[:5]
    sizes = (B, L, H + 1, D), (B, S, H + 1, D), (B, S, H + 1, D)  # rows have a pitch, as slices of a larger tensor
    wide = [drawn(size, seed, shape.dtype, device) for seed, size in enumerate(sizes)]
    wide[0] *= PEAK
    q_BLHD, k_BSHD, v_BSHD = (x[:, :, :H] for x in wide)
    mask_B11S = (torch.arange(S, device=device) < S - S // 7).expand(B, 1, 1, S) if shape.masked else None
    attends: dict[str, Callable[..., Sequence[Tensor]]] = {"whole": lambda *x: (local.whole(*x),), "parts": local.part}
    names = [name for name in attends if getattr(shape, name)]
    rows = [*range(0, L, -(-L // COMPARED_ROWS)), *range(max(0, L - LAST_ROWS), L)]
    q_BHLD, k_BHSD, v_BHSD = (x.float().transpose(1, 2) for x in (q_BLHD[:, rows], k_BSHD, v_BSHD))
    exact = attend_plainly(q_BHLD, k_BHSD, v_BHSD, bias_of(mask_B11S, torch.float32))
    x, weight = (drawn((size, shape.width), 4, shape.dtype, device) for size in (shape.rows, 2 * shape.width))
    image, filters = (drawn(size, 5, shape.dtype, device) for size in (IMAGE, FILTERS))
    calls: dict[str, Callable[[], Sequence[Tensor]]] = {
        **{f"attention ({name})": partial(attends[name], q_BLHD, k_BSHD, v_BSHD, mask_B11S) for name in names},
        "matrix products": lambda: (linear(x, weight),),
        "convolutions": lambda: (conv2d(image, filters),),
    }
    found = {name: _attempt(call) for name, call in calls.items()}
    limit = CLOSE.get(shape.dtype, CLOSE[torch.float32])
    error = max(_error(found[f"attention ({name})"], exact, rows) for name in names) / limit
    wandering = tuple(name for name, call in calls.items() if not _same_bits(found[name], _attempt(call)))
    kernels_taken = {"parts": parts_kernel(q_BLHD, shape.masked, local.in_chunks)[1]}
    kernels_taken["whole"] = kernels_taken["parts"] if local.in_chunks else _sdpa(q_BLHD, k_BSHD, v_BSHD, mask_B11S)
    attention = ", ".join(kernels_taken[name] for name in names)
    return DeviceTrial(attention, error, wrong_copies(kernels, shape, device), wandering)


def _sdpa(*tensors: Any) -> str:
    """Return the name of the kernel that torch's SDPA takes for q, k, v and a mask, as far as torch tells."""
    try:
        return f"SDPA's {SDPBackend(torch._fused_sdp_choice(*by_heads(*tensors))).name.lower()}"
    except (RuntimeError, AttributeError, TypeError, ValueError):
        return "SDPA"


def _attempt(call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return what a call gives, and nothing where it fails."""
    try:
        return call()
    except (RuntimeError, TypeError, AttributeError):
        return ()


def _error(found: Sequence[Tensor], exact: Sequence[Tensor], rows: list[int]) -> float:
    """Return the greatest difference from what is exact in some rows, FAILED where there are no numbers."""
    pairs = [(a[:, rows].float(), b.transpose(1, 2)) for a, b in zip(found, exact, strict=False)]
    difference = max((float((a - b).abs().max()) for a, b in pairs), default=FAILED)
    return FAILED if math.isnan(difference) else min(FAILED, difference)


def _same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw numbers from -1 to 1 by arithmetic on integers: the same on every device, without its generator."""
    mixed = torch.arange(1, math.prod(shape) + 1, device=device).add_(seed << 32).mul_(MULTIPLIER)
    for _ in range(2):
        mixed.bitwise_xor_(mixed >> 32).mul_(MULTIPLIER)
    return (mixed >> 40).float().mul_(2.0**-23).to(dtype).view(shape)


def wrong_copies(kernels: Kernels, shape: Shape, device: torch.device) -> tuple[str, ...]:
    """Return the names of the strided copies that differ from the host's, of one attention call's rows at most."""
    size, host = (min(shape.queries, 300), shape.heads + 1, shape.head_dim), torch.device("cpu")
    x_LHD, there_LHD = (drawn(size, 6, shape.dtype, place) for place in (host, device))
    expected, found = _copies(x_LHD, Kernels("torch")), _copies(there_LHD, kernels)
    onto = torch.zeros_like(there_LHD)
    onto[:, 1:].copy_(x_LHD[:, 1:])
    found |= {"from the device": there_LHD[:, 1:].cpu(), "to the device": onto}
    expected |= {"from the device": x_LHD[:, 1:], "to the device": expected["into rows with a pitch"]}
    return tuple(name for name, x in found.items() if not torch.equal(x.cpu(), expected[name]))


def _copies(x_LHD: Tensor, kernels: Kernels) -> dict[str, Tensor]:
    part_LHD = x_LHD[:, 1:]
    into_LHD, unpacked_LHD = torch.zeros_like(x_LHD), torch.zeros_like(x_LHD)
    packed_N = x_LHD.new_zeros(part_LHD.numel())
    into_LHD[:, 1:] = part_LHD
    kernels.pack([[part_LHD]], [packed_N])
    kernels.unpack([packed_N.view(part_LHD.shape)], [unpacked_LHD[:, 1:]])
    return {
        "from rows with a pitch": part_LHD.contiguous(),
        "into rows with a pitch": into_LHD,
        "columns of an odd pitch": x_LHD.flatten(1)[:, 3:].contiguous(),
        "transposed": x_LHD.transpose(0, 1).contiguous(),
        "pack": packed_N,
        "unpack": unpacked_LHD,
    }
