"""What the operations ask of their tensors. What a kernel cannot notice is an error here, before a launch."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def check_like(op: str, device: torch.device, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raises ValueError unless all tensors are of the device and dtype, and TypeError for a dtype without kernel."""
    if dtype not in DTYPES:
        raise TypeError(f"{op}: {dtype} has no kernel; use {', '.join(map(str, DTYPES))}")
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, not on {device}: move it there")
        if tensor.dtype != dtype:
            raise ValueError(f"{op}: {name} is {tensor.dtype}, not {dtype}: convert it")


def check_rows(op: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Raises as the checks below do unless all tensors are of the device, dtype and shape, and their heads' numbers lie
    side by side."""
    for name, tensor in tensors.items():
        check_like(op, device, dtype, **{name: tensor})
        check_shape(op, name, tensor, shape)
        check_last_stride(op, name, tensor)


def check_index(op: str, index: Tensor, device: torch.device) -> None:
    """Raises ValueError unless index is contiguous int64 on the device."""
    if index.dtype != torch.int64 or index.dim() != 1 or not index.is_contiguous():
        raise ValueError(
            f"{op}: an index must be contiguous int64 of one dimension, not {index.dtype} {list(index.shape)}"
        )
    if index.device != device:
        raise ValueError(f"{op}: an index is on {index.device}, not on {device}: move it there")


def check_numbers(op: str, index: Tensor, rows: int, least: int = 0) -> None:
    """Raises ValueError for numbers of an index that are out of range."""
    if index.numel():
        numbers = index.cpu().numpy()  # for short lists several times faster than torch's own reductions
        low, high = int(numbers.min()), int(numbers.max())
        if low < least or high >= rows:
            raise ValueError(f"{op}: index from {low} to {high} for {rows} rows: give {least} to {rows - 1}")


def check_last_stride(op: str, name: str, tensor: Tensor) -> None:
    """Raises ValueError where the numbers of a head do not lie side by side."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{op}: {name} {list(tensor.shape)} has stride {tensor.stride(-1)} in its last dimension, not 1: "
            f"make it contiguous there"
        )


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} is {list(tensor.shape)}, not {list(shape)}")


def check_dims(op: str, name: str, tensor: Tensor, dims: int) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"{op}: {name} has {tensor.dim()} dimensions {list(tensor.shape)}, not {dims}")


def check_no_overlap(op: str, name: str, tensor: Tensor) -> None:
    """Raises ValueError where a tensor that is written has several numbers in one place (an expanded one)."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{op}: {name} {list(tensor.shape)} is expanded (stride 0): give one with memory of its own")
