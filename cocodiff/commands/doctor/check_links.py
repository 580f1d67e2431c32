"""Are the planes wired as the machine file says?"""

from __future__ import annotations

from cocodiff.commands.doctor.facts import FAULT, GOOD, MEASURED, NOTE, WARNING, Facts, Finding, PlaneMap
from cocodiff.commands.doctor.planes import same_planes, spelled
from cocodiff.topology.machine import Topology


def planes_of_node(topology: Topology, node: int) -> tuple[int, ...]:
    """The machine file's planes of a node's ranks, in rank order."""
    return tuple(place.plane for place in topology.places if place.node == node)


def check_planes(facts: Facts) -> list[Finding]:
    """The map found on each host against the machine file's. Where ranks are fewer than tiles, theirs count."""
    check, found, machine = "planes", [], facts.topology.machine
    agreed: dict[str, list[str]] = {}
    for host, plane_map in facts.planes.items():
        found += [
            Finding(check, FAULT, f"{host}: {word}", "report the node to its operators and run on another one")
            for word in plane_map.broken
        ]
        if plane_map.planes is None:
            found.append(_unseen(facts, host, plane_map))
            continue
        wanted = planes_of_node(facts.topology, facts.topology.places[plane_map.first].node)
        seen = plane_map.planes[: len(wanted)]
        if len(seen) < len(wanted):
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"{host}: {plane_map.how} tells of {len(seen)} tiles, {len(wanted)} ranks are there",
                    f"start {len(seen)} ranks a node, or mend {plane_map.how}",
                )
            )
        elif not same_planes(seen, wanted) and plane_map.how == MEASURED and facts.ranks[0].shares_memory:
            found.append(Finding(check, NOTE, f"{host}: no planes: all messages pass through one memory"))
        elif not same_planes(seen, wanted):
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"{host}: {plane_map.how} finds planes {spelled(seen)}, machine {machine.name} has "
                    f"{spelled(wanted)}",
                    f"copy the machine file, write planes: {list(seen)} and name it with --machine",
                )
            )
        else:
            agreed.setdefault(plane_map.how, []).append(host)
    for how, hosts in agreed.items():
        found.append(
            Finding(check, GOOD, f"machine {machine.name}'s planes are those of {how} on {len(hosts)} host(s)")
        )
    return found or [Finding(check, NOTE, "one tile: no planes")]


def _unseen(facts: Facts, host: str, plane_map: PlaneMap) -> Finding:
    on_cpu = facts.ranks[plane_map.first].on_cpu
    return Finding(
        "planes",
        NOTE if on_cpu else WARNING,
        f"{host}: the planes cannot be seen: {plane_map.why}",
        "" if on_cpu else "load Level Zero's sysman (libze_loader, ZES_ENABLE_SYSMAN=1) or export CCL_TOPO_COLOR",
    )
