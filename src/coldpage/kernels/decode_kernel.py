"""The Triton kernels of decode attention: items, the merge of a row's items, and blocks' shares.

Of items, tokens are the rows of every product and heads its columns, of which a tensor core takes
as few as eight: the heads of one KV head are rarely more. Scores are in base 2. A maximum of -inf,
where nothing is live, is subtracted as 0, so that no weight becomes NaN.

The launchers are in ``decode_attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coldpage.kernels.decode_tiles import (
    add_values,
    decayed,
    offset_starts,
    query_parts,
    scores_of,
    value_of,
    zero_sums,
)

__all__ = ["LN_2", "LOG2_E", "attend_items", "merge_items", "sum_blocks"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _soft_capped(score, softcap):
    """softcap * tanh(score / softcap), by an exponential that can not overflow."""
    decay = tl.exp2(tl.abs(score / softcap) * LOG2_E * -2.0)
    return tl.where(score < 0, -softcap, softcap) * (1.0 - decay) / (1.0 + decay)


@triton.jit
def _finite(peak):
    """What is subtracted from scores whose largest is ``peak``."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _log_sum(peak, total):
    """In base 2: of ``total`` exponentials that were made smaller by ``peak``."""
    some = total > 0
    return tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def _tile_slots(table, block, stop, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Of each token and of each block of the tile that begins with ``block``: negative from
    ``stop`` on."""
    of_tokens = block + tl.arange(0, TILE) // BLOCK
    of_blocks = block + tl.arange(0, TILE // BLOCK)
    return (
        tl.load(table + of_tokens, mask=of_tokens < stop, other=-1),
        tl.load(table + of_blocks, mask=of_blocks < stop, other=-1),
    )


@triton.jit
def _store_block_sums(to, score, block, stop, num_heads, head, is_head, BLOCK: tl.constexpr):
    """The log-sum-exp of each block of a tile's scores, for each head."""
    TILE: tl.constexpr = score.shape[0]
    BLOCKS: tl.constexpr = TILE // BLOCK
    by_block = tl.reshape(score, [BLOCKS, BLOCK, score.shape[1]])
    peak = _finite(tl.max(by_block, 1))
    lse = _log_sum(peak, tl.sum(tl.exp2(by_block - peak[:, None, :]), 1))
    blocks = block + tl.arange(0, BLOCKS)
    at = blocks[:, None] * num_heads + head[None, :]
    tl.store(to + at, lse, mask=is_head[None, :] & (blocks < stop)[:, None])


@triton.jit
def _is_live(slot, position, length, settings, HAS_WINDOW: tl.constexpr):
    """Whether a token is there and seen."""
    live = (slot >= 0) & (position < length)
    if HAS_WINDOW:
        live = live & ((position >= length - settings[2]) | (position < settings[3]))
    return live


@triton.jit
def _masked(score, live, settings, HAS_SOFTCAP: tl.constexpr):
    """Products of queries and keys as scores in base 2: -inf where no token is live."""
    score = score * settings[0]
    if HAS_SOFTCAP:
        score = _soft_capped(score, settings[1])
    return tl.where(live[:, None], score, float("-inf"))


@triton.jit
def _weigh(score, top, total):
    """Weights of a tile's tokens, relative to the largest score up to here; what those before
    decay by; that score, and the sum of all weights, in place of ``top`` and ``total``."""
    new_top = tl.maximum(top, tl.max(score, 0))
    shift = _finite(new_top)
    weights = tl.exp2(score - shift[None, :])
    decay = tl.exp2(top - shift)
    return weights, decay, new_top, total * decay + tl.sum(weights, 0)


@triton.jit
def _store_item(to, is_head, sums, top, total, VALUE: tl.constexpr, IS_ASM: tl.constexpr):
    """Sums, divided by the sum of their weights, and its logarithm. ``to``: pointers for
    both, [heads]."""
    NUMBERS: tl.constexpr = VALUE[1]
    WIDTH: tl.constexpr = VALUE[2]
    NUM: tl.constexpr = VALUE[3]
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    column = tl.arange(0, WIDTH)
    for part in tl.static_range(NUM):
        at = to[0][None, :] + (part * NUMBERS + column)[:, None]
        mask = is_head[None, :] & (column < NUMBERS)[:, None]
        tl.store(at, value_of(sums, part, VALUE, IS_ASM) * inverse[None, :], mask=mask)
    tl.store(to[1], _log_sum(top, total), mask=is_head)


@triton.jit
def attend_items(
    query,
    keys,
    key_strides,
    values,
    value_strides,
    codebook,
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
    """One program attends to the items of one share for one KV head. ``query``: a pointer, strides
    of rows and heads. ``keys``, ``values``: stored values and scales; ``KEY``, ``VALUE``: their
    ``_Parts``. ``settings``: scale, soft cap (both in base 2), window, sinks. ``outputs``:
    ``_ItemResults``."""
    tables, table_row, num_tokens, items, shares = batch
    part_out, part_lse, block_lse = outputs
    GROUP: tl.constexpr = HEADS[0]
    COLUMNS: tl.constexpr = HEADS[1]
    HEAD_DIM: tl.constexpr = HEADS[2]
    BLOCK: tl.constexpr = HEADS[3]
    IS_ASM: tl.constexpr = FLAGS[0]
    IS_AHEAD: tl.constexpr = FLAGS[1]
    HAS_WINDOW: tl.constexpr = FLAGS[2]
    HAS_SOFTCAP: tl.constexpr = FLAGS[3]
    WANT_MASS: tl.constexpr = FLAGS[4]
    kv_head, share = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    column = tl.arange(0, COLUMNS)
    is_head, head = column < GROUP, kv_head * GROUP + column
    keys = (keys[0] + kv_head * key_strides[2], keys[1] + kv_head * key_strides[7])
    values = (values[0] + kv_head * value_strides[2], values[1] + kv_head * value_strides[7])
    BLOCKS: tl.constexpr = TILE // BLOCK
    token = tl.arange(0, TILE)
    for item in range(tl.load(shares + share), tl.load(shares + share + 1)):
        row, first = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
        stop, length = tl.load(items + item * 4 + 2), tl.load(num_tokens + row)
        queries = query_parts(query[0] + row * query[1] + head * query[2], is_head, KEY)
        starts = offset_starts(queries, KEY, COLUMNS, IS_ASM)
        top = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        sums = zero_sums(VALUE, COLUMNS, TILE)
        table = tables + row.to(tl.int64) * table_row
        sums_to = block_lse + row.to(tl.int64) * table_row * num_heads
        if IS_AHEAD:
            next_slots = _tile_slots(table, first, stop, TILE, BLOCK)
        for block in tl.range(first, stop, BLOCKS, num_stages=STAGES):
            if IS_AHEAD:
                slot, block_slots = next_slots
                next_slots = _tile_slots(table, block + BLOCKS, stop, TILE, BLOCK)
            else:
                slot, block_slots = _tile_slots(table, block, stop, TILE, BLOCK)
            live = _is_live(slot, block * BLOCK + token, length, settings, HAS_WINDOW)
            places = (slot.to(tl.int64), token % BLOCK, live, block_slots)
            score = scores_of(queries, starts, keys, key_strides, places, codebook, KEY, IS_ASM)
            score = _masked(score, live, settings, HAS_SOFTCAP)
            if WANT_MASS:
                _store_block_sums(sums_to, score, block, stop, num_heads, head, is_head, BLOCK)
            weights, decay, top, total = _weigh(score, top, total)
            sums = decayed(sums, decay, VALUE)
            sums = add_values(sums, weights, values, value_strides, places, codebook, VALUE, IS_ASM)
        at = item * num_heads + head
        to = part_out + at * HEAD_DIM, part_lse + at
        _store_item(to, is_head, sums, top, total, VALUE, IS_ASM)


@triton.jit
def merge_items(
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
        shift = _finite(new_top)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(top - shift)
        sums = sums * decay + tl.sum(weights[:, None] * new, 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    if HAS_SINKS:
        if stop > first:
            sink = tl.load(sink_logits + head).to(tl.float32) * LOG2_E
            new_top = tl.maximum(top, sink)
            shift = _finite(new_top)
            decay = tl.exp2(top - shift)
            sums = sums * decay
            total = total * decay + tl.exp2(sink - shift)
            top = new_top
    result = sums / tl.where(total > 0, total, 1.0)
    tl.store(out[0] + row * out[1] + head * out[2] + column, result, mask=is_number)
    if WANT_LSE:
        tl.store(lse_out + row * num_heads + head, _log_sum(top, total) * LN_2)


@triton.jit
def sum_blocks(
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
    """``mass`` [batch, max_blocks]: the probabilities of blocks that were seen, over heads, 0 for
    the others. ``lse`` is of rows, in base e."""
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
    total = tl.load(lse + row * num_heads + head, mask=head < num_heads, other=0) * LOG2_E
    at = (row * table_row + block)[:, None] * num_heads + head[None, :]
    mask = seen[:, None] & (head < num_heads)[None, :]
    score = tl.load(block_lse + at, mask=mask, other=0)
    share = tl.where(mask, tl.exp2(score - total[None, :]), 0.0)
    tl.store(mass + row * max_blocks + block, tl.sum(share, 1), mask=inside)
