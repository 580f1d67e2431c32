"""Every fault that doctor knows, on a job that is healthy but for it: twelve ranks of one Aurora node, as facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import topology_of

from cocodiff.cli.doctor import facts
from cocodiff.cli.doctor.checks import (
    CHECKS,
    FAULT,
    GOOD,
    LEAST,
    NOTE,
    WARNING,
    Finding,
    examine,
    is_healthy,
    numbers,
    planes_of,
    spelled,
)
from cocodiff.cli.doctor.facts import AllToAll, Card, Facts, Issue, Nic, Overlap, RankFacts, name_ranks
from cocodiff.cli.doctor.trials import READ_EARLY
from cocodiff.kernels.trial import KernelTrial

ROOT = Path(__file__).parents[2]
GIB = 2**30
AURORA = topology_of("aurora", 12)
VERSIONS: dict[str, str | None] = {
    "cocodiff": "0.1.0",
    "python": "3.12.1",
    "torch": "2.10.0a0+git5",
    "diffusers": "0.42.1",
    "transformers": "5.1.0",
    "mpi4py": "4.1.2",
    "impi-rt": None,
    "intel_extension_for_pytorch": "2.10.10+xpu",
    "mpi": "MPICH Version: 5.0",
}
LINES = Path(__file__).with_name("aurora.env").read_text().splitlines()
ENVIRONMENT = dict(line.split("=", 1) for line in LINES if not line.startswith("#"))
NICS = tuple(Nic(f"cxi{n}", (n // 4,)) for n in range(8))
COLOR = "card:{0,1},{2,3},{4,5},{6,7},{8,9},{10,11};plane:{0,3,4,6,8,11},{1,2,5,7,9,10}"


def healthy_rank(rank: int, host: str = "x1") -> RankFacts:
    local = rank % 12
    socket = local // 6
    first = 4 + 4 * local if local < 6 else 56 + 4 * (local - 6)
    return RankFacts(
        rank=rank,
        host=host,
        local_rank=local,
        launcher="mpi",
        local_size=12,
        world=12,
        versions=dict(VERSIONS),
        environment=dict(ENVIRONMENT),
        library="xccl",
        device=f"xpu:{local}",
        tile=f"uuid-{local}",
        tiles_seen=12,
        card=Card(f"0000:{local // 2:02x}:00.0", (socket,)),
        cores=tuple(range(first, first + 4)),
        sockets=(socket,),
        host_cores=208,
        nics=NICS,
        free=60 * GIB,
        total=64 * GIB,
        kernels="auto",
        sycl="",
        no_sycl="",
        mpi_library="/opt/mpich/lib/libmpi.so.12",
        system_mpi="/opt/mpich/bin/mpiexec",
        python_prefix="/venv",
    )


def healthy_job() -> Facts:
    ranks = [healthy_rank(rank) for rank in range(12)]
    ranks[0] = replace(ranks[0], sycl="Intel(R) Data Center GPU Max 1550 (level_zero)")
    return Facts(
        ranks,
        AURORA,
        [AllToAll("float32", 64, 1e-3)],
        Overlap(1.0, 1.0, 1.05),
        6,
        [Issue("all-to-all", 4096, 22, 1e-4, 2e-4), Issue("all-to-all", 2**24, 22, 1e-4, 1e-2)],
    )


def change(job: Facts, rank: int, **values: Any) -> Facts:
    """The job with some facts of one rank changed; rank -1: of every rank."""
    return replace(job, ranks=[replace(r, **values) if rank in (-1, r.rank) else r for r in job.ranks])


def version(job: Facts, rank: int, **values: str | None) -> Facts:
    named = {key.replace("_", "-") if key == "impi_rt" else key: value for key, value in values.items()}
    return change(job, rank, versions=VERSIONS | named)


def setting(job: Facts, rank: int = -1, **values: str) -> Facts:
    return change(job, rank, environment=ENVIRONMENT | values)


def wrong_trial(job: Facts, at_once: int = 1) -> Facts:
    bad = AllToAll("bfloat16", 4096, 1e-3, ("rank 3 got other numbers than were sent from [5]",), at_once)
    return replace(job, alltoalls=[*job.alltoalls, bad])


def two_hosts(job: Facts, first: Callable[[int], bool]) -> Facts:
    topology = topology_of("aurora", 24)
    ranks = [healthy_rank(rank, "x1" if first(rank) else "x2") for rank in range(24)]
    return replace(job, ranks=[replace(rank, world=24) for rank in ranks], topology=topology)


def on_cpu(job: Facts, **environment: str) -> Facts:
    return change(
        job,
        -1,
        device="cpu",
        tile="",
        tiles_seen=0,
        card=None,
        library="mpi",
        nics=(),
        cores=(0, 1),
        host_cores=4,
        sycl="",
        no_sycl="no runtime",
        environment=environment,
    )


CASES: dict[str, tuple[Callable[[Facts], Facts], str, str, str, str]] = {
    "old torch": (lambda j: version(j, -1, torch="2.5.1"), FAULT, "versions", "torch 2.5.1 is too old", ">=2.8"),
    "no diffusers": (lambda j: version(j, -1, diffusers=None), FAULT, "versions", "diffusers is not installed", "pip"),
    "mixed torch": (
        lambda j: version(j, 3, torch="2.11.0"),
        FAULT,
        "versions",
        "torch differs: .*on rank 3",
        "full path",
    ),
    "IPEX of another": (
        lambda j: version(j, -1, intel_extension_for_pytorch="2.8.10"),
        WARNING,
        "versions",
        "IPEX 2.8.10",
        "uninstall",
    ),
    "foreign MPI": (lambda j: change(j, -1, world=144), FAULT, "launch", "started 144 .* found 12", "mpiexec that"),
    "uneven hosts": (lambda j: two_hosts(j, lambda r: r < 11), FAULT, "launch", "x1 has 11 ranks", "--ppn"),
    "round-robin": (lambda j: two_hosts(j, lambda r: r % 2 == 0), FAULT, "launch", "belong to 2 nodes", "node by node"),
    "too many hosts": (
        lambda j: replace(j, ranks=[replace(r, host=f"x{r.rank // 6}", local_size=6) for r in j.ranks]),
        FAULT,
        "launch",
        "2 hosts, .* 1 node",
        "12 ranks a node",
    ),
    "impi-rt loaded": (
        lambda j: change(version(j, -1, impi_rt="2021.17.2"), -1, mpi_library="/venv/lib/libmpi.so.12"),
        FAULT,
        "mpi",
        "impi-rt 2021.17.2 of PyPI .* /venv/lib/libmpi.so.12 is loaded",
        "uninstall impi-rt",
    ),
    "impi-rt around": (
        lambda j: change(version(j, -1, impi_rt="2021.17.2"), -1, launcher="torchrun"),
        WARNING,
        "mpi",
        "beside",
        "impi-rt",
    ),
    "too little shared memory": (
        lambda j: change(
            j, 3, no_shared_memory="/dev/shm has 64 KiB free, and MPI needs 6144: enlarge it (docker ...)"
        ),
        WARNING,
        "mpi",
        "^/dev/shm has 64 KiB free, and MPI needs 6144$",
        "^enlarge it",
    ),
    "no windows": (
        lambda j: change(j, -1, library="mpi", drawback="no unified memory model; messages go by mpi"),
        FAULT,
        "mpi",
        "mpi-rma: no unified memory model",
        "--transport mpi$",
    ),
    "no mpi4py": (lambda j: version(j, -1, mpi4py=None), FAULT, "mpi", "mpi4py is not installed", "pip install mpi4py"),
    "a tile for two": (
        lambda j: change(j, 5, tile="uuid-4"),
        FAULT,
        "tiles",
        "ranks 4-5 share tile uuid-4",
        "gpu_tile_compact",
    ),
    "composite": (
        lambda j: change(setting(j, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE"), -1, tiles_seen=6),
        FAULT,
        "tiles",
        "sees 6 devices where .* 12 tiles",
        "HIERARCHY=FLAT",
    ),
    "mixed devices": (lambda j: change(j, 2, device="cpu"), FAULT, "tiles", "different devices", "--device"),
    "far from its card": (
        lambda j: change(j, 7, sockets=(0,), cores=(50,)),
        FAULT,
        "cores",
        "rank 7 runs on socket 0 .* socket 1",
        "cpu-bind",
    ),
    "unbound": (
        lambda j: change(j, -1, sockets=(0, 1), cores=tuple(range(208))),
        WARNING,
        "cores",
        "ranks 0-11 may wander",
        "cpu-bind",
    ),
    "shared cores": (lambda j: change(j, 1, cores=(4, 5, 6, 7)), WARNING, "cores", "ranks 0-1 share cores", "cpu-bind"),
    "workers on a rank's core": (
        lambda j: setting(j, CCL_WORKER_AFFINITY="4,42"),
        WARNING,
        "cores",
        "workers on cores of rank 0",
        "unset",
    ),
    "a NIC that is not there": (
        lambda j: setting(j, 3, FI_CXI_DEVICE_NAME="cxi9"),
        FAULT,
        "nics",
        "of rank 3 names cxi9; x1 has cxi0, ",
        "unset",
    ),
    "a NIC far away": (
        lambda j: setting(j, 3, FI_CXI_DEVICE_NAME="cxi4"),
        FAULT,
        "nics",
        "rank 3 .* socket 0, its NIC cxi4 .* socket 1",
        "unset",
    ),
    "fewer NICs": (lambda j: change(j, -1, nics=NICS[:7]), WARNING, "nics", "7 NICs on x1, .* 8", "links.nics"),
    "other planes": (
        lambda j: setting(j, CCL_TOPO_COLOR="plane:{0,2,4,6,8,10},{1,3,5,7,9,11}"),
        FAULT,
        "planes",
        r"has planes \{0,2,4,6,8,10\},.* has \{0,3,4,6,8,11\}",
        r"planes: \[0, 1, 0, 1",
    ),
    "too few tiles": (
        lambda j: setting(j, CCL_TOPO_COLOR="plane:{0},{1}"),
        FAULT,
        "planes",
        "2 tiles, 12 ranks",
        "start 2 ranks",
    ),
    "no planes in a colour": (
        lambda j: setting(j, CCL_TOPO_COLOR="plane:{a}"),
        WARNING,
        "planes",
        "names no plane for each",
        "CCL_TOPO_COLOR",
    ),
    "wrong numbers": (wrong_trial, FAULT, "all-to-all", r"wrong for bfloat16 of 4096 .* rank 3 .* \[5\]", "transport"),
    "wrong numbers of overlapping batches": (
        lambda j: wrong_trial(j, 12),
        FAULT,
        "all-to-all",
        r"messages of overlapping calls are wrong for bfloat16 of 4096 ",
        "--messages alltoall",
    ),
    "nothing hidden": (
        lambda j: replace(j, overlap=Overlap(1.0, 1.0, 1.95)),
        FAULT,
        "overlap",
        "5% of the messages hidden",
        "settings",
    ),
    "CCL_OP_SYNC": (lambda j: setting(j, CCL_OP_SYNC="1"), FAULT, "settings", "CCL_OP_SYNC=1", "unset CCL_OP_SYNC"),
    "safe mode": (
        lambda j: setting(j, CCL_OP_SYNC="1", CCL_ATL_SYNC_COLL="1"),
        WARNING,
        "settings",
        "CCL_OP_SYNC=1 makes every oneCCL call wait",
        "SAFE",
    ),
    "ofi": (
        lambda j: setting(j, CCL_ATL_TRANSPORT="ofi"),
        FAULT,
        "settings",
        "ofi makes oneCCL synchronous",
        "TRANSPORT=mpi",
    ),
    "settings for another library": (
        lambda j: change(setting(j, CCL_OP_SYNC="1"), -1, library="gloo"),
        WARNING,
        "settings",
        "gloo does not read",
        "unset",
    ),
    "oneCCL without PALS": (
        lambda j: setting(j, CCL_PROCESS_LAUNCHER="none"),
        WARNING,
        "settings",
        "not told that PALS",
        "pmix",
    ),
    "no room": (
        lambda j: change(j, 4, free=GIB),
        FAULT,
        "memory",
        "1.00 GiB free on rank 4.* needs 4.00",
        "fewer ranks",
    ),
    "no room for a model": (
        lambda j: replace(j, needed=80 * GIB),
        FAULT,
        "memory",
        "the model needs 80.00 GiB on ranks 0-11",
        "plan",
    ),
    "a tile in use": (lambda j: change(j, 4, free=40 * GIB), WARNING, "memory", "tiles of rank 4", "xpu-smi"),
    "SYCL was asked for": (
        lambda j: change(j, 0, sycl="", no_sycl="no compiler", kernels="sycl"),
        FAULT,
        "sycl",
        "but no compiler",
        "build",
    ),
    "wrong kernels": (
        lambda j: change(j, 0, kernel_trials=(KernelTrial("l1_score", "float32", "[1, 70]", 0.5, "differs by more"),)),
        FAULT,
        "kernels",
        r"l1_score \[1, 70\] on Intel.* against torch's: differs by up to 0.5 \(.*\) in float32",
        "kernels torch",
    ),
    "no kernel that tells the sums": (
        lambda j: change(j, 0, sums={"bfloat16": "in chunks of 8 Mi scores (overrideable: sums of shape None)"}),
        WARNING,
        "kernels",
        "attention in parts in bfloat16: in chunks of 8 Mi scores",
        "prefer ring 1",
    ),
    "messages without order": (
        lambda j: replace(j, order=None, stopped=f"rank 1 failed: {READ_EARLY}"),
        FAULT,
        "order",
        "rank 1 failed: .* read on another stream before it is there",
        "another --transport",
    ),
    "a host that is blocked": (
        lambda j: replace(j, issues=[Issue("all-to-all", size, 22, 9e-4, 1e-3) for size in (4096, 2**20)]),
        WARNING,
        "host",
        "4 KiB returns after 900 us, complete after 1000 us: the host is blocked; 1 MiB",
        "blocked_us: 40.9 ",
    ),
    "no SYCL": (lambda j: change(j, 0, sycl="", no_sycl="no compiler"), WARNING, "sycl", "torch's operations", "build"),
}


def test_a_healthy_job_has_no_fault_and_no_warning():
    findings = examine(healthy_job())
    assert [f for f in findings if f.severity in (FAULT, WARNING)] == [] and is_healthy(findings)
    assert len({finding.check for finding in findings}) == len(CHECKS)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_with_its_remedy(name):
    make, severity, check, text, remedy = CASES[name]
    findings = examine(make(healthy_job()))
    found = [f for f in findings if f.check == check and f.severity == severity and re.search(text, f.text)]
    assert found, [(f.check, f.severity, f.text) for f in findings if f.severity in (FAULT, WARNING)]
    assert re.search(remedy, found[0].remedy), found[0].remedy
    assert is_healthy(findings) == (severity != FAULT)
    assert all(f.remedy and "\n" not in f.text for f in findings if f.severity in (FAULT, WARNING))


def test_all_checks_have_a_simulated_fault_or_warning():
    simulated = {case[2] for case in CASES.values()}
    assert simulated == {finding.check for finding in examine(healthy_job())}


def test_a_cpu_world_has_notes_where_gpus_have_faults():
    job = on_cpu(replace(healthy_job(), overlap=Overlap(1.0, 1.0, 2.0)))
    findings = examine(job)
    assert is_healthy(findings)
    assert [f.check for f in findings if f.severity == WARNING] == ["overlap"]


def test_planes_are_told_and_compared_with_the_colour():
    wanted = "{0,3,4,6,8,11},{1,2,5,7,9,10}"
    for job, severity in ((healthy_job(), NOTE), (setting(healthy_job(), CCL_TOPO_COLOR=COLOR), GOOD)):
        (found,) = [f for f in examine(job) if f.check == "planes"]
        assert found.severity == severity and wanted in found.text


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.permutations(range(4)))
def test_numbers_of_planes_carry_no_meaning(planes, names):
    assert spelled(planes) == spelled([names[plane] for plane in planes])
    assert spelled(planes_of("card:{0};plane:" + spelled(planes))) == spelled(planes)


@pytest.mark.parametrize("color", ["", "card:{0,1}", "plane:{0,2}", "plane:{1,2}", "plane:{a}", "plane:{}"])
def test_colours_that_make_no_sense(color):
    with pytest.raises(ValueError, match="names no plane"):
        planes_of(color)


def test_ranks_may_share_a_tile_where_messages_pass_through_host_memory():
    job = change(change(healthy_job(), 5, tile="uuid-4"), -1, library="host memory over mpi")
    findings = examine(job)
    assert is_healthy(findings)
    assert "ranks 4-5 share tile uuid-4 of x1" in [f.text for f in findings if f.check == "tiles"]


def test_least_versions_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text()
    for package, least in LEAST.items():
        assert f'"{package}>={".".join(map(str, least))}"' in text


def test_numbers_of_versions_and_names_of_ranks():
    assert numbers("2.10.0a0+git1") == (2, 10, 0) and numbers("") == ()
    assert name_ranks([3]) == "rank 3" and name_ranks([7, 0, 1, 2]) == "ranks 0-2, 7"
    assert Finding("a", FAULT, "b").remedy == ""


@pytest.mark.parametrize(
    ("selector", "found"),
    [(None, True), ("*:gpu", True), ("level_zero:0,1", False), ("opencl:gpu;level_zero:1", False)],
)
def test_cards_are_known_under_auroras_module(monkeypatch, tmp_path, selector, found):
    """Which always selects all GPUs: a rank on the wrong socket was never found there."""
    monkeypatch.setattr(facts, "SYS", tmp_path)
    monkeypatch.setattr(facts, "tiles_seen", lambda device: 4)
    for card, cores in enumerate(("0-1", "2-3")):
        folder = tmp_path / f"bus/pci/devices/0000:{card}8:00.0"
        folder.mkdir(parents=True)
        for name, text in {"vendor": facts.INTEL, "class": f"{facts.DISPLAY}8000", "local_cpulist": cores}.items():
            (folder / name).write_text(text)
    for core in range(4):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(str(core // 2))
    monkeypatch.setattr(facts.os, "environ", ENVIRONMENT if selector is None else {"ONEAPI_DEVICE_SELECTOR": selector})
    assert facts.card_of(torch.device("xpu", 3)) == (Card("0000:18:00.0", (1,)) if found else None)
