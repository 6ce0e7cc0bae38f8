"""From a configuration to a working storage: memory, codecs, files, streams, in the order they
depend on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from coldpage.codecs import (
    ConfiguredCodec,
    PoolDesc,
    PoolGroupDesc,
    describe_life_cycles,
)
from coldpage.config import (
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManagerConfig,
)
from coldpage.device.base import Device, MemoryKind
from coldpage.events import StorageEvents, level_names
from coldpage.layout import ColdLayout, HotLayout, cold_layout, hot_layout
from coldpage.manager.quotas import Quotas, Weights
from coldpage.manager.tier_codecs import TierCodecs
from coldpage.migration import NUM_SCRATCH_SLOTS, CodecCalls, CodecMoves, DiskMoves
from coldpage.page import PageTable
from coldpage.pools import DiskTier, LevelPools, MemoryPool, PoolGroup
from coldpage.prefix import PrefixTree
from coldpage.slots import SlotAllocator
from coldpage.staging import StagingRing, page_ring_bytes
from coldpage.storage import Storage
from coldpage.store import (
    FileIdentity,
    InstanceDirectory,
    InstanceIdentity,
    SlotFile,
    default_instance_id,
    slot_bytes_of,
)
from coldpage.types import (
    HOT_LEVEL,
    BlockOrdinal,
    CacheLevel,
    LayerGroupId,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = ["LevelBuilder"]


class LevelBuilder:
    """Builds the storage of one manager and owns its resources; ``close`` frees them in reverse
    order.
    """

    def __init__(self, config: KVCacheManagerConfig, device: Device, codecs: TierCodecs) -> None:
        """Takes over ``codecs``, which are closed with the rest."""
        self._resources = contextlib.ExitStack()
        self._resources.callback(codecs.close)
        self._config = config
        self._device = device
        self._codecs = codecs
        self._disk_tiers: list[DiskTier] = []
        self._levels: list[LevelPools] = []
        self._cold: dict[CacheLevel, ColdLayout] = {}
        self._names = level_names([tier.tier for tier in config.cache_tiers])
        self._num_scratch = NUM_SCRATCH_SLOTS if codecs.num_formats > 1 else 0
        try:
            self.layout: HotLayout = hot_layout(
                config.layers,
                separate_sinks=config.separate_sink_pages,
                num_recent_blocks=config.num_recent_blocks,
            )
            self._quotas = Quotas(config, self.layout, self._num_scratch)
        except BaseException:
            self.close()
            raise

    def build(self) -> Storage:
        """Allocate every level, configure the codecs and connect the parts. Raises
        ConfigurationError, StorageError or DeviceError, with nothing left behind.
        """
        try:
            return self._build()
        except BaseException:
            for tier in self._disk_tiers:
                tier.remove_new_files()
            self.close()
            raise

    def _build(self) -> Storage:
        self._build_hot()
        self._codecs.configure(self.describe_hot())
        ring = self._build_ring()  # before large pools: a device may prepare memory in this order
        for index, tier in enumerate(self._config.cache_tiers[1:], start=1):
            codec = self._codecs.of_tier(index)
            if isinstance(tier, DiskTierConfig):
                self._build_disk(CacheLevel(index), tier, codec)
            else:
                self._build_memory(CacheLevel(index), tier, codec)
        calls = CodecCalls(self._device, self._codecs.all)
        self._resources.callback(calls.close)
        # Streams come last, after all that can fail: a stream ends with its device only.
        table, events = PageTable(len(self._levels)), StorageEvents(self._names)
        per_block = self._config.tokens_per_block
        self.tree = PrefixTree(table, self.layout.life_cycles, per_block)
        class_names = [lc.page_class.value for lc in self.layout.life_cycles]
        moves = CodecMoves(self._device, calls, self._levels, table, events, class_names)
        self._codecs.prepare(moves.offload_stream)
        disk_moves = (
            None
            if ring is None
            else DiskMoves(self._device.io, moves, ring, table, events, self.tree.names)
        )
        disks = [t for t in self._config.cache_tiers if isinstance(t, DiskTierConfig)]
        return Storage(
            self._device,
            self._levels,
            table,
            moves,
            disk_moves,
            events,
            self._config.free_watermark,
            is_write_behind=any(tier.write_behind for tier in disks),
            copy_level=self._copy_level(),
        )

    def _build_ring(self) -> StagingRing | None:
        if not any(isinstance(tier, DiskTierConfig) for tier in self._config.cache_tiers):
            return None
        largest = max(codec.max_cold_page_bytes for codec in self._codecs.all)
        ring = StagingRing(self._device, page_ring_bytes(largest), MemoryKind.PINNED)
        self._resources.callback(ring.close)
        return ring

    def _copy_level(self) -> CacheLevel | None:
        """The first cold level in memory, if it is to have copies of what is suspended."""
        for index, tier in enumerate(self._config.cache_tiers[1:], start=1):
            if not isinstance(tier, DiskTierConfig):
                return CacheLevel(index) if tier.write_behind else None
        return None

    # ------------------------------------------------------------------ levels

    def _build_hot(self) -> None:
        counts = self._quotas.hot_slots(self._config.cache_tiers[0].quota_bytes)
        # Before the slots: of too large a quota the device says so in a sentence.
        pools = [
            tuple(
                self._memory(self._num_scratch + count, size, MemoryKind.DEVICE) for size in sizes
            )
            for count, sizes in zip(counts, self.layout.slot_bytes, strict=True)
        ]
        groups = tuple(
            PoolGroup(
                CacheLevel(0),
                PoolGroupIndex(index),
                SlotAllocator(count, self._num_scratch),
                pool,
                len(self.layout.layer_groups_of(PoolGroupIndex(index))),
            )
            for index, (count, pool) in enumerate(zip(counts, pools, strict=True))
        )
        group_of = tuple(lc.hot_pool_group for lc in self.layout.life_cycles)
        self._add_level(CacheLevel(0), groups, group_of, None)

    def _memory(self, num_slots: int, slot_bytes: int, kind: MemoryKind) -> MemoryPool:
        pool = MemoryPool(self._device, num_slots, slot_bytes, kind)
        self._resources.callback(pool.close)
        return pool

    def _build_memory(
        self, level: CacheLevel, tier: HostTierConfig | DeviceTierConfig, codec: ConfiguredCodec
    ) -> None:
        cold = self._cold[level] = cold_layout(codec.cold_page_bytes)
        counts = self._quotas.cold_slots(
            tier.quota_bytes, cold, cold.slot_bytes, self._names[level]
        )
        is_host = isinstance(tier, HostTierConfig)
        kind = MemoryKind.PINNED if is_host else MemoryKind.DEVICE
        pools = [
            (self._memory(count, size, kind),)
            for count, size in zip(counts, cold.slot_bytes, strict=True)
        ]
        self._add_cold(level, cold, counts, pools, codec)

    def _build_disk(self, level: CacheLevel, tier: DiskTierConfig, codec: ConfiguredCodec) -> None:
        cold = self._cold[level] = cold_layout(codec.cold_page_bytes)
        identity = self._identity(codec)
        files = [
            FileIdentity(identity.digest, codec.identity, size, self._config.tokens_per_block)
            for size in cold.slot_bytes
        ]
        strides = [slot_bytes_of(file) for file in files]
        counts = self._quotas.cold_slots(tier.quota_bytes, cold, strides, self._names[level])
        instance_id = tier.instance_id or default_instance_id(identity)
        directory = InstanceDirectory.open(tier.path, instance_id, identity)
        disk = DiskTier(directory, identity, tier.read_deadline_s, tier.time_to_live_s)
        self._resources.callback(disk.close)
        self._disk_tiers.append(disk)
        disk.open_files(files, list(counts))
        self._add_cold(level, cold, counts, disk.files, codec, disk)

    def _identity(self, codec: ConfiguredCodec) -> InstanceIdentity:
        """What a page on disk is good for: this model, in this form, divided like this."""
        groups = [
            f"layers {','.join(map(str, group.layer_ids))} window {group.sliding_window_tokens} "
            f"sinks {group.num_sink_tokens} hot {self._hot_bytes(group.layer_group_id)}"
            for group in self.layout.layer_groups
        ]
        cold = ",".join(map(str, codec.cold_page_bytes))
        geometry = f"{self._config.tokens_per_block} tokens a block; {'; '.join(groups)}; {cold}"
        return InstanceIdentity(self._config.model_fingerprint, codec.identity, geometry)

    def _hot_bytes(self, layer_group_id: LayerGroupId) -> int:
        return self.layout.page_bytes(self.layout.life_cycle_of(layer_group_id, BlockOrdinal(0)))

    def _add_cold(
        self,
        level: CacheLevel,
        cold: ColdLayout,
        counts: Sequence[int],
        pools: Sequence[tuple[MemoryPool] | SlotFile],
        codec: ConfiguredCodec,
        disk: DiskTier | None = None,
    ) -> None:
        lives = [
            {
                lc.layer_group_id
                for lc in self.layout.life_cycles
                if cold.pool_group_of[lc.life_cycle_id] == index
            }
            for index in range(len(counts))
        ]
        groups = tuple(
            PoolGroup(level, PoolGroupIndex(index), SlotAllocator(count), pool, len(members))
            for index, (count, pool, members) in enumerate(zip(counts, pools, lives, strict=True))
        )
        self._add_level(level, groups, cold.pool_group_of, codec, disk)

    def _add_level(
        self,
        level: CacheLevel,
        groups: tuple[PoolGroup, ...],
        group_of: tuple[PoolGroupIndex, ...],
        codec: ConfiguredCodec | None,
        disk: DiskTier | None = None,
    ) -> None:
        tier, name = self._config.cache_tiers[level].tier, self._names[level]
        self._levels.append(LevelPools(level, tier, name, groups, group_of, codec, disk))

    # ------------------------------------------------------------------ later

    def num_slots_for(
        self, level: LevelPools, quota_bytes: int, byte_weights: Weights | None
    ) -> tuple[int, ...]:
        """Slots by pool group that a quota gives the level. Raises ConfigurationError when it is
        too small.
        """
        if level.level == HOT_LEVEL:
            return self._quotas.hot_slots(quota_bytes, byte_weights)
        strides = [group.slot_bytes for group in level.groups]
        cold = self._cold[level.level]
        return self._quotas.cold_slots(quota_bytes, cold, strides, level.name, byte_weights)

    def describe_hot(self) -> list[PoolGroupDesc]:
        """The hot pool groups as codecs and kernels see them, in index order."""
        return [self._describe(group) for group in self._levels[HOT_LEVEL].groups]

    def _describe(self, group: PoolGroup) -> PoolGroupDesc:
        members = describe_life_cycles(self.layout, group.index)
        pools = tuple(
            PoolDesc(PoolIndex(i), pool.base_address, pool.slot_bytes)
            for i, pool in enumerate(group.memory)
        )
        return PoolGroupDesc(group.index, group.slots.stop_slot, pools, members)

    def close(self) -> None:
        """Free everything that was built. Nothing may be in flight."""
        self._resources.close()
