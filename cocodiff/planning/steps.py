"""A step and an image from recorded layers: times by simulation, bytes by the strategies' own count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cocodiff.planning.layers import Case, Kind, Segment, kinds_of, kinds_of_steps, over_steps, record_layers
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
        return [(kind, record_layers(self.case, kind)) for kind in kinds_of(self.case.shape, self.case.load)]

    def agreement_s(self, network: Network, latencies: Latencies) -> float:
        """Seconds of what ranks agree on in a mean call of the model, as if nothing were computed meanwhile."""
        _, segments = self.kinds[0]
        times = {s.kind: simulate(s.agreement, s.messages, network, latencies).seconds for s in segments}
        return over_steps(times, kinds_of_steps(self.case))

    def outcome(self, segment: Segment, network: Network, latencies: Latencies) -> Outcome:
        return simulate(segment.programs, segment.messages, network, latencies)

    def plan(self, network: Network, latencies: Latencies) -> StepPlan:
        """Layers follow one another with all ranks together at the start of each."""
        case, every = self.case, kinds_of_steps(self.case)
        step_s, compute_s = case.load.branches * self.agreement_s(network, latencies), 0.0
        sent = dict.fromkeys(LINK_CLASSES, 0.0)
        for kind, segments in self.kinds:
            calls = kind.layers * case.load.branches
            times = {s.kind: s.seconds(self.outcome(s, network, latencies)) for s in segments}
            step_s += calls * over_steps(times, every)
            compute_s += calls * over_steps({s.kind: s.compute_s(latencies.launch_s) for s in segments}, every)
            for link in LINK_CLASSES:
                sent[link] += calls * over_steps({s.kind: s.bytes[link] for s in segments}, every)
        return StepPlan(step_s, compute_s, sent, case.steps)
