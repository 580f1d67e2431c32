"""Volumes in slices along other axes, hidden regions, weights, calibrated intervals, and methods without a model."""

from pathlib import Path

import numpy as np
import pytest
from cocodiff_eval.data.masks import depth
from cocodiff_eval.data.reoriented import AXES, MaskStatistics, Reoriented, Restored, reoriented_shape, turn
from cocodiff_eval.harness.volume import HiddenRegionReport
from cocodiff_eval.quality.fusing import (
    Intervals,
    Lead,
    Mixture,
    choose_axes,
    fuse,
    quantile,
    samples_along,
    weights_of,
)
from cocodiff_eval.quality.hidden import Hidden, Survey, hide
from cocodiff_eval.restore.baseline import in_cells, laplace, linear, total_variation
from eval_helpers import marked

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
def test_copies_hold_the_same_slices_however_many_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
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
    file = Restored(tmp_path / "one", axis, statistics)
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
    mean_P, spread_P = fuse(values_SP, np.full((6, 50), 0.3))
    np.testing.assert_allclose(mean_P, values_SP.mean(axis=0))
    np.testing.assert_allclose(spread_P, values_SP.std(axis=0, ddof=1))
    weights_SP = np.ones((6, 50))
    weights_SP[2:, 0] = 0  # blind samples say nothing, whatever they hold
    weights_SP[1:, 1] = 0
    values_SP[2:, 0] = np.nan
    mean_P, spread_P = fuse(values_SP, weights_SP)
    assert mean_P[0] == pytest.approx(values_SP[:2, 0].mean()) and mean_P[1] == values_SP[0, 1] and spread_P[1] == 0
    assert spread_P[0] == pytest.approx(values_SP[:2, 0].std(ddof=1))


def test_weights_follow_errors_and_what_they_have_in_common() -> None:
    random = np.random.default_rng(0)
    own = random.normal(size=(3, 20000)) * [[1.0], [2.0], [1.0]]
    weights_A = weights_of(own @ own.T / 20000)
    assert weights_A.sum() == pytest.approx(1) and weights_A[0] == pytest.approx(weights_A[2], rel=0.1)
    assert weights_A[1] < weights_A[0] / 2.5
    alike = np.stack([own[0], own[0] * 3 + own[1], own[2]])
    assert weights_of(alike @ alike.T)[1] == 0  # it knows nothing that the first does not know better
    sure_A = weights_of((own * [[0.01], [1.0], [1.0]]) @ (own * [[0.01], [1.0], [1.0]]).T / 20000)
    assert sure_A[0] > 0.99 and sure_A.sum() == pytest.approx(1)
    errors = dict(zip("zyx", alike, strict=True))
    assert choose_axes(errors, 3).names == ("z", "x") and choose_axes(errors, 1).names in (("z",), ("x",))
    assert "y" in choose_axes(errors, 3, lambda axes: "y" in axes).names
    assert samples_along(6, {"z": 0.2, "y": 0.5, "x": 0.3}) == {"z": 2, "y": 2, "x": 2}
    assert samples_along(4, {"z": 0.2, "y": 0.5, "x": 0.3}) == {"z": 1, "y": 2, "x": 1}


def test_lines_count_where_their_ends_are_alike() -> None:
    random = np.random.default_rng(0)
    apart_P = random.uniform(0, 0.5, 4000)
    apart_P[:10] = np.nan  # lines with one end
    errors = {"z": random.normal(size=4000) * 0.25, "line": random.normal(size=4000) * np.nan_to_num(apart_P, nan=0.3)}
    for name in ("line", "none"):
        found = Mixture.learnt(errors, {name: apart_P})
        weights_AP = found.weights({name: apart_P}, 4000)
        np.testing.assert_allclose(weights_AP.sum(axis=0), 1)
        fused_P = (weights_AP * np.stack([*errors.values()])).sum(axis=0)
        if name == "line":
            assert weights_AP[1][apart_P < 0.03].mean() > 0.5 and weights_AP[1][apart_P > 0.4].mean() < 0.45
            best = float(np.square(fused_P).mean())
        else:
            assert np.ptp(weights_AP, axis=1).max() == 0 and best < float(np.square(fused_P).mean())
    alone = {"line": errors["line"], "useless": random.normal(size=4000) * 5, "useful": random.normal(size=4000) * 0.3}
    all_three = choose_axes({"z": errors["z"]}, 3, others=alone, apart={"line": apart_P})
    assert all_three.names == ("z", "line", "useful")


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
    assert quantile(np.arange(9.0), 0.9) == 8 and quantile(np.arange(99.0), 0.5) == 49
    assert [quantile(np.arange(float(count)), 0.9) for count in (3, 9, 10, 18, 19)] == [2, 8, 9, 17, 17]
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
        clear.append(found.is_clear)
        assert found.of == 12 and found.low < found.db < found.high
    assert np.mean(inside) > 0.88 and np.mean(clear) < 0.3
    sure = Lead.found(own[:12].ravel(), 2 * own[:12].ravel(), region_P, 1)
    assert sure.db == pytest.approx(20 * np.log10(2)) and sure.is_clear and sure.wins == 12
    few = Lead.found(own[:2].ravel(), 2 * own[:2].ravel(), region_P[:100], 1)
    assert few.wins == 2 and not few.is_clear and few.low == -np.inf
    three = Lead.found(own[:3].ravel(), 2 * own[:3].ravel(), region_P[:150], 1)
    assert three.is_clear and 0 < three.low <= three.high < np.inf


def test_linear_interpolates_along_its_axis() -> None:
    volume, mask_ZYX = np.random.default_rng(0).random(SHAPE), random_mask()
    mask_ZYX[:, 3, 4] = True
    for axis in range(3):
        found, apart = (
            np.moveaxis(one, axis, -1) for one in linear(np.where(mask_ZYX, np.nan, volume), mask_ZYX, axis)
        )
        hidden, known = np.moveaxis(mask_ZYX, axis, -1), np.moveaxis(volume, axis, -1)
        for place in np.ndindex(found.shape[:2]):
            line, places = hidden[place], np.arange(found.shape[2])
            wanted = np.interp(places, places[~line], known[place][~line]) if not line.all() else np.nan
            np.testing.assert_allclose(found[place], np.where(line, wanted, known[place]))
            for at in places[line]:
                before, after = (known[place][~line & side] for side in (places < at, places > at))
                ends = before[-1:], after[:1]
                wanted_apart = abs(ends[0] - ends[1]) if all(map(len, ends)) else [np.nan]
                np.testing.assert_allclose(apart[place][at], *wanted_apart)


def test_methods_in_three_dimensions_continue_what_is_smooth() -> None:
    ramp_ZYX = np.add.outer(np.add.outer(np.arange(20.0), np.arange(24.0)), np.arange(28.0)) / 80
    mask_ZYX = marked(SHAPE, np.s_[6:14, 8:16, 9:20])
    hidden_ZYX = np.where(mask_ZYX, np.nan, ramp_ZYX)
    assert np.abs(laplace(hidden_ZYX, mask_ZYX) - ramp_ZYX).max() < 1e-3
    assert np.abs(total_variation(hidden_ZYX, mask_ZYX) - ramp_ZYX).max() < 0.1
    points_P3 = np.argwhere(mask_ZYX)[::7]
    in_one = in_cells(laplace, lambda window: (hidden_ZYX[window], mask_ZYX[window]), SHAPE, points_P3)
    np.testing.assert_allclose(in_one, laplace(hidden_ZYX, mask_ZYX)[tuple(points_P3.T)], atol=1e-3)


def test_cells_are_solved_with_32_voxels_on_all_sides() -> None:
    windows: list[tuple[slice, ...]] = []

    def read(window: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        windows.append(window)
        return (part := np.mgrid[window][0]), part < 0

    points_P3 = np.array([[70, 40, 90], [80, 45, 99], [130, 45, 99]])
    assert in_cells(lambda image01, mask: image01, read, (150, 150, 150), points_P3).tolist() == [70, 80, 130]
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
    assert 1 <= len(rounds) <= 4 and hide(survey, 8, seed=3) == rounds
    for found in rounds:
        check_regions(found, mask_ZYX)
    if len(rounds) > 1:
        assert rounds[0].pieces != rounds[1].pieces
    alone = hide(survey, 8, seed=3, along="z")  # slices along y and x cost nothing there
    assert [one.pieces for one in alone] == [one.pieces for one in rounds]
    for few, many in zip(rounds, alone, strict=True):
        assert len(many.tested["z"]) == len(few.tested["z"])
        assert all(len(many.tested[axis]) > 2 * len(few.tested[axis]) for axis in "yx")


def check_regions(found: Hidden, mask_ZYX: np.ndarray) -> None:
    assert 1 <= len(found.pieces) <= 24
    of_axes = {
        axis: [found.mask(axis, n, lambda at, axis=axis: SLICES[axis](mask_ZYX, at)) for n in range(BIG[place])]
        for place, axis in enumerate(AXES)
    }
    hidden_ZYX = np.stack(of_axes["z"])
    for place, axis in enumerate(AXES):
        np.testing.assert_array_equal(np.stack(of_axes[axis], axis=place), hidden_ZYX)
        assert len(found.tested[axis]) <= 9 and set(found.tested[axis]) <= {*range(BIG[place])}
    assert not (hidden_ZYX & mask_ZYX).any() and 0 < hidden_ZYX.sum() <= 0.3 * (~mask_ZYX).sum()
    judged = hidden_ZYX[np.ix_(*(found.tested[axis] for axis in AXES))]
    np.testing.assert_array_equal(hidden_ZYX[tuple(found.grid)], judged)
    assert judged.sum() >= 8 and {*found.numbers[judged].tolist()} <= {*range(len(found.pieces))}
    for piece in found.pieces:  # each has the form of a part of the mask
        box, own = (
            tuple(slice(at, at + side) for at, side in zip(start, piece.shape, strict=True))
            for start in (piece.target, piece.source)
        )
        np.testing.assert_array_equal(hidden_ZYX[box] | mask_ZYX[box], mask_ZYX[own] | mask_ZYX[box])


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
    figures, lead = {"cocodiff": 21.0, "biharmonic": 20.0}, Lead(1.0, 0.5, 1.5, 3, 3)
    told = HiddenRegionReport({"z": 1.0}, psnr_db=figures, lead=lead, cut=cut).line("scan")
    assert ("these regions are smaller" in told) == cut


def test_nothing_is_hidden_where_everything_touches_the_mask() -> None:
    assert hide(survey_of(marked(BIG, np.s_[::2]), np.zeros(BIG)), 8, seed=0) == ()
