"""Every mistake a user can make with `cocodiff inpaint`: one line that says what to do, exit 2, nothing written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from cocodiff_eval.cli.inpaint import OPTIONS

from cocodiff.cli.main import main
from cocodiff.jobs.options import with_settings

Check = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs `cocodiff inpaint` with a good input unless told otherwise and returns its one line of error."""
    good = tmp_path / "good.tif"
    tifffile.imwrite(good, np.random.default_rng(0).integers(0, 60000, (96, 96), dtype=np.uint16))

    def run(*words: str, input: str | Path = good) -> str:
        before = sorted(tmp_path.rglob("*"))
        code = main(["inpaint", "--input", str(input), "--out", str(tmp_path / "out"), *map(str, words)])
        captured = capsys.readouterr()
        assert code == 2
        assert re.fullmatch(r"(cocodiff .*; reading 1 input\(s\)\n)?", captured.out)
        lines = captured.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("cocodiff: "), captured.err
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def test_input_that_is_missing(refused: Check, tmp_path: Path) -> None:
    assert "no such file" in refused(input=tmp_path / "absent.tif")


@pytest.mark.parametrize("name", ["broken.tif", "broken.png", "broken.h5:/data"])
def test_input_that_is_corrupt(refused: Check, tmp_path: Path, name: str) -> None:
    (tmp_path / name.split(":")[0]).write_bytes(b"II*\0 this is no image")
    assert name.split(":")[0] in refused(input=tmp_path / name)


def test_hdf5_dataset_that_is_absent(refused: Check, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "volume.h5", "w") as file:
        file["exchange/data"] = np.ones((2, 96, 96), np.float32)
    assert "/exchange/data" in refused(input=f"{tmp_path}/volume.h5:/exchange/dat")


@pytest.mark.usefixtures("promptly")
def test_what_is_no_file_is_refused_wherever_a_file_is_named(refused: Check, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tif")
    for words in (("--mask",), ("--truth",), ("--config",), ("--machine",)):
        suffix = ".tif" if words[0] in ("--mask", "--truth") else ".yaml"
        pipe = tmp_path / f"pipe{suffix}"
        if not pipe.exists():
            os.mkfifo(pipe)
        assert "pipe" in refused(*words, pipe)
    assert "is a named pipe" in refused(input=tmp_path / "pipe.tif")
    assert "is a named pipe" in refused("--config", tmp_path / "pipe.yaml")
    assert "is a device" in refused("--config", "/dev/zero")
    for name in ("x" * 5000, "nul\0"):
        assert "check the path" in refused("--mask", name)
        assert "check the path" in refused(input=f"{name}.tif")
        assert "no such folder" in refused("--model", name)


def test_a_name_of_several_lines_makes_one_line(refused: Check, tmp_path: Path) -> None:
    assert "no such file" in refused(input=tmp_path / "a\nb.tif")


def test_hdf5_that_names_another_file(refused: Check, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["data"] = h5py.ExternalLink("other.h5", "/data")
    assert "--follow-links" in refused(input=f"{tmp_path}/in.h5:/data")
    assert "in.h5" in refused("--follow-links", input=f"{tmp_path}/in.h5:/data")


def test_mask_of_another_shape(refused: Check, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "mask.tif", np.eye(64, dtype=np.uint8))
    line = refused("--mask", tmp_path / "mask.tif")
    assert "64 x 64" in line and "96 x 96" in line


@pytest.mark.parametrize(("value", "said"), [(0, "empty"), (255, "nothing is left")])
def test_mask_that_is_empty_or_full(refused: Check, tmp_path: Path, value: int, said: str) -> None:
    tifffile.imwrite(tmp_path / "mask.tif", np.full((96, 96), value, np.uint8))
    assert said in refused("--mask", tmp_path / "mask.tif")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_voxels_outside_the_mask_that_are_not_finite(refused: Check, tmp_path: Path, bad: float) -> None:
    image = np.ones((96, 96), np.float32)
    image[2, 3] = bad
    tifffile.imwrite(tmp_path / "bad.tif", image)
    assert "row 2, column 3" in refused("--mask", "center", input=tmp_path / "bad.tif")


def test_unknown_names_come_with_a_suggestion(refused: Check, tmp_path: Path) -> None:
    assert "did you mean tapa?" in refused("--preset", "tappa")
    assert "did you mean steps?" in refused("--stepz", "5")
    assert "did you mean aurora?" in refused("--machine", "arora", "--ranks", "12")
    (tmp_path / "run.yaml").write_text("strenght: 0.5\n")
    assert "did you mean strength?" in refused("--config", tmp_path / "run.yaml")


@pytest.mark.parametrize("name", [option.name for option in with_settings(OPTIONS) if option.default is not None])
def test_a_key_without_a_value_is_not_given(refused: Check, tmp_path: Path, name: str) -> None:
    """The run gets as far as with the key left away: to a mistake that is looked for after all options."""
    (tmp_path / "run.yaml").write_text(f"{name}: null\n")
    assert "--config" not in (line := refused("--config", tmp_path / "run.yaml", input=tmp_path / "absent.tif"))
    assert "no such file" in line


def test_values_out_of_range(refused: Check) -> None:
    assert "at least 1" in refused("--steps", "0")
    assert "at most 1,000,000" in refused("--steps", str(2**64))
    assert "--samples 0: at least 1" in refused("--samples", "0") and "at most 1,000" in refused("--samples", "1001")
    assert "give at least" in refused("--strength", "1e-300") and "give at least" in refused("--strength", "5e-324")
    assert "steps" in refused("--steps", "9" * 5000)
    assert "not a number" in refused("--steps", "many")
    assert "above 0 and up to 1" in refused("--strength", "1.5")
    assert "timeout_s" in refused("--timeout-s", "-1")
    assert "--range '7': give two intensities" in refused("--range", "7")
    assert "no voxel of" in refused("--range=-9,-1")


def test_more_ranks_than_the_model_can_use(refused: Check) -> None:
    assert "200 ranks for 144 image tokens" in refused("--ranks", "200")
    assert "150 ranks for the 144 image tokens" in refused("--ranks", "150", "--parallel", "off")


def test_a_vae_without_tiles(refused: Check) -> None:
    assert "has no tiles" in refused("--vae", "tiled")
    assert "is not known in bands" in refused("--vae", "sharded")


def test_machine_that_does_not_match_the_ranks(refused: Check, tmp_path: Path) -> None:
    line = refused("--machine", "aurora", "--ranks", "5")
    assert "12" in line and "--machine local" in line
    (tmp_path / "mine.yaml").write_text("name: mine\ncards: 2\ntiles: 2\nplanes: [0, 1]\n")
    assert "start 4 ranks" in refused("--machine", tmp_path / "mine.yaml", "--ranks", "3")


def test_model_folder_without_weights_or_with_pickles_only(refused: Check, tmp_path: Path) -> None:
    assert "no such folder" in refused("--model", tmp_path / "absent")
    folder = model_folder(tmp_path / "model")
    assert "no .safetensors weights" in refused("--model", folder)
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    assert "pickle weights only" in refused("--model", folder)


def test_model_of_an_unknown_family(refused: Check, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", family="SanaPipeline")
    assert "SanaPipeline" in refused("--model", folder)


def test_results_are_not_overwritten_unasked(refused: Check, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert "--overwrite" in refused()
    assert "not ours to overwrite" in refused("--overwrite")


def model_folder(
    folder: Path, heads: int = 12, side: int = 12, family: str = "StableDiffusion3InpaintPipeline"
) -> Path:
    """A folder in diffusers' layout without any weights."""
    for part in ("transformer", "vae"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": family}))
    shape = {"num_attention_heads": heads, "sample_size": side, "patch_size": 1}
    (folder / "transformer" / "config.json").write_text(json.dumps(shape))
    return folder
