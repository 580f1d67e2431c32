"""Quality inside the mask, and the rows and summary of `metrics.json`.

Images are compared after normalising with the range outside the mask (`IntensityRange`), so that one intensity unit is
the input's whole known range, without outliers. Voxels whose truth is NaN or Inf have no truth: they are left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cocodiff_eval.intensity import IntensityRange

SCHEMA = 1
LINKS = ("sibling", "plane", "node", "cross_plane")
SSIM_WINDOW = 7
# JSON has no infinity: a restoration equal to the truth is written as 200 dB, one beyond all numbers as -3083 dB.
_SMALLEST_MSE, _LARGEST_MSE = 1e-20, sys.float_info.max


# What rows of several samples have besides: their number, coverages (`uncertainty.coverage`), a single one's PSNR.
OF_SAMPLES = ("samples", "coverage_50", "coverage_90", "psnr_db_single")
NOTHING: Mapping[str, float | None] = {"psnr_db": None, "ssim": None, "mse": None}  # quality without a truth


def psnr_db(mse: float) -> float:
    """Peak signal-to-noise ratio for a peak of 1, in dB; 200 where the error is zero, never infinite or NaN."""
    return -10.0 * math.log10(min(max(_SMALLEST_MSE, mse), _LARGEST_MSE) if mse == mse else _LARGEST_MSE)


def ssim_map(truth01_YX: np.ndarray, restored01_YX: np.ndarray) -> np.ndarray:
    """scikit-image's structural similarity at each voxel: window 7, data range 1. float64 [Y, X]."""
    from skimage.metrics import structural_similarity

    _, similarity_YX = structural_similarity(truth01_YX, restored01_YX, win_size=SSIM_WINDOW, data_range=1.0, full=True)
    return np.asarray(similarity_YX)


class MaskedQuality:
    """Gathers the error and the similarity of the masked voxels of a stack, slice by slice."""

    def __init__(self, scale: IntensityRange) -> None:
        self.scale = scale
        self.voxels = 0
        self.squares = 0.0
        self.similarity = 0.0

    def add(self, truth_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray) -> None:
        """Add one slice; both images in the input's units, any real dtype."""
        known_YX = np.isfinite(truth_YX)
        judged_YX = mask_YX & known_YX
        if not judged_YX.any():
            return
        restored01_YX = self.scale.normalise(restored_YX)
        # A voxel without truth takes the restored value: it neither helps nor hurts the windows around it.
        truth01_YX = np.where(known_YX, self.scale.normalise(truth_YX), restored01_YX)
        difference = (restored01_YX - truth01_YX)[judged_YX]
        self.voxels += int(difference.size)
        self.squares += float(np.square(difference).sum())
        self.similarity += float(ssim_map(truth01_YX, restored01_YX)[judged_YX].sum())

    def result(self) -> dict[str, float | None]:
        """`psnr_db`, `ssim` and `mse` over all masked voxels with a truth; None each if there were none."""
        if self.voxels == 0:
            return dict(NOTHING)
        mse = self.squares / self.voxels
        found = {"psnr_db": psnr_db(mse), "ssim": self.similarity / self.voxels, "mse": mse}
        return {name: value if math.isfinite(value) else None for name, value in found.items()}


def masked_psnr_db(
    scale: IntensityRange, truth_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray
) -> float | None:
    """`psnr_db` of `MaskedQuality` for one slice, without the similarity, which takes longer."""
    judged_YX = mask_YX & np.isfinite(truth_YX)
    difference = scale.normalise(restored_YX[judged_YX]) - scale.normalise(truth_YX[judged_YX])
    return psnr_db(float(np.square(difference).mean())) if difference.size else None


class ExactDistance:
    """Compares a restoration with the same run under an exact exchange, slice by slice."""

    def __init__(self, scale: IntensityRange) -> None:
        self.scale = scale
        self.identical = True
        self.voxels = 0
        self.squares = 0.0

    def add(self, exact_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray) -> None:
        """Add one slice; both of one dtype, in the input's units."""
        exact, restored = exact_YX[mask_YX], restored_YX[mask_YX]
        self.identical &= exact.dtype == restored.dtype and exact.tobytes() == restored.tobytes()
        self.voxels += int(exact.size)
        self.squares += float(np.square(self.scale.normalise(exact) - self.scale.normalise(restored)).sum())

    def psnr_vs_exact_db(self) -> float | None:
        """PSNR in the mask against the exact run, in dB; None if every bit is the same."""
        return None if self.identical or self.voxels == 0 else psnr_db(self.squares / self.voxels)


def metrics_row(
    name: str,
    mask: str | None,
    mode: str,
    quality: Mapping[str, float | None],
    seconds: float,
    link_bytes: Mapping[str, int],
    *,
    psnr_vs_exact_db: float | None = None,
    exact_compared: bool = True,
    baseline: Mapping[str, Any] | None = None,
    drift: Sequence[Mapping[str, float | None]] = (),
    exact_bytes: Mapping[str, int] | None = None,
    whole_bytes: Mapping[str, int] | None = None,
    late_bytes: Mapping[str, int] | None = None,
    of_samples: Mapping[str, float | None] | None = None,
    times: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One row of `metrics.json`, for one image, mask (None for a generated image) and preset.

    `seconds` is wall time. `times` may tell `rank_seconds`, those of all ranks that worked on the image, added up, and
    `replica_seconds`, those of each replica that did, by its number: replicas work at the same time.
    `exact_compared` is False where no exact run was made (`--no-exact`, or a slice that is not among those compared): a
    null `psnr_vs_exact_db` then says nothing.
    `baseline` is the biharmonic result of that image and mask: psnr_db, ssim, mse, seconds.
    `drift`, of a lossy run, and then the bytes of the exact run beside it: for each step, of V-Major, the mean relative
    change of v and the fraction of tokens that stayed; of a codec or displacement the fraction of attention calls that
    were coded and that of their tensors that were predicted linearly, which tensors were displaced, and of the bytes of
    whole tensors the fractions that were sent and that attention waited for, as large models of 16 bits have them.
    `whole_bytes`: what `link_bytes` would have been with all tokens as they are, along the same routes. `late_bytes`:
    those of `link_bytes` that no call of attention waited for, said where there were any.
    `of_samples`, where `quality` is that of the mean of several samples: the values of OF_SAMPLES. `psnr_db_single` is
    the mean of the samples' own PSNR.
    """
    row: dict[str, Any] = {
        "name": name,
        "mask": mask,
        "mode": mode,
        "psnr_db": quality["psnr_db"],
        "ssim": quality["ssim"],
        "mse": quality["mse"],
        "psnr_vs_exact_db": psnr_vs_exact_db,
        "exact_compared": exact_compared,
        "seconds": seconds,
        "bytes": {link: int(link_bytes.get(link, 0)) for link in LINKS},
    }
    row |= times or {}
    if whole_bytes is not None:
        row["bytes_whole"] = {link: int(whole_bytes.get(link, 0)) for link in LINKS}
    if late_bytes is not None and any(late_bytes.values()):
        row["bytes_late"] = {link: int(late_bytes.get(link, 0)) for link in LINKS}
    if of_samples is not None:
        row |= {name: of_samples[name] for name in OF_SAMPLES}
    if baseline is not None:
        row["baseline"] = dict(baseline)
    if drift:
        row["drift"] = [dict(step) for step in drift]
        if exact_bytes is not None:
            row["bytes_exact"] = {link: int(exact_bytes.get(link, 0)) for link in LINKS}
    return row


def json_ready(value: Any, otherwise: Callable[[float], Any] = lambda _: None) -> Any:
    """A value of lists, mappings and scalars where `otherwise` replaces infinities and NaN, which JSON has not."""
    if isinstance(value, Mapping):
        return {key: json_ready(one, otherwise) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(one, otherwise) for one in value]
    return otherwise(value) if isinstance(value, float) and not math.isfinite(value) else value


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; None if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the images for each mask and preset, and of the biharmonic baseline for each mask.

    `{"rows": [{"mask", "mode", "n", "psnr_db", "ssim", "mse", "psnr_vs_exact_db", "compared", "identical", "seconds",
    "bytes"}],
    "baseline": [{"mask", "method", "n", "psnr_db", "ssim", "mse", "seconds"}]}`. `psnr_vs_exact_db` is the mean over
    the images whose bits differ, `identical` the number of images whose bits are those of the exact run, of those
    `compared` with one. Means of OF_SAMPLES are there where images have them.
    """
    groups: dict[tuple[str | None, str], list[Mapping[str, Any]]] = {}
    baselines: dict[str | None, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["mask"], row["mode"]), []).append(row)
        if row.get("baseline") is not None:
            baselines.setdefault(row["mask"], {})[row["name"]] = row["baseline"]
    quality = ("psnr_db", "ssim", "mse")
    means = [
        {
            "mask": mask,
            "mode": mode,
            "n": len(group),
            **{key: mean([row[key] for row in group]) for key in (*quality, "psnr_vs_exact_db", "seconds")},
            **means_of_samples(group),
            "compared": sum(row.get("exact_compared", True) for row in group),
            "identical": sum(row.get("exact_compared", True) and row["psnr_vs_exact_db"] is None for row in group),
            "bytes": {link: sum(row["bytes"][link] for row in group) for link in LINKS},
        }
        for (mask, mode), group in groups.items()
    ]
    baseline = [
        {
            "mask": mask,
            "method": "biharmonic",
            "n": len(by_name),
            **{key: mean([one[key] for one in by_name.values()]) for key in (*quality, "seconds")},
        }
        for mask, by_name in baselines.items()
    ]
    return {"rows": means, "baseline": baseline}


def means_of_samples(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means of OF_SAMPLES over rows of one run; empty where it made one sample of each image."""
    found = {key: mean([row.get(key) for row in rows]) for key in OF_SAMPLES}
    return {**found, "samples": rows[0]["samples"]} if found["samples"] is not None else {}


def metrics_document(config: Mapping[str, Any], ranks: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole of `metrics.json`. A setting that JSON has no number for is text: "inf"."""
    rows = [json_ready(row) for row in rows]
    return {
        "schema": SCHEMA,
        "config": {name: json_ready(value, str) for name, value in config.items()},
        "ranks": ranks,
        "images": rows,
        "summary": summary(rows),
    }
