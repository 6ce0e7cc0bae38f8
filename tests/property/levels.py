"""Changing the sizes of a manager's levels, and what must come of it."""

from __future__ import annotations

import numpy as np
import pytest

from coldpage import KVCacheManager, UsageError
from coldpage.device.base import DeviceBytes
from coldpage.errors import ConfigurationError, DeviceError
from coldpage.pools import LevelPools
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import HOT_LEVEL, NO_SLOT, BlockOrdinal, CacheLevel
from tests.property.setups import ROOMY_BLOCKS, Setup

# What the simulated device sets aside for memory that grows.
MAX_GROWTH = 4


def totals_of(level: LevelPools) -> list[int]:
    """Slots by pool group."""
    return [group.slots.num_slots for group in level.groups]


class Levels:
    """The levels of one manager and their sizes now."""

    def __init__(self, setup: Setup, manager: KVCacheManager) -> None:
        self._setup = setup
        self._manager = manager
        self._pools = list(manager._storage.levels)
        self._first_totals = [totals_of(level) for level in self._pools]
        self._bases = self._hot_bases()
        self.blocks = list(setup.blocks)
        self._peaks = [[0] * len(level.groups) for level in self._pools]
        self.check_sizes()

    def __len__(self) -> int:
        return len(self._pools)

    def _hot_bases(self) -> list[int]:
        return [p.base_address for group in self._manager.hot_pool_groups() for p in group.pools]

    def hosts(self) -> tuple[int | None, int | None]:
        """The cold levels in memory with the most free slots, and farthest from the hot level."""
        free = {
            level.level: sum(group.slots.num_free for group in level.groups)
            for level in self._pools[1:]
            if not level.is_disk
        }
        return max(free, key=lambda level: free[level], default=None), max(free, default=None)

    def can_resize(self, level: int) -> bool:
        """A roomy disk stays roomy: there no loss is forgiven."""
        return not (self._pools[level].is_disk and self._setup.disk_blocks >= ROOMY_BLOCKS)

    def resize(
        self, level: int, num_blocks: int, sequences: list[PatternSequence], *, had_failures: bool
    ) -> str:
        """Give the level room for so many blocks. Returns what became of that, in a word."""
        manager, pools = self._manager, self._pools[level]
        quota = self._setup.quota_bytes(level, num_blocks)
        weights = manager._storage.usage.byte_weights(CacheLevel(level))
        before = totals_of(pools)
        try:
            wanted = list(manager._builder.num_slots_for(pools, quota, weights))
        except ConfigurationError:
            with pytest.raises(ConfigurationError):
                manager.resize(CacheLevel(level), quota)
            assert totals_of(pools) == before, "refused, and the level has changed"
            return "too small"
        in_the_way = level == HOT_LEVEL and self._is_in_the_way(wanted, sequences)
        outcome = self._resize(CacheLevel(level), quota, before, wanted)
        if outcome == "done":
            assert not in_the_way, "a page of an active sequence has been cut off"
            self.blocks[level] = num_blocks
        elif outcome == "in use":
            assert any(s.is_active for s in sequences), "in use by nobody"
            assert level == HOT_LEVEL or self._only_copies_in_use(level, wanted)
        else:
            is_over = any(
                count > MAX_GROWTH * first
                for count, first in zip(wanted, self._first_totals[level], strict=True)
            )
            assert had_failures or is_over, "the device had no reason to refuse"
        self.check_sizes()
        self.forget_peaks(level)
        return outcome

    def _resize(self, level: CacheLevel, quota: int, before: list[int], wanted: list[int]) -> str:
        pools = self._pools[level]
        try:
            self._manager.resize(level, quota)
        except UsageError:
            assert totals_of(pools) == before, "refused, and the level has changed"
            return "in use"
        except DeviceError:
            now = zip(totals_of(pools), before, wanted, strict=True)
            assert all(count in (old, new) for count, old, new in now), "neither old nor new"
            return "rejected"
        assert totals_of(pools) == wanted
        return "done"

    def _only_copies_in_use(self, level: int, wanted: list[int]) -> bool:
        """Whether active sequences have more pages on a cold level alone than would fit."""
        table, pools = self._manager._storage.table, self._pools[level]
        is_needed = (table.num_locks > 0) & (table.present == pools.bit)
        counts = pools.count(table.life_cycle[np.flatnonzero(is_needed)]).tolist()
        return any(count > limit for count, limit in zip(counts, wanted, strict=True))

    def _is_in_the_way(self, wanted: list[int], sequences: list[PatternSequence]) -> bool:
        layout, hot = self._manager.layout, self._pools[HOT_LEVEL]
        for sequence in sequences:
            if not sequence.is_active:
                continue
            for group in layout.layer_groups:
                life_cycle = layout.life_cycle_of(group.layer_group_id, BlockOrdinal(0))
                pool_group = hot.group_of(life_cycle)
                stop = pool_group.slots.first_slot + wanted[pool_group.index]
                slots = sequence.cache.page_indices(group.layer_group_id)
                if (slots[slots != NO_SLOT] >= stop).any():
                    return True
        return False

    def check_sizes(self) -> None:
        """What the manager says of its levels follows from their slots."""
        manager, setup = self._manager, self._setup
        stats = manager.stats()
        for level, said in zip(self._pools, stats.levels, strict=True):
            totals = totals_of(level)
            assert [group.total_slots for group in said.pool_groups] == totals
            assert said.total_slots == sum(totals)
        if setup.kind == "full":
            (num_slots,) = totals_of(self._pools[HOT_LEVEL])
            assert manager.num_hot_blocks == num_slots
        assert self._hot_bases() == self._bases, "the hot level has moved"
        for layer in manager.config.layers:
            pool_group = self._pools[HOT_LEVEL].group_of(
                manager.layout.life_cycle_of(
                    manager.layer_group_of(layer.layer_id), BlockOrdinal(0)
                )
            )
            for buffer in layer.buffers:
                hidden = manager.hot_array(layer.layer_id, buffer.role)
                assert isinstance(hidden, DeviceBytes)
                assert hidden.num_rows == pool_group.slots.stop_slot

    # ------------------------------------------------------------------ peaks

    def note_usage(self) -> None:
        """The most that was seen to be used since peaks were taken."""
        for peaks, level in zip(self._peaks, self._pools, strict=True):
            for index, group in enumerate(level.groups):
                peaks[index] = max(peaks[index], group.slots.num_used)

    def forget_peaks(self, level: int) -> None:
        self._peaks[level] = [0] * len(self._pools[level].groups)

    def take_peaks(self, level: int) -> None:
        """Peaks are at least what was seen; afterwards they begin again."""
        seen = self._peaks[level]
        for again in (False, True):
            stats = self._manager.take_peak_stats(CacheLevel(level))
            for group, least in zip(stats, seen, strict=True):
                assert least <= group.peak_used_slots <= group.total_slots
                assert group.used_slots <= group.peak_used_slots
                assert not again or group.peak_used_slots == group.used_slots
            seen = [0] * len(stats)
        self.forget_peaks(level)
