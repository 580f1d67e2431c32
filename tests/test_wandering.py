"""Devices whose products have other last bits each time: what is found, is set against it, and stays right."""

from __future__ import annotations

import copy
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from test_simulated_models import at_case, on_devices, outputs_of
from tiny_models import FAMILIES
from value_tables import beside
from warm import Started, forked

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.trial import DeviceTrial, Shape, try_device
from cocodiff.comm import loopback
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.jobs.store import PARTIAL, Store
from cocodiff.kernels import Kernels
from cocodiff.kernels.device import set_repeatable

PRODUCTS = ("attention", "matrix products", "convolutions")
SHAPE = Shape((1, 90, 2, 64), (90, 128), torch.float32)
pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture(autouse=True)
def flag_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads share it, so what the last of them puts back may be another one's."""
    monkeypatch.setattr(torch.backends.mkldnn, "deterministic", False)


@pytest.mark.parametrize(
    ("wandering", "wanted", "found"),
    [
        ("", False, ()),
        ("always", False, PRODUCTS),
        ("always", True, PRODUCTS),
        ("unless deterministic", False, PRODUCTS),
        ("unless deterministic", True, ()),
    ],
)
def test_a_trial_tells_whether_bits_repeat_and_whether_the_flag_is_obeyed(simulated, wandering, wanted, found):
    with simulated.devices(1, wandering=wandering) as devices:
        undo = set_repeatable(devices[0], wanted)
        trial = try_device(LocalAttention(), SHAPE, devices[0], Kernels("torch"))
        assert torch.backends.mkldnn.deterministic is wanted
        undo()
    assert not torch.backends.mkldnn.deterministic
    assert trial.wandering == found and trial.copies == () and trial.error < 0.5
    assert (all(name in str(trial) for name in found) and ("same bits" in str(trial)) is not found) or not found


def test_the_flag_is_an_accelerators_alone():
    set_repeatable(torch.device("cpu"), True)()
    undo = set_repeatable(torch.device("cpu"), True)
    assert not torch.backends.mkldnn.deterministic
    undo()


@cache
def tiny() -> Any:
    return FAMILIES["sd3"][0](6).requires_grad_(False)


def called(transport: Any, change: float = 1.0, **settings: Any) -> tuple[DeviceTrial | None, bool]:
    """The trial of a call of a tiny model, and the flag while the engine is entered."""
    own, inputs = copy.deepcopy(tiny()).to(transport.device), FAMILIES["sd3"][1](1, 4, 5, 3)
    inputs["hidden_states"] = inputs["hidden_states"] * change
    with parallelize(own, transport=transport, kernels="torch", **settings) as engine:
        flag = torch.backends.mkldnn.deterministic
        own(**{name: x.to(transport.device) for name, x in inputs.items()}, return_dict=False)
        return engine.device_trial, flag


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_engine_sets_the_flag_and_tells_what_came_of_it(simulated, deterministic):
    from simulated_device.ranks import run_ranks

    tiny()
    with simulated.devices(1, wandering="unless deterministic"):
        ((trial, flag),) = run_ranks(1, lambda transport: called(transport, deterministic=deterministic))
    assert flag is deterministic and not torch.backends.mkldnn.deterministic
    assert trial is not None and (trial.wandering == ()) is deterministic


@pytest.mark.parametrize("wandering", ["", "always"])
def test_ranks_whose_inputs_differ_hear_that_bits_wander_where_they_do(simulated, wandering):
    """Weights are compared by sums of integers, which do not: equal ones are found equal."""
    from simulated_device.ranks import run_ranks

    tiny()

    def work(transport: Any) -> str:
        with pytest.raises(UserError) as error:
            called(transport, 1 + 2e-7 * transport.rank)
        return str(error.value)

    with simulated.devices(2, wandering=wandering):
        said = run_ranks(2, work)
        trials = run_ranks(2, called)  # equal inputs and weights
    assert said[0] == said[1] and "hidden_states" in said[0] and "digest of weights" not in said[0]
    assert [name in said[0] for name in PRODUCTS] == [bool(wandering)] * 3
    assert trials[0][0] == trials[1][0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", beside(__file__), ids=lambda case: "-".join(map(str, case)))
def test_ranks_end_with_the_same_bits_near_those_of_products_that_repeat(simulated, case, monkeypatch):
    """What is decoded is what was encoded: predictions are made of received bits, never of what is computed twice. Were
    it not so, a wrong residual would be added up in every step."""
    with at_case(case) as (size, settings, family, calls):
        expected = loopback.run_ranks(size, lambda transport: outputs_of(transport, settings, family, calls))[0]
        found = on_devices(simulated, size, lambda rank: outputs_of(rank, settings, family, calls), wandering="always")
    assert all(torch.equal(found[0], one) for one in found[1:])
    assert not torch.equal(found[0], expected), "nothing wandered"
    scale = float(expected.float().abs().max())
    allowed = {"lossless": 0.05, "whole": 1e-5, "v_major": 1e-5, "int4": 0.02}[case[3]]
    assert float((found[0].float() - expected.float()).abs().max()) < allowed * scale


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "parts"), [("flux", 1), ("flux", 2), ("sd3", 2)])
def test_parts_of_guidance_go_on_with_the_same_bits(simulated, family, parts):
    """Also of the first step, which both parts of two calls compute: else each would go on from latents of its own."""
    from simulated_device.ranks import run_ranks

    model, calls = FAMILIES[family][0](6).requires_grad_(False), 2 if family == "flux" else 1
    inputs = [FAMILIES[family][1](3 - calls, 4, 5, text) for text in (3, 5)[:calls]]

    def work(transport: Any) -> torch.Tensor:
        own, device = copy.deepcopy(model).to(transport.device), transport.device
        with parallelize(own, transport=transport, kernels="torch", guidance_parallel=parts) as engine:
            for _image in range(2):
                latents = inputs[0]["hidden_states"].to(device)
                for step in range(3):
                    moment = {"hidden_states": latents, "timestep": torch.full((len(latents),), 0.9 - 0.2 * step)}
                    outputs = [
                        own(**{name: x.to(device) for name, x in (call | moment).items()}, return_dict=False)[0]
                        for call in inputs
                    ]
                    latents = latents + outputs[0] - 0.1 * outputs[-1].flip(0)
                engine.new_run()
            assert (sum(engine.bytes("guidance").values()) > 0) == (parts > 1)
        return latents.cpu()

    expected = loopback.run_ranks(4, work)[0]
    with simulated.devices(4, wandering="always"):
        found = run_ranks(4, work)
    assert all(torch.equal(found[0], one) for one in found[1:]) and not torch.equal(found[0], expected)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


# Jobs -----------------------------------------------------------------------------------------------------------------


def words(folder: Path, out: str, *more: Any) -> list[Any]:
    given = ["--input", folder / "scan.tif", "--steps", 2, "--ranks", 2, "--device", "auto", "--dtype", "fp32"]
    given += ["--preset", "flat", "--replicas", 2, "--batch", 1, "--out", folder / out, "--quiet"]
    return ["inpaint", *given, *more]


def finished(folder: Path, out: str, *more: Any) -> tuple[np.ndarray, list[str]]:
    done = forked(*words(folder, out, *more), folder=folder, module="simulated_device.command")
    assert done.returncode == 0, done.stderr
    document = json.loads((folder / out / "metrics.json").read_text())
    assert "devices" in (folder / out / "report.html").read_text()
    return tifffile.imread(next((folder / out / "images").rglob("scan_block_flat*.tif"))), document["devices"]


@pytest.mark.full
@pytest.mark.parametrize("wandering", ["always", "unless deterministic"])
def test_a_job_of_replicas_goes_on_after_a_kill_and_says_whether_its_bits_repeat(
    simulated, tmp_path, monkeypatch, wandering
):
    """To the same bits where the flag is obeyed, and near them where it is not."""
    monkeypatch.setenv("WANDERING", wandering)
    volume = np.random.default_rng(0).random((8, 64, 64), np.float32)
    tifffile.imwrite(tmp_path / "scan.tif", volume, photometric="minisblack")
    whole, said = finished(tmp_path, "whole")
    store = Store(tmp_path / "killed" / PARTIAL)
    process = Started(words(tmp_path, "killed"), tmp_path / "log", module="simulated_device.command")
    deadline = time.monotonic() + 300
    while not store.finished():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.005)
    process.kill()
    process.wait(60)
    resumed, said_again = finished(tmp_path, "killed", "--resume")
    repeats = wandering != "always"
    assert ["same bits" in line for line in said + said_again] == [repeats] * 2
    assert [all(name in line for name in PRODUCTS) for line in said + said_again] == [not repeats] * 2
    assert np.array_equal(whole, resumed) is repeats
    assert np.allclose(whole, resumed, atol=0.02)
