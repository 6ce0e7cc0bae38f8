"""What observers are told, what planned drops do, and the numbers of each level in its grouping."""

from __future__ import annotations

import pytest

from coldpage import AttentionLayerConfig, BufferConfig
from coldpage.manager import BlockStored, PageName, PagesDropped, PagesMoved
from coldpage.manager.observers import ObserverHub
from coldpage.prefix import block_key, root_key
from coldpage.storage.copies import BAD_DISK, NO_ROOM, PLANNED
from coldpage.testing.example_codecs import CoarseCodec
from coldpage.types import BufferRole, CacheLevel, LayerId
from tests.sim.rig import Rig
from tests.sim.scenes import Build, filled, moves, prompt, push_out, resumed, suspended, totals

HOT, HOST, DISK = CacheLevel(0), CacheLevel(1), CacheLevel(2)


class Log:
    """Every event, in order."""

    def __init__(self, rig: Rig) -> None:
        self.stored: list[BlockStored] = []
        self.moved: list[PagesMoved] = []
        self.dropped: list[PagesDropped] = []
        rig.manager.add_observer(self)

    def on_stored(self, event: BlockStored) -> None:
        self.stored.append(event)

    def on_moved(self, event: PagesMoved) -> None:
        self.moved.append(event)

    def on_dropped(self, event: PagesDropped) -> None:
        self.dropped.append(event)

    def paths(self) -> dict[tuple[CacheLevel, CacheLevel], list[PageName]]:
        """The pages that were moved, by source and target."""
        found: dict[tuple[CacheLevel, CacheLevel], list[PageName]] = {}
        for event in self.moved:
            found.setdefault((event.source, event.target), []).extend(event.pages)
        return found


def names(keys: tuple[bytes | None, ...] | list[bytes | None], group: int = 0) -> set[PageName]:
    return {PageName(key, group, ordinal) for ordinal, key in enumerate(keys)}  # type: ignore[arg-type]


# Stored


def test_a_block_is_stored_when_it_is_full_with_its_key_parent_and_tokens(build: Build) -> None:
    rig = build(hot=12, kind="mixed-sizes")
    log = Log(rig)
    tokens = prompt(3)
    sequence = filled(rig, tokens[:3])
    keys = sequence.cache.block_keys
    assert [event.tokens for event in log.stored] == [tuple(tokens[:2])]
    assert sequence.step(tokens[3:])
    keys = sequence.cache.block_keys
    root = root_key(b"pattern", sequence.scope, b"exact")
    assert [event.block_key for event in log.stored] == list(keys)
    assert [event.parent_key for event in log.stored] == [root, *keys[:2]]
    assert [event.tokens for event in log.stored] == [
        tuple(tokens[start : start + 2]) for start in (0, 2, 4)
    ]
    assert all(block_key(e.parent_key, e.tokens) == e.block_key for e in log.stored)
    assert {event.layer_group_ids for event in log.stored} == {(0, 1)}
    filled(rig, tokens)  # all of it reused
    twin = rig.create()
    assert twin.resume()
    assert twin.step(tokens)  # computed again, and known
    assert len(log.stored) == 3
    other = filled(rig, [*tokens[:4], 9, 9])
    assert [event.block_key for event in log.stored[3:]] == [other.cache.block_keys[2]]
    assert not log.moved
    assert not log.dropped


def test_a_block_with_pages_in_some_groups_only(build: Build) -> None:
    rig = build(hot=12, kind="mixed-sizes")  # one group has a window of two blocks and a token
    log = Log(rig)
    tokens = prompt(8)
    sequence = filled(rig, tokens, num_committed=0)
    sequence.cache.commit(tokens)
    assert [event.layer_group_ids for event in log.stored] == [
        *[(0,)] * 6,
        *[(0, 1)] * 2,
    ]


def test_pages_are_named_by_layer_group_whatever_their_class(build: Build) -> None:
    rig = build(hot=8, host=8, kind="mixed-sizes", separate_sink_pages=True)
    log = Log(rig)
    suspended(rig, prompt(2))
    push_out(rig, 8)
    assert {event.layer_group_ids for event in log.stored} == {(0, 1)}
    moved = {(p.layer_group_id, p.block_ordinal) for e in log.moved for p in e.pages}
    assert moved == {(0, 0), (0, 1), (1, 0), (1, 1)}


# Moved


def test_moves_name_the_pages_and_both_levels(build: Build) -> None:
    rig = build(hot=6, host=4, disk=20)
    log = Log(rig)
    sequence = suspended(rig, prompt(4)[:7])
    keys = [*sequence.cache.block_keys, None]
    push_out(rig, 6)
    assert set(log.paths()[HOT, HOST]) == names(keys)
    assert len(log.paths()[HOT, HOST]) == 4
    rig.poll()
    spilled = log.paths()[HOST, DISK]
    assert set(spilled) <= names(keys)
    assert len(spilled) == len(set(spilled)) == moves(rig, "host-disk") == 2
    resumed(rig, sequence)
    assert set(log.paths()[HOST, HOT]) == names(keys)
    assert not log.dropped
    assert {f"{s}-{t}": len(pages) for (s, t), pages in log.paths().items()} == {
        "0-1": 4,
        "1-2": 2,
        "1-0": 4,
    }
    sequence.cache.suspend()
    rig.resize(HOST, 2)
    rig.resize(HOST, 4)


def test_a_rejected_move_is_none(build: Build) -> None:
    rig = build(hot=4, host=8)
    log = Log(rig)
    suspended(rig, prompt(4))
    other = rig.create()
    assert other.resume()
    rig.device.fail_next_submission("offload")
    assert not other.cache.resize(8)
    assert not log.moved
    assert other.cache.resize(8)
    assert len(log.paths()[HOT, HOST]) == 4


def test_moves_within_a_level(build: Build) -> None:
    rig = build(hot=8)
    log = Log(rig)
    low = filled(rig, prompt(4, 1), num_committed=0)
    sequence = suspended(rig, prompt(4, 2))
    rig.close(low)
    rig.resize(HOT, 4)
    assert set(log.paths()[HOT, HOT]) == names(list(sequence.cache.block_keys))


# Dropped


def test_what_is_dropped_is_named_with_its_cause(build: Build) -> None:
    rig = build(hot=4)
    log = Log(rig)
    sequence = suspended(rig, prompt(3)[:5])
    keys = [*sequence.cache.block_keys, None]
    push_out(rig, 4)
    assert {event.cause for event in log.dropped} == {NO_ROOM}
    dropped = [page for event in log.dropped for page in event.pages]
    assert set(dropped) == names(keys)
    assert len(dropped) == 3
    gone = suspended(rig, prompt(2, 5))
    keys = list(gone.cache.block_keys)
    rig.close(gone)
    log.dropped.clear()
    push_out(rig, 4)
    dropped = [page for event in log.dropped for page in event.pages]
    assert set(dropped) == names(keys), "of what nobody held too"


def test_a_page_that_still_has_a_copy_is_not_dropped(build: Build) -> None:
    rig = build(hot=4, host=8)
    log = Log(rig)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    resumed(rig, sequence)
    sequence.cache.suspend()
    push_out(rig, 4)  # the hot copies go, those on the host were clean
    assert moves(rig, "hot-host") == 4
    assert not log.dropped


def test_a_blob_that_does_not_verify_is_dropped(build: Build) -> None:
    rig = build(hot=4, disk=8)
    log = Log(rig)
    sequence = suspended(rig, prompt(4))
    keys = list(sequence.cache.block_keys)
    push_out(rig, 4)
    rig.flip_on_disk(sequence.cache)
    assert sequence.resume()
    sequence.cache.synchronize()
    assert {event.cause for event in log.dropped} == {BAD_DISK}
    assert {page for event in log.dropped for page in event.pages} == names(keys)


# Planned drops


def test_a_planned_drop_happens_when_the_last_holder_goes(build: Build) -> None:
    rig = build(hot=8, host=8)
    log = Log(rig)
    tokens = prompt(4)
    sequence = suspended(rig, tokens)
    keys = list(sequence.cache.block_keys)
    other = rig.create(tokens)
    sequence.cache.plan_drop(2)
    rig.close(sequence)
    assert totals(rig, "planned_drops") == 0
    assert rig.create(tokens).cache.num_committed_tokens == 8, "another holds them"
    rig.close(rig.sequences[-1])
    rig.close(other)
    assert totals(rig, "planned_drops") == 2
    assert totals(rig, "dropped_pages") == 0
    assert rig.create(tokens).cache.num_committed_tokens == 4
    assert rig.used == [2, 0]
    assert {e.cause for e in log.dropped} == {PLANNED}
    assert {page for e in log.dropped for page in e.pages} == {
        page for page in names(keys) if page.block_ordinal >= 2
    }


def test_a_planned_drop_of_cold_pages_frees_every_level(build: Build) -> None:
    rig = build(hot=6, host=4, disk=20)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 6)
    rig.poll()
    sequence.cache.plan_drop()
    assert sum(rig.used) == 6
    rig.close(sequence)
    assert rig.used == [0, 0, 0]
    assert totals(rig, "planned_drops") == 4
    assert rig.manager.stats().num_committed_blocks == 0


def test_what_is_not_committed_has_no_drop_to_plan(build: Build) -> None:
    rig = build(hot=8)
    tokens = prompt(3)
    sequence = filled(rig, tokens, num_committed=2)
    sequence.cache.plan_drop()
    sequence.cache.commit(tokens[2:])
    rig.close(sequence)
    assert totals(rig, "planned_drops") == 1
    assert rig.used == [2], "the later blocks were committed after that"


# No cost


def test_nothing_is_translated_while_nobody_listens(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = ObserverHub._names
    monkeypatch.setattr(ObserverHub, "_names", lambda *args: calls.append(1) or real(*args))  # type: ignore[func-returns-value]
    monkeypatch.setattr("coldpage.manager.observers.BlockStored", lambda *args: calls.append(1))

    def scene(rig: Rig) -> None:
        suspended(rig, prompt(4))
        push_out(rig, 4)
        push_out(rig, 4)

    scene(build(hot=4, host=2))
    assert not calls
    watched = build(hot=4, host=2)
    Log(watched)
    scene(watched)
    assert len(calls) > 4


# Numbers by level


def test_peaks_are_in_each_levels_own_grouping(build: Build) -> None:
    # One hot pool group for both classes of pages; cold pages of sinks are larger.
    def keeps_sinks() -> CoarseCodec:
        return CoarseCodec(keeps_sinks=True)

    rig = build(hot=8, host=8, codec=keeps_sinks, separate_sink_pages=True)
    assert len(rig.manager.take_peak_stats(HOT)) == 1
    host = rig.manager.take_peak_stats(HOST)
    assert [group.life_cycles for group in host] == [(0,), (1,)]
    assert host[0].slot_bytes == 2 * host[1].slot_bytes
    sequence = suspended(rig, prompt(4), num_committed=0)
    push_out(rig, 8)
    (hot,) = rig.manager.take_peak_stats(HOT)
    assert (hot.peak_used_slots, hot.used_slots) == (8, 0)
    sink, body = rig.manager.take_peak_stats(HOST)
    assert (sink.peak_used_slots, body.peak_used_slots) == (1, 3)
    rig.close(sequence)
    sink, body = rig.manager.take_peak_stats(HOST)
    assert (sink.peak_used_slots, sink.used_slots) == (1, 0), "since the last call"
    assert (body.peak_used_slots, body.used_slots) == (3, 0)
    assert [g.peak_used_slots for g in rig.manager.take_peak_stats(HOST)] == [0, 0]
    (hot,) = rig.manager.take_peak_stats(HOT)
    assert hot.peak_used_slots == 0


def test_two_hot_groups_that_share_a_cold_one(build: Build) -> None:
    # Hot pages of 32 + 16 bytes in two pools and of 24 + 24 in one: cold pages of 48 both.
    layers = tuple(
        AttentionLayerConfig(
            LayerId(layer),
            (
                BufferConfig(BufferRole("key"), sizes[0]),
                BufferConfig(BufferRole("value"), sizes[1]),
            ),
            window,
        )
        for layer, (sizes, window) in enumerate([((32, 16), None), ((24, 24), 5)])
    )
    rig = build(hot=8, host=8, kind=layers)
    hot, host = (level.pool_groups for level in rig.manager.stats().levels)
    assert [group.life_cycles for group in hot] == [(0,), (1,)]
    assert [group.life_cycles for group in host] == [(0, 1)]
    assert [group.total_slots for group in hot] == [8, 8]
    assert [group.total_slots for group in host] == [16]
    sequence = suspended(rig, prompt(6), num_committed=0)  # the window leaves two blocks
    for level in (HOT, HOST):
        rig.manager.take_peak_stats(level)
    push_out(rig, 8)
    assert [g.peak_used_slots for g in rig.manager.take_peak_stats(HOT)] == [8, 8]
    assert [g.peak_used_slots for g in rig.manager.take_peak_stats(HOST)] == [8]
    resumed(rig, sequence)


def test_the_end_of_the_escalation_is_reached_and_counted_where_it_happens(build: Build) -> None:
    for levels in ({}, {"host": 4}, {"disk": 4}, {"host": 4, "disk": 4}):
        rig = build(hot=4, **levels)
        num_slots = sum(level.total_slots for level in rig.manager.stats().levels)
        sequences = [suspended(rig, prompt(4, first)) for first in range(6)]
        push_out(rig, 4)
        rig.poll()
        stats = rig.manager.stats()
        lost = totals(rig, "lost_held_pages")
        # All of the last level's slots and those above it are full of pages that sequences hold.
        assert lost >= 24 - num_slots
        assert sum(level.dropped_pages for level in stats.levels) == lost
        assert stats.levels[-1].dropped_pages > 0
        if len(levels) == 2:
            assert stats.levels[HOT].dropped_pages == 0
        for level in stats.levels:
            assert level.dropped_pages == sum(g.dropped_pages for g in level.pool_groups)
        missing = sum(len(sequence.cache.missing_blocks()) for sequence in sequences)
        assert missing == lost
        assert totals(rig, "dropped_pages") == 0
