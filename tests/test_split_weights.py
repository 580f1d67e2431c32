"""Weights that the tiles of a card or node share: the bits of whole ones; what is held, sent, and comes back."""

from __future__ import annotations

import copy
import re
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import tifffile
import torch
from covering import covering
from on_ranks import on_ranks, outputs_of, refused
from peft import LoraConfig
from planned_models import PLANNED, cast
from seams import step_caches_of
from tiny_models import FAMILIES
from torch import Tensor, nn
from value_tables import beside
from worlds import topology_of

from cocodiff.cli.main import main
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.engine import weights as shared
from cocodiff.engine.agreement import tensors_in
from cocodiff.engine.engine import Engine, parallelize
from cocodiff.engine.weights import AbsentParameter, split_for_good
from cocodiff.models.checks import called_often

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = beside(__file__)

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def held(model: nn.Module) -> list[int]:
    """Return the bytes of the parameters that are here, of every block."""
    blocks = [block.parameters() for _, block in called_often(model)[1:]]
    return [sum(x.nbytes for x in block if not isinstance(x, AbsentParameter)) for block in blocks]


class Of(NamedTuple):
    """What a rank has seen of some steps: outputs, what blocks hold inside, and what was sent for weights."""

    outputs: list[Tensor]
    inside: list[int]
    sent: int


def of_steps(transport: Any, model: nn.Module, calls: list[dict[str, Any]], mode: Any, settings: dict[str, Any]) -> Of:
    """The calls of a model of a rank's own, step by step at another time, after which the weights are back."""
    own, outputs = copy.deepcopy(model), list[Tensor]()
    with mode(), parallelize(own, transport=transport, kernels="torch", **settings) as engine:
        for step in range(STEPS):
            for call in calls:
                moved = dict(call)
                if "timestep" in call and call["timestep"].is_floating_point():
                    moved["timestep"] = torch.full_like(call["timestep"], 0.9 - 0.2 * step)
                if "hidden_states" in call:
                    moved["hidden_states"] = call["hidden_states"] * (1 + 0.1 * step)
                outputs += [x.clone() for x in tensors_in(own(**moved, return_dict=False))]
        inside, sent = held(own), sum(engine.bytes("weights").values())
    assert own.state_dict().keys() == model.state_dict().keys()
    assert all(map(torch.equal, own.state_dict().values(), model.state_dict().values()))
    assert not any("fetch" in vars(parameter) for parameter in own.parameters())
    if mode is torch.inference_mode:  # the same weights without it
        with torch.no_grad(), parallelize(own, transport=transport, kernels="torch", **settings):
            assert torch.equal(own(**moved, return_dict=False)[0], outputs[-1])
    return Of(outputs, inside, sent)


def check(
    model: nn.Module, call: Any, size: int, settings: dict[str, Any], mode: Any = torch.no_grad, **more: Any
) -> list[Of]:
    """Compare shared weights with whole ones, bit for bit. call: arguments of the model, or of several calls in turn;
    more: the settings by which weights are shared."""
    calls = call if isinstance(call, list) else [call]
    whole, split = (
        run_ranks(size, lambda t, s=chosen: of_steps(t, model, calls, mode, s))
        for chosen in (settings, settings | more)
    )
    for expected, found in zip(whole, split, strict=True):
        assert found.outputs and len(found.outputs) == len(expected.outputs)
        assert all(map(torch.equal, found.outputs, expected.outputs))
        assert found.sent > 0 or found.inside == expected.inside
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
    check(planned.model().requires_grad_(False), planned.call(), 2, {}, weights="card")


@pytest.mark.parametrize(
    "what",
    ["adapters", "in inference mode", *(pytest.param(one, marks=pytest.mark.full) for one in ("compiled", "12"))],
)
def test_with_adapters_and_compiled_blocks_in_inference_mode_and_on_twelve_ranks(what):
    make, inputs_of = FAMILIES["flux" if what == "12" else "sd3"]
    model = (make(12, num_single_layers=3) if what == "12" else make(6)).requires_grad_(False)
    if what == "adapters":
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    settings = SETTINGS["tapa"] | {"compile": what == "compiled"}
    mode = torch.inference_mode if what == "in inference mode" else torch.no_grad
    among = {"size": 12, "weights": "node"} if what == "12" else {"size": 2, "weights": "card"}
    check(model, inputs_of(1, 4, 5, 3), settings=settings, mode=mode, **among)


@pytest.mark.parametrize(("among", "ranks"), [("card", 2), ("node", 4)])
def test_some_layers_are_split_and_their_parts_sent_once_a_call(among, ranks):
    model = FAMILIES["sd3"][0](6, layers=5).requires_grad_(False)
    whole = held(model)
    of_ranks = check(model, FAMILIES["sd3"][1](1, 4, 5, 3), 4, SETTINGS["tapa"], weights=among, split_layers=2)
    for _, inside, sent in of_ranks:
        assert inside == [whole[0], whole[1], 0, whole[3], 0]
        once = sum(whole[number] for number in (2, 4)) * (ranks - 1) * 4 // ranks  # every rank its part, to the others
        assert STEPS * once <= sent <= 1.05 * (STEPS * once + once)  # at the end the next call's first is under way


def test_a_block_that_a_step_cache_leaves_out_is_not_fetched():
    """The first block has its weights at hand, and what is under way for the second one stays until it is computed."""
    model, inputs = FAMILIES["sd3"][0](6, layers=5).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 5, 3)
    settings = {"step_cache": "first_block", "weights": "node", "split_layers": 4, "exchange": "flat"}

    def run(own: Any, engine: Any) -> list[int]:
        sent = []
        for step in range(4):
            outputs_of(own, inputs | {"timestep": torch.full_like(inputs["timestep"], 0.9 - 0.2 * step)})
            engine.transport.lane("weights").submit(lambda: None).wait()  # what is under way is counted on arrival
            sent.append(sum(engine.bytes("weights").values()))
        return sent

    of_ranks = on_ranks(3, model, run=run, step_cache_threshold=1e9, **settings)
    late = sum(span.late_bytes for ran in of_ranks for span in ran.engine.trace.spans)
    for ran in of_ranks:
        assert ran.cached() == [0, 1, 1, 1] and ran.found[0] == ran.found[-1] > 0
        assert ran.sent("weights") == late


class Special(nn.Parameter):
    """A parameter that somebody has marked."""


def test_a_block_that_fails_is_empty_again_where_the_error_is_caught():
    """Nor does it hold what comes to its buffer later: another image is made, and its weights are read as they are."""
    model, inputs = FAMILIES["sd3"][0](6, layers=4).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 5, 3)

    def run(own: Any, engine: Any) -> Any:
        found = outputs_of(own, inputs)
        hook = own.transformer_blocks[1].ff.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            own(**inputs)
        hook.remove()
        assert not any(held(own))
        engine.new_run()
        assert torch.equal(*found, *outputs_of(own, inputs))
        assert all(map(torch.equal, own.state_dict().values(), model.state_dict().values()))
        return own

    model.transformer_blocks[2].attn.to_q.weight.__class__ = Special
    for ran in on_ranks(2, model, run=run, weights="card"):
        assert [type(x) for x in ran.found.parameters()] == [type(x) for x in model.parameters()]


@pytest.mark.parametrize("more", [{}, {"step_cache": "first_block", "step_cache_threshold": 0.05}], ids=str)
def test_each_part_of_guidance_shares_its_own(more):
    """Of three calls of a step one part computes two: what it fetches waits for nobody of the other part."""
    model = FAMILIES["flux"][0](6, num_single_layers=3).requires_grad_(False)
    calls = [FAMILIES["flux"][1](1, 4, 5, text) for text in (3, 5, 4)]
    calls = [call | {"hidden_states": calls[0]["hidden_states"]} for call in calls]
    for _, inside, _ in check(model, calls, 4, {"guidance_parallel": 2, **more}, weights="node"):
        assert not any(inside)


def saved(model: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, low_cpu_mem_usage=False)
    model.load_state_dict({name: x + 1 for name, x in again.state_dict().items()})


def fused(model: Any) -> None:
    model.fuse_lora()
    model.unload_lora()


DONE_INSIDE: dict[str, Any] = {
    "saved and loaded": saved,
    "to": lambda model: model.to(torch.bfloat16).to(torch.float64),
    "to where it is": lambda model: model.to("cpu", torch.float32),
    "cast by layers": lambda model: model.enable_layerwise_casting(torch.bfloat16, torch.float32),
    "fused": fused,
    "in place": lambda model: model.transformer_blocks[1].attn.to_q.weight.data.mul_(3),
    "another parameter": lambda model: setattr(
        model.transformer_blocks[0].attn.to_q, "weight", nn.Parameter(model.transformer_blocks[1].attn.to_q.weight * 2)
    ),
    "counted": lambda model: model.num_parameters() == NUMBERS or 1 / 0,
}
NUMBERS = sum(x.numel() for x in FAMILIES["sd3"][0](4, layers=3).parameters())


@pytest.mark.sample(8)
@pytest.mark.parametrize(("size", "split_layers"), [(2, None), (3, 2)])  # of three, one shares with nobody
@pytest.mark.parametrize("done", DONE_INSIDE)
def test_what_is_done_to_weights_inside_the_block_is_done(done, size, split_layers):
    """Between two images, the same on every rank: outputs and weights are those of a model with whole weights."""
    model, inputs = FAMILIES["sd3"][0](4, layers=3).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 4, 3)
    if done == "fused":
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False))

    def run(own: Any, engine: Any) -> tuple[Any, list[Tensor], list[int]]:
        outputs = outputs_of(own, inputs)
        DONE_INSIDE[done](own)
        for _ in range(2):
            engine.new_run()
            outputs += outputs_of(own, cast(inputs, own.dtype))
        return own, outputs, held(own)

    whole, split = (
        on_ranks(size, model, run=run, restored=False, kernels="torch", **given)
        for given in ({}, {"weights": "card", "split_layers": split_layers})
    )
    for one, other in zip(whole, split, strict=True):
        (of_one, expected, _), (of_other, outputs, inside) = one.found, other.found
        weights, own = of_one.state_dict(), of_other.state_dict()
        assert all(map(torch.equal, outputs, expected)) and own.keys() == weights.keys()
        assert all(map(torch.equal, own.values(), weights.values()))
        assert inside.count(0) in ((split_layers or 3), 0) or done == "another parameter"


def test_one_rank_that_reads_alone_is_told():
    """`if rank == 0: pipe.save_pretrained(...)`, while the others call the model."""
    model, inputs = FAMILIES["sd3"][0](4, layers=3).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 4, 3)

    def work(transport: Any) -> str:
        own = copy.deepcopy(model)
        with pytest.raises(PeerLost) as caught, parallelize(own, transport=transport, weights="card"):
            own.state_dict() if transport.rank == 0 else own(**inputs)
        assert all(map(torch.equal, own.state_dict().values(), model.state_dict().values()))
        return str(caught.value)

    calls = "rank 1 sent the transformer's call 1 of image 1, and the exchange of shared weights was awaited"
    assert run_ranks(2, work) == [f"{calls}: ranks make different calls"] * 2


def test_weights_that_ranks_do_not_share_are_compared_as_well():
    """Changed inside the block, on one rank."""
    model, inputs = FAMILIES["sd3"][0](4, layers=3).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 4, 3)

    def run(own: Any, engine: Any) -> None:
        own(**inputs)
        own.proj_out.weight.data.mul_(1 + min(1, engine.rank))
        engine.new_run()
        own(**inputs)

    words = r"1 of 3 ranks \(0\) call the transformer with another digest of weights"
    refused(words, model, size=3, run=run, weights="card")


ERRORS: dict[str, tuple[type[BaseException], str]] = {
    "refused": (UserError, "all"),
    "interrupted": (KeyboardInterrupt, "all"),
    "one interrupted": (KeyboardInterrupt, "1"),
    "one failed": (ZeroDivisionError, "1"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("where", ["inside a block", "between blocks", "after a read", "on entering"])
@pytest.mark.parametrize("how", ERRORS)
def test_every_error_gives_the_weights_back(how, where, size, monkeypatch):
    """While others' parts are under way. All ranks end, and forwards are as they were."""
    kind, who = ERRORS[how]
    model, inputs = FAMILIES["sd3"][0](6, layers=4).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 5, 3)
    ends: dict[int, BaseException] = {}

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        block = own.transformer_blocks[2]
        fails = who in ("all", str(transport.rank))

        def fail(*_: Any) -> None:
            if fails:
                raise kind("it was so")

        settings = {"exchange": "flat", "weights": "node", "step_cache": "first_block", "step_cache_threshold": 0.0}
        block.register_forward_pre_hook(fail) if where == "between blocks" else None
        block.ff.register_forward_pre_hook(fail) if where == "inside a block" else None
        try:
            engine = parallelize(own, transport=transport, **settings)
            if where == "on entering":
                monkeypatch.setattr(step_caches_of(engine)[0], "attach", fail if fails else lambda: lambda: None)
            with engine, torch.no_grad():
                if where == "after a read":
                    block.ff.net[2].weight.sum()
                    fail()
                own(**inputs, return_dict=False)
        except BaseException as error:
            ends[transport.rank] = error
            assert "forward" not in vars(block) and not getattr(error, "__notes__", ())
            assert all(type(x) is nn.Parameter and not x.__dict__ for x in own.parameters())
            assert all(map(torch.equal, own.state_dict().values(), model.state_dict().values()))
            raise

    with pytest.raises((kind, PeerLost)):
        run_ranks(size, work)
    assert len(ends) == size and isinstance(ends[1], kind)
    for rank, end in ends.items():
        assert isinstance(end, kind) or (rank != 1 and isinstance(end, PeerLost) and kind.__name__ in str(end))


@pytest.mark.parametrize("also", ["", "interrupted"])
def test_a_rank_that_is_gone_takes_its_part_with_it(also, monkeypatch):
    """Which the error says, and every later use of the parameters."""
    monkeypatch.setattr(shared, "GIVING_BACK_S", 0.3)
    model, inputs = FAMILIES["sd3"][0](4, layers=3).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 4, 3)
    words = "rank 1 failed: .*gone; the weights of this SD3Transformer2DModel were not all given back: load the model"

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        engine = parallelize(own, transport=transport, weights="card")
        if transport.rank == 1:
            engine.__enter__()
            raise RuntimeError("gone")
        with pytest.raises((PeerLost, KeyboardInterrupt)) as caught, engine:
            if also:
                raise KeyboardInterrupt
            own(**inputs)
        if not also:
            assert any(re.search(words, note) for note in caught.value.__notes__)
        again = parallelize(own, transport=transport, weights="card")
        for use in (own.state_dict, lambda: own(**inputs), again.__enter__):
            with pytest.raises(UserError, match=r"the weights of this \w+ were not all given back"):
                use()

    with pytest.raises(RuntimeError, match="gone"):
        run_ranks(2, work)


def test_weights_that_are_split_for_good_stay_split_between_engines():
    model, inputs = FAMILIES["sd3"][0](6).requires_grad_(False), FAMILIES["sd3"][1](1, 4, 5, 3)

    def work(transport: Any) -> list[Tensor]:
        own, whole, outputs = copy.deepcopy(model), copy.deepcopy(model), list[Tensor]()
        split = split_for_good([own], topology_of("local", 2), transport, ("node", None), 1)
        for preset in ("flat", "tapa"):
            with Engine(own, Config.preset(preset, weights="node"), transport, weights=split), torch.no_grad():
                outputs.append(own(**inputs, return_dict=False)[0].clone())
            assert not any(held(own))
        with parallelize(whole, transport=transport), torch.no_grad():
            return [*outputs, whole(**inputs, return_dict=False)[0]]

    for flat, tapa, expected in run_ranks(2, work):
        assert torch.equal(flat, expected) and torch.equal(tapa, expected)


def test_what_cannot_be_split_is_refused():
    """Before any block is split."""
    model = FAMILIES["sd3"][0](6).requires_grad_(False)
    last = model.transformer_blocks[-1].attn.to_q.weight
    last.data = last.data.t()
    with pytest.raises(UserError, match=r"weights of transformer_blocks\.1: "):
        check(model, FAMILIES["sd3"][1](1, 4, 5, 3), 2, SETTINGS["tapa"], weights="card")


def test_a_job_shares_weights_before_they_are_on_the_device(tmp_path, monkeypatch, capfd):
    """`weights: auto` is decided once for all presets and the exact run, and the image stays what it was."""

    def shared(case: Any, _partition: Any) -> Any:
        return replace(case, config=case.config.with_(weights="card", split_layers=2))

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
