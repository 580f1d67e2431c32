"""Who holds which tokens and heads: shares and slices, pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cocodiff.errors import UserError
from cocodiff.topology.machine import Topology


def deal(total: int, order: Sequence[int]) -> tuple[int, ...]:
    """Shares of `total` for len(order) ranks: sizes differ by at most one, the first ranks of `order` get extras."""
    base, extra = divmod(total, len(order))
    shares = [base] * len(order)
    for rank in order[:extra]:
        shares[rank] += 1
    return tuple(shares)


def slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Consecutive slices of the given sizes."""
    ends = list(accumulate(sizes))
    return tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))


def share_image(topology: Topology, tokens: int) -> tuple[int, ...]:
    """Image tokens of every rank, at least one each. Raises UserError when there are more ranks than tokens."""
    if topology.size > tokens:
        raise UserError(
            f"{topology.size} ranks for {tokens} image tokens: a rank needs at least one; "
            f"use at most {tokens} ranks or a larger image"
        )
    return deal(tokens, topology.deal_order)


def share_text(topology: Topology, tokens: int) -> tuple[int, ...]:
    """Text tokens of every rank, dealt from the other end than image tokens. A rank may have none."""
    return deal(tokens, topology.deal_order[::-1])


@dataclass(frozen=True)
class Layout:
    """One attention call: image tokens, text tokens and heads of every rank.

    A rank's rows are its image and its text tokens, in the order in which the model concatenates them. After the
    exchange the sequence is rank 0's rows, then rank 1's, and so on: the same for queries and keys, so attention
    does not notice.

    text_starts: where every rank's text tokens begin in the prompt; empty where they lie one behind the other.
    sequence: the ranks in another order for this rank's sequence, as Torus has them; empty for that one.
    """

    image: tuple[int, ...]
    text: tuple[int, ...]
    heads: tuple[int, ...]
    text_starts: tuple[int, ...] = ()
    sequence: tuple[int, ...] = ()

    @classmethod
    def build(cls, topology: Topology, image_tokens: int, text_tokens: int, heads: int) -> Layout:
        """Splits evenly: extras of heads and image tokens go round-robin over nodes, cards and planes; extra text
        tokens are dealt from the other end, so that no rank gets both before every rank has one.

        Raises UserError when there are more ranks than image tokens or heads.
        """
        if topology.size > heads:
            raise UserError(
                f"{topology.size} ranks for {heads} attention heads: Ulysses needs one or more for each; use at most "
                f"{heads} ranks, or a mesh of Ulysses and Ring (setting ring)"
            )
        return cls(
            share_image(topology, image_tokens), share_text(topology, text_tokens), deal(heads, topology.deal_order)
        )

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """L_i: rows of every rank."""
        return tuple(image + text for image, text in zip(self.image, self.text, strict=True))

    @cached_property
    def in_sequence(self) -> tuple[int, ...]:
        """The ranks in the order in which their rows stand in the whole sequence."""
        return self.sequence or tuple(range(len(self.heads)))

    @cached_property
    def row_slices(self) -> tuple[slice, ...]:
        """Where every rank's rows stand in the whole sequence."""
        of_rank = slices([self.rows[rank] for rank in self.in_sequence])
        return tuple(where for _, where in sorted(zip(self.in_sequence, of_rank, strict=True), key=lambda x: x[0]))

    @cached_property
    def text_slices(self) -> tuple[slice, ...]:
        """Where every rank's text tokens stand in the prompt."""
        if not self.text_starts:
            return slices(self.text)
        return tuple(slice(start, start + size) for start, size in zip(self.text_starts, self.text, strict=True))

    @cached_property
    def head_slices(self) -> tuple[slice, ...]:
        return slices(self.heads)
