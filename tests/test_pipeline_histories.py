"""Random histories of a pipeline: what users do to it between images, inside the `with` block and around it.

A pipeline in one process has the same history without an engine. Each image equals its image, or is refused in a line;
the block left, the pipeline is again what that one is.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from planned_models import cast
from seams import interrupt
from test_engine_pipelines import restored
from test_guidance import GUIDED, guiding
from tiny_models import with_lora

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine import compiling
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
HISTORIES, SAMPLE = 60, (6, 11)  # a family each, and nothing that compiles for long
SEEDED = threading.Lock()  # torch's generator, which ranks share here, as they are threads


class Interrupted(Exception):
    """By which a user's callback ends an image."""


class History:
    """One pipeline's. folder: where it is saved."""

    def __init__(self, pipe: Any, arguments: dict[str, Any], folder: Path) -> None:
        self.pipe, self._arguments, self._folder = copy.deepcopy(pipe), arguments, folder
        folder.mkdir()

    # Each returns what has to be the same in one process ------------------------------------------------------------

    def image(self, pipe: Any = None, **more: Any) -> torch.Tensor:
        given = cast(self._arguments, self.pipe.transformer.dtype)
        return restored(pipe or self.pipe, given | more)

    def called_back(self) -> torch.Tensor:
        def halve(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            return {"latents": tensors["latents"] * 0.5 if step == 0 else tensors["latents"]}

        return self.image(callback_on_step_end=halve)

    def failed(self) -> None:
        def fail(*_: Any) -> None:
            raise Interrupted

        with pytest.raises(Interrupted):
            self.image(callback_on_step_end=fail)

    def stopped(self) -> torch.Tensor:
        def stop(pipe: Any, _: Any, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            interrupt(pipe)
            return tensors

        return self.image(callback_on_step_end=stop)

    def by_a_copy(self) -> torch.Tensor:
        return self.image(copy.copy(self.pipe))

    def by_another_pipeline(self) -> torch.Tensor:
        other = type(self.pipe)(**self.pipe.components)
        other.set_progress_bar_config(disable=True)
        return self.image(other)

    def saved(self) -> list[tuple[str, str]]:
        folder = self._folder / str(len(list(self._folder.iterdir())))
        self.pipe.save_pretrained(folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]

    def copied(self) -> str:
        """One that is refused inside the block alone."""
        copy.copy(self.pipe.vae)
        pickle.dumps(copy.deepcopy(self.pipe).vae)
        return "copied"

    def offloaded(self) -> None:
        self.brought_back()  # or what is offloaded in two ways has no numbers, in one process too
        self.pipe.enable_model_cpu_offload(device="cpu")

    def offloaded_by_layers(self) -> None:
        from accelerate import cpu_offload

        self.brought_back()
        cpu_offload(self.pipe.transformer, torch.device("cpu"), offload_buffers=True)

    def brought_back(self) -> None:
        self.pipe.remove_all_hooks()

    def cast(self) -> None:
        self.pipe.to(torch.float64)

    def cast_back(self) -> None:
        self.pipe.to(torch.float32)

    def cast_by_layers(self) -> None:
        self.pipe.transformer.enable_layerwise_casting(torch.bfloat16, torch.float32)

    def adapted(self) -> None:
        self.brought_back()  # or its numbers would go where those of the weights are not
        with SEEDED:
            with_lora(self.pipe.transformer)

    def rid_of_adapters(self) -> None:
        self.pipe.unload_lora_weights()

    def compiled(self) -> None:
        self.pipe.transformer.compile(backend="eager")

    def compiled_by_blocks(self) -> None:
        self.pipe.transformer.compile_repeated_blocks(backend="eager")

    def compiled_around(self) -> None:
        self.pipe.transformer = torch.compile(self.pipe.transformer, backend="eager")

    def forwarded(self) -> None:
        """Somebody's own forward, which keeps the one before."""
        for module in (self.pipe.transformer, next(self.pipe.transformer.children())):
            before = module.forward
            module.forward = MethodType(lambda _, *a, before=before, **k: before(*a, **k), module)

    def decoded(self) -> None:
        """Somebody's own decode, which keeps the one before."""
        before = self.pipe.vae.decode
        self.pipe.vae.decode = lambda *args, **kwargs: before(*args, **kwargs)

    def sliced(self) -> None:
        self.pipe.vae.enable_slicing()


IMAGES = ("image", "called_back", "failed", "stopped", "by_a_copy", "by_another_pipeline")
RARE = ("compiled", "compiled_by_blocks", "compiled_around", "adapted", "cast_by_layers")  # often refused
OTHERS = tuple(name for name, of in vars(History).items() if callable(of) and name[0] != "_" and name not in IMAGES)
LEAVE, ENTER = "leave", "enter"


def history_of(chance: random.Random) -> list[str]:
    """Deeds in their order: some before the block, some in it, and images after each of some."""
    common = [name for name in OTHERS if name not in RARE]
    deeds = [chance.choice(common) for _ in range(chance.randrange(2))] + [ENTER]
    for _ in range(chance.randint(3, 6)):
        deeds.append(chance.choice(common + [LEAVE, "offloaded"] + [chance.choice(RARE)] * 2))
        deeds.append(chance.choice(IMAGES))
        if deeds[-2] == LEAVE:
            deeds.append(ENTER)
    return [*deeds, "image", LEAVE, "image", "saved", ENTER, "image"]


def settings_of(chance: random.Random) -> dict[str, Any]:
    return {
        "vae": chance.choice(("one", "all", "sharded", "tiled")),
        "guidance_parallel": chance.choice(("auto", 1, 2)),
        "compile": chance.random() < 0.2,
        "exchange": chance.choice(("flat", "tapa")),
    }


def outcome(deed: Callable[[], Any]) -> Any:
    try:
        return deed()
    except UserError as refused:
        assert "\n" not in str(refused)
        return refused
    except Exception as error:  # of diffusers, of what cannot be done to a pipeline
        return type(error)


def lived(history: History, deeds: list[str], enter: Callable[[Any], Any] | None) -> list[Any]:
    """What comes of each deed. enter: gives the block; None in one process. What is refused leaves it."""
    found, block = [], ExitStack()
    for deed in deeds:
        if deed in (ENTER, LEAVE):
            block.close()
            came = outcome(lambda: block.enter_context(enter(history.pipe))) if enter and deed == ENTER else None
            found.append(came if isinstance(came, UserError) else None)
            continue
        found.append(outcome(getattr(history, deed)))
        if isinstance(found[-1], UserError) and deed != "copied":
            block.close()
    block.close()
    return found


@pytest.mark.parametrize(
    "number", [pytest.param(one, marks=[] if one in SAMPLE else pytest.mark.exhaustive) for one in range(HISTORIES)]
)
def test_each_image_is_one_processs_or_refused_in_a_line(number, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    chance = random.Random(number)
    deeds, settings = history_of(chance), settings_of(chance)
    if "compiled_around" in deeds:
        torch.compiler.reset()  # which traces a function anew eight times, and then no more
    check(GUIDED[number % len(GUIDED)], deeds, settings, tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("vae", ["one", "tiled", "sharded"])
def test_inside_the_block_a_pipeline_has_all_its_parts(vae, tmp_path):
    """Whatever walks over them finds the VAE as well: what is saved is the same, and all is cast. None is refused."""
    found = check("flux", [ENTER, "saved", "cast", "image", LEAVE], {"vae": vae}, tmp_path)
    assert not any(isinstance(one, UserError) for one in found)


def check(name: str, deeds: list[str], settings: dict[str, Any], folder: Path) -> list[Any]:
    """Compare a history on two ranks with one process's. Returns what came of the deeds on the first rank."""
    pipe, arguments = guiding(name)
    expected = lived(History(pipe, arguments, folder / "plain"), deeds, None)

    def work(transport: Any) -> list[Any]:
        def enter(pipe: Any) -> Any:
            return parallelize(pipe, transport=transport, **settings)

        return lived(History(pipe, arguments, folder / str(transport.rank)), deeds, enter)

    of_ranks = run_ranks(2, work, timeout_s=600.0)  # the longest time that one compiles
    for of_rank in of_ranks:
        for at, (came, plain) in enumerate(zip(of_rank, expected, strict=True)):
            told = f"{name} {settings}: {' '.join(deeds[: at + 1])}: {came}"
            if isinstance(came, UserError):
                assert deeds[at] != "copied" or "is parallel and can be neither copied nor pickled" in str(came), told
            elif isinstance(plain, torch.Tensor):
                assert isinstance(came, torch.Tensor), told
                torch.testing.assert_close(came, plain, rtol=0, atol=1e-4, msg=lambda text, told=told: f"{told} {text}")
            else:
                assert came == plain, told
    return of_ranks[0]
