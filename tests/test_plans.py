"""Transformers that run by a plan: each class that has one gives what one process gives, and what no plan can do is
refused by name."""

import copy
import json
import re
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models import transformers
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from on_ranks import Call, check_alike, check_exact, on_ranks, outputs_of, refused
from planned_models import PLANNED, Planned, mask
from seams import choose_backend, plan_of_diffusers
from test_step_cache import moving
from tiny_models import FAMILIES
from torch.utils._pytree import tree_map
from toys.planned import PLAN, toy_inputs
from toys.planned import Planned as Toy
from value_tables import beside

from cocodiff import verify
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.engine.verification import SettingTrial, Verification
from cocodiff.models import families
from cocodiff.models.by_plan import PlanAdapter
from cocodiff.models.plan import Cut, Gather
from cocodiff.models.plans import OWN, PLANS, UNLESS, plan_of

pytestmark = [
    pytest.mark.usefixtures("one_thread_a_rank"),
    pytest.mark.filterwarnings("ignore:.* by a plan that nobody compared:UserWarning"),
]

MODES: dict[str, Call] = {
    "flat": {},
    "tapa": {},
    "split": {},
    "split, chunks": {"chunks": 2},
    "tapa, ring": {"ring": 2},
    "lossless": {},
}
UNCUT = beside(__file__)
PLAIN = [name for name in PLANNED if "," not in name]


def modes_of(size: int) -> dict[str, Call]:
    """A few, each tried with some number of ranks; all of them with twelve."""
    left_out = () if size == 12 else ("tapa, ring", "lossless") if size % 2 else ("flat", "tapa", "lossless")
    modes = {name: {"preset": name.partition(",")[0]} | given for name, given in MODES.items()}
    return {name: given for name, given in modes.items() if name not in left_out}


@pytest.mark.sample(13)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 3) for name in PLANNED),
        *((name, size) for name in PLAIN for size in (1, 4)),
        *(pytest.param(name, 12, marks=pytest.mark.exhaustive) for name in PLANNED),
    ],
)
def test_equals_one_process(name, size):
    case = PLANNED[name]
    check_exact(size, case.model(), [case.call()], modes_of(size), in_double=case.in_double)


def test_every_plan_is_tried():
    tried = {case.name for case in PLANNED.values()}
    assert {*PLANS, *OWN} == tried
    adapters = {family.class_name for family in families()}
    source = "".join(path.read_text() for path in Path(transformers.__file__).parent.glob("*.py"))
    classes = re.findall(r"^(?:class (\w+)|    (_cp_plan) = )", source, re.MULTILINE)
    with_plan = {name for (name, _), (_, has) in pairwise(classes) if has}
    assert len(with_plan) >= 9 and with_plan - adapters <= tried


# A plan of the user's own ---------------------------------------------------------------------------------------------


class Own(Toy):
    """A class that brings its plan."""

    _cp_plan = PLAN


def toy(**config: Any) -> Toy:
    torch.manual_seed(0)
    return Own(**config)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_a_plan_of_the_users_own(size, kv_heads):
    """Joint and cross attention, a mask over keys, grouped queries, a text of as many tokens as the image, and calls
    of changing form, which are followed anew; and a plan that does not name what its tokens are."""
    calls = [toy_inputs(mask, tokens) for tokens in (20, 26, 5, 20) for mask in (False, True)]
    model, call = toy(kv_heads=kv_heads), toy_inputs(True)
    check_exact(size, model, calls, {"tapa": {}})
    check_exact(size, model, [call], modes_of(12) | {"tapa, ring": {"ring": size}}, plan=PLAN)
    check_exact(size, model, [toy_inputs(True, 5)], {"tapa": {}}, plan=PLAN | {"": {name: Cut(1) for name in PLAN[""]}})


class Turned(torch.nn.Linear):
    """Returns channels before tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mT


@pytest.mark.parametrize("name", UNLESS)
def test_a_setting_for_which_a_plan_is_wrong_is_refused(name):
    setting, value, _ = UNLESS[name]
    kind = type(name, (), {"__module__": "diffusers.models", "config": SimpleNamespace()})
    setattr(kind.config, setting, json.loads(json.dumps(value)))
    with pytest.raises(UserError, match=f"{name} with {setting} {value} "):
        plan_of(kind())


@pytest.mark.parametrize("gather", [Gather(2), ContextParallelOutput(gather_dim=2, expected_dims=3)])
def test_tokens_are_gathered_where_a_plan_of_ours_or_of_diffusers_has_them(gather):
    model = toy()
    model.proj_out = Turned(24, 24)
    check_exact(3, model, [toy_inputs(True)], {"tapa": {}}, plan=PLAN | {"proj_out": gather})


def test_a_tensor_of_other_dimensions_than_diffusers_plan_has_stays_whole():
    expected = ContextParallelInput(split_dim=0, expected_dims=3, split_output=False)
    call = toy_inputs(True) | {"timestep": torch.tensor([0.5, 0.9])}
    check_exact(2, toy(), [call], {"tapa": {}}, plan=PLAN | {"": PLAN[""] | {"timestep": expected}})


@pytest.mark.parametrize("ring", [1, 3])
def test_keys_that_heads_share_travel_once(ring):
    def sent(kv_heads: int) -> int:
        return on_ranks(3, toy(kv_heads=kv_heads), toy_inputs(False), preset="flat", ring=ring)[0].sent()

    # Queries and output of six heads, keys and values of three; a ring sends keys and values alone.
    assert sent(3) == sent(6) * (3 / 4 if ring == 1 else 1 / 2)
    assert sent(2) == sent(6) * (1 if ring == 1 else 1 / 3)  # a rank for which no key is left gets them repeated


def with_text(name: str, tokens: int) -> Planned:
    """A case with a text of so many tokens, of which some are masked where the class has a mask."""
    case = PLANNED[name]
    more = {"encoder_hidden_states": torch.randn(2, tokens, 12, generator=torch.Generator().manual_seed(2))}
    if "encoder_attention_mask" in case.inputs:
        more["encoder_attention_mask"] = mask(tokens, tokens, 8)
    return case.variant(more)


@pytest.mark.parametrize("name", ["cogvideox", "hunyuan"])
def test_a_text_of_as_many_tokens_as_the_image(name):
    case, modes = with_text(name, 45), modes_of(3) | {name: {"preset": name} for name in ("v_first", "lossless")}
    check_exact(3, case.model(), [case.call()], modes)


def test_a_plan_that_nobody_compared_says_so_once():
    def warned(target: Any, **plan: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ranks(2, lambda t: parallelize(copy.deepcopy(target), transport=t, **plan).__enter__() and None)
        return [str(one.message) for one in caught if "plan" in str(one.message)]

    (line,) = warned(Toy(), plan=PLAN)
    assert line.startswith("Planned runs by a plan that nobody compared with one process: ")
    model = PLANNED["wan"].model()
    assert warned(model) == []
    assert len(warned(model, plan={**plan_of_diffusers(model), "blocks.0": Gather()})) == 1


TOKENS = {"hidden_states": Cut(1, 3), "text": Cut(1, 3), "mask": Cut(1)}
# Thirteen tokens of a text that every rank has and thirteen of the image's are not taken for twice the image's.
AS_HALF = toy_inputs(False, 26) | {"text": torch.randn(2, 13, 24), "mask": None}


@pytest.mark.parametrize(
    ("plan", "more", "words"),
    [
        (PLAN | {"blockz": Gather()}, {}, "^the plan cuts at 'blockz',.* Planned "),
        (PLAN | {"": TOKENS | {"texts": Cut()}}, {}, "^the plan cuts 'texts' of the transformer,"),
        (PLAN | {"cross.to_k": Gather()}, {}, r"^the plan gathers 'cross\.to_k 0',"),
        (PLAN | {"joint": Gather()}, {}, r"^the plan gathers 'joint 0',.* 16 .* 0\b"),
        (PLAN | {"": {"hidden_states": Cut(1)}}, {}, r"attends to 36 keys .*\(26 hidden_states\)"),
        (PLAN | {"": {"hidden_states": Cut(1)}}, AS_HALF, r"attends to 52 keys .*\(26 hidden_states\)"),
        (PLAN | {"": TOKENS | {"mask": Cut(1, 9)}}, {}, "has a mask of 18 keys and 16 keys on this rank: "),
        (PLAN | {"joint": [None, Gather()]}, {}, r"^the plan names output 1 of joint, .*\b1\b"),
        (PLAN | {"joint": [Cut()]}, {}, r"^the plan at 'joint' has a Cut: .*Gather"),
        (PLAN, {"kind": "causal"}, "joint attends causally"),
        (PLAN, {"kind": "added"}, r"^joint has a mask of torch\.float32,"),
        (PLAN, {"kind": "by query"}, "has a mask that differs between queries"),
        (PLAN, {"kind": "by head"}, "has a mask that differs between heads"),
        (PLAN, {"kind": "by hand"}, "^joint, Attention with Plain,.*scaled_dot_product_attention"),
    ],
)
def test_what_no_plan_can_do_is_refused(plan, more, words):
    model, call = Toy(), toy_inputs(True) | more
    outputs_of(model, call)
    refused(words, model, call, plan=plan)


@pytest.mark.parametrize(("name", "step", "argument", "words"), UNCUT)
def test_an_argument_for_all_tokens_that_the_plan_does_not_cut_is_named(name, step, argument, words):
    case = PLANNED[name]
    plan = PLANS[case.name]
    kept = {of: cut for of, cut in plan[step].items() if of != argument}
    with pytest.raises(RuntimeError, match=rf"^the plan does not cut {words}.* \d+ .*\(.*\): "):
        on_ranks(2, case.model(), case.call(), plan={**plan, step: kept})


@pytest.mark.parametrize("where", ["before", "inside", "torch"])
def test_another_attention_backend_is_refused(where, monkeypatch):
    """Also one that is chosen inside the block, for one layer or for all models."""
    model, call, function = PLANNED["wan"].model(), PLANNED["wan"].call(), "scaled_dot_product_attention"

    def run(own: Any, _: Any) -> None:
        own(**call)
        if where == "torch":
            monkeypatch.setattr(torch.nn.functional, function, lambda query, *_, **more: query)
        else:
            choose_backend(own.blocks[1].attn1.processor, "flash")
        own(**call)

    if where == "before":
        choose_backend(model.blocks[1].attn1.processor, "flash")
    words = "attends to a shard by other means" if where == "torch" else "uses .* backend flash,.*reset_attention_back"
    refused(rf"attn[12],? .*{words}", model, run=run)


def test_a_call_that_fails_in_attention_leaves_nothing_for_the_next():
    """Neither the first one, which is followed, nor a later one."""
    model, calls = PLANNED["wan"].model(), [PLANNED["wan"].call()]
    plain = outputs_of(model, *calls)

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            hook = own.blocks[1].attn1.to_out[0].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                outputs_of(own, *calls)
            hook.remove()
            ones = torch.ones(1, 1, 2, 2)
            assert torch.equal(torch.nn.functional.scaled_dot_product_attention(ones, ones, ones), ones)
            engine.new_run()
            found += outputs_of(own, *calls)
        return found

    check_alike(on_ranks(2, model, run=run), plain * 2)


AMPLIFIED = PLANNED["helios"].variant({}, is_amplify_history=True)


def test_a_model_that_its_plan_does_not_fit_and_v_major_are_refused():
    words = "HeliosTransformer3DModel with is_amplify_history True has no parallel form"
    refused(words, AMPLIFIED.model(), AMPLIFIED.call())
    refused(r"^selection v_major keeps tokens .* WanTransformer3DModel ", PLANNED["wan"].model(), preset="cocodiff")


# verify ---------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_verify_catches_the_plan_that_diffusers_has_for_ltx_2():
    case = PLANNED["ltx-2"]
    model = case.model()
    found = verify(model, case.call(), ranks=[2], plan=plan_of_diffusers(model))
    assert {trial.outcome for trial in found.trials} == {"failed", "refused"} and found.exit_code == 1
    assert [trial.setting for trial in found.trials if trial.outcome == "refused"] == ["tapa, cached"]
    assert verify(model, case.call(), ranks=[2]).ok


def test_verify_catches_what_is_silently_wrong():
    model, call = AMPLIFIED.model(), AMPLIFIED.call()
    found = verify(model, call, ranks=[2], plan=PLANS["HeliosTransformer3DModel"])
    assert {trial.outcome for trial in found.trials} == {"wrong"} and found.exit_code == 1
    assert str(found).endswith("not exact: do not use it")
    without = verify(model, call, ranks=[2])
    assert {trial.outcome for trial in without.trials} == {"refused"} and without.exit_code == 2


def test_verify_says_where_only_what_is_around_blocks_is_wrong():
    found = Verification(
        "Toy", 2, 0.0, (SettingTrial(2, "flat", "exact", 0.0, True), SettingTrial(2, "tapa, compiled", "wrong"))
    )
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


def six_calls(case: Planned) -> list[Call]:
    """Three steps with two branches of guidance."""
    text = "cap_feats" if "cap_feats" in case.inputs else "encoder_hidden_states"
    return [
        call | {text: tree_map(lambda x, scale=scale: x * scale, call[text])}
        for call in moving(case.call(), (0.0,) * 3)
        for scale in (1.0, 0.5)
    ]


SOME = ("wan", "hunyuan 1.5", "z-image")
MOST = [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLAIN]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MOST)
def test_what_the_table_says_of_codec_displacement_and_guidance(name):
    """Each does something, all ranks end with the same bits, and what is lossy is close to what one process gives."""
    model, calls = PLANNED[name].model(), six_calls(PLANNED[name])
    plain = outputs_of(model, *calls)
    for column, size in [(of, size) for of, sizes in WORLDS.items() for size in sizes]:
        near = max(float(x.abs().max()) for x in plain) * (0.02 if column != "guidance" else 1e-5)
        first = check_alike(on_ranks(size, model, *calls, steps=3, **LOSSY[column]), plain, near)
        assert column != "guidance" or first.sent("guidance") > 0
        assert column != "codec" or first.sent() < first.sent("whole")


@pytest.mark.parametrize("name", MOST)
def test_what_the_table_says_of_caches(name):
    """All but the first of each branch's calls are cached, and all ranks end with one process's values."""
    model, calls = PLANNED[name].model(), six_calls(PLANNED[name])
    settings = {"step_cache": "first_block", "step_cache_threshold": 1e30}
    if PLANNED[name].name in WITHOUT_CACHE:
        refused(r"step_cache first_block: .* has blocks that return several tensors", model, *calls, **settings)
        return
    one, *others = (ran for size in (1, 2) for ran in on_ranks(size, model, *calls, **settings))
    check_alike(others, one.found, rtol=1e-4)
    assert all(ran.cached() == [0, 1, 1] for ran in (one, *others))


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
