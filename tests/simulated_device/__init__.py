"""An accelerator in host memory, for tests of what is done on streams: importing this builds it and registers it with
torch under the name "sim". Raises ImportError where there is no C++ compiler, no ninja or no Python.h.

    import simulated_device
    with simulated_device.devices(2) as found:            # torch.device("sim", 0) and ("sim", 1), for so long
        x = torch.ones(3, device=found[0]) + 1            # runs later, in the thread of a stream
        module = torch.get_device_module(found[0])        # Stream, Event, current_stream, stream, as torch.cuda's
    found.reports                                         # of accesses to memory that nothing orders

Operations run on the CPU's kernels, with the CPU's bits. Freed memory is handed out again to the stream that had it,
and overwritten then with ones in all bits; with `strict` it is overwritten when it is freed. What one stream does with
memory that another one has written, read or freed is reported where no event (and no wait of the host) orders the two,
whatever the timing of the threads. With `delayed` operations start late by chance, so that the same mistakes show as
wrong values. Pinned memory is the host's as it is when an operation runs.

`launch` is for communication libraries: it runs a Python function as an operation of a stream. `ranks.py` has one.

Strict is harsher than an allocator: it reports as well where memory is freed early and handed out only after an event.
Not simulated: graphs, copies between devices, memory that runs out, an allocator that splits and merges.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seams import register_device
from torch import Tensor
from torch.utils import cpp_extension

NAME = "sim"
EXTENSION = "simulated_device_extension"
SOURCES = [Path(__file__).parent / name for name in ("runtime.h", "runtime.cpp", "backend.cpp")]
FLAGS = ["-O1", "-g0"]
DELAY_US, GIB = 2000, 2**30


def _build() -> Any:
    """The extension, which one process builds for all, once for these sources and this torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
        header = Path(sysconfig.get_path("include"), "Python.h")
        patch.setattr(cpp_extension, "TORCH_LIB_PATH", shlex.quote(cpp_extension.TORCH_LIB_PATH))  # it may have blanks
        tools = {name: shutil.which(name) for name in (os.environ.get("CXX", "c++"), "ninja")}
        missing = [name for name, there in {**tools, "Python.h": header.exists()}.items() if not there]
        if missing:
            raise ImportError(f"the simulated device cannot be built without {' and '.join(missing)}")
        content = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES))
        content.update(" ".join([sys.version, torch.__version__, *FLAGS]).encode())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "cocodiff" / f"simulated-device-{content.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        sources = [str(path) for path in SOURCES if path.suffix == ".cpp"]
        with (folder / "building").open("w") as building:
            fcntl.flock(building, fcntl.LOCK_EX)
            if not (folder / "ready").exists():
                (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed: it would wait for that
                where = {"build_directory": str(folder), "is_python_module": False}
                cpp_extension.load(EXTENSION, sources, extra_cflags=FLAGS, **where)
                (folder / "ready").touch()
        spec = importlib.util.spec_from_file_location(EXTENSION, folder / f"{EXTENSION}.so")
        assert spec is not None and spec.loader is not None
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
        return extension


class _DeviceModule:
    """What torch.get_device_module gives for a simulated device."""

    Stream = staticmethod(lambda device=None: torch.Stream(device=torch.device(NAME, _index(device))))
    Event = staticmethod(lambda: torch.Event(NAME))
    stream = staticmethod(lambda stream: stream)  # a stream is the context in which it is the current one
    _is_in_bad_fork = staticmethod(lambda: False)

    def is_initialized(self) -> bool:
        """Whether this process uses a device, and one that is forked from it therefore cannot."""
        return any(_extension.memory(index)[1] for index in range(self.device_count()))

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return int(_extension.device_count())

    def current_device(self) -> int:
        return int(_extension.current_device())

    def set_device(self, device: Any) -> None:
        index = _index(device)
        if not 0 <= index < self.device_count():
            raise RuntimeError(f"simulated device {index} of {self.device_count()}")
        _extension.set_current_device(index)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device(NAME, _index(device)))

    def synchronize(self, device: Any = None) -> None:
        _extension.synchronize(_index(device))

    def memory_allocated(self, device: Any = None) -> int:
        return int(_extension.memory(_index(device))[0])

    def memory_reserved(self, device: Any = None) -> int:
        return int(_extension.memory(_index(device))[1])

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 16 * GIB - self.memory_reserved(device), 16 * GIB

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name="simulated", total_memory=16 * GIB)

    def empty_cache(self) -> None:
        _extension.empty_cache()

    # Random numbers are drawn by the host's generator.
    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _index(device: Any) -> int:
    index = device if isinstance(device, int | None) else torch.device(device).index
    return int(_extension.current_device()) if index is None else index


class Devices(Sequence[torch.device]):
    """reports: what was found, once the devices are gone."""

    def __init__(self, count: int) -> None:
        self._all = [torch.device(NAME, index) for index in range(count)]
        self.reports: list[str] = []

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)


@contextlib.contextmanager
def devices(
    count: int,
    *,
    strict: bool = False,
    delayed: float = 0.0,
    seed: int = 0,
    wandering: str = "",
    pitch_lost: bool = False,
    lines: str = "cocodiff",
) -> Iterator[Devices]:
    """So many devices; outside of it there are none, for whoever looks for an accelerator.

    delayed: the part of the operations that start late, by up to 2 ms, as `seed` says. wandering: "always", or
    "unless deterministic" (by `torch.backends.mkldnn.deterministic`): the last bits of matrix products, convolutions
    and attention are others each time. pitch_lost: copies of strided tensors on a device are wrong. lines: reports name
    the lines of files whose path contains it; "" for none."""
    _extension.set_device_count(count)
    found = Devices(count)
    for device in found:  # what threads of a run that failed have left since its devices went
        with contextlib.suppress(RuntimeError):
            _extension.synchronize(device.index)
    _extension.take_reports()
    _extension.set(delayed, DELAY_US, seed, strict, wandering, pitch_lost, lines)
    try:
        yield found
        for device in found:
            _extension.synchronize(device.index)
    finally:
        for device in found:  # what a run that failed has left
            with contextlib.suppress(RuntimeError):
                _extension.synchronize(device.index)
        _extension.empty_cache()
        _extension.reuse_streams()
        _extension.set_device_count(0)
        found.reports = _extension.take_reports()


def take_reports() -> list[str]:
    """What was found up to now, once; for a process that leaves while there are devices."""
    return list(_extension.take_reports())


def take_launched() -> list[str]:
    """What this thread has launched since it last called this, in order; "wait" where it waited for a device."""
    return list(_extension.take_launched())


def launch(
    stream: torch.Stream, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], object]
) -> None:
    """Has a function run in a stream's turn. reads, writes: what it does to tensors of the device, which it gets at by
    `host_view`, taken before. Nothing keeps their memory until then."""
    _extension.launch_function(stream, name, list(reads), list(writes), work)


def host_view(x: Tensor) -> Tensor:
    """A tensor's bytes as a tensor of the CPU."""
    return _extension.host_view(x)


_extension = _build()
torch.utils.rename_privateuse1_backend(NAME)
register_device(NAME, _DeviceModule())
torch.utils.generate_methods_for_privateuse1_backend()
atexit.register(_extension.stop)
