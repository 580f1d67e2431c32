"""Ring attention: keys and values of every Ulysses group go round, each rank attends to what has arrived and passes it
on meanwhile (StreamFusion, section 2.2; Ring Attention).

A block is the keys and values of all tokens of one group for the heads that are here. While a rank attends to one, it
sends that one on (`rounds.py` tells where to) and receives the next: at most two blocks of others are here at any time.
What the parts give is merged in float32 in the order of the visits, so nothing depends on which message is early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from cocodiff.attention.local import Keys, LocalAttention, Partial, mask_in_rank_order
from cocodiff.attention.strategy import LazyQKV
from cocodiff.comm.transport import Group, LanePending, Pending, Ranks
from cocodiff.kernels import Kernels, views
from cocodiff.routes.rounds import Move, visits_of
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout
from cocodiff.trace import Trace

LANE = "ring"


class KeysValues(NamedTuple):
    """Keys and values of one group's tokens, [B, S_g, G, D] each, contiguous."""

    k_BSGD: Tensor
    v_BSGD: Tensor


class Ring:
    """One rank's place in its ring. Its messages are keys and values whole, whatever the Ulysses part sends."""

    def __init__(
        self,
        mesh: Mesh,
        transport: Ranks,
        trace: Trace,
        kernels: Kernels | None = None,
        local: LocalAttention | None = None,
        sequences: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """transport: of all ranks. local: what computes. sequences: of every group, the order of its ranks' rows at
        this slot, where it is another one (see `Layout.sequence`)."""
        self.mesh, self._trace, self._local = mesh, trace, local or LocalAttention()
        self.sequences = sequences or [()] * mesh.ring
        self._kernels = kernels or Kernels(note=trace.note_kernel)
        self.rank, (self.group, slot) = transport.rank, mesh.group_and_slot(transport.rank)
        self._visits = visits_of(mesh, transport.rank)
        self._rank_of = [group[slot] for group in mesh.groups]
        members = sorted(self._rank_of)
        self._index_of = [members.index(rank) for rank in self._rank_of]
        self._ranks, self._lane = transport.group(members), transport.lane(LANE)

    def attend(
        self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, qkv: LazyQKV, layouts: Sequence[Layout], layer: str = ""
    ) -> Tensor:
        """Attention of the group's queries to all groups' keys: [B, S_g, G, D] of the queries' dtype. layouts: of every
        group."""
        merged: Partial | None = None
        for block in self.blocks(k_BSGD, v_BSGD, qkv, layouts, layer):
            merged = self._merge(merged, self._local.part(q_BSGD, *block))
        assert merged is not None, "a ring has a rank"
        return merged.out_BLHD.to(q_BSGD.dtype)

    def blocks(
        self, k_BSGD: Tensor, v_BSGD: Tensor, qkv: LazyQKV, layouts: Sequence[Layout], layer: str = ""
    ) -> Iterator[Keys]:
        """Every group's keys and values for the heads that are here, the own ones first. Each is on its way to another
        rank, and the one after it on its way here, until another is asked for; a block is gone when the second after
        it is asked for."""
        here, buffers = KeysValues(k_BSGD.contiguous(), v_BSGD.contiguous()), self._two_buffers(k_BSGD, layouts)
        for number, visit in enumerate(self._visits):
            coming: LanePending[KeysValues] | None = None
            if visit.onward is not None:
                rows = sum(layouts[visit.onward.brings].rows)
                coming = self._pass_on(here, visit.onward, buffers[number % 2], rows, layer)
            yield Keys(*here, mask_in_rank_order(qkv, layouts[visit.member]))
            if coming is not None:
                with self._trace.span("wait for kv", layer=layer):
                    here = coming.wait()

    def _two_buffers(self, like_BSGD: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
        """Flat memory for two blocks of the largest other group; for one where no more than one comes."""
        B, _, G, D = like_BSGD.shape
        others = [sum(layouts[visit.member].rows) for visit in self._visits[1:]]
        return [like_BSGD.new_empty(2 * B * max(others) * G * D) for _ in others[:2]]

    def _pass_on(
        self, here: KeysValues, onward: Move, buffer: Tensor, rows: int, layer: str
    ) -> LanePending[KeysValues]:
        """Starts sending a block on and receiving one of `rows` rows."""
        B, _, G, D = here.k_BSGD.shape
        shape = (B, rows, G, D)
        incoming = KeysValues(*views(buffer[: 2 * math.prod(shape)], [shape, shape]))

        def exchange(here: KeysValues, incoming: KeysValues) -> KeysValues:
            with self._trace.span("kv ring", LANE, layer):
                sends, recvs = [(x, onward.to) for x in here], [(x, onward.before) for x in incoming]
                self._post(self._ranks, sends, recvs).wait()
                return incoming

        return self._lane.submit(exchange, here, incoming)

    def _post(self, group: Group, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> Pending:
        """Starts messages to and from members of the ring, and counts what is sent."""
        for x, member in sends:
            link = self.mesh.topology.link_class(self.rank, self._rank_of[member])
            for purpose in ("attention", "whole"):
                self._trace.count(link, x.nbytes, purpose)
        return group.send_recv(*([(x, self._index_of[member]) for x, member in pairs] for pairs in (sends, recvs)))

    def _merge(self, merged: Partial | None, part: Partial) -> Partial:
        """The first part, in float32, is what the others are added to."""
        lse_BLH = part.lse_BLH.contiguous()
        if merged is None:
            return Partial(part.out_BLHD.float(), lse_BLH)
        self._kernels.merge_partials(*merged, part.out_BLHD, lse_BLH)
        return merged
