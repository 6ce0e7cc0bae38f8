"""Blocks without pages, by wish or by loss: who sees them, and what is computed after them."""

from __future__ import annotations

import pytest

from coldpage.errors import OutOfPagesError
from coldpage.prefix import block_key, root_key
from coldpage.sequence import DroppedBlocks, OnMissing
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import NO_SLOT, HalfOpenRange
from tests.sim.rig import Rig
from tests.sim.scenes import PER_BLOCK, Build, filled, prompt, push_out, resumed, suspended, totals

HOLE = OnMissing.HOLE


def drop(sequence: PatternSequence, start: int, stop: int) -> DroppedBlocks:
    return sequence.cache.drop_blocks(HalfOpenRange(start, stop))


# Dropping


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("cold", [{}, {"host": 20}, {"disk": 20}])
def test_whole_blocks_become_holes_and_blocks_cut_in_part_stay(
    build: Build, is_active: bool, cold: dict[str, int]
) -> None:
    rig = build(hot=8, **cold)
    tokens = prompt(5)
    sequence = filled(rig, tokens, num_committed=0, stream=rig.streams[1])
    if not is_active:
        sequence.cache.suspend()
    used = sum(rig.used)
    assert drop(sequence, 3, 9) == DroppedBlocks((2, 3), (1, 4))
    assert sum(rig.used) == used - 2, "their slots are free"
    cache = sequence.cache
    assert cache.holes() == [2, 3]
    assert cache.missing_blocks() == []
    assert (cache.history_length, cache.num_blocks) == (10, 5)
    assert totals(rig, "masked_pages") == 2
    if not is_active:
        resumed(rig, sequence)
    assert [s == NO_SLOT for s in cache.page_indices(0).tolist()] == [0, 0, 1, 1, 0]
    sequence.check()
    assert drop(sequence, 3, 9) == DroppedBlocks((2, 3), (1, 4)), "again, and nothing happens"
    assert totals(rig, "masked_pages") == 2
    assert sequence.step([1, 2, 3], num_committed=0)
    sequence.check()
    assert cache.holes() == [2, 3]


def test_the_last_block_while_it_is_not_full(build: Build) -> None:
    rig = build(hot=8)
    sequence = filled(rig, prompt(3)[:5], num_committed=0)
    assert drop(sequence, 0, 5) == DroppedBlocks((0, 1), (2,))
    assert drop(sequence, 0, 100) == DroppedBlocks((0, 1), (2,)), "clipped to what is written"
    assert drop(sequence, 4, 5) == DroppedBlocks((), (2,))
    assert drop(sequence, 5, 9) == drop(sequence, 3, 3) == DroppedBlocks((), ())
    assert sequence.cache.resize(8)
    assert drop(sequence, 0, 8) == DroppedBlocks((0, 1), (2,)), "room is not history"
    assert sequence.step([7])
    assert drop(sequence, 4, 6) == DroppedBlocks((2,), ())
    assert sequence.cache.holes() == [0, 1, 2]
    assert rig.used == [0]
    assert sequence.step([8, 9, 10])
    sequence.check()


def test_room_granted_before_stays_granted(build: Build) -> None:
    rig = build(hot=8)
    sequence = filled(rig, prompt(3), num_committed=0, stream=rig.streams[1])
    assert sequence.cache.resize(10)
    drop(sequence, 0, 6)
    sequence.cache.synchronize()
    sequence.write([5, 6, 7, 8])
    assert sequence.cache.resize(10, 10)
    sequence.check()
    assert totals(rig, "copied_on_write_pages") == 0


def test_blocks_that_a_window_gave_up(build: Build) -> None:
    rig = build(hot=12, kind="mixed-sizes")  # a window of two blocks and a token
    sequence = filled(rig, prompt(7), num_committed=0)
    assert sequence.cache.holes() == []
    pages = rig.used[0]
    outcome = drop(sequence, 2, 6)
    assert outcome == DroppedBlocks((1, 2), ())
    assert rig.used[0] == pages - 2, "the window had no pages there"
    assert sequence.cache.holes(0) == [1, 2]
    sequence.check()
    # The window needs it again, and it stays a hole there too.
    sequence.truncate(8)
    sequence.cache.synchronize()
    assert 1 not in sequence.cache.missing_blocks(1)
    assert sequence.cache.holes(1) == [1, 2]
    sequence.recompute()
    sequence.check()


def test_other_sequences_keep_what_they_share(build: Build) -> None:
    rig = build(hot=12, host=20)
    tokens = prompt(4)
    first = filled(rig, tokens)
    fork = rig.adopt(first.fork())
    again = rig.create(tokens)
    used = rig.used
    assert drop(first, 2, 6).dropped == (1, 2)
    assert rig.used == used, "others still hold them"
    first.check()
    first.cache.suspend()
    for other in (fork, again):
        assert other.cache.holes() == []
        resumed(rig, other)
        other.cache.suspend()
    assert rig.create(tokens).cache.num_committed_tokens == 8, "the tree keeps them too"
    push_out(rig, 12)
    resumed(rig, first)
    assert first.cache.holes() == [1, 2]
    first.cache.suspend()
    rig.close(fork)
    rig.close(again)
    rig.check()


def test_a_page_that_is_the_sequences_own_is_gone_everywhere(build: Build) -> None:
    rig = build(hot=6, host=4, disk=20)
    sequence = suspended(rig, prompt(4), num_committed=0)
    push_out(rig, 6)
    rig.poll()
    assert sum(rig.used) >= 5
    drop(sequence, 0, 8)
    rig.manager.finish_transfers()
    rig.manager.poll()
    assert rig.used == [0, 0, 0]
    assert rig.table.num_pages == 0
    resumed(rig, sequence)
    assert sequence.cache.holes() == [0, 1, 2, 3]


# Forks and truncation


def test_a_fork_has_the_holes_and_its_own_from_then_on(build: Build) -> None:
    rig = build(hot=12, host=12)
    sequence = suspended(rig, prompt(4))
    drop(sequence, 2, 4)
    fork = rig.adopt(sequence.fork())
    assert fork.cache.holes() == [1]
    drop(fork, 4, 6)
    assert (sequence.cache.holes(), fork.cache.holes()) == ([1], [1, 2])
    for member in (sequence, fork):
        resumed(rig, member)
        assert member.step([3, 4])
        member.check()
        member.cache.suspend()


@pytest.mark.parametrize("is_active", [True, False])
def test_truncated_into_a_hole_the_block_is_missing(build: Build, is_active: bool) -> None:
    rig = build(hot=8, host=8)
    sequence = filled(rig, prompt(4), num_committed=0)
    if not is_active:
        sequence.cache.suspend()
    drop(sequence, 0, 6)
    assert sequence.cache.holes() == [0, 1, 2]
    sequence.truncate(5)  # will be written from its middle on
    assert sequence.cache.holes() == [0, 1]
    assert sequence.cache.missing_blocks() == [2]
    if not is_active:
        resumed(rig, sequence)
    sequence.cache.synchronize()
    assert sequence.recompute() == [2]
    sequence.check()
    assert sequence.step([5, 6, 7], num_committed=0)
    sequence.check()
    sequence.truncate(4)  # between two blocks: nothing to recompute
    assert sequence.cache.holes() == [0, 1]
    assert sequence.cache.missing_blocks() == []
    assert sequence.step([5, 6])
    sequence.truncate(0)
    assert sequence.cache.holes() == []
    assert sequence.step(prompt(4))
    assert len(sequence.cache.block_keys) == 4, "nothing was computed with holes"


def test_a_resize_that_fails_leaves_the_holes(build: Build) -> None:
    rig = build(hot=6)
    sequence = filled(rig, prompt(3), num_committed=0)
    drop(sequence, 2, 6)
    blocker = filled(rig, prompt(5, 8), num_committed=0)
    assert not sequence.cache.resize(6, 2)
    assert sequence.cache.holes() == [1, 2]
    with pytest.raises(OutOfPagesError):
        sequence.cache.resize(100, 2)
    assert sequence.cache.holes() == [1, 2]
    rig.close(blocker)
    assert sequence.cache.resize(6, 2)
    sequence.forget_from(2)
    assert sequence.cache.holes() == []
    sequence.cache.synchronize()
    sequence.write([1, 2, 3, 4])
    assert sequence.cache.resize(6, 6)
    sequence.check()


# Sharing


def test_what_was_computed_after_a_hole_is_not_shared(build: Build) -> None:
    rig = build(hot=12, host=12)
    tokens = prompt(6)
    sequence = filled(rig, tokens[:6])
    keys = sequence.cache.block_keys
    assert len(keys) == 3
    drop(sequence, 2, 4)
    assert sequence.cache.block_keys == keys, "those before are what they were"
    assert sequence.step(tokens[6:])
    assert sequence.cache.num_committed_tokens == 12
    assert sequence.cache.block_keys == keys
    assert rig.create(tokens).cache.num_committed_tokens == 6
    assert rig.manager.stats().num_committed_blocks == 3
    # Another that computes them with all blocks can share them, and its keys follow the contents.
    other = filled(rig, tokens)
    assert rig.create(tokens).cache.num_committed_tokens == 12
    root = root_key(b"pattern", other.scope, rig.manager.provenance)
    assert other.cache.block_keys[0] == block_key(root, tokens[:2])
    assert other.cache.block_keys[3] == block_key(keys[2], tokens[6:8])
    sequence.check()
    other.check()


def test_a_hole_at_the_end_of_what_was_committed(build: Build) -> None:
    rig = build(hot=12)
    tokens = prompt(4)
    sequence = filled(rig, tokens, num_committed=4)
    drop(sequence, 4, 6)  # written, and not committed
    sequence.cache.commit(tokens[4:])
    # The hole has a key, which finds no page; what comes after it has none.
    assert len(sequence.cache.block_keys) == 3
    assert rig.create(tokens).cache.num_committed_tokens == 4
    fork = rig.adopt(sequence.fork())
    resumed(rig, fork)
    assert fork.step([1, 2])
    assert len(fork.cache.block_keys) == 3


# Losses


def lossy(rig: Rig, on_missing: OnMissing, num_tokens: int = 10) -> PatternSequence:
    """A suspended sequence that has lost everything."""
    sequence = rig.create(on_missing=on_missing)
    assert sequence.resume()
    assert sequence.step(prompt(5)[:num_tokens])
    sequence.cache.suspend()
    push_out(rig, 8)
    assert totals(rig, "lost_held_pages") == 5
    return sequence


def test_losses_become_holes_and_are_counted(build: Build) -> None:
    rig = build(hot=8)
    sequence = lossy(rig, HOLE)
    cache = sequence.cache
    assert cache.missing_blocks() == []
    assert cache.holes() == [0, 1, 2, 3, 4]
    assert totals(rig, "masked_pages") == 5
    resumed(rig, sequence)
    assert rig.used == [0]
    assert sequence.step([1, 2, 3])
    assert len(cache.block_keys) == 5
    assert totals(rig, "masked_pages") == 5


def test_of_losses_only_a_last_block_that_is_not_full_is_missing(build: Build) -> None:
    rig = build(hot=8)
    sequence = lossy(rig, HOLE, 9)
    cache = sequence.cache
    assert cache.holes() == [0, 1, 2, 3]
    assert cache.missing_blocks() == [4]
    assert totals(rig, "masked_pages") == 4
    resumed(rig, sequence)
    assert sequence.recompute() == [4]
    sequence.check()
    assert sequence.step([1, 2])
    assert cache.holes() == [0, 1, 2, 3]


def test_losses_are_recomputed_where_that_is_wanted(build: Build) -> None:
    rig = build(hot=8)
    sequence = lossy(rig, OnMissing.RECOMPUTE)
    cache = sequence.cache
    assert cache.holes() == []
    assert cache.missing_blocks() == [0, 1, 2, 3, 4]
    assert totals(rig, "masked_pages") == 0
    resumed(rig, sequence)
    assert sequence.recompute() == [0, 1, 2, 3, 4]
    sequence.check()
    assert rig.create(prompt(5)).cache.num_committed_tokens == 10


def test_a_fork_says_itself_what_becomes_of_losses_as_its_origin_does(build: Build) -> None:
    rig = build(hot=8)
    sequence = rig.create(on_missing=HOLE)
    assert sequence.resume()
    assert sequence.step(prompt(3))
    fork = rig.adopt(sequence.fork())
    twin = rig.create(prompt(3))  # shares the pages, and recomputes
    sequence.cache.suspend()
    push_out(rig, 8)
    assert fork.cache.holes() == sequence.cache.holes() == [0, 1, 2]
    assert twin.cache.holes() == []
    assert twin.cache.missing_blocks() == [0, 1, 2]
    resumed(rig, twin)
    assert twin.recompute() == [0, 1, 2]
    twin.check()
    assert fork.cache.holes() == [0, 1, 2], "it has let go of them"


def test_a_loss_while_it_comes_back_from_disk_becomes_a_hole(build: Build) -> None:
    rig = build(hot=6, disk=20)
    sequence = rig.create(on_missing=HOLE)
    assert sequence.resume()
    assert sequence.step(prompt(4), num_committed=0)
    sequence.cache.suspend()
    push_out(rig, 6)
    assert rig.flip_on_disk(sequence.cache) == [0, 1, 2, 3]
    assert sequence.resume()
    sequence.cache.synchronize()
    assert rig.used[0] == 0, "nothing is to be recomputed"
    assert sequence.cache.holes() == [0, 1, 2, 3]
    assert sequence.cache.missing_blocks() == []
    assert totals(rig, "read_misses") == totals(rig, "masked_pages") == 4
    assert sequence.step([1] * PER_BLOCK, num_committed=0)
    sequence.check()
    rig.check()
