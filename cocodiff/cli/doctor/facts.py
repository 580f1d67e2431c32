"""Facts about a job, as plain data: gathered by `gather.py` and `trials.py`, judged by the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partialmethod

from cocodiff.comm.launch import EMULATED
from cocodiff.kernels.trial import KernelTrial
from cocodiff.text_table import spans
from cocodiff.topology.machine import Topology

FAULT, WARNING, NOTE, GOOD = "fault", "warning", "note", "ok"
BLOCKED_S = 2e-5  # of the host, for a message: a library that only queues it takes less
MEASURED = "measured rates"  # what a plane map is from that no system told


@dataclass(frozen=True)
class Finding:
    """One result of a check. remedy: what to do, "" where nothing is to be done."""

    check: str
    severity: str
    text: str
    remedy: str = ""


class Findings(list[Finding]):
    """The findings of one check."""

    def __init__(self, check: str) -> None:
        super().__init__()
        self._check = check

    def add(self, severity: str, text: str, remedy: str = "") -> None:
        self.append(Finding(self._check, severity, text, remedy))

    fault = partialmethod(add, FAULT)
    warning = partialmethod(add, WARNING)
    note = partialmethod(add, NOTE)
    good = partialmethod(add, GOOD)


@dataclass(frozen=True)
class Card:
    """A GPU of a host. sockets: those whose cores are near it."""

    address: str
    sockets: tuple[int, ...]


@dataclass(frozen=True)
class Nic:
    name: str
    sockets: tuple[int, ...]


@dataclass(frozen=True)
class RankFacts:
    """One rank's own view.

    local_size: what the launcher says, None where it does not.
    versions: package -> version, None where it is not installed; the MPI library's under "mpi".
    environment: the variables that matter (`gather.VARIABLES`).
    library: what carries messages: mpi, mpi-rma, gloo, xccl, ccl, nccl, "host memory over gloo"; "none" for a rank
    alone. drawback: what is wrong with the transport that was asked for.
    device: "cpu", "xpu:3"; of its kind there are tiles_seen. device_name: as its driver has it, "" on a CPU.
    tile: what tells tiles of a host apart, "" on a CPU.
    card: of this rank's tile, None where the system does not tell. cores and sockets: those that this rank may use.
    host_cores: all cores of the host. free and total: bytes of memory; of a tile that ranks share, this one's part.
    sycl: what SYCL kernels run on, or "" with the reason in `no_sycl`; both "" where this rank did not look.
    kernel_trials: operations of SYCL against torch's; where there is none, an accelerator's torch against the CPU's.
    mpi_library: path of the libmpi that is loaded; system_mpi: an mpiexec of no Python environment; python_prefix: the
    environment's folder, where the one of PyPI would lie. no_shared_memory: of the host, for MPI, and the remedy.
    """

    rank: int
    host: str
    local_rank: int
    launcher: str
    local_size: int | None
    world: int | None
    versions: dict[str, str | None]
    environment: dict[str, str]
    library: str
    device: str
    tile: str
    tiles_seen: int
    card: Card | None
    cores: tuple[int, ...]
    sockets: tuple[int, ...]
    host_cores: int
    nics: tuple[Nic, ...]
    free: int | None
    total: int | None
    kernels: str
    sycl: str
    no_sycl: str
    mpi_library: str
    system_mpi: str
    python_prefix: str
    kernel_trials: tuple[KernelTrial, ...] = ()
    device_name: str = ""
    drawback: str = ""
    no_shared_memory: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def shares_memory(self) -> bool:
        """Whether this host's ranks have no links between them but its memory."""
        return self.on_cpu and EMULATED not in self.environment


@dataclass(frozen=True)
class AllToAll:
    """A trial of one all-to-all. wrong: a line for each rank that received something else than was sent."""

    how: str
    dtype: str
    bytes: int
    seconds: float
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overlap:
    """Seconds of communication alone, of other work alone and of both at once, of the slowest rank."""

    communication_s: float
    work_s: float
    both_s: float

    @property
    def hidden(self) -> float:
        """The part of the shorter one that went on behind the longer one, from 0 to 1."""
        shorter = min(self.communication_s, self.work_s)
        return max(0.0, min(1.0, (self.communication_s + self.work_s - self.both_s) / shorter)) if shorter else 1.0


@dataclass(frozen=True)
class Issue:
    """A call that sends and receives so many messages of so many bytes in all each way: seconds until it returns, and
    until they are through, of the slowest rank."""

    call: str
    bytes: int
    messages: int
    returns_s: float
    complete_s: float

    @property
    def blocks(self) -> bool:
        """Whether the host waits for the library: for each message, or for most of the time that they take."""
        return self.returns_s > max(BLOCKED_S * self.messages, self.complete_s / 2)


@dataclass(frozen=True)
class PlaneMap:
    """The planes of a node's tiles, in rank order, as found by `how`; numbers carry no meaning but equality.

    planes None: nothing was found, and `why` tells. broken: links that are there but not healthy. first: the node's
    first rank.
    """

    how: str
    planes: tuple[int, ...] | None
    why: str = ""
    broken: tuple[str, ...] = ()
    first: int = 0


@dataclass(frozen=True)
class Facts:
    """A job. order: rounds of messages between busy streams, all of them right; None where there are no streams.
    planes: of each node, by its host's name. needed: bytes per rank of the model asked about, or None. stopped: why the
    trials were not gone on with; then `ranks` is the first one alone."""

    ranks: Sequence[RankFacts]
    topology: Topology
    alltoalls: Sequence[AllToAll] = ()
    overlap: Overlap | None = None
    order: int | None = None
    issues: Sequence[Issue] = ()
    planes: dict[str, PlaneMap] = field(default_factory=dict)
    pair_gb_s: Sequence[Sequence[float]] = ()
    needed: int | None = None
    stopped: str = ""

    @property
    def blocked_us(self) -> float:
        """Microseconds that each message blocks the host, whatever its size: the least of all calls."""
        return min((one.returns_s / one.messages for one in self.issues), default=0.0) * 1e6

    def hosts(self) -> dict[str, list[RankFacts]]:
        found: dict[str, list[RankFacts]] = {}
        for rank in self.ranks:
            found.setdefault(rank.host, []).append(rank)
        return found


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-5", "ranks 0-2, 7"."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {', '.join(spans(ranks))}"


def by_value(ranks: Sequence[RankFacts], values: Sequence[str]) -> str:
    """ "A on ranks 0-3; B on rank 4"."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank.rank)
    return "; ".join(f"{value} on {name_ranks(where)}" for value, where in groups.items())


def name_nodes(hosts: Sequence[str], nodes: Sequence[int]) -> list[str]:
    """A name for every rank's node: its host's, with a number where one host has ranks of several (an emulation)."""
    nodes_of: dict[str, set[int]] = {}
    for host, node in zip(hosts, nodes, strict=False):
        nodes_of.setdefault(host, set()).add(node)
    return [
        host if len(nodes_of[host]) == 1 else f"{host}, node {node}" for host, node in zip(hosts, nodes, strict=False)
    ]
