"""Accelerators by stand-ins: which tile is taken, its memory, IPEX. The order of streams: test_simulated_device.py."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from value_tables import beside

from cocodiff.comm.health import Health
from cocodiff.comm.lane import HandedOver, Lane
from cocodiff.config.errors import OwnRankError
from cocodiff.kernels import device as devices
from cocodiff.kernels.device import IPEX, IPEX_ASKED, import_ipex, rank_device, used_on_current_stream

XPU = torch.device("xpu", 0)


class FakeXpu:
    """The part of torch.xpu that device.py asks of tiles."""

    def __init__(self) -> None:
        self.count, self.chosen = 12, []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.chosen.append(device)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> FakeXpu:
    fake = FakeXpu()
    monkeypatch.setattr(torch, "get_device_module", lambda *_: fake)
    monkeypatch.setattr(devices, "import_ipex", lambda: False)
    return fake


def test_a_lanes_jobs_run_on_its_tile_and_on_a_stream_of_its_own(simulated):
    with simulated.devices(2) as found:
        module, lane = torch.get_device_module(found[1]), Lane("plane", found[1], Health())
        ran_on: list[Any] = []
        for _ in range(2):
            lane.submit(lambda: ran_on.append((module.current_device(), module.current_stream()))).wait()
        lane.close()
        assert ran_on[0] == ran_on[1] != (1, module.current_stream(found[1])) and ran_on[0][0] == 1


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
    with pytest.raises(OwnRankError, match=r"local rank 2 has no xpu device: 2 .*--transport host"):
        rank_device("xpu", 2)
    xpu.count = 0
    with pytest.raises(OwnRankError, match=r"local rank 0 has no xpu device: 0 (?!.*--transport)"):
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


@pytest.mark.parametrize(("of_torch", "asked", "version", "imported", "told"), beside(__file__))
def test_ipex_is_imported_where_it_fits_and_is_wanted(of_torch, asked, version, imported, told, monkeypatch, caplog):
    """From PyTorch 2.10 on, where it is asked for."""

    def known(name: str) -> str:
        if name == IPEX and version is not None:
            return version
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch, "__version__", of_torch)
    monkeypatch.setenv(IPEX_ASKED, asked)
    monkeypatch.setattr(devices.metadata, "version", known)
    monkeypatch.setitem(sys.modules, IPEX, None if told == "could not be imported" else ModuleType(IPEX))
    assert import_ipex() is imported
    assert told in caplog.text and bool(told) is bool(caplog.records)


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
