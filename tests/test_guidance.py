"""Guidance in two parts of the ranks: one process's images, no attention byte between the parts, whatever a pipeline
does with its two branches."""

import copy
import warnings
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from attention.byte_formulas import Formulas
from covering import all_but
from exactness import Case, Expected, guided_outputs
from test_engine_families import with_lora
from test_engine_pipelines import SIDE, inpainting, restored
from tiny_models import FAMILIES, HEADS
from worlds import topology_of

from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.comm.transport import Part
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.engine.guidance.parts import Awaited
from cocodiff.topology.axes import Axes
from cocodiff.topology.layout import Layout

GUIDED = ("sd3", "flux", "klein", "qwen")
SEQUENTIAL = ("flux", "flux2", "qwen")

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


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "size"),
    all_but([("sd3", 4), ("sd3", 12), ("flux", 2), ("klein", 6), ("qwen", 4), ("qwen", 12)], GUIDED, (2, 4, 6, 12)),
)
def test_equals_one_process(name, size):
    """Two images in one engine, by the exchanges in turn; the second begins with what the first one showed."""
    pipe, arguments = guiding(name)
    if name == "qwen":
        pipe.transformer = with_lora(pipe.transformer)
    plain = restored(pipe, arguments)

    def work(transport: Any) -> list[torch.Tensor]:
        own, images = copy.deepcopy(pipe), []
        for preset in ("tapa", "v_first"):
            with parallelize(own, preset, transport=transport, guidance_parallel=2) as engine:
                images += [restored(own, arguments), restored(own, arguments)]
            assert engine.bytes("unsplit") == dict.fromkeys(LINK_CLASSES, 0)
            assert sum(engine.bytes("guidance").values()) > 0
        assert "forward" not in vars(own.transformer)
        return images

    of_ranks = run_ranks(size, work)
    for images in of_ranks:
        for image, first in zip(images, of_ranks[0], strict=True):
            assert torch.equal(image, first)
            torch.testing.assert_close(image, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", GUIDED)
def test_auto_splits_where_the_pipeline_guides(name):
    pipe, arguments = guiding(name)
    off = arguments | {key: 1.0 for key in ("guidance_scale", "true_cfg_scale") if key in arguments}
    plain = [restored(pipe, arguments), restored(pipe, off)]

    def work(transport: Any) -> list[tuple[torch.Tensor, int]]:
        own, found = copy.deepcopy(pipe), []
        for call in (arguments, off):
            with parallelize(own, transport=transport) as engine:
                image = restored(own, call)
            found.append((image, sum(engine.bytes("guidance").values())))
        return found

    for found in run_ranks(2, work):
        for (image, _), expected in zip(found, plain, strict=True):
            torch.testing.assert_close(image, expected, rtol=0, atol=1e-4)
        assert found[0][1] > 0 and found[1][1] == 0


@pytest.mark.parametrize(
    ("family", "size"), all_but([("sd3", 4), ("flux2", 4), ("qwen", 6)], ("sd3", *SEQUENTIAL), (4, 6))
)
def test_real_heads_and_odd_sizes(family, size):
    case = Case(HEADS[family], 7, 9, 11, family=family, batch=2 if family == "sd3" else 1)
    expected = Expected.of(case)
    for outputs in run_ranks(size, lambda transport: guided_outputs(transport, expected.model, case, "local")):
        for output in outputs:
            expected.check(output)


def calls_of(family: str, branches: list[int]) -> list[list[dict[str, Any]]]:
    """A denoising loop's calls: of each step, so many branches of one sample, with texts of different length."""
    inputs_of, steps = FAMILIES[family][1], []
    for step, count in enumerate(branches):
        sample = inputs_of(1, 6, 7, 1)["hidden_states"] * (1 + 0.1 * step)
        moment = {"timestep": torch.full((1,), 0.9 - 0.1 * step), "hidden_states": sample}
        steps.append([inputs_of(1, 6, 7, (5, 3, 4)[branch]) | moment for branch in range(count)])
    return steps


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
    model, steps = FAMILIES[family][0](6), calls_of(family, branches)
    with torch.no_grad():
        plain = [model(**call)[0] for step in steps for call in step]

    def work(transport: Any) -> tuple[list[torch.Tensor], dict[str, int]]:
        own, outputs = copy.deepcopy(model), []
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with parallelize(own, transport=transport, guidance_parallel=2, steps=9) as engine:
                for step in steps:
                    of_step = [own(**call, return_dict=False)[0] for call in step]
                    outputs += [output * 1 for output in of_step]
            return outputs, engine.bytes("unsplit")

    of_ranks = run_ranks(4, work)
    for outputs, unsplit in of_ranks:
        for output, first, expected in zip(outputs, of_ranks[0][0], plain, strict=True):
            assert torch.equal(output, first)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        assert (sum(unsplit.values()) > 0) == (1 in branches[:-1])


def test_a_callback_ends_guidance():
    """As diffusers' guide does it for SD3: the scale becomes 1, and the negative half of the prompts goes."""
    pipe, arguments = guiding("sd3")
    pipe = diffusers.StableDiffusion3Pipeline(**pipe.components)
    pipe.set_progress_bar_config(disable=True)

    def drawn(pipe: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        call = {"height": SIDE, "width": SIDE, "num_inference_steps": 3, "generator": generator, "output_type": "pt"}
        with torch.no_grad():
            return pipe(**call, **arguments).images

    def end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe._guidance_scale = 1.0
            tensors = {name: tensor.chunk(2)[-1] for name, tensor in tensors.items()}
        return tensors

    wanted = ["prompt_embeds", "pooled_prompt_embeds"]
    arguments |= {"callback_on_step_end": end, "callback_on_step_end_tensor_inputs": wanted}
    plain = drawn(pipe)

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(pipe)
        with parallelize(own, transport=transport) as engine:
            image = drawn(own)
        assert sum(engine.bytes("unsplit").values()) > 0
        return image

    for image in run_ranks(4, work):
        torch.testing.assert_close(image, plain, rtol=0, atol=1e-4)


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
    make, inputs_of = FAMILIES[family]
    model = make(12)
    lossy = {"selection": "v_major", "schedule": "fixed", "ratio": 0.6, "steps": 4, "warmup": 1, "machine": "local"}
    lossy |= settings

    def step_calls(step: int, branch: int | None) -> list[dict[str, Any]]:
        moment = torch.full((1,), 0.9 - 0.1 * step)
        calls = [inputs_of(1, 6, 7, 5 if family == "sd3" else length) for length in (5, 3)]
        for call in calls:
            call["hidden_states"] = calls[0]["hidden_states"] * (1 + 0.1 * step)
        calls = calls if branch is None else [calls[branch]]
        if family == "sd3" and branch is None:
            calls = [{name: torch.cat([call[name] for call in calls]) for name in calls[0]}]
        return [call | {"timestep": moment.repeat(len(call["hidden_states"]))} for call in calls]

    def run(own: Any, transport: Any, branch: int | None, parts: int) -> list[torch.Tensor]:
        with torch.no_grad(), parallelize(own, transport=transport, guidance_parallel=parts, **lossy) as engine:
            outputs = [[own(**call)[0] * 1 for call in step_calls(step, branch)] for step in range(4)]
            held = engine.sequence.strategy.codec.bytes_held()
        assert held > 0 and (sum(engine.bytes("late").values()) > 0) == ("arrival" in settings)
        return [torch.cat(of_step) for of_step in outputs]

    def work(transport: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        own = copy.deepcopy(model)
        together = run(own, transport, None, 2)
        axes = Axes.build(topology_of("local", transport.size), guidance=2)
        part = axes.coordinates(transport.rank).guidance
        return together, run(own, Part(transport, axes.branch(transport.rank)), part, 1), part

    for together, alone, part in run_ranks(4, work):
        for output, expected in zip(together, alone, strict=True):
            assert torch.equal(output[part : part + 1], expected)


@pytest.mark.parametrize(("ranks", "absent"), [(12, ("sibling", "cross_plane", "node")), (24, ("node",))])
def test_no_attention_byte_passes_between_the_parts(ranks, absent):
    """On one node of Aurora a part is a plane, on two a node. The trace counts what the formulas say."""
    case = Case(24, 6, 8, 5, family="qwen")
    model, steps = case.model(), 3
    topology = topology_of("aurora", ranks)
    axes = Axes.build(topology, guidance=2)

    def work(transport: Any) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
        own = copy.deepcopy(model)
        with torch.no_grad():
            settings = {"guidance_parallel": 2, "machine": "aurora", "exchange": "tapa", "steps": steps}
            with parallelize(own, transport=transport, **settings) as engine:
                for step in range(steps):
                    moment = {"timestep": torch.full((1,), 0.9 - 0.1 * step)}
                    branches = [own(**case.inputs() | moment, return_dict=False)[0] for _ in range(2)]
                    assert torch.equal(*branches)
            return {name: engine.bytes(name) for name in ("attention", "unsplit", "guidance")}, engine.trace.bytes()

    segments = case_segments(model, case)
    of_ranks = run_ranks(ranks, work)
    calls = 2 * 2 + 2 * (steps - 1)  # of one part's strategy: two layers, both branches in the first step
    for rank, (sent, own) in enumerate(of_ranks):
        assert all(sent["attention"][link] == 0 for link in absent)
        assert sum(sent["unsplit"].values()) == 0 < sum(sent["guidance"].values())
        members = axes.branch(rank)
        part = topology.part(members)
        formulas = Formulas(part, Layout.build(part, segments, 24))
        u = 8 * 4  # bytes of a token of one head in float32
        slot = members.index(rank)
        ways = [formulas.sent("tapa", "forward", slot, 3 * u), formulas.sent("tapa", "back", slot, u)]
        assert own == {link: calls * sum(way[link] for way in ways) for link in LINK_CLASSES}
        output_bytes = case.height * case.width * 4 * 4 + 1  # and one that says whether there is an output
        assert sum(sent["guidance"].values()) == (steps - 1) * ranks * output_bytes


def case_segments(model: Any, case: Case) -> Any:
    from cocodiff.models import family_of

    return family_of(model).adapter.segments(model, case.inputs())


def test_a_result_that_nobody_asks_for():
    """The second branch's result is thrown away in every step; its message is, too."""
    model, steps = FAMILIES["qwen"][0](6), calls_of("qwen", [2, 2, 2])
    with torch.no_grad():
        plain = [model(**calls[0])[0] for calls in steps]

    def work(transport: Any) -> list[torch.Tensor]:
        own, outputs = copy.deepcopy(model), []
        with torch.no_grad(), parallelize(own, transport=transport, guidance_parallel=2, steps=3):
            for calls in steps:
                results = [own(**call)[0] for call in calls]
                outputs.append(results[0] * 1)
        return outputs

    for outputs in run_ranks(2, work):
        for output, expected in zip(outputs, plain, strict=True):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_an_engine_that_was_left_keeps_nothing_of_a_part_nor_of_all_ranks():
    """A part computes the first step of an image without guidance, all ranks the others: codecs of both keep values."""
    model, steps = FAMILIES["qwen"][0](6), calls_of("qwen", [1, 1, 1])

    def work(transport: Any) -> tuple[list[int], list[int]]:
        settings = {"guidance_parallel": 2, "steps": 3, "exchange": "split", "codec": "int4"}
        engine = parallelize(copy.deepcopy(model), transport=transport, **settings)

        def held() -> list[int]:
            return [ranks.strategy.codec.bytes_held() for ranks in engine._guided.sequences]

        with torch.no_grad(), warnings.catch_warnings(), engine:
            warnings.simplefilter("ignore")
            for (call,) in steps:
                engine.model(**call)
            inside = held()
        return inside, held()

    inside, after = zip(*run_ranks(4, work), strict=True)
    assert [min(of_rank) > 0 for of_rank in inside].count(True) == 2  # the part that keeps the only branch
    assert after == ([0, 0],) * 4


@pytest.mark.parametrize("stopped_at", [0, 1, 3, 4])
def test_an_interrupted_image_leaves_nothing_behind(stopped_at):
    """All ranks stop at the same call; then the same engine makes another image."""
    model, steps = FAMILIES["qwen"][0](6), calls_of("qwen", [2, 2, 2])
    with torch.no_grad():
        plain = [model(**call)[0] for calls in steps for call in calls]

    def work(transport: Any) -> list[torch.Tensor]:
        own, made = copy.deepcopy(model), []
        engine = parallelize(own, transport=transport, guidance_parallel=2, steps=3)
        calls = [call for of_step in steps for call in of_step]
        with torch.no_grad(), engine:
            held = [own(**call)[0] for call in calls[:stopped_at]]
        del held
        with torch.no_grad(), engine:
            for number, call in enumerate(calls):
                made.append(own(**call)[0])
                if number % 2:
                    made[-2:] = [output * 1 for output in made[-2:]]
        return made

    for outputs in run_ranks(4, work):
        for output, expected in zip(outputs, plain, strict=True):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("branch", [0, 1])
@pytest.mark.parametrize("family", ["qwen", "sd3"])
def test_a_branch_that_fails_on_its_ranks_alone(family, branch):
    """For want of memory, say. The caller catches the error and makes another image in the same engine."""
    model, steps = FAMILIES[family][0](6), calls_of("qwen", [2, 2, 2])
    if family == "sd3":  # both branches in one call
        inputs = [FAMILIES["sd3"][1](2, 6, 7, 5) for _ in range(3)]
        moments = [torch.full((2,), 0.9 - 0.1 * step) for step in range(3)]
        steps = [[one | {"timestep": moment}] for one, moment in zip(inputs, moments, strict=True)]
    with torch.no_grad():
        plain = [model(**call)[0] for calls in steps for call in calls]

    def work(transport: Any) -> tuple[str, list[torch.Tensor]]:
        own = copy.deepcopy(model)
        fails = transport.rank // 2 == branch

        def image() -> list[torch.Tensor]:
            made = []
            for calls in steps:
                made += [output * 1 for output in [own(**call)[0] for call in calls]]
            return made

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("there is no memory")

        with torch.no_grad(), parallelize(own, transport=transport, guidance_parallel=2, steps=3) as engine:
            image()
            hook = own.transformer_blocks[0].register_forward_pre_hook(fail) if fails else None
            with pytest.raises(RuntimeError) as caught:
                image()
            if hook is not None:
                hook.remove()
            engine.new_run()
            return str(caught.value), image()

    for rank, (error, outputs) in enumerate(run_ranks(4, work, timeout_s=60.0)):
        expected = "there is no memory" if rank // 2 == branch else "the other guidance branch could not"
        assert expected in error
        for output, one in zip(outputs, plain, strict=True):
            torch.testing.assert_close(output, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ranks", "ring", "splits"), [(2, 2, False), (4, 2, True)])
def test_auto_does_not_split_where_a_part_cannot_have_the_ring(ranks, ring, splits):
    pipe, arguments = guiding("qwen")
    plain = restored(pipe, arguments)

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(pipe)
        with parallelize(own, transport=transport, ring=ring) as engine:
            image = restored(own, arguments)
        assert (sum(engine.bytes("guidance").values()) > 0) == splits
        return image

    for image in run_ranks(ranks, work):
        torch.testing.assert_close(image, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["sd3", "qwen"])
def test_parts_stay_parts_where_offloading_takes_its_hooks_off_and_puts_them_on(name):
    """As diffusers does it after each image."""
    pipe, arguments = guiding(name)
    plain = restored(pipe, arguments)

    def work(transport: Any) -> list[torch.Tensor]:
        own, sent, images = copy.deepcopy(pipe), [0], []
        own.enable_model_cpu_offload(device="cpu")
        with parallelize(own, transport=transport, guidance_parallel=2) as engine:
            for _ in range(3):
                images.append(restored(own, arguments))
                sent.append(sum(engine.bytes("guidance").values()))
        assert sent[3] - sent[2] == sent[2] - sent[1] > 0  # the first image of Qwen-Image has a step more together
        assert sum(engine.bytes("unsplit").values()) == 0
        return [*images, restored(own, arguments)]

    for images in run_ranks(2, work):
        for image in images:
            torch.testing.assert_close(image, plain, rtol=0, atol=1e-4)


def test_an_odd_number_of_ranks_has_no_two_parts():
    def work(transport: Any) -> None:
        with pytest.raises(UserError, match=r"3 rank\(s\) cannot be cut into 2 equal parts.*guidance_parallel 1"):
            parallelize(FAMILIES["qwen"][0](6), transport=transport, guidance_parallel=2)

    run_ranks(3, work)


def test_a_cache_that_counts_calls_keeps_all_ranks_together():
    from diffusers import PyramidAttentionBroadcastConfig

    model = FAMILIES["flux"][0](6)
    moment = {"spatial_attention_block_skip_range": 2, "current_timestep_callback": lambda: 500}
    model.enable_cache(PyramidAttentionBroadcastConfig(**moment))

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        wrong = pytest.raises(UserError, match="guidance_parallel 2 and the cache hook")
        with wrong, parallelize(own, transport=transport, guidance_parallel=2):
            pass

    run_ranks(2, work)


class Message:
    """A message whose values come when somebody waits."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.waits = buffer, 0

    def wait(self) -> None:
        self.waits += 1
        self.buffer.copy_(torch.arange(self.buffer.numel()).view_as(self.buffer))


@pytest.mark.parametrize("inference", [False, True])
def test_values_are_waited_for_when_they_are_asked_for(inference):
    with torch.inference_mode(inference):
        buffer = torch.full((2, 6, 4), -1.0)
        message = Message(buffer)
        awaited = Awaited.over(buffer, cache(message.wait))
        part = awaited[:, :3].unsqueeze(0).transpose(1, 2)
        first, second = awaited.chunk(2)
        assert awaited.shape == (2, 6, 4) and part.shape == (1, 3, 2, 4) and second.size(1) == 6 and len(awaited) == 2
        assert awaited.dtype == torch.float32 and awaited.device.type == "cpu" and awaited.is_floating_point()
        assert message.waits == 0
        true = torch.arange(48.0).view(2, 6, 4)
        combined = second + 2 * (first - second)
        assert type(combined) is torch.Tensor and message.waits == 1
        assert torch.equal(combined, true[1:] + 2 * (true[:1] - true[1:]))
        assert torch.equal(part, true[:, :3].unsqueeze(0).transpose(1, 2))
        awaited *= 2  # what pipelines do in place is seen by views, as with any tensor
        assert torch.equal(torch.cat([first, second]), 2 * true)
        assert float(awaited[0, 0, 1]) == 2.0 and awaited.tolist() == (2 * true).tolist() and message.waits == 1
    assert "2." in repr(awaited) and copy.deepcopy(awaited).sum() == 2 * true.sum()
