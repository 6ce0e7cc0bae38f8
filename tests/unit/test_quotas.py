"""From quotas to slots, on real managers: constraints that hold, ratios that arrive, and levels
that are divided as they were used.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpage.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheTierConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
)
from coldpage.device.base import MemoryKind
from coldpage.device.host import HostDevice
from coldpage.errors import ConfigurationError, OutOfPagesError
from coldpage.layout import HotLayout, hot_layout, slot_counts
from coldpage.manager import KVCacheManager
from coldpage.manager.quotas import Quotas, max_sequence_tokens
from coldpage.migration import NUM_SCRATCH_SLOTS
from coldpage.pools import LevelPools, MemoryPool, PoolGroup
from coldpage.slots import SlotAllocator
from coldpage.storage.usage import MIN_USAGE_SAMPLES, UsageSamples
from coldpage.testing.example_codecs import CoarseCodec
from coldpage.types import (
    HOT_LEVEL,
    BufferRole,
    CacheLevel,
    CacheTier,
    LayerId,
    PageClass,
    PoolGroupIndex,
)
from tests.property.setups import disk_slot_bytes

_PER_BLOCK = 4
_ROOMY = 1 << 20
_HOST = CacheLevel(1)


def _layer(
    layer_id: int, num_bytes: int, window: int | None = None, sinks: int = 0
) -> AttentionLayerConfig:
    buffers = tuple(BufferConfig(BufferRole(role), num_bytes // 2) for role in ("key", "value"))
    return AttentionLayerConfig(LayerId(layer_id), buffers, window, sinks)


# Two hot pool groups, of 192 and of 64 bytes a page.
_TWO = (_layer(0, 192), _layer(1, 64, window=8))


def _config(
    *cold: CacheTierConfig,
    hot_bytes: int = _ROOMY,
    layers: tuple[AttentionLayerConfig, ...] = _TWO,
    **rest: Any,
) -> KVCacheManagerConfig:
    rest.setdefault("model_fingerprint", b"model")
    return KVCacheManagerConfig(_PER_BLOCK, (DeviceTierConfig(hot_bytes), *cold), layers, **rest)


def _slots(manager: KVCacheManager, level: int) -> list[int]:
    return [group.total_slots for group in manager.stats().levels[level].pool_groups]


def _slots_of(config: KVCacheManagerConfig, **codec: Any) -> list[list[int]]:
    """By level."""
    with KVCacheManager(config, **codec) as manager:
        return [_slots(manager, level) for level in range(len(config.cache_tiers))]


def _batch(*sequences: tuple[int, int], prompt: int = 0) -> BatchDesc:
    return BatchDesc(tuple(KVCacheDesc(c, h) for c, h in sequences), prompt)


# ---------------------------------------------------------------------- hot floors


@st.composite
def _batches(draw: st.DrawFn) -> BatchDesc:
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        history = draw(st.integers(0, 30))
        sequences.append((draw(st.integers(max(1, history), history + 9)), history))
    return _batch(*sequences, prompt=draw(st.integers(0, min(h for _, h in sequences))))


@st.composite
def _constrained(draw: st.DrawFn) -> KVCacheManagerConfig:
    windows = draw(st.lists(st.sampled_from([None, 1, 7, 16]), min_size=1, max_size=3, unique=True))
    layers = tuple(
        _layer(i, draw(st.sampled_from([64, 192])), window, draw(st.sampled_from([0, 5])))
        for i, window in enumerate(windows)
    )
    return _config(
        HostTierConfig(_ROOMY),
        layers=layers,
        constraints=tuple(draw(st.lists(_batches(), min_size=1, max_size=2))),
        max_util_for_resume=draw(st.sampled_from([0.1, 0.5, 0.97, 1.0])),
        separate_sink_pages=draw(st.booleans()),
        initial_pool_ratio=tuple(draw(st.sampled_from([1e-3, 1, 1e3])) for _ in layers),
    )


def _least_hot_bytes(config: KVCacheManagerConfig) -> int:
    with pytest.raises(ConfigurationError) as raised:
        KVCacheManager(replace(config, cache_tiers=(DeviceTierConfig(1), *config.cache_tiers[1:])))
    found = re.search(r"give it at least ([\d,]+) bytes$", str(raised.value))
    assert found, raised.value
    return int(found[1].replace(",", ""))


def _write(manager: KVCacheManager, batch: BatchDesc, salt: int) -> list[Any]:
    """The sequences of a batch, written as far as their histories and suspended."""
    caches = []
    prompt = np.arange(batch.system_prompt_length, dtype=np.int32) + salt
    for number, desc in enumerate(batch.kv_caches):
        own = np.arange(desc.history_length - prompt.size, dtype=np.int32) + 1000 * (number + 1)
        tokens = np.concatenate([prompt, own + salt])
        cache = manager.create_kv_cache(tokens)
        assert cache.resume()
        for start in range(cache.history_length, tokens.size, _PER_BLOCK):
            some = tokens[start : start + _PER_BLOCK]
            assert cache.resize(start + some.size)
            cache.commit(some)
        cache.suspend()
        caches.append(cache)
    return caches


@settings(max_examples=60)
@given(config=_constrained())
def test_the_smallest_hot_level_has_room_for_each_constraint(config: KVCacheManagerConfig) -> None:
    """For all its sequences at once, as far as a resume may fill the level."""
    least = _least_hot_bytes(config)
    with KVCacheManager(config) as manager:
        all_caches = [
            _write(manager, batch, 100_000 * i) for i, batch in enumerate(config.constraints)
        ]
        manager.resize(HOT_LEVEL, least)
        assert manager.stats().levels[0].total_bytes == least
        for batch, caches in zip(config.constraints, all_caches, strict=True):
            for cache in caches:
                assert cache.resume(), "a batch that was promised room"
            for cache, desc in zip(caches, batch.kv_caches, strict=True):
                assert cache.resize(desc.capacity)
            manager.check_integrity()
            for cache in caches:
                cache.close()


@pytest.mark.parametrize(
    ("is_constrained", "slots"), [(False, [15, 1]), (True, [14, 5])], ids=["free", "constrained"]
)
def test_a_constraint_keeps_alive_what_a_ratio_would_starve(
    is_constrained: bool, slots: list[int]
) -> None:
    # Four blocks a sequence in one group, and the last two of each in the other, at 97 %.
    batch = _batch((16, 16), (16, 16))
    config = _config(
        HostTierConfig(_ROOMY),
        initial_pool_ratio=(99, 1),
        constraints=(batch,) if is_constrained else (),
    )
    with KVCacheManager(config) as manager:
        caches = _write(manager, batch, 0)
        manager.resize(HOT_LEVEL, 12 * 256)
        assert _slots(manager, 0) == slots
        for cache in caches:
            if is_constrained:
                assert cache.resume()
                continue
            with pytest.raises(OutOfPagesError):
                cache.resume()


@pytest.mark.parametrize(
    ("utilization", "num_slots"), [(1.0, 10), (0.97, 11), (0.5, 20), (0.3, 34), (0.1, 100)]
)
def test_a_floor_allows_for_what_a_resume_may_fill(utilization: float, num_slots: int) -> None:
    config = _config(
        layers=(_layer(0, 64),), constraints=(_batch((40, 40)),), max_util_for_resume=utilization
    )
    assert _least_hot_bytes(config) == 64 * num_slots
    least = replace(config, cache_tiers=(DeviceTierConfig(64 * num_slots),))
    with KVCacheManager(least) as manager:
        assert manager.max_sequence_tokens >= 40
    # One slot less would not do.
    bare = replace(least, constraints=(), cache_tiers=(DeviceTierConfig(64 * (num_slots - 1)),))
    with KVCacheManager(bare) as manager:
        assert manager.max_sequence_tokens < 40


def test_without_constraints_a_hot_level_holds_one_block() -> None:
    config = _config(layers=(*_TWO, _layer(2, 64, window=16)), max_util_for_resume=0.1)
    assert _least_hot_bytes(config) == 192 + 2 * 64


# ---------------------------------------------------------------------- cold levels


@settings(max_examples=30)
@given(config=_constrained(), typical=_batches(), data=st.data())
def test_constraints_never_change_a_cold_level(
    config: KVCacheManagerConfig, typical: BatchDesc, data: st.DataObject
) -> None:
    """As long as they are not what the quotas are divided by."""
    host = HostTierConfig(data.draw(st.integers(2_000, 60_000)))
    ratio = data.draw(st.sampled_from([None, config.initial_pool_ratio]))
    config = replace(
        config,
        cache_tiers=(DeviceTierConfig(_ROOMY), host),
        typical_step=typical,
        initial_pool_ratio=ratio,
    )
    free = replace(config, constraints=())
    assert _slots_of(config)[1] == _slots_of(free)[1]


def test_constraints_divide_a_cold_level_when_nothing_else_does() -> None:
    batch = _batch((40, 40))
    for utilization in (1.0, 0.1):
        config = _config(
            HostTierConfig(10 * 192 + 2 * 64), constraints=(batch,), max_util_for_resume=utilization
        )
        # Ten pages to two, whatever part of the hot level a resume may fill.
        assert _slots_of(config)[1] == [10, 2]


def test_a_cold_level_needs_one_slot_of_each_of_its_pool_groups(tmp_path: Path) -> None:
    """Two layer groups with two classes each share a hot pool group, and have three cold sizes."""
    layers = (_layer(0, 64), _layer(1, 64, window=8), _layer(2, 192, window=16))

    def config(host_bytes: int, disk_bytes: int) -> KVCacheManagerConfig:
        return _config(
            HostTierConfig(host_bytes),
            DiskTierConfig(str(tmp_path), disk_bytes),
            layers=layers,
            separate_sink_pages=True,
            constraints=(_batch((400, 400), (400, 400)),),
        )

    sizes = (64, 32, 192, 96)
    strides = [disk_slot_bytes(size, _PER_BLOCK) for size in sizes]
    assert len(set(strides)) == 1
    least = config(sum(sizes), sum(strides))
    with KVCacheManager(least, codec=CoarseCodec(keeps_sinks=True)) as manager:
        for level in (1, 2):
            groups = manager.stats().levels[level].pool_groups
            assert [list(g.life_cycles) for g in groups] == [[0, 2], [1, 3], [4], [5]]
            assert [g.total_slots for g in groups] == [1, 1, 1, 1]
    for tier, too_small in (
        ("host", config(sum(sizes) - 1, sum(strides))),
        ("disk", config(sum(sizes), sum(strides) - 1)),
    ):
        with pytest.raises(ConfigurationError, match=rf"^the {tier} tier .*\(1 of .*, 1 of .*, 1"):
            KVCacheManager(too_small, codec=CoarseCodec(keeps_sinks=True))


# ---------------------------------------------------------------------- ratios


@pytest.mark.parametrize("ratio", [(3, 1), (1, 1), (1, 3), (0.75, 0.25)])
def test_a_ratio_is_of_hot_bytes_and_cold_levels_keep_its_slots(
    ratio: tuple[float, float], tmp_path: Path
) -> None:
    first, second = ratio
    total = first + second
    # 120 blocks of hot bytes; the slots are as many of each group as its part of the bytes gives.
    hot_bytes = 120 * 192
    hot = [int(hot_bytes * first / total / 192), int(hot_bytes * second / total / 64)]
    cold = (96, 32)  # half of a hot page
    host_bytes = sum(n * size for n, size in zip(hot, cold, strict=True))
    disk_bytes = sum(
        n * disk_slot_bytes(size, _PER_BLOCK) for n, size in zip(hot, cold, strict=True)
    )
    config = _config(
        HostTierConfig(host_bytes),
        DiskTierConfig(str(tmp_path), disk_bytes),
        hot_bytes=hot_bytes,
        initial_pool_ratio=ratio,
    )
    assert _slots_of(config, codec=CoarseCodec()) == [hot, hot, hot]


def test_a_ratio_is_by_layer_group_where_two_share_a_hot_pool_group() -> None:
    layers = (_layer(0, 64), _layer(1, 64, window=8), _layer(2, 192, window=16))
    config = _config(
        HostTierConfig(400 * 64),
        hot_bytes=400 * 64,
        layers=layers,
        initial_pool_ratio=(2, 1, 1),
    )
    # Three quarters of the bytes hold pages of 64, one quarter pages of 192: nine slots to one.
    assert _slots_of(config) == [[300, 33], [300, 33]]


# ---------------------------------------------------------------------- scratch


@settings(max_examples=200)
@given(
    hot_bytes=st.integers(1_000, 1 << 40),
    num_scratch=st.sampled_from([0, 1, NUM_SCRATCH_SLOTS]),
    weights=st.none() | st.tuples(*[st.integers(0, 5)] * 2).filter(any),
)
def test_scratch_slots_come_out_of_the_hot_quota(
    hot_bytes: int, num_scratch: int, weights: tuple[int, int] | None
) -> None:
    layout = hot_layout(_TWO)
    config = _config(initial_pool_ratio=(2, 3))
    rest = hot_bytes - num_scratch * (192 + 64)
    quotas = Quotas(config, layout, num_scratch)
    if rest < 256:
        with pytest.raises(ConfigurationError, match="bytes for changing between codecs"):
            quotas.hot_slots(hot_bytes, weights)
        return
    counts = quotas.hot_slots(hot_bytes, weights)
    assert counts == slot_counts(rest, [192, 64], weights or (2, 3), [1, 1], "")
    assert sum(n * size for n, size in zip(counts, (192, 64), strict=True)) <= rest


def test_two_formats_take_their_scratch_slots_out_of_the_hot_level_and_no_other() -> None:
    hot_bytes = 256 * (10 + NUM_SCRATCH_SLOTS)
    ratio = (3, 1)
    one = _config(HostTierConfig(2560), HostTierConfig(2560), hot_bytes=2560)
    one = replace(one, initial_pool_ratio=ratio)
    tiers = DeviceTierConfig(hot_bytes), HostTierConfig(2560, CoarseCodec()), HostTierConfig(2560)
    two = replace(one, cache_tiers=tiers)
    assert _slots_of(one) == [[10, 10]] * 3
    with KVCacheManager(two) as manager:
        assert [_slots(manager, level) for level in range(3)] == [[10, 10], [20, 20], [10, 10]]
        assert sum(g.num_slots for g in manager.hot_pool_groups()) == 2 * (10 + NUM_SCRATCH_SLOTS)
        manager.resize(HOT_LEVEL, hot_bytes + 256)
        assert _slots(manager, 0) == [11, 11]
        assert [g.num_slots for g in manager.hot_pool_groups()] == [11 + NUM_SCRATCH_SLOTS] * 2


# ---------------------------------------------------------------------- by use


@contextlib.contextmanager
def _used(num_blocks: int, *cold: CacheTierConfig, **rest: Any) -> Iterator[Any]:
    """A manager with one suspended sequence, and the sequence."""
    with KVCacheManager(_config(*cold, initial_pool_ratio=(1, 1), **rest)) as manager:
        cache = manager.create_kv_cache()
        assert cache.resume()
        # Not committed: what goes stale is not kept for others.
        for history in range(0, _PER_BLOCK * num_blocks, _PER_BLOCK):
            assert cache.resize(history + _PER_BLOCK, history)
        assert cache.resize(_PER_BLOCK * num_blocks, _PER_BLOCK * num_blocks)
        cache.suspend()
        yield manager, cache


def _used_bytes(manager: KVCacheManager, level: int) -> list[int]:
    groups = manager.stats().levels[level].pool_groups
    return [g.used_slots * g.slot_bytes for g in groups]


@pytest.mark.parametrize(
    ("num_polls", "is_by_use"),
    [(0, False), (MIN_USAGE_SAMPLES - 1, False), (MIN_USAGE_SAMPLES, True), (400, True)],
)
def test_a_level_is_divided_by_use_once_it_was_watched_for_long_enough(
    num_polls: int, is_by_use: bool
) -> None:
    quota = 100 * 192
    with _used(40, hot_bytes=quota) as (manager, _):
        by_ratio = [50, 150]
        assert _slots(manager, 0) == by_ratio
        for _ in range(num_polls):
            manager.poll()
        use = _used_bytes(manager, 0)
        assert use[0] > 30 * use[1] > 0, "lopsided"
        by_use = list(slot_counts(quota, [192, 64], use, [1, 1], ""))
        assert by_use[0] > 90
        manager.resize(HOT_LEVEL, quota)
        assert _slots(manager, 0) == (by_use if is_by_use else by_ratio)
        manager.check_integrity()
        # A level of another size is watched anew.
        manager.resize(HOT_LEVEL, quota)
        assert _slots(manager, 0) == by_ratio


def test_use_is_counted_in_bytes() -> None:
    """As many pages of both kinds are in use, so there will be as many slots of both."""
    with _used(2, hot_bytes=100 * 192) as (manager, _):
        for _ in range(MIN_USAGE_SAMPLES):
            manager.poll()
        assert _used_bytes(manager, 0) == [2 * 192, 2 * 64]
        manager.resize(HOT_LEVEL, 75 * 256)
        assert _slots(manager, 0) == [75, 75]


def test_each_level_is_divided_by_its_own_use() -> None:
    hot_bytes, host_bytes = 48 * 192, 60 * 192
    host = HostTierConfig(_ROOMY, write_behind=False)
    with _used(30, host, hot_bytes=_ROOMY) as (manager, cache):
        manager.resize(HOT_LEVEL, 4 * 192)
        assert _slots(manager, 0) == [2, 6]
        for _ in range(MIN_USAGE_SAMPLES):
            manager.poll()
        uses = [_used_bytes(manager, level) for level in (0, 1)]
        assert uses[0] == [2 * 192, 2 * 64]
        assert uses[1] == [28 * 192, 0]
        manager.resize(_HOST, host_bytes)
        # What was not in use has the structural minimum.
        assert _slots(manager, 1) == [59, 1]
        manager.resize(HOT_LEVEL, hot_bytes)
        assert _slots(manager, 0) == [36, 36]
        manager.check_integrity()
        assert cache.resume()
        cache.synchronize()
        assert cache.missing_blocks() == []
        del cache


def test_a_level_that_is_not_used_is_divided_as_configured() -> None:
    with KVCacheManager(_config(HostTierConfig(40 * 192), initial_pool_ratio=(1, 1))) as manager:
        for _ in range(2 * MIN_USAGE_SAMPLES):
            manager.poll()
        manager.resize(_HOST, 20 * 192)
        assert _slots(manager, 1) == [10, 30]
        manager.resize(HOT_LEVEL, 20 * 192)
        assert _slots(manager, 0) == [10, 30]


def test_a_constraint_holds_however_a_level_is_used() -> None:
    quota = 100 * 192
    with _used(40, hot_bytes=quota, constraints=(_batch((4, 4), *[(8, 8)] * 9),)) as (manager, _):
        for _ in range(MIN_USAGE_SAMPLES):
            manager.poll()
        manager.resize(HOT_LEVEL, quota)
        first, second = _slots(manager, 0)
        # 19 pages, at 97 % of a level.
        assert second == 20
        assert first == (quota - 20 * 64) // 192


_USES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6)


@settings(max_examples=40)
@given(uses=_USES, repeats=st.sampled_from([1, 100, MIN_USAGE_SAMPLES]), forgets=st.booleans())
def test_the_average_leans_to_the_newest_samples(
    uses: list[tuple[int, int]], repeats: int, forgets: bool
) -> None:
    """Against the closed form: a sample weighs 1/n, and what came before it the rest."""
    device = HostDevice()
    pools = [(MemoryPool(device, 5, size, MemoryKind.DEVICE),) for size in (192, 64)]
    groups = tuple(
        PoolGroup(CacheLevel(0), PoolGroupIndex(i), SlotAllocator(5), pool, 1)
        for i, pool in enumerate(pools)
    )
    level = LevelPools(CacheLevel(0), CacheTier.GPU, "hot", groups, (PoolGroupIndex(0),) * 2, None)
    samples = UsageSamples([level])
    if forgets:
        groups[0].slots.allocate(np.arange(1, 6, dtype=np.int32))
        samples.sample()
        groups[0].slots.free(np.arange(5, dtype=np.int32))
        samples.forget(CacheLevel(0))
    history: list[tuple[int, int]] = []
    for use in uses:
        owned = [g.slots.allocate(np.ones(n, np.int32)) for g, n in zip(groups, use, strict=True)]
        for _ in range(repeats):
            samples.sample()
        history += [use] * repeats
        for group, slots in zip(groups, owned, strict=True):
            group.slots.free(slots)
    for pool in itertools.chain(*pools):
        pool.close()
    device.close()
    got = samples.byte_weights(CacheLevel(0))
    if len(history) < MIN_USAGE_SAMPLES or not any(map(any, history)):
        assert got is None
        return
    newest = 1 / MIN_USAGE_SAMPLES
    ages = np.arange(len(history))[::-1]
    weights = newest * (1 - newest) ** ages
    weights[0] = (1 - newest) ** ages[0]
    expected = weights @ (np.array(history, float) * [192, 64])
    assert got == pytest.approx(tuple(expected))


# ---------------------------------------------------------------------- the longest sequence


def _naive_tokens(
    layout: HotLayout,
    pool_group_of: Sequence[PoolGroupIndex],
    limits: Sequence[int],
    num_new_blocks: int,
) -> int:
    """Block after block, as long as what is live fits."""
    classes = layout.page_classes
    for num_blocks in range(1, 400):
        used = [0] * len(limits)
        for group in layout.layer_groups:
            num_tokens = (num_blocks - num_new_blocks) * _PER_BLOCK
            stale = group.stale_blocks(num_tokens, _PER_BLOCK)
            for block in set(range(num_blocks)) - set(stale):
                page_class = PageClass.BODY
                if block >= num_blocks - layout.num_recent_blocks:
                    page_class = PageClass.RECENT
                if block == 0 and PageClass.SINK in classes:
                    page_class = PageClass.SINK
                first = layout.num_classes * group.layer_group_id
                used[pool_group_of[first + classes.index(page_class)]] += 1
        if any(n > limit for n, limit in zip(used, limits, strict=True)):
            return (num_blocks - 1) * _PER_BLOCK
    raise AssertionError("a sequence without an end")


@settings(max_examples=150)
@given(
    windows=st.lists(st.sampled_from([1, 7, 16]), max_size=3, unique=True),
    sinks=st.sampled_from([0, 5]),
    separate=st.booleans(),
    utilization=st.sampled_from([0.1, 0.5, 0.97, 1.0]),
    is_growing=st.booleans(),
    data=st.data(),
)
def test_the_longest_sequence_is_the_last_that_fits(
    windows: list[int],
    sinks: int,
    separate: bool,
    utilization: float,
    is_growing: bool,
    data: st.DataObject,
) -> None:
    layers = [_layer(0, 192), *(_layer(1 + i, 64, w, sinks) for i, w in enumerate(windows))]
    layout = hot_layout(layers, separate_sinks=separate)
    groups = []
    for index in map(PoolGroupIndex, range(len(layout.slot_bytes))):
        num_members = len(layout.layer_groups_of(index))
        slots = SlotAllocator(data.draw(st.integers(num_members, 60)))
        groups.append(PoolGroup(HOT_LEVEL, index, slots, (), num_members))
    of_life_cycle = tuple(lc.hot_pool_group for lc in layout.life_cycles)
    level = LevelPools(HOT_LEVEL, CacheTier.GPU, "hot", tuple(groups), of_life_cycle, None)
    limits = [
        max(g.num_block_pages, int(Fraction(utilization) * g.slots.num_slots)) for g in groups
    ]
    found = max_sequence_tokens(layout, level, _PER_BLOCK, utilization, is_growing=is_growing)
    assert found == _naive_tokens(layout, of_life_cycle, limits, int(is_growing))


@given(
    separate=st.booleans(),
    num_recent=st.sampled_from([0, 1, 4]),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    mapping=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_the_longest_sequence_of_a_level_whose_classes_lie_apart(
    separate: bool, num_recent: int, sizes: list[int], mapping: list[int]
) -> None:
    layers = [_layer(0, 192), _layer(1, 64, 16, 5)]
    layout = hot_layout(layers, separate_sinks=separate, num_recent_blocks=num_recent)
    groups = tuple(
        PoolGroup(HOT_LEVEL, PoolGroupIndex(index), SlotAllocator(size), (), 1)
        for index, size in enumerate(sizes)
    )
    pool_group_of = tuple(PoolGroupIndex(index) for index in mapping[: len(layout.life_cycles)])
    level = LevelPools(HOT_LEVEL, CacheTier.GPU, "hot", groups, pool_group_of, None)
    found = max_sequence_tokens(layout, level, _PER_BLOCK, 1.0)
    assert found == _naive_tokens(layout, pool_group_of, sizes, 0)
