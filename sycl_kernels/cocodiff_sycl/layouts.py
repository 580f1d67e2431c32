"""What a launch has to know of its tensors: where they lie, and what follows from how they lie.

Checks, and all numbers of a launch but addresses, follow from shapes, strides, dtypes and devices. They are worked out
for the first tensors of such layouts and looked up for later ones. Looking has to be cheap: a launch has up to a
hundred tensors, and what it asks of one takes Python a microsecond. C takes a tenth of it, where torch lets it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable
from ctypes import c_char_p, c_uint32, c_void_p, py_object
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

KEPT = 1024  # results of one owner; a run has fewer layouts, and one that has more starts again
T = TypeVar("T")
Tensors = tuple[Tensor | None, ...]
# Where tensors lie (int64 each, 0 for None), and how: equal for equal shapes, strides, dtypes and devices, else not.
Look = Callable[[Tensors], tuple[bytes, Hashable]]


@cache
def numbers_of(count: int) -> struct.Struct:
    """So many numbers of 8 bytes, as C takes them."""
    return struct.Struct(f"{count}q")


class Layouts(Generic[T]):
    """What was worked out for tensors of given layouts."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._kept: dict[Hashable, T] = {}

    def of(self, words: Hashable, tensors: Tensors, make: Callable[..., T], *arguments: Any) -> tuple[T, bytes]:
        """make(*arguments), or what it gave before for equal words and tensors of the same layouts; and where these
        tensors lie.

        words and tensors stand for all arguments; of a tensor, make may look at shape, strides, dtype and device, at
        nothing else. What it raises is not kept.
        """
        addresses, layouts = self._look(tensors)
        key = words, layouts
        found = self._kept.get(key)
        if found is None:
            found = make(*arguments)
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found, addresses


def look(tensors: Tensors) -> tuple[bytes, Hashable]:
    """A `Look` in Python."""
    addresses = numbers_of(len(tensors)).pack(*[0 if x is None else x.data_ptr() for x in tensors])
    return addresses, tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


class ExchangeTable(ctypes.Structure):
    """DLPack's table of C functions for a library's tensors, as torch 2.13 has one (DLPackExchangeAPI)."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("older", c_void_p),
        ("allocate", c_void_p),
        ("managed_tensor_of", c_void_p),
        ("object_of", c_void_p),
        ("tensor_of", c_void_p),
        ("stream", c_void_p),
    ]


def look_of(library: Path) -> Look:
    """A `Look` in C (tensors.hpp); in Python where torch has no such table, or one of another kind."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return look
    pointer_of = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = ExchangeTable.from_address(pointer_of(capsule, b"dlpack_exchange_api"))
    if table.major != 1 or not table.tensor_of:
        return look
    python = ctypes.pythonapi
    functions = python.PyTuple_Size, python.PyTuple_GetItem, python.PyBytes_FromStringAndSize
    addresses = [ctypes.cast(function, c_void_p).value for function in functions]
    reads = numbers_of(5).pack(*addresses, id(None), table.tensor_of)
    # Unlike the library's other functions it is called with the interpreter's lock held: it reads Python's objects.
    in_c = ctypes.PyDLL(str(library)).cocodiff_look
    in_c.restype, in_c.argtypes = py_object, (c_char_p, py_object)

    def quick_look(tensors: Tensors) -> tuple[bytes, Hashable]:
        try:
            found = in_c(reads, tensors)
        except Exception:  # of what DLPack has no name for, as meta tensors: the checks have words for it
            return look(tensors)
        split = 8 * len(tensors)
        return found[:split], found[split:]

    return quick_look
