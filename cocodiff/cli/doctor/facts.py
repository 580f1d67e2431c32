"""Facts about a job, as plain data. One rank's are gathered here, from the environment, /proc and /sys, and the
packages' own records; what messages do is tried in `trials.py`. Imports no diffusers."""

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
from cocodiff.config.machine import Topology
from cocodiff.config.packages import TAKEN_UP
from cocodiff.config.text_table import spans
from cocodiff.kernels.device import free_memory, ranks_on_device
from cocodiff.kernels.dispatch import path_of, sycl_ops
from cocodiff.kernels.trial import KernelTrial, try_operations

# Packages that runs import, of which those that they can do without are tried where they are installed. One that fails
# is absent for those after it, as `hide_broken` has it in a run.
REQUIRED = (
    *("numpy", "torch", "diffusers", "transformers", "accelerate", "safetensors", "scipy", "skimage", "tifffile"),
    *("PIL", "jinja2", "yaml", "tqdm"),
)
OPTIONAL = ("h5py", "numcodecs", "zarr", "imagecodecs", "matplotlib", "mrcfile", "imageio_ffmpeg", "mpi4py.MPI")
IMPORTS_S = 60.0  # for all of them; on two cores they take 5 s
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
Apart = tuple[list[Any], list[str]]  # of a trial in a job of its own: its reports, and the last line that is none
BLOCKED_S = 2e-5  # of the host, for a message: a library that only queues it takes less
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
    unimported: package -> why it does not import; empty where this rank did not look.
    environment: the variables that matter (VARIABLES).
    library: what carries messages: mpi, mpi-rma, gloo, xccl, ccl, nccl, "host memory over gloo"; "none" for a rank
    alone. drawback: what is wrong with the transport that was asked for.
    device: "cpu", "xpu:3"; of its kind there are tiles_seen. device_name: as its driver has it, "" on a CPU.
    tile: what tells tiles of a host apart, "" on a CPU.
    card: of this rank's tile, None where the system does not tell. cores and sockets: those that this rank may use.
    host_cores: all cores of the host. free and total: bytes of memory; of a tile that ranks share, this one's part.
    sycl: what SYCL kernels run on, or "" with the reason in `no_sycl`; both "" where this rank did not look.
    compiles_again: where every start compiles the SYCL kernels, what has libsycl keep them; else "".
    kernel_trials: operations of SYCL against torch's; where there is none, an accelerator's torch against the CPU's.
    sums: by dtype, what computes attention in parts, where that depends on torch's version (`attention.sums`).
    mpi_library: path of the libmpi that is loaded; system_mpi: an mpiexec of no Python environment; python_prefix: the
    environment's folder, where the one of PyPI would lie. no_shared_memory: of the host, for MPI, and the remedy.
    """

    rank: int
    host: str
    local_rank: int
    launcher: str
    local_size: int | None
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
    compiles_again: str = ""
    kernel_trials: tuple[KernelTrial, ...] = ()
    device_name: str = ""
    drawback: str = ""
    no_shared_memory: str = ""
    sums: dict[str, str] = field(default_factory=dict)
    device_trial: DeviceTrial | None = None  # attention, copies and repeated products at the run's shape
    deterministic_cost: float = 1.0  # how many times as long products take that add up in one order
    unimported: dict[str, str] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class AllToAll:
    """A trial of one all-to-all, or of `at_once` that are under way together. wrong: a line for each rank that received
    something else than was sent."""

    dtype: str
    bytes: int
    seconds: float
    wrong: tuple[str, ...] = ()
    at_once: int = 1


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
class Facts:
    """A job. order: rounds of messages between busy streams, all of them right; None where there are no streams.
    needed: bytes per rank of the model asked about, or None. stopped: why the trials were not gone on with; then
    `ranks` is the first one alone."""

    ranks: Sequence[RankFacts]
    topology: Topology
    alltoalls: Sequence[AllToAll] = ()
    overlap: Overlap | None = None
    order: int | None = None
    issues: Sequence[Issue] = ()
    needed: int | None = None
    stopped: str = ""
    messages: str = "auto"  # the setting
    one_by_one: bool = False  # whether messages of a batch are believed to wait for each other, see `LaneOwner`
    pair: Apart = ([], [])  # of a batch of two messages, see `trials.report_pair`
    op_sync: Apart = ([], [])  # with the other value of CCL_OP_SYNC, see `trials.report_op_sync`

    @property
    def blocked_us(self) -> float:
        """Microseconds that each message blocks the host, whatever its size: the least of all calls."""
        return min((one.returns_s / one.messages for one in self.issues), default=0.0) * 1e6

    def hosts(self) -> dict[str, list[RankFacts]]:
        return by_key((rank.host, rank) for rank in self.ranks)

    def firsts(self, tells: Callable[[RankFacts], Any]) -> list[tuple[str, RankFacts]]:
        """Every host with the first of its ranks that tells something, where there is one."""
        found = {rank.host: rank for rank in reversed(self.ranks) if tells(rank)}
        return [(host, found[host]) for host in self.hosts() if host in found]


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-5", "ranks 0-2, 7"."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {', '.join(spans(ranks))}"


def by_value(ranks: Sequence[RankFacts], values: Sequence[str]) -> str:
    """ "A on ranks 0-3; B on rank 4"."""
    groups = by_key(zip(values, [rank.rank for rank in ranks], strict=True))
    return "; ".join(f"{value} on {name_ranks(where)}" for value, where in groups.items())


# One rank ------------------------------------------------------------------------------------------------------------


def gather_rank(transport: Any, launch: Launch, kernels: str, look_at_host: bool) -> RankFacts:
    """This rank's facts. look_at_host: open the SYCL kernels and import all packages; one rank of a host is enough."""
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
    """What gives the sums of parts of attention, by dtype, where it has to be tried."""
    if device.type not in TRIED:
        return {}
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return {str(dtype).removeprefix("torch."): kernel_of(device.type, dtype, masked=False).told for dtype in dtypes}


def unimported(names: Sequence[str], limit_s: float = IMPORTS_S) -> dict[str, str]:
    """Import packages, each in turn, in a process of its own, and return why some fail. One that ends the process, or
    that is not through `limit_s` seconds after its start, is the last one that is tried."""
    left = [name for name in names if name in REQUIRED or find_spec(name.partition(".")[0])]
    # A process that a rank starts has its variables: MPI would take it for the rank, were it started there.
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
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__
    found["xpu runtime"] = getattr(torch.version, "xpu", None)
    if "mpi4py.MPI" in sys.modules:
        found["mpi"] = sys.modules["mpi4py.MPI"].Get_library_version().splitlines()[0].strip("\0 ")
    return found


def environment() -> dict[str, str]:
    """The variables that matter, without what gives access to anything: the file may be sent to others."""
    known = ((name, value) for name, value in sorted(os.environ.items()) if VARIABLES.match(name))
    return {name: re.sub("//[^/@]*@", "//...@", value) for name, value in known if not SECRET.search(name)}


def properties_of(device: torch.device) -> Any:
    """Of a device that is no CPU, as torch tells them."""
    return torch.get_device_module(device).get_device_properties(device)


def tile_of(device: torch.device) -> str:
    """A name that no other tile of the host has: the driver's own number of it, else its index and what selects
    devices."""
    uuid = getattr(properties_of(device), "uuid", None)
    selecting = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "CUDA_VISIBLE_DEVICES")
    selected = [os.environ[name] for name in selecting if os.environ.get(name)]
    return str(uuid) if uuid is not None else "/".join([*selected, str(device.index)])


def tiles_seen(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).device_count())


def card_of(device: torch.device) -> Card | None:
    """The card of a device. Of CUDA torch knows the address; of Intel's, tiles are assigned to cards in order of their
    addresses, which is known only while no variable selects among them: Aurora's module always sets
    ONEAPI_DEVICE_SELECTOR to all GPUs, `opencl:gpu;level_zero:gpu`, and a number there takes some of them."""
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
    """Fast NICs: Slingshot's (cxi) and InfiniBand's."""
    paths = [*(SYS / "class/cxi").glob("cxi*"), *(SYS / "class/infiniband").glob("*")]
    return tuple(Nic(path.name, near_sockets(path / "device")) for path in sorted(paths))


def near_sockets(device: Path) -> tuple[int, ...]:
    """The sockets whose cores are near a device, by its list of cores like 0-3,8."""
    cores: list[int] = []
    for part in filter(None, read(device / "local_cpulist").split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return sockets_of(cores)


def sockets_of(cores: Sequence[int]) -> tuple[int, ...]:
    """The sockets that cores are on; none where the system does not tell."""
    paths = (SYS / f"devices/system/cpu/cpu{core}/topology/physical_package_id" for core in cores)
    return tuple(sorted({int(text) for path in paths if (text := read(path)).lstrip("-").isdigit()}))


def read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def total_memory(device: torch.device, ranks: int) -> int | None:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(properties_of(device).total_memory) // ranks_on_device(device, ranks)


def sycl_path(device: torch.device, kernels: str) -> tuple[str, str]:
    """The device that SYCL kernels run on, or "" and why they do not."""
    if path_of(kernels) == "torch":
        return "", "torch was asked for"
    try:
        ops: Any = sycl_ops(device, required=True)
    except ValueError as error:
        return "", str(error)
    return f"{ops.library.device_name} ({ops.library.backend})", ""


def loaded_mpi() -> str:
    """The path of the MPI library that this process has loaded, "" where it has not."""
    found = re.search(r"\S*/libmpi\.so\S*", read(Path("/proc/self/maps")))
    return found[0] if found else ""


def spelled(planes: Sequence[int]) -> str:
    """The tiles of each plane, as in CCL_TOPO_COLOR: {0,3},{1,2}. Numbers of planes carry no meaning but equality."""
    groups = by_key((plane, tile) for tile, plane in enumerate(planes))
    return ",".join("{" + ",".join(map(str, tiles)) + "}" for tiles in groups.values())


def planes_of(color: str) -> tuple[int, ...]:
    """The planes of a colouring like card:{0,1},{2,3};plane:{0,3},{1,2}. Raises ValueError for anything else."""
    found = re.search(r"plane\s*:\s*((?:\{[\d,\s]+\}\s*,?\s*)+)", color)
    groups = re.findall(r"\{([\d,\s]+)\}", found[1]) if found else []
    plane_of = {int(tile): plane for plane, group in enumerate(groups) for tile in group.split(",") if tile.strip()}
    if not plane_of or sorted(plane_of) != list(range(len(plane_of))):
        raise ValueError(f"{color!r} names no plane for each of the tiles from 0")
    return tuple(plane_of[tile] for tile in range(len(plane_of)))
