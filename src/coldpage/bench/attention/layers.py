"""Pages of several layers in one pool, as the engine has them: a page is contiguous across all
layers, and the pages of a sequence lie anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from coldpage.engine.attention.paged_attention import LayerPages
from coldpage.engine.model.hot_types import HotTypes
from coldpage.errors import ConfigurationError
from coldpage.kernels.gather_pages import gather_pages, gather_pages_reference
from coldpage.kernels.kv_types import TURBO4, KVPages, page_views
from coldpage.types import Int32Array

__all__ = [
    "TOKENS_PER_BLOCK",
    "Heads",
    "PagedLayers",
    "fill_pages",
    "num_in_turn",
    "read_pages",
    "type_names",
]

TOKENS_PER_BLOCK: Final = 16
# As an 8B model has.
_MAX_LAYERS: Final = 32
# Layers take turns, so that what is read again has left every cache meanwhile.
_TURN_BYTES: Final = {"cuda": 1 << 30, "cpu": 0}
_MIN_IN_TURN: Final = 2
_MAX_IN_TURN: Final = 16
_FILL_BYTES: Final = 1 << 30
# So that numbers are about as large as those of a standard normal distribution.
_Q8_0_SCALE: Final = 1 / 74


class Heads(NamedTuple):
    """Of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads} / {self.num_kv_heads} heads of {self.head_dim}"

    def vector_bytes(self, types: HotTypes) -> int:
        """Of K and V of one token."""
        both = types.key.vector_bytes(self.head_dim) + types.value.vector_bytes(self.head_dim)
        return self.num_kv_heads * both


def type_names(types: HotTypes) -> str:
    """For people: ``bf16``, or ``q8_0 / turbo4`` for keys and values."""
    if types.key == types.value:
        return types.key.name
    return f"{types.key.name} / {types.value.name}"


def num_in_turn(num_bytes: int, place: torch.device) -> int:
    """Of how many layers work takes turns, of which each reads ``num_bytes``."""
    wanted = -(-_TURN_BYTES[place.type] // num_bytes)
    return max(_MIN_IN_TURN, min(_MAX_IN_TURN, wanted))


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """Layers that take turns, and the slots of ``num_blocks`` blocks, shuffled over the pool."""

    layers: tuple[LayerPages, ...]
    slots: Int32Array

    @classmethod
    def make(
        cls, pool: torch.Tensor, heads: Heads, types: HotTypes, num_blocks: int
    ) -> PagedLayers:
        """Pages that fill ``pool``, uint8 [num_bytes], all layers of which that matter are written.

        Raises ConfigurationError where the pool is too small.
        """
        layer_bytes = TOKENS_PER_BLOCK * heads.vector_bytes(types)
        num_layers = min(_MAX_LAYERS, pool.numel() // (layer_bytes * num_blocks))
        in_turn = num_in_turn(layer_bytes * num_blocks, pool.device)
        if num_layers < _MIN_IN_TURN:
            needed = _MIN_IN_TURN * layer_bytes * num_blocks
            raise ConfigurationError(
                f"pages of {type_names(types)} for {heads} need {needed:,} bytes of memory and "
                f"have {pool.numel():,}: give more with --bytes, or measure on a larger device"
            )
        page_bytes = num_layers * layer_bytes
        num_slots = pool.numel() // page_bytes
        pages = pool[: num_slots * page_bytes].view(num_slots, page_bytes)
        key_bytes = TOKENS_PER_BLOCK * heads.num_kv_heads * types.key.vector_bytes(heads.head_dim)
        layers = []
        for first in range(0, min(num_layers, in_turn) * layer_bytes, layer_bytes):
            split, stop = first + key_bytes, first + layer_bytes
            shape = (TOKENS_PER_BLOCK, heads.num_kv_heads, heads.head_dim)
            keys = page_views(pages[:, first:split], types.key, *shape, is_value=False)
            values = page_views(pages[:, split:stop], types.value, *shape, is_value=True)
            layers.append(LayerPages(keys, values, None))
        for layer in layers:
            fill_pages(layer.keys)
            fill_pages(layer.values)
        order = np.random.default_rng(1).permutation(num_slots)
        return cls(tuple(layers), order[:num_blocks].astype(np.int32))


def fill_pages(pages: KVPages) -> None:
    """Random numbers of about unit variance in every page."""
    values, scales = pages.values, pages.scales
    # In pieces, which index arithmetic of 32 bits can address.
    step = max(1, _FILL_BYTES // (values.stride(0) * values.element_size()))
    for first in range(0, len(values), step):
        piece = values[first : first + step]
        if scales is None:
            piece.normal_()
        elif pages.kv_type == TURBO4:
            piece.random_(0, 256)
        else:
            piece.random_(-127, 128)
    if scales is not None:
        scales.fill_(1.0 if pages.kv_type == TURBO4 else _Q8_0_SCALE)


def read_pages(pages: KVPages, slots: torch.Tensor, out: torch.Tensor) -> None:
    """``gather_pages``; in plain torch where there is no GPU."""
    if out.device.type == "cuda":
        gather_pages(pages, slots, out)
    else:
        gather_pages_reference(pages, slots, out)
