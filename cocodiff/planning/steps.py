"""A step and an image from recorded layers: times by simulation, bytes by the strategies' own count."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from cocodiff.planning.layers import Case, Kind, Segment, at_fraction, fractions_of, kinds_of, record_layer
from cocodiff.planning.simulate import Latencies, Outcome, simulate
from cocodiff.topology.links import Network
from cocodiff.trace import LINK_CLASSES


@dataclass(frozen=True)
class StepPlan:
    """Seconds of a mean step. compute_s: of the rank that computes longest; bytes: of all ranks, by link class."""

    step_s: float
    compute_s: float
    bytes: dict[str, float]
    steps: int

    @property
    def image_s(self) -> float:
        """Denoising alone: no text encoder, no VAE."""
        return self.step_s * self.steps

    @property
    def communication_share(self) -> float:
        return 1 - self.compute_s / self.step_s if self.step_s else 0.0


class Recording:
    """All kinds of layers of a case, recorded once; simulated on any rates and latencies."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def kinds(self) -> list[tuple[Kind, list[Segment]]]:
        return [(kind, record_layer(self.case, kind)) for kind in kinds_of(self.case.shape, self.case.load)]

    def agreement_s(self, network: Network, latencies: Latencies) -> float:
        """Seconds of what ranks agree on in a mean call of the model, as if nothing were computed meanwhile."""
        _, segments = self.kinds[0]
        times = [(s.fraction, simulate(s.agreement, s.messages, network, latencies).seconds) for s in segments]
        return statistics.mean(at_fraction(times, part) for part in fractions_of(self.case))

    def outcome(self, segment: Segment, network: Network, latencies: Latencies) -> Outcome:
        return simulate(segment.programs, segment.messages, network, latencies)

    def plan(self, network: Network, latencies: Latencies) -> StepPlan:
        """Layers follow one another with all ranks together at the start of each."""
        case, every = self.case, fractions_of(self.case)
        step_s, compute_s = case.load.branches * self.agreement_s(network, latencies), 0.0
        sent = dict.fromkeys(LINK_CLASSES, 0.0)
        for kind, segments in self.kinds:
            times = [(s.fraction, self.outcome(s, network, latencies).seconds) for s in segments]
            calls = kind.layers * case.load.branches
            step_s += calls * statistics.mean(at_fraction(times, part) for part in every)
            busy = [(s.fraction, max(one.compute_s(latencies.launch_s) for one in s.programs)) for s in segments]
            compute_s += calls * statistics.mean(at_fraction(busy, part) for part in every)
            for link in LINK_CLASSES:
                counts = [(s.fraction, float(s.bytes[link])) for s in segments]
                sent[link] += calls * statistics.mean(at_fraction(counts, part) for part in every)
        return StepPlan(step_s, compute_s, sent, case.steps)
