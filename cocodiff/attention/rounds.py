"""How the blocks of a ring go round: from tile to tile of a card, then on to the next card, then on to the next node.

One ring through all ranks would send every block over the one link that leaves a card or a node, and nothing over the
links of its neighbours. Here all ranks pass on what they have at hand, all by a tile, or by a card, or by a node: every
rank sends over a link of its own, and a node hears a block once from each other node, not from every rank but the last.
A rank never needs a block again that it passed on: the one at hand and the one that comes are all that it holds. Pure
data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cocodiff.topology import Place


class Onward(NamedTuple):
    """The block at hand goes to one member while the next one comes from another."""

    to: int
    before: int


class Visit(NamedTuple):
    """What a member attends to, one after the other: a block by the member that it is of, and where it goes on to."""

    member: int
    onward: Onward | None


@dataclass(frozen=True)
class Grid:
    """A ring's members, numbers from 0, by node, card and tile. shape: of these levels; their product is all."""

    shape: tuple[int, int, int]
    members: tuple[int, ...]

    @classmethod
    def of(cls, places: Sequence[Place]) -> Grid:
        """places: of the members. Where cards have unequal parts in the ring it goes from tile to tile through a node,
        to and fro on each card so that a message stays on a card or in a plane wherever it can; where nodes have, it
        does through all of them."""
        nodes = _sizes([place.node for place in places])
        cards = _sizes([(place.node, place.card) for place in places])
        of_node = len(places) // len(nodes) if len(set(nodes)) == 1 else 0
        if of_node and len(set(cards)) == 1:
            order = sorted(range(len(places)), key=lambda n: (places[n].node, places[n].card, places[n].plane))
            return cls((len(nodes), of_node // cards[0], cards[0]), tuple(order))
        shape = (len(nodes), of_node, 1) if of_node else (1, len(places), 1)
        return cls(shape, _to_and_fro(places))

    def visits(self, member: int) -> tuple[Visit, ...]:
        """All of a member's, its own block first."""
        at, moved, found = self._place(self.members.index(member)), [0, 0, 0], []
        for level in self._moves():
            one = tuple(int(n == level) for n in range(3))
            found.append(Visit(self._at(at, moved, -1), Onward(self._at(at, one, 1), self._at(at, one, -1))))
            moved[level] += 1
        return (*found, Visit(self._at(at, moved, -1), None))

    def _moves(self) -> Iterator[int]:
        """Along which of the levels all blocks go on, visit by visit: round the card, and after each round a card on;
        after all cards a node on. Where a round ends the next one begins: it is a full one from there as well."""
        _, cards, tiles = self.shape
        for number in range(1, len(self.members)):
            yield 2 if number % tiles else 1 if number // tiles % cards else 0

    def _at(self, at: tuple[int, ...], step: Sequence[int], sign: int) -> int:
        """The member so many steps on, or before."""
        moved = tuple((a + sign * b) % size for a, b, size in zip(at, step, self.shape, strict=True))
        return self.members[self._number(moved)]

    def _number(self, place: tuple[int, ...]) -> int:
        node, card, tile = place
        return (node * self.shape[1] + card) * self.shape[2] + tile

    def _place(self, number: int) -> tuple[int, int, int]:
        rest, tile = divmod(number, self.shape[2])
        return (*divmod(rest, self.shape[1]), tile)


def _sizes(keys: Sequence[object]) -> list[int]:
    """How often each key is there."""
    return [keys.count(key) for key in dict.fromkeys(keys)]


def _to_and_fro(places: Sequence[Place]) -> tuple[int, ...]:
    cards = sorted({(place.node, place.card) for place in places})
    turn = {card: (-1) ** number for number, card in enumerate(cards)}

    def key(number: int) -> tuple[int, int, int]:
        place = places[number]
        return place.node, place.card, turn[place.node, place.card] * place.plane

    return tuple(sorted(range(len(places)), key=key))
