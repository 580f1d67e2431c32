"""Plane maps: from a colouring, from fabric links, from measured rates; whether two of them are the same, and whether
the planes are wired as the machine file says.

A map lists the plane of every tile of a node in rank order. Its numbers carry no meaning but equality.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from cocodiff.cli.doctor.facts import MEASURED, Facts, Findings, PlaneMap, RankFacts, name_nodes
from cocodiff.cli.doctor.sysman import Sysman, fabric_links
from cocodiff.cli.doctor.trials import pair_rates
from cocodiff.topology.machine import Topology

FAST_PLANE = 1.25  # a plane's links are that many times as fast as the way into another plane

Link = tuple[int, int]  # two tiles of a node


def same_planes(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two maps put the same tiles together."""
    return canonical(a) == canonical(b)


def canonical(planes: Sequence[int]) -> tuple[int, ...]:
    """The map with its planes numbered in order of appearance."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(plane, len(numbers)) for plane in planes)


def spelled(planes: Sequence[int]) -> str:
    """As in CCL_TOPO_COLOR: {0,3},{1,2}."""
    groups: dict[int, list[int]] = {}
    for tile, plane in enumerate(planes):
        groups.setdefault(plane, []).append(tile)
    return ",".join("{" + ",".join(map(str, tiles)) + "}" for tiles in groups.values())


def from_color(color: str) -> tuple[int, ...]:
    """The planes of a colouring like card:{0,1},{2,3};plane:{0,3},{1,2}. Raises ValueError for anything else."""
    found = re.search(r"plane\s*:\s*((?:\{[\d,\s]+\}\s*,?\s*)+)", color)
    groups = re.findall(r"\{([\d,\s]+)\}", found[1]) if found else []
    plane_of = {int(tile): plane for plane, group in enumerate(groups) for tile in group.split(",") if tile.strip()}
    if not plane_of or sorted(plane_of) != list(range(len(plane_of))):
        raise ValueError(f"{color!r} names no plane for each of the tiles from 0")
    return tuple(plane_of[tile] for tile in range(len(plane_of)))


def from_links(tiles: int, links: Iterable[Link]) -> tuple[int, ...]:
    """Tiles that links join, directly or by others, are one plane."""
    plane = list(range(tiles))
    for a, b in links:
        lower, upper = sorted((plane[a], plane[b]))
        plane = [lower if one == upper else one for one in plane]
    return canonical(plane)


def from_rates(gb_s: Sequence[Sequence[float]], cards: Sequence[int]) -> tuple[tuple[int, ...] | None, str]:
    """Planes from the measured rates between all pairs of tiles, or None and why they cannot be seen.

    cards: the card of every tile; pairs of one card are left out. Pairs of two cards fall into a fast and a slow class
    at the widest step between their sorted rates; the fast ones must join every tile of a plane with every other.
    """
    rates = {(a, b): min(gb_s[a][b], gb_s[b][a]) for a, b in combinations(range(len(cards)), 2) if cards[a] != cards[b]}
    ordered = sorted(rates.values())
    if len(ordered) < 2:
        return None, "fewer than two pairs of tiles of different cards"
    steps = [after / before for before, after in pairwise(ordered)]
    at = max(range(len(steps)), key=steps.__getitem__)
    slow, fast = statistics.median(ordered[: at + 1]), statistics.median(ordered[at + 1 :])
    if fast / slow < FAST_PLANE:
        return None, f"links between cards are alike ({ordered[0]:.3g} to {ordered[-1]:.3g} GB/s)"
    joined = [pair for pair, rate in rates.items() if rate > ordered[at]]
    planes = from_links(len(cards), joined)
    whole = [pair for pair in rates if planes[pair[0]] == planes[pair[1]]]
    if len(whole) != len(joined):
        return None, f"measured rates ({slow:.3g} and {fast:.3g} GB/s) do not fall into planes"
    return planes, ""


def find_planes(
    topology: Topology, transport: Any, own: RankFacts, sysman: Sysman | str
) -> tuple[dict[str, PlaneMap], list[list[float]]]:
    """Every host's plane map: by its fabric ports, else by CCL_TOPO_COLOR, else by measured rates. All ranks call it;
    rank 0's answer is whole."""
    told = told_planes(topology, own, sysman)
    of_ranks = transport.gather_object((own.host, told)) or [(own.host, told)]
    names = name_nodes([host for host, _ in of_ranks], [place.node for place in topology.places])
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names[: len(of_ranks)]):
        nodes.setdefault(name, []).append(rank)
    silent = [name for name, members in nodes.items() if of_ranks[members[0]][1] is None]
    groups = transport.broadcast_object([nodes[name] for name in nodes] if silent else None)
    rates = [] if groups is None else pair_rates(transport, groups)
    if transport.rank:
        return {}, []
    maps = {}
    for name, members in nodes.items():
        found = of_ranks[members[0]][1] or measured_planes(topology, members, rates)
        maps[name] = replace(found, first=members[0])
    return maps, rates


def told_planes(topology: Topology, own: RankFacts, sysman: Sysman | str) -> PlaneMap | None:
    """The planes that the system tells of, None where it is silent."""
    tiles = topology.machine.tiles
    if not isinstance(sysman, str) and sysman.ports:
        links, broken = fabric_links(sysman.ports, tiles)
        return PlaneMap(
            "Level Zero's fabric ports", from_links(len(sysman.addresses) * tiles, links), "", tuple(broken)
        )
    color = own.environment.get("CCL_TOPO_COLOR", "")
    if "plane" in color:
        try:
            return PlaneMap("CCL_TOPO_COLOR", from_color(color))
        except ValueError as error:
            return PlaneMap("CCL_TOPO_COLOR", None, str(error))
    return None


def measured_planes(topology: Topology, members: list[int], rates: list[list[float]]) -> PlaneMap:
    within = [[rates[a][b] for b in members] for a in members]
    planes, why = from_rates(within, [topology.places[rank].card for rank in members])
    return PlaneMap(MEASURED, planes, why)


def check_planes(facts: Facts) -> Findings:
    """The map found on each host against the machine file's. Where ranks are fewer than tiles, theirs count."""
    found, machine, agreed = Findings("planes"), facts.topology.machine, dict[str, int]()
    for host, plane_map in facts.planes.items():
        how = plane_map.how
        for word in plane_map.broken:
            found.fault(f"{host}: {word}", "report the node to its operators and run on another one")
        if plane_map.planes is None:
            text = f"{host}: the planes cannot be seen: {plane_map.why}"
            remedy = "load Level Zero's sysman (libze_loader, ZES_ENABLE_SYSMAN=1) or export CCL_TOPO_COLOR"
            if facts.ranks[plane_map.first].on_cpu:
                found.note(text)
            else:
                found.warning(text, remedy)
            continue
        places = facts.topology.places
        wanted = [place.plane for place in places if place.node == places[plane_map.first].node]
        seen = plane_map.planes[: len(wanted)]
        if len(seen) < len(wanted):
            text = f"{host}: {how} tells of {len(seen)} tiles, {len(wanted)} ranks are there"
            found.fault(text, f"start {len(seen)} ranks a node, or mend {how}")
        elif same_planes(seen, wanted):
            agreed[how] = agreed.get(how, 0) + 1
        elif how == MEASURED and facts.ranks[0].shares_memory:
            found.note(f"{host}: no planes: all messages pass through one memory")
        else:
            found.fault(
                f"{host}: {how} finds planes {spelled(seen)}, machine {machine.name} has {spelled(wanted)}",
                f"copy the machine file, write planes: {list(seen)} and name it with --machine",
            )
    for how, hosts in agreed.items():
        found.good(f"machine {machine.name}'s planes are those of {how} on {hosts} host(s)")
    if not found:
        found.note("one tile: no planes")
    return found
