"""Codecs that raise what no device does: the copy is void or unreadable, and serving goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest

from coldpage import (
    DeviceError,
    DeviceTierConfig,
    HostTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    create_default_cold_page_codec,
)
from coldpage.codecs import configure_taken
from coldpage.device.base import Device
from coldpage.device.host import HostDevice
from coldpage.device.simulated import SimulatedDevice
from coldpage.manager import PagesDropped
from coldpage.migration import codec_calls
from coldpage.storage.copies import BAD_DISK, FAILED_DECODE, FAILED_ENCODE
from coldpage.storage.escalation import MAX_WAIT_S
from coldpage.testing.example_codecs import DeviceIndexCodec, PaddingCodec, PositionCodec
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import CacheLevel
from tests.property.setups import layers_of
from tests.sim.rig import MakeCodec, Rig
from tests.sim.scenes import (
    PER_BLOCK,
    Build,
    moves,
    prompt,
    push_out,
    resumed,
    suspended,
    totals,
)

HOT_BIT, HOST_BIT, DISK_BIT = 1, 2, 4
ALWAYS = 1 << 30
ERROR = ValueError("a bug in the codec")
COLD = [{"host": 20}, {"gpu": 20}, {"disk": 20}]
CODECS = [create_default_cold_page_codec, PaddingCodec, DeviceIndexCodec, PositionCodec]


class _Drops:
    """How many pages were dropped, by cause."""

    def __init__(self, rig: Rig) -> None:
        self.causes: dict[str, int] = {}
        rig.manager.add_observer(self)

    def on_stored(self, event: object) -> None:
        pass

    def on_moved(self, event: object) -> None:
        pass

    def on_dropped(self, event: PagesDropped) -> None:
        self.causes[event.cause] = self.causes.get(event.cause, 0) + len(event.pages)


def failures(rig: Rig) -> dict[tuple[str, str], int]:
    return {key: count for key, count in rig.manager.stats().codec_failures.items() if count}


def recomputed(rig: Rig, sequence: PatternSequence) -> list[int]:
    """Resume the sequence, write what is missing, and read everything."""
    resumed(rig, sequence)
    ordinals = sequence.recompute()
    sequence.check()
    rig.check()
    return [int(ordinal) for ordinal in ordinals]


# Decoding


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cold", COLD)
def test_a_failed_decode_is_a_miss(
    build: Build, cold: dict[str, int], codec: MakeCodec, caplog: pytest.LogCaptureFixture
) -> None:
    rig = build(hot=4, codec=codec, **cold)
    drops, recorder = _Drops(rig), rig.codecs["manager"]
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    recorder.reject("decode", ALWAYS, error=ERROR)
    assert recomputed(rig, sequence) == [0, 1, 2, 3]
    assert recorder.sizes("failed decode") == [4], "nobody asks again"
    assert failures(rig) == {(recorder.codec_id, "decode"): 1}
    assert totals(rig, "lost_held_pages") == drops.causes[FAILED_DECODE] == 4
    assert totals(rig, "read_misses") == totals(rig, "rejected_submissions") == 0
    assert rig.used == [4, 0]
    assert rig.manager.stats().levels[1].quarantined_slots == 0
    sequence.cache.suspend()
    push_out(rig, 4)
    assert recomputed(rig, sequence) == [0, 1, 2, 3]
    (line,) = [record for record in caplog.records if "failed in decode" in record.message]
    (tier,) = cold
    assert f"codec {recorder.codec_id} v" in line.message
    assert "(package tests)" in line.message, "of the recording codec"
    assert f"body pages of the {tier} tier" in line.message
    assert "a bug in the codec" in line.message
    assert "\n" not in line.message
    assert line.exc_info is not None


@pytest.mark.parametrize("disk_codec", [None, PaddingCodec])
def test_a_colder_copy_is_read_instead(build: Build, disk_codec: MakeCodec | None) -> None:
    rig = build(hot=4, host=4, disk=20, codec=PositionCodec, disk_codec=disk_codec)
    sequence = suspended(rig, prompt(4))
    for _ in range(3):
        rig.poll()
        push_out(rig, 4)
    levels = rig.levels_of(sequence)
    num_both = levels.count(HOST_BIT | DISK_BIT)
    assert num_both >= 2
    rig.codecs["manager"].reject("decode", 1, error=ERROR)
    lost = recomputed(rig, sequence)
    assert lost == [i for i, level in enumerate(levels) if level == HOST_BIT]
    assert moves(rig, "disk-hot") == num_both
    assert totals(rig, "lost_held_pages") == len(lost)


def test_one_of_two_batches_fails(build: Build) -> None:
    rig = build(hot=6, host=12, kind="mixed-sizes")
    sequence = suspended(rig, prompt(3))
    push_out(rig, 6)
    rig.codecs["manager"].reject("decode", 1, after=1, error=ERROR)
    resumed(rig, sequence)
    groups = [sequence.cache.missing_blocks(group) for group in rig.engine.layer_groups]
    assert sorted(map(bool, groups)) == [False, True]
    sequence.recompute()
    sequence.check()


@pytest.mark.parametrize("is_bad_disk", [False, True])
def test_a_copy_on_its_way_to_disk_is_waited_for(build: Build, is_bad_disk: bool) -> None:
    rig = build(hot=4, host=4, disk=20)
    drops = _Drops(rig)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    rig.device.faults.is_io_held = True
    rig.manager.poll()
    on_its_way = rig.table.reserved[rig.pages(sequence)] != 0
    assert on_its_way.any()
    rig.codecs["manager"].reject("decode", 1, error=ERROR)
    assert sequence.resume()
    rig.check()
    assert not sequence.cache.is_ready()
    rig.device.faults.is_io_held = False
    rig.device.faults.io_failure_rate = float(is_bad_disk)
    while rig.storage.num_in_flight:
        rig.storage._drain()
        rig.device.faults.io_failure_rate = 0.0 if moves(rig, "host-disk") else float(is_bad_disk)
    rig.device.faults.io_failure_rate = 0.0
    sequence.cache.synchronize()
    rig.check()
    num_lost = 4 if is_bad_disk else 4 - on_its_way.sum()
    assert len(sequence.recompute()) == num_lost
    assert sum(drops.causes.values()) == num_lost
    if is_bad_disk:
        assert drops.causes[BAD_DISK] == on_its_way.sum()
    sequence.check()


def test_a_prefetch_that_fails_keeps_no_slot(build: Build) -> None:
    rig = build(hot=8, host=20)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 8)
    rig.codecs["manager"].reject("decode", 1, error=ERROR)
    sequence.cache.prefetch()
    rig.check()
    assert rig.used == [0, 0]
    assert recomputed(rig, sequence) == [0, 1, 2, 3]


def test_pages_that_nobody_holds_are_forgotten(build: Build) -> None:
    """A sequence is closed while its pages come up from disk."""
    rig = build(hot=8, disk=20)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 8)
    rig.device.faults.is_io_held = True
    sequence.cache.prefetch()
    rig.close(sequence)
    rig.codecs["manager"].reject("decode", 1, error=ERROR)
    rig.device.faults.is_io_held = False
    rig.poll()
    rig.check()
    assert totals(rig, "dropped_pages") == 4
    assert rig.used == [0, 0]
    assert rig.create(prompt(4)).cache.num_committed_tokens == 0


@pytest.mark.parametrize(("codec", "what"), [("disk", "decode"), ("host", "encode")])
def test_a_transcoded_prefetch_that_fails(build: Build, codec: str, what: str) -> None:
    rig = build(hot=4, host=8, disk=40, host_codec=PositionCodec, disk_codec=PaddingCodec)
    sequence = suspended(rig, prompt(4))
    rig.manager.flush(10.0)
    assert rig.levels_of(sequence) == [HOT_BIT | DISK_BIT] * 4
    push_out(rig, 4)
    assert rig.levels_of(sequence) == [DISK_BIT] * 4
    rig.codecs[codec].reject(what, ALWAYS, error=ERROR)
    for _ in range(3):
        sequence.cache.prefetch(CacheLevel(1))
        rig.manager.finish_transfers()
        rig.check()
    assert rig.codecs[codec].sizes(f"failed {what}") == [4]
    rig.codecs[codec].rejections.clear()
    lost = recomputed(rig, sequence)
    assert lost == ([0, 1, 2, 3] if what == "decode" else [])


# Encoding


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cold", COLD)
def test_what_can_not_be_encoded_is_dropped_for_room(
    build: Build, cold: dict[str, int], codec: MakeCodec, caplog: pytest.LogCaptureFixture
) -> None:
    rig = build(hot=4, codec=codec, **cold)
    drops, recorder = _Drops(rig), rig.codecs["manager"]
    recorder.reject("encode", ALWAYS, error=ERROR)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 3)
    assert totals(rig, "lost_held_pages") == drops.causes[FAILED_ENCODE] == 3
    assert recorder.sizes("failed encode") == [3]
    rig.close(sequence)
    push_out(rig, 4)
    assert totals(rig, "dropped_pages") == 1, "three were forgotten when it was closed"
    assert failures(rig) == {(recorder.codec_id, "encode"): 2}
    assert rig.used == [0, 0]
    (line,) = [record for record in caplog.records if "failed in encode" in record.message]
    (tier,) = cold
    assert f"body pages of the {tier} tier" in line.message
    recorder.rejections.clear()
    other = suspended(rig, prompt(4, 2))
    push_out(rig, 4)
    assert recomputed(rig, other) == []


def test_another_codec_takes_them(build: Build) -> None:
    rig = build(hot=4, host=4, disk=20, host_codec=PositionCodec, disk_codec=PaddingCodec)
    rig.codecs["host"].reject("encode", ALWAYS, error=ERROR)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    assert moves(rig, "hot-disk") == 4
    assert totals(rig, "lost_held_pages") == 0
    rig.codecs["host"].rejections.clear()
    assert recomputed(rig, sequence) == []


def test_nobody_waits_for_room_that_would_not_help(build: Build) -> None:
    rig = build(hot=4, host=4, disk=20)
    first = suspended(rig, prompt(4, 1))
    push_out(rig, 4)
    rig.device.faults.is_io_held = True
    rig.manager.poll()  # writes are in flight, and hang
    assert rig.storage._disk_moves is not None
    assert rig.storage._disk_moves.writes.num_in_flight
    second = suspended(rig, prompt(4, 2))
    rig.codecs["manager"].reject("encode", ALWAYS, error=ERROR)
    start_s = time.monotonic()
    asker = rig.create()
    assert asker.resume()
    assert asker.cache.resize(4 * PER_BLOCK)
    assert time.monotonic() - start_s < MAX_WAIT_S / 2
    rig.close(asker)
    rig.device.faults.is_io_held = False
    assert recomputed(rig, second) == [0, 1, 2, 3]
    second.cache.suspend()
    rig.codecs["manager"].rejections.clear()
    assert recomputed(rig, first) == []


@pytest.mark.parametrize(("codec", "what"), [("host", "decode"), ("disk", "encode")])
def test_a_transcoded_spill_that_fails_is_not_tried_again(
    build: Build, codec: str, what: str
) -> None:
    rig = build(hot=4, host=4, disk=20, host_codec=PositionCodec, disk_codec=PaddingCodec)
    first = suspended(rig, prompt(4, 1))
    push_out(rig, 4)
    rig.codecs[codec].reject(what, ALWAYS, error=ERROR)
    rig.poll()
    num_pages = sum(rig.codecs[codec].sizes(f"failed {what}"))
    assert num_pages <= 4, "no page is asked about twice"
    rig.poll()
    assert sum(rig.codecs[codec].sizes(f"failed {what}")) <= 4
    assert moves(rig, "host-disk") == 0
    assert rig.used[2] == 0
    rig.codecs[codec].rejections.clear()
    assert recomputed(rig, first) == []


def test_flush_leaves_what_can_not_be_encoded(build: Build) -> None:
    rig = build(hot=8, disk=20)
    sequence = suspended(rig, prompt(4))
    rig.codecs["manager"].reject("encode", ALWAYS, error=ERROR)
    start_s = time.monotonic()
    assert rig.manager.flush(5.0) == 4
    assert time.monotonic() - start_s < 2.5
    assert rig.codecs["manager"].sizes("failed encode") == [4]
    rig.codecs["manager"].rejections.clear()
    assert recomputed(rig, sequence) == []


def test_copying_behind_and_the_watermark_ask_once(build: Build) -> None:
    rig = build(hot=4, host=20, copies_behind=True, free_watermark=0.9)
    rig.codecs["manager"].reject("encode", ALWAYS, error=ERROR)
    sequence = suspended(rig, prompt(4))
    rig.poll()
    assert rig.codecs["manager"].sizes("failed encode") == [4]
    assert recomputed(rig, sequence) == [], "nobody needed the room"
    sequence.cache.suspend()
    rig.poll()
    assert rig.codecs["manager"].sizes("failed encode") == [4]


def test_what_is_written_again_may_be_encoded_again(build: Build) -> None:
    rig = build(hot=4, host=20)
    sequence = suspended(rig, prompt(3)[:-1], num_committed=0)
    rig.codecs["manager"].reject("encode", 1, error=ERROR)
    push_out(rig, 4)
    assert recomputed(rig, sequence) == [0, 1, 2]
    sequence.cache.suspend()
    push_out(rig, 4)
    assert moves(rig, "hot-host") == 3
    assert recomputed(rig, sequence) == []


# A device that refuses, and a codec that says so for ever


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_what_is_rejected_for_long_has_failed(
    build: Build, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build(hot=4, host=20)
    recorder = rig.codecs["manager"]
    sequence = suspended(rig, prompt(4))
    if what == "decode":
        push_out(rig, 4)
    recorder.reject(what, ALWAYS)
    asker = rig.create()
    assert asker.resume()

    def is_refused() -> bool:
        if what == "encode":
            return not asker.cache.resize(4 * PER_BLOCK)
        return not sequence.resume()

    assert all(is_refused() for _ in range(20)), "not for long yet"
    monkeypatch.setattr(codec_calls, "_MAX_REJECTED_S", 0.0)
    assert not is_refused()
    assert totals(rig, "rejected_submissions") == 20
    assert failures(rig) == {(recorder.codec_id, what): 1}
    rig.close(asker)
    recorder.rejections.clear()
    if what == "encode":
        assert sequence.resume()
    sequence.cache.synchronize()
    assert len(sequence.recompute()) == 4
    sequence.check()


def test_a_call_that_passes_ends_a_row_of_rejections(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_calls, "_MAX_REJECTED_S", 0.0)
    rig = build(hot=4, host=20)
    recorder = rig.codecs["manager"]
    for _ in range(3):
        sequence = suspended(rig, prompt(4))
        push_out(rig, 4)
        for _ in range(6):
            recorder.reject("decode")
            assert not sequence.resume()
        assert recomputed(rig, sequence) == []
        rig.close(sequence)
    assert failures(rig) == {}


def test_failures_are_counted_from_zero(build: Build) -> None:
    rig = build(hot=4, host=4, disk=20, host_codec=PositionCodec, disk_codec=PaddingCodec)
    assert rig.manager.stats().codec_failures == {
        (codec, call): 0 for codec in ("position", "padding") for call in ("encode", "decode")
    }


# Work that fails


@pytest.mark.parametrize("make_device", [HostDevice, SimulatedDevice])
@pytest.mark.parametrize("call", ["encode", "decode"])
def test_work_that_fails_ends_the_manager_and_names_its_codec(
    make_device: Callable[[], Device],
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody can tell what it wrote, or what came after it: the device is of no use any more."""
    tiers = DeviceTierConfig(256), HostTierConfig(1 << 14, PaddingCodec())  # 4 hot blocks
    layers = layers_of("full", PER_BLOCK)
    config = KVCacheManagerConfig(PER_BLOCK, tiers, layers, max_util_for_resume=1.0)
    num_blocks: list[int] = []

    def fail(*arguments: object) -> None:
        raise ValueError("a bug in the work")

    def use(device: Device) -> None:
        with KVCacheManager(config, device=device) as manager:
            num_blocks.append(manager.num_hot_blocks)
            caches = [manager.create_kv_cache() for _ in range(4)]
            for cache in caches:
                assert cache.resume()
                assert cache.resize(2 * PER_BLOCK, 2 * PER_BLOCK)
                cache.suspend()
            for cache in caches:
                assert cache.resume()
                cache.synchronize()
                cache.suspend()
            manager.finish_transfers()

    monkeypatch.setattr(PaddingCodec, "to_cold" if call == "encode" else "to_hot", fail)
    device = make_device()
    says = rf"\('a bug in the work'\) in {call} of codec padding v1 .*\(package coldpage\)"
    with pytest.raises(DeviceError, match=says) as raised:
        use(device)
    assert num_blocks == [4]
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.__context__ is None, "nothing was raised on the way out"
    assert "the cache could not be closed after that" in caplog.text
    # Another stream may have come so far as to wait for that work: its failure is told here.
    with contextlib.suppress(DeviceError):
        device.close()


def test_the_package_of_a_class_made_on_the_fly(build: Build) -> None:
    made = type("Made", (PaddingCodec,), {})
    assert made.__module__ == "abc"
    rig = build(hot=4, host=4, codec=made)
    configured = configure_taken(made(), rig.manager.hot_pool_groups())
    assert configured.name_and_package.endswith("(package coldpage)")
