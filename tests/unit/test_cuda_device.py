"""What the CUDA device does around the driver's calls; the calls themselves need a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.device.base import MemoryKind
from coldpage.device.copies import CopyList
from coldpage.device.cuda import CudaDevice
from coldpage.device.cuda.copies import (
    BATCH_BYTES,
    MIN_BATCH_COPIES,
    split_at,
    split_batches,
)
from coldpage.device.cuda.driver import Driver, DriverError
from coldpage.device.cuda.link import KERNEL_MAX_BYTES, kernel_share
from coldpage.errors import DeviceError, SubmissionError
from tests.unit.cuda_rig import MIB, array, opened
from tests.unit.fake_cuda import FakeCuda


@pytest.fixture
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(library: FakeCuda) -> Iterator[CudaDevice]:
    with opened(library) as device:
        yield device


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
        ways = {"is_upload": is_upload, "is_both_ways": False}
        assert kernel_share(4096, **ways).fraction == 1.0
        assert kernel_share(KERNEL_MAX_BYTES, **ways).fraction < 1.0
        assert kernel_share(64 * MIB, **ways).fraction == 1.0  # when told to


def test_both_ways_at_once_the_driver_has_what_it_can() -> None:
    for is_upload in (True, False):
        one_way = {"is_upload": is_upload, "is_both_ways": False}
        both_ways = {"is_upload": is_upload, "is_both_ways": True}
        assert kernel_share(32768, **one_way).fraction < 1.0
        assert kernel_share(32768, **both_ways).fraction == 1.0
        assert kernel_share(65536, **both_ways) == kernel_share(65536, **one_way)
        assert kernel_share(KERNEL_MAX_BYTES, **both_ways).fraction == 0.0
        assert kernel_share(64 * MIB, **both_ways).fraction == 1.0  # when told to


def test_traffic_is_busy_until_the_last_pages_have_arrived() -> None:
    device = CudaDevice(0, driver=Driver(FakeCuda(13000)))
    stream, traffic = device.create_stream("copies"), device.runtime.traffic
    assert not traffic.is_busy(is_upload=True) and not traffic.is_busy(is_upload=False)
    traffic.sent(stream.handle, is_upload=True)
    assert traffic.is_busy(is_upload=True) and not traffic.is_busy(is_upload=False)
    stream.synchronize()
    assert not traffic.is_busy(is_upload=True)
    traffic.sent(stream.handle, is_upload=True)
    assert traffic.is_busy(is_upload=True)
    stream.synchronize()
    device.close()


@pytest.mark.parametrize(("version", "num_arguments"), [(12080, 9), (13000, 8), (13010, 8)])
def test_batches_are_called_as_the_driver_has_them(version: int, num_arguments: int) -> None:
    library = FakeCuda(version)
    device = CudaDevice(0, driver=Driver(library))
    stream = device.create_stream("copies")
    stream.copy(array(1000, 3000), array(5000, 9000), array(16, 32))
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
    stream.copy(array(1000, 3000, 7), array(5000, 9000, 7), array(16, 32, 0))
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
        stream.copy(array(1000), array(5000), array(16))
    stream.copy(array(1000), array(5000), array(16))


def test_copies_between_places_of_the_host_do_not_go_to_the_driver(
    device: CudaDevice, library: FakeCuda
) -> None:
    """It would hold the caller until it is their turn."""
    one, two = (device.allocate(8192, MemoryKind.PINNED) for _ in range(2))
    one.array[:], two.array[:] = 1, 2
    stream = device.create_stream("copies")
    stream.copy(
        array(two.address + 5, 1 << 50), array(one.address + 9, one.address), array(100, 32)
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


def test_what_a_test_replaces_is_what_the_driver_calls(
    device: CudaDevice, library: FakeCuda
) -> None:
    event = device.create_stream("one").record()
    assert not event.is_done()
    library._do_cuEventQuery = lambda event: 0  # type: ignore[method-assign, assignment]
    assert event.is_done()


@pytest.mark.parametrize("how", ["asked", "waited for", "swept by a later event"])
def test_what_somebody_else_found_done_ends_the_wait_once(
    device: CudaDevice, library: FakeCuda, how: str
) -> None:
    streams = device.create_stream("one"), device.create_stream("two")
    for stream in streams:
        event = stream.record()
        assert event.handle is not None
        library.done_events.add(event.handle)
        if how == "asked":
            assert event.is_done()
        elif how == "waited for":
            event.synchronize()
        else:
            stream.record()
    start_s = time.monotonic()
    device.wait_for_progress(10.0)
    assert time.monotonic() - start_s < 5.0
    start_s = time.monotonic()
    device.wait_for_progress(0.02)
    assert time.monotonic() - start_s > 0.015
