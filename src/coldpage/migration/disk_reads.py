"""Reads from disk levels: through the staging ring, or straight to a cold level in host memory
where both have the same codec. A blob is decoded only after its checksum was verified.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.migration.codec_moves import Rejection
from coldpage.migration.disk_transfers import DiskEnd, Settlement, Transfer
from coldpage.pools import LevelPools
from coldpage.staging import StagingBuffer
from coldpage.types import HOT_LEVEL, Int32Array

__all__ = ["DiskReads"]

# A decode that the device rejects is tried again this often.
_MAX_ATTEMPTS: Final = 3


class DiskReads:
    """All reads in flight, and those that wait for staging."""

    def __init__(self, end: DiskEnd) -> None:
        self._end = end
        self._table = end.table
        self._in_flight: list[Transfer] = []
        # Pages of one batch each, with both ends.
        self._queued: deque[tuple[Int32Array, LevelPools, LevelPools]] = deque()
        self._last_progress_s = 0.0  # when a read ended, or the first was queued

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet settled, queued ones included."""
        return len(self._in_flight) + len(self._queued)

    def submit(self, pages: Int32Array, disk: LevelPools, memory: LevelPools) -> None:
        """Start reading the pages into slots that they have reserved on ``memory``. What needs
        staging is queued until there is some.
        """
        self._table.busy[pages] |= disk.bit
        if self._end.is_direct(disk, memory):
            for batch in self._end.moves.cold_batches(pages, disk, memory):
                self._start(self._end.direct(batch, disk, memory))
            return
        if not self._queued:
            self._last_progress_s = self._end.clock()
        for batch in self._end.staged_batches(pages, disk, memory):
            most = self._end.max_staged_pages(batch, disk)
            for start in range(0, batch.size, most):
                self._queued.append((batch[start : start + most], disk, memory))
        self._pump()

    def _pump(self) -> None:
        """Start queued reads, first come first served, while staging lasts."""
        while self._queued:
            pages, disk, memory = self._queued[0]
            stride = self._end.moves.cold_page_bytes(disk.codec, pages)
            # Reads leave half of the ring to evictions, which must never wait for a slow read.
            leased = sum(t.lease.num_bytes for t in self._in_flight if t.lease is not None)
            num_allowed = (self._end.ring.num_bytes // 2 - leased) // stride
            if leased and num_allowed <= 0:
                return
            num_wanted = min(pages.size, max(num_allowed, 1))
            lease = self._end.lease(pages, disk, num_wanted, for_stream=False)
            if lease is None:
                return
            self._queued.popleft()
            num_taken = lease.num_bytes // stride
            if num_taken < pages.size:
                self._queued.appendleft((pages[num_taken:], disk, memory))
                pages = pages[:num_taken]
            self._start(self._end.staged(pages, disk, memory, lease))

    def _start(self, transfer: Transfer) -> None:
        self._in_flight.append(transfer)
        self._read(transfer)

    def _read(self, transfer: Transfer) -> None:
        if transfer.is_ready():
            jobs = transfer.group.disk.read_jobs(transfer.disk_slots, transfer.addresses)
            transfer.batch = self._end.io.submit(jobs)

    # ------------------------------------------------------------------ advancing

    def advance(self, settled: Settlement) -> None:
        """Submit I/O whose memory is ready and finish I/O that has ended. Never blocks."""
        num_before = len(self._in_flight)
        self._in_flight = [t for t in self._in_flight if not self._advance(t, settled)]
        if len(self._in_flight) < num_before:
            self._last_progress_s = self._end.clock()
        self._pump()
        self._expire_queued(settled)

    def _advance(self, transfer: Transfer, settled: Settlement) -> bool:
        """Returns whether the transfer is over."""
        if transfer.batch is None:
            self._read(transfer)
            return False
        if not transfer.batch.is_done():
            if self._end.clock() > transfer.deadline_s and not transfer.is_expired:
                self._expire(transfer, settled)
            return False
        if transfer.is_expired:
            self._end_late(transfer)
            return True
        ok = transfer.batch.ok
        is_damaged = transfer.group.disk.is_damaged(transfer.disk_slots)
        reason = transfer.group.disk.last_failure
        transfer.disk.disk.note_reads(ok[ok | ~is_damaged], reason)
        arrived, is_good = ok.copy(), ok.copy()
        if transfer.lease is not None:
            rejection = self._unstage(transfer, transfer.lease, ok) if ok.any() else None
            if rejection is Rejection.REFUSED and self._may_try_again(transfer):
                transfer.num_attempts += 1
                return False
            if rejection is not None:
                arrived[:] = False
            if rejection is Rejection.UNREADABLE:
                is_good[:] = False  # else nothing is wrong with the blobs, which stay on disk
            transfer.lease.release()
        self._finish_memory(transfer, is_good, arrived)
        self._finish_disk(transfer, ok, is_good, settled)
        self._end.count_arrived(transfer, arrived, is_write=False)
        return True

    def _may_try_again(self, transfer: Transfer) -> bool:
        can_encode = self._table.can_encode(transfer.pages, transfer.memory.bit)
        return transfer.num_attempts < _MAX_ATTEMPTS and bool(can_encode.all())

    def _expire(self, transfer: Transfer, settled: Settlement) -> None:
        """The read has taken too long: its pages are misses from now on. What the I/O may still
        touch stays out of use until it has ended.
        """
        table, pages, disk, memory = self._table, transfer.pages, transfer.disk, transfer.memory
        transfer.is_expired = True
        disk.disk.note_reads(np.zeros(pages.size, np.bool_), self._end.late_sentence(disk))
        self._end.count_late(disk, pages)
        was_present = (table.present[pages] & disk.bit) != 0
        table.present[pages] &= ~disk.bit
        table.busy[pages] &= ~disk.bit
        transfer.group.slots.quarantine(transfer.disk_slots)
        if memory.level != HOT_LEVEL:
            group = memory.group_of(table.life_cycle[pages[0]])
            transfer.memory_slots = table.slot[memory.level, pages].copy()
            group.slots.quarantine(transfer.memory_slots)
            transfer.memory_group = group
            table.reserved[pages] &= ~memory.bit
        settled.lost.append(pages[was_present & (table.present[pages] == 0)])
        settled.pages.append(pages)

    def _expire_queued(self, settled: Settlement) -> None:
        """Reads that hang hold the staging that those in the queue wait for: they are misses too.
        Nothing touches their slots.
        """
        ring = self._end.ring
        if ring.num_ready_bytes < ring.num_bytes:  # it is not the disk that they wait for
            self._last_progress_s = self._end.clock()
        table, waited_s = self._table, self._end.clock() - self._last_progress_s
        while self._queued and waited_s > self._queued[0][1].disk.read_deadline_s:
            pages, disk, memory = self._queued.popleft()
            disk.disk.note_reads(np.zeros(pages.size, np.bool_), self._end.late_sentence(disk))
            self._end.count_late(disk, pages)
            was_present = (table.present[pages] & disk.bit) != 0
            table.present[pages] &= ~disk.bit
            group = disk.group_of(table.life_cycle[pages[0]])
            self._end.release_sources(pages, disk, group)
            if memory.level != HOT_LEVEL:
                table.reserved[pages] &= ~memory.bit
                for group, members in memory.split(table.life_cycle[pages], pages):
                    group.slots.free(table.slot[memory.level, members])
            settled.lost.append(pages[was_present & (table.present[pages] == 0)])
            settled.pages.append(pages)

    @staticmethod
    def _end_late(transfer: Transfer) -> None:
        """The I/O of an expired read has ended at last."""
        transfer.group.slots.release_quarantined(transfer.disk_slots)
        if transfer.lease is not None:
            transfer.lease.release()
        if transfer.memory_group is not None:
            transfer.memory_group.slots.release_quarantined(transfer.memory_slots)

    def _unstage(
        self, transfer: Transfer, lease: StagingBuffer, ok: npt.NDArray[np.bool_]
    ) -> Rejection | None:
        """Enqueue the way of the verified pages out of staging."""
        slices = np.flatnonzero(ok).astype(np.int32)
        good, disk, moves = transfer.pages[ok], transfer.disk, self._end.moves
        if transfer.memory.level == HOT_LEVEL:
            return moves.decode_staged(good, disk, slices, lease)
        return moves.staging_to_cold(good, disk, slices, lease, transfer.memory)

    def _finish_memory(
        self, transfer: Transfer, is_good: npt.NDArray[np.bool_], arrived: npt.NDArray[np.bool_]
    ) -> None:
        """The destination's side. A hot slot whose page is not good on disk stays reserved: the
        page may have another copy.
        """
        table, memory, pages = self._table, transfer.memory, transfer.pages
        current = self._end.is_current(transfer)
        table.present[pages[arrived & current]] |= memory.bit
        done = is_good if memory.level == HOT_LEVEL else np.ones_like(is_good)
        table.reserved[pages[done]] &= ~memory.bit
        empty = pages[done & ~(arrived & current)]
        for group, members in memory.split(table.life_cycle[empty], empty):
            group.slots.free(table.slot[memory.level, members])

    def _finish_disk(
        self,
        transfer: Transfer,
        ok: npt.NDArray[np.bool_],
        is_good: npt.NDArray[np.bool_],
        settled: Settlement,
    ) -> None:
        """The disk's side: a slot whose bytes did not verify is never used again; one that could
        not be read, or not be decoded, may be written to, later than all others.
        """
        table, disk, pages = self._table, transfer.disk, transfer.pages
        slots = transfer.group.slots
        was_present = (table.present[pages] & disk.bit) != 0
        table.present[pages[~is_good]] &= ~disk.bit
        is_damaged = ~ok & transfer.group.disk.is_damaged(transfer.disk_slots)
        slots.quarantine(transfer.disk_slots[is_damaged])
        slots.free_last(transfer.disk_slots[~is_good & ~is_damaged])
        table.busy[pages[~is_good]] &= ~disk.bit
        self._end.count_failures(transfer, ok, "read_misses")
        is_lost = ~is_good & was_present & (table.present[pages] == 0)
        settled.lost.append(pages[is_lost & ~ok])
        settled.unreadable.append(pages[is_lost & ok])
        self._end.release_sources(pages[is_good], disk, transfer.group)
        settled.pages.append(pages)
