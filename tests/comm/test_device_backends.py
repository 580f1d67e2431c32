"""Backends for devices: which one carries what, and settings that keep messages from being hidden. Simulated devices,
whose library ends no batch that theirs would not, test what is asked of them (`simulated_device/ranks.py`)."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from seams import tell_of_blocking
from value_tables import beside

from cocodiff.comm import torch_dist
from cocodiff.comm.checked import CheckedGroup
from cocodiff.comm.connect import overlap_killers
from cocodiff.comm.health import Health
from cocodiff.comm.torch_dist import CCL_BINDINGS, check_backend, device_backend, new_group, posts_one_by_one
from cocodiff.comm.transport import TOGETHER, PartGroup
from cocodiff.config.errors import UserError

CPU, XPU, CUDA, MPS = torch.device("cpu"), torch.device("xpu", 0), torch.device("cuda", 0), torch.device("mps")
CASES = beside(__file__)
NO_TRANSPORT = "no transport carries mps tensors between ranks: .*--dev"


def test_the_backend_of_a_device(monkeypatch):
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True)
    assert [device_backend(device) for device in (CPU, XPU, CUDA)] == ["gloo", "xccl", "nccl"]
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
    assert device_backend(XPU) == "ccl"
    with pytest.raises(UserError, match=NO_TRANSPORT):  # `--device auto` takes whatever accelerator torch has
        device_backend(MPS)


def test_ccl_is_loaded_by_its_bindings_or_said_to_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, CCL_BINDINGS, ModuleType(CCL_BINDINGS))
    check_backend("ccl", XPU)
    monkeypatch.setitem(sys.modules, CCL_BINDINGS, None)
    with pytest.raises(UserError, match=r"transport ccl needs oneccl_bindings_for_pytorch .*--transport xccl"):
        check_backend("ccl", XPU)


@pytest.mark.parametrize(("backend", "device", "message"), CASES["do not fit"])
def test_backends_that_do_not_fit(monkeypatch, backend, device, message):
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
    with pytest.raises(UserError, match=message):
        check_backend(backend, torch.device(device))


@pytest.mark.parametrize(("backend", "tells"), [("xccl", True), ("nccl", True), ("ccl", False), ("gloo", False)])
def test_only_backends_that_want_it_are_told_the_device(monkeypatch, backend, tells):
    told: dict[str, Any] = {}
    monkeypatch.setattr(torch_dist, "check_backend", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **values: told.update(values))
    torch_dist.initialise(backend, "env://", 0, 1, XPU)
    assert told["device_id"] == (XPU if tells else None)


@pytest.mark.parametrize(("version", "backend", "expected"), CASES["one by one"])
def test_the_release_that_posts_the_messages_of_a_batch_one_by_one(monkeypatch, version, backend, expected):
    monkeypatch.setattr(torch, "__version__", version)
    assert posts_one_by_one(backend) == expected


@pytest.mark.parametrize("one_by_one", [True, False])
def test_groups_are_all_to_alls_by_default_where_batches_are_posted_one_by_one(monkeypatch, one_by_one):
    monkeypatch.setattr(torch_dist, "posts_one_by_one", lambda _: one_by_one)
    torch_dist.initialise("gloo", dist.HashStore(), 0, 1, CPU)
    transport = torch_dist.TorchDistTransport(CPU, Health(), True, None, None)
    with contextlib.closing(transport):
        groups = [transport.world, *(transport.group([0], TOGETHER[name]) for name in ("auto", "batch", "alltoall"))]
        assert [group.at_once for group in groups] == [one_by_one, one_by_one, False, True]
        within = [(PartGroup(group, (0,), [0], CPU).at_once, CheckedGroup(group, Health()).at_once) for group in groups]
        assert within == [(group.at_once, group.at_once) for group in groups]


@pytest.mark.parametrize("library", ["xccl", "ccl", "nccl", "gloo"])
def test_nodes_are_asked_for_where_a_library_passes_groups_across_nodes_through_the_host(monkeypatch, library, alone):
    """By the names of hosts, as oneCCL does. The group of another node's rank is not the node's."""
    others = ["another node"]
    monkeypatch.setattr(torch_dist.TorchDistTransport, "all_gather_values", lambda _, own, at: [own, *others])
    monkeypatch.setattr(dist, "get_backend", lambda: library)
    monkeypatch.setattr(torch_dist, "gloo_group", lambda members, rank: new_group(members, "gloo"))
    torch_dist.initialise("gloo", dist.HashStore(), 0, 1, CPU)
    transport = torch_dist.TorchDistTransport(CPU, Health(), True, None, alone)
    with contextlib.closing(transport):
        assert [*transport.node_of] == ([socket.gethostname(), *others] if library in ("xccl", "ccl") else [])
        assert transport.world.ranks == transport.group([0]).ranks == (0,)


@pytest.mark.parametrize(("environment", "library", "device", "settings"), CASES["take overlap away"])
def test_settings_that_take_overlap_away(environment, library, device, settings):
    found = overlap_killers(dict(word.split("=") for word in environment.split()), library, device)
    assert [killer.setting for killer in found] == settings.split()


def test_rank_0_says_so_in_one_line_at_the_start(monkeypatch, caplog):
    monkeypatch.setenv("CCL_OP_SYNC", "1")
    for rank in (1, 0):
        with caplog.at_level(logging.WARNING):
            tell_of_blocking(SimpleNamespace(library="xccl", rank=rank, device=XPU, drawback=""))
    assert [record.getMessage() for record in caplog.records] == [
        "messages will not be hidden: CCL_OP_SYNC=1 makes every oneCCL call wait for its end "
        "(unset CCL_OP_SYNC unless modules set it)"
    ]
