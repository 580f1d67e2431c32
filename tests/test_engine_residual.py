"""The residual codec in whole models: every family, one rank, what a run's noise levels are, what is refused."""

import copy
from typing import Any

import pytest
import torch
from test_engine_v_major import denoise
from tiny_models import FAMILIES
from torch.utils._pytree import tree_map_only

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_coded_and_displaced(family):
    """Alike on all ranks and close to exact; the first step is exact, with int2 in 8 bits; all steps on one rank."""
    make, inputs_of = FAMILIES[family]
    model, inputs = make(6), inputs_of(1, 6, 7, 5)

    def work(transport: Any) -> list[torch.Tensor]:
        own, outputs = copy.deepcopy(model), []
        with torch.no_grad():
            for codec, arrival in (("none", "now"), ("int8", "now"), ("int2", "now"), ("none", "displaced")):
                settings = {"codec": codec, "predictor": "taylor", "arrival": arrival}
                with parallelize(own, "split", transport=transport, **settings) as engine:
                    outputs.append(denoise(own, inputs))
                    lossy = (codec, arrival) != ("none", "now") and transport.size > 1
                    assert (engine.sequence.strategy.codec.bytes_held() > 0) == lossy
                profile = engine.drift_profile()
                shares = [(row["coded_fraction"], row["linear_fraction"]) for row in profile]
                if codec != "none":
                    first = (1, 0) if codec == "int2" else (0, None)
                    assert shares == ([first, (1, 0), (1, 1), (1, 1)] if lossy else [])
                sets = [row["displaced_sets"] for row in profile]
                those = "qkvo" if arrival == "displaced" else ""
                assert sets == ([{"": 1.0}, *[{those: 1.0}] * 3] if lossy else [])
                sent, late = (sum(engine.bytes(purpose).values()) for purpose in ("attention", "late"))
                assert late == (sent * 3 / 4 if those and lossy else 0)
        return outputs

    (alone,) = run_ranks(1, work)
    assert all(torch.equal(outputs, alone[0]) for outputs in alone)
    of_ranks = run_ranks(2, work)
    exact, fine, coarse, displaced = of_ranks[0]
    for other in of_ranks[1:]:
        assert all(torch.equal(one, two) for one, two in zip(of_ranks[0], other, strict=True))
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

    def work(transport: Any) -> list[Any]:
        own, found = copy.deepcopy(model), []
        settings = {"preset": preset, **STATES[preset]}
        with torch.no_grad():
            for layers in (None, 1, 99):
                with parallelize(own, transport=transport, state_layers=layers, **settings) as engine:
                    outputs = [denoise(own, inputs) for _ in range(2)]
                    held = engine.sequence.strategy.codec.bytes_held()
                sent = [sum(engine.bytes(purpose).values()) for purpose in ("attention", "late")]
                found.append((outputs, held, *sent, engine.drift_profile()))
        return found

    of_ranks = run_ranks(2, work)
    for rank in of_ranks:
        (every, held, sent, late, profile), (some, of_one, sent_some, late_some, profile_of_one), many = rank
        assert all(map(torch.equal, some, of_ranks[0][1][0])) and torch.equal(*some) and torch.equal(*every)
        assert many[1:] == (held, sent, late, profile) and all(map(torch.equal, many[0], every))
        assert 0 < of_one < held and (late_some < late if late else sent < sent_some)
        if preset in ("coded", "lossless"):
            shares = [row["coded_fraction"] for row in profile_of_one]
            assert shares[-1] == of_one / held and profile[-1]["coded_fraction"] == 1
        if preset == "lossless":
            assert all(map(torch.equal, some, every))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selection": "v_major"}, "codec int4 .* selection v_major .*: choose codec none or selection full"),
        ({"codec": "none", "arrival": "adaptive", "selection": "v_major"}, "arrival adaptive .* choose arrival now"),
        ({"tau": 0}, "tau is 0: give a number above 0"),
        ({"codec": "int3"}, "unknown codec 'int3'.*none, lossless, int8, int4, int2"),
        ({"predictor": "tailor"}, "did you mean taylor"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(UserError, match=message):
        Config.preset("coded", **settings)
