"""Weights that the tiles of a card or node share: the bits of whole ones; what is held, sent, and comes back."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from covering import covering
from planned_models import PLANNED
from tiny_models import FAMILIES
from torch import Tensor, nn

from cocodiff.cli.main import main
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.engine.agreement import tensors_in
from cocodiff.engine.engine import parallelize
from cocodiff.models.checks import called_often

STEPS = 3
HALF: dict[str, Any] = {"selection": "v_major", "schedule": "fixed", "ratio": 0.5, "warmup": 1, "steps": STEPS}
SETTINGS: dict[str, dict[str, Any]] = {
    "tapa": {"exchange": "tapa", "order": "v_first"},
    "v_major": {"exchange": "tapa", "scoring": "card", **HALF},
    "int4": {"exchange": "split", "codec": "int4"},
    "ring": {"exchange": "flat", "ring": 2},
    "ahead": {"exchange": "split", "arrival": "adaptive"},
    "cached": {"exchange": "tapa", "step_cache": "first_block", "step_cache_threshold": 0.5},
}

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def held(model: nn.Module) -> list[int]:
    """Bytes of every block's parameters."""
    return [sum(x.nbytes for x in block.parameters()) for _, block in called_often(model)[1:]]


def outputs_of(transport: Any, model: nn.Module, inputs: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, ...]:
    """Of some steps, with what blocks hold inside, what was sent for weights, and whether they are back."""
    own, outputs = copy.deepcopy(model), []
    with parallelize(own, transport=transport, kernels="torch", **settings) as engine, torch.no_grad():
        for step in range(STEPS):
            moment = {"timestep": torch.full_like(inputs["timestep"], 0.9 - 0.2 * step)}
            moment["hidden_states"] = inputs["hidden_states"] * (1 + 0.1 * step)
            outputs.append(own(**inputs | moment, return_dict=False)[0].clone())
        inside, sent = held(own), sum(engine.bytes("weights").values())
    back = all(map(torch.equal, own.state_dict().values(), model.state_dict().values()))
    return torch.stack(outputs), inside, sent, back


def check(model: nn.Module, inputs: dict[str, Any], size: int, settings: dict[str, Any], **more: Any) -> list[Any]:
    whole = run_ranks(size, lambda t: outputs_of(t, model, inputs, settings))
    split = run_ranks(size, lambda t: outputs_of(t, model, inputs, settings | more))
    for (expected, *_), (outputs, _, _, back) in zip(whole, split, strict=True):
        assert torch.equal(outputs, expected) and back
    return split


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("family", "among", "size", "name"), covering(tuple(FAMILIES), ("card", "node"), (2, 3, 4), tuple(SETTINGS))
)
def test_the_bits_of_whole_weights(family, among, size, name):
    if name == "ring" and size % 2:
        size = 4
    make, inputs_of = FAMILIES[family]
    check(make(6).requires_grad_(False), inputs_of(2, 4, 5, 3), size, SETTINGS[name], weights=among)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANNED)
def test_models_by_a_plan(name):
    """A plan finds the blocks' names by itself; their weights are split like a family's."""
    planned = PLANNED[name]
    model, call = planned.model().requires_grad_(False), planned.call()

    def work(transport: Any, **settings: Any) -> list[Tensor]:
        own = copy.deepcopy(model)
        with parallelize(own, transport=transport, kernels="torch", **settings), torch.no_grad():
            return [x.clone() for x in tensors_in(own(**call, return_dict=False))]

    whole, split = run_ranks(2, work), run_ranks(2, lambda t: work(t, weights="card"))
    for expected, outputs in zip(whole, split, strict=True):
        assert outputs and all(map(torch.equal, expected, outputs))


def test_in_torchs_inference_mode():
    model, inputs = FAMILIES["sd3"][0](6).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 5, 3)

    def work(transport: Any, **settings: Any) -> Tensor:
        own = copy.deepcopy(model)
        with torch.inference_mode(), parallelize(own, transport=transport, kernels="torch", **settings):
            found = [own(**inputs, return_dict=False)[0].clone() for _ in range(2)][1]
        with parallelize(own, transport=transport, kernels="torch", **settings), torch.no_grad():
            assert torch.equal(own(**inputs, return_dict=False)[0], found)
        return found

    whole, split = run_ranks(2, work), run_ranks(2, lambda t: work(t, weights="card"))
    assert all(map(torch.equal, whole, split))


@pytest.mark.parametrize("what", ["adapters", pytest.param("compiled", marks=pytest.mark.full)])
def test_with_adapters_and_with_compiled_blocks(what):
    from peft import LoraConfig

    model = FAMILIES["sd3"][0](6).requires_grad_(False)
    if what == "adapters":
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    settings = SETTINGS["tapa"] | {"compile": what == "compiled"}
    check(model, FAMILIES["sd3"][1](1, 4, 5, 3), 2, settings, weights="card")


def test_some_layers_are_split_and_their_parts_sent_once_a_call():
    model = FAMILIES["sd3"][0](6, layers=5).requires_grad_(False)
    whole = held(model)
    of_ranks = check(model, FAMILIES["sd3"][1](1, 4, 5, 3), 4, SETTINGS["tapa"], weights="card", split_layers=2)
    for _, inside, sent, _ in of_ranks:
        assert inside == [whole[0], whole[1], 0, whole[3], 0]
        once = sum(-(-whole[number] // 2) for number in (2, 4)) * 4  # every rank its half, to its sibling
        assert STEPS * once <= sent <= 1.05 * (STEPS * once + once)  # at the end the next call's first is under way


@pytest.mark.full
def test_twelve_ranks_share_blocks():
    make, inputs_of = FAMILIES["flux"]
    check(
        make(12, num_single_layers=3).requires_grad_(False), inputs_of(1, 4, 5, 3), 12, SETTINGS["tapa"], weights="node"
    )


def test_a_block_that_a_step_cache_leaves_out_is_not_fetched():
    """The first block has its weights at hand, and what is under way for the second one stays until it is computed."""
    model, inputs = FAMILIES["sd3"][0](6, layers=5).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 5, 3)
    settings = {"step_cache": "first_block", "weights": "card", "split_layers": 4, "exchange": "flat"}

    def work(transport: Any) -> tuple[int, int, list[dict[str, Any]]]:
        own, sent = copy.deepcopy(model), []
        with parallelize(own, transport=transport, step_cache_threshold=1e9, **settings) as engine, torch.no_grad():
            for step in range(4):
                own(**inputs | {"timestep": torch.full_like(inputs["timestep"], 0.9 - 0.2 * step)}, return_dict=False)
                sent.append(sum(engine.bytes("weights").values()))
            return sent[0], sent[-1], engine.drift_profile()

    for first, last, profile in run_ranks(2, work):
        assert [row["cached_fraction"] for row in profile] == [0, 1, 1, 1] and first == last > 0


@pytest.mark.parametrize("more", [{}, {"step_cache": "first_block", "step_cache_threshold": 0.05}], ids=str)
def test_each_part_of_guidance_shares_its_own(more):
    """Of three calls of a step one part computes two: what it fetches waits for nobody of the other part."""
    model = FAMILIES["flux"][0](6, num_single_layers=3).requires_grad_(False)
    calls = [FAMILIES["flux"][1](1, 4, 5, text) for text in (3, 5, 4)]

    def work(transport: Any, **settings: Any) -> tuple[list[Tensor], list[int]]:
        own, outputs = copy.deepcopy(model), []
        with parallelize(own, transport=transport, guidance_parallel=2, **settings, **more), torch.no_grad():
            for step in range(STEPS):
                moment = {"timestep": torch.full_like(calls[0]["timestep"], 0.9 - 0.2 * step)}
                moment["hidden_states"] = calls[0]["hidden_states"] * (1 + 0.1 * step)
                outputs += [own(**call | moment, return_dict=False)[0] * 1 for call in calls]
            return outputs, held(own)

    whole, split = (run_ranks(4, lambda t, s=settings: work(t, **s)) for settings in ({}, {"weights": "node"}))
    for (expected, _), (outputs, inside) in zip(whole, split, strict=True):
        assert not any(inside) and len(outputs) == 3 * STEPS and all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("size", [2, 4])
def test_a_failure_while_weights_are_under_way_ends_all_ranks(size):
    """And leaves the model's forwards as they were."""
    model, inputs = FAMILIES["sd3"][0](6, layers=4).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 5, 3)
    ends: dict[int, BaseException] = {}

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        block = own.transformer_blocks[2]
        if transport.rank == 1:
            block.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            with parallelize(own, transport=transport, exchange="flat", weights="node"), torch.no_grad():
                own(**inputs, return_dict=False)
        except BaseException as error:
            ends[transport.rank] = error
            assert "forward" not in vars(block)
            raise

    with pytest.raises((ZeroDivisionError, PeerLost)):
        run_ranks(size, work)
    assert isinstance(ends.pop(1), ZeroDivisionError)
    assert all(isinstance(end, PeerLost) and "ZeroDivisionError" in str(end) for end in ends.values())
    assert len(ends) == size - 1


def test_what_cannot_be_split_is_refused():
    model = FAMILIES["sd3"][0](6).requires_grad_(False)
    model.transformer_blocks[0].attn.to_q.weight.data = model.transformer_blocks[0].attn.to_q.weight.data.t()
    with pytest.raises(UserError, match=r"weights of transformer_blocks\.0: .* choose weights whole"):
        check(model, FAMILIES["sd3"][1](1, 4, 5, 3), 2, SETTINGS["tapa"], weights="card")


def test_a_job_shares_weights_before_they_are_on_the_device(tmp_path, monkeypatch, capfd):
    """`weights: auto` is decided once for all presets and the exact run, and the image stays what it was."""

    def shared(_topology: Any, work: Any, _partition: Any) -> Any:
        return replace(work, config=work.config.with_(weights="card", split_layers=2))

    monkeypatch.setattr("cocodiff.planner.choice.with_weights_chosen", shared)
    tifffile.imwrite(tmp_path / "scan.tif", np.random.default_rng(0).random((64, 64), np.float32))
    machine = tmp_path / "machine.yaml"
    machine.write_text("name: here\ntiles: 2\nplanes: [0, 1]\ndevice: {memory_gib: 64}\n")
    images = {}
    for weights in ("whole", "auto"):
        words = ["--input", str(tmp_path / "scan.tif"), "--steps", "2", "--ranks", "2", "--preset", "tapa", "cocodiff"]
        words += ["--weights", weights, "--out", str(tmp_path / weights), "--quiet", "--machine", str(machine)]
        assert main(["inpaint", *words]) == 0
        found = sorted((tmp_path / weights / "images").glob("*.tif"))
        images[weights] = [tifffile.imread(path) for path in found]
    assert "weights auto: of 2 blocks shared by the tiles of a card" in capfd.readouterr().out
    assert len(images["auto"]) > 2 and all(map(np.array_equal, images["whole"], images["auto"]))
