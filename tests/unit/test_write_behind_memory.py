"""Writing behind gives every page a copy on disk; memory is still where conversations wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from coldpage import DeviceTierConfig, DiskTierConfig, HostTierConfig, KVCacheManager
from coldpage.config import AttentionLayerConfig, BufferConfig, KVCacheManagerConfig
from coldpage.testing.pattern_engine import PatternEngine
from coldpage.types import LayerId

BLOCK = 4
PAGE_BYTES = 4096


def manager_at(path: Path) -> KVCacheManager:
    """Room for 4 blocks in hot memory and 6 on the host."""
    tiers = (
        DeviceTierConfig(4 * PAGE_BYTES),
        HostTierConfig(6 * PAGE_BYTES),
        DiskTierConfig(str(path), 64 * 3 * PAGE_BYTES, write_behind=True),
    )
    layer = AttentionLayerConfig(LayerId(0), (BufferConfig("key", PAGE_BYTES),))
    return KVCacheManager(KVCacheManagerConfig(BLOCK, tiers, (layer,), 1.0, b"model"))


def say(engine: PatternEngine, first: int) -> list[int]:
    """A conversation of 3 blocks, written to disk before anything else happens."""
    tokens = list(range(first, first + 3 * BLOCK))
    sequence = engine.create(tokens)
    assert sequence.resume()
    assert sequence.step(tokens[sequence.cache.history_length :])
    sequence.cache.close()
    manager = engine.manager
    deadline_s = time.monotonic() + 10.0
    written = manager.stats().levels[2]
    while written.used_slots < engine.manager.stats().num_committed_blocks:
        assert time.monotonic() < deadline_s
        manager.poll()
        manager.wait_for_progress(0.01)
        manager.finish_transfers()
        written = manager.stats().levels[2]
    return tokens


def test_what_leaves_hot_memory_waits_on_the_host(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        engine = PatternEngine(manager)
        said = [say(engine, 100 * n) for n in range(4)]
        places = [manager.create_kv_cache(tokens).cached_tokens_by_level for tokens in said]
        # The newest is hot, some of the one before too; the oldest had to leave the host as well.
        assert places[3] == (12, 0, 0)
        assert sum(place[1] for place in places) == 6 * BLOCK
        assert places[0][2] > 0
        manager.check_integrity()
        assert engine.problems == []


def test_a_flush_goes_on_where_staging_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldpage.manager.levels.page_ring_bytes", lambda largest: 4 * largest)
    tiers = DeviceTierConfig(200 * PAGE_BYTES), DiskTierConfig(str(tmp_path), 600 * PAGE_BYTES)
    layer = AttentionLayerConfig(LayerId(0), (BufferConfig("key", PAGE_BYTES),))
    with KVCacheManager(KVCacheManagerConfig(BLOCK, tiers, (layer,), 1.0, b"model")) as manager:
        sequence = PatternEngine(manager).create()
        assert sequence.resume()
        assert sequence.step(list(range(150 * BLOCK)))
        sequence.cache.close()
        assert manager.flush(20.0) == 0
        assert manager.stats().levels[1].used_slots == 150
        manager.check_integrity()
