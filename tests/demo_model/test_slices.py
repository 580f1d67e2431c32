"""The procedural slices and masks: deterministic, normalised, and apart from the held-out ones."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from cocodiff_studies.demo_model import slices, train

from cocodiff.demo_model.training.masks import block_mask, center_mask, training_mask


@pytest.mark.parametrize("zoom", [1.0, 3.0])
def test_a_seed_gives_one_slice(zoom: float) -> None:
    stack = np.stack([slices.make_slice(seed, zoom) for seed in range(6)])
    assert stack.shape == (6, 96, 96) and stack.dtype == np.float32
    assert np.array_equal(stack, np.stack([slices.make_slice(seed, zoom) for seed in range(6)]))
    assert (stack.min((1, 2)) == 0).all() and (stack.max((1, 2)) == 1).all()
    assert len(np.unique(stack.mean((1, 2)))) == 6


@pytest.mark.parametrize("family", slices.FAMILIES)
def test_every_family_has_structure_at_every_zoom(family: str) -> None:
    stack = np.stack([slices.make_slice(seed, zoom, family) for seed in range(4) for zoom in (1.0, 4.0)])
    assert np.isfinite(stack).all() and (stack.std((1, 2)) > 0.02).all()


def test_the_mixture_has_all_families() -> None:
    assert sum(slices.SHARES.values()) == pytest.approx(1) and slices.SHARES.keys() == slices.FAMILIES.keys()
    seed = next(seed for seed in range(100) if slices.family_of(seed) == "rock")
    assert np.array_equal(slices.make_slice(seed, 2.0), slices.make_slice(seed, 2.0, "rock"))


def test_zoom_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zoom 0\.5"):
        slices.make_slice(0, 0.5)


@pytest.mark.full
def test_training_never_reaches_the_held_out_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def record(seed: int, zoom: float = 1.0) -> np.ndarray:
        seen.append(seed)
        return np.zeros((96, 96), np.float32)

    monkeypatch.setattr(train, "make_slice", record)
    train.training_images(train.IMAGES, 0)
    train.training_images(100, 3)
    assert not set(seen) & set(slices.HELD_OUT_SEEDS)
    with pytest.raises(ValueError, match="held-out"):
        train.training_images(train.IMAGES, slices.HELD_OUT_SEEDS.start // train.IMAGES)


def test_command_writes_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "held_out.tif"
    arguments = ["slices", "--count", "3", "--out", str(out), "--png", str(tmp_path / "png")]
    monkeypatch.setattr(sys, "argv", arguments)
    slices.main()
    stack = tifffile.imread(out)
    assert stack.shape == (3, 96, 96) and stack.dtype == np.uint16
    expected = slices.make_slice(slices.HELD_OUT_SEEDS[1], family="organ")
    assert np.abs(stack[1] / 65535 - expected).max() <= 0.5 / 65535 + 1e-6
    assert len(list((tmp_path / "png").glob("*.png"))) == 3


def test_masks_cover_what_they_say() -> None:
    generator = np.random.default_rng(0)
    assert block_mask(generator).mean() == 0.25
    assert center_mask().mean() == 0.25 and center_mask()[24:72, 24:72].all()
    for _ in range(200):
        mask = training_mask(generator)
        assert mask.shape == (96, 96) and mask.dtype == bool and mask.any()
