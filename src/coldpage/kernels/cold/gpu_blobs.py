"""Codes and parameters of a tile in a packed buffer, which begins at the address ``cold``.

Codes of a tile's rows lie one behind the other, those of turbo3 in either of their two parts, so a
warp moves hundreds of bytes that follow each other, 16 a thread. Parameters are read by whole
words, since what is narrower can not be copied ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coldpage.kernels.cold.gpu_codes import word_halves
from coldpage.kernels.cold.gpu_vectors import load_present, store_present

__all__ = [
    "load_codes",
    "load_codes_by_words",
    "load_f16_parameters",
    "load_words",
    "parameters",
    "pointer",
    "store_codes",
    "store_f16_parameters",
    "store_padding",
    "store_words",
]


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """To what is at an address. A number says nothing of its alignment, without which accesses are
    4 bytes wide."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGNMENT)


@triton.jit
def parameters(cold, TYPE: tl.constexpr, TILES: tl.constexpr):
    """A pointer to the first."""
    return pointer(cold + TILES.code_bytes, TYPE, TILES.parameter_alignment)


@triton.jit
def _codes_at(
    cold,
    rows,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
):
    vector, is_row = rows
    column = tl.arange(0, COLUMNS)
    at = pointer(cold, tl.uint8, TILES.cold_alignment)
    at += vector[:, None] * STRIDE + column[None, :]
    return at, is_row[:, None] & (column < LENGTH)[None, :]


@triton.jit
def store_codes(cold, codes, rows, LENGTH: tl.constexpr, STRIDE: tl.constexpr, TILES: tl.constexpr):
    """Bytes [rows, columns], of which the first ``LENGTH`` are a row's; rows begin ``STRIDE`` bytes
    behind each other."""
    at, mask = _codes_at(cold, rows, codes.shape[1], LENGTH, STRIDE, TILES)
    store_present(at, codes, mask, TILES.is_whole and codes.shape[1] == LENGTH)


@triton.jit
def load_codes(
    cold,
    rows,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The same backwards."""
    at, mask = _codes_at(cold, rows, COLUMNS, LENGTH, STRIDE, TILES)
    return load_present(at, mask, TILES.is_whole and COLUMNS == LENGTH)


@triton.jit
def load_codes_by_words(cold, rows, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Bytes [rows, columns], all of them a row's, rows behind each other: by words, so that those
    of a tile with less than four for each thread are copied ahead too."""
    vector, is_row = rows
    ROWS: tl.constexpr = vector.shape[0]
    WORDS: tl.constexpr = COLUMNS // 4
    at = pointer(cold, tl.int32, TILES.cold_alignment)
    at += vector[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    word = load_present(at, is_row[:, None], TILES.is_whole)
    shift = 8 * tl.arange(0, 4)[None, None, :]
    parts = tl.broadcast_to(tl.reshape(word, [ROWS, WORDS, 1]), (ROWS, WORDS, 4)) >> shift
    return tl.reshape(parts, [ROWS, COLUMNS]).to(tl.uint8)


@triton.jit
def store_f16_parameters(cold, numbers, rows, TILES: tl.constexpr):
    """f16 [rows, groups], in their order."""
    vector, is_row = rows
    group = tl.arange(0, TILES.groups)
    at = parameters(cold, tl.float16, TILES) + (vector[:, None] * TILES.groups + group[None, :])
    store_present(at, numbers, is_row[:, None], TILES.is_whole)


@triton.jit
def load_f16_parameters(cold, rows, TILES: tl.constexpr):
    """The same backwards, as f32: a tuple of [rows]."""
    vector, is_row = rows
    at = parameters(cold, tl.int32, TILES)
    result = ()
    if TILES.groups == 1:
        word = load_present(at + vector // 2, is_row, TILES.is_whole)
        even, odd = word_halves(word)
        result = (tl.where(vector % 2 == 0, even, odd),)
    else:
        WORDS: tl.constexpr = TILES.groups // 2
        for i in tl.static_range(WORDS):
            word = load_present(at + (vector * WORDS + i), is_row, TILES.is_whole)
            result = result + word_halves(word)
    return result


@triton.jit
def store_words(cold, words, rows, TILES: tl.constexpr):
    """A tuple of int32 [rows] for the groups; two at a time, where there are as many."""
    vector, is_row = rows
    if TILES.groups % 2 == 0:
        PAIRS: tl.constexpr = TILES.groups // 2
        at = parameters(cold, tl.int64, TILES)
        for i in tl.static_range(PAIRS):
            pair = (words[2 * i].to(tl.int64) & 0xFFFFFFFF) | (words[2 * i + 1].to(tl.int64) << 32)
            store_present(at + (vector * PAIRS + i), pair, is_row, TILES.is_whole)
    else:
        GROUPS: tl.constexpr = TILES.groups
        at = parameters(cold, tl.int32, TILES)
        for i in tl.static_range(GROUPS):
            store_present(at + (vector * TILES.groups + i), words[i], is_row, TILES.is_whole)


@triton.jit
def load_words(cold, rows, TILES: tl.constexpr):
    """The same backwards."""
    vector, is_row = rows
    words = ()
    if TILES.groups % 2 == 0:
        PAIRS: tl.constexpr = TILES.groups // 2
        at = parameters(cold, tl.int64, TILES)
        for i in tl.static_range(PAIRS):
            pair = load_present(at + (vector * PAIRS + i), is_row, TILES.is_whole)
            words = words + (pair.to(tl.int32), (pair >> 32).to(tl.int32))
    else:
        GROUPS: tl.constexpr = TILES.groups
        at = parameters(cold, tl.int32, TILES)
        for i in tl.static_range(GROUPS):
            word = load_present(at + (vector * TILES.groups + i), is_row, TILES.is_whole)
            words = words + (word,)
    return words


@triton.jit
def store_padding(cold, tile, TILES: tl.constexpr):
    """Zeros behind the parameters, by one program of a buffer."""
    if TILES.num_padding > 0:
        index = tl.arange(0, 8)
        at = parameters(cold, tl.int16, TILES) + (TILES.num_parameters + index)
        tl.store(at, tl.zeros([8], tl.int16), mask=(index < TILES.num_padding) & (tile == 0))
