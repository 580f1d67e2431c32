"""The axes that ranks are divided into: replicas x guidance x ring x ulysses. Pure data.

A *replica* makes images of its own and shares nothing with the others. Within a replica, each *branch* computes one
branch of classifier-free guidance (axis "guidance"). The ranks of a branch share a sequence, by Ulysses x Ring.

A *Ulysses group* holds a part of the sequence. Its ranks exchange tokens for heads among themselves. After that each
rank, at its *slot*, has some heads of all the group's tokens. The ranks at one slot of all groups have the same heads.
They form a *ring*, around which every group's keys and values are passed (StreamFusion, sections 2.2 and 4.2). One
group is plain Ulysses; groups of one rank are plain Ring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from cocodiff.config.errors import UserError
from cocodiff.topology import Place, Topology
from cocodiff.topology.layout import Layout, Segment, Segments, ShardedSegment, even_shares, slices

# Ranks joined by fast links form a ring ("topology") or a Ulysses group ("usp").
PLACEMENTS = ("topology", "usp")
AXES = ("card", "plane")  # ranks of a node are ordered card by card, or plane by plane


@dataclass(frozen=True)
class Mesh:
    """The division of one sequence's ranks into Ulysses groups and, across them, rings.

    The ranks of a Ulysses group exchange tokens for heads. Ranks with the same slot (index) in all groups have the same
    heads, and form a ring in which keys and values go round.
    """

    topology: Topology  # the ranks that share the sequence
    groups: tuple[tuple[int, ...], ...]  # groups[g][u]: the rank at slot u of Ulysses group g
    placement: str = "topology"  # which ranks fast links join: those of a ring ("topology") or of a group ("usp")
    axis: str = "card"  # order of a node's ranks, by which they are grouped: "card" (card by card) or "plane"
    kind: str = "keys"  # what is passed around the rings, a name in the registry's `RINGS`
    # cache of `layouts`, by segments and number of heads
    _layouts: dict[tuple[Segments, int], tuple[Layout, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls, topology: Topology, ring: int = 1, placement: str = "topology", axis: str = "card", kind: str = "keys"
    ) -> Mesh:
        """Build the mesh with a given number of Ulysses groups. Raise UserError if it does not divide the number of
        ranks.

        Args:
            topology: the ranks that share the sequence.
            ring: number of Ulysses groups, which is the number of ranks in a ring. 1: no ring.
            placement: "topology" if ranks joined by fast links form a ring, "usp" if they form a Ulysses group.
            axis: the order of a node's ranks, "card" (card by card) or "plane" (plane by plane).
            kind: what is passed around the rings, a name in the registry's `RINGS`.
        """
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
        """The number of Ulysses groups, which is the number of ranks in a ring; 1: no rings."""
        return len(self.groups)

    @property
    def ulysses(self) -> int:
        """The number of ranks in a Ulysses group, which is the number of rings."""
        return len(self.groups[0])

    def group_and_slot(self, rank: int) -> tuple[int, int]:
        """Return the Ulysses group of a rank and its slot in that group, both indices from 0."""
        return self._slots[rank]

    @cached_property
    def _slots(self) -> dict[int, tuple[int, int]]:
        """The indices (Ulysses group, slot in the group) of every rank, by rank."""
        return {rank: (g, u) for g, group in enumerate(self.groups) for u, rank in enumerate(group)}

    @cached_property
    def parts(self) -> tuple[Topology, ...]:
        """The topology of each Ulysses group by itself, by group. Its rank u is the rank at the group's slot u."""
        return (self.topology,) if self.ring == 1 else tuple(self.topology.part(group) for group in self.groups)

    def heads(self, heads: int) -> tuple[int, ...]:
        """Return the number of attention heads at every slot of a Ulysses group; these numbers differ by at most one.

        Raise UserError if there are more slots than heads.

        Args:
            heads: number of all attention heads.
        """
        if self.ulysses > heads:
            groups = f"Ulysses groups of {self.ulysses} of {self.topology.size} ranks for {heads} attention heads"
            remedy = f"choose ring auto, or a ring that leaves at most {heads} ranks to a group"
            raise UserError(f"{groups}: a slot needs one or more; {remedy}")
        return even_shares(heads, self.parts[0].shard_order)

    def layouts(self, segments: Segments, heads: int) -> tuple[Layout, ...]:
        """Return the layout of one attention call in each Ulysses group, by group. Tokens are divided among all ranks
        as without rings.

        Layouts are cached. Raise UserError if there are more slots than heads, or more ranks than tokens of a segment
        that every rank needs.

        Args:
            segments: the segments of the sequence, in the model's order.
            heads: number of all attention heads.
        """
        key = (segments, heads)
        if key not in self._layouts:
            self._layouts[key] = self._build_layouts(*key)
        return self._layouts[key]

    def _build_layouts(self, segments: Segments, heads: int) -> tuple[Layout, ...]:
        """Compute the layouts that `layouts` returns and caches: one for each Ulysses group."""
        if self.ring == 1:
            return (Layout.build(self.topology, segments, heads),)
        of_slots = self.heads(heads)
        divided = [(segment, slices(segment.shares(self.topology))) for segment in segments]

        def part(segment: Segment, at: tuple[slice, ...], group: tuple[int, ...]) -> ShardedSegment:
            own = [at[rank] for rank in group]
            return ShardedSegment(segment, tuple(x.stop - x.start for x in own), tuple(x.start for x in own))

        return tuple(Layout(tuple(part(*one, group) for one in divided), of_slots) for group in self.groups)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def check_divides(name: str, parts: int, ranks: int, or_else: str = "") -> None:
    """Raise UserError if a number of ranks cannot be divided into equal parts. The message lists the numbers of parts
    that it can be divided into.

    Args:
        name: the setting that the message names.
        parts: number of parts.
        ranks: number of ranks.
        or_else: text after the list of valid numbers.
    """
    if parts < 1 or ranks % parts:
        fitting = ", ".join(map(str, divisors(ranks)))
        raise UserError(f"{name} {parts} does not divide {ranks} ranks: choose one of {fitting}{or_else}")


def meshes(
    topology: Topology, heads: int, ring: int | str = "auto", placement: str = "auto", kind: str = "keys"
) -> list[Mesh]:
    """Return every mesh of these ranks whose Ulysses groups have at most one rank per head, by ascending number of
    ranks in a ring. The planner compares them.

    With `ring` "auto" and another `kind` than "keys", meshes without a ring are left out. Raise UserError if ranks and
    heads do not allow the `ring` asked for.

    Args:
        topology: the ranks that share a sequence.
        heads: number of all attention heads.
        ring: number of ranks in a ring, or "auto" for all numbers that fit.
        placement: one of `PLACEMENTS`, or "auto" for both.
        kind: what is passed around the rings, a name in the registry's `RINGS`.
    """
    size = topology.size
    fitting = [n for n in divisors(size) if size // n <= heads]
    if ring != "auto" and ring not in fitting:
        allowed = f"{size} ranks and {heads} attention heads allow ring {', '.join(map(str, fitting))}"
        why = f"a divisor of the ranks that leaves at most {heads} ranks to a Ulysses group"
        raise UserError(f"ring {ring}: {allowed} ({why}), or auto")
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
    """Return the mesh of a single Ulysses group if it can be chosen without comparing predicted times of meshes, else
    None.

    `ring` 1 needs no comparison. "auto" needs none if ranks do not outnumber heads, `kind` does not ask for a ring, and
    `prefer_ulysses` is set or the machine file gives no compute rate. Raise UserError if ranks and heads do not allow
    the `ring` asked for.

    Args:
        topology: the ranks that share a sequence.
        heads: number of all attention heads.
        ring: the setting `ring`: number of ranks in a ring, or "auto".
        prefer_ulysses: True if a setting speeds up only the exchange of Ulysses.
        kind: the setting `ring_kind`: a name in the registry's `RINGS`, or "auto".
    """
    known = topology.machine.device.bf16_tflop_s > 0
    auto = ring == "auto" and (kind in ("keys", "auto") or topology.size == 1)
    if ring == 1 or (auto and topology.size <= heads and (prefer_ulysses or not known)):
        return meshes(topology, heads, 1)[0]
    return None


class Coordinates(NamedTuple):
    """The position of a rank among replicas and guidance branches, as indices from 0."""

    replica: int  # index of its replica
    guidance: int  # index of its guidance branch in the replica


@dataclass(frozen=True)
class Axes:
    """The division of all ranks of a run among replicas and, in each replica, branches of classifier-free guidance.

    A mesh divides the ranks of one branch further into ring and Ulysses, by their indices within the branch.
    """

    topology: Topology  # all ranks of the run
    branches: tuple[tuple[tuple[int, ...], ...], ...]  # [r][g]: ranks of branch g of replica r, ascending

    @classmethod
    def build(cls, topology: Topology, replica: int = 1, guidance: int = 1) -> Axes:
        """Divide all ranks into replicas, and each replica into guidance branches. Raise UserError if a number does not
        divide the ranks.

        Args:
            topology: all ranks of the run.
            replica: number of replicas.
            guidance: number of guidance branches in a replica.
        """
        replicas = cut(topology, tuple(range(topology.size)), replica, "replicas")
        return cls(topology, tuple(cut(topology, ranks, guidance, "guidance") for ranks in replicas))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the indices of the replica and of the guidance branch that a rank belongs to."""
        return next(
            Coordinates(r, g)
            for r, of_replica in enumerate(self.branches)
            for g, branch in enumerate(of_replica)
            if rank in branch
        )

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return all ranks of the replica that a rank belongs to, ascending."""
        return tuple(sorted(sum(self.branches[self.coordinates(rank).replica], ())))

    def branch(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute the same branch of classifier-free guidance as this one, itself included,
        ascending."""
        at = self.coordinates(rank)
        return self.branches[at.replica][at.guidance]

    def partners(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have this rank's index in each guidance branch of its replica, branch by branch, itself
        included. They send each other the branches' results."""
        number = self.branch(rank).index(rank)
        return tuple(branch[number] for branch in self.branches[self.coordinates(rank).replica])


class Partition(NamedTuple):
    """The numbers of replicas and guidance branches that ranks are divided into. Ranks of one replica and branch share
    a sequence."""

    replicas: int = 1  # sets of ranks that make images of their own
    guidance: int = 1  # parts of a replica, each of which computes one branch of classifier-free guidance

    @property
    def parts(self) -> int:
        """The number of sets of ranks that share a sequence: replicas times guidance branches."""
        return self.replicas * self.guidance


def partitions_of(
    ranks: int, guides: bool, replicas: int | None = None, guidance: int | None = None, least: int = 1
) -> list[Partition]:
    """Return every possible division of the ranks into replicas and guidance branches, by ascending number of replicas.

    Raise UserError for given numbers that the ranks do not allow.

    Args:
        ranks: number of ranks.
        guides: True if the run has two branches of guidance. Without them `guidance` has no effect.
        replicas: the number of replicas; None to try all.
        guidance: the number of branches that are computed apart; None to try 1 and 2.
        least: least number of ranks that share a sequence.
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
        wrong = f"of the ranks ({rest}) {least} or more have to share an image, and fewer would with what is given"
        raise UserError(f"{wrong}: start more, or have fewer replicas or guidance_parallel 1")
    return shared


def cut(topology: Topology, ranks: tuple[int, ...], parts: int, name: str = "parts") -> tuple[tuple[int, ...], ...]:
    """Cut ranks into equal parts, each ascending, so that few pairs of ranks in a part are joined by slow links only.
    Return the ranks of each part.

    Parts are whole nodes where possible. A node is cut by planes or by cards: the way whose worst part has fewer pairs
    on slow links. Raise UserError if `parts` does not divide the number of ranks.

    Args:
        topology: the places of the ranks.
        ranks: the ranks to cut.
        parts: number of parts.
        name: the setting that the error names.
    """
    size = len(ranks)
    check_divides(name, parts, size)

    def runs(near: Callable[[Place], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Return equal parts of the ranks, in the order of their places by `near`. Ranks of a part ascend."""
        order = sorted(ranks, key=lambda rank: near(topology.places[rank]))
        return tuple(tuple(sorted(order[n : n + size // parts])) for n in range(0, size, size // parts))

    by_card = runs(lambda place: (place.node, place.card, place.plane))
    by_plane = runs(lambda place: (place.node, place.plane, place.card))
    return min(by_card, by_plane, key=lambda ways: max(_slow_pairs(topology, part) for part in ways))


def _slow_pairs(topology: Topology, ranks: tuple[int, ...]) -> tuple[int, int, int]:
    """Count the pairs of these ranks on each class of slow link: (on two nodes, on one node with neither card nor plane
    in common, on two cards of a node in one plane)."""
    places = [topology.places[rank] for rank in ranks]

    def pairs(alike: Iterable[Hashable]) -> int:
        return sum(count * (count - 1) // 2 for count in Counter(alike).values())

    on_node, on_card = pairs(p.node for p in places), pairs(p.card for p in places)
    in_plane = pairs((p.node, p.plane) for p in places)
    return len(places) * (len(places) - 1) // 2 - on_node, on_node - on_card - in_plane, in_plane
