"""Attention of one new token a sequence over its pages: scattered, packed, some of them missing.

    query   [batch, heads, head_dim], the heads of one KV head beside each other
    keys    KVPages: values [num_slots, tokens_per_block, kv_heads, parts, part_values] and scales
    tables  [batch, max_blocks] int32: the slot of each block, negative where there is no page
    items   [num_items, 4] int32: a row of the batch and some of its blocks
    shares  [num_shares + 1] int32: the first item of each program

One program computes the items of a share for one KV head: all its query heads share one read of K
and V. What each item gives, a normalised output and its log-sum-exp, is merged for each row by a
second kernel. A
position without a page, outside the window or beyond the end has no weight at all.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from coldpage.kernels.decode_kernel import LOG2_E, attend_items, merge_items, sum_blocks
from coldpage.kernels.decode_plan import (
    AttentionOptions,
    DecodeBatch,
    DecodePrograms,
    DecodeResult,
)
from coldpage.kernels.kv_types import KVPages
from coldpage.kernels.packing import unpack
from coldpage.kernels.packing_tiles import IS_Q8_0, IS_TURBO4, chunks_of
from coldpage.kernels.rotation import codebook

__all__ = ["decode_attention", "decode_attention_reference", "decode_programs"]

_MIN_COLUMNS: Final = 8  # of a product
_MIN_WIDTH: Final = 16  # numbers that a product adds up
_MERGE_ITEMS: Final = 16  # that a merge reads at a time
_MASS_BLOCKS: Final = 32
_NUM_WAVES: Final = 4
_NUM_PROCESSORS: Final = 132  # where there is no GPU to ask


class _Parts(NamedTuple):
    """How products cut a vector. A byte of turbo4 is two numbers, so its parts are halves."""

    kind: int
    numbers: int
    width: int
    num_parts: int
    dot_type: Any
    tokens_per_block: int


class _Tuning(NamedTuple):
    """What is fastest on an H200. ``is_ahead``: slots are read a tile ahead, so that pages can be
    read several ahead; that takes registers, and helps where programs are few or short of work.
    ``programs_per_processor`` is how many find room on one, by registers and shared memory: shares
    are even only among programs that all run."""

    tile_tokens: int
    num_warps: int
    num_stages: int
    is_ahead: bool
    programs_per_processor: int
    max_registers: int | None = None


class _ItemResults(NamedTuple):
    """What is left to merge. ``block_lse`` is any tensor where no mass is wanted."""

    out: torch.Tensor  # [num_items, heads, head_dim] f32
    lse: torch.Tensor  # [num_items, heads] f32, in base 2
    block_lse: torch.Tensor  # [batch, row stride of tables, heads] f32, in base 2


def _parts_of(pages: KVPages, *, is_key: bool) -> _Parts:
    kind, numbers, width, num_parts, _ = chunks_of(pages.kv_type, 1, pages.head_dim)
    if kind == IS_TURBO4.value:
        numbers, width, num_parts = numbers // 2, width // 2, num_parts * 2
    if not _is_gpu(pages.values) or pages.values.dtype == torch.float32:
        dot_type = tl.float32
    elif pages.values.dtype == torch.float16 or (kind == IS_Q8_0.value and is_key):
        # int8 becomes f16 in fewer steps; values keep bf16, so that weights times scales have
        # range.
        dot_type = tl.float16
    else:
        dot_type = tl.bfloat16
    width = max(_MIN_WIDTH, width)
    return _Parts(kind, numbers, width, num_parts, dot_type, pages.tokens_per_block)


def _is_gpu(tensor: torch.Tensor) -> bool:
    """Whether it is a GPU's code that is made: the interpreter knows no instructions, and
    multiplies in float32."""
    return tensor.device.type == "cuda"


def _tuning(keys: KVPages, values: KVPages) -> _Tuning:
    kinds = {chunks_of(pages.kv_type, 1, pages.head_dim).kind for pages in (keys, values)}
    if IS_TURBO4.value in kinds:
        return _Tuning(32, 1, 3, True, 12 if keys.head_dim <= 64 else 8)
    if IS_Q8_0.value in kinds:
        if keys.head_dim == 128:
            return _Tuning(64, 1, 3, False, 8)
        if keys.head_dim < 128:
            return _Tuning(64, 2, 3, False, 6, 168)
        return _Tuning(64, 2, 3, True, 3)
    vector_bytes = max(keys.head_dim * pages.values.element_size() for pages in (keys, values))
    if vector_bytes <= 128:
        return _Tuning(64, 2, 3, False, 6)
    if vector_bytes <= 256:
        return _Tuning(64, 4, 3, False, 4, 128)
    if vector_bytes <= 512:
        return _Tuning(32, 2, 4, False, 4)
    return _Tuning(32, 4, 2, False, 2)


def decode_programs(keys: KVPages, values: KVPages) -> DecodePrograms:
    """What to plan for ``decode_attention`` on such pages on their device.

    Programs start and end at a cost, and packed types notice it: they get one wave. Their pages
    are copied by engines of their own; a codec that takes processors packs plain types only.
    """
    device = keys.values.device
    num_processors = _NUM_PROCESSORS
    if device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    is_plain = keys.scales is None and values.scales is None
    num_at_a_time = num_processors * _tuning(keys, values).programs_per_processor
    return DecodePrograms(num_at_a_time, _NUM_WAVES if is_plain else 1)


def decode_attention(
    query: torch.Tensor,
    keys: KVPages,
    values: KVPages,
    batch: DecodeBatch,
    options: AttentionOptions,
    *,
    sink_logits: torch.Tensor | None = None,
    want_lse: bool = False,
    want_mass: bool = False,
) -> DecodeResult:
    """Attention of each row's newest token; enqueued on torch's current stream, without a wait, in
    launches that depend on shapes alone.

    The query comes in the space in which K is stored, and the output is in that of V. A row that
    sees no position gets an output of 0 and a log-sum-exp of -inf. ``sink_logits`` [heads] join
    the scores of every row that has a query, and take weight without giving a value.
    """
    num_rows, num_heads, head_dim = query.shape
    assert num_heads % keys.num_kv_heads == 0 and head_dim == keys.head_dim == values.head_dim
    assert query.stride(2) == 1 and batch.tables.stride(1) == 1 and batch.items.is_contiguous()
    parts = _attend_items(query, keys, values, batch, options, want_mass=want_mass)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    want_lse = want_lse or want_mass
    lse = parts.lse.new_empty(num_rows, num_heads) if want_lse else None
    merge_items[(num_rows, num_heads)](
        (parts.out, parts.lse),
        batch.first_items,
        parts.lse if sink_logits is None else sink_logits,
        (out, out.stride(0), out.stride(1)),
        parts.lse if lse is None else lse,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        ITEMS=_MERGE_ITEMS,
        HAS_SINKS=sink_logits is not None,
        WANT_LSE=want_lse,
    )
    if not want_mass or lse is None:
        return DecodeResult(out, lse, None)
    mass = _mass_of(parts.block_lse, lse, batch, options, keys.tokens_per_block)
    return DecodeResult(out, lse, mass)


def _attend_items(
    query: torch.Tensor,
    keys: KVPages,
    values: KVPages,
    batch: DecodeBatch,
    options: AttentionOptions,
    *,
    want_mass: bool,
) -> _ItemResults:
    num_rows, num_heads, head_dim = query.shape
    num_items, table_row = batch.items.shape[0], batch.tables.stride(0)
    kv_heads, block = keys.num_kv_heads, keys.tokens_per_block
    group = num_heads // kv_heads
    columns = max(_MIN_COLUMNS, triton.next_power_of_2(group))
    tuning = _tuning(keys, values)
    out = query.new_empty(num_items, num_heads, head_dim, dtype=torch.float32)
    lse = query.new_empty(num_items, num_heads, dtype=torch.float32)
    block_lse = lse.new_empty(num_rows, table_row, num_heads) if want_mass else lse
    has_window, has_softcap = options.window is not None, options.softcap is not None
    log2_e, softcap = LOG2_E.value, options.softcap or 1.0
    attend_items[(kv_heads, batch.shares.shape[0] - 1)](
        (query, query.stride(0), query.stride(1)),
        *_side(keys),
        *_side(values),
        codebook(query.device),
        (batch.tables, table_row, batch.num_tokens, batch.items, batch.shares),
        (out, lse, block_lse),
        (options.scale * log2_e, softcap * log2_e, options.window or 0, options.num_sink_tokens),
        KEY=_parts_of(keys, is_key=True),
        VALUE=_parts_of(values, is_key=False),
        HEADS=(group, columns, head_dim, block),
        TILE=max(tuning.tile_tokens, block),
        FLAGS=(_is_gpu(query), tuning.is_ahead, has_window, has_softcap, want_mass),
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
    )
    return _ItemResults(out, lse, block_lse)


def _side(pages: KVPages) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Tensors and strides of what is stored."""
    if pages.scales is None:
        return (pages.values, pages.values), (*pages.values.stride(), 0, 0, 0)
    return (pages.values, pages.scales), (*pages.values.stride(), *pages.scales.stride()[:3])


def _mass_of(
    block_lse: torch.Tensor,
    lse: torch.Tensor,
    batch: DecodeBatch,
    options: AttentionOptions,
    tokens_per_block: int,
) -> torch.Tensor:
    """[batch, max_blocks] f32; see ``DecodeResult``."""
    num_rows, max_blocks = batch.tables.shape
    mass = lse.new_empty(num_rows, max_blocks)
    sum_blocks[(num_rows, triton.cdiv(max_blocks, _MASS_BLOCKS))](
        block_lse,
        lse,
        mass,
        (batch.tables, batch.tables.stride(0), batch.num_tokens),
        lse.shape[1],
        (options.window or 0, options.num_sink_tokens, max_blocks),
        BLOCK=tokens_per_block,
        BLOCKS=_MASS_BLOCKS,
        HEADS=triton.next_power_of_2(lse.shape[1]),
        HAS_WINDOW=options.window is not None,
    )
    return mass


def decode_attention_reference(
    query: torch.Tensor,
    keys: KVPages,
    values: KVPages,
    batch: DecodeBatch,
    options: AttentionOptions,
    *,
    sink_logits: torch.Tensor | None = None,
    want_lse: bool = False,
    want_mass: bool = False,
) -> DecodeResult:
    """See ``decode_attention``, but for the types: all of it is float64, and ``items`` are not
    used. Holes may hold anything, NaN too."""
    num_rows, num_heads, head_dim = query.shape
    block, group = keys.tokens_per_block, num_heads // keys.num_kv_heads
    position = torch.arange(batch.tables.shape[1] * block, device=query.device)
    slots = batch.tables.repeat_interleave(block, 1)
    length = batch.num_tokens[:, None]
    live = (slots >= 0) & (position < length)
    if options.window is not None:
        inside = position >= length - options.window
        live &= inside | (position < options.num_sink_tokens)
    key, value = (_live_vectors(p, slots, position % block, live, group) for p in (keys, values))
    score = torch.einsum("bhd,bnhd->bhn", query.double(), key) * options.scale
    if options.softcap is not None:
        score = options.softcap * torch.tanh(score / options.softcap)
    score = score.masked_fill(~live[:, None], float("-inf"))
    lse = torch.logsumexp(score, -1)
    if sink_logits is not None:
        with_sink = torch.logaddexp(lse, sink_logits.double())
        lse = torch.where(length > 0, with_sink, lse)
    weights = torch.exp(score - lse[..., None]).masked_fill(~live[:, None], 0.0)
    out = torch.einsum("bhn,bnhd->bhd", weights, value)
    mass = weights.sum(1).view(num_rows, -1, block).sum(-1)
    return DecodeResult(
        out.view(num_rows, num_heads, head_dim),
        lse if want_lse or want_mass else None,
        mass if want_mass else None,
    )


def _live_vectors(
    pages: KVPages, slots: torch.Tensor, offsets: torch.Tensor, live: torch.Tensor, group: int
) -> torch.Tensor:
    """[batch, positions, heads, head_dim] float64, 0 where nothing is live."""
    at = (slots.clamp(min=0).long(), offsets.expand_as(slots))
    scales = None if pages.scales is None else pages.scales[at]
    vectors = unpack(pages.values[at].flatten(-2), scales, pages.kv_type, torch.float64)
    vectors = vectors.masked_fill(~live[..., None, None], 0.0)
    return vectors.repeat_interleave(group, 2)
