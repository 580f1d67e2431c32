"""`python -m cocodiff_studies.emulate.enter PROGRAM...`: a rank of an MPI launcher enters its tile, then becomes it.

The launcher starts all ranks alike; which tile is a rank's own it learns from the launcher's environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cocodiff.comm.launch import detect
from cocodiff.errors import UserError
from cocodiff.processes.children import die_with_parent
from cocodiff_studies.emulate.namespaces import enter_path

TILES = "COCODIFF_EMULATION_TILES"  # the paths of the tiles' namespaces, by rank


def main(words: Sequence[str]) -> None:
    try:
        rank = detect().rank
    except UserError as error:
        raise SystemExit(f"cocodiff: {error}") from error
    if rank is None:
        raise SystemExit("cocodiff: the MPI launcher does not say which rank this is")
    die_with_parent(os.getppid())
    enter_path(os.environ[TILES].split(":")[rank])
    os.execvp(words[0], list(words))


if __name__ == "__main__":
    main(sys.argv[1:])
