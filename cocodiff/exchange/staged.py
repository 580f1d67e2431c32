"""An exchange in stages, one for each chunk of tokens: Torus attention computes on one chunk while the others are sent.

Tensors are queued in the order in which they are sent, each stage by stage. Three lanes serve all tensors and all
chunks. The plane lane posts messages and waits for none. The sibling lane passes on what arrives over fast links. A
third lane passes on what arrives from another node, so that nothing else waits for it. A fourth lane puts chunks in
place, in the order in which attention will need them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor

from cocodiff.comm.lane import LaneFuture
from cocodiff.comm.transport import Pending, RankContext
from cocodiff.exchange.messages import BlockSet, Groups, InFlight, PackedBlocks, SentMessages, Target
from cocodiff.exchange.outgoing import OUTPUT, EncodedCall, Outgoing, TensorFuture
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.chunks import Chunking, StageParts, Stages, megabytes_per_rank
from cocodiff.topology.routes.plans import Block, Plan

# A stage of a tensor whose messages were posted. Calling it has the stage's blocks put in place, and returns the future
# of the tensor that they are put into.
Stage = Callable[[], LaneFuture[Tensor | PackedBlocks]]
# For messages that leave at once, that are passed on, and that are passed on from another node.
PART_LANES = ("plane", "sibling", "late")


class StagedExchange:
    """The part of one rank in an exchange in stages: a stage sends one chunk of tokens, so that attention can begin
    with it.

    Messages with blocks that are passed on have communicators of their own: no two background threads share one.
    """

    def __init__(
        self,
        here: RankContext,
        plans: Mapping[str, Plan],
        name_of: Callable[[BlockSet], str],
        groups: Groups,
        chunking: Chunking,
    ) -> None:
        """Cut the routes into stages, and open threads and communicators for blocks that are passed on. All ranks do so
        together.

        Args:
            here: this rank among the ranks of the exchange.
            plans: what this rank sends and receives in each exchange, by its name.
            name_of: returns the name of the exchange for a set of blocks, by their size.
            groups: the communicators for messages that leave at once, by the lane that a phase names.
            chunking: the number of chunks, and from which size on tensors are sent in chunks.
        """
        topology, transport, stages = here.topology, here.transport, Stages(here.topology, here.rank, chunking.chunks)
        self._here, self._from_mb, self.name_of = here, chunking.from_mb, name_of
        self.chunks, self.sequence, self.attending_ranks = stages.chunks, sum(stages.chunks, ()), stages.attending_ranks
        self.several_nodes = topology.nodes > 1
        ways = ("forward", "back")
        self.plans = {way: {name: stages.of(plan, way) for name, plan in plans.items()} for way in ways}
        numbers = range(len(self.chunks))
        self._passed_on = {way: [_parts_in_use(plans, n) for n in numbers] for way, plans in self.plans.items()}
        # The machine and the plans' names determine which parts there are, so these are the same on every rank.
        relays = any(name != "flat" for name in plans)
        lanes = PART_LANES[: 1 + relays + (relays and self.several_nodes)]
        self._lanes = [transport.lane(name) for name in lanes]
        own = [transport.group(range(topology.size), together=False) for _ in lanes[1:]]
        self._groups = [groups, *(dict.fromkeys(("sibling", "plane"), group) for group in own)]
        self._landing = transport.lane("landing")
        self._sent: deque[SentMessages] = deque()

    def pays(self, layout: Layout, cell_bytes: int) -> bool:
        """Return True if a call is large enough to be sent in stages. The result is the same on every rank.

        Args:
            layout: the tokens and heads of every rank in the call.
            cell_bytes: bytes of one token for one head of one tensor.
        """
        return megabytes_per_rank(layout, 3 * cell_bytes) >= self._from_mb

    def send(self, tensors: Sequence[Outgoing], all_sent: bool) -> dict[str, TensorFuture]:
        """Start sending some tensors, each in messages of its own. Return the futures of what this rank receives, by
        name.

        Args:
            tensors: the tensors, in the order in which they are sent.
            all_sent: True if the last of them is the last one of the call. Its chunks are then sent one by one, because
                they share links.
        """
        sent = {}
        for outgoing in tensors:
            started, in_order = Started(self, outgoing), all_sent and outgoing is tensors[-1]
            stages = [self.post(started, number, in_order) for number in range(len(self.chunks))]
            sent[outgoing.label] = self._arriving(outgoing, stages)
        for arriving in sent.values():
            arriving.expect(0)
        return sent

    def _arriving(self, outgoing: Outgoing, stages: Sequence[Stage]) -> TensorFuture:
        """Return the future of a tensor that is received in chunks.

        Args:
            outgoing: the tensor, as this rank sends it.
            stages: for each chunk the function that has its blocks put in place.
        """
        landed = cache(lambda number: stages[number]())

        def wait_for_chunk(number: int) -> Tensor:
            return outgoing.decode([landed(number).wait()], self.chunks[number])[0]

        return TensorFuture(outgoing.label, wait_for_chunk, len(stages), landed)

    def post(self, started: Started, number: int, in_order: bool = False) -> Stage:
        """Post the messages of one stage of a tensor, and have arriving blocks passed on.

        Return the function that has received blocks put in place, see `Stage`.

        Args:
            started: the tensor.
            number: number of the stage, that of its chunk.
            in_order: True to send only after the messages of the stage before have left this node.
        """
        posted = self._lanes[0].submit(partial(self._post, number, in_order), started)
        parts = self._passed_on[started.outgoing.way][number]
        passed_on = [self._lanes[part].submit(partial(self._pass_on, posted, number, part)) for part in parts]
        return partial(self._landing.submit, partial(self._land, number, posted, passed_on))

    def finish(self) -> None:
        """Wait until every message that this rank has posted was sent."""
        self._landing.submit(self._wait_for_sends).wait()

    def _post(self, number: int, in_order: bool, started: Started) -> tuple[Started, InFlight]:
        """Post all receives of a stage, and send the messages that leave at once. Return the tensor, and the stage's
        messages.

        A background thread (lane "plane") runs it.

        Args:
            number: number of the stage.
            in_order: True to send only after the messages of the stage before have left this node.
            started: the tensor; its first stage encodes it.
        """
        here, outgoing = self._here, started.outgoing
        with here.trace.span(f"{outgoing.label} plane", "plane", outgoing.layer):
            parts = started.begin()[number]
            flight = InFlight(here, started.blocks)
            for plan, groups in zip(parts, self._groups, strict=False):
                flight.post_receives(plan, groups)
            for pending in started.leaving if in_order else ():
                pending.wait()
            sent = flight.send(parts[0], self._groups[0])
            self._sent.extend(sent)
            node = [place.node for place in here.topology.places]
            started.leaving = [
                pending for peers, pending in sent if any(node[peer] != node[here.rank] for peer in peers)
            ]
            return started, flight

    def _pass_on(self, posted: LaneFuture[tuple[Started, InFlight]], number: int, part: int) -> None:
        """Send on the blocks of a stage that arrive in other ranks' messages. A background thread runs it.

        Args:
            posted: the future of the tensor and the stage's messages.
            number: number of the stage.
            part: 1 for blocks that arrive over fast links, 2 for those from another node.
        """
        started, flight = posted.wait()
        parts = started.begin()[number]
        self._sent.extend(flight.send(parts[part], self._groups[part], first=sum(map(len, parts[:part]))))

    def _land(
        self, number: int, posted: LaneFuture[tuple[Started, InFlight]], passed_on: list[LaneFuture[None]]
    ) -> Tensor | PackedBlocks:
        """Wait for a stage's messages and put their blocks in place. Return the tensor that the stages fill.

        A background thread (lane "landing") runs it.

        Args:
            number: number of the stage.
            posted: the future of the tensor and the stage's messages.
            passed_on: the futures of the stage's jobs that pass blocks on.
        """
        for sent in passed_on:
            sent.wait()
        here, (started, flight) = self._here, posted.wait()
        with here.trace.span(f"{started.outgoing.label} plane", "plane", started.outgoing.layer):
            own = Block(here.rank, here.rank)
            if number == 0:  # the block that stays here belongs to the first chunk
                started.target.place({own: started.blocks.blocks[own]})
            flight.land(started.target)
        return started.target.tensors[0]

    def _wait_for_sends(self) -> None:
        """Wait for all messages that this rank has posted to be sent. A background thread (lane "landing") runs it."""
        while self._sent:
            self._sent.popleft()[1].wait()


class Started:
    """A tensor that is being sent in stages. Its first stage encodes it and allocates memory, on the thread that
    posts."""

    blocks: BlockSet  # the encoded tensor; set by `begin`
    target: Target  # the tensor that this rank receives in exchange; set by `begin`

    def __init__(self, staged: StagedExchange, outgoing: Outgoing, first: Started | None = None) -> None:
        """Prepare a tensor for sending in stages. Nothing is encoded or allocated before `begin`.

        Args:
            staged: the exchange that sends it.
            outgoing: q, k or v, or one chunk of attention's output.
            first: for a later chunk of the output, the first chunk: both fill the same received tensor. None if this
                one allocates it.
        """
        self.outgoing, self._staged, self._first = outgoing, staged, first
        self.leaving: list[Pending] = []  # the last stage's messages to other nodes
        self._parts: list[StageParts] = []

    def contained_tensors(self) -> tuple[Any, ...]:
        """Return the blocks and the target, or the tensor that they will be made from.

        `used_on_current_stream` asks for them, to tell the allocator which streams use their memory.
        """
        return (self.blocks, self.target) if self._parts else (self.outgoing,)

    def begin(self) -> list[StageParts]:
        """Return the messages of every stage, for the exchange that the tensor's size calls for. The first call encodes
        the tensor."""
        if not self._parts:
            self.blocks = self.outgoing.blocks()
            self.target = self.outgoing.target(self.blocks) if self._first is None else self._first.target
            self._parts = self._staged.plans[self.outgoing.way][self._staged.name_of(self.blocks)]
        return self._parts


class OutputSender:
    """The sender of attention's output in chunks to the ranks of its rows, each chunk as soon as it has been
    computed."""

    def __init__(self, staged: StagedExchange, call: EncodedCall) -> None:
        self._staged, self._call = staged, call
        self._first: Started | None = None
        self._landed: list[LaneFuture[Tensor | PackedBlocks]] = []

    def push(self, number: int, out_BTGD: Tensor) -> None:
        """Start sending a chunk of the output, and receiving the chunk that other ranks send in the same stage.

        Args:
            number: number of the chunk.
            out_BTGD: its T rows for this rank's heads.
        """
        staged = self._staged
        started = Started(staged, Outgoing(self._call, {OUTPUT: out_BTGD}, staged.chunks[number]), self._first)
        self._first = self._first or started
        self._landed.append(staged.post(started, number)())

    def wait(self) -> Tensor:
        """Wait until all chunks were sent and received. Return all heads of this rank's rows, [B, L, H, D]."""
        assert self._first is not None, "there is a chunk"
        out_BLHW = [landed.wait() for landed in self._landed][-1]
        self._staged.finish()
        return self._first.outgoing.decode([out_BLHW])[0]


def _parts_in_use(plans: Mapping[str, list[StageParts]], number: int) -> list[int]:
    """Return which of a stage's parts 1 and 2, those with blocks that are passed on, have messages in any of the
    exchanges.

    Args:
        plans: the parts of every stage, by name of the exchange.
        number: number of the stage.
    """
    phases = {part: [phase for stages in plans.values() for phase in stages[number][part]] for part in (1, 2)}
    return [part for part, of_part in phases.items() if any(phase.sends or phase.receives for phase in of_part)]
