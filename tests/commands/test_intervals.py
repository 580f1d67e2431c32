"""Several samples of a slice have intervals, by regions that are hidden in samples of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from cocodiff_eval.data.masks import block_mask
from cocodiff_eval.quality.fusing import FEWEST_HIDDEN
from cocodiff_eval.quality.hidden import hide_beside

from cocodiff.cli.main import main

Run = Callable[..., tuple[dict[str, Any], dict[str, np.ndarray], str]]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """`inpaint` of an image: metrics, the images of the results, and what was said."""

    def of(image: np.ndarray, *more: Any, mask: np.ndarray | str = "block", samples: int = 4) -> Any:
        out = tmp_path / f"out{len([*tmp_path.iterdir()])}"
        tifffile.imwrite(tmp_path / "scan.tif", image, photometric="minisblack")
        if not isinstance(mask, str):
            tifffile.imwrite(tmp_path / "hole.tif", mask.astype(np.uint8), photometric="minisblack")
            mask = str(tmp_path / "hole.tif")
        words = ["--input", tmp_path / "scan.tif", "--mask", mask, "--samples", samples, "--steps", 2, "--out", out]
        assert main(["inpaint", *map(str, [*words, "--quiet", "--no-exact", *more])]) == 0
        images = {path.stem.partition("_")[2]: tifffile.imread(path) for path in (out / "images").glob("*.tif")}
        return json.loads((out / "metrics.json").read_text()), images, capfd.readouterr().out

    return of


def picture(slices: int = 0) -> np.ndarray:
    """Smooth noise."""
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(3)
    found = [gaussian_filter(rng.standard_normal((96, 96)), 3) for _ in range(slices or 1)]
    return (30000 + 60000 * np.stack(found)).clip(0, 65535).astype(np.uint16)[0 if not slices else slice(None)]


@pytest.mark.parametrize("slices", [pytest.param(0, marks=pytest.mark.full), 2])
def test_results_stay_as_they_are_without_a_test_and_have_intervals_beside(
    run: Run, slices: int, tmp_path: Path
) -> None:
    """On replicas, which share the samples of a slice, as well, and where each sample is kept. Uncertainty is half the
    width of the intervals; without them nothing is shown as one."""
    image = picture(slices)
    plain, without, said = run(image, "--no_hidden_test")
    (outcome,) = plain["outcomes"]
    assert (outcome["kind"], outcome["voxels"]) == ("unknown", 0) and outcome["reason"] in said.splitlines()[-1]
    assert not [name for name in without if "90" in name] and "in 90 %" not in said and "uncertainty" not in said
    (page,) = tmp_path.glob("*/report.html")
    assert "block_tapa_spread" in without and '"uncertainty":{' not in page.read_text()
    samples: list[np.ndarray] = []
    for more in ((), ("--keep_samples",), ("--ranks", 2, "--replicas", 2, "--keep_samples")):
        metrics, images, said = run(image, *more)
        kept = [images.pop(f"block_tapa_sample_{n}").astype(float) for n in range(4 if "--keep_samples" in more else 0)]
        samples = samples or kept
        assert all(np.array_equal(*pair) for pair in zip(samples, kept, strict=bool(kept)))
        assert not kept or np.abs(np.mean(kept, 0) - images["block_tapa"]).max() <= 1
        assert {*images} == {*without} | {"block_tapa_low_90", "block_tapa_high_90"}
        assert "in 90 %" in said and "uncertainty" in said
        assert all(np.array_equal(images[name], without[name]) for name in without)
        for row, before in zip(metrics["images"], plain["images"], strict=True):
            assert row["samples"] == 4 and row["psnr_db"] == before["psnr_db"] and before["intervals"] is None
            assert row["intervals"]["factor_90"] > row["intervals"]["factor_50"] > 0
            assert 0.5 < row["coverage_90"] <= 1 and row["coverage_50"] < row["coverage_90"]
        mask = block_mask((96, 96), 0)
        low, high = (np.atleast_3d(images[f"block_tapa_{end}_90"].T).T for end in ("low", "high"))
        mean = np.atleast_3d(images["block_tapa"].T).T
        assert not low[:, ~mask].any() and not high[:, ~mask].any()
        truth = np.atleast_3d(image.T).T.astype(float)
        inside = ((low <= truth) & (truth <= high))[:, mask].mean(axis=1)
        assert [row["coverage_90"] for row in metrics["images"]] == pytest.approx(inside, abs=0.01)
        widths = (high - low.astype(float))[:, mask].mean(axis=1) / np.ptp(metrics["inputs"][0]["range"])
        assert [row["uncertainty"] for row in metrics["images"]] == pytest.approx(widths / 2, rel=0.05)
        if kept:
            errors = (np.reshape(kept, (4, -1, 96, 96)) - truth)[..., mask] / np.ptp(metrics["inputs"][0]["range"])
            single_db = -10 * np.log10(np.square(errors).mean(axis=2)).mean(axis=0)
            assert [row["psnr_db_single"] for row in metrics["images"]] == pytest.approx(single_db, abs=0.01)
        (outcome,) = metrics["outcomes"]
        assert outcome["rival"] and min(outcome["regions"], outcome["voxels"] / 200) >= max(1, slices), outcome
        assert said.splitlines()[-1].endswith(outcome["told"])
        assert (low[:, mask] <= mean[:, mask]).all() and (high[:, mask] > low[:, mask]).mean() > 0.99
    assert sum('"uncertainty":{' in one.read_text() for one in tmp_path.glob("*/report.html")) == 3


def test_the_outcome_of_a_slice_names_the_method_that_is_as_good(run: Run) -> None:
    """Rows that are the same along x, of which the model knows nothing."""
    lines = np.repeat(np.random.default_rng(0).integers(0, 65535, (96, 1), dtype=np.uint16), 96, axis=1)
    mask = np.zeros((96, 96), bool)
    mask[10:18, 10:20] = mask[30:38, 50:60] = mask[70:78, 30:40] = True
    (outcome,) = run(lines, mask=mask)[0]["outcomes"]
    assert (outcome["kind"], outcome["rival"]) == ("as good", "linear across x") and outcome["expected_db"][1] < 0


def test_a_quarter_of_the_samples_and_of_the_tiles_more() -> None:
    """Regions do not touch the mask, and none is taken that is not allowed."""
    image, mask = picture() / 65535, block_mask((96, 96), 1)
    asked: list[int] = []

    def allowed(unknown: np.ndarray) -> bool:
        asked.append(int(unknown.sum()))
        return len(asked) != 2

    every = hide_beside(image, mask, 0, lambda _: True)
    some = hide_beside(image, mask, 0, allowed)
    assert 0 < some.sum() < every.sum() and not (every & mask).any() and not (some & ~every).any()
    assert not hide_beside(image, mask, 0, lambda _: False).any()


def test_specks_hide_enough_for_intervals() -> None:
    """A lattice of 16 regions of four voxels would be too few to learn from."""
    mask = np.zeros((96, 96), bool)
    for row, column in np.random.default_rng(0).integers(4, 90, (30, 2)):
        mask[row : row + 2, column : column + 2] = True
    hidden = hide_beside(picture() / 65535, mask, 0, lambda _: True)
    assert hidden.sum() >= FEWEST_HIDDEN and not (hidden & mask).any()


def test_where_nothing_can_be_hidden_there_are_no_intervals(run: Run, tmp_path: Path) -> None:
    mask = np.ones((96, 96), bool)
    mask[::24, ::24] = False
    metrics, images, said = run(picture(), "--invert=false", mask=mask)
    assert "1 of 1 results have no intervals" in said
    assert all(metrics["images"][0][name] is None for name in ("intervals", "coverage_90", "uncertainty"))
    (outcome,) = metrics["outcomes"]
    assert outcome["kind"] == "unknown" and outcome["lead_db"] is None and outcome["told"] in said.splitlines()[-1]
    (page,) = tmp_path.glob("*/report.html")
    assert '"uncertainty":{' not in page.read_text()
    assert images["hole_tapa_high_90"][mask].min() == 65535 and images["hole_tapa_low_90"][mask].max() == 0


def test_slices_of_a_stack_without_a_mask_or_wholly_masked(run: Run) -> None:
    """Their ends are 0, as all that is not restored."""
    image, mask = picture(4), np.zeros((4, 96, 96), bool)
    mask[0], mask[1] = block_mask((96, 96), 0), True
    metrics, images, said = run(image, mask=mask)
    low, high = images["hole_tapa_low_90"], images["hole_tapa_high_90"]
    assert not low[1:].any() and not high[1:].any() and (high[0][mask[0]] > 0).all()
    assert "results have no intervals" not in said and low[0][mask[0]].min() > 0
    assert [row["name"] for row in metrics["images"]] == ["scan[0]"]
