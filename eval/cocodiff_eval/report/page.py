"""The writer of `report.html`: tables that show at once, and pictures as inert text, decoded when they are viewed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff_eval.quality.metrics import BARS, LEFT, STRIP, WIDTH, ring_figures, step_figures
from cocodiff_eval.report.pictures import base64_text
from cocodiff_eval.report.sweeps import PARETO, WORDS, Row, note, tables
from cocodiff_eval.report.tables import (
    LINK_HEADS,
    Column,
    Series,
    Table,
    bound_table,
    decibels,
    grouped,
    key_of,
    numbers,
    quality_table,
    remarks,
    series_of,
    summary_table,
)
from cocodiff_eval.report.volume import VOLUME_BYTES, ShownVolume, embedded

# Red, green and blue of 256 steps from no error to the largest: a copy of matplotlib's magma, so that reports do not
# need matplotlib.
COLOURS = Path(__file__).parent / "templates" / "magma.rgb"


class EmbeddedText(NamedTuple):
    """A text in the report's page, in an inert script element, that the page's script decodes when it needs it."""

    kind: str  # `picture`, `mask` or `volume`
    series: int  # number of the series that it belongs to: slices of a stack under a mask, or images
    key: str  # number of the slice in its series, or the name by which slices refer to a mask
    text: str  # JSON, or a mask's PNG in base64


def write_report(
    path: Path,
    metrics: Mapping[str, Any],
    pictures: Iterable[str],
    facts: Mapping[str, str],
    *,
    title: str = "Restored slices",
    slices: Mapping[str, range] | None = None,
    prompts: Mapping[str, str] | None = None,
    shown: Sequence[ShownVolume] = (),
    side: int | None = None,
    frames: int | None = None,
    swept: Sequence[Row] = (),
) -> None:
    """Write the report on a job as one HTML page without external resources.

    Args:
        path: the page's file.
        metrics: the content of `metrics.json`.
        pictures: what `encode` returned for slices or images, read one by one while writing; a sample of a stack will
            do.
        facts: facts of the run in the order of display: model, steps, seed, machine, version, ...
        title: heading of the page.
        slices: for each stack the range of its slices' numbers.
        prompts: for each image its prompt.
        shown: volumes that the page shows from three sides, each read when it is written.
        side: longer side of the pictures in pixels, which the page mentions.
        frames: number of frames of a video, of which a picture shows some; None for images.
        swept: rows of a sweep, whose picture lies beside the page.
    """
    of_stacks, rows = slices or {}, metrics["images"]
    found = series_of(rows, of_stacks, metrics.get("inputs", ()))
    sections = [_section(series, prompts or {}, metrics) for series in found.values()]
    heads = {column.head for section in sections for column in section["table"].columns}
    bounds = metrics.get("quality", ())
    pieces = _template().generate(
        title=title,
        facts={**facts, "ranks": str(metrics["ranks"])} if "ranks" not in facts else dict(facts),
        sections=sections,
        summary=None if swept else summary_table(metrics),
        swept=_swept(path, swept) if swept else None,
        bounds=[_bound(one) for one in bounds],
        bound_table=bound_table(bounds),
        judged=any(row["mask"] is not None for row in rows),
        sampled=any("samples" in row for row in rows),
        calibrated=any(row.get("intervals") for row in rows),
        heads=heads,
        shown=bool(shown),
        sent=bool(heads & {*LINK_HEADS.values()}),
        by_step=any("sent_fraction" in step for row in rows for step in row.get("drift", ())),
        figure={"width": WIDTH, "left": LEFT, "strip": STRIP, "bars": BARS},
        colours=base64_text(COLOURS.read_bytes()),
        blocks=_blocks(pictures, shown, found, of_stacks),
        side=side,
        frames=frames,
    )
    with path.open("w", encoding="utf-8") as file:
        file.writelines(pieces)  # pictures and volumes are made while writing, and are not kept


@cache
def _template() -> Any:
    """Return the jinja2 template of the report's page."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("cocodiff_eval.report", "templates"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    ).get_template("report.html.j2")


def _swept(path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a sweep's picture in base64, its tables and their explanation, by the names that the template uses.

    Args:
        path: the page's file, beside which the picture lies.
        rows: a row for each point, mask and number of steps.
    """
    return {
        "picture": base64_text(path.with_name(PARETO).read_bytes()),
        "tables": [
            Table.of(label, [Column(head, cells, head in WORDS) for head, cells in of.items()], [False] * len(rows))
            for label, of in tables(rows).items()
        ],
        "note": note(rows),
    }


def _blocks(
    pictures: Iterable[str],
    shown: Sequence[ShownVolume],
    found: Mapping[tuple[str | None, str | None], Series],
    of_stacks: Mapping[str, range],
) -> Iterator[EmbeddedText]:
    """Yield the texts that the page embeds: pictures with their masks, each mask once, and then the volumes.

    The volumes share VOLUME_BYTES.

    Args:
        pictures: JSON as of `encode`, one for each slice or image.
        shown: the volumes.
        found: the series by stack and mask, as of `series_of`.
        of_stacks: for each stack the range of its slices' numbers.
    """
    order, masks = {key: place for place, key in enumerate(found)}, set[str]()
    for text in pictures:
        picture = json.loads(text)
        key = key_of(picture["name"], picture["mask"], of_stacks)
        if key not in order:
            continue
        for kind in ("hole", "unknown"):
            if bits := picture.get(kind):
                picture[kind] = hashlib.sha256(bits.encode()).hexdigest()[:16]
                if picture[kind] not in masks:
                    masks.add(picture[kind])
                    yield EmbeddedText("mask", order[key], picture[kind], bits)
        place = found[key].number(picture["name"])
        # A script block ends at the first "</script", even inside a string.
        yield EmbeddedText("picture", order[key], str(place), _inert(picture))
    for volume in shown:
        if (key := (volume.stack.name, volume.mask.name)) in order:
            yield EmbeddedText("volume", order[key], "", _inert(embedded(volume, VOLUME_BYTES // len(shown))))


def _inert(document: Any) -> str:
    """Return data as JSON without "<", so that it cannot end the script element of the page that holds it."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _section(series: Series, prompts: Mapping[str, str], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the report's section on a series of results shows, by the names that the page's template uses.

    Args:
        series: slices of a stack under a mask, or images.
        prompts: for each generated image its prompt.
        metrics: the content of `metrics.json`.
    """
    rows = [row for place in sorted(series.rows) for row in series.rows[place]]
    single = series.names[0] if len(series.names) == 1 else f"{len(series.names)} images"
    name = series.stack if series.stack is not None else single
    return {
        "name": name,
        "mask": series.mask,
        "slices": len(series.all) if series.stack is not None else 1,
        "first": series.all.start,
        "table": quality_table(f"Quality, time and bytes of {name}", rows, prompts, metrics),
        "averaged": any(slices > 1 for _, _, slices, _ in grouped(rows, metrics)),
        "steps": step_figures(rows),
        "rings": ring_figures(rows),
        "remarks": remarks(series),
        "numbers": _inert(numbers(series)),
    }


def _bound(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of the choice of a setting for `--quality`, as the page's template reads it.

    It has a further entry, `figures`: a list with one text, the dB of each item on which the chosen setting was tried.
    The list is empty for the exact setting, which is chosen without a trial.

    Args:
        record: an entry of `quality` in `metrics.json`.
    """
    taken = (tried for tried in record["tried"] if tried["setting"] == record["setting"])
    shown = [", ".join(f"{name} {decibels(record, db)}" for name, db in tried["db"].items()) for tried in taken]
    return {**record, "figures": shown}
