"""How the blocks of a ring go round: a ring of nodes, in each of them a ring of cards, on each card a ring of tiles.

One ring through all ranks would send every block over the one link that leaves a card or a node, and nothing over the
links of its neighbours. As rings in rings every rank sends over its own: a block goes on to the same place of the next
node and of the next card, and each of its copies round the card where it came. A node then hears a block as often as
another node has one, not from every rank but the last; slow messages have all blocks of a node to hide behind.
Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from cocodiff.topology import Place

LEVELS = ("nodes", "cards", "tiles")


@dataclass(frozen=True)
class Onward:
    """The block that is here goes to the next member at a level, another one comes from the member before it.

    visit: at which of this member's visits it is attended to.
    """

    level: int
    to: int
    before: int
    visit: int


@dataclass(frozen=True)
class Visit:
    """What a member attends to, one after the other: a block by the member that it is of, and where it goes on to."""

    member: int
    onward: tuple[Onward, ...]


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

    @property
    def levels(self) -> set[int]:
        """On which of them blocks go round."""
        return {level for level, size in enumerate(self.shape) if size > 1}

    @property
    def blocks(self) -> tuple[int, ...]:
        """For every level how many blocks of others a member keeps room for: one that it attends to and passes on, and
        one that comes."""
        return tuple(min(2, size - 1) for size in self.shape)

    def visits(self, member: int) -> tuple[Visit, ...]:
        """All of a member's, its own block first: all blocks of a card, then of the node's other cards, then of other
        nodes."""
        at = self._place(self.members.index(member))
        steps = list(product(*map(range, self.shape)))
        return tuple(
            Visit(self._at(at, step, -1), tuple(self._onward(at, step, level) for level in self._goes_on(step)))
            for step in steps
        )

    def _goes_on(self, step: tuple[int, ...]) -> list[int]:
        """The levels at which a block goes on: those inside the one at which it came, unless it has been all round."""
        return [
            level
            for level, size in enumerate(self.shape)
            if step[level] + 1 < size and not any(step[level + 1 :])
        ]  # fmt: skip

    def _onward(self, at: tuple[int, ...], step: tuple[int, ...], level: int) -> Onward:
        one = tuple(int(n == level) for n in range(3))
        following = tuple(a + b for a, b in zip(step, one, strict=True))
        return Onward(level, self._at(at, one, 1), self._at(at, one, -1), self._number(following))

    def _at(self, at: tuple[int, ...], step: tuple[int, ...], sign: int) -> int:
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
