"""Pages of hot numbers to packed ones and back, on one thread: compiled, for a CPU.

The work is numbered: item ``i`` is buffer ``i % num_buffers`` of page ``i // num_buffers``. Each
function does items ``first`` to ``last`` (excluded) and blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold import cpu_tiles as tiles
from coldpage.kernels.cold.cpu_compile import compiled, compiled_and_kept, inlined
from coldpage.kernels.cold.cpu_numbers import (
    bytes_at,
    fill_turns,
    halves_at,
    load_numbers,
    store_numbers,
)
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.types import Int32Array, Int64Array

__all__ = ["PACKERS", "UNPACKERS", "BufferTable", "PageTable", "Worker"]

_I64 = np.int64


class BufferTable(NamedTuple):
    """``PackedBuffers`` for compiled functions. Without frequencies or means, arrays are empty."""

    tokens: int
    head_dim: int
    number_kind: int  # one of NUMBER_KINDS
    number_bytes: int
    num_tiles: int  # of a buffer, see ``cpu_tiles``
    tile_heads: int
    group: int
    code_bytes: int  # of a buffer
    num_parameters: int  # of a buffer
    buffer_bytes: int
    cold_page_bytes: int
    hot_base: Int64Array  # [num_buffers]
    hot_stride_bytes: Int64Array  # [num_buffers]
    cold_offset_bytes: Int64Array  # [num_buffers]
    frequencies: npt.NDArray[np.uint32]  # [different ones, head_dim / 2]
    frequencies_index: Int64Array  # [num_buffers]
    means: npt.NDArray[np.float32]  # [num_buffers, kv_heads, head_dim]
    signs: npt.NDArray[np.float32]  # [group], empty where nothing is rotated


class PageTable(NamedTuple):
    """The pages of a call."""

    cold_base: int
    cold_pages: Int32Array  # [num_pages]
    hot_slots: Int32Array  # [num_pages]
    ordinals: Int32Array  # [num_pages], empty where no key is turned


class _Turns(NamedTuple):
    """Cosines and sines of the page ``page_of`` says, for each of the different frequencies."""

    page_of: Int64Array  # [different ones]
    cosines: npt.NDArray[np.float32]  # [different ones, tokens, head_dim / 2]
    sines: npt.NDArray[np.float32]


Worker = Callable[[BufferTable, PageTable, int, int], None]


@compiled
def _no_turns(buffers: BufferTable, pages: PageTable) -> Any:
    num = buffers.frequencies.shape[0]
    page_of = np.full(num, pages.cold_pages.size)  # past the last: of none yet
    size = (num, buffers.tokens, buffers.head_dim // 2)
    return _Turns(page_of, np.empty(size, np.float32), np.empty(size, np.float32))


@compiled
def _prepare_turns(
    buffers: BufferTable, pages: PageTable, turns: _Turns, page: int, index: int
) -> None:
    """Make the turns of these frequencies those of ``page``."""
    if turns.page_of[index] != page:
        first = _I64(pages.ordinals[page]) * buffers.tokens
        fill_turns(buffers.frequencies[index], first, turns.cosines[index], turns.sines[index])
        turns.page_of[index] = page


@compiled
def _turn(row: Any, cosines: Any, sines: Any) -> None:
    low, high = row[: cosines.size], row[cosines.size :]
    for i in range(cosines.size):
        a, b = low[i], high[i]
        low[i] = a * cosines[i] - b * sines[i]
        high[i] = b * cosines[i] + a * sines[i]


@compiled
def _turn_back(row: Any, cosines: Any, sines: Any) -> None:
    low, high = row[: cosines.size], row[cosines.size :]
    for i in range(cosines.size):
        a, b = low[i], high[i]
        low[i] = a * cosines[i] + b * sines[i]
        high[i] = b * cosines[i] - a * sines[i]


@compiled
def _subtract(row: Any, mean: Any) -> None:
    for i in range(row.size):
        row[i] -= mean[i]


@compiled
def _add(row: Any, mean: Any) -> None:
    for i in range(row.size):
        row[i] += mean[i]


@compiled
def _hot_tile(buffers: BufferTable, pages: PageTable, page: int, b: int, tile: int) -> Any:
    """Its address."""
    slot = buffers.hot_base[b] + _I64(pages.hot_slots[page]) * buffers.hot_stride_bytes[b]
    numbers = buffers.tile_heads * buffers.tokens * buffers.head_dim
    return slot + tile * numbers * buffers.number_bytes


@compiled
def _load_tile(
    buffers: BufferTable, pages: PageTable, turns: _Turns, page: int, b: int, tile: int, x: Any
) -> None:
    """Fill ``x`` with the hot numbers, keys turned back and without their means."""
    load_numbers(_hot_tile(buffers, pages, page, b, tile), buffers.number_kind, x.reshape(-1))
    if buffers.frequencies.shape[0] > 0:
        index = buffers.frequencies_index[b]
        _prepare_turns(buffers, pages, turns, page, index)
        for v in range(x.shape[0]):
            token = v % buffers.tokens
            _turn_back(x[v], turns.cosines[index, token], turns.sines[index, token])
    if buffers.means.shape[0] > 0:
        for v in range(x.shape[0]):
            _subtract(x[v], buffers.means[b, tile * buffers.tile_heads + v // buffers.tokens])


@compiled
def _store_tile(
    buffers: BufferTable, pages: PageTable, turns: _Turns, page: int, b: int, tile: int, x: Any
) -> None:
    """The inverse. ``x`` is overwritten."""
    if buffers.means.shape[0] > 0:
        for v in range(x.shape[0]):
            _add(x[v], buffers.means[b, tile * buffers.tile_heads + v // buffers.tokens])
    if buffers.frequencies.shape[0] > 0:
        index = buffers.frequencies_index[b]
        _prepare_turns(buffers, pages, turns, page, index)
        for v in range(x.shape[0]):
            token = v % buffers.tokens
            _turn(x[v], turns.cosines[index, token], turns.sines[index, token])
    store_numbers(x.reshape(-1), _hot_tile(buffers, pages, page, b, tile), buffers.number_kind)


@compiled
def _cold_buffer(buffers: BufferTable, pages: PageTable, page: int, b: int) -> Any:
    """Its address."""
    cold_page = pages.cold_base + _I64(pages.cold_pages[page]) * buffers.cold_page_bytes
    return cold_page + buffers.cold_offset_bytes[b]


# A few numbers as arguments: the whole table would take longer than a vector to hand over.


@compiled
def _one_part(start: Any, code_bytes: int, num_tiles: int, tile: int, vectors: int) -> Any:
    """A tile's codes in the buffer at ``start``, uint8 [vectors, code bytes of a vector]."""
    num_bytes = code_bytes // num_tiles
    return bytes_at(start + tile * num_bytes, num_bytes).reshape((vectors, -1))


@compiled
def _two_parts(start: Any, code_bytes: int, num_tiles: int, tile: int, vectors: int) -> Any:
    """Those of turbo3: a pair."""
    high_bytes = code_bytes // 3
    low_bytes = 2 * high_bytes
    low = _one_part(start, low_bytes, num_tiles, tile, vectors)
    return low, _one_part(start + low_bytes, high_bytes, num_tiles, tile, vectors)


@compiled
def _clear_padding(buffers: BufferTable, start: Any) -> None:
    used_bytes = buffers.code_bytes + 2 * buffers.num_parameters
    bytes_at(start + used_bytes, buffers.buffer_bytes - used_bytes)[:] = 0


@compiled
def _room_for_tile(buffers: BufferTable) -> Any:
    """For its numbers, and what packing it takes."""
    x = np.empty((buffers.tile_heads * buffers.tokens, buffers.head_dim), np.float32)
    rows = np.empty((2, buffers.head_dim), np.float32)
    codes = np.empty(buffers.head_dim, np.uint8)
    return x, tiles.Workbench(buffers.group, buffers.signs, rows, codes)


@inlined
def _pack(
    buffers: BufferTable, pages: PageTable, first: int, last: int, codes_of: Any, pack_tile: Any
) -> None:
    turns = _no_turns(buffers, pages)
    x, bench = _room_for_tile(buffers)
    num_parameters = buffers.num_parameters // buffers.num_tiles
    for item in range(first, last):
        page, b = item // buffers.hot_base.size, item % buffers.hot_base.size
        start = _cold_buffer(buffers, pages, page, b)
        first_parameter = start + buffers.code_bytes
        for tile in range(buffers.num_tiles):
            _load_tile(buffers, pages, turns, page, b, tile, x)
            codes = codes_of(start, buffers.code_bytes, buffers.num_tiles, tile, x.shape[0])
            parameters = halves_at(first_parameter + 2 * tile * num_parameters, num_parameters)
            pack_tile(x, codes, parameters, bench)
        _clear_padding(buffers, start)


@inlined
def _unpack(
    buffers: BufferTable, pages: PageTable, first: int, last: int, codes_of: Any, unpack_tile: Any
) -> None:
    turns = _no_turns(buffers, pages)
    x, bench = _room_for_tile(buffers)
    num_parameters = buffers.num_parameters // buffers.num_tiles
    for item in range(first, last):
        page, b = item // buffers.hot_base.size, item % buffers.hot_base.size
        start = _cold_buffer(buffers, pages, page, b)
        first_parameter = start + buffers.code_bytes
        for tile in range(buffers.num_tiles):
            codes = codes_of(start, buffers.code_bytes, buffers.num_tiles, tile, x.shape[0])
            parameters = halves_at(first_parameter + 2 * tile * num_parameters, num_parameters)
            unpack_tile(x, codes, parameters, bench)
            _store_tile(buffers, pages, turns, page, b, tile, x)


# One function a format, since what is kept on disk can not be made by another function.


@compiled_and_kept
def _pack_int8(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _pack(buffers, pages, first, last, _one_part, tiles.pack_int8)


@compiled_and_kept
def _unpack_int8(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _unpack(buffers, pages, first, last, _one_part, tiles.unpack_int8)


@compiled_and_kept
def _pack_fp8(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _pack(buffers, pages, first, last, _one_part, tiles.pack_fp8)


@compiled_and_kept
def _unpack_fp8(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _unpack(buffers, pages, first, last, _one_part, tiles.unpack_fp8)


@compiled_and_kept
def _pack_int4_token(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _pack(buffers, pages, first, last, _one_part, tiles.pack_int4_token)


@compiled_and_kept
def _unpack_int4_token(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _unpack(buffers, pages, first, last, _one_part, tiles.unpack_int4_token)


@compiled_and_kept
def _pack_int4_channel(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _pack(buffers, pages, first, last, _one_part, tiles.pack_int4_channel)


@compiled_and_kept
def _unpack_int4_channel(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _unpack(buffers, pages, first, last, _one_part, tiles.unpack_int4_channel)


@compiled_and_kept
def _pack_turbo4(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _pack(buffers, pages, first, last, _one_part, tiles.pack_turbo4)


@compiled_and_kept
def _unpack_turbo4(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _unpack(buffers, pages, first, last, _one_part, tiles.unpack_turbo4)


@compiled_and_kept
def _pack_turbo3(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _pack(buffers, pages, first, last, _two_parts, tiles.pack_turbo3)


@compiled_and_kept
def _unpack_turbo3(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _unpack(buffers, pages, first, last, _two_parts, tiles.unpack_turbo3)


@compiled_and_kept
def _pack_int4_block(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _pack(buffers, pages, first, last, _one_part, tiles.pack_int4_block)


@compiled_and_kept
def _unpack_int4_block(buffers: BufferTable, pages: PageTable, first: int, last: int) -> None:
    _unpack(buffers, pages, first, last, _one_part, tiles.unpack_int4_block)


PACKERS: Final[dict[ColdFormat, Worker]] = {
    ColdFormat.INT8: _pack_int8,
    ColdFormat.FP8: _pack_fp8,
    ColdFormat.INT4_TOKEN: _pack_int4_token,
    ColdFormat.INT4_CHANNEL: _pack_int4_channel,
    ColdFormat.TURBO4: _pack_turbo4,
    ColdFormat.TURBO3: _pack_turbo3,
    ColdFormat.INT4_BLOCK: _pack_int4_block,
}
UNPACKERS: Final[dict[ColdFormat, Worker]] = {
    ColdFormat.INT8: _unpack_int8,
    ColdFormat.FP8: _unpack_fp8,
    ColdFormat.INT4_TOKEN: _unpack_int4_token,
    ColdFormat.INT4_CHANNEL: _unpack_int4_channel,
    ColdFormat.TURBO4: _unpack_turbo4,
    ColdFormat.TURBO3: _unpack_turbo3,
    ColdFormat.INT4_BLOCK: _unpack_int4_block,
}
