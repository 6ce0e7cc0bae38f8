"""The host device: the hot level in RAM, worker threads as streams, real addresses."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import (
    Accesses,
    Device,
    Event,
    Memory,
    MemoryKind,
    PageParts,
    Stream,
    work_error,
)
from coldpage.device.copies import launch_page_copy, run_copies, write_bytes
from coldpage.device.io import NUM_IO_THREADS, ThreadedIo
from coldpage.device.progress import Progress
from coldpage.errors import ClosedError, DeviceError
from coldpage.types import DeviceArray, Int64Array, MemAddress

__all__ = ["MAX_QUEUED_OPS", "HostDevice", "HostEvent", "HostMemory", "HostStream", "ram_bytes"]

# A submitter waits for room beyond this. It can not deadlock: an event exists before anything waits
# for it, so what a queue's head waits for never depends on a later submission.
MAX_QUEUED_OPS: Final = 4096

_HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
# Addresses that no memory is promised for before they are touched. Python 3.11 has no name for it.
_MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0


_log = logging.getLogger(__name__)


class HostMemory(Memory):
    """Anonymous, page-aligned memory; huge pages where it is large enough for one.

    ``max_bytes`` of addresses are set aside, or as many as the host lends; never fewer than
    ``num_bytes``.
    """

    def __init__(self, num_bytes: int, kind: MemoryKind, max_bytes: int) -> None:
        assert 0 < num_bytes <= max_bytes, "an allocation needs at least one byte"
        try:
            # First as much as is needed, in the way that makes the kernel refuse what it has not.
            self._map = _map(num_bytes)
            if max_bytes > num_bytes:
                self._map.close()
                self._map = _map_reserved(num_bytes, max_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(
                f"the host has no {num_bytes:,} bytes to give ({error}): make the tiers smaller"
            ) from error
        self.kind = kind
        self.num_bytes = num_bytes
        self.max_bytes = len(self._map)
        self._reserved: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address = MemAddress(self._reserved.ctypes.data)
        self._ask_for_huge_pages()

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes [num_bytes]. Views of them outlive ``free``, with undefined contents."""
        return self._open_array()[: self.num_bytes]

    def resize(self, num_bytes: int) -> None:
        """Grow or shrink in place. What is cut off gives its RAM back and reads as zeros when the
        memory has grown again.
        """
        array = self._open_array()
        assert num_bytes > 0, "memory keeps at least one byte"
        if num_bytes > self.max_bytes:
            raise DeviceError(
                f"the memory can not grow to {num_bytes:,} bytes: only {self.max_bytes:,} bytes of "
                "addresses were set aside for it"
            )
        first_page = min(self.num_bytes, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if first_page < self.num_bytes:
            try:
                self._map.madvise(mmap.MADV_DONTNEED, first_page, self.num_bytes - first_page)
            except OSError as error:  # as for memory that the process has locked
                raise DeviceError(f"the host does not take memory back ({error})") from error
        array[num_bytes:first_page] = 0
        self.num_bytes = num_bytes
        self._ask_for_huge_pages()

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        if self._reserved is None:
            return
        self._reserved = None
        try:
            self._map.close()
        except BufferError:
            # Someone holds a view: keep the addresses, so that it can not crash; return the RAM.
            self._advise(mmap.MADV_DONTNEED, self.max_bytes)

    def _open_array(self) -> npt.NDArray[np.uint8]:
        if self._reserved is None:
            raise ClosedError("the memory was freed")
        return self._reserved

    def _ask_for_huge_pages(self) -> None:
        if self.num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE, self.num_bytes)

    def _advise(self, advice: int, num_bytes: int) -> None:
        try:
            self._map.madvise(advice, 0, num_bytes)
        except OSError:
            return  # a kernel without transparent huge pages refuses; the memory works all the same


def _map(num_bytes: int, extra_flags: int = 0) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | extra_flags)


def _map_reserved(num_bytes: int, max_bytes: int) -> mmap.mmap:
    """Memory of ``max_bytes``. Where the host refuses that, half of the most it would lend, found
    by halving, so that the next allocations have room too, but at least ``num_bytes``.
    """
    try:
        return _map(max_bytes, _MAP_NORESERVE)
    except (OSError, OverflowError):
        size = max_bytes // 2
    while size > num_bytes:
        try:
            _map(size, _MAP_NORESERVE).close()
        except OSError:
            size //= 2
        else:
            return _map(max(num_bytes, size // 2), _MAP_NORESERVE)
    return _map(num_bytes)


def ram_bytes() -> int:
    """All RAM of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class HostEvent(Event):
    """The first ``num_ops`` operations of a stream."""

    def __init__(self, stream: HostStream, num_ops: int) -> None:
        self._stream = stream
        self._num_ops = num_ops

    def is_done(self) -> bool:
        """Whether the work has completed. Raises DeviceError when some of it failed."""
        if self._stream._num_completed < self._num_ops:
            return False
        self._stream._raise_failure(self._num_ops)
        return True

    def synchronize(self) -> None:
        """Block until the work has completed. Raises DeviceError when some of it failed."""
        self._stream._wait_for(self._num_ops)
        self._stream._raise_failure(self._num_ops)


class HostStream(Stream):
    """A worker thread with a queue.

    Work that raises poisons the stream: what is queued behind it is not run, its events raise,
    streams that wait for them are poisoned too, and every later call on the stream raises
    DeviceError from the exception. Work must not submit to streams.
    """

    def __init__(self, name: str, progress: Progress) -> None:
        self.name = name
        self._progress = progress
        self._lock = threading.Lock()
        self._queued = threading.Condition(self._lock)
        self._completed = threading.Condition(self._lock)
        self._queue: deque[Callable[[], None]] = deque()
        self._num_submitted = 0
        self._num_completed = 0
        self._failure: BaseException | None = None
        self._failed_op = 0
        self._is_failure_reported = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"coldpage-{name}", daemon=True)
        self._thread.start()

    def launch(
        self,
        work: Callable[[], None],
        *,
        reads: Accesses,
        writes: Accesses,
    ) -> None:
        """Enqueue ``work``; it runs on the stream's thread. Nobody checks its accesses."""
        self._submit(self.named(work))

    def copy(self, dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        """Enqueue the copies as one operation."""
        assert dst.shape == src.shape == num_bytes.shape, "three [num_copies] arrays"
        copies = dst.astype(np.int64), src.astype(np.int64), num_bytes.astype(np.int64)
        self._submit(lambda: run_copies(copies))

    def copy_pages(self, parts: PageParts, pairs: DeviceArray) -> None:
        """Enqueue the copies as one operation."""
        launch_page_copy(self, parts, pairs)

    def upload(self, dst: MemAddress, data: npt.NDArray[np.uint8]) -> None:
        """Enqueue the copy of the array as it is now."""
        assert data.dtype == np.uint8 and data.ndim == 1, "bytes [num_bytes]"
        kept = data.tobytes()
        self._submit(lambda: write_bytes(dst, kept))

    def record(self) -> HostEvent:
        """An event for all work enqueued so far."""
        self._raise_failure()
        return HostEvent(self, self._num_submitted)

    def wait(self, event: Event) -> None:
        """Hold later work until ``event`` is done."""
        assert isinstance(event, HostEvent), "an event of the host device"
        self._raise_failure()
        if event._stream is not self and not event.is_done():
            self._submit(event.synchronize)

    def synchronize(self) -> None:
        """Block until all enqueued work has completed. Raises DeviceError when some failed."""
        self._wait_for(self._num_submitted)
        self._raise_failure()

    def close(self) -> None:
        """Finish what is queued, then stop the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._queued.notify()
        self._thread.join()

    def _submit(self, op: Callable[[], None]) -> None:
        with self._lock:
            while len(self._queue) >= MAX_QUEUED_OPS and self._failure is None:
                self._completed.wait()
            self._raise_failure()
            if self._is_closed:
                raise ClosedError(f"the stream {self.name!r} is closed")
            self._queue.append(op)
            self._num_submitted += 1
            self._queued.notify()

    def _wait_for(self, num_ops: int) -> None:
        with self._lock:
            while self._num_completed < num_ops:
                self._completed.wait()

    def _raise_failure(self, num_ops: int | None = None) -> None:
        """Raise when one of the first ``num_ops`` operations (default: any) failed."""
        if self._failure is not None and (num_ops is None or self._failed_op < num_ops):
            self._is_failure_reported = True
            raise work_error(self.name, self._failure) from self._failure

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._queued.wait()
                op = self._queue.popleft()
            failure: BaseException | None = None
            if self._failure is None:
                try:
                    op()
                except BaseException as raised:  # kept, and raised at the owner's next call
                    failure = raised
            del op  # it may hold buffers that should not live while this thread sleeps
            with self._lock:
                if failure is not None:
                    self._failure, self._failed_op = failure, self._num_completed
                # After the failure is set: is_done reads both without the lock.
                self._num_completed += 1
                self._completed.notify_all()
            self._progress.signal()


class HostDevice(Device):
    """A machine without a GPU. Copies and work run on threads, beside what the caller computes."""

    def __init__(self, *, num_io_threads: int = NUM_IO_THREADS) -> None:
        self.name = "host"
        self._progress = Progress()
        self.io: ThreadedIo = ThreadedIo(self._progress, num_io_threads)
        self._streams: list[HostStream] = []
        self._memories: list[HostMemory] = []
        self._is_shortage_told = False
        self._is_closed = False

    def allocate(
        self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
    ) -> HostMemory:
        """Zeroed memory aligned to 4096 bytes; RAM is taken as it is first touched. What is
        growable can take all RAM of the machine, where the machine lends that many addresses.
        """
        self._check_open()
        max_bytes = max(num_bytes, ram_bytes()) if is_growable else num_bytes
        memory = HostMemory(num_bytes, kind, max_bytes)
        if memory.max_bytes < max_bytes and not self._is_shortage_told:
            self._is_shortage_told = True
            _log.warning(
                "the host sets no %s bytes of addresses aside (overcommit or address space is "
                "limited): memory of %s bytes can grow to %s",
                f"{max_bytes:,}",
                f"{num_bytes:,}",
                f"{memory.max_bytes:,}",
            )
        self._memories.append(memory)
        return memory

    def create_stream(self, name: str) -> HostStream:
        """A new stream with its own thread."""
        self._check_open()
        stream = HostStream(name, self._progress)
        self._streams.append(stream)
        return stream

    def wait_for_progress(self, timeout_s: float) -> None:
        """Block until something completed since this thread's last call, or the time is over."""
        self._progress.wait(timeout_s)

    def close(self) -> None:
        """Finish all work, stop the threads, free the memory.

        Raises DeviceError when work failed and no call has told so yet.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for stream in self._streams:
            stream.close()
        self.io.close()
        for memory in self._memories:
            memory.free()
        for stream in self._streams:
            if not stream._is_failure_reported:
                stream._raise_failure()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the device is closed")
