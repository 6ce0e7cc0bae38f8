"""The disk pool on a real file: what was written comes back, and nothing else ever does."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldpage.device.base import IoJob, MemoryKind
from coldpage.device.file import BlockFile
from coldpage.device.host import HostDevice
from coldpage.errors import StorageError
from coldpage.pools import DISK_HEADER_BYTES, DiskPool, disk_slot_bytes

_PAYLOAD = 1000
_SLOT = disk_slot_bytes(_PAYLOAD)
_NUM_SLOTS = 4
# What the header's fields and its checksum take; the rest of its 4 KiB is unused.
_FIELD_BYTES = struct.calcsize("<4sIQQQQQ")


class _Rig:
    """A pool, and memory to write from and read into."""

    def __init__(self, path: Path, payload_bytes: int = _PAYLOAD, kind: type = BlockFile) -> None:
        self.path = path
        self.payload_bytes = payload_bytes
        self.slot_bytes = disk_slot_bytes(payload_bytes)
        self.file: BlockFile = kind(path, _NUM_SLOTS * self.slot_bytes)
        self.pool = DiskPool(self.file, _NUM_SLOTS, payload_bytes)
        self.device = HostDevice(num_io_threads=2)
        self.memory = self.device.allocate(1 << 20, MemoryKind.PINNED)
        self.half = self.memory.num_bytes // 2

    def jobs(self, slots: Sequence[int], offsets: Sequence[int], *, is_write: bool) -> list[IoJob]:
        make = self.pool.write_jobs if is_write else self.pool.read_jobs
        addresses = np.array(offsets, np.int64) + self.memory.address
        return make(np.array(slots, np.int32), addresses)

    def write(self, slot: int, payload: bytes, offset: int = 0) -> bool:
        self.memory.array[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
        return self.jobs([slot], [offset], is_write=True)[0].run()

    def read(self, slot: int, offset: int | None = None) -> bytes | None:
        """The payload; None where the pool says that it is not good."""
        offset = self.half if offset is None else offset
        self.memory.array[offset : offset + self.payload_bytes] = 0xEE
        if not self.jobs([slot], [offset], is_write=False)[0].run():
            return None
        return self.memory.array[offset : offset + self.payload_bytes].tobytes()

    def slot_on_disk(self, slot: int) -> bytes:
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), self.slot_bytes, slot * self.slot_bytes)

    def put_on_disk(self, slot: int, data: bytes, offset: int = 0) -> None:
        with open(self.path, "r+b") as file:
            os.pwrite(file.fileno(), data, slot * self.slot_bytes + offset)

    def close(self) -> None:
        self.pool.close()
        self.device.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[_Rig]:
    rig = _Rig(tmp_path / "pool.slots")
    yield rig
    rig.close()


def _payload(seed: int, num_bytes: int = _PAYLOAD) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()


# ---------------------------------------------------------------------- round trips


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload_bytes=st.sampled_from([1, 17, 4095, 4096, 4097, 8192, 12288, 40_000]),
    steps=st.lists(
        st.tuples(
            st.integers(0, _NUM_SLOTS - 1),
            st.integers(0, 255),
            st.sampled_from([0, 1, 4095, 4096, 8192, 9000]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_the_last_payload_of_each_slot_comes_back(
    payload_bytes: int, steps: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    """For aligned and unaligned payloads, at aligned and unaligned addresses."""
    rig = _Rig(tmp_path / "pool.slots", payload_bytes)
    try:
        written: dict[int, bytes] = {}
        for slot, seed, offset in steps:
            written[slot] = _payload(seed, payload_bytes)
            assert rig.write(slot, written[slot], offset)
        for slot in range(_NUM_SLOTS):
            for offset in (rig.half, rig.half + 4096, rig.half + 33):
                assert rig.read(slot, offset) == written.get(slot)
    finally:
        rig.close()


def test_a_read_touches_its_range_only(rig: _Rig) -> None:
    assert rig.write(1, _payload(1))
    rig.memory.array[:] = 0x55
    assert rig.read(1, rig.half + 33) == _payload(1)
    rest = np.delete(rig.memory.array, slice(rig.half + 33, rig.half + 33 + _PAYLOAD))
    assert (rest == 0x55).all()


@pytest.mark.parametrize("is_write", [True, False])
def test_jobs_declare_the_memory_that_they_touch(rig: _Rig, is_write: bool) -> None:
    jobs = rig.jobs([2, 0], [64, 5000], is_write=is_write)
    for job, offset in zip(jobs, (64, 5000), strict=True):
        (touched,) = job.reads if is_write else job.writes
        assert not (job.writes if is_write else job.reads)
        assert (touched.address, touched.num_bytes) == (rig.memory.address + offset, _PAYLOAD)


def test_many_jobs_at_once(rig: _Rig) -> None:
    """Each thread has a slab of its own, and unaligned payloads pass through it."""
    for round_index in range(30):
        payloads = [_payload(10 * round_index + slot) for slot in range(_NUM_SLOTS)]
        offsets = [slot * 1001 for slot in range(_NUM_SLOTS)]
        for payload, offset in zip(payloads, offsets, strict=True):
            rig.memory.array[offset : offset + _PAYLOAD] = np.frombuffer(payload, np.uint8)
        slots = range(_NUM_SLOTS)
        batch = rig.device.io.submit(rig.jobs(slots, offsets, is_write=True))
        batch.synchronize()
        assert batch.ok.all()
        back = [rig.half + offset for offset in offsets]
        batch = rig.device.io.submit(rig.jobs(slots, back, is_write=False))
        batch.synchronize()
        assert batch.ok.all()
        for payload, offset in zip(payloads, back, strict=True):
            assert rig.memory.array[offset : offset + _PAYLOAD].tobytes() == payload


# ---------------------------------------------------------------------- the format


def test_a_slot_is_a_header_of_one_sector_and_whole_sectors_of_payload() -> None:
    assert DISK_HEADER_BYTES == 4096
    for payload_bytes, sectors in [(1, 2), (4096, 2), (4097, 3), (1 << 20, 257)]:
        assert disk_slot_bytes(payload_bytes) == sectors * 4096


def test_the_header_says_what_is_in_the_slot(rig: _Rig) -> None:
    payload = _payload(3)
    assert rig.write(2, payload)
    raw = rig.slot_on_disk(2)
    magic, version, num_bytes, slot, _, checksum, header_checksum = struct.unpack_from(
        "<4sIQQQQQ", raw
    )
    assert (magic, version, num_bytes, slot) == (b"CPG1", 1, _PAYLOAD, 2)
    assert checksum == xxhash.xxh3_64_intdigest(payload)
    assert header_checksum == xxhash.xxh3_64_intdigest(raw[: _FIELD_BYTES - 8])
    assert raw[DISK_HEADER_BYTES : DISK_HEADER_BYTES + _PAYLOAD] == payload


def test_unused_bytes_of_a_slot_are_zero_and_hold_nothing_of_another(rig: _Rig) -> None:
    rig.put_on_disk(0, b"\xff" * _SLOT)
    assert rig.read(0) is None  # leaves all of it in the slab of this thread
    assert rig.write(1, _payload(1))
    raw = rig.slot_on_disk(1)
    assert not any(raw[_FIELD_BYTES:DISK_HEADER_BYTES])
    assert not any(raw[DISK_HEADER_BYTES + _PAYLOAD :])


@pytest.mark.parametrize("payload_bytes", [_PAYLOAD, 4096])
def test_the_file_is_private_and_past_the_page_cache(tmp_path: Path, payload_bytes: int) -> None:
    rig = _Rig(tmp_path / "pool.slots", payload_bytes)
    assert stat.S_IMODE(rig.path.stat().st_mode) == 0o600
    flags = os.O_RDWR | os.O_DIRECT
    try:
        os.close(os.open(rig.path, flags))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    assert rig.file.is_direct
    rig.close()


# ---------------------------------------------------------------------- other sizes


def test_a_resized_pool_keeps_what_stays(rig: _Rig) -> None:
    for slot in range(_NUM_SLOTS):
        assert rig.write(slot, _payload(slot))
    rig.pool.resize(_NUM_SLOTS + 3)
    assert rig.pool.num_slots == _NUM_SLOTS + 3
    assert rig.path.stat().st_size == (_NUM_SLOTS + 3) * _SLOT
    assert [rig.read(slot) for slot in range(_NUM_SLOTS)] == [_payload(s) for s in range(4)]
    assert rig.read(_NUM_SLOTS + 2) is None
    assert rig.write(_NUM_SLOTS + 2, _payload(9))
    assert rig.read(_NUM_SLOTS + 2) == _payload(9)
    rig.pool.resize(2)
    assert rig.path.stat().st_size == 2 * _SLOT
    assert [rig.read(slot) for slot in range(2)] == [_payload(0), _payload(1)]


def test_what_was_cut_off_never_comes_back(rig: _Rig) -> None:
    """Not even where the disk lost the cut itself."""
    assert rig.write(3, _payload(3))
    old = rig.slot_on_disk(3)
    rig.pool.resize(2)
    rig.pool.resize(4)
    assert rig.read(3) is None
    rig.put_on_disk(3, old)
    assert rig.read(3) is None


def test_a_pool_that_finds_no_room_stays_as_it_is(rig: _Rig) -> None:
    assert rig.write(3, _payload(3))
    with pytest.raises(StorageError, match="has no room"):
        rig.pool.resize((1 << 50) // _SLOT)
    assert rig.pool.num_slots == _NUM_SLOTS
    assert rig.read(3) == _payload(3)


def _relocate(rig: _Rig, src: Sequence[int], dst: Sequence[int]) -> list[bool]:
    jobs = rig.pool.relocate_jobs(np.array(src, np.int32), np.array(dst, np.int32))
    assert all(job.reads == job.writes == () for job in jobs)
    batch = rig.device.io.submit(jobs)
    batch.synchronize()
    return [bool(good) for good in batch.ok]


@pytest.mark.parametrize("payload_bytes", [1, _PAYLOAD, 4096, 12_288])
def test_relocated_payloads_are_good_at_their_new_slots(tmp_path: Path, payload_bytes: int) -> None:
    rig = _Rig(tmp_path / "pool.slots", payload_bytes)
    for slot in range(_NUM_SLOTS):
        assert rig.write(slot, _payload(slot, payload_bytes))
    assert _relocate(rig, [3, 2], [0, 1]) == [True, True]
    expected = [_payload(slot, payload_bytes) for slot in (3, 2, 2, 3)]
    assert [rig.read(slot) for slot in range(_NUM_SLOTS)] == expected
    assert rig.slot_on_disk(0) != rig.slot_on_disk(3)  # each under a header of its own
    assert _relocate(rig, [0], [2]) == [True]  # and again
    assert rig.read(2) == expected[0]
    rig.close()


def test_nothing_bad_is_relocated(rig: _Rig) -> None:
    assert rig.write(0, _payload(0))
    assert rig.write(1, _payload(1))
    rig.put_on_disk(0, b"\x01\x02\x03", DISK_HEADER_BYTES + 500)
    before = rig.slot_on_disk(2)
    assert _relocate(rig, [0], [2]) == [False]
    assert "slot 0" in rig.pool.last_failure
    assert rig.slot_on_disk(2) == before
    assert rig.read(2) is None


def test_a_slot_that_shall_be_overwritten_is_not_good_before_it_is(rig: _Rig) -> None:
    assert rig.write(0, _payload(0))
    assert rig.write(1, _payload(1))
    (job,) = rig.pool.relocate_jobs(np.array([0], np.int32), np.array([1], np.int32))
    assert rig.read(1) is None
    assert rig.read(0) == _payload(0)
    assert job.run()
    assert rig.read(1) == _payload(0)


def test_a_source_that_was_written_again_is_not_relocated(rig: _Rig) -> None:
    """The job's owner asked for what lay there then."""
    assert rig.write(0, _payload(0))
    (job,) = rig.pool.relocate_jobs(np.array([0], np.int32), np.array([1], np.int32))
    assert rig.write(0, _payload(5))
    assert not job.run()
    assert rig.read(1) is None


@pytest.mark.parametrize(("src", "dst"), [([0, 1], [1, 2]), ([0, 1], [2, 2]), ([0], [1, 2])])
def test_slots_that_get_in_each_others_way_are_a_bug(
    rig: _Rig, src: list[int], dst: list[int]
) -> None:
    with pytest.raises(AssertionError):
        rig.pool.relocate_jobs(np.array(src, np.int32), np.array(dst, np.int32))


def test_a_relocation_that_the_disk_fails_is_a_result(tmp_path: Path) -> None:
    rig = _Rig(tmp_path / "pool.slots", kind=_WritesHalf)
    assert isinstance(rig.file, _WritesHalf)
    assert rig.write(0, _payload(0))
    rig.file.is_broken = True
    assert _relocate(rig, [0], [1]) == [False]
    assert rig.read(1) is None
    assert rig.read(0) == _payload(0)
    rig.close()


def test_many_relocations_at_once(tmp_path: Path) -> None:
    rig = _Rig(tmp_path / "pool.slots")
    half = 40
    rig.pool.resize(2 * half)
    for slot in range(half):
        assert rig.write(slot, _payload(slot))
    order = np.random.default_rng(0).permutation(half).tolist()
    assert _relocate(rig, order, list(range(half, 2 * half))) == [True] * half
    assert [rig.read(half + place) for place in range(half)] == [_payload(s) for s in order]
    rig.close()


# ---------------------------------------------------------------------- damage


def test_every_flipped_bit_that_matters_is_found(rig: _Rig) -> None:
    """Exhaustive over the fields of the header, the payload, and what is unused: there a flip may
    pass, and then the payload is right.
    """
    rig_payload = _payload(4)
    assert rig.write(1, rig_payload)
    raw = rig.slot_on_disk(1)
    matters = set(range(_FIELD_BYTES)) | set(range(DISK_HEADER_BYTES, DISK_HEADER_BYTES + _PAYLOAD))
    unused = set(range(0, _SLOT, 97)) - matters
    path_fd = os.open(rig.path, os.O_RDWR)
    try:
        for index in sorted(matters | unused):
            for bit in range(8) if index in matters else [index % 8]:
                where = _SLOT + index
                os.pwrite(path_fd, bytes([raw[index] ^ 1 << bit]), where)
                back = rig.read(1)
                assert back == (None if index in matters else rig_payload), (index, bit)
            os.pwrite(path_fd, raw[index : index + 1], where)
    finally:
        os.close(path_fd)
    assert rig.read(1) == rig_payload


def test_two_slots_that_changed_places_are_found(rig: _Rig) -> None:
    assert rig.write(0, _payload(1))
    assert rig.write(1, _payload(2))
    first, second = rig.slot_on_disk(0), rig.slot_on_disk(1)
    rig.put_on_disk(0, second)
    rig.put_on_disk(1, first)
    assert rig.read(0) is rig.read(1) is None


def test_an_older_copy_of_the_same_slot_is_found(rig: _Rig) -> None:
    assert rig.write(0, _payload(1))
    old = rig.slot_on_disk(0)
    assert rig.write(0, _payload(2))
    rig.put_on_disk(0, old)
    assert rig.read(0) is None


def test_a_torn_write_is_found_wherever_it_tore(rig: _Rig) -> None:
    assert rig.write(0, _payload(1))
    old = rig.slot_on_disk(0)
    assert rig.write(0, _payload(2))
    new = rig.slot_on_disk(0)
    for length in (1, 8, 40, 48, 512, 4096, 4097, 4096 + 512, 4096 + _PAYLOAD - 1):
        for torn in (new[:length] + old[length:], old[:length] + new[length:]):
            rig.put_on_disk(0, torn)
            # The first bytes of every header are equal: what tore there did not tear.
            assert rig.read(0) == (_payload(2) if torn == new else None), length


def test_a_slot_that_was_never_written_holds_nothing(rig: _Rig) -> None:
    assert rig.read(3) is None
    rig.put_on_disk(3, b"CPG1" + bytes(200))
    assert rig.read(3) is None


class _LosesWrites(BlockFile):
    """A disk that says that it has written, and has not."""

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        return sum(map(len, buffers))


@pytest.mark.parametrize("num_writes", [1, 2, 3])
def test_what_an_earlier_run_left_in_a_slot_is_never_this_runs(
    tmp_path: Path, num_writes: int
) -> None:
    """Even where this run's write was lost and both counted the same number of writes."""
    path = tmp_path / "pool.slots"
    rig = _Rig(path)
    for index in range(num_writes):
        assert rig.write(1, _payload(index))
    rig.close()
    again = _Rig(path, kind=_LosesWrites)
    assert again.read(1) is None
    for index in range(num_writes):
        assert again.write(1, _payload(100 + index))
        assert again.read(1) is None
    again.close()


class _Broken(BlockFile):
    """A disk that fails every system call."""

    error = errno.EIO

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(self.error, os.strerror(self.error))

    _write_some = _read_some


class _Full(_Broken):
    error = errno.ENOSPC


class _WritesHalf(BlockFile):
    """Fails in the middle of a slot."""

    is_broken = False

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        if not self.is_broken:
            return super()._write_some(buffers, offset)
        super()._write_some([memoryview(buffers[0])[:DISK_HEADER_BYTES]], offset)
        raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize("kind", [_Broken, _Full])
@pytest.mark.parametrize("payload_bytes", [_PAYLOAD, 4096])
def test_an_error_of_the_disk_is_a_result_and_no_exception(
    tmp_path: Path, kind: type[BlockFile], payload_bytes: int
) -> None:
    rig = _Rig(tmp_path / "pool.slots", payload_bytes, kind)
    assert rig.write(0, _payload(1, payload_bytes)) is False
    assert rig.read(0) is None
    batch = rig.device.io.submit(rig.jobs([0, 1], [0, 5000], is_write=True))
    batch.synchronize()
    assert batch.ok.tolist() == [False, False]
    rig.close()


@pytest.mark.parametrize("payload_bytes", [_PAYLOAD, 8192])
def test_what_a_failed_write_has_torn_is_not_read(tmp_path: Path, payload_bytes: int) -> None:
    rig = _Rig(tmp_path / "pool.slots", payload_bytes, _WritesHalf)
    assert isinstance(rig.file, _WritesHalf)
    assert rig.write(0, _payload(1, payload_bytes))
    rig.file.is_broken = True
    assert not rig.write(0, _payload(2, payload_bytes))
    assert rig.read(0) is None
    rig.file.is_broken = False
    assert rig.write(0, _payload(3, payload_bytes))
    assert rig.read(0) == _payload(3, payload_bytes)
    rig.close()


def test_a_truncated_file_is_a_miss_for_what_is_cut_off(rig: _Rig) -> None:
    for slot in range(_NUM_SLOTS):
        assert rig.write(slot, _payload(slot))
    os.truncate(rig.path, _SLOT + DISK_HEADER_BYTES)
    assert [rig.read(slot) for slot in range(_NUM_SLOTS)] == [_payload(0), None, None, None]


def test_a_payload_of_another_size_is_refused(tmp_path: Path) -> None:
    """The same file under another configuration: slots lie elsewhere, or hold something else."""
    path = tmp_path / "pool.slots"
    rig = _Rig(path, 1000)
    assert rig.write(0, _payload(1, 1000))
    rig.close()
    other = _Rig(path, 1001)
    assert other.slot_bytes == rig.slot_bytes
    assert other.read(0) is None
    other.close()


def test_closing_gives_the_file_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rig = _Rig(tmp_path / "pool.slots")
    assert rig.write(0, _payload(1))
    rig.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_slab_keeps_no_view_of_callers_memory(rig: _Rig) -> None:
    assert rig.write(0, _payload(1))
    view: npt.NDArray[np.uint8] = rig.memory.array
    view[:] = 0
    assert rig.read(0) == _payload(1)
