"""Wan's pipelines: two experts that take turns in a run, timesteps for each token, image to video, on several ranks."""

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import check_alike, on_ranks, refused, state_of
from PIL import Image
from seams import choose_backend
from tiny_pipelines import TEXT_WIDTH, wan_pipeline
from value_tables import beside

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.models import experts_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

STEPS = 8
DTYPES = (torch.bfloat16, torch.float32)
PIPELINES: dict[str, dict[str, Any]] = beside(__file__)


def made(name: str) -> Any:
    pipe = wan_pipeline(12, **PIPELINES[name])
    if name == "TI2V, image":
        from diffusers import WanImageToVideoPipeline

        pipe = WanImageToVideoPipeline(**pipe.components, expand_timesteps=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents_of(pipe: Any, **more: Any) -> torch.Tensor:
    """Of a video of three latent frames, [1, 4, 3, 4, 6]: guided, by two scales where there are two experts."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(1, 512, TEXT_WIDTH, generator=generator) / 4
    if pipe.config.boundary_ratio is not None:
        more = {"guidance_scale_2": 2.0} | more
    if "Image" in type(pipe).__name__:
        more["image"] = Image.fromarray(np.arange(32 * 48 * 3, dtype=np.uint8).reshape(32, 48, 3))
    return pipe(
        prompt_embeds=text,
        negative_prompt_embeds=-text,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=STEPS,
        generator=generator,
        output_type="latent",
        **{"guidance_scale": 3.0} | more,
    ).frames


def made_on(size: int, pipe: Any, **settings: Any) -> list[Any]:
    return on_ranks(size, pipe, run=lambda own, _: [latents_of(own)], **{"guidance_parallel": 1} | settings)


SIZES = [*((name, 2) for name in PIPELINES), ("TI2V, image", 12), *(("Wan 2.2", size) for size in (1, 4, 12))]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_equals_one_process(name, size):
    pipe = made(name)
    plain = latents_of(pipe)
    assert (check_alike(made_on(size, pipe), [plain], 1e-5).sent() > 0) == (size > 1)
    if "2.2" in name:  # either expert makes some steps
        assert not torch.equal(plain, latents_of(pipe, guidance_scale_2=3.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bf16_errs_at_most_twice_as_much_as_one_process(size, tmp_path):
    """Against the same weights in fp32, over the boundary: with what diffusers keeps in fp32 as it loads a model."""
    made("Wan 2.2").to(torch.bfloat16).save_pretrained(tmp_path)
    absent = {"text_encoder": None, "tokenizer": None}
    pipe, exact = (type(made("Wan 2.2")).from_pretrained(tmp_path, torch_dtype=dtype, **absent) for dtype in DTYPES)
    plain, truth = latents_of(pipe), latents_of(exact)
    assert {x.dtype for x in pipe.transformer_2.parameters()} == {*DTYPES}
    allowed = 2 * (plain - truth).abs().max() + torch.finfo(torch.bfloat16).eps * truth.abs().max()
    (found,) = check_alike(made_on(size, pipe), [plain], float(allowed)).found
    assert found.dtype == plain.dtype and (size > 1 or torch.equal(found, plain))
    assert (found - truth).abs().max() <= allowed


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:guidance_parallel 2. step")
@pytest.mark.parametrize(("name", "size"), [("Wan 2.2", 2), ("Wan 2.2", 4), ("TI2V, image", 4)])
def test_two_parts_of_the_ranks_compute_a_branch_each(name, size):
    """And all ranks together a second video, which is not guided."""

    def run(own: Any, _: Any = None) -> list[torch.Tensor]:
        return [latents_of(own, guidance_scale=scale) for scale in (3.0, 1.0)]

    pipe = made(name)
    plain = run(pipe)
    first = check_alike(on_ranks(size, pipe, run=run, guidance_parallel=2), plain, 1e-5)
    together = first.sent("unsplit")
    assert first.sent("guidance") > 0 < together and (first.sent() > together) == (size > 2)


CODED, AHEAD = {"preset": "coded", "state_layers": 2}, {"preset": "ahead", "tau": 1.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("settings", "guidance"), [(CODED, 1), (CODED, 2), ({"arrival": "displaced"}, 1), (AHEAD, 1)])
def test_each_expert_begins_anew(settings, guidance):
    """Its first call gets everything whole and in time, and nothing is kept for the other one any more, in a second
    video neither; the last steps are the run's."""
    pipe = made("Wan 2.2")
    plain, experts = latents_of(pipe), experts_of(pipe)
    calls: list[tuple[int, dict[str, Any], torch.Tensor]] = []  # the first branch's on rank 0
    held: list[int] = []

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        def note(model: Any, _: Any, call: dict[str, Any], output: Any) -> None:
            if engine.counter.branch == 0 == engine.rank:
                held.append(engine.sequence.strategy.codec.bytes_held())
                calls.append((experts_of(own).index(model), copy.deepcopy(call), output[0] + 0))

        for model in experts_of(own):
            model.register_forward_hook(note, with_kwargs=True)
        found = [latents_of(own) for _ in range(2)]
        assert engine.sequence.strategy.codec.step_info[1:3] == (STEPS - 1, STEPS)
        return found

    of_ranks = on_ranks(2 * guidance, pipe, run=run, restored=False, guidance_parallel=guidance, **settings)
    first = check_alike(of_ranks, [plain] * 2, float(plain.abs().max()) / 4)
    assert first.sent() < first.sent("whole") or first.sent("late") > 0
    assert not torch.equal(first.found[0], plain) and torch.equal(*first.found)
    used = [expert for expert, *_ in calls[:STEPS]]
    second = used.index(1)
    assert used == [0] * second + [1] * (STEPS - second) and 2 <= second <= STEPS - 2
    errors = [float((experts[one](**call)[0] - output).abs().max()) for one, call, output in calls[:STEPS]]
    assert max(errors[0], errors[second]) < 1e-5 < max(errors[1:second])
    assert 0 < held[second] == held[0] <= held[second - 1] and held[:STEPS] == held[STEPS:]


def test_each_expert_has_a_step_cache_of_its_own():
    """With a boundless threshold all steps are left out but the first one of each expert."""
    pipe, cached = made("Wan 2.2"), {"step_cache": "first_block", "step_cache_threshold": 1e9}
    (one,), of_ranks = (made_on(size, pipe, **cached) for size in (1, 2))
    assert check_alike(of_ranks, one.found, 1e-5).cached() == one.cached()
    assert one.cached().count(0) == 2 and one.cached().count(1) == STEPS - 2 and one.cached()[0] == 0


def test_a_trace_names_the_expert_that_attends():
    for ran in made_on(2, made("Wan 2.2")):
        layers = {span.layer for span in ran.engine.trace.spans if span.name == "attention"}
        assert layers == {"blocks.attn1", "transformer_2.blocks.attn1"}


@pytest.mark.parametrize("what", ["boundary_ratio", "guidance_scale_2"])
def test_ranks_that_would_change_experts_or_guide_otherwise_are_named(what):
    def run(own: Any, engine: Any) -> None:
        other = engine.rank == 1
        if other and what == "boundary_ratio":
            own.register_to_config(boundary_ratio=0.7)
        latents_of(own, guidance_scale_2=5.0 if other and what == "guidance_scale_2" else 2.0)

    words = f"1 of 3 ranks .1. call the transformer with another {what} than"
    refused(words, made("Wan 2.2"), size=3, run=run, guidance_parallel=1)


def test_either_expert_may_be_absent():
    pipe, later = made("Wan 2.2"), made("Wan 2.2")
    later.register_modules(transformer=None)
    later.register_to_config(boundary_ratio=1.1)  # all steps are below
    check_alike(made_on(2, later), [latents_of(later)], 1e-5)
    pipe.register_modules(transformer=None, transformer_2=None)
    with pytest.raises(UserError, match="a WanPipeline has no transformer"):
        parallelize(pipe)


def test_an_expert_that_cannot_run_leaves_the_other_one_as_it_was():
    pipe = made("Wan 2.2")
    choose_backend(pipe.transformer_2.blocks[0].attn1.processor, "flash")

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        before = state_of(own)
        with pytest.raises(UserError, match="uses the attention backend flash"):
            parallelize(own, transport=transport).__enter__()
        assert state_of(own) == before

    run_ranks(2, work)


def test_timesteps_for_each_token_count_steps_of_a_bare_transformer():
    """Those of a frame that is given are 0, whatever the others are."""
    latents, seen = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0)), []

    def run(own: Any, engine: Any) -> None:
        for timestep, text in product((900.0, 700.0, 300.0, 900.0), (0.5, -0.5)):
            each = torch.full((1, 18), timestep)
            each[:, :6] = 0
            own(latents, each, torch.full((1, 7, TEXT_WIDTH), text))
            if engine.rank == 0:
                seen.append((engine.counter.run, engine.counter.step, engine.counter.branch))
                assert engine.counter.sigma == timestep

    on_ranks(2, made("TI2V").transformer, run=run)
    assert seen == [(0, s, b) for s in range(3) for b in range(2)] + [(1, 0, 0), (1, 0, 1)]
