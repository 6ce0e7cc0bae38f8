"""Making writes survive a power cut, many at a time, within a bounded delay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from coldpage.device.base import Completion, IoBatch, IoExecutor, IoJob
from coldpage.errors import UsageError

__all__ = ["MAX_DELAY_S", "MAX_WRITES", "SyncBatcher", "SyncPoint", "Syncable"]

# An fdatasync costs some milliseconds whatever it covers: this is what a crash may cost instead.
MAX_DELAY_S: Final = 0.5
MAX_WRITES: Final = 256


class Syncable(Protocol):
    """A file whose completed writes one call makes durable."""

    last_failure: str

    def sync(self) -> None:
        """Block until completed writes survive a power cut. Raises OSError if they may not."""


class SyncPoint(Completion):
    """Everything written before some moment: done when that is durable, or may never be."""

    def __init__(self, batcher: SyncBatcher) -> None:
        """Made by ``SyncBatcher.point``."""
        self._batcher = batcher
        self._is_done = False
        self._ok = False

    def is_done(self) -> bool:
        """Whether it has been settled; ``SyncBatcher.poll`` settles it."""
        return self._is_done

    @property
    def ok(self) -> bool:
        """Whether it is durable. Raises UsageError before it is done."""
        if not self._is_done:
            raise UsageError("the sync is in flight: wait for is_done() before reading ok")
        return self._ok

    def synchronize(self) -> None:
        """Block until it is settled, without waiting for more writes to come."""
        if not self._is_done:
            self._batcher.flush()

    def _settle(self, ok: bool) -> None:
        self._is_done, self._ok = True, ok


class SyncBatcher:
    """Syncs ``files`` on an I/O thread when something has been dirty for ``max_delay_s``, or after
    ``max_writes`` writes. One thread owns it.

    After a sync that failed nobody knows what it covered: its points are done and not ok, and a
    later sync that succeeds does not vouch for them. Nor is anything durable until one succeeds.
    """

    def __init__(
        self,
        files: Sequence[Syncable],
        io: IoExecutor,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_delay_s: float = MAX_DELAY_S,
        max_writes: int = MAX_WRITES,
    ) -> None:
        self.num_syncs = 0  # that have ended well
        self.num_failures = 0
        self.has_failed = False  # the one that ended last
        self._files = files
        self._io = io
        self._clock = clock
        self._max_delay_s = max_delay_s
        self._max_writes = max_writes
        self._num_dirty = 0  # writes that no started sync covers
        self._dirty_since = 0.0
        self._waiting: list[SyncPoint] = []  # for the sync after the one in flight
        self._in_flight: IoBatch | None = None
        self._covered: list[SyncPoint] = []  # by the one in flight

    def note(self, num_writes: int = 1) -> None:
        """So many writes have ended well just now."""
        if num_writes and not self._num_dirty:
            self._dirty_since = self._clock()
        self._num_dirty += num_writes

    def point(self) -> SyncPoint:
        """A completion for all writes noted so far. Starts nothing: ``poll`` does, in time."""
        point = SyncPoint(self)
        if self.has_failed and not self._num_dirty and self._in_flight is None:
            self.note()
        if self._num_dirty:
            self._waiting.append(point)
        elif self._in_flight is not None:
            self._covered.append(point)
        else:
            point._settle(True)
        return point

    def poll(self) -> None:
        """Settle what has ended and start what is due. Never blocks."""
        self._collect()
        if self._in_flight is None and self._num_dirty and self._is_due():
            self._start()

    def flush(self) -> None:
        """Block until every write noted is durable, or its points say that it may not be."""
        while self._in_flight is not None or self._num_dirty:
            if self._in_flight is None:
                self._start()
            assert self._in_flight is not None
            self._in_flight.synchronize()
            self._collect()

    def _is_due(self) -> bool:
        waited_s = self._clock() - self._dirty_since
        return self._num_dirty >= self._max_writes or waited_s >= self._max_delay_s

    def _start(self) -> None:
        self._num_dirty = 0
        self._covered, self._waiting = self._waiting, []
        self._in_flight = self._io.submit([IoJob(_syncer(file)) for file in self._files])

    def _collect(self) -> None:
        if self._in_flight is None or not self._in_flight.is_done():
            return
        ok = bool(self._in_flight.ok.all())
        self._in_flight = None
        self.has_failed = not ok
        self.num_syncs += ok
        self.num_failures += not ok
        for point in self._covered:
            point._settle(ok)
        self._covered = []


def _syncer(file: Syncable) -> Callable[[], bool]:
    def sync() -> bool:
        try:
            file.sync()
        except OSError as error:
            file.last_failure = f"making writes durable failed: {error}"
            return False
        return True

    return sync
