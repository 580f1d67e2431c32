"""Ulysses x Ring: which ranks exchange heads for tokens, and which pass keys and values around. Pure data.

A *Ulysses group* holds a part of the sequence: its ranks exchange tokens for heads among themselves, and then each of
them, at its *slot*, has some heads of the group's tokens. The ranks of one slot in all groups have the same heads; they
form a *ring*, in which every group's keys and values go round (StreamFusion, sections 2.2 and 4.2). One group is plain
Ulysses, groups of one rank are plain Ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from cocodiff.errors import UserError
from cocodiff.topology.layout import Layout, Segments
from cocodiff.topology.machine import Topology
from cocodiff.topology.segments import Part, Segment, deal, slices

PLACEMENTS = ("topology", "usp")
AXES = ("card", "plane")


@dataclass(frozen=True)
class Mesh:
    """groups[g][u] is the rank at slot u of Ulysses group g.

    placement: "topology" puts neighbours into a ring, so that Ulysses goes across the slow links; "usp" puts them into
    a Ulysses group. axis: whether ranks of a node are neighbours by "card" (siblings first) or by "plane".
    """

    topology: Topology
    groups: tuple[tuple[int, ...], ...]
    placement: str = "topology"
    axis: str = "card"
    _layouts: dict[tuple[Segments, int], tuple[Layout, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(cls, topology: Topology, ring: int = 1, placement: str = "topology", axis: str = "card") -> Mesh:
        """Raises UserError where `ring` does not divide the ranks."""
        size = topology.size
        if size % ring:
            fitting = [n for n in range(1, size + 1) if size % n == 0]
            raise UserError(
                f"ring {ring} does not divide {size} ranks: choose one of {', '.join(map(str, fitting))}, or auto"
            )
        if ring == 1:
            return cls(topology, (tuple(range(size)),))
        ulysses, places = size // ring, topology.places
        near = [(p.node, p.card, p.plane) if axis == "card" else (p.node, p.plane, p.card) for p in places]
        order = sorted(range(size), key=lambda rank: near[rank])
        if placement == "topology":
            groups = [order[g::ring] for g in range(ring)]
        else:
            groups = [order[g * ulysses : (g + 1) * ulysses] for g in range(ring)]
        return cls(topology, tuple(map(tuple, groups)), placement, axis)

    @property
    def ring(self) -> int:
        """Ring degree: groups, and ranks of a ring."""
        return len(self.groups)

    @property
    def ulysses(self) -> int:
        """Ulysses degree: ranks of a group, and rings."""
        return len(self.groups[0])

    def seat(self, rank: int) -> tuple[int, int]:
        """The group and the slot of a rank."""
        return self._seats[rank]

    @cached_property
    def _seats(self) -> dict[int, tuple[int, int]]:
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
        return deal(heads, self.parts[0].deal_order)

    def layouts(self, segments: Segments, heads: int) -> tuple[Layout, ...]:
        """Every group's layout of one attention call. Tokens are dealt to all ranks as without a mesh.

        Raises UserError where ranks outnumber the tokens of a segment that each needs, or slots heads.
        """
        key = (segments, heads)
        if key not in self._layouts:
            self._layouts[key] = self._build_layouts(*key)
        return self._layouts[key]

    def _build_layouts(self, segments: Segments, heads: int) -> tuple[Layout, ...]:
        if self.ring == 1:
            return (Layout.build(self.topology, segments, heads),)
        of_slots = self.heads(heads)
        dealt = [(segment, slices(segment.shares(self.topology))) for segment in segments]

        def part(segment: Segment, at: tuple[slice, ...], group: tuple[int, ...]) -> Part:
            return Part(segment, tuple(at[r].stop - at[r].start for r in group), tuple(at[r].start for r in group))

        return tuple(Layout(tuple(part(*one, group) for one in dealt), of_slots) for group in self.groups)
