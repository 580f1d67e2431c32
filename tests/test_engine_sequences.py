"""One transport and one model through random sequences of what users do: presets change, guidance comes and goes,
images have other sizes, end early or fail and the error is caught. Every image has the bits of a fresh engine."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from planned_models import cast
from seams import interrupt
from test_engine_pipelines import inpainting, restored
from test_guidance import guiding
from value_tables import beside

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import Engine, parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

STEPS = 4
PRESETS = beside(__file__)
FAULTS = ("none", "latents", "callback", "interrupt", "model", "branch")


class Failure(Exception):
    """What a test raises and a caller catches."""


class Image(NamedTuple):
    """A call of the pipeline. fault: what ends it early; step: when; layer: the number of the module that raises."""

    guided: bool
    side: int
    seed: int
    fault: str
    step: int
    layer: int


SOUND = Image(True, 32, 5, "none", 0, 0)


def random_image(draw: random.Random) -> Image:
    numbers = draw.randrange(STEPS - 1), draw.randrange(10**6)
    return Image(draw.random() < 0.6, draw.choice((32, 48)), draw.randrange(2), draw.choice(FAULTS), *numbers)


def made(pipe: Any, arguments: dict[str, Any], image: Image, strength: float = 1.0) -> torch.Tensor | None:
    """The image; None where its fault is an error."""
    off = {key: 1.0 for key in ("guidance_scale", "true_cfg_scale") if key in arguments}
    given, size = arguments if image.guided else arguments | off, {"side": image.side, "steps": STEPS}
    try:
        with failing(pipe.transformer, image):
            return restored(pipe, given, **size, seed=image.seed, strength=strength, callback_on_step_end=ending(image))
    except (Failure, RuntimeError) as error:
        told = "the other guidance branch could not" in str(error) and image.fault == "branch"
        assert isinstance(error, Failure) or told, error
        return None


def ending(image: Image) -> Callable[..., dict[str, Any]]:
    """The callback of a step, which stops the image, fails or changes latents on all ranks alike."""

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == image.step and image.fault == "latents":
            return tensors | {"latents": 1.5 * tensors["latents"].flip(0, 1)}
        if step == image.step and image.fault == "interrupt":
            interrupt(pipe)
        if step == image.step and image.fault == "callback":
            raise Failure
        return tensors

    return callback


@contextmanager
def failing(model: Any, image: Image) -> Iterator[None]:
    """Has a layer of the model raise in the calls of one step; with "branch" only where the text is the shorter one,
    which the ranks of one guidance branch compute."""
    layers = [module for name, module in model.named_modules() if not list(module.children()) and "blocks" in name]
    timesteps: dict[float, None] = {}
    texts: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        timesteps[float(kwargs["timestep"].flatten()[0])] = None
        texts.append(kwargs["encoder_hidden_states"].shape[1])

    def fail(*_: Any) -> None:
        if len(timesteps) == image.step + 1 and (image.fault == "model" or texts[-1] == min(texts)):
            raise Failure

    with ExitStack() as hooks:
        if image.fault in ("model", "branch"):
            hooks.callback(model.register_forward_pre_hook(note, with_kwargs=True).remove)
            hooks.callback(layers[image.layer % len(layers)].register_forward_pre_hook(fail).remove)
        yield


def images_of(
    pipe: Any, arguments: dict[str, Any], calls: Sequence[Image], transport: Any, strength: float = 1.0, **settings: Any
) -> tuple[list[torch.Tensor | None], Engine]:
    with parallelize(pipe, transport=transport, **{"steps": STEPS, **settings}) as engine:
        return [made(pipe, arguments, call, strength) for call in calls], engine


def seeds(first: int, of_all: int) -> list[Any]:
    """The first ones, and many where everything runs."""
    return [pytest.param(seed, marks=[pytest.mark.exhaustive] * (seed >= first)) for seed in range(of_all)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", seeds(2, 25))
@pytest.mark.parametrize("family", ["sd3", "flux", "qwen", pytest.param("klein", marks=pytest.mark.exhaustive)])
def test_every_image_has_the_bits_of_a_fresh_engine(family, seed):
    """In 16 bits, where tensors travel as streams, the bits of one that sends them whole."""
    pipe, arguments = guiding(family) if family == "flux" else inpainting(family)
    draw = random.Random(f"{family} {seed}")
    ranks, strength = draw.choice((2, 3, 4)), draw.choice((1.0, 0.8))
    dtype = torch.float32 if seed % 2 else draw.choice((torch.bfloat16, torch.float16))
    pipe.to(dtype)
    arguments = cast(arguments, dtype)
    if family == "sd3" and draw.random() < 0.5:  # others shift levels by the image's size, which it cannot
        pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    lossless = {
        "guidance_parallel": 1,  # else of two ranks each is a part of its own, which sends nothing to itself
        "exchange": draw.choice(("flat", "tapa", "split")),
        "order": draw.choice(("joint", "v_first")),
        "chunks": draw.choice((1, 1, 2)),
        "predictor": draw.choice(("last", "taylor")),
    }
    known = PRESETS if seed % 2 else {"lossless": lossless}
    fitting = [name for name, given in known.items() if ranks % given.get("ring", 1) == 0]
    presets = [fitting[-1], *(draw.choice(fitting) for _ in range(draw.randint(0, 2)))]
    sequence = [(one, [random_image(draw) for _ in range(draw.randint(1, 2))] + [SOUND]) for one in presets]

    def work(transport: Any) -> list[torch.Tensor | None]:
        own, images = copy.deepcopy(pipe), []
        for preset, calls in sequence:
            found, engine = images_of(own, arguments, calls, transport, strength, preset=preset, **known[preset])
            images += found
            assert sum(engine.bytes("overflow").values()) <= sum(engine.bytes().values())
            assert preset != "lossless" or sum(row["coded_fraction"] for row in engine.drift_profile()) > 0
        return images

    def alone(transport: Any, preset: str, call: Image) -> list[torch.Tensor | None]:
        settings = known[preset] | ({"codec": "none"} if preset == "lossless" else {})
        return images_of(copy.deepcopy(pipe), arguments, [call], transport, strength, preset=preset, **settings)[0]

    fresh = cache(lambda preset, call: run_ranks(ranks, partial(alone, preset=preset, call=call), timeout_s=120.0)[0])
    expected = [image for preset, calls in sequence for call in calls for image in fresh(preset, call)]
    for images in run_ranks(ranks, work, timeout_s=120.0):
        for one, other in zip(images, expected, strict=True):
            assert (one is None) == (other is None), (ranks, sequence)
            assert one is None or torch.equal(one, other), (ranks, sequence)
