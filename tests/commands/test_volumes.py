"""Volumes restored along several axes: results, hidden regions, going on, replicas, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from cocodiff_eval.restore.baseline import METHODS, UNTESTED
from killed_runs import results
from scipy import ndimage
from warm import forked

from cocodiff.cli.main import main

SHAPE = (20, 32, 40)
HOLES, SLAB, CELLS, COMB = (np.zeros(SHAPE, np.uint8) for _ in range(4))
HOLES[4:10, 5:13, 6:15] = HOLES[11:17, 18:26, 22:31] = 255
SLAB[8:11] = 255
CELLS[:, 6:14, 8:16] = CELLS[:, 20:26, 24:32] = 255
COMB[1::2] = 255
MASKS = {"holes": HOLES, "slab": SLAB, "cells": CELLS, "comb": COMB}


def scans() -> dict[str, np.ndarray]:
    """Make a volume of slow changes, one of random cells, one that is the same in all slices, and noise."""
    z, y, x = np.mgrid[tuple(slice(side) for side in SHAPE)]
    random, other = np.random.default_rng(0), np.random.default_rng(1)
    lines = np.broadcast_to(random.random(SHAPE[1:]), SHAPE)
    scan = 0.5 + 0.3 * np.sin(x / 3 + z / 9) * np.cos(y / 4) + 0.02 * random.normal(size=SHAPE)
    cells = ndimage.gaussian_filter(np.random.default_rng(3).normal(size=SHAPE), 2) > 0
    edges = 0.3 + 0.4 * cells + 0.02 * np.random.default_rng(9).normal(size=SHAPE)
    found = {"scan": scan, "edges": edges, "lines": lines, "noise": 0.5 + 0.1 * other.normal(size=SHAPE)}
    return {name: (np.clip(volume, 0, 1) * 60000).astype(np.uint16) for name, volume in found.items()}


SCANS = scans()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input")
    for name, volume in {**SCANS, **MASKS, "cells": CELLS[0]}.items():
        tifffile.imwrite(path / f"{name}.tif", volume, photometric="minisblack")
    return path


def words(folder: Path, out: Path, *more: Any, mask: str = "holes", name: str = "scan") -> list[str]:
    fixed = ("--input", folder / f"{name}.tif", "--truth", folder / f"{name}.tif", "--mask", folder / f"{mask}.tif")
    return [str(word) for word in ("inpaint", *fixed, "--steps", 2, "--quiet", "--no-exact", "--out", out, *more)]


def metrics_of(out: Path) -> Any:
    return json.loads((out / "metrics.json").read_text())


def image(out: Path, end: str, mask: str = "holes", name: str = "scan") -> np.ndarray:
    """Read a result, and check that known voxels have their bits in it, or are 0 in a file beside the mean."""
    found = np.asarray(tifffile.imread(out / "images" / f"{name}_{mask}_tapa{end}.tif"))
    if len(found) == len(SCANS[name]):
        known, beside = MASKS[mask] == 0, end in ("_low_90", "_high_90", "_spread")
        assert not found[known].any() if beside else found[known].tobytes() == SCANS[name][known].tobytes()
    return found


def number(row: dict[str, Any]) -> int:
    return int(row["name"].split("[")[1][:-1])


@pytest.mark.full
def test_axes_weights_and_intervals_are_learnt_on_hidden_regions(folder: Path, tmp_path: Path) -> None:
    """By default, of several samples of a volume; two replicas make the same bits."""
    whole, out, samples = tmp_path / "whole", tmp_path / "out", ("--samples", 3, "--keep_samples")
    done = forked(*words(folder, whole, *samples, name="edges"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    gone = forked(*words(folder, out, *samples, "--ranks", 2, "--replicas", 2, name="edges"), folder=tmp_path)
    assert gone.returncode == 0 and results(out) == results(whole), gone.stderr
    metrics, page = metrics_of(whole), (whole / "report.html").read_text()
    (volume,), original, hidden = metrics["volumes"], SCANS["edges"], HOLES > 0
    assert sum(volume["axes"].values()) == pytest.approx(1, abs=0.01) and volume["hidden_regions"] > 1
    figures = volume["hidden_psnr_db"]
    assert {"cocodiff", "biharmonic", "linear across z", "Laplace in 3-D"} <= {*figures}
    assert f"on {volume['hidden_regions']} hidden regions of this volume" in done.stdout
    assert f"cocodiff {figures['cocodiff']:.1f} dB" in done.stdout
    assert volume["verdict"] in done.stdout and volume["verdict"] in page
    low, mean, high = (image(whole, end, name="edges") for end in ("_low_90", "", "_high_90"))
    samples = [image(whole, f"_sample_{number}", name="edges") for number in range(3)]
    assert not np.array_equal(samples[0], samples[1])
    assert all(one.dtype == original.dtype for one in (low, mean, high, *samples))
    assert (low <= mean).all() and (mean <= high)[hidden].all() and (low < high)[hidden].all()
    pairs = hidden[1:] | hidden[:-1]
    own, true = (np.abs(np.diff(one.astype(float), axis=0))[pairs].mean() for one in (mean, original))
    (jump,) = metrics["jumps"]
    assert jump["slice_jump"] == pytest.approx(own / true) and f">{own / true:.2f}<" in page
    assert len(jump["frc"]) == 32 and jump["resolution"] is None  # holes of 6 x 8 x 9 voxels tell no resolution
    assert '"shape":[20,32,40]' in page and "tapa: low 90 %" in page and "tapa: uncertainty" in page
    inside = (low <= original) & (original <= high)
    of_rows = [row["coverage_90"] * np.count_nonzero(hidden[number(row)]) for row in metrics["images"]]
    assert sum(of_rows) / np.count_nonzero(hidden) == pytest.approx(inside[hidden].mean(), abs=0.01)


def test_the_mean_along_axes_is_that_of_the_samples(folder: Path, tmp_path: Path) -> None:
    """And the sample along z is what a job along z alone makes."""
    out, more = tmp_path / "out", ("--axes", "z", "y", "x", "--no_hidden_test", "--samples", 3, "--keep_samples")
    assert main(words(folder, out, *more)) == 0
    samples = [image(out, f"_sample_{number}").astype(float) for number in range(3)]
    assert np.abs(np.mean(samples, axis=0) - image(out, "")).max() <= 1
    spread, hidden = image(out, "_spread"), HOLES > 0
    np.testing.assert_allclose(spread[hidden], np.std(samples, axis=0, ddof=1)[hidden], atol=2)
    assert not (out / "images" / "scan_holes_tapa_low_90.tif").exists()
    assert "tapa: uncertainty" not in (out / "report.html").read_text()
    assert all(row["uncertainty"] is None for row in metrics_of(out)["images"])
    (volume,) = metrics_of(out)["volumes"]
    assert volume["axes"] == pytest.approx(dict.fromkeys("zyx", 1 / 3), abs=1e-4) and volume["verdict"] is None
    assert main(words(folder, tmp_path / "one", "--axes", "z")) == 0
    assert (image(tmp_path / "one", "") == samples[0]).all() and "volumes" not in metrics_of(tmp_path / "one")


def test_samples_along_another_axis_have_noise_of_their_own(tmp_path: Path) -> None:
    """Of a volume whose slices along y are those along z."""
    volume, mask = np.zeros((2, 20, 20, 40), np.uint16)
    volume[:], mask[4:12, 4:12, 8:20] = 1000 * np.arange(40), 1
    for name, voxels in (("scan", volume), ("holes", mask)):
        tifffile.imwrite(tmp_path / f"{name}.tif", voxels, photometric="minisblack")
    more = ("--axes", "z", "y", "--no_hidden_test", "--samples", 2, "--keep_samples")
    assert main(words(tmp_path, tmp_path / "out", *more)) == 0
    files = (tmp_path / "out" / "images" / f"scan_holes_tapa_sample_{number}.tif" for number in range(2))
    along_z, along_y = map(tifffile.imread, files)
    assert not np.array_equal(along_z, along_y.transpose(1, 0, 2))


@pytest.mark.full
def test_slices_that_are_masked_wholly_are_restored_along_other_axes(folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, tmp_path / "out", "--samples", 2, "--axes", "auto", mask="slab")) == 0
    metrics = metrics_of(tmp_path / "out")
    (volume,) = metrics["volumes"]
    assert "z" not in volume["axes"] and "biharmonic" not in volume["hidden_psnr_db"]
    assert [number(row) for row in metrics["images"]] == [8, 9, 10]
    restored = image(tmp_path / "out", "", "slab")[8:11]
    assert restored.std() > 0 and (restored != SCANS["scan"][8:11]).mean() > 0.9


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mask", "method", "least_db"),
    [("lines", "holes", "linear across z", 90.0), ("noise", "slab", "autoregression in 3-D, 1 voxel", 16.5)],
)
def test_the_mean_leans_on_a_method_without_a_model_that_is_better(
    folder: Path, tmp_path: Path, name: str, mask: str, method: str, least_db: float
) -> None:
    """Also where it hardly errs: then it is the mean."""
    assert main(words(folder, tmp_path / "out", "--samples", 2, "--axes", "y", "x", mask=mask, name=name)) == 0
    (volume,) = metrics_of(tmp_path / "out")["volumes"]
    figures, weights = volume["hidden_psnr_db"], volume["weights"]
    assert figures[method] > figures["the model alone"] and weights[method] == max(weights.values())
    restored, original, hidden = image(tmp_path / "out", "", mask, name), SCANS[name], MASKS[mask] > 0
    error = (restored.astype(float) - original)[hidden] / np.ptp(original[~hidden].astype(float))
    assert -10 * np.log10(np.mean(error**2) + 1e-20) > max(least_db, figures["the model alone"])


def test_nothing_is_sampled_where_a_method_without_a_model_is_ahead(folder: Path, tmp_path: Path) -> None:
    """What it makes is the result and each of its samples; the test's time is in that of the job."""
    assert main(words(folder, tmp_path / "out", "--samples", 3, "--keep_samples", name="lines")) == 0
    (volume,), rows = metrics_of(tmp_path / "out")["volumes"], metrics_of(tmp_path / "out")["images"]
    assert volume["axes"] == {} and volume["weights"]["linear across z"] == 1
    assert volume["hidden_psnr_db"]["cocodiff"] == volume["hidden_psnr_db"]["linear across z"]
    mean, *samples = (image(tmp_path / "out", end, name="lines") for end in ("", "_sample_0", "_sample_1", "_sample_2"))
    assert all(np.array_equal(mean, one) for one in samples)
    assert not image(tmp_path / "out", "_spread", name="lines").any()
    assert all(row["seconds"] > 0 for row in rows)


def test_methods_without_a_model_are_written_where_nothing_can_be_hidden(folder: Path, tmp_path: Path) -> None:
    """The mean of three, as nothing speaks for the model; of every second slice no autoregression is learnt."""
    assert main(words(folder, tmp_path / "out", "--samples", 3, "--keep_samples", mask="comb")) == 0
    found = metrics_of(tmp_path / "out")
    (volume,), ((outcome,), known) = found["volumes"], (found["outcomes"], COMB == 0)
    assert volume["weights"] == pytest.approx(dict.fromkeys(UNTESTED, 1 / 3), abs=1e-3)
    assert volume["hidden_regions"] == 0 and outcome["kind"] == "unknown"
    mean, sample = (image(tmp_path / "out", end, mask="comb") for end in ("", "_sample_1"))
    made = [METHODS[name].solve(np.where(known, SCANS["scan"], 0) / 60000, ~known) for name in UNTESTED]
    assert np.abs(mean / 60000 - np.nanmean(made, axis=0)).max() < 1e-3 and np.array_equal(mean, sample)
    assert np.ptp(mean[~known]) > 0.2 * np.ptp(SCANS["scan"][~known])


@pytest.mark.sample(1)
@pytest.mark.parametrize("slices", [slice(3, 4), slice(0, 5), None])
def test_a_mask_that_is_the_same_in_every_slice_is_tested_along_z(
    folder: Path, tmp_path: Path, slices: slice | None
) -> None:
    """Also of one slice, and of fewer than other axes need, where it is asked for; of many by default."""
    more = ("--hidden_test", "--slices", f"{slices.start}:{slices.stop}") if slices else ()
    assert main(words(folder, tmp_path / "out", "--samples", 2, *more, mask="cells")) == 0
    (volume,) = metrics_of(tmp_path / "out")["volumes"]
    figures = volume["hidden_psnr_db"]
    assert {*volume["axes"]} <= {"z"} and not any("along" in name for name in figures)
    assert volume["hidden_regions"] > 1 and "biharmonic" in figures
    assert f"hidden regions of this {'slice' if slices == slice(3, 4) else 'volume'}: " in volume["verdict"]
    low, mean, high = (image(tmp_path / "out", name, "cells") for name in ("_low_90", "", "_high_90"))
    known = CELLS[0] == 0
    assert (low <= mean).all() and ((mean <= high) & (low < high))[..., ~known].all()
    assert mean[..., known].tobytes() == SCANS["scan"][slices or slice(None)][..., known].tobytes()
