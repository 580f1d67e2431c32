"""The metrics against scikit-image called directly, and the documents made of them."""

import json
import math

import numpy as np
import pytest
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.masks import block_mask
from cocodiff_eval.quality import metrics
from cocodiff_eval.quality.metrics import Result, distance_db, masked_psnr_db, masked_quality, ring_correlation
from cocodiff_eval.report.tables import grouped, size, terminal_table
from eval_helpers import BASELINE, CASES, QUALITY, marked, phantom, rich_run, row_of, slices_of
from scipy.ndimage import distance_transform_edt, gaussian_filter
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity

SCALE = IntensityRange(100.0, 1100.0)
MASK_YX = block_mask((48, 60), 2)


def pair(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    truth_YX = phantom(48, 60) * 1000 + 100
    noise_YX = np.random.default_rng(seed).normal(scale=40, size=truth_YX.shape)
    return truth_YX, np.where(MASK_YX, truth_YX + noise_YX, truth_YX)


def test_quality_is_that_of_scikit_image_inside_the_mask() -> None:
    truth_YX, restored_YX = pair()
    result = masked_quality(SCALE, truth_YX, restored_YX, MASK_YX)
    truth01_YX, restored01_YX = (truth_YX - 100) / 1000, (restored_YX - 100) / 1000
    _, ssim_YX = structural_similarity(truth01_YX, restored01_YX, win_size=7, data_range=1.0, full=True)
    inside = (truth01_YX[MASK_YX], restored01_YX[MASK_YX])
    assert result["mse"] == pytest.approx(mean_squared_error(*inside))
    assert result["psnr_db"] == pytest.approx(peak_signal_noise_ratio(*inside, data_range=1.0))
    assert result["ssim"] == pytest.approx(ssim_YX[MASK_YX].mean())


def test_voxels_without_truth_are_left_out() -> None:
    truth_YX, restored_YX = pair()
    holes_YX = np.zeros_like(MASK_YX)
    holes_YX[::3, ::3] = True
    torn_YX = np.where(holes_YX, np.nan, truth_YX)
    quality = masked_quality(SCALE, torn_YX, restored_YX, MASK_YX)
    inside_YX = MASK_YX & ~holes_YX
    assert quality["mse"] == pytest.approx(float(np.square((restored_YX - truth_YX)[inside_YX] / 1000).mean()))
    assert all(value is not None and math.isfinite(value) for value in quality.values())
    assert masked_psnr_db(SCALE, torn_YX, restored_YX, MASK_YX) == pytest.approx(quality["psnr_db"])
    assert masked_psnr_db(SCALE, truth_YX * np.nan, restored_YX, MASK_YX) is None
    nothing = masked_quality(SCALE, np.full_like(truth_YX, np.nan), restored_YX, MASK_YX)
    assert nothing == masked_quality(SCALE, None, restored_YX, MASK_YX) == {"psnr_db": None, "ssim": None, "mse": None}


def test_a_range_of_zero_does_not_divide() -> None:
    scale, images = IntensityRange(7.0, 7.0), (np.full((16, 16), 7.5), np.full((16, 16), 7.0))
    with np.errstate(all="raise"):
        quality = masked_quality(scale, *images, np.eye(16) > 0)
    assert quality["mse"] == pytest.approx(0.25)
    for truth_YX in images:  # equal or not: nothing tells how much a difference is
        found = masked_quality(scale, truth_YX, images[1], np.eye(16) > 0)
        assert found["psnr_db"] is found["ssim"] is masked_psnr_db(scale, truth_YX, images[1], np.eye(16) > 0) is None


def test_distance_to_the_exact_run_is_none_only_for_identical_bits() -> None:
    exact_YX = np.arange(64, dtype=np.float32).reshape(8, 8)
    mask_YX = exact_YX > 20
    scale = IntensityRange(0, 63)
    assert distance_db(scale, exact_YX, exact_YX.copy(), mask_YX) is None
    assert distance_db(scale, exact_YX, np.where(mask_YX, exact_YX, -1), mask_YX) is None
    other_YX = exact_YX.copy()
    other_YX[7, 7] = np.nextafter(other_YX[7, 7], np.float32(0))
    distance = distance_db(scale, exact_YX, other_YX, mask_YX)
    assert distance is not None and 100 < distance < 200
    assert distance_db(scale, np.zeros((8, 8)), -np.zeros((8, 8)), mask_YX) == 200.0


def test_document_has_the_names_users_script_on() -> None:
    document = rich_run()
    assert {"schema", "config", "ranks", "images", "summary"} <= set(document)
    assert (document["schema"], document["ranks"], document["config"]) == (1, 4, {"steps": 20})
    names = {"name", "mask", "mode", "psnr_db", "ssim", "mse", "psnr_vs_exact_db", "seconds", "bytes"}
    of_some = {"samples", "coverage_50", "coverage_90", "psnr_db_single", "intervals", "bytes_late"}
    for row in document["images"]:
        assert names <= set(row)
        assert list(row["bytes"]) == ["sibling", "plane", "node", "cross_plane"]
        assert row["name"].startswith("stack") or not of_some & set(row)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    late = [row["name"] for row in document["images"] if "bytes_late" in row]
    assert late == [f"stack[{n}]" for n in range(1, 13, 2)]  # those in which something was
    profiles = [[{"step": 0, "displaced_sets": sets, "change": None}] for sets in ({"": 1.0}, None, {"qkvo": 0.5})]
    (step,) = metrics.mean_profile(profiles)  # type: ignore[arg-type]
    assert step == {"step": 0, "displaced_sets": {"": 0.5, "qkvo": 0.25}, "change": None}
    ((_, _, _, (both,)),) = grouped([row for row in document["images"] if row["name"] in ("stack[0]", "stack[12]")], {})
    # The first replica judges what two made.
    assert both["baseline"]["seconds"] == pytest.approx(2 * BASELINE["seconds"])
    means = document["summary"]["rows"]  # what of them pages and tables show is in the snapshots
    counts = [(2, 2, 2), (2, 2, 0), (13, 2, 1), (2, 0, 0), (1, 1, 1)]
    assert [(row["n"], row["compared"], row["identical"]) for row in means] == counts
    (ahead,) = [row for row in means if "samples" in row]
    assert (ahead["mode"], ahead["samples"], ahead["coverage_90"]) == ("ahead", 8, pytest.approx(0.75))


def test_sizes_in_units_that_fit() -> None:
    sizes = [size(count) for count in (0, 1023, 1024, 1536, 5 * 2**30, 2**45)]
    assert sizes == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "32.0 TiB"]


def test_documents_are_json_where_numbers_overflow() -> None:
    scale, mask_YX = IntensityRange(0.0, 1e-300), np.ones((16, 16), bool)
    truth_YX, restored_YX = np.full((16, 16), 1e300), np.zeros((16, 16))
    with np.errstate(over="ignore", invalid="ignore"):
        quality = masked_quality(scale, truth_YX, restored_YX, mask_YX)
        distance = distance_db(scale, truth_YX, restored_YX, mask_YX)
    drift = [{"step": 0, "change": math.inf, "stable_fraction": 0.0}]
    row = row_of("a", "block", "flat", quality, 1.0, {}, psnr_vs_exact_db=distance, drift=drift)
    document = metrics.metrics_document({"timeout_s": math.inf, "ratios": [math.nan]}, 1, [row])
    written = json.loads(json.dumps(document, allow_nan=False))
    assert written["config"] == {"timeout_s": "inf", "ratios": ["nan"]}
    assert written["images"][0]["mse"] is None and written["images"][0]["drift"][0]["change"] is None
    # not null, which says that all bits are the exact run's
    assert written["images"][0]["psnr_vs_exact_db"] < -3000 and written["summary"]["rows"][0]["identical"] == 0
    assert "a" in terminal_table(document)
    no_number, infinite, one, none = map(metrics.psnr_db, (math.nan, math.inf, 1.0, 0.0))
    assert no_number == infinite < one == 0 < none == 200


def ring_by_definition(scale: IntensityRange, truth: np.ndarray, restored: np.ndarray, mask: np.ndarray) -> list[float]:
    """Ring by ring, or shell by shell, as van Heel and Schatz define it (2005); NaN where there is no coefficient."""
    box = tuple(slice(places.min(), places.max() + 1) for places in mask.nonzero())
    depth = distance_transform_edt(np.pad(mask, 1))[(slice(1, -1),) * mask.ndim][box]  # outside is not masked
    window = np.sin(np.pi / 2 * np.minimum(1, depth / min(16, depth.max()))) ** 2
    spectra = []
    for image in (truth, restored):
        image01 = np.where(mask, scale.normalise(image), 0)[box]
        spectra.append(np.fft.fftn(window * (image01 - (window * image01).sum() / window.sum())))
    along = [np.minimum(np.arange(n), n - np.arange(n)) / n for n in window.shape]
    ring = (64 * np.sqrt(sum(x**2 for x in np.meshgrid(*along, indexing="ij")))).astype(int)
    found = []
    for number in range(32):
        a, b = (one[ring == number] for one in spectra)
        powers = [float((np.abs(one) ** 2).sum()) for one in (a, b)]
        found.append(float((a * b.conj()).real.sum()) / math.sqrt(math.prod(powers)) if len(a) else math.nan)
    return found


@pytest.mark.parametrize("period", [4, 6, 8])
@pytest.mark.parametrize("name", CASES["ring correlations"])
def test_ring_correlation_is_that_of_the_definition(name: str, period: int) -> None:
    """Of a restoration that is right down to a period of so many voxels."""
    shape, part, hole = CASES["ring correlations"][name]
    rng, scale = np.random.default_rng(3), IntensityRange(-3.0, 3.0)
    truth, noise = rng.normal(size=shape), rng.normal(size=shape)
    mask = marked(shape, slices_of(part)) & ~marked(shape, slices_of(hole))
    frequency = np.sqrt(sum(x**2 for x in np.meshgrid(*map(np.fft.fftfreq, shape), indexing="ij")))
    restored = np.fft.ifftn(np.where(frequency < 1 / period, np.fft.fftn(truth), np.fft.fftn(noise))).real
    found = ring_correlation(scale, truth, restored, mask)
    assert found["resolution"] == pytest.approx(period, rel=0.15)
    for value, wanted in zip(found["frc"], ring_by_definition(scale, truth, restored, mask), strict=True):
        assert value == pytest.approx(wanted, abs=1e-6) if value is not None else math.isnan(wanted)
    assert ring_correlation(scale, truth, truth, mask)["resolution"] == 2
    assert ring_correlation(scale, None, truth, mask) == {}
    assert ring_correlation(scale, np.where(truth == truth.max(), np.nan, truth), truth, mask | True) == {}


def test_the_mean_of_curves_is_of_those_that_are_known() -> None:
    curve = metrics.mean_curve([[1.0, None, 0.5], None, [0.5, None, None]])
    assert curve == [0.75, None, 0.5] and metrics.mean_curve([None]) is None


@pytest.mark.parametrize("name", CASES["thin masks"])
@pytest.mark.parametrize("restored", ["noise", "smooth", "truth"])
def test_resolution_is_unknown_where_the_mask_is_too_small_to_tell_it(name: str, restored: str) -> None:
    """A restoration without fine structure, and none at all, would otherwise have the finest resolution there is."""
    rng, shape = np.random.default_rng(4), (160, 160) if name != "cube of 6" else (24, 40, 40)
    scale, mask = IntensityRange(-3.0, 3.0), marked(shape, slices_of(CASES["thin masks"][name]))
    smooth = gaussian_filter(rng.normal(size=shape), 4)
    truth = smooth / smooth.std() + 0.1 * rng.normal(size=shape)
    other = {"noise": rng.normal(size=shape), "smooth": smooth / smooth.std(), "truth": truth}[restored]
    found = ring_correlation(scale, truth, other, mask)
    assert found["resolution"] is None and len(found["frc"]) == 32


@pytest.mark.parametrize("side", [32, 40, 64, 96, 128])
def test_resolution_of_noise_is_never_fine(side: int) -> None:
    """Few coefficients agree by chance: of the coarsest rings of a small mask, and of all that follow them, too few."""
    rng, scale = np.random.default_rng(side), IntensityRange(-3.0, 3.0)
    mask_YX = marked((160, 160), np.s_[10 : 10 + side, 20 : 20 + side])
    pairs = rng.normal(size=(40, 2, 160, 160))
    found = [ring_correlation(scale, *pair, mask_YX)["resolution"] for pair in pairs]
    assert all(one is None or one > 8 for one in found), found
    assert ring_correlation(scale, pairs[0, 0], pairs[0, 0], mask_YX)["resolution"] == 2


def test_resolution_of_a_constant_truth_is_unknown_and_told_so() -> None:
    mask_YX, scale = marked((160, 160), np.s_[10:150, 20:140]), IntensityRange(0.0, 1.0)
    constant_YX, noise_YX = np.full(mask_YX.shape, 0.3), np.random.default_rng(0).random(mask_YX.shape)
    unknown = ring_correlation(scale, constant_YX, noise_YX, mask_YX)
    assert unknown["resolution"] is None
    flat = ring_correlation(scale, noise_YX, constant_YX, mask_YX)  # what is flat does not show any structure
    known = ring_correlation(scale, noise_YX, noise_YX, mask_YX)
    assert (flat["resolution"], known["resolution"]) == (128, 2)
    rows = [Result(f"a[{n}]", "m", "flat", **QUALITY, **one).row() for n, one in enumerate((unknown, known))]
    assert [row["resolution"] for row in rows] == [None, 2]
    assert "resolution" not in Result("a", "m", "flat", **QUALITY).row()
    told = [metrics.ring_figures(some)[0][2] for some in (rows, rows[1:], rows[:1])]
    assert told == ["2.0 voxels (unknown in 1 of 2 slices)", "2.0 voxels", "unknown"]
