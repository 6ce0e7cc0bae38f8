"""What a sequence's cache is made of, and what can be read of it."""

from __future__ import annotations

import numpy as np

from coldpage.device.base import Stream
from coldpage.errors import ClosedError, UsageError
from coldpage.page import HOT_BIT
from coldpage.sequence.arguments import check_layer_group
from coldpage.sequence.context import (
    DiskBlob,
    KVCacheStatus,
    OnMissing,
    ReusedPrefix,
    SequenceContext,
)
from coldpage.sequence.coverage import Coverage
from coldpage.sequence.disk_blobs import find_disk_blobs
from coldpage.sequence.marks import PageMarks
from coldpage.sequence.room import HotRoom
from coldpage.types import HOT_LEVEL, NO_SLOT, BlockKey, Int32Array, LayerGroupId, Priority

__all__ = ["SequenceState"]


class SequenceState:
    """The part of ``KVCache`` that changes nothing."""

    def __init__(
        self,
        context: SequenceContext,
        prefix: ReusedPrefix,
        priority: Priority,
        on_missing: OnMissing,
    ) -> None:
        self._context = context
        self._storage = context.storage
        self._priority = priority
        self._on_missing = on_missing
        self._root = prefix.root
        self._keys = list(prefix.keys)
        self._tokens = prefix.tokens.copy()
        self._num_committed = int(prefix.tokens.size)
        self._table = prefix.table
        self._coverage = Coverage(context, self._table)
        self._marks = PageMarks(context, self._table)
        self._room = HotRoom(context, self._table, self._coverage)
        self._storage.hold(self._table.live_pages(), priority)
        self._history_length = self._num_committed
        self._capacity = self._num_committed
        self._status = KVCacheStatus.SUSPENDED
        self._stream: Stream | None = None
        self._is_ready = False
        self._is_starved = False  # blocks to be recomputed found no place when last asked
        # Readiness is asked again when somebody has recomputed pages: they may be shared.
        self._num_fills_seen = 0
        # Blocks from here on have been granted for writing since the last resume.
        self._writable_from = self._table.num_blocks
        self._cached_tokens_by_level = prefix.tokens_by_level

    @property
    def status(self) -> KVCacheStatus:
        """Suspended, active or closed."""
        return self._status

    @property
    def num_committed_tokens(self) -> int:
        """Tokens whose pages are final."""
        return self._num_committed

    @property
    def history_length(self) -> int:
        """Positions that have been written."""
        return self._history_length

    @property
    def capacity(self) -> int:
        """Positions that have a place."""
        return self._capacity

    @property
    def max_capacity(self) -> int:
        """The largest capacity that one ``resize`` could give now, were no other sequence active.
        With sliding windows that is less than the ``max_sequence_tokens`` of the manager, which
        several steps reach.
        """
        self._check_open()
        return self._room.max_capacity(self._history_length)

    @property
    def cached_tokens_by_level(self) -> tuple[int, ...]:
        """How many of the tokens it was made for were found on each level."""
        return self._cached_tokens_by_level

    @property
    def num_blocks(self) -> int:
        """Blocks in the table."""
        return self._table.num_blocks

    @property
    def tokens(self) -> Int32Array:
        """The committed tokens, read-only [num_committed_tokens]."""
        view = self._tokens[: self._num_committed]
        view.flags.writeable = False
        return view

    @property
    def block_keys(self) -> tuple[BlockKey, ...]:
        """The content address of each full committed block, in order, up to the first that can not
        be shared because blocks before it are holes.
        """
        return tuple(self._keys)

    def page_indices(self, layer_group_id: LayerGroupId) -> Int32Array:
        """The hot slot of each block, int32 [num_blocks]; NO_SLOT where the block has no
        hot page.
        """
        self._check_open()
        check_layer_group(layer_group_id, self._table.num_layer_groups)
        table = self._storage.table
        pages = self._table.pages[layer_group_id]
        slots: Int32Array = table.slot[HOT_LEVEL].take(pages)
        if self._is_ready and self._status is KVCacheStatus.ACTIVE:
            return slots  # asked in every step: all pages are hot, and NO_PAGE has NO_SLOT
        return np.where((table.present[pages] & HOT_BIT) != 0, slots, np.int32(NO_SLOT))

    def blobs_on_disk(self) -> list[DiskBlob]:
        """Where the cold blobs of this cache lie on disk now; they may move at the next call."""
        self._check_open()
        return find_disk_blobs(self._storage, self._table)

    def _check_open(self) -> None:
        self._context.check_thread()
        if self._status is KVCacheStatus.CLOSED:
            raise ClosedError("this KV cache is closed")
        if not self._context.is_open():
            raise ClosedError("the manager of this KV cache is closed")

    def _check_status(self, wanted: KVCacheStatus, call: str) -> None:
        self._check_open()
        if self._status is not wanted:
            raise UsageError(
                f"{call} needs a KV cache that is {wanted.value}; this one is {self._status.value}"
            )
