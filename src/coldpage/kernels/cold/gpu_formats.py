"""A tile of a format: its numbers to codes and parameters in a packed buffer, and back.

``cold`` is the buffer's address, ``low`` and ``high`` are the halves of the tile's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coldpage.kernels.cold.gpu_blobs import (
    load_codes,
    load_codes_by_words,
    load_f16_parameters,
    load_words,
    parameters,
    store_codes,
    store_f16_parameters,
    store_words,
)
from coldpage.kernels.cold.gpu_codes import (
    F16_LIMIT,
    int4_codes,
    int4_parameters,
    int4_word,
    nibble_bytes,
    nibble_numbers,
    nibble_offset,
    scaled_codes,
    scaled_numbers,
    word_halves,
)
from coldpage.kernels.cold.gpu_rotated import (
    pack_rotated,
    turbo4_numbers,
    unrotated,
)
from coldpage.kernels.cold.gpu_three_bits import three_bit_bytes, turbo3_numbers
from coldpage.kernels.cold.gpu_vectors import (
    IS_INT4_BLOCK,
    IS_INT4_TOKEN,
    IS_TURBO4,
)

__all__ = ["pack_tile", "store_nibbles", "unpack_tile"]

# Of a tile, four or more for each thread of eight warps.
_MANY_BYTES = tl.constexpr(1024)


@triton.jit
def pack_tile(cold, low, high, rows, matrices, TILES: tl.constexpr):
    """Store what numbers become, of any type, in all formats but int4_block and int4_channel."""
    if TILES.is_rotated:
        low, high, norm = pack_rotated(low, high, matrices, TILES)
        if TILES.kind == IS_TURBO4:
            store_nibbles(cold, low, high, rows, TILES)
        else:
            _store_three_bits(cold, low, high, rows, TILES)
        store_f16_parameters(cold, norm, rows, TILES)
    elif TILES.kind == IS_INT4_TOKEN:
        _pack_tokens(cold, low.to(tl.float32), high.to(tl.float32), rows, TILES)
    else:
        low, high, scale = scaled_codes(low.to(tl.float32), high.to(tl.float32), TILES)
        _store_8_bits(cold, low, high, rows, TILES)
        store_f16_parameters(cold, scale, rows, TILES)


@triton.jit
def store_nibbles(cold, low, high, rows, TILES: tl.constexpr):
    """Codes of 4 bits, those of both halves in a byte."""
    store_codes(cold, nibble_bytes(low, high), rows, TILES.half, TILES.half, TILES)


@triton.jit
def _store_three_bits(cold, low, high, rows, TILES: tl.constexpr):
    """Codes in two parts. The second begins as aligned as the first: rows have 16 bytes or more."""
    LOW: tl.constexpr = TILES.half // 2
    HIGH: tl.constexpr = TILES.half // 4
    two_bits, one_bit = three_bit_bytes(low, high)
    store_codes(cold, two_bits, rows, LOW, LOW, TILES)
    store_codes(cold + TILES.code_bytes // 3 * 2, one_bit, rows, HIGH, HIGH, TILES)


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
        scale, minimum, inverse = int4_parameters(tl.min(least, 1), tl.max(most, 1))
        words = words + (int4_word(scale, minimum),)
        inverse = inverse[:, None]
        minimum = minimum.to(tl.float32)[:, None]
        low_codes = tl.where(in_low, int4_codes(low, inverse, minimum, TILES.is_asm), low_codes)
        high_codes = tl.where(in_high, int4_codes(high, inverse, minimum, TILES.is_asm), high_codes)
    store_nibbles(cold, low_codes, high_codes, rows, TILES)
    store_words(cold, words, rows, TILES)


@triton.jit
def unpack_tile(cold, rows, matrices, TILES: tl.constexpr):
    """Load numbers, f32, in all formats but int4_channel."""
    if TILES.is_rotated:
        low, high = _load_rotated(cold, rows, matrices, TILES)
    elif TILES.kind == IS_INT4_TOKEN:
        low, high = _load_tokens(cold, rows, TILES)
    elif TILES.kind == IS_INT4_BLOCK:
        low, high = _load_block(cold, rows, TILES)
    else:
        low, high = _load_8_bits(cold, rows, TILES)
        scale = load_f16_parameters(cold, rows, TILES)[0][:, None]
        low, high = scaled_numbers(low, scale, TILES), scaled_numbers(high, scale, TILES)
    return low, high


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
def _load_rotated(cold, rows, matrices, TILES: tl.constexpr):
    if TILES.kind == IS_TURBO4:
        low, high = turbo4_numbers(
            load_codes(cold, rows, TILES.width, TILES.half, TILES.half, TILES), TILES
        )
    else:
        low, high = turbo3_numbers(*_load_three_bits(cold, rows, TILES), TILES)
    return unrotated(low, high, load_f16_parameters(cold, rows, TILES), matrices, TILES)


@triton.jit
def _load_three_bits(cold, rows, TILES: tl.constexpr):
    LOW: tl.constexpr = TILES.half // 2
    HIGH: tl.constexpr = TILES.half // 4
    two_bits = _load_part(cold, rows, LOW, TILES)
    one_bit = _load_part(cold + TILES.code_bytes // 3 * 2, rows, HIGH, TILES)
    return two_bits, one_bit


@triton.jit
def _load_part(cold, rows, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    if rows[0].shape[0] * COLUMNS >= _MANY_BYTES:
        result = load_codes(cold, rows, COLUMNS, COLUMNS, COLUMNS, TILES)
    else:
        result = load_codes_by_words(cold, rows, COLUMNS, TILES)
    return result


@triton.jit
def _load_nibbles(cold, rows, TILES: tl.constexpr):
    """Codes of both halves, as ``nibble_numbers`` gives them."""
    packed = load_codes(cold, rows, TILES.width, TILES.half, TILES.half, TILES)
    return nibble_numbers(packed, TILES.is_asm)


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
        scale, start = scale[:, None], (minimum - nibble_offset(TILES.is_asm) * scale)[:, None]
        low = tl.where(in_low, low_codes * scale + start, low)
        high = tl.where(in_high, high_codes * scale + start, high)
    return low, high


@triton.jit
def _load_block(cold, rows, TILES: tl.constexpr):
    low, high = _load_nibbles(cold, rows, TILES)
    # For each row the same, so that it is copied ahead as codes are.
    scale = tl.load(parameters(cold, tl.float32, TILES) + rows[0] * 0)[:, None]
    zero = 8.0 + nibble_offset(TILES.is_asm)
    return (low - zero) * scale, (high - zero) * scale
