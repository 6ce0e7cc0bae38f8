"""Slots come back when their pages go, and whoever gets one next sees only its own bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coldpage import KVCacheManager, ReuseScope
from coldpage.device.base import Memory, MemoryKind
from coldpage.device.host import HostDevice
from coldpage.testing.example_codecs import PaddingCodec
from tests.property.driver import Driver
from tests.property.setups import Setup
from tests.sim.scenes import (
    GROUP,
    PER_BLOCK,
    Make,
    filled,
    hot_blocks,
    moves,
    prompt,
    push_out,
    resumed,
    suspended,
    totals,
)


def _used(driver: Driver) -> list[int]:
    return [level.used_slots for level in driver.manager.stats().levels]


@pytest.mark.parametrize("levels", [{"host_blocks": 20}, {"disk_blocks": 20}])
def test_cold_slots_come_back_with_truncate_and_close(make: Make, levels: dict[str, int]) -> None:
    driver = make(hot_blocks=8, max_util=1.0, **levels)
    sequence = filled(driver, prompt(6), num_committed=0)
    sequence.cache.suspend()
    push_out(driver, 8)
    assert _used(driver) == [0, 6]
    sequence.truncate(2 * PER_BLOCK)
    driver.manager.finish_transfers()
    assert _used(driver) == [0, 2]
    sequence.truncate(0)
    driver.manager.finish_transfers()
    assert _used(driver) == [0, 0]
    # Another tenant gets the same slots, on both levels, and finds its own bytes there.
    other = filled(driver, prompt(6, 1), scope=ReuseScope(salt="another tenant"))
    other.cache.suspend()
    push_out(driver, 8)
    resumed(driver, other)


def test_block_tables_name_hot_slots_only(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=20, max_util=1.0)
    sequence = suspended(driver, prompt(4))
    assert hot_blocks(sequence) == [0, 1, 2, 3]
    push_out(driver, 8)
    assert hot_blocks(sequence) == []
    resumed(driver, sequence)
    slots = sequence.cache.page_indices(GROUP).tolist()
    assert len(set(slots)) == 4
    assert set(slots) <= set(range(driver.manager.stats().levels[0].total_slots))


def test_a_full_host_level_fails_no_suspend(make: Make) -> None:
    """What finds no room is lost, counted, and written again by its sequence; nothing else is."""
    driver = make(hot_blocks=4, host_blocks=4, max_util=1.0)
    sequences = [suspended(driver, prompt(4, first)) for first in range(4)]
    assert moves(driver, "hot-host") >= 4
    assert totals(driver, "lost_held_pages") >= 4
    num_missing = 0
    for sequence in sequences:
        num_missing += len(sequence.cache.missing_blocks())
        assert sequence.resume()
        sequence.cache.synchronize()
        sequence.recompute()
        sequence.check()
        sequence.cache.suspend()
    assert num_missing >= 4


class _Counting(HostDevice):
    """Adds up what is allocated of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = dict.fromkeys(MemoryKind, 0)

    def allocate(self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False) -> Memory:
        self.num_bytes[kind] += num_bytes
        return super().allocate(num_bytes, kind, is_growable=is_growable)


@pytest.mark.parametrize("make_codec", [lambda: None, lambda: PaddingCodec(100)])
def test_memory_for_pages_stays_within_its_quota_and_shows(
    make_codec: Callable[[], PaddingCodec | None],
) -> None:
    """With any codec, and however the quota divides."""
    for num_blocks in (8, 9, 13):
        setup = Setup("mixed-sizes", hot_blocks=num_blocks, host_blocks=3 * num_blocks)
        config = setup.config(None)  # type: ignore[arg-type]
        device = _Counting()
        with KVCacheManager(config, device=device, codec=make_codec()) as manager:
            hot, host = manager.stats().levels
            for stats, tier in zip((hot, host), config.cache_tiers, strict=True):
                assert 0 < stats.total_bytes <= tier.quota_bytes
            assert device.num_bytes[MemoryKind.DEVICE] == hot.total_bytes
            assert device.num_bytes[MemoryKind.PINNED] == host.total_bytes
        device.close()
