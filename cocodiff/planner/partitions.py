"""The division of a run's ranks among a job's images: replicas, and guidance branches within them.

`choice.py` gives the cost of each. This module imports neither numpy nor torch.
"""

from __future__ import annotations

from typing import NamedTuple

from cocodiff.config.errors import UserError
from cocodiff.topology.axes import check_divides, divisors


class Partition(NamedTuple):
    """A division of the ranks. The ranks of a part share a sequence, in the mesh that the settings ask for."""

    replicas: int = 1  # sets of ranks that make images of their own
    guidance: int = 1  # parts of a replica, each of which computes one branch of classifier-free guidance

    @property
    def parts(self) -> int:
        """The number of sets of ranks that share a sequence."""
        return self.replicas * self.guidance


def partitions_of(
    ranks: int, guides: bool, replicas: int | None = None, guidance: int | None = None, least: int = 1
) -> list[Partition]:
    """Return every partition of the ranks, with ascending replicas. Raise UserError for given numbers that the ranks do
    not allow.

    Args:
        ranks: number of ranks
        guides: True if the run has two branches of guidance; without them `guidance` has no effect
        replicas, guidance: given numbers; None to try all
        least: least number of ranks that share a sequence
    """
    if replicas is not None:
        check_divides("replicas", replicas, ranks)
    branches = (1, 2) if guides else (1,)
    if guides and guidance is not None:
        branches = (guidance,)
    found = [
        Partition(sets, parts)
        for sets in (divisors(ranks) if replicas is None else [replicas])
        for parts in branches
        if ranks // sets % parts == 0
    ]
    shared = [partition for partition in found if ranks // partition.parts >= least]
    rest = f"{ranks // replicas} of a replica" if replicas is not None else f"{ranks}"
    if not found:
        raise UserError(f"guidance_parallel {guidance} does not divide the ranks ({rest}): choose 1 or auto")
    if not shared:
        raise UserError(
            f"of the ranks ({rest}) {least} or more have to share an image, and fewer would with what is given: start "
            f"more, or have fewer replicas or guidance_parallel 1"
        )
    return shared
