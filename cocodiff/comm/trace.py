"""A record of a run: spans on lanes, and payload bytes by class of link.

Bytes are payload, counted once, at the sender, for the class of the link between the two ranks. Bytes of the model's
own gather at its exit are counted separately from those of attention.
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
# Purposes that bytes are counted for:
# attention  q, k, v and the output; "unsplit" for calls that all ranks share while guidance is parallel
# gather     the model's output, within a guidance branch
# guidance   the model's output, between branches
# notes      the values that codecs decide by
# whole      the bytes that q, k, v and the output would have without a codec
# late       the part of q, k, v and the output that no call waited for
# overflow   the part of q, k, v and the output that is rests of the lossless codec
# weights    parts of blocks' weights
PURPOSES = ("attention", "unsplit", "gather", "guidance", "notes", "whole", "late", "overflow", "weights")
MAX_SPANS = 2_000  # most spans kept of one rank; later ones are only counted


class Span(NamedTuple):
    """A timed part of a rank's work, such as packing or sending a message."""

    name: str  # name of the work
    lane: str  # name of the thread
    start_ns: int  # by the process's clock
    end_ns: int  # by the process's clock
    layer: str = ""  # kind of the model's layer that the work is for; "" if for none
    late_bytes: int = 0  # bytes that this rank sent in it and that no attention call waited for, such as weights


class Trace:
    """The record of one rank: spans of its work, bytes that it has sent, and kernels that it has run.

    Several threads may write to it at the same time.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.dropped = 0
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._kernels: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def span(self, name: str, lane: str = "main", layer: str = "", late_bytes: int = 0) -> AbstractContextManager[None]:
        """Return a context manager that records its `with` block as a span of this rank's work, with its times.

        Args:
            name: name of the work, such as "wait for kv".
            lane: name of the thread.
            layer: kind of the model's layer that the work is for; "" if for none.
            late_bytes: bytes that this rank sends in it and that no attention call waits for.
        """
        return _Running(self, name, lane, layer, late_bytes)

    def keep(self, span: Span) -> None:
        """Add a finished span, or only count it if MAX_SPANS are recorded already."""
        with self._lock:
            if len(self.spans) < MAX_SPANS:
                self.spans.append(span)
            else:
                self.dropped += 1

    def count(self, link_class: str | None, payload_bytes: int, purpose: str = "attention") -> None:
        """Count bytes that this rank sends.

        Args:
            link_class: the kind of link, one of LINK_CLASSES; None for a message to itself, which is not counted.
            payload_bytes: number of bytes.
            purpose: what the bytes are for, one of PURPOSES, such as "attention" or "weights".
        """
        if link_class is not None:
            with self._lock:
                self._bytes[purpose, link_class] += payload_bytes

    def note_kernel(self, operation: str, path: str) -> None:
        """Count one run of an operation of `cocodiff.kernels`.

        Args:
            operation: its name.
            path: "sycl" or "torch".
        """
        with self._lock:
            self._kernels[operation, path] += 1

    def kernels(self) -> dict[tuple[str, str], int]:
        """Return the number of runs on this rank by operation and path ("sycl" or "torch")."""
        with self._lock:
            return dict(self._kernels)

    def bytes(self, purpose: str = "attention") -> dict[str, int]:
        """Return the payload bytes that this rank has sent for a purpose, by class of link.

        Args:
            purpose: what the bytes are for, one of PURPOSES, such as "attention" or "weights".
        """
        with self._lock:
            return {link: self._bytes[purpose, link] for link in LINK_CLASSES}

    def clear(self) -> None:
        """Remove all records."""
        with self._lock:
            self.spans, self.dropped = [], 0
            self._bytes.clear()
            self._kernels.clear()

    def record(self) -> dict[str, Any]:
        """Return the whole record as plain data, to gather it from all ranks.

        Its keys are rank, spans, dropped (number of spans not kept), bytes and kernels.
        """
        with self._lock:
            counts = {"dropped": self.dropped, "bytes": dict(self._bytes), "kernels": dict(self._kernels)}
            return {"rank": self.rank, "spans": list(self.spans), **counts}


class CountedAs(Trace):
    """A view of a rank's trace for work of one purpose, such as sending weights.

    It records everything in that trace. Bytes that are counted without a purpose count for this one.
    """

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
    """The context manager of a span that has not ended. A generator would cost twice as much, and a layer has a dozen
    spans."""

    __slots__ = ("_lane", "_late_bytes", "_layer", "_name", "_start_ns", "_trace")

    def __init__(self, trace: Trace, name: str, lane: str, layer: str, late_bytes: int) -> None:
        self._trace, self._name, self._lane, self._layer, self._late_bytes = trace, name, lane, layer, late_bytes

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        end_ns = time.perf_counter_ns()
        self._trace.keep(Span(self._name, self._lane, self._start_ns, end_ns, self._layer, self._late_bytes))


def save_traces(path: str | Path, records: dict[str, list[dict[str, Any]]]) -> None:
    """Write the records of all ranks as one Chrome trace, which Perfetto opens: a process for each rank, a thread for
    each mode and lane.

    Times are in microseconds. Clocks of different hosts are not aligned.

    Args:
        path: the file to write.
        records: for each mode, a name for one of several measured runs, all ranks' results of `Trace.record`.
    """
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
