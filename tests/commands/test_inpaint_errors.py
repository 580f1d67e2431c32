"""Every mistake a user can make with `cocodiff inpaint`: one line that says what to do, exit 2, nothing written."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from cocodiff_eval.cli.inpaint import OPTIONS

from cocodiff.cli.main import main
from cocodiff.jobs.options import with_settings

pytestmark = pytest.mark.usefixtures("promptly")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a good slice, and of what there is to be refused."""
    folder = tmp_path_factory.mktemp("files")
    images = {
        "good": np.random.default_rng(0).integers(0, 60000, (96, 96), dtype=np.uint16),
        "small": np.eye(64, dtype=np.uint8),
        "nan": np.where(np.arange(96) == np.arange(96)[:, None] + 1, np.nan, np.float32(1)),
    }
    for name, image in images.items():
        tifffile.imwrite(folder / f"{name}.tif", image)
    (folder / "broken.tif").write_bytes(b"II*\0 this is no image")
    for name in ("pipe.tif", "pipe.yaml"):
        os.mkfifo(folder / name)
    with h5py.File(folder / "linked.h5", "w") as file:
        file["data"] = h5py.ExternalLink("other.h5", "/data")
    (folder / "mine.yaml").write_text("name: mine\ncards: 2\ntiles: 2\nplanes: [0, 1]\n")
    for name, family in (("bare", "StableDiffusion3Inpaint"), ("pickled", "StableDiffusion3Inpaint"), ("sana", "Sana")):
        for part in ("transformer", "vae"):
            (folder / name / part).mkdir(parents=True)
        (folder / name / "model_index.json").write_text(json.dumps({"_class_name": f"{family}Pipeline"}))
        shape = {"num_attention_heads": 12, "sample_size": 12, "patch_size": 1}
        (folder / name / "transformer" / "config.json").write_text(json.dumps(shape))
    (folder / "pickled" / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.txt").write_text("mine")
    return folder


@pytest.fixture
def refused(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `cocodiff inpaint` in that folder, with the good slice unless told otherwise: its one line of error."""
    monkeypatch.chdir(files)

    def run(*words: str) -> str:
        before = sorted(files.rglob("*"))
        usual = {"--input": "good.tif", "--out": "out"}
        more = [word for option, value in usual.items() if option not in words for word in (option, value)]
        assert main(["inpaint", *more, *words]) == 2
        captured = capsys.readouterr()
        assert re.fullmatch(r"(cocodiff .*; reading 1 input\(s\)\n)?", captured.out)
        lines = captured.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("cocodiff: "), captured.err
        assert sorted(files.rglob("*")) == before and (files / "taken" / "thesis.txt").read_text() == "mine"
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--input absent.tif", "no such file; absent.tif"),
        ("--input 'a\nb.tif'", "no such file"),
        ("--input broken.tif", "broken.tif"),
        ("--input linked.h5:/data", "--follow-links"),
        *((f"--{one} linked.h5:/data --follow-links", "linked.h5; is not there") for one in ("input", "mask", "truth")),
        ("--input pipe.tif", "is a named pipe"),
        ("--mask pipe.tif", "pipe"),
        ("--truth pipe.tif", "pipe"),
        ("--machine pipe.yaml", "pipe"),
        ("--config pipe.yaml", "is a named pipe"),
        ("--config /dev/zero", "is a device"),
        *(
            (f"{option} '{name}{suffix}'", said)
            for name in ("x" * 5000, "nul\0")
            for option, suffix, said in (
                ("--mask", "", "check the path"),
                ("--input", ".tif", "check the path"),
                ("--model", "", "no such folder"),
            )
        ),
        ("--mask small.tif", "64 x 64; 96 x 96"),
        ("--mask center --input nan.tif", "row 0, column 1"),
        ("--preset tappa", "did you mean tapa?"),
        ("--stepz 5", "did you mean steps?"),
        ("--steps 0", "at least 1"),
        ("--samples 0", "--samples 0: at least 1"),
        ("--strength 1e-300", "give at least"),
        ("--timeout-s -1", "timeout_s"),
        ("--range 7", "--range '7'; two intensities"),
        ("--ranks 200", "200 ranks for 144 image tokens"),
        ("--ranks 150 --parallel off", "150 ranks for the 144 image tokens"),
        ("--vae tiled", "has no tiles"),
        ("--vae sharded", "is not known in bands"),
        ("--machine aurora --ranks 5", "12; --machine local"),
        ("--machine mine.yaml --ranks 3", "start 4 ranks"),
        ("--model absent", "no such folder"),
        ("--model bare", "no .safetensors weights"),
        ("--model pickled", "pickle weights only"),
        ("--model sana", "SanaPipeline"),
        ("--out taken", "--overwrite"),
        ("--out taken --overwrite", "not ours to overwrite"),
    ],
    ids=lambda text: text[:30].replace("\0", " "),
)
def test_a_mistake_is_one_line_that_names_it(refused: Callable[..., str], line: str, values: str) -> None:
    said = refused(*shlex.split(line))
    assert [value for value in values.split("; ") if value not in said] == [], said


@pytest.mark.parametrize("name", [option.name for option in with_settings(OPTIONS) if option.default is not None])
def test_a_key_without_a_value_is_not_given(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    """The run gets as far as with the key left away: to a mistake that is looked for after all options."""
    (tmp_path / "run.yaml").write_text(f"{name}: null\n")
    assert "--config" not in (line := refused("--config", str(tmp_path / "run.yaml"), "--input", "absent.tif"))
    assert "no such file" in line
