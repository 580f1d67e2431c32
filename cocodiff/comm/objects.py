"""The form of Python values in messages: JSON, followed by the bytes of tensors and arrays. Only plain data is sent.

Reading a message never runs code that it contains, as unpickling would: communication libraries do not check who
connects to their ports. A record is built only if its class is in our own packages and imported in this process.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections import Counter
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTH = struct.Struct("<q")  # the length of the JSON, which precedes it
PACKAGES = ("cocodiff", "cocodiff_eval", "cocodiff_bench")  # packages whose records may be sent


def as_bytes(value: Any) -> Tensor:
    """Return a value as the bytes of a message, uint8 [n] on the CPU. Raise TypeError for values of other types.

    Args:
        value: None, numbers, strings, bytes, tensors (which arrive on the CPU), arrays, dtypes, our dataclasses and
            named tuples, and lists, tuples, sets, dicts and Counters of these.
    """
    blobs: list[bytes] = []
    text = json.dumps(_to_json(value, blobs)).encode()
    return torch.frombuffer(bytearray(b"".join((LENGTH.pack(len(text)), text, *blobs))), dtype=torch.uint8)


def as_value(content: Tensor) -> Any:
    """Return the value in a message that `as_bytes` has made. Raise ValueError if it is not such a message."""
    data = content.cpu().numpy().tobytes()
    try:
        (length,) = LENGTH.unpack_from(data)
        start = LENGTH.size + length
        return _from_json(json.loads(data[LENGTH.size : start]), BytesIO(data[start:]))
    except (struct.error, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"a message of {len(data)} bytes is no value of ours ({error})") from error


def _to_json(value: Any, blobs: list[bytes]) -> Any:
    """Return a value as JSON can hold it: lists, strings and numbers as they are, everything else as {kind: content}.

    The bytes of tensors, arrays and bytes are appended to `blobs`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        blobs.append(flat.numpy().tobytes())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), flat.numel()]}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        blobs.append(value.tobytes())
        return {"array": [value.dtype.str, list(value.shape), value.nbytes]}
    if isinstance(value, dict):
        pairs = [[_to_json(key, blobs), _to_json(one, blobs)] for key, one in value.items()]
        return {"counts" if isinstance(value, Counter) else "dict": pairs}
    if isinstance(value, list):
        return [_to_json(one, blobs) for one in value]
    fields = _fields(type(value))
    if fields is not None:
        kind = type(value)
        parts = [_to_json(getattr(value, name), blobs) for name in fields]
        return {"record": [kind.__module__, kind.__qualname__, parts]}
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {name: [_to_json(one, blobs) for one in value]}
    raise TypeError(f"a {type(value).__module__}.{type(value).__name__} is not sent between ranks: send plain data")


def _from_json(found: Any, blobs: BytesIO) -> Any:
    """Return the value that `_to_json` has converted.

    Args:
        found: its result.
        blobs: the bytes that it has appended, which are read in the same order.
    """
    if isinstance(found, list):
        return [_from_json(one, blobs) for one in found]
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    if kind == "dtype":
        return _dtype(content)
    if kind == "bytes":
        return bytes(_taken(blobs, content))
    if kind == "tensor":
        name, shape, count = content
        flat = torch.frombuffer(_taken(blobs, count), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
        return flat.view(_dtype(name)).view(shape)
    if kind == "array":
        name, shape, count = content
        return np.frombuffer(_taken(blobs, count), np.dtype(name)).reshape(shape)
    if kind in ("dict", "counts"):
        pairs = {_from_json(key, blobs): _from_json(one, blobs) for key, one in content}
        return pairs if kind == "dict" else Counter(pairs)
    if kind == "record":
        module, name, parts = content
        return _record(module, name, [_from_json(part, blobs) for part in parts])
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_from_json(one, blobs) for one in content)


def _taken(blobs: BytesIO, count: int) -> bytearray:
    """Read the next `count` bytes of a message. Raise ValueError if there are fewer."""
    taken = bytearray(blobs.read(count))
    if len(taken) != count:
        raise ValueError(f"{count} bytes more were expected, there are {len(taken)}")
    return taken


def _dtype(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as "float32". Raise ValueError if it is another attribute of
    torch."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _fields(kind: type) -> list[str] | None:
    """Return the field names of a dataclass or named tuple of our packages, in the order of its constructor.

    Return None for other types.
    """
    if kind.__module__.split(".")[0] not in PACKAGES:
        return None
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _record(module: str, name: str, parts: list[Any]) -> Any:
    """Build a dataclass or named tuple of our packages from a message.

    Raise ValueError if the class is none, is not imported in this process, or has another number of fields.

    Args:
        module: the class's module.
        name: the class's name.
        parts: the values of its fields, in order.
    """
    kind: Any = getattr(sys.modules.get(module), name, None)
    fields = _fields(kind) if isinstance(kind, type) else None
    if fields is None or len(fields) != len(parts):
        raise ValueError(f"{module}.{name} of {len(parts)} fields is none of our records")
    return kind(**dict(zip(fields, parts, strict=True)))
