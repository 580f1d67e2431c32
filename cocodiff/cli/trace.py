"""`cocodiff trace summary`: where attention's time went, from the trace that a run saved."""

from __future__ import annotations

from collections.abc import Sequence

from cocodiff.comm.launch import Launch
from cocodiff.config import check_choice
from cocodiff.console.terminal import say
from cocodiff.console.trace_tables import LEGEND, say_summary, sent_lines
from cocodiff.errors import UserError
from cocodiff.trace_files import load_traces
from cocodiff.trace_summary import summarise, summarise_late

KINDS = ("summary",)
USAGE = "usage: cocodiff trace summary TRACE.json"


def start(words: Sequence[str], launch: Launch) -> int:
    if not words or words[0] in ("-h", "--help") or words[1:2] in (["-h"], ["--help"]):
        say(f"{USAGE}\n\n{LEGEND}")
        return 0
    check_choice("trace command", words[0], KINDS)
    if len(words) != 2:
        raise UserError(f"trace summary reads one file and {len(words) - 1} were named; {USAGE}")
    path = words[1]
    traces = load_traces(path)
    times = summarise(traces.spans)
    if not times:
        raise UserError(f"{path} has no attention layers to sum up: they are traced in runs on 2 or more ranks")
    if launch.speaks:
        say_summary(times, traces.not_kept, summarise_late(traces.spans))
        say("\n".join(sent_lines(traces.sent)))
    return 0
