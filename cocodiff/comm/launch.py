"""How this process was started: alone, forked by us, by torchrun, or by an MPI launcher. Reads the environment only."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

# A rank's own number on its node, by launcher; asked in this order.
LOCAL_RANK = (
    "LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "MPI_LOCALRANKID",
    "PMIX_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
MPI_RANK = ("PMI_RANK", "PALS_RANKID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
MPI_SIZE = ("PMI_SIZE", "PALS_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Meeting:
    """Where ranks that we forked meet: a file for the process group, the watch's port, a word that only they know."""

    store_file: str
    port: int
    key: str
    listener: socket.socket | None = None  # rank 0's


@dataclass(frozen=True)
class Launch:
    """kind: "alone", "forked", "torchrun" or "mpi". Rank and size may be None where an MPI launcher does not say."""

    kind: str = "alone"
    rank: int | None = 0
    size: int | None = 1
    local_rank: int = 0
    local_size: int | None = None
    meeting: Meeting | None = None

    @property
    def speaks(self) -> bool:
        """Whether this process may write to the terminal."""
        return not self.rank


def detect(environment: Mapping[str, str] | None = None) -> Launch:
    """The launcher that the environment shows: torchrun, an MPI launcher, else none."""
    env = os.environ if environment is None else environment

    def number(names: tuple[str, ...]) -> int | None:
        return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)

    local_rank, local_size = number(LOCAL_RANK) or 0, number(LOCAL_SIZE)
    if "TORCHELASTIC_RUN_ID" in env or all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return Launch("torchrun", int(env["RANK"]), int(env["WORLD_SIZE"]), local_rank, local_size)
    rank = number(MPI_RANK)
    if rank is not None:
        return Launch("mpi", rank, number(MPI_SIZE), local_rank, local_size)
    return Launch()
