"""Volumes restored along several axes: results, hidden regions, going on, replicas, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from killed_runs import Killed, results
from warm import forked

from cocodiff.cli.main import main

SHAPE = (20, 32, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume of slow changes, a mask of two holes, and one of whole slices."""
    path = tmp_path_factory.mktemp("input")
    z, y, x = np.mgrid[tuple(slice(side) for side in SHAPE)]
    volume = 0.5 + 0.3 * np.sin(x / 3 + z / 9) * np.cos(y / 4) + 0.02 * np.random.default_rng(0).normal(size=SHAPE)
    tifffile.imwrite(path / "scan.tif", (np.clip(volume, 0, 1) * 60000).astype(np.uint16), photometric="minisblack")
    others = {
        "lines": np.broadcast_to(np.random.default_rng(0).random(SHAPE[1:]), SHAPE),
        "noise": 0.5 + 0.1 * np.random.default_rng(1).normal(size=SHAPE),
    }
    for name, other in others.items():
        tifffile.imwrite(
            path / f"{name}.tif", (np.clip(other, 0, 1) * 60000).astype(np.uint16), photometric="minisblack"
        )
    holes = np.zeros(SHAPE, np.uint8)
    holes[4:10, 5:13, 6:15] = holes[11:17, 18:26, 22:31] = 255
    tifffile.imwrite(path / "holes.tif", holes, photometric="minisblack")
    slab = np.zeros(SHAPE, np.uint8)
    slab[8:11] = 255
    tifffile.imwrite(path / "slab.tif", slab, photometric="minisblack")
    return path


def words(folder: Path, out: Path, *more: Any, mask: str = "holes", name: str = "scan") -> list[str]:
    fixed = ("--input", folder / f"{name}.tif", "--truth", folder / f"{name}.tif", "--mask", folder / f"{mask}.tif")
    return [str(word) for word in ("inpaint", *fixed, "--steps", 2, "--quiet", "--no-exact", "--out", out, *more)]


def image(out: Path, end: str, mask: str = "holes", name: str = "scan") -> np.ndarray:
    return np.asarray(tifffile.imread(out / "images" / f"{name}_{mask}_tapa{end}.tif"))


@pytest.mark.full
@pytest.mark.processes
def test_axes_weights_and_intervals_are_learnt_on_hidden_regions(folder: Path, tmp_path: Path) -> None:
    """By default, of several samples of a volume; killed between, and gone on with in two replicas."""
    done = forked(*words(folder, tmp_path / "whole", "--samples", 3, "--keep_samples"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Killed(
        tmp_path, words(folder, tmp_path / "out", "--samples", 3, "--keep_samples", "--ranks", 2, "--replicas", 2)
    )
    os.killpg(run.process.pid, signal.SIGKILL)
    run.end()
    again = words(folder, tmp_path / "out", "--samples", 3, "--keep_samples", "--ranks", 1, "--resume")
    gone_on = forked(*again, folder=tmp_path)
    assert gone_on.returncode == 0, gone_on.stderr
    assert "going on:" in gone_on.stdout and results(tmp_path / "out") == results(tmp_path / "whole")

    metrics = json.loads((tmp_path / "whole" / "metrics.json").read_text())
    (volume,) = metrics["volumes"]
    assert sum(volume["axes"].values()) == pytest.approx(1, abs=0.01) and volume["hidden_regions"] > 1
    figures = volume["hidden_psnr_db"]
    assert {"cocodiff", "biharmonic", "linear across z", "Laplace in 3-D"} <= {*figures}
    assert (
        f"on {volume['hidden_regions']} hidden regions of this volume: cocodiff {figures['cocodiff']:.1f} dB"
        in done.stdout
    )
    assert volume["verdict"] in done.stdout and volume["verdict"] in (tmp_path / "whole" / "report.html").read_text()
    original, mask = (tifffile.imread(folder / f"{name}.tif") for name in ("scan", "holes"))
    pairs = (mask[1:] > 0) | (mask[:-1] > 0)
    own, true = (
        np.abs(np.diff(one.astype(float), axis=0))[pairs].mean() for one in (image(tmp_path / "whole", ""), original)
    )
    (jump,) = metrics["jumps"]
    shells = [jump.pop(name) for name in ("frc", "resolution")]
    assert jump == {"name": "scan", "mask": "holes", "mode": "tapa", "slice_jump": pytest.approx(own / true)}
    assert len(shells[0]) == 32 and shells[1] is None  # holes of 6 x 8 x 9 voxels tell no resolution
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "<th>jump between slices</th>" in page and f">{own / true:.2f}<" in page and "  jump  " in done.stdout
    (block,) = re.findall(r'<script type="application/json" class="voxels" data-series="0">(.*?)</script>', page)
    shown = json.loads(block)
    assert shown["shape"] == [*SHAPE] and mask[tuple(shown["at"])]
    assert [layer["name"] for layer in shown["layers"]] == [
        "tapa",
        "tapa: low 90 %",
        "tapa: high 90 %",
        "tapa: uncertainty",
    ]
    low, mean, high = (image(tmp_path / "whole", name) for name in ("_low_90", "", "_high_90"))
    samples = [image(tmp_path / "whole", f"_sample_{number}") for number in range(3)]
    for one in (low, mean, high, *samples):
        assert one.dtype == original.dtype and one[mask == 0].tobytes() == original[mask == 0].tobytes()
    assert (low <= mean).all() and (mean <= high).all() and (low < high)[mask > 0].all()
    inside = (low <= original) & (original <= high)
    of_rows = [row["coverage_90"] * np.count_nonzero(mask[n]) for row in metrics["images"] for n in [number(row)]]
    assert sum(of_rows) / np.count_nonzero(mask) == pytest.approx(inside[mask > 0].mean(), abs=0.01)


def number(row: dict[str, Any]) -> int:
    return int(row["name"].split("[")[1][:-1])


def test_the_mean_along_axes_is_that_of_the_samples(folder: Path, tmp_path: Path) -> None:
    more = ("--axes", "z", "y", "x", "--no_hidden_test", "--samples", 3, "--keep_samples")
    assert main(words(folder, tmp_path / "out", *more)) == 0
    samples = [image(tmp_path / "out", f"_sample_{number}").astype(float) for number in range(3)]
    mean, spread, mask = (
        image(tmp_path / "out", ""),
        image(tmp_path / "out", "_std"),
        tifffile.imread(folder / "holes.tif"),
    )
    assert np.abs(np.mean(samples, axis=0) - mean).max() <= 1
    np.testing.assert_allclose(spread[mask > 0], np.std(samples, axis=0, ddof=1)[mask > 0], atol=2)
    assert not (tmp_path / "out" / "images" / "scan_holes_tapa_low_90.tif").exists()
    (volume,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["volumes"]
    assert volume["axes"] == pytest.approx(dict.fromkeys("zyx", 1 / 3), abs=1e-4) and volume["verdict"] is None
    # the sample along z is what a job along z alone makes
    assert main(words(folder, tmp_path / "one", "--axes", "z")) == 0
    assert image(tmp_path / "one", "").tobytes() == samples[0].astype(np.uint16).tobytes()
    assert "volumes" not in json.loads((tmp_path / "one" / "metrics.json").read_text())


@pytest.mark.full
def test_slices_that_are_masked_wholly_are_restored_along_other_axes(folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, tmp_path / "out", "--samples", 2, mask="slab")) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    (volume,) = metrics["volumes"]
    assert {*volume["axes"]} & {"y", "x"} and "biharmonic" not in volume["hidden_psnr_db"]
    assert [number(row) for row in metrics["images"]] == [8, 9, 10]
    original = tifffile.imread(folder / "scan.tif")
    restored = image(tmp_path / "out", "", "slab")
    assert restored[8:11].std() > 0 and (restored[8:11] != original[8:11]).mean() > 0.9
    assert np.delete(restored, [8, 9, 10], axis=0).tobytes() == np.delete(original, [8, 9, 10], axis=0).tobytes()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mask", "method", "least_db"),
    [("lines", "holes", "linear across z", 90.0), ("noise", "slab", "total variation in 3-D", 16.5)],
)
def test_the_mean_leans_on_a_method_without_a_model_that_is_better(
    folder: Path, tmp_path: Path, name: str, mask: str, method: str, least_db: float
) -> None:
    """Also where it hardly errs: then it is the mean."""
    more = ("--samples", 2, "--axes", "y", "x")
    assert main(words(folder, tmp_path / "out", *more, mask=mask, name=name)) == 0
    (volume,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["volumes"]
    figures, weights = volume["hidden_psnr_db"], volume["weights"]
    assert figures[method] > figures["the model alone"] and weights[method] == max(weights.values())
    restored, original = image(tmp_path / "out", "", mask, name), tifffile.imread(folder / f"{name}.tif")
    hidden = tifffile.imread(folder / f"{mask}.tif") > 0
    error = (restored.astype(float) - original)[hidden] / np.ptp(original[~hidden].astype(float))
    assert -10 * np.log10(np.mean(error**2) + 1e-20) > max(least_db, figures["the model alone"])
    assert restored[~hidden].tobytes() == original[~hidden].tobytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("slices", ["3:4", "0:5", ""])
def test_a_mask_that_is_the_same_in_every_slice_is_tested_along_z(folder: Path, tmp_path: Path, slices: str) -> None:
    """Also of one slice, and of fewer than other axes need, where it is asked for; of many by default."""
    cells = np.zeros(SHAPE[1:], np.uint8)
    cells[6:14, 8:16] = cells[20:26, 24:32] = 255
    tifffile.imwrite(folder / "cells.tif", cells)
    more = ("--hidden_test", "--slices", slices) if slices else ()
    assert main(words(folder, tmp_path / "out", "--samples", 2, *more, mask="cells")) == 0
    (volume,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["volumes"]
    assert [*volume["axes"]] == ["z"] and volume["hidden_regions"] > 1 and "biharmonic" in volume["hidden_psnr_db"]
    assert f"hidden regions of this {'slice' if slices == '3:4' else 'volume'}: " in volume["verdict"]
    low, mean, high = (image(tmp_path / "out", name, "cells") for name in ("_low_90", "", "_high_90"))
    assert (low <= mean).all() and (mean <= high).all() and (low < high)[..., cells > 0].all()
    original = tifffile.imread(folder / "scan.tif")[slice(*map(int, slices.split(":"))) if slices else ...]
    assert mean[..., cells == 0].tobytes() == original[..., cells == 0].tobytes()


def test_what_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*more: Any, mask: str = "holes") -> str:
        capsys.readouterr()
        given = [word for word in words(folder, tmp_path / "out", *more, mask=mask) if word != "--no-exact"]
        assert main(given) == 2
        return capsys.readouterr().err

    assert "axes 'w'" in refused("--axes", "w")
    assert "auto chooses among all axes: name it alone" in refused("--axes", "auto", "z")
    assert "--samples 1: 2 axes need a sample each" in refused("--axes", "z", "y")
    assert "--axes auto chooses by hidden regions" in refused("--axes", "auto", "--no_hidden_test")
    assert "--quality chooses a setting slice by slice" in refused("--axes", "y", "--quality", "50dB")
    assert "slices along y need 16 x 16 at least: restore it along z" in refused("--axes", "y", "--slices", "0:10")
    assert "nothing is left to restore from" in refused("--axes", "z", mask="slab")
