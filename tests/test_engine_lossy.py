"""V-Major, codecs and displacement in whole models: nothing stable is nothing changed, clean starts, what is reported,
what is kept and sent, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from exactness import STEPS, denoise
from on_ranks import Ran, on_ranks, refused
from test_engine_pipelines import inpainting, restored
from tiny_models import FAMILIES
from torch.utils._pytree import tree_map_only

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "size", "ring", "scorings"),
    [
        *(("qwen", *mesh) for mesh in ((4, 2, ("card",)), (6, 3, ("source",)), (3, 3, ("source",)))),
        *((*world, "auto", ("source", "card")) for world in (("sd3", 2), ("sd3", 12), ("flux", 3), ("flux2", 6))),
        *(("qwen", size, "auto", ("source", "card")) for size in (3, 6)),
    ],
)
def test_nothing_stable_is_nothing_changed(family, size, ring, scorings):
    make, inputs_of = FAMILIES[family]
    model, inputs = make(13), inputs_of(2, 6, 7, 5)

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)

        def steps(**settings: Any) -> torch.Tensor:
            with torch.no_grad(), parallelize(own, transport=transport, order="v_first", ring=ring, **settings):
                return denoise(own, inputs)

        exact, lossy = steps(), {"selection": "v_major", "steps": STEPS}
        for scoring in scorings:
            for settings in ({"sync_interval": 1}, {"schedule": "fixed", "ratio": 0.0}):
                assert torch.equal(steps(scoring=scoring, **lossy, **settings), exact), (settings, scoring)
            stale = steps(scoring=scoring, schedule="fixed", ratio=0.8, sync_interval=0, **lossy)
            assert torch.equal(stale[:1], exact[:1])
            assert torch.equal(stale[1:], exact[1:]) == (size == ring)  # Ring alone sends whole keys and values

    run_ranks(size, work)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("preset", "family"), [("cocodiff", "sd3"), ("cocodiff+", "qwen"), ("coded", "qwen"), ("coded-", "sd3")]
)
def test_no_image_leaves_a_ghost(preset, family):
    """An image of another size, prompt, guidance and number of steps in between changes nothing, keeps nothing of its
    second branch, and neither does one in whose middle all ranks stop; leaving frees all caches."""
    pipe, other = inpainting(family)
    pipes, engines = [copy.deepcopy(pipe) for _ in range(3)], list[Any]()
    arguments = other | ({"true_cfg_scale": 1.0} if family == "qwen" else {})
    of_tokens = [name for name in other if name.endswith(("prompt_embeds", "mask")) and "pooled" not in name]
    other |= {name: torch.cat([other[name]] * 2, 1) for name in of_tokens}

    def work(transport: Any, stopped: bool = False) -> torch.Tensor:
        own = pipes[transport.rank]
        with parallelize(own, preset, transport=transport) as engine:
            engines.append(engine)
            first = restored(own, arguments, steps=4)
            held = engine.sequence.strategy.codec.bytes_held()
            more = {"callback_on_step_end": lambda *_: 1 / 0} if stopped else {}
            restored(own, other, side=48, steps=3, seed=1, **more)
            assert torch.equal(restored(own, arguments, steps=4), first)
            assert engine.sequence.strategy.codec.bytes_held() == held > 0
        return first

    expected = run_ranks(3, work)
    with pytest.raises(ZeroDivisionError):
        run_ranks(3, lambda transport: work(transport, stopped=True))
    assert all(map(torch.equal, run_ranks(3, work), expected))
    assert [engine.sequence.strategy.codec.bytes_held() for engine in engines] == [0] * 9


def test_a_bare_model_must_be_told_the_steps():
    make, inputs_of = FAMILIES["sd3"]
    refused(r"how many steps run: parallelize\(\.\.\., steps=N\)", make(4), inputs_of(1, 4, 4, 3), preset="cocodiff+")


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_coded_and_displaced(family):
    """Alike on all ranks and close to exact; the first step is exact, with int2 in 8 bits; all steps on one rank."""
    make, inputs_of = FAMILIES[family]
    model, inputs = make(6), inputs_of(1, 6, 7, 5)

    def work(transport: Any) -> list[torch.Tensor]:
        own, outputs = copy.deepcopy(model), []
        for codec, arrival in (("none", "now"), ("int8", "now"), ("int2", "now"), ("none", "displaced")):
            settings = {"codec": codec, "predictor": "taylor", "arrival": arrival}
            with torch.no_grad(), parallelize(own, "split", transport=transport, **settings) as engine:
                outputs.append(denoise(own, inputs))
                lossy = (codec, arrival) != ("none", "now") and transport.size > 1
                assert (engine.sequence.strategy.codec.bytes_held() > 0) == lossy
            profile = engine.drift_profile()
            shares = [(row["coded_fraction"], row["linear_fraction"]) for row in profile]
            if codec != "none":
                first = (1, 0) if codec == "int2" else (0, None)
                assert shares == ([first, (1, 0), (1, 1), (1, 1)] if lossy else [])
            those = "qkvo" if arrival == "displaced" else ""
            assert [row["displaced_sets"] for row in profile] == ([{"": 1.0}, *[{those: 1.0}] * 3] if lossy else [])
            sent, late = (sum(engine.bytes(purpose).values()) for purpose in ("attention", "late"))
            assert late == (sent * 3 / 4 if those and lossy else 0)
        return outputs

    (alone,) = run_ranks(1, work)
    assert all(torch.equal(outputs, alone[0]) for outputs in alone)
    of_ranks = run_ranks(2, work)
    exact, fine, coarse, displaced = of_ranks[0]
    assert all(map(torch.equal, *of_ranks))
    assert torch.equal(exact[0], fine[0]) and torch.equal(exact[0], displaced[0])
    assert 0 < (coarse[0] - exact[0]).norm() / exact[0].norm() < 0.005
    assert not torch.equal(exact[1], displaced[1])
    far = [float((x[1:] - exact[1:]).norm() / exact[1:].norm()) for x in (fine, coarse)]
    assert 0 < far[0] < far[1] < 0.1 and far[0] < 0.005


STATES: dict[str, dict[str, Any]] = {
    "coded": {"predictor": "taylor"},
    "lossless": {},
    "displaced": {"preset": "split", "arrival": "displaced"},
    "cocodiff": {"steps": 4, "warmup": 1, "schedule": "fixed"},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("preset", STATES)
@pytest.mark.parametrize("family", FAMILIES)
def test_some_layers_keep_state_and_the_others_tensors_travel_whole(family, preset):
    """On every rank alike, in every image anew: by memory, by the profile, by what is sent; exact where that is."""
    make, inputs_of = FAMILIES[family]
    model, inputs = make(6).to(torch.bfloat16), inputs_of(1, 6, 7, 5)
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(torch.bfloat16) if x.is_floating_point() else x, inputs)

    def run(own: Any, engine: Any) -> tuple[list[torch.Tensor], int]:
        return [denoise(own, inputs) for _ in range(2)], engine.sequence.strategy.codec.bytes_held()

    def results(ran: Ran) -> Any:
        return *ran.found, ran.sent(), ran.sent("late"), ran.engine.drift_profile()

    settings = {"preset": preset, **STATES[preset]}
    of_ranks = [on_ranks(2, model, run=run, state_layers=layers, **settings) for layers in (None, 1, 99)]
    for rank in zip(*of_ranks, strict=True):
        (every, held, *sizes), (some, of_one, sent_some, late_some, profile_of_one), many = map(results, rank)
        sent, late, profile = sizes
        assert all(map(torch.equal, some, of_ranks[1][0].found[0])) and torch.equal(*some) and torch.equal(*every)
        assert many[1:] == (held, *sizes) and all(map(torch.equal, many[0], every))
        assert 0 < of_one < held and (late_some < late if late else sent < sent_some)
        if preset in ("coded", "lossless"):
            shares = [row["coded_fraction"] for row in profile_of_one]
            assert shares[-1] == of_one / held and profile[-1]["coded_fraction"] == 1
        if preset == "lossless":
            assert all(map(torch.equal, some, every))
