"""Whether all ranks call their transformers with the same inputs: only then is what they compute one image.

What a rank calls with becomes a table of numbers of fixed size, so that ranks whose inputs differ in shape can compare
it too: two 64-bit digests for each argument, computed where the argument lies, in one small message to each peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from cocodiff.comm.transport import Transport
from cocodiff.digest import digest
from cocodiff.errors import UserError

ROWS = 64  # of the table: more than any call has arguments
WHOLE_MODEL = 2**20  # numbers up to which a model's weights are compared whole
SAMPLED = 2**10  # numbers of each tensor of a larger model
ADAPTER_SETTINGS = ("scaling", "scale", "active_adapters", "disable_adapters")  # of peft's layers and IP-Adapters
NAMED_RANKS = 8  # in an error; of more only the number
SHOWN_VALUES = 4  # of a tensor, in an error


def check_agreement(values: dict[str, Any], device: torch.device, transport: Transport) -> None:
    """Compares what ranks call with. All ranks call it and wait for each other.

    values: tensors, and numbers, texts and containers of them, by the same names on every rank. device: what the table
    is sent from.

    Raises UserError on every rank, which names what differs and the ranks that have something else than most.
    """
    own = table(values, device)

    def gather(own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(transport.size)]
        transport.world.all_gather(own, parts).wait()
        return torch.stack(parts)

    of_ranks = transport.control.submit_inline(gather, own).wait().tolist()
    differing = [row for row in range(ROWS) if any(rows[row] != of_ranks[0][row] for rows in of_ranks)]
    if not differing:
        return
    # Every rank has come to this line, so there is time for words. Names are those of rank 0.
    of_all = transport.gather_object([described(value) for value in values.values()])
    message = None
    if of_all is not None:
        names = [name for row, name in enumerate(values) if row in differing]
        row = differing[0]
        message = disagreement(
            names, [rows[row] for rows in of_ranks], [(*words, *[""] * ROWS)[row] for words in of_all]
        )
    raise UserError(transport.broadcast_object(message))


def disagreement(names: Sequence[str], digests: Sequence[Sequence[int]], words: Sequence[str]) -> str:
    """The line that says who differs. names: of what differs; of the first of them every rank's digests and words."""
    of_ranks = [tuple(one) for one in digests]
    count = Counter(of_ranks)
    usual = max(of_ranks, key=lambda one: count[one])  # rank 0's where as many have another
    others = [rank for rank, one in enumerate(of_ranks) if one != usual]
    ranks = ", ".join(map(str, others[:NAMED_RANKS])) + (", ..." if len(others) > NAMED_RANKS else "")
    other, most = words[others[0]], words[of_ranks.index(usual)]
    how = f"{other} instead of {most}" if other != most else f"{most} with other values"
    return (
        f"{len(others)} of {len(of_ranks)} ranks ({ranks}) call the transformer with another {', '.join(names)} than "
        f"the rest (on rank {others[0]} {names[0]} is {how}): give every rank the same inputs, seeds, weights and "
        f"settings"
    )


def table(values: dict[str, Any], device: torch.device) -> Tensor:
    """[ROWS, 2], int64: for each value the digest of its name and form, and of the bits of its tensors."""
    if len(values) > ROWS:
        raise ValueError(f"{len(values)} values to compare, there is room for {ROWS}")
    forms = [_hash(f"{name} {form(value)}") for name, value in values.items()]
    bits = []
    for value in values.values():
        found = [digest(tensor).to(device) * (2 * number + 1) for number, tensor in enumerate(tensors_in(value))]
        bits.append(torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64, device=device))
    columns = torch.stack([torch.tensor(forms, device=device), torch.stack(bits)], dim=1)
    return torch.cat([columns, columns.new_zeros(ROWS - len(forms), 2)])


def weights_digest(model: nn.Module) -> str:
    """A model's parameters and buffers in one word, with the strength of its adapters: ranks whose weights differ, by
    adapters that each of them initialised at random for instance, would make one mixed image. It waits for the device.

    A large model is sampled: of every tensor SAMPLED numbers, evenly spread. Tensors that stand in for others
    (quantised, sharded or offloaded ones) are left out."""
    stored = [*model.named_parameters(), *model.named_buffers()]
    adapters = [(name, *(form(getattr(m, of, None)) for of in ADAPTER_SETTINGS)) for name, m in model.named_modules()]
    plain = {name: x.data for name, x in stored if type(x.data) is Tensor and not x.is_meta and x.numel()}
    each = SAMPLED if sum(x.numel() for x in plain.values()) > WHOLE_MODEL else WHOLE_MODEL
    sampled: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in plain.values():
        numbers = x.flatten()
        sampled.setdefault((x.dtype, x.device), []).append(numbers[:: -(-len(numbers) // each)])
    bits = [int(digest(torch.cat(numbers))) for numbers in sampled.values()]
    return f"{_hash(f'{[(name, form(x)) for name, x in plain.items()]} {bits} {adapters}') % 2**64:016x}"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a value, in an order that its form tells."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def form(value: Any) -> str:
    """A value in words, without what is in its tensors."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {form(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(form, value)) + "]"
    plain = value is None or isinstance(value, bool | int | float | complex | str)
    return repr(value) if plain else type(value).__name__  # others' texts may hold addresses, which differ


def described(value: Any) -> str:
    """A value's form, and the values of a tensor that has few."""
    if isinstance(value, Tensor) and value.numel() <= SHOWN_VALUES:
        return f"{form(value)} {value.flatten().tolist()}"
    return form(value)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
