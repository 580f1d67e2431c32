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
from eval_helpers import CASES

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


@pytest.mark.parametrize("names", CASES["one sequence"].values(), ids=CASES["one sequence"])
def test_the_number_that_varies_is_the_number(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "scan", names)
    assert order(tmp_path / "scan") == order(tmp_path / "scan" / "*.tif") == list(range(len(names)))
    (tmp_path / "scan" / names[2]).unlink()
    if len(names) > 3:
        with pytest.raises(UserError, match=re.escape(f" is missing after {names[1]}")) as caught:
            order(tmp_path / "scan")
        assert f"scan: {names[2]} is" in str(caught.value) or "img" in names[2]


@pytest.mark.parametrize("names", CASES["several sequences"].values(), ids=CASES["several sequences"])
def test_the_pattern_of_a_refusal_is_of_one_stack(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "scan", names)
    with pytest.raises(UserError, match="has another name than") as caught:
        order(tmp_path / "scan")
    found = re.search("; .*'(.*)'$", str(caught.value))
    if "rec_8_mask.tif" in names:  # no pattern has the others alone
        assert found is None
        return
    assert found is not None
    places = order(found[1])
    texts = {re.sub(r"\d+", "0", names[place]) for place in places}
    assert len(places) >= max(1, len(names) // 3) and places == sorted(places) and len(texts) == 1
