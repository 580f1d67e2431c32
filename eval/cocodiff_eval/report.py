"""`report.html`: one self-contained page with the pictures, the numbers and what they mean."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cocodiff_eval.intensity import IntensityRange
from cocodiff_eval.metrics import LINKS
from cocodiff_eval.slices import to_grey8
from cocodiff_eval.table import MISSING, base_name, grouped, number, samples_told, size, versus_exact, with_baseline

SHOWN_SLICES = 4
LARGEST_PICTURE = 512
LINK_NAMES = {"sibling": "sibling", "plane": "plane", "node": "node", "cross_plane": "cross plane"}
_HOLE_COLOUR = (46, 110, 168)


@dataclass(frozen=True)
class Picture:
    """One slice under one mask, as the report shows it; images [Y, X] in the input's units.

    name, mask     as in the rows of `metrics.json`; slices of a stack are called `stack` or `stack[index]`
    slice_index    0 for a single slice
    input_YX       the slice as given; under the mask it is shown only where `truth_YX` is given
    restored       preset (or "biharmonic") to restored slice
    truth_YX       the original, or None where it is unknown
    spread         preset to standard deviation of its samples; empty for a single sample
    """

    name: str
    mask: str
    slice_index: int
    input_YX: np.ndarray
    mask_YX: np.ndarray
    scale: IntensityRange
    restored: Mapping[str, np.ndarray]
    truth_YX: np.ndarray | None = None
    spread: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Generated:
    """A generated image in every mode, uint8 [Y, X, 3] each, and the prompt it was made for ("" for none)."""

    name: str
    prompt: str
    images: Mapping[str, np.ndarray]
    mask: None = None


def shown_slices(mask_voxels: Sequence[int], limit: int = SHOWN_SLICES) -> list[int]:
    """Which slices of a stack to show: at most `limit` of those with masked voxels, evenly spread, ends included."""
    masked = [index for index, count in enumerate(mask_voxels) if count]
    if len(masked) <= limit:
        return masked
    return [masked[round(i * (len(masked) - 1) / (limit - 1))] for i in range(limit)] if limit > 1 else masked[:1]


def data_uri(image: np.ndarray) -> str:
    """An 8-bit grey [Y, X] or colour [Y, X, 3] image as a PNG data URI, at most 512 pixels on its longer side."""
    from PIL import Image

    picture = Image.fromarray(image)
    if max(picture.size) > LARGEST_PICTURE:
        picture.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE), Image.Resampling.BOX)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def with_hole(image_YX: np.ndarray, mask_YX: np.ndarray, low: float, high: float) -> np.ndarray:
    """The slice with its masked voxels painted blue; what lies under them is not read. uint8 [Y, X, 3]."""
    known_YX = np.where(mask_YX, np.zeros((), image_YX.dtype), image_YX)
    picture_YXC = np.repeat(to_grey8(known_YX, low, high)[..., None], 3, axis=-1)
    picture_YXC[mask_YX] = _HOLE_COLOUR
    return picture_YXC


def _colours(values01: np.ndarray) -> np.ndarray:
    import matplotlib

    rgba = matplotlib.colormaps["magma"](values01, bytes=True)
    return np.ascontiguousarray(np.asarray(rgba)[..., :3])


def error_image(
    truth_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange
) -> tuple[np.ndarray, np.ndarray]:
    """Absolute error in normalised units, float64 [Y, X], 0 outside the mask; and where it is known (finite truth)."""
    known_YX = mask_YX & np.isfinite(truth_YX)
    difference_YX = np.where(known_YX, scale.normalise(restored_YX) - scale.normalise(truth_YX), 0.0)
    return np.abs(difference_YX), known_YX


def _figures(picture: Picture | Generated) -> dict[str, Any]:
    """The images of one slice as data URIs with captions, and the top of the error scale they share."""
    if isinstance(picture, Generated):
        figures = [{"caption": mode, "source": data_uri(image)} for mode, image in picture.images.items()]
        return {"index": 0, "figures": figures, "top": None}
    scale, mask_YX = picture.scale, picture.mask_YX
    low, high = scale.low, scale.high
    figures = []
    if picture.truth_YX is not None:
        original_YX = np.where(mask_YX, picture.truth_YX.astype(np.float64), picture.input_YX.astype(np.float64))
        # The brightest material may lie wholly under the mask: the pictures then need the wider range of the original.
        finite = original_YX[np.isfinite(original_YX)]
        low, high = min(low, float(finite.min(initial=low))), max(high, float(finite.max(initial=high)))
        figures.append({"caption": "original", "source": data_uri(to_grey8(original_YX, low, high))})
    figures.append({"caption": "masked input", "source": data_uri(with_hole(picture.input_YX, mask_YX, low, high))})
    errors = {}
    if picture.truth_YX is not None:
        for mode, restored_YX in picture.restored.items():
            errors[mode] = error_image(picture.truth_YX, restored_YX, mask_YX, scale)
    top = max((float(np.quantile(error[known], 0.99)) for error, known in errors.values() if known.any()), default=0.0)
    for mode, restored_YX in picture.restored.items():
        figure = {"caption": mode, "source": data_uri(to_grey8(restored_YX, low, high))}
        if mode in errors:
            error_YX = errors[mode][0]
            figure["error"] = data_uri(_colours(np.clip(error_YX / top if top > 0 else error_YX * 0, 0.0, 1.0)))
        figures.append(figure)
    return {"index": picture.slice_index, "figures": figures, "top": f"{top:.3g}" if errors else None}


def _table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Formatted table rows of one image and mask: its presets, then the baseline."""
    return [
        {
            "mode": row["mode"],
            "psnr": number(row["psnr_db"], 2),
            "ssim": number(row["ssim"], 3),
            "mse": MISSING if row["mse"] is None else f"{row['mse']:.2e}",
            "of_samples": samples_told(row) if any("samples" in one for one in rows) else (),
            "exact": versus_exact(row),
            "seconds": number(row["seconds"], 2),
            "bytes": [MISSING if row["bytes"] is None else size(row["bytes"][link]) for link in LINKS],
        }
        for row in with_baseline(rows)
    ]


def _sections(
    metrics: Mapping[str, Any], pictures: Sequence[Picture | Generated], slice_counts: Mapping[str, int]
) -> list[dict[str, Any]]:
    sections = []
    for name, mask, slices, rows in grouped(metrics["images"]):
        shown = [picture for picture in pictures if (base_name(picture.name), picture.mask) == (name, mask)]
        total = max(slice_counts.get(name, 1), slices, len(shown))
        sections.append(
            {
                "name": name,
                "mask": mask,
                "prompts": [picture.prompt for picture in shown if isinstance(picture, Generated) and picture.prompt],
                "rows": _table_rows(rows),
                "has_truth": any(row["mse"] is not None for row in rows),
                "slices": [_figures(picture) for picture in shown],
                "total": total,
                "more": total - len(shown),
                "averaged": slices > 1,
            }
        )
    return sections


def render_report(
    metrics: Mapping[str, Any],
    pictures: Sequence[Picture | Generated],
    facts: Mapping[str, str],
    *,
    title: str = "Restored slices",
    slice_counts: Mapping[str, int] | None = None,
) -> str:
    """The report as one HTML page without external resources.

    metrics       the document of `metrics.json`
    pictures      what to show; of a stack pass a few slices (`shown_slices`), not all
    facts         what the run was, in order of display: model, steps, seed, machine, version, ...
    slice_counts  image name to number of slices, where that is more than are shown
    """
    ramp = np.repeat(_colours(np.linspace(0.0, 1.0, 256))[None], 8, axis=0)
    return fill_template(
        "report.html.j2",
        title=title,
        facts={**facts, "ranks": str(metrics["ranks"])} if "ranks" not in facts else dict(facts),
        sections=_sections(metrics, pictures, slice_counts or {}),
        summary=_summary_rows(metrics),
        judged=any(row["mask"] is not None for row in metrics["images"]),
        several=any("samples" in row for row in metrics["images"]),
        links=[LINK_NAMES[link] for link in LINKS],
        ramp=data_uri(ramp),
        not_compared=not all(row["compared"] for row in metrics["summary"]["rows"]),
        sampled=any(0 < row["compared"] < row["n"] for row in metrics["summary"]["rows"]),
    )


def _summary_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Means per mask and preset, shown only where they say more than the tables below (two images or more)."""
    rows = []
    for row in metrics["summary"]["rows"]:
        exact = versus_exact(row | {"exact_compared": 0 < row["identical"] == row["compared"]})
        rows.append({**row, "exact": exact, "traffic": size(sum(row["bytes"].values()))})
    for row in metrics["summary"]["baseline"]:
        rows.append({**row, "mode": row["method"], "exact": MISSING, "traffic": MISSING})
    rows = [row for row in rows if any(other["n"] > 1 for other in rows)]
    for row in rows:
        row["psnr"], row["similarity"] = number(row["psnr_db"], 2), number(row["ssim"], 3)
        row["duration"] = number(row["seconds"], 2)
    return sorted(rows, key=lambda row: str(row["mask"]))


def fill_template(name: str, **values: Any) -> str:
    """A page of `templates/` with these values; one that it uses and that is not given is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cocodiff_eval", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name).render(**values)
