"""What a run records: spans, bytes by link class, and a Chrome trace that viewers open."""

import json
import threading

import pytest

from cocodiff.comm.trace import LINK_CLASSES, MAX_SPANS, Trace, save_traces


def test_spans_keep_name_lane_and_order_in_time():
    trace = Trace(3)
    with trace.span("outer"), trace.span("inner", "plane"):
        pass
    inner, outer = trace.spans
    assert (inner.name, inner.lane, outer.name, outer.lane) == ("inner", "plane", "outer", "main")
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_a_span_is_kept_when_its_work_fails():
    trace = Trace()
    with pytest.raises(KeyError), trace.span("bad"):
        raise KeyError
    assert [span.name for span in trace.spans] == ["bad"]


def test_spans_beyond_the_limit_are_counted_not_kept():
    trace = Trace()
    for _ in range(MAX_SPANS + 7):
        with trace.span("work"):
            pass
    assert (len(trace.spans), trace.dropped) == (MAX_SPANS, 7)


def test_bytes_are_counted_by_link_class_and_purpose():
    trace = Trace()
    trace.count("plane", 10)
    trace.count("plane", 5)
    trace.count("node", 1, purpose="gather")
    trace.count(None, 99)
    assert trace.bytes() == {"sibling": 0, "plane": 15, "cross_plane": 0, "node": 0}
    assert trace.bytes("gather") == {"sibling": 0, "plane": 0, "cross_plane": 0, "node": 1}
    assert tuple(trace.bytes()) == LINK_CLASSES
    trace.note_kernel("pack", "torch")
    trace.clear()
    assert sum(trace.bytes().values()) == 0 and trace.spans == [] and trace.kernels() == {}


def test_lanes_may_count_at_once():
    trace = Trace()

    def count() -> None:
        for _ in range(2000):
            trace.count("sibling", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.bytes()["sibling"] == 8000


def test_save_writes_a_chrome_trace(tmp_path):
    trace = Trace(2)
    with trace.span("qkv sibling", "sibling"):
        pass
    trace.count("sibling", 12)
    trace.note_kernel("pack", "sycl")
    save_traces(tmp_path / "trace.json", {"run": [trace.record()]})
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written["otherData"] == {
        "bytes": {"run attention sibling": 12},
        "kernels": {"run pack sycl": 1},
        "spans_not_kept": 0,
    }
    named, span = written["traceEvents"]
    assert named == {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "rank 2"}}
    assert (span["ph"], span["pid"], span["tid"], span["name"]) == ("X", 2, "run sibling", "qkv sibling")
    assert span["ts"] == 0 and span["dur"] >= 0


def test_traces_of_several_ranks_and_modes_go_together(tmp_path):
    records = {}
    for mode in ("flat", "tapa"):
        traces = [Trace(rank) for rank in range(2)]
        for trace in traces:
            with trace.span("attention"):
                pass
            trace.count("plane", 3)
            trace.count("plane", 4, purpose="whole")
        records[mode] = [trace.record() for trace in traces]
    save_traces(tmp_path / "all.json", records)
    written = json.loads((tmp_path / "all.json").read_text())
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {(span["pid"], span["tid"]) for span in spans} == {
        (rank, f"{mode} main") for rank in range(2) for mode in records
    }
    assert min(span["ts"] for span in spans) == 0
    sent = {"attention plane": 6, "whole plane": 8}
    assert written["otherData"]["bytes"] == {f"{mode} {name}": of for mode in records for name, of in sent.items()}


def test_an_empty_trace_is_a_valid_file(tmp_path):
    save_traces(tmp_path / "empty.json", {})
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []
