"""From a configuration to a working storage: memory, codec, files, streams, in the order they
depend on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from coldpage.codecs import (
    BufferDesc,
    ColdPageCodec,
    LifeCycleDesc,
    PoolDesc,
    PoolGroupDesc,
    create_default_cold_page_codec,
)
from coldpage.config import DiskTierConfig, HostTierConfig, KVCacheManagerConfig
from coldpage.device.base import Device, MemoryKind
from coldpage.device.file import BlockFile
from coldpage.errors import CodecConsumedError, CodecError, StorageError
from coldpage.events import Counters, level_names
from coldpage.layout import (
    ColdLayout,
    HotLayout,
    LayerGroup,
    cold_layout,
    cold_slot_counts,
    hot_layout,
    hot_slot_counts,
)
from coldpage.manager.stats import LevelStats
from coldpage.migration import CodecMoves, DiskMoves
from coldpage.page import PageTable
from coldpage.pools import DiskPool, LevelPools, MemoryPool, disk_slot_bytes
from coldpage.slots import SlotAllocator
from coldpage.staging import StagingRing, page_ring_bytes
from coldpage.storage import Storage
from coldpage.types import CacheLevel, LifeCycleId, PageIndexLocation, PoolGroupIndex, PoolIndex

__all__ = ["LevelBuilder", "max_sequence_tokens"]

_LOCK_NAME: Final = "instance.lock"


def max_sequence_tokens(
    groups: Sequence[LayerGroup], level: LevelPools, tokens_per_block: int, max_utilization: float
) -> int:
    """The longest sequence whose live blocks fit the level at ``max_utilization``. ``groups``
    is by life cycle.
    """
    limits = [
        level.max_locked_slots(PoolGroupIndex(g), max_utilization)
        for g in range(len(level.allocators))
    ]

    def fits(num_blocks: int) -> bool:
        used = [0] * len(limits)
        for life_cycle, group in enumerate(groups):
            live = group.live_blocks(num_blocks * tokens_per_block, tokens_per_block)
            used[level.pool_group_of[life_cycle]] += live
        return all(u <= limit for u, limit in zip(used, limits, strict=True))

    low, high = 0, 1
    while fits(high) and high < 1 << 24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * tokens_per_block


class LevelBuilder:
    """Builds the storage of one manager and owns its resources; ``close`` frees them in reverse
    order.
    """

    def __init__(self, config: KVCacheManagerConfig, device: Device) -> None:
        self.layout: HotLayout = hot_layout(config.layers)
        self._config = config
        self._device = device
        self._resources = contextlib.ExitStack()
        self._new_files: list[Path] = []  # that were not there before
        self._levels: list[LevelPools] = []
        self._names = level_names([tier.tier for tier in config.cache_tiers])

    def build(self, codec: ColdPageCodec | None) -> Storage:
        """Consume the codec, allocate every level and connect the parts. Raises ConfigurationError,
        StorageError or DeviceError, with nothing left behind.
        """
        try:
            return self._build(_consume(codec))
        except BaseException:
            for path in self._new_files:
                path.unlink(missing_ok=True)
            self.close()
            raise

    def _build(self, codec: ColdPageCodec) -> Storage:
        hot = self._build_hot()
        codec.configure(self._describe(hot))
        life_cycles = [lc.life_cycle_id for lc in self.layout.life_cycles]
        _validate(codec, self.layout)
        cold_bytes = [codec.query_cold_page_bytes(lc) for lc in life_cycles]
        cold = cold_layout(cold_bytes)
        for index, tier in enumerate(self._config.cache_tiers[1:], start=1):
            if isinstance(tier, HostTierConfig):
                self._build_host(CacheLevel(index), tier, cold)
            elif isinstance(tier, DiskTierConfig):
                self._build_disk(CacheLevel(index), tier, cold)
        ring = None
        if any(level.is_disk for level in self._levels):
            ring = StagingRing(self._device, page_ring_bytes(max(cold_bytes)), MemoryKind.PINNED)
            self._resources.callback(ring.close)
        # Streams come last, after all that can fail: a stream ends with its device only.
        table, counters = PageTable(len(self._levels)), Counters()
        moves = CodecMoves(self._device, codec, self._levels, table, counters)
        disk_moves = (
            None if ring is None else DiskMoves(self._device.io, moves, ring, table, counters)
        )
        return Storage(self._device, self._levels, table, moves, disk_moves, counters)

    def _build_hot(self) -> LevelPools:
        counts = hot_slot_counts(
            self.layout, self._config.cache_tiers[0].quota_bytes, self._config.tokens_per_block
        )
        memory = tuple(
            tuple(self._memory(count, size, MemoryKind.DEVICE) for size in sizes)
            for count, sizes in zip(counts, self.layout.slot_bytes, strict=True)
        )
        group_of = [lc.hot_pool_group for lc in self.layout.life_cycles]
        return self._add_level(CacheLevel(0), group_of, counts, memory, ())

    def _memory(self, num_slots: int, slot_bytes: int, kind: MemoryKind) -> MemoryPool:
        pool = MemoryPool(self._device, num_slots, slot_bytes, kind)
        self._resources.callback(pool.close)
        return pool

    def _build_host(self, level: CacheLevel, tier: HostTierConfig, cold: ColdLayout) -> None:
        counts = self._cold_counts(cold, cold.slot_bytes, tier.quota_bytes)
        memory = tuple(
            (self._memory(count, size, MemoryKind.PINNED),)
            for count, size in zip(counts, cold.slot_bytes, strict=True)
        )
        self._add_level(level, cold.pool_group_of, counts, memory, ())

    def _build_disk(self, level: CacheLevel, tier: DiskTierConfig, cold: ColdLayout) -> None:
        strides = [disk_slot_bytes(size) for size in cold.slot_bytes]
        counts = self._cold_counts(cold, strides, tier.quota_bytes)
        directory = self._lock_directory(Path(tier.path))
        pools: list[DiskPool] = []
        for stale in directory.glob("pool-*.slots"):
            # Left by another model with more pool groups; nothing is reused, and the bound holds.
            if stale.name not in {f"pool-{group}.slots" for group in range(len(counts))}:
                stale.unlink()
        for group, (count, size) in enumerate(zip(counts, cold.slot_bytes, strict=True)):
            path = directory / f"pool-{group}.slots"
            is_new = not path.exists()
            pool = DiskPool(BlockFile(path, count * strides[group]), count, size)
            self._resources.callback(pool.close)
            if is_new:
                self._new_files.append(path)
            pools.append(pool)
        self._add_level(level, cold.pool_group_of, counts, (), tuple(pools))

    def _cold_counts(
        self, cold: ColdLayout, strides: Sequence[int], quota_bytes: int
    ) -> tuple[int, ...]:
        per_block = self._config.tokens_per_block
        return cold_slot_counts(self.layout, cold, strides, quota_bytes, per_block)

    def _lock_directory(self, path: Path) -> Path:
        """The instance's directory, created and locked against a second opener until ``close``."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"the disk tier can not use {path} ({error.strerror}): "
                "make it a writable directory or choose another path"
            ) from error
        self._resources.callback(os.close, lock_fd)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StorageError(
                f"the disk tier's directory {path} is in use by process {holder}: "
                "stop that process or choose another path"
            ) from error
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        return path

    def _add_level(
        self,
        level: CacheLevel,
        group_of: Sequence[PoolGroupIndex],
        counts: Sequence[int],
        memory: tuple[tuple[MemoryPool, ...], ...],
        disk: tuple[DiskPool, ...],
    ) -> LevelPools:
        pools = LevelPools(
            level,
            self._config.cache_tiers[level].tier,
            self._names[level],
            np.array(group_of, np.int16),
            tuple(SlotAllocator(count) for count in counts),
            memory,
            disk,
        )
        self._levels.append(pools)
        return pools

    def _describe(self, hot: LevelPools) -> list[PoolGroupDesc]:
        """The hot pool groups as a codec sees them, in index order."""
        descs: list[PoolGroupDesc] = []
        for index, pools in enumerate(hot.memory):
            members = tuple(
                LifeCycleDesc(
                    lc.life_cycle_id,
                    lc.layer_group_id,
                    tuple(
                        BufferDesc(b.buffer_id, b.pool_index, b.offset_bytes, b.num_bytes)
                        for b in lc.buffers
                    ),
                )
                for lc in self.layout.life_cycles
                if lc.hot_pool_group == index
            )
            pool_descs = tuple(
                PoolDesc(PoolIndex(i), pool.base_address, pool.slot_bytes)
                for i, pool in enumerate(pools)
            )
            num_slots = hot.allocators[index].num_slots
            descs.append(PoolGroupDesc(PoolGroupIndex(index), num_slots, pool_descs, members))
        return descs

    def max_sequence_tokens(self, max_utilization: float) -> int:
        """See the function of this name; of the hot level."""
        return self._capacity_tokens(self._levels[0], max_utilization)

    def _capacity_tokens(self, level: LevelPools, max_utilization: float) -> int:
        groups = [self.layout.layer_groups[lc.layer_group_id] for lc in self.layout.life_cycles]
        return max_sequence_tokens(groups, level, self._config.tokens_per_block, max_utilization)

    def level_stats(self, level: LevelPools) -> LevelStats:
        """The level's numbers now."""
        sizes = [level.slot_bytes(PoolGroupIndex(g)) for g in range(len(level.allocators))]
        return LevelStats(
            level.name,
            level.tier,
            sum(a.num_slots * s for a, s in zip(level.allocators, sizes, strict=True)),
            sum(a.num_used * s for a, s in zip(level.allocators, sizes, strict=True)),
            sum(a.num_slots for a in level.allocators),
            sum(a.num_used for a in level.allocators),
            sum(a.num_quarantined for a in level.allocators),
            self._capacity_tokens(level, 1.0),
        )

    def close(self) -> None:
        """Free everything that was built. Nothing may be in flight."""
        self._resources.close()


def _consume(codec: ColdPageCodec | None) -> ColdPageCodec:
    if codec is None:
        codec = create_default_cold_page_codec()
    if codec.is_consumed:
        raise CodecConsumedError(
            "this codec belongs to another manager already: make a new one for each manager"
        )
    codec.is_consumed = True
    return codec


def _validate(codec: ColdPageCodec, layout: HotLayout) -> None:
    """Every rule of the codec's answers, before any cold memory is allocated."""
    name = codec.codec_id
    for lc in layout.life_cycles:
        member = lc.life_cycle_id
        num_bytes = codec.query_cold_page_bytes(member)
        if num_bytes <= 0:
            raise CodecError(
                f"codec {name} has a cold page of {num_bytes} bytes for life cycle {member}: "
                "return its fixed, positive size from query_cold_page_bytes"
            )
        location = codec.query_page_index_location(member)
        if not isinstance(location, PageIndexLocation):
            raise CodecError(
                f"codec {name} wants the page indices of life cycle {member} at {location}: "
                "return a PageIndexLocation from query_page_index_location"
            )
        if location is not PageIndexLocation.HOST:
            raise CodecError(
                f"codec {name} wants its page indices in {location.value} memory, "
                "which this device does not offer: use host indices"
            )
        _validate_batching(codec, layout, member)


def _validate_batching(codec: ColdPageCodec, layout: HotLayout, member: LifeCycleId) -> None:
    """The representative of a batching class is its smallest member, and like all the others."""
    batches = f"codec {codec.codec_id} batches life cycle"
    first = codec.get_batching_layer_group_id(member)
    if not 0 <= first <= member:
        raise CodecError(
            f"{batches} {member} as {first}: "
            "return the smallest life cycle of its class from get_batching_layer_group_id"
        )
    representative = codec.get_batching_layer_group_id(first)
    if representative != first:
        raise CodecError(
            f"{batches} {member} as {first}, and that one as {representative}: "
            "a representative must stand for itself"
        )
    if layout.life_cycles[first].hot_pool_group != layout.life_cycles[member].hot_pool_group:
        raise CodecError(f"{batches}s {first} and {member} of two hot pool groups: keep them apart")
    sizes = codec.query_cold_page_bytes(first), codec.query_cold_page_bytes(member)
    if sizes[0] != sizes[1]:
        raise CodecError(
            f"{batches}s {first} and {member} with cold pages of {sizes[0]} and {sizes[1]} bytes: "
            "keep them apart"
        )
