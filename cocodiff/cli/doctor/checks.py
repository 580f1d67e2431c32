"""The checks of `cocodiff doctor`. They are functions of facts and touch no machine, so a test can pass them any faulty
one.

Each adds its results to `found`, which is empty before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path

from cocodiff.attention.trial import DeviceTrial
from cocodiff.cli.doctor.facts import LATE, REQUIRED, CallTiming, Facts, RankFacts, name_ranks, planes_of, spelled
from cocodiff.comm.connect import overlap_killers
from cocodiff.comm.host import THROUGH_HOST
from cocodiff.comm.launch import STARTED
from cocodiff.config.grouping import by_key
from cocodiff.config.packages import remedy_of
from cocodiff.jobs.terminal import THREADS
from cocodiff.kernels.device import HIERARCHY
from cocodiff.kernels.trial import KernelTrial

FAULT, WARNING, NOTE, GOOD = "fault", "warning", "note", "ok"
LEAST = {"torch": (2, 8), "diffusers": (0, 42), "transformers": (5,)}  # as in pyproject.toml: a test compares them
BIND = "bind ranks to cores: mpiexec --cpu-bind list:..., as launch/aurora.pbs does"
ONE_A_TILE = (
    "start one rank for each tile; local ranks choose tiles, so use no gpu_tile_compact.sh with "
    "ZE_FLAT_DEVICE_HIERARCHY=FLAT and unset ZE_AFFINITY_MASK"
)
HIDDEN_LEAST = 0.5  # part of messages or work, the shorter one, to be hidden; an overlap that works hides nearly all
GIB = 2**30
LEAST_FREE = {"cpu": GIB // 4, "accelerator": 4 * GIB}  # a run of the embedded model; a small run of a large model
COSTLY = 1.05  # factor of time up to which repeatable products are not remarked on
# A setting of torch's allocator: oneCCL does not know expandable memory ("invalid usm pointer type").
EXPANDABLE = re.compile(r"PYTORCH_((XPU|CUDA)_)?ALLOC_CONF=.*expandable_segments\s*:\s*true", re.IGNORECASE)
TAKEN = 0.1  # part of a tile's memory that other processes may hold


@dataclass(frozen=True)
class Finding:
    """One result of a check, which is printed as one line."""

    check: str  # its name in CHECKS
    severity: str  # FAULT, WARNING, NOTE or GOOD
    text: str  # the result in words
    remedy: str = ""  # what the user can do; "" if nothing


class Findings(list[tuple[str, str, str]]):
    """The findings of one check, which adds them: the fields of each `Finding` after the first."""

    def add(self, severity: str, text: str, remedy: str = "") -> None:
        """Add a finding.

        Args:
            severity: FAULT, WARNING, NOTE or GOOD.
            text: the result in words.
            remedy: what the user can do; "" if nothing.
        """
        self.append((severity, text, remedy))

    def otherwise(self, severity: str, text: str, remedy: str = "") -> None:
        """Add a finding if the check has none yet. The arguments are those of `add`."""
        if not self:
            self.add(severity, text, remedy)

    fault = partialmethod(add, FAULT)
    warning = partialmethod(add, WARNING)
    note = partialmethod(add, NOTE)
    good = partialmethod(add, GOOD)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, such as (2, 10, 0) for "2.10.0a0+git1"; () if there are none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_versions(facts: Facts, found: Findings) -> None:
    """Report packages that are old, missing or do not import, and versions that differ between ranks."""
    first = facts.ranks[0].versions
    for package, least in LEAST.items():
        remedy = f"pip install '{package}>={'.'.join(map(str, least))}' into this environment"
        for version in sorted({str(rank.versions.get(package) or "") for rank in facts.ranks}):
            if not version:
                found.fault(f"{package} is not installed", remedy)
            elif numbers(version) < least:
                found.fault(f"{package} {version} is too old", remedy)
    for package in sorted({name for rank in facts.ranks for name in rank.versions}):
        ranks_with = by_key((str(rank.versions.get(package)), rank.rank) for rank in facts.ranks)
        if len(ranks_with) > 1:
            told = "; ".join(f"{version} on {name_ranks(ranks)}" for version, ranks in ranks_with.items())
            remedy = "start every rank with the same Python: give mpiexec the environment's full path"
            found.fault(f"{package} differs: {told}", remedy)
    for host, rank in facts.firsts(lambda rank: rank.unimported):
        for package, reason in rank.unimported.items():
            text, remedy = f"{host}: {package} does not import ({reason})", remedy_of(package.partition(".")[0])
            if reason.startswith(LATE):
                found.warning(text, "run doctor again: files that were read before are read faster")
            elif package in REQUIRED:
                found.fault(text, remedy)
            else:
                found.warning(f"{text}; runs that need it end, others do without", remedy)
    ipex, torch = first.get("intel_extension_for_pytorch"), first.get("torch") or ""
    if ipex is not None and numbers(ipex)[:2] != numbers(torch)[:2]:
        remedy = "uninstall it, or install the one of the same major and minor version"
        found.warning(f"IPEX {ipex} is not for torch {torch}: it is not imported", remedy)
    shown = ("cocodiff", "python", "torch", "diffusers", "transformers", "mpi", "xpu runtime")
    found.otherwise(GOOD, ", ".join(f"{name} {first[name]}" for name in shown if first.get(name)))


def check_launch(facts: Facts, found: Findings) -> None:
    """Report hosts whose number of ranks differs from the launcher's or the machine file's."""
    first, hosts, size, nodes = facts.ranks[0], facts.hosts(), len(facts.ranks), facts.topology.nodes
    for host, ranks in hosts.items():
        told = {rank.local_size for rank in ranks if rank.local_size is not None}
        if told and told != {len(ranks)}:
            text = f"{host} has {len(ranks)} ranks, the launcher says {'/'.join(map(str, sorted(told)))}"
            found.fault(text, "start the same number of ranks on every node (--ppn)")
    if len(hosts) not in (1, nodes):
        text = f"{len(hosts)} hosts, but the machine file puts {size} ranks on {nodes} node(s)"
        found.otherwise(FAULT, text, f"start {size // nodes} ranks a node, or choose another --machine")
    for host, ranks in hosts.items():
        spread = len({facts.topology.places[rank.rank].node for rank in ranks})
        if len(hosts) > 1 and spread > 1:
            named = name_ranks([rank.rank for rank in ranks])
            text = f"{named} are on {host}, but belong to {spread} nodes of the machine file"
            found.otherwise(FAULT, text, "place ranks node by node, not round-robin")
    started = f"{size} rank(s) on {len(hosts)} host(s), started {STARTED[first.launcher]}"
    found.otherwise(GOOD, f"{started}, messages by {first.library}")


def check_mpi(facts: Facts, found: Findings) -> None:
    """Report an MPI library that is not the launcher's, and MPI's one-sided transport if it is missing or useless.

    mpi4py loads the first library that it finds, and PyPI's impi-rt may be found before the system's MPI.
    """
    first = facts.ranks[0]
    rank = next((rank for rank in facts.ranks if rank.versions.get("impi-rt") and rank.system_mpi), None)
    if rank is not None:
        ours = rank.mpi_library and Path(rank.mpi_library).is_relative_to(Path(rank.python_prefix).resolve())
        tell = found.fault if ours or not rank.mpi_library or rank.launcher == "mpi" else found.warning
        loaded = f"; {rank.mpi_library} is loaded" if rank.mpi_library else ""
        text = f"impi-rt {rank.versions['impi-rt']} of PyPI is installed beside {rank.system_mpi}{loaded}"
        tell(text, "pip uninstall impi-rt, and never install the extra local-mpi where the system has an MPI")
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


def check_tiles(facts: Facts, found: Findings) -> None:
    """Report ranks that share a tile, ranks on different kinds of devices, and tiles without a rank."""
    first = facts.ranks[0]
    kinds = {rank.device.split(":")[0] for rank in facts.ranks}
    if len(kinds) > 1:
        found.fault(f"ranks compute on different devices: {', '.join(sorted(kinds))}", "choose one with --device")
        return
    if kinds == {"cpu"}:
        found.note("ranks compute on the CPU: no tiles")
        return
    for host, ranks in facts.hosts().items():
        for tile, sharing in by_key((rank.tile, rank.rank) for rank in ranks).items():
            text = f"{name_ranks(sharing)} share tile {tile} of {host}"
            if len(sharing) > 1 and first.library.startswith(THROUGH_HOST):
                found.note(text)
            elif len(sharing) > 1:
                found.fault(text, ONE_A_TILE)
    machine = facts.topology.machine
    if kinds == {"xpu"} and first.tiles_seen < (machine.tiles_per_node or 0):
        told = ", ".join(f"{name} {first.environment.get(name, 'not set')}" for name in HIERARCHY)
        seen = f"a rank sees {first.tiles_seen} devices where machine {machine.name} has {machine.tiles_per_node} tiles"
        found.fault(f"{seen} ({told})", "export ZE_FLAT_DEVICE_HIERARCHY=FLAT and unset ZE_AFFINITY_MASK")
    idle = max(rank.tiles_seen - len(facts.hosts()[rank.host]) for rank in facts.ranks)
    if idle > 0:
        found.otherwise(NOTE, f"{idle} tile(s) of a host have no rank")
    found.otherwise(GOOD, f"{len(facts.ranks)} ranks, each on a tile of its own")


def check_cores(facts: Facts, found: Findings) -> None:
    """Report ranks far from their cards, ranks that share cores, and ranks with more cores than threads."""
    for rank in facts.ranks:
        if rank.card and _apart(rank.sockets, rank.card.sockets):
            where = f"its card {rank.card.address} is on socket {_join(rank.card.sockets)}"
            found.fault(f"rank {rank.rank} runs on socket {_join(rank.sockets)} of {rank.host}, {where}", BIND)
    if spread := [rank.rank for rank in facts.ranks if rank.card and len(rank.sockets) > 1]:
        found.warning(f"{name_ranks(spread)} may wander between sockets, away from the card", BIND)
    for host, ranks in facts.hosts().items():
        bound = [rank for rank in ranks if rank.cores and len(rank.cores) < rank.host_cores]
        if shared := _sharing(bound):
            alike = all(rank.on_cpu for rank in bound)
            found.add(NOTE if alike else WARNING, f"{name_ranks(shared)} share cores on {host}", "" if alike else BIND)
        alone = [rank for rank in bound if rank.rank not in shared and rank.environment.get(THREADS[0], "").isdigit()]
        if idle := [rank.rank for rank in alone if int(rank.environment[THREADS[0]]) < len(rank.cores)]:
            text = f"{name_ranks(idle)} on {host} compute in fewer threads than they have cores to themselves"
            found.warning(text, f"export {THREADS[0]}={min(len(rank.cores) for rank in alone)}")
        affinity = ranks[0].environment.get("CCL_WORKER_AFFINITY", "")
        workers = {int(core) for core in affinity.split(",") if core.strip().isdigit()}
        if hit := [rank.rank for rank in ranks if not rank.on_cpu and workers & set(rank.cores)]:
            text = f"CCL_WORKER_AFFINITY={affinity} puts oneCCL's workers on cores of {name_ranks(hit)} on {host}"
            found.warning(text, "name cores that no rank has, or unset CCL_WORKER_AFFINITY")
    cores = sorted({len(rank.cores) for rank in facts.ranks})
    found.otherwise(GOOD, f"{_join(cores)} core(s) for each rank, near its card where that is known")


def _apart(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return True if two sets of CPU sockets have none in common; False if one is empty, which means unknown."""
    return bool(a and b) and not set(a) & set(b)


def _sharing(ranks: Sequence[RankFacts]) -> list[int]:
    """Return the numbers of the ranks that have a core in common with another rank."""
    owners = by_key((core, rank.rank) for rank in ranks for core in rank.cores)
    return sorted({rank for sharing in owners.values() if len(sharing) > 1 for rank in sharing})


def check_nics(facts: Facts, found: Findings) -> None:
    """Report NICs that a rank was given but that are absent or on the other socket, and hosts with too few NICs."""
    first, wanted = facts.ranks[0], facts.topology.machine.links.nics
    for rank in facts.ranks:
        known = {nic.name: nic for nic in rank.nics}
        given = [n.strip() for n in rank.environment.get("FI_CXI_DEVICE_NAME", "").split(",") if n.strip()]
        if missing := [name for name in given if name not in known]:
            text = f"FI_CXI_DEVICE_NAME of rank {rank.rank} names {', '.join(missing)}; {rank.host} has "
            text += ", ".join(known) or "no fast NIC"
            found.fault(text, "unset FI_CXI_DEVICE_NAME, or name NICs of the node")
        elif given and all(_apart(rank.sockets, known[name].sockets) for name in given):
            text = f"rank {rank.rank} runs on socket {_join(rank.sockets)}, its NIC {', '.join(given)} is "
            text += f"on socket {_join(known[given[0]].sockets)}"
            found.fault(text, "unset FI_CXI_DEVICE_NAME: MPI picks a NIC of the rank's socket")
    if found:
        return
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


def _join(values: Sequence[int]) -> str:
    """Return numbers as text, with slashes between them."""
    return "/".join(map(str, values))


def check_planes(facts: Facts, found: Findings) -> None:
    """Compare the machine file's planes with those that the variable CCL_TOPO_COLOR gives to oneCCL, and report
    differences."""
    machine, places = facts.topology.machine, facts.topology.places
    for host, ranks in facts.hosts().items():
        color = ranks[0].environment.get("CCL_TOPO_COLOR", "")
        wanted = [places[rank].plane for rank in facts.topology.on_node[places[ranks[0].rank].node]]
        if "plane" not in color:
            continue
        try:
            told = planes_of(color)[: len(wanted)]
        except ValueError as error:
            found.warning(f"{host}: {error}", "unset CCL_TOPO_COLOR, or name every tile's plane in it")
            continue
        if len(told) < len(wanted):
            text = f"{host}: CCL_TOPO_COLOR tells of {len(told)} tiles, {len(wanted)} ranks are there"
            found.fault(text, f"start {len(told)} ranks a node, or mend CCL_TOPO_COLOR")
        elif spelled(told) != spelled(wanted):
            text = f"{host}: CCL_TOPO_COLOR has planes {spelled(told)}, machine {machine.name} has {spelled(wanted)}"
            found.fault(text, f"copy the machine file, write planes: {list(told)} and name it with --machine")
        else:
            found.good(f"{host}: machine {machine.name} and CCL_TOPO_COLOR have planes {spelled(wanted)}")
    found.otherwise(NOTE, f"machine {machine.name} has planes {spelled([p.plane for p in places if not p.node])}")


def check_all_to_all(facts: Facts, found: Findings) -> None:
    """Report messages that arrived with other numbers than were sent."""
    trials = facts.alltoalls
    if bad := [trial for trial in trials if trial.wrong]:
        cases = ", ".join(f"{trial.dtype} of {trial.bytes} bytes" for trial in bad[:4]) + (", ..." if bad[4:] else "")
        what, try_next = "messages", "another --transport, another node"
        if all(trial.at_once > 1 for trial in bad):
            what, try_next = "messages of overlapping calls", "--messages alltoall"
        text = f"{what} are wrong for {cases}: {bad[0].wrong[0]}"
        found.fault(text, f"trust no result of this job: try {try_next}, and report the versions")
    elif trials:
        dtypes = ", ".join(dict.fromkeys(trial.dtype for trial in trials))
        largest = max(trials, key=lambda trial: trial.bytes)
        most = f"{largest.bytes} bytes to each peer in {largest.seconds * 1e3:.1f} ms"
        found.good(f"{len(trials)} trials right ({dtypes}, up to {most})")
    else:
        found.note("one rank: no messages")


def check_messages(facts: Facts, found: Findings) -> None:
    """Compare the way in which a device's library handles a batch of messages with the setting `messages`. Report the
    results with the other value of CCL_OP_SYNC."""
    used = facts.messages if facts.messages != "auto" else "alltoall" if facts.one_by_one else "batch"
    for trial, (reports, said) in (("a batch", facts.pair), ("the other CCL_OP_SYNC", facts.op_sync)):
        if said and not reports:
            found.note(f"{trial} could not be tried, {used} is used: {said[0]}")
    if reports := facts.pair[0]:
        needed, ends = ("batch", "ends") if reports[1:] == [[]] else ("alltoall", "does not end")
        text = f"a batch that both ranks begin with a send {ends}: --messages {needed} fits this library"
        text += f", {used} is used"
        contradicted = used != needed and facts.messages != "alltoall"
        found.add(WARNING if contradicted else GOOD, text, f"--messages {needed}")
    own_ms, own = sum(trial.seconds for trial in facts.alltoalls) * 1e3, facts.overlap
    for (other, verdict), (_, seconds), (_, hidden) in map(dict.items, facts.op_sync[0]):
        text = f"all-to-alls with {other}: {verdict}, {seconds * 1e3:.1f} ms, {hidden:.0%} hidden"
        text += f"; as it is {own_ms:.1f} ms, {own.hidden if own else 0:.0%} hidden"
        text += " (FAST=1 heeds this, docs/aurora.md)" if other.endswith("0") else ""
        mends = verdict == "right" and any(trial.wrong for trial in facts.alltoalls)
        found.add(WARNING if mends else GOOD, text, f"export {other}")
    found.otherwise(NOTE, "no library of a device carries them")


def check_overlap(facts: Facts, found: Findings) -> None:
    """Report the part of messages that is hidden behind work. Less than HIDDEN_LEAST is a warning and no fault:
    everything runs, but slower."""
    if facts.overlap is None:
        found.note("one rank: no messages to hide")
        return
    times, hidden, on_cpu = facts.overlap, facts.overlap.hidden, facts.ranks[0].on_cpu
    text = f"{hidden:.0%} of the messages hidden: messages {times.communication_s * 1e3:.1f} ms, "
    text += f"{'sleep' if on_cpu else 'matrix products'} {times.work_s * 1e3:.1f} ms, both {times.both_s * 1e3:.1f} ms"
    if hidden >= HIDDEN_LEAST:
        found.good(text)
    else:
        on_device = "see the settings below; else give the backend's asynchronous collectives their own stream"
        found.warning(text, "give every rank a core of its own for its messages" if on_cpu else on_device)


def check_order(facts: Facts, found: Findings) -> None:
    """Report the result of a trial: if messages wait for the stream that writes them, and readers for messages.

    If an error ended the trials, report that instead.
    """
    if facts.stopped:
        found.fault(facts.stopped, "trust no result of this job: try another --transport, and report the versions")
    elif facts.order is None:
        found.note("one rank, or the CPU: no streams")
    else:
        found.good(f"messages keep their place between streams that are kept busy: {facts.order} rounds right")


def check_host(facts: Facts, found: Findings) -> None:
    """Report calls that block the host until their messages have arrived. It is a warning only with a device's library.

    On a CPU the host copies messages, and with `transport: host` a background thread waits for its copies.
    """
    first = facts.ranks[0]
    for call, issues in by_key((issue.call, issue) for issue in facts.issues).items():
        text = f"{call}: " + "; ".join(map(_told, issues))
        if any(issue.blocks for issue in issues) and not first.on_cpu and not first.library.startswith(THROUGH_HOST):
            remedy = f"write links: blocked_us: {facts.blocked_us:.3g} into the machine file, for plans to count it"
            found.warning(text, remedy)
        else:
            found.note(text)
    found.otherwise(NOTE, "one rank: no messages")


def _size(count: int) -> str:
    """Return a number of bytes as whole MiB or KiB."""
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"


def check_links(facts: Facts, found: Findings) -> None:
    """Report the rate of each kind of link by the size of messages, and find those of less than half the file's."""
    stated, measured = facts.topology.machine, facts.machine()
    own = (measured or stated).links
    remedy = "plan with the machine.yaml written here; if planes alone are slow, compare the machine file's planes"
    for kind, trials in by_key((one.kind, one) for one in facts.links).items():
        text = f"{kind} alone: " + ", ".join(f"{one.gb_s(own):.3g} GB/s at {_size(one.bytes)}" for one in trials)
        if measured is None or "its links" in stated.missing_rates:
            found.note(text)
            continue
        of_file = stated.value(f"{kind}_gb_s")
        slow = trials[-1].gb_s(own) < of_file / 2
        found.add(WARNING if slow else NOTE, f"{text}; machine {stated.name} has {of_file:g}", remedy if slow else "")
    found.otherwise(NOTE, "one rank: no messages")


def _told(issue: CallTiming) -> str:
    """Return the measured times of a call of one size in words."""
    size = _size(issue.bytes)
    times = f"returns after {issue.returns_s * 1e6:.0f} us, complete after {issue.complete_s * 1e6:.0f} us"
    return f"{size} {times}: the host is {'blocked' if issue.blocks else 'free'}"


def check_settings(facts: Facts, found: Findings) -> None:
    """Report environment variables that prevent overlap, that the library in use does not read, or that break
    oneCCL."""
    seen, first = set[str](), facts.ranks[0]
    for rank in facts.ranks:
        for killer in overlap_killers(rank.environment, rank.library, rank.device.split(":")[0]):
            if killer.setting not in seen:
                seen.add(killer.setting)
                found.warning(f"{killer.setting} {killer.harm}: nothing is hidden", killer.remedy)
    pairs = {f"{name}={value}" for rank in facts.ranks for name, value in rank.environment.items()}
    for growing in sorted(filter(EXPANDABLE.match, pairs if first.device.startswith("xpu") else ())):
        found.fault(f"{growing}: oneCCL cannot send such memory", f"unset {growing.partition('=')[0]}")
    for killer in overlap_killers(first.environment, "xccl", "xpu"):
        if killer.setting not in seen:
            text = f"{killer.setting} would make a run on GPUs block; {first.library} does not read it"
            found.warning(text, killer.remedy)
    under_pals = "PALS_RANKID" in first.environment or "PALS_LOCAL_RANKID" in first.environment
    if under_pals and first.library in ("xccl", "ccl") and first.environment.get("CCL_PROCESS_LAUNCHER") != "pmix":
        remedy = "export CCL_PROCESS_LAUNCHER=pmix, as launch/aurora.pbs does"
        found.warning("oneCCL is not told that PALS started the ranks", remedy)
    found.otherwise(GOOD, "none that takes overlap away")


def check_memory(facts: Facts, found: Findings) -> None:
    """Compare every rank's free memory with the needs of the model given by --model, or with the least that any run
    needs."""
    told = [rank for rank in facts.ranks if rank.free is not None]
    if not told:
        found.warning("the system does not tell how much memory is free")
        return
    tightest = min(told, key=lambda rank: rank.free or 0)
    least = facts.needed or LEAST_FREE["cpu" if tightest.on_cpu else "accelerator"]
    what = "the model needs" if facts.needed else "any run needs"
    text = f"{(tightest.free or 0) / GIB:.2f} GiB free on rank {tightest.rank}, the tightest"
    if short := [rank.rank for rank in told if (rank.free or 0) < least]:
        remedy = "end what else runs there, start fewer ranks a node, or use more nodes (cocodiff plan says which)"
        found.fault(f"{text}; {what} {least / GIB:.2f} GiB on {name_ranks(short)}", remedy)
    held = [r.rank for r in told if not r.on_cpu and r.total and (r.free or 0) < (1 - TAKEN) * r.total]
    if held:
        remedy = "look for left-over processes on the node (xpu-smi ps)"
        found.warning(f"{text}; somebody else holds memory on the tiles of {name_ranks(held)}", remedy)
    found.otherwise(GOOD, f"{text}; {what} {least / GIB:.2f}")


def check_sycl(facts: Facts, found: Findings) -> None:
    """Report for each host whether SYCL kernels or torch's operations run, and why."""
    for host, rank in facts.firsts(lambda rank: rank.sycl or rank.no_sycl):
        text = f"{host}: SYCL kernels on {rank.sycl}"
        if remedy := rank.compiles_again:
            found.warning(f"{text}, which every start compiles: libsycl keeps none", remedy)
        elif rank.sycl:
            found.good(text)
        elif rank.kernels == "sycl":
            remedy = "run cocodiff kernels build on a node, or choose kernels auto or torch"
            found.fault(f"{host}: kernels sycl were asked for, but {rank.no_sycl}", remedy)
        else:
            slower = rank.device.startswith("xpu") and rank.kernels != "torch"
            remedy = "load a oneAPI compiler and run cocodiff kernels build" if slower else ""
            found.add(WARNING if slower else NOTE, f"{host}: torch's operations run: {rank.no_sycl}", remedy)
    found.otherwise(NOTE, "nobody looked")


def check_kernels(facts: Facts, found: Findings) -> None:
    """Report for each host how much each operation's results differ from torch's. Only SYCL kernels can be at fault,
    not a vendor's torch."""
    for host, rank in facts.firsts(lambda rank: rank.kernel_trials):
        where = f"{rank.sycl} against torch's" if rank.sycl else f"{rank.device} against torch's on the CPU"
        for op, trials in by_key((trial.op, trial) for trial in rank.kernel_trials).items():
            told = by_key((_difference(trial), trial.dtype) for trial in trials)
            verdicts = "; ".join(f"{verdict} in {', '.join(dtypes)}" for verdict, dtypes in told.items())
            text = f"{host}: {op} {trials[0].shapes} on {where}: {verdicts}"
            if rank.sycl and any(trial.wrong for trial in trials):
                found.fault(text, "choose kernels torch")
            else:
                found.good(text)
    for host, rank in facts.firsts(lambda rank: rank.sums):
        for dtype, kernel in rank.sums.items():
            slow, text = kernel.startswith("in chunks"), f"{host}: attention in parts in {dtype}: {kernel}"
            found.add(WARNING if slow else GOOD, text, "prefer ring 1 and chunks 1, or a newer torch" if slow else "")
    found.otherwise(NOTE, "torch's operations on the CPU: nothing to compare them with")


def check_computing(facts: Facts, found: Findings) -> None:
    """Report devices with wrong attention or wrong strided copies, or with operations that differ when repeated."""
    tried, right = [(one.device_trial, one.rank) for one in facts.ranks if one.device_trial], ""
    for some in by_key(((one.copies, one.wandering, one.error > 1), (one, rank)) for one, rank in tried).values():
        trials, ranks = zip(*some, strict=True)
        trial = DeviceTrial.merged(trials)
        text = f"{trial} on {name_ranks(ranks)}"
        if trial.copies:
            found.fault(text, "use a newer driver, or --device cpu")
        elif trial.error > 1 or trial.wandering:
            found.warning(text, "use another torch or driver: runs are slower, or differ in their last bits")
        else:
            right = text
    if right:
        found.otherwise(GOOD, right)
    cost = max((rank.deterministic_cost for rank in facts.ranks if not rank.on_cpu), default=1.0)
    if cost > COSTLY:
        found.note(f"products in one order take {cost:.2f} times as long: --no_deterministic does without")


def _difference(trial: KernelTrial) -> str:
    """Return in words how much an operation's results differ in one trial."""
    told = "equal" if trial.difference == 0 else f"differs by up to {trial.difference:.2g}"
    return f"{told} ({trial.wrong})" if trial.wrong else told


CHECKS: dict[str, Callable[[Facts, Findings], None]] = {
    "versions": check_versions,
    "launch": check_launch,
    "mpi": check_mpi,
    "tiles": check_tiles,
    "cores": check_cores,
    "nics": check_nics,
    "planes": check_planes,
    "all-to-all": check_all_to_all,
    "messages": check_messages,
    "overlap": check_overlap,
    "order": check_order,
    "host": check_host,
    "links": check_links,
    "settings": check_settings,
    "memory": check_memory,
    "sycl": check_sycl,
    "kernels": check_kernels,
    "computing": check_computing,
}


def examine(facts: Facts) -> list[Finding]:
    """Run all checks, and return their findings. If the trials were ended early, only the checks that are still
    meaningful run."""
    findings: list[Finding] = []
    for name in ("versions", "order") if facts.stopped else CHECKS:
        found = Findings()
        CHECKS[name](facts, found)
        findings += [Finding(name, *one) for one in found]
    return findings


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return True if no finding is a fault."""
    return all(finding.severity != FAULT for finding in findings)
