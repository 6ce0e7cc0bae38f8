"""The index tensors of one step for kernels that follow block tables themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from coldpage.engine.attention.paged_attention import LayerPages
from coldpage.engine.attention.step_plan import (
    ChunkPlan,
    GroupPlan,
    ItemSpan,
    Write,
    index_tensor,
    plan_chunk,
    slot_tensor,
    write_places,
)
from coldpage.kernels.decode_attention import decode_programs
from coldpage.kernels.decode_plan import DecodeBatch, DecodeParts, plan_decode
from coldpage.types import Int32Array

__all__ = ["plan_kernel_group", "plan_parts"]


def plan_parts(pages: LayerPages, num_tokens: Int32Array) -> DecodeParts:
    """Pure. ``num_tokens`` [batch] are visible in each row, with the new one; 0: no row there."""
    return plan_decode(
        num_tokens,
        tokens_per_block=pages.keys.tokens_per_block,
        num_kv_heads=pages.keys.num_kv_heads,
        programs=decode_programs(pages.keys, pages.values),
        window=pages.window,
    )


def plan_kernel_group(pages: LayerPages, items: list[ItemSpan], dtype: torch.dtype) -> GroupPlan:
    """Pure: the index tensors of a step for the layers whose first one has ``pages``. ``dtype`` is
    the model's."""
    tokens_per_block, window = pages.keys.tokens_per_block, pages.window
    decode = [item for item in items if item.num_tokens == 1]
    slots, offsets = write_places(items, tokens_per_block, window)
    reads_back = pages.reads_back(dtype)
    chunks: tuple[ChunkPlan, ...] = tuple(
        plan_chunk(item, tokens_per_block, window, dtype, has_whole=reads_back)
        for item in items
        if item.num_tokens > 1
    )
    is_mixed = 0 < len(decode) < len(items)
    return GroupPlan(
        write=Write(slot_tensor(slots), slot_tensor(offsets), None),
        decode_rows=index_tensor([item.row for item in decode]) if is_mixed else None,
        decode=_plan_batch(pages, decode) if decode else None,
        chunks=chunks,
    )


def _plan_batch(pages: LayerPages, items: list[ItemSpan]) -> DecodeBatch:
    num_tokens = np.array([item.start + 1 for item in items], np.int32)
    num_blocks = -(-num_tokens // pages.keys.tokens_per_block)
    tables: npt.NDArray[np.int32] = np.full((len(items), num_blocks.max()), -1, np.int32)
    for row, item, blocks in zip(tables, items, num_blocks.tolist(), strict=True):
        row[:blocks] = item.slots[:blocks]
    parts = plan_parts(pages, num_tokens)
    return DecodeBatch(*(slot_tensor(t) for t in (tables, num_tokens, *parts)))
