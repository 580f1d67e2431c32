"""Do all ranks run the same software, new enough, over the MPI that started them?"""

from __future__ import annotations

import re
from pathlib import Path

from cocodiff.commands.doctor.facts import FAULT, GOOD, NOTE, WARNING, Facts, Finding, RankFacts, by_value, name_ranks

# As pyproject.toml asks for; a test compares the two.
LEAST = {"torch": (2, 10), "diffusers": (0, 42), "transformers": (5,)}


def numbers(version: str) -> tuple[int, ...]:
    """2.10.0a0+git1 -> (2, 10, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_versions(facts: Facts) -> list[Finding]:
    """Old or missing packages, and ranks whose versions differ."""
    check, found = "versions", []
    for package, least in LEAST.items():
        wanted = ".".join(map(str, least))
        for version in sorted({str(rank.versions.get(package) or "") for rank in facts.ranks}):
            if not version:
                text = f"{package} is not installed"
            elif numbers(version) < least:
                text = f"{package} {version} is too old"
            else:
                continue
            found.append(Finding(check, FAULT, text, f"pip install '{package}>={wanted}' into this environment"))
    for package in sorted({name for rank in facts.ranks for name in rank.versions}):
        values = [str(rank.versions.get(package)) for rank in facts.ranks]
        if len(set(values)) > 1:
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"{package} differs: {by_value(facts.ranks, values)}",
                    "start every rank with the same Python: give mpiexec the environment's full path",
                )
            )
    return [*found, *_ipex(facts.ranks[0])] or [Finding(check, GOOD, _spelled(facts.ranks[0]))]


def _ipex(rank: RankFacts) -> list[Finding]:
    ipex, torch = rank.versions.get("intel_extension_for_pytorch"), rank.versions.get("torch") or ""
    if ipex is None or numbers(ipex)[:2] == numbers(torch)[:2]:
        return []
    return [
        Finding(
            "versions",
            WARNING,
            f"IPEX {ipex} is not for torch {torch}: it is not imported",
            "uninstall it, or install the one of the same major and minor version",
        )
    ]


def _spelled(rank: RankFacts) -> str:
    shown = ("cocodiff", "python", "torch", "diffusers", "transformers", "mpi", "xpu runtime")
    return ", ".join(f"{name} {rank.versions[name]}" for name in shown if rank.versions.get(name))


def check_launch(facts: Facts) -> list[Finding]:
    """Did launcher, MPI and transport find the same ranks?"""
    check, first = "launch", facts.ranks[0]
    size, found = len(facts.ranks), []
    if first.world is not None and first.world != size:
        found.append(
            Finding(
                check,
                FAULT,
                f"the launcher started {first.world} rank(s), but they found {size} of them together",
                "use the mpiexec that belongs to the loaded MPI library, and mpi4py built on that library",
            )
        )
    for host, ranks in facts.hosts().items():
        told = {rank.local_size for rank in ranks if rank.local_size is not None}
        if told and told != {len(ranks)}:
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"{host} has {len(ranks)} ranks, the launcher says {'/'.join(map(str, sorted(told)))}",
                    "start the same number of ranks on every node (--ppn)",
                )
            )
    nodes = facts.topology.nodes
    if not found and len(facts.hosts()) not in (1, nodes):
        found.append(
            Finding(
                check,
                FAULT,
                f"{len(facts.hosts())} hosts, but the machine file puts {size} ranks on {nodes} node(s)",
                f"start {size // nodes} ranks a node, or choose another --machine",
            )
        )
    for host, ranks in facts.hosts().items():
        where = [facts.topology.places[rank.rank].node for rank in ranks]
        if not found and len(facts.hosts()) > 1 and len(set(where)) > 1:
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"{name_ranks([rank.rank for rank in ranks])} are on {host}, but belong to "
                    f"{len(set(where))} nodes of the machine file",
                    "place ranks node by node, not round-robin",
                )
            )
    how = {"alone": "alone", "forked": "by --ranks", "torchrun": "by torchrun", "mpi": "by MPI"}[first.launcher]
    hosts = len(facts.hosts())
    return found or [
        Finding(check, GOOD, f"{size} rank(s) on {hosts} host(s), started {how}, messages by {first.library}")
    ]


def check_mpi(facts: Facts) -> list[Finding]:
    """PyPI's impi-rt beside an MPI of the system: mpi4py takes the first one it finds, which is not the launcher's."""
    check, found = "mpi", []
    remedy = "pip uninstall impi-rt, and never install the extra local-mpi where the system has an MPI"
    for rank in facts.ranks:
        wheel = rank.versions.get("impi-rt")
        if wheel is None or not rank.system_mpi:
            continue
        ours = rank.mpi_library and Path(rank.mpi_library).is_relative_to(Path(rank.python_prefix).resolve())
        loaded = f"; {rank.mpi_library} is loaded" if rank.mpi_library else ""
        severity = FAULT if ours or not rank.mpi_library or rank.launcher == "mpi" else WARNING
        found.append(
            Finding(check, severity, f"impi-rt {wheel} of PyPI is installed beside {rank.system_mpi}{loaded}", remedy)
        )
        break
    if found:
        return found
    first = facts.ranks[0]
    if first.launcher == "mpi" and first.versions.get("mpi4py") is None:
        return [
            Finding(
                check,
                FAULT,
                "an MPI launcher started the ranks, but mpi4py is not installed",
                "pip install mpi4py, built on the MPI that the launcher belongs to",
            )
        ]
    told = first.versions.get("mpi") or "not used"
    return [Finding(check, NOTE if told == "not used" else GOOD, told)]
