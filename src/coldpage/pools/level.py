"""One cache level: its pool groups, and which of them each life cycle uses there.

A pool group is an object of its level, so that groups of two levels can not be taken for each
other: there is no index to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from coldpage.codecs import ConfiguredCodec
from coldpage.pools.disk_tier import DiskTier
from coldpage.pools.memory import MemoryPool
from coldpage.slots import SlotAllocator
from coldpage.store import HealthState, SlotFile
from coldpage.types import (
    CacheLevel,
    CacheTier,
    Int32Array,
    Int64Array,
    LifeCycleId,
    PoolGroupIndex,
)

__all__ = ["LevelPools", "PoolGroup", "split_by"]

_Item = TypeVar("_Item", bound=np.generic)


def split_by(
    keys: npt.NDArray[np.integer], items: npt.NDArray[_Item]
) -> Iterator[tuple[int, npt.NDArray[_Item]]]:
    """``items`` in runs of equal ``keys``, keeping their order within a run."""
    if keys.size == 0:
        return
    first = int(keys[0])
    if bool((keys == first).all()):
        yield first, items
        return
    for key in np.unique(keys).tolist():
        yield key, items[keys == key]


class PoolGroup:
    """Pools that share slot ids: one or more in memory on the hot level, one on a cold level.

    ``index`` counts the groups of this level only. ``num_block_pages`` is how many pages of one
    block live here.
    """

    def __init__(
        self,
        level: CacheLevel,
        index: PoolGroupIndex,
        slots: SlotAllocator,
        pools: tuple[MemoryPool, ...] | SlotFile,
        num_block_pages: int,
    ) -> None:
        self.level = level
        self.index = index
        self.slots = slots
        self.num_block_pages = num_block_pages
        self._pools = pools
        self.take_ready()

    @property
    def memory(self) -> tuple[MemoryPool, ...]:
        """The pools, on a level in memory."""
        assert isinstance(self._pools, tuple), "a disk level has no pool in memory"
        return self._pools

    @property
    def cold_memory(self) -> MemoryPool:
        """The one pool of a cold level in memory."""
        (pool,) = self.memory
        return pool

    @property
    def disk(self) -> SlotFile:
        """The one pool of a disk level."""
        assert isinstance(self._pools, SlotFile), "a level in memory has no disk pool"
        return self._pools

    @property
    def slot_bytes(self) -> int:
        """What one slot takes on the medium."""
        if isinstance(self._pools, SlotFile):
            return self._pools.slot_bytes
        return sum(pool.slot_bytes for pool in self._pools)

    def max_locked_slots(self, max_utilization: float) -> int:
        """How many slots locked pages may fill: ``max_utilization`` of them, and always the pages
        of one block.
        """
        num_slots = self.slots.num_slots
        return min(num_slots, max(self.num_block_pages, int(num_slots * max_utilization)))

    def resize(self, num_slots: int) -> None:
        """Have ``num_slots`` slots. Those cut off have no owner, and nothing is in flight there.
        Raises DeviceError or StorageError, changing nothing, when there is no room for more.
        """
        num_places = self.slots.first_slot + num_slots
        if isinstance(self._pools, SlotFile):
            self._pools.resize(num_places)
        else:
            self._resize_memory(self._pools, num_places)
        self.slots.resize(num_slots, self._num_ready(num_slots))

    def take_ready(self) -> None:
        """Use what the device has prepared of the pools' memory since the last call."""
        self.slots.set_ready(self._num_ready(self.slots.num_slots))

    def _num_ready(self, num_slots: int) -> int:
        if isinstance(self._pools, SlotFile) or not self._pools:
            return num_slots
        num_places = min(pool.num_ready_slots for pool in self._pools)
        return max(0, min(num_slots, num_places - self.slots.first_slot))

    def _resize_memory(self, pools: tuple[MemoryPool, ...], num_places: int) -> None:
        old = self.slots.stop_slot
        for count, pool in enumerate(pools):
            try:
                pool.resize(num_places)
            except BaseException:
                for changed in pools[:count]:
                    changed.resize(old)
                raise


class LevelPools:
    """A level: its medium and name, its pool groups, and, if it is cold, the codec of its pages."""

    def __init__(
        self,
        level: CacheLevel,
        tier: CacheTier,
        name: str,
        groups: tuple[PoolGroup, ...],
        pool_group_of: tuple[PoolGroupIndex, ...],
        codec: ConfiguredCodec | None,
        disk: DiskTier | None = None,
    ) -> None:
        """``pool_group_of`` is by life cycle; ``codec`` is None on the hot level, ``disk`` on
        levels in memory.
        """
        self.level = level
        self.tier = tier
        self.name = name
        self.groups = groups
        self.bit = np.uint8(1 << level)
        self.is_disk = tier is CacheTier.DISK
        # Files are read into and written from such a level itself, if it has their codec.
        self.is_host_memory = tier is CacheTier.HOST
        self._codec = codec
        self._disk = disk
        self._index_of = np.array(pool_group_of, np.int16)

    @property
    def is_complete(self) -> bool:
        """Whether all slots are ready to be used, so that nothing is being prepared."""
        return all(group.slots.num_ready == group.slots.num_slots for group in self.groups)

    @property
    def codec(self) -> ConfiguredCodec:
        """What made the cold pages here."""
        assert self._codec is not None, "the hot level has no codec"
        return self._codec

    @property
    def disk(self) -> DiskTier:
        """The files of a disk level together."""
        assert self._disk is not None, "a level in memory has no files"
        return self._disk

    @property
    def may_write(self) -> bool:
        """Whether pages can be sent here now: a disk that fails takes none for a while."""
        return self._disk is None or self._disk.health.may_write()

    @property
    def may_read(self) -> bool:
        """Whether pages can be brought from here now."""
        return self._disk is None or self._disk.health.may_read()

    @property
    def state(self) -> HealthState:
        """What the medium is good for now; memory is always good."""
        return HealthState.OK if self._disk is None else self._disk.health.state

    @property
    def is_off(self) -> bool:
        """Whether what is asked of the level is a miss."""
        return self.state is HealthState.OFF

    @property
    def codec_name(self) -> str:
        """The codec for people; empty on the hot level."""
        return "" if self._codec is None else self._codec.name

    def group_of(self, life_cycle_id: LifeCycleId | int) -> PoolGroup:
        """Where the pages of a life cycle live on this level."""
        return self.groups[int(self._index_of[life_cycle_id])]

    def split(
        self, life_cycles: npt.NDArray[np.int16], items: npt.NDArray[_Item]
    ) -> Iterator[tuple[PoolGroup, npt.NDArray[_Item]]]:
        """``items``, whose life cycles are given, by pool group; the order within one is kept."""
        if len(self.groups) == 1 and items.size:
            yield self.groups[0], items
            return
        for index, members in split_by(self._index_of[life_cycles], items):
            yield self.groups[index], members

    def count(self, life_cycles: npt.NDArray[np.int16]) -> Int64Array:
        """How many of the life cycles' pages each pool group would hold, in the order of
        ``groups``.
        """
        counts = np.bincount(self._index_of[life_cycles], minlength=len(self.groups))
        return counts.astype(np.int64)

    def owners(self, group: PoolGroup) -> Int32Array:
        """The pages that own a slot of one of this level's groups, by slot."""
        assert group.level == self.level, "a pool group of another level"
        owners: Int32Array = group.slots.page[group.slots.owned()]
        return owners
