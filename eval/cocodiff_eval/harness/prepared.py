"""A job's request, checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cocodiff.config.config import Config, load_machine
from cocodiff.config.machine import Topology
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import preset_configs
from cocodiff.jobs.partition import partition_of, sequence_of, with_guidance, with_weights
from cocodiff.jobs.pipelines import Request, check_model
from cocodiff.planner.partitions import Partition
from cocodiff_eval.harness.quality import Quality


@dataclass(frozen=True)
class Prepared:
    """A checked request: everything that can be known before ranks start."""

    values: dict[str, Any]
    request: Request
    presets: dict[str, Config]
    output: OutputFolder
    started: float  # time.monotonic() when the command began
    partition: Partition = field(default=Partition())
    quality: Quality | None = None

    @classmethod
    def checked(
        cls,
        values: dict[str, Any],
        quality: Quality | None,
        request: Request,
        ranks: int,
        started: float,
        presets: dict[str, Config] | None = None,
    ) -> Prepared:
        """Checks a request against machine, model and output. presets: unless the options name them. Raises UserError;
        writes nothing."""
        presets = presets or (preset_configs(values) if quality is None else quality.presets)
        Topology.build(load_machine(values["machine"]), ranks)
        check_model(request, 1, weights=not values["dry_run"])
        output = OutputFolder(values["out"], values["overwrite"], values["resume"])
        return cls(values, request, presets, output, started, quality=quality)

    def partitioned(self, ranks: int, **work: Any) -> Prepared:
        """With its ranks divided, and the partition's guidance in the presets. work: as of `partition_of`. Raises
        UserError."""
        request, quality = self.request, self.quality
        settings = [*(self.presets if quality is None else quality.rungs).values()]
        partition = partition_of(self.values, request, settings, ranks, compares=quality is None, **work)
        check_model(request, ranks // (partition.replicas * partition.guidance), weights=not self.values["dry_run"])
        if quality is not None:
            quality = quality.for_links(*sequence_of(self.values, request, partition, ranks))
            rungs = with_guidance(quality.rungs, partition, request)
            quality = replace(quality, rungs=with_weights(rungs, self.values, request, partition, ranks, **work))
            if ranks == partition.replicas and not quality.caches:
                quality = quality.exact_alone()
        presets = with_guidance(self.presets, partition, request)
        if quality is None:
            presets = with_weights(presets, self.values, request, partition, ranks, **work)
        return replace(self, presets=presets, partition=partition, quality=quality)
