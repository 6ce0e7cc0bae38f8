"""Attention over pages by operators that know no pages: live pages are gathered, unpacked, and
attended to in a row.

* items of one token, together: their live blocks are gathered and cut into equal segments, which
  are the batch of one dense call; segments of a sequence merge by log-sum-exp. Segments keep all
  cores busy when there are few KV heads.
* an item of several tokens: history without a mask and the new tokens causally, merged by
  log-sum-exp. Where a sliding window cuts the history, tiles of queries with an explicit mask.

Nothing but the live positions of a sequence's own pages reaches a result: the others are cut off,
or zeroed and masked (zeroed too, since 0 x NaN is NaN).
"""

from __future__ import annotations

import torch

from coldpage.engine.attention.dense_attention import DenseAttention
from coldpage.engine.attention.paged_attention import LayerPages, Scoring, Scratch, with_sinks
from coldpage.engine.attention.step_plan import (
    ChunkPlan,
    DecodePlan,
    Gather,
    GroupPlan,
    ItemSpan,
    Tile,
    Write,
    plan_group,
)
from coldpage.kernels.kv_types import KVPages
from coldpage.kernels.packing import pack, unpack

__all__ = ["DensePages", "attend_tiles"]


class DensePages:
    """See PagedAttention. On the CPU, and what others are compared with."""

    def __init__(self, dense: DenseAttention, scratch: Scratch, dtype: torch.dtype) -> None:
        self._dense = dense
        self._scratch = scratch
        self._dtype = dtype

    def plan(self, pages: LayerPages, items: list[ItemSpan]) -> GroupPlan:
        """See PagedAttention."""
        return plan_group(items, pages.keys.tokens_per_block, pages.window, self._dtype)

    def write(
        self, pages: LayerPages, write: Write, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PagedAttention."""
        return self._write(pages.keys, write, key), self._write(pages.values, write, value)

    def _write(self, pages: KVPages, write: Write, states: torch.Tensor) -> torch.Tensor:
        new = states[0].transpose(0, 1)
        if pages.values.dtype == self._dtype:
            _put(pages.values, write, new[..., None, :])
            return states
        values, scales = pack(new, pages.kv_type)
        _put(pages.values, write, values.reshape(*new.shape[:2], *pages.values.shape[3:]))
        if pages.scales is not None and scales is not None:
            _put(pages.scales, write, scales)
        return unpack(values, scales, pages.kv_type, self._dtype).transpose(0, 1)[None]

    def attend_decode(
        self, pages: LayerPages, plan: GroupPlan, query: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See PagedAttention. The query heads of a KV head are the rows of its dense call."""
        segments = plan.decode
        assert isinstance(segments, DecodePlan)
        num_items, num_heads, head_dim = query.shape
        gathered = self._gather(pages, segments.slots)
        kv_heads = gathered.shape[1]
        grouped = query.reshape(num_items, kv_heads, num_heads // kv_heads, head_dim)
        sinks = None if scoring.sinks is None else scoring.sinks.view(kv_heads, -1)
        if segments.live is not None:
            first, stop = segments.live
            keys, values = gathered[:, None, :, first:stop]
            out, lse = self._dense(grouped, keys, values, scale=scoring.scale)
            return with_sinks(out, lse, sinks).reshape(1, num_heads, head_dim)
        gathered.index_fill_(2, segments.dead, 0.0)
        keys, values = gathered.view(
            2, kv_heads, segments.num_segments, segments.segment_tokens, head_dim
        ).transpose(1, 2)
        if segments.merge is not None:
            grouped = grouped[segments.merge.item_of]
        elif num_items == 1:
            grouped = grouped.expand(segments.num_segments, -1, -1, -1)
        out, lse = self._dense(grouped, keys, values, bias=segments.bias, scale=scoring.scale)
        out, lse = _merge_segments(out, lse, segments)
        return with_sinks(out, lse, sinks).reshape(num_items, num_heads, head_dim)

    def attend_chunk(
        self,
        pages: LayerPages,
        plan: ChunkPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """See PagedAttention."""
        old_key, old_value = self._history(pages, plan.history, key, value)
        scale, sinks = scoring.scale, _by_head(scoring.sinks)
        if plan.tiles:
            keys, values = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
            return attend_tiles(self._dense, plan.tiles, query, keys, values, scoring)
        new, new_lse = self._dense(query, key, value, is_causal=True, scale=scale)
        if plan.history is None:
            return with_sinks(new, new_lse, sinks)
        old, old_lse = self._dense(query, old_key, old_value, scale=scale)
        weight = torch.sigmoid(old_lse - new_lse)[..., None]
        out = torch.lerp(new.float(), old.float(), weight).to(query.dtype)
        return out if sinks is None else with_sinks(out, torch.logaddexp(old_lse, new_lse), sinks)

    def _history(
        self, pages: LayerPages, history: Gather | None, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if history is None:
            return key[:, :, :0], value[:, :, :0]
        gathered = self._gather(pages, history.slots)[:, None, :, history.first : history.stop]
        return gathered[0], gathered[1]

    def _gather(self, pages: LayerPages, slots: torch.Tensor) -> torch.Tensor:
        """Copies the pages of ``slots``: K and V, [2, kv_heads, positions, head_dim], valid until
        the next call."""
        keys = pages.keys
        out = self._scratch.take(
            2, keys.num_kv_heads, len(slots), keys.tokens_per_block, keys.head_dim
        )
        for part, place in zip((keys, pages.values), out, strict=True):
            _gather_pages(part, slots, place.transpose(0, 1))
        return out.flatten(2, 3)


def _put(target: torch.Tensor, write: Write, new: torch.Tensor) -> None:
    rows = new if write.rows is None else new[write.rows]
    target.index_put_((write.slots, write.offsets), rows)


def _gather_pages(pages: KVPages, slots: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` is [num_blocks, kv_heads, tokens_per_block, head_dim]."""
    values = pages.values.transpose(1, 2)
    if values.dtype == out.dtype:
        torch.index_select(values[..., 0, :], 0, slots, out=out)
        return
    scales = None if pages.scales is None else pages.scales.transpose(1, 2)[slots]
    out.copy_(unpack(values[slots].flatten(3), scales, pages.kv_type, out.dtype))


def _merge_segments(
    out: torch.Tensor, lse: torch.Tensor, plan: DecodePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_segments, kv_heads, rows, head_dim] -> [num_items, kv_heads, rows, head_dim], and the
    log-sum-exps without the last dimension."""
    if plan.merge is not None:
        parts = lse[plan.merge.segments_of] + plan.merge.bias
        weights = torch.softmax(parts, dim=1)[..., None]
        merged = (out[plan.merge.segments_of] * weights).sum(dim=1).to(out.dtype)
        return merged, torch.logsumexp(parts, dim=1)
    if plan.num_items == 1:
        merged = (out * torch.softmax(lse, dim=0)[..., None]).sum(dim=0).to(out.dtype)
        return merged, torch.logsumexp(lse, dim=0)
    return out, lse


def _by_head(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """As log-sum-exps [1, heads, queries] take them."""
    return None if sinks is None else sinks[:, None]


def attend_tiles(
    dense: DenseAttention,
    tiles: tuple[Tile, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Each tile of queries against its keys, under its mask. [1, heads, queries, head_dim]"""
    parts = []
    for tile in tiles:
        span = slice(tile.key_first, tile.key_stop)
        out, lse = dense(
            query[:, :, tile.first : tile.stop],
            key[:, :, span],
            value[:, :, span],
            bias=tile.bias,
            scale=scoring.scale,
        )
        parts.append(with_sinks(out, lse, _by_head(scoring.sinks)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
