"""The façade: one manager of pages, tiers and sequences. It holds no model code and is owned by one
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coldpage.codecs import ColdPageCodec
from coldpage.config import KVCacheManagerConfig, ReuseScope
from coldpage.device.base import Device
from coldpage.device.host import HostDevice
from coldpage.errors import ClosedError, WrongThreadError
from coldpage.manager.levels import LevelBuilder
from coldpage.manager.stats import ManagerStats
from coldpage.page import DEFAULT_PRIORITY
from coldpage.prefix import EXACT_PROVENANCE, PrefixTree, block_key, root_key
from coldpage.sequence import KVCache, ReusedPrefix, SequenceContext
from coldpage.types import (
    HOT_LEVEL,
    NO_PAGE,
    BlockKey,
    BufferId,
    BufferRole,
    Int32Array,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    Priority,
)

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Pages, tiers and sequences of one model.

    The thread that makes a manager owns it; a call from any other raises WrongThreadError. Without
    a ``device`` the hot level lives in host memory. A ``codec`` is consumed by this call, whether
    it succeeds or not; None means the lossless concatenating one.

    Raises ConfigurationError or StorageError when the tiers can not be built, with nothing left
    behind.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        *,
        device: Device | None = None,
        codec: ColdPageCodec | None = None,
    ) -> None:
        self._owner = threading.get_ident()
        self._is_closed = False
        self.config = config
        self._owns_device = device is None
        self.device: Device = HostDevice() if device is None else device
        builder = LevelBuilder(config, self.device)
        try:
            self._storage = builder.build(codec)
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        self._builder = builder
        self.layout = builder.layout
        self._layer_group_of = {
            layer_id: group.layer_group_id
            for group in self.layout.layer_groups
            for layer_id in group.layer_ids
        }
        life_cycles = self.layout.life_cycles
        self._groups = tuple(self.layout.layer_groups[lc.layer_group_id] for lc in life_cycles)
        self._tree = PrefixTree(self._storage.table, len(life_cycles))
        self._storage.copies.observers.append(self._tree)
        self._context = SequenceContext(
            self._storage,
            self._tree,
            self._groups,
            config.tokens_per_block,
            config.max_util_for_resume,
            self._check_thread,
            lambda: not self._is_closed,
            self.num_hot_blocks * config.tokens_per_block,
            self.device.wait_for_progress,
        )

    # ------------------------------------------------------------------ sequences

    def create_kv_cache(
        self,
        tokens: Sequence[int] | Int32Array = (),
        *,
        scope: ReuseScope | None = None,
        priority: Priority = DEFAULT_PRIORITY,
    ) -> KVCache:
        """A suspended cache that holds the longest reusable prefix, in whole blocks, of ``tokens``.

        Pages of another ``scope`` are never reused. The prefix may be all of ``tokens``.
        """
        self._check_open()
        root = root_key(self.config.model_fingerprint, scope or ReuseScope(), EXACT_PROVENANCE)
        prefix = self._find_prefix(root, np.asarray(tokens, np.int32).ravel())
        return KVCache(self._context, prefix, priority)

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
        for life_cycle, group in enumerate(self._groups):
            stale = group.stale_blocks(num_blocks * per_block, per_block)
            pages[life_cycle, stale.start : stale.stop] = NO_PAGE
        return ReusedPrefix(
            root,
            keys[:num_blocks],
            pages,
            tokens[: num_blocks * per_block],
            self._tokens_by_level(pages),
        )

    def _num_usable_blocks(self, has_page: npt.NDArray[np.bool_]) -> int:
        """The longest prefix, in blocks, all of whose live blocks have pages ([num_life_cycles,
        num_blocks]).
        """
        per_block = self.config.tokens_per_block
        missing_before = np.cumsum(~has_page, axis=1)
        for num_blocks in range(has_page.shape[1], 0, -1):
            for life_cycle, group in enumerate(self._groups):
                stale = group.stale_blocks(num_blocks * per_block, per_block)
                num_missing = missing_before[life_cycle, num_blocks - 1]
                if len(stale):
                    num_missing -= np.count_nonzero(~has_page[life_cycle, stale.start : stale.stop])
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

    def layer_group_of(self, layer_id: LayerId) -> LayerGroupId:
        """The layer group whose block table the layer reads. Raises KeyError for an
        unknown layer.
        """
        return self._layer_group_of[layer_id]

    def hot_array(self, layer_id: LayerId, role: BufferRole) -> npt.NDArray[np.uint8]:
        """The buffer in every hot slot: a writable view, uint8 [num_slots, buffer_bytes], slots far
        apart.

        Valid until ``close``. Raises KeyError for an unknown buffer.
        """
        self._check_open()
        life_cycle = self.layout.life_cycles[LifeCycleId(self._layer_group_of[layer_id])]
        wanted = BufferId(layer_id, role)
        for placement in life_cycle.buffers:
            if placement.buffer_id == wanted:
                pools = self._storage.levels[HOT_LEVEL].memory[life_cycle.hot_pool_group]
                start = placement.offset_bytes
                return pools[placement.pool_index].array[:, start : start + placement.num_bytes]
        raise KeyError(f"layer {layer_id} has no buffer {role!r}")

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that can be resumed on an empty hot level."""
        return self._builder.max_sequence_tokens(self.config.max_util_for_resume)

    @property
    def num_hot_blocks(self) -> int:
        """Blocks of one sequence that a full hot level would hold."""
        return self._builder.max_sequence_tokens(1.0) // self.config.tokens_per_block

    # ------------------------------------------------------------------ time, numbers, end

    def poll(self) -> None:
        """Advance I/O and migrations. Call it between steps; it never blocks."""
        self._check_open()
        self._storage.poll()

    def wait_for_progress(self, timeout_s: float) -> None:
        """Block until something in flight may have advanced; then ``poll``."""
        self._check_open()
        self.device.wait_for_progress(timeout_s)

    def finish_transfers(self) -> None:
        """Block until no transfer is in flight."""
        self._check_open()
        self._storage.finish_transfers()

    def stats(self) -> ManagerStats:
        """An immutable snapshot of levels and counters."""
        self._check_open()
        counters = self._storage.counters
        return ManagerStats(
            tuple(self._builder.level_stats(level) for level in self._storage.levels),
            self._storage.table.num_pages,
            self._tree.num_blocks,
            dict(counters.moved_pages),
            dict(counters.moved_bytes),
            dict(counters.totals),
        )

    def check_integrity(self) -> None:
        """Assert the invariants of slots, pages and the prefix tree. For tests: it looks at
        everything.
        """
        self._check_open()
        self._storage.check_integrity()
        self._tree.check_integrity()

    def close(self) -> None:
        """Finish what is in flight and free everything. Sequences still open hold nothing
        afterwards.
        """
        if self._is_closed:
            return
        self._check_thread()
        self._storage.close()
        self._is_closed = True
        self._builder.close()
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

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
