"""Which deal of the ranks a job takes: memory first, then the least predicted time of the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from cocodiff.errors import UserError
from cocodiff.planning.deal_prices import Pricer, Workload, untimed
from cocodiff.planning.deals import Deal, deals_of
from cocodiff.planning.memory import RankMemory, check_fits, misfit
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES

SAME = 1.001  # times that differ by less are the same time


@dataclass(frozen=True)
class PricedDeal:
    """A deal of a job's ranks. ulysses, ring: the mesh of the ranks that share a sequence. need: of the fullest rank.

    tile: bytes of memory that a rank has, None where the machine does not say. batches: calls of the pipeline that make
    the job's images. batch_s: seconds of one, denoising alone; sent, outputs: bytes of one by link class, of attention
    and of the exchange of outputs between guidance branches. All three None where nothing is timed. first_s: what a
    replica's first batch takes longer: in its first step both branches of calls in turn are computed by all.
    """

    deal: Deal
    ulysses: int
    ring: int
    need: RankMemory
    tile: int | None
    images: int
    batches: int
    batch_s: float | None = None
    sent: dict[str, float] | None = None
    outputs: dict[str, float] | None = None
    first_s: float = 0.0

    @property
    def fits(self) -> bool | None:
        return None if self.tile is None else misfit(self.need, self.tile) is None

    @property
    def rounds(self) -> int:
        """Batches that the replica with the most of them makes."""
        return ceil(self.batches / self.deal.replicas)

    @property
    def job_s(self) -> float:
        """Seconds of the whole job, denoising alone."""
        assert self.batch_s is not None, "nothing is timed on this machine"
        return self.rounds * self.batch_s + self.first_s

    @property
    def images_per_hour(self) -> float:
        return self.images * 3600 / self.job_s

    def __str__(self) -> str:
        """As "4 replicas of 24 ranks, each guidance branch on 12 of them (Ulysses 12)"."""
        ranks = self.ulysses * self.ring
        count, all_ranks = self.deal.replicas, ranks * self.deal.guidance
        told = f"{count} replica{'s' * (count > 1)} of {all_ranks} rank{'s' * (all_ranks > 1)}"
        if self.deal.guidance > 1:
            told += f", each guidance branch on {ranks} of them"
        axes = [f"{name} {n}" for name, n in (("Ulysses", self.ulysses), ("ring", self.ring)) if n > 1]
        return told + (f" ({' x '.join(axes)})" if axes else "")


@dataclass(frozen=True)
class Choice:
    """taken: the deal of the job; it does not fit where none does. following: the best of the others that were timed.
    listed: all that were looked at, as `deals_of` lists them. refused: why others cannot be. reason: why nothing is
    timed; None where it is."""

    topology: Topology
    taken: PricedDeal
    following: PricedDeal | None
    listed: list[PricedDeal]
    refused: dict[Deal, UserError]
    reason: str | None

    def check_fits(self) -> None:
        """Raises UserError where no deal fits the memory of a rank."""
        if self.taken.tile is not None:
            least = f"the deal that needs least, {self.taken}" if len(self.listed) > 1 else f"{self.taken}"
            check_fits(self.taken.need, self.taken.tile, f"the fullest rank in {least}")

    def line(self) -> str:
        """What was taken, why, and what the next best would cost."""
        taken, following, machine = self.taken, self.following, self.topology.machine.name
        told = f"ranks dealt to {taken}"
        if len(self.listed) == 1:
            predicted = "" if taken.batch_s is None else f", {_seconds(taken)} by prediction"
            return f"{told}: with what is given there is no other deal{predicted}"
        misfits = sum(one.fits is False for one in self.listed)
        kept_out = f" ({misfits} of {len(self.listed)} deals do not fit the memory)" if misfits else ""
        if self.reason:
            order = "replicas first, then guidance, then Ulysses"
            return f"{told}: {order}, as machine {machine} does not say what others would take{kept_out}"
        next_best = ""
        if following is not None:
            ratio = following.job_s / taken.job_s
            next_best = f"; next best: {following}, {_seconds(following)} ({ratio:.2f}x)"
        return f"{told}: the least time by prediction, {_seconds(taken)}{kept_out}{next_best}"


def _seconds(one: PricedDeal) -> str:
    seconds = one.job_s
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def choose(
    pricer: Pricer,
    works: Sequence[Workload],
    images: int,
    batches: int,
    replicas: int | None = None,
    guidance: int | None = None,
    time_all: bool = False,
    least: int = 1,
) -> Choice:
    """The deal of a job that makes so many images, in so many calls of the pipeline, in each of several presets.

    works: of one model, one for each preset; their times add up. replicas, guidance, least: as in `deals_of`. time_all:
    also what the model's arithmetic alone shows to be slower. Where the machine tells no rates, replicas come first, up
    to one for each batch, then guidance; the ranks of a part share a sequence as the settings say.
    Raises UserError where no deal is possible.
    """
    topology, guides = pricer.topology, any(work.guides for work in works)
    refused: dict[Deal, UserError] = {}
    sized: list[PricedDeal] = []
    for deal in deals_of(topology.size, guides, replicas, guidance, least):
        try:
            sized.append(size_deal(pricer, works, deal, images, batches))
        except UserError as error:
            refused[deal] = error
    if not sized:
        raise next(iter(refused.values()))
    fitting = [one for one in sized if one.fits is not False]
    reason = untimed(topology.machine)
    if reason and refused and min(one.deal.replicas for one in sized) > max(batches, replicas or 1):
        raise next(iter(refused.values()))  # more ranks than so few images can use
    if reason or not (fitting or time_all):
        taken = by_rule(fitting) if fitting else min(sized, key=lambda one: one.need.total)
        return Choice(topology, taken, None, sized, refused, reason)
    timed = time_deals(pricer, works, sized if time_all else fitting, refused, time_all)
    listed = sorted((timed.get(one.deal, one) for one in sized if one.deal not in refused), key=lambda one: one.deal)
    able = [one for one in timed.values() if one.fits is not False]
    if not able:
        return Choice(topology, min(listed, key=lambda one: one.need.total), None, listed, refused, None)
    able.sort(key=lambda one: one.job_s)
    near = [one for one in able if one.job_s <= SAME * able[0].job_s]
    taken = max(near, key=lambda one: (one.deal, -one.ring))
    following = next((one for one in able if one is not taken), None)
    return Choice(topology, taken, following, listed, refused, None)


def size_deal(pricer: Pricer, works: Sequence[Workload], deal: Deal, images: int, batches: int) -> PricedDeal:
    """A deal with its memory. Raises UserError where ranks, heads, tokens or settings do not allow it."""
    need = max((pricer.need(work, deal) for work in works), key=lambda need: need.total)
    for work in works:
        pricer.check_same_bits(work, deal)
    mesh = pricer.mesh(works[0], deal)
    tile = int(pricer.topology.machine.device.memory_gib * 2**30) or None
    return PricedDeal(deal, mesh.ulysses, mesh.ring, need, tile, images, batches)


def by_rule(sized: Sequence[PricedDeal]) -> PricedDeal:
    """Replicas first, as long as each has a batch to make, then guidance."""
    most = max(sized[0].batches, min(one.deal.replicas for one in sized))
    return max((one for one in sized if one.deal.replicas <= most), key=lambda one: one.deal)


def time_deals(
    pricer: Pricer, works: Sequence[Workload], sized: Sequence[PricedDeal], refused: dict[Deal, UserError], every: bool
) -> dict[Deal, PricedDeal]:
    """The deals with their times; of those that cannot be timed, `refused` is told why. Without `every`, as many as
    show the best two: no deal is faster than its arithmetic."""
    least = {one.deal: one.rounds * sum(work.steps * pricer.least_s(work, one.deal) for work in works) for one in sized}
    timed: dict[Deal, PricedDeal] = {}
    for one in sorted(sized, key=lambda one: least[one.deal]):
        best = sorted(known.job_s for known in timed.values())
        if not every and len(best) > 1 and least[one.deal] > SAME * best[1]:
            break
        try:
            timed[one.deal] = time_deal(pricer, works, one)
        except UserError as error:
            refused[one.deal] = error
    if not timed:
        raise next(iter(refused.values()))
    return timed


def time_deal(pricer: Pricer, works: Sequence[Workload], one: PricedDeal) -> PricedDeal:
    steps = [pricer.step(work, one.deal) for work in works]

    def total(counts: Sequence[dict[str, float]]) -> dict[str, float]:
        return {
            link: sum(work.steps * count[link] for work, count in zip(works, counts, strict=True))
            for link in LINK_CLASSES
        }

    return replace(
        one,
        batch_s=sum(step.plan.image_s for step in steps),
        sent=total([step.plan.bytes for step in steps]),
        outputs=total([step.outputs for step in steps]),
        first_s=sum(
            step.plan.step_s
            for work, step in zip(works, steps, strict=True)
            if one.deal.guidance > 1 and work.load.branches > 1
        ),
    )
