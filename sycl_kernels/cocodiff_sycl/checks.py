"""The checks of the operations' tensors. A mistake that a kernel could not detect is raised here, before the launch.

In each function `op` is the operation that the message names, and `name` the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

# dtypes with kernels, and their names in kernels
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def check_like(op: str, device: torch.device, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have this device and dtype, and TypeError if the dtype has no kernel.

    Args:
        op: the operation that the message names.
        device: the device that they must be on.
        dtype: the dtype that they must have.
        tensors: the tensors, by the names for the message.
    """
    if dtype not in DTYPES:
        raise TypeError(f"{op}: {dtype} has no kernel; use {', '.join(map(str, DTYPES))}")
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, not on {device}: move it there")
        if tensor.dtype != dtype:
            raise ValueError(f"{op}: {name} is {tensor.dtype}, not {dtype}: convert it")


def check_rows(op: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Raise ValueError or TypeError unless all tensors have this device, dtype and shape, and a last stride of 1.

    Args:
        op: the operation that the message names.
        device: the device that they must be on.
        dtype: the dtype that they must have.
        shape: the shape that they must have.
        tensors: the tensors, by the names for the message.
    """
    for name, tensor in tensors.items():
        check_like(op, device, dtype, **{name: tensor})
        check_shape(op, name, tensor, shape)
        check_last_stride(op, name, tensor)


def check_index(op: str, index: Tensor, device: torch.device) -> None:
    """Raise ValueError unless a tensor of row numbers is contiguous int64 of one dimension on the device. `op` is the
    operation that the message names."""
    if index.dtype != torch.int64 or index.dim() != 1 or not index.is_contiguous():
        raise ValueError(
            f"{op}: an index must be contiguous int64 of one dimension, not {index.dtype} {list(index.shape)}"
        )
    if index.device != device:
        raise ValueError(f"{op}: an index is on {index.device}, not on {device}: move it there")


def check_numbers(op: str, index: Tensor, rows: int, least: int = 0) -> None:
    """Raise ValueError if a tensor of row numbers has one that is out of range.

    Args:
        op: the operation that the message names.
        index: the row numbers.
        rows: number of rows that exist.
        least: smallest valid number.
    """
    if index.numel():
        numbers = index.cpu().numpy()  # for short lists several times faster than torch's own reductions
        low, high = int(numbers.min()), int(numbers.max())
        if low < least or high >= rows:
            raise ValueError(f"{op}: index from {low} to {high} for {rows} rows: give {least} to {rows - 1}")


def check_last_stride(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor's last dimension is contiguous. `op` and `name` are the operation and the tensor
    in the message."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{op}: {name} {list(tensor.shape)} has stride {tensor.stride(-1)} in its last dimension, not 1: "
            f"make it contiguous there"
        )


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor has this shape. `op` and `name` are the operation and the tensor in the
    message."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} is {list(tensor.shape)}, not {list(shape)}")


def check_dims(op: str, name: str, tensor: Tensor, dims: int) -> None:
    """Raise ValueError unless a tensor has `dims` dimensions. `op` and `name` are the operation and the tensor in the
    message."""
    if tensor.dim() != dims:
        raise ValueError(f"{op}: {name} has {tensor.dim()} dimensions {list(tensor.shape)}, not {dims}")


def check_no_overlap(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError if a tensor to be written is expanded, so that several of its elements share memory. `op` and
    `name` are the operation and the tensor in the message."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{op}: {name} {list(tensor.shape)} is expanded (stride 0): give one with memory of its own")
