"""What the host device does beyond what every device does."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from coldpage.device import host
from coldpage.device.base import IoJob, MemoryKind
from coldpage.device.host import MAX_QUEUED_OPS, HostDevice
from coldpage.device.io import ThreadedIo
from coldpage.device.progress import Progress
from coldpage.errors import DeviceError
from coldpage.types import ByteRange, MemAddress


def _nothing() -> None:
    pass


def _wait_for(gate: threading.Event) -> None:
    gate.wait(20.0)


def test_threads_end_with_the_device() -> None:
    before = set(threading.enumerate())
    device = HostDevice(num_io_threads=3)
    device.create_stream("a")
    assert len(set(threading.enumerate()) - before) == 1  # I/O threads wait for the first job
    device.io.submit([IoJob(bool)]).synchronize()
    assert len(set(threading.enumerate()) - before) == 4
    device.close()
    assert set(threading.enumerate()) == before


def test_a_view_outlives_its_memory() -> None:
    device = HostDevice()
    memory = device.allocate(1 << 22, MemoryKind.DEVICE)
    view = memory.array[100:200]
    view[:] = 5
    memory.free()
    memory.free()
    assert view.shape == (100,)
    view[:] = 6  # the addresses still exist
    device.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _overcommit() -> str:
    return Path("/proc/sys/vm/overcommit_memory").read_text().strip()


def _ram_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


@pytest.mark.parametrize("smaller", [4096, 5000, 1, (1 << 20) + 7])
def test_memory_that_shrank_and_grew_reads_zeros(smaller: int) -> None:
    device = HostDevice()
    memory = device.allocate((1 << 21) + 9, MemoryKind.DEVICE, is_growable=True)
    memory.array[:] = 9
    memory.resize(smaller)
    memory.resize(1 << 22)
    assert (memory.array[:smaller] == 9).all()
    assert not memory.array[smaller:].any()
    device.close()


def test_shrinking_gives_the_ram_back_and_growing_takes_none() -> None:
    device = HostDevice()
    size, slack = 64 << 20, 16 << 20
    memory = device.allocate(size, MemoryKind.DEVICE, is_growable=True)
    before = _resident_bytes()
    memory.array[:] = 1
    assert _resident_bytes() - before > size - slack
    memory.resize(1 << 20)
    assert _resident_bytes() - before < slack
    memory.resize(memory.max_bytes)
    assert _resident_bytes() - before < slack
    memory.array[size : size + 100] = 3
    assert _resident_bytes() - before < slack
    device.close()


def test_growable_memory_can_take_all_ram() -> None:
    device = HostDevice()
    memories = [device.allocate(8192, MemoryKind.DEVICE, is_growable=True) for _ in range(10)]
    assert {memory.max_bytes for memory in memories} == {_ram_bytes()}
    with pytest.raises(DeviceError, match=r"can not grow to .* set aside for it"):
        memories[0].resize(_ram_bytes() + 1)
    device.close()


def _kernel_flags(address: int) -> list[str]:
    """What the kernel knows of the region around ``address``."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        region = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if region:
            is_inside = int(region[1], 16) <= address < int(region[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no region around {address:#x}")


def test_the_kernel_counts_no_memory_for_what_is_set_aside() -> None:
    if _overcommit() == "2":
        pytest.skip("this kernel counts all memory as used")
    device = HostDevice()
    memory = device.allocate(8192, MemoryKind.DEVICE, is_growable=True)
    assert "nr" in _kernel_flags(memory.address)  # no reserve
    fixed = device.allocate(8192, MemoryKind.DEVICE)
    assert "nr" not in _kernel_flags(fixed.address)
    device.close()


def test_more_than_the_kernel_gives_is_refused_growable_or_not() -> None:
    if _overcommit() == "1":
        pytest.skip("this kernel promises any amount of memory")
    device = HostDevice()
    for is_growable in (False, True):
        with pytest.raises(DeviceError, match="make the tiers smaller"):
            device.allocate(1 << 46, MemoryKind.DEVICE, is_growable=is_growable)
    device.close()


def test_a_view_outlives_resized_memory() -> None:
    device = HostDevice()
    memory = device.allocate(1 << 22, MemoryKind.DEVICE, is_growable=True)
    view = memory.array
    memory.resize(4096)
    view[-1] = 6  # the addresses still exist
    memory.resize(8192)
    memory.array[:] = 7
    memory.free()
    assert view[-1] == 0
    device.close()


_LIMITED = """
import logging, resource, sys
from coldpage.device.base import MemoryKind
from coldpage.device.host import HostDevice

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (512 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
device = HostDevice()
size = 64 << 20
memories = [device.allocate(size, MemoryKind.DEVICE, is_growable=True) for _ in range(4)]
for memory in memories:
    assert size <= memory.max_bytes <= limit
    memory.array[:] = 1
assert memories[0].max_bytes > size
memories[0].resize(memories[0].max_bytes)
memories[0].array[-1] = 1
device.close()
"""


def test_where_addresses_are_few_less_is_set_aside_and_said_once() -> None:
    environment = dict(os.environ, PYTHONPATH=str(Path(host.__file__).parents[2]))
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert "sets no" in sentence
    assert "can grow to" in sentence


def test_a_stream_overlaps_what_the_caller_does() -> None:
    device = HostDevice()
    stream = device.create_stream("a")
    gate = threading.Event()
    stream.launch(lambda: _wait_for(gate), reads=(), writes=())
    event = stream.record()
    assert not event.is_done()
    gate.set()
    event.synchronize()
    device.close()


def test_a_full_queue_holds_the_submitter_until_there_is_room() -> None:
    device = HostDevice()
    stream = device.create_stream("a")
    gate = threading.Event()
    stream.launch(lambda: _wait_for(gate), reads=(), writes=())
    seen: list[int] = []

    def submit() -> None:
        for index in range(MAX_QUEUED_OPS + 50):
            stream.launch(_nothing, reads=(), writes=())
            seen.append(index)

    submitter = threading.Thread(target=submit)
    submitter.start()
    time.sleep(0.1)
    assert MAX_QUEUED_OPS - 1 <= len(seen) <= MAX_QUEUED_OPS
    gate.set()
    submitter.join(20.0)
    assert len(seen) == MAX_QUEUED_OPS + 50
    device.close()


def test_full_queues_that_wait_for_each_other_do_not_deadlock() -> None:
    device = HostDevice()
    a, b = device.create_stream("a"), device.create_stream("b")
    for _ in range(2 * MAX_QUEUED_OPS):
        a.launch(_nothing, reads=(), writes=())
        b.wait(a.record())
        b.launch(_nothing, reads=(), writes=())
        a.wait(b.record())
    a.synchronize()
    b.synchronize()
    device.close()


def test_a_signal_between_two_waits_is_not_missed() -> None:
    progress = Progress()
    for _ in range(3):
        progress.signal()
        started = time.monotonic()
        progress.wait(10.0)
        assert time.monotonic() - started < 5.0


def test_without_a_signal_the_wait_ends_in_time() -> None:
    progress = Progress()
    progress.signal()
    progress.wait(10.0)
    started = time.monotonic()
    progress.wait(0.05)
    assert 0.04 < time.monotonic() - started < 5.0


def test_one_waiter_does_not_swallow_anothers_signal() -> None:
    progress = Progress()
    progress.signal()
    progress.wait(10.0)
    waited_s: list[float] = []

    def wait() -> None:
        started = time.monotonic()
        progress.wait(10.0)
        waited_s.append(time.monotonic() - started)

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert waited_s[0] < 5.0


def test_io_completions_are_never_missed() -> None:
    device = HostDevice()
    started = time.monotonic()
    for _ in range(300):
        batch = device.io.submit([IoJob(bool)] * 3)
        while not batch.is_done():
            device.wait_for_progress(10.0)
    assert time.monotonic() - started < 8.0  # one missed wake-up costs 10 s
    device.close()


def test_io_runs_in_parallel_up_to_its_bound() -> None:
    io = ThreadedIo(Progress(), num_threads=4)
    lock = threading.Lock()
    running, most = 0, 0

    def run() -> bool:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return True

    io.submit([IoJob(bool)]).synchronize()
    time.sleep(0.02)  # now all threads sleep, and have to be woken
    io.submit([IoJob(run)] * 24).synchronize()
    assert most == 4
    io.close()
    io.close()


def test_reads_that_hang_hold_up_no_writes() -> None:
    io = ThreadedIo(Progress(), num_threads=2)
    gate = threading.Event()
    fills = (ByteRange(MemAddress(4096), 1),)

    def hang() -> bool:
        return gate.wait(20.0)

    hanging = io.submit([IoJob(hang, writes=fills)] * 5)
    started = time.monotonic()
    io.submit([IoJob(bool, reads=fills), IoJob(bool)]).synchronize()
    assert time.monotonic() - started < 10.0
    assert not hanging.is_done()
    gate.set()
    mixed = io.submit([IoJob(hang, writes=fills), IoJob(bool), IoJob(lambda: True, writes=fills)])
    mixed.synchronize()
    hanging.synchronize()
    assert mixed.ok.tolist() == [True, False, True], "by job, whichever thread ran it"
    assert hanging.ok.all()
    io.close()


def test_closing_io_finishes_what_is_queued() -> None:
    io = ThreadedIo(Progress(), num_threads=1)
    seen: list[int] = []

    def run() -> bool:
        time.sleep(0.002)
        seen.append(1)
        return True

    batch = io.submit([IoJob(run)] * 10)
    io.close()
    assert len(seen) == 10
    assert batch.ok.all()


@pytest.mark.parametrize("page_bytes", [368_640, 4096])
def test_scattered_copies_are_exact(page_bytes: int) -> None:
    device = HostDevice()
    num_pages = (4 << 20) // page_bytes
    src = device.allocate(num_pages * page_bytes, MemoryKind.DEVICE)
    dst = device.allocate(num_pages * page_bytes, MemoryKind.PINNED)
    rng = np.random.default_rng(0)
    src.array[:] = rng.integers(0, 256, size=src.num_bytes)
    to, source = rng.permutation(num_pages), rng.permutation(num_pages)
    stream = device.create_stream("a")
    stream.copy(
        dst.address + to * page_bytes,
        src.address + source * page_bytes,
        np.full(num_pages, page_bytes),
    )
    stream.synchronize()
    pages = dst.array.reshape(num_pages, page_bytes)
    np.testing.assert_array_equal(pages[to], src.array.reshape(num_pages, page_bytes)[source])
    del pages
    device.close()
