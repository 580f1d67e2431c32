"""Ranks that call their transformers with different inputs are told so, by name, on every rank."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from planned_models import PLANNED, noise
from tiny_models import FAMILIES
from tiny_pipelines import PIPELINES, TEXT_WIDTH
from torch import Tensor
from value_tables import beside

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine import agreement
from cocodiff.engine.agreement import Compared, disagreement, form, weights_digest
from cocodiff.engine.engine import parallelize
from cocodiff.kernels.device import digest

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
SIZE = 3


def refusals(call: Callable[[Any, bool], Any], pipe: Any, differing: int, preset: str = "tapa") -> list[str]:
    """Every rank's error where `call(pipe, whether it is to differ)` differs on one rank, or its preset."""

    def work(transport: Any) -> str:
        own, differs = copy.deepcopy(pipe), transport.rank == differing
        engine = parallelize(own, preset if differs else "tapa", transport=transport)
        with torch.no_grad(), pytest.raises(UserError) as caught, engine:
            call(own, differs)
        return str(caught.value)

    return run_ranks(SIZE, work, timeout_s=20.0)


def painting(other: dict[str, Any], seed: int = 0, branches: int = 1) -> Callable[[Any, bool], Any]:
    """A call of a FLUX.1 pipeline, with other arguments on the rank that differs. branches: calls in a step."""
    arguments: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 3, "output_type": "pt"}
    for of, value in (("", 0.1), ("negative_", 0.2)):
        arguments[f"{of}prompt_embeds"] = torch.full((1, 3, TEXT_WIDTH), value)
        arguments[f"{of}pooled_prompt_embeds"] = torch.zeros(1, 16)
    arguments["true_cfg_scale"] = 1.0 if branches == 1 else 3.0

    def call(pipe: Any, differs: bool) -> Any:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(seed if differs else 0)
        return pipe(**arguments | (other if differs else {}), generator=generator)

    return call


def later(change: Callable[[Any], None] = lambda pipe: None, seed: int = 0) -> Callable[[Any, bool], Any]:
    """A second run, after one on which ranks agree. change: what has been done on the rank that differs."""

    def call(pipe: Any, differs: bool) -> None:
        painting({})(pipe, False)
        if differs:
            change(pipe)
        painting({}, seed=seed)(pipe, differs)

    return call


def of_other_weights(pipe: Any) -> None:
    """As of an adapter that each rank initialises at random."""
    weight = pipe.transformer.transformer_blocks[0].attn.to_k.weight
    weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))


def with_noise_of_its_own(pipe: Any, step: int, time: Any, given: dict[str, Tensor], first: int = 0) -> dict[str, Any]:
    """As of a solver that draws fresh noise."""
    return {"latents": given["latents"] + 0.1 * (step >= first)}


def shifted(pipe: Any) -> None:
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=2.0)


def of_other_sigmas(pipe: Any) -> None:
    kept = pipe.scheduler.set_timesteps

    @wraps(kept)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        kept(*args, **kwargs)
        pipe.scheduler.sigmas[3:] += 0.1

    pipe.scheduler.set_timesteps = set_timesteps


CALLS: dict[str, Callable[[Any, bool], Any]] = {
    "seed": painting({}, seed=1),
    "prompt": painting({"prompt_embeds": torch.full((1, 3, TEXT_WIDTH), 0.3)}),
    "steps": painting({"num_inference_steps": 4}),
    "size": painting({"height": 48}),
    "noise of the second step": painting({"callback_on_step_end": with_noise_of_its_own}, branches=2),
    "noise of the last step": painting({"callback_on_step_end": partial(with_noise_of_its_own, first=2)}),
    "scale": painting({"guidance_scale": 9.0}),
    "guidance": painting({"true_cfg_scale": 3.0}),
    "seed of the second run": later(seed=5),
    "weights": later(of_other_weights),
    # what is computed beside the transformer: rank 0 would decode what others have denoised
    "scale of the VAE": later(lambda pipe: pipe.vae.register_to_config(scaling_factor=3.0)),
    "weights of the VAE": later(lambda pipe: pipe.vae.decoder.conv_out.weight.data.mul_(1.01)),
    "class of the VAE": later(lambda pipe: setattr(pipe, "vae", PIPELINES["klein"](heads=12).vae)),
    "shift": later(shifted),
    "sigmas": later(of_other_sigmas),
}
WORDS = beside(__file__)


@pytest.mark.parametrize(("case", "differing"), [*((case, 1) for case in CALLS), ("seed of the second run", 0)])
def test_a_rank_that_differs_is_named(case, differing):
    """Also where it would be hidden, since one rank decodes the image for all."""
    for said in refusals(CALLS[case], PIPELINES["flux"](heads=12), differing):
        assert said.startswith(f"1 of 3 ranks ({differing}) call the transformer with") and re.search(WORDS[case], said)


def test_a_copy_of_the_pipeline_has_last_steps_of_its_own():
    """They take twice the bits, though the pipeline itself has run for longer."""

    pipe = PIPELINES["flux"](heads=12)

    def work(transport: Any) -> list[float]:
        own = copy.deepcopy(pipe)
        with torch.no_grad(), parallelize(own, "coded-", transport=transport) as engine:
            for one, steps in ((own, 20), (copy.copy(own), 12)):
                engine.forget_drift()
                painting({"num_inference_steps": steps})(one, True)
            return [row["sent_fraction"] for row in engine.drift_profile()]

    sent, other = run_ranks(2, work, timeout_s=60.0)
    assert sent == other and len(sent) == 12 and min(sent[-2:]) > 1.5 * sent[-3]


def test_other_weights_of_a_model_that_is_sampled(monkeypatch):
    monkeypatch.setattr(agreement, "WHOLE_MODEL", 0)
    errors = refusals(later(of_other_weights), PIPELINES["flux"](), differing=2)
    assert len(set(errors)) == 1 and "1 of 3 ranks (2) call the transformer with another digest of weights" in errors[0]


def test_other_settings_are_told_where_the_transport_is_given():
    make, inputs_of = FAMILIES["sd3"]
    for said in refusals(lambda own, _: own(**inputs_of(1, 4, 5, 3)), make(6), differing=2, preset="flat"):
        assert said.startswith("1 of 3 ranks (2) call the transformer with another settings than the rest")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_argument_of_a_transformer_counts(family):
    make, inputs_of = FAMILIES[family]
    model, inputs = make(6), inputs_of(1, 4, 5, 3)

    def call(own: Any, differs: bool, name: str) -> None:
        x = inputs[name]
        other = x if isinstance(x, list) else torch.cat([x.flatten()[:-1], x.flatten()[-1:] + 1]).view_as(x)
        own(**inputs | ({name: [[(1, 5, 4)]] if isinstance(x, list) else other} if differs else {}))

    for name in inputs:
        for said in refusals(lambda own, differs, name=name: call(own, differs, name), model, differing=2):
            assert f"ranks (2) call the transformer with another {name} than" in said


def test_the_order_of_tensors_in_a_list_counts():
    case = PLANNED["z-image"].variant({"cap_feats": [noise(9, 10), noise(9, 10)]})

    def call(own: Any, differs: bool) -> None:
        given = case.call()
        own(**given | {"cap_feats": given["cap_feats"][:: -1 if differs else 1]})

    for said in refusals(call, case.model(), differing=2):
        assert "ranks (2) call the transformer with another cap_feats than" in said


@pytest.mark.parametrize("branches", [1, 2])
def test_noise_that_schedulers_draw_is_compared(branches):
    """From global generators, which ranks do not seed alike by themselves (here they draw from one in turns)."""
    pipe = PIPELINES["flux"](heads=12)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    for said in refusals(painting({}, branches=branches), pipe, differing=1):
        assert "call the transformer with another hidden_states than the rest" in said


def test_digests_tell_values_places_and_types_apart():
    x = torch.arange(24.0)
    seen = [x, x.flip(0), x + 1e-6, -x, x.bfloat16(), x.long(), x > 3, x.to(torch.complex64), x[:23], x[1:]]
    assert len({int(digest(one)) for one in seen}) == len(seen)
    assert int(digest(x.view(4, 6).t().contiguous().t())) == int(digest(x))
    short = x.bfloat16()
    assert int(digest(short[2:22])) == int(digest(short[2:22].clone()))  # not where a 64-bit word begins
    words = torch.arange(10)
    assert int(digest(words[:3]) + digest(words[3:], 3)) == int(digest(words))
    assert int(digest(x[:0])) == 0 and int(digest(x.sum())) == int(digest(x.sum().clone()))


@pytest.mark.parametrize("places", [slice(0, 1), slice(512, None), slice(600, 900)], ids=["first", "half", "middle"])
def test_the_sample_of_a_large_model_is_spread_over_all_its_weights(places):
    model = torch.nn.Linear(1040, 1030)  # more numbers than are compared whole
    before = weights_digest(model)
    assert weights_digest(copy.deepcopy(model)) == before
    with torch.no_grad():
        model.weight[places] += 1
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    ("others", "named"), [(1, "11"), (8, "4, 5, 6, 7, 8, 9, 10, 11"), (9, "3, 4, 5, 6, 7, 8, 9, 10, ...")]
)
def test_of_many_ranks_that_differ_the_first_are_named(others, named):
    ours, theirs = ([Compared(("seed", form(value), 0), str(value))] for value in (1, 2))
    said = disagreement([*[ours] * (12 - others), *[theirs] * others, *[ours] * 8])
    assert said.startswith(f"{others} of 20 ranks ({named}) call the transformer with another seed than the rest")


def test_forms_hold_no_addresses():
    assert form({"scale": 1.5, "more": [None, torch.ones(2), object()]}) == (
        "{'scale': 1.5, 'more': [None, float32 [2], object]}"
    )
