"""Tiles of hot vectors: which rows they are, their loads and stores, their positions and means.

A tile is some tokens of some heads of one buffer, each a row, in two halves [rows, width]: numbers
``i`` and ``i + head_dim / 2``, which lie in one plane of a rotary embedding and in one byte of
4-bit codes. ``width`` is half a vector up to a power of two, as tiles must be. Rows are in the
order of the buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from coldpage.kernels.cold.numbers import RADIANS_PER_STEP

__all__ = [
    "IS_FP8",
    "IS_INT4_BLOCK",
    "IS_INT4_CHANNEL",
    "IS_INT4_TOKEN",
    "IS_INT8",
    "IS_TURBO3",
    "IS_TURBO4",
    "Tiles",
    "cos_sin",
    "heads_at",
    "load_frequencies",
    "load_halves",
    "load_means",
    "load_present",
    "of_heads",
    "rows_of",
    "store_halves",
    "store_present",
    "turned",
    "turned_back",
]

# What kernels do with a tile's numbers.
IS_INT8 = tl.constexpr(0)
IS_FP8 = tl.constexpr(1)
IS_INT4_TOKEN = tl.constexpr(2)
IS_INT4_CHANNEL = tl.constexpr(3)
IS_TURBO4 = tl.constexpr(4)
IS_TURBO3 = tl.constexpr(5)
IS_INT4_BLOCK = tl.constexpr(6)

_RADIANS_PER_STEP = tl.constexpr(float(np.float32(RADIANS_PER_STEP)))


class Tiles(NamedTuple):
    """Vectors of a buffer, their format, and how tiles divide them: what kernels are compiled for.
    Flat, since constants in tuples of tuples are none to Triton."""

    kind: int  # IS_INT8 and so on
    is_rotated: bool
    heads: int
    tokens: int
    half: int
    width: int
    tile_heads: int
    tile_tokens: int
    token_tiles: int  # for all tokens
    num_tiles: int  # for the buffer
    is_whole: bool  # every row and column of every tile is there
    group: int  # numbers, or tokens, that share parameters
    groups: int  # of a vector, or of the tokens
    code_bytes: int
    num_parameters: int
    num_padding: int  # f16 zeros behind the parameters
    hot_alignment: int  # of buffers, in bytes, up to 16
    cold_alignment: int
    parameter_alignment: int
    has_frequencies: bool
    has_means: bool
    is_asm: bool  # compiled for a GPU, not interpreted


@triton.jit
def load_present(pointer, mask, IS_WHOLE: tl.constexpr):
    """0 where nothing is there."""
    return tl.load(pointer) if IS_WHOLE else tl.load(pointer, mask=mask, other=0)


@triton.jit
def store_present(pointer, value, mask, IS_WHOLE: tl.constexpr):
    """Nothing where nothing is there."""
    if IS_WHOLE:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def rows_of(tile, TILES: tl.constexpr):
    """The vectors of a tile, counted as they lie in a buffer, and which there are: [rows]."""
    row = tl.arange(0, TILES.tile_heads * TILES.tile_tokens)
    head = tile // TILES.token_tiles * TILES.tile_heads + row // TILES.tile_tokens
    token = tile % TILES.token_tiles * TILES.tile_tokens + row % TILES.tile_tokens
    return head * TILES.tokens + token, (head < TILES.heads) & (token < TILES.tokens)


@triton.jit
def _halves_at(hot, rows, TILES: tl.constexpr):
    vector, is_row = rows
    column = tl.arange(0, TILES.width)
    at = hot + (vector[:, None] * (2 * TILES.half) + column[None, :])
    return at, is_row[:, None] & (column < TILES.half)[None, :]


@triton.jit
def load_halves(hot, rows, TILES: tl.constexpr):
    """The two halves of hot vectors, of their type."""
    at, mask = _halves_at(hot, rows, TILES)
    low = load_present(at, mask, TILES.is_whole)
    high = load_present(at + TILES.half, mask, TILES.is_whole)
    return low, high


@triton.jit
def store_halves(hot, low, high, rows, TILES: tl.constexpr):
    """Numbers f32 to where ``load_halves`` reads them, rounded."""
    at, mask = _halves_at(hot, rows, TILES)
    store_present(at, low.to(hot.dtype.element_ty), mask, TILES.is_whole)
    store_present(at + TILES.half, high.to(hot.dtype.element_ty), mask, TILES.is_whole)


@triton.jit
def turned_back(low, high, tile, keys, TILES: tl.constexpr):
    """Halves of hot vectors without their positions and without means, f32; or, where they have
    neither, as they are."""
    frequencies, means, ordinal = keys
    if TILES.has_frequencies:
        low, high = low.to(tl.float32), high.to(tl.float32)
        cos, sin = _cos_sin_of_rows(frequencies, ordinal, tile, TILES)
        low, high = low * cos + high * sin, high * cos - low * sin
    if TILES.has_means:
        low_mean, high_mean = load_means(means, tile, TILES)
        low = low.to(tl.float32) - of_heads(low_mean, TILES)
        high = high.to(tl.float32) - of_heads(high_mean, TILES)
    return low, high


@triton.jit
def turned(low, high, tile, keys, TILES: tl.constexpr):
    """The inverse, of f32, but for int4_channel, which adds means with its minima."""
    frequencies, means, ordinal = keys
    if TILES.has_means and TILES.kind != IS_INT4_CHANNEL:
        low_mean, high_mean = load_means(means, tile, TILES)
        low, high = low + of_heads(low_mean, TILES), high + of_heads(high_mean, TILES)
    if TILES.has_frequencies:
        cos, sin = _cos_sin_of_rows(frequencies, ordinal, tile, TILES)
        low, high = low * cos - high * sin, high * cos + low * sin
    return low, high


@triton.jit
def load_frequencies(frequencies, TILES: tl.constexpr):
    """Of a vector's planes, int32 [width]."""
    column = tl.arange(0, TILES.width)
    return load_present(frequencies + column, column < TILES.half, TILES.is_whole)


@triton.jit
def cos_sin(frequency, ordinal, tile, TILES: tl.constexpr):
    """Of the angles of all planes, f32 [tokens, width]. Positions and products are cut to 32 bits:
    as signed numbers they are half a turn at most."""
    position = ordinal * TILES.tokens + tile % TILES.token_tiles * TILES.tile_tokens
    position = position + tl.arange(0, TILES.tile_tokens)
    angle = (position[:, None] * frequency[None, :]).to(tl.float32) * _RADIANS_PER_STEP
    if TILES.is_asm:
        cos, sin = libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)
    else:
        cos, sin = tl.cos(angle), tl.sin(angle)
    return cos, sin


@triton.jit
def _cos_sin_of_rows(frequencies, ordinal, tile, TILES: tl.constexpr):
    cos, sin = cos_sin(load_frequencies(frequencies, TILES), ordinal, tile, TILES)
    return _as_rows(cos[None, :, :], TILES), _as_rows(sin[None, :, :], TILES)


@triton.jit
def load_means(means, tile, TILES: tl.constexpr):
    """Of both halves of a tile's heads: [heads, width]."""
    at, mask = heads_at(means, tile, 1, TILES)
    low = load_present(at, mask, TILES.is_whole)
    return low, load_present(at + TILES.half, mask, TILES.is_whole)


@triton.jit
def heads_at(base, tile, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """Where the lower half of a vector is that is shared by a tile's tokens of each head, and which
    there are: [heads, width]. There are ``GROUPS`` of them for a head."""
    head = tile // TILES.token_tiles * TILES.tile_heads + tl.arange(0, TILES.tile_heads)
    column = tl.arange(0, TILES.width)
    vector = head * GROUPS + (tile % TILES.token_tiles if GROUPS > 1 else 0)
    at = base + (vector[:, None] * (2 * TILES.half) + column[None, :])
    return at, (head < TILES.heads)[:, None] & (column < TILES.half)[None, :]


@triton.jit
def of_heads(numbers, TILES: tl.constexpr):
    """What is of heads [heads, width] for each row: [rows, width]."""
    return _as_rows(numbers[:, None, :], TILES)


@triton.jit
def _as_rows(numbers, TILES: tl.constexpr):
    shape: tl.constexpr = (TILES.tile_heads, TILES.tile_tokens, TILES.width)
    rows: tl.constexpr = TILES.tile_heads * TILES.tile_tokens
    return tl.reshape(tl.broadcast_to(numbers, shape), [rows, TILES.width])
