"""What the CUDA device does around the driver's calls; the calls themselves need a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.device.base import MemoryKind
from coldpage.device.copies import CopyList
from coldpage.device.cuda import CudaDevice, memory
from coldpage.device.cuda.copies import (
    BATCH_BYTES,
    KERNEL_MAX_BYTES,
    MIN_BATCH_COPIES,
    kernel_share,
    split_at,
    split_batches,
)
from coldpage.device.cuda.driver import Driver, DriverError
from coldpage.device.cuda.memory import PinnedMemory
from coldpage.errors import ClosedError, DeviceError, SubmissionError
from coldpage.types import Int64Array
from tests.unit.fake_cuda import FakeCuda

MIB = 1 << 20


@pytest.fixture
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(library: FakeCuda) -> Iterator[CudaDevice]:
    device = CudaDevice(0, driver=Driver(library))
    yield device
    device.close()
    assert library.context_depth == 0
    assert not library.mapped
    assert not library.registered
    assert not library.handles
    assert library.calls["cuEventCreate"] == library.calls["cuEventDestroy_v2"]
    assert library.calls["cuStreamCreate"] == library.calls["cuStreamDestroy_v2"]


def _array(*values: int) -> Int64Array:
    return np.array(values, np.int64)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


# Copies


def _bytes(copies: CopyList) -> set[tuple[int, int]]:
    rows = zip(*(column.tolist() for column in copies), strict=True)
    return {(to + i, source + i) for to, source, size in rows for i in range(size)}


@given(
    st.lists(st.tuples(*(st.integers(0, 80),) * 2, st.integers(1, 40)), min_size=1, max_size=8),
    st.sets(st.integers(1, 120), max_size=6),
)
def test_no_copy_reaches_across_a_boundary(rows: list[tuple[int, int, int]], at: set[int]) -> None:
    copies: CopyList = tuple(np.array(rows, np.int64).T)  # type: ignore[assignment]
    boundaries = np.array(sorted(at), np.int64)
    dst, src, sizes = split_at(copies, boundaries)
    assert _bytes((dst, src, sizes)) == _bytes(copies)
    assert int(sizes.sum()) == int(copies[2].sum())
    for start in (dst, src):
        assert not ((start[:, None] < boundaries) & (boundaries < (start + sizes)[:, None])).any()


@given(
    st.lists(st.integers(1, 3 * BATCH_BYTES), min_size=1, max_size=60),
    st.sampled_from([1, 3, 64]),
)
def test_batches_cover_the_copies_in_order(some: list[int], num_times: int) -> None:
    sizes = some * num_times
    runs = split_batches(np.array(sizes, np.int64))
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(sizes)))
    assert all(run.stop > run.start for run in runs)
    # As many as there are bytes for, and copies for.
    assert len(runs) <= max(1, len(sizes) // MIN_BATCH_COPIES)
    assert len(runs) <= max(1, sum(sizes) / BATCH_BYTES + 0.5)


def test_many_small_copies_are_submitted_bit_by_bit() -> None:
    sizes = np.full(4096, 256 * 1024, np.int64)
    assert {run.stop - run.start for run in split_batches(sizes)} == {64}
    sizes = np.full(2048, 2 * MIB, np.int64)
    assert {run.stop - run.start for run in split_batches(sizes)} == {64}
    assert len(split_batches(sizes[:100])) == 1


def test_the_kernel_has_what_the_driver_is_slow_at() -> None:
    for is_upload in (True, False):
        assert kernel_share(4096, is_upload=is_upload).fraction == 1.0
        assert kernel_share(KERNEL_MAX_BYTES, is_upload=is_upload).fraction < 1.0
        assert kernel_share(64 * MIB, is_upload=is_upload).fraction == 1.0  # when told to


@pytest.mark.parametrize(("version", "num_arguments"), [(12080, 9), (13000, 8), (13010, 8)])
def test_batches_are_called_as_the_driver_has_them(version: int, num_arguments: int) -> None:
    library = FakeCuda(version)
    device = CudaDevice(0, driver=Driver(library))
    stream = device.create_stream("copies")
    stream.copy(_array(1000, 3000), _array(5000, 9000), _array(16, 32))
    (arguments,) = library.arguments["cuMemcpyBatchAsync"]
    assert len(arguments) == num_arguments
    assert arguments[3] == 2
    assert arguments[-1] == stream.handle
    device.close()


@pytest.mark.parametrize("is_old", [True, False])
def test_without_batches_copies_go_one_by_one(is_old: bool) -> None:
    library = FakeCuda(12070 if is_old else 13000)
    device = CudaDevice(0, driver=Driver(library), is_batched=is_old)
    stream = device.create_stream("copies")
    stream.copy(_array(1000, 3000, 7), _array(5000, 9000, 7), _array(16, 32, 0))
    assert library.arguments["cuMemcpyAsync"] == [
        (1000, 5000, 16, stream.handle),
        (3000, 9000, 32, stream.handle),
    ]
    stream.upload(device.allocate(8192, MemoryKind.DEVICE).address, np.ones(9000, np.uint8))
    assert library.calls["cuLaunchKernel"] == 3  # in segments of 4,000 bytes
    assert library.calls["cuMemcpyBatchAsync"] == 0
    device.close()


def test_a_refused_copy_names_the_drivers_error(device: CudaDevice, library: FakeCuda) -> None:
    stream = device.create_stream("copies")
    library.fail("cuMemcpyBatchAsync")
    with pytest.raises(SubmissionError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        stream.copy(_array(1000), _array(5000), _array(16))
    stream.copy(_array(1000), _array(5000), _array(16))


def test_copies_between_places_of_the_host_do_not_go_to_the_driver(
    device: CudaDevice, library: FakeCuda
) -> None:
    """It would hold the caller until it is their turn."""
    one, two = (device.allocate(8192, MemoryKind.PINNED) for _ in range(2))
    one.array[:], two.array[:] = 1, 2
    stream = device.create_stream("copies")
    stream.copy(
        _array(two.address + 5, 1 << 50), _array(one.address + 9, one.address), _array(100, 32)
    )
    assert two.array.tolist() == [2] * 5 + [1] * 100 + [2] * (8192 - 105)
    assert library.calls["cuLaunchHostFunc"] == 1
    (arguments,) = library.arguments["cuMemcpyBatchAsync"]
    assert arguments[3] == 1


# Every code is checked


def test_an_error_has_the_drivers_name(library: FakeCuda) -> None:
    driver = Driver(library)
    library.fail("cuStreamCreate")
    with pytest.raises(DriverError, match="cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY") as raised:
        driver.create_stream()
    assert raised.value.name == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_device_that_is_not_there(library: FakeCuda) -> None:
    with pytest.raises(DeviceError, match="no CUDA device 2: this machine has 2"):
        CudaDevice(2, driver=Driver(library))


# Device memory


def test_memory_grows_in_blocks_and_gives_them_back(device: CudaDevice, library: FakeCuda) -> None:
    grown = device.allocate(256 * MIB, MemoryKind.DEVICE, is_growable=True)
    address, num_blocks = grown.address, len(library.mapped)
    grown.resize(512 * MIB)
    assert len(library.mapped) == 2 * num_blocks
    grown.resize(MIB)
    assert len(library.mapped) == 1
    assert grown.address == address
    with pytest.raises(DeviceError, match="bytes of addresses were set aside"):
        grown.resize(grown.max_bytes + 1)
    assert grown.num_bytes == MIB


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_growth_that_fails_half_way_changes_nothing(
    device: CudaDevice, library: FakeCuda, call: str
) -> None:
    grown = device.allocate(64 * MIB, MemoryKind.DEVICE, is_growable=True)
    before = dict(library.mapped)
    library.fail(call, after=5)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        grown.resize(256 * MIB)
    assert library.mapped == before
    assert grown.num_bytes == 64 * MIB
    grown.resize(256 * MIB)


def test_an_allocation_that_fails_leaves_no_addresses(
    device: CudaDevice, library: FakeCuda
) -> None:
    library.fail("cuMemCreate")
    with pytest.raises(DeviceError, match="make the device tiers smaller"):
        device.allocate(MIB, MemoryKind.DEVICE)
    assert library.calls["cuMemAddressFree"] == library.calls["cuMemAddressReserve"] == 1


# Host memory


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIECE_BYTES", MIB)


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_is_locked_in_pieces(device: CudaDevice, library: FakeCuda) -> None:
    pinned = device.allocate(5 * MIB + 10, MemoryKind.PINNED)
    assert pinned.num_ready_bytes >= MIB
    _wait_for(lambda: pinned.num_ready_bytes == pinned.num_bytes)
    starts = sorted(library.registered)
    assert starts == [pinned.address + i * MIB for i in range(6)]
    assert library.registered[starts[-1]] == 4096
    assert device.runtime.registrar.boundaries.tolist() == starts[1:]
    assert device.runtime.registrar.is_pinned(pinned.address)
    stream = device.create_stream("copies")
    stream.copy(_array(1 << 50), _array(pinned.address + MIB - 100), _array(300))
    assert library.arguments["cuMemcpyBatchAsync"][0][3] == 2


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_that_shrinks_and_grows(device: CudaDevice, library: FakeCuda) -> None:
    pinned = device.allocate(4 * MIB, MemoryKind.PINNED, is_growable=True)
    _wait_for(lambda: pinned.num_ready_bytes == pinned.num_bytes)
    pinned.array[:] = 7
    pinned.resize(MIB + 5)
    assert len(library.registered) == 2
    assert pinned.num_ready_bytes == pinned.num_bytes == MIB + 5
    assert (pinned.array == 7).all()
    pinned.resize(3 * MIB)
    _wait_for(lambda: pinned.num_ready_bytes == 3 * MIB)
    assert (pinned.array[: MIB + 5] == 7).all()
    pinned.free()
    assert not library.registered
    with pytest.raises(ClosedError):
        pinned.resize(MIB)


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_can_not_be_locked_leaves_the_others(
    device: CudaDevice, library: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    library.fail("cuMemHostRegister_v2", after=2)
    with caplog.at_level(logging.ERROR):
        pinned = device.allocate(5 * MIB, MemoryKind.PINNED)
        _wait_for(lambda: bool(caplog.records))
    assert pinned.num_ready_bytes == 2 * MIB
    assert "only 2,097,152 of 5,242,880 bytes" in caplog.text
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    # What comes later is locked all the same.
    other = device.allocate(2 * MIB, MemoryKind.PINNED)
    _wait_for(lambda: other.num_ready_bytes == other.num_bytes)


def test_host_memory_of_which_nothing_can_be_locked(device: CudaDevice, library: FakeCuda) -> None:
    library.fail("cuMemHostRegister_v2")
    with pytest.raises(DeviceError, match="raise the limit of locked memory"):
        device.allocate(MIB, MemoryKind.PINNED)
    with pytest.raises(DeviceError, match="bytes of RAM"):
        device.allocate(1 << 50, MemoryKind.PINNED)


@pytest.mark.usefixtures("small_pieces")
def test_closing_does_not_wait_for_the_last_piece() -> None:
    library = FakeCuda()
    device = CudaDevice(0, driver=Driver(library))
    library._do_cuMemHostRegister_v2 = lambda *args: time.sleep(0.02)  # type: ignore[method-assign]
    library._do_cuMemHostUnregister = lambda *args: None  # type: ignore[method-assign]
    pinned = device.allocate(1024 * MIB, MemoryKind.PINNED)
    assert isinstance(pinned, PinnedMemory)
    start_s = time.monotonic()
    device.close()
    assert time.monotonic() - start_s < 5
    assert library.calls["cuMemHostRegister_v2"] < 500


# Events


def test_an_events_handle_is_not_used_again_before_it_is_done(
    device: CudaDevice, library: FakeCuda
) -> None:
    stream, other = device.create_stream("one"), device.create_stream("two")
    first, second, third = stream.record(), stream.record(), stream.record()
    assert len({first.handle, second.handle, third.handle}) == 3
    assert not first.is_done()
    handles = first.handle, second.handle
    assert second.handle is not None
    library.done_events.add(second.handle)
    assert second.is_done()
    assert first.is_done()  # it came before
    assert not third.is_done()
    reused = other.record()
    assert reused.handle in handles
    assert first.is_done()
    assert second.is_done()
    before = library.calls["cuStreamWaitEvent"]
    other.wait(first)
    assert library.calls["cuStreamWaitEvent"] == before
    other.wait(third)
    assert library.calls["cuStreamWaitEvent"] == before + 1
    library.done_events.update({third.handle or 0, reused.handle or 0})
    device.wait_for_progress(1.0)
    assert third.handle is None


def test_waiting_for_progress_ends_with_the_time(device: CudaDevice) -> None:
    stream = device.create_stream("one")
    event = stream.record()
    start_s = time.monotonic()
    device.wait_for_progress(0.02)
    assert 0.015 < time.monotonic() - start_s < 1.0
    assert not event.is_done()
    event.synchronize()
