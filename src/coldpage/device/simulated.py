"""The simulated device: real bytes, a seeded scheduler, and a check on the order of every access.

Nothing runs until someone asks: then queued work runs in any order that streams, events and the
number of I/O threads allow. One thread uses the device.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Device, DeviceBytes, Memory, MemoryKind
from coldpage.device.io import NUM_IO_THREADS
from coldpage.device.simulated_history import (
    AccessHistory,
    CallSite,
    Violation,
    ViolationError,
    ViolationKind,
    call_site,
    ranges_of,
)
from coldpage.device.simulated_io import SimulatedIo
from coldpage.device.simulated_stream import SimulatedStream
from coldpage.device.simulated_world import SimulatedCounts, SimulatedFaults, World
from coldpage.errors import ClosedError, DeviceError
from coldpage.types import ByteRange, MemAddress

__all__ = [
    "SimulatedCounts",
    "SimulatedDevice",
    "SimulatedFaults",
    "SimulatedMemory",
    "Violation",
    "ViolationError",
    "ViolationKind",
]

_PAGE_BYTES: Final = 4096
_ARENA_BYTES: Final = 1 << 30  # addresses only: RAM is taken as it is touched
_FRESH_BYTE: Final = 0xA5  # nothing may rely on new memory being zero
_FREED_BYTE: Final = 0xDD

# Growable memory can become this many times as large, if that leaves half of what is left.
_GROWTH: Final = 4

# How much may run in one ``wait_for_progress``.
_MAX_STEPS_PER_WAIT: Final = 4


class SimulatedMemory(Memory):
    """A piece of the device's arena. Its addresses are never used again. Bytes that are not ready
    are none that anybody may use.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        reserved: npt.NDArray[np.uint8],
        num_bytes: int,
        kind: MemoryKind,
        num_ready_bytes: int,
    ) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        self.max_bytes = len(reserved)
        self.address = MemAddress(reserved.ctypes.data)
        self.allocated_at = call_site()
        self._reserved = reserved
        self._reserved[:num_bytes] = _FRESH_BYTE
        self._device = device
        self._is_freed = False
        self._num_ready_bytes = num_ready_bytes

    @property
    def num_ready_bytes(self) -> int:
        """What ``SimulatedDevice.prepare`` has made ready, where it has to."""
        return self._num_ready_bytes

    def _prepare(self, num_bytes: int) -> None:
        self._num_ready_bytes = num_bytes
        self._device._history.grow(self.address, num_bytes)

    @property
    def is_host_reachable(self) -> bool:
        """False for device memory that the device hides."""
        return not (self._device.hides_memory and self.kind is MemoryKind.DEVICE)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes [num_bytes]. Uses are checked only where ``host_access`` declares them."""
        if self._is_freed:
            raise ClosedError("the memory was freed")
        if not self.is_host_reachable:
            raise DeviceError("the host can not reach this memory of the simulated device")
        return self._reserved[: self.num_bytes]

    def resize(self, num_bytes: int) -> None:
        """Grow or shrink in place; what work in flight may use must not be cut off."""
        if self._is_freed:
            raise ClosedError("the memory was freed")
        assert num_bytes > 0, "memory keeps at least one byte"
        if num_bytes > self.max_bytes:
            raise DeviceError(
                f"the simulated memory can not grow to {num_bytes:,} bytes: "
                f"only {self.max_bytes:,} were set aside for it"
            )
        old_bytes, self.num_bytes = self.num_bytes, num_bytes
        if num_bytes < old_bytes:
            self._num_ready_bytes = min(self._num_ready_bytes, num_bytes)
            self._device._cut_off(self, num_bytes)
            self._reserved[num_bytes:old_bytes] = _FREED_BYTE
        else:
            self._reserved[old_bytes:num_bytes] = _FRESH_BYTE
            if not self._device._is_prepared_later(self.kind):
                self._prepare(num_bytes)

    def free(self) -> None:
        """Give the memory back, which the host must know to be out of use. Idempotent."""
        if not self._is_freed:
            self._is_freed = True
            self._device._memories.remove(self)
            self._device._cut_off(self, 0)
            self._reserved[: self.num_bytes] = _FREED_BYTE


class SimulatedDevice(Device):
    """A device whose every legal behaviour can be had again from its seed.

    ``violations`` collects what was found. ``wait_sites`` are the places (file name, line) outside
    this package that waited for something, and ``ordering_wait_sites`` those that added an order
    which was not known before; a wait at a place in ``ignored_wait_sites`` adds none. A wait in a
    file named in ``forwarding_files`` counts as made by that file's caller.

    With ``hides_memory`` the host can not reach device memory, as it is with a GPU; a test that
    must look into it asks ``reveal``. With ``prepares_in_background`` no byte of pinned memory is
    ready before ``prepare`` makes it so, which each wait for progress does to
    ``prepared_bytes_a_wait``.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        faults: SimulatedFaults | None = None,
        raise_on_violation: bool = False,
        arena_bytes: int = _ARENA_BYTES,
        num_io_threads: int = NUM_IO_THREADS,
        hides_memory: bool = False,
        prepares_in_background: bool = False,
    ) -> None:
        self.name = "simulated"
        self.hides_memory = hides_memory
        self.prepares_in_background = prepares_in_background
        self.prepared_bytes_a_wait = 0
        self.faults = faults if faults is not None else SimulatedFaults()
        self._history = AccessHistory(raise_on_violation=raise_on_violation)
        self._world = World(seed, self.faults, self._history)
        self.counts = self._world.counts
        self.wait_sites = self._world.wait_sites
        self.ordering_wait_sites = self._world.ordering_wait_sites
        self.ignored_wait_sites = self._world.ignored_wait_sites
        self.forwarding_files = self._world.forwarding_files
        self.io: SimulatedIo = SimulatedIo(self._world, num_io_threads)
        self._world.sources.append(self.io)
        self._streams: list[SimulatedStream] = []
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._arena = np.frombuffer(mmap.mmap(-1, arena_bytes, flags=flags), dtype=np.uint8)
        self._arena_used = 0
        self._memories: list[SimulatedMemory] = []

    @property
    def violations(self) -> list[Violation]:
        """What was found so far, one a kind and pair of call sites."""
        return self._history.violations

    @property
    def raise_on_violation(self) -> bool:
        """Whether a violation raises ViolationError where it is found."""
        return self._history.raise_on_violation

    @raise_on_violation.setter
    def raise_on_violation(self, value: bool) -> None:
        self._history.raise_on_violation = value

    def allocate(
        self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
    ) -> SimulatedMemory:
        """Memory full of junk, with a gap behind it."""
        self._world.check_open()
        assert num_bytes > 0, "an allocation needs at least one byte"
        start = self._arena_used
        num_left = len(self._arena) - start - num_bytes
        if num_left < 0:
            raise DeviceError(f"the simulated device has no {num_bytes:,} bytes left")
        max_bytes = num_bytes
        if is_growable:
            max_bytes += min((_GROWTH - 1) * num_bytes, num_left // 2)
        # At least one page lies between allocations, so that running over an end is noticed.
        self._arena_used = (start + max_bytes + 2 * _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
        num_ready = 0 if self._is_prepared_later(kind) else num_bytes
        reserved = self._arena[start : start + max_bytes]
        memory = SimulatedMemory(self, reserved, num_bytes, kind, num_ready)
        self._memories.append(memory)
        self._history.add(memory.address, num_ready)
        if not memory.is_host_reachable:
            self._world.hidden.append(range(memory.address, memory.address + max_bytes))
        return memory

    def _is_prepared_later(self, kind: MemoryKind) -> bool:
        return self.prepares_in_background and kind is MemoryKind.PINNED

    @property
    def num_unprepared_bytes(self) -> int:
        """What is left for ``prepare``."""
        return sum(memory.num_bytes - memory.num_ready_bytes for memory in self._memories)

    def prepare(self, num_bytes: int) -> int:
        """Make so many bytes more ready, memory by memory in the order of allocation; returns how
        many there were.
        """
        num_left = num_bytes
        for memory in self._memories:
            size = min(num_left, memory.num_bytes - memory.num_ready_bytes)
            if size > 0:
                memory._prepare(memory.num_ready_bytes + size)
                num_left -= size
        return num_bytes - num_left

    def reveal(self, hidden: DeviceBytes) -> npt.NDArray[np.uint8]:
        """Hidden bytes [num_rows, num_bytes], for a test to write and to look at."""
        size = hidden.stride_bytes * (hidden.num_rows - 1) + hidden.num_bytes
        start = hidden.address - self._arena.ctypes.data
        assert start >= 0 and start + size <= len(self._arena), "not memory of this device"
        shape, strides = (hidden.num_rows, hidden.num_bytes), (hidden.stride_bytes, 1)
        return np.lib.stride_tricks.as_strided(self._arena[start : start + size], shape, strides)

    def create_stream(self, name: str) -> SimulatedStream:
        """A new stream, ordered with no other."""
        self._world.check_open()
        stream = SimulatedStream(self._world, name, len(self._streams))
        self._streams.append(stream)
        self._world.sources.append(stream)
        return stream

    def wait_for_progress(self, timeout_s: float) -> None:
        """Run one to a few queued operations. Never sleeps: time is what the scheduler does."""
        self.prepare(self.prepared_bytes_a_wait)
        self.step(self._world.schedule.randint(1, _MAX_STEPS_PER_WAIT))

    def step(self, num_ops: int = 1) -> int:
        """Run up to ``num_ops`` queued operations in some legal order; how many there were."""
        return self._world.step(num_ops)

    def host_access(
        self, *, reads: Sequence[ByteRange] = (), writes: Sequence[ByteRange] = ()
    ) -> None:
        """Declare that the calling thread touches these bytes now, so that it is checked."""
        origin = self._world.origin("host access", self._world.host_clock)
        self._history.check_host(ranges_of(reads), ranges_of(writes), origin)

    def fail_next_submission(self, stream_name: str | None = None, num_times: int = 1) -> None:
        """Make the next submissions (on that stream, or on any) raise SubmissionError."""
        self._world.planned_failures[stream_name] += num_times

    def close(self) -> None:
        """Report leaks, run everything, free the memory. Idempotent.

        Raises DeviceError when work failed and no call has told so yet.
        """
        if self._world.is_closed:
            return
        leaks = list(self._leaks())
        self.faults.is_io_held = False
        self.io.close()
        self._world.run_until(lambda: all(stream.is_idle for stream in self._streams))
        self._world.is_closed = True
        for memory in self._memories:
            memory._is_freed = True
        self._memories.clear()
        for sentence, site in leaks:
            self._history.report(ViolationKind.LEAK, sentence, (site,))
        for stream in self._streams:
            stream.raise_unreported_failure()

    def _leaks(self) -> Iterator[tuple[str, CallSite]]:
        site = call_site()
        for stream in self._streams:
            num_ops = stream.num_unknown_ops()
            if num_ops:
                yield f"nobody waited for the last {num_ops} of stream {stream.name!r}", site
        num_batches = self.io.num_unknown_batches()
        if num_batches:
            yield f"nobody waited for {num_batches} I/O batches", site
        for memory in self._memories:
            sentence = f"{memory.num_bytes} bytes of {memory.allocated_at} were not freed"
            yield sentence, memory.allocated_at

    def _cut_off(self, memory: SimulatedMemory, num_bytes: int) -> None:
        # Work that has yet to say what it uses says so first: running it is legal at any time.
        self._world.run_until(lambda: not self._history.is_waiting)
        origin = self._world.origin("free", self._world.host_clock)
        self._history.cut_off(memory.address, num_bytes, origin)
