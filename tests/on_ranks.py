"""Models and pipelines on loopback ranks, beside what one process gives: what every one of them has to keep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from planned_models import cast
from seams import hooks_of, unreceived_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.agreement import tensors_in
from cocodiff.engine.engine import Engine, parallelize
from cocodiff.engine.verification import BEYOND_ROUNDING, TorchFunctions, in_opposite_order

ORDERS = {order: {"order": order} for order in ("joint", "v_first")}
# Whole models take long: split's joint order is left to tests/attention.
VARIANTS = {
    f"{exchange}, {order}": {"exchange": exchange, "order": order}
    for exchange, order in (*product(("flat", "tapa"), ORDERS), ("split", "v_first"))
}
Call = dict[str, Any]


class Ran(NamedTuple):
    """A rank's: what was found in the block, and the engine, which has been left."""

    found: Any
    engine: Engine

    def sent(self, purpose: str = "attention") -> int:
        """The bytes of all ranks."""
        return sum(self.engine.bytes(purpose).values())

    def cached(self) -> list[float]:
        """The fraction of each step's calls that were."""
        return [row["cached_fraction"] for row in self.engine.drift_profile()]


def outputs_of(model: Any, *calls: Call) -> list[Tensor]:
    """All tensors that calls give, one call after the other."""
    with torch.no_grad():
        copies = pytree.tree_map_only(Tensor, torch.clone, calls)
        return [x + 0 for call in copies for x in tensors_in(model(**call))]


def state_of(target: Any) -> list[Any]:
    """What a block has to put back: a pipeline's parts and settings; of every module its class, its processor and what
    stands in its instance dictionary; and hooks."""
    parts = {"": target} if isinstance(target, nn.Module) else target.components
    found: list[Any] = [] if isinstance(target, nn.Module) else [dict(target.config)]
    for name, part in parts.items():
        found.append((name, id(part)))
        if isinstance(part, nn.Module):
            for m in part.modules():
                found.append((id(m), type(m), *(id(vars(m).get(one)) for one in ("processor", "forward"))))
                found.append({*vars(m)} - {"_diffusers_hook"})  # diffusers puts it there at a first call
            found += map(id, hooks_of(part))
    return found


def on_ranks(
    size: int,
    target: Any,
    *calls: Call,
    run: Callable[[Any, Engine], Any] | None = None,
    begin: Callable[[Any], object] = lambda _: None,
    restored: bool = True,
    timeout_s: float = 60.0,
    **settings: Any,
) -> list[Ran]:
    """What `run` finds of a copy of a model or a pipeline on every rank; without it the outputs of calls. begin: what
    is done to a copy first. restored: whether the block has to leave the copy as it was. No message is left over."""

    def work(transport: Any) -> Ran:
        own = copy.deepcopy(target)
        begin(own)
        before = state_of(own)
        with torch.no_grad(), parallelize(own, transport=transport, **settings) as engine:
            found = run(own, engine) if run else outputs_of(own, *calls)
        assert not restored or state_of(own) == before
        return Ran(found, engine)

    of_ranks = run_ranks(size, work, timeout_s)
    assert not unreceived_of(of_ranks[0].engine.transport)
    return of_ranks


def refused(words: str, target: Any, *calls: Call, size: int = 2, **more: Any) -> str:
    """The one line in which it is refused, which has these words."""
    with pytest.raises(UserError, match=words) as caught:
        on_ranks(size, target, *calls, timeout_s=20.0, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_alike(of_ranks: Sequence[Ran], expected: Sequence[Tensor], atol: float = 1e-4, rtol: float = 0.0) -> Ran:
    """Whether all ranks have the same bits, near what is expected. Returns the first rank's."""
    for rank in of_ranks:
        assert all(map(torch.equal, rank.found, of_ranks[0].found)), "the ranks have other bits"
    torch.testing.assert_close(list(of_ranks[0].found), list(expected), rtol=rtol, atol=atol)
    return of_ranks[0]


def check_exact(
    size: int,
    model: nn.Module,
    calls: Sequence[Call],
    modes: Mapping[str, Call],
    before: Callable[[Any, int], None] | None = None,
    in_double: bool = True,
    seen: Callable[[Engine], object] = lambda _: None,
    **settings: Any,
) -> list[Tensor]:
    """In each mode all ranks give the same bits, as close to the truth as one process: the error is at most twice that
    of one process, against the same weights in float64, plus rounding. A class that rounds by itself is compared with
    one process instead, as `verify` does, by a multiple of what its output changes by where attention takes its keys in
    the opposite order. The model has to be left as it was, and to give one process's bits again.

    before: changes the model before the call of a number. seen: looks at a mode's engine. Returns what one process
    gives."""

    def run(own: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        found = []
        for number, call in enumerate(calls):
            if before:
                before(own, number)
            found += outputs_of(own, cast(call, dtype) if dtype else call)
        return found

    plain, other = run(copy.deepcopy(model)), list[Tensor]()
    truth = run(copy.deepcopy(model).double(), torch.float64) if in_double else plain
    if not in_double:
        with TorchFunctions(in_opposite_order):
            other = run(copy.deepcopy(model))

    def work(transport: Any) -> list[list[Tensor]]:
        own, found = copy.deepcopy(model), []
        state = state_of(own)
        for given in modes.values():
            with torch.no_grad(), parallelize(own, transport=transport, **{**settings, **given}) as engine:
                found.append(run(own))
                seen(engine)
                if not before and len(found) == len(modes):  # a first call is followed, a second one is not
                    again = outputs_of(own, calls[-1])
                    assert all(map(torch.equal, again, found[-1][-len(again) :]))
            assert (sum(engine.bytes().values()) > 0) == (size > settings.get("guidance_parallel", 1))
            assert state_of(own) == state
        if not before:
            assert all(map(torch.equal, outputs_of(own, *calls), plain))
        return found

    of_ranks = run_ranks(size, work)
    for number, mode in enumerate(modes):
        check_near([of_rank[number] for of_rank in of_ranks], plain, truth, other, mode)
        assert size > 1 or all(map(torch.equal, of_ranks[0][number], plain)), f"{mode}: one rank has other bits"
    # FLUX.2's single blocks are the exception: v first is another matrix product there than all at once.
    alike = [[order] for order in ORDERS] if type(model).__name__.startswith("Flux2") else [[*ORDERS]]
    of_orders = [{mode for mode, given in VARIANTS.items() if given["order"] in orders} for orders in alike]
    for same in ({"flat", "tapa"}, *of_orders):
        first, *others = [of_ranks[0][number] for number, mode in enumerate(modes) if mode in same] or [[]]
        assert all(all(map(torch.equal, first, one)) for one in others), "other bits by another exchange"
    return plain


def check_near(
    of_ranks: Sequence[list[Tensor]],
    plain: Sequence[Tensor],
    truth: Sequence[Tensor],
    other: Sequence[Tensor] = (),
    mode: str = "",
) -> None:
    """Whether ranks' outputs in a mode are as close to the truth as one process; see `check_exact`. other: those of one
    process in the other order of keys, with which a class that rounds by itself is compared."""
    for at, exact in enumerate(truth):
        found, eps = of_ranks[0][at], torch.finfo(plain[at].dtype).eps
        assert all(torch.equal(of_rank[at], found) for of_rank in of_ranks), f"{mode}: ranks have other bits"
        assert found.dtype == plain[at].dtype and found.shape == plain[at].shape
        near, times = (other[at], BEYOND_ROUNDING) if other else (plain[at], 2)
        allowed = times * (near - exact).abs().max() + eps * exact.abs().max()
        off = (found - exact).abs().max()
        assert off <= allowed, f"{mode}, output {at}: error {off:.2e}, {allowed:.2e} allowed"
