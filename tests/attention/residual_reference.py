"""The residual codec in one process: whole tensors, without communication. Its arithmetic is torch's, which
tests/kernels/test_residual.py compares with another implementation, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_worlds import Call, Ranks, World
from torch import Tensor

from cocodiff.attention.local import LocalAttention
from cocodiff.kernels import TorchOps
from cocodiff.kernels.residual import NOTES, Onward, Prediction, Reconstructions, coded_width
from cocodiff.topology.layout import Layout, slices

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Sampled = Callable[[str], list[int]]
TORCH = TorchOps()


def continued(known: list[Tensor], factor: float) -> Tensor:
    """The newest reconstruction or, with a factor, that one continued."""
    if not factor:
        return known[-1]
    out = torch.empty_like(known[-1])
    TORCH.continue_linearly(known[-1], known[-2], Onward(factor, out))
    return out


def recoded(x: Tensor, known: list[Tensor], factor: float, bits: int) -> tuple[Tensor, bool]:
    """What both ends have of x afterwards; whether there are groups that no scale fits."""
    ends = Reconstructions(known[-1].clone(), known[-2].clone() if factor else None)
    code = torch.empty(*x.shape[:-1], coded_width(x.shape[-1], bits), dtype=torch.uint8)
    notes = torch.zeros(NOTES, dtype=torch.int64)
    TORCH.encode_residual(x, ends, Prediction(factor, linear=bool(factor)), bits, code, notes)
    return ends.older, bool(notes[0])


def mean_error(x: Tensor, last: Tensor) -> float:
    """The geometric mean over groups of how large the largest error of a group is beside its largest value."""
    notes = torch.zeros(NOTES, dtype=torch.int64)
    TORCH.note_change(x, last.clone(), notes)
    return 2.0 ** (int(notes[2]) / (8 * int(notes[3])))


@dataclass
class Reference:
    """One layer. bits: None for tensors that travel as they are. arrival, tau: as the settings."""

    bits: int | None
    predictor: str = "last"
    arrival: str = "now"
    tau: float = 1.0
    fine: bool = False
    known: dict[str, list[Tensor]] = field(default_factory=dict)
    sigmas: list[float] = field(default_factory=list)
    last: Any = None
    unfit: bool = False
    plain: bool = False
    follows: bool = False
    changes: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    whole_calls: list[int] = field(default_factory=list)
    displaced: list[str] = field(default_factory=list)

    def call(
        self, tensors: list[Tensor], run: int, step: int, sigma: float, attend: Attention, sampled: Sampled = None
    ) -> Tensor:
        """q, k and v of one call, of all tokens; returns the output as all ranks' rows have it.

        attend: attention of whole tensors [B, S, H, D]. sampled: by a tensor's name, which of its rows are looked at
        where tensors travel as they are."""
        form = (run, [tuple(x.shape) for x in tensors])
        last_form, last_step = self.last or (None, step)
        self.follows = last_form == form and last_step < step and not self.unfit
        self.last, self.plain, self.unfit = (form, step), self.unfit, False
        if not self.follows:
            self.known, self.sigmas, self.changes = {}, [], {}
            self.whole_calls.append(self.calls)
        self.calls += 1
        self.sigmas.append(sigma)
        late = self.not_awaited()
        self.displaced.append("".join(late))
        self.changes = {}
        q, k, v = (self.through(name, x, late, sampled) for name, x in zip("qkv", tensors, strict=True))
        return self.through("o", attend(q, k, v), late, sampled)

    def not_awaited(self) -> list[str]:
        if self.arrival == "now" or not self.follows or self.fine:
            return []
        pace = 1.0
        if len(self.sigmas) > 2:
            now, last = (abs(self.sigmas[at] - self.sigmas[at - 1]) for at in (-1, -2))
            pace = min(max(now / last, 0.25), 4.0) if now and last else 1.0
        tau = {name: self.tau / pace / (1 if self.linear() else 1.5) for name in "qkvo"}
        return [name for name in "qkvo" if self.arrival == "displaced" or self.changes.get(name, math.inf) < tau[name]]

    def through(self, name: str, x: Tensor, late: list[str], sampled: Sampled) -> Tensor:
        """What the tensor's receiver has of it in this call."""
        known = self.known.setdefault(name, [])
        known.append(self.reconstructed(name, x, known, sampled) if self.follows else self.first(x))
        if name not in late:
            return known[-1]
        return continued(known[:-1], self.linear() / 2)

    def first(self, x: Tensor) -> Tensor:
        """What is had of a tensor of which nothing was known: with 2 bits later, 8 of the whole tensor now."""
        if self.bits != 2 or self.plain:
            return x
        new, unfit = recoded(x, [torch.zeros_like(x)], 0.0, 8)
        self.unfit = self.unfit or unfit
        return new

    def linear(self) -> float:
        """The factor by which tensors are continued, 0 where they are not."""
        return self.factor() if self.bits else 0.0

    def reconstructed(self, name: str, x: Tensor, known: list[Tensor], sampled: Sampled) -> Tensor:
        if self.bits is None:
            if self.arrival == "adaptive":
                rows = sampled(name)
                self.changes[name] = mean_error(x[:, rows], known[-1][:, rows])
            return x
        new, unfit = recoded(x, known, self.linear(), self.bits)
        self.unfit = self.unfit or unfit
        if self.arrival == "adaptive":
            self.changes[name] = mean_error(x, known[-1])
        return new

    def factor(self) -> float:
        """Of the linear continuation; 0 for none."""
        if self.predictor == "last" or len(self.sigmas) < 3 or self.sigmas[-2] == self.sigmas[-3]:
            return 0.0
        factor = (self.sigmas[-1] - self.sigmas[-2]) / (self.sigmas[-2] - self.sigmas[-3])
        return min(max(factor, 0.0), 2.0)


def check(
    world: World, calls: list[Call], uncoded: Ranks | None = None, unchunked: Ranks | None = None, **settings: Any
) -> Reference:
    """uncoded: ranks whose attention to the reconstructions is the reference's, where summing has an order of its
    own; unchunked: for calls that do not wait for all tensors."""
    ranks = Ranks(world, **settings)
    config = ranks.config
    bits = None if config.codec == "none" else int(config.codec[3:])
    expected = Reference(bits, config.predictor, config.arrival, config.tau)
    of_ranks = ranks.call(calls)
    for number, call in enumerate(calls):
        layout = world.layout(call)
        expected.fine = call.steps is not None and call.step >= call.steps - config.fine_steps
        if bits is not None:
            expected.bits = min(2 * bits, 8) if expected.fine else bits

        def attend(*whole: Tensor, call: Call = call, layout: Layout = layout) -> Tensor:
            those = unchunked if expected.displaced[-1] and unchunked is not None else uncoded
            if those is not None:
                return torch.cat([outputs[0] for outputs, *_ in those.attend([(call, list(whole))])], 1)
            heads = slices(layout.heads)
            return torch.cat([LocalAttention().whole(*(x[:, :, of].contiguous() for x in whole)) for of in heads], 2)

        def sampled(name: str, layout: Layout = layout) -> list[int]:
            parts = [slice(0, sum(layout.rows))] if name == "o" else layout.row_slices
            return [row for part in parts for row in range(part.start, part.stop, 16)]

        o_BSHD = expected.call(world.tensors(call), call.run, call.step, call.sigma, attend, sampled)
        for rank, (outputs, *_) in enumerate(of_ranks):
            own = o_BSHD[:, world.rows(call, rank)]
            assert torch.equal(outputs[number].nan_to_num(1e30), own.nan_to_num(1e30)), f"call {number}, rank {rank}"
    return expected
