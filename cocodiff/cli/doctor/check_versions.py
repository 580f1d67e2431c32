"""Do all ranks run the same software, new enough, over the MPI that started them?"""

from __future__ import annotations

import re
from pathlib import Path

from cocodiff.cli.doctor.facts import FAULT, WARNING, Facts, Findings, by_value, name_ranks

# As pyproject.toml asks for; a test compares the two.
LEAST = {"torch": (2, 10), "diffusers": (0, 42), "transformers": (5,)}


def numbers(version: str) -> tuple[int, ...]:
    """2.10.0a0+git1 -> (2, 10, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_versions(facts: Facts) -> Findings:
    """Old or missing packages, and ranks whose versions differ."""
    found, first = Findings("versions"), facts.ranks[0].versions
    for package, least in LEAST.items():
        remedy = f"pip install '{package}>={'.'.join(map(str, least))}' into this environment"
        for version in sorted({str(rank.versions.get(package) or "") for rank in facts.ranks}):
            if not version:
                found.fault(f"{package} is not installed", remedy)
            elif numbers(version) < least:
                found.fault(f"{package} {version} is too old", remedy)
    for package in sorted({name for rank in facts.ranks for name in rank.versions}):
        values = [str(rank.versions.get(package)) for rank in facts.ranks]
        if len(set(values)) > 1:
            remedy = "start every rank with the same Python: give mpiexec the environment's full path"
            found.fault(f"{package} differs: {by_value(facts.ranks, values)}", remedy)
    ipex, torch = first.get("intel_extension_for_pytorch"), first.get("torch") or ""
    if ipex is not None and numbers(ipex)[:2] != numbers(torch)[:2]:
        remedy = "uninstall it, or install the one of the same major and minor version"
        found.warning(f"IPEX {ipex} is not for torch {torch}: it is not imported", remedy)
    if not found:
        shown = ("cocodiff", "python", "torch", "diffusers", "transformers", "mpi", "xpu runtime")
        found.good(", ".join(f"{name} {first[name]}" for name in shown if first.get(name)))
    return found


def check_launch(facts: Facts) -> Findings:
    """Did launcher, MPI and transport find the same ranks?"""
    found, first, hosts = Findings("launch"), facts.ranks[0], facts.hosts()
    size, nodes = len(facts.ranks), facts.topology.nodes
    if first.world is not None and first.world != size:
        found.fault(
            f"the launcher started {first.world} rank(s), but they found {size} of them together",
            "use the mpiexec that belongs to the loaded MPI library, and mpi4py built on that library",
        )
    for host, ranks in hosts.items():
        told = {rank.local_size for rank in ranks if rank.local_size is not None}
        if told and told != {len(ranks)}:
            text = f"{host} has {len(ranks)} ranks, the launcher says {'/'.join(map(str, sorted(told)))}"
            found.fault(text, "start the same number of ranks on every node (--ppn)")
    if not found and len(hosts) not in (1, nodes):
        text = f"{len(hosts)} hosts, but the machine file puts {size} ranks on {nodes} node(s)"
        found.fault(text, f"start {size // nodes} ranks a node, or choose another --machine")
    for host, ranks in hosts.items():
        of_nodes = {facts.topology.places[rank.rank].node for rank in ranks}
        if not found and len(hosts) > 1 and len(of_nodes) > 1:
            named = name_ranks([rank.rank for rank in ranks])
            text = f"{named} are on {host}, but belong to {len(of_nodes)} nodes of the machine file"
            found.fault(text, "place ranks node by node, not round-robin")
    if not found:
        how = {"alone": "alone", "forked": "by --ranks", "torchrun": "by torchrun", "mpi": "by MPI"}[first.launcher]
        found.good(f"{size} rank(s) on {len(hosts)} host(s), started {how}, messages by {first.library}")
    return found


def check_mpi(facts: Facts) -> Findings:
    """PyPI's impi-rt beside an MPI of the system: mpi4py takes the first one it finds, which is not the launcher's. And
    windows that MPI does not have, or that gain nothing."""
    found, first = Findings("mpi"), facts.ranks[0]
    rank = next((rank for rank in facts.ranks if rank.versions.get("impi-rt") and rank.system_mpi), None)
    if rank is not None:
        ours = rank.mpi_library and Path(rank.mpi_library).is_relative_to(Path(rank.python_prefix).resolve())
        loaded = f"; {rank.mpi_library} is loaded" if rank.mpi_library else ""
        found.add(
            FAULT if ours or not rank.mpi_library or rank.launcher == "mpi" else WARNING,
            f"impi-rt {rank.versions['impi-rt']} of PyPI is installed beside {rank.system_mpi}{loaded}",
            "pip uninstall impi-rt, and never install the extra local-mpi where the system has an MPI",
        )
    elif first.launcher == "mpi" and first.versions.get("mpi4py") is None:
        remedy = "pip install mpi4py, built on the MPI that the launcher belongs to"
        found.fault("an MPI launcher started the ranks, but mpi4py is not installed", remedy)
    elif first.drawback:
        found.fault(f"transport mpi-rma: {first.drawback}", "use --transport mpi")
    elif first.versions.get("mpi4py") and (lacks := next(filter(None, (r.no_shared_memory for r in facts.ranks)), "")):
        found.warning(*lacks.split(": ", 1))
    elif told := first.versions.get("mpi"):
        found.good(told)
    else:
        found.note("not used")
    return found
