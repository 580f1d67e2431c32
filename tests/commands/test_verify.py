"""`cocodiff verify`: a table, and an exit code for scripts."""

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned_models import PLANNED
from tiny_pipelines import TEXT_WIDTH, sd3_pipeline, wan_pipeline

import cocodiff
from cocodiff.cli.main import main
from cocodiff.cli.verify import load
from cocodiff.config.errors import UserError
from cocodiff.engine import verification
from cocodiff.engine.verification import SettingTrial, Verification, exact_settings, recorded_calls

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture
def cogvideox(tmp_path: Any) -> tuple[str, str]:
    """The folder of a transformer in bfloat16, and the file of a call's arguments in float32."""
    PLANNED["cogvideox"].model().bfloat16().save_pretrained(tmp_path / "model")
    torch.save(PLANNED["cogvideox"].call(), tmp_path / "call.pt")
    return str(tmp_path / "model"), str(tmp_path / "call.pt")


def verified(model: str, inputs: str) -> int:
    return main(["verify", "--model", model, "--inputs", inputs, "--ranks", "2"])


def test_a_transformer_with_the_arguments_of_a_call_which_is_made_in_its_dtype(cogvideox, capsys):
    assert verified(*cogvideox) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("CogVideoXTransformer3DModel: 2 calls, against one process; rounding explains ")
    assert shown[1].split() == ["ranks", "setting", "outcome", "error", "same", "bits", "why"]
    settings = [*exact_settings(), "tapa, cached", "tapa, compiled"]
    assert {"flat", "tapa", "v_first", "split", "lossless", "tapa, ring 2"} <= {*settings}
    for line, setting in zip(shown[2:-1], settings, strict=True):
        assert re.match(rf" *2  {setting} +exact ", line)
    assert shown[-1] == "CogVideoXTransformer3DModel: exact"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_is_loaded_in_the_dtype_in_which_it_is_stored(tmp_path, dtype):
    """Not in float32, which is another model than users run, of twice the size."""
    PLANNED["cogvideox"].model().to(dtype).save_pretrained(tmp_path / "alone")
    assert load(str(tmp_path / "alone")).dtype == dtype
    pipe = sd3_pipeline()
    pipe.transformer.to(dtype)
    pipe.save_pretrained(tmp_path / "pipeline")
    found = load(str(tmp_path / "pipeline"))
    assert found.transformer.dtype == found.vae.dtype == dtype


def test_every_option_comes_to_the_verification(monkeypatch):
    told: list[Any] = []
    found = SimpleNamespace(exit_code=1)
    monkeypatch.setattr(verification, "verify", lambda *given, **how: told.append((*given, how)) or found)
    monkeypatch.setattr("cocodiff.cli.verify.load", lambda model: f"the pipeline {model}")
    words = "--model m --ranks 3 5 --compile --steps 7 --height 32 --width 48 --frames 9 --prompt teeth"
    assert main(["verify", *words.split()]) == 1
    call = {"prompt": "teeth", "num_inference_steps": 7, "height": 32, "width": 48, "num_frames": 9}
    assert told == [("the pipeline m", call, {"ranks": [3, 5], "compile": True})]


def test_a_model_that_no_setting_runs_with():
    found = Verification("Toy", 2, 0.0, (SettingTrial(2, "flat", "refused", reason="no adapter"),))
    assert found.exit_code == 2 and "no adapter" in str(found)
    assert str(found).endswith("Toy: runs with none of these settings")


def test_what_is_given_and_the_model_are_left_as_they_are():
    """By a model that writes over its argument; and calls after the recording are not kept."""
    model, given = PLANNED["wan"].model(), PLANNED["wan"].call()
    before = copy.deepcopy(given)

    def write_over(_: Any, __: Any, kwargs: Any) -> None:
        kwargs["hidden_states"].mul_(1.5)

    model.register_forward_pre_hook(write_over, with_kwargs=True)
    cocodiff.verify(model, given, ranks=[])
    assert all(torch.equal(given[name], x) for name, x in before.items() if isinstance(x, torch.Tensor))
    ((_, calls),) = recorded_calls(lambda **inputs: model(**inputs), [model], given)
    with torch.no_grad():
        model(**given)
    assert len(calls) == 1
    for wrong, said in (({"nix": 1}, "with nix: "), ({}, "with no inputs: ")):
        with pytest.raises(UserError, match=said):
            cocodiff.verify(model, wrong, ranks=[])
    last = [*model.parameters()][-1]
    last.data.fill_(torch.nan)
    with pytest.raises(UserError, match="gives nan in one process"):
        cocodiff.verify(model, given, ranks=[])


@pytest.mark.full
def test_both_experts_of_a_pipeline_are_compared():
    pipe = wan_pipeline()
    pipe.set_progress_bar_config(disable=True)
    text = torch.randn(1, 9, TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    given = {"prompt_embeds": text, "negative_prompt_embeds": -text, "height": 32, "width": 48, "num_frames": 5}
    found = cocodiff.verify(pipe, given, ranks=[2])
    assert (found.calls, found.exit_code) == (4, 0), str(found)
    pipe.transformer_2.blocks[1].register_forward_hook(lambda _, __, x_BLC: x_BLC - x_BLC.mean(1, keepdim=True))
    assert cocodiff.verify(pipe, given, ranks=[2]).exit_code == 1, "a mean over a rank's own tokens"
    with pytest.raises(UserError, match="WanPipeline did not call its 2 transformers: give inputs"):
        cocodiff.verify(pipe, given | {"num_inference_steps": 1}, ranks=[2])
