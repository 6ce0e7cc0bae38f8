"""Levels that change their size while they hold pages."""

from __future__ import annotations

import pytest

from coldpage import create_default_cold_page_codec
from coldpage.config import ConfigurationError
from coldpage.errors import DeviceError, OutOfPagesError, UsageError
from coldpage.testing.example_codecs import DeviceIndexCodec, PaddingCodec
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import CacheLevel
from tests.sim.rig import MakeCodec, Rig
from tests.sim.scenes import (
    PER_BLOCK,
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

HOT, HOST, DISK = 0, 1, 2
CODECS: list[MakeCodec] = [create_default_cold_page_codec, DeviceIndexCodec]


def bases(rig: Rig) -> list[int]:
    """Every address that a kernel or a codec may remember."""
    return [
        pool.base_address for group in rig.manager.hot_pool_groups() for pool in group.pools
    ] + [
        pool.base_address
        for level in rig.storage.levels[1:]
        if not level.is_disk
        for group in level.groups
        for pool in group.memory
    ]


def slots(rig: Rig, level: int) -> list[int]:
    """The size of each pool group of a level."""
    return [g.total_slots for g in rig.manager.stats().levels[level].pool_groups]


def state(rig: Rig) -> tuple[object, ...]:
    """What a refused resize must leave alone."""
    stats = rig.manager.stats()
    return (
        stats.levels,
        stats.moved_pages,
        bases(rig),
        rig.manager.num_hot_blocks,
        rig.manager.max_sequence_tokens,
        rig.table.slot[:, : rig.table.num_pages + 1].tolist(),
    )


def in_the_upper_part(rig: Rig, num_blocks: int) -> PatternSequence:
    """A suspended sequence whose pages lie in the upper half of the hot slots."""
    hot = rig.num_lockable_blocks
    low = filled(rig, prompt(hot // 2, 70), num_committed=0)
    sequence = suspended(rig, prompt(num_blocks, 71))
    rig.close(low)
    return sequence


def all_come_back(rig: Rig, *sequences: PatternSequence) -> None:
    for sequence in sequences:
        assert sequence.cache.missing_blocks() == []
        resumed(rig, sequence, rig.streams[1])
        sequence.cache.suspend()
        rig.check()


# The hot level


@pytest.mark.parametrize("kind", ["full", "mixed", "mixed-sizes"])
@pytest.mark.parametrize("cold", [{"host": 8}, {"disk": 8}, {"host": 3, "disk": 12}])
@pytest.mark.parametrize("codec", CODECS)
def test_half_the_hot_level_and_every_byte_is_as_before(
    build: Build, kind: str, cold: dict[str, int], codec: MakeCodec
) -> None:
    rig = build(hot=8, kind=kind, codec=codec, **cold)
    first, second = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    before = bases(rig)
    rig.resize(HOT, 4)
    rig.check()
    assert sum(slots(rig, HOT)) == 4 * len(rig.layout.layer_groups)
    assert bases(rig) == before
    assert totals(rig, "lost_held_pages") == 0
    assert sum(moves(rig, f"hot-{name}") for name in ("host", "disk")) > 0
    all_come_back(rig, first, second)


@pytest.mark.parametrize("cold", [{}, {"host": 8}])
def test_pages_in_the_part_that_goes_move_within_the_level(
    build: Build, cold: dict[str, int]
) -> None:
    rig = build(hot=8, kind="mixed-sizes", **cold)
    sequence = in_the_upper_part(rig, 4)
    num_pages = rig.used[HOT]
    num_beyond = sum(int((sequence.cache.page_indices(g) >= 4).sum()) for g in range(2))
    assert num_beyond > 4
    rig.resize(HOT, 4)
    assert rig.manager.stats().moved_pages == {"hot-hot": num_beyond}
    assert rig.used[HOT] == num_pages
    assert max(sequence.cache.page_indices(g).max() for g in range(2)) < 4
    all_come_back(rig, sequence)


def test_with_an_active_sequence_in_the_low_part(build: Build) -> None:
    for seed in range(5):
        rig = build(seed=seed, hot=8, host=8)
        active = filled(rig, prompt(3, 1), stream=rig.streams[1])
        idle = suspended(rig, prompt(4, 2))
        before = active.cache.page_indices(0).tolist()
        rig.resize(HOT, 4)
        assert active.cache.page_indices(0).tolist() == before
        active.check()
        assert len(hot_blocks(idle)) == 1, "one slot is left"
        assert active.step([5, 6])
        active.cache.suspend()
        all_come_back(rig, idle, active)


def test_active_pages_in_the_way_are_named_and_nothing_changes(build: Build) -> None:
    rig = build(hot=8, host=8)
    low = filled(rig, prompt(3, 1))
    high = filled(rig, prompt(3, 2), stream=rig.streams[1])
    before = state(rig)
    with pytest.raises(UsageError, match="2 pages of active sequences"):
        rig.resize(HOT, 4)
    assert state(rig) == before
    high.check()
    high.cache.suspend()
    rig.resize(HOT, 4)
    low.check()
    low.cache.suspend()
    all_come_back(rig, low, high)


def test_active_pages_that_have_no_slot_now_will_want_one(build: Build) -> None:
    rig = build(hot=8, disk=8)
    sequence = suspended(rig, prompt(4, 1))
    push_out(rig, 8)
    rig.device.fail_next_submission("onboard", 3)  # each attempt of the read
    assert sequence.resume()
    rig.manager.finish_transfers()
    assert rig.used[HOT] == 0
    with pytest.raises(UsageError, match="need 4 slots"):
        rig.resize(HOT, 3)
    assert slots(rig, HOT) == [8]
    rig.resize(HOT, 4)
    sequence.cache.synchronize()
    sequence.check()
    assert sequence.cache.missing_blocks() == []


def test_a_callers_stream_that_still_works_on_released_pages(build: Build) -> None:
    for seed in range(10):
        rig = build(seed=seed, hot=8, host=8)
        low = filled(rig, prompt(4, 1))
        high = filled(rig, prompt(4, 2), stream=rig.streams[1], num_committed=0)
        for _ in range(5):
            high.check()
        rig.close(high)
        rig.resize(HOT, 4)
        low.check()


def test_more_room_is_used_and_the_limits_follow(build: Build) -> None:
    rig = build(hot=4, host=8, max_util=0.5)
    sequence = suspended(rig, prompt(2, 1))
    assert (rig.manager.num_hot_blocks, rig.manager.max_sequence_tokens) == (4, 4)
    before = bases(rig)
    rig.resize(HOT, 10)
    assert bases(rig) == before
    assert slots(rig, HOT) == [10]
    assert rig.manager.stats().levels[HOT].capacity_tokens == 20
    assert (rig.manager.num_hot_blocks, rig.manager.max_sequence_tokens) == (10, 10)
    long = rig.create()
    assert long.resume()
    with pytest.raises(OutOfPagesError, match="20 at most"):
        long.cache.resize(21)
    assert long.step(prompt(10, 2), num_committed=0)
    assert sorted(long.cache.page_indices(0).tolist()) == list(range(10))
    assert moves(rig, "hot-host") == 2
    rig.close(long)
    all_come_back(rig, sequence)
    rig.resize(HOT, 3)
    assert (rig.manager.num_hot_blocks, rig.manager.max_sequence_tokens) == (3, 2)
    with pytest.raises(OutOfPagesError, match="6 at most"):
        assert filled(rig, [3]).cache.resize(7)


def test_slots_that_were_used_before_are_used_first(build: Build) -> None:
    rig = build(hot=4)
    rig.resize(HOT, 8)
    sequence = filled(rig, prompt(4))
    assert sequence.cache.page_indices(0).tolist() == [0, 1, 2, 3]


def test_a_quota_that_holds_nothing_or_more_than_there_is(build: Build) -> None:
    rig = build(hot=4, host=8, kind="mixed-sizes")
    sequence = suspended(rig, prompt(3, 1))
    before = state(rig)
    with pytest.raises(ConfigurationError, match="hot tier"):
        rig.resize(HOT, 0)
    with pytest.raises(ConfigurationError, match="host tier"):
        rig.resize(HOST, 0)
    assert state(rig) == before
    with pytest.raises(DeviceError):
        rig.resize(HOT, 17)  # growable memory has its limit
    rig.check()
    assert rig.manager.num_hot_blocks * PER_BLOCK == rig.manager._hot_tokens(1.0)
    all_come_back(rig, sequence)


@pytest.mark.parametrize("is_active", [False, True])
def test_defragmented_pages_lie_lowest(build: Build, is_active: bool) -> None:
    for seed in range(3):
        rig = build(seed=seed, hot=8, kind="mixed-sizes", host=8)
        low = filled(rig, prompt(4, 1), num_committed=0)
        sequence = filled(rig, prompt(4, 2), stream=rig.streams[1])
        if not is_active:
            sequence.cache.suspend()
        rig.close(low)
        places = sequence.cache.page_indices(0).tolist()
        num_moved = rig.manager.defragment()
        assert moves(rig, "hot-hot") == num_moved
        if is_active:
            assert sequence.cache.page_indices(0).tolist() == places
            sequence.check()
            sequence.cache.suspend()
            assert rig.manager.defragment() > 0
        else:
            assert num_moved >= 4
        for group in rig.storage.levels[HOT].groups:
            owned = group.slots.owned().tolist()
            assert owned == list(range(len(owned)))
        assert rig.manager.defragment() == 0
        all_come_back(rig, sequence)


def test_a_defragmentation_that_the_device_rejects(build: Build) -> None:
    rig = build(hot=8)
    sequence = in_the_upper_part(rig, 4)
    places = sequence.cache.page_indices(0).tolist()
    rig.device.fail_next_submission("onboard")
    assert rig.manager.defragment() == 0
    assert sequence.cache.page_indices(0).tolist() == places
    rig.check()
    assert rig.manager.defragment() == 4
    all_come_back(rig, sequence)


@pytest.mark.parametrize("cold", [{"host": 8}, {"disk": 8}])
def test_defragmented_cold_levels(build: Build, cold: dict[str, int]) -> None:
    rig = build(hot=4, **cold)
    low, sequence = suspended(rig, prompt(4, 1), num_committed=0), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    rig.close(low)
    assert rig.manager.defragment(CacheLevel(1)) == 4
    assert rig.storage.levels[1].groups[0].slots.owned().tolist() == [0, 1, 2, 3]
    all_come_back(rig, sequence)


@pytest.mark.parametrize("level", [HOT, HOST])
def test_a_quota_is_divided_as_the_level_was_used_lately(build: Build, level: int) -> None:
    rig = build(hot=8, host=8, kind="mixed-sizes")  # one of two groups has a window
    sequence = suspended(rig, prompt(8), num_committed=0)
    if level == HOST:
        push_out(rig, 8)
    assert rig.used[level] == 8 + 2
    for _ in range(300):
        rig.manager.poll()
    rig.resize(level, 8)
    whole, window = slots(rig, level)
    assert whole > 8 > window >= 2
    assert rig.manager.stats().levels[level].total_bytes <= rig.quota(level, 8)
    rig.resize(level, 8)
    assert slots(rig, level) == [8, 8], "of the level as it is now nothing is known"
    all_come_back(rig, sequence)


def test_slots_out_of_use_stay_so(build: Build) -> None:
    rig = build(hot=4, disk=8)
    bad, good = suspended(rig, prompt(2, 1)), suspended(rig, prompt(2, 2))
    push_out(rig, 4)
    rig.flip_on_disk(bad.cache)
    assert bad.resume()
    bad.cache.synchronize()
    bad.cache.suspend()
    disk = rig.manager.stats().levels[1]
    assert (disk.quarantined_slots, disk.used_slots) == (2, 2)
    rig.resize(1, 4)
    disk = rig.manager.stats().levels[1]
    assert (disk.total_slots, disk.quarantined_slots, disk.used_slots) == (4, 2, 2)
    rig.check()
    all_come_back(rig, good)
    rig.resize(1, 6)
    assert rig.manager.stats().levels[1].quarantined_slots == 2
    rig.check()


# Host and disk


@pytest.mark.parametrize("codec", CODECS)
def test_half_the_host_level_moves_within_it_and_then_down(build: Build, codec: MakeCodec) -> None:
    rig = build(hot=4, host=8, disk=20, codec=codec)
    first, second = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    assert rig.used == [0, 8, 0]
    before = bases(rig)
    rig.resize(HOST, 4)
    assert slots(rig, HOST) == [4]
    assert bases(rig) == before
    assert moves(rig, "host-disk") == 4
    assert rig.used == [0, 4, 4]
    # The older sequence has gone down, the other has taken its slots.
    assert set(rig.levels_of(first)) == {4}
    assert set(rig.levels_of(second)) == {2}
    assert moves(rig, "host-host") == 4
    assert rig.manager.stats().levels[HOST].dropped_pages == 0
    all_come_back(rig, first, second)
    rig.resize(HOST, 16)
    assert slots(rig, HOST) == [16]
    push_out(rig, 4)
    all_come_back(rig, first, second)


def test_half_the_host_level_between_two_codecs(build: Build) -> None:
    rig = build(hot=4, host=8, disk=20, disk_codec=lambda: PaddingCodec(48))
    first, second = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    rig.resize(HOST, 4)
    assert totals(rig, "transcoded_pages") == moves(rig, "host-disk") == 4
    all_come_back(rig, first, second)


@pytest.mark.parametrize("below", [0, 2])
def test_pages_are_dropped_only_when_all_below_is_full(build: Build, below: int) -> None:
    rig = build(hot=4, host=8, disk=below)
    first, second = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    assert rig.used[:2] == [0, 8]
    rig.resize(HOST, 4)
    assert totals(rig, "lost_held_pages") == 4 - below
    assert rig.manager.stats().levels[HOST].dropped_pages == 4 - below
    assert [lv.dropped_pages for lv in rig.manager.stats().levels if lv.name != "host"][:2] == (
        [0] if not below else [0, 0]
    )
    assert rig.used[1:] == ([4, below] if below else [4])
    missing = first.cache.missing_blocks()
    assert len(missing) == 4 - below
    assert second.cache.missing_blocks() == [], "the older one pays"
    assert first.resume()
    first.cache.synchronize()
    assert first.recompute() == missing
    first.check()
    first.cache.suspend()
    all_come_back(rig, second)


def test_droppable_pages_go_before_those_of_a_sequence(build: Build) -> None:
    rig = build(hot=4, host=8)
    held = suspended(rig, prompt(4, 1))
    rig.close(suspended(rig, prompt(4, 2)))
    push_out(rig, 4)
    assert rig.used == [0, 8]
    rig.resize(HOST, 4)
    assert totals(rig, "dropped_pages") == 4
    assert totals(rig, "lost_held_pages") == 0
    all_come_back(rig, held)


def test_half_the_disk_level(build: Build) -> None:
    rig = build(hot=4, disk=8)
    first, second = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    assert rig.used == [0, 8]
    rig.close(first)  # droppable
    rig.resize(DISK - 1, 4)
    assert slots(rig, 1) == [4]
    assert moves(rig, "disk-disk") == 4
    assert rig.manager.stats().levels[1].dropped_pages == 4
    assert totals(rig, "dropped_pages") == 4
    all_come_back(rig, second)
    rig.resize(DISK - 1, 3)
    assert rig.manager.stats().levels[1].dropped_pages == 4, "they are all hot"
    rig.resize(DISK - 1, 8)
    push_out(rig, 4)
    assert rig.used == [0, 4]
    all_come_back(rig, second)


def test_a_disk_level_that_is_full_of_held_pages(build: Build) -> None:
    rig = build(hot=4, disk=8)
    first, second = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    rig.resize(DISK - 1, 4)
    assert len(first.cache.missing_blocks()) == 4
    assert totals(rig, "lost_held_pages") == rig.manager.stats().levels[1].dropped_pages == 4
    all_come_back(rig, second)


def test_a_flipped_bit_is_not_carried_along(build: Build) -> None:
    rig = build(hot=4, disk=12)
    gone, sequence = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    rig.close(gone)
    assert rig.used == [0, 8]
    assert rig.flip_on_disk(sequence.cache) == [0, 1, 2, 3]
    rig.resize(DISK - 1, 4)
    rig.check()
    assert sequence.cache.missing_blocks() == [0, 1, 2, 3]
    assert totals(rig, "lost_held_pages") == 4
    assert moves(rig, "disk-disk") == 0
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.recompute() == [0, 1, 2, 3]
    sequence.check()


def test_io_that_fails_while_it_moves_is_a_miss(build: Build) -> None:
    rig = build(hot=4, disk=12)
    gone, sequence = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    rig.close(gone)
    rig.device.faults.io_failure_rate = 1.0
    rig.resize(DISK - 1, 4)
    rig.device.faults.io_failure_rate = 0.0
    assert sequence.cache.missing_blocks() == [0, 1, 2, 3]
    rig.check()


def _on_disk(build: Build, seed: int, **levels: int) -> tuple[Rig, PatternSequence]:
    rig = build(seed=seed, disk=20, **levels)
    sequence = suspended(rig, prompt(4, 1))
    others: list[PatternSequence] = []
    while set(rig.levels_of(sequence)) != {1 << len(levels)}:
        assert len(others) < 9, "never on disk alone"
        others.append(suspended(rig, prompt(4, 2), num_committed=0))
        push_out(rig, levels["hot"])
        rig.poll()
    for other in others:
        rig.close(other)
    return rig, sequence


def _moving_up(rig: Rig, sequence: PatternSequence, level: int) -> None:
    """Have a disk that hangs fill the upper half of a level, and nothing lie in the lower."""
    low = suspended(rig, prompt(4, 3), num_committed=0)
    if level == HOST:
        push_out(rig, 8)
        assert rig.used[HOST] == 4
    rig.device.faults.is_io_held = True
    sequence.cache.prefetch(CacheLevel(level))
    rig.close(low)


@pytest.mark.parametrize("level", [HOT, HOST])
def test_reads_in_flight_are_awaited(build: Build, level: int) -> None:
    levels = {"hot": 8} if level == HOT else {"hot": 8, "host": 8}
    for seed in range(5):
        rig, sequence = _on_disk(build, seed, **levels)
        _moving_up(rig, sequence, level)
        reserved = rig.storage.levels[level].groups[0].slots.owned().tolist()
        assert len(reserved) == 4 and max(reserved) >= 4
        rig.device.faults.is_io_held = False
        rig.resize(level, 4)
        assert rig.used[level] == 4
        rig.check()
        all_come_back(rig, sequence)


def test_writes_in_flight_are_awaited(build: Build) -> None:
    for seed in range(5):
        rig = build(seed=seed, hot=4, disk=8)
        low = suspended(rig, prompt(4, 1), num_committed=0)
        sequence = suspended(rig, prompt(4, 2))
        rig.device.faults.is_io_held = True
        other = filled(rig, prompt(4, 3), num_committed=0)
        rig.close(low)
        rig.device.faults.is_io_held = False
        rig.resize(1, 4)
        assert rig.used[1] == 4
        rig.close(other)
        all_come_back(rig, sequence)


# A device that rejects


@pytest.mark.parametrize(
    ("level", "stream", "cold"),
    [
        (HOT, "onboard", {"host": 8}),
        (HOT, "offload", {"host": 8}),
        (HOST, "onboard", {"host": 8, "disk": 8}),
    ],
)
def test_rejected_moves_leave_all_as_it_was(
    build: Build, level: int, stream: str, cold: dict[str, int]
) -> None:
    rig = build(hot=4 if level == HOST else 8, **cold)
    if level == HOST:
        low = suspended(rig, prompt(4, 5), num_committed=0)
        sequences = [suspended(rig, prompt(4, 6))]
        push_out(rig, 4)
        assert rig.used == [0, 8, 0]
        rig.close(low)
    elif stream == "onboard":
        sequences = [in_the_upper_part(rig, 4)]
    else:
        sequences = [suspended(rig, prompt(4, first)) for first in range(2)]
    before = rig.used, slots(rig, level), bases(rig)
    rig.device.fail_next_submission(stream, 100)
    with pytest.raises(DeviceError, match="keeps rejecting the moves"):
        rig.resize(level, 4)
    assert (rig.used, slots(rig, level), bases(rig)) == before
    rig.check()
    rig.device._world.planned_failures.clear()
    rig.resize(level, 4)
    assert slots(rig, level) == [4]
    assert totals(rig, "lost_held_pages") == 0
    all_come_back(rig, *sequences)


def test_a_rejected_move_is_tried_again(build: Build) -> None:
    rig = build(hot=8)
    sequence = in_the_upper_part(rig, 4)
    rig.device.fail_next_submission("onboard", 3)
    rig.resize(HOT, 4)
    assert totals(rig, "rejected_submissions") == 3
    assert slots(rig, HOT) == [4]
    all_come_back(rig, sequence)


def test_one_pool_group_after_another_each_whole(build: Build) -> None:
    """A device that rejects for good after the first group has shrunk."""
    rig = build(hot=8, kind="mixed-sizes")
    sequence = in_the_upper_part(rig, 4)
    copy_within, count = rig.storage.moves.copy_within, iter(range(100))

    def fail_later(*args: object) -> bool:
        if next(count) == 1:
            rig.device.fail_next_submission("onboard", 100)
        return copy_within(*args)  # type: ignore[arg-type]

    rig.storage.moves.copy_within = fail_later  # type: ignore[method-assign, assignment]
    with pytest.raises(DeviceError):
        rig.resize(HOT, 4)
    rig.device._world.planned_failures.clear()
    assert slots(rig, HOT) == [4, 8]
    rig.check()
    assert rig.manager.num_hot_blocks * PER_BLOCK == rig.manager._hot_tokens(1.0)
    resumed(rig, sequence)
    assert sequence.cache.missing_blocks() == []
    sequence.cache.suspend()
