"""An interface to xpu, cuda and cpu: the device of a rank, its free memory, and the order between its streams."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module, metadata
from typing import Any, TypeVar

import torch
from torch import Tensor

from cocodiff.config.errors import OwnRankError
from cocodiff.config.files import available_memory

T = TypeVar("T")
IPEX = "intel_extension_for_pytorch"
IPEX_ASKED = "COCODIFF_IPEX"  # environment variable; 1: import IPEX with any PyTorch that it fits
HIERARCHY = ("ZE_FLAT_DEVICE_HIERARCHY", "ZE_AFFINITY_MASK")  # variables that decide what counts as a device
WITHOUT_IPEX = (2, 10)  # from this version of PyTorch on IPEX is not needed; calls may be faster or slower with it
log = logging.getLogger("cocodiff.kernels.device")


def rank_device(name: str, local_rank: int, shared: bool = False) -> torch.device:
    """Return the device of a rank, and on accelerators make it the current one. Call this before any process group is
    made.

    Raise OwnRankError if the named accelerator is absent or, unless `shared`, has fewer tiles than there are ranks.

    Args:
        name: "cpu", "xpu", "cuda", or "auto" for the accelerator that is present, else the CPU.
        local_rank: index of the rank on its node, which is the index of its tile.
        shared: True if ranks may outnumber tiles; ranks are then assigned to tiles round-robin.
    """
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
    """Return the remedy to print if a node has more ranks than devices.

    Args:
        name: type of the device, such as "xpu".
        count: number of devices that this process finds.
    """
    remedy = "start fewer ranks a node, or --transport host to share them" if count else "start fewer ranks a node"
    if name != "xpu":
        return remedy
    now = ", ".join(f"{key}={os.environ[key]}" for key in HIERARCHY if key in os.environ) or "neither is set"
    all_tiles = "ZE_FLAT_DEVICE_HIERARCHY=FLAT, no ZE_AFFINITY_MASK and no gpu_tile_compact.sh"
    return f"{remedy}, or let each rank see all tiles: {all_tiles} (now {now})"


def import_ipex() -> bool:
    """Import Intel's extension of PyTorch (IPEX) if it is needed and fits this PyTorch. Return True if it was imported.

    Older PyTorch has xpu through IPEX only. From WITHOUT_IPEX on it is imported only if the user asks for it. An IPEX
    for another version of PyTorch ends the process when it is imported, so its version is compared first.
    """
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
    """Set whether an accelerator's matrix products (oneDNN's) add up in one order, for equal bits in every run. Return
    a function that restores what was set before.

    Without it repeated calls may differ (torch-xpu-ops 3201). On a CPU they do not, and nothing changes.

    Args:
        device: the rank's device.
        wanted: True for one order, False for any.
    """
    flags: Any = torch.backends.mkldnn
    undo = partial(setattr, flags, "deterministic", flags.deterministic)
    if device.type != "cpu":
        flags.deterministic = wanted
    return undo


FOR_PROCESSES = 31 / 32  # usable share of a device's memory; the rest, 2 GiB of 64, is left to the driver and libraries


def free_memory(device: torch.device, ranks: int) -> int | None:
    """Return the number of bytes that this process can still allocate, or None if the system does not report it.

    It is this rank's equal share of what the device (on CPU: the node) has available, plus what this process's
    allocator holds unused.

    Args:
        device: the rank's device.
        ranks: number of ranks on the node.
    """
    if device.type == "cpu":
        available = available_memory()
        return None if available is None else available // ranks
    module = torch.get_device_module(device)
    allocated, reserved = module.memory_allocated(device), module.memory_reserved(device)
    sharing = ranks_on_device(device, ranks)
    left = module.get_device_properties(device).total_memory // sharing * FOR_PROCESSES - allocated
    try:
        told = module.mem_get_info(device)[0]
    except RuntimeError:  # an xpu driver without sysman reports only the total
        told = 0
    # Drivers of the Max 1550 report 0, or the same number after an allocation (pytorch 161381, vllm 47134 and 47820).
    return int(min(told // sharing + reserved - allocated, left) if told else left)


def ranks_on_device(device: torch.device, ranks: int) -> int:
    """Return the largest number of a node's ranks that share one device; 1 on a CPU.

    Local ranks are assigned to the devices that they see round-robin. If a launcher's mask shows each rank a single
    tile, it is that rank's own.

    Args:
        device: a device of the type that counts.
        ranks: number of ranks on the node.
    """
    if device.type == "cpu":
        return 1
    count = int(torch.get_device_module(device).device_count())
    return 1 if count == 1 and "ZE_AFFINITY_MASK" in os.environ else -(-ranks // count)


def used_on_current_stream(value: T) -> T:
    """Tell the allocator that the current stream uses a value's tensors, and return the value.

    Their memory is then not reused before this stream has done what it is given until they are freed.

    Raise TypeError for objects of other kinds than `value` lists, whose tensors would be missed.

    Args:
        value: a tensor, an object with `contained_tensors`, or a list, tuple or mapping of these; None, numbers and
            strings hold no tensor.
    """
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


def kept_for_all_streams(make: Callable[..., T], most: int) -> Callable[..., T]:
    """Return a function that makes a value for its arguments once, keeps the last `most` values, and may be called on
    any stream and thread.

    A value's tensors are complete before another stream can read them, because the first call waits until its own
    stream has written them. The memory of a value that is dropped is not used again before its last reader is through.

    Args:
        make: makes a value that `used_on_current_stream` takes; its last argument is the device.
        most: number of values that are kept.
    """

    @lru_cache(maxsize=most)
    def kept(*arguments: Any) -> T:
        made, device = make(*arguments), arguments[-1]
        if device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()
        return made

    return lambda *arguments: used_on_current_stream(kept(*arguments))


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by its size in bytes
MULTIPLIER = -0x61C8864680B583EB  # an odd number of 64 bits: 2^64 divided by the golden ratio


def digest(x: Tensor, first: int = 0) -> Tensor:
    """Return a checksum of a tensor's bits, int64 []. It depends on the position of each element, but not on the order
    of summation.

    The checksums of all parts of a tensor add up to that of the whole, if they and the whole have the same unit. The
    unit is a word of 8 bytes where the number of bytes is a multiple of 8, else an element.

    Args:
        x: the tensor, or a part of one.
        first: position of the part's beginning in the whole tensor, in that unit.
    """
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().contiguous().flatten()
    size = flat.element_size()
    if flat.nbytes % 8 == 0:  # take several elements at a time
        flat, size = (flat.clone() if flat.storage_offset() * size % 8 else flat), 8
    bits = flat.view(INTEGERS[size]).to(torch.int64)
    mixed = torch.arange(first + 1, first + 1 + len(bits), device=x.device).mul_(MULTIPLIER).add_(bits).mul_(MULTIPLIER)
    for _ in range(2):  # after one round a word's highest bits have changed few others: two errors there may cancel
        mixed.bitwise_xor_(mixed >> 32).mul_(MULTIPLIER)
    return mixed.sum()
