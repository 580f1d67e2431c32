"""Mistakes in words of `plan`, `bench`, `papers` and `inpaint --quality`: one line with the values, and no folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import tifffile

from cocodiff.cli.main import main

HALF = "name: half\nheads: 4\nhead_dim: 8\n"
WHOLE = HALF + "joint_layers: 1\nparameters: 9\n"
FILES = {
    "half.yaml": HALF,
    "wrong.yaml": HALF.replace("heads", "head"),
    "other.json": json.dumps({"rows": [{"case": "6MB", "variant": "gloo", "median_s": 1.0}]}),
    "unet/config.json": json.dumps({"_class_name": "Nothing"}),
    "vae/config.json": json.dumps({"_class_name": "AutoencoderKL"}),
    "campaign/empty/bench.json": "{}",
    "cut/step/bench.json": '{"rows": [',
    "poor/step/bench.json": '{"rows": [{"variant": "flat"}]}',
    "none/a.txt": "",
    "small.yaml": "name: s\ntiles: 1\nplanes: [0]\ndevice: {memory_gib: 0.001, memory_gb_s: 1, bf16_tflop_s: 1}\n",
    "zero.yaml": WHOLE.replace("heads: 4", "heads: 0"),
    "part.yaml": WHOLE.replace("9", "1.5"),
    "less.yaml": WHOLE + "text_tokens: -1\n",
    "wide.yaml": WHOLE + "mlp_ratio: wide\n",
    "flux3.yaml": WHOLE + "family: FLUX.3\n",
    "toy.yaml": WHOLE.replace("9", "1000000") + "family: FLUX.1\ntext_tokens: 6\n",
}

SLICE = Path(__file__).parents[2] / "cocodiff" / "demo_model" / "samples" / "synthetic_organ_1.tif"
BOUNDED = f"inpaint --input {SLICE} --quality {{}}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --model sd3.5 --images 2 --memory", "--images asks for the time of a job"),
        ("plan --model sd3.5 --negative_tokens 9", "--negative_tokens 9: sd3.5 does not call"),
        ("plan", "--model is missing: "),
        ("plan --memory", "--model is missing: "),
        ("plan --model flux.1 --steps 0", "--steps 0: at least 1 is needed"),
        ("plan --model flux.1 --stable 2", "--stable 2: give a part from 0 to 1"),
        ("plan --calibrate gone.json", "--calibrate gone.json: No such file"),
        ("plan --calibrate half.yaml", "--calibrate half.yaml is no bench.json"),
        ("plan --calibrate other.json", "has no all-to-all of flat, flat_serial, tapa or split"),
        ("plan --memory --model qwen-imag", "unknown model 'qwen-imag', did you mean qwen-image?"),
        ("plan --memory --model gone.yaml", "gone.yaml does not exist; shipped models: cogvideox-paper, flux.1"),
        ("plan --memory --model half.yaml", "model file half.yaml: missing 2 required"),
        ("plan --memory --model wrong.yaml", "wrong.yaml: unknown key head, did you mean heads?"),
        ("plan --memory --model zero.yaml", "heads 0: give a whole number of at least 1"),
        ("plan --memory --model part.yaml", "parameters 1.5: give a whole number"),
        ("plan --memory --model less.yaml", "text_tokens -1: give a whole number of at least 0"),
        ("plan --memory --model wide.yaml", "mlp_ratio 'wide': give a number above 0"),
        ("plan --memory --model flux3.yaml", "family of model file flux3.yaml 'FLUX.3', did you mean FLUX"),
        ("plan --memory --model none", "--model none holds no transformer/config.json"),
        ("plan --memory --model unet", "diffusers has no class Nothing"),
        ("plan --memory --model vae", "the memory of a AutoencoderKL is not known"),
        ("plan --memory --model flux.1 --size 1000", "use 992 or 1008"),
        ("plan --memory --model flux.1 --frames 5", "--frames 5: flux.1 makes images: leave it away"),
        ("plan --memory --model wan2.2 --size 512", "--size 512: wan2.2 makes videos: leave it away, or give"),
        ("plan --memory --model wan2.2 --frames 6", "--frames 6: wan2.2 makes 4 n + 1: use 5"),
        ("plan --memory --model wan2.2 --width 500", "--width 500: wan2.2 makes 16 n: use 496"),
        ("plan --memory --model flux.1 --batch 0", "--batch 0: at least 1 is needed"),
        ("plan --memory --model flux.1 --text_tokens -1", "--text_tokens -1: at least 0 is needed"),
        ("plan --memory --model flux.1 --machine local", "machine local has no fixed size: add --ranks N"),
        ("plan --memory --model flux.1 --preset fast", "unknown preset 'fast'"),
        ("plan --memory --model flux.1 --dtype int8", "--dtype"),
        *((f"generate --model sd3.5 --prompt a --{name} 0", f"--{name} 0: ") for name in ("steps", "height", "fps")),
        ("bench attention --tokens 0", "--tokens 0"),
        ("bench attention --ways token", "on 1 rank(s): choose from naive"),
        ("bench attention --ways naive --ranks 2", "choose from flat"),
        ("bench attention --tokens 2 --ranks 3", "give every rank one"),
        ("bench attention --waits", "cocodiff emulate"),
        ("bench step --steps 0", "at least 1"),
        ("bench step --preset tappa", "did you mean tapa?"),
        (
            "bench step --model toy.yaml --size 64 --variants flat --batch 0 --machine small.yaml",
            "half 64, batch 1: more than a tile's memory holds",
        ),
        ("papers --paper tokenrings", "tokenring"),
        ("papers --runs nothing", "no command's name"),
        ("papers --measured none", "launch/campaign.pbs"),
        ("papers --measured campaign", "empty/bench.json"),
        ("papers --measured cut", "step/bench.json"),
        ("papers --measured poor", "step/bench.json"),
        ("papers --out half.yaml/out", "choose another folder"),
        (BOUNDED.format("12dB"), "--quality 12dB: neither a loss nor a distance: give the least PSNR"),
        (BOUNDED.format("50dB") + " --preset flat,tapa", "with presets flat, tapa: it chooses the setting of one"),
        (BOUNDED.format("50dB") + " --preset cocodiff", "with preset cocodiff"),
        (BOUNDED.format("50dB") + " --codec int8", "--codec int8: --quality 50dB chooses it"),
        (BOUNDED.format("50dB") + " --no-exact", "compares with the exact run: leave --no_exact away"),
        (BOUNDED.format("50dB") + " --quality_every 0", "--quality_every 0: at least 1"),
        (BOUNDED.format("1dB") + " --mask hole.tif", "the truth, which mask hole of synthetic_organ_1 hides"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    tifffile.imwrite("hole.tif", np.eye(96, dtype=np.uint8))
    given = shlex.split(words)
    assert main(given if "--out" in given else [*given, "--out", "out"]) == 2
    captured = capsys.readouterr()
    left = [path.read_text().rstrip() for path in Path("out").rglob("*")]
    assert left == ([said.removeprefix("of ")] if "more than a tile" in said else []), "what launch/campaign.pbs reads"
    if not words.startswith("inpaint"):  # which says first what it reads
        assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert said in line
