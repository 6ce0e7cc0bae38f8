"""The index tensors of one step: from block tables to what attention gathers, writes and masks.

Made once per layer group and step, so that no layer computes an index. What decodes is planned for
operators that know no pages: for those that do, see ``kernel_plan``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from coldpage.engine.attention.dense_attention import BIAS_ALIGNMENT
from coldpage.kernels.decode_plan import DecodeBatch
from coldpage.types import Int32Array, Int64Array

__all__ = [
    "MIN_TILE_TOKENS",
    "SEGMENT_TOKENS",
    "ChunkPlan",
    "DecodePlan",
    "Gather",
    "GroupPlan",
    "ItemSpan",
    "Merge",
    "Tile",
    "Write",
    "index_tensor",
    "plan_chunk",
    "plan_group",
    "slot_tensor",
    "write_places",
]

# Tokens of one decode segment. On 2 cores with 3 KV heads 512 halves the time of 1,500 tokens
# against one segment; shorter ones pay more for the merge than they gain.
SEGMENT_TOKENS: Final = 512
# Fewest queries of one tile of a sliding-window prefill; below it the calls cost more than the
# masked work saved.
MIN_TILE_TOKENS: Final = 128


class ItemSpan(NamedTuple):
    """The new tokens of one sequence in the packed row, and its block table for one layer group."""

    row: int
    start: int
    num_tokens: int
    slots: Int32Array  # [num_blocks], -1 where there is no page


class Write(NamedTuple):
    """Where the new tokens' K and V go: ``pages[slots, offsets] = rows``; ``rows`` None means all,
    in order."""

    slots: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor | None


class Gather(NamedTuple):
    """Blocks to copy out of the pool, and the range of the copied positions that is live."""

    slots: torch.Tensor
    first: int
    stop: int


class Merge(NamedTuple):
    """Which segments belong to which item, where items have several."""

    item_of: torch.Tensor  # [num_segments]
    segments_of: torch.Tensor  # [num_items, most segments of an item]
    bias: torch.Tensor  # [num_items, most segments, 1, 1]: -inf where an item has no such segment


class DecodePlan(NamedTuple):
    """All items of one token: a *segment* is ``segment_tokens`` gathered positions of one item."""

    num_items: int
    num_segments: int
    segment_tokens: int
    slots: torch.Tensor  # [num_segments * blocks of a segment]
    # One segment in all: the live range of it. Else what is dead is zeroed and masked.
    live: tuple[int, int] | None
    dead: torch.Tensor  # gathered positions
    bias: torch.Tensor  # [num_segments, 1, 1, segment_tokens or more], 0 or -inf
    merge: Merge | None  # None: one item, or one segment each


class Tile(NamedTuple):
    """Queries [first, stop) of an item against keys [key_first, key_stop) of its history and new
    tokens."""

    first: int
    stop: int
    key_first: int
    key_stop: int
    bias: torch.Tensor  # [1, 1, stop - first, key_stop - key_first or more]


class ChunkPlan(NamedTuple):
    """An item of several tokens."""

    row: int
    num_tokens: int
    history: Gather | None
    tiles: tuple[Tile, ...]  # empty: the history needs no mask
    whole: Gather | None  # history and new tokens, of a plan for attention that reads these back


class GroupPlan(NamedTuple):
    """One step's index tensors for the layers of one layer group."""

    write: Write
    # [num_items] in the packed row; None: the row is just the items of one token, or has none.
    decode_rows: torch.Tensor | None
    decode: DecodePlan | DecodeBatch | None
    chunks: tuple[ChunkPlan, ...]


def plan_group(
    items: list[ItemSpan], tokens_per_block: int, window: int | None, dtype: torch.dtype
) -> GroupPlan:
    """Pure: the index tensors of a step for the layers with this window whose pages ``items``
    name."""
    decode = [item for item in items if item.num_tokens == 1]
    is_mixed = 0 < len(decode) < len(items)
    slots, offsets = write_places(items, tokens_per_block, window)
    kept = None if (slots >= 0).all() else np.flatnonzero(slots >= 0)
    if kept is not None:
        slots, offsets = slots[kept], offsets[kept]
    return GroupPlan(
        write=Write(
            index_tensor(slots),
            index_tensor(offsets),
            None if kept is None else index_tensor(kept),
        ),
        decode_rows=index_tensor([item.row for item in decode]) if is_mixed else None,
        decode=_plan_decode(decode, tokens_per_block, window, dtype) if decode else None,
        chunks=tuple(
            plan_chunk(item, tokens_per_block, window, dtype)
            for item in items
            if item.num_tokens > 1
        ),
    )


def write_places(
    items: list[ItemSpan], tokens_per_block: int, window: int | None
) -> tuple[Int32Array, Int64Array]:
    """The slot of each new token's page, negative where there is none, and its place in it."""
    positions = [np.arange(i.start, i.start + i.num_tokens) for i in items]
    slots = np.concatenate(
        [i.slots[p // tokens_per_block] for i, p in zip(items, positions, strict=True)]
    )
    # A block that every later token's window has left may have no page; any other absence is a bug.
    assert window is not None or (slots >= 0).all(), "a step writes to a block that has no hot page"
    return slots, np.concatenate(positions) % tokens_per_block


def _live_blocks(
    slots: Int32Array, first: int, stop: int, tokens_per_block: int
) -> tuple[Int32Array, Int64Array, int, int]:
    """The pages that hold positions [first, stop): slots, block ordinals, and the dead positions at
    both ends."""
    ordinals = np.arange(first // tokens_per_block, -(-stop // tokens_per_block))
    ordinals = ordinals[slots[ordinals] >= 0]
    if not len(ordinals):
        return slots[ordinals], ordinals, 0, 0
    lead = max(0, first - int(ordinals[0]) * tokens_per_block)
    tail = max(0, (int(ordinals[-1]) + 1) * tokens_per_block - stop)
    return slots[ordinals], ordinals, lead, tail


def _plan_decode(
    items: list[ItemSpan], tokens_per_block: int, window: int | None, dtype: torch.dtype
) -> DecodePlan:
    live = []
    for item in items:
        first = 0 if window is None else max(0, item.start - window + 1)
        live.append(_live_blocks(item.slots, first, item.start + 1, tokens_per_block))
    num_blocks = [len(slots) for slots, _, _, _ in live]
    rounds = -(-max(num_blocks) * tokens_per_block // SEGMENT_TOKENS)
    segment_blocks = -(-max(num_blocks) // rounds)
    num_segments = [-(-n // segment_blocks) for n in num_blocks]
    padded, dead = [], []
    for (slots, _, lead, tail), segments in zip(live, num_segments, strict=True):
        pad = segments * segment_blocks - len(slots)
        padded.append(np.concatenate([slots, np.repeat(slots[-1:], pad)]))
        is_dead = np.zeros(segments * segment_blocks * tokens_per_block, dtype=np.bool_)
        is_dead[:lead] = True
        is_dead[len(slots) * tokens_per_block - tail :] = True
        dead.append(is_dead)
    all_dead = np.concatenate(dead)
    total = sum(num_segments)
    _, _, lead, tail = live[0]
    return DecodePlan(
        num_items=len(items),
        num_segments=total,
        segment_tokens=segment_blocks * tokens_per_block,
        slots=slot_tensor(np.concatenate(padded)),
        live=(lead, segment_blocks * tokens_per_block - tail) if total == 1 else None,
        dead=index_tensor(np.flatnonzero(all_dead)),
        bias=_bias(~all_dead.reshape(total, -1), dtype)[:, None, None],
        merge=_plan_merge(num_segments) if 1 < len(items) < total else None,
    )


def _plan_merge(num_segments: list[int]) -> Merge:
    counts = np.asarray(num_segments)[:, None]
    columns = np.arange(counts.max())[None, :]
    firsts = np.cumsum(counts) - counts[:, 0]
    return Merge(
        item_of=index_tensor(np.repeat(np.arange(len(counts)), num_segments)),
        segments_of=index_tensor(np.where(columns < counts, firsts[:, None] + columns, 0)),
        bias=_penalty(columns < counts, torch.float32)[:, :, None, None],
    )


def plan_chunk(
    item: ItemSpan,
    tokens_per_block: int,
    window: int | None,
    dtype: torch.dtype,
    *,
    has_whole: bool = False,
) -> ChunkPlan:
    """Pure: what an item of several tokens reads. ``has_whole``: the new tokens from their pages
    too, where no window cuts the history."""
    stop = item.start + item.num_tokens
    cut = window is not None and stop > window
    first = max(0, item.start - window + 1) if cut and window is not None else 0
    slots, ordinals, lead, tail = _live_blocks(item.slots, first, item.start, tokens_per_block)
    total = len(slots) * tokens_per_block
    history = Gather(slot_tensor(slots), lead, total - tail) if lead + tail < total else None
    if not cut or window is None:
        whole = _plan_whole(item, tokens_per_block) if has_whole else None
        return ChunkPlan(item.row, item.num_tokens, history, (), whole)
    positions = (ordinals[:, None] * tokens_per_block + np.arange(tokens_per_block)).ravel()
    keys = np.concatenate([positions[lead : total - tail], np.arange(item.start, stop)])
    tiles = _plan_tiles(keys, item.start, item.num_tokens, window, dtype)
    return ChunkPlan(item.row, item.num_tokens, history, tiles, None)


def _plan_whole(item: ItemSpan, tokens_per_block: int) -> Gather:
    stop = item.start + item.num_tokens
    slots, _, lead, tail = _live_blocks(item.slots, 0, stop, tokens_per_block)
    return Gather(slot_tensor(slots), lead, len(slots) * tokens_per_block - tail)


def _plan_tiles(
    keys: Int64Array, start: int, num_tokens: int, window: int, dtype: torch.dtype
) -> tuple[Tile, ...]:
    tiles = []
    step = max(window, MIN_TILE_TOKENS)
    for first in range(0, num_tokens, step):
        stop = min(first + step, num_tokens)
        queries = np.arange(start + first, start + stop)[:, None]
        key_first = int(np.searchsorted(keys, start + first - window + 1))
        key_stop = int(np.searchsorted(keys, start + stop))
        k = keys[None, key_first:key_stop]
        bias = _bias((k <= queries) & (k > queries - window), dtype)[None, None]
        tiles.append(Tile(first, stop, key_first, key_stop, bias))
    return tuple(tiles)


def slot_tensor(values: npt.ArrayLike) -> torch.Tensor:
    """What kernels read, int32."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))


def index_tensor(values: npt.ArrayLike) -> torch.Tensor:
    """Indices for torch, int64."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _bias(live: npt.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    """Columns are added until the rows are as DenseAttention wants them."""
    num_columns = live.shape[1]
    return _penalty(np.pad(live, ((0, 0), (0, -num_columns % BIAS_ALIGNMENT))), dtype)


def _penalty(live: npt.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(live.shape, dtype=dtype).masked_fill_(torch.from_numpy(~live), float("-inf"))
