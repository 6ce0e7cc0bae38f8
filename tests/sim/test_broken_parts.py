"""Codecs, streams, disks and callers that break their word: it costs them, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldpage import (
    CodecError,
    DeviceError,
    DeviceTierConfig,
    DiskTierConfig,
    HalfOpenRange,
    HostTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    OutOfPagesError,
)
from coldpage.device.base import Stream
from coldpage.storage.escalation import Escalation
from coldpage.testing.example_codecs import PaddingCodec
from coldpage.testing.page_codec import HotPages
from coldpage.types import CacheLevel, Int64Array, LifeCycleId
from tests.property.setups import layers_of
from tests.sim.scenes import (
    PER_BLOCK,
    Build,
    filled,
    hot_blocks,
    prompt,
    push_out,
    resumed,
    suspended,
    totals,
)


class _Renames(PaddingCodec):
    """Says only when it knows the pools what its format is."""

    def configure(self, pool_groups: object) -> None:  # type: ignore[override]
        super().configure(pool_groups)  # type: ignore[arg-type]
        self.parameters = "pools seen"


def test_a_format_that_changes_in_configure_is_refused(tmp_path: Path) -> None:
    """Scratch slots, keys and files would have been made for another one."""
    tiers = (
        DeviceTierConfig(1 << 16),
        HostTierConfig(1 << 16, _Renames()),
        DiskTierConfig(str(tmp_path), 1 << 20, PaddingCodec()),
    )
    layers = layers_of("full", PER_BLOCK)
    config = KVCacheManagerConfig(PER_BLOCK, tiers, layers, model_fingerprint=b"model")
    with pytest.raises(CodecError, match="changed its format in configure"):
        KVCacheManager(config)


def test_io_that_fails_costs_a_defragmentation_nothing_but_time(build: Build) -> None:
    rig = build(hot=8, disk=20)
    sequences = [suspended(rig, prompt(4, first)) for first in range(3)]
    push_out(rig, 8)
    rig.close(sequences.pop(0))
    rig.manager.finish_transfers()
    rig.device.faults.io_failure_rate = 1.0
    assert rig.manager.defragment(CacheLevel(1)) == 0
    rig.device.faults.io_failure_rate = 0.0
    assert totals(rig, "lost_held_pages") == 0
    rig.check()
    for sequence in sequences:
        resumed(rig, sequence)
        assert sequence.cache.missing_blocks() == []
        sequence.cache.suspend()


def test_what_is_computed_over_missing_blocks_is_not_shared(build: Build) -> None:
    rig = build(hot=8, disk=20)
    tokens = prompt(4, 1)
    sequence = suspended(rig, tokens[: 2 * PER_BLOCK])
    push_out(rig, 8)
    assert rig.flip_on_disk(sequence.cache, [0]) == [0]
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.cache.missing_blocks() == [0]
    # An engine that does not recompute first: what it writes is of no use to others.
    assert sequence.cache.resize(4 * PER_BLOCK)
    sequence.cache.synchronize()
    sequence.write(tokens[2 * PER_BLOCK :])
    sequence.cache.commit(tokens[2 * PER_BLOCK :])
    sequence.recompute()
    assert sequence.cache.missing_blocks() == []
    assert rig.create(tokens).cache.num_committed_tokens == 2 * PER_BLOCK
    assert len(sequence.cache.block_keys) == 2


def _poison(stream: Stream) -> None:
    def fail() -> None:
        raise RuntimeError("a kernel failed")

    stream.launch(fail, reads=(), writes=())


@pytest.mark.parametrize("how", ["suspend", "close", "truncate", "drop_blocks"])
def test_a_failed_stream_costs_its_own_pages_and_no_slot(build: Build, how: str) -> None:
    rig = build(hot=8, host=8)
    kept = suspended(rig, prompt(2, 1))
    push_out(rig, 8)
    stream = rig.device.create_stream("fails")
    torn = filled(rig, prompt(2, 2), stream=stream)
    both = rig.adopt(kept.fork())
    assert both.resume(stream)
    both.cache.synchronize()
    _poison(stream)
    rig.device.step(1000)
    for sequence in (torn, both):
        if how == "truncate":
            sequence.cache.truncate(PER_BLOCK)
            sequence.forget_from(PER_BLOCK)
        elif how == "drop_blocks":
            sequence.cache.drop_blocks(HalfOpenRange(0, PER_BLOCK))
        if how == "close":
            rig.close(sequence)
        else:
            sequence.cache.suspend()
    rig.check()
    assert totals(rig, "torn_pages") == 2
    if how == "suspend":
        assert torn.cache.missing_blocks() == [0, 1]
    # What had another copy has only been read: it is whole.
    resumed(rig, kept)
    assert kept.cache.missing_blocks() == []
    kept.cache.suspend()
    assert rig.num_lockable_blocks == 8
    push_out(rig, 8)
    for sequence in list(rig.sequences):
        rig.close(sequence)
    with pytest.raises(DeviceError, match="a kernel failed"):
        stream.synchronize()
    rig.device._streams.remove(stream)  # else its last work counts as never waited for


def test_polling_never_waits(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the watermark wants pages gone and the disk hangs."""
    rig = build(hot=8, disk=20, free_watermark=0.9, ring_bytes=1)
    sequences = [suspended(rig, prompt(2, first)) for first in range(4)]
    rig.device.faults.is_io_held = True

    def wait(self: Escalation) -> None:
        raise AssertionError("a poll waited")

    with monkeypatch.context() as patch:
        patch.setattr(rig.storage._escalation, "_drain", wait)
        patch.setattr(rig.device, "wait_for_progress", wait)
        for _ in range(10):
            rig.manager.poll()
            rig.device.step(100)
    rig.device.faults.is_io_held = False
    rig.poll()
    assert rig.used[0] < 8
    for sequence in sequences:
        resumed(rig, sequence)
        sequence.cache.suspend()


def test_a_prefetch_leaves_what_the_watermark_keeps(build: Build) -> None:
    rig = build(hot=8, host=20, free_watermark=0.5)
    first = suspended(rig, prompt(6, 1))
    push_out(rig, 8)
    second = suspended(rig, prompt(2, 2))
    rig.poll()
    first.cache.prefetch()
    rig.poll()
    assert rig.used[0] == 4
    assert hot_blocks(second) == [0, 1], "nobody was evicted for a prefetch"
    assert len(hot_blocks(first)) == 2


def test_waiting_for_what_can_not_be_ends(build: Build) -> None:
    """Blocks that a window wants back have no place, and nothing will make one."""
    rig = build(hot=12, host=40, kind="window")
    first = filled(rig, prompt(8, 1), num_committed=0)
    hungry = filled(rig, [7])

    def fill() -> None:
        while hungry.cache.resize(hungry.cache.capacity + PER_BLOCK):
            pass

    fill()
    first.truncate(4 * PER_BLOCK)
    fill()
    for _ in range(10):
        assert not first.cache.is_ready()
        rig.manager.wait_for_progress(0.0)
    with pytest.raises(OutOfPagesError, match="suspend one of them"):
        first.cache.synchronize()
    hungry.cache.suspend()
    first.cache.synchronize()


class _Alone(PaddingCodec):
    """Every life cycle is a batching class of its own, as it is unless a codec says otherwise."""

    codec_id = "alone"

    def representative(self, hot: HotPages) -> LifeCycleId:
        return hot.life_cycle.life_cycle_id


def test_raw_copies_ask_no_codec_which_pages_go_together(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One submission a pool group, whatever the codec says of its own calls."""
    sizes: list[int] = []

    rig = build(hot=4, host=4, host2=40, kind="many", codec=_Alone)
    sequence = suspended(rig, prompt(4, 1))
    push_out(rig, 4)
    num_encodes = len(rig.codecs["manager"].sizes("encode"))
    assert num_encodes == len(rig.layout.layer_groups), "calls of the codec are by life cycle"
    stream = rig.storage.moves.offload_stream
    copy = stream.copy

    def count(dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        sizes.append(int(dst.size))
        copy(dst, src, num_bytes)

    monkeypatch.setattr(stream, "copy", count)
    rig.manager.poll()
    assert len(sizes) == 1
    assert sizes[0] > 1
    resumed(rig, sequence)


class _FailingObserver:
    def on_stored(self, event: object) -> None:
        raise ValueError("an observer's bug")

    on_moved = on_dropped = on_stored


def test_an_observer_that_fails_is_logged_and_changes_nothing(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    rig = build(hot=4, host=2)
    rig.manager.add_observer(_FailingObserver())
    sequences = [suspended(rig, prompt(4, first)) for first in range(3)]
    rig.check()
    assert totals(rig, "lost_held_pages") > 0
    (record,) = [r for r in caplog.records if "an observer of the cache failed" in r.message]
    assert record.exc_info is not None
    num_failures = totals(rig, "observer_failures")
    assert num_failures > 1
    rig.manager.add_observer(_FailingObserver())
    suspended(rig, prompt(4, 9))
    records = [r for r in caplog.records if "an observer of the cache failed" in r.message]
    assert len(records) == 2, "another observer has an error of its own"
    assert totals(rig, "observer_failures") >= num_failures + 2
    for sequence in sequences:
        assert sequence.resume()
        sequence.cache.synchronize()
        sequence.recompute()
        sequence.check()
        sequence.cache.suspend()
