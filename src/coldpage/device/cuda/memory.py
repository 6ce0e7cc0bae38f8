"""Memory of a CUDA device: mapped device memory that grows in place, and page-locked host memory.

Device memory is a range of addresses of which the first part has memory behind it, so it can grow
without moving. Host memory is page-locked in pieces, by a thread in the background: what is locked
can be used while the rest is still on its way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Memory, MemoryKind
from coldpage.device.cuda.driver import AllocationProperties, Context, Driver, DriverError
from coldpage.device.host import HostMemory, ram_bytes
from coldpage.errors import ClosedError, DeviceError
from coldpage.types import Int64Array, MemAddress

__all__ = ["PIECE_BYTES", "DeviceMemory", "PinnedMemory", "Registrar"]

# Page-locking takes about 0.3 s a GiB: the time that closing may have to wait for a piece.
PIECE_BYTES: Final = 512 * 1024 * 1024
# Growable memory is made of blocks, so that what is cut off can be given back. Fewer, larger ones
# for large memories: each costs the driver 0.1 ms.
_BLOCKS_PER_MEMORY: Final = 64
_MAX_BLOCK_BYTES: Final = 1024 * 1024 * 1024
_PAGE_BYTES: Final = 4096
_PROGRESS_INTERVAL_S: Final = 2.0

_log = logging.getLogger(__name__)

# Memories with pieces registered. They stay while somebody forgets to free them: pages that the
# driver has locked must not go to the next who asks the kernel for memory.
_locked: set[PinnedMemory] = set()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class DeviceMemory(Memory):
    """Memory of the device, which the host can not reach."""

    kind = MemoryKind.DEVICE

    def __init__(
        self, driver: Driver, context: Context, device: int, num_bytes: int, max_bytes: int
    ) -> None:
        self._driver = driver
        self._context = context
        self._properties = AllocationProperties.of_device(device)
        self._handles: list[int] = []
        self._is_freed = False
        with context:
            unit = driver.granularity_bytes(self._properties)
            self._block_bytes = _block_bytes(num_bytes, max_bytes, unit)
            self._reserved_bytes = _round_up(max_bytes, self._block_bytes)
            try:
                self.address = MemAddress(driver.reserve_addresses(self._reserved_bytes))
            except DriverError as error:
                raise _refused(num_bytes, error) from error
            try:
                self._map(num_bytes)
            except DeviceError:
                driver.call("cuMemAddressFree", self.address, self._reserved_bytes)
                raise
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes

    @property
    def is_host_reachable(self) -> bool:
        """Never."""
        return False

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Raises DeviceError: only the device reaches this memory."""
        self._check_open()
        raise DeviceError(
            "the host can not reach memory of the GPU: copy it on a stream, or view it with a "
            "library of the device"
        )

    def resize(self, num_bytes: int) -> None:
        """Grow or shrink in place. Whole blocks that are cut off are given back."""
        self._check_open()
        assert num_bytes > 0, "memory keeps at least one byte"
        if num_bytes > self.max_bytes:
            raise DeviceError(
                f"the memory can not grow to {num_bytes:,} bytes: only {self.max_bytes:,} bytes of "
                "addresses were set aside for it"
            )
        with self._context:
            self._map(num_bytes)
            self._unmap(_round_up(num_bytes, self._block_bytes) // self._block_bytes)
        self.num_bytes = num_bytes

    def _map(self, num_bytes: int) -> None:
        """Have memory for that many bytes. All or nothing."""
        old = len(self._handles)
        while len(self._handles) * self._block_bytes < num_bytes:
            address = self.address + len(self._handles) * self._block_bytes
            try:
                handle = self._driver.map_memory(address, self._block_bytes, self._properties)
            except DriverError as error:
                self._unmap(old)
                raise _refused(num_bytes, error) from error
            self._handles.append(handle)

    def _unmap(self, num_blocks: int) -> None:
        while len(self._handles) > num_blocks:
            address = self.address + (len(self._handles) - 1) * self._block_bytes
            self._driver.unmap_memory(address, self._block_bytes, self._handles.pop())

    def free(self) -> None:
        """Give memory and addresses back. Idempotent."""
        if self._is_freed:
            return
        self._is_freed = True
        with self._context:
            self._unmap(0)
            self._driver.call("cuMemAddressFree", self.address, self._reserved_bytes)

    def _check_open(self) -> None:
        if self._is_freed:
            raise ClosedError("the memory was freed")


def _block_bytes(num_bytes: int, max_bytes: int, unit: int) -> int:
    if num_bytes == max_bytes:  # it will not grow: one block
        return _round_up(num_bytes, unit)
    block = unit
    while block * _BLOCKS_PER_MEMORY < num_bytes and block < _MAX_BLOCK_BYTES:
        block *= 2
    return block


def _refused(num_bytes: int, error: DriverError) -> DeviceError:
    return DeviceError(
        f"the GPU has no {num_bytes:,} bytes to give ({error.name}): make the device tiers smaller"
    )


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
        self._stops: list[int] = []  # where each registered piece ends
        self._is_freed = False
        try:
            registrar.add(self)
        except DriverError as error:
            self._host.free()
            raise DeviceError(
                f"the host can not page-lock {num_bytes:,} bytes ({error.name}): make the host "
                "tier smaller, or raise the limit of locked memory (ulimit -l)"
            ) from error

    @property
    def num_ready_bytes(self) -> int:
        """What is page-locked, up to ``num_bytes``."""
        return min(self.num_bytes, self._stops[-1]) if self._stops else 0

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes [num_bytes], also those that are not page-locked yet."""
        return self._host.array[: self.num_bytes]

    @property
    def boundaries(self) -> list[int]:
        """Addresses between two registered pieces. A copy must not reach across one."""
        return [self.address + stop for stop in self._stops[:-1]]

    def next_piece(self) -> tuple[int, int] | None:
        """What is to be registered next, as offsets; None when all is."""
        start = self._stops[-1] if self._stops else 0
        if start >= self.num_bytes or self._is_freed:
            return None
        return start, min(start + PIECE_BYTES, _round_up(self.num_bytes, _PAGE_BYTES))

    def note_piece(self, stop: int) -> None:
        """The next piece, up to ``stop``, has been registered."""
        self._stops.append(stop)

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
        with self._registrar.paused():
            while len(self._stops) > 1 and self._stops[-2] >= num_bytes:
                self._unregister_last()
            kept = self._stops[-1] if self._stops else 0
            self._host.resize(min(self.max_bytes, max(num_bytes, kept)))
            self.num_bytes = num_bytes
        self._registrar.enqueue(self)

    def _unregister_last(self) -> None:
        self._stops.pop()
        start = self._stops[-1] if self._stops else 0
        self._registrar.unregister(MemAddress(self.address + start))

    def free(self) -> None:
        """Unlock and give the memory back. Idempotent."""
        if self._is_freed:
            return
        with self._registrar.paused():
            self._is_freed = True
            while self._stops:
                self._unregister_last()
        self._registrar.remove(self)
        self._host.free()


class Registrar:
    """Page-locks the pieces of host memories, one at a time, on a thread of its own."""

    def __init__(self, driver: Driver, context: Context) -> None:
        self._driver = driver
        self._context = context
        self._memories: list[PinnedMemory] = []
        self._queue: deque[PinnedMemory] = deque()
        # Held while a piece is being registered, and while somebody changes a memory.
        self._piece_lock = threading.Lock()
        self._wanted = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._told_at_s = 0.0

    @property
    def boundaries(self) -> Int64Array:
        """Addresses that no copy of the driver may reach across, sorted."""
        return np.array(sorted(b for m in self._memories for b in m.boundaries), np.int64)

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
        self.register_next(memory)
        self._memories.append(memory)
        _locked.add(memory)
        self.enqueue(memory)

    def remove(self, memory: PinnedMemory) -> None:
        """The memory is about to be freed, and has no piece any more."""
        self._memories.remove(memory)
        _locked.discard(memory)

    def paused(self) -> threading.Lock:
        """A context in which no piece is being registered. Waits for the one in progress."""
        return self._piece_lock

    def register_next(self, memory: PinnedMemory) -> bool:
        """Register the next piece of the memory; False when none is left."""
        with self._piece_lock:
            piece = memory.next_piece()
            if piece is None:
                return False
            start, stop = piece
            with self._context:
                self._driver.register_host(memory.address + start, stop - start)
            memory.note_piece(stop)
        return True

    def unregister(self, address: MemAddress) -> None:
        """Undo the registration of the piece that begins there."""
        with self._context:
            self._driver.call("cuMemHostUnregister", address)

    def enqueue(self, memory: PinnedMemory) -> None:
        """Register what is left of the memory in the background."""
        if memory.next_piece() is None:
            return
        with self._wanted:
            self._queue.append(memory)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="coldpage-page-lock", daemon=True
                )
                self._told_at_s = time.monotonic()
                self._thread.start()
            self._wanted.notify()

    def _run(self) -> None:
        while True:
            with self._wanted:
                while not self._queue and not self._is_closed:
                    self._wanted.wait()
                if self._is_closed:
                    return
                memory = self._queue[0]
            try:
                has_more = self.register_next(memory) and memory.next_piece() is not None
            except DriverError as error:
                has_more = False
                self._tell_failure(memory, error)
            self._tell_progress(memory, is_last=not has_more)
            if not has_more:
                with self._wanted:
                    self._queue.popleft()

    def _tell_failure(self, memory: PinnedMemory, error: DriverError) -> None:
        _log.error(
            "only %s of %s bytes of a host tier could be page-locked (%s); the rest is not used: "
            "make the host tier smaller, or raise the limit of locked memory (ulimit -l)",
            f"{memory.num_ready_bytes:,}",
            f"{memory.num_bytes:,}",
            error.name,
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
