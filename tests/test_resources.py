"""Threads and communicators of a rank are those of the table in docs/design.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from seams import lanes_of
from worlds import topology_of

from cocodiff.comm import loopback
from cocodiff.comm.loopback import LoopbackGroup, LoopbackTransport, run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Group, RankContext
from cocodiff.config.config import Config
from cocodiff.engine.assemble import AttentionWork, build_strategy, mesh_of
from cocodiff.engine.guidance.parts import GuidanceParts
from cocodiff.engine.sequence import SequenceRanks
from cocodiff.kernels import Kernels

PAGE = Path(__file__).resolve().parent.parent / "docs" / "design.md"
ROWS = [line.split("|")[1:5] for line in PAGE.read_text().splitlines() if line.startswith("| `exchange: ")]


@pytest.mark.parametrize(("settings", "lanes", "groups", "over_oneccl"), ROWS, ids=[row[0].strip(" `") for row in ROWS])
def test_a_rank_has_as_many_as_the_table_says(
    settings: str, lanes: str, groups: str, over_oneccl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(steps=4, **yaml.safe_load("{" + settings.strip(" `") + "}"))
    topology, made, communicators = topology_of("local", 8, 4), Counter[int](), Counter[int]()
    mesh = mesh_of(config, topology, AttentionWork(8))

    class OnNodes(LoopbackTransport):
        node_of = tuple(place.node for place in topology.places)

        def group(self, ranks: Sequence[int], together: bool | None = None) -> Group:
            made[self.rank] += 1
            return super().group(ranks)

        def new_group(self, ranks: tuple[int, ...]) -> LoopbackGroup:
            communicators[self.rank] += len(ranks) > 1
            return super().new_group(ranks)

    monkeypatch.setattr(loopback, "LoopbackTransport", OnNodes)

    def work(transport: LoopbackTransport) -> set[str]:
        context = RankContext(transport, topology, Trace(), Kernels("torch"))
        if config.guidance_parallel == 2:
            GuidanceParts(context, lambda part: SequenceRanks(config, part, AttentionWork(4))).sequence.connect()
        else:
            build_strategy(config, mesh, context)
        assert transport.world.ranks == tuple(range(8))
        return lanes_of(transport)

    for rank, found in enumerate(run_ranks(8, work)):
        assert found == {name.strip() for name in lanes.split(",")}
        assert made[rank] == len(groups.split(",")) and communicators[rank] == int(over_oneccl)
