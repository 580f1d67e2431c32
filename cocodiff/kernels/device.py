"""xpu, cuda and cpu behind a few words: which device a rank has, and the order between its streams."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cocodiff.config.errors import OwnRankError

T = TypeVar("T")
IPEX = "intel_extension_for_pytorch"
IPEX_ASKED = "COCODIFF_IPEX"  # 1: import it with any PyTorch that it fits
WITHOUT_IPEX = (2, 10)  # from this PyTorch on it is not needed, and calls may be faster or slower with it
log = logging.getLogger("cocodiff.kernels.device")


def rank_device(name: str, local_rank: int, shared: bool = False) -> torch.device:
    """The device of a rank: "cpu", "xpu", "cuda", or "auto" for the accelerator that is really there, else the CPU.

    On accelerators the local rank picks the tile and makes it current, which must happen before any process group.
    shared: where ranks outnumber tiles, they take them in turns.
    Raises OwnRankError when the named accelerator is absent or, unshared, has fewer tiles than ranks."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = found.type if found is not None else "cpu"
    if name == "xpu":
        import_ipex()
    if name == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(name)
    count = module.device_count() if module.is_available() else 0
    if not count or (local_rank >= count and not shared):
        raise OwnRankError(f"local rank {local_rank} has no {name} device: {count} found; {_more_devices(name, count)}")
    device = torch.device(name, local_rank % count)
    module.set_device(device)
    return device


def _more_devices(name: str, count: int) -> str:
    """The remedy where ranks outnumber devices."""
    remedy = "start fewer ranks a node, or --transport host to share them" if count else "start fewer ranks a node"
    if name != "xpu":
        return remedy
    environment = [
        f"{key}={os.environ[key]}" for key in ("ZE_FLAT_DEVICE_HIERARCHY", "ZE_AFFINITY_MASK") if key in os.environ
    ]
    return (
        f"{remedy}, or let each rank see all tiles: ZE_FLAT_DEVICE_HIERARCHY=FLAT, no ZE_AFFINITY_MASK and no "
        f"gpu_tile_compact.sh (now {', '.join(environment) or 'neither is set'})"
    )


def import_ipex() -> bool:
    """Imports Intel's extension of PyTorch where there is one for this PyTorch: older stacks have xpu through it alone,
    newer ones a few more kernels; from WITHOUT_IPEX on only where the user asks for it. It ends the process when its
    version is another one's, so that is looked at first."""
    of_torch, asked = re.findall(r"\d+", torch.__version__)[:2], os.environ.get(IPEX_ASKED) == "1"
    if not asked and tuple(map(int, of_torch)) >= WITHOUT_IPEX:
        return False
    try:
        version = metadata.version(IPEX)
    except metadata.PackageNotFoundError:
        if asked:
            log.warning("%s=1, but %s is not installed", IPEX_ASKED, IPEX)
        return False
    own = re.findall(r"\d+", version)[:2]
    if own != of_torch:
        log.warning("%s %s is for another PyTorch than %s: not imported", IPEX, version, torch.__version__)
        return False
    try:
        import_module(IPEX)
    except Exception as error:
        log.warning("%s %s could not be imported and is not used: %s", IPEX, version, error)
        return False
    return True


def set_repeatable(device: torch.device, wanted: bool) -> Callable[[], None]:
    """Have oneDNN's products on an accelerator add up in one order, or in any: by default repeated calls may differ
    there (torch-xpu-ops 3201), on a CPU they do not. Return what puts back what was set before."""
    flags: Any = torch.backends.mkldnn
    undo = partial(setattr, flags, "deterministic", flags.deterministic)
    if device.type != "cpu":
        flags.deterministic = wanted
    return undo


FOR_PROCESSES = 31 / 32  # of a device's memory: the rest, 2 GiB of 64, is taken to be the driver's and the library's


def free_memory(device: torch.device, ranks: int) -> int | None:
    """Bytes that this process can still take: an equal part of what its tile, or on CPU the node, has available, for
    each of the node's `ranks` that share it, and what its allocator holds unused. None where the system does not tell.
    """
    if device.type == "cpu":
        available = _meminfo("MemAvailable")
        return None if available is None else available // ranks
    module = torch.get_device_module(device)
    allocated, reserved = module.memory_allocated(device), module.memory_reserved(device)
    sharing = ranks_on_device(device, ranks)
    left = module.get_device_properties(device).total_memory // sharing * FOR_PROCESSES - allocated
    try:
        told = module.mem_get_info(device)[0]
    except RuntimeError:  # an xpu driver without sysman knows only how much there is in all
        told = 0
    # Drivers of the Max 1550 tell 0, or as much as before an allocation (pytorch 161381, vllm 47134 and 47820).
    return int(min(told // sharing + reserved - allocated, left) if told else left)


def ranks_on_device(device: torch.device, ranks: int) -> int:
    """How many of a node's `ranks` share a device at most: local ranks take those that they see in turns. Where a
    launcher's mask leaves each rank a tile alone, it is theirs, though all of them see one."""
    if device.type == "cpu":
        return 1
    count = int(torch.get_device_module(device).device_count())
    return 1 if count == 1 and "ZE_AFFINITY_MASK" in os.environ else -(-ranks // count)


def _meminfo(key: str) -> int | None:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


class StreamMark:
    """A point in the current stream of a device. On CPU work is done when its call returns: nothing to mark."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = None if device.type == "cpu" else torch.get_device_module(device), device
        if self._module is not None:
            self._event = self._module.Event()
            self._event.record(self._module.current_stream(device))

    def wait(self) -> None:
        """Makes the caller's current stream wait for this point; the host does not block."""
        if self._module is not None:
            self._module.current_stream(self._device).wait_event(self._event)

    def wait_on_host(self) -> None:
        """Returns when this point has been reached."""
        if self._module is not None:
            self._event.synchronize()


class HandedOver(Generic[T]):
    """A value on its way to another stream, from the one that is current where this is made. Every tensor that one
    thread makes and another uses goes this way, so that the order and the memory are seen to in one place.

    value: what `used_on_current_stream` takes. On CPU work is done when its call returns: there is nothing to order."""

    def __init__(self, value: T, device: torch.device) -> None:
        self._value, self._made = value, None if device.type == "cpu" else StreamMark(device)

    def take(self) -> T:
        """The value, for the caller's current stream, which goes on behind what the other one held; the host does not
        block. The value's memory is kept until this stream is through with it, whoever frees it."""
        if self._made is not None:
            self._made.wait()
            used_on_current_stream(self._value)
        return self._value


class OwnStream:
    """A stream of a lane's own on accelerators; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device=device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the calling thread's current stream."""
        if self._stream is None:
            yield
            return
        module = torch.get_device_module(self._device)
        module.set_device(self._device)
        with module.stream(self._stream):
            yield


def used_on_current_stream(value: T) -> T:
    """Tells the allocator that the current stream uses a value's tensors, on whichever one they were made: their memory
    is not handed out again before that.

    value: a tensor, what holds tensors, or a list, tuple or mapping of these; or no tensor: None, a number, a text.
    Raises TypeError for other objects, whose tensors would be forgotten."""
    if isinstance(value, Tensor):
        if value.device.type not in ("cpu", "meta"):
            value.record_stream(torch.get_device_module(value.device).current_stream(value.device))
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            used_on_current_stream(part)
    elif hasattr(value, "contained_tensors"):
        used_on_current_stream(list(value.contained_tensors()))
    elif not isinstance(value, int | float | str | None):
        raise TypeError(f"a {type(value).__name__} passes to another stream and does not tell what tensors it holds")
    return value


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = -0x61C8864680B583EB  # odd, of 64 bits: 2^64 over the golden ratio


def digest(x: Tensor, first: int = 0) -> Tensor:
    """A tensor's bits in one number, int64 []: a sum of mixed values and places, the same in any order of summation.

    first: the place of its first element, or of its first 8 bytes where it is a multiple of 8 bytes: a tensor's digest
    is the sum of those of its pieces."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().contiguous().flatten()
    size = flat.element_size()
    if flat.nbytes % 8 == 0:  # several elements at a time
        flat, size = (flat.clone() if flat.storage_offset() * size % 8 else flat), 8
    bits = flat.view(INTEGERS[size]).to(torch.int64)
    mixed = torch.arange(first + 1, first + 1 + len(bits), device=x.device).mul_(MULTIPLIER).add_(bits).mul_(MULTIPLIER)
    for _ in range(2):  # after one round a word's highest bits have changed few others: two errors there may cancel
        mixed.bitwise_xor_(mixed >> 32).mul_(MULTIPLIER)
    return mixed.sum()
