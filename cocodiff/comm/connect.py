"""From a launch to a transport: opens the watch over the ranks, compares their settings, starts the library.

The watch is opened first, at an address that ranks learn from their launcher, so that all that follows is watched.
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
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cocodiff.comm.health import Alone, Limits, OnLoss, Watch
from cocodiff.comm.launch import LAST_WORDS_S, Launch
from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld
from cocodiff.comm.mpi import MpiTransport, initialised_mpi
from cocodiff.comm.presence import Presence, limited_start
from cocodiff.comm.settings import overlap_killers
from cocodiff.comm.store import environment_store, next_run, told_by_rank_0
from cocodiff.comm.torch_dist import NEVER, TorchDistTransport, check_backend, device_backend, initialise
from cocodiff.comm.transport import Transport
from cocodiff.errors import UserError

log = logging.getLogger("cocodiff.comm")


class _Meeting(NamedTuple):
    """Where the ranks of a run meet. listener: rank 0's; store: of torch.distributed, where there is one already."""

    rank: int
    size: int
    address: tuple[str, int] = ("", 0)
    key: str = ""
    listener: socket.socket | None = None
    store: Any = None


def connect(
    launch: Launch,
    name: str,
    device: torch.device,
    settings: dict[str, str],
    limits: Limits,
    on_loss: Sequence[OnLoss] = (),
) -> Transport:
    """The transport of this rank, with a watch over its peers.

    name: one of cocodiff.config.TRANSPORTS; "auto" is MPI under an MPI launcher on CPU, else the backend of the device.
    settings: what every rank must have been started with alike.
    on_loss: see `Health.when_lost`; told of a loss during the start as well.
    Raises UserError when the transport does not fit the launch or ranks were started differently, PeerLost when a rank
    does not show up within `limits.start_s`.
    """
    if launch.kind == "alone" and not dist.is_initialized():
        return LoopbackTransport(LoopbackWorld(1), 0, device)
    if name == "auto":
        name = "mpi" if launch.kind == "mpi" and device.type == "cpu" else device_backend(device)
    if name == "mpi" and (launch.kind != "mpi" or device.type != "cpu"):
        raise UserError(
            f"transport mpi needs CPU tensors and an MPI launcher; here are {device.type} tensors and a run started "
            f"{_started(launch)}: use --transport {device_backend(device)} or start with mpiexec"
        )
    owns = name != "mpi" and not dist.is_initialized()
    if owns:
        check_backend(name, device)
    meeting = _meet(launch, device, limits)
    health: Alone | Watch = Alone()
    if meeting.size > 1:
        endpoint = meeting.listener or meeting.address
        health = Watch.open(meeting.rank, meeting.size, endpoint, meeting.key, settings, limits, on_loss)
    if launch.kind == "mpi":
        atexit.register(_finish_mpi, health, limits.timeout_s)
    transport: MpiTransport | TorchDistTransport
    with health.blocking():
        if name == "mpi":
            transport = MpiTransport(health)
        else:
            if owns:
                _initialise(launch, meeting, name, device, limits)
            transport = TorchDistTransport(device, health, owns)
    _tell_of_blocking(transport)
    return transport


def _tell_of_blocking(transport: MpiTransport | TorchDistTransport) -> None:
    """Rank 0 says in one line which settings take the overlap of messages and computation away."""
    killers = overlap_killers(os.environ, transport.library, transport.device.type)
    if killers and not transport.rank:
        told = "; ".join(f"{killer.setting} {killer.harm} ({killer.remedy})" for killer in killers)
        log.warning("messages will not be hidden: %s", told)


def _started(launch: Launch) -> str:
    return {"alone": "alone", "forked": "by --ranks", "torchrun": "by torchrun", "mpi": "by MPI"}[launch.kind]


# Where ranks meet -----------------------------------------------------------------------------------------------------


def _meet(launch: Launch, device: torch.device, limits: Limits) -> _Meeting:
    """Makes the watch's address known to all ranks, over what their launcher gave them."""
    if launch.meeting is not None:
        assert launch.rank is not None and launch.size is not None
        there = launch.meeting
        store = dist.FileStore(there.store_file, launch.size)
        return _Meeting(launch.rank, launch.size, ("127.0.0.1", there.port), there.key, there.listener, store)
    if dist.is_initialized():
        return _meet_in_process_group(launch, limits)
    if launch.kind == "mpi":
        return _meet_over_mpi(launch, device, limits)
    assert launch.rank is not None and launch.size is not None
    one_host = _on_one_host(launch, launch.size)
    store = next_run(environment_store(launch.rank, launch.size, limits.start_s), launch.rank)
    listener = _listen(one_host, launch.size) if launch.rank == 0 else None
    own_word = json.dumps(_invitation(listener, one_host)) if listener is not None else None
    word = told_by_rank_0(store, own_word, limits.start_s)
    return _accepted(launch.rank, launch.size, json.loads(word), listener, store)


def _meet_in_process_group(launch: Launch, limits: Limits) -> _Meeting:
    """The process group that the caller has initialised tells rank 0's word."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one_host = _on_one_host(launch, size)
    listener = _listen(one_host, size) if rank == 0 else None
    words = [_invitation(listener, one_host) if listener is not None else None]
    with limited_start(limits, rank, None, "the first broadcast of the process group"):
        dist.broadcast_object_list(words)
    assert words[0] is not None
    return _accepted(rank, size, words[0], listener, None)


def _meet_over_mpi(launch: Launch, device: torch.device, limits: Limits) -> _Meeting:
    """MPI tells rank 0's word, and where the ranks will find torch.distributed's store."""
    presence = Presence.of_job(launch)
    if presence is not None:
        presence.announce()
    with limited_start(limits, launch.rank, presence, "MPI_Init"):
        mpi = initialised_mpi()
        world = mpi.COMM_WORLD
        rank, size = world.Get_rank(), world.Get_size()
        one_host = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size() == size
        listener = _listen(one_host, size) if rank == 0 else None
        word = world.bcast(_invitation(listener, one_host) if listener is not None else None)
    if presence is not None:
        presence.withdraw()
    if one_host and device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return _accepted(rank, size, word, listener, None)


def _on_one_host(launch: Launch, size: int) -> bool:
    """Whether the launcher shows that all ranks are on one host: by their number, or as they meet on its loopback."""
    address = os.environ.get("MASTER_ADDR", "")
    return launch.local_size == size or address == "localhost" or address.startswith("127.")


def _reachable_host(one_host: bool) -> str:
    """Where rank 0 can be reached. The launcher knows best: ranks of one host may be in network namespaces of their
    own, which share no loopback."""
    return os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.gethostname())


def _listen(one_host: bool, size: int) -> socket.socket:
    """Rank 0's listening socket, on the one interface that the others reach it by where its name tells which."""
    try:
        address = socket.gethostbyname(_reachable_host(one_host))
    except OSError:
        address = ""
    # A host's own name often means its loopback to itself and another interface to the others.
    interface = "" if address.startswith("127.") and not one_host else address
    try:
        return socket.create_server((interface, 0), backlog=size + 64)
    except OSError:  # an address that is not this host's own, behind a translation
        return socket.create_server(("", 0), backlog=size + 64)


def _invitation(listener: socket.socket, one_host: bool) -> list[Any]:
    """Rank 0's word to the others: host and port of the watch, and the run's secret."""
    interface, port = listener.getsockname()
    return [_reachable_host(one_host) if interface == "0.0.0.0" else interface, port, secrets.token_hex(16)]


def _accepted(rank: int, size: int, word: list[Any], listener: socket.socket | None, store: Any) -> _Meeting:
    host, port, key = word
    return _Meeting(rank, size, ("127.0.0.1" if host == socket.gethostname() else host, port), key, listener, store)


# The communication library --------------------------------------------------------------------------------------------


def _initialise(launch: Launch, meeting: _Meeting, backend: str, device: torch.device, limits: Limits) -> None:
    """Starts torch.distributed's default process group. Its store is the launcher's; under MPI rank 0 makes one."""
    store = meeting.store
    if launch.kind == "forked":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if store is None:
        store = _store_over_mpi(meeting, limits)
    store.set_timeout(NEVER)
    initialise(backend, store, meeting.rank, meeting.size, device)


def _store_over_mpi(meeting: _Meeting, limits: Limits) -> Any:
    """A store on rank 0, at a port that is free there and that MPI tells the others."""
    world = initialised_mpi().COMM_WORLD
    limit = timedelta(seconds=limits.start_s)
    store = None
    if meeting.rank == 0:
        store = dist.TCPStore(
            meeting.address[0], 0, meeting.size, is_master=True, timeout=limit, wait_for_workers=False
        )
    port = world.bcast(store.port if store is not None else None)
    if store is None:
        store = dist.TCPStore(meeting.address[0], port, meeting.size, is_master=False, timeout=limit)
    return store


def _finish_mpi(health: Alone | Watch, limit_s: float) -> None:
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
        sys.stdout.flush()
        time.sleep(LAST_WORDS_S)
        os._exit(1)
    # Ranks that failed after this one had left never come, and MPI_Finalize lets no Python thread run meanwhile.
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()
