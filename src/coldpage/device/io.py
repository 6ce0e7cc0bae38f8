"""File I/O on a bounded pool of threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import IoBatch, IoExecutor, IoJob
from coldpage.device.file import MAX_TRANSFERS
from coldpage.device.progress import Progress
from coldpage.errors import ClosedError, DeviceError, UsageError

__all__ = ["NUM_IO_THREADS", "ThreadedIo", "ThreadedIoBatch"]

# As many as may be in the kernel, and some that meanwhile make or check the checksums of others, so
# that those take nothing from the disk.
NUM_IO_THREADS: Final = MAX_TRANSFERS + 2


class ThreadedIoBatch(IoBatch):
    """Jobs submitted together to a ``ThreadedIo``."""

    def __init__(self, num_jobs: int, ended: threading.Condition) -> None:
        self._ok = np.zeros(num_jobs, dtype=np.bool_)
        self._num_left = num_jobs
        self._ended = ended
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """Whether every job has ended, well or badly."""
        return self._num_left == 0

    def synchronize(self) -> None:
        """Block until every job has ended. Raises DeviceError when a job raised an exception."""
        with self._ended:
            while self._num_left:
                self._ended.wait()
        self._raise_error()

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Per job whether it succeeded.

        Raises DeviceError when a job raised an exception, UsageError before all have ended.
        """
        if self._num_left:
            raise UsageError("the I/O batch is in flight: wait for is_done() before reading ok")
        self._raise_error()
        return self._ok

    def _raise_error(self) -> None:
        if self._error is not None:
            raise DeviceError(
                f"an I/O job raised instead of returning False: {self._error!r}"
            ) from self._error


class _Lane:
    """Jobs that start in the order of their submission, on threads that start with the first."""

    def __init__(self, lock: threading.Lock) -> None:
        self.queued = threading.Condition(lock)
        self.queue: deque[tuple[ThreadedIoBatch, int, IoJob]] = deque()
        self.threads: list[threading.Thread] = []


class ThreadedIo(IoExecutor):
    """Runs I/O jobs on threads: those that fill memory on up to ``num_threads`` of them, all others
    on as many of their own, so that what frees memory never waits for a read that hangs.

    The queues need no bound of their own: each job holds the page slots it reads or writes, so
    there are never more jobs than slots, and ``submit`` must not block.
    """

    def __init__(self, progress: Progress, num_threads: int = NUM_IO_THREADS) -> None:
        assert num_threads > 0
        self._progress = progress
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._filling = _Lane(self._lock)
        self._others = _Lane(self._lock)
        self._is_closed = False

    def submit(self, jobs: Sequence[IoJob]) -> ThreadedIoBatch:
        """Queue the jobs; an empty batch is done at once."""
        batch = ThreadedIoBatch(len(jobs), self._ended)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the I/O executor is closed")
            for index, job in enumerate(jobs):
                lane = self._filling if job.writes else self._others
                lane.queue.append((batch, index, job))
            for lane in (self._filling, self._others):
                if lane.queue:
                    self._start_threads(lane)
                    lane.queued.notify(len(jobs))
        return batch

    def close(self) -> None:
        """Finish what is queued, then stop the threads. Idempotent."""
        lanes = self._filling, self._others
        with self._lock:
            self._is_closed = True
            for lane in lanes:
                lane.queued.notify_all()
        for lane in lanes:
            for thread in lane.threads:
                thread.join()
            lane.threads.clear()

    def _start_threads(self, lane: _Lane) -> None:
        if lane.threads:
            return
        kind = "io-read" if lane is self._filling else "io"
        for index in range(self._num_threads):
            name = f"coldpage-{kind}-{index}"
            thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
            lane.threads.append(thread)
            thread.start()

    def _work(self, lane: _Lane) -> None:
        while True:
            with self._lock:
                while not lane.queue:
                    if self._is_closed:
                        return
                    lane.queued.wait()
                batch, index, job = lane.queue.popleft()
            error: BaseException | None = None
            try:
                batch._ok[index] = job.run()
            except BaseException as raised:  # a bug in the job: the owner's thread gets it
                error = raised
            self._end_job(batch, error)
            # Holding the last job would keep its buffers alive while this thread sleeps.
            del batch, job, error

    def _end_job(self, batch: ThreadedIoBatch, error: BaseException | None) -> None:
        with self._lock:
            batch._error = batch._error or error
            batch._num_left -= 1
            is_last = batch._num_left == 0
            if is_last:
                self._ended.notify_all()
        if is_last:
            self._progress.signal()
