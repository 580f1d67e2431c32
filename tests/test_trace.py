"""What a run records: spans, bytes by link class, and a Chrome trace that viewers open."""

import json
import threading
from functools import partial

import pytest

from cocodiff.comm.trace import LINK_CLASSES, MAX_SPANS, Trace, save_traces


def test_spans_keep_name_lane_and_order_in_time_also_where_their_work_fails():
    trace = Trace(3)
    with pytest.raises(KeyError), trace.span("outer"), trace.span("inner", "plane"):
        raise KeyError
    inner, outer = trace.spans
    assert (inner.name, inner.lane, outer.name, outer.lane) == ("inner", "plane", "outer", "main")
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_spans_beyond_the_limit_are_counted_not_kept():
    trace = Trace()
    for _ in range(MAX_SPANS + 7):
        with trace.span("work"):
            pass
    assert (len(trace.spans), trace.dropped) == (MAX_SPANS, 7)
    trace.clear()
    assert (trace.spans, trace.record()["dropped"]) == ([], 0)


def test_bytes_are_counted_by_link_class_and_purpose():
    """By several lanes at once; a message to oneself counts nothing."""
    trace = Trace()

    def count() -> None:
        for _ in range(2000):
            trace.count("plane", 5)
            trace.count("node", 1, purpose="gather")
            trace.count(None, 99)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.bytes() == {"sibling": 0, "plane": 40_000, "cross_plane": 0, "node": 0}
    assert trace.bytes("gather") == {"sibling": 0, "plane": 0, "cross_plane": 0, "node": 8000}
    assert tuple(trace.bytes()) == LINK_CLASSES
    trace.note_kernel("pack", "torch")
    trace.clear()
    assert sum(trace.bytes().values()) + sum(trace.bytes("gather").values()) == 0
    assert trace.spans == [] and trace.kernels() == {}


def test_traces_of_several_ranks_and_modes_go_together(tmp_path, snapshot):
    """In a Chrome trace: spans by rank and by the mode's lanes from the first one's start, sums of all ranks."""
    modes = ("flat", "tapa")
    traces = {mode: [Trace(rank) for rank in range(2)] for mode in modes}
    for trace in (trace for of_mode in traces.values() for trace in of_mode):
        with trace.span("attention", "plane"):
            trace.count("plane", 3)
        trace.count("plane", 4, purpose="whole")
        trace.note_kernel("pack", "sycl")
        trace.dropped = 2 + trace.rank
    save_traces(tmp_path / "all.json", {mode: [one.record() for one in of_mode] for mode, of_mode in traces.items()})
    written = json.loads((tmp_path / "all.json").read_text())
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    took_us = [(s.end_ns - s.start_ns) / 1e3 for of_mode in traces.values() for one in of_mode for s in one.spans]
    assert min(span.pop("ts") for span in spans) == 0
    assert sorted(span.pop("dur") for span in spans) == pytest.approx(sorted(took_us))
    written["traceEvents"].sort(key=partial(json.dumps, sort_keys=True))
    snapshot(json.dumps(written, indent=1, sort_keys=True))


def test_an_empty_trace_is_a_valid_file(tmp_path):
    save_traces(tmp_path / "empty.json", {})
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []
