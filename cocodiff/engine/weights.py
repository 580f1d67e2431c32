"""Weights that ranks share: each tile of a card (or of a node) keeps a part of a block's, and has them whole while the
block computes. What is missing comes over the tiles' own links while the block before computes.

Of a block the bytes of all parameters lie one behind the other and are cut into as many parts as there are ranks. Two
buffers of the largest block take turns: in one a block computes, into the other the next one's parts arrive. Both stay
where they are for as long as the engine is entered, and every rank posts the same messages in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Group, LaneFuture, Part, Transport
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology
from cocodiff.engine.agreement import weights_digest
from cocodiff.models.checks import called_often, replace_forward
from cocodiff.topology.axes import Axes

ALIGNED = 64  # bytes: where each parameter begins, as kernels like it


class SplitBlock:
    """A block's parameters, of which this rank keeps a part. own: its bytes."""

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], ranks: int, index: int, device: torch.device
    ) -> None:
        """device: where the block is to compute. The parameters lose their memory: until `fill` it cannot."""
        self._parameters = parameters
        self._cells: list[tuple[int, int, torch.dtype, torch.Size]] = []
        end = 0
        for parameter in parameters:
            if type(parameter.data) is not Tensor or not parameter.is_contiguous():
                kind = type(parameter.data).__name__
                raise UserError(f"weights of {name}: a {kind} cannot be split: choose weights whole")
            self._cells.append((end, parameter.nbytes, parameter.dtype, parameter.shape))
            end += -(-parameter.nbytes // ALIGNED) * ALIGNED
        self.part = -(-end // (ranks * ALIGNED)) * ALIGNED
        self.own = torch.zeros(self.part, dtype=torch.uint8, device=device)
        first = index * self.part
        for (start, size, *_), parameter in zip(self._cells, parameters, strict=True):
            begin, end = max(start, first), min(start + size, first + self.part)
            if begin < end:  # of a file that is mapped no more is read
                of_parameter = parameter.data.view(-1).view(torch.uint8)
                self.own[begin - first : end - first].copy_(of_parameter[begin - start : end - start])
        self._nothing = [self.own.new_empty(0, dtype=parameter.dtype) for parameter in parameters]
        self.clear()

    def tensors_in(self, buffer: Tensor) -> list[Tensor]:
        """The parameters as they lie in a buffer of bytes."""
        return [buffer[start : start + size].view(dtype).view(shape) for start, size, dtype, shape in self._cells]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor

    def clear(self) -> None:
        self.fill(self._nothing)


class UnderWay(NamedTuple):
    """What arrives for a block, in the buffer of this number."""

    buffer: int
    arriving: LaneFuture[None]


class SplitWeights:
    """A model's blocks, some of them split among the ranks of this one's card or node, in the order in which the model
    calls them. digest: of the model's weights, as they were."""

    @torch.inference_mode(False)  # what is made here serves calls in that mode and out of it
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
        self._for_good = for_good
        self.digest, blocks = weights_digest(model), called_often(model)[1:]
        self._ranks = sharing(topology, among, transport.rank)
        self._topology, self._transport, self._trace = topology, transport, Trace(transport.rank)
        self._group: Group = transport.group(self._ranks)
        self._index = self._ranks.index(transport.rank)
        self._under_way: dict[int, UnderWay] = {}  # by the number of the block
        chosen = [blocks[number] for number in split_blocks(len(blocks), layers)]
        self._modules, self._blocks = list[nn.Module](), list[SplitBlock]()
        seen, device = set[int](), transport.device
        for name, module in chosen if len(self._ranks) > 1 else ():
            own = [x for x in dict.fromkeys(module.parameters()) if id(x) not in seen and x.numel()]
            seen |= set(map(id, own))
            if own:
                self._modules.append(module)
                self._blocks.append(SplitBlock(name, own, len(self._ranks), self._index, device))
        most = max((block.part for block in self._blocks), default=0) * len(self._ranks)
        self._buffers = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(2)]
        self._tensors = [[block.tensors_in(buffer) for buffer in self._buffers] for block in self._blocks]

    def attach(self, trace: Trace) -> Callable[[], object]:
        """Has every block's weights there while it computes. Returns what takes that off; the weights stay split."""
        self._trace = trace
        undo = ExitStack()
        for number, module in enumerate(self._modules):
            undo.callback(replace_forward(module, partial(self._compute, number)))
        return undo.close

    def end(self) -> None:
        """Waits for what is under way. Weights that are not split for good are whole again. All ranks call it."""
        for one in self._under_way.values():
            one.arriving.wait()
        self._under_way.clear()
        for block in () if self._for_good else self._blocks:
            with torch.inference_mode(False):
                buffer = block.own.new_empty(len(self._ranks) * block.part)
                tensors = block.tensors_in(buffer)
            self._transport.lane("weights").submit(self._gather, block.own, buffer).wait()
            block.fill(tensors)

    def _compute(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        buffer, following = self._here(number), (number + 1) % len(self._blocks)
        if following not in self._under_way:
            self._start(following, 1 - buffer)
        self._blocks[number].fill(self._tensors[number][buffer])
        try:
            return forward(*args, **kwargs)
        finally:
            self._blocks[number].clear()

    def _here(self, number: int) -> int:
        """The buffer with a block's weights. Where a model leaves blocks out, another one than expected comes: what is
        under way for that one stays, as long as its buffer is not needed."""
        if number not in self._under_way:
            self._start(number, 1 - next((one.buffer for one in self._under_way.values()), 1))
        buffer, arriving = self._under_way.pop(number)
        with self._trace.span("wait for weights"):
            arriving.wait()
        return buffer

    def _start(self, number: int, buffer: int) -> None:
        for other, one in list(self._under_way.items()):
            if one.buffer == buffer:
                one.arriving.wait()
                del self._under_way[other]
        block = self._blocks[number]
        whole = self._buffers[buffer][: len(self._ranks) * block.part]
        arriving = self._transport.lane("weights").submit(self._gather, block.own, whole)
        self._under_way[number] = UnderWay(buffer, arriving)

    def _gather(self, own: Tensor, whole: Tensor) -> None:
        """Every rank's part on every rank."""
        parts = whole.view(len(self._ranks), -1)
        parts[self._index].copy_(own)
        others = [number for number in range(len(self._ranks)) if number != self._index]
        with self._trace.span("gather weights", "weights", late_bytes=len(others) * own.nbytes):
            self._group.send_recv([(own, peer) for peer in others], [(parts[peer], peer) for peer in others]).wait()
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
