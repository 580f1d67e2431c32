"""`cocodiff train`: a model of one's own volumes, which `inpaint` takes."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
import torch
from cocodiff_eval.harness import training
from cocodiff_eval.harness.patches import Patches, Split, cut_patches
from launching import with_options
from safetensors.numpy import load_file
from scipy.ndimage import gaussian_filter

from cocodiff.cli.main import main

WEIGHTS = "diffusion_pytorch_model.safetensors"
FEWER = {"HELD_OUT": 6, "JUDGED": 2, "JUDGED_STEPS": 2, "LEAST_APART": 4}
FEW = ("--iterations", "6", "--batch", "2", "--patches", "40", "--quiet")


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with a slab that is missing, and the mask of it."""
    folder = tmp_path_factory.mktemp("scan")
    volume = gaussian_filter(np.random.default_rng(0).random((20, 100, 110)), 4)
    volume = ((volume - volume.min()) / np.ptp(volume) * 60000).astype(np.uint16)
    mask = np.zeros(volume.shape, np.uint8)
    mask[3:5, :30], volume[3:5, :30] = 255, 0
    tifffile.imwrite(folder / "scan.tif", volume, photometric="minisblack")
    tifffile.imwrite(folder / "missing.tif", mask, photometric="minisblack")
    return folder


@pytest.fixture(autouse=True)
def few_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is kept after four of six updates."""
    for name, value in FEWER.items():
        monkeypatch.setattr(training, name, value)


def train(scan: Path, out: Path, *words: Any) -> int:
    given = ("--input", scan / "scan.tif", "--mask", scan / "missing.tif", "--out", out, *FEW)
    return main(["train", *with_options([*map(str, given)], *map(str, words))])


def test_a_trained_model_restores(scan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(scan, tmp_path / "model", "--anew") == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "model" / "training.json").read_text())
    assert [row["step"] for row in found["losses"]] == [0, 4, 6]
    assert f"{found['psnr_db']['after']:.2f} dB, before {found['psnr_db']['before']:.2f} dB" in said
    assert (tmp_path / "model" / "training.png").stat().st_size > 1000
    outputs = []
    for model in ("embedded", tmp_path / "model"):
        out = tmp_path / f"restored{len(outputs)}"
        words = ("--input", scan / "scan.tif", "--slices", "18:19", "--steps", "2", "--no_exact", "--quiet")
        assert main(["inpaint", *map(str, (*words, "--model", model, "--out", out))]) == 0
        outputs.append(tifffile.imread(next((out / "images").glob("*.tif"))))
    assert outputs[0].shape == outputs[1].shape and (outputs[0] != outputs[1]).any()


def test_the_mask_may_cover_whole_slices_and_nothing_else(scan: Path, tmp_path: Path) -> None:
    """Nothing of these is learnt: their voxels, which are no numbers, are in no patch."""
    volume, lost = tifffile.imread(scan / "scan.tif").astype(np.float32), np.zeros((20, 100, 110), np.uint8)
    lost[4:6], volume[4:6] = 255, np.nan
    for name, array in (("lost", lost), ("holes", volume)):
        tifffile.imwrite(tmp_path / f"{name}.tif", array, photometric="minisblack")
    given = ("--input", tmp_path / "holes.tif", "--mask", tmp_path / "lost.tif")
    assert train(scan, tmp_path / "model", *given) == 0
    losses = [row["held_out_loss"] for row in json.loads((tmp_path / "model" / "training.json").read_text())["losses"]]
    assert len(losses) == 3 and np.isfinite(losses).all()


@pytest.mark.full
def test_a_stopped_training_goes_on_to_the_same_bits(scan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert train(scan, tmp_path / "whole") == 0
    advance = training.Trainer.advance

    def stopping(trainer: training.Trainer) -> None:
        if trainer.step == 5:
            raise KeyboardInterrupt
        advance(trainer)

    with monkeypatch.context() as stopped:
        stopped.setattr(training.Trainer, "advance", stopping)
        assert train(scan, tmp_path / "parts") == 130
        assert train(scan, tmp_path / "damaged") == 130
    state = next(path for path in tmp_path.rglob(training.STATE) if "damaged" in str(path))
    state.write_bytes(state.read_bytes()[:-99])
    assert train(scan, tmp_path / "damaged", "--resume") == 0 and "done again" in capsys.readouterr().out
    assert train(scan, tmp_path / "parts") == 2
    assert "4 of 6 steps" in capsys.readouterr().err
    assert train(scan, tmp_path / "parts", "--resume", "--seed", "1") == 2
    assert "seed: 0 there, 1 now" in capsys.readouterr().err
    assert train(scan, tmp_path / "parts", "--resume") == 0
    for name, model in product((WEIGHTS, "training.json"), ("parts", "damaged")):
        assert (tmp_path / model / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert train(scan, tmp_path / "parts", "--resume") == 0
    assert "nothing is left to do" in capsys.readouterr().out
    results = tmp_path / "parts"
    for option in ("--input", "--mask"):
        assert train(scan, results, "--overwrite", option, results / "training.json") == 2
        assert "training.json is among the results" in capsys.readouterr().err and (results / WEIGHTS).exists()
    restored = ["inpaint", "--input", str(scan / "scan.tif"), "--model", str(results), "--out", str(results)]
    assert main([*restored, "--overwrite"]) == 2
    assert f"{results} is among the results" in capsys.readouterr().err and (results / WEIGHTS).exists()


def test_the_average_of_the_least_held_out_loss_is_kept_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, module = [0.5, 0.2, 0.7, 0.2], torch.nn.Linear(1, 1, bias=False)
    monkeypatch.setattr(training, "loss_of", Mock(side_effect=losses))
    held = Patches(np.zeros((1, 8, 8), np.float16), np.ones((1, 8, 8), bool))
    trainer = Mock(held=held, hidden_BHW=held.known_NHW, averaged=SimpleNamespace(module=module), rows=[])
    trainer.configure_mock(scale=(), smoothed=0.0, best_loss=math.inf, best={})
    for trainer.step in range(4):
        module.weight.data.fill_(trainer.step)
        training.Trainer.check(trainer)
    assert (trainer.best["weight"].item(), trainer.best_loss) == (1, 0.2)
    assert [row["held_out_loss"] for row in trainer.rows] == losses


def test_what_is_held_out_lies_apart_from_what_is_trained_on() -> None:
    def split(*shape: int) -> Split:
        task: Any = SimpleNamespace(stack=SimpleNamespace(shape=shape, path="scan.tif"))
        return Split.of(task, 96)

    assert split(16, 100, 110) == Split(0, range(12), range(14, 16))
    assert split(15, 100, 200) == Split(2, range(104), range(104, 200))
    assert split(15, 192, 96) == Split(1, range(96), range(96, 192))


def test_ranks_train_together(scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "HELD_OUT", 34)  # the loss is taken of 32 at a time
    more = ("--ranks", 2, "--anew", "--iterations", 2, "--patches", 8)
    assert train(scan, tmp_path / "model", *more) == 0
    weights = load_file(tmp_path / "model" / WEIGHTS)
    assert all(np.isfinite(one).all() for one in weights.values())


def test_training_that_has_diverged_says_so(scan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(training, "loss_of", lambda model, *_: next(model.parameters()).sum() * float("nan"))
    assert train(scan, tmp_path / "model") == 2 and not (tmp_path / "model").exists()
    (said,) = capsys.readouterr().err.splitlines()
    assert "the loss is nan at step 1" in said and "--rate" in said


def test_patches_that_are_held_out_lie_in_the_last_slices() -> None:
    """Of a volume deeper than what is read at once; each slice holds its number."""
    read = SimpleNamespace(shape=(320, 40, 40), path="a", name="a", read=lambda index: np.full((40, 40), index / 512))
    mask = SimpleNamespace(reader=lambda index: np.zeros((40, 40), bool))
    task: Any = SimpleNamespace(stack=read, mask=mask, scale=SimpleNamespace(known01=lambda image_YX, _: image_YX))
    own, held = cut_patches([task], 32, (60, 40), (0,), lambda indices, _: indices)
    assert own.image01_NHW.max() * 512 < 240 and held.image01_NHW.min() * 512 >= 280
