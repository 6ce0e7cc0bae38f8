"""Batched syncs: bounded delay, honest points."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from coldpage.device.io import ThreadedIo
from coldpage.device.progress import Progress
from coldpage.errors import UsageError
from coldpage.store import SyncBatcher


class _File:
    """Counts syncs, and fails or waits when told to."""

    def __init__(self) -> None:
        self.num_syncs = 0
        self.last_failure = ""
        self.is_broken = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def sync(self) -> None:
        assert self.may_go_on.wait(10)
        self.num_syncs += 1
        if self.is_broken:
            raise OSError(errno.EIO, "broken")


class _Rig:
    def __init__(self) -> None:
        self.files = [_File(), _File()]
        self.io = ThreadedIo(Progress(), 2)
        self.now = 100.0
        self.batcher = SyncBatcher(
            self.files, self.io, lambda: self.now, max_delay_s=0.5, max_writes=10
        )

    def wait(self) -> None:
        """Until the sync in flight has ended, and been noticed."""
        assert self.batcher._in_flight is not None
        self.batcher._in_flight.synchronize()
        self.batcher.poll()


@pytest.fixture
def rig() -> Iterator[_Rig]:
    rig = _Rig()
    yield rig
    for file in rig.files:
        file.may_go_on.set()
    rig.io.close()


def test_nothing_dirty_is_durable_at_once(rig: _Rig) -> None:
    point = rig.batcher.point()
    assert point.is_done()
    assert point.ok
    rig.batcher.flush()
    assert rig.files[0].num_syncs == 0


def test_a_write_waits_for_others_but_not_for_long(rig: _Rig) -> None:
    rig.batcher.note()
    point = rig.batcher.point()
    rig.now += 0.49
    rig.batcher.note()  # does not begin the delay anew
    rig.batcher.poll()
    assert rig.batcher._in_flight is None
    rig.now += 0.02
    rig.batcher.poll()
    assert not point.is_done() or rig.files[0].num_syncs == 1
    rig.wait()
    assert point.is_done()
    assert point.ok
    assert [file.num_syncs for file in rig.files] == [1, 1]


def test_many_writes_do_not_wait(rig: _Rig) -> None:
    rig.batcher.note(9)
    rig.batcher.poll()
    assert rig.batcher._in_flight is None
    rig.batcher.note(1)
    rig.batcher.poll()
    rig.wait()
    assert rig.batcher.num_syncs == 1


def test_a_write_during_a_sync_is_not_covered_by_it(rig: _Rig) -> None:
    rig.files[0].may_go_on.clear()
    rig.batcher.note(10)
    first = rig.batcher.point()
    rig.batcher.poll()
    also_first = rig.batcher.point()  # nothing was written since
    rig.batcher.note()
    second = rig.batcher.point()
    rig.now += 10
    rig.batcher.poll()
    assert not first.is_done()
    with pytest.raises(UsageError):
        _ = first.ok
    rig.files[0].may_go_on.set()
    rig.wait()
    assert first.is_done()
    assert also_first.is_done()
    assert not second.is_done()
    rig.wait()
    assert second.is_done()
    assert second.ok
    assert rig.files[1].num_syncs == 2


def test_a_failed_sync_vouches_for_nothing_and_nor_does_the_next(rig: _Rig) -> None:
    rig.files[1].is_broken = True
    rig.batcher.note()
    lost = rig.batcher.point()
    rig.batcher.flush()
    assert lost.is_done()
    assert not lost.ok
    assert "broken" in rig.files[1].last_failure
    rig.files[1].is_broken = False
    rig.batcher.note()
    kept = rig.batcher.point()
    rig.batcher.flush()
    assert kept.ok
    assert not lost.ok
    assert (rig.batcher.num_syncs, rig.batcher.num_failures) == (1, 1)


def test_nothing_is_durable_after_a_failed_sync_until_one_succeeds(rig: _Rig) -> None:
    rig.files[0].is_broken = True
    rig.batcher.note()
    rig.batcher.flush()
    points = [rig.batcher.point() for _ in range(2)]
    assert not any(point.is_done() for point in points)
    rig.batcher.flush()
    assert [point.ok for point in points] == [False, False]
    rig.files[0].is_broken = False
    point = rig.batcher.point()
    rig.batcher.flush()
    assert point.ok
    assert rig.batcher.point().is_done()


def test_waiting_for_a_point_starts_the_sync(rig: _Rig) -> None:
    rig.batcher.note()
    point = rig.batcher.point()
    point.synchronize()
    assert point.ok
    point.synchronize()
    assert rig.files[0].num_syncs == 1


def test_flushing_covers_what_came_during_a_sync(rig: _Rig) -> None:
    rig.batcher.note(10)
    rig.batcher.poll()
    rig.batcher.note()
    point = rig.batcher.point()
    rig.batcher.flush()
    assert point.is_done()
    assert rig.files[0].num_syncs == 2
