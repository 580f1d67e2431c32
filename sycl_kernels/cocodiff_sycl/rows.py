"""Chosen rows of a tensor, as data that a kernel gathers where it packs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows `index_K` (int64) of source_RHD, in that order, not yet gathered.

    reference_RHD: where the gathered rows are written as well, at rows reference_index_K; a negative one is not.
    """

    source_RHD: Tensor
    index_K: Tensor
    reference_RHD: Tensor | None = None
    reference_index_K: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[1, K, H, D], as the gathered rows of all batch rows in one would have it."""
        return torch.Size((1, len(self.index_K), *self.source_RHD.shape[1:]))

    def contained_tensors(self) -> tuple[Tensor | None, ...]:
        return self.source_RHD, self.index_K, self.reference_RHD, self.reference_index_K

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> list[Rows]:
        """The same rows of consecutive heads, so many each; dim is 2, that of the heads."""
        assert dim == 2, "rows are split by heads"
        sources = self.source_RHD.split_with_sizes(sizes, 1)
        if self.reference_RHD is None:
            return [Rows(source, self.index_K) for source in sources]
        references = self.reference_RHD.split_with_sizes(sizes, 1)
        return [
            Rows(source, self.index_K, reference, self.reference_index_K)
            for source, reference in zip(sources, references, strict=True)
        ]

    def new_empty(self, *shape: Any) -> Tensor:
        return self.source_RHD.new_empty(*shape)

    def __len__(self) -> int:
        return 1
