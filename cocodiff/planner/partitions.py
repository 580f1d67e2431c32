"""How the ranks of a run are divided among a job's images: so many replicas, each with so many guidance branches.

`choice.py` says what each takes; here is nothing that imports numpy or torch.
"""

from __future__ import annotations

from typing import NamedTuple

from cocodiff.config.errors import UserError
from cocodiff.topology.axes import check_divides, divisors


class Partition(NamedTuple):
    """replicas: sets of ranks that make images of their own. guidance: parts of a replica that compute one branch of
    classifier-free guidance each. The ranks of a part share a sequence, by the mesh that the settings say."""

    replicas: int = 1
    guidance: int = 1

    @property
    def parts(self) -> int:
        """Sets of ranks that share a sequence each."""
        return self.replicas * self.guidance


def partitions_of(
    ranks: int, guides: bool, replicas: int | None = None, guidance: int | None = None, least: int = 1
) -> list[Partition]:
    """Every partition of so many ranks, replicas ascending. replicas, guidance: one that is pinned. least: ranks that
    are to share a sequence at least. guides: whether the run has two branches of guidance. Without them all ranks of a
    replica compute the one that there is, also where guidance is pinned. Raises UserError for pinned numbers that the
    ranks do not allow."""
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
