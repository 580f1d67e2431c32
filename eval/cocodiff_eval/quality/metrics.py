"""Quality inside the mask, and the rows and summary of `metrics.json`.

Images are compared after normalising with the range outside the mask (`IntensityRange`), so that one intensity unit is
the input's whole known range, without outliers. Voxels whose truth is NaN or Inf have no truth: they are left out.
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

SCHEMA = 1
LINKS = ("sibling", "plane", "node", "cross_plane")
SSIM_WINDOW = 7
# JSON has no infinity: a restoration equal to the truth is written as 200 dB, one beyond all numbers as -3083 dB.
_SMALLEST_MSE, _LARGEST_MSE = 1e-20, sys.float_info.max


def psnr_db(mse: float) -> float:
    """Peak signal-to-noise ratio for a peak of 1, in dB; 200 where the error is zero, never infinite or NaN."""
    return -10.0 * math.log10(min(max(_SMALLEST_MSE, mse), _LARGEST_MSE) if mse == mse else _LARGEST_MSE)


def ssim_map(truth01_YX: np.ndarray, restored01_YX: np.ndarray) -> np.ndarray:
    """scikit-image's structural similarity at each voxel: window 7, data range 1. float64 [Y, X]."""
    from skimage.metrics import structural_similarity

    _, similarity_YX = structural_similarity(truth01_YX, restored01_YX, win_size=SSIM_WINDOW, data_range=1.0, full=True)
    return np.asarray(similarity_YX)


def masked_quality(
    scale: IntensityRange, truth_YX: np.ndarray | None, restored_YX: np.ndarray, mask_YX: np.ndarray
) -> dict[str, Any]:
    """Return `psnr_db`, `ssim` and `mse` over the masked voxels of a slice with a truth; None each if there are none.
    A range of zero, that of a constant slice, has no unit to compare in: `psnr_db` and `ssim` are None.

    Images are in the input's units, of any real dtype. truth_YX: None where it is unknown.
    """
    if truth_YX is None or not (mask_YX & np.isfinite(truth_YX)).any():
        return dict.fromkeys(QUALITY)
    known_YX, restored01_YX = np.isfinite(truth_YX), scale.normalise(restored_YX)
    # A voxel without truth takes the restored value: it neither helps nor hurts the windows around it.
    truth01_YX = np.where(known_YX, scale.normalise(truth_YX), restored01_YX)
    judged_YX = mask_YX & known_YX
    difference = (restored01_YX - truth01_YX)[judged_YX]
    mse = float(np.square(difference).sum()) / difference.size
    similarity = float(ssim_map(truth01_YX, restored01_YX)[judged_YX].sum()) / difference.size
    judged = {"psnr_db": psnr_db(mse), "ssim": similarity} if scale.high > scale.low else {}
    found = {**dict.fromkeys(QUALITY, math.nan), **judged, "mse": mse}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


RINGS = 32  # of a ring correlation, evenly from no frequency to half a period a voxel
TAPER = 16.0  # voxels at most in which the mask's weight rises: a step would look like fine structure in both images
FEWEST = 3  # coefficients of a ring whose correlation says something
THINNEST = 4.0  # voxels from the edge to the middle of a mask whose window keeps coarse structure out of fine rings


def ring_correlation(
    scale: IntensityRange, truth: np.ndarray | None, restored: np.ndarray, mask: np.ndarray
) -> dict[str, Any]:
    """Return the Fourier ring correlation of what is under the mask of a slice [Y, X] with its truth, of a volume
    [Z, Y, X] the shell correlation (van Heel and Schatz, 2005); nothing where not all of the truth is known.

    Both images are weighed by the mask, with edges as soft as it allows, so that what is known does not count.
    Coefficients that are independent are as many as the sum of squared weights.

    Returns
    -------
    `frc`: RINGS numbers, None where a ring has no coefficient.
    `resolution`: the `finest_period`; None, unknown, also of a constant truth, and of masks that are thin everywhere.
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
    ring_N = np.minimum((frequency * 2 * RINGS).astype(int), RINGS).ravel()  # the last: corners beyond half a period

    def of_rings(values: np.ndarray) -> np.ndarray:
        return np.bincount(ring_N, values.ravel(), RINGS + 1)[:RINGS]

    pairs = (spectra, spectra[:1] * 2, spectra[1:] * 2)
    together, *powers = (of_rings((one * other.conj()).real) for one, other in pairs)
    independent_R = of_rings(np.ones(window.shape)) * np.square(window).mean() / 2  # each coefficient is there twice
    with np.errstate(invalid="ignore", divide="ignore"):
        found_R = together / np.sqrt(powers[0] * powers[1])
    told = depth.max() >= THINNEST and np.ptp(truth[mask]) > 0
    resolution = finest_period(together, powers, independent_R) if told else None
    return {"frc": [float(one) if np.isfinite(one) else None for one in found_R], "resolution": resolution}


def finest_period(together_R: np.ndarray, powers_2R: Sequence[np.ndarray], independent_R: np.ndarray) -> float | None:
    """Return the period in voxels at which the correlation of rings first falls below the curve of half a bit; if it
    never does, that where the last ring ends, 2 voxels; None if nothing tells it.

    together_R: sums of products of both images' coefficients; powers_2R: of each image's own; independent_R: how many
    coefficients are independent. A ring with less than FEWEST of these is taken together with the next ones until there
    are so many, and does not count where there are no more rings. Nothing is told where the coarsest rings, taken
    together, are more than a quarter of all, or are below the curve: the period may be any from there on.
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
    """Return `psnr_db` of `masked_quality`, without the similarity, which takes longer."""
    judged_YX = mask_YX & np.isfinite(truth_YX)
    difference = scale.normalise(restored_YX[judged_YX]) - scale.normalise(truth_YX[judged_YX])
    return psnr_db(float(np.square(difference).mean())) if difference.size and scale.high > scale.low else None


def slice_jumps(
    read: Callable[[int], tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]],
    masked: Sequence[bool],
    progress: Progress = unwatched,
) -> dict[str, float | None]:
    """How far neighbouring slices of a volume differ, over what those of the truth do: the mean |difference| of voxels
    that are masked in one of two neighbours, by the name of each restoration; below 1 they are smoother than the truth.

    read: of a slice its mask and its truth [Y, X], and the same slice restored, by name; masked: which slices have
    masked voxels: others are read beside such a one alone. Without a pair of finite truths that differ it is None.
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
    """PSNR in dB in the mask against the exact run, both in the input's units; None if every bit is the same."""
    exact, restored = exact_YX[mask_YX], restored_YX[mask_YX]
    if not exact.size or (exact.dtype == restored.dtype and exact.tobytes() == restored.tobytes()):
        return None
    return psnr_db(float(np.square(scale.normalise(exact) - scale.normalise(restored)).sum()) / exact.size)


def sum_by_name(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of bytes over links, say: of each name that any of them has."""
    names = dict.fromkeys(name for count in counts for name in count)
    return {name: sum(count.get(name, 0) for count in counts) for name in names}


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; None if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def mean_curve(curves: Sequence[Sequence[float | None] | None]) -> list[float | None] | None:
    """The mean of curves, of those that are there at each of their places; None where there are none."""
    present = [curve for curve in curves if curve is not None]
    return [mean(values) for values in zip(*present, strict=True)] if present else None


def _field(of_slices: Callable[[list[Any]], Any], **default: Any) -> Any:
    """of_slices: makes one value of those of several slices, for a line of the table."""
    return field(**default, metadata={"of_slices": of_slices})


@dataclass(frozen=True)
class Result:
    """What is reported of an image in a mode. Its fields are those of a row of `metrics.json`, which the table and the
    report are made of, and a part of them those of a sweep's line.

    name, mask, mode    the image, its mask (None for a generated image) and the preset
    psnr_db, ssim, mse  against the truth under the mask, of several samples those of their mean; None without a truth
    psnr_vs_exact_db    against the exact run; None where all bits are the same. It says nothing where `exact_compared`
                        is False: no exact run was made (`--no-exact`, or a slice that is not among those compared)
    seconds             wall time: replicas work at the same time
    bytes               over each kind of link; `bytes_whole`: what they would have been with all tokens as they are,
                        along the same routes; `bytes_late`: those that no call of attention waited for, if any
    rank_seconds        of all ranks that worked on the image, added up; `replica_seconds`: of each replica that did, by
                        its number
    samples             their number, where there are several; `coverage_50` and `coverage_90` are
                        `fusing.coverage`, `psnr_db_single` is the mean of the samples' own PSNR; `intervals` are those
                        that hidden regions have calibrated, whose coverage it then is
    uncertainty         half the width of the 90 % intervals, mean over the masked voxels, in units of the range of
                        intensities; None where there are none
    baseline            the biharmonic result of the image and mask: psnr_db, ssim, mse, seconds
    frc, resolution     `ring_correlation`: of each ring, and the finest period in voxels that is restored; None where
                        it is unknown
    drift               of a lossy run, for each step: of V-Major the mean relative change of v and the fraction of
                        tokens that stayed; of a codec or displacement the fraction of attention calls that were coded
                        and that of their tensors that were predicted linearly, which tensors were displaced, and of
                        the bytes of whole tensors the fractions that were sent and that attention waited for, as large
                        models of 16 bits have them
    cached_fraction     with a step cache, the fraction of the steps' calls of the model that were cached; `drift` has
                        it for each step
    bytes_exact         the bytes of the exact run, beside a drift
    """

    name: str
    mask: str | None
    mode: str
    psnr_db: float | None = _field(mean, default=None)
    ssim: float | None = _field(mean, default=None)
    mse: float | None = _field(mean, default=None)
    psnr_vs_exact_db: float | None = _field(mean, default=None)
    exact_compared: bool = _field(any, default=True)
    seconds: float = 0.0
    bytes: Mapping[str, int] = _field(sum_by_name, default_factory=dict)
    rank_seconds: float | None = _field(sum, default=None)
    replica_seconds: Mapping[str, float] | None = None
    bytes_whole: Mapping[str, int] | None = _field(sum_by_name, default=None)
    bytes_late: Mapping[str, int] | None = _field(sum_by_name, default=None)
    samples: int | None = None
    coverage_50: float | None = _field(mean, default=None)
    coverage_90: float | None = _field(mean, default=None)
    psnr_db_single: float | None = _field(mean, default=None)
    intervals: Mapping[str, float] | None = _field(lambda values: next(filter(None, values), None), default=None)
    uncertainty: float | None = _field(mean, default=None)
    baseline: Mapping[str, Any] | None = None
    frc: Sequence[float | None] | None = _field(mean_curve, default=None)
    resolution: float | None = _field(mean, default=None)
    drift: Sequence[Mapping[str, Any]] = ()
    cached_fraction: float | None = _field(mean, default=None)
    bytes_exact: Mapping[str, int] | None = None

    def row(self) -> dict[str, Any]:
        """As plain data for JSON, without what does not apply to the image."""
        found = dict(vars(self))
        for name in [one for one in OF_LINKS if found[one] is not None]:  # 0 where none went
            found[name] = {link: int(found[name].get(link, 0)) for link in LINKS}
        found["drift"] = [dict(step) for step in self.drift] or None
        absent = {name for name, value in found.items() if value is None and name not in OR_NULL}
        absent |= {*OF_SAMPLES} if self.samples is None else set()
        absent |= {"bytes_late"} if not any((self.bytes_late or {}).values()) else set()
        absent |= {"bytes_exact"} if not self.drift else set()
        absent |= {"resolution"} if self.frc is None else set()
        return json_ready({name: value for name, value in found.items() if name not in absent})


QUALITY = ("psnr_db", "ssim", "mse")
OF_LINKS = ("bytes", "bytes_whole", "bytes_late", "bytes_exact")
OF_RUN = (*QUALITY, "seconds", "bytes", "bytes_whole", "bytes_late", "cached_fraction")  # in a sweep's lines
OF_SAMPLES = ("samples", "coverage_50", "coverage_90", "psnr_db_single", "intervals", "uncertainty")
# null says something: "unknown", or "the same bits"
OR_NULL = ("mask", *QUALITY, "psnr_vs_exact_db", "resolution", *OF_SAMPLES)


def of_slices(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of one mode taken together, each field as `Result` says, of the rows that have it; else the first row's."""
    found = dict(rows[0])
    for one in fields(Result):
        values = [row[one.name] for row in rows if one.name in row]
        if values and "of_slices" in one.metadata:
            found[one.name] = one.metadata["of_slices"](values)
    return found


def json_ready(value: Any, otherwise: Callable[[float], Any] = lambda _: None) -> Any:
    """A value of lists, mappings and scalars where `otherwise` replaces infinities and NaN, which JSON has not."""
    if isinstance(value, Mapping):
        return {key: json_ready(one, otherwise) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(one, otherwise) for one in value]
    return otherwise(value) if isinstance(value, float) and not math.isfinite(value) else value


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the images for each mask and preset, and of the biharmonic baseline for each mask.

    `{"rows": [{"mask", "mode", "n", "psnr_db", "ssim", "mse", "psnr_vs_exact_db", "compared", "identical", "seconds",
    "bytes"}],
    "baseline": [{"mask", "method", "n", "psnr_db", "ssim", "mse", "seconds"}]}`. `psnr_vs_exact_db` is the mean over
    the images whose bits differ, `identical` the number of images whose bits are those of the exact run, of those
    `compared` with one. Means of OF_SAMPLES are there where images have them.
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
    """The whole of `metrics.json`. A setting that JSON has no number for is text: "inf"."""
    rows, settings = json_ready(rows), {name: json_ready(value, str) for name, value in config.items()}
    return {"schema": SCHEMA, "config": settings, "ranks": ranks, "images": rows, "summary": summary(rows)}


Profile = Sequence[Mapping[str, Any]]


def mean_profile(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Profiles of several runs as one: at each step the mean of the values that are there, of fractions by name."""
    steps = by_key((row["step"], row) for row in chain.from_iterable(profiles))
    return [
        {"step": step, **{name: _mean([row.get(name) for row in of_step]) for name in of_step[0] if name != "step"}}
        for step, of_step in steps.items()
    ]


def _mean(values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if there and isinstance(there[0], Mapping):
        return {name: total / len(there) for name, total in sum_by_name(there).items()}
    return mean(there)


# Figures of the report ------------------------------------------------------------------------------------------------

WIDTH, LEFT = 420, 34  # pixels of a figure, and of them those left of its bars
STRIP, BARS = (16, 46), (66, 146)  # top and bottom of the tensors' strip and of the bars of bytes


class StepsFigure(NamedTuple):
    """One preset's steps as areas of an SVG picture. paths: of each kind of tensor and of bytes; told: the means over
    the steps, in words; last: the last step's number."""

    mode: str
    paths: dict[str, str]
    told: str
    last: int


def step_figures(rows: Sequence[Mapping[str, Any]]) -> list[StepsFigure]:
    """A figure for each preset of some rows of `metrics.json` that coded or displaced tensors, over all these rows."""
    lossy = (row for row in rows if row.get("drift") and "sent_fraction" in row["drift"][0])
    profiles = by_key((row["mode"], row["drift"]) for row in lossy)
    return [_figure(mode, mean_profile(of_mode)) for mode, of_mode in profiles.items()]


def _figure(mode: str, steps: Profile) -> StepsFigure:
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
    """Return of each preset of some rows, and of the biharmonic baseline, the name, the mean ring correlation as a path
    of SVG in a picture of 100 x 100, and the resolution in words; nothing where no truth is known."""
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
    """Return the mean resolution of some slices in words, with the number of those in which it is unknown."""
    known, unknown = mean(values), sum(value is None for value in values)
    told = f" (unknown in {unknown} of {len(values)} slices)" if unknown else ""
    return "unknown" if known is None else f"{known:.1f} voxels{told}"


def shares_of_tensors(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of one step's tensors those that travelled whole and those that were coded, where attention waited for them, and
    those that were displaced. With a codec whatever is displaced is coded."""
    coded, displaced = row["coded_fraction"], row["displaced_fraction"]
    return 1 - max(coded, displaced), max(0.0, coded - displaced), displaced


def _stacked(parts: Sequence[Sequence[float]], top: float, bottom: float) -> list[str]:
    """Bars of some parts of a whole, one on the other, for each step: the outline of each part."""
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
