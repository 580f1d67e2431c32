"""V-Major (CoCoDiff section III-D): only tokens whose v changed travel; the others are what they were when they last
did, for every rank alike.

Each rank keeps, for every site, the q, k and v it received: whole sequences of its own heads. A selective step gathers
the active rows, sends them through the very exchange that carries full ones, and writes what arrives into those caches.
The output always travels whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cocodiff.attention.ring import Ring
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.attention.torus import InChunks
from cocodiff.attention.ulysses import Arriving, Call, FullCall, Local, Order, Sent, Ulysses, joint
from cocodiff.attention.v_major.drift import DriftNotes
from cocodiff.attention.v_major.selection import Cards, Schedule, Selection, quiet_tokens, rows_in_order, stable_tokens
from cocodiff.comm.transport import LanePending, Ranks
from cocodiff.kernels import Kernels, Rows
from cocodiff.routes.plans import Block
from cocodiff.topology.layout import Layout, slices
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.relay import Blocks, Freight, Travelling
from cocodiff.wire.staged import Staged, WholeArriving


class Moment(NamedTuple):
    """Where denoising stands: which run of the model, which of its steps."""

    run: int
    step: int
    steps: int


@dataclass
class SiteCache:
    """What a site keeps between steps. reference: v at the scored rows; received: q, k and v, each [B, S, G, D].
    inference: whether they were made in torch's inference mode, outside of which they cannot be written to."""

    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    last_step: int = -2
    inference: bool = False
    reference: Tensor | None = None
    received: dict[str, Tensor] = field(default_factory=dict)


class VMajor(Ulysses):
    """Ulysses that sends active tokens only. On one rank nothing travels, and nothing is selected."""

    def __init__(
        self,
        topology: Topology,
        exchange: Exchange | None,
        trace: Trace,
        order: Order = joint,
        *,
        transport: Ranks,
        schedule: Schedule,
        scoring: str,
        reference: str,
        now: Callable[[], Moment],
        local: Local | None = None,
        ring: Ring | None = None,
    ) -> None:
        """scoring: "source" (each rank scores its own tokens over all heads before they travel) or "card" (after v's
        first phase the card's first tile scores the card's tokens with its plane's heads; TAPA only).
        reference: "prev" (v at the call before) or "sent" (v as it was last sent)."""
        super().__init__(topology, exchange, trace, order, local, ring=ring)
        self.schedule, self.scoring, self.reference = schedule, scoring, reference
        self.rank = transport.rank
        self._now, self._run = now, -1
        self._caches: dict[Site, SiteCache] = {}
        self._cards: dict[tuple[tuple[int, ...], torch.device], Cards] = {}
        self.drift = DriftNotes()
        self._kernels = exchange.kernels if exchange is not None else Kernels()
        if exchange is not None:
            self.group, self.lane = transport.group(range(transport.size)), transport.lane("select")

    def call(self, qkv: LazyQKV, exchange: Exchange, layout: Layout, site: Site) -> Call:
        moment = self._now()
        if moment.run != self._run:  # a new image: nothing of the last one may be seen
            self.clear()
            self.drift.settle()
            self._run = moment.run
        cache = self._caches.setdefault(site, SiteCache())
        kind = SourceCall if self.scoring == "source" else CardCall
        return kind(qkv, exchange, layout, self._trace, site.kind, self, cache, moment)

    def clear(self) -> None:
        """Frees all caches."""
        self._caches.clear()

    def cache_bytes(self) -> int:
        """Bytes that this rank's caches hold now."""
        caches = self._caches.values()
        return sum(t.nbytes for c in caches for t in [*c.received.values(), c.reference] if t is not None)

    def select(self, score_BS: Tensor, norm_BS: Tensor, layout: Layout, step: int, steps: int) -> Tensor:
        """The active image tokens, bool [B, S_img], from every token's score (and norm, for a threshold)."""
        return self.cards(layout, score_BS.device).active(
            score_BS, norm_BS, lambda score_BN, norm_BN: self.stable(score_BN, norm_BN, step, steps)
        )

    def stable(self, score_BN: Tensor, norm_BN: Tensor, step: int, steps: int) -> Tensor:
        """Of cards' image tokens, each card's in a row, those that stay: bool [B, N]."""
        fraction = self.schedule.stable_fraction(step, steps)
        if fraction is None:
            return quiet_tokens(score_BN, norm_BN, self.schedule.threshold)
        return stable_tokens(score_BN, fraction, self._kernels)

    def prepare(self, layout: Layout, text_first: bool, device: torch.device) -> None:
        """Works out what calls of a layout need once, which the first selective one does otherwise."""
        self.cards(layout, device)
        rows_in_order(layout, text_first, device)

    def cards(self, layout: Layout, device: torch.device) -> Cards:
        key = layout.image, device
        if key not in self._cards:
            self._cards[key] = Cards.build(self._topology, layout.image, device)
        return self._cards[key]


@dataclass
class SelectiveCall(FullCall):
    """One attention call of V-Major, full or not; how it scores is the subclass's."""

    strategy: VMajor
    cache: SiteCache
    moment: Moment
    full: bool = True

    def begin(self, v_BLHD: Tensor) -> None:
        """Decides whether all tokens travel, now that v's shape is known."""
        cache, step, inference = self.cache, self.moment.step, torch.is_inference_mode_enabled()
        same = cache.shape == v_BLHD.shape and cache.layout == self.layout and cache.inference == inference
        known = same and cache.last_step == step - 1
        self.strategy.drift.see(step)
        self.full = not known or self.strategy.schedule.is_full(step, self.moment.steps)
        if not known:
            cache.reference, cache.received = None, {}
        cache.last_step, cache.shape, cache.layout = step, tuple(v_BLHD.shape), self.layout
        cache.inference = inference

    def image_rows(self, rank: int) -> slice:
        """Where a rank's image tokens stand among its rows."""
        text = self.layout.text[rank] if self.qkv.text_first else 0
        return slice(text, text + self.layout.image[rank])

    def remember(self, v_BNHD: Tensor, active_BN: Tensor | None) -> None:
        """Updates the reference where scoring has not: all of it at the first call, else the tokens that travel."""
        if self.cache.reference is None:
            self.cache.reference = v_BNHD.clone(memory_format=torch.contiguous_format)
        elif active_BN is not None and self.strategy.reference == "sent":
            self.cache.reference[active_BN] = v_BNHD[active_BN]

    def score(self, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        """Change and norm of every token against the reference, which must be there; noted in the profile. At full
        steps, and where the reference is "prev", the same pass makes v the reference."""
        assert self.cache.reference is not None, "a selective step follows a full one"
        with self.trace.span("score", "select", self.layer):
            renew = self.full or self.strategy.reference == "prev"
            change_BN, norm_BN = self.exchange.kernels.l1_score(v_BNHD, self.cache.reference, renew)
        self.strategy.drift.scored(self.moment.step, change_BN, norm_BN)
        return change_BN, norm_BN

    def gather(self, own_BN: Tensor, parts_BN: list[Tensor]) -> None:
        """Every rank's scores or selection, on the lane that calls; counted like all bytes of attention."""
        with self.trace.span("gather selection", "select", self.layer):
            self.strategy.group.all_gather(own_BN.contiguous(), parts_BN).wait()
        for peer in range(len(parts_BN)):
            self.trace.count(self.exchange.link_class(peer), own_BN.nbytes)

    def send_all(self, names: str, tensors_BLHD: list[Tensor], soon: bool) -> Sent:
        """All tokens travel."""
        (sent,) = FullCall.send(self, names, tensors_BLHD, soon)
        return self.arrive(*sent, None)

    def arrive(self, names: str, pending: Arriving, selection: Callable[[], Selection] | None) -> Sent:
        kernels, staged = self.exchange.kernels, self.exchange.staged
        if staged is not None and isinstance(pending, InChunks):
            return [(names, ChunkArrival(self.cache, names, pending, selection, kernels, staged))]
        return [(names, Arrival(self.cache, names, pending, selection, kernels))]


@dataclass
class Arrival:
    """Tensors on their way into the caches. selection None: all of them travel and replace what was there."""

    cache: SiteCache
    names: str
    pending: Arriving
    selection: Callable[[], Selection] | None
    kernels: Kernels

    def wait(self) -> Sequence[Tensor]:
        received = self.pending.wait()
        if self.selection is None:
            self.cache.received |= dict(zip(self.names, received, strict=True))
        else:
            caches = [self.cache.received[name].flatten(0, 1) for name in self.names]
            self.kernels.scatter_rows([rows_1NGD[0] for rows_1NGD in received], self.selection().arriving, caches)
        return [self.cache.received[name] for name in self.names]


@dataclass
class ChunkArrival(Arrival):
    """The same, chunk by chunk."""

    pending: InChunks  # type: ignore[assignment]
    staged: Staged

    def chunk(self, name: str, number: int) -> Tensor:
        arrived = self.pending.chunk(name, number)
        if self.selection is None:
            self.cache.received[name] = arrived
        else:
            selection, cache = self.selection(), self.cache.received[name]
            rows = self.staged.rows(selection.layout, number)
            self.kernels.scatter_rows([arrived[0, rows]], selection.arriving[rows], [cache.flatten(0, 1)])
        return self.cache.received[name]


def travelling_rows(x_BLHD: Tensor, index_N: Tensor) -> Rows:
    """The chosen rows of all batch rows in one, [1, N, H, D], gathered where they are packed."""
    return Rows(x_BLHD.flatten(0, 1), index_N)


def whole(x_BLHD: Travelling) -> Tensor:
    """A block of which all rows travel, as v's do in TAPA's first phase."""
    assert isinstance(x_BLHD, Tensor), "these rows were chosen already"
    return x_BLHD


@dataclass
class SourceCall(SelectiveCall):
    """Every rank scores its own tokens; scores are gathered while q and k are made; active rows travel in every
    phase."""

    chosen: LanePending[Selection] | None = None

    def know_v(self, v_BLHD: Tensor) -> None:
        self.begin(v_BLHD)
        own_BNHD = v_BLHD[:, self.image_rows(self.strategy.rank)]
        if self.full:
            if self.cache.reference is not None:
                self.score(own_BNHD)
            self.remember(own_BNHD, None)
        else:
            self.chosen = self.strategy.lane.submit(lambda: self._choose(own_BNHD))

    def _choose(self, own_BNHD: Tensor) -> Selection:
        own, layout, strategy, batch = self.strategy.rank, self.layout, self.strategy, len(own_BNHD)
        change_BN, norm_BN = self.score(own_BNHD)
        columns = 2 if strategy.schedule.kind == "threshold" else 1
        sent = torch.stack([change_BN, norm_BN][:columns])
        parts = [sent.new_empty(columns, batch, tokens) for tokens in layout.image]
        self.gather(sent, parts)
        of_all = torch.cat(parts, 2)
        moment = self.moment
        active_BS = strategy.select(of_all[0], of_all[-1], layout, moment.step, moment.steps)
        own_active_BN = active_BS[:, slices(layout.image)[own]]
        strategy.drift.chosen(moment.step, own_active_BN)
        return Selection.build(active_BS, layout, self.qkv.text_first)

    def send(self, names: str, tensors_BLHD: list[Tensor], soon: bool = False) -> Sent:
        if self.chosen is None:
            return self.send_all(names, tensors_BLHD, soon)
        selected = self.chosen.wait

        def ready() -> tuple[list[Rows], Layout]:
            selection = selected()
            own = selection.of_rank[self.strategy.rank]
            chosen = [travelling_rows(x, own) for x in tensors_BLHD]
            if "v" in names and self.strategy.reference == "sent":
                chosen[-1] = self.renewing(chosen[-1])
            return chosen, selection.layout

        return self.arrive(names, self.travel(ready, names, tensors_BLHD[0]), selected)

    def renewing(self, v_KHD: Rows) -> Rows:
        """The chosen rows of v, of which the image tokens' become their reference when they are packed."""
        reference_BNHD, image = self.cache.reference, self.image_rows(self.strategy.rank)
        assert reference_BNHD is not None, "a selective step follows a full one"
        tokens, rows = reference_BNHD.shape[1], self.layout.rows[self.strategy.rank]
        row_K = v_KHD.index_K % rows - image.start
        place_K = v_KHD.index_K // rows * tokens + row_K
        place_K[(row_K < 0) | (row_K >= tokens)] = -1  # text has no reference
        return Rows(v_KHD.source_RHD, v_KHD.index_K, reference_BNHD.flatten(0, 1), place_K)


@dataclass
class CardCall(SelectiveCall):
    """v's first phase is whole; then the first tile of every card scores the card's tokens with its plane's heads, and
    the cards' selections are gathered while q and k are made."""

    chosen: Future[LanePending[Selection]] = field(default_factory=Future)

    def know_v(self, v_BLHD: Tensor) -> None:
        self.begin(v_BLHD)

    def send(self, names: str, tensors_BLHD: list[Tensor], soon: bool = False) -> Sent:
        if names == "qkv":  # v goes ahead: its first phase decides what of q and k travels
            return self.send("v", tensors_BLHD[2:]) + self.send("qk", tensors_BLHD[:2])
        selected = None if self.full else self._selected
        if names == "v":
            after_first = self._observe if self.full else self._reduce
            pending = self.exchange.forward_when(lambda: (tensors_BLHD, self.layout), "v", self.layer, after_first)
            whole = self.staged(tensors_BLHD[0]) is None
            return self.arrive("v", pending if whole else WholeArriving("v", pending), selected)
        if selected is None:
            return self.send_all(names, tensors_BLHD, soon)

        def ready() -> tuple[list[Rows], Layout]:
            selection = self._selected()
            own = selection.of_rank[self.strategy.rank]
            return [travelling_rows(x, own) for x in tensors_BLHD], selection.layout

        return self.arrive(names, self.travel(ready, names, tensors_BLHD[0]), selected)

    def _selected(self) -> Selection:
        return self.chosen.result().wait()

    def _scored_rows(self, freight: Freight) -> Tensor | None:
        """The card's image tokens with its first tile's plane's heads: on that tile, [B, N, H_k, D]; else None."""
        card, heads = self.exchange.scored_blocks()
        if card[0] != self.strategy.rank:
            return None
        rows = [
            torch.cat([whole(freight.blocks[Block(rank, head)][0])[:, self.image_rows(rank)] for head in heads], 2)
            for rank in card
        ]
        return torch.cat(rows, 1)

    def _observe(self, freight: Freight) -> Freight:
        """Full steps: only the reference is renewed."""
        scored_BNHD = self._scored_rows(freight)
        if scored_BNHD is not None:
            if self.cache.reference is not None:
                self.score(scored_BNHD)
            self.remember(scored_BNHD, None)
        return freight

    def _reduce(self, freight: Freight) -> Freight:
        """Selective steps: scores, shares the selection, and leaves the active rows of v for the second phase."""
        try:
            self.chosen.set_result(self.strategy.lane.submit(lambda: self._choose(freight)))
        except BaseException as error:
            self.chosen.set_exception(error)
            raise
        selection, carried = self._selected(), self.exchange.carried_heads()
        blocks: Blocks = {
            block: [travelling_rows(whole(x), selection.of_rank[block.rows]) for x in parts]
            for block, parts in freight.blocks.items()
            if block.heads in carried
        }
        return Freight(blocks, selection.layout)

    def _choose(self, freight: Freight) -> Selection:
        strategy, layout, moment = self.strategy, self.layout, self.moment
        scored_BNHD = self._scored_rows(freight)
        some = whole(next(iter(freight.blocks.values()))[0])
        batch, own = len(some), torch.empty(0, dtype=torch.uint8, device=some.device)
        if scored_BNHD is not None:
            change_BN, norm_BN = self.score(scored_BNHD)
            active_BN = ~strategy.stable(change_BN, norm_BN, moment.step, moment.steps)
            strategy.drift.chosen(moment.step, active_BN)
            self.remember(scored_BNHD, active_BN)
            own = active_BN.to(torch.uint8)
        scorers = self.exchange.scorers()
        cards = strategy.cards(layout, own.device)
        of_scorer = dict(zip(scorers, cards.sizes, strict=True))
        sizes = [batch * of_scorer.get(rank, 0) for rank in range(len(layout.rows))]
        parts = list(own.new_empty(sum(sizes)).split_with_sizes(sizes))
        self.gather(own.flatten(), parts)
        active_BS = own.new_empty(batch, sum(layout.image), dtype=torch.bool)
        of_cards_BN = torch.cat([parts[rank].view(batch, -1) for rank in scorers], 1)  # a launch for all cards
        active_BS[:, cards.all_S] = of_cards_BN.bool()
        return Selection.build(active_BS, layout, self.qkv.text_first)
