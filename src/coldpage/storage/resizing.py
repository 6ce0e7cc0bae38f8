"""Changing the size of a level while it holds pages.

Base addresses stay, so slots are cut off at the end. What lies there moves to free slots of the
same level; where those are too few, the least valuable pages of the level leave it first, downwards
as long as there is room below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import IoExecutor
from coldpage.errors import DeviceError, UsageError
from coldpage.migration import CodecMoves
from coldpage.pools import LevelPools, PoolGroup
from coldpage.storage.copies import BAD_DISK, PageCopies
from coldpage.storage.escalation import MAX_WAIT_S, Escalation, Losable
from coldpage.types import HOT_LEVEL, Int32Array

__all__ = ["Resizing"]

# A device that rejects a move is asked again this often.
_MAX_ATTEMPTS: Final = 8


class Resizing:
    """Resizes levels. ``finish_transfers`` blocks until nothing is in flight."""

    def __init__(
        self,
        copies: PageCopies,
        moves: CodecMoves,
        escalation: Escalation,
        io: IoExecutor,
        finish_transfers: Callable[[], None],
    ) -> None:
        self._copies = copies
        self._table = copies.table
        self._moves = moves
        self._escalation = escalation
        self._io = io
        self._finish_transfers = finish_transfers

    def resize(self, level: LevelPools, num_slots: Sequence[int]) -> None:
        """Have ``num_slots[i]`` slots in the level's pool group ``i``. Blocks until it is done.

        Raises UsageError, changing nothing, when locked pages lie in what would be cut off or would
        have no room; and DeviceError or StorageError when the device rejects the moves or has no
        room to grow, with every pool group whole, at its old size or its new one.
        """
        self._check_locks(level, num_slots)
        self._finish_transfers()
        # Shrink first: another group may grow into what that gives back.
        for group, count in zip(level.groups, num_slots, strict=True):
            if count < group.slots.num_slots:
                self._shrink(level, group, count)
        for group, count in zip(level.groups, num_slots, strict=True):
            if count > group.slots.num_slots:
                group.resize(count)

    def defragment(self, level: LevelPools) -> int:
        """Move pages to the level's lowest slots, as far as no active sequence uses them. Blocks
        until nothing else is in flight; the copies are ordered by events. Returns how many were
        moved; none where the device rejects it.
        """
        self._finish_transfers()
        num_moved = 0
        for group in level.groups:
            stop = group.slots.first_slot + group.slots.num_used
            num_places = group.slots.num_free_below(stop)
            if num_places:
                beyond = self._movable_beyond(group, stop)[-num_places:]
                num_moved += self._move_down(level, group, beyond, stop)
        return num_moved

    def _movable_beyond(self, group: PoolGroup, stop: int) -> Int32Array:
        """Slots from ``stop`` on whose pages are not locked."""
        slots = group.slots.owned().astype(np.int32)
        slots = slots[slots >= stop]
        is_locked = self._table.num_locks[group.slots.page[slots]] > 0
        return slots if group.level != HOT_LEVEL else slots[~is_locked]

    def _check_locks(self, level: LevelPools, num_slots: Sequence[int]) -> None:
        if level.level != HOT_LEVEL:
            self._check_only_copies(level, num_slots)
            return
        num_in_the_way = 0
        for group, count in zip(level.groups, num_slots, strict=True):
            owners = group.slots.page[group.slots.first_slot + count :]
            num_in_the_way += int(np.count_nonzero(self._table.num_locks[owners]))
        if num_in_the_way:
            raise UsageError(
                f"{num_in_the_way} pages of active sequences lie in the part of the hot level that "
                "would be cut off: suspend those sequences first"
            )
        # Where a device rejects moves, locked pages have no slot for a while, and will want one.
        locked = np.flatnonzero(self._table.num_locks)
        num_locked = level.count(self._table.life_cycle[locked])
        if (num_locked > np.array(num_slots)).any():
            raise UsageError(
                f"active sequences need {int(num_locked.sum())} slots of the hot level: suspend "
                "some of them first"
            )

    def _check_only_copies(self, level: LevelPools, num_slots: Sequence[int]) -> None:
        """Pages of active sequences that are still on their way from a cold level stay there."""
        table = self._table
        is_needed = (table.num_locks > 0) & (table.present == level.bit)
        num_needed = level.count(table.life_cycle[np.flatnonzero(is_needed)])
        if (num_needed > np.array(num_slots)).any():
            raise UsageError(
                f"active sequences have {int(num_needed.sum())} pages on the {level.name} level "
                "and nowhere else: wait until they are ready, or suspend some of them first"
            )

    def _shrink(self, level: LevelPools, group: PoolGroup, num_slots: int) -> None:
        stop = group.slots.first_slot + num_slots
        for _ in range(_MAX_ATTEMPTS):
            num_beyond = np.count_nonzero(group.slots.page[stop:])
            surplus = int(num_beyond) - group.slots.num_free_below(stop)
            if surplus > 0:
                self._evict(level, group, group.slots.num_free + surplus)
                continue
            beyond = self._movable_beyond(group, stop)
            if self._move_down(level, group, beyond, stop) == beyond.size:
                break
        else:
            self._give_up(level, group, stop)
        # Copies from there, and work on their own streams of sequences that have let go of it.
        for event in self._moves.ready.outstanding(group.slots.event[stop:]):
            event.synchronize()
        group.resize(num_slots)

    def _evict(self, level: LevelPools, group: PoolGroup, num_free: int) -> None:
        """Have ``num_free`` free slots, if the device lets us."""
        escalation = self._escalation
        if level.level == HOT_LEVEL:
            escalation.make_hot_room(group, num_free)
            self._finish_transfers()
            return
        deadline_s = time.monotonic() + MAX_WAIT_S
        room = escalation.make_cold_room(level, group, num_free, Losable.NOTHING)
        while room < num_free and not level.is_disk:
            before = room
            for below in self._copies.levels[level.level + 1 :]:
                escalation.send_least_below(level, group, num_free - room, below)
                self._finish_transfers()
                room = escalation.make_cold_room(level, group, num_free, Losable.NOTHING)
            if room == before and not escalation.wait_for_memory(level.level, deadline_s):
                break
        if room == num_free or level.is_disk or not escalation.is_preparing(level.level):
            escalation.make_cold_room(level, group, num_free, Losable.HELD)

    def _move_down(self, level: LevelPools, group: PoolGroup, beyond: Int32Array, stop: int) -> int:
        """Move the pages in the slots ``beyond`` to free slots before ``stop``. Returns how many
        were moved; the others are where they were, since the device refused or failed.
        """
        slots = group.slots
        if not beyond.size:
            return 0
        pages = slots.page[beyond].copy()
        places = slots.allocate_below(pages, stop)
        if level.is_disk:
            arrived = self._copy_on_disk(group, beyond, places)
        elif self._moves.copy_within(group, beyond, places):
            arrived = np.ones(pages.size, np.bool_)
        else:
            slots.free(places)
            return 0
        slots.free(beyond[arrived])
        self._table.slot[level.level, pages[arrived]] = places[arrived]
        self._copies.events.moved(pages[arrived], level.level, level.level, group.slot_bytes)
        # Another slot is tried first the next time.
        slots.free_last(places[~arrived])
        self._copies.events.totals["relocation_errors"] += int(np.count_nonzero(~arrived))
        return int(np.count_nonzero(arrived))

    def _copy_on_disk(
        self, group: PoolGroup, src: Int32Array, dst: Int32Array
    ) -> npt.NDArray[np.bool_]:
        batch = self._io.submit(group.disk.relocate_jobs(src, dst))
        batch.synchronize()
        return batch.ok

    def _give_up(self, level: LevelPools, group: PoolGroup, stop: int) -> None:
        """What lies from ``stop`` on could not be moved, however often it was tried. On disk these
        copies can not be read, or nothing can be written: they are lost. Elsewhere they stay.
        """
        if not level.is_disk:
            if self._escalation.is_preparing(level.level):
                raise DeviceError(
                    f"the {level.name} level keeps its size: the device has yet to prepare the "
                    "memory where its pages would go; try again later"
                )
            raise DeviceError(
                f"the device keeps rejecting the moves that would make the {level.name} level "
                "smaller: it keeps its size; try again later"
            )
        table = self._table
        pages = group.slots.page[self._movable_beyond(group, stop)]
        has_other = (table.present[pages] & ~level.bit) != 0
        self._copies.drop(level, pages[has_other])
        self._copies.drop_last(level, pages[~has_other], BAD_DISK)
