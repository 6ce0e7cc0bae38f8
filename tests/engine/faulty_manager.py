"""The real manager, with faults that a test asks for: slow pages, refusals, damage on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coldpage.config import KVCacheManagerConfig, ReuseScope
from coldpage.manager import KVCacheManager
from coldpage.page import DEFAULT_PRIORITY
from coldpage.prefix import EXACT_PROVENANCE, root_key
from coldpage.sequence import KVCache, OnMissing
from coldpage.types import HOT_LEVEL, CacheLevel, Int32Array, LayerGroupId, Priority


@dataclass
class Faults:
    """What goes wrong on purpose."""

    polls_to_onboard: int = 0  # at least so many polls until resumed pages are ready
    polls_to_grow: int = 0  # the same for granted pages
    flip_on_disk: set[int] = field(default_factory=set)  # block ordinals, once
    flip_one_every_time: bool = False  # the last block of each sequence that is resumed
    offload_on_close: bool = False
    refuse_resume: bool = False
    refuse_resize: bool = False


class FaultyManager(KVCacheManager):
    """See Faults."""

    def __init__(self, config: KVCacheManagerConfig) -> None:
        super().__init__(config)
        self.faults = Faults()
        self.polls = 0
        self.open_caches: list[FaultyCache] = []

    def create_kv_cache(
        self,
        tokens: Sequence[int] | Int32Array = (),
        *,
        scope: ReuseScope | None = None,
        priority: Priority = DEFAULT_PRIORITY,
        on_missing: OnMissing = OnMissing.RECOMPUTE,
    ) -> KVCache:
        root = root_key(self.config.model_fingerprint, scope or ReuseScope(), EXACT_PROVENANCE)
        prefix = self._find_prefix(root, np.asarray(tokens, np.int32).ravel())
        cache = FaultyCache(self, self._context, prefix, priority, on_missing)
        self.open_caches.append(cache)
        return cache

    def poll(self) -> None:
        self.polls += 1
        super().poll()

    def num_locked(self) -> int:
        return int(np.count_nonzero(self._storage.table.num_locks))

    def offload_everything(self) -> None:
        """Send every page that is not locked down, as another sequence's demand for room does."""
        filler = KVCache(
            self._context,
            self._find_prefix(root_key(b"", ReuseScope(), EXACT_PROVENANCE), np.zeros(0, np.int32)),
            DEFAULT_PRIORITY,
            OnMissing.RECOMPUTE,
        )
        assert filler.resume()
        self.finish_transfers()
        for num_blocks in range(filler.max_capacity // self.tokens_per_block, 0, -1):
            if filler.resize(num_blocks * self.tokens_per_block):
                break
        filler.close()
        self.finish_transfers()


class FaultyCache(KVCache):
    """See Faults."""

    def __init__(self, manager: FaultyManager, *args: Any) -> None:
        super().__init__(*args)
        self._manager = manager
        self._faults = manager.faults
        self._ready_at_poll = 0
        self.prefetched_to: list[int] = []

    def resume(self, stream: None = None) -> bool:
        if self._faults.refuse_resume:
            return False
        self._damage()
        was_hot = bool((self.page_indices(LayerGroupId(0)) >= 0).all())
        is_resumed = super().resume(stream)
        self._ready_at_poll = self._manager.polls
        self._ready_at_poll += 0 if was_hot else self._faults.polls_to_onboard
        return is_resumed

    def is_ready(self) -> bool:
        return super().is_ready() and self._manager.polls >= self._ready_at_poll

    def resize(self, capacity: int, history_length: int | None = None) -> bool:
        if self._faults.refuse_resize:
            return False
        has_grown = super().resize(capacity, history_length)
        if has_grown:
            self._ready_at_poll = self._manager.polls + self._faults.polls_to_grow
        return has_grown

    def prefetch(self, level: CacheLevel = HOT_LEVEL) -> None:
        self.prefetched_to.append(level)
        super().prefetch(level)

    def close(self) -> None:
        super().close()
        if self in self._manager.open_caches:
            self._manager.open_caches.remove(self)
            if self._faults.offload_on_close:
                self._manager.offload_everything()

    def _damage(self) -> None:
        """Flip a bit of blobs on disk."""
        blobs = self.blobs_on_disk()
        wanted = self._faults.flip_on_disk
        if blobs and self._faults.flip_one_every_time:
            wanted.add(max(blob.ordinal for blob in blobs))
        for blob in blobs:
            if blob.ordinal in wanted and blob.is_only_copy:
                wanted.remove(blob.ordinal)
                with open(blob.path, "r+b") as file:
                    file.seek(blob.offset_bytes)
                    (byte,) = file.read(1)
                    file.seek(blob.offset_bytes)
                    file.write(bytes([byte ^ 1]))
