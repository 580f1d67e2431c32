"""The exchange of one rank: from sequence-parallel to head-parallel layout and back, along any plan.

`Exchange` owns what all attention calls share: plans, lanes and groups. Each call sends by a `Transfer` over it
(`transfer.py`). Blocks pass through intermediate ranks unchanged, so the route does not affect the bits of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cocodiff.comm.lane import Lane, LaneFuture
from cocodiff.comm.transport import Group, RankContext
from cocodiff.config.errors import UserError
from cocodiff.config.registry import EXCHANGES
from cocodiff.exchange.messages import BlockSet, Target, run_phase, run_pipelined
from cocodiff.exchange.outgoing import Outgoing
from cocodiff.topology.routes.chunks import Chunking, ExchangeTable, chunk_ranks, exchange_for, megabytes_per_rank
from cocodiff.topology.routes.plans import Phase, Plan, plan_of, reverse

if TYPE_CHECKING:
    from cocodiff.exchange.staged import StagedExchange

T = TypeVar("T")


class Exchange(RankContext):
    """The part of one rank in an exchange among the ranks of a topology: its routes, background threads and
    communicators.

    All attention calls share it. Each sends its tensors by a `Transfer`.
    """

    def __init__(
        self,
        name: str,
        context: RankContext,
        table: ExchangeTable | None = None,
        nic_balance: bool = True,
        chunking: Chunking | None = None,
        together: bool | None = None,
    ) -> None:
        """Plan the routes, and open communicators and background threads. All ranks of the context's transport do so
        together.

        Args:
            name: a name in the table `EXCHANGES` ("flat", "tapa", "split"), or "auto" to choose by `table` for each
                size.
            context: this rank among the ranks of the exchange.
            table: the exchange by size, for "auto".
            nic_balance: True to spread split's messages between nodes over the NICs.
            chunking: the number of stages in which tensors may also be sent, and from which size; None for none.
            together: see `Transport.group`. It is off with stages, because ranks post their messages in different
                orders.
        """
        super().__init__(context.transport, context.topology, context.trace, context.kernels)
        transport, topology, self._table = self.transport, self.topology, table
        known = EXCHANGES if name == "auto" else (name,)
        self.plans: dict[str, Plan] = {one: plan_of(topology, self.rank, one, nic_balance) for one in known}
        self._name = next(iter(self.plans))
        # TAPA's phases have a lane each: V-Major scores by card between them, and v can be in its second phase while q
        # and k are in their first. Other exchanges are one job on the plane lane.
        self._in_phases = name == "tapa"
        self.lanes: dict[str, Lane] = {}
        self._failed: Exception | None = None  # the error of the first job that failed
        self.groups: dict[str, Group] = {}
        from cocodiff.comm.groups import group_ranks

        together = False if chunking is not None and chunking.chunks > 1 else together
        for link in dict.fromkeys(phase.lane for plan in self.plans.values() for phase in plan):
            self.groups[link] = transport.group(group_ranks(topology, self.rank, link, known, nic_balance), together)
            if link == "plane" or self._in_phases:
                self.lanes[link] = transport.lane(link)
        self._routes: dict[str, dict[str, Plan]] = {}
        for one, plan in self.plans.items():
            forward = tuple(filter(self._takes_part, plan))
            self._routes[one] = {"forward": forward, "back": reverse(forward)}
        self.staged: StagedExchange | None = None
        if chunking is not None and len(chunk_ranks(topology, self.rank, chunking.chunks)) > 1:
            from cocodiff.exchange.staged import StagedExchange

            self.staged = StagedExchange(self, self.plans, self.name_of, self.groups, chunking)

    def name_of(self, blocks: BlockSet) -> str:
        """Return the name of the exchange that some blocks take: "flat", "tapa" or "split".

        It is the setting or, with "auto", the choice of a table by the mean MB per rank of the blocks' tensors.

        Args:
            blocks: blocks that this rank holds, which show the size of the tensors.
        """
        if self._table is None:
            return self._name
        return exchange_for(self._table, megabytes_per_rank(blocks.layout, blocks.cell_bytes))

    def submit(self, outgoing: Outgoing) -> LaneFuture[Target]:
        """Start sending tensors. Return the future of the tensors that this rank receives in exchange, as a `Target`.

        Background threads encode, pack and send, and put received blocks in place.

        Args:
            outgoing: the tensors to send.
        """
        if not self._in_phases:
            return self._on_lane("plane", self._all_phases, outgoing)
        before = outgoing.blocks
        *early, last = self._routes[self._name][outgoing.way]
        for phase in early:
            before = self._on_lane(phase.lane, partial(self.phase, phase, before), outgoing).wait
        return self._on_lane(last.lane, partial(self.last_phase, last, before), outgoing)

    def _on_lane(self, name: str, job: Callable[[Outgoing], T], outgoing: Outgoing) -> LaneFuture[T]:
        """Submit a job to a lane, a background thread, and return the future of its result. After a failed job it
        raises that one's error.

        Args:
            name: name of the lane, "sibling" or "plane".
            job: called with `outgoing`.
            outgoing: the tensors to send.
        """
        return self.lanes[name].submit(partial(self._run_in_order, job), outgoing)

    def _run_in_order(self, job: Callable[[Outgoing], T], outgoing: Outgoing) -> T:
        """Run a job, or raise the error of an earlier job that failed.

        Peers match messages in the order in which they are posted. The next job's messages would be matched with those
        that the failed job left out, and a library may end the process where sizes differ. The lost rank is named where
        the result is waited for.

        Args:
            job: called with `outgoing`.
            outgoing: the tensors to send.
        """
        if self._failed is not None:
            raise self._failed
        try:
            return job(outgoing)
        except UserError:  # every rank has the same one
            raise
        except Exception as error:
            self._failed = error
            raise

    def _all_phases(self, outgoing: Outgoing) -> Target:
        """Send and receive all blocks of some tensors, and wait for them. Return the received tensors. A background
        thread calls it.

        `name_of` says by which exchange. TAPA's two phases run one after the other, because each packs all its messages
        in one kernel launch. The phases of other exchanges run together.

        Args:
            outgoing: the tensors to send.
        """
        blocks = outgoing.blocks()
        name = self.name_of(blocks)
        plan = self._routes[name][outgoing.way]
        if name == "tapa":
            for phase in plan:
                self.phase(phase, lambda: blocks, outgoing)
            return outgoing.placed(blocks)
        apart = self._set_apart(outgoing, plan, blocks)
        with self.trace.span(f"{outgoing.label} plane", "plane", outgoing.layer, apart):
            target = outgoing.target(blocks)
            run_pipelined(self, plan, blocks, self.groups, target)
            return target

    def phase(self, phase: Phase, before: Callable[[], BlockSet], outgoing: Outgoing) -> BlockSet:
        """Send and receive the messages of one phase of TAPA on the calling thread, a background one. Return the blocks
        that this rank then holds.

        If this rank has no part in the phase, they are those that it begins with.

        Args:
            phase: what this rank sends and receives.
            before: waits for the blocks that the phase begins with, and returns them.
            outgoing: the tensors to send.
        """
        blocks = before()
        if self._takes_part(phase):
            apart, lane = self._set_apart(outgoing, [phase], blocks), phase.lane
            with self.trace.span(f"{outgoing.label} {lane}", lane, outgoing.layer, apart):
                run_phase(self, phase, blocks, self.groups[phase.lane])
        return blocks

    def last_phase(self, phase: Phase, before: Callable[[], BlockSet], outgoing: Outgoing) -> Target:
        """Run the last phase of TAPA like `phase`. Copy the blocks into the tensors that this rank receives, and return
        these.

        Args:
            phase: what this rank sends and receives.
            before: waits for the blocks that the phase begins with, and returns them.
            outgoing: the tensors to send.
        """
        return outgoing.placed(self.phase(phase, before, outgoing))

    def _takes_part(self, phase: Phase) -> bool:
        """Return True if this rank has messages in a phase, or if the phase is one call of the library that all ranks
        of the group make."""
        group = self.groups[phase.lane]
        return bool(phase.sends or phase.receives or (group.at_once and len(group.ranks) > 1))

    def _set_apart(self, outgoing: Outgoing, phases: Sequence[Phase], blocks: BlockSet) -> int:
        """Count in the trace, for a purpose besides attention, the bytes that this rank sends in some phases. Return
        their sum.

        Return 0 if the tensors have no such purpose. One is "late", for tensors that no call waits for.

        Args:
            outgoing: the tensors to send, with their purpose.
            phases: what this rank sends and receives.
            blocks: the blocks that this rank holds.
        """
        if outgoing.purpose is None:
            return 0
        sent = [(peer, blocks.bytes(message)) for phase in phases for peer, message in phase.sends.items()]
        for peer, count in sent:
            self.trace.count(self.topology.link_class(self.rank, peer), count, purpose=outgoing.purpose)
        return sum(count for _, count in sent)
