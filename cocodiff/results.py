"""Bytes and profiles of all ranks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cocodiff.comm.transport import Transport
from cocodiff.trace import LINK_CLASSES, PURPOSES, Trace
from cocodiff.wire.coding import StepNotes, merge_notes

OwnResults = tuple[dict[str, dict[str, int]], list[Any]]  # bytes by purpose and link class; every report of steps


class Reporting(Protocol):
    """What notes something of every step: a coding, the step cache."""

    def report(self) -> dict[int, StepNotes]: ...

    def forget_report(self) -> None: ...


@dataclass(frozen=True)
class Results:
    """bytes: by purpose and link class. drift: of every step, see `Engine.drift_profile`."""

    bytes: dict[str, dict[str, int]]
    drift: list[dict[str, Any]]

    @classmethod
    def merged(cls, of_ranks: Sequence[OwnResults]) -> Results:
        sums = {
            purpose: {link: sum(sent[purpose][link] for sent, _ in of_ranks) for link in links}
            for purpose, links in of_ranks[0][0].items()
        }
        return cls(sums, merge_notes([report for _, reports in of_ranks for report in reports]))

    @classmethod
    def gathered(cls, own: OwnResults, transport: Transport) -> Results:
        """Those of all ranks, on every rank; all ranks call it."""
        of_ranks = transport.gather_object(own)
        results: Results = transport.broadcast_object(cls.merged(of_ranks) if of_ranks else None)
        return results

    def sent(self, purpose: str) -> dict[str, int]:
        """Bytes per link class. What all ranks sent for a branch of guidance together is attention's as well."""
        also = self.bytes["unsplit"] if purpose == "attention" else {}
        return {link: self.bytes[purpose][link] + also.get(link, 0) for link in LINK_CLASSES}


def own_results(trace: Trace, reporting: Sequence[Reporting]) -> OwnResults:
    """Those of one rank."""
    return {purpose: trace.bytes(purpose) for purpose in PURPOSES}, [one.report() for one in reporting]
