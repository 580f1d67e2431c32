"""Bytes and profiles of all ranks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cocodiff.comm.transport import Transport
from cocodiff.trace import LINK_CLASSES, PURPOSES, Trace
from cocodiff.wire.coding import merge_notes

OwnResults = tuple[dict[str, dict[str, int]], list[Any]]  # bytes by purpose and link class; every report of steps


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


class HasResults:
    """An engine's results: of all ranks, of all blocks so far."""

    trace: Trace
    transport: Transport
    _inside: bool
    _results: Results | None = None

    @property
    def _reporting(self) -> Sequence[Any]:
        """What notes something of every step, by `report` and `forget_report`: codings, step caches."""
        raise NotImplementedError

    def bytes(self, purpose: str = "attention") -> dict[str, int]:
        """Attention bytes per link class, summed over all ranks: on every rank, and of all blocks so far. Inside the
        `with` block it asks the others, so every rank calls it; afterwards it tells what was so at the block's end.

        purpose: "attention" for all of these, "unsplit" for the part of them that all ranks sent while computing a
        guidance branch together, though guidance is parallel; "guidance" for what its two parts sent each other, and
        "gather" for the model's output within a part, "notes" for what codecs and the step cache decide by, "whole" for
        what attention's tensors would have been without V-Major or a codec, along the same routes, and "late" and
        "overflow" for parts of "attention": what no call waited for, and the lossless codec's rests."""
        sent = self._current_results().bytes
        # What all ranks sent for a branch of guidance together is attention's as well.
        also = sent["unsplit"] if purpose == "attention" else {}
        return {link: sent[purpose][link] + also.get(link, 0) for link in LINK_CLASSES}

    def drift_profile(self) -> list[dict[str, Any]]:
        """Of every step so far, over all sites, runs and ranks: with V-Major the mean relative change of v against its
        reference and the fraction of image tokens that stayed; with a codec or displacement `CodedStep.merged`; with a
        step cache the fraction of calls that were cached. Empty where everything is computed, travels as it is and is
        waited for. Every rank calls it inside the block, as `bytes`."""
        return list(self._current_results().drift)

    def forget_drift(self) -> None:
        """Starts the drift profile afresh, for the runs that follow. Every rank calls it."""
        for one in self._reporting:
            one.forget_report()
        if self._results is not None:
            self._results = replace(self._results, drift=[])

    def _current_results(self) -> Results:
        if self._inside:
            return self._results_of_all_ranks()
        return self._results or Results.merged([self._own_results()])

    def _own_results(self) -> OwnResults:
        return {purpose: self.trace.bytes(purpose) for purpose in PURPOSES}, [one.report() for one in self._reporting]

    def _results_of_all_ranks(self) -> Results:
        of_ranks = self.transport.gather_object(self._own_results())
        results: Results = self.transport.broadcast_object(Results.merged(of_ranks) if of_ranks else None)
        return results
