"""Bringing a conversation's pages back, alone: against one memory copy or one O_DIRECT read of the
same bytes.

    python -m benchmarks restore
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from benchmarks.kv import BLOCK_BYTES, TOKENS_PER_BLOCK, evict_all, make_manager, write_cache
from benchmarks.rows import Row, scratch_directory, timed_ms
from coldpage import DiskTierConfig, HostTierConfig, KVCache

__all__ = ["run"]

REPETITIONS = 9


def _resume(kv_cache: KVCache) -> None:
    assert kv_cache.resume()
    kv_cache.synchronize()


def _read_direct(path: Path, buffer: mmap.mmap) -> None:
    """All of ``buffer`` from the start of the file, past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        num_read, view = 0, memoryview(buffer)
        while num_read < len(view):
            num_read += os.preadv(fd, [view[num_read:]], num_read)
        view.release()
    finally:
        os.close(fd)


def run(is_quick: bool) -> list[Row]:
    """At most twice the time of the copy or the read."""
    rows: list[Row] = []
    for num_tokens in (1_500,) if is_quick else (1_500, 6_000):
        num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
        num_bytes = num_blocks * BLOCK_BYTES
        config = f"{num_tokens:,} tokens, {num_bytes / 2**20:.0f} MiB in {num_blocks} pages"
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        with make_manager(num_blocks + 1, HostTierConfig(3 * num_bytes)) as manager:
            kv_cache = write_cache(manager, num_blocks, 1)
            ours, rival = [], []
            for _ in range(REPETITIONS):
                evict_all(manager)
                ours.append(timed_ms(lambda: _resume(kv_cache)))
                kv_cache.suspend()
                rival.append(
                    timed_ms(
                        lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, num_bytes)
                    )
                )
        rows.append(Row("restore from host", config, "one memory copy", ours, rival, "<= 2", False))
        with scratch_directory() as directory:
            disk = DiskTierConfig(directory, 3 * num_bytes)
            with make_manager(num_blocks + 1, disk) as manager, mmap.mmap(-1, num_bytes) as buffer:
                kv_cache = write_cache(manager, num_blocks, 1)
                ours, rival = [], []
                for _ in range(REPETITIONS):
                    evict_all(manager)
                    ours.append(timed_ms(lambda: _resume(kv_cache)))
                    kv_cache.suspend()
                    (path,) = Path(directory).rglob("pool-0.slots")
                    rival.append(timed_ms(lambda: _read_direct(path, buffer)))
            rows.append(
                Row("restore from disk", config, "one O_DIRECT read", ours, rival, "<= 2", False)
            )
    return rows
