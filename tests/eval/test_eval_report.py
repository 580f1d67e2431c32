"""The report holds every row and slice, needs nothing from outside, stays small, and never shows what lies under a mask
file."""

import base64
import io
import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.masks import block_mask
from cocodiff_eval.quality.metrics import mean_profile, metrics_document
from cocodiff_eval.report.page import write_report
from cocodiff_eval.report.pictures import (
    Generated,
    Picture,
    encode,
    error_image,
    plan_pictures,
    shown_slices,
    worst_slices,
)
from cocodiff_eval.report.tables import terminal_table
from eval_helpers import phantom, row_of
from PIL import Image

SCALE = IntensityRange(0.0, 1.0)
MASK_YX = block_mask((40, 48), 0)
IMAGE_YX = phantom(40, 48)
QUALITY = {"psnr_db": 21.53, "ssim": 0.654, "mse": 0.00703}
NOTHING = {"psnr_db": None, "ssim": None, "mse": None}
BASELINE = {"psnr_db": 18.25, "ssim": 0.512, "mse": 0.015, "seconds": 0.44}
FACTS = {"model": "embedded", "steps": "20", "seed": "0", "machine": "local <3", "version": "0.1.0"}


class Outline(HTMLParser):
    """Tags opened and closed, every attribute that could load something, and the inert blocks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.masks: dict[str, str] = {}
        self.pictures: dict[tuple[str, int], dict[str, Any]] = {}
        self.numbers: list[dict[str, Any]] = []
        self._block: dict[str, str | None] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "link", "br", "input"):
            self.open.append(tag)
        self._block = dict(attributes) if tag == "script" else {}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._block = {}

    def handle_data(self, data: str) -> None:
        block = self._block
        if block.get("class") == "picture":
            self.pictures[str(block["data-series"]), int(str(block["data-number"]))] = json.loads(data)
        elif block.get("class") == "numbers":
            self.numbers.append(json.loads(data))
        elif (block.get("id") or "").startswith("mask-"):
            self.masks[str(block["id"]).removeprefix("mask-")] = data


def pixels(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def rendered(
    folder: Path, metrics: dict, pictures: Iterable[Picture | Generated], facts: dict[str, str], **more: Any
) -> str:
    path = folder / "report.html"
    write_report(path, metrics, (encode(picture, 512, 10**6) for picture in pictures), facts, **more)
    return path.read_text(encoding="utf-8")


def known() -> tuple[dict, list[Picture]]:
    rows = [
        row_of("tooth", "block", "flat", QUALITY, 12.34, {"plane": 5 * 2**20}, baseline=BASELINE),
        row_of("tooth", "block", "cocodiff", QUALITY, 7.89, {"node": 77}, psnr_vs_exact_db=39.8, baseline=BASELINE),
    ]
    restored = {mode: np.where(MASK_YX, IMAGE_YX * 0.9, IMAGE_YX) for mode in ("flat", "cocodiff", "biharmonic")}
    pictures = [Picture("tooth", "block", 0, IMAGE_YX, MASK_YX, SCALE, restored, IMAGE_YX)]
    return metrics_document({}, 4, rows), pictures


def test_report_has_all_rows_and_pictures(tmp_path: Path) -> None:
    metrics, pictures = known()
    page = rendered(tmp_path, metrics, pictures, FACTS)
    outline = Outline(page)
    assert not outline.open and not outline.loads
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|url\(|<link|@import|fetch\(", page)
    for text in ("21.53", "0.654", "7.03e-03", "12.34", "identical", "39.8 dB", "5.0 MiB", "77 B", "18.25", "0.512"):
        assert f">{text}<" in page, text
    for text in ("Restored slices", "embedded", "local &lt;3", "0.1.0", "ranks", ">4<", "cross plane", "biharmonic"):
        assert text in page, text
    (shown,) = outline.pictures.values()
    assert list(shown["restored"]) == list(shown["error"]) == ["flat", "cocodiff", "biharmonic"]
    assert 0.05 < float(shown["error_top"]) < 0.1  # a tenth of the brightest hidden voxels
    assert "prefers-color-scheme: dark" in page and "@media print" in page and 'name="viewport"' in page
    assert len(re.findall("<tbody>", page)) == 1  # one image: its mean would repeat the row
    # Without loss: the original is whole, as its truth is known; restored pixels stand under the mask; errors there.
    grey_YX = np.rint(IMAGE_YX / max(1.0, IMAGE_YX.max()) * 255)
    np.testing.assert_allclose(pixels(shown["original"])[..., 0], grey_YX, atol=1)
    hole_YX = pixels(outline.masks[shown["hole"]])
    np.testing.assert_array_equal(hole_YX, MASK_YX)
    flat_YX = pixels(shown["restored"]["flat"])[..., 0]
    np.testing.assert_allclose(flat_YX[MASK_YX], grey_YX[MASK_YX] * 0.9, atol=1)
    error_YX = pixels(shown["error"]["flat"])[..., 0]
    assert not error_YX[~MASK_YX].any() and error_YX[MASK_YX].max() == 255


def test_means_appear_with_the_second_image(tmp_path: Path) -> None:
    rows = [row_of(name, "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE) for name in ("a", "b")]
    rows.append(row_of("c", "m", "flat", NOTHING, 1.0, {}, exact_compared=False))
    page = rendered(tmp_path, metrics_document({}, 1, rows), [], {**FACTS, "ranks": "1, alone"})
    assert "All images" in page and page.count("<tbody>") == 3 and "1, alone" in page
    assert "A dash: no exact run was made." in page and "No exact run was made to compare with." in page
    assert [one["names"] for one in Outline(page).numbers] == [["a", "b"], ["c"]]  # images share a slider


def test_steps_are_drawn_where_tensors_were_coded_or_displaced(tmp_path: Path) -> None:
    """Over all slices of a series: of two steps the first whole, of the second half the calls displaced in slice 1."""

    def step(number: int, sent: float, exposed: float, coded: float, sets: dict[str, float]) -> dict[str, Any]:
        late = sum(len(names) * share for names, share in sets.items()) / 4
        of_calls = {"coded_fraction": coded, "displaced_fraction": late, "displaced_sets": sets}
        return {"step": number, **of_calls, "sent_fraction": sent, "exposed_fraction": exposed}

    first = step(0, 1.0, 1.0, 0.0, {"": 1.0})
    profiles = [[first, step(1, 0.2, 0.2, 1.0, {"": 1.0})], [first, step(1, 0.2, 0.1, 1.0, {"": 0.5, "qkvo": 0.5})]]
    assert mean_profile(profiles)[1] == step(1, 0.2, pytest.approx(0.15), 1.0, {"": 0.75, "qkvo": 0.25})
    sent = {"sent": {"plane": 60}, "bytes_whole": {"plane": 100}}
    rows = [
        row_of(f"s[{n}]", "block", "ahead", QUALITY, 1.0, **sent, drift=drift, bytes_late={"plane": 5 * n})
        for n, drift in enumerate(profiles)
    ]
    rows.append(row_of("s[0]", "block", "flat", QUALITY, 1.0, {}))
    assert "bytes_late" not in rows[0] and rows[1]["bytes_late"]["plane"] == 5
    page = rendered(tmp_path, metrics_document({}, 2, rows), [], FACTS, slices={"s": range(2)})
    assert not Outline(page).open
    (told,) = re.findall(r'<svg viewBox="[^"]*" role="img" aria-label="(ahead[^"]*)"', page)
    assert told == (
        "ahead: of all tensors 0.500 whole, 0.375 coded, 0.125 displaced; of whole bytes 0.600 sent, 0.575 waited for"
    )
    assert "<th>waited for</th>" in page and ">0.600</td><td>0.575</td>" in page


def test_several_samples_show_how_far_they_spread(tmp_path: Path) -> None:
    of_samples = {"samples": 8, "coverage_50": 0.43, "coverage_90": 0.81, "psnr_db_single": 20.12}
    of_samples["intervals"] = {"floor": 0.1, "factor_50": 1.0, "factor_90": 2.0}
    rows = [row_of("a", "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE, **of_samples)]
    document = metrics_document({}, 1, rows)
    page = rendered(tmp_path, document, [], FACTS)
    for text in ("one sample, dB", "in 90 %", "20.12", "43 %", "81 %"):
        assert f">{text}<" in page, text
    assert "one sample" not in rendered(tmp_path, known()[0], [], FACTS)
    told = terminal_table(document)
    assert "one sample" in told and "in 90 %" in told and "81 %" in told


def test_intervals_that_were_not_calibrated_are_not_shown(tmp_path: Path) -> None:
    of_samples = {"samples": 8, "coverage_50": 0.1, "coverage_90": 0.31, "psnr_db_single": 20.12}
    rows = [row_of(f"a[{n}]", "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE, **of_samples) for n in range(2)]
    document = metrics_document({}, 1, rows)
    for shown in (rendered(tmp_path, document, [], FACTS), terminal_table(document)):
        assert "20.12" in shown and ">in 90 %<" not in shown and " in 90 %  " not in shown and "31 %" not in shown


def test_without_truth_the_original_is_shown_with_its_hole(tmp_path: Path) -> None:
    rows = [row_of(f"scan[{n}]", "scratch", "flat", NOTHING, 2.0, {}, exact_compared=False) for n in (0, 7)]
    dark_YX = np.where(MASK_YX, IMAGE_YX * 0.5, IMAGE_YX)
    pictures = [Picture(f"scan[{n}]", "scratch", n, IMAGE_YX, MASK_YX, SCALE, {"flat": dark_YX}) for n in (0, 7)]
    page = rendered(tmp_path, metrics_document({}, 1, rows), pictures, FACTS, slices={"scan": range(9)})
    outline = Outline(page)
    heads = re.findall('<th(?: class="left")?>(.*?)</th>', page)
    assert heads == ["mask", "preset", "n", "seconds", "preset", "seconds"] and "9 slices" in page
    assert "The original under this mask is unknown" in page and outline.numbers[0]["psnr_db"] == {}
    assert '7 slices without masked voxels were copied bit for bit: <span class="which">1–6, 8</span>' in page
    assert len(outline.masks) == 1 and set(outline.pictures) == {("0", 0), ("0", 7)}
    for shown in outline.pictures.values():
        assert "error" not in shown and shown["unknown"] == shown["hole"] in outline.masks
        assert len(np.unique(pixels(shown["original"])[MASK_YX])) == 1  # nothing of what lies there


def test_slices_of_a_stack_share_a_section(tmp_path: Path) -> None:
    rows = [
        row_of(f"scan[{n}]", "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE, exact_compared=n % 10 == 0)
        for n in range(30)
    ]
    pictures = [Picture("scan[7]", "block", 7, IMAGE_YX, MASK_YX, SCALE, {"flat": IMAGE_YX}, IMAGE_YX)]
    page = rendered(tmp_path, metrics_document({}, 1, rows), pictures, FACTS, slices={"scan": range(40)})
    assert page.count('<section class="series"') == 1 and set(Outline(page).pictures) == {("0", 7)}
    assert "Quality: means over the slices" in page and ">30.00<" in page
    assert "27 slices not compared with an exact run" in page and "compared: 0, 10, 20<" in page
    (numbers,) = Outline(page).numbers
    assert numbers["psnr_db"] == {"flat": [21.53] * 30, "biharmonic": [18.25] * 30} and numbers["total"] == 40


def test_slices_have_the_numbers_of_the_input_and_remarks_tell_of_it(tmp_path: Path) -> None:
    times = {"rank_seconds": 7.25}
    rows = [row_of(f"scan[{n}]", "block", "flat", QUALITY, 1.0, {}, **times) for n in (21, 22)]
    pictures = [Picture("scan[21]", "block", 1, IMAGE_YX, MASK_YX, SCALE, {"flat": IMAGE_YX}, IMAGE_YX)]
    told = {"name": "scan", "mask": "block", "slices": [20, 26], "range": [0, 16383], "extremes": [0, 65535]}
    inputs = [{**told, "beyond": 9, "wholly_masked": [24]}, {**told, "name": "other", "wholly_masked": [], "beyond": 0}]
    document = {**metrics_document({}, 4, rows), "inputs": inputs}
    page = rendered(tmp_path, document, pictures, FACTS, slices={"scan": range(20, 26)})
    outline = Outline(page)
    assert set(outline.pictures) == {("0", 21)} and "6 slices from 20<" in page
    (numbers,) = outline.numbers
    assert (numbers["first"], numbers["total"], numbers["numbers"], numbers["left"]) == (20, 6, [21, 22], [24])
    remarks = " ".join(re.sub("<[^>]*>", "", " ".join(re.findall("<li>(.*?)</li>", page))).split())
    said = "is 0 to 16383; 9 voxels outside the mask lie beyond it (the data reach from 0 to 65535)"
    assert said in remarks and remarks.count("The range") == 1
    assert "1 slice is masked wholly and was left as in the input: 24." in remarks
    assert "3 slices without masked voxels were copied bit for bit: 20, 23, 25." in remarks
    assert "<th>rank seconds</th>" in page and ">14.50<" in page


def test_which_slices_are_shown() -> None:
    assert shown_slices([1]) == [0]
    assert shown_slices([0, 5, 0, 5]) == [1, 3]
    assert shown_slices([1] * 100) == [0, 33, 66, 99]
    assert shown_slices([1] * 100, 1) == [0]
    assert shown_slices([0, 0]) == []


def test_the_more_slices_the_smaller_their_pictures() -> None:
    few, many, far_more = (plan_pictures([[True] * count], 3) for count in (4, 2000, 20000))
    assert few.side == 512 and len(many.shown[0]) == 2000 and many.worst == 0
    assert 160 <= many.side < 512 and many.share * 2000 <= 20e6
    assert 1000 < len(far_more.shown[0]) < 6000 and {0, 19999} <= far_more.shown[0]
    assert (len(far_more.shown[0]) + far_more.worst) * far_more.share <= 20e6 and far_more.worst > 0
    quality = {0: [1.0, 9.0], 1: [3.0, 2.0], 2: [0.5], 3: []}
    assert worst_slices(quality, frozenset({2}), 1) == [0]
    noise_YX = np.random.default_rng(0).random((300, 300))
    restored = dict.fromkeys(("flat", "tapa", "biharmonic"), noise_YX)
    picture = Picture("a", "block", 0, noise_YX, block_mask((300, 300), 0), SCALE, restored, noise_YX)
    text = encode(picture, many.side, many.share)  # noise is what compresses worst
    assert len(text) * 2000 < 30e6 and 64 < json.loads(text)["width"] < many.side
    assert json.loads(encode(known()[1][0], many.side, many.share))["width"] == 48


def test_error_and_spread_are_of_masked_voxels() -> None:
    torn_YX = np.where(MASK_YX, np.nan, IMAGE_YX)
    error_YX, known_YX = error_image(torn_YX, IMAGE_YX, MASK_YX, SCALE)
    assert not error_YX.any() and not known_YX.any()
    spread = {"flat": np.where(MASK_YX, np.float32(0.2), 0)}
    shown = json.loads(
        encode(Picture("a", "m", 0, torn_YX, MASK_YX, SCALE, {"flat": IMAGE_YX}, None, spread), 24, 10**5)
    )
    assert (shown["width"], shown["height"], shown["spread_top"]) == (24, 20, "0.2")
    assert set(np.unique(pixels(shown["spread"]["flat"]))) == {0, 255}


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_odd_pictures_do_not_break_the_page(tmp_path: Path, value: float) -> None:
    """No error at all, a constant image, a truth that is unknown everywhere under the mask, and nothing masked."""
    image_YX = np.full((40, 48), value)
    scale = IntensityRange(value, value)
    rows = [row_of(f"t[{n}]", "block", "flat", QUALITY, 1.0, {}) for n in (0, 1)]
    pictures = [
        Picture("t[0]", "block", 0, image_YX, MASK_YX, scale, {"flat": image_YX}, image_YX),
        Picture("t[1]", "block", 1, image_YX, MASK_YX, scale, {"flat": image_YX}, np.full((40, 48), np.nan)),
        Picture("t[2]", "block", 2, image_YX, MASK_YX & False, scale, {}),
    ]
    with np.errstate(all="raise"):
        page = rendered(tmp_path, metrics_document({}, 1, rows), pictures, {}, slices={"t": range(3)})
    assert [("restored" in shown) for shown in Outline(page).pictures.values()] == [True, True, False]


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_leads_through_2000_slices_by_keys(tmp_path: Path) -> None:
    """Slices 20 to 2020 of a scan, the last of them without a picture."""
    texts = {n: json.loads(encode(picture, 192, 9000)) for n, picture in enumerate(known()[1])}
    rows = []
    for n in range(20, 2020):
        quality = QUALITY | {"psnr_db": 20.0 - (n == 1234)}
        rows += [row_of(f"scan[{n}]", "block", mode, quality, 1.0, {}, baseline=BASELINE) for mode in ("a", "b")]
    stored = {kind: dict.fromkeys(("a", "b", "biharmonic"), texts[0][kind]["flat"]) for kind in ("restored", "error")}
    padding = {"padding": "A" * 11000}  # as large as of real slices
    pictures = (
        json.dumps({**texts[0], **stored, **padding, "name": f"scan[{n}]", "index": n}) for n in range(20, 2020)
    )
    page = tmp_path / "report.html"
    write_report(page, metrics_document({}, 1, rows), pictures, FACTS, slices={"scan": range(20, 2021)})
    assert page.stat().st_size < 30e6
    shown, kind = (f"document.querySelector('.series').dataset.{name}" for name in ("shown", "kind"))
    with Browser(tmp_path / "profile") as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=False)
        browser.open(page)
        browser.until(shown, "20")
        assert "Pictures of 2000 of 2001 slices" in browser.value("document.querySelector('.viewer .note').textContent")
        for keys, slice_ in (
            (["ArrowRight"] * 3, "23"),
            (["PageDown"], "33"),
            (["End", "ArrowLeft"], "2018"),
            (["Home"], "20"),
        ):
            for key in keys:
                browser.press(key)
            browser.until(shown, slice_)
        for key, wanted in (("1", "original"), (" ", "restored"), (" ", "original"), ("2", "masked"), ("4", "error")):
            browser.press(key)
            browser.until(kind, wanted)
        browser.value("document.querySelector('.worst button').click()")
        browser.until(shown, "1234")
        browser.press("ArrowDown")
        browser.until("document.querySelector('[aria-label=Preset] [aria-pressed=true]').textContent", "b")
        browser.value(
            """(() => { const svg = document.querySelector('.curve svg'), box = svg.getBoundingClientRect();
            svg.dispatchEvent(new MouseEvent('click', {clientX: box.right - 1, clientY: box.top + 9})); })()"""
        )
        browser.until(shown, "2019")
        assert browser.value("document.documentElement.scrollWidth") == 360
