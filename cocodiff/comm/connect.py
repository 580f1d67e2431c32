"""From a launch to a transport: opens the watch over the ranks, compares their settings, starts the library.

The watch is opened first, at an address that ranks learn from their launcher, so that all that follows is watched. A
transport is imported by the runs that use it.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from cocodiff.comm.health import Health, Limits, OnLoss, Watch
from cocodiff.comm.launch import Launch
from cocodiff.comm.peers import BLAME_S
from cocodiff.comm.transport import LaneOwner, Transport
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.kernels.device import rank_device, ranks_on_device

ONECCL = ("xccl", "ccl")
T = TypeVar("T")


class Killer(NamedTuple):
    """setting: as it stands in the environment; harm: what it does; remedy: what to do instead."""

    setting: str
    harm: str
    remedy: str


def overlap_killers(environment: Mapping[str, str], library: str, device: str) -> list[Killer]:
    """Variables in the environment that make messages of `library` block on a device ("cpu", "xpu", "cuda")."""

    switches = [
        ("CCL_OP_SYNC", library in ONECCL, "makes every oneCCL call wait for its end"),
        ("TORCH_NCCL_BLOCKING_WAIT", library == "nccl", "makes waiting block the host"),
        ("CUDA_LAUNCH_BLOCKING", device == "cuda", "makes every kernel launch wait for its end"),
    ]
    on = {name for name, _, _ in switches if environment.get(name, "").strip().lower() in ("1", "true", "yes", "on")}
    # Aurora's module sets CCL_OP_SYNC for collectives that are wrong without.
    found = [Killer(f"{n}=1", why, f"unset {n} unless modules set it") for n, read, why in switches if read and n in on]
    if library in ONECCL and device == "xpu" and environment.get("CCL_ATL_TRANSPORT", "").lower() == "ofi":
        harm = "makes oneCCL synchronous on GPU buffers"
        found.append(Killer("CCL_ATL_TRANSPORT=ofi", harm, "export CCL_ATL_TRANSPORT=mpi"))
    return found


log = logging.getLogger("cocodiff.comm")
_watches: WeakSet[Watch] = WeakSet()  # of this process's runs
OVER_MPI = ("mpi", "mpi-rma")
EVERY_INTERFACE = ("0.0.0.0", "::")
THROUGH_HOST = ("host", "mpi-rma")  # tensors of a device are copied: windows are in the host's memory


class _Meeting(NamedTuple):
    """Where the ranks of a run meet. listener: rank 0's; store: of torch.distributed, where there is one already;
    interface: the one that rank 0 listens on, "" elsewhere; on_loopback: whether ranks reach each other by it."""

    rank: int
    size: int
    address: tuple[str, int]
    key: str
    listener: socket.socket | None
    store: Any
    interface: str
    on_loopback: bool


def place_rank(launch: Launch, device: str, transport: str) -> tuple[torch.device, str]:
    """A rank's device and what carries its messages, from the settings of these names. Ranks that were forked here see
    the same devices, so that auto is host where they outnumber these; a launcher's may see devices of their own."""
    in_turns = transport in THROUGH_HOST or (transport == "auto" and launch.kind == "forked")
    found = rank_device(device, launch.local_rank, in_turns)
    sharing = ranks_on_device(found, launch.local_size or 1) if in_turns else 1
    if sharing > 1 and launch.speaks:
        log.warning("up to %d ranks share a %s device: messages pass through the host's memory", sharing, found.type)
    return found, "host" if sharing > 1 and transport == "auto" else transport


def connect(
    launch: Launch,
    name: str,
    device: torch.device,
    settings: dict[str, str],
    limits: Limits,
    on_loss: Sequence[OnLoss] = (),
    check_messages: bool = False,
) -> Transport:
    """The transport of this rank, with a watch over its peers.

    name: of `Config.transport`; "auto" is MPI under an MPI launcher on CPU, else the backend of the device, and "host"
    what auto is on a CPU, with copies of the device's tensors.
    settings: what every rank must have been started with alike. check_messages: see `checked.check_messages`.
    on_loss: see `Health.when_lost`; called for a loss during the start as well.
    Raises UserError when the transport does not fit the launch or ranks were started differently, PeerLost when a rank
    does not show up within `limits.start_s`.
    """
    if launch.kind == "alone" and not dist.is_initialized():
        from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld

        return LoopbackTransport(LoopbackWorld(1), 0, device)
    through_host = name == "host" or (name in THROUGH_HOST and device.type != "cpu")
    carried = torch.device("cpu") if through_host else device  # what the messages are in: with host, copies
    name = _library(launch, name, carried)
    owns = name not in OVER_MPI and not dist.is_initialized()
    if owns:
        from cocodiff.comm.torch_dist import check_backend  # like every library: a run without messages needs none

        check_backend(name, carried)
    with ExitStack() as other_runs:  # in which a rank that starts one alone is missed
        for other in [one for one in _watches if one.ongoing]:
            other.arrive("the start of another run")
            other_runs.callback(other.check)  # what it knows says more than that nobody came here
            other_runs.enter_context(other.blocking())
        meeting = _meet(launch, limits)
        health = Health()
        if meeting.size > 1:
            endpoint = meeting.listener or meeting.address
            health = Watch(meeting.rank, meeting.size, endpoint, meeting.key, settings, limits, on_loss)
            _watches.add(health)
    if launch.kind == "mpi":
        atexit.register(_finish_mpi, health, limits.timeout_s)
    if carried.type == "cpu" and meeting.on_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    transport: LaneOwner
    with health.blaming(), health.blocking():
        if owns:
            _initialise(meeting, name, carried, limits)
        transport = _transport(launch, name, carried, health, owns, through_host)
        if through_host:
            from cocodiff.comm.host import HostTransport

            transport = HostTransport(transport, device)
    if check_messages:
        from cocodiff.comm.checked import check_messages as check

        check(transport)
    _tell_of_blocking(transport)
    return transport


def _transport(
    launch: Launch, name: str, carried: torch.device, health: Health, owns: bool, gloo: bool = False
) -> LaneOwner:
    """What carries tensors of the device `carried`. gloo: its groups are gloo's, whatever the default group's are."""
    if name == "mpi":
        from cocodiff.comm.mpi import MpiTransport

        return MpiTransport(health)
    if name == "mpi-rma":
        from cocodiff.comm.rma import RmaTransport

        return RmaTransport(health)
    carrier = None
    if carried.type != "cpu":  # values go over host memory
        over_mpi = "mpi" if launch.kind == "mpi" else "gloo"
        carrier = _transport(launch, over_mpi, torch.device("cpu"), health, owns=False, gloo=True)
    from cocodiff.comm.torch_dist import TorchDistTransport

    return TorchDistTransport(carried, health, owns, "gloo" if gloo else None, carrier)


def _library(launch: Launch, name: str, carried: torch.device) -> str:
    """The carrier of messages, by the setting `transport`. Raises UserError where it does not fit the launch."""
    from cocodiff.comm.torch_dist import device_backend

    if name in ("auto", "host"):
        return "mpi" if launch.kind == "mpi" and carried.type == "cpu" else device_backend(carried)
    started = {"alone": "alone", "forked": "by --ranks", "torchrun": "by torchrun", "mpi": "by MPI"}[launch.kind]
    if name in OVER_MPI and (launch.kind != "mpi" or carried.type != "cpu"):
        raise UserError(
            f"transport {name} needs CPU tensors and an MPI launcher; here are {carried.type} tensors and a run "
            f"started {started}: use --transport {device_backend(carried)} or start with mpiexec"
        )
    return name


def _tell_of_blocking(transport: LaneOwner) -> None:
    """Rank 0 says what is wrong with windows, and in one line which settings keep messages from being hidden."""
    if transport.drawback and not transport.rank:
        log.warning("transport mpi-rma: %s", transport.drawback)
    killers = overlap_killers(os.environ, transport.library, transport.device.type)
    if killers and not transport.rank:
        listed = "; ".join(f"{killer.setting} {killer.harm} ({killer.remedy})" for killer in killers)
        log.warning("messages will not be hidden: %s", listed)


# Where ranks meet -----------------------------------------------------------------------------------------------------


def _meet(launch: Launch, limits: Limits) -> _Meeting:
    """Makes the watch's address known to all ranks, over what their launcher gave them."""
    if launch.meeting is not None:
        assert launch.rank is not None and launch.size is not None
        there = launch.meeting
        file = dist.FileStore(there.store_file, launch.size)
        return _Meeting(launch.rank, launch.size, ("127.0.0.1", there.port), there.key, there.listener, file, "", True)
    if launch.kind == "mpi" and not dist.is_initialized():
        return _meet_over_mpi(launch, limits)
    # Where a store's process is stopped once it listens, the library waits without a limit and heeds no signal.
    meeting: Future[_Meeting] = Future()
    threading.Thread(target=_settle, args=(meeting, partial(_meet_at_store, launch, limits)), daemon=True).start()
    if not wait([meeting], 2 * limits.start_s + BLAME_S).done:  # what the library notices by itself it tells before
        raise PeerLost(0, f"does not answer{_store_address()} within {limits.start_s:g} s of the start")
    return meeting.result()


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


def _store_address() -> str:
    """Return where ranks look for the launcher's store, in words; "" where the caller's own store is used."""
    return "" if dist.is_initialized() else f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _meet_at_store(launch: Launch, limits: Limits) -> _Meeting:
    """Meet at torch.distributed's store, which tells rank 0's word. All ranks come as often: a part of the store that
    no earlier run of the same processes has written to is theirs. Raise PeerLost where the store, which is in rank 0's
    process or its launcher's, does not answer, or the word does not come in time."""
    store: Any
    began, at = time.monotonic(), _store_address()
    try:
        if dist.is_initialized():  # by the caller, whose store is ours to use
            rank, size = dist.get_rank(), dist.get_world_size()
            store = dist.PrefixStore("cocodiff", dist.distributed_c10d._get_default_store())
        else:
            assert launch.rank is not None and launch.size is not None
            rank, size = launch.rank, launch.size
            store = environment_store(rank, size, limits.start_s, _on_one_host(launch, size))
        store = dist.PrefixStore(f"run{store.add(f'opened/{rank}', 1)}", store)
        one_host, listener = _on_one_host(launch, size), None
        if rank == 0:
            listener = _listen(one_host, size)
            store.set("meeting", _invitation(listener, one_host))
        store.wait(["meeting"], timedelta(seconds=limits.start_s))
        return _accepted(rank, size, bytes(store.get("meeting")).decode(), listener, store)
    except RuntimeError as error:  # torch's own are
        within = f"within {round(min(time.monotonic() - began, limits.start_s), 1):g} s"
        raise PeerLost(0, f"does not answer{at} {within} ({str(error).splitlines()[0]})") from error


def _meet_over_mpi(launch: Launch, limits: Limits) -> _Meeting:
    """MPI tells rank 0's word, and where the ranks will find torch.distributed's store."""
    from cocodiff.comm.mpi_start import broadcast_over_mpi, check_told_size, initialised_mpi
    from cocodiff.comm.presence import Presence, limited_start

    presence = Presence.of_job(launch)
    with limited_start(limits, launch.rank, presence, "MPI_Init"):
        mpi = initialised_mpi()
        world = mpi.COMM_WORLD
        check_told_size(launch, world)
        rank, size = world.Get_rank(), world.Get_size()
        one_host = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size() == size
        listener = _listen(one_host, size) if rank == 0 else None
        word = broadcast_over_mpi(world, _invitation(listener, one_host) if listener is not None else None)
    if presence is not None:
        presence.withdraw()
    return _accepted(rank, size, word, listener, None)


def _on_one_host(launch: Launch, size: int) -> bool:
    """Whether the launcher shows that all ranks are on one host: by their number, or as they meet on its loopback."""
    return launch.local_size == size or is_loopback(os.environ.get("MASTER_ADDR", ""))


def _reachable_host(one_host: bool) -> str:
    """Where rank 0 can be reached. The launcher knows best: ranks of one host may be in network namespaces of their
    own, which share no loopback."""
    return os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.gethostname())


def _listen(one_host: bool, size: int) -> socket.socket:
    """Rank 0's listening socket, on the one interface that the others reach it by where its name tells which."""
    return listening_socket(_reachable_host(one_host), 0, one_host, size)


def _invitation(listener: socket.socket, one_host: bool) -> str:
    """Rank 0's word to the others: host and port of the watch, and the run's secret."""
    interface, port, *_ = listener.getsockname()
    host = _reachable_host(one_host) if interface in EVERY_INTERFACE else interface
    return json.dumps([host, port, secrets.token_hex(16)])


def _accepted(rank: int, size: int, word: str, listener: socket.socket | None, store: Any) -> _Meeting:
    host, port, key = json.loads(word)
    own = "127.0.0.1" if host == socket.gethostname() else host
    interface = "" if listener is None else listener.getsockname()[0]
    return _Meeting(rank, size, (own, port), key, listener, store, interface, is_loopback(host))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


def listening_socket(host: str, port: int, one_host: bool, ranks: int) -> socket.socket:
    """Listens on the one interface that `host` names, or on all where that cannot be told. one_host: all are on it."""
    try:  # IPv4, where the name has both
        family, *_, (address, *_) = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), key=lambda one: one[0])
    except OSError:
        family, address = socket.AF_INET, ""
    serve = partial(socket.create_server, family=family, backlog=ranks + 64, dualstack_ipv6=family == socket.AF_INET6)
    # A host's own name often means its loopback to itself and another interface to the others.
    interface = "" if is_loopback(str(address)) and not one_host else address
    try:
        return serve((interface, port))
    except OSError:  # an address that is not this host's own, behind a translation
        return serve(("", port))


def hosted_store(
    host: str, port: int, size: int, limit: timedelta, listener: socket.socket, multi_tenant: bool = False
) -> Any:
    """A store of this process. It is given its listening socket: one of its own would be open on all interfaces."""
    fd = listener.detach()
    return dist.TCPStore(host, port, size, True, limit, False, multi_tenant=multi_tenant, master_listen_fd=fd)


@cache
def launcher_store(
    host: str, port: int, rank: int, size: int, hosted: bool, attempt: str, start_s: float, one_host: bool
) -> Any:
    """Return the store of torchrun, or of whoever set MASTER_ADDR and MASTER_PORT, kept as long as the process: a later
    run of the same ranks meets at the same one. hosted: rank 0 connects to one as well, else it makes it."""
    limit = timedelta(seconds=start_s)
    if rank == 0 and not hosted:
        store = _own_store(host, port, size, limit, one_host)
    else:
        store = dist.TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    return dist.PrefixStore(f"cocodiff/{attempt}", store)


def _own_store(host: str, port: int, size: int, limit: timedelta, one_host: bool) -> Any:
    """Return rank 0's store, at the port that the others know: another one of this process where it has one there.
    Raises UserError where another program has the port."""
    try:
        listener = listening_socket(host, port, one_host, size)
    except OSError as taken:
        try:
            return dist.TCPStore(host, port, size, True, limit, wait_for_workers=False, multi_tenant=True)
        except dist.DistError:
            used = f"MASTER_PORT={port}: rank 0 cannot listen there ({taken.strerror})"
            raise UserError(f"{used}: give a port that is free on {host}") from taken
    return hosted_store(host, port, size, limit, listener, multi_tenant=True)


def environment_store(
    rank: int, size: int, start_s: float, one_host: bool, environment: Mapping[str, str] | None = None
) -> Any:
    """`launcher_store` by the environment. Raises UserError where that says no address."""
    env = os.environ if environment is None else environment
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise UserError(f"MASTER_ADDR is {host!r}, MASTER_PORT {port!r}: set them to rank 0's, or give srun --mpi=pmi2")
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return launcher_store(host, int(port), rank, size, hosted, attempt, start_s, one_host)


# The communication library --------------------------------------------------------------------------------------------


def _initialise(meeting: _Meeting, backend: str, device: torch.device, limits: Limits) -> None:
    """Starts torch.distributed's default process group. Its store is the launcher's; under MPI rank 0 makes one."""
    from cocodiff.comm.torch_dist import NEVER, initialise

    store = _store_over_mpi(meeting, limits) if meeting.store is None else meeting.store
    store.set_timeout(NEVER)
    initialise(backend, store, meeting.rank, meeting.size, device)


def _store_over_mpi(meeting: _Meeting, limits: Limits) -> Any:
    """A store on rank 0, at a port that is free there and that MPI tells the others."""
    from cocodiff.comm.mpi_start import broadcast_over_mpi, initialised_mpi

    limit, port = timedelta(seconds=limits.start_s), None
    if meeting.rank == 0:
        listener = listening_socket(meeting.interface, 0, True, meeting.size)
        port = str(listener.getsockname()[1])
        store = hosted_store(meeting.address[0], int(port), meeting.size, limit, listener)
    known_port = broadcast_over_mpi(initialised_mpi().COMM_WORLD, port)
    address = meeting.address[0]
    return store if port else dist.TCPStore(address, int(known_port), meeting.size, is_master=False, timeout=limit)


def _finish_mpi(health: Health, limit_s: float) -> None:
    """At the end of the process: no rank waits in MPI_Finalize for one that will not come, nor keeps others waiting."""
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    uncaught = getattr(sys, "last_value", None)  # Python's own note of an exception that ended the program
    if uncaught is not None:
        health.fail(f"{type(uncaught).__name__}: {uncaught}")  # nobody else has, where it was outside a `with` block
    try:
        health.check()
    except Exception:
        print(end="", flush=True)  # to stdout, which may be closed
        health.leave()
        os._exit(1)
    # Ranks that failed after this one had left never come, and MPI_Finalize lets no Python thread run meanwhile.
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()
