"""The exchange of one rank: from sequence-parallel to head-parallel layout and back, along any plan.

`Exchange` owns what all attention calls share: plans, lanes and groups. Each call opens a `Transfer` on it:

    v = transfer.send(v=v_BLHD)                    # travels while q and k are made
    qk = transfer.send(q=q_BLHD, k=k_BLHD)         # together: one message to each peer
    ...
    out_BLHD = transfer.back(out_BSGD)

Nothing here knows who owns what: a block travels through intermediate ranks unchanged, so results have the same bits
whatever the route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from cocodiff.comm.transport import Group, Lane, LanePending, Ranks
from cocodiff.kernels import Kernels
from cocodiff.registry import EXCHANGES, load
from cocodiff.routes.choice import Chunking, ExchangeTable, megabytes_per_rank
from cocodiff.routes.chunks import Stages
from cocodiff.routes.detours import nic_detours
from cocodiff.routes.plans import Phase, Plan, reverse, split_plan
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.blocks import BlockSet, Target
from cocodiff.wire.cargo import Back, Cargo, Forward
from cocodiff.wire.coding import CodedCall
from cocodiff.wire.messages import InOrder, Port, run_phase, run_pipelined
from cocodiff.wire.staged import OutputInStages, StagedExchange

T = TypeVar("T")


class Exchange:
    """One rank's end of an exchange among the ranks of a topology."""

    def __init__(
        self,
        name: str,
        topology: Topology,
        transport: Ranks,
        trace: Trace,
        table: ExchangeTable | None = None,
        nic_balance: bool = True,
        kernels: Kernels | None = None,
        chunking: Chunking | None = None,
    ) -> None:
        """name: in the table `EXCHANGES`, or "auto", which goes by `table` for each size. nic_balance: of split,
        between nodes. kernels: what packs and unpacks; by default whatever suits the device, noted in the trace.
        chunking: in how many stages tensors can travel besides."""
        self.rank, self.topology, self.trace, self._table = transport.rank, topology, trace, table
        self.kernels = kernels or Kernels(note=trace.note_kernel)
        self.port = Port(self.rank, topology, self.kernels, trace)
        known = EXCHANGES if name == "auto" else (name,)
        self.plans: dict[str, Plan] = {one: load(EXCHANGES, one)(topology, self.rank) for one in known}
        if "split" in self.plans and nic_balance:
            self.plans["split"] = split_plan(topology, self.rank, nic_detours(topology))
        self._routes = {one: _both_ways(plan) for one, plan in self.plans.items()}
        self._name = next(iter(self.plans))
        # TAPA's phases have a lane each: V-Major's scoring by card stands between them, and v can be in its second
        # phase while q and k are in their first. All others are one job on the plane lane.
        self._in_phases = name == "tapa"
        self.lanes: dict[str, Lane] = {}
        self._in_order = InOrder()
        self.groups: dict[str, Group] = {}
        # every rank makes a group here, also one without a part in the phase or a sibling
        for link in dict.fromkeys(phase.lane for plan in self.plans.values() for phase in plan):
            members = topology.cards[topology.places[self.rank].card] if link == "sibling" else range(topology.size)
            self.groups[link] = transport.group(members)
            if link == "plane" or self._in_phases:
                self.lanes[link] = transport.lane(link)
        self.staged: StagedExchange | None = None
        if chunking is not None and chunking.chunks > 1:
            stages = Stages(topology, self.rank, chunking.chunks)
            if len(stages.chunks) > 1:
                self.staged = StagedExchange(self, transport, stages, chunking.from_mb)

    def transfer(self, layout: Layout, coded: CodedCall | None = None, layer: str = "") -> Transfer:
        """Opens the transfer of one attention call. coded: what travels in its tensors' place, by default they
        themselves. layer: the kind of layer, for the trace."""
        return Transfer(self, coded or CodedCall(layout), layer)

    def name_of(self, held: BlockSet) -> str:
        """The plan that blocks of this size take: the one there is, or the table's choice."""
        if self._table is None:
            return self._name
        return self._table.choose(megabytes_per_rank(held.layout, held.cell_bytes))

    def both_phases(self) -> tuple[Phase, ...]:
        """TAPA's forward phases, also those without messages for this rank."""
        return self.plans[self._name]

    def submit(self, cargo: Cargo, wait_next: bool = False) -> LanePending[Target]:
        """Sends a cargo on its way: encoded, packed, sent and put in place by the lanes."""
        if not self._in_phases:
            return self._on_lane("plane", self._all_phases, cargo, wait_next)
        earlier: LanePending[BlockSet] | None = None
        *early, last = self._routes[self._name][cargo.way]
        for phase in early:
            earlier = self._on_lane(phase.lane, partial(self.phase, phase, earlier), cargo, wait_next)
        return self._on_lane(last.lane, partial(self._last_phase, last, earlier), cargo, wait_next)

    def _on_lane(self, name: str, job: Callable[[Cargo], T], cargo: Cargo, wait_next: bool) -> LanePending[T]:
        lane, job = self.lanes[name], partial(self._in_order.run, job)
        return lane.submit_inline(job, cargo) if wait_next else lane.submit(job, cargo)

    def _all_phases(self, cargo: Cargo) -> Target:
        """All phases on one lane, together, of the plan for this size. Those of TAPA come one by one: none can overtake
        another, and a phase packs all its messages in one launch."""
        held = cargo.blocks()
        name = self.name_of(held)
        plan = self._routes[name][cargo.way]
        if name == "tapa":
            for phase in plan:
                self._run_phase(phase, cargo, held)
            return _placed(cargo, held)
        with self.trace.span(f"{cargo.label} plane", "plane", cargo.layer, self._late_bytes(cargo, plan, held)):
            target = cargo.target(held)
            run_pipelined(self.port, plan, held, self.groups, target)
            return target

    def phase(self, phase: Phase, earlier: LanePending[BlockSet] | None, cargo: Cargo) -> BlockSet:
        """One phase on its own lane, after the one before it, or of a cargo that has not been encoded. Returns the
        blocks that are here then."""
        held = cargo.blocks() if earlier is None else earlier.wait()
        self._run_phase(phase, cargo, held)
        return held

    def last_phase(self, phase: Phase, cargo: Cargo, held: BlockSet) -> Target:
        """The last phase of blocks that are held; then what is here is put in place."""
        self._run_phase(phase, cargo, held)
        return _placed(cargo, held)

    def _last_phase(self, phase: Phase, earlier: LanePending[BlockSet] | None, cargo: Cargo) -> Target:
        return self.last_phase(phase, cargo, cargo.blocks() if earlier is None else earlier.wait())

    def _run_phase(self, phase: Phase, cargo: Cargo, held: BlockSet) -> None:
        if phase.sends or phase.receives:
            late, lane = self._late_bytes(cargo, [phase], held), phase.lane
            with self.trace.span(f"{cargo.label} {lane}", lane, cargo.layer, late):
                run_phase(self.port, phase, held, self.groups[phase.lane])

    def _late_bytes(self, cargo: Cargo, phases: Sequence[Phase], held: BlockSet) -> int:
        """What this rank sends in some phases, where no call waits for the cargo: counted in the trace as late."""
        if not cargo.late:
            return 0
        sent = [(peer, held.bytes(message)) for phase in phases for peer, message in phase.sends.items()]
        for peer, count in sent:
            self.trace.count(self.topology.link_class(self.rank, peer), count, purpose="late")
        return sum(count for _, count in sent)

    def arrived(self, cargo: Cargo, pending: LanePending[Target]) -> Sequence[Tensor]:
        """The tensors of a cargo, when they are here. The wait for a late one has a span of its own."""
        if not cargo.late:
            return pending.wait().tensors
        with self.trace.span(f"wait for {cargo.label}", layer=cargo.layer):
            return pending.wait().tensors


def _both_ways(plan: Plan) -> dict[str, Plan]:
    """Forward and back through those phases that have messages for this rank."""
    forward = tuple(phase for phase in plan if phase.sends or phase.receives)
    return {"forward": forward, "back": reverse(forward)}


def _placed(cargo: Cargo, held: BlockSet) -> Target:
    target = cargo.target(held)
    target.place(held.blocks)
    return target


class Transfer:
    """The messages of one attention call."""

    def __init__(self, exchange: Exchange, coded: CodedCall, layer: str) -> None:
        self.exchange, self.coded, self.layer, self.layout = exchange, coded, layer, coded.layout
        self.in_stages = False  # whether tensors come chunk by chunk; known once something was sent

    def send(self, wait_next: bool = False, **tensors_BLHD: Tensor) -> Arriving:
        """Starts sending this rank's rows of some tensors, each [B, L, H, D], in one message to each peer.

        wait_next: the caller waits for them next, so there is nothing to travel behind: the lane's job runs on the
        thread that waits.
        """
        return self.coded.send(self, tensors_BLHD, wait_next)

    def post(self, tensors_BLHD: Mapping[str, Tensor], wait_next: bool = False, late: bool = False) -> Arriving:
        """As `send`, with the coding's `encode` as the lane's first work; in stages where those pay for this size.

        late: this call does not wait for them. They are encoded here and now, so that what their encoding notes is
        known to the next call of the model however long the lane is behind, and only the code waits for its turn."""
        if late:
            cargo = Forward(self, tensors_BLHD, late)
            return WholeArriving(cargo, self.exchange.submit(cargo))
        staged = self.exchange.staged
        self.in_stages = self.travels_in_stages(next(iter(tensors_BLHD.values())))
        if staged is not None and self.in_stages:
            return staged.send({name: Forward(self, {name: x_BLHD}) for name, x_BLHD in tensors_BLHD.items()})
        cargo = Forward(self, tensors_BLHD)
        return WholeArriving(cargo, self.exchange.submit(cargo, wait_next))

    def travels_in_stages(self, like_BLHD: Tensor) -> bool:
        """The same on all ranks."""
        staged, coded = self.exchange.staged, self.coded
        return staged is not None and coded.awaited and staged.pays(self.layout, coded.cell_bytes(like_BLHD))

    def wait(self, sent: Sequence[Arriving]) -> dict[str, Tensor]:
        """By name all rows of this rank's heads of what was sent, [B, S, G, D] each."""
        here: dict[str, Tensor] = {}
        for arriving in sent:
            with self.exchange.trace.span(f"wait for {''.join(arriving.names)}", layer=self.layer):
                here |= zip(arriving.names, arriving.wait(), strict=True)
        return here

    def back(self, out_BSGD: Tensor) -> Tensor:
        """Sends all rows of this rank's heads of attention's output and returns all heads of its own rows,
        [B, L, H, D]."""
        return self.coded.back(self, out_BSGD)

    def post_back(self, out_BSGD: Tensor, late: bool = False) -> OutputArriving:
        """Sends all rows of this rank's heads of the output. late: as in `post`."""
        cargo = Back(self, out_BSGD, late=late)
        return OutputArriving(self, cargo, self.exchange.submit(cargo, wait_next=not late))

    def back_in_stages(self) -> OutputInStages:
        """The way back, chunk by chunk."""
        assert self.exchange.staged is not None, "what came in stages goes back in stages"
        return OutputInStages(self.exchange.staged, self)

    def output_of(self, out_BTGD: Tensor, ranks: Sequence[int]) -> Back:
        """The output for some ranks' rows, consecutive in the sequence, as it goes back."""
        return Back(self, out_BTGD, ranks)


class Arriving(Protocol):
    """Tensors that were sent together, on their way to this rank's heads."""

    names: tuple[str, ...]

    def wait(self) -> list[Tensor]:
        """All rows of this rank's heads of each tensor, [B, S, G, D]."""
        ...

    def chunk(self, name: str, number: int) -> Tensor:
        """The whole sequence of one tensor, of which this chunk and those asked for before are here. In ascending
        order, each chunk once."""
        ...

    def expect(self, name: str, number: int) -> None:
        """Has a chunk put in place as soon as it is here. Chunks land in the order in which they are expected."""
        ...


class WholeArriving:
    """Tensors that travel whole: every chunk is there when all are."""

    def __init__(self, cargo: Forward, pending: LanePending[Target]) -> None:
        self.names, self._cargo, self._pending = cargo.names, cargo, pending
        self._decoded: list[Tensor] = []

    def wait(self) -> list[Tensor]:
        if not self._decoded:
            self._decoded = self._cargo.decode(self._cargo.exchange.arrived(self._cargo, self._pending))
        return self._decoded

    def chunk(self, name: str, number: int) -> Tensor:
        return self.wait()[self.names.index(name)]

    def expect(self, name: str, number: int) -> None:
        return


class Together:
    """Tensors of several sendings as one; see `Arriving`."""

    def __init__(self, names: tuple[str, ...], parts: Sequence[Arriving]) -> None:
        self.names, self._of = names, {name: part for part in parts for name in part.names}

    def wait(self) -> list[Tensor]:
        here: dict[str, Tensor] = {}
        for part in dict.fromkeys(self._of.values()):
            here |= zip(part.names, part.wait(), strict=True)
        return [here[name] for name in self.names]

    def chunk(self, name: str, number: int) -> Tensor:
        return self._of[name].chunk(name, number)

    def expect(self, name: str, number: int) -> None:
        self._of[name].expect(name, number)


class OutputArriving:
    """Attention's output on its way to the ranks of its rows, whole."""

    def __init__(self, transfer: Transfer, cargo: Back, pending: LanePending[Target]) -> None:
        self._transfer, self._cargo, self._pending = transfer, cargo, pending

    def wait(self) -> Tensor:
        """All heads of this rank's rows, [B, L, H, D]."""
        exchange, layer = self._transfer.exchange, self._transfer.layer
        with nullcontext() if self._cargo.late else exchange.trace.span("wait for o", layer=layer):
            (received,) = exchange.arrived(self._cargo, self._pending)
            return self._transfer.coded.decode_output(received)
