"""Guidance in two parts of the ranks: one process's images, no attention byte between the parts, whatever a pipeline
does with its two branches."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from covering import all_but
from exactness import Case
from on_ranks import Call, Ran, check_alike, on_ranks, outputs_of
from planned_models import cast
from seams import bytes_held_of_parts, end_guidance_of, messages_kept_of_parts, step_caches_of
from test_adapted_pipelines import guided, latents
from test_engine_checks import BROADCAST
from test_engine_pipelines import inpainting, restored
from tiny_models import FAMILIES, HEADS, with_lora
from tiny_pipelines import sd3_pipeline
from worlds import topology_of

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize
from cocodiff.engine.guidance.parts import Awaited
from cocodiff.planner import automatic
from cocodiff.topology.axes import Axes

GUIDED = ("sd3", "flux", "klein", "qwen")

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def guiding(name: str) -> tuple[Any, dict[str, Any]]:
    """A restoring pipeline that guides, FLUX by true classifier-free guidance."""
    pipe, arguments = inpainting(name)
    if name == "flux":
        generator = torch.Generator().manual_seed(4)
        arguments |= {
            "negative_prompt_embeds": torch.randn(1, 5, arguments["prompt_embeds"].shape[-1], generator=generator),
            "negative_pooled_prompt_embeds": torch.randn(1, 16, generator=generator),
            "true_cfg_scale": 3.0,
        }
    return pipe, arguments


def check_images(
    size: int, pipe: Any, calls: list[Call], begin: Callable[[Any], object] = lambda _: None, **settings: Any
) -> list[tuple[int, int]]:
    """Compare images of one engine with one process's. begin: what is done to a rank's pipeline first. Returned are
    bytes sent for guidance and bytes by which parts took calls together, as they stood after each image."""
    plain, sent = [restored(pipe, call) for call in calls], []

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        images = []
        for call in calls:
            images.append(restored(own, call))
            counted = tuple(sum(engine.bytes(purpose).values()) for purpose in ("guidance", "unsplit"))
            if engine.rank == 0:
                sent.append(counted)
        return images

    check_alike(on_ranks(size, pipe, run=run, begin=begin, restored=len(calls) < 3, **settings), plain)
    return sent


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "size"),
    all_but(
        [("sd3", 4), ("sd3", 12), ("flux", 2), ("klein", 6), ("qwen", 4), ("qwen", 12), ("fill", 4)],
        (*GUIDED, "fill"),
        (2, 4, 6, 12),
    ),
)
def test_equals_one_process(name, size):
    """Two images in one engine, by the exchanges in turn; the second begins with what the first one showed. FLUX.1 Fill
    has no second branch."""
    pipe, arguments = guiding(name)
    parts = 1 if name == "fill" else 2
    if name == "qwen":
        pipe.transformer = with_lora(pipe.transformer)
    for settings in ({"preset": "tapa"}, {"preset": "v_first"}, {"exchange": "flat"}):
        sent = check_images(size, pipe, [arguments] * 2, guidance_parallel=parts, **settings)
        assert all((guidance > 0) == (parts > 1) and not together for guidance, together in sent)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", GUIDED)
def test_auto_splits_where_the_pipeline_guides(name):
    """Qwen-Image's does not say that it does not: in the first step one part sends what both have computed."""
    pipe, arguments = guiding(name)
    off = arguments | {key: 1.0 for key in ("guidance_scale", "true_cfg_scale") if key in arguments}
    (before, _), (after, _) = check_images(2, pipe, [off, arguments])
    assert (before > 0) == (name == "qwen") and 4 * before <= after - before > 0


@pytest.mark.parametrize(("ranks", "ring", "splits"), [(2, 2, False), (4, 2, True)])
def test_auto_does_not_split_where_a_part_cannot_have_the_ring(ranks, ring, splits):
    pipe, arguments = guiding("qwen")
    assert (check_images(ranks, pipe, [arguments], ring=ring)[0][0] > 0) == splits


def test_a_cache_that_keeps_the_parts_together_does_so_for_its_block_alone():
    pipe, arguments = guiding("flux")

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        restored(own, arguments)
        together = engine.bytes("guidance")
        engine.__exit__(None, None, None)
        own.transformer.disable_cache()
        engine.__enter__()
        image = restored(own, arguments)
        assert sum(together.values()) == 0 < sum(engine.bytes("guidance").values())
        return [image]

    def begin(own: Any) -> None:
        own.transformer.enable_cache(BROADCAST)

    plain = restored(pipe, arguments)
    check_alike(on_ranks(2, pipe, run=run, begin=begin, restored=False), [plain])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sd3", "qwen"])
def test_parts_stay_parts_where_offloading_takes_its_hooks_off_and_puts_them_on(name):
    """As diffusers does it after each image. The first image of Qwen-Image has a step more together."""
    pipe, arguments = guiding(name)

    def offload(own: Any) -> None:
        own.enable_model_cpu_offload(device="cpu")

    (zeroth, _), (first, _), (second, together) = check_images(2, pipe, [arguments] * 3, offload, guidance_parallel=2)
    assert second - first == first - zeroth > 0 == together


def calls_of(family: str, *branches: int) -> list[list[Call]]:
    """A denoising loop's calls: of each step, so many branches of one sample, with texts of different length; of SD3
    one call with all of them."""
    inputs_of, steps = FAMILIES[family][1], []
    for step, count in enumerate(branches):
        batch, texts = (count, (5,)) if family == "sd3" else (1, (5, 3, 4)[:count])
        sample = inputs_of(batch, 7, 9, 1)["hidden_states"] * (1 + 0.1 * step)
        moment = {"timestep": torch.full((batch,), 0.9 - 0.1 * step), "hidden_states": sample}
        steps.append([inputs_of(batch, 7, 9, text) | moment for text in texts])
    return steps


def looped(model: Any, steps: list[list[Call]]) -> list[torch.Tensor]:
    """What a loop makes, in place, of the values of a step's branches, once all of them are asked for."""
    outputs = []
    for calls in steps:
        outputs += [output.mul_(2) + 0 for output in [model(**call, return_dict=False)[0] for call in calls]]
    return outputs


def check_loop(size: int, model: Any, loop: list[list[Call]], run: Any = None, plain: Any = None, **more: Any) -> Ran:
    """Compare what a loop makes of the model's calls, or `run` of a model and its engine, in two parts of the ranks
    with what the loop, or `plain`, makes in one process."""
    with torch.no_grad():
        expected = plain(copy.deepcopy(model), None) if plain else looped(model, loop)
    run = run or plain or (lambda own, _: looped(own, loop))
    of_ranks = on_ranks(size, model, run=run, guidance_parallel=2, **{"steps": len(loop)} | more)
    return check_alike(of_ranks, expected, 1e-5, 1e-4)


@pytest.mark.filterwarnings("ignore:guidance_parallel 2. step")
@pytest.mark.parametrize(
    ("family", "branches"),
    [
        ("qwen", [2, 2, 1, 1]),  # guidance ends early
        ("flux", [1, 1, 2, 2, 2]),  # and begins late
        ("qwen", [2, 1, 2, 2, 1, 2]),
        ("flux2", [2, 3, 3, 2]),
    ],
)
def test_calls_that_come_or_do_not_come(family, branches):
    ran = check_loop(4, FAMILIES[family][0](HEADS[family]), calls_of(family, *branches), steps=9)
    assert (ran.sent("unsplit") > 0) == (1 in branches[:-1])


@pytest.mark.filterwarnings("ignore:guidance_parallel 2. step")
def test_a_batch_that_has_no_halves_is_computed_together():
    assert check_loop(2, FAMILIES["sd3"][0](6), calls_of("sd3", 3, 3)).sent("guidance") == 0


def test_a_callback_ends_guidance():
    """As diffusers' guide does it for SD3: the scale becomes 1, and the negative half of the prompts goes."""
    pipe, arguments = sd3_pipeline(12), guided(3.0)

    def end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            end_guidance_of(pipe)
            tensors = {name: tensor.chunk(2)[-1] for name, tensor in tensors.items()}
        return tensors

    wanted = ["prompt_embeds", "pooled_prompt_embeds"]
    arguments |= {"callback_on_step_end": end, "callback_on_step_end_tensor_inputs": wanted}
    plain, of_ranks = latents(pipe, arguments), on_ranks(4, pipe, run=lambda own, _: [latents(own, arguments)])
    assert check_alike(of_ranks, [plain]).sent("unsplit") > 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", ["sd3", "qwen"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scoring": "card", "exchange": "tapa"},
        {"selection": "full", "codec": "int4"},
        {"selection": "full", "arrival": "adaptive", "tau": 0.5, "fine_steps": 0},
    ],
    ids=["source", "card", "codec", "displaced"],
)
def test_a_coding_keeps_each_branch_where_it_is_computed(family, settings):
    """Bit for bit what each part gives alone, which is tested against one process's reference."""
    model, steps = FAMILIES[family][0](12), calls_of(family, 2, 2, 2, 2)
    lossy = {"selection": "v_major", "schedule": "fixed", "ratio": 0.6, "steps": 4, "warmup": 1, "machine": "local"}
    lossy |= settings

    def run(own: Any, transport: Any, branches: slice, parts: int) -> list[torch.Tensor]:
        with torch.no_grad(), parallelize(own, transport=transport, guidance_parallel=parts, **lossy) as engine:
            outputs: list[list[torch.Tensor]] = []
            for calls in steps:
                joined = [{name: x[branches] for name, x in calls[0].items()}] if family == "sd3" else calls[branches]
                outputs.append([own(**call)[0] * 1 for call in joined])
            held = engine.sequence.strategy.codec.bytes_held()
        assert held > 0 and (sum(engine.bytes("late").values()) > 0) == ("arrival" in settings)
        return [torch.cat(of_step) for of_step in outputs]

    def work(transport: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], slice]:
        own = copy.deepcopy(model)
        together = run(own, transport, slice(None), 2)
        axes = Axes.build(topology_of("local", transport.size), guidance=2)
        part = axes.coordinates(transport.rank).guidance
        branch = slice(part, part + 1)
        return together, run(own, transport.part(axes.branch(transport.rank)), branch, 1), branch

    for together, alone, branch in run_ranks(4, work):
        assert all(torch.equal(output[branch], expected) for output, expected in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    ("ranks", "absent"), [(12, ("sibling", "cross_plane", "node")), pytest.param(24, ("node",), marks=pytest.mark.full)]
)
def test_no_attention_byte_passes_between_the_parts(ranks, absent):
    """On one node of Aurora a part is a plane, on two a node. It sends over each link what the same ranks send alone
    that make one call a step, and in the first step both."""
    case, steps = Case(24, 6, 8, 5, family="qwen"), 3
    model = case.model()
    axes = Axes.build(topology_of("aurora", ranks), guidance=2)
    settings = {"machine": "aurora", "exchange": "tapa", "steps": steps}

    def run(own: Any, transport: Any, branches: list[int], parts: int) -> Any:
        with torch.no_grad(), parallelize(own, transport=transport, guidance_parallel=parts, **settings) as engine:
            for step, count in enumerate(branches):
                moment = {"timestep": torch.full((1,), 0.9 - 0.1 * step)}
                first, *others = [own(**case.inputs() | moment, return_dict=False)[0] for _ in range(count)]
                assert all(torch.equal(first, other) for other in others)
        return engine

    def work(transport: Any) -> tuple[dict[str, dict[str, int]], dict[str, int], dict[str, int]]:
        own, part = copy.deepcopy(model), transport.part(axes.branch(transport.rank))
        alone = run(own, part, [2] + [1] * (steps - 1), 1).trace.bytes()
        engine = run(own, transport, [2] * steps, 2)
        return {name: engine.bytes(name) for name in ("attention", "unsplit", "guidance")}, engine.trace.bytes(), alone

    for sent, own, alone in run_ranks(ranks, work):
        assert all(sent["attention"][link] == 0 for link in absent)
        assert own == alone and sum(own.values()) > 0
        assert sum(sent["unsplit"].values()) == 0 < sum(sent["guidance"].values())
        output_bytes = case.height * case.width * 4 * 4 + 1  # and one that says whether there is an output
        assert sum(sent["guidance"].values()) == steps * ranks * output_bytes


def test_each_image_of_an_engine_has_results_of_its_own_kind_and_dtype():
    model, steps = FAMILIES["qwen"][0](6), calls_of("qwen", 2, 2)

    def run(own: Any, _: Any = None) -> list[torch.Tensor]:
        found = looped(own, steps) + [own(**call).sample + 0 for calls in steps for call in calls]
        own.to(torch.bfloat16)
        return found + looped(own, [[cast(call, torch.bfloat16) for call in calls] for calls in steps])

    with torch.no_grad():
        plain = run(copy.deepcopy(model))
    check_alike(on_ranks(2, model, run=run, guidance_parallel=2, steps=2), plain, 0.05)


def test_a_result_that_nobody_asks_for():
    """The second branch's result is thrown away in some steps; its message is, too."""
    steps = calls_of("qwen", 2, 2, 2, 2)

    def run(own: Any, _: Any) -> list[torch.Tensor]:
        outputs = []
        for number, calls in enumerate(steps):
            results = [own(**call)[0] for call in calls]
            outputs += [result * 2 for result in results[: 1 + (number == 2)]]
        return outputs

    check_loop(2, FAMILIES["qwen"][0](6), steps, plain=run)


def test_messages_between_parts_are_given_back_from_image_to_image():
    def run(own: Any, engine: Any) -> list[int]:
        kept = []
        for _ in range(3):
            looped(own, calls_of("qwen", 2, 2, 2))
            kept.append(messages_kept_of_parts(engine))
        return kept

    for ran in on_ranks(2, FAMILIES["qwen"][0](6), run=run, guidance_parallel=2, steps=3):
        assert len({*ran.found}) == 1, ran.found


def test_an_engine_that_was_left_keeps_nothing_of_a_part_nor_of_all_ranks(recwarn):
    """A part computes the first step of an image without guidance, all ranks the others: codecs of both keep values.
    One line says that guidance is missing."""
    calls = [call for (call,) in calls_of("qwen", 1, 1, 1)]

    def run(own: Any, engine: Any) -> list[int]:
        outputs_of(own, *calls)
        return bytes_held_of_parts(engine)

    settings = {"guidance_parallel": 2, "steps": 3, "exchange": "split", "codec": "int4"}
    of_ranks = on_ranks(4, FAMILIES["qwen"][0](6), run=run, **settings)
    assert [min(ran.found) > 0 for ran in of_ranks].count(True) == 2  # the part that keeps the only branch
    assert [bytes_held_of_parts(ran.engine) for ran in of_ranks] == [[0, 0]] * 4
    assert len([one for one in recwarn if "guidance_parallel 2: step" in str(one.message)]) == 1


@pytest.mark.parametrize("settings", [{"codec": "int4"}, {"step_cache": "first_block"}], ids=str)
def test_room_is_looked_for_by_the_branches_that_a_part_keeps(settings, monkeypatch):
    """Of three branches one part keeps two and the other one: room for the first, then for the second, beside what is
    kept of those before."""
    needs: list[tuple[int, int]] = []
    monkeypatch.setattr(automatic, "free_memory", lambda *_: 2**40)
    monkeypatch.setattr(automatic, "check_fits", lambda need, room, _: needs.append((need.cache, room - need.weights)))

    def run(own: Any, engine: Any) -> int:
        looped(own, [[call] * 3 for (call,) in calls_of("qwen", 1, 1)])
        caches = [engine.sequence.strategy.codec, *step_caches_of(engine)]
        return sum(cache.bytes_held() for cache in caches)

    model = FAMILIES["qwen"][0](6)
    on_ranks(1, model, **settings)  # diffusers registers blocks at a first use, which threads must not share
    of_ranks = on_ranks(2, model, run=run, guidance_parallel=1, steps=2, **settings)
    of_branch = {ran.found // 3 for ran in of_ranks}
    assert {*needs} == {(count * held, 2**40 + (count - 1) * held) for count in (1, 2, 3) for held in of_branch}
    needs.clear()
    on_ranks(4, model, run=run, guidance_parallel=2, steps=2, **settings)
    assert {need for need, _ in needs} == {count * held for count in (1, 2) for held in of_branch}


@pytest.mark.parametrize("stopped_at", [0, 1, 3, 4])
def test_an_interrupted_image_leaves_nothing_behind(stopped_at):
    """All ranks stop at the same call; then the same engine makes another image."""
    steps = calls_of("qwen", 2, 2, 2)

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        _ = [own(**call)[0] for call in [call for calls in steps for call in calls][:stopped_at]]
        engine.__exit__(None, None, None)
        engine.__enter__()
        return looped(own, steps)

    check_loop(4, FAMILIES["qwen"][0](6), steps, run)


@pytest.mark.parametrize("branch", [0, 1])
@pytest.mark.parametrize("family", ["qwen", "sd3"])
def test_a_branch_that_fails_on_its_ranks_alone(family, branch):
    """For want of memory, say. The caller catches the error and makes another image in the same engine."""
    steps = calls_of(family, 2, 2, 2)

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        def fail(*_: Any) -> None:
            if engine.rank // 2 == branch:
                raise torch.OutOfMemoryError("there is no memory")

        looped(own, steps)
        hook = own.transformer_blocks[0].register_forward_pre_hook(fail)
        words = "there is no memory" if engine.rank // 2 == branch else "the other guidance branch could not"
        with pytest.raises(RuntimeError, match=words):
            looped(own, steps)
        hook.remove()
        engine.new_run()
        return looped(own, steps)

    check_loop(4, FAMILIES[family][0](6), steps, run)


@pytest.mark.parametrize("inference", [False, True])
def test_values_are_waited_for_when_they_are_asked_for(inference):
    with torch.inference_mode(inference):
        buffer = torch.full((2, 6, 4), -1.0)
        waits: list[int] = []

        def wait() -> None:
            waits.append(1)
            buffer.copy_(true)

        awaited, true = Awaited.over(buffer, cache(wait)), torch.arange(48.0).view(2, 6, 4)
        part = awaited[:, :3].unsqueeze(0).transpose(1, 2)
        first, second = awaited.chunk(2)
        assert awaited.shape == (2, 6, 4) and part.shape == (1, 3, 2, 4) and second.size(1) == 6 and len(awaited) == 2
        assert awaited.dtype == torch.float32 and awaited.device.type == "cpu" and awaited.is_floating_point()
        assert not waits
        combined = second + 2 * (first - second)
        assert type(combined) is torch.Tensor and len(waits) == 1
        assert torch.equal(combined, true[1:] + 2 * (true[:1] - true[1:]))
        assert torch.equal(part, true[:, :3].unsqueeze(0).transpose(1, 2))
        awaited *= 2  # what pipelines do in place is seen by views, as with any tensor
        assert torch.equal(torch.cat([first, second]), 2 * true)
        assert float(awaited[0, 0, 1]) == 2.0 and awaited.tolist() == (2 * true).tolist() and len(waits) == 1
    assert "2." in repr(awaited) and copy.deepcopy(awaited).sum() == 2 * true.sum()
