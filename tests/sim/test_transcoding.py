"""Tiers with codecs of their own: what passes between them changes its form and keeps its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from coldpage import create_default_cold_page_codec
from coldpage.migration import NUM_SCRATCH_SLOTS
from coldpage.testing.example_codecs import (
    CoarseCodec,
    DeviceIndexCodec,
    PaddingCodec,
    PositionCodec,
)
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import HOT_LEVEL, CacheLevel, PageIndexLocation
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

HOST_BIT, DISK_BIT = 2, 4


def padding() -> PaddingCodec:
    return PaddingCodec(48)


def position_on_device() -> PositionCodec:
    return PositionCodec(PageIndexLocation.DEVICE)


concat = create_default_cold_page_codec

PAIRS = {
    "concat, padding": (concat, padding),
    "concat, device indices": (concat, DeviceIndexCodec),
    "concat, positions": (concat, PositionCodec),
    "concat, positions on the device": (concat, position_on_device),
    "positions, concat": (PositionCodec, concat),
    "device indices, padding": (DeviceIndexCodec, padding),
    "positions on the device, device indices": (position_on_device, DeviceIndexCodec),
}


@pytest.fixture(params=PAIRS.values(), ids=PAIRS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[MakeCodec, MakeCodec]:
    found: tuple[MakeCodec, MakeCodec] = request.param
    return found


def locked(rig: Rig) -> PatternSequence:
    """A sequence that holds every hot slot, and works on all of them."""
    sequence = rig.create()
    assert sequence.resume(rig.streams[1])
    hot = rig.manager.stats().levels[HOT_LEVEL]
    num_tokens = PER_BLOCK * rig.num_lockable_blocks
    assert sequence.cache.resize(num_tokens)
    sequence.cache.synchronize()
    sequence.write([9] * num_tokens)
    assert rig.used[HOT_LEVEL] == hot.total_slots == np.count_nonzero(rig.table.num_locks)
    return sequence


def still_locked(rig: Rig, lock: PatternSequence) -> None:
    """What the locked pages hold has not been touched; ends the lock."""
    assert np.count_nonzero(rig.table.num_locks) == rig.used[HOT_LEVEL]
    assert lock.cache.resize(lock.cache.capacity, lock.cache.capacity)
    lock.check()
    rig.close(lock)
    rig.check()


def sent_to_disk(rig: Rig, sequence: PatternSequence) -> None:
    """Have the spill write every page of a sequence, and others take their host slots."""
    for first in range(50, 90):
        if all(bits == DISK_BIT for bits in rig.levels_of(sequence)):
            return
        suspended(rig, prompt(4, first), num_committed=0)
        push_out(rig, 6)
        rig.poll()
        rig.close(rig.sequences[-1])
    raise AssertionError("never on disk alone")


@pytest.mark.parametrize("kind", ["full", "mixed", "mixed-sizes"])
def test_spill_and_prefetch_between_two_codecs_while_every_hot_page_is_locked(
    build: Build, pair: tuple[MakeCodec, MakeCodec], kind: str
) -> None:
    rig = build(hot=6, host=4, disk=40, kind=kind, host_codec=pair[0], disk_codec=pair[1])
    sequence = suspended(rig, prompt(4))
    push_out(rig, 6)
    assert all(bits == HOST_BIT for bits in rig.levels_of(sequence))
    lock = locked(rig)
    rig.poll()
    on_disk = moves(rig, "host-disk")
    assert on_disk >= 2
    assert totals(rig, "transcoded_pages") == on_disk
    rig.check()
    still_locked(rig, lock)
    resumed(rig, sequence)  # from the host
    sequence.cache.suspend()

    sent_to_disk(rig, sequence)
    lock = locked(rig)
    before = totals(rig, "transcoded_pages")
    sequence.cache.prefetch(CacheLevel(1))
    rig.manager.finish_transfers()
    up = moves(rig, "disk-host")
    assert up >= 1
    assert totals(rig, "transcoded_pages") == before + up
    assert any(bits == HOST_BIT | DISK_BIT for bits in rig.levels_of(sequence))
    still_locked(rig, lock)
    resumed(rig, sequence)  # some from the host, some from disk
    assert sequence.cache.missing_blocks() == []
    assert moves(rig, "host-hot") > 0


def test_pages_come_back_from_disk_through_the_disks_codec(
    build: Build, pair: tuple[MakeCodec, MakeCodec]
) -> None:
    rig = build(hot=6, host=4, disk=40, host_codec=pair[0], disk_codec=pair[1])
    sequence = suspended(rig, prompt(4))
    sent_to_disk(rig, sequence)
    from_host = moves(rig, "host-hot")
    resumed(rig, sequence)
    assert moves(rig, "disk-hot") == 4
    assert moves(rig, "host-hot") == from_host
    assert rig.codecs["disk"].sizes("decode")[-1] == 4


def test_more_pages_in_a_batch_than_scratch_slots(
    build: Build, pair: tuple[MakeCodec, MakeCodec]
) -> None:
    rig = build(hot=12, host=36, disk=60, host_codec=pair[0], disk_codec=pair[1])
    sequences = [suspended(rig, prompt(12, first)) for first in range(3)]
    push_out(rig, 12)
    lock = locked(rig)
    rig.manager.poll()
    # A quarter of the host's slots, and one more, in one transfer.
    assert totals(rig, "transcoded_pages") == 10
    assert rig.codecs["host"].sizes("decode") == [4, 4, 2]
    assert rig.codecs["disk"].sizes("encode") == [4, 4, 2]
    assert NUM_SCRATCH_SLOTS == 4
    rig.manager.finish_transfers()
    still_locked(rig, lock)
    for sequence in sequences:
        resumed(rig, sequence)
        sequence.cache.suspend()


# Rejections


@pytest.mark.parametrize(("codec", "what"), [("host", "decode"), ("disk", "encode")])
@pytest.mark.parametrize("after", [0, 1])
def test_a_rejected_spill_leaves_the_pages_and_gives_the_slots_back(
    build: Build, pair: tuple[MakeCodec, MakeCodec], codec: str, what: str, after: int
) -> None:
    rig = build(hot=12, host=24, disk=40, host_codec=pair[0], disk_codec=pair[1])
    sequences = [suspended(rig, prompt(12, first)) for first in range(2)]
    push_out(rig, 12)
    lock = locked(rig)
    before = rig.used
    rig.codecs[codec].reject(what, after=after)  # in the middle of a batch of 7, where after is 1
    rig.manager.poll()
    assert totals(rig, "rejected_submissions") == 1
    assert rig.used == before
    assert all(bits == HOST_BIT for s in sequences for bits in rig.levels_of(s))
    assert rig.storage._disk_moves is not None
    assert rig.storage._disk_moves.writes._end.ring.num_live == 0
    rig.check()
    rig.poll()
    assert moves(rig, "host-disk") == 7, "it is tried again"
    still_locked(rig, lock)
    for sequence in sequences:
        resumed(rig, sequence)
        assert sequence.cache.missing_blocks() == []
        sequence.cache.suspend()


@pytest.mark.parametrize("after", [0, 1])
def test_a_submission_that_the_device_rejects_in_the_middle(
    build: Build, pair: tuple[MakeCodec, MakeCodec], after: int
) -> None:
    rig = build(hot=6, host=4, disk=40, host_codec=pair[0], disk_codec=pair[1])
    sequence = suspended(rig, prompt(4))
    push_out(rig, 6)
    submit, count = rig.device._world.maybe_fail_submission, iter(range(1000))

    def fail_one(stream_name: str) -> None:
        if stream_name == "offload" and next(count) == after:
            rig.device.fail_next_submission("offload")
        submit(stream_name)

    rig.device._world.maybe_fail_submission = fail_one  # type: ignore[method-assign]
    before = rig.used
    rig.manager.poll()
    assert totals(rig, "rejected_submissions") == 1
    assert rig.used == before
    assert rig.levels_of(sequence) == [HOST_BIT] * 4
    rig.check()
    resumed(rig, sequence)
    sequence.cache.suspend()


@pytest.mark.parametrize(("codec", "what"), [("disk", "decode"), ("host", "encode")])
def test_a_rejected_prefetch_leaves_the_pages_on_disk(
    build: Build, pair: tuple[MakeCodec, MakeCodec], codec: str, what: str
) -> None:
    rig = build(hot=6, host=4, disk=40, host_codec=pair[0], disk_codec=pair[1])
    sequence = suspended(rig, prompt(4))
    sent_to_disk(rig, sequence)
    lock = locked(rig)
    used = rig.used[2]
    rig.codecs[codec].reject(what, 3)  # each of its attempts
    sequence.cache.prefetch(CacheLevel(1))
    rig.manager.finish_transfers()
    assert totals(rig, "rejected_submissions") == 3
    assert rig.levels_of(sequence) == [DISK_BIT] * 4
    assert rig.used[2] == used
    assert rig.manager.stats().levels[2].quarantined_slots == 0
    rig.check()
    rig.codecs[codec].reject(what, 2)
    sequence.cache.prefetch(CacheLevel(1))
    rig.manager.finish_transfers()
    assert HOST_BIT | DISK_BIT in rig.levels_of(sequence)
    still_locked(rig, lock)
    resumed(rig, sequence)
    assert sequence.cache.missing_blocks() == []


def test_a_blob_that_does_not_verify_is_not_transcoded(
    build: Build, pair: tuple[MakeCodec, MakeCodec]
) -> None:
    rig = build(hot=6, host=4, disk=40, host_codec=pair[0], disk_codec=pair[1])
    sequence = suspended(rig, prompt(4))
    sent_to_disk(rig, sequence)
    assert rig.flip_on_disk(sequence.cache) == [0, 1, 2, 3]
    used = rig.used[1]
    num_calls = len(rig.codecs["disk"].sizes("decode"))
    for _ in range(2):  # as many at a time as there is room for
        sequence.cache.prefetch(CacheLevel(1))
        rig.manager.finish_transfers()
    assert len(rig.codecs["disk"].sizes("decode")) == num_calls
    lost = totals(rig, "read_misses")
    assert 0 < lost == len(sequence.cache.missing_blocks())
    assert rig.manager.stats().levels[2].quarantined_slots == lost
    assert rig.used[1] <= used
    rig.check()


def test_of_blobs_read_together_the_good_ones_arrive(
    build: Build, pair: tuple[MakeCodec, MakeCodec]
) -> None:
    for level in (0, 1):
        rig = build(hot=6, host=4, disk=40, host_codec=pair[0], disk_codec=pair[1])
        sequence = suspended(rig, prompt(4))
        sent_to_disk(rig, sequence)
        rig.close(rig.create())
        for other in rig.sequences[1:]:
            rig.close(other)
        assert rig.flip_on_disk(sequence.cache, [0, 2]) == [0, 2]
        sequence.cache.prefetch(CacheLevel(level))
        rig.manager.finish_transfers()
        assert sequence.cache.missing_blocks() == [0, 2]
        assert rig.levels_of(sequence) == [0, 1 << level | DISK_BIT] * 2
        assert rig.used[level] == 2
        assert sequence.resume()
        sequence.cache.synchronize()
        sequence.check()
        assert sequence.recompute() == [0, 2]
        sequence.check()


@pytest.mark.parametrize("level", [0, 1])
def test_staging_passes_on_only_after_its_last_use(
    build: Build, pair: tuple[MakeCodec, MakeCodec], level: int
) -> None:
    for seed in range(8):
        rig = build(
            seed=seed,
            hot=6,
            host=4,
            disk=40,
            host_codec=pair[0],
            disk_codec=pair[1],
            ring_bytes=1,  # that is room for three pages
        )
        sequence = suspended(rig, prompt(4))
        sent_to_disk(rig, sequence)
        sequence.cache.prefetch(CacheLevel(level))
        rig.manager.finish_transfers()
        resumed(rig, sequence, rig.streams[1])
        assert sequence.cache.missing_blocks() == []
        sequence.cache.suspend()


# A codec that loses something


def test_a_lossy_disk_leaves_the_copies_of_the_host_exact(build: Build) -> None:
    rig = build(hot=6, host=4, disk=40, disk_codec=CoarseCodec)
    sequence = filled(rig, prompt(4))
    exact = rig.contents(sequence.cache)
    sequence.cache.suspend()
    push_out(rig, 6)
    rig.poll()
    assert [bits for bits in rig.levels_of(sequence) if bits & DISK_BIT]
    assert all(bits & HOST_BIT for bits in rig.levels_of(sequence))
    resumed(rig, sequence)  # and checked
    sequence.cache.suspend()
    sent_to_disk(rig, sequence)
    assert sequence.cache.resume()
    sequence.cache.synchronize()
    coarse = rig.contents(sequence.cache)
    assert sorted(coarse) == [0, 1, 2, 3]
    for block, found in coarse.items():
        assert np.array_equal(found, exact[block] & 0xF0)
        assert not np.array_equal(found, exact[block])
    # Once more through it changes nothing.
    sequence.cache.suspend()
    sent_to_disk(rig, sequence)
    sequence.cache.prefetch(CacheLevel(1))
    rig.manager.finish_transfers()
    assert sequence.cache.resume()
    sequence.cache.synchronize()
    for block, found in rig.contents(sequence.cache).items():
        assert np.array_equal(found, coarse[block])


def test_sinks_that_a_codec_keeps_whole_stay_exact(build: Build) -> None:
    rig = build(
        hot=6,
        host=2,
        disk=60,
        disk_codec=lambda: CoarseCodec(keeps_sinks=True),
        separate_sink_pages=True,
    )
    sequence = filled(rig, prompt(4))
    exact = rig.contents(sequence.cache)
    sequence.cache.suspend()
    sent_to_disk(rig, sequence)
    assert sequence.cache.resume()
    sequence.cache.synchronize()
    for block, found in rig.contents(sequence.cache).items():
        kept = exact[block] if block == 0 else exact[block] & 0xF0
        assert np.array_equal(found, kept)


# Scratch slots


def _scratch(rig: Rig) -> list[int]:
    return [group.slots.first_slot for group in rig.storage.levels[HOT_LEVEL].groups]


def test_scratch_slots_exist_only_between_two_formats(build: Build) -> None:
    alone = build(hot=6, host=4, disk=4, kind="mixed-sizes")
    same = build(hot=6, host=4, disk=4, kind="mixed-sizes", host_codec=concat, disk_codec=concat)
    one = build(hot=6, host=4, kind="mixed-sizes", host_codec=padding)
    two = build(hot=6, host=4, disk=4, kind="mixed-sizes", disk_codec=padding)
    assert [_scratch(rig) for rig in (alone, same, one)] == [[0, 0]] * 3
    assert _scratch(two) == [NUM_SCRATCH_SLOTS] * 2
    for rig in (alone, same, one, two):
        hot = rig.manager.stats().levels[HOT_LEVEL]
        assert [group.total_slots for group in hot.pool_groups] == [6, 6]
        sizes = [group.memory[0].num_slots for group in rig.storage.levels[HOT_LEVEL].groups]
        assert sizes == [6 + first for first in _scratch(rig)]
    # Two parameters of one codec are two formats.
    other = build(hot=6, host=4, disk=4, host_codec=padding, disk_codec=lambda: PaddingCodec(40))
    assert _scratch(other) == [NUM_SCRATCH_SLOTS]


def test_two_codecs_of_one_format_copy_raw(build: Build) -> None:
    rig = build(hot=6, host=4, disk=40, host_codec=padding, disk_codec=padding)
    sequence = suspended(rig, prompt(4))
    sent_to_disk(rig, sequence)
    assert moves(rig, "host-disk") > 0
    assert totals(rig, "transcoded_pages") == 0
    resumed(rig, sequence)
