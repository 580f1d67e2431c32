"""Two parts of the ranks with a guidance branch each, and their messages to each other: the model's output.

A call may fail in one part, for lack of memory for instance, and not in the other. So each result travels with a flag
that says if it exists. A part that fails, or learns that the other one did, makes up for the step's remaining messages:
each message that one part sends is received, and a caller that catches the error may go on with another image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cocodiff.comm.health import CALL
from cocodiff.comm.lane import LaneFuture
from cocodiff.comm.transport import RankContext
from cocodiff.engine.guidance import PARTS, SequenceOf, Sharing
from cocodiff.models.adapter import tensors_in
from cocodiff.topology.axes import Axes

AT = "the other guidance branch"  # name, in errors, of all messages between the two parts


class GuidanceParts:
    """This rank's part of the ranks, of two that compute a guidance branch each, and the messages to the other part.

    Messages pass between partners: ranks at the same place in the two parts. They carry the model's output.
    """

    def __init__(self, context: RankContext, sequence_of: SequenceOf) -> None:
        """Open the connections of this rank's part, and the communicator with its partner. All ranks of both parts do
        so together.

        Args:
            context: this rank among the ranks of both parts.
            sequence_of: makes the object for ranks that share one sequence.
        """
        transport, topology = context.transport, context.topology
        axes, rank = Axes.build(topology, guidance=PARTS), transport.rank
        ranks = axes.branch(rank)
        self.number = axes.coordinates(rank).guidance
        own = replace(context, transport=transport.part(ranks), topology=topology.part(ranks))
        self.sequence = sequence_of(own)
        pair = axes.partners(rank)
        self._group = transport.group(sorted(pair))
        self._peer = self._group.ranks.index(pair[1 - self.number])
        self._lane, self._health = transport.lane("guidance"), transport.health
        self._among = tuple(transport.run_ranks[member] for member in sorted(pair))
        self._trace, self._link = context.trace, topology.link_class(rank, pair[1 - self.number])
        self._device = transport.device
        self._sent: list[LaneFuture[None]] = []
        self._awaited: list[Callable[[], None]] = []  # functions that receive the messages, failed or not
        self._unposted: list[Callable[[], object]] = []  # functions that post those receives which are not posted yet
        self._next = self._calls = 0  # of the current step: branch of the next message, expected number of messages

    def begin_step(self, calls: int) -> None:
        """Begin a denoising step: wait for all messages of the last one.

        Args:
            calls: expected number of calls of the model in the step, the same in both parts.
        """
        self.drain()
        self._next, self._calls = 0, calls

    def keeps(self, branch: int) -> bool:
        """Return True if this part computes guidance branch `branch` (from 0) when each call of the model is made by
        one of the parts."""
        return branch % PARTS == self.number

    def own_rows(self, arguments: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return a call's arguments with this part's half of the batch: of every tensor whose first dimension has
        `rows` rows.

        Args:
            arguments: the call's arguments, by name.
            rows: rows of the batch.
        """
        half = rows // PARTS

        def cut(x: Tensor) -> Tensor:
            return x.narrow(0, self.number * half, half) if x.ndim and len(x) == rows else x

        return {name: tree_map_only(Tensor, cut, value) for name, value in arguments.items()}

    def all_rows(self, output: Any) -> Any:
        """Exchange results with the partner, and return them put together: the rows of both parts, in order.

        Raise RuntimeError if the other part failed to compute its half.

        Args:
            output: what the model returned for this part's half of the batch.
        """
        own = self._message(output)
        others, exchanged = self._exchange_halves(own)
        exchanged.wait()
        self._check(others[0])
        pairs = iter([*zip(own, others, strict=True)][1:])
        return tree_map_only(
            Tensor, lambda _: torch.cat(next(pairs) if self.number == 0 else next(pairs)[::-1]), output
        )

    def send(self, output: Any, failed: bool = False) -> Any:
        """Start sending a copy of a call's result to the partner. Return the result itself, which may be changed at
        once.

        Args:
            output: what the model returned.
            failed: True to tell the partner that there is no result; `output` then has only its shapes.
        """
        self._next += 1
        self._post_receives()
        copies = self._message(tree_map_only(Tensor, torch.clone, output), failed)
        self._begin(copies)
        self._sent.append(self._lane.submit(self._pass, "send the output", copies, []))
        return output

    def awaited(self, like: Any) -> Any:
        """Return the result of a call of the model that the other part of the ranks computes, without waiting for it.

        Its tensors wait for their values when they are read. Reading raises RuntimeError if the other part failed.

        Args:
            like: a result of the same shapes and dtypes.
        """
        self._next += 1
        result = self._without_values(like)
        buffers = self._message(result)
        # Posted after this part's own calls: a receive may block the thread that posts their messages.
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
            self._check(buffers[0], like)  # raises at every read

        self._awaited.append(receive)
        return tree_map_only(Tensor, lambda x: Awaited.over(x, wait), result)

    def fail(self, sharing: Sharing, like: Any) -> None:
        """Tell the other part that this one could not compute a call of the current step.

        Args:
            sharing: how the call was divided between the parts.
            like: a result with the shapes that the model returns for such calls. None if they are not known yet: then
                nothing is sent.
        """
        if like is None:
            return
        if sharing is Sharing.ROWS:
            nothing = self._message(self._without_values(like), failed=True)
            self._sent.append(self._exchange_halves(nothing)[1])
        else:
            self._calls = max(self._calls, self._next + 1)  # with the call that failed
            self._make_up(like)

    def drain(self) -> None:
        """Wait for all messages between the parts, also for results that were never read."""
        for receive in self._awaited:
            receive()
        for sent in self._sent:
            sent.wait()
        self._awaited, self._sent = [], []

    def _post_receives(self) -> None:
        """Post the receives that have been put off, in the order in which the other part sends."""
        for post in self._unposted:
            post()
        self._unposted = []

    def _make_up(self, like: Any) -> None:
        """Exchange the remaining messages of the step after a failure: send failures, and receive what the other part
        sends.

        Args:
            like: a result with the shapes that the model returns.
        """
        while self._next < self._calls:
            if self.keeps(self._next):
                self.send(self._without_values(like), failed=True)
            else:
                self.awaited(like)

    def _check(self, failed: Tensor, like: Any = None) -> None:
        """Raise RuntimeError if the other part reports a failure.

        Args:
            failed: the received flag: one element, not 0 after a failure.
            like: a result with the shapes of the step's remaining calls, whose messages are then exchanged; None if
                there are none.
        """
        if not failed.item():
            return
        if like is not None:
            self._make_up(like)
        error = "the ranks that compute the other guidance branch could not: their error says why"
        raise self._health.blame(RuntimeError(error))

    def _message(self, output: Any, failed: bool = False) -> list[Tensor]:
        """Return the tensors of the message that carries a result: first a flag that says if it failed, then the
        result's own tensors."""
        flag = torch.full((1,), failed, dtype=torch.uint8, device=self._device)
        return [flag, *(x.contiguous() for x in tensors_in(output))]

    def _without_values(self, like: Any) -> Any:
        """Return a result with new, uninitialised tensors of the same shapes and dtypes on this rank's device."""
        return tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=self._device), like)

    def _exchange_halves(self, own: Sequence[Tensor]) -> tuple[list[Tensor], LaneFuture[None]]:
        """Start exchanging results with the partner. Return the tensors that its message arrives in, and the future of
        their arrival.

        Args:
            own: the tensors of this rank's message.
        """
        others = [torch.empty_like(x) for x in own]
        self._begin(own)
        return others, self._lane.submit(self._pass, "exchange halves", own, others)

    def _pass(self, name: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send and receive the tensors of one message with the partner. A background thread runs it, in the same order
        in both parts.

        Args:
            name: name of the message in the trace.
            sent: the tensors to send.
            received: the tensors to fill.
        """
        CALL.set(AT)  # the main thread may be in another call than the other part's
        with self._trace.span(name, "guidance"):
            self._group.collective([(x, self._peer) for x in sent], [(x, self._peer) for x in received]).wait()

    def _begin(self, sent: Sequence[Tensor]) -> None:
        """Tell the watch over lost ranks that this rank begins a message with its partner, and count the bytes that it
        sends.

        Args:
            sent: the tensors that it sends; empty if it only receives.
        """
        self._health.arrive(AT, self._among)
        for x in sent:
            self._trace.count(self._link, x.nbytes, purpose="guidance")


class Awaited(Tensor):
    """A tensor whose values are still to be received: a view of the memory that they arrive in.

    Its shape and views of it are available at once. Any other function waits for the values first, and then runs on
    ordinary tensors.
    """

    _wait: Callable[[], object]  # returns once the buffer has its values

    @classmethod
    def over(cls, buffer: Tensor, wait: Callable[[], object]) -> Awaited:
        """Return a tensor as one whose values are still to be received. They share memory.

        Args:
            buffer: the memory that the values arrive in.
            wait: called at every read; returns once the values have arrived.
        """
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
    """Return the functions of torch that have these names: methods of tensors, and functions of the module `torch`."""
    return {getattr(of, name) for name in names for of in (Tensor, torch) if hasattr(of, name)}


PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "nbytes")
PLACES = ("is_cuda", "is_xpu", "is_cpu", "is_meta")
# The functions and properties of tensors that need no values.
WITHOUT_VALUES = functions_named(
    *("size", "dim", "stride", "numel", "element_size", "is_floating_point", "is_complex", "is_contiguous", "__len__")
) | {getattr(Tensor, name).__get__ for name in (*PROPERTIES, *PLACES)}
# The functions that return views of a tensor.
VIEWS = functions_named(
    *("chunk", "split", "narrow", "select", "unbind", "view", "transpose", "permute", "squeeze", "unsqueeze"),
    "__getitem__",
)


def _is_view(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if a call of one of the functions in VIEWS only makes a view of an awaited tensor, and so needs no
    values yet.

    Indexing makes one with integers, slices, None and `...`, but not with tensors or lists.

    Args:
        func: the function that is called.
        args: its arguments.
    """
    if func is not Tensor.__getitem__:
        return isinstance(args[0], Awaited)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(one is None or one is ... or type(one) in (int, slice) for one in index)
