"""From a launch to a transport: starts the communication library, opens the watch, compares the ranks' settings."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from cocodiff.comm.health import Alone, Watch
from cocodiff.comm.launch import Launch
from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld
from cocodiff.comm.mpi import MpiTransport
from cocodiff.comm.settings import overlap_killers
from cocodiff.comm.torch_dist import TorchDistTransport, device_backend, initialise
from cocodiff.comm.transport import Transport
from cocodiff.errors import UserError

log = logging.getLogger("cocodiff.comm")


class _LateHealth:
    """Stands in for the watch until it is open: the transport's own first messages carry the watch's address."""

    def __init__(self) -> None:
        self.actual: Alone | Watch = Alone()

    def check(self) -> None:
        self.actual.check()

    def blame(self, error: BaseException) -> BaseException:
        return self.actual.blame(error)

    def fail(self, reason: str, mistake: bool = False) -> None:
        self.actual.fail(reason, mistake)

    def when_lost(self, action: Callable[[BaseException], None]) -> None:
        self.actual.when_lost(action)

    def blocking(self) -> AbstractContextManager[None]:
        return self.actual.blocking()

    def close(self) -> None:
        self.actual.close()


def connect(launch: Launch, name: str, device: torch.device, settings: dict[str, str], timeout_s: float) -> Transport:
    """The transport of this rank, with a watch over its peers.

    name: one of cocodiff.config.TRANSPORTS; "auto" is MPI under an MPI launcher on CPU, else the backend of the device.
    settings: what every rank must have been started with alike.
    Raises UserError when the transport does not fit the launch or ranks were started differently, PeerLost when a rank
    does not show up within `timeout_s`.
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
    health = _LateHealth()
    transport: MpiTransport | TorchDistTransport
    if name == "mpi":
        transport = MpiTransport(health)
    else:
        owns = not dist.is_initialized()
        if owns:
            _initialise(launch, name, device)
        transport = TorchDistTransport(device, health, owns)
    _tell_of_blocking(transport)
    if launch.kind == "mpi":
        atexit.register(_finish_mpi, health)
    if transport.size > 1:
        health.actual = _open_watch(transport, launch, settings, timeout_s)
    return transport


def _tell_of_blocking(transport: MpiTransport | TorchDistTransport) -> None:
    """Rank 0 says in one line which settings take the overlap of messages and computation away."""
    killers = overlap_killers(os.environ, transport.library, transport.device.type)
    if killers and not transport.rank:
        told = "; ".join(f"{killer.setting} {killer.harm} ({killer.remedy})" for killer in killers)
        log.warning("messages will not be hidden: %s", told)


def _started(launch: Launch) -> str:
    return {"alone": "alone", "forked": "by --ranks", "torchrun": "by torchrun", "mpi": "by MPI"}[launch.kind]


def _initialise(launch: Launch, backend: str, device: torch.device) -> None:
    if launch.kind == "forked":
        assert launch.meeting is not None and launch.rank is not None and launch.size is not None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        initialise(backend, f"file://{launch.meeting.store_file}", launch.rank, launch.size, device)
    elif launch.kind == "torchrun":
        assert launch.rank is not None and launch.size is not None
        initialise(backend, "env://", launch.rank, launch.size, device)
    else:
        _initialise_over_mpi(backend, device)


def _initialise_over_mpi(backend: str, device: torch.device) -> None:
    """MPI launched the ranks; torch.distributed meets at a port that rank 0 announces over MPI."""
    from cocodiff.comm.mpi import initialised_mpi

    mpi = initialised_mpi()
    world = mpi.COMM_WORLD
    one_host = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size() == world.Get_size()
    if one_host and device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.gethostname())
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = world.bcast(probe.getsockname()[1])
    initialise(backend, f"tcp://{world.bcast(host)}:{port}", world.Get_rank(), world.Get_size(), device)


def _open_watch(transport: Transport, launch: Launch, settings: dict[str, str], timeout_s: float) -> Watch:
    rank, size = transport.rank, transport.size
    if launch.meeting is not None:
        here: Any = launch.meeting.listener if rank == 0 else ("127.0.0.1", launch.meeting.port)
        return Watch.open(rank, size, here, launch.meeting.key, settings, timeout_s)
    listener, word = None, None
    if rank == 0:
        listener = socket.create_server(("", 0), backlog=size)
        # Where rank 0 can be reached the launcher knows best; hosts of one name may not share a loopback.
        word = (os.environ.get("MASTER_ADDR") or socket.gethostname(), listener.getsockname()[1], secrets.token_hex(8))
    hub, port, key = transport.broadcast_object(word)
    host = "127.0.0.1" if hub == socket.gethostname() else hub
    return Watch.open(rank, size, listener or (host, port), key, settings, timeout_s)


def _finish_mpi(health: _LateHealth) -> None:
    from mpi4py import MPI

    try:
        health.check()
    except Exception:
        os._exit(1)  # MPI_Finalize would wait for the lost rank
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
