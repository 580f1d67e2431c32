"""Which blocks for other nodes take a detour, so that all NICs of a node carry the same. Pure data.

Where tiles share NICs unequally (twelve tiles, eight NICs), the shared ones would set the pace. A block leaves through
a neighbour with a less loaded NIC, or arrives through one; never both, so no block is passed on twice.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from cocodiff.config.machine import Topology

Pair = tuple[int, int]  # the ranks of a block's rows and of its heads


@lru_cache(maxsize=4)  # the same for all ranks, of which one process may have many
def nic_detours(topology: Topology) -> dict[Pair, int]:
    """(rows, heads) -> the rank that passes the block on, for those blocks between nodes that do not go straight.

    All blocks count alike: exact where tokens and heads divide evenly, near enough where not.
    """
    detours: dict[Pair, int] = {}
    for leaving in (True, False):
        for node in range(topology.nodes):
            _balance(topology, node, leaving, detours)
    return detours


def _balance(topology: Topology, node: int, leaving: bool, detours: dict[Pair, int]) -> None:
    """Moves blocks that leave (or reach) a node from its fullest NIC to its emptiest, until they differ by one."""
    here = [place.rank for place in topology.places if place.node == node]
    away = [place.rank for place in topology.places if place.node != node]
    load = Counter({topology.nics[rank]: 0 for rank in here})
    for rank in here:
        load[topology.nics[rank]] += len(away)
    tiles_of = Counter((topology.places[rank].node, topology.nics[rank]) for rank in range(topology.size))
    moved: Counter[int] = Counter()  # blocks that a rank gave away
    helped: Counter[Pair] = Counter()  # blocks between a rank and its helper
    met: Counter[int] = Counter()  # blocks of a rank at the other end that take a detour
    while True:
        most, least = max(load.values()), min(load.values())
        if most - least < 2:
            return
        givers = [rank for rank in here if load[topology.nics[rank]] == most]
        takers = [rank for rank in here if load[topology.nics[rank]] == least]
        _, _, _, rank, helper = min(
            (topology.link_class(r, h) == "cross_plane", moved[r], helped[r, h], r, h) for r in givers for h in takers
        )
        free = [other for other in away if ((rank, other) if leaving else (other, rank)) not in detours]
        if not free:
            return
        # Blocks whose other end has a NIC for itself first: those with a shared one may need a detour at that end.
        shared = {r: tiles_of[topology.places[r].node, topology.nics[r]] for r in free}
        _, _, _, other = min((shared[r], met[r], (r - rank) % len(here), r) for r in free)
        detours[(rank, other) if leaving else (other, rank)] = helper
        moved[rank] += 1
        helped[rank, helper] += 1
        met[other] += 1
        load[topology.nics[rank]] -= 1
        load[topology.nics[helper]] += 1
