"""The traffic of rings and of chunks in an attention call: its bytes on each link, and the seconds with attention that
hides it. Pure arithmetic (StreamFusion, sections 4.2 and 4.3, appendix D).

Every link carries its bytes at the machine file's rate, and the fullest link sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cocodiff.attention.ring import LAG, LAST_PIECES
from cocodiff.attention.streaming import head_runs
from cocodiff.engine.assemble import AttentionWork
from cocodiff.planner.traffic import Traffic, Wires
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.chunks import chunk_ranks
from cocodiff.topology.routes.rounds import CARD, LEVELS, NODE, TILE, rounds_of

SUM_BYTES = 4  # bytes of the log-sum-exp that a partial result has for each token and head

Seconds = Callable[[float], float]  # from seconds of attention to one group's keys to those of a whole call


class RingCost(NamedTuple):
    """The messages of one attention call in all rings of a mesh, and its seconds."""

    messages: Sequence[Traffic]  # traffic of each kind of messages
    seconds: Seconds  # function from the seconds of attention to one group's keys to those of the whole call
    moves_s: Sequence[float] = ()  # for a ring of keys: seconds of each step in which all ranks pass on a block


def ring_of(mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, message_s: float) -> RingCost:
    """Predict the messages and seconds of an attention call in the rings of a mesh. With one Ulysses group there are no
    messages.

    Args:
        mesh: the Ulysses groups and the rings across them.
        layouts: the tokens and heads of each group.
        work: the sizes of the attention call.
        message_s: least seconds of a message.
    """
    if mesh.ring == 1:
        return RingCost([], partial(key_seconds, ()))
    return OF_KINDS[mesh.kind](mesh, layouts, work, Wires(mesh.topology), message_s)


def around(
    mesh: Mesh, layouts: Sequence[Layout], cell: int, wires: Wires, message_s: float, along: tuple[int, ...] = LEVELS
) -> tuple[Traffic, tuple[float, ...]]:
    """Predict the messages that pass blocks round the rings of a mesh in one attention call. Return (their bytes on all
    links, seconds of every move).

    In a move all ranks pass on a block at once. Moves along one level (tile, card or node) take the same links, and
    each the seconds of the level's largest blocks.

    Args:
        mesh: the Ulysses groups and the rings across them.
        layouts: the tokens and heads of each group.
        cell: bytes of a block for one token and head.
        wires: the places of the ranks and the rates of links.
        message_s: least seconds of a message.
        along: the levels along which blocks are passed.
    """
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


def key_ring(mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, wires: Wires, message_s: float) -> RingCost:
    """Predict an attention call in which keys and values are passed round the rings (`ring_kind: keys`).

    Args:
        mesh: the Ulysses groups and the rings across them.
        layouts: the tokens and heads of each group.
        work: the sizes of the attention call.
        wires: the places of the ranks and the rates of links.
        message_s: least seconds of a message.
    """
    messages, moves_s = around(mesh, layouts, 2 * work.cell, wires, message_s)
    return RingCost([messages], partial(key_seconds, moves_s), moves_s)


def key_seconds(moves_s: Sequence[float], a_block: float) -> float:
    """Return the seconds of attention to all blocks of keys in a ring, each of which is received during attention to
    the block before.

    Args:
        moves_s: seconds in which each further block is received.
        a_block: seconds of attention to one block.
    """
    return sum(max(a_block, move_s) for move_s in moves_s) + a_block


def token_ring(mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, wires: Wires, message_s: float) -> RingCost:
    """Predict an attention call in which queries are passed round a node's groups, and keys between nodes (`ring_kind:
    token`). Partial results go back.

    Args:
        mesh: the Ulysses groups and the rings across them.
        layouts: the tokens and heads of each group.
        work: the sizes of the attention call.
        wires: the places of the ranks and the rates of links.
        message_s: least seconds of a message.
    """
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
    pieces = min(LAST_PIECES, *layouts[0].heads)
    return RingCost([queries, parts, keys], partial(token_seconds, (*queries_s, 0.0), parts_s, keys_s, pieces))


def token_seconds(
    queries_s: Sequence[float], parts_s: Sequence[float], keys_s: Sequence[float], pieces: int, a_block: float
) -> float:
    """Return the seconds of an attention call in a token ring, in the order in which `TokenRing` works.

    Partial results of a step leave with the next step, and may arrive LAG steps later. Those of the last step leave in
    several pieces.

    Args:
        queries_s: seconds in which queries are passed on within nodes, by step.
        parts_s: seconds in which partial results return, by step.
        keys_s: seconds of each move of keys and values between nodes.
        pieces: number of pieces of the last step.
        a_block: seconds of attention to one block.
    """
    at, part_s, arrivals = 0.0, 0.0, [0.0] * (LAG + 1)
    for key_s in (*keys_s, 0.0):
        began = at
        for query_s, next_s in zip(queries_s, parts_s, strict=False):
            if part_s:
                arrivals.append(at + part_s)
            at, part_s = max(at + max(a_block, query_s), arrivals[-1 - LAG]), next_s
        at = max(at, began + key_s)
    return max(at + part_s / pieces, at + part_s - (1 - 1 / pieces) * a_block, *arrivals)


def streaming(mesh: Mesh, layouts: Sequence[Layout], work: AttentionWork, wires: Wires, message_s: float) -> RingCost:
    """Predict an attention call in which queries go to all ranks of a node and across nodes, and partial results return
    (`ring_kind: streaming`).

    Args:
        mesh: the Ulysses groups and the rings across them.
        layouts: the tokens and heads of each group.
        work: the sizes of the attention call.
        wires: the places of the ranks and the rates of links.
        message_s: least seconds of a message.
    """
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
    seconds = partial(stream_seconds, mesh.ring / pieces, pieces, gather_s, reduce_s, cross_s)
    return RingCost([gather, reduce, cross], seconds)


def stream_seconds(
    blocks: float, pieces: int, gather_s: float, reduce_s: float, cross_s: float, a_block: float
) -> float:
    """Return the seconds of an attention call by streaming attention, in the order in which `streaming.py` works.

    Queries are sent in pieces. While a rank's keys are attended to with one, queries of the next are gathered, the
    results of the one before are reduced, and queries and results of others cross nodes.

    Args:
        blocks: attention of a piece's queries to this rank's keys, as a multiple of `a_block`.
        pieces: number of pieces.
        gather_s: seconds in which a piece's queries are sent on a node.
        reduce_s: seconds in which its partial results return on a node.
        cross_s: seconds in which a piece's queries, or its results, are sent to another node.
        a_block: seconds of attention of one Ulysses group's queries to one group's keys.
    """
    at = gather_s
    for number in range(pieces):
        here_s = gather_s * (number + 1 < pieces) + reduce_s * (number > 0)
        at += max(a_block * blocks, here_s, 2 * cross_s)
    return at + reduce_s + cross_s


OF_KINDS = {"keys": key_ring, "token": token_ring, "streaming": streaming}  # names as in the registry's `RINGS`


# In chunks ------------------------------------------------------------------------------------------------------------


def in_chunks(
    mesh: Mesh, chunks: int, rows_P: np.ndarray, ring: RingCost, message_seconds: Callable[[np.ndarray], float]
) -> Seconds | None:
    """Predict an attention call whose tensors are sent in chunks. Return a function as `RingCost.seconds`, or None if
    there is only one chunk.

    On one node all chunks but the rank's own arrive at once.

    Args:
        mesh: the Ulysses groups and the rings across them.
        chunks: number of chunks that are asked for.
        rows_P: number of rows (tokens) of each of P ranks.
        ring: the prediction for the mesh's rings.
        message_seconds: function that returns the seconds of the messages of q, k, v and the output, from an array
            [ranks of rows, ranks of heads] that is True for the blocks to send.
    """
    first, size = mesh.groups[0], mesh.topology.size
    stages = 2 if mesh.parts[0].nodes == 1 else chunks
    of_stages = [np.zeros((size, size), dtype=bool) for _ in range(stages)]
    for group, part in zip(mesh.groups, mesh.parts, strict=True):
        for slot in range(part.size):
            own_chunks = chunk_ranks(part, slot, chunks)
            if len(own_chunks) == 1:
                return None
            for number, ranks in enumerate(own_chunks):
                of_stages[min(number, stages - 1)][[group[one] for one in ranks], group[slot]] = True
    of_stages = [chosen_PP for chosen_PP in of_stages if chosen_PP.any()]
    shares = [float(rows_P[chosen_PP[:, first[0]]].sum() / rows_P[list(first)].sum()) for chosen_PP in of_stages]
    assert mesh.kind == "keys", "queries travel whole"
    return partial(staged_seconds, shares, [*map(message_seconds, of_stages)], ring.moves_s)


def staged_seconds(
    shares: Sequence[float], messages_s: Sequence[float], moves_s: Sequence[float], a_block: float
) -> float:
    """Return the seconds of an attention call in chunks, in the order in which `torus.py` works.

    The own chunk takes other links than the rest, which follow each other. Each of q, k, v and the output takes a
    quarter of a chunk's messages.

    Args:
        shares: part of the group's tokens in each chunk, the own one first.
        messages_s: seconds of each chunk's messages.
        moves_s: seconds of each move of a ring of keys.
        a_block: seconds of attention to one group's keys.
    """
    (own, *others), (own_s, *others_s) = shares, (seconds / 4 for seconds in messages_s)
    at, arrived = 3 * own_s + own**2 * a_block, 0.0
    for share, each_s in zip(others, others_s, strict=True):  # queries
        arrived += each_s
        at = max(at, arrived) + own * share * a_block
    last = 0.0
    for share, each_s in zip(others, others_s, strict=True):  # keys and values
        arrived += 2 * each_s
        at, last = max(at + last, arrived), share * a_block
    began = at  # when all keys of the group have arrived and their ring begins
    for move_s in moves_s:
        at, last = max(at + last, began + move_s), a_block
        began = at
    left = 0.0
    for share, each_s in zip(others[::-1], others_s[::-1], strict=True):  # outputs, during the last keys
        at += share * last
        left = max(left, at) + each_s
    return max(left, at + own * last) + own_s
