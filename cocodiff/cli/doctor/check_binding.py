"""Does every rank have a tile, cores and NICs of its own, near each other?"""

from __future__ import annotations

from collections.abc import Sequence

from cocodiff.cli.doctor.facts import Facts, Findings, RankFacts, name_ranks
from cocodiff.comm.host import THROUGH_HOST

BIND = "bind ranks to cores: mpiexec --cpu-bind list:..., as launch/aurora.pbs does"
HIERARCHY = ("ZE_FLAT_DEVICE_HIERARCHY", "ZE_AFFINITY_MASK")  # decide what counts as a device


def check_tiles(facts: Facts) -> Findings:
    """Two ranks on one tile; ranks on different kinds of device; tiles that nobody uses."""
    found, first = Findings("tiles"), facts.ranks[0]
    kinds = {rank.device.split(":")[0] for rank in facts.ranks}
    if len(kinds) > 1:
        found.fault(f"ranks compute on different devices: {', '.join(sorted(kinds))}", "choose one with --device")
        return found
    if kinds == {"cpu"}:
        found.note("ranks compute on the CPU: no tiles")
        return found
    for host, ranks in facts.hosts().items():
        of_tile: dict[str, list[int]] = {}
        for rank in ranks:
            of_tile.setdefault(rank.tile, []).append(rank.rank)
        for tile, sharing in of_tile.items():
            if len(sharing) > 1 and first.library.startswith(THROUGH_HOST):
                found.note(f"{name_ranks(sharing)} share tile {tile} of {host}")
            elif len(sharing) > 1:
                found.fault(
                    f"{name_ranks(sharing)} share tile {tile} of {host}",
                    "start one rank for each tile; local ranks choose tiles, so use no gpu_tile_compact.sh with "
                    "ZE_FLAT_DEVICE_HIERARCHY=FLAT and unset ZE_AFFINITY_MASK",
                )
    machine = facts.topology.machine
    if kinds == {"xpu"} and first.tiles_seen < (machine.tiles_per_node or 0):
        told = (f"{name} {first.environment.get(name, 'not set')}" for name in HIERARCHY)
        found.fault(
            f"a rank sees {first.tiles_seen} devices where machine {machine.name} has {machine.tiles_per_node} tiles "
            f"({', '.join(told)})",
            "export ZE_FLAT_DEVICE_HIERARCHY=FLAT and unset ZE_AFFINITY_MASK",
        )
    idle = max(rank.tiles_seen - len(facts.hosts()[rank.host]) for rank in facts.ranks)
    if idle > 0 and not found:
        found.note(f"{idle} tile(s) of a host have no rank")
    if not found:
        found.good(f"{len(facts.ranks)} ranks, each on a tile of its own")
    return found


def check_cores(facts: Facts) -> Findings:
    """Ranks far from their cards; ranks on the same cores."""
    found = Findings("cores")
    for rank in facts.ranks:
        if rank.card and _apart(rank.sockets, rank.card.sockets):
            found.fault(
                f"rank {rank.rank} runs on socket {_join(rank.sockets)} of {rank.host}, its card "
                f"{rank.card.address} is on socket {_join(rank.card.sockets)}",
                BIND,
            )
    if spread := [rank.rank for rank in facts.ranks if rank.card and len(rank.sockets) > 1]:
        found.warning(f"{name_ranks(spread)} may wander between sockets, away from the card", BIND)
    for host, ranks in facts.hosts().items():
        bound = [rank for rank in ranks if rank.cores and len(rank.cores) < rank.host_cores]
        if shared := _sharing(bound):
            text = f"{name_ranks(shared)} share cores on {host}"
            if all(rank.on_cpu for rank in bound):
                found.note(text)
            else:
                found.warning(text, BIND)
        affinity = ranks[0].environment.get("CCL_WORKER_AFFINITY", "")
        workers = {int(core) for core in affinity.split(",") if core.strip().isdigit()}
        if hit := [rank.rank for rank in ranks if not rank.on_cpu and workers & set(rank.cores)]:
            text = f"CCL_WORKER_AFFINITY={affinity} puts oneCCL's workers on cores of {name_ranks(hit)} on {host}"
            found.warning(text, "name cores that no rank has, or unset CCL_WORKER_AFFINITY")
    if not found:
        cores = sorted({len(rank.cores) for rank in facts.ranks})
        found.good(f"{_join(cores)} core(s) for each rank, near its card where that is known")
    return found


def _apart(a: Sequence[int], b: Sequence[int]) -> bool:
    return bool(a and b) and not set(a) & set(b)


def _sharing(ranks: Sequence[RankFacts]) -> list[int]:
    owners: dict[int, list[int]] = {}
    for rank in ranks:
        for core in rank.cores:
            owners.setdefault(core, []).append(rank.rank)
    return sorted({rank for sharing in owners.values() if len(sharing) > 1 for rank in sharing})


def check_nics(facts: Facts) -> Findings:
    """NICs that a rank was given but that are not there or on the other socket; fewer NICs than the machine has."""
    found, first, wanted = Findings("nics"), facts.ranks[0], facts.topology.machine.links.nics
    for rank in facts.ranks:
        known = {nic.name: nic for nic in rank.nics}
        given = [n.strip() for n in rank.environment.get("FI_CXI_DEVICE_NAME", "").split(",") if n.strip()]
        if missing := [name for name in given if name not in known]:
            found.fault(
                f"FI_CXI_DEVICE_NAME of rank {rank.rank} names {', '.join(missing)}; {rank.host} has "
                f"{', '.join(known) or 'no fast NIC'}",
                "unset FI_CXI_DEVICE_NAME, or name NICs of the node",
            )
        elif given and all(_apart(rank.sockets, known[name].sockets) for name in given):
            found.fault(
                f"rank {rank.rank} runs on socket {_join(rank.sockets)}, its NIC {', '.join(given)} is "
                f"on socket {_join(known[given[0]].sockets)}",
                "unset FI_CXI_DEVICE_NAME: MPI picks a NIC of the rank's socket",
            )
    if found:
        return found
    fewer = [host for host, ranks in facts.hosts().items() if len(ranks[0].nics) < wanted]
    if not first.nics and (facts.topology.nodes == 1 or first.on_cpu):
        found.note("no Slingshot or InfiniBand NIC to be seen")
    elif not first.nics:
        remedy = "check FI_PROVIDER and the node: messages between nodes take the slow network"
        found.warning("no Slingshot or InfiniBand NIC to be seen on a run of several nodes", remedy)
    elif fewer and not first.on_cpu:
        text = f"{len(first.nics)} NICs on {', '.join(fewer)}, machine {facts.topology.machine.name} has {wanted}"
        found.warning(text, "leave these hosts out, or correct links.nics in the machine file")
    else:
        found.good(f"{len(first.nics)} NICs on each host: {', '.join(nic.name for nic in first.nics)}")
    return found


def _join(values: Sequence[int]) -> str:
    return "/".join(map(str, values))
