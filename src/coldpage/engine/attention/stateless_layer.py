"""A layer of a transformers cache that holds nothing of its own."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

__all__ = ["StatelessLayer"]


class StatelessLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Answers what a model asks of its cache; ``update`` is its user's."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: nothing is kept here."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The model builds no mask for this attention, so nothing depends on the answer."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Positions are always given explicitly, so the model never needs it."""
        return 0

    def get_max_length(self) -> int:
        """No maximum of its own."""
        return -1

    # transformers before 5.20 asks under this name.
    get_max_cache_shape = get_max_length
