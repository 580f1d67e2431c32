"""Traces of all ranks as Chrome trace JSON, which Perfetto opens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff.errors import UserError
from cocodiff.files import irregular
from cocodiff.trace import Span


def save_traces(path: str | Path, records: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the records of all ranks, by mode, as one Chrome trace: a process per rank, a thread per mode and lane.

    Times are in microseconds; clocks of different hosts are not aligned.
    """
    every = [(mode, record) for mode, of_mode in records.items() for record in of_mode]
    start = min((span[2] for _, record in every for span in record["spans"]), default=0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for rank in sorted({record["rank"] for _, record in every})
    ]
    sent: Counter[str] = Counter()
    for mode, record in every:
        for name, lane, begin, end, layer, late_bytes in record["spans"]:
            times = {"ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
            late = {"late_bytes": late_bytes} if late_bytes else {}
            about = {"name": name, "args": {"mode": mode, "lane": lane, "layer": layer, **late}}
            events.append({"ph": "X", "pid": record["rank"], "tid": f"{mode} {lane}", **about, **times})
        sent.update({f"{mode} {purpose} {link}": count for (purpose, link), count in record["bytes"].items()})
    ran: Counter[str] = Counter()
    for mode, record in every:
        ran.update({f"{mode} {operation} {path}": count for (operation, path), count in record["kernels"].items()})
    other = {"bytes": dict(sent), "kernels": dict(ran), "spans_not_kept": sum(record["dropped"] for _, record in every)}
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}))


class SavedTraces(NamedTuple):
    """The spans of a saved trace. spans: mode -> rank -> spans, their times from the file's first span on."""

    spans: dict[str, dict[int, list[Span]]]
    not_kept: int  # spans beyond MAX_SPANS of a rank, of all ranks and modes together
    sent: Mapping[str, Mapping[str, Mapping[str, int]]]  # mode -> purpose -> bytes by link class, of all ranks


def load_traces(path: str | Path) -> SavedTraces:
    """Reads what `save_traces` wrote. Raises UserError where there is no such file or it is not a trace of ours."""
    try:
        if kind := irregular(path):
            raise UserError(f"cannot read {path}: it is {kind}; give the trace.json of a run")
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the trace.json of a run") from error
    except UnicodeDecodeError as error:
        raise _not_ours(path) from error
    spans: dict[str, dict[int, list[Span]]] = {}
    try:
        written = json.loads(text)
        for event in written["traceEvents"]:
            if event["ph"] == "X":
                about, start = event["args"], round(event["ts"] * 1e3)
                end, late = start + round(event["dur"] * 1e3), int(about.get("late_bytes", 0))
                span = Span(event["name"], about["lane"], start, end, about["layer"], late)
                spans.setdefault(about["mode"], {}).setdefault(event["pid"], []).append(span)
        sent: dict[str, dict[str, dict[str, int]]] = {}
        for name, count in written["otherData"].get("bytes", {}).items():
            mode, purpose, link = name.rsplit(" ", 2)
            sent.setdefault(mode, {}).setdefault(purpose, {})[link] = int(count)
        return SavedTraces(spans, int(written["otherData"]["spans_not_kept"]), sent)
    except (AttributeError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _not_ours(path) from error


def _not_ours(path: str | Path) -> UserError:
    return UserError(f"{path} is not a trace of this version of cocodiff: give the trace.json of a run")
