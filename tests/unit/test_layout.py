"""Layout arithmetic, against counting positions and slots one by one."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpage.config import AttentionLayerConfig, BufferConfig
from coldpage.errors import ConfigurationError
from coldpage.layout import (
    TYPICAL_SEQUENCE_TOKENS,
    HotLayout,
    LayerGroup,
    cold_layout,
    cold_slot_counts,
    hot_layout,
    hot_slot_counts,
)
from coldpage.types import BufferRole, LayerGroupId, LayerId

_ROLES = ("key", "value", "key_scale", "state")


def _layer(
    layer_id: int, *sizes: int, window: int | None = None, sinks: int = 0
) -> AttentionLayerConfig:
    buffers = tuple(BufferConfig(BufferRole(r), n) for r, n in zip(_ROLES, sizes, strict=False))
    return AttentionLayerConfig(LayerId(layer_id), buffers, window, sinks)


@st.composite
def _models(draw: st.DrawFn) -> list[AttentionLayerConfig]:
    sizes = st.lists(st.sampled_from([24, 64, 64, 100, 4096]), min_size=1, max_size=4)
    windows = st.sampled_from([None, None, 1, 40, 512, 9000, 9001, 9002, 9003, 9004])
    return [
        _layer(5 * i + 3, *draw(sizes), window=draw(windows), sinks=draw(st.sampled_from([0, 4])))
        for i in range(draw(st.integers(1, 8)))
    ]


# ---------------------------------------------------------------------- stale blocks


@settings(max_examples=300)
@given(
    history=st.integers(0, 60),
    window=st.none() | st.integers(1, 40),
    sinks=st.integers(0, 20),
    per_block=st.integers(1, 8),
)
def test_a_block_is_stale_when_no_later_query_sees_a_position_of_it(
    history: int, window: int | None, sinks: int, per_block: int
) -> None:
    group = LayerGroup(LayerGroupId(0), (LayerId(0),), window, sinks)

    def is_seen(position: int) -> bool:
        # Of all queries from ``history`` on the first one looks back the furthest.
        return position < sinks or window is None or position > history - window

    def is_stale(block: int) -> bool:
        return not any(is_seen(p) for p in range(block * per_block, (block + 1) * per_block))

    num_blocks = -(-history // per_block)
    expected = [b for b in range(num_blocks + 3) if is_stale(b)]
    assert list(group.stale_blocks(history, per_block)) == expected
    live = sum(not is_stale(b) for b in range(num_blocks))
    assert group.live_blocks(history, per_block) == live


@given(
    window=st.integers(1, 40),
    sinks=st.integers(0, 20),
    per_block=st.integers(1, 8),
    history=st.integers(0, 80),
)
def test_what_is_stale_stays_stale(window: int, sinks: int, per_block: int, history: int) -> None:
    group = LayerGroup(LayerGroupId(0), (LayerId(0),), window, sinks)
    now, later = (set(group.stale_blocks(h, per_block)) for h in (history, history + 1))
    assert now <= later


# ---------------------------------------------------------------------- hot layout


@given(layers=_models())
def test_layers_of_one_window_and_sinks_are_a_group(layers: list[AttentionLayerConfig]) -> None:
    layout = hot_layout(layers)
    kinds = list(dict.fromkeys((m.sliding_window_tokens, m.num_sink_tokens) for m in layers))
    assert [(g.sliding_window_tokens, g.num_sink_tokens) for g in layout.layer_groups] == kinds
    for index, group in enumerate(layout.layer_groups):
        members = [
            m.layer_id
            for m in layers
            if (m.sliding_window_tokens, m.num_sink_tokens) == kinds[index]
        ]
        assert group.layer_group_id == index
        assert list(group.layer_ids) == members
    assert [lc.life_cycle_id for lc in layout.life_cycles] == list(range(len(kinds)))
    assert [lc.layer_group_id for lc in layout.life_cycles] == list(range(len(kinds)))


@given(layers=_models())
def test_buffers_tile_the_pools_of_their_group(layers: list[AttentionLayerConfig]) -> None:
    layout = hot_layout(layers)
    by_id = {layer.layer_id: layer for layer in layers}
    for life_cycle in layout.life_cycles:
        members = layout.layer_groups[life_cycle.layer_group_id].layer_ids
        wanted = {(m, b.role): b.num_bytes for m in members for b in by_id[m].buffers}
        placed = {(p.buffer_id.layer_id, p.buffer_id.role): p.num_bytes for p in life_cycle.buffers}
        assert placed == wanted
        assert len(life_cycle.buffers) == len(wanted)
        slot_bytes = layout.slot_bytes[life_cycle.hot_pool_group]
        for pool, pool_bytes in enumerate(slot_bytes):
            inside = [p for p in life_cycle.buffers if p.pool_index == pool]
            assert len({p.num_bytes for p in inside}) == 1, "buffers of one size a pool"
            end = 0
            for placement in sorted(inside, key=lambda p: p.offset_bytes):
                assert placement.offset_bytes == end
                end += placement.num_bytes
            assert end == pool_bytes
        # All buffers of one size, so as few and as large segments as there can be.
        assert len(slot_bytes) == len(set(wanted.values()))
        assert layout.page_bytes(life_cycle.life_cycle_id) == sum(wanted.values())


@given(layers=_models())
def test_equal_buffers_of_a_layer_are_neighbours(layers: list[AttentionLayerConfig]) -> None:
    for life_cycle in hot_layout(layers).life_cycles:
        placed = {p.buffer_id: p for p in life_cycle.buffers}
        for layer in layers:
            mine = [p for i, p in placed.items() if i.layer_id == layer.layer_id]
            for size in {p.num_bytes for p in mine}:
                equal = [p for p in mine if p.num_bytes == size]
                for before, after in itertools.pairwise(equal):
                    assert after.offset_bytes == before.offset_bytes + size


@given(layers=_models())
def test_groups_of_equal_slots_share_a_pool_group(layers: list[AttentionLayerConfig]) -> None:
    layout = hot_layout(layers)
    assert len(set(layout.slot_bytes)) == len(layout.slot_bytes)
    for life_cycle in layout.life_cycles:
        totals: Counter[int] = Counter()
        for placement in life_cycle.buffers:
            totals[placement.num_bytes] += placement.num_bytes
        expected = tuple(totals[size] for size in sorted(totals, reverse=True))
        assert layout.slot_bytes[life_cycle.hot_pool_group] == expected


# ---------------------------------------------------------------------- quotas to slots


def _live_blocks(layout: HotLayout, life_cycle: int, per_block: int) -> int:
    group = layout.layer_groups[layout.life_cycles[life_cycle].layer_group_id]
    return max(1, group.live_blocks(TYPICAL_SEQUENCE_TOKENS, per_block))


def _counts_or_needed(count_slots: Callable[[], tuple[int, ...]]) -> tuple[int, ...] | int:
    """The slot counts, or the bytes that the refusal says are enough."""
    try:
        return count_slots()
    except ConfigurationError as error:
        sentence = str(error)
    assert "\n" not in sentence
    found = re.search(r"give it at least ([\d,]+) bytes", sentence)
    assert found, sentence
    return int(found[1].replace(",", ""))


@settings(max_examples=300)
@given(
    layers=_models(),
    quota=st.integers(1, 3000) | st.integers(1, 1 << 44),
    per_block=st.sampled_from([1, 16, 64, 8192]),
)
def test_hot_slots_fill_the_quota_and_no_more(
    layers: list[AttentionLayerConfig], quota: int, per_block: int
) -> None:
    layout = hot_layout(layers)
    counts = _counts_or_needed(lambda: hot_slot_counts(layout, quota, per_block))
    if isinstance(counts, int):
        needed = counts
        assert needed > quota
        with pytest.raises(ConfigurationError):
            hot_slot_counts(layout, needed - 1, per_block)
        quota, counts = needed, hot_slot_counts(layout, needed, per_block)
    page_bytes = [sum(pools) for pools in layout.slot_bytes]
    used = sum(count * size for count, size in zip(counts, page_bytes, strict=True))
    assert quota - sum(page_bytes) < used <= quota
    members = Counter(lc.hot_pool_group for lc in layout.life_cycles)
    for group, count in enumerate(counts):
        assert count >= members[group], "one block has a page of each life cycle"


@given(layers=_models(), quota=st.integers(1 << 20, 1 << 30))
def test_hot_slots_are_shared_as_a_typical_sequence_needs_them(
    layers: list[AttentionLayerConfig], quota: int
) -> None:
    layout = hot_layout(layers)
    needs = [0] * len(layout.slot_bytes)
    for index, life_cycle in enumerate(layout.life_cycles):
        needs[life_cycle.hot_pool_group] += _live_blocks(layout, index, 16)
    counts = _counts_or_needed(lambda: hot_slot_counts(layout, quota, 16))
    if isinstance(counts, int):
        return
    for count, need in zip(counts, needs, strict=True):
        for other, other_need in zip(counts, needs, strict=True):
            # Whole slots: each count may fall short of its share by less than one.
            assert abs(count * other_need - other * need) < max(need, other_need)


def test_a_hot_level_that_is_too_small_names_what_a_block_takes() -> None:
    layout = hot_layout([_layer(0, 100, 100)])
    with pytest.raises(ConfigurationError) as raised:
        hot_slot_counts(layout, 199, 16)
    assert str(raised.value) == (
        "the hot tier of 199 bytes can not hold one block of 16 tokens: "
        "a block takes 200 bytes; give it at least 200 bytes"
    )


def test_six_life_cycles_in_one_pool_group_do_not_lose_a_slot_to_rounding() -> None:
    layout = hot_layout([_layer(i, 100, window=9000 + i) for i in range(6)])
    assert layout.slot_bytes == ((100,),)
    assert hot_slot_counts(layout, 600, 16) == (6,)
    with pytest.raises(ConfigurationError, match="give it at least 600 bytes"):
        hot_slot_counts(layout, 599, 16)


# ---------------------------------------------------------------------- cold levels


@settings(max_examples=200)
@given(
    layers=_models(),
    quota=st.integers(1, 1 << 40),
    data=st.data(),
    padding=st.sampled_from([0, 1, 4096]),
)
def test_cold_slots_fill_the_quota_and_no_more(
    layers: list[AttentionLayerConfig], quota: int, data: st.DataObject, padding: int
) -> None:
    hot = hot_layout(layers)
    num = len(hot.life_cycles)
    cold_bytes = data.draw(st.lists(st.sampled_from([8, 64, 5000]), min_size=num, max_size=num))
    cold = cold_layout(cold_bytes)
    for life_cycle, size in enumerate(cold_bytes):
        assert cold.slot_bytes[cold.pool_group_of[life_cycle]] == size
    assert sorted(cold.slot_bytes) == sorted(set(cold_bytes))
    strides = [size + padding for size in cold.slot_bytes]
    counts = _counts_or_needed(lambda: cold_slot_counts(hot, cold, strides, quota, 16))
    if isinstance(counts, int):
        needed = counts
        assert needed > quota
        with pytest.raises(ConfigurationError):
            cold_slot_counts(hot, cold, strides, needed - 1, 16)
        quota, counts = needed, cold_slot_counts(hot, cold, strides, needed, 16)
    assert min(counts) >= 1
    used = sum(count * stride for count, stride in zip(counts, strides, strict=True))
    assert quota - sum(strides) < used <= quota


def test_one_hot_pool_group_may_be_two_cold_ones() -> None:
    hot = hot_layout([_layer(0, 100), _layer(1, 100, window=9000)])
    cold = cold_layout([100, 25])
    assert [lc.hot_pool_group for lc in hot.life_cycles] == [0, 0]
    assert cold.pool_group_of == (0, 1)
    # Equally many blocks of each, whatever a block takes.
    assert cold_slot_counts(hot, cold, [100, 25], 12_500, 16) == (100, 100)


def test_two_hot_pool_groups_may_be_one_cold_one() -> None:
    hot = hot_layout([_layer(0, 100), _layer(1, 40, 60, window=1024)])
    cold = cold_layout([80, 80])
    assert [lc.hot_pool_group for lc in hot.life_cycles] == [0, 1]
    assert cold.pool_group_of == (0, 0)
    assert cold.slot_bytes == (80,)
    assert cold_slot_counts(hot, cold, [80], 8_000, 16) == (100,)


def test_cold_levels_keep_the_proportions_of_blocks_not_of_bytes() -> None:
    per_block = 16
    hot = hot_layout([_layer(0, 1000), _layer(1, 64, window=1024)])
    live = [_live_blocks(hot, i, per_block) for i in (0, 1)]
    assert live == [256, 64]
    hot_counts = hot_slot_counts(hot, 100 * (256 * 1000 + 64 * 64), per_block)
    assert hot_counts == (25_600, 6_400)
    cold = cold_layout([10, 900])
    assert cold_slot_counts(hot, cold, [10, 900], 10 * (256 * 10 + 64 * 900), per_block) == (
        2_560,
        640,
    )


def test_a_cold_level_that_is_too_small_says_what_it_needs() -> None:
    hot = hot_layout([_layer(0, 100)])
    with pytest.raises(ConfigurationError) as raised:
        cold_slot_counts(hot, cold_layout([100]), [4196], 4195, 16)
    assert str(raised.value) == (
        "a cold tier of 4,195 bytes can not hold one page of each kind; "
        "give it at least 4,196 bytes, or leave the tier out"
    )
