"""Weights that ranks share: each tile of a card (or of a node) keeps a part of a block's, and has them whole while the
block computes. What is missing comes over the tiles' own links while the block before computes.

Of a block the bytes of all parameters lie one behind the other and are cut into as many parts as there are ranks. Two
buffers of the largest block take turns: in one a block computes, into the other the next one's parts arrive. Both stay
where they are for as long as the engine is entered, and every rank posts the same messages in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cocodiff.comm.health import CALL
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Group, LaneFuture, Part, Transport
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.config.machine import Topology
from cocodiff.engine.agreement import check_agreement, facts_of
from cocodiff.engine.guidance.parts import WITHOUT_VALUES, functions_named
from cocodiff.models.checks import called_often, replace_forward
from cocodiff.topology.axes import Axes

AT = "the exchange of shared weights"  # the name of every call that the ranks make for them
ALIGNED = 64  # bytes: where each parameter begins, as kernels like it
GIVING_BACK_S = 10.0  # how long a rank that leaves with an error waits for another one's part of a block
PAUSE_S = 0.05  # between two looks at a wait that an error ends
SET_DATA = vars(Tensor.__base__)["data"].__set__
OF_PARAMETERS = WITHOUT_VALUES | functions_named("requires_grad_", "_has_compatible_shallow_copy_type")
Place = tuple[int, int, torch.device]  # of ranks that share a block: how many, which is this one, where it computes


class AbsentParameter(nn.Parameter):
    """A parameter of which this rank keeps a part. It tells its shape, dtype and device; whatever else is done with it,
    or with what it holds, calls its `fetch` first, which makes it a plain one again or raises UserError."""

    fetch: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_PARAMETERS or (func == SET_DATA and args[0] is args[1]):
                return func(*args, **kwargs)
            if func is Tensor.to:  # to where it is, as it is
                same = args[0].new_empty(0)
                if func(same, *args[1:], **kwargs) is same:
                    return args[0]
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, AbsentParameter):
                one.fetch()
        return func(*args, **kwargs)


class SplitBlock:
    """A block's parameters, of which this rank keeps a part."""

    own: Tensor  # the bytes of this rank's part, once the block was split
    part: int  # the number of them, the same on every rank
    whole: bool  # True while all parameters are here

    def __init__(
        self, name: str, module: nn.Module, parameters: Sequence[nn.Parameter], place: Place, fetch: Callable[..., None]
    ) -> None:
        """Leave the parameters whole. fetch: makes this block whole again."""
        self.name, self.module, self.parameters, self.whole = name, module, parameters, True
        self._place, self._fetch, self._facts = place, fetch, ""
        self._kinds = [type(parameter) for parameter in parameters]

    @property
    def facts(self) -> str:
        """Forms and bits of the parameters, see `facts_of`; of absent ones those that they had."""
        return facts_of(("", parameter) for parameter in self.parameters) if self.whole else self._facts

    def check(self) -> None:
        """Raise UserError for parameters that cannot be split."""
        for parameter in self.parameters if self.whole else ():
            if type(parameter.data) is not Tensor or not parameter.is_contiguous():
                kind = type(parameter.data).__name__
                raise UserError(f"weights of {self.name}: a {kind} cannot be split: choose weights whole")

    def split(self) -> None:
        """Keep this rank's part of the parameters as they are now. They lose their memory: until `fill` the block
        cannot compute."""
        ranks, index, device = self._place
        self._facts = self.facts
        self._cells: list[tuple[int, int, torch.dtype, torch.Size]] = []
        end = 0
        for parameter in self.parameters:
            self._cells.append((end, parameter.nbytes, parameter.dtype, parameter.shape))
            end += -(-parameter.nbytes // ALIGNED) * ALIGNED
        self.part = -(-end // (ranks * ALIGNED)) * ALIGNED
        self.own = torch.zeros(self.part, dtype=torch.uint8, device=device)
        first = index * self.part
        for (start, size, *_), parameter in zip(self._cells, self.parameters, strict=True):
            begin, end = max(start, first), min(start + size, first + self.part)
            if begin < end:  # of a file that is mapped no more is read
                of_parameter = parameter.data.view(-1).view(torch.uint8)
                self.own[begin - first : end - first].copy_(of_parameter[begin - start : end - start])
        self._nothing = [self.own.new_empty(1, dtype=dtype).expand(shape) for *_, dtype, shape in self._cells]
        self.clear()

    def tensors_in(self, buffer: Tensor) -> list[Tensor]:
        """Return the parameters as they lie in a buffer of bytes."""
        return [buffer[start : start + size].view(dtype).view(shape) for start, size, dtype, shape in self._cells]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Give the parameters these values, and the class that they had."""
        for parameter, kind, tensor in zip(self.parameters, self._kinds, tensors, strict=True):
            parameter.__class__ = kind
            vars(parameter).pop("fetch", None)
            parameter.data = tensor

    def clear(self) -> None:
        """Make the parameters absent ones."""
        self.fill(self._nothing)
        self.whole = False
        for parameter in self.parameters:
            vars(parameter)["fetch"] = partial(self._fetch, self)
            parameter.__class__ = AbsentParameter


class SplitWeights:
    """A model's blocks, some of them split among the ranks of this one's card or node, in the order in which the model
    calls them."""

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        transport: Transport,
        among: str,
        layers: int | None,
        for_good: bool = False,
    ) -> None:
        """among: "card" or "node". layers: blocks that are split, evenly spread; None for all. for_good: they stay so
        when an engine is left. All ranks call it."""
        self._name, self._lost = type(model).__name__, ""  # lost: why parameters did not come back, in words
        self._ranks = sharing(topology, among, transport.rank)
        self._sharing = Part(transport, self._ranks)
        self._topology, self._transport, self._trace = topology, transport, Trace(transport.rank)
        self._group: Group = transport.group(self._ranks)
        # After an error messages may be under way in the first one that nobody sends or receives.
        self._last_group = None if for_good else transport.group(self._ranks)
        self._index = self._ranks.index(transport.rank)
        self._under_way: dict[int, tuple[int, LaneFuture[None]]] = {}  # to each buffer: which block, and its arrival
        blocks, seen = called_often(model)[1:], set[int]()
        place = len(self._ranks), self._index, transport.device
        self.compared: list[SplitBlock] = []  # also where this rank shares them with nobody
        for name, module in [blocks[number] for number in split_blocks(len(blocks), layers)]:
            own = [x for x in dict.fromkeys(module.parameters()) if id(x) not in seen and x.numel()]
            seen |= set(map(id, own))
            self.compared.append(SplitBlock(name, module, own, place, self._fetch))
        self._blocks = self.compared if len(self._ranks) > 1 else []
        self._split()

    @torch.inference_mode(False)  # what is made here serves calls in that mode and out of it
    def _split(self) -> None:
        """Split the blocks that are whole: all, or those that somebody has read or changed. All ranks call it."""
        self._under_way.clear()
        for block in self._blocks:
            block.check()
        for block in [block for block in self._blocks if block.whole]:
            block.split()
        most = max((block.part for block in self._blocks), default=0) * len(self._ranks)
        self._buffers = [torch.empty(most, dtype=torch.uint8, device=self._transport.device) for _ in range(2)]
        self._tensors = [[block.tensors_in(buffer) for buffer in self._buffers] for block in self._blocks]
        self._all_are_split = True

    def attach(self, trace: Trace) -> Callable[[], object]:
        """Have every block's weights there while it computes. Return what takes that off; the weights stay split."""
        self._trace = trace
        undo = ExitStack()
        for number, block in enumerate(self._blocks):
            undo.callback(replace_forward(block.module, partial(self._compute, number)))
        return undo.close

    def end(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """Make weights that are not split for good whole again. All ranks call it, also those that leave with an error.
        Should a rank not send its part, a note of the error says so, as does every later use of the parameters.
        """
        for _, arriving in self._under_way.values() if error is None else ():  # after an error it may never come
            arriving.wait()
        self._under_way.clear()
        if self._last_group is None:
            return
        self._lost = f"the weights of this {self._name} were not all given back: load the model again"
        try:
            for block in self._blocks:
                self._make_whole(block, self._last_group, "given back")
        except (PeerLost, UserError) as lost:
            self._lost = f"{lost}; {self._lost} (ranks {', '.join(map(str, self._sharing.run_ranks))} shared them)"
            (error or lost).add_note(self._lost)
            if error is None:
                raise

    def _fetch(self, block: SplitBlock) -> None:
        """Make a block whole until the model's next call, since somebody reads or changes it. All ranks call it. Raises
        UserError where they do so for different blocks, and where a part was lost."""
        if self._lost:
            raise UserError(self._lost)
        check_agreement({"use of the shared weights": block.name}, self._sharing, AT)
        self._make_whole(block, self._group, "weights")
        self._all_are_split = False

    def _make_whole(self, block: SplitBlock, group: Group, lane: str) -> None:
        """Give a block's parameters memory of their own, where some ranks have not done so."""
        with torch.inference_mode(False):
            buffer = block.own.new_empty(len(self._ranks) * block.part)
            tensors = block.tensors_in(buffer)
        self._wait(group, self._transport.lane(lane).submit(partial(self._gather, group), block.own, buffer).wait)
        if not block.whole:
            block.fill(tensors)
            block.whole = True

    def _wait(self, group: Group, wait: Callable[[], None]) -> None:
        """Wait for what is sent in a group. In the last one a rank that has failed sends its part all the same, for
        which it has GIVING_BACK_S."""
        deadline = inf if group is self._last_group else 0.0
        while True:
            try:
                return wait()
            except (PeerLost, UserError):
                deadline = min(deadline, time.monotonic() + GIVING_BACK_S)
                if time.monotonic() >= deadline:
                    raise
                time.sleep(PAUSE_S)

    def _compute(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._all_are_split:
            self._split()
        buffer = self._here(number)
        self._start((number + 1) % len(self._blocks), 1 - buffer)
        self._blocks[number].fill(self._tensors[number][buffer])
        try:
            return forward(*args, **kwargs)
        finally:
            self._blocks[number].clear()

    def _here(self, number: int) -> int:
        """Wait for a block's weights, and return the buffer that has them. Where a model leaves blocks out, another one
        than expected comes: what is under way for that one stays, as long as its buffer is not needed."""
        buffer = next((buffer for buffer, (block, _) in self._under_way.items() if block == number), None)
        if buffer is None:
            buffer = 1 - next(iter(self._under_way), 1)
            self._start(number, buffer)
        with self._trace.span("wait for weights"):
            self._under_way.pop(buffer)[1].wait()
        return buffer

    def _start(self, number: int, buffer: int) -> None:
        """Have a block's weights brought to a buffer, unless they are on their way there. The lane keeps the order, so
        what is on its way there for another block comes before."""
        if self._under_way.get(buffer, (None,))[0] == number:
            return
        block = self._blocks[number]
        whole = self._buffers[buffer][: len(self._ranks) * block.part]
        arriving = self._transport.lane("weights").submit(partial(self._gather, self._group), block.own, whole)
        self._under_way[buffer] = number, arriving

    def _gather(self, group: Group, own: Tensor, whole: Tensor) -> None:
        """Bring every rank's part to every rank."""
        CALL.set(AT)  # ranks that end with an error have come to different calls
        parts = whole.view(len(self._ranks), len(own))
        parts[self._index].copy_(own)
        others = [number for number in range(len(self._ranks)) if number != self._index]
        with self._trace.span("gather weights", "weights", late_bytes=len(others) * own.nbytes):
            pending = group.collective([(own, peer) for peer in others], [(parts[peer], peer) for peer in others])
            self._wait(group, pending.wait)
        for peer in others:
            link = self._topology.link_class(self._transport.rank, self._ranks[peer])
            self._trace.count(link, own.nbytes, purpose="weights")


_FOR_GOOD: WeakKeyDictionary[nn.Module, SplitWeights] = WeakKeyDictionary()


def split_for_good(
    models: Sequence[nn.Module], topology: Topology, transport: Transport, split: tuple[str, int | None], parts: int
) -> None:
    """Splits models' weights before they are on the device, of which no rank needs room for all then. They stay so for
    every engine on these ranks. parts: see `part_of`."""
    for model in models:
        _FOR_GOOD[model] = SplitWeights(model, *part_of(topology, transport, parts), *split, for_good=True)


def split_weights(
    model: nn.Module, topology: Topology, transport: Transport, split: tuple[str, int | None], parts: int
) -> SplitWeights:
    """A model's weights, which are split now unless they are so for good. All ranks call it. parts: see `part_of`."""
    return _FOR_GOOD.get(model) or SplitWeights(model, *part_of(topology, transport, parts), *split)


def part_of(topology: Topology, transport: Transport, parts: int) -> tuple[Topology, Transport]:
    """The ranks among which this one shares blocks, where so many parts of the ranks compute a guidance branch each:
    those of its part. Ranks of the others call the model at other times, and not as often."""
    if parts == 1:
        return topology, transport
    ranks = Axes.build(topology, guidance=parts).branch(transport.rank)
    return topology.part(ranks), Part(transport, ranks)


def split_blocks(count: int, layers: int | None) -> list[int]:
    """Which of so many blocks have split weights: evenly spread, so that each has some others' time to arrive in, and
    the first one, which a step cache computes alone, only where all have."""
    if layers is None or layers >= count:
        return list(range(count))
    return [1 + (2 * number + 1) * (count - 1) // (2 * layers) for number in range(layers)]


def sharing(topology: Topology, among: str, rank: int) -> list[int]:
    """The ranks that share this one's blocks: of its card, or its node."""
    place = topology.places[rank]
    return [one.rank for one in topology.places if getattr(one, among) == getattr(place, among)]
