"""Pages of hot numbers to packed ones and back, on the cores of this process.

Everything is addresses of this process. A call splits its buffers among a pool of threads, without
the interpreter lock, and blocks until all is done; any thread may call, several at once too.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.cpu_numbers import NUMBER_KINDS
from coldpage.kernels.cold.cpu_pages import (
    PACKERS,
    UNPACKERS,
    BufferTable,
    PageTable,
    Worker,
)
from coldpage.kernels.cold.formats import ColdFormat, PackedBuffers
from coldpage.kernels.cold.numbers import signs
from coldpage.types import PAGE_INDEX_PAIR, Int32Array

__all__ = ["compile_for", "pack_pages", "unpack_pages"]

# Below this much of hot bytes a thread, handing work over costs more than it saves.
_MIN_SHARE_BYTES: Final = 128 << 10


def pack_pages(
    buffers: PackedBuffers,
    cold_base: int,
    pairs: npt.NDArray[np.void],
    ordinals: Int32Array | None,
) -> None:
    """Pack hot slots ``pairs["src"]`` into cold pages ``pairs["dst"]``: every byte of the packed
    buffers is written. Blocks.

    ``ordinals`` [num_pages] are the blocks' places in their sequences, wanted where the buffers
    have frequencies. A hot number that is NaN, infinite or beyond 2**60 counts as 0.
    """
    assert pairs.dtype == PAGE_INDEX_PAIR
    pages = _page_table(buffers, cold_base, pairs["dst"], pairs["src"], ordinals)
    _run(PACKERS[buffers.cold_format], buffers, pages)


def unpack_pages(
    buffers: PackedBuffers,
    cold_base: int,
    pairs: npt.NDArray[np.void],
    ordinals: Int32Array | None,
) -> None:
    """The inverse: cold pages ``pairs["src"]`` into hot slots ``pairs["dst"]``. Blocks."""
    assert pairs.dtype == PAGE_INDEX_PAIR
    pages = _page_table(buffers, cold_base, pairs["src"], pairs["dst"], ordinals)
    _run(UNPACKERS[buffers.cold_format], buffers, pages)


def compile_for(buffers: PackedBuffers) -> None:
    """Compile what ``pack_pages`` and ``unpack_pages`` will need, some seconds, or take it from
    disk where it was kept. Blocks."""
    pairs = np.empty(0, PAGE_INDEX_PAIR)
    for move in (pack_pages, unpack_pages):
        move(buffers, 0, pairs, None)


def _run(worker: Worker, buffers: PackedBuffers, pages: PageTable) -> None:
    num_items = pages.cold_pages.size * buffers.hot_base.size
    num_cores = len(os.sched_getaffinity(0))
    num_shares = num_items * buffers.shape.num_bytes // _MIN_SHARE_BYTES
    num_shares = max(1, min(num_cores, num_shares, num_items))
    table = _buffer_table(buffers)
    edges = [num_items * i // num_shares for i in range(num_shares + 1)]
    submitted = [
        _pool(num_cores).submit(worker, table, pages, edges[i], edges[i + 1])
        for i in range(1, num_shares)
    ]
    try:
        worker(table, pages, 0, edges[1])
    finally:
        wait(submitted)  # they write to the caller's memory
    for share in submitted:
        share.result()


@lru_cache(maxsize=1)
def _pool(num_cores: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, num_cores - 1), "coldpage-codec")


# A child has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _page_table(
    buffers: PackedBuffers,
    cold_base: int,
    cold_pages: Int32Array,
    hot_slots: Int32Array,
    ordinals: Int32Array | None,
) -> PageTable:
    if buffers.frequencies is None:
        ordinals = None
    elif ordinals is None:
        assert not cold_pages.size, "keys are turned by their positions, so these are needed"
    else:
        assert ordinals.shape == cold_pages.shape
    # Copies, since compiled functions are made for writable arrays without gaps.
    return PageTable(
        int(cold_base),
        np.array(cold_pages, np.int32),
        np.array(hot_slots, np.int32),
        np.empty(0, np.int32) if ordinals is None else np.array(ordinals, np.int32),
    )


@lru_cache(maxsize=64)
def _buffer_table(buffers: PackedBuffers) -> BufferTable:
    cold_format, shape = buffers.cold_format, buffers.shape
    assert cold_format.refusal(shape) is None
    num_buffers, half = buffers.hot_base.size, shape.head_dim // 2
    group = cold_format.group(shape)
    is_one_tile = cold_format is ColdFormat.INT4_BLOCK
    frequencies, index = np.empty((0, half), np.uint32), np.zeros(num_buffers, np.int64)
    if buffers.frequencies is not None:
        assert buffers.frequencies.shape == (num_buffers, half)
        frequencies, index = np.unique(buffers.frequencies, axis=0, return_inverse=True)
    means = np.empty((0, 0, 0), np.float32)
    if buffers.means is not None:
        assert buffers.means.shape == (num_buffers, shape.num_kv_heads, shape.head_dim)
        means = np.array(buffers.means, np.float32, order="C")
    return BufferTable(
        tokens=shape.tokens_per_block,
        head_dim=shape.head_dim,
        number_kind=NUMBER_KINDS[shape.number_type],
        number_bytes=shape.number_type.num_bytes,
        num_tiles=1 if is_one_tile else shape.num_kv_heads,
        tile_heads=shape.num_kv_heads if is_one_tile else 1,
        group=group,
        code_bytes=cold_format.code_bytes(shape),
        num_parameters=cold_format.num_parameters(shape),
        buffer_bytes=cold_format.buffer_bytes(shape),
        cold_page_bytes=buffers.cold_page_bytes,
        hot_base=np.array(buffers.hot_base, np.int64),
        hot_stride_bytes=np.array(buffers.hot_stride_bytes, np.int64),
        cold_offset_bytes=np.array(buffers.cold_offset_bytes, np.int64),
        frequencies=np.array(frequencies, np.uint32, order="C"),
        frequencies_index=np.array(index, np.int64).reshape(-1),
        means=means,
        signs=signs(group).copy() if cold_format.is_rotated else np.empty(0, np.float32),
    )
