"""Accelerators by stand-ins: which tile is taken, its memory, IPEX. The order of streams: test_simulated_device.py."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cocodiff.comm.health import Health
from cocodiff.comm.transport import Lane
from cocodiff.config.errors import OwnRankError
from cocodiff.kernels import device as devices
from cocodiff.kernels.device import IPEX, IPEX_ASKED, HandedOver, import_ipex, rank_device, used_on_current_stream

XPU = torch.device("xpu", 0)


class FakeXpu:
    """The part of torch.xpu that device.py asks, with streams and events that do nothing."""

    Event = Stream = Mock

    def __init__(self, count: int = 12) -> None:
        self.count, self.chosen = count, []
        self._threads, self._default = threading.local(), Mock()

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.chosen.append(device)

    def current_stream(self, _: Any = None) -> Any:
        return getattr(self._threads, "stream", self._default)

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self._threads.stream = stream
        yield
        del self._threads.stream


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> FakeXpu:
    fake = FakeXpu()
    monkeypatch.setattr(torch, "get_device_module", lambda *_: fake)
    monkeypatch.setattr(devices, "import_ipex", lambda: False)
    return fake


def test_a_lanes_jobs_run_on_its_tile_and_on_a_stream_of_its_own(xpu):
    lane = Lane("plane", XPU, Health())
    ran_on: list[Any] = []
    for _ in range(2):
        lane.submit(lambda: ran_on.append(xpu.current_stream())).wait()
    lane.close()
    assert ran_on[0] is ran_on[1] is not xpu.current_stream() and {*xpu.chosen} == {XPU}


def test_on_a_cpu_there_is_nothing_to_mark(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda *_: pytest.fail("a CPU has no device module"))
    tensor = torch.ones(1)
    assert HandedOver(tensor, torch.device("cpu")).take() is tensor
    assert used_on_current_stream(tensor) is tensor


def test_the_local_rank_is_the_tile_and_is_chosen_at_once(xpu):
    assert rank_device("xpu", 7) == torch.device("xpu", 7) and xpu.chosen == [torch.device("xpu", 7)]


def test_ranks_that_share_devices_take_them_in_turns(xpu):
    xpu.count = 2
    assert [rank_device("xpu", rank, shared=True).index for rank in range(5)] == [0, 1, 0, 1, 0]
    with pytest.raises(OwnRankError, match="2 found; start fewer ranks a node, or --transport host to share them"):
        rank_device("xpu", 2)
    xpu.count = 0
    with pytest.raises(OwnRankError, match="local rank 0 has no xpu device: 0 found; start fewer ranks a node, or let"):
        rank_device("xpu", 0, shared=True)


@pytest.mark.parametrize(
    ("environment", "told"),
    [({}, "neither is set"), ({"ZE_AFFINITY_MASK": "3", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}, "ZE_AFFINITY_MASK=3")],
)
def test_a_rank_without_a_tile_is_told_what_hides_it(xpu, monkeypatch, environment, told):
    for name in ("ZE_FLAT_DEVICE_HIERARCHY", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    xpu.count = 1
    with pytest.raises(OwnRankError, match=rf"local rank 3 has no xpu device: 1 found; .*{told}"):
        rank_device("xpu", 3)
    assert xpu.chosen == []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an IPEX of a version appear; its module says that it was imported."""

    def install(version: str | None, module: Any = None) -> None:
        def known(name: str) -> str:
            if name == IPEX and version is not None:
                return version
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(devices.metadata, "version", known)
        monkeypatch.setitem(sys.modules, IPEX, module)

    return install


@pytest.mark.parametrize(
    ("of_torch", "asked", "version", "imported", "told"),
    [
        ("2.8.0+xpu", "", None, False, ""),
        ("2.8.0+xpu", "", "2.8.10+xpu", True, ""),
        ("2.9.1", "0", "2.9.0", True, ""),
        ("2.8.0+xpu", "", "1.13.0", False, "is for another PyTorch"),  # importing that one would end the process
        ("2.10.0a0+git449b176", "", "2.10.10+xpu", False, ""),  # Aurora's module
        ("2.10.0a0+git449b176", "0", "2.10.10+xpu", False, ""),
        ("2.10.0a0+git449b176", "1", "2.10.10+xpu", True, ""),
        ("2.14.1", "", "2.8.10", False, ""),
        ("2.14.1", "1", "2.8.10", False, "is for another PyTorch"),
        ("2.10.0a0+git449b176", "1", None, False, "COCODIFF_IPEX"),
    ],
)
def test_ipex_is_imported_where_it_fits_and_from_2_10_on_where_it_is_asked_for(
    of_torch: str, asked: str, version: str | None, imported: bool, told: str, installed, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(torch, "__version__", of_torch)
    monkeypatch.setenv(IPEX_ASKED, asked)
    installed(version, ModuleType(IPEX))
    assert import_ipex() is imported
    assert told in caplog.text and bool(told) is bool(caplog.records)


def test_ipex_that_does_not_import_is_done_without(installed, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.delenv(IPEX_ASKED, raising=False)
    installed("2.8.10", None)  # a module of None cannot be imported
    assert not import_ipex() and "could not be imported" in caplog.text


def test_free_memory_of_a_tile_counts_what_the_allocator_keeps(xpu):
    xpu.memory_allocated, xpu.memory_reserved = lambda _: 10, lambda _: 30
    xpu.get_device_properties = lambda _: SimpleNamespace(total_memory=192)
    xpu.mem_get_info = lambda _: (100, 192)
    assert devices.free_memory(XPU, 12) == 120
    for wrong in (0, 192):  # as drivers of the Max 1550 tell: nothing, or as much as before an allocation
        xpu.mem_get_info = lambda _, wrong=wrong: (wrong, 192)
        assert devices.free_memory(XPU, 12) == 192 * 31 // 32 - 10

    def without_sysman(_: Any) -> Any:
        raise RuntimeError("no sysman")

    xpu.mem_get_info = without_sysman
    assert devices.free_memory(XPU, 12) == 192 * 31 // 32 - 10


def test_free_memory_of_a_cpu_is_divided_among_its_ranks():
    alone, shared = (devices.free_memory(torch.device("cpu"), ranks) for ranks in (1, 4))
    assert alone and shared and 0.8 < 4 * shared / alone < 1.25


@pytest.mark.parametrize(("ranks", "count"), [(12, 12), (5, 2), (7, 3), (2, 4), (1, 1), (3, 1)])
def test_memory_is_divided_among_the_ranks_of_the_fullest_device(xpu, monkeypatch, ranks, count):
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    xpu.count = count
    taken = Counter(rank_device("xpu", rank, shared=True).index for rank in range(ranks))
    assert devices.ranks_on_device(XPU, ranks) == max(taken.values())
    xpu.memory_allocated = xpu.memory_reserved = lambda _: 0
    xpu.get_device_properties, xpu.mem_get_info = lambda _: SimpleNamespace(total_memory=6400), lambda _: (960, 6400)
    assert devices.free_memory(XPU, ranks) == 960 // max(taken.values())
