"""The slot file on a real file: what was written comes back, and nothing else ever does."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldpage.device.file import BlockFile
from coldpage.errors import StorageError
from coldpage.store import BLANK_KEY, FileIdentity, SlotFile, slot_bytes_of
from coldpage.store.format import SECTOR_BYTES, parse_header
from coldpage.types import PageClass
from tests.unit.store_rig import (
    NUM_SLOTS,
    PAYLOAD_BYTES,
    SlotRig,
    identity_of,
    key_of,
    name_of,
    payload_of,
)

_SLOT = slot_bytes_of(identity_of())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SlotRig]:
    rig = SlotRig(tmp_path / "p.slots")
    yield rig
    rig.close()


# ---------------------------------------------------------------------- round trips


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload_bytes=st.sampled_from([1, 17, 4095, 4096, 4097, 8192, 12288, 40_000]),
    steps=st.lists(
        st.tuples(
            st.integers(0, NUM_SLOTS - 1),
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
    rig = SlotRig(tmp_path / "p.slots", identity_of(payload_bytes))
    try:
        written: dict[int, bytes] = {}
        for slot, seed, offset in steps:
            written[slot] = payload_of(seed, payload_bytes)
            assert rig.write(slot, written[slot], offset)
        for slot in range(NUM_SLOTS):
            for offset in (rig.half, rig.half + 4096, rig.half + 33):
                assert rig.read(slot, offset) == written.get(slot)
    finally:
        rig.close()


def test_a_read_touches_its_range_only(rig: SlotRig) -> None:
    assert rig.write(1, payload_of(1))
    rig.memory.array[:] = 0x55
    assert rig.read(1, rig.half + 33) == payload_of(1)
    rest = np.delete(rig.memory.array, slice(rig.half + 33, rig.half + 33 + PAYLOAD_BYTES))
    assert (rest == 0x55).all()


@pytest.mark.parametrize("is_write", [True, False])
def test_jobs_declare_the_memory_that_they_touch(rig: SlotRig, is_write: bool) -> None:
    make = rig.write_jobs if is_write else rig.read_jobs
    jobs = make([2, 0], [64, 5000])
    for job, offset in zip(jobs, (64, 5000), strict=True):
        (touched,) = job.reads if is_write else job.writes
        assert not (job.writes if is_write else job.reads)
        assert (touched.address, touched.num_bytes) == (rig.memory.address + offset, PAYLOAD_BYTES)


def test_many_jobs_at_once(rig: SlotRig) -> None:
    """Each thread has a slab of its own, and unaligned payloads pass through it."""
    for round_index in range(30):
        payloads = [payload_of(10 * round_index + slot) for slot in range(NUM_SLOTS)]
        offsets = [slot * 1001 for slot in range(NUM_SLOTS)]
        for payload, offset in zip(payloads, offsets, strict=True):
            rig.memory.array[offset : offset + PAYLOAD_BYTES] = np.frombuffer(payload, np.uint8)
        slots = range(NUM_SLOTS)
        batch = rig.device.io.submit(rig.write_jobs(slots, offsets))
        batch.synchronize()
        assert batch.ok.all()
        back = [rig.half + offset for offset in offsets]
        batch = rig.device.io.submit(rig.read_jobs(slots, back))
        batch.synchronize()
        assert batch.ok.all()
        for payload, offset in zip(payloads, back, strict=True):
            assert rig.memory.array[offset : offset + PAYLOAD_BYTES].tobytes() == payload


# ---------------------------------------------------------------------- the format


def test_a_slot_is_a_header_in_whole_sectors_and_so_is_its_payload() -> None:
    for payload_bytes, sectors in [(1, 2), (4096, 2), (4097, 3), (1 << 20, 257)]:
        assert slot_bytes_of(identity_of(payload_bytes)) == sectors * 4096
    assert slot_bytes_of(identity_of(1, tokens_per_block=2048)) == 4 * 4096


def test_the_header_says_what_is_in_the_slot(rig: SlotRig) -> None:
    name = name_of(7, layer_group=3, page_class=PageClass.SINK, num_tokens=3)
    assert rig.write(2, payload_of(3), name=name)
    raw = np.frombuffer(rig.slot_on_disk(2), np.uint8)
    parsed = parse_header(raw[:SECTOR_BYTES])
    assert parsed is not None
    identity, header = parsed
    assert (identity, header.slot) == (rig.identity, 2)
    assert header.write_number == rig.slots.write_numbers(np.array([2], np.int32))[0] > 0
    assert (header.name.key, header.name.parent_key) == (name.key, name.parent_key)
    assert (header.name.layer_group_id, header.name.page_class) == (3, PageClass.SINK)
    assert (header.name.ordinal, header.name.tokens.tolist()) == (0, [7, 8, 9])
    path, offset = rig.slots.payload_location(2)
    assert path.read_bytes()[offset : offset + PAYLOAD_BYTES] == payload_of(3)


def test_unused_bytes_of_a_slot_are_zero_and_hold_nothing_of_another(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(0))
    rig.put_on_disk(0, b"\xff" * _SLOT)
    assert rig.read(0) is None  # leaves all of it in the slab of this thread
    assert rig.write(1, payload_of(1))
    raw = rig.slot_on_disk(1)
    assert not any(raw[200 : SECTOR_BYTES - 8])
    assert not any(raw[SECTOR_BYTES + PAYLOAD_BYTES :])


def test_write_numbers_grow_with_time_and_from_run_to_run(tmp_path: Path) -> None:
    path, one = tmp_path / "p.slots", np.array([1], np.int32)
    times = iter((1000, 1000, 5000, 10, 11))  # the clock may stand still, and go back
    file = BlockFile(path, NUM_SLOTS * _SLOT)
    slots = SlotFile(file, NUM_SLOTS, identity_of(), clock=lambda: next(times))
    memory = np.zeros(PAYLOAD_BYTES, np.uint8)
    address = np.array([memory.ctypes.data])
    seen = []
    for _ in range(4):
        slots.write_jobs(one, address, [name_of(1)])
        seen.append(int(slots.write_numbers(one)[0]))
    assert seen == [1000, 1001, 5000, 5001]
    slots.adopt(one, np.array([9000]))
    slots.write_jobs(one, address, [name_of(1)])
    assert slots.write_numbers(one)[0] == 9001
    slots.close()


@pytest.mark.parametrize("payload_bytes", [PAYLOAD_BYTES, 4096])
def test_the_file_is_private_and_past_the_page_cache(tmp_path: Path, payload_bytes: int) -> None:
    rig = SlotRig(tmp_path / "p.slots", identity_of(payload_bytes))
    assert stat.S_IMODE(rig.path.stat().st_mode) == 0o600
    flags = os.O_RDWR | os.O_DIRECT
    try:
        os.close(os.open(rig.path, flags))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    assert rig.file.is_direct
    rig.close()


# ---------------------------------------------------------------------- other sizes


def test_a_resized_pool_keeps_what_stays(rig: SlotRig) -> None:
    for slot in range(NUM_SLOTS):
        assert rig.write(slot, payload_of(slot))
    rig.slots.resize(NUM_SLOTS + 3)
    assert rig.slots.num_slots == NUM_SLOTS + 3
    assert rig.path.stat().st_size == (NUM_SLOTS + 3) * _SLOT
    assert [rig.read(slot) for slot in range(NUM_SLOTS)] == [payload_of(s) for s in range(4)]
    assert rig.read(NUM_SLOTS + 2) is None
    assert rig.write(NUM_SLOTS + 2, payload_of(9))
    assert rig.read(NUM_SLOTS + 2) == payload_of(9)
    rig.slots.resize(2)
    assert rig.path.stat().st_size == 2 * _SLOT
    assert [rig.read(slot) for slot in range(2)] == [payload_of(0), payload_of(1)]


def test_what_was_cut_off_never_comes_back(rig: SlotRig) -> None:
    """Not even where the disk lost the cut itself."""
    assert rig.write(3, payload_of(3))
    old = rig.slot_on_disk(3)
    rig.slots.resize(2)
    rig.slots.resize(4)
    assert rig.read(3) is None
    rig.put_on_disk(3, old)
    assert rig.read(3) is None


def test_a_pool_that_finds_no_room_stays_as_it_is(rig: SlotRig) -> None:
    assert rig.write(3, payload_of(3))
    with pytest.raises(StorageError, match="has no room"):
        rig.slots.resize((1 << 50) // _SLOT)
    assert rig.slots.num_slots == NUM_SLOTS
    assert rig.read(3) == payload_of(3)


def _relocate(rig: SlotRig, src: Sequence[int], dst: Sequence[int]) -> list[bool]:
    jobs = rig.slots.relocate_jobs(np.array(src, np.int32), np.array(dst, np.int32))
    assert all(job.reads == job.writes == () for job in jobs)
    batch = rig.device.io.submit(jobs)
    batch.synchronize()
    return [bool(good) for good in batch.ok]


@pytest.mark.parametrize("payload_bytes", [1, PAYLOAD_BYTES, 4096, 12_288])
def test_relocated_payloads_are_good_at_their_new_slots(tmp_path: Path, payload_bytes: int) -> None:
    rig = SlotRig(tmp_path / "p.slots", identity_of(payload_bytes))
    for slot in range(NUM_SLOTS):
        assert rig.write(slot, payload_of(slot, payload_bytes))
    assert _relocate(rig, [3, 2], [0, 1]) == [True, True]
    expected = [payload_of(slot, payload_bytes) for slot in (3, 2, 2, 3)]
    assert [rig.read(slot) for slot in range(NUM_SLOTS)] == expected
    assert rig.slot_on_disk(0) != rig.slot_on_disk(3)  # each under a header of its own
    assert rig.read(0, key=key_of(3)) is not None  # and under its name
    assert _relocate(rig, [0], [2]) == [True]  # and again
    assert rig.read(2) == expected[0]
    rig.close()


def test_nothing_bad_is_relocated(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(0))
    assert rig.write(1, payload_of(1))
    rig.put_on_disk(0, b"\x01\x02\x03", SECTOR_BYTES + 500)
    before = rig.slot_on_disk(2)
    assert _relocate(rig, [0], [2]) == [False]
    assert "slot 0" in rig.slots.last_failure
    assert rig.slot_on_disk(2) == before
    assert rig.read(2) is None


def test_a_slot_that_shall_be_overwritten_is_not_good_before_it_is(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(0))
    assert rig.write(1, payload_of(1))
    (job,) = rig.slots.relocate_jobs(np.array([0], np.int32), np.array([1], np.int32))
    assert rig.read(1) is None
    assert rig.read(0) == payload_of(0)
    assert job.run()
    assert rig.read(1) == payload_of(0)


def test_a_source_that_was_written_again_is_not_relocated(rig: SlotRig) -> None:
    """The job's owner asked for what lay there then."""
    assert rig.write(0, payload_of(0))
    (job,) = rig.slots.relocate_jobs(np.array([0], np.int32), np.array([1], np.int32))
    assert rig.write(0, payload_of(5))
    assert not job.run()
    assert rig.read(1) is None


@pytest.mark.parametrize(("src", "dst"), [([0, 1], [1, 2]), ([0, 1], [2, 2]), ([0], [1, 2])])
def test_slots_that_get_in_each_others_way_are_a_bug(
    rig: SlotRig, src: list[int], dst: list[int]
) -> None:
    with pytest.raises(AssertionError):
        rig.slots.relocate_jobs(np.array(src, np.int32), np.array(dst, np.int32))


def test_a_relocation_that_the_disk_fails_is_a_result(tmp_path: Path) -> None:
    rig = SlotRig(tmp_path / "p.slots", kind=_WritesHalf)
    assert isinstance(rig.file, _WritesHalf)
    assert rig.write(0, payload_of(0))
    rig.file.is_broken = True
    assert _relocate(rig, [0], [1]) == [False]
    assert rig.read(1) is None
    assert rig.read(0) == payload_of(0)
    rig.close()


def test_many_relocations_at_once(tmp_path: Path) -> None:
    rig = SlotRig(tmp_path / "p.slots")
    half = 40
    rig.slots.resize(2 * half)
    for slot in range(half):
        assert rig.write(slot, payload_of(slot))
    order = np.random.default_rng(0).permutation(half).tolist()
    assert _relocate(rig, order, list(range(half, 2 * half))) == [True] * half
    assert [rig.read(half + place) for place in range(half)] == [payload_of(s) for s in order]
    rig.close()


# ---------------------------------------------------------------------- damage


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Exhaustive over the header and the payload. In what fills its last sector a flip may pass,
    and then the payload is right.
    """
    rig = SlotRig(tmp_path / "p.slots", identity_of(100))
    assert rig.write(1, payload_of(4, 100))
    good = rig.slot_on_disk(1)
    num_checked = SECTOR_BYTES + 100
    path_fd = os.open(rig.path, os.O_RDWR)
    try:
        for index in [*range(num_checked), *range(num_checked, len(good), 97)]:
            for bit in range(8) if index < num_checked else [index % 8]:
                os.pwrite(path_fd, bytes([good[index] ^ 1 << bit]), len(good) + index)
                expected = None if index < num_checked else payload_of(4, 100)
                assert rig.read(1) == expected, (index, bit)
            os.pwrite(path_fd, good[index : index + 1], len(good) + index)
    finally:
        os.close(path_fd)
    assert rig.read(1) == payload_of(4, 100)
    rig.close()


@pytest.mark.parametrize(
    "other",
    [
        identity_of(model_fingerprint=b"n" * 32),
        identity_of(codec="raw:2:"),
        identity_of(codec="rax:1:"),
        identity_of(tokens_per_block=5),
        identity_of(PAYLOAD_BYTES + 1),
    ],
)
def test_a_slot_of_another_identity_is_not_there(
    rig: SlotRig, tmp_path: Path, other: FileIdentity
) -> None:
    """Even where it was put under the very write number that is expected."""
    foreign = SlotRig(tmp_path / "foreign.slots", other)
    assert foreign.slot_bytes == rig.slot_bytes
    assert foreign.write(1, payload_of(1, other.payload_bytes))
    assert rig.write(1, payload_of(1))
    one = np.array([1], np.int32)
    rig.slots.adopt(one, foreign.slots.write_numbers(one))
    rig.put_on_disk(1, foreign.slot_on_disk(1))
    assert rig.read(1) is None
    foreign.close()


def test_a_page_under_another_key_than_the_one_asked_for_is_a_miss(rig: SlotRig) -> None:
    assert rig.write(1, payload_of(1), name=name_of(5))
    assert rig.read(1, key=key_of(6)) is None
    assert rig.read(1, key=key_of(5)) == payload_of(1)


def test_two_slots_that_changed_places_are_found(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(1))
    assert rig.write(1, payload_of(2))
    first, second = rig.slot_on_disk(0), rig.slot_on_disk(1)
    rig.put_on_disk(0, second)
    rig.put_on_disk(1, first)
    assert rig.read(0) is rig.read(1) is None


def test_an_older_copy_of_the_same_slot_is_found(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(1))
    old = rig.slot_on_disk(0)
    assert rig.write(0, payload_of(2))
    rig.put_on_disk(0, old)
    assert rig.read(0) is None


def test_a_torn_write_is_found_wherever_it_tore(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(1))
    old = rig.slot_on_disk(0)
    assert rig.write(0, payload_of(2))
    new = rig.slot_on_disk(0)
    for length in (8, 40, 48, 160, 512, 4096, 4097, 4096 + 512, 4096 + PAYLOAD_BYTES - 1):
        for torn in (new[:length] + old[length:], old[:length] + new[length:]):
            rig.put_on_disk(0, torn)
            # The first bytes of every header are equal: what tore there did not tear.
            assert rig.read(0) == (payload_of(2) if torn == new else None), length


def test_a_slot_that_was_never_written_holds_nothing(rig: SlotRig) -> None:
    assert rig.read(3) is None
    assert rig.write(2, payload_of(2))
    rig.put_on_disk(3, rig.slot_on_disk(2))
    assert rig.read(3) is None


# ---------------------------------------------------------------------- erasing, adopting


def test_an_erased_slot_is_blank_on_disk(rig: SlotRig) -> None:
    assert rig.write(1, payload_of(1))
    (job,) = rig.slots.erase_jobs(np.array([1], np.int32))
    assert rig.read(1) is None  # at once
    assert job.run()
    assert not any(rig.slot_on_disk(1)[:SECTOR_BYTES])
    assert rig.write(1, payload_of(2))
    assert rig.read(1) == payload_of(2)


def test_a_later_run_reads_what_it_adopts_and_only_as_what_it_was(tmp_path: Path) -> None:
    rig = SlotRig(tmp_path / "p.slots")
    slots = np.array([0, 1], np.int32)
    assert rig.write(0, payload_of(0))
    assert rig.write(1, payload_of(1))
    numbers = rig.slots.write_numbers(slots)
    rig.close()
    again = SlotRig(tmp_path / "p.slots")
    assert again.read(0) is again.read(1) is None
    again.slots.adopt(slots, numbers + np.array([0, 1]))
    assert again.read(0) == payload_of(0)
    assert again.read(1) is None
    again.slots.forget(slots)
    assert again.read(0) is None
    again.close()


def test_a_scan_finds_the_good_and_counts_the_damaged(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(0), name=name_of(8))
    assert rig.write(2, payload_of(2), name=dataclasses.replace(name_of(9), key=BLANK_KEY))
    assert rig.write(3, payload_of(3))
    rig.put_on_disk(3, b"\xff", 20)
    rig.put_on_disk(2, b"\xff" * 9, SECTOR_BYTES + 3)  # a payload is looked at when it is read
    ((job, part),) = rig.slots.scan_jobs()
    assert job.run()
    assert [(h.slot, h.name.key) for h in part.found] == [(0, key_of(8)), (2, BLANK_KEY)]
    assert part.num_damaged == 1


def test_a_scan_covers_all_slots_in_parts(tmp_path: Path) -> None:
    rig = SlotRig(tmp_path / "p.slots", identity_of(1), num_slots=600)
    for slot in (0, 255, 256, 599):
        assert rig.write(slot, b"x")
    jobs = rig.slots.scan_jobs()
    assert [(part.start, part.stop) for _, part in jobs] == [(0, 256), (256, 512), (512, 600)]
    assert all(job.run() for job, _ in jobs)
    assert [h.slot for _, part in jobs for h in part.found] == [0, 255, 256, 599]
    rig.close()


def test_headers_that_can_not_be_read_are_counted(tmp_path: Path) -> None:
    rig = SlotRig(tmp_path / "p.slots", kind=_Broken)
    ((job, part),) = rig.slots.scan_jobs()
    assert not job.run()
    assert (part.found, part.num_damaged) == ([], NUM_SLOTS)
    rig.close()


class _LosesWrites(BlockFile):
    """A disk that says that it has written, and has not."""

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        return sum(map(len, buffers))


@pytest.mark.parametrize("num_writes", [1, 2, 3])
def test_what_an_earlier_run_left_in_a_slot_is_never_this_runs(
    tmp_path: Path, num_writes: int
) -> None:
    """Even where this run's write was lost and both counted the same number of writes."""
    path = tmp_path / "p.slots"
    rig = SlotRig(path)
    for index in range(num_writes):
        assert rig.write(1, payload_of(index))
    rig.close()
    again = SlotRig(path, kind=_LosesWrites)
    assert again.read(1) is None
    for index in range(num_writes):
        assert again.write(1, payload_of(100 + index))
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
        super()._write_some([memoryview(buffers[0])[:SECTOR_BYTES]], offset)
        raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize("kind", [_Broken, _Full])
@pytest.mark.parametrize("payload_bytes", [PAYLOAD_BYTES, 4096])
def test_an_error_of_the_disk_is_a_result_and_no_exception(
    tmp_path: Path, kind: type[BlockFile], payload_bytes: int
) -> None:
    rig = SlotRig(tmp_path / "p.slots", identity_of(payload_bytes), kind)
    assert rig.write(0, payload_of(1, payload_bytes)) is False
    assert rig.read(0) is None
    batch = rig.device.io.submit(rig.write_jobs([0, 1], [0, 5000]))
    batch.synchronize()
    assert batch.ok.tolist() == [False, False]
    rig.close()


@pytest.mark.parametrize("payload_bytes", [PAYLOAD_BYTES, 8192])
def test_what_a_failed_write_has_torn_is_not_read(tmp_path: Path, payload_bytes: int) -> None:
    rig = SlotRig(tmp_path / "p.slots", identity_of(payload_bytes), _WritesHalf)
    assert isinstance(rig.file, _WritesHalf)
    assert rig.write(0, payload_of(1, payload_bytes))
    rig.file.is_broken = True
    assert not rig.write(0, payload_of(2, payload_bytes))
    assert rig.read(0) is None
    rig.file.is_broken = False
    assert rig.write(0, payload_of(3, payload_bytes))
    assert rig.read(0) == payload_of(3, payload_bytes)
    rig.close()


def test_a_truncated_file_is_a_miss_for_what_is_cut_off(rig: SlotRig) -> None:
    for slot in range(NUM_SLOTS):
        assert rig.write(slot, payload_of(slot))
    os.truncate(rig.path, _SLOT + SECTOR_BYTES)
    assert [rig.read(slot) for slot in range(NUM_SLOTS)] == [payload_of(0), None, None, None]


def test_a_payload_of_another_size_is_refused(tmp_path: Path) -> None:
    """The same file under another configuration: slots lie elsewhere, or hold something else."""
    path = tmp_path / "p.slots"
    rig = SlotRig(path, identity_of(1000))
    assert rig.write(0, payload_of(1, 1000))
    rig.close()
    other = SlotRig(path, identity_of(1001))
    assert other.slot_bytes == rig.slot_bytes
    assert other.read(0) is None
    other.close()


def test_closing_gives_the_file_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rig = SlotRig(tmp_path / "p.slots")
    assert rig.write(0, payload_of(1))
    rig.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_slab_keeps_no_view_of_callers_memory(rig: SlotRig) -> None:
    assert rig.write(0, payload_of(1))
    view: npt.NDArray[np.uint8] = rig.memory.array
    view[:] = 0
    assert rig.read(0) == payload_of(1)
