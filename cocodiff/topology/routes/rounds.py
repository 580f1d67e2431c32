"""How the blocks of a ring go round: from tile to tile of a card, then on to the next card, then on to the next node.

One ring through all ranks would send every block over the one link that leaves a card or a node, and nothing over the
links of its neighbours. Here all ranks pass on what they have at hand, all by a tile, or by a card, or by a node: every
rank sends over a link of its own, and a node hears a block once from each other node, not from every rank but the last.
A rank never needs a block again that it passed on: the one at hand and the one that comes are all that it holds. Pure
data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocodiff.config.machine import Place
from cocodiff.topology.axes import Mesh

Integers = NDArray[np.int64]
LEVELS = NODE, CARD, TILE = (0, 1, 2)


class Move(NamedTuple):
    """The block at hand goes to one member while the next one comes from another. brings: whose block that is."""

    to: int
    before: int
    brings: int


class Visit(NamedTuple):
    """A block at hand: whose it is, where it goes on to, and who has the member's own block at hand meanwhile."""

    member: int
    onward: Move | None
    holder: int


@dataclass(frozen=True)
class Grid:
    """A ring's members, numbers from 0, by node, card and tile. shape: of these levels; their product is all. along:
    the levels along which blocks go round; without the node's they stay on it."""

    shape: tuple[int, int, int]
    members: tuple[int, ...]
    along: tuple[int, ...] = LEVELS

    @classmethod
    def of(cls, places: Sequence[Place]) -> Grid:
        """places: of the members. Where cards have unequal parts in the ring it goes from tile to tile through a node,
        to and fro on each card so that a message stays on a card or in a plane wherever it can; where nodes have, it
        does through all of them."""
        nodes = list(Counter(place.node for place in places).values())
        cards = list(Counter((place.node, place.card) for place in places).values())
        of_node = len(places) // len(nodes) if len(set(nodes)) == 1 else 0
        if of_node and len(set(cards)) == 1:
            order = sorted(range(len(places)), key=lambda n: (places[n].node, places[n].card, places[n].plane))
            return cls((len(nodes), of_node // cards[0], cards[0]), tuple(order))
        shape = (len(nodes), of_node, 1) if of_node else (1, len(places), 1)
        return cls(shape, _to_and_fro(places))

    @property
    def rounds(self) -> int:
        """How often blocks go round: on their node once for the keys of every node."""
        return 1 if NODE in self.along else self.shape[NODE]

    @cached_property
    def levels_M(self) -> Integers:
        """Along which level all blocks go on, move by move: round the card, and after each round a card on; after all
        cards a node on. Where a round ends the next one begins: it is a full one from there as well."""
        nodes, cards, tiles = (size if level in self.along else 1 for level, size in enumerate(self.shape))
        number_M = np.arange(1, nodes * cards * tiles)
        return np.where(number_M % tiles != 0, 2, np.where(number_M // tiles % cards != 0, 1, 0))

    def blocks_at_hand(self, members: Sequence[int]) -> Integers:
        """Whose block some members have at hand (visits x members): after each move the one of their neighbour."""
        return self._from(members, -self._steps_ML)

    def holders(self, members: Sequence[int]) -> Integers:
        """Who has each of some members' blocks at hand, visit by visit (visits x members)."""
        return self._from(members, self._steps_ML)

    @cached_property
    def _steps_ML(self) -> Integers:
        """How far along every level a block has come, visit by visit."""
        steps_ML = np.zeros((len(self.levels_M) + 1, len(LEVELS)), dtype=np.int64)
        steps_ML[1:] = np.cumsum(np.eye(len(LEVELS), dtype=np.int64)[self.levels_M], 0)
        return steps_ML

    def neighbours(self, members: Sequence[int], level: int, step: int) -> Integers:
        """The members that are so many steps on from these along a level."""
        return self._from(members, step * np.eye(len(LEVELS), dtype=np.int64)[level : level + 1])[0]

    def visits(self, member: int) -> tuple[Visit, ...]:
        """All of a member's, its own block first."""
        to, before = ([int(self.neighbours([member], level, step)[0]) for level in LEVELS] for step in (1, -1))
        at_hand_M, holders_M = (of([member])[:, 0].tolist() for of in (self.blocks_at_hand, self.holders))
        steps = zip(self.levels_M, at_hand_M[1:], strict=True)
        moves = [Move(to[level], before[level], brings) for level, brings in steps]
        return tuple(map(Visit, at_hand_M, [*moves, None], holders_M))

    def _from(self, members: Sequence[int], steps_ML: Integers) -> Integers:
        """Who is so many steps along every level from each of some members."""
        members_G = np.array(self.members)
        places_NL = np.stack(np.unravel_index(np.argsort(members_G)[list(members)], self.shape), 1)
        there_MNL = (places_NL + steps_ML[:, None]) % np.array(self.shape)
        return members_G[np.ravel_multi_index(tuple(np.moveaxis(there_MNL, -1, 0)), self.shape)]


def _to_and_fro(places: Sequence[Place]) -> tuple[int, ...]:
    cards = sorted({(place.node, place.card) for place in places})
    turn = {card: (-1) ** number for number, card in enumerate(cards)}

    def key(number: int) -> tuple[int, int, int]:
        place = places[number]
        return place.node, place.card, turn[place.node, place.card] * place.plane

    return tuple(sorted(range(len(places)), key=key))


def rounds_of(mesh: Mesh, along: tuple[int, ...] = LEVELS) -> tuple[Grid, ...]:
    """For every slot how blocks go round along these levels; members are groups."""
    places, rings = mesh.topology.places, zip(*mesh.groups, strict=True)
    return tuple(replace(Grid.of([places[rank] for rank in ring]), along=along) for ring in rings)


def visits_of(mesh: Mesh, rank: int, along: tuple[int, ...] = LEVELS) -> tuple[Visit, ...]:
    """The blocks that a rank attends to, group by group, and where each goes on to along these levels."""
    group, slot = mesh.group_and_slot(rank)
    return rounds_of(mesh, along)[slot].visits(group)
