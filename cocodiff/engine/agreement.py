"""The check that all ranks call their transformers with the same inputs. Only then do they compute one image.

Values are compared by their shapes and dtypes, and by a 64-bit digest of their tensors' bits, computed on the tensors'
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocodiff.comm.transport import Transport
from cocodiff.config.errors import UserError
from cocodiff.config.grouping import by_key
from cocodiff.kernels.device import digest
from cocodiff.models.adapter import tensors_in

WHOLE_MODEL = 2**20  # elements up to which all of a model's weights are compared
SAMPLED = 2**10  # elements of each tensor that are compared in a larger model
ADAPTER_SETTINGS = ("scaling", "scale", "active_adapters", "disable_adapters")  # of peft's layers and IP-Adapters
NAMED_RANKS = 8  # ranks that an error lists at most
SHOWN_VALUES = 4  # elements up to which an error shows a tensor's values


class Compared(NamedTuple):
    """One value of one rank, in the form in which ranks compare it: an argument of the transformer's call, or a
    setting."""

    told: tuple[str, str, int]  # name, form (see `form`) and digest of the bits of its tensors; these are compared
    words: str  # its description in the error message if ranks differ


def check_agreement(values: dict[str, Any], transport: Transport, at: str, wandering: Sequence[str] = ()) -> None:
    """Raise UserError on every rank if the ranks' values differ.

    The error names the differing values, and the ranks that have another value than most. All ranks call this and wait
    for each other. It also waits for the tensors' device.

    Args:
        values: tensors, numbers, texts and containers of them, under the same names on every rank.
        transport: the ranks that compare.
        at: name of this comparison, the same on every rank.
        wandering: names of operations that gave other bits when they were repeated on some rank, for the error.
    """
    own = [Compared((name, form(value), _bits(value)), described(value)) for name, value in values.items()]
    message = transport.reduce_values(own, disagreement, at)
    if message is not None:
        repeated = f"; {', '.join(wandering)} differ when repeated here: send one rank's to all" * bool(wandering)
        raise UserError(message + repeated)


def disagreement(of_ranks: Sequence[Sequence[Compared]]) -> str | None:
    """Return the error message that says which ranks differ in which values; None if all ranks agree.

    Values are named as on rank 0, and described by the first that differs.

    Args:
        of_ranks: for every rank its values, in the same order.
    """
    columns = zip_longest(*of_ranks, fillvalue=Compared(("", "", 0), ""))
    differing = [column for column in columns if len({one.told for one in column}) > 1]
    if not differing:
        return None
    names = [column[0].told[0] for column in differing]
    first = differing[0]
    count = Counter(one.told for one in first)
    usual = max(first, key=lambda one: count[one.told])  # the most frequent value; rank 0's if several are
    others = [rank for rank, one in enumerate(first) if one.told != usual.told]
    ranks = ", ".join(map(str, others[:NAMED_RANKS])) + (", ..." if len(others) > NAMED_RANKS else "")
    other, most = first[others[0]].words, usual.words
    how = f"{other} instead of {most}" if other != most else f"{most} with other values"
    return (
        f"{len(others)} of {len(of_ranks)} ranks ({ranks}) call the transformer with another {', '.join(names)} than "
        f"the rest (on rank {others[0]} {names[0]} is {how}): give every rank the same inputs, seeds, weights and "
        f"settings"
    )


def _bits(value: Any) -> int:
    """Return a 63-bit digest of the bits of all tensors in a value; 0 if there are none. It waits for their device."""
    return sum(int(digest(x)) * (2 * number + 1) for number, x in enumerate(tensors_in(value))) % 2**63


def components_of(pipe: Any) -> dict[str, Any]:
    """Return facts about a pipeline's VAE and scheduler, by name, for ranks to compare: class names, settings,
    timesteps and digests of weights.

    The results of the prompt encoders are among the transformer's arguments, so encoders are left out.

    Args:
        pipe: a diffusers pipeline, or None.
    """
    found: dict[str, Any] = {}
    for name in ("vae", "scheduler"):
        part = getattr(pipe, name, None)
        found |= {name: type(part).__name__, f"digest of {name}": isinstance(part, nn.Module) and weights_digest(part)}
        settings = dict(getattr(part, "config", None) or {})
        found |= {f"{name}.{key}": value for key, value in settings.items() if not key.startswith("_")}
        found |= {f"{name}.{key}": getattr(part, key, None) for key in ("timesteps", "sigmas")}
    return found


def weights_digest(model: nn.Module, blocks: Sequence[Any] = ()) -> str:
    """Return a digest of a model's parameters, buffers and adapter settings, in hexadecimal digits. It waits for the
    device.

    Ranks whose weights differ would make one mixed image, for instance if each initialised an adapter at random.

    Args:
        model: the model.
        blocks: `SplitBlock`s, whose weights ranks share. Their `facts` stand in for the tensors in their `parameters`.
    """
    apart = {id(x) for block in blocks for x in block.parameters}
    stored = chain(model.named_parameters(), model.named_buffers())
    adapters = [(name, *(form(getattr(m, of, None)) for of in ADAPTER_SETTINGS)) for name, m in model.named_modules()]
    told = [facts_of((name, x) for name, x in stored if id(x) not in apart), adapters, [one.facts for one in blocks]]
    return blake2b(repr(told).encode(), digest_size=8).digest()[::-1].hex()


def facts_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return names, forms and digests of tensors as one text, by which ranks compare them.

    Of large models SAMPLED elements of each tensor, evenly spread, are read. Tensors that stand in for others
    (quantised, sharded or offloaded ones) are left out.

    Args:
        tensors: pairs of a name and a tensor.
    """
    plain = [(name, x.data) for name, x in tensors if type(x.data) is Tensor and not x.is_meta and x.numel()]
    each = SAMPLED if sum(x.numel() for _, x in plain) > WHOLE_MODEL else WHOLE_MODEL
    sampled = by_key(((x.dtype, x.device), x.flatten()[:: -(-x.numel() // each)]) for _, x in plain)
    bits = [int(digest(torch.cat(numbers))) for numbers in sampled.values()]
    return f"{[(name, form(x)) for name, x in plain]} {bits}"


def form(value: Any) -> str:
    """Return a value as text for comparison. Tensors appear as their dtype and shape, without elements.

    Objects other than numbers, texts and containers appear as the name of their class.
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {form(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(form, value)) + "]"
    plain = value is None or isinstance(value, bool | int | float | complex | str)
    return repr(value) if plain else type(value).__name__  # other objects' texts may hold addresses, which differ


def described(value: Any) -> str:
    """Return a value's form for an error message, with the elements of a tensor that has at most SHOWN_VALUES."""
    if isinstance(value, Tensor) and value.numel() <= SHOWN_VALUES:
        return f"{form(value)} {value.flatten().tolist()}"
    return form(value)
