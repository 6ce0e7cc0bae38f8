"""Rules that are a line each in the code, and that nothing else would notice broken at once."""

from __future__ import annotations

import pytest

import coldpage.storage.escalation
from coldpage.testing.example_codecs import DeviceIndexCodec, PaddingCodec
from coldpage.testing.page_codec import Bytes, HotPages, PageCodec
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import CacheLevel, Int64Array, LifeCycleId, PageClass
from tests.sim.rig import MakeCodec, Rig
from tests.sim.scenes import (
    PER_BLOCK,
    Build,
    filled,
    moves,
    prompt,
    push_out,
    resumed,
    suspended,
    totals,
)

HOT, HOST = CacheLevel(0), CacheLevel(1)


# Lost pages


def lost(rig: Rig) -> PatternSequence:
    sequence = suspended(rig, prompt(3))
    push_out(rig, rig.num_lockable_blocks)
    assert sequence.cache.missing_blocks() == [0, 1, 2]
    return sequence


def test_lost_pages_are_not_fetched(build: Build) -> None:
    rig = build(hot=4)
    sequence = lost(rig)
    sequence.cache.prefetch(HOT)
    assert rig.used == [0]


def test_blank_pages_that_were_not_recomputed_take_no_slots(build: Build) -> None:
    rig = build(hot=4, host=2)
    first = suspended(rig, prompt(3, 1), num_committed=0)
    second = suspended(rig, prompt(4, 2), num_committed=0)
    missing = len(first.cache.missing_blocks())
    assert missing
    resumed(rig, first)
    used = rig.used[0]
    first.cache.suspend()
    assert rig.used[0] == used - missing
    assert len(first.cache.missing_blocks()) == missing
    rig.close(second)


def test_a_lost_block_is_forgotten_when_its_last_holder_goes(build: Build) -> None:
    rig = build(hot=4)
    sequence = lost(rig)
    assert rig.manager.stats().num_committed_blocks == 3
    rig.close(sequence)
    assert rig.manager.stats().num_committed_blocks == 0
    assert rig.manager.stats().num_pages == 0
    filled(rig, prompt(3))
    assert rig.create(prompt(3)).cache.num_committed_tokens == 6


# Writing


@pytest.mark.parametrize("is_active", [True, False])
def test_a_committed_block_that_was_cut_is_copied_before_it_is_written(
    build: Build, is_active: bool
) -> None:
    rig = build(hot=8, host=8)
    tokens = prompt(3)
    sequence = filled(rig, tokens, stream=rig.streams[1])
    if not is_active:
        sequence.cache.suspend()
    sequence.truncate(5)
    if not is_active:
        resumed(rig, sequence, rig.streams[1])
    assert sequence.step([77])
    assert totals(rig, "copied_on_write_pages") == 1
    sequence.check()
    other = rig.create(tokens)
    assert other.cache.num_committed_tokens == 6
    resumed(rig, other, rig.streams[2])


def test_what_is_written_to_has_no_older_copy_anywhere(build: Build) -> None:
    rig = build(hot=6, host=4, disk=20)
    sequence = suspended(rig, prompt(4), num_committed=0)
    push_out(rig, 6)
    rig.poll()
    on_disk = [block for block, bits in enumerate(rig.levels_of(sequence)) if bits & 4]
    assert on_disk
    resumed(rig, sequence)
    assert sequence.cache.resize(8, 0)
    sequence.forget_from(0)
    assert rig.levels_of(sequence) == [1] * 4
    assert rig.used == [4, 0, 0]
    sequence.cache.synchronize()
    sequence.write(prompt(4, 5))
    assert sequence.cache.resize(8, 8)
    sequence.cache.suspend()
    push_out(rig, 6)
    resumed(rig, sequence)
    assert sequence.cache.missing_blocks() == []


def test_a_fork_has_no_part_in_room_that_is_not_written(build: Build) -> None:
    rig = build(hot=8)
    sequence = filled(rig, prompt(2), num_committed=0)
    assert sequence.cache.resize(7 * PER_BLOCK)
    fork = rig.adopt(sequence.fork())
    assert fork.cache.num_blocks == 2
    rig.close(sequence)
    assert rig.used == [2]


def test_a_rejected_copy_before_writing_changes_nothing(build: Build) -> None:
    rig = build(hot=8, host=8)
    sequence = filled(rig, prompt(3)[:5])
    fork = rig.adopt(sequence.fork())
    assert fork.cache.resume()
    fork.cache.synchronize()
    before = rig.used, fork.cache.page_indices(0).tolist()
    for _ in range(20):
        rig.device.fail_next_submission("onboard")
        assert not fork.cache.resize(6)
        assert (rig.used, fork.cache.page_indices(0).tolist()) == before
        rig.check()
    assert fork.step([5])
    assert sequence.step([6])
    fork.check()
    sequence.check()


# What the spill may cost


def test_the_spill_never_costs_a_page_that_a_sequence_holds(build: Build) -> None:
    rig = build(hot=4, host=4, disk=4)
    first = suspended(rig, prompt(4, 1))
    push_out(rig, 4)
    rig.poll()
    second = suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    assert rig.used == [0, 4, 4]
    rig.poll()
    assert totals(rig, "lost_held_pages") == 0
    for sequence in (first, second):
        assert sequence.cache.missing_blocks() == []
        resumed(rig, sequence)
        sequence.cache.suspend()


@pytest.mark.parametrize("codec", [None, PaddingCodec])
def test_what_is_being_written_is_not_dropped_meanwhile(
    build: Build, monkeypatch: pytest.MonkeyPatch, codec: MakeCodec | None
) -> None:
    monkeypatch.setattr(coldpage.storage.escalation, "MAX_WAIT_S", 0.0)
    rig = build(hot=4, host=4, disk=2, disk_codec=codec)
    rig.close(suspended(rig, prompt(4, 1)))  # nobody's
    push_out(rig, 4)
    rig.device.faults.is_io_held = True
    rig.manager.poll()
    assert rig.used == [0, 4, 2], "two are being written"
    held = suspended(rig, prompt(4, 2))
    asker = rig.create()
    assert asker.resume()
    assert not asker.cache.resize(4 * PER_BLOCK)
    assert totals(rig, "dropped_pages") == 2
    rig.device.faults.is_io_held = False
    rig.manager.finish_transfers()
    assert moves(rig, "host-disk") == 2
    assert asker.cache.resize(4 * PER_BLOCK)
    assert held.cache.missing_blocks() == []


# Between two cold levels in memory


@pytest.mark.parametrize("codec", [None, PaddingCodec, DeviceIndexCodec])
def test_a_rejected_spill_between_levels_in_memory(build: Build, codec: MakeCodec | None) -> None:
    rig = build(hot=4, host=4, host2=8, host2_codec=codec)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    before = rig.used
    rig.device.fail_next_submission("offload")
    rig.manager.poll()
    assert totals(rig, "rejected_submissions") == 1
    assert rig.used == before
    rig.check()
    rig.poll()
    assert moves(rig, "host-host2") == 2
    assert totals(rig, "transcoded_pages") == (2 if codec else 0)
    suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    rig.poll()
    resumed(rig, sequence)
    assert sequence.cache.missing_blocks() == []
    assert rig.used[2] > 2


class XorSinks(PageCodec):
    """Changes the pages of sinks, and keeps their size: they share a pool group with the others."""

    codec_id = "xor-sinks"
    is_lossless = True

    def representative(self, hot: HotPages) -> LifeCycleId:
        return hot.alike

    def cold_bytes(self, hot: HotPages) -> int:
        return hot.page_bytes

    def to_cold(self, hot: HotPages, pages: Bytes, ordinals: Int64Array | None) -> Bytes:
        return pages ^ 0x55 if hot.life_cycle.page_class is PageClass.SINK else pages

    def to_hot(self, hot: HotPages, blobs: Bytes, ordinals: Int64Array | None) -> Bytes:
        return self.to_cold(hot, blobs, ordinals)


@pytest.mark.parametrize("below", ["disk", "host2"])
@pytest.mark.parametrize("splits", ["host", "below"])
def test_a_batch_between_two_codecs_is_one_that_both_take(
    build: Build, below: str, splits: str
) -> None:
    above, under = (XorSinks, PaddingCodec) if splits == "host" else (PaddingCodec, XorSinks)
    rig = build(
        hot=6,
        host=4,
        separate_sink_pages=True,
        host_codec=above,
        **{below: 40, f"{below}_codec": under},
    )
    first, second = (suspended(rig, prompt(2, n), num_committed=0) for n in range(2))
    push_out(rig, 6)
    assert rig.used[:2] == [0, 4]
    rig.resize(1, 1)  # two slots: the sink and the other block of the first go down together
    assert totals(rig, "transcoded_pages") == moves(rig, f"host-{below}") == 2
    rig.resize(1, 4)
    first.cache.prefetch(HOST)  # and up together
    rig.manager.finish_transfers()
    assert totals(rig, "transcoded_pages") == 4
    assert moves(rig, f"{below}-host") == 2
    for sequence in (first, second):
        resumed(rig, sequence, rig.streams[1])
        assert sequence.cache.missing_blocks() == []
        sequence.cache.suspend()
    assert moves(rig, "host-hot") == 4
