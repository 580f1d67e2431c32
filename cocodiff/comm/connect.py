"""The way from a launch to a transport: opens the watch over the ranks, compares their settings, starts the library.

The watch is opened first, at an address that ranks learn from their launcher, so that all that follows is watched. A
transport is imported only by the runs that use it.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from cocodiff.comm.health import Health, Limits, OnLoss, Watch
from cocodiff.comm.launch import BACKENDS, STARTED, Contact, Launch
from cocodiff.comm.peers import BLAME_S
from cocodiff.comm.transport import LaneOwner, Transport
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.config.registry import load
from cocodiff.kernels.device import rank_device, ranks_on_device


class Killer(NamedTuple):
    """A setting in the environment that keeps messages from overlapping with computing."""

    setting: str  # as in the environment, "NAME=value"
    harm: str  # what it does
    remedy: str  # what to do instead


def overlap_killers(environment: Mapping[str, str], library: str, device: str) -> list[Killer]:
    """Return the settings in the environment that make a library's messages block, so that none overlap with computing.

    Args:
        environment: the variables by name.
        library: the library that carries messages, such as "xccl", "ccl", "nccl" or "gloo".
        device: "cpu", "xpu" or "cuda".
    """

    switches = [
        ("CCL_OP_SYNC", library in BACKENDS["xpu"], "makes every oneCCL call wait for its end"),
        ("TORCH_NCCL_BLOCKING_WAIT", library == "nccl", "makes waiting block the host"),
        ("CUDA_LAUNCH_BLOCKING", device == "cuda", "makes every kernel launch wait for its end"),
    ]
    on = {name for name, _, _ in switches if environment.get(name, "").strip().lower() in ("1", "true", "yes", "on")}
    # Aurora's module sets CCL_OP_SYNC because some collectives give wrong results without it.
    found = [Killer(f"{n}=1", why, f"unset {n} unless modules set it") for n, read, why in switches if read and n in on]
    if library in BACKENDS["xpu"] and device == "xpu" and environment.get("CCL_ATL_TRANSPORT", "").lower() == "ofi":
        harm = "makes oneCCL synchronous on GPU buffers"
        found.append(Killer("CCL_ATL_TRANSPORT=ofi", harm, "export CCL_ATL_TRANSPORT=mpi"))
    return found


log = logging.getLogger("cocodiff.comm")
_watches: WeakSet[Watch] = WeakSet()  # of this process's runs, maybe ended
# Transports that need an MPI launcher, with their classes.
OVER_MPI = {"mpi": "cocodiff.comm.mpi:MpiTransport", "mpi-rma": "cocodiff.comm.rma:RmaTransport"}
EVERY_INTERFACE = ("0.0.0.0", "::")
THROUGH_HOST = ("host", "mpi-rma")  # transports that copy a device's tensors to host memory


def place_rank(launch: Launch, device: str, transport: str) -> tuple[torch.device, str]:
    """Return a rank's device, and the name of its transport, from the settings `device` and `transport`.

    Ranks may share a device if their messages can pass through the host's memory: with the transports "host" and
    "mpi-rma", and with "auto" if they were forked. If forked ranks do share one, "auto" becomes "host". With other
    transports, and with "auto" on a launcher's ranks, OwnRankError is raised if there are too few devices.

    Args:
        launch: the start of this process, with its number among the ranks of this node.
        device: the setting: a kind of device, or "auto".
        transport: the setting: name of the library for messages, "host" or "auto".
    """
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
    """Connect this rank to the others and return its transport, with a watch over lost ranks.

    Raise UserError if transport, launch and ranks' settings do not fit, and PeerLost if a rank does not start in time.

    Args:
        launch: the start of this process.
        name: the setting `transport`: "auto", "host" or a library's name, see `_library`.
        device: of the tensors in messages.
        settings: values by name, which must be the same on every rank.
        limits: longest times that the watch allows.
        on_loss: functions that are called with the error if a rank is lost; also for a loss during the start.
        check_messages: True to send a checksum with every message.
    """
    if launch.kind == "alone" and not dist.is_initialized():
        from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld

        return LoopbackTransport(LoopbackWorld(1), 0, device)
    through_host = name == "host" or (name in THROUGH_HOST and device.type != "cpu")
    carried = torch.device("cpu") if through_host else device  # where messages are; with host these are copies
    name = _library(launch, name, carried)
    owns = name not in OVER_MPI and not dist.is_initialized()
    if owns:
        from cocodiff.comm.torch_dist import check_backend  # here, because a run without messages needs no library

        check_backend(name, carried)
    with ExitStack() as other_runs:  # if this rank alone starts a run, the other run's ranks miss it
        for other in [one for one in _watches if one.ongoing]:
            other.arrive("the start of another run")
            other_runs.callback(other.check)  # its error says more than that no rank arrived here
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


def _transport(launch: Launch, name: str, carried: torch.device, health: Health, owns: bool, gloo: bool) -> LaneOwner:
    """Make the transport for messages on the device `carried`.

    Args:
        launch: the start of this process.
        name: the library: "mpi", "mpi-rma" or a backend of torch.distributed, which has been initialised.
        health: the watch over lost ranks.
        owns: True if this run started torch.distributed's default process group.
        gloo: True to use gloo's groups, whatever the default group's are.
    """
    if name in OVER_MPI:
        return load(OVER_MPI, name)(health)
    carrier = None
    if carried.type != "cpu":  # values are sent over host memory
        over_mpi = "mpi" if launch.kind == "mpi" else "gloo"
        carrier = _transport(launch, over_mpi, torch.device("cpu"), health, owns=False, gloo=True)
    from cocodiff.comm.torch_dist import TorchDistTransport

    return TorchDistTransport(carried, health, owns, "gloo" if gloo else None, carrier)


def _library(launch: Launch, name: str, carried: torch.device) -> str:
    """Return the name of the library that carries messages. Raise UserError if it does not fit the launch.

    "auto" is MPI under an MPI launcher on CPU, else the backend of the device. "host" is what "auto" is on a CPU.

    Args:
        name: the setting `transport`.
        carried: device of the tensors in messages.
    """
    from cocodiff.comm.torch_dist import device_backend

    if name in ("auto", "host"):
        return "mpi" if launch.kind == "mpi" and carried.type == "cpu" else device_backend(carried)
    if name in OVER_MPI and (launch.kind != "mpi" or carried.type != "cpu"):
        here = f"here are {carried.type} tensors and a run started {STARTED[launch.kind]}"
        remedy = f"use --transport {device_backend(carried)} or start with mpiexec"
        raise UserError(f"transport {name} needs CPU tensors and an MPI launcher; {here}: {remedy}")
    return name


def _tell_of_blocking(transport: LaneOwner) -> None:
    """Log warnings on rank 0: of a transport's drawbacks, and of environment variables by which messages would block.

    Such messages do not overlap with computing.
    """
    if transport.drawback and not transport.rank:
        log.warning("transport mpi-rma: %s", transport.drawback)
    killers = overlap_killers(os.environ, transport.library, transport.device.type)
    if killers and not transport.rank:
        listed = "; ".join(f"{killer.setting} {killer.harm} ({killer.remedy})" for killer in killers)
        log.warning("messages will not be hidden: %s", listed)


# First contact of ranks -----------------------------------------------------------------------------------------------


def _meet(launch: Launch, limits: Limits) -> Contact:
    """Make the address of the watch over lost ranks, which is on rank 0, known to all ranks.

    The means are those that the ranks' launcher provides. Return what each rank needs to connect to it.
    """
    if launch.meeting is not None:
        return launch.meeting._replace(store=dist.FileStore(launch.meeting.store, launch.meeting.size))
    if launch.kind == "mpi" and not dist.is_initialized():
        return _meet_over_mpi(launch, limits)
    # If a store's process is stopped after it began to listen, the library waits without a limit and ignores signals.
    meeting: Future[Contact] = Future()

    def meet() -> None:
        try:
            meeting.set_result(_meet_at_store(launch, limits))
        except BaseException as error:
            meeting.set_exception(error)

    threading.Thread(target=meet, daemon=True).start()
    if not wait([meeting], 2 * limits.start_s + BLAME_S).done:  # the library reports its own timeouts earlier
        raise PeerLost(0, f"does not answer{_store_address()} within {limits.start_s:g} s of the start")
    return meeting.result()


def _store_address() -> str:
    """Return the address of the launcher's store (torch.distributed's) for errors, as " at HOST:PORT".

    It is "" if torch.distributed is initialised already, so that its own store is used.
    """
    return "" if dist.is_initialized() else f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _meet_at_store(launch: Launch, limits: Limits) -> Contact:
    """Exchange the address of the watch over lost ranks by way of torch.distributed's store. Return what to connect
    with.

    The watch is on rank 0. All ranks call this the same number of times, so each run has a part of the store of its
    own. Raise PeerLost if the store, which is in the process of rank 0 or of its launcher, does not answer in time, or
    the address is not set in time.
    """
    store: Any
    began, at = time.monotonic(), _store_address()
    try:
        if dist.is_initialized():  # the caller initialised it, and we use its store
            rank, size = dist.get_rank(), dist.get_world_size()
            store = dist.PrefixStore("cocodiff", dist.distributed_c10d._get_default_store())
        else:
            assert launch.rank is not None and launch.size is not None
            rank, size = launch.rank, launch.size
            store = environment_store(rank, size, limits.start_s, _on_one_host(launch, size))
        store = dist.PrefixStore(f"run{store.add(f'opened/{rank}', 1)}", store)
        listener = None
        if rank == 0:
            listener, word = _invite(_on_one_host(launch, size), size)
            store.set("meeting", word)
        store.wait(["meeting"], timedelta(seconds=limits.start_s))
        return _accepted(rank, size, bytes(store.get("meeting")).decode(), listener, store)
    except RuntimeError as error:  # torch's own are
        within = f"within {round(min(time.monotonic() - began, limits.start_s), 1):g} s"
        raise PeerLost(0, f"does not answer{at} {within} ({str(error).splitlines()[0]})") from error


def _meet_over_mpi(launch: Launch, limits: Limits) -> Contact:
    """Exchange the address of the watch over lost ranks, which is on rank 0, by MPI. Return what to connect with.

    A store of torch.distributed is made later.
    """
    from cocodiff.comm.mpi_start import broadcast_over_mpi, check_told_size, initialised_mpi
    from cocodiff.comm.presence import Presence, limited_start

    presence = Presence.of_job(launch)
    with limited_start(limits, launch.rank, presence):
        mpi = initialised_mpi()
        world = mpi.COMM_WORLD
        check_told_size(launch, world)
        rank, size = world.Get_rank(), world.Get_size()
        one_host = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size() == size
        listener, own_word = _invite(one_host, size) if rank == 0 else (None, None)
        word = broadcast_over_mpi(world, own_word)
    if presence is not None:
        presence.withdraw()
    return _accepted(rank, size, word, listener, None)


def _on_one_host(launch: Launch, size: int) -> bool:
    """Return True if the launcher shows that all ranks are on one host: by their number, or by a loopback address.

    Args:
        launch: the start of this process, with the number of ranks on its node.
        size: number of all ranks.
    """
    return launch.local_size == size or is_loopback(os.environ.get("MASTER_ADDR", ""))


def _invite(one_host: bool, size: int) -> tuple[socket.socket, str]:
    """Open rank 0's listening socket for the watch over lost ranks, at a free port. Return it, and rank 0's message to
    the other ranks as JSON: host and port of the watch, and a new secret.

    The socket is on one network interface if the host's name determines that. Those who connect to it show the secret.

    Args:
        one_host: True if all ranks are on this host.
        size: number of ranks.
    """
    # The launcher's address has precedence: ranks of one host may be in network namespaces that share no loopback.
    reachable = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.gethostname())
    listener = listening_socket(reachable, 0, one_host, size)
    interface, port, *_ = listener.getsockname()
    host = reachable if interface in EVERY_INTERFACE else interface
    return listener, json.dumps([host, port, secrets.token_hex(16)])


def _accepted(rank: int, size: int, word: str, listener: socket.socket | None, store: Any) -> Contact:
    """Return what this rank needs to connect to the watch over lost ranks, from rank 0's message.

    Args:
        word: the message, as `_invite` makes it.
        listener: listening socket of the watch, on rank 0.
        store: torch.distributed's store, if there is one already.
    """
    host, port, key = json.loads(word)
    own = "127.0.0.1" if host == socket.gethostname() else host
    interface = "" if listener is None else listener.getsockname()[0]
    return Contact(rank, size, (own, port), key, listener, store, interface, is_loopback(host))


def is_loopback(address: str) -> bool:
    """Return True if a host's name or address is that of the loopback interface, which reaches this host alone."""
    return address.startswith("127.") or address in ("localhost", "::1")


def listening_socket(host: str, port: int, one_host: bool, ranks: int) -> socket.socket:
    """Open a listening socket on the network interface that `host` names, or on all if that cannot be determined.

    A loopback address is taken only with `one_host`: else other hosts may know this one by another address.

    Args:
        host: name or address of this host.
        port: the port; 0 for a free one.
        one_host: True if all ranks are on this host.
        ranks: their number, for the backlog.
    """
    try:  # IPv4, if the name has both
        family, *_, (address, *_) = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), key=lambda one: one[0])
    except OSError:
        family, address = socket.AF_INET, ""
    serve = partial(socket.create_server, family=family, backlog=ranks + 64, dualstack_ipv6=family == socket.AF_INET6)
    # A host often resolves its own name to loopback, and the others resolve it to another interface.
    interface = "" if is_loopback(str(address)) and not one_host else address
    try:
        return serve((interface, port))
    except OSError:  # not an address of this host, but of an address translation
        return serve(("", port))


def hosted_store(host: str, port: int, size: int, limit: timedelta, listener: socket.socket) -> Any:
    """Open a store of torch.distributed in this process, on a given listening socket.

    The store's own socket would be open on all interfaces. Stores of this process at the same port share one server.

    Args:
        host: name or address of this host.
        port: the socket's port.
        size: number of ranks.
        limit: longest time that its calls wait.
        listener: the socket; it belongs to the store from now on.
    """
    fd = listener.detach()
    return dist.TCPStore(host, port, size, True, limit, False, multi_tenant=True, master_listen_fd=fd)


@cache
def launcher_store(
    host: str, port: int, rank: int, size: int, hosted: bool, attempt: str, start_s: float, one_host: bool
) -> Any:
    """Return the store of torch.distributed through which ranks of a launcher meet: torchrun's, or rank 0's at a given
    port.

    It is kept as long as the process, so a later run of the same ranks uses the same one.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        hosted: True if the launcher has the store, so that rank 0 connects to it too; else rank 0 opens it.
        attempt: number of the launcher's restart.
        start_s: longest time that its calls wait, in seconds.
        one_host: True if all ranks are on one host.
    """
    limit = timedelta(seconds=start_s)
    if rank == 0 and not hosted:
        store = _own_store(host, port, size, limit, one_host)
    else:
        store = dist.TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    return dist.PrefixStore(f"cocodiff/{attempt}", store)


def _own_store(host: str, port: int, size: int, limit: timedelta, one_host: bool) -> Any:
    """Open rank 0's store at the port that the other ranks know. If this process has another store there, that one is
    used.

    Raise UserError if another program has the port.

    Args:
        size: number of ranks.
        limit: longest time that its calls wait.
        one_host: True if all ranks are on this host.
    """
    try:
        listener = listening_socket(host, port, one_host, size)
    except OSError as taken:
        try:
            return dist.TCPStore(host, port, size, True, limit, wait_for_workers=False, multi_tenant=True)
        except dist.DistError:
            used = f"MASTER_PORT={port}: rank 0 cannot listen there ({taken.strerror})"
            raise UserError(f"{used}: give a port that is free on {host}") from taken
    return hosted_store(host, port, size, limit, listener)


def environment_store(
    rank: int, size: int, start_s: float, one_host: bool, environment: Mapping[str, str] | None = None
) -> Any:
    """Return the store of torch.distributed whose address is in the environment. Raise UserError if none is.

    Args:
        start_s: longest time that its calls wait, in seconds.
        one_host: True if all ranks are on one host.
        environment: the variables; by default those of this process.
    """
    env = os.environ if environment is None else environment
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise UserError(f"MASTER_ADDR is {host!r}, MASTER_PORT {port!r}: set them to rank 0's, or give srun --mpi=pmi2")
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return launcher_store(host, int(port), rank, size, hosted, attempt, start_s, one_host)


# The communication library --------------------------------------------------------------------------------------------


def _initialise(meeting: Contact, backend: str, device: torch.device, limits: Limits) -> None:
    """Start torch.distributed's default process group. Its store is the launcher's; under MPI rank 0 opens one.

    Args:
        meeting: what this rank has learnt in the ranks' first contact.
        backend: the library that carries messages.
        device: of the tensors in messages.
        limits: longest times of the start.
    """
    from cocodiff.comm.torch_dist import NEVER, initialise

    store = _store_over_mpi(meeting, limits) if meeting.store is None else meeting.store
    store.set_timeout(NEVER)
    initialise(backend, store, meeting.rank, meeting.size, device)


def _store_over_mpi(meeting: Contact, limits: Limits) -> Any:
    """Open a store of torch.distributed on rank 0 at a free port, and tell the other ranks by MPI. Return this rank's
    connection to it."""
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
    """Finish MPI at the end of the process, so that neither this rank nor others wait for ever in MPI_Finalize.

    If the run has failed, the process ends with exit code 1 instead.

    Args:
        limit_s: longest time for MPI_Finalize; then the process ends without it.
    """
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    uncaught = getattr(sys, "last_value", None)  # the exception that ended the program
    if uncaught is not None:
        health.fail(f"{type(uncaught).__name__}: {uncaught}")  # outside of a `with` block it was not reported yet
    try:
        health.check()
    except Exception:
        print(end="", flush=True)  # to stdout, which may be closed
        health.leave()
        os._exit(1)
    # A rank that failed after this one had left never gets here, and MPI_Finalize lets no Python thread run meanwhile.
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()
