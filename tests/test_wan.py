"""Wan's pipelines: two experts that take turns in a run, timesteps for each token, image to video, on several ranks."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipelines import TEXT_WIDTH, wan_pipeline

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.models import experts_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

STEPS = 8
DTYPES = (torch.bfloat16, torch.float32)
PIPELINES: dict[str, dict[str, Any]] = {
    "Wan 2.2": {},
    "Wan 2.2, image": {"image": True},
    "Wan 2.1": {"experts": 1},
    "Wan 2.1, image": {"experts": 1, "image": True, "clip": True},
    "TI2V": {"experts": 1, "tokens": True},
    "TI2V, image": {"experts": 1, "tokens": True},
}


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


def on_ranks(size: int, pipe: Any, run: Any = latents_of, **settings: Any) -> list[Any]:
    """What `run` gives of a copy of the pipeline on every rank, with the engine's bytes."""

    def work(transport: Any) -> Any:
        own = copy.deepcopy(pipe)
        with parallelize(own, transport=transport, **{"guidance_parallel": 1} | settings) as engine:
            found = run(own)
        assert not any(m._forward_pre_hooks or "forward" in vars(m) for one in experts_of(own) for m in one.modules())
        return found, {of: sum(engine.bytes(of).values()) for of in ("attention", "whole", "guidance")}

    return run_ranks(size, work)


def check_same_bits(of_ranks: list[Any]) -> tuple[torch.Tensor, dict[str, int]]:
    assert all(torch.equal(found, of_ranks[0][0]) for found, _ in of_ranks)
    return of_ranks[0]


SIZES = [*((name, 2) for name in PIPELINES), *(("Wan 2.2", size) for size in (1, 4, 12)), ("TI2V, image", 12)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_equals_one_process(name, size):
    pipe = made(name)
    plain = latents_of(pipe)
    found, sent = check_same_bits(on_ranks(size, pipe))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    assert (sent["attention"] > 0) == (size > 1)
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
    found, _ = check_same_bits(on_ranks(size, pipe))
    assert found.dtype == plain.dtype and (size > 1 or torch.equal(found, plain))
    allowed = 2 * (plain - truth).abs().max() + torch.finfo(torch.bfloat16).eps * truth.abs().max()
    assert (found - truth).abs().max() <= allowed


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["Wan 2.2", "TI2V, image"])
def test_two_parts_of_the_ranks_compute_a_branch_each(name, size):
    pipe = made(name)
    found, sent = check_same_bits(on_ranks(size, pipe, guidance_parallel=2))
    torch.testing.assert_close(found, latents_of(pipe), rtol=0, atol=1e-5)
    assert sent["guidance"] > 0 and (sent["attention"] > 0) == (size > 2)


@pytest.mark.full
def test_a_lossless_codec_keeps_the_bits_across_the_boundary():
    pipe = made("Wan 2.2").to(torch.bfloat16)
    whole, sent = check_same_bits(on_ranks(4, pipe, preset="split"))
    found, coded = check_same_bits(on_ranks(4, pipe, preset="lossless"))
    assert torch.equal(found, whole) and coded["attention"] != coded["whole"] == sent["attention"]


CODED, DISPLACED, AHEAD = {"preset": "coded"}, {"arrival": "displaced"}, {"preset": "ahead", "tau": 1.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("settings", "guidance"), [(CODED, 1), (CODED, 2), (DISPLACED, 1), (AHEAD, 1)])
def test_each_expert_begins_anew(settings, guidance):
    """Its first call gets everything whole and in time, and nothing is kept for the other one any more; the last steps
    are the run's."""
    pipe = made("Wan 2.2")
    plain, experts = latents_of(pipe), experts_of(pipe)
    calls: list[tuple[int, dict[str, Any], torch.Tensor]] = []  # the first branch's on rank 0

    def work(transport: Any) -> Any:
        own, held = copy.deepcopy(pipe), []
        with parallelize(own, transport=transport, guidance_parallel=guidance, **settings) as engine:

            def note(model: Any, _: Any, call: dict[str, Any], output: Any) -> None:
                if engine.counter.branch == 0:
                    held.append(engine.sequence.strategy.codec.bytes_held())
                    if transport.rank == 0:
                        calls.append((experts_of(own).index(model), copy.deepcopy(call), output[0] + 0))

            for model in experts_of(own):
                model.register_forward_hook(note, with_kwargs=True)
            found = latents_of(own)
            assert engine.sequence.strategy.codec.moment[1:3] == (STEPS - 1, STEPS)
        return found, held, {of: sum(engine.bytes(of).values()) for of in ("attention", "whole", "late")}

    of_ranks = run_ranks(4, work)
    assert all(torch.equal(found, of_ranks[0][0]) for found, *_ in of_ranks)
    found, held, sent = of_ranks[0]
    assert sent["attention"] < sent["whole"] or sent["late"] > 0
    assert 0 < (found - plain).abs().max() < plain.abs().max() / 4
    used = [expert for expert, *_ in calls]
    first = used.index(1)
    assert used == [0] * first + [1] * (STEPS - first) and 2 <= first <= STEPS - 2
    errors = [float((experts[one](**call)[0] - output).abs().max()) for one, call, output in calls]
    assert max(errors[0], errors[first]) < 1e-5 < max(errors[1:first])
    assert 0 < held[first] == held[0] <= held[first - 1]


def test_a_trace_names_the_expert_that_attends():
    pipe = made("Wan 2.2")

    def work(transport: Any) -> set[str]:
        own = copy.deepcopy(pipe)
        with parallelize(own, transport=transport, guidance_parallel=1) as engine:
            latents_of(own)
        return {span.layer for span in engine.trace.spans if span.name == "attention"}

    assert run_ranks(2, work) == [{"blocks.attn1", "transformer_2.blocks.attn1"}] * 2


@pytest.mark.parametrize("what", ["boundary_ratio", "guidance_scale_2"])
def test_ranks_that_would_change_experts_or_guide_otherwise_are_named(what):
    pipe = made("Wan 2.2")

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        other = transport.rank == 1
        if other and what == "boundary_ratio":
            own.register_to_config(boundary_ratio=0.7)
        with parallelize(own, transport=transport, guidance_parallel=1):
            latents_of(own, guidance_scale_2=5.0 if other and what == "guidance_scale_2" else 2.0)

    with pytest.raises(UserError, match=f"1 of 3 ranks .1. call the transformer with another {what} than"):
        run_ranks(3, work)


def test_either_expert_may_be_absent():
    pipe, later = made("Wan 2.2"), made("Wan 2.2")
    later.register_modules(transformer=None)
    later.register_to_config(boundary_ratio=1.1)  # all steps are below
    plain = latents_of(later)
    found, _ = check_same_bits(on_ranks(2, later))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    pipe.register_modules(transformer=None, transformer_2=None)
    with pytest.raises(UserError, match="a WanPipeline has no transformer"):
        parallelize(pipe)


def test_an_expert_that_cannot_run_leaves_the_other_one_as_it_was():
    pipe = made("Wan 2.2")
    pipe.transformer_2.blocks[0].attn1.processor._attention_backend = "flash"

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        with pytest.raises(UserError, match="uses the attention backend flash"):
            parallelize(own, transport=transport).__enter__()
        assert not any(m._forward_pre_hooks or "forward" in vars(m) for m in own.transformer.modules())

    run_ranks(2, work)


def test_timesteps_for_each_token_count_steps_of_a_bare_transformer():
    """Those of a frame that is given are 0, whatever the others are."""
    model, seen = made("TI2V").transformer, []

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport) as engine:
            latents = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0))
            for timestep in (900.0, 700.0, 300.0, 900.0):
                for text in (0.5, -0.5):
                    each = torch.full((1, 18), timestep)
                    each[:, :6] = 0
                    own(latents, each, torch.full((1, 7, TEXT_WIDTH), text))
                    if transport.rank == 0:
                        seen.append((engine.counter.run, engine.counter.step, engine.counter.branch))
                        assert engine.counter.sigma == timestep

    run_ranks(2, work)
    assert seen == [(0, s, b) for s in range(3) for b in range(2)] + [(1, 0, 0), (1, 0, 1)]
