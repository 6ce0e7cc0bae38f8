"""Attention of one new token a sequence over its pages: scattered, packed, some of them missing.

    query   [batch, heads, head_dim], the heads of one KV head beside each other
    keys    KVPages: values [num_slots, tokens_per_block, kv_heads, parts, part_values] and scales
    tables  [batch, max_blocks] int32: the slot of each block, negative where there is no page
    items   [num_items, 4] int32: a row of the batch and some of its blocks

One program computes one item for one KV head: all its query heads share one read of K and V. What
it makes, a normalised output and its log-sum-exp, is merged for each row by a second kernel. A
position without a page, outside the window or beyond the end has no weight at all.

Tokens are the rows of every product and heads its columns, of which a tensor core takes as few as
eight: the heads of one KV head are rarely more.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from coldpage.kernels.decode_plan import AttentionOptions, DecodeBatch, DecodeResult
from coldpage.kernels.decode_tiles import (
    add_values,
    decayed,
    offset_starts,
    query_parts,
    scores_of,
    value_of,
    zero_sums,
)
from coldpage.kernels.kv_types import KVPages
from coldpage.kernels.packing import IS_PLAIN, IS_Q8_0, IS_TURBO4, chunks_of
from coldpage.kernels.rotation import codebook

__all__ = ["decode_attention", "decode_programs"]

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_MIN_HEADS: Final = 8  # columns of a product
_MIN_WIDTH: Final = 16  # numbers that a product adds up
# Items that the merge reads at a time.
_MERGE_ITEMS: Final = 16
_MASS_BLOCKS: Final = 32
_NUM_PROCESSORS: Final = 132  # where there is no GPU to ask


@triton.jit  # type: ignore[untyped-decorator]
def _soft_capped(score, softcap):  # type: ignore[no-untyped-def]
    """softcap * tanh(score / softcap), by an exponential that can not overflow."""
    decay = tl.exp2(tl.abs(score / softcap) * _LOG2_E * -2.0)
    return tl.where(score < 0, -softcap, softcap) * (1.0 - decay) / (1.0 + decay)


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum(peak, total):  # type: ignore[no-untyped-def]
    """In base 2: of ``total`` exponentials that were made smaller by ``peak``."""
    some = total > 0
    return tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    key_strides,
    values,
    value_strides,
    codebook_ptr,
    batch,
    outputs,
    settings,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``keys`` and ``values``: values and scales; their strides one after the other. ``KEY`` and
    ``VALUE``: kind, numbers of a part, the same up to a power of two, parts, type of products. ``outputs``:
    f32 [num_items, heads, head_dim], and log-sum-exps of items, [num_items, heads], and
    of blocks, [batch, max_blocks, heads]."""
    query_ptr, query_row, query_head = query
    tables, table_row, num_tokens, items = batch
    part_out, part_lse, block_lse = outputs
    scale, softcap, window, num_sinks = settings
    GROUP: tl.constexpr = HEADS[0]
    GROUP_PAD: tl.constexpr = HEADS[1]
    BLOCK: tl.constexpr = HEADS[2]
    HEAD_DIM: tl.constexpr = HEADS[3]
    NUMBERS: tl.constexpr = VALUE[1]
    WIDTH: tl.constexpr = VALUE[2]
    NUM: tl.constexpr = VALUE[3]
    BLOCKS: tl.constexpr = TILE // BLOCK
    IS_ASM: tl.constexpr = FLAGS[0]
    HAS_WINDOW: tl.constexpr = FLAGS[1]
    HAS_SOFTCAP: tl.constexpr = FLAGS[2]
    WANT_MASS: tl.constexpr = FLAGS[3]
    IS_AHEAD: tl.constexpr = FLAGS[4]
    kv_head, item = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    row = tl.load(items + item * 4)
    if row < 0:
        return
    first = tl.load(items + item * 4 + 1)
    stop = tl.load(items + item * 4 + 2)
    length = tl.load(num_tokens + row)
    group = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + group
    is_head = group < GROUP
    queries = query_parts(query_ptr + row * query_row + head * query_head, is_head, KEY)
    starts = offset_starts(queries, KEY, GROUP_PAD, IS_ASM)
    keys = (keys[0] + kv_head * key_strides[2], keys[1] + kv_head * key_strides[7])
    values = (values[0] + kv_head * value_strides[2], values[1] + kv_head * value_strides[7])
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = zero_sums(VALUE, GROUP_PAD, TILE)
    token = tl.arange(0, TILE)
    table = tables + row.to(tl.int64) * table_row
    if IS_AHEAD:
        ordinal = first + token // BLOCK
        next_slot = tl.load(table + ordinal, mask=ordinal < stop, other=-1)
    for block in tl.range(first, stop, BLOCKS, num_stages=STAGES):
        if IS_AHEAD:
            slot = next_slot
            ordinal = block + BLOCKS + token // BLOCK
            next_slot = tl.load(table + ordinal, mask=ordinal < stop, other=-1)
        else:
            ordinal = block + token // BLOCK
            slot = tl.load(table + ordinal, mask=ordinal < stop, other=-1)
        slot = tl.max_constancy(slot, [BLOCK])
        position = block * BLOCK + token
        live = (slot >= 0) & (position < length)
        if HAS_WINDOW:
            live = live & ((position >= length - window) | (position < num_sinks))
        places = (slot.to(tl.int64), token % BLOCK, slot >= 0, live)
        score = (
            scores_of(queries, starts, keys, key_strides, places, codebook_ptr, KEY, IS_ASM) * scale
        )
        if HAS_SOFTCAP:
            score = _soft_capped(score, softcap)
        score = tl.where(live[:, None], score, float("-inf"))
        if WANT_MASS:
            by_block = tl.reshape(score, [BLOCKS, BLOCK, GROUP_PAD])
            peak = tl.max(by_block, 1)
            peak = tl.where(peak == float("-inf"), 0.0, peak)
            lse = _log_sum(peak, tl.sum(tl.exp2(by_block - peak[:, None, :]), 1))
            blocks = block + tl.arange(0, BLOCKS)
            at = (row.to(tl.int64) * table_row + blocks)[:, None] * num_heads + head[None, :]
            tl.store(block_lse + at, lse, mask=is_head[None, :] & (blocks < stop)[:, None])
        new_top = tl.maximum(top, tl.max(score, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(score - shift[None, :])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 0)
        sums = decayed(sums, decay, VALUE)
        sums = add_values(sums, weights, values, value_strides, places, codebook_ptr, VALUE, IS_ASM)
        top = new_top
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    column = tl.arange(0, WIDTH)
    at = item * num_heads + head
    for part in tl.static_range(NUM):
        to = part_out + at[None, :] * HEAD_DIM + (part * NUMBERS + column)[:, None]
        mask = is_head[None, :] & (column < NUMBERS)[:, None]
        tl.store(to, value_of(sums, part, VALUE, IS_ASM) * inverse[None, :], mask=mask)
    tl.store(part_lse + at, _log_sum(top, total), mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    parts,
    first_items,
    sink_logits,
    out,
    lse_out,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WANT_LSE: tl.constexpr,
):
    """One program merges the items of one row for one head. ``out`` is a pointer and the strides of
    its rows and heads."""
    part_out, part_lse = parts
    row, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    first = tl.load(first_items + row)
    stop = tl.load(first_items + row + 1)
    column = tl.arange(0, WIDTH)
    is_number = column < HEAD_DIM
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    sums = tl.zeros([WIDTH], tl.float32)
    for start in range(first, stop, ITEMS):
        item = start + tl.arange(0, ITEMS)
        at = item * num_heads + head
        lse = tl.load(part_lse + at, mask=item < stop, other=float("-inf"))
        mask = (item < stop)[:, None] & is_number[None, :]
        new = tl.load(part_out + at[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(top - shift)
        sums = sums * decay + tl.sum(weights[:, None] * new, 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    if HAS_SINKS:
        if stop > first:
            sink = tl.load(sink_logits + head).to(tl.float32) * _LOG2_E
            new_top = tl.maximum(top, sink)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            decay = tl.exp2(top - shift)
            sums = sums * decay
            total = total * decay + tl.exp2(sink - shift)
            top = new_top
    result = sums / tl.where(total > 0, total, 1.0)
    tl.store(out[0] + row * out[1] + head * out[2] + column, result, mask=is_number)
    if WANT_LSE:
        tl.store(lse_out + row * num_heads + head, _log_sum(top, total) * _LN_2)


@triton.jit  # type: ignore[untyped-decorator]
def _mass_kernel(  # type: ignore[no-untyped-def]
    block_lse,
    lse,
    mass,
    batch,
    num_heads,
    settings,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """``mass`` [batch, max_blocks] of blocks that were seen, 0 for the others."""
    tables, table_row, num_tokens = batch
    window, num_sinks, max_blocks = settings
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    head = tl.arange(0, HEADS)
    length = tl.load(num_tokens + row)
    inside = block < max_blocks
    seen = inside & (block * BLOCK < length)
    if HAS_WINDOW:
        seen = seen & (((block + 1) * BLOCK > length - window) | (block * BLOCK < num_sinks))
    seen = seen & (tl.load(tables + row * table_row + block, mask=seen, other=-1) >= 0)
    total = tl.load(lse + row * num_heads + head, mask=head < num_heads, other=0) * _LOG2_E
    at = (row * table_row + block)[:, None] * num_heads + head[None, :]
    mask = seen[:, None] & (head < num_heads)[None, :]
    score = tl.load(block_lse + at, mask=mask, other=0)
    share = tl.where(mask, tl.exp2(score - total[None, :]), 0.0)
    tl.store(mass + row * max_blocks + block, tl.sum(share, 1), mask=inside)


class _Parts(NamedTuple):
    """How products cut a vector. A byte of turbo4 is two numbers, so its parts are halves."""

    kind: int
    numbers: int
    width: int
    num_parts: int
    dot_type: Any


class _Tuning(NamedTuple):
    """What is fastest on an H200. ``is_ahead``: slots are read a tile ahead, so that pages can be
    read several ahead; that takes registers, and helps where programs are few or short of work."""

    tile_tokens: int
    num_warps: int
    num_stages: int
    is_ahead: bool
    programs_per_processor: int
    max_registers: int | None = None


def _parts_of(pages: KVPages, is_key: bool) -> _Parts:
    kind, numbers, width, num_parts, _ = chunks_of(pages.kv_type, 1, pages.head_dim)
    if kind == IS_TURBO4.value:
        numbers, width, num_parts = numbers // 2, width // 2, num_parts * 2
    if not _is_gpu(pages.values) or pages.values.dtype == torch.float32:
        dot_type = tl.float32
    elif pages.values.dtype == torch.float16 or (kind == IS_Q8_0.value and is_key):
        # int8 becomes f16 in fewer steps; values keep bf16, so that weights times scales have range.
        dot_type = tl.float16
    else:
        dot_type = tl.bfloat16
    return _Parts(kind, numbers, max(_MIN_WIDTH, width), num_parts, dot_type)


def _is_gpu(tensor: torch.Tensor) -> bool:
    """Whether it is a GPU's code that is made: the interpreter knows no instructions, and
    multiplies in float32."""
    return tensor.device.type == "cuda"


def _tuning(keys: KVPages, values: KVPages) -> _Tuning:
    kinds = {chunks_of(pages.kv_type, 1, pages.head_dim).kind for pages in (keys, values)}
    if IS_TURBO4.value in kinds:
        return _Tuning(32, 1, 3, True, 12)
    if IS_Q8_0.value in kinds:
        return _Tuning(64, 2, 3, True, 8, 128)
    vector_bytes = max(keys.head_dim * pages.values.element_size() for pages in (keys, values))
    if vector_bytes <= 128:
        return _Tuning(64, 2, 3, False, 4)
    if vector_bytes <= 256:
        return _Tuning(64, 4, 3, False, 4)
    if vector_bytes <= 512:
        return _Tuning(32, 2, 4, False, 4)
    return _Tuning(32, 4, 2, False, 2)


def decode_programs(keys: KVPages, values: KVPages) -> int:
    """How many programs of ``decode_attention`` on such pages the device runs at a time: what to
    plan for."""
    device = keys.values.device
    num_processors = _NUM_PROCESSORS
    if device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return num_processors * _tuning(keys, values).programs_per_processor


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
    kv_heads, block = keys.num_kv_heads, keys.tokens_per_block
    assert num_heads % kv_heads == 0 and head_dim == keys.head_dim == values.head_dim
    assert query.stride(2) == 1 and batch.tables.stride(1) == 1 and batch.items.is_contiguous()
    num_items = batch.items.shape[0]
    key, value = _parts_of(keys, True), _parts_of(values, False)
    tuning = _tuning(keys, values)
    group = num_heads // kv_heads
    part_out = query.new_empty(num_items, num_heads, head_dim, dtype=torch.float32)
    part_lse = query.new_empty(num_items, num_heads, dtype=torch.float32)
    table_row = batch.tables.stride(0)
    block_lse = part_lse.new_empty(num_rows, table_row, num_heads) if want_mass else part_lse
    has_window, window = options.window is not None, options.window or 0
    log2_e, softcap = _LOG2_E.value, options.softcap or 1.0
    _decode_kernel[(kv_heads, num_items)](
        (query, query.stride(0), query.stride(1)),
        *_side(keys),
        *_side(values),
        codebook(query.device),
        (batch.tables, table_row, batch.num_tokens, batch.items),
        (part_out, part_lse, block_lse),
        (options.scale * log2_e, softcap * log2_e, window, options.num_sink_tokens),
        KEY=key,
        VALUE=value,
        HEADS=(group, max(_MIN_HEADS, triton.next_power_of_2(group)), block, head_dim),
        TILE=max(tuning.tile_tokens, block),
        FLAGS=(_is_gpu(query), has_window, options.softcap is not None, want_mass, tuning.is_ahead),
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
    )
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    want_lse = want_lse or want_mass
    lse = part_lse.new_empty(num_rows, num_heads) if want_lse else None
    _merge_kernel[(num_rows, num_heads)](
        (part_out, part_lse),
        batch.first_items,
        part_lse if sink_logits is None else sink_logits,
        (out, out.stride(0), out.stride(1)),
        part_lse if lse is None else lse,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        ITEMS=_MERGE_ITEMS,
        HAS_SINKS=sink_logits is not None,
        WANT_LSE=want_lse,
    )
    if not want_mass or lse is None:
        return DecodeResult(out, lse, None)
    max_blocks = batch.tables.shape[1]
    mass = part_lse.new_empty(num_rows, max_blocks)
    _mass_kernel[(num_rows, triton.cdiv(max_blocks, _MASS_BLOCKS))](
        block_lse,
        lse,
        mass,
        (batch.tables, table_row, batch.num_tokens),
        num_heads,
        (window, options.num_sink_tokens, max_blocks),
        BLOCK=block,
        BLOCKS=_MASS_BLOCKS,
        HEADS=triton.next_power_of_2(num_heads),
        HAS_WINDOW=has_window,
    )
    return DecodeResult(out, lse, mass)


def _side(pages: KVPages) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Tensors and strides of what is stored."""
    if pages.scales is None:
        return (pages.values, pages.values), (*pages.values.stride(), 0, 0, 0)
    return (pages.values, pages.scales), (*pages.values.stride(), *pages.scales.stride()[:3])
