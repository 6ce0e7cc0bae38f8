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

from coldpage.kernels.cold.gpu_blobs import parameters, pointer, store_padding
from coldpage.kernels.cold.gpu_channels import (
    load_channel_tile,
    load_channels,
    pack_channels,
)
from coldpage.kernels.cold.gpu_codes import largest, whole_numbers
from coldpage.kernels.cold.gpu_formats import pack_tile, store_nibbles, unpack_tile
from coldpage.kernels.cold.gpu_rotated import load_matrices
from coldpage.kernels.cold.gpu_vectors import (
    IS_INT4_CHANNEL,
    load_halves,
    rows_of,
    store_halves,
    turned,
    turned_back,
)

__all__ = ["pack_block_kernel", "pack_channels_kernel", "pack_kernel", "unpack_kernel"]

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
    """All formats but int4_block and int4_channel."""
    pages = (pairs, ordinals, num_buffers, cold_base, cold_page_bytes)
    matrices = ()
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
        rows = rows_of(tile, TILES)
        low, high = load_halves(pointer(hot, NUMBER, TILES.hot_alignment), rows, TILES)
        low, high = turned_back(low, high, tile, keys, TILES)
        pack_tile(cold, low, high, rows, matrices, TILES)
        store_padding(cold, tile, TILES)
        hot, cold, buffer, ordinal = next_hot, next_cold, next_buffer, next_ordinal


@triton.jit(do_not_specialize=_VARYING)
def pack_channels_kernel(
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
    """int4_channel: a tile is read into registers while the one before is packed. By way of shared
    memory Triton would hand it out in the order in which codes are stored, and threads would have
    to ask each other for the limits of a channel."""
    pages = (pairs, ordinals, num_buffers, cold_base, cold_page_bytes)
    num_items = num_pages * num_buffers * TILES.num_tiles
    step = tl.num_programs(0)
    item = tl.program_id(0)
    hot, cold, buffer, ordinal = _sides(item // TILES.num_tiles, pages, buffers, True, TILES)
    keys = _keys(frequencies, means, buffer, ordinal, TILES)
    numbers = pointer(hot, NUMBER, TILES.hot_alignment)
    read = load_channel_tile(numbers, item % TILES.num_tiles, keys, TILES)
    next_item = tl.minimum(item + step, num_items - 1)
    at = next_item // TILES.num_tiles
    next_hot, next_cold, next_buffer, next_ordinal = _sides(at, pages, buffers, True, TILES)
    for item in tl.range(tl.program_id(0), num_items, step, num_stages=1):
        next_item = tl.minimum(item + step, num_items - 1)
        keys = _keys(frequencies, means, next_buffer, next_ordinal, TILES)
        numbers = pointer(next_hot, NUMBER, TILES.hot_alignment)
        next_read = load_channel_tile(numbers, next_item % TILES.num_tiles, keys, TILES)
        at = tl.minimum(item + 2 * step, num_items - 1) // TILES.num_tiles
        last = _sides(at, pages, buffers, True, TILES)
        tile = item % TILES.num_tiles
        pack_channels(cold, read, tile, ordinal, TILES)
        store_padding(cold, tile, TILES)
        read, cold, ordinal = next_read, next_cold, next_ordinal
        next_hot, next_cold, next_buffer, next_ordinal = last


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
            low, high = load_halves(hot, rows_of(tile, TILES), TILES)
            low, high = turned_back(low, high, tile, keys, TILES)
            row_most = largest(low.to(tl.float32), high.to(tl.float32))
            most = tl.maximum(most, tl.max(row_most, 0))
        scale = most * (1 / 7)
        inverse = tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0))
        for tile in tl.range(0, TILES.num_tiles, num_stages=STAGES):
            rows = rows_of(tile, TILES)
            low, high = load_halves(hot, rows, TILES)
            low, high = turned_back(low, high, tile, keys, TILES)
            low = whole_numbers(low.to(tl.float32), inverse) + 8
            high = whole_numbers(high.to(tl.float32), inverse) + 8
            store_nibbles(cold, low, high, rows, TILES)
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
        rows = rows_of(tile, TILES)
        if TILES.kind == IS_INT4_CHANNEL:
            low, high = load_channels(cold, rows, tile, keys[1], TILES)
        else:
            low, high = unpack_tile(cold, rows, matrices, TILES)
        low, high = turned(low, high, tile, keys, TILES)
        store_halves(pointer(hot, NUMBER, TILES.hot_alignment), low, high, rows, TILES)
        hot, cold, buffer, ordinal = next_hot, next_cold, next_buffer, next_ordinal
