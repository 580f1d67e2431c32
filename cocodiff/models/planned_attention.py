"""Attention of a model that runs by a plan, intercepted where torch computes it.

Nothing in a model says which tokens an attention call has. So the first call of each form is followed (`Marks`), to
find the tensors that are computed from tokens that were cut. Ranks then compare the numbers of their rows of queries
and keys, and decide together, once for each layer:

- keys and values are all tokens (a text that every rank has): attention is computed here, without an exchange.
- queries and keys are this rank's tokens, equally many: they are exchanged as in other models (`Host.attend`). The
  order of tokens makes no difference to attention, so it need not be known.
- keys and values are this rank's tokens, queries are others: keys and values are gathered.
- anything else is refused, for instance a sequence that mixes own tokens and all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, combinations_with_replacement
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.config.errors import UserError
from cocodiff.models.adapter import tensors_in
from cocodiff.topology.layout import Segments

BESIDE_QKV = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # further arguments of torch's attention
JOINING = (torch.cat, torch.concat, torch.concatenate)
COUNTED = ("attention", "whole")  # purposes for which bytes of gathers are counted


class Marks:
    """The tensors that hold this rank's own tokens: those that were cut by the plan, and all that are computed from
    one."""

    def __init__(self) -> None:
        self._marked: Any = WeakIdKeyDictionary()
        # by the number of rows of a concatenation, the number of marked tensors that it was made of
        self.joined: dict[int, int] = {}

    def add(self, x: Tensor) -> None:
        self._marked[x] = True

    def remove(self, x: Tensor) -> None:
        self._marked.pop(x, None)

    def __contains__(self, x: object) -> bool:
        return isinstance(x, Tensor) and x in self._marked

    def any_of(self, values: Iterable[Any]) -> bool:
        """Return True if one of some values, or an entry of nested lists among them, is a marked tensor."""
        return any(self.any_of(x) if isinstance(x, list | tuple) else x in self for x in values)

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Mark what a function of torch has computed from marked tensors, as it holds this rank's own tokens too.

        That is its output or, for `x[...] = y`, x.

        Args:
            function: the function that was called.
            output: what it has returned.
        """
        if self.any_of(args) or self.any_of(kwargs.values()):
            for x in tensors_in(args[0] if function is Tensor.__setitem__ else output):
                self.add(x)
            if function in JOINING:
                self._note_joined(*args, output=output, **kwargs)

    def _note_joined(self, tensors: Sequence[Tensor], dim: int = 0, *, output: Tensor) -> None:
        """Record the number of tensors that were concatenated along their rows, if all of them are marked."""
        if all(x in self for x in tensors) and dim not in (-1, output.ndim - 1):
            self.joined[output.shape[dim]] = len(tensors)


class TorchFunctions(TorchFunctionMode):
    """A context in which `attend` is called in place of torch's scaled_dot_product_attention.

    This is torch's own way to intercept functions: it holds for the thread that enters it, and nothing is replaced.
    """

    def __init__(self, attend: Callable[..., Tensor], marks: Marks | None = None) -> None:
        """Prepare the context.

        Args:
            attend: computes attention. It gets query, key and value by position, the other arguments by name.
            marks: marks what other functions compute from marked tensors; None to not follow them.
        """
        super().__init__()
        self._attend, self._marks = attend, marks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._attend(*args[:3], **dict(zip(BESIDE_QKV, args[3:], strict=False)), **kwargs)
        output = func(*args, **kwargs)
        if self._marks is not None:
            self._marks.follow(func, args, kwargs, output)
        return output


class Followed(NamedTuple):
    """The decision, made in a model's first call, about how ranks compute one of its attention calls together."""

    how: str  # "here" (all keys are on every rank), "exchanged" (tokens for heads), or "gathered" (keys and values)
    rows: tuple[int, int]  # number of queries and of keys on this rank
    segments: Segments = ()  # the parts of the sequence that the keys are


class PlannedAttention:
    """The attention calls of a model that several ranks run by a plan, computed in the place of torch's."""

    def __init__(self, host: Any, layers: Iterable[str]) -> None:
        """Count the layers of each kind.

        Args:
            host: the engine.
            layers: names of all attention modules.
        """
        self._host, self._layers = host, Counter(map(kind_of, layers))
        self.begin({}, None)

    def begin(self, followed: dict[str, Followed], marks: Marks | None) -> None:
        """Begin a call of the model.

        Args:
            followed: the decisions for calls of its form, by layer. They are added to while they are still made.
            marks: the tensors with own tokens, if decisions are made in this call; else None.
        """
        self.followed, self.marks = followed, marks
        self._attended: Counter[str] = Counter()
        self._mask: tuple[Any, Tensor, Tensor] | None = None  # the last mask: its key, itself, all ranks' mask

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
        """Return attention over the tokens of all ranks, in place of torch's scaled_dot_product_attention: [B, H, L,
        D].

        Args:
            layer: name of the module that attends.
            query: this rank's, [B, H, L, D].
            key: this rank's.
            value: this rank's.
            call: further arguments of torch's function, by name.
        """
        # The layer's name, with a number for its second and further attentions in a call.
        number = self._attended[layer]
        self._attended[layer] += 1
        name = f"{layer} {number}" if number else layer
        rows = query.shape[-2], key.shape[-2]
        marks = self.marks
        if marks is not None:
            self.followed[name] = self._follow(name, query, key, value, marks)
        if name not in self.followed:
            raise UserError(f"{name} attends in this call and did not in the first one like it: run it on one rank")
        found = self.followed[name]
        if found.rows != rows:
            raise UserError(f"{name} has {rows[0]} queries and {rows[1]} keys here, {found.rows} were awaited")
        if call.get("is_causal") and not (found.how == "here" and (marks is None or query not in marks)):
            raise UserError(f"{name} attends causally, which has no parallel form here")
        if found.how == "exchanged":
            out = self._exchanged(name, query, key, value, call, found)
        else:
            if found.how == "gathered":
                key, value, call = self._gathered(key, value, call, found)
            out = scaled_dot_product_attention(query, key, value, **call)
        if marks is not None and query in marks:
            marks.add(out)
        return out

    def _follow(self, name: str, query: Tensor, key: Tensor, value: Tensor, marks: Marks) -> Followed:
        """Decide how an attention call is computed, equally on all ranks. All ranks call it, in the first call of the
        model.

        Args:
            name: name of the layer.
            marks: the tensors with own tokens.
        """
        own_keys = key in marks or value in marks
        # Keys without own tokens must have equal bits on all ranks: else marks were lost on the way.
        bits = "" if own_keys else repr((key.double().sum().item(), value.double().sum().item()))
        rows = query.shape[-2], key.shape[-2]
        facts = [name, query in marks, own_keys, bits, *rows, marks.joined.get(rows[1], 1)]
        of_ranks = self._host.sequence.transport.all_gather_values(facts)
        if len({tuple(facts[:4]) for facts in of_ranks}) > 1:
            raise UserError(
                f"{name} attends to other keys on some ranks, though the plan does not cut them: correct it"
            )
        if not own_keys:
            return Followed("here", rows)
        queries, keys, joined = ([facts[n] for facts in of_ranks] for n in (4, 5, 6))
        segments = segments_of(self._host.sequence, keys, min(joined))
        if not segments:
            told = ", ".join(f"{one.tokens} {one.name}" for one in self._host.sequence.segments)
            raise UserError(
                f"{name} attends to {sum(keys)} keys on all ranks together, which are not tokens that the plan cuts "
                f"({told}): cut everything that attends jointly, a text too"
            )
        return Followed("exchanged" if query in marks and queries == keys else "gathered", rows, segments)

    def _exchanged(
        self, name: str, q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, call: Mapping[str, Any], found: Followed
    ) -> Tensor:
        """Return attention for which the engine exchanges queries, keys and values between ranks, [B, H, L, D].

        Args:
            name: name of the layer.
            call: further arguments of torch's function, by name.
            found: the decision about this layer.
        """
        if q_BHLD.ndim != 4 or q_BHLD.shape[-1] != v_BHLD.shape[-1] or call.get("dropout_p"):
            raise UserError(f"{name} attends with dropout, or to values of another width than keys: run it on one rank")
        scale, usual = call.get("scale"), q_BHLD.shape[-1] ** -0.5
        if scale is not None and abs(scale - usual) > 1e-6 * usual:
            q_BHLD = q_BHLD * (scale / usual)
        masks, attending_BL = self._masks_of(name, call.get("attn_mask"), len(q_BHLD), found)
        groups = q_BHLD.shape[1] // k_BHLD.shape[1]
        if groups > 1 and not self._sends_groups(k_BHLD.shape[1]):
            k_BHLD, v_BHLD = (x.repeat_interleave(groups, dim=1) for x in (k_BHLD, v_BHLD))
            groups = 1
        q, k, v = _in_groups(q_BHLD, groups), k_BHLD.transpose(1, 2), v_BHLD.transpose(1, 2)
        qkv = LazyQKV(lambda: q, lambda: k, lambda: v, found.segments, k.shape[2], masks)
        self._host.check_room(kind_of(name), self._layers[kind_of(name)], qkv)
        out_BHLD = _out_of_groups(self._host.attend(qkv, name), groups)
        # Queries that attend to nothing are zero, as in torch.
        return out_BHLD if attending_BL is None else out_BHLD * attending_BL[:, None, :, None]

    def _sends_groups(self, key_heads: int) -> bool:
        """Return True if keys and values that several query heads share are sent only once.

        That needs one key head for each rank, and no codec or displacement.
        """
        config = self._host.config
        return config.codec == "none" and config.arrival == "now" and self._host.sequence.mesh.ulysses <= key_heads

    def _gathered(
        self, k_BHLD: Tensor, v_BHLD: Tensor, call: dict[str, Any], found: Followed
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the keys of all ranks, their values, and the further arguments of attention. A mask for this rank's
        keys is gathered too.

        Args:
            call: further arguments of torch's function, by name.
            found: the decision about this layer.
        """
        sequence, mask = self._host.sequence, call.get("attn_mask")
        shares = _sums(one.shares(sequence.topology) for one in found.segments)
        k_BHSD, v_BHSD = (sequence.gather_rows(x, shares, 2, *COUNTED) for x in (k_BHLD, v_BHLD))
        if mask is not None and mask.shape[-1] == found.rows[1] != sum(shares):
            mask = sequence.gather_rows(mask, shares, mask.ndim - 1, *COUNTED)
        return k_BHSD, v_BHSD, call | {"attn_mask": mask}

    def _masks_of(
        self, name: str, mask: Tensor | None, batch: int, found: Followed
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Take a mask apart: return which keys of all ranks are attended to, and which of this rank's queries attend to
        anything.

        The keys' masks are gathered from all ranks, one for each segment of the sequence, by its name: bool [B, tokens
        of all ranks]. Without a mask there are none. The queries are bool [B, L]; None for all.

        Args:
            name: name of the layer, for errors.
            mask: the call's mask for this rank's keys, as torch's function takes it.
            batch: size of the batch.
            found: how ranks compute this layer's attention; it has the segments, and this rank's numbers of queries and
                keys.
        """
        if mask is None:
            return {}, None
        keys_BL, queries_BL = _of_keys_and_queries(name, mask, batch, found.rows)
        sequence = self._host.sequence
        of_segments = [one.shares(sequence.topology) for one in found.segments]
        # Layers often share one mask. It is kept, so that no other mask can get its memory address.
        told = mask.data_ptr(), mask.shape, mask.stride(), mask._version, found.segments
        if self._mask is None or self._mask[0] != told:
            self._mask = told, mask, sequence.gather_rows(keys_BL, _sums(of_segments), 1, *COUNTED)
        # A rank's rows are taken as its rows of each segment in turn: the assignment makes no difference.
        pieces = self._mask[2].split([share for of in zip(*of_segments, strict=True) for share in of], dim=1)
        number = len(found.segments)
        return {one.name: torch.cat(pieces[n::number], dim=1) for n, one in enumerate(found.segments)}, queries_BL


def kind_of(name: str) -> str:
    """Return the name of an attention layer without the numbers in it, which groups equal layers.

    See `LayerKey.kind`. A number after the name, for a further attention of the layer in a call, is left out too.
    """
    return LayerKey(name.partition(" ")[0]).kind


def _in_groups(x_BHLD: Tensor, groups: int) -> Tensor:
    """Return queries as [groups * B, L, H / groups, D], where each key head is shared by `groups` query heads.

    Heads that share a key head are at the same place in all groups.
    """
    B, H, L, D = x_BHLD.shape
    return x_BHLD.view(B, H // groups, groups, L, D).permute(2, 0, 3, 1, 4).reshape(groups * B, L, H // groups, D)


def _out_of_groups(x_BLHD: Tensor, groups: int) -> Tensor:
    """Return the output of attention to queries in groups as [B, H, L, D]: the inverse of `_in_groups`."""
    B, L, H, D = x_BLHD.shape
    return x_BLHD.view(groups, B // groups, L, H, D).permute(1, 3, 0, 2, 4).reshape(B // groups, H * groups, L, D)


def segments_of(sequence: Any, rows: Sequence[int], joined: int = 1) -> Segments:
    """Return the parts of the sequence that together have the given number of rows on every rank; () if there are none.

    Args:
        sequence: the ranks that share the call, with the segments that were cut in it.
        rows: number of rows of each rank.
        joined: number of segments to try if one may repeat, as with a text of as many tokens as its image.
    """
    all_of = sequence.segments
    one_each = (some for number in range(1, len(all_of) + 1) for some in combinations(all_of, number))
    several = combinations_with_replacement(all_of, joined) if joined > 1 else ()
    for some in chain(one_each, several):
        if _sums(one.shares(sequence.topology) for one in some) == list(rows):
            return tuple(replace(one, name=f"{one.name} {n}") if one in some[:n] else one for n, one in enumerate(some))
    return ()


def _of_keys_and_queries(name: str, mask: Tensor, batch: int, rows: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Take a mask apart. Return the keys that are attended to, bool [B, keys], and the queries that attend to anything.

    The latter are bool [B, queries], or None for all. Raise UserError for masks that are not the product of these two.

    Args:
        name: name of the layer, for errors.
        mask: as torch's function takes it.
        batch: size of the batch.
        rows: number of queries and of keys on this rank.
    """
    queries, keys = rows
    if mask.dtype != torch.bool:
        raise UserError(
            f"{name} has a mask of {mask.dtype}, which adds to scores: only true and false have a parallel form"
        )
    if mask.shape[-1] != keys:
        raise UserError(f"{name} has a mask of {mask.shape[-1]} keys and {keys} keys on this rank: cut it in the plan")
    mask_BHLK = mask[(None,) * (4 - mask.ndim)]
    alike = mask_BHLK[:, :1]
    if mask_BHLK.shape[1] > 1 and not torch.equal(mask_BHLK, alike.expand_as(mask_BHLK)):
        raise UserError(f"{name} has a mask that differs between heads, which has no parallel form here")
    mask_BLK = alike[:, 0].expand(batch, -1, -1)
    if mask_BLK.shape[1] == 1 != queries:
        return mask_BLK[:, 0], None
    keys_BK, queries_BL = mask_BLK.any(1), mask_BLK.any(2)
    if not queries_BL.any(1).all() or not torch.equal(mask_BLK, queries_BL[:, :, None] & keys_BK[:, None]):
        raise UserError(f"{name} has a mask that differs between queries, which has no parallel form here")
    return keys_BK, queries_BL


def _sums(shares: Iterable[Iterable[int]]) -> list[int]:
    """Return, for each rank, the sum of the segments' numbers of rows on it.

    Args:
        shares: for each segment, its number of rows on every rank.
    """
    return [sum(of) for of in zip(*shares, strict=True)]
