"""Attention over pages, for transformers models that are otherwise unchanged.

A step packs the new tokens of many sequences into one row. ``plan_group`` turns the step's block
tables into index tensors, once per layer group; ``PagedLayer`` (what the model takes for its cache)
writes K and V into pages; ``paged_attention`` (what the model takes for its attention function)
attends to them:

* items of one token, together: their live blocks are gathered and cut into equal segments, which
  are the batch of one dense call; segments of a sequence merge by log-sum-exp. Segments keep all
  cores busy when there are few KV heads.
* an item of several tokens: history without a mask and the new tokens causally, merged by
  log-sum-exp. Where a sliding window cuts the history, tiles of queries with an explicit mask.

Nothing but the live positions of a sequence's own pages reaches a result: the others are cut off,
or zeroed and masked (zeroed too, since 0 x NaN is NaN).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from coldpage.engine.dense_attention import DenseAttention
from coldpage.engine.step_plan import ChunkPlan, DecodePlan, GroupPlan, Tile

__all__ = [
    "ATTENTION_NAME",
    "CURRENT_CACHE",
    "PagedCache",
    "PagedLayer",
    "Scratch",
    "paged_attention",
    "register_attention",
]

ATTENTION_NAME: Final = "coldpage_paged"


class Scratch:
    """Memory that gathers reuse from layer to layer and step to step. It grows to the largest
    gather seen."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def gather(self, layer: PagedLayer, slots: torch.Tensor) -> torch.Tensor:
        """Copies the pages of ``slots``: K and V, [2, positions, kv_heads, head_dim], valid until
        the next call."""
        shape = layer.key_pages.shape
        num_blocks = slots.shape[0]
        wanted = 2 * num_blocks * shape[1] * shape[2] * shape[3]
        if self._buffer.shape[0] < wanted:
            self._buffer = self._buffer.new_empty(wanted)
        pages = self._buffer[:wanted].view(2, num_blocks, shape[1], shape[2], shape[3])
        torch.index_select(layer.key_pages, 0, slots, out=pages[0])
        torch.index_select(layer.value_pages, 0, slots, out=pages[1])
        return pages.view(2, num_blocks * shape[1], shape[2], shape[3])


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's pages as the model's cache layer. ``plan`` is set for the time of a step."""

    is_compileable = False

    def __init__(
        self,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        window: int | None,
        scratch: Scratch,
        dense: DenseAttention,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key_pages = (
            key_pages  # [num_slots, tokens_per_block, kv_heads, head_dim], a view of the hot pool
        )
        self.value_pages = value_pages
        self.window = window
        self.scratch = scratch
        self.dense = dense
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
    dense call."""
    num_items, num_heads, head_dim = query.shape
    gathered = layer.scratch.gather(layer, plan.slots)
    kv_heads = gathered.shape[2]
    grouped = query.reshape(num_items, kv_heads, num_heads // kv_heads, head_dim)
    if plan.live is not None:
        first, stop = plan.live
        keys, values = gathered[:, None, first:stop].transpose(2, 3)
        return layer.dense(grouped, keys, values, scale=scaling)[0].reshape(1, num_heads, head_dim)
    gathered.index_fill_(1, plan.dead, 0.0)
    keys, values = gathered.view(
        2, plan.num_segments, plan.segment_tokens, kv_heads, head_dim
    ).transpose(2, 3)
    if plan.merge is not None:
        grouped = grouped[plan.merge.item_of]
    elif num_items == 1:
        grouped = grouped.expand(plan.num_segments, -1, -1, -1)
    out, lse = layer.dense(grouped, keys, values, bias=plan.bias, scale=scaling)
    if plan.merge is not None:
        weights = torch.softmax(lse[plan.merge.segments_of] + plan.merge.bias, dim=1)
        out = (out[plan.merge.segments_of] * weights[..., None]).sum(dim=1).to(query.dtype)
    elif num_items == 1:
        out = (out * torch.softmax(lse, dim=0)[..., None]).sum(dim=0).to(query.dtype)
    return out.reshape(num_items, num_heads, head_dim)


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
        return layer.dense(query, key, value, is_causal=True, scale=scaling)[0]
    old_key, old_value = key[:, :, :0], value[:, :, :0]
    if plan.history is not None:
        slots, first, stop = plan.history
        gathered = layer.scratch.gather(layer, slots)
        old_key, old_value = gathered[:, None, first:stop].transpose(2, 3)
    if plan.tiles:
        return _attend_tiles(
            layer.dense,
            plan.tiles,
            query,
            torch.cat([old_key, key], 2),
            torch.cat([old_value, value], 2),
            scaling,
        )
    old, old_lse = layer.dense(query, old_key, old_value, scale=scaling)
    new, new_lse = layer.dense(query, key, value, is_causal=True, scale=scaling)
    weight = torch.sigmoid(old_lse - new_lse)[..., None]
    return torch.lerp(new.float(), old.float(), weight).to(query.dtype)


def _attend_tiles(
    dense: DenseAttention,
    tiles: tuple[Tile, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    parts = [
        dense(
            query[:, :, t.first : t.stop],
            key[:, :, t.key_first : t.key_stop],
            value[:, :, t.key_first : t.key_stop],
            bias=t.bias,
            scale=scaling,
        )[0]
        for t in tiles
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
