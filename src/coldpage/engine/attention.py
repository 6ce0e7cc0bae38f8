"""Attention over pages, for transformers models that are otherwise unchanged.

A step packs the new tokens of many sequences into one row. ``plan_group`` turns the step's block
tables into index tensors, once per layer group; ``PagedLayer`` (what the model takes for its cache)
writes K and V into pages; ``paged_attention`` (what the model takes for its attention function)
attends to them:

* items of one token, together: their live blocks are gathered and cut into equal segments, which
  are the batch of one flash call; segments of a sequence merge by log-sum-exp. Segments keep all
  cores busy when there are few KV heads.
* an item of several tokens: history without a mask and the new tokens causally, merged by
  log-sum-exp. Where a sliding window cuts the history, tiles of queries with an explicit mask.

Nothing but the live positions of a sequence's own pages reaches a result: the others are cut off,
or zeroed and masked (zeroed too, since 0 x NaN is NaN).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from coldpage.types import Int32Array, Int64Array

__all__ = [
    "ATTENTION_NAME",
    "GroupPlan",
    "ItemSpan",
    "PagedCache",
    "PagedLayer",
    "Scratch",
    "paged_attention",
    "plan_group",
    "register_attention",
]

ATTENTION_NAME: Final = "coldpage_paged"
# Tokens of one decode segment. On 2 cores with 3 KV heads 512 halves the time of 1,500 tokens
# against one segment; shorter ones pay more for the merge than they gain.
SEGMENT_TOKENS: Final = 512
# Fewest queries of one tile of a sliding-window prefill; below it the calls cost more than the
# masked work saved.
MIN_TILE_TOKENS: Final = 128


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, queries, head_dim] and the log-sum-exp [batch, heads, queries] in f32.

    ``key`` and ``value`` may have fewer heads; a query head then uses the KV head of its group.
    Only this operator, of those that ``scaled_dot_product_attention`` chooses from on a CPU,
    returns the log-sum-exp.
    """
    out: tuple[torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=is_causal, attn_mask=bias, scale=scale
        )
    )
    return out


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


class DecodePlan(NamedTuple):
    """All items of one token. A *segment* is ``segment_tokens`` gathered positions of one item."""

    rows: torch.Tensor | None  # [num_items] in the packed row; None: the row is exactly these items
    slots: torch.Tensor  # [num_segments * blocks per segment]
    segment_tokens: int
    segment_item: torch.Tensor | None  # [num_segments]; None: one item or one segment each
    dead: torch.Tensor  # gathered positions that are not live
    bias: torch.Tensor | None  # [num_segments, 1, 1, segment_tokens], 0 or -inf
    merge_index: torch.Tensor | None  # [num_items, most segments]; None: one segment each
    merge_bias: (
        torch.Tensor | None
    )  # the same shape with [..., 1, 1]: -inf where an item has no such segment


class Tile(NamedTuple):
    """Queries [first, stop) of an item against keys [key_first, key_stop) of its history and new
    tokens."""

    first: int
    stop: int
    key_first: int
    key_stop: int
    bias: torch.Tensor  # [1, 1, stop - first, key_stop - key_first]


class ChunkPlan(NamedTuple):
    """An item of several tokens."""

    row: int
    num_tokens: int
    history: Gather | None
    tiles: tuple[Tile, ...]  # empty: the history needs no mask


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One step's index tensors for the layers of one layer group."""

    write: Write
    decode: DecodePlan | None
    chunks: tuple[ChunkPlan, ...]


class Scratch:
    """Memory that gathers reuse from layer to layer and step to step. It grows to the largest
    gather seen."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffers = [torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)]

    def gather(self, which: int, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Copies ``pages[slots]``; [num_blocks * tokens_per_block, kv_heads, head_dim], valid until
        the next call."""
        _, tokens, heads, dim = pages.shape
        wanted = slots.numel() * tokens * heads * dim
        if self._buffers[which].numel() < wanted:
            self._buffers[which] = torch.empty(wanted, dtype=pages.dtype)
        out = self._buffers[which][:wanted].view(slots.numel(), tokens, heads, dim)
        torch.index_select(pages, 0, slots, out=out)
        return out.view(-1, heads, dim)


def plan_group(
    items: list[ItemSpan], tokens_per_block: int, window: int | None, dtype: torch.dtype
) -> GroupPlan:
    """Pure: the index tensors of a step for the layers with this window whose pages ``items``
    name."""
    decode = [item for item in items if item.num_tokens == 1]
    return GroupPlan(
        write=_plan_write(items, tokens_per_block, window),
        decode=_plan_decode(decode, len(decode) < len(items), tokens_per_block, window, dtype)
        if decode
        else None,
        chunks=tuple(
            _plan_chunk(item, tokens_per_block, window, dtype)
            for item in items
            if item.num_tokens > 1
        ),
    )


def _plan_write(items: list[ItemSpan], tokens_per_block: int, window: int | None) -> Write:
    positions = [np.arange(i.start, i.start + i.num_tokens) for i in items]
    slots = np.concatenate(
        [i.slots[p // tokens_per_block] for i, p in zip(items, positions, strict=True)]
    )
    offsets = np.concatenate(positions) % tokens_per_block
    rows = None
    if (slots < 0).any():
        # A block that every later token's window has left may have no page; any other absence is a
        # bug.
        assert window is not None, "a step writes to a block that has no hot page"
        kept = np.flatnonzero(slots >= 0)
        slots, offsets, rows = slots[kept], offsets[kept], _index(kept)
    return Write(_index(slots), _index(offsets), rows)


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
    items: list[ItemSpan],
    mixed: bool,
    tokens_per_block: int,
    window: int | None,
    dtype: torch.dtype,
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
    merge = _plan_merge(num_segments) if max(num_segments) > 1 else (None, None)
    return DecodePlan(
        rows=_index([item.row for item in items]) if mixed else None,
        slots=_index(np.concatenate(padded)),
        segment_tokens=segment_blocks * tokens_per_block,
        segment_item=_index(np.repeat(np.arange(len(items)), num_segments))
        if len(items) > 1 and merge[0] is not None
        else None,
        dead=_index(np.flatnonzero(all_dead)),
        bias=_bias(~all_dead, dtype).view(sum(num_segments), 1, 1, -1) if all_dead.any() else None,
        merge_index=merge[0],
        merge_bias=merge[1],
    )


def _plan_merge(num_segments: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    counts = np.asarray(num_segments)[:, None]
    columns = np.arange(counts.max())[None, :]
    firsts = np.cumsum(counts) - counts[:, 0]
    index = np.where(columns < counts, firsts[:, None] + columns, 0)
    return _index(index), _bias(columns < counts, torch.float32)[:, :, None, None]


def _plan_chunk(
    item: ItemSpan, tokens_per_block: int, window: int | None, dtype: torch.dtype
) -> ChunkPlan:
    stop = item.start + item.num_tokens
    cut = window is not None and stop > window
    first = max(0, item.start - window + 1) if cut and window is not None else 0
    slots, ordinals, lead, tail = _live_blocks(item.slots, first, item.start, tokens_per_block)
    total = len(slots) * tokens_per_block
    history = Gather(_index(slots), lead, total - tail) if lead + tail < total else None
    if not cut or window is None:
        return ChunkPlan(item.row, item.num_tokens, history, ())
    positions = (ordinals[:, None] * tokens_per_block + np.arange(tokens_per_block)).ravel()
    keys = np.concatenate([positions[lead : total - tail], np.arange(item.start, stop)])
    tiles = _plan_tiles(keys, item.start, item.num_tokens, window, dtype)
    return ChunkPlan(item.row, item.num_tokens, history, tiles)


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


def _index(values: npt.ArrayLike) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _bias(live: npt.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(live.shape, dtype=dtype).masked_fill_(torch.from_numpy(~live), float("-inf"))


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's pages as the model's cache layer. ``plan`` is set for the time of a step."""

    is_compileable = False

    def __init__(
        self,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        window: int | None,
        scratch: Scratch,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key_pages = (
            key_pages  # [num_slots, tokens_per_block, kv_heads, head_dim], a view of the hot pool
        )
        self.value_pages = value_pages
        self.window = window
        self.scratch = scratch
        self.plan: GroupPlan | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the packed row's K and V ([1, kv_heads, total, head_dim]) into pages and returns
        them."""
        assert self.plan is not None, "the model ran outside a step"
        slots, offsets, rows = self.plan.write
        for pages, states in ((self.key_pages, key_states), (self.value_pages, value_states)):
            new = states[0].transpose(0, 1)
            pages.index_put_((slots, offsets), new if rows is None else new[rows])
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages exist."""

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


class PagedCache(Cache):
    """The model's cache of one step: a ``PagedLayer`` per layer."""

    def __init__(self, layers: list[PagedLayer]) -> None:
        super().__init__(layers=list(layers))
        self.paged_layers = layers


# The attention function is not handed the cache, so a step publishes it here for the time of the
# model's forward.
CURRENT_CACHE: Final[ContextVar[PagedCache]] = ContextVar("coldpage_current_cache")


def register_attention() -> str:
    """Makes ``paged_attention`` known to transformers (again is harmless) and returns its name.

    The mask interface does not know the name, so models build no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    return ATTENTION_NAME


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, total, head_dim] packed queries and new K, V -> [1, total, heads, head_dim], and
    no weights."""
    layer_index: Any = module.layer_idx
    layer = CURRENT_CACHE.get().paged_layers[layer_index]
    plan = layer.plan
    assert plan is not None and attention_mask is None and sliding_window == layer.window
    if plan.decode is None and len(plan.chunks) == 1:
        return _attend_chunk(layer, plan.chunks[0], query, key, value, scaling).transpose(
            1, 2
        ), None
    if plan.decode is not None and not plan.chunks:
        return _attend_decode(layer, plan.decode, query[0].transpose(0, 1), scaling)[None], None
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    if plan.decode is not None and plan.decode.rows is not None:
        rows = plan.decode.rows
        out[0, rows] = _attend_decode(layer, plan.decode, query[0].transpose(0, 1)[rows], scaling)
    for chunk in plan.chunks:
        span = slice(chunk.row, chunk.row + chunk.num_tokens)
        attended = _attend_chunk(
            layer, chunk, query[:, :, span], key[:, :, span], value[:, :, span], scaling
        )
        out[:, span] = attended.transpose(1, 2)
    return out, None


def _attend_decode(
    layer: PagedLayer, plan: DecodePlan, query: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """[num_items, heads, head_dim] -> the same. The query heads of a KV head are the rows of its
    flash call."""
    num_items, num_heads, head_dim = query.shape
    keys = layer.scratch.gather(0, layer.key_pages, plan.slots)
    values = layer.scratch.gather(1, layer.value_pages, plan.slots)
    keys.index_fill_(0, plan.dead, 0.0)
    values.index_fill_(0, plan.dead, 0.0)
    kv_heads = keys.shape[1]
    keys = keys.view(-1, plan.segment_tokens, kv_heads, head_dim).transpose(1, 2)
    values = values.view(-1, plan.segment_tokens, kv_heads, head_dim).transpose(1, 2)
    grouped = query.reshape(num_items, kv_heads, num_heads // kv_heads, head_dim)
    if plan.segment_item is not None:
        grouped = grouped[plan.segment_item]
    elif plan.merge_index is not None:
        grouped = grouped.expand(keys.shape[0], -1, -1, -1)
    out, lse = _flash(grouped, keys, values, bias=plan.bias, scale=scaling)
    if plan.merge_index is None or plan.merge_bias is None:
        return out.reshape(num_items, num_heads, head_dim)
    weights = torch.softmax(lse[plan.merge_index] + plan.merge_bias, dim=1)
    merged = (out[plan.merge_index] * weights[..., None]).sum(dim=1)
    return merged.to(query.dtype).reshape(num_items, num_heads, head_dim)


def _attend_chunk(
    layer: PagedLayer,
    plan: ChunkPlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """[1, heads, num_tokens, head_dim] -> the same."""
    if plan.history is None and not plan.tiles:
        return _flash(query, key, value, is_causal=True, scale=scaling)[0]
    old_key, old_value = key[:, :, :0], value[:, :, :0]
    if plan.history is not None:
        slots, first, stop = plan.history
        old_key = layer.scratch.gather(0, layer.key_pages, slots)[first:stop].transpose(0, 1)[None]
        old_value = layer.scratch.gather(1, layer.value_pages, slots)[first:stop].transpose(0, 1)[
            None
        ]
    if plan.tiles:
        return _attend_tiles(
            plan.tiles,
            query,
            torch.cat([old_key, key], 2),
            torch.cat([old_value, value], 2),
            scaling,
        )
    old, old_lse = _flash(query, old_key, old_value, scale=scaling)
    new, new_lse = _flash(query, key, value, is_causal=True, scale=scaling)
    weight = torch.sigmoid(old_lse - new_lse)[..., None]
    return torch.lerp(new.float(), old.float(), weight).to(query.dtype)


def _attend_tiles(
    tiles: tuple[Tile, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    parts = [
        _flash(
            query[:, :, t.first : t.stop],
            key[:, :, t.key_first : t.key_stop],
            value[:, :, t.key_first : t.key_stop],
            bias=t.bias,
            scale=scaling,
        )[0]
        for t in tiles
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
