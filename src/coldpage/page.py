"""Per-page state, in columns. A page id is a row; operations take arrays of page ids.

A page has at most one slot a level. ``present`` says on which levels that slot holds a valid copy,
``reserved`` on which it is the destination of a transfer in flight, ``busy`` on which a transfer in
flight still reads it.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.errors import UsageError
from coldpage.types import (
    HOT_LEVEL,
    NO_PAGE,
    NO_SLOT,
    Int32Array,
    PageStatus,
    Priority,
    is_whole_number,
)

__all__ = ["DEFAULT_PRIORITY", "HOT_BIT", "RETAINED_PRIORITY", "PageTable", "check_priority"]

DEFAULT_PRIORITY: Final = Priority(35)
# Of what is kept on purpose: it goes after everything else, and no time to live ends it.
RETAINED_PRIORITY: Final = Priority(100)
HOT_BIT: Final = np.uint8(1 << HOT_LEVEL)
_INITIAL_ROWS: Final = 1024

# name -> dtype; each is one array [num_rows]. ``slot`` apart: [num_levels, num_rows].
_COLUMNS: Final[dict[str, npt.DTypeLike]] = {
    "life_cycle": np.int16,
    "ordinal": np.int32,
    "present": np.uint8,
    "reserved": np.uint8,
    "busy": np.uint8,
    "failed_encodes": np.uint8,
    "is_missing": np.bool_,
    "is_protected": np.bool_,
    "is_drop_planned": np.bool_,
    "num_refs": np.int32,
    "num_locks": np.int32,
    "node": np.int32,
    "version": np.int32,
    "priority": np.int16,
    "last_use": np.int64,
    "last_use_ns": np.int64,
    "is_admitted": np.bool_,
    "num_accesses": np.int32,
}


def check_priority(priority: object) -> None:
    """Raise UsageError for what the column of priorities can not hold."""
    limits = np.iinfo(np.int16)
    if not is_whole_number(priority) or not limits.min <= priority <= limits.max:
        raise UsageError(
            f"priority is {priority!r}: give a whole number from {limits.min} to {limits.max}"
        )


class PageTable:
    """The columns of all pages of one manager. Row 0 (NO_PAGE) is never a page."""

    life_cycle: npt.NDArray[np.int16]
    ordinal: Int32Array  # the block's place in the sequence that made the page
    present: npt.NDArray[np.uint8]
    reserved: npt.NDArray[np.uint8]
    busy: npt.NDArray[np.uint8]
    failed_encodes: npt.NDArray[np.uint8]  # levels whose codec can not encode what it holds
    is_missing: npt.NDArray[np.bool_]  # held, but its contents are lost: to be recomputed
    is_protected: npt.NDArray[np.bool_]  # holds the attention sinks or is the newest block
    is_drop_planned: npt.NDArray[np.bool_]  # committed, and to vanish when nobody holds it
    num_refs: Int32Array  # sequences that hold it
    num_locks: Int32Array  # active sequences among them
    node: Int32Array  # the prefix-tree node that holds it; 0: none, its contents are not committed
    version: Int32Array  # grows with each grant of writing: a transfer of older bytes is void
    priority: npt.NDArray[np.int16]
    last_use: npt.NDArray[np.int64]  # by the table's own clock, which counts uses
    last_use_ns: npt.NDArray[np.int64]  # by the time of day, as it is kept over restarts
    is_admitted: npt.NDArray[np.bool_]  # worth a write to disk although nobody holds it
    num_accesses: Int32Array

    def __init__(self, num_levels: int) -> None:
        self.num_levels = num_levels
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(_INITIAL_ROWS, dtype))
        self.slot: Int32Array = np.zeros((num_levels, _INITIAL_ROWS), np.int32)
        self.slot[HOT_LEVEL, NO_PAGE] = NO_SLOT
        self._free: list[int] = []
        self._next_row = int(NO_PAGE) + 1
        self.clock = 0

    @property
    def num_pages(self) -> int:
        """Rows in use."""
        return self._next_row - 1 - len(self._free)

    def _grow(self, num_rows: int) -> None:
        new_size = max(num_rows, 2 * self.present.size)
        for name in _COLUMNS:
            old = getattr(self, name)
            new = np.zeros(new_size, old.dtype)
            new[: old.size] = old
            setattr(self, name, new)
        slot = np.zeros((self.num_levels, new_size), np.int32)
        slot[:, : self.slot.shape[1]] = self.slot
        self.slot = slot

    def create(
        self, life_cycles: npt.NDArray[np.int16], ordinals: Int32Array, priority: Priority
    ) -> Int32Array:
        """New pages with one reference, on no level. Returns their ids [len(life_cycles)]."""
        count = life_cycles.size
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(reused) :]
        num_fresh = count - len(reused)
        if self._next_row + num_fresh > self.present.size:
            self._grow(self._next_row + num_fresh)
        fresh = range(self._next_row, self._next_row + num_fresh)
        self._next_row += num_fresh
        ids = np.array([*reused, *fresh], np.int32)
        self.life_cycle[ids] = life_cycles
        self.ordinal[ids] = ordinals
        self.priority[ids] = priority
        self.num_refs[ids] = 1
        self.last_use[ids] = self.clock
        self.last_use_ns[ids] = time.time_ns()
        self.is_admitted[ids] = True
        return ids

    def destroy(self, pages: Int32Array) -> None:
        """Forget pages that own no slot and that nobody refers to."""
        assert not (self.present[pages] | self.reserved[pages] | self.busy[pages]).any(), (
            "a page still owns slots"
        )
        assert not (self.num_refs[pages].any() or self.node[pages].any()), (
            "a page is still referred to"
        )
        for name in _COLUMNS:
            if name != "version":
                getattr(self, name)[pages] = 0
        # A transfer that still names the old page must not take the row's next owner for it.
        self.version[pages] += 1
        self._free.extend(pages.tolist())

    def touch(self, pages: Int32Array) -> None:
        """Note a use of the pages now."""
        self.clock += 1
        self.last_use[pages] = self.clock
        self.last_use_ns[pages] = time.time_ns()
        self.num_accesses[pages] += 1

    def worth_writing(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """Which pages may cost a write to disk: those that a sequence holds, and those admitted."""
        worth: npt.NDArray[np.bool_] = self.is_admitted[pages] | (self.num_refs[pages] > 0)
        return worth

    def can_encode(self, pages: Int32Array, bit: np.uint8) -> npt.NDArray[np.bool_]:
        """For which pages the codec of the level of ``bit`` has not failed yet."""
        is_open: npt.NDArray[np.bool_] = (self.failed_encodes[pages] & bit) == 0
        return is_open

    def status(self, page: int) -> PageStatus:
        """What the page's holders allow; a view for readers, not for hot paths."""
        if self.num_locks[page]:
            return PageStatus.LOCKED
        return PageStatus.HELD if self.num_refs[page] else PageStatus.DROPPABLE

    def level_of(self, pages: Int32Array) -> npt.NDArray[np.int8]:
        """The hottest level with a valid copy, by page; ``num_levels`` where there is none yet."""
        bits = self.present[pages]
        levels = np.full(pages.size, self.num_levels, np.int8)
        for level in range(self.num_levels - 1, -1, -1):
            levels[(bits >> level) & 1 != 0] = level
        return levels

    def check_integrity(self) -> None:
        """Assert that no row is free twice and that free rows are blank."""
        free = np.array(self._free, np.int32)
        assert np.unique(free).size == free.size, "a page was destroyed twice"
        assert self.slot[HOT_LEVEL, NO_PAGE] == NO_SLOT, "what is no page has got a slot"
        for name in _COLUMNS:
            if name != "version":
                assert not getattr(self, name)[free].any(), f"a free row has a {name}"
