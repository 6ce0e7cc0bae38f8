"""Faults found in caches of this kind, each asked of the manager by name."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from coldpage import KVCacheManager, ReuseScope, WrongThreadError
from coldpage.errors import OutOfPagesError
from tests.sim.scenes import (
    GROUP,
    PER_BLOCK,
    Make,
    filled,
    hot_blocks,
    moves,
    prompt,
    push_out,
    resumed,
    suspended,
    totals,
)

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
    with pytest.raises(
        OutOfPagesError, match="could never give this sequence 17 tokens in one step, 16 at most"
    ):
        sequence.cache.resize(len(tokens) + 1)


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
    with pytest.raises(OutOfPagesError):
        sequence.cache.resize(5 * PER_BLOCK)
    blocker = driver.manager.create_kv_cache()
    assert blocker.resume()
    assert blocker.resize(PER_BLOCK)
    assert not sequence.cache.resize(4 * PER_BLOCK)
    assert sequence.cache.capacity == 4
    assert sequence.cache.page_indices(GROUP).tolist() == before
    blocker.close()
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
