"""The axes that ranks are divided into: replicas x guidance x ring x ulysses. Pure data.

A *replica* makes images of its own and shares nothing with the others. Within a replica, each *branch* computes one
branch of classifier-free guidance (axis "guidance"). The ranks of a branch share a sequence, by Ulysses x Ring. A
*Ulysses group* holds a part of the sequence: its ranks exchange tokens for heads among themselves, and then each of
them, at its *slot*, has some heads of the group's tokens. The ranks of one slot in all groups have the same heads; they
form a *ring*, in which every group's keys and values go round (StreamFusion, sections 2.2 and 4.2). One group is plain
Ulysses, groups of one rank are plain Ring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from cocodiff.config.errors import UserError
from cocodiff.config.machine import Place, Topology
from cocodiff.topology.layout import Layout, Segment, Segments, ShardedSegment, even_shares, slices

PLACEMENTS = ("topology", "usp")
AXES = ("card", "plane")


@dataclass(frozen=True)
class Mesh:
    """groups[g][u] is the rank at slot u of Ulysses group g.

    placement: "topology" puts neighbours into a ring, so that Ulysses goes across the slow links; "usp" puts them into
    a Ulysses group. axis: whether ranks of a node are neighbours by "card" (siblings first) or by "plane". kind: what
    goes round the rings, a name of the registry's `RINGS`.
    """

    topology: Topology
    groups: tuple[tuple[int, ...], ...]
    placement: str = "topology"
    axis: str = "card"
    kind: str = "keys"
    _layouts: dict[tuple[Segments, int], tuple[Layout, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls, topology: Topology, ring: int = 1, placement: str = "topology", axis: str = "card", kind: str = "keys"
    ) -> Mesh:
        """Raises UserError where `ring` does not divide the ranks."""
        size = topology.size
        check_divides("ring", ring, size, ", or auto")
        if ring == 1:
            return cls(topology, (tuple(range(size)),))
        ulysses, places = size // ring, topology.places
        near = [(p.node, p.card, p.plane) if axis == "card" else (p.node, p.plane, p.card) for p in places]
        order = sorted(range(size), key=lambda rank: near[rank])
        if placement == "topology":
            groups = [order[g::ring] for g in range(ring)]
        else:
            groups = [order[g * ulysses : (g + 1) * ulysses] for g in range(ring)]
        return cls(topology, tuple(map(tuple, groups)), placement, axis, kind)

    @property
    def ring(self) -> int:
        """Ring degree: groups, and ranks of a ring."""
        return len(self.groups)

    @property
    def ulysses(self) -> int:
        """Ulysses degree: ranks of a group, and rings."""
        return len(self.groups[0])

    def group_and_slot(self, rank: int) -> tuple[int, int]:
        """The group and the slot of a rank."""
        return self._slots[rank]

    @cached_property
    def _slots(self) -> dict[int, tuple[int, int]]:
        return {rank: (g, u) for g, group in enumerate(self.groups) for u, rank in enumerate(group)}

    @cached_property
    def parts(self) -> tuple[Topology, ...]:
        """Every group as a topology of its own: rank u of it is its slot u."""
        return (self.topology,) if self.ring == 1 else tuple(self.topology.part(group) for group in self.groups)

    def heads(self, heads: int) -> tuple[int, ...]:
        """Heads of every slot: at most one more than any other's."""
        if self.ulysses > heads:
            raise UserError(
                f"Ulysses groups of {self.ulysses} of {self.topology.size} ranks for {heads} attention heads: a slot "
                f"needs one or more; choose ring auto, or a ring that leaves at most {heads} ranks to a group"
            )
        return even_shares(heads, self.parts[0].shard_order)

    def layouts(self, segments: Segments, heads: int) -> tuple[Layout, ...]:
        """Every group's layout of one attention call. Tokens are divided among all ranks as without a mesh. Raises
        UserError where ranks outnumber the tokens of a segment that each needs, or slots heads."""
        key = (segments, heads)
        if key not in self._layouts:
            self._layouts[key] = self._build_layouts(*key)
        return self._layouts[key]

    def _build_layouts(self, segments: Segments, heads: int) -> tuple[Layout, ...]:
        if self.ring == 1:
            return (Layout.build(self.topology, segments, heads),)
        of_slots = self.heads(heads)
        divided = [(segment, slices(segment.shares(self.topology))) for segment in segments]

        def part(segment: Segment, at: tuple[slice, ...], group: tuple[int, ...]) -> ShardedSegment:
            own = [at[rank] for rank in group]
            return ShardedSegment(segment, tuple(x.stop - x.start for x in own), tuple(x.start for x in own))

        return tuple(Layout(tuple(part(*one, group) for one in divided), of_slots) for group in self.groups)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def check_divides(name: str, parts: int, ranks: int, or_else: str = "") -> None:
    """Raises UserError where so many ranks have no such number of equal parts."""
    if parts < 1 or ranks % parts:
        fitting = ", ".join(map(str, divisors(ranks)))
        raise UserError(f"{name} {parts} does not divide {ranks} ranks: choose one of {fitting}{or_else}")


def meshes(
    topology: Topology, heads: int, ring: int | str = "auto", placement: str = "auto", kind: str = "keys"
) -> list[Mesh]:
    """Every mesh of these ranks whose Ulysses groups have at most a rank for each head, Ring degree by degree; of kinds
    other than keys with ring auto those with a ring. Raises UserError for a ring that ranks and heads do not allow."""
    size = topology.size
    fitting = [n for n in divisors(size) if size // n <= heads]
    if ring != "auto" and ring not in fitting:
        raise UserError(
            f"ring {ring}: {size} ranks and {heads} attention heads allow ring {', '.join(map(str, fitting))} "
            f"(a divisor of the ranks that leaves at most {heads} ranks to a Ulysses group), or auto"
        )
    found: dict[frozenset[tuple[int, ...]], Mesh] = {}
    if kind != "keys" and size > 1:
        fitting = fitting[fitting[0] == 1 :]
    for degree in fitting if ring == "auto" else [int(ring)]:
        for name in PLACEMENTS if placement == "auto" else (placement,):
            for axis in AXES:
                mesh = Mesh.build(topology, degree, name, axis, kind)
                found.setdefault(frozenset(mesh.groups), mesh)
    return list(found.values())


def mesh_without_ring(
    topology: Topology, heads: int, ring: int | str, prefer_ulysses: bool = False, kind: str = "keys"
) -> Mesh | None:
    """Ulysses alone, where that is asked for or takes no comparison: with ring auto where heads allow it, for what
    speeds up Ulysses' exchange only (prefer_ulysses) and on machines whose file does not tell the tiles' rate; not with
    another kind than keys, which asks for a ring. Raises UserError as `meshes`."""
    known = topology.machine.device.bf16_tflop_s > 0
    auto = ring == "auto" and (kind in ("keys", "auto") or topology.size == 1)
    if ring == 1 or (auto and topology.size <= heads and (prefer_ulysses or not known)):
        return meshes(topology, heads, 1)[0]
    return None


class Coordinates(NamedTuple):
    """Where a rank stands, from 0: in which replica, in which of its branches."""

    replica: int
    guidance: int


@dataclass(frozen=True)
class Axes:
    """All ranks of a run, divided among replicas and guidance: branches[r][g] are the ranks of guidance branch g of
    replica r, ascending. A mesh divides those of a branch into ring and ulysses, by their numbers within it."""

    topology: Topology
    branches: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def build(cls, topology: Topology, replica: int = 1, guidance: int = 1) -> Axes:
        """Ranks are cut into replicas, these into branches. Raises UserError where a degree does not divide them."""
        replicas = cut(topology, tuple(range(topology.size)), replica, "replicas")
        return cls(topology, tuple(cut(topology, ranks, guidance, "guidance") for ranks in replicas))

    def coordinates(self, rank: int) -> Coordinates:
        return next(
            Coordinates(r, g)
            for r, of_replica in enumerate(self.branches)
            for g, branch in enumerate(of_replica)
            if rank in branch
        )

    def replica(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's replica, ascending."""
        return tuple(sorted(sum(self.branches[self.coordinates(rank).replica], ())))

    def branch(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's guidance branch, ascending."""
        at = self.coordinates(rank)
        return self.branches[at.replica][at.guidance]

    def partners(self, rank: int) -> tuple[int, ...]:
        """The ranks with this rank's number in every branch of its replica, branch by branch."""
        number = self.branch(rank).index(rank)
        return tuple(branch[number] for branch in self.branches[self.coordinates(rank).replica])


class Partition(NamedTuple):
    """The division of a run's ranks. The ranks of a part share a sequence, by the mesh that the settings say."""

    replicas: int = 1  # sets of ranks that make images of their own
    guidance: int = 1  # parts of a replica that compute one branch of classifier-free guidance each

    @property
    def parts(self) -> int:
        """Sets of ranks that share a sequence each."""
        return self.replicas * self.guidance


def partitions_of(
    ranks: int, guides: bool, replicas: int | None = None, guidance: int | None = None, least: int = 1
) -> list[Partition]:
    """Return every partition of so many ranks, replicas ascending.

    guides: the run has two branches of guidance; else all ranks of a replica compute its one branch, also where
    `guidance` is given.
    replicas, guidance: a number that the user has set; default: any.
    least: the fewest ranks that may share a sequence.
    Raises UserError for numbers that the ranks do not allow.
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


def cut(topology: Topology, ranks: tuple[int, ...], parts: int, name: str = "parts") -> tuple[tuple[int, ...], ...]:
    """Cuts ranks into equal parts, each ascending: into whole nodes where that goes, a node into its planes, or into
    cards where a part is as small as these or planes do not fit. Of the two ways to cut a node, that one is taken whose
    worst part has the fewest pairs of ranks on slow links. Raises UserError where `parts` does not divide the ranks."""
    size = len(ranks)
    check_divides(name, parts, size)

    def runs(near: Callable[[Place], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        order = sorted(ranks, key=lambda rank: near(topology.places[rank]))
        return tuple(tuple(sorted(order[n : n + size // parts])) for n in range(0, size, size // parts))

    by_card = runs(lambda place: (place.node, place.card, place.plane))
    by_plane = runs(lambda place: (place.node, place.plane, place.card))
    return min(by_card, by_plane, key=lambda ways: max(_slow_pairs(topology, part) for part in ways))


def _slow_pairs(topology: Topology, ranks: tuple[int, ...]) -> tuple[int, int, int]:
    """The pairs of ranks whose link is between nodes, across planes of a node, and within a plane of a node."""
    places = [topology.places[rank] for rank in ranks]

    def pairs(alike: Iterable[Hashable]) -> int:
        return sum(count * (count - 1) // 2 for count in Counter(alike).values())

    on_node, on_card = pairs(p.node for p in places), pairs(p.card for p in places)
    in_plane = pairs((p.node, p.plane) for p in places)
    return len(places) * (len(places) - 1) // 2 - on_node, on_node - on_card - in_plane, in_plane
