"""Moves to and from disk levels: transfers in flight, advanced by the owner's thread."""

from __future__ import annotations

from coldpage.device.base import IoExecutor
from coldpage.events import StorageEvents
from coldpage.migration.codec_moves import CodecMoves
from coldpage.migration.disk_reads import DiskReads
from coldpage.migration.disk_transfers import DiskEnd, NamePages, Settlement
from coldpage.migration.disk_writes import DiskWrites
from coldpage.page import PageTable
from coldpage.staging import StagingRing

__all__ = ["DiskMoves"]


class DiskMoves:
    """All transfers in flight between memory and disk levels."""

    def __init__(
        self,
        io: IoExecutor,
        moves: CodecMoves,
        ring: StagingRing,
        table: PageTable,
        events: StorageEvents,
        names: NamePages,
    ) -> None:
        end = self.end = DiskEnd(io, moves, ring, table, events, names)
        self.writes = DiskWrites(end)
        self.reads = DiskReads(end)

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet settled, queued reads included."""
        return self.writes.num_in_flight + self.reads.num_in_flight

    def advance(self) -> Settlement:
        """Submit I/O whose memory is ready and finish I/O that has ended. Never blocks on I/O."""
        settled = Settlement()
        self.writes.advance(settled)
        self.reads.advance(settled)
        return settled
