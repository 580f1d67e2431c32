"""The order in which the blocks of a ring are passed on: round the tiles of a card, then to the next card, then to the
next node. Pure data.

One ring through all ranks would send every block over the one link that leaves a card or a node, and nothing over the
links beside it. Here all ranks pass on the block that they hold at the same time, all by a tile, by a card or by a
node. So every rank sends over a link of its own, and a node receives each block once from each other node. A rank never
needs a block again that it has passed on. It holds two at a time: the one it computes with and the one it receives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocodiff.topology import Place
from cocodiff.topology.axes import Mesh

Integers = NDArray[np.int64]
LEVELS = NODE, CARD, TILE = (0, 1, 2)  # indices into `Grid.shape`


class Move(NamedTuple):
    """A step of a ring in which a member passes on the block that it holds and receives the next one."""

    to: int  # member that gets the block
    before: int  # member that the next block comes from
    brings: int  # member whose own block the next one is


class Visit(NamedTuple):
    """The time in which one member of a ring holds one block."""

    member: int  # member whose own block it is
    onward: Move | None  # the move after it; None for the last visit
    holder: int  # member that holds this member's own block meanwhile


@dataclass(frozen=True)
class Grid:
    """The members of a ring (indices from 0), arranged by node, card and tile, and the way of blocks between them."""

    shape: tuple[int, int, int]  # number of nodes, cards of a node, tiles of a card
    members: tuple[int, ...]  # the members in the order of the grid, tiles fastest
    along: tuple[int, ...] = LEVELS  # levels along which blocks are passed; without `NODE` they stay on their node

    @classmethod
    def of(cls, places: Sequence[Place]) -> Grid:
        """Arrange the members of a ring by their places on the machine.

        If cards have unequal numbers of members, blocks go from tile to tile through the whole node. They go to and fro
        over the cards, so that messages stay on a card or in a plane wherever possible. If nodes have unequal numbers,
        blocks go in this way through all nodes.

        Args:
            places: the place of each member, by member.
        """
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
        """The number of times that a block goes all the way round in one attention call.

        It is once if blocks pass between nodes. If they stay on their node, as TokenRing's queries do, they go round it
        once for each node of the ring. In each round they meet the keys of one node. Those of other nodes come by a
        grid along `NODE` alone.
        """
        return 1 if NODE in self.along else self.shape[NODE]

    @cached_property
    def levels_M(self) -> Integers:
        """The level along which all blocks go at each of M moves, as an index into `shape`.

        Blocks go round the card, then one card on, and after all cards one node on. The next round of a card begins
        where the last one ended, and is complete from there.
        """
        nodes, cards, tiles = (size if level in self.along else 1 for level, size in enumerate(self.shape))
        number_M = np.arange(1, nodes * cards * tiles)
        return np.where(number_M % tiles != 0, 2, np.where(number_M // tiles % cards != 0, 1, 0))

    def blocks_at_hand(self, members: Sequence[int]) -> Integers:
        """Return whose block each of some members holds at each visit: an array of members, [visits, members]."""
        return self._from(members, -self._steps_ML)

    def holders(self, members: Sequence[int]) -> Integers:
        """Return which member holds the block of each of some members at each visit: an array of members, [visits,
        members]."""
        return self._from(members, self._steps_ML)

    @cached_property
    def _steps_ML(self) -> Integers:
        """The number of steps that a block has taken along each of L levels at each of M visits, [visits, levels]."""
        steps_ML = np.zeros((len(self.levels_M) + 1, len(LEVELS)), dtype=np.int64)
        steps_ML[1:] = np.cumsum(np.eye(len(LEVELS), dtype=np.int64)[self.levels_M], 0)
        return steps_ML

    def neighbours(self, members: Sequence[int], level: int, step: int) -> Integers:
        """Return the members that stand some steps further than each of the given ones along a level, as an array.

        Args:
            members: the members to start from.
            level: index into `shape`: NODE, CARD or TILE.
            step: number of steps; negative for the other direction.
        """
        return self._from(members, step * np.eye(len(LEVELS), dtype=np.int64)[level : level + 1])[0]

    def visits(self, member: int) -> tuple[Visit, ...]:
        """Return all blocks that a member holds in a call, one after the other, its own first."""
        to, before = ([int(self.neighbours([member], level, step)[0]) for level in LEVELS] for step in (1, -1))
        at_hand_M, holders_M = (of([member])[:, 0].tolist() for of in (self.blocks_at_hand, self.holders))
        steps = zip(self.levels_M, at_hand_M[1:], strict=True)
        moves = [Move(to[level], before[level], brings) for level, brings in steps]
        return tuple(map(Visit, at_hand_M, [*moves, None], holders_M))

    def _from(self, members: Sequence[int], steps_ML: Integers) -> Integers:
        """Return the member that is reached by each row of steps from each of the given members, [rows, members].

        Args:
            members: the members to start from.
            steps_ML: number of steps along each level, [rows, levels].
        """
        members_G = np.array(self.members)
        places_NL = np.stack(np.unravel_index(np.argsort(members_G)[list(members)], self.shape), 1)
        there_MNL = (places_NL + steps_ML[:, None]) % np.array(self.shape)
        return members_G[np.ravel_multi_index(tuple(np.moveaxis(there_MNL, -1, 0)), self.shape)]


def _to_and_fro(places: Sequence[Place]) -> tuple[int, ...]:
    """Return the members of a ring ordered by node and card, with the planes ascending on one card and descending on
    the next.

    Args:
        places: the place of each member, by member.
    """
    cards = sorted({(place.node, place.card) for place in places})
    turn = {card: (-1) ** number for number, card in enumerate(cards)}

    def key(number: int) -> tuple[int, int, int]:
        place = places[number]
        return place.node, place.card, turn[place.node, place.card] * place.plane

    return tuple(sorted(range(len(places)), key=key))


def rounds_of(mesh: Mesh, along: tuple[int, ...] = LEVELS) -> tuple[Grid, ...]:
    """Return the way of blocks round each ring of a mesh, by slot. Ring u joins the ranks at slot (index) u of all
    Ulysses groups; its member g is that of group g.

    Args:
        mesh: the Ulysses groups and the rings across them.
        along: levels (NODE, CARD, TILE) along which blocks are passed on; without NODE they stay on their node.
    """
    places, rings = mesh.topology.places, zip(*mesh.groups, strict=True)
    return tuple(replace(Grid.of([places[rank] for rank in ring]), along=along) for ring in rings)


def visits_of(mesh: Mesh, rank: int, along: tuple[int, ...] = LEVELS) -> tuple[Visit, ...]:
    """Return the blocks that a rank attends to in a ring, in order, each with the move by which it is passed on.

    Args:
        mesh: the Ulysses groups and the rings across them.
        rank: the rank that attends.
        along: levels (NODE, CARD, TILE) along which blocks are passed.
    """
    group, slot = mesh.group_and_slot(rank)
    return rounds_of(mesh, along)[slot].visits(group)
