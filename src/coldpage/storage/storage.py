"""The levels as one store of pages: locking pages hot, letting go of them, and settling what was in
flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Device, Stream
from coldpage.errors import DeviceError, SubmissionError
from coldpage.events import StorageEvents
from coldpage.eviction import PriorityLru
from coldpage.migration import CodecMoves, DiskMoves, Settlement
from coldpage.page import HOT_BIT, RETAINED_PRIORITY, PageTable
from coldpage.pools import LevelPools, PoolGroup
from coldpage.storage.backup import MAX_BACKUP_PAGES, Backup
from coldpage.storage.copies import (
    BAD_DISK,
    EXPIRED,
    FAILED_DECODE,
    FAILED_WORK,
    PLANNED,
    PageCopies,
)
from coldpage.storage.escalation import Escalation, Losable
from coldpage.storage.preparing import Preparing
from coldpage.storage.resizing import Resizing
from coldpage.storage.unwritten import log_unwritten, num_committed_outside
from coldpage.storage.usage import UsageSamples
from coldpage.types import HOT_LEVEL, CacheLevel, Int32Array, Int64Array, Priority

__all__ = ["Storage"]

_logger = logging.getLogger(__name__)

# How long a caller that must wait for a transfer sleeps at most between looking.
_DRAIN_TIMEOUT_S = 0.05


class Storage:
    """All pages of one manager on all its levels. Owned by one thread."""

    def __init__(
        self,
        device: Device,
        levels: Sequence[LevelPools],
        table: PageTable,
        moves: CodecMoves,
        disk_moves: DiskMoves | None,
        events: StorageEvents,
        free_watermark: float = 0.0,
        is_write_behind: bool = False,
        copy_level: CacheLevel | None = None,
    ) -> None:
        """``is_write_behind`` is for the first disk level; ``copy_level`` is the cold level in
        memory, if any, to which pages are copied when their sequence is suspended.
        """
        self.table = table
        self.levels = levels
        self.moves = moves
        self.events = events
        self.num_fills = 0  # calls of ``fill``
        self.copies = PageCopies(levels, table, events)
        self.usage = UsageSamples(levels)
        self._device = device
        self._disk_moves = disk_moves
        self._free_watermark = free_watermark
        self._hot = levels[HOT_LEVEL]
        self._escalation = Escalation(
            self.copies,
            moves,
            disk_moves,
            PriorityLru(),
            self._drain,
            is_write_behind=is_write_behind,
        )
        self._resizing = Resizing(
            self.copies, moves, self._escalation, device.io, self.finish_transfers
        )
        self._num_locked: Int64Array = np.zeros(len(self._hot.groups), np.int64)
        self._backups = [
            Backup(table, tuple(levels), disk, self._escalation.back_up)
            for disk in levels
            if disk.is_disk
        ]
        # Writing behind is for the first of them.
        self._behind = self._backups[0] if is_write_behind and self._backups else None
        self._copy_level = None if copy_level is None else levels[copy_level]
        ring = None if disk_moves is None else disk_moves.end.ring
        self._preparing = Preparing(levels, ring)
        self._escalation.is_preparing = self._preparing.is_going_on

    # ------------------------------------------------------------------ locking

    def lock(self, pages: Int32Array, max_utilization: float) -> bool:
        """Lock the pages and start bringing them to the hot level; False, changing no lock, when
        they do not fit: locked pages would fill more than ``max_utilization`` of a hot pool group.
        """
        table = self.table
        counts = self._count_groups(pages[table.num_locks[pages] == 0])
        for group, locked, count in zip(
            self._hot.groups, self._num_locked.tolist(), counts.tolist(), strict=True
        ):
            if count and locked + count > group.max_locked_slots(max_utilization):
                return False
        table.num_locks[pages] += 1
        self._num_locked += counts
        before = table.last_use[pages].copy()
        table.touch(pages)
        if not self._bring_hot(pages):
            self.unlock(pages)
            # As if nobody had asked: they are evicted in the order they were.
            table.last_use[pages] = before
            return False
        return True

    def come_after(self, pages: Int32Array, stream: Stream | None) -> None:
        """What becomes of hot pages comes after the work enqueued on ``stream`` so far. When work
        there has failed nobody knows what it wrote: pages that are nowhere else are missing then.
        """
        if stream is None or not pages.size:
            return
        hot = pages[(self.table.present[pages] & HOT_BIT) != 0]
        try:
            self.moves.order_after(hot, stream)
        except DeviceError as error:
            self._distrust(hot, error)

    def unlock(self, pages: Int32Array) -> None:
        """Let the pages move again."""
        table = self.table
        table.num_locks[pages] -= 1
        unlocked = pages[table.num_locks[pages] == 0]
        self._num_locked -= self._count_groups(unlocked)
        table.touch(pages)
        # A blank page waiting to be recomputed is not worth moving.
        self.copies.drop(self._hot, unlocked[table.is_missing[unlocked]])
        if self._behind is not None:
            self._behind.note(unlocked)

    def copy_behind(self, pages: Int32Array) -> None:
        """Start copying pages that a suspended sequence has let go of to a cold level in memory, as
        far as that costs nothing, so that their hot slots can be had at once. Never fails.
        """
        if self._copy_level is None or not pages.size:
            return
        try:
            self._escalation.copy_ahead(pages, self._copy_level)
        except DeviceError as error:
            # Whoever needs the device next is told; the pages are good where they are.
            _logger.error("suspended pages could not be copied: %s", error)
            self.copies.release_unused(self._copy_level, pages)

    def _distrust(self, pages: Int32Array, error: DeviceError) -> None:
        """Work that failed may have torn hot pages. Those that have another copy were whole before,
        and have only been read since.
        """
        table = self.table
        torn = pages[(table.present[pages] == HOT_BIT) & ~table.is_missing[pages]]
        if torn.size and not self.events.totals["torn_pages"]:
            _logger.error("pages whose work failed on the device are recomputed: %s", error)
        self.events.totals["torn_pages"] += int(torn.size)
        self.events.totals["lost_held_pages"] += int(torn.size)
        self.events.lost(torn, FAILED_WORK)
        table.is_missing[torn] = True
        # Nothing runs on that stream any more, and its events say so by failing.
        self.moves.forget_events(pages)

    def _count_groups(self, pages: Int32Array) -> Int64Array:
        return self._hot.count(self.table.life_cycle[pages])

    def _bring_hot(self, pages: Int32Array) -> bool:
        """Give every page a hot slot and start filling it; False when there is no room or a move is
        rejected.
        """
        table = self.table
        cold = pages[((table.present[pages] | table.reserved[pages]) & HOT_BIT) == 0]
        if not cold.size:
            return True
        for group, count in zip(self._hot.groups, self._count_groups(cold).tolist(), strict=True):
            if not self._escalation.make_hot_room(group, count):
                return False
        self.copies.allocate(self._hot, cold)
        table.reserved[cold] |= HOT_BIT
        return self._start_onboarding(cold)

    def _start_onboarding(self, pages: Int32Array) -> bool:
        """Fill reserved hot slots from the nearest copy; a page still being written is filled when
        that ends.
        """
        table = self.table
        self._make_blank(pages[table.is_missing[pages]])
        pages = pages[~table.is_missing[pages] & (table.busy[pages] == 0) | self._in_memory(pages)]
        accepted = True
        for level in self.levels[1:]:
            here = (table.present[pages] & level.bit) != 0
            members, pages = pages[here], pages[~here]
            if not members.size:
                continue
            if not level.may_read:
                accepted &= self._onboard_without(level, members, BAD_DISK)
                continue
            if level.is_disk:
                assert self._disk_moves is not None
                self._disk_moves.reads.submit(members, level, self._hot)
                continue
            table.reserved[members] &= ~HOT_BIT
            refused, unreadable = self.moves.onboard(members, level)
            table.reserved[unreadable] |= HOT_BIT
            accepted &= self._onboard_without(level, unreadable, FAILED_DECODE) and not refused.size
        return accepted

    def _onboard_without(self, level: LevelPools, pages: Int32Array, cause: str) -> bool:
        """Fill reserved hot slots from other levels than this one, whose copies are of no use; a
        page that is on its way to another level is filled when it is there.
        """
        if not pages.size:
            return True
        table = self.table
        self.copies.drop(level, pages)
        is_gone = (table.present[pages] | (table.reserved[pages] & ~HOT_BIT)) == 0
        self.copies.lose(pages[is_gone], cause)
        pages = pages[(table.reserved[pages] & HOT_BIT) != 0]  # others were buried
        return self._start_onboarding(self._wanted_hot(pages))

    def _wanted_hot(self, pages: Int32Array) -> Int32Array:
        """Those of pages that are to fill their hot slots; the others give theirs back."""
        table = self.table
        is_unwanted = table.is_missing[pages] & (table.num_locks[pages] == 0)
        self.copies.free_slots(self._hot, pages[is_unwanted])
        table.reserved[pages[is_unwanted]] &= ~HOT_BIT
        wanted: Int32Array = pages[~is_unwanted]
        return wanted

    def _make_blank(self, pages: Int32Array) -> None:
        """Missing pages have their hot slots, with nothing in them."""
        self.table.present[pages] |= HOT_BIT
        self.table.reserved[pages] &= ~HOT_BIT

    def _in_memory(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """Which pages have a copy on a cold level in memory."""
        bits = np.uint8(sum(1 << lv.level for lv in self.levels[1:] if not lv.is_disk))
        in_memory: npt.NDArray[np.bool_] = (self.table.present[pages] & bits) != 0
        return in_memory

    def are_hot(self, pages: Int32Array) -> bool:
        """Whether every locked page is hot. Starts again what a rejected submission left behind."""
        table = self.table
        is_hot = (table.present[pages] & HOT_BIT) != 0
        if bool(is_hot.all()):
            return True
        self._bring_hot(pages[~is_hot])
        return False

    # ------------------------------------------------------------------ creating and writing

    def create(
        self, life_cycles: npt.NDArray[np.int16], ordinals: Int32Array, priority: Priority
    ) -> Int32Array | None:
        """New blank hot pages, locked once; None when the hot level has no room for all of them."""
        counts = self._hot.count(life_cycles)
        for group, locked, count in zip(
            self._hot.groups, self._num_locked.tolist(), counts.tolist(), strict=True
        ):
            if not count:
                continue
            # Locked pages whose onboarding was rejected have no slot now and will need one.
            unlocked = group.slots.num_slots - locked
            if count > unlocked or not self._escalation.make_hot_room(group, count):
                return None
        pages = self.table.create(life_cycles, ordinals, priority)
        self.copies.allocate(self._hot, pages)
        self.table.present[pages] |= HOT_BIT
        self.table.num_locks[pages] = 1
        self._num_locked += counts
        return pages

    def make_writable(self, pages: Int32Array, stream: Stream | None) -> Int32Array | None:
        """Pages to write to instead of ``pages``, which the caller has locked, in the same order.

        A page that somebody else may read (another holder, the prefix tree) is copied, and the
        caller's reference and lock move to the copy; any other loses its colder copies, which will
        be out of date. ``stream`` is where the caller's work on the pages was enqueued. None,
        changing nothing, when there is no room or a page is still on its way to the hot level.
        """
        table = self.table
        if not bool((table.present[pages] & HOT_BIT).all()):
            return None
        is_shared = (table.num_refs[pages] > 1) | (table.node[pages] != 0)
        shared, own = pages[is_shared], pages[~is_shared]
        if shared.size:
            fresh = self.create(
                table.life_cycle[shared],
                table.ordinal[shared],
                Priority(int(table.priority[shared[0]])),
            )
            if fresh is None:
                return None
            if stream is not None:
                self.moves.order_after(shared, stream)
            try:
                self.moves.copy_hot(shared, fresh)
            except SubmissionError:
                self.release(fresh, None, is_locked=True)
                return None
            table.is_missing[fresh] = table.is_missing[shared]
            self.release(shared, None, is_locked=True)
            pages = pages.copy()
            pages[is_shared] = fresh
        table.version[own] += 1
        table.failed_encodes[own] = 0
        self.copies.drop_cold(own)
        return pages

    def fill(self, pages: Int32Array, stream: Stream | None) -> None:
        """Missing pages have been written again, by work enqueued on ``stream``."""
        self.table.is_missing[pages] = False
        self.table.failed_encodes[pages] = 0
        self.num_fills += 1
        if stream is not None:
            self.moves.order_after(pages, stream)

    def adopt(
        self, level: LevelPools, group: PoolGroup, pages: Int32Array, slots: Int32Array
    ) -> None:
        """New pages, which nobody refers to yet, have copies in slots where they were found."""
        table = self.table
        table.num_refs[pages] = 0
        table.present[pages] |= level.bit
        table.slot[level.level, pages] = slots
        group.slots.adopt(slots, pages)

    def name(self, pages: Int32Array) -> None:
        """The pages, which active sequences hold, belong to committed blocks from now on. Copies on
        disk from before bear no name, so no restart would find them: they are given up, and so is
        what is on its way there. A page whose only copy is there stays as it is.
        """
        table = self.table
        pages = pages[(table.present[pages] & HOT_BIT) != 0]
        for level in self.levels:
            if level.is_disk:
                table.version[pages[(table.reserved[pages] & level.bit) != 0]] += 1
                self.copies.drop(level, pages)

    # ------------------------------------------------------------------ holding

    def hold(self, pages: Int32Array, priority: Priority) -> None:
        """One more sequence refers to the pages: they have the highest priority of any so far."""
        table = self.table
        table.num_refs[pages] += 1
        table.priority[pages] = np.maximum(table.priority[pages], priority)
        table.is_admitted[pages] = True

    def release(self, pages: Int32Array, stream: Stream | None, *, is_locked: bool) -> None:
        """One sequence less refers to the pages; what nobody refers to is freed, committed pages
        stay droppable unless their drop was planned.
        """
        if not pages.size:
            return
        if is_locked:
            self.come_after(pages, stream)
            self.unlock(pages)
        table = self.table
        table.num_refs[pages] -= 1
        unheld = pages[table.num_refs[pages] == 0]
        self.copies.bury(unheld[table.node[unheld] == 0])
        committed = unheld[table.node[unheld] != 0]
        is_planned = table.is_drop_planned[committed]
        self.copies.forget(committed[table.is_missing[committed] & ~is_planned])
        self._drop_planned(committed[is_planned])

    def plan_drop(self, pages: Int32Array) -> None:
        """Drop the committed pages as soon as no sequence holds them, instead of keeping them for
        reuse.
        """
        self.table.is_drop_planned[pages[self.table.node[pages] != 0]] = True

    def _drop_planned(self, pages: Int32Array) -> None:
        if pages.size:
            self.events.totals["planned_drops"] += int(pages.size)
            # Of what had been lost before, observers know.
            self.events.lost(pages[~self.table.is_missing[pages]], PLANNED)
            self.copies.forget(pages)

    def prefetch(self, pages: Int32Array, level: LevelPools) -> None:
        """Start pulling pages up to the level, as far as there is room that costs nothing."""
        table = self.table
        # What is asked of a disk that is off would be lost, and nobody needs it yet.
        off = np.uint8(sum(int(lv.bit) for lv in self.levels if lv.is_off))
        pages = pages[(table.present[pages] & ~off) != 0]
        hotter_or_equal = np.uint8((int(level.bit) << 1) - 1)
        wanted = pages[
            ((table.present[pages] & hotter_or_equal) == 0)
            & (table.reserved[pages] == 0)
            & (table.busy[pages] == 0)
            & ~table.is_missing[pages]
            & table.can_encode(pages, level.bit)
        ]
        if level is self._hot:
            self._prefetch_hot(wanted)
        elif not level.is_disk:
            for source in self.levels[level.level + 1 :]:
                here = wanted[(table.present[wanted] & source.bit) != 0]
                wanted = np.setdiff1d(wanted, here, assume_unique=True)
                self._prefetch_from(here, source, level)

    def _prefetch_hot(self, pages: Int32Array) -> None:
        for group, members in self._hot.split(self.table.life_cycle[pages], pages):
            num_kept = int(self._free_watermark * group.slots.num_slots)
            some = members[: max(0, group.slots.num_free - num_kept)]
            self.table.touch(some)
            self.copies.allocate(self._hot, some)
            self.table.reserved[some] |= HOT_BIT
            self._start_onboarding(some)

    def _prefetch_from(self, pages: Int32Array, source: LevelPools, level: LevelPools) -> None:
        table = self.table
        table.touch(pages)
        for group, members in level.split(table.life_cycle[pages], pages):
            room = self._escalation.make_cold_room(level, group, members.size, Losable.NOTHING)
            some = members[:room]
            # Making room may have used a page's other copies; only what is still there can be
            # moved.
            some = some[(table.present[some] & source.bit) != 0]
            self.copies.allocate(level, some)
            if not source.is_disk:
                self.moves.copy_cold(some, source, level)
                continue
            assert self._disk_moves is not None
            table.reserved[some] |= level.bit
            self._disk_moves.reads.submit(some, source, level)

    # ------------------------------------------------------------------ time passes

    def poll(self) -> None:
        """Advance every transfer, start the background spill and keep some hot slots free. Never
        blocks on I/O.
        """
        self._preparing.advance()
        self.advance()
        self._escalation.spill()
        if self._free_watermark:
            self._escalation.keep_free(self._free_watermark)
        if self._behind is not None:
            self._advance_backup(self._behind)
        for level in self.levels:
            if level.is_disk:
                level.disk.poll()
                self._expire(level)
        self.usage.sample()

    def _expire(self, level: LevelPools) -> None:
        """Once a while drop what nobody has used for the time that the disk tier allows."""
        limit_ns = level.disk.expiry_ns()
        if limit_ns is None:
            return
        table = self.table
        is_old = (table.last_use_ns < limit_ns) & (table.node != 0) & (table.num_refs == 0)
        is_old &= table.priority < RETAINED_PRIORITY
        pages = np.flatnonzero(is_old & ((table.present & level.bit) != 0)).astype(np.int32)
        if pages.size:
            self.events.totals["expired_pages"] += int(pages.size)
            self.events.lost(pages, EXPIRED)
            self.copies.forget(pages)

    def _advance_backup(self, backup: Backup) -> None:
        assert self._disk_moves is not None
        backup.advance(MAX_BACKUP_PAGES - self._disk_moves.writes.num_pages_in_flight)

    def advance(self) -> None:
        """Advance every transfer in flight. Never blocks on I/O."""
        if self._disk_moves is not None and self._disk_moves.num_in_flight:
            self._settle(self._disk_moves.advance())

    def _drain(self) -> None:
        self._device.wait_for_progress(_DRAIN_TIMEOUT_S)
        self._preparing.advance()
        self.advance()

    def _settle(self, settled: Settlement) -> None:
        """Follow up on ended transfers: losses, pages nobody wants any more, pages still waiting
        for a copy.
        """
        if not settled.pages:
            return
        table = self.table
        pages = np.unique(np.concatenate(settled.pages))
        dead = pages[(table.num_refs[pages] == 0) & (table.node[pages] == 0)]
        causes = (settled.lost, BAD_DISK), (settled.unreadable, FAILED_DECODE)
        for some, cause in (it for it in causes if it[0]):
            lost = np.unique(np.concatenate(some))
            is_gone = (table.present[lost] == 0) & ((table.reserved[lost] & ~HOT_BIT) == 0)
            is_gone &= ~table.is_missing[lost]
            lost = lost[is_gone & ((table.num_refs[lost] > 0) | (table.node[lost] != 0))]
            self.copies.lose(lost, cause)
        self.copies.bury(dead)
        is_waiting = ((table.reserved[pages] & HOT_BIT) != 0) & (table.busy[pages] == 0)
        is_waiting &= (table.reserved[pages] & ~HOT_BIT) == 0
        self._start_onboarding(self._wanted_hot(pages[is_waiting]))

    def flush(self, budget_s: float) -> int:
        """Write committed pages that are only in memory to disk, most valuable first, until all are
        there or the time is over. Blocks. Returns how many are left, or not known to be durable.
        """
        deadline_s = time.monotonic() + budget_s
        for backup in self._backups:  # a colder disk gets what the one before has no room for
            backup.note_all(self._escalation.policy)
            while time.monotonic() < deadline_s:
                self._advance_backup(backup)
                # Reads may hang: they are not waited for.
                if not self._num_writes_in_flight and not backup.num_waiting:
                    break
                self._drain()
        durable = np.uint8(0)
        for level in self.levels:
            if level.is_disk and level.disk.sync():
                durable |= level.bit
        return num_committed_outside(self.table, durable)

    @property
    def _num_writes_in_flight(self) -> int:
        return 0 if self._disk_moves is None else self._disk_moves.writes.num_in_flight

    @property
    def is_in_motion(self) -> bool:
        """Whether waiting may help: for transfers to and from disk, or for memory that the device
        prepares.
        """
        return self.num_in_flight > 0 or self._preparing.is_going_on()

    @property
    def num_in_flight(self) -> int:
        """Transfers to and from disk that have not been settled."""
        return 0 if self._disk_moves is None else self._disk_moves.num_in_flight

    def finish_transfers(self) -> None:
        """Block until nothing is in flight."""
        while self._disk_moves is not None and self._disk_moves.num_in_flight:
            self._drain()
        self.moves.synchronize()

    def resize_level(self, level: CacheLevel, num_slots: Sequence[int]) -> None:
        """Give the level's pool groups that many slots; see ``Resizing``. Blocks."""
        try:
            self._resizing.resize(self.levels[level], num_slots)
        finally:
            self._preparing.begin()
        self.usage.forget(level)

    def defragment(self, level: CacheLevel) -> int:
        """Move the level's pages to its lowest slots; see ``Resizing``. Blocks."""
        return self._resizing.defragment(self.levels[level])

    def close(self) -> None:
        """Block until no transfer is in flight and nobody's work on the pages is."""
        self.finish_transfers()
        for event in self.moves.ready.all_outstanding():
            event.synchronize()
        log_unwritten(self.table, self.levels)

    # ------------------------------------------------------------------ checking

    def check_integrity(self) -> None:
        """Assert that columns and slots tell the same story on every level."""
        table = self.table
        table.check_integrity()
        locked = np.flatnonzero(table.num_locks).astype(np.int32)
        assert bool((self._count_groups(locked) == self._num_locked).all()), "lock counts are off"
        for level in self.levels:
            self._check_level(level)
        both = table.present & table.reserved
        assert not both.any(), "a copy is both valid and being written"
        live = np.flatnonzero((table.num_refs > 0) | (table.node != 0))
        in_flight = table.present[live] | table.reserved[live] | table.busy[live]
        assert bool((in_flight != 0)[~table.is_missing[live]].all()), (
            "a page has vanished unnoticed"
        )
        assert not (table.num_locks > table.num_refs).any(), "more locks than references"

    def _check_level(self, level: LevelPools) -> None:
        table, num_owned = self.table, 0
        for group in level.groups:
            group.slots.check_integrity()
            slots = group.slots.owned()
            owners = group.slots.page[slots]
            num_owned += slots.size
            assert bool((table.slot[level.level, owners] == slots).all()), "slot and owner disagree"
            # What is given up while a transfer uses it may be a copy in the form of another class.
            kept = owners[(table.present[owners] & level.bit) != 0]
            for own, _ in level.split(table.life_cycle[kept], kept):
                assert own is group, "a page in the wrong pool group"
            bits = table.present[owners] | table.reserved[owners] | table.busy[owners]
            assert bool(((bits & level.bit) != 0).all()), f"a {level.name} slot leaked"
        used = (table.present | table.reserved | table.busy) & level.bit
        assert int(np.count_nonzero(used)) == num_owned, f"a page has no {level.name} slot"
