"""`cocodiff trace summary`: where attention's time went, from the trace that a run saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cocodiff.comm.launch import Launch
from cocodiff.commands.terminal import say
from cocodiff.config import check_choice
from cocodiff.errors import UserError
from cocodiff.text_table import aligned
from cocodiff.trace import LINK_CLASSES, MAX_SPANS
from cocodiff.trace_files import load_traces
from cocodiff.trace_summary import AttentionTimes, LateMessages, summarise, summarise_late

KINDS = ("summary",)
USAGE = "usage: cocodiff trace summary TRACE.json"
HEADINGS = ("mode", "layer", "calls", "T(V)", "T(Q,K)", "T(Vp1)", "hidden", "%", "comm.", "exposed", "hidden", "%")
LEGEND = """\
Milliseconds of a mean attention call on a mean rank; calls are those of all ranks. T(V), T(Q,K): projecting.
T(Vp1): V's first phase (flat has one); none where Q, K and V travel together. comm.: all communication of the call.
Exposed is its part in which the rank waits, hidden the rest."""
LATE_HEADINGS = ("mode", "layer", "late MB", "hidden MB", "%", "late ms", "hidden ms", "%")
LATE_LEGEND = """\
Late: what displaced calls sent, of all calls and ranks: nothing waits for it before the next call of the same layer.
Hidden is the part that travelled while the rank waited for nothing at all."""


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


def say_summary(times: Sequence[AttentionTimes], not_kept: int, late: Sequence[LateMessages] = ()) -> None:
    """Prints the table, and that of late messages where there were any. not_kept: spans that the traces have lost."""
    say(summary_table(times))
    if late:
        say("\n" + late_table(late))
    if not_kept:
        say(
            f"This is the beginning of the run: {not_kept} later spans were not kept "
            f"({MAX_SPANS} are, of each rank and mode)."
        )


def sent_lines(sent: Mapping[str, Mapping[str, Mapping[str, int]]]) -> list[str]:
    """What every mode sent of q, k, v and the output, by link class, and which part that is of the whole tensors."""
    lines = []
    for mode, by_purpose in sent.items():
        purposes = ("attention", "unsplit", "whole", "late")
        attention, unsplit, whole, late = (by_purpose.get(name, {}) for name in purposes)
        counts = {link: attention.get(link, 0) + unsplit.get(link, 0) for link in LINK_CLASSES}
        told = ", ".join(f"{link} {count / 1e6:.2f}" for link, count in counts.items())
        total = sum(whole.values())
        part = f"; {sum(counts.values()) / total:.3f} of what whole tensors take" if total else ""
        waited = sum(counts.values()) - sum(late.values())
        exposed = f", {waited / total:.3f} that attention waited for" if total and any(late.values()) else ""
        lines.append(f"{mode}, MB sent: {told}{part}{exposed}")
    return lines


def late_table(late: Sequence[LateMessages]) -> str:
    """The account of late messages as aligned plain text, with what the columns mean below."""
    rows = [
        (
            one.mode,
            one.layer,
            f"{one.sent / 1e6:.2f}",
            f"{one.hidden_bytes / 1e6:.2f}",
            _percent(one.hidden_bytes, one.sent),
            _ms(one.seconds),
            _ms(one.hidden_s),
            _percent(one.hidden_s, one.seconds),
        )
        for one in late
    ]
    return "\n".join([*aligned([LATE_HEADINGS, *rows], "<<" + ">" * 6), "", LATE_LEGEND])


def summary_table(times: Sequence[AttentionTimes]) -> str:
    """The summary as aligned plain text, in milliseconds, with what the columns mean below."""
    return "\n".join([*aligned([HEADINGS, *(_cells(one) for one in times)], "<<" + ">" * 10), "", LEGEND])


def _cells(one: AttentionTimes) -> tuple[str, ...]:
    return (
        one.mode,
        one.layer,
        str(one.calls),
        _ms(one.project_v_s),
        _ms(one.project_qk_s),
        _ms(one.v_phase1_s),
        _ms(one.v_phase1_hidden_s),
        _percent(one.v_phase1_hidden_s, one.v_phase1_s),
        _ms(one.communication_s),
        _ms(one.exposed_s),
        _ms(one.hidden_s),
        _percent(one.hidden_s, one.communication_s),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f}" if part is not None and whole else "-"
