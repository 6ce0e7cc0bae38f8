"""Who may lose what, who waits for whom, and what is left when the manager has gone."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

import coldpage.store.health
from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    ClosedError,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
)
from coldpage.config import CacheTierConfig
from coldpage.device.file import BlockFile
from coldpage.types import BufferRole, LayerId

PER_BLOCK = 4
BUFFER_BYTES = 2048
PAGE_BYTES = 2 * BUFFER_BYTES
SLOT_BYTES = PAGE_BYTES + 4096


def make_manager(
    num_hot: int, *cold: CacheTierConfig, page_bytes: int = PAGE_BYTES
) -> KVCacheManager:
    buffers = tuple(BufferConfig(BufferRole(role), page_bytes // 2) for role in ("key", "value"))
    layers = (AttentionLayerConfig(LayerId(0), buffers),)
    tiers = (DeviceTierConfig(num_hot * page_bytes), *cold)
    return KVCacheManager(KVCacheManagerConfig(PER_BLOCK, tiers, layers, 1.0, b"model"))


def filled(manager: KVCacheManager, num_blocks: int, seed: int) -> KVCache:
    """A suspended cache with committed blocks of its own."""
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(num_blocks * PER_BLOCK)
    cache.synchronize()
    cache.commit(np.arange(num_blocks * PER_BLOCK) + 1000 * seed)
    cache.suspend()
    return cache


def test_held_pages_stay_while_a_colder_level_has_droppable_ones(tmp_path: Path) -> None:
    disk = DiskTierConfig(str(tmp_path), 4 * SLOT_BYTES)
    with make_manager(4, HostTierConfig(4 * PAGE_BYTES), disk) as manager:
        filled(manager, 4, 1).close()  # nobody's, and on the host level once the next needs room
        held = [filled(manager, 4, 2)]
        held.append(filled(manager, 4, 3))  # sends the first to disk: the host level is full
        manager.finish_transfers()
        assert [level.used_slots for level in manager.stats().levels] == [4, 4, 4]
        held.append(filled(manager, 4, 4))
        totals = manager.stats().totals
        assert totals["dropped_pages"] == 4
        assert totals.get("lost_held_pages", 0) == 0
        assert all(cache.missing_blocks() == [] for cache in held)


def test_eviction_does_not_wait_for_slow_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore larger than the staging ring, each read late, beside a sequence that grows."""
    page_bytes = 2 * 2**20
    num_blocks = 64  # 128 MiB: twice the ring
    disk = DiskTierConfig(str(tmp_path), 4 * num_blocks * (page_bytes + 4096))
    with make_manager(num_blocks + 24, disk, page_bytes=page_bytes) as manager:
        cold = filled(manager, num_blocks, 1)
        filled(manager, num_blocks + 24, 2).close()
        manager.finish_transfers()
        idle = [filled(manager, 4, 3 + i) for i in range(4)]
        read_some = BlockFile._read_some

        def slow(self: BlockFile, buffers: list[memoryview], offset: int) -> int:
            time.sleep(0.5)
            return read_some(self, buffers, offset)

        monkeypatch.setattr(BlockFile, "_read_some", slow)
        assert cold.resume()
        growing = manager.create_kv_cache()
        assert growing.resume()
        started = time.perf_counter()
        assert growing.resize(16 * PER_BLOCK)  # at the cost of the idle ones
        assert time.perf_counter() - started < 0.4
        assert not cold.is_ready()
        cold.synchronize()
        assert cold.missing_blocks() == []
        assert all(cache.missing_blocks() == [] for cache in idle)


def test_a_disk_that_fails_writes_says_why_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coldpage.store.health, "FIRST_RETRY_S", 0.0)
    disk = DiskTierConfig(str(tmp_path), 8 * SLOT_BYTES)
    with make_manager(4, disk) as manager:
        with monkeypatch.context() as failing, caplog.at_level(logging.WARNING, "coldpage"):

            def fail(self: BlockFile, buffers: list[memoryview], offset: int) -> int:
                raise OSError(5, "Input/output error")

            failing.setattr(BlockFile, "_write_some", fail)
            first = filled(manager, 4, 1)
            filled(manager, 4, 2).close()
            manager.finish_transfers()
        assert len(first.missing_blocks()) == 4
        assert "Input/output error" in caplog.text
        assert "look at the disk" in caplog.text
        assert "every colder tier is full" not in caplog.text
        assert manager.stats().levels[1].quarantined_slots == 0
        assert manager.stats().levels[1].state == "read_only"
        second = filled(manager, 4, 3)
        filled(manager, 4, 4).close()
        manager.finish_transfers()
        assert second.missing_blocks() == []
        assert manager.stats().levels[1].state == "ok"
        assert second.resume()
        second.synchronize()
        assert second.missing_blocks() == []


def test_a_cache_whose_manager_is_closed_says_so(tmp_path: Path) -> None:
    with make_manager(4, HostTierConfig(8 * PAGE_BYTES)) as manager:
        cache = filled(manager, 2, 1)
    with pytest.raises(ClosedError, match="manager"):
        cache.resume()
    with pytest.raises(ClosedError):
        cache.page_indices(manager.layer_group_of(LayerId(0)))
    cache.close()
    cache.close()


def test_a_truncated_window_is_not_ready_before_its_blocks_have_places() -> None:
    buffers = (BufferConfig(BufferRole("key"), BUFFER_BYTES),)
    layers = (AttentionLayerConfig(LayerId(0), buffers, sliding_window_tokens=4),)
    tiers = (DeviceTierConfig(12 * BUFFER_BYTES),)
    with KVCacheManager(KVCacheManagerConfig(PER_BLOCK, tiers, layers, 1.0, b"model")) as manager:
        cache = manager.create_kv_cache()
        assert cache.resume()
        assert cache.resize(24)
        cache.synchronize()
        cache.commit(range(24))
        cache.truncate(12)
        cache.synchronize()
        missing = cache.missing_blocks()
        assert missing
        slots = cache.page_indices(manager.layer_group_of(LayerId(0)))
        assert all(slots[block] >= 0 for block in missing)


def test_what_else_is_at_the_path_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pool-7.slots").write_bytes(b"x" * 8192)
    (tmp_path / "paged" / "instance-other").mkdir(parents=True)
    (tmp_path / "paged" / "instance-other" / "pool-0.slots").write_bytes(b"y" * 8192)
    for _ in range(2):
        with make_manager(4, DiskTierConfig(str(tmp_path), 8 * SLOT_BYTES)) as manager:
            filled(manager, 4, 1).close()
            assert manager.flush(10.0) == 0
    assert (tmp_path / "pool-7.slots").read_bytes() == b"x" * 8192
    assert (tmp_path / "paged" / "instance-other" / "pool-0.slots").read_bytes() == b"y" * 8192
    assert len(list((tmp_path / "paged").iterdir())) == 2


def test_polling_a_full_host_level_looks_at_its_slots_once(tmp_path: Path) -> None:
    disk = DiskTierConfig(str(tmp_path), 64 * SLOT_BYTES)
    with make_manager(4, HostTierConfig(8 * PAGE_BYTES), disk) as manager:
        for seed in range(6):
            filled(manager, 4, seed)
        manager.poll()
        manager.finish_transfers()
        manager.poll()
        policy = manager._storage._escalation.policy
        calls: list[int] = []
        score = policy.score
        policy.score = lambda *a: calls.append(1) or score(*a)  # type: ignore[method-assign, func-returns-value]
        for _ in range(5):
            manager.poll()
        assert not calls
