"""Quality inside the mask, and the rows and summary of `metrics.json`.

Images are compared after normalising with the range outside the mask (`IntensityRange`). One intensity unit is then the
input's whole known range, without outliers. Voxels whose truth is NaN or Inf have no truth and are left out.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from cocodiff.config.grouping import by_key
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.volume import Progress, unwatched

SCHEMA = 1  # version number of metrics.json
LINKS = ("sibling", "plane", "node", "cross_plane")  # kinds of links that bytes are counted for
SSIM_WINDOW = 7
# JSON has no infinity: a restoration equal to the truth is written as 200 dB, one beyond all numbers as -3083 dB.
_SMALLEST_MSE, _LARGEST_MSE = 1e-20, sys.float_info.max


def psnr_db(mse: float) -> float:
    """Return the peak signal-to-noise ratio in dB for a peak of 1; 200 for no error, and never infinite or NaN.

    Args:
        mse: mean squared error.
    """
    return -10.0 * math.log10(min(max(_SMALLEST_MSE, mse), _LARGEST_MSE) if mse == mse else _LARGEST_MSE)


def masked_quality(
    scale: IntensityRange, truth_YX: np.ndarray | None, restored_YX: np.ndarray, mask_YX: np.ndarray
) -> dict[str, Any]:
    """Return `psnr_db`, `ssim` and `mse` of a restored slice, over its masked voxels whose truth is known.

    Each is None if there are no such voxels. If the range is zero, as for a constant slice, there is no unit to compare
    in, and `psnr_db` and `ssim` are None.

    Args:
        scale: the range that normalises the images.
        truth_YX: in the input's units, of any real dtype; None if unknown.
        restored_YX: the same for the restored slice.
        mask_YX: True for restored voxels.
    """
    if truth_YX is None or not (mask_YX & np.isfinite(truth_YX)).any():
        return dict.fromkeys(QUALITY)
    from skimage.metrics import structural_similarity

    known_YX, restored01_YX = np.isfinite(truth_YX), scale.normalise(restored_YX)
    # A voxel without truth takes the restored value: it neither helps nor hurts the windows around it.
    truth01_YX = np.where(known_YX, scale.normalise(truth_YX), restored01_YX)
    judged_YX = mask_YX & known_YX
    difference = (restored01_YX - truth01_YX)[judged_YX]
    mse = float(np.square(difference).sum()) / difference.size
    _, similarity_YX = structural_similarity(truth01_YX, restored01_YX, win_size=SSIM_WINDOW, data_range=1.0, full=True)
    similarity = float(similarity_YX[judged_YX].sum()) / difference.size
    judged = {"psnr_db": psnr_db(mse), "ssim": similarity} if scale.high > scale.low else {}
    found = {**dict.fromkeys(QUALITY, math.nan), **judged, "mse": mse}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


RINGS = 32  # number of rings of a ring correlation, evenly from frequency 0 to half a period a voxel
# voxels at most over which the mask's weight rises, as a step would look like fine structure in both images
TAPER = 16.0
FEWEST = 3  # least number of coefficients for which a ring's correlation means something
THINNEST = 4.0  # least depth of a mask, in voxels, whose window keeps coarse structure out of fine rings


def ring_correlation(
    scale: IntensityRange, truth: np.ndarray | None, restored: np.ndarray, mask: np.ndarray
) -> dict[str, Any]:
    """Return the Fourier ring correlation of a restored slice with its truth under the mask; of a volume the shell
    correlation.

    It shows down to which size structure is restored. Both images are weighted by the mask, with edges as soft as it
    allows, so that known voxels do not count. The number of independent coefficients is the sum of squared weights (van
    Heel and Schatz, 2005).

    Args:
        scale: the range that normalises the images.
        truth: [Y, X] or [Z, Y, X] in the input's units; None if unknown.
        restored: the same for the restored slice or volume.
        mask: True for restored voxels.

    Returns
    -------
    `frc`: RINGS numbers, None for a ring without a coefficient.
    `resolution`: the `finest_period`; None if unknown, as for a constant truth and for masks that are thin everywhere.
    The mapping is empty unless the whole truth is known.
    """
    if truth is None or not mask.any() or not np.isfinite(truth[mask]).all():
        return {}
    from scipy.ndimage import distance_transform_edt

    box = tuple(slice(places.min(), places.max() + 1) for places in mask.nonzero())
    depth = distance_transform_edt(np.pad(mask[box], 1))[(slice(1, -1),) * mask.ndim]
    window = np.sin(np.pi / 2 * np.minimum(1.0, depth / min(TAPER, depth.max()))) ** 2
    spectra = []
    for image in (truth, restored):
        image01 = np.where(mask, scale.normalise(image), 0.0)[box]
        mean = float((window * image01).sum() / window.sum())
        spectra.append(np.fft.fftn(window * (image01 - mean)))
    frequency = reduce(np.hypot, np.meshgrid(*map(np.fft.fftfreq, window.shape), indexing="ij", sparse=True))
    # Ring number RINGS holds the corners, beyond half a period a voxel.
    ring_N = np.minimum((frequency * 2 * RINGS).astype(int), RINGS).ravel()

    def of_rings(values: np.ndarray) -> np.ndarray:
        return np.bincount(ring_N, values.ravel(), RINGS + 1)[:RINGS]

    pairs = (spectra, spectra[:1] * 2, spectra[1:] * 2)
    together, *powers = (of_rings((one * other.conj()).real) for one, other in pairs)
    # Each coefficient occurs twice, as images are real.
    independent_R = of_rings(np.ones(window.shape)) * np.square(window).mean() / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        found_R = together / np.sqrt(powers[0] * powers[1])
    told = depth.max() >= THINNEST and np.ptp(truth[mask]) > 0
    resolution = finest_period(together, powers, independent_R) if told else None
    return {"frc": [float(one) if np.isfinite(one) else None for one in found_R], "resolution": resolution}


def finest_period(together_R: np.ndarray, powers_2R: Sequence[np.ndarray], independent_R: np.ndarray) -> float | None:
    """Return the resolution of a restoration: the period in voxels at which its ring correlation falls below the
    half-bit curve.

    It is the first such ring's. If there is none, the period is that of the last ring's end, 2 voxels. A ring with
    fewer than FEWEST independent coefficients is taken together with the next ones until there are enough. If the rings
    end before, they do not count.

    Return None if the coarsest rings, taken together so, are more than a quarter of all or lie below the curve.

    Args:
        together_R: for each of the RINGS rings, the sum of products of both images' Fourier coefficients.
        powers_2R: the same of each image with itself.
        independent_R: number of independent coefficients in each ring.
    """
    start, found = 0, None
    for stop in range(1, RINGS + 1):
        own, other, count, product = (float(one[start:stop].sum()) for one in (*powers_2R, independent_R, together_R))
        if count < FEWEST:
            continue
        if start == 0 and stop > RINGS // 4:
            return None
        half_bit = (0.2071 + 1.9102 / math.sqrt(count)) / (1.2071 + 0.9102 / math.sqrt(count))
        if own * other <= 0 or product < half_bit * math.sqrt(own * other):
            return None if start == 0 and stop > 1 else 4 * RINGS / (start + stop)
        start, found = stop, 2 * RINGS / stop
    return found


def masked_psnr_db(
    scale: IntensityRange, truth_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray
) -> float | None:
    """Return the PSNR in dB of a restored slice, over its masked voxels whose truth is known.

    It is that of `masked_quality`, without the structural similarity, which takes longer. Return None if no masked
    voxel has a truth, or if the range is zero.

    Args:
        scale: the range that normalises the images.
        truth_YX: in the input's units.
        restored_YX: the same for the restored slice.
        mask_YX: True for restored voxels.
    """
    judged_YX = mask_YX & np.isfinite(truth_YX)
    difference = scale.normalise(restored_YX[judged_YX]) - scale.normalise(truth_YX[judged_YX])
    return psnr_db(float(np.square(difference).mean())) if difference.size and scale.high > scale.low else None


def slice_jumps(
    read: Callable[[int], tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]],
    masked: Sequence[bool],
    progress: Progress = unwatched,
) -> dict[str, float | None]:
    """Return, by restoration of a volume, how much its neighbouring slices differ, relative to those of the truth.

    It is the mean absolute difference of neighbouring slices, divided by that of the truth. Voxels that are masked in
    one of two neighbours count. Below 1 a restoration is smoother across slices than the truth. It is None if no
    neighbouring slices of the truth are finite and differ.

    Args:
        read: function of a slice's index that returns the mask, the truth [Y, X] and the restorations by name.
        masked: True for slices with masked voxels. Other slices are read only beside such a slice.
        progress: shows the progress of reading.
    """
    sums: dict[str, float] = defaultdict(float)
    true, before = 0.0, None
    for index in progress(range(1, len(masked)), "comparing neighbouring slices"):
        if not (masked[index - 1] or masked[index]):
            before = None
            continue
        (mask_YX, truth_YX, restored), after = before or read(index - 1), read(index)
        before = after
        with np.errstate(invalid="ignore"):
            step_YX = np.abs(after[1].astype(np.float64) - truth_YX)
        judged_YX = (mask_YX | after[0]) & np.isfinite(step_YX)
        true += float(step_YX[judged_YX].sum())
        for name, one_YX in restored.items():
            sums[name] += float(np.abs(after[2][name].astype(np.float64) - one_YX)[judged_YX].sum())
    return {name: total / true if true > 0 else None for name, total in sums.items()}


def distance_db(
    scale: IntensityRange, exact_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray
) -> float | None:
    """Return the PSNR in dB of a slice under the mask, compared with the slice that the exact run restored.

    Return None if all bits are equal, or no voxel is masked.

    Args:
        scale: the range that normalises the images.
        exact_YX: slice of the exact run, in the input's units.
        restored_YX: the slice to judge, in the input's units.
        mask_YX: True for voxels that count.
    """
    exact, restored = exact_YX[mask_YX], restored_YX[mask_YX]
    if not exact.size or (exact.dtype == restored.dtype and exact.tobytes() == restored.tobytes()):
        return None
    return psnr_db(float(np.square(scale.normalise(exact) - scale.normalise(restored)).sum()) / exact.size)


def sum_by_name(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of several counts, such as of bytes by link, for every name that any of the mappings has."""
    names = dict.fromkeys(name for count in counts for name in count)
    return {name: sum(count.get(name, 0) for count in counts) for name in names}


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def mean_curve(curves: Sequence[Sequence[float | None] | None]) -> list[float | None] | None:
    """Return the mean of several curves at each place, over the values that are not None; None if there are no curves.

    Args:
        curves: curves of equal length; those that are None are left out.
    """
    present = [curve for curve in curves if curve is not None]
    return [mean(values) for values in zip(*present, strict=True)] if present else None


def _field(of_slices: Callable[[list[Any]], Any], **default: Any) -> Any:
    """Return a field of the dataclass `Result` that also says how the values of several slices become one.

    Args:
        of_slices: takes a list of values, one for each slice, and returns the value for a line of the table.
        default: the field's default, as `dataclasses.field` takes it.
    """
    return field(**default, metadata={"of_slices": of_slices})


@dataclass(frozen=True)
class Result:
    """The measurements of one restored or generated image with one preset.

    Its fields are those of a row of `metrics.json`, from which the table and the report are made. A part of them are
    the fields of a sweep's line. Quality is measured under the mask against the truth: of the mean, if there are
    several samples. `intervals` describes the intervals around it that were calibrated on hidden regions, if any
    (`Intervals.record`).
    """

    name: str  # name of the image
    mask: str | None  # name of its mask; None for a generated image
    mode: str  # name of the preset
    psnr_db: float | None = _field(mean, default=None)  # dB against the truth; None without one
    ssim: float | None = _field(mean, default=None)  # structural similarity; None without a truth
    mse: float | None = _field(mean, default=None)  # in squared units of the range of intensities
    psnr_vs_exact_db: float | None = _field(mean, default=None)  # dB against exact run; None: equal or not compared
    exact_compared: bool = _field(any, default=True)  # False if there is no exact run to compare with
    seconds: float = 0.0  # wall time, in which replicas work at the same time
    bytes: Mapping[str, int] = _field(sum_by_name, default_factory=dict)  # bytes sent over each kind of link
    rank_seconds: float | None = _field(sum, default=None)  # seconds of all ranks that worked on the image, added up
    replica_seconds: Mapping[str, float] | None = None  # seconds of each replica that worked on it
    bytes_whole: Mapping[str, int] | None = _field(sum_by_name, default=None)  # bytes if all were sent uncoded
    bytes_late: Mapping[str, int] | None = _field(sum_by_name, default=None)  # bytes that no attention call waited for
    samples: int | None = None  # number of samples; None for one
    coverage_50: float | None = _field(mean, default=None)  # share of true values in 50 % intervals
    coverage_90: float | None = _field(mean, default=None)  # share of true values in 90 % intervals
    psnr_db_single: float | None = _field(mean, default=None)  # mean of the samples' own PSNR
    # `Intervals.record` of intervals that hidden regions calibrated
    intervals: Mapping[str, float] | None = _field(lambda values: next(filter(None, values), None), default=None)
    uncertainty: float | None = _field(mean, default=None)  # half width of 90 % intervals, mean, normalised
    baseline: Mapping[str, Any] | None = None  # measurements of the biharmonic method's result
    frc: Sequence[float | None] | None = _field(mean_curve, default=None)  # `ring_correlation` of each ring
    resolution: float | None = _field(mean, default=None)  # finest period in voxels that is restored; None if unknown
    # A mapping for each step of a lossy run. V-Major: the mean relative change of v, and the fraction of tokens that
    # were not sent. A codec or displacement: the fraction of attention calls that were coded, the fraction of their
    # tensors that were predicted linearly, and which tensors were displaced. It has also the fractions of the bytes of
    # whole tensors, in 16 bits as large models have them, that were sent and that attention waited for.
    drift: Sequence[Mapping[str, Any]] = ()  # measurements of each step of a lossy run
    cached_fraction: float | None = _field(mean, default=None)  # share of model calls that were cached
    bytes_exact: Mapping[str, int] | None = None  # bytes of the exact run, if there is a drift

    def row(self) -> dict[str, Any]:
        """Return the result as plain data for JSON, without the fields that do not apply to the image.

        Fields of OR_NULL that apply are written as null if they are None, such as the PSNR without a truth. Other
        fields that are None are left out.
        """
        found = dict(vars(self))
        for name in [one for one in OF_LINKS if found[one] is not None]:  # 0 for links without messages
            found[name] = {link: int(found[name].get(link, 0)) for link in LINKS}
        found["drift"] = [dict(step) for step in self.drift] or None
        absent = {name for name, value in found.items() if value is None and name not in OR_NULL}
        absent |= {*OF_SAMPLES} if self.samples is None else set()
        absent |= {"bytes_late"} if not any((self.bytes_late or {}).values()) else set()
        absent |= {"bytes_exact"} if not self.drift else set()
        absent |= {"resolution"} if self.frc is None else set()
        return json_ready({name: value for name, value in found.items() if name not in absent})


QUALITY = ("psnr_db", "ssim", "mse")
OF_LINKS = ("bytes", "bytes_whole", "bytes_late", "bytes_exact")  # fields with a number for each link
OF_RUN = (*QUALITY, "seconds", "bytes", "bytes_whole", "bytes_late", "cached_fraction")  # fields of a sweep's lines
# fields of several samples
OF_SAMPLES = ("samples", "coverage_50", "coverage_90", "psnr_db_single", "intervals", "uncertainty")
# Fields whose null has a meaning ("unknown", or "the same bits"), so that it is written.
OR_NULL = ("mask", *QUALITY, "psnr_vs_exact_db", "resolution", *OF_SAMPLES)


def of_slices(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row of measurements for several rows of one preset, as for a line of the table.

    Each field is combined as `Result` says, over the rows that have it. Other fields are the first row's.
    """
    found = dict(rows[0])
    for one in fields(Result):
        values = [row[one.name] for row in rows if one.name in row]
        if values and "of_slices" in one.metadata:
            found[one.name] = one.metadata["of_slices"](values)
    return found


def json_ready(value: Any, otherwise: Callable[[float], Any] = lambda _: None) -> Any:
    """Return plain data with every infinity and NaN replaced, which JSON lacks.

    Args:
        value: lists, mappings and scalars.
        otherwise: takes such a number and returns what replaces it; by default None.
    """
    if isinstance(value, Mapping):
        return {key: json_ready(one, otherwise) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(one, otherwise) for one in value]
    return otherwise(value) if isinstance(value, float) and not math.isfinite(value) else value


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part `summary` of metrics.json: means over images for each mask and preset, and for the biharmonic
    method.

    The result is `{"rows": [{"mask", "mode", "n", "psnr_db", "ssim", "mse", "psnr_vs_exact_db", "compared",
    "identical", "seconds", "bytes"}], "baseline": [{"mask", "method", "n", "psnr_db", "ssim", "mse", "seconds"}]}`.

    `psnr_vs_exact_db` is the mean over the images whose bits differ from the exact run's. `compared` is the number of
    images that have an exact run, and `identical` that of those with its bits. Means of OF_SAMPLES are there if images
    have them.

    Args:
        rows: rows of metrics.json, one for each image and preset.
    """
    groups = by_key(((row["mask"], row["mode"]), row) for row in rows)
    baselines: dict[str | None, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("baseline") is not None:
            baselines.setdefault(row["mask"], {})[row["name"]] = row["baseline"]
    means = []
    for (mask, mode), group in groups.items():
        together, compared = of_slices(group), [row for row in group if row["exact_compared"]]
        told = {key: together[key] for key in (*QUALITY, "psnr_vs_exact_db")}
        told["seconds"] = mean([row["seconds"] for row in group])
        told |= {key: together[key] for key in OF_SAMPLES if key in together}
        identical = sum(row["psnr_vs_exact_db"] is None for row in compared)
        told |= {"compared": len(compared), "identical": identical, "bytes": together["bytes"]}
        means.append({"mask": mask, "mode": mode, "n": len(group), **told})
    baseline = []
    for mask, by_name in baselines.items():
        told = {key: mean([one[key] for one in by_name.values()]) for key in (*QUALITY, "seconds")}
        baseline.append({"mask": mask, "method": "biharmonic", "n": len(by_name), **told})
    return {"rows": means, "baseline": baseline}


def metrics_document(config: Mapping[str, Any], ranks: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole content of `metrics.json`. A setting that JSON has no number for becomes text, such as "inf".

    Args:
        config: the command's options, by name.
        ranks: number of ranks.
        rows: the rows of all images, as `Result.row` returns them.
    """
    rows, settings = json_ready(rows), {name: json_ready(value, str) for name, value in config.items()}
    return {"schema": SCHEMA, "config": settings, "ranks": ranks, "images": rows, "summary": summary(rows)}


Profile = Sequence[Mapping[str, Any]]  # the `drift` of a result: a mapping for each step


def mean_profile(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Return the mean of the `drift` of several lossy runs: for each denoising step the mean of its measurements.

    `drift` is what the engine noted in each step, such as how much v changed and which fraction of the tokens stayed
    unsent, see `Engine.drift_profile`.

    Args:
        profiles: for each run a list of steps, each a mapping of measurements by name.
    """
    steps = by_key((row["step"], row) for row in chain.from_iterable(profiles))
    return [
        {"step": step, **{name: _mean([row.get(name) for row in of_step]) for name in of_step[0] if name != "step"}}
        for step, of_step in steps.items()
    ]


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of the values that are not None; if they are mappings, a mapping with the mean for each name."""
    there = [value for value in values if value is not None]
    if there and isinstance(there[0], Mapping):
        return {name: total / len(there) for name, total in sum_by_name(there).items()}
    return mean(there)


# Figures of the report ------------------------------------------------------------------------------------------------

WIDTH, LEFT = 420, 34  # pixels of a figure, and of them those left of its bars
STRIP, BARS = (16, 46), (66, 146)  # top and bottom of the strip of tensors and of the bars of bytes, in pixels


class StepsFigure(NamedTuple):
    """A figure of one preset in the report: for each step a bar of tensors and a bar of bytes, both as shares."""

    mode: str  # name of the preset
    paths: dict[str, str]  # SVG path by part: "whole", "coded", "displaced" tensors; bytes "waited" for, "late"
    told: str  # the means over the steps, in words
    last: int  # index of the last step


def step_figures(rows: Sequence[Mapping[str, Any]]) -> list[StepsFigure]:
    """Return a figure for the report for each preset that coded or displaced tensors: a mean over slices or images.

    Args:
        rows: rows of metrics.json.
    """
    lossy = (row for row in rows if row.get("drift") and "sent_fraction" in row["drift"][0])
    profiles = by_key((row["mode"], row["drift"]) for row in lossy)
    return [_figure(mode, mean_profile(of_mode)) for mode, of_mode in profiles.items()]


def _figure(mode: str, steps: Profile) -> StepsFigure:
    """Return the report's figure of how a preset sent its tensors in each denoising step.

    Args:
        mode: name of the preset.
        steps: its mean `drift`, a mapping of measurements for each step.
    """
    tensors = list(zip(*map(shares_of_tensors, steps), strict=True))
    sent, waited = ([row[name] for row in steps] for name in ("sent_fraction", "exposed_fraction"))
    late = [all_of_it - part for all_of_it, part in zip(sent, waited, strict=True)]
    areas = [*_stacked(tensors, *STRIP), *_stacked([waited, late], *BARS)]
    paths = dict(zip(("whole", "coded", "displaced", "waited", "late"), areas, strict=True))
    mean = [sum(values) / len(steps) for values in (*tensors, sent, waited)]
    kinds = [f"{share:.3f} {kind}" for share, kind in zip(mean, ("whole", "coded", "displaced"), strict=False) if share]
    told = f"of all tensors {', '.join(kinds)}; of whole bytes {mean[3]:.3f} sent, {mean[4]:.3f} waited for"
    return StepsFigure(mode, paths, told, steps[-1]["step"])


def ring_figures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the curve of the mean ring correlation of each preset, and of the biharmonic method, for the report.

    Each is (name, SVG path in a picture of 100 x 100, resolution in words). The list is empty without a truth.

    Args:
        rows: rows of metrics.json.
    """
    every = (one for row in rows for one in ((row["mode"], row), ("biharmonic", row.get("baseline") or {})))
    found = by_key((name, one) for name, one in every if one.get("frc"))
    figures = []
    for name in sorted(found, key=lambda name: name == "biharmonic"):
        curve = mean_curve([one["frc"] for one in found[name]]) or []
        places = ((100 * (ring + 0.5) / RINGS, value) for ring, value in enumerate(curve) if value is not None)
        points = [(x, min(100.0, 100 * (1 - value))) for x, value in places]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        figures.append((name, path, resolution_told([one["resolution"] for one in found[name]])))
    return figures


def resolution_told(values: Sequence[float | None]) -> str:
    """Return the mean resolution of some slices in words, with the number of slices in which it is unknown.

    Args:
        values: period in voxels of each slice; None if unknown.
    """
    known, unknown = mean(values), sum(value is None for value in values)
    told = f" (unknown in {unknown} of {len(values)} slices)" if unknown else ""
    return "unknown" if known is None else f"{known:.1f} voxels{told}"


def shares_of_tensors(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the shares of one step's tensors that were sent whole, that were coded, and that were displaced.

    The first two are tensors that attention waited for. With a codec every displaced tensor is coded too.

    Args:
        row: the step's entry in `drift`.
    """
    coded, displaced = row["coded_fraction"], row["displaced_fraction"]
    return 1 - max(coded, displaced), max(0.0, coded - displaced), displaced


def _stacked(parts: Sequence[Sequence[float]], top: float, bottom: float) -> list[str]:
    """Return SVG paths of stacked bars, one path for each part, with a bar for each step.

    Args:
        parts: for each part its share of the whole at each step.
        top: height of a full bar's upper end, in pixels from the figure's top.
        bottom: the same of all bars' lower end.
    """
    count, paths = len(parts[0]), [""] * len(parts)
    wide = (WIDTH - LEFT - 6) / count
    for step in range(count):
        y = float(bottom)
        for place, part in enumerate(parts):
            height = part[step] * (bottom - top)
            if height > 0:
                x, width = LEFT + step * wide, max(wide - 1, 0.7 * wide)
                paths[place] += f"M{x:.1f} {y:.1f}v{-height:.2f}h{width:.1f}v{height:.2f}z"
            y -= height
    return paths
