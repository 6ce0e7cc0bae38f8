"""What every device promises of its memory and of the work that fills it.

A part of ``DeviceConformance``, which is what one subclasses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.device.base import Device, Memory, MemoryKind, Stream
from coldpage.errors import ClosedError, DeviceError, SubmissionError
from coldpage.testing.memory_access import (
    allocate_ready,
    read_memory,
    wait_until_ready,
    write_memory,
)
from coldpage.types import ByteRange, MemAddress

__all__ = [
    "SLOW_S",
    "DeviceMemoryConformance",
    "byte_range",
    "copy_bytes",
    "fail",
    "filled_memory",
    "free_all",
    "random_bytes",
    "sleep_a_little",
]

_NUM_BYTES = 64 * 1024
_SIDES = [(dst, src) for dst in MemoryKind for src in MemoryKind]
# Long enough that a device which forgets to wait is caught, short enough not to be noticed.
SLOW_S = 0.02
_READY_S = 60.0


class DeviceMemoryConformance:
    """Tests of a device's memory, copies and uploads."""

    # More than a device prepares at once of a large memory, where it does so in the background.
    large_bytes: int = (32 << 20) + 4099

    def make_device(self) -> Device:
        """A new device."""
        raise NotImplementedError

    def check_closed_device(self, device: Device) -> None:
        """Called with each device after its ``close``."""

    def inject_submission_failure(self, device: Device) -> bool:
        """Make the next submission fail; False where that can not be arranged."""
        return False

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """The device under test, closed and checked afterwards."""
        device = self.make_device()
        yield device
        device.close()
        self.check_closed_device(device)

    # Memory

    def test_memory_is_aligned_writable_and_apart(self, device: Device) -> None:
        sizes = (1, 4097, 100_000)
        memories = [allocate_ready(device, n, kind) for n in sizes for kind in MemoryKind]
        for value, memory in enumerate(memories):
            assert memory.address % 4096 == 0
            write_memory(device, memory, value)
        for value, memory in enumerate(memories):
            assert read_memory(device, memory).tolist() == [value] * memory.num_bytes
            memory.free()

    @pytest.mark.parametrize("kind", MemoryKind)
    @pytest.mark.parametrize("is_growable", [False, True])
    def test_too_much_memory_is_refused(
        self, device: Device, kind: MemoryKind, is_growable: bool
    ) -> None:
        with pytest.raises(DeviceError):
            device.allocate(1 << 60, kind, is_growable=is_growable)
        memory = allocate_ready(device, 4096, kind)
        write_memory(device, memory, random_bytes(1, 4096))
        np.testing.assert_array_equal(read_memory(device, memory), random_bytes(1, 4096))
        memory.free()

    @pytest.mark.parametrize("kind", MemoryKind)
    @pytest.mark.parametrize("is_growable", [False, True])
    def test_memory_says_whether_the_host_reaches_it(
        self, device: Device, kind: MemoryKind, is_growable: bool
    ) -> None:
        memory = allocate_ready(device, 4096, kind, is_growable=is_growable)
        if memory.is_host_reachable:
            assert memory.array.shape == (4096,)
            assert memory.array.dtype == np.uint8
            assert memory.array.ctypes.data == memory.address
        else:
            assert kind is MemoryKind.DEVICE, "the host reaches pinned memory"
            with pytest.raises(DeviceError):
                _ = memory.array
        memory.free()
        with pytest.raises(ClosedError):
            _ = memory.array

    @pytest.mark.parametrize("kind", MemoryKind)
    def test_large_memory_gets_ready(self, device: Device, kind: MemoryKind) -> None:
        """Also what it grows by; from the start on, and what was ready once stays so."""
        first = self.large_bytes // 3
        memory = device.allocate(first, kind, is_growable=True)
        _watch_get_ready(device, memory)
        last = random_bytes(2, 100)
        write_memory(device, memory, last, first - 100)
        size = min(memory.max_bytes, self.large_bytes)
        memory.resize(size)
        assert memory.num_ready_bytes >= first
        _watch_get_ready(device, memory)
        stream = device.create_stream("ready")
        copy_bytes(stream, memory, size - 100, memory, first - 100, 100)
        stream.synchronize()
        memory.resize(first // 2)
        assert memory.num_ready_bytes == first // 2
        memory.resize(size)
        wait_until_ready(device, memory)
        write_memory(device, memory, last, size - 100)
        copy_bytes(stream, memory, first // 2 - 50, memory, size - 100, 100)
        stream.synchronize()
        found = allocate_ready(device, 100, MemoryKind.PINNED)
        copy_bytes(stream, found, 0, memory, first // 2 - 50, 100)
        stream.synchronize()
        np.testing.assert_array_equal(found.array, last)
        free_all(memory, found)

    @pytest.mark.parametrize("kind", MemoryKind)
    def test_one_copy_of_large_memory(self, device: Device, kind: MemoryKind) -> None:
        """However it was prepared, it is one range."""
        size = self.large_bytes
        src, dst = (allocate_ready(device, size, kind) for _ in range(2))
        edges = np.arange(0, size - 64, max(1, size // 97))
        for edge in edges.tolist():
            write_memory(device, src, random_bytes(edge, 64), edge)
        write_memory(device, dst, 0, size - 4096)
        stream = device.create_stream("large")
        copy_bytes(stream, dst, 0, src, 0, size)
        stream.synchronize()
        part = allocate_ready(device, 64, MemoryKind.PINNED)
        for edge in edges.tolist():
            copy_bytes(stream, part, 0, dst, edge, 64)
            stream.synchronize()
            np.testing.assert_array_equal(part.array, random_bytes(edge, 64))
        free_all(src, dst, part)

    def test_memory_that_is_still_getting_ready_can_be_freed(self, device: Device) -> None:
        for _ in range(3):
            memory = device.allocate(self.large_bytes, MemoryKind.PINNED, is_growable=True)
            memory.resize(memory.num_bytes // 2)
            memory.free()
        device.allocate(self.large_bytes, MemoryKind.PINNED)  # for the device to free

    # Copies

    @pytest.mark.parametrize(("to", "source"), _SIDES)
    @pytest.mark.parametrize("seed", range(2))
    def test_copies_of_any_size_and_alignment(
        self, device: Device, seed: int, to: MemoryKind, source: MemoryKind
    ) -> None:
        rng = np.random.default_rng(seed)
        src, dst = filled_memory(device, seed, source), filled_memory(device, seed + 100, to)
        before, expected = read_memory(device, src), read_memory(device, dst)
        sizes = rng.integers(0, 1500, size=64)
        starts = np.concatenate(([0], np.cumsum(sizes + rng.integers(0, 40, size=64))))[:-1]
        sources = rng.integers(0, _NUM_BYTES - 1500, size=64)
        for start, origin, size in zip(starts, sources, sizes, strict=True):
            expected[start : start + size] = before[origin : origin + size]
        stream = device.create_stream("copy")
        stream.copy(dst.address + starts, src.address + sources, sizes)
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, dst), expected)
        np.testing.assert_array_equal(read_memory(device, src), before)
        free_all(src, dst)

    def test_neighbouring_copies(self, device: Device) -> None:
        src, dst = filled_memory(device, 1), filled_memory(device, 2)
        starts = np.arange(0, 8 * 512, 512)
        order = np.array([0, 1, 2, 5, 6, 4, 7, 3])
        expected = read_memory(device, dst)
        expected[: 8 * 512] = read_memory(device, src)[: 8 * 512].reshape(8, 512)[order].reshape(-1)
        stream = device.create_stream("copy")
        stream.copy(dst.address + starts, src.address + starts[order], np.full(8, 512))
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, dst), expected)
        free_all(src, dst)

    def test_nothing_to_copy(self, device: Device) -> None:
        stream = device.create_stream("copy")
        none = np.zeros(0, dtype=np.int64)
        stream.copy(none, none, none)
        stream.synchronize()

    def test_copy_consumes_its_arrays(self, device: Device) -> None:
        src, dst = filled_memory(device, 1), filled_memory(device, 2)
        expected = read_memory(device, src)[:100]
        stream = device.create_stream("copy")
        stream.launch(sleep_a_little, reads=(), writes=())
        arrays = [np.array([value]) for value in (dst.address, src.address, 100)]
        stream.copy(*arrays)
        for array in arrays:
            array[:] = 0
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, dst)[:100], expected)
        free_all(src, dst)

    # Growable memory

    def test_memory_that_is_not_growable_shrinks_at_most(self, device: Device) -> None:
        memory = device.allocate(_NUM_BYTES, MemoryKind.DEVICE)
        assert memory.max_bytes == _NUM_BYTES
        with pytest.raises(DeviceError):
            memory.resize(_NUM_BYTES + 1)
        assert memory.num_bytes == len(read_memory(device, memory)) == _NUM_BYTES
        memory.resize(100)
        assert memory.num_bytes == len(read_memory(device, memory)) == 100
        memory.free()

    @pytest.mark.parametrize("kind", MemoryKind)
    @pytest.mark.parametrize("num_bytes", [1, 4096, 10_000, 5 << 20])
    def test_resized_memory_stays_where_it_is(
        self, device: Device, kind: MemoryKind, num_bytes: int
    ) -> None:
        memory = allocate_ready(device, num_bytes, kind, is_growable=True)
        behind = allocate_ready(device, 4096, kind)
        write_memory(device, behind, 77)
        address, limit = memory.address, memory.max_bytes
        assert address % 4096 == 0
        assert limit >= num_bytes
        sizes = [min(limit, 3 * num_bytes + 5), num_bytes, num_bytes // 2 + 1, num_bytes]
        expected = np.zeros(0, dtype=np.uint8)
        for seed, size in enumerate([num_bytes, *sizes]):
            memory.resize(size)
            wait_until_ready(device, memory)
            kept = expected[:size]
            assert (memory.address, memory.num_bytes, memory.max_bytes) == (address, size, limit)
            found = read_memory(device, memory)
            assert found.shape == (size,)
            np.testing.assert_array_equal(found[: len(kept)], kept)
            expected = random_bytes(seed, size)
            write_memory(device, memory, expected)
        assert (read_memory(device, behind) == 77).all()
        free_all(memory, behind)

    def test_copies_reach_what_has_grown(self, device: Device) -> None:
        memory = device.allocate(8192, MemoryKind.DEVICE, is_growable=True)
        size = min(memory.max_bytes, 16384)
        memory.resize(4096)
        write_memory(device, memory, random_bytes(1, 4096))
        memory.resize(size)
        stream = device.create_stream("grown")
        copy_bytes(stream, memory, size - 4096, memory, 0, 4096)
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, memory)[-4096:], random_bytes(1, 4096))
        memory.free()

    def test_growing_too_far_changes_nothing(self, device: Device) -> None:
        memory = device.allocate(_NUM_BYTES, MemoryKind.DEVICE, is_growable=True)
        expected = random_bytes(1, _NUM_BYTES)
        write_memory(device, memory, expected)
        for size in (memory.max_bytes + 1, 1 << 60):
            with pytest.raises(DeviceError):
                memory.resize(size)
        assert memory.num_bytes == _NUM_BYTES
        np.testing.assert_array_equal(read_memory(device, memory), expected)
        memory.free()

    def test_freed_memory_is_not_resized(self, device: Device) -> None:
        memory = device.allocate(8192, MemoryKind.DEVICE, is_growable=True)
        memory.free()
        memory.free()
        with pytest.raises(ClosedError):
            memory.resize(4096)

    # Uploads

    @pytest.mark.parametrize("kind", MemoryKind)
    @pytest.mark.parametrize("size", [0, 1, 4095, 50_000])
    def test_an_upload_consumes_its_array(
        self, device: Device, size: int, kind: MemoryKind
    ) -> None:
        dst = filled_memory(device, 1, kind)
        expected = read_memory(device, dst)
        expected[33 : 33 + size] = random_bytes(2, size)
        stream = device.create_stream("upload")
        stream.launch(sleep_a_little, reads=(), writes=())
        data = random_bytes(2, size)
        stream.upload(MemAddress(dst.address + 33), data)
        data[:] = 0
        del data
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, dst), expected)
        dst.free()

    def test_an_upload_of_strided_bytes(self, device: Device) -> None:
        dst = filled_memory(device, 1)
        data = random_bytes(2, 600)[::3]
        stream = device.create_stream("upload")
        stream.upload(dst.address, data)
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, dst)[:200], data)
        dst.free()

    def test_uploads_keep_their_place_on_the_stream(self, device: Device) -> None:
        memory = device.allocate(4096, MemoryKind.DEVICE)
        stream = device.create_stream("upload")
        for value in range(1, 21):
            stream.upload(memory.address, np.full(16, value, dtype=np.uint8))
            copy_bytes(stream, memory, 16 * value, memory, 0, 16)
        stream.synchronize()
        assert read_memory(device, memory)[16 : 16 * 21 : 16].tolist() == list(range(1, 21))
        memory.free()

    def test_a_refused_upload_enqueues_nothing(self, device: Device) -> None:
        if not self.inject_submission_failure(device):
            pytest.skip("this device can not be made to refuse work")
        dst = filled_memory(device, 1)
        expected = read_memory(device, dst)
        stream = device.create_stream("refused")
        with pytest.raises(SubmissionError):
            stream.upload(dst.address, np.zeros(16, dtype=np.uint8))
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, dst), expected)
        dst.free()

    # Ranges that are known late

    def test_ranges_are_named_after_earlier_work(self, device: Device) -> None:
        """The work follows an index that an upload before it has brought to the device."""
        index = filled_memory(device, 1, MemoryKind.PINNED)
        pages = filled_memory(device, 2, MemoryKind.PINNED)
        index.array[:8] = 0
        expected = pages.array.copy()
        expected[4096:4112] = pages.array[8192:8208]
        array, page_array = index.array, pages.array
        stream = device.create_stream("late")

        def pair() -> tuple[int, int]:
            dst, src = array[:8].view(np.int32).tolist()
            assert (dst, src) == (1, 2), "asked before the upload ran"
            return 4096 * dst, 4096 * src

        def reads() -> Sequence[ByteRange]:
            return [byte_range(index, 0, 8), byte_range(pages, pair()[1], 16)]

        def work() -> None:
            dst, src = pair()
            page_array[dst : dst + 16] = page_array[src : src + 16]

        stream.launch(sleep_a_little, reads=(), writes=())
        stream.upload(index.address, np.array([1, 2], dtype=np.int32).view(np.uint8))
        stream.launch(work, reads=reads, writes=lambda: [byte_range(pages, pair()[0], 16)])
        stream.upload(index.address, np.zeros(8, dtype=np.uint8))
        stream.synchronize()
        np.testing.assert_array_equal(pages.array, expected)
        free_all(index, pages)

    def test_work_with_late_ranges_poisons_its_stream(self, device: Device) -> None:
        stream = device.create_stream("late")
        seen: list[int] = []
        stream.launch(fail, reads=tuple, writes=tuple)  # type: ignore[arg-type]
        stream.launch(lambda: seen.append(1), reads=tuple, writes=())
        with pytest.raises(DeviceError) as raised:
            stream.synchronize()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert seen == []

    def test_an_upload_to_a_poisoned_stream_is_refused(self, device: Device) -> None:
        dst = filled_memory(device, 1)
        stream = device.create_stream("poisoned")
        stream.launch(fail, reads=(), writes=())  # type: ignore[arg-type]
        with pytest.raises(DeviceError):
            stream.synchronize()
        with pytest.raises(DeviceError):
            stream.upload(dst.address, np.zeros(1, dtype=np.uint8))
        dst.free()


def filled_memory(device: Device, seed: int, kind: MemoryKind = MemoryKind.DEVICE) -> Memory:
    """New memory with random bytes."""
    memory = allocate_ready(device, _NUM_BYTES, kind)
    write_memory(device, memory, random_bytes(seed, _NUM_BYTES))
    return memory


def free_all(*memories: Memory) -> None:
    """Free each of them."""
    for memory in memories:
        memory.free()


def byte_range(memory: Memory, start: int, num_bytes: int) -> ByteRange:
    """Some bytes of the memory."""
    return ByteRange(MemAddress(memory.address + start), num_bytes)


def copy_bytes(
    stream: Stream, dst: Memory, to: int, src: Memory, start: int, num_bytes: int
) -> None:
    """Enqueue one copy."""
    stream.copy(
        np.array([dst.address + to]), np.array([src.address + start]), np.array([num_bytes])
    )


def sleep_a_little() -> None:
    """Work that takes its time."""
    time.sleep(SLOW_S)


def fail() -> bool:
    """Work that raises."""
    return bool(1 // 0)


def random_bytes(seed: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The same bytes for the same seed, [num_bytes]."""
    return np.random.default_rng(seed).integers(0, 256, size=num_bytes, dtype=np.uint8)


def _watch_get_ready(device: Device, memory: Memory) -> None:
    deadline = time.monotonic() + _READY_S
    ready = memory.num_ready_bytes
    while ready < memory.num_bytes:
        device.wait_for_progress(0.001)
        assert ready <= memory.num_ready_bytes <= memory.num_bytes
        ready = memory.num_ready_bytes
        assert time.monotonic() < deadline, "the memory never gets ready"
    assert ready == memory.num_bytes
