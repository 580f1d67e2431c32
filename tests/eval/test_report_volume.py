"""A volume in the report: what is embedded of one of any size, and what a click, a key and a slider do in a browser."""

import base64
import gzip
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.masks import Mask
from cocodiff_eval.data.volume import Metadata, Region, Stack
from cocodiff_eval.quality.metrics import metrics_document, slice_jumps
from cocodiff_eval.report.page import write_report
from cocodiff_eval.report.volume import ShownVolume, embedded
from eval_helpers import BASELINE, CASES, NOTHING, QUALITY, marked, row_of, slices_of

SHAPE = (20, 32, 40)
FIRST = (100, 0, 7)  # slice, row and column in the input
SCALE = IntensityRange(0.0, 1000.0)
REGIONS = ((slice(2, 4), slice(3, 6), slice(4, 7)), (slice(6, 11), slice(10, 15), slice(20, 25)))


def volume(shape: Sequence[int] = SHAPE, regions: Sequence[tuple[slice, ...]] = REGIONS) -> tuple[Any, ...]:
    """A shown volume, its truth, its mask and what was restored: 100 more than the truth under the mask."""
    truth = np.random.default_rng(0).integers(100, 800, shape).astype(np.uint16)
    mask = marked(tuple(shape), *regions)
    restored = np.where(mask, truth + 100, truth).astype(np.uint16)
    width = np.where(mask, 50.0, 0.0)
    grey = {"tapa": restored.__getitem__, "tapa: low 90 %": (restored - 50).__getitem__}
    sides, region = Metadata(voxel_size=(0.7, 0.7, 0.7), unit="micrometer"), Region(FIRST, (100 + shape[0], 98, 105))
    stack = Stack("scan.h5", "scan", truth.shape, truth.dtype, 3, truth.__getitem__, sides, region=region)
    holes = Mask("holes", True, truth.shape, mask.__getitem__, (True,) * len(truth))
    shown = ShownVolume(stack, holes, SCALE, stack, grey, {"tapa: uncertainty": width.__getitem__})
    return shown, truth, mask, restored


def voxels(text: str) -> np.ndarray:
    return np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8)


def test_a_small_volume_is_embedded_whole() -> None:
    shown, truth, mask, restored = volume()
    found = embedded(shown, 10**6)
    assert found["shape"] == SHAPE and found["told"] == "every voxel" and found["first"] == [100, 0, 7]
    assert found["size"] == [0.7] * 3 and found["unit"] == "µm"
    assert found["at"] == [3, 4, 5] or mask[tuple(found["at"])]  # of two regions, either is the median
    assert [tuple(slice(*side) for side in box) for box in found["regions"]] == [REGIONS[1], REGIONS[0]]
    np.testing.assert_array_equal(np.unpackbits(voxels(found["masked"]))[: mask.size].reshape(SHAPE), mask)
    np.testing.assert_allclose(voxels(found["voxels"]).reshape(SHAPE) / 255 * 1000, truth, atol=2)
    tapa, low, width = found["layers"]
    assert [one["name"] for one in found["layers"]] == ["tapa", "tapa: low 90 %", "tapa: uncertainty"]
    np.testing.assert_allclose(voxels(tapa["voxels"]) / 255 * 1000, restored[mask], atol=2)
    np.testing.assert_allclose(voxels(low["voxels"]) / 255 * 1000, restored[mask] - 50.0, atol=2)
    assert width["top"] == 50 and set(voxels(width["voxels"])) == {255}


def test_where_nothing_is_known_of_the_error_no_uncertainty_is_shown() -> None:
    """Of some slices: there it is the largest that is shown, or more."""
    shown, _, mask, _ = volume()
    of_some = [np.where(mask[index], np.inf if index < 5 else 20.0, 0.0) for index in range(len(mask))]
    found = embedded(replace(shown, uncertainty={"tapa: uncertainty": of_some.__getitem__}), 10**6)["layers"][-1]
    assert (found["name"], found["top"]) == ("tapa: uncertainty", 20) and set(voxels(found["voxels"])) == {255}
    nothing = {"tapa: uncertainty": lambda index: np.full(mask.shape[1:], np.inf)}
    layers = embedded(replace(shown, uncertainty=nothing), 10**6)["layers"]
    assert [one["name"] for one in layers] == ["tapa", "tapa: low 90 %"]


def test_nothing_under_the_mask_is_embedded_where_the_truth_is_unknown() -> None:
    shown, _, mask, _ = volume()
    found = embedded(replace(shown, truth=None), 10**6)
    assert found["truth"] is False and not voxels(found["voxels"])[mask.ravel()].any()


@pytest.mark.parametrize(("regions", "told", "shape"), CASES["large volumes"])
def test_what_is_embedded_of_a_large_volume_is_bounded(regions: Any, told: str, shape: list[int]) -> None:
    """Of noise, which does not compress; around a mask 8 voxels of each side."""
    shown, truth, mask, _ = volume((98, 98, 98), [*map(slices_of, regions)])
    room = 60_000
    found = embedded(shown, room)
    assert told in found["told"] and len(json.dumps(found)) < 1.4 * room
    assert len(voxels(found["voxels"])) > room / 8
    assert [*found["shape"]] == shape
    assert found["size"] == pytest.approx([0.7 * found["step"]] * 3)
    start = [first - of for first, of in zip(found["first"], FIRST, strict=True)]
    part = tuple(slice(a, a + n * found["step"], found["step"]) for a, n in zip(start, found["shape"], strict=True))
    np.testing.assert_allclose(voxels(found["voxels"]) / 255 * 1000, truth[part].ravel(), atol=2)
    place = tuple(a + at * found["step"] for a, at in zip(start, found["at"], strict=True))
    near = tuple(slice(max(0, at - 1), at + 2) for at in place)
    assert mask[near].any() and len(found["regions"]) >= 1
    assert len(regions) < 3 or place == (52, 52, 52)


def test_jumps_between_slices_are_those_of_voxels_under_the_mask_over_the_truths() -> None:
    _, truth, mask, _ = volume()
    truth = truth.astype(np.float32)
    truth[8, 12, 22] = np.nan
    smooth = np.where(mask, 300.0, truth)
    smooth[8, 12, 22] = 300.0
    read_slices: list[int] = []

    def read(index: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        read_slices.append(index)
        return mask[index], truth[index], {"smooth": smooth[index], "doubled": 2 * truth[index]}

    found = slice_jumps(read, mask.any((1, 2)).tolist())
    pairs = (mask[1:] | mask[:-1]) & np.isfinite(np.diff(truth, axis=0))
    own, true = (np.abs(np.diff(one.astype(np.float64), axis=0))[pairs].mean() for one in (smooth, truth))
    assert found == pytest.approx({"smooth": own / true, "doubled": 2.0})
    assert sorted(read_slices) == list(range(1, 12))  # each once, and only beside masked ones
    flat = np.zeros(SHAPE[1:])
    assert slice_jumps(lambda index: (flat == 0, flat, {"a": flat}), [True] * 3) == {"a": None}


def test_volumes_share_the_room_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = metrics_document({}, 1, [row_of("scan[102]", "holes", "tapa", QUALITY, 1.0, {})])
    shown = [volume((98, 98, 98))[0]]

    def lengths(count: int) -> list[int]:
        write_report(tmp_path / "a.html", document, [], {}, slices={"scan": range(100, 198)}, shown=shown * count)
        blocks = re.findall(r'class="voxels" data-series="0">(.*?)</script>', (tmp_path / "a.html").read_text())
        return [len(block) for block in blocks]

    for room in (60_000, 1.1 * lengths(1)[0]):  # of the second one volume takes nearly all
        monkeypatch.setattr("cocodiff_eval.report.page.VOLUME_BYTES", int(room))
        assert len(lengths(2)) == 2 and sum(lengths(2)) < 1.4 * room


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_what_the_script_of_a_page_tells(tmp_path: Path, monkeypatch: Any, snapshot: Callable[[str], None]) -> None:
    """Figures, curves and views of a volume of which every second voxel is embedded, and of 14 of 98 slices."""
    rows, calibrated = [], {"samples": 2, "intervals": {"factor_90": 2.0}}
    for n in range(101, 129, 2):
        for add, mode in enumerate(("tapa", "late")):
            known = {"psnr_db": 20 + n * 7 % 13 / 2 + add, "ssim": n / 200 + add / 10, "mse": 0.01}
            more = {"psnr_vs_exact_db": None if n == 103 else 31.25, "exact_compared": mode == "late", **calibrated}
            quality = NOTHING if n == 105 else known
            rows.append(row_of(f"scan[{n}]", "holes", mode, quality, 1.0, {}, baseline=BASELINE, **more))
    texts = {"original": "o!Aa~C", "hole": "þ!þ!!þ", "a": "azbycx", "b": "kljmin", "e": "#:Zpd(", "s": "!Q/ub}"}
    file = {name: base64.b64encode(text.encode("latin-1")).decode() for name, text in texts.items()}
    pictures = []
    for n in (101, 103, 107, 109, 120, 127):
        one = {"name": f"scan[{n}]", "mask": "holes", "original": file["original"], "hole": "", "unknown": ""}
        if n != 120:
            one |= {"hole": file["hole"], "restored": {"tapa": file["a"], "late": file["b"]}}
            one |= {"error": {"tapa": file["e"]}, "error_top": "0.25"} if n != 109 else {"unknown": file["hole"]}
            one |= {"uncertainty": {"late": file["s"], "tapa": file["e"]}, "uncertainty_top": "0.5"}
            one |= {"low": {"tapa": file["b"]}, "high": {"tapa": file["s"], "late": file["a"]}}
        pictures.append(json.dumps(one))
    regions = [(slice(9, 10), slice(12, 15), slice(4, 9)), (slice(60, 62), slice(40, 42), slice(50, 52))]
    monkeypatch.setattr("cocodiff_eval.report.page.VOLUME_BYTES", 60_000)
    page, scale = tmp_path / "report.html", IntensityRange(60.0, 1060.0)
    shown = replace(volume((98, 98, 98), regions)[0], scale=scale)
    write_report(page, metrics_document({}, 1, rows), pictures, {}, slices={"scan": range(100, 198)}, shown=[shown])
    words = ["node", str(Path(__file__).with_name("page_in_node.mjs")), str(page), json.dumps(CASES["events"])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    snapshot(done.stdout + done.stderr)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_in_a_browser_a_click_in_one_view_moves_the_others(tmp_path: Path, width: int) -> None:
    """And the page is no wider than the window."""
    rows, page = [row_of(f"scan[{n}]", "holes", "tapa", QUALITY, 1.0, {}) for n in range(102, 111)], tmp_path / "a.html"
    write_report(page, metrics_document({}, 1, rows), [], {}, slices={"scan": range(100, 120)}, shown=[volume()[0]])
    page.write_text(page.read_text() + Path(__file__).with_name("page_in_chromium.html").read_text())
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom", str(page)]
    words += [f"--window-size={width},900", "--virtual-time-budget=200000", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    at, told, needed = json.loads(html.unescape(done.stdout.partition("<title>")[2].partition("</title>")[0]))
    assert (at, needed) == ("108,12,29", width)
    assert told.startswith("z 108, y 12, x 29: original ") and "tapa: uncertainty 50" in told
