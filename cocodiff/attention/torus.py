"""Torus attention (StreamFusion section 4.3): attention starts on the chunks that are here, and finished rows of the
output leave while others are computed.

Pull Q: each arriving chunk of q attends to the first chunk of keys, which is this rank's own. Pull KV: all of q attends
to each further one. Push O: with the last keys q goes chunk by chunk, the farthest first, and every finished chunk is
sent. Parts are merged in float32, in this order whatever arrives first: results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from cocodiff.attention.merge import Keys, Partial
from cocodiff.attention.strategy import LazyQKV
from cocodiff.device import used_on_current_stream
from cocodiff.kernels import Kernels
from cocodiff.topology.layout import Layout
from cocodiff.trace import Trace
from cocodiff.wire.staged import Staged

if TYPE_CHECKING:
    from cocodiff.attention.ring import Ring

LocalPart = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Partial]  # as `partial_attention`


@runtime_checkable
class InChunks(Protocol):
    """q, k or v on their way, chunk by chunk."""

    def chunk(self, name: str, number: int) -> Tensor:
        """The whole sequence of one tensor for this rank's heads, [B, S, G, D], as soon as this chunk of it is there.
        Chunks are asked for in ascending order, each once."""
        ...


class Torus:
    """One attention call. k and v lie in memory once: chunks are slices of the whole sequence."""

    def __init__(
        self,
        staged: Staged,
        layout: Layout,
        kernels: Kernels,
        trace: Trace,
        layer: str,
        attention: LocalPart,
        ring: Ring | None = None,
    ) -> None:
        """ring: brings the keys of other Ulysses groups, which are attended to after the own ones."""
        self._staged, self._layout, self._kernels, self._attention = staged, layout, kernels, attention
        self._trace, self._layer, self._ring = trace, layer, ring
        self._rows = [staged.rows(layout, number) for number in range(len(staged.chunks))]

    def attend(self, arriving: Mapping[str, InChunks], qkv: LazyQKV, mask_B11S: Tensor | None) -> Tensor:
        """arriving: of "q", "k" and "v". Returns attention of this rank's rows to all, [B, L, H, D]."""
        numbers = range(len(self._rows))
        between = len(self._key_groups()) - 2 + (self._ring.mesh.ring - 1 if self._ring else 0)
        back, keys = self._staged.back(self._layout, self._layer), self._keys(arriving, qkv, mask_B11S)
        with self._trace.span("attention", layer=self._layer):
            first, running = next(keys), []
            for number in numbers:
                q_BSGD = self._await(arriving, "q", range(number, number + 1))
                part = self._attention(q_BSGD[:, self._rows[number]], *first)
                running.append(Partial(part.out_BLHD.float(), part.lse_BLH.contiguous()))
            for _ in range(between):
                part = self._attention(q_BSGD, *next(keys))
                for of_chunk, rows in zip(running, self._rows, strict=True):
                    self._merge(of_chunk, Partial(part.out_BLHD[:, rows], part.lse_BLH[:, rows]))
            last = next(keys)
            for number in reversed(numbers):
                finished = running.pop()
                self._merge(finished, self._attention(q_BSGD[:, self._rows[number]], *last))
                back.push(number, finished.out_BLHD.to(q_BSGD.dtype))
        with self._trace.span("wait for o", layer=self._layer):
            return back.wait()

    def _keys(self, arriving: Mapping[str, InChunks], qkv: LazyQKV, mask_B11S: Tensor | None) -> Iterator[Keys]:
        """All keys in the order in which they are attended to, each as soon as it is here. The own ones are on their
        way round the ring as soon as they are whole."""
        blocks, groups = None, self._key_groups()
        for group in groups:
            v_BSGD, k_BSGD = self._await(arriving, "v", group), self._await(arriving, "k", group)
            if self._ring is not None and group is groups[-1]:
                blocks = self._ring.blocks(k_BSGD, v_BSGD, qkv, self._layer)
                next(blocks)
            rows = slice(self._rows[group[0]].start, self._rows[group[-1]].stop)
            yield Keys(k_BSGD[:, rows], v_BSGD[:, rows], None if mask_B11S is None else mask_B11S[..., rows])
        yield from blocks or ()

    def _key_groups(self) -> list[range]:
        """The chunks of keys that are attended to together. On one node every card has links of its own and all others'
        keys arrive at once: one pass over them saves launches and merging."""
        chunks = len(self._rows)
        cuts = [0, *(range(1, chunks) if self._staged.several_nodes else [1]), chunks]
        return [range(start, stop) for start, stop in pairwise(cuts)]

    def _await(self, arriving: Mapping[str, InChunks], name: str, group: range) -> Tensor:
        with self._trace.span(f"wait for {name}", layer=self._layer):
            *_, x_BSGD = [arriving[name].chunk(name, number) for number in group]
            return used_on_current_stream(x_BSGD)

    def _merge(self, running: Partial, part: Partial) -> None:
        self._kernels.merge_partials(*running, part.out_BLHD.to(torch.float32), part.lse_BLH.contiguous())
