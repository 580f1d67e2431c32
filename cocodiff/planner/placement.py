"""Chooses the mesh of Ulysses and Ring. Every mesh that ranks and heads allow is priced: what it sends over which
links, how many heads idle, and how long one attention call takes by that. Pure arithmetic (StreamFusion, section 4.2,
appendix D).

A prediction is coarse: every link carries its bytes at the machine file's rate and the fullest link sets the pace;
attention runs at half of the tile's bf16 rate; a move of a ring hides behind attention to the block before. It is meant
to rank meshes, not to tell seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cocodiff.attention.ring import LAG
from cocodiff.attention.streaming import head_runs
from cocodiff.attention.sums import SCORE_BYTES
from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.grouping import by_key
from cocodiff.config.machine import Topology
from cocodiff.config.registry import RINGS
from cocodiff.config.text_table import aligned
from cocodiff.engine.assemble import AttentionWork
from cocodiff.planner.traffic import Stage, Traffic, Wires, of_ranks, stages_of, total
from cocodiff.topology.axes import Mesh, mesh_without_ring, meshes
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.chunks import chunk_ranks, megabytes_per_rank
from cocodiff.topology.routes.rounds import CARD, LEVELS, NODE, TILE, rounds_of

EFFICIENCY = 0.5  # of attention, against the dense rate of a tile
UNKNOWN_TFLOP_S = 1.0  # of a tile whose machine file tells no rate: the order of magnitude of a CPU
MESSAGE_S = 20e-6  # what a step of messages takes at least
GAIN = 0.85  # a longer ring is taken if it needs at most this part of the time: predictions are coarse
# and so is another placement of a ring: what it computes is the same. Where .82 were predicted .93 were measured, and
# where .98 were, .95 (emulated nodes of p4de and Aurora)
PLACED = 0.95
SUM_BYTES = 4  # of the log of a sum, which a part has for each token and head

Levels = tuple[int, ...]


class InStages(NamedTuple):
    """Ulysses' messages of a call that goes in stages: seconds of those of the own chunk and of all others, which use
    other links, and which part of the group's keys is the own chunk. More than two chunks count as two. moves_s: of the
    ring, of keys and values."""

    own_s: float
    others_s: float
    own: float
    moves_s: Sequence[float] = ()

    def seconds(self, a_block: float) -> float:
        """Of the call, in the order of `torus.py`. q, k, v and o take a quarter of the messages each."""
        others = 1 - self.own
        at = 0.75 * self.own_s + self.own**2 * a_block
        at = max(at, 0.25 * self.others_s) + self.own * others * a_block
        began = at = max(at, 0.75 * self.others_s)  # all keys of the group are here and begin to go round
        last = others * a_block
        for move_s in self.moves_s:
            at, last = at + last, a_block
            began = at = max(at, began + move_s)
        return at + others * last + max(0.25 * self.others_s, self.own * last) + 0.25 * self.own_s


@dataclass(frozen=True)
class Priced:
    """The cost of a mesh in one attention call. bytes: of all ranks together by link class, the ring's messages
    included; Ulysses' blocks go straight to their ranks, as with exchange flat (others move bytes between the classes
    of a node). busiest_node: the most bytes that leave one node. heads: of every slot."""

    mesh: Mesh
    bytes: dict[str, float]
    busiest_node: int
    heads: tuple[int, ...]
    ulysses_s: float
    ring: Ring
    compute_s: float
    stages: InStages | None = None

    @property
    def idle(self) -> float:
        """The cost of uneven heads: heads of the fullest slot over the mean, ceil(H / P_u) P_u / H."""
        return max(self.heads) * len(self.heads) / sum(self.heads)

    @cached_property
    def seconds(self) -> float:
        """Ulysses' messages, in stages behind attention to what is here; then the ring: each block travels while the
        one before it is attended to."""
        a_block = self.compute_s / self.mesh.ring
        if self.stages is not None:
            return self.stages.seconds(a_block)
        return self.ulysses_s + self.ring.moves.seconds(a_block)


def price(mesh: Mesh, work: AttentionWork) -> Priced:
    layouts, wires = mesh.layouts(work.segments, work.heads), Wires(mesh.topology)
    rows_P, heads_P = (of_ranks(mesh, (getattr(one, name) for one in layouts)) for name in ("rows", "heads"))

    def both_ways(stage: Stage) -> list[Traffic]:
        """q, k and v, and the output."""
        there, back = (work.wire_cell * count * rows_P for count in (3, 1))
        return [stage.traffic(there, heads_P), stage.back().traffic(back, heads_P)]

    def seconds(stage: Stage) -> float:
        return sum(traffic.seconds() for traffic in both_ways(stage))

    (stage,), ring = stages_of(mesh, "flat"), ring_of(mesh, layouts, work, wires)
    messages, chunking = [*both_ways(stage), *ring.messages], work.chunking(mesh.parts[0])
    tokens = sum(sum(layout.rows) for layout in layouts)
    fullest = max(sum(layout.rows) * max(layout.heads) for layout in layouts)
    scores, device = work.batch * fullest * tokens, mesh.topology.machine.device
    rate = EFFICIENCY * 1e12 * (device.bf16_tflop_s or UNKNOWN_TFLOP_S)
    score_s = 0.0  # where a part of attention passes through memory, as no kernel tells its sums
    if mesh.ring > 1 and not device.sums_kernel and device.memory_gb_s:
        score_s = SCORE_BYTES / (device.memory_gb_s * 1e9)
    stages = None
    if megabytes_per_rank(layouts[0], 3 * work.wire_cell) >= chunking.from_mb:
        stages = in_chunks(mesh, chunking.chunks, rows_P, ring, lambda near: seconds(stage.only(near)) + MESSAGE_S)
    return Priced(
        mesh,
        total(one.bytes for one in messages),
        int(np.sum([one.out_of for one in messages], axis=0).max()),
        layouts[0].heads,
        seconds(stage) + 2 * MESSAGE_S * (mesh.ulysses > 1),
        ring,
        max(4 * work.head_dim * scores / rate, scores * score_s),
        stages,
    )


def in_chunks(
    mesh: Mesh, chunks: int, rows_P: np.ndarray, ring: Ring, seconds: Callable[[np.ndarray], float]
) -> InStages | None:
    """Of a call in so many chunks; None where there is one. seconds: of its messages, q, k, v and the output, of blocks
    whose (rows, heads) are chosen."""
    if chunks == 1:
        return None
    near_PP = np.zeros((mesh.topology.size,) * 2, dtype=bool)
    for group, part in zip(mesh.groups, mesh.parts, strict=True):
        for slot in range(part.size):
            own, *others = chunk_ranks(part, slot, chunks)
            if not others:
                return None
            near_PP[[group[one] for one in own], group[slot]] = True
    first = mesh.groups[0]
    share = float(rows_P[near_PP[:, first[0]]].sum() / rows_P[list(first)].sum())
    assert isinstance(ring.moves, KeyMoves), "queries travel whole"
    return InStages(seconds(near_PP), seconds(~near_PP), share, ring.moves.each_s)


def around(
    mesh: Mesh, layouts: Sequence[Layout], cell: int, wires: Wires, message_s: float, along: Levels = LEVELS
) -> tuple[Traffic, tuple[float, ...]]:
    """What goes round a ring in a call, and the seconds of every move. Moves along one level (tile, card or node) take
    the same links; each is given the time of the level's largest blocks. cell: bytes of a block for one token and head.
    along: the levels along which blocks go."""
    messages, of_level = Traffic(wires), [Traffic(wires) for _ in LEVELS]
    rows_G, ranks_GU = np.array([sum(layout.rows) for layout in layouts]), np.array(mesh.groups)
    every, grids = range(mesh.ring), rounds_of(mesh, along)
    for slot, grid in enumerate(grids):
        sizes_MG = layouts[0].heads[slot] * cell * rows_G[grid.blocks_at_hand(every)[:-1]]
        for level in LEVELS:
            chosen_MG = sizes_MG[grid.levels_M == level]
            if len(chosen_MG):
                pair = ranks_GU[:, slot], ranks_GU[grid.neighbours(every, level, 1), slot]
                messages.send(*pair, grid.rounds * chosen_MG.sum(0))
                of_level[level].send(*pair, chosen_MG.max(0))
    seconds = [traffic.seconds() + message_s for traffic in of_level]
    return messages, tuple(seconds[level] for level in grids[0].levels_M)


class KeyMoves(NamedTuple):
    """Seconds of every move of keys and values."""

    each_s: tuple[float, ...]

    def seconds(self, a_block: float) -> float:
        """Of attention to all blocks, each of which travels behind the one before. a_block: to one."""
        return sum(max(a_block, move_s) for move_s in self.each_s) + a_block


def key_ring(mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, wires: Wires, message_s: float) -> Ring:
    messages, each_s = around(mesh, layouts, 2 * work.cell, wires, message_s)
    return Ring([messages], KeyMoves(each_s))


class TokenMoves(NamedTuple):
    """Seconds of a token ring's messages on every node: queries that go on and what comes back, of each step; keys and
    values that go on between nodes, each."""

    queries_s: tuple[float, ...]
    parts_s: tuple[float, ...]
    keys_s: tuple[float, ...]

    def seconds(self, a_block: float) -> float:
        """Of the ring, in the order of `TokenRing`: what comes of a step leaves with the next one and may be LAG
        steps late."""
        at, part_s, arrivals = 0.0, 0.0, [0.0] * (LAG + 1)
        for key_s in (*self.keys_s, 0.0):
            began = at
            for query_s, next_s in zip(self.queries_s, self.parts_s, strict=False):
                if part_s:
                    arrivals.append(at + part_s)
                at, part_s = max(at + max(a_block, query_s), arrivals[-1 - LAG]), next_s
            at = max(at, began + key_s)
        return max(at + part_s, *arrivals)


def token_ring(mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, wires: Wires, message_s: float) -> Ring:
    queries, queries_s = around(mesh, layouts, work.cell, wires, message_s, (CARD, TILE))
    keys, keys_s = around(mesh, layouts, 2 * work.cell, wires, message_s, (NODE,))
    rows_G, ranks_GU = np.array([sum(layout.rows) for layout in layouts]), np.array(mesh.groups)
    cell, every, grids = work.cell + SUM_BYTES * work.batch, range(mesh.ring), rounds_of(mesh, (CARD, TILE))
    parts, steps = Traffic(wires), [Traffic(wires) for _ in range(mesh.ring)]
    for slot, grid in enumerate(grids):
        for step, owners_G in zip(steps, grid.blocks_at_hand(every), strict=False):
            pair, sizes_G = (ranks_GU[:, slot], ranks_GU[owners_G, slot]), layouts[0].heads[slot] * cell * rows_G
            step.send(*pair, sizes_G[owners_G])
            parts.send(*pair, grid.rounds * sizes_G[owners_G])
    parts_s = [0.0, *(step.seconds() + message_s for step in steps[1:])]
    return Ring([queries, parts, keys], TokenMoves((*queries_s, 0.0), tuple(parts_s), keys_s))


class StreamMoves(NamedTuple):
    """Seconds of streaming attention's messages: to gather a piece's queries on a node, to reduce what they give there,
    and to cross nodes with either. blocks: what a piece takes to attend to, in `a_block`s."""

    blocks: float
    pieces: int
    gather_s: float
    reduce_s: float
    cross_s: float

    def seconds(self, a_block: float) -> float:
        """Of all pieces, in the order of `streaming.py`: while one is attended to, the next is gathered, the part of
        the one before is reduced, and others cross nodes. a_block: attention to a rank's keys with a rank's queries."""
        at = self.gather_s
        for number in range(self.pieces):
            here_s = self.gather_s * (number + 1 < self.pieces) + self.reduce_s * (number > 0)
            at += max(a_block * self.blocks, here_s, 2 * self.cross_s)
        return at + self.reduce_s + self.cross_s


def streaming(mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, wires: Wires, message_s: float) -> Ring:
    rows_G, ranks_GU = np.array([sum(layout.rows) for layout in layouts]), np.array(mesh.groups)
    gather, reduce, cross = (Traffic(wires) for _ in range(3))
    part_cell = work.cell + SUM_BYTES * work.batch
    for slot, grid in enumerate(rounds_of(mesh)):
        heads, members_NM = layouts[0].heads[slot], np.array(grid.members).reshape(grid.shape[0], -1)
        ranks_NM = ranks_GU[members_NM, slot]
        rows_NM = rows_G[members_NM]
        for step in range(1, ranks_NM.shape[1]):  # to each other rank of the node, with all nodes' queries
            peers_NM, sizes_M = np.roll(ranks_NM, step, 1), heads * rows_NM.sum(0)
            gather.send(ranks_NM.ravel(), peers_NM.ravel(), np.tile(work.cell * sizes_M, len(ranks_NM)))
            reduce.send(ranks_NM.ravel(), peers_NM.ravel(), np.tile(part_cell * np.roll(sizes_M, step), len(ranks_NM)))
        for step in range(1, len(ranks_NM)):
            peers_NM = np.roll(ranks_NM, step, 0)
            cross.send(ranks_NM.ravel(), peers_NM.ravel(), (heads * work.cell * rows_NM).ravel())
            cross.send(ranks_NM.ravel(), peers_NM.ravel(), (heads * part_cell * np.roll(rows_NM, step, 0)).ravel())
    nodes, within = ranks_NM.shape
    pieces = nodes * head_runs(nodes, min(layouts[0].heads))
    gather_s, reduce_s = ((one.seconds() / pieces + message_s) * (within > 1) for one in (gather, reduce))
    cross_s = (cross.seconds() / 2 / pieces + message_s) * (nodes > 1)
    return Ring([gather, reduce, cross], StreamMoves(mesh.ring / pieces, pieces, gather_s, reduce_s, cross_s))


class Ring(NamedTuple):
    """All messages of a call in the rings of a mesh, and their seconds."""

    messages: Sequence[Traffic]
    moves: KeyMoves | TokenMoves | StreamMoves


OF_KINDS = {"keys": key_ring, "token": token_ring, "streaming": streaming}  # as the registry's `RINGS`


def ring_of(
    mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, wires: Wires, message_s: float = MESSAGE_S
) -> Ring:
    """Without messages where there is one group. message_s: what a step of messages takes at least."""
    return OF_KINDS[mesh.kind](mesh, layouts, work, wires, message_s)


def best_of_degree(priced: Sequence[Priced], rates_known: bool) -> Priced:
    """Of one Ring degree: the fewest bytes out of the busiest node, which sets the pace, then out of all nodes, then
    the least time; where rates are known, another that is predicted to beat it, as a ring through slow links may."""
    fewest = min(priced, key=lambda one: (one.busiest_node, one.bytes["node"], one.seconds))
    fastest = min(priced, key=lambda one: one.seconds)
    return fastest if rates_known and fastest.seconds <= PLACED * fewest.seconds else fewest


def by_degree(
    topology: Topology, work: AttentionWork, ring: int | str = "auto", placement: str = "auto", kind: str = "keys"
) -> list[list[Priced]]:
    """All meshes, priced, in lists of one Ring degree each, ascending; the default placement of each comes first."""
    every = meshes(topology, work.heads, ring, placement, kind)
    found = by_key((mesh.ring, price(mesh, work)) for mesh in every)
    for of_degree in found.values():
        best = best_of_degree(of_degree, not topology.machine.missing_rates)
        of_degree.sort(key=lambda one: (one is not best, one.seconds))
    return list(found.values())


def choose(
    topology: Topology,
    work: AttentionWork,
    ring: int | str = "auto",
    placement: str = "auto",
    prefer_ulysses: bool = False,
    kind: str = "keys",
) -> Mesh:
    """The mesh of a run. ring auto: the shortest ring that none is predicted to beat clearly. Where heads allow Ulysses
    alone, a ring is only looked at on machines whose file tells the tiles' rate, and of kind auto only keys go round on
    machines whose file does not tell all rates. prefer_ulysses: Ulysses alone wherever heads allow it, for what speeds
    up its exchange only."""
    if (plain := mesh_without_ring(topology, work.heads, ring, prefer_ulysses, kind)) is not None:
        return plain
    if kind == "auto":
        kinds = ["keys"] if topology.machine.missing_rates else RINGS
        found = [price(choose(topology, work, ring, placement, prefer_ulysses, kind), work) for kind in kinds]
        return first_of_the_fastest(found).mesh
    defaults = [of_degree[0] for of_degree in by_degree(topology, work, ring, placement, kind)]
    return first_of_the_fastest(defaults).mesh


def first_of_the_fastest(found: Sequence[Priced]) -> Priced:
    """The first that none is predicted to beat clearly."""
    fastest = min(one.seconds for one in found)
    return next(one for one in found if GAIN * one.seconds <= fastest)


def worth_listing(topology: Topology, work: AttentionWork, chosen: Mesh) -> list[list[Priced]]:
    """All meshes as by `by_degree`; of rings of another kind than keys those that are predicted to be faster than any
    other ring of keys as long, and the chosen one."""
    keys, *others = (by_degree(topology, work, kind=kind) for kind in RINGS)
    fastest = {of_degree[0].mesh.ring: min(one.seconds for one in of_degree) for of_degree in keys}
    faster = [
        [one for one in of_degree if one.mesh == chosen or one.seconds < fastest[one.mesh.ring]]
        for of_kind in others
        for of_degree in of_kind
    ]
    return sorted([*keys, *filter(None, faster)], key=lambda of_degree: of_degree[0].mesh.ring)


def table(priced: Sequence[Sequence[Priced]], chosen: Mesh) -> list[str]:
    """Lines that show meshes as `by_degree` lists them; the chosen one is marked."""
    sent = ("sibling MB", "plane MB", "cross MB", "node MB", "busiest MB")
    lines = [["ulysses", "ring", "placement", "heads a slot", "idle", *sent, "ms", ""]]
    for one in (p for of_degree in priced for p in of_degree):
        mesh = one.mesh
        name = "-" if 1 in (mesh.ring, mesh.ulysses) else f"{mesh.placement}, by {mesh.axis}"
        name += "" if mesh.kind == "keys" else f", {mesh.kind}"
        heads = "-".join(map(str, sorted({min(one.heads), max(one.heads)})))
        megabytes = [f"{count / 1e6:.2f}" for count in (*(one.bytes[link] for link in LINK_CLASSES), one.busiest_node)]
        taken = "<- taken" if mesh == chosen else ""
        cells = [str(mesh.ulysses), str(mesh.ring), name, heads, f"{one.idle:.3f}", *megabytes]
        lines.append([*cells, f"{one.seconds * 1e3:.3f}", taken])
    return aligned(lines, ">><" + ">" * 8 + "<")
