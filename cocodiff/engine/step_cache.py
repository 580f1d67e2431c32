"""First Block Cache: if a model's first block changes its tokens nearly as it did before, the other blocks are skipped.
The change that they made last is added again. Lossy; the idea is ParaAttention's, the rule diffusers'.

diffusers' own hook decides by the tokens that a rank has, so ranks would disagree and wait for each other forever. Here
all ranks that share a call's sequence decide together, in every call that has one to compare with. Each sums the
changes of its own tokens, and two numbers from each rank are added exactly. So the decision is the same on every rank,
and that of one process but for the rounding of sums in float64. Other replicas, and the ranks of the other guidance
branch, take no part.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cocodiff.config.errors import UserError
from cocodiff.engine.sequence import SequenceRanks
from cocodiff.exchange.codec import StepInfo, StepNotes
from cocodiff.models.adapter import Forward, call_key
from cocodiff.models.checks import called_often, replace_forward, signature_of

# diffusers fills its registry at the first query. A second thread's query meanwhile would find it incomplete.
REGISTRY = threading.Lock()
# The lists of a model's blocks, in the order in which it calls them: those in which diffusers' own caches look.
BLOCK_LISTS = (
    "blocks",
    "transformer_blocks",
    "single_transformer_blocks",
    "layers",
    "visual_transformer_blocks",
    "temporal_transformer_blocks",
)


@dataclass
class KeptResults:
    """The results of a computed call of the model that the step cache keeps, for later calls of the same guidance
    branch."""

    form: Any  # shapes and other facts of the call's arguments, see `call_key`; other calls do not use what is kept
    step: int  # step of the branch's last call, computed or cached
    first_BLC: Tensor = field(init=False)  # the first block's change of this rank's image tokens, [B, L, channels]
    rest: Sequence[Tensor | None] = ()  # the other blocks' change of each tensor that the last one returns, or None
    like: dict[int, Any] = field(default_factory=dict)  # by number, meta tensors like the outputs of blocks between


@dataclass
class CachedCall:
    """A call of the model in progress, as the step cache sees it."""

    key: Any  # key of what the cache keeps for this call: the ranks and the guidance branch
    ranks: SequenceRanks  # the ranks that share its sequence
    own: KeptResults  # what the cache will keep of this call if it is computed
    cached: KeptResults | None = None  # results in place of the blocks after the first; None: these are computed
    output: Any = None  # output of the first block


@dataclass
class CachedStep:
    """The counts of one denoising step: calls of the model on this rank, and those for which the cache was used."""

    calls: int = 0  # calls of the model
    cached: int = 0  # calls in which the cache replaced all blocks but the first

    @classmethod
    def merged(cls, parts: Sequence[CachedStep]) -> dict[str, Any]:
        """Return the fraction of all ranks' calls in one step that used the cache, as {"cached_fraction": fraction}.

        Args:
            parts: the counts of each rank.
        """
        return {"cached_fraction": sum(part.cached for part in parts) / sum(part.calls for part in parts)}


class FirstBlockCache:
    """The step cache of one model: if its first block changes tokens nearly as before, the other blocks are skipped.

    The change that they made last is added again. The object lives as long as the engine; its contents last for one
    run.
    """

    def __init__(self, model: nn.Module, settings: Any) -> None:
        """Find the model's blocks. Raise UserError if there are fewer than two.

        Args:
            model: the transformer.
            settings: a `Config`, of which `step_cache_threshold` is read. It is the mean absolute change of what the
                first block adds, relative to what it added before, up to which the other blocks are skipped.
        """
        self._threshold, self._name = settings.step_cache_threshold, type(model).__name__
        self._blocks = [block for name, block in called_often(model)[1:] if name.partition(".")[0] in BLOCK_LISTS]
        if len(self._blocks) < 2:
            raise self._refusal(f"has {len(self._blocks)} block(s) in lists named {', '.join(BLOCK_LISTS)}")
        self._signature = signature_of(self._blocks[0])
        self._image = place_of_image(self._blocks[0])
        self._run, self._call = -1, None  # type: int, CachedCall | None
        self._kept: dict[Any, KeptResults] = {}
        self._report: defaultdict[int, CachedStep] = defaultdict(CachedStep)

    def attach(self) -> Callable[[], None]:
        """Put the cache around the model's blocks. Return a function that takes it off and frees its contents."""
        undo, (first, *between, last) = ExitStack(), self._blocks
        undo.callback(self._forget)
        undo.callback(replace_forward(first, self._compute_first))
        for number, block in enumerate(between):
            undo.callback(replace_forward(block, partial(self._compute_between, number)))
        undo.callback(replace_forward(last, self._compute_last))
        return undo.close

    def begin_call(self, step_info: StepInfo, branch: int, ranks: SequenceRanks, arguments: Mapping[str, Any]) -> None:
        """Prepare for a call of the model. The engine calls this before each one.

        A new run empties the cache. What is kept of branches that had no call in the last step is dropped.

        Args:
            step_info: run and step of the call.
            branch: guidance branch of the call.
            ranks: the ranks that share the call's sequence.
            arguments: the call's arguments, by name.
        """
        if step_info.run != self._run:
            self._forget()
        self._run, step = step_info.run, step_info.step
        self._kept = {key: kept for key, kept in self._kept.items() if kept.step >= step - 1}
        self._call = CachedCall((ranks, branch), ranks, KeptResults(call_key(dict(arguments)), step))

    def bytes_held(self) -> int:
        """Return the bytes of the tensors that the cache keeps on this rank now."""
        return sum(x.nbytes for kept in self._kept.values() for x in (kept.first_BLC, *kept.rest) if x is not None)

    def report(self) -> Mapping[int, StepNotes]:
        """Return the counts of every step so far, by index of the step."""
        return self._report

    def forget_report(self) -> None:
        """Delete the counts of all steps, which `report` returns."""
        self._report.clear()

    def _forget(self) -> None:
        """Delete all that the cache keeps, and the call in progress."""
        self._kept, self._call, self._run = {}, None, -1

    def _refusal(self, why: str) -> UserError:
        """Return a UserError that says why the cache cannot be used with the model.

        Args:
            why: the reason, as it follows the model's name.
        """
        return UserError(f"step_cache first_block: {self._name} {why}: choose step_cache none")

    # The blocks -------------------------------------------------------------------------------------------------------

    def _compute_first(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run the first block in place of its forward, count the call, and decide with all ranks if the other blocks
        are skipped.

        Args:
            forward: the block's own forward.
            args: the block's arguments.
            kwargs: its keyword arguments.
        """
        output, call = forward(*args, **kwargs), self._call
        if call is None:
            return output
        given_BLC = next(iter(self._signature.bind(*args, **kwargs).arguments.values()))
        call.output, own = output, call.own
        own.first_BLC = (self._image_of(output) - given_BLC).detach()
        noted, kept = self._report[own.step], self._kept.get(call.key)
        noted.calls += 1
        if kept and kept.form == own.form and not self._changed(own.first_BLC, kept.first_BLC, call.ranks):
            noted.cached += 1
            kept.step, call.cached = own.step, kept
        return output

    def _compute_between(self, number: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a block between the first and the last. If it is skipped, return tensors of the right shapes, which the
        last block does not read.

        Args:
            number: number of the block, from 0 for the second one.
            forward: the block's own forward.
            args: the block's arguments.
            kwargs: its keyword arguments.
        """
        call = self._call
        if call is not None and call.cached is not None:  # the last block does not read it
            nothing = call.cached.first_BLC.new_zeros(())
            return tree_map_only(Tensor, lambda x: nothing.expand(x.shape), call.cached.like[number])
        output = forward(*args, **kwargs)
        if call is not None:
            call.own.like[number] = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), output)
        return output

    def _compute_last(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run the last block, and keep what the blocks changed. If it is skipped, return the first block's output plus
        the kept change.

        Args:
            forward: the block's own forward.
            args: the block's arguments.
            kwargs: its keyword arguments.
        """
        call, self._call = self._call, None
        if call is not None and call.cached is not None:
            rests = call.cached.rest
            begun = beginnings(call.output, len(rests))
            found = [None if rest is None else x + rest for x, rest in zip(begun, rests, strict=True)]
            return found[0] if len(found) == 1 else tuple(found)
        output = forward(*args, **kwargs)
        if call is not None and call.output is not None:  # a model may skip its first block
            self._keep(call, [output] if isinstance(output, Tensor) else output)
        return output

    def _keep(self, call: CachedCall, ended: Sequence[Tensor | None]) -> None:
        """Keep what the blocks after the first one have changed. Raise UserError if the last block's tensors do not
        match the first one's.

        Args:
            call: the call, with the first block's output.
            ended: the tensors that the last block has returned.
        """
        begun = beginnings(call.output, len(ended))
        rest = [
            None if y is None or x.shape != y.shape else (y - x).detach() for x, y in zip(begun, ended, strict=False)
        ]
        if len(begun) != len(ended) or any(x is None and y is not None for x, y in zip(rest, ended, strict=True)):
            raise self._refusal("has blocks of which the last returns other tensors than the first")
        call.own.rest, self._kept[call.key] = rest, call.own

    def _image_of(self, output: Any) -> Tensor:
        """Return the tokens that are denoised, of those that the first block returns. They alone decide, as in
        diffusers.

        Raise UserError if the block returns several tensors, and diffusers does not tell which is the image.

        Args:
            output: what the first block returned.
        """
        if isinstance(output, Tensor):
            return output
        if self._image is None:
            why = "has blocks that return several tensors, and diffusers does not tell which is the image"
            raise self._refusal(why)
        return output[self._image]

    def _changed(self, now_BLC: Tensor, before_BLC: Tensor, ranks: SequenceRanks) -> bool:
        """Return True if the first block's change differs too much from the kept one, summed over all ranks' tokens, or
        is not a number.

        All these ranks call it and get the same answer.

        Args:
            now_BLC: the change by the first block in this call.
            before_BLC: its change in the call whose results are kept.
            ranks: the ranks that share the sequence.
        """
        sums = torch.stack([sum_of_sizes(now_BLC - before_BLC), sum_of_sizes(before_BLC)])[None]
        if ranks.size > 1:
            ranks.transport.arrive("the step cache's decision")
            sums = ranks.gather_rows(sums, [1] * ranks.size, 0, "notes")
        change, size = (math.fsum(of_ranks) for of_ranks in zip(*sums.tolist(), strict=True))
        return not (change <= self._threshold * size < math.inf)


def sum_of_sizes(x: Tensor) -> Tensor:
    """Return the sum of the absolute values of a tensor, a float64 tensor with one element."""
    return torch.linalg.vector_norm(x, 1, dtype=torch.float64)


def beginnings(output: Any, count: int) -> Sequence[Tensor]:
    """Return the first block's output as the tensors that the last block's are compared with, one by one.

    The difference of both is what the blocks in between have changed. A model may have two streams of tokens (text and
    image) in its first blocks and one in its last (FLUX.2): then both streams are concatenated.

    Args:
        output: what the first block returned: a tensor or several.
        count: number of tensors that the last block returns.
    """
    if isinstance(output, Tensor):
        return [output]
    return [torch.cat(list(output), dim=1)] if count == 1 else list(output)


def place_of_image(block: nn.Module) -> int | None:
    """Return the index of the image's tokens among the tensors that a block returns; None if diffusers has no record of
    its class."""
    from diffusers.hooks._helpers import TransformerBlockRegistry

    try:
        with REGISTRY:
            place: int = TransformerBlockRegistry.get(type(block)).return_hidden_states_index
    except ValueError:
        return None
    return place
