"""Faults that doctor finds, each on a job that is healthy but for it: twelve ranks of one Aurora node, as facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import topology_of

from cocodiff.attention.trial import DeviceTrial
from cocodiff.cli.doctor import checks, facts, trials
from cocodiff.cli.doctor.checks import CHECKS, FAULT, GOOD, WARNING, Finding, examine, is_healthy
from cocodiff.cli.doctor.command import table
from cocodiff.cli.doctor.facts import AllToAllTrial, CallTiming, Card, Facts, LinkTrial, Nic, Overlap, RankFacts
from cocodiff.config.config import load_machine, read_yaml
from cocodiff.kernels.trial import KernelTrial
from cocodiff.planner.traffic import machine_file

ROOT = Path(__file__).parents[2]
GIB = 2**30
PLANES = "plane:{0,3,4,6,8,11},{1,2,5,7,9,10}"
NODES = read_yaml(Path(__file__).with_name("nodes.yaml"))
NICS = tuple(Nic(f"cxi{n}", (n // 4,)) for n in range(8))
Change = Callable[[Facts], Facts]
LINKS = [LinkTrial("sibling", 2**26, 2, 1e-3), LinkTrial("plane", 2**20, 10, 4e-4), LinkTrial("plane", 2**26, 10, 7e-3)]
# Facts of which nodes.yaml has the arguments, one or several.
ONE, SEVERAL = {"overlap": Overlap, "device_trial": DeviceTrial}, {"links": LinkTrial, "issues": CallTiming}
SEVERAL |= {"alltoalls": AllToAllTrial, "kernel_trials": KernelTrial, "nics": Nic}


def healthy_rank(rank: int, host: str) -> RankFacts:
    local = rank % 12
    socket = local // 6
    first = 4 + 4 * local if local < 6 else 56 + 4 * (local - 6)
    own = {"rank": rank, "host": host, "local_rank": local, "tile": f"uuid-{local}", "nics": NICS}
    own |= {"card": Card(f"0000:{local // 2:02x}:00.0", (socket,)), "cores": tuple(range(first, first + 4))}
    own |= {"device_trial": DeviceTrial("SDPA's overrideable", 0.1)}
    own |= {"sockets": (socket,), "device": f"xpu:{local}"} | ({"sycl": ""} if local else {})
    return RankFacts(**NODES["aurora"] | own)


def healthy_job(world: int = 12, host_of: Callable[[int], int] = lambda rank: rank // 12) -> Facts:
    return Facts(
        [healthy_rank(rank, f"x{host_of(rank) + 1}") for rank in range(world)],
        topology_of("aurora", world),
        [AllToAllTrial("float32", 64, 1e-3)],
        Overlap(1.0, 1.0, 1.05),
        6,
        [CallTiming("all-to-all", 4096, 22, 1e-4, 2e-4), CallTiming("all-to-all", 2**24, 22, 1e-4, 1e-2)],
        LINKS,
        pair=(["met", []], []),
    )


def job(**values: Any) -> Change:
    return lambda job: replace(job, **values)


def ranks(*which: int, **values: Any) -> Change:
    """Other facts of some ranks; where none is named, of all. What is a dictionary is added to theirs."""

    def changed(rank: RankFacts) -> RankFacts:
        if which and rank.rank not in which:
            return rank
        own = {name: getattr(rank, name) | new if isinstance(new, dict) else new for name, new in values.items()}
        return replace(rank, **own)

    return lambda job: replace(job, ranks=[*map(changed, job.ranks)])


def setting(*which: int, **values: str) -> Change:
    return ranks(*which, environment=values)


def both(*changes: Change) -> Change:
    return lambda job: reduce(lambda job, change: change(job), changes, job)


def fact(name: str, value: Any) -> Any:
    if name in SEVERAL:
        return [SEVERAL[name](*map(as_tuple, one)) for one in value]
    return ONE[name](*map(as_tuple, value)) if name in ONE else as_tuple(value)


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def change_of(of_whom: str, values: dict[str, Any]) -> Change:
    """Read a change of facts of the `job`, of `all` ranks, or of some, as `rank 4, 6`."""
    values = {name: fact(name, value) for name, value in values.items()}
    return job(**values) if of_whom == "job" else ranks(*map(int, re.findall(r"\d+", of_whom)), **values)


def changes_of(name: str) -> dict[str, Change]:
    return {name: both(*starmap(change_of, told.items())) for name, told in NODES[name].items()}


def two_hosts(host_of: Callable[[int], int]) -> Change:
    return lambda _: healthy_job(24, host_of)


ON_CPU = ranks(**NODES["cpu"])
BLOCKED = [CallTiming("all-to-all", size, 22, 9e-4, 1e-3) for size in (4096, 2**20)]

# What is wrong, by its name; what is told of each stands in the snapshots.
WRONG: dict[str, Change] = {
    **changes_of("wrong"),
    "unbound": ranks(sockets=(0, 1), cores=tuple(range(208))),
    "uneven hosts": two_hosts(lambda rank: rank // 11 % 2),
    "round-robin": two_hosts(lambda rank: rank % 2),
    "more hosts than nodes": both(ranks(local_size=6), *(ranks(*range(n, n + 6), host=f"x{n // 6}") for n in (0, 6))),
    "fewer NICs": ranks(nics=NICS[:7]),
    "no NIC of several nodes": both(two_hosts(lambda rank: rank // 12), ranks(nics=())),
    **changes_of("tried"),
}


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity in (FAULT, WARNING)]


def test_lines_of_all_that_can_be_wrong(snapshot: Callable[[str], None]) -> None:
    """The severity and the check of each, its values and the remedy; a fault makes a job unhealthy, which no warning
    does; and every check can find something wrong."""
    told, found_by = list[str](), set[str]()
    for name, change in WRONG.items():
        findings = examine(change(healthy_job()))
        found = wrong(findings)
        assert found and is_healthy(findings) is all(one.severity == WARNING for one in found), name
        assert {one.check for one in found}.isdisjoint(one.check for one in findings if one.severity == GOOD), name
        assert name == "memory that nobody knows" or all(one.remedy for one in found), name
        told += [f"{name}:", *table(found)]
        found_by |= {one.check for one in found}
    assert found_by == CHECKS.keys()
    snapshot("\n".join(told))


@pytest.mark.parametrize(
    "job",
    [
        healthy_job(),
        setting(CCL_TOPO_COLOR=f"card:{{0,1}},{{2,3}};{PLANES}")(healthy_job(24)),
        both(ON_CPU, job(overlap=Overlap(1.0, 1.0, 2.0), issues=BLOCKED, pair=([], [])))(healthy_job()),
        Facts([replace(healthy_rank(0, "x1"), launcher="alone", local_size=None)], topology_of("aurora", 12)),
    ],
    ids=["aurora", "two nodes", "cpu", "alone"],
)
def test_reports_of_jobs_without_a_fault(job: Facts, snapshot: Callable[[str], None]) -> None:
    """Every check has its line. On a CPU, where ranks share the cores that copy, poor overlap is a warning alone."""
    findings = examine(job)
    assert is_healthy(findings) and {finding.check for finding in findings} == CHECKS.keys()
    assert {finding.check for finding in wrong(findings)} == ({"overlap"} if job.ranks[0].on_cpu else set())
    snapshot("\n".join(table(findings)))


JUST_ENOUGH: dict[str, Change] = {
    **changes_of("just enough"),
    "a thread of ranks on the same cores": both(ranks(cores=(4, 5)), setting(OMP_NUM_THREADS="1"), ON_CPU),
    "memory of a CPU that grows": both(ON_CPU, setting(PYTORCH_ALLOC_CONF="expandable_segments:True")),
}


@pytest.mark.parametrize("name", NODES["told"])
def test_what_jobs_of_their_own_found_is_told(name: str) -> None:
    """A trial that could not be made is a note with its reason, and what is used all the same."""
    told = NODES["told"][name]
    findings = examine(change_of("job", told["job"])(healthy_job()))
    found = [one for one in findings if one.check == "messages"]
    assert wrong(findings) == [] and [one.severity for one in found] == told["severities"]
    assert [value for value in told["values"].split() if value not in " ".join(one.text for one in found)] == []


@pytest.mark.parametrize("name", JUST_ENOUGH)
def test_what_just_suffices_is_not_wrong(name: str) -> None:
    assert wrong(examine(JUST_ENOUGH[name](healthy_job()))) == []


@pytest.mark.parametrize(("changed", "check", "values"), NODES["second host"])
def test_what_is_wrong_on_the_second_host_alone_is_found_there(changed: Any, check: str, values: str) -> None:
    found = wrong(examine(both(*starmap(change_of, changed.items()))(healthy_job(24))))
    assert {one.check for one in found} == {check} and "x1" not in found[0].text
    assert all(value in found[0].text for value in values.split())


@settings(deadline=None)
@given(strategies.lists(strategies.integers(0, 3), min_size=1, max_size=12), strategies.permutations(range(4)))
def test_numbers_of_planes_carry_no_meaning(planes: list[int], names: list[int]) -> None:
    spelled = checks.spelled(planes)
    assert spelled == checks.spelled([names[plane] for plane in planes])
    assert spelled == checks.spelled(checks.planes_of(f"card:{{0}};plane:{spelled}"))


@pytest.mark.parametrize("color", ["", "card:{0,1}", "plane:{0,2}", "plane:{1,2}", "plane:{a}", "plane:{}"])
def test_colours_that_make_no_sense(color: str) -> None:
    with pytest.raises(ValueError, match="names no plane"):
        checks.planes_of(color)


def test_least_versions_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package, least in checks.LEAST.items():
        assert f'"{package}>={".".join(map(str, least))}"' in text


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /sys of six cores on two sockets, with a card and a NIC near each, and a card that is no GPU."""
    files = {f"devices/system/cpu/cpu{core}/topology/physical_package_id": str(core // 3) for core in range(6)}
    for number, cores in enumerate(("0-1,2", "3,4-5")):
        card = f"bus/pci/devices/0000:{number}8:00.0"
        files |= {f"{card}/vendor": facts.INTEL, f"{card}/class": f"{facts.DISPLAY}8000"}
        files[f"{card}/local_cpulist"] = cores
        files[f"class/cxi/cxi{1 - number}/device/local_cpulist"] = cores
    files["class/cxi/cxi2/device/local_cpulist"] = "1-3"
    files |= {"bus/pci/devices/0000:00:00.0/vendor": facts.INTEL, "bus/pci/devices/0000:00:00.0/class": "0x0c8000"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(facts, "SYS", tmp_path)
    monkeypatch.setattr(facts.os, "environ", {})
    return tmp_path


@pytest.mark.parametrize(("environment", "tiles", "card"), NODES["selected"])
@pytest.mark.usefixtures("host")
def test_a_tiles_card_is_known_unless_variables_select_among_them(monkeypatch, environment, tiles, card):
    monkeypatch.setattr(facts, "tiles_seen", lambda device: tiles)
    monkeypatch.setattr(facts.os, "environ", environment)
    assert facts.card_of(torch.device("xpu", 3)) == (Card(*map(as_tuple, card)) if card else None)


def test_a_host_is_read_from_what_the_system_tells(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name tells tiles of a host apart, also where the driver has no number for each."""
    assert facts.nics() == (Nic("cxi0", (1,)), Nic("cxi1", (0,)), Nic("cxi2", (0, 1)))
    assert (facts.sockets_of([2, 3]), facts.sockets_of([1]), facts.sockets_of([99])) == ((0, 1), (0,), ())
    of_driver = SimpleNamespace(pci_domain_id=0, pci_bus_id=24, pci_device_id=0, total_memory=100, uuid="number")
    monkeypatch.setattr(facts, "properties_of", lambda device: of_driver)
    monkeypatch.setattr(facts, "ranks_on_device", lambda device, ranks: ranks // 2)
    tile = torch.device("cuda", 3)
    assert facts.card_of(tile) == Card("0000:18:00.0", (1,))
    assert facts.total_memory(tile, 4) == 50 and facts.tile_of(tile) == "number"
    monkeypatch.setattr(facts, "properties_of", lambda device: SimpleNamespace())
    monkeypatch.setattr(facts.os, "environ", {"ZE_AFFINITY_MASK": "2", "CUDA_VISIBLE_DEVICES": ""})
    assert facts.card_of(tile) is None and facts.tile_of(tile) == "2/3"


@pytest.mark.parametrize(("cost", "told"), [(1.04, False), (1.3, True)])
def test_what_repeatable_products_cost_is_told_where_it_is_much(cost: float, told: bool) -> None:
    findings = examine(ranks(5, deterministic_cost=cost)(healthy_job()))
    said = [one.text for one in findings if one.check == "computing" and "deterministic" in one.text]
    assert wrong(findings) == [] and [f"{cost:.2f}" in text for text in said] == [True] * told


class Products(TorchDispatchMode):
    """A device without memory on which a product of matrices takes two milliseconds."""

    seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seconds += 0.002 if "mm" in str(func) else 0.0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seconds", [0.002, 0.1])
def test_work_takes_as_long_as_is_meant(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "synchronise", lambda device: None)
    with Products() as device:
        monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: device.seconds))
        work = trials.work_of(torch.device("meta"), seconds)
        began = device.seconds
        work()
    assert device.seconds - began == pytest.approx(seconds)


@pytest.mark.parametrize(("tflop_s", "peak", "share"), [(103.5, 207, 0.5), (256, 256, 1)])
def test_the_machines_file_has_what_was_measured(tmp_path, tflop_s, peak, share):
    """The slowest rank's rates, and a peak that products exceed; what is measured is a belief no longer."""
    rates = {"bf16_tflop_s": tflop_s, "launch_us": 7.0, "wait_us": 30.0}
    slow = ranks(5, rates={"bf16_tflop_s": tflop_s, "launch_us": 9.0})
    faster = ranks(3, rates={"bf16_tflop_s": 2 * tflop_s, "wait_us": 20.0})
    measured = job(overlap=Overlap(1.0, 2.0, 2.6), issues=BLOCKED, links=())
    machine = both(both(ranks(rates=rates), slow), both(faster, measured))(healthy_job()).machine()
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(machine_file(machine), sort_keys=False))
    assert load_machine(str(path)) == machine
    assert (machine.device.bf16_tflop_s, machine.device.launch_us, machine.device.wait_us) == (peak, 9, 30)
    found = machine.device.peak_share, machine.device.overlap_share, machine.links.blocked_us, machine.links.latency_us
    assert found == pytest.approx((share, 0.4, 900 / 22, 100))
    assert machine.links.plane_gb_s == 11.5
    assert {belief.name for belief in machine.beliefs} == {"message_us", "link_share", "forwarding_share"}
    assert ON_CPU(healthy_job()).machine() is None


@pytest.mark.parametrize("share", [1.5, 0.4])
def test_the_machines_file_has_the_share_of_rates_that_an_all_to_all_reached(share):
    """Of the largest one, on a node of Aurora: two blocks on each Xe Link, and for each message the host's wait. Where
    waits alone take as long, nothing is known of the links."""
    nominal_s = 2 * 2**24 / 12 / 11.5e9
    waits = [replace(one, returns_s=22e-6, complete_s=122e-6) for one in BLOCKED]
    largest = CallTiming("all-to-all", 2**24, 22, 22e-6, 122e-6 + nominal_s / share)
    for issues, found in ((waits, 1.0), ([*waits, largest], min(1.0, share))):
        machine = job(issues=issues, links=())(healthy_job()).machine()
        assert machine.links.link_share == pytest.approx(found, rel=1e-3)
        names = {belief.name for belief in machine.beliefs}
        assert ("link_share" in names) == (issues == waits) and "latency_us" not in names


def test_the_machines_file_has_the_rate_of_each_kind_of_link_and_what_all_at_once_reach():
    """The rate of the largest messages, and beside it that of an all-to-all which they fill to a half."""
    trials = [
        LinkTrial(kind, size, messages, 100e-6 + messages * 1e-6 + size / rate / 1e9)
        for kind, rate, messages in (("sibling", 100, 2), ("plane", 8, 10))
        for size, rate in ((2**26, rate), (2**20, rate / 2))
    ]
    waits = [CallTiming("a", 64, 2, 2e-6, 102e-6)]
    whole = CallTiming("all-to-all", 2**24, 22, 22e-6, 122e-6 + 2 * 2**24 / 12 / 8e9 / 0.5)
    machine = job(issues=[*waits, whole], links=trials)(healthy_job()).machine()
    found = machine.links.sibling_gb_s, machine.links.plane_gb_s, machine.links.nic_gb_s, machine.links.link_share
    assert found == pytest.approx((100, 8, 25, 0.5), rel=1e-2)
