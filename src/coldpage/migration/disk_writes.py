"""Writes to disk levels: through the staging ring, or straight from a cold level in host memory
where both have the same codec.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Event
from coldpage.migration.disk_transfers import DiskEnd, Settlement, Transfer
from coldpage.pools import LevelPools
from coldpage.staging import StagingBuffer
from coldpage.types import HOT_LEVEL, Int32Array

__all__ = ["DiskWrites"]

# A write that fails is tried again in another slot this often before its page is given up.
_MAX_ATTEMPTS: Final = 3


class DiskWrites:
    """All writes in flight."""

    def __init__(self, end: DiskEnd) -> None:
        self._end = end
        self._table = end.table
        self._in_flight: list[Transfer] = []

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet settled."""
        return len(self._in_flight)

    @property
    def num_pages_in_flight(self) -> int:
        """Pages whose write has not ended."""
        return sum(t.pages.size for t in self._in_flight)

    def submit(self, pages: Int32Array, memory: LevelPools, disk: LevelPools) -> Int32Array:
        """Start writing the pages' copies on ``memory`` to slots that they have on ``disk``
        already.

        From device memory or another codec's form the bytes leave their slots when they are in
        staging, so those may be given to another page at once. Returns the pages that were not
        taken (no staging left, or rejected): they are as before, slots included.
        """
        if self._end.is_direct(disk, memory):
            for batch in self._end.moves.cold_batches(pages, memory, disk):
                self._table.busy[batch] |= memory.bit
                self._start(self._end.direct(batch, disk, memory))
            return pages[:0]
        refused: list[Int32Array] = []
        for batch in self._end.staged_batches(pages, disk, memory):
            stride = self._end.moves.cold_page_bytes(disk.codec, batch)
            most = self._end.max_staged_pages(batch, disk)
            rest = batch
            while rest.size:
                lease = self._end.lease(rest, disk, min(most, rest.size), for_stream=True)
                if lease is None:
                    break
                chunk, rest = np.split(rest, [lease.num_bytes // stride])
                if not self._stage(chunk, memory, disk, lease):
                    refused.append(chunk)
                self._begin()
            refused.append(rest)
        return np.concatenate(refused) if refused else pages

    def _stage(
        self, pages: Int32Array, memory: LevelPools, disk: LevelPools, lease: StagingBuffer
    ) -> bool:
        """Returns whether the pages were taken; the lease is over if not."""
        event = self._fill(pages, memory, disk, lease)
        if event is None:
            lease.release()
            return False
        transfer = self._end.staged(pages, disk, memory, lease)
        transfer.after = [event]
        self._start(transfer)
        return True

    def _fill(
        self, pages: Int32Array, memory: LevelPools, disk: LevelPools, lease: StagingBuffer
    ) -> Event | None:
        moves = self._end.moves
        if memory.level == HOT_LEVEL:
            return moves.encode_staged(pages, disk, lease)
        return moves.cold_to_staging(pages, memory, disk, lease)

    def _start(self, transfer: Transfer) -> None:
        self._end.name(transfer)
        self._table.reserved[transfer.pages] |= transfer.disk.bit
        self._in_flight.append(transfer)
        self._write(transfer)

    def _begin(self) -> None:
        """Submit the I/O of what was encoded while the next was being staged."""
        for transfer in self._in_flight:
            if transfer.batch is None and not self._write(transfer):
                return  # and neither will what was staged after it be ready

    def _write(self, transfer: Transfer) -> bool:
        """Returns whether the I/O was submitted: the memory was ready."""
        if not transfer.is_ready():
            return False
        jobs = transfer.group.disk.write_jobs(
            transfer.disk_slots, transfer.addresses, transfer.names
        )
        transfer.batch = self._end.io.submit(jobs)
        return True

    # ------------------------------------------------------------------ advancing

    def advance(self, settled: Settlement) -> None:
        """Submit I/O whose memory is ready and finish I/O that has ended. Never blocks."""
        self._in_flight = [t for t in self._in_flight if not self._advance(t, settled)]

    def _advance(self, transfer: Transfer, settled: Settlement) -> bool:
        """Returns whether the transfer is over."""
        if transfer.batch is None:
            self._write(transfer)
            return False
        return transfer.batch.is_done() and self._finish(transfer, transfer.batch.ok, settled)

    def _finish(self, transfer: Transfer, ok: npt.NDArray[np.bool_], settled: Settlement) -> bool:
        table, disk, pages = self._table, transfer.disk, transfer.pages
        slots = transfer.group.slots
        current = self._end.is_current(transfer)
        table.present[pages[ok & current]] |= disk.bit
        table.reserved[pages] &= ~disk.bit
        slots.free(transfer.disk_slots[ok & ~current])
        # Nothing of value is in them; another slot is tried first, and these again later.
        slots.free_last(transfer.disk_slots[~ok])
        self._end.count_failures(transfer, ok, "write_errors")
        transfer.disk.disk.note_writes(ok, transfer.group.disk.last_failure)
        self._end.count_arrived(transfer, ok & current, is_write=True)
        if transfer.lease is None:
            assert transfer.memory_group is not None, "written from its own slots"
            self._end.release_sources(pages, transfer.memory, transfer.memory_group)
            # Nothing but what could not be decoded has given its copy in memory up meanwhile.
            settled.lost.append(pages[(table.present[pages] == 0) & ~table.is_missing[pages]])
            settled.pages.append(pages)
            return True
        # The staged bytes may be the only copy of a page that failed: try another slot.
        failed = np.flatnonzero(~ok & current)
        num_again = 0
        if transfer.num_attempts < _MAX_ATTEMPTS:
            num_again = min(failed.size, slots.num_free)
        again, lost = failed[:num_again], failed[num_again:]
        settled.lost.append(pages[lost])
        settled.pages.append(np.delete(pages, again))
        if num_again == 0:
            # It was written to the file, so it had been encoded.
            transfer.lease.release(is_idle=True)
            return True
        self._try_again(transfer, again)
        return False

    def _try_again(self, transfer: Transfer, kept: npt.NDArray[np.intp]) -> None:
        """Make the transfer a new attempt for some of its pages."""
        table, disk = self._table, transfer.disk
        transfer.pages = transfer.pages[kept]
        transfer.versions = transfer.versions[kept]
        transfer.names = [transfer.names[i] for i in kept.tolist()]
        transfer.addresses = transfer.addresses[kept]
        transfer.disk_slots = transfer.group.slots.allocate(transfer.pages)
        table.slot[disk.level, transfer.pages] = transfer.disk_slots
        table.reserved[transfer.pages] |= disk.bit
        transfer.batch = None
        transfer.num_attempts += 1
