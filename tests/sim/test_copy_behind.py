"""What is suspended is copied to a cold level in memory at once, as far as that costs nothing, and
never twice.
"""

from __future__ import annotations

import logging

import pytest

from coldpage import DeviceError
from coldpage.testing.pattern_engine import PatternSequence
from tests.sim.rig import Rig
from tests.sim.scenes import (
    Build,
    filled,
    hot_blocks,
    moves,
    prompt,
    push_out,
    resumed,
    suspended,
    totals,
)

HOT_BIT, COLD_BIT, DISK_BIT = 1, 2, 4


def _extend(rig: Rig, sequence: PatternSequence, num_tokens: int) -> None:
    """Resume, write some tokens more, suspend."""
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.step([7] * num_tokens)
    rig.check()
    sequence.cache.suspend()
    rig.check()


@pytest.mark.parametrize("level", ["host", "gpu"])
def test_a_page_is_copied_once(build: Build, level: str) -> None:
    """Over cycles of suspend and resume only blocks that have become full since are moved."""
    rig = build(hot=12, copies_behind=True, **{level: 12})
    path = f"hot-{level}"
    sequence = suspended(rig, [*prompt(3), 1])  # and half a block
    assert moves(rig, path) == 3
    assert rig.levels_of(sequence) == [HOT_BIT | COLD_BIT] * 3 + [HOT_BIT]
    for _ in range(3):
        resumed(rig, sequence)
        sequence.cache.suspend()
    assert moves(rig, path) == 3
    _extend(rig, sequence, 1)
    assert moves(rig, path) == 4
    _extend(rig, sequence, 3)
    assert moves(rig, path) == 5
    push_out(rig, 12)
    assert moves(rig, path) == 6, "the eviction writes what was not full, and nothing else"
    assert hot_blocks(sequence) == []
    resumed(rig, sequence)
    sequence.cache.suspend()
    push_out(rig, 12)
    assert moves(rig, path) == 6, "what came back hot has kept its copies"
    resumed(rig, sequence)


def test_an_eviction_later_only_frees_slots(build: Build) -> None:
    rig = build(hot=8, host=20, copies_behind=True)
    sequence = suspended(rig, prompt(4))
    rig.device.fail_next_submission("offload", 100)
    asker = filled(rig, prompt(8, 5))
    assert hot_blocks(sequence) == []
    rig.close(asker)
    rig.device._world.planned_failures.clear()
    resumed(rig, sequence)


def test_without_it_nothing_is_copied_before_its_slot_is_wanted(build: Build) -> None:
    rig = build(hot=8, host=20)
    suspended(rig, prompt(4))
    rig.poll()
    assert moves(rig, "hot-host") == 0


def test_the_first_cold_level_in_memory_decides(build: Build) -> None:
    rig = build(hot=8, disk=8, host=8, host2=8, order=("disk", "host", "host2"), copies_behind=True)
    sequence = suspended(rig, prompt(4))
    assert rig.used == [4, 0, 4, 0]
    resumed(rig, sequence)


@pytest.mark.parametrize("num_free", [0, 2])
def test_nothing_is_lost_for_a_copy(build: Build, num_free: int) -> None:
    """Neither pages that are nowhere else, nor the copies of other hot pages."""
    rig = build(hot=12, host=4 + num_free, copies_behind=True)
    first = suspended(rig, prompt(4))
    second = suspended(rig, prompt(4, 1))
    assert rig.levels_of(first) == [HOT_BIT | COLD_BIT] * 4
    has_copy = [bits & COLD_BIT for bits in rig.levels_of(second)]
    # Those that would be evicted first: neither the block with the sinks nor the newest.
    assert has_copy == [0, *[COLD_BIT * (num_free == 2)] * 2, 0]
    push_out(rig, 8)  # now the first is on the host alone
    third = suspended(rig, prompt(4, 2))
    assert not totals(rig, "dropped_pages") and not totals(rig, "lost_held_pages")
    assert rig.levels_of(first) == [COLD_BIT] * 4
    for sequence in (first, second, third):
        resumed(rig, sequence)
        sequence.cache.suspend()


def test_a_copy_takes_the_place_of_one_that_the_disk_has_too(build: Build) -> None:
    rig = build(hot=4, host=4, disk=20, copies_behind=True)
    first = suspended(rig, prompt(4))
    assert rig.manager.flush(60) == 0
    push_out(rig, 4)
    assert rig.levels_of(first) == [COLD_BIT | DISK_BIT] * 4
    second = suspended(rig, prompt(4, 1))
    assert rig.levels_of(second) == [HOT_BIT | COLD_BIT] * 4
    assert rig.levels_of(first) == [DISK_BIT] * 4
    for sequence in (first, second):
        resumed(rig, sequence)
        sequence.cache.suspend()


def test_the_copy_of_a_hot_page_is_left_to_it(build: Build) -> None:
    """Though the disk has it too: it would have to be copied again."""
    rig = build(hot=8, host=4, disk=20, copies_behind=True)
    first = suspended(rig, prompt(4))
    assert rig.manager.flush(60) == 0
    suspended(rig, prompt(4, 1))
    assert rig.levels_of(first) == [HOT_BIT | COLD_BIT | DISK_BIT] * 4
    assert moves(rig, "hot-host") == 4


def test_pages_from_disk_get_a_copy_in_memory(build: Build) -> None:
    rig = build(hot=4, host=4, disk=20, copies_behind=True)
    first = suspended(rig, prompt(4))
    assert rig.manager.flush(60) == 0
    push_out(rig, 4)
    second = suspended(rig, prompt(4, 1))
    assert rig.manager.flush(60) == 0
    resumed(rig, first)
    assert rig.levels_of(first) == [HOT_BIT | DISK_BIT] * 4
    rig.close(second)
    first.cache.suspend()
    assert rig.levels_of(first) == [HOT_BIT | COLD_BIT | DISK_BIT] * 4


def test_a_page_still_on_its_way_is_not_copied(build: Build) -> None:
    rig = build(hot=4, host=4, disk=20, copies_behind=True)
    first = suspended(rig, prompt(4))
    assert rig.manager.flush(60) == 0
    push_out(rig, 4)
    rig.close(suspended(rig, prompt(4, 1)))
    assert rig.manager.flush(60) == 0
    rig.device.faults.is_io_held = True
    assert first.resume()
    first.cache.suspend()
    assert rig.levels_of(first) == [DISK_BIT] * 4
    rig.device.faults.is_io_held = False
    resumed(rig, first)


def test_shared_pages_are_copied_when_the_last_lets_go(build: Build) -> None:
    rig = build(hot=12, host=12, copies_behind=True)
    first = filled(rig, prompt(4))
    second = filled(rig, prompt(4))
    assert rig.pages(first) == rig.pages(second)
    first.cache.suspend()
    assert moves(rig, "hot-host") == 0
    second.cache.suspend()
    assert moves(rig, "hot-host") == 4


def test_a_page_written_again_loses_its_copy(build: Build) -> None:
    """The copy may still be on its way when the page is cut and written to."""
    rig = build(hot=8, host=8, copies_behind=True)
    sequence = suspended(rig, prompt(4), num_committed=0)
    assert rig.levels_of(sequence) == [HOT_BIT | COLD_BIT] * 4
    sequence.truncate(5)
    _extend(rig, sequence, 4)
    assert moves(rig, "hot-host") == 4 + 2
    push_out(rig, 8)
    resumed(rig, sequence)


def test_work_on_a_stream_comes_before_the_copy(build: Build) -> None:
    rig = build(hot=8, host=8, copies_behind=True)
    stream = rig.streams[1]
    sequence = suspended(rig, prompt(4), stream=stream)
    push_out(rig, 8)
    resumed(rig, sequence, stream)
    sequence.cache.suspend()
    assert moves(rig, "hot-host") == 4


@pytest.mark.parametrize("num_failures", [1, 100])
def test_a_rejected_copy_is_none(build: Build, num_failures: int) -> None:
    rig = build(hot=8, host=8, copies_behind=True)
    sequence = filled(rig, prompt(4))
    rig.device.fail_next_submission("offload", num_failures)
    sequence.cache.suspend()
    assert rig.levels_of(sequence) == [HOT_BIT] * 4
    assert totals(rig, "rejected_submissions") == 1
    rig.check()
    rig.device._world.planned_failures.clear()
    resumed(rig, sequence)
    sequence.cache.suspend()
    assert rig.levels_of(sequence) == [HOT_BIT | COLD_BIT] * 4


def test_a_device_that_fails_does_not_fail_a_suspend(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = build(hot=8, host=8, copies_behind=True)
    sequence = filled(rig, prompt(4))

    def fail() -> None:
        raise DeviceError("a planned failure")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(rig.storage.moves.offload_stream, "record", fail)
        sequence.cache.suspend()
    assert "a planned failure" in caplog.text
    rig.storage.moves.offload_stream.synchronize()
    rig.check()
    assert rig.used == [4, 0]
    resumed(rig, sequence)


def test_lost_pages_and_stale_ones_are_not_copied(build: Build) -> None:
    rig = build(hot=8, host=20, kind="window", copies_behind=True)
    sequence = suspended(rig, prompt(6))
    live = [bits for bits in rig.levels_of(sequence) if bits]
    assert moves(rig, "hot-host") == len(live) < 6
    resumed(rig, sequence)


@pytest.mark.parametrize("copies_behind", [False, True])
def test_blocks_in_a_row_stay_neighbours_on_both_levels(build: Build, copies_behind: bool) -> None:
    """So that a device may move them as one. Slots are handed out again in order, whoever had them
    and whatever went first.
    """
    rig = build(hot=9, host=20, copies_behind=copies_behind)
    for first in (0, 5, 3):
        sequence = suspended(rig, prompt(8, first))
        push_out(rig, 9)
        resumed(rig, sequence)
        for level in (0, 1):
            slots = rig.table.slot[level, rig.pages(sequence)]
            assert (slots[1:] == slots[:-1] + 1).all(), (first, level, slots)
        sequence.cache.plan_drop()
        rig.close(sequence)
