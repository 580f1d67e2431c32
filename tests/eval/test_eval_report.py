"""The report holds every row and slice, needs nothing from outside, stays small, and never shows what lies under a mask
file."""

import base64
import io
import json
import re
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.masks import block_mask
from cocodiff_eval.quality.metrics import metrics_document
from cocodiff_eval.report import pictures
from cocodiff_eval.report.page import write_report
from cocodiff_eval.report.pictures import Picture, encode, plan_pictures, shown_slices, window
from cocodiff_eval.report.tables import terminal_table
from eval_helpers import BASELINE, NOTHING, QUALITY, RICH_SLICES, SAMPLES, marked, phantom, rich_run, row_of
from PIL import Image

SCALE = IntensityRange(0.0, 1.0)
MASK_YX = block_mask((40, 48), 0)
IMAGE_YX = phantom(40, 48)
FACTS = {"model": "embedded", "steps": "20", "seed": "0", "machine": "local <3", "version": "0.1.0"}


LINES = ("h1", "h2", "h3", "p", "li", "tr", "dt", "dd", "figcaption")


class Outline(HTMLParser):
    """A page that needs nothing from outside: its inert blocks, and `lines`, what it tells, with one for each row of a
    table, heading, note and remark and each area of a figure; of the legend the terms alone."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.masks: dict[str, str] = {}
        self.pictures: dict[tuple[str, int], dict[str, Any]] = {}
        self.numbers: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._block: dict[str, str | None] = {}
        self._text, self._in_legend = "", False
        self.feed(page)
        self.close()
        assert not self.open and not self.loads
        assert not re.search(r"https?://(?!www.w3.org/2000/svg)|url\(|<link|@import|fetch\(", page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = self._block = dict(attributes)
        self.loads += [found[name] or "" for name in ("src", "href", "srcset") if name in found]
        self._in_legend |= found.get("class") == "legend"
        if tag not in ("meta", "img", "link", "br", "input"):
            self.open.append(tag)
        if tag in LINES:
            self._text = f"{found['class']} " if tag == "tr" and "class" in found else ""
        elif tag in ("td", "th"):
            self._text += " | "
        elif tag == "path":
            self.lines.append(f"{found['class']} {found['d']}")
        elif "aria-label" in found:
            self.lines.append(f"{tag}: {found['aria-label']}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._block = {}
        if tag in LINES and not (tag == "dd" and self._in_legend):
            self.lines.append(f"{tag}: {' '.join(self._text.split())}")

    def handle_data(self, data: str) -> None:
        block = self._block
        if block.get("class") == "picture":
            self.pictures[str(block["data-series"]), int(str(block["data-number"]))] = json.loads(data)
        elif block.get("class") == "numbers":
            self.numbers.append(json.loads(data))
        elif (block.get("id") or "").startswith("mask-"):
            name = str(block["id"]).removeprefix("mask-")
            assert name not in self.masks
            self.masks[name] = data
        self._text += data


def pixels(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def rendered(folder: Path, metrics: dict, shown: Iterable[Picture], facts: dict[str, str], **more: Any) -> str:
    path = folder / "report.html"
    write_report(path, metrics, (encode(picture, 512, 10**6) for picture in shown), facts, **more)
    return path.read_text(encoding="utf-8")


def known() -> tuple[dict, list[Picture]]:
    """One slice whose name would end a script, in two presets."""
    name = "too</script>th"
    rows = [row_of(name, "block", mode, QUALITY, 1.0, {}, baseline=BASELINE) for mode in ("flat", "cocodiff")]
    restored = {mode: np.where(MASK_YX, IMAGE_YX * 0.9, IMAGE_YX) for mode in ("flat", "cocodiff", "biharmonic")}
    return metrics_document({}, 4, rows), [Picture(name, "block", IMAGE_YX, MASK_YX, SCALE, restored, IMAGE_YX)]


def test_the_page_and_the_table_tell_of_everything_in_a_run(tmp_path: Path, snapshot: Callable[[str], None]) -> None:
    """Tables, means, figures, remarks and what curves are drawn from; and the table that a terminal shows."""
    document = rich_run()
    page = rendered(tmp_path, document, [], FACTS, slices=RICH_SLICES, prompts={"drawn": "a <cat>"})
    outline = Outline(page)
    snapshot("\n".join(outline.lines))
    snapshot("\n".join(json.dumps(one) for one in outline.numbers))
    snapshot(terminal_table(document))
    assert "prefers-color-scheme: dark" in page and "@media print" in page and 'name="viewport"' in page


def test_columns_and_remarks_that_say_nothing_are_left_out(tmp_path: Path, snapshot: Callable[[str], None]) -> None:
    """One rank; slices in one preset, whose intervals nothing has calibrated; every second slice of a stack whose truth
    is unknown, more ranges than are written out; and slices by themselves, one of them without a truth."""
    uncalibrated = {name: value for name, value in SAMPLES.items() if name not in ("intervals", "uncertainty")}
    uncalibrated |= {"rank_seconds": 1.0}
    rows = [row_of(f"a[{n}]", "block", "flat", QUALITY, 1.0, {}, baseline=BASELINE, **uncalibrated) for n in range(2)]
    rows += [row_of(f"b[{n}]", "m", "flat", NOTHING, 2.0, {}, exact_compared=False) for n in range(0, 30, 2)]
    rows += [row_of("c", "m", "flat", QUALITY, 1.0, {}), row_of("d", "m", "flat", NOTHING, 1.0, {})]
    told = {"mask": "m", "wholly_masked": [], "remarks": [], "range": [1e-7, 0.5], "extremes": [-1.25, 3e9]}
    inputs = [{**told, "name": name, "beyond": beyond} for name, beyond in (("c", 1), ("d", 12345))]
    document = metrics_document({}, 1, rows) | {"inputs": inputs}
    page = rendered(tmp_path, document, [], {**FACTS, "ranks": "1, alone"}, slices={"b": range(31)})
    snapshot("\n".join(Outline(page).lines))
    snapshot(terminal_table(document))


def test_pictures_are_those_of_the_slices(tmp_path: Path) -> None:
    """Without loss: the original is whole, as its truth is known; restored pixels and errors stand under the mask."""
    outline = Outline(rendered(tmp_path, *known(), FACTS))
    assert not any("All images" in line for line in outline.lines)  # means of one image would repeat its row
    assert [one["names"] for one in outline.numbers] == [["too</script>th"]]
    (shown,) = outline.pictures.values()
    assert list(shown["restored"]) == list(shown["error"]) == ["flat", "cocodiff", "biharmonic"]
    assert 0.05 < float(shown["error_top"]) < 0.1  # a tenth of the brightest hidden voxels
    grey_YX = np.rint(IMAGE_YX / max(1.0, IMAGE_YX.max()) * 255)
    np.testing.assert_allclose(pixels(shown["original"])[..., 0], grey_YX, atol=1)
    np.testing.assert_array_equal(pixels(outline.masks[shown["hole"]]), MASK_YX)
    np.testing.assert_allclose(pixels(shown["restored"]["flat"])[..., 0][MASK_YX], grey_YX[MASK_YX] * 0.9, atol=1)
    error_YX = pixels(shown["error"]["flat"])[..., 0]
    assert not error_YX[~MASK_YX].any() and error_YX[MASK_YX].max() == 255


def test_without_truth_the_original_is_shown_with_its_hole(tmp_path: Path) -> None:
    """Slices of a stack, numbered as in the input, share a section and a mask; nothing of what lies there is shown."""
    rows = [row_of(f"scan[{n}]", "scratch", "flat", NOTHING, 2.0, {}, exact_compared=False) for n in (20, 27)]
    dark_YX = np.where(MASK_YX, IMAGE_YX * 0.5, IMAGE_YX)
    pictures = [Picture(f"scan[{n}]", "scratch", IMAGE_YX, MASK_YX, SCALE, {"flat": dark_YX}) for n in (20, 27)]
    page = rendered(tmp_path, metrics_document({}, 1, rows), pictures, FACTS, slices={"scan": range(20, 29)})
    outline = Outline(page)
    assert page.count('<section class="series"') == len(outline.masks) == 1
    assert set(outline.pictures) == {("0", 20), ("0", 27)}
    for shown in outline.pictures.values():
        assert "error" not in shown and shown["unknown"] == shown["hole"] in outline.masks
        assert len(np.unique(pixels(shown["original"])[MASK_YX])) == 1


def test_which_slices_are_shown() -> None:
    assert [*map(shown_slices, ([1], [0, 5, 0, 5], [1] * 100, [0, 0]))] == [[0], [1, 3], [0, 33, 66, 99], []]
    assert shown_slices([1] * 100, 1) == [0]


def test_the_more_slices_the_smaller_their_pictures() -> None:
    few, many, far_more = (plan_pictures([[True] * count], 3) for count in (4, 2000, 20000))
    assert few.side == 512 and len(many.shown[0]) == 2000 and many.worst == 0
    assert 160 <= many.side < 512 and many.share * 2000 <= 20e6
    assert 1000 < len(far_more.shown[0]) < 6000 and {0, 19999} <= far_more.shown[0]
    assert (len(far_more.shown[0]) + far_more.worst) * far_more.share <= 20e6 and far_more.worst > 0
    more = plan_pictures([[True] * 8000], 3)  # all of them would fit in pictures too small to show their slices
    assert more.share == far_more.share and more.worst > 0
    many_stacks = plan_pictures([[True] * 9000, *[[True] * 45] * 200], 3)  # each has its share, and one slice at least
    assert [len(one) for one in many_stacks.shown] == [100] + [1] * 200
    assert pictures.worst_slices({0: [1.0, 9.0], 1: [3.0, 2.0], 2: [0.5], 3: []}, frozenset({2}), 1) == [0]
    noise_YX = np.random.default_rng(0).random((300, 300))
    restored = dict.fromkeys(("flat", "tapa", "biharmonic"), noise_YX)
    picture = Picture("a", "block", noise_YX, block_mask((300, 300), 0), SCALE, restored, noise_YX)
    text = encode(picture, many.side, many.share)  # noise is what compresses worst
    assert len(text) * 2000 < 30e6 and 64 < json.loads(text)["width"] < many.side
    assert json.loads(encode(known()[1][0], many.side, many.share))["width"] == 48
    plain = Picture("a", "block", IMAGE_YX, MASK_YX & False, SCALE, {})  # where room is scarce it is not compared
    assert [json.loads(encode(plain, 48, share))["quality"] for share in (1100, 10**6)] == [60, 100]


def test_error_and_uncertainty_are_of_masked_voxels_and_a_truth_may_have_gaps() -> None:
    """A gap under the mask is unknown, without an error."""
    torn_YX = np.where(MASK_YX, np.nan, IMAGE_YX)
    error_YX, known_YX = pictures.error_image(torn_YX, IMAGE_YX, MASK_YX, SCALE)
    assert not error_YX.any() and not known_YX.any()
    width = {"flat": np.full(MASK_YX.shape, 0.2)}
    ends = {"flat": (np.full(MASK_YX.shape, 0.25), np.full(MASK_YX.shape, 0.75))}
    torn = Picture("a", "m", torn_YX, MASK_YX, SCALE, {"flat": IMAGE_YX}, None, width, ends)
    shown = json.loads(encode(torn, 24, 10**5))
    assert (shown["width"], shown["height"], shown["uncertainty_top"]) == (24, 20, "0.2")
    assert set(np.unique(pixels(shown["uncertainty"]["flat"]))) == {0, 255}
    low_YX, high_YX = (pixels(shown[end]["flat"])[..., 0] for end in ("low", "high"))
    assert set(np.unique(low_YX)) == {64} and set(np.unique(high_YX)) == {191}
    gap_YX = MASK_YX & (np.arange(48) % 3 == 0)
    truth_YX = np.where(gap_YX, np.nan, IMAGE_YX)
    with_gaps = Picture("a", "m", IMAGE_YX, MASK_YX, SCALE, {"flat": 0 * IMAGE_YX}, truth_YX)
    shown = json.loads(encode(with_gaps, 48, 10**6))
    np.testing.assert_array_equal(pixels(shown["unknown"]), gap_YX)
    np.testing.assert_array_equal(pixels(shown["error"]["flat"])[..., 0] > 0, MASK_YX & ~gap_YX)


def test_a_restored_picture_is_stored_around_the_mask_alone() -> None:
    """In blocks of 16 pixels of which one is at most two steps from a masked pixel; the rest is one grey."""
    image_YX, mask_YX = np.full((64, 96), 0.75), marked((64, 96), (30, 47))
    shown = json.loads(encode(Picture("a", "m", image_YX, mask_YX, SCALE, {"flat": image_YX}), 96, 10**6))
    stored_YX = marked((64, 96), np.s_[16:48, 32:48], np.s_[16:32, 48:64])
    np.testing.assert_array_equal(pixels(shown["restored"]["flat"])[..., 0], np.where(stored_YX, 191, 127))


def test_black_and_white_are_wide_enough_for_what_is_hidden_but_not_for_outliers() -> None:
    mask_YX, known_YX = np.arange(400).reshape(20, 20) < 100, np.ones((20, 20), bool)
    image_YX = np.random.default_rng(0).random((20, 20))
    assert window(image_YX, known_YX, mask_YX, SCALE) == (0, 1)
    image_YX[0, :15] = 1.5
    image_YX[1, :15] = -0.25
    assert window(image_YX, known_YX, mask_YX, SCALE) == (-0.25, 1.5)
    image_YX[2, 0] = 1e6
    assert window(image_YX, known_YX, mask_YX, SCALE) == (-0.25, 1.5)
    assert window(image_YX, known_YX & ~mask_YX, mask_YX, SCALE) == (0, 1)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_odd_pictures_do_not_break_the_page(tmp_path: Path, value: float) -> None:
    """No error at all, a constant image, a truth that is unknown everywhere under the mask, and nothing masked."""
    image_YX = np.full((40, 48), value)
    scale = IntensityRange(value, value)
    rows = [row_of(f"t[{n}]", "block", "flat", QUALITY, 1.0, {}) for n in (0, 1)]
    pictures = [
        Picture("t[0]", "block", image_YX, MASK_YX, scale, {"flat": image_YX}, image_YX),
        Picture("t[1]", "block", image_YX, MASK_YX, scale, {"flat": image_YX}, np.full((40, 48), np.nan)),
        Picture("t[2]", "block", image_YX, MASK_YX & False, scale, {}),
    ]
    with np.errstate(all="raise"):
        page = rendered(tmp_path, metrics_document({}, 1, rows), pictures, {}, slices={"t": range(3)})
    assert [("restored" in shown) for shown in Outline(page).pictures.values()] == [True, True, False]
