"""Every model family restores on two ranks what its own pipeline restores alone, and starts without needless copies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import diffusers
import pytest
import tiny_pipelines
import torch
from cocodiff_eval.harness.pipelines import Request, check_model, load_model
from launching import assert_succeeded
from warm import forked

from cocodiff.config.config import Config
from cocodiff.engine.engine import open_transport
from cocodiff.models import families, pipelines_of
from cocodiff.models.family import INPAINT


def test_what_a_family_cannot_do_is_said() -> None:
    for pipelines in (pipelines for family in families() for pipelines in family.pipelines):
        assert all(hasattr(diffusers, name) for name in pipelines.classes)
        assert bool(pipelines.lacks) is not bool(pipelines.generate)


def homes(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Where each parameter of a model lies in this process's memory: the mapped file, "" for none, and how many KiB of
    that mapping are copies."""
    memory = Path("/proc/self/smaps").read_text()
    mapping = re.compile(
        r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+[ ]*(.*)\n(?:\w+: .*\n)*?Anonymous: +(\d+)", re.MULTILINE
    )
    mapped = [(int(of[1], 16), int(of[2], 16), of[3], int(of[4])) for of in mapping.finditer(memory)]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    return [next((file, copied) for start, end, file, copied in mapped if start <= at < end) for at in places]


def test_weights_of_the_wanted_dtype_stay_in_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So ranks of a host share the page cache's copy; a conversion gives every rank its own, and rank 0 says so."""
    tiny_pipelines.qwen_pipeline().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 1
    request, transport = Request(str(tmp_path), INPAINT), open_transport(Config())
    check_model(request, 1)
    model = load_model(request, "bf16", transport)
    for part in ("transformer", "vae"):
        for file, copied in homes(getattr(model.pipe, part)):
            assert file.startswith(str(tmp_path / part)) and file.endswith(".safetensors") and copied == 0
    assert capsys.readouterr().out == ""
    converted = load_model(request, "fp32", transport)
    assert not any(file.endswith(".safetensors") for file, _ in homes(converted.pipe.transformer))
    (line,) = capsys.readouterr().out.splitlines()
    assert "every rank converts its own copy to fp32" in line and "--dtype bf16" in line
    transport.close()


@pytest.fixture(scope="module")
def with_encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    tiny_pipelines.sd3_pipeline(**tiny_pipelines.clip_text()).save_pretrained(folder)
    return folder


def test_only_rank_0_reads_text_encoders_and_keeps_none(with_encoders: Path, tmp_path: Path) -> None:
    done = forked(with_encoders, "a tooth", folder=tmp_path, module="encoder_ranks")
    assert_succeeded(done)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first["read"] == ["CLIPTextModelWithProjection"] * 2 and second["read"] == []
    assert first["alive"] == second["alive"] == 0
    assert first["parts"] == second["parts"] == ["scheduler", "transformer", "vae"]
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(with_encoders, text_encoder_3=None, tokenizer_3=None)
    names = pipelines_of("StableDiffusion3Pipeline", "").encoded
    with torch.no_grad():
        plain = dict(zip(names, pipe.encode_prompt("a tooth", None, None), strict=True))
    for name in names:
        assert first["sums"][name] == second["sums"][name] == pytest.approx(float(plain[name].double().sum()), abs=1e-5)


def test_a_failure_of_rank_0_alone_ends_all_ranks_with_its_message(with_encoders: Path, tmp_path: Path) -> None:
    done = forked(with_encoders, "a tooth", "fail", folder=tmp_path, module="encoder_ranks")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("cocodiff: ")]
    assert "cannot be loaded: the disk is on fire" in line
