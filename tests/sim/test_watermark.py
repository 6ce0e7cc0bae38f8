"""Hot slots kept free for sequences that come next."""

from __future__ import annotations

import pytest

from tests.sim.rig import Rig
from tests.sim.scenes import (
    PER_BLOCK,
    Build,
    filled,
    hot_blocks,
    moves,
    prompt,
    resumed,
    suspended,
    totals,
)


def settled(rig: Rig) -> None:
    for _ in range(5):
        rig.manager.poll()
        rig.manager.finish_transfers()


@pytest.mark.parametrize("cold", [{"host": 20}, {"disk": 20}, {"host": 4, "disk": 20}])
def test_the_oldest_pages_leave_before_room_is_asked_for(
    build: Build, cold: dict[str, int]
) -> None:
    rig = build(hot=8, free_watermark=0.5, **cold)
    old, young = suspended(rig, prompt(3, 1)), suspended(rig, prompt(3, 2))
    assert rig.used[0] == 6
    settled(rig)
    assert rig.used[0] == 4
    assert hot_blocks(young) == [0, 1, 2]
    assert hot_blocks(old) == [0]
    copies = moves(rig, "hot-host") + moves(rig, "hot-disk")
    asker = rig.create()
    assert asker.resume()
    assert asker.cache.resize(4 * PER_BLOCK)
    assert moves(rig, "hot-host") + moves(rig, "hot-disk") == copies, "the room was there"
    rig.close(asker)
    for sequence in (old, young):
        resumed(rig, sequence)
        assert sequence.cache.missing_blocks() == []
        sequence.cache.suspend()


def test_no_page_that_a_sequence_holds_is_lost_for_it(build: Build) -> None:
    rig = build(hot=8, host=2, free_watermark=0.5)
    first, second = suspended(rig, prompt(4, 1)), suspended(rig, prompt(4, 2))
    settled(rig)
    assert totals(rig, "lost_held_pages") == 0
    assert rig.used == [6, 2], "as far as the host level had room"
    rig.close(first)
    settled(rig)
    assert rig.used == [6, 2], "what nobody holds can go whenever its room is wanted"
    copies = moves(rig, "hot-host")
    asker = rig.create()
    assert asker.resume()
    assert asker.cache.resize(4 * PER_BLOCK)
    assert moves(rig, "hot-host") == copies
    assert totals(rig, "lost_held_pages") == 0
    assert second.cache.missing_blocks() == []


def test_it_does_not_cost_pages_of_lower_priority_either(build: Build) -> None:
    rig = build(hot=8, host=2, free_watermark=0.5)
    low = rig.create(priority=10)
    assert low.resume()
    assert low.step(prompt(2, 1))
    low.cache.suspend()
    rig.close(filled(rig, prompt(8, 2), num_committed=0))
    assert rig.used == [0, 2]
    high = rig.create(priority=60)
    assert high.resume()
    assert high.step(prompt(6, 3))
    high.cache.suspend()
    settled(rig)
    assert low.cache.missing_blocks() == []
    assert rig.used == [6, 2]


def test_what_is_active_or_moving_is_left_alone(build: Build) -> None:
    rig = build(hot=8, host=20, free_watermark=0.9)
    sequence = filled(rig, prompt(6), stream=rig.streams[1])
    places = sequence.cache.page_indices(0).tolist()
    settled(rig)
    assert rig.used[0] == 6
    assert sequence.cache.page_indices(0).tolist() == places
    sequence.check()
    sequence.cache.suspend()
    settled(rig)
    assert rig.used[0] == 1


def test_without_other_levels_and_without_a_watermark_all_stays(build: Build) -> None:
    alone = build(hot=8, free_watermark=0.9)
    none = build(hot=8, host=20)
    for rig in (alone, none):
        suspended(rig, prompt(6))
        settled(rig)
        assert rig.used[0] == 6
