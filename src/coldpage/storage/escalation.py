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
import numpy.typing as npt

from coldpage.eviction import EvictionPolicy, least_valuable, num_outranking
from coldpage.migration import CodecMoves, DiskMoves
from coldpage.page import HOT_BIT, PageTable
from coldpage.pools import LevelPools, PoolGroup
from coldpage.storage.copies import PageCopies
from coldpage.types import HOT_LEVEL, CacheLevel, Int32Array

__all__ = ["MAX_WAIT_S", "Escalation", "Losable"]

# The background spill keeps this fraction of a cold level in memory free or on disk too.
_SPILL_CLEAN_FRACTION: Final = 0.25
# Pages that the spill has in flight at once.
_MAX_SPILL_PAGES: Final = 64


# The owner's thread waits at most this long for writes in flight; then there is no room for now.
MAX_WAIT_S: Final = 1.0


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
        *,
        is_write_behind: bool = False,
    ) -> None:
        self._copies = copies
        self._is_write_behind = is_write_behind
        self._table: PageTable = copies.table
        self._levels: Sequence[LevelPools] = copies.levels
        self._moves = moves
        self._disk_moves = disk_moves
        cold_memory = [level for level in self._levels[1:] if not level.is_disk]
        self._memory_bits = np.uint8(sum(int(level.bit) for level in cold_memory))
        self._cold_bits = np.uint8(sum(int(level.bit) for level in self._levels[1:]))
        self.policy = policy
        self._drain = drain
        # Whether there will soon be more room below a level.
        self.is_preparing: Callable[[CacheLevel], bool] = lambda above: False
        # What the spill saw when it last looked at a level's pool group.
        self._spill_seen: dict[PoolGroup, tuple[int, int, int]] = {}

    # ------------------------------------------------------------------ the hot level

    def evictable(self, group: PoolGroup) -> Int32Array:
        """Pages whose hot slot could be taken: nobody has them locked, nothing moves there."""
        table = self._table
        owners = self._levels[HOT_LEVEL].owners(group)
        in_motion = (table.reserved[owners] | table.busy[owners]) & HOT_BIT
        evictable: Int32Array = owners[(table.num_locks[owners] == 0) & (in_motion == 0)]
        return evictable

    def make_hot_room(self, group: PoolGroup, count: int) -> bool:
        """Have at least ``count`` free slots in a hot pool group. All or nothing as far as eviction
        is concerned.
        """
        table = self._table
        shortage = count - group.slots.num_free
        if shortage <= 0:
            return True
        candidates = self.evictable(group)
        if candidates.size < shortage:
            return False
        if len(self._levels) == 1:
            is_held = table.num_refs[candidates] > 0
            victims = self._choose(candidates[~is_held], shortage)
            held = self._choose(candidates[is_held], shortage - victims.size)
            victims = np.concatenate([victims, held])
        else:
            victims = self._choose(candidates, shortage)
        self._offload(self._drop_redundant(victims))
        return group.slots.num_free >= count

    def _choose(self, pages: Int32Array, count: int) -> Int32Array:
        return least_valuable(self.policy, self._table, pages, count)

    def _drop_redundant(self, victims: Int32Array) -> Int32Array:
        """Free the hot slots of victims that lose nothing by it; returns the others."""
        table = self._table
        if self._is_write_behind:
            # They have a copy on disk already, and memory is there to spare them that way.
            self._keep_in_memory(victims)
            victims = victims[(table.present[victims] & HOT_BIT) != 0]
        return self._without_copies(victims)

    def _without_copies(self, pages: Int32Array) -> Int32Array:
        """Free the hot slots of pages that have copies elsewhere, or nothing in them; returns the
        others. Asked again after each wait: what was on its way to disk may be there by then.
        """
        table = self._table
        is_redundant = (table.present[pages] & ~HOT_BIT) != 0
        is_redundant |= table.is_missing[pages]
        self._copies.drop(self._levels[HOT_LEVEL], pages[is_redundant])
        rest: Int32Array = pages[~is_redundant]
        return rest

    def _keep_in_memory(self, victims: Int32Array) -> None:
        """Move those whose other copies are all on disk to a level in memory, as far as there is
        room at the cost of such copies only.
        """
        table = self._table
        others = table.present[victims] & ~HOT_BIT
        pages = victims[(others != 0) & ((others & self._memory_bits) == 0)]
        for level in self._levels[1:]:
            if level.is_disk:
                continue
            is_taken = ((table.busy[pages] | table.reserved[pages]) & level.bit) != 0
            pages = pages[~is_taken & table.can_encode(pages, level.bit)]
            for group, members in level.split(table.life_cycle[pages], pages):
                room = self.make_cold_room(level, group, members.size, Losable.NOTHING)
                self._send(level, members[members.size - room :], may_wait=False)
            pages = pages[(table.present[pages] & HOT_BIT) != 0]

    def keep_free(self, fraction: float) -> None:
        """Have that fraction of the hot slots free, as far as no page that a sequence holds is
        lost for it. What fits nowhere below stays until somebody asks for its slot.
        """
        for group in self._levels[HOT_LEVEL].groups:
            shortage = int(fraction * group.slots.num_ready) - group.slots.num_free
            if shortage > 0 and len(self._levels) > 1:
                victims = self._drop_redundant(self._choose(self.evictable(group), shortage))
                is_held = self._table.num_refs[victims] > 0
                for some in (victims[is_held], victims[~is_held]):
                    self._send_down(some, Losable.NOTHING, Losable.DROPPABLE, may_wait=False)

    def _offload(self, pages: Int32Array) -> None:
        """Move hot pages, least valuable first, to the nearest level with room; what fits nowhere
        is lost.

        Held pages are lost, or displace held pages, only when no transfer in flight could still
        make room, nor memory that the device prepares, or no codec takes them. Others are lost only
        when no transfer in flight has slots of theirs below, or when those have taken too long.
        """
        is_held = self._table.num_refs[pages] > 0
        held = self._send_down(pages[is_held], Losable.NOTHING, Losable.DROPPABLE)
        held = self._send_down(held, Losable.DROPPABLE, Losable.DROPPABLE)
        deadline_s = time.monotonic() + MAX_WAIT_S
        held = self._lose_stuck(held)
        while held.size and (self._num_writes_in_flight or self.is_preparing(HOT_LEVEL)):
            if time.monotonic() > deadline_s:
                return  # they stay hot, and whoever wants their room comes back
            self._copies.events.totals["room_waits"] += 1
            self._drain()
            held = self._send_down(held, Losable.DROPPABLE, Losable.DROPPABLE)
        held = self._send_down(held, Losable.DROPPABLE, Losable.HELD)
        droppable = self._send_down(pages[~is_held], Losable.NOTHING, Losable.DROPPABLE)
        while self._are_in_motion(droppable) and time.monotonic() <= deadline_s:
            self._copies.events.totals["room_waits"] += 1
            self._drain()
            droppable = self._send_down(droppable, Losable.NOTHING, Losable.DROPPABLE)
        self._lose(np.concatenate([droppable, held]))

    def _lose(self, pages: Int32Array) -> None:
        self._copies.drop_for_room(self._levels[HOT_LEVEL], self._without_copies(pages))

    def _lose_stuck(self, pages: Int32Array) -> Int32Array:
        """Lose those that no codec takes: waiting does not help them. Returns the others."""
        failed_encodes = self._table.failed_encodes[pages]
        is_stuck = (failed_encodes != 0) & (failed_encodes == self._cold_bits)
        self._lose(pages[is_stuck])
        rest: Int32Array = pages[~is_stuck]
        return rest

    def _are_in_motion(self, pages: Int32Array) -> bool:
        """Whether transfers use slots of any of them below the hot level. They may bring a copy,
        or be void: the slots may be had again then.
        """
        uses = self._table.busy[pages] | self._table.reserved[pages]
        return bool(((uses & ~HOT_BIT) != 0).any())

    def wait_for_memory(self, above: CacheLevel, deadline_s: float) -> bool:
        """Let memory that the device prepares for colder levels get ready; False when there is no
        point or no time.
        """
        if not self.is_preparing(above) or time.monotonic() > deadline_s:
            return False
        self._drain()
        return True

    @property
    def _num_writes_in_flight(self) -> int:
        return 0 if self._disk_moves is None else self._disk_moves.writes.num_in_flight

    def _send_down(
        self,
        pages: Int32Array,
        losable: Losable,
        on_coldest: Losable,
        *,
        may_wait: bool = True,
    ) -> Int32Array:
        """Try the cold levels in order; ``losable`` is what each may drop, ``on_coldest`` what the
        last of them may. Returns the pages for which none has room.
        """
        table, pages = self._table, self._without_copies(pages)
        for level in self._levels[1:]:
            # An older transfer still uses the page's slot there.
            is_taken = ((table.busy[pages] | table.reserved[pages]) & level.bit) != 0
            is_taken |= ~table.can_encode(pages, level.bit)
            if level.is_disk:
                is_taken |= ~table.worth_writing(pages)
            rest, pages = [pages[is_taken]], pages[~is_taken]
            for group, members in level.split(table.life_cycle[pages], pages):
                may_lose = on_coldest if level is self._levels[-1] else losable
                room = self.make_cold_room(level, group, members.size, may_lose, members)
                # The most valuable pages get what room there is.
                first = members.size - room
                sent = members[first:]
                self._send(level, sent, may_wait=may_wait)
                rest += [members[:first], sent[~table.can_encode(sent, level.bit)]]
            pages = np.concatenate(rest)
        return pages

    def _send(self, level: LevelPools, pages: Int32Array, *, may_wait: bool) -> None:
        """Move hot pages to free slots of the level. Pages whose submission is rejected
        stay hot.
        """
        if not pages.size:
            return
        if level.is_disk:
            self._copies.allocate(level, pages)
            self._copies.free_slots(level, self._write_staged(level, pages, may_wait=may_wait))
            return
        pages = pages[np.argsort(self._table.slot[HOT_LEVEL, pages])]  # neighbours move as one
        self._copies.allocate(level, pages)
        self._leave_hot(pages, self._moves.offload(pages, level))

    def _leave_hot(self, pages: Int32Array, refused: Int32Array) -> None:
        sent = np.setdiff1d(pages, refused, assume_unique=True) if refused.size else pages
        self._copies.drop(self._levels[HOT_LEVEL], sent)

    def _write_staged(self, level: LevelPools, pages: Int32Array, *, may_wait: bool) -> Int32Array:
        """Returns the pages that were rejected, or for which there was no staging in time. Waits,
        for writes only, when all of the staging that writes may use is in flight.
        """
        disk_moves = self._disk_moves
        assert disk_moves is not None
        deadline_s = time.monotonic() + MAX_WAIT_S
        failed: list[Int32Array] = []
        while True:
            refused = disk_moves.writes.submit(pages, self._levels[HOT_LEVEL], level)
            # Before any wait: a write that fails then must find that the hot copy is gone.
            self._leave_hot(pages, refused)
            can_encode = self._table.can_encode(refused, level.bit)
            failed.append(refused[~can_encode])
            pages = refused[can_encode]
            is_over = not may_wait or time.monotonic() > deadline_s
            if is_over or not pages.size or not disk_moves.writes.num_in_flight:
                return np.concatenate([*failed, pages])
            self._copies.events.totals["staging_waits"] += 1
            self._drain()

    # ------------------------------------------------------------------ cold levels

    def make_cold_room(
        self,
        level: LevelPools,
        group: PoolGroup,
        count: int,
        losable: Losable,
        newcomers: Int32Array | None = None,
    ) -> int:
        """Have up to ``count`` free slots without waiting; returns how many of them there are.

        Slots are freed in this order: copies of pages that are hot, copies of pages that are on a
        colder level too, pages that nobody holds, copies of pages that are on a hotter cold level,
        and pages that suspended sequences hold; ``losable`` says whether the third and the last
        kind may go. A page dropped for good is the oldest on the coldest level; giving up a copy of
        one that is still in host memory instead would only have it written again.

        ``newcomers``, least valuable first and all held or none, are the pages that want the room:
        of them and those that could be dropped for them, the most valuable stay.
        """
        table, slots = self._table, group.slots
        if not level.may_write:
            return 0
        shortage = count - slots.num_free
        if shortage > 0:
            owners = level.owners(group)
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
                shortage -= self._displace(level, last[~is_held], newcomers, shortage)
            shortage -= self._give_up(level, redundant, shortage)
            if losable >= Losable.HELD:
                self._displace(level, last[is_held], newcomers, shortage)
        return min(count, slots.num_free)

    def _give_up(self, level: LevelPools, pages: Int32Array, count: int) -> int:
        victims = self._choose(pages, count)
        self._copies.drop(level, victims)
        return int(victims.size)

    def _displace(
        self, level: LevelPools, residents: Int32Array, newcomers: Int32Array | None, count: int
    ) -> int:
        """Drop up to ``count`` of pages that are nowhere but on the level, for good: as many as
        there are newcomers worth more.
        """
        table = self._table
        victims = self._choose(residents, count)
        if newcomers is not None and victims.size:
            is_same_kind = (table.num_refs[newcomers[0]] > 0) == (table.num_refs[victims[0]] > 0)
            if is_same_kind:
                # The others among them have room already.
                wanting = newcomers[:count]
                victims = victims[: num_outranking(self.policy, table, wanting, victims)]
        self._copies.drop_for_room(level, victims)
        return int(victims.size)

    # ------------------------------------------------------------------ the background spill

    def spill(self) -> None:
        """Start giving the oldest pages of full cold levels in memory a copy on the level below."""
        for level in self._levels[1:-1]:
            if not level.is_disk:
                for group in level.groups:
                    self._spill_group(level, group, self._levels[level.level + 1])

    def _spill_group(self, level: LevelPools, group: PoolGroup, below: LevelPools) -> None:
        table, slots = self._table, group.slots
        in_flight = 0
        if self._disk_moves is not None and below.is_disk:
            in_flight = self._disk_moves.writes.num_pages_in_flight
        # Looking at every slot is worth it only when something has changed since the last look.
        seen = (slots.num_changes, sum(g.slots.num_changes for g in below.groups), in_flight)
        if self._spill_seen.get(group) == seen:
            return
        self._spill_seen[group] = seen
        budget = _MAX_SPILL_PAGES - in_flight
        wanted = int(slots.num_ready * _SPILL_CLEAN_FRACTION) + 1 - slots.num_free
        if wanted <= 0 or budget <= 0:
            return
        owners = level.owners(group)
        owners = owners[(table.reserved[owners] & level.bit) == 0]
        on_other_levels = (table.present[owners] | table.reserved[owners]) & ~level.bit
        # Pages already free to give up, or on their way to be, count towards the goal.
        dirty = owners[(on_other_levels == 0) & (table.busy[owners] == 0)]
        wanted -= int(owners.size - dirty.size)
        dirty = dirty[self._can_go(level, dirty, below)]
        self.send_below(level, self._choose(dirty, min(wanted, budget)), below)

    def send_least_below(
        self, level: LevelPools, group: PoolGroup, count: int, below: LevelPools
    ) -> None:
        """As the spill, the ``count`` least valuable pages that have no other copy."""
        table, owners = self._table, level.owners(group)
        in_motion = table.busy[owners] | table.reserved[owners]
        dirty = owners[(table.present[owners] == level.bit) & (in_motion == 0)]
        dirty = dirty[self._can_go(level, dirty, below)]
        self.send_below(level, self._choose(dirty, count), below)

    def _can_go(
        self, level: LevelPools, pages: Int32Array, below: LevelPools
    ) -> npt.NDArray[np.bool_]:
        """Which pages need no codec on the way between the levels, or none that fails on them."""
        if level.level != HOT_LEVEL and level.codec is below.codec:
            return np.ones(pages.size, np.bool_)
        return self._table.can_encode(pages, below.bit)

    def send_below(self, level: LevelPools, pages: Int32Array, below: LevelPools) -> None:
        """Start giving pages of a level in memory a copy on a level below it, as far as there is
        room at the cost of pages that nobody holds, and the level below takes any.
        """
        pages = pages[self._can_go(level, pages, below)]
        if below.is_disk:
            pages = pages[self._table.worth_writing(pages)]
        if not pages.size or not below.may_write:
            return
        for group, members in below.split(self._table.life_cycle[pages], pages):
            room = self._make_spill_room(below, group, members.size)
            self._copy_below(level, members[:room], below)

    def copy_ahead(self, pages: Int32Array, level: LevelPools) -> None:
        """Start giving hot pages, which nobody has locked, a copy on a cold level in memory, as far
        as there is room at the cost only of copies of pages that are not hot and that a colder
        level has too: a hot page whose copy were taken would have to be written again. Where there
        is not room for all, those get it that would be evicted first.
        """
        table = self._table
        has_slot = table.present[pages] | table.reserved[pages] | table.busy[pages]
        wanted = ((has_slot & self._memory_bits) == 0) & ((table.present[pages] & HOT_BIT) != 0)
        wanted &= table.can_encode(pages, level.bit)
        pages = pages[wanted & (table.num_locks[pages] == 0) & ~table.is_missing[pages]]
        for group, members in level.split(table.life_cycle[pages], pages):
            shortage = members.size - group.slots.num_free
            if shortage > 0:
                clean = self._clean_on(level, group)
                self._give_up(level, clean[(table.present[clean] & HOT_BIT) == 0], shortage)
            some, num_free = members, group.slots.num_free
            if members.size > num_free:  # else in the order of their blocks: neighbours move as one
                some = self._choose(members, num_free)
            self._copies.allocate(level, some)
            self._moves.offload(some, level)

    def back_up(self, level: LevelPools, pages: Int32Array, disk: LevelPools) -> None:
        """As ``send_below``, with the most valuable pages on the disk whatever else has them too:
        memory will not last.
        """
        pages = pages[self._table.worth_writing(pages) & self._can_go(level, pages, disk)]
        if not pages.size or not disk.may_write:
            return
        for group, members in disk.split(self._table.life_cycle[pages], pages):
            worst_first = self._choose(members, members.size)
            room = self._make_backup_room(disk, group, worst_first)
            self._copy_below(level, worst_first[worst_first.size - room :][::-1], disk)

    def _copy_below(self, level: LevelPools, pages: Int32Array, below: LevelPools) -> None:
        """``below`` has free slots for all of them."""
        self._copies.allocate(below, pages)
        if not below.is_disk:
            self._moves.copy_cold(pages, level, below)
            return
        assert self._disk_moves is not None
        refused = self._disk_moves.writes.submit(pages, level, below)
        self._copies.free_slots(below, refused)

    def _make_backup_room(self, disk: LevelPools, group: PoolGroup, pages: Int32Array) -> int:
        """Free slots for as many of ``pages``, least valuable first, as are worth more than what is
        there; returns how many that are.
        """
        table, slots = self._table, group.slots
        shortage = pages.size - slots.num_free
        if shortage > 0:
            owners = disk.owners(group)
            is_only_here = table.present[owners] == disk.bit
            is_still = (table.busy[owners] | table.reserved[owners]) == 0
            is_free = (table.num_refs[owners] == 0) | ~is_only_here
            victims = self._choose(owners[is_still & is_free], shortage)
            count = num_outranking(self.policy, table, pages[-shortage:], victims)
            victims = victims[:count]
            is_lost = table.present[victims] == disk.bit
            self._copies.drop(disk, victims[~is_lost])
            self._copies.drop_for_room(disk, victims[is_lost])
        return min(pages.size, slots.num_free)

    def _make_spill_room(self, below: LevelPools, group: PoolGroup, count: int) -> int:
        """As ``make_cold_room``, but at the cost only of copies that a still colder level has too,
        or, on the coldest, of pages that nobody holds: taking another page's copy would have that
        one spilled again, for ever.
        """
        table, slots = self._table, group.slots
        shortage = count - slots.num_free
        if shortage > 0:
            if below is self._levels[-1]:
                owners = below.owners(group)
                in_motion = table.busy[owners] | table.reserved[owners]
                is_only_here = table.present[owners] == below.bit
                is_free = (table.num_refs[owners] == 0) & (in_motion == 0)
                self._displace(below, owners[is_only_here & is_free], None, shortage)
            else:
                self._give_up(below, self._clean_on(below, group), shortage)
        return min(count, slots.num_free)

    def _clean_on(self, level: LevelPools, group: PoolGroup) -> Int32Array:
        """Pages whose copy on the level no transfer uses, and that a colder level has too."""
        table, owners = self._table, level.owners(group)
        colder = ~np.uint8(level.bit | (level.bit - 1))
        is_still = ((table.busy[owners] | table.reserved[owners]) & level.bit) == 0
        clean: Int32Array = owners[is_still & ((table.present[owners] & colder) != 0)]
        return clean
