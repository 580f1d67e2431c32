"""Ranges, filling, and that nothing under the mask reaches any output."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cocodiff_eval.data import intensity
from cocodiff_eval.data.intensity import IntensityRange, compose_native, intensity_range
from cocodiff_eval.data.masks import Mask, block_mask, center_mask, make_mask
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.data.volume import Part, Stack
from cocodiff_eval.report.pictures import Picture, encode
from cocodiff_eval.restore import baseline
from cocodiff_eval.restore.restore import restore_slices
from eval_helpers import SmoothInpainter, marked, phantom, restore_slice
from file_kinds import write_tiff
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodiff.config.errors import UserError


def save(folder: Path, array: np.ndarray, kind: str = "center", **more: Part) -> tuple[Stack, Mask]:
    """Return a stack and a mask, as if it came from a file."""
    stack = open_stack(write_tiff(folder, array), **more)
    return stack, replace(make_mask(kind, stack, 5), from_file=True)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(1, 70), seed=st.integers(0, 99), share=st.floats(0, 0.99))
def test_filling_keeps_the_known_and_stays_between_them(rows: int, columns: int, seed: int, share: float) -> None:
    generator = np.random.default_rng(seed)
    image_YX = generator.normal(size=(rows, columns))
    mask_YX = generator.random((rows, columns)) < share
    mask_YX.flat[generator.integers(mask_YX.size)] = False
    filled_YX = intensity.fill_from_outside(np.where(mask_YX, np.nan, image_YX), mask_YX)
    known = image_YX[~mask_YX]
    np.testing.assert_array_equal(filled_YX[~mask_YX], known)
    assert filled_YX.min() >= known.min() and filled_YX.max() <= known.max()
    assert filled_YX.tobytes() == intensity.fill_from_outside(image_YX, mask_YX).tobytes()


def test_percentiles_are_of_a_sample_of_the_whole_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slices with more voxels than a sample has: the lower half of this one is ten times as bright."""
    monkeypatch.setattr(intensity, "SAMPLED", 512)
    image_YX = np.random.default_rng(0).integers(0, 100, (80, 80)).astype(np.uint16)
    image_YX[40:] += 1000
    found = intensity_range(*save(tmp_path, image_YX))
    assert found.low < 100 and found.high > 1000 and found.beyond == 0


def test_filling_continues_a_slope() -> None:
    slope_YX = np.tile(np.arange(64.0), (64, 1))
    mask_YX = center_mask((64, 64))
    assert np.abs(intensity.fill_from_outside(slope_YX, mask_YX) - slope_YX).max() < 12
    with pytest.raises(ValueError, match="all voxels are masked"):
        intensity.fill_from_outside(slope_YX, np.ones_like(mask_YX))


@given(rows=st.integers(1, 50), columns=st.integers(1, 50), slope=st.sampled_from([0.0, 2.0]))
def test_pyramids_keep_shapes_constants_and_places(rows: int, columns: int, slope: float) -> None:
    image_YX = 0.7 + slope * np.add.outer(np.arange(float(rows)), 2 * np.arange(columns))
    coarse_YX, weight_YX = intensity.downsample(image_YX, np.ones((rows, columns)))
    assert coarse_YX.shape == weight_YX.shape == ((rows + 1) // 2, (columns + 1) // 2)
    np.testing.assert_allclose(weight_YX, 1.0)
    inner = np.s_[4:-4, 4:-4] if slope else np.s_[:]  # at the ends a slope is cut off
    np.testing.assert_allclose(intensity.upsample(coarse_YX, (rows, columns))[inner], image_YX[inner])


def test_the_range_is_over_the_stack_and_outside_the_mask(tmp_path: Path) -> None:
    volume = np.full((3, 20, 20), 5, np.int16)
    volume[0, 0, 0], volume[2, 19, 19] = -7, 90
    volume[1, 8:12, 8:12] = 30000
    both = save(tmp_path, volume)
    assert intensity_range(*both) == IntensityRange(-7.0, 90.0)
    assert intensity_range(*both, given=(4.0, 5.0)) == IntensityRange(4.0, 5.0, (-7.0, 90.0), 2)
    assert intensity_range(*both, given=intensity.parse_range("-10, 1e3")) == IntensityRange(-10.0, 1000.0)
    whole = replace(both[1], full=frozenset({1}))  # slice 1 is masked wholly
    assert intensity_range(both[0], whole, given=(4.0, 50.0)).beyond == 2
    torn = volume.astype(np.float32)
    torn[1, 10, 10] = np.nan
    stack, _ = save(tmp_path, torn)  # what a made mask hides is known, and what is missing there is no obstacle
    assert intensity_range(stack, make_mask("center", stack)) == IntensityRange(-7.0, 30000.0)
    volume[:2] = np.linspace([0, 500], [1000, 510], 400).T.reshape(2, 20, 20)
    assert intensity_range(*save(tmp_path, volume[:2])) == IntensityRange(0.0, 1000.0)


@pytest.mark.parametrize(("ends", "inside"), [((5000.0, 6000.0), 0), ((1590.5, 9999.0), 9), ((-0.0009, 0.003), 1)])
def test_a_range_of_hardly_any_voxel_is_refused(tmp_path: Path, ends: tuple[float, float], inside: int) -> None:
    """With the data's own, which leaves outliers out."""
    image_YX = np.arange(1600, dtype=np.uint16).reshape(40, 40)
    image_YX[0, 5] = 40000
    stack, mask = save(tmp_path, image_YX)
    with pytest.raises(UserError, match=rf"--range [-\d.,]+: of 1,200 .*scan\.tif {inside} .*--range 0,1599"):
        intensity_range(stack, mask, given=ends)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
def test_a_constant_slice_comes_back(tmp_path: Path, dtype: str) -> None:
    image_YX = np.full((40, 44), 7, dtype)
    stack, mask = save(tmp_path, image_YX, "block")
    scale, mask_YX = intensity_range(stack, mask), mask.read(0)
    assert (scale.low, scale.high, scale.scale) == (7.0, 7.0, 1.0)
    image_YX.flags.writeable = False  # no result is written over what it was made of
    with np.errstate(all="raise"):
        prepared_YX = intensity.prepare_slice(image_YX, mask_YX, scale)
        restored_YX = compose_native(image_YX, restore_slice(prepared_YX, mask_YX, SmoothInpainter()), mask_YX, scale)
    np.testing.assert_array_equal(restored_YX, image_YX)


def test_not_finite_or_too_far_apart_outside_the_mask(tmp_path: Path) -> None:
    volume = np.zeros((3, 20, 20), np.float32)
    volume[1, 9, 9] = np.nan
    intensity_range(*save(tmp_path, volume))
    volume[1, 2, 3], volume[2, 0, 0] = np.inf, np.nan
    place = "slice 1, row 2, column 3"
    for image, part, said in (
        (volume, Part(), rf"scan\.tif: 2 NaN or Inf voxels outside the mask 'center', .* {place}"),
        (volume, Part("1:3", "2:20,1:20"), f": 1 NaN or Inf voxels .* {place}"),
        (volume[0] * np.nan, Part(), "300 NaN or Inf voxels (?!.* slice ).* row 0, column 0"),
        (1.5e308 * (np.eye(20) - np.eye(20)[::-1]), Part(), "too far apart"),
    ):
        with pytest.raises(UserError, match=said):
            intensity_range(*save(tmp_path, image, part=part))


def test_a_stack_is_read_once_and_its_progress_told(tmp_path: Path) -> None:
    read: list[int] = []
    stack, mask = save(tmp_path, np.ones((4, 20, 20), np.float32))
    counted = replace(stack, reader=lambda index: (read.append(index), stack.reader(index))[1])
    told: list[tuple[str, int]] = []

    def progress(numbers: range, what: str) -> Iterator[int]:
        for number in numbers:
            told.append((what, number))
            yield number

    intensity_range(counted, mask, progress)
    assert read == [0, 1, 2, 3] and told == [("reading scan", number) for number in read]
    told.clear()
    (tmp_path / "mask").mkdir()
    path = write_tiff(tmp_path / "mask", np.eye(20, dtype=np.uint8)[None].repeat(4, 0))
    make_mask(path, stack, progress=progress)
    assert told == [("reading scan", number) for number in range(4)]


@pytest.mark.parametrize(("side", "dtype", "value"), [(48, "uint16", 65535), (300, "int16", -32768), (96, "f4", 1e9)])
def test_a_hot_spot_changes_neither_range_nor_restoration(tmp_path: Path, side: int, dtype: str, value: float) -> None:
    """A spot right beside the mask: the restoration is nearly the one without it. Restored values may reach as far as
    the data."""
    noise_YX = np.random.default_rng(0).normal(0, 300, (side, side))
    plain_YX = (phantom(side, side) * 12000 + noise_YX).clip(0, 16383).astype(dtype)
    mask_YX, hot_YX = center_mask((side, side)), plain_YX.copy()
    hot_YX[side // 4 - 3 : side // 4, side // 2 : side // 2 + 3] = value
    plain, hot = scales = [intensity_range(*save(tmp_path, image_YX)) for image_YX in (plain_YX, hot_YX)]
    known = plain_YX[~mask_YX]
    assert plain == IntensityRange(float(known.min()), float(known.max()))
    assert (hot.low, hot.high, hot.beyond) == (plain.low, plain.high, 9)
    assert hot.extremes == (min(plain.low, value), max(plain.high, value))
    assert hot.denormalise(np.array(hot.limits01)) == pytest.approx(hot.extremes) and plain.limits01 == (0, 1)
    results = []
    for image_YX, scale in zip((plain_YX, hot_YX), scales, strict=True):
        prepared_YX = intensity.prepare_slice(image_YX, mask_YX, scale)
        assert prepared_YX.min() >= 0 and prepared_YX.max() <= 1
        (restored_YX,) = restore_slices([prepared_YX], [mask_YX], SmoothInpainter(), limits=scale.limits01)
        results.append(compose_native(image_YX, restored_YX, mask_YX, scale))
    np.testing.assert_array_equal(results[1][~mask_YX], hot_YX[~mask_YX])
    normal = [plain.normalise(result_YX[mask_YX]) for result_YX in results]
    assert np.abs(normal[1] - normal[0]).mean() < 0.01 and -0.1 < normal[1].min() < normal[1].max() < 1.1


def test_percentiles_of_more_than_a_million_voxels_see_every_column_and_row(tmp_path: Path) -> None:
    """Where one in four columns, as many as are sampled, and half of the rows hold one value, the others tell what is
    an outlier."""
    volume = np.random.default_rng(0).integers(90, 110, (4, 1025, 1024), dtype=np.uint8)
    volume[:, :, ::4] = volume[:, :512] = 50
    volume[2, 800, 4:7] = 255
    assert intensity_range(*save(tmp_path, volume)) == IntensityRange(50, 109, (50, 255), 3)


def test_what_is_no_outlier_keeps_the_whole_range(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    few = np.zeros((90, 90))
    few[3, 3:6] = 7  # nothing tells rare values of a discrete image from outliers
    rare = generator.exponential(size=64)[None].repeat(32, 0)
    for image_YX in (generator.normal(size=(512, 512)), generator.random((20, 20)), few, rare):
        stack, mask = save(tmp_path, image_YX, "block")
        known = image_YX[~mask.read(0)]
        assert intensity_range(stack, mask) == IntensityRange(known.min(), known.max())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "uint64", "int64"])
def test_integers_are_rounded_and_clipped(dtype: str) -> None:
    """No float64 equals the largest of 64 bits: the next one is larger."""
    limits, mask_YX = np.iinfo(dtype), np.array([[True, True, True, True, False]])
    original_YX = np.array([[3, 1, 5, 2, 0]], dtype)
    restored01_YX = np.array([[1e30, -1e30, float(limits.max), 12.6, 0.5]])
    result_YX = compose_native(original_YX, restored01_YX, mask_YX, IntensityRange(0.0, 1.0))
    assert result_YX.dtype == dtype and result_YX.tolist() == [[limits.max, limits.min, limits.max, 13, 0]]
    ends_YX = np.array([[np.inf, -np.inf, 0.0, 1.0, 0.5]])  # of intervals that nothing calibrates, in a constant volume
    flat_YX = compose_native(original_YX, ends_YX, mask_YX, IntensityRange(5.0, 5.0))
    assert flat_YX.tolist() == [[limits.max, limits.min, 5, 5, 0]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(40, 44), (33, 97)])
@pytest.mark.parametrize("kind", ["block", "center"])
def test_nothing_under_the_mask_reaches_outputs(tmp_path: Path, dtype: str, shape: tuple[int, int], kind: str) -> None:
    """Two inputs that differ only under the mask, with NaN and Inf there for floats: all bits of all outputs agree."""
    first_YX = (phantom(*shape) * 100).astype(dtype)
    mask_YX = block_mask(shape, 5) if kind == "block" else center_mask(shape)
    hidden = (np.random.default_rng(1).random(int(mask_YX.sum())) * 127).astype(dtype)
    if hidden.dtype.kind == "f":
        hidden[:3] = np.nan, np.inf, -np.inf
    second_YX = first_YX.copy()
    second_YX[mask_YX] = hidden
    outputs = []
    for image_YX in (first_YX, second_YX):
        scale, model = intensity_range(*save(tmp_path, image_YX, kind)), SmoothInpainter()
        prepared_YX = intensity.prepare_slice(image_YX, mask_YX, scale)
        restored_YX = compose_native(image_YX, restore_slice(prepared_YX, mask_YX, model), mask_YX, scale)
        smooth01_YX = baseline.biharmonic(scale.normalise(image_YX), mask_YX)
        smooth_YX = compose_native(image_YX, smooth01_YX, mask_YX, scale)
        np.testing.assert_array_equal(restored_YX[~mask_YX], image_YX[~mask_YX])
        shown = encode(Picture("a", kind, image_YX, mask_YX, scale, {"tapa": restored_YX}), 256, 10**6)
        outputs.append((scale, shown, *(a.tobytes() for a in (prepared_YX, restored_YX, smooth_YX)), *model.shown))
    assert outputs[0] == outputs[1]


def test_biharmonic_beats_filling_and_solves_large_holes_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    y, x = np.mgrid[0:96, 0:80] / 40
    image_YX = 0.5 + 0.3 * np.sin(x) * np.cos(y)
    mask_YX = center_mask((96, 80))
    fine_YX = baseline.biharmonic(np.where(mask_YX, np.nan, image_YX), mask_YX)
    filled_YX = intensity.fill_from_outside(image_YX, mask_YX)
    assert np.abs(fine_YX - image_YX).max() < 0.5 * np.abs(filled_YX - image_YX).max()
    small_YX = marked((96, 80), np.s_[40:48, 30:38])
    small_hole_YX = baseline.biharmonic(image_YX, small_YX)
    monkeypatch.setattr(baseline, "LARGEST_HOLE", 500)
    np.testing.assert_array_equal(baseline.biharmonic(image_YX, small_YX), small_hole_YX)
    coarse_YX = baseline.biharmonic(np.where(mask_YX, np.nan, image_YX), mask_YX)
    np.testing.assert_array_equal(coarse_YX[~mask_YX], image_YX[~mask_YX])
    assert np.abs(coarse_YX - fine_YX).max() < 0.05
    np.testing.assert_array_equal(baseline.biharmonic(image_YX, mask_YX & False), image_YX)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64", "float32", "float64"])
def test_half_the_width_of_intervals_is_unknown_where_all_ends_are_those_of_the_type(dtype: str) -> None:
    """Some may be: an interval that was calibrated can be as wide as the type."""
    mask_YX, limits = marked((4, 6), np.s_[1:3, 2:5]), np.iinfo(dtype) if dtype[0] in "ui" else np.finfo(dtype)
    image_YX = np.full((4, 6), 50, dtype)
    ends = [np.where(mask_YX, end, image_YX).astype(dtype) for end in (limits.min, limits.max)]
    scale = IntensityRange(0.0, 100.0)
    assert np.isinf(intensity.half_width(ends, mask_YX, scale)[mask_YX]).all()
    ends[0][1, 2], ends[1][1, 2] = 40, 70
    width_YX = intensity.half_width(ends, mask_YX, scale)
    assert np.isfinite(width_YX).all() and width_YX[1, 2] == 15 and (width_YX[~mask_YX] == 0).all()
    declared = IntensityRange(0.0, 100.0, declared={"valid_range": [10.0, 90.0]})
    bounded = [np.where(mask_YX, end, image_YX).astype(dtype) for end in (10, 90)]
    assert np.isinf(intensity.half_width(bounded, mask_YX, declared)[mask_YX]).all()
