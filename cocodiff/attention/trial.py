"""A trial of a device at a run's own shapes: attention is compared with float32, strided copies with the host's, and
operations are repeated.

Drivers and libraries have been found to give wrong results there without an error (docs/aurora.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import conv2d, linear

from cocodiff.attention.local import LocalAttention, by_heads, parts_kernel
from cocodiff.attention.sums import CLOSE, attend_plainly
from cocodiff.kernels import Kernels
from cocodiff.kernels.device import MULTIPLIER

PEAK = 9.0  # size of queries relative to keys: few keys then have most of the weight, and a missing key shows
FAILED = 1e6  # error that is reported if attention gives no finite numbers
COMPARED_ROWS, LAST_ROWS = 128, 8  # number of queries compared with float32: evenly spread ones, and the last ones
COPIES = "into a pitch", "by the host", "unpack", "pack", "from a pitch", "odd columns", "transposed"
IMAGE, FILTERS = (1, 32, 32, 32), (32, 32, 3, 3)  # shapes of a convolution's operands


class Shape(NamedTuple):
    """The shape of a run's attention calls on one rank, at which its device is tried."""

    qkv: tuple[int, int, int, int]  # batch, tokens (queries and keys), heads, head dim
    matrix: tuple[int, int]  # tokens and features of matrix products with weights
    dtype: torch.dtype
    masked: bool = False  # True where some keys are masked
    parts: bool = False  # True to also try attention to a part of the keys, as rings and chunks need it


@dataclass(frozen=True)
class DeviceTrial:
    """The result of trying a device, on one rank or combined over all ranks."""

    attention: str  # names of the attention kernels
    error: float  # largest difference from attention in float32; 1 is the limit for rounding in this dtype
    copies: tuple[str, ...] = ()  # names of strided copies that differ from the host's
    wandering: tuple[str, ...] = ()  # names of operations that gave other bits when they were repeated

    @classmethod
    def merged(cls, trials: Iterable[DeviceTrial]) -> DeviceTrial:
        """Return the worst of the ranks' results: the largest error, and all names of wrong copies and of changing
        operations.

        Args:
            trials: the result of each rank.
        """
        kernels, errors, *found = zip(*(vars(one).values() for one in trials), strict=True)
        return cls(", ".join(dict.fromkeys(kernels)), max(errors), *(tuple(sorted({*chain(*one)})) for one in found))

    def __str__(self) -> str:
        again = f"other bits of {', '.join(self.wandering)}" if self.wandering else "same bits"
        told = f"{self.attention}, {self.error:.2f} of the error that may be{' (wrong)' * (self.error > 1)}"
        copies = f"; copies that differ from the host's: {', '.join(self.copies)}" * bool(self.copies)
        return f"{told}; repeated: {again}{copies}"


@torch.no_grad()
def try_device(local: LocalAttention, shape: Shape, device: torch.device, kernels: Kernels) -> DeviceTrial:
    """Try this rank's device at the shape of a run's calls, and return what is wrong. It takes about as long as three
    attention calls.

    Attention is compared with float32, and copies between strided tensors with the host's. Attention, matrix products
    and convolutions are repeated to see if their bits stay the same.

    Args:
        local: computes attention; with its `in_chunks` set, that path is tried.
        shape: the shape of the calls.
        device: the device.
        kernels: the operations that pack and unpack.
    """
    (B, S, H, D), _, dtype, masked, parts = shape
    keys, limit = S - S // 7 * masked, CLOSE.get(dtype, CLOSE[torch.float32])
    q_BSHD, k_BSHD, v_BSHD = (drawn((B, S, H + 1, D), seed, dtype, device)[:, :, :H] for seed in range(3))  # a pitch
    q_BSHD *= PEAK
    mask_B11S = (torch.arange(S, device=device) < keys).expand(B, 1, 1, S) if masked else None
    operands, sizes = (q_BSHD, k_BSHD, v_BSHD, mask_B11S), (shape.matrix, (2 * shape.matrix[1], shape.matrix[1]))
    attends: dict[str, Callable[[], Any]] = {"attention": partial(local.whole, *operands)}
    attends |= {"attention in parts": partial(local.part, *operands)} if parts else {}
    products = partial(linear, *(drawn(size, 4, dtype, device) for size in sizes))
    convolutions = partial(conv2d, *(drawn(size, 5, dtype, device) for size in (IMAGE, FILTERS)))
    calls = attends | {"matrix products": products, "convolutions": convolutions}
    found, again = ({name: _attempt(call) for name, call in calls.items()} for _ in range(2))
    rows = [*range(0, S, -(-S // COMPARED_ROWS)), *range(max(0, S - LAST_ROWS), S)]
    q_BHLD, k_BHSD, v_BHSD = (x.float().transpose(1, 2) for x in (q_BSHD[:, rows], k_BSHD[:, :keys], v_BSHD[:, :keys]))
    exact = [x.transpose(1, 2) for x in attend_plainly(q_BHLD, k_BHSD, v_BHSD, None)]
    error = max(_error([x[:, rows] for x in found[name]], exact) for name in attends) / limit
    wandering = tuple(name for name in calls if not all(map(torch.equal, found[name], again[name])))
    of_parts = parts_kernel(device.type, dtype, masked, local.in_chunks).told
    taken = dict.fromkeys([of_parts if local.in_chunks else _sdpa(*operands), *[of_parts] * parts])
    return DeviceTrial(", ".join(taken), round(error, 2), wrong_copies(kernels, shape, device), wandering)


def _sdpa(*operands: Any) -> str:
    """Return the name of the kernel that torch's scaled_dot_product_attention chooses, such as "SDPA's
    flash_attention".

    Return "SDPA" if torch does not report it.

    Args:
        operands: q, k, v [B, S, H, D] and a mask or None.
    """
    try:
        return f"SDPA's {SDPBackend(torch._fused_sdp_choice(*by_heads(*operands))).name.lower()}"
    except (RuntimeError, AttributeError, TypeError, ValueError):
        return "SDPA"


def _attempt(call: Callable[[], Any]) -> Sequence[Tensor]:
    """Call a function and return the tensors that it returns, in a sequence. Return an empty one if it raises
    RuntimeError, TypeError or AttributeError.

    Args:
        call: computes one tensor or several, without arguments.
    """
    try:
        found = call()
    except (RuntimeError, TypeError, AttributeError):
        return ()
    return (found,) if isinstance(found, Tensor) else found


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest absolute difference of tensors from their exact values; FAILED if there are none, or values
    are not finite.

    Args:
        found: the output, and the log-sum-exp if it was computed.
        exact: their exact values in float32, in the same order.
    """
    of_each = [(a.float() - b).abs().nan_to_num(FAILED).max() for a, b in zip(found, exact, strict=False)]
    return max(map(float, of_each), default=FAILED)


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return pseudo-random numbers from -1 to 1, made from integers, so that they are the same on every device.

    Args:
        shape: shape of the result.
        seed: other seeds give other numbers.
        dtype: dtype of the result.
        device: device of the result.
    """
    mixed = torch.arange(1, math.prod(shape) + 1, device=device).add_(seed << 32).mul_(MULTIPLIER)
    for _ in range(2):
        mixed.bitwise_xor_(mixed >> 32).mul_(MULTIPLIER)
    return (mixed >> 40).float().mul_(2.0**-23).to(dtype).view(shape)


def wrong_copies(kernels: Kernels, shape: Shape, device: torch.device) -> tuple[str, ...]:
    """Copy strided tensors on a device and on the host. Return the names (in COPIES) of the copies that differ.

    Args:
        kernels: the operations that pack and unpack on the device.
        shape: shape of an attention call, of which at most 300 rows are copied.
        device: the device.
    """
    (_, S, H, D), found = shape.qkv, []
    for own, place in ((Kernels("torch"), torch.device("cpu")), (kernels, device)):
        x_LHD = drawn((min(S, 300), H + 1, D), 6, shape.dtype, place)
        part_LHD, onto_NLHD = x_LHD[:, 1:], x_LHD.new_zeros(3, *x_LHD.shape)
        packed_N = x_LHD.new_zeros(part_LHD.numel())
        onto_NLHD[0, :, 1:], onto_NLHD[1, :, 1:] = part_LHD, part_LHD.cpu()
        own.pack([[part_LHD]], [packed_N])
        own.unpack([packed_N.view(part_LHD.shape)], [onto_NLHD[2, :, 1:]])
        copies = part_LHD, x_LHD.flatten(1)[:, 3:], x_LHD.transpose(0, 1)
        found.append([*onto_NLHD.cpu(), packed_N.cpu(), *(x.contiguous().cpu() for x in copies)])
    return tuple(name for name, *both in zip(COPIES, *found, strict=True) if not torch.equal(*both))
