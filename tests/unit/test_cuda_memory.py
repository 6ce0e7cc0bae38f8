"""Memory of the CUDA device around the driver's calls: blocks that grow, pieces that are locked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from coldpage.device.base import MemoryKind
from coldpage.device.cuda import CudaDevice
from coldpage.device.cuda.driver import Driver
from coldpage.device.cuda.pinned import PinnedMemory
from coldpage.device.host import HostMemory
from coldpage.errors import ClosedError, DeviceError
from coldpage.types import MemAddress
from tests.unit.cuda_rig import MIB, array, opened, wait_for
from tests.unit.fake_cuda import FakeCuda


@pytest.fixture
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(library: FakeCuda) -> Iterator[CudaDevice]:
    with opened(library) as device:
        yield device


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


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemAddressFree"])
def test_device_memory_that_was_not_taken_back_can_be_freed_again(
    device: CudaDevice, library: FakeCuda, call: str
) -> None:
    memory = device.allocate(8 * MIB, MemoryKind.DEVICE, is_growable=True)
    library.fail(call)
    with pytest.raises(DeviceError, match=call):
        memory.free()
    with pytest.raises(ClosedError):
        memory.resize(MIB)
    memory.free()
    memory.free()
    assert not library.mapped
    assert library.calls["cuMemAddressFree"] == 1 + (call == "cuMemAddressFree")


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease"])
def test_shrinking_that_fails_half_way_changes_nothing(
    device: CudaDevice, library: FakeCuda, call: str
) -> None:
    memory = device.allocate(64 * MIB, MemoryKind.DEVICE, is_growable=True)
    before = dict(library.mapped)
    library.fail(call, after=3)
    with pytest.raises(DeviceError, match=call):
        memory.resize(MIB)
    assert library.mapped == before
    assert memory.num_bytes == 64 * MIB
    library.handles &= set(memory._handles)  # type: ignore[attr-defined]
    memory.resize(MIB)
    assert len(library.mapped) == 1


# Host memory


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldpage.device.cuda.pinned.PIECE_BYTES", MIB)


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_is_locked_in_pieces(device: CudaDevice, library: FakeCuda) -> None:
    pinned = device.allocate(5 * MIB + 10, MemoryKind.PINNED)
    assert pinned.num_ready_bytes >= MIB
    wait_for(lambda: pinned.num_ready_bytes == pinned.num_bytes)
    starts = sorted(library.registered)
    assert starts == [pinned.address + i * MIB for i in range(6)]
    assert library.registered[starts[-1]] == 4096
    assert device.runtime.registrar.boundaries.tolist() == starts
    assert device.runtime.registrar.is_pinned(pinned.address)
    stream = device.create_stream("copies")
    stream.copy(array(1 << 50), array(pinned.address + MIB - 100), array(300))
    assert library.arguments["cuMemcpyBatchAsync"][0][3] == 2


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_that_shrinks_and_grows(device: CudaDevice, library: FakeCuda) -> None:
    pinned = device.allocate(4 * MIB, MemoryKind.PINNED, is_growable=True)
    wait_for(lambda: pinned.num_ready_bytes == pinned.num_bytes)
    pinned.array[:] = 7
    pinned.resize(MIB + 5)
    assert len(library.registered) == 2
    assert pinned.num_ready_bytes == pinned.num_bytes == MIB + 5
    assert (pinned.array == 7).all()
    pinned.resize(3 * MIB)
    wait_for(lambda: pinned.num_ready_bytes == 3 * MIB)
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
        wait_for(lambda: bool(caplog.records))
    assert pinned.num_ready_bytes == 2 * MIB
    assert "only 2,097,152 of 5,242,880 bytes" in caplog.text
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    # What comes later is locked all the same.
    other = device.allocate(2 * MIB, MemoryKind.PINNED)
    wait_for(lambda: other.num_ready_bytes == other.num_bytes)


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


class _Gate:
    """Holds every registration back until it is opened; counts those that wait."""

    def __init__(self, library: FakeCuda) -> None:
        self._register = library._do_cuMemHostRegister_v2
        self._opened = threading.Event()
        self.num_arrived = 0
        library._do_cuMemHostRegister_v2 = self._wait  # type: ignore[method-assign]

    def _wait(self, *arguments: int) -> None:
        self.num_arrived += 1
        assert self._opened.wait(10)
        self._register(*arguments)

    def open(self) -> None:
        self._opened.set()


@pytest.mark.usefixtures("small_pieces")
def test_who_waits_for_memory_is_told_that_it_can_not_be_locked(
    device: CudaDevice, library: FakeCuda
) -> None:
    library.fail("cuMemHostRegister_v2", after=2)
    broken = device.allocate(5 * MIB, MemoryKind.PINNED, is_growable=True)
    start_s = time.monotonic()
    with pytest.raises(
        DeviceError, match=r"2,097,152 of 5,242,880 bytes .*\(CUDA_ERROR_OUT_OF_MEMORY\)"
    ) as raised:
        device.wait_until_ready(broken, 60.0)
    assert time.monotonic() - start_s < 5
    assert raised.value.__cause__ is not None
    # What is ready stays so, and others go on.
    assert broken.num_ready_bytes == 2 * MIB
    other = device.allocate(3 * MIB, MemoryKind.PINNED)
    assert device.wait_until_ready(other, 10.0)
    broken.resize(2 * MIB)
    assert device.wait_until_ready(broken, 0.0)
    broken.resize(5 * MIB)
    assert device.wait_until_ready(broken, 10.0)


def test_memory_that_takes_longer_than_the_time(device: CudaDevice, library: FakeCuda) -> None:
    memory = device.allocate(MIB, MemoryKind.PINNED, is_growable=True)
    gate = _Gate(library)
    memory.resize(2 * MIB)
    start_s = time.monotonic()
    assert not device.wait_until_ready(memory, 0.05)
    assert 0.04 < time.monotonic() - start_s < 5
    gate.open()
    assert device.wait_until_ready(memory, 10.0)


@pytest.mark.usefixtures("small_pieces")
def test_a_failure_of_the_background_is_told_once(
    device: CudaDevice, library: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    memory = device.allocate(MIB, MemoryKind.PINNED, is_growable=True)
    other = device.allocate(MIB, MemoryKind.PINNED, is_growable=True)
    gate = _Gate(library)
    other.resize(2 * MIB)  # keeps the thread busy, so that the next has to wait for its turn
    wait_for(lambda: gate.num_arrived == 1)
    library.fail("cuMemHostRegister_v2", times=100)
    registrar = device.runtime.registrar
    with caplog.at_level(logging.INFO):
        memory.num_bytes = 3 * MIB
        registrar.enqueue(memory)  # type: ignore[arg-type]
        registrar.enqueue(memory)  # type: ignore[arg-type]
        gate.open()
        with pytest.raises(DeviceError):
            device.wait_until_ready(memory, 10.0)
        device.runtime.registrar.close()
    told = [record.message for record in caplog.records if "3,145,728" in record.message]
    assert len(told) == 1
    # Progress is not told as well.
    assert len(caplog.records) == 2


class _SlowToWake:
    """A lock that whoever has to wait for it looks at only now and then, as on a busy machine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            time.sleep(0.005)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.usefixtures("small_pieces")
def test_who_changes_a_memory_waits_for_one_piece_only(
    device: CudaDevice, library: FakeCuda
) -> None:
    registrar, register = device.runtime.registrar, library._do_cuMemHostRegister_v2
    registrar._piece_lock = _SlowToWake()  # type: ignore[assignment]

    def slowly(*arguments: int) -> None:
        time.sleep(0.002)
        register(*arguments)

    library._do_cuMemHostRegister_v2 = slowly  # type: ignore[method-assign]
    large = device.allocate(400 * MIB, MemoryKind.PINNED)
    wait_for(lambda: large.num_ready_bytes > 3 * MIB)
    meanwhile = []
    for _ in range(9):
        before = large.num_ready_bytes
        with registrar.paused():
            meanwhile.append(large.num_ready_bytes - before)
    # Not the most of them: this thread may have to wait for its core before it asks.
    assert sorted(meanwhile)[4] <= 2 * MIB
    assert large.num_ready_bytes < large.num_bytes, "nothing was left to wait for"
    large.free()


@pytest.mark.usefixtures("small_pieces")
def test_no_copy_reaches_from_one_memory_into_its_neighbour(
    device: CudaDevice, library: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel puts side by side was registered apart all the same."""
    whole = HostMemory(2 * MIB, MemoryKind.PINNED, 2 * MIB)
    halves = iter((0, MIB))

    class Half(HostMemory):
        def __init__(self, num_bytes: int, kind: MemoryKind, max_bytes: int) -> None:
            super().__init__(num_bytes, kind, max_bytes)
            self.address = MemAddress(whole.address + next(halves))

    monkeypatch.setattr("coldpage.device.cuda.pinned.HostMemory", Half)
    first, second = (device.allocate(MIB, MemoryKind.PINNED) for _ in range(2))
    assert first.address + first.num_bytes == second.address
    stream = device.create_stream("copies")
    # Two pages that are neighbours on both sides, which the device joins.
    source = second.address - 4096
    stream.copy(array(1 << 50, (1 << 50) + 4096), array(source, second.address), array(4096, 4096))
    (arguments,) = library.arguments["cuMemcpyBatchAsync"]
    assert arguments[3] == 2
    second.free()
    stream.copy(array(1 << 50, (1 << 50) + 4096), array(1 << 51, (1 << 51) + 4096), array(9, 9))
    assert device.runtime.registrar.boundaries.tolist() == [first.address]


@pytest.mark.usefixtures("small_pieces")
def test_boundaries_are_found_when_they_change_and_not_for_every_copy(device: CudaDevice) -> None:
    registrar = device.runtime.registrar
    assert registrar.boundaries.size == 0
    memory = device.allocate(3 * MIB, MemoryKind.PINNED, is_growable=True)
    assert device.wait_until_ready(memory, 10.0)
    found = registrar.boundaries
    assert found.tolist() == [memory.address + i * MIB for i in range(3)]
    device.create_stream("copies").copy(array(1 << 50), array(memory.address), array(3 * MIB))
    assert registrar.boundaries is found
    memory.resize(MIB + 5)
    assert registrar.boundaries.tolist() == found[:2].tolist()
    memory.resize(3 * MIB)
    assert device.wait_until_ready(memory, 10.0)
    assert registrar.boundaries.tolist() == found.tolist()
    memory.free()
    assert registrar.boundaries.size == 0


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_that_can_not_be_unlocked_is_kept(
    device: CudaDevice, library: FakeCuda
) -> None:
    memory = device.allocate(3 * MIB, MemoryKind.PINNED, is_growable=True)
    assert device.wait_until_ready(memory, 10.0)
    memory.array[:] = 5
    library.fail("cuMemHostUnregister", after=1)
    with pytest.raises(DeviceError, match="cuMemHostUnregister"):
        memory.resize(MIB)
    # As before, once the piece that was unlocked already is locked again.
    assert memory.num_bytes == 3 * MIB
    assert device.wait_until_ready(memory, 10.0)
    assert len(library.registered) == 3
    assert (memory.array == 5).all()
    library.fail("cuMemHostUnregister", after=1)
    with pytest.raises(DeviceError, match="cuMemHostUnregister"):
        memory.free()
    assert len(library.registered) == 2
    assert (memory.array == 5).all()  # the driver has it still
    with pytest.raises(ClosedError):
        memory.resize(MIB)
    memory.free()
    memory.free()
    assert not library.registered


@pytest.mark.usefixtures("small_pieces")
def test_a_machine_without_threads_locks_nothing(
    device: CudaDevice, library: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            device.allocate(3 * MIB, MemoryKind.PINNED)
    assert not library.registered
    memory = device.allocate(3 * MIB, MemoryKind.PINNED)
    assert device.wait_until_ready(memory, 10.0)
