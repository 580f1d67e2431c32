"""The facts about a job, as plain data. One rank's facts are gathered here, from the environment, /proc and /sys, and
the packages' own records; messages are tried in `trials.py`. This module does not import diffusers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from cocodiff_sycl.build import keep_remedy

from cocodiff.attention.sums import TRIED, kernel_of
from cocodiff.attention.trial import DeviceTrial
from cocodiff.comm.launch import Launch, emulated, system_mpiexec
from cocodiff.comm.mpi_start import lacking_shared_memory
from cocodiff.config.grouping import by_key
from cocodiff.config.machine import Links, Machine
from cocodiff.config.packages import TAKEN_UP
from cocodiff.config.text_table import spans
from cocodiff.kernels.device import free_memory, ranks_on_device
from cocodiff.kernels.dispatch import path_of, sycl_ops
from cocodiff.kernels.trial import KernelTrial, try_operations
from cocodiff.planner.traffic import PlannedAllToAll
from cocodiff.topology import Topology

# Packages that runs import. Optional ones are tried if they are installed. One that fails is absent for those after it,
# as `hide_broken` makes it in a run.
REQUIRED = (
    *("numpy", "torch", "diffusers", "transformers", "accelerate", "safetensors", "scipy", "skimage", "tifffile"),
    *("PIL", "jinja2", "yaml", "tqdm"),
)
OPTIONAL = ("h5py", "numcodecs", "zarr", "imagecodecs", "matplotlib", "mrcfile", "imageio_ffmpeg", "mpi4py.MPI")
IMPORTS_S = 60.0  # seconds for all of them; on two cores they take 5
LATE = "it did not end within"
TRY_IMPORTS = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    failed = ""
    try:
        import_module(name)
    except BaseException as error:
        failed = " ".join(f"{type(error).__name__}: {error}".split())
        sys.modules[name] = None
    print(f"\\n{name}\\t{failed}", flush=True)
"""
SeparateTrial = tuple[list[Any], list[str]]  # a trial in a job of its own: its reports, and the last other line
BLOCKED_S = 2e-5  # seconds of the host for a message: a library that only queues it takes less
PACKAGES = (
    *("cocodiff", "torch", "diffusers", "transformers", "safetensors", "numpy", "mpi4py"),
    *("impi-rt", "intel_extension_for_pytorch", "oneccl_bind_pt", "intel-sycl-rt"),
)
VARIABLES = re.compile(
    r"(CCL_|FI_|ZE_|ZES_|ONEAPI_DEVICE_SELECTOR|SYCL_|I_MPI_|MPICH_|MPIR_|PALS_|PMI|NCCL_|(PY)?TORCH_|CUDA_|OMP_NUM_THREADS|"
    r"KMP_|MASTER_|COCODIFF_|GLOO_|TORCHELASTIC_RUN_ID|PBS_JOBID|SLURM_JOB_ID|http_proxy|https_proxy)"
)
SECRET = re.compile("SECRET|TOKEN|PASS|KEY|CREDENTIAL|COOKIE", re.IGNORECASE)
SYS = Path("/sys")
INTEL, DISPLAY = "0x8086", "0x03"


@dataclass(frozen=True)
class Card:
    """A GPU of a host, with its place."""

    address: str  # PCI address
    sockets: tuple[int, ...]  # sockets whose cores are near it


@dataclass(frozen=True)
class Nic:
    """A network interface of a host, with its place."""

    name: str  # name of the interface, such as "cxi0"
    sockets: tuple[int, ...]  # sockets whose cores are near it


@dataclass(frozen=True)
class RankFacts:
    """The facts about one rank as its process finds them: launch, packages, device, cores, memory, and trials of
    kernels."""

    rank: int  # number of the rank
    host: str  # name of its host
    local_rank: int  # index of the rank on its host
    launcher: str  # kind of the launch: "alone", "forked", "torchrun" or "mpi"
    local_size: int | None  # the launcher's number of ranks on this node; None if it does not say
    versions: dict[str, str | None]  # by package, None if it is not installed; the MPI library's under "mpi"
    environment: dict[str, str]  # the variables that matter (VARIABLES)
    library: str  # library of messages: mpi, mpi-rma, gloo, xccl, ccl, nccl, "host memory over gloo"; "none" if alone
    device: str  # "cpu", "xpu:3"
    tile: str  # a name that differs between tiles of a host; "" on a CPU
    tiles_seen: int  # devices of its kind that this rank sees
    card: Card | None  # the card of this rank's tile; None if the system does not say
    cores: tuple[int, ...]  # cores that this rank may use
    sockets: tuple[int, ...]  # sockets of these cores
    host_cores: int  # all cores of the host
    nics: tuple[Nic, ...]  # fast network interfaces of the host
    free: int | None  # bytes of free memory; on a shared tile this rank's part
    total: int | None  # bytes of memory; on a shared tile this rank's part
    kernels: str  # the setting, or COCODIFF_KERNELS where that is auto
    sycl: str  # device of the SYCL kernels; "" if there is none, or if this rank did not look
    no_sycl: str  # why there is none; "" if there is one, or if this rank did not look
    mpi_library: str  # path of the libmpi that is loaded
    system_mpi: str  # path of an mpiexec outside of Python environments
    python_prefix: str  # folder of the Python environment, which may have PyPI's MPI
    compiles_again: str = ""  # if every start compiles the SYCL kernels: how to have libsycl keep them
    kernel_trials: tuple[KernelTrial, ...] = ()  # SYCL's operations against torch's; else torch's against the CPU's
    device_name: str = ""  # the driver's name of the device; "" on a CPU
    drawback: str = ""  # why the transport that was asked for is unfit
    no_shared_memory: str = ""  # that the host lacks shared memory for MPI, and the remedy
    sums: dict[str, str] = field(default_factory=dict)  # kernel of attention in parts (`attention.sums`) by dtype
    device_trial: DeviceTrial | None = None  # attention, copies and repeated products at the run's shape
    deterministic_cost: float = 1.0  # factor of time for products that add up in one order
    rates: dict[str, float] = field(default_factory=dict)  # measured values by their names in machine files
    unimported: dict[str, str] = field(default_factory=dict)  # why packages do not import; {} if this rank did not look

    @property
    def on_cpu(self) -> bool:
        """True if this rank computes on the CPU instead of an accelerator."""
        return self.device == "cpu"


@dataclass(frozen=True)
class AllToAllTrial:
    """The result of trying one all-to-all with known content, or several under way together."""

    dtype: str  # name of the messages' dtype
    bytes: int  # bytes of a message to each other rank
    seconds: float  # seconds of the slowest rank
    wrong: tuple[str, ...] = ()  # one line for each rank that received other numbers than were sent
    at_once: int = 1  # number of all-to-alls under way together


@dataclass(frozen=True)
class Overlap:
    """The result of timing messages beside other work, on the slowest rank."""

    communication_s: float  # seconds of messages alone
    work_s: float  # seconds of other work alone
    both_s: float  # seconds of both at once

    @property
    def hidden(self) -> float:
        """The part of the shorter one (messages or work) that was hidden behind the longer one, from 0 to 1."""
        shorter = min(self.communication_s, self.work_s)
        return max(0.0, min(1.0, (self.communication_s + self.work_s - self.both_s) / shorter)) if shorter else 1.0


@dataclass(frozen=True)
class CallTiming:
    """The measured times of a call that sends and receives messages, on the slowest rank."""

    call: str  # name of the call
    bytes: int  # bytes that it sends in all
    messages: int  # number of messages that it sends and receives
    returns_s: float  # seconds until it returns
    complete_s: float  # seconds until its messages have arrived

    @property
    def blocks(self) -> bool:
        """True if the call blocks the host: it takes more than BLOCKED_S for each message, and more than half of the
        time until all have arrived."""
        return self.returns_s > max(BLOCKED_S * self.messages, self.complete_s / 2)


@dataclass(frozen=True)
class LinkTrial:
    """The time of messages over all links of one kind at once, while links of other kinds are idle."""

    kind: str  # "sibling", "plane" or "nic"
    bytes: int  # bytes over the fullest of these links, in each direction
    messages: int  # number of messages that a rank sends and receives
    seconds: float  # of the slowest rank

    def gb_s(self, links: Links) -> float:
        """Return the GB/s of a link, without the waits of messages on a machine with these latencies."""
        waits_s = 1e-6 * (links.latency_us + self.messages * links.blocked_us)
        return self.bytes / max(self.seconds - waits_s, self.seconds / 2) / 1e9


@dataclass(frozen=True)
class Facts:
    """The facts about a job: those of its ranks, and the results of trials of their messages."""

    ranks: Sequence[RankFacts]  # facts about all ranks; about the first one alone if the trials were stopped
    topology: Topology  # places of the ranks, as the machine file has them
    alltoalls: Sequence[AllToAllTrial] = ()  # trials of all-to-alls with known content
    overlap: Overlap | None = None  # times of messages beside other work; None on one rank
    order: int | None = None  # rounds of messages between busy streams, all of them right; None without streams
    issues: Sequence[CallTiming] = ()  # times for which calls that send and receive block the host
    links: Sequence[LinkTrial] = ()  # times of messages over links of one kind
    needed: int | None = None  # bytes that a rank needs for the model given by --model
    stopped: str = ""  # why the trials were ended early
    messages: str = "auto"  # the setting `messages`
    one_by_one: bool = False  # True if messages of a batch are assumed to wait for each other, see `LaneOwner`
    pair: SeparateTrial = ([], [])  # trial of a batch of two messages, see `trials.report_pair`
    op_sync: SeparateTrial = ([], [])  # trial with the other value of CCL_OP_SYNC, see `trials.report_op_sync`

    @property
    def blocked_us(self) -> float:
        """The microseconds for which each message blocks the host, whatever its size: the least of all calls; 0 if none
        was timed."""
        return min((one.returns_s / one.messages for one in self.issues), default=0.0) * 1e6

    def machine(self) -> Machine | None:
        """Return the machine file's machine with the values that were measured here in their places, no longer as
        unmeasured beliefs.

        Return None if CPUs stood in for a machine of accelerators. Rates and times are the slowest rank's; products
        that reach more than the file's peak set a new one.
        """
        machine, of_all = self.topology.machine, [rank.rates for rank in self.ranks if rank.rates]
        if self.ranks[0].on_cpu and machine.device.bf16_tflop_s:
            return None
        measured = {name: max(of_rank[name] for of_rank in of_all) for name in ("launch_us", "wait_us") if of_all}
        if of_all and machine.device.bf16_tflop_s:
            reached = min(of_rank["bf16_tflop_s"] for of_rank in of_all)
            peak = max(reached, machine.device.bf16_tflop_s)
            measured |= {"bf16_tflop_s": peak, "peak_share": reached / peak}
        if self.overlap is not None:
            measured["overlap_share"] = self.overlap.hidden
        if self.issues:
            quick = min(self.issues, key=lambda issue: (issue.messages, issue.bytes, issue.complete_s))
            of_host = quick.messages * self.blocked_us
            measured |= {"blocked_us": self.blocked_us, "latency_us": max(0.0, quick.complete_s * 1e6 - of_host)}
        for name, value in measured.items():
            machine = machine.with_value(name, value)
        for one in sorted(self.links, key=lambda one: one.bytes):  # the largest messages say the rate
            machine = machine.with_value(f"{one.kind}_gb_s", one.gb_s(machine.links))
        to_all = [one for one in self.issues if one.call == "all-to-all"]
        if not to_all or "its links" in machine.missing_rates:
            return machine
        largest = max(to_all, key=lambda one: one.bytes)
        sent = PlannedAllToAll(self.topology, "flat", largest.bytes / 1e6)
        share = sent.link_share(machine, largest.complete_s)
        return machine if share is None else machine.with_value("link_share", share)

    def hosts(self) -> dict[str, list[RankFacts]]:
        """Return the facts about the ranks of each host, by the host's name."""
        return by_key((rank.host, rank) for rank in self.ranks)

    def firsts(self, tells: Callable[[RankFacts], Any]) -> list[tuple[str, RankFacts]]:
        """Return pairs (host, facts about its first rank that meets a condition). Hosts without such a rank are left
        out.

        Args:
            tells: the condition: a function of a rank's facts.
        """
        found = {rank.host: rank for rank in reversed(self.ranks) if tells(rank)}
        return [(host, found[host]) for host in self.hosts() if host in found]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of some ranks as text: "rank 3", "ranks 0-5" or "ranks 0-2, 7"."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {', '.join(spans(ranks))}"


# One rank ------------------------------------------------------------------------------------------------------------


def gather_rank(transport: Any, launch: Launch, kernels: str, look_at_host: bool) -> RankFacts:
    """Return the facts about this rank, without those that need messages.

    Args:
        transport: the rank's transport.
        launch: how this process was started.
        kernels: the setting `kernels`.
        look_at_host: True on one rank of each host, to also compile and try the SYCL kernels and import all packages.
    """
    device, of_host = transport.device, launch.local_size or transport.size
    on_cpu = device.type == "cpu"
    sycl, no_sycl = sycl_path(device, kernels) if look_at_host else ("", "")
    opened = sycl_ops(device) if sycl else None
    tried = try_operations(opened, device) if look_at_host and (opened or not on_cpu) else []
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return RankFacts(
        rank=transport.rank,
        host=socket.gethostname() + (f" node {transport.rank // of_host}" if emulated() else ""),
        local_rank=launch.local_rank,
        launcher=launch.kind,
        local_size=launch.local_size,
        versions=versions(),
        environment=environment(),
        library=getattr(transport, "library", "none") if transport.size > 1 else "none",
        device=str(device),
        tile="" if on_cpu else tile_of(device),
        tiles_seen=tiles_seen(device),
        card=card_of(device),
        cores=cores,
        sockets=sockets_of(cores),
        host_cores=os.cpu_count() or 1,
        nics=nics(),
        free=free_memory(device, of_host),
        total=total_memory(device, of_host),
        kernels=path_of(kernels),
        sycl=sycl,
        no_sycl=no_sycl,
        mpi_library=loaded_mpi(),
        system_mpi=system_mpiexec() or "",
        python_prefix=sys.prefix,
        compiles_again="" if opened is None or opened.library.kept else keep_remedy(),
        kernel_trials=tuple(tried),
        device_name="" if on_cpu else str(properties_of(device).name),
        drawback=getattr(transport, "drawback", ""),
        sums=attention_in_parts(device) if look_at_host else {},
        unimported=unimported((*TAKEN_UP, *OPTIONAL, *REQUIRED)) if look_at_host else {},
        no_shared_memory="" if launch.kind == "mpi" else lacking_shared_memory(max(2, launch.local_size or 2)),
    )


def attention_in_parts(device: torch.device) -> dict[str, str]:
    """Return a text for each dtype that names the kernel of attention with a log-sum-exp, which rings and chunks need.
    The dict is empty on devices on which no kernel has to be tried."""
    if device.type not in TRIED:
        return {}
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return {str(dtype).removeprefix("torch."): kernel_of(device.type, dtype, masked=False).told for dtype in dtypes}


def unimported(names: Sequence[str], limit_s: float = IMPORTS_S) -> dict[str, str]:
    """Import packages in a process of their own, one after the other. Return those that fail, with the reasons.

    A package that ends the process, or is not imported before the limit, is the last one tried. Optional packages that
    are not installed are left out.

    Args:
        names: names of the packages.
        limit_s: seconds from the start of the process to its end.
    """
    left = [name for name in names if name in REQUIRED or find_spec(name.partition(".")[0])]
    # The process inherits the rank's variables: MPI must not start in it, since it would take it for the rank.
    run: Callable[..., Any] = partial(
        subprocess.run, env=os.environ | {"MPI4PY_RC_INITIALIZE": "0"}, capture_output=True, timeout=limit_s
    )
    try:
        output, end = run([sys.executable, "-c", TRY_IMPORTS, *left]).stdout, "it ended the process"
    except subprocess.TimeoutExpired as late:
        output, end = late.stdout or b"", f"{LATE} {limit_s:g} s"
    lines = [line.partition("\t") for line in output.decode(errors="replace").splitlines()]
    told = {name: why for name, tab, why in lines if name in left}
    stuck = dict.fromkeys(left[len(told) :][:1], f"{end}; none after it was tried")
    return {name: why for name, why in told.items() if why} | stuck


def versions() -> dict[str, str | None]:
    """Return the versions of Python, packages and the MPI library, by name; None for packages that are not
    installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    found |= {name: next((one.version for one in metadata.distributions(name=name)), None) for name in PACKAGES}
    found["torch"] = torch.__version__
    found["xpu runtime"] = getattr(torch.version, "xpu", None)
    if "mpi4py.MPI" in sys.modules:
        found["mpi"] = sys.modules["mpi4py.MPI"].Get_library_version().splitlines()[0].strip("\0 ")
    return found


def environment() -> dict[str, str]:
    """Return the environment variables that matter for a run, by name, without secrets, since the file may be sent to
    others."""
    known = ((name, value) for name, value in sorted(os.environ.items()) if VARIABLES.match(name))
    return {name: re.sub("//[^/@]*@", "//...@", value) for name, value in known if not SECRET.search(name)}


def properties_of(device: torch.device) -> Any:
    """Return torch's record of the properties of an accelerator, such as its name and memory."""
    return torch.get_device_module(device).get_device_properties(device)


def tile_of(device: torch.device) -> str:
    """Return a name for the tile of a device that no other tile of the host has: the driver's UUID, else its index and
    the variables that select devices."""
    uuid = getattr(properties_of(device), "uuid", None)
    selecting = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "CUDA_VISIBLE_DEVICES")
    selected = [os.environ[name] for name in selecting if os.environ.get(name)]
    return str(uuid) if uuid is not None else "/".join([*selected, str(device.index)])


def tiles_seen(device: torch.device) -> int:
    """Return the number of accelerators of a device's type that this process sees; 0 on a CPU."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).device_count())


def card_of(device: torch.device) -> Card | None:
    """Return the card that a device is on; None if it is not known.

    For CUDA torch gives the address. Intel's tiles are assigned to cards in the order of their addresses. That holds
    only if no variable selects among them: Aurora's module always sets ONEAPI_DEVICE_SELECTOR to all GPUs,
    `opencl:gpu;level_zero:gpu`, and a number in it selects some.
    """
    devices = SYS / "bus/pci/devices"
    if device.type == "cuda":
        of = properties_of(device)
        if not hasattr(of, "pci_bus_id"):
            return None
        address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
    else:
        selects = re.search(r":[^;]*\d", os.environ.get("ONEAPI_DEVICE_SELECTOR", ""))
        if device.type != "xpu" or os.environ.get("ZE_AFFINITY_MASK") or selects:
            return None
        known = [path for path in sorted(devices.glob("*")) if read(path / "vendor") == INTEL]
        cards, tiles = [path.name for path in known if read(path / "class").startswith(DISPLAY)], tiles_seen(device)
        if not cards or tiles % len(cards):
            return None
        address = cards[(device.index or 0) // (tiles // len(cards))]
    return Card(address, near_sockets(devices / address))


def nics() -> tuple[Nic, ...]:
    """Return the fast network interfaces of this host: Slingshot's (cxi) and InfiniBand's."""
    paths = [*(SYS / "class/cxi").glob("cxi*"), *(SYS / "class/infiniband").glob("*")]
    return tuple(Nic(path.name, near_sockets(path / "device")) for path in sorted(paths))


def near_sockets(device: Path) -> tuple[int, ...]:
    """Return the CPU sockets whose cores are near a device; () if the system does not say.

    Args:
        device: the device's folder in /sys, which has a list of cores such as 0-3,8.
    """
    cores: list[int] = []
    for part in filter(None, read(device / "local_cpulist").split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return sockets_of(cores)


def sockets_of(cores: Sequence[int]) -> tuple[int, ...]:
    """Return the CPU sockets that some cores belong to; () if the system does not say."""
    paths = (SYS / f"devices/system/cpu/cpu{core}/topology/physical_package_id" for core in cores)
    return tuple(sorted({int(text) for path in paths if (text := read(path)).lstrip("-").isdigit()}))


def read(path: Path) -> str:
    """Return the text of a small file without blanks at its ends; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def total_memory(device: torch.device, ranks: int) -> int | None:
    """Return the bytes of memory of a rank's device: of an accelerator its share, of a CPU all of the host's.

    Args:
        device: the rank's device.
        ranks: number of ranks on this host, which may share accelerators.
    """
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(properties_of(device).total_memory) // ranks_on_device(device, ranks)


def sycl_path(device: torch.device, kernels: str) -> tuple[str, str]:
    """Build the SYCL kernels of a device if they are wanted. Return (their device, the reason why there are none); one
    of the two is "".

    Args:
        device: the rank's device.
        kernels: the setting `kernels`.
    """
    if path_of(kernels) == "torch":
        return "", "torch was asked for"
    try:
        ops: Any = sycl_ops(device, required=True)
    except ValueError as error:
        return "", str(error)
    return f"{ops.library.device_name} ({ops.library.backend})", ""


def loaded_mpi() -> str:
    """Return the path of the MPI library that this process has loaded; "" if there is none."""
    found = re.search(r"\S*/libmpi\.so\S*", read(Path("/proc/self/maps")))
    return found[0] if found else ""


def spelled(planes: Sequence[int]) -> str:
    """Return the tiles of each plane in the form of the variable CCL_TOPO_COLOR: "{0,3},{1,2}". Planes that differ only
    in their numbers give the same text.

    Args:
        planes: plane of each tile.
    """
    groups = by_key((plane, tile) for tile, plane in enumerate(planes))
    return ",".join("{" + ",".join(map(str, tiles)) + "}" for tiles in groups.values())


def planes_of(color: str) -> tuple[int, ...]:
    """Return the plane of each tile that a value of CCL_TOPO_COLOR such as "card:{0,1},{2,3};plane:{0,3},{1,2}" gives.
    Raise ValueError for other texts."""
    found = re.search(r"plane\s*:\s*((?:\{[\d,\s]+\}\s*,?\s*)+)", color)
    groups = re.findall(r"\{([\d,\s]+)\}", found[1]) if found else []
    plane_of = {int(tile): plane for plane, group in enumerate(groups) for tile in group.split(",") if tile.strip()}
    if not plane_of or sorted(plane_of) != list(range(len(plane_of))):
        raise ValueError(f"{color!r} names no plane for each of the tiles from 0")
    return tuple(plane_of[tile] for tile in range(len(plane_of)))
