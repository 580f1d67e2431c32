"""Prices a rank's torch calls as its device would take for them: a roofline of each, charged to the rank's program.

Strategies run on tensors of the meta device. One call of torch is one kernel: a launch, and its arithmetic or one pass
over its arguments and its result, whichever takes longer; views and new memory are free. Attention is one fused
kernel, and so is every operation of `kernels`. Whole numbers and truth values are real, on the CPU: they steer what is
sent. Where they come from, the scores of V-Major, random ones stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cocodiff.kernels import Kernels, Rows, TorchOps, moved_by
from cocodiff.kernels.residual import Prediction, Reconstructions
from cocodiff.planning.program import Recorder
from cocodiff.planning.roofline import LAUNCHES, seconds, started
from cocodiff.topology.machine import Device

DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by the bytes of a number
QUESTIONS = (  # about a tensor
    *("__get__", "__set__", "__len__", "__bool__", "__repr__", "__hash__", "size", "dim", "numel", "stride"),
    *("storage_offset", "is_contiguous", "data_ptr", "element_size", "untyped_storage", "is_floating_point"),
    *("get_device", "is_complex", "tolist", "item", "record_stream"),
)
VIEWS = (
    *("view", "view_as", "as_strided", "transpose", "t", "movedim", "permute", "flatten", "unflatten", "unsqueeze"),
    *("squeeze", "expand", "expand_as", "narrow", "chunk", "split", "split_with_sizes", "unbind", "detach"),
)
FREE = frozenset((*QUESTIONS, *VIEWS, "new_empty", "empty", "empty_like", "empty_strided"))
MAKERS = frozenset(["empty", "zeros", "ones", "full", "arange", "new_empty", "new_zeros", "new_ones", "new_full"])
UNPRICED = FREE - MAKERS
PRODUCTS = frozenset(["matmul", "__matmul__", "mm", "bmm", "linear", "addmm", "baddbmm"])
COPIES = frozenset(["pack", "gather_pack", "unpack", "scatter_rows"])  # what they read is what they write
ATTENTION = "scaled_dot_product"
SENT_PART = 0.37  # of whole tensors, what the lossless codec writes in their place, in a typical run


class Pricing(TorchFunctionMode):
    """Active while a rank's program is recorded."""

    def __init__(self, recorder: Recorder, device: Device) -> None:
        super().__init__()
        self._recorder, self._device = recorder, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in UNPRICED:  # most calls: nothing to do, and soon
            return func(*args, **kwargs)
        quick = QUICK.get(name)
        if quick is not None and not kwargs:
            found = quick(*args)
            if found is not None:
                if name not in FREE:
                    self.charge(0.0, bytes_of(args) + found.nbytes)
                return found
        if ATTENTION in name and args[0].device.type == "meta":
            return self._attention(name, *args[:3])
        if name in MAKERS:
            _keep_real(kwargs)
        out = func(*args, **kwargs)
        if name not in FREE and not (name == "__getitem__" and _slices(args[1])):
            inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
            changes = name == "__setitem__" or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
            if changes or not _is_view(inputs, outputs):
                flops = 2.0 * outputs[0].numel() * args[0].shape[-1] if name in PRODUCTS else 0.0
                self.charge(flops, bytes_of(inputs) + (0 if changes else bytes_of(outputs)))
        return out

    def charge(self, flops: float, moved_bytes: float, instructions: float = 0.0, launches: int = 1) -> None:
        """One kernel, or several that share what they take."""
        self._recorder.compute(seconds(self._device, flops, moved_bytes, instructions), launches)

    def compute(self, of_model_s: float, launches: int) -> None:
        """A part of the model that the plan knows the time of."""
        self._recorder.compute(of_model_s, launches)

    def _attention(self, name: str, q_BHLD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> Any:
        """One fused kernel; whether the sums come with the output is in its name."""
        B, H, L, D = q_BHLD.shape
        out = q_BHLD.new_empty((B, L, H, v_BHSD.shape[-1])).transpose(1, 2)
        moved = [q_BHLD, k_BHSD, v_BHSD, out]
        self.charge(2.0 * B * H * L * k_BHSD.shape[2] * (D + v_BHSD.shape[-1]), bytes_of(moved))
        return out if name == "scaled_dot_product_attention" else (out, q_BHLD.new_empty(B, H, L, dtype=torch.float32))


class PricedKernels(Kernels):
    """The operations of `kernels`, each charged as the traffic of its tensors or the instructions that our kernels
    take, whichever is longer. Scores are made up."""

    def __init__(self, pricing: Pricing, stable: float, threshold: float, seed: int) -> None:
        """stable, threshold: so large a part of the tokens shall score below the threshold times their norm, which is
        what a schedule by threshold goes by. No other schedule looks at more than the scores' order."""
        super().__init__("torch")
        self._pricing, self._generator = pricing, torch.Generator().manual_seed(seed)
        self._largest = threshold / stable if stable else 2 * threshold + 1.0

    def _run(self, op: str, *arguments: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():  # what the operation does inside is charged as one kernel
            self._pricing.charge(0.0, *cost_of(op, moved_by(op, arguments), arguments), LAUNCHES.get(op, 1))
            if op == "l1_score":
                shape = arguments[0].shape[:2]
                return torch.rand(shape, generator=self._generator) * self._largest, torch.ones(shape)
            if op in ("select", "qk_norm_rope"):
                return getattr(TorchOps(), op)(*arguments, **named)
            if op == "encode_residual":
                prefer_linear(arguments[2], arguments[5])
        return None  # the others write into what they are given


def cost_of(op: str, moved: Sequence[Tensor], arguments: Sequence[Any]) -> tuple[float, float]:
    """Bytes that an operation of `kernels` reads and writes, and instructions that it starts. moved, arguments: as
    `Kernels` has them."""
    parts: dict[str, bool] = {}
    if op == "encode_residual":
        x_BLHD, known, how, bits, code_BLHW, notes_N = arguments
        both = (how.linear or how.compare) and known.before is not None
        parts = {"int2": bits == 2, "taylor": both, "compare": both and how.compare, "measure": how.measure}
        traffic = bytes_of((x_BLHD, code_BLHW, notes_N)) + bytes_of_state(known, both)
    elif op == "decode_residual":
        code_BLHW, known, factor, bits, *onward = arguments
        parts = {"int2": bits == 2, "taylor": factor is not None, "onward": any(onward)}
        traffic = code_BLHW.nbytes + bytes_of_state(known, factor is not None) + bytes_of(onward)
    elif op == "encode_lossless":  # the numbers z are written by one launch and read by another
        x_BLHD, known, factor, _, streams, *_ = arguments
        sent = streams.nbytes if streams.dim() == 4 else SENT_PART * x_BLHD.nbytes
        traffic = 3 * x_BLHD.nbytes + sent + bytes_of_state(known, factor is not None)
    elif op == "stream_lengths":
        traffic = arguments[2].numel() // 256  # 16 bits for 512 numbers
    elif op == "decode_lossless":
        code_BLHW, rests, _, _, known, factor, _ = arguments
        traffic = code_BLHW.nbytes + rests.nbytes + bytes_of_state(known, factor is not None)
    elif op == "note_change":
        x_BLHD, last_BLHD, notes_N = arguments
        traffic = bytes_of((x_BLHD, last_BLHD, last_BLHD, notes_N))  # x is the last one afterwards
    else:
        traffic = bytes_of(arguments)
    itemsize = moved[0].element_size() if moved else 1
    numbers = traffic / (2 * itemsize) if op in COPIES else moved[0].numel()
    return traffic, started(op, numbers, [part for part, here in parts.items() if here])


def bytes_of_state(known: Reconstructions, both: bool) -> int:
    """Reading the newest reconstruction, with `both` the one before as well, and writing the next."""
    return (3 if both and known.before is not None else 2) * known.last.nbytes


def prefer_linear(how: Prediction, notes_N: Tensor) -> None:
    """The notes of an encoding that looked at no numbers: where it compares predictions, the linear one, which costs
    more, is said to be the better."""
    if how.compare:
        notes_N[1] -= 1


def bytes_of(value: Any) -> int:
    """Of all tensors in nested sequences and mappings; chosen rows count as what is read and written of them."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):  # most are of tensors
        return sum([one.nbytes if type(one) is Tensor else bytes_of(one) for one in value])
    if isinstance(value, Rows):
        source = value.source_RHD
        rows = math.prod(value.shape) * source.element_size()
        return rows if value.reference_RHD is None else 2 * rows
    return bytes_of(list(value.values())) if isinstance(value, dict) else 0


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested sequences and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for one in value for found in tensors_of(one)] if isinstance(value, (list, tuple)) else []


def _is_view(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether a call has made no new numbers: it returned none, or others' memory."""
    known = {x.untyped_storage()._cdata for x in inputs}
    return all(x.untyped_storage()._cdata in known for x in outputs)


def _slices(index: Any) -> bool:
    """Whether an index takes slices, not chosen rows."""
    if not isinstance(index, tuple):
        return not isinstance(index, Tensor)
    return not any(isinstance(part, Tensor) for part in index)


def _new_empty(like: Tensor, *shape: Any) -> Tensor | None:
    """As the method; None of tensors that are real."""
    return torch.empty(*shape, dtype=like.dtype, device=like.device) if like.is_meta else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """As the function; None of tensors that are real, or whose result has to be looked up."""
    first = tensors[0]
    if not first.is_meta or any(x.dtype != first.dtype or x.dim() != first.dim() for x in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum([x.shape[dim] for x in tensors])
    return torch.empty(shape, dtype=first.dtype, device=first.device)


# What torch does on the meta device in Python, ten times slower than the rest, and is called for every block.
QUICK: dict[str, Callable[..., Tensor | None]] = {"new_empty": _new_empty, "cat": _cat}


def _keep_real(settings: dict[str, Any]) -> None:
    """Has whole numbers and truth values made on the CPU."""
    dtype, device = settings.get("dtype"), settings.get("device")
    if dtype is not None and not dtype.is_floating_point and device is not None:
        settings["device"] = "cpu"
