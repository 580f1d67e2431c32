"""Mean, spread and coverage of several restorations, against numpy and against normal distributions."""

import numpy as np
import pytest
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.masks import block_mask, center_mask
from cocodiff_eval.quality.fusing import Moments, coverage, spread_native
from cocodiff_eval.restore.restore import restore_slices, sample_keys
from eval_helpers import SmoothInpainter, phantom, restore_slice

SCALE = IntensityRange(100.0, 1100.0)
ALL_YX = np.ones((120, 120), bool)


def moments(images: np.ndarray) -> Moments:
    found = Moments.of(images[0])
    for image_YX in images[1:]:
        found = found.merged(Moments.of(image_YX))
    return found


def test_moments_are_those_of_numpy_however_they_are_cut() -> None:
    images = np.random.default_rng(0).normal(1e3, 1.0, (7, 20, 30)).astype(np.float32)
    for cut in (1, 3, 6):
        found = moments(images[:cut]).merged(moments(images[cut:]))
        exact = images.astype(np.float64)
        np.testing.assert_allclose(found.mean_YX, exact.mean(0), rtol=1e-14)
        np.testing.assert_allclose(found.deviation_YX, exact.std(0, ddof=1), rtol=1e-9)
    alike = moments(np.repeat(images[:1], 5, axis=0))
    assert alike.mean_YX.tobytes() == images[0].astype(np.float64).tobytes() and not alike.squares_YX.any()
    assert Moments.of(images[0]).mean_YX.tobytes() == alike.mean_YX.tobytes()
    none = Moments.none(found.mean_YX.shape)  # of no image
    for merged in (none.merged(found), found.merged(none)):
        assert merged.count == 7 and np.array_equal(merged.mean_YX, found.mean_YX)
        assert np.array_equal(merged.squares_YX, found.squares_YX)


@pytest.mark.parametrize("count", [2, 8])
def test_coverage_of_well_spread_samples_is_the_nominal_share(count: int) -> None:
    random = np.random.default_rng(count)
    centre, width = random.random(ALL_YX.shape), random.uniform(0.01, 0.1, ALL_YX.shape)
    draws = random.normal(centre, width, (count + 1, *ALL_YX.shape))
    samples, truth_YX = moments(draws[:count]), SCALE.denormalise(draws[count])
    found = coverage(samples, truth_YX, ALL_YX, SCALE)
    assert found["coverage_50"] == pytest.approx(0.5, abs=0.015)
    assert found["coverage_90"] == pytest.approx(0.9, abs=0.01)
    narrow = Moments(count, samples.mean_YX, samples.squares_YX / 9)
    assert coverage(narrow, truth_YX, ALL_YX, SCALE)["coverage_90"] < found["coverage_90"] - 0.1
    half_YX = np.arange(120)[:, None] < np.full(120, 60)
    torn_YX = np.where(half_YX, truth_YX, np.nan)
    assert coverage(samples, torn_YX, ALL_YX, SCALE) == coverage(samples, truth_YX, half_YX, SCALE)


def test_coverage_is_unknown_without_truth_or_spread() -> None:
    image_YX = phantom(48, 60)
    two, nothing = moments(np.stack([image_YX, image_YX])), {"coverage_50": None, "coverage_90": None}
    mask_YX = center_mask((48, 60))
    assert coverage(two, None, mask_YX, SCALE) == nothing
    assert coverage(two, image_YX * np.nan, mask_YX, SCALE) == nothing
    assert coverage(Moments.of(image_YX), image_YX, mask_YX, SCALE) == nothing
    exact = coverage(two, image_YX, mask_YX, IntensityRange(0.0, 1.0))
    assert exact == {"coverage_50": 1.0, "coverage_90": 1.0}  # the ends of an interval belong to it


def test_the_map_is_in_the_units_of_the_input_and_zero_outside_the_mask() -> None:
    mask_YX = center_mask((48, 60))
    native_YX = spread_native(np.full((48, 60), 0.25), mask_YX, SCALE)
    assert native_YX.dtype == np.float32
    np.testing.assert_array_equal(native_YX, np.where(mask_YX, 250.0, 0.0))
    assert np.isfinite(spread_native(np.ones((48, 60)), mask_YX, IntensityRange(-1e300, 1e300))).all()


@pytest.mark.parametrize("shape", [(32, 32), (97, 131)])
def test_samples_share_calls_and_the_first_is_a_run_of_one(shape: tuple[int, int]) -> None:
    image_YX, mask_YX = phantom(*shape).astype(np.float32), block_mask(shape, 4)
    together, one = SmoothInpainter(), SmoothInpainter()
    restored = restore_slices([image_YX] * 5, [mask_YX] * 5, together, batch=16, samples=range(5))
    assert restored[0].tobytes() == restore_slice(image_YX, mask_YX, one, batch=16).tobytes()
    assert {key for _, _, keys in one.calls for key in keys} <= {key for _, _, keys in together.calls for key in keys}
    assert len(together.calls) < 5 * len(one.calls)
    assert len({image.tobytes() for image in restored}) == 5
    again = restore_slices([image_YX] * 2, [mask_YX] * 2, SmoothInpainter(), batch=1, samples=[4, 2])
    assert [image.tobytes() for image in again] == [restored[4].tobytes(), restored[2].tobytes()]
    mean_YX = moments(np.stack(restored)).mean_YX  # the square is convex: this holds for whatever is restored
    truth = [np.square(one_YX - phantom(*shape))[mask_YX].mean() for one_YX in (*restored, mean_YX)]
    assert truth[-1] <= np.mean(truth[:-1])


def test_keys_of_samples_differ_in_what_a_generator_reads_of_a_seed() -> None:
    assert sample_keys(0) == 0
    first = np.array([level << 20 for level in range(64)])
    starts = np.sort(np.concatenate([first + sample_keys(sample) for sample in range(1024)]))
    assert starts[-1] < 2**32 and np.diff(starts).min() == 2**16  # of torch's seeds on the CPU 32 bits count
