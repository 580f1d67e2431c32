"""Sequences of TIFF files: the number that varies is the number, and the pattern of a refusal is of one stack."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile
from cocodiff_eval.data.formats import open_volume

from cocodiff.config.errors import UserError


def write(folder: Path, names: Sequence[str]) -> None:
    """Write a slice for each name, in an order that tells nothing; voxels have the place of the name in the list."""
    folder.mkdir(exist_ok=True)
    for number in random.Random(0).sample(range(len(names)), len(names)):
        tifffile.imwrite(folder / names[number], np.full((16, 20), number, np.uint8))


def order(path: str | Path) -> list[int]:
    """Return the places of the slices in the list of names, as the volume has them."""
    volume = open_volume(str(path))
    return [int(volume.read(index)[0, 0]) for index in range(len(volume))]


NUMBERED = {
    "depth in the name": [f"rec{number:04}_16bit.tif" for number in range(8, 14)],
    "not padded": [f"rec{number}_16bit.tif" for number in range(8, 14)],
    "a channel": [f"s{number:04}_ch2.tif" for number in range(6)],
    "decimals": [f"z{number / 10:.1f}.tif" for number in range(8, 22)],
    "decimals of another step": [f"z{number / 100:.2f}um_a1.tif" for number in range(0, 300, 25)],
    "after a dot": [f"scan1.{number}.tif" for number in range(1, 12)],
    "after a dot, padded": [f"scan1.{number:04}.tif" for number in range(8, 12)],
    "with times": [f"img_{number:03}_{time}.tif" for number, time in enumerate((5, 9, 31, 32, 40, 77))],
    "with times before": [f"{time:02}_img_{number}.tif" for number, time in enumerate((5, 9, 31, 32, 40, 77))],
    "the last": [f"2026_11_28_{number}.tif" for number in range(3)],
}


@pytest.mark.parametrize("names", NUMBERED.values(), ids=NUMBERED)
def test_the_number_that_varies_is_the_number(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "scan", names)
    assert order(tmp_path / "scan") == order(tmp_path / "scan" / "*.tif") == list(range(len(names)))
    (tmp_path / "scan" / names[2]).unlink()
    if len(names) > 3:
        with pytest.raises(UserError, match=re.escape(f" is missing after {names[1]}")) as caught:
            order(tmp_path / "scan")
        assert f"scan: {names[2]} is" in str(caught.value) or "img" in names[2]


MIXED = {
    "two depths": [*(f"rec{n:04}_16bit.tif" for n in range(4)), *(f"rec{n:04}_8bit.tif" for n in range(3))],
    "two channels": [f"s{n:04}_ch{c}.tif" for c in (1, 2) for n in range(5)],
    "two scans": [f"scan{s}.{n}.tif" for s in (2, 10) for n in range(5, 12)],
    "a mask beside": [*(f"rec_{n}.tif" for n in range(8, 12)), "rec_8_mask.tif"],
    "a mask with a number": [*(f"rec_{n:02}.tif" for n in range(8, 12)), *(f"rec_{n:02}_seg1.tif" for n in (8, 9))],
    "one of no number": [*(f"rec_{n}.tif" for n in range(8, 12)), "rec_mean.tif"],
    "signs": [*(f"a[{n}]_b*.tif" for n in range(4)), "a.tif"],
    "no numbers": ["a.tif", "b.tif"],
    "minutes and seconds": [f"12-{s // 60:02}-{s % 60:02}.tif" for s in range(58, 64)],
}


@pytest.mark.parametrize("names", MIXED.values(), ids=MIXED)
def test_the_pattern_of_a_refusal_is_of_one_stack(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "scan", names)
    with pytest.raises(UserError, match="so they are no one stack") as caught:
        order(tmp_path / "scan")
    found = re.search("give the files of one, as '(.*)'$", str(caught.value))
    if "rec_8_mask.tif" in names:  # no pattern has the others alone
        assert str(caught.value).endswith("put those of one into a folder of their own")
        return
    assert found is not None
    places = order(found[1])
    texts = {re.sub(r"\d+", "0", names[place]) for place in places}
    assert len(places) >= max(1, len(names) // 3) and places == sorted(places) and len(texts) == 1
