"""What writes to and reads from disk levels share: the transfer in flight, and its two ends.

A transfer waits for the events of its memory, submits its I/O, and is finished by the owner's
thread when the I/O has ended; nothing else touches a page column. While it is in flight its source
slot is ``busy`` and its destination slot ``reserved``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Completion, IoBatch, IoExecutor
from coldpage.events import StorageEvents
from coldpage.migration.codec_moves import CodecMoves
from coldpage.page import PageTable
from coldpage.pools import LevelPools, PoolGroup
from coldpage.staging import StagingBuffer, StagingRing
from coldpage.store import BlobName
from coldpage.types import HOT_LEVEL, Int32Array, Int64Array

__all__ = ["DiskEnd", "NamePages", "Settlement", "Transfer"]

_logger = logging.getLogger(__name__)

# Pages of one staged transfer: enough that what the owner's thread does for it is shared.
_MAX_STAGED_PAGES: Final = 32
# What it takes of the ring at most, unless that is less than a page. Staging comes back when a
# transfer is over, so many small ones keep the disk busy while codecs fill and empty the others;
# and reads, which have half of the ring, still have one for each I/O thread.
_RING_PARTS: Final = 16
_DIRECT_ALIGNMENT: Final = 4096

# What each page holds, to be stored with it.
NamePages = Callable[[Int32Array], list[BlobName]]


@dataclass(slots=True)
class Transfer:
    """Pages of one batching class on their way; ``addresses`` is where their bytes are in memory:
    in the lease, if there is one, else in their slots of the level ``memory``.
    """

    pages: Int32Array
    versions: Int32Array
    disk: LevelPools
    group: PoolGroup  # of the disk level
    memory: LevelPools  # the other end, also when a lease lies between
    disk_slots: Int32Array
    page_bytes: int  # of each on disk
    addresses: Int64Array
    lease: StagingBuffer | None
    names: list[BlobName]  # what is written about each page; empty for a read
    deadline_s: float  # when a read that has not ended is a miss
    # Of the level ``memory``, where the I/O uses its slots.
    memory_group: PoolGroup | None = None
    # Of a read that has expired: what its I/O may still touch.
    is_expired: bool = False
    memory_slots: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    after: list[Completion] = field(default_factory=list)
    batch: IoBatch | None = None
    num_attempts: int = 1

    def is_ready(self) -> bool:
        """Whether the memory may be touched. Never blocks."""
        while self.after and self.after[-1].is_done():
            self.after.pop()
        return not self.after


@dataclass(slots=True)
class Settlement:
    """What ended since the last call: the pages concerned, and those among them that lost their
    last copy, because of the disk or since their codec can not decode it.
    """

    pages: list[Int32Array] = field(default_factory=list)
    lost: list[Int32Array] = field(default_factory=list)
    unreadable: list[Int32Array] = field(default_factory=list)


class DiskEnd:
    """Makes transfers and settles their disk side."""

    def __init__(
        self,
        io: IoExecutor,
        moves: CodecMoves,
        ring: StagingRing,
        table: PageTable,
        events: StorageEvents,
        names: NamePages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._names = names
        self.io = io
        self.moves = moves
        self.ring = ring
        self.table = table
        self.events = events

    @staticmethod
    def is_direct(disk: LevelPools, memory: LevelPools) -> bool:
        """Whether I/O uses the slots of ``memory`` itself."""
        return memory.is_host_memory and memory.codec is disk.codec

    def staged_batches(
        self, pages: Int32Array, disk: LevelPools, memory: LevelPools
    ) -> Iterator[Int32Array]:
        """The pages in batches that one way between ``memory`` and staging may take."""
        if memory.level == HOT_LEVEL:
            return self.moves.batches(pages, disk.codec)
        return self.moves.cold_batches(pages, memory, disk)

    def max_staged_pages(self, batch: Int32Array, disk: LevelPools) -> int:
        """How many pages of the batch one staged transfer may take."""
        stride = self.moves.cold_page_bytes(disk.codec, batch)
        return max(1, min(_MAX_STAGED_PAGES, self.ring.num_bytes // _RING_PARTS // stride))

    def lease(
        self, batch: Int32Array, disk: LevelPools, num_pages: int, *, for_stream: bool
    ) -> StagingBuffer | None:
        """Staging for one to ``num_pages`` pages of the batch, owned by the offload stream or by
        the CPU; None when there is none without waiting.
        """
        stride = self.moves.cold_page_bytes(disk.codec, batch)
        alignment = min(stride & -stride, _DIRECT_ALIGNMENT)
        stream = self.moves.offload_stream if for_stream else None
        most = num_pages * stride
        return self.ring.acquire(stride, most, stride, alignment, stream, may_wait=False)

    def staged(
        self, batch: Int32Array, disk: LevelPools, memory: LevelPools, lease: StagingBuffer
    ) -> Transfer:
        """A transfer between the pages' slots on ``disk`` and consecutive slices of the lease."""
        stride = self.moves.cold_page_bytes(disk.codec, batch)
        addresses = lease.address + np.arange(batch.size, dtype=np.int64) * stride
        return self._transfer(batch, disk, memory, addresses, lease)

    def direct(self, batch: Int32Array, disk: LevelPools, memory: LevelPools) -> Transfer:
        """A transfer between the pages' slots on ``disk`` and their slots on ``memory``, whose
        cold pages have the same form.
        """
        group = memory.group_of(self.table.life_cycle[batch[0]])
        slots = self.table.slot[memory.level, batch]
        addresses = group.cold_memory.addresses(slots)
        transfer = self._transfer(batch, disk, memory, addresses, None)
        transfer.memory_group = group
        transfer.after = list(self.moves.ready.outstanding(group.slots.event[slots]))
        return transfer

    def _transfer(
        self,
        batch: Int32Array,
        disk: LevelPools,
        memory: LevelPools,
        addresses: Int64Array,
        lease: StagingBuffer | None,
    ) -> Transfer:
        return Transfer(
            names=[],
            deadline_s=self.clock() + disk.disk.read_deadline_s,
            pages=batch,
            versions=self.table.version[batch].copy(),
            disk=disk,
            group=disk.group_of(self.table.life_cycle[batch[0]]),
            memory=memory,
            disk_slots=self.table.slot[disk.level, batch].copy(),
            page_bytes=self.moves.cold_page_bytes(disk.codec, batch),
            addresses=addresses,
            lease=lease,
        )

    def name(self, transfer: Transfer) -> None:
        """Note what its pages hold now."""
        transfer.names = self._names(transfer.pages)

    def is_current(self, transfer: Transfer) -> npt.NDArray[np.bool_]:
        """Which pages have not been written to since: the bytes of the others are nobody's."""
        current: npt.NDArray[np.bool_] = self.table.version[transfer.pages] == transfer.versions
        return current

    def release_sources(self, pages: Int32Array, source: LevelPools, group: PoolGroup) -> None:
        """The source slots, which are all of one group, are read no more; free those whose pages
        gave them up meanwhile. They may be of another life cycle by now.
        """
        table = self.table
        table.busy[pages] &= ~source.bit
        given_up = pages[(table.present[pages] & source.bit) == 0]
        group.slots.free(table.slot[source.level, given_up])

    def count_arrived(
        self, transfer: Transfer, arrived: npt.NDArray[np.bool_], *, is_write: bool
    ) -> None:
        """Note the pages that have a copy at the other end now."""
        ends = transfer.memory.level, transfer.disk.level
        source, target = ends if is_write else ends[::-1]
        if arrived.any():
            pages = transfer.pages[arrived]
            self.events.moved(pages, source, target, transfer.page_bytes)

    @staticmethod
    def late_sentence(disk: LevelPools) -> str:
        """Why reads were given up."""
        return f"no answer within {disk.disk.read_deadline_s:g} s"

    def count_late(self, disk: LevelPools, pages: Int32Array) -> None:
        """Note reads that were given up; the first are logged."""
        if not self.events.totals["late_reads"]:
            _logger.warning(
                "the disk tier %s takes longer than %g s to return pages: they are recomputed "
                "(late_reads counts them)",
                disk.name,
                disk.disk.read_deadline_s,
            )
        self.events.totals["late_reads"] += int(pages.size)

    def count_failures(self, transfer: Transfer, ok: npt.NDArray[np.bool_], name: str) -> None:
        """Note I/O that failed; the first of each name is logged."""
        num_bad = int(np.count_nonzero(~ok))
        if num_bad and not self.events.totals[name]:
            _logger.warning(
                "the disk tier: %s (%s counts them)", transfer.group.disk.last_failure, name
            )
        self.events.totals[name] += num_bad
