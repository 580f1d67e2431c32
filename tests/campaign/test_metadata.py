"""Generated metadata go through every format: voxel sizes and voxels come back, or the file is refused in one line;
and what a file says of its names, values, axes and place is in results as other libraries read them
(`round_trips.py`). Samples that have every kind of file; with --full all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from cocodiff_eval.data.formats import open_volume, write_volume
from cocodiff_eval.data.volume import LENGTHS, Stack
from inputs_checks import bits, voxels_of
from metadata_cases import Given, make_given
from round_trips import MAKERS, run_case

from cocodiff.config.errors import UserError

WORDS = ("tiff", "sequence", "zarr", "h5")
SAMPLE, ALL = 48, 300


@pytest.mark.parametrize(
    "number", [*range(SAMPLE), *(pytest.param(one, marks=pytest.mark.full) for one in range(SAMPLE, ALL))]
)
def test_generated_metadata_are_kept_or_refused(tmp_path: Path, number: int) -> None:
    (tmp_path / "in").mkdir()
    given = make_given(0, number, tmp_path / "in")
    try:
        volume = open_volume(str(given.path), follow_links=True)
        voxels = voxels_of(volume)
    except UserError as error:
        assert given.voxels is None, str(error)
        assert str(tmp_path / "in") in str(error) and "\n" not in str(error)
        return
    assert given.voxels is not None, "what is not there, or is no intensity, was read"
    check(given, volume)
    for word in WORDS:
        first = written(volume, voxels, word, tmp_path)
        check(given, first)
        check(given, written(first, voxels, WORDS[(number + len(word)) % 4], tmp_path))


@pytest.mark.parametrize(
    "number", [*range(len(MAKERS)), *(pytest.param(one, marks=pytest.mark.full) for one in range(len(MAKERS), ALL))]
)
def test_a_round_trip_ends_right(tmp_path: Path, number: int) -> None:
    given, wrong, _ = run_case(0, number, tmp_path)
    again = f"python tests/campaign/round_trips.py --seed 0 --first {number} --cases 1 --keep case"
    assert not wrong, "\n".join([given.kind, again, *wrong])


def written(volume: Stack, voxels: np.ndarray, word: str, folder: Path) -> Stack:
    """A volume as it is read from a result in another format."""
    place = folder / str(len([*folder.iterdir()]))
    place.mkdir()
    about: dict[str, Any] = {"version": "1.0", "prompt": "ein Zahn, größer\x00"}
    named = lambda suffix: f"scan{suffix}"  # noqa: E731
    file = write_volume(word, place, named, volume, volume.dtype, lambda index: voxels[index], about)
    if word == "zarr" and volume.metadata.kind != "zarr":
        about = zarr.open_group(file.path, mode="r").attrs.asdict()
        assert all(one.get("unit", "meter") in LENGTHS for one in about["multiscales"][0]["axes"]), "no unit of NGFF"
    of_hdf5 = word == "h5" and volume.metadata.kind == "hdf5"
    return open_volume(f"{file.path}:{volume.metadata.details['object']}" if of_hdf5 else str(file.path))


def check(given: Given, found: Stack) -> None:
    """The voxels' bits, and their sides within rounding."""
    assert given.voxels is not None
    assert bits(voxels_of(found)) == bits(given.voxels.reshape(found.shape)) and found.dtype == given.voxels.dtype
    size, unit = found.metadata.voxel_size, found.metadata.unit
    if given.plain is not None:
        assert unit == "" and size == pytest.approx(given.plain, rel=1e-9)
    elif given.meters is None:
        assert (size, unit) == (None, "")
    else:
        assert size is not None and unit in LENGTHS
        first = 1 if found.ndim == 2 else 0
        sides = [side * LENGTHS[unit][1] for side in size]
        assert sides[first:] == pytest.approx(given.meters[first:], rel=1e-9)
