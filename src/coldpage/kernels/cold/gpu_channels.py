"""int4_channel: tokens of a channel share a scale and a minimum.

To pack, a tile is [tokens, channels] of each half, the channels of its heads side by side, and a
thread has all tokens of its channels: it finds their limits without asking others. The mean of a
channel is taken from its minimum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coldpage.kernels.cold.gpu_blobs import load_codes, parameters, store_codes
from coldpage.kernels.cold.gpu_codes import (
    F16_LIMIT,
    int4_codes,
    int4_parameters,
    int4_word,
    nibble_bytes,
    nibble_numbers,
    nibble_offset,
    word_halves,
)
from coldpage.kernels.cold.gpu_vectors import (
    cos_sin,
    heads_at,
    load_means,
    load_present,
    of_heads,
    rows_of,
    store_present,
)

__all__ = ["load_channel_tile", "load_channels", "pack_channels"]


@triton.jit
def _channels(tile, TILES: tl.constexpr):
    """The heads and columns of a tile's channels, of the lower half, and which there are; its
    tokens, and which there are."""
    channel = tl.arange(0, TILES.tile_heads * TILES.width)
    head = tile // TILES.token_tiles * TILES.tile_heads + channel // TILES.width
    column = channel % TILES.width
    token = tile % TILES.token_tiles * TILES.tile_tokens + tl.arange(0, TILES.tile_tokens)
    is_channel = (head < TILES.heads) & (column < TILES.half)
    return head, column, is_channel, token, token < TILES.tokens


@triton.jit
def load_channel_tile(hot, tile, keys, TILES: tl.constexpr):
    """All that is read to pack a tile: its two halves, of their type; and, each 0 where there are
    none, the channels' frequencies and the means of both halves."""
    frequencies, means, _ = keys
    head, column, is_channel, token, is_token = _channels(tile, TILES)
    vector = head[None, :] * TILES.tokens + token[:, None]
    at = hot + (vector * (2 * TILES.half) + column[None, :])
    mask = is_token[:, None] & is_channel[None, :]
    # Two columns a thread: a warp has a head's, and no other thread has tokens of them.
    low = load_present(tl.max_contiguous(at, [1, 2]), mask, TILES.is_whole)
    high = load_present(tl.max_contiguous(at + TILES.half, [1, 2]), mask, TILES.is_whole)
    frequency, low_mean, high_mean = 0, 0.0, 0.0
    if TILES.has_frequencies:
        frequency = load_present(frequencies + column, is_channel, TILES.is_whole)
    if TILES.has_means:
        at = means + (head * (2 * TILES.half) + column)
        low_mean = load_present(at, is_channel, TILES.is_whole)
        high_mean = load_present(at + TILES.half, is_channel, TILES.is_whole)
    return low, high, frequency, low_mean, high_mean


@triton.jit
def pack_channels(cold, read, tile, ordinal, TILES: tl.constexpr):
    """Store what ``load_channel_tile`` has read."""
    low, high, frequency, low_mean, high_mean = read
    low, high = low.to(tl.float32), high.to(tl.float32)
    if TILES.has_frequencies:
        cos, sin = cos_sin(frequency, ordinal, tile, TILES)
        low, high = low * cos + high * sin, high * cos - low * sin
    head, column, is_channel, _, is_token = _channels(tile, TILES)
    low, low_word = _channel_codes(low, low_mean, is_token, TILES)
    high, high_word = _channel_codes(high, high_mean, is_token, TILES)
    packed = tl.reshape(nibble_bytes(low, high), [TILES.tile_tokens, TILES.tile_heads, TILES.width])
    rows: tl.constexpr = TILES.tile_heads * TILES.tile_tokens
    packed = tl.reshape(tl.permute(packed, [1, 0, 2]), [rows, TILES.width])
    store_codes(cold, packed, rows_of(tile, TILES), TILES.half, TILES.half, TILES)
    vector = head * TILES.groups + (tile % TILES.token_tiles if TILES.groups > 1 else 0)
    at = parameters(cold, tl.int32, TILES) + (vector * (2 * TILES.half) + column)
    store_present(at, low_word, is_channel, TILES.is_whole)
    store_present(at + TILES.half, high_word, is_channel, TILES.is_whole)


@triton.jit
def _channel_codes(numbers, mean, is_token, TILES: tl.constexpr):
    """Codes of a half, int32, and words [channels]."""
    least, most = numbers, numbers
    if not TILES.is_whole:
        least = tl.where(is_token[:, None], numbers, F16_LIMIT)
        most = tl.where(is_token[:, None], numbers, -F16_LIMIT)
    least, most = tl.min(least, 0) - mean, tl.max(most, 0) - mean
    scale, minimum, inverse = int4_parameters(least, most)
    start = (minimum.to(tl.float32) + mean)[None, :]
    codes = int4_codes(numbers, inverse[None, :], start, TILES.is_asm)
    return codes, int4_word(scale, minimum)


@triton.jit
def load_channels(cold, rows, tile, means, TILES: tl.constexpr):
    """Both halves, f32, with rows in the order of the buffer, and means."""
    packed = load_codes(cold, rows, TILES.width, TILES.half, TILES.half, TILES)
    low_mean, high_mean = 0.0, 0.0
    if TILES.has_means:
        low_mean, high_mean = load_means(means, tile, TILES)
    at, mask = heads_at(parameters(cold, tl.int32, TILES), tile, TILES.groups, TILES)
    low, high = nibble_numbers(packed, TILES.is_asm)
    low = _channel_numbers(low, at, mask, low_mean, TILES)
    return low, _channel_numbers(high, at + TILES.half, mask, high_mean, TILES)


@triton.jit
def _channel_numbers(codes, at, mask, mean, TILES: tl.constexpr):
    scale, minimum = word_halves(load_present(at, mask, TILES.is_whole))
    start = minimum + mean - nibble_offset(TILES.is_asm) * scale
    return codes * of_heads(scale, TILES) + of_heads(start, TILES)
