"""Are the planes wired as the machine file says?"""

from __future__ import annotations

from cocodiff.cli.doctor.facts import MEASURED, Facts, Findings
from cocodiff.cli.doctor.planes import same_planes, spelled
from cocodiff.topology.machine import Topology


def planes_of_node(topology: Topology, node: int) -> tuple[int, ...]:
    """The machine file's planes of a node's ranks, in rank order."""
    return tuple(place.plane for place in topology.places if place.node == node)


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
        wanted = planes_of_node(facts.topology, facts.topology.places[plane_map.first].node)
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
