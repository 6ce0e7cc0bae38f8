"""The blob store where the disk fails, lies or hangs; the kit proves the rest."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from coldpage.device.file import BlockFile
from coldpage.errors import ConfigurationError, StorageError, WrongThreadError
from coldpage.store import BlobStore, FileIdentity, HealthState, list_instances
from coldpage.store.sidecar import SIDECAR_NAME
from coldpage.testing.store_kit import blob_name, blob_payloads

_PAYLOAD = 5000
_IDENTITY = FileIdentity(b"f" * 32, "raw:1:", _PAYLOAD, 4)


class _Disk(BlockFile):
    """Fails or hangs when told to."""

    fails_writes = False
    fails_reads = False
    fails_syncs = False
    error = errno.EIO
    bad_offset = -1
    num_writes = 0

    def __init__(self, path: str | Path, num_bytes: int) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.may_write = threading.Event()
        self.may_write.set()
        super().__init__(path, num_bytes)

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        assert self.may_read.wait(20)
        if self.fails_reads:
            raise OSError(self.error, os.strerror(self.error))
        return super()._read_some(buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        assert self.may_write.wait(20)
        self.num_writes += 1
        if offset == self.bad_offset:
            raise OSError(self.error, os.strerror(self.error))
        if self.fails_writes:
            super()._write_some([buffers[0][:4096]], offset)  # torn as well
            raise OSError(self.error, os.strerror(self.error))
        return super()._write_some(buffers, offset)

    def sync(self) -> None:
        if self.fails_syncs:
            raise OSError(self.error, os.strerror(self.error))
        super().sync()


class _Rig:
    """A store on such a disk."""

    def __init__(self, path: Path, num_blobs: int = 8, **options: object) -> None:
        self.path = path
        disks: list[_Disk] = []

        def open_file(path: Path, num_bytes: int) -> _Disk:
            disks.append(_Disk(path, num_bytes))
            return disks[0]

        settings: dict[str, object] = {
            "model_fingerprint": _IDENTITY.model_fingerprint,
            "codec": _IDENTITY.codec,
            "payload_bytes": _PAYLOAD,
            "tokens_per_block": 4,
            "capacity_bytes": BlobStore.capacity_for(num_blobs, _IDENTITY),
            "max_sync_delay_s": 0.002,
            "open_file": open_file,
        }
        self.store = BlobStore(path, **(settings | options))  # type: ignore[arg-type]
        self.disk = disks[0]
        self.slot_bytes = self.disk.num_bytes // self.store.num_slots

    def put(self, *seeds: int) -> list[bool]:
        ticket = self.store.put([blob_name(s) for s in seeds], blob_payloads(seeds, _PAYLOAD))
        ticket.synchronize()
        oks: list[bool] = ticket.ok.tolist()
        return oks

    def get(self, *seeds: int) -> list[bool]:
        out = np.full((len(seeds), _PAYLOAD), 0xEE, np.uint8)
        ticket = self.store.get([blob_name(s).key for s in seeds], out)
        ticket.synchronize()
        assert np.array_equal(out[ticket.ok], blob_payloads(seeds, _PAYLOAD)[ticket.ok])
        oks: list[bool] = ticket.ok.tolist()
        return oks

    def delete(self, *seeds: int) -> list[bool]:
        ticket = self.store.delete([blob_name(s).key for s in seeds])
        ticket.synchronize()
        oks: list[bool] = ticket.ok.tolist()
        return oks

    def has(self, *seeds: int) -> list[bool]:
        found: list[bool] = self.store.contains([blob_name(s).key for s in seeds]).tolist()
        return found

    def slot_of(self, seed: int) -> int:
        return self.store._slots.slot_of[blob_name(seed).key, blob_name(seed).layer_group_id]

    def die(self) -> None:
        """As a killed process: nothing is tidied up."""
        self.store._resources.close()

    def heal(self, seconds: float = 1.0) -> None:
        """The disk works, and the waits are over."""
        self.disk.fails_writes = self.disk.fails_reads = self.disk.fails_syncs = False
        for breaker in (self.store.health._writes, self.store.health._reads):
            breaker._retry_at -= seconds
        self.store._no_erase_before -= seconds


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---------------------------------------------------------------------- failing disks


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_failed_writes_are_rows_that_are_not_ok_and_then_nothing_is_written(
    tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = _Rig(tmp_path)
    assert rig.put(1, 2) == [True, True]
    rig.disk.fails_writes, rig.disk.error = True, error
    assert rig.put(3, 4, 5) == [False] * 3
    assert rig.store.health.state is HealthState.READ_ONLY
    num_writes = rig.disk.num_writes
    assert rig.put(6, 7) == [False] * 2
    rig.store.poll()
    assert rig.disk.num_writes == num_writes
    assert rig.get(1, 2, 3, 4, 5) == [True, True, False, False, False]
    assert [r.getMessage() for r in caplog.records if os.strerror(error) in r.getMessage()] != []
    assert len(caplog.records) == 1
    rig.heal()
    assert rig.put(3) == [True]
    assert rig.store.health.state is HealthState.OK
    assert rig.put(4, 5, 6, 7, 8) == [True] * 5
    assert rig.get(*range(1, 9)) == [True] * 8  # every slot works again
    rig.store.close()
    again = _Rig(tmp_path)
    assert again.get(*range(1, 9)) == [True] * 8
    again.store.close()


def test_failed_reads_are_misses_and_the_blobs_stay(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert all(rig.put(*range(8)))
    rig.disk.fails_reads = True
    assert not any(rig.get(*range(8)))
    assert rig.store.health.state is HealthState.OFF
    assert not any(rig.get(*range(8)))
    rig.heal()
    assert rig.get(0) == [True]
    assert all(rig.get(*range(8)))
    assert rig.store.stats().num_damaged == 0
    rig.store.close()


def test_a_failed_sync_is_not_acknowledged_and_nor_is_a_later_put_of_the_same(
    tmp_path: Path,
) -> None:
    rig = _Rig(tmp_path)
    rig.disk.fails_syncs = True
    assert rig.put(1) == [False]
    assert rig.get(1) == [False]
    assert rig.put(1) == [False]
    assert rig.delete(1) == [False]
    assert rig.store.health.state is HealthState.READ_ONLY
    rig.heal()
    assert rig.put(1, 2) == [True, True]
    assert rig.get(1, 2) == [True, True]
    assert rig.delete(1) == [True]
    rig.store.close()


def test_a_failing_end_leaves_no_index(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert rig.put(1) == [True]
    rig.disk.fails_syncs = True
    rig.store.close()
    assert not (rig.disk.path.parent / SIDECAR_NAME).exists()
    again = _Rig(tmp_path)
    assert again.get(1) == [True]
    again.store.close()


# ---------------------------------------------------------------------- damage


def test_a_damaged_blob_is_a_miss_once_and_its_slot_is_used_again(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert all(rig.put(*range(8)))
    with open(rig.disk.path, "r+b") as file:
        os.pwrite(file.fileno(), b"\x99", rig.slot_of(3) * rig.slot_bytes + 4096 + 77)
    assert rig.get(2, 3) == [True, False]
    assert rig.has(3) == [False]
    assert rig.store.stats().num_damaged == 1
    assert rig.store.health.state is HealthState.OK
    rig.store.flush()
    assert rig.put(3) == [True]
    assert all(rig.get(*range(8)))
    rig.store.close()


def test_damage_to_what_is_not_durable_yet(tmp_path: Path) -> None:
    """The put is not acknowledged, and the blob can be put again."""
    rig = _Rig(tmp_path, max_sync_delay_s=1e9)
    store = rig.store
    ticket = store.put([blob_name(1)], blob_payloads([1], _PAYLOAD))
    _until(lambda: store.poll() or rig.has(1) == [True])  # type: ignore[func-returns-value]
    assert not ticket.is_done()
    with open(rig.disk.path, "r+b") as file:
        os.pwrite(file.fileno(), b"\x99\x01", rig.slot_of(1) * rig.slot_bytes + 4096 + 77)
    assert rig.get(1) == [False]
    assert ticket.is_done()
    assert not ticket.ok.any()
    assert rig.put(1) == [True]
    assert rig.get(1) == [True]
    store.close()


def test_two_slots_with_their_places_swapped_are_misses(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert all(rig.put(1, 2))
    places = [rig.slot_of(seed) * rig.slot_bytes for seed in (1, 2)]
    with open(rig.disk.path, "r+b") as file:
        first, second = (os.pread(file.fileno(), rig.slot_bytes, place) for place in places)
        os.pwrite(file.fileno(), second, places[0])
        os.pwrite(file.fileno(), first, places[1])
    assert rig.get(1, 2) == [False, False]
    rig.die()
    again = _Rig(tmp_path)
    assert again.has(1, 2) == [False, False]
    again.store.close()


# ---------------------------------------------------------------------- deletions last


def test_a_killed_store_finds_what_was_put_and_nothing_that_was_deleted(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert all(rig.put(1, 2, 3))
    assert all(rig.delete(2))
    rig.die()
    again = _Rig(tmp_path)
    assert again.get(1, 2, 3) == [True, False, True]
    again.store.close()


def test_a_deletion_reaches_older_copies_that_failed_writes_left(tmp_path: Path) -> None:
    """Blob 0 is evicted, the write over it fails before it begins, and blob 0 is put again
    elsewhere: deleting it must not let the first copy come back.
    """
    rig = _Rig(tmp_path)
    assert all(rig.put(*range(8)))
    first_slot = rig.slot_of(0)
    rig.disk.__class__ = _FailsBefore
    rig.disk.fails_writes = True
    assert rig.put(9) == [False]
    rig.disk.may_write.clear()  # the erasing of its slot hangs meanwhile
    rig.disk.fails_writes = False
    rig.store.poll()
    put = rig.store.put([blob_name(0)], blob_payloads([0], _PAYLOAD))
    ticket = rig.store.delete([blob_name(0).key])
    time.sleep(0.02)
    rig.store.poll()
    assert not ticket.is_done()
    rig.disk.may_write.set()
    ticket.synchronize()
    assert ticket.ok.all()
    assert put.is_done()
    assert not rig.store._slots.remains.slots_of((blob_name(0).key, blob_name(0).layer_group_id))
    rig.die()
    with open(rig.disk.path, "rb") as file:
        assert not any(os.pread(file.fileno(), 4096, first_slot * rig.slot_bytes))
    again = _Rig(tmp_path)
    assert again.has(0) == [False]
    again.store.close()


class _FailsBefore(_Disk):
    """Fails writes without touching anything."""

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        if self.fails_writes:
            raise OSError(self.error, os.strerror(self.error))
        return super()._write_some(buffers, offset)


def test_a_deletion_that_can_not_be_written_says_so(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert all(rig.put(1, 2))
    rig.disk.fails_writes = True
    assert rig.delete(1, 7) == [False, True]
    assert rig.has(1) == [False]
    rig.store.close()
    assert not (rig.disk.path.parent / SIDECAR_NAME).exists()  # it would hide what remains


def test_a_bad_sector_makes_its_deletion_fail_and_nothing_else(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert all(rig.put(*range(8)))
    rig.disk.bad_offset = rig.slot_of(3) * rig.slot_bytes
    ticket = rig.store.delete([blob_name(3).key, blob_name(4).key])
    for seed in range(20, 30):
        assert rig.put(seed) == [True]
    ticket.synchronize()
    assert ticket.ok.tolist() == [False, True]
    num_writes = rig.disk.num_writes
    for _ in range(50):
        rig.store.poll()
    rig.store.flush()
    assert rig.disk.num_writes == num_writes
    assert rig.store.health.state is HealthState.OK
    rig.disk.bad_offset = -1
    rig.heal()
    rig.store.poll()
    rig.store.flush()
    assert not len(rig.store._slots.remains)
    rig.store.close()


def test_a_small_store_syncs_before_its_slots_run_out(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, num_blobs=8, max_sync_delay_s=1e9)
    for seed in range(0, 40, 2):
        ticket = rig.store.put(
            [blob_name(s) for s in (seed, seed + 1)], blob_payloads([seed, seed + 1], _PAYLOAD)
        )
        _until(lambda: rig.store.poll() or ticket.is_done())  # type: ignore[func-returns-value]  # noqa: B023
        assert ticket.ok.all()
    rig.store.close()


def test_older_copies_found_at_the_start_are_erased(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert rig.put(1) == [True]
    slot = rig.slot_of(1)
    old = (rig.disk.path, slot * rig.slot_bytes)
    copy = old[0].read_bytes()[old[1] : old[1] + rig.slot_bytes]
    # The same blob once more, in another slot and written later.
    name, payload = blob_name(1), blob_payloads([1], _PAYLOAD)
    address = np.array([payload.ctypes.data])
    (job,) = rig.store._file.write_jobs(np.array([5], np.int32), address, [name])
    assert job.run()
    rig.die()
    again = _Rig(tmp_path)
    name_key = (name.key, name.layer_group_id)
    assert again.store._slots.remains.slots_of(name_key) == {slot}
    assert again.slot_of(1) == 5
    assert again.get(1) == [True]
    assert again.delete(1) == [True]
    again.die()
    last = _Rig(tmp_path)
    assert last.has(1) == [False]
    assert copy[:4] == b"CPGS"
    last.store.close()


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_header_that_a_crash_left_alone_does_not_pass_for_a_blob(
    tmp_path: Path, is_clean: bool
) -> None:
    """The header was written and the payload was not: whoever puts the blob again is told that it
    stays only when it does, also where a clean end came in between.
    """
    rig = _Rig(tmp_path)
    assert all(rig.put(1, 2, 3))
    slot, path = rig.slot_of(1), rig.disk.path
    rig.die()
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), bytes(5000), slot * rig.slot_bytes + 4096)
    if is_clean:
        _Rig(tmp_path).store.close()
    again = _Rig(tmp_path)
    assert again.has(1, 2, 3) == [True, True, True]
    num_writes = again.disk.num_writes
    assert again.put(1, 2) == [True, True]
    assert again.disk.num_writes > num_writes
    assert again.get(1, 2, 3) == [True, True, True]
    again.die()
    last = _Rig(tmp_path)
    assert last.get(1, 2, 3) == [True, True, True]
    num_writes = last.disk.num_writes
    assert last.put(1, 2, 3) == [True, True, True]
    assert last.disk.num_writes == num_writes  # all is read, nothing is written again
    last.store.close()
    trusting = _Rig(tmp_path)
    trusting.disk.fails_reads = True
    assert trusting.put(1, 2, 3) == [True, True, True]  # the index knows that they were read
    trusting.store.close()


def test_a_deletion_overtakes_a_put_that_checks_first(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert rig.put(1) == [True]
    rig.die()
    again = _Rig(tmp_path)
    again.disk.may_read.clear()
    put = again.store.put([blob_name(1)], blob_payloads([1], _PAYLOAD))
    deletion = again.store.delete([blob_name(1).key])
    again.disk.may_read.set()
    again.store.flush()
    assert not put.ok.any()
    assert deletion.ok.all()
    assert again.has(1) == [False]
    again.store.close()


def test_a_read_in_flight_is_not_disturbed_by_a_deletion_or_an_eviction(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, num_blobs=2)
    assert all(rig.put(1, 2))
    rig.disk.may_read.clear()
    out = np.zeros((2, _PAYLOAD), np.uint8)
    reading = rig.store.get([blob_name(1).key, blob_name(2).key], out)
    deleting = rig.store.delete([blob_name(1).key])
    assert rig.put(3) == [False]  # no slot can be had
    rig.store.poll()
    assert not deleting.is_done()
    rig.disk.may_read.set()
    reading.synchronize()
    assert reading.ok.all()
    assert np.array_equal(out, blob_payloads([1, 2], _PAYLOAD))
    deleting.synchronize()
    assert deleting.ok.all()
    assert rig.put(3) == [True]
    assert rig.has(1, 2, 3) == [False, True, True]
    rig.store.close()


# ---------------------------------------------------------------------- deadlines


def test_a_read_over_its_deadline_is_a_miss_and_touches_nothing_later(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, read_deadline_s=0.05)
    assert all(rig.put(1, 2))
    assert rig.get(1) == [True]
    rig.disk.may_read.clear()
    out = np.full((1, _PAYLOAD), 0xEE, np.uint8)
    start = time.monotonic()
    ticket = rig.store.get([blob_name(1).key], out)
    ticket.synchronize()
    assert time.monotonic() - start < 5
    assert not ticket.ok.any()
    assert rig.store.stats().num_overdue == 1
    rig.store.flush()  # does not wait for it
    rig.disk.may_read.set()
    _until(lambda: rig.store.poll() or not rig.store._reads)  # type: ignore[func-returns-value]
    assert (out == 0xEE).all()
    assert rig.get(1, 2) == [True, True]
    rig.store.close()


# ---------------------------------------------------------------------- identity, bounds, threads


def test_another_codec_or_model_reuses_nothing_and_loses_nothing(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    assert rig.put(1) == [True]
    rig.store.close()
    for change in ({"codec": "raw:2:"}, {"model_fingerprint": b"g" * 32}, {"payload_bytes": 4999}):
        other = _Rig(tmp_path, **change)
        assert other.has(1) == [False]
        other.store.close()
        with pytest.raises(StorageError, match="Nothing was touched"):
            _Rig(tmp_path, instance_id=rig.store.instance_id, **change)
    assert len(list_instances(tmp_path)) == 4
    again = _Rig(tmp_path)
    assert again.store.instance_id == rig.store.instance_id
    assert again.get(1) == [True]
    again.store.close()


def test_instances_share_a_path(tmp_path: Path) -> None:
    first, second = _Rig(tmp_path, instance_id="a"), _Rig(tmp_path, instance_id="b")
    assert first.put(1) == second.put(2) == [True]
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
        _Rig(tmp_path, instance_id="a")
    assert (first.has(1, 2), second.has(1, 2)) == ([True, False], [False, True])
    first.store.close()
    second.store.close()


@pytest.mark.parametrize("num_blobs", [1, 8])
def test_the_capacity_bounds_everything_on_disk(tmp_path: Path, num_blobs: int) -> None:
    rig = _Rig(tmp_path, num_blobs)
    assert rig.store.num_slots == num_blobs
    for seed in range(20):
        assert rig.put(seed) == [True]
    rig.store.close()
    num_bytes = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert num_bytes <= BlobStore.capacity_for(num_blobs, _IDENTITY)
    assert (rig.disk.path.parent / SIDECAR_NAME).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"capacity_bytes": BlobStore.capacity_for(1, _IDENTITY) - 1},
        {"capacity_bytes": "1GiB"},
        {"capacity_bytes": 1e9},
        {"model_fingerprint": b"short"},
        {"model_fingerprint": 32 * "m"},
        {"codec": "c" * 1025},
        {"payload_bytes": 0},
        {"payload_bytes": True},
        {"tokens_per_block": -1},
        {"tokens_per_block": 4.0},
        {"instance_id": "../elsewhere"},
    ],
)
def test_what_can_not_be_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigurationError):
        _Rig(tmp_path / "store", **change)
    assert not (tmp_path / "store").exists()
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_store_belongs_to_one_thread(tmp_path: Path) -> None:
    rig = _Rig(tmp_path)
    raised: list[BaseException] = []

    def touch() -> None:
        try:
            rig.store.poll()
        except WrongThreadError as error:
            raised.append(error)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    assert len(raised) == 1
    rig.store.close()


def test_opening_shows_progress_and_closing_makes_it_needless(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    rig = _Rig(tmp_path, 300, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(256, 300), (300, 300)]
    assert all(rig.put(*range(10)))
    rig.store.close()
    again = _Rig(tmp_path, 300, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 2
    assert all(again.get(*range(10)))
    again.store.close()


def test_counts_add_up(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, 4)
    assert all(rig.put(1, 2, 3, 4))
    assert rig.put(5) == [True]
    assert rig.get(1, 2, 5) == [False, True, True]
    stats = rig.store.stats()
    assert (stats.num_slots, stats.num_blobs) == (4, 4)
    assert (stats.num_hits, stats.num_misses) == (2, 1)
    assert (stats.num_written, stats.num_evicted, stats.num_refused) == (5, 1, 0)
    rig.store.close()
