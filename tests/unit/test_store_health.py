"""A failing tier is left alone, tried again after longer and longer, and comes back."""

from __future__ import annotations

import logging

import pytest

from coldpage.store import HealthState, TierHealth


class _Rig:
    def __init__(self) -> None:
        self.now = 50.0
        self.health = TierHealth("the tier", lambda: self.now)

    def fail_writes(self, count: int) -> None:
        for _ in range(count):
            self.health.note_write(False, "no space")

    def fail_reads(self, count: int) -> None:
        for _ in range(count):
            self.health.note_read(False, "too slow")

    def waits_s(self, is_write: bool) -> float:
        """How long until the next try."""
        may = self.health.may_write if is_write else self.health.may_read
        start = self.now
        while not may():
            self.now += 0.25
            assert self.now - start < 100
        return self.now - start


@pytest.fixture
def rig() -> _Rig:
    return _Rig()


def test_a_tier_works_at_first(rig: _Rig) -> None:
    assert rig.health.state is HealthState.OK
    assert all(rig.health.may_write() and rig.health.may_read() for _ in range(5))


def test_failures_that_are_not_in_a_row_do_nothing(rig: _Rig) -> None:
    for _ in range(5):
        rig.fail_writes(2)
        rig.health.note_write(True)
        rig.fail_reads(7)
        rig.health.note_read(True)
    assert rig.health.state is HealthState.OK
    assert (rig.health.num_write_failures, rig.health.num_read_failures) == (10, 35)


def test_failed_writes_make_it_read_only(rig: _Rig) -> None:
    rig.fail_writes(3)
    assert rig.health.state is HealthState.READ_ONLY
    assert not rig.health.may_write()
    assert rig.health.may_read()


def test_failed_reads_turn_it_off(rig: _Rig) -> None:
    rig.fail_reads(8)
    assert rig.health.state is HealthState.OFF
    assert not rig.health.may_write()
    assert not rig.health.may_read()


@pytest.mark.parametrize("is_write", [True, False])
def test_it_is_tried_after_a_second_and_then_less_and_less_often(rig: _Rig, is_write: bool) -> None:
    fail = rig.fail_writes if is_write else rig.fail_reads
    fail(3 if is_write else 8)
    waits = []
    for _ in range(9):
        waits.append(rig.waits_s(is_write))
        assert not (rig.health.may_write if is_write else rig.health.may_read)()  # one at a time
        fail(1)
        fail(1)  # one that had been under way
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    rig.waits_s(is_write)
    (rig.health.note_write if is_write else rig.health.note_read)(True)
    assert rig.health.state is HealthState.OK
    assert rig.health.may_write()
    fail(3 if is_write else 8)
    assert rig.waits_s(is_write) == 1


def test_a_try_that_nobody_reports_is_followed_by_another(rig: _Rig) -> None:
    rig.fail_writes(3)
    assert [rig.waits_s(True) for _ in range(3)] == [1, 1, 1]


def test_a_tier_that_is_off_comes_back_by_a_write_on_trial(rig: _Rig) -> None:
    """It may have nothing left to read."""
    rig.fail_reads(8)
    rig.now += 1
    assert rig.health.may_write()
    rig.health.note_write(True)
    assert rig.health.state is HealthState.OK
    rig.fail_reads(1)
    assert rig.health.state is HealthState.OFF


def test_a_failed_try_by_writing_counts(rig: _Rig) -> None:
    rig.fail_reads(8)
    rig.now += 1
    assert rig.health.may_write()
    rig.fail_writes(1)
    assert rig.waits_s(False) == 2


def test_both_kinds_are_counted_apart(rig: _Rig) -> None:
    rig.fail_writes(3)
    rig.fail_reads(8)
    assert rig.health.state is HealthState.OFF
    rig.now += 1
    assert rig.health.may_read()
    rig.health.note_read(True)
    assert rig.health.state is HealthState.READ_ONLY


def test_each_change_is_one_line(rig: _Rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rig.fail_writes(6)
        rig.fail_reads(12)
        rig.health.note_read(True)
        rig.health.note_write(True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == rig.health.num_changes == 4
    assert lines[0].startswith("the tier is read-only now: 3 writes in a row failed (no space)")
    assert lines[1].startswith("the tier is off now: 8 reads in a row failed or took too long (too")
    assert lines[2].startswith("the tier is read-only now")
    assert lines[3].startswith("the tier works again")
