"""What a manager tells a codec, and how it refuses one that breaks its contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpage.codecs import ColdPageCodec, PoolGroupDesc, create_default_cold_page_codec
from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManagerConfig,
)
from coldpage.device.host import HostDevice
from coldpage.errors import CodecConsumedError, CodecError, ConfigurationError, UsageError
from coldpage.manager import KVCacheManager
from coldpage.manager.levels import LevelBuilder
from coldpage.types import BufferRole, LayerId, LifeCycleId, PageIndexLocation

_KEY, _VALUE = BufferRole("key"), BufferRole("value")


def _layer(layer_id: int, key: int, value: int, window: int | None) -> AttentionLayerConfig:
    buffers = (BufferConfig(_KEY, key), BufferConfig(_VALUE, value))
    return AttentionLayerConfig(LayerId(layer_id), buffers, window)


# Life cycles 0 and 1 share a hot pool group; 2 has another, of two pools.
_LAYERS = (_layer(7, 64, 64, None), _layer(8, 64, 64, 9000), _layer(9, 32, 96, 9001))


def _config(
    hot_bytes: int = 1 << 20,
    host_bytes: int | None = 1 << 20,
    disk: DiskTierConfig | None = None,
) -> KVCacheManagerConfig:
    cold: list[CacheTierConfig] = [] if host_bytes is None else [HostTierConfig(host_bytes)]
    if disk is not None:
        cold.append(disk)
    return KVCacheManagerConfig(16, (DeviceTierConfig(hot_bytes), *cold), _LAYERS)


class _Codec(ColdPageCodec):
    """The default codec, with answers of one's own, and a note of what it was asked in order."""

    codec_id = "odd"

    def __init__(self, **answers: Any) -> None:
        self._inner = create_default_cold_page_codec()
        self._answers = answers
        self.num_answers_left = 1000
        self.calls: list[str] = []
        self.described: list[PoolGroupDesc] = []

    def _answer(self, name: str, life_cycle_id: LifeCycleId, default: Any) -> Any:
        self.calls.append(name)
        if not self.num_answers_left:
            raise ZeroDivisionError("a bug in the codec")
        self.num_answers_left -= 1
        answer = self._answers.get(name, {})
        return answer[life_cycle_id] if life_cycle_id in answer else default(life_cycle_id)

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        self.calls.append("configure")
        self.described = list(pool_groups)
        if "error" in self._answers:
            raise self._answers["error"]
        self._inner.configure(pool_groups)

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        return self._answer("num_bytes", life_cycle_id, self._inner.query_cold_page_bytes)

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        default = self._inner.get_batching_layer_group_id
        return self._answer("representative", life_cycle_id, default)

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        return self._answer("location", life_cycle_id, self._inner.query_page_index_location)

    def encode(self, *args: Any) -> None:
        self._inner.encode(*args)

    def decode(self, *args: Any) -> None:
        self._inner.decode(*args)


# What the codec answers, and the sentence that refuses it.
_BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "zero size": (
        {"num_bytes": {1: 0}},
        "codec odd has a cold page of 0 bytes for life cycle 1: "
        "return its fixed, positive size from query_cold_page_bytes",
    ),
    "negative size": (
        {"num_bytes": {0: -128}},
        "codec odd has a cold page of -128 bytes for life cycle 0: "
        "return its fixed, positive size from query_cold_page_bytes",
    ),
    "device indices": (
        {"location": dict.fromkeys(range(3), PageIndexLocation.DEVICE)},
        "codec odd wants its page indices in device memory, which this device does not offer: "
        "use host indices",
    ),
    "no location": (
        {"location": {2: None}},
        "codec odd wants the page indices of life cycle 2 at None: "
        "return a PageIndexLocation from query_page_index_location",
    ),
    "negative representative": (
        {"representative": {0: -1}},
        "codec odd batches life cycle 0 as -1: "
        "return the smallest life cycle of its class from get_batching_layer_group_id",
    ),
    "representative above its member": (
        {"representative": {0: 1, 1: 1}},
        "codec odd batches life cycle 0 as 1: "
        "return the smallest life cycle of its class from get_batching_layer_group_id",
    ),
    "unknown representative": (
        {"representative": {2: 99}},
        "codec odd batches life cycle 2 as 99: "
        "return the smallest life cycle of its class from get_batching_layer_group_id",
    ),
    "representative of something else": (
        {"representative": {1: 0, 2: 1}},
        "codec odd batches life cycle 2 as 1, and that one as 0: "
        "a representative must stand for itself",
    ),
    "two hot pool groups": (
        {"representative": {2: 0}, "num_bytes": dict.fromkeys(range(3), 128)},
        "codec odd batches life cycles 0 and 2 of two hot pool groups: keep them apart",
    ),
    "different cold sizes": (
        {"num_bytes": {1: 64}},
        "codec odd batches life cycles 0 and 1 with cold pages of 128 and 64 bytes: "
        "keep them apart",
    ),
}


@pytest.mark.parametrize(("answers", "sentence"), _BROKEN.values(), ids=_BROKEN.keys())
@pytest.mark.parametrize("host_bytes", [None, 1 << 20], ids=["hot only", "with host"])
def test_a_broken_contract_is_refused_in_one_sentence(
    answers: dict[str, Any], sentence: str, host_bytes: int | None
) -> None:
    """Also where no page will ever leave the hot level: a codec is right or it is not."""
    codec = _Codec(**answers)
    with pytest.raises(CodecError) as raised:
        KVCacheManager(_config(host_bytes=host_bytes), codec=codec)
    assert str(raised.value) == sentence
    assert isinstance(raised.value, ConfigurationError)
    assert codec.is_consumed


def test_a_codec_that_batches_nothing_is_right() -> None:
    codec = _Codec(representative={0: 0, 1: 1, 2: 2}, num_bytes={0: 128, 1: 64, 2: 64})
    KVCacheManager(_config(), codec=codec).close()


@pytest.mark.parametrize("error", [CodecError("no"), ZeroDivisionError("a bug in the codec")])
def test_what_a_codec_raises_reaches_the_caller(error: Exception) -> None:
    codec = _Codec(error=error)
    with pytest.raises(type(error)) as raised:
        KVCacheManager(_config(), codec=codec)
    assert raised.value is error
    assert codec.is_consumed
    assert codec.calls == ["configure"]


def test_whenever_a_codec_raises_nothing_is_left_behind(tmp_path: Path) -> None:
    """Its device, which is the caller's, has neither threads nor memory of the manager."""
    complete = _Codec()
    config = _config(disk=DiskTierConfig(str(tmp_path), 1 << 20))
    KVCacheManager(config, codec=complete).close()
    num_answers = len(complete.calls) - 1
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for num_answers_left in range(num_answers):
        codec = _Codec()
        codec.num_answers_left = num_answers_left
        device = HostDevice()
        with pytest.raises(ZeroDivisionError):
            KVCacheManager(config, codec=codec, device=device)
        assert set(threading.enumerate()) == threads
        assert len(os.listdir("/proc/self/fd")) == files
        device.close()
    KVCacheManager(config).close()


# ---------------------------------------------------------------------- consumption


def _succeeds(codec: ColdPageCodec) -> None:
    KVCacheManager(_config(), codec=codec).close()


def _has_no_room(codec: ColdPageCodec) -> None:
    with pytest.raises(ConfigurationError, match="the hot tier of 1 bytes"):
        KVCacheManager(_config(hot_bytes=1), codec=codec)


def _has_no_cold_room(codec: ColdPageCodec) -> None:
    with pytest.raises(ConfigurationError, match="a cold tier of 1 bytes"):
        KVCacheManager(_config(host_bytes=1), codec=codec)


@pytest.mark.parametrize("first", [_succeeds, _has_no_room, _has_no_cold_room])
def test_a_codec_is_consumed_whether_or_not_construction_succeeds(
    first: Callable[[ColdPageCodec], None],
) -> None:
    codec = _Codec()
    first(codec)
    calls = list(codec.calls)
    with pytest.raises(CodecConsumedError) as raised:
        KVCacheManager(_config(), codec=codec)
    assert str(raised.value) == (
        "this codec belongs to another manager already: make a new one for each manager"
    )
    assert isinstance(raised.value, UsageError)
    assert codec.calls == calls, "a consumed codec is not asked anything again"


def test_a_codec_is_configured_once_and_before_it_is_asked_anything() -> None:
    codec = _Codec()
    KVCacheManager(_config(), codec=codec).close()
    assert codec.calls[0] == "configure"
    assert codec.calls.count("configure") == 1


def test_each_manager_makes_a_default_codec_of_its_own() -> None:
    for _ in range(2):
        KVCacheManager(_config()).close()


# ---------------------------------------------------------------------- what a codec is told


def test_the_description_is_where_the_bytes_are() -> None:
    codec = _Codec()
    with KVCacheManager(_config(), codec=codec) as manager:
        groups = codec.described
        assert [g.pool_group_index for g in groups] == [0, 1]
        assert [[lc.life_cycle_id for lc in g.life_cycles] for g in groups] == [[0, 1], [2]]
        assert [[p.slot_bytes for p in g.pools] for g in groups] == [[128], [96, 32]]
        assert [[p.pool_index for p in g.pools] for g in groups] == [[0], [0, 1]]
        described: dict[tuple[int, str], tuple[int, int, int, int]] = {}
        for group in groups:
            for life_cycle in group.life_cycles:
                assert life_cycle.layer_group_id == life_cycle.life_cycle_id
                for b in life_cycle.buffers:
                    pool = group.pools[b.pool_index]
                    described[b.buffer_id.layer_id, b.buffer_id.role] = (
                        pool.base_address + b.offset_bytes,
                        pool.slot_bytes,
                        b.num_bytes,
                        group.num_slots,
                    )
        assert len(described) == 6
        for (layer_id, role), (address, stride, num_bytes, num_slots) in described.items():
            array = manager.hot_array(LayerId(layer_id), BufferRole(role))
            assert array.shape == (num_slots, num_bytes)
            assert array.strides == (stride, 1)
            assert array.dtype == np.uint8
            assert array.ctypes.data == address
        # Layers whose pages go stale at different times share a pool group, so the same addresses.
        assert described[7, _KEY] == described[8, _KEY]
        # A layer's key and value lie side by side.
        assert described[7, _VALUE][0] == described[7, _KEY][0] + 64
        del array  # a view must not outlive the manager
        described_slots = {g.num_slots for g in groups}
    assert all(described_slots)


@pytest.mark.parametrize(
    ("sizes", "pool_group_of", "num_groups"),
    [
        # One hot pool group, two cold ones; and a cold one across two hot ones.
        ({0: 100, 1: 50, 2: 100}, [0, 1, 0], 2),
        ({0: 128, 1: 128, 2: 128}, [0, 0, 0], 1),
        ({0: 1, 1: 2, 2: 3}, [0, 1, 2], 3),
    ],
)
def test_cold_levels_are_grouped_by_cold_size_alone(
    sizes: dict[int, int], pool_group_of: list[int], num_groups: int
) -> None:
    codec = _Codec(num_bytes=sizes, representative={0: 0, 1: 1, 2: 2})
    device = HostDevice()
    builder = LevelBuilder(_config(host_bytes=60_000), device)
    hot, host = builder.build(codec).levels
    assert hot.pool_group_of.tolist() == [0, 0, 1]
    assert host.pool_group_of.tolist() == pool_group_of
    assert len(host.allocators) == len(host.memory) == num_groups
    for life_cycle, size in sizes.items():
        (pool,) = host.memory[pool_group_of[life_cycle]]
        assert pool.slot_bytes == size
        assert pool.num_slots == host.allocators[pool_group_of[life_cycle]].num_slots
    used = sum(pools[0].num_slots * pools[0].slot_bytes for pools in host.memory)
    assert 60_000 - sum(set(sizes.values())) < used <= 60_000
    builder.close()
    device.close()
