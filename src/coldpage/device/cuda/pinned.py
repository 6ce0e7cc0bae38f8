"""Page-locked host memory, which the device reaches at the same address.

It is locked in pieces, by a thread in the background: what is locked can be used while the rest is
still on its way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Set
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Memory, MemoryKind
from coldpage.device.cuda.driver import Context, Driver, DriverError
from coldpage.device.host import HostMemory, ram_bytes
from coldpage.errors import ClosedError, DeviceError
from coldpage.types import Int64Array, MemAddress

__all__ = ["PIECE_BYTES", "PinnedMemory", "Registrar"]

# Page-locking takes about 0.3 s a GiB: the time that closing may have to wait for a piece.
PIECE_BYTES: Final = 512 * 1024 * 1024
_PAGE_BYTES: Final = 4096
_PROGRESS_INTERVAL_S: Final = 2.0
_ADVICE: Final = "make the host tier smaller, or raise the limit of locked memory (ulimit -l)"

_log = logging.getLogger(__name__)

# Memories with pieces registered. They stay while somebody forgets to free them: pages that the
# driver has locked must not go to the next who asks the kernel for memory.
_locked: set[PinnedMemory] = set()


class PinnedMemory(Memory):
    """Memory of the host, page-locked and mapped: the device reaches it at the same address."""

    kind = MemoryKind.PINNED

    def __init__(self, registrar: Registrar, num_bytes: int, *, is_growable: bool) -> None:
        """Locks the first piece at once; the others follow in the background."""
        self._registrar = registrar
        max_bytes = max(num_bytes, ram_bytes()) if is_growable else num_bytes
        if num_bytes > ram_bytes():
            raise DeviceError(
                f"the host can not page-lock {num_bytes:,} bytes: it has {ram_bytes():,} bytes of "
                "RAM; make the host tier smaller"
            )
        self._host = HostMemory(num_bytes, self.kind, max_bytes)
        self.address = self._host.address
        self.num_bytes = num_bytes
        self.max_bytes = self._host.max_bytes
        # Where each registered piece ends. Replaced as a whole, since two threads look at it.
        self._stops: tuple[int, ...] = ()
        self.failure: DriverError | None = None  # why the next piece could not be registered
        self._is_freed = False
        try:
            registrar.add(self)
        except DriverError as error:
            self._host.free()
            raise DeviceError(
                f"the host can not page-lock {num_bytes:,} bytes ({error.name}): {_ADVICE}"
            ) from error

    @property
    def _locked_bytes(self) -> int:
        stops = self._stops
        return stops[-1] if stops else 0

    @property
    def num_ready_bytes(self) -> int:
        """What is page-locked, up to ``num_bytes``."""
        return min(self.num_bytes, self._locked_bytes)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes [num_bytes], also those that are not page-locked yet."""
        return self._host.array[: self.num_bytes]

    def raise_failure(self) -> None:
        """Raise DeviceError when the rest could not be page-locked."""
        failure = self.failure
        if failure is not None:
            raise DeviceError(
                f"only {self.num_ready_bytes:,} of {self.num_bytes:,} bytes of host memory could "
                f"be page-locked ({failure.name}): {_ADVICE}"
            ) from failure

    def next_piece(self) -> tuple[int, int] | None:
        """What is to be registered next, as offsets; None when all is."""
        start = self._locked_bytes
        if start >= self.num_bytes or self._is_freed:
            return None
        return start, min(start + PIECE_BYTES, _round_up(self.num_bytes, _PAGE_BYTES))

    def note_piece(self, stop: int) -> None:
        """The next piece, up to ``stop``, has been registered."""
        self._stops = (*self._stops, stop)

    def resize(self, num_bytes: int) -> None:
        """Grow or shrink in place. Whole pieces that are cut off give their RAM back; what is new
        is page-locked in the background.
        """
        if self._is_freed:
            raise ClosedError("the memory was freed")
        assert num_bytes > 0, "memory keeps at least one byte"
        if num_bytes > self.max_bytes:
            raise DeviceError(
                f"the memory can not grow to {num_bytes:,} bytes: only {self.max_bytes:,} bytes of "
                "addresses were set aside for it"
            )
        try:
            with self._registrar.paused():
                self.failure = None
                while len(self._stops) > 1 and self._stops[-2] >= num_bytes:
                    self._unregister_last()
                self._host.resize(min(self.max_bytes, max(num_bytes, self._locked_bytes)))
                self.num_bytes = num_bytes
        finally:  # where it was refused, what was unlocked already is locked again
            self._registrar.enqueue(self)

    def _unregister_last(self) -> None:
        kept = self._stops[:-1]
        self._registrar.unregister(MemAddress(self.address + (kept[-1] if kept else 0)))
        self._stops = kept

    def free(self) -> None:
        """Unlock and give the memory back. Idempotent; what the driver refuses to unlock stays as
        it is and can be tried once more.
        """
        if self._is_freed and not self._stops:
            return
        with self._registrar.paused():
            self._is_freed = True
            while self._stops:
                self._unregister_last()
        self._registrar.remove(self)
        self._host.free()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Registrar:
    """Page-locks the pieces of host memories, one at a time, on a thread of its own."""

    def __init__(self, driver: Driver, context: Context) -> None:
        self._driver = driver
        self._context = context
        # Where each piece begins: addresses, sorted, that no copy of the driver may reach across,
        # be it within one memory or between two that are neighbours.
        self.boundaries: Int64Array = np.zeros(0, np.int64)
        self._starts: Set[int] = frozenset()
        self._memories: list[PinnedMemory] = []
        self._queue: deque[PinnedMemory] = deque()
        # Held while a piece is being registered, and while somebody changes a memory.
        self._piece_lock = threading.Lock()
        self._wanted = threading.Condition(threading.Lock())
        self._num_pausing = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._told_at_s = 0.0

    def are_pinned(self, addresses: Int64Array) -> npt.NDArray[np.bool_]:
        """Which addresses lie in memories of this registrar."""
        found = np.zeros(addresses.shape, np.bool_)
        for memory in self._memories:
            found |= (addresses >= memory.address) & (addresses < memory.address + memory.max_bytes)
        return found

    def is_pinned(self, address: MemAddress) -> bool:
        """Whether the address lies in a memory of this registrar."""
        return bool(self.are_pinned(np.array([address], np.int64))[0])

    def add(self, memory: PinnedMemory) -> None:
        """Lock the first piece of a memory now, and the others in the background."""
        with self.paused():
            self._register_next(memory)
        self._memories.append(memory)
        _locked.add(memory)
        try:
            self.enqueue(memory)
        except BaseException:
            memory.free()
            raise

    def remove(self, memory: PinnedMemory) -> None:
        """The memory is about to be freed, and has no piece any more."""
        self._memories.remove(memory)
        _locked.discard(memory)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no piece is being registered. Waits for the one in progress, but not
        for the next: the thread would take the lock again before anybody else wakes up.
        """
        with self._wanted:
            self._num_pausing += 1
        try:
            with self._piece_lock:
                yield
        finally:
            with self._wanted:
                self._num_pausing -= 1
                self._wanted.notify()

    def unregister(self, address: MemAddress) -> None:
        """Undo the registration of the piece that begins there. Only while paused."""
        with self._context:
            self._driver.call("cuMemHostUnregister", address)
        self._set_starts(self._starts - {address})

    def enqueue(self, memory: PinnedMemory) -> None:
        """Register what is left of the memory in the background."""
        with self._wanted:
            if memory.failure is not None or memory.next_piece() is None or self._is_closed:
                return
            if memory not in self._queue:
                self._queue.append(memory)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="coldpage-page-lock", daemon=True)
                self._told_at_s = time.monotonic()
                thread.start()
                self._thread = thread
            self._wanted.notify()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (memory := self._wait_for_memory()) is not None:
            failure: DriverError | None = None
            was_registered = False
            with self._piece_lock:
                try:
                    was_registered = self._register_next(memory)
                except DriverError as error:
                    failure = memory.failure = error
            with self._wanted:
                # What it was resized to meanwhile counts: then it is tried again.
                is_last = memory.failure is not None or memory.next_piece() is None
                if is_last:
                    self._queue.remove(memory)
            if failure is not None:
                self._tell_failure(memory, failure)
            elif was_registered:
                self._tell_progress(memory, is_last=is_last)

    def _wait_for_memory(self) -> PinnedMemory | None:
        """The next memory of the queue, where it stays; None when the registrar is closed."""
        with self._wanted:
            while not self._is_closed and (self._num_pausing or not self._queue):
                self._wanted.wait()
            return None if self._is_closed else self._queue[0]

    def _register_next(self, memory: PinnedMemory) -> bool:
        """Register the next piece of the memory, if one is left; whether there was one. The piece
        lock is held.
        """
        piece = memory.next_piece()
        if piece is None:
            return False
        start, stop = piece
        address = memory.address + start
        with self._context:
            self._driver.register_host(address, stop - start)
        # A copy must know the boundary before it can see that the piece is ready.
        self._set_starts(self._starts | {address})
        memory.note_piece(stop)
        return True

    def _set_starts(self, starts: Set[int]) -> None:
        self._starts = starts
        self.boundaries = np.array(sorted(starts), np.int64)

    def _tell_failure(self, memory: PinnedMemory, error: DriverError) -> None:
        _log.error(
            "only %s of %s bytes of a host tier could be page-locked (%s); the rest is not used: "
            "%s",
            f"{memory.num_ready_bytes:,}",
            f"{memory.num_bytes:,}",
            error.name,
            _ADVICE,
        )

    def _tell_progress(self, memory: PinnedMemory, *, is_last: bool) -> None:
        now_s = time.monotonic()
        if is_last or now_s - self._told_at_s >= _PROGRESS_INTERVAL_S:
            self._told_at_s = now_s
            _log.info(
                "page-locked %.1f of %.1f GiB of host memory",
                memory.num_ready_bytes / 2**30,
                memory.num_bytes / 2**30,
            )

    def close(self) -> None:
        """Stop after the piece in progress. Idempotent."""
        with self._wanted:
            self._is_closed = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
