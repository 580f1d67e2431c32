"""Torus attention (StreamFusion section 4.3): attention begins with the chunks that have arrived, and finished rows of
the output are sent while others are computed.

Pull Q: each chunk of q that arrives attends to the first chunk of keys, which is this rank's own. Pull KV: all of q
attends to each further chunk of keys. Push O: with the last keys, chunks of q attend one by one, the farthest first,
and each finished chunk is sent. Parts are merged in float32, in this order regardless of arrival, so results do not
depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from cocodiff.attention.local import AttentionCall, Keys, LocalAttention, Partial, merged
from cocodiff.exchange.outgoing import TensorFuture
from cocodiff.exchange.staged import OutputSender
from cocodiff.exchange.transfer import Transfer

if TYPE_CHECKING:
    from cocodiff.attention.ring import Ring


class Torus:
    """One attention call that computes on the chunks of tokens that have arrived while other chunks are being sent.

    A chunk is the tokens of some ranks. It is a slice of q, k or v with all tokens of the group, and takes no memory of
    its own.
    """

    def __init__(
        self,
        transfer: Transfer,
        sent: Mapping[str, TensorFuture],
        local: LocalAttention,
        ring: Ring | None,
        call: AttentionCall,
    ) -> None:
        """Prepare the call. Nothing is computed before `attend`.

        Args:
            transfer: the messages of the call.
            sent: the futures of q, k and v, by name.
            local: computes attention on this rank.
            ring: brings the keys of other Ulysses groups, which are attended to last; None for one group.
            call: the attention call, with masks.
        """
        assert transfer.exchange.staged is not None, "Torus attends to what comes in stages"
        self._staged = staged = transfer.exchange.staged
        self._transfer, self._local, self._ring, self._call = transfer, local, ring, call
        self._arriving = sent
        self._kernels, self._trace = transfer.exchange.kernels, transfer.exchange.trace
        self._rows = [transfer.layout.rows_of(ranks) for ranks in staged.chunks]
        # The chunks of keys that are attended to together. On one node every card has links of its own, so all other
        # keys arrive at the same time, and one pass over them saves launches and merging.
        chunks = len(self._rows)
        cuts = [0, *(range(1, chunks) if staged.several_nodes else [1]), chunks]
        self._key_groups = [range(start, stop) for start, stop in pairwise(cuts)]

    def attend(self) -> Tensor:
        """Return attention of this rank's rows to all tokens, [B, L, H, D], once all ranks have sent their parts of the
        output."""
        self._expect_in_order()
        numbers, layer = range(len(self._rows)), self._transfer.layer
        between = len(self._key_groups) - 2 + (self._ring.mesh.ring - 1 if self._ring else 0)
        back, keys = OutputSender(self._staged, self._transfer), self._keys()
        with self._trace.span("attention", layer=layer):
            first, running = next(keys), []
            for number in numbers:
                q_BSGD = self._await("q", range(number, number + 1))
                running.append(merged(self._kernels, None, self._local.part(q_BSGD[:, self._rows[number]], *first)))
            for _ in range(between):
                part = self._local.part(q_BSGD, *next(keys))
                for of_chunk, rows in zip(running, self._rows, strict=True):
                    merged(self._kernels, of_chunk, Partial(part.out_BLHD[:, rows], part.lse_BLH[:, rows]))
            last = next(keys)
            for number in reversed(numbers):
                finished = running.pop()
                merged(self._kernels, finished, self._local.part(q_BSGD[:, self._rows[number]], *last))
                back.push(number, finished.out_BLHD.to(q_BSGD.dtype))
        with self._trace.span("wait for o", layer=layer):
            return back.wait()

    def _expect_in_order(self) -> None:
        """Have chunks put in place as soon as they arrive, in the order in which attention will need them."""
        order = [("q", number) for number in range(1, len(self._rows))]
        order += [(name, number) for group in self._key_groups[1:] for name in "vk" for number in group]
        for name, number in order:
            self._arriving[name].expect(number)

    def _keys(self) -> Iterator[Keys]:
        """Yield keys and values in the order in which they are attended to, each as soon as they have arrived.

        The last chunks' keys complete those of this Ulysses group, which are then sent around the ring. The other
        groups' keys come after them.
        """
        blocks, mask_B11S = None, self._call.mask(0 if self._ring is None else self._ring.group)
        for group in self._key_groups:
            v_BSGD, k_BSGD = self._await("v", group), self._await("k", group)
            if self._ring is not None and group is self._key_groups[-1]:
                blocks = self._ring.blocks(k_BSGD, v_BSGD, self._call)
                next(blocks)
            rows = slice(self._rows[group[0]].start, self._rows[group[-1]].stop)
            yield Keys(k_BSGD[:, rows], v_BSGD[:, rows], None if mask_B11S is None else mask_B11S[..., rows])
        yield from blocks or ()

    def _await(self, name: str, chunks: range) -> Tensor:
        """Wait for some chunks of q, k or v. Return the tensor of the whole sequence, in which these and earlier chunks
        are valid.

        Args:
            name: "q", "k" or "v".
            chunks: numbers of the chunks, ascending.
        """
        with self._trace.span(f"wait for {name}", layer=self._transfer.layer):
            *_, x_BSGD = [self._arriving[name].chunk(number) for number in chunks]
            return x_BSGD
