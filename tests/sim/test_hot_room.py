"""What can never be is said at once: a caller that tries again would do so for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coldpage import OnMissing, OutOfPagesError, UsageError
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import HalfOpenRange, LayerGroupId, Priority
from tests.sim.rig import Rig
from tests.sim.scenes import PER_BLOCK, Build, filled, prompt, resumed, suspended

KINDS = ("full", "mixed", "mixed-sizes", "window")


def filled_by_steps(rig: Rig, num_blocks: int) -> PatternSequence:
    sequence = rig.create()
    assert sequence.resume()
    for block in range(num_blocks):
        assert sequence.step(prompt(num_blocks)[block * PER_BLOCK : (block + 1) * PER_BLOCK])
    return sequence


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_step_is_known_and_no_larger_one_ever_comes(build: Build, kind: str) -> None:
    rig = build(hot=8, host=32, kind=kind)
    cache = rig.create().cache
    assert cache.resume()
    most = cache.max_capacity
    if kind == "mixed":  # one pool group for both layer groups, which share its slots
        assert most == 8 * PER_BLOCK
    before = rig.used
    with pytest.raises(OutOfPagesError, match=r"in one step|never fit"):
        cache.resize(most + 1)
    assert rig.used == before and cache.capacity == 0
    assert cache.resize(most)
    rig.check()


@pytest.mark.parametrize("kind", ["mixed", "window"])
def test_steps_reach_what_one_step_can_not(build: Build, kind: str) -> None:
    rig = build(hot=8, host=32, kind=kind)
    # With a window alone there is no longest.
    longest = min(rig.manager.max_sequence_tokens, 40 * PER_BLOCK)
    cache = rig.create().cache
    assert cache.resume()
    at_once = cache.max_capacity
    assert at_once < longest
    with pytest.raises(OutOfPagesError, match=f"{at_once:,} at most: grow in smaller steps"):
        cache.resize(at_once + PER_BLOCK)
    sequence = filled_by_steps(rig, longest // PER_BLOCK)
    assert sequence.cache.history_length == longest
    sequence.check()
    rig.check()


def test_what_others_hold_is_no_reason_to_give_up(build: Build) -> None:
    rig = build(hot=8, host=32)
    other = filled(rig, prompt(5))
    cache = rig.create(prompt(1, 7)).cache
    assert cache.resume()
    assert cache.max_capacity == 8 * PER_BLOCK
    assert not cache.resize(8 * PER_BLOCK)
    other.cache.suspend()
    assert cache.resize(8 * PER_BLOCK)


def test_a_resume_that_never_comes_says_so(build: Build) -> None:
    """It grew to all of the hot level, and a resume may take half."""
    rig = build(hot=8, host=32, max_util=0.5)
    sequence = suspended(rig, prompt(8))
    assert rig.manager.max_sequence_tokens == 4 * PER_BLOCK
    before = rig.used
    with pytest.raises(OutOfPagesError, match=r"16 tokens can never fit.*truncate"):
        sequence.cache.resume()
    assert rig.used == before
    sequence.truncate(4 * PER_BLOCK)
    resumed(rig, sequence)


def test_a_resume_beside_others_waits(build: Build) -> None:
    rig = build(hot=8, host=32, max_util=0.5)
    waiting = suspended(rig, prompt(4))
    other = filled(rig, prompt(4, 7))
    assert not waiting.cache.resume()
    other.cache.suspend()
    resumed(rig, waiting)


def test_a_resize_without_room_copies_nothing(build: Build) -> None:
    """A shared last page is copied only when all that was asked for is there."""
    rig = build(hot=8, host=32)
    first = filled(rig, prompt(3)[:5])
    rig.adopt(first.fork())
    other = filled(rig, prompt(4, 7))
    assert rig.used[0] == 7
    before = first.cache.page_indices(LayerGroupId(0)).tolist()
    assert first.cache.is_ready()
    assert not first.cache.resize(6 * PER_BLOCK)
    assert rig.used[0] == 7
    assert first.cache.page_indices(LayerGroupId(0)).tolist() == before
    assert first.cache.is_ready()
    other.cache.suspend()
    assert first.cache.resize(6 * PER_BLOCK)
    assert first.cache.page_indices(LayerGroupId(0)).tolist()[:3] != before
    rig.check()


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda cache: cache.resize(7.5), "a capacity must be a whole number, not 7.5"),
        (lambda cache: cache.resize(8, 6.0), "a history length must be a whole number"),
        (lambda cache: cache.truncate(1.0), "a number of tokens must be a whole number"),
        (lambda cache: cache.commit([1 << 40]), "1099511627776 is no token id"),
        (lambda cache: cache.commit([1.5]), "tokens must be one row of whole numbers"),
        (lambda cache: cache.commit("ab"), "tokens must be one row of whole numbers"),
        (lambda cache: cache.plan_drop("x"), "a block's ordinal must be a whole number"),
        (lambda cache: cache.page_indices(1), "no layer group 1: this model has 0 to 0"),
        (lambda cache: cache.page_indices(-1), "no layer group -1"),
        (lambda cache: cache.holes(7), "no layer group 7"),
        (lambda cache: cache.missing_blocks("x"), "no layer group 'x'"),
        (lambda cache: cache.drop_blocks(HalfOpenRange(0, 4), -1), "no layer group -1"),
        (lambda cache: cache.fill_missing([99]), "no block 99: this sequence has 3"),
        (lambda cache: cache.fill_missing([-1]), "no block -1"),
        (lambda cache: cache.raise_priority(1 << 15), "give a whole number from -32768 to 32767"),
        (lambda cache: cache.raise_priority("high"), "priority is 'high'"),
    ],
)
def test_a_wrong_argument_changes_nothing(
    build: Build, call: Callable[[Any], object], words: str
) -> None:
    rig = build(hot=8, host=8)
    sequence = filled(rig, prompt(3))
    before = rig.used, rig.manager.stats().num_pages, sequence.cache.capacity
    with pytest.raises(UsageError, match=words):
        call(sequence.cache)
    assert (rig.used, rig.manager.stats().num_pages, sequence.cache.capacity) == before
    sequence.check()
    sequence.cache.suspend()
    resumed(rig, sequence)


def test_only_a_stream_is_a_stream(build: Build) -> None:
    rig = build(hot=8, host=8)
    sequence = suspended(rig, prompt(3))
    with pytest.raises(UsageError, match="one that the manager's device made, not 3"):
        sequence.cache.resume(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="synchronize needs a KV cache that is active"):
        sequence.cache.synchronize()
    resumed(rig, sequence)
    sequence.cache.close()


@pytest.mark.parametrize("on_missing", ["hole", "recompute", None])
def test_losses_are_handled_one_way_or_the_other(build: Build, on_missing: object) -> None:
    rig = build(hot=8, host=8)
    filled(rig, prompt(3)).cache.suspend()
    before = rig.manager.stats().num_pages
    with pytest.raises(UsageError, match=r"give OnMissing\.RECOMPUTE or OnMissing\.HOLE"):
        rig.manager.create_kv_cache(prompt(3), on_missing=on_missing)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="priority is 40000"):
        rig.manager.create_kv_cache(prompt(3), priority=Priority(40_000))
    assert rig.manager.stats().num_pages == before
    with rig.manager.create_kv_cache(prompt(3), on_missing=OnMissing.HOLE) as cache:
        assert cache.num_committed_tokens == 3 * PER_BLOCK
    rig.check()


def test_a_cache_is_closed_behind_a_with_statement(build: Build) -> None:
    rig = build(hot=8, host=8)
    with rig.manager.create_kv_cache() as cache:
        assert cache.resume() and cache.resize(2 * PER_BLOCK)
        assert rig.used[0] > 0
    assert rig.used[0] == 0
    assert cache.status.value == "closed"
