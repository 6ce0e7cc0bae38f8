"""Pages between a GPU and the host, byte for byte, over both paths of the default codec."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from coldpage.device.base import Device, MemoryKind
from coldpage.device.cuda import CudaDevice
from coldpage.errors import DeviceError
from coldpage.testing.memory_access import allocate_ready, read_memory, write_memory
from tests.gpu.page_rig import PATHS, PageRig

pytestmark = pytest.mark.gpu

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

# A stream that is held back waits this long for a test that has failed meanwhile.
_GATE_S = 20.0

_paths = pytest.mark.parametrize("path", PATHS)


# ---------------------------------------------------------------------- bytes


@_paths
@pytest.mark.parametrize(
    "slot_bytes",
    [
        4 * _KIB,
        4099,
        16 * _KIB,
        32 * _KIB + 8,
        64 * _KIB,
        100_003,
        128 * _KIB + 2,
        256 * _KIB,
        _MIB,
        _MIB + 4,
        4 * _MIB,
    ],
)
def test_pages_of_any_size_come_back(device: Device, path: str, slot_bytes: int) -> None:
    num_slots = min(1000, max(6, 24 * _MIB // slot_bytes))
    rig = PageRig(device, path, [slot_bytes], num_slots)
    for seed, num_pages in enumerate((num_slots // 2, 1, num_slots)):
        rig.check_round_trip(num_pages, seed)
    rig.close()


@_paths
@pytest.mark.parametrize("offset_bytes", [0, 1, 2, 4, 8, 16, 24])
@pytest.mark.parametrize("slot_bytes", [(4 * _KIB, 16 * _KIB), (4099, 7, 4096, 100_003, 1)])
def test_pages_of_several_pools_at_any_address_come_back(
    device: Device, path: str, slot_bytes: tuple[int, ...], offset_bytes: int
) -> None:
    rig = PageRig(device, path, slot_bytes, 50, offset_bytes)
    rig.check_round_trip(31)
    rig.close()


@_paths
def test_many_scattered_pages_come_back(device: Device, path: str) -> None:
    """65,536 pages in one batch, with more slots between them: no two need be neighbours."""
    rig = PageRig(device, path, [4 * _KIB], 2 * 65_536)
    rig.check_round_trip(65_536)
    rig.close()


@_paths
def test_neighbours_in_order_come_back(device: Device, path: str) -> None:
    """Whole runs of slots, which a device may copy in one piece."""
    rig = PageRig(device, path, [8 * _KIB, 4 * _KIB], 600)
    original = rig.fill_hot(1)
    order = np.concatenate([np.arange(100, 400), np.arange(99, -1, -1), [599, 598, 400]])
    rig.encode(order, order)
    rig.stream.synchronize()
    expected = np.concatenate([pool[order] for pool in original], axis=1)
    assert np.array_equal(rig.cold_pages[order], expected)
    rig.decode(order[::-1].copy(), order)
    rig.stream.synchronize()
    for pool, found in zip(original, rig.read_hot(), strict=True):
        assert np.array_equal(found[order[::-1]], pool[order])
    rig.close()


@_paths
def test_slots_beyond_four_gibibytes(device: Device, path: str) -> None:
    slot_bytes = 64 * _KIB
    num_slots = (4 * _GIB + 256 * _MIB) // slot_bytes
    rig = PageRig(device, path, [slot_bytes], num_slots)
    far, near = num_slots - np.array([1, 9, 2000]), np.array([0, 5, 3])
    pages = np.random.default_rng(1).integers(0, 256, (3, slot_bytes), np.uint8)
    for slot, page in zip(far.tolist(), pages, strict=True):
        write_memory(device, rig.pools[0], page, slot * slot_bytes)
    rig.encode(far - 7, far)
    rig.decode(near, far - 7)
    rig.decode(far - 3000, far - 7)
    rig.encode(near + 20, near)
    rig.encode(near + 30, far - 3000)
    rig.stream.synchronize()
    for cold in (far - 7, near + 20, near + 30):
        assert np.array_equal(rig.cold_pages[cold], pages)
    rig.close()


@_paths
def test_both_directions_at_once(device: Device, path: str) -> None:
    """Each on its own stream, in the same pools and cold pages, but not the same slots."""
    num_slots = 512
    rig = PageRig(device, path, [24 * _KIB, 8 * _KIB], num_slots)
    other = device.create_stream("other")
    order = np.random.default_rng(4).permutation(num_slots)
    down, up = order[:200], order[200:400]
    original = rig.fill_hot(3)
    rng = np.random.default_rng(5)
    rig.cold_pages[:] = rng.integers(0, 256, rig.cold_pages.shape, np.uint8)
    cold = rig.cold_pages.copy()
    for _ in range(4):
        rig.encode(down, down, rig.stream)
        rig.decode(up, up, other)
    rig.stream.synchronize()
    other.synchronize()
    cold[down] = np.concatenate([pool[down] for pool in original], axis=1)
    assert np.array_equal(rig.cold_pages, cold)
    start = 0
    for pool, found in zip(original, rig.read_hot(), strict=True):
        pool[up] = cold[up, start : start + pool.shape[1]]
        assert np.array_equal(found, pool)
        start += pool.shape[1]
    rig.close()


@_paths
@pytest.mark.parametrize("handle", [0, 1, 2])
@pytest.mark.parametrize("slot_bytes", [(64 * _KIB, 4099), (_MIB,)])
def test_default_streams_of_somebody_else_move_pages(
    device: Device, path: str, handle: int, slot_bytes: tuple[int, ...]
) -> None:
    """The legacy default stream by both handles, and that of the thread."""
    assert isinstance(device, CudaDevice)
    rig = PageRig(device, path, slot_bytes, 40)
    stream = device.wrap_stream(handle, "default")
    original = rig.fill_hot(6)
    slots = np.arange(40)
    rig.encode(slots, slots[::-1], stream)
    rig.decode(slots, slots, stream)
    stream.synchronize()
    for pool, found in zip(original, rig.read_hot(), strict=True):
        assert np.array_equal(found, pool[::-1])
    rig.close()


def test_a_copy_out_of_two_neighbours(device: Device) -> None:
    """Pinned memories that lie side by side were registered apart."""
    size = 8 * _MIB
    memories = [allocate_ready(device, size, MemoryKind.PINNED) for _ in range(8)]
    by_address = {memory.address: memory for memory in memories}
    pairs = [(m, by_address[m.address + size]) for m in memories if m.address + size in by_address]
    if not pairs:
        pytest.skip("the kernel put no two memories side by side")
    first, second = pairs[0]
    first.array[:], second.array[:] = 1, 2
    out = allocate_ready(device, 2 * size, MemoryKind.DEVICE)
    stream = device.create_stream("copies")
    stream.copy(np.array([out.address]), np.array([first.address]), np.array([2 * size]))
    stream.synchronize()
    found = read_memory(device, out)
    assert (found[:size] == 1).all()
    assert (found[size:] == 2).all()
    for memory in (out, *memories):
        memory.free()


@pytest.mark.parametrize("slot_bytes", [(4096,), (100_003, 16), (_MIB,)])
def test_the_paths_read_each_others_pages(device: Device, slot_bytes: tuple[int, ...]) -> None:
    kernel, driver = (PageRig(device, path, slot_bytes, 20) for path in ("kernel", "driver"))
    slots = np.arange(20)
    for one, two in ((kernel, driver), (driver, kernel)):
        original = one.fill_hot(7)
        one.encode(slots, slots[::-1])
        one.stream.synchronize()
        two.cold.array[:] = one.cold.array
        two.decode(slots[::-1], slots)
        two.stream.synchronize()
        for pool, found in zip(original, two.read_hot(), strict=True):
            assert np.array_equal(found, pool)
    assert kernel.codec.identity == driver.codec.identity
    kernel.close()
    driver.close()


# ---------------------------------------------------------------------- order


class _Gate:
    """Work that keeps a stream waiting until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.was_opened: list[bool] = []

    def wait(self) -> None:
        self.was_opened.append(self._opened.wait(_GATE_S))

    def open(self) -> None:
        self._opened.set()


@_paths
def test_nothing_is_seen_before_the_gate_opens(device: Device, path: str) -> None:
    """A stream that is held back moves pages down; another waits for it and moves them on."""
    rig = PageRig(device, path, [16 * _KIB], 64)
    consumer, aside = device.create_stream("consumer"), device.create_stream("aside")
    slots = np.arange(32)
    out = allocate_ready(device, 64 * 16 * _KIB, MemoryKind.PINNED)
    beside = allocate_ready(device, 4096, MemoryKind.PINNED)
    rig.check_round_trip(32)  # kernels are compiled and loaded: that may wait for all streams
    (original,) = rig.fill_hot(2)
    rig.cold.array[:] = out.array[:] = beside.array[:] = 0
    gate = _Gate()
    rig.stream.launch(gate.wait, reads=(), writes=())
    try:
        rig.encode(slots, slots[::-1])
        rig.decode(slots + 32, slots)
        event = rig.stream.record()
        consumer.wait(event)
        consumer.copy(
            np.array([out.address]), np.array([rig.cold_base]), np.array([32 * rig.page_bytes])
        )
        seen = consumer.record()
        # What does not wait for the event goes on meanwhile.
        aside.copy(np.array([beside.address]), np.array([rig.pools[0].address]), np.array([4096]))
        aside.synchronize()
        assert beside.array.tobytes() == original[0, :4096].tobytes()
        time.sleep(0.1)
        assert not event.is_done()
        assert not seen.is_done()
        assert not rig.cold.array.any()
        assert not out.array.any()
    finally:
        gate.open()
    seen.synchronize()
    assert event.is_done()
    assert gate.was_opened == [True]
    expected = original[slots[::-1]].tobytes()
    assert out.array[: len(expected)].tobytes() == expected
    (found,) = rig.read_hot()
    assert np.array_equal(found[32:], original[slots[::-1]])
    assert np.array_equal(found[:32], original[:32])
    rig.close()
    for memory in (out, beside):
        memory.free()


@_paths
def test_index_arrays_outlive_a_stream_that_is_held_back(device: Device, path: str) -> None:
    """More batches than the ring of indices has room for, all enqueued while nothing runs."""
    num_slots, num_batches = 4096, 12
    rig = PageRig(device, path, [512], num_slots)
    rig.check_round_trip(num_slots)
    (original,) = rig.fill_hot(3)
    rig.cold.array[:] = 0
    rng = np.random.default_rng(1)
    gate = _Gate()
    rig.stream.launch(gate.wait, reads=(), writes=())
    timer = threading.Timer(0.3, gate.open)
    timer.start()
    expected = np.zeros((num_slots, 512), np.uint8)
    for _ in range(num_batches):
        cold, hot = rng.permutation(num_slots), rng.permutation(num_slots)
        rig.encode(cold, hot)
        expected[cold] = original[hot]
    rig.stream.synchronize()
    timer.join()
    assert gate.was_opened == [True]
    assert np.array_equal(rig.cold_pages, expected)
    rig.close()


def test_one_host_function_that_waits_holds_no_other_device_work(device: Device) -> None:
    first, second = device.create_stream("first"), device.create_stream("second")
    memory = allocate_ready(device, _MIB, MemoryKind.DEVICE)
    write_memory(device, memory, 5)
    gate = _Gate()
    first.launch(gate.wait, reads=(), writes=())
    held = first.record()
    second.upload(memory.address, np.arange(100, dtype=np.uint8))
    second.synchronize()
    assert not held.is_done()
    gate.open()
    held.synchronize()
    assert gate.was_opened == [True]
    assert read_memory(device, memory)[:101].tolist() == [*range(100), 5]
    memory.free()


# ---------------------------------------------------------------------- failure


def _device_memory_without_end(device: Device) -> None:
    device.allocate(1 << 50, MemoryKind.DEVICE)


def _host_memory_without_end(device: Device) -> None:
    device.allocate(1 << 50, MemoryKind.PINNED)


def _a_little_more_than_there_is(device: Device) -> None:
    memories = []
    try:
        while len(memories) < 64:  # 1 TiB: more than any GPU has
            memories.append(device.allocate(16 * _GIB, MemoryKind.DEVICE))
    finally:
        for memory in memories:
            memory.free()


def _growth_beyond_what_there_is(device: Device) -> None:
    memory = device.allocate(4 * _GIB, MemoryKind.DEVICE, is_growable=True)
    write_memory(device, memory, np.arange(200, dtype=np.uint8))
    write_memory(device, memory, np.arange(200, dtype=np.uint8), 4 * _GIB - 200)
    try:
        memory.resize(memory.max_bytes)  # all of the GPU, of which something else has a part
    finally:
        assert memory.num_bytes == 4 * _GIB
        found = allocate_ready(device, 400, MemoryKind.PINNED)
        stream = device.create_stream("check")
        ends = np.array([memory.address, memory.address + 4 * _GIB - 200])
        stream.copy(found.address + np.array([0, 200]), ends, np.array([200, 200]))
        stream.synchronize()
        assert found.array.tolist() == [*range(200), *range(200)]
        memory.free()
        found.free()


@pytest.mark.parametrize(
    "fail",
    [
        _device_memory_without_end,
        _host_memory_without_end,
        _a_little_more_than_there_is,
        _growth_beyond_what_there_is,
    ],
)
def test_memory_that_there_is_not_is_refused_and_the_device_goes_on(
    device: Device, fail: Callable[[Device], None]
) -> None:
    for path in PATHS:
        with pytest.raises(DeviceError):
            fail(device)
        rig = PageRig(device, path, [4096, 4099], 40)
        rig.check_round_trip(17)
        rig.close()
