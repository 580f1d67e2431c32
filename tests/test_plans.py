"""Transformers that run by a plan: each class that has one gives what one process gives, and what no plan can do is
refused by name."""

import copy
import re
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models import transformers
from planned_models import PLANNED, Planned
from tiny_models import FAMILIES
from toys.planned import PLAN, toy_inputs
from toys.planned import Planned as Toy

from cocodiff import verify
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.agreement import tensors_in
from cocodiff.engine.engine import parallelize
from cocodiff.engine.verification import BEYOND_ROUNDING, TorchFunctions, Trial, Verification, exact_settings
from cocodiff.engine.verification import in_opposite_order as keys_in_opposite_order
from cocodiff.models import families
from cocodiff.models.by_plan import PlanAdapter
from cocodiff.models.plan import Cut, Gather
from cocodiff.models.plans import OWN, PLANS

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

SETTINGS = {"flat": {}, "tapa": {}, "split": {}, "tapa, ring": {"ring": 2}, "split, chunks": {"chunks": 2}}
ODD, EVEN = [*SETTINGS][:3] + [*SETTINGS][4:], [*SETTINGS][3:]  # of odd and of even numbers of ranks, each tried once


def outputs_of(model: Any, call: dict[str, Any]) -> list[torch.Tensor]:
    return list(tensors_in(model(**call)))


def snapshot(model: torch.nn.Module) -> list[tuple]:
    return [
        (name, type(m), id(getattr(m, "processor", 0)), len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m)))
        for name, m in model.named_modules()
    ]


def check_equals_one_process(case: Planned, size: int, names: Sequence[str] = ()) -> None:
    """The error is at most twice that of one process, against the same weights in float64, plus rounding. A class that
    rounds to bfloat16 or float32 by itself is compared with one process instead, as `verify` does: by eight times what
    its own output changes by where attention takes its keys in the opposite order."""
    model, call, names = case.model(), case.call(), names or (ODD if size % 2 else EVEN)
    with torch.no_grad():
        plain = outputs_of(model, call)
        if case.in_double:
            truth = outputs_of(copy.deepcopy(model).double(), case.call(torch.float64))
        else:
            truth = [x.double() for x in plain]
            with TorchFunctions(keys_in_opposite_order):
                other = outputs_of(model, call)

    def work(transport: Any) -> list[list[torch.Tensor]]:
        own, found = copy.deepcopy(model), []
        before = snapshot(own)
        for name in names:
            settings = {"transport": transport, **SETTINGS[name]}
            with torch.no_grad(), parallelize(own, name.partition(",")[0], **settings) as engine:
                found.append(outputs_of(own, call))
                assert (sum(engine.bytes().values()) > 0) == (size > 1)
                if name == names[-1]:  # the first call is followed, the second is not
                    assert all(map(torch.equal, outputs_of(own, call), found[-1]))
        assert snapshot(own) == before
        with torch.no_grad():
            assert all(map(torch.equal, outputs_of(own, call), plain))
        return found

    of_ranks = run_ranks(size, work)
    for number, x in enumerate(truth):
        rounding = torch.finfo(torch.float32).eps * float(x.abs().max())
        if case.in_double:
            allowed = 2 * float((plain[number].double() - x).abs().max()) + rounding
        else:
            allowed = BEYOND_ROUNDING * float((other[number].double() - x).abs().max()) + rounding
        for outputs in of_ranks:
            for setting, own in enumerate(outputs):
                assert torch.equal(own[number], of_ranks[0][setting][number])
                error = float((own[number].double() - x).abs().max())
                assert error <= allowed, f"{names[setting]}: error {error:.2e}, {allowed:.2e} allowed"
        if names[:2] == ["flat", "tapa"]:
            assert torch.equal(of_ranks[0][0][number], of_ranks[0][1][number])


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PLANNED)
def test_equals_one_process_on_three_ranks(name):
    check_equals_one_process(PLANNED[name], 3)


@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", [name for name in PLANNED if "," not in name])
def test_equals_one_process(name, size):
    check_equals_one_process(PLANNED[name], size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANNED)
def test_equals_one_process_on_twelve_ranks(name):
    check_equals_one_process(PLANNED[name], 12, [*SETTINGS])


def test_every_plan_is_tried():
    tried = {case.name for case in PLANNED.values()}
    assert {*PLANS, *OWN} == tried
    adapters = {family.class_name for family in families()}
    source = "".join(path.read_text() for path in Path(transformers.__file__).parent.glob("*.py"))
    classes = re.findall(r"^(?:class (\w+)|    (_cp_plan) = )", source, re.MULTILINE)
    with_plan = {name for (name, _), (_, has) in pairwise(classes) if has}
    assert len(with_plan) >= 9 and with_plan - adapters <= tried


# A plan of the user's own ---------------------------------------------------------------------------------------------


def on_two_ranks(model: Any, call: dict[str, Any], size: int = 2, **settings: Any) -> torch.Tensor:
    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, **settings):
            return own(**call)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_ranks(size, work)[0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_a_plan_of_the_users_own(size, mask, kv_heads):
    """Joint and cross attention, a mask over keys, and grouped queries."""
    torch.manual_seed(0)
    model, call = Toy(kv_heads=kv_heads), toy_inputs(mask)
    with torch.no_grad():
        expected = model(**call)
    for preset in ("flat", "tapa", "split", "lossless"):
        torch.testing.assert_close(on_two_ranks(model, call, size, plan=PLAN, preset=preset), expected)
    for more in ({"ring": size}, {"chunks": 2}):
        torch.testing.assert_close(on_two_ranks(model, call, size, plan=PLAN, **more), expected)


@pytest.mark.parametrize("ring", [1, 3])
def test_keys_that_heads_share_travel_once(ring):
    def sent(kv_heads: int) -> int:
        model = Toy(kv_heads=kv_heads)

        def work(transport: Any) -> int:
            own = copy.deepcopy(model)
            with torch.no_grad(), parallelize(own, "flat", transport=transport, plan=PLAN, ring=ring) as engine:
                own(**toy_inputs(False))
                return sum(engine.bytes().values())

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_ranks(3, work)[0]

    # Queries and output of six heads, keys and values of three; a ring sends keys and values alone.
    assert sent(3) == sent(6) * (3 / 4 if ring == 1 else 1 / 2)
    assert sent(2) == sent(6) * (1 if ring == 1 else 1 / 3)  # a rank for which no key is left gets them repeated


CHROMA = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 6}
CHROMA |= {"joint_attention_dim": 16, "axes_dims_rope": (2, 2, 4), "approximator_num_channels": 16}
CHROMA |= {"approximator_hidden_dim": 16, "approximator_layers": 1}
OF_CHROMA = {"hidden_states": Cut(1), "encoder_hidden_states": Cut(1), "img_ids": Cut(0), "txt_ids": Cut(0)}


def chroma(tokens: int) -> Planned:
    call = {"hidden_states": torch.randn(1, tokens, 4), "encoder_hidden_states": torch.randn(1, tokens, 16)}
    call |= {"img_ids": torch.randint(0, 6, (tokens, 3)), "txt_ids": torch.zeros(tokens, 3)}
    return Planned("ChromaTransformer2DModel", CHROMA, lambda _: call | {"timestep": torch.tensor([0.5])})


def with_text(name: str, tokens: int) -> Planned:
    """A case with a text of so many tokens, of which some are masked where the class has a mask."""
    case = PLANNED[name]
    more = {"encoder_hidden_states": torch.randn(2, tokens, 12, generator=torch.Generator().manual_seed(2))}
    if "encoder_attention_mask" in case.call():
        more["encoder_attention_mask"] = (torch.arange(tokens) < torch.tensor([[tokens], [8]])).long()
    return case._replace(inputs=lambda g: case.inputs(g) | more)


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        (with_text("cogvideox", 45), None),
        (with_text("hunyuan", 45), None),
        (chroma(30), {"": OF_CHROMA, "proj_out": Gather(1)}),
    ],
    ids=["cogvideox", "hunyuan", "chroma"],
)
def test_a_text_of_as_many_tokens_as_the_image(case, plan):
    found = verify(case.model(), case.call(), plan=plan, ranks=[3])
    exact = {trial.setting for trial in found.trials if trial.outcome == "exact"}
    assert found.ok and {"flat", "tapa", "v_first", "split", "lossless", "split, chunks 2"} <= exact, str(found)


@pytest.mark.parametrize("size", [2, 3])
def test_a_masked_text_of_as_many_tokens_as_the_image(size):
    torch.manual_seed(0)
    model, call = Toy(), toy_inputs(True, 5)
    with torch.no_grad():
        expected = model(**call)
    torch.testing.assert_close(on_two_ranks(model, call, size, plan=PLAN), expected)


def test_a_text_that_every_rank_has_is_no_image_of_as_many_tokens():
    """Thirteen of its tokens and thirteen of the image's are not taken for twice the image's."""
    call = toy_inputs(False, 26) | {"text": torch.randn(2, 13, 24)}
    with pytest.raises(UserError, match="attends to 52 keys on all ranks together, which are not tokens that the plan"):
        on_two_ranks(Toy(), call, plan=PLAN | {"": {"hidden_states": Cut(1)}})


def test_a_class_may_bring_its_plan():
    class Own(Toy):
        _cp_plan = PLAN

    torch.manual_seed(0)
    model, call = Own(), toy_inputs(True)
    with torch.no_grad():
        torch.testing.assert_close(on_two_ranks(model, call), model(**call))


def test_a_plan_that_nobody_compared_says_so_once():
    def warned(target: Any, **plan: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ranks(2, lambda t: parallelize(copy.deepcopy(target), transport=t, **plan).__enter__() and None)
        return [str(one.message) for one in caught if "plan" in str(one.message)]

    (line,) = warned(Toy(), plan=PLAN)
    assert line == "Planned runs by a plan that nobody compared with one process: cocodiff verify does"
    model = PLANNED["wan"].model()
    assert warned(model) == []
    assert len(warned(model, plan={name: model._cp_plan[name] for name in ("rope", "blocks.0", "proj_out")})) == 1


TOKENS = {"hidden_states": Cut(1, 3), "text": Cut(1, 3), "mask": Cut(1)}


@pytest.mark.parametrize(
    ("plan", "more", "words"),
    [
        (PLAN | {"blockz": Gather()}, {}, "the plan cuts at 'blockz', which Planned has not"),
        (PLAN | {"": TOKENS | {"texts": Cut()}}, {}, "the plan cuts 'texts' of the transformer, which takes none such"),
        (PLAN | {"cross.to_k": Gather()}, {}, "the plan gathers 'cross.to_k 0', whose tokens were not cut"),
        (PLAN | {"joint": Gather()}, {}, "the plan gathers 'joint 0', which has 16 tokens on rank 0"),
        (PLAN | {"": {"hidden_states": Cut(1)}}, {}, "attends to 36 keys on all ranks together, which are not tokens"),
        (PLAN | {"": TOKENS | {"mask": Cut(1, 9)}}, {}, "has a mask of 18 keys and 16 keys on this rank: cut it"),
        (PLAN | {"joint": [Cut()]}, {}, "the plan at 'joint' has a Cut: give Cut or Gather, or a dictionary"),
        (PLAN, {"kind": "causal"}, "joint attends causally, which has no parallel form here"),
        (PLAN, {"kind": "added"}, "has a mask of torch.float32, which adds to scores"),
        (PLAN, {"kind": "by query"}, "has a mask that differs between queries"),
        (PLAN, {"kind": "by head"}, "has a mask that differs between heads"),
        (PLAN, {"kind": "by hand"}, "joint, Attention with Plain, attends to a shard by other means than torch's"),
    ],
)
def test_what_no_plan_can_do_is_refused(plan, more, words):
    model, call = Toy(), toy_inputs(True) | more
    with torch.no_grad():
        model(**call)
    with pytest.raises(UserError, match=words):
        on_two_ranks(model, call, plan=plan)


@pytest.mark.parametrize(
    ("name", "step", "argument", "words"),
    [
        ("wan vace", "vace_blocks.0", "control_hidden_states", r"control_hidden_states \[1, 6, 3, 6, 10\]"),
        ("z-image, controlnet", "", "controlnet_block_samples", r"controlnet_block_samples \[2, 96, 240\]"),
        ("ltx-2, keyframes", "", "video_keyframes_mask", r"video_keyframes_mask \[1, 45, 1\]"),
        (
            "cosmos, controlnet",
            "transformer_blocks.*",
            "controlnet_residual",
            r"block_controlnet_hidden_states \[1, 45,",
        ),
    ],
)
def test_an_argument_for_all_tokens_that_the_plan_does_not_cut_is_named(name, step, argument, words):
    case = PLANNED[name]
    plan = PLANS[case.name]
    kept = {of: cut for of, cut in plan[step].items() if of != argument}
    with pytest.raises(
        RuntimeError, match=rf"^the plan does not cut {words}.*which may be .*: cut it in the plan, or run"
    ):
        on_two_ranks(case.model(), case.call(), plan={**plan, step: kept})


def test_a_backend_that_is_chosen_inside_the_block_is_refused():
    case = PLANNED["wan"]
    model = case.model()

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport):
            own(**case.call())
            own.blocks[1].attn1.processor._attention_backend = "flash"
            own(**case.call())

    with pytest.raises(UserError, match=r"blocks\.1\.attn1 uses the attention backend flash, which ranks do not"):
        run_ranks(2, work)


def test_another_attention_backend_is_refused():
    model = PLANNED["wan"].model()
    model.blocks[1].attn1.processor._attention_backend = "flash"
    with pytest.raises(UserError, match=r"blocks\.1\.attn1 uses the attention backend flash, which ranks do not"):
        on_two_ranks(model, PLANNED["wan"].call())


def test_a_model_that_its_plan_does_not_fit_is_refused():
    case = PLANNED["helios"]
    model = case._replace(config=case.config | {"is_amplify_history": True}).model()
    with pytest.raises(UserError, match="HeliosTransformer3DModel with is_amplify_history True has no parallel form"):
        on_two_ranks(model, case.call())


def test_calls_of_changing_shape_are_followed_anew():
    torch.manual_seed(0)
    model = Toy()
    calls = [toy_inputs(mask, tokens) for tokens in (20, 26, 20) for mask in (False, True)]
    with torch.no_grad():
        expected = [model(**call) for call in calls]

    def work(transport: Any) -> list[torch.Tensor]:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, plan=PLAN):
            return [own(**call) for call in calls]

    for output, wanted in zip(run_ranks(3, work)[0], expected, strict=True):
        torch.testing.assert_close(output, wanted)


# verify ---------------------------------------------------------------------------------------------------------------


def test_verify_tries_every_exact_setting():
    case = PLANNED["wan"]
    found = verify(case.model(), case.call(), ranks=[2])
    assert [trial.setting for trial in found.trials] == [*exact_settings(), "tapa, cached", "tapa, compiled"]
    assert {trial.outcome for trial in found.trials} == {"exact"} and found.ok and found.exit_code == 0
    assert {"flat", "tapa", "v_first", "split", "lossless"} < set(exact_settings())
    assert "2  tapa, ring 2     exact" in str(found) and str(found).endswith("WanTransformer3DModel: exact")


@pytest.mark.full
def test_verify_catches_the_plan_that_diffusers_has_for_ltx_2():
    case = PLANNED["ltx-2"]
    model = case.model()
    found = verify(model, case.call(), ranks=[2], plan=type(model)._cp_plan)
    assert {trial.outcome for trial in found.trials} == {"failed", "refused"} and found.exit_code == 1
    assert [trial.setting for trial in found.trials if trial.outcome == "refused"] == ["tapa, cached"]
    assert verify(model, case.call(), ranks=[2]).ok


def test_verify_catches_what_is_silently_wrong():
    case = PLANNED["helios"]
    model = case._replace(config=case.config | {"is_amplify_history": True}).model()
    found = verify(model, case.call(), ranks=[2], plan=PLANS["HeliosTransformer3DModel"])
    assert {trial.outcome for trial in found.trials} == {"wrong"} and found.exit_code == 1
    assert str(found).endswith("not exact: do not use it")
    refused = verify(model, case.call(), ranks=[2])
    assert {trial.outcome for trial in refused.trials} == {"refused"} and refused.exit_code == 2


def test_verify_says_where_only_what_is_around_blocks_is_wrong():
    found = Verification("Toy", 2, 0.0, (Trial(2, "flat", "exact", 0.0, True), Trial(2, "tapa, compiled", "wrong")))
    assert found.exit_code == 1 and str(found).endswith("Toy: exact, but not with tapa, compiled")


# The pages ------------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
LOSSY = {"codec": {"preset": "coded"}, "displaced": {"preset": "ahead"}, "guidance": {"guidance_parallel": 2}}
# Their blocks return several tensors, and diffusers' caches do not know which of them is the image.
WITHOUT_CACHE = ("HunyuanVideo15Transformer3DModel", "LTX2VideoTransformer3DModel")
WORLDS = {"codec": (4,), "displaced": (4,), "guidance": (2, 4)}


def test_the_page_tells_how_a_plan_is_written(capsys):
    (code,) = re.findall(r"```python\n(import torch.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    assert "plan = {" in code and len(code.splitlines()) <= 22
    exec(compile(code, "new-model.md", "exec"), {})
    assert capsys.readouterr().out.endswith("ChromaTransformer2DModel: exact\n")


def rows_of_the_page() -> dict[str, dict[str, str]]:
    page, _, _ = (ROOT / "docs/models.md").read_text().partition("\n## ")  # its first table
    lines = [line.strip("|").split("|") for line in page.splitlines() if line[:1] == "|"]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}


def test_the_table_of_models_has_every_class():
    rows = rows_of_the_page()
    adapters = {family.class_name for family in families() if not isinstance(family.adapter, PlanAdapter)}
    assert set(rows) == adapters | {*PLANS, *OWN}
    latte = rows.pop("LatteTransformer3DModel")  # of which test_latte.py tries what its row says
    assert latte["by"].startswith("a family: transposes")
    assert {latte[of] for of in ("V-First, V-Major", "displaced, compile", "caches")} == {"no"}
    for name, row in rows.items():
        assert row["by"].partition(":")[0] == ("a family" if name in adapters else "a plan")
        assert row["V-First, V-Major"] == ("yes" if name in adapters else "no")
        assert name in adapters or row["by"].startswith("a plan: ours" if name in PLANS else "a plan: diffusers'")
        assert row["displaced, compile"] == "yes"
        assert row["caches"] == ("no" if name in WITHOUT_CACHE else "yes")


def six_calls(case: Planned) -> list[dict[str, Any]]:
    """Three steps with two branches of guidance."""
    calls = []
    for step in range(3):
        for scale in (1.0, 0.5):
            call = case.call()
            time, text = (
                ("t" if "t" in call else "timestep"),
                ("cap_feats" if "cap_feats" in call else "encoder_hidden_states"),
            )
            call[time] = (call[time] * (1 - step / 4)).to(call[time].dtype)
            call[text] = [x * scale for x in call[text]] if isinstance(call[text], list) else call[text] * scale
            calls.append(call)
    return calls


SOME = ("wan", "hunyuan 1.5", "z-image")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLANNED if "," not in name],
)
def test_what_the_table_says_of_codec_displacement_and_guidance(name):
    """Each does something, all ranks end with the same bits, and what is lossy is close to what one process gives."""
    model, calls = PLANNED[name].model(), six_calls(PLANNED[name])
    with torch.no_grad():
        plain = [x for call in calls for x in outputs_of(model, copy.deepcopy(call))]

    def work(transport: Any, settings: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, int]]:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, steps=3, **settings) as engine:
            found = [x + 0 for call in calls for x in outputs_of(own, copy.deepcopy(call))]
            return found, {of: sum(engine.bytes(of).values()) for of in ("attention", "whole", "guidance")}

    for column, size in [(of, size) for of, sizes in WORLDS.items() for size in sizes]:
        of_ranks = run_ranks(size, lambda t, of=column: work(t, LOSSY[of]))
        outputs, sent = of_ranks[0]
        assert all(torch.equal(x, y) for own, _ in of_ranks for x, y in zip(own, outputs, strict=True))
        error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(outputs, plain, strict=True))
        assert error < (0.02 if column != "guidance" else 1e-5)
        assert sent["guidance"] > 0 if column == "guidance" else sent["attention"] < sent["whole"] or column != "codec"


@pytest.mark.parametrize(
    "name",
    [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLANNED if "," not in name],
)
def test_what_the_table_says_of_caches(name):
    """All but the first of each branch's calls are cached, and all ranks end with one process's values."""
    model, calls = PLANNED[name].model(), six_calls(PLANNED[name])

    def work(transport: Any) -> list[torch.Tensor]:
        own = copy.deepcopy(model)
        settings = {"step_cache": "first_block", "step_cache_threshold": 1e30}
        with torch.no_grad(), parallelize(own, transport=transport, **settings) as engine:
            found = [x + 0 for call in calls for x in outputs_of(own, copy.deepcopy(call))]
        assert [row["cached_fraction"] for row in engine.drift_profile()] == [0, 1, 1]
        return found

    if PLANNED[name].name in WITHOUT_CACHE:
        with pytest.raises(UserError, match=r"step_cache first_block: .* diffusers does not tell which is the image"):
            run_ranks(2, work)
        return
    (one,) = run_ranks(1, work)
    for own in run_ranks(2, work):
        for x, y in zip(own, one, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        name if name in (*SOME, "flux") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in (*PLANNED, *FAMILIES)
    ],
)
def test_what_the_table_says_of_compiled_blocks_and_caches_verify_finds(name):
    if name in FAMILIES:
        model, call = FAMILIES[name][0](6), FAMILIES[name][1](1, 4, 5, 6)
    else:
        model, call = PLANNED[name].model(), PLANNED[name].call()
    row = rows_of_the_page()[type(model).__name__]
    *_, cached, compiled = verify(model, call, ranks=[2]).trials
    assert row["displaced, compile"] == "yes" and (compiled.outcome, compiled.alike) == ("exact", True)
    assert re.match(r"compiled [1-9].* 0 graph breaks beside those at attention", compiled.reason)
    if row["caches"] == "no":
        assert cached.outcome == "refused" and "diffusers does not tell which is the image" in cached.reason
    else:
        assert (cached.outcome, cached.alike) == ("exact", True) and cached.reason.startswith("100% of the second step")


def test_v_major_is_refused():
    with pytest.raises(UserError, match="the plan of WanTransformer3DModel does not say which these are"):
        on_two_ranks(PLANNED["wan"].model(), PLANNED["wan"].call(), preset="cocodiff")
