"""The ring for page indices in device memory: who has one, how batches are cut, and how its bytes
pass from one codec call to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import coldpage.migration.codec_calls as calls_module
from coldpage import AttentionLayerConfig, BufferConfig, create_default_cold_page_codec
from coldpage.device.base import MemoryKind
from coldpage.device.simulated import SimulatedDevice, SimulatedMemory
from coldpage.device.simulated_stream import SimulatedEvent, SimulatedStream
from coldpage.errors import DeviceError
from coldpage.migration.codec_calls import INDEX_RING_BYTES, MAX_INDEX_BATCH_BYTES
from coldpage.staging import StagingRing
from coldpage.testing.example_codecs import DeviceIndexCodec, PaddingCodec, PositionCodec
from coldpage.types import BufferRole, LayerId, LifeCycleId, PageIndexLocation
from tests.sim.rig import MakeCodec, Rig
from tests.sim.scenes import Build, filled, moves, prompt, push_out, resumed, suspended


class PartlyOnDevice(DeviceIndexCodec):
    """Wants its indices in device memory for one of its life cycles only."""

    codec_id = "partly-on-device"

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        is_first = life_cycle_id == 0
        return PageIndexLocation.DEVICE if is_first else PageIndexLocation.HOST


def position_on_device() -> PositionCodec:
    return PositionCodec(PageIndexLocation.DEVICE)


class CountingDevice(SimulatedDevice):
    """Remembers what was allocated of device memory."""

    def __init__(self) -> None:
        super().__init__(arena_bytes=1 << 26)
        self.forwarding_files.add("slots.py")
        self.sizes: list[int] = []

    def allocate(
        self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
    ) -> SimulatedMemory:
        if kind is MemoryKind.DEVICE and not is_growable:
            self.sizes.append(num_bytes)
        return super().allocate(num_bytes, kind, is_growable=is_growable)


def ring_of(rig: Rig) -> StagingRing:
    ring = rig.storage.moves._calls.index_ring
    assert ring is not None
    return ring


# Who has one


@pytest.mark.parametrize(
    ("settings", "num_rings"),
    [
        ({"host": 8}, 0),
        ({"host": 8, "codec": PaddingCodec}, 0),
        ({"host": 8, "codec": PositionCodec}, 0),
        ({"host": 8, "codec": DeviceIndexCodec}, 1),
        ({"host": 8, "disk": 8, "codec": DeviceIndexCodec}, 1),
        ({"host": 8, "disk": 8, "disk_codec": DeviceIndexCodec}, 1),
        ({"host": 8, "disk": 8, "host_codec": DeviceIndexCodec}, 1),
        (
            {
                "host": 8,
                "disk": 8,
                "host_codec": DeviceIndexCodec,
                "disk_codec": position_on_device,
            },
            1,
        ),
        ({"host": 8, "kind": "mixed-sizes", "codec": PartlyOnDevice}, 1),
        ({"codec": DeviceIndexCodec}, 0),  # no tier to encode for
    ],
)
def test_only_a_manager_whose_codecs_ask_has_a_ring(
    build: Build, settings: dict[str, object], num_rings: int
) -> None:
    device = CountingDevice()
    rig = build(hot=6, device=device, **settings)
    assert device.sizes == [INDEX_RING_BYTES] * num_rings
    suspended(rig, prompt(4))
    push_out(rig, 6)
    assert device.sizes == [INDEX_RING_BYTES] * num_rings


def test_each_life_cycle_gets_its_indices_where_it_wants_them(build: Build) -> None:
    rig = build(hot=6, host=8, kind="mixed-sizes", codec=PartlyOnDevice)
    sequence = suspended(rig, prompt(3), num_committed=0)  # a window gives up one page
    push_out(rig, 6)
    assert sorted(rig.codecs["manager"].sizes("encode")) == [2, 3]
    assert rig.codecs["manager"].locations == {(0, True), (1, False)}
    resumed(rig, sequence)


def test_two_managers_on_one_device_have_a_ring_each(build: Build) -> None:
    device = CountingDevice()
    rigs = [Rig(hot=4, host=4, codec=DeviceIndexCodec, device=device) for _ in range(2)]
    assert device.sizes == [INDEX_RING_BYTES] * 2
    for rig in rigs:
        suspended(rig, prompt(4))
        push_out(rig, 4)
    first, second = (ring_of(rig) for rig in rigs)
    assert first.base_address != second.base_address
    for rig in rigs:
        rig.close(rig.sequences[0])
        rig.manager.close()
        for stream in rig.streams[1:]:
            assert stream is not None
            stream.synchronize()
        rig.abandon()
    device.close()
    assert not device.violations


# Chunks


@pytest.mark.parametrize(("codec", "chunk"), [(DeviceIndexCodec, 8192), (position_on_device, 5461)])
def test_a_batch_is_cut_where_its_indices_reach_64_kib(
    build: Build, codec: MakeCodec, chunk: int
) -> None:
    assert MAX_INDEX_BATCH_BYTES == 64 * 1024
    num_pages = 8192 + 1000
    layers = (AttentionLayerConfig(LayerId(0), (BufferConfig(BufferRole("key"), 1),)),)
    rig = build(hot=num_pages, host=num_pages, kind=layers, per_block=1, codec=codec)
    sequence = rig.create()
    cache = sequence.cache
    assert cache.resume()
    assert cache.resize(num_pages, 0)
    cache.synchronize()
    array = rig.device.reveal(rig.manager.hot_array(LayerId(0), BufferRole("key")))
    slots = cache.page_indices(0)
    written = np.random.default_rng(1).integers(0, 256, num_pages, np.uint8)
    array[slots, 0] = written
    assert cache.resize(num_pages, num_pages)
    sequence._set_tokens(0, [0] * num_pages)
    cache.suspend()
    asker = rig.create()
    assert asker.resume()
    assert asker.cache.resize(num_pages)
    rig.close(asker)
    sizes = [chunk, num_pages - chunk]
    assert rig.codecs["manager"].sizes("encode") == sizes
    rig.manager.finish_transfers()
    array[:] = 0
    assert cache.resume()
    cache.synchronize()
    assert rig.codecs["manager"].sizes("decode") == sizes
    assert np.array_equal(array[cache.page_indices(0), 0], written)
    assert moves(rig, "hot-host") == moves(rig, "host-hot") == num_pages


def test_host_indices_are_not_cut(build: Build) -> None:
    layers = (AttentionLayerConfig(LayerId(0), (BufferConfig(BufferRole("key"), 1),)),)
    num_pages = 9000
    rig = build(hot=num_pages, host=num_pages, kind=layers, per_block=1, codec=PaddingCodec)
    cache = rig.create().cache
    assert cache.resume()
    assert cache.resize(num_pages, num_pages)
    rig.sequences[0]._set_tokens(0, [0] * num_pages)
    cache.suspend()
    asker = rig.create()
    assert asker.resume()
    assert asker.cache.resize(num_pages)
    assert rig.codecs["manager"].sizes("encode") == [num_pages]


# Pressure


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A ring of so many chunks of so many pages, for managers made from now on."""

    def shrink(num_chunks: int, num_pages: int) -> None:
        monkeypatch.setattr(calls_module, "MAX_INDEX_BATCH_BYTES", num_pages * 8)
        monkeypatch.setattr(calls_module, "INDEX_RING_BYTES", num_chunks * num_pages * 8)

    return shrink


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_bytes_are_used_again_after_events_and_the_caller_never_blocks(
    build: Build,
    small_ring: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    num_chunks: int,
) -> None:
    small_ring(num_chunks, 2)
    blocked: list[str] = []
    waits: list[int] = []
    wait = SimulatedStream.wait

    def count_wait(self: SimulatedStream, event: SimulatedEvent) -> None:
        waits.append(1)
        wait(self, event)

    for seed in range(5):
        rig = build(seed=seed, hot=16, host=32, codec=DeviceIndexCodec)
        assert ring_of(rig).num_bytes == num_chunks * 16
        sequence = suspended(rig, prompt(16))
        asker = rig.create()
        assert asker.resume()
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedStream, "synchronize", lambda self: blocked.append(self.name))
            patch.setattr(SimulatedEvent, "synchronize", lambda self: blocked.append("event"))
            patch.setattr(SimulatedStream, "wait", count_wait)
            executed = rig.device.counts.executed_ops
            assert asker.cache.resize(32)
            # Sixteen pages went through room for two to eight, while little of it has run.
            assert rig.codecs["manager"].sizes("encode") == [2] * 8
            assert rig.device.counts.executed_ops - executed < 8
        assert not blocked
        assert len(waits) >= 8 - num_chunks
        assert ring_of(rig).num_live == 0
        ring_of(rig).check_integrity()
        rig.close(asker)
        # Decoding is on another stream: what it uploads waits for what the other still reads.
        resumed(rig, sequence, rig.streams[1])
        assert rig.codecs["manager"].sizes("decode") == [2] * 8


def test_encodes_and_decodes_share_one_ring(
    build: Build, small_ring: Callable[[int, int], None]
) -> None:
    small_ring(1, 2)
    for seed in range(5):
        rig = build(seed=seed, hot=6, host=24, codec=DeviceIndexCodec)
        sequences = [suspended(rig, prompt(4, first)) for first in range(4)]
        for sequence in sequences + sequences[::-1]:
            # Room for some is made while others come back.
            assert sequence.resume(rig.streams[1 + seed % 2])
            sequence.cache.synchronize()
            sequence.check()
            sequence.cache.suspend()
        rig.check()


# The end


def test_the_ring_is_freed_with_the_manager_after_its_last_use() -> None:
    for seed in range(5):
        rig = Rig(seed=seed, hot=4, host=8, codec=DeviceIndexCodec)
        suspended(rig, prompt(4))
        asker = rig.create()
        assert asker.resume()
        assert asker.cache.resize(8)
        ring = ring_of(rig)
        assert ring.retired_events()
        rig.manager.close()
        assert ring._memory._is_freed  # type: ignore[attr-defined]
        for stream in rig.streams[1:]:
            assert stream is not None
            stream.synchronize()
        rig.device.close()
        assert not rig.device.violations
        rig.abandon()


def test_a_ring_for_which_there_is_no_memory_leaves_nothing_behind() -> None:
    class Full(CountingDevice):
        def allocate(
            self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
        ) -> SimulatedMemory:
            if num_bytes == INDEX_RING_BYTES:
                raise DeviceError("no room for the index ring")
            return super().allocate(num_bytes, kind, is_growable=is_growable)

    device = Full()
    with pytest.raises(DeviceError, match="index ring"):
        Rig(hot=4, host=8, codec=DeviceIndexCodec, device=device)
    assert not device._memories
    rig = Rig(hot=4, host=8, codec=create_default_cold_page_codec, device=device)
    filled(rig, prompt(2))
    rig.finish()
