"""The pools of one cache level, by the pool groups of that level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coldpage.pools.disk import DiskPool
from coldpage.pools.memory import MemoryPool
from coldpage.slots import SlotAllocator
from coldpage.types import CacheLevel, CacheTier, Int32Array, PoolGroupIndex

__all__ = ["LevelPools", "split_by"]


def split_by(keys: npt.NDArray[np.integer], pages: Int32Array) -> Iterator[tuple[int, Int32Array]]:
    """``pages`` in runs of equal ``keys``, keeping their order within a run."""
    if keys.size == 0:
        return
    first = int(keys[0])
    if bool((keys == first).all()):
        yield first, pages
        return
    for key in np.unique(keys).tolist():
        yield key, pages[keys == key]


@dataclass(frozen=True, slots=True)
class LevelPools:
    """A level: its medium, which pool group each life cycle uses there, and the pools themselves.

    The hot level has one or more pools a group, a cold level in memory one, a disk level none in
    memory.
    """

    level: CacheLevel
    tier: CacheTier
    name: str
    pool_group_of: npt.NDArray[np.int16]  # by life cycle
    allocators: tuple[SlotAllocator, ...]  # by pool group, as are the next two
    memory: tuple[tuple[MemoryPool, ...], ...]
    disk: tuple[DiskPool, ...]

    @property
    def bit(self) -> np.uint8:
        """The level's bit in the page columns."""
        return np.uint8(1 << self.level)

    @property
    def is_disk(self) -> bool:
        """Whether its slots can be reached only by I/O."""
        return self.tier is CacheTier.DISK

    def slot_bytes(self, pool_group: PoolGroupIndex) -> int:
        """What one slot takes on the medium."""
        if self.is_disk:
            return self.disk[pool_group].slot_bytes
        return sum(pool.slot_bytes for pool in self.memory[pool_group])

    def max_locked_slots(self, pool_group: PoolGroupIndex, max_utilization: float) -> int:
        """How many slots locked pages may fill: ``max_utilization`` of them, and always the pages
        of one block.
        """
        num_slots = self.allocators[pool_group].num_slots
        pages_of_block = int(np.count_nonzero(self.pool_group_of == pool_group))
        return min(num_slots, max(pages_of_block, int(num_slots * max_utilization)))
