"""One rank of a run to whose listening sockets strangers talk, as a program: `strangers.py TRANSPORT [RANKS]`; with a
number of ranks they are forked, else a launcher has started them. Rank 0 prints where each listened."""

from __future__ import annotations

import json
import pickle
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from cocodiff.comm.launch import Launch, detect
from cocodiff.comm.transport import Transport
from cocodiff.config.config import Config
from cocodiff.jobs.ranks import run_ranks


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


def listening() -> list[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return sorted({(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN})


def disturb(addresses: list[tuple[str, int]]) -> list[socket.socket]:
    """Strangers at every address, each with something else to say; they stay connected."""
    bomb, strangers = pickle.dumps(Bomb()), []
    for ip, port in addresses:
        for said in (bomb, bytes(8) + bomb, b"\xff" * 65536, b"GET / HTTP/1.0\r\n\r\n", b""):
            with suppress(OSError):
                strangers.append(socket.create_connection((ip.replace("0.0.0.0", "127.0.0.1"), port), timeout=5))
                strangers[-1].sendall(said)
    return strangers


def work(inherited: list[tuple[str, int]], transport: Transport) -> None:
    group = transport.group(range(transport.size))
    group.barrier()
    addresses = [address for address in listening() if address not in inherited]  # of the launcher's
    strangers = disturb(addresses)
    every = transport.gather_values(addresses)
    for number in range(3):
        again = transport.group(range(transport.size))
        parts = [torch.empty(1000) for _ in range(transport.size)]
        again.all_gather(torch.full((1000,), float(transport.rank + number)), parts).wait()
        assert [part.unique().tolist() for part in parts] == [[float(r + number)] for r in range(transport.size)]
        assert transport.broadcast_value({"from": transport.rank}) == {"from": 0}
    if every is not None:
        print(json.dumps(every), flush=True)
    for stranger in strangers:
        stranger.close()


def main() -> int:
    inherited, (name, *ranks) = listening(), sys.argv[1:]
    config = Config(transport=name, device="cpu", timeout_s=30.0)
    return run_ranks(
        int(ranks[0]) if ranks else None, Launch() if ranks else detect(), config, {}, partial(work, inherited)
    )


if __name__ == "__main__":
    sys.exit(main())
