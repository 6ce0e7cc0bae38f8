"""The copies of pages: giving a page a slot, taking one away, and what follows when the last is
gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.events import StorageEvents
from coldpage.page import HOT_BIT, PageTable
from coldpage.pools import LevelPools
from coldpage.types import HOT_LEVEL, Int32Array

__all__ = [
    "BAD_DISK",
    "EXPIRED",
    "FAILED_DECODE",
    "FAILED_ENCODE",
    "FAILED_WORK",
    "NO_ROOM",
    "PLANNED",
    "PageCopies",
]

NO_ROOM: Final = "every colder tier is full of such pages; give a tier more room to avoid this"
BAD_DISK: Final = "the disk failed to write or to return them; look at the disk"
PLANNED: Final = "their drop was planned, and nobody holds them any more"
EXPIRED: Final = "nobody has used them for as long as the disk tier keeps pages"
FAILED_ENCODE: Final = (
    "a codec failed to encode them for a colder tier; give that tier another codec"
)
FAILED_DECODE: Final = "a codec failed to decode them; give their tier another codec"
FAILED_WORK: Final = "the work that wrote them failed on the device"

_logger = logging.getLogger(__name__)


class PageCopies:
    """Keeps page columns and slot allocators in step. Every slot is taken and given back here or in
    a transfer.
    """

    def __init__(
        self, levels: Sequence[LevelPools], table: PageTable, events: StorageEvents
    ) -> None:
        self.levels = levels
        self.table = table
        self.events = events
        self._logged_causes: set[str] = set()

    def allocate(self, level: LevelPools, pages: Int32Array) -> None:
        """Give each page a slot on the level. The caller has made sure that enough are free."""
        for group, members in level.split(self.table.life_cycle[pages], pages):
            self.table.slot[level.level, members] = group.slots.allocate(members)

    def free_slots(self, level: LevelPools, pages: Int32Array) -> None:
        """Give back the pages' slots on the level; their columns are the caller's."""
        for group, members in level.split(self.table.life_cycle[pages], pages):
            # In their order, in which they are handed out again: neighbours move as one.
            group.slots.free(np.sort(self.table.slot[level.level, members]))

    def release_unused(self, level: LevelPools, pages: Int32Array) -> None:
        """Take back the slots of pages that were given one and got no copy there."""
        table = self.table
        for group in level.groups:
            owners = level.owners(group)
            uses = table.present[owners] | table.reserved[owners] | table.busy[owners]
            unused = owners[np.isin(owners, pages) & ((uses & level.bit) == 0)]
            group.slots.free(table.slot[level.level, unused])

    def drop(self, level: LevelPools, pages: Int32Array) -> None:
        """The pages' copies on the level are copies no more. A slot still being read is freed when
        that ends.
        """
        table = self.table
        pages = pages[(table.present[pages] & level.bit) != 0]
        table.present[pages] &= ~level.bit
        self.free_slots(level, pages[(table.busy[pages] & level.bit) == 0])

    def change_life_cycles(self, pages: Int32Array, life_cycles: npt.NDArray[np.int16]) -> None:
        """Those of the pages that are hot are of these life cycles, of the same layer groups, from
        now on. Copies on levels whose codec has other forms for the two are given up, and so is
        what is on its way there.
        """
        table = self.table
        is_changed = (table.life_cycle[pages] != life_cycles) & (
            (table.present[pages] & HOT_BIT) != 0
        )
        pages, life_cycles = pages[is_changed], life_cycles[is_changed]
        if not pages.size:
            return
        for level in self.levels[1:]:
            form_of = level.codec.representative
            is_other = form_of[table.life_cycle[pages]] != form_of[life_cycles]
            other = pages[is_other]
            table.version[other[(table.reserved[other] & level.bit) != 0]] += 1
            self.drop(level, other)
        table.life_cycle[pages] = life_cycles
        table.failed_encodes[pages] = 0

    def drop_cold(self, pages: Int32Array) -> None:
        """Only the hot copies stay."""
        for level in self.levels[1:]:
            self.drop(level, pages)

    def drop_for_room(self, level: LevelPools, pages: Int32Array) -> None:
        """``drop_last`` because no colder level has room for them, or can have them."""
        is_encodable = self.table.can_encode(pages, ~np.uint8(level.bit | (level.bit - 1)))
        self.drop_last(level, pages[is_encodable], NO_ROOM)
        self.drop_last(level, pages[~is_encodable], FAILED_ENCODE)

    def drop_last(self, level: LevelPools, pages: Int32Array, cause: str) -> None:
        """Drop copies on the level that are their pages' only ones: the contents are gone."""
        for group, members in level.split(self.table.life_cycle[pages], pages):
            group.slots.num_dropped += int(members.size)
        self.drop(level, pages)
        self.lose(pages, cause)

    def lose(self, pages: Int32Array, cause: str) -> None:
        """The contents of ``pages``, which have no copy left, are gone: held pages are missing from
        now on, droppable ones are forgotten. The first loss of held pages by each cause is logged.
        """
        if not pages.size:
            return
        table, totals = self.table, self.events.totals
        self.events.lost(pages, cause)
        is_held = table.num_refs[pages] > 0
        held, droppable = pages[is_held], pages[~is_held]
        if held.size:
            if cause not in self._logged_causes:
                self._logged_causes.add(cause)
                _logger.warning(
                    "%d pages of suspended sequences were lost and will be recomputed when needed: "
                    "%s",
                    held.size,
                    cause,
                )
            totals["lost_held_pages"] += int(held.size)
            table.is_missing[held] = True
        if droppable.size:
            totals["dropped_pages"] += int(droppable.size)
            self.forget(droppable)

    def forget(self, pages: Int32Array) -> None:
        """Take committed pages out of the prefix tree and, if nobody holds them, bury them."""
        table = self.table
        nodes, life_cycles = table.node[pages].copy(), table.life_cycle[pages].copy()
        committed = nodes != 0
        table.node[pages] = 0
        table.is_drop_planned[pages] = False
        self.events.forgotten(nodes[committed], life_cycles[committed])
        self.bury(pages)

    def bury(self, pages: Int32Array) -> None:
        """Free everything of those pages that nobody refers to; what a transfer still uses is freed
        when that transfer settles.
        """
        table = self.table
        dead = pages[(table.num_refs[pages] == 0) & (table.node[pages] == 0)]
        if not dead.size:
            return
        for level in self.levels:
            self.drop(level, dead)
        # A hot slot reserved for an onboarding that has not begun or has ended without one.
        waiting = dead[((table.reserved[dead] & HOT_BIT) != 0) & (table.busy[dead] == 0)]
        self.free_slots(self.levels[HOT_LEVEL], waiting)
        table.reserved[waiting] &= ~HOT_BIT
        table.destroy(dead[(table.reserved[dead] | table.busy[dead]) == 0])
