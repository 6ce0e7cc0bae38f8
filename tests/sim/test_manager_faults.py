"""Faults found in caches of this kind, each asked of the manager by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from coldpage import KVCacheManager, ReuseScope, WrongThreadError
from coldpage.device.base import Stream
from coldpage.device.host import HostDevice
from coldpage.sequence import DiskBlob
from coldpage.testing.pattern_engine import PatternEngine, PatternSequence
from coldpage.types import NO_SLOT, BlockOrdinal, CacheLevel, LayerGroupId
from tests.property.driver import Driver
from tests.property.setups import Setup, build_manager

HOT, NEXT = CacheLevel(0), CacheLevel(1)
GROUP = LayerGroupId(0)
PER_BLOCK = 2

Make = Callable[..., Driver]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes drivers, and checks each at the end for leaks, races and wrong bytes."""
    drivers: list[Driver] = []

    def make_driver(seed: int = 0, **setup: int) -> Driver:
        driver = Driver(Setup(per_block=PER_BLOCK, **setup), seed)  # type: ignore[arg-type]
        drivers.append(driver)
        return driver

    yield make_driver
    try:
        for driver in drivers:
            driver.finish()
    finally:
        for driver in drivers:
            driver.abandon()


def prompt(num_blocks: int, first: int = 0) -> list[int]:
    """Tokens that share no block with those of another ``first``."""
    return [first, *range(100, 99 + PER_BLOCK * num_blocks)]


def filled(
    driver: Driver,
    tokens: Sequence[int],
    *,
    stream: Stream | None = None,
    num_committed: int | None = None,
    scope: ReuseScope | None = None,
) -> PatternSequence:
    """An active sequence that has written ``tokens``."""
    sequence = driver.adopt(driver.engine.create(tokens, scope=scope))
    assert sequence.resume(stream)
    history = sequence.cache.history_length
    assert sequence.step(tokens[history:], num_committed=num_committed)
    driver.check()
    return sequence


def suspended(driver: Driver, tokens: Sequence[int], **settings: int) -> PatternSequence:
    """A suspended sequence that has written ``tokens``."""
    sequence = filled(driver, tokens, **settings)  # type: ignore[arg-type]
    sequence.cache.suspend()
    return sequence


def push_out(driver: Driver, num_blocks: int) -> None:
    """Have the hot level make room for so many blocks, which nobody keeps."""
    sequence = driver.engine.create()
    assert sequence.resume()
    assert sequence.cache.resize(num_blocks * PER_BLOCK)
    sequence.cache.synchronize()
    sequence.cache.close()
    driver.manager.finish_transfers()
    driver.check()


def resumed(driver: Driver, sequence: PatternSequence, stream: Stream | None = None) -> None:
    assert sequence.resume(stream)
    sequence.cache.synchronize()
    sequence.check()
    driver.check()


def totals(driver: Driver, name: str) -> int:
    return driver.manager.stats().totals.get(name, 0)


def moves(driver: Driver, path: str) -> int:
    return driver.manager.stats().moved_pages.get(path, 0)


def hot_blocks(sequence: PatternSequence) -> list[int]:
    slots = sequence.cache.page_indices(GROUP)
    return [ordinal for ordinal, slot in enumerate(slots.tolist()) if slot != NO_SLOT]


# Victims


def test_the_head_and_the_newest_block_go_last(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=20, max_util=1.0)
    sequence = suspended(driver, prompt(8))
    gone: list[int] = []
    for num_blocks in range(1, 9):
        push_out(driver, num_blocks)
        gone += [b for b in range(8) if b not in hot_blocks(sequence) and b not in gone]
    assert gone == [6, 5, 4, 3, 2, 1, 7, 0]


def test_the_one_used_longest_ago_goes_first(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=20)
    old, young = suspended(driver, prompt(3, 1)), suspended(driver, prompt(3, 2))
    push_out(driver, 5)
    assert (hot_blocks(old), hot_blocks(young)) == ([], [0, 1, 2])


def test_free_slots_are_used_before_anything_is_evicted(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=20)
    sequence = suspended(driver, prompt(4))
    push_out(driver, 4)
    assert len(hot_blocks(sequence)) == 4
    assert driver.manager.stats().moved_pages == {}


# Slots


@pytest.mark.parametrize("levels", [{"host_blocks": 8}, {"disk_blocks": 8}])
@pytest.mark.parametrize("end", ["truncate", "close"])
def test_cold_slots_do_not_leak_and_show_nobody_elses_bytes(
    make: Make, levels: dict[str, int], end: str
) -> None:
    driver = make(hot_blocks=4, max_util=1.0, **levels)
    for round_number in range(12):
        sequence = suspended(driver, prompt(4, round_number), num_committed=0)
        push_out(driver, 4)
        assert driver.manager.stats().levels[1].used_slots == 4
        resumed(driver, sequence)
        sequence.cache.suspend()
        if end == "truncate":
            sequence.truncate(0)
        else:
            driver.close_sequence(driver.sequences.index(sequence))
        assert [level.used_slots for level in driver.manager.stats().levels] == [0, 0]


@pytest.mark.parametrize("levels", [{"host_blocks": 20}, {"disk_blocks": 20}])
def test_a_block_that_is_not_hot_has_no_index(make: Make, levels: dict[str, int]) -> None:
    driver = make(hot_blocks=4, max_util=1.0, **levels)
    sequence = suspended(driver, prompt(4))
    push_out(driver, 4)
    assert hot_blocks(sequence) == []
    driver.faults.is_io_held = True
    assert sequence.resume()
    assert hot_blocks(sequence) == ([] if "disk_blocks" in levels else [0, 1, 2, 3])
    driver.faults.is_io_held = False
    sequence.cache.synchronize()
    sequence.check()
    assert sorted(sequence.cache.page_indices(GROUP).tolist()) == [0, 1, 2, 3]


# Room


def test_a_prompt_of_nearly_all_of_the_hot_pool_works(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=20, max_util=1.0)
    suspended(driver, prompt(5, 1))
    tokens = prompt(8, 2)
    sequence = driver.adopt(driver.engine.create(tokens))
    assert sequence.resume()
    for start in range(0, len(tokens), 3):
        assert sequence.step(tokens[start : start + 3])
    sequence.check()
    assert not sequence.cache.resize(len(tokens) + 1)


@pytest.mark.parametrize("levels", [{}, {"host_blocks": 4}, {"disk_blocks": 4}])
def test_a_full_coldest_level_never_fails_suspend(make: Make, levels: dict[str, int]) -> None:
    driver = make(hot_blocks=4, max_util=1.0, **levels)
    sequences = [suspended(driver, prompt(3, number)) for number in range(5)]
    assert totals(driver, "lost_held_pages") >= 7
    for number, sequence in enumerate(sequences):
        assert sequence.resume()
        sequence.cache.synchronize()
        sequence.recompute()
        sequence.check()
        assert sequence.cache.missing_blocks() == []
        assert sequence.cache.tokens.tolist() == prompt(3, number)
        sequence.cache.suspend()
    driver.check()


def test_what_nobody_holds_is_dropped_before_what_somebody_holds(make: Make) -> None:
    driver = make(hot_blocks=4, host_blocks=4, max_util=1.0)
    held = suspended(driver, prompt(3, 1))
    for number in range(2, 6):
        suspended(driver, prompt(3, number))
        driver.close_sequence(len(driver.sequences) - 1)
    assert totals(driver, "dropped_pages") >= 5
    assert totals(driver, "lost_held_pages") == 0
    resumed(driver, held)
    assert held.cache.missing_blocks() == []
    matched = [driver.manager.create_kv_cache(prompt(3, n)) for n in range(1, 6)]
    assert matched[0].num_committed_tokens == 6
    assert sum(cache.num_committed_tokens == 0 for cache in matched) >= 2
    for cache in matched:
        cache.close()


def test_resume_refuses_what_would_fill_the_hot_level_and_works_later(make: Make) -> None:
    driver = make(hot_blocks=10, host_blocks=40, max_util=0.6)
    first, second = suspended(driver, prompt(4, 1)), suspended(driver, prompt(4, 2))
    assert first.resume()
    assert not second.resume()
    assert second.cache.status.value == "suspended"
    first.cache.suspend()
    resumed(driver, second)
    # What is shared counts once.
    third = driver.adopt(second.fork())
    resumed(driver, third)


def test_a_resize_that_does_not_fit_changes_nothing(make: Make) -> None:
    driver = make(hot_blocks=4, host_blocks=8, max_util=1.0)
    sequence = filled(driver, prompt(2))
    fork = driver.adopt(sequence.fork())
    before = sequence.cache.page_indices(GROUP).tolist()
    assert not sequence.cache.resize(5 * PER_BLOCK)
    assert sequence.cache.capacity == 4
    assert sequence.cache.page_indices(GROUP).tolist() == before
    assert sequence.cache.resize(4 * PER_BLOCK)
    driver.check()
    assert fork.cache.capacity == 4


# Clean copies


@pytest.mark.parametrize(
    ("levels", "down", "up"),
    [({"host_blocks": 20}, "hot-host", "host-hot"), ({"disk_blocks": 20}, "hot-disk", "disk-hot")],
)
def test_clean_copies_are_not_written_again(
    make: Make, levels: dict[str, int], down: str, up: str
) -> None:
    driver = make(hot_blocks=4, max_util=1.0, **levels)
    sequence = suspended(driver, prompt(3)[:5], num_committed=0)
    push_out(driver, 4)
    assert (moves(driver, down), moves(driver, up)) == (3, 0)
    for round_number in range(1, 4):
        resumed(driver, sequence)
        sequence.cache.suspend()
        push_out(driver, 4)
        assert (moves(driver, down), moves(driver, up)) == (3, 3 * round_number)
    resumed(driver, sequence)
    assert sequence.step([7], num_committed=0)
    sequence.cache.suspend()
    push_out(driver, 4)
    assert moves(driver, down) == 4, "one page had changed"
    resumed(driver, sequence)


# Sharing


def test_a_fork_copies_nothing_before_a_write(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=20)
    sequence = filled(driver, prompt(3)[:5], stream=None)
    used = driver.manager.stats().levels[0].used_slots
    fork = driver.adopt(sequence.fork())
    resumed(driver, fork, driver.streams[1])
    assert driver.manager.stats().levels[0].used_slots == used
    assert totals(driver, "copied_on_write_pages") == 0
    assert fork.step([1])
    assert totals(driver, "copied_on_write_pages") == 1
    assert sequence.step([2])
    assert totals(driver, "copied_on_write_pages") == 1, "the other holder has left the page"
    sequence.check()
    fork.check()


def test_scopes_share_nothing(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=20)
    tokens = prompt(2)
    scopes = [ReuseScope(), ReuseScope("a"), ReuseScope(salt="a"), ReuseScope("a", "a")]
    for scope in scopes:
        cache = driver.manager.create_kv_cache(tokens, scope=scope)
        assert cache.num_committed_tokens == 0
        cache.close()
        sequence = driver.adopt(driver.engine.create(tokens, scope=scope))
        assert sequence.resume()
        assert sequence.step(tokens)
        sequence.cache.suspend()
    for scope in scopes:
        sequence = driver.adopt(driver.engine.create(tokens, scope=scope))
        assert sequence.cache.num_committed_tokens == 4
        resumed(driver, sequence)
        sequence.cache.suspend()


def test_reuse_says_from_which_level(make: Make) -> None:
    driver = make(hot_blocks=8, host_blocks=2, disk_blocks=20)
    tokens = prompt(7)
    suspended(driver, tokens)
    push_out(driver, 5)
    cache = driver.manager.create_kv_cache([*tokens, 1, 2, 3])
    assert cache.num_committed_tokens == 14
    hot, host, disk = cache.cached_tokens_by_level
    assert (hot, host + disk) == (6, 8)
    assert disk >= 4
    cache.close()


def test_a_block_with_lost_pages_is_not_reused(make: Make) -> None:
    driver = make(hot_blocks=4, max_util=1.0)
    tokens = prompt(3)
    sequence = suspended(driver, tokens)
    push_out(driver, 4)
    assert sequence.cache.missing_blocks() == [0, 1, 2]
    cache = driver.manager.create_kv_cache(tokens)
    assert cache.num_committed_tokens == 0
    cache.close()
    assert sequence.resume()
    sequence.cache.synchronize()
    sequence.cache.fill_missing([])
    assert len(sequence.recompute()) == 3
    sequence.check()
    cache = driver.manager.create_kv_cache(tokens)
    assert cache.num_committed_tokens == 6
    cache.close()


@pytest.mark.parametrize("is_committed", [False, True])
def test_who_recomputes_a_part_of_a_lost_page_keeps_it_apart(
    make: Make, is_committed: bool
) -> None:
    driver = make(hot_blocks=4, max_util=1.0)
    tokens = prompt(2)
    whole = suspended(driver, tokens, num_committed=4 if is_committed else 0)
    part = driver.adopt(whole.fork())
    part.truncate(3)
    push_out(driver, 4)
    assert part.resume()
    part.cache.synchronize()
    assert part.recompute() == [0, 1]
    part.check()
    part.cache.suspend()
    assert whole.cache.missing_blocks() == [1]
    cache = driver.manager.create_kv_cache(tokens)
    assert cache.num_committed_tokens == (2 if is_committed else 0)
    cache.close()
    assert whole.resume()
    whole.cache.synchronize()
    assert whole.recompute() == [1]
    whole.check()
    driver.check()


def test_a_copy_of_a_lost_page_is_lost_too(make: Make) -> None:
    driver = make(hot_blocks=4, max_util=1.0)
    sequence = suspended(driver, prompt(2), num_committed=0)
    fork = driver.adopt(sequence.fork())
    push_out(driver, 4)
    assert sequence.resume()
    assert sequence.cache.resize(4, 3)
    sequence.forget_from(3)
    sequence.cache.synchronize()
    assert totals(driver, "copied_on_write_pages") == 1
    assert sequence.recompute() == [0, 1]
    sequence.check()
    sequence.cache.suspend()
    assert fork.cache.missing_blocks() == [1]


def test_what_one_sequence_recomputes_another_waits_for(make: Make) -> None:
    for seed in range(10):
        driver = make(seed, hot_blocks=4, max_util=1.0)
        sequence = suspended(driver, prompt(2))
        fork = driver.adopt(sequence.fork())
        push_out(driver, 4)
        for member, stream in zip((sequence, fork), driver.streams[1:], strict=True):
            assert member.resume(stream)
            member.cache.synchronize()
            assert member.cache.missing_blocks() == [0, 1]
        assert sequence.recompute() == [0, 1]
        assert fork.cache.missing_blocks() == []
        fork.cache.synchronize()
        fork.check()
        driver.check()


# Two transfers of one page


def _rewritten_while_it_spills(make: Make, seed: int) -> tuple[Driver, PatternSequence]:
    """A suspended sequence whose pages lay in host memory, were being written to disk as well, and
    have been filled with something else since: the disk still hangs.
    """
    driver = make(seed, hot_blocks=4, host_blocks=4, disk_blocks=20, max_util=1.0)
    sequence = suspended(driver, prompt(4), num_committed=0)
    driver.faults.is_io_held = True
    other = driver.engine.create()
    assert other.resume()
    assert other.cache.resize(4 * PER_BLOCK)
    for _ in range(20):
        driver.manager.poll()
    other.cache.close()
    assert sequence.resume()
    sequence.cache.synchronize()
    sequence.check()
    assert sequence.cache.resize(8, 0)
    sequence.forget_from(0)
    sequence.cache.synchronize()
    sequence.write(prompt(4, 1))
    assert sequence.cache.resize(8, 8)
    sequence.cache.suspend()
    assert moves(driver, "hot-host") == 4
    assert moves(driver, "host-disk") == 0
    assert driver.device.counts.executed_io_jobs == 0
    driver.faults.is_io_held = False
    return driver, sequence


def test_a_page_written_to_while_it_spills_is_not_replaced_by_the_old_bytes(make: Make) -> None:
    driver, sequence = _rewritten_while_it_spills(make, 0)
    driver.manager.finish_transfers()
    assert moves(driver, "host-disk") == 2
    push_out(driver, 4)
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []


def test_a_page_is_not_sent_where_an_older_transfer_still_has_its_slot(make: Make) -> None:
    num_waits = 0
    for seed in range(10):
        driver, sequence = _rewritten_while_it_spills(make, seed)
        push_out(driver, 4)
        num_waits += totals(driver, "room_waits")
        assert totals(driver, "lost_held_pages") == 0
        resumed(driver, sequence)
    assert num_waits > 0, "the transfers were over each time"


# Submissions


def test_a_rejected_encode_leaves_the_pages_where_they_were(make: Make) -> None:
    for levels in ({"host_blocks": 8}, {"disk_blocks": 8}):
        driver = make(hot_blocks=4, max_util=1.0, **levels)
        sequence = suspended(driver, prompt(3))
        other = driver.adopt(driver.engine.create())
        assert other.resume()
        driver.fail_next_submission("offload")
        assert not other.cache.resize(2 * PER_BLOCK)
        assert other.cache.capacity == 0
        assert hot_blocks(sequence) == [0, 1, 2]
        assert totals(driver, "rejected_submissions") == 1
        assert [level.used_slots for level in driver.manager.stats().levels] == [3, 0]
        assert other.step([1, 2, 3, 4])
        assert len(hot_blocks(sequence)) == 2
        other.cache.suspend()
        resumed(driver, sequence)
        assert sequence.cache.missing_blocks() == []


def test_a_rejected_decode_leaves_the_pages_where_they_were(make: Make) -> None:
    driver = make(hot_blocks=4, host_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    driver.fail_next_submission("onboard")
    assert not sequence.resume()
    assert sequence.cache.status.value == "suspended"
    assert [level.used_slots for level in driver.manager.stats().levels] == [0, 3]
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []


def test_a_rejected_decode_of_what_came_from_disk_is_tried_again(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    driver.fail_next_submission("onboard")
    driver.fail_next_submission("onboard")
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []
    assert totals(driver, "rejected_submissions") == 2
    assert driver.manager.stats().levels[1].quarantined_slots == 0


def test_a_rejected_decode_is_not_the_blobs_fault(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    for _ in range(20):
        driver.fail_next_submission("onboard")
    assert sequence.resume()
    sequence.cache.synchronize()
    sequence.check()
    assert sequence.cache.missing_blocks() == [], "the blobs on disk are good"
    assert driver.manager.stats().levels[1].quarantined_slots == 0


def test_a_page_whose_decode_was_rejected_keeps_its_place(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    for _ in range(3):
        driver.fail_next_submission("onboard")
    assert sequence.resume()
    while totals(driver, "rejected_submissions") < 3:
        driver.manager.wait_for_progress(1.0)
        driver.manager.poll()
    other = driver.adopt(driver.engine.create())
    assert other.resume()
    assert not other.cache.resize(2 * PER_BLOCK)
    assert other.cache.resize(PER_BLOCK)
    sequence.cache.synchronize()
    sequence.check()


# Disk


def test_a_failed_write_is_tried_in_another_slot(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=12, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    other = driver.engine.create()
    assert other.resume()
    driver.set_faults(submission=0.0, io=1.0, delay=0.0)
    assert other.cache.resize(4 * PER_BLOCK)
    while not driver.device.counts.failed_io_jobs:
        driver.device.step()
        driver.manager.poll()
    driver.set_faults(submission=0.0, io=0.0, delay=0.0)
    other.cache.close()
    driver.manager.finish_transfers()
    failed = driver.device.counts.failed_io_jobs
    assert totals(driver, "write_errors") == failed > 0
    assert driver.manager.stats().levels[1].quarantined_slots == failed
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []
    assert totals(driver, "lost_held_pages") == 0


def test_a_disk_that_fails_every_write_loses_pages_and_counts_them(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=12, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    driver.set_faults(submission=0.0, io=1.0, delay=0.0)
    push_out(driver, 4)
    driver.set_faults(submission=0.0, io=0.0, delay=0.0)
    assert totals(driver, "lost_held_pages") == 3
    assert sequence.cache.missing_blocks() == [0, 1, 2]
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.recompute() == [0, 1, 2]
    sequence.check()


def test_a_hung_disk_delays_its_own_sequence_only(make: Make) -> None:
    driver = make(hot_blocks=8, disk_blocks=20, max_util=1.0)
    cold = suspended(driver, prompt(3, 1))
    push_out(driver, 8)
    running = filled(driver, prompt(2, 2), stream=driver.streams[1])
    driver.faults.is_io_held = True
    assert cold.resume()
    for token in range(3):
        assert running.step([token])
        running.check()
        driver.manager.poll()
        assert not cold.cache.is_ready()
    running.cache.suspend()
    driver.faults.is_io_held = False
    cold.cache.synchronize()
    cold.check()


# Damage on a real disk


@pytest.fixture
def real(tmp_path: Path) -> Iterator[PatternEngine]:
    """An engine over a manager whose disk tier is a file, with threads that read and write it."""
    setup = Setup(per_block=PER_BLOCK, hot_blocks=8, disk_blocks=20, max_util=1.0)
    device = HostDevice()
    manager = build_manager(setup, device, tmp_path / "disk")
    engine = PatternEngine(manager)
    yield engine
    manager.check_integrity()
    manager.close()
    device.close()
    assert engine.problems == []


def _blobs(engine: PatternEngine, sequence: PatternSequence) -> list[DiskBlob]:
    """Send everything to disk; where the sequence's blobs are then."""
    other = engine.create()
    assert other.resume()
    assert other.cache.resize(8 * PER_BLOCK)
    other.cache.synchronize()
    other.cache.close()
    engine.manager.finish_transfers()
    blobs = sequence.cache.blobs_on_disk()
    assert all(blob.is_only_copy for blob in blobs)
    return blobs


def _on_disk(engine: PatternEngine) -> tuple[PatternSequence, list[DiskBlob]]:
    sequence = engine.create()
    assert sequence.resume()
    assert sequence.step(prompt(5))
    sequence.cache.suspend()
    blobs = _blobs(engine, sequence)
    assert [blob.ordinal for blob in blobs] == [0, 1, 2, 3, 4]
    return sequence, blobs


def _flip(blob: DiskBlob, at: int) -> None:
    with blob.path.open("r+b") as file:
        file.seek(blob.offset_bytes + at)
        (byte,) = file.read(1)
        file.seek(blob.offset_bytes + at)
        file.write(bytes([byte ^ 0x10]))


def _swap(blob: DiskBlob, other: DiskBlob) -> None:
    """Exchange two blobs, each whole and with its header."""
    with blob.path.open("r+b") as file:
        contents = []
        for where in (blob, other):
            file.seek(where.offset_bytes - 4096)
            contents.append(file.read(8192))
        for where, content in zip((other, blob), contents, strict=True):
            file.seek(where.offset_bytes - 4096)
            file.write(content)


def _damage(how: str, blobs: list[DiskBlob]) -> list[BlockOrdinal]:
    match how:
        case "first byte":
            _flip(blobs[2], 0)
            return [BlockOrdinal(2)]
        case "last byte":
            _flip(blobs[4], 2 * 2 * 8 * PER_BLOCK - 1)
            return [BlockOrdinal(4)]
        case "header":
            _flip(blobs[0], -4096 + 5)
            return [BlockOrdinal(0)]
        case "swapped":
            _swap(blobs[1], blobs[3])
            return [BlockOrdinal(1), BlockOrdinal(3)]
        case "cut short":
            with blobs[0].path.open("r+b") as file:
                file.truncate(max(blob.offset_bytes for blob in blobs) + 16)
            return [max(blobs, key=lambda blob: blob.offset_bytes).ordinal]
    raise AssertionError(how)


@pytest.mark.parametrize("how", ["first byte", "last byte", "header", "swapped", "cut short"])
def test_a_damaged_blob_is_a_miss_and_never_data(real: PatternEngine, how: str) -> None:
    sequence, blobs = _on_disk(real)
    bad = _damage(how, blobs)
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.cache.missing_blocks() == bad
    stats = real.manager.stats()
    assert stats.totals["read_misses"] == len(bad)
    assert stats.totals["lost_held_pages"] == len(bad)
    assert stats.levels[1].quarantined_slots == len(bad)
    sequence.check()
    assert sequence.recompute() == bad
    sequence.check()
    sequence.cache.suspend()
    # And the next ones find nothing wrong any more, in other slots.
    places = {(blob.path, blob.offset_bytes) for blob in blobs if blob.ordinal in bad}
    again = _blobs(real, sequence)
    assert not places & {(blob.path, blob.offset_bytes) for blob in again}
    twin = real.create(sequence.tokens)
    assert twin.cache.num_committed_tokens == 10
    for reader in (twin, sequence):
        assert reader.resume()
        reader.cache.synchronize()
        assert reader.cache.missing_blocks() == []
        reader.check()
        reader.cache.suspend()
    assert real.manager.stats().totals["read_misses"] == len(bad)


def test_damage_to_what_nobody_holds_is_a_shorter_match(real: PatternEngine) -> None:
    sequence, blobs = _on_disk(real)
    _flip(blobs[3], 1)
    sequence.cache.close()
    cache = real.create(sequence.tokens)
    assert cache.cache.num_committed_tokens == 10
    cache.cache.prefetch(HOT)
    real.manager.finish_transfers()
    assert cache.cache.missing_blocks() == [3]
    cache.cache.close()
    assert real.create(sequence.tokens).cache.num_committed_tokens == 6


# Threads


def test_another_thread_is_trapped(make: Make) -> None:
    driver = make(hot_blocks=4)
    manager: KVCacheManager = driver.manager
    sequence = filled(driver, prompt(1))
    cache = sequence.cache
    calls: list[Callable[[], object]] = [
        manager.create_kv_cache,
        manager.poll,
        manager.stats,
        manager.check_integrity,
        manager.finish_transfers,
        manager.close,
        cache.suspend,
        cache.resume,
        cache.is_ready,
        lambda: cache.resize(4),
        lambda: cache.commit([1]),
        cache.fork,
        lambda: cache.truncate(0),
        cache.prefetch,
        cache.missing_blocks,
        lambda: cache.fill_missing([]),
        cache.close,
    ]
    trapped: list[int] = []

    def intrude() -> None:
        for number, call in enumerate(calls):
            try:
                call()
            except WrongThreadError:
                trapped.append(number)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert trapped == list(range(len(calls)))
    sequence.check()
    driver.check()
