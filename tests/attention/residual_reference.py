"""The residual codec in one process: whole tensors, no communication, no packing, written from its definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_worlds import Call, Ranks, World
from torch import Tensor

from cocodiff.attention.local import LocalAttention
from cocodiff.topology.layout import Layout

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Sampled = Callable[[str], list[int]]


def predicted(x: Tensor, known: list[Tensor], factor: float) -> Tensor:
    """In float32: the newest reconstruction or, with a factor, that one continued."""
    newest = known[-1].float()
    if not factor:
        return newest
    return newest + (newest - known[-2].float()) * torch.tensor(factor, dtype=torch.float32)


def limited(prediction: Tensor) -> Tensor:
    """So that finite numbers have finite differences to it."""
    return prediction.nan_to_num(-(2.0**102)).clamp(-(2.0**102), 2.0**102)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.clamp(-65504, 65504) if dtype == torch.float16 else x).to(dtype)


def sizes(residual: Tensor) -> list[Tensor]:
    """Of every group of channels the largest size, infinite where one is not finite."""
    return [torch.where(one.isfinite(), one.abs(), math.inf).amax(-1) for one in residual.split(32, -1)]


def byte_of(step: Tensor, round_up: bool) -> Tensor:
    """The scale byte of a step with 4 bits, above or nearest (the smaller one in the middle), not limited; of infinity
    256."""
    mantissa, exponent = torch.frexp(step.double())  # mantissa from 1/2 to 1
    eighths = torch.ceil(mantissa * 16 - (0 if round_up else 0.5))  # 8 to 16: a significand from 1 to 2
    byte = 8 * (exponent.double() - 1 + 20) + (eighths - 8) + 1
    return torch.where(step == 0, 0.0, torch.where(step.isfinite(), byte, 256.0))


def tree_sum(x: Tensor) -> Tensor:
    """Of up to 32 numbers, halves added to halves."""
    x = torch.cat([x, x.new_zeros(*x.shape[:-1], 32 - x.shape[-1])], -1)
    for length in (16, 8, 4, 2, 1):
        x = x[..., :length] + x[..., length:]
    return x[..., 0]


def fitted(group: Tensor, largest: Tensor) -> Tensor:
    """The step of 2 bits in float64, after two rounds of least squares."""
    size, total, count = group.abs(), largest * (13 / 32), torch.tensor(1)
    for _ in range(2):
        large = size * count[..., None].float() >= total[..., None]
        total = 2 * (tree_sum(size) + 2 * tree_sum(torch.where(large, size, 0.0)))
        count = group.shape[-1] + 8 * large.sum(-1)
    step = total.double() / count
    return torch.where(largest.isfinite(), step, math.inf)


def recoded(x: Tensor, prediction: Tensor, bits: int) -> tuple[Tensor, int]:
    """What both ends have of x afterwards; how many groups no scale fits."""
    parts, unfit, prediction = [], 0, limited(prediction)
    residual = x.float() - prediction
    for group, largest in zip(residual.split(32, -1), sizes(residual), strict=True):
        step = fitted(group, largest) if bits == 2 else largest / 2 ** (bits - 1)
        byte = byte_of(step, round_up=bits != 2).clamp(min=0)
        unfit += int((byte >= 255).sum())
        sent = torch.where(largest.isfinite(), torch.where(byte > 254, 0.0, byte), 255.0)
        step = ((1 + (sent - 1) % 8 / 8) * 2.0 ** ((sent - 1) // 8 - 20)).float()[..., None]
        magnitude = (group.abs() * (1 / step)).nan_to_num(0, 1e9, 0).trunc().clamp(max=2 ** (bits - 1) - 1)
        value = torch.where(group < 0, -magnitude - 0.5, magnitude + 0.5) * step
        value = torch.where(sent[..., None] == 0, 0.0, value)
        parts.append(torch.where(sent[..., None] == 255, math.nan, value))
    return rounded(prediction + torch.cat(parts, -1), x.dtype), unfit


def mean_error(x: Tensor, prediction: Tensor) -> float:
    """The geometric mean over groups of how large the largest error of a group is beside its largest value."""
    eighths = [
        byte_of(one, True).clamp(0, 254) - byte_of(other, True).clamp(0, 254)
        for one, other in zip(sizes(x - prediction), sizes(x), strict=True)
    ]
    return 2.0 ** (sum(int(one.sum()) for one in eighths) / (8 * sum(one.numel() for one in eighths)))


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
        return rounded(predicted(x, known[:-1], self.linear() / 2), x.dtype)

    def first(self, x: Tensor) -> Tensor:
        """What is had of a tensor of which nothing was known: with 2 bits later, 8 of the whole tensor now."""
        if self.bits != 2 or self.plain:
            return x
        new, unfit = recoded(x, torch.zeros_like(x).float(), 8)
        self.unfit = self.unfit or unfit > 0
        return new

    def linear(self) -> float:
        """The factor by which tensors are continued, 0 where they are not."""
        return self.factor() if self.bits else 0.0

    def reconstructed(self, name: str, x: Tensor, known: list[Tensor], sampled: Sampled) -> Tensor:
        if self.bits is None:
            if self.arrival == "adaptive":
                rows = sampled(name)
                self.changes[name] = mean_error(x[:, rows].float(), known[-1][:, rows].float())
            return x
        new, unfit = recoded(x, predicted(x, known, self.linear()), self.bits)
        self.unfit = self.unfit or unfit > 0
        if self.arrival == "adaptive":
            self.changes[name] = mean_error(x.float(), known[-1].float())
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
            heads = layout.head_slices
            return torch.cat([LocalAttention().whole(*(x[:, :, of].contiguous() for x in whole)) for of in heads], 2)

        def sampled(name: str, layout: Layout = layout) -> list[int]:
            parts = [slice(0, sum(layout.rows))] if name == "o" else layout.row_slices
            return [row for part in parts for row in range(part.start, part.stop, 16)]

        o_BSHD = expected.call(world.tensors(call), call.run, call.step, call.sigma, attend, sampled)
        for rank, (outputs, *_) in enumerate(of_ranks):
            own = o_BSHD[:, world.rows(call, rank)]
            assert torch.equal(outputs[number].nan_to_num(1e30), own.nan_to_num(1e30)), f"call {number}, rank {rank}"
    return expected
