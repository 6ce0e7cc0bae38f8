"""The Triton kernels that pack hot pages and unpack cold ones.

    pairs     [num_pages] of two int32 (dst, src) in device memory, loaded as one int64
    ordinals  [num_pages] int32: which block of its sequence a page is
    buffers   [num_buffers, 3] int64: hot base address, hot stride, offset in a cold page, in bytes
    keys      frequencies int32 [num_buffers, half], means f32 [num_buffers, heads, head_dim]
    matrix    the rotation [group, group] of +-1, in the type of the products

A program takes every n-th tile of all tiles of all buffers of all pages, so neighbours in cold
memory move at about the same time. Reads are some iterations ahead: over a link they take 2 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coldpage.kernels.cold.gpu_blobs import (
    load_codes,
    load_f16_parameters,
    load_words,
    parameters,
    pointer,
    store_codes,
    store_f16_parameters,
    store_padding,
    store_words,
)
from coldpage.kernels.cold.gpu_codes import (
    F16_LIMIT,
    int4_codes,
    int4_parameters,
    int4_word,
    inverse_of,
    largest,
    scaled_codes,
    scaled_numbers,
    whole_numbers,
    word_halves,
)
from coldpage.kernels.cold.gpu_rotated import (
    load_matrices,
    pack_rotated,
    three_bit_bytes,
    turbo3_numbers,
    turbo4_numbers,
    unrotated,
)
from coldpage.kernels.cold.gpu_vectors import (
    IS_INT4_BLOCK,
    IS_INT4_CHANNEL,
    IS_INT4_TOKEN,
    IS_TURBO4,
    heads_at,
    load_halves,
    load_present,
    of_heads,
    rows_of,
    store_halves,
    store_present,
    turned,
    turned_back,
)

__all__ = ["pack_block_kernel", "pack_kernel", "unpack_kernel"]

# What one call has and the next has not: Triton would compile once more for a number that happens
# to be 1, or a multiple of 16. What alignment there is comes as a constant.
_VARYING = ["pairs", "ordinals", "num_pages", "cold_base", "cold_page_bytes", "num_buffers"]


@triton.jit
def _plain_load(address, IS_WIDE: tl.constexpr, TILES: tl.constexpr):
    """A number of 64 or of 32 bits. Triton knows no load in it: it would copy what addresses need
    ahead too, and each iteration only one tile."""
    if IS_WIDE and TILES.is_asm:
        result = tl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=True, pack=1
        )
    elif TILES.is_asm:
        result = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        TYPE: tl.constexpr = tl.int64 if IS_WIDE else tl.int32
        result = tl.load(address.to(tl.pointer_type(TYPE)))
    return result


@triton.jit
def _sides(at, pages, buffers, IS_PACK: tl.constexpr, TILES: tl.constexpr):
    """Addresses of the hot and of the cold side of the ``at``-th buffer of all pages, which one it
    is of its page, and the page's ordinal."""
    pairs, ordinals, num_buffers, cold_base, cold_page_bytes = pages
    page = at // num_buffers
    buffer = at % num_buffers
    pair = _plain_load(pairs + page.to(tl.int64) * 8, True, TILES)
    dst = pair & 0xFFFFFFFF
    src = pair >> 32
    entry = buffers.to(tl.int64) + buffer * 24
    base = _plain_load(entry, True, TILES)
    stride = _plain_load(entry + 8, True, TILES)
    offset = _plain_load(entry + 16, True, TILES)
    hot = base + (src if IS_PACK else dst) * stride
    cold = cold_base + (dst if IS_PACK else src) * cold_page_bytes + offset
    ordinal = page
    if TILES.has_frequencies:
        ordinal = _plain_load(ordinals + page.to(tl.int64) * 4, False, TILES)
    return hot, cold, buffer, ordinal


@triton.jit
def _keys(frequencies, means, buffer, ordinal, TILES: tl.constexpr):
    if TILES.has_frequencies:
        frequencies += buffer * TILES.half
    if TILES.has_means:
        means += buffer * (TILES.heads * TILES.half * 2)
    return frequencies, means, ordinal


@triton.jit(do_not_specialize=_VARYING)
def pack_kernel(
    pairs,
    ordinals,
    num_pages,
    num_buffers,
    cold_base,
    cold_page_bytes,
    buffers,
    frequencies,
    means,
    matrix,
    NUMBER: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All formats but int4_block."""
    pages = (pairs, ordinals, num_buffers, cold_base, cold_page_bytes)
    if TILES.is_rotated:
        matrices = load_matrices(matrix, TILES.group, TILES.groups == 1, False)
    num_items = num_pages * num_buffers * TILES.num_tiles
    step = tl.num_programs(0)
    at = tl.program_id(0) // TILES.num_tiles
    hot, cold, buffer, ordinal = _sides(at, pages, buffers, True, TILES)
    for item in tl.range(tl.program_id(0), num_items, step, num_stages=STAGES):
        # What the next tile's addresses need is loaded before it is wanted.
        at = tl.minimum(item + step, num_items - 1) // TILES.num_tiles
        next_hot, next_cold, next_buffer, next_ordinal = _sides(at, pages, buffers, True, TILES)
        tile = item % TILES.num_tiles
        keys = _keys(frequencies, means, buffer, ordinal, TILES)
        IS_BY_TOKEN: tl.constexpr = TILES.kind == IS_INT4_CHANNEL
        rows = rows_of(tile, IS_BY_TOKEN, TILES)
        low, high = load_halves(pointer(hot, NUMBER, TILES.hot_alignment), rows, TILES)
        low, high = turned_back(low, high, tile, keys, IS_BY_TOKEN, TILES)
        if TILES.is_rotated:
            low, high, norm = pack_rotated(low, high, matrices, TILES)
            if TILES.kind == IS_TURBO4:
                _store_nibbles(cold, low, high, rows, TILES)
            else:
                ROW: tl.constexpr = TILES.half // 4 * 3
                store_codes(cold, three_bit_bytes(low, high), rows, ROW, ROW, TILES)
            store_f16_parameters(cold, norm, rows, TILES)
        elif TILES.kind == IS_INT4_CHANNEL:
            _pack_channels(cold, low.to(tl.float32), high.to(tl.float32), rows, tile, TILES)
        elif TILES.kind == IS_INT4_TOKEN:
            _pack_tokens(cold, low.to(tl.float32), high.to(tl.float32), rows, TILES)
        else:
            low, high, scale = scaled_codes(low.to(tl.float32), high.to(tl.float32), TILES)
            _store_8_bits(cold, low, high, rows, TILES)
            store_f16_parameters(cold, scale, rows, TILES)
        store_padding(cold, tile, TILES)
        hot, cold, buffer, ordinal = next_hot, next_cold, next_buffer, next_ordinal


@triton.jit
def _store_nibbles(cold, low, high, rows, TILES: tl.constexpr):
    packed = ((low & 15) | (high << 4)).to(tl.uint8)
    store_codes(cold, packed, rows, TILES.half, TILES.half, TILES)


@triton.jit
def _store_8_bits(cold, low, high, rows, TILES: tl.constexpr):
    low, high = low.to(tl.uint8), high.to(tl.uint8)
    if TILES.half == TILES.width:
        both = tl.permute(tl.join(low, high), [0, 2, 1])
        both = tl.reshape(both, [low.shape[0], 2 * TILES.width])
        store_codes(cold, both, rows, 2 * TILES.half, 2 * TILES.half, TILES)
    else:
        store_codes(cold, low, rows, TILES.half, 2 * TILES.half, TILES)
        store_codes(cold + TILES.half, high, rows, TILES.half, 2 * TILES.half, TILES)


@triton.jit
def _load_8_bits(cold, rows, TILES: tl.constexpr):
    if TILES.half == TILES.width:
        both = load_codes(cold, rows, 2 * TILES.width, 2 * TILES.half, 2 * TILES.half, TILES)
        both = tl.reshape(both, [both.shape[0], 2, TILES.width])
        low, high = tl.split(tl.permute(both, [0, 2, 1]))
    else:
        low = load_codes(cold, rows, TILES.width, TILES.half, 2 * TILES.half, TILES)
        high = load_codes(cold + TILES.half, rows, TILES.width, TILES.half, 2 * TILES.half, TILES)
    return low, high


@triton.jit
def _group_columns(group: tl.constexpr, TILES: tl.constexpr):
    """Which columns of the two halves are of a group of each vector: [1, width]."""
    column = tl.arange(0, TILES.width)[None, :]
    low = (column // TILES.group == group) & (column < TILES.half)
    high = ((column + TILES.half) // TILES.group == group) & (column < TILES.half)
    return low, high


@triton.jit
def _pack_tokens(cold, low, high, rows, TILES: tl.constexpr):
    """int4_token. Groups may be parts of halves, or both, or lie across."""
    GROUPS: tl.constexpr = TILES.groups
    words = ()
    low_codes = tl.zeros(low.shape, tl.int32)
    high_codes = tl.zeros(high.shape, tl.int32)
    for group in tl.static_range(GROUPS):
        in_low, in_high = _group_columns(group, TILES)
        # Limits of f16 are those of what comes of it.
        least = tl.minimum(tl.where(in_low, low, F16_LIMIT), tl.where(in_high, high, F16_LIMIT))
        most = tl.maximum(tl.where(in_low, low, -F16_LIMIT), tl.where(in_high, high, -F16_LIMIT))
        scale, minimum = int4_parameters(tl.min(least, 1), tl.max(most, 1))
        words = words + (int4_word(scale, minimum),)
        inverse = inverse_of(scale)[:, None]
        minimum = minimum.to(tl.float32)[:, None]
        low_codes = tl.where(in_low, int4_codes(low, inverse, minimum), low_codes)
        high_codes = tl.where(in_high, int4_codes(high, inverse, minimum), high_codes)
    _store_nibbles(cold, low_codes, high_codes, rows, TILES)
    store_words(cold, words, rows, TILES)


@triton.jit
def _pack_channels(cold, low, high, rows, tile, TILES: tl.constexpr):
    """int4_channel, of rows in the order of tokens."""
    is_row = rows[1][:, None]
    low, low_word = _channel_codes(low, is_row, TILES)
    high, high_word = _channel_codes(high, is_row, TILES)
    _store_nibbles(cold, low, high, rows, TILES)
    at, mask = heads_at(parameters(cold, tl.int32, TILES), tile, TILES.groups, TILES)
    store_present(at, low_word, mask, TILES.is_whole)
    store_present(at + TILES.half, high_word, mask, TILES.is_whole)


@triton.jit
def _channel_codes(numbers, is_row, TILES: tl.constexpr):
    """Codes of a half, int32, and words [heads, width]."""
    least, most = numbers, numbers
    if not TILES.is_whole:
        least = tl.where(is_row, numbers, F16_LIMIT)
        most = tl.where(is_row, numbers, -F16_LIMIT)
    shape: tl.constexpr = (TILES.tile_tokens, TILES.tile_heads, TILES.width)
    least = tl.min(tl.reshape(least, shape), 0)
    most = tl.max(tl.reshape(most, shape), 0)
    scale, minimum = int4_parameters(least, most)
    inverse = of_heads(inverse_of(scale), True, TILES)
    codes = int4_codes(numbers, inverse, of_heads(minimum.to(tl.float32), True, TILES))
    return codes, int4_word(scale, minimum)


@triton.jit(do_not_specialize=_VARYING)
def pack_block_kernel(
    pairs,
    ordinals,
    num_pages,
    num_buffers,
    cold_base,
    cold_page_bytes,
    buffers,
    frequencies,
    means,
    matrix,
    NUMBER: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """int4_block: a program reads a buffer once for its scale and once more for its codes."""
    pages = (pairs, ordinals, num_buffers, cold_base, cold_page_bytes)
    for at in range(tl.program_id(0), num_pages * num_buffers, tl.num_programs(0)):
        hot, cold, buffer, ordinal = _sides(at, pages, buffers, True, TILES)
        keys = _keys(frequencies, means, buffer, ordinal, TILES)
        hot = pointer(hot, NUMBER, TILES.hot_alignment)
        most = 0.0
        for tile in tl.range(0, TILES.num_tiles, num_stages=STAGES):
            low, high = load_halves(hot, rows_of(tile, False, TILES), TILES)
            low, high = turned_back(low, high, tile, keys, False, TILES)
            row_most = largest(low.to(tl.float32), high.to(tl.float32))
            most = tl.maximum(most, tl.max(row_most, 0))
        scale = most * (1 / 7)
        inverse = tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0))
        for tile in tl.range(0, TILES.num_tiles, num_stages=STAGES):
            rows = rows_of(tile, False, TILES)
            low, high = load_halves(hot, rows, TILES)
            low, high = turned_back(low, high, tile, keys, False, TILES)
            low = whole_numbers(low.to(tl.float32) * inverse, 7.0) + 8
            high = whole_numbers(high.to(tl.float32) * inverse, 7.0) + 8
            _store_nibbles(cold, low, high, rows, TILES)
        tl.store(parameters(cold, tl.float32, TILES), scale)
        store_padding(cold, 0, TILES)


@triton.jit(do_not_specialize=_VARYING)
def unpack_kernel(
    pairs,
    ordinals,
    num_pages,
    num_buffers,
    cold_base,
    cold_page_bytes,
    buffers,
    frequencies,
    means,
    matrix,
    NUMBER: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All formats."""
    pages = (pairs, ordinals, num_buffers, cold_base, cold_page_bytes)
    matrices = ()
    if TILES.is_rotated:
        matrices = load_matrices(matrix, TILES.group, TILES.groups == 1, True)
    num_items = num_pages * num_buffers * TILES.num_tiles
    step = tl.num_programs(0)
    at = tl.program_id(0) // TILES.num_tiles
    hot, cold, buffer, ordinal = _sides(at, pages, buffers, False, TILES)
    for item in tl.range(tl.program_id(0), num_items, step, num_stages=STAGES):
        # What the next tile's addresses need is loaded before it is wanted.
        at = tl.minimum(item + step, num_items - 1) // TILES.num_tiles
        next_hot, next_cold, next_buffer, next_ordinal = _sides(at, pages, buffers, False, TILES)
        tile = item % TILES.num_tiles
        keys = _keys(frequencies, means, buffer, ordinal, TILES)
        rows = rows_of(tile, False, TILES)
        if TILES.is_rotated:
            low, high = _load_rotated(cold, rows, matrices, TILES)
        elif TILES.kind == IS_INT4_TOKEN:
            low, high = _load_tokens(cold, rows, TILES)
        elif TILES.kind == IS_INT4_CHANNEL:
            low, high = _load_channels(cold, rows, tile, TILES)
        elif TILES.kind == IS_INT4_BLOCK:
            low, high = _load_block(cold, rows, TILES)
        else:
            low, high = _load_8_bits(cold, rows, TILES)
            scale = load_f16_parameters(cold, rows, TILES)[0][:, None]
            low, high = scaled_numbers(low, scale, TILES), scaled_numbers(high, scale, TILES)
        low, high = turned(low, high, tile, keys, TILES)
        store_halves(pointer(hot, NUMBER, TILES.hot_alignment), low, high, rows, TILES)
        hot, cold, buffer, ordinal = next_hot, next_cold, next_buffer, next_ordinal


@triton.jit
def _load_rotated(cold, rows, matrices, TILES: tl.constexpr):
    if TILES.kind == IS_TURBO4:
        low, high = turbo4_numbers(
            load_codes(cold, rows, TILES.width, TILES.half, TILES.half, TILES), TILES
        )
    else:
        ROW: tl.constexpr = TILES.half // 4 * 3
        low, high = turbo3_numbers(load_codes(cold, rows, TILES.width, ROW, ROW, TILES))
    return unrotated(low, high, load_f16_parameters(cold, rows, TILES), matrices, TILES)


@triton.jit
def _load_nibbles(cold, rows, TILES: tl.constexpr):
    """Codes of both halves as f32."""
    packed = load_codes(cold, rows, TILES.width, TILES.half, TILES.half, TILES)
    return (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)


@triton.jit
def _load_tokens(cold, rows, TILES: tl.constexpr):
    low_codes, high_codes = _load_nibbles(cold, rows, TILES)
    words = load_words(cold, rows, TILES)
    GROUPS: tl.constexpr = TILES.groups
    low = tl.zeros(low_codes.shape, tl.float32)
    high = tl.zeros(high_codes.shape, tl.float32)
    for group in tl.static_range(GROUPS):
        in_low, in_high = _group_columns(group, TILES)
        scale, minimum = word_halves(words[group])
        scale, minimum = scale[:, None], minimum[:, None]
        low = tl.where(in_low, low_codes * scale + minimum, low)
        high = tl.where(in_high, high_codes * scale + minimum, high)
    return low, high


@triton.jit
def _load_channels(cold, rows, tile, TILES: tl.constexpr):
    low, high = _load_nibbles(cold, rows, TILES)
    at, mask = heads_at(parameters(cold, tl.int32, TILES), tile, TILES.groups, TILES)
    scale, minimum = word_halves(load_present(at, mask, TILES.is_whole))
    low = low * of_heads(scale, False, TILES) + of_heads(minimum, False, TILES)
    scale, minimum = word_halves(load_present(at + TILES.half, mask, TILES.is_whole))
    return low, high * of_heads(scale, False, TILES) + of_heads(minimum, False, TILES)


@triton.jit
def _load_block(cold, rows, TILES: tl.constexpr):
    low, high = _load_nibbles(cold, rows, TILES)
    # For each row the same, so that it is copied ahead as codes are.
    scale = tl.load(parameters(cold, tl.float32, TILES) + rows[0] * 0)[:, None]
    return (low - 8.0) * scale, (high - 8.0) * scale
