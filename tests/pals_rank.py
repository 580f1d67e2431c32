"""A rank of an mpiexec that tells it no more than PALS does: its number, its number on its node, how many are there.

usage: pals_rank.py [NAME=VALUE ...] FILE.py or cocodiff's words

The launcher that has really started it tells more, which its MPI library needs: the library goes on seeing that, as it
reads the process's variables by itself; Python sees PALS' four, and those that are given.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

from cocodiff.comm.launch import detect, without_launcher


def pretend(given: dict[str, str]) -> None:
    """Show Python the variables of PALS in place of those of the launcher."""
    real, found = dict(os.environ), detect()
    rank, local_rank = str(found.rank), str(found.local_rank)
    own = {"PALS_RANKID": rank, "PMIX_RANK": rank, "PALS_LOCAL_RANKID": local_rank}
    users = {name: value for name, value in without_launcher(real).items() if not name.startswith(("HYDRA_", "I_MPI_"))}
    os.environ.clear()
    os.environ.update(users | own | {"PALS_LOCAL_SIZE": str(found.local_size)} | given)
    library = ctypes.CDLL(None)
    for name in real.keys() - os.environ.keys():
        library.setenv(name.encode(), real[name].encode(), 1)


if __name__ == "__main__":
    words = sys.argv[1:]
    given = dict(word.split("=", 1) for word in words if "=" in word and word.split("=")[0].isupper())
    words = words[len(given) :]
    pretend(given)
    sys.argv = words
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = ["cocodiff", *words]
        from cocodiff.cli.main import program

        program()
