"""The store over which torch.distributed's ranks find each other, and learn where the watch listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from cocodiff.errors import PeerLost, UserError

EVERY_INTERFACE = ("0.0.0.0", "::")


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


def listening_socket(host: str, port: int, one_host: bool, ranks: int) -> socket.socket:
    """Listens on the one interface that `host` names, or on all where that cannot be told. one_host: whether all ranks
    are on this host."""
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
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
    )


@cache
def launcher_store(
    host: str, port: int, rank: int, size: int, hosted: bool, attempt: str, start_s: float, one_host: bool
) -> Any:
    """The store of torchrun, or of whoever set MASTER_ADDR and MASTER_PORT, kept as long as the process: a later run of
    the same ranks meets at the same one. hosted: rank 0 has none to connect to and makes it.

    Raises PeerLost where rank 0 does not answer within `start_s`.
    """
    limit = timedelta(seconds=start_s)
    try:
        if rank == 0 and not hosted:
            store = _own_store(host, port, size, limit, one_host)
        else:
            store = dist.TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        where = f"does not answer at {host}:{port} within {start_s:g} s"
        raise PeerLost(0, f"{where} ({str(error).splitlines()[0]})") from error
    return dist.PrefixStore(f"cocodiff/{attempt}", store)


def _own_store(host: str, port: int, size: int, limit: timedelta, one_host: bool) -> Any:
    """Rank 0's store, at the port that the others know: another one of this process where it has one there."""
    try:
        listener = listening_socket(host, port, one_host, size)
    except OSError:
        return dist.TCPStore(host, port, size, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True)
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


def next_run(store: Any, rank: int) -> Any:
    """A part of a store that no earlier run of the same processes has written to. All ranks call it as often."""
    return dist.PrefixStore(f"run{store.add(f'opened/{rank}', 1)}", store)


def word_of_rank_0(store: Any, word: str | None, start_s: float) -> str:
    """Rank 0's `word`, None elsewhere, on every rank. Raises PeerLost where it does not come within `start_s`."""
    if word is not None:
        store.set("meeting", word)
    try:
        store.wait(["meeting"], timedelta(seconds=start_s))
    except dist.DistError as error:
        raise PeerLost(0, f"did not start within {start_s:g} s") from error
    return bytes(store.get("meeting")).decode()
