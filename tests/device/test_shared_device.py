"""Every strategy and codec on an accelerator that several ranks share: their messages pass through host memory."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from contract import contract
from exactness import Case, denoise
from launching import assert_succeeded, mpiexec
from shared_device import Settings, chosen, denoised, on_device, placed

from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.transport import Transport
from cocodiff.config.config import Config, preset_names

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

RANKS = 4
CASE = Case(8, 6, 4, 5)
MORE: dict[str, Settings] = {
    "ring": {"preset": "tapa", "ring": 2},
    "chunks": {"preset": "split", "chunks": 2},
    "ring in chunks": {"preset": "v_first", "ring": 2, "chunks": 2},
    "scored by card": {"preset": "cocodiff", "scoring": "card", "exchange": "tapa"},
    "int8, displaced": {"preset": "coded", "codec": "int8", "arrival": "displaced"},
}
# The links of this machine call for no codec, and in so few steps nothing but a large tau displaces anything.
ALL = {name: {"preset": name} for name in preset_names()} | {"ahead": {"preset": "ahead", "tau": 0.5}} | MORE


def is_exact(settings: Settings) -> bool:
    return Config.preset(**{"name": settings["preset"], **{k: v for k, v in settings.items() if k != "preset"}}).exact


@cache
def model() -> Any:
    return CASE.model()


@cache
def of_the_cpu(name: str) -> torch.Tensor:
    """What ranks with these settings end with on the CPU, which other tests compare with one process."""
    transformer = model()
    return run_ranks(RANKS, lambda transport: denoised(transport, transformer, CASE, ALL[name]))[0]


@cache
def truth() -> torch.Tensor:
    with torch.no_grad():
        return denoise(model(), CASE.inputs())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).double().square().mean().sqrt())


@pytest.mark.parametrize("name", chosen(ALL, "ring in chunks"))
def test_ranks_that_share_a_device_compute_what_the_cpu_does(name: str, device: torch.device) -> None:
    """Exact: within twice what one process on the device differs by from the CPU, plus rounding. Lossy: as the same
    settings on the CPU, up to a twentieth of what they lose, for a value that rounds the other way costs a whole
    step of its code. All ranks have the same bits."""
    transformer = model()
    of_ranks = on_device(RANKS, device, lambda transport: denoised(transport, transformer, CASE, ALL[name]))
    assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)
    rounding = torch.finfo(torch.float32).eps * float(truth().abs().max())
    with torch.no_grad():
        alone = denoise(copy.deepcopy(model()).to(device), placed(CASE, device)).cpu()
    if is_exact(ALL[name]):
        error, allowed = float((of_ranks[0] - truth()).abs().max()), 2 * float((alone - truth()).abs().max())
        assert error <= allowed + 8 * rounding, (error, allowed, rounding)
    else:
        lost = distance(of_the_cpu(name), truth())
        assert lost > rounding
        assert distance(of_ranks[0], of_the_cpu(name)) <= lost / 20 + 8 * rounding


@pytest.mark.parametrize("name", chosen(["tapa", "chunks", "ring in chunks", "cocodiff", "ahead"], "tapa"))
def test_late_messages_and_busy_streams_change_no_bit(name: str, device: torch.device) -> None:
    transformer = model()

    def work(transport: Transport) -> torch.Tensor:
        return denoised(transport, transformer, CASE, ALL[name])

    promptly = on_device(RANKS, device, work)
    late = on_device(RANKS, device, work, late=True)
    assert all(torch.equal(one, promptly[0]) for one in promptly + late)


def test_the_contract_holds_for_tensors_of_the_device(device: torch.device) -> None:
    def work(transport: Transport) -> None:
        with torch.device(device):
            contract(transport)

    assert on_device(RANKS, device, work) == [None] * RANKS


@pytest.mark.parametrize("ranks", chosen([RANKS]))
def test_processes_share_a_device(ranks: int, device: torch.device) -> None:
    program, carriers = __file__.replace("device/test_shared_device", "comm/contract"), ("host", "mpi-rma")
    done = mpiexec(ranks, program, "launched", *(f"{carrier}@{device.type}" for carrier in carriers))
    assert_succeeded(done)
    assert done.stdout.count("contract holds") == ranks
