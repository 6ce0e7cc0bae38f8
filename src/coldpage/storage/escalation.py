"""Making room: free slots first, then copies that cost nothing to give up, then moving down, last
dropping.

Nobody waits for a disk write here if it can be avoided. When a cold level in memory has no slot at
once, victims from the hot level pass it by and go to the disk through the page ring, which frees
their hot slots as soon as they are encoded; meanwhile a spill in the background gives that level's
oldest pages a copy on disk, so that later their slots cost nothing.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from coldpage.eviction import EvictionPolicy
from coldpage.migration import CodecMoves, DiskMoves
from coldpage.page import HOT_BIT, PageTable
from coldpage.pools import LevelPools, split_by
from coldpage.storage.copies import NO_ROOM, PageCopies
from coldpage.types import HOT_LEVEL, Int32Array, PoolGroupIndex

__all__ = ["Escalation", "Losable"]

# The background spill keeps this fraction of a cold level in memory free or on disk too.
_SPILL_CLEAN_FRACTION: Final = 0.25
# Pages that the spill has in flight at once.
_MAX_SPILL_PAGES: Final = 64


# The owner's thread waits at most this long for writes in flight; then there is no room for now.
_MAX_WAIT_S: Final = 1.0


class Losable(enum.IntEnum):
    """What may be dropped for good to make room."""

    NOTHING = 0
    DROPPABLE = 1  # committed pages that nobody holds
    HELD = 2  # also pages of suspended sequences


class Escalation:
    """Makes room on levels. ``drain`` blocks until some transfer has advanced."""

    def __init__(
        self,
        copies: PageCopies,
        moves: CodecMoves,
        disk_moves: DiskMoves | None,
        policy: EvictionPolicy,
        drain: Callable[[], None],
    ) -> None:
        self._copies = copies
        self._table: PageTable = copies.table
        self._levels: Sequence[LevelPools] = copies.levels
        self._moves = moves
        self._disk_moves = disk_moves
        self._policy = policy
        self._drain = drain
        # What the spill saw when it last looked at a level's pool group.
        self._spill_seen: dict[tuple[int, int], tuple[int, int, int]] = {}

    # ------------------------------------------------------------------ the hot level

    def evictable(self, pool_group: PoolGroupIndex) -> Int32Array:
        """Pages whose hot slot could be taken: nobody has them locked, nothing moves there."""
        table = self._table
        allocator = self._levels[HOT_LEVEL].allocators[pool_group]
        owners = allocator.page[allocator.owned()]
        in_motion = (table.reserved[owners] | table.busy[owners]) & HOT_BIT
        evictable: Int32Array = owners[(table.num_locks[owners] == 0) & (in_motion == 0)]
        return evictable

    def make_hot_room(self, pool_group: PoolGroupIndex, count: int) -> bool:
        """Have at least ``count`` free hot slots. All or nothing as far as eviction
        is concerned.
        """
        hot, table = self._levels[HOT_LEVEL], self._table
        allocator = hot.allocators[pool_group]
        shortage = count - allocator.num_free
        if shortage <= 0:
            return True
        candidates = self.evictable(pool_group)
        if candidates.size < shortage:
            return False
        if len(self._levels) == 1:
            is_held = table.num_refs[candidates] > 0
            victims = self._policy.choose(table, candidates[~is_held], shortage)
            num_held = shortage - victims.size
            held = self._policy.choose(table, candidates[is_held], num_held)
            victims = np.concatenate([victims, held])
        else:
            victims = self._policy.choose(table, candidates, shortage)
        has_other_copy = (table.present[victims] & ~HOT_BIT) != 0
        self._copies.drop(hot, victims[has_other_copy | table.is_missing[victims]])
        self._offload(victims[~(has_other_copy | table.is_missing[victims])])
        return allocator.num_free >= count

    def _offload(self, pages: Int32Array) -> None:
        """Move hot pages, least valuable first, to the nearest level with room; what fits nowhere
        is lost.

        Held pages are lost, or displace held pages, only when no transfer in flight could still
        make room.
        """
        is_held = self._table.num_refs[pages] > 0
        held = self._send_down(pages[is_held], Losable.NOTHING, Losable.DROPPABLE)
        held = self._send_down(held, Losable.DROPPABLE, Losable.DROPPABLE)
        deadline_s = time.monotonic() + _MAX_WAIT_S
        while held.size and self._num_writes_in_flight:
            if time.monotonic() > deadline_s:
                return  # they stay hot, and whoever wants their room comes back
            self._copies.counters.totals["room_waits"] += 1
            self._drain()
            held = self._send_down(held, Losable.DROPPABLE, Losable.DROPPABLE)
        held = self._send_down(held, Losable.DROPPABLE, Losable.HELD)
        droppable = self._send_down(pages[~is_held], Losable.NOTHING, Losable.DROPPABLE)
        lost = np.concatenate([droppable, held])
        self._copies.drop(self._levels[HOT_LEVEL], lost)
        self._copies.lose(lost, NO_ROOM)

    @property
    def _num_writes_in_flight(self) -> int:
        return 0 if self._disk_moves is None else self._disk_moves.num_writes_in_flight

    def _send_down(self, pages: Int32Array, losable: Losable, on_coldest: Losable) -> Int32Array:
        """Try the cold levels in order; ``losable`` is what each may drop, ``on_coldest`` what the
        last of them may. Returns the pages for which none has room.
        """
        table = self._table
        for level in self._levels[1:]:
            # An older transfer still uses the page's slot there.
            is_taken = ((table.busy[pages] | table.reserved[pages]) & level.bit) != 0
            rest, pages = [pages[is_taken]], pages[~is_taken]
            for group, members in split_by(self._copies.pool_groups(level, pages), pages):
                may_lose = on_coldest if level is self._levels[-1] else losable
                rest.append(self._send_to_group(level, PoolGroupIndex(group), members, may_lose))
            pages = np.concatenate(rest)
        return pages

    def _send_to_group(
        self, level: LevelPools, pool_group: PoolGroupIndex, pages: Int32Array, losable: Losable
    ) -> Int32Array:
        """The most valuable pages get what room there is; returns the others."""
        room = self.make_cold_room(level, pool_group, pages.size, losable)
        first = pages.size - room
        self._send(level, pages[first:])
        return pages[:first]

    def _send(self, level: LevelPools, pages: Int32Array) -> None:
        """Move hot pages to free slots of the level. Pages whose submission is rejected
        stay hot.
        """
        if not pages.size:
            return
        self._copies.allocate(level, pages)
        if level.is_disk:
            self._copies.free_slots(level, self._write_staged(level, pages))
        else:
            self._leave_hot(pages, self._moves.offload(pages, level))

    def _leave_hot(self, pages: Int32Array, refused: Int32Array) -> None:
        sent = np.setdiff1d(pages, refused, assume_unique=True) if refused.size else pages
        self._copies.drop(self._levels[HOT_LEVEL], sent)

    def _write_staged(self, level: LevelPools, pages: Int32Array) -> Int32Array:
        """Returns the pages that were rejected, or for which there was no staging in time. Waits,
        for writes only, when all of the staging that writes may use is in flight.
        """
        disk_moves = self._disk_moves
        assert disk_moves is not None
        deadline_s = time.monotonic() + _MAX_WAIT_S
        while True:
            refused = disk_moves.write_staged(pages, level)
            # Before any wait: a write that fails then must find that the hot copy is gone.
            self._leave_hot(pages, refused)
            is_over = time.monotonic() > deadline_s
            if is_over or not refused.size or not disk_moves.num_writes_in_flight:
                return refused
            pages = refused
            self._copies.counters.totals["staging_waits"] += 1
            self._drain()

    # ------------------------------------------------------------------ cold levels

    def make_cold_room(
        self, level: LevelPools, pool_group: PoolGroupIndex, count: int, losable: Losable
    ) -> int:
        """Have up to ``count`` free slots without waiting; returns how many of them there are.

        Slots are freed in this order: copies of pages that are hot, copies of pages that are on a
        colder level too, pages that nobody holds, copies of pages that are on a hotter cold level,
        and pages that suspended sequences hold; ``losable`` says whether the third and the last
        kind may go. A page dropped for good is the oldest on the coldest level; giving up a copy of
        one that is still in host memory instead would only have it written again.
        """
        table, allocator = self._table, level.allocators[pool_group]
        shortage = count - allocator.num_free
        if shortage > 0:
            owners = allocator.page[allocator.owned()]
            owners = owners[((table.busy[owners] | table.reserved[owners]) & level.bit) == 0]
            is_hot = (table.present[owners] & HOT_BIT) != 0
            shortage -= self._give_up(level, owners[is_hot], shortage)
            hotter = np.uint8(level.bit - 1)
            is_redundant = ~is_hot & ((table.present[owners] & hotter) != 0)
            redundant = owners[is_redundant]
            owners = owners[~is_hot & ~is_redundant & (table.num_locks[owners] == 0)]
            is_clean = (table.present[owners] & ~(hotter | level.bit)) != 0
            shortage -= self._give_up(level, owners[is_clean], shortage)
            last = owners[~is_clean & (table.busy[owners] == 0) & (table.reserved[owners] == 0)]
            is_held = table.num_refs[last] > 0
            if losable >= Losable.DROPPABLE:
                shortage -= self._lose(level, last[~is_held], shortage)
            shortage -= self._give_up(level, redundant, shortage)
            if losable >= Losable.HELD:
                self._lose(level, last[is_held], shortage)
        return min(count, allocator.num_free)

    def _give_up(self, level: LevelPools, pages: Int32Array, count: int) -> int:
        victims = self._policy.choose(self._table, pages, count)
        self._copies.drop(level, victims)
        return int(victims.size)

    def _lose(self, level: LevelPools, pages: Int32Array, count: int) -> int:
        """Drop up to ``count`` of pages that are nowhere but on the level, for good."""
        victims = self._policy.choose(self._table, pages, count)
        self._copies.drop(level, victims)
        self._copies.lose(victims, NO_ROOM)
        return int(victims.size)

    # ------------------------------------------------------------------ the background spill

    def spill(self) -> None:
        """Start writing the oldest pages of full cold levels in memory to the disk below them."""
        for level in self._levels[1:-1]:
            disk = self._levels[level.level + 1]
            if level.is_disk or not disk.is_disk:
                continue
            for group in range(len(level.allocators)):
                self._spill_group(level, PoolGroupIndex(group), disk)

    def _spill_group(self, level: LevelPools, pool_group: PoolGroupIndex, disk: LevelPools) -> None:
        table, allocator, disk_moves = self._table, level.allocators[pool_group], self._disk_moves
        assert disk_moves is not None
        # Looking at every slot is worth it only when something has changed since the last look.
        seen = (
            allocator.num_changes,
            sum(a.num_changes for a in disk.allocators),
            disk_moves.num_written_pages_in_flight,
        )
        if self._spill_seen.get((level.level, pool_group)) == seen:
            return
        self._spill_seen[level.level, pool_group] = seen
        budget = _MAX_SPILL_PAGES - disk_moves.num_written_pages_in_flight
        wanted = int(allocator.num_slots * _SPILL_CLEAN_FRACTION) + 1 - allocator.num_free
        if wanted <= 0 or budget <= 0:
            return
        owners = allocator.page[allocator.owned()]
        owners = owners[(table.reserved[owners] & level.bit) == 0]
        on_other_levels = (table.present[owners] | table.reserved[owners]) & ~level.bit
        # Pages already free to give up, or on their way to be, count towards the goal.
        dirty = owners[(on_other_levels == 0) & (table.busy[owners] == 0)]
        wanted -= int(owners.size - dirty.size)
        victims = self._policy.choose(table, dirty, min(wanted, budget))
        for disk_group, members in split_by(self._copies.pool_groups(disk, victims), victims):
            room = self._make_spill_room(disk, PoolGroupIndex(disk_group), members.size)
            if room:
                self._copies.allocate(disk, members[:room])
                disk_moves.write_through(members[:room], level, disk)

    def _make_spill_room(self, disk: LevelPools, pool_group: PoolGroupIndex, count: int) -> int:
        """As ``make_cold_room``, but only at the cost of pages that nobody holds: taking another
        page's copy would have that one spilled again, for ever.
        """
        table, allocator = self._table, disk.allocators[pool_group]
        shortage = count - allocator.num_free
        if shortage > 0 and disk is self._levels[-1]:
            owners = allocator.page[allocator.owned()]
            in_motion = table.busy[owners] | table.reserved[owners]
            is_only_here = table.present[owners] == disk.bit
            is_free = (table.num_refs[owners] == 0) & (in_motion == 0)
            self._lose(disk, owners[is_only_here & is_free], shortage)
        return min(count, allocator.num_free)
