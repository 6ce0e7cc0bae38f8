"""What a manager does with the codecs it is given, from the call that takes them to ``close``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpage.codecs import ColdPageCodec, create_default_cold_page_codec
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
from coldpage.errors import CodecConsumedError, CodecError, ConfigurationError
from coldpage.manager import KVCacheManager
from coldpage.testing.example_codecs import CoarseCodec, DeviceIndexCodec, PaddingCodec
from coldpage.types import BufferRole, LayerId, PageClass, PageIndexLocation
from tests.unit.answering_codec import AnsweringCodec

_KEY, _VALUE = BufferRole("key"), BufferRole("value")


def _layer(layer_id: int, key: int, value: int, window: int | None) -> AttentionLayerConfig:
    buffers = (BufferConfig(_KEY, key), BufferConfig(_VALUE, value))
    return AttentionLayerConfig(LayerId(layer_id), buffers, window)


# Life cycles 0 and 1 share a hot pool group; 2 has another, of two pools.
_LAYERS = (_layer(7, 64, 64, None), _layer(8, 64, 64, 9000), _layer(9, 32, 96, 9001))


def _config(
    *cold: CacheTierConfig, hot_bytes: int = 1 << 20, **settings: Any
) -> KVCacheManagerConfig:
    settings.setdefault("model_fingerprint", b"model")
    return KVCacheManagerConfig(16, (DeviceTierConfig(hot_bytes), *cold), _LAYERS, **settings)


_HOST = HostTierConfig(1 << 20)


def _groups(manager: KVCacheManager, level: int) -> list[list[int]]:
    return [list(group.life_cycles) for group in manager.stats().levels[level].pool_groups]


# ---------------------------------------------------------------------- validation

_BROKEN: dict[str, dict[str, Any]] = {
    "a size of zero": {"query_cold_page_bytes": {1: 0}},
    "no location": {"query_page_index_location": {2: None}},
    "a class across hot pool groups": {"get_batching_layer_group_id": {2: 0}},
    "a refusal": {"configure": CodecError("no")},
    "a bug": {"configure": ZeroDivisionError("no")},
}


@pytest.mark.parametrize("cold", [(), (_HOST,)], ids=["hot only", "with host"])
@pytest.mark.parametrize("answers", _BROKEN.values(), ids=_BROKEN.keys())
def test_a_broken_codec_is_refused_and_closed(
    answers: dict[str, Any], cold: tuple[CacheTierConfig, ...]
) -> None:
    """Also where no page will ever leave the hot level: a codec is right or it is not."""
    codec = AnsweringCodec(**answers)
    with pytest.raises(CodecError):
        KVCacheManager(_config(*cold), codec=codec)
    assert codec.is_consumed
    assert codec.num_closed == 1


def test_a_broken_codec_of_one_tier_is_refused_and_all_are_closed() -> None:
    good, broken = AnsweringCodec(), AnsweringCodec(query_cold_page_bytes={0: 0})
    broken.codec_id = "broken"
    with pytest.raises(CodecError, match=r"^codec broken has a cold page of 0 bytes"):
        KVCacheManager(_config(_HOST, HostTierConfig(1 << 20, broken)), codec=good)
    assert (good.num_closed, broken.num_closed) == (1, 1)


def test_two_formats_of_one_name_are_refused() -> None:
    same, other = AnsweringCodec(), AnsweringCodec(query_cold_page_bytes={2: 99})
    with pytest.raises(CodecError, match="two codecs are both called odd v1 and differ"):
        KVCacheManager(_config(_HOST, HostTierConfig(1 << 20, other)), codec=same)


def test_whenever_a_codec_raises_nothing_is_left_behind(tmp_path: Path) -> None:
    """Its device, which is the caller's, has neither threads nor memory of the manager."""
    config = _config(_HOST, DiskTierConfig(str(tmp_path), 1 << 20))
    methods = (
        "configure",
        "query_cold_page_bytes",
        "query_page_index_location",
        "get_batching_layer_group_id",
    )
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for method in methods:
        codec = AnsweringCodec(**{method: ZeroDivisionError("a bug in the codec")})
        device = HostDevice()
        threads_before = set(threading.enumerate())
        with pytest.raises(CodecError, match=f"^codec odd failed in {method}"):
            KVCacheManager(config, codec=codec, device=device)
        assert set(threading.enumerate()) == threads_before
        assert len(os.listdir("/proc/self/fd")) == files
        device.close()
        assert set(threading.enumerate()) == threads
    KVCacheManager(config).close()


# ---------------------------------------------------------------------- consumption and end


def _succeeds(codec: ColdPageCodec) -> None:
    KVCacheManager(_config(_HOST), codec=codec).close()


def _succeeds_without_cold_tiers(codec: ColdPageCodec) -> None:
    KVCacheManager(_config(), codec=codec).close()


def _succeeds_in_a_tier(codec: ColdPageCodec) -> None:
    KVCacheManager(_config(HostTierConfig(1 << 20, codec))).close()


def _has_no_room(codec: ColdPageCodec) -> None:
    with pytest.raises(ConfigurationError, match="tier of 1 bytes"):
        KVCacheManager(_config(_HOST, hot_bytes=1), codec=codec)


def _has_no_cold_room(codec: ColdPageCodec) -> None:
    with pytest.raises(ConfigurationError, match="tier of 1 bytes"):
        KVCacheManager(_config(HostTierConfig(1)), codec=codec)


def _has_no_room_in_a_tier(codec: ColdPageCodec) -> None:
    with pytest.raises(ConfigurationError, match="tier of 1 bytes"):
        KVCacheManager(_config(HostTierConfig(1, codec)))


def _stands_beside_a_consumed_one(codec: ColdPageCodec) -> None:
    with pytest.raises(CodecConsumedError):
        KVCacheManager(_config(_HOST, HostTierConfig(1 << 20, codec)), codec=_consumed())


def _consumed() -> ColdPageCodec:
    codec = create_default_cold_page_codec()
    codec.is_consumed = True
    return codec


@pytest.mark.parametrize(
    "first",
    [
        _succeeds,
        _succeeds_without_cold_tiers,
        _succeeds_in_a_tier,
        _has_no_room,
        _has_no_cold_room,
        _has_no_room_in_a_tier,
        _stands_beside_a_consumed_one,
    ],
)
def test_a_codec_is_consumed_and_closed_whether_or_not_construction_succeeds(
    first: Callable[[ColdPageCodec], None],
) -> None:
    codec = AnsweringCodec()
    first(codec)
    assert codec.is_consumed
    assert codec.num_closed == 1
    calls = list(codec.calls)
    for again in (_config(_HOST), _config()):
        with pytest.raises(CodecConsumedError):
            KVCacheManager(again, codec=codec)
    with pytest.raises(CodecConsumedError):
        KVCacheManager(_config(HostTierConfig(1 << 20, codec)))
    assert codec.calls == calls, "a consumed codec is not asked anything again"
    assert codec.num_closed == 1


def test_a_codec_lives_as_long_as_its_manager() -> None:
    codec = AnsweringCodec()
    manager = KVCacheManager(_config(_HOST), codec=codec)
    assert codec.calls[0] == "configure"
    assert codec.calls.count("configure") == 1
    assert codec.num_closed == 0
    manager.close()
    manager.close()
    assert codec.num_closed == 1


def test_each_manager_makes_a_default_codec_of_its_own() -> None:
    for _ in range(2):
        with KVCacheManager(_config(_HOST)) as manager:
            assert [level.codec for level in manager.stats().levels] == ["", "concat v1"]


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'int4' is no codec"):
        KVCacheManager(_config(_HOST), codec="int4")  # type: ignore[arg-type]


def test_one_codec_may_serve_two_tiers() -> None:
    codec = AnsweringCodec()
    tiers = HostTierConfig(1 << 20, codec), HostTierConfig(1 << 20, codec)
    with KVCacheManager(_config(*tiers)) as manager:
        assert [level.codec for level in manager.stats().levels] == ["", "odd v1", "odd v1"]
    assert codec.calls.count("configure") == 1
    assert codec.num_closed == 1


def test_a_tier_may_name_its_own_codec(tmp_path: Path) -> None:
    tiers = _HOST, DiskTierConfig(str(tmp_path), 1 << 20, CoarseCodec())
    with KVCacheManager(_config(*tiers), codec=PaddingCodec(64)) as manager:
        names = [level.codec for level in manager.stats().levels]
        assert names == ["", "padding v1 alignment=64", "coarse v1 nibbles"]
        sizes = [{g.slot_bytes for g in level.pool_groups} for level in manager.stats().levels[:2]]
        assert sizes == [{128}, {128, 192}]


def test_a_codec_may_want_its_indices_in_device_memory() -> None:
    with KVCacheManager(_config(_HOST), codec=DeviceIndexCodec()) as manager:
        assert manager.stats().levels[1].codec == "device-index v1"


# ---------------------------------------------------------------------- what a codec is told


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_description_is_where_the_bytes_are(has_sinks: bool) -> None:
    codec = AnsweringCodec()
    config = _config(_HOST, separate_sink_pages=has_sinks)
    with KVCacheManager(config, codec=codec) as manager:
        groups = codec.described
        assert [g.pool_group_index for g in groups] == [0, 1]
        ids = [[lc.life_cycle_id for lc in g.life_cycles] for g in groups]
        assert ids == ([[0, 1, 2, 3], [4, 5]] if has_sinks else [[0, 1], [2]])
        assert [[p.slot_bytes for p in g.pools] for g in groups] == [[128], [96, 32]]
        assert [[p.pool_index for p in g.pools] for g in groups] == [[0], [0, 1]]
        described: dict[tuple[int, str], set[tuple[int, int, int, int]]] = {}
        for group in groups:
            for life_cycle in group.life_cycles:
                _check_class(life_cycle, has_sinks)
                for b in life_cycle.buffers:
                    pool = group.pools[b.pool_index]
                    described.setdefault((b.buffer_id.layer_id, b.buffer_id.role), set()).add(
                        (
                            pool.base_address + b.offset_bytes,
                            pool.slot_bytes,
                            b.num_bytes,
                            group.num_slots,
                        )
                    )
        assert len(described) == 6
        for (layer_id, role), places in described.items():
            ((address, stride, num_bytes, num_slots),) = places  # the same for both classes
            array = manager.hot_array(LayerId(layer_id), BufferRole(role))
            assert array.shape == (num_slots, num_bytes)
            assert array.strides == (stride, 1)
            assert array.dtype == np.uint8
            assert array.ctypes.data == address
        del array  # a view must not outlive the manager
        # Layers whose pages go stale at different times share a pool group, so the same addresses.
        assert described[7, _KEY] == described[8, _KEY]


def _check_class(life_cycle: Any, has_sinks: bool) -> None:
    """Sink and body of each layer group in turn, or a body alone."""
    if not has_sinks:
        assert life_cycle.layer_group_id == life_cycle.life_cycle_id
        assert life_cycle.page_class is PageClass.BODY
        return
    assert life_cycle.layer_group_id == life_cycle.life_cycle_id // 2
    is_sink = life_cycle.page_class is PageClass.SINK
    assert is_sink == (life_cycle.life_cycle_id % 2 == 0)


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        # One hot pool group, two cold ones; and a cold one across two hot ones.
        ({0: 100, 1: 50, 2: 100}, [[0, 2], [1]]),
        ({0: 128, 1: 128, 2: 128}, [[0, 1, 2]]),
        ({0: 1, 1: 2, 2: 3}, [[0], [1], [2]]),
    ],
)
def test_cold_levels_are_grouped_by_cold_size_alone(
    sizes: dict[int, int], groups: list[list[int]]
) -> None:
    codec = AnsweringCodec(
        query_cold_page_bytes=sizes, get_batching_layer_group_id={0: 0, 1: 1, 2: 2}
    )
    with KVCacheManager(_config(HostTierConfig(60_000)), codec=codec) as manager:
        assert _groups(manager, 0) == [[0, 1], [2]]
        assert _groups(manager, 1) == groups
        host = manager.stats().levels[1]
        for group, life_cycles in zip(host.pool_groups, groups, strict=True):
            assert {sizes[lc] for lc in life_cycles} == {group.slot_bytes}
        assert 60_000 - sum(set(sizes.values())) < host.total_bytes <= 60_000


def test_page_classes_share_a_hot_pool_group_and_not_a_cold_one() -> None:
    config = _config(_HOST, separate_sink_pages=True)
    with KVCacheManager(config, codec=CoarseCodec(keeps_sinks=True)) as manager:
        assert _groups(manager, 0) == [[0, 1, 2, 3], [4, 5]]
        assert _groups(manager, 1) == [[0, 2, 4], [1, 3, 5]]
        assert [g.slot_bytes for g in manager.stats().levels[1].pool_groups] == [128, 64]


def test_index_locations_may_differ_between_classes() -> None:
    answers = {"query_page_index_location": {2: PageIndexLocation.DEVICE}}
    with KVCacheManager(_config(_HOST), codec=AnsweringCodec(**answers)) as manager:
        assert manager.stats().levels[1].codec == "odd v1"
