"""Files that have to belong together: a truth and its input, a mask and its input, the slices of a sequence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.intensity import compare_truth, intensity_range
from cocodiff_eval.data.masks import make_mask
from cocodiff_eval.data.slices import open_stack, open_truth
from cocodiff_eval.harness.quality import Bound
from cocodiff_eval.harness.slices import SliceJob
from eval_helpers import CASES
from scipy.ndimage import gaussian_filter

from cocodiff.cli.main import main
from cocodiff.config.errors import UserError

RNG = np.random.default_rng(0)
SHAPE = (20, 48, 64)


def smooth() -> np.ndarray:
    found = gaussian_filter(RNG.normal(size=SHAPE), 3, mode="wrap")
    return (1000 + 59000 * (found - found.min()) / np.ptp(found)).astype(np.uint16)


SCAN, ANOTHER = smooth(), smooth()
NOISY = np.clip(SCAN + RNG.normal(size=SHAPE) * 6000, 0, 65535).astype(np.uint16)
HOT = SCAN.copy()
HOT[:, 40, 50] = 65535
HOLES = np.zeros(SHAPE, np.uint8)
HOLES[:, 10:26, 12:36] = 255
KNOWN = int((HOLES == 0).sum())


def remarks(path: Path, scan: np.ndarray, truth: np.ndarray, holes: np.ndarray = HOLES) -> list[str]:
    """Write all three, and return what is told of the truth."""
    for name, volume in (("scan", scan), ("holes", holes[: len(scan)] if scan.ndim == 3 else holes[0])):
        tifffile.imwrite(path / f"{name}.tif", volume, photometric="minisblack")
    np.save(path / "truth.npy", truth)
    stack = open_stack(str(path / "scan.tif"))
    mask = make_mask(str(path / "holes.tif"), stack)
    truth_stack = open_truth(str(path / "truth.npy"), stack)
    return list(compare_truth(truth_stack, stack, mask, intensity_range(stack, mask)).metadata.remarks)


OTHERS: dict[str, tuple[np.ndarray, str]] = {
    "0 to 1": ((SCAN / 65535).astype(np.float32), "looks like 65535 times the truth"),
    "8 bits": (SCAN >> 8, r"looks like 25[56]\.\d+ times the truth"),
    "offset": (SCAN + np.int64(5000), r" 5000\b.* 1 times the truth -5000"),
    "inverted": (65535 - SCAN, r"looks like -1 times the truth \+65535"),
    "x": (SCAN[..., ::-1], "it looks mirrored along x;"),
    "y": (SCAN[:, ::-1], "it looks mirrored along y;"),
    "z": (SCAN[::-1], "it looks mirrored along z;"),
    "x and y": (SCAN[:, ::-1, ::-1], "it looks mirrored along y and x;"),
    "y, scaled": (SCAN[:, ::-1] / 65535, "it looks mirrored along y;"),
    "another": (ANOTHER, r"little in common \(correlation 0.0\d\)"),
    "zero outside": (np.where(HOLES > 0, SCAN, 0), r"little in common \(correlation 0.00\)"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ndim", [2, 3])
def test_a_truth_of_something_else_is_refused(tmp_path: Path, name: str, ndim: int) -> None:
    truth, told = OTHERS[name]
    scan, truth = (SCAN, truth) if ndim == 3 else (SCAN[9], truth[9 if name != "z" else 0])
    with pytest.raises(UserError, match=r"truth\.npy is not the truth of .*scan\.tif: outside the mask [\d,]+") as it:
        remarks(tmp_path, scan, truth)
    assert "\n" not in str(it.value)
    if ndim == 3 or name not in ("z", "another"):
        it.match(told)


NAN_OUTSIDE = np.where(HOLES > 0, SCAN.astype(np.float32), np.nan)
LEGITIMATE: dict[str, tuple[np.ndarray, np.ndarray, int]] = {
    "the same": (SCAN, SCAN, 0),
    "in floats, before rounding": (SCAN, SCAN + 0.99, 0),
    "NaN where it is not known": (SCAN, NAN_OUTSIDE, 0),
    "other voxels under the mask": (SCAN, np.where(HOLES > 0, ANOTHER, SCAN), 0),
    "of a constant input": (np.full(SHAPE, 7), np.full(SHAPE, 7), 0),
    "without hot voxels": (HOT, SCAN, 20),
    "without noise": (NOISY, SCAN, KNOWN),
    "denoised": (NOISY, gaussian_filter(NOISY, 1.5), KNOWN),
    "of little gain": (SCAN, SCAN + np.int64(500), KNOWN),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_a_truth_with_other_known_voxels_is_taken_and_told(tmp_path: Path, name: str) -> None:
    scan, truth, differ = LEGITIMATE[name]
    found = remarks(tmp_path, scan.astype(np.uint16), truth)
    assert len(found) == (differ > 0)
    if differ:
        (told,) = found
        largest = np.nanmax(np.abs(scan.astype(np.uint16) - truth.astype(np.float64))[HOLES == 0])
        assert told.startswith(f"{tmp_path / 'truth.npy'}: outside the mask ")
        assert f" {largest:.6g})" in told
        count = int(told.split("outside the mask ")[1].split(" of ")[0].replace(",", ""))
        assert 0.95 * differ <= count <= differ and f" of {KNOWN:,} voxels differ" in told


@pytest.mark.parametrize("number", [0, 2, 19])
def test_nothing_is_asked_of_slices_that_are_masked_wholly(tmp_path: Path, number: int) -> None:
    scan, holes = SCAN.copy(), HOLES.copy()
    scan[number], holes[number] = 0, 255
    assert remarks(tmp_path, scan, SCAN, holes) == []


@pytest.mark.parametrize("command", ["inpaint", "sweep"])
def test_commands_tell_it_before_they_begin(tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    remarks(tmp_path, SCAN[:2], SCAN[:2] + np.int64(500))
    files = {name: str(tmp_path / f"{name}") for name in ("scan.tif", "holes.tif", "truth.npy", "out", "grid.yaml")}
    (tmp_path / "grid.yaml").write_text("grid: {preset: [flat]}\n")
    words = ["--input", files["scan.tif"], "--mask", files["holes.tif"], "--truth", files["truth.npy"]]
    words += ["--out", files["out"], "--dry_run", *(["--config", files["grid.yaml"]] if command == "sweep" else [])]
    assert main([command, *words]) == 0
    assert f"{files['truth.npy']}: outside the mask 5,376 of 5,376 voxels differ" in capfd.readouterr().out
    np.save(tmp_path / "truth.npy", SCAN[:2] + np.int64(5000))
    assert main([command, *words]) == 2
    assert "is not the truth of" in capfd.readouterr().err and not (tmp_path / "out").exists()


def saved(path: Path, volume: np.ndarray, per_cm: float | None = None, **more: Any) -> str:
    size = {} if per_cm is None else {"resolution": (per_cm, 10000.0), "resolutionunit": 3}
    tifffile.imwrite(path, volume, photometric="minisblack", **size, **more)
    return str(path)


@pytest.mark.parametrize("per_cm", [20000.0, 9600.0, 10000.0, 10001.0, None])
def test_a_mask_with_other_voxels_is_told(tmp_path: Path, per_cm: float | None) -> None:
    stack = open_stack(saved(tmp_path / "scan.tif", SCAN, 10000))
    path = saved(tmp_path / "holes.tif", HOLES, per_cm)
    sides = f"1 x {10000 / (per_cm or 1):.4g}"
    mask, told = make_mask(path, stack), per_cm in (20000, 9600)

    def tells(line: str) -> bool:
        return line.startswith(path) and all(word in line for word in (f" {sides} micrometer", stack.path, " 1 x 1"))

    assert [*map(tells, mask.remarks)] == [True] * told
    path = saved(tmp_path / "truth.tif", SCAN, per_cm)
    truth = compare_truth(open_truth(path, stack), stack, mask, intensity_range(stack, mask))
    assert [*map(tells, truth.metadata.remarks)] == [True] * told


@pytest.mark.parametrize(("changes", "word"), CASES["another scan"].values(), ids=CASES["another scan"])
def test_a_sequence_of_two_scans_is_told(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    about = {"per_cm": 10000.0, "software": "recon 3", "datetime": "2026:01:05 10:00:00"}
    for number, image_YX in enumerate(SCAN[:6]):
        more = about | {"description": f"tooth, slice {number}"} | (changes if number >= 3 else {})
        saved(tmp_path / f"recon_{number:02}.tif", image_YX, metadata=None, **more)
    first, other = (str(tmp_path / f"recon_{number:02}.tif") for number in (0, 3))
    found = [one for one in open_volume(str(tmp_path)).metadata.remarks if other in one]
    assert len(found) == bool(word) and all(f" {word} " in one and first in one for one in found)


@pytest.mark.parametrize(("before", "after", "distance", "loss"), [
    (20.0, 19.5, 40.0, 0.5), (None, None, 40.0, 200.0), (None, None, None, None)
])  # fmt: skip
def test_a_loss_that_no_truth_shows_keeps_no_bound(
    before: float | None, after: float | None, distance: float | None, loss: float | None
) -> None:
    known = {"exact": before, "other": after}
    seen = SimpleNamespace(psnr_db=known.get, psnr_vs_exact_db=lambda exact, one: distance)
    job: Any = SimpleNamespace(_seen=lambda batch: [seen])
    bound = Bound.parse("0.6dB")
    assert SliceJob.figure_db(job, bound, None, 0, "exact", "other") == loss  # type: ignore[arg-type]
    assert bound.keeps(loss) is (loss != 200)
