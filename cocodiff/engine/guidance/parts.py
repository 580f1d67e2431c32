"""Two parts of the ranks with a branch of guidance each, and what they send each other: the model's output.

A call may fail in one part, for want of memory say, and not in the other. So each result travels with a flag that says
whether there is one, and a part that fails, or hears that the other one did, makes up the messages that are left of
the step: what one part sends the other receives, and a caller who catches the error may go on with another image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cocodiff.comm.health import CALL
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import LaneFuture, Part, Transport
from cocodiff.config.machine import Topology
from cocodiff.engine.guidance import PARTS, SequenceOf, Sharing
from cocodiff.models.adapter import tensors_in
from cocodiff.topology.axes import Axes

AT = "the other guidance branch"  # the name of every call that the parts make together


class GuidanceParts:
    """This rank's part of the ranks, and the rank of the other part that has the same place there."""

    def __init__(self, topology: Topology, transport: Transport, trace: Trace, sequence_of: SequenceOf) -> None:
        """topology, transport: of both parts, of which every rank makes one."""
        axes, rank = Axes.build(topology, guidance=PARTS), transport.rank
        ranks = axes.branch(rank)
        self.number = axes.coordinates(rank).guidance
        self.sequence = sequence_of(topology.part(ranks), Part(transport, ranks), trace)
        pair = axes.partners(rank)
        self._group = transport.group(sorted(pair))
        self._peer = self._group.ranks.index(pair[1 - self.number])
        self._lane, self._health = transport.lane("guidance"), transport.health
        self._among = tuple(transport.run_ranks[member] for member in sorted(pair))
        self._trace, self._link = trace, topology.link_class(rank, pair[1 - self.number])
        self._device = transport.device
        self._sent: list[LaneFuture[None]] = []
        self._awaited: list[Callable[[], None]] = []  # what receives the messages, whatever they bring
        self._unposted: list[Callable[[], object]] = []  # of these, what posts the receives that nobody has asked for
        self._next = self._calls = 0  # of the current step: the branch of the next message, and how many there will be

    def begin_step(self, calls: int) -> None:
        """calls: that the step should have, as both parts know alike."""
        self.drain()
        self._next, self._calls = 0, calls

    def keeps(self, branch: int) -> bool:
        """Whether this part computes a branch that is computed by one of them."""
        return branch % PARTS == self.number

    def own_rows(self, arguments: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """A call's arguments with this part's half of everything along the batch."""
        half = rows // PARTS

        def cut(x: Tensor) -> Tensor:
            return x.narrow(0, self.number * half, half) if x.ndim and len(x) == rows else x

        return {name: tree_map_only(Tensor, cut, value) for name, value in arguments.items()}

    def all_rows(self, output: Any) -> Any:
        """A call's result with both parts' rows, from this part's."""
        own = self._message(output)
        others, exchanged = self._exchange_halves(own)
        exchanged.wait()
        self._check(others[0])
        pairs = iter([*zip(own, others, strict=True)][1:])
        return tree_map_only(
            Tensor, lambda _: torch.cat(next(pairs) if self.number == 0 else next(pairs)[::-1]), output
        )

    def send(self, output: Any, failed: bool = False) -> Any:
        """Starts sending a call's result to the other part, and returns it. What the caller does to it afterwards
        changes nothing."""
        self._next += 1
        self._post_receives()
        copies = self._message(tree_map_only(Tensor, torch.clone, output), failed)
        self._begin(copies)
        self._sent.append(self._lane.submit(self._pass, "send the output", copies, []))
        return output

    def awaited(self, like: Any) -> Any:
        """The result of a call that the other part computes, with tensors that wait for their values when asked. These
        raise RuntimeError where the other part has failed."""
        self._next += 1
        result = self._without_values(like)
        buffers = self._message(result)
        # Not before this part has computed its own calls: a receive may block the thread that posts their messages.
        posted = cache(lambda: self._lane.submit(self._pass, "receive the output", [], buffers))
        self._unposted.append(posted)

        @cache
        def receive() -> None:
            self._begin(())
            self._post_receives()
            posted().wait()

        @cache
        def wait() -> None:
            receive()
            self._check(buffers[0], like)  # raises again where somebody asks again

        self._awaited.append(receive)
        return tree_map_only(Tensor, lambda x: Awaited.over(x, wait), result)

    def fail(self, sharing: Sharing, like: Any) -> None:
        """This part could not compute a call of the current step: it sends that in place of the result. like: what the
        model returns for such calls, None where that is not known yet."""
        if like is None:
            return
        if sharing is Sharing.ROWS:
            nothing = self._message(self._without_values(like), failed=True)
            self._sent.append(self._exchange_halves(nothing)[1])
        else:
            self._calls = max(self._calls, self._next + 1)  # with the call that failed
            self._make_up(like)

    def drain(self) -> None:
        """Waits for all messages under way, those that nobody asked for too."""
        for receive in self._awaited:
            receive()
        for sent in self._sent:
            sent.wait()
        self._awaited, self._sent = [], []

    def _post_receives(self) -> None:
        """In the order in which the other part sends."""
        for post in self._unposted:
            post()
        self._unposted = []

    def _make_up(self, like: Any) -> None:
        """The messages of the step's calls that this part will not come to: the other part sends and receives them."""
        while self._next < self._calls:
            if self.keeps(self._next):
                self.send(self._without_values(like), failed=True)
            else:
                self.awaited(like)

    def _check(self, failed: Tensor, like: Any = None) -> None:
        """Raises where the other part's result says that there is none. like: of the calls that are left."""
        if not failed.item():
            return
        if like is not None:
            self._make_up(like)
        error = "the ranks that compute the other guidance branch could not: their error says why"
        raise self._health.blame(RuntimeError(error))

    def _message(self, output: Any, failed: bool = False) -> list[Tensor]:
        """A result as it travels: whether there is none, and its tensors."""
        flag = torch.full((1,), failed, dtype=torch.uint8, device=self._device)
        return [flag, *(x.contiguous() for x in tensors_in(output))]

    def _without_values(self, like: Any) -> Any:
        return tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=self._device), like)

    def _exchange_halves(self, own: Sequence[Tensor]) -> tuple[list[Tensor], LaneFuture[None]]:
        """Starts to send a result for the other part's; where that comes."""
        others = [torch.empty_like(x) for x in own]
        self._begin(own)
        return others, self._lane.submit(self._pass, "exchange halves", own, others)

    def _pass(self, name: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """A job of the lane: one call on both sides, and both make theirs in the same order."""
        CALL.set(AT)  # what this rank comes to meanwhile need not be what the other part does
        with self._trace.span(name, "guidance"):
            self._group.collective([(x, self._peer) for x in sent], [(x, self._peer) for x in received]).wait()

    def _begin(self, sent: Sequence[Tensor]) -> None:
        """This rank comes to a message between the two, and has this to send."""
        self._health.arrive(AT, self._among)
        for x in sent:
            self._trace.count(self._link, x.nbytes, purpose="guidance")


class Awaited(Tensor):
    """A tensor whose values are on their way: the buffer that they come into. Its shape, and views of it, are there at
    once; whatever else is asked of it waits for the values first, and is then asked of a plain tensor."""

    _wait: Callable[[], object]

    @classmethod
    def over(cls, buffer: Tensor, wait: Callable[[], object]) -> Awaited:
        """wait: returns when the values are in the buffer; called whenever somebody asks for them."""
        awaited = buffer.as_subclass(cls)
        awaited._wait = wait
        return awaited

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in WITHOUT_VALUES or (func in VIEWS and _is_view(func, args)):
            wait = args[0]._wait
            found = super().__torch_function__(func, types, args, kwargs or {})
            return tree_map_only(Tensor, lambda x: cls.over(x, wait), found)

        def here(x: Awaited) -> Tensor:
            x._wait()
            return x.as_subclass(Tensor)

        args, kwargs = tree_map_only(Awaited, here, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def functions_named(*names: str) -> set[Any]:
    """Return the methods of tensors of these names, and the functions of torch."""
    return {getattr(of, name) for name in names for of in (Tensor, torch) if hasattr(of, name)}


PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "nbytes")
PLACES = ("is_cuda", "is_xpu", "is_cpu", "is_meta")
WITHOUT_VALUES = functions_named(
    *("size", "dim", "stride", "numel", "element_size", "is_floating_point", "is_complex", "is_contiguous", "__len__")
) | {getattr(Tensor, name).__get__ for name in (*PROPERTIES, *PLACES)}
VIEWS = functions_named(
    *("chunk", "split", "narrow", "select", "unbind", "view", "transpose", "permute", "squeeze", "unsqueeze"),
    "__getitem__",
)


def _is_view(func: Any, args: tuple[Any, ...]) -> bool:
    if func is not Tensor.__getitem__:
        return isinstance(args[0], Awaited)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(one is None or one is ... or type(one) in (int, slice) for one in index)
