"""Plans of tiles: pure data, so their promises are checked for many shapes without a model."""

import itertools

import numpy as np
import pytest
from cocodiff_eval.data.masks import block_mask, center_mask
from cocodiff_eval.restore.tiling import RestorationPlan, axis_starts, axis_window, plan_restoration
from eval_helpers import calls_of, marked
from hypothesis import given, settings
from hypothesis import strategies as st


def masks(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    rows = np.arange(shape[0])
    return {
        "block": block_mask(shape, 1),
        "center": center_mask(shape),
        "border": marked(shape, np.s_[:5], np.s_[:, -4:]),
        "scratch": marked(shape, (rows, (rows * (shape[1] - 1)) // max(1, shape[0] - 1))),
        "dots": marked(shape, np.s_[2::13, 3::11]),
        "lone": marked(shape, (-1, -1)),
        "almost all": ~marked(shape, (0, 0)),
    }


def check_plan(plan: RestorationPlan, mask_YX: np.ndarray, batch: int) -> None:
    """Every masked voxel of every level is written by some tile, and every tile lies inside its level and has work."""
    np.testing.assert_array_equal(plan.levels[0].mask_YX, mask_YX)
    written_first: set[int] = set()
    for level in reversed(plan.levels):
        assert all(side >= of_tile for side, of_tile in zip(level.padded, level.tile, strict=True))
        assert level.shape == tuple(-(-side // 2**level.exponent) for side in mask_YX.shape)
        np.testing.assert_array_equal(level.labels_YX > 0, level.mask_YX)
        labels_padded = np.pad(level.labels_YX, level.padding)
        assert labels_padded.shape == level.padded
        for tile_pass in level.passes:
            assert all(1 <= len(tiles) <= batch for tiles in tile_pass.batches)
            assert [tile for tiles in tile_pass.batches for tile in tiles] == list(tile_pass.tiles)
            best = np.zeros(level.padded)
            for tile in tile_pass.tiles:
                assert 0 <= tile.row <= level.padded[0] - level.tile[0]
                assert 0 <= tile.column <= level.padded[1] - level.tile[1]
                here = np.s_[tile.row : tile.row + level.tile[0], tile.column : tile.column + level.tile[1]]
                weight = level.weights(tile) * np.isin(labels_padded[here], tile.holes)
                assert weight.max() > 0
                best[here] = np.maximum(best[here], weight)
            labels = sorted({label for tile in tile_pass.tiles for label in tile.holes})
            target = np.isin(labels_padded, labels)
            assert (best[target] >= 0.24).all()
            (top, _), (left, _) = level.padding
            assert np.pad(tile_pass.hidden_YX, level.padding)[target].all() and top >= 0 and left >= 0
            if tile_pass.strength == 1:
                assert not written_first & set(labels)
                written_first |= set(labels)
            else:
                assert set(labels) <= written_first
    assert written_first == set(np.unique(plan.levels[0].labels_YX)) - {0}


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(16, 150), st.integers(16, 150)) | st.sampled_from([(20, 500), (500, 20), (96, 96)]),
    native=st.sampled_from([16, 24, 48, 96]),
    batch=st.integers(1, 9),
    kind=st.sampled_from(["cells", "cells", "block", "center", "border", "scratch", "dots", "lone", "almost all"]),
    seed=st.integers(0, 1000),
    grain=st.integers(1, 40),
    share=st.floats(0.01, 0.95),
)
def test_plans_cover_any_mask(
    shape: tuple[int, int], native: int, batch: int, kind: str, seed: int, grain: int, share: float
) -> None:
    cells = np.random.default_rng(seed).random([-(-side // grain) for side in shape]) < share
    cells_YX = np.kron(cells, np.ones((grain, grain), bool))[: shape[0], : shape[1]]
    mask_YX = cells_YX if kind == "cells" else masks(shape)[kind]
    whole, thin = (plan_restoration(mask_YX, native, batch, **more) for more in ({}, {"multiple": 8}))
    for plan in (whole, thin):
        check_plan(plan, mask_YX, batch)
    assert thin.levels[0].tile == tuple(min(native, -(-side // 8) * 8) for side in shape)
    assert len(thin.levels) <= len(whole.levels)


def test_dust_and_large_slices_are_planned_in_seconds() -> None:
    dust_YX, large_YX = marked((1500, 1500), np.s_[2::7, 3::7]), block_mask((1200, 900), 0)
    plan = plan_restoration(dust_YX, 96, 16)
    assert plan.levels[0].labels_YX.max() > 40000 and len(plan.levels) == 1
    assert len(plan.levels[0].passes[0].tiles) < 2 * (1500 / 57) ** 2
    check_plan(plan_restoration(large_YX, 96, 16), large_YX, 16)


def test_small_slices_are_one_tile() -> None:
    for shape in ((96, 96), (20, 90), (16, 16)):
        (level,) = plan_restoration(center_mask(shape), 96, 8).levels
        ((tile,),) = [one.tiles for one in level.passes]
        assert (tile.row, tile.column, level.padded, level.passes[0].strength) == (0, 0, (96, 96), 1.0)
    assert calls_of(plan_restoration(np.zeros((50, 50), bool), 96, 8)) == 0


def test_holes_that_fit_are_restored_from_noise_at_full_resolution() -> None:
    mask_YX = marked((640, 640), np.s_[100:140, 300:340], np.s_[110:120, 342:347], np.s_[600:602, 0:4])
    (level,) = plan_restoration(mask_YX, 96, 8).levels
    ((first, second),) = [one.tiles for one in level.passes]
    assert (first.row, first.column) == (72, 275) and len(first.holes) == 2
    assert (second.row, second.column) == (640 - 96, 0)


@pytest.mark.parametrize(("side", "levels"), [(15, 1), (16, 1), (17, 2)])
def test_a_hole_of_half_a_tile_fits_it(side: int, levels: int) -> None:
    mask_YX = marked((97, 131), np.s_[30 : 30 + side, 40 : 40 + side])
    plan = plan_restoration(mask_YX, 32, 5)
    check_plan(plan, mask_YX, 5)
    assert len(plan.levels) == levels and any(tile.blend for tile in plan.levels[0].passes[0].tiles) is (levels > 1)


def test_a_deep_hole_goes_from_coarse_to_fine_and_a_scratch_does_not() -> None:
    plan = plan_restoration(center_mask((640, 640)), 96, 8)
    assert [[one.strength for one in level.passes] for level in plan.levels] == [[0.2], [0.2], [0.2], [1.0]]
    assert [level.shape for level in plan.levels] == [(640, 640), (320, 320), (160, 160), (80, 80)]
    thin_YX = marked((640, 64), np.s_[100:540])
    shapes = [[level.shape for level in plan_restoration(one, 96, 8).levels] for one in (thin_YX, thin_YX.T)]
    assert shapes == [[(640 >> n, 64 >> n) for n in range(4)], [(64 >> n, 640 >> n) for n in range(4)]]
    lower = plan_restoration(center_mask((640, 640)), 96, 8, strength=0.1)
    assert [one.strength for level in lower.levels for one in level.passes] == [0.1] * 4
    scratch = plan_restoration(masks((640, 640))["scratch"], 96, 8)
    assert [[one.strength for one in level.passes] for level in scratch.levels] == [[1.0]]


def test_holes_of_different_size_start_on_different_levels() -> None:
    mask_YX = marked((400, 400), np.s_[20:40, 20:40], np.s_[100:250, 100:250])
    fine, middle, coarse = plan_restoration(mask_YX, 96, 8).levels
    assert [one.strength for one in fine.passes] == [1.0, 0.2]
    assert not fine.passes[1].hidden_YX[30, 30] and fine.passes[0].hidden_YX[150, 150]
    assert [one.strength for one in middle.passes] == [0.2] and [one.strength for one in coarse.passes] == [1.0]


@given(length=st.integers(1, 3000), native=st.sampled_from([32, 96, 1024]))
def test_axis_windows_leave_no_gap(length: int, native: int) -> None:
    overlap = native // 4
    starts = axis_starts(length, native, overlap)
    padded = max(length, native)
    assert starts[0] == 0 and starts[-1] + native == padded
    assert all(0 < b - a <= native - overlap for a, b in itertools.pairwise(starts))
    best = np.zeros(padded)
    for start in starts:
        window = axis_window(start, padded, native, overlap)
        best[start : start + native] = np.maximum(best[start : start + native], window)
    assert best.min() >= 0.49
