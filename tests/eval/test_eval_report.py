"""The report holds every row and picture, needs nothing from outside, and never shows what lies under a mask file."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from cocodiff_eval.intensity import IntensityRange
from cocodiff_eval.masks import block_mask
from cocodiff_eval.metrics import metrics_document, metrics_row
from cocodiff_eval.report import Picture, data_uri, error_image, render_report, shown_slices, with_hole
from eval_helpers import phantom
from PIL import Image

SCALE = IntensityRange(0.0, 1.0)
MASK_YX = block_mask((40, 48), 0)
IMAGE_YX = phantom(40, 48)
QUALITY = {"psnr_db": 21.53, "ssim": 0.654, "mse": 0.00703}
NOTHING = {"psnr_db": None, "ssim": None, "mse": None}
BASELINE = {"psnr_db": 18.25, "ssim": 0.512, "mse": 0.015, "seconds": 0.44}
FACTS = {"model": "embedded", "steps": "20", "seed": "0", "machine": "local <3", "version": "0.1.0"}


class Outline(HTMLParser):
    """Tags opened and closed, and every attribute that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def known() -> tuple[dict, list[Picture]]:
    rows = [
        metrics_row("tooth", "block", "flat", QUALITY, 12.34, {"plane": 5 * 2**20}, baseline=BASELINE),
        metrics_row(
            "tooth", "block", "cocodiff", QUALITY, 7.89, {"node": 77}, psnr_vs_exact_db=39.8, baseline=BASELINE
        ),
    ]
    restored = {mode: np.where(MASK_YX, IMAGE_YX * 0.9, IMAGE_YX) for mode in ("flat", "cocodiff", "biharmonic")}
    pictures = [Picture("tooth", "block", 0, IMAGE_YX, MASK_YX, SCALE, restored, IMAGE_YX)]
    return metrics_document({}, 4, rows), pictures


def test_report_has_all_rows_and_pictures(tmp_path: Path) -> None:
    metrics, pictures = known()
    (tmp_path / "report.html").write_text(render_report(metrics, pictures, FACTS), encoding="utf-8")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    outline = Outline(page)
    assert not outline.open
    assert all(load.startswith("data:image/png;base64,") for load in outline.loads)
    assert not re.search(r"https?://|url\(|<script|<link", page)
    for text in ("21.53", "0.654", "7.03e-03", "12.34", "identical", "39.8 dB", "5.0 MiB", "77 B", "18.25", "0.512"):
        assert f">{text}<" in page, text
    for text in ("Restored slices", "embedded", "local &lt;3", "0.1.0", "ranks", ">4<", "cross plane", "biharmonic"):
        assert text in page, text
    for caption in ("original", "masked input", "flat", "cocodiff", "error of flat", "error of biharmonic"):
        assert f"<figcaption>{caption}</figcaption>" in page, caption
    top = re.search(r"<span>(0\.\d+) or more of the intensity range", page)
    assert top is not None and 0.05 < float(top[1]) < 0.1  # a tenth of the brightest hidden voxels
    assert "prefers-color-scheme: dark" in page and "@media print" in page and 'name="viewport"' in page
    assert len(re.findall("<tbody>", page)) == 1  # one image: its mean would repeat the row


def test_means_appear_with_the_second_image() -> None:
    rows = [metrics_row(name, "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE) for name in ("a", "b")]
    rows.append(metrics_row("c", "m", "flat", NOTHING, 1.0, {}, exact_compared=False))
    page = render_report(metrics_document({}, 1, rows), [], {**FACTS, "ranks": "1, alone"})
    assert "All images" in page and page.count("<tbody>") == 4 and "1, alone" in page
    assert "A dash: no exact run was made." in page


def test_several_samples_show_how_far_they_spread() -> None:
    of_samples = {"samples": 8, "coverage_50": 0.43, "coverage_90": 0.81, "psnr_db_single": 20.12}
    rows = [metrics_row("a", "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE, of_samples=of_samples)]
    page = render_report(metrics_document({}, 1, rows), [], FACTS)
    for text in ("one sample, dB", "in 90 %", "20.12", "43 %", "81 %"):
        assert f">{text}<" in page, text
    assert "one sample" not in render_report(known()[0], [], FACTS)


def test_without_truth_only_the_input_and_the_restored_are_shown() -> None:
    rows = [metrics_row("scan", "scratch", "flat", NOTHING, 2.0, {}, exact_compared=False)]
    pictures = [Picture("scan", "scratch", n, IMAGE_YX, MASK_YX, SCALE, {"flat": IMAGE_YX}) for n in (0, 7)]
    page = render_report(metrics_document({}, 1, rows), pictures, FACTS, slice_counts={"scan": 9})
    assert "<figcaption>original" not in page and "error of" not in page and "absolute error" not in page
    assert "slice 7" in page and "7 more slices" in page and "9 slices" in page
    assert page.count("<td>–</td>") == 4
    assert "The original under this mask is unknown" in page


def test_slices_of_a_stack_share_a_section() -> None:
    rows = [metrics_row(f"scan[{n}]", "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE) for n in range(30)]
    pictures = [Picture("scan[7]", "block", 7, IMAGE_YX, MASK_YX, SCALE, {"flat": IMAGE_YX}, IMAGE_YX)]
    page = render_report(metrics_document({}, 1, rows), pictures, FACTS, slice_counts={"scan": 40})
    assert page.count("<section>") == 1 and "slice 7" in page and "39 more slices" in page
    assert "Quality: means over the slices" in page and ">30.00<" in page


def test_which_slices_are_shown() -> None:
    assert shown_slices([1]) == [0]
    assert shown_slices([0, 5, 0, 5]) == [1, 3]
    assert shown_slices([1] * 100) == [0, 33, 66, 99]
    assert shown_slices([1] * 100, 1) == [0]
    assert shown_slices([0, 0]) == []


def test_pictures() -> None:
    torn_YX = np.where(MASK_YX, np.nan, IMAGE_YX)
    hole_YXC = with_hole(torn_YX, MASK_YX, 0.0, 1.0)
    assert len(np.unique(hole_YXC[MASK_YX], axis=0)) == 1 and hole_YXC.dtype == np.uint8
    error_YX, known_YX = error_image(torn_YX, IMAGE_YX, MASK_YX, SCALE)
    assert not error_YX.any() and not known_YX.any()
    uri = data_uri(np.zeros((2000, 1000), np.uint8))
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (256, 512)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_odd_pictures_do_not_break_the_page(value: float) -> None:
    """No error at all, a constant image, and a truth that is unknown everywhere under the mask."""
    image_YX = np.full((40, 48), value)
    scale = IntensityRange(value, value)
    metrics, _ = known()
    pictures = [
        Picture("tooth", "block", 0, image_YX, MASK_YX, scale, {"flat": image_YX}, image_YX),
        Picture("tooth", "block", 1, image_YX, MASK_YX, scale, {"flat": image_YX}, np.full((40, 48), np.nan)),
    ]
    with np.errstate(all="raise"):
        assert render_report(metrics, pictures, {}).count("<figcaption>flat") == 2
