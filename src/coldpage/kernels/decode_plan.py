"""What a step of decoding attends to, and how its work is shared by the programs of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from coldpage.types import Int32Array, Int64Array

__all__ = [
    "AttentionOptions",
    "DecodeBatch",
    "DecodeParts",
    "DecodePrograms",
    "DecodeResult",
    "plan_decode",
]

# What an item costs besides its blocks, in blocks: its start, its end and its merge.
_ITEM_BLOCKS: Final = 8
# No smaller item pays for its merge.
_MIN_ITEM_BLOCKS: Final = 8
# Where each program would have so many blocks, shares may come in waves, each program's next one
# smaller by this factor: so one that finds its processor taken by other work holds up less.
_WAVE_BLOCKS: Final = 256
_WAVE_FACTOR: Final = 0.6


class DecodePrograms(NamedTuple):
    """What to plan for: how many programs a GPU runs at a time, and how often each is followed by
    another, where there is work enough."""

    num_at_a_time: int
    num_waves: int = 1


class DecodeBatch(NamedTuple):
    """What a step attends to, as tensors on the device: for one layer group, and all its layers."""

    tables: torch.Tensor  # int32 [batch, max_blocks]: the slot of each block; negative: no page
    num_tokens: torch.Tensor  # int32 [batch]: the query is at position num_tokens - 1; 0: no query
    items: torch.Tensor  # int32 [num_items, 4]: row (negative: none), first block, stop block, 0
    first_items: torch.Tensor  # int32 [batch + 1]: a row's items are neighbours
    shares: torch.Tensor  # int32 [num_shares + 1]: the first item of each program, neighbours too


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer's attention is. A window of n shows the newest n positions, and the first
    ``num_sink_tokens``. Scores are ``softcap * tanh(score / softcap)`` where there is one."""

    scale: float
    window: int | None = None
    num_sink_tokens: int = 0
    softcap: float | None = None


class DecodeResult(NamedTuple):
    """What attention gives. ``mass`` is the sum of probabilities, over heads and positions, that
    each block received."""

    out: torch.Tensor  # [batch, heads, head_dim], the query's dtype
    lse: torch.Tensor | None  # [batch, heads] f32: of scores and sink logits, natural logarithm
    mass: torch.Tensor | None  # [batch, max_blocks] f32


class DecodeParts(NamedTuple):
    """How the contexts of a batch are cut, on the host. See DecodeBatch."""

    items: Int32Array
    first_items: Int32Array
    shares: Int32Array


def plan_decode(
    num_tokens: Int32Array,
    *,
    tokens_per_block: int,
    num_kv_heads: int,
    programs: DecodePrograms,
    window: int | None = None,
    num_sink_tokens: int = 0,
) -> DecodeParts:
    """Pure: all visible blocks of sequences with so many visible tokens in shares for programs that
    end together; an item is what a share has of a row. How many items and shares there are, unused
    ones included, does not depend on the lengths.
    """
    batch = len(num_tokens)
    rows, firsts, sizes = _ranges(
        num_tokens.astype(np.int64), tokens_per_block, window, num_sink_tokens
    )
    programs = programs._replace(num_at_a_time=max(1, programs.num_at_a_time // num_kv_heads))
    max_shares = programs.num_at_a_time * programs.num_waves
    begins = np.cumsum(sizes) - sizes
    share_begins = _share_begins(sizes, begins, programs)
    item_begins = np.union1d(begins[sizes > 0], share_begins)
    of_range = np.searchsorted(begins + sizes, item_begins, "right")
    item_stops = np.append(item_begins[1:], sizes.sum())
    items = np.full((len(rows) + max_shares, 4), -1, dtype=np.int32)
    used = items[: len(item_begins)]
    used[:, 0] = rows[of_range]
    used[:, 1] = item_begins - begins[of_range] + firsts[of_range]
    used[:, 2] = item_stops[: len(used)] - begins[of_range] + firsts[of_range]
    items[:, 3] = 0
    first_items = np.searchsorted(rows[of_range], np.arange(batch + 1))
    shares = np.full(max_shares + 1, len(used), dtype=np.int32)
    shares[: len(share_begins)] = np.searchsorted(item_begins, share_begins)
    return DecodeParts(items, first_items.astype(np.int32), shares)


def _share_begins(sizes: Int64Array, begins: Int64Array, programs: DecodePrograms) -> Int64Array:
    """Where each share begins in the row of all blocks."""
    costs = np.where(sizes > 0, sizes + _ITEM_BLOCKS, 0)
    total, num_ranges = int(costs.sum()), int((sizes > 0).sum())
    if total == 0:
        return np.zeros(0, np.int64)
    num_at_a_time, num_waves = programs
    if num_waves > 1 and total >= num_at_a_time * _WAVE_BLOCKS:
        # All a little smaller than the one before, so that ends do not fall together.
        weights = _WAVE_FACTOR ** (np.arange(num_at_a_time * num_waves) / num_at_a_time)
    else:
        most = max(num_ranges, total // (_ITEM_BLOCKS + _MIN_ITEM_BLOCKS))
        weights = np.ones(min(num_at_a_time, most))
    before = (np.cumsum(weights) - weights) / weights.sum()
    cuts = np.minimum(total * before, total - 1).astype(np.int64)
    stops = np.cumsum(costs)
    of_range = np.searchsorted(stops, cuts, "right")
    size = sizes[of_range]
    block = (cuts - (stops - costs)[of_range] - _ITEM_BLOCKS).clip(0, size)
    # No crumbs on either side.
    block = np.where(block < _MIN_ITEM_BLOCKS, 0, block)
    block = np.where(size - block < _MIN_ITEM_BLOCKS, np.where(block > 0, size, 0), block)
    found: Int64Array = begins[of_range] + block
    return found


def _ranges(
    num_tokens: Int64Array, tokens_per_block: int, window: int | None, num_sink_tokens: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The row, first block and number of blocks of each run of visible blocks, in order."""
    rows = np.arange(len(num_tokens))
    stops = -(-num_tokens // tokens_per_block)
    if window is None:
        return rows, np.zeros_like(stops), stops
    firsts = np.maximum(0, num_tokens - window) // tokens_per_block
    num_sink_blocks = -(-num_sink_tokens // tokens_per_block)
    apart = firsts > num_sink_blocks
    firsts = np.where(apart, firsts, 0)
    sinks = np.where(apart, num_sink_blocks, 0)
    # Two runs a row: its sinks, which may be none, and its window.
    return (
        np.repeat(rows, 2),
        np.stack([np.zeros_like(firsts), firsts], 1).ravel(),
        np.stack([sinks, stops - firsts], 1).ravel(),
    )
