"""Attention over pages by kernels that read them where they are, and write them there.

* items of one token read their pages through block tables, whatever their number and type;
* an item of several tokens has its live pages gathered into a row once a layer, for operators that
  reach the speed of large matrix products only there. Where pages hold what the model made, the new
  tokens' own K and V are taken as they come; else they are read back with the history.
"""

from __future__ import annotations

import torch

from coldpage.engine.attention.dense_attention import DenseAttention
from coldpage.engine.attention.dense_pages import attend_tiles
from coldpage.engine.attention.kernel_plan import plan_kernel_group
from coldpage.engine.attention.paged_attention import LayerPages, Scoring, Scratch, with_sinks
from coldpage.engine.attention.step_plan import ChunkPlan, Gather, GroupPlan, ItemSpan, Write
from coldpage.kernels.decode_attention import decode_attention
from coldpage.kernels.decode_plan import AttentionOptions, DecodeBatch
from coldpage.kernels.gather_pages import gather_pages
from coldpage.kernels.kv_types import KVPages, page_views
from coldpage.kernels.merge_attention import merge_attention
from coldpage.kernels.write_pages import write_pages

__all__ = ["KernelPages"]


class KernelPages:
    """See PagedAttention. On a GPU; on the CPU under Triton's interpreter."""

    def __init__(self, dense: DenseAttention, scratch: Scratch, dtype: torch.dtype) -> None:
        self._dense = dense
        self._scratch = scratch
        self._dtype = dtype

    def plan(self, pages: LayerPages, items: list[ItemSpan]) -> GroupPlan:
        """See PagedAttention."""
        return plan_kernel_group(pages, items, self._dtype)

    def write(
        self, pages: LayerPages, write: Write, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PagedAttention. They come back as they are; ``attend_chunk`` reads the pages."""
        new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        write_pages(pages.keys, pages.values, new_keys, new_values, write.slots, write.offsets)
        return key, value

    def attend_decode(
        self, pages: LayerPages, plan: GroupPlan, query: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See PagedAttention."""
        batch = plan.decode
        assert isinstance(batch, DecodeBatch)
        options = AttentionOptions(_scale_of(query, scoring.scale), pages.window)
        result = decode_attention(
            query, pages.keys, pages.values, batch, options, sink_logits=scoring.sinks
        )
        return result.out

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
        if plan.tiles:
            return self._attend_window(pages, plan, query, key, value, scoring)
        old_key, old_value = key[:, :, :0], value[:, :, :0]
        if plan.whole is not None:
            keys, values = self._gather(pages, plan.whole)
            split = keys.shape[2] - plan.num_tokens
            old_key, old_value = keys[:, :, :split], values[:, :, :split]
            key, value = keys[:, :, split:], values[:, :, split:]
        elif plan.history is not None:
            old_key, old_value = self._gather(pages, plan.history)
        sinks = None if scoring.sinks is None else scoring.sinks[:, None]
        new, new_lse = self._dense(query, key, value, is_causal=True, scale=scoring.scale)
        if old_key.shape[2] == 0:
            return with_sinks(new, new_lse, sinks)
        old, old_lse = self._dense(query, old_key, old_value, scale=scoring.scale)
        # As the model goes on with it: heads beside each other in each position.
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        _, lse = merge_attention(old, old_lse, new, new_lse, out=out.transpose(1, 2))
        return with_sinks(out.transpose(1, 2), lse, sinks)

    def _attend_window(
        self,
        pages: LayerPages,
        plan: ChunkPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        if pages.reads_back(self._dtype):
            key, value = self._as_stored(pages, key, value)
        if plan.history is not None:
            old_key, old_value = self._gather(pages, plan.history)
            key, value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
        return attend_tiles(self._dense, plan.tiles, query, key, value, scoring)

    def _gather(self, pages: LayerPages, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the live positions of K and V, [1, kv_heads, positions, head_dim] each, valid
        until the next call."""
        keys = pages.keys
        num_positions = gather.slots.shape[0] * keys.tokens_per_block
        out = self._scratch.take(2, keys.num_kv_heads, num_positions, keys.head_dim)
        gather_pages(pages.keys, gather.slots, out[0])
        gather_pages(pages.values, gather.slots, out[1])
        live = out[:, None, :, gather.first : gather.stop]
        return live[0], live[1]

    def _as_stored(
        self, pages: LayerPages, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New vectors as pages hold them, by way of pages of this call's own: behind a sliding
        window a new token may have none."""
        num_tokens, block = key.shape[2], pages.keys.tokens_per_block
        num_blocks = -(-num_tokens // block)
        keys = _own_pages(pages.keys, num_blocks, is_value=False)
        values = _own_pages(pages.values, num_blocks, is_value=True)
        place = torch.arange(num_tokens, dtype=torch.int32, device=key.device)
        slots = torch.arange(num_blocks, dtype=torch.int32, device=key.device)
        own = LayerPages(keys, values, None)
        self.write(own, Write(place // block, place % block, None), key, value)
        out = key.new_empty(2, key.shape[1], num_blocks * block, key.shape[3])
        for part, gathered in zip((keys, values), out, strict=True):
            gather_pages(part, slots, gathered)
        return out[:1, :, :num_tokens], out[1:, :, :num_tokens]


def _own_pages(like: KVPages, num_blocks: int, *, is_value: bool) -> KVPages:
    block, kv_heads, head_dim = like.tokens_per_block, like.num_kv_heads, like.head_dim
    num_bytes = block * kv_heads * like.kv_type.vector_bytes(head_dim)
    pool = torch.zeros(num_blocks, num_bytes, dtype=torch.uint8, device=like.values.device)
    return page_views(pool, like.kv_type, block, kv_heads, head_dim, is_value=is_value)


def _scale_of(query: torch.Tensor, scale: float | None) -> float:
    head_dim: int = query.shape[-1]
    return head_dim**-0.5 if scale is None else scale
