"""Moves to and from disk levels: transfers in flight, advanced by the owner's thread.

A transfer waits for the events of its memory, submits its I/O, and is finished by ``advance`` when
the I/O has ended. So a blob is decoded only after its checksum was verified, and nothing but the
owner's thread touches a page column. While a transfer is in flight its source slot is ``busy`` and
its destination slot ``reserved``.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Completion, IoBatch, IoExecutor
from coldpage.events import Counters
from coldpage.migration.codec_moves import CodecMoves
from coldpage.page import HOT_BIT, PageTable
from coldpage.pools import LevelPools
from coldpage.slots import SlotAllocator
from coldpage.staging import StagingBuffer, StagingRing
from coldpage.types import Int32Array, Int64Array, LifeCycleId

__all__ = ["MAX_STAGED_PAGES", "DiskMoves", "Settlement"]

_logger = logging.getLogger(__name__)

# One staged transfer; small enough that decoding the first overlaps reading the next.
MAX_STAGED_PAGES: Final = 32
# A write that fails is tried again in another slot this often before its page is given up.
_MAX_WRITE_ATTEMPTS: Final = 3
# A decode that the codec rejects is tried again this often.
_MAX_DECODE_ATTEMPTS: Final = 3
_DIRECT_ALIGNMENT: Final = 4096


@dataclass(slots=True)
class _Transfer:
    """Pages of one batching class on their way; ``addresses`` is where their bytes are
    in memory.
    """

    pages: Int32Array
    versions: Int32Array
    representative: LifeCycleId
    disk: LevelPools
    memory: LevelPools  # the hot level when staged, else the level whose slots hold the bytes
    disk_slots: Int32Array
    addresses: Int64Array
    lease: StagingBuffer | None
    after: list[Completion] = field(default_factory=list)
    batch: IoBatch | None = None
    num_attempts: int = 1


@dataclass(slots=True)
class Settlement:
    """What ended since the last call: the pages concerned, and those among them that lost their
    last copy.
    """

    pages: list[Int32Array] = field(default_factory=list)
    lost: list[Int32Array] = field(default_factory=list)


class DiskMoves:
    """All transfers in flight between memory and disk levels."""

    def __init__(
        self,
        io: IoExecutor,
        moves: CodecMoves,
        ring: StagingRing,
        table: PageTable,
        counters: Counters,
    ) -> None:
        self._io = io
        self._moves = moves
        self._ring = ring
        self._table = table
        self._counters = counters
        self._writes: list[_Transfer] = []
        self._reads: list[_Transfer] = []
        self._queued: deque[tuple[Int32Array, LevelPools]] = deque()

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet settled, queued reads included."""
        return len(self._writes) + len(self._reads) + len(self._queued)

    @property
    def num_writes_in_flight(self) -> int:
        """Transfers to disk not yet settled."""
        return len(self._writes)

    @property
    def num_written_pages_in_flight(self) -> int:
        """Pages whose write has not ended."""
        return sum(t.pages.size for t in self._writes)

    # ------------------------------------------------------------------ submitting

    def write_staged(self, pages: Int32Array, disk: LevelPools) -> Int32Array:
        """Hot -> staging -> disk, into slots the pages have on ``disk`` already.

        The bytes leave the hot slots when the encode completes, so those may be given to another
        page at once. Returns the pages that were not taken (no staging left, or rejected): they are
        as before, slots included.
        """
        refused: list[Int32Array] = []
        for representative, batch in self._moves.batches(pages):
            for start in range(0, batch.size, MAX_STAGED_PAGES):
                chunk = batch[start : start + MAX_STAGED_PAGES]
                taken = self._write_chunk(representative, chunk, disk)
                refused.append(chunk[taken:])
        return np.concatenate(refused) if refused else pages

    def _write_chunk(self, representative: LifeCycleId, pages: Int32Array, disk: LevelPools) -> int:
        lease = self._lease(representative, pages.size, for_stream=True)
        if lease is None:
            return 0
        stride = self._moves.cold_page_bytes[representative]
        pages = pages[: lease.num_bytes // stride]
        event = self._moves.encode_staged(representative, pages, lease)
        if event is None:
            lease.release()
            return 0
        transfer = self._staged_transfer(representative, pages, disk, lease)
        transfer.after = [event]
        self._start(transfer, is_write=True)
        return int(pages.size)

    def write_through(self, pages: Int32Array, memory: LevelPools, disk: LevelPools) -> None:
        """Memory level -> disk, straight from the pages' slots there, into slots they have on
        ``disk``.
        """
        for representative, batch in self._moves.batches(pages):
            self._table.busy[batch] |= memory.bit
            self._start(self._transfer(representative, batch, disk, memory), is_write=True)

    def _start(self, transfer: _Transfer, *, is_write: bool) -> None:
        if is_write:
            self._table.reserved[transfer.pages] |= transfer.disk.bit
            self._writes.append(transfer)
        else:
            self._reads.append(transfer)
        self._submit(transfer, is_write=is_write)

    def _transfer(
        self, representative: LifeCycleId, pages: Int32Array, disk: LevelPools, memory: LevelPools
    ) -> _Transfer:
        """A transfer between the pages' slots on ``disk`` and their slots on ``memory``."""
        group = memory.pool_group_of[representative]
        slots = self._table.slot[memory.level, pages]
        transfer = self._staged_transfer(representative, pages, disk)
        transfer.memory = memory
        transfer.addresses = memory.memory[group][0].addresses(slots)
        transfer.after = list(self._moves.ready.outstanding(memory.allocators[group].event[slots]))
        return transfer

    def _staged_transfer(
        self,
        representative: LifeCycleId,
        pages: Int32Array,
        disk: LevelPools,
        lease: StagingBuffer | None = None,
    ) -> _Transfer:
        """A transfer between the pages' slots on ``disk`` and consecutive slices of the lease."""
        stride = self._moves.cold_page_bytes[representative]
        first = 0 if lease is None else lease.address
        return _Transfer(
            pages=pages,
            versions=self._table.version[pages].copy(),
            representative=representative,
            disk=disk,
            memory=self._moves.hot_level,
            disk_slots=self._table.slot[disk.level, pages].copy(),
            addresses=first + np.arange(pages.size, dtype=np.int64) * stride,
            lease=lease,
        )

    def read_staged(self, pages: Int32Array, disk: LevelPools) -> None:
        """Disk -> staging -> hot, into hot slots that the pages have reserved. Queued until staging
        is free.
        """
        self._table.busy[pages] |= disk.bit
        for _, batch in self._moves.batches(pages):
            for start in range(0, batch.size, MAX_STAGED_PAGES):
                self._queued.append((batch[start : start + MAX_STAGED_PAGES], disk))
        self._pump()

    def _pump(self) -> None:
        """Start queued reads, first come first served, while staging lasts."""
        while self._queued:
            pages, disk = self._queued[0]
            ((representative, _),) = self._moves.batches(pages)
            stride = self._moves.cold_page_bytes[representative]
            # Reads leave half of the ring to evictions, which must never wait for a slow read.
            leased = sum(t.lease.num_bytes for t in self._reads if t.lease is not None)
            num_allowed = (self._ring.num_bytes // 2 - leased) // stride
            if leased and num_allowed <= 0:
                return
            num_wanted = min(pages.size, max(num_allowed, 1))
            lease = self._lease(representative, num_wanted, for_stream=False)
            if lease is None:
                return
            self._queued.popleft()
            num_taken = lease.num_bytes // stride
            if num_taken < pages.size:
                self._queued.appendleft((pages[num_taken:], disk))
                pages = pages[:num_taken]
            self._start(self._staged_transfer(representative, pages, disk, lease), is_write=False)

    def read_through(self, pages: Int32Array, disk: LevelPools, memory: LevelPools) -> None:
        """Disk -> memory level, straight into slots that the pages have reserved there."""
        self._table.busy[pages] |= disk.bit
        for representative, batch in self._moves.batches(pages):
            self._start(self._transfer(representative, batch, disk, memory), is_write=False)

    def _lease(
        self, representative: LifeCycleId, num_pages: int, *, for_stream: bool
    ) -> StagingBuffer | None:
        stride = self._moves.cold_page_bytes[representative]
        alignment = min(stride & -stride, _DIRECT_ALIGNMENT)
        stream = self._moves.offload_stream if for_stream else None
        return self._ring.acquire(stride, num_pages * stride, stride, alignment, stream)

    # ------------------------------------------------------------------ advancing

    def advance(self) -> Settlement:
        """Submit I/O whose memory is ready and finish I/O that has ended. Never blocks on I/O."""
        settled = Settlement()
        self._writes = [t for t in self._writes if not self._advance_write(t, settled)]
        self._reads = [t for t in self._reads if not self._advance_read(t, settled)]
        self._pump()
        return settled

    @staticmethod
    def _is_ready(transfer: _Transfer) -> bool:
        while transfer.after and transfer.after[-1].is_done():
            transfer.after.pop()
        return not transfer.after

    def _submit(self, transfer: _Transfer, *, is_write: bool) -> None:
        if self._is_ready(transfer):
            pool = transfer.disk.disk[transfer.disk.pool_group_of[transfer.representative]]
            make_jobs = pool.write_jobs if is_write else pool.read_jobs
            transfer.batch = self._io.submit(make_jobs(transfer.disk_slots, transfer.addresses))

    def _advance_write(self, transfer: _Transfer, settled: Settlement) -> bool:
        """Returns whether the transfer is over."""
        if transfer.batch is None:
            self._submit(transfer, is_write=True)
            return False
        return transfer.batch.is_done() and self._finish_write(transfer, transfer.batch.ok, settled)

    def _finish_write(
        self, transfer: _Transfer, ok: npt.NDArray[np.bool_], settled: Settlement
    ) -> bool:
        table, disk, pages = self._table, transfer.disk, transfer.pages
        allocator = disk.allocators[disk.pool_group_of[transfer.representative]]
        # A page written to since: the bytes on disk are nobody's.
        current = table.version[pages] == transfer.versions
        table.present[pages[ok & current]] |= disk.bit
        table.reserved[pages] &= ~disk.bit
        allocator.free(transfer.disk_slots[ok & ~current])
        # Nothing of value is in them; another slot is tried first, and these again later.
        allocator.free_last(transfer.disk_slots[~ok])
        self._count(transfer, ok, f"{transfer.memory.name}-{disk.name}", "write_errors")
        if transfer.lease is None:
            self._release_sources(transfer, transfer.memory)
            settled.pages.append(pages)
            return True
        # The staged bytes are the only copy of a page that failed: try another slot.
        failed = np.flatnonzero(~ok & current)
        num_again = 0
        if transfer.num_attempts < _MAX_WRITE_ATTEMPTS:
            num_again = min(failed.size, allocator.num_free)
        again, lost = failed[:num_again], failed[num_again:]
        settled.lost.append(pages[lost])
        settled.pages.append(np.delete(pages, again))
        if num_again == 0:
            transfer.lease.release()
            return True
        self._narrow(transfer, again, allocator)
        return False

    def _narrow(
        self, transfer: _Transfer, kept: npt.NDArray[np.intp], allocator: SlotAllocator
    ) -> None:
        """Make the transfer a new attempt for some of its pages."""
        table, disk = self._table, transfer.disk
        transfer.pages = transfer.pages[kept]
        transfer.versions = transfer.versions[kept]
        transfer.addresses = transfer.addresses[kept]
        transfer.disk_slots = allocator.allocate(transfer.pages)
        table.slot[disk.level, transfer.pages] = transfer.disk_slots
        table.reserved[transfer.pages] |= disk.bit
        transfer.batch = None
        transfer.num_attempts += 1

    def _advance_read(self, transfer: _Transfer, settled: Settlement) -> bool:
        """Returns whether the transfer is over."""
        if transfer.batch is None:
            self._submit(transfer, is_write=False)
            return False
        if not transfer.batch.is_done():
            return False
        ok = transfer.batch.ok
        if transfer.lease is not None:
            return self._finish_staged_read(transfer, transfer.lease, ok, settled)
        self._finish_direct_read(transfer, ok, settled)
        return True

    def _finish_staged_read(
        self,
        transfer: _Transfer,
        lease: StagingBuffer,
        ok: npt.NDArray[np.bool_],
        settled: Settlement,
    ) -> bool:
        table, pages = self._table, transfer.pages
        slices = np.flatnonzero(ok).astype(np.int32)
        good = pages[ok]
        if good.size and not self._moves.decode_staged(
            transfer.representative, good, slices, lease
        ):
            if transfer.num_attempts < _MAX_DECODE_ATTEMPTS:
                transfer.num_attempts += 1
                return False
            # Nothing is wrong with the blobs: the pages stay on disk, and may be asked for again.
            self._give_back_hot_slots(transfer.representative, good)
            good = good[:0]
        table.present[good] |= HOT_BIT
        table.reserved[pages[ok]] &= ~HOT_BIT
        self._finish_reading(transfer, ok, settled)
        lease.release()
        return True

    def _give_back_hot_slots(self, representative: LifeCycleId, pages: Int32Array) -> None:
        hot = self._moves.hot_level
        slots = self._table.slot[hot.level, pages]
        hot.allocators[hot.pool_group_of[representative]].free(slots)

    def _finish_direct_read(
        self, transfer: _Transfer, ok: npt.NDArray[np.bool_], settled: Settlement
    ) -> None:
        table, memory, pages = self._table, transfer.memory, transfer.pages
        table.present[pages[ok]] |= memory.bit
        table.reserved[pages] &= ~memory.bit
        group = memory.pool_group_of[transfer.representative]
        memory.allocators[group].free(table.slot[memory.level, pages[~ok]])
        self._finish_reading(transfer, ok, settled)

    def _finish_reading(
        self, transfer: _Transfer, ok: npt.NDArray[np.bool_], settled: Settlement
    ) -> None:
        """The disk side of a read that has ended: a slot whose bytes did not verify is never read
        again.
        """
        table, disk, pages = self._table, transfer.disk, transfer.pages
        bad = pages[~ok]
        was_present = (table.present[bad] & disk.bit) != 0
        table.present[bad] &= ~disk.bit
        allocator = disk.allocators[disk.pool_group_of[transfer.representative]]
        allocator.quarantine(transfer.disk_slots[~ok])
        table.busy[bad] &= ~disk.bit
        self._count(transfer, ok, f"{disk.name}-{transfer.memory.name}", "read_misses")
        settled.lost.append(bad[was_present & (table.present[bad] == 0)])
        transfer.pages = pages[ok]
        self._release_sources(transfer, disk)
        settled.pages.append(pages)

    def _release_sources(self, transfer: _Transfer, source: LevelPools) -> None:
        """The source slots are read no more; free those whose pages gave them up meanwhile."""
        table, pages = self._table, transfer.pages
        table.busy[pages] &= ~source.bit
        given_up = pages[(table.present[pages] & source.bit) == 0]
        group = source.pool_group_of[transfer.representative]
        source.allocators[group].free(table.slot[source.level, given_up])

    def _count(
        self, transfer: _Transfer, ok: npt.NDArray[np.bool_], path: str, failure: str
    ) -> None:
        num_good = int(np.count_nonzero(ok))
        num_bytes = num_good * self._moves.cold_page_bytes[transfer.representative]
        self._counters.count_move(path, num_good, num_bytes)
        num_bad = int(ok.size) - num_good
        if num_bad and not self._counters.totals[failure]:
            pool = transfer.disk.disk[transfer.disk.pool_group_of[transfer.representative]]
            _logger.warning("the disk tier: %s (%s counts them)", pool.last_failure, failure)
        self._counters.totals[failure] += num_bad
