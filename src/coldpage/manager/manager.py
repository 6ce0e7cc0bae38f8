"""The façade: one manager of pages, tiers and sequences. It holds no model code and is owned by one
thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from coldpage.block_table import BlockTable
from coldpage.codecs import ColdPageCodec, PoolGroupDesc
from coldpage.config import DiskAdmission, DiskTierConfig, KVCacheManagerConfig, ReuseScope
from coldpage.device.base import Device, DeviceBytes
from coldpage.device.host import HostDevice
from coldpage.errors import ClosedError, DeviceError, UsageError, WrongThreadError
from coldpage.manager.levels import LevelBuilder
from coldpage.manager.observers import CacheObserver, ObserverHub
from coldpage.manager.quotas import max_sequence_tokens
from coldpage.manager.reopening import adopt_pages, index_of
from coldpage.manager.stats import ManagerStats, PoolGroupStats, group_stats, level_stats
from coldpage.manager.tier_codecs import TierCodecs
from coldpage.page import DEFAULT_PRIORITY, check_priority
from coldpage.pools import LevelPools
from coldpage.prefix import RecentKeys, block_key, root_key
from coldpage.sequence import KVCache, OnMissing, ReusedPrefix, SequenceContext
from coldpage.sequence.inspection import belongs_to
from coldpage.types import (
    HOT_LEVEL,
    NO_PAGE,
    BlockKey,
    BlockOrdinal,
    BufferId,
    BufferRole,
    CacheLevel,
    Int32Array,
    LayerGroupId,
    LayerId,
    Priority,
    is_number,
    is_whole_number,
    token_array,
)

__all__ = ["KVCacheManager"]

_logger = logging.getLogger(__name__)


class KVCacheManager:
    """Pages, tiers and sequences of one model.

    The thread that makes a manager owns it; a call from any other raises WrongThreadError. Without
    a ``device`` the hot level lives in host memory. ``codec`` makes the cold pages of every tier
    that names no codec of its own; None means the lossless concatenating one. All codecs given are
    consumed by this call, whether it succeeds or not.

    ``close`` drops what no disk level has yet: call ``flush`` before it, with the time that this
    may take, to have the next manager find all that is committed. The end of a ``with``
    block closes and does not flush.

    Raises ConfigurationError or StorageError when the tiers can not be built, with nothing left
    behind.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        *,
        device: Device | None = None,
        codec: ColdPageCodec | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._owner = threading.get_ident()
        self._is_closed = False
        self.config = config
        kernel_bytes = 0 if device is None else device.max_page_kernel_bytes
        codecs = TierCodecs(config.cache_tiers, codec, kernel_bytes)
        self._owns_device = device is None
        try:
            self.device: Device = HostDevice() if device is None else device
        except BaseException:
            codecs.close()
            raise
        try:
            self._builder = LevelBuilder(config, self.device, codecs)
            self._storage = self._builder.build()
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        self.layout = self._builder.layout
        self.provenance = codecs.provenance(
            has_sinks_apart=config.separate_sink_pages,
            has_recent_apart=config.num_recent_blocks > 0,
        )
        self._codecs = codecs
        self._layer_group_of = {
            layer_id: group.layer_group_id
            for group in self.layout.layer_groups
            for layer_id in group.layer_ids
        }
        groups = [lc.layer_group_id for lc in self.layout.life_cycles]
        self._tree = self._builder.tree
        events = self._storage.events
        self._hub = ObserverHub(self._storage.table, self._tree, groups, events.totals)
        events.observers.append(self._hub)
        self._capacity_tokens = self._hot_tokens(1.0)
        self._context = self._make_context()
        try:
            self._reopen(on_progress)
        except BaseException:
            self._is_closed = True
            self._release_everything()
            raise

    def _reopen(self, on_progress: Callable[[int, int], None] | None) -> None:
        """Take over what the disk levels still hold from before."""
        disks = [level for level in self._storage.levels if level.is_disk]
        found = [(level, level.disk.recover(self.device.io, on_progress)) for level in disks]
        if found:
            adopt_pages(self._storage, self._tree, self.layout, found)

    def _admits_second_use(self) -> bool:
        disks = [t for t in self.config.cache_tiers if isinstance(t, DiskTierConfig)]
        return any(tier.admission is DiskAdmission.SECOND_USE for tier in disks)

    def _make_context(self) -> SequenceContext:
        layout, config = self.layout, self.config
        first, body, recent = np.array(
            [layout.life_cycles_of(group.layer_group_id) for group in layout.layer_groups], np.int16
        ).T.copy()
        return SequenceContext(
            storage=self._storage,
            tree=self._tree,
            layer_groups=layout.layer_groups,
            first_life_cycle=first,
            body_life_cycle=body,
            recent_life_cycle=recent,
            num_recent_blocks=layout.num_recent_blocks,
            tokens_per_block=config.tokens_per_block,
            max_util_for_resume=config.max_util_for_resume,
            check_thread=self._check_thread,
            is_open=lambda: not self._is_closed,
            max_capacity_tokens=lambda: self._capacity_tokens,
            wait_for_progress=self.device.wait_for_progress,
            recent_keys=RecentKeys() if self._admits_second_use() else None,
            on_stored=self._hub.on_stored,
        )

    # ------------------------------------------------------------------ sequences

    def create_kv_cache(
        self,
        tokens: Sequence[int] | Int32Array = (),
        *,
        scope: ReuseScope | None = None,
        priority: Priority = DEFAULT_PRIORITY,
        on_missing: OnMissing = OnMissing.RECOMPUTE,
    ) -> KVCache:
        """A suspended cache that holds the longest reusable prefix, in whole blocks, of ``tokens``.

        Pages of another ``scope`` are never reused. The prefix may be all of ``tokens``.
        ``on_missing`` says what becomes of blocks whose contents are lost while it is suspended.
        """
        self._check_open()
        check_priority(priority)
        if not isinstance(scope, ReuseScope | None):
            raise UsageError(f"scope is {scope!r}: give a ReuseScope, or None for the common one")
        if not isinstance(on_missing, OnMissing):
            raise UsageError(
                f"on_missing is {on_missing!r}: give OnMissing.RECOMPUTE or OnMissing.HOLE"
            )
        root = root_key(self.config.model_fingerprint, scope or ReuseScope(), self.provenance)
        prefix = self._find_prefix(root, token_array(tokens))
        return KVCache(self._context, prefix, priority, on_missing)

    def _find_prefix(self, root: BlockKey, tokens: Int32Array) -> ReusedPrefix:
        per_block = self.config.tokens_per_block
        keys: list[BlockKey] = []
        parent = root
        for start in range(0, tokens.size - per_block + 1, per_block):
            parent = block_key(parent, tokens[start : start + per_block])
            keys.append(parent)
        pages = self._tree.find(keys)
        num_blocks = self._num_usable_blocks(pages != NO_PAGE)
        pages = pages[:, :num_blocks].copy()
        for layer_group, group in enumerate(self.layout.layer_groups):
            stale = group.stale_blocks(num_blocks * per_block, per_block)
            pages[layer_group, stale.start : stale.stop] = NO_PAGE
        table = BlockTable(len(self.layout.layer_groups))
        table.append(pages)
        return ReusedPrefix(
            root,
            keys[:num_blocks],
            table,
            tokens[: num_blocks * per_block],
            self._tokens_by_level(pages),
        )

    def _num_usable_blocks(self, has_page: npt.NDArray[np.bool_]) -> int:
        """The longest prefix, in blocks, all of whose live blocks have pages ([num_layer_groups,
        num_blocks]).
        """
        per_block = self.config.tokens_per_block
        missing_before = np.cumsum(~has_page, axis=1)
        for num_blocks in range(has_page.shape[1], 0, -1):
            for layer_group, group in enumerate(self.layout.layer_groups):
                stale = group.stale_blocks(num_blocks * per_block, per_block)
                num_missing = missing_before[layer_group, num_blocks - 1]
                if len(stale):
                    is_gone = ~has_page[layer_group, stale.start : stale.stop]
                    num_missing -= np.count_nonzero(is_gone)
                if num_missing:
                    break
            else:
                return num_blocks
        return 0

    def _tokens_by_level(self, pages: Int32Array) -> tuple[int, ...]:
        """Matched tokens by the coldest level that one of the block's pages lies on."""
        num_levels = len(self._storage.levels)
        if pages.size == 0:
            return (0,) * num_levels
        levels = self._storage.table.level_of(pages.ravel()).reshape(pages.shape).astype(np.int64)
        # On its way to a disk level a page has no copy for a moment: count it there.
        levels = np.where(pages == NO_PAGE, 0, np.minimum(levels, num_levels - 1))
        counts = np.bincount(levels.max(axis=0), minlength=num_levels)
        return tuple(int(c) * self.config.tokens_per_block for c in counts)

    # ------------------------------------------------------------------ what an engine needs

    @property
    def tokens_per_block(self) -> int:
        """Positions in one block."""
        return self.config.tokens_per_block

    def owns(self, kv_cache: KVCache) -> bool:
        """Whether the cache is of this manager; what it holds says nothing to another."""
        self._check_thread()
        return belongs_to(kv_cache, self._context)

    def layer_group_of(self, layer_id: LayerId) -> LayerGroupId:
        """The layer group whose block table the layer reads. Raises KeyError for an
        unknown layer.
        """
        return self._layer_group_of[layer_id]

    def hot_array(self, layer_id: LayerId, role: BufferRole) -> npt.NDArray[np.uint8] | DeviceBytes:
        """The buffer in every hot slot: a writable view, uint8 [num_slots, buffer_bytes], slots far
        apart. No copy: a numpy array where the host reaches the hot level; else DeviceBytes, which
        ``torch.as_tensor`` makes a tensor of the same memory from, on the device that has it.

        Valid until ``close`` or the next ``resize`` of the hot level. Raises KeyError for an
        unknown buffer.
        """
        self._check_open()
        group_id = self._layer_group_of[layer_id]
        life_cycle = self.layout.life_cycles[self.layout.life_cycle_of(group_id, BlockOrdinal(0))]
        wanted = BufferId(layer_id, role)
        for placement in life_cycle.buffers:
            if placement.buffer_id == wanted:
                group = self._storage.levels[HOT_LEVEL].group_of(life_cycle.life_cycle_id)
                pool = group.memory[placement.pool_index]
                return pool.view(placement.offset_bytes, placement.num_bytes)
        raise KeyError(f"layer {layer_id} has no buffer {role!r}")

    def hot_pool_groups(self) -> tuple[PoolGroupDesc, ...]:
        """The layout and addresses of the hot pools, as codecs see them."""
        self._check_open()
        return tuple(self._builder.describe_hot())

    def _hot_tokens(self, max_utilization: float, *, is_growing: bool = False) -> int:
        return max_sequence_tokens(
            self.layout,
            self._storage.levels[HOT_LEVEL],
            self.config.tokens_per_block,
            max_utilization,
            is_growing=is_growing,
        )

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that can be resumed on an empty hot level, and can grow there block
        by block: see ``KVCache.max_capacity``.
        """
        self._check_open()
        kept = self._hot_tokens(self.config.max_util_for_resume)
        return min(kept, self._hot_tokens(1.0, is_growing=True))

    @property
    def num_hot_blocks(self) -> int:
        """Blocks of one sequence that a full hot level would hold."""
        self._check_thread()
        return self._capacity_tokens // self.config.tokens_per_block

    def resize(self, level: CacheLevel, quota_bytes: int) -> None:
        """Give a level another quota, while it holds pages. Blocks until it is done.

        Pages of a level that shrinks move within it, then to colder levels, and are dropped only
        when those are full. The quota is divided between layer groups as the level was used lately.
        Base addresses stay; ask for ``hot_array`` again.

        Raises ConfigurationError when the quota is too small, UsageError when active sequences have
        pages in what would be cut off, DeviceError or StorageError when there is not so much room.
        """
        pools = self._level(level)
        if not is_whole_number(quota_bytes):
            raise UsageError(f"quota_bytes is {quota_bytes!r}: give a whole number of bytes")
        weights = self._storage.usage.byte_weights(level)
        counts = self._builder.num_slots_for(pools, quota_bytes, weights)
        try:
            self._storage.resize_level(level, counts)
        finally:
            self._capacity_tokens = self._hot_tokens(1.0)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """Under which ids the disk levels find again what they hold, in the order of levels."""
        return tuple(lv.disk.directory.instance_id for lv in self._storage.levels if lv.is_disk)

    def defragment(self, level: CacheLevel = HOT_LEVEL) -> int:
        """Move pages to the lowest slots of a level, so that neighbours are copied together and a
        smaller quota finds them out of its way. Pages of active sequences stay where they are.
        Blocks until nothing else is in flight; returns how many pages were moved.
        """
        return self._storage.defragment(self._level(level).level)

    # ------------------------------------------------------------------ time, numbers, end

    def poll(self) -> None:
        """Advance I/O and migrations. Call it between steps; it never blocks."""
        self._check_open()
        self._storage.poll()

    def wait_for_progress(self, timeout_s: float) -> None:
        """Block until something in flight may have advanced; then ``poll``."""
        self._check_open()
        self._check_time("timeout_s", timeout_s)
        self.device.wait_for_progress(timeout_s)

    def finish_transfers(self) -> None:
        """Block until no transfer is in flight."""
        self._check_open()
        self._storage.finish_transfers()

    def stats(self) -> ManagerStats:
        """An immutable snapshot of levels and counters."""
        self._check_open()
        events, per_block = self._storage.events, self.config.tokens_per_block
        return ManagerStats(
            tuple(level_stats(level, self.layout, per_block) for level in self._storage.levels),
            self._storage.table.num_pages,
            self._tree.num_blocks,
            dict(events.moved_pages),
            dict(events.moved_bytes),
            dict(events.totals),
            self._codecs.stats(),
            dict(events.codec_failures),
        )

    def take_peak_stats(self, level: CacheLevel) -> tuple[PoolGroupStats, ...]:
        """The numbers of each pool group of the level, in that level's own order, with the peaks
        since the last call; they begin again now.
        """
        pools = self._level(level)
        stats = group_stats(pools, self.layout)
        for group in pools.groups:
            group.slots.reset_peak()
        return stats

    def add_observer(self, observer: CacheObserver) -> None:
        """Tell ``observer`` of every block that is stored, moved or dropped from now on."""
        self._check_open()
        self._hub.observers.append(observer)

    def check_integrity(self) -> None:
        """Assert the invariants of slots, pages and the prefix tree. For tests: it looks at
        everything.
        """
        self._check_open()
        self._storage.check_integrity()
        self._tree.check_integrity()

    def flush(self, budget_s: float) -> int:
        """Write committed pages that are in memory only to the disk level, most valuable first,
        until all are there or the time is over, and make them durable. Blocks. Returns how many
        are still in memory only; all of them without a disk level.

        ``close`` does not do this: call it before, or they are gone.
        """
        self._check_open()
        self._check_time("budget_s", budget_s)
        return self._storage.flush(budget_s)

    def close(self) -> None:
        """Finish what is in flight, leave an index of each disk level for the next start, and free
        everything. Sequences still open hold nothing afterwards.

        Committed pages that are in memory only are not written to disk and are gone: call ``flush``
        before to keep them. Idempotent.
        """
        if self._is_closed:
            return
        self._check_thread()
        self._storage.close()
        for level in self._storage.levels:
            if level.is_disk:
                level.disk.write_index(index_of(self._storage, self._tree, level))
        self._is_closed = True
        self._release_everything()

    def _release_everything(self) -> None:
        try:
            self._builder.close()
        finally:
            if self._owns_device:
                self.device.close()

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except DeviceError as error:
            if exc_type is None:
                raise
            # What is raised already says more: often it is the same failure.
            _logger.error("the cache could not be closed after that: %s", error)

    def _level(self, level: CacheLevel) -> LevelPools:
        self._check_open()
        levels = self._storage.levels
        if not is_whole_number(level) or not 0 <= level < len(levels):
            raise UsageError(
                f"there is no level {level!r}: this manager has 0 to {len(levels) - 1}"
            )
        return levels[level]

    @staticmethod
    def _check_time(name: str, seconds: object) -> None:
        if not is_number(seconds):
            raise UsageError(f"{name} is {seconds!r}: give a number of seconds")

    def _check_open(self) -> None:
        self._check_thread()
        if self._is_closed:
            raise ClosedError("the manager is closed")

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise WrongThreadError(
                "a KVCacheManager belongs to the thread that made it; "
                "hand work to that thread instead of calling it from another"
            )
