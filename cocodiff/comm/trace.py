"""A record of a run: spans on lanes, and payload bytes per link class.

Bytes are payload, counted once, at the sender, in the class of the link between the two endpoints. What the model's
own gather at its exit moves is counted apart from the attention's tensors.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

LINK_CLASSES = ("sibling", "plane", "cross_plane", "node")
# What is sent: q, k, v and o, of which calls of guidance that all ranks share are counted apart where it is parallel;
# the model's output within a part; between guidance's parts; what the residual codec decides by; parts of blocks'
# weights. "whole": what q, k, v and o would have been without a codec. Parts of q, k, v and o: "late", that no call
# waited for, and "overflow", the lossless codec's rests.
PURPOSES = ("attention", "unsplit", "gather", "guidance", "notes", "whole", "late", "overflow", "weights")
MAX_SPANS = 2_000  # of one rank; later ones are counted, not kept


class Span(NamedTuple):
    """A piece of work: name, lane (thread), start and end in nanoseconds of the process's clock, kind of layer.
    late_bytes: that this rank sent in it and no call of attention waited for, as of weights none does."""

    name: str
    lane: str
    start_ns: int
    end_ns: int
    layer: str = ""
    late_bytes: int = 0


class Trace:
    """One rank's record. Safe to write from several lanes at once."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.dropped = 0
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._kernels: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def span(self, name: str, lane: str = "main", layer: str = "", late_bytes: int = 0) -> AbstractContextManager[None]:
        return _Running(self, name, lane, layer, late_bytes)

    def keep(self, span: Span) -> None:
        with self._lock:
            if len(self.spans) < MAX_SPANS:
                self.spans.append(span)
            else:
                self.dropped += 1

    def count(self, link_class: str | None, payload_bytes: int, purpose: str = "attention") -> None:
        """Adds bytes that this rank sends; `link_class` None is a rank's message to itself, which is free."""
        if link_class is not None:
            with self._lock:
                self._bytes[purpose, link_class] += payload_bytes

    def note_kernel(self, operation: str, path: str) -> None:
        """Counts an operation that "sycl" or "torch" ran."""
        with self._lock:
            self._kernels[operation, path] += 1

    def kernels(self) -> dict[tuple[str, str], int]:
        """How often each (operation, path) ran on this rank."""
        with self._lock:
            return dict(self._kernels)

    def bytes(self, purpose: str = "attention") -> dict[str, int]:
        """Bytes sent by this rank per link class, for one of PURPOSES."""
        with self._lock:
            return {link: self._bytes[purpose, link] for link in LINK_CLASSES}

    def clear(self) -> None:
        with self._lock:
            self.spans, self.dropped = [], 0
            self._bytes.clear()
            self._kernels.clear()

    def record(self) -> dict[str, Any]:
        """Everything as plain data, to be gathered from other ranks."""
        with self._lock:
            counts = {"dropped": self.dropped, "bytes": dict(self._bytes), "kernels": dict(self._kernels)}
            return {"rank": self.rank, "spans": list(self.spans), **counts}


class CountedAs(Trace):
    """Another trace's record. `purpose`: of the bytes that are counted here without one."""

    def __init__(self, trace: Trace, purpose: str) -> None:
        super().__init__(trace.rank)
        self._trace, self.purpose = trace, purpose

    def keep(self, span: Span) -> None:
        self._trace.keep(span)

    def count(self, link_class: str | None, payload_bytes: int, purpose: str | None = None) -> None:
        self._trace.count(link_class, payload_bytes, purpose or self.purpose)

    def note_kernel(self, operation: str, path: str) -> None:
        self._trace.note_kernel(operation, path)


class _Running:
    """A span under way. Not a generator: a layer has a dozen spans, and these cost half as much."""

    __slots__ = ("_lane", "_late_bytes", "_layer", "_name", "_start_ns", "_trace")

    def __init__(self, trace: Trace, name: str, lane: str, layer: str, late_bytes: int) -> None:
        self._trace, self._name, self._lane, self._layer, self._late_bytes = trace, name, lane, layer, late_bytes

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        end_ns = time.perf_counter_ns()
        self._trace.keep(Span(self._name, self._lane, self._start_ns, end_ns, self._layer, self._late_bytes))


def save_traces(path: str | Path, records: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the records of all ranks, by mode, as one Chrome trace, which Perfetto opens: a process per rank, a thread
    per mode and lane. Times are in microseconds; clocks of different hosts are not aligned."""
    every = [(mode, record) for mode, of_mode in records.items() for record in of_mode]
    start = min((span[2] for _, record in every for span in record["spans"]), default=0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for rank in sorted({record["rank"] for _, record in every})
    ]
    sent, ran = Counter[str](), Counter[str]()
    for mode, record in every:
        for name, lane, begin, end, layer, late_bytes in record["spans"]:
            times = {"ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
            late = {"late_bytes": late_bytes} if late_bytes else {}
            about = {"name": name, "args": {"mode": mode, "lane": lane, "layer": layer, **late}}
            events.append({"ph": "X", "pid": record["rank"], "tid": f"{mode} {lane}", **about, **times})
        sent.update({f"{mode} {purpose} {link}": count for (purpose, link), count in record["bytes"].items()})
        ran.update({f"{mode} {operation} {path}": count for (operation, path), count in record["kernels"].items()})
    other = {"bytes": dict(sent), "kernels": dict(ran), "spans_not_kept": sum(record["dropped"] for _, record in every)}
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}))
