"""Renders `report.html`: tables that are there at once, and pictures as inert text, decoded when they are looked at."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cocodiff_eval.metrics import LINKS
from cocodiff_eval.report.encode import LOSSLESS
from cocodiff_eval.report.series import Series, key_of, numbers, remarks, series_of
from cocodiff_eval.report.templates import write_template
from cocodiff_eval.steps import BARS, LEFT, STRIP, WIDTH, step_figures
from cocodiff_eval.table import (
    MISSING,
    grouped,
    has_rank_seconds,
    number,
    of_whole,
    of_whole_awaited,
    samples_told,
    size,
    versus_exact,
    with_baseline,
)

LINK_NAMES = {"sibling": "sibling", "plane": "plane", "node": "node", "cross_plane": "cross plane"}


class Block(NamedTuple):
    """A text that the page's script reads when it needs it. kind: `picture` or `mask`; key: the slice's number in its
    series, or the name that slices call a mask by."""

    kind: str
    series: int
    key: str
    text: str


def write_report(
    path: Path,
    metrics: Mapping[str, Any],
    pictures: Iterable[str],
    facts: Mapping[str, str],
    *,
    title: str = "Restored slices",
    slices: Mapping[str, range] | None = None,
    prompts: Mapping[str, str] | None = None,
    side: int | None = None,
    frames: int | None = None,
) -> None:
    """Writes the report as one HTML page without external resources.

    metrics       the document of `metrics.json`
    pictures      what `encode` made of slices or images, each asked for when it is written; of a stack a sample will do
    facts         what the run was, in order of display: model, steps, seed, machine, version, ...
    slices        image name to the numbers of its slices, of stacks
    prompts       image name to the prompt that it was made for
    side          pixels of the pictures' longer side, for the page to say
    frames        of a video, of which a picture shows some; None for images
    """
    of_stacks, rows = slices or {}, metrics["images"]
    found = series_of(rows, of_stacks, metrics.get("inputs", ()))
    write_template(
        path,
        "report.html.j2",
        title=title,
        facts={**facts, "ranks": str(metrics["ranks"])} if "ranks" not in facts else dict(facts),
        sections=[_section(series, prompts or {}) for series in found.values()],
        summary=_summary_rows(metrics),
        bounds=[_bound(one) for one in metrics.get("quality", ())],
        judged=any(row["mask"] is not None for row in rows),
        sampled=any("samples" in row for row in rows),
        ranked=has_rank_seconds(metrics),
        links=[LINK_NAMES[link] for link in LINKS],
        by_step=any("sent_fraction" in step for row in rows for step in row.get("drift", ())),
        figure={"width": WIDTH, "left": LEFT, "strip": STRIP, "bars": BARS},
        colours=base64.b64encode(_colours()).decode("ascii"),
        blocks=_blocks(pictures, found, of_stacks),
        lossless=LOSSLESS,
        side=side,
        frames=frames,
    )


def _blocks(
    pictures: Iterable[str], found: Mapping[tuple[str | None, str | None], Series], of_stacks: Mapping[str, range]
) -> Iterator[Block]:
    """The pictures with their masks, each mask once."""
    order = {key: place for place, key in enumerate(found)}
    masks: set[str] = set()
    for text in pictures:
        picture = json.loads(text)
        key = key_of(picture["name"], picture["mask"], of_stacks)
        if key not in order:
            continue
        for kind in ("hole", "unknown"):
            if picture.get(kind):
                bits = picture[kind]
                picture[kind] = hashlib.sha256(bits.encode()).hexdigest()[:16]
                if picture[kind] not in masks:
                    masks.add(picture[kind])
                    yield Block("mask", order[key], picture[kind], bits)
        place = found[key].number(picture["name"])
        # A script block ends at the first "</script", whatever stands around it.
        yield Block("picture", order[key], str(place), _inert(picture))


def _inert(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _section(series: Series, prompts: Mapping[str, str]) -> dict[str, Any]:
    """A series as the template shows it."""
    rows = [row for place in sorted(series.rows) for row in series.rows[place]]
    tables = [
        {"name": name, "prompt": prompts.get(name, ""), "rows": _table_rows(of_image), "averaged": slices > 1}
        for name, _, slices, of_image in grouped(rows)
    ]
    single = series.names[0] if len(series.names) == 1 else f"{len(series.names)} images"
    return {
        "name": series.stack if series.stack is not None else single,
        "mask": series.mask,
        "slices": len(series.all) if series.stack is not None else 1,
        "first": series.all.start,
        "tables": tables,
        "many": len(tables) > 1 or any(table["prompt"] for table in tables),
        "averaged": any(table["averaged"] for table in tables),
        "sampled": any("samples" in row for row in rows),
        "late": any("bytes_late" in row for row in rows),
        "steps": step_figures(rows),
        "remarks": remarks(series),
        "numbers": _inert(numbers(series)),
    }


def _bound(record: Mapping[str, Any]) -> dict[str, Any]:
    """How a bound on quality was kept, of one mask or of all images: an entry of `quality` in `metrics.json`."""
    rows, digits = [], 1 if record["against"] == "exact" else 3
    for tried in record["tried"]:
        of_slices = tried["db"].items()
        shown = ((name, "identical" if db is None else f"{db:.{digits}f} dB") for name, db in of_slices)
        worst = "identical" if tried["worst_db"] is None else f"{tried['worst_db']:.{digits}f} dB"
        rows.append(
            {
                **tried,
                "taken": tried["setting"] == record["setting"],
                "keeps": "yes" if tried["kept"] else "no" if tried["below"] else f"not by {record['margin_db']:g} dB",
                "worst_shown": worst,
                "figures": ", ".join(f"{name} {db}" for name, db in shown),
                "share": number(tried["bytes_of_whole"], 3),
                "waited": number(tried["waited_of_whole"], 3),
            }
        )
    return {**record, "rows": rows}


def _table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Formatted table rows of one image and mask: its presets, then the baseline."""
    return [
        {
            "mode": row["mode"],
            "psnr": number(row["psnr_db"], 2),
            "ssim": number(row["ssim"], 3),
            "mse": MISSING if row["mse"] is None else f"{row['mse']:.2e}",
            "of_samples": samples_told(row),
            "exact": versus_exact(row),
            "seconds": number(row["seconds"], 2),
            "rank_seconds": number(row.get("rank_seconds"), 2),
            "bytes": [MISSING if row["bytes"] is None else size(row["bytes"][link]) for link in LINKS],
            "of_whole": of_whole(row),
            "of_whole_awaited": of_whole_awaited(row),
        }
        for row in with_baseline(rows)
    ]


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


def _colours() -> bytes:
    """Red, green and blue of 256 steps from no error to the largest."""
    import matplotlib

    rgba = matplotlib.colormaps["magma"](np.arange(256), bytes=True)
    return np.ascontiguousarray(np.asarray(rgba)[..., :3]).tobytes()
