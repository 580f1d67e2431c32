"""Masks: coverage, seeds, files and the mistakes made with them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
from cocodiff_eval.data.masks import Mask, block_mask, center_mask, make_mask
from cocodiff_eval.data.slices import open_stack
from cocodiff_eval.data.volume import Region, Stack
from cocodiff_eval.harness.tasks import values_to_compare
from eval_helpers import CASES, marked
from hypothesis import given, settings, strategies
from PIL import Image
from scipy.ndimage import binary_dilation, gaussian_filter

from cocodiff.config.errors import UserError

SIDES = strategies.integers(16, 300)


@settings(max_examples=60, deadline=None)
@given(rows=SIDES, columns=SIDES, seed=strategies.integers(0, 10**9))
def test_block_is_nine_cells_of_a_six_by_six_grid(rows: int, columns: int, seed: int) -> None:
    mask_YX = block_mask((rows, columns), seed)
    row_edges, column_edges = ([round(i * side / 6) for i in range(7)] for side in (rows, columns))
    bands = np.split(mask_YX, row_edges[1:-1])
    cells = [cell for band in bands for cell in np.split(band, column_edges[1:-1], axis=1)]
    assert all(cell.all() or not cell.any() for cell in cells)
    assert sum(bool(cell.all()) for cell in cells) == 9
    np.testing.assert_array_equal(mask_YX, block_mask((rows, columns), seed))
    if rows % 6 == 0 and columns % 6 == 0:
        assert mask_YX.mean() == 0.25


def test_seeds_differ_and_stay() -> None:
    assert len({block_mask((96, 96), seed).tobytes() for seed in range(20)}) == 20
    # Published numbers name a seed: its cells must not change with a library's version.
    assert np.flatnonzero(block_mask((6, 6), 0)).tolist() == [2, 12, 16, 24, 25, 26, 29, 31, 34]


@given(rows=SIDES, columns=SIDES)
def test_center_is_the_central_half(rows: int, columns: int) -> None:
    mask_YX = center_mask((rows, columns))
    ys, xs = np.nonzero(mask_YX)
    assert abs((ys.max() + 1 - ys.min()) - rows / 2) <= 1 and abs((xs.max() + 1 - xs.min()) - columns / 2) <= 1
    np.testing.assert_array_equal(mask_YX, mask_YX[::-1, ::-1])
    if rows % 4 == 0 and columns % 4 == 0:
        assert mask_YX.mean() == 0.25


def test_mask_files(tmp_path: Path, stack: Stack) -> None:
    flat = marked((40, 52), np.s_[5:9, 7:20])
    volume = np.zeros((3, 40, 52), np.uint8)
    volume[1, 4:6] = 7
    Image.fromarray(flat).save(tmp_path / "bits.png")
    tifffile.imwrite(tmp_path / "deep.tif", volume, photometric="minisblack")
    mask = make_mask(f"{tmp_path}/bits.png", stack)
    assert mask.from_file and all(np.array_equal(mask.read(index), flat) for index in range(3))
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["bits"] = volume > 0
    for name, called in (("m.h5:/bits", "m_bits"), ("deep.tif", "deep")):
        mask = make_mask(f"{tmp_path}/{name}", stack)
        assert all(np.array_equal(mask.read(index), volume[index] > 0) for index in range(3))
        assert mask.name == called and not mask.full
    gaps = np.where(volume > 0, np.nan, 0).astype(np.float32)
    gaps[2, 3, 3] = np.nan  # one value, though no two NaN are equal
    tifffile.imwrite(tmp_path / "gaps.tif", gaps, photometric="minisblack")
    assert np.array_equal(make_mask(f"{tmp_path}/gaps.tif", stack).read(1), volume[1] > 0)
    volume[2] = 7  # nothing is left to restore it from
    tifffile.imwrite(tmp_path / "full.tif", volume, photometric="minisblack")
    mask = make_mask(f"{tmp_path}/full.tif", stack)
    assert mask.full == {2} and [int(mask.read(index).sum()) for index in range(3)] == [0, 104, 0]


def _levels() -> np.ndarray:
    mask = np.zeros((40, 52), np.uint8)
    mask[4:9, 4:9] = 255
    mask[4, 4:7] = 17, 90, 200
    return mask


MISTAKES = {
    "another shape": (np.zeros((40, 51), np.uint8), r"the mask has shape 40 x 51 but .* has 3 x 40 x 52"),
    "another depth": (np.zeros((2, 40, 52), np.uint8), r"the mask has shape 2 x 40 x 52 but .* has 3 x 40 x 52"),
    "empty": (np.zeros((40, 52), np.uint8), "the mask is empty"),
    "full": (np.ones((40, 52), np.uint8), "all voxels are masked"),
    "full, two values": (np.where(np.eye(40, 52) > 0, 1, 255).astype(np.uint8), "all voxels are masked"),
    "one full slice": (
        np.stack([_levels() * 0, _levels() * 0 + 1, _levels() * 0]),
        "every slice with masked voxels is wholly masked",
    ),
    "another value in each slice": (np.stack([_levels() // 255 * n for n in (1, 2, 3)]), r"two values .* 3 \(0, 1, 2"),
    "grey levels": (_levels(), r"two values .* 5 \(0, 17, 90, 200, \.\.\.\)"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(tmp_path: Path, stack: Stack, case: str) -> None:
    array, message = MISTAKES[case]
    tifffile.imwrite(tmp_path / "mask.tif", array, photometric="minisblack")
    with pytest.raises(UserError, match=message) as caught:
        make_mask(str(tmp_path / "mask.tif"), stack)
    assert "\n" not in str(caught.value)


BELOW = Region((1, 12, 0), (3, 40, 52))  # of a stack, into which marked voxels grow from outside


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("grow", [1, 2])
def test_a_mask_grows_by_voxels_on_each_side(tmp_path: Path, stack: Stack, deep: bool, grow: int) -> None:
    """Along z as well, where the file has slices; also where a file marks what is kept."""
    mask = np.zeros((3, 40, 52), bool) if deep else np.zeros((1, 40, 52), bool)
    mask[0, 10:12, 20] = mask[0, 39, 0] = True
    expected = binary_dilation(mask, np.ones((2 * grow + 1,) * 3))
    for invert in (None, True):
        stored = (mask != bool(invert)) if deep else (mask != bool(invert))[0]
        tifffile.imwrite(tmp_path / "mask.tif", stored.astype(np.uint8), photometric="minisblack")
        grown = make_mask(f"{tmp_path}/mask.tif", stack, grow=grow, invert=invert)
        assert grown.masked == tuple(np.broadcast_to(expected.any(axis=(1, 2)), 3))
        assert all(np.array_equal(grown.read(index), expected[index if deep else 0]) for index in range(3))
        part = make_mask(f"{tmp_path}/mask.tif", stack.cropped(BELOW), grow=grow, invert=invert)
        assert all(np.array_equal(part.read(n), expected[n + 1 if deep else 0, 12:]) for n in range(2))


def test_a_mask_of_nearly_all_voxels_is_refused_unless_it_is_meant(tmp_path: Path, stack: Stack) -> None:
    mask = np.ones((40, 52), np.uint8)
    mask[:2] = 0  # 5 % are known
    tifffile.imwrite(tmp_path / "most.tif", mask, photometric="minisblack")
    assert make_mask(f"{tmp_path}/most.tif", stack).read(0).mean() == 0.95
    mask[1, 3] = 1
    tifffile.imwrite(tmp_path / "mask.tif", mask, photometric="minisblack")
    with pytest.raises(UserError, match=r"95.0% of the voxels are masked.*--invert=true .*--invert=false"):
        make_mask(f"{tmp_path}/mask.tif", stack)
    for invert in (True, False):
        assert np.array_equal(make_mask(f"{tmp_path}/mask.tif", stack, invert=invert).read(0), (mask != 0) != invert)


def test_a_mask_whose_0_is_white_says_what_it_restores(tmp_path: Path, stack: Stack) -> None:
    tifffile.imwrite(tmp_path / "mask.tif", np.eye(40, 52, dtype=np.uint8), photometric="miniswhite")
    found = [make_mask(f"{tmp_path}/mask.tif", stack, invert=invert) for invert in (None, True)]
    assert "0 is white" in found[0].remarks[0] and found[0].read(0).sum() == 40 and not found[1].remarks


@pytest.mark.parametrize(("word", "changed", "said"), CASES["refused masks"])
def test_words_that_make_no_mask(stack: Stack, word: str, changed: dict[str, Any], said: str) -> None:
    """What is of masks from files is refused of made ones, and a missing file names the choices."""
    with pytest.raises(UserError, match=said):
        make_mask(word, stack, **changed)


def texture(slices: int = 3) -> np.ndarray:
    """Grains of two phases with noise, [Z, 128, 128]."""
    random = np.random.default_rng(4)
    grains = gaussian_filter(random.normal(size=(slices, 128, 128)), (0, 3, 3)) > 0
    return (np.where(grains, 12000, 8000) + random.normal(0, 600, grains.shape)).astype(np.uint16)


def disc(radius: int) -> np.ndarray:
    return (np.arange(128)[:, None] - 60) ** 2 + (np.arange(128) - 70) ** 2 < radius**2


def remarks_on(folder: Path, volume: np.ndarray, mask: np.ndarray, **more: Any) -> str:
    """Return what is said of a mask."""
    for name, array in (("scan", volume), ("mask", mask.astype(np.uint8))):
        tifffile.imwrite(folder / f"{name}.tif", array, photometric="minisblack")
    return "; ".join(make_mask(f"{folder}/mask.tif", open_stack(f"{folder}/scan.tif"), **more).remarks)


@pytest.mark.parametrize("radius", [5, 12])
@pytest.mark.parametrize("small", [0, 1, 2, 4])
@pytest.mark.parametrize("value", [30000, 0], ids=["metal", "blanked"])
def test_known_voxels_that_look_like_masked_ones_are_told(tmp_path: Path, value: int, small: int, radius: int) -> None:
    """With what would cover them, which then is right."""
    volume = texture()
    volume[:, disc(radius)] = value
    told = remarks_on(tmp_path, volume, disc(radius - small))
    assert (f"--grow {small}" in told) if small else not told, told
    assert not remarks_on(tmp_path, volume, disc(radius - small), grow=small)


def test_a_right_mask_goes_without_a_remark(tmp_path: Path) -> None:
    """Of rings, lost slices, boxes of a texture under which the original or nothing is stored, and gaps of NaN."""
    volume = texture(4)
    ring = np.abs(np.hypot(np.arange(128)[:, None] - 64, np.arange(128) - 64) - 40) < 1.5
    lost = np.zeros(volume.shape, bool)
    lost[1:3] = True
    for mask in [ring, lost, *(block_mask((128, 128), seed) for seed in range(4)), disc(3), disc(30), ~disc(30)]:
        covered = np.broadcast_to(mask, volume.shape)
        stored = [volume, np.where(covered, 0, volume), np.where(covered, 65535, volume)]
        for one in (*stored, np.where(covered, np.nan, volume.astype(np.float32))):
            assert not remarks_on(tmp_path, one, mask, along_z=False)


def test_ranks_compare_which_slices_each_has_found_masked() -> None:
    """They read a file by themselves, and make batches by it."""

    def told(*masked: bool) -> dict[str, str]:
        mask = Mask("holes", True, (3, 4, 4), lambda index: np.zeros((4, 4), bool), masked)
        return values_to_compare([SimpleNamespace(stack=SimpleNamespace(name="tooth"), mask=mask, scale="0 to 9")])

    one, other = told(True, True, False), told(False, True, True)
    assert one == told(True, True, False) and one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == ["slices of tooth that holes masks"]
