"""Classifier-free guidance on two parts of the ranks, each of which computes one branch: no attention byte passes
between them, the model's output does, once a step.

Pipelines ask for the branches in one of two ways. *Batched* (SD3): one call with both in its batch; each part takes its
half of the rows, and the halves of the output are exchanged. *Sequential* (Qwen-Image, FLUX, FLUX.2 klein): a call for
each; the parts take them in turns. A call that is the other part's returns at once, with a tensor that waits for its
values when these are asked for (`Awaited`), so that nothing depends on what a pipeline does between the calls.

The first step of sequential guidance is computed by each part on its own ranks. In the engine's first image both parts
compute all of its calls: they tell how many calls a step has and what the model returns. Later steps go by the step
before: where the second call no longer comes, or has just begun to come, all ranks compute the calls together until the
next step shows another number. The images before it decide who computes an image's first step, but not its bits.

A call may fail in one part, for want of memory say, and not in the other. So each result travels with a flag that says
whether there is one, and a part that fails, or hears that the other one did, makes up the messages that are left of
the step: what one part sends the other receives, and a caller who catches the error may go on with another image.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from cocodiff.comm.part import Part
from cocodiff.comm.transport import LanePending, Transport
from cocodiff.errors import UserError
from cocodiff.progress import StepCounter
from cocodiff.sequence import SequenceRanks
from cocodiff.topology.axes import Axes, Mesh
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace

PARTS = 2
Form = tuple[Any, ...]  # what tells calls apart whose results look different


class Way(Enum):
    """Who computes a call of the model."""

    TOGETHER = "all ranks, as one sequence"
    ALIKE = "both parts, each as if it were alone"
    ROWS = "each part its half of the batch"
    CALLS = "one of the parts, for both"


@dataclass
class Call:
    """A call of the model. own: whether this rank's part keeps the branch; where CALLS goes, whether it computes it."""

    way: Way = Way.TOGETHER
    own: bool = True
    form: Form = ()


class Guidance:
    """Decides who computes which call, by what all ranks know alike. outputs: by the form of a call, what the model
    returned, without values."""

    def __init__(self, setting: int | str, ranks: int, batched: bool, branches: int) -> None:
        """setting: `guidance_parallel`. ranks: that share an image. batched, branches: of the model's family: whether
        both branches are in one call, else its usual calls in a step.

        Raises UserError for two parts of an odd number of ranks."""
        if setting == PARTS and ranks % PARTS:
            raise UserError(
                f"guidance_parallel {PARTS}: {ranks} rank(s) cannot be cut into {PARTS} equal parts: start an even "
                f"number of ranks, or choose guidance_parallel 1"
            )
        self.pinned = setting == PARTS
        self._fits = setting != 1 and ranks % PARTS == 0
        self._warned = False
        self.begin()
        self.outputs: dict[Form, Any] = {}
        self._batched, self._usual = batched, branches > 1
        self._first = 1  # calls in the first step of the last run that had a second one
        self.expected = 1  # calls of the current step, as far as can be known

    def begin(self) -> None:
        """The engine is entered, perhaps with another model than before."""
        self.possible = self._fits
        self._at, self._calls = (-1, -1), 0  # run and step of the last call, and that step's calls so far

    def stay_together(self, reason: str) -> None:
        """All ranks compute all calls from now on. Raises UserError where the settings ask for two parts."""
        if self.pinned:
            raise UserError(
                f"guidance_parallel {PARTS} and {reason} do not go together, since a part makes some of the calls: "
                f"choose guidance_parallel 1, or remove it"
            )
        self.possible = False

    def warn_together(self, step: int) -> None:
        """All ranks compute a call together: says so once where the settings ask for two parts."""
        if self.pinned and not self._warned:
            self._warned = True
            warnings.warn(
                f"guidance_parallel {PARTS}: step {step} has one guidance branch, so all ranks compute it together; "
                f"choose auto or 1 for runs without guidance",
                stacklevel=2,
            )

    def way(self, counter: StepCounter, rows: int, form: Form, guided: bool | None) -> Way:
        """Of the current call. rows: of its batch. guided: whether the pipeline says that it guides; None where it does
        not say."""
        if not self.possible:
            return Way.TOGETHER
        if self._batched:
            split = rows % PARTS == 0 and (self.pinned if guided is None else guided)
            return Way.ROWS if split else Way.TOGETHER
        self._count(counter)
        # Nothing of an earlier image decides whether a first step is split: the bits would depend on that image.
        apart = self.expected > 1 if counter.step else self.pinned or self._usual or bool(guided)
        if guided is False or not apart:
            return Way.TOGETHER
        # Both parts computing a call, and one of them for both, give the same bits.
        return Way.CALLS if self.expected > 1 and form in self.outputs else Way.ALIKE

    def _count(self, counter: StepCounter) -> None:
        """Notes the call; at the first one of a step, how many this step will have."""
        at = counter.run, counter.step
        if at != self._at:
            if at == (self._at[0], 1):  # a first step that failed or was interrupted tells nothing
                self._first = self._calls
            self.expected = self._calls if counter.step else self._first
            self._at, self._calls = at, 0
        self._calls += 1

    def note(self, call: Call, output: Any) -> None:
        """Keeps what a call returned, without its values; of a call in one batch this part's rows. Every rank that
        computed it notes it."""
        if self.possible and call.form not in self.outputs and (call.way is Way.ROWS or not self._batched):
            self.outputs[call.form] = mapped(output, lambda x: torch.empty_like(x, device="meta"))


def parts_fit(topology: Topology, mesh_on: Callable[[Topology], Mesh]) -> bool:
    """Whether ranks can be cut into parts of which each has a mesh. mesh_on: of some ranks; it raises UserError where
    they cannot have one."""
    try:
        for ranks in Axes.build(topology, guidance=PARTS).branches[0]:
            mesh_on(topology.part(ranks))
    except UserError:
        return False
    return True


class Parts:
    """This rank's part of the ranks, and the rank of the other part that has the same place there."""

    def __init__(
        self,
        topology: Topology,
        transport: Transport,
        trace: Trace,
        sequence_of: Callable[[Topology, Transport], SequenceRanks],
    ) -> None:
        """topology, transport: of both parts. Every rank of them makes one. sequence_of: makes a part's ranks into
        those of a sequence."""
        axes, rank = Axes.build(topology, guidance=PARTS), transport.rank
        ranks = axes.branch(rank)
        self.number = axes.coordinates(rank).guidance
        self.sequence = sequence_of(topology.part(ranks), Part(transport, ranks))
        pair = axes.along("guidance", rank)
        self._group = transport.group(sorted(pair))
        self._peer = self._group.ranks.index(pair[1 - self.number])
        self._lane, self._health = transport.lane("guidance"), transport.health
        self._among = tuple(transport.run_ranks[member] for member in sorted(pair))
        self._trace, self._link = trace, topology.link_class(rank, pair[1 - self.number])
        self._device = transport.device
        self._sent: list[LanePending[None]] = []
        self._awaited: list[Arrival] = []
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

        return {name: mapped(value, cut) for name, value in arguments.items()}

    def all_rows(self, output: Any) -> Any:
        """A call's result with both parts' rows, from this part's."""
        own = self._message(output)
        others = [torch.empty_like(x) for x in own]
        self._begin(own)
        self._lane.submit_inline(self._job("exchange halves"), own, others).wait()
        self._check(others[0])
        pairs = iter([(x, y) for x, y in zip(own, others, strict=True)][1:])
        return mapped(output, lambda _: torch.cat(next(pairs) if self.number == 0 else next(pairs)[::-1]))

    def send(self, output: Any, failed: bool = False) -> None:
        """Starts sending a call's result to the other part. What the caller does to it afterwards changes nothing."""
        self._next += 1
        copies = self._message(mapped(output, torch.clone), failed)
        self._begin(copies)
        self._sent.append(self._lane.submit(self._job("send the output"), copies, []))

    def awaited(self, like: Any) -> Any:
        """The result of a call that the other part computes, with tensors that wait for their values when asked. These
        raise RuntimeError where the other part has failed."""
        self._next += 1
        result = self._without_values(like)
        buffers = self._message(result)
        receive = self._lane.submit(self._job("receive the output"), [], buffers)

        def check() -> None:
            self._check(buffers[0], like)

        arrival = Arrival(receive, lambda: self._begin(()), check)
        self._awaited.append(arrival)
        return mapped(result, lambda x: Awaited.over(x, arrival))

    def fail(self, way: Way, like: Any) -> None:
        """This part could not compute a call of the current step: it sends that in place of the result. like: what the
        model returns for such calls, None where that is not known yet."""
        if like is None:
            return
        nothing = self._without_values(like)
        if way is Way.ROWS:
            own = self._message(nothing, failed=True)
            self._begin(own)
            others = [torch.empty_like(x) for x in own]
            self._sent.append(self._lane.submit(self._job("exchange halves"), own, others))
        else:
            self.send(nothing, failed=True)
            self._make_up(like)

    def drain(self) -> None:
        """Waits for all messages under way, those that nobody asked for too."""
        for arrival in self._awaited:
            arrival.receive()
        for sent in self._sent:
            sent.wait()
        self._awaited, self._sent = [], []

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
        """What travels of a result: whether there is none, and its tensors."""
        tensors = [torch.full((1,), failed, dtype=torch.uint8, device=self._device)]
        mapped(output, lambda x: tensors.append(x.contiguous()))
        return tensors

    def _without_values(self, like: Any) -> Any:
        return mapped(like, lambda x: torch.empty(x.shape, dtype=x.dtype, device=self._device))

    def _job(self, name: str) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
        """For the lane: one call on both sides, and both make theirs in the same order."""

        def pass_messages(sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
            with self._trace.span(name, "guidance"):
                self._group.send_recv([(x, self._peer) for x in sent], [(x, self._peer) for x in received]).wait()

        return pass_messages

    def _begin(self, sent: Sequence[Tensor]) -> None:
        """This rank comes to a message between the two, and has this to send."""
        self._health.arrive("the other guidance branch", self._among)
        for x in sent:
            self._trace.count(self._link, x.nbytes, purpose="guidance")


class Arrival:
    """A message on its way here. before: called when somebody first waits. check: called when the message is here and
    somebody asks for what it brings; it may raise."""

    def __init__(
        self, pending: LanePending[None], before: Callable[[], None], check: Callable[[], None] | None = None
    ) -> None:
        self._pending, self._before, self._check, self._here = pending, before, check, False

    def wait(self) -> None:
        self.receive()
        if self._check is not None:
            self._check()  # raises again where somebody asks again
            self._check = None

    def receive(self) -> None:
        """Waits for the message, whatever it brings."""
        if not self._here:
            self._before()
            self._pending.wait()
            self._here = True


class Awaited(Tensor):
    """A tensor whose values are on their way: the buffer that they come into. Its shape, and views of it, are there at
    once; whatever else is asked of it waits for the values first, and is then asked of a plain tensor."""

    _arrival: Arrival

    @classmethod
    def over(cls, buffer: Tensor, arrival: Arrival) -> Awaited:
        awaited = buffer.as_subclass(cls)
        awaited._arrival = arrival
        return awaited

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in WITHOUT_VALUES or (func in VIEWS and _is_view(func, args)):
            arrival = args[0]._arrival
            found = super().__torch_function__(func, types, args, kwargs or {})
            return mapped(found, lambda x: cls.over(x, arrival))

        def here(x: Tensor) -> Tensor:
            if not isinstance(x, Awaited):
                return x
            x._arrival.wait()
            return x.as_subclass(Tensor)

        return func(*mapped(args, here), **mapped(dict(kwargs or {}), here))


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


def _functions(*names: str) -> set[Any]:
    """The methods of these names, and the functions of torch."""
    return {getattr(of, name) for name in names for of in (Tensor, torch) if hasattr(of, name)}


WITHOUT_VALUES = frozenset(
    _getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_xpu", "is_cpu", "nbytes")
    | _functions("size", "dim", "stride", "numel", "element_size", "is_floating_point", "is_complex", "is_contiguous")
    | {Tensor.__len__}
)
VIEWS = frozenset(
    _functions("chunk", "split", "narrow", "select", "unbind", "view", "transpose", "permute", "squeeze", "unsqueeze")
    | {Tensor.__getitem__}
)


def _is_view(func: Any, args: tuple[Any, ...]) -> bool:
    if func is not Tensor.__getitem__:
        return isinstance(args[0], Awaited)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(one is None or one is ... or type(one) in (int, slice) for one in index)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A result or argument with its tensors changed, in the containers that they stand in."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: mapped(one, change) for name, one in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple | list):
        parts = [mapped(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
