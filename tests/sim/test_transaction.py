"""A move that fails, pages that move while room is made, and who stays when not all can."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coldpage import create_default_cold_page_codec
from coldpage.testing.example_codecs import DeviceIndexCodec, PositionCodec
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import CacheLevel, PageIndexLocation
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


def position_on_device() -> PositionCodec:
    return PositionCodec(PageIndexLocation.DEVICE)


CODECS: dict[str, MakeCodec] = {
    "host indices": create_default_cold_page_codec,
    "copies of pages": lambda: create_default_cold_page_codec(1 << 20),
    "device indices": DeviceIndexCodec,
    "device indices and positions": position_on_device,
}
COLD = [{"host": 12}, {"disk": 12}, {"host": 2, "disk": 12}]

# How a submission is refused: by the device at once, or by the codec, after any upload.
Refuse = Callable[[Rig], None]


def by_the_device(what: str, stream: str) -> Refuse:
    return lambda rig: rig.device.fail_next_submission(stream)


def by_the_codec(what: str, stream: str) -> Refuse:
    return lambda rig: rig.codecs["manager"].reject(what)


@pytest.fixture(params=CODECS.values(), ids=CODECS.keys())
def codec(request: pytest.FixtureRequest) -> MakeCodec:
    found: MakeCodec = request.param
    return found


def rings_are_empty(rig: Rig) -> None:
    """No lease is left of what was refused."""
    index_ring = rig.storage.moves._calls.index_ring
    assert index_ring is None or index_ring.num_live == 0
    if rig.storage._disk_moves is not None:
        assert rig.storage._disk_moves.writes._end.ring.num_live == 0


def order_of_eviction(rig: Rig, sequences: list[PatternSequence]) -> list[tuple[int, int]]:
    """In which order the hot blocks go, as (sequence, block)."""
    gone: list[tuple[int, int]] = []
    asker = rig.create()
    assert asker.resume()
    for num_blocks in range(1, rig.num_lockable_blocks + 1):
        assert asker.cache.resize(num_blocks * PER_BLOCK)
        for number, sequence in enumerate(sequences):
            hot = hot_blocks(sequence)
            lost = [b for b in range(sequence.cache.num_blocks) if b not in hot]
            gone += [(number, b) for b in lost if (number, b) not in gone]
    rig.close(asker)
    return gone


# Rejected encodes


@pytest.mark.parametrize("cold", COLD)
@pytest.mark.parametrize("refuse", [by_the_device, by_the_codec])
def test_a_rejected_encode_is_as_if_nobody_had_asked(
    build: Build, codec: MakeCodec, cold: dict[str, int], refuse: Callable[[str, str], Refuse]
) -> None:
    orders: list[list[tuple[int, int]]] = []
    for is_asked in (True, False):
        rig = build(hot=6, codec=codec, **cold)
        sequences = [suspended(rig, prompt(3, first)) for first in range(2)]
        if is_asked:
            before, uses = rig.used, rig.table.last_use.copy()
            asker = rig.create()
            assert asker.resume()
            refuse("encode", "offload")(rig)
            assert not asker.cache.resize(2 * PER_BLOCK)
            assert totals(rig, "rejected_submissions") == 1
            assert rig.used == before
            assert (rig.table.last_use == uses).all()
            rings_are_empty(rig)
            rig.check()
            for sequence in sequences:
                resumed(rig, sequence)
                assert moves(rig, "host-hot") + moves(rig, "disk-hot") == 0, "it never left"
                sequence.cache.suspend()
            rig.close(asker)
        else:
            for sequence in sequences:
                resumed(rig, sequence)
                sequence.cache.suspend()
        orders.append(order_of_eviction(rig, sequences))
        assert len(orders[-1]) == 6
    assert orders[0] == orders[1]


# Rejected decodes


@pytest.mark.parametrize("refuse", [by_the_device, by_the_codec])
def test_a_rejected_decode_is_as_if_nobody_had_asked(
    build: Build, codec: MakeCodec, refuse: Callable[[str, str], Refuse]
) -> None:
    orders: list[list[tuple[int, int]]] = []
    for is_asked in (True, False):
        rig = build(hot=6, host=12, codec=codec)
        cold = suspended(rig, prompt(2, 7))
        push_out(rig, 6)
        old, part, young = (suspended(rig, prompt(n, first)) for first, n in enumerate((1, 2, 1)))
        sequences = [old, part, young]
        if is_asked:
            before, uses = rig.used, rig.table.last_use.copy()
            refuse("decode", "onboard")(rig)
            assert not cold.resume()
            assert totals(rig, "rejected_submissions") == 1
            assert rig.used == before
            assert (rig.table.last_use == uses).all()
            assert cold.cache.status.value == "suspended"
            rings_are_empty(rig)
            rig.check()
        orders.append(order_of_eviction(rig, sequences))
        assert len(orders[-1]) == 4
        resumed(rig, cold)
        assert cold.cache.missing_blocks() == []
        cold.cache.suspend()
    assert orders[0] == orders[1]


def test_a_rejected_decode_leaves_hot_pages_their_place_in_the_order(build: Build) -> None:
    """The sequence that asked has hot pages too, the oldest: they stay the oldest."""
    rig = build(hot=6, host=12)
    first = suspended(rig, prompt(4, 1))
    push_out(rig, 4)  # two of its blocks go
    second = suspended(rig, prompt(2, 2))
    assert len(hot_blocks(first)) == 2
    rig.device.fail_next_submission("onboard")
    assert not first.resume()
    assert order_of_eviction(rig, [first, second])[2:] == [(0, 3), (0, 0), (1, 1), (1, 0)]


def test_a_rejected_encode_for_blocks_that_a_window_wants_back(build: Build) -> None:
    """A sequence has been cut back, and needs blank pages beside its own: there is no room, since
    the device rejects what would make it.
    """
    orders: list[list[tuple[int, int]]] = []
    for is_asked in (True, False):
        rig = build(hot=8, host=12, kind="window")
        cut = suspended(rig, prompt(7, 1), num_committed=0)  # it keeps blocks 0, 5 and 6
        cut.truncate(8)  # and wants 2 and 3
        other = suspended(rig, prompt(3, 2), num_committed=0)
        last = suspended(rig, prompt(3, 3), num_committed=0)
        assert rig.used == [7, 0]
        if is_asked:
            uses, marks = rig.table.last_use.copy(), rig.table.is_protected.copy()
            rig.device.fail_next_submission("offload")
            assert not cut.resume(rig.streams[1])
            assert totals(rig, "rejected_submissions") == 1
            assert (rig.table.last_use == uses).all()
            assert (rig.table.is_protected == marks).all()
            assert cut.cache.status.value == "suspended"
            rig.check()
        orders.append(order_of_eviction(rig, [cut, other, last]))
        resumed(rig, cut)
        assert cut.recompute() == [2, 3]
        cut.check()
        cut.cache.suspend()
    assert orders[0] == orders[1]


def test_one_of_two_batches_is_rejected(build: Build, codec: MakeCodec) -> None:
    rig = build(hot=6, host=12, kind="mixed-sizes", codec=codec)
    sequence = suspended(rig, prompt(3))
    push_out(rig, 6)
    assert rig.used == [0, 6]
    rig.codecs["manager"].reject("decode", after=1)
    assert not sequence.resume()
    assert rig.used == [3, 6], "one group has arrived, the other has given its slots back"
    rings_are_empty(rig)
    rig.check()
    resumed(rig, sequence)
    assert moves(rig, "host-hot") == 5, "a window has given up one of six"
    sequence.cache.suspend()
    assert sequence.resume()
    assert sequence.step([5, 5], num_committed=6)
    sequence.cache.suspend()
    asker = rig.create()
    assert asker.resume()
    used = rig.used
    # The new block has no cold copy yet; room in one hot group is refused, in the other made.
    rig.codecs["manager"].reject("encode", after=1)
    assert not asker.cache.resize(6 * PER_BLOCK)
    assert totals(rig, "rejected_submissions") == 2
    assert sum(rig.used) < sum(used) + 1
    rings_are_empty(rig)
    rig.check()
    assert asker.cache.resize(6 * PER_BLOCK)
    rig.close(asker)
    resumed(rig, sequence)


def test_many_rejections_leak_nothing(build: Build, codec: MakeCodec) -> None:
    rig = build(hot=4, host=12, codec=codec)
    sequence = suspended(rig, prompt(4))
    asker = rig.create()
    assert asker.resume()
    for _ in range(200):
        rig.codecs["manager"].reject("encode")
        assert not asker.cache.resize(8)
    rig.close(asker)
    push_out(rig, 4)
    for _ in range(200):
        rig.codecs["manager"].reject("decode")
        assert not sequence.resume()
    assert rig.used == [0, 4]
    assert totals(rig, "rejected_submissions") == 400
    rings_are_empty(rig)
    resumed(rig, sequence)


# While pages are moving


def test_room_is_not_taken_from_pages_that_are_on_their_way(build: Build) -> None:
    for seed in range(5):
        rig = build(seed=seed, hot=6, disk=20)
        coming = suspended(rig, prompt(4, 1))
        push_out(rig, 6)
        rig.device.faults.is_io_held = True
        coming.cache.prefetch(CacheLevel(0))
        assert rig.used[0] == 4
        asker = rig.create()
        assert asker.resume(rig.streams[1])
        assert asker.cache.resize(2 * PER_BLOCK)
        before = rig.used, asker.cache.page_indices(0).tolist()
        assert not asker.cache.resize(4 * PER_BLOCK)
        assert (rig.used, asker.cache.page_indices(0).tolist()) == before
        rig.check()
        rig.device.faults.is_io_held = False
        rig.manager.finish_transfers()
        assert asker.cache.resize(4 * PER_BLOCK)
        assert len(hot_blocks(coming)) == 2
        assert moves(rig, "hot-disk") == 4, "they had clean copies"
        rig.close(asker)
        resumed(rig, coming)


def test_victims_of_victims_while_the_disk_is_slow(build: Build) -> None:
    """Everything falls, level after level, while earlier falls have not ended."""
    for seed in range(5):
        rig = build(seed=seed, hot=4, host=4, disk=20)
        rig.device.faults.io_delay_rate = 1.0
        sequences = [suspended(rig, prompt(4, first)) for first in range(5)]
        rig.manager.poll()
        assert rig.storage._disk_moves is not None
        assert rig.storage._disk_moves.num_in_flight
        assert totals(rig, "lost_held_pages") == 0
        for sequence in reversed(sequences):
            resumed(rig, sequence, rig.streams[1])
            assert sequence.cache.missing_blocks() == []
            sequence.cache.suspend()
            rig.manager.poll()


# Who stays


def with_priority(rig: Rig, num_blocks: int, first: int, priority: int) -> PatternSequence:
    sequence = rig.create(priority=priority)
    assert sequence.resume()
    assert sequence.step(prompt(num_blocks, first))
    sequence.cache.suspend()
    return sequence


@pytest.mark.parametrize("cold", [{"host": 4}, {"disk": 4}])
@pytest.mark.parametrize(("resident", "falling"), [(50, 10), (10, 50)])
def test_of_residents_and_those_that_fall_the_higher_priority_stays(
    build: Build, cold: dict[str, int], resident: int, falling: int
) -> None:
    rig = build(hot=4, **cold)
    first = with_priority(rig, 4, 1, resident)
    push_out(rig, 4)
    assert rig.used == [0, 4]
    second = with_priority(rig, 4, 2, falling)
    push_out(rig, 4)
    low, high = (first, second) if resident < falling else (second, first)
    assert high.cache.missing_blocks() == []
    assert low.cache.missing_blocks() == [0, 1, 2, 3]
    resumed(rig, high)


@pytest.mark.parametrize("cold", [{"host": 4}, {"disk": 4}])
def test_those_that_fall_together_displace_only_what_is_worth_less(
    build: Build, cold: dict[str, int]
) -> None:
    rig = build(hot=4, **cold)
    best, least = with_priority(rig, 2, 1, 60), with_priority(rig, 2, 2, 10)
    push_out(rig, 4)
    middle = with_priority(rig, 4, 3, 35)
    push_out(rig, 4)
    assert best.cache.missing_blocks() == []
    assert least.cache.missing_blocks() == [0, 1]
    assert middle.cache.missing_blocks() == [1, 2], "its first and newest blocks stay longest"
    assert totals(rig, "lost_held_pages") == 4
    resumed(rig, best)


@pytest.mark.parametrize("cold", [{"host": 2}, {"disk": 2}])
def test_of_those_that_fall_together_the_highest_priority_gets_the_room(
    build: Build, cold: dict[str, int]
) -> None:
    for order in ((10, 60), (60, 10)):
        rig = build(hot=4, **cold)
        made = {priority: with_priority(rig, 2, priority, priority) for priority in order}
        push_out(rig, 4)
        assert made[60].cache.missing_blocks() == []
        assert made[10].cache.missing_blocks() == [0, 1]
        resumed(rig, made[60])


def test_shared_pages_have_the_highest_priority_of_their_holders(build: Build) -> None:
    rig = build(hot=4, host=2)
    low = with_priority(rig, 2, 1, 10)
    shared = rig.create(prompt(2, 1), priority=70)
    assert shared.cache.num_committed_tokens == 4
    other = with_priority(rig, 2, 2, 40)
    push_out(rig, 4)
    assert low.cache.missing_blocks() == shared.cache.missing_blocks() == []
    assert other.cache.missing_blocks() == [0, 1]
    # It keeps that when the one who gave it has gone.
    rig.close(shared)
    third = with_priority(rig, 2, 3, 60)
    push_out(rig, 4)
    assert low.cache.missing_blocks() == []
    assert third.cache.missing_blocks() == [0, 1]


def test_a_higher_priority_that_nobody_holds_gives_way_to_a_held_page(build: Build) -> None:
    rig = build(hot=4, host=4)
    rig.close(with_priority(rig, 4, 1, 90))
    push_out(rig, 4)
    assert rig.used == [0, 4]
    held = with_priority(rig, 4, 2, 10)
    push_out(rig, 4)
    assert held.cache.missing_blocks() == []
    assert totals(rig, "dropped_pages") == 4
    assert filled(rig, prompt(1, 9)).cache.history_length == 2
