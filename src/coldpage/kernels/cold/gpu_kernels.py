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
def _entry(item, pages, buffers, TILES: tl.constexpr):
    """What is to be loaded to know where an item's tile is: its buffer among those of its page, the
    page's index pair and ordinal, and the buffer's row of the table."""
    pairs, ordinals, num_buffers, num_items, _, _ = pages
    at = tl.minimum(item, num_items - 1) // TILES.num_tiles
    page = (at // num_buffers).to(tl.int64)
    buffer = at % num_buffers
    row = buffers.to(tl.int64) + buffer * 24
    ordinal = at
    if TILES.has_frequencies:
        ordinal = _plain_load(ordinals + page * 4, False, TILES)
    return (
        buffer,
        ordinal,
        _plain_load(pairs + page * 8, True, TILES),
        _plain_load(row, True, TILES),
        _plain_load(row + 8, True, TILES),
        _plain_load(row + 16, True, TILES),
    )


@triton.jit
def _sides(entry, pages, IS_PACK: tl.constexpr):
    """Addresses of the hot and of the cold side."""
    _, _, pair, base, stride, offset = entry
    _, _, _, _, cold_base, cold_page_bytes = pages
    dst = pair & 0xFFFFFFFF
    src = pair >> 32
    hot = base + (src if IS_PACK else dst) * stride
    return hot, cold_base + (dst if IS_PACK else src) * cold_page_bytes + offset


@triton.jit
def _keys(frequencies, means, entry, TILES: tl.constexpr):
    buffer, ordinal = entry[0], entry[1]
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
    num_items = num_pages * num_buffers * TILES.num_tiles
    pages = (pairs, ordinals, num_buffers, num_items, cold_base, cold_page_bytes)
    matrices = ()
    if TILES.is_rotated:
        matrices = load_matrices(matrix, TILES.group, TILES.groups == 1, False)
    step = tl.num_programs(0)
    entry = _entry(tl.program_id(0), pages, buffers, TILES)
    for item in tl.range(tl.program_id(0), num_items, step, num_stages=STAGES):
        # Loaded now, looked at by the next tile.
        next_entry = _entry(item + step, pages, buffers, TILES)
        hot, cold = _sides(entry, pages, True)
        tile = item % TILES.num_tiles
        keys = _keys(frequencies, means, entry, TILES)
        rows = rows_of(tile, TILES)
        low, high = load_halves(pointer(hot, NUMBER, TILES.hot_alignment), rows, TILES)
        low, high = turned_back(low, high, tile, keys, TILES)
        pack_tile(cold, low, high, rows, matrices, TILES)
        store_padding(cold, tile, TILES)
        entry = next_entry


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
    num_items = num_pages * num_buffers * TILES.num_tiles
    pages = (pairs, ordinals, num_buffers, num_items, cold_base, cold_page_bytes)
    step = tl.num_programs(0)
    entry = _entry(tl.program_id(0), pages, buffers, TILES)
    next_entry = _entry(tl.program_id(0) + step, pages, buffers, TILES)
    hot, cold = _sides(entry, pages, True)
    keys = _keys(frequencies, means, entry, TILES)
    hot = pointer(hot, NUMBER, TILES.hot_alignment)
    read = load_channel_tile(hot, tl.program_id(0) % TILES.num_tiles, keys, TILES)
    for item in tl.range(tl.program_id(0), num_items, step, num_stages=1):
        last_entry = _entry(item + 2 * step, pages, buffers, TILES)
        hot, next_cold = _sides(next_entry, pages, True)
        keys = _keys(frequencies, means, next_entry, TILES)
        hot = pointer(hot, NUMBER, TILES.hot_alignment)
        next_tile = tl.minimum(item + step, num_items - 1) % TILES.num_tiles
        next_read = load_channel_tile(hot, next_tile, keys, TILES)
        tile = item % TILES.num_tiles
        pack_channels(cold, read, tile, entry[1], TILES)
        store_padding(cold, tile, TILES)
        read, cold = next_read, next_cold
        entry, next_entry = next_entry, last_entry


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
    num_items = num_pages * num_buffers * TILES.num_tiles
    pages = (pairs, ordinals, num_buffers, num_items, cold_base, cold_page_bytes)
    for at in range(tl.program_id(0), num_pages * num_buffers, tl.num_programs(0)):
        entry = _entry(at * TILES.num_tiles, pages, buffers, TILES)
        hot, cold = _sides(entry, pages, True)
        keys = _keys(frequencies, means, entry, TILES)
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
            low = whole_numbers(low.to(tl.float32) * inverse) + 8
            high = whole_numbers(high.to(tl.float32) * inverse) + 8
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
    num_items = num_pages * num_buffers * TILES.num_tiles
    pages = (pairs, ordinals, num_buffers, num_items, cold_base, cold_page_bytes)
    matrices = ()
    if TILES.is_rotated:
        matrices = load_matrices(matrix, TILES.group, TILES.groups == 1, True)
    step = tl.num_programs(0)
    entry = _entry(tl.program_id(0), pages, buffers, TILES)
    for item in tl.range(tl.program_id(0), num_items, step, num_stages=STAGES):
        # Loaded now, looked at by the next tile.
        next_entry = _entry(item + step, pages, buffers, TILES)
        hot, cold = _sides(entry, pages, False)
        tile = item % TILES.num_tiles
        keys = _keys(frequencies, means, entry, TILES)
        rows = rows_of(tile, TILES)
        if TILES.kind == IS_INT4_CHANNEL:
            low, high = load_channels(cold, rows, tile, keys[1], TILES)
        else:
            low, high = unpack_tile(cold, rows, matrices, TILES)
        low, high = turned(low, high, tile, keys, TILES)
        store_halves(pointer(hot, NUMBER, TILES.hot_alignment), low, high, rows, TILES)
        entry = next_entry
