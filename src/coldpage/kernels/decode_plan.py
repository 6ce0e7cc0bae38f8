"""What a step of decoding attends to, and how its work is cut into items for the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from coldpage.types import Int32Array, Int64Array

__all__ = ["AttentionOptions", "DecodeBatch", "DecodeResult", "plan_decode"]

# What an item costs besides its blocks, in blocks: its start, its end and its merge.
_ITEM_BLOCKS: Final = 8
# No smaller item pays for its merge.
_MIN_ITEM_BLOCKS: Final = 8
# Sizes of items that are tried: even shares of all blocks in so many waves of programs, and parts
# of the longest sequence.
_WAVES: Final = np.array([1, 2, 3, 4])
_PARTS: Final = np.arange(1, 17)


class DecodeBatch(NamedTuple):
    """What a step attends to, as tensors on the device: for one layer group, and all its layers."""

    tables: torch.Tensor  # int32 [batch, max_blocks]: the slot of each block; negative: no page
    num_tokens: torch.Tensor  # int32 [batch]: the query is at position num_tokens - 1; 0: no query
    items: torch.Tensor  # int32 [num_items, 4]: row (negative: none), first block, stop block, 0
    first_items: torch.Tensor  # int32 [batch + 1]: a row's items are neighbours


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


def plan_decode(
    num_tokens: Int32Array,
    *,
    tokens_per_block: int,
    num_kv_heads: int,
    num_programs: int,
    window: int | None = None,
    num_sink_tokens: int = 0,
) -> tuple[Int32Array, Int32Array]:
    """Pure: ``items`` and ``first_items`` for sequences with so many visible tokens, cut so that a
    GPU that runs ``num_programs`` at a time is busy until the end. How many items there are, unused
    ones included, does not depend on the lengths.
    """
    batch = len(num_tokens)
    rows, firsts, sizes = _ranges(
        num_tokens.astype(np.int64), tokens_per_block, window, num_sink_tokens
    )
    num_at_a_time = max(1, num_programs // num_kv_heads)
    max_items = len(rows) + batch + num_at_a_time
    counts = _cut(sizes, max_items, num_at_a_time)
    total = int(counts.sum())
    items = np.full((max_items, 4), -1, dtype=np.int32)
    of_range = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    begin, size, count = firsts[of_range], sizes[of_range], counts[of_range]
    items[:total, 0] = rows[of_range]
    items[:total, 1] = begin + size * nth // count
    items[:total, 2] = begin + size * (nth + 1) // count
    items[:, 3] = 0
    first_items = np.searchsorted(rows[of_range], np.arange(batch + 1))
    return items, first_items.astype(np.int32)


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


def _cut(sizes: Int64Array, max_items: int, num_at_a_time: int) -> Int64Array:
    """Into how many items each run of blocks is cut: one that spreads the work in one wave of
    programs or a few, whichever ends first."""
    total = int(sizes.sum())
    longest = int(sizes.max(initial=1))
    wanted = -(-total // (num_at_a_time * _WAVES))
    candidates = np.append(wanted, -(-longest // _PARTS)).clip(
        min(_MIN_ITEM_BLOCKS, longest), longest
    )
    counts = -(-sizes[None, :] // candidates[:, None])
    num_items = counts.sum(1)
    largest = (-(-sizes[None, :] // np.maximum(counts, 1))).max(1, initial=1)
    share = (total + _ITEM_BLOCKS * num_items) / num_at_a_time
    # Items of a second wave start when some of the first have ended: half an item late, on average.
    late = np.where(num_items > num_at_a_time, largest / 2, 0)
    ends = np.maximum(largest + _ITEM_BLOCKS, share + late)
    ends = np.where(num_items <= max_items, ends, np.inf)
    best: Int64Array = counts[int(np.argmin(ends))]
    return best
