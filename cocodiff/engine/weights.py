"""Weights that ranks share: each tile of a card (or node) keeps a part of a block's weights. They are whole on a tile
only while the block computes; the other parts arrive over the tiles' own links while the block before computes.

The bytes of all parameters of a block are laid out one after the other and cut into as many parts as there are ranks.
Two buffers, each the size of the largest block, take turns: a block computes in one while the next one's parts arrive
in the other. Both stay allocated as long as the engine is entered, and every rank posts the same messages in the same
order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cocodiff.comm.health import CALL
from cocodiff.comm.lane import LaneFuture
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Group, Transport
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.engine.agreement import check_agreement, facts_of
from cocodiff.engine.guidance.parts import WITHOUT_VALUES, functions_named
from cocodiff.models.checks import called_often, replace_forward
from cocodiff.topology import Topology
from cocodiff.topology.axes import Axes

AT = "the exchange of shared weights"  # name, in errors, of all calls that ranks make for shared weights
ALIGNED = 64  # bytes to a multiple of which each parameter's start is aligned
GIVING_BACK_S = 10.0  # seconds that a rank which leaves with an error waits for another rank's part of a block
PAUSE_S = 0.05  # seconds between two attempts of a wait that an error ends
SET_DATA = vars(Tensor.__base__)["data"].__set__
OF_PARAMETERS = WITHOUT_VALUES | functions_named("requires_grad_", "_has_compatible_shallow_copy_type")
Split = tuple[str, int | None]  # "card" or "node", whose ranks share a block; number of such blocks (None: all)
Place = tuple[int, int, torch.device]  # number of ranks that share a block, index of this one, its device


class AbsentParameter(nn.Parameter):
    """A parameter of which this rank keeps only a part of the bytes, while its block does not compute.

    Its shape, dtype and device can be read at once. Any other use of it, or of a tensor that shares its memory, first
    calls `fetch`. That makes it an ordinary parameter with values again, or raises UserError.
    """

    fetch: Callable[[], None]  # gathers the parameters of its block from the ranks that share it

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_PARAMETERS or (func == SET_DATA and args[0] is args[1]):
                return func(*args, **kwargs)
            if func is Tensor.to:  # to its own device and dtype
                same = args[0].new_empty(0)
                if func(same, *args[1:], **kwargs) is same:
                    return args[0]
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, AbsentParameter):
                one.fetch()
        return func(*args, **kwargs)


class SplitBlock:
    """A block of a model whose parameters are split among ranks: this rank keeps a part of their bytes."""

    own: Tensor  # the bytes of this rank's part, once the block was split
    part: int  # number of bytes of a rank's part, the same on every rank
    whole: bool  # True if the parameters have memory of their own, before splitting and after they were given back

    def __init__(
        self, name: str, module: nn.Module, parameters: Sequence[nn.Parameter], place: Place, fetch: Callable[..., None]
    ) -> None:
        """Take the parameters over, without changing them yet.

        Args:
            name: name of the block's module.
            module: the block.
            parameters: those of its parameters that no other block has taken.
            place: number of ranks that share the block, index of this one, and its device.
            fetch: called with this block when an absent parameter is used; gives the parameters their values.
        """
        self.name, self.module, self.parameters, self.whole = name, module, parameters, True
        self._place, self._fetch, self._facts = place, fetch, ""
        self._kinds = [type(parameter) for parameter in parameters]

    @property
    def facts(self) -> str:
        """The text by which ranks check that they have the same weights: dtypes, shapes and digests of the parameters,
        see `facts_of`.

        While the block is split its parameters have no values. Then this is the text made just before splitting.
        """
        return facts_of(("", parameter) for parameter in self.parameters) if self.whole else self._facts

    def check(self) -> None:
        """Raise UserError if a parameter cannot be split: it is not contiguous, or of a tensor class of its own, as
        quantised ones are."""
        for parameter in self.parameters if self.whole else ():
            if type(parameter.data) is not Tensor or not parameter.is_contiguous():
                kind = type(parameter.data).__name__
                raise UserError(f"weights of {self.name}: a {kind} cannot be split: choose weights whole")

    def split(self) -> None:
        """Copy this rank's part of the parameters' bytes, and free the parameters' memory.

        The block can compute again once `fill` has given the parameters tensors with all bytes.
        """
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
            if begin < end:  # no other bytes of a memory-mapped file are read
                of_parameter = parameter.data.view(-1).view(torch.uint8)
                self.own[begin - first : end - first].copy_(of_parameter[begin - start : end - start])
        self._nothing = [self.own.new_empty(1, dtype=dtype).expand(shape) for *_, dtype, shape in self._cells]
        self.clear()

    def tensors_in(self, buffer: Tensor) -> list[Tensor]:
        """Return views of a buffer with the bytes of all ranks' parts, one for each parameter, of its dtype and
        shape."""
        return [buffer[start : start + size].view(dtype).view(shape) for start, size, dtype, shape in self._cells]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Give each parameter a tensor as its value, and the class that it had before `clear` made it an
        AbsentParameter.

        Args:
            tensors: a tensor of the parameter's dtype and shape for each.
        """
        for parameter, kind, tensor in zip(self.parameters, self._kinds, tensors, strict=True):
            parameter.__class__ = kind
            vars(parameter).pop("fetch", None)
            parameter.data = tensor

    def clear(self) -> None:
        """Make the parameters absent: without values, to be fetched at their next use."""
        self.fill(self._nothing)
        self.whole = False
        for parameter in self.parameters:
            vars(parameter)["fetch"] = partial(self._fetch, self)
            parameter.__class__ = AbsentParameter


class SplitWeights:
    """The weights of a model's blocks, of which some are split among the ranks of this rank's card or node."""

    def __init__(
        self, model: nn.Module, topology: Topology, transport: Transport, split: Split, for_good: bool = False
    ) -> None:
        """Split the blocks. All ranks call it.

        Args:
            model: the transformer.
            topology: the ranks among which this one may share blocks.
            transport: their connections.
            split: "card" or "node", whose ranks share a block; and the number of blocks that are split, evenly spread
                (None: all).
            for_good: True to keep them split when an engine is left.
        """
        self._name, self._lost = type(model).__name__, ""  # lost: in words, why parameters were not made whole again
        self._ranks = sharing(topology, split[0], transport.rank)
        self._sharing = transport.part(self._ranks)
        self._topology, self._transport, self._trace = topology, transport, Trace(transport.rank)
        self._group: Group = transport.group(self._ranks)
        # After an error the first group may have messages that no rank sends or receives any more.
        self._last_group = None if for_good else transport.group(self._ranks)
        # By buffer: the block whose weights are arriving there, and the future of their arrival.
        self._under_way: dict[int, tuple[int, LaneFuture[None]]] = {}
        blocks, seen = called_often(model)[1:], set[int]()
        place = len(self._ranks), self._ranks.index(transport.rank), transport.device
        self.compared: list[SplitBlock] = []  # also filled if this rank shares them with no other
        for name, module in [blocks[number] for number in split_blocks(len(blocks), split[1])]:
            own = [x for x in dict.fromkeys(module.parameters()) if id(x) not in seen and x.numel()]
            seen |= set(map(id, own))
            self.compared.append(SplitBlock(name, module, own, place, self._fetch))
        self._blocks = self.compared if len(self._ranks) > 1 else []
        self._split()

    @torch.inference_mode(False)  # these tensors serve calls in that mode and outside of it
    def _split(self) -> None:
        """Split the blocks whose parameters are whole: all at first, later those that were read or changed. All ranks
        call it.

        It also allocates the two buffers in which blocks compute.
        """
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
        """Have each block's weights gathered when it computes. Return a function that undoes this; weights stay split.

        Args:
            trace: takes the times and bytes.
        """
        self._trace = trace
        undo = ExitStack()
        for number, block in enumerate(self._blocks):
            undo.callback(replace_forward(block.module, partial(self._compute, number)))
        return undo.close

    def end(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """Give every rank the whole weights back, unless they are split for good. All ranks call it, also those that
        leave with an error.

        It is called when the engine's `with` block is left, with the arguments of `__exit__`. If a rank does not send
        its part, a note is added to the error, and every later use of the parameters raises UserError.
        """
        for _, arriving in self._under_way.values() if error is None else ():  # after an error they may never arrive
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
        """Make a block whole until the model's next call, because a parameter was read or changed outside of its
        computation.

        All ranks call it. Raise UserError if ranks do so for different blocks, or if a part was lost.
        """
        if self._lost:
            raise UserError(self._lost)
        check_agreement({"use of the shared weights": block.name}, self._sharing, AT)
        self._make_whole(block, self._group, "weights")
        self._all_are_split = False

    def _make_whole(self, block: SplitBlock, group: Group, lane: str) -> None:
        """Gather a block's parts from all ranks into new memory. Give it to the parameters unless they have memory of
        their own already.

        Args:
            block: the block.
            group: the communicator.
            lane: name of the background thread that gathers.
        """
        with torch.inference_mode(False):
            buffer = block.own.new_empty(len(self._ranks) * block.part)
            tensors = block.tensors_in(buffer)
        self._wait(group, self._transport.lane(lane).submit(partial(self._gather, group), block.own, buffer).wait)
        if not block.whole:
            block.fill(tensors)
            block.whole = True

    def _wait(self, group: Group, wait: Callable[[], None]) -> None:
        """Wait for messages in a communicator.

        In the one that gives weights back, a rank that has failed still sends its part. There an error ends the wait
        only after GIVING_BACK_S.

        Args:
            group: the communicator.
            wait: waits for the messages; called again after an error.
        """
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
        """Run a block with its weights, in place of its forward, while the weights of the next block arrive.

        Args:
            number: index of the block among those that are split.
            forward: the block's own forward.
            args: the block's arguments.
            kwargs: its keyword arguments.
        """
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
        """Wait for a block's weights, and return the index (0 or 1) of the buffer that holds them.

        If the model skips blocks, the expected block's weights keep arriving as long as their buffer is not needed.

        Args:
            number: index of the block among those that are split.
        """
        buffer = next((buffer for buffer, (block, _) in self._under_way.items() if block == number), None)
        if buffer is None:
            buffer = 1 - next(iter(self._under_way), 1)
            self._start(number, buffer)
        with self._trace.span("wait for weights"):
            self._under_way.pop(buffer)[1].wait()
        return buffer

    def _start(self, number: int, buffer: int) -> None:
        """Begin to gather a block's weights in a buffer, unless they are arriving there already.

        The background thread works in order: weights of another block that are arriving there are complete first.

        Args:
            number: index of the block among those that are split.
            buffer: index of the buffer, 0 or 1.
        """
        if self._under_way.get(buffer, (None,))[0] == number:
            return
        block = self._blocks[number]
        whole = self._buffers[buffer][: len(self._ranks) * block.part]
        arriving = self._transport.lane("weights").submit(partial(self._gather, self._group), block.own, whole)
        self._under_way[buffer] = number, arriving

    def _gather(self, group: Group, own: Tensor, whole: Tensor) -> None:
        """Gather all ranks' parts of a block in one buffer. A background thread runs it.

        Args:
            group: the communicator.
            own: the bytes of this rank's part.
            whole: the buffer for all ranks' parts.
        """
        CALL.set(AT)  # since ranks that end with an error are in different calls
        parts = [*whole.view(len(self._ranks), len(own))]
        with self._trace.span("gather weights", "weights", late_bytes=(len(parts) - 1) * own.nbytes):
            self._wait(group, group.all_gather(own, parts).wait)
        for peer in self._ranks:
            link = self._topology.link_class(self._transport.rank, peer)
            self._trace.count(link, own.nbytes, purpose="weights")


def split_for_good(
    models: Sequence[nn.Module], topology: Topology, transport: Transport, split: Split, parts: int
) -> dict[nn.Module, SplitWeights]:
    """Split models' weights before they are moved to the device, so that no rank needs memory for all of them.

    Return a `SplitWeights` for each model, for every `Engine` on these ranks. All ranks call it.

    Args:
        models: the transformers, in the host's memory.
        topology: all ranks.
        transport: their connections.
        split: "card" or "node", whose ranks share a block; and the number of blocks that are split (None: all).
        parts: number of parts of the ranks that compute a guidance branch each, see `part_of`.
    """
    among = part_of(topology, transport, parts)
    return {model: SplitWeights(model, *among, split, for_good=True) for model in models}


def part_of(topology: Topology, transport: Transport, parts: int) -> tuple[Topology, Transport]:
    """Return topology and transport of the ranks among which this rank may share blocks of weights.

    If parts of the ranks compute a guidance branch each, these are the ranks of its own part: the others call the model
    at other times, and not as often.

    Args:
        topology: all ranks.
        transport: their connections.
        parts: number of such parts; 1 for none.
    """
    if parts == 1:
        return topology, transport
    ranks = Axes.build(topology, guidance=parts).branch(transport.rank)
    return topology.part(ranks), transport.part(ranks)


def split_blocks(count: int, layers: int | None) -> list[int]:
    """Return the indices of the blocks whose weights are split, evenly spread, so that each one's have time to arrive
    in.

    The first block is left out unless all are split, since a step cache computes it alone.

    Args:
        count: number of blocks of the model.
        layers: number of blocks to split; None for all.
    """
    if layers is None or layers >= count:
        return list(range(count))
    return [1 + (2 * number + 1) * (count - 1) // (2 * layers) for number in range(layers)]


def sharing(topology: Topology, among: str, rank: int) -> list[int]:
    """Return the ranks of a rank's card or node, which share the weights of its blocks.

    Args:
        topology: the ranks.
        among: "card" or "node".
        rank: the rank.
    """
    place = topology.places[rank]
    return [one.rank for one in topology.places if getattr(one, among) == getattr(place, among)]
