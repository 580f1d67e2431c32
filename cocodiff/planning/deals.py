"""How the ranks of a run are dealt to a job's images: so many replicas, each with so many guidance branches."""

from __future__ import annotations

from typing import NamedTuple


class Deal(NamedTuple):
    """replicas: sets of ranks that make images of their own. guidance: parts of a replica that compute one branch of
    classifier-free guidance each. The ranks of a part share a sequence, by the mesh that the settings say."""

    replicas: int = 1
    guidance: int = 1
