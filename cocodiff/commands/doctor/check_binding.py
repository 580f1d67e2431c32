"""Does every rank have a tile, cores and NICs of its own, near each other?"""

from __future__ import annotations

from collections.abc import Sequence

from cocodiff.commands.doctor.facts import FAULT, GOOD, NOTE, WARNING, Facts, Finding, RankFacts, name_ranks

BIND = "bind ranks to cores: mpiexec --cpu-bind list:..., as launch/aurora.pbs does"


def check_tiles(facts: Facts) -> list[Finding]:
    """Two ranks on one tile; ranks on different kinds of device; tiles that nobody uses."""
    check, found = "tiles", []
    kinds = {rank.device.split(":")[0] for rank in facts.ranks}
    if len(kinds) > 1:
        return [
            Finding(
                check,
                FAULT,
                f"ranks compute on different devices: {', '.join(sorted(kinds))}",
                "choose one with --device",
            )
        ]
    if kinds == {"cpu"}:
        return [Finding(check, NOTE, "ranks compute on the CPU: no tiles")]
    for host, ranks in facts.hosts().items():
        of_tile: dict[str, list[int]] = {}
        for rank in ranks:
            of_tile.setdefault(rank.tile, []).append(rank.rank)
        for tile, sharing in of_tile.items():
            if len(sharing) > 1:
                found.append(
                    Finding(
                        check,
                        FAULT,
                        f"{name_ranks(sharing)} share tile {tile} of {host}",
                        "start one rank for each tile; local ranks choose tiles, so use no gpu_tile_compact.sh with "
                        "ZE_FLAT_DEVICE_HIERARCHY=FLAT and unset ZE_AFFINITY_MASK",
                    )
                )
    found += _hierarchy(facts)
    idle = max(rank.tiles_seen - len(facts.hosts()[rank.host]) for rank in facts.ranks)
    if idle > 0 and not found:
        found.append(Finding(check, NOTE, f"{idle} tile(s) of a host have no rank"))
    return found or [Finding(check, GOOD, f"{len(facts.ranks)} ranks, each on a tile of its own")]


def _hierarchy(facts: Facts) -> list[Finding]:
    rank = facts.ranks[0]
    tiles, seen = facts.topology.machine.tiles_per_node, rank.tiles_seen
    if not rank.device.startswith("xpu") or tiles is None or seen >= tiles:
        return []
    hierarchy = rank.environment.get("ZE_FLAT_DEVICE_HIERARCHY", "not set")
    mask = rank.environment.get("ZE_AFFINITY_MASK", "not set")
    return [
        Finding(
            "tiles",
            FAULT,
            f"a rank sees {seen} devices where machine {facts.topology.machine.name} has {tiles} tiles "
            f"(ZE_FLAT_DEVICE_HIERARCHY {hierarchy}, ZE_AFFINITY_MASK {mask})",
            "export ZE_FLAT_DEVICE_HIERARCHY=FLAT and unset ZE_AFFINITY_MASK",
        )
    ]


def check_cores(facts: Facts) -> list[Finding]:
    """Ranks far from their cards; ranks on the same cores."""
    check = "cores"
    far = [rank for rank in facts.ranks if rank.card and _apart(rank.sockets, rank.card.sockets)]
    found = [
        Finding(
            check,
            FAULT,
            f"rank {rank.rank} runs on socket {_join(rank.sockets)} of {rank.host}, its card "
            f"{rank.card.address} is on socket {_join(rank.card.sockets)}",
            BIND,
        )
        for rank in far
        if rank.card
    ]
    spread = [rank.rank for rank in facts.ranks if rank.card and len(rank.sockets) > 1]
    if spread:
        found.append(
            Finding(check, WARNING, f"{name_ranks(spread)} may wander between sockets, away from the card", BIND)
        )
    for host, ranks in facts.hosts().items():
        bound = [rank for rank in ranks if rank.cores and len(rank.cores) < rank.host_cores]
        shared = _sharing(bound)
        if shared:
            on_cpu = all(rank.on_cpu for rank in bound)
            found.append(
                Finding(
                    check,
                    NOTE if on_cpu else WARNING,
                    f"{name_ranks(shared)} share cores on {host}",
                    "" if on_cpu else BIND,
                )
            )
        found += _workers(host, ranks)
    if found:
        return found
    cores = sorted({len(rank.cores) for rank in facts.ranks})
    return [Finding(check, GOOD, f"{_join(cores)} core(s) for each rank, near its card where that is known")]


def _apart(a: Sequence[int], b: Sequence[int]) -> bool:
    return bool(a and b) and not set(a) & set(b)


def _sharing(ranks: Sequence[RankFacts]) -> list[int]:
    owners: dict[int, list[int]] = {}
    for rank in ranks:
        for core in rank.cores:
            owners.setdefault(core, []).append(rank.rank)
    return sorted({rank for sharing in owners.values() if len(sharing) > 1 for rank in sharing})


def _workers(host: str, ranks: Sequence[RankFacts]) -> list[Finding]:
    """oneCCL's worker threads on the cores of ranks."""
    text = ranks[0].environment.get("CCL_WORKER_AFFINITY", "")
    workers = {int(core) for core in text.split(",") if core.strip().isdigit()}
    hit = [rank.rank for rank in ranks if not rank.on_cpu and workers & set(rank.cores)]
    if not hit:
        return []
    return [
        Finding(
            "cores",
            WARNING,
            f"CCL_WORKER_AFFINITY={text} puts oneCCL's workers on cores of {name_ranks(hit)} on {host}",
            "name cores that no rank has, or unset CCL_WORKER_AFFINITY",
        )
    ]


def check_nics(facts: Facts) -> list[Finding]:
    """NICs that a rank was given but that are not there or on the other socket; fewer NICs than the machine has."""
    check, found = "nics", []
    for rank in facts.ranks:
        known = {nic.name: nic for nic in rank.nics}
        given = [n.strip() for n in rank.environment.get("FI_CXI_DEVICE_NAME", "").split(",") if n.strip()]
        missing = [name for name in given if name not in known]
        if missing:
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"FI_CXI_DEVICE_NAME of rank {rank.rank} names {', '.join(missing)}; {rank.host} has "
                    f"{', '.join(known) or 'no fast NIC'}",
                    "unset FI_CXI_DEVICE_NAME, or name NICs of the node",
                )
            )
        elif given and all(_apart(rank.sockets, known[name].sockets) for name in given):
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"rank {rank.rank} runs on socket {_join(rank.sockets)}, its NIC {', '.join(given)} is "
                    f"on socket {_join(known[given[0]].sockets)}",
                    "unset FI_CXI_DEVICE_NAME: MPI picks a NIC of the rank's socket",
                )
            )
    if found:
        return found
    first, wanted = facts.ranks[0], facts.topology.machine.links.nics
    if not first.nics:
        if facts.topology.nodes == 1 or first.on_cpu:
            return [Finding(check, NOTE, "no Slingshot or InfiniBand NIC to be seen")]
        return [
            Finding(
                check,
                WARNING,
                "no Slingshot or InfiniBand NIC to be seen on a run of several nodes",
                "check FI_PROVIDER and the node: messages between nodes take the slow network",
            )
        ]
    fewer = [host for host, ranks in facts.hosts().items() if len(ranks[0].nics) < wanted]
    if fewer and not first.on_cpu:
        return [
            Finding(
                check,
                WARNING,
                f"{len(first.nics)} NICs on {', '.join(fewer)}, machine {facts.topology.machine.name} has {wanted}",
                "leave these hosts out, or correct links.nics in the machine file",
            )
        ]
    return [Finding(check, GOOD, f"{len(first.nics)} NICs on each host: {', '.join(nic.name for nic in first.nics)}")]


def _join(values: Sequence[int]) -> str:
    return "/".join(map(str, values))
