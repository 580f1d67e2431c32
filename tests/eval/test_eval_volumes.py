"""Volumes in slices along other axes, hidden regions, weights, calibrated intervals, and methods without a model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cocodiff_eval.data.masks import depth
from cocodiff_eval.data.reoriented import AXES, MaskStatistics, Reoriented, RestoredFile, reoriented_shape, turn
from cocodiff_eval.harness.volume import Evidence, HiddenRegionReport, HiddenRound, Volume, judge_test
from cocodiff_eval.quality import fusing
from cocodiff_eval.quality.fusing import Intervals, Lead, learn_weights, mean_or_member
from cocodiff_eval.quality.hidden import Hidden, Survey, hide
from cocodiff_eval.restore import baseline
from cocodiff_eval.restore.baseline import METHODS, Window, autoregression, in_cells
from eval_helpers import CASES, marked
from scipy.ndimage import uniform_filter1d
from skimage.restoration import inpaint_biharmonic

SHAPE = (20, 24, 28)
SLICES = {"z": lambda volume, n: volume[n], "y": lambda volume, n: volume[:, n], "x": lambda volume, n: volume[:, :, n]}


def random_mask(seed: int = 0) -> np.ndarray:
    """Some voxels everywhere, and a slice along z that is masked wholly."""
    mask_ZYX = np.random.default_rng(seed).random(SHAPE) < 0.3
    mask_ZYX[7] = True
    return mask_ZYX


def census_of(mask_ZYX: np.ndarray) -> MaskStatistics:
    return MaskStatistics.of(lambda index: mask_ZYX[index], len(mask_ZYX))


@pytest.mark.parametrize("block_bytes", [1, 5000, 2**28])
def test_copies_are_the_same_in_any_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr("cocodiff_eval.data.reoriented.BLOCK_BYTES", block_bytes)
    volume = np.random.default_rng(0).integers(0, 60000, SHAPE, dtype=np.uint16)
    copies = [Reoriented(tmp_path / axis, axis, SHAPE, volume.dtype) for axis in "yx"]
    turn(lambda index: volume[index], copies)
    for copy in copies:
        assert copy.is_whole
        for index in range(reoriented_shape(SHAPE, copy.axis)[0]):
            np.testing.assert_array_equal(copy.read(index), SLICES[copy.axis](volume, index))
        part = slice(3, 9), slice(4, 20), slice(0, 5)
        np.testing.assert_array_equal(copy.window(part), volume[part])
    before = copies[0].path.stat().st_mtime_ns
    turn(lambda index: volume[index], copies)
    assert copies[0].path.stat().st_mtime_ns == before and sorted(p.name for p in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("axis", AXES)
def test_what_is_restored_along_any_axis_is_found_along_z(tmp_path: Path, axis: str) -> None:
    mask_ZYX, volume = random_mask(), np.random.default_rng(1).random(SHAPE).astype(np.float32)
    statistics = census_of(mask_ZYX)
    assert statistics.full("z").nonzero()[0].tolist() == [7] and 7 not in statistics.restorable("z")
    assert statistics.restorable("x") == [*range(28)] and statistics.total == mask_ZYX.sum()
    file = RestoredFile(tmp_path / "one", axis, statistics)
    file.create()
    for index in np.random.default_rng(2).permutation(reoriented_shape(SHAPE, axis)[0]).tolist():
        of_slice = SLICES[axis](mask_ZYX, index)
        file.write(index, SLICES[axis](volume, index)[of_slice])
        np.testing.assert_array_equal(file.read(index), SLICES[axis](volume, index)[of_slice])
    file.create()  # of a start that goes on: nothing is lost
    assert file.path.stat().st_size == 4 * statistics.total
    for index in range(len(volume)):
        np.testing.assert_array_equal(file.read_along_z(index, mask_ZYX[index]), volume[index][mask_ZYX[index]])


def test_equal_weights_give_the_usual_mean_and_deviation() -> None:
    values_SP = np.random.default_rng(0).random((6, 50))
    mean_P, spread_P = fusing.fuse(values_SP, np.full((6, 50), 0.3))
    np.testing.assert_allclose(mean_P, values_SP.mean(axis=0))
    np.testing.assert_allclose(spread_P, values_SP.std(axis=0, ddof=1))
    weights_SP = np.ones((6, 50))
    weights_SP[2:, 0] = 0  # blind samples say nothing, whatever they hold
    weights_SP[1:, 1] = 0
    values_SP[2:, 0] = np.nan
    mean_P, spread_P = fusing.fuse(values_SP, weights_SP)
    assert mean_P[0] == pytest.approx(values_SP[:2, 0].mean()) and mean_P[1] == values_SP[0, 1] and spread_P[1] == 0
    assert spread_P[0] == pytest.approx(values_SP[:2, 0].std(ddof=1))


def test_weights_follow_errors_and_what_they_have_in_common() -> None:
    random, block_P = np.random.default_rng(0), np.repeat(np.arange(42), 500)

    def learn(errors_AP: np.ndarray) -> np.ndarray:
        return learn_weights(*fusing.products_in_blocks(errors_AP, block_P))

    own = random.normal(size=(3, 21000))
    # Which of them errs most changes from block to block: none is clearly behind.
    own *= np.repeat([np.roll([0.5, 1.0, 1.5], block) for block in range(42)], 500, axis=0).T
    weights_A = learn(own)
    assert weights_A.sum() == pytest.approx(1) and weights_A.min() > 0.2
    fused = np.square(weights_A @ own).mean()
    assert fused < 0.5 * np.square(own).mean(axis=1).min()
    clear_A = learn(own * [[1.0], [2.0], [1.0]])
    assert clear_A[1] == 0 and clear_A[0] > 0.3 and clear_A[2] > 0.3
    alike = np.stack([own[0], own[0] * 1.001 + own[1] * 0.01, own[2]])
    assert learn(alike)[:2].min() < 0.02  # one of two that are the same is enough
    assert fusing.samples_along(6, {"z": 0.2, "y": 0.5, "x": 0.3}) == {"z": 2, "y": 2, "x": 2}
    assert fusing.samples_along(4, {"z": 0.2, "y": 0.5, "x": 0.3}) == {"z": 1, "y": 2, "x": 1}
    assert fusing.samples_along(4, {}) == {}


@pytest.mark.parametrize("blocks", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_errs_no_more_than_its_best_member(seed: int, blocks: int) -> None:
    """In blocks that its weights were not learnt in, however few these are and however their errors differ."""
    random, block_P = np.random.default_rng(seed), np.repeat(np.arange(blocks) * 3, 8)
    errors_AP = random.normal(size=(5, block_P.size)) * np.repeat(random.choice([0.1, 1, 3], (5, blocks)), 8, axis=1)
    errors_AP[3:] += random.choice([-2, 2]) * errors_AP[0] * np.repeat(random.choice([-1, 1], blocks), 8)
    weights_A, each_AP = mean_or_member(errors_AP, block_P)
    least = np.square(errors_AP).mean(axis=1).min()
    assert np.square((each_AP * errors_AP).sum(axis=0)).mean() <= least * (1 + 1e-9)
    for found in (weights_A[:, None], each_AP):
        np.testing.assert_allclose(found.sum(axis=0), 1)
        assert (found >= 0).all()
    if (weights_A == 1).any():
        assert np.square(errors_AP[weights_A == 1]).mean() == pytest.approx(least)
    else:  # weights of a block are those of a fold of the others
        assert blocks > 1 and all(np.ptp(each_AP[:, block_P == one], axis=1).max() == 0 for one in np.unique(block_P))


def test_a_member_that_errs_more_has_a_weight_where_none_is_dropped() -> None:
    """Two whose errors have nothing in common: the mean errs least with weights of 4 : 1."""
    errors_AP, block_P = np.random.default_rng(0).normal(size=(2, 4000)) * [[1.0], [2.0]], np.arange(4000) // 40
    for drops, weight in ((True, 0.0), (False, 0.2)):
        weights_A, _ = mean_or_member(errors_AP, block_P, drops=drops)
        assert weights_A[1] == pytest.approx(weight, abs=0.02)


@pytest.mark.parametrize(("size", "clear", "share"), [(1.9, None, 0.217), (1.9, 99, 0), (2.1, None, 0), (1.0, 99, 0.5)])
def test_a_model_has_a_part_where_it_gains_clearly_or_is_near_the_best(
    size: float, clear: float | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors have nothing in common with those of the others, and are 1.9 times as large: with weights of 3.6 : 1
    the mean gains 1 dB. If it is more than 6 dB behind it is left out."""
    if clear is not None:
        monkeypatch.setattr("cocodiff_eval.harness.volume.CLEAR", clear)
    simple_P, of_model_P = np.random.default_rng(0).normal(size=(2, 8000)) * [[1.0], [size]]
    blocks_P = np.arange(8000) // 80
    found = Evidence(
        truth_P=np.zeros(8000), deep_P=np.ones(8000), region_P=blocks_P, block_P=blocks_P, own={}, others={}
    )
    taken, error_P = found.with_model(simple_P, of_model_P)
    assert taken == pytest.approx(share, abs=0.02)
    if not share:
        np.testing.assert_array_equal(error_P, simple_P)


@pytest.mark.parametrize(("errors", "near"), [(0.5, False), (1.0, True)])
def test_members_are_near_the_best_within_some_standard_errors(errors: float, near: bool) -> None:
    """The second errs more by .7 standard errors of the difference over blocks."""
    apart_B = np.random.default_rng(0).normal(size=40)
    apart_B = 9 + (apart_B - apart_B.mean()) / apart_B.std(ddof=1) + 0.7 / np.sqrt(40)
    errors_AP = np.sqrt(np.stack([np.full(40, 9.0), apart_B]))
    found_A = fusing.near_best(*fusing.products_in_blocks(errors_AP, np.arange(40)), errors)
    assert found_A.tolist() == [True, near]
    assert fusing.near_best(*fusing.products_in_blocks(errors_AP, np.zeros(40, int)), errors).all()  # no scatter known


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize(("worse", "shares"), [(1.0, (1 / 3,) * 3), (2.0, (4 / 9, 4 / 9, 1 / 9)), (9.0, (0.5, 0.5))])
def test_axes_have_weights_by_their_errors(worse: float, shares: tuple[float, ...], chosen: bool) -> None:
    """Those of one that errs more are smaller, of one that errs far more none; given axes have equal ones."""
    random, count = np.random.default_rng(0), 8000
    sizes = dict(zip(AXES, (0.1, 0.1, 0.1 * worse), strict=True))
    own = {axis: random.normal(size=(1, count)) * size for axis, size in sizes.items()}
    blocks_P = np.arange(count) // 80
    found = Evidence(
        truth_P=np.zeros(count), deep_P=np.ones(count), region_P=blocks_P, block_P=blocks_P, own=own, others={}
    )
    volume = replace(volume_of_mask(MASKS["holes"]), chosen=chosen)
    weights, error_P = found.of_model(volume, 6)
    expected = shares if chosen else (1 / 3,) * 3
    assert [*weights] == [*AXES[: len(expected)]] and sum(weights.values()) == pytest.approx(1)
    assert [*weights.values()] == pytest.approx(expected, abs=0.03)
    mean_P = sum(weight * own[axis][0] for axis, weight in weights.items())
    assert np.square(error_P).mean() == pytest.approx(np.square(mean_P).mean(), rel=0.02)
    if chosen:  # one sample goes along one axis
        assert len(found.of_model(volume, 1)[0]) == 1
    lost = replace(volume_of_mask(MASKS["holes"] | marked(MASKS["holes"].shape, np.s_[7]), "z"), chosen=chosen)
    assert replace(found, own={"z": own["z"]}).of_model(lost, 6)[0] == {"z": 1.0}  # slice 7 is left as it is


@pytest.mark.parametrize("informative", [True, False])
def test_calibrated_intervals_hold_their_share_of_other_voxels(informative: bool) -> None:
    random = np.random.default_rng(0)
    scale_P = random.uniform(0.01, 0.2, 4000)
    errors_P = random.standard_t(3, 4000) * (scale_P if informative else 0.1)
    found = Intervals.calibrated(errors_P[:2000], scale_P[:2000], np.ones(2000))
    for share in (0.5, 0.9):
        inside = np.abs(errors_P[2000:]) <= found.radius(scale_P[2000:], share)
        assert inside.mean() == pytest.approx(share, abs=0.03)
    flat = Intervals.calibrated(errors_P[:2000], np.zeros(2000), np.ones(2000))
    assert np.ptp(flat.radius(scale_P, 0.9)) == 0
    if informative:  # narrower on average than ones of one width
        assert found.radius(scale_P, 0.9).mean() < 0.95 * flat.radius(scale_P, 0.9).mean()
    assert fusing.quantile(np.arange(9.0), 0.9) == 8 and fusing.quantile(np.arange(99.0), 0.5) == 49
    assert [fusing.quantile(np.arange(float(count)), 0.9) for count in (3, 9, 10, 18, 19)] == [2, 8, 9, 17, 17]
    few = Intervals.calibrated(errors_P[:199], scale_P[:199], np.ones(199))
    for unknown in (Intervals.unknown(), few, Intervals.calibrated(np.zeros(0), np.zeros(0), np.zeros(0))):
        assert unknown.radius(scale_P, 0.9).min() == np.inf and unknown.record() is None


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_intervals_of_shallow_regions_hold_deep_in_the_mask(spread: float) -> None:
    random = np.random.default_rng(0)
    depth_P = np.concatenate([random.uniform(1, 6, 4000), random.uniform(10, 24, 4000)])
    errors_P, spread_P = random.normal(size=8000) * 0.1 * np.sqrt(depth_P), np.full(8000, spread)
    found = Intervals.calibrated(errors_P[:4000], spread_P[:4000], depth_P[:4000]).at(depth_P[4000:])
    for share in (0.5, 0.9):
        inside = np.abs(errors_P[4000:]) <= found.radius(spread_P[4000:], share)
        assert inside.mean() == pytest.approx(share, abs=0.04)


def test_depth_is_how_far_the_nearest_known_voxel_is() -> None:
    # In slice 7 nothing is known, but before and behind it.
    mask_ZYX = marked((12, 20, 24), np.s_[3:10, 4:16, 5:20], np.s_[7])
    found_ZYX = np.stack([depth(mask_ZYX.__getitem__, index, len(mask_ZYX)) for index in range(len(mask_ZYX))])
    assert (found_ZYX[~mask_ZYX] == 0).all() and found_ZYX[5, 4, 5] == 1 and found_ZYX[7, 0, 0] == 1
    assert found_ZYX[6, 9, 12] == 4 and found_ZYX[3, 9, 12] == 1 and found_ZYX[5, 6, 12] == 3
    every = np.ones((5, 4, 4), bool)
    assert np.isfinite(depth(every.__getitem__, 2, 5)).all()


def test_the_expected_lead_holds_that_of_another_mask() -> None:
    """Regions whose leads scatter by 2 dB around one of 1.5 dB, and masks of two such parts."""
    random, inside, clear = np.random.default_rng(0), [], []
    region_P = np.repeat(np.arange(12) * 7, 50)
    for _ in range(300):
        own = random.normal(size=(14, 50))
        other = random.normal(size=(14, 50)) * 10 ** (random.normal(1.5, 2, (14, 1)) / 20)
        found = Lead.found(own[:12].ravel(), other[:12].ravel(), region_P, 2)
        true = 10 * np.log10(np.square(other[12:]).sum() / np.square(own[12:]).sum())
        inside.append(found.low <= true <= found.high)
        clear.append(found.low > 0 or found.high < 0)
        assert found.of == 12 and found.low < found.db < found.high
    assert np.mean(inside) > 0.88 and np.mean(clear) < 0.3
    sure = Lead.found(own[:12].ravel(), 2 * own[:12].ravel(), region_P, 1)
    assert sure.db == pytest.approx(20 * np.log10(2)) and sure.low > 0 and sure.wins == 12 and sure.voxels == 600
    few = Lead.found(own[:2].ravel(), 2 * own[:2].ravel(), region_P[:100], 1)
    assert few.wins == 2 and few.low == -np.inf and few.high == np.inf
    three = Lead.found(own[:3].ravel(), 2 * own[:3].ravel(), region_P[:150], 1)
    assert 0 < three.low <= three.high < np.inf


@pytest.mark.parametrize(("low", "high", "by_model", "kind"), CASES["leads"])
def test_what_a_lead_says_of_a_restoration(low: float, high: float, by_model: bool, kind: str) -> None:
    found = Lead(db=1.25, low=low, high=high, wins=3, of=5, voxels=700).outcome("linear across z", by_model)
    assert (found.kind, found.rival, found.lead_db) == (kind, "linear across z", 1.25)
    assert (found.regions, found.voxels, found.reason is None) == (5, 700, kind != "unknown")
    assert found.expected_db == (None if np.isinf(low) else (low, high))
    told = str(found)
    assert kind in told and "700" in told and (found.reason or "linear across z") in told


def test_linear_interpolates_along_its_axis() -> None:
    volume, mask_ZYX = np.random.default_rng(0).random(SHAPE), random_mask()
    mask_ZYX[:, 3, 4] = True
    for axis in range(3):
        found = np.moveaxis(baseline.linear(np.where(mask_ZYX, np.nan, volume), mask_ZYX, axis), axis, -1)
        hidden, known = np.moveaxis(mask_ZYX, axis, -1), np.moveaxis(volume, axis, -1)
        for place in np.ndindex(found.shape[:2]):
            line, places = hidden[place], np.arange(found.shape[2])
            wanted = np.interp(places, places[~line], known[place][~line]) if not line.all() else np.nan
            np.testing.assert_allclose(found[place], np.where(line, wanted, known[place]))


def test_methods_in_three_dimensions_continue_what_is_smooth() -> None:
    ramp_ZYX = np.add.outer(np.add.outer(np.arange(20.0), np.arange(24.0)), np.arange(28.0)) / 80
    mask_ZYX = marked(SHAPE, np.s_[6:14, 8:16, 9:20])
    hidden_ZYX = np.where(mask_ZYX, np.nan, ramp_ZYX)
    assert np.abs(baseline.laplace(hidden_ZYX, mask_ZYX) - ramp_ZYX).max() < 1e-3
    assert np.abs(baseline.total_variation(hidden_ZYX, mask_ZYX) - ramp_ZYX).max() < 0.1
    assert np.abs(baseline.smooth_continuation(hidden_ZYX, mask_ZYX) - ramp_ZYX).max() < 1e-3
    known_ZYX = np.where(mask_ZYX, np.nan, np.square(ramp_ZYX))
    step_ZYX = np.broadcast_to(np.arange(24)[:, None] > 11, SHAPE).astype(float)
    edge_ZYX = baseline.total_variation(np.where(mask_ZYX, np.nan, step_ZYX), mask_ZYX)
    error, blurred = (np.abs(one - step_ZYX).max() for one in (edge_ZYX, baseline.laplace(step_ZYX, mask_ZYX)))
    assert error < 0.1 < blurred  # the shortest edge is the straight one
    assert np.isnan(baseline.smooth_continuation(known_ZYX, marked(SHAPE, np.s_[4]), axes=(1, 2))[4]).all()


@pytest.mark.parametrize("side", [1, 2])
def test_an_autoregression_goes_on_as_known_voxels_do(side: int) -> None:
    """Waves go on through a hole that is longer than they are; far from known noise its mean is approached."""
    z, y, x = np.indices(SHAPE)
    noise_ZYX = np.random.default_rng(0).random(SHAPE)
    for volume, box, least in (
        (0.5 + 0.3 * np.sin(x / 1.2 + z / 5) * np.cos(y / 2), np.s_[6:14, 8:16, 9:20], 0.02),
        (noise_ZYX.cumsum(0), np.s_[:, 8:16, 9:20], None),
        (noise_ZYX, np.s_[12:, 14:, 16:], None),
        (np.full(SHAPE, 0.4), np.s_[6:14], 1e-9),
    ):
        mask_ZYX = marked(SHAPE, box)
        found = autoregression(np.where(mask_ZYX, np.nan, volume), mask_ZYX, side)
        np.testing.assert_array_equal(found[~mask_ZYX], volume[~mask_ZYX])
        error, other = (np.abs(one - volume).max() for one in (found, baseline.smooth_continuation(volume, mask_ZYX)))
        assert error <= (other if least is None else least)
    mask_ZYX = marked(SHAPE, np.s_[12:, 14:, 16:])
    deep = autoregression(noise_ZYX, mask_ZYX, side)[-4:, -4:, -4:]
    assert np.abs(deep - noise_ZYX[~mask_ZYX].mean()).max() < 0.02


def test_an_autoregression_makes_nothing_of_voxels_too_dense_to_learn_from() -> None:
    """Rather than a constant; and fewer of them suffice where it reaches less far."""
    volume = np.random.default_rng(0).random(SHAPE).cumsum(0)
    for step, made in ((2, (False, False)), (3, (True, False)), (7, (True, True))):
        mask_ZYX = marked(SHAPE, np.s_[1::step])
        found = [autoregression(volume, mask_ZYX, side) for side in (1, 2)]
        assert tuple(np.isfinite(one[mask_ZYX]).all() for one in found) == made
        for one, finite in zip(found, made, strict=True):
            assert np.isnan(one[mask_ZYX]).all() != finite and np.array_equal(one[~mask_ZYX], volume[~mask_ZYX])


def reader(image_ZYX: np.ndarray, mask_ZYX: np.ndarray, windows: list[Window]) -> Callable[[Window], Any]:
    """Return a function that reads windows of an image and its mask, and notes them."""

    def read(window: Window) -> tuple[np.ndarray, np.ndarray]:
        windows.append(window)
        return image_ZYX[window], mask_ZYX[window]

    return read


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("small", [True, False])
def test_a_method_makes_the_same_in_cells_as_whole(name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what lies far away; also in the middle of more than a window that is masked."""
    for constant, value in (("CELL", 10), ("SMALL", 2**21 * small)):
        monkeypatch.setattr(f"cocodiff_eval.restore.baseline.{constant}", value)
    volume = np.random.default_rng(0).random(SHAPE).cumsum(0).cumsum(1) / 99
    mask_ZYX = marked(SHAPE, np.s_[6:14, 8:16, 9:20], np.s_[2], np.s_[15:, 20:, 24:])
    hidden_ZYX, points_P3 = np.where(mask_ZYX, np.nan, volume), np.argwhere(mask_ZYX)[::7]
    whole = METHODS[name].solve(hidden_ZYX, mask_ZYX)[tuple(points_P3.T)]
    windows = list[Window]()
    read = reader(hidden_ZYX, mask_ZYX, windows)
    found = in_cells(METHODS[name], read, SHAPE, points_P3)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(whole))
    np.testing.assert_allclose(found, whole, atol=0.01)
    assert "3-D" not in name or max(mask_ZYX[one].size for one in windows) == volume.size
    near = METHODS[name]._replace(reach=(2, 2, 2))
    if METHODS[name].fills:  # two voxels around this one everything is masked
        assert np.isfinite(in_cells(near, read, SHAPE, np.array([[10, 12, 14]]))).all()
        assert max(mask_ZYX[one].size for one in windows[-2:]) > 5**3


@pytest.mark.parametrize("box", [np.s_[6:9, 8:13, 9:12], np.s_[17:, 21:, :3], np.s_[4:6]])
def test_the_biharmonic_continuation_of_a_volume_is_that_of_scikit_image(box: tuple[slice, ...]) -> None:
    volume, mask_ZYX = np.random.default_rng(0).random(SHAPE).cumsum(0).cumsum(1), marked(SHAPE, box)
    found = baseline.smooth_continuation(np.where(mask_ZYX, np.nan, volume), mask_ZYX)
    wanted = inpaint_biharmonic(np.where(mask_ZYX, 0, volume), mask_ZYX)
    np.testing.assert_array_equal(found[~mask_ZYX], volume[~mask_ZYX])
    assert np.abs(found - wanted).max() < 0.02 * np.abs(volume - wanted).max()


def test_cells_are_solved_with_32_voxels_on_all_sides() -> None:
    windows, numbers_ZYX = list[Window](), np.broadcast_to(np.arange(150)[:, None, None], (150, 150, 150))
    points_P3 = np.array([[70, 40, 90], [80, 45, 99], [130, 45, 99]])
    method = baseline.Method(lambda image01, mask: image01, METHODS[baseline.SMOOTH].reach)
    read = reader(numbers_ZYX, numbers_ZYX < 0, windows)
    assert in_cells(method, read, numbers_ZYX.shape, points_P3).tolist() == [70, 80, 130]
    assert windows == [np.s_[38:113, 8:78, 58:132], np.s_[98:150, 13:78, 67:132]]


BIG = (40, 44, 48)


def balls(*middles: tuple[int, int, int], radius: float = 5) -> np.ndarray:
    places = np.stack(np.mgrid[tuple(slice(side) for side in BIG)], axis=-1)
    return np.any([np.linalg.norm(places - middle, axis=-1) < radius for middle in middles], axis=0)


def survey_of(mask_ZYX: np.ndarray, volume: np.ndarray | None = None) -> Survey:
    volume = np.random.default_rng(0).random(mask_ZYX.shape) if volume is None else volume
    return Survey.of(volume.__getitem__, mask_ZYX.__getitem__, volume.shape)


MASKS = {
    "holes": balls((9, 9, 9), (28, 30, 20)),
    "slab": marked(BIG, np.s_[10:14]),
    "columns": marked(BIG, np.s_[:, 4:10, 30:36], np.s_[:, 20:28, 10:18]),
}


@pytest.mark.parametrize("mask_ZYX", MASKS.values(), ids=MASKS)
def test_hidden_regions_are_the_masks_where_voxels_are_known(mask_ZYX: np.ndarray) -> None:
    survey = survey_of(mask_ZYX)
    rounds = hide(survey, 8, seed=3)
    assert 2 <= len(rounds) <= 4 and hide(survey, 8, seed=3) == rounds
    lattices = [found for found in rounds if found.tested]
    assert 1 <= len(lattices) <= 2 and lattices == [*rounds[: len(lattices)]]
    for axis in AXES:  # slices cost time, so that there are no more than were asked for
        assert 1 <= sum(len(found.tested[axis]) for found in lattices) <= 8
    for found in rounds:
        check_regions(found, mask_ZYX)
    assert len({found.pieces for found in rounds}) == len(rounds)
    found = hide(survey_of(mask_ZYX | marked(BIG, np.s_[25])), 8, seed=3, along="z")  # it leaves a lost slice as it is
    assert mask_ZYX[10].all() or all(piece.shape[1:] != BIG[1:] for one in found for piece in one.pieces)
    alone = hide(survey, 8, seed=3, along="z")  # slices along y and x cost nothing there
    assert [one.pieces for one in alone] == [one.pieces for one in rounds]
    for few, many in zip(lattices, alone, strict=False):
        assert len(many.tested["z"]) == len(few.tested["z"])
        assert all(len(many.tested[axis]) > 2 * len(few.tested[axis]) for axis in "yx")


def hidden_of(found: Hidden, mask_ZYX: np.ndarray, axis: str = "z") -> np.ndarray:
    """Return the voxels that are hidden in regions, by their masks of slices along an axis."""
    place, read = AXES.index(axis), partial(SLICES[axis], mask_ZYX)
    return np.stack([found.mask(axis, n, read) for n in range(mask_ZYX.shape[place])], axis=place)


def check_regions(found: Hidden, mask_ZYX: np.ndarray) -> None:
    assert 1 <= len(found.pieces) <= (24 if found.tested else 400)
    hidden_ZYX = hidden_of(found, mask_ZYX)
    for place, axis in enumerate(AXES):
        np.testing.assert_array_equal(hidden_of(found, mask_ZYX, axis), hidden_ZYX)
        assert {*found.tested.get(axis, ())} <= {*range(BIG[place])}
    for first in ((0, 0, 0), (3, 5, 7), (9, 1, 20)):
        window = tuple(slice(at, side - 3) for at, side in zip(first, BIG, strict=True))
        np.testing.assert_array_equal(found.mask_in(window, mask_ZYX.__getitem__), hidden_ZYX[window])
    assert not (hidden_ZYX & mask_ZYX).any() and 0 < hidden_ZYX.sum() <= 0.3 * (~mask_ZYX).sum()
    if not found.tested:  # as many as the mask has, as far as the known voxels allow it
        assert hidden_ZYX.sum() >= 0.8 * min(mask_ZYX.sum(), 0.15 * (~mask_ZYX).sum())
    judged_P3 = volume_of_mask(mask_ZYX).judged(found)
    np.testing.assert_array_equal(judged_P3, np.argwhere(hidden_ZYX))
    for number, piece in zip(found.numbers(judged_P3), judged_P3, strict=True):
        start, sides = np.array(found.pieces[number].target), np.array(found.pieces[number].shape)
        assert (start <= piece).all() and (piece < start + sides).all()
    for piece in found.pieces:  # each has the form of a part of the mask
        box, own = (tuple(map(slice, start, np.add(start, piece.shape))) for start in (piece.target, piece.source))
        assert (hidden_ZYX[box] | mask_ZYX[box])[mask_ZYX[own]].all()
        if found.tested:  # boxes lie apart, else regions may lie in the corners of each other's
            np.testing.assert_array_equal(hidden_ZYX[box] | mask_ZYX[box], mask_ZYX[own] | mask_ZYX[box])


def volume_of_mask(mask_ZYX: np.ndarray, axes: str = AXES) -> Volume:
    return Volume(tuple(axes), True, True, census_of(mask_ZYX), mask_ZYX.__getitem__)


def test_autoregressions_are_tried_where_few_cells_have_large_holes() -> None:
    """Cells of 64 voxels of a large volume: all 5 x 5 of one slab, a masked voxel in each of 125, 1331 in each."""
    mask_ZYX = np.zeros((320, 320, 320), bool)
    mask_ZYX[70] = mask_ZYX[::64, ::64, ::64] = True
    assert volume_of_mask(mask_ZYX).methods == [*METHODS]
    near_ZYX = [np.arange(320) % 64 < 11] * 3
    mask_ZYX[np.ix_(*near_ZYX)] = True
    assert volume_of_mask(mask_ZYX).methods == [name for name in METHODS if name not in baseline.AUTOREGRESSIONS]


def test_holes_that_are_far_apart_are_restored_as_together() -> None:
    """Each has a small linear system of its own; a voxel of another hole is none that is known."""
    z, y, x = np.indices((24, 48, 48))
    waves_ZYX = 0.5 + 0.3 * np.sin(x / 1.2 + z / 5) * np.cos(y / 2)
    boxes = np.s_[4:6, 5:8, 6:8], np.s_[15:17, 30:33, 31:34], np.s_[8:10, 38:40, 10:12]
    mask_ZYX = marked(waves_ZYX.shape, *boxes)
    for side in (1, 2):
        found = autoregression(np.where(mask_ZYX, np.nan, waves_ZYX), mask_ZYX, side)
        assert np.abs(found - waves_ZYX).max() < 0.01


def test_small_parts_are_hidden_in_many_places_and_what_touches_the_border_there() -> None:
    for count in (1, 300):
        places_N3 = np.random.default_rng(0).integers(0, np.array(BIG) - 2, (count, 3))
        mask_ZYX = marked(BIG, *(np.s_[z : z + 2, y : y + 2, x : x + 2] for z, y, x in places_N3.tolist()))
        rounds = hide(survey_of(mask_ZYX), 8, seed=0)
        assert all(len(found.pieces) > 100 for found in rounds if not found.tested) and len(rounds) == 4
    corners = [one for found in hide(survey_of(marked(BIG, np.s_[:9, 30:, :12])), 8, seed=0) for one in found.pieces]
    assert corners
    for piece in corners:
        ends = zip(piece.target, piece.shape, BIG, strict=True)
        assert all(start in (0, whole - side) for start, side, whole in ends)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("mask_ZYX", MASKS.values(), ids=MASKS)
def test_large_volumes_are_sampled(mask_ZYX: np.ndarray, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SMALL": BIG[0] ** 3 * 9 * small, "JUDGED": 999, "BLOCK": 9}.items():
        monkeypatch.setattr(f"cocodiff_eval.harness.volume.{name}", value)
    volume = volume_of_mask(mask_ZYX)
    for found in hide(survey_of(mask_ZYX), 8, seed=3):
        hidden_ZYX = hidden_of(found, mask_ZYX)
        points_P3 = volume.judged(found)
        assert hidden_ZYX[tuple(points_P3.T)].all() and len(np.unique(points_P3, axis=0)) == len(points_P3)
        assert len(points_P3) == 999 or (not small and len(points_P3) > 20)
        if found.tested:  # first where slices along all axes meet
            grid = np.all([np.isin(points_P3[:, n], found.tested[axis]) for n, axis in enumerate(AXES)], axis=0)
            assert grid.sum() == hidden_ZYX[np.ix_(*(found.tested[axis] for axis in AXES))].sum()
            assert small or grid.all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("axes", ["z", "zyx", "yx"])
@pytest.mark.parametrize("samples", [2, 8, 40])
@pytest.mark.parametrize("mask_ZYX", [*MASKS.values(), marked(BIG, np.s_[9, 9:11, 9:12])], ids=[*MASKS, "speck"])
def test_the_test_restores_no_more_slices_than_the_job(mask_ZYX: np.ndarray, samples: int, axes: str) -> None:
    volume = volume_of_mask(mask_ZYX, axes)
    rounds = volume.regions(np.random.default_rng(0).random(BIG).__getitem__, samples, 0)
    tested = sum(len(found.tested[axis]) for found in rounds if found.tested for axis in axes)
    of_job = sum(len(volume.statistics.restorable(axis)) for axis in axes) * samples / len(axes)
    assert len(axes) <= tested <= len(axes) * 32
    assert tested * volume.sampled(samples) <= max(of_job, len(axes)) or not of_job  # it restores none then


def test_regions_are_hidden_where_it_looks_as_around_the_mask() -> None:
    """Half of the volume is empty: nothing is learnt there of a hole in the other half."""
    volume = np.random.default_rng(0).random(BIG)
    volume[:, :, 24:] *= 0.01
    found = hide(survey_of(balls((20, 22, 8), radius=4), volume), 8, seed=0)
    assert found and all(piece.target[2] + piece.shape[2] <= 26 for one in found for piece in one.pieces)


def test_a_large_volume_is_surveyed_in_cells() -> None:
    survey = survey_of(marked((300, 20, 16), np.s_[10:14]))
    assert survey.step == (3, 1, 1) and survey.masked_ZYX.shape == (100, 20, 16)
    assert survey.masked_ZYX[:, 0, 0].nonzero()[0].tolist() == [3, 4]
    found = hide(survey, 8, seed=0)
    assert found and all(piece.shape[1:] == (20, 16) for one in found for piece in one.pieces)


@pytest.mark.parametrize(("y", "x", "cut"), [(4, 5, False), (12, 13, True)])
def test_it_is_told_where_parts_of_the_mask_find_no_place_whole(y: int, x: int, cut: bool) -> None:
    """A column through the middle: a large one is cut to smaller regions, of which less is to be learnt."""
    rounds = hide(survey_of(marked(BIG, np.s_[:, 22 - y : 22 + y, 24 - x : 24 + x])), 8, seed=0)
    assert rounds and all(one.cut == cut for one in rounds)
    figures, lead = {"cocodiff": 21.0, "biharmonic": 20.0}, Lead(db=1.0, low=0.5, high=1.5, wins=3, of=3, voxels=900)
    told = HiddenRegionReport({"z": 1.0}, psnr_db=figures, lead=lead, cut=cut).line("scan")
    assert ("these regions are smaller" in told) == cut


def test_gaps_that_cross_are_hidden_one_by_one() -> None:
    survey = survey_of(marked(BIG, np.s_[:, 20:23], np.s_[:, :, 30:32]))
    rounds = [one for seed in range(4) for one in hide(survey, 8, seed)]
    shapes = {piece.shape for one in rounds for piece in one.pieces}
    assert shapes == {(40, 3, 48), (40, 44, 2)} and not any(one.cut for one in rounds)


def try_members(seed: int) -> tuple[Volume, list[HiddenRound]]:
    """Make a random volume and mask, and what a test makes of them with a model whose errors are random."""
    random = np.random.default_rng(seed)
    volume = random.normal(size=SHAPE)
    for axis in range(3):
        volume = uniform_filter1d(volume, int(random.choice([1, 3, 7])), axis=axis)
    volume = 0.5 + 0.2 * volume / volume.std() + random.choice([0, 0.05]) * random.normal(size=SHAPE)
    specks = [np.s_[z : z + 2, y, x : x + 2] for z, y, x in random.integers(0, 18, (40, 3)).tolist()]
    boxes = [np.s_[4:7], np.s_[:, 5:11, 8:15], np.s_[:6, :9, 20:], np.s_[3:9, 4:10, 6:12]]
    mask_ZYX = marked(SHAPE, *[specks, *([box] for box in boxes)][int(random.integers(5))])
    found, made = volume_of_mask(mask_ZYX), []
    scale, stack = SimpleNamespace(normalise=np.asarray), SimpleNamespace(read=volume.__getitem__)
    size, common = random.choice([0.02, 0.1, 0.2]), random.choice([0.3, 0.9])
    for hidden in found.regions(volume.__getitem__, 6, seed):
        one = HiddenRound(hidden, found.judged(hidden), found, SimpleNamespace(scale=scale, stack=stack), 6)
        unknown_ZYX = mask_ZYX | hidden_of(hidden, mask_ZYX)
        read, count = reader(np.where(unknown_ZYX, 0, volume), unknown_ZYX, []), len(one.points_P3)
        one.add("", (), 0, {name: in_cells(of, read, SHAPE, one.points_P3) for name, of in METHODS.items()})
        shared_P = random.normal(size=count) * size * common
        for axis, indices in hidden.tested.items():
            seen = [index for index in indices if not SLICES[axis](unknown_ZYX, index).all()]
            for sample in range(found.sampled(6)):
                drawn_P = one.truth_P + shared_P + random.normal(size=count) * size * (1 - common)
                one.add(axis, seen, sample, {"cocodiff": drawn_P[one.along(axis, seen)]})
        made.append(one)
    return found, made


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_fills_leaves_no_voxel_where_a_slice_is_masked_wholly(name: str) -> None:
    volume, mask_ZYX = np.random.default_rng(3).random((12, 14, 16)), np.zeros((12, 14, 16), bool)
    mask_ZYX[5], mask_ZYX[:, 6], mask_ZYX[:, :, 7] = True, True, True
    assert np.isfinite(METHODS[name].solve(volume, mask_ZYX)[mask_ZYX]).all() or not METHODS[name].fills


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(60))
def test_what_is_written_leads_every_member_or_is_one(seed: int) -> None:
    volume, rounds = try_members(seed)
    found = judge_test(rounds, volume, 6)
    assert found.psnr_db is not None and sum(found.weights.values()) == pytest.approx(1)
    assert found.regions == sum(len(np.unique(one.blocks()[:, 0])) for one in rounds)
    assert found.psnr_db["cocodiff"] >= max(found.psnr_db.values()) - 1e-9
    assert (found.axes == {}) == (not any(axis in found.weights for axis in AXES))
    if not found.axes:  # no sample is drawn, and something restores every voxel
        assert any("3-D" in name for name in found.weights)
    best = max(db for name, db in found.psnr_db.items() if name in METHODS)
    if found.psnr_db["the model alone"] < best - 6:
        assert not found.axes and found.is_hopeless
    if found.psnr_db["the model alone"] > best + 6:
        assert sum(found.weights[axis] for axis in found.axes) > 0.6
    assert found.lead is not None
    ahead = found.psnr_db["cocodiff"] - best
    assert found.lead.db == pytest.approx(ahead, abs=0.01) and found.lead.low <= found.lead.db <= found.lead.high
    assert np.isinf(found.lead.low) or (found.lead.low + found.lead.high) / 2 == pytest.approx(found.lead.db)
