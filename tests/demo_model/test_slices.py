"""The procedural slices and masks: deterministic, normalised, and apart from the held-out ones."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from cocodiff_eval.harness import training
from cocodiff_studies import phantoms as slices

from cocodiff.cli.main import main
from cocodiff.demo_model.training import block_mask, center_mask, training_mask


@pytest.mark.parametrize("zoom", [1.0, 3.0])
def test_a_seed_gives_one_slice(zoom: float) -> None:
    stack = np.stack([slices.make_slice(seed, zoom) for seed in range(6)])
    assert stack.shape == (6, 96, 96) and stack.dtype == np.float32
    assert np.array_equal(stack, np.stack([slices.make_slice(seed, zoom) for seed in range(6)]))
    assert (stack.min((1, 2)) == 0).all() and (stack.max((1, 2)) == 1).all()
    assert len(np.unique(stack.mean((1, 2)))) == 6
    with pytest.raises(ValueError, match=r"zoom 0\.5"):
        slices.make_slice(0, 0.5)


@pytest.mark.parametrize("family", slices.FAMILIES)
def test_every_family_has_structure_at_every_zoom(family: str) -> None:
    stack = np.stack([slices.make_slice(seed, zoom, family) for seed in range(4) for zoom in (1.0, 4.0)])
    assert np.isfinite(stack).all() and (stack.std((1, 2)) > 0.02).all()


def test_the_mixture_has_all_families() -> None:
    assert sum(slices.SHARES.values()) == pytest.approx(1) and slices.SHARES.keys() == slices.FAMILIES.keys()
    found = [slices.make_slice(seed, 2.0) for seed in range(60)]
    for family in slices.FAMILIES:
        assert any(np.array_equal(one, slices.make_slice(seed, 2.0, family)) for seed, one in enumerate(found))


def test_command_writes_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "held_out.tif"
    monkeypatch.setattr(sys, "argv", ["phantoms", "--count", "3", "--out", str(out)])
    slices.main()
    stack = tifffile.imread(out)
    assert stack.shape == (3, 96, 96) and stack.dtype == np.uint16
    expected = slices.make_slice(slices.HELD_OUT_SEEDS[1], family="organ")
    assert np.abs(stack[1] / 65535 - expected).max() <= 0.5 / 65535 + 1e-6


def test_the_mixture_is_what_train_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As stacks of slices that have nothing to do with each other, none of them a held-out one."""
    most = str(slices.HELD_OUT_SEEDS.start + 1)
    monkeypatch.setattr(sys, "argv", ["phantoms", "--family", "mixed", "--count", most, "--out", str(tmp_path / "no")])
    with pytest.raises(SystemExit):
        slices.main()
    assert re.search(r"--count 1000001: .*\b1 .*\b1000000$", capsys.readouterr().err, re.M)
    monkeypatch.setattr(slices, "STACK", 20)
    monkeypatch.setattr(sys, "argv", ["phantoms", "--family", "mixed", "--count", "36", "--out", str(tmp_path / "in")])
    slices.main()
    stacks = sorted((tmp_path / "in").glob("*.tif"))
    assert [len(tifffile.imread(path)) for path in stacks] == [20, 16]
    for name, value in {"HELD_OUT": 6, "JUDGED": 2, "JUDGED_STEPS": 2, "LEAST_APART": 4}.items():
        monkeypatch.setattr(training, name, value)
    words = ["--mask", "none", "--range", "0,65535", "--anew", "--iterations", "2", "--patches", "8", "--batch", "2"]
    assert main(["train", "--input", *map(str, stacks), *words, "--quiet", "--out", str(tmp_path / "model")]) == 0


def test_masks_cover_what_they_say() -> None:
    generator = np.random.default_rng(0)
    assert block_mask(generator).mean() == 0.25
    assert center_mask().mean() == 0.25 and center_mask()[24:72, 24:72].all()
    for _ in range(200):
        mask = training_mask(generator)
        assert mask.shape == (96, 96) and mask.dtype == bool and mask.any()
