"""An exchange in stages, one for each chunk of tokens: what Torus attention computes on while the rest travels.

q, v and k are queued in this order (v before q where v is made first), each stage by stage, on a lane that posts and
does not wait for what comes; every tensor's chunks land on a lane of that tensor, so one can be awaited while another
is on its way. What is passed on has a lane as well, and a third what comes from another node before, so that it keeps
nothing else waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch import Tensor

from cocodiff.comm.transport import Lane, LanePending, Pending, Ranks
from cocodiff.device import used_on_current_stream
from cocodiff.kernels import Rows
from cocodiff.routes.choice import megabytes_per_rank
from cocodiff.routes.chunks import Parts, Stages
from cocodiff.routes.plans import Block, Plan
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.relay import Blocks, Freight, Groups, Journey, SentTo, Travelling

if TYPE_CHECKING:
    from cocodiff.wire.exchange import Exchange

R = TypeVar("R")
QUEUE = "qvk"  # of tensors that are there together: q first, for Pull Q has work while k and v are on their way
Ready = Callable[[], tuple[Sequence[Travelling], Layout]]
Land = Callable[[Blocks], None]


class Once(Generic[R]):
    """Something that is made when first asked for, always on the same lane."""

    def __init__(self, make: Callable[[], R]) -> None:
        self._make, self._made = make, list[R]()

    def __call__(self) -> R:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


class Started(NamedTuple):
    """A tensor that is about to travel, and the room for what comes. far: sends to other nodes of the last stage."""

    freight: Freight
    whole: list[Tensor]
    land: Land
    plans: list[Parts]
    far: list[Pending]


class Staged:
    """One rank's end of an exchange in stages, in communication contexts of its own."""

    def __init__(
        self,
        exchange: Exchange,
        topology: Topology,
        transport: Ranks,
        trace: Trace,
        plans: dict[str, Plan],
        stages: Stages,
        from_mb: float,
    ) -> None:
        """plans: forward and whole, of every exchange that may be chosen. from_mb: of q, k and v per rank, the size
        from which stages are worth it."""
        self.rank, self.chunks, self.sequence, self._from_mb = transport.rank, stages.chunks, stages.sequence, from_mb
        self.several_nodes = topology.nodes > 1
        self.exchange, self._topology, self._trace = exchange, topology, trace
        self.plans = {way: {name: stages.of(plan, way) for name, plan in plans.items()} for way in ("forward", "back")}
        self._relays = {way: [_relays(of, n) for n in range(len(self.chunks))] for way, of in self.plans.items()}
        members = {"sibling": topology.cards[topology.places[self.rank].card], "plane": range(topology.size)}
        lanes = ("torus", "torus relay", "torus late") if topology.nodes > 1 else ("torus", "torus relay")
        self._queues: list[tuple[Lane, Groups]] = [
            (transport.lane(lane), {name: transport.group(ranks) for name, ranks in members.items()}) for lane in lanes
        ]
        self._landing = {name: transport.lane(f"torus {name}") for name in (*QUEUE, "o")}
        self._sent: deque[SentTo] = deque()

    def pays(self, layout: Layout, like_BLHD: Tensor) -> bool:
        """Whether a call with tensors like this one goes in stages: the same on all ranks."""
        B, _, _, D = like_BLHD.shape
        return megabytes_per_rank(layout, 3 * B * D * like_BLHD.element_size()) >= self._from_mb

    def rows(self, layout: Layout, number: int) -> slice:
        """Where a chunk stands in the sequence."""
        where = layout.row_slices
        ranks = self.chunks[number]
        return slice(where[ranks[0]].start, where[ranks[-1]].stop)

    def forward(self, ready: Ready, names: str, layer: str = "") -> StagedArriving:
        """Sends this rank's rows of each tensor that `names` spells. ready: asked on the posting lane."""
        asked = Once(ready)
        landed = {name: self._send(asked, names.index(name), name, layer) for name in sorted(names, key=QUEUE.index)}
        return StagedArriving(names, landed)

    def _send(
        self, asked: Once[tuple[Sequence[Travelling], Layout]], index: int, name: str, layer: str
    ) -> list[LanePending[Tensor]]:
        def start() -> Started:
            tensors_BLHD, layout = asked()
            freight = self.exchange.freight_of([tensors_BLHD[index]], layout)
            whole, land = self.exchange.room(freight)
            return Started(freight, whole, land, self.plans["forward"][self.exchange.name_of(freight)], [])

        started = Once(start)
        return [self.stage(started, "forward", number, name, layer) for number in range(len(self.chunks))]

    def stage(self, started: Once[Started], way: str, number: int, name: str, layer: str) -> LanePending[Tensor]:
        """Submits one stage of one tensor to its lanes."""

        def post() -> tuple[Started, Journey]:
            with self._trace.span(f"{name} plane", "plane", layer):
                start = started()
                return start, self._post(start, number, orderly=name == "k")

        posted = self._queues[0][0].submit(post)
        relays = [
            self._queues[part][0].submit(partial(self._pass_on, posted, number, part))
            for part in self._relays[way][number]
        ]

        def land() -> Tensor:
            for relay in relays:
                relay.wait()
            start, journey = posted.wait()
            with self._trace.span(f"{name} plane", "plane", layer):
                mine = self._of_stage(start.freight.blocks, number)
                self._land(start, mine)
                journey.land(partial(self._land, start))
            return start.whole[0]

        return self._landing[name].submit(land)

    def back(self, layout: Layout, layer: str = "") -> WayBack:
        """The way back, chunk by chunk, the last one first."""
        return WayBack(self, layout, layer)

    def _post(self, start: Started, number: int, orderly: bool) -> Journey:
        """All receives of a stage, and its sends but the late ones. orderly: after the last stage's have left this
        node, so that chunks come one by one over the links that they share."""
        parts = start.plans[number]
        journey = Journey(start.freight, self.exchange.pack, self.exchange.count)
        for plan, (_, groups) in zip(parts, self._queues, strict=False):
            journey.receive(plan, groups)
        for pending in start.far if orderly else ():
            pending.wait()
        sent = journey.send(parts[0], self._queues[0][1])
        self._sent.extend(sent)
        node = [place.node for place in self._topology.places]
        start.far[:] = [pending for peers, pending in sent if any(node[peer] != node[self.rank] for peer in peers)]
        return journey

    def _pass_on(self, posted: LanePending[tuple[Started, Journey]], number: int, part: int) -> None:
        """Sends what other ranks' messages of this stage bring."""
        start, journey = posted.wait()
        parts = start.plans[number]
        self._sent.extend(journey.send(parts[part], self._queues[part][1], first=sum(map(len, parts[:part]))))

    def _of_stage(self, blocks: Blocks, number: int) -> Blocks:
        """The block that stays here, at the stage that it belongs to: the first."""
        own = Block(self.rank, self.rank)
        return {own: blocks[own]} if number == 0 else {}

    def _land(self, start: Started, blocks: Blocks) -> None:
        for part in (part for parts in blocks.values() for part in parts):
            for tensor in (part.source_RHD, part.index_K) if isinstance(part, Rows) else (part,):
                used_on_current_stream(tensor)
        for whole in start.whole:
            used_on_current_stream(whole)
        start.land(blocks)

    def finish(self) -> None:
        """Returns when all that was sent has left."""

        def wait() -> None:
            while self._sent:
                self._sent.popleft()[1].wait()

        self._landing["o"].submit(wait).wait()


class WayBack:
    """The attention's output on its way to the ranks of its rows."""

    def __init__(self, staged: Staged, layout: Layout, layer: str) -> None:
        self._staged, self._layout, self._layer = staged, layout, layer
        self._landed: list[LanePending[Tensor]] = []
        self._room: tuple[Tensor, Land] | None = None

    def push(self, number: int, out_BTGD: Tensor) -> None:
        """Sends a finished chunk's rows [B, T, G, D]."""
        staged, layout = self._staged, self._layout
        exchange, where = staged.exchange, layout.row_slices
        first = where[staged.chunks[number][0]].start
        blocks: Blocks = {
            Block(peer, staged.rank): [out_BTGD[:, where[peer].start - first : where[peer].stop - first]]
            for peer in staged.chunks[number]
        }
        freight = Freight(blocks, layout)
        if self._room is None:
            self._room = exchange.room_back(out_BTGD, layout)
        out_BLHD, land = self._room
        plans = staged.plans["back"][exchange.name_of(freight)]
        started = Once(lambda: Started(freight, [out_BLHD], land, plans, []))
        self._landed.append(staged.stage(started, "back", number, "o", self._layer))

    def wait(self) -> Tensor:
        """All heads of this rank's rows, [B, L, H, D], when every chunk of every rank was pushed."""
        out_BLHD = [landed.wait() for landed in self._landed][-1]
        self._staged.finish()
        return out_BLHD


class StagedArriving:
    """Tensors that travel in stages."""

    def __init__(self, names: str, landed: dict[str, list[LanePending[Tensor]]]) -> None:
        self._names, self._landed = names, landed

    def wait(self) -> Sequence[Tensor]:
        return [[chunk.wait() for chunk in self._landed[name]][-1] for name in self._names]

    def chunk(self, name: str, number: int) -> Tensor:
        return self._landed[name][number].wait()


class WholeArriving:
    """Tensors that travel whole: every chunk is there when all are."""

    def __init__(self, names: str, pending: LanePending[list[Tensor]]) -> None:
        self._names, self._pending = names, pending

    def wait(self) -> Sequence[Tensor]:
        return self._pending.wait()

    def chunk(self, name: str, number: int) -> Tensor:
        return self._pending.wait()[self._names.index(name)]


def _relays(of_plans: dict[str, list[Parts]], number: int) -> list[int]:
    """Which of a stage's two later parts has messages, in any of the plans."""
    return [
        part
        for part in (1, 2)
        if any(phase.sends or phase.receives for stages in of_plans.values() for phase in stages[number][part])
    ]
