"""Pool groups differ from level to level: what shares one on the hot level need not on a cold one,
and the reverse. The bytes come back all the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import coldpage.staging
from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
)
from coldpage.device.simulated import SimulatedDevice
from coldpage.testing.example_codecs import PaddingCodec
from coldpage.testing.page_codec import HotPages
from coldpage.testing.pattern_engine import PatternEngine
from coldpage.types import BufferRole, CacheLevel, LayerId, LifeCycleId

PER_BLOCK = 2
TOKENS = list(range(16))


class _TailCodec(PaddingCodec):
    """Adds one more alignment to the pages of every life cycle but the first."""

    codec_id = "tail"

    def representative(self, hot: HotPages) -> LifeCycleId:
        return hot.life_cycle.life_cycle_id

    def _tail_bytes(self, hot: HotPages) -> int:
        return 64 if hot.life_cycle.life_cycle_id else 0

    def cold_bytes(self, hot: HotPages) -> int:
        return super().cold_bytes(hot) + self._tail_bytes(hot)


def _layer(layer_id: int, sizes: tuple[int, ...], window: int | None) -> AttentionLayerConfig:
    buffers = tuple(
        BufferConfig(BufferRole(role), size * PER_BLOCK)
        for role, size in zip(("key", "value"), sizes, strict=True)
    )
    return AttentionLayerConfig(LayerId(layer_id), buffers, sliding_window_tokens=window)


def _round_trip(manager: KVCacheManager, device: SimulatedDevice) -> None:
    """Fill, suspend, push everything down with two more sequences, and bring it back."""
    engine = PatternEngine(manager)
    sequences = []
    for first in range(3):
        sequence = engine.create()
        sequences.append(sequence)
        assert sequence.resume()
        assert sequence.step([first, *TOKENS])
        sequence.cache.suspend()
        manager.finish_transfers()
        manager.poll()
        manager.check_integrity()
    for sequence in sequences:
        assert sequence.resume()
        sequence.cache.synchronize()
        assert sequence.cache.missing_blocks() == []
        sequence.check()
        sequence.cache.suspend()
        manager.check_integrity()
    for sequence in sequences:
        sequence.cache.close()
    stats = manager.stats()
    assert stats.totals.get("lost_held_pages", 0) == 0
    for path in ("hot-host", "host-hot", "hot-disk", "disk-hot"):
        assert stats.moved_pages.get(path, 0) > 0, path
    manager.close()
    device.close()
    assert engine.problems == []
    assert device.violations == []


@pytest.mark.parametrize("separate_sinks", [False, True])
@pytest.mark.parametrize(
    ("sizes", "windows", "num_hot", "num_cold"),
    [
        # Alike on the hot level, of two sizes below.
        (((8, 8), (8, 8)), (None, 1000), 1, 2),
        # Two hot pool groups, of 16 + 8 and of 12 + 12 bytes, whose cold pages are equal.
        (((16, 8), (12, 12)), (None, 1000), 2, 1),
    ],
    ids=["shared hot, apart cold", "apart hot, shared cold"],
)
def test_groupings_of_the_levels_are_independent(
    sizes: tuple[tuple[int, ...], ...],
    windows: tuple[int | None, ...],
    num_hot: int,
    num_cold: int,
    separate_sinks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coldpage.staging, "MIN_PAGE_RING_BYTES", 1 << 14)
    layers = tuple(
        _layer(i, of_layer, window)
        for i, (of_layer, window) in enumerate(zip(sizes, windows, strict=True))
    )
    block_bytes = PER_BLOCK * sum(map(sum, sizes))
    config = KVCacheManagerConfig(
        PER_BLOCK,
        (
            DeviceTierConfig(12 * block_bytes),
            HostTierConfig(8 * (block_bytes + (64 + 2 * 16 if num_cold == 2 else 0))),
            DiskTierConfig(str(tmp_path), 64 * 2 * 8192),
        ),
        layers,
        model_fingerprint=b"pattern",
        initial_pool_ratio=(1.0, 1.0),
        separate_sink_pages=separate_sinks,
    )
    device = SimulatedDevice(1, arena_bytes=1 << 26)
    codec = _TailCodec(16) if num_cold == 2 else None
    manager = KVCacheManager(config, device=device, codec=codec)
    hot, host, disk = (manager.stats().levels[i].pool_groups for i in range(3))
    assert (len(hot), len(host), len(disk)) == (num_hot, num_cold, num_cold)
    per_group = 2 if separate_sinks else 1
    assert sum(len(group.life_cycles) for group in hot) == 2 * per_group
    for level in (host, disk):
        together = sorted(i for group in level for i in group.life_cycles)
        assert together == list(range(2 * per_group))
    # The peaks of a level come in the level's own grouping.
    assert len(manager.take_peak_stats(CacheLevel(0))) == num_hot
    assert len(manager.take_peak_stats(CacheLevel(1))) == num_cold
    _round_trip(manager, device)
