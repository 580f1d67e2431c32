"""Places where tests look behind public names, each a function that says what it looks at.

Every other test file is kept from private attributes by ruff (SLF001). Prefer what a user can see.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cocodiff.attention import local
from cocodiff.comm import connect
from cocodiff.comm.torch_dist import TorchDistTransport
from cocodiff.kernels import dispatch


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """List the forward hooks on a module and on all of its parts."""
    found: list[Any] = []
    for part in module.modules():
        found += [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return found


def receives_of(flight: Any) -> tuple[int, list[Any]]:
    """The rank of messages of an exchange that are under way, and each that it receives."""
    return flight._port.rank, [receive for of_phase in flight._phases for receive in of_phase.values()]


def sums_on_the_device(notes: Any) -> Any:
    """V-Major's notes of a run that the host has not read."""
    return notes._sums


def kernels_of_parts() -> dict[str, Any]:
    """The kernels that attend to a part of the keys and tell the sums, by the type of device that is known to have
    one."""
    return local._KERNELS


# Kernels --------------------------------------------------------------------------------------------------------------


def kept_by(layouts: Any) -> Any:
    """What is kept of the layouts that were looked at."""
    return layouts._kept


def opened_libraries() -> Any:
    """The function that opens a device's kernels once, with its cache."""
    return dispatch._open


def build(library: Any, about: str) -> None:
    """Takes a library's kernels from its cache, or compiles them there."""
    library._build(None, about)


def module_of(library: Any) -> Any:
    """The kernels of a library."""
    return library._module


def native_module(library: Any) -> Any:
    """The kernels that a library takes from binaries, None where it takes none."""
    return library._native()


def as_gpu(library: Any, folder: Path, architecture: str, native: Any = None) -> Any:
    """The CPU device as a GPU of that name, with another cache, and nothing of its own compiled yet. native: what makes
    kernels of binaries there."""
    found = copy.copy(library)
    found.folder, found._kernels, found.architecture = folder, {}, architecture
    if native is not None:
        found._c = SimpleNamespace(cocodiff_native=native, cocodiff_kernel=library._c.cocodiff_kernel)
    return found


# Communication --------------------------------------------------------------------------------------------------------


def cut(watch: Any) -> None:
    """Does what the death of a watch's process does: all its connections close, before it can say of one that it
    has."""
    with watch._changed:
        for line in watch._lines.values():
            line.socket.shutdown(socket.SHUT_RDWR)


def peers_of(watch: Any) -> Any:
    """What a watch knows of the other ranks."""
    return watch._peers


def put_behind_checksums(group: Any, faulty: Callable[[Any], Any]) -> None:
    """Has another group carry a checked group's messages and their checksums."""
    group._group = faulty(group._group)


def group_of_part(group: Any) -> Any:
    """The whole run's group that carries a part's messages."""
    return group._group


def tell_of_blocking(transport: Any) -> None:
    """Says, on rank 0, which settings keep messages from being hidden."""
    connect._tell_of_blocking(transport)


def meet(transport: Any, group: Any, members: tuple[int, ...]) -> None:
    """Makes the first call of a device backend's communicator."""
    TorchDistTransport._meet(transport, group, members)


def register_device(name: str, module: Any) -> None:
    """Makes torch know a type of device by its module."""
    torch._register_device_module(name, module)
