"""What a sequence could have if no other sequence were on the hot level."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coldpage.block_table import BlockTable
from coldpage.sequence.context import SequenceContext
from coldpage.sequence.coverage import Coverage
from coldpage.types import HOT_LEVEL, NO_PAGE, Int32Array, Int64Array

__all__ = ["HotRoom"]


class HotRoom:
    """Counts the slots that one block table needs, by hot pool group. Pure."""

    def __init__(self, context: SequenceContext, table: BlockTable, coverage: Coverage) -> None:
        self._context = context
        self._table = table
        self._coverage = coverage
        self._hot = context.storage.levels[HOT_LEVEL]

    def max_capacity(self, history_length: int) -> int:
        """Positions for which there are slots, beside the pages that the sequence has and those it
        lacks at that history: a new block has a page in every layer group, since all of it may be
        written. 0 where even what it has does not fit.
        """
        used, num_blocks = self._with_lacking(history_length), self._table.num_blocks
        if not num_blocks:  # the first block may be of other life cycles than all after it
            used, num_blocks = self._of_block(0), 1
        free, each = self._num_slots() - used, self._of_block(1)
        if free.min() < 0:
            return 0
        num_more = int((free[each > 0] // each[each > 0]).min())
        return (num_blocks + num_more) * self._context.tokens_per_block

    def can_resume(self, history_length: int) -> bool:
        """Whether its pages could be locked, and those that it lacks be created."""
        limit = self._context.max_util_for_resume
        most = np.array([group.max_locked_slots(limit) for group in self._hot.groups])
        used = self._count(self._table.pages != NO_PAGE)
        if (used > most).any():
            return False
        return bool((self._with_lacking(history_length) <= self._num_slots()).all())

    def _num_slots(self) -> Int64Array:
        return np.array([group.slots.num_slots for group in self._hot.groups])

    def _with_lacking(self, history_length: int) -> Int64Array:
        return self._count((self._table.pages != NO_PAGE) | self._coverage.lacking(history_length))

    def _count(self, entries: npt.NDArray[np.bool_]) -> Int64Array:
        layer_groups, blocks = np.nonzero(entries)
        return self._slots_of(layer_groups, blocks.astype(np.int32))

    def _of_block(self, ordinal: int) -> Int64Array:
        layer_groups = np.arange(len(self._context.layer_groups))
        return self._slots_of(layer_groups, np.full(layer_groups.size, ordinal, np.int32))

    def _slots_of(self, layer_groups: npt.NDArray[np.integer], blocks: Int32Array) -> Int64Array:
        return self._hot.count(self._context.life_cycles(layer_groups, blocks))
