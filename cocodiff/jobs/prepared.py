"""A job's request, checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cocodiff.config import Config
from cocodiff.jobs.deal import sequence_of, with_guidance
from cocodiff.jobs.quality import Quality
from cocodiff.loading.pipelines import Request
from cocodiff.outputs.folder import OutputFolder
from cocodiff.planning.deals import Deal


@dataclass(frozen=True)
class Prepared:
    """A checked request: everything that can be known before ranks start."""

    values: dict[str, Any]
    request: Request
    presets: dict[str, Config]
    output: OutputFolder
    started: float  # time.monotonic() when the command began
    deal: Deal = field(default=Deal())
    quality: Quality | None = None

    @property
    def modes(self) -> dict[str, Config]:
        """What results are made with: the presets, or settings that are chosen among for a bound on quality."""
        return self.presets if self.quality is None else self.quality.rungs

    def dealt(self, deal: Deal, ranks: int) -> Prepared:
        """With a deal of its ranks, whose guidance goes into the presets."""
        presets, quality = with_guidance(self.presets, deal, self.request), self.quality
        if quality is not None:
            quality = quality.for_links(*sequence_of(self.values, self.request, deal, ranks))
            quality = replace(quality, rungs=with_guidance(quality.rungs, deal, self.request))
            if ranks == deal.replicas:
                quality = quality.exact_alone()
        return replace(self, presets=presets, deal=deal, quality=quality)
