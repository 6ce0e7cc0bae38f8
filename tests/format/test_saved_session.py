"""The file of saved sequences: one that was committed is read, and written again byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    HalfOpenRange,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
)
from coldpage.snapshot import Origin, read_header, state_read, state_write
from coldpage.types import LayerGroupId, LayerId

GOLDEN = Path(__file__).with_name("session-v1.cpsn")
ORIGIN = Origin(tokenizer="words", dtype="uint8")
BLOCK = 4
CONFIG = KVCacheManagerConfig(
    BLOCK,
    (DeviceTierConfig(1 << 16),),
    tuple(
        AttentionLayerConfig(LayerId(i), (BufferConfig("key", 64),), window)
        for i, window in enumerate((None, 6))
    ),
    1.0,
    bytes(range(32)),
)


def fill(manager: KVCacheManager, cache: KVCache, start: int, stop: int) -> None:
    """Write and commit positions; a page holds its layer, block, and a count."""
    assert cache.resize(stop)
    cache.synchronize()
    for layer in (0, 1):
        slots = cache.page_indices(manager.layer_group_of(LayerId(layer)))
        array = manager.hot_array(LayerId(layer), "key")
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            if slots[block] >= 0:
                array[slots[block]] = np.arange(64) + 64 * layer + block
    cache.commit(np.arange(start, stop))


def sequences(manager: KVCacheManager) -> list[KVCache]:
    """A sequence with a hole, and a fork that shares its pages."""
    cache = manager.create_kv_cache()
    assert cache.resume()
    fill(manager, cache, 0, 14)
    cache.drop_blocks(HalfOpenRange(4, 8), LayerGroupId(0))
    cache.suspend()
    return [cache, cache.fork()]


def test_the_committed_file_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "again"
    with KVCacheManager(CONFIG) as manager:
        caches = sequences(manager)
        state_write(manager, caches, path, origin=ORIGIN, labels=["first", "fork"])
    assert path.read_bytes() == GOLDEN.read_bytes()


def test_the_committed_file_is_read() -> None:
    header = read_header(GOLDEN)
    assert [one.label for one in header.sequences] == ["first", "fork"]
    assert header.pages.size == 3 + 2
    with KVCacheManager(CONFIG) as manager:
        for cache in state_read(manager, GOLDEN, origin=ORIGIN):
            assert cache.tokens.tolist() == list(range(14))
            assert cache.holes(LayerGroupId(0)) == [1]
            assert cache.resume()
            cache.synchronize()
            for layer in (0, 1):
                slots = cache.page_indices(manager.layer_group_of(LayerId(layer)))
                for block in np.flatnonzero(slots >= 0).tolist():
                    page = manager.hot_array(LayerId(layer), "key")[slots[block]]
                    np.testing.assert_array_equal(page, np.arange(64) + 64 * layer + block)
            cache.close()
