"""Writing pages to disk before anybody needs their room, so that a crash costs little and a later
eviction costs nothing.

Committed pages are noted when the last active sequence lets go of them, and get a copy on the first
disk level in the background: a bounded number at a time, and never more than the disk takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.eviction import EvictionPolicy
from coldpage.page import HOT_BIT, PageTable
from coldpage.pools import LevelPools
from coldpage.types import HOT_LEVEL, Int32Array

__all__ = ["MAX_BACKUP_PAGES", "Backup"]

# Pages whose background write is in flight at once.
MAX_BACKUP_PAGES: Final = 64

# Starts writing pages from a level to the disk level, as far as there is room at the cost of pages
# that nobody holds.
_Send = Callable[[LevelPools, Int32Array, LevelPools], None]


class Backup:
    """The pages that wait for a copy on disk."""

    def __init__(
        self, table: PageTable, levels: tuple[LevelPools, ...], disk: LevelPools, send: _Send
    ) -> None:
        self._table = table
        self._levels = levels
        self._disk = disk
        self._send = send
        self._disk_bits = np.uint8(sum(int(level.bit) for level in levels if level.is_disk))
        self._noted: deque[tuple[Int32Array, Int32Array]] = deque()  # pages and their versions
        # Of pages that were being written when they were noted: what is written may be void.
        self._unsettled: dict[int, int] = {}  # page to version

    @property
    def num_waiting(self) -> int:
        """Pages noted and not yet looked at again; some may have been written or dropped since."""
        return sum(pages.size for pages, _ in self._noted) + len(self._unsettled)

    def note(self, pages: Int32Array) -> None:
        """The pages were let go of. Each note is worth one write at most, whether or not it
        succeeds.
        """
        written = pages[self._are_being_written(pages)]
        self._unsettled.update(
            zip(written.tolist(), self._table.version[written].tolist(), strict=True)
        )
        self._queue(pages)

    def _queue(self, pages: Int32Array) -> None:
        wanted = pages[self._wanted(pages)]
        if wanted.size:
            self._noted.append((wanted, self._table.version[wanted].copy()))

    def note_all(self, policy: EvictionPolicy) -> None:
        """Note every page that could be written, the most valuable first."""
        self._noted.clear()
        self._unsettled.clear()
        pages = np.flatnonzero(self._table.node).astype(np.int32)
        self.note(pages[np.argsort(policy.score(self._table, pages))[::-1]])

    def _are_being_written(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """To a disk. Only writes reserve slots there: reads may hang."""
        is_written: npt.NDArray[np.bool_] = (self._table.reserved[pages] & self._disk_bits) != 0
        return is_written

    def _note_settled(self) -> None:
        """Note those whose writes have ended without a copy."""
        if not self._unsettled:
            return
        pages = np.array(list(self._unsettled), np.int32)
        versions = np.array(list(self._unsettled.values()), np.int32)
        is_over = ~self._are_being_written(pages)
        for page in pages[is_over].tolist():
            del self._unsettled[page]
        self._queue(pages[is_over & (self._table.version[pages] == versions)])

    def _wanted(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """Committed, whole, at rest in memory, and not on the disk yet."""
        table, bit = self._table, self._disk.bit
        taken = table.present[pages] | table.reserved[pages] | table.busy[pages]
        on_disk = (taken & self._disk_bits) != 0
        in_memory = (table.present[pages] & (bit - np.uint8(1))) != 0
        at_rest = (table.num_locks[pages] == 0) & ~table.is_missing[pages]
        is_worth = table.worth_writing(pages) & (table.node[pages] != 0)
        is_worth &= table.can_encode(pages, bit)
        wanted: npt.NDArray[np.bool_] = in_memory & ~on_disk & at_rest & is_worth
        return wanted

    def advance(self, num_pages: int) -> None:
        """Start writing up to ``num_pages`` of the pages noted first."""
        self._note_settled()
        refused: list[Int32Array] = []
        while self._noted and num_pages > 0:
            pages, versions = self._noted.popleft()
            if pages.size > num_pages:
                self._noted.appendleft((pages[num_pages:], versions[num_pages:]))
                pages, versions = pages[:num_pages], versions[:num_pages]
            num_pages -= int(pages.size)
            pages = pages[(self._table.version[pages] == versions)]
            pages = pages[self._wanted(pages)]  # in their order: there may not be room for all
            is_hot = (self._table.present[pages] & HOT_BIT) != 0
            self._send(self._levels[HOT_LEVEL], pages[is_hot], self._disk)
            self._send_cold(pages[~is_hot])
            refused.append(self._refused(pages))
        if refused and (again := np.concatenate(refused)).size:
            _, first = np.unique(again, return_index=True)  # a page may have been noted twice
            again = again[np.sort(first)]
            self._noted.appendleft((again, self._table.version[again].copy()))

    def _refused(self, pages: Int32Array) -> Int32Array:
        """Of pages that were sent, those that have room on disk and lacked something for a moment,
        such as staging.
        """
        rest = pages[self._wanted(pages)]
        if not rest.size or not self._disk.may_write:
            return rest[:0]
        split = self._disk.split(self._table.life_cycle[rest], rest)
        return np.concatenate([some[: group.slots.num_free] for group, some in split])

    def _send_cold(self, pages: Int32Array) -> None:
        for level in self._levels[1 : self._disk.level]:
            here = (self._table.present[pages] & level.bit) != 0
            self._send(level, pages[here], self._disk)
            pages = pages[~here]
